"""The frozen models beside the trained one: the teacher of a distillation, and reward models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact, ArtifactInput
from components.common.models import model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.models.model_shape import ModelShape
from components.common.runtime.reporters import Reporter
from components.fine_tuning import distillation, reward_sources, training
from components.fine_tuning.config import PREVIOUS, FineTuningConfig, Recipe

C = TypeVar("C", bound=FineTuningConfig)


@dataclass(frozen=True)
class OtherModels:
    """The frozen models of a recipe on this machine, with every digest verified.

    Attributes:
        reward_models: The reward models by their positions in `grpo.rewards`.
        teacher: The teacher of a distillation; None for other objectives.
    """

    reward_models: dict[int, Artifact]
    teacher: LocalBaseModel | None

    def pin(self, config: C) -> C:
        """Return the recipe with the digests of the models."""
        return distillation.pin_teacher(reward_sources.pin_reward_models(config, self.reward_models), self.teacher)

    def locate(self, config: C) -> C:
        """Return the recipe with the folders of the models as their sources."""
        return distillation.locate_teacher(
            reward_sources.locate_reward_models(config, self.reward_models), self.teacher
        )

    def list_inputs(self, recipe: Recipe) -> list[ArtifactInput]:
        """Return the models as inputs of the trained model's manifest."""
        inputs = []
        if self.teacher:
            inputs.append(self.teacher.as_input().model_copy(update={"kind": distillation.TEACHER_INPUT}))
        for number, artifact in self.reward_models.items():
            source = artifact.as_input(recipe.grpo.rewards[number].model or "")
            inputs.append(source.model_copy(update={"kind": reward_sources.REWARD_INPUT}))
        return inputs


def open_models(config: FineTuningConfig, base: Path, reporter: Reporter) -> OtherModels:
    """Open the frozen models of a recipe.

    Args:
        config: The recipe.
        base: Folder of the base model.
        reporter: Receives progress.

    Raises:
        ConfigurationError: a model is not available or does not match the recipe or the base model.
        ArtifactDamagedError: a file has changed, or a digest is not the one that the recipe requires.
    """
    reward_models = reward_sources.open_reward_models(config, base)
    return OtherModels(reward_models, distillation.resolve_teacher(config, base, reporter))


def list_shapes(config: FineTuningConfig) -> list[ModelShape]:
    """Return the shapes of the frozen models.

    Reads configurations, and no weights. A reward model that an earlier customization has yet to train has the shape of the
    base model, whose tokenizer it shares.

    Raises:
        ConfigurationError: a source is invalid, or the model is not available.
    """
    sources = [config.distillation.teacher, *(reward.model for reward in config.grpo.rewards)]
    shapes = []
    for source in sources:
        if source is None:
            continue
        reward_model = None if source == PREVIOUS else model_loading.find_tuned_model(source, REWARD_MODEL)
        uri = model_loading.get_base_input(reward_model).uri if reward_model else source
        model_config = model_loading.load_outline(config.base_model if source == PREVIOUS else uri).config
        is_reward_model = source != config.distillation.teacher
        whole = FineTuningConfig(adaptation="full", objective="reward" if is_reward_model else "sft")
        parameters = training.count_parameters(model_config, whole)
        shapes.append(ModelShape.from_configuration(model_config, parameters))
    return shapes


def count_parameters(config: FineTuningConfig) -> int:
    """Return the number of parameters of the frozen models; for the errors see `list_shapes`."""
    return sum(shape.parameters for shape in list_shapes(config))
