"""Preparation of a base model for training with PEFT, as the recipe's adaptation specifies."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel

    from components.fine_tuning.config import FineTuningConfig

# PEFT refuses LoRA on the output projection of these models, whose kernels read its weights without the module.
FUSED_STATE_SPACE_MODELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
INITIAL_ADAPTER_INPUT = "initial_adapter"  # kind of the input in the manifest


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
    # With SEQ_CLS, PEFT also trains and saves the output layer of a reward model.
    task_type = "SEQ_CLS" if config.objective_spec.scores_answers else "CAUSAL_LM"
    peft_config: PeftConfig = config_class(task_type=task_type, **options)
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


def build_outline(
    model_config: PretrainedConfig, config: FineTuningConfig, *, device: str = "meta", dropout: float = 0.0
) -> PreTrainedModel:
    """Return the adapted model with random weights; by default on the meta device, which holds no weights.

    Args:
        model_config: Configuration of the model.
        config: The recipe.
        device: Device of the weights.
        dropout: Dropout of LoRA.

    Raises:
        ConfigurationError: PEFT cannot adapt the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model_class = AutoModelForCausalLM
    if config.objective_spec.scores_answers:
        model_class, model_config = AutoModelForSequenceClassification, copy.deepcopy(model_config)
        model_config.num_labels = 1
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns when PEFT wraps a model
        prompt = config.prompt.model_copy(update={"initial_text": ""})  # a text would require the tokenizer
        model = model_class.from_config(model_config, trust_remote_code=False)
        lora = config.lora.model_copy(update={"dropout": dropout})
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


def keep_inputs_in_compute_precision(model: torch.nn.Module) -> None:
    """Leave the inputs of low-rank updates in bfloat16, to which autocast converts the float32 matrices.

    PEFT would convert the inputs to float32, and autocast back: the same values, with a copy of every input in memory
    and six times the reads and writes.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def open_initial_adapter(
    config: FineTuningConfig,
    base_sha256: str | None,
    model_config: PretrainedConfig,
    expected_sha256: str | None = None,
) -> Artifact | None:
    """Return the artifact of `config.initial_adapter` with every digest verified, or None if the recipe sets none.

    Args:
        config: The recipe.
        base_sha256: Digest of the base model; None if it is not known yet.
        model_config: The base model's configuration.
        expected_sha256: Required digest of the adapter's artifact; None to accept every digest.

    Raises:
        ConfigurationError: the source is no adapter, or the adapter does not match the recipe or the base model.
        ArtifactDamagedError: a file has changed, or the digest is not `expected_sha256`.
    """
    source = config.initial_adapter
    if source is None:
        return None
    adapter = model_loading.find_tuned_model(source)
    if adapter is None or not model_loading.is_adapter(adapter):
        raise ConfigurationError(
            f"fine_tuning.initial_adapter: {source} is not a tuned model with an adapter",
            hint="Specify the folder or store:<sha256> of such a model; use other models as fine_tuning.base_model.",
        )
    if expected_sha256 and adapter.sha256 != expected_sha256:
        raise ArtifactDamagedError(
            f"fine_tuning.initial_adapter: the digest of {source} is {adapter.sha256[:12]}; expected "
            f"{expected_sha256[:12]}",
            hint="Restore the original adapter, or start a new run.",
        )
    base = adapter.manifest.find_input("base_model")
    if base_sha256 and (base is None or base.content_sha256 != base_sha256):
        raise ConfigurationError(
            f"fine_tuning.initial_adapter: the base model of {source} has the digest "
            f"{base.content_sha256[:12] if base else 'unknown'}; expected that of fine_tuning.base_model, "
            f"{base_sha256[:12]}",
            hint=f"Set fine_tuning.base_model to {base.uri if base else 'the base model of the adapter'}.",
        )
    if difference := _compare_adapter(adapter, config, model_config):
        raise ConfigurationError(
            f"fine_tuning.initial_adapter: {difference}",
            hint="Use the adapter's settings in fine_tuning.lora, or use the tuned model as fine_tuning.base_model.",
        )
    return adapter


def _compare_adapter(adapter: Artifact, config: FineTuningConfig, model_config: PretrainedConfig) -> str:
    """Return the first difference between the adapter and the recipe's adapter, or "". Reads no weights."""
    import peft
    from safetensors import safe_open

    found = json.loads((adapter.path / model_loading.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings = {
        "peft_type": "LORA",
        "lora_alpha": config.lora.alpha,
        "use_rslora": config.lora.rslora,
        "use_dora": config.lora.dora,
    }
    for name, expected in settings.items():
        if found.get(name) != expected:
            return f"{name} of the adapter is {found.get(name)}; expected {expected}, as in the recipe"
    needed = peft.get_peft_model_state_dict(build_outline(model_config, config))
    with safe_open(adapter.path / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    for name in sorted({*shapes, *needed}):
        expected_shape = tuple(needed[name].shape) if name in needed else None
        if shapes.get(name) != expected_shape:
            return f"the tensor {name} has the shape {shapes.get(name)}; expected {expected_shape}, as in the recipe"
    return ""
