"""Explanation of one answer: words of the prompt, and the training rows with their origins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.row_comparison.words import list_texts
from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_versioning.config import DataVersioningConfig
from components.evaluation.transformers_engine import TransformersEngine
from components.model_registry.stage import RegisteredModel
from pipelines.capture.tombstones import Tombstone
from pipelines.explanation import row_gradients, row_influence, row_origins
from pipelines.explanation.explained_answer import ExplainedAnswer, Question, build_answer
from pipelines.explanation.row_influence import RowInfluence, ScoredRow
from pipelines.explanation.row_origins import Origins
from pipelines.explanation.text_units import UnitName
from pipelines.explanation.word_attribution import WordAttribution, attribute_words

BATCH_TOKENS = 2048  # the default of evaluation.batch_tokens
MIN_RANDOM_ROWS = 20  # fewer cannot show a share of 5%


@dataclass(frozen=True)
class ExplanationSettings:
    """Settings of an explanation.

    Attributes:
        unit: Words or sentences.
        max_tokens: Maximum length of a generated answer in tokens.
        max_rows: Maximum number of training rows to score; 0 for all.
        top: Number of training rows in the result.
        seed: Seed of the random rankings and rows.
    """

    unit: UnitName = "word"
    max_tokens: int = 64
    max_rows: int = 500
    top: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Explanation:
    """An explained answer.

    Attributes:
        answer: The answer with its question.
        words: Scores of the words.
        unit: Words or sentences.
        model: The model.
        version: Its registered version, or None.
        dataset: The training data, or None.
        influence: Scores of training rows, or None without training data.
        origins: Origins of these rows.
        erased: Erased subjects of captured traffic; None if no capture file was read.
        warnings: Limits of this explanation.
    """

    answer: ExplainedAnswer
    words: WordAttribution
    unit: UnitName
    model: LoadableModel
    version: RegisteredModel | None
    dataset: Artifact | None = None
    influence: RowInfluence | None = None
    origins: Origins = field(default_factory=Origins)
    erased: Mapping[str, Tombstone] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The methods in one sentence."""
        words = f"leave one {self.unit} out, in nats of the answer's log-probability"
        return f"{words}; {self.influence.method}" if self.influence else words

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline explain`."""
        version = {"name": self.version.name, "version": self.version.version} if self.version else None
        dataset = {"sha256": self.dataset.sha256, "revision": self.origins.revision} if self.dataset else None
        return {
            "answer": self.answer.text,
            "tokens": self.words.list_tokens(),
            "training_rows": [self.describe_row(row) for row in self.influence.rows] if self.influence else [],
            "method": self.method,
            "unit": self.unit,
            "logprob": round(self.words.logprob, 6),
            "generated": self.answer.is_generated,
            "complete": self.answer.is_complete,
            "faithfulness": self.words.list_effects(),
            "model": {"sha256": self.model.sha256, "base_model": self.model.base.name, "version": version},
            "dataset": dataset,
            "cost": self.influence.describe_cost() if self.influence else None,
            "warnings": self.warnings,
        }

    def describe_row(self, scored: ScoredRow) -> dict[str, Any]:
        """Return a training row for JSON, with its origin and its text; the text of an erased subject is withheld."""
        row, meta = scored.row, read_meta(scored.row)
        is_erased = self.erased is not None and read_subject(meta) in self.erased
        return {
            "id": row["id"],
            "score": round(scored.score, 6),
            "random_share": None if scored.random_share is None else round(scored.random_share, 4),
            "lexical": round(scored.lexical, 4),
            "lexical_rank": scored.lexical_rank,
            "text": "" if is_erased else "\n".join(list_texts(row)),
            "source": row.get("source") or "",
            "line": self.origins.lines.get(row["id"]),
            "meta": meta,
            "revision": self.origins.revision,
            "erased": is_erased,
        }


def read_meta(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the row's source had beside its text; an empty dict if it had none."""
    try:
        meta = json.loads(row.get("meta") or "{}")
    except (TypeError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def read_subject(meta: Mapping[str, Any]) -> str | None:
    """Return the keyed hash of a captured row's user, or None."""
    captured = meta.get("meta")  # curation stores the field `meta` of a captured row below the key `meta`
    subject = (captured if isinstance(captured, dict) else meta).get("subject")
    return subject if isinstance(subject, str) else None


def explain(
    model: LoadableModel,
    version: RegisteredModel | None,
    question: Question,
    given: str | None,
    dataset: Artifact | None,
    settings: ExplanationSettings,
    work: Workdir,
    config: DataVersioningConfig,
    reporter: Reporter,
    *,
    erased: Mapping[str, Tombstone] | None = None,
) -> Explanation:
    """Explain an answer.

    Args:
        model: The model.
        version: Its registered version, or None.
        question: The conversation.
        given: The answer to explain; None to generate one.
        dataset: The dataset that the model was trained on; None to explain the words only.
        settings: Settings.
        work: The workdir.
        config: Settings of the data repository.
        reporter: Receives progress.
        erased: Erased subjects of captured traffic, whose rows are marked; None if no capture file was read.

    Raises:
        InputError: prompt or answer are empty or too long, or the rows do not suit the model's objective.
        ConfigurationError: training rows of this model are not supported, or exceed the free memory.
        BusyError: another command computes the gradients of this model.
    """
    if dataset is not None:
        row_gradients.check_support(model)
    device = model_loading.prepare_torch(settings.seed)
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    reporter.step("loading the model")
    # Trainable, because merging the adapter would remove the parameters whose gradients represent a row.
    loaded = model_loading.load_model(model, trainable=True).to(device).eval()
    engine = TransformersEngine(loaded, tokenizer, BATCH_TOKENS)
    answer = build_answer(engine, question, given, settings.max_tokens, reporter)
    words = attribute_words(engine, loaded, answer, settings.unit, settings.seed, reporter)
    warnings = [] if answer.is_complete else [f"the answer reached {settings.max_tokens} tokens and is cut off"]
    if dataset is None:
        return Explanation(answer, words, settings.unit, model, version, warnings=warnings)
    influence = row_influence.find_influential_rows(
        model,
        loaded,
        tokenizer,
        answer,
        dataset,
        limit=settings.max_rows,
        top=settings.top,
        seed=settings.seed,
        state=work.state,
        reporter=reporter,
    )
    warnings += describe_limits(influence, model)
    if erased is None and any(read_subject(read_meta(scored.row)) for scored in influence.rows):
        warnings.append(
            "rows come from captured traffic, but no capture file was read; add --capture to mark erased subjects"
        )
    ids = [scored.row["id"] for scored in influence.rows]
    origins = row_origins.find_origins(ids, dataset, config, work, reporter)
    warnings += origins.notes
    return Explanation(answer, words, settings.unit, model, version, dataset, influence, origins, erased, warnings)


def describe_limits(influence: RowInfluence, model: LoadableModel) -> list[str]:
    """Return the limits of the row scores as sentences."""
    limits = []
    if model.artifact:
        limits.append("only the published weights were used; the other checkpoints of the training run were deleted")
    if influence.random_rows < MIN_RANDOM_ROWS:
        limits.append(
            f"too few random rows to recognize an unusual score: {influence.random_rows:,}; expected at least {MIN_RANDOM_ROWS}"
        )
    if influence.candidates < influence.total:
        limits.append(f"scored {influence.candidates:,} of {format_count(influence.total, 'training row')}")
    if influence.without_answer:
        limits.append(f"no score for {format_count(influence.without_answer, 'selected row')} without trained tokens")
    summary = model.artifact.manifest.summary if model.artifact else {}
    if 0 < summary.get("epochs", 1) < 1:
        limits.append(
            f"training used {summary['epochs']:.0%} of the rows, so the model may not have seen some of the scored rows"
        )
    if model.adapter is None:
        limits.append(
            "the model has no separate adapter; rows are represented by gradients of the last layers' matrices"
        )
    return limits
