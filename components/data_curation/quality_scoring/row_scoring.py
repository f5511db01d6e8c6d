"""Scores the kept rows with each configured scorer in turn, and rejects the rows beyond a threshold.

A scorer scores only rows that the earlier scorers keep, so the cheapest scorer comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.reject_reasons import LOW_QUALITY_SCORE, Rejection
from components.data_curation.prepared_chunks import PreparedRows
from components.data_curation.quality_scoring.linear_classifier import QualityClassifier
from components.data_curation.quality_scoring.llm_judge import LanguageModelJudge
from components.data_curation.quality_scoring.perplexity import PerplexityScorer
from components.data_curation.quality_scoring.scorer_interface import (
    SCORE_DIGITS,
    KeptRows,
    RowScorer,
    ScorerStatistics,
)
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs

if TYPE_CHECKING:
    import numpy as np

    from components.data_curation.row_verdicts import RowVerdicts

META_KEY = "quality_scores"  # in the `meta` of a kept row
# Key for a value that a record already has under META_KEY; a number is appended if the record also has this key.
MOVED_META_KEY = "source_quality_scores"


@dataclass(frozen=True)
class QualityScores:
    """The scores of all scorers: per scorer the score of every row (NaN for none), and the statistics."""

    by_scorer: dict[str, np.ndarray] = field(default_factory=dict)
    statistics: list[ScorerStatistics] = field(default_factory=list)

    def get_scores(self, row: int) -> dict[str, float]:
        """Return the scores of a row by scorer, without scorers that gave it no score."""
        values = ((name, float(scores[row])) for name, scores in self.by_scorer.items())
        return {name: value for name, value in values if value == value}

    def add_to_meta(self, meta: dict[str, Any], row: int) -> dict[str, Any]:
        """Return a row's meta with its scores; a record's own value under the same key moves to another key."""
        if not (scores := self.get_scores(row)):
            return meta
        moved = dict(meta)
        if META_KEY in moved:
            name, number = MOVED_META_KEY, 1
            while name in moved:
                number += 1
                name = f"{MOVED_META_KEY}_{number}"
            moved[name] = moved.pop(META_KEY)
        return {**moved, META_KEY: scores}


def build_scorers(
    config: DataCurationConfig, inputs: ScoringInputs, seed: int, reporter: Reporter, state: Path | None = None
) -> Sequence[RowScorer]:
    """Return the configured scorers, after all checks that need no rows.

    Args:
        config: the stage's configuration.
        inputs: the files and the model of the scorers.
        seed: the seed of the classifier.
        reporter: receives progress and notes.
        state: the stage's folder of unfinished work, for the answers of the judge; None to store none.

    Raises:
        InputError: a class has too few examples.
        ConfigurationError, EngineMissingError, ArtifactDamagedError: the model of the perplexity or the judge is not
            available.
    """
    settings = config.quality_scores
    scorers: list[RowScorer] = []
    if settings.classifier.is_enabled:
        scorers.append(QualityClassifier.train(inputs.good, inputs.bad, config, seed, reporter))
    if settings.perplexity.is_enabled:
        sha256 = inputs.model.content_sha256 if inputs.model else ""
        scorers.append(PerplexityScorer.open(settings.perplexity, sha256, reporter))
    if settings.judge.is_enabled:
        reporter.step("checking the judge")
        scorers.append(LanguageModelJudge.open(settings.judge, state))
    return scorers


def score_rows(
    prepared: PreparedRows, verdicts: RowVerdicts, scorers: Sequence[RowScorer], reporter: Reporter
) -> tuple[RowVerdicts, QualityScores]:
    """Score the kept rows; return the verdicts with the rejections by score, and the scores."""
    import numpy as np

    result = QualityScores()
    for scorer in scorers:
        rows = KeptRows(prepared, np.array([bool(split) for split in verdicts.splits], dtype=bool))
        reporter.step(f"scoring rows: {scorer.name}")
        found = scorer.score(rows, reporter)
        scores = np.round(found.scores, SCORE_DIGITS)  # the stored score decides
        is_scored = rows.is_kept & ~np.isnan(scores)
        rejections = {
            row: rejection
            for row in np.flatnonzero(is_scored).tolist()
            if (rejection := _find_rejection(scorer, float(scores[row])))
        }
        verdicts = verdicts.reject(rejections)
        result.by_scorer[scorer.name] = scores
        statistics = ScorerStatistics(
            scorer,
            scores[is_scored],
            len(rejections),
            rows.count - int(is_scored.sum()),
            found.figures,
            found.notes,
        )
        result.statistics.append(statistics)
        dropped = (
            f"{len(rejections):,} rejected" if (scorer.minimum, scorer.maximum) != (None, None) else "no threshold"
        )
        reporter.note(f"quality scores, {scorer.name}: {format_count(int(is_scored.sum()), 'row')} scored, {dropped}")
    return verdicts, result


def _find_rejection(scorer: RowScorer, score: float) -> Rejection | None:
    if scorer.minimum is not None and score < scorer.minimum:
        return LOW_QUALITY_SCORE.reject(f"{scorer.name} score {score:.10g}; expected {scorer.minimum:.10g} or more")
    if scorer.maximum is not None and score > scorer.maximum:
        return LOW_QUALITY_SCORE.reject(f"{scorer.name} score {score:.10g}; expected {scorer.maximum:.10g} or less")
    return None
