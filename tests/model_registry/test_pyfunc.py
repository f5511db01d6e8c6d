"""Registered versions load with `mlflow.pyfunc`: a tiny model with an adapter, copied and by reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import answer_generation, model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, InputError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import mlmodel_files, pyfunc_loader
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import find_champion, promote, register
from tests.model_registry.conftest import Customization, CustomizationArtifacts
from tests.model_registry.tuned_model import build_tuned_model

pytestmark = pytest.mark.mlflow
QUESTION = {"messages": [{"role": "user", "content": "What does the function return?"}]}
URI = "models:/helper@champion"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> CustomizationArtifacts:
    return build_tuned_model(tmp_path_factory.mktemp("tuned"))


def promote_version(artifacts: CustomizationArtifacts, **settings: Any) -> None:
    config = ModelRegistryConfig(name="helper", **settings)
    register(artifacts.model, artifacts.evaluation, artifacts.repository, config, reporter=SilentReporter())
    promote("helper", "1", force=True, reason="the test", reporter=SilentReporter())


def load(uri: str = URI) -> Any:
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(uri)


def answer_directly(model: Artifact, question: dict[str, Any], max_new_tokens: int) -> str:
    loadable = model_loading.open_model_artifact(model)
    tokenizer = model_loading.load_tokenizer(model.path)
    return answer_generation.generate_answer(
        model_loading.load_model(loadable), tokenizer, question["messages"], max_new_tokens
    )


def test_champion_answers_prompts_and_messages(registry: Any, tuned: CustomizationArtifacts) -> None:
    promote_version(tuned)
    champion = load()
    expected = answer_directly(tuned.model, QUESTION, 8)
    assert expected
    prompt = {"prompt": QUESTION["messages"][0]["content"]}
    for rows in (QUESTION, prompt, [QUESTION], [prompt]):
        assert champion.predict(rows, params={"max_new_tokens": 8}) == [expected]
    assert champion.predict([prompt, prompt], params={"max_new_tokens": 8}) == [expected] * 2
    assert champion.input_example == mlmodel_files.EXAMPLE
    assert [column.name for column in champion.metadata.signature.inputs] == ["prompt", "messages"]
    assert champion.metadata.signature.outputs.input_types()
    with pytest.raises(InputError, match="neither a prompt nor messages") as error:
        champion.predict("a bare text")
    assert '{"prompt": TEXT}' in error.value.hint


def test_requirements_pin_the_training_environment(registry: Any, tuned: CustomizationArtifacts) -> None:
    import mlflow
    import torch
    from packaging.requirements import Requirement

    promote_version(tuned)
    path = mlflow.pyfunc.get_model_dependencies(URI)
    pinned = {r.name: str(r.specifier) for r in map(Requirement, Path(path).read_text().splitlines())}
    assert pinned["torch"] == f"=={torch.__version__.partition('+')[0]}"
    assert pinned["mlflow"] == f"=={mlflow.__version__}"
    assert {"tuneline", "transformers", "peft", "safetensors"} <= set(pinned)


def test_large_model_is_loaded_from_the_store(registry: Any, tuned: CustomizationArtifacts, tmp_path: Path) -> None:
    promote_version(tuned, copy_limit_mb=0)
    assert not list((tmp_path / "mlflow-artifacts").rglob("adapter_model.safetensors"))
    assert load().predict(QUESTION, params={"max_new_tokens": 4}) == [answer_directly(tuned.model, QUESTION, 4)]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> CustomizationArtifacts:
    return build_tuned_model(tmp_path_factory.mktemp("merged"), merged=True)


@pytest.mark.parametrize("limit", [512, 0])
def test_merged_model_loads_with_transformers(
    registry: Any, merged: CustomizationArtifacts, tmp_path: Path, limit: int
) -> None:
    """The weights are copied to MLflow or, above the limit, read in the artifact store."""
    import mlflow.transformers

    promote_version(merged, copy_limit_mb=limit)
    assert bool(list((tmp_path / "mlflow-artifacts").rglob("*.safetensors"))) == bool(limit)
    pipeline = mlflow.transformers.load_model(URI)
    [answer] = pipeline([QUESTION["messages"]], max_new_tokens=8, do_sample=False, return_full_text=False)
    assert answer[0]["generated_text"] == answer_directly(merged.model, QUESTION, 8)
    assert load().predict(QUESTION, params={"max_new_tokens": 8}) == [answer_directly(merged.model, QUESTION, 8)]
    assert find_champion("helper").fetch(tmp_path / "fetched").sha256 == merged.model.sha256


def test_store_that_moved_is_passed_to_transformers(
    registry: Any, merged: CustomizationArtifacts, tmp_path: Path
) -> None:
    import mlflow.transformers

    moved = tmp_path / "moved"
    shutil.copytree(merged.model.path, tmp_path / "model")
    copied = Artifact(tmp_path / "model", merged.model.manifest)
    promote_version(CustomizationArtifacts(copied, merged.evaluation, merged.repository), copy_limit_mb=0)
    copied.path.rename(moved)
    with pytest.raises(Exception, match="model"):
        mlflow.transformers.load_model(URI)
    assert mlflow.transformers.load_model(URI, base_model_path=str(moved))


def test_adapter_has_no_transformers_flavour(registry: Any, tuned: CustomizationArtifacts) -> None:
    import mlflow.transformers

    promote_version(tuned)
    with pytest.raises(mlflow.exceptions.MlflowException, match='does not have the "transformers" flavor'):
        mlflow.transformers.load_model(URI)


def test_registration_without_transformers_adds_no_flavour(
    merged: CustomizationArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mlmodel_files.build_transformers_flavor(merged.model, is_copied=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert mlmodel_files.build_transformers_flavor(merged.model, is_copied=True) is None


def test_missing_store_is_reported_by_its_address(registry: Any, tuned: CustomizationArtifacts, tmp_path: Path) -> None:
    moved = tmp_path / "model"
    shutil.copytree(tuned.model.path, moved)
    copied = Artifact(moved, tuned.model.manifest)
    promote_version(CustomizationArtifacts(copied, tuned.evaluation, tuned.repository), copy_limit_mb=0)
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(RegistryError, match="are neither in MLflow nor at file://") as error:
        load()
    assert str(moved) in error.value.message
    assert "Mount the artifact store" in error.value.hint
    elsewhere = Artifact(tmp_path / "elsewhere", tuned.model.manifest)
    promote_version(CustomizationArtifacts(elsewhere, tuned.evaluation, tuned.repository), copy_limit_mb=0)
    assert load().predict(QUESTION, params={"max_new_tokens": 1})


@pytest.mark.parametrize("limit", [512, 0])
def test_changed_weights_are_refused(registry: Any, tuned: CustomizationArtifacts, tmp_path: Path, limit: int) -> None:
    moved = tmp_path / "model"
    shutil.copytree(tuned.model.path, moved)
    copied = Artifact(moved, tuned.model.manifest)
    promote_version(CustomizationArtifacts(copied, tuned.evaluation, tuned.repository), copy_limit_mb=limit)
    [weights] = (tmp_path / "mlflow-artifacts" if limit else moved).rglob("adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactDamagedError, match=r"adapter_model\.safetensors"):
        load()


def test_model_of_another_digest_is_refused(registry: Any, tuned: CustomizationArtifacts, tmp_path: Path) -> None:
    promote_version(tuned)
    [mlmodel] = (tmp_path / "mlflow-artifacts").rglob("MLmodel")
    mlmodel.write_text(mlmodel.read_text().replace(tuned.model.sha256, "f" * 64))
    with pytest.raises(ArtifactDamagedError, match="MLmodel records ffff"):
        load()


def test_adapter_of_a_missing_base_model_is_refused(registry: Any, tuned: CustomizationArtifacts) -> None:
    promote_version(tuned)
    base = Path(tuned.model.manifest.find_input("base_model").uri)
    base.rename(base.with_name("moved"))
    try:
        with pytest.raises(ConfigurationError, match=str(base)):
            load()
    finally:
        base.with_name("moved").rename(base)


def test_version_contains_no_code(registry: Any, tuned: CustomizationArtifacts, tmp_path: Path) -> None:
    promote_version(tuned)
    assert pyfunc_loader.__name__ == mlmodel_files.LOADER_MODULE
    [mlmodel] = (tmp_path / "mlflow-artifacts").rglob("MLmodel")
    suffixes = {path.suffix for path in mlmodel.parent.rglob("*")}
    assert not suffixes & {".py", ".pkl", ".pickle", ".pt"}


def test_registering_again_adds_the_mlmodel_of_an_earlier_release(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = customize("one")
    with monkeypatch.context() as patch:
        patch.setattr("components.model_registry.model_files.log_mlmodel", lambda *_: None)
        promote_version(artifacts)
    assert not list((tmp_path / "mlflow-artifacts").rglob("MLmodel"))
    assert find_champion("helper").fetch(tmp_path / "earlier").sha256 == artifacts.model.sha256
    promote_version(artifacts)
    assert [v.version for v in registry.search_model_versions("name = 'helper'")] == [1]
    [mlmodel] = (tmp_path / "mlflow-artifacts").rglob("MLmodel")
    assert json.loads((mlmodel.parent / "input_example.json").read_text()) == mlmodel_files.EXAMPLE
    assert find_champion("helper").fetch(tmp_path / "fetched").sha256 == artifacts.model.sha256
