"""Storage that customizations need: capacity, read and write rates, and checkpoint intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from components.common.models.resource_formulas import BFLOAT16_BYTES
from pipelines.planning.architectures import Architecture

TOKEN_BYTES = 4  # of a token id
PREPARED_COPIES = 2  # of the raw data: the curated dataset and its published revision
MODEL_LOAD_SECONDS = 300  # for the base models of all training runs to load at the same time
# GPU-hours between interruptions: 419 unexpected ones in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, section 3.3.4).
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419


@dataclass(frozen=True)
class StorageRequest:
    """Data that is kept, and the limits of checkpoints.

    Attributes:
        raw_bytes: raw documents of one customization.
        versions: dataset and model versions that are kept of each model.
        checkpoints: checkpoints that are kept during a training run.
        checkpoint_minutes: work that an interruption may cost.
        stall_budget: largest share of the time that writing checkpoints may take.
        write_bytes_per_second: measured rate of the storage. None: the rate that the stall budget requires.
    """

    raw_bytes: float = 0.0
    versions: int = 3
    checkpoints: int = 2
    checkpoint_minutes: float = 30.0
    stall_budget: float = 0.05
    write_bytes_per_second: float | None = None


def size_storage(
    request: StorageRequest,
    architecture: Architecture,
    checkpoint_bytes: int,
    gpus: int,
    models: int,
    rates: dict[str, float] | None,
) -> dict[str, Any]:
    """Return capacity, rates and checkpoint intervals.

    Young and Daly's interval minimizes lost work: √(2 · write time · time between failures) (Daly, 2006).

    Args:
        checkpoint_bytes: size of a checkpoint.
        gpus: GPUs of one training run.
        models: concurrent training runs.
        rates: tokens per second and GPU by case. None: not known.
    """
    weights = architecture.parameters * BFLOAT16_BYTES
    datasets = request.raw_bytes * (1 + PREPARED_COPIES * request.versions) * models
    checkpoints = (request.checkpoints + 1) * checkpoint_bytes * models  # one more while it is written
    published = request.versions * weights * models
    parts = {"datasets": datasets, "checkpoints": checkpoints, "models": published, "base_model": weights}
    required_rate = checkpoint_bytes / (request.stall_budget * request.checkpoint_minutes * 60)
    write_rate = request.write_bytes_per_second or required_rate * models
    seconds = checkpoint_bytes * models / write_rate
    failure_seconds = GPU_HOURS_PER_FAILURE / gpus * 3600
    reading = max(rates.values()) * gpus * TOKEN_BYTES * models if rates else 0.0
    loading = weights * models / MODEL_LOAD_SECONDS
    stall = seconds / (request.checkpoint_minutes * 60)
    return {
        "bytes": round(sum(parts.values())),
        "read_bytes_per_second": round(max(reading, loading)),
        "checkpoint_bytes": checkpoint_bytes,
        "checkpoint_seconds": float(f"{seconds:.3g}"),
        "write_bytes_per_second": round(required_rate * models),
        "parts": {name: round(value) for name, value in parts.items()},
        "checkpoint_minutes": request.checkpoint_minutes,
        "young_daly_minutes": float(f"{math.sqrt(2 * seconds * failure_seconds) / 60:.3g}"),
        "has_write_rate": request.write_bytes_per_second is not None,
        "stall_share": float(f"{stall:.3g}"),
        "meets_stall_budget": stall <= request.stall_budget * (1 + 1e-9),
        "read_binds": "model loading" if loading >= reading else "training data",
    }
