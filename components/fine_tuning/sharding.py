"""How several processes share a training, and the proof that they do: parameters that are really held in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.common.errors import TrainingError
from components.fine_tuning.config import SHARDED, FineTuningConfig


def arguments(config: FineTuningConfig) -> dict[str, Any]:
    """What transformers' TrainingArguments are told of a strategy."""
    if config.strategy == "fsdp2":
        settings = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        }
        return {"fsdp": "full_shard", "fsdp_config": settings}
    if config.strategy == "zero3":
        return {"deepspeed": _zero3()}
    return {}


def _zero3() -> dict[str, Any]:
    """ZeRO stage 3 (Rajbhandari et al., arXiv 1910.02054); sizes that say "auto" are taken from the training's own arguments."""
    return {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def prove(config: FineTuningConfig, model: Any) -> None:
    """Raise TrainingError where a strategy that shards is not in force: a library that falls back to data parallelism says nothing."""
    if config.strategy not in SHARDED:
        return
    parts = [_is_a_part(parameter) for parameter in model.parameters()]
    if not any(parts):
        raise TrainingError(
            f"strategy {config.strategy} is not in force: none of the {len(parts)} parameters is held in parts",
            hint="Use strategy: ddp, or look at the log for what the library said when it fell back.",
        )


def _is_a_part(parameter: Any) -> bool:
    """Whether this process holds only a part: a DTensor whose local part is smaller (FSDP2), or one that DeepSpeed has partitioned."""
    local = getattr(parameter, "to_local", None)
    if local is not None:
        return bool(local().numel() < parameter.numel())
    partition = getattr(parameter, "ds_tensor", None)
    return partition is not None and bool(partition.numel() < parameter.ds_numel)


def take(trainer: Any, checkpoint: Path) -> None:
    """Load a sharded checkpoint's weights, as the trainer itself does at the end."""
    if trainer.state.global_step != trainer.state.best_global_step and trainer.state.best_global_step:
        trainer.state.best_model_checkpoint = str(checkpoint)
        trainer._load_best_model()
