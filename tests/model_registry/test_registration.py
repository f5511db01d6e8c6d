"""Registration of models, evaluations and packages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import ArtifactDamagedError, EngineMissingError, RegistryError, UsageError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import lineage_tags, model_files
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Registration, find_champion, promote, register
from pipelines.cli.registry import _replace_name
from tests.manifests import reseal
from tests.mlflow_server import free_port, mlflow_server
from tests.model_registry.conftest import Customization, CustomizationArtifacts

pytestmark = pytest.mark.mlflow
CONFIG = ModelRegistryConfig(name="helper")
VERSION = {"rev": "c0ffee", "tag": "dataset-v1", "md5": "1f.dir", "uri": "dvc:///data@c0ffee:datasets/dataset"}


def register_artifacts(
    artifacts: CustomizationArtifacts, config: ModelRegistryConfig = CONFIG, **options: Any
) -> Registration:
    return register(
        artifacts.model, artifacts.evaluation, artifacts.repository, config, reporter=SilentReporter(), **options
    )


def test_version_is_tagged_with_its_lineage(registry: Any, customize: Customization) -> None:
    artifacts = customize("one", incumbent="1c" * 32)
    registration = register_artifacts(artifacts, dataset_version=VERSION, finetune_key="recipe")
    assert (registration.name, registration.version, registration.aliases) == (
        "helper",
        "1",
        ["candidate", "challenger"],
    )
    assert registration.tags.items() >= {
        "tuneline.model_sha256": artifacts.model.sha256,
        "tuneline.evaluation_sha256": artifacts.evaluation.sha256,
        "tuneline.repository_sha256": artifacts.repository.sha256,
        "tuneline.dataset_sha256": artifacts.model.manifest.find_input("dataset").content_sha256,
        "tuneline.dataset_uri": VERSION["uri"],
        "tuneline.dataset_rev": "c0ffee",
        "tuneline.base_model_sha256": "ba5e" * 16,
        "tuneline.base_model_uri": "embedded:tiny",
        "tuneline.incumbent_sha256": "1c" * 32,
        "tuneline.verdict": "accepted",
        "tuneline.proof": "proven",
        "tuneline.finetune_key": "recipe",
        "tuneline.store_uri": artifacts.model.path.as_uri(),
    }.items()  # fmt: skip
    assert registry.get_model_version("helper", "1").description == "accepted: The candidate is accepted."


def test_registered_files_match_the_model(registry: Any, customize: Customization, tmp_path: Path) -> None:
    artifacts = customize("one")
    register_artifacts(artifacts)
    promote("helper", "1", reporter=SilentReporter())
    shutil.rmtree(artifacts.model.path)
    fetched = find_champion("helper").fetch(tmp_path / "fetched")
    assert fetched.path == tmp_path / "fetched"
    assert artifact_folder.read(fetched.path, "model").sha256 == artifacts.model.sha256
    assert sorted(p.name for p in fetched.path.iterdir()) == ["manifest.json", "report.html", "weights"]


def test_changed_registered_file_is_rejected_by_name(registry: Any, customize: Customization, tmp_path: Path) -> None:
    register_artifacts(customize("one"))
    promote("helper", "1", reporter=SilentReporter())
    [registered_file] = (tmp_path / "mlflow-artifacts").rglob("artifacts/weights/payload.bin")
    registered_file.write_text("something else")
    with pytest.raises(ArtifactDamagedError, match=r"weights/payload\.bin"):
        find_champion("helper").fetch(tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_large_model_is_registered_by_manifest_and_pointer(
    registry: Any, customize: Customization, tmp_path: Path
) -> None:
    artifacts = customize("one")
    register_artifacts(artifacts, ModelRegistryConfig(name="helper", copy_limit_mb=0))
    promote("helper", "1", reporter=SilentReporter())
    assert not list((tmp_path / "mlflow-artifacts").rglob("artifacts/weights/payload.bin"))
    [pointer] = (tmp_path / "mlflow-artifacts").rglob("pointer.json")
    assert json.loads(pointer.read_text()) == {
        "content_sha256": artifacts.model.sha256,
        "store_uri": artifacts.model.path.as_uri(),
    }
    assert find_champion("helper").fetch(tmp_path / "fetched").sha256 == artifacts.model.sha256
    shutil.rmtree(artifacts.model.path)
    with pytest.raises(RegistryError, match="are neither in MLflow nor at") as error:
        find_champion("helper").fetch(tmp_path / "again")
    assert "or restore the model in it" in error.value.hint


def test_same_model_keeps_its_version_and_gets_new_evaluation_tags(registry: Any, customize: Customization) -> None:
    first = register_artifacts(customize("one", incumbent="1c" * 32))
    refused_artifacts = customize("one", "refused", packaged=False)
    second = register_artifacts(refused_artifacts)
    assert second.version == first.version
    assert second.aliases == ["candidate"]
    assert second.tags["tuneline.verdict"] == "refused"
    assert second.tags["tuneline.evaluation_sha256"] == refused_artifacts.evaluation.sha256
    assert "tuneline.incumbent_sha256" not in second.tags
    assert second.tags["tuneline.proof"] == "proven"
    assert len(registry.search_model_versions("name = 'helper'")) == 1


def fetch_evaluation_digest(version: Any, folder: Path) -> str:
    return model_files.fetch_artifact(version, "evaluation", folder).sha256


def test_new_evaluation_of_same_model_is_uploaded_and_tagged(
    registry: Any, customize: Customization, tmp_path: Path
) -> None:
    register_artifacts(customize("one", "refused", packaged=False))
    accepted = customize("one")
    register_artifacts(accepted)
    version = registry.get_model_version("helper", "1")
    assert version.description == "accepted: The candidate is accepted."
    assert fetch_evaluation_digest(version, tmp_path / "kept") == accepted.evaluation.sha256
    for artifact in (accepted.model, accepted.evaluation):
        shutil.rmtree(artifact.path)
    assert promote("helper", "1", reporter=SilentReporter()).to == "1"


def test_version_does_not_reference_evaluation_with_lost_upload(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = customize("one"), customize("one", "refused", packaged=False)
    register_artifacts(first)
    with monkeypatch.context() as patch:
        patch.setattr(type(registry), "list_logged_model_artifacts", lambda *_: [])
        with pytest.raises(RegistryError, match=r"does not list uploaded files of the evaluation: evaluation\.json"):
            register_artifacts(second)
    version = registry.get_model_version("helper", "1")
    assert version.tags["tuneline.evaluation_sha256"] == first.evaluation.sha256
    register_artifacts(first)
    assert fetch_evaluation_digest(version, tmp_path / "kept") == first.evaluation.sha256, (
        "the evaluation is uploaded again after the failed upload of the other one"
    )


def test_next_registration_replaces_evaluation_of_a_killed_one(
    registry: Any, customize: Customization, tmp_path: Path
) -> None:
    first, second = customize("one", "refused", packaged=False), customize("one")
    model_files.log_model(registry, "helper", first.model, first.evaluation, 512)
    register_artifacts(second)
    assert (
        fetch_evaluation_digest(registry.get_model_version("helper", "1"), tmp_path / "kept")
        == second.evaluation.sha256
    )


def test_refused_candidate_is_registered_without_challenger_alias(registry: Any, customize: Customization) -> None:
    registration = register_artifacts(customize("one", "refused", packaged=False))
    assert registration.aliases == ["candidate"]
    assert registration.tags["tuneline.proof"] == "unpackaged"
    assert "tuneline.repository_sha256" not in registration.tags


def test_another_model_becomes_next_version_and_takes_candidate_alias(registry: Any, customize: Customization) -> None:
    register_artifacts(customize("one"))
    assert register_artifacts(customize("two", "refused", packaged=False)).version == "2"
    aliases = registry.get_registered_model("helper").aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"challenger": "1", "candidate": "2"}


def test_unchanged_champion_keeps_its_verdict_and_aliases(registry: Any, customize: Customization) -> None:
    artifacts = customize("one")
    register_artifacts(artifacts)
    promote("helper", "1", reporter=SilentReporter())
    register_artifacts(customize("two", "refused", packaged=False))
    unchanged = customize("one", "unchanged", incumbent=artifacts.model.sha256, packaged=False)
    registration = register_artifacts(unchanged, finetune_key="another recipe")
    assert (registration.version, registration.aliases) == ("1", ["challenger", "champion"])
    assert registration.tags["tuneline.verdict"] == "accepted"
    assert registration.tags["tuneline.evaluation_sha256"] == artifacts.evaluation.sha256
    assert registration.tags["tuneline.finetune_key"] != "another recipe", (
        "the champion keeps the lineage of its promotion"
    )
    assert str(registry.get_registered_model("helper").aliases["candidate"]) == "2"


def test_mismatched_artifacts_are_rejected_with_both_digests(registry: Any, customize: Customization) -> None:
    one, two = customize("one"), customize("two")
    for mismatched in (
        CustomizationArtifacts(one.model, two.evaluation, one.repository),
        CustomizationArtifacts(one.model, one.evaluation, two.repository),
    ):
        with pytest.raises(UsageError) as error:
            register_artifacts(mismatched)
        assert one.model.sha256 in error.value.message
        assert two.model.sha256 in error.value.message
    assert registry.search_registered_models() == []


def test_interrupted_registration_resumes_without_second_upload(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = customize("one")
    logged_model = model_files.log_model(registry, "helper", artifacts.model, artifacts.evaluation, 512)
    monkeypatch.setattr(type(registry), "log_model_artifacts", lambda *_: pytest.fail("uploaded again"))
    assert register_artifacts(artifacts).version == "1"
    assert registry.get_model_version("helper", "1").source == f"models:/{logged_model.model_id}"


def test_upload_without_files_is_not_registered(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(registry), "log_model_artifacts", lambda *_: None)
    with pytest.raises(RegistryError, match=r"does not list uploaded files of the model: manifest\.json"):
        register_artifacts(customize("one"))
    assert registry.search_registered_models() == []


def test_version_belongs_to_its_mlflow_run(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mlflow_tracking.start_run("customization", {})
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    register_artifacts(customize("one"))
    assert registry.get_model_version("helper", "1").run_id == run


def test_champion_is_none_before_promotion(registry: Any, customize: Customization) -> None:
    assert find_champion("helper") is None
    register_artifacts(customize("one"))
    assert find_champion("helper") is None


def test_champion_lookup_creates_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_champion("helper") is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    assert find_champion("helper") is None
    assert not (tmp_path / "none.db").exists()


def test_champion_not_registered_by_tuneline_is_reported(registry: Any) -> None:
    registry.create_registered_model("helper")
    logged_model = registry.create_logged_model("0", name="helper")
    registry.create_model_version("helper", f"models:/{logged_model.model_id}", model_id=logged_model.model_id)
    registry.set_registered_model_alias("helper", "champion", "1")
    with pytest.raises(RegistryError, match="was not registered by tuneline"):
        find_champion("helper")


def test_registration_without_server_names_the_missing_setting(
    customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = customize("one")
    with pytest.raises(EngineMissingError) as error:
        register_artifacts(artifacts)
    assert "MLFLOW_TRACKING_URI" in error.value.hint
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineMissingError, match="does not answer"):
        register_artifacts(artifacts)


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_real_server_registers_promotes_and_returns_the_model(
    server_url: str, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_url)
    artifacts = customize("one")
    registration = register_artifacts(artifacts, dataset_version=VERSION)
    assert (registration.version, registration.aliases) == ("1", ["candidate", "challenger"])
    assert register_artifacts(artifacts).version == "1"
    assert promote("helper", "1", reporter=SilentReporter()).to == "1"
    version = find_champion("helper")
    assert (version.version, version.model_sha256) == ("1", artifacts.model.sha256)
    assert version.fetch(tmp_path / "fetched").sha256 == artifacts.model.sha256


def test_manifest_contradicting_its_evaluation_is_rejected(tmp_path: Path) -> None:
    artifact_folder.claim_folder(tmp_path / "evaluation", "key")
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"verdict": "refused"}')
    options = {"payload": ["evaluation.json"], "inputs": [], "config": {}, "seed": 1, "key": "key"}
    artifact_folder.publish(tmp_path / "evaluation", "evaluation", summary={"verdict": "refused"}, **options)
    reseal(tmp_path / "evaluation", summary={"verdict": "accepted"})
    evaluation = artifact_folder.read(tmp_path / "evaluation", "evaluation")
    with pytest.raises(RegistryError, match="records the verdict refused; the manifest records accepted"):
        lineage_tags.read_verdict(evaluation)


@pytest.mark.parametrize("name", ["a/b", "models:x"])
def test_invalid_model_name_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=f"--name {name} is not a valid name of a registered model"):
        _replace_name(ModelRegistryConfig(), name)
    assert _replace_name(ModelRegistryConfig(), "mine").name == "mine"
