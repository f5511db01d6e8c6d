"""What becomes of rows that are alike: which stays, which belong together, and where they go."""

import hashlib

import numpy
import pytest
from hypothesis import given, strategies

from components.common.artifacts import Input, Manifest
from components.common.errors import InputError
from components.data_curation import duplicates, splits
from components.data_curation.config import DataCurationConfig, Fractions, TokensConfig
from components.data_curation.duplicates import Likeness
from components.data_curation.rows import numbered
from components.data_curation.stage import Source, planned_earlier


def digests(count):
    return [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]


def likeness(exact, words, pairs=(), similarity=(), joined=(), published=0):
    def arrays(some):
        return numpy.array(some, dtype=numpy.int64).reshape(-1, 2)

    return Likeness(published, numpy.array(exact), numpy.array(words), [arrays(joined)], arrays(pairs), numpy.array(similarity), len(exact))


def assigned(count, clusters, seed=1, fractions=None, **more):
    return splits.assign(digests(count), clusters, fractions or Fractions(), seed, **more)[0]


def test_ids_are_the_sources_own_or_the_contents_and_never_twice_the_same():
    taken = {}
    assert [numbered(name, taken) for name in ("a", "a", "b", "mine", "mine", "mine-2")] == ["a", "a-2", "b", "mine", "mine-2", "mine-2-2"]


def test_rows_go_to_splits_by_content_and_seed_not_by_order():
    names = digests(300)
    there = dict(zip(names, splits.assign(names, range(300), Fractions(), 1)[0], strict=True))
    back = dict(zip(names[::-1], splits.assign(names[::-1], range(300), Fractions(), 1)[0], strict=True))
    assert there == back
    assert set(there.values()) == set(splits.SPLITS)
    assert assigned(300, range(300), seed=2) != list(there.values())


def test_more_rows_move_no_row():
    assert assigned(400, range(400))[:200] == assigned(200, range(200))


def test_a_cluster_lies_in_one_split():
    places = assigned(300, [i // 3 for i in range(300)], fractions=Fractions(train=0.5, validation=0.2, test=0.3))
    assert all(len(set(places[i : i + 3])) == 1 for i in range(0, 300, 3))


def test_a_published_row_never_moves_and_takes_what_is_like_it_along():
    where = assigned(6, [0, 1, 2, 0, 1, 3], published=["test", "train", "validation"])
    assert where[:5] == ["test", "train", "validation", "test", "train"]


def test_a_newcomer_that_is_alike_rows_of_two_splits_is_left_out_and_only_it():
    edges = numpy.array([[0, 2], [1, 2], [0, 3], [3, 4]])
    where, bridges = splits.assign(digests(5), [0] * 5, Fractions(), 1, ["train", "test"], edges)
    assert list(bridges) == [2]
    assert bridges[2].reason == "near_duplicate_across_splits"
    assert bridges[2].detail == "alike rows that lie in test and train"
    assert [where[row] for row in (0, 1, 3, 4)] == ["train", "test", "train", "train"]


@pytest.mark.parametrize("edges", [[(0, 3), (1, 4), (2, 4), (3, 4)], [(0, 4), (1, 3), (2, 3), (3, 4)]], ids=["later", "earlier"])
def test_a_newcomer_with_a_published_answer_does_not_go_where_only_a_similar_answer_lies(edges):
    # 3 and 4 stand for two answers that are alike: one of the row in test, the other of the row in train and of the newcomer
    where, bridges = splits.assign(digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array(edges))
    assert where[:2] == ["test", "train"]
    assert bridges[2].reason == "near_duplicate_across_splits"


@pytest.mark.parametrize("edges", [[(0, 3), (1, 3), (2, 3)], [(0, 3), (1, 4), (3, 4), (2, 3), (0, 4)]], ids=["equal", "alike"])
def test_a_newcomer_with_an_answer_that_published_rows_of_two_splits_have_joins_neither(edges):
    where, bridges = splits.assign(digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array(edges))
    assert where[:2] == ["test", "train"]
    assert bridges[2].detail == "alike rows that lie in test and train"


def test_a_newcomer_of_a_group_that_lies_in_two_splits_goes_with_the_first():
    where, bridges = splits.assign(digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array([(0, 3), (1, 3), (2, 3)]), 3)
    assert (where, bridges) == (["test", "train", "test"], {})


def test_an_answer_of_rows_that_were_left_out_keeps_no_other_out():
    # 0 and 1 are published in two splits; 2 bridges them and has the answer 4; 3 has the answer 5, which is like 4, and is alike 1
    edges = numpy.array([(0, 2), (1, 2), (2, 4), (4, 5), (3, 5), (1, 3), (0, 6), (6, 4)])
    where, bridges = splits.assign(digests(4), [0] * 4, Fractions(), 1, ["test", "train"], edges)
    assert set(bridges) == {2}
    assert where[3] == "train"


def test_newcomers_that_only_together_bridge_two_splits_lose_the_later_one():
    edges = numpy.array([[0, 2], [2, 3], [1, 3]])
    where, bridges = splits.assign(digests(4), [0] * 4, Fractions(), 1, ["train", "test"], edges)
    assert list(bridges) == [3]
    assert where[2] == "train"


def test_a_published_row_that_comes_again_stays_where_it_is_however_many_it_joins():
    names = digests(2)
    edges = numpy.array([[0, 2], [1, 2]])
    where, bridges = splits.assign([*names, names[1]], [0, 0, 0], Fractions(), 1, ["train", "test"], edges)
    assert bridges == {}
    assert where == ["train", "test", "test"]


def test_rows_that_have_something_in_common_with_one_that_is_left_out_stay_together():
    # Row 2 is alike published rows of two splits and the first of a group; rows 3 to 12 are the others of the group (13).
    edges = numpy.array([[0, 2], [1, 2], *([row, 13] for row in range(2, 13))])
    where, bridges = splits.assign(digests(13), [0] * 13, Fractions(), 42, ["train", "test"], edges)
    assert list(bridges) == [2]
    assert len(set(where[3:])) == 1


@given(strategies.data())
def test_what_is_alike_lies_in_one_split_whatever_is_left_out(data):
    rows, published = data.draw(strategies.integers(4, 16)), data.draw(strategies.integers(2, 3))
    few = strategies.integers(0, 3)
    common = {name: data.draw(strategies.lists(strategies.none() | few, min_size=rows, max_size=rows)) for name in ("answer", "group")}
    some = strategies.tuples(*[strategies.integers(0, rows - 1)] * 2).filter(lambda pair: pair[0] < pair[1])
    words, answers = (data.draw(strategies.lists(some, unique=True, max_size=8)) for _ in range(2))
    answers = [(a, b) for a, b in answers if None not in (common["answer"][a], common["answer"][b])]
    where, bridges = placed(rows, published, common, words, answers)
    stay = [row for row in range(rows) if row not in bridges]
    new = [row for row in stay if row >= published]
    assert where[:2] == ["train", "test"]
    assert all(where[a] == where[b] for a, b in words if {a, b} <= set(stay) and b in new)
    for name, values in common.items():
        mixed = {values[row] for row in range(published)}
        for value in {value for value in values if value is not None} - mixed:
            assert len({where[row] for row in new if values[row] == value}) <= 1, name


def placed(rows, published, common, words, answers):
    """What becomes of rows that are all different, have values in common, and are similar in pairs."""
    own = numpy.arange(rows, dtype=numpy.uint64)
    hashes = {name: (numpy.stack([own, own], axis=1), numpy.ones(rows, dtype=bool)) for name in ("exact", "words")}
    for name, values in {**common, "prompt": [None] * rows}.items():
        numbers = numpy.array([0 if value is None else value for value in values], dtype=numpy.uint64)
        hashes[name] = numpy.stack([numbers, numbers], axis=1), numpy.array([value is not None for value in values])

    def pairs(some):
        return numpy.array(some, dtype=numpy.int64).reshape(-1, 2), numpy.full(len(some), 0.9)

    edges = duplicates.likeness(hashes, published, {"words": pairs(words), "answer": pairs(answers)}).edges()
    clusters = duplicates.clusters(rows, edges).tolist()
    return splits.assign(digests(rows), clusters, Fractions(), 1, ["train", "test", "train"][:published], edges)


def test_an_empty_test_split_says_how_many_rows_are_needed():
    with pytest.raises(InputError, match="too few rows for the split: 12 rows in 9 groups") as error:
        splits.check_filled({"train": 12, "validation": 0, "test": 0}, 9, Fractions())
    assert "about 90 different rows" in error.value.hint


def test_the_words_of_scripts_without_spaces_are_their_characters():
    assert duplicates.words("Hello, World_2! 東京です") == "hello world_2 東 京 で す"
    assert duplicates.words("?? !!") == "?? !!"


def test_a_repeat_of_a_dropped_row_is_dropped_for_the_row_that_stays():
    gone = duplicates.drops("abcd", likeness([0, 1, 1, 3], [0, 1, 1, 1], [(0, 1)], [0.8]))
    assert {place: why.reason for place, why in gone.items()} == {1: "near_duplicate", 2: "exact_duplicate", 3: "near_duplicate"}
    assert gone[2].detail == "equal to b, which a stands for"
    assert gone[3].detail == "similarity 0.800 to a"


def test_a_row_is_kept_when_only_a_dropped_row_is_like_it():
    found = likeness([0, 1, 2], [0, 1, 2], [(0, 1), (1, 2)], [0.7, 0.7])
    assert set(duplicates.drops("abc", found)) == {1}
    assert len(set(duplicates.clusters(3, found.edges()))) == 1


def test_rows_joined_by_answers_or_groups_lie_in_one_cluster_and_all_are_kept():
    found = likeness([0, 1, 2], [0, 1, 2], joined=[(0, 2)])
    assert duplicates.clusters(3, found.edges()).tolist() == [0, 1, 0]
    assert duplicates.drops("abc", found) == {}


def test_published_rows_are_no_reason_to_drop_unless_asked_for():
    found = likeness([0, 1, 0, 3, 0], [0, 1, 0, 3, 0], [(1, 3)], [0.9], published=2)
    assert {row: why.detail for row, why in duplicates.drops("pqabc", found).items()} == {4: "equal to a"}
    against = duplicates.drops("pqabc", found, against=["v1", "v2"])
    assert {row: why.detail for row, why in against.items()} == {
        2: "equal to p of v1",
        3: "similarity 0.900 to q of v2",
        4: "equal to p of v1",
    }


def test_rows_alike_through_one_published_row_are_compared_with_each_other():
    # Rows 1 and 3 are new; row 1 has the words of the published row 0, and row 3 is similar to those.
    found = likeness([0, 0, 2, 3], [0, 0, 2, 3], [(0, 3)], [0.8], published=1)
    assert {row: why.detail for row, why in duplicates.drops("pabc", found).items()} == {3: "similarity 0.800 to a"}


def published(label, source, settings, seed=1, earlier=()):
    inputs = [Input(kind="raw", content_sha256=source.sha256, uri=source.name), *earlier]
    config = settings.model_dump(mode="json")
    manifest = Manifest.model_construct(content_sha256=f"dataset of {label}", inputs=inputs, config=config, seed=seed)
    return label, manifest


def test_a_revision_is_not_its_own_predecessor():
    settings = DataCurationConfig()
    old, new = (Source(uri=f"/data/{name}.jsonl", sha256=name * 8, bytes=1) for name in "ab")
    v1, alone = published("v1", old, settings), published("v2", new, settings)
    v2 = published("v2", new, settings, earlier=[Input(kind="earlier", content_sha256="dataset of v1", uri="v1")])
    assert planned_earlier([old], [], [], settings, 1) == []
    assert planned_earlier([old], [], [v1], settings, 1) == []
    assert planned_earlier([new], [], [v1], settings, 1) == [("v1", "dataset of v1")]
    assert planned_earlier([new], [], [v1, v2], settings, 1) == [("v1", "dataset of v1")]
    assert planned_earlier([old], [], [v1, v2], settings, 1) == []
    assert planned_earlier([new], [], [v1, alone], settings, 1) == [], "it was curated before v1 was published"


def test_a_revision_whose_predecessor_was_deleted_keeps_its_rows_where_they_are():
    settings = DataCurationConfig()
    old, new = (Source(uri=f"/data/{name}.jsonl", sha256=name * 8, bytes=1) for name in "ab")
    before = [Input(kind="earlier", content_sha256="dataset of v1", uri="v1")]
    v1, v2 = published("v1", old, settings), published("v2", new, settings, earlier=before)
    assert planned_earlier([new], [], [v1, v2], settings, 1) == [("v1", "dataset of v1")]
    assert planned_earlier([new], [], [v2], settings, 1) == [("v2", "dataset of v2")], "v1 was deleted, as after an erasure"


def test_where_work_is_done_and_what_is_only_told_makes_no_other_curation():
    source, settings = Source(uri="/data/a.jsonl", sha256="a" * 64, bytes=1), DataCurationConfig(published="drop")
    before = [published("v1", source, settings)]
    same = settings.model_copy(update={"workers": 3, "sources": ["elsewhere"], "tokens": TokensConfig(max_length=512)})
    assert planned_earlier([source], [], before, same, 1) == []
    other = settings.model_copy(update={"answer_min_words": 5})
    assert planned_earlier([source], [], before, other, 1) == [("v1", "dataset of v1")]


def test_a_row_that_is_left_out_for_bridging_stands_for_no_other():
    found = likeness([0, 1, 2, 3], [0, 1, 2, 3], [(2, 3)], [0.8], published=2)
    assert duplicates.drops("pqkd", found, left_out={2}) == {}
    assert set(duplicates.drops("pqkd", found)) == {3}
