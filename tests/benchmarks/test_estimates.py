"""The page that compares dry runs with their runs; the runs themselves take minutes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimates
from components.fine_tuning.objectives import OBJECTIVES
from pipelines.config.customization_config import Customization


def build_result(stage: str, seconds: float, cpu: float, memory: int, peak: int) -> dict[str, Any]:
    estimate = {"seconds": {stage: seconds}, "memory": {"training": {"total": memory}}}
    made = {"command": "python -m benchmarks.estimates", "commit": "0123abcd", "date": "2026-11-30", "load": 2.5}
    return {
        "estimate": estimate,
        "stages": {stage: cpu, "report": 1.0},
        "peak_memory": peak,
        "is_stopped": stage == "fine_tuning",
        "circumstances": {**made, "processor": "EPYC", "cores": 2, "python": "3.11.7"},
    }


def test_page_names_the_rows_that_miss_the_goal() -> None:
    page = estimates.render_page({"objective: sft": build_result("fine_tuning", 100, 120, 10**9, 2 * 10**9)})
    assert "| `objective: sft` | fine_tuning | 100 s | 120 s | -17% |" in page
    assert "| `objective: sft` | 1.00 GB | 2.00 GB | -50% |" in page
    assert "Rows that miss the goal: objective: sft (memory)." in page
    made = "`python -m benchmarks.estimates` | `0123abcd` | 2026-11-30 | EPYC, 2 cores, Python 3.11.7 | 2.5"
    assert f"| `objective: sft` | {made} | stopped at a time limit |" in page


def test_memory_is_compared_for_trainings_only() -> None:
    page = estimates.render_page({"quantization: int8": build_result("triton_packaging", 100, 101, 1, 10**9)})
    assert "| `quantization: int8` | triton_packaging | 100 s | 101 s | -1% |" in page
    assert "GB |" not in page
    assert "All measured rows meet the goal." in page
    assert "| 2.5 | complete |" in page


def test_page_without_results_states_that_none_are_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    estimates.main(["--workdir", str(tmp_path / "empty"), "--keys", "--markdown", str(page)])
    assert "## Measurements\n\nNone." in page.read_text(encoding="utf-8")


def test_newest_model_is_that_of_the_last_training(tmp_path: Path) -> None:
    for name, summary in (("first", {"peak_memory": 1}), ("second", {"peak_memory": 2}), ("evaluation", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"summary": summary}), encoding="utf-8")
        os.utime(tmp_path / name / "manifest.json", (0, len(list(tmp_path.iterdir()))))
    assert estimates.find_newest_model(tmp_path) == (tmp_path / "second", {"peak_memory": 2})


def test_cached_stages_are_not_measured(tmp_path: Path) -> None:
    events = [
        {"event": "started", "stage": "fine_tuning"},
        {"event": "finished", "stage": "fine_tuning", "cached": True, "cpu_seconds": 1.0},
        {"event": "finished", "stage": "triton_packaging", "cached": False, "cpu_seconds": 2.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    assert estimates.read_stages(tmp_path) == {"triton_packaging": 2.0}


@pytest.mark.parametrize("key", estimates.build_configurations(""))
def test_configuration_of_a_key_is_valid(key: str) -> None:
    configuration = Customization.model_validate(estimates.build_configurations("previous")[key])
    section, value = key.split(": ")
    assert (
        configuration.fine_tuning.objective if section == "objective" else configuration.triton_packaging.quantization
    ) == value


def test_every_objective_of_reinforcement_learning_is_measured() -> None:
    special = {name for name, spec in OBJECTIVES.items() if spec.generates or spec.scores_answers}
    assert special <= {key.partition(": ")[2] for key in estimates.build_configurations("")}
