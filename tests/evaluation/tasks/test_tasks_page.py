"""docs/reference/evaluation-tasks.md: every example is an accepted configuration, and every task kind is listed with its metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.task_registry import TASK_KINDS, TaskConfig, TaskKind
from tests.pipelines.command import ROOT

PAGE = (ROOT / "docs" / "reference" / "evaluation-tasks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
TASKS = TypeAdapter(list[TaskConfig])


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_is_accepted(example: str) -> None:
    values: dict[str, Any] = yaml.safe_load(example)
    assert set(values) == {"evaluation"}
    tasks: list[TaskSettings] = TASKS.validate_python(values["evaluation"]["tasks"])
    expected = [entry.get("name", entry["kind"]) for entry in values["evaluation"]["tasks"]]
    assert [task.name for task in tasks] == expected


def test_every_kind_has_a_section_with_an_example() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    assert set(sections) == set(TASK_KINDS)
    for kind, text in sections.items():
        assert f"- kind: {kind}" in text


@pytest.mark.parametrize("kind", TASK_KINDS.values(), ids=TASK_KINDS)
def test_table_lists_metrics_and_requirements(kind: TaskKind) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| [`{kind.name}`]"))
    metrics, requirements = line.split("|")[2:4]
    assert re.findall(r"`(\w+)`", metrics) == list(kind.task.METRICS)
    assert ("lower" in metrics) == any(metric.better == "lower" for metric in kind.task.METRICS.values())
    expected = {
        "likelihoods": kind.scores_likelihoods,
        "answers": kind.generates_answers,
        "judge endpoint": kind.needs_endpoint,
        "a reward model": kind.scores_rewards,
    }
    assert requirements.strip().split(", ") == [name for name, needed in expected.items() if needed]


def test_registry_import_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "lm_eval", "nltk", "sacrebleu", "jsonschema", "pyarrow", "datasets", "numpy")
    modules = "components.evaluation.config, components.evaluation.tasks.file_digests"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
