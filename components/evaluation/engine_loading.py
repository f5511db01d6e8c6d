"""Selection and loading of inference engines, with one model in memory at a time."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from components.common.models import (
    calibrated_weights,
    compressed_weights,
    compute_devices,
    int8_rounding,
    model_loading,
)
from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import QUANTIZATIONS, QuantizationName
from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.common.runtime.reporters import Reporter
from components.evaluation import forward_pass, vllm_engine
from components.evaluation.config import EvaluationConfig, check_quantized_engine
from components.evaluation.prefix_trees import TokenTree
from components.evaluation.reward_engine import RewardEngine
from components.evaluation.task_interface import Engine
from components.evaluation.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EngineName = Literal["auto", "transformers", "vllm"]
PROBE_TOKENS = 24  # tokens scored to compare a merged adapter with the separate adapter


def open_engines(
    tuned: LoadableModel,
    base: LoadableModel | None,
    *,
    batch_tokens: int,
    reporter: Reporter,
    engine: EngineName = "auto",
    input_limit: int | None = None,
    quantization: QuantizationName = "none",
    calibrated: Path | None = None,
) -> Generator[tuple[LoadableModel, Engine]]:
    """Yield each model with its engine, the base first if it is given.

    The generator closes an engine before it yields the next one. An adapter and its base share the loaded weights:
    the base is yielded before the adapter is attached. Both use the tuned model's tokenizer and therefore receive the
    same tokens. Call `model_loading.prepare_torch` first.

    Args:
        tuned: The candidate or the incumbent.
        base: The tuned model's base; None to open only the tuned model.
        batch_tokens: Tokens per batch, including padding.
        reporter: Receives the progress.
        engine: The configured engine.
        input_limit: Upper limit of the engines' `max_input_tokens`; None without a limit.
        quantization: Format of a tuned language model's weights.
        calibrated: Folder of the tuned model's weights if the format is calibrated.

    Raises:
        EngineMissingError: `engine` is "vllm", and vLLM is not installed or does not support the model.
    """
    tokenizer = model_loading.load_tokenizer(tuned.tokenizer)
    if tuned.is_reward_model and base is None:
        reporter.step("loading the reward model")
        yield tuned, RewardEngine(tuned, tokenizer, batch_tokens, input_limit)
        return
    if resolve_engine(engine, tuned) == "vllm":
        yield from vllm_engine.open_engines(tuned, base, tokenizer, reporter, input_limit, quantization, calibrated)
        return
    loaded = None
    if base:
        reporter.step("loading the base model")
        loaded = model_loading.load_model(base)
        base_engine = TransformersEngine(loaded, tokenizer, batch_tokens, input_limit)
        yield base, base_engine
        base_engine.close()
        if tuned.is_reward_model:
            del loaded
            gc.collect()
            yield from open_engines(
                tuned, None, batch_tokens=batch_tokens, reporter=reporter, engine=engine, input_limit=input_limit
            )
            return
    if base is None or tuned.adapter is None or base.sha256 != tuned.base.sha256 or quantization != "none":
        loaded = None
        gc.collect()
    reporter.step("loading the model" if loaded is None else "attaching the adapter")
    if calibrated:
        loaded = calibrated_weights.load_quantized_model(calibrated)
    else:
        loaded = load_tuned(tuned, loaded, reporter) if quantization == "none" else load_rounded(tuned, quantization)
    tuned_engine = TransformersEngine(loaded, tokenizer, batch_tokens, input_limit)
    yield tuned, tuned_engine
    tuned_engine.close()


def read_context_length(model: LoadableModel) -> int | None:
    """Return a model's context length in tokens, less its virtual tokens; None if its configuration sets no limit."""
    config = model_loading.load_configuration(model.base.path).get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    return int(positions) - (_count_virtual_tokens(model.adapter) if model.adapter else 0)


def _count_virtual_tokens(adapter: Path) -> int:
    settings = json.loads((adapter / model_loading.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return int(settings.get("num_virtual_tokens") or 0)


def resolve_engine(engine: EngineName, model: LoadableModel) -> Literal["transformers", "vllm"]:
    """Return the engine to use.

    "auto" selects vLLM if an NVIDIA GPU is available and vLLM is installed and supports the model; else transformers.

    Reward models use transformers, whatever is configured.

    Raises:
        EngineMissingError: `engine` is "vllm", and vLLM is not installed or does not support the model.
    """
    installed = check_vllm_installed(engine)
    if engine == "transformers" or model.is_reward_model:
        return "transformers"
    can_serve = vllm_engine.can_serve(model)
    if engine == "auto":
        return "vllm" if installed and can_serve and compute_devices.select_device() == "cuda" else "transformers"
    if not can_serve:
        raise EngineMissingError(
            "evaluation.engine is vllm, which does not support the virtual tokens of the model's adapter",
            hint="Set evaluation.engine to transformers.",
        )
    return engine


def check_vllm_installed(engine: EngineName) -> bool:
    """Return whether vLLM is installed.

    Raises:
        EngineMissingError: `engine` is "vllm", and vLLM is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise EngineMissingError(
            "evaluation.engine is vllm, and vLLM is not installed",
            hint="Install vLLM (pip install vllm), or set evaluation.engine to transformers.",
        )
    return installed


def load_rounded(tuned: LoadableModel, quantization: str) -> PreTrainedModel:
    """Return the tuned model with its adapter merged in float32 and its linear layers rounded as in its package.

    With compressed weights, the inputs of the layers are rounded too. The weights are rounded on the CPU, so that a GPU holds them in the default precision only.
    """
    import torch

    loaded = model_loading.load_model(tuned, trainable=True, dtype=torch.float32)
    merged = loaded.merge_and_unload() if tuned.adapter else loaded
    if preset := QUANTIZATIONS[quantization].preset:
        compressed_weights.round_linear_layers(merged, preset)
    else:
        int8_rounding.round_linear_layers(merged)
    # Not the buffers, because rotary frequencies stay in float32, as in other models; nor the scales of compressed weights.
    for name, parameter in merged.named_parameters():
        if not name.endswith("weight_scale"):
            parameter.data = parameter.data.to(model_loading.get_default_dtype())
    return merged.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def check_quantization(config: EvaluationConfig, candidate: LoadableModel) -> None:
    """Check that the candidate can be measured with quantized weights, if the configuration requires it.

    Raises:
        ConfigurationError: the engine is vLLM and the format int8; or the candidate is a reward model or has virtual tokens,
            so that no package has its quantized weights.
    """
    if config.quantization == "none":
        return
    check_quantized_engine(config)
    reason = "is a reward model" if candidate.is_reward_model else ""
    if candidate.adapter and _count_virtual_tokens(candidate.adapter):
        reason = "has an adapter with virtual tokens"
    if reason:
        raise ConfigurationError(
            f"evaluation.quantization is {config.quantization}, but the candidate {reason}; expected a language model whose "
            "adapter can be merged",
            hint="Set triton_packaging.quantization to none.",
        )


def load_tuned(tuned: LoadableModel, loaded: PreTrainedModel | None, reporter: Reporter) -> PreTrainedModel:
    """Return the tuned model, on the base's weights if they are already loaded.

    In float32, a low-rank adapter is merged into the weights, because a separate adapter makes a forward pass on a
    CPU a third slower. The merged model is compared with the separate adapter. The adapter is not merged if the
    results differ (for example, because the embedding is shared with the head), or in any other precision.
    """
    import torch

    if tuned.adapter is None:
        return model_loading.load_model(tuned)
    attached = (
        model_loading.load_model(tuned)
        if loaded is None
        else model_loading.attach_adapter(loaded, tuned.adapter).eval()
    )
    in_float32 = all(parameter.dtype == torch.float32 for parameter in attached.parameters())
    if not in_float32 or forward_pass.count_virtual_tokens(attached) or not hasattr(attached, "merge_and_unload"):
        return attached
    separate = _score_probe(attached)
    merged = attached.merge_and_unload(safe_merge=True)
    if forward_pass.is_close(merged, separate, _score_probe(merged)):
        return merged
    reporter.note(
        "the adapter is evaluated without merging, which takes longer: merged weights would change log-likelihoods by more than "
        f"{forward_pass.get_tolerance(merged):g} nats"
    )
    del attached, merged
    gc.collect()
    return model_loading.load_model(tuned)


def _score_probe(model: PreTrainedModel) -> list[float]:
    """Return the log-likelihoods of tokens spread over the vocabulary, each given the preceding tokens."""
    vocabulary = int(forward_pass.get_decoder_config(model).vocab_size)
    nodes = list(range(PROBE_TOKENS))
    ids = [(node * 7919 + 1) % vocabulary for node in nodes]
    tree = TokenTree(ids, [node - 1 for node in nodes], nodes, list(enumerate([*ids[1:], ids[0]])))
    return forward_pass.score_trees(model, [tree], forward_pass.PrefixCache())[0].logprobs
