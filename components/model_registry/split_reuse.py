"""Correction for the reuse of a test split: the confidence with which each further candidate has to pass the gate.

A candidate that fails on a test split spends a part of the split's error probability. The parts are fixed in advance
(alpha spending, Lan & DeMets, Biometrika 70, 1983); a candidate that passes spends nothing (fallback procedure, Wiens,
Pharmaceutical Statistics 2, 2003).
"""

# The correction is made at registration and checked at promotion: only the registry knows all candidates of a split. The
# evaluation stays a function of its inputs, so a repeated run finds it in the cache.

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.reporters import Reporter
from components.model_registry import model_versions
from components.model_registry.model_versions import TAG_PREFIX

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# The first candidate has the rule's whole error probability. All later candidates share 0.4 of it: at 95% confidence, the
# probability of an acceptance by error is at most 7% over the life of a split.
REUSE_BUDGET = 0.4
# Below this part of the error probability, a split is worn out: after four failed candidates.
WORN_OUT_FACTOR = 0.02
EVALUATION_TAG = f"{TAG_PREFIX}split_evaluation"  # the evaluation of the three other tags
SPLITS_TAG = f"{TAG_PREFIX}split_items"  # digests of the items of each task of the gate
FAILURES_TAG = f"{TAG_PREFIX}split_failures"  # candidates that failed on the split before this version
RESULT_TAG = f"{TAG_PREFIX}split_result"
PASSED, FAILED = "passed", "failed"


def compute_level_factor(failures: int) -> float:
    """Return the part of a rule's error probability that is left for a candidate after `failures` failed candidates.

    The parts of the candidates after the first are REUSE_BUDGET × 6 / (π k)², whose sum is REUSE_BUDGET.
    """
    return 1.0 if failures == 0 else REUSE_BUDGET * 6 / (math.pi * failures) ** 2


def is_worn_out(failures: int) -> bool:
    """Return whether a test split with this number of failed candidates should be replaced."""
    return compute_level_factor(failures) < WORN_OUT_FACTOR


def record_candidate(client: MlflowClient, version: ModelVersion, evaluation: Artifact, reporter: Reporter) -> bool:
    """Count a registered version on its test split, and return whether it passed. Idempotent for an evaluation."""
    measured = _read_evaluation(evaluation)
    if measured is None or version.tags.get(EVALUATION_TAG) == evaluation.sha256:
        return bool(version.tags.get(RESULT_TAG) != FAILED)
    splits, error, accepted = measured
    failures = max(
        (
            int(other.tags.get(FAILURES_TAG, 0)) + (other.tags.get(RESULT_TAG) == FAILED)
            for other in model_versions.search_versions(client, version.name)
            if other.version != version.version and set(other.tags.get(SPLITS_TAG, "").split()) & set(splits)
        ),
        default=0,
    )
    passed = accepted and error <= compute_level_factor(failures)
    tags = {
        SPLITS_TAG: " ".join(splits),
        FAILURES_TAG: str(failures),
        RESULT_TAG: PASSED if passed else FAILED,
        EVALUATION_TAG: evaluation.sha256,
    }
    model_versions.set_tags(client, version, tags)
    if accepted and not passed:
        reporter.note(f"{version.name} version {version.version}: {_describe_objection(failures)}")
    if is_worn_out(failures + (not passed)):
        reporter.note(
            f"the test split is worn out: {failures + (not passed)} candidates failed on it. Add new test rows: a "
            f"further candidate has to pass with {compute_level_factor(failures + (not passed)):.2%} of the error "
            "probability of each rule"
        )
    return passed


def list_objections(version: ModelVersion, evaluation: Artifact) -> list[str]:
    """Return the objection, as a clause, to a version that passes the gate, but not with the required confidence."""
    measured, failures = _read_evaluation(evaluation), int(version.tags.get(FAILURES_TAG, 0))
    if measured is None or measured[1] <= compute_level_factor(failures):
        return []
    return [_describe_objection(failures)] if measured[2] else []


def _describe_objection(failures: int) -> str:
    return (
        f"{failures} earlier {'candidate' if failures == 1 else 'candidates'} failed on its test split, so its rules have"
        f" to hold with {compute_level_factor(failures):.2%} of their error probability, and one does not"
    )


def _read_evaluation(evaluation: Artifact) -> tuple[list[str], float, bool] | None:
    """Return the splits, the largest p-value as a part of its rule's error probability, and whether the gate accepts.

    None for an evaluation of an earlier version, which records no p-values, and for an unchanged candidate.
    """
    try:
        content = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    rules = [rule for rule in content.get("rules", []) if rule.get("acceptance_p") is not None]
    tasks = {rule["metric"].partition(".")[0] for rule in rules}
    splits = sorted(
        digest
        for name, task in content.get("tasks", {}).items()
        if name in tasks and (digest := task.get("items_sha256"))
    )
    if not splits or content.get("verdict") == "unchanged":
        return None
    error = max(rule["acceptance_p"] / (1 - rule["confidence"]) for rule in rules)
    return splits, error, content["verdict"] == "accepted"
