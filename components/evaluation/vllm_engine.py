"""vLLM as the engine: its own batching and kernels, the same requests and the same meaning of scores.

A base model was tried with vLLM 0.32 on a processor (docs/evaluation.md has the figures); a GPU, bfloat16 and adapters are unproven. Scores
of two engines differ in the last bits, in bfloat16 by more; they are never mixed in one comparison, since all models of an evaluation are
asked through one engine.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.common import devices, models
from components.common.models import ADAPTER_CONFIG, Model
from components.common.progress import Reporter
from components.evaluation import prefixes
from components.evaluation.task import Continuation, Decoding, Engine, Likelihood

AT_ONCE = 4096  # requests handed over together, so that progress is seen; vLLM makes its own batches of them


class VllmEngine:
    """A model loaded in vLLM."""

    def __init__(self, llm: Any, tokenizer: Any, room: int | None) -> None:
        self._llm, self._tokenizer, self._room = llm, tokenizer, room

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
            yield from self._llm.generate(part, sampling, use_tqdm=False)
            reporter.progress(min(start + AT_ONCE, len(prompts)), len(prompts), unit)


def likelihood(asked: Continuation, known: Sequence[Any]) -> Likelihood:
    """The counted tokens' likelihood. `known` has for each token a mapping of token ids to their log-likelihood and rank (1: the first)."""
    counted = [(place, int(asked.ids[place])) for place, counts in enumerate(asked.counted) if counts and place]
    entries = [known[place][token] for place, token in counted]
    return Likelihood(math.fsum(float(e.logprob) for e in entries), len(entries), all(e.rank == 1 for e in entries))


def serves(model: Model) -> bool:
    """Whether vLLM can be given the model: its adapter has to go into the weights, which virtual tokens cannot."""
    if model.adapter is None:
        return True
    settings = json.loads((model.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return not settings.get("num_virtual_tokens")


def engines(tuned: Model, base: Model | None, tokenizer: Any, reporter: Reporter) -> Iterator[tuple[Model, Engine]]:
    """Each model with its engine, the base first. One is in memory at a time."""
    for model in [base, tuned] if base else [tuned]:
        reporter.step("loading the base model" if model is base else "loading the model")
        engine = VllmEngine(_loaded(model), tokenizer, _room(model))
        yield model, engine
        engine.close()
        gc.collect()


def _loaded(model: Model) -> Any:
    """vLLM with the model's weights.

    An adapter is added to them first, as packaging does. vLLM could apply it beside the base, but not where log-likelihoods of a prompt are
    asked: its CPU build 0.32 ends with an error there (the adapter's part of the logits is computed for one place a request).
    """
    with tempfile.TemporaryDirectory(prefix="tuneline-merged-") as folder:
        weights = _merged(model, Path(folder)) if model.adapter else model.weights
        return importlib.import_module("vllm").LLM(
            model=str(weights), tokenizer=str(model.tokenizer), dtype=_dtype(), trust_remote_code=False, seed=0
        )


def _merged(model: Model, folder: Path) -> Path:
    """The model's weights with its adapter added in float32, written to a folder in the format they are computed in."""
    import torch

    whole = models.load(model, dtype=torch.float32).merge_and_unload()
    whole.to(getattr(torch, _dtype())).save_pretrained(folder)
    return folder


def _room(model: Model) -> int | None:
    found = getattr(models.configuration(model.weights).get_text_config(decoder=True), "max_position_embeddings", None)
    return int(found) if found else None


def _dtype() -> str:
    """As transformers would hold the weights here: bfloat16 on a GPU, float32 on a processor."""
    return "float32" if devices.choose() == "cpu" else "bfloat16"
