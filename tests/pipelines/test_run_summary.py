"""Lines that `tuneline curate` and `tuneline run` print about a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.cost.cost_rates import CostRates
from components.common.cost.stage_cost import add_costs
from pipelines.runs import run_summary
from pipelines.runs.run_summary import format_evaluation_sets, format_run


@pytest.mark.parametrize(
    ("summary", "lines"),
    [
        (
            {"evaluation_sets": {"arc.jsonl": {"items": 1172, "unsearchable": 1, "unreadable": 0, "rejected_rows": 4}}},
            [
                "evaluation set arc.jsonl: rejected rows: 4; items that cannot be found by their questions: 1 of 1,172",
            ],
        ),
        ({"evaluation_sets": {}}, []),
        ({}, []),
    ],
)
def test_evaluation_sets_are_summarized(tmp_path: Path, summary: dict[str, Any], lines: list[str]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"summary": summary}))
    assert format_evaluation_sets(tmp_path) == lines


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        (
            "sqlite:////work dir/mlflow.db",
            "browse the runs: mlflow ui --backend-store-uri 'sqlite:////work dir/mlflow.db'",
        ),
        ("https://mlflow.example.com", "browse the runs: https://mlflow.example.com"),
    ],
)
def test_hint_opens_the_store_of_this_run(tmp_path: Path, uri: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/tuneline")
    (tmp_path / "evaluation.json").write_text('{"reasons": []}')
    (tmp_path / "manifest.json").write_text('{"summary": {}}')
    (tmp_path / "quarantine.jsonl").touch()
    registered = {"model_name": "helper", "model_version": "1", "aliases": [], "tracking_uri": uri}
    result = {
        "stages": [],
        "artifacts": {"evaluation": str(tmp_path), "dataset": str(tmp_path), "repository": None},
        "mlflow": registered,
        "verdict": "refused",
        "report": "report.html",
        "seconds": 1.0,
        "cost": {**CostRates().convert(add_costs([])), "complete": True},
    }
    assert [line for line in format_run(result) if line.startswith("browse")] == [hint]
    assert not [line for line in format_run(result) if "promote" in line]
    for kind, is_shown in (("model", True), ("reward_model", False)):
        monkeypatch.setattr(
            run_summary.artifact_folder, "read_manifest", lambda _, kind=kind: SimpleNamespace(kind=kind)
        )
        result |= {"artifacts": result["artifacts"] | {"model": "/my store/model"}, "report": "/run/report.html"}
        package = "tuneline package '/my store/model' -c /run/customization.yaml -o refused-model"
        line = f"not packaged; to try the refused model: {package} && tuneline chat refused-model"
        assert (line in format_run(result)) == is_shown
    result |= {"verdict": "accepted", "workdir": str(tmp_path / "my work")}
    [line] = [line for line in format_run(result) if "promote" in line]
    command = f"tuneline promote helper --version 1 --workdir '{tmp_path}/my work'"
    assert line == f"not promoted; to promote this version: {command}"
    registered["aliases"] = ["champion"]
    assert not [line for line in format_run(result) if "promote" in line]
