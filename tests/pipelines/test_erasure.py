"""A row that somebody wants forgotten: where it is, and what came of it; through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from components.common import artifacts, tracking
from components.common.artifacts import Artifact, Input
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import diff, publish, versions
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from tests.data_versioning.conftest import write_curated
from tests.model_registry.conftest import build, empty_store
from tests.pipelines.command import COMMAND, answer, environment, refusal, tuneline

__all__ = ["empty_store"]
pytestmark = [pytest.mark.dvc, pytest.mark.mlflow]
BASE = Input(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")
LETTER = ("a" * 16, "A letter of Ada Lovelace, of London.")
OTHER = ("b" * 16, "Nobody's letter.")
LOST = [("a" * 16 + "-2", "letters.jsonl", 12, "exact_duplicate", "a letter of Ada  LOVELACE")]


def tune(work: Workdir, name: str, dataset: Artifact, base: Input) -> Artifact:
    """A model of a dataset with its evaluation and package, in the store; registered, and promoted."""
    store = work.store
    model = build(store / f"{name}-model", "model", name, [dataset.as_input(), base], {"steps": 3})
    told = {"verdict": "accepted", "reasons": []}
    evaluation = build(store / f"{name}-evaluation", "evaluation", name, [model.as_input(), dataset.as_input(), base], told)
    repository = build(store / f"{name}-repository", "repository", name, [model.as_input()], {"proof": {"matched": 4}})
    register(model, evaluation, repository, ModelRegistryConfig(name=name), reporter=Silent())
    promote(name, "1", by="tests", reporter=Silent())
    return model


def log_run(name: str, dataset: Artifact, source: dict[str, str]) -> None:
    """A run that logged a dataset as its input, as a stage's does."""
    client = tracking.connect().MlflowClient()
    run = client.create_run(tracking.home(client), run_name=name)
    tracking.MlflowReporter(client, run.info.run_id).dataset(dataset, name=name, source=source)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """v1 has the letter and a model `clerk` came of it, and of that model another, `poet`; v2 has it not, and `monk` came of that."""
    place = tmp_path_factory.mktemp("erasure")
    work = Workdir(place / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
        one = write_curated(place / "curated" / "one", {"train": [LETTER, OTHER], "test": []}, LOST)
        two = write_curated(place / "curated" / "two", {"train": [OTHER], "test": []})
        for dataset in (one, two):
            version = publish(dataset, DataVersioningConfig(), workdir=work.root, reporter=Silent())
            log_run(f"run-{version.tag}", dataset, version.source())
        clerk = tune(work, "clerk", one, BASE)
        tune(work, "poet", two, Input(kind="base_model", content_sha256=clerk.sha256, uri=clerk.path.as_uri()))
        tune(work, "monk", two, BASE)
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def found(folder: Path, *what: str) -> dict[str, Any]:
    return answer("data", "find", *what, "--workdir", "wd", cwd=folder)


def names(listed: list[dict[str, Any]]) -> set[str]:
    return {version["name"] for one in listed for version in one["versions"]}


def test_a_text_is_followed_from_the_revision_to_every_model_and_package_in_service(folder: Path) -> None:
    told = found(folder, "--text", "letter of ADA lovelace")
    [revision] = told["revisions"]
    assert revision["tag"] == "dataset-v1"
    assert {place["table"]: place["ids"] for place in revision["places"]} == {"train": [LETTER[0]], "rejected": [LETTER[0] + "-2"]}
    assert (told["found"], told["complete"], told["searched"]["revisions"]) == (True, True, 2)
    assert names(told["models"]) == {"clerk", "poet"}
    assert names(told["packages"]) == {"clerk", "poet"}
    assert all(package["in_service"] for package in told["packages"])
    assert {version["aliases"][-1] for model in told["models"] for version in model["versions"]} <= {"champion", "challenger", "candidate"}
    assert len(told["evaluations"]) == 2
    assert [run["name"] for run in told["runs"]] == ["run-dataset-v1"]
    assert "lovelace" not in json.dumps(told).lower()


def test_a_person_reads_tables_and_the_text_may_come_from_standard_input(folder: Path) -> None:
    done = tuneline("data", "find", "--text", "Ada Lovelace", "--workdir", "wd", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "found: 1 revision, 2 models, 2 packages" in done.stdout
    assert "clerk 1 @candidate @challenger @champion" in done.stdout
    assert "in service" in done.stdout
    assert "lovelace" not in (done.stdout + done.stderr).lower()
    command = [*COMMAND, "data", "find", "--text", "-", "--workdir", "wd", "--json"]
    piped = subprocess.run(command, cwd=folder, env=environment(), input="ada lovelace\n", capture_output=True, text=True, check=True)
    assert json.loads(piped.stdout)["found"]


def test_what_is_nowhere_is_not_found(folder: Path) -> None:
    told = found(folder, "--row", "0" * 16)
    assert (told["found"], told["complete"], told["models"], told["packages"]) == (False, True, [], [])
    assert "not found" in tuneline("data", "find", "--row", "0" * 16, "--workdir", "wd", cwd=folder).stdout


def test_a_dataset_of_the_store_that_was_never_published_is_searched_too(folder: Path) -> None:
    three = write_curated(folder / "curated" / "three", {"train": [LETTER], "test": [OTHER]})
    three.path.rename(folder / "wd" / "store" / three.sha256)
    told = found(folder, "--source", "letters")
    assert [one["uri"].rsplit("/", 1)[1] for one in told["datasets"]] == [three.sha256]
    assert {place["table"]: place["ids"] for place in told["datasets"][0]["places"]} == {"train": [LETTER[0]], "test": [OTHER[0]]}


def test_a_dataset_that_a_job_killed_elsewhere_had_moved_aside_is_searched_and_unfinished_work_is_named(folder: Path) -> None:
    job = folder / "wd" / "store" / "unfinished" / "job.other.machine-0a1b2c3d.7-1.0a1b2c3d"
    three = write_curated(folder / "curated" / "three", {"train": [LETTER], "test": [OTHER]})
    (job / "aside" / "4d3c2b1a").mkdir(parents=True)
    three.path.rename(job / "aside" / "4d3c2b1a" / three.sha256)
    told = found(folder, "--source", "letters")
    assert [(one["sha256"], one["places"] != []) for one in told["datasets"]] == [(three.sha256, True)]
    assert told["complete"]
    (folder / "wd" / "store" / three.sha256 / "torn").mkdir(parents=True)
    assert [one["sha256"] for one in found(folder, "--source", "letters")["datasets"]] == [three.sha256]
    (job / "data_curation-0a1b").mkdir()
    refused = tuneline("data", "find", "--source", "letters", "--workdir", "wd", "--json", cwd=folder)
    assert refused.returncode == 1
    [gap] = json.loads(refused.stdout)["not_searched"]
    assert gap["what"].endswith(job.name)
    assert gap["why"] == "work of a job that is running, or was killed on another machine"


def test_an_answer_that_is_not_complete_says_so_and_exits_1(folder: Path) -> None:
    second = versions(DataVersioningConfig(), workdir=folder / "wd")[1]
    (folder / "wd" / "dvc-remote" / "files" / "md5" / second.md5[:2] / second.md5[2:]).unlink()
    done = tuneline("data", "find", "--row", LETTER[0], "--workdir", "wd", "--json", cwd=folder)
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert (told["found"], told["complete"]) == (True, False)
    [gap] = told["not_searched"]
    assert gap["what"] == "dataset-v2"
    assert "lacks objects or holds them damaged" in gap["why"]
    read = tuneline("data", "find", "--row", LETTER[0], "--workdir", "wd", cwd=folder)
    assert read.returncode == 1
    assert "THIS ANSWER IS NOT COMPLETE: 1 could not be searched" in read.stdout
    assert "Restore these objects from a snapshot" in read.stdout


def test_a_registry_that_does_not_answer_leaves_the_answer_incomplete(folder: Path) -> None:
    server = "http://127.0.0.1:9"
    done = tuneline("data", "find", "--row", LETTER[0], "--workdir", "wd", "--tracking-uri", server, "--json", cwd=folder)
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert [gap["what"] for gap in told["not_searched"]] == ["the model registry"]
    assert server in told["not_searched"][0]["why"]
    assert len(told["models"]) == 2  # those in the store


def test_what_to_look_for_is_said_once(folder: Path) -> None:
    for wrong in ([], ["--row", "a", "--text", "b"]):
        error = refusal(2, "data", "find", *wrong, "--workdir", "wd", cwd=folder)
        assert error["message"] == "one of --row, --text and --source says what to look for"
        assert error["hint"] == "For example: tuneline data find --row 3f5a0c19d2e84b76"
    error = refusal(2, "data", "find", "--text", " ", "--workdir", "wd", cwd=folder)
    assert error["message"] == "--text is empty"


def test_list_show_and_diff_are_tables_for_people_and_objects_for_scripts(folder: Path) -> None:
    def printed(*command: str) -> str:
        done = tuneline("data", *command, "--workdir", "wd", cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    answer("data", "publish", "curated/two", "--tag", "release-2026-11", "--workdir", "wd", cwd=folder)
    listed = printed("list")
    assert "train/validation/test" in listed
    assert "2 / – / 0" in listed
    assert "dataset-v2 (release-2026-11)" in listed
    shown = printed("show", "dataset-v1")
    assert "rejected: exact_duplicate" in shown
    assert "letters.jsonl" in shown
    assert "{" not in shown
    compared = printed("diff", "dataset-v1", "release-2026-11")
    assert "dataset-v1 → dataset-v2: 2 → 1 rows: 0 added, 1 removed, 0 changed, 0 moved, 1 kept" in compared
    assert "exact_duplicate" in compared
    [first, second] = answer("data", "list", "--workdir", "wd", cwd=folder)["versions"]
    assert (first["splits"], second["tags"], first["rows"]["kept"]) == ({"train": 2, "test": 0}, ["release-2026-11"], 2)


def test_a_message_and_a_tag_are_kept_and_a_tag_is_never_moved(folder: Path) -> None:
    write_curated(folder / "curated" / "three", {"train": [OTHER, ("c" * 16, "Third.")], "test": []})
    said = "Third batch.\n\n# without the clerk"
    told = answer("data", "publish", "curated/three", "-m", said, "--tag", "release-3", "--workdir", "wd", cwd=folder)
    assert (told["tag"], told["created"]) == ("dataset-v3", True)
    shown = answer("data", "show", "release-3", "--workdir", "wd", cwd=folder)
    assert (shown["message"], shown["tags"], shown["tag"]) == (said, ["release-3"], "dataset-v3")
    again = answer("data", "publish", "curated/three", "--tag", "release-3", "--workdir", "wd", cwd=folder)
    assert not again["created"]
    error = refusal(1, "data", "publish", "curated/two", "--tag", "release-3", "--workdir", "wd", cwd=folder)
    assert error["message"] == "the tag release-3 names dataset-v3 already, and tags are never moved"
    assert "Choose another --tag" in error["hint"]
    for wrong, sign in (("dataset-v9", "are given by tuneline"), ("no tag", "cannot be the name of a tag")):
        error = refusal(2, "data", "publish", "curated/two", "--tag", wrong, "--workdir", "wd", cwd=folder)
        assert sign in error["message"]
        assert error["hint"]
    assert artifacts.read(folder / "curated" / "three").sha256 == told["content_sha256"]


ERASED = "A letter of Grace Hopper, of New York: " + " ".join(f"word{i}" for i in range(20))


def write_letters(path: Path, *more: str) -> None:
    letters = [" ".join(f"letter{n}x{i}" for i in range(20)) for n in range(60)]
    rows = [{"prompt": "Copy this letter.", "completion": letter} for letter in (*letters[:30], *more, *letters[30:])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def curated_and_published(folder: Path, name: str) -> Artifact:
    """Curate the letters beside the revisions there are, and publish what came of them."""
    sets = ["data_curation.published=place", "data_curation.fractions={train: 0.6, validation: 0.1, test: 0.3}"]
    answer("curate", "letters.jsonl", "-o", name, "--workdir", "wd", *(word for one in sets for word in ("--set", one)), cwd=folder)
    dataset = artifacts.read(folder / name, "dataset")
    assert publish(dataset, DataVersioningConfig(), workdir=folder / "wd", reporter=Silent()).created
    return dataset


def holding(dataset: Artifact, text: str) -> set[str]:
    """The files of a dataset in which a text stands, in any case."""
    tables = {path.name: json.dumps(parquet.read_table(path).to_pylist()) for path in dataset.path.glob("*.parquet")}
    others = {path.name: path.read_text() for path in dataset.path.iterdir() if path.suffix != ".parquet"}
    return {name for name, said in {**tables, **others}.items() if text in said.lower()}


@pytest.mark.daft
def test_a_row_taken_out_of_its_source_is_in_no_later_revision_and_what_it_left_behind_stays_named(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workdir(tmp_path / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
    write_letters(tmp_path / "letters.jsonl", ERASED, ERASED.upper())
    one = curated_and_published(tmp_path, "one")
    tune(work, "clerk", one, BASE)
    told = found(tmp_path, "--text", "grace hopper")
    [revision] = told["revisions"]
    [kept, rejected] = revision["places"]
    assert (revision["tag"], rejected["table"], names(told["models"])) == ("dataset-v1", "rejected", {"clerk"})
    assert {f"{kept['table']}.parquet", "rejected.parquet"} <= holding(one, "grace hopper")
    write_letters(tmp_path / "letters.jsonl")
    two = curated_and_published(tmp_path, "two")
    tune(work, "monk", two, BASE)
    assert holding(two, "grace hopper") == set()
    changed = diff("dataset-v1", "dataset-v2", DataVersioningConfig(), workdir=work.root, reporter=Silent())
    assert changed["rows"] == {"before": 61, "after": 60, "added": 0, "removed": 1, "changed": 0, "moved": 0, "kept": 60}
    assert changed["splits"][kept["table"]]["examples"]["removed"] == kept["ids"]
    told = found(tmp_path, "--text", "grace hopper")
    assert (told["revisions"], told["searched"]["revisions"], told["complete"]) == ([revision], 2, True)
    assert (names(told["models"]), names(told["packages"])) == ({"clerk"}, {"clerk"})
    assert [dataset["sha256"] for dataset in told["datasets"]] == [one.sha256]  # fetched, to place the new revision's rows by
