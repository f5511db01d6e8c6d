"""Reproduction of a registered model by the real stages: equal digests, and every reason for a failure.

Long tier: reproductions that train the model again.
"""

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

from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import (
    ArtifactDamagedError,
    BusyError,
    EngineMissingError,
    RegistryError,
    TunelineError,
    UsageError,
)
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir
from components.data_curation.quality_scoring.scoring_inputs import list_scoring_inputs
from components.data_curation.stage import curate, list_sources
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.stage import Version, publish
from components.fine_tuning import training
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import register
from pipelines.cli import main as cli
from pipelines.config.customization_config import parse_values
from pipelines.provenance import reproduction
from pipelines.provenance.lineage import LineageError
from pipelines.provenance.reproduction import OUTCOME_FILENAME
from tests import json_reference
from tests.manifests import reseal
from tests.pipelines.command import COMMAND, environment
from tests.pipelines.project import write_rows
from tests.pipelines.test_lineage import damage_file, move_away
from tests.pipelines.test_pipeline import flip_bit
from tests.tiny import tiny_model

pytestmark = [pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
NAME = "again"
THREADS = "1"


@dataclass(frozen=True)
class RecordedModel:
    """A model made stage by stage in a workdir, registered and promoted, with its inputs."""

    work: Workdir
    raw: Path
    base: Path
    recipe: FineTuningConfig
    dataset: Artifact
    revision: Version
    model: Artifact

    @property
    def reproduction_folder(self) -> Path:
        return self.work.root / "reproduce" / f"{NAME}-1"

    def run_command(self, *arguments: str) -> int:
        """Run the command in this process; its errors are raised."""
        code = cli.app(["reproduce", *arguments, "--workdir", str(self.work.root)], standalone_mode=False)
        assert isinstance(code, int)
        return code

    def run_refused(self, *arguments: str) -> TunelineError:
        with pytest.raises(TunelineError) as error:
            self.run_command(*arguments)
        return error.value


def publish_evaluation(folder: Path, model: Artifact) -> Artifact:
    """Publish an evaluation that accepts the model, as the registry requires."""
    artifact_folder.claim_folder(folder, "judged")
    (folder / "evaluation.json").write_text('{"verdict": "accepted"}')
    summary = {"verdict": "accepted", "reasons": []}
    options: dict[str, Any] = {
        "inputs": [model.as_input()],
        "config": {},
        "seed": 1,
        "key": "judged",
        "summary": summary,
    }
    return artifact_folder.publish(folder, "evaluation", payload=["evaluation.json"], **options)


@pytest.fixture(scope="module")
def recorded_model(tmp_path_factory: pytest.TempPathFactory) -> RecordedModel:
    """Run the stages in sequence, as a run does."""
    folder = tmp_path_factory.mktemp("again")
    work, draft, reporter = Workdir(folder / "workdir"), folder / "draft", SilentReporter()
    base, raw = tiny_model(folder / "tiny"), folder / "raw.jsonl"
    write_rows(raw)
    examples = {label: [str(folder / f"{label}.txt")] for label in ("good", "bad")}
    for label, [path] in examples.items():
        Path(path).write_text("".join(f"{label} row {number}\n" for number in range(20)))
    curation = {"sources": [str(raw)], "near_duplicate_threshold": 0.95, "answer_min_words": 1000}
    curation |= {"quality_scores": {"classifier": examples}}
    fractions = {"train": 0.6, "validation": 0.1, "test": 0.3}
    tuning = {"base_model": str(base), "max_steps": 24, "batch_size": 4, "learning_rate": 5e-3, "validation_rows": 0}
    sections = {
        "data_curation": {**curation, "fractions": fractions},
        "fine_tuning": {**tuning, "checkpoint_every": 3},
    }
    config = parse_values(sections, "the test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.setenv("TUNELINE_THREADS", THREADS)
        for name in ("TUNELINE_STORE", "TUNELINE_STATE"):
            patch.delenv(name, raising=False)
        work.store.mkdir(parents=True)
        sources = list_sources([str(raw)], folder)
        scoring = list_scoring_inputs(config.data_curation.quality_scores, folder)
        dataset = artifact_store.add_artifact(
            work.store, curate(sources, draft, config.data_curation, seed=1, reporter=reporter, scoring=scoring)
        )
        revision = publish(dataset, config.data_versioning, workdir=work.root, reporter=reporter)
        options: dict[str, Any] = {"seed": 1, "state": work.state, "reporter": reporter, "dataset_uri": revision.uri}
        model = artifact_store.add_artifact(work.store, finetune(dataset, draft, config.fine_tuning, **options))
        registry_config = ModelRegistryConfig(name=NAME)
        register(
            model,
            publish_evaluation(folder / "judged", model),
            None,
            registry_config,
            reporter=reporter,
            dataset_version=revision.model_dump(),
        )
        mlflow_tracking.connect().MlflowClient().set_registered_model_alias(NAME, "champion", "1")
    return RecordedModel(work, raw, base, config.fine_tuning, dataset, revision, model)


@pytest.fixture(autouse=True)
def environment_variables(recorded_model: RecordedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", recorded_model.work.tracking_uri)
    monkeypatch.setenv("TUNELINE_THREADS", "2")  # not the recorded count


@pytest.fixture
def training_threads(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Record the thread setting of every training."""
    threads, original = list[str | None](), training.train

    def train(*arguments: Any, **options: Any) -> Any:
        threads.append(os.environ.get("TUNELINE_THREADS"))
        return original(*arguments, **options)

    monkeypatch.setattr(training, "train", train)
    return threads


@contextmanager
def override_tags(**values: str | None) -> Iterator[None]:
    """Change the version's tags during a block; None removes one."""
    client = mlflow_tracking.connect().MlflowClient()
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


def digest_files(folder: Path) -> dict[str, str]:
    """Return every file below a folder with its digest."""
    return {
        path.relative_to(folder).as_posix(): hashing.sha256_file(path) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.long
def test_champion_is_reproduced_with_equal_digests(
    recorded_model: RecordedModel, training_threads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest_files(recorded_model.work.root)
    assert recorded_model.run_command(NAME, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["name"], result["version"], result["alias"]) == (NAME, "1", "champion")
    sha256, reason = recorded_model.dataset.sha256, "all raw files are unchanged"
    assert result["dataset"] == {
        "recorded": sha256,
        "reproduced": sha256,
        "equal": True,
        "how": "curated",
        "why": reason,
    }
    assert result["model"] == {
        "recorded": recorded_model.model.sha256,
        "reproduced": recorded_model.model.sha256,
        "equal": True,
    }
    assert (result["differences"], result["files"]) == ([], [])
    assert result["seconds"] > 0
    assert json_reference.find_undocumented_keys(["reproduce"], result) == []
    assert training_threads == [THREADS], "with the threads that were recorded, not those of the environment"
    assert digest_files(recorded_model.work.root) == before, "the reproduction changed the workdir"
    assert os.environ["TUNELINE_THREADS"] == "2"


def kill_during_training(recorded_model: RecordedModel) -> None:
    """Start the command in a child process and kill it once its first checkpoint is complete: the second one exists."""
    command = [*COMMAND, "reproduce", NAME, "--workdir", str(recorded_model.work.root)]
    with (recorded_model.work.root.parent / "killed.log").open("w") as log:
        child = subprocess.Popen(
            command,
            cwd=recorded_model.work.root.parent,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    while len(list(recorded_model.reproduction_folder.glob("state/fine_tuning/*/checkpoint-*"))) < 2:
        assert child.poll() is None, (recorded_model.work.root.parent / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.stress
def test_reproduction_killed_in_training_resumes_with_equal_digests(
    recorded_model: RecordedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_during_training(recorded_model)
    assert not (recorded_model.reproduction_folder / "model" / "manifest.json").exists()
    curated_at = (recorded_model.reproduction_folder / "dataset" / "manifest.json").stat().st_mtime_ns
    assert recorded_model.run_command(f"{NAME}@1", "--keep", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["alias"] is None
    model = artifact_folder.read(recorded_model.reproduction_folder / "model", "model")
    assert model.sha256 == result["model"]["reproduced"] == recorded_model.model.sha256
    assert model.manifest.summary["resumed_from"] >= 3
    assert (recorded_model.reproduction_folder / "dataset" / "manifest.json").stat().st_mtime_ns == curated_at, (
        "the dataset was curated twice"
    )
    assert json.loads((recorded_model.reproduction_folder / OUTCOME_FILENAME).read_text()) == result
    shutil.rmtree(recorded_model.reproduction_folder)


@pytest.mark.stress
def test_changed_source_uses_the_revision_and_no_earlier_result(
    recorded_model: RecordedModel, training_threads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_model.reproduction_folder.mkdir(parents=True)
    shutil.copytree(recorded_model.model.path, recorded_model.reproduction_folder / "model")
    (recorded_model.reproduction_folder / OUTCOME_FILENAME).write_text("{}")
    with damage_file(recorded_model.raw):
        assert recorded_model.run_command(f"{NAME}@champion") == 0
    short, lines = recorded_model.dataset.sha256[:12], capsys.readouterr().out.splitlines()
    assert lines == [
        f"This environment matches that of {NAME} version 1; identical digests are expected.",
        f"dataset  {short} equal  taken from its revision {recorded_model.revision.uri}: raw.jsonl has changed since curation",
        f"model    {recorded_model.model.sha256[:12]} equal  trained again, seed 1",
        f"{NAME} version 1 is reproduced: dataset and model have the recorded digests.",
    ]
    assert training_threads == [THREADS], "an earlier result was reused"
    assert not recorded_model.reproduction_folder.parent.exists()


@pytest.fixture(scope="module")
def other_seed(recorded_model: RecordedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registered model that was trained with seed 2 and records seed 1."""
    folder = tmp_path_factory.mktemp("seed") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", recorded_model.work.tracking_uri)
        patch.setenv("TUNELINE_THREADS", THREADS)
        options: dict[str, Any] = {
            "state": recorded_model.work.state,
            "reporter": SilentReporter(),
            "dataset_uri": recorded_model.revision.uri,
        }
        model = finetune(recorded_model.dataset, folder, recorded_model.recipe, seed=2, **options)
        key = recorded_model.model.manifest.produced_by["key"]
        reseal(folder, seed=1, produced_by={**model.manifest.produced_by, "key": key})
        forged = artifact_folder.read(folder, "model")
        registry_config = ModelRegistryConfig(name="lying")
        registration = register(
            forged,
            publish_evaluation(folder.with_name("judged"), model),
            None,
            registry_config,
            reporter=SilentReporter(),
        )
        shutil.rmtree(folder)  # the copy in MLflow remains
    return f"{registration.name}@{registration.version}"


@pytest.mark.stress
def test_model_with_a_wrong_seed_differs_tensor_by_tensor(
    recorded_model: RecordedModel, other_seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = code_digest.result_packages()
    monkeypatch.setattr(code_digest, "result_packages", lambda: {**packages, "mlflow": "0.1"})
    assert recorded_model.run_command(other_seed, "--from-revision") == 1
    out = capsys.readouterr().out
    assert re.search(r"mlflow +\S+ +0\.1 +no effect: used only to transfer files", out)
    assert re.search(
        r"model/adapter_model\.safetensors: (\d+) of \1 tensors differ; largest difference: 0\.\d+ in \S+lora_[AB]\.weight",
        out,
    )
    assert f"dataset  {recorded_model.dataset.sha256[:12]} equal  taken from its revision" in out
    assert out.rstrip().endswith(
        "lying version 1 is not reproduced: the model differs from that recorded, and no difference in the environment explains this; "
        "the records might not match the original training run."
    )


def test_dry_run_reports_version_differences_and_writes_nothing(
    recorded_model: RecordedModel,
    training_threads: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packages = code_digest.result_packages()
    monkeypatch.setattr(code_digest, "result_packages", lambda: {**packages, "torch": "0.1", "pyarrow": "0.2"})
    before = digest_files(recorded_model.work.root)
    assert recorded_model.run_command(NAME, "--dry-run", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [
        (difference["what"], difference["recorded"], difference["here"], difference["effect"])
        for difference in result["differences"]
    ] == [
        ("torch", packages["torch"], "0.1", "may change the model"),
        ("pyarrow", packages["pyarrow"], "0.2", "may change the dataset and the model"),
    ]
    assert [(result[kind]["reproduced"], result[kind]["equal"]) for kind in ("dataset", "model")] == [(None, None)] * 2
    assert result["dataset"]["how"] == "curated"
    assert recorded_model.run_command(NAME, "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(packages['torch'])} +0\.1 +may change the model", out)
    assert out.endswith(
        "would be curated again: all raw files are unchanged\nmodel    would be trained again, seed 1\nNothing was run.\n"
    )
    assert training_threads == []
    assert digest_files(recorded_model.work.root) == before


def plan_dataset(recorded_model: RecordedModel, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Return the method of obtaining the dataset, and the reason."""
    recorded_model.run_command(NAME, "--dry-run", "--json", *arguments)
    dataset = json.loads(capsys.readouterr().out)["dataset"]
    return dataset["how"], dataset["why"]


def test_missing_or_changed_sources_determine_the_dataset_method(
    recorded_model: RecordedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_dataset(recorded_model, capsys, "--from-revision") == ("revision", "--from-revision was given")
    with move_away(recorded_model.raw):
        method, reason = plan_dataset(recorded_model, capsys)
        assert method == "revision"
        assert f"{recorded_model.raw}' does not exist" in reason
        with override_tags(dataset_uri="dataset"):
            assert plan_dataset(recorded_model, capsys)[0] == "revision", "the revision is found by its digest"
            unpublished = ("--set", "data_versioning.name=other")
            assert plan_dataset(recorded_model, capsys, *unpublished)[0] == "store"
            error = recorded_model.run_refused(NAME, "--from-revision", *unpublished)
    assert isinstance(error, UsageError)
    assert error.message == f"--from-revision: the dataset of {NAME} version 1 was not published as a revision"


@pytest.mark.parametrize("kind", [DataVersioningError, EngineMissingError, ArtifactDamagedError])
def test_unavailable_source_repository_uses_the_revision(
    recorded_model: RecordedModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[TunelineError],
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind("dvc:///gone@main:rows.jsonl cannot be had", hint="Restore it.")

    monkeypatch.setattr(reproduction.curation, "list_sources", fail)
    assert plan_dataset(recorded_model, capsys) == ("revision", "dvc:///gone@main:rows.jsonl cannot be had")


def test_dataset_is_curated_again_or_reported_as_lost(
    recorded_model: RecordedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with move_away(recorded_model.dataset.path):
        assert plan_dataset(recorded_model, capsys) == ("curated", "all raw files are unchanged")
        with override_tags(dataset_uri="dataset"):
            error = recorded_model.run_refused(NAME, "--set", "data_versioning.name=other")
    assert isinstance(error, LineageError)
    assert (
        error.message
        == f"the dataset {recorded_model.dataset.sha256[:12]} of {NAME} version 1 is no longer in any store and was not published"
    )
    assert "backup" in error.hint


def test_damaged_revision_is_reported_with_its_object(
    recorded_model: RecordedModel, training_threads: list[str | None], tmp_path: Path
) -> None:
    remote = recorded_model.work.root / "dvc-remote"
    shutil.copytree(remote, tmp_path / "whole")
    largest = max((path for path in remote.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    flip_bit(largest)
    try:
        error = recorded_model.run_refused(NAME, "--from-revision")
    finally:
        shutil.rmtree(remote)
        shutil.copytree(tmp_path / "whole", remote)
        shutil.rmtree(recorded_model.reproduction_folder.parent, ignore_errors=True)
    assert error.kind == "artifact_damaged"
    assert f"{largest.parent.name}/{largest.name}" in error.message
    assert training_threads == []


def test_missing_revision_is_reported_before_any_work(
    recorded_model: RecordedModel, training_threads: list[str | None]
) -> None:
    with override_tags(dataset_uri=recorded_model.revision.uri.replace(recorded_model.revision.rev, "0" * 40)):
        error = recorded_model.run_refused(NAME, "--from-revision")
    assert error.kind == "data_versioning"
    assert "has no published revision 000000000000 of dataset" in error.message
    assert "dataset-v1" in error.hint
    assert training_threads == []


def test_missing_or_changed_base_model_prevents_the_training(
    recorded_model: RecordedModel, training_threads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with damage_file(recorded_model.base / "model.safetensors"):
        changed_error = recorded_model.run_refused(NAME)
    output = capsys.readouterr().out
    with move_away(recorded_model.base):
        missing_error = recorded_model.run_refused(NAME)
    for error in (changed_error, missing_error):
        assert isinstance(error, LineageError)
        assert error.message.startswith(f"the base model of {NAME} version 1 is missing or has changed: ")
        assert str(recorded_model.base) in error.hint
    assert re.search(r"base model +[0-9a-f]{12} +[0-9a-f]{12} +prevents the reproduction", output)
    assert training_threads == []
    assert not recorded_model.reproduction_folder.parent.exists(), "the refused reproduction left its folder"


def test_concurrent_reproductions_of_a_version_are_refused(
    recorded_model: RecordedModel, training_threads: list[str | None]
) -> None:
    recorded_model.reproduction_folder.mkdir(parents=True)
    with job_folders.folder_lock(recorded_model.reproduction_folder):
        error = recorded_model.run_refused(NAME)
        assert recorded_model.run_command(NAME, "--dry-run") == 0
    assert isinstance(error, BusyError)
    assert str(recorded_model.reproduction_folder) in error.message
    assert training_threads == []
    shutil.rmtree(recorded_model.reproduction_folder.parent)


def test_unknown_versions_and_versions_without_input_tags_are_refused(recorded_model: RecordedModel) -> None:
    assert recorded_model.run_refused("nobody").message == "the registered model nobody does not exist"
    assert recorded_model.run_refused(f"{NAME}@9").hint == "Choose one of: 1."
    assert f"{NAME} has no alias best; aliases: " in recorded_model.run_refused(f"{NAME}@best").message
    with override_tags(dataset_sha256=None):
        missing_tag = recorded_model.run_refused(NAME)
    assert isinstance(missing_tag, RegistryError)
    assert (
        missing_tag.message
        == f"{NAME} version 1 does not record its dataset: the tag tuneline.dataset_sha256 is missing"
    )
    with override_tags(base_model_sha256="ab" * 32):
        wrong_base = recorded_model.run_refused(NAME)
    assert isinstance(wrong_base, LineageError)
    assert wrong_base.message.startswith(
        f"{NAME} version 1 records the base model digest abababababab, but the base model digest of its model is "
    )


def test_recipe_of_an_incompatible_tuneline_is_refused_with_its_version(
    recorded_model: RecordedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = reproduction.lineage.find_artifact

    def find_artifact(kind: str, *rest: Any) -> Any:
        artifact = original(kind, *rest)
        if kind == "model":
            artifact.manifest.config["sorcery"] = True
        return artifact

    monkeypatch.setattr(reproduction.lineage, "find_artifact", find_artifact)
    error = recorded_model.run_refused(NAME)
    assert (error.kind, error.exit_code) == ("configuration", 2)
    assert error.message.startswith(f"the recipe of {NAME} version 1: sorcery: unknown key")
    assert str(recorded_model.model.manifest.produced_by["git_commit"]) in error.hint


def test_differing_dataset_is_reported_and_the_recorded_one_is_used(
    recorded_model: RecordedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = reproduction.ReproductionRequest(recorded_model.work, DataVersioningConfig(), SilentReporter())
    training_datasets = list[str]()

    def curate_other(sources: Any, output: Path, *_: Any, **__: Any) -> Artifact:
        shutil.copytree(recorded_model.dataset.path, output)
        (output / "quarantine.jsonl").write_text('{"other": 1}\n')
        manifest = recorded_model.dataset.manifest
        payload = [file.path for file in manifest.files if file.payload]
        options: dict[str, Any] = {
            "inputs": manifest.inputs,
            "config": manifest.config,
            "seed": 1,
            "key": "k",
            "summary": manifest.summary,
        }
        return artifact_folder.publish(output, "dataset", payload=payload, **options)

    def skip_training(dataset: Artifact, *_: Any, **__: Any) -> Artifact:
        training_datasets.append(dataset.sha256)
        return recorded_model.model

    monkeypatch.setattr(reproduction.curation, "curate", curate_other)
    monkeypatch.setattr(reproduction.tuning, "finetune", skip_training)
    comparison = reproduction.reproduce(NAME, request, lambda _: None)
    assert comparison.is_equal is False
    result = comparison.as_dict()
    assert (result["dataset"]["equal"], result["model"]["equal"]) == (False, True)
    assert [(file["artifact"], file["path"], file["detail"]) for file in result["files"]] == [
        ("dataset", "quarantine.jsonl", "different bytes")
    ]
    assert training_datasets == [recorded_model.dataset.sha256]
