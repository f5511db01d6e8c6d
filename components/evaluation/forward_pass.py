"""Forward passes of a transformers model over token trees, which return the log-likelihoods of the targets.

Logits are computed only at nodes that predict a target, because the head of a small model costs a third as much as its
layers. `supports_branching` tests whether a model supports branches.
"""

# A model without this support, such as a recurrent model, scores every sequence in a separate row.

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from components.evaluation.prefix_trees import TokenIds, TokenSequence, TokenTree

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

# Maximum difference in nats per token between two computations of a value; a wrong mask or position exceeds it by far.
TOLERANCE_NATS = {"float32": 1e-4, "float64": 1e-4}
LOW_PRECISION_TOLERANCE_NATS = 0.25  # for bfloat16 and float16
LOGITS_PER_CHUNK = 1 << 21  # logits normalised at once; fits into a CPU cache


@dataclass(frozen=True)
class TokenScores:
    """Log-likelihood of each target of a tree in nats, and whether the target is the model's most likely token."""

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True)
class PrefixCache:
    """A computed prefix: its length in tokens, and the model's keys and values."""

    length: int = 0
    cache: DynamicCache | None = None

    def expand(self, rows: int) -> DynamicCache | None:
        """Return a copy of the keys and values for this many rows, to be extended by a forward pass."""
        if self.cache is None:
            return None
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(rows)
        return cache


def prefill(model: PreTrainedModel, prefix: TokenIds) -> PrefixCache:
    """Compute the keys and values of a prefix, which may be empty."""
    import torch
    from transformers import DynamicCache

    if not prefix:
        return PrefixCache()
    ids = torch.tensor([prefix], device=model.device)
    cache = DynamicCache(config=unwrap_model(model).config)
    options = {"logits_to_keep": 1} if _has_logits_to_keep(model) else {}
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    return PrefixCache(len(prefix), cache)


def score_trees(model: PreTrainedModel, trees: Sequence[TokenTree], prefix: PrefixCache) -> list[TokenScores]:
    """Score the targets of each tree in one right-padded pass.

    A batch without branches and prefix needs no attention mask, which is faster.
    """
    import torch
    import transformers

    shape = (len(trees), max(len(tree.ids) for tree in trees))
    ids = torch.zeros(shape, dtype=torch.long)
    positions, keep = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, tree in enumerate(trees):
        ids[row, : len(tree.ids)] = torch.tensor(tree.ids)
        positions[row, : len(tree.ids)] = torch.tensor(tree.depths) + prefix.length
    targets = [(row, node, token) for row, tree in enumerate(trees) for node, token in tree.targets]
    rows, nodes, tokens = torch.tensor(targets).T
    keep[rows, nodes] = True
    inputs: dict[str, object] = {"input_ids": ids.to(model.device), "use_cache": prefix.cache is not None}
    if prefix.cache is not None or any(tree.has_branches for tree in trees):
        inputs["attention_mask"] = _build_attention_mask(trees, shape[1], prefix.length, model.dtype).to(model.device)
        inputs["position_ids"] = positions.to(model.device)
        inputs["past_key_values"] = prefix.expand(len(trees))
    # transformers 5.20 and later compute logits only at the positions of a mask.
    takes_mask = hasattr(transformers.modeling_utils, "slice_logits_to_keep") and not count_virtual_tokens(model)
    if takes_mask and _has_logits_to_keep(model):
        inputs["logits_to_keep"] = keep.to(model.device)
    with torch.inference_mode():
        logits = model(**inputs).logits
        if logits.dim() == 3:
            logits = logits[:, -keep.shape[1] :][keep.to(model.device)]  # skips virtual tokens
    # The log-likelihood of a target is logit − log Σ exp, computed in float32 for one chunk of rows at a time.
    logit_rows = torch.full(shape, -1).masked_scatter_(keep, torch.arange(len(logits)))[rows, nodes].to(logits.device)
    tokens = tokens.to(logits.device)
    normalizers, first_choices = [], []
    for chunk in logits.split(max(1, LOGITS_PER_CHUNK // logits.shape[1])):
        normalizers.append(chunk.float().logsumexp(-1))
        first_choices.append(chunk.argmax(-1))
    values = logits[logit_rows, tokens].float() - torch.cat(normalizers)[logit_rows]
    greedy = torch.cat(first_choices)[logit_rows] == tokens
    sizes = [len(tree.targets) for tree in trees]
    by_tree = zip(values.split(sizes), greedy.split(sizes), strict=True)
    return [TokenScores(logprobs.tolist(), choices.tolist()) for logprobs, choices in by_tree]


def _build_attention_mask(
    trees: Sequence[TokenTree], width: int, prefix_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the additive attention mask (0 or the lowest number) of shape (trees, 1, width, prefix + width)."""
    # A node attends to the prefix, its ancestors and itself. Padding attends to itself: an empty row would give NaN.
    import numpy as np
    import torch

    visible: np.ndarray = np.zeros((len(trees), width, prefix_length + width), dtype=bool)
    visible[:, :, :prefix_length] = True
    own = visible[:, :, prefix_length:]
    for row, tree in enumerate(trees):
        # Runs of nodes in which the parent of every node but the first is its left neighbour.
        starts = [node for node, parent in enumerate(tree.parents) if node == 0 or parent != node - 1]
        for start, end in pairwise([*starts, len(tree.parents)]):
            if tree.parents[start] >= 0:
                own[row, start:end] = own[row, tree.parents[start]]
            own[row, start:end, start:end] = np.tri(end - start, dtype=bool)
    diagonal = np.arange(width)
    own[:, diagonal, diagonal] = True
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~visible), torch.finfo(dtype).min)[:, None]


def _has_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(unwrap_model(model).forward).parameters


def unwrap_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformers model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def get_decoder_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the model's text decoder."""
    return unwrap_model(model).config.get_text_config(decoder=True)


def count_virtual_tokens(model: PreTrainedModel) -> int:
    """Return the number of virtual tokens that an enabled adapter prepends to every row; 0 without such an adapter."""
    if not hasattr(model, "peft_config") or getattr(model, "_adapters_disabled", False):
        return 0
    settings = model.active_peft_config
    return int(settings.num_virtual_tokens) if settings.is_prompt_learning else 0


def get_full_attention_span(model: PreTrainedModel) -> float:
    """Return the input length in tokens up to which attention covers all tokens and position encoding is fixed.

    Attention windows, attention chunks and length-dependent position scaling limit this length. Without these
    features, the length is infinite.
    """
    config = get_decoder_config(model)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        windows.append(rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None))
    return min((float(window) for window in windows if window), default=float("inf"))


def supports_branching(model: PreTrainedModel) -> bool:
    """Return whether branches and prefixes give the scores of separate sequences, tested on a few tokens.

    Models with virtual tokens never support branches.
    """
    if count_virtual_tokens(model):
        return False
    vocabulary = int(get_decoder_config(model).vocab_size)
    trunk, first, second = (
        tuple((7 * position + offset) % vocabulary for position in range(length))
        for offset, length in ((1, 6), (2, 4), (3, 4))
    )
    # Targets: the tokens of each branch after its first, and the trunk's first token after the end of the branch.
    sequences = [
        TokenSequence(trunk + branch, tuple(enumerate([*branch[1:], trunk[0]], len(trunk))), number)
        for number, branch in enumerate((first, second))
    ]

    def build_tree(prefix_length: int) -> TokenTree:
        tree, path = TokenTree(), list[int]()
        for sequence in sequences:
            path = tree.add_sequence(path[: len(trunk) - prefix_length], sequence, prefix_length)
        return tree

    separate = [TokenTree(), TokenTree()]
    for tree, sequence in zip(separate, sequences, strict=True):
        tree.add_sequence([], sequence, 0)
    expected = [logprob for scores in score_trees(model, separate, PrefixCache()) for logprob in scores.logprobs]
    try:
        scores = [
            *score_trees(model, [build_tree(0)], PrefixCache()),
            *score_trees(model, [build_tree(len(trunk) - 1)], prefill(model, trunk[:-1])),
        ]
    except Exception:  # architectures raise various exceptions for unsupported inputs
        return False
    return all(is_close(model, expected, tree_scores.logprobs) for tree_scores in scores)


def is_close(model: PreTrainedModel, first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether log-likelihoods agree within the precision of the model's data type."""
    tolerance = get_tolerance(model)
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def get_tolerance(model: PreTrainedModel) -> float:
    """Return the difference of log-likelihoods, in nats, that the precision of the model's data type explains."""
    return TOLERANCE_NATS.get(str(model.dtype).removeprefix("torch."), LOW_PRECISION_TOLERANCE_NATS)
