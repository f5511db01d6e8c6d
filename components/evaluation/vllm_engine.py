"""vLLM as the inference engine.

Tested with vLLM 0.32 on a CPU with a base model (see docs/how-to/evaluation.md for the figures). Not tested: GPUs, bfloat16,
adapters, quantized weights.
"""

# Scores differ slightly between engines, and more in bfloat16, so all models of an evaluation use the same engine.

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.models import compressed_weights, compute_devices, model_loading
from components.common.models.adaptations import find_adaptation
from components.common.models.model_loading import ADAPTER_CONFIG, LoadableModel
from components.common.models.quantizations import find_quantization
from components.common.runtime.reporters import Reporter
from components.evaluation import prefix_trees
from components.evaluation.task_interface import Continuation, Decoding, Engine, Likelihood

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, RequestOutput

REQUESTS_PER_CALL = 4096  # interval of progress reports; vLLM forms its own batches


class VllmEngine:
    """A model loaded in vLLM.

    `max_input_tokens` is the context length in tokens (prompt and answer); None without a limit.
    """

    def __init__(self, llm: LLM, tokenizer: PreTrainedTokenizerBase, max_input_tokens: int | None) -> None:
        self._llm, self.tokenizer, self.max_input_tokens = llm, tokenizer, max_input_tokens

    def compute_likelihoods(self, continuations: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Return one likelihood per continuation, in order, from vLLM's log-probabilities of the prompt tokens."""
        unique, positions = prefix_trees.deduplicate(continuations)
        options = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}
        outputs = self._generate([continuation.ids for continuation in unique], options, "items", reporter)
        likelihoods = []
        for continuation, output in zip(unique, outputs, strict=True):
            # For each token, vLLM maps token ids to log-likelihood and rank.
            entries = [
                output.prompt_logprobs[position][int(continuation.ids[position])]
                for position, scored in enumerate(continuation.scored)
                if scored and position
            ]
            logprob = math.fsum(float(entry.logprob) for entry in entries)
            likelihoods.append(Likelihood(logprob, len(entries), all(entry.rank == 1 for entry in entries)))
        return [likelihoods[position] for position in positions]

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Return the answers to the prompts, in order."""
        requests, sampling = decoding.pair_seeds(prompts), decoding.sampling
        unique = sorted(set(requests))
        options = {
            "temperature": sampling.temperature if sampling else 0.0,
            **({"top_p": sampling.top_p} if sampling else {}),
            "max_tokens": decoding.max_new_tokens,
            "stop": list(decoding.stop),
            "skip_special_tokens": True,
        }
        seeds = [seed for _, seed in unique] if sampling else None
        outputs = self._generate([prompt for prompt, _ in unique], options, "answers", reporter, seeds)
        answers = {request: str(output.outputs[0].text) for request, output in zip(unique, outputs, strict=True)}
        return [answers[request] for request in requests]

    def close(self) -> None:
        """Release the model to free GPU memory, which vLLM allocates almost completely, for the next model."""
        self._llm = None

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: Mapping[str, object],
        unit: str,
        reporter: Reporter,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        build = importlib.import_module("vllm").SamplingParams
        shared = build(**options)
        for start in range(0, len(prompts), REQUESTS_PER_CALL):
            end = start + REQUESTS_PER_CALL
            chunk = [{"prompt_token_ids": list(ids)} for ids in prompts[start:end]]
            # One entry per prompt: its seed makes an answer independent of the other requests.
            sampling = [build(**options, seed=seed) for seed in seeds[start:end]] if seeds else shared
            yield from self._llm.generate(chunk, sampling, use_tqdm=False)
            reporter.progress(start + len(chunk), len(prompts), unit)


def can_serve(model: LoadableModel) -> bool:
    """Return whether vLLM can serve the model; an adapter must be mergeable into the weights."""
    if model.adapter is None:
        return True
    settings = json.loads((model.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    adaptation = find_adaptation(str(settings.get("peft_type")))
    return adaptation is not None and adaptation.is_mergeable


def open_engines(
    tuned: LoadableModel,
    base: LoadableModel | None,
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
    input_limit: int | None = None,
    quantization: str = "none",
    calibrated: Path | None = None,
) -> Iterator[tuple[LoadableModel, Engine]]:
    """Yield each model with its engine, the base first. One model is in memory at a time.

    Args:
        tuned: The candidate or the incumbent.
        base: The tuned model's base; None to open only the tuned model.
        tokenizer: The tuned model's tokenizer, which encodes the inputs of both models.
        reporter: Receives the progress.
        input_limit: Upper limit of the engines' `max_input_tokens`; None without a limit.
        quantization: Format of the tuned model's weights, as in its package.
        calibrated: Folder of the tuned model's weights if the format is calibrated.
    """
    import torch

    os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # as the package's backend, see tuneline_vllm_engine.py
    for model in [base, tuned] if base else [tuned]:
        entry = find_quantization(quantization) if model is tuned else None
        # The data type of the weights in the transformers engine on this device, unless vLLM refuses it.
        in_float32 = compute_devices.select_device() == "cpu" and not (entry and entry.needs_bfloat16)
        dtype = "float32" if in_float32 else "bfloat16"
        reporter.step("loading the base model" if model is base else "loading the model")
        config = model_loading.load_configuration(model.weights).get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        own = int(positions) - 1 if positions else None  # vLLM computes one token after each request
        limits = [limit for limit in (own, input_limit) if limit]
        with tempfile.TemporaryDirectory(prefix="tuneline-merged-") as folder:
            weights = model.weights
            # The adapter is merged in float32, as in packaging. vLLM can serve a separate adapter, but its CPU build
            # 0.32 then fails to return prompt log-probabilities: it computes the adapter's part of the logits for one
            # position per request.
            if entry and calibrated:
                weights = calibrated
            elif model.adapter or entry:
                loaded = model_loading.load_model(model, trainable=True, dtype=torch.float32)  # stays on the CPU
                merged = loaded.merge_and_unload() if model.adapter else loaded
                if entry:
                    compressed_weights.save_compressed(merged, Path(folder), dtype, entry.preset)
                else:
                    merged.to(getattr(torch, dtype)).save_pretrained(folder)
                del loaded, merged
                gc.collect()  # quantized layers refer to themselves
                weights = Path(folder)
            llm = importlib.import_module("vllm").LLM(
                model=str(weights), tokenizer=str(model.tokenizer), dtype=dtype, trust_remote_code=False, seed=0
            )
        engine = VllmEngine(llm, tokenizer, min(limits, default=None))
        del llm  # `close` releases the model only if the engine holds the last reference
        yield model, engine
        engine.close()
        gc.collect()
