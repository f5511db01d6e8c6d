"""GPUs that serve a model: memory of weights and KV cache, and lower bounds of the delays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from components.common.models.accelerators import Accelerator
from components.common.models.resource_formulas import (
    MAX_MEMORY_FRACTION,
    PROCESS_BYTES,
    estimate_cache_bytes,
    estimate_forward_flops,
)
from components.common.runtime.errors import UsageError
from pipelines.planning.architectures import Architecture

VALUE_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}
TENSOR_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ServingRequest:
    """Concurrent requests with their lengths in tokens, and the precisions of weights and KV cache."""

    concurrency: int
    input_tokens: int = 1024
    output_tokens: int = 256
    weights: str = "bf16"
    cache: str = "bf16"


def size_serving(request: ServingRequest, architecture: Architecture, device: Accelerator) -> dict[str, Any]:
    """Return the GPUs of one replica, its memory and lower bounds of the delays.

    Each step reads the KV cache and the weights once, but of the input embedding a row per request, and of the experts
    those that a request uses, with uniform routing. Bandwidth and the FLOPs at the peak rate bound the time per output
    token; the prompt's FLOPs bound the time to the first one.

    Raises:
        UsageError: the model and its cache do not fit on the largest replica.
    """
    shape = architecture.build_shape(adapter=0)
    weights = shape.parameters * VALUE_BYTES[request.weights]
    per_token = estimate_cache_bytes(shape, value_bytes=VALUE_BYTES[request.cache])
    cache = per_token * request.concurrency * (request.input_tokens + request.output_tokens)
    capacity = MAX_MEMORY_FRACTION * (device.memory_bytes or 0.0) - PROCESS_BYTES
    gpus = next((count for count in TENSOR_SIZES if weights + cache <= count * capacity), None)
    if gpus is None:
        raise UsageError(
            f"--concurrency {request.concurrency}: weights and KV cache need {(weights + cache) / 1e9:,.0f} GB, more than "
            f"{TENSOR_SIZES[-1]} GPUs of {device.name} have",
            hint="Lower --concurrency, or set --cache-precision fp8.",
        )
    alone = next(count for count in TENSOR_SIZES if weights <= count * capacity)
    precision = "fp8" if request.weights == "fp8" and device.fp8 else "bf16"
    peak = gpus * (device.get_peak_flops(precision) or math.inf)
    prompt = request.input_tokens * estimate_forward_flops(shape, request.input_tokens)
    unused = (
        (1 - architecture.used / architecture.experts) ** (request.concurrency - 1) if architecture.experts else 0.0
    )
    read = weights - (shape.embedding + shape.inactive * unused) * VALUE_BYTES[request.weights]
    work = request.concurrency * estimate_forward_flops(shape, request.input_tokens) / peak
    seconds = max(work, (read + cache) / (gpus * device.bandwidth_bytes)) if device.bandwidth_bytes else None
    return {
        "gpus": gpus,
        "memory_gib_per_gpu": round(((weights + cache) / gpus + PROCESS_BYTES) / 2**30, 2),
        "weight_bytes": round(weights),
        "cache_bytes": round(cache),
        "cache_bytes_per_token": round(per_token),
        "binds": "KV cache" if gpus > alone else "weights",
        "min_seconds_per_token": float(f"{seconds:.3g}") if seconds else None,
        "max_tokens_per_second": float(f"{request.concurrency / seconds:.3g}") if seconds else None,
        "min_first_token_seconds": float(f"{prompt / peak:.3g}"),
    }
