"""Splits by group, and what published rows keep."""

import json

import pytest

from components.common.errors import InputError
from components.common.progress import Silent
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import Earlier, curate, list_sources

pytestmark = pytest.mark.daft


class Heard(Silent):
    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def beside(tmp_path):
    """Curate a file beside earlier datasets; the artifact and what was noted."""

    def run(path, out, *earlier, seed=1, **config):
        made, heard = DataCurationConfig(sources=[str(path)], **config), Heard()
        before = [Earlier(f"dataset-v{number}", dataset) for number, dataset in enumerate(earlier, 1)]
        sources = list_sources(made.sources, tmp_path)
        return curate(sources, tmp_path / out, made, seed=seed, reporter=heard, earlier=before), heard.notes

    return run


def splits_of(dataset, rows_of, key):
    found = {}
    for split in ("train", "validation", "test"):
        for row in rows_of(dataset, split):
            found.setdefault(key(row), set()).add(split)
    return found


def first_words(row):
    return row["messages"][0]["content"]


def test_a_group_whose_name_is_redacted_lies_in_one_split_all_the_same(write, beside, rows_of, samples):
    rows = [{**samples[1](i), "number": i, "customer": f"c{i % 40}@corp.example"} for i in range(400)]
    made, notes = beside(write(rows), "out", group_by="customer")
    found = splits_of(made, rows_of, lambda row: json.loads(row["meta"])["number"] % 40)
    assert len(found) == 40
    assert all(len(some) == 1 for some in found.values())
    assert {split for some in found.values() for split in some} == {"train", "validation", "test"}
    assert "customer is redacted in 400 rows: their groups hold in this dataset, and against earlier revisions they do not" in notes
    more = [{**samples[1](i), "number": i, "customer": f"c{i % 40}@corp.example"} for i in range(400, 500)]
    later, _ = beside(write(more, "more.jsonl"), "later", made, group_by="customer")
    assert len({split for some in splits_of(later, rows_of, first_words).values() for split in some}) == 3


def test_a_field_that_no_row_has_is_no_group_and_rows_without_it_are_counted(write, beside, samples):
    rows = [samples[1](i) for i in range(150)]
    with pytest.raises(InputError, match="no row has a field 'custommer'") as error:
        beside(write(rows), "out", group_by="custommer")
    assert "no part of their conversation" in error.value.hint
    _, notes = beside(write([{**row, "customer": i} if i % 3 else row for i, row in enumerate(rows)]), "out", group_by="customer")
    assert "50 rows have no customer; each of them is a group by itself" in notes


def test_groups_that_earlier_revisions_put_apart_are_counted(write, beside, rows_of, samples):
    rows = [{**samples[1](i), "customer": f"c{i % 40}"} for i in range(400)]
    apart, _ = beside(write(rows), "v1")
    torn = splits_of(apart, rows_of, lambda row: json.loads(row["meta"])["customer"])
    count = sum(len(some) > 1 for some in torn.values())
    again, notes = beside(write(rows), "v2", apart, group_by="customer")
    assert count > 20
    assert f"{count} groups of data_curation.group_by lie in several splits, where earlier revisions put their rows; " in "".join(notes)
    assert "400 rows lie where earlier revisions put them; data_curation.fractions is for the others" in notes
    there, now = (splits_of(dataset, rows_of, first_words) for dataset in (apart, again))
    assert there == now
    anew, notes = beside(write(rows), "v3", apart, group_by="customer", published="ignore")
    found = splits_of(anew, rows_of, lambda row: json.loads(row["meta"])["customer"])
    assert all(len(some) == 1 for some in found.values())
    assert notes == []


def test_a_published_row_stays_when_a_newcomer_of_an_earlier_file_is_like_it(write, beside, rows_of, samples, tmp_path):
    conversation, different = samples
    rows = [different(i) for i in range(200)]
    first, _ = beside(write(rows, "m.jsonl"), "v1", seed=1)
    newcomers = [conversation(row["messages"][0]["content"], row["messages"][1]["content"] + " indeed") for row in rows[:50]]
    write(newcomers, "a.jsonl")
    second, _ = beside(tmp_path / "[am].jsonl", "v2", first, seed=2)
    assert splits_of(second, rows_of, lambda row: row["messages"][1]["content"]) == splits_of(
        first, rows_of, lambda row: row["messages"][1]["content"]
    )
    rejected = rows_of(second, "rejected")
    assert len(rejected) == 50
    assert {row["reason"] for row in rejected} == {"near_duplicate"}
    assert all(row["text"].endswith("indeed") for row in rejected)


def test_rows_that_were_published_and_dropped_for_it_are_not_said_to_lie_anywhere(write, beside, samples):
    first, _ = beside(write(map(samples[1], range(150)), "first.jsonl"), "v1")
    _, notes = beside(write(map(samples[1], range(100, 300)), "second.jsonl"), "v2", first, published="drop")
    assert not any("earlier revisions put them" in note for note in notes)
