"""Splits by group, and the splits that published rows keep."""

import json

import pytest

from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import EarlierRevision, curate, list_sources

pytestmark = pytest.mark.daft


class RecordingReporter(SilentReporter):
    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def curate_after(tmp_path):
    """Return the function that curates a file after earlier datasets and returns the artifact and the notes."""

    def run(path, out, *earlier, seed=1, **options):
        config, reporter = DataCurationConfig(sources=[str(path)], **options), RecordingReporter()
        revisions = [EarlierRevision(f"dataset-v{number}", dataset) for number, dataset in enumerate(earlier, 1)]
        sources = list_sources(config.sources, tmp_path)
        return curate(sources, tmp_path / out, config, seed=seed, reporter=reporter, earlier=revisions), reporter.notes

    return run


def collect_splits(dataset, read_rows, key):
    splits = {}
    for split in ("train", "validation", "test"):
        for row in read_rows(dataset, split):
            splits.setdefault(key(row), set()).add(split)
    return splits


def read_question(row):
    return row["messages"][0]["content"]


def test_group_with_a_redacted_name_is_in_one_split(write_rows, curate_after, read_rows, make_distinct_row):
    rows = [{**make_distinct_row(i), "number": i, "customer": f"c{i % 40}@corp.example"} for i in range(400)]
    first, notes = curate_after(write_rows(rows), "out", group_by="customer")
    splits = collect_splits(first, read_rows, lambda row: json.loads(row["meta"])["number"] % 40)
    assert len(splits) == 40
    assert all(len(names) == 1 for names in splits.values())
    assert {split for names in splits.values() for split in names} == {"train", "validation", "test"}
    assert (
        "customer is redacted in 400 rows; a redacted value groups rows only within this dataset, not across revisions"
        in notes
    )
    new_rows = [{**make_distinct_row(i), "number": i, "customer": f"c{i % 40}@corp.example"} for i in range(400, 500)]
    later, _ = curate_after(write_rows(new_rows, "more.jsonl"), "later", first, group_by="customer")
    assert len({split for names in collect_splits(later, read_rows, read_question).values() for split in names}) == 3


def test_unknown_group_field_is_refused_and_rows_without_it_are_counted(write_rows, curate_after, make_distinct_row):
    rows = [make_distinct_row(i) for i in range(150)]
    with pytest.raises(InputError, match=r"data_curation\.group_by is 'custommer', but no row has that field") as error:
        curate_after(write_rows(rows), "out", group_by="custommer")
    assert "other than the conversation" in error.value.hint
    _, notes = curate_after(
        write_rows([{**row, "customer": i} if i % 3 else row for i, row in enumerate(rows)]), "out", group_by="customer"
    )
    assert "50 rows have no customer; each row without customer is a separate group" in notes


def test_groups_split_by_earlier_revisions_are_counted(write_rows, curate_after, read_rows, make_distinct_row):
    rows = [{**make_distinct_row(i), "customer": f"c{i % 40}"} for i in range(400)]
    first, _ = curate_after(write_rows(rows), "v1")
    first_groups = collect_splits(first, read_rows, lambda row: json.loads(row["meta"])["customer"])
    count = sum(len(names) > 1 for names in first_groups.values())
    second, notes = curate_after(write_rows(rows), "v2", first, group_by="customer")
    assert count > 20
    assert (
        f"{count} groups of data_curation.group_by are in several splits, because rows keep the splits of earlier revisions; "
        in "".join(notes)
    )
    assert "400 rows keep the splits of earlier revisions; data_curation.fractions applies to the other rows" in notes
    first_splits, second_splits = (collect_splits(dataset, read_rows, read_question) for dataset in (first, second))
    assert first_splits == second_splits
    third, notes = curate_after(write_rows(rows), "v3", first, group_by="customer", published="ignore")
    splits = collect_splits(third, read_rows, lambda row: json.loads(row["meta"])["customer"])
    assert all(len(names) == 1 for names in splits.values())
    assert not [note for note in notes if "group" in note or "revision" in note]


def test_published_row_is_kept_over_a_similar_new_row(
    write_rows, curate_after, read_rows, make_conversation, make_distinct_row, tmp_path
):
    rows = [make_distinct_row(i) for i in range(200)]
    first, _ = curate_after(write_rows(rows, "m.jsonl"), "v1", seed=1)
    new_rows = [
        make_conversation(row["messages"][0]["content"], row["messages"][1]["content"] + " indeed") for row in rows[:50]
    ]
    write_rows(new_rows, "a.jsonl")
    second, _ = curate_after(tmp_path / "[am].jsonl", "v2", first, seed=2)
    assert collect_splits(second, read_rows, lambda row: row["messages"][1]["content"]) == collect_splits(
        first, read_rows, lambda row: row["messages"][1]["content"]
    )
    rejected = read_rows(second, "rejected")
    assert len(rejected) == 50
    assert {row["reason"] for row in rejected} == {"near_duplicate"}
    assert all(row["text"].endswith("indeed") for row in rejected)


def test_note_about_earlier_splits_omits_dropped_published_rows(write_rows, curate_after, make_distinct_row):
    first, _ = curate_after(write_rows(map(make_distinct_row, range(150)), "first.jsonl"), "v1")
    _, notes = curate_after(
        write_rows(map(make_distinct_row, range(100, 300)), "second.jsonl"), "v2", first, published="drop"
    )
    assert not any("splits of earlier revisions" in note for note in notes)
