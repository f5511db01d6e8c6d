"""Choice of the settings that a recipe leaves open (null), from the rows, the model and the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.models.model_shape import ModelShape
from components.common.models.row_lengths import LENGTH_MULTIPLE, LENGTH_QUANTILE, find_covering_length
from components.common.runtime.errors import ConfigurationError
from components.fine_tuning import acceleration
from components.fine_tuning.acceleration import TrainingDevice
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.objectives import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLED_ROWS = 2000  # rows whose tokens are counted, evenly spread
MIN_LENGTH = 8  # tokens, the minimum of fine_tuning.max_length
MAX_SPLIT_LENGTH = 2048  # tokens of an example if long rows are split: nothing is lost, and attention costs less
# Rate of full training with AdamW at a hidden size h: 5e-5 · (2000/h)^0.781, fitted on Llama models (Schulman et al.,
# "LoRA Without Regret", Thinking Machines Lab, 2025, and its tinker-cookbook). 2.9e-5 for 8B, 1.3e-4 for 135M.
BASE_LEARNING_RATE, BASE_HIDDEN_SIZE, HIDDEN_SIZE_EXPONENT = 5e-5, 2000, 0.781
# LoRA loses quality with large batches (the same source). QLoRA (arXiv 2305.14314) trains with 16 rows.
BATCH_ROWS = 16
MICRO_BATCH_ROWS = (8, 4, 2, 1)
# A CPU is slower with more rows: LoRA of 135M parameters on two cores trains 132, 153, 213 and 197 tokens/s with 8, 4, 2
# and 1 rows of 512 tokens. The memory of another machine is not known.
MAX_CPU_OR_REMOTE_ROWS = 2


@dataclass(frozen=True)
class CompletedRecipe:
    """A recipe with every setting, and one sentence for each setting that was chosen."""

    recipe: Recipe
    reasons: list[str]


def has_open_settings(config: FineTuningConfig) -> bool:
    """Return whether the recipe leaves settings open that `complete_recipe` chooses."""
    settings = (config.learning_rate, config.batch_size, config.micro_batch_size, config.max_length)
    return None in settings or (config.epochs is None and not config.max_steps)


def share_settings(config: FineTuningConfig, max_length: int) -> FineTuningConfig:
    """Return a sweep with equal values of the settings that define the validation loss of its recipes."""
    shared: dict[str, int] = {"max_length": max_length}
    if config.objective_spec.min_micro_batch_size > 1 and config.micro_batch_size is None:
        shared["micro_batch_size"] = config.objective_spec.min_micro_batch_size
    return config.model_copy(update=shared)


def complete_recipe(
    config: FineTuningConfig, lengths: Sequence[int], model_config: Any, shape: ModelShape, device: TrainingDevice
) -> CompletedRecipe:
    """Choose the settings that are null. Equal inputs give equal recipes.

    Args:
        config: The recipe; a sweep is dropped.
        lengths: Tokens of the training rows, or of a sample of them. Used only if max_length is null.
        model_config: The base model's transformers configuration.
        shape: Shape of the adapted model.
        device: The device that trains.
    """
    reasons, chosen = [], dict[str, Any]()
    objective, adaptation = config.objective_spec, config.adaptation_spec
    max_length = config.max_length
    if max_length is None:
        max_length, reason = _choose_max_length(config, lengths, model_config, shape, device)
        reasons.append(f"max_length {max_length}: {reason}")
    rows = config.micro_batch_size
    if rows is None:
        rows, reason = _choose_micro_batch_size(config, max_length, shape, device)
        reasons.append(f"micro_batch_size {rows}: {reason}")
    if config.batch_size is None:
        concurrent_rows = rows * config.processes
        chosen["batch_size"] = math.ceil(BATCH_ROWS / concurrent_rows) * concurrent_rows
        if not config.tokens_per_step:
            reasons.append(f"batch_size {chosen['batch_size']}: the default for fine-tuning")
    if config.epochs is None:
        chosen["epochs"] = objective.epochs
        if not config.max_steps:
            reasons.append(f"epochs {objective.epochs:g}: the default of objective {config.objective}")
    if config.learning_rate is None:
        factor = adaptation.learning_rate_factor * objective.learning_rate_factor
        rate = factor * BASE_LEARNING_RATE * (BASE_HIDDEN_SIZE / shape.hidden) ** HIDDEN_SIZE_EXPONENT
        chosen["learning_rate"] = float(f"{rate:.2g}")
        reasons.append(
            f"learning_rate {rate:.2g}: for {config.adaptation}, {config.objective} and a hidden size of {shape.hidden}"
        )
    values = config.model_dump(exclude={"sweep"}) | {"max_length": max_length, "micro_batch_size": rows} | chosen
    return CompletedRecipe(Recipe.model_validate(values), reasons)


def _choose_max_length(
    config: FineTuningConfig, lengths: Sequence[int], model_config: Any, shape: ModelShape, device: TrainingDevice
) -> tuple[int, str]:
    """Return the length of LENGTH_QUANTILE of the rows, within context and memory, and the reason."""
    covered, length = find_covering_length(lengths)
    reason = f"{LENGTH_QUANTILE:.0%} of the rows have at most {covered:,} tokens"
    if config.objective_spec.splits_long_rows and length > MAX_SPLIT_LENGTH:
        length, reason = MAX_SPLIT_LENGTH, f"{reason}; longer rows are split"
    context = get_context_length(config, model_config)
    if context is not None and context < MIN_LENGTH:
        raise ConfigurationError(
            f"fine_tuning.prompt.virtual_tokens leaves {context} tokens of the model's context; expected at least "
            f"{MIN_LENGTH}",
            hint="Reduce fine_tuning.prompt.virtual_tokens.",
        )
    if context and length > context:
        length, reason = context, f"{reason}, and the model's context is {context:,}"
    if device.memory:
        rows, checkpointing = config.micro_batch_size or MICRO_BATCH_ROWS[-1], config.activation_checkpointing != "off"
        rows = max(rows, config.objective_spec.min_micro_batch_size)
        fitting = length
        while fitting > LENGTH_MULTIPLE and not _fits(config, shape, device, rows, fitting, checkpointing):
            fitting = (fitting - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        if fitting < length:
            length, reason = fitting, f"{reason}, and {device.memory / 1e9:.0f} GB of memory allow {fitting:,}"
    return length, reason


def _choose_micro_batch_size(
    config: FineTuningConfig, length: int, shape: ModelShape, device: TrainingDevice
) -> tuple[int, str]:
    """Return the largest number of rows that fits into memory without recomputed activations, and the reason."""
    objective = config.objective_spec
    most = MICRO_BATCH_ROWS[0] if device.is_gpu and device.memory else MAX_CPU_OR_REMOTE_ROWS
    candidates = [
        rows
        for rows in MICRO_BATCH_ROWS
        if objective.min_micro_batch_size <= rows <= most
        and (config.tokens_per_step or (config.batch_size or rows * config.processes) % (rows * config.processes) == 0)
    ] or [objective.min_micro_batch_size]
    if device.memory is None:
        return candidates[0], "the memory of the machine that trains is not known"
    checkpointing = config.activation_checkpointing == "on"
    for rows in candidates:
        if _fits(config, shape, device, rows, length, checkpointing):
            return rows, f"fits into {device.memory / 1e9:.0f} GB of memory"
    return candidates[-1], f"more rows do not fit into {device.memory / 1e9:.0f} GB of memory"


def _fits(
    config: FineTuningConfig, shape: ModelShape, device: TrainingDevice, rows: int, length: int, checkpointing: bool
) -> bool:
    required = acceleration.estimate_required_memory(
        config, shape, rows=rows, length=length, gpu=device.is_gpu, checkpointing=checkpointing
    )
    return required <= acceleration.MAX_MEMORY_FRACTION * (device.memory or math.inf)


def get_context_length(config: FineTuningConfig, model_config: Any) -> int | None:
    """Return the model's context in tokens, less the recipe's virtual tokens; None if the model sets no limit."""
    positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    virtual_tokens = config.prompt.virtual_tokens if config.adaptation_spec.is_prompt_based else 0
    return int(positions) - virtual_tokens if positions else None


def measure_lengths(rows: Iterable[Row], config: FineTuningConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each row that has an answer, without truncation; of several sequences, the longest."""
    lengths = []
    for row in rows:
        sequences = [
            len(example.get("input_ids") or example["prompt_ids"])
            + max((len(example.get(f"{name}_ids", ())) for name in ("chosen", "rejected", "completion")), default=0)
            for example in config.objective_spec.encode(tokenizer, row, 2**31).examples
        ]
        lengths += [max(sequences)] if sequences else []
    return lengths
