"""Candidate pairs of the engine: all pairs of a bucket, and a bounded number in oversized buckets."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
from pyarrow import parquet

from benchmarks.peers import run_tuneline
from components.data_curation import engine


def find_pairs(buckets, next_band=None):
    order = numpy.zeros(len(buckets)) if next_band is None else next_band
    return numpy.unique(
        engine.find_pairs_in_buckets(numpy.arange(len(buckets)) * 10, numpy.array(buckets), order), axis=0
    )


def test_all_pairs_of_a_bucket_are_compared():
    assert find_pairs([7, 8, 7, 7, 9]).tolist() == [[0, 20], [0, 30], [20, 30]]


def test_rows_without_a_common_bucket_give_no_pair():
    assert find_pairs([1, 2, 3]).shape == (0, 2)


@pytest.mark.parametrize("rows", [engine.MAX_FULL_BUCKET_ROWS, engine.MAX_FULL_BUCKET_ROWS + 1])
def test_only_oversized_buckets_skip_pairs(rows):
    all_pairs = list(itertools.combinations(range(0, rows * 10, 10), 2))
    pairs = [tuple(pair) for pair in find_pairs([1] * rows).tolist()]
    assert (pairs == all_pairs) == (rows <= engine.MAX_FULL_BUCKET_ROWS)
    assert set(pairs) <= set(all_pairs)
    assert pairs == sorted(set(pairs))


def test_pairs_of_an_oversized_bucket_grow_linearly():
    assert len(find_pairs([1] * 50_000)) <= 50_000 * (engine.NEIGHBOURHOOD_ROWS + 1)


def test_oversized_bucket_pairs_rows_with_the_first_and_near_ones():
    rows, generator = 1_000, numpy.random.default_rng(1)
    next_band = generator.permutation(rows) // 5  # five rows each are near
    pairs = {tuple(pair) for pair in (find_pairs([1] * rows, next_band) // 10).tolist()}
    assert {(0, row) for row in range(1, rows)} <= pairs
    for value in range(rows // 5):
        near_rows = numpy.flatnonzero(next_band == value).tolist()
        assert set(itertools.combinations(near_rows, 2)) <= pairs


def test_near_copies_are_found_among_rows_with_a_long_template(tmp_path):
    """70% of each text is the template; only every fourth text and its predecessor, which differ in a word, reach similarity 0.7."""
    rng = random.Random(1)
    template = " ".join(f"w{rng.randrange(20_000)}" for _ in range(150))
    texts: list[str] = []
    for row in range(1_600):
        words = [f"w{rng.randrange(20_000)}" for _ in range(60)]
        texts.append(texts[-1].rpartition(" ")[0] + " other" if row % 4 == 3 else f"{template} {' '.join(words)}")
    _, similar = run_tuneline.engine(texts, tmp_path)
    assert similar == {row: [row - 1] for row in range(3, 1_600, 4)}
    longest = max(numpy.unique(bands, return_counts=True)[1].max() for bands in read_bands(tmp_path))
    assert longest > engine.MAX_FULL_BUCKET_ROWS


def read_bands(folder):
    table = parquet.read_table(folder / "bands-words")
    return [table[f"b{band}"].to_numpy() for band in range(engine.BAND_COUNT)]
