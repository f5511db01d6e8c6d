"""Capabilities of a base model's class: the recipes that it cannot train are rejected before training starts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from components.common.runtime.errors import ConfigurationError
from components.fine_tuning import adapters, context_extension, muon, varlen_attention
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.optimizers import OPTIMIZERS
from components.fine_tuning.rollout_engines import PAGED_LAYER_TYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_KERNELS = ("flash_attention_2", varlen_attention.NAME, "sdpa", "eager")  # the fastest first


def find_class(model_config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that transformers loads for causal language modeling.

    Raises:
        ConfigurationError: transformers has no such class.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(
            f"fine_tuning.base_model: transformers has no class for causal language modeling with model_type "
            f"{model_config.model_type}",
            hint="Choose a model with a class whose name ends in ForCausalLM.",
        )
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    return model_class


def list_attention_kernels(model_class: type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the kernels of ATTENTION_KERNELS that a model class supports."""
    compatible = model_class._compatible_flash_implementations  # None: every version of FlashAttention
    has_flash = model_class._supports_flash_attn and (compatible is None or "flash_attention_2" in compatible)
    has_sdpa = model_class._supports_sdpa
    # varlen uses sdpa for generation and for layers with a sliding window.
    is_supported = {
        "flash_attention_2": has_flash,
        varlen_attention.NAME: has_flash and has_sdpa,
        "sdpa": has_sdpa,
        "eager": True,
    }
    return tuple(name for name in ATTENTION_KERNELS if is_supported[name])


def has_router_loss(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a model class computes a load balancing loss of its router."""
    return "output_router_logits" in inspect.signature(model_class.forward).parameters


def align_with_trl(model: PreTrainedModel) -> None:
    """Add the attributes that TRL's trainers read and some model classes lack."""
    if model.base_model is model:  # Llama 4: its prefix is that of the vision model
        model.base_model_prefix = "model"
    text = model.config.get_text_config()
    if hasattr(text, "num_local_experts") and not hasattr(text, "num_experts"):  # Granite MoE, Phi-3.5 MoE
        text.num_experts = text.num_local_experts


# Models whose attention does not separate rows by position ids, although their `forward` accepts position ids.
UNSEPARATED_MODEL_TYPES = ("falcon", "gpt_oss")


def check_model(config: FineTuningConfig, model_config: PretrainedConfig) -> None:
    """Check that the base model's class can train the recipe, and that PEFT can adapt it.

    Raises:
        ConfigurationError: the class cannot; the hint is the nearest setting that works.
    """
    model_class = find_class(model_config)
    _check_reward_class(config, model_config)
    kernels = list_attention_kernels(model_class)
    if config.attention != "auto" and config.attention not in kernels:
        raise ConfigurationError(
            f"fine_tuning.attention: {model_class.__name__} does not support {config.attention}; "
            f"expected one of {', '.join(kernels)}",
            hint="Set fine_tuning.attention to auto.",
        )
    if config.packing and (reason := _explain_leak(model_class, model_config)):
        raise ConfigurationError(
            f"fine_tuning.packing: packed rows of {model_class.__name__} would affect each other: {reason}",
            hint="Set fine_tuning.packing to false.",
        )
    if config.rollout_engine.answer and (reason := _explain_unpaged_layers(model_class, model_config)):
        raise ConfigurationError(
            f"fine_tuning.grpo.rollouts.engine: {config.grpo.rollouts.engine} cannot generate with {model_class.__name__}: {reason}",
            hint="Set fine_tuning.grpo.rollouts.engine to generate.",
        )
    outline = adapters.build_outline(context_extension.extend_context(config, model_config), config)
    context_extension.check_rotation(config, outline)
    output_layer = outline.get_output_embeddings() if config.objective_spec.has_teacher else None
    if hasattr(output_layer, "base_layer"):  # TRL computes the loss with the weights below the adapter
        raise ConfigurationError(
            "fine_tuning.lora.target_modules: objective distill cannot train an adapter of the output layer",
            hint="Remove the output layer, such as lm_head, from fine_tuning.lora.target_modules.",
        )
    if OPTIMIZERS[config.optimizer].trains_matrices:
        muon.check_share(outline)


def check_context(config: FineTuningConfig, model_config: PretrainedConfig, key: str, source: str) -> None:
    """Check that a frozen model can read the recipe's longest row with a generated answer; without max_length, do nothing.

    Raises:
        ConfigurationError: `key` names a model whose context is shorter.
    """
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = (config.max_length or 0) + config.max_answer_tokens
    if context and config.max_length and longest > context:
        raise ConfigurationError(
            f"{key}: the context of {source} is {context:,} tokens; rows of fine_tuning.max_length with an answer have "
            f"up to {longest:,} tokens",
            hint=f"Set fine_tuning.max_length to at most {context - config.max_answer_tokens}, or choose another model.",
        )


def _check_reward_class(config: FineTuningConfig, model_config: PretrainedConfig) -> None:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if config.objective_spec.scores_answers and type(model_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigurationError(
            f"fine_tuning.objective: transformers cannot give models of type {model_config.model_type} an output layer for "
            "rewards",
            hint="Choose a base model whose type has a class for sequence classification, such as Llama or Qwen.",
        )


def _explain_unpaged_layers(model_class: type[PreTrainedModel], model_config: PretrainedConfig) -> str:
    """Return the reason why a paged cache cannot hold the state of every layer; empty if it can."""
    if model_class._is_stateful:
        return "its state-space or linear attention layers have no keys and values"
    if not model_class._supports_attention_backend:
        return "its attention ignores a paged cache"
    text = model_config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return "its keys and values differ in size"
    types = getattr(text, "layer_types", None) or ()
    unsupported = sorted({*types} - PAGED_LAYER_TYPES)
    return f"its cache does not support layers of type {', '.join(unsupported)}" if unsupported else ""


def _explain_leak(model_class: type[PreTrainedModel], model_config: PretrainedConfig) -> str:
    """Return the reason why packed rows are not isolated from each other; empty if position ids separate them."""
    if model_class._is_stateful:
        return "the state of its state-space or linear attention layers is carried from row to row"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "the model has no position ids that separate the rows"
    if model_config.model_type in UNSEPARATED_MODEL_TYPES:
        return "its attention mask does not depend on position ids"
    return ""
