"""Workloads of the storage benchmark, registered and from files with DLIO's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import ConfigurationError
from pipelines.operations.storage_benchmark import rank_worker
from pipelines.operations.storage_benchmark.workloads import WORKLOADS, Workload, find_workload

# storage-conf/workload/resnet50_h100.yaml of mlcommons/storage, commit 81772753dff3
RESNET50 = """
model: resnet50
framework: tensorflow
workflow: {generate_data: False, train: True}
dataset: {num_files_train: 1024, num_samples_per_file: 1251, record_length: 114660.07, record_length_resize: 150528, format: tfrecord}
train: {computation_time: 0.224, epochs: 5}
reader: {data_loader: tensorflow, read_threads: 8, computation_threads: 8, batch_size: 400}
metric: {au: 0.90}
"""


def load(folder: Path, text: str) -> Workload:
    path = folder / "workload.yaml"
    path.write_text(text)
    return find_workload(str(path))


def test_published_dlio_file_is_read_and_ignored_keys_are_listed(tmp_path: Path) -> None:
    workload = load(tmp_path, RESNET50)
    assert (workload.files, workload.samples_per_file, workload.record_bytes) == (1024, 1251, 114_661)
    assert (workload.batch, workload.read_threads, workload.computation_seconds) == (400, 8, 0.224)
    assert (workload.order, workload.target_utilization, workload.epochs) == ("sequential", 0.9, 5)
    assert "dataset.format" in workload.ignored
    assert "reader.computation_threads" in workload.ignored
    assert workload.limit_steps(accelerators=8) == 5 * (1024 * 1251 // (400 * 8))


def test_newer_keys_and_the_nested_form_of_dlio_are_read(tmp_path: Path) -> None:
    text = """
    workload:
      dataset: {num_files_train: 3, record_length_bytes: 5000}
      reader: {sample_shuffle: seed, file_shuffle: off}
      train: {computation_time: {mean: 0.5, stdev: 0.1}, total_training_steps: 7}
    """
    workload = load(tmp_path, text)
    assert (workload.order, workload.computation_seconds, workload.max_steps) == ("random", 0.5, 7)
    assert workload.stride == 8192, "records are stored in whole blocks"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: {num_files_train: 0}\ntrain: {computation_time: 1}", "dataset.num_files_train: found 0"),
        ("dataset: {num_files_train: 1}\ntrain: {computation_time: 1}", "dataset.record_length is missing"),
        (
            "dataset: {num_files_train: 1, record_length: 9}\ntrain: {computation_time: 0}",
            "computation_time is 0.0; expected",
        ),
        (
            "dataset: {num_files_train: 1, record_length: .inf}\ntrain: {computation_time: 1}",
            "record_length: found inf",
        ),
        ("dataset: {num_files_train: 1, record_length: 9}\ntrain: {computation_time: .inf}", "computation_time is inf"),
        ("dataset: [", "is not YAML"),
        ("just text", "workload.yaml: "),
    ],
)
def test_invalid_file_is_refused_with_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, text)


def test_size_determines_the_number_of_files() -> None:
    images = WORKLOADS["images"]
    assert images.resize(10 * images.file_bytes).files == 10
    assert images.resize(1).files == 1


def test_sequential_ranks_read_every_record_of_an_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []

    def record(_: Any, descriptor: int, offset: int, size: int) -> int:
        reads.append((descriptor, offset))
        return size

    monkeypatch.setattr(rank_worker.Storage, "open", lambda _, path: int(path))
    monkeypatch.setattr(rank_worker.Storage, "read", record)
    task = {"files": ["0", "1", "2"], "samples_per_file": 4, "stride": 4096, "batch": 2, "order": "sequential"}
    for rank in range(3):
        records = rank_worker.Records({**task, "direct": False, "ranks": 3, "rank": rank})
        for step in range(2):
            records.read_batch(step)
    assert sorted(reads) == [(file, 4096 * sample) for file in range(3) for sample in range(4)]
