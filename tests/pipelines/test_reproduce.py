"""A registered model is made again by the real stages: equal digests, and every reason why it could not be so."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, hashing, jobs, places, tracking
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, BusyError, EngineMissingError, RegistryError, TunelineError, UsageError
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_curation.stage import curate, list_sources
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.stage import Version, publish
from components.fine_tuning import training
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import register
from pipelines import reproduce
from pipelines.cli import main as cli
from pipelines.config import parse
from pipelines.lineage import LineageError
from pipelines.reproduce import FINISHED
from tests.pipelines.command import COMMAND, environment
from tests.pipelines.test_lineage import documented, flipped, moved
from tests.pipelines.test_pipeline import flip, write_rows
from tests.tiny import tiny_model

pytestmark = [pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
NAME = "again"
THREADS = "1"


@dataclass(frozen=True)
class Made:
    """A model made stage by stage in a workdir, registered, and in service."""

    work: Workdir
    raw: Path
    base: Path
    recipe: FineTuningConfig
    dataset: Artifact
    revision: Version
    model: Artifact

    @property
    def place(self) -> Path:
        return self.work.root / "reproduce" / f"{NAME}-1"

    def call(self, *arguments: str) -> int:
        """The command in this process; its errors are raised."""
        code = cli.app(["reproduce", *arguments, "--workdir", str(self.work.root)], standalone_mode=False)
        assert isinstance(code, int)
        return code

    def refusal(self, *arguments: str) -> TunelineError:
        with pytest.raises(TunelineError) as error:
            self.call(*arguments)
        return error.value


def judged(folder: Path, model: Artifact) -> Artifact:
    """An evaluation that accepted the model, as the registry wants to see one."""
    artifacts.begin(folder, "judged")
    (folder / "evaluation.json").write_text('{"verdict": "accepted"}')
    summary = {"verdict": "accepted", "reasons": []}
    options: dict[str, Any] = {"inputs": [model.as_input()], "config": {}, "seed": 1, "key": "judged", "summary": summary}
    return artifacts.publish(folder, "evaluation", payload=["evaluation.json"], **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The stages one after the other, as a run calls them."""
    folder = tmp_path_factory.mktemp("again")
    work, draft, say = Workdir(folder / "workdir"), folder / "draft", Silent()
    base, raw = tiny_model(folder / "tiny"), folder / "raw.jsonl"
    write_rows(raw)
    curation = {"sources": [str(raw)], "near_duplicate_threshold": 0.95, "answer_min_words": 1000}
    fractions = {"train": 0.6, "validation": 0.1, "test": 0.3}
    tuning = {"base_model": str(base), "max_steps": 24, "batch_size": 4, "learning_rate": 5e-3, "validation_rows": 0}
    sections = {"data_curation": {**curation, "fractions": fractions}, "fine_tuning": {**tuning, "checkpoint_every": 3}}
    config = parse(sections, "the test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.setenv("TUNELINE_THREADS", THREADS)
        for name in ("TUNELINE_STORE", "TUNELINE_STATE"):
            patch.delenv(name, raising=False)
        work.store.mkdir(parents=True)
        sources = list_sources([str(raw)], folder)
        dataset = places.adopt(work.store, curate(sources, draft, config.data_curation, seed=1, reporter=say))
        revision = publish(dataset, config.data_versioning, workdir=work.root, reporter=say)
        options: dict[str, Any] = {"seed": 1, "state": work.state, "reporter": say, "dataset_uri": revision.uri}
        model = places.adopt(work.store, finetune(dataset, draft, config.fine_tuning, **options))
        named = ModelRegistryConfig(name=NAME)
        register(model, judged(folder / "judged", model), None, named, reporter=say, dataset_version=revision.model_dump())
        tracking.connect().MlflowClient().set_registered_model_alias(NAME, "champion", "1")
    return Made(work, raw, base, config.fine_tuning, dataset, revision, model)


@pytest.fixture(autouse=True)
def tracked(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.work.tracking_uri)
    monkeypatch.setenv("TUNELINE_THREADS", "2")  # another count than was recorded


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The threads of every training there is."""
    seen, real = list[str | None](), training.train

    def train(*arguments: Any, **options: Any) -> Any:
        seen.append(os.environ.get("TUNELINE_THREADS"))
        return real(*arguments, **options)

    monkeypatch.setattr(training, "train", train)
    return seen


@contextmanager
def tagged(**values: str | None) -> Iterator[None]:
    """Other values of the version's tags for a while; None removes one."""
    client = tracking.connect().MlflowClient()
    before = client.get_model_version(NAME, "1").tags
    for name, value in values.items():
        if value is None:
            client.delete_model_version_tag(NAME, "1", f"tuneline.{name}")
        else:
            client.set_model_version_tag(NAME, "1", f"tuneline.{name}", value)
    try:
        yield
    finally:
        for name in values:
            client.set_model_version_tag(NAME, "1", f"tuneline.{name}", before[f"tuneline.{name}"])


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its digest."""
    return {path.relative_to(folder).as_posix(): hashing.sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def test_the_champion_is_made_again_with_equal_digests(made: Made, trained: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(made.work.root)
    assert made.call(NAME, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["version"], found["alias"]) == (NAME, "1", "champion")
    sha256, how = made.dataset.sha256, "all raw files are here as they were"
    assert found["dataset"] == {"recorded": sha256, "reproduced": sha256, "equal": True, "how": "curated", "why": how}
    assert found["model"] == {"recorded": made.model.sha256, "reproduced": made.model.sha256, "equal": True}
    assert (found["differences"], found["files"]) == ([], [])
    assert found["seconds"] > 0
    on_page = documented("reproduce")
    assert list(on_page) == list(found)
    assert list(on_page["dataset"]) == list(found["dataset"])
    assert trained == [THREADS], "with the threads that were recorded, not those of the environment"
    assert tree(made.work.root) == before, "nothing is left of it, and nothing was changed"
    assert os.environ["TUNELINE_THREADS"] == "2"


def killed(made: Made) -> None:
    """Start the command in a process of its own and kill it once its first checkpoint is whole: the second one has begun."""
    command = [*COMMAND, "reproduce", NAME, "--workdir", str(made.work.root)]
    with (made.work.root.parent / "killed.log").open("w") as log:
        child = subprocess.Popen(command, cwd=made.work.root.parent, env=environment(), stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(made.place.glob("state/fine_tuning/*/checkpoint-*"))) < 2:
        assert child.poll() is None, (made.work.root.parent / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def test_killed_in_the_middle_of_training_it_goes_on_and_ends_with_equal_digests(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    killed(made)
    assert not (made.place / "model" / "manifest.json").exists()
    curated = (made.place / "dataset" / "manifest.json").stat().st_mtime_ns
    assert made.call(f"{NAME}@1", "--keep", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alias"] is None
    again = artifacts.read(made.place / "model", "model")
    assert again.sha256 == found["model"]["reproduced"] == made.model.sha256
    assert again.manifest.summary["resumed_from"] >= 3
    assert (made.place / "dataset" / "manifest.json").stat().st_mtime_ns == curated, "what was finished is not made twice"
    assert json.loads((made.place / FINISHED).read_text()) == found
    shutil.rmtree(made.place)


def test_a_changed_source_has_the_dataset_taken_from_its_revision_and_a_kept_reproduction_is_not_the_next_one(
    made: Made, trained: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    made.place.mkdir(parents=True)
    shutil.copytree(made.model.path, made.place / "model")
    (made.place / FINISHED).write_text("{}")
    with flipped(made.raw):
        assert made.call(f"{NAME}@champion") == 0
    short, lines = made.dataset.sha256[:12], capsys.readouterr().out.splitlines()
    assert lines == [
        f"All that {NAME} version 1 depends on is here as it was: equal digests are promised.",
        f"dataset  {short} equal  taken from its revision {made.revision.uri}: raw.jsonl has changed since it was read",
        f"model    {made.model.sha256[:12]} equal  trained again, seed 1",
        f"{NAME} version 1 is reproduced: dataset and model have the recorded digests.",
    ]
    assert trained == [THREADS], "it was trained, and not found"
    assert not made.place.parent.exists()


@pytest.fixture(scope="module")
def other_seed(made: Made, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registered model that was trained with the seed 2 and says 1."""
    folder = tmp_path_factory.mktemp("seed") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", made.work.tracking_uri)
        patch.setenv("TUNELINE_THREADS", THREADS)
        options: dict[str, Any] = {"state": made.work.state, "reporter": Silent(), "dataset_uri": made.revision.uri}
        model = finetune(made.dataset, folder, made.recipe, seed=2, **options)
        text = (folder / "manifest.json").read_text().replace('"seed": 2', '"seed": 1')
        keys = [str(one.manifest.produced_by["key"]) for one in (model, made.model)]
        (folder / "manifest.json").write_text(text.replace(*keys))
        lying = artifacts.read(folder, "model")
        named = ModelRegistryConfig(name="lying")
        done = register(lying, judged(folder.with_name("judged"), model), None, named, reporter=Silent())
        shutil.rmtree(folder)  # what MLflow keeps is left
    return f"{done.name}@{done.version}"


def test_a_model_of_another_seed_than_it_says_differs_tensor_by_tensor(
    made: Made, other_seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = hashing.packages()
    monkeypatch.setattr(hashing, "packages", lambda: {**here, "mlflow": "0.1"})
    assert made.call(other_seed, "--from-revision") == 1
    out = capsys.readouterr().out
    assert re.search(r"mlflow +\S+ +0\.1 +changes neither: it only carries files", out)
    assert re.search(r"model/adapter_model\.safetensors: (\d+) of \1 tensors differ, \S+lora_[AB]\.weight most, by up to 0\.\d+", out)
    assert f"dataset  {made.dataset.sha256[:12]} equal  taken from its revision" in out
    assert out.rstrip().endswith(
        "lying version 1 is not reproduced: the model is not as recorded, and nothing differs here that explains it: "
        "what is recorded may not be what was used."
    )


def test_a_dry_run_tells_other_versions_with_what_they_may_change_and_does_nothing(
    made: Made, trained: list[str | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = hashing.packages()
    monkeypatch.setattr(hashing, "packages", lambda: {**here, "torch": "0.1", "pyarrow": "0.2"})
    before = tree(made.work.root)
    assert made.call(NAME, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["what"], one["recorded"], one["here"], one["effect"]) for one in found["differences"]] == [
        ("torch", here["torch"], "0.1", "may change the model"),
        ("pyarrow", here["pyarrow"], "0.2", "may change the dataset and the model"),
    ]
    assert [(found[kind]["reproduced"], found[kind]["equal"]) for kind in ("dataset", "model")] == [(None, None)] * 2
    assert found["dataset"]["how"] == "curated"
    assert made.call(NAME, "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(here['torch'])} +0\.1 +may change the model", out)
    assert out.endswith(
        "would be curated again: all raw files are here as they were\nmodel    would be trained again, seed 1\nNothing was done.\n"
    )
    assert trained == []
    assert tree(made.work.root) == before


def planned(made: Made, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """How the dataset would be had, and why."""
    made.call(NAME, "--dry-run", "--json", *arguments)
    found = json.loads(capsys.readouterr().out)["dataset"]
    return found["how"], found["why"]


def test_what_is_not_there_as_it_was_decides_how_the_dataset_is_had(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(made, capsys, "--from-revision") == ("revision", "--from-revision was given")
    with moved(made.raw):
        how, why = planned(made, capsys)
        assert how == "revision"
        assert f"{made.raw}' does not exist" in why
        with tagged(dataset_uri="dataset"):
            assert planned(made, capsys)[0] == "revision", "found by its content"
            unpublished = ("--set", "data_versioning.name=other")
            assert planned(made, capsys, *unpublished)[0] == "store"
            error = made.refusal(NAME, "--from-revision", *unpublished)
    assert isinstance(error, UsageError)
    assert error.message == f"--from-revision: the dataset of {NAME} version 1 was not published as a revision"


@pytest.mark.parametrize("kind", [DataVersioningError, EngineMissingError, ArtifactDamagedError])
def test_a_lost_data_repository_has_the_dataset_taken_from_its_revision(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[TunelineError]
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise kind("dvc:///gone@main:rows.jsonl cannot be had", hint="Restore it.")

    monkeypatch.setattr(reproduce.curation, "list_sources", lost)
    assert planned(made, capsys) == ("revision", "dvc:///gone@main:rows.jsonl cannot be had")


def test_a_dataset_that_left_the_store_is_known_from_its_revision_and_without_one_is_lost(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    with moved(made.dataset.path):
        assert planned(made, capsys) == ("curated", "all raw files are here as they were")
        with tagged(dataset_uri="dataset"):
            error = made.refusal(NAME, "--set", "data_versioning.name=other")
    assert isinstance(error, LineageError)
    assert error.message == f"the dataset {made.dataset.sha256[:12]} of {NAME} version 1 is in no store any more and was not published"
    assert "backup" in error.hint


def test_a_damaged_revision_is_named_with_its_object(made: Made, trained: list[str | None], tmp_path: Path) -> None:
    remote = made.work.root / "dvc-remote"
    shutil.copytree(remote, tmp_path / "whole")
    largest = max((path for path in remote.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    flip(largest)
    try:
        error = made.refusal(NAME, "--from-revision")
    finally:
        shutil.rmtree(remote)
        shutil.copytree(tmp_path / "whole", remote)
        shutil.rmtree(made.place.parent, ignore_errors=True)
    assert error.kind == "artifact_damaged"
    assert f"{largest.parent.name}/{largest.name}" in error.message
    assert trained == []


def test_a_lost_revision_is_told_before_any_work_with_those_there_are(made: Made, trained: list[str | None]) -> None:
    with tagged(dataset_uri=made.revision.uri.replace(made.revision.rev, "0" * 40)):
        error = made.refusal(NAME, "--from-revision")
    assert error.kind == "data_versioning"
    assert "has no published revision 000000000000 of dataset" in error.message
    assert "dataset-v1" in error.hint
    assert trained == []


def test_without_the_base_model_as_it_was_nothing_is_trained(
    made: Made, trained: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with flipped(made.base / "model.safetensors"):
        changed = made.refusal(NAME)
    told = capsys.readouterr().out
    with moved(made.base):
        gone = made.refusal(NAME)
    for error in (changed, gone):
        assert isinstance(error, LineageError)
        assert error.message.startswith(f"the base model of {NAME} version 1 is not here as it was: ")
        assert str(made.base) in error.hint
    assert re.search(r"base model +[0-9a-f]{12} +[0-9a-f]{12} +the training cannot be repeated with it", told)
    assert trained == []
    assert not made.place.parent.exists(), "nothing is left of what never began"


def test_two_at_once_do_not_work_in_one_folder(made: Made, trained: list[str | None]) -> None:
    made.place.mkdir(parents=True)
    with jobs.held(made.place):
        error = made.refusal(NAME)
        assert made.call(NAME, "--dry-run") == 0
    assert isinstance(error, BusyError)
    assert str(made.place) in error.message
    assert trained == []
    shutil.rmtree(made.place.parent)


def test_versions_that_are_unknown_or_do_not_say_what_they_came_from_are_refused(made: Made) -> None:
    assert made.refusal("nobody").message == "there is no registered model nobody"
    assert made.refusal(f"{NAME}@9").hint == f"Versions of {NAME}: 1."
    assert made.refusal(f"{NAME}@best").message == f"{NAME} has no alias best"
    with tagged(dataset_sha256=None):
        silent = made.refusal(NAME)
    assert isinstance(silent, RegistryError)
    assert silent.message == f"{NAME} version 1 does not say from which dataset it was made: it has no tag tuneline.dataset_sha256"
    with tagged(base_model_sha256="ab" * 32):
        exchanged = made.refusal(NAME)
    assert isinstance(exchanged, LineageError)
    assert exchanged.message.startswith(f"{NAME} version 1 names the base model abababababab, and its model was made from the base model ")


def test_a_recipe_of_another_tuneline_is_refused_with_the_one_it_was_made_with(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = reproduce.lineage.find

    def found(kind: str, *rest: Any) -> Any:
        artifact = real(kind, *rest)
        if kind == "model":
            artifact.manifest.config["sorcery"] = True
        return artifact

    monkeypatch.setattr(reproduce.lineage, "find", found)
    error = made.refusal(NAME)
    assert (error.kind, error.exit_code) == ("configuration", 2)
    assert error.message.startswith(f"the recipe of {NAME} version 1: sorcery: there is no such key")
    assert str(made.model.manifest.produced_by["git_commit"]) in error.hint


def test_a_dataset_that_comes_out_otherwise_is_told_and_the_training_takes_the_recorded_one(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = reproduce.Asked(made.work, DataVersioningConfig(), Silent())
    learned = list[str]()

    def another(sources: Any, output: Path, *_: Any, **__: Any) -> Artifact:
        shutil.copytree(made.dataset.path, output)
        (output / "quarantine.jsonl").write_text('{"other": 1}\n')
        told = made.dataset.manifest
        payload = [file.path for file in told.files if file.payload]
        options: dict[str, Any] = {"inputs": told.inputs, "config": told.config, "seed": 1, "key": "k", "summary": told.summary}
        return artifacts.publish(output, "dataset", payload=payload, **options)

    def same(dataset: Artifact, *_: Any, **__: Any) -> Artifact:
        learned.append(dataset.sha256)
        return made.model

    monkeypatch.setattr(reproduce.curation, "curate", another)
    monkeypatch.setattr(reproduce.tuning, "finetune", same)
    found = reproduce.reproduce(NAME, asked, lambda _: None)
    assert found.equal is False
    told = found.as_dict()
    assert (told["dataset"]["equal"], told["model"]["equal"]) == (False, True)
    assert [(one["artifact"], one["path"], one["detail"]) for one in told["files"]] == [("dataset", "quarantine.jsonl", "other bytes")]
    assert learned == [made.dataset.sha256]
