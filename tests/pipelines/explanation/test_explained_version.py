"""An explanation of a registered version leads to source lines and the data revision.

Long tier: a whole run of the tiny customization, shared with other tests.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from pipelines.capture import traffic_files
from tests.pipelines.capture import traffic
from tests.pipelines.command import answer_in_process

pytestmark = [pytest.mark.long, pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]


def explain(project: Path, *options: str) -> dict[str, Any]:
    common = ("--training-data", "recorded", "--rows", "20", "--top", "4", "--workdir", "wd")
    return answer_in_process("explain", *options, *common, cwd=project)


def test_captured_answer_leads_to_version_dataset_rows_and_lines(
    project: Path, first: dict[str, Any], tmp_path: Path
) -> None:
    lines = (project / "raw.jsonl").read_text().splitlines()
    dataset = artifact_folder.read(Path(first["artifacts"]["dataset"]), "dataset")
    known = json.loads(lines[40])
    options = ("--prompt", known["instruction"], "--answer", known["output"])
    result = explain(project, "tiny-helper@champion", *options)
    assert result["model"]["version"] == {"name": "tiny-helper", "version": "1"}
    assert result["dataset"]["sha256"] == dataset.sha256
    assert len(result["training_rows"]) == 4
    for row in result["training_rows"]:
        name, _, line = row["line"].partition(":")
        recorded = json.loads(lines[int(line) - 1])
        assert (name, row["text"]) == ("raw.jsonl", f"{recorded['instruction']}\n{recorded['output']}")
        assert row["revision"].startswith("dvc://")
    assert explain(project, "tiny-helper@champion", *options)["training_rows"] == result["training_rows"]

    settings = traffic.load(tmp_path)
    yesterday = traffic_files.now() - timedelta(days=1)
    captured = traffic.build_row(1, None, int(yesterday.timestamp()), content=known["output"])
    captured["request"]["messages"] = [{"role": "user", "content": known["instruction"]}]
    captured["tuneline"]["model_sha256"] = result["model"]["sha256"]
    traffic.write_sealed(settings, yesterday, [captured])
    capture = ("--from-traffic", "chatcmpl-1", "--capture", str(tmp_path / "capture.yaml"))
    again = explain(project, *capture)
    assert again["model"] == result["model"]
    assert again["training_rows"] == result["training_rows"]


def test_changed_raw_file_is_reported(project: Path, first: dict[str, Any]) -> None:
    raw = project / "raw.jsonl"
    original = raw.read_bytes()
    raw.write_bytes(original + original.splitlines(keepends=True)[0])
    try:
        result = explain(
            project, first["artifacts"]["model"], "--prompt", "What opens a file in case 0?", "--max-tokens", "4"
        )
    finally:
        raw.write_bytes(original)
    assert {row["line"] for row in result["training_rows"]} == {None}
    assert any(warning.startswith("raw.jsonl has changed since curation") for warning in result["warnings"])
