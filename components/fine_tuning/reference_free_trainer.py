"""TRL's DPO trainer without a reference model, for the losses of `pair_losses`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.fine_tuning.pair_losses import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer

    from components.fine_tuning.config import PreferenceConfig


def remove_reference(base: type[Trainer], pair_loss: PairLoss, settings: PreferenceConfig) -> type[Trainer]:
    """Return a subclass of TRL's DPO trainer with a pair loss and without a reference model.

    The argument `precompute_ref_log_probs` must be true: TRL then keeps no second model in memory.
    """

    class ReferenceFreeTrainer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from trl.trainer import dpo_trainer

            # TRL names a cache of reference log-probabilities by a hash of the model. There are none, and hashing fails
            # on FSDP2's shards.
            hash_module = dpo_trainer.hash_module
            dpo_trainer.hash_module = lambda _: ""
            try:
                super().__init__(*args, **kwargs)
            finally:
                dpo_trainer.hash_module = hash_module

        def _precompute_ref_logps(self, dataset: object, *_: object, **__: object) -> object:
            return dataset

        def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, Tensor], return_outputs: bool) -> Any:
            answers, tokens = inputs["completion_mask"], inputs["attention_mask"]
            pairs = len(answers) // 2  # the chosen answers are the first half of the batch
            scored = answers.clone()
            if pair_loss.scores_prompts:
                scored[:pairs] = tokens[:pairs]
            options = {"output_router_logits": True} if self.aux_loss_enabled else {}
            labels = inputs["input_ids"].masked_fill(scored == 0, -100)
            outputs = model(
                input_ids=inputs["input_ids"],
                attention_mask=tokens,
                labels=labels,
                use_cache=False,
                fused_lm_head=True,
                **options,
            )
            answers, scored = answers[:, 1:], scored[:, 1:]
            # Virtual tokens precede the scores of the real tokens.
            log_probs = outputs.log_probs[:, -answers.size(1) :].float()
            means = (log_probs * answers).sum(dim=1) / answers.sum(dim=1)
            chosen_tokens = (log_probs * scored)[:pairs].sum() / scored[:pairs].sum()
            scores = PairScores(means[:pairs], means[pairs:], chosen_tokens)
            loss, scale = pair_loss.compute(scores, settings)
            if self.aux_loss_enabled:
                loss = loss + self.router_aux_loss_coef * outputs.aux_loss
            margins = self.accelerator.gather(scale * (scores.chosen - scores.rejected).detach())
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics["rewards/margins"].append(margins.mean().item())
            metrics["rewards/accuracies"].append((margins > 0).float().mean().item())
            return (loss, outputs) if return_outputs else loss

    return ReferenceFreeTrainer
