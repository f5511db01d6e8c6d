"""Finding a row in every revision."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.errors import UsageError
from components.common.progress import Silent
from components.data_versioning import search
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.search import Query, Searched
from components.data_versioning.stage import fetch, find, publish, versions
from tests.data_versioning import conftest

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
NAME = "Ms. Ada\u00a0Lovelace"
ONE = {"train": [("a" * 16, f"A letter of {NAME}, of London."), ("b" * 16, "Nobody's letter.")], "test": [("row-7", "Weather.")]}
TWO = {"train": [("b" * 16, "Nobody's letter.")], "test": [("row-7", "Weather.")]}
LOST = [("a" * 16 + "-2", "letters.jsonl", 12, "exact_duplicate", "A letter of Ms. ada lovelace, of London.")]


@pytest.fixture
def workdir(tmp_path: Path, make_curated) -> Path:
    """v1 has the letter, v2 has it among the rejected only, v3 not at all; the other dataset has it again."""
    other = DataVersioningConfig(name="letters")
    for name, splits, lost, config in (
        ("one", ONE, [], CONFIG),
        ("two", TWO, LOST, CONFIG),
        ("three", TWO, [], CONFIG),
        ("four", ONE, LOST, other),
    ):
        publish(make_curated(name, splits, lost), config, workdir=tmp_path, reporter=Silent())
    return tmp_path


def found(workdir: Path, by: str, value: str) -> Searched:
    return find(Query(by, value), CONFIG, workdir=workdir, reporter=Silent())


def places(searched: Searched) -> dict[str, dict[str, list[str]]]:
    return {one.tag: {place["table"]: place["ids"] for place in one.places} for one in searched.found}


@pytest.mark.parametrize("text", ["ada lovelace", "ADA\n  LOVELACE", "Ada\u00a0Lovelace, of"])
def test_text_is_found_in_any_case_and_spacing_in_every_dataset_and_among_the_rejected(workdir: Path, text: str) -> None:
    searched = found(workdir, "text", text)
    assert places(searched) == {
        "dataset-v1": {"train": ["a" * 16]},
        "dataset-v2": {"rejected": ["a" * 16 + "-2"]},
        "letters-v1": {"train": ["a" * 16], "rejected": ["a" * 16 + "-2"]},
    }
    assert searched.revisions == 4
    assert searched.not_searched == []
    assert searched.found[1].places[0]["at"] == ["letters.jsonl:12 (exact_duplicate)"]


def test_text_in_what_the_source_said_beside_a_row_is_found(workdir: Path) -> None:
    assert places(found(workdir, "text", "clerk row-7"))["dataset-v3"] == {"test": ["row-7"]}


def test_an_id_finds_the_row_and_its_equals_and_no_other(workdir: Path) -> None:
    assert set(places(found(workdir, "row", "a" * 16))) == {"dataset-v1", "dataset-v2", "letters-v1"}
    assert places(found(workdir, "row", "row-7"))["dataset-v1"] == {"test": ["row-7"]}
    assert places(found(workdir, "row", "row")) == {}


def test_a_source_finds_its_rows_and_its_unreadable_lines(workdir: Path, make_curated) -> None:
    publish(make_curated("five", TWO, unread=2), CONFIG, workdir=workdir, reporter=Silent())
    assert len(places(found(workdir, "source", "letters"))["dataset-v1"]["train"]) == 2
    assert set(places(found(workdir, "source", "letters.jsonl"))) == {"dataset-v2", "letters-v1"}
    [torn] = found(workdir, "source", "torn.jsonl").found
    assert torn.places == [{"table": "quarantine", "rows": 2, "ids": [], "sources": ["torn.jsonl"], "at": ["torn.jsonl:0", "torn.jsonl:1"]}]


def test_a_source_is_found_by_the_path_or_address_that_it_was_named_by(workdir: Path, make_curated) -> None:
    publish(make_curated("torn", ONE, unread=2), CONFIG, workdir=workdir, reporter=Silent())
    for named in ("torn.jsonl", "/data/raw/torn.jsonl", "./torn.jsonl", "s3://bucket/raw/torn.jsonl", "dvc:///srv/git@v1:torn.jsonl"):
        assert [one.tag for one in found(workdir, "source", named).found] == ["dataset-v4"], named
    assert found(workdir, "source", "/data/raw/untorn.jsonl").found == []


def test_a_rejected_row_is_found_by_what_it_calls_its_source_and_by_its_file(workdir: Path) -> None:
    for source in ("letters", "letters.jsonl"):
        searched = found(workdir, "source", source)
        [rejected] = [place for place in searched.found[-1].places if place["table"] == "rejected"]
        assert (rejected["ids"], rejected["sources"]) == (["a" * 16 + "-2"], ["letters"])
        assert rejected["at"] == ["letters.jsonl:12 (exact_duplicate)"]
        assert (searched.not_searched == []) == (source == "letters")


def test_a_file_whose_kept_rows_name_a_source_of_their_own_leaves_the_answer_incomplete(workdir: Path) -> None:
    gaps = found(workdir, "source", "letters.jsonl").not_searched
    assert [gap["what"] for gap in gaps] == ["dataset-v1", "dataset-v2", "dataset-v3", "letters-v1"]
    assert gaps[0]["why"] == "kept rows of which only what they call their source is known, not whether they are of this file: 3"
    assert "what they call their source" in gaps[0]["hint"]
    assert found(workdir, "source", "another.jsonl").not_searched == []


def test_rejected_rows_that_do_not_say_their_source_leave_the_answer_incomplete(
    tmp_path: Path, make_curated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "DROPPED", conftest.DROPPED.remove(conftest.DROPPED.get_field_index("own_source")))
    for name, lost in (("one", []), ("two", LOST)):
        publish(make_curated(name, TWO, lost), CONFIG, workdir=tmp_path, reporter=Silent())
    [gap] = found(tmp_path, "source", "desk").not_searched
    assert gap["what"] == "dataset-v2"
    assert gap["why"] == "rejected rows of which only the file is known, not what they call their source: 1"
    assert found(tmp_path, "text", "desk").not_searched == []


def test_every_content_is_read_once(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    within = search.within
    monkeypatch.setattr(search, "within", lambda query, dataset: read.append(dataset.sha256) or within(query, dataset))
    twice = DataVersioningConfig(name="twice")
    publish(fetch("dataset-v1", workdir / "again", CONFIG, workdir=workdir, reporter=Silent()), twice, workdir=workdir, reporter=Silent())
    searched = found(workdir, "text", "lovelace")
    assert set(places(searched)) == {"dataset-v1", "dataset-v2", "letters-v1", "twice-v1"}
    assert len(read) == len(set(read)) == 4


def test_a_revision_that_cannot_be_read_is_named_and_the_others_are_searched(workdir: Path) -> None:
    [first, *_] = versions(CONFIG, workdir=workdir)
    (workdir / "dvc-remote" / "files" / "md5" / first.md5[:2] / first.md5[2:]).unlink()
    searched = found(workdir, "row", "row-7")
    assert [one.tag for one in searched.found] == ["dataset-v2", "dataset-v3", "letters-v1"]
    [gap] = searched.not_searched
    assert gap["what"] == "dataset-v1"
    assert "lacks objects or holds them damaged" in gap["why"]
    assert "snapshot" in gap["hint"]


def test_without_a_repository_nothing_is_found(tmp_path: Path) -> None:
    assert find(Query("row", "a"), CONFIG, workdir=tmp_path, reporter=Silent()) == Searched()


def test_a_blank_text_is_refused_and_no_text_is_ever_shown() -> None:
    with pytest.raises(UsageError, match="--text is empty") as refused:
        Query("text", " \n ")
    assert "would be found in every row" in refused.value.hint
    assert "secret" not in repr(Query("text", "secret"))
