"""Chains of customizations, such as SFT and DPO: each customization tunes the model of an earlier one's run.

A reward model of the chain is not a base model; later customizations use it as a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.runtime.errors import ConfigurationError
from components.common.workspace.artifact_store import STORE_PREFIX
from components.fine_tuning.config import PREVIOUS
from pipelines.config.customization_config import (
    Customization,
    Values,
    check_consistency,
    find_section,
    load_customization,
    read_sections,
)

BASE_MODEL_KEY = "fine_tuning.base_model"


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

    @property
    def trains_reward_model(self) -> bool:
        """Whether the customization trains a reward model, which no later one can tune."""
        return self.customization.fine_tuning.objective_spec.scores_answers


@dataclass(frozen=True)
class ChainEntry:
    """A customization before it is linked to earlier ones.

    Attributes:
        source: its file or parameter, for messages.
        customization: the customization.
        sets_base_model: whether its source sets fine_tuning.base_model.
    """

    source: str
    customization: Customization
    sets_base_model: bool


def load_chain(
    paths: Sequence[Path], overrides: Sequence[str], *, resolve_paths: bool = True, or_demo: bool = True
) -> list[ChainedCustomization]:
    """Load and check the customizations of a chain.

    A customization tunes the last model before it that is not a reward model, unless its file sets fine_tuning.base_model.

    Args:
        paths: The files; empty for the demo or the values in `overrides`.
        overrides: Strings `section.key=value` for every customization. fine_tuning.base_model applies only to
            customizations that do not tune the model of the one before.
        resolve_paths: See `load_customization`.
        or_demo: See `load_customization`.

    Raises:
        ConfigurationError: a value is invalid; see also `link_customizations`.
        UsageError: an override is malformed.
    """
    entries = []
    files: Sequence[Path | None] = paths or [None]
    for path in files:
        customization = load_customization(path, overrides, resolve_paths=resolve_paths, or_demo=or_demo)
        sets_base = path is not None and sets_base_model(read_sections(path))
        entries.append(ChainEntry(str(path or "the configuration"), customization, sets_base))
    return link_customizations(entries)


def sets_base_model(values: Values) -> bool:
    """Return whether the sections set fine_tuning.base_model."""
    section, name = find_section(values, BASE_MODEL_KEY)
    return section is not None and name in section


def link_customizations(entries: Sequence[ChainEntry]) -> list[ChainedCustomization]:
    """Return the customizations with the positions of those whose models they need.

    Raises:
        ConfigurationError: a customization tunes a model that cannot be a base model, sets an initial adapter without a base
            model, requires a reward model that no earlier customization trains, or shares its model's name with a
            customization that trains a model of another kind.
    """
    chain: list[ChainedCustomization] = []
    for entry in entries:
        customization, source = entry.customization, entry.source
        earlier = range(len(chain))
        models = [i for i in earlier if not chain[i].trains_reward_model]
        rewards = [i for i in earlier if i not in models]
        tuned = models[-1] if models and not entry.sets_base_model else None
        if tuned is not None:
            previous = chain[tuned].customization.fine_tuning
            for recipe in previous.recipes.values():
                if recipe.adaptation_spec.is_prompt_based:
                    raise ConfigurationError(
                        f"{source} tunes the model of {entries[tuned].source}, whose adaptation {recipe.adaptation} cannot "
                        "be merged into a base model",
                        hint=f"Set fine_tuning.adaptation of {entries[tuned].source} to lora, qlora, ia3 or full, "
                        f"or set fine_tuning.base_model of {source}.",
                    )
            if customization.fine_tuning.initial_adapter:
                raise ConfigurationError(
                    f"{source} sets fine_tuning.initial_adapter, which must match the base model, but not "
                    "fine_tuning.base_model",
                    hint=f"Set fine_tuning.base_model in {source}, or remove fine_tuning.initial_adapter.",
                )
            customization = replace_base_model(customization, previous.base_model)
        rewarded_by = None
        if any(reward.model == PREVIOUS for reward in customization.fine_tuning.grpo.rewards):
            if not rewards:
                raise ConfigurationError(
                    f"{source}: fine_tuning.grpo.rewards has a reward with model {PREVIOUS}, but no "
                    "earlier customization trains a reward model",
                    hint="Add a customization with objective reward before this customization (-c reward.yaml -c grpo.yaml), or specify the "
                    "folder or store:<sha256> of a reward model.",
                )
            rewarded_by = rewards[-1]
        check_consistency(customization)
        chain.append(ChainedCustomization(customization, tuned, rewarded_by))
        _check_model_name(entries, chain)
    return chain


def _check_model_name(entries: Sequence[ChainEntry], chain: Sequence[ChainedCustomization]) -> None:
    """Raise ConfigurationError if the last customization shares its name with a model of another kind."""
    last, name = chain[-1], chain[-1].customization.model_registry.name
    for entry, other in zip(entries, chain, strict=False):
        if other.customization.model_registry.name == name and other.trains_reward_model != last.trains_reward_model:
            raise ConfigurationError(
                f"model_registry.name is {name} in {entry.source} and in {entries[len(chain) - 1].source}, of which one "
                "trains a reward model and the other a language model",
                hint="Set another model_registry.name in one of these configurations.",
            )


def insert_models(link: ChainedCustomization, tuned_model: str, reward_model: str) -> Customization:
    """Return the customization with the models of the earlier ones.

    Args:
        link: The customization of a chain.
        tuned_model: Digest of the model that it tunes; ignored if it has another base model.
        reward_model: Digest of the reward model of the chain; ignored without such a reward.
    """
    from components.fine_tuning import reward_sources

    customization = link.customization
    if link.tuned is not None:
        customization = replace_base_model(customization, f"{STORE_PREFIX}{tuned_model}")
    if link.rewarded_by is not None:
        tuning = reward_sources.replace_previous(customization.fine_tuning, f"{STORE_PREFIX}{reward_model}")
        customization = customization.model_copy(update={"fine_tuning": tuning})
    return customization


def replace_base_model(customization: Customization, source: str) -> Customization:
    """Return the customization with another base model."""
    values = customization.model_dump(exclude_unset=True)
    values.setdefault("fine_tuning", {})["base_model"] = source
    return Customization.model_validate(values)
