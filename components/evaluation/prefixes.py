"""Which tokens have to be computed: what sequences have in common at their beginning is computed once, as the trunk of a tree.

A tree is one row of a batch. Its nodes are tokens, and a node sees its ancestors and nothing else, so that branches that lie side by
side in a row know nothing of each other. The options of a question are branches behind the question; a sequence alone is a tree without
branches. Short trees that share nothing stand side by side in a row too. A beginning that more sequences share than one row holds is a
header: it is computed apart, and its keys and values stand before every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from components.evaluation.task import Continuation

Tokens = tuple[int, ...]

ROW = 256  # tokens up to which trees grow; a longer sequence is a row of its own
FILLED = 128  # tokens up to which short trees that share nothing are put into one row, so that no place of it is padding
SHARED = 4  # tokens in common from which two sequences are put into one row: the longer row costs attention
HEADER = 64  # tokens in common from which a beginning may be a header
SPARED = 256  # tokens that a header spares at least: it is a pass of its own, and parts its rows from the others


@dataclass
class Tree:
    """One row: the token of each node and the node before it (-1: none, or the header), so that parents come before children.

    `wanted` are the (node, token) pairs whose likelihood is asked: how likely is this token behind that node. `requests` has, for each
    sequence that ends here, its number and the places in `wanted` that it sums up.
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    wanted: list[tuple[int, int]] = field(default_factory=list)
    requests: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def branches(self) -> bool:
        """Whether any node has another before it than the one to its left."""
        return any(parent != node - 1 for node, parent in enumerate(self.parents))


@dataclass(frozen=True)
class Group:
    """Rows behind one header, which may be empty."""

    header: Tokens
    trees: list[Tree]


@dataclass(frozen=True)
class _Sequence:
    """What is computed of a request: its tokens up to the last that predicts one, and where in them (place, token) are predicted."""

    ids: Tokens
    predicted: tuple[tuple[int, int], ...]
    number: int


def unique(asked: Sequence[Continuation]) -> tuple[list[Continuation], list[int]]:
    """The different ones of the requests in an order that does not depend on theirs, and of each request which of these it is."""
    keys = [(tuple(one.ids), tuple(map(bool, one.counted))) for one in asked]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return [Continuation(ids, counted) for ids, counted in places], [places[key] for key in keys]


def plan(asked: Sequence[Continuation], *, sharing: bool, row: int = ROW) -> list[Group]:
    """Rows that hold everything asked; requests without a counted token are in none. `sharing` False: no branches and no headers.

    Requests are told by their place in `asked`, which must not hold the same one twice.
    """
    sequences = sorted(filter(None, map(_sequence, range(len(asked)), asked)), key=lambda s: (s.ids, s.predicted))
    groups: list[Group] = []
    loose: list[_Sequence] = []

    def rows(members: Sequence[_Sequence], header: int) -> list[Tree]:
        trees = list(_trees(members, header, row, sharing))
        return filled(trees, min(row, FILLED)) if sharing else trees

    for header, family in _families(sequences, row) if sharing else [(0, list(range(len(sequences))))]:
        members = [sequences[place] for place in family]
        if header:
            groups.append(Group(members[0].ids[:header], rows(members, header)))
        else:
            loose += members
    return [Group((), rows(loose, 0)), *groups] if loose else groups


def _sequence(number: int, asked: Continuation) -> _Sequence | None:
    places = [place for place, counts in enumerate(asked.counted) if counts and place]
    if not places:
        return None
    return _Sequence(tuple(asked.ids[: places[-1]]), tuple((place - 1, int(asked.ids[place])) for place in places), number)


def _families(sequences: Sequence[_Sequence], row: int) -> Iterator[tuple[int, list[int]]]:
    return families([s.ids for s in sequences], [s.predicted[0][0] for s in sequences], row)


def families(ordered: Sequence[Tokens], first: Sequence[int], row: int = ROW) -> Iterator[tuple[int, list[int]]]:
    """The places of sorted sequences, parted where a long common beginning ends, each part with the length of its header or 0.

    `first` is each sequence's first place that predicts something: it is behind the header, and so is the last token in common, from which
    what comes behind is predicted. A part has a header where that spares enough.
    """
    for family in _runs(ordered):
        header = min(common(ordered[family[0]], ordered[family[-1]]) - 1, *(first[place] for place in family))
        size = sum(len(ordered[b]) - common(ordered[a], ordered[b]) for a, b in pairwise(family))
        spared = header * (size // row)
        yield (header if len(family) > 1 and header + 1 >= HEADER and spared >= SPARED else 0), family


def _runs(ordered: Sequence[Tokens]) -> Iterator[list[int]]:
    run: list[int] = []
    for place, ids in enumerate(ordered):
        if run and common(ordered[run[-1]], ids) < HEADER:
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place in range(least) if one[place] != other[place])


def _trees(ordered: Iterable[_Sequence], header: int, row: int, sharing: bool) -> Iterator[Tree]:
    """Trees of sorted sequences without their header, each as large as a row allows."""
    tree, path, before = Tree(), list[int](), Tokens()
    for sequence in ordered:
        ids = sequence.ids[header:]
        shared = common(before, ids)
        if not _fits(tree, len(before), shared, len(ids), row, sharing):
            yield tree
            tree, path, shared = Tree(), [], 0
        path = _grow(tree, path[:shared], ids)
        _want(tree, path, sequence, header)
        before = ids
    if tree.ids:
        yield tree


def _fits(tree: Tree, before: int, shared: int, length: int, row: int, sharing: bool) -> bool:
    """Whether a sequence of this length goes into the tree: it is the one before it carried on, or shares enough and leaves it small."""
    if not tree.ids or shared == before:
        return True
    return sharing and shared >= min(SHARED, length) and len(tree.ids) + length - shared <= row


def _grow(tree: Tree, path: list[int], ids: Tokens) -> list[int]:
    """Put the tokens behind the path into the tree; the nodes of the whole path."""
    for depth in range(len(path), len(ids)):
        tree.parents.append(path[-1] if path else -1)
        tree.ids.append(ids[depth])
        tree.depths.append(depth)
        path.append(len(tree.ids) - 1)
    return path


def _want(tree: Tree, path: list[int], sequence: _Sequence, header: int) -> None:
    """Note what the sequence asks; a pair that another asked too is asked once."""
    known = {pair: place for place, pair in enumerate(tree.wanted)}
    places = []
    for place, token in sequence.predicted:
        pair = (path[place - header], token)
        if pair not in known:
            known[pair] = len(tree.wanted)
            tree.wanted.append(pair)
        places.append(known[pair])
    tree.requests.append((sequence.number, places))


def filled(trees: Sequence[Tree], size: int) -> list[Tree]:
    """Rows of one or several trees, of which those of several hold at most so many tokens: best fit, the longest first.

    Trees of one row do not see each other. Rows that are filled need less padding than a batch of trees of many lengths.
    """
    made: list[Tree] = []
    free: list[list[Tree]] = [[] for _ in range(size + 1)]  # rows by the tokens that still fit
    for tree in sorted(trees, key=lambda t: (-len(t.ids), t.ids)):
        length = len(tree.ids)
        room = next((tokens for tokens in range(length, size + 1) if free[tokens]), None)
        row = tree if room is None else free[room].pop()
        if room is None:
            made.append(tree)
        else:
            _beside(row, tree)
        if len(row.ids) < size:
            free[size - len(row.ids)].append(row)
    return made


def _beside(row: Tree, tree: Tree) -> None:
    """Put a tree into a row."""
    nodes, places = len(row.ids), len(row.wanted)
    row.ids += tree.ids
    row.depths += tree.depths
    row.parents += [parent + nodes if parent >= 0 else -1 for parent in tree.parents]
    row.wanted += [(node + nodes, token) for node, token in tree.wanted]
    row.requests += [(number, [place + places for place in asked]) for number, asked in tree.requests]


def batches(trees: Sequence[Tree], tokens: int, *, header: int = 0, states: int | None = None) -> Iterator[list[Tree]]:
    """Trees of like length, longest first, so many that the padded batch holds at most so many tokens (at least one tree).

    A header is held once for every row: with it the batch may hold eight times as many keys. `states` bounds the nodes of a batch that
    predict something, each of which costs a row of logits.
    """
    batch: list[Tree] = []
    predicting = 0
    for tree in sorted(trees, key=lambda t: (-len(t.ids), t.ids)):
        longest, size = len((batch or [tree])[0].ids), len(batch) + 1
        predicting += (more := len({node for node, _ in tree.wanted}))
        if batch and (size * longest > tokens or size * (header + longest) > 8 * tokens or (states and predicting > states)):
            yield batch
            batch, predicting = [], more
        batch.append(tree)
    if batch:
        yield batch
