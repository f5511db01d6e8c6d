"""Inputs of `tuneline size`: options, a customization's recipe, and the tokens of a dataset."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.models.accelerators import PRECISIONS, Accelerator, load_accelerators
from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import Reporter
from components.data_curation.config import TokensConfig
from components.data_curation.token_statistics import measure_tokens
from components.fine_tuning.config import FineTuningConfig, PromptConfig
from components.fine_tuning.optimizers import OPTIMIZERS
from pipelines.planning.architectures import LINEAR_NAMES, Architecture, find_architecture
from pipelines.planning.serving_size import VALUE_BYTES
from pipelines.planning.sizing import DEFAULT_LENGTH, OBJECTIVES, SizingRequest
from pipelines.planning.throughput import STACKS

CHOICES: dict[str, tuple[str, ...]] = {
    "--precision": PRECISIONS,
    "--stack": tuple(STACKS),
    "--objective": OBJECTIVES,
    "--recomputation": ("auto", "on", "off"),
    "--offload": ("optimizer", "all"),
    "--weights-precision": tuple(VALUE_BYTES),
    "--cache-precision": ("bf16", "fp8"),
}


def parse_gpu(text: str) -> tuple[Accelerator, int | None]:
    """Return the accelerator and the number of GPUs of TYPE or TYPE:COUNT.

    Raises:
        UsageError: the accelerator is unknown, or the number is not positive.
    """
    name, _, count = text.strip().lower().partition(":")
    known = load_accelerators()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        suggestion = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
        raise UsageError(
            f"--gpu {name!r} is not a known accelerator", hint=f"{suggestion}Known accelerators: {', '.join(known)}."
        )
    if count and not re.fullmatch(r"[1-9]\d{0,5}", count):
        raise UsageError(
            f"--gpu {text}: {count!r} is not a number of GPUs", hint=f"Use TYPE or TYPE:COUNT, such as {name}:8."
        )
    return known[name], int(count) if count else None


def check_choices(values: Mapping[str, str]) -> None:
    """Check the values of options with a fixed set of values; "" stands for the default.

    Raises:
        UsageError: a value is not one of CHOICES.
    """
    for option, value in values.items():
        choices = CHOICES[option]
        if value and value not in choices:
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise UsageError(f"{option} is {value!r}; expected {allowed}", hint=f"Example: {option} {choices[0]}")


def check_precision(device: Accelerator, precision: str) -> None:
    """Check that the accelerator computes in this precision.

    Raises:
        UsageError: it does not.
    """
    check_choices({"--precision": precision})
    if device.get_peak_flops(precision) is None:
        raise UsageError(
            f"--precision {precision}: {device.name} has no {precision} rate", hint="Use --precision bf16."
        )


def count_adapter_parameters(architecture: Architecture, config: FineTuningConfig) -> int | None:
    """Return the trained parameters that the adaptation adds; None if all weights are trained."""
    spec, prompt = config.adaptation_spec, config.prompt
    if spec.trains_all_weights:
        return None
    if spec.is_low_rank:
        targets = LINEAR_NAMES if isinstance(config.lora.target_modules, str) else config.lora.target_modules
        return architecture.count_lora_parameters(config.lora.rank, targets)
    if spec.is_prompt_based:
        tokens = prompt.virtual_tokens * architecture.h
        return tokens + (_count_encoder(architecture.h, prompt) if config.adaptation == "p_tuning" else 0)
    return architecture.L * (2 * architecture.kv * architecture.head + architecture.i)  # ia3: keys, values and MLP


def _count_encoder(hidden: int, prompt: PromptConfig) -> int:
    """Return the parameters of PEFT's MLP encoder: three linear layers with biases."""
    size = prompt.encoder_size
    return (hidden + 1) * size + (size + 1) * size + (size + 1) * hidden


def build_request(
    config: FineTuningConfig, device: Accelerator, gpus: int | None, model: str, **options: Any
) -> SizingRequest:
    """Return the request of a recipe; settings that the recipe leaves open have the values of `assumptions`.

    Args:
        model: model in place of the recipe's base model; "" for that of the recipe.
        options: fields of the request. None: the value of the recipe, or the default.
    """
    architecture = find_architecture(model or strip_model_source(config.base_model))
    gpus = gpus or (config.processes if config.processes > 1 else None)
    assumptions, default_batch = [], max(config.objective_spec.batch_rows, gpus or 1)
    if config.batch_size is None and options.get("global_batch") is None:
        assumptions.append(f"the global batch has {format_count(default_batch, 'row')}")
    recipe = _read_recipe(config, architecture, default_batch)
    if options.get("objective"):
        recipe["precomputes_reference"] = False
    elif config.objective_spec.generates:
        recipe |= _count_answers(config, recipe["global_batch"])
        assumptions += _describe_generation(config)
        if rows := options.get("rows"):
            options["rows"] = rows * config.answers_per_prompt
    given = {name: value for name, value in options.items() if value is not None}
    request = SizingRequest(architecture, device, gpus, **{**recipe, **given})
    _check_mean_length(request)
    if config.max_steps and not {"epochs", "tokens", "rows"} & given.keys():
        batch_tokens = request.global_batch * (request.length if request.packing else request.row_tokens)
        request = replace(request, tokens=config.max_steps * batch_tokens, epochs=1.0)
    return replace(request, assumptions=tuple(assumptions))


def _read_recipe(config: FineTuningConfig, architecture: Architecture, default_batch: int) -> dict[str, Any]:
    """Return the fields of a request that a recipe sets."""
    objective = config.objective_spec
    recipe = {
        "adaptation": config.adaptation,
        "objective": "sft" if objective.is_causal else config.objective,
        "precomputes_reference": config.precomputes_reference,
        "adapter": count_adapter_parameters(architecture, config),
        "optimizer_bytes": OPTIMIZERS[config.optimizer].state_bytes,
        "dropout": config.has_lora_dropout,
        "fused": config.compile or config.fused_kernels != "off",
        "masked_attention": config.has_masked_attention,
        "deepspeed": config.strategy == "zero3",
        "packing": config.packing,
        "micro_batch": config.micro_batch_size,
        "global_batch": config.batch_size or default_batch,
        "epochs": config.epochs or objective.epochs,
        "recomputation": config.activation_checkpointing,
        "stage": {"ddp": None if config.processes == 1 else 0}.get(config.strategy, 3),
    }
    return recipe | ({"length": config.max_length} if config.max_length else {})


def _count_answers(config: FineTuningConfig, prompts: int) -> dict[str, int]:
    """Return the rows per step and the longest row of a training that generates answers to this number of prompts."""
    return {
        "micro_batch": (config.micro_batch_size or 1) * config.answers_per_prompt,
        "global_batch": prompts * config.answers_per_prompt,
        "length": (config.max_length or DEFAULT_LENGTH) + config.max_answer_tokens,
    }


def _describe_generation(config: FineTuningConfig) -> list[str]:
    """Return the assumptions on an objective that generates answers during training."""
    answers = config.answers_per_prompt
    number = f"{answers} answers" if answers > 1 else "one answer"
    assumptions = [f"each prompt has {number} of {config.max_answer_tokens:,} tokens"]
    if config.distillation.teacher or any(reward.model for reward in config.grpo.rewards):
        assumptions.append("the memory and the work of a teacher and of reward models are not included")
    return assumptions


def _check_mean_length(request: SizingRequest) -> None:
    if request.mean_length is not None and request.mean_length > request.length:
        raise UsageError(
            f"--mean-length {request.mean_length:g} exceeds the longest row, {request.length} tokens",
            hint=f"Use --length {math.ceil(request.mean_length)} or more.",
        )


def strip_model_source(base_model: str) -> str:
    """Return the name or path in a base model of the configuration, without its scheme and revision."""
    name = re.sub(r"^(hf://|embedded:)", "", base_model)
    return name.partition("@")[0] if base_model.startswith("hf://") else name


def count_dataset_tokens(dataset: Path, base_model: str, length: int, reporter: Reporter) -> tuple[int, float]:
    """Return the tokens of a dataset's training split, and the mean tokens per row.

    At most 5,000 rows are tokenized; the total is extrapolated. Tokens beyond the longest row are not trained on.

    Raises:
        UsageError: the tokens cannot be counted.
    """
    manifest = artifact_folder.read_manifest(dataset)
    if base_model.startswith("embedded:"):  # the default, which has no tokenizer.json before its conversion
        model_loading.resolve_base_model(base_model, reporter)
    measured = measure_tokens(
        [dataset / "train.parquet"],
        str(manifest.summary.get("rows_kind", "")),
        TokensConfig(base_model=base_model, max_length=length),
        reporter,
    )
    if isinstance(measured, str):
        raise UsageError(f"--dataset {dataset}: {measured}", hint="Add --tokens, or --rows and --mean-length.")
    kept = 1 - measured.truncated_tokens
    return round(measured.total * kept), measured.mean * kept


def parse_bytes(option: str, text: str) -> float | None:
    """Return the bytes of a size such as 200GB; None for "".

    Raises:
        UsageError: the text is not a positive size.
    """
    if not text:
        return None
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise UsageError(f"{option} {text!r} is not a size", hint="Use a size such as 500MB or 2TB.")
    return float(size)
