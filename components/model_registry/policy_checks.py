"""Comparison of a version with the release policy: a result for each requirement, with the reason if it is not met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel

from components.common import regression_suite
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.gate_rules import SUITE_PREFIX
from components.common.models import licences, training_lineage
from components.common.runtime.counts import format_count
from components.common.runtime.errors import TEMPORARY_ERRORS, TunelineError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.model_registry import evidence, registry_history, rule_results, rule_strictness
from components.model_registry.registry_history import DONE, Entry
from components.model_registry.release_policy import Policy, RequiredTask

Json = dict[str, Any]
CLOCK_TOLERANCE = timedelta(minutes=5)  # between the machines that register and promote
DATING_KINDS = ("register", "evaluation", "trial", "promote", "approval")  # entries that name an evaluation


@dataclass(frozen=True)
class PolicyInForce:
    """The policy that applies to a model.

    Attributes:
        policy: the policy.
        number: number of its entry in the history; 0 for the configured policy.
        history: the entries, which date the evaluations.
    """

    policy: Policy
    number: int = 0
    history: Sequence[Entry] = ()

    @property
    def title(self) -> str:
        """The policy in messages."""
        return f"policy entry {self.number}" if self.number else "the configured policy"


class RequirementResult(BaseModel):
    """A requirement of the policy, and whether a version meets it.

    Attributes:
        reason: the objection, as a clause; "" if the requirement is met.
    """

    requirement: str
    met: bool
    reason: str = ""


def check_version(
    in_force: PolicyInForce, evaluation: Artifact, model: Artifact, *, checks_age: bool
) -> list[RequirementResult]:
    """Compare an evaluation and its model with the policy.

    Args:
        checks_age: whether the evaluation's age counts, and whether its suite must be the present one.
    """
    policy = in_force.policy
    # A promoted version does not expire: its suite was that of its time.
    results = check_content(in_force, evidence.read_content(evaluation), checks_suite=checks_age)
    if policy.licences:
        results.append(check_licences(in_force, list_base_licences(model)))
    if policy.max_evaluation_age_days and checks_age:
        requirement = f"evaluation registered within {format_count(policy.max_evaluation_age_days, 'day')}"
        results.append(_build_result(requirement, _check_age(in_force, evaluation.sha256)))
    return results


def check_content(in_force: PolicyInForce, content: Json, *, checks_suite: bool = True) -> list[RequirementResult]:
    """Compare the content of an evaluation.json with the requirements for tasks and rules.

    An evaluation that does not state what it measured has no tasks and no rules.
    """
    content = content if "measured" in content else {"tasks": {}, "measured": {"tasks": {}, "settings": {"gate": []}}}
    policy, title = in_force.policy, in_force.title
    results = [_build_result(_describe_task(task), _check_task(task, content, title)) for task in policy.tasks]
    for rule in policy.rules:
        wanted = rule.model_dump()
        min_items = policy.slice_min_items if rule.slices else None
        objections = evidence.compare_rules(content, [wanted], min_items, source=title)
        results.append(_build_result(f"rule {evidence.describe_rule(wanted)}", " and ".join(objections)))
    if policy.suite and checks_suite:
        results.append(_build_result("regression suite", " and ".join(list_suite_objections(content, title))))
    results += [_build_result(requirement, objection) for requirement, objection in _check_limits(in_force, content)]
    return results


def list_suite_objections(content: Json, source: str) -> list[str]:
    """Return the objections to an evaluation without the regression suite of this version of tuneline.

    Args:
        content: the content of evaluation.json.
        source: the origin of the requirement, which the objections name.
    """
    source = f"the regression suite ({source})"
    measured = content.get("measured", {"tasks": {}})["tasks"]
    if missing := [name for name in regression_suite.TASKS if name not in measured]:
        return [f"{source} requires task {missing[0]}; its evaluation does not include this task"]
    rules = [rule.model_dump() for rule in regression_suite.build_rules()]
    return evidence.compare_rules(content, rules, None, regression_suite.describe_tasks(), source)


def _build_result(requirement: str, objection: str) -> RequirementResult:
    return RequirementResult(requirement=requirement, met=not objection, reason=objection)


def _describe_task(task: RequiredTask) -> str:
    parts = [f"task {task.name}", f"of kind {task.kind}" if task.kind else ""]
    parts.append(f"with items {task.items_sha256[:12]}" if task.items_sha256 else "")
    parts.append(f"on files {', '.join(sha256[:12] for sha256 in task.files_sha256)}" if task.files_sha256 else "")
    parts.append(f"with at least {format_count(task.min_items, 'item')}" if task.min_items else "")
    parts.append(f"with a kappa_bound above {task.min_kappa:g}" if task.min_kappa is not None else "")
    return " ".join(filter(None, parts))


def _check_task(task: RequiredTask, content: Json, title: str) -> str:
    """Return the objection to an evaluation without the task, or with other data."""
    measured, name = content["measured"], task.name
    if name not in measured["tasks"] or name not in content["tasks"]:
        return f"{title} requires task {name}; its evaluation does not include this task"
    kind, items = measured["tasks"][name], content["tasks"][name]
    if task.kind not in (None, kind):
        return f"{title} requires task {name} of kind {task.kind}; its evaluation measured kind {kind}"
    digest = items.get("items_sha256") or ""
    if task.items_sha256 not in (None, digest):
        found = digest[:12] or "unknown items"
        return f"{title} requires task {name} on items {str(task.items_sha256)[:12]}; its evaluation measured {found}"
    read = measured.get("task_files", {}).get(name, [])
    if missing := [sha256[:12] for sha256 in task.files_sha256 if sha256 not in read]:
        return f"{title} requires task {name} on file {missing[0]}; its evaluation did not read this file"
    if task.min_items and items["items"] < task.min_items:
        return f"{title} requires {format_count(task.min_items, 'item')} of task {name}; its evaluation measured {items['items']}"
    return rule_results.find_kappa_problem(content, name, task.min_kappa, title)


def _check_limits(in_force: PolicyInForce, content: Json) -> Iterator[tuple[str, str]]:
    """Yield the requirements for all rules of the gate with the objection, or "" if the requirement is met."""
    policy, title, gate = in_force.policy, in_force.title, content["measured"]["settings"]["gate"]
    # The suite's rules and numbers of items are fixed.
    own = [rule for rule in gate if not str(rule["metric"]).startswith(SUITE_PREFIX)]
    if policy.min_items:
        names = sorted({str(rule["metric"]).partition(".")[0] for rule in own})
        counts = {name: content["tasks"].get(name, {"items": 0})["items"] for name in names}
        few = [f"{count} of {name}" for name, count in counts.items() if count < policy.min_items]
        objection = f"{title} requires {format_count(policy.min_items, 'item')} per task; its evaluation measured {', '.join(few)}"
        yield f"at least {format_count(policy.min_items, 'item')} of each compared task", objection if few else ""
    if policy.confidence:
        low = [
            f"{rule['confidence']:g} for {rule['metric']}"
            for rule in own
            if rule_strictness.get_figure(rule) not in (rule_strictness.SLICES, rule_strictness.EXCESS)
            and rule["confidence"] < policy.confidence
        ]
        objection = f"{title} requires a confidence of {policy.confidence:g}; its evaluation has {', '.join(low)}"
        yield f"confidence of at least {policy.confidence:g}", objection if low else ""
    for metric, limit in policy.max_loss.items():
        losses = [rule["max_loss"] for rule in gate if rule["metric"] == metric and rule.get("max_loss") is not None]
        objection = f"{title} allows a max_loss of {limit:g} of {metric}; its evaluation has {max(losses, default=0):g}"
        yield f"max_loss of {metric} at most {limit:g}", objection if max(losses, default=0) > limit else ""


def check_licences(in_force: PolicyInForce, found: Sequence[str]) -> RequirementResult:
    """Compare the licences of the base model with the allowed ones. A missing licence is not allowed."""
    allowed = in_force.policy.licences or []
    names = ", ".join(allowed)
    other = [licence for licence in found if licence.lower() not in [name.lower() for name in allowed]]
    objection = ""
    if not found:
        objection = f"{in_force.title} allows the licences {names}; the model states no licence of its base model"
    elif other:
        objection = f"{in_force.title} allows the licences {names}; the base model has {', '.join(other)}"
    return _build_result(f"licence of the base model: {' or '.join(allowed)}", objection)


def list_base_licences(model: Artifact) -> list[str]:
    """Return the licences in the model's card and in the records of the imports of its lineage.

    The card alone does not suffice: its author can set the licence with fine_tuning.card.base_licence.
    """
    is_listed = any(file.path == licences.MODEL_CARD_FILENAME for file in model.manifest.files)
    card = licences.read_model_card(model.path).id if is_listed else ""
    return sorted({*([card.lower()] if card else []), *list_imported_licences(model.manifest.inputs)})


def list_imported_licences(inputs: Sequence[ArtifactInput]) -> list[str]:
    """Return the licences that `tuneline models import` recorded for base models, and for those they were tuned from.

    Artifacts that the store lacks have none; the comparison with the training rows reports them.

    Args:
        inputs: inputs of a model.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: the artifact store is not available.
    """
    store, found, seen = Workdir.from_environment().store, set[str](), set[str]()
    pending = list(inputs)
    while pending:
        source = pending.pop()
        if source.kind not in training_lineage.ANCESTOR_KINDS or source.content_sha256 in seen:
            continue
        seen.add(source.content_sha256)
        try:
            manifest = artifact_store.read_manifest(store, source.content_sha256)
        except TEMPORARY_ERRORS:
            raise
        except TunelineError:  # damaged
            continue
        if manifest:
            pending += manifest.inputs
            licence = manifest.summary.get("licence")
            found.add(str(licence.get("id") or "").lower() if isinstance(licence, dict) else "")
    return sorted(found - {""})


def _check_age(in_force: PolicyInForce, evaluation_sha256: str) -> str:
    """Return the objection to an evaluation that is too old, or whose age the history does not show.

    The first entry that names the evaluation dates it, so another registration does not renew it. The present time is not
    before the newest entry, so a clock that was set back does not renew it either.
    """
    days, now = in_force.policy.max_evaluation_age_days or 0, datetime.now(UTC)
    edited = registry_history.list_edited(in_force.history)
    acknowledged = {entry.reason for entry in in_force.history if (entry.kind, entry.state) == ("acknowledged", DONE)}
    for entry in edited:
        if registry_history.describe_edit(entry.number) not in acknowledged:
            return f"entry {entry.number} of the history was edited, so the age of its evaluation is unknown"
    closed = [entry for entry in in_force.history if entry.state == DONE and entry not in edited]
    times = {entry.number: datetime.fromisoformat(entry.at) for entry in closed if entry.at}
    for number, time in times.items():
        if time > now + CLOCK_TOLERANCE:
            return (
                f"entry {number} of the history is dated {time:%Y-%m-%d %H:%M} UTC, in the future, so the age of "
                "its evaluation is unknown"
            )
    dates = [times[e.number] for e in closed if e.number in times and _names_evaluation(e, evaluation_sha256)]
    if not dates:
        return f"{in_force.title} limits the age of the evaluation; the history does not show its registration"
    if now - min(dates) > timedelta(days=days):
        return (
            f"{in_force.title} allows evaluations of at most {format_count(days, 'day')}; its evaluation was "
            f"registered on {min(dates):%Y-%m-%d}"
        )
    return ""


def _names_evaluation(entry: Entry, sha256: str) -> bool:
    return entry.kind in DATING_KINDS and entry.evaluation == sha256
