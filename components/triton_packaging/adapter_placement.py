"""Decides how a model's adapter is packaged: merged into the weights, or attached when the model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from components.common.models import model_loading
from components.common.models.adaptations import find_adaptation
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ConfigurationError, InputError
from components.triton_packaging.backends import BACKENDS
from components.triton_packaging.config import TritonPackagingConfig, check_quantization

Mode = Literal["none", "merged", "attached"]
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's max_lora_rank
MERGE_HINT = "Set triton_packaging.adapter to merged (without --adapter), or triton_packaging.backend to python."


@dataclass(frozen=True)
class AdapterPlacement:
    """The adapters of a package and how the package contains them.

    Attributes:
        mode: whether the model's adapter is merged or attached; "none" without an adapter.
        reason: why the adapter cannot be merged; empty if it can.
        adapters: attached adapters by name.
    """

    mode: Mode
    reason: str
    adapters: Mapping[str, LoadableModel]


class AdapterSettings(TypedDict, total=False):
    """Keys of adapter_config.json that packaging reads."""

    peft_type: str
    r: int
    rank_pattern: Mapping[str, int] | None
    num_virtual_tokens: int | None


def place_adapters(
    model: LoadableModel, config: TritonPackagingConfig, others: Mapping[str, LoadableModel]
) -> AdapterPlacement:
    """Decide the placement for a package of `model`.

    Args:
        others: models with additional adapters over the same base, by adapter name.

    Raises:
        ConfigurationError: the model or the backend does not support the configuration.
        InputError: an adapter was trained for another base, or the backend would ignore some of its settings.
    """
    backend = BACKENDS[config.backend]
    mode, reason = _choose_mode(model, config)
    check_quantization(config, is_attached=mode == "attached" or bool(others))
    if others:
        if not backend.has_multiple_adapters or mode == "merged":
            raise ConfigurationError(
                "--adapter requires triton_packaging.backend vllm and attached adapters; the configuration sets "
                f"backend {config.backend} and adapter {config.adapter}",
                hint="Set triton_packaging.backend=vllm and triton_packaging.adapter=auto, or package each model "
                "separately.",
            )
        if model.adapter is None and model.artifact is not None:
            raise InputError(
                "the model has fully fine-tuned weights, but the other adapters were trained for its base model",
                hint="Package the base model with one --adapter option for each adapter.",
            )
        for name, other in others.items():
            if name == config.model_name:
                raise ConfigurationError(
                    f"--adapter {name}: the packaged model has the same name",
                    hint="Choose another name for the adapter.",
                )
            if other.adapter is None:
                raise InputError(
                    f"--adapter {name}: the model has full weights instead of an adapter",
                    hint="Package this model separately.",
                )
            if other.base.sha256 != model.base.sha256:
                raise InputError(
                    f"--adapter {name}: its base model is {other.base.sha256[:12]} ({other.base.name}); expected "
                    f"{model.base.sha256[:12]} ({model.base.name})",
                    hint="Package adapters of different base models separately.",
                )
    adapters = {**({config.model_name: model} if mode == "attached" else {}), **others}
    for name, adapted in adapters.items():
        settings = read_adapter_settings(adapted)
        kind = str(settings.get("peft_type"))
        if not backend.can_attach(kind):
            raise InputError(f"the adapter {name} is of type {kind}; vLLM supports only LoRA adapters", hint=MERGE_HINT)
        if ignored := backend.find_ignored_settings(settings):
            raise InputError(
                f"the adapter {name} has {', '.join(ignored)}, which vLLM does not support", hint=MERGE_HINT
            )
    return AdapterPlacement(mode, reason, adapters)


def read_adapter_settings(model: LoadableModel) -> AdapterSettings:
    """Return the model's adapter_config.json; an empty dictionary if the model has no adapter."""
    if model.adapter is None:
        return {}
    settings: AdapterSettings = json.loads((model.adapter / model_loading.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return settings


def compute_required_rank(adapters: Mapping[str, LoadableModel]) -> int:
    """Return the lowest max_lora_rank of vLLM that fits all adapters.

    Raises:
        InputError: an adapter exceeds the highest rank that vLLM supports.
    """
    highest = 0
    for name, model in adapters.items():
        settings = read_adapter_settings(model)
        rank = max((settings["r"], *(settings.get("rank_pattern") or {}).values()))
        if rank > VLLM_LORA_RANKS[-1]:
            raise InputError(
                f"the adapter {name} has rank {rank}; vLLM supports ranks up to {VLLM_LORA_RANKS[-1]}", hint=MERGE_HINT
            )
        highest = max(highest, rank)
    return next(rank for rank in VLLM_LORA_RANKS if rank >= highest)


def parse_adapter_options(options: Sequence[str]) -> dict[str, Path]:
    """Parse the values of `--adapter NAME=MODEL_DIR` options.

    Returns:
        The model folders by adapter name.

    Raises:
        ConfigurationError: a value has another form, or a name is invalid or repeated.
    """
    folders: dict[str, Path] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not folder or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise ConfigurationError(
                f"--adapter is {option}; expected NAME=MODEL_DIR",
                hint="Use letters, digits, dots, dashes and underscores in NAME: --adapter legal=models/legal.",
            )
        if name in folders:
            raise ConfigurationError(f"--adapter {name} is given twice", hint="Give each adapter a unique name.")
        folders[name] = Path(folder)
    return folders


def _choose_mode(model: LoadableModel, config: TritonPackagingConfig) -> tuple[Mode, str]:
    """Return the adapter mode, and the reason if the adapter cannot be merged."""
    if model.adapter is None:
        return "none", ""
    backend, kind = BACKENDS[config.backend], str(read_adapter_settings(model).get("peft_type"))
    adaptation = find_adaptation(kind)
    if adaptation is not None and adaptation.is_mergeable:
        is_attachable = backend.can_attach(kind) and config.quantization == "none"
        default = backend.default_mode if is_attachable else "merged"
        return (default if config.adapter == "auto" else config.adapter), ""
    if not backend.can_attach(kind):
        raise ConfigurationError(
            f"the model's adapter is of type {kind}; vLLM supports only LoRA adapters",
            hint="Set triton_packaging.backend to python, or fine-tune with adaptation lora or full.",
        )
    if config.adapter == "merged":
        raise ConfigurationError(
            f"triton_packaging.adapter is merged, but an adapter of type {kind} cannot be merged into weights",
            hint="Set triton_packaging.adapter to auto or attached, or fine-tune with adaptation lora or full.",
        )
    reason = "cannot be merged into the weights; it is attached, and requests are answered one by one"
    return "attached", f"an adapter of type {kind} {reason}"
