"""Chains of customizations, such as SFT and DPO: each customization tunes the model of an earlier one's run.

A reward model of the chain is not a base model; later customizations use it as a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.runtime.errors import ConfigurationError
from components.fine_tuning.config import PREVIOUS
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
        customization: the customization. If it tunes the model of an earlier one, its base model is set to the base model
            of that one: the models have the same architecture and tokenizer.
        tuned: position of the customization whose model it tunes; None if it has another base model.
        rewarded_by: position of the customization whose reward model scores its answers; None without such a reward.
    """

    customization: Customization
    tuned: int | None = None
    rewarded_by: int | None = None


def load_chain(paths: Sequence[Path], overrides: Sequence[str]) -> list[ChainedCustomization]:
    """Load and check the customizations of a chain.

    A customization tunes the last model before it that is not a reward model, unless its file sets fine_tuning.base_model.

    Args:
        paths: The files; empty for the demo or the values in `overrides`.
        overrides: Strings `section.key=value` for every customization. fine_tuning.base_model applies only to
            customizations that do not tune the model of the one before.

    Raises:
        ConfigurationError: a value is invalid; a customization tunes a model that cannot be a base model, sets an initial
            adapter without a base model, or requires a reward model that no earlier customization trains.
        UsageError: an override is malformed.
    """
    chain: list[ChainedCustomization] = []
    files: Sequence[Path | None] = paths or [None]
    for path in files:
        customization = load_customization(path, overrides, or_demo=True)
        earlier = range(len(chain))
        models = [i for i in earlier if not chain[i].customization.fine_tuning.objective_spec.scores_answers]
        rewards = [i for i in earlier if i not in models]
        tuned = None
        if path and models:
            section, name = find_section(read_sections(path), "fine_tuning.base_model")
            tuned = models[-1] if section is None or name not in section else None
        if tuned is not None:
            previous = chain[tuned].customization.fine_tuning
            for recipe in previous.recipes.values():
                if recipe.adaptation_spec.is_prompt_based:
                    raise ConfigurationError(
                        f"{path} tunes the model of {paths[tuned]}, whose adaptation {recipe.adaptation} cannot be "
                        "merged into a base model",
                        hint=f"Set fine_tuning.adaptation of {paths[tuned]} to lora, qlora, ia3 or full, "
                        f"or set fine_tuning.base_model of {path}.",
                    )
            if customization.fine_tuning.initial_adapter:
                raise ConfigurationError(
                    f"{path} sets fine_tuning.initial_adapter, which must match the base model, but not "
                    "fine_tuning.base_model",
                    hint=f"Set fine_tuning.base_model in {path}, or remove fine_tuning.initial_adapter.",
                )
            customization = replace_base_model(customization, previous.base_model)
        rewarded_by = None
        if any(reward.model == PREVIOUS for reward in customization.fine_tuning.grpo.rewards):
            if not rewards:
                raise ConfigurationError(
                    f"{path or 'the configuration'}: fine_tuning.grpo.rewards has a reward with model {PREVIOUS}, and no "
                    "customization before it trains a reward model",
                    hint="Add a customization with objective reward before it (-c reward.yaml -c grpo.yaml), or specify the "
                    "folder or store:<sha256> of a reward model.",
                )
            rewarded_by = rewards[-1]
        check_consistency(customization)
        chain.append(ChainedCustomization(customization, tuned, rewarded_by))
    return chain


def replace_base_model(customization: Customization, source: str) -> Customization:
    """Return the customization with another base model."""
    values = customization.model_dump(exclude_unset=True)
    values.setdefault("fine_tuning", {})["base_model"] = source
    return Customization.model_validate(values)
