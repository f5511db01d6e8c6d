"""Trees hold every sequence asked, each beginning once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.evaluation import prefixes
from components.evaluation.prefixes import Group, Tree
from components.evaluation.task import Continuation

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> list[Continuation]:
    """Sequences over three tokens, so that many begin alike, behind a long beginning or none."""
    made = []
    for _ in range(draw(st.integers(1, 12))):
        ids = [*draw(st.sampled_from([[], [2] * 90])), *draw(TOKENS)]
        made.append(Continuation(ids, [place > 80 or (len(ids) < 80 and draw(st.booleans())) for place in range(len(ids))]))
    return prefixes.unique(made)[0]


def path(group: Group, tree: Tree, node: int) -> list[int]:
    """The tokens from the beginning to a node."""
    back = []
    while node >= 0:
        back.append(tree.ids[node])
        node = tree.parents[node]
    return [*group.header, *reversed(back)]


@given(requests(), st.booleans(), st.sampled_from([4, 16, 64]))
def test_what_is_asked_of_a_tree_is_what_was_asked(asked: list[Continuation], sharing: bool, row: int) -> None:
    found = {}
    for group in prefixes.plan(asked, sharing=sharing, row=row):
        for tree in group.trees:
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert [len(path(group, tree, node)) - 1 - len(group.header) for node in range(len(tree.ids))] == tree.depths
            for number, places in tree.requests:
                assert number not in found
                found[number] = [(path(group, tree, tree.wanted[place][0]), tree.wanted[place][1]) for place in places]
    for number, one in enumerate(asked):
        predicted = [(list(one.ids[:place]), one.ids[place]) for place in range(1, len(one.ids)) if one.counted[place]]
        assert found.get(number, []) == predicted


@given(requests(), st.sampled_from([4, 16, 64]))
def test_without_sharing_no_tree_branches_and_none_has_a_header(asked: list[Continuation], row: int) -> None:
    for group in prefixes.plan(asked, sharing=False, row=row):
        assert group.header == ()
        assert not any(tree.branches for tree in group.trees)


@given(requests())
def test_the_plan_does_not_depend_on_the_order_of_the_requests(asked: list[Continuation]) -> None:
    assert prefixes.unique(asked[::-1])[0] == prefixes.unique(asked)[0]


def counted(ids: list[int], last: int) -> Continuation:
    return Continuation(ids, [place >= len(ids) - last for place in range(len(ids))])


def test_options_of_a_question_cost_the_question_once_and_of_each_all_but_its_last_token() -> None:
    question = list(range(20))
    plan = prefixes.plan([counted([*question, 50 + option, 60, 70], 3) for option in range(4)], sharing=True)
    assert [len(tree.ids) for group in plan for tree in group.trees] == [20 + 4 * 2]


def test_options_of_one_token_cost_the_question_alone() -> None:
    question = list(range(20))
    (group,) = prefixes.plan([counted([*question, 50 + option], 1) for option in range(4)], sharing=False)
    (tree,) = group.trees
    assert tree.ids == question
    assert tree.wanted == [(19, 50 + option) for option in range(4)]


def test_a_beginning_that_many_rows_share_is_computed_apart() -> None:
    header = list(range(100))
    plan = prefixes.plan([counted([*header, 200 + item, *range(300, 330)], 5) for item in range(30)], sharing=True)
    (group,) = plan
    assert group.header == tuple(header[:-1])  # the last is in every row: it predicts what follows
    assert sum(len(tree.ids) for tree in group.trees) == 30 * (1 + 30)


def test_a_header_ends_before_the_first_token_that_is_counted() -> None:
    header = list(range(200))
    (group,) = prefixes.plan([counted([*header, 200 + item, *range(300, 330)], 131) for item in range(30)], sharing=True)
    assert len(group.header) == 99


def test_short_trees_fill_rows_and_long_ones_have_one_alone() -> None:
    asked = [counted([1000 * item + place for place in range(size + 1)], 1) for item, size in enumerate((150, 100, 70, 60, 50, 28, 20, 8))]
    (group,) = prefixes.plan(asked, sharing=True)
    assert sum(len(tree.ids) for tree in group.trees) == 150 + 100 + 70 + 60 + 50 + 28 + 20 + 8
    assert max(len(tree.ids) for tree in group.trees if len(tree.requests) > 1) <= prefixes.FILLED
    assert len(group.trees) == 4


def test_batches_hold_the_longest_first_and_no_more_than_they_may() -> None:
    trees = [Tree(list(range(size)), list(range(-1, size - 1)), list(range(size)), [(0, 1)]) for size in (3, 9, 5, 20, 4, 5)]
    made = [[len(tree.ids) for tree in batch] for batch in prefixes.batches(trees, 12)]
    assert made == [[20], [9], [5, 5], [4, 3]]
    assert [len(batch) for batch in prefixes.batches(trees, 120, header=200)] == [4, 2]
    assert [len(batch) for batch in prefixes.batches(trees, 10_000, states=4)] == [4, 2]
