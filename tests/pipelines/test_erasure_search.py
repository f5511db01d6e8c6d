"""Erasure searches by the command line: copies of a row, and the artifacts derived from them.

long: each command starts a process that imports MLflow, and one test curates and publishes datasets.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.reporting import mlflow_tracking
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import diff, list_versions, publish
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from tests.data_versioning.conftest import write_curated
from tests.model_registry.conftest import build, empty_store
from tests.pipelines.command import COMMAND, answer, answer_in_process, environment, refusal, run_in_process, tuneline

__all__ = ["empty_store"]
pytestmark = [pytest.mark.dvc, pytest.mark.mlflow]
BASE = ArtifactInput(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")
LETTER = ("a" * 16, "A letter of Ada Lovelace, of London.")
OTHER = ("b" * 16, "Nobody's letter.")
REJECTED = [("a" * 16 + "-2", "letters.jsonl", 12, "exact_duplicate", "a letter of Ada  LOVELACE")]


def tune(work: Workdir, name: str, dataset: Artifact, base: ArtifactInput) -> Artifact:
    """Store a model of a dataset with its evaluation and package, register it and promote it."""
    store = work.store
    model = build(store / f"{name}-model", "model", name, [dataset.as_input(), base], {"steps": 3})
    result = {"verdict": "accepted", "reasons": []}
    evaluation = build(
        store / f"{name}-evaluation", "evaluation", name, [model.as_input(), dataset.as_input(), base], result
    )
    repository = build(store / f"{name}-repository", "repository", name, [model.as_input()], {"proof": {"matched": 4}})
    register(model, evaluation, repository, ModelRegistryConfig(name=name), reporter=SilentReporter())
    promote(name, "1", by="tests", force=True, reason="the test", reporter=SilentReporter())
    return model


def log_run(name: str, dataset: Artifact, source: dict[str, str]) -> None:
    """Log a run with a dataset as its input, as a stage does."""
    client = mlflow_tracking.connect().MlflowClient()
    run = client.create_run(mlflow_tracking.get_experiment_id(client), run_name=name)
    mlflow_tracking.MlflowReporter(client, run.info.run_id).log_dataset(dataset, name=name, source=source)


@pytest.fixture(scope="module")
def erasure_project(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """v1 contains the letter; `clerk` was tuned on it, and `poet` from `clerk`. `monk` was tuned on v2, which lacks it."""
    project = tmp_path_factory.mktemp("erasure")
    work = Workdir(project / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
        first = write_curated(project / "curated" / "one", {"train": [LETTER, OTHER], "test": []}, REJECTED)
        second = write_curated(project / "curated" / "two", {"train": [OTHER], "test": []})
        for dataset in (first, second):
            version = publish(dataset, DataVersioningConfig(), workdir=work.root, reporter=SilentReporter())
            log_run(f"run-{version.tag}", dataset, version.to_mlflow_source())
        clerk = tune(work, "clerk", first, BASE)
        tune(
            work, "poet", second, ArtifactInput(kind="base_model", content_sha256=clerk.sha256, uri=clerk.path.as_uri())
        )
        tune(work, "monk", second, BASE)
    return project


@pytest.fixture
def folder(erasure_project: Path, tmp_path: Path) -> Path:
    """A copy of the workdir for one test."""
    return Path(shutil.copytree(erasure_project, tmp_path / "copy"))


def search(folder: Path, *options: str) -> dict[str, Any]:
    return answer_in_process("data", "find", *options, "--workdir", "wd", cwd=folder)


def get_version_names(listed: list[dict[str, Any]]) -> set[str]:
    return {version["name"] for item in listed for version in item["versions"]}


def test_text_is_traced_from_revision_to_models_and_packages(folder: Path) -> None:
    result = search(folder, "--text", "letter of ADA lovelace")
    [revision] = result["revisions"]
    assert revision["tag"] == "dataset-v1"
    assert {match["table"]: match["ids"] for match in revision["places"]} == {
        "train": [LETTER[0]],
        "rejected": [LETTER[0] + "-2"],
    }
    assert (result["found"], result["complete"], result["searched"]["revisions"]) == (True, True, 2)
    assert get_version_names(result["models"]) == {"clerk", "poet"}
    assert get_version_names(result["packages"]) == {"clerk", "poet"}
    assert all(package["in_service"] for package in result["packages"])
    assert {version["aliases"][-1] for model in result["models"] for version in model["versions"]} <= {
        "champion",
        "challenger",
        "candidate",
    }
    assert len(result["evaluations"]) == 2
    assert [run["name"] for run in result["runs"]] == ["run-dataset-v1"]
    assert "lovelace" not in json.dumps(result).lower()


@pytest.mark.long
def test_tables_are_printed_and_text_is_read_from_stdin(folder: Path) -> None:
    process = tuneline("data", "find", "--text", "Ada Lovelace", "--workdir", "wd", cwd=folder)
    assert process.returncode == 0, process.stderr
    assert "found: 1 revision, 2 models, 2 packages" in process.stdout
    assert "clerk 1 @candidate @challenger @champion" in process.stdout
    assert "deployed" in process.stdout
    assert "lovelace" not in (process.stdout + process.stderr).lower()
    command = [*COMMAND, "data", "find", "--text", "-", "--workdir", "wd", "--json"]
    piped = subprocess.run(
        command, cwd=folder, env=environment(), input="ada lovelace\n", capture_output=True, text=True, check=True
    )
    assert json.loads(piped.stdout)["found"]


@pytest.mark.long
def test_absent_text_has_no_matches(folder: Path) -> None:
    result = search(folder, "--row", "0" * 16)
    assert (result["found"], result["complete"], result["models"], result["packages"]) == (False, True, [], [])
    assert "not found" in tuneline("data", "find", "--row", "0" * 16, "--workdir", "wd", cwd=folder).stdout


def test_unpublished_dataset_in_the_store_is_searched(folder: Path) -> None:
    third = write_curated(folder / "curated" / "three", {"train": [LETTER], "test": [OTHER]})
    third.path.rename(folder / "wd" / "store" / third.sha256)
    result = search(folder, "--source", "letters")
    assert [dataset["uri"].rsplit("/", 1)[1] for dataset in result["datasets"]] == [third.sha256]
    assert {match["table"]: match["ids"] for match in result["datasets"][0]["places"]} == {
        "train": [LETTER[0]],
        "test": [OTHER[0]],
    }


@pytest.mark.long
def test_dataset_of_a_killed_job_is_searched_and_its_work_reported(
    folder: Path,
) -> None:
    job = folder / "wd" / "store" / "unfinished" / "job.other.machine-0a1b2c3d.7-1.0a1b2c3d"
    third = write_curated(folder / "curated" / "three", {"train": [LETTER], "test": [OTHER]})
    (job / "aside" / "4d3c2b1a").mkdir(parents=True)
    third.path.rename(job / "aside" / "4d3c2b1a" / third.sha256)
    result = search(folder, "--source", "letters")
    assert [(dataset["sha256"], dataset["places"] != []) for dataset in result["datasets"]] == [(third.sha256, True)]
    assert result["complete"]
    (folder / "wd" / "store" / third.sha256 / "torn").mkdir(parents=True)
    assert [dataset["sha256"] for dataset in search(folder, "--source", "letters")["datasets"]] == [third.sha256]
    (job / "data_curation-0a1b").mkdir()
    process = tuneline("data", "find", "--source", "letters", "--workdir", "wd", "--json", cwd=folder)
    assert process.returncode == 1
    [gap] = json.loads(process.stdout)["not_searched"]
    assert gap["what"].endswith(job.name)
    assert gap["why"] == "unfinished output of a job that is running, or that was killed on another machine"


@pytest.mark.long
def test_incomplete_search_is_reported_and_exits_1(folder: Path) -> None:
    second = list_versions(DataVersioningConfig(), workdir=folder / "wd")[1]
    (folder / "wd" / "dvc-remote" / "files" / "md5" / second.md5[:2] / second.md5[2:]).unlink()
    process = tuneline("data", "find", "--row", LETTER[0], "--workdir", "wd", "--json", cwd=folder)
    result = json.loads(process.stdout)
    assert process.returncode == 1
    assert (result["found"], result["complete"]) == (True, False)
    [gap] = result["not_searched"]
    assert gap["what"] == "dataset-v2"
    assert "has missing or damaged objects" in gap["why"]
    text_process = tuneline("data", "find", "--row", LETTER[0], "--workdir", "wd", cwd=folder)
    assert text_process.returncode == 1
    assert "INCOMPLETE RESULT: 1 item could not be searched" in text_process.stdout
    assert "Publish the dataset again" in text_process.stdout


@pytest.mark.long
def test_unreachable_registry_makes_the_search_incomplete(folder: Path) -> None:
    server = "http://127.0.0.1:9"
    process = tuneline(
        "data", "find", "--row", LETTER[0], "--workdir", "wd", "--tracking-uri", server, "--json", cwd=folder
    )
    result = json.loads(process.stdout)
    assert process.returncode == 1
    assert [gap["what"] for gap in result["not_searched"]] == ["the model registry"]
    assert server in result["not_searched"][0]["why"]
    assert len(result["models"]) == 2  # those in the store


def test_exactly_one_search_term_is_required(folder: Path) -> None:
    for terms in ([], ["--row", "a", "--text", "b"]):
        error = refusal(2, "data", "find", *terms, "--workdir", "wd", cwd=folder)
        assert (
            error["message"]
            == f"found {len(terms) // 2} of the options --row, --text and --source; expected exactly one"
        )
        assert error["hint"] == "Use exactly one option, for example: tuneline data find --row 3f5a0c19d2e84b76"
    error = refusal(2, "data", "find", "--text", " ", "--workdir", "wd", cwd=folder)
    assert error["message"] == "--text is empty"


def test_list_show_and_diff_print_tables_or_json(folder: Path) -> None:
    def run_text_command(*command: str) -> str:
        process = run_in_process("data", *command, "--workdir", "wd", cwd=folder)
        assert process.returncode == 0, process.stderr
        return process.stdout

    answer_in_process("data", "publish", "curated/two", "--tag", "release-2026-11", "--workdir", "wd", cwd=folder)
    listed = run_text_command("list")
    assert "train/validation/test" in listed
    assert "2 / – / 0" in listed
    assert "dataset-v2 (release-2026-11)" in listed
    shown = run_text_command("show", "dataset-v1")
    assert "rejected: exact_duplicate" in shown
    assert "letters.jsonl" in shown
    assert "{" not in shown
    compared = run_text_command("diff", "dataset-v1", "release-2026-11")
    assert "dataset-v1 → dataset-v2: 2 → 1 rows: 0 added, 1 removed, 0 changed, 0 moved, 1 kept" in compared
    assert "exact_duplicate" in compared
    [first, second] = answer_in_process("data", "list", "--workdir", "wd", cwd=folder)["versions"]
    assert (first["splits"], second["tags"], first["rows"]["kept"]) == ({"train": 2, "test": 0}, ["release-2026-11"], 2)


@pytest.mark.long
def test_message_and_tag_are_stored_and_a_tag_never_moves(folder: Path) -> None:
    write_curated(folder / "curated" / "three", {"train": [OTHER, ("c" * 16, "Third.")], "test": []})
    message = "Third batch.\n\n# without the clerk"
    result = answer(
        "data", "publish", "curated/three", "-m", message, "--tag", "release-3", "--workdir", "wd", cwd=folder
    )
    assert (result["tag"], result["created"]) == ("dataset-v3", True)
    shown = answer("data", "show", "release-3", "--workdir", "wd", cwd=folder)
    assert (shown["message"], shown["tags"], shown["tag"]) == (message, ["release-3"], "dataset-v3")
    again = answer("data", "publish", "curated/three", "--tag", "release-3", "--workdir", "wd", cwd=folder)
    assert not again["created"]
    error = refusal(1, "data", "publish", "curated/two", "--tag", "release-3", "--workdir", "wd", cwd=folder)
    assert error["message"] == "the tag release-3 already points to dataset-v3; tags are never moved"
    assert "Choose another --tag" in error["hint"]
    for tag, reason in (("dataset-v9", "are reserved for versions"), ("no tag", "is not a valid tag name")):
        error = refusal(2, "data", "publish", "curated/two", "--tag", tag, "--workdir", "wd", cwd=folder)
        assert reason in error["message"]
        assert error["hint"]
    assert artifact_folder.read(folder / "curated" / "three").sha256 == result["content_sha256"]


ERASED = "A letter of Grace Hopper, of New York: " + " ".join(f"word{i}" for i in range(20))


def write_letters(path: Path, *more: str) -> None:
    letters = [" ".join(f"letter{n}x{i}" for i in range(20)) for n in range(60)]
    rows = [{"prompt": "Copy this letter.", "completion": letter} for letter in (*letters[:30], *more, *letters[30:])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def curate_and_publish(folder: Path, name: str) -> Artifact:
    """Curate the letters with the earlier revisions, and publish the result."""
    overrides = ["data_curation.published=place", "data_curation.fractions={train: 0.6, validation: 0.1, test: 0.3}"]
    answer(
        "curate",
        "letters.jsonl",
        "-o",
        name,
        "--workdir",
        "wd",
        *(word for override in overrides for word in ("--set", override)),
        cwd=folder,
    )
    dataset = artifact_folder.read(folder / name, "dataset")
    assert publish(dataset, DataVersioningConfig(), workdir=folder / "wd", reporter=SilentReporter()).created
    return dataset


def find_files_with(dataset: Artifact, text: str) -> set[str]:
    """Return the files of a dataset that contain a text, ignoring case."""
    tables = {path.name: json.dumps(parquet.read_table(path).to_pylist()) for path in dataset.path.glob("*.parquet")}
    others = {path.name: path.read_text() for path in dataset.path.iterdir() if path.suffix != ".parquet"}
    return {name for name, content in {**tables, **others}.items() if text in content.lower()}


@pytest.mark.long
@pytest.mark.daft
def test_removed_row_is_found_in_earlier_revisions_only(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workdir(tmp_path / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
    write_letters(tmp_path / "letters.jsonl", ERASED, ERASED.upper())
    first = curate_and_publish(tmp_path, "one")
    tune(work, "clerk", first, BASE)
    result = search(tmp_path, "--text", "grace hopper")
    [revision] = result["revisions"]
    [kept, rejected] = revision["places"]
    assert (revision["tag"], rejected["table"], get_version_names(result["models"])) == (
        "dataset-v1",
        "rejected",
        {"clerk"},
    )
    assert {f"{kept['table']}.parquet", "rejected.parquet"} <= find_files_with(first, "grace hopper")
    write_letters(tmp_path / "letters.jsonl")
    second = curate_and_publish(tmp_path, "two")
    tune(work, "monk", second, BASE)
    assert find_files_with(second, "grace hopper") == set()
    changed = diff("dataset-v1", "dataset-v2", DataVersioningConfig(), workdir=work.root, reporter=SilentReporter())
    assert changed["rows"] == {
        "before": 61,
        "after": 60,
        "added": 0,
        "removed": 1,
        "changed": 0,
        "moved": 0,
        "kept": 60,
    }
    assert changed["splits"][kept["table"]]["examples"]["removed"] == kept["ids"]
    result = search(tmp_path, "--text", "grace hopper")
    assert (result["revisions"], result["searched"]["revisions"], result["complete"]) == ([revision], 2, True)
    assert (get_version_names(result["models"]), get_version_names(result["packages"])) == ({"clerk"}, {"clerk"})
    assert [dataset["sha256"] for dataset in result["datasets"]] == [
        first.sha256
    ]  # fetched to compare the new revision's rows with it
