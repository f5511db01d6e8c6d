"""TRL trainers with a deterministic row order, exact token counts, and logits for answer tokens only.

TRL runs the training loop; `TunelineTrainer` overrides single methods.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.fine_tuning import batch_order, muon, reference_free_trainer, rollout_trainer, sharding
from components.fine_tuning.config import Recipe
from components.fine_tuning.objectives import IGNORED_LABEL
from components.fine_tuning.optimizers import OPTIMIZERS
from components.fine_tuning.rewards import RewardInputs

if TYPE_CHECKING:
    import torch
    from transformers import DataCollator, PreTrainedModel, PreTrainedTokenizerBase, Trainer

    from components.fine_tuning.token_cache import TokenizedDataset
else:  # imported only for a training; the parts of a trainer precede it in the bases of TunelineTrainer
    Trainer = object

Batch = dict[str, "torch.Tensor"]


def _build_objective_class(config: Recipe, samples_path: Path, inputs: RewardInputs) -> type[Trainer]:
    """Return the objective's TRL trainer, with tuneline's losses, rewards and validation."""
    import trl

    base: type[Trainer] = getattr(trl, f"{config.objective_spec.trl_method}Trainer")
    if pair_loss := config.objective_spec.pair_loss:
        return reference_free_trainer.remove_reference(base, pair_loss, config.preference)
    if config.objective_spec.has_rewards:
        return rollout_trainer.score_rollouts(base, config, samples_path, inputs)
    if config.objective_spec.has_teacher:
        return rollout_trainer.distill_tokens(base, samples_path)
    return base


class _RecipeTrainer(Trainer):  # type: ignore[misc]  # Any to mypy, because transformers imports it lazily
    """The recipe and the data, which the parts of a trainer share."""

    recipe: Recipe
    splits: TokenizedDataset
    seed: int
    saving_folder: Path

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder of the checkpoint that is being saved; `checkpoints.publish` moves the checkpoint."""
        return str(self.saving_folder)


class _OptimizerTrainer(_RecipeTrainer):
    """Optimizers that transformers does not create."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; for LoRA+ with separate rates for the matrices A and B."""
        if self.recipe.strategy == "fsdp2":
            sharding.free_gathered_weights(self.model)
        if OPTIMIZERS[self.recipe.optimizer].trains_matrices:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = self.get_decay_parameter_names(self.model)
            self.optimizer = muon.build_muon(self.model, decayed, self.recipe.weight_decay, optimizer_class, options)
            return self.optimizer
        if not self.recipe.lora.plus_ratio:
            return super().create_optimizer(*args, **kwargs)
        from peft.optimizers import create_loraplus_optimizer

        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = create_loraplus_optimizer(
            self.model,
            optimizer_class,
            loraplus_lr_ratio=self.recipe.lora.plus_ratio,
            loraplus_weight_decay=self.recipe.weight_decay,
            **options,
        )
        return self.optimizer


class _ShardedTrainer(_RecipeTrainer):
    """Checkpoints and models of sharded weights."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, or the adapter; nothing to checkpoints that have shards."""
        if _internal_call and self.recipe.has_sharded_checkpoints:
            return
        if self.recipe.strategy == "fsdp2" and not self.recipe.adaptation_spec.trains_all_weights:
            self._save(output_dir, state_dict=sharding.list_adapter_weights(self.model))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer's state; with sharded weights the shards of both. transformers would write one shard."""
        if not self.recipe.has_sharded_checkpoints:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        import torch
        from transformers.trainer import SCHEDULER_NAME

        sharding.save_shards(self.model, self.optimizer.optimizer, Path(output_dir))  # without Accelerate's wrapper
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, except sharded ones, which are loaded with the optimizer's state."""
        if not self.recipe.has_sharded_checkpoints:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not (checkpoint and self.recipe.has_sharded_checkpoints):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        import torch
        from transformers.trainer import SCHEDULER_NAME

        sharding.load_shards(self.model, self.optimizer.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


class _RowTrainer(_RecipeTrainer):
    """The order of the rows, their transfer to the device, and the count of their tokens."""

    waited = 0.0  # seconds spent waiting for rows since the last reset
    fetched: tuple[Any, Any] = (None, None)  # an iterator over an epoch, and the rows of its next step
    request: tuple[Any, int, torch.device]  # the last arguments of get_batch_samples

    def _get_train_sampler(self, train_dataset: object = None) -> torch.utils.data.Sampler[int]:
        generates = self.recipe.objective_spec.generates
        self.order = batch_order.build_sampler(
            self.splits.train.lengths,
            self.recipe.rows_per_step,
            seed=self.seed,
            mixture=self.splits.train.build_mixture(self.recipe.mixing),
            answers=self.recipe.answers_per_prompt if generates else 0,
            repeats=self.recipe.gradient_accumulation_steps if generates else 1,
        )
        return self.order

    def _prepare_dataset(self, dataset: object, *_: object, **__: object) -> object:
        """Return the dataset unchanged: its rows are already tokenized."""
        return dataset

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the rows of the next step, which `fetch_ahead` may have fetched."""
        start = time.perf_counter()
        iterator, samples = self.fetched
        if iterator is not epoch_iterator:
            samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.fetched, self.request = (None, None), (epoch_iterator, num_batches, device)
        self.waited += time.perf_counter() - start
        return samples

    def fetch_ahead(self) -> float:
        """Fetch the rows of the epoch's next step while an NVIDIA GPU computes; return for how long the GPU waited.

        The copy to the GPU waits for the end of the step, so the GPU's own clock is read.
        """
        import torch

        computed, fetched = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        computed.record()
        self.fetched = self.request[0], super().get_batch_samples(*self.request)
        fetched.record()
        fetched.synchronize()
        waited: float = computed.elapsed_time(fetched) / 1000
        self.waited += waited
        return waited

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Count tokens by the mask. transformers excludes end-of-sequence tokens equal to the padding token."""
        if self.recipe.objective_spec.generates:  # TRL counts the tokens of prompts and answers once they are generated
            return
        mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
        if mask is None and self.accelerator.num_processes == 1:
            self.state.num_input_tokens_seen += ids.numel()  # without a wait for the device
            return
        count = mask.sum() if mask is not None else ids.new_tensor(ids.numel())
        self.state.num_input_tokens_seen += int(self.accelerator.gather(count.reshape(1)).sum())


class _LossTrainer(_RecipeTrainer):
    """Training steps and losses with logits of answer tokens only."""

    aux_loss_enabled = False  # whether TRL adds the loss of the router

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a micro-batch without a repeated `model.train()`, which visits every module while a GPU waits.

        A validation switches `self.model` to evaluation, but not the wrapper that several processes train.
        """
        if model.training and self.model.training:
            model.__dict__["train"] = lambda *_: model
        try:
            loss: torch.Tensor = super().training_step(model, *args, **kwargs)
        finally:
            model.__dict__.pop("train", None)
        return loss

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss with logits of answer tokens only.

        Without Triton kernels, TRL computes the logits of every token and ignores those of prompt tokens. In the
        demo model, the output head is a fifth of the computation, and half of the tokens are prompt tokens.
        """
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        if self.recipe.objective_spec.is_causal and not self.model.training:
            # The trainer averages the losses of validation batches, weighted by rows. The divisor is therefore the
            # rows × the mean number of answer tokens per row: the result is the mean over all answer tokens.
            positions = inputs.get("position_ids")
            validation = self.splits.validation.counts
            rows = len(inputs["input_ids"]) if positions is None else int((positions == 0).sum())
            num_items_in_batch = rows * validation.learned / validation.examples * processes
        # The validation loss leaves out the router loss: it compares checkpoints by their answers. Before training,
        # TRL would also divide the router loss by a number of steps that is not set yet.
        has_router_loss = self.aux_loss_enabled
        self.aux_loss_enabled = has_router_loss and self.model.training
        is_own_loss = "position_ids" in inputs and inputs["input_ids"].device.type in ("cpu", "mps")
        try:
            if return_outputs or not is_own_loss:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            weight = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
            if num_items_in_batch is None:
                return _compute_answer_loss(model, inputs, None, weight)
            if weight:  # a mean over the micro-batch, whereas the other losses are sums
                weight /= self.current_gradient_accumulation_steps * processes
            return _compute_answer_loss(model, inputs, num_items_in_batch, weight) * processes
        finally:
            self.aux_loss_enabled = has_router_loss


def build_trainer_class(
    config: Recipe,
    splits: TokenizedDataset,
    seed: int,
    samples_path: Path,
    inputs: RewardInputs,
) -> type[Trainer]:
    """Return a subclass of the objective's TRL trainer for these splits; rollouts are logged to `samples_path`."""
    import transformers

    base = _build_objective_class(config, samples_path, inputs)

    class TunelineTrainer(_OptimizerTrainer, _ShardedTrainer, _RowTrainer, _LossTrainer, base):  # type: ignore[misc, valid-type]
        _save_checkpoint = transformers.Trainer._save_checkpoint  # TRL's method adds a model card to every checkpoint

    TunelineTrainer.recipe, TunelineTrainer.splits, TunelineTrainer.seed = config, splits, seed
    return TunelineTrainer


def _compute_answer_loss(model: PreTrainedModel, inputs: Batch, items: Any, router_weight: float = 0.0) -> torch.Tensor:
    """Return the summed cross-entropy of the labelled tokens, divided by `items` (default: their number).

    A `router_weight` adds the router's load balancing loss (Fedus et al., arXiv 2101.03961), with this weight.
    """
    from torch.nn.functional import cross_entropy

    labels = inputs["labels"][0, 1:]
    keep = (labels != IGNORED_LABEL).nonzero().flatten()
    model_inputs = {name: inputs[name] for name in ("input_ids", "position_ids")}
    if router_weight:
        model_inputs["output_router_logits"] = True
    outputs = model(**model_inputs, use_cache=False, logits_to_keep=keep)
    total = cross_entropy(outputs.logits[0].float(), labels[keep], reduction="sum")
    loss = total / (max(len(keep), 1) if items is None else items)
    return loss + router_weight * outputs.aux_loss if router_weight else loss


def build_collator(config: Recipe, tokenizer: PreTrainedTokenizerBase) -> DataCollator:
    """Return TRL's collator, which builds a batch from rows; not for objectives that generate, whose trainer has one."""
    module, _, name = config.objective_spec.collator_path.rpartition(".")
    options = {"padding_free": config.is_padding_free} if config.objective_spec.is_causal else {}
    collator: DataCollator = getattr(importlib.import_module(module), name)(
        pad_token_id=tokenizer.pad_token_id, **options
    )
    return collator
