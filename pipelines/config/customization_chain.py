"""Chains of customizations, such as SFT and DPO: each customization tunes the model of the previous one's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.runtime.errors import ConfigurationError
from pipelines.config.customization_config import (
    Customization,
    check_consistency,
    find_section,
    load_customization,
    read_sections,
)


@dataclass(frozen=True)
class ChainedCustomization:
    """A customization of a chain.

    Attributes:
        customization: the customization. If it tunes the model of the one before, its base model is set to the base model
            of the one before: the models have the same architecture and tokenizer.
        tunes_previous: whether it tunes the model of the previous customization.
    """

    customization: Customization
    tunes_previous: bool


def load_chain(paths: Sequence[Path], overrides: Sequence[str]) -> list[ChainedCustomization]:
    """Load and check the customizations of a chain.

    A customization tunes the model of the one before unless its file sets fine_tuning.base_model.

    Args:
        paths: The files; empty for the demo or the values in `overrides`.
        overrides: Strings `section.key=value` for every customization. fine_tuning.base_model applies only to
            customizations that do not tune the model of the one before.

    Raises:
        ConfigurationError: a value is invalid, a customization tunes a model that cannot be a base model, or sets an
            initial adapter without a base model.
        UsageError: an override is malformed.
    """
    chain: list[ChainedCustomization] = []
    files: Sequence[Path | None] = paths or [None]
    for path in files:
        customization = load_customization(path, overrides, or_demo=True)
        tunes_previous = False
        if path and chain:
            section, name = find_section(read_sections(path), "fine_tuning.base_model")
            tunes_previous = section is None or name not in section
        if tunes_previous:
            previous = chain[-1].customization.fine_tuning
            for recipe in previous.recipes.values():
                if recipe.adaptation_spec.is_prompt_based:
                    raise ConfigurationError(
                        f"{path} tunes the model of {paths[len(chain) - 1]}, whose adaptation {recipe.adaptation} cannot be "
                        "merged into a base model",
                        hint="Set fine_tuning.adaptation of the first file to lora, qlora, ia3 or full, "
                        "or set fine_tuning.base_model of the second file.",
                    )
            if customization.fine_tuning.initial_adapter:
                raise ConfigurationError(
                    f"{path} sets fine_tuning.initial_adapter, which must match the base model, but not "
                    "fine_tuning.base_model",
                    hint=f"Set fine_tuning.base_model in {path}, or remove fine_tuning.initial_adapter.",
                )
            customization = replace_base_model(customization, previous.base_model)
        check_consistency(customization)
        chain.append(ChainedCustomization(customization, tunes_previous))
    return chain


def replace_base_model(customization: Customization, source: str) -> Customization:
    """Return the customization with another base model."""
    values = customization.model_dump(exclude_unset=True)
    values.setdefault("fine_tuning", {})["base_model"] = source
    return Customization.model_validate(values)
