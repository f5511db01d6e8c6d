"""Pairs of a client's answer and the shadow model's answer to the same request, scored with the client's correction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.common.answer_metrics import text_similarity
from pipelines.capture import row_selection, training_rows
from pipelines.capture.row_selection import Feedback, RowFilter
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import Row
from pipelines.capture.traffic_rows import FAILED, is_shadow
from pipelines.retraining import pairwise_test
from pipelines.retraining.triggers import read_time

CHRF_MAXIMUM = 100.0


@dataclass(frozen=True)
class AnswerSource:
    """The model that gave an answer: its served name, its registered version and its content digest."""

    model: str
    version: str
    model_sha256: str


@dataclass(frozen=True)
class ShadowPair:
    """One request with two answers.

    Attributes:
        client: source of the client's answer.
        shadow: source of the shadow answer.
        timestamp: Unix time of the request.
        group: hash of the subject; without a subject, the key of the conversation.
        difference: score of the shadow answer minus that of the client's answer, from -1 to 1.
    """

    client: AnswerSource
    shadow: AnswerSource
    timestamp: int
    group: str
    difference: float


@dataclass(frozen=True)
class ShadowPairs:
    """The pairs of the captured traffic in the order of their corrections, and the number of all shadow answers."""

    shadow_answers: int
    pairs: list[ShadowPair]


def read_pairs(
    settings: CaptureSettings, feedback: Feedback, model: str = "", *, only_sampled: bool = False
) -> ShadowPairs:
    """Return the pairs whose client answer has a correction. Call it under the lock of the captured traffic.

    Args:
        settings: the capture file.
        feedback: the feedback that counts by the answer's id.
        model: name of the model that answered the clients; "": all models.
        only_sampled: leave out corrections of answers that were not drawn at random.
    """
    corrected = {
        name: line
        for name, line in feedback.items()
        if line.get("correction") and (line.get(training_rows.SAMPLED) or not only_sampled)
    }
    answers: dict[str, Row] = {}
    shadows: dict[str, Row] = {}
    count = 0
    for row in row_selection.read_rows(settings, RowFilter(model=model, with_shadows=True), feedback):
        count += is_shadow(row)
        answer_id = row["tuneline"].get("shadow_of") or row["response"]["id"]
        if answer_id in corrected:
            (shadows if is_shadow(row) else answers)[answer_id] = row
    pairs = []
    # A correction completes a pair, so its time does not depend on the scores of other pairs.
    for answer_id in sorted(answers.keys() & shadows.keys(), key=lambda each: (read_time(corrected[each]), each)):
        row, shadow, line = answers[answer_id], shadows[answer_id], corrected[answer_id]
        rows = training_rows.build_training_rows(row, line, include_unrated=False)
        if rows.conversation is not None:
            score = _score(shadow, line["correction"]) - _score(row, line["correction"])
            pairs.append(ShadowPair(_get_source(row), _get_source(shadow), row["timestamp"], rows.group, score))
    return ShadowPairs(count, pairs)


def _score(row: Row, correction: str) -> float:
    """Return the chrF with the correction, from 0 to 1; 0 for a failed answer."""
    if row["tuneline"]["state"] == FAILED:
        return 0.0
    return text_similarity.chrf(row_selection.get_answer(row), [correction]) / CHRF_MAXIMUM


def _get_source(row: Row) -> AnswerSource:
    facts = row["tuneline"]
    return AnswerSource(facts["model"], facts["version"], facts.get("model_sha256") or "")


def select_first_of_group(pairs: Iterable[ShadowPair]) -> dict[str, ShadowPair]:
    """Return the first pair of each group; the later answers of a subject resemble it."""
    first: dict[str, ShadowPair] = {}
    for pair in pairs:
        first.setdefault(pair.group, pair)
    return first


def compare_versions(found: ShadowPairs, *, max_loss: float) -> list[dict[str, Any]]:
    """Test each shadow version against each version that answered the clients, one pair per subject.

    Returns:
        A list of {"client", "shadow", "corrected", "comparison"}.
    """
    by_sources: Mapping[tuple[AnswerSource, AnswerSource], list[ShadowPair]] = defaultdict(list)
    for pair in found.pairs:
        by_sources[pair.client, pair.shadow].append(pair)
    return [
        {
            "client": asdict(client),
            "shadow": asdict(shadow),
            "corrected": len(pairs),
            "comparison": asdict(
                pairwise_test.compare(
                    [pair.difference for pair in select_first_of_group(pairs).values()], max_loss=max_loss
                )
            ),
        }
        for (client, shadow), pairs in by_sources.items()
    ]
