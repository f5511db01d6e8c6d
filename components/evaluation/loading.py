"""The engines that models are asked through: which kind, on which weights, one model in memory at a time."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.common import devices, models
from components.common.errors import EngineMissingError
from components.common.models import Model
from components.common.progress import Reporter
from components.evaluation import passes
from components.evaluation.engine import TransformersEngine
from components.evaluation.prefixes import Tree
from components.evaluation.task import Continuation, Decoding, Engine, Likelihood

EngineName = Literal["auto", "transformers", "vllm"]
PROBE = 24  # tokens on which weights with an adapter added are compared with the adapter beside them


def engines(
    tuned: Model, base: Model | None, *, batch_tokens: int, reporter: Reporter, engine: EngineName = "auto"
) -> Generator[tuple[Model, Engine]]:
    """Each model with an engine for it, the base first where it is asked too. An engine is good until the next one is asked for.

    An adapter and its base are measured on the same loaded weights: before the adapter is switched on, and after. Both have the tuned
    model's tokenizer, so that both see the same tokens. torch has to be prepared (`models.prepare_torch`) before.
    """
    tokenizer = models.load_tokenizer(tuned.tokenizer)
    if kind(engine, tuned) == "vllm":
        from components.evaluation import vllm_engine

        yield from vllm_engine.engines(tuned, base, tokenizer, reporter)
        return
    loaded = None
    if base:
        reporter.step("loading the base model")
        loaded = models.load(base)
        yield from _while_open(base, loaded, tokenizer, batch_tokens)
    if base is None or tuned.adapter is None or base.sha256 != tuned.base.sha256:
        loaded = None
        gc.collect()
    reporter.step("loading the model" if loaded is None else "switching the adapter on")
    loaded = switched_on(tuned, loaded, reporter)
    yield from _while_open(tuned, loaded, tokenizer, batch_tokens)


@dataclass(frozen=True)
class Within:
    """An engine whose inputs are no longer than the least that any of the compared models reads, so that all are asked alike."""

    engine: Engine
    least: int | None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def room(self) -> int | None:
        """The longest input in tokens."""
        return min((found for found in (self.engine.room, self.least) if found), default=None)

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """The engine's own."""
        return self.engine.likelihoods(asked, reporter)

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """The engine's own."""
        return self.engine.answers(prompts, decoding, reporter)


def context(model: Model) -> int | None:
    """The longest input of a model in tokens, without loading it; None where it names none."""
    text = models.configuration(model.base.path).get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    prompt = 0
    if found and model.adapter:
        prompt = int(json.loads((model.adapter / models.ADAPTER_CONFIG).read_text(encoding="utf-8")).get("num_virtual_tokens") or 0)
    return int(found) - prompt if found else None


def _while_open(model: Model, loaded: Any, tokenizer: Any, batch_tokens: int) -> Generator[tuple[Model, Engine]]:
    engine = TransformersEngine(loaded, tokenizer, batch_tokens)
    yield model, engine
    engine.close()


def kind(engine: EngineName, model: Model) -> Literal["transformers", "vllm"]:
    """Which engine is meant: "auto" is vLLM's on NVIDIA GPUs where it is installed and can serve the model, else transformers.

    Raises EngineMissingError where vLLM was named and cannot be.
    """
    installed = check_installed(engine)
    if engine == "vllm" and not _served_by_vllm(model):
        raise EngineMissingError(
            "evaluation.engine is vllm, which takes no virtual tokens, and the model's adapter is made of them",
            hint="Use engine: transformers.",
        )
    if engine == "auto" and not (installed and devices.choose() == "cuda" and _served_by_vllm(model)):
        return "transformers"
    return "transformers" if engine == "transformers" else "vllm"


def check_installed(engine: EngineName) -> bool:
    """Whether vLLM is installed. Raises EngineMissingError where it was named and is not."""
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise EngineMissingError(
            "evaluation.engine is vllm, and vLLM is not installed",
            hint="Install it beside tuneline (pip install vllm), or use engine: transformers, which every machine has.",
        )
    return installed


def _served_by_vllm(model: Model) -> bool:
    from components.evaluation import vllm_engine

    return vllm_engine.serves(model)


def switched_on(tuned: Model, loaded: Any, reporter: Reporter) -> Any:
    """The tuned model, on the base's weights where they are loaded already.

    In float32 a low-rank update is added to the weights, which makes a pass as quick as the base's own: on a processor the many small
    products beside them cost a third again. What the sum gives is compared with the adapter beside the weights; where it is not the same
    (an embedding that the head shares, say), and in any other precision, the adapter stays beside them.
    """
    if tuned.adapter is None:
        return models.load(tuned)
    attached = models.load(tuned) if loaded is None else models.attach(loaded, tuned.adapter).eval()
    if not _can_be_added(attached):
        return attached
    before = _probe(attached)
    merged = attached.merge_and_unload(safe_merge=True)
    if passes.same(merged, before, _probe(merged)):
        return merged
    reporter.note("the adapter stays beside the weights: added to them it gives other results")
    del attached, merged
    gc.collect()
    return models.load(tuned)


def _can_be_added(attached: Any) -> bool:
    import torch

    plain = all(p.dtype == torch.float32 for p in attached.parameters())
    return plain and not passes.virtual_tokens(attached) and hasattr(attached, "merge_and_unload")


def _probe(model: Any) -> list[float]:
    """Log-likelihoods of tokens spread over the vocabulary, each behind those before it."""
    size = int(passes.base_of(model).config.get_text_config(decoder=True).vocab_size)
    ids = [(place * 7919 + 1) % size for place in range(PROBE + 1)]
    nodes = list(range(PROBE))
    tree = Tree(ids[:PROBE], [node - 1 for node in nodes], nodes, [(node, ids[node + 1]) for node in nodes])
    return passes.likelihoods(model, [tree], passes.Header())[0].logprobs
