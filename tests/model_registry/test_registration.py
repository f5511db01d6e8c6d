"""Registering what a customization made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, tracking
from components.common.errors import ArtifactDamagedError, EngineMissingError, RegistryError, UsageError
from components.common.progress import Silent
from components.model_registry import files, lineage
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Registration, champion, promote, register
from pipelines.cli.registry import _named
from tests.mlflow_server import free_port, mlflow_server
from tests.model_registry.conftest import Customization, Made

pytestmark = pytest.mark.mlflow
CONFIG = ModelRegistryConfig(name="helper")
VERSION = {"rev": "c0ffee", "tag": "dataset-v1", "md5": "1f.dir", "uri": "dvc:///data@c0ffee:datasets/dataset"}


def registered(made: Made, config: ModelRegistryConfig = CONFIG, **options: Any) -> Registration:
    return register(made.model, made.evaluation, made.repository, config, reporter=Silent(), **options)


def test_a_version_is_tagged_with_everything_it_came_from(registry: Any, customize: Customization) -> None:
    made = customize("one", incumbent="1c" * 32)
    done = registered(made, dataset_version=VERSION, finetune_key="recipe")
    assert (done.name, done.version, done.aliases) == ("helper", "1", ["candidate", "challenger"])
    assert done.tags.items() >= {
        "tuneline.model_sha256": made.model.sha256,
        "tuneline.evaluation_sha256": made.evaluation.sha256,
        "tuneline.repository_sha256": made.repository.sha256,
        "tuneline.dataset_sha256": "da7a" * 16,
        "tuneline.dataset_uri": VERSION["uri"],
        "tuneline.dataset_rev": "c0ffee",
        "tuneline.base_model_sha256": "ba5e" * 16,
        "tuneline.base_model_uri": "embedded:tiny",
        "tuneline.incumbent_sha256": "1c" * 32,
        "tuneline.verdict": "accepted",
        "tuneline.proof": "proven",
        "tuneline.finetune_key": "recipe",
        "tuneline.store_uri": made.model.path.as_uri(),
    }.items()  # fmt: skip
    assert registry.get_model_version("helper", "1").description == "accepted: The candidate is accepted."


def test_the_registered_files_are_the_models_files(registry: Any, customize: Customization, tmp_path: Path) -> None:
    made = customize("one")
    registered(made)
    promote("helper", "1", reporter=Silent())
    shutil.rmtree(made.model.path)
    found = champion("helper").fetch(tmp_path / "fetched")
    assert found.path == tmp_path / "fetched"
    assert artifacts.read(found.path, "model").sha256 == made.model.sha256
    assert sorted(p.name for p in found.path.iterdir()) == ["manifest.json", "report.html", "weights"]


def test_a_registered_file_that_was_changed_is_refused_by_name(registry: Any, customize: Customization, tmp_path: Path) -> None:
    registered(customize("one"))
    promote("helper", "1", reporter=Silent())
    [kept] = (tmp_path / "mlflow-artifacts").rglob("artifacts/weights/payload.bin")
    kept.write_text("something else")
    with pytest.raises(ArtifactDamagedError, match=r"weights/payload\.bin"):
        champion("helper").fetch(tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_a_large_model_is_registered_by_manifest_and_pointer(registry: Any, customize: Customization, tmp_path: Path) -> None:
    made = customize("one")
    registered(made, ModelRegistryConfig(name="helper", copy_limit_mb=0))
    promote("helper", "1", reporter=Silent())
    assert not list((tmp_path / "mlflow-artifacts").rglob("artifacts/weights/payload.bin"))
    [pointer] = (tmp_path / "mlflow-artifacts").rglob("pointer.json")
    assert json.loads(pointer.read_text()) == {"content_sha256": made.model.sha256, "store_uri": made.model.path.as_uri()}
    assert champion("helper").fetch(tmp_path / "fetched").sha256 == made.model.sha256
    shutil.rmtree(made.model.path)
    with pytest.raises(RegistryError, match="are not in MLflow") as refused:
        champion("helper").fetch(tmp_path / "again")
    assert "copy_limit_mb" in refused.value.hint


def test_the_same_model_keeps_its_version_and_gets_the_new_evaluations_tags(registry: Any, customize: Customization) -> None:
    first = registered(customize("one", incumbent="1c" * 32))
    refused = customize("one", "refused", packaged=False)
    again = registered(refused)
    assert again.version == first.version
    assert again.aliases == ["candidate"]
    assert again.tags["tuneline.verdict"] == "refused"
    assert again.tags["tuneline.evaluation_sha256"] == refused.evaluation.sha256
    assert "tuneline.incumbent_sha256" not in again.tags
    assert again.tags["tuneline.proof"] == "proven"
    assert len(registry.search_model_versions("name = 'helper'")) == 1


def kept_evaluation(version: Any, folder: Path) -> str:
    return files.fetch_kind(version, "evaluation", folder).sha256


def test_the_new_evaluation_of_the_same_model_is_kept_in_mlflow_before_its_tags(
    registry: Any, customize: Customization, tmp_path: Path
) -> None:
    registered(customize("one", "refused", packaged=False))
    accepted = customize("one")
    registered(accepted)
    version = registry.get_model_version("helper", "1")
    assert version.description == "accepted: The candidate is accepted."
    assert kept_evaluation(version, tmp_path / "kept") == accepted.evaluation.sha256
    for artifact in (accepted.model, accepted.evaluation):
        shutil.rmtree(artifact.path)
    assert promote("helper", "1", reporter=Silent()).to == "1"


def test_a_new_evaluation_whose_upload_was_lost_is_not_named_by_the_version(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = customize("one"), customize("one", "refused", packaged=False)
    registered(first)
    with monkeypatch.context() as patch:
        patch.setattr(type(registry), "list_logged_model_artifacts", lambda *_: [])
        with pytest.raises(RegistryError, match=r"did not keep manifest\.json, .* of the evaluation"):
            registered(again)
    version = registry.get_model_version("helper", "1")
    assert version.tags["tuneline.evaluation_sha256"] == first.evaluation.sha256
    registered(first)
    assert kept_evaluation(version, tmp_path / "kept") == first.evaluation.sha256, "it is uploaded anew after the other's upload broke off"


def test_a_killed_registration_is_finished_with_the_evaluation_of_the_next_one(
    registry: Any, customize: Customization, tmp_path: Path
) -> None:
    first, again = customize("one", "refused", packaged=False), customize("one")
    files.log(registry, "helper", first.model, first.evaluation, 512)
    registered(again)
    assert kept_evaluation(registry.get_model_version("helper", "1"), tmp_path / "kept") == again.evaluation.sha256


def test_a_refused_candidate_is_registered_unpackaged_and_is_no_challenger(registry: Any, customize: Customization) -> None:
    done = registered(customize("one", "refused", packaged=False))
    assert done.aliases == ["candidate"]
    assert done.tags["tuneline.proof"] == "unpackaged"
    assert "tuneline.repository_sha256" not in done.tags


def test_another_model_becomes_the_next_version_and_takes_the_alias(registry: Any, customize: Customization) -> None:
    registered(customize("one"))
    assert registered(customize("two", "refused", packaged=False)).version == "2"
    aliases = registry.get_registered_model("helper").aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"challenger": "1", "candidate": "2"}


def test_an_unchanged_champion_keeps_its_verdict_and_nothing_moves(registry: Any, customize: Customization) -> None:
    made = customize("one")
    registered(made)
    promote("helper", "1", reporter=Silent())
    registered(customize("two", "refused", packaged=False))
    same = customize("one", "unchanged", incumbent=made.model.sha256, packaged=False)
    done = registered(same, finetune_key="another recipe")
    assert (done.version, done.aliases) == ("1", ["challenger", "champion"])
    assert done.tags["tuneline.verdict"] == "accepted"
    assert done.tags["tuneline.evaluation_sha256"] == made.evaluation.sha256
    assert done.tags["tuneline.finetune_key"] != "another recipe", "what is in service keeps the lineage it was promoted with"
    assert str(registry.get_registered_model("helper").aliases["candidate"]) == "2"


def test_an_evaluation_or_a_package_of_another_model_is_refused_with_both_digests(registry: Any, customize: Customization) -> None:
    one, two = customize("one"), customize("two")
    for mixed in (Made(one.model, two.evaluation, one.repository), Made(one.model, one.evaluation, two.repository)):
        with pytest.raises(UsageError) as refused:
            registered(mixed)
        assert one.model.sha256 in refused.value.message
        assert two.model.sha256 in refused.value.message
    assert registry.search_registered_models() == []


def test_an_interrupted_registration_is_finished_with_the_files_already_there(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = customize("one")
    logged = files.log(registry, "helper", made.model, made.evaluation, 512)
    monkeypatch.setattr(type(registry), "log_model_artifacts", lambda *_: pytest.fail("uploaded again"))
    assert registered(made).version == "1"
    assert registry.get_model_version("helper", "1").source == f"models:/{logged.model_id}"


def test_an_upload_that_arrives_without_files_is_not_registered(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(registry), "log_model_artifacts", lambda *_: None)
    with pytest.raises(RegistryError, match=r"did not keep manifest\.json"):
        registered(customize("one"))
    assert registry.search_registered_models() == []


def test_a_version_belongs_to_the_run_that_made_it(registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.start_run("customization", {})
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    registered(customize("one"))
    assert registry.get_model_version("helper", "1").run_id == run


def test_there_is_no_champion_before_one_is_promoted(registry: Any, customize: Customization) -> None:
    assert champion("helper") is None
    registered(customize("one"))
    assert champion("helper") is None


def test_asking_for_the_champion_makes_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert champion("helper") is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    assert champion("helper") is None
    assert not (tmp_path / "none.db").exists()


def test_a_champion_that_tuneline_did_not_register_is_told_as_such(registry: Any) -> None:
    registry.create_registered_model("helper")
    logged = registry.create_logged_model("0", name="helper")
    registry.create_model_version("helper", f"models:/{logged.model_id}", model_id=logged.model_id)
    registry.set_registered_model_alias("helper", "champion", "1")
    with pytest.raises(RegistryError, match="was not registered by tuneline"):
        champion("helper")


def test_without_a_server_registration_says_what_to_set(customize: Customization, monkeypatch: pytest.MonkeyPatch) -> None:
    made = customize("one")
    with pytest.raises(EngineMissingError) as unset:
        registered(made)
    assert "MLFLOW_TRACKING_URI" in unset.value.hint
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineMissingError, match="does not answer"):
        registered(made)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_a_real_server_registers_promotes_and_hands_the_model_back(
    server: str, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    made = customize("one")
    done = registered(made, dataset_version=VERSION)
    assert (done.version, done.aliases) == ("1", ["candidate", "challenger"])
    assert registered(made).version == "1"
    assert promote("helper", "1", reporter=Silent()).to == "1"
    found = champion("helper")
    assert (found.version, found.model_sha256) == ("1", made.model.sha256)
    assert found.fetch(tmp_path / "fetched").sha256 == made.model.sha256


def test_a_manifest_that_says_another_verdict_than_its_evaluation_is_refused(tmp_path: Path) -> None:
    artifacts.begin(tmp_path / "evaluation", "key")
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"verdict": "refused"}')
    options = {"payload": ["evaluation.json"], "inputs": [], "config": {}, "seed": 1, "key": "key"}
    artifacts.publish(tmp_path / "evaluation", "evaluation", summary={"verdict": "refused"}, **options)
    manifest = tmp_path / "evaluation" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"refused"', '"accepted"'))
    edited = artifacts.read(tmp_path / "evaluation", "evaluation")
    with pytest.raises(RegistryError, match="says refused, and its manifest says accepted"):
        lineage.verdict(edited)


@pytest.mark.parametrize("name", ["a/b", "models:x"])
def test_a_name_that_mlflow_does_not_take_is_a_fault_of_the_command_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"--name {name} is no name of a registered model"):
        _named(ModelRegistryConfig(), name)
    assert _named(ModelRegistryConfig(), "mine").name == "mine"
