"""How several processes share a training, and the proof that they do: parameters that are really held in parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from components.common.errors import TrainingError
from components.fine_tuning.config import FineTuningConfig


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


def prepare(config: FineTuningConfig, device: str) -> None:
    """Tell DeepSpeed the device: it looks for accelerators by itself, and finds a processor only when told."""
    if config.strategy == "zero3":
        os.environ["DS_ACCELERATOR"] = device


def prove(config: FineTuningConfig, model: Any) -> str | None:
    """A sentence that a strategy which shards is in force. Raises TrainingError where it is not: a library that falls back to plain data
    parallelism says nothing."""
    if config.processes == 1:
        return None
    if config.strategy == "ddp":
        return _shared(config, model)
    parts = [_is_a_part(parameter) for parameter in model.parameters()]
    if not any(parts):
        raise TrainingError(
            f"strategy {config.strategy} is not in force: none of the {len(parts)} parameters is held in parts",
            hint="Use strategy: ddp, or look at the log for what the library said when it fell back.",
        )
    return (
        f"strategy {config.strategy} is in force: {sum(parts)} of {len(parts)} parameters are held in parts by {config.processes} processes"
    )


def _shared(config: FineTuningConfig, model: Any) -> str:
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):  # compiled or not
        raise TrainingError(
            f"strategy ddp is not in force: each of the {config.processes} processes would learn by itself",
            hint="Look at the logs of the processes for what the library said.",
        )
    return f"strategy ddp is in force: {config.processes} processes hold the model and average their gradients"


def _is_a_part(parameter: Any) -> bool:
    """Whether this process holds only a part: a DTensor whose local part is smaller (FSDP2), or one that DeepSpeed has partitioned."""
    local = getattr(parameter, "to_local", None)
    if local is not None:
        return bool(local().numel() < parameter.numel())
    partition = getattr(parameter, "ds_tensor", None)
    return partition is not None and bool(partition.numel() < parameter.ds_numel)


def take(trainer: Any, checkpoint: Path) -> None:
    """Load a sharded checkpoint's weights, as the trainer itself does at its end."""
    if trainer.state.global_step != trainer.state.best_global_step and trainer.state.best_global_step:
        trainer.state.best_model_checkpoint = str(checkpoint)
        trainer._load_best_model()


def write(trainer: Any, output: Path) -> None:
    """One consolidated safetensors model, whatever was held in parts."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle
