"""Export as GGUF: weights as transformers reads them, contents, comparison with the original, and refusals.

test_llama_cpp.py loads the files with llama.cpp.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ConfigurationError, OutputOccupiedError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import quantization
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.gguf_export import architectures, gguf_file, vocabulary
from components.triton_packaging.gguf_export.export import export_gguf
from components.triton_packaging.quantization import EncodedItem, QuantizationError
from tests.datasets import small_dataset
from tests.model_families import FAMILIES, Family, build_configuration
from tests.tiny import tiny_tokenizer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}),
    "llama, llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e2,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 256}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def build_case(name: str) -> Any:
    """Return the configuration of a supported model; its embeddings have more rows than the tokenizer has tokens."""
    model_type, options = CASES[name]
    tokenizer = tiny_tokenizer()
    config = build_configuration(Family(name, model_type, {"initializer_range": 0.2, **options}), tokenizer)
    config.vocab_size = len(tokenizer) + 16
    return config


def build_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A dataset with twelve test rows."""
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def export(
    model: LoadableModel, output: Path, dataset: Artifact, type_: gguf_file.GgufType = "q8_0", margin: float = 0.05
) -> Artifact:
    return export_gguf(
        model,
        output,
        type_,
        TritonPackagingConfig(quantization_margin=margin),
        name="my model",
        texts={"general.license": "apache-2.0", "tuneline.version": "models:/helper/3"},
        dataset=dataset,
        seed=1,
        reporter=SilentReporter(),
    )


@pytest.mark.parametrize("case", CASES)
def test_file_has_the_weights_of_the_model(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = build_model(build_case(case)), tmp_path / "model.gguf"
    gguf_file.write_gguf(path, model, tiny_tokenizer(), "f32", {})
    read = gguf_file.read_gguf(path, model.config)
    assert capsys.readouterr().err == "", "output beside that of the reporter"
    assert read.config.rope_parameters["rope_theta"] == pytest.approx(model.config.rope_parameters["rope_theta"])
    ids = torch.arange(3, 103).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(read(ids).logits, model(ids).logits)
    context = gguf.GGUFReader(path).fields[
        f"{architectures.ARCHITECTURES[model.config.model_type].name}.context_length"
    ]
    assert context.contents() == (256 if case == "mistral" else 512)


@pytest.mark.parametrize("type_", gguf_file.GGUF_TYPES)
def test_each_type_rounds_the_weights(type_: gguf_file.GgufType, tmp_path: Path) -> None:
    model, path = build_model(build_case("llama")), tmp_path / "model.gguf"
    gguf_file.write_gguf(path, model, tiny_tokenizer(), type_, {})
    expected = model.state_dict()
    # Half a step of the largest weight of a block of 32: of 2^7 steps with 8 bits, 2^3 or 2^4 with 4 and 5 bits.
    limits = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254, "q5": 1 / 16, "q4": 1 / 8}
    limit = limits.get(type_) if type_ in limits else limits[type_[:2]]
    for name, weights in gguf_file.read_gguf(path, model.config).state_dict().items():
        assert limit is not None
        allowed = limits["q8_0"] if type_[0] == "q" and ("lm_head" in name or "embed" in name) else limit
        assert (weights - expected[name]).abs().max() <= allowed * 1.01 * expected[name].abs().max(), name
    types = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert types["blk.1.ffn_down.weight"] == type_
    assert types["output.weight"] == ("q8_0" if type_[:2] in ("q4", "q5") else type_)


def test_rows_of_incomplete_blocks_are_stored_in_f16(tmp_path: Path) -> None:
    config = build_case("llama")
    config.intermediate_size = 48
    gguf_file.write_gguf(tmp_path / "model.gguf", build_model(config), tiny_tokenizer(), "q8_0", {})
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_export_is_an_artifact_with_equal_bytes_when_repeated(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "two").mkdir()  # an empty folder is accepted
    first, second = (export(adapted_model, tmp_path / name, dataset) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    artifact = artifact_folder.read(tmp_path / "two", "gguf")
    assert sorted(path.name for path in artifact.path.iterdir()) == ["manifest.json", "my-model-Q8_0.gguf"]
    assert [one.kind for one in artifact.manifest.inputs] == ["model", "base_model", "dataset"]
    result = artifact.manifest.summary["quantization"]
    assert result["items"] == 12
    assert result["increase"] == pytest.approx(result["loss"] - result["unquantized_loss"])
    assert abs(result["increase"]) < result["increase_bound"] <= result["margin"] == 0.05
    assert result["weight_bytes"] < 0.5 * result["unquantized_weight_bytes"]

    path = artifact.path / artifact.manifest.summary["file"]
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    merged, ids = quantization.load_merged_model(adapted_model), torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        expected = merged(ids).logits
        assert 0 < (read(ids).logits - expected).abs().mean() < 0.1 * expected.abs().mean()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    original = model_loading.load_tokenizer(adapted_model.tokenizer)
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.encode("What is 12 of a list?") == original.encode("What is 12 of a list?")


def test_metadata_has_the_lineage_and_the_tokens_that_end_an_answer(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    artifact = export(adapted_model, tmp_path / "out", dataset, "f16")
    fields = gguf.GGUFReader(tmp_path / "out" / "my-model-F16.gguf").fields
    found = {key: field.contents() for key, field in fields.items()}
    assert found["general.license"] == "apache-2.0"
    assert found["tuneline.version"] == "models:/helper/3"
    assert found["tuneline.model_sha256"] == adapted_model.sha256
    assert found["tuneline.base_model_sha256"] == adapted_model.base.sha256
    assert found["tuneline.base_model"] == "model", "a path of this machine"
    assert artifact.manifest.summary["metadata"].items() <= found.items()
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


def test_all_tokens_that_end_an_answer_are_stored(tmp_path: Path) -> None:
    model, path = build_model(build_case("llama")), tmp_path / "model.gguf"
    model.generation_config.eos_token_id = [7, 2, 9]
    gguf_file.write_gguf(path, model, tiny_tokenizer(), "f16", {})
    fields = gguf.GGUFReader(path).fields
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")] == [2, 7, 9]
    model.generation_config.eos_token_id = [7, 8, 9]
    with pytest.raises(ConfigurationError, match="an answer ends with one of 4 tokens; expected 1 to 3"):
        gguf_file.write_gguf(path, model, tiny_tokenizer(), "f16", {})


def test_refused_or_interrupted_export_leaves_nothing(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(QuantizationError, match=r"the gguf q4_0 model has a loss of .*quantization_margin allows"):
        export(adapted_model, tmp_path / "out", dataset, "q4_0", margin=1e-6)
    assert not list(tmp_path.iterdir())

    def interrupt(*_: object) -> None:
        assert [path.name for path in tmp_path.glob("*/*.gguf")] == ["my-model-Q8_0.gguf"]
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_file, "read_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(adapted_model, tmp_path / "out", dataset)
    assert not list(tmp_path.iterdir())


def test_compared_rows_fit_the_context_of_the_model(
    base_model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(base_model.weights, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 40}), encoding="utf-8")
    lengths, read = list[int](), quantization.read_items

    def record_lengths(*arguments: Any, **options: Any) -> list[EncodedItem]:
        items = read(*arguments, **options)
        lengths.extend(len(item.ids) for item in items)
        return items

    monkeypatch.setattr(quantization, "MIN_QUANTIZATION_ITEMS", 0)
    monkeypatch.setattr(quantization, "read_items", record_lengths)
    export(model_loading.open_model(folder), tmp_path / "out", dataset)
    assert lengths
    assert max(lengths) <= 40


def test_overflowing_weights_are_refused(base_model: LoadableModel, dataset: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = quantization.load_merged_model(base_model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 7e4  # more than F16 can store
    model.save_pretrained(folder)
    model_loading.load_tokenizer(base_model.tokenizer).save_pretrained(folder)
    with pytest.raises(QuantizationError, match="the quantized model has a loss of nan"):
        export(model_loading.open_model(folder), tmp_path / "out", dataset, "f16")


def test_folder_with_files_is_not_replaced(base_model: LoadableModel, dataset: Artifact, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(OutputOccupiedError, match="is not empty"):
        export(base_model, tmp_path, dataset)
    with pytest.raises(OutputOccupiedError, match="is a file; expected a folder"):
        export(base_model, tmp_path / "note.txt", dataset)


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.model_type not in architectures.ARCHITECTURES], ids=lambda one: one.name
)
def test_other_families_are_refused(family: Family) -> None:
    with pytest.raises(ConfigurationError, match="GGUF export supports llama, mistral, qwen2, qwen3"):
        architectures.find_architecture(build_configuration(family))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is yarn"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"GGUF export does not support the llama model: {problem}"):
        architectures.find_architecture(build_configuration(Family("Llama", "llama", options)))


def test_unsupported_tokenizers_are_refused(tmp_path: Path) -> None:
    def refuse(problem: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"{problem}.*Supported: byte-level BPE .* gpt-2, smollm, qwen2"):
            vocabulary.find_pre_tokenizer(tokenizer)

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    refuse("its pre-tokenizer is .*Metaspace")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    refuse("its normalizer is Lowercase; expected none or NFC")
    tokenizer = tiny_tokenizer()
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition["added_tokens"][1]["lstrip"] = True
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(definition))
    refuse(r"its token '<\|im_start\|>' has the option lstrip")
    config = build_case("llama")
    config.vocab_size = 300
    with pytest.raises(ConfigurationError, match="its token 399 has no row in the embedding, which has 300 rows"):
        gguf_file.write_gguf(tmp_path / "model.gguf", build_model(config), tiny_tokenizer(), "f16", {})


def test_adapter_of_virtual_tokens_is_refused(p_tuning_model: LoadableModel, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the adapter of type P_TUNING in my model cannot be merged"):
        export(p_tuning_model, tmp_path / "out", dataset)
    assert not list(tmp_path.iterdir())
