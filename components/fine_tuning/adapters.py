"""Preparation of a base model for training with PEFT, as the recipe's adaptation specifies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig

    from components.fine_tuning.config import FineTuningConfig


def build_peft_config(config: FineTuningConfig, tokenizer: str) -> PeftConfig | None:
    """Return PEFT's configuration of the adaptation, or None if every weight is trained.

    Args:
        config: The recipe.
        tokenizer: Folder of the base model's tokenizer, which encodes the initial text of virtual tokens.
    """
    adaptation = config.adaptation_spec
    if adaptation.peft_type is None or adaptation.settings is None:
        return None
    import peft

    options = getattr(config, adaptation.settings).build_peft_options(adaptation.peft_type, tokenizer)
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adaptation.peft_type)]
    peft_config: PeftConfig = config_class(task_type="CAUSAL_LM", **options)
    return peft_config


def adapt(model: torch.nn.Module, config: FineTuningConfig, tokenizer: str = "") -> torch.nn.Module:
    """Return the model with its adapter, or the model itself if every weight is trained.

    Args:
        model: The base model.
        config: The recipe.
        tokenizer: Folder of the base model's tokenizer, as for `build_peft_config`.

    Raises:
        ConfigurationError: the model lacks a target module.
    """
    import peft

    peft_config = build_peft_config(config, tokenizer)
    if peft_config is None:
        return model
    with explain_target_errors(model, config):
        adapted: torch.nn.Module = peft.get_peft_model(model, peft_config)
        return adapted


@contextmanager
def explain_target_errors(model: torch.nn.Module, config: FineTuningConfig) -> Iterator[None]:
    """Convert PEFT's errors about target modules into errors that list the model's linear layers.

    Raises:
        ConfigurationError: PEFT rejected the target modules in the block.
    """
    linear_layers = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if type(module).__name__.startswith("Linear")
        }
    )
    try:
        yield
    except ValueError as error:
        message = str(error).lower()
        if "target" not in message or "module" not in message:
            raise
        raise ConfigurationError(
            f"fine_tuning.{config.adaptation_spec.settings}.target_modules: {str(error).splitlines()[0]}",
            hint=f"Choose from the linear layers of this model: {', '.join(linear_layers)}.",
        ) from None


def keep_trained_weights_in_float32(model: torch.nn.Module) -> None:
    """Convert the trained weights to float32. TRL converts those beside 4-bit weights to bfloat16.

    bfloat16 has 8 bits of precision: an update smaller than 1/256 of a weight is lost.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
