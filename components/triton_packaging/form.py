"""How a model's adapter is packaged: merged into the weights or attached to them, and what each backend can take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.common import models
from components.common.errors import ConfigurationError, InputError
from components.common.models import Model
from components.triton_packaging.config import TritonPackagingConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those vLLM sets memory aside for
# What vLLM does not compute of an adapter, by PEFT's name for it, and the values that ask for nothing.
BEYOND_VLLM: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
}
MERGEABLE = "LORA"


@dataclass(frozen=True)
class Form:
    """What becomes of a model's adapter. `reason` is told where nobody asked for it; `adapters` are those attached, by name."""

    adapter: Literal["none", "merged", "attached"]
    reason: str
    adapters: Mapping[str, Model]


def decide(model: Model, config: TritonPackagingConfig, others: Mapping[str, Model]) -> Form:
    """The form of a package of `model`, with `others` as further adapters over its base.

    Raises ConfigurationError for a configuration that the model or the backend cannot follow, InputError for adapters that do not belong
    to one base.
    """
    kind = adapter_kind(model)
    where, reason = _place(kind, config)
    if others:
        _check_others(model, config, where, others)
    adapters = {**({config.model_name: model} if where == "attached" else {}), **others}
    if config.backend == "vllm":
        for name, one in adapters.items():
            _check_vllm(name, one)
    return Form(where, reason, adapters)


def adapter_kind(model: Model) -> str | None:
    """PEFT's name for the kind of a model's adapter, such as LORA; None where it has none."""
    return str(adapter_settings(model).get("peft_type")) if model.adapter else None


def adapter_settings(model: Model) -> dict[str, Any]:
    """What is in the model's adapter_config.json; nothing where it has no adapter."""
    if model.adapter is None:
        return {}
    settings: dict[str, Any] = json.loads((model.adapter / models.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return settings


def virtual_tokens(model: Model) -> int:
    """The tokens of a context that a learned prompt takes; 0 for other models."""
    return int(adapter_settings(model).get("num_virtual_tokens") or 0)


def lora_rank(model: Model) -> int:
    """The highest rank in a LoRA adapter."""
    settings = adapter_settings(model)
    return max(int(rank) for rank in (settings["r"], *(settings.get("rank_pattern") or {}).values()))


def fitting_rank(adapters: Mapping[str, Model]) -> int:
    """The lowest rank vLLM can be told that all these adapters fit in. Raises InputError for one beyond all of them."""
    for name, model in adapters.items():
        if lora_rank(model) > RANKS[-1]:
            raise InputError(f"the adapter {name} has rank {lora_rank(model)}; vLLM takes up to {RANKS[-1]}", hint=MERGE)
    return next(rank for rank in RANKS if rank >= max(map(lora_rank, adapters.values())))


def named(given: list[str]) -> dict[str, Path]:
    """The adapters of `--adapter NAME=MODEL_DIR` options. Raises ConfigurationError for a name that cannot be one, or stands twice."""
    found: dict[str, Path] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"--adapter {one} is not of the form NAME=MODEL_DIR",
                hint="A name has letters, digits, dots, dashes and underscores: --adapter legal=models/legal.",
            )
        if name in found:
            raise ConfigurationError(f"--adapter {name} is given twice", hint="A request names one adapter: give each its own name.")
        found[name] = Path(folder)
    return found


def _place(kind: str | None, config: TritonPackagingConfig) -> tuple[Literal["none", "merged", "attached"], str]:
    if kind is None:
        return "none", ""
    if kind != MERGEABLE:
        return "attached", _prompt(kind, config)
    if config.adapter != "auto":
        return config.adapter, ""
    return ("attached" if config.backend == "vllm" else "merged"), ""


def _prompt(kind: str, config: TritonPackagingConfig) -> str:
    """Why an adapter that is no LoRA is attached. Raises ConfigurationError where that is not what the configuration says."""
    if config.backend == "vllm":
        raise ConfigurationError(
            f"the model's adapter is of type {kind}; vLLM takes LoRA adapters only",
            hint="Set triton_packaging.backend to python, or fine-tune with adaptation lora or full.",
        )
    if config.adapter == "merged":
        raise ConfigurationError(
            f"the model's adapter is of type {kind}, which no plain weights can have the effect of: it cannot be merged",
            hint="Set triton_packaging.adapter to auto or attached, or fine-tune with adaptation lora or full.",
        )
    return f"an adapter of type {kind} cannot be merged into the weights: it is attached, and requests are answered one by one"


def _check_others(model: Model, config: TritonPackagingConfig, where: str, others: Mapping[str, Model]) -> None:
    if config.backend != "vllm" or where == "merged":
        raise ConfigurationError(
            "several adapters over one base need triton_packaging.backend vllm and attached adapters",
            hint="Set triton_packaging.backend=vllm, and triton_packaging.adapter to auto; or package each model by itself.",
        )
    if model.adapter is None and model.artifact is not None:
        raise InputError(
            "the model is full weights, tuned from the base: the adapters were made for the base itself",
            hint="Package the base model, or a model with an adapter, and give the others with --adapter.",
        )
    for name, other in others.items():
        _check_other(name, other, model, config.model_name)


def _check_other(name: str, other: Model, model: Model, model_name: str) -> None:
    if name == model_name:
        raise ConfigurationError(f"--adapter {name}: that is the name of the model itself", hint="Give it another name.")
    if other.adapter is None:
        raise InputError(f"the model given as adapter {name} has no adapter: it is full weights", hint="Package it by itself.")
    if other.base.sha256 != model.base.sha256:
        raise InputError(
            f"the adapter {name} was made for the base {other.base.sha256[:12]} ({other.base.name}), and the others "
            f"for {model.base.sha256[:12]} ({model.base.name}): they share no weights",
            hint="Package adapters of one base together, and others by themselves.",
        )


MERGE = "Set triton_packaging.adapter to merged (without --adapter), or triton_packaging.backend to python."


def _check_vllm(name: str, model: Model) -> None:
    """Raise InputError for an adapter of which vLLM would leave something out, or that it would refuse once it runs."""
    if adapter_kind(model) != MERGEABLE:
        raise InputError(f"the adapter {name} is of type {adapter_kind(model)}; vLLM takes LoRA adapters only", hint=MERGE)
    settings = adapter_settings(model)
    beyond = [key for key, harmless in BEYOND_VLLM.items() if settings.get(key) not in harmless]
    if beyond:
        raise InputError(f"the adapter {name} has {', '.join(beyond)}, which vLLM does not compute", hint=MERGE)
