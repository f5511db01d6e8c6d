"""Quantized weights of a package, and their comparison with the unquantized model on the test split.

The code of the package that serves the model computes the loss of int8 weights, and transformers that of weights for vLLM. The
comparison is paired, and its one-sided bound is that of the promotion gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.common import significance
from components.common.artifacts.artifact_folder import Artifact
from components.common.gate_rules import MIN_QUANTIZATION_ITEMS, QUANTIZATION_CONFIDENCE
from components.common.models import (
    calibrated_weights,
    compressed_weights,
    encoded_rows,
    model_loading,
    quantization_env,
)
from components.common.models.encoded_rows import EncodedItem
from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import QUANTIZATIONS, find_quantization
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError, InputError, TunelineError
from components.common.runtime.reporters import Reporter
from components.triton_packaging.config import TritonPackagingConfig

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BOOTSTRAP_SAMPLES = 2000
MAX_ITEM_TOKENS = 2048
# Of the parameters outside of embeddings. Experts in fused tensors and GPT-2's layers are no linear layers of torch.
MIN_LINEAR_SHARE = 0.5


class QuantizationError(TunelineError):
    """The loss of the quantized model may exceed that of the unquantized model by more than the margin."""

    kind = "quantization"


@dataclass(frozen=True)
class QuantizationResult:
    """Comparison of the quantized with the unquantized model.

    Attributes:
        loss: Loss of the quantized model on the items, in nats per token of an answer.
        increase: Difference to the loss of the unquantized model.
        ci95: 95% interval of the increase.
        increase_bound: One-sided upper confidence bound of the increase.
        weight_bytes: Size of the packaged weights.
        unquantized_weight_bytes: Size of the weights that packaging without quantization would write.
        calibration: What determined calibrated weights, see `CalibratedWeights`; None without calibration.
    """

    scheme: str
    items: int
    tokens: int
    loss: float
    unquantized_loss: float
    increase: float
    ci95: tuple[float, float]
    increase_bound: float
    margin: float
    confidence: float
    weight_bytes: int
    unquantized_weight_bytes: int
    calibration: Mapping[str, str | int] | None = None

    def build_statement(self) -> dict[str, object]:
        """Return the fields that are set, for proof.json and the manifest's summary."""
        fields = {**asdict(self), "ci95": list(self.ci95)}
        return {name: value for name, value in fields.items() if value is not None}


def check_quantizable(config: TritonPackagingConfig, model_config: PretrainedConfig) -> None:
    """Check that a model can be quantized, if the configuration requires it. Reads no weights.

    Raises:
        ConfigurationError: the model is quantized, most weights are not in linear layers, or the model computes with
            them outside of the layers; or calibration lacks its environment, or does not support the size of a layer.
    """
    entry = find_quantization(config.quantization)
    if entry is None:
        return
    if entry.is_calibrated:
        quantization_env.check_environment(config.quantization)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigurationError(
            f"triton_packaging.quantization is {config.quantization}, but the {model_config.model_type} model has "
            "quantization_config in config.json; expected a model without it",
            hint="Set triton_packaging.quantization to none.",
        )
    import torch
    from transformers import AutoModelForCausalLM

    from components.triton_packaging.python_backend.int8_layers import replace_linear_layers

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    total = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outer)
    linear = [layer for layer in model.modules() if type(layer) is torch.nn.Linear and id(layer.weight) not in outer]
    share = sum(layer.weight.numel() for layer in linear) / total
    if share < MIN_LINEAR_SHARE:
        raise ConfigurationError(
            f"triton_packaging.quantization is {config.quantization}, but only {share:.0%} of the weights of a "
            f"{model_config.model_type} model are in linear layers; expected at least {MIN_LINEAR_SHARE:.0%}",
            hint="Set triton_packaging.quantization to none.",
        )
    if entry.group_sizes:
        calibrated_weights.select_group_size(model, config.quantization)
    # int8 layers show for other formats too whether a model reads the weights of its layers.
    computes = _can_compute(model)  # models of experts cannot on the meta device
    replace_linear_layers(model, stores_weights=False)
    if computes and not _can_compute(model):
        raise ConfigurationError(
            f"triton_packaging.quantization is {config.quantization}, but a {model_config.model_type} model reads the "
            "weights of linear layers directly",
            hint="Set triton_packaging.quantization to none.",
        )


def _can_compute(model: PreTrainedModel) -> bool:
    """Return whether a model on the meta device computes the shape of its logits."""
    import torch

    try:
        with torch.inference_mode():
            model(torch.zeros(1, 2, dtype=torch.long, device="meta"))
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def load_quantized_model(model: LoadableModel, quantization: str) -> PreTrainedModel:
    """Return the model with its adapter merged in float32 and its linear layers quantized.

    Args:
        quantization: a key of QUANTIZATIONS without calibration. Compressed formats also round the inputs of the layers.

    Raises:
        QuantizationError: the model has no linear layer.
    """
    from components.triton_packaging.python_backend.int8_layers import replace_linear_layers

    loaded = load_merged_model(model)
    if preset := QUANTIZATIONS[quantization].preset:
        compressed_weights.round_linear_layers(loaded, preset)
        return loaded
    if not replace_linear_layers(loaded, stores_weights=True):
        raise QuantizationError(
            f"the {loaded.config.model_type} model has no linear layer to quantize; expected at least one",
            hint="Set triton_packaging.quantization to none.",
        )
    return loaded


def load_merged_model(model: LoadableModel) -> PreTrainedModel:
    """Return the model in float32, with its adapter merged."""
    import torch

    loaded = model_loading.load_model(model, dtype=torch.float32)
    return loaded.merge_and_unload() if model.adapter else loaded


def write_quantized_weights(model: LoadableModel, folder: Path, quantization: str, dtype: str) -> None:
    """Write the quantized weights and the configuration with which transformers loads them.

    Args:
        quantization: a key of QUANTIZATIONS without calibration.
        dtype: data type of the other tensors with compressed weights. With int8, they are stored in bfloat16 if that is exact, and
            otherwise in float32.
    """
    import torch

    from components.triton_packaging.python_backend.int8_layers import METHOD

    if preset := QUANTIZATIONS[quantization].preset:
        compressed_weights.save_compressed(load_merged_model(model), folder, dtype, preset)
        return
    quantized = load_quantized_model(model, quantization)
    for parameter in quantized.parameters():
        if parameter.dtype == torch.float32 and torch.equal(parameter.bfloat16().float(), parameter):
            parameter.data = parameter.data.bfloat16()
    quantized.config.tie_word_embeddings = False
    quantized.config.quantization_config = {"quant_method": METHOD}
    quantized.save_pretrained(folder)


def compare_with_unquantized(
    model: LoadableModel,
    version: Path,
    parameters: Mapping[str, str],
    dataset: Artifact,
    config: TritonPackagingConfig,
    *,
    seed: int,
    reporter: Reporter,
    calibration: Mapping[str, str | int] | None = None,
) -> QuantizationResult:
    """Compare the loss of the packaged model on the test split with that of the unquantized model.

    Args:
        version: version folder of the package.
        parameters: weights_folder, context and dtype of the package, as strings.
        calibration: what determined calibrated weights, for the result.

    Raises:
        QuantizationError: a loss is not finite, or the bound of the increase exceeds the margin.
        InputError: the test split has too few rows with an answer.
    """
    device = model_loading.prepare_torch(seed)
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    max_length = min(MAX_ITEM_TOKENS, int(parameters["context"]))
    items = read_items(dataset, tokenizer, config.quantization_items, max_length, seed=seed)
    tokens = [sum(item.mask[1:]) for item in items]
    reporter.step("loss of the unquantized model")
    before = load_merged_model(model).to(device)
    unquantized_bytes = sum(p.numel() for p in before.parameters()) * (4 if parameters["dtype"] == "float32" else 2)
    before_losses = compute_losses(before, items, reporter)
    del before
    reporter.step("loss of the quantized model")
    after = _load_package(version, parameters, config.quantization, device)
    losses = compute_losses(after, items, reporter)
    check_losses(before_losses, items, "unquantized")
    check_losses(losses, items, "quantized")
    weight_files = version.joinpath(parameters["weights_folder"]).glob("*.safetensors")
    return compare_losses(
        before_losses,
        losses,
        tokens,
        config,
        scheme=config.quantization,
        weight_bytes=sum(path.stat().st_size for path in weight_files),
        unquantized_weight_bytes=unquantized_bytes,
        calibration=calibration,
        seed=seed,
    )


def compare_losses(
    before_losses: Sequence[float],
    losses: Sequence[float],
    tokens: Sequence[int],
    config: TritonPackagingConfig,
    *,
    scheme: str,
    weight_bytes: int,
    unquantized_weight_bytes: int,
    seed: int,
    calibration: Mapping[str, str | int] | None = None,
) -> QuantizationResult:
    """Compare the losses of the quantized model on the items with those of the unquantized model.

    Args:
        tokens: number of tokens of each item's answer.
        calibration: what determined calibrated weights, for the result.

    Raises:
        QuantizationError: the bound of the increase exceeds the margin.
    """
    # The largest difference seen, in either direction, stands for the unseen items: rounding changes all items alike.
    pessimistic = significance.estimate_pessimistic_gain(
        before_losses, losses, tokens, max_item_loss=None, samples=BOOTSTRAP_SAMPLES, seed=seed
    )
    bound = -pessimistic.compute_lower_bound(QUANTIZATION_CONFIDENCE)
    gain = significance.estimate_gain(before_losses, losses, tokens, samples=BOOTSTRAP_SAMPLES, seed=seed)
    interval = gain.compute_interval(0.95)
    result = QuantizationResult(
        scheme=scheme,
        items=len(tokens),
        tokens=sum(tokens),
        loss=sum(losses) / sum(tokens),
        unquantized_loss=sum(before_losses) / sum(tokens),
        increase=-interval.value,
        ci95=(-interval.high, -interval.low),
        increase_bound=bound,
        margin=config.quantization_margin,
        confidence=QUANTIZATION_CONFIDENCE,
        weight_bytes=weight_bytes,
        unquantized_weight_bytes=unquantized_weight_bytes,
        calibration=calibration,
    )
    _check_margin(result)
    return result


def _load_package(
    version: Path, parameters: Mapping[str, str], quantization: str, device: torch.device
) -> PreTrainedModel:
    """Return the packaged model: int8 as the python backend loads it, others as transformers computes them in place of vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    if QUANTIZATIONS[quantization].preset:
        dtype = getattr(torch, parameters["dtype"]) if device.type == "cuda" else torch.float32
        packaged: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            version / parameters["weights_folder"], dtype=dtype, trust_remote_code=False
        )
        return packaged.to(device).eval()
    from components.triton_packaging.python_backend.int8_layers import pack_int8_layers
    from components.triton_packaging.python_backend.model_loading import load_model

    loaded, _, _ = load_model(version, parameters, device)
    if device.type == "cpu":
        pack_int8_layers(loaded)
    return loaded


def _check_margin(result: QuantizationResult) -> None:
    if not result.increase_bound <= result.margin:
        raise QuantizationError(
            f"the {result.scheme} model has a loss of {result.loss:.4f} nats per token on {result.items} test rows; "
            f"the unquantized model has {result.unquantized_loss:.4f}. The increase is {result.increase:+.4f}, at most "
            f"{result.increase_bound:+.4f} with {result.confidence:.0%} confidence; "
            f"triton_packaging.quantization_margin allows {result.margin:.4f}",
            hint="Choose another format of the weights, or raise triton_packaging.quantization_margin; if the measured "
            "increase is within the margin, raise triton_packaging.quantization_items.",
        )


def check_losses(losses: list[float], items: list[EncodedItem], model: str) -> None:
    """Check that the loss of every item is finite.

    Args:
        model: "quantized" or "unquantized", for the error message.

    Raises:
        QuantizationError: a loss is NaN or infinite.
    """
    for loss, item in zip(losses, items, strict=True):
        if not math.isfinite(loss):
            raise QuantizationError(
                f"the {model} model has a loss of {loss} on test row {item.id}; expected a finite number",
                hint="Choose another format of the weights, and evaluate the model.",
            )


def read_items(
    dataset: Artifact, tokenizer: PreTrainedTokenizerBase, max_items: int, max_length: int, *, seed: int
) -> list[EncodedItem]:
    """Return the token ids and the answer masks of random test rows that have an answer."""
    items = encoded_rows.read_random_rows(
        dataset, "test", tokenizer, max_items=max_items, max_length=max_length, seed=seed
    )
    if len(items) < MIN_QUANTIZATION_ITEMS:
        raise InputError(
            f"the test split of {dataset.path} has {format_count(len(items), 'row')} with an answer; quantization requires at least "
            f"{MIN_QUANTIZATION_ITEMS}",
            hint="Increase the number of rows or the test fraction, or choose another format of the weights.",
        )
    return items


def compute_losses(model: PreTrainedModel, items: list[EncodedItem], reporter: Reporter) -> list[float]:
    """Return the negative log-likelihood of the answer of each item, in nats."""
    import torch

    losses = []
    for done, (_, ids, mask) in enumerate(items, 1):
        tokens = torch.tensor([ids], device=model.device)
        is_answer = torch.tensor(mask[1:], dtype=torch.bool, device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1][is_answer].float()
        losses.append(float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:][is_answer], reduction="sum")))
        reporter.progress(done, len(items), "rows")
    return losses
