"""Distributed training: arguments for DDP, FSDP2 and ZeRO-3, and the check that the strategy takes effect."""

from __future__ import annotations

import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.runtime.errors import TrainingError
from components.common.workspace import artifact_store
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
TORCH_LOCK_FILENAME = "lock"  # of torch.utils.cpp_extension, in the folder of each extension
SHARDS_FOLDER = "shards"  # in a checkpoint of FSDP2: every process's part of the weights and of the optimizer's state


def build_arguments(config: FineTuningConfig) -> dict[str, object]:
    """Return the strategy's keyword arguments for transformers' TrainingArguments; empty for ddp."""
    if config.strategy == "fsdp2":  # transformers has no checkpoints of optimizer shards; `save_shards` writes them
        return {"save_only_model": True}
    return {"deepspeed": dict(ZERO3_CONFIG)} if config.strategy == "zero3" else {}


def build_loading_options(config: FineTuningConfig, *, bfloat16: bool) -> dict[str, object]:
    """Return the strategy's keyword arguments for `from_pretrained`; empty for ddp and zero3.

    With FSDP2 each process reads its shard of every tensor from the weights' files, onto its device. The trainer then
    trains the sharded model as it is: Accelerate, which would load the whole model in each process, does not wrap it.

    Args:
        config: The recipe.
        bfloat16: Whether the model computes in bfloat16. Gradients are then averaged in float32.
    """
    if config.strategy != "fsdp2":
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(fsdp_size=config.processes, fsdp_mixed_precision=bfloat16)}


def prepare_loading(config: FineTuningConfig) -> None:
    """With ZeRO-3, connect the processes, so that transformers shards the weights while it loads them.

    A process then holds its shard and one tensor of the model; rank 0 also maps the weights' files.
    """
    if config.strategy == "zero3":
        import deepspeed

        _compile_communication()
        deepspeed.init_distributed()


def _compile_communication() -> None:
    """Compile and load DeepSpeed's communication between the processes of a CPU training, once per machine.

    torch's lock is a file. A process that is killed while it compiles leaves the file, and later processes would wait for
    it without end. Here a lock of the operating system protects the folder, so an existing file is such a leftover.
    """
    from deepspeed.comm.torch import build_shm_op

    own = artifact_store.get_cache_folder() / "torch_extensions" / platform.node()
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own)))
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system may not support locks; torch's lock then remains
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for lock in own.glob(f"*/{TORCH_LOCK_FILENAME}"):  # other programs may use another folder
                lock.unlink(missing_ok=True)
        build_shm_op()  # the loaded module is used by `init_distributed`
    finally:
        os.close(descriptor)


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


def free_gathered_weights(model: torch.nn.Module) -> None:
    """Make the shards the model's parameters again.

    After a forward pass without a backward pass, FSDP2 keeps the gathered output head as parameters, which are neither
    what the optimizer updates nor what a checkpoint has.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def list_adapter_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained tensors by name. Without them, PEFT gathers the whole sharded model to write an adapter."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Write this process's part of the weights and of the optimizer's state. Every process calls it."""
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    free_gathered_weights(model)
    weights, state = get_state_dict(model, optimizer)
    distributed_checkpoint.save({"weights": weights, "optimizer": state}, checkpoint_id=checkpoint / SHARDS_FOLDER)


def load_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint: Path) -> None:
    """Load what `save_shards` wrote; without an optimizer only the weights. Every process calls it."""
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    free_gathered_weights(model)
    optimizers = () if optimizer is None else (optimizer,)
    weights, state = get_state_dict(model, optimizers)
    saved = {"weights": weights} if optimizer is None else {"weights": weights, "optimizer": state}
    distributed_checkpoint.load(saved, checkpoint_id=checkpoint / SHARDS_FOLDER)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state)


def save_consolidated(trainer: Trainer, output: Path) -> None:
    """Gather all shards in the first process and write the whole model as safetensors. Every process calls it."""
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle
