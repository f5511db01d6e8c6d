"""Shapes of the frozen models beside the trained one: the teacher of a distillation, and reward models."""

from __future__ import annotations

from components.common.artifacts.artifact_folder import REWARD_MODEL
from components.common.models import model_loading
from components.common.models.model_shape import ModelShape
from components.fine_tuning import training
from components.fine_tuning.config import PREVIOUS, FineTuningConfig


def list_shapes(config: FineTuningConfig) -> list[ModelShape]:
    """Return the shapes of the frozen models; without a reward model that an earlier customization has yet to train.

    Reads configurations, and no weights.

    Raises:
        ConfigurationError: a source is invalid, or the model is not available.
    """
    sources = [config.distillation.teacher, *(reward.model for reward in config.grpo.rewards)]
    shapes = []
    for source in sources:
        if source is None or source == PREVIOUS:
            continue
        reward_model = model_loading.find_tuned_model(source, REWARD_MODEL)
        uri = model_loading.get_base_input(reward_model).uri if reward_model else source
        model_config = model_loading.load_outline(uri).config
        parameters = training.count_parameters(model_config, FineTuningConfig(adaptation="full"))
        shapes.append(ModelShape.from_configuration(model_config, parameters))
    return shapes


def count_parameters(config: FineTuningConfig) -> int:
    """Return the number of parameters of the frozen models; for the errors see `list_shapes`."""
    return sum(shape.parameters for shape in list_shapes(config))
