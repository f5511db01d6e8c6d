"""Passes of a transformers model over trees of tokens: the likelihood of what is asked of them, and of nothing else.

Logits are computed behind the nodes that predict something counted, and there alone: the head of a small model costs as much as a third of
its layers. Whether a model takes branches is not looked up by its name but tried (`takes_branches`): an architecture whose positions or
states run along the row scores every sequence in a row of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from components.evaluation.prefixes import Tokens, Tree

# Nats a token by which two ways of computing the same may differ; a wrong mask or position differs by far more.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
COARSE = 0.25  # of bfloat16 and float16
CHUNK = 1 << 21  # logits turned into likelihoods at once: what a processor's cache holds


@dataclass(frozen=True)
class Found:
    """Of each wanted pair of a tree: log-likelihood in nats, and whether the token was the model's first choice."""

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True)
class Header:
    """A beginning that was computed: its length, and the model's keys and values."""

    length: int = 0
    cache: Any = None

    def for_rows(self, rows: int) -> Any:
        """The keys and values for so many rows, to be written behind."""
        if self.cache is None:
            return None
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(rows)
        return cache


def prefilled(model: Any, header: Tokens) -> Header:
    """The header's keys and values."""
    import torch
    from transformers import DynamicCache

    if not header:
        return Header()
    ids = torch.tensor([header], device=model.device)
    cache = DynamicCache(config=base_of(model).config)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **_few_logits(model, 1))
    return Header(len(header), cache)


def likelihoods(model: Any, trees: Sequence[Tree], header: Header) -> list[Found]:
    """What is wanted of each tree, from one pass. Right-padded; a batch without branches or header needs no mask, which is faster."""
    import torch

    ids, positions, keep = _rows(trees, header.length)
    inputs: dict[str, Any] = {"input_ids": ids.to(model.device), "use_cache": header.cache is not None}
    if header.cache is not None or any(tree.branches for tree in trees):
        inputs["attention_mask"] = _mask(trees, ids.shape[1], header.length, model.dtype).to(model.device)
        inputs["position_ids"] = positions.to(model.device)
        inputs["past_key_values"] = header.for_rows(len(trees))
    with torch.inference_mode():
        return _found(_logits(model, inputs, keep), trees, keep)


def _rows(trees: Sequence[Tree], behind: int) -> tuple[Any, Any, Any]:
    """Tokens, positions (long) and which nodes predict something wanted (bool), each of shape (trees, longest)."""
    import torch

    longest = max(len(tree.ids) for tree in trees)
    ids = torch.zeros((len(trees), longest), dtype=torch.long)
    positions, keep = torch.zeros_like(ids), torch.zeros((len(trees), longest), dtype=torch.bool)
    for row, tree in enumerate(trees):
        ids[row, : len(tree.ids)] = torch.tensor(tree.ids)
        positions[row, : len(tree.ids)] = torch.tensor(tree.depths) + behind
        keep[row, torch.tensor(sorted({node for node, _ in tree.wanted}))] = True
    return ids, positions, keep


def _mask(trees: Sequence[Tree], longest: int, behind: int, dtype: Any) -> Any:
    """What each node sees, to be added to attention scores: (trees, 1, longest, header + longest), 0 or the least number there is.

    A node sees the header, its ancestors and itself. Padding sees itself, since a row that saw nothing would not be a number.
    """
    import numpy
    import torch

    sees: Any = numpy.zeros((len(trees), longest, behind + longest), dtype=bool)
    sees[:, :, :behind] = True
    own = sees[:, :, behind:]
    for row, tree in enumerate(trees):
        for start, end in segments(tree.parents):
            if tree.parents[start] >= 0:
                own[row, start:end] = own[row, tree.parents[start]]
            own[row, start:end, start:end] = numpy.tri(end - start, dtype=bool)
    diagonal = numpy.arange(longest)
    own[:, diagonal, diagonal] = True
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)[:, None]


def segments(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The stretches of nodes (start, end) each of which but the first has the one to its left as its parent."""
    starts = [node for node, parent in enumerate(parents) if node == 0 or parent != node - 1]
    yield from zip(starts, [*starts[1:], len(parents)], strict=True)


def _logits(model: Any, inputs: dict[str, Any], keep: Any) -> Any:
    """Logits of the nodes in `keep`, in its order: (nodes, vocabulary)."""
    keep = keep.to(model.device)
    if selects(model):
        logits = model(**inputs, logits_to_keep=keep).logits
        if logits.dim() == 2:
            return logits
    else:
        logits = model(**inputs).logits
    return logits[:, -keep.shape[1] :][keep]  # behind virtual tokens, if any


def selects(model: Any) -> bool:
    """Whether the model's forward takes a mask of the positions whose logits are wanted (transformers 5.20 and later do)."""
    import transformers

    known = hasattr(transformers.modeling_utils, "slice_logits_to_keep")
    return known and not virtual_tokens(model) and _takes_positions(model)


def _takes_positions(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(base_of(model).forward).parameters


def _few_logits(model: Any, count: int) -> dict[str, int]:
    return {"logits_to_keep": count} if _takes_positions(model) else {}


def _found(logits: Any, trees: Sequence[Tree], keep: Any) -> list[Found]:
    """Log-likelihoods of the wanted pairs: logit − log Σ exp, in float32, a part of the rows at a time."""
    import torch

    places = torch.full(keep.shape, -1).masked_scatter_(keep, torch.arange(len(logits)))
    pairs = [(int(places[row, node]), token) for row, tree in enumerate(trees) for node, token in tree.wanted]
    rows, tokens = (torch.tensor(column, device=logits.device) for column in zip(*pairs, strict=True))
    normalisers, firsts = [], []
    for part in logits.split(max(1, CHUNK // logits.shape[1])):
        normalisers.append(part.float().logsumexp(-1))
        firsts.append(part.argmax(-1))
    values = (logits[rows, tokens].float() - torch.cat(normalisers)[rows]).tolist()
    chosen = (torch.cat(firsts)[rows] == tokens).tolist()
    found, at = [], 0
    for tree in trees:
        found.append(Found(values[at : at + len(tree.wanted)], chosen[at : at + len(tree.wanted)]))
        at += len(tree.wanted)
    return found


def base_of(model: Any) -> Any:
    """The transformers model, without the adapter that PEFT put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def virtual_tokens(model: Any) -> int:
    """Trained tokens that an adapter puts in front of every row; 0 without one, or while it is switched off."""
    if not hasattr(model, "peft_config") or getattr(model, "_adapters_disabled", False):
        return 0
    settings = model.active_peft_config
    return int(settings.num_virtual_tokens) if settings.is_prompt_learning else 0


def reach(config: Any) -> float:
    """Tokens up to which every token of a model sees all before it at the same angle: windows, chunks and stretched positions end that."""
    config = config.get_text_config(decoder=True)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        windows.append(rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None))
    return min((float(window) for window in windows if window), default=float("inf"))


def takes_branches(model: Any) -> bool:
    """Whether branches and headers give what sequences alone give, tried on a few tokens. Never with virtual tokens in front."""
    if virtual_tokens(model):
        return False
    size = int(base_of(model).config.get_text_config(decoder=True).vocab_size)
    trunk, one, other = ([(7 * place + offset) % size for place in range(length)] for offset, length in ((1, 6), (2, 4), (3, 4)))
    alone = [_chain([*trunk, *branch]) for branch in (one, other)]
    plain = [found.logprobs[len(trunk) :] for found in likelihoods(model, alone, Header())]
    try:
        tree = _fork(trunk, one, other, trunk[0])
        behind = _fork(trunk[-1:], one, other, trunk[0])
        together = [likelihoods(model, [tree], Header())[0], likelihoods(model, [behind], prefilled(model, tuple(trunk[:-1])))[0]]
    except Exception:  # what an architecture does not take it says in many ways; it is scored row by row
        return False
    return all(same(model, [*plain[0], *plain[1]], found.logprobs) for found in together)


def same(model: Any, one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether log-likelihoods agree as far as the model's precision goes."""
    tolerance = TOLERANCE.get(str(model.dtype).removeprefix("torch."), COARSE)
    return all(abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))


def _chain(ids: Sequence[int]) -> Tree:
    """A sequence of which every token but the first is wanted, and one more behind the last."""
    nodes = range(len(ids))
    wanted = [(node, (ids[node + 1] if node + 1 < len(ids) else ids[0])) for node in nodes]
    return Tree(list(ids), [node - 1 for node in nodes], list(nodes), wanted)


def _fork(trunk: Sequence[int], one: Sequence[int], other: Sequence[int], last: int) -> Tree:
    """Two branches behind a trunk, of which what `_chain` wants behind the trunk is wanted, and `last` at the end of each."""
    tree = _chain(trunk)
    tree.wanted.clear()
    for branch in (one, other):
        start = len(tree.ids)
        tree.parents += [len(trunk) - 1, *range(start, start + len(branch) - 1)]
        tree.depths += range(len(trunk), len(trunk) + len(branch))
        tree.ids += branch
        following = [*branch[1:], last]
        tree.wanted += [(start + place, token) for place, token in enumerate(following)]
    return tree


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads within an operation of torch, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
