"""Batched decoding with a transformers model, greedy or sampled. Batching has no effect on the answer to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from components.common.runtime.reporters import Reporter
from components.evaluation import forward_pass, prefix_trees
from components.evaluation.forward_pass import PrefixCache
from components.evaluation.prefix_trees import TokenIds
from components.evaluation.task_interface import Decoding, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Request = tuple[TokenIds, int]  # a prompt and the seed of its answer

# Tokens to search in addition to the bytes of a stop text: a token may end in the middle of a character.
STOP_SEARCH_SLACK_TOKENS = 4


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    batch_tokens: int,
    reporter: Reporter,
    *,
    sharing: bool,
) -> list[str]:
    """Return the answers in the order of the prompts. Equal prompts with equal seeds are answered once.

    Args:
        model: The loaded model.
        tokenizer: The model's tokenizer.
        prompts: Token ids.
        decoding: Maximum length and stop texts of the answers, and their sampling.
        batch_tokens: Tokens per batch, prompts and answers together; a batch holds at least one row.
        reporter: Receives the progress.
        sharing: Whether prefixes may be computed separately. If false, a batch holds prompts of one length only.
    """
    requests = decoding.pair_seeds(prompts)
    ordered = sorted(set(requests))
    groups = prefix_trees.group_prompts([prompt for prompt, _ in ordered], sharing=sharing)
    answers: dict[Request, str] = {}
    for prefix_length, indices in groups:
        # Prompts of similar length, longest first.
        batches: list[list[Request]] = []
        for prompt, seed in sorted((ordered[index] for index in indices), key=lambda r: (-len(r[0]), r)):
            batch = batches[-1] if batches else []
            longest = len(batch[0][0]) if batch else 0
            too_many_tokens = batch and (len(batch) + 1) * (longest + decoding.max_new_tokens) > batch_tokens
            if not batch or too_many_tokens or (not sharing and len(prompt) != longest):
                batches.append([])
            batches[-1].append((prompt, seed))
        prefix = forward_pass.prefill(model, ordered[indices[0]][0][:prefix_length])
        for batch in batches:
            answers |= zip(batch, _answer_batch(model, tokenizer, batch, decoding, prefix), strict=True)
            reporter.progress(len(answers), len(ordered), "answers")
    return [answers[request] for request in requests]


def _answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[Request],
    decoding: Decoding,
    prefix: PrefixCache,
) -> list[str]:
    import torch
    from transformers import GenerationConfig

    # Padding is inserted between the shared prefix and the rest of a prompt.
    width = max(len(prompt) for prompt, _ in batch)
    ids = torch.full((len(batch), width), _get_padding_id(tokenizer))
    mask = torch.zeros_like(ids)
    mask[:, : prefix.length] = 1
    for row, (prompt, _) in enumerate(batch):
        start = width - len(prompt) + prefix.length
        ids[row, : prefix.length] = torch.tensor(prompt[: prefix.length])
        ids[row, start:] = torch.tensor(prompt[prefix.length :])
        mask[row, start:] = 1
    # The most likely token after a SeededSampler is a sampled one.
    greedy = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=_get_padding_id(tokenizer),
        eos_token_id=collect_end_token_ids(model, tokenizer),
    )
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=greedy,
            logits_processor=[SeededSampler(decoding.sampling, [seed for _, seed in batch])]
            if decoding.sampling
            else None,
            stopping_criteria=[_StopTextCriterion(tokenizer, decoding.stop, width)] if decoding.stop else None,
            **({"past_key_values": prefix.expand(len(batch))} if prefix.cache is not None else {}),
        )
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in output[:, width:]]
    return [truncate_at_stop(text, decoding.stop) for text in texts]


def _get_padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def collect_end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the sorted ids of the end-of-sequence tokens of the generation configuration and of the tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return sorted({int(token) for token in ids if token is not None})


def reset_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove the model's own generation settings (penalties, forced or forbidden tokens).

    transformers applies them where a call sets no value, so that two models would be decoded differently.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        pad_token_id=_get_padding_id(tokenizer), eos_token_id=collect_end_token_ids(model, tokenizer)
    )


class SeededSampler:
    """Logits processor whose most likely token is a sample.

    With standard Gumbel noise, argmax(logits / temperature + noise) has the distribution softmax(logits / temperature)
    (Gumbel, Statistical Theory of Extreme Values, 1954). Each row has a separate generator of noise, so that an answer
    depends neither on other rows of the batch nor on their order.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        import torch
        from transformers import TopPLogitsWarper

        self._temperature = sampling.temperature
        self._warper = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None
        # Noise comes from the CPU on every device.
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch

        scores = scores.float() / self._temperature
        if self._warper:
            scores = self._warper(input_ids, scores)
        noise = [
            -torch.empty(scores.shape[1]).exponential_(generator=generator).log() for generator in self._generators
        ]
        return scores + torch.stack(noise).to(scores.device)


class _StopTextCriterion:
    """Stopping criterion for rows that contain a stop text.

    The end of an answer is decoded after every token, because a stop text may span tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_length: int) -> None:
        self._tokenizer, self._stop, self._prompt_length = tokenizer, stop, prompt_length
        self._tail = max(len(text.encode()) for text in stop) + STOP_SEARCH_SLACK_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
        import torch

        new = input_ids[:, max(self._prompt_length, input_ids.shape[1] - self._tail) :]
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in new]
        return torch.tensor([truncate_at_stop(text, self._stop) != text for text in texts], device=input_ids.device)


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to its first stop text."""
    positions = [position for stop_text in stop if stop_text and (position := text.find(stop_text)) >= 0]
    return text[: min(positions, default=len(text))]
