"""Damaged, incomplete and hostile model folders are refused with the name of the file or tensor (fast tier: a tiny model)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken, Llama4Config, Llama4ForConditionalGeneration, MixtralConfig, MixtralForCausalLM

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from tests.tiny import tiny_model, tiny_tokenizer

QUERY = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("original") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def split_weights(folder: Path, **moved: str) -> None:
    """Split the weights into two files with an index; `moved` overrides the file of a tensor in the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1-of-2.safetensors": names[:10], "model-2-of-2.safetensors": names[10:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {**weight_map, **moved}}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_whole_model_passes_in_one_file_and_in_two(folder: Path) -> None:
    base = model_loading.resolve_base_model(str(folder))
    model_loading.check_base_model(base)
    split_weights(folder)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "../outside.bin"}}')  # never read
    divided = model_loading.resolve_base_model(str(folder))
    model_loading.check_base_model(divided)
    assert divided.sha256 != base.sha256


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: truncate(folder / "model.safetensors"),
            r"model\.safetensors of .* has \d+ bytes; expected \d+",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"is not a safetensors file \(0 bytes\)"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), r"is not a safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((90_000).to_bytes(8, "little") + b"[" * 90_000),
            r"is not a safetensors file",
        ),
        (
            lambda folder: split_weights(folder, **{QUERY: "../outside.safetensors"}),
            r"index\.json of .* refers to '\.\./outside\.safetensors', which is not a safetensors file of the model",
        ),
        (
            lambda folder: split_weights(folder, **{QUERY: "/etc/outside.safetensors"}),
            r"refers to '/etc/outside\.safetensors', which is not a safetensors file of the model",
        ),
        (
            lambda folder: split_weights(folder, **{QUERY: "pytorch_model.bin"}),
            r"refers to 'pytorch_model\.bin', which is not a safetensors file of the model",
        ),
        (
            lambda folder: split_weights(folder, **{"model.extra.weight": "model-1-of-2.safetensors"}),
            r"model-1-of-2\.safetensors of .* has no tensor 'model\.extra\.weight', which model\.safetensors\.index",
        ),
        (
            lambda folder: (split_weights(folder), (folder / INDEX).write_text("[]")),
            r"index\.json of .* has no weight_map",
        ),
        (
            lambda folder: edit_json(folder / "config.json", transformers_weights="other/model.safetensors"),
            r"config\.json of .* refers to the weights 'other/model\.safetensors'",
        ),
        (
            lambda folder: edit_json(folder / "config.json", transformers_weights=["a"]),
            r"config\.json of .* refers to the weights \['a'\]",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/other"}'),
            r"contains adapter_config\.json, which refers to another base model",
        ),
    ],
)
def test_unusable_files_are_refused_before_they_are_loaded(
    folder: Path, damage: Callable[[Path], Any], message: str
) -> None:
    (folder.parent / "outside.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    damage(folder)
    with pytest.raises(ConfigurationError, match=message) as error:
        model_loading.resolve_base_model(str(folder))
    assert error.value.message.startswith("fine_tuning.base_model: ")
    assert error.value.hint


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), f"missing: {QUERY}"),
        (
            lambda tensors: tensors.update({"model.layers.7.norm.weight": torch.zeros(2)}),
            "unexpected: model.layers.7.norm",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            "wrong shape: model.norm.weight ([3]; expected [64])",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name],
            "missing: model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight, "
            "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight, "
            "model.layers.0.post_attention_layernorm.weight, and 13 more",
        ),
    ],
)
def test_tensors_that_do_not_match_the_architecture_are_named(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    edit_tensors(folder, damage)
    base = model_loading.resolve_base_model(str(folder))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        model_loading.check_base_model(base)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        model_loading.load_model(model_loading.open_model(folder))


def test_constant_masks_of_old_checkpoints_are_ignored(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.attn.masked_bias": torch.zeros(1)}))
    model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))


def test_vision_model_of_a_checkpoint_is_left_out_of_its_text_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {
        **sizes,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "vocab_size": 500,
        "pad_token_id": 0,
    }
    vision = {**sizes, "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_output_dim": 32}
    vision["projector_input_dim"] = 32
    Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model_loading.check_base_model(model_loading.resolve_base_model(str(tmp_path)))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"language_model.model.extra": torch.ones(2)}))
    with pytest.raises(ConfigurationError, match=r"unexpected: (language_model\.)?model\.extra"):
        model_loading.check_base_model(model_loading.resolve_base_model(str(tmp_path)))


def test_missing_expert_is_an_error_of_the_model(folder: Path) -> None:
    """Transformers merges the tensors of experts while it loads them, and raises an error without their names."""
    config = MixtralConfig(
        vocab_size=400, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    base = model_loading.resolve_base_model(str(folder))
    model_loading.check_base_model(base)
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    with pytest.raises(
        ConfigurationError, match="a tensor of an expert is missing or unexpected, or has the wrong shape"
    ):
        model_loading.check_base_model(base)


def test_files_of_a_stored_model_are_checked(folder: Path) -> None:
    store = Workdir.from_environment().store

    def build(output: Path) -> artifact_folder.Artifact:
        shutil.copytree(folder, output, dirs_exist_ok=True)
        return artifact_folder.publish(
            output, "base_model", payload=lambda _: True, inputs=[], config={}, seed=0, key="k", summary={}
        )

    split_weights(folder, **{QUERY: "../outside.safetensors"})
    stored, _ = artifact_store.get_or_build(store, "models", "k", build)
    with pytest.raises(ConfigurationError, match=r"refers to '\.\./outside\.safetensors'"):
        model_loading.resolve_base_model(f"store:{stored.sha256}")


def test_special_token_for_images_needs_no_embedding(folder: Path) -> None:
    """As in Gemma 3 1B, a text model with the tokenizer of the multimodal models."""
    tokenizer = model_loading.load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.save_pretrained(folder)
    model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))
    (folder / "chat_template.jinja").write_text("{{ '<image>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigurationError, match=r"the token '<image>' of .* has the ID"):
        model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))


def test_tokenizer_that_exceeds_the_embedding_is_refused(folder: Path) -> None:
    tokenizer = model_loading.load_tokenizer(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    message = rf"the token '<extra>' of .* has the ID {size}, and the model has {size} embeddings"
    with pytest.raises(ConfigurationError, match=message):
        model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))


def test_every_file_of_a_tokenizer_is_in_the_digest(folder: Path) -> None:
    digests = {model_loading.resolve_base_model(str(folder)).sha256}
    for name in (
        "tokenizer.model",
        "spiece.model",
        "qwen.tiktoken",
        "tekken.json",
        "additional_chat_templates/rag.jinja",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("one")
        digests.add(model_loading.resolve_base_model(str(folder)).sha256)
    assert len(digests) == 6
