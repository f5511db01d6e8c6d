"""Row search in all published revisions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning import row_search
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.row_search import Query, SearchResult
from components.data_versioning.stage import fetch, list_versions, publish, search_rows
from tests.data_versioning import conftest

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
NAME = "Ms. Ada\u00a0Lovelace"
WITH_LETTER = {
    "train": [("a" * 16, f"A letter of {NAME}, of London."), ("b" * 16, "Nobody's letter.")],
    "test": [("row-7", "Weather.")],
}
WITHOUT_LETTER = {"train": [("b" * 16, "Nobody's letter.")], "test": [("row-7", "Weather.")]}
REJECTED_LETTER = [
    ("a" * 16 + "-2", "letters.jsonl", 12, "exact_duplicate", "A letter of Ms. ada lovelace, of London.")
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish the letter in v1 and in another dataset, only as a rejected row in v2, and not in v3."""
    folder = tmp_path_factory.mktemp("published")
    other_config = DataVersioningConfig(name="letters")
    for name, splits, rejected, config in (
        ("one", WITH_LETTER, [], CONFIG),
        ("two", WITHOUT_LETTER, REJECTED_LETTER, CONFIG),
        ("three", WITHOUT_LETTER, [], CONFIG),
        ("four", WITH_LETTER, REJECTED_LETTER, other_config),
    ):
        dataset = conftest.write_curated(folder / "curated" / name, splits, rejected)
        publish(dataset, config, workdir=folder, reporter=SilentReporter())
    return folder


@pytest.fixture
def workdir(published: Path, tmp_path: Path) -> Path:
    """A copy of the workdir with the published datasets for one test."""
    return Path(shutil.copytree(published, tmp_path, symlinks=True, dirs_exist_ok=True))


def search(workdir: Path, field: str, value: str) -> SearchResult:
    return search_rows(Query(field, value), CONFIG, workdir=workdir, reporter=SilentReporter())


def ids_by_table(result: SearchResult) -> dict[str, dict[str, list[str]]]:
    return {version.tag: {match["table"]: match["ids"] for match in version.places} for version in result.found}


@pytest.mark.parametrize("text", ["ada lovelace", "ADA\n  LOVELACE", "Ada\u00a0Lovelace, of"])
def test_text_is_found_in_any_case_and_spacing_in_kept_and_rejected_rows(workdir: Path, text: str) -> None:
    result = search(workdir, "text", text)
    assert ids_by_table(result) == {
        "dataset-v1": {"train": ["a" * 16]},
        "dataset-v2": {"rejected": ["a" * 16 + "-2"]},
        "letters-v1": {"train": ["a" * 16], "rejected": ["a" * 16 + "-2"]},
    }
    assert result.revisions == 4
    assert result.not_searched == []
    assert result.found[1].places[0]["at"] == ["letters.jsonl:12 (exact_duplicate)"]


def test_text_in_row_metadata_is_found(workdir: Path) -> None:
    assert ids_by_table(search(workdir, "text", "clerk row-7"))["dataset-v3"] == {"test": ["row-7"]}


def test_row_id_finds_only_the_row_and_its_duplicates(workdir: Path) -> None:
    assert set(ids_by_table(search(workdir, "row", "a" * 16))) == {"dataset-v1", "dataset-v2", "letters-v1"}
    assert ids_by_table(search(workdir, "row", "row-7"))["dataset-v1"] == {"test": ["row-7"]}
    assert ids_by_table(search(workdir, "row", "row")) == {}


def test_source_finds_its_rows_and_unreadable_lines(workdir: Path, make_curated) -> None:
    publish(
        make_curated("five", WITHOUT_LETTER, unreadable_lines=2), CONFIG, workdir=workdir, reporter=SilentReporter()
    )
    assert len(ids_by_table(search(workdir, "source", "letters"))["dataset-v1"]["train"]) == 2
    assert set(ids_by_table(search(workdir, "source", "letters.jsonl"))) == {"dataset-v2", "letters-v1"}
    [version] = search(workdir, "source", "torn.jsonl").found
    assert version.places == [
        {"table": "quarantine", "rows": 2, "ids": [], "sources": ["torn.jsonl"], "at": ["torn.jsonl:0", "torn.jsonl:1"]}
    ]


def test_source_is_found_by_path_or_address(workdir: Path, make_curated) -> None:
    publish(make_curated("torn", WITH_LETTER, unreadable_lines=2), CONFIG, workdir=workdir, reporter=SilentReporter())
    for address in (
        "torn.jsonl",
        "/data/raw/torn.jsonl",
        "./torn.jsonl",
        "s3://bucket/raw/torn.jsonl",
        "dvc:///srv/git@v1:torn.jsonl",
    ):
        assert [version.tag for version in search(workdir, "source", address).found] == ["dataset-v4"], address
    assert search(workdir, "source", "/data/raw/untorn.jsonl").found == []


def test_rejected_row_is_found_by_recorded_source_and_by_file(workdir: Path) -> None:
    for source in ("letters", "letters.jsonl"):
        result = search(workdir, "source", source)
        [rejected] = [match for match in result.found[-1].places if match["table"] == "rejected"]
        assert (rejected["ids"], rejected["sources"]) == (["a" * 16 + "-2"], ["letters"])
        assert rejected["at"] == ["letters.jsonl:12 (exact_duplicate)"]
        assert (result.not_searched == []) == (source == "letters")


def test_kept_rows_without_a_recorded_file_make_the_result_incomplete(workdir: Path) -> None:
    gaps = search(workdir, "source", "letters.jsonl").not_searched
    assert [gap["what"] for gap in gaps] == ["dataset-v1", "dataset-v2", "dataset-v3", "letters-v1"]
    assert gaps[0]["why"] == "3 kept rows record a source but no file, and may come from this file"
    assert "the recorded source" in gaps[0]["hint"]
    assert search(workdir, "source", "another.jsonl").not_searched == []


def test_rejected_rows_without_a_source_make_the_result_incomplete(
    tmp_path: Path, make_curated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        conftest,
        "REJECTED_SCHEMA",
        conftest.REJECTED_SCHEMA.remove(conftest.REJECTED_SCHEMA.get_field_index("own_source")),
    )
    for name, rejected in (("one", []), ("two", REJECTED_LETTER)):
        publish(make_curated(name, WITHOUT_LETTER, rejected), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    [gap] = search(tmp_path, "source", "desk").not_searched
    assert gap["what"] == "dataset-v2"
    assert gap["why"] == "1 rejected row records a file but no source"
    assert search(tmp_path, "text", "desk").not_searched == []


def test_each_dataset_is_searched_once(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search_dataset = row_search.search_dataset
    monkeypatch.setattr(
        row_search,
        "search_dataset",
        lambda query, dataset: searched.append(dataset.sha256) or search_dataset(query, dataset),
    )
    other_config = DataVersioningConfig(name="twice")
    publish(
        fetch("dataset-v1", workdir / "again", CONFIG, workdir=workdir, reporter=SilentReporter()),
        other_config,
        workdir=workdir,
        reporter=SilentReporter(),
    )
    result = search(workdir, "text", "lovelace")
    assert set(ids_by_table(result)) == {"dataset-v1", "dataset-v2", "letters-v1", "twice-v1"}
    assert len(searched) == len(set(searched)) == 4


def test_unreadable_revision_is_reported_and_the_others_are_searched(workdir: Path) -> None:
    [first, *_] = list_versions(CONFIG, workdir=workdir)
    (workdir / "dvc-remote" / "files" / "md5" / first.md5[:2] / first.md5[2:]).unlink()
    result = search(workdir, "row", "row-7")
    assert [version.tag for version in result.found] == ["dataset-v2", "dataset-v3", "letters-v1"]
    [gap] = result.not_searched
    assert gap["what"] == "dataset-v1"
    assert "has missing or damaged objects" in gap["why"]
    assert "Publish the dataset again" in gap["hint"]


def test_search_without_a_repository_finds_nothing(tmp_path: Path) -> None:
    assert search_rows(Query("row", "a"), CONFIG, workdir=tmp_path, reporter=SilentReporter()) == SearchResult()


def test_blank_text_is_refused_and_text_is_not_in_the_repr() -> None:
    with pytest.raises(UsageError, match="--text is empty") as error:
        Query("text", " \n ")
    assert "would match every row" in error.value.hint
    assert "secret" not in repr(Query("text", "secret"))
