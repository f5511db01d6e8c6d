"""Capabilities of the Triton backends, one entry per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from components.common.models.adaptations import ADAPTATIONS
from components.triton_packaging import serving_env


@dataclass(frozen=True)
class Backend:
    """Capabilities of a backend.

    Attributes:
        default_mode: mode of a mergeable adapter with `triton_packaging.adapter: auto`.
        attachable_types: PEFT types of adapters that can be attached when the model is loaded; None for all.
        unsupported_settings: adapter settings that the backend ignores, with their values that have no effect.
        has_multiple_adapters: whether a package may contain several adapters that requests select by name.
        model_suffixes: suffixes of the names of a package's models.
        missing_requirement: returns the reason why the backend cannot run on this machine, or None.
    """

    default_mode: Literal["merged", "attached"]
    attachable_types: frozenset[str] | None = None
    unsupported_settings: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    has_multiple_adapters: bool = False
    model_suffixes: tuple[str, ...] = ("",)
    missing_requirement: Callable[[], str | None] = lambda: None

    def can_attach(self, adapter_type: str) -> bool:
        """Return whether the backend can attach adapters of this PEFT type."""
        return self.attachable_types is None or adapter_type in self.attachable_types

    def find_ignored_settings(self, settings: Mapping[str, object]) -> list[str]:
        """Return the names of the adapter settings that have an effect but that the backend ignores."""
        return [key for key, neutral in self.unsupported_settings.items() if settings.get(key) not in neutral]


BACKENDS: Mapping[str, Backend] = {
    "python": Backend(default_mode="merged", model_suffixes=("", "_stream")),
    "vllm": Backend(
        default_mode="attached",
        attachable_types=frozenset(
            entry.peft_type for entry in ADAPTATIONS.values() if entry.peft_type and entry.is_servable_by_vllm
        ),
        unsupported_settings={
            "use_dora": (None, False),
            "lora_bias": (None, False),
            "bias": (None, "none"),
            "modules_to_save": (None, []),
            "layer_replication": (None, []),
            "alora_invocation_tokens": (None, []),
            "trainable_token_indices": (None, [], {}),
        },
        has_multiple_adapters=True,
        missing_requirement=lambda: serving_env.missing_vllm_reason(),
    ),
}


def list_model_names(backend: str, model_name: str) -> list[str]:
    """Return the names of a package's models in Triton, the engine model first."""
    return [f"{model_name}{suffix}" for suffix in BACKENDS[backend].model_suffixes]
