"""The adaptations: what of a base model is trained. A new one is an entry in ADAPTATIONS; the trainer stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from components.common.errors import ConfigurationError
from components.fine_tuning.config import FineTuningConfig


@dataclass(frozen=True)
class Adaptation:
    """How a base model is made trainable. `settings` gives PEFT's configuration, None where every weight is trained."""

    settings: Callable[[FineTuningConfig, str], Any]
    prompts: bool = False  # virtual tokens stand before each row
    four_bits: bool = False  # frozen weights are held in 4 bits


def _full(config: FineTuningConfig, tokenizer: str) -> None:
    """Every weight is trained: PEFT has no part in it."""


def _lora(config: FineTuningConfig, tokenizer: str) -> Any:
    """A low-rank update beside each target module of the frozen base."""
    import peft

    settings = config.lora
    targets = settings.target_modules
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        task_type="CAUSAL_LM",
    )


def _p_tuning(config: FineTuningConfig, tokenizer: str) -> Any:
    """Virtual tokens made by a small network that is trained in their stead."""
    import peft

    settings = config.prompt
    return peft.PromptEncoderConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=settings.virtual_tokens,
        encoder_reparameterization_type=settings.encoder.upper(),
        encoder_hidden_size=settings.encoder_size,
    )


def _prompt_tuning(config: FineTuningConfig, tokenizer: str) -> Any:
    """Virtual tokens that are trained themselves (Lester et al., arXiv 2104.08691)."""
    import peft

    settings = config.prompt
    named = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": settings.initial_text, "tokenizer_name_or_path": tokenizer}
    return peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=settings.virtual_tokens, **(named if settings.initial_text else {})
    )


ADAPTATIONS: dict[str, Adaptation] = {
    "full": Adaptation(_full),
    "lora": Adaptation(_lora),
    "qlora": Adaptation(_lora, four_bits=True),
    "p_tuning": Adaptation(_p_tuning, prompts=True),
    "prompt_tuning": Adaptation(_prompt_tuning, prompts=True),
}


def adapt(model: Any, config: FineTuningConfig, tokenizer: str = "") -> Any:
    """The model with what is trained of it added; the model itself where that is every weight.

    Raises ConfigurationError for target modules that it does not have.
    """
    import peft

    settings = ADAPTATIONS[config.adaptation].settings(config, tokenizer)
    if settings is None:
        return model
    with telling_targets(model):
        return peft.get_peft_model(model, settings)


@contextmanager
def telling_targets(model: Any) -> Iterator[None]:
    """Tell what PEFT finds wrong with the target modules, and which there are."""
    linear = sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if type(module).__name__.startswith("Linear")})
    try:
        yield
    except ValueError as error:
        if "target" not in str(error).lower() or "module" not in str(error).lower():
            raise
        raise ConfigurationError(
            f"fine_tuning.lora.target_modules: {str(error).splitlines()[0]}", hint=f"This model has {', '.join(linear)}."
        ) from None


def quantised(dtype: Any) -> Any:
    """How qlora holds frozen weights: 4-bit NormalFloat, the scales quantised too (Dettmers et al., arXiv 2305.14314)."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
