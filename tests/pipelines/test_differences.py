"""What differs between an artifact and the one made again is told file by file, and in the files by tensor, key and row."""

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

from components.common import artifacts
from components.common.artifacts import Artifact
from pipelines import differences

Write = Callable[[Path], None]


def artifact(folder: Path, **files: Write) -> Artifact:
    """A model artifact of these files; `_` in a name stands for its dot."""
    artifacts.begin(folder, "test")
    for name, write in files.items():
        write(folder / name.replace("_", "."))
    payload = [name.replace("_", ".") for name in files]
    return artifacts.publish(folder, "model", payload=payload, inputs=[], config={}, seed=0, key="test", summary={})


def weights(**tensors: torch.Tensor) -> Write:
    return lambda path: save_file(tensors, path)


def values(told: Any) -> Write:
    return lambda path: path.write_text(json.dumps(told))


def rows(count: int, first: int = 0) -> Write:
    return lambda path: parquet.write_table(pa.table({"n": range(first, first + count)}), path)


def found(recorded: Artifact, made: Artifact, folder: Path | None = None) -> list[dict[str, Any]]:
    return differences.payload(recorded.manifest, made, folder or recorded.path)


def test_of_equal_artifacts_nothing_is_told(tmp_path: Path) -> None:
    one, other = (artifact(tmp_path / name, a_json=values({"a": 1})) for name in ("one", "other"))
    assert found(one, other) == []


def test_each_tensor_that_differs_is_named_with_its_largest_difference(tmp_path: Path) -> None:
    same = torch.arange(6.0).reshape(2, 3)
    one = artifact(tmp_path / "one", m_safetensors=weights(same=same, far=torch.zeros(4), near=torch.ones(2)))
    moved, nearer = torch.tensor([0.0, 0.25, 0.0, -0.5]), torch.tensor([1.0, 1.125])
    other = artifact(tmp_path / "other", m_safetensors=weights(same=same, far=moved, near=nearer))
    [told] = found(one, other)
    assert (told["artifact"], told["path"], told["detail"]) == ("model", "m.safetensors", "2 of 3 tensors differ, far most, by up to 0.5")
    assert told["tensors"] == [
        {"name": "far", "max_difference": 0.5, "recorded": "float32 [4]", "reproduced": "float32 [4]"},
        {"name": "near", "max_difference": 0.125, "recorded": "float32 [2]", "reproduced": "float32 [2]"},
    ]


@pytest.mark.parametrize(
    ("was", "now", "shapes"),
    [
        (torch.zeros(2), torch.zeros(3), ("float32 [2]", "float32 [3]")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), ("float32 [2]", "bfloat16 [2]")),
        (torch.zeros(2), torch.tensor([0.0, float("nan")]), ("float32 [2]", "float32 [2]")),
    ],
)
def test_tensors_that_cannot_be_subtracted_differ_without_a_number(
    tmp_path: Path, was: torch.Tensor, now: torch.Tensor, shapes: tuple[str, str]
) -> None:
    one, other = artifact(tmp_path / "one", m_safetensors=weights(t=was)), artifact(tmp_path / "other", m_safetensors=weights(t=now))
    [told] = found(one, other)
    assert told["detail"] == "1 of 1 tensors differ"
    assert told["tensors"] == [{"name": "t", "max_difference": None, "recorded": shapes[0], "reproduced": shapes[1]}]


def test_a_tensor_that_one_side_lacks_is_told_and_one_that_is_no_number_on_both_sides_is_equal(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan")])
    one = artifact(tmp_path / "one", m_safetensors=weights(nan=nan, old=torch.zeros(1)))
    other = artifact(tmp_path / "other", m_safetensors=weights(nan=nan, new=torch.zeros(1)))
    [told] = found(one, other)
    assert [(t["name"], t["recorded"], t["reproduced"]) for t in told["tensors"]] == [
        ("new", "nothing", "float32 [1]"),
        ("old", "float32 [1]", "nothing"),
    ]


def test_keys_of_a_configuration_are_named_with_both_values_however_deep_they_lie(tmp_path: Path) -> None:
    one = artifact(tmp_path / "one", c_json=values({"r": 16, "rope": {"theta": 1e4, "factor": 2}, "old": True}))
    other = artifact(tmp_path / "other", c_json=values({"r": 8, "rope": {"theta": 1e4, "factor": 4}}))
    [told] = found(one, other)
    assert told["detail"] == "keys that differ: old (true → nothing), r (16 → 8), rope.factor (2 → 4)"
    assert told["keys"] == [
        {"key": "old", "recorded": True, "reproduced": "nothing"},
        {"key": "r", "recorded": 16, "reproduced": 8},
        {"key": "rope.factor", "recorded": 2, "reproduced": 4},
    ]


def test_a_table_is_told_by_its_rows(tmp_path: Path) -> None:
    one = artifact(tmp_path / "one", a_parquet=rows(1200), b_parquet=rows(3))
    other = artifact(tmp_path / "other", a_parquet=rows(1201), b_parquet=rows(3, first=5))
    assert [told["detail"] for told in found(one, other)] == [
        "1,200 rows were recorded, 1,201 were made",
        "as many rows (3), and not the same",
    ]


def test_a_file_of_one_side_only_is_told_as_such_and_another_kind_of_file_by_its_bytes(tmp_path: Path) -> None:
    one = artifact(tmp_path / "one", a_txt=values(1), old_txt=values(1))
    other = artifact(tmp_path / "other", a_txt=values(2), new_txt=values(1))
    told = {one["path"]: (one["recorded"] is None, one["reproduced"] is None, one["detail"]) for one in found(one, other)}
    assert told == {
        "a.txt": (False, False, "other bytes"),
        "new.txt": (True, False, "was made and is not recorded"),
        "old.txt": (False, True, "was recorded and was not made again"),
    }


def test_without_the_recorded_files_it_is_told_which_differ(tmp_path: Path) -> None:
    one, other = artifact(tmp_path / "one", c_json=values(1)), artifact(tmp_path / "other", c_json=values(2))
    [told] = differences.payload(one.manifest, other, None)
    assert told["detail"] == "other bytes; the recorded file is not there to compare with"
    assert told["recorded"] != told["reproduced"]
