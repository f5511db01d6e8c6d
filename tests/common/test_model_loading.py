"""Resolution of base models from folders, the hub cache and the embedded model.

The test marked `long` converts the embedded model and generates text.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.models import chat_templates, model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import publish_adapter

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_folder_digest_depends_on_files_not_location(tmp_path: Path) -> None:
    model = model_loading.resolve_base_model(str(tiny_model(tmp_path / "one")))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("A card is not part of the model.")
    (tmp_path / "two" / "pytorch_model.bin").write_bytes(b"a pickle, which is never read")
    assert model_loading.resolve_base_model(str(tmp_path / "two")).sha256 == model.sha256
    assert model_loading.resolve_base_model(str(tiny_model(tmp_path / "three", seed=1))).sha256 != model.sha256


def test_deprecations_within_transformers_are_not_logged() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_loading.silence_transformers()
        for module in ("transformers.modeling_utils", "tuneline.stages"):
            warnings.warn_explicit("old name", FutureWarning, "file.py", 1, module)
    assert len(caught) == 1


def test_changed_files_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    before = model_loading.resolve_base_model(str(folder)).sha256
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ArtifactDamagedError, match="expected " + before[:12]):
        model_loading.resolve_base_model(str(folder), expected_sha256=before)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere is not a folder"),
        ("empty", "empty contains no config.json"),
        ("pickled", "pickled contains no safetensors files"),
        ("embedded:gpt-5", "embedded model embedded:gpt-5 does not exist"),
        ("hf://org/name", "hf://org/name is not of the form hf://org/name@revision"),
        ("hf://org/missing@main", "hf://org/missing@main cannot be fetched"),
        ("ftp://host/model", "is not a model source"),
    ],
)
def test_invalid_source_is_refused_with_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.base_model") as error:
        model_loading.resolve_base_model(source)
    assert message in error.value.message
    assert error.value.hint


def test_error_names_the_argument_or_the_tuned_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        model_loading.open_model("nowhere")
    assert error.value.message == "model: nowhere is not a folder"
    assert error.value.hint == model_loading.SOURCES_HINT
    with pytest.raises(ConfigurationError) as error:
        model_loading.open_model("embedded:gpt", argument="incumbent")
    assert error.value.message == "incumbent: embedded model embedded:gpt does not exist"
    folder = tiny_model(tmp_path / "base")
    adapter = publish_adapter(model_loading.open_model(folder), tmp_path / "adapter", seed=1)
    shutil.rmtree(folder)
    with pytest.raises(ConfigurationError) as error:
        model_loading.open_model(adapter.path)
    assert error.value.message == f"base model of {adapter.path}: {folder} is not a folder"


def test_hub_model_is_resolved_by_revision_from_cache_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test writes the cache layout of huggingface_hub, since the hub cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    tiny_model(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    model = model_loading.resolve_base_model("hf://org/tiny@main")
    assert model.path == repository / "snapshots" / REVISION
    assert model.sha256 == model_loading.resolve_base_model(str(model.path)).sha256
    assert model_loading.resolve_base_model(f"hf://org/tiny@{REVISION}").sha256 == model.sha256


def test_saved_tokenizer_is_equal_online_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    tiny_model(tmp_path / "tiny")
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        model_loading.save_tokenizer(model_loading.load_tokenizer(tmp_path / "tiny"), tmp_path / str(offline))
    saved_files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("True", "False")]
    assert saved_files[0] == saved_files[1]
    assert (
        model_loading.load_tokenizer(tmp_path / "True").chat_template
        == model_loading.load_tokenizer(tmp_path / "tiny").chat_template
    )


@pytest.mark.long
@pytest.mark.model
def test_embedded_model_is_converted_once_and_answers() -> None:
    import torch

    base = model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE)
    manifest = artifact_folder.read(base.path, "base_model").manifest
    assert manifest.summary["parameters"] == 134_515_008
    assert manifest.inputs[0].content_sha256 == model_loading.EMBEDDED_SHA256
    assert model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE) == base
    model_loading.prepare_torch(0)
    opened = model_loading.open_model(model_loading.EMBEDDED_SOURCE)
    model, tokenizer = model_loading.load_model(opened), model_loading.load_tokenizer(opened.tokenizer)
    prompt = torch.tensor(
        [chat_templates.encode_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])]
    )
    output = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert "The capital of France is Paris." in tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


@pytest.mark.model
def test_weights_with_other_digest_are_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_loading, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ArtifactDamagedError, match="or differs from the published file") as error:
        model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE)
    assert "force-reinstall" in error.value.hint
    assert not any(tmp_path.rglob("*.safetensors"))
