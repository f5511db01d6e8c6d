"""CPU attention over the paged cache of continuous batching: batched answers equal those of transformers' generate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from components.common.models import model_loading
from components.triton_packaging.python_backend import cpu_attention
from components.triton_packaging.python_backend.generation_request import GenerationRequest
from components.triton_packaging.python_backend.token_generation import (
    STEP_TOKENS,
    BatchCapacity,
    BatchedGenerator,
    SequentialGenerator,
    TokenGenerator,
)

LENGTHS = [1, 2, 31, 32, 33, 300, STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 2 * STEP_TOKENS + 100, 7, 900]


def greedy_request(length: int) -> GenerationRequest:
    return GenerationRequest([3 + (7 * number + length) % 300 for number in range(length)], 10, 0.0, 1.0, 0, 0, ())


async def collect_tokens(generator: TokenGenerator, request: GenerationRequest) -> list[int]:
    return [token async for tokens in generator.generate(request, None, stream=True) for token in tokens]


@pytest.fixture(scope="module")
def sequential_answers(tiny_folder: Path) -> list[list[int]]:
    """The answers of transformers' generate, one request at a time."""

    async def generate_all() -> list[list[int]]:
        generator = SequentialGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)), 0, asyncio.get_running_loop()
        )
        try:
            return [await collect_tokens(generator, greedy_request(length)) for length in LENGTHS]
        finally:
            generator.close()

    return asyncio.run(generate_all())


@pytest.mark.parametrize("max_padded_keys", [0, cpu_attention.MAX_PADDED_KEYS])
def test_batched_prompts_of_any_length_match_generate(
    sequential_answers: list[list[int]], tiny_folder: Path, max_padded_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0, a batch only has requests with about the same number of keys."""
    monkeypatch.setattr(cpu_attention, "MAX_PADDED_KEYS", max_padded_keys)
    batch_sizes = []
    attend_decoding = cpu_attention._attend_decoding
    monkeypatch.setattr(
        cpu_attention, "_attend_decoding", lambda *args: batch_sizes.append(args[0].shape[2]) or attend_decoding(*args)
    )

    async def generate_all() -> list[list[int]]:
        generator = BatchedGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)),
            BatchCapacity(16, 8192),
            asyncio.get_running_loop(),
        )
        try:
            return list(
                await asyncio.gather(*(collect_tokens(generator, greedy_request(length)) for length in LENGTHS))
            )
        finally:
            generator.close()

    assert asyncio.run(generate_all()) == sequential_answers
    assert max(batch_sizes) > 1, "several requests were computed together"


def test_decoding_requests_are_grouped_by_number_of_keys() -> None:
    query_spans = [(0, 1), (1, 2), (2, 9), (9, 10), (10, 11)]
    key_spans = [(0, 10), (10, 6000), (6000, 6007), (6007, 6022), (6022, 9022)]
    assert list(cpu_attention.group_decoding_requests(query_spans, key_spans)) == [[0, 3], [4, 1]]
    assert list(
        cpu_attention.group_decoding_requests(query_spans[:4], [*key_spans[:1], (10, 60), *key_spans[2:4]])
    ) == [[0, 3, 1]], "few keys are padded without a loss"
