"""Requirements of a configuration for the evaluation of a version that is promoted."""

from __future__ import annotations

from typing import TypedDict

from components.evaluation.config import EvaluationConfig


class GateRequirements(TypedDict, total=False):
    """Arguments of `promotion.promote`: the rules that the evaluation must have applied, on these tasks."""

    rules: list[dict[str, object]]
    min_items: int
    tasks: dict[str, dict[str, object]]


def describe_gate(evaluation: EvaluationConfig) -> GateRequirements:
    """Return the rules, the minimum number of items, and kind, files and thresholds of the tasks."""
    from components.evaluation.tasks import file_digests
    from components.evaluation.tasks.judge import Judge

    settings = evaluation.model_dump(mode="json", include={"gate", "min_items"})
    tasks: dict[str, dict[str, object]] = {
        task.name: {
            "kind": task.kind,
            "files": sorted(file_digests.digest_task_files([task]).values()),
            **({"min_kappa": task.min_kappa} if isinstance(task, Judge) else {}),
        }
        for task in evaluation.tasks
    }
    return {"rules": settings["gate"], "min_items": settings["min_items"], "tasks": tasks}
