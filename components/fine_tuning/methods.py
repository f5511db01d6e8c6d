"""The adaptations: how each makes a base model trainable. A new one is an entry in ADAPTATIONS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from components.common.errors import ConfigurationError
from components.fine_tuning.config import FineTuningConfig


def lora(model: Any, config: FineTuningConfig) -> Any:
    """Freeze the base and put a low-rank update beside each target module."""
    import peft

    settings = config.lora
    targets = settings.target_modules
    adapter = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, adapter)
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if type(module).__name__ == "Linear"})
        raise ConfigurationError(
            f"fine_tuning.lora.target_modules: {str(error).splitlines()[0]}", hint=f"This model has {', '.join(linear)}."
        ) from None


def full(model: Any, config: FineTuningConfig) -> Any:
    """Train every weight."""
    return model


ADAPTATIONS: dict[str, Callable[[Any, FineTuningConfig], Any]] = {"lora": lora, "full": full}
