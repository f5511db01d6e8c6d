"""Similar rows: duplicate rejection, clusters and split assignment."""

import hashlib

import numpy
import pytest
from hypothesis import given, strategies

from components.common.artifacts.artifact_folder import ArtifactInput, Manifest
from components.common.runtime.errors import InputError
from components.data_curation import normalized_words
from components.data_curation.comparison import duplicates, split_assignment
from components.data_curation.comparison.duplicates import DuplicateGraph
from components.data_curation.config import DataCurationConfig, Fractions, TokensConfig
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.rows import make_unique_id
from components.data_curation.stage import Source, plan_earlier_revisions


def digests(count):
    return [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]


def build_graph(exact, words, pairs=(), similarity=(), joined=(), published=0):
    def arrays(values):
        return numpy.array(values, dtype=numpy.int64).reshape(-1, 2)

    return DuplicateGraph(
        published,
        numpy.array(exact),
        numpy.array(words),
        [arrays(joined)],
        arrays(pairs),
        numpy.array(similarity),
        len(exact),
    )


def assign(count, clusters, seed=1, fractions=None, **options):
    return split_assignment.assign_splits(digests(count), clusters, fractions or Fractions(), seed, **options)[0]


def test_repeated_ids_get_a_unique_suffix():
    used_ids = {}
    assert [make_unique_id(name, used_ids) for name in ("a", "a", "b", "mine", "mine", "mine-2")] == [
        "a",
        "a-2",
        "b",
        "mine",
        "mine-2",
        "mine-2-2",
    ]


def test_split_depends_on_content_and_seed_and_not_on_order():
    names = digests(300)
    forward = dict(zip(names, split_assignment.assign_splits(names, range(300), Fractions(), 1)[0], strict=True))
    backward = dict(
        zip(names[::-1], split_assignment.assign_splits(names[::-1], range(300), Fractions(), 1)[0], strict=True)
    )
    assert forward == backward
    assert set(forward.values()) == set(split_assignment.SPLITS)
    assert assign(300, range(300), seed=2) != list(forward.values())


def test_added_rows_do_not_move_others():
    assert assign(400, range(400))[:200] == assign(200, range(200))


def test_cluster_is_in_one_split():
    splits = assign(300, [i // 3 for i in range(300)], fractions=Fractions(train=0.5, validation=0.2, test=0.3))
    assert all(len(set(splits[i : i + 3])) == 1 for i in range(0, 300, 3))


def test_published_row_keeps_its_split_and_attracts_similar_rows():
    splits = assign(6, [0, 1, 2, 0, 1, 3], published=["test", "train", "validation"])
    assert splits[:5] == ["test", "train", "validation", "test", "train"]


def test_only_the_new_row_that_bridges_two_splits_is_rejected():
    edges = numpy.array([[0, 2], [1, 2], [0, 3], [3, 4]])
    splits, bridges = split_assignment.assign_splits(digests(5), [0] * 5, Fractions(), 1, ["train", "test"], edges)
    assert list(bridges) == [2]
    assert bridges[2].reason == "near_duplicate_across_splits"
    assert bridges[2].detail == "similar to rows in test and train"
    assert [splits[row] for row in (0, 1, 3, 4)] == ["train", "test", "train", "train"]


@pytest.mark.parametrize(
    "edges", [[(0, 3), (1, 4), (2, 4), (3, 4)], [(0, 4), (1, 3), (2, 3), (3, 4)]], ids=["later", "earlier"]
)
def test_new_row_between_an_equal_and_a_similar_answer_is_rejected(edges):
    # 3 and 4 are two similar answers: one of the row in test, the other of the row in train and of the new row
    splits, bridges = split_assignment.assign_splits(
        digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array(edges)
    )
    assert splits[:2] == ["test", "train"]
    assert bridges[2].reason == "near_duplicate_across_splits"


@pytest.mark.parametrize(
    "edges", [[(0, 3), (1, 3), (2, 3)], [(0, 3), (1, 4), (3, 4), (2, 3), (0, 4)]], ids=["equal", "alike"]
)
def test_new_row_with_an_answer_published_in_two_splits_is_rejected(edges):
    splits, bridges = split_assignment.assign_splits(
        digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array(edges)
    )
    assert splits[:2] == ["test", "train"]
    assert bridges[2].detail == "similar to rows in test and train"


def test_new_row_of_a_group_in_two_splits_joins_the_first():
    splits, bridges = split_assignment.assign_splits(
        digests(3), [0] * 3, Fractions(), 1, ["test", "train"], numpy.array([(0, 3), (1, 3), (2, 3)]), 3
    )
    assert (splits, bridges) == (["test", "train", "test"], {})


def test_answer_of_rejected_rows_does_not_reject_others():
    # 0 and 1 are published in two splits; 2 bridges them and has the answer 4; 3 is similar to 1 and has the answer 5, similar to 4
    edges = numpy.array([(0, 2), (1, 2), (2, 4), (4, 5), (3, 5), (1, 3), (0, 6), (6, 4)])
    splits, bridges = split_assignment.assign_splits(digests(4), [0] * 4, Fractions(), 1, ["test", "train"], edges)
    assert set(bridges) == {2}
    assert splits[3] == "train"


def test_later_of_two_new_rows_that_jointly_bridge_splits_is_rejected():
    edges = numpy.array([[0, 2], [2, 3], [1, 3]])
    splits, bridges = split_assignment.assign_splits(digests(4), [0] * 4, Fractions(), 1, ["train", "test"], edges)
    assert list(bridges) == [3]
    assert splits[2] == "train"


def test_repeated_published_row_keeps_its_split():
    names = digests(2)
    edges = numpy.array([[0, 2], [1, 2]])
    splits, bridges = split_assignment.assign_splits(
        [*names, names[1]], [0, 0, 0], Fractions(), 1, ["train", "test"], edges
    )
    assert bridges == {}
    assert splits == ["train", "test", "test"]


def test_group_of_a_rejected_row_stays_together():
    # Row 2 is similar to published rows of two splits and the first of a group; rows 3 to 12 are the others of the group (13).
    edges = numpy.array([[0, 2], [1, 2], *([row, 13] for row in range(2, 13))])
    splits, bridges = split_assignment.assign_splits(digests(13), [0] * 13, Fractions(), 42, ["train", "test"], edges)
    assert list(bridges) == [2]
    assert len(set(splits[3:])) == 1


@given(strategies.data())
def test_similar_rows_are_in_one_split_after_any_rejections(data):
    rows, published = data.draw(strategies.integers(4, 16)), data.draw(strategies.integers(2, 3))
    small_numbers = strategies.integers(0, 3)
    shared_values = {
        name: data.draw(strategies.lists(strategies.none() | small_numbers, min_size=rows, max_size=rows))
        for name in ("answer", "group")
    }
    row_pairs = strategies.tuples(*[strategies.integers(0, rows - 1)] * 2).filter(lambda pair: pair[0] < pair[1])
    word_pairs, answer_pairs = (data.draw(strategies.lists(row_pairs, unique=True, max_size=8)) for _ in range(2))
    answer_pairs = [
        (a, b) for a, b in answer_pairs if None not in (shared_values["answer"][a], shared_values["answer"][b])
    ]
    splits, bridges = assign_similar_rows(rows, published, shared_values, word_pairs, answer_pairs)
    kept = [row for row in range(rows) if row not in bridges]
    new = [row for row in kept if row >= published]
    assert splits[:2] == ["train", "test"]
    assert all(splits[a] == splits[b] for a, b in word_pairs if {a, b} <= set(kept) and b in new)
    for name, values in shared_values.items():
        published_values = {values[row] for row in range(published)}
        for value in {value for value in values if value is not None} - published_values:
            assert len({splits[row] for row in new if values[row] == value}) <= 1, name


def assign_similar_rows(rows, published, shared_values, word_pairs, answer_pairs):
    """Assign splits to distinct rows that share values and are similar in pairs."""
    row_numbers = numpy.arange(rows, dtype=numpy.uint64)
    hashes = {
        name: (numpy.stack([row_numbers, row_numbers], axis=1), numpy.ones(rows, dtype=bool))
        for name in ("exact", "words")
    }
    for name, values in {**shared_values, "prompt": [None] * rows}.items():
        numbers = numpy.array([0 if value is None else value for value in values], dtype=numpy.uint64)
        hashes[name] = numpy.stack([numbers, numbers], axis=1), numpy.array([value is not None for value in values])

    def pairs(row_pairs):
        return numpy.array(row_pairs, dtype=numpy.int64).reshape(-1, 2), numpy.full(len(row_pairs), 0.9)

    edges = duplicates.build_graph(
        hashes, published, {"words": pairs(word_pairs), "answer": pairs(answer_pairs)}
    ).collect_edges()
    clusters = duplicates.find_clusters(rows, edges).tolist()
    return split_assignment.assign_splits(
        digests(rows), clusters, Fractions(), 1, ["train", "test", "train"][:published], edges
    )


def test_empty_test_split_error_states_the_rows_needed():
    with pytest.raises(InputError, match="too few rows for the split: with 12 rows in 9 groups") as error:
        split_assignment.check_not_empty({"train": 12, "validation": 0, "test": 0}, 9, Fractions())
    assert "about 90 different rows" in error.value.hint


def test_words_of_scripts_without_spaces_are_their_characters():
    assert normalized_words.normalize_words("Hello, World_2! 東京です") == "hello world_2 東 京 で す"
    assert normalized_words.normalize_words("?? !!") == "?? !!"


def test_copy_of_a_rejected_row_refers_to_the_kept_row():
    rejections = duplicates.find_duplicates("abcd", build_graph([0, 1, 1, 3], [0, 1, 1, 1], [(0, 1)], [0.8]))
    assert {place: rejection.reason for place, rejection in rejections.items()} == {
        1: "near_duplicate",
        2: "exact_duplicate",
        3: "near_duplicate",
    }
    assert rejections[2].detail == "equal to b, a near-duplicate of a"
    assert rejections[3].detail == "similarity 0.800 to a"


def test_row_similar_only_to_a_rejected_row_is_kept():
    graph = build_graph([0, 1, 2], [0, 1, 2], [(0, 1), (1, 2)], [0.7, 0.7])
    assert set(duplicates.find_duplicates("abc", graph)) == {1}
    assert len(set(duplicates.find_clusters(3, graph.collect_edges()))) == 1


def test_rows_joined_by_answers_or_groups_are_one_cluster_and_all_kept():
    graph = build_graph([0, 1, 2], [0, 1, 2], joined=[(0, 2)])
    assert duplicates.find_clusters(3, graph.collect_edges()).tolist() == [0, 1, 0]
    assert duplicates.find_duplicates("abc", graph) == {}


def test_published_rows_reject_copies_only_with_revision_labels():
    graph = build_graph([0, 1, 0, 3, 0], [0, 1, 0, 3, 0], [(1, 3)], [0.9], published=2)
    assert {row: rejection.detail for row, rejection in duplicates.find_duplicates("pqabc", graph).items()} == {
        4: "equal to a"
    }
    rejections = duplicates.find_duplicates("pqabc", graph, revision_labels=["v1", "v2"])
    assert {row: rejection.detail for row, rejection in rejections.items()} == {
        2: "equal to p of v1",
        3: "similarity 0.900 to q of v2",
        4: "equal to p of v1",
    }


def test_rows_similar_through_a_published_row_are_compared():
    # Rows 1 and 3 are new; row 1 has the words of the published row 0, and row 3 is similar to those.
    graph = build_graph([0, 0, 2, 3], [0, 0, 2, 3], [(0, 3)], [0.8], published=1)
    assert {row: rejection.detail for row, rejection in duplicates.find_duplicates("pabc", graph).items()} == {
        3: "similarity 0.800 to a"
    }


def build_revision(label, source, settings, seed=1, earlier=()):
    inputs = [ArtifactInput(kind="raw", content_sha256=source.sha256, uri=source.name), *earlier]
    config = settings.model_dump(mode="json")
    manifest = Manifest.model_construct(content_sha256=f"dataset of {label}", inputs=inputs, config=config, seed=seed)
    return label, manifest


def test_revision_is_not_its_own_predecessor():
    settings = DataCurationConfig()
    old, new = (Source(uri=f"/data/{name}.jsonl", sha256=name * 8, bytes=1) for name in "ab")
    v1, unrelated = build_revision("v1", old, settings), build_revision("v2", new, settings)
    v2 = build_revision(
        "v2", new, settings, earlier=[ArtifactInput(kind="earlier", content_sha256="dataset of v1", uri="v1")]
    )
    assert plan_earlier_revisions([old], [], [], settings, 1) == []
    assert plan_earlier_revisions([old], [], [v1], settings, 1) == []
    assert plan_earlier_revisions([new], [], [v1], settings, 1) == [("v1", "dataset of v1")]
    assert plan_earlier_revisions([new], [], [v1, v2], settings, 1) == [("v1", "dataset of v1")]
    assert plan_earlier_revisions([old], [], [v1, v2], settings, 1) == []
    assert plan_earlier_revisions([new], [], [v1, unrelated], settings, 1) == [], (
        "it was curated before v1 was published"
    )


def test_revision_with_a_deleted_predecessor_is_an_earlier_revision():
    settings = DataCurationConfig()
    old, new = (Source(uri=f"/data/{name}.jsonl", sha256=name * 8, bytes=1) for name in "ab")
    earlier = [ArtifactInput(kind="earlier", content_sha256="dataset of v1", uri="v1")]
    v1, v2 = build_revision("v1", old, settings), build_revision("v2", new, settings, earlier=earlier)
    assert plan_earlier_revisions([new], [], [v1, v2], settings, 1) == [("v1", "dataset of v1")]
    assert plan_earlier_revisions([new], [], [v2], settings, 1) == [("v2", "dataset of v2")], (
        "v1 was deleted, as after an erasure"
    )


def test_workers_source_paths_and_token_settings_keep_the_curation():
    source, settings = Source(uri="/data/a.jsonl", sha256="a" * 64, bytes=1), DataCurationConfig(published="drop")
    revisions = [build_revision("v1", source, settings)]
    same = settings.model_copy(
        update={"workers": 3, "sources": [SourceEntry(path="elsewhere")], "tokens": TokensConfig(max_length=512)}
    )
    assert plan_earlier_revisions([source], [], revisions, same, 1) == []
    other = settings.model_copy(update={"answer_min_words": 5})
    assert plan_earlier_revisions([source], [], revisions, other, 1) == [("v1", "dataset of v1")]


def test_row_rejected_for_bridging_does_not_reject_duplicates():
    graph = build_graph([0, 1, 2, 3], [0, 1, 2, 3], [(2, 3)], [0.8], published=2)
    assert duplicates.find_duplicates("pqkd", graph, excluded={2}) == {}
    assert set(duplicates.find_duplicates("pqkd", graph)) == {3}
