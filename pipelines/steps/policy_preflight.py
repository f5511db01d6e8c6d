"""Comparison of a configuration with the release policy of its registered model, before the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from components.common.models.model_loading import LocalBaseModel
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.evaluation.tasks import file_digests
from components.evaluation.tasks.generation import GENERATION_METRICS, PASS_AT
from components.evaluation.tasks.judge import Judge
from components.evaluation.tasks.task_preflight import TaskWorkload
from components.evaluation.tasks.task_registry import TASK_KINDS
from components.fine_tuning import model_card
from components.model_registry import policy_checks, policy_report, signers, signing_keys, sigstore_signing
from components.model_registry.release_policy import Policy
from pipelines.config.customization_config import Customization

Json = dict[str, Any]
HINT = "List the requirements with `tuneline policy show {name}`, and meet them in the configuration."


def check_metrics(policy: Policy, source: str) -> None:
    """Raise ConfigurationError if no evaluation has a task or a metric of the policy; `source` is the policy's file."""
    kinds = {task.name: task.kind for task in policy.tasks if task.kind}
    for number, task in enumerate(policy.tasks):
        if task.kind and task.kind not in TASK_KINDS:
            raise _refuse(source, f"tasks.{number}.kind", task.kind, f"one of {', '.join(sorted(TASK_KINDS))}")
        if task.files_sha256 and task.kind == "held_out":
            expected = "an empty list, because held_out reads the dataset"
            raise _refuse(source, f"tasks.{number}.files_sha256", task.files_sha256[0], expected)
        if task.min_kappa is not None and task.kind not in (None, Judge.model_fields["kind"].default):
            raise _refuse(source, f"tasks.{number}.min_kappa", f"{task.min_kappa:g}", "null, or a task of kind judge")
    metrics = [(f"rules.{number}.metric", rule.metric) for number, rule in enumerate(policy.rules)]
    for key, name in [*metrics, *((f"max_loss.{name}", name) for name in policy.max_loss)]:
        task_name, _, metric = name.partition(".")
        known = TASK_KINDS[kinds[task_name]].task.METRICS if task_name in kinds else {}
        if known and metric not in known and not (known is GENERATION_METRICS and _is_pass_at(metric)):
            raise _refuse(source, key, name, f"a metric of {kinds[task_name]}: {', '.join(sorted(known))}")


def _is_pass_at(name: str) -> bool:
    metric, _, k = name.partition(PASS_AT)
    return metric in GENERATION_METRICS and GENERATION_METRICS[metric].is_binary and k.isdecimal() and int(k) > 0


def _refuse(source: str, key: str, value: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{source}: {key}: found {value!r}; expected {expected}",
        hint="Correct the file; mlflow/promotion-policy.yaml is an example.",
    )


def list_objections(config: Customization, base: LocalBaseModel | None, workloads: Sequence[TaskWorkload]) -> list[str]:
    """Return the requirements of the recorded policy that no version with this configuration can meet, as clauses.

    Args:
        base: the base model; None if it is not on this machine, so that its licence is unknown.
        workloads: the tasks whose number of items is known.

    Raises:
        ConfigurationError, EngineMissingError: the signer cannot be used, so the registration would fail.
    """
    signers.load_signer()
    in_force = policy_report.find_policy_in_force(config.model_registry.name)
    if in_force is None or not in_force.policy.has_requirements:
        return []
    results = policy_checks.check_content(in_force, _predict_content(config, workloads, in_force.policy))
    if in_force.policy.licences and base is not None:
        licence = model_card.find_base_licence(config.fine_tuning, base)
        found = {*policy_checks.list_imported_licences([base.as_input()]), licence.lower()} - {model_card.UNSTATED}
        results.append(policy_checks.check_licences(in_force, sorted(found)))
    objections = [result.reason for result in results if not result.met]
    if in_force.policy.signatures and not signers.is_signing():
        names = f"{signing_keys.KEY_VARIABLE} nor {sigstore_signing.SIGSTORE_VARIABLE}"
        objections.append(f"{in_force.title} requires signatures; neither {names} is set")
    return objections


def _predict_content(config: Customization, workloads: Sequence[TaskWorkload], policy: Policy) -> Json:
    """Return the parts of evaluation.json that the configuration determines.

    Unknown numbers of items and agreements of judges are infinite, and the digests of the items are those of the policy.
    """
    evaluation = config.evaluation
    items = {workload.settings.name: workload.items for workload in workloads}
    limits = {task.name: items.get(task.name) or task.max_items or math.inf for task in evaluation.tasks}
    digests = {task.name: task.items_sha256 for task in policy.tasks}
    files = {task.name: sorted(file_digests.digest_task_files([task]).values()) for task in evaluation.tasks}
    calibrated = [task.name for task in evaluation.tasks if isinstance(task, Judge) and task.calibration]
    return {
        "tasks": {name: {"items": limit, "items_sha256": digests.get(name)} for name, limit in limits.items()},
        "calibration": {name: {"kappa_bound": math.inf} for name in calibrated},
        "measured": {
            "tasks": {task.name: task.kind for task in evaluation.tasks},
            "task_files": files,
            "settings": evaluation.model_dump(mode="json", include={"gate", "min_items"}),
        },
    }


def check_policy(
    config: Customization, base: LocalBaseModel | None, workloads: Sequence[TaskWorkload], reporter: Reporter
) -> None:
    """Report the requirements of the recorded policy that the run cannot meet.

    Raises:
        ConfigurationError: the run would promote its model, which the policy will refuse.
    """
    objections = list_objections(config, base, workloads)
    if objections and config.model_registry.auto_promote:
        raise ConfigurationError(
            f"model_registry.auto_promote is true, but the model cannot be promoted: {' and '.join(objections)}",
            hint=HINT.format(name=config.model_registry.name),
        )
    for objection in objections:
        reporter.note(format_warning(objection))


def format_warning(objection: str) -> str:
    """Return the warning about a requirement that the run cannot meet."""
    return f"the model will not be promoted: {objection}"
