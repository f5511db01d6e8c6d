"""docs/evaluation-tasks.md: every example is a configuration that is accepted, and every kind and metric stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from components.evaluation.tasks import (
    generation,
    judge,
    last_word,
    memorisation,
    multiple_choice,
    perplexity,
    personal_data,
    preference,
    toxicity,
)
from components.evaluation.tasks.config import Common, IFEvalMetric, TaskConfig
from tests.pipelines.command import ROOT

PAGE = (ROOT / "docs" / "evaluation-tasks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
KINDS = {member.model_fields["kind"].default for member in get_args(get_args(TaskConfig)[0])}
TASKS = TypeAdapter(list[TaskConfig])


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_accepted(example: str) -> None:
    told: dict[str, Any] = yaml.safe_load(example)
    assert set(told) == {"evaluation"}
    found: list[Common] = TASKS.validate_python(told["evaluation"]["tasks"])
    assert [one.name for one in found] == [entry.get("name", entry["kind"]) for entry in told["evaluation"]["tasks"]]


def test_every_kind_has_a_section_with_an_example() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    assert set(sections) == KINDS
    for kind, text in sections.items():
        assert f"- kind: {kind}" in text


MODULES = (generation, multiple_choice, perplexity, last_word, preference, judge, personal_data, toxicity, memorisation)


@pytest.mark.parametrize("module", MODULES)
def test_the_table_names_every_metric(module: Any) -> None:
    kind = module.__name__.rpartition(".")[2]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| [`{kind}`]"))
    named = line.split("|")[2]
    assert re.findall(r"`(\w+)`", named) == list(module.METRICS)
    lower = {name for name, metric in module.METRICS.items() if metric.better == "lower"}
    assert ("lower" in named) == bool(lower)


def test_the_table_names_ifevals_metrics() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("| [`ifeval`]"))
    assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == set(get_args(IFEvalMetric))


def test_settings_and_metrics_are_known_without_loading_anything_heavy() -> None:
    modules = [module.__name__ for module in MODULES] + [f"components.evaluation.tasks.{name}" for name in ("lm_eval", "ifeval", "sources")]
    heavy = ("torch", "transformers", "lm_eval", "nltk", "sacrebleu", "jsonschema", "pyarrow", "datasets", "numpy")
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
