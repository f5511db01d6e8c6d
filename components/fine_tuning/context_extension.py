"""Extension of a model's context by scaled rotary positions (RoPE), which are part of the published configuration."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from components.fine_tuning.config import FineTuningConfig

HINT = "Set fine_tuning.rope_scaling.factor to 1, or choose a model with a longer context."
# Beside the factor, llama3 has the frequencies between which it interpolates; those of Llama 3.1 (arXiv 2407.21783).
SCALING_PARAMETERS: dict[str, dict[str, float]] = {
    "yarn": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def extend_context(config: FineTuningConfig, model_config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration that the recipe trains: a copy with scaled positions, or the same without scaling.

    Engines take the extended context from `max_position_embeddings`, and the trained one from the RoPE parameters.

    Raises:
        ConfigurationError: the model has no rotary positions, scales them itself, has several kinds, or does not accept
            this scaling.
    """
    scaling = config.rope_scaling
    if scaling.factor == 1:
        return model_config
    extended = copy.deepcopy(model_config)
    text = extended.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    positions = getattr(text, "max_position_embeddings", None)
    if "rope_type" not in parameters or not positions:
        found = "different rotary positions in its layers" if parameters else "no rotary positions"
    elif parameters["rope_type"] != "default":
        found = f"rotary positions that are already scaled, of type {parameters['rope_type']}"
    else:
        text.rope_parameters = {
            **parameters,
            "rope_type": scaling.type,
            "factor": scaling.factor,
            "original_max_position_embeddings": positions,
            **SCALING_PARAMETERS[scaling.type],
        }
        text.max_position_embeddings = round(scaling.factor * positions)
        _check_frequencies(extended, scaling.type)
        return extended
    raise ConfigurationError(
        f"fine_tuning.rope_scaling: the model has {found}; expected unscaled rotary positions, the same in all layers",
        hint=HINT,
    )


def _check_frequencies(extended: PretrainedConfig, scaling: str) -> None:
    """Raise a ConfigurationError if transformers cannot compute the scaled positions, or would not save them."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        extended.validate()
        ROPE_INIT_FUNCTIONS[scaling](extended.get_text_config(decoder=True), "cpu")
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"fine_tuning.rope_scaling: a model of type {extended.model_type} does not accept {scaling} with this "
            f"configuration: {' '.join(str(error).split())}; expected factor 1",
            hint=HINT,
        ) from None


def check_rotation(config: FineTuningConfig, model: PreTrainedModel) -> None:
    """Check that the model rotates by the scaled positions: hybrids may have the parameters and not use them.

    Raises:
        ConfigurationError: no module of the model has rotary frequencies.
    """
    has_frequencies = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    if config.rope_scaling.factor > 1 and not has_frequencies:
        raise ConfigurationError(
            f"fine_tuning.rope_scaling.factor is {config.rope_scaling.factor}; the model has rotary parameters in its "
            "configuration, but its layers do not use them; expected 1",
            hint=HINT,
        )
