"""Correction for the reuse of a test split: the confidence with which each further candidate has to pass the gate.

A candidate that fails on a test split spends a part of the split's error probability. The parts are fixed in advance
(alpha spending, Lan & DeMets, Biometrika 70, 1983); a candidate that passes spends nothing (fallback procedure, Wiens,
Pharmaceutical Statistics 2, 2003).
"""

# The correction is made at registration and checked at promotion: only the registry knows all candidates of a split. The
# evaluation stays a function of its inputs, so a repeated run finds it in the cache. The count is a matter of the sealed
# history: tags of versions can be edited, and versions can be deleted.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import Artifact
from components.common.gate_rules import SUITE_PREFIX
from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.common.runtime.user_name import get_user_name
from components.model_registry import alias_moves, evidence, model_versions, registry_history
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX
from components.model_registry.registry_history import DONE, Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# The first candidate has the rule's whole error probability. All later candidates share 0.4 of it: at 95% confidence, the
# probability of an acceptance by error is at most 7% over the life of a split.
REUSE_BUDGET = 0.4
# Below this part of the error probability, a split is worn out: after four failed candidates.
WORN_OUT_FACTOR = 0.02
EVALUATION_TAG = f"{TAG_PREFIX}split_evaluation"  # the evaluation of the two other tags
FAILURES_TAG = f"{TAG_PREFIX}split_failures"  # candidates that failed on the split before this version
RESULT_TAG = f"{TAG_PREFIX}split_result"
PASSED, FAILED = "passed", "failed"
SPLIT_PHRASE = " on test split "  # between result and digests in the reason of a trial


@dataclass(frozen=True)
class Measurement:
    """The result of an evaluation for the correction.

    Attributes:
        splits: Digests of the items of each task of the gate.
        error_share: Largest p-value of a rule, as a part of the rule's error probability.
        is_accepted: Whether the gate accepts the candidate.
    """

    splits: list[str]
    error_share: float
    is_accepted: bool

    def passes(self, failures: int) -> bool:
        """Return whether the candidate passes after a number of failed candidates."""
        return self.is_accepted and (not failures or self.error_share <= compute_level_factor(failures))


def compute_level_factor(failures: int) -> float:
    """Return the part of a rule's error probability that is left for a candidate after `failures` failed candidates.

    The parts of the candidates after the first are REUSE_BUDGET × 6 / (π k)², whose sum is REUSE_BUDGET.
    """
    return 1.0 if failures == 0 else REUSE_BUDGET * 6 / (math.pi * failures) ** 2


def is_worn_out(failures: int) -> bool:
    """Return whether a test split with this number of failed candidates should be replaced."""
    return compute_level_factor(failures) < WORN_OUT_FACTOR


def record_candidate(client: MlflowClient, version: ModelVersion, evaluation: Artifact, reporter: Reporter) -> bool:
    """Count a registered version on its test split, and return whether it passed. Idempotent for an evaluation.

    The history gets an entry if the version fails, or if it passes after other candidates failed.
    """
    try:
        measured = _read_measurement(evaluation)
    except ValueError:  # an objection to a promotion
        measured = None
    if measured is None:
        return bool(version.tags.get(RESULT_TAG) != FAILED)
    entries, number = registry_history.read(client, version.name), str(version.version)
    is_repeated = version.tags.get(EVALUATION_TAG) == evaluation.sha256
    failures = count_failures(entries, number, evaluation.sha256, measured.splits, is_repeated=is_repeated)
    passed = measured.passes(failures)
    result = PASSED if passed else FAILED
    if _find_trial(entries, number, evaluation.sha256) is None and (failures or not passed):
        intent = Entry(
            kind="trial",
            to=number,
            by=get_user_name(),
            digest=version.tags.get(MODEL_SHA256_TAG, ""),
            evaluation=evaluation.sha256,
            reason=f"{result}{SPLIT_PHRASE}{' '.join(measured.splits)}",
        )
        alias_moves.move_alias(client, version.name, intent)
    tags = {FAILURES_TAG: str(failures), RESULT_TAG: result, EVALUATION_TAG: evaluation.sha256}
    model_versions.set_tags(client, version, tags)
    if measured.is_accepted and not passed:
        reporter.note(f"{version.name} version {version.version}: {_describe_objection(failures)}")
    if is_worn_out(failures + (not passed)):
        reporter.note(
            f"the test split was reused too often: {format_count(failures + (not passed), 'candidate')} failed on "
            f"it. The rules of the next candidate must hold with {compute_level_factor(failures + (not passed)):.2%} "
            "of their error probability. Add new test rows"
        )
    return passed


def list_objections(version: ModelVersion, evaluation: Artifact) -> list[str]:
    """Return the objection, as a clause, to a version that passes the gate, but not with the required confidence."""
    try:
        measured = _read_measurement(evaluation)
    except ValueError as error:
        return [f"its evaluation cannot be read ({error})"]
    if measured is None or not measured.is_accepted:
        return []
    with model_versions.registry_client() as client:
        entries = registry_history.read(client, version.name)
    failures = count_failures(entries, str(version.version), evaluation.sha256, measured.splits)
    return [] if measured.passes(failures) else [_describe_objection(failures)]


def count_failures(
    entries: Sequence[Entry], version: str, evaluation: str, splits: Sequence[str], *, is_repeated: bool = True
) -> int:
    """Return the number of evaluations that failed on one of the splits before an evaluation of a version.

    Earlier evaluations of the same version count. An edited entry counts as a failure on every split.

    Args:
        entries: The history, oldest first.
        version: Number of the version.
        evaluation: Digest of its evaluation.
        splits: Digests of the items of each task of the gate.
        is_repeated: Whether the evaluation was counted before. Later failures of other versions then do not count.
    """
    own = _find_trial(entries, version, evaluation)
    if own is None and is_repeated:  # it passed as long as no candidate had failed, or the history is incomplete
        own = next((entry for entry in entries if entry.kind == "register" and entry.to == version), None)
    edited = registry_history.list_edited(entries)
    failed: set[object] = set()
    for entry in entries:
        if not (entry.kind == "trial" and entry.state == DONE) or entry.evaluation == evaluation:
            continue
        result, _, digests = entry.reason.partition(SPLIT_PHRASE)
        if own and entry.number > own.number and entry.to != version:
            continue
        if entry in edited:
            failed.add(entry.number)
        elif result == FAILED and set(digests.split()) & set(splits):
            failed.add(entry.evaluation)
    return len(failed)


def _find_trial(entries: Sequence[Entry], version: str, evaluation: str) -> Entry | None:
    wanted = ("trial", DONE, version, evaluation)
    return next((entry for entry in entries if (entry.kind, entry.state, entry.to, entry.evaluation) == wanted), None)


def _describe_objection(failures: int) -> str:
    return (
        f"{failures} earlier {'candidate' if failures == 1 else 'candidates'} failed on its test split, so its rules must"
        f" hold with {compute_level_factor(failures):.2%} of their error probability, and at least one rule does not"
    )


def _read_measurement(evaluation: Artifact) -> Measurement | None:
    """Return the result of an evaluation.

    None for an evaluation of an earlier version of tuneline, which records no p-values, and for an unchanged candidate.

    Raises:
        ValueError: The evaluation has an invalid field.
    """
    content = evidence.read_content(evaluation)
    try:
        # The suite's items are the same for all datasets, and its rules only exclude regressions.
        rules = [
            rule
            for rule in content.get("rules", [])
            if rule.get("acceptance_p") is not None and not str(rule["metric"]).startswith(SUITE_PREFIX)
        ]
        names = {str(rule["metric"]).partition(".")[0] for rule in rules}
        tasks = content.get("tasks", {}).items()
        splits = sorted({str(task["items_sha256"]) for name, task in tasks if name in names and task["items_sha256"]})
        if not splits or content["verdict"] == "unchanged":
            return None
        return Measurement(splits, max(map(_compute_error_share, rules)), content["verdict"] == "accepted")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _compute_error_share(rule: dict[str, Any]) -> float:
    p_value, confidence = float(rule["acceptance_p"]), float(rule["confidence"])
    if not (0 <= p_value <= 1 and 0 < confidence < 1):
        raise ValueError(f"acceptance_p {p_value} and confidence {confidence}; expected probabilities")
    return p_value / (1 - confidence)
