"""Scores of one model on the held-out items, kept by (model, task) so that an unchanged model is never measured twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing
from components.common.progress import Reporter
from components.evaluation.config import EvaluationConfig
from components.evaluation.items import Item


@dataclass(frozen=True)
class Scores:
    """Per item: summed negative log-likelihood of the answer tokens (nats). Per generated item: the greedy answer."""

    nll: list[float]
    answers: dict[str, str]


def kept_or_measured(path: Path, name: str, measure: Callable[[], Scores], reporter: Reporter) -> Scores:
    """The scores kept at `path`, or measured now and kept. A file whose digest line disagrees is measured again."""
    found = _read(path)
    if found:
        reporter.note(f"scores of the {name} are kept from an earlier evaluation")
        return found
    scores = measure()
    if not all(map(math.isfinite, scores.nll)):
        return scores  # a broken model is looked at again, not remembered
    body = {"nll": scores.nll, "answers": scores.answers}
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(path, json.dumps({"sha256": hashing.digest(body), "scores": body}))
    return scores


def _read(path: Path) -> Scores | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if hashing.digest(kept["scores"]) == kept["sha256"]:
            return Scores(**kept["scores"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def measure(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    config: EvaluationConfig,
    *,
    name: str,
    reporter: Reporter,
    without_adapter: bool = False,
) -> Scores:
    """Score a loaded model; `without_adapter` scores the base that its adapter stands on, without loading it a second time."""
    mode: AbstractContextManager[Any] = model.disable_adapter() if without_adapter else nullcontext()
    with mode:
        reporter.step(f"held-out loss of the {name}")
        nll = losses(model, items, config.batch_tokens, reporter)
        reporter.step(f"answers of the {name}")
        return Scores(nll, answers(model, tokenizer, items, config, reporter))


def losses(model: Any, items: Sequence[Item], batch_tokens: int, reporter: Reporter) -> list[float]:
    """Summed negative log-likelihood of each item's answer tokens, in nats, in the items' order. Items of like length share a batch."""
    import torch

    results = [0.0] * len(items)
    done = 0
    for batch in _batches(items, batch_tokens):
        with torch.inference_mode():
            for index, value in zip(batch, _batch_losses(model, [items[i] for i in batch]), strict=True):
                results[index] = value
        done += len(batch)
        reporter.progress(done, len(items), "items")
    return results


def _batches(items: Sequence[Item], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of items, longest first, so many that the padded batch stays within batch_tokens (at least one)."""
    order = sorted(range(len(items)), key=lambda i: (-len(items[i].input_ids), items[i].id))
    start = 0
    while start < len(order):
        longest = len(items[order[start]].input_ids)
        size = max(1, batch_tokens // longest)
        yield order[start : start + size]
        start += size


def _batch_losses(model: Any, batch: Sequence[Item]) -> list[float]:
    import torch

    longest = max(len(item.input_ids) for item in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    seen, counted = torch.zeros_like(ids), torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, item in enumerate(batch):
        length = len(item.input_ids)
        ids[row, :length] = torch.tensor(item.input_ids)
        seen[row, :length] = 1
        counted[row, :length] = torch.tensor(item.answer, dtype=torch.bool)
    ids, seen, counted = ids.to(model.device), seen.to(model.device), counted[:, 1:].to(model.device)
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, -longest:-1][counted]  # behind virtual tokens, if any
    nll = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][counted], reduction="none")
    rows = counted.nonzero()[:, 0]
    return [float(v) for v in torch.zeros(len(batch), dtype=torch.float64, device=nll.device).index_add_(0, rows, nll.double())]


def answers(model: Any, tokenizer: Any, items: Sequence[Item], config: EvaluationConfig, reporter: Reporter) -> dict[str, str]:
    """Greedy answers to the first items' prompts, by item id."""
    import torch

    chosen = [item for item in items if item.prompt_ids][: config.generations]
    found = {}
    for done, item in enumerate(chosen, 1):
        prompt = torch.tensor([item.prompt_ids], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=config.generation_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        found[item.id] = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()
        reporter.progress(done, len(chosen), "answers")
    return found
