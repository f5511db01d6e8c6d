"""TRL trainers with tokenized prompts and greedy validation; those of GRPO and RLOO compute tuneline's rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.fine_tuning import rewards
from components.fine_tuning.rewards import RewardInputs, Rollout, WeightedReward
from components.fine_tuning.rollout_engines import ROLLOUT_ENGINES, RolloutEngine

if TYPE_CHECKING:
    from transformers import GenerationConfig, Trainer, TrainerControl

    from components.fine_tuning.config import Recipe

LOGGED_SAMPLES = 4  # validation prompts whose answers are in the report


def build_reward_functions(weighted: Sequence[WeightedReward]) -> list[Callable[..., list[float]]]:
    """Return the rewards as functions that TRL's trainer calls with the answers and the columns of their rows."""

    def build(reward: WeightedReward) -> Callable[..., list[float]]:
        def score(
            prompts: list[list[int]],
            completions: list[str],
            completion_ids: list[list[int]],
            question: list[str],
            reference: list[str],
            meta: list[str],
            log_metric: Callable[[str, float], None] = lambda *_: None,
            **_: object,
        ) -> list[float]:
            tokens = [[*prompt, *answer] for prompt, answer in zip(prompts, completion_ids, strict=True)]
            rollouts = map(Rollout, question, reference, completions, tokens, meta)
            scores = reward.compute(list(rollouts))
            if reward.has_service:
                log_metric(f"unscored/{reward.name}", sum(map(math.isnan, scores)) / len(scores))
            return rewards.fill_missing(scores)

        score.__name__ = reward.name  # the name in TRL's metrics
        return score

    return [build(reward) for reward in weighted]


def generate_from_tokens(base: type[Trainer], engine: RolloutEngine = ROLLOUT_ENGINES["generate"]) -> type[Trainer]:
    """Return a subclass of a TRL trainer that generates answers to prompts that are already tokenized."""

    class TokenTrainer(base):  # type: ignore[misc]
        recipe: Recipe
        generation_config: GenerationConfig
        generation_kwargs: dict[str, Any]

        def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
            """Return the prompts, which are already tokenized."""
            return prompts, None, {}

        def _generate_single_turn(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            """Generate in the compute precision. PEFT's `generate` bypasses the forward that Accelerate wraps."""
            if engine.answer is None:
                with self.accelerator.autocast():
                    return super()._generate_single_turn(prompts, *args, **kwargs)
            from trl.models import unwrap_model_for_generation

            # The engine's thread is outside of any autocast: it computes in the precision of the weights.
            with unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model:
                ids = engine.answer(model, prompts, self.generation_config)
            # TRL's GRPO trainer also expects the log-probabilities, which it computes itself if they are None.
            return (ids, None) if self.recipe.objective == "grpo" else ids

        @contextmanager
        def decode_greedily(self) -> Iterator[None]:
            """Generate without sampling in the block, which consumes no random numbers."""
            sampling = self.generation_config, self.generation_kwargs
            greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
            self.generation_kwargs = {**self.generation_kwargs, **greedy}
            self.generation_config = type(self.generation_config)(**self.generation_kwargs, disable_compile=True)
            try:
                yield
            finally:
                self.generation_config, self.generation_kwargs = sampling

    return TokenTrainer


def score_rollouts(base: type[Trainer], config: Recipe, samples_path: Path, inputs: RewardInputs) -> type[Trainer]:
    """Return a subclass of TRL's GRPO or RLOO trainer for tokenized prompts, whose validation loss is 1 − the mean reward.

    Args:
        base: TRL's trainer.
        config: The recipe.
        samples_path: Log of the answers to the first validation prompts.
        inputs: The inputs of the rewards.
    """
    import torch

    weighted = rewards.build_rewards(config.grpo.rewards, inputs)

    generating = generate_from_tokens(base, config.rollout_engine)

    class RolloutTrainer(generating):  # type: ignore[misc,valid-type]
        control: TrainerControl

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, reward_funcs=build_reward_functions(weighted), **kwargs)

        def evaluate(self, *_: object, **__: object) -> dict[str, float]:
            """Answer the validation prompts greedily, which consumes no random numbers, and log the mean rewards."""
            self.model.eval()
            rows = self.eval_dataset
            batch = self.args.per_device_eval_batch_size
            totals = torch.zeros(len(weighted) + 2, dtype=torch.float64)  # of each reward, of all, and of answer tokens
            samples: list[tuple[Rollout, float]] = []
            process, processes = self.accelerator.process_index, self.accelerator.num_processes
            for start in range(0, len(rows), batch * processes):
                indices = range(start + process * batch, min(start + (process + 1) * batch, len(rows)))
                examples = [rows[index] for index in indices]
                if not examples:
                    continue
                ids = self._answer_greedily([example["prompt"] for example in examples])
                answers = self.processing_class.batch_decode(ids, skip_special_tokens=True)
                rollouts = [
                    Rollout(
                        example["question"],
                        example["reference"],
                        answer,
                        [*example["prompt"], *tokens],
                        example["meta"],
                    )
                    for example, answer, tokens in zip(examples, answers, ids, strict=True)
                ]
                scores, sums = rewards.compute_totals(weighted, rollouts)
                totals += torch.tensor(
                    [*(sum(values) for values in scores.values()), sum(sums), sum(map(len, ids))], dtype=torch.float64
                )
                if start == 0:
                    samples = list(zip(rollouts, sums, strict=True))[:LOGGED_SAMPLES]
            means = self.accelerator.reduce(totals.float().to(self.accelerator.device), "sum") / len(rows)
            if self.is_world_process_zero():  # after the other processes have started, which delete old samples
                self._log_samples(samples)
            *by_reward, total, tokens = means.tolist()
            metrics = {
                "eval_loss": 1 - total,
                "eval_reward": total,
                "eval_completions/mean_length": tokens,
                **{f"eval_rewards/{item.name}/mean": value for item, value in zip(weighted, by_reward, strict=True)},
            }
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

        def _answer_greedily(self, prompts: list[list[int]]) -> list[list[int]]:
            """Return the tokens of one answer to each prompt. TRL's GRPO trainer also returns their log-probabilities."""
            with self.decode_greedily():
                if config.objective == "grpo":
                    ids: list[list[int]] = self._generate_single_turn(prompts, None, {}, 1)[0]
                else:
                    ids = self._generate_single_turn(prompts, None, {})
            return ids

        def _log_samples(self, samples: Sequence[tuple[Rollout, float]]) -> None:
            with samples_path.open("a", encoding="utf-8") as file:
                for rollout, reward in samples:
                    line = {"step": self.state.global_step, "prompt": rollout.question, "answer": rollout.answer}
                    file.write(json.dumps({**line, "reward": round(reward, 4)}, ensure_ascii=False) + "\n")

    return RolloutTrainer


def distill_tokens(base: type[Trainer], samples_path: Path) -> type[Trainer]:
    """Return a subclass of TRL's distillation trainer for tokenized prompts, which validates on answers without sampling.

    Args:
        base: TRL's trainer.
        samples_path: Log of the answers to the first validation prompts.
    """
    generating = generate_from_tokens(base)

    class DistillationTrainer(generating):  # type: ignore[misc,valid-type]
        samples: list[dict[str, str]]

        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            """Measure the divergence on greedy answers, which consume no random numbers."""
            self.samples = []
            with self.decode_greedily():
                metrics: dict[str, float] = super().evaluate()
            if self.is_world_process_zero():
                with samples_path.open("a", encoding="utf-8") as file:
                    for sample in self.samples[:LOGGED_SAMPLES]:
                        line = {"step": self.state.global_step, **sample}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
            return metrics

        def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            """Compute in the compute precision: TRL calls the layers without the forward that Accelerate wraps."""
            with self.accelerator.autocast():
                return super()._compute_loss(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if not self.model.training and len(self.samples) < LOGGED_SAMPLES:
                decode = self.processing_class.batch_decode
                texts = (decode(batch[f"{part}_ids"], skip_special_tokens=True) for part in ("prompt", "completion"))
                self.samples += [
                    {"prompt": prompt.strip(), "answer": answer.strip()} for prompt, answer in zip(*texts, strict=True)
                ]
            return batch

    return DistillationTrainer
