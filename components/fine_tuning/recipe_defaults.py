"""Choice of the settings that a recipe leaves open (null), from the rows, the model and the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.models import resource_formulas
from components.common.models.model_shape import ModelShape
from components.common.models.row_lengths import LENGTH_MULTIPLE, find_covering_length
from components.common.runtime.counts import format_count
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
MICRO_BATCH_ROWS = (8, 4, 2, 1)
# A CPU is slower with more rows: LoRA of 135M parameters on two cores trains 132, 153, 213 and 197 tokens/s with 8, 4, 2
# and 1 rows of 512 tokens. The memory of another machine is not known.
MAX_CPU_OR_REMOTE_ROWS = 2


# A training run is refused only if the estimate exceeds the memory by more than its error: at most 16% on one GPU here, and in
# published runs on several GPUs at most 19.5% too high, with gathered layers and ZeRO-3's buffers (docs/reference/sizing-validation.md).
MAX_ESTIMATE_RATIO = 1.2


@dataclass(frozen=True)
class CompletedRecipe:
    """A recipe with every setting, and one sentence for each setting that was chosen."""

    recipe: Recipe
    reasons: list[str]


def has_open_settings(config: FineTuningConfig) -> bool:
    """Return whether the recipe leaves settings open that `complete_recipe` chooses."""
    settings = (config.learning_rate, config.batch_size, config.micro_batch_size, config.max_length)
    is_early_stopping_open = config.preset_spec.early_stopping and config.validation_rows and not config.early_stopping
    return None in settings or (config.epochs is None and not config.max_steps) or bool(is_early_stopping_open)


def share_settings(config: FineTuningConfig, max_length: int) -> FineTuningConfig:
    """Return a sweep with equal values of the settings that define the validation loss of its recipes."""
    shared: dict[str, int] = {"max_length": max_length}
    if config.objective_spec.micro_batch_term and config.micro_batch_size is None:
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
    objective, adaptation, preset = config.objective_spec, config.adaptation_spec, config.preset_spec
    if config.preset != "balanced":
        reasons.append(f"preset {config.preset}: {preset.summary}, for settings that the recipe omits")
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
        chosen["batch_size"] = math.ceil(objective.batch_rows / concurrent_rows) * concurrent_rows
        if not config.tokens_per_step:
            reasons.append(f"batch_size {chosen['batch_size']}: the default for fine-tuning")
    if config.epochs is None:
        chosen["epochs"] = min(preset.epochs_factor * objective.epochs, preset.max_epochs or math.inf)
        if not config.max_steps:
            changed = chosen["epochs"] != objective.epochs
            source = f"preset {config.preset}" if changed else f"the default of objective {config.objective}"
            reasons.append(f"epochs {chosen['epochs']:g}: {source}")
    if config.early_stopping is None and preset.early_stopping and config.validation_rows:
        chosen["early_stopping"] = preset.early_stopping
        reasons.append(f"early_stopping {preset.early_stopping}: preset {config.preset}")
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
    """Return the length of the preset's share of the rows, within context and memory, and the reason."""
    preset = config.preset_spec
    covered, length = find_covering_length(lengths, preset.length_quantile)
    reason = f"{preset.length_quantile:.0%} of the rows have at most {covered:,} tokens"
    if config.objective_spec.splits_long_rows and length > MAX_SPLIT_LENGTH:
        length, reason = (
            MAX_SPLIT_LENGTH,
            f"{reason}; rows are split into examples of at most {MAX_SPLIT_LENGTH:,} tokens",
        )
    if preset.longest and length > preset.longest:
        length, reason = preset.longest, f"{reason}, and preset {config.preset} allows at most {preset.longest:,}"
    context = get_context_length(config, model_config)
    if context is not None and context < MIN_LENGTH:
        setting = "fine_tuning.prompt.virtual_tokens"
        if config.max_answer_tokens:
            section = "distillation" if config.objective_spec.has_teacher else "grpo"
            setting = f"fine_tuning.{section}.max_answer_tokens"
        raise ConfigurationError(
            f"{setting} leaves {format_count(context, 'token')} of the model's context; expected at least {MIN_LENGTH}",
            hint=f"Reduce {setting}.",
        )
    if context and length > context:
        length, reason = context, f"{reason}, and the model's context has {context:,} tokens"
    if device.memory:
        rows, checkpointing = config.micro_batch_size or MICRO_BATCH_ROWS[-1], config.activation_checkpointing != "off"
        rows = max(rows, config.objective_spec.min_micro_batch_size)
        fitting = length
        while fitting > LENGTH_MULTIPLE and not _fits(config, shape, device, rows, fitting, checkpointing):
            fitting = (fitting - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        if fitting < length:
            length, reason = fitting, f"{reason}, and {device.memory / 1e9:.0f} GB of memory allow at most {fitting:,}"
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
    return required <= resource_formulas.MAX_MEMORY_FRACTION * (device.memory or math.inf)


def check_memory(recipe: Recipe, longest_example: int, shape: ModelShape, device: TrainingDevice) -> None:
    """Check that a training step of the longest rows can fit into the device's memory.

    Logits are left out of the estimate: fused kernels compute them in parts, and others only those of answers.

    Args:
        recipe: The recipe.
        longest_example: Tokens of the longest example, truncated at max_length; packed rows have max_length.
        shape: Shape of the adapted model.
        device: The device that trains; a device with unknown memory is accepted.

    Raises:
        ConfigurationError: the estimate exceeds all memory by more than its error; the hint is the nearest setting.
    """
    if device.memory is None:
        return
    limit, checkpointing = MAX_ESTIMATE_RATIO * device.memory, recipe.activation_checkpointing != "off"

    def estimate(rows: int, length: int) -> dict[str, int]:
        options: dict[str, Any] = {"gpu": device.is_gpu, "checkpointing": checkpointing}
        parts = acceleration.estimate_memory_parts(recipe, shape, rows=rows, length=length, **options)
        return {name: size for name, size in parts.items() if name not in ("logits", "total")}

    longest = math.ceil(longest_example / (2 if recipe.objective_spec.is_paired else 1))
    rows, fewest = recipe.micro_batch_size, recipe.objective_spec.min_micro_batch_size
    parts = estimate(rows, longest)
    required = sum(parts.values())
    if required <= limit:
        return
    fitting = longest
    while fitting > LENGTH_MULTIPLE and sum(estimate(fewest, fitting).values()) > limit:
        fitting = (fitting - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
    if not checkpointing:
        hint = "Set fine_tuning.activation_checkpointing to auto."
    elif fitting == longest:
        hint = f"Set fine_tuning.micro_batch_size to {fewest}."
    elif sum(estimate(fewest, fitting).values()) <= limit:
        hint = f"Set fine_tuning.micro_batch_size to {fewest} and fine_tuning.max_length to {fitting}."
    else:
        hint = "Use a smaller model, an adaptation that needs less memory such as lora, or a machine with more memory."
    arithmetic = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    raise ConfigurationError(
        f"training does not fit into memory: the estimate for {format_count(rows, 'row')} of {longest:,} tokens is "
        f"{required / 1e9:.1f} GB ({arithmetic}); each process has {device.memory / 1e9:.1f} GB",
        hint=hint,
    )


def get_context_length(config: FineTuningConfig, model_config: Any) -> int | None:
    """Return the context in tokens with the recipe's scaling, less virtual tokens and generated answers; None without a limit."""
    positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    virtual_tokens = config.prompt.virtual_tokens if config.adaptation_spec.is_prompt_based else 0
    scaled = round(config.rope_scaling.factor * positions) if positions else None
    return scaled - virtual_tokens - config.max_answer_tokens if scaled else None


def describe_exceeded_context(recipe: Recipe, model_config: Any) -> str | None:
    """Return a warning if max_length exceeds the model's context; None otherwise."""
    context = get_context_length(recipe, model_config)
    if not context or recipe.max_length <= context:
        return None
    return (
        f"fine_tuning.max_length is {recipe.max_length}; the model's context is {context} tokens. Lower max_length, or "
        "extend the context with fine_tuning.rope_scaling"
    )


def measure_lengths(rows: Iterable[Row], config: FineTuningConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each row that has an answer, without truncation; of several sequences, the longest."""
    lengths = []
    for row in rows:
        sequences = [
            len(example.get("input_ids") or example.get("prompt_ids") or example.get("prompt", ()))
            + max((len(example.get(f"{name}_ids", ())) for name in ("chosen", "rejected", "completion")), default=0)
            for example in config.objective_spec.encode(tokenizer, row, 2**31).examples
        ]
        lengths += [max(sequences)] if sequences else []
    return lengths
