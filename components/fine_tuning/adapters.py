"""Preparation of a base model for training with PEFT, as the recipe's adaptation specifies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel

    from components.fine_tuning.config import FineTuningConfig

# PEFT refuses LoRA on the output projection of these models, whose kernels read its weights without the module.
FUSED_STATE_SPACE_MODELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def build_peft_config(config: FineTuningConfig, tokenizer: str, model: PreTrainedModel) -> PeftConfig | None:
    """Return PEFT's configuration of the adaptation, or None if every weight is trained.

    Args:
        config: The recipe.
        tokenizer: Folder of the base model's tokenizer, which encodes the initial text of virtual tokens.
        model: The base model, which limits the modules that "all-linear" selects.
    """
    adaptation = config.adaptation_spec
    if adaptation.peft_type is None or adaptation.settings is None:
        return None
    import peft

    options = getattr(config, adaptation.settings).build_peft_options(adaptation.peft_type, tokenizer)
    if options.get("target_modules") == "all-linear":
        options["exclude_modules"] = _list_unadaptable_modules(model) or None
    if adaptation.is_prompt_based and not hasattr(model.config.get_text_config(), "num_attention_heads"):
        options["num_attention_heads"] = 1  # PEFT requires the number, which virtual tokens do not depend on
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adaptation.peft_type)]
    peft_config: PeftConfig = config_class(task_type="CAUSAL_LM", **options)
    return peft_config


def _list_unadaptable_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that PEFT cannot adapt: fused ones, and routers, which return a tuple."""
    from torch.nn import Linear

    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and type(module).__name__.endswith("Router")
    }
    fused = {"out_proj"} if model.config.model_type in FUSED_STATE_SPACE_MODELS else set()
    return sorted(names | fused)


def has_adapted_experts(model: torch.nn.Module) -> bool:
    """Return whether a PEFT model adapts the parameters of experts, for which PEFT has no dropout."""
    from peft.tuners.lora.layer import ParamWrapper

    return any(isinstance(module, ParamWrapper) for module in model.modules())


def adapt(model: PreTrainedModel, config: FineTuningConfig, tokenizer: str = "") -> torch.nn.Module:
    """Return the model with its adapter, or the model itself if every weight is trained.

    Args:
        model: The base model.
        config: The recipe.
        tokenizer: Folder of the base model's tokenizer, as for `build_peft_config`.

    Raises:
        ConfigurationError: the model lacks a target module.
    """
    import peft

    peft_config = build_peft_config(config, tokenizer, model)
    if peft_config is None:
        return model
    with explain_target_errors(model, config):
        adapted: torch.nn.Module = peft.get_peft_model(model, peft_config)
        return adapted


def build_outline(model_config: PretrainedConfig, config: FineTuningConfig) -> PreTrainedModel:
    """Return the adapted model on the meta device, which holds no weights, without dropout.

    Raises:
        ConfigurationError: PEFT cannot adapt the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns when PEFT wraps a model
        prompt = config.prompt.model_copy(update={"initial_text": ""})  # a text would require the tokenizer
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
        lora = config.lora.model_copy(update={"dropout": 0.0})
        return adapt(model, config.model_copy(update={"prompt": prompt, "lora": lora}))


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
        if "paramwrapper" in message and "dora" in message:
            raise ConfigurationError(
                "fine_tuning.lora.dora: PEFT does not support DoRA for the experts of this model",
                hint="Set fine_tuning.lora.dora to false.",
            ) from None
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
