"""Which rows the engine compares: all that share a bucket, and in a crowd as many as can be borne."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
from pyarrow import parquet

from benchmarks.peers import run_tuneline
from components.data_curation import engine


def pairs(buckets, further=None):
    order = numpy.zeros(len(buckets)) if further is None else further
    return numpy.unique(engine.pairs_in_buckets(numpy.arange(len(buckets)) * 10, numpy.array(buckets), order), axis=0)


def test_all_pairs_of_equal_buckets_are_compared():
    assert pairs([7, 8, 7, 7, 9]).tolist() == [[0, 20], [0, 30], [20, 30]]


def test_rows_that_share_no_bucket_give_no_pair():
    assert pairs([1, 2, 3]).shape == (0, 2)


@pytest.mark.parametrize("rows", [engine.CROWD, engine.CROWD + 1])
def test_only_a_crowd_is_not_compared_in_all_its_pairs(rows):
    everyone = list(itertools.combinations(range(0, rows * 10, 10), 2))
    found = [tuple(pair) for pair in pairs([1] * rows).tolist()]
    assert (found == everyone) == (rows <= engine.CROWD)
    assert set(found) <= set(everyone)
    assert found == sorted(set(found))


def test_the_pairs_of_a_crowd_grow_with_its_rows_and_not_with_their_square():
    assert len(pairs([1] * 50_000)) <= 50_000 * (engine.NEAR + 1)


def test_a_row_of_a_crowd_is_compared_with_the_first_and_with_those_near_it_by_the_next_band():
    rows, generator = 1_000, numpy.random.default_rng(1)
    further = generator.permutation(rows) // 5  # five rows each are near
    found = {tuple(pair) for pair in (pairs([1] * rows, further) // 10).tolist()}
    assert {(0, row) for row in range(1, rows)} <= found
    for value in range(rows // 5):
        alike = numpy.flatnonzero(further == value).tolist()
        assert set(itertools.combinations(alike, 2)) <= found


def test_near_copies_are_found_in_a_crowd_that_shares_a_long_template(tmp_path):
    """70% of each text is the template, and no two texts are 0.7 alike but every fourth and the one before it, which differ in a word."""
    some = random.Random(1)
    template = " ".join(f"w{some.randrange(20_000)}" for _ in range(150))
    texts: list[str] = []
    for row in range(1_600):
        own = [f"w{some.randrange(20_000)}" for _ in range(60)]
        texts.append(texts[-1].rpartition(" ")[0] + " other" if row % 4 == 3 else f"{template} {' '.join(own)}")
    _, similar = run_tuneline.engine(texts, tmp_path)
    assert similar == {row: [row - 1] for row in range(3, 1_600, 4)}
    longest = max(numpy.unique(bands, return_counts=True)[1].max() for bands in bands_of(tmp_path))
    assert longest > engine.CROWD


def bands_of(folder):
    table = parquet.read_table(folder / "bands-words")
    return [table[f"b{band}"].to_numpy() for band in range(engine.BANDS)]
