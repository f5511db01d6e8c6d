"""Speed of this machine: passes of the model that a run trains, and measured start times of the steps of a run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.models import compute_devices, resource_formulas
from components.common.models.model_shape import ModelShape
from components.common.models.resource_formulas import FLOAT32_BYTES
from components.common.runtime import cpu_cores
from components.fine_tuning import adapters
from components.fine_tuning.acceleration import BFLOAT16_DEVICES
from components.fine_tuning.config import Recipe
from components.fine_tuning.training import count_parameters

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Share of a plain matrix product's rate that a training step reaches; measured with the demo on two idle cores.
TRAINING_EFFICIENCY = 0.5
# Seconds that a step takes in addition to its work: start Python, import kfp, torch, transformers, TRL and MLflow, and
# open the tracking store. From the events of a run of a tiny model on two cores of an AMD EPYC (Zen 4): from the end of the
# previous step to the step's own end, without the work on rows. `run` is the command around the steps.
START_SECONDS = {
    "run": 3.4,
    "resolve": 1.7,
    "data_curation": 2.7,
    "data_versioning": 3.2,
    "fine_tuning": 7.0,
    "evaluation": 8.0,
    "triton_packaging": 4.9,
    "registration": 3.7,
    "promotion": 2.3,
    "report": 2.6,
}
# Seconds of packaging a tiny model, assumed, not measured: converting and writing the weights, and starting Triton with the
# two stub processes of the python backend, which import torch and transformers.
WRITE_PACKAGE_SECONDS, START_TRITON_SECONDS = 5.0, 15.0
MAX_MATMUL_SIZE = 8192
MAX_MATMUL_ROWS = 4096
MAX_PASS_PARAMETERS = 400_000_000  # of the random model whose passes are measured: 1.6 GB in float32
MAX_PASS_TOKENS = 2048  # of a measured pass; longer ones have the same rate
MAX_LOGITS_BYTES = 1e9  # of a measured pass, and at most a quarter of the free memory
LOGIT_BYTES = 16  # of a token and word of the vocabulary: logits, log-probabilities and their gradients, in float32
COPY_BYTES = 1 << 28
PASS_SECONDS = 0.3  # of measurement for each kind of pass, and at least MIN_PASSES
MIN_PASSES = 2
DECODED_SEQUENCES = 16  # of the larger of two measured batches
DECODED_TOKENS = 5


@dataclass(frozen=True)
class ModelSpeed:
    """Speed of a model on this machine.

    Attributes:
        training: FLOP/s of a forward and a backward pass.
        forward: FLOP/s of a forward pass.
        token_seconds: seconds to generate a token of a single answer: reading the weights, and launching the operations.
        sequence_seconds: seconds that each further answer of a batch adds.
        basis: what was measured.
    """

    training: float
    forward: float
    token_seconds: float
    sequence_seconds: float
    basis: str

    def estimate_decoding(self, sequences: float, tokens: float) -> float:
        """Return the seconds to generate this number of tokens for each sequence of a batch."""
        return tokens * (self.token_seconds + max(sequences - 1, 0) * self.sequence_seconds)


def measure_speed(
    recipe: Recipe, config: PretrainedConfig, shape: ModelShape, *, rows: int, length: int, remote: bool = False
) -> ModelSpeed:
    """Measure the speed of a model with random weights on this machine.

    On a CPU, the passes of the model are measured, with its adapter; of a model with more than MAX_PASS_PARAMETERS, those of
    its first layers, scaled by FLOPs. On a GPU, or if these layers do not fit or do not run alone, the rate is
    TRAINING_EFFICIENCY of a matrix product's.

    Args:
        recipe: the training, whose adaptation and objective matter.
        config: the model's configuration.
        shape: the adapted model.
        rows: rows of a micro-batch.
        length: tokens per row.
        remote: whether another machine trains.
    """
    import torch

    torch.set_num_threads(cpu_cores.get_thread_count())  # as the run does
    # Another machine that trains may have a device that this one lacks.
    device = compute_devices.select_device("auto" if remote else recipe.device)
    layers = _count_pass_layers(shape) if device == "cpu" else 0
    if layers:
        # Some models do not run with their first layers, random tokens or this length: an estimate must not fail a dry run.
        with suppress(Exception):
            return _measure_passes(recipe, _shorten(config, layers), shape, layers, rows=rows, length=length)
    rate = TRAINING_EFFICIENCY * measure_matmul_rate(shape, device, rows=rows * length)
    seconds = _estimate_flops(shape, length) / rate
    weights = shape.parameters * _get_dtype(device).itemsize
    return ModelSpeed(
        rate,
        rate,
        max(seconds, weights / measure_copy_rate(device)),  # a single token reads every weight
        seconds,
        "half the rate of a matrix product, measured for one second",
    )


def _shorten(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration of a model with the first layers only, in the precision of a CPU."""
    import torch

    config = copy.deepcopy(config)
    text = config.get_text_config()
    config.dtype = text.dtype = torch.float32
    if (
        getattr(text, "pad_token_id", None) is None
    ):  # a model with an output layer for rewards refuses batches without it
        config.pad_token_id = text.pad_token_id = 0
    if layers < text.num_hidden_layers:
        text.num_hidden_layers = layers
        if vars(text).get("layer_types"):  # that of Mamba is a property
            text.layer_types = text.layer_types[:layers]
    return config


def _measure_passes(
    recipe: Recipe, config: PretrainedConfig, shape: ModelShape, layers: int, *, rows: int, length: int
) -> ModelSpeed:
    """Measure training, forward and decoding passes of a model with `layers` of the layers of `shape`, on a CPU."""
    import torch

    measured = ModelShape.from_configuration(config, count_parameters(config, recipe))
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or MAX_PASS_TOKENS
    limit = min(MAX_LOGITS_BYTES, compute_devices.get_free_memory_bytes("cpu") / 4) / LOGIT_BYTES / text.vocab_size
    limit = max(1, min(MAX_PASS_TOKENS, int(limit)))
    length = max(1, min(length, limit, context - DECODED_TOKENS))
    rows = max(1, min(rows, limit // length))
    has_dropout = recipe.has_lora_dropout and not adapters.has_adapted_experts(adapters.build_outline(config, recipe))
    dropout = recipe.lora.dropout if has_dropout else 0.0
    model = adapters.build_outline(config, recipe, device="cpu", dropout=dropout)
    ids = torch.randint(text.vocab_size, (rows, length))

    def train() -> None:
        logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        logprobs.detach().exp().mul(logprobs.detach()).sum()  # the entropy, which TRL's trainers log
        logprobs[..., 0].sum().backward()

    model.train()
    training = _time(train)
    model.eval()
    with torch.inference_mode():
        forward = _time(lambda: model(input_ids=ids, use_cache=False))
        one = many = forward / (rows * length)
        with suppress(Exception):  # state-space models have no key-value cache
            one, many = (_time_decoding(model, ids[:1], n) for n in (1, DECODED_SEQUENCES))
    tokens, scale = rows * length, _estimate_flops(shape, length) / _estimate_flops(measured, length)
    part = "" if layers == shape.layers else f"{layers} of {shape.layers} layers of "
    return ModelSpeed(
        tokens * resource_formulas.estimate_training_flops(measured, length) / training,
        tokens * _estimate_flops(measured, length) / forward,
        one * scale,
        max(many - one, 0.0) / (DECODED_SEQUENCES - 1) * scale,
        f"passes of {part}the model with random weights, measured on this machine",
    )


def _estimate_flops(shape: ModelShape, length: int) -> float:
    return resource_formulas.estimate_forward_flops(shape, length)


def _count_pass_layers(shape: ModelShape) -> int:
    """Return the number of layers of the model to measure; 0 if no layer fits beside embedding and output layer."""
    ends = 2 * shape.vocabulary * shape.hidden
    layer = max(1, (shape.parameters - ends) // shape.layers)
    free = compute_devices.get_free_memory_bytes("cpu") // (4 * 2 * FLOAT32_BYTES)  # a quarter, with the gradients
    return max(0, min(shape.layers, (min(MAX_PASS_PARAMETERS, free) - ends) // layer))


def _read_clock() -> float:
    """Return seconds; with one thread its processor time, which other processes do not lengthen."""
    return time.process_time() if cpu_cores.get_thread_count() == 1 else time.perf_counter()


def _time(run: Callable[[], object]) -> float:
    """Return the median seconds of a pass, without the first, which allocates memory."""
    run()
    times: list[float] = []
    while len(times) < MIN_PASSES or sum(times) < PASS_SECONDS:
        started = _read_clock()
        run()
        times.append(_read_clock() - started)
    return statistics.median(times)


def _time_decoding(model: Any, ids: Any, sequences: int) -> float:
    """Return the median seconds to generate a token for each row of a batch of equal rows."""
    cache = model(input_ids=ids, use_cache=True).past_key_values
    cache.batch_repeat_interleave(sequences)
    ids = ids.repeat(sequences, 1)
    times = []
    for _ in range(DECODED_TOKENS):
        started = _read_clock()
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        times.append(_read_clock() - started)
    return statistics.median(times[1:])


def measure_matmul_rate(shape: ModelShape, device: str, *, rows: int, seconds: float = 1.0) -> float:
    """Measure a device's floating-point operations per second on a matrix product of the model's shape.

    Args:
        shape: the model, whose hidden and intermediate sizes give the second matrix.
        device: the device.
        rows: the rows of the first matrix, limited to MAX_MATMUL_ROWS.
        seconds: the duration of the measurement.
    """
    import torch

    inner, outer = min(shape.hidden, MAX_MATMUL_SIZE), min(shape.intermediate, MAX_MATMUL_SIZE)
    tokens, dtype = min(rows, MAX_MATMUL_ROWS), _get_dtype(device)
    left = torch.ones(tokens, inner, device=device, dtype=dtype)
    right = torch.ones(inner, outer, device=device, dtype=dtype)
    return 2 * tokens * inner * outer * _count_per_second(lambda: torch.mm(left, right), device, seconds)


def measure_copy_rate(device: str, *, seconds: float = 0.2) -> float:
    """Measure the bytes per second that a device reads while it copies memory.

    Args:
        device: the device.
        seconds: the duration of the measurement.
    """
    import torch

    source = torch.ones(COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    # A copy also writes each byte, which a read of weights does not.
    return 2 * COPY_BYTES * _count_per_second(lambda: target.copy_(source), device, seconds)


def _get_dtype(device: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if device in BFLOAT16_DEVICES else torch.float32


def _count_per_second(run: Callable[[], object], device: str, seconds: float) -> float:
    """Return the runs per second, without the first, which starts threads."""
    module = compute_devices.get_torch_module(device)

    def finish() -> None:
        run()
        if module is not None:
            module.synchronize()

    finish()
    started, runs = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        finish()
        runs += 1
    return runs / (time.perf_counter() - started)
