"""Where base models come from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from components.common import artifacts, chat, models
from components.common.errors import ArtifactDamagedError, ConfigurationError
from tests.tiny import tiny_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_a_model_and_its_digest_is_of_its_files_wherever_it_lies(tmp_path: Path) -> None:
    one = models.base_model(str(tiny_model(tmp_path / "one")))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("A card is not part of the model.")
    (tmp_path / "two" / "pytorch_model.bin").write_bytes(b"a pickle, which is never read")
    assert models.base_model(str(tmp_path / "two")).sha256 == one.sha256
    assert models.base_model(str(tiny_model(tmp_path / "three", seed=1))).sha256 != one.sha256


def test_files_that_changed_since_they_were_first_used_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    before = models.base_model(str(folder)).sha256
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ArtifactDamagedError, match="expected " + before[:12]):
        models.base_model(str(folder), expected_sha256=before)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere is not a folder"),
        ("empty", "empty holds no config.json"),
        ("pickled", "pickled holds no safetensors"),
        ("embedded:gpt-5", "there is no embedded model embedded:gpt-5"),
        ("hf://org/name", "hf://org/name does not name a revision"),
        ("hf://org/missing@main", "hf://org/missing@main cannot be fetched"),
        ("ftp://host/model", "is no model source"),
    ],
)
def test_a_source_that_names_no_model_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.base_model") as error:
        models.base_model(source)
    assert message in error.value.message
    assert error.value.hint


def test_a_hub_model_is_taken_by_revision_and_without_a_network_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself cannot be reached from a test: its cache is laid out as huggingface_hub lays it out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    tiny_model(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    found = models.base_model("hf://org/tiny@main")
    assert found.path == repository / "snapshots" / REVISION
    assert found.sha256 == models.base_model(str(found.path)).sha256
    assert models.base_model(f"hf://org/tiny@{REVISION}").sha256 == found.sha256


def test_a_tokenizer_is_written_alike_with_a_network_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    tiny_model(tmp_path / "tiny")
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        models.save_tokenizer(models.load_tokenizer(tmp_path / "tiny"), tmp_path / str(offline))
    written = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("True", "False")]
    assert written[0] == written[1]
    assert models.load_tokenizer(tmp_path / "True").chat_template == models.load_tokenizer(tmp_path / "tiny").chat_template


@pytest.mark.model
def test_the_embedded_model_is_converted_once_and_answers() -> None:
    import torch

    base = models.base_model(models.EMBEDDED)
    manifest = artifacts.read(base.path, "base_model").manifest
    assert manifest.summary["parameters"] == 134_515_008
    assert manifest.inputs[0].content_sha256 == models.EMBEDDED_SHA256
    assert models.base_model(models.EMBEDDED) == base
    models.prepare_torch(0)
    opened = models.open_model(models.EMBEDDED)
    model, tokenizer = models.load(opened), models.load_tokenizer(opened.tokenizer)
    prompt = torch.tensor([chat.encode_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


@pytest.mark.model
def test_weights_that_are_not_those_published_are_never_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ArtifactDamagedError, match="is not the file that was published") as error:
        models.base_model(models.EMBEDDED)
    assert "force-reinstall" in error.value.hint
    assert not any(tmp_path.rglob("*.safetensors"))
