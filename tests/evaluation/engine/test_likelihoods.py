"""Likelihoods from trees, headers and batches are those of every sequence alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from components.common.progress import Silent
from components.evaluation import engine as engines
from components.evaluation import passes
from components.evaluation.engine import TransformersEngine
from components.evaluation.task import Continuation
from tests.evaluation.engine.conftest import agree, alone

SIZE = 250


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(SIZE), k=count)


def request(ids: list[int], last: int) -> Continuation:
    return Continuation(ids, [place >= len(ids) - last for place in range(len(ids))])


def mixed() -> list[Continuation]:
    """Options of one and of several tokens, options one of which begins another, few-shot items behind one header, texts counted whole."""
    asked = []
    for question in range(12):
        context = words(8 + question, question)
        asked += [request([*context, *words(1 + option % 3, 100 + option)], 1 + option % 3) for option in range(5)]
        asked += [request([*context, 7, 8], 2), request([*context, 7, 8, 9], 3)]
    header = words(90, 77)
    asked += [request([*header, *words(25, 200 + item), *words(2, 300 + item)], 2) for item in range(20)]
    asked += [request(words(40 + 30 * text, 400 + text), 40 + 30 * text) for text in range(4)]
    asked += [request(words(30, 500), 0), Continuation(words(9, 501), [place in (0, 3, 7) for place in range(9)])]
    return asked


@pytest.fixture(scope="module")
def expected(loaded: Any) -> list[Any]:
    return [alone(loaded, one) for one in mixed()]


def test_they_are_those_of_each_sequence_alone(engine: TransformersEngine, expected: list[Any]) -> None:
    agree(engine.likelihoods(mixed(), Silent()), expected)


def test_they_do_not_depend_on_the_order_or_on_repeats(engine: TransformersEngine) -> None:
    asked = mixed()
    order = [*random.Random(1).sample(range(len(asked)), len(asked)), 3, 3]
    found = engine.likelihoods(asked, Silent())
    shuffled = engine.likelihoods([asked[place] for place in order], Silent())
    assert shuffled == [found[place] for place in order]


@pytest.mark.parametrize("batch_tokens", [8, 64, 4096])
def test_batches_of_any_size_give_the_same(
    tiny: Any, loaded: Any, engine: TransformersEngine, expected: list[Any], batch_tokens: int
) -> None:
    agree(TransformersEngine(loaded, engine.tokenizer, batch_tokens).likelihoods(mixed(), Silent()), expected)


def test_batches_side_by_side_give_the_same(
    loaded: Any, engine: TransformersEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "3")
    monkeypatch.setattr(engines, "LEAST", 64)
    assert engines.workers("cpu", 256) == 3
    agree(TransformersEngine(loaded, engine.tokenizer, 256).likelihoods(mixed(), Silent()), expected)


@pytest.mark.parametrize(
    ("total", "threads", "tokens"),
    [
        (100_000, 2, 1024),  # plenty: each thread has its share of batch_tokens
        (4_000, 2, 500),  # four batches a thread
        (300, 2, 128),  # never so small that reading the weights costs more than computing
        (300, 1, 2048),  # one thread waits for nobody
    ],
)
def test_a_batch_is_small_enough_that_no_thread_waits_long_for_another(total: int, threads: int, tokens: int) -> None:
    assert engines.share(total, threads, 2048) == tokens


def test_logits_are_computed_where_something_is_counted_and_nowhere_else(engine: TransformersEngine, loaded: Any) -> None:
    seen = []
    hook = loaded.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits.shape[0]))
    context = words(30, 1)
    engine.likelihoods([request([*context, 5], 1), request([*context, 6], 1), request([*context, 6, 7, 8], 3)], Silent())
    hook.remove()
    assert seen == [3]  # behind the context, behind 6 and behind 7


def test_what_has_no_counted_token_costs_no_pass(engine: TransformersEngine, loaded: Any) -> None:
    hook = loaded.register_forward_pre_hook(lambda module, given: pytest.fail("a pass was made"))
    (found,) = engine.likelihoods([request(words(5, 1), 0)], Silent())
    assert engine.likelihoods([], Silent()) == []
    hook.remove()
    assert (found.logprob, found.tokens) == (0.0, 0)


class Running:
    """A reporter that keeps what it is told of progress."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int | None]] = []

    def step(self, name: str) -> None: ...
    def metrics(self, values: Any, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.told.append((done, total))


def test_progress_ends_at_all_requests(engine: TransformersEngine) -> None:
    reporter = Running()
    asked = [request(words(6, seed), 2) for seed in range(40)]
    engine.likelihoods(asked, reporter)
    assert reporter.told[-1] == (40, 40)
    assert [done for done, _ in reporter.told] == sorted(done for done, _ in reporter.told)


def of_kind(kind: str, **changes: Any) -> Any:
    """A random model of another architecture."""
    import torch
    import transformers

    sizes = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4, "max_position_embeddings": 512}
    config = transformers.AutoConfig.for_model(kind, **{**known, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


# Rotated positions, learned ones, a head whose logits are capped, a window in some layers, and positions that no argument can set.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen2": ({}, True),
    "gpt2": ({"n_embd": 32, "n_head": 4, "n_layer": 2}, True),
    "gemma2": ({"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}, True),
    "granite": ({"logits_scaling": 3.0}, True),
    "bloom": ({"n_head": 4, "n_layer": 2}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_architectures_score_as_they_do_alone(kind: str, engine: TransformersEngine) -> None:
    changes, branching = KINDS[kind]
    model = of_kind(kind, **changes)
    assert passes.takes_branches(model) == branching
    asked = mixed()[:70]
    agree(TransformersEngine(model, engine.tokenizer, 512).likelihoods(asked, Silent()), [alone(model, one) for one in asked])


def test_beyond_a_window_no_rows_are_shared(engine: TransformersEngine) -> None:
    model = of_kind("mistral", sliding_window=24)
    assert passes.takes_branches(model)
    assert passes.reach(model.config) == 24
    context = words(40, 1)
    asked = [request([*context, *words(3, option)], 3) for option in range(4)]
    agree(TransformersEngine(model, engine.tokenizer, 512).likelihoods(asked, Silent()), [alone(model, one) for one in asked])


def test_a_recurrent_model_is_scored_row_by_row(engine: TransformersEngine) -> None:
    model = of_kind("mamba", state_size=4, num_key_value_heads=None)
    assert not passes.takes_branches(model)
    asked = mixed()[:20]
    agree(TransformersEngine(model, engine.tokenizer, 512).likelihoods(asked, Silent()), [alone(model, one) for one in asked], 1e-3)
