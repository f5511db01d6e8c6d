"""Reward models that score answers in reinforcement learning: their sources, checks and digests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from components.common.runtime.reporters import Reporter
from components.fine_tuning import model_support
from components.fine_tuning.config import PREVIOUS, FineTuningConfig

C = TypeVar("C", bound=FineTuningConfig)
REWARD_INPUT = "rewarding_model"  # kind of the input in the manifest of a model that was trained with a reward model


def open_reward_models(config: FineTuningConfig, tokenizer: Path | None) -> dict[int, Artifact]:
    """Return the reward models of a recipe by their positions in `grpo.rewards`, with every digest verified.

    Does not fetch or merge their base models, which `resolve_bases` does.

    Args:
        config: The recipe.
        tokenizer: Folder of the base model's tokenizer; None if it is not on this machine yet.

    Raises:
        ConfigurationError: a source is not a reward model, or its tokenizer or chat template differs from that of the base
            model, or its context is too short.
        ArtifactDamagedError: a file has changed, or the digest is not the one that the recipe requires.
    """
    opened: dict[int, Artifact] = {}
    for number, entry in enumerate(config.grpo.rewards):
        if entry.model is None:
            continue
        key = f"fine_tuning.grpo.rewards[{number}].model"
        if entry.model == PREVIOUS:
            raise ConfigurationError(
                f"{key} is {PREVIOUS}, but no earlier customization of the command trains a reward model",
                hint="Specify the folder or store:<sha256> of a reward model, or add its customization with -c before this one.",
            )
        artifact = model_loading.find_tuned_model(entry.model, REWARD_MODEL)
        if artifact is None:
            raise ConfigurationError(
                f"{key}: {entry.model} is not a reward model",
                hint="Specify the folder or store:<sha256> of a model that was trained with fine_tuning.objective reward.",
            )
        if entry.sha256 and artifact.sha256 != entry.sha256:
            raise ArtifactDamagedError(
                f"{key}: the digest of {entry.model} is {artifact.sha256[:12]}; expected {entry.sha256[:12]}",
                hint="Restore the original reward model, or remove sha256 and start a new run.",
            )
        if tokenizer and not model_loading.has_same_tokenization(artifact.path, tokenizer):
            raise ConfigurationError(
                f"{key}: the tokenizer or chat template of {entry.model} differs from that of the base model",
                hint="Train the reward model from a base model with the same tokenizer.",
            )
        if model_loading.is_adapter(artifact):
            with model_loading.replace_error_key(key):
                model_config = model_loading.load_outline(model_loading.get_base_input(artifact).uri).config
        else:
            model_config = model_loading.load_configuration(artifact.path)
        model_support.check_context(config, model_config, key, entry.model)
        opened[number] = artifact
    return opened


def pin_reward_models(config: C, opened: Mapping[int, Artifact]) -> C:
    """Return the recipe with the digests of its reward models, as `open_reward_models` returned them."""
    return _change_rewards(config, {number: {"sha256": artifact.sha256} for number, artifact in opened.items()})


def locate_reward_models(config: C, opened: Mapping[int, Artifact]) -> C:
    """Return the recipe with the folders of its reward models as their sources."""
    return _change_rewards(config, {number: {"model": str(artifact.path)} for number, artifact in opened.items()})


def resolve_bases(opened: Mapping[int, Artifact], reporter: Reporter) -> dict[str, str]:
    """Return the folders of the base models, with every digest verified, by the folders of the reward models.

    Raises:
        ConfigurationError: a base model is not available.
        ArtifactDamagedError: a base model has changed.
    """
    bases = {}
    for artifact in opened.values():
        opened_model = model_loading.open_model_artifact(artifact, reporter, accepts_reward_models=True)
        bases[str(artifact.path)] = str(opened_model.base.path)
    return bases


def replace_previous(config: C, source: str) -> C:
    """Return the recipe with `source` instead of PREVIOUS."""
    numbers = [number for number, entry in enumerate(config.grpo.rewards) if entry.model == PREVIOUS]
    return _change_rewards(config, {number: {"model": source} for number in numbers})


def _change_rewards(config: C, changes: Mapping[int, Mapping[str, str]]) -> C:
    if not changes:
        return config
    rewards = [entry.model_copy(update=changes.get(number, {})) for number, entry in enumerate(config.grpo.rewards)]
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"rewards": rewards})})
