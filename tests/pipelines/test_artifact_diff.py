"""Differences between an artifact and its reproduction are reported by file, and in files by tensor, key and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import save_file

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from pipelines.provenance import artifact_diff

Write = Callable[[Path], None]


def build_artifact(folder: Path, **files: Write) -> Artifact:
    """A model artifact of these files; `_` in a name stands for its dot."""
    artifact_folder.claim_folder(folder, "test")
    for name, write in files.items():
        write(folder / name.replace("_", "."))
    payload = [name.replace("_", ".") for name in files]
    return artifact_folder.publish(
        folder, "model", payload=payload, inputs=[], config={}, seed=0, key="test", summary={}
    )


def write_weights(**tensors: torch.Tensor) -> Write:
    return lambda path: save_file(tensors, path)


def write_json(content: Any) -> Write:
    return lambda path: path.write_text(json.dumps(content))


def write_rows(count: int, first: int = 0) -> Write:
    return lambda path: parquet.write_table(pa.table({"n": range(first, first + count)}), path)


def compare(recorded: Artifact, reproduced: Artifact, folder: Path | None = None) -> list[dict[str, Any]]:
    return artifact_diff.compare_payloads(recorded.manifest, reproduced, folder or recorded.path)


def test_equal_artifacts_have_no_differences(tmp_path: Path) -> None:
    first, second = (build_artifact(tmp_path / name, a_json=write_json({"a": 1})) for name in ("one", "other"))
    assert compare(first, second) == []


def test_differing_tensors_are_listed_with_their_largest_difference(tmp_path: Path) -> None:
    same = torch.arange(6.0).reshape(2, 3)
    first = build_artifact(
        tmp_path / "one", m_safetensors=write_weights(same=same, far=torch.zeros(4), near=torch.ones(2))
    )
    far, near = torch.tensor([0.0, 0.25, 0.0, -0.5]), torch.tensor([1.0, 1.125])
    second = build_artifact(tmp_path / "other", m_safetensors=write_weights(same=same, far=far, near=near))
    [difference] = compare(first, second)
    assert (difference["artifact"], difference["path"], difference["detail"]) == (
        "model",
        "m.safetensors",
        "2 of 3 tensors differ; largest difference: 0.5 in far",
    )
    assert difference["tensors"] == [
        {"name": "far", "max_difference": 0.5, "recorded": "float32 [4]", "reproduced": "float32 [4]"},
        {"name": "near", "max_difference": 0.125, "recorded": "float32 [2]", "reproduced": "float32 [2]"},
    ]


@pytest.mark.parametrize(
    ("recorded", "reproduced", "shapes"),
    [
        (torch.zeros(2), torch.zeros(3), ("float32 [2]", "float32 [3]")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), ("float32 [2]", "bfloat16 [2]")),
        (torch.zeros(2), torch.tensor([0.0, float("nan")]), ("float32 [2]", "float32 [2]")),
    ],
)
def test_incomparable_tensors_have_no_largest_difference(
    tmp_path: Path, recorded: torch.Tensor, reproduced: torch.Tensor, shapes: tuple[str, str]
) -> None:
    first, second = (
        build_artifact(tmp_path / "one", m_safetensors=write_weights(t=recorded)),
        build_artifact(tmp_path / "other", m_safetensors=write_weights(t=reproduced)),
    )
    [difference] = compare(first, second)
    assert difference["detail"] == "1 of 1 tensors differ"
    assert difference["tensors"] == [
        {"name": "t", "max_difference": None, "recorded": shapes[0], "reproduced": shapes[1]}
    ]


def test_missing_tensors_are_listed_and_nan_equals_nan(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan")])
    first = build_artifact(tmp_path / "one", m_safetensors=write_weights(nan=nan, old=torch.zeros(1)))
    second = build_artifact(tmp_path / "other", m_safetensors=write_weights(nan=nan, new=torch.zeros(1)))
    [difference] = compare(first, second)
    assert [(t["name"], t["recorded"], t["reproduced"]) for t in difference["tensors"]] == [
        ("new", "nothing", "float32 [1]"),
        ("old", "float32 [1]", "nothing"),
    ]


def test_differing_json_keys_are_listed_with_both_values_at_any_depth(tmp_path: Path) -> None:
    first = build_artifact(
        tmp_path / "one", c_json=write_json({"r": 16, "rope": {"theta": 1e4, "factor": 2}, "old": True})
    )
    second = build_artifact(tmp_path / "other", c_json=write_json({"r": 8, "rope": {"theta": 1e4, "factor": 4}}))
    [difference] = compare(first, second)
    assert difference["detail"] == "keys that differ: old (true → nothing), r (16 → 8), rope.factor (2 → 4)"
    assert difference["keys"] == [
        {"key": "old", "recorded": True, "reproduced": "nothing"},
        {"key": "r", "recorded": 16, "reproduced": 8},
        {"key": "rope.factor", "recorded": 2, "reproduced": 4},
    ]


def test_parquet_files_are_compared_by_row_count(tmp_path: Path) -> None:
    first = build_artifact(tmp_path / "one", a_parquet=write_rows(1200), b_parquet=write_rows(3))
    second = build_artifact(tmp_path / "other", a_parquet=write_rows(1201), b_parquet=write_rows(3, first=5))
    assert [difference["detail"] for difference in compare(first, second)] == [
        "1,200 rows recorded, 1,201 reproduced",
        "equal number of rows (3) with different content",
    ]


def test_missing_files_and_other_file_types_are_reported(tmp_path: Path) -> None:
    first = build_artifact(tmp_path / "one", a_txt=write_json(1), old_txt=write_json(1))
    second = build_artifact(tmp_path / "other", a_txt=write_json(2), new_txt=write_json(1))
    differences = {
        difference["path"]: (difference["recorded"] is None, difference["reproduced"] is None, difference["detail"])
        for difference in compare(first, second)
    }
    assert differences == {
        "a.txt": (False, False, "different bytes"),
        "new.txt": (True, False, "reproduced, but not recorded"),
        "old.txt": (False, True, "recorded, but not reproduced"),
    }


def test_only_digests_are_compared_without_the_recorded_files(tmp_path: Path) -> None:
    first, second = (
        build_artifact(tmp_path / "one", c_json=write_json(1)),
        build_artifact(tmp_path / "other", c_json=write_json(2)),
    )
    [difference] = artifact_diff.compare_payloads(first.manifest, second, None)
    assert difference["detail"] == "different bytes; the recorded file is not available for comparison"
    assert difference["recorded"] != difference["reproduced"]
