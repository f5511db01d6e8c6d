"""Training workloads: which records an accelerator reads per step, and how long it computes.

Registered by name, or read from a YAML file with the keys of DLIO (https://github.com/argonne-lcf/dlio_benchmark).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.runtime.errors import ConfigurationError, UsageError
from components.common.runtime.validation_errors import describe_validation_error
from components.common.runtime.yaml_loading import describe_yaml_error, load_yaml
from pipelines.operations.storage_benchmark.rank_worker import BLOCK_BYTES

MAX_RECORD_BYTES, MAX_COMPUTATION_SECONDS = 1 << 40, 86_400
DEFAULT_TARGET_UTILIZATION = 0.9  # of MLPerf Storage for image workloads, as of DLIO's `metric.au`


@dataclass(frozen=True)
class Workload:
    """Reads of one emulated accelerator.

    Attributes:
        samples_per_file: records per file.
        record_bytes: bytes of a record; records are stored and read in whole blocks of 4 KiB.
        batch: records per step.
        computation_seconds: duration of the emulated computation of a step.
        order: consecutive records, or random ones.
        read_threads: threads that read batches during the computation. 0: the step itself reads.
        prefetch: batches that each thread reads ahead.
        max_steps: steps per accelerator and epochs over the data; 0 for no limit.
        ignored: keys of the file that have no effect.
    """

    name: str
    source: str
    files: int
    samples_per_file: int
    record_bytes: int
    batch: int
    computation_seconds: float
    order: Literal["sequential", "random"]
    read_threads: int = 0
    prefetch: int = 2
    max_steps: int = 0
    epochs: int = 0
    target_utilization: float = DEFAULT_TARGET_UTILIZATION
    ignored: tuple[str, ...] = ()

    @property
    def stride(self) -> int:
        """Bytes that a record takes in a file: whole blocks, as direct I/O requires."""
        return math.ceil(self.record_bytes / BLOCK_BYTES) * BLOCK_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of a file."""
        return self.samples_per_file * self.stride

    @property
    def dataset_bytes(self) -> int:
        """Bytes of all files."""
        return self.files * self.file_bytes

    @property
    def warmup_steps(self) -> int:
        """Steps that are not measured: the first one, and a step per batch read ahead."""
        return 1 + self.read_threads * self.prefetch

    def resize(self, dataset_bytes: float) -> Workload:
        """Return the workload with the number of files that holds at least `dataset_bytes`."""
        return replace(self, files=max(1, math.ceil(dataset_bytes / self.file_bytes)))

    def limit_steps(self, accelerators: int) -> int:
        """Return the largest number of steps per accelerator; 0 for no limit."""
        per_epoch = max(1, self.files * self.samples_per_file // (self.batch * accelerators))
        limits = [limit for limit in (self.max_steps, self.epochs * per_epoch) if limit]
        return min(limits, default=0)


WORKLOADS = {
    # Rows of 8,192 packed tokens of 4 bytes. 11,203 tokens per second and GPU: MLPerf Training 5.1, Llama 3.1 8B on
    # HPE XD670 with 64 H200. Trainings of tuneline read in the step (dataloader_num_workers=0).
    "text": Workload(
        "text",
        "packed rows of 8,192 tokens; Llama 3.1 8B at 11,203 tokens/s per H200 (MLPerf Training 5.1)",
        files=16,
        samples_per_file=2048,
        record_bytes=32_768,
        batch=1,
        computation_seconds=0.731,
        order="sequential",
    ),
    # mlcommons/storage, commit 81772753dff3, storage-conf/workload/resnet50_h100.yaml; random instead of shuffled.
    "images": Workload(
        "images",
        "images of 114,660 bytes; ResNet-50 on an H100 (mlcommons/storage, resnet50_h100.yaml)",
        files=8,
        samples_per_file=1251,
        record_bytes=114_660,
        batch=400,
        computation_seconds=0.224,
        order="random",
        read_threads=8,
    ),
}


class _Section(BaseModel):
    """A section of DLIO's YAML. Keys without effect are kept, and reported."""

    model_config = ConfigDict(extra="allow")


class _Dataset(_Section):
    num_files_train: int = Field(ge=1)
    num_samples_per_file: int = Field(default=1, ge=1)
    record_length: float | None = Field(default=None, ge=1, le=MAX_RECORD_BYTES)
    record_length_bytes: float | None = Field(default=None, ge=1, le=MAX_RECORD_BYTES)


class _Reader(_Section):
    batch_size: int = Field(default=1, ge=1)
    read_threads: int = Field(default=1, ge=0, le=64)
    prefetch_size: int = Field(default=2, ge=1, le=64)
    sample_shuffle: str | bool = False  # YAML reads "off" as false
    file_shuffle: str | bool = False


class _Train(_Section):
    computation_time: float | dict[str, float | str]
    epochs: int = Field(default=1, ge=1)
    total_training_steps: int = -1


class _Metric(_Section):
    au: float = Field(default=DEFAULT_TARGET_UTILIZATION, gt=0, le=1)


class _WorkloadFile(_Section):
    model: str = ""
    dataset: _Dataset
    reader: _Reader = _Reader()
    train: _Train
    metric: _Metric = _Metric()


def find_workload(name: str) -> Workload:
    """Return a registered workload, or that of a YAML file with DLIO's keys.

    Raises:
        UsageError: neither a registered name nor a file.
        ConfigurationError: the file is not YAML, or a key is missing or has an invalid value.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"--workload {name!r} is neither a workload nor a file",
            hint=f"Use {', '.join(WORKLOADS)}, or the path of a YAML file with DLIO's keys.",
        )
    hint = (
        "Specify the keys of a DLIO workload: dataset.num_files_train, dataset.record_length, train.computation_time."
    )
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
        if isinstance(content, Mapping) and isinstance(content.get("workload"), Mapping):  # DLIO's own files nest it
            content = content["workload"]
        file = _WorkloadFile.model_validate(content)
    except ValidationError as error:
        raise ConfigurationError(describe_validation_error(error, str(path), _WorkloadFile), hint=hint) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} is not YAML: {describe_yaml_error(error)}", hint=hint) from None
    length = file.dataset.record_length_bytes or file.dataset.record_length
    mean = file.train.computation_time
    seconds = mean.get("mean") if isinstance(mean, dict) else mean
    if not length or not isinstance(seconds, float | int) or not 0 < seconds <= MAX_COMPUTATION_SECONDS:
        missing = (
            f"train.computation_time is {seconds!r}; expected a number of seconds above 0 and at most "
            f"{MAX_COMPUTATION_SECONDS:,}"
            if length
            else "dataset.record_length is missing"
        )
        raise ConfigurationError(f"{path}: {missing}", hint=hint)
    shuffles = {file.reader.sample_shuffle, file.reader.file_shuffle}
    return Workload(
        name=file.model or path.stem,
        source=str(path),
        files=file.dataset.num_files_train,
        samples_per_file=file.dataset.num_samples_per_file,
        record_bytes=math.ceil(length),
        batch=file.reader.batch_size,
        computation_seconds=float(seconds),
        order="random" if shuffles - {"off", False} else "sequential",
        read_threads=file.reader.read_threads,
        prefetch=file.reader.prefetch_size,
        max_steps=max(0, file.train.total_training_steps),
        epochs=file.train.epochs,
        target_utilization=file.metric.au,
        ignored=tuple(sorted(_list_ignored_keys(file))),
    )


def _list_ignored_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    yield from (f"{prefix}{key}" for key in section.model_extra or {})
    for name in type(section).model_fields:
        if isinstance(child := getattr(section, name), BaseModel):
            yield from _list_ignored_keys(child, f"{prefix}{name}.")
