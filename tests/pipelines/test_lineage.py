"""Lineage: a chain made by the real stages is traced, and every broken link is reported.

Long tier: the output of the command in child processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.stage import curate, list_sources
from components.data_versioning.stage import Version, publish
from components.evaluation.stage import evaluate
from components.fine_tuning.stage import finetune
from components.model_registry.stage import Registration, promote, register
from components.triton_packaging.stage import package
from pipelines.config.customization_config import Customization, parse_values
from pipelines.provenance.exports import dossier, ml_bom
from pipelines.provenance.exports.version_facts import collect_facts
from pipelines.provenance.lineage import Lineage, LineageError, Link, print_tree, summarize, trace
from tests.manifests import read_fields, reseal
from tests.pipelines.command import COMMAND, ROOT, answer, answer_in_process, environment, refusal, tuneline
from tests.pipelines.project import write_rows
from tests.pipelines.test_exports import check_bom
from tests.pipelines.test_pipeline import flip_bit
from tests.tiny import tiny_model

pytestmark = [pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
NAME = "traced"
ORDER = ["version", "repository", "evaluation", "model", "base_model", "dataset", "revision", "raw"]


@dataclass(frozen=True)
class Chain:
    """A customization made stage by stage in a workdir, registered and promoted."""

    work: Workdir
    config: Customization
    dataset: Artifact
    revision: Version
    model: Artifact
    evaluation: Artifact
    repository: Artifact
    registered: Registration

    @property
    def raw(self) -> Path:
        return self.work.root.parent / "raw.jsonl"

    def trace(self, reference: str = f"{NAME}@champion") -> Lineage:
        return trace(reference, self.work, self.config.data_versioning, SilentReporter())

    def find_broken_link(self) -> tuple[Link, LineageError]:
        """Return the only broken link, and the error that reports it."""
        lineage = self.trace()
        [link] = lineage.broken_links
        with pytest.raises(LineageError) as error:
            lineage.raise_if_broken()
        assert error.value.kind == "lineage"
        assert error.value.exit_code == 1
        assert error.value.hint
        return link, error.value


def build_config(folder: Path) -> Customization:
    values: dict[str, Any] = {
        "data_curation": {
            "sources": [str(folder / "raw.jsonl")],
            "near_duplicate_threshold": 0.95,
            "answer_min_words": 1000,
            "fractions": {"train": 0.6, "validation": 0.1, "test": 0.3},
        },
        "fine_tuning": {
            "base_model": str(folder / "tiny"),
            "max_steps": 12,
            "batch_size": 4,
            "learning_rate": 5e-3,
            "validation_rows": 0,
        },
        "evaluation": {"suite": "none", "generations": 0, "bootstrap_samples": 1000},
        "triton_packaging": {"prove": False},
        "model_registry": {"name": NAME},
    }
    return parse_values(values, "the test")


@pytest.fixture(scope="module")
def registered_chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Run the stages in sequence, as a run does."""
    folder = tmp_path_factory.mktemp("traced")
    work, draft, reporter = Workdir(folder / "workdir"), folder / "draft", SilentReporter()
    tiny_model(folder / "tiny")
    write_rows(folder / "raw.jsonl")
    config = build_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.delenv("TUNELINE_STORE", raising=False)
        work.store.mkdir(parents=True)
        sources = list_sources(config.data_curation.sources, folder)
        dataset = artifact_store.add_artifact(
            work.store, curate(sources, draft, config.data_curation, seed=1, reporter=reporter)
        )
        revision = publish(dataset, config.data_versioning, workdir=work.root, reporter=reporter)
        draft_model = finetune(
            dataset, draft, config.fine_tuning, seed=1, state=work.state, reporter=reporter, dataset_uri=revision.uri
        )
        model = artifact_store.add_artifact(work.store, draft_model)
        opened, options = model_loading.open_model_artifact(model), {"seed": 1, "reporter": reporter}
        draft_evaluation = evaluate(
            opened, dataset, draft, config.evaluation, incumbent=None, state=work.state, **options
        )
        evaluation = artifact_store.add_artifact(work.store, draft_evaluation)
        repository = artifact_store.add_artifact(work.store, package(opened, draft, config.triton_packaging, **options))
        dataset_version = revision.model_dump()
        registration = register(
            model, evaluation, repository, config.model_registry, reporter=reporter, dataset_version=dataset_version
        )
        promote(NAME, registration.version, force=True, reason="the test", reporter=reporter)
    return Chain(work, config, dataset, revision, model, evaluation, repository, registration)


@pytest.fixture
def chain(registered_chain: Chain, monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registered_chain.work.tracking_uri)
    return registered_chain


@contextmanager
def move_away(path: Path) -> Iterator[None]:
    """Move a file or folder away during a block."""
    backup = path.with_name(f"{path.name}.aside")
    path.rename(backup)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        backup.rename(path)


@contextmanager
def damage_file(path: Path) -> Iterator[None]:
    """Flip one bit of a file during a block; objects of a DVC remote are read-only."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    flip_bit(path)
    try:
        yield
    finally:
        flip_bit(path)
        path.chmod(mode)


@contextmanager
def override_tags(chain: Chain, **values: str) -> Iterator[None]:
    """Change the version's tags during a block."""
    client = mlflow_tracking.connect().MlflowClient()
    before = chain.registered.tags
    for name, value in values.items():
        client.set_model_version_tag(NAME, "1", f"tuneline.{name}", value)
    try:
        yield
    finally:
        for name in values:
            client.set_model_version_tag(NAME, "1", f"tuneline.{name}", before[f"tuneline.{name}"])


def get_statuses(lineage: Lineage) -> dict[str, str]:
    return {link.kind: link.status for link in lineage.chain}


def test_intact_chain_leads_from_the_version_to_the_raw_file(chain: Chain) -> None:
    lineage = chain.trace()
    lineage.raise_if_broken()
    assert [link.kind for link in lineage.chain] == ORDER
    assert set(get_statuses(lineage).values()) == {"intact"}
    by_kind = {link.kind: link for link in lineage.chain}
    for kind in ("repository", "evaluation", "model", "dataset"):
        artifact: Artifact = getattr(chain, kind)
        assert by_kind[kind].sha256 == artifact.sha256
        assert by_kind[kind].uri == artifact.path.as_uri()
    assert by_kind["revision"].sha256 == chain.dataset.sha256
    assert by_kind["revision"].uri == chain.revision.uri
    assert by_kind["revision"].uri.startswith("dvc://")
    assert by_kind["raw"].sha256 == list_sources([str(chain.raw)], Path.cwd())[0].sha256
    assert by_kind["raw"].uri == chain.raw.as_uri()
    assert summarize(lineage) == "All digests match, from the package back to the revision and the raw files."


def test_inputs_of_the_links_describe_the_tree(chain: Chain) -> None:
    lineage = chain.trace()
    digests = {link.sha256 for link in lineage.chain}
    inputs = {link.kind: link.inputs for link in lineage.chain}
    assert all(set(used) <= digests for used in inputs.values()), "every input is a link of the chain"
    assert inputs["version"] == [chain.repository.sha256, chain.evaluation.sha256, chain.model.sha256]
    base = lineage.get_links("base_model")[0].sha256
    assert set(inputs["repository"]) == {chain.model.sha256, base}
    assert set(inputs["evaluation"]) == {chain.model.sha256, chain.dataset.sha256, base}
    assert set(inputs["model"]) == {chain.dataset.sha256, base}
    assert inputs["dataset"] == inputs["revision"] == [lineage.get_links("raw")[0].sha256]
    assert inputs["raw"] == inputs["base_model"] == []


@pytest.mark.parametrize(
    "reference", [NAME, f"{NAME}@champion", f"{NAME}@1", f"{NAME}/1", f"{NAME}@candidate", f"models:/{NAME}@champion"]
)
def test_version_is_found_by_alias_or_number(chain: Chain, reference: str) -> None:
    lineage = chain.trace(reference)
    assert (lineage.name, lineage.version) == (NAME, "1")
    assert lineage.alias == (
        None if reference.endswith("1") else "candidate" if "candidate" in reference else "champion"
    )


def find_largest_payload(artifact: Artifact) -> Path:
    return artifact.path / max((f for f in artifact.manifest.files if f.payload), key=lambda f: f.bytes).path


@pytest.mark.parametrize("kind", ["repository", "evaluation", "model", "dataset"])
def test_damaged_artifact_is_reported_with_its_file(chain: Chain, kind: str) -> None:
    path = find_largest_payload(getattr(chain, kind))
    with damage_file(path):
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == (kind, "damaged")
    assert error.message.startswith(f"the lineage of {NAME} version 1 is broken in 1 link: {kind} {link.sha256[:12]}: ")
    relative = path.relative_to(getattr(chain, kind).path)
    assert (
        f"{relative} of the {kind} in {getattr(chain, kind).path} has changed since it was published" in error.message
    )
    assert "Restore the file" in error.hint


def test_changed_base_model_is_reported_with_its_digests(chain: Chain) -> None:
    with damage_file(chain.raw.parent / "tiny" / "model.safetensors"):
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == ("base_model", "damaged")
    assert re.search(
        r"the files of .*/tiny: base model digest is [0-9a-f]{12}; the version records [0-9a-f]{12}", error.message
    )


def test_absent_base_model_is_unchecked_and_breaks_no_link(chain: Chain) -> None:
    with move_away(chain.raw.parent / "tiny"):
        lineage = chain.trace()
    lineage.raise_if_broken()
    [base] = lineage.get_links("base_model")
    assert base.status == "unchecked"
    assert "is not on this machine" in summarize(lineage)
    assert lineage.as_dict()["intact"] is False


def test_missing_package_is_reported_with_the_searched_locations(chain: Chain) -> None:
    path = chain.repository.path
    with move_away(path):
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == ("repository", "missing")
    assert f"the repository was not found in {path.as_uri()}, {chain.work.store}" in error.message
    assert "restore the artifact from a backup" in error.hint


def test_missing_evaluation_is_read_from_mlflow(chain: Chain) -> None:
    with move_away(chain.evaluation.path):
        lineage = chain.trace()
    lineage.raise_if_broken()
    [link] = lineage.get_links("evaluation")
    version = f"{chain.registered.name}/{chain.registered.version}"
    assert (link.status, link.uri) == ("intact", f"models:/{version}/evaluation")


def copy_artifact(chain: Chain, kind: str, destination: Path) -> str:
    """Copy an artifact and return the URI of the copy."""
    shutil.copytree(getattr(chain, kind).path, destination)
    return destination.as_uri()


def test_store_copy_replaces_a_damaged_one_at_the_recorded_uri(chain: Chain, tmp_path: Path) -> None:
    uri = copy_artifact(chain, "evaluation", tmp_path / "copy")
    for damage in ("{", '{"schema": "broken"}', None):
        manifest = tmp_path / "copy" / "manifest.json"
        if damage is None:  # an intact manifest of a damaged payload
            shutil.copyfile(chain.evaluation.path / "manifest.json", manifest)
            flip_bit(tmp_path / "copy" / "evaluation.json")
        else:
            manifest.write_text(damage)
        with override_tags(chain, evaluation_store_uri=uri):
            lineage = chain.trace()
        lineage.raise_if_broken()
        assert lineage.get_links("evaluation")[0].uri == chain.evaluation.path.as_uri()


def test_damaged_copy_at_the_recorded_uri_is_reported_first(chain: Chain, tmp_path: Path) -> None:
    uri = copy_artifact(chain, "evaluation", tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").write_text("{")
    with override_tags(chain, evaluation_store_uri=uri), damage_file(chain.evaluation.path / "evaluation.json"):
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == ("evaluation", "damaged")
    assert f"{tmp_path / 'copy' / 'manifest.json'} is unreadable" in error.message


@pytest.mark.parametrize("kind", ["repository", "evaluation", "model", "dataset"])
def test_unreadable_file_breaks_only_its_link(chain: Chain, kind: str) -> None:
    manifest = getattr(chain, kind).path / "manifest.json"
    with move_away(manifest):
        manifest.mkdir()  # a folder cannot be opened by root either, for whom permissions do not apply
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == (kind, "damaged")
    assert f"{manifest} cannot be read: Is a directory" in error.message
    assert "permissions" in error.hint


def test_unreadable_base_model_breaks_only_its_link(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> None:
        raise PermissionError(13, "Permission denied", f"{source}/model.safetensors")

    monkeypatch.setattr(model_loading, "find_local_base_model", refuse)
    link, error = chain.find_broken_link()
    assert (link.kind, link.status) == ("base_model", "damaged")
    assert "tiny/model.safetensors cannot be read: Permission denied" in error.message


def test_model_missing_in_the_store_is_read_from_mlflow(chain: Chain) -> None:
    with move_away(chain.model.path):
        lineage = chain.trace()
    lineage.raise_if_broken()
    assert lineage.get_links("model")[0].uri == f"models:/{NAME}/1"
    assert set(get_statuses(lineage).values()) == {"intact"}


def test_dataset_missing_in_the_store_is_read_from_its_revision(chain: Chain) -> None:
    with move_away(chain.dataset.path):
        lineage = chain.trace()
    lineage.raise_if_broken()
    assert lineage.get_links("dataset")[0].uri == chain.revision.uri
    assert set(get_statuses(lineage).values()) == {"intact"}
    assert lineage.get_links("raw")[0].uri == chain.raw.as_uri()


def test_lost_model_breaks_the_chain(chain: Chain) -> None:
    with move_away(chain.model.path), move_away(chain.work.root / "mlflow-artifacts"):
        lineage = chain.trace()
    assert {link.kind for link in lineage.broken_links} == {"version", "model"}
    with pytest.raises(LineageError, match="broken in 2 links") as error:
        lineage.raise_if_broken()
    assert f"MLflow does not return the files of {NAME} version 1" in error.value.message
    assert "the model was not found in" in error.value.message
    assert {
        link.status for link in lineage.get_links("dataset") + lineage.get_links("revision") + lineage.get_links("raw")
    } == {"intact"}, "the trace stopped at the lost model"


def test_evaluation_of_another_model_is_detected(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain.evaluation.path, tmp_path / "other")
    inputs = json.dumps(read_fields(tmp_path / "other")["inputs"]).replace(chain.model.sha256, "ab" * 32)
    reseal(tmp_path / "other", inputs=json.loads(inputs))
    with override_tags(chain, evaluation_store_uri=(tmp_path / "other").as_uri()):
        link, error = chain.find_broken_link()
    assert link.kind == "evaluation"
    assert f": model digest is {'ab' * 6}; the version records {chain.model.sha256[:12]}" in error.message
    assert "from a backup" in error.hint


def test_forged_verdict_is_detected(chain: Chain) -> None:
    recorded = chain.registered.tags["tuneline.verdict"]
    with override_tags(chain, verdict="splendid"):
        link, error = chain.find_broken_link()
    assert link.kind == "evaluation"
    assert f"the verdict in evaluation.json is {recorded}; the version records splendid" in error.message


def test_wrong_dataset_tag_conflicts_with_package_and_model(chain: Chain) -> None:
    with override_tags(chain, dataset_sha256="cd" * 32):
        lineage = chain.trace()
    details = {link.kind: link.detail for link in lineage.broken_links}
    assert set(details) == {"repository", "evaluation", "model", "dataset", "revision"}
    assert details["repository"].startswith(
        f"config.pbtxt of the repository: dataset digest is {chain.dataset.sha256[:12]}"
    )
    assert (
        details["revision"]
        == f"the revision dataset-v1: dataset digest is {chain.dataset.sha256[:12]}; the version records {'cd' * 6}"
    )


def test_wrong_model_tag_is_detected(chain: Chain) -> None:
    with override_tags(chain, model_sha256="ef" * 32):
        lineage = chain.trace()
    version = lineage.get_links("version")[0]
    assert (
        version.detail
        == f"the version's files in MLflow: model digest is {chain.model.sha256[:12]}; the version records {'ef' * 6}"
    )
    assert {"version", "repository", "evaluation", "model"} <= {link.kind for link in lineage.broken_links}


def find_remote_object(chain: Chain) -> Path:
    """Return an object of the DVC remote that is a file of the dataset."""
    return next(p for p in sorted((chain.work.root / "dvc-remote").rglob("*")) if p.is_file() and p.suffix != ".dir")


def test_missing_remote_object_breaks_only_the_revision(chain: Chain) -> None:
    path = find_remote_object(chain)
    with move_away(path):
        link, error = chain.find_broken_link()
    assert (link.kind, link.status) == ("revision", "damaged")
    assert (
        f"the DVC remote {chain.work.root / 'dvc-remote'} has missing or damaged objects: datasets/dataset/"
        in error.message
    )
    assert f"object {path.parent.name}/{path.name}" in error.message
    assert "Publish the dataset again" in error.hint


def test_changed_remote_object_breaks_the_revision(chain: Chain) -> None:
    backup = chain.work.root / "dvc-remote.aside"
    shutil.copytree(chain.work.root / "dvc-remote", backup)
    try:
        path = find_remote_object(chain)
        path.chmod(0o644)
        flip_bit(path)
        link, error = chain.find_broken_link()
    finally:
        shutil.rmtree(chain.work.root / "dvc-remote")
        backup.rename(chain.work.root / "dvc-remote")
    assert link.kind == "revision"
    assert f"object {path.parent.name}/{path.name}" in error.message


def test_missing_revision_is_reported_with_the_existing_ones(chain: Chain) -> None:
    other = chain.revision.uri.replace(chain.revision.rev, "0" * 40)
    with override_tags(chain, dataset_uri=other):
        link, error = chain.find_broken_link()
    assert link.kind == "revision"
    assert f"{chain.work.root / 'data-repository'} has no published revision 000000000000 of dataset" in error.message
    assert f"dataset-v1 ({chain.revision.rev[:12]})" in error.hint


def test_wrong_md5_tag_is_detected(chain: Chain) -> None:
    with override_tags(chain, dataset_md5="0" * 32 + ".dir"):
        link, error = chain.find_broken_link()
    assert link.kind == "revision"
    assert f": md5 is {chain.revision.md5}; the version records {'0' * 32}.dir" in error.message


def test_moved_data_repository_is_found_by_the_configuration(chain: Chain) -> None:
    uri = chain.revision.uri.replace(str(chain.work.root), "/nowhere/any/more")
    with override_tags(chain, dataset_uri=uri):
        lineage = chain.trace()
    lineage.raise_if_broken()
    assert lineage.get_links("revision")[0].status == "intact"


def test_changed_raw_file_is_reported_and_breaks_no_link(chain: Chain) -> None:
    with damage_file(chain.raw):
        lineage = chain.trace()
    lineage.raise_if_broken()
    [raw] = lineage.get_links("raw")
    assert raw.status == "changed"
    assert re.fullmatch(r"raw.jsonl has changed since curation; its digest is now [0-9a-f]{12}", raw.detail)
    assert "its original digest is recorded in the dataset" in summarize(lineage)
    assert lineage.as_dict()["intact"] is False


def test_missing_raw_file_is_reported_and_breaks_no_link(chain: Chain) -> None:
    with move_away(chain.raw):
        lineage = chain.trace()
    lineage.raise_if_broken()
    [raw] = lineage.get_links("raw")
    assert (raw.status, raw.uri) == ("missing", "raw.jsonl")
    assert "raw.jsonl no longer exists" in summarize(lineage)


def trace_refusal(chain: Chain, reference: str) -> TunelineError:
    with pytest.raises(TunelineError) as error:
        chain.trace(reference)
    return error.value


def test_unknown_references_are_reported_with_the_existing_ones(chain: Chain) -> None:
    unknown = trace_refusal(chain, "nobody@champion")
    assert (unknown.kind, unknown.message, unknown.hint) == (
        "registry",
        "the registered model nobody does not exist",
        f"Choose one of: {NAME}.",
    )
    alias = trace_refusal(chain, f"{NAME}@best")
    assert alias.message == (
        f"{NAME} has no alias best; aliases: candidate (version 1), challenger (version 1), champion (version 1); versions: 1"
    )
    assert alias.hint == "Choose an existing alias or version."
    version = trace_refusal(chain, f"{NAME}/9")
    assert (version.message, version.hint) == (f"{NAME} has no version 9", "Choose one of: 1.")
    wrong = trace_refusal(chain, "a@b@c")
    assert (wrong.kind, wrong.exit_code) == ("usage", 2)
    assert "NAME@ALIAS" in wrong.hint


def test_version_not_registered_by_tuneline_is_refused(chain: Chain) -> None:
    client = mlflow_tracking.connect().MlflowClient()
    client.create_registered_model("foreign")
    try:
        client.create_model_version("foreign", "/somewhere/model")
        error = trace_refusal(chain, "foreign/1")
    finally:
        client.delete_registered_model("foreign")
    assert error.kind == "registry"
    assert error.message == "foreign version 1 was not registered by tuneline, so its origin is unknown"
    assert "tuneline register" in error.hint


def test_dataset_registered_by_its_folder_is_found_by_its_digest(chain: Chain) -> None:
    with override_tags(chain, dataset_uri="dataset"):
        lineage = chain.trace()
        unpublished = chain.config.data_versioning.model_copy(update={"name": "other"})
        without_revision = trace(NAME, chain.work, unpublished, SilentReporter())
    lineage.raise_if_broken()
    assert lineage.get_links("revision")[0].uri == chain.revision.uri
    without_revision.raise_if_broken()
    assert (without_revision.get_links("revision")[0].status, without_revision.get_links("dataset")[0].status) == (
        "unchecked",
        "intact",
    )
    assert summarize(without_revision).endswith("not checked: the dataset was not published as a revision.")


def test_version_without_a_package_is_traced_from_another_workdir(chain: Chain, tmp_path: Path) -> None:
    config = chain.config.model_registry.model_copy(update={"name": "refused"})
    register(chain.model, chain.evaluation, None, config, reporter=SilentReporter())
    try:
        lineage = trace(
            "refused@candidate", Workdir(tmp_path / "empty"), chain.config.data_versioning, SilentReporter()
        )
    finally:
        mlflow_tracking.connect().MlflowClient().delete_registered_model("refused")
    lineage.raise_if_broken()
    assert [link.kind for link in lineage.chain] == [kind for kind in ORDER if kind != "repository"]
    assert summarize(lineage) == "All digests match, from the model back to the revision and the raw files."


@pytest.fixture
def run_command(chain: Chain) -> Callable[..., Any]:
    """Run the command in the workdir's parent, as a user does."""
    return lambda call, *arguments: call(*arguments, "--workdir", "workdir", cwd=chain.work.root.parent)


def test_lineage_command_traces_the_champion(chain: Chain, run_command: Callable[..., Any]) -> None:
    result = run_command(answer, "lineage", NAME)
    assert (result["name"], result["version"], result["alias"], result["intact"]) == (NAME, "1", "champion", True)
    assert [link["kind"] for link in result["chain"]] == ORDER


EXPORTS = {"ml-bom": "bom.json", "croissant": "croissant.json", "model-card": "README.md", "dossier": "dossier.md"}


def export(
    run_command: Callable[..., Any], format_: str, output: Path, reference: str = f"{NAME}@champion"
) -> dict[str, Any]:
    result: dict[str, Any] = run_command(answer_in_process, "export", reference, "--format", format_, "-o", output)
    return result


# Long tier: each export traces the chain, which takes a second. The fast tier has one case of each test.
@pytest.mark.parametrize(
    "format_", ["ml-bom", *(pytest.param(name, marks=pytest.mark.long) for name in list(EXPORTS)[1:])]
)
def test_export_of_the_same_version_has_the_same_bytes(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path, format_: str
) -> None:
    output = tmp_path / EXPORTS[format_]
    result = export(run_command, format_, output)
    assert (result["name"], result["version"], result["missing"]) == (NAME, "1", [])
    text = output.read_bytes()
    assert hashlib.sha256(text).hexdigest() == result["sha256"]
    assert str(chain.work.root.parent).encode() not in text, "the export has a path of this machine"
    with move_away(chain.raw):
        assert export(run_command, format_, output, f"{NAME}@1")["sha256"] == result["sha256"]
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@pytest.mark.long
def test_exported_bill_of_materials_is_valid_and_covers_the_chain(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path
) -> None:
    export(run_command, "ml-bom", tmp_path / "bom.json")
    bom = check_bom((tmp_path / "bom.json").read_text())
    model = bom["metadata"]["component"]
    assert model["bom-ref"] == f"model:{chain.model.sha256}"
    kinds = {one["bom-ref"].partition(":")[0] for one in bom["components"]}
    assert {"repository", "evaluation", "base_model", "dataset", "raw", "pkg"} <= kinds
    used = {one["ref"]: one["dependsOn"] for one in bom["dependencies"]}
    assert f"dataset:{chain.dataset.sha256}" in used[model["bom-ref"]]
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert {"held_out.loss", "held_out.perplexity"} <= {metric["type"] for metric in metrics}


@pytest.mark.parametrize(
    "source", ["folder", *(pytest.param(name, marks=pytest.mark.long) for name in ("version", "revision"))]
)
def test_exported_croissant_loads_the_rows(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path, source: str
) -> None:
    import mlcroissant

    folder = tmp_path / "dataset"
    folder.mkdir()
    for path in chain.dataset.path.glob("*.parquet"):
        shutil.copy(path, folder)
    references = {"version": NAME, "folder": str(chain.dataset.path), "revision": chain.revision.uri}
    export(run_command, "croissant", folder / "croissant.json", references[source])
    described = mlcroissant.Dataset(folder / "croissant.json")
    rows = list(described.records("test"))
    assert len(rows) == chain.dataset.manifest.summary["splits"]["test"]
    assert [message["test/messages/role"] for message in rows[0]["test/messages"]] == [b"user", b"assistant"]
    assert described.metadata.version == "1.0.0"
    flip_bit(folder / "test.parquet")
    with pytest.raises(Exception, match=r"Download\(test.parquet\)"):
        list(mlcroissant.Dataset(folder / "croissant.json").records("test"))


@pytest.mark.long
def test_dataset_missing_in_the_store_is_exported_from_its_revision(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path
) -> None:
    with move_away(chain.dataset.path):
        result = export(run_command, "croissant", tmp_path / "croissant.json")
    assert result["missing"] == []
    assert export(run_command, "croissant", tmp_path / "again.json")["sha256"] == result["sha256"]


def export_gguf(run_command: Callable[..., Any], reference: str, output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of the command, and the metadata of the file."""
    arguments = ("export", reference, "--format", "gguf", "--type", "f16", "-o", output)
    result = run_command(answer_in_process, *arguments)
    assert hashlib.sha256(Path(result["file"]).read_bytes()).hexdigest() == result["sha256"]
    fields = gguf.GGUFReader(result["file"]).fields
    return result, {key: fields[key].contents() for key in fields if key.startswith(("general.", "tuneline."))}


def test_gguf_file_of_a_version_names_the_chain(run_command: Callable[..., Any], chain: Chain, tmp_path: Path) -> None:
    result, metadata = export_gguf(run_command, f"{NAME}@champion", tmp_path / "out")
    assert result["file"] == str(tmp_path / "out" / f"{NAME}-1-F16.gguf")
    assert result["quantization"]["increase_bound"] < 0.01
    artifact = artifact_folder.read(tmp_path / "out", "gguf")
    assert artifact.sha256 == result["content_sha256"]
    assert [one.kind for one in artifact.manifest.inputs] == ["model", "base_model", "dataset"]
    assert metadata["general.version"] == "1"
    assert metadata["general.license"] == "unknown"
    assert metadata["tuneline.version"] == f"models:/{NAME}/1"
    assert metadata["tuneline.verdict"] == chain.registered.tags["tuneline.verdict"]
    for key, found in {"package": chain.repository, "evaluation": chain.evaluation, "model": chain.model}.items():
        assert metadata[f"tuneline.{key}_sha256"] == found.sha256
    assert str(chain.work.root.parent) not in json.dumps(metadata), "the file has a path of this machine"


@pytest.mark.long  # three exports
def test_gguf_file_can_be_made_from_a_model_folder_and_without_the_dataset_in_the_store(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path
) -> None:
    result, metadata = export_gguf(run_command, str(chain.model.path), tmp_path / "model")
    assert result["file"] == str(tmp_path / "model" / f"tiny-{chain.model.sha256[:12]}-F16.gguf")
    assert "tuneline.version" not in metadata
    first, _ = export_gguf(run_command, f"{NAME}@1", tmp_path / "version")
    with move_away(chain.dataset.path):
        error = run_command(
            partial(refusal, 2), "export", chain.model.path, "--format", "gguf", "-o", tmp_path / "refused"
        )
        assert "the dataset that the model was trained on is not available" in error["message"]
        again, _ = export_gguf(run_command, f"{NAME}@1", tmp_path / "again")
    assert again["content_sha256"] == first["content_sha256"]
    assert {path.name for path in tmp_path.iterdir()} == {"model", "version", "again"}


def test_missing_package_is_reported_and_stated_as_unknown(
    run_command: Callable[..., Any], chain: Chain, tmp_path: Path
) -> None:
    with move_away(chain.repository.path):
        result = export(run_command, "dossier", tmp_path / "dossier.md")
    [missing] = result["missing"]
    assert missing.startswith(f"repository {chain.repository.sha256[:12]}")
    assert "IV 1(d)" in result["items"]["open"]
    text = (tmp_path / "dossier.md").read_text()
    assert "- Triton package: unknown" in text
    assert str(chain.work.root.parent) not in text, "the export has a path of this machine"


def test_damaged_lineage_is_not_exported(run_command: Callable[..., Any], chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "bom.json").write_text("kept")
    arguments = ("export", NAME, "--format", "ml-bom", "-o", tmp_path / "bom.json")
    with damage_file(chain.dataset.path / "train.parquet"), move_away(chain.work.root / "data-repository"):
        error = run_command(partial(refusal, 1), *arguments)
    assert (error["kind"], error["stage"]) == ("lineage", "export")
    assert "train.parquet" in error["message"]
    assert (tmp_path / "bom.json").read_text() == "kept"


EXPORT_REFUSALS = {  # arguments, exit code, message
    "unknown version": (("traced@7", "--format", "dossier", "-o", "out.md"), 1, "traced has no version 7"),
    "unknown alias": (("traced@none", "--format", "dossier", "-o", "out.md"), 1, "traced has no alias none"),
    "unknown format": (("traced", "--format", "spdx", "-o", "out.md"), 2, "'spdx' is not one of"),
    "dataset": (
        ("{dataset}", "--format", "ml-bom", "-o", "out.json"),
        2,
        "{dataset} is an artifact; the format ml-bom requires a registered version",
    ),
    "other artifact": (
        ("{model}", "--format", "croissant", "-o", "out.json"),
        2,
        "contains a model; expected a dataset",
    ),
    "missing dataset": (("./gone", "--format", "croissant", "-o", "out.json"), 2, "gone is not a folder"),
    "folder": (("traced", "--format", "ml-bom", "-o", "workdir"), 2, "workdir is a folder"),
    "missing folder": (("traced", "--format", "ml-bom", "-o", "gone/out.json"), 2, "the folder gone does not exist"),
    "folder in an artifact": (
        ("traced", "--format", "model-card", "-o", "{repository}/tuneline/out.md"),
        2,
        "{repository}/tuneline/out.md is in the folder of the repository",
    ),
    "option of another format": (
        ("traced", "--format", "ml-bom", "-o", "out.json", "--type", "q8_0"),
        2,
        "--type requires --format gguf",
    ),
    "unknown type": (("traced", "--format", "gguf", "-o", "out.gguf", "--type", "q4_k_m"), 2, "'q4_k_m' is not one of"),
    "occupied folder": (("traced", "--format", "gguf", "-o", "workdir"), 2, "workdir is not empty"),
    "other artifact as gguf": (
        ("{dataset}", "--format", "gguf", "-o", "out.gguf"),
        2,
        "contains a dataset; expected a model",
    ),
    "base model as gguf": (("./tiny", "--format", "gguf", "-o", "out.gguf"), 2, "but a base model has no dataset"),
    "gguf in an artifact": (
        ("traced", "--format", "gguf", "-o", "{repository}/gguf"),
        2,
        "{repository}/gguf is in the folder of the repository",
    ),
    "missing registry": (
        ("traced", "--format", "dossier", "-o", "out.md", "--tracking-uri", "sqlite:///gone.db"),
        1,
        "no registry exists yet, so model traced does not exist",
    ),
}


@pytest.mark.parametrize("case", EXPORT_REFUSALS)
def test_export_is_refused_with_the_reason(run_command: Callable[..., Any], chain: Chain, case: str) -> None:
    arguments, code, message = EXPORT_REFUSALS[case]
    values = {name: getattr(chain, name).path for name in ("dataset", "model", "repository")}
    error = run_command(partial(refusal, code), "export", *(one.format(**values) for one in arguments))
    assert message.format(**values) in error["message"]
    assert not list(chain.work.root.parent.glob("out.*"))


def format_tree(chain: Chain, alias: str) -> list[str]:
    """Return the output of the command for an intact chain."""
    lineage = chain.trace(f"{NAME}@{alias}")
    version, base, raw = (lineage.get_links(kind)[0] for kind in ("version", "base_model", "raw"))
    short = {kind: getattr(chain, kind).sha256[:12] for kind in ("repository", "evaluation", "model", "dataset")}
    verdict = chain.registered.tags["tuneline.verdict"]
    return [
        f"✔ {NAME} version 1 @{alias}  {version.sha256[:12]}  models:/{NAME}/1",
        f"├── ✔ repository  {short['repository']}  store/{short['repository']}",
        f"├── ✔ evaluation  {short['evaluation']}  verdict: {verdict}  store/{short['evaluation']}",
        f"└── ✔ model  {short['model']}  store/{short['model']}",
        f"    ├── ✔ base model  {base.sha256[:12]}  {base.uri}",
        f"    └── ✔ dataset  {short['dataset']}  store/{short['dataset']}",
        f"        ├── ✔ revision  {short['dataset']}  dataset-v1  {chain.revision.uri}",
        f"        └── ✔ raw  {raw.sha256[:12]}  {chain.raw.as_uri()}",
    ]


@pytest.mark.long
def test_pipe_receives_one_line_per_link(chain: Chain, run_command: Callable[..., Any]) -> None:
    process = run_command(tuneline, "lineage", NAME)
    assert process.returncode == 0, process.stderr
    *lines, last = process.stdout.splitlines()
    assert lines == format_tree(chain, "champion")
    assert last == "All digests match, from the package back to the revision and the raw files."


def test_escape_sequences_in_the_chain_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    version = Link("version", "0" * 64, "hf://org/\x1b[2Jname", detail="a card\x9b31m")
    print_tree(Lineage("my\x1b[31m-model", "1", "", [version]))
    assert "my\\x1b[31m-model" in (shown := capsys.readouterr().out)
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown


def run_on_terminal(columns: int, *arguments: str, cwd: Path) -> list[str]:
    """Return the lines that a command prints on a terminal of this width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = environment(NO_COLOR="1", TERM="dumb")
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, env=variables, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL
    )
    os.close(terminal)
    output = b""
    with contextlib.suppress(OSError):  # reading fails once the last process has closed the terminal
        while chunk := os.read(controller, 65536):
            output += chunk
    os.close(controller)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).splitlines()


@pytest.mark.long
def test_terminal_of_80_columns_shows_the_folded_tree(chain: Chain, run_command: Callable[..., Any]) -> None:
    *lines, _ = run_command(partial(run_on_terminal, 80), "lineage", NAME)
    assert max(map(len, lines)) <= 80
    guides = re.compile(r"[\s│├└─]+")
    assert guides.sub("", "".join(lines)) == guides.sub("", "".join(format_tree(chain, "champion")))
    assert any("revision" in line and "dataset-v1" in line for line in lines), (
        "the detail is not on the line of its link"
    )


@pytest.mark.long
def test_documented_tree_matches_the_command(chain: Chain, run_command: Callable[..., Any]) -> None:
    page = (ROOT / "docs" / "how-to" / "lineage.md").read_text(encoding="utf-8")

    def mask_values(text: str) -> str:
        """Replace the values that differ from model to model: name, verdict, digests, paths."""
        return re.sub(r"(  )[0-9a-f]{12}(  .+)?  \S+$", r"\1#\2", text.strip(), flags=re.MULTILINE)

    shown = mask_values(page.split("```\n")[2].replace("my-model", NAME))
    assert shown.count("#") == len(ORDER)
    assert shown == mask_values(
        run_command(tuneline, "lineage", NAME).stdout.replace(chain.registered.tags["tuneline.verdict"], "accepted")
    )


@pytest.mark.long
def test_broken_chain_is_printed_and_exits_1(chain: Chain, run_command: Callable[..., Any]) -> None:
    with move_away(chain.repository.path), damage_file(chain.raw):
        process = run_command(tuneline, "lineage", NAME)
        error = run_command(lambda *a, **k: refusal(1, *a, **k), "lineage", NAME)
    assert process.returncode == 1
    path = chain.repository.path
    reason = f"the repository was not found in {path.as_uri()}, {path.parent}"
    lines = process.stdout.splitlines()
    assert lines[1] == f"├── ✘ repository  {path.name[:12]}  {reason}  store/{path.name[:12]}"
    assert re.search(
        r"! raw  [0-9a-f]{12}  raw.jsonl has changed since curation; its digest is now [0-9a-f]{12}  file:", lines[-1]
    )
    assert (
        f"the lineage of {NAME} version 1 is broken in 1 link: repository {path.name[:12]}: {reason}" in process.stderr
    )
    assert (
        "Mount the artifact store that contains the artifact, or restore the artifact from a backup." in process.stderr
    )
    assert (error["stage"], error["kind"]) == ("lineage", "lineage")
    assert "the repository was not found in" in error["message"]
    assert error["hint"]


def test_missing_registry_is_reported_and_not_created(tmp_path: Path) -> None:
    error = refusal(1, "lineage", NAME, cwd=tmp_path)
    assert error["kind"] == "registry"
    assert error["message"] == f"no registry exists yet, so model {NAME} does not exist"
    assert "--tracking-uri" in error["hint"]
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_data_show_and_data_diff_print_documented_keys(run_command: Callable[..., Any]) -> None:
    shown = run_command(answer_in_process, "data", "show", "dataset-v1")
    compared = run_command(answer_in_process, "data", "diff", "dataset-v1", "dataset-v1")
    assert set(shown["splits"]) == set(compared["splits"]) == {"train", "validation", "test"}


@dataclass(frozen=True)
class Successor:
    """A DPO model, registered under `name`, whose base model or initial adapter is the SFT model `parent`."""

    name: str
    chain: Chain
    parent: Artifact
    pairs: Artifact
    model: Artifact

    @property
    def continues_adapter(self) -> bool:
        return self.model.manifest.find_input("initial_adapter") is not None

    def trace(self) -> Lineage:
        return trace(f"{self.name}@champion", self.chain.work, self.chain.config.data_versioning, SilentReporter())


@pytest.fixture(scope="module", params=["adapter", "merged", "initial"])
def registered_successor(registered_chain: Chain, request: pytest.FixtureRequest) -> Successor:
    """Tune the SFT model of the chain, or its merged weights, on preference pairs."""
    chain, name = registered_chain, f"{NAME}-{request.param}"
    work, draft, reporter = chain.work, chain.work.root.parent / "draft", SilentReporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.setenv("TUNELINE_WORKDIR", str(work.root))
        patch.delenv("TUNELINE_STORE", raising=False)
        parent, options = chain.model, {"seed": 1, "reporter": reporter}
        if request.param == "merged":
            recipe = chain.config.fine_tuning.model_copy(update={"merge": True, "max_steps": 1})
            sft = finetune(chain.dataset, draft, recipe, state=work.state, **options)
            parent = artifact_store.add_artifact(work.store, sft)
        source = work.root.parent / "pairs.jsonl"
        questions = [json.loads(line) for line in chain.raw.read_text().splitlines()]
        pairs = [
            {"prompt": row["instruction"], "chosen": row["output"], "rejected": "I do not know."} for row in questions
        ]
        source.write_text("".join(json.dumps(row) + "\n" for row in pairs))
        curation = chain.config.data_curation.model_copy(update={"sources": [SourceEntry(path=str(source))]})
        dataset = artifact_store.add_artifact(
            work.store, curate(list_sources(curation.sources, Path.cwd()), draft, curation, **options)
        )
        key = "initial_adapter" if request.param == "initial" else "base_model"
        recipe = chain.config.fine_tuning.model_copy(
            update={key: f"store:{parent.sha256}", "objective": "dpo", "max_steps": 2}
        )
        model = artifact_store.add_artifact(work.store, finetune(dataset, draft, recipe, state=work.state, **options))
        evaluation = artifact_store.add_artifact(
            work.store,
            evaluate(
                model_loading.open_model_artifact(model), dataset, draft, chain.config.evaluation, incumbent=None,
                state=work.state, **options,
            ),
        )  # fmt: skip
        registry = chain.config.model_registry.model_copy(update={"name": name})
        registration = register(model, evaluation, None, registry, reporter=reporter)
        promote(name, registration.version, force=True, reason="the test", reporter=reporter)
    return Successor(name, chain, parent, dataset, model)


@pytest.fixture
def successor(registered_successor: Successor, monkeypatch: pytest.MonkeyPatch) -> Successor:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registered_successor.chain.work.tracking_uri)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(registered_successor.chain.work.root))
    return registered_successor


def test_lineage_of_a_dpo_model_leads_to_both_datasets_and_the_original_base(successor: Successor) -> None:
    lineage, sft = successor.trace(), successor.chain
    lineage.raise_if_broken()
    assert [link.sha256 for link in lineage.get_links("dataset")] == [successor.pairs.sha256, sft.dataset.sha256]
    assert [Path(link.uri).name for link in lineage.get_links("raw")] == ["pairs.jsonl", "raw.jsonl"]
    digests = [link.sha256 for link in lineage.chain]
    assert all(set(link.inputs) <= set(digests) for link in lineage.chain), "every input is a link of the chain"
    dpo_base, original = lineage.get_links("base_model")[0], lineage.get_links("base_model")[-1]
    assert original.sha256 == model_loading.resolve_base_model(str(sft.work.root.parent / "tiny")).sha256
    models = [link.sha256 for link in lineage.get_links("model")]
    if successor.continues_adapter:
        assert models == [successor.model.sha256, sft.model.sha256]
        assert dpo_base is original
        assert sft.model.sha256 in lineage.get_links("model")[0].inputs
        assert lineage.get_links("model")[1].detail == "initial adapter"
    elif successor.parent is sft.model:  # an adapter: it was merged into another base model
        assert models == [successor.model.sha256, sft.model.sha256]
        assert set(dpo_base.inputs) == {sft.model.sha256, original.sha256}
        assert lineage.get_links("revision")[1].uri == sft.revision.uri
    else:
        assert models == [successor.model.sha256]
        assert dpo_base.sha256 == successor.parent.sha256
        assert set(dpo_base.inputs) == {sft.dataset.sha256, original.sha256}
    facts = collect_facts(lineage, sft.work.store)
    card = check_bom(ml_bom.render_ml_bom(facts))["metadata"]["component"]["modelCard"]
    datasets = [f"dataset:{dataset.sha256}" for dataset in (successor.pairs, sft.dataset)]
    assert [one["ref"] for one in card["modelParameters"]["datasets"]] == datasets
    assert f"- dataset of an earlier training run: `{sft.dataset.sha256}`" in dossier.render_dossier(facts).text


def test_tree_nests_the_sft_model_below_the_base_model(
    successor: Successor, capsys: pytest.CaptureFixture[str]
) -> None:
    lineage = successor.trace()
    print_tree(lineage)
    text = capsys.readouterr().out
    if not successor.continues_adapter:  # the base model is in the store
        assert f"store/{lineage.get_links('base_model')[0].sha256[:12]}" in text
    found = [re.match(r"([│├└─\s]*)[✔?] ([a-z ]+?)  ", line) for line in text.splitlines()[1:]]
    tree = [(len(match[1]) // 4, match[2]) for match in found if match]
    sft = [(0, "base model"), (0, "dataset"), (1, "revision"), (1, "raw")]
    initial: list[tuple[int, str]] = []
    if successor.continues_adapter:
        ancestors, initial = [], [(2, "model"), *((depth + 3, title) for depth, title in sft[1:])]
    elif successor.parent is successor.chain.model:
        ancestors = [(3, "model"), *((depth + 4, title) for depth, title in sft)]
    else:
        ancestors = [(depth + 3, title) for depth, title in sft]
    assert tree == [
        (1, "evaluation"),
        (1, "model"),
        (2, "base model"),
        *ancestors,
        (2, "dataset"),
        (3, "revision"),
        (3, "raw"),
        *initial,
    ]


def test_missing_sft_model_is_read_from_mlflow_or_reported(successor: Successor) -> None:
    parent = successor.parent
    with move_away(parent.path):
        lineage = successor.trace()
    if parent is successor.chain.model:  # registered as another model
        assert lineage.broken_links == []
        [link] = [link for link in lineage.get_links("model") if link.sha256 == parent.sha256]
        registered = successor.chain.registered
        assert (link.status, link.uri) == ("intact", f"models:/{registered.name}/{registered.version}")
        if not successor.continues_adapter:
            assert len(lineage.get_links("base_model")) == 2, "the original base is recorded in the merged base model"
    else:
        [link] = lineage.broken_links
        assert (link.kind, link.sha256, link.status) == ("base_model", parent.sha256, "missing")


def test_missing_dataset_of_the_sft_model_is_reported(successor: Successor) -> None:
    dataset = successor.chain.dataset
    with move_away(dataset.path), move_away(successor.chain.work.root / "data-repository"):
        lineage = successor.trace()
    assert ("dataset", dataset.sha256, "missing") in {
        (link.kind, link.sha256, link.status) for link in lineage.broken_links
    }
