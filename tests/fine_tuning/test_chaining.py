"""A tuned model as the base model of another training: SFT, then DPO."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import adapter_merging, model_import, model_loading
from components.common.models.model_loading import LoadableModel, LocalBaseModel
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.fine_tuning import sweep
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import recipe
from tests.pipelines.test_pipeline import flip_bit
from tests.tiny import tiny_model


@dataclass(frozen=True)
class Trained:
    """An original base model, datasets, and SFT models of it in a folder per adaptation."""

    folder: Path
    sft_rows: Artifact
    pairs: Artifact
    adapter: Artifact
    merged: Artifact
    virtual_tokens: Artifact

    @property
    def original(self) -> LocalBaseModel:
        return model_loading.resolve_base_model(str(self.folder / "tiny"))


def tune(base: str, dataset: Artifact, output: Path, **changes: Any) -> Artifact:
    config = recipe(Path(base), max_steps=2, **changes).model_copy(update={"base_model": base})
    state = output.parent / f"{output.name}-state"
    return finetune(dataset, output, config, seed=3, state=state, reporter=SilentReporter())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("chained")
    base, rows = str(tiny_model(folder / "tiny")), small_dataset(folder / "sft")
    return Trained(
        folder,
        rows,
        dataset_of("preference", folder / "pairs"),
        adapter=tune(base, rows, folder / "adapter"),
        merged=tune(base, rows, folder / "merged", merge=True),
        virtual_tokens=tune(base, rows, folder / "virtual", adaptation="prompt_tuning"),
    )


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workdir:
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "workdir"))
    return Workdir.from_environment()


def compute_logits(model: LoadableModel) -> Any:
    return adapter_merging._compute_logits(model_loading.load_model(model))


def store(artifact: Artifact, workdir: Workdir) -> str:
    """Copy an artifact to the store and return its source."""
    folder = shutil.copytree(artifact.path, workdir.root / "draft")
    return f"store:{artifact_store.add_artifact(workdir.store, artifact_folder.read(folder)).sha256}"


@pytest.mark.parametrize("is_stored", [False, True])
def test_full_weights_are_the_base_model(trained: Trained, workdir: Workdir, is_stored: bool) -> None:
    source = store(trained.merged, workdir) if is_stored else str(trained.merged.path)
    base = model_loading.resolve_base_model(source)
    assert base.as_input().model_dump() == {
        "kind": "base_model",
        "content_sha256": trained.merged.sha256,
        "uri": source,
    }
    assert model_loading.find_local_base_model(source) == base
    assert model_loading.load_outline(source).base == base
    model_loading.check_base_model(base)


@pytest.mark.parametrize("is_stored", [False, True])
def test_adapter_is_merged_into_its_base_model_once(trained: Trained, workdir: Workdir, is_stored: bool) -> None:
    source = store(trained.adapter, workdir) if is_stored else str(trained.adapter.path)
    assert model_loading.find_local_base_model(source) is None
    outline = model_loading.load_outline(source)
    assert (outline.base, outline.config.model_type) == (None, "llama")
    assert not workdir.store.exists() or is_stored  # resolving the outline writes no files
    base = model_loading.resolve_base_model(source)
    assert base.path == workdir.store / base.sha256
    assert base.uri == f"store:{base.sha256}"
    merged = artifact_folder.read(base.path, "base_model")
    uri = source if is_stored else str(trained.adapter.path)
    assert [(one.kind, one.content_sha256, one.uri) for one in merged.manifest.inputs] == [
        ("model", trained.adapter.sha256, uri),
        ("base_model", trained.original.sha256, trained.original.uri),
    ]
    assert model_loading.resolve_base_model(base.uri) == base
    assert model_loading.find_local_base_model(source) == base
    assert model_loading.load_outline(source).base == base
    expected = compute_logits(model_loading.open_model_artifact(trained.adapter))
    actual = compute_logits(LoadableModel(base.sha256, base, base.path, None, None))
    assert adapter_merging.compute_relative_difference(expected, actual) <= adapter_merging.MAX_LOGIT_DIFFERENCE
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapter_merging, "merge", None)
        assert model_loading.resolve_base_model(source) == base
    shutil.rmtree(base.path)
    assert model_loading.resolve_base_model(source) == base  # merged again: equal bytes


def test_merging_when_resolved_and_when_trained_gives_equal_weights(trained: Trained) -> None:
    base = model_loading.resolve_base_model(str(trained.adapter.path))
    assert (base.path / "model.safetensors").read_bytes() == (trained.merged.path / "model.safetensors").read_bytes()
    assert base.sha256 != trained.merged.sha256  # artifacts of two kinds in one store


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_dpo_starts_from_the_sft_model(trained: Trained, tmp_path: Path, kind: str) -> None:
    parent: Artifact = getattr(trained, kind)
    base = model_loading.resolve_base_model(str(parent.path))
    model = tune(str(parent.path), trained.pairs, tmp_path / "dpo", objective="dpo", learning_rate=1e-12)
    assert [one for one in model.manifest.inputs if one.kind == "base_model"] == [base.as_input()]
    loadable = model_loading.open_model(model.path)
    assert loadable.base.sha256 == base.sha256
    # With a learning rate of almost 0, the DPO model equals the SFT model.
    difference = adapter_merging.compute_relative_difference(
        compute_logits(model_loading.open_model(parent.path)), compute_logits(loadable)
    )
    assert difference <= 1e-4


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_import_stores_the_artifact_and_its_base_model(trained: Trained, workdir: Workdir, kind: str) -> None:
    parent: Artifact = getattr(trained, kind)
    offer = model_import.inspect_source(str(parent.path), SilentReporter())
    assert model_import.read_imported_manifest(offer, workdir) is None
    imported, was_cached = model_import.import_model(offer, workdir, None, SilentReporter())
    assert not was_cached
    assert artifact_store.load_artifact(workdir.store, parent.sha256, "model").manifest == parent.manifest
    if kind == "merged":
        assert imported.sha256 == parent.sha256
    else:
        recorded = imported.manifest.find_input("model")
        assert recorded == parent.as_input(f"store:{parent.sha256}")
    assert model_loading.resolve_base_model(f"store:{imported.sha256}").path == imported.path
    known = model_import.read_imported_manifest(offer, workdir)
    assert known
    assert known.content_sha256 == imported.sha256
    assert model_import.import_model(offer, workdir, None, SilentReporter())[1]


def test_virtual_tokens_are_refused_as_base_model(trained: Trained) -> None:
    source = str(trained.virtual_tokens.path)
    for resolve in (
        model_loading.resolve_base_model,
        model_loading.load_outline,
        lambda source: model_import.inspect_source(source, SilentReporter()),
    ):
        with pytest.raises(
            ConfigurationError, match=r"the adapter of type PROMPT_TUNING in .* cannot be merged"
        ) as error:
            resolve(source)
        assert "virtual tokens are inputs, not weights" in error.value.hint


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_damaged_parent_is_refused(trained: Trained, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(trained.folder / name.partition("/")[0], tmp_path / "copy")
    flip_bit(copy / Path(name).name)
    with pytest.raises(ArtifactDamagedError, match=r"model.safetensors of the model in .* has changed"):
        model_loading.resolve_base_model(str(copy))


def test_adapter_is_not_merged_into_a_changed_base_model(trained: Trained) -> None:
    config = trained.folder / "tiny" / "config.json"
    text = config.read_text()
    config.write_text(text.replace("{", '{"note": 1,', 1))
    with pytest.raises(ArtifactDamagedError, match="the digest of its files is"):
        model_loading.resolve_base_model(str(trained.adapter.path))
    config.write_text(text)


def test_test_rows_that_the_base_model_was_trained_on_are_reported_before_the_training(
    trained: Trained, workdir: Workdir, tmp_path: Path
) -> None:
    store(trained.sft_rows, workdir)
    notes: list[str] = []
    reporter = SilentReporter()
    reporter.note = notes.append  # type: ignore[method-assign]
    config = recipe(trained.merged.path, max_steps=1)
    again = small_dataset(tmp_path / "again", start=-28)  # its test rows are training rows of the SFT model
    sweep.tune(again, tmp_path / "model", config, seed=3, state=tmp_path / "state", reporter=reporter)
    assert "a promotion will be refused: the base model was trained on 12 of the 12 test rows" in notes[0]
