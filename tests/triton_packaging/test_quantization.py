"""Packages with quantized weights: arithmetic, contents, comparison with the unquantized model, and refusals."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.common import pipeline_step
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading, quantization_env, resource_formulas
from components.common.models.calibrated_weights import CalibrationError
from components.common.models.model_loading import LoadableModel
from components.common.models.model_shape import ModelShape
from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.evaluation import engine_loading
from components.evaluation.config import EvaluationConfig
from components.evaluation.stage import evaluate
from components.model_registry import evidence
from components.triton_packaging import quantization, triton_config
from components.triton_packaging.component import triton_packaging
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.python_backend.int8_layers import Int8Linear, pack_int8_layers, replace_linear_layers
from components.triton_packaging.python_backend.model_loading import load_model
from components.triton_packaging.quantization import EncodedItem, QuantizationError
from components.triton_packaging.stage import package
from pipelines.config.customization_config import Customization
from pipelines.runs import single_stages
from tests.datasets import dataset_of, small_dataset
from tests.model_families import FAMILIES, Family, build_configuration
from tests.quantization_environment import make_environment
from tests.triton_packaging.conftest import PROMPTS, publish_adapter

REFUSED_FAMILIES = (
    *("Llama 4 (text)", "Mixtral", "Qwen3-MoE", "Qwen3-Next", "Phi 3.5 MoE", "GPT-OSS", "OLMoE", "Granite MoE"),
    *("Granite 4 (hybrid)", "Falcon", "Jamba", "Mamba"),
)
HAS_VNNI = torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()
NEEDS_VNNI = pytest.mark.skipif(not HAS_VNNI, reason="the processor has no VNNI")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A dataset with twelve test rows."""
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="module")
def int8_package(adapted_model: LoadableModel, dataset: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An unproven package with int8 weights."""
    return build(adapted_model, tmp_path_factory.mktemp("int8") / "package", dataset)


def build(
    model: LoadableModel, output: Path, dataset: Artifact | None, *, prove: bool = False, margin: float = 0.05
) -> Artifact:
    config = TritonPackagingConfig(
        quantization="int8",
        quantization_margin=margin,
        prove=prove,
        golden_prompts=PROMPTS,
        golden_max_tokens=12,
    )
    return package(model, output, config, seed=1, reporter=SilentReporter(), dataset=dataset)


@NEEDS_VNNI
def test_packed_layer_computes_rounded_weights_for_each_row_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(77, 33)
    layer.weight = torch.nn.Parameter(torch.randn(33, 77, generator=generator))
    model = torch.nn.Sequential(layer)
    replace_linear_layers(model, stores_weights=True)
    rounded = model[0].integers.float() * model[0].scale[:, None]
    assert (rounded - layer.weight).abs().max() <= 0.5001 * model[0].scale.max()
    rows = torch.randn(5, 3, 77, generator=generator) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    rows[0, 0] = 0
    with torch.inference_mode():
        expected = torch.nn.functional.linear(rows, rounded, layer.bias)
        assert pack_int8_layers(model)
        result = model(rows)
        assert all(torch.equal(model(rows[i, j]), result[i, j]) for i in range(5) for j in range(3))
    error = (result - expected).abs() / rows.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert error.max() < 77 * rounded.abs().max() / 127 / 254
    assert not model[0].integers.numel()


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=NEEDS_VNNI)])
def test_layer_returns_the_dtype_of_its_input_and_accepts_no_rows(*, is_packed: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 24))
    replace_linear_layers(model, stores_weights=True)
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(rows)
        if is_packed:
            pack_int8_layers(model)
        result = model(rows.bfloat16())
        assert model(rows[:0].view(0, 3, 40)).shape == (0, 3, 24)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, atol=0.05, rtol=0.05)


def test_processor_without_vnni_computes_with_restored_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.Linear(24, 8, bias=False))
    replace_linear_layers(model, stores_weights=True)
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(rows)
        assert not pack_int8_layers(model)
        torch.testing.assert_close(model(rows), expected)
    assert [type(layer) for layer in model] == [torch.nn.Linear, torch.nn.Linear]


def test_package_has_rounded_weights_and_equal_bytes_when_repeated(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    first, second = (build(adapted_model, tmp_path / name, dataset) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    assert first.manifest.find_input("dataset").content_sha256 == dataset.sha256  # type: ignore[union-attr]
    result = json.loads((first.path / "proof.json").read_text(encoding="utf-8"))["quantization"]
    assert result == first.manifest.summary["quantization"]
    assert result["items"] == 12
    assert result["increase"] == pytest.approx(result["loss"] - result["unquantized_loss"])
    assert result["ci95"][0] <= result["increase"] <= result["ci95"][1] <= result["increase_bound"] <= 0.05
    assert result["weight_bytes"] < 0.6 * result["unquantized_weight_bytes"]
    assert "0.0500 is allowed." in (first.path / "report.html").read_text(encoding="utf-8")

    folder = first.path / "tuneline"
    parameters = triton_config.read_parameters(folder)
    assert parameters["quantization"] == "int8"
    packaged, _, _ = load_model(folder / "1", parameters, torch.device("cpu"))
    expected = quantization.load_quantized_model(adapted_model, "int8")
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(packaged(ids).logits, expected(ids).logits)
    assert isinstance(packaged.lm_head, Int8Linear)


def test_evaluated_weights_are_the_packaged_weights(adapted_model: LoadableModel) -> None:
    packaged = quantization.load_quantized_model(adapted_model, "int8")
    for module in list(packaged.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Int8Linear):
                setattr(module, name, layer.restore())
    evaluated = engine_loading.load_rounded(adapted_model, "int8").state_dict()
    stored = packaged.state_dict()
    assert stored.keys() == evaluated.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in evaluated.items())


def test_fp8_package_contains_the_evaluated_weights(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    config = TritonPackagingConfig(backend="vllm", quantization="fp8", quantization_margin=0.05, prove=False)
    with pytest.raises(QuantizationError, match="the fp8 model has a loss of"):  # random weights are sensitive
        package(adapted_model, tmp_path / "refused", config, seed=1, reporter=SilentReporter(), dataset=dataset)
    config = config.model_copy(update={"quantization_margin": 0.5})
    first, second = (
        package(adapted_model, tmp_path / name, config, seed=1, reporter=SilentReporter(), dataset=dataset)
        for name in ("one", "two")
    )
    assert first.sha256 == second.sha256
    result = first.manifest.summary["quantization"]
    assert (result["scheme"], result["items"]) == ("fp8", 12)
    assert "calibration" not in result
    assert result["increase"] == pytest.approx(result["loss"] - result["unquantized_loss"])
    assert result["weight_bytes"] < result["unquantized_weight_bytes"]

    version = first.path / "tuneline" / "1"
    arguments = json.loads((version / "model.json").read_text(encoding="utf-8"))
    assert "quantization" not in arguments  # vLLM reads it from config.json
    assert "enable_lora" not in arguments
    settings = json.loads((version / "weights" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (settings["quant_method"], settings["format"], settings["ignore"]) == (
        "compressed-tensors",
        "float-quantized",
        ["lm_head"],
    )
    dtypes = {name: tensor.dtype for name, tensor in load_file(version / "weights" / "model.safetensors").items()}
    layer = "model.layers.0.mlp.up_proj"
    assert (dtypes[f"{layer}.weight"], dtypes[f"{layer}.weight_scale"]) == (torch.float8_e4m3fn, torch.float32)
    assert (dtypes["model.embed_tokens.weight"], arguments["dtype"]) == (torch.float32, "float32")

    loaded = AutoModelForCausalLM.from_pretrained(version / "weights", dtype=torch.float32)
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        logits = loaded(ids).logits
        for rounded in (
            quantization.load_quantized_model(adapted_model, "fp8"),
            engine_loading.load_rounded(adapted_model, "fp8"),
        ):
            expected = rounded(ids).logits
            projections = [one for one in rounded.state_dict() if one.endswith("proj.weight")]
            assert len(projections) == 14
            assert all(torch.equal(loaded.state_dict()[one], rounded.state_dict()[one]) for one in projections)
            assert torch.equal(logits, expected)
        assert not torch.equal(logits, quantization.load_merged_model(adapted_model)(ids).logits)


@pytest.mark.long  # imports llm-compressor twice
@pytest.mark.skipif(quantization_env.missing_reason() is not None, reason="the quantization environment does not exist")
def test_package_contains_the_calibrated_weights_that_were_evaluated(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    """Needs the quantization environment (`python -m components.common.models.quantization_env`)."""
    reporter, state = SilentReporter(), tmp_path / "state"
    settings = EvaluationConfig(quantization="int4-gptq")
    evaluation = evaluate(
        adapted_model, dataset, tmp_path / "eval", settings, incumbent=None, seed=1, state=state, reporter=reporter
    )
    config = TritonPackagingConfig(backend="vllm", quantization="int4-gptq", prove=False)
    config = config.model_copy(update={"quantization_margin": 100.0})  # 4 bits change a random model
    artifact, alone = (
        package(adapted_model, tmp_path / name, config, seed=1, reporter=reporter, dataset=dataset, state=folder)
        for name, folder in (("shared", state), ("alone", None))
    )
    assert artifact.sha256 == alone.sha256
    measured = artifact.manifest.summary["quantization"]
    recorded = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8"))["measured"]["calibration"]
    assert measured["calibration"] == recorded
    assert recorded["dataset_sha256"] == dataset.sha256
    [stored] = state.glob("quantized_weights/*/model.safetensors")
    weights = artifact.path / "tuneline" / "1" / "weights"
    assert (weights / "model.safetensors").read_bytes() == stored.read_bytes()
    assert measured["weight_bytes"] == stored.stat().st_size < 0.5 * measured["unquantized_weight_bytes"]
    assert "calibrated the weights on 24 training rows" in (artifact.path / "report.html").read_text(encoding="utf-8")
    assert evidence.check_package(artifact, adapted_model.sha256, dataset.as_input(), evaluation) == [
        UNPROVEN, NOT_SHOWN
    ]  # fmt: skip


def test_rounded_model_keeps_its_buffers_in_float32(
    adapted_model: LoadableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary frequencies in bfloat16 would change the answers to long rows."""
    monkeypatch.setattr(model_loading, "get_default_dtype", lambda: torch.bfloat16)
    model = engine_loading.load_rounded(adapted_model, "int8")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies
    assert all(buffer.dtype == torch.float32 for buffer in frequencies)


def test_package_that_differs_from_its_evaluation_is_an_objection(
    int8_package: Artifact, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict[str, str]()
    monkeypatch.setattr(evidence, "states_subject", lambda _: True)  # any artifact stands for the evaluation
    monkeypatch.setattr(evidence, "read_content", lambda _: {"measured": {"settings": settings}})
    model = int8_package.manifest.find_input("model")
    assert model
    arguments = (
        int8_package,
        model.content_sha256,
        dataset.as_input(),
        dataset,
    )
    assert evidence.check_package(*arguments) == [
        UNPROVEN, "its Triton package has int8 quantization; its evaluation measured none"
    ]  # fmt: skip
    settings["quantization"] = "int8"
    assert evidence.check_package(*arguments) == [UNPROVEN]
    monkeypatch.setattr(
        evidence,
        "read_content",
        lambda _: {"measured": {"settings": settings, "calibration": {"weights_sha256": "a" * 64}}},
    )
    assert evidence.check_package(*arguments) == [
        UNPROVEN, f"its Triton package has the calibrated weights without a digest; its evaluation measured {'a' * 12}"
    ]  # fmt: skip


@pytest.mark.parametrize("digests", [("", ""), ("a" * 64, "a" * 63 + "b")])
def test_calibrated_package_requires_the_whole_digest_of_its_evaluation(
    int8_package: Artifact, dataset: Artifact, monkeypatch: pytest.MonkeyPatch, digests: tuple[str, str]
) -> None:
    packaged, evaluated = ({"weights_sha256": digest} if digest else {} for digest in digests)
    manifest = int8_package.manifest.model_copy(deep=True)
    manifest.config["quantization"] = "int4-gptq"
    manifest.summary["quantization"]["calibration"] = packaged
    measured = {"settings": {"quantization": "int4-gptq"}, "calibration": evaluated}
    monkeypatch.setattr(evidence, "states_subject", lambda _: True)  # any artifact stands for the evaluation
    monkeypatch.setattr(evidence, "read_content", lambda _: {"measured": measured})
    objections = evidence.check_package(
        Artifact(int8_package.path, manifest),
        int8_package.manifest.inputs[0].content_sha256,
        dataset.as_input(),
        dataset,
    )
    assert any("has the calibrated weights" in objection for objection in objections), objections


@pytest.mark.long  # starts a server
def test_served_answers_match_the_rounded_model(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    artifact = build(adapted_model, tmp_path / "out", dataset, prove=True)
    proof = artifact.manifest.summary["proof"]
    assert proof["matched"] == proof["golden_prompts"] == len(PROMPTS)
    assert evidence.check_package(artifact, adapted_model.sha256, dataset.as_input()) == []


def test_loss_above_the_margin_is_refused(adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(
        QuantizationError, match=r"on 12 test rows.*The increase is .*quantization_margin allows 0.0000"
    ):
        build(adapted_model, tmp_path / "out", dataset, margin=1e-9)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_refused(loss: float) -> None:
    items = [EncodedItem(name, [1, 2], [0, 1]) for name in ("a", "b")]
    with pytest.raises(QuantizationError, match=f"the quantized model has a loss of {loss} on test row b; expected a"):
        quantization.check_losses([1.0, loss], items, "quantized")


def test_items_are_random_rows_with_an_answer(base_model: LoadableModel, dataset: Artifact) -> None:
    tokenizer = model_loading.load_tokenizer(base_model.tokenizer)
    first, again, other = (
        [item.id for item in quantization.read_items(dataset, tokenizer, 10, 2048, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again != other
    rows = quantization.read_items(dataset, tokenizer, 100, 2048, seed=1)
    assert [item.id for item in rows[:10]] == first
    assert len(rows) == 12
    # The longest answers begin after the limit; the rows without them are replaced.
    start = sorted(item.mask.index(1) for item in rows)[-2]
    usable = [item.id for item in rows if item.mask.index(1) < start]
    assert [item.id for item in quantization.read_items(dataset, tokenizer, 10, start, seed=1)] == usable[:10]


def test_quantized_base_model_is_refused(base_model: LoadableModel) -> None:
    config = model_loading.load_configuration(base_model.weights)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConfigurationError, match=r"model has quantization_config in config\.json"):
        quantization.check_quantizable(TritonPackagingConfig(quantization="int8"), config)


def test_model_without_linear_layers_is_refused(
    base_model: LoadableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="gpt2"), modules=lambda: [torch.nn.Embedding(2, 2)])
    monkeypatch.setattr(quantization, "load_merged_model", lambda _: model)
    with pytest.raises(QuantizationError, match="the gpt2 model has no linear layer to quantize"):
        quantization.write_quantized_weights(base_model, tmp_path, "int8", "float32")


def test_too_few_test_rows_are_refused(adapted_model: LoadableModel, tmp_path: Path) -> None:
    few = dataset_of("text", tmp_path / "data")
    with pytest.raises(InputError, match="has 4 rows with an answer; quantization requires at least 10"):
        build(adapted_model, tmp_path / "out", few)


def test_base_model_without_dataset_is_refused(base_model: LoadableModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"packaging a base model with .*quantization requires a dataset"):
        build(base_model, tmp_path / "out", None)


def test_model_is_in_use_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    @contextmanager
    def record_use(*paths: Path | str) -> Iterator[None]:
        used.extend(map(str, paths))
        yield
        used.clear()

    def open_used(source: str, *_: object) -> LoadableModel:
        assert source in used
        raise InputError("opened", hint="")

    monkeypatch.setattr(artifact_store, "keep_paths_in_use", record_use)
    monkeypatch.setattr(model_loading, "open_model", open_used)
    with pytest.raises(InputError, match="opened"):
        single_stages.package_model("folder", tmp_path / "out", Customization(), Workdir(tmp_path), SilentReporter())


def test_package_without_dataset_is_refused(adapted_model: LoadableModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the dataset that the model was trained on is not available"):
        build(adapted_model, tmp_path / "out", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "vllm"}, "with backend vllm; expected backend python"),
        ({"quantization": "fp8"}, "is fp8, with backend python; expected backend vllm"),
        ({"quantization": "fp8", "backend": "vllm", "adapter": "attached"}, "is fp8, with an attached adapter"),
        (
            {"quantization": "fp8", "backend": "vllm", "vllm": {"quantization": "awq"}},
            r"with vllm\.quantization awq; expected an empty vllm\.quantization",
        ),
        (
            {"quantization": "int4-gptq", "backend": "vllm", "dtype": "float32"},
            "with dtype float32; expected dtype auto or bfloat16",
        ),
        ({"quantization": "int4-gptq"}, "is int4-gptq, with backend python; expected backend vllm"),
        ({"adapter": "attached"}, "with an attached adapter; expected an adapter that is merged"),
        ({"weights": "referenced"}, "with weights referenced; expected weights copied"),
    ],
)
def test_unsupported_settings_are_refused(
    adapted_model: LoadableModel, dataset: Artifact, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    config = TritonPackagingConfig.model_validate({"quantization": "int8", "prove": False, **settings})
    with pytest.raises(ConfigurationError, match=message):
        package(adapted_model, tmp_path / "out", config, seed=1, reporter=SilentReporter(), dataset=dataset)


def test_step_measures_the_dataset_on_which_the_model_was_trained(
    base_model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish_adapter(base_model, tmp_path / "model", dataset=dataset.as_input())
    stored = {artifact.sha256: artifact for artifact in (model, dataset)}
    work = SimpleNamespace(
        reporter=SilentReporter(), workdir=Workdir(tmp_path), load_artifact=lambda sha256, *_: stored[sha256]
    )
    monkeypatch.setattr(
        pipeline_step, "produce_artifact", lambda stage, parameters, build, links: build(tmp_path / "out", work)
    )
    config = TritonPackagingConfig(quantization="int8", quantization_margin=0.05, prove=False)
    path = SimpleNamespace(path=str(tmp_path / "report.html"), uri="", metadata={})
    triton_packaging.python_func(
        config=config.model_dump_json(),
        inputs="{}",
        seed=1,
        model=model.sha256,
        report=path,
        links=path,
        triton_package=path,
    )
    manifest = artifact_folder.read_manifest(tmp_path / "out")
    assert manifest.find_input("dataset").content_sha256 == dataset.sha256  # type: ignore[union-attr]


def test_step_refuses_other_calibrated_weights_than_the_evaluated_ones(
    base_model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "mkdir output; echo 1 > output/model.safetensors; echo 1 > output/recipe.yaml"
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(make_environment(tmp_path / "environment", script)))
    model = publish_adapter(base_model, tmp_path / "model", dataset=dataset.as_input())
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    measured = {"calibration": {"weights_sha256": "a" * 64}}
    (evaluation / "evaluation.json").write_text(json.dumps({"measured": measured}), encoding="utf-8")
    stored = {model.sha256: model, dataset.sha256: dataset, "e": SimpleNamespace(path=evaluation)}
    work = SimpleNamespace(
        reporter=SilentReporter(), workdir=Workdir(tmp_path), load_artifact=lambda sha256, *_: stored[sha256]
    )
    keys = []

    def produce(stage: str, parameters: dict[str, Any], build: Callable[..., Artifact], links: str) -> Artifact:
        keys.append(parameters["evaluation"])
        return build(tmp_path / "out", work)

    monkeypatch.setattr(pipeline_step, "produce_artifact", produce)
    path = SimpleNamespace(path=str(tmp_path / "report.html"), uri="", metadata={})
    config = TritonPackagingConfig(backend="vllm", quantization="int4-gptq", prove=False)
    with pytest.raises(CalibrationError, match=r"int4-gptq weights .{12}; the evaluation measured a{12}$"):
        triton_packaging.python_func(
            config=config.model_dump_json(),
            inputs="{}",
            seed=1,
            model=model.sha256,
            report=path,
            links=path,
            triton_package=path,
            evaluation="e",
        )
    assert keys == ["e"]
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_estimated_size_is_that_of_the_embedded_model() -> None:
    shape = ModelShape(134_515_008, 0, 0, layers=30, hidden=576, intermediate=1536, vocabulary=49_152)
    estimate = resource_formulas.estimate_repository_bytes(shape, gpu=False, quantization="int8")
    assert estimate == pytest.approx(192_044_704, rel=0.01)  # measured
    # fp8: 220,232,592 bytes were measured; the estimate counts the output layer, which shares the weights of the input
    # embedding, a second time.
    shared = replace(shape, embedding=28_311_552)
    estimate = resource_formulas.estimate_repository_bytes(shared, gpu=False, quantization="fp8")
    assert estimate - 3 * shared.embedding == pytest.approx(220_232_592, rel=0.01)


UNPROVEN = "its Triton package is unproven"
NOT_SHOWN = "the loss of its quantized weights is not shown to be within the margin"
Edit = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda found, config: None, None),
        (lambda found, config: config.update(quantization_margin=0.025), NOT_SHOWN),
        (lambda found, config: (found.update(margin=0.06), config.update(quantization_margin=0.06)), NOT_SHOWN),
        (lambda found, config: found.update(increase_bound=math.inf), NOT_SHOWN),
        (lambda found, config: found.update(items=9), NOT_SHOWN),
        (lambda found, config: found.update(confidence=0.5), NOT_SHOWN),
        (lambda found, config: config.update(quantization="none"), "config.quantization of its Triton package contra"),
        (lambda found, config: found.update(margin=None), "its Triton package cannot be read (TypeError"),
        (lambda found, config: found.pop("items"), "its Triton package cannot be read (KeyError: 'items')"),
        (lambda found, config: config.pop("quantization_margin"), "its Triton package cannot be read (KeyError"),
    ],
)
def test_edited_evidence_is_an_objection(
    int8_package: Artifact, dataset: Artifact, tmp_path: Path, edit: Edit, expected: str | None
) -> None:
    folder = shutil.copytree(int8_package.path, tmp_path / "package")
    statement = json.loads((folder / "proof.json").read_text(encoding="utf-8"))
    manifest = int8_package.manifest.model_copy(deep=True)
    edit(statement["quantization"], manifest.config)
    (folder / "proof.json").write_text(json.dumps(statement), encoding="utf-8")
    manifest.summary["quantization"] = statement["quantization"]
    artifact = Artifact(folder, manifest)
    model = int8_package.manifest.find_input("model")
    assert model
    objections = evidence.check_package(artifact, model.content_sha256, dataset.as_input())
    if expected is None:
        assert objections == [UNPROVEN]
    else:
        assert any(each.startswith(expected) for each in objections), objections


def test_package_measured_on_another_dataset_is_an_objection(int8_package: Artifact, dataset: Artifact) -> None:
    other = dataset.as_input().model_copy(update={"content_sha256": "e" * 64})
    model = int8_package.manifest.find_input("model")
    assert model
    for trained_on, name in ((other, f"dataset {'e' * 12}"), (None, "an unrecorded dataset")):
        assert evidence.check_package(int8_package, model.content_sha256, trained_on) == [
            UNPROVEN, f"its Triton package used dataset {dataset.sha256[:12]}; the model was trained on {name}"
        ]  # fmt: skip


def test_summary_without_the_comparison_in_the_proof_is_an_objection(int8_package: Artifact, dataset: Artifact) -> None:
    manifest = int8_package.manifest.model_copy(deep=True)
    del manifest.summary["quantization"]
    manifest.config["quantization"] = "none"
    model = manifest.find_input("model")
    assert model
    assert evidence.check_package(Artifact(int8_package.path, manifest), model.content_sha256, dataset.as_input()) == [
        UNPROVEN, "summary.quantization of its Triton package contradicts proof.json"
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_model_of_a_family_computes_with_int8_layers_or_is_refused(family: Family) -> None:
    from transformers import AutoModelForCausalLM

    config = build_configuration(family)
    if family.name in REFUSED_FAMILIES:
        with pytest.raises(ConfigurationError, match=r"of the weights of a|reads the weights"):
            quantization.check_quantizable(TritonPackagingConfig(quantization="int8"), config)
        return
    quantization.check_quantizable(TritonPackagingConfig(quantization="int8"), config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.inference_mode():
        before = model(ids).logits
        replace_linear_layers(model, stores_weights=True)
        pack_int8_layers(model)
        after = model(ids).logits
    assert (after - before).abs().max() < 0.05 * before.abs().max()
