"""Token trees contain every requested sequence, and each shared prefix once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.evaluation import prefix_trees
from components.evaluation.prefix_trees import PrefixGroup, TokenTree
from components.evaluation.task_interface import Continuation

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def draw_requests(draw: st.DrawFn) -> list[Continuation]:
    """Draw sequences over three tokens, so that many share prefixes, with or without a long common prefix."""
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        ids = [*draw(st.sampled_from([[], [2] * 90])), *draw(TOKENS)]
        requests.append(
            Continuation(
                ids, [position > 80 or (len(ids) < 80 and draw(st.booleans())) for position in range(len(ids))]
            )
        )
    return prefix_trees.deduplicate(requests)[0]


def trace_path(group: PrefixGroup, tree: TokenTree, node: int) -> list[int]:
    """Return the tokens from the root to a node."""
    reversed_path = []
    while node >= 0:
        reversed_path.append(tree.ids[node])
        node = tree.parents[node]
    return [*group.prefix, *reversed(reversed_path)]


@given(draw_requests(), st.booleans(), st.sampled_from([4, 16, 64]))
def test_tree_targets_equal_requests(requests: list[Continuation], sharing: bool, row: int) -> None:
    targets = {}
    for group in prefix_trees.plan_rows(requests, sharing=sharing, max_row_tokens=row):
        for tree in group.trees:
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert [
                len(trace_path(group, tree, node)) - 1 - len(group.prefix) for node in range(len(tree.ids))
            ] == tree.depths
            for number, target_indices in tree.requests:
                assert number not in targets
                targets[number] = [
                    (trace_path(group, tree, tree.targets[index][0]), tree.targets[index][1])
                    for index in target_indices
                ]
    for number, request in enumerate(requests):
        predicted = [
            (list(request.ids[:index]), request.ids[index])
            for index in range(1, len(request.ids))
            if request.scored[index]
        ]
        assert targets.get(number, []) == predicted


@given(draw_requests(), st.sampled_from([4, 16, 64]))
def test_without_sharing_there_are_no_branches_or_prefixes(requests: list[Continuation], row: int) -> None:
    for group in prefix_trees.plan_rows(requests, sharing=False, max_row_tokens=row):
        assert group.prefix == ()
        assert not any(tree.has_branches for tree in group.trees)


@given(draw_requests())
def test_plan_is_independent_of_request_order(requests: list[Continuation]) -> None:
    assert prefix_trees.deduplicate(requests[::-1])[0] == prefix_trees.deduplicate(requests)[0]


def build_request(ids: list[int], scored_count: int) -> Continuation:
    return Continuation(ids, [position >= len(ids) - scored_count for position in range(len(ids))])


def test_options_share_their_question() -> None:
    question = list(range(20))
    plan = prefix_trees.plan_rows(
        [build_request([*question, 50 + option, 60, 70], 3) for option in range(4)], sharing=True
    )
    assert [len(tree.ids) for group in plan for tree in group.trees] == [20 + 4 * 2]


def test_single_token_options_cost_only_the_question() -> None:
    question = list(range(20))
    (group,) = prefix_trees.plan_rows(
        [build_request([*question, 50 + option], 1) for option in range(4)], sharing=False
    )
    (tree,) = group.trees
    assert tree.ids == question
    assert tree.targets == [(19, 50 + option) for option in range(4)]


def test_long_shared_prefix_is_separate() -> None:
    header = list(range(100))
    plan = prefix_trees.plan_rows(
        [build_request([*header, 200 + item, *range(300, 330)], 5) for item in range(30)], sharing=True
    )
    (group,) = plan
    assert group.prefix == tuple(header[:-1])  # the last header token is in every row: it predicts the next one
    assert sum(len(tree.ids) for tree in group.trees) == 30 * (1 + 30)


def test_prompts_share_short_prefixes_if_many_have_them() -> None:
    long, short = tuple(range(100)), tuple(range(500, 524))
    prompts = [(*long, 200 + item, *range(300, 330)) for item in range(30)]
    prompts += [(*short, 600 + item, 7) for item in range(20)]
    prompts += [(*range(700, 718), 800 + item) for item in range(3)]  # too few to save a pass
    ordered = sorted(prompts)
    groups = prefix_trees.group_prompts(ordered, sharing=True)
    assert sorted((length, len(indices)) for length, indices in groups) == [(0, 3), (23, 20), (99, 30)]
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(ordered)))
    for length, indices in groups:
        assert len({ordered[index][:length] for index in indices}) == 1
        assert all(len(ordered[index]) > length for index in indices)
    assert prefix_trees.group_prompts(ordered, sharing=False) == [(0, list(range(len(ordered))))]
    assert prefix_trees.group_prompts([], sharing=True) == []


def test_prefix_ends_before_first_scored_token() -> None:
    header = list(range(200))
    (group,) = prefix_trees.plan_rows(
        [build_request([*header, 200 + item, *range(300, 330)], 131) for item in range(30)], sharing=True
    )
    assert len(group.prefix) == 99


def test_short_trees_are_packed() -> None:
    requests = [
        build_request([1000 * item + position for position in range(size + 1)], 1)
        for item, size in enumerate((150, 100, 70, 60, 50, 28, 20, 8))
    ]
    (group,) = prefix_trees.plan_rows(requests, sharing=True)
    assert sum(len(tree.ids) for tree in group.trees) == 150 + 100 + 70 + 60 + 50 + 28 + 20 + 8
    assert max(len(tree.ids) for tree in group.trees if len(tree.requests) > 1) <= prefix_trees.PACKED_ROW_TOKENS
    assert len(group.trees) == 4


def test_batches_are_longest_first_and_limited() -> None:
    trees = [
        TokenTree(list(range(size)), list(range(-1, size - 1)), list(range(size)), [(0, 1)])
        for size in (3, 9, 5, 20, 4, 5)
    ]
    batch_lengths = [[len(tree.ids) for tree in batch] for batch in prefix_trees.make_batches(trees, 12)]
    assert batch_lengths == [[20], [9], [5, 5], [4, 3]]
    assert [len(batch) for batch in prefix_trees.make_batches(trees, 120, prefix_length=200)] == [4, 2]
    assert [len(batch) for batch in prefix_trees.make_batches(trees, 10_000, max_states=4)] == [4, 2]
