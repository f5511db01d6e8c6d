"""vLLM as the engine on NVIDIA GPUs: its own batching and kernels, the same requests and the same meaning of scores.

Unproven: written against vLLM's documented interface (LLM.generate, SamplingParams.prompt_logprobs, LoRARequest) and tested with a stand-in
that answers as a transformers model does, not on a GPU. Scores of two engines differ in the last bits
of bfloat16; they are never mixed in one comparison, since all models of an evaluation are asked through one engine.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from components.common import models
from components.common.models import ADAPTER_CONFIG, Model
from components.common.progress import Reporter
from components.evaluation import prefixes
from components.evaluation.task import Continuation, Decoding, Engine, Likelihood

AT_ONCE = 4096  # requests handed over together, so that progress is seen; vLLM makes its own batches of them


class VllmEngine:
    """One role of a loaded vLLM model: with an adapter, or without for its base."""

    def __init__(self, llm: Any, tokenizer: Any, room: int | None, adapter: Any = None) -> None:
        self._llm, self._tokenizer, self._room, self._adapter = llm, tokenizer, room, adapter

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def room(self) -> int | None:
        """The longest input in tokens, prompt and answer together; vLLM computes one token behind each request, which takes one."""
        return self._room - 1 if self._room else None

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """One for each, in order, from the log-likelihoods vLLM gives of a prompt's own tokens."""
        different, which = prefixes.unique(asked)
        found = []
        settings = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}
        for one, output in zip(different, self._outputs([one.ids for one in different], settings, "items", reporter), strict=True):
            found.append(likelihood(one, output.prompt_logprobs))
        return [found[place] for place in which]

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """The greedy answers to prompts, in order."""
        different = sorted({tuple(prompt) for prompt in prompts})
        settings = {"temperature": 0.0, "max_tokens": decoding.max_new_tokens, "stop": list(decoding.stop), "skip_special_tokens": True}
        outputs = self._outputs(different, settings, "answers", reporter)
        found = {prompt: str(output.outputs[0].text) for prompt, output in zip(different, outputs, strict=True)}
        return [found[tuple(prompt)] for prompt in prompts]

    def close(self) -> None:
        """Let go of the model: vLLM takes nearly all of a GPU's memory, and the next one needs it."""
        self._llm = None

    def _outputs(self, prompts: Sequence[Sequence[int]], settings: dict[str, Any], unit: str, reporter: Reporter) -> Iterator[Any]:
        sampling = importlib.import_module("vllm").SamplingParams(**settings)
        for start in range(0, len(prompts), AT_ONCE):
            part = [{"prompt_token_ids": list(ids)} for ids in prompts[start : start + AT_ONCE]]
            yield from self._llm.generate(part, sampling, use_tqdm=False, lora_request=self._adapter)
            reporter.progress(min(start + AT_ONCE, len(prompts)), len(prompts), unit)


def likelihood(asked: Continuation, known: Sequence[Any]) -> Likelihood:
    """The counted tokens' likelihood. `known` has for each token a mapping of token ids to their log-likelihood and rank (1: the first)."""
    counted = [(place, int(asked.ids[place])) for place, counts in enumerate(asked.counted) if counts and place]
    entries = [known[place][token] for place, token in counted]
    return Likelihood(math.fsum(float(e.logprob) for e in entries), len(entries), all(e.rank == 1 for e in entries))


def serves(model: Model) -> bool:
    """Whether vLLM can apply the model's adapter: a plain low-rank one."""
    settings = _adapter_settings(model)
    return settings is None or (settings.get("peft_type") == "LORA" and not settings.get("use_dora"))


def _adapter_settings(model: Model) -> dict[str, Any] | None:
    if model.adapter is None:
        return None
    return dict(json.loads((model.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")))


def engines(tuned: Model, base: Model | None, tokenizer: Any, reporter: Reporter) -> Iterator[tuple[Model, Engine]]:
    """Each model with its engine, the base first; an adapter and its base share the loaded weights."""
    shared = base is not None and tuned.adapter is not None and base.sha256 == tuned.base.sha256
    if base and not shared:
        reporter.step("loading the base model")
        llm, room = _load(base)
        engine = VllmEngine(llm, tokenizer, room)
        del llm
        yield base, engine
        engine.close()
        gc.collect()
    reporter.step("loading the model")
    llm, room = _load(tuned)
    if base and shared:
        yield base, VllmEngine(llm, tokenizer, room)
    yield tuned, VllmEngine(llm, tokenizer, room, _request(tuned))


def _load(model: Model) -> tuple[Any, int | None]:
    """The model's weights in vLLM, in bfloat16 as transformers would hold them on a GPU, and the longest input it takes."""
    config = models.configuration(model.weights).get_text_config(decoder=True)
    room = getattr(config, "max_position_embeddings", None)
    settings = _adapter_settings(model)
    adapters = {"enable_lora": True, "max_lora_rank": _rank(int(settings["r"]))} if settings else {}
    llm = importlib.import_module("vllm").LLM(
        model=str(model.weights), tokenizer=str(model.tokenizer), dtype="bfloat16", trust_remote_code=False, seed=0, **adapters
    )
    return llm, room


def _rank(rank: int) -> int:
    """The least of the ranks vLLM has kernels for that holds this one."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def _request(model: Model) -> Any:
    return importlib.import_module("vllm.lora.request").LoRARequest("adapter", 1, str(model.adapter)) if model.adapter else None
