"""Summary of a run in sentences, and warnings about findings that limit its result, from a record of `report_data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.common.artifacts.artifact_folder import REWARD_MODEL
from components.common.gate_rules import SUITE_PREFIX, describe_outcome
from components.common.reporting.html_report import format_value
from components.common.runtime.counts import format_count

Record = Mapping[str, Any]


def summarize(record: Record) -> list[str]:
    """Return three sentences: the training, the comparison with the base model, and the properties that were not measured."""
    training, rows = record["training"], record["training"]["rows"]["train"]
    epochs = f"{format_value(float(training['epochs']))} {'epoch' if training['epochs'] == 1 else 'epochs'}"
    used = format_count(rows, "row")
    if training["rows_seen"] < rows:
        used = f"{training['rows_seen']:,} of {used} ({training['rows_seen'] / rows:.0%})"
    trained = f"Trained for {epochs} on {used} of {record['revision']['tag']}"
    if training["best_step"] and training["best_step"] != training["steps"]:
        trained += f"; the weights are from step {training['best_step']:,}, which has the lowest validation loss"
    missing = _list_unmeasured(record)
    return [
        f"{trained}.",
        _compare_with_base(record["evaluation"]),
        f"Not measured: {'; '.join(missing)}." if missing else "The gate applied all of its rules.",
    ]


def find_main_metric(evaluation: Record) -> tuple[str, str, Record]:
    """Return task, metric and values of the task held_out or, without this task, of the first task."""
    task = "held_out" if "held_out" in evaluation["metrics"] else next(iter(evaluation["metrics"]))
    metric, values = next(iter(evaluation["metrics"][task].items()))
    return task, metric, values


def _compare_with_base(evaluation: Record) -> str:
    task, metric, values = find_main_metric(evaluation)
    place = "held-out text" if task == "held_out" else f"the task {task}"
    name = f"{metric} on {place}"
    if values["candidate"] is None or values["base"] is None:
        return f"The candidate and the base model could not be compared by {name}."
    figures = (
        f"{format_value(values['candidate'])} vs. {format_value(values['base'])}, {format_count(values['n'], 'item')}"
    )
    rules = [rule for rule in evaluation["rules"] if rule["metric"] == f"{task}.{metric}" and rule["against"] == "base"]
    for rule in rules:
        if rule["gain"] and not rule.get("slices"):
            gain, low, high = rule["gain"]
            if low <= 0 <= high:
                return f"The candidate's {name} does not differ significantly from that of the base model ({figures})."
            return f"The candidate's {name} is {'better' if gain > 0 else 'worse'} than that of the base model ({figures})."
    unjudged = "" if rules else " No rule compares them."
    return f"The candidate's {name} and that of the base model: {figures}.{unjudged}"


def _list_unmeasured(record: Record) -> list[str]:
    rules, missing = record["evaluation"]["rules"], []
    skipped = [rule for rule in rules if describe_outcome(rule) == "not applicable"]
    metrics = record["evaluation"]["metrics"].values()
    has_incumbent = any(values.get("incumbent") is not None for by_metric in metrics for values in by_metric.values())
    if not has_incumbent and any(rule["against"] == "incumbent" for rule in skipped):
        missing.append("the difference from an earlier version, because no incumbent exists")
    if any(has_incumbent or rule["against"] != "incumbent" for rule in skipped):
        missing.append("some slices of the test rows, because they have too few items")
    if not any(rule["metric"].startswith(SUITE_PREFIX) for rule in rules):
        is_reward_model = record["kind"] == REWARD_MODEL
        reason = "does not measure reward models" if is_reward_model else "is off"
        missing.append(f"behaviour outside the tuning task, because the regression suite {reason}")
    if record["package"] is None:
        missing.append(
            "serving, because a reward model is not packaged"
            if record["kind"] == REWARD_MODEL
            else "serving, because only accepted candidates are packaged"
        )
    elif record["package"]["proof"] is None:
        missing.append("serving, because the package was not tested on a Triton server")
    return missing


def list_warnings(record: Record) -> list[str]:
    """Return a sentence for each finding that limits the result."""
    training, data, package = record["training"], record["data"], record["package"]
    rows, warnings = training["rows"], []
    if any(not rule["holds"] for rule in record["evaluation"]["rules"]):
        warnings.append("At least one rule of the gate failed. The Verdict section lists the failed rules.")
    if package and package["proof"] is None:
        reason = package["unproven_because"]
        warnings.append(f"The package is not proven: {reason}. Its promotion requires --force and --reason.")
    if training["rows_seen"] < rows["train"]:
        share = f"{training['rows_seen'] / rows['train']:.0%}"
        warnings.append(
            f"Training used {share} of the rows. Unless training stopped early, set fine_tuning.max_steps to null and "
            "fine_tuning.epochs to at least 1 to train on all rows."
        )
    before, after = training.get("validation_loss_before"), training["validation_loss"]
    if before is not None and after is not None and after > before:
        warnings.append(
            f"The validation loss rose from {format_value(before)} to {format_value(after)} during training."
        )
    if rows["truncated"]:
        warnings.append(
            f"{format_count(rows['truncated'], 'training row was', 'training rows were')} truncated to the maximum length."
        )
    if rows["without_answer"]:
        skipped = format_count(rows["without_answer"], "row was", "rows were")
        warnings.append(f"{skipped} skipped. The training report states the reason.")
    if quarantined := data["rows"]["quarantined"]:
        records = format_count(quarantined, "record was", "records were")
        warnings.append(f"{records} quarantined. The dataset's quarantine.jsonl lists the reasons.")
    unsearchable = [name for name, counts in data["evaluation_sets"].items() if counts["unsearchable"]]
    if unsearchable:
        warnings.append(
            "Decontamination cannot search the training data for the questions of some items of "
            f"{', '.join(unsearchable)}."
        )
    return warnings
