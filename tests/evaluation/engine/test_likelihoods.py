"""Likelihoods from trees, prefixes and batches equal those of separate sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest

from components.common.runtime.reporters import SilentReporter
from components.evaluation import forward_pass
from components.evaluation import transformers_engine as engines
from components.evaluation.task_interface import Continuation
from components.evaluation.transformers_engine import TransformersEngine
from tests.evaluation.engine.conftest import assert_likelihoods_close, score_separately

VOCABULARY_SIZE = 250


def draw_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY_SIZE), k=count)


def build_request(ids: list[int], scored_count: int) -> Continuation:
    return Continuation(ids, [position >= len(ids) - scored_count for position in range(len(ids))])


def build_mixed_requests() -> list[Continuation]:
    """Build options of one or more tokens, options that are prefixes of others, few-shot items with one header, and fully scored texts."""
    requests = []
    for question in range(12):
        context = draw_tokens(8 + question, question)
        requests += [
            build_request([*context, *draw_tokens(1 + option % 3, 100 + option)], 1 + option % 3) for option in range(5)
        ]
        requests += [build_request([*context, 7, 8], 2), build_request([*context, 7, 8, 9], 3)]
    header = draw_tokens(90, 77)
    requests += [
        build_request([*header, *draw_tokens(25, 200 + item), *draw_tokens(2, 300 + item)], 2) for item in range(20)
    ]
    requests += [build_request(draw_tokens(40 + 30 * number, 400 + number), 40 + 30 * number) for number in range(4)]
    requests += [
        build_request(draw_tokens(30, 500), 0),
        Continuation(draw_tokens(9, 501), [position in (0, 3, 7) for position in range(9)]),
    ]
    return requests


@pytest.fixture(scope="module")
def expected(loaded_model: Any) -> list[Any]:
    return [score_separately(loaded_model, item) for item in build_mixed_requests()]


def test_likelihoods_equal_those_of_separate_sequences(engine: TransformersEngine, expected: list[Any]) -> None:
    assert_likelihoods_close(engine.compute_likelihoods(build_mixed_requests(), SilentReporter()), expected)


def test_likelihoods_are_independent_of_order_and_repeats(engine: TransformersEngine) -> None:
    requests = build_mixed_requests()
    order = [*random.Random(1).sample(range(len(requests)), len(requests)), 3, 3]
    likelihoods = engine.compute_likelihoods(requests, SilentReporter())
    shuffled = engine.compute_likelihoods([requests[index] for index in order], SilentReporter())
    assert shuffled == [likelihoods[index] for index in order]


@pytest.mark.parametrize("batch_tokens", [8, 64, 4096])
def test_batch_size_does_not_change_likelihoods(
    base_model: Any, loaded_model: Any, engine: TransformersEngine, expected: list[Any], batch_tokens: int
) -> None:
    assert_likelihoods_close(
        TransformersEngine(loaded_model, engine.tokenizer, batch_tokens).compute_likelihoods(
            build_mixed_requests(), SilentReporter()
        ),
        expected,
    )


def test_concurrent_batches_do_not_change_likelihoods(
    loaded_model: Any, engine: TransformersEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "3")
    monkeypatch.setattr(engines, "TOKENS_PER_WORKER", 64)
    assert engines.count_workers("cpu", 256) == 3
    assert_likelihoods_close(
        TransformersEngine(loaded_model, engine.tokenizer, 256).compute_likelihoods(
            build_mixed_requests(), SilentReporter()
        ),
        expected,
    )


@pytest.mark.parametrize(
    ("total", "device", "workers", "tokens"),
    [
        (100_000, "cpu", 2, 512),  # enough work: as many tokens as a thread's cache holds
        (4_000, "cpu", 2, 500),  # four batches per thread
        (300, "cpu", 2, 128),  # minimum: below it, reading the weights dominates
        (300, "cpu", 1, 512),  # a single thread needs no balancing
        (100_000, "cuda", 1, 2048),
    ],
)
def test_batch_size_fits_cache_and_balances_workers(total: int, device: str, workers: int, tokens: int) -> None:
    assert engines.compute_batch_tokens(total, device, workers, 2048) == tokens


def test_logits_are_computed_only_for_targets(engine: TransformersEngine, loaded_model: Any) -> None:
    row_counts = []
    hook = loaded_model.lm_head.register_forward_hook(lambda module, inputs, logits: row_counts.append(logits.shape[0]))
    context = draw_tokens(30, 1)
    engine.compute_likelihoods(
        [build_request([*context, 5], 1), build_request([*context, 6], 1), build_request([*context, 6, 7, 8], 3)],
        SilentReporter(),
    )
    hook.remove()
    assert row_counts == [3]  # after the context, after 6 and after 7


def test_request_without_scored_token_needs_no_pass(engine: TransformersEngine, loaded_model: Any) -> None:
    hook = loaded_model.register_forward_pre_hook(lambda module, inputs: pytest.fail("a pass was made"))
    (likelihood,) = engine.compute_likelihoods([build_request(draw_tokens(5, 1), 0)], SilentReporter())
    assert engine.compute_likelihoods([], SilentReporter()) == []
    hook.remove()
    assert (likelihood.logprob, likelihood.tokens) == (0.0, 0)


class ProgressRecorder:
    """A reporter that records the progress updates."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int | None]] = []

    def step(self, name: str) -> None: ...
    def metrics(self, values: Any, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.updates.append((done, total))


def test_progress_reaches_number_of_requests(engine: TransformersEngine) -> None:
    reporter = ProgressRecorder()
    requests = [build_request(draw_tokens(6, seed), 2) for seed in range(40)]
    engine.compute_likelihoods(requests, reporter)
    assert reporter.updates[-1] == (40, 40)
    assert [done for done, _ in reporter.updates] == sorted(done for done, _ in reporter.updates)


def build_random_model(kind: str, **changes: Any) -> Any:
    """Build a random model of another architecture."""
    import torch
    import transformers

    sizes = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    settings = {
        **sizes,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
        "max_position_embeddings": 512,
    }
    config = transformers.AutoConfig.for_model(kind, **{**settings, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


# Rotary positions, learned positions, capped logits, sliding windows in some layers, and positions that callers cannot set.
ARCHITECTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen2": ({}, True),
    "gpt2": ({"n_embd": 32, "n_head": 4, "n_layer": 2}, True),
    "gemma2": ({"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}, True),
    "granite": ({"logits_scaling": 3.0}, True),
    "bloom": ({"n_head": 4, "n_layer": 2}, False),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_architectures_score_as_separate_sequences(kind: str, engine: TransformersEngine) -> None:
    changes, supports_branching = ARCHITECTURES[kind]
    model = build_random_model(kind, **changes)
    assert forward_pass.supports_branching(model) == supports_branching
    requests = build_mixed_requests()[:70]
    assert_likelihoods_close(
        TransformersEngine(model, engine.tokenizer, 512).compute_likelihoods(requests, SilentReporter()),
        [score_separately(model, request) for request in requests],
    )


def test_no_sharing_beyond_attention_window(engine: TransformersEngine) -> None:
    model = build_random_model("mistral", sliding_window=24)
    assert forward_pass.supports_branching(model)
    assert forward_pass.get_full_attention_span(model) == 24
    context = draw_tokens(40, 1)
    requests = [build_request([*context, *draw_tokens(3, option)], 3) for option in range(4)]
    assert_likelihoods_close(
        TransformersEngine(model, engine.tokenizer, 512).compute_likelihoods(requests, SilentReporter()),
        [score_separately(model, request) for request in requests],
    )


def test_recurrent_model_is_scored_row_by_row(engine: TransformersEngine) -> None:
    model = build_random_model("mamba", state_size=4, num_key_value_heads=None)
    assert not forward_pass.supports_branching(model)
    requests = build_mixed_requests()[:20]
    assert_likelihoods_close(
        TransformersEngine(model, engine.tokenizer, 512).compute_likelihoods(requests, SilentReporter()),
        [score_separately(model, request) for request in requests],
        1e-3,
    )
