"""Distributed training: arguments for DDP, FSDP2 and ZeRO-3, and the check that the strategy takes effect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.common.runtime.errors import TrainingError
from components.fine_tuning.config import FineTuningConfig

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

# ZeRO stage 3 (Rajbhandari et al., arXiv 1910.02054). "auto" takes the value of the training arguments.
ZERO3_CONFIG: dict[str, object] = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
FSDP2_CONFIG: dict[str, object] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
    "cpu_ram_efficient_loading": False,
}


def build_arguments(config: FineTuningConfig) -> dict[str, object]:
    """Return the strategy's keyword arguments for transformers' TrainingArguments; empty for ddp."""
    if config.strategy == "fsdp2":
        return {"fsdp": "full_shard", "fsdp_config": dict(FSDP2_CONFIG)}
    if config.strategy == "zero3":
        return {"deepspeed": dict(ZERO3_CONFIG)}
    return {}


def prepare_loading(config: FineTuningConfig) -> None:
    """Connect the processes, so that transformers shards the weights while it loads them.

    With ZeRO-3 a process then holds its shard and one tensor of the model; rank 0 also maps the weights' files.
    """
    if config.strategy == "zero3":
        import deepspeed

        deepspeed.init_distributed()


def end_sharded_loading(config: FineTuningConfig) -> None:
    """Let transformers load whole models from now on."""
    if config.strategy == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def verify_strategy(config: FineTuningConfig, model: torch.nn.Module) -> str | None:
    """Return a sentence that confirms the strategy, or None for a single process.

    Inspects the wrapped model, because libraries silently fall back to plain data parallelism.

    Raises:
        TrainingError: the strategy is not in effect.
    """
    if config.processes == 1:
        return None
    if config.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):  # compiled or not
            raise TrainingError(
                f"strategy ddp is not in effect: each of the {config.processes} processes would train separately",
                hint="Check the log of each process for the reason of the fallback.",
            )
        return f"strategy ddp is in effect: {config.processes} processes hold the model and average their gradients"
    is_sharded = [_is_sharded(parameter) for parameter in model.parameters()]
    if not any(is_sharded):
        raise TrainingError(
            f"strategy {config.strategy} is not in effect: none of the {len(is_sharded)} parameters is sharded",
            hint="Set fine_tuning.strategy to ddp.",
        )
    return (
        f"strategy {config.strategy} is in effect: {sum(is_sharded)} of {len(is_sharded)} parameters "
        f"are sharded over {config.processes} processes"
    )


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    """Return whether this process holds only a shard: a local part of FSDP2's DTensor, or DeepSpeed's partition."""
    to_local = getattr(parameter, "to_local", None)
    if to_local is not None:
        return bool(to_local().numel() < parameter.numel())
    partition = getattr(parameter, "ds_tensor", None)
    return partition is not None and bool(partition.numel() < parameter.ds_numel)


def save_consolidated(trainer: Trainer, output: Path) -> None:
    """Gather all shards and write the whole model as safetensors."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle
