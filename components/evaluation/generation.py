"""Greedy answers of a transformers model to many prompts at once: the text that each prompt would be answered with alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from components.common.progress import Reporter
from components.evaluation import passes, prefixes
from components.evaluation.passes import Header
from components.evaluation.prefixes import Tokens
from components.evaluation.task import Decoding

SLACK = 4  # tokens beyond a stop text's bytes that are looked at for it: a token may end in the middle of a character


def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    batch_tokens: int,
    reporter: Reporter,
    *,
    sharing: bool,
) -> list[str]:
    """The answers in the prompts' order; equal prompts are answered once. `sharing` False: no headers, and only like lengths together.

    A batch holds so many rows that prompts and answers fit into batch_tokens, at least one.
    """
    ordered = sorted({tuple(prompt) for prompt in prompts})
    found: dict[Tokens, str] = {}
    for header, family in _families(ordered, sharing):
        behind = passes.prefilled(model, ordered[family[0]][:header])
        for batch in _batches([ordered[place] for place in family], decoding.max_new_tokens, batch_tokens, like=not sharing):
            found |= zip(batch, _answered(model, tokenizer, batch, decoding, behind), strict=True)
            reporter.progress(len(found), len(ordered), "answers")
    return [found[tuple(prompt)] for prompt in prompts]


def _families(ordered: Sequence[Tokens], sharing: bool) -> Iterator[tuple[int, list[int]]]:
    """The prompts of each header, and those without one together."""
    if not sharing:
        yield 0, list(range(len(ordered)))
        return
    loose: list[int] = []
    for header, family in prefixes.families(ordered, [len(prompt) - 1 for prompt in ordered]):
        if header:
            yield header, family
        else:
            loose += family
    if loose:
        yield 0, loose


def _batches(prompts: Sequence[Tokens], new: int, batch_tokens: int, *, like: bool) -> Iterator[list[Tokens]]:
    """Prompts of like length, longest first; of one length where `like` says so."""
    batch: list[Tokens] = []
    for prompt in sorted(prompts, key=lambda p: (-len(p), p)):
        if batch and ((len(batch) + 1) * (len(batch[0]) + new) > batch_tokens or (like and len(prompt) != len(batch[0]))):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _answered(model: Any, tokenizer: Any, batch: Sequence[Tokens], decoding: Decoding, header: Header) -> list[str]:
    import torch

    ids, seen = _left_padded(batch, header.length, _padding(tokenizer))
    shared = {"past_key_values": header.for_rows(len(batch))} if header.cache is not None else {}
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=seen.to(model.device),
            generation_config=_greedy(model, tokenizer, decoding),
            stopping_criteria=[_Stopped(tokenizer, decoding.stop, ids.shape[1])] if decoding.stop else None,
            **shared,
        )
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in output[:, ids.shape[1] :]]
    return [cut(text, decoding.stop) for text in texts]


def _left_padded(batch: Sequence[Tokens], header: int, padding: int) -> tuple[Any, Any]:
    """Tokens and which of them are seen, each (rows, longest). Padding stands between the header, which all rows share, and the rest."""
    import torch

    longest = max(map(len, batch))
    ids = torch.full((len(batch), longest), padding)
    seen = torch.zeros_like(ids)
    seen[:, :header] = 1
    for row, prompt in enumerate(batch):
        ids[row, :header] = torch.tensor(prompt[:header])
        rest = prompt[header:]
        ids[row, longest - len(rest) :] = torch.tensor(rest)
        seen[row, longest - len(rest) :] = 1
    return ids, seen


def _padding(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: those the model's generation configuration names, and the tokenizer's own."""
    named = model.generation_config.eos_token_id
    several = named if isinstance(named, list) else [named]
    return sorted({int(one) for one in [*several, tokenizer.eos_token_id] if one is not None})


def _greedy(model: Any, tokenizer: Any, decoding: Decoding) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=_padding(tokenizer),
        eos_token_id=ends(model, tokenizer),
    )


def plainly(model: Any, tokenizer: Any) -> None:
    """Take away what the model's own generation configuration adds to greedy decoding (penalties, forced or forbidden tokens).

    transformers fills in what a call leaves open from that configuration, so that two models would be asked differently.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=_padding(tokenizer), eos_token_id=ends(model, tokenizer))


class _Stopped:
    """Says which rows have come to a stop text: the answer's end is decoded after every token, so a stop may lie across tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt: int) -> None:
        self._tokenizer, self._stop, self._prompt = tokenizer, stop, prompt
        self._tail = max(len(text.encode()) for text in stop) + SLACK

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        import torch

        new = input_ids[:, max(self._prompt, input_ids.shape[1] - self._tail) :]
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in new]
        return torch.tensor([cut(text, self._stop) != text for text in texts], device=input_ids.device)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop text in it."""
    return text[: min((place for one in stop if one and (place := text.find(one)) >= 0), default=len(text))]
