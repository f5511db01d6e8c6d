"""Engines that generate the answers of grpo and rloo during training.

To add an engine, add its name to `RolloutEngineName` and its entry to `ROLLOUT_ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.common.runtime.errors import TrainingError

RolloutEngineName = Literal["generate", "continuous_batching"]
AnswerFunction = Callable[[Any, Sequence[list[int]], Any], list[list[int]]]

PAGE_TOKENS = 32  # of the paged cache; an answer wastes up to a page
PREFILL_TOKENS = 256  # that one forward pass reads; a dense attention mask grows with them
PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class RolloutEngine:
    """Properties of an engine.

    Attributes:
        summary: Description; shown in the configuration reference.
        answer: Returns the tokens of one answer to each tokenized prompt, with the end token. Its arguments are the model,
            the prompts and transformers' GenerationConfig. None: TRL calls transformers' `generate`.
        page_tokens: Tokens to which the engine's cache rounds up an answer. 1: no pages.
        prefill_tokens: Tokens of prompts that one pass reads, with a dense attention mask over the cache. 0: no such mask.
        cpu_time_factor: Time on a CPU relative to `generate`, measured.
    """

    summary: str
    answer: AnswerFunction | None = None
    page_tokens: int = 1
    prefill_tokens: int = 0
    cpu_time_factor: float = 1.0


def answer_by_continuous_batching(model: Any, prompts: Sequence[list[int]], generation: Any) -> list[list[int]]:
    """Answer prompts with transformers' continuous batching, reproducibly.

    TRL's own call is not used: it casts the trained weights to bfloat16, reserves half of the free memory, and adds
    the prompts while a thread already generates, so that the batches, and the sampled tokens, depend on timing.
    Here the cache fits the answers, the thread starts after all prompts are known, and the seed is drawn from the random
    numbers that a checkpoint stores.

    Raises:
        TrainingError: the engine failed.
    """
    import torch
    from transformers.generation import ContinuousBatchingConfig

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_training = base.training
    longest = max(map(len, prompts)) + generation.max_new_tokens
    # Greedy answers consume no random numbers; sampled ones continue from the seed, as the engine sets it.
    with torch.random.fork_rng(enabled=not generation.do_sample), torch.no_grad():
        settings = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=len(prompts) * (-(-longest // PAGE_TOKENS) + 1),  # with a margin that the scheduler keeps free
            max_batch_tokens=max(PREFILL_TOKENS, len(prompts)),
            max_requests_per_batch=len(prompts),
            allow_block_sharing=False,
            auto_switch_to_flash=False,  # may download kernels
            seed=int(torch.randint(2**31, (1,))),
        )
        manager = base.init_continuous_batching(generation_config=generation, continuous_batching_config=settings)
        try:
            names = manager.add_requests(prompts, max_new_tokens=generation.max_new_tokens)
            manager.start()
            answers: dict[str, Any] = {}
            while len(answers) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise TrainingError("continuous batching ended without an answer to every prompt")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise TrainingError(f"continuous batching failed: {result.error}")
                    answers[result.request_id] = result
        finally:
            manager.stop(block=True)
            manager.destroy()
            base.train(was_training)
    return [list(answers[name].generated_tokens) for name in names]


ROLLOUT_ENGINES: dict[RolloutEngineName, RolloutEngine] = {
    "generate": RolloutEngine("transformers' `generate`, which waits for the longest answer of a batch"),
    "continuous_batching": RolloutEngine(
        "transformers' continuous batching, which removes an answer from the batch as soon as it ends; tested on a CPU "
        "only, where it is slower",
        answer_by_continuous_batching,
        PAGE_TOKENS,
        PREFILL_TOKENS,
        2.0,
    ),
}
