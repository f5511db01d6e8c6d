"""TRL's trainers with what ours differ in: the order of the rows, exact counts of tokens, and where answers alone need logits.

No training loop is written here: each method replaces one of the trainer's, and says why.
"""

from __future__ import annotations

import time
from typing import Any

from components.fine_tuning import sampling
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.methods import ADAPTATIONS
from components.fine_tuning.objectives import IGNORED, OBJECTIVES
from components.fine_tuning.tokens import Tokenised


def lies_end_to_end(config: FineTuningConfig) -> bool:
    """Whether the rows of a micro-batch are laid end to end in one sequence instead of being padded to the longest."""
    return OBJECTIVES[config.objective].trainer == "SFTTrainer" and not ADAPTATIONS[config.adaptation].prompts


def trainer_class(config: FineTuningConfig, splits: Tokenised, seed: int) -> Any:
    """The trainer of an objective, over these rows."""
    import transformers
    import trl

    base = getattr(trl, OBJECTIVES[config.objective].trainer)
    causal = OBJECTIVES[config.objective].trainer == "SFTTrainer"
    lengths, held_out = splits.train.lengths, splits.validation.counts

    class Trainer(base):  # type: ignore[misc, valid-type]
        """One of TRL's trainers."""

        waited = 0.0  # seconds spent waiting for rows, since it was last asked

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            self.order = sampling.sampler(lengths, config.step_rows, seed=seed)
            return self.order

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            """Rows come with their tokens."""
            return dataset

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = super().get_batch_samples(*args, **kwargs)
            self.waited += time.perf_counter() - began
            return found

        def _track_num_input_tokens(self, inputs: Any) -> None:
            """Tokens that are no padding. transformers takes those equal to the padding token for padding, an end of sequence too."""
            mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
            count = mask.sum() if mask is not None else ids.new_tensor(ids.numel())
            self.state.num_input_tokens_seen += int(self.accelerator.gather(count.reshape(1)).sum())

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            """As transformers does it: TRL writes a model card for a hub beside."""
            transformers.Trainer._save_checkpoint(self, model, trial)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            """Without Triton's kernels TRL computes logits for every token and then ignores those of the prompts. A fifth of this
            model's work is its output head, and half of the tokens are prompts: they are left out here."""
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            if causal and not self.model.training:
                num_items_in_batch = _rows(inputs) * held_out.learned / held_out.examples * processes
            if "position_ids" not in inputs or return_outputs or inputs["input_ids"].device.type not in ("cpu", "mps"):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss = _loss_of_answers(model, inputs, num_items_in_batch)
            return loss * processes if num_items_in_batch is not None else loss

    return Trainer


def _rows(inputs: Any) -> int:
    """Rows in a batch. The trainer takes the mean of its batches' validation losses by rows: a batch's sum over the answer tokens of so
    many average rows makes that the mean over all answer tokens, however the rows are batched."""
    positions = inputs.get("position_ids")
    return len(inputs["input_ids"]) if positions is None else int((positions == 0).sum())


def _loss_of_answers(model: Any, inputs: Any, items: Any) -> Any:
    """Cross-entropy of the labelled tokens, summed, over `items` of them (default: those of this batch)."""
    from torch.nn.functional import cross_entropy

    labels = inputs["labels"][0, 1:]
    keep = (labels != IGNORED).nonzero().flatten()
    fed = {name: inputs[name] for name in ("input_ids", "position_ids")}
    logits = model(**fed, use_cache=False, logits_to_keep=keep).logits[0]
    total = cross_entropy(logits.float(), labels[keep], reduction="sum")
    return total / (max(len(keep), 1) if items is None else items)


def collator(config: FineTuningConfig, tokenizer: Any) -> Any:
    """How rows become a batch."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    padding = tokenizer.pad_token_id
    if config.objective == "dpo":
        return DataCollatorForPreference(pad_token_id=padding)
    if config.objective == "kto":
        return DataCollatorForUnpairedPreference(pad_token_id=padding)
    return DataCollatorForLanguageModeling(pad_token_id=padding, padding_free=lies_end_to_end(config))
