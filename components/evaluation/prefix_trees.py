"""Planning of forward passes: a prefix that sequences share is computed once, as the trunk of a token tree.

A tree is one row of a batch. Its nodes are tokens, and a node attends only to its ancestors, so the branches of a row
are independent. For example, the options of a question are branches after the question.
"""

# A sequence without shared tokens is a tree without branches; short trees are packed into one row. If more sequences
# share a prefix than fit into one row, the prefix is computed separately. Its keys and values precede every row of its
# group.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from components.evaluation.task_interface import Continuation

TokenIds = tuple[int, ...]

MAX_ROW_TOKENS = 256  # maximum row length; a longer sequence has its own row
PACKED_ROW_TOKENS = 128  # maximum length of a row of packed trees; packing reduces padding
MIN_SHARED_TOKENS = 4  # minimum shared tokens of sequences in one row: longer rows need more attention
MIN_PREFIX_TOKENS = 64  # minimum shared tokens for a separately computed prefix
# Prompts to answer do not share rows, so a short prefix already saves one pass over it per prompt. The chat template and
# system message of SmolLM2 are 24 of 43 tokens of a request in the regression suite.
MIN_PROMPT_PREFIX_TOKENS = 16
MIN_SAVED_TOKENS = 256  # minimum tokens saved by a separate prefix: it adds a pass and splits the batches


@dataclass
class TokenTree:
    """One row of a batch. Parents precede their children.

    Attributes:
        ids: Token of each node.
        parents: Parent of each node; -1 for a node that follows the prefix or has no parent.
        depths: Position of each node after the prefix.
        targets: (node, token) pairs to score: the log-likelihood of the token after the node.
        requests: Number of each sequence in the tree, with the indices of its `targets`.
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    targets: list[tuple[int, int]] = field(default_factory=list)
    requests: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def has_branches(self) -> bool:
        """Whether any node has a parent other than its left neighbour."""
        return any(parent != node - 1 for node, parent in enumerate(self.parents))

    def add_sequence(self, path: list[int], sequence: TokenSequence, prefix_length: int) -> list[int]:
        """Add a sequence after the nodes of `path`, and return the nodes of its whole path.

        Shared targets are added once.

        Args:
            path: Nodes of the tokens after the prefix that the sequence shares with the tree. The list is extended.
            sequence: The sequence, including the tokens of the prefix.
            prefix_length: Length of the prefix in tokens.
        """
        ids = sequence.ids[prefix_length:]
        for depth in range(len(path), len(ids)):
            self.parents.append(path[-1] if path else -1)
            self.ids.append(ids[depth])
            self.depths.append(depth)
            path.append(len(self.ids) - 1)
        known = {target: index for index, target in enumerate(self.targets)}
        indices = []
        for position, token in sequence.predictions:
            target = (path[position - prefix_length], token)
            if target not in known:
                known[target] = len(self.targets)
                self.targets.append(target)
            indices.append(known[target])
        self.requests.append((sequence.number, indices))
        return path

    def append_tree(self, other: TokenTree) -> None:
        """Append another tree to the row. The two trees do not attend to each other."""
        nodes, targets = len(self.ids), len(self.targets)
        self.ids += other.ids
        self.depths += other.depths
        self.parents += [parent + nodes if parent >= 0 else -1 for parent in other.parents]
        self.targets += [(node + nodes, token) for node, token in other.targets]
        self.requests += [(number, [index + targets for index in indices]) for number, indices in other.requests]


@dataclass(frozen=True)
class PrefixGroup:
    """Rows that follow one prefix, which may be empty."""

    prefix: TokenIds
    trees: list[TokenTree]


@dataclass(frozen=True)
class TokenSequence:
    """Input tokens of a request, and its predictions as pairs of a position and the next token."""

    ids: TokenIds
    predictions: tuple[tuple[int, int], ...]
    number: int


def deduplicate(continuations: Sequence[Continuation]) -> tuple[list[Continuation], list[int]]:
    """Return the distinct continuations, sorted, and the index of each input among them."""
    keys = [(tuple(c.ids), tuple(map(bool, c.scored))) for c in continuations]
    indices = {key: index for index, key in enumerate(sorted(set(keys)))}
    return [Continuation(ids, scored) for ids, scored in indices], [indices[key] for key in keys]


def plan_rows(
    continuations: Sequence[Continuation], *, sharing: bool, max_row_tokens: int = MAX_ROW_TOKENS
) -> list[PrefixGroup]:
    """Return groups of rows that hold every continuation with a scored token.

    Args:
        continuations: Distinct continuations; trees refer to them by index.
        sharing: Whether rows may have branches and prefixes.
        max_row_tokens: Maximum tokens per row. A longer sequence has its own row.
    """
    sequences = []
    for number, continuation in enumerate(continuations):
        positions = [position for position, scored in enumerate(continuation.scored) if scored and position]
        if positions:
            predictions = tuple((position - 1, int(continuation.ids[position])) for position in positions)
            sequences.append(TokenSequence(tuple(continuation.ids[: positions[-1]]), predictions, number))
    sequences.sort(key=lambda s: (s.ids, s.predictions))

    rows = []
    for prefix_length, indices in group_by_prefix(
        [s.ids for s in sequences],
        [s.predictions[0][0] for s in sequences],
        sharing=sharing,
        max_row_tokens=max_row_tokens,
    ):
        members = [sequences[index] for index in indices]
        trees = list(_grow_trees(members, prefix_length, max_row_tokens, sharing))
        if sharing:
            trees = pack_trees(trees, min(max_row_tokens, PACKED_ROW_TOKENS))
        rows.append(PrefixGroup(members[0].ids[:prefix_length], trees))
    return rows


def group_by_prefix(
    ordered: Sequence[TokenIds],
    first_predictions: Sequence[int],
    *,
    sharing: bool,
    max_row_tokens: int | None = MAX_ROW_TOKENS,
    min_prefix_tokens: int = MIN_PREFIX_TOKENS,
) -> list[tuple[int, list[int]]]:
    """Group sorted sequences by the long prefixes that they share.

    Args:
        ordered: Sorted sequences.
        first_predictions: First position of each sequence that predicts a token. The prefix ends before this position
            and before the last shared token, which predicts the first different tokens.
        sharing: Whether prefixes may be computed separately.
        max_row_tokens: Maximum tokens per row. None: each sequence has its own row.
        min_prefix_tokens: Minimum length of a separate prefix, with the first different token.

    Returns:
        The length of each prefix and the indices of its sequences. The first group has length 0 and holds the
        sequences for which a separate prefix saves too few tokens.
    """
    if not sharing:
        return [(0, list(range(len(ordered))))] if ordered else []
    # Each run holds consecutive sequences that share at least min_prefix_tokens with their neighbour.
    runs: list[list[int]] = []
    for index, ids in enumerate(ordered):
        if not runs or count_common_tokens(ordered[index - 1], ids) < min_prefix_tokens:
            runs.append([])
        runs[-1].append(index)
    ungrouped: list[int] = []
    groups = []
    for run in runs:
        shared = count_common_tokens(ordered[run[0]], ordered[run[-1]])
        length = min(shared - 1, *(first_predictions[index] for index in run))
        saved_rows = len(run) - 1
        if max_row_tokens is not None:
            tokens = sum(len(ordered[b]) - count_common_tokens(ordered[a], ordered[b]) for a, b in pairwise(run))
            saved_rows = tokens // max_row_tokens
        saved = length * saved_rows
        if len(run) > 1 and length + 1 >= min_prefix_tokens and saved >= MIN_SAVED_TOKENS:
            groups.append((length, run))
        else:
            ungrouped += run
    return [(0, ungrouped), *groups] if ungrouped else groups


def group_prompts(ordered: Sequence[TokenIds], *, sharing: bool) -> list[tuple[int, list[int]]]:
    """Group sorted prompts, of which each has its own row, by their shared prefixes.

    Returns:
        The length of each prefix, which excludes the last token of each prompt, and the indices of its prompts. Prompts
        without a long prefix are grouped by short ones.
    """
    groups: list[tuple[int, list[int]]] = []
    for length, indices in group_by_prefix(ordered, [len(prompt) - 1 for prompt in ordered], sharing=sharing):
        if length or not sharing:
            groups.append((length, indices))
            continue
        remaining = [ordered[index] for index in indices]
        last_tokens = [len(prompt) - 1 for prompt in remaining]
        for short, positions in group_by_prefix(
            remaining, last_tokens, sharing=True, max_row_tokens=None, min_prefix_tokens=MIN_PROMPT_PREFIX_TOKENS
        ):
            groups.append((short, [indices[position] for position in positions]))
    return groups


def count_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    shortest = min(len(first), len(second))
    if first[:shortest] == second[:shortest]:
        return shortest
    return next(index for index in range(shortest) if first[index] != second[index])


def _grow_trees(
    ordered: Sequence[TokenSequence], prefix_length: int, max_row_tokens: int, sharing: bool
) -> Iterator[TokenTree]:
    """Yield trees of sorted sequences without their prefix, each as large as a row allows."""
    tree, path, previous = TokenTree(), list[int](), TokenIds()
    for sequence in ordered:
        ids = sequence.ids[prefix_length:]
        shared = count_common_tokens(previous, ids)
        extends = not tree.ids or shared == len(previous)
        fits = shared >= min(MIN_SHARED_TOKENS, len(ids)) and len(tree.ids) + len(ids) - shared <= max_row_tokens
        if not extends and not (sharing and fits):
            yield tree
            tree, path, shared = TokenTree(), [], 0
        path = tree.add_sequence(path[:shared], sequence, prefix_length)
        previous = ids
    if tree.ids:
        yield tree


def pack_trees(trees: Sequence[TokenTree], size: int) -> list[TokenTree]:
    """Pack trees into rows: best fit, longest first. A row of several trees holds at most `size` tokens.

    Packed rows need less padding than a batch of trees with different lengths.
    """
    rows: list[TokenTree] = []
    by_free_tokens: list[list[TokenTree]] = [[] for _ in range(size + 1)]
    for tree in sorted(trees, key=lambda t: (-len(t.ids), t.ids)):
        length = len(tree.ids)
        free = next((tokens for tokens in range(length, size + 1) if by_free_tokens[tokens]), None)
        if free is None:
            row = tree
            rows.append(row)
        else:
            row = by_free_tokens[free].pop()
            row.append_tree(tree)
        if len(row.ids) < size:
            by_free_tokens[size - len(row.ids)].append(row)
    return rows


def make_batches(
    trees: Sequence[TokenTree], tokens: int, *, prefix_length: int = 0, max_states: int | None = None
) -> Iterator[list[TokenTree]]:
    """Yield batches of trees of similar length, longest first, each with at least one tree.

    Args:
        trees: Rows.
        tokens: Maximum tokens per padded batch.
        prefix_length: Length of the prefix, which is stored once per row: a batch may hold 8 × `tokens` keys.
        max_states: Maximum number of nodes per batch that predict a target. Each of them needs a row of logits.
    """
    batch: list[TokenTree] = []
    states = 0
    for tree in sorted(trees, key=lambda t: (-len(t.ids), t.ids)):
        longest, size = len((batch or [tree])[0].ids), len(batch) + 1
        added = len({node for node, _ in tree.targets})
        too_many_tokens = size * longest > tokens or size * (prefix_length + longest) > 8 * tokens
        if batch and (too_many_tokens or (max_states and states + added > max_states)):
            yield batch
            batch, states = [], 0
        batch.append(tree)
        states += added
    if batch:
        yield batch
