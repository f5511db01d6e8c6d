"""Token sampling in a batch: each request has its own random state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.common.models import model_loading
from components.triton_packaging.python_backend.generation_request import GenerationRequest
from components.triton_packaging.python_backend.token_generation import (
    BatchCapacity,
    BatchedGenerator,
    SequentialGenerator,
    TokenGenerator,
)
from components.triton_packaging.python_backend.token_sampling import RequestSampler, create_sampler, sample_together


def build_request(seed: int, **changes: Any) -> GenerationRequest:
    """Build a request for twelve tokens. The prompt length depends on the seed."""
    settings = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, **changes}
    return GenerationRequest(
        prompt=[3 + number % 50 for number in range(5 + seed)], max_tokens=12, seed=seed, stop=(), **settings
    )


REQUESTS = [
    build_request(1),
    build_request(2, temperature=0.0),
    build_request(3, top_p=0.7),
    build_request(4, top_k=9),
    build_request(5, temperature=1.7, top_p=0.9, top_k=40),
    build_request(6, temperature=0.0),
    build_request(7, temperature=1e-3),
    *(build_request(seed) for seed in range(8, 17)),
]


async def collect_tokens(generator: TokenGenerator, request: GenerationRequest) -> list[int]:
    sampler = create_sampler(request, torch.device("cpu"))
    return [token async for tokens in generator.generate(request, sampler, stream=True) for token in tokens]


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of the requests by generate, by separate batches, by one batch, and by one batch in reverse order."""

    async def generate_all() -> dict[str, list[list[int]]]:
        loop = asyncio.get_running_loop()
        sequential = SequentialGenerator(model_loading.load_model(model_loading.open_model(tiny_folder)), 0, loop)
        batched = BatchedGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)), BatchCapacity(16, 2048), loop
        )
        try:
            return {
                "generate": [await collect_tokens(sequential, request) for request in REQUESTS],
                "alone": [await collect_tokens(batched, request) for request in REQUESTS],
                "together": await asyncio.gather(*(collect_tokens(batched, request) for request in REQUESTS)),
                "again": await asyncio.gather(*(collect_tokens(batched, request) for request in reversed(REQUESTS))),
            }
        finally:
            sequential.close()
            batched.close()

    return asyncio.run(generate_all())


def test_batched_sampled_and_greedy_requests_match_generate(
    answers: dict[str, list[list[int]]],
) -> None:
    assert answers["alone"] == answers["generate"]
    assert answers["together"] == answers["generate"]


def test_sampled_tokens_do_not_depend_on_request_order(answers: dict[str, list[list[int]]]) -> None:
    assert answers["again"][::-1] == answers["together"]


def test_different_seeds_give_different_answers(tiny_folder: Path) -> None:
    async def generate_all() -> tuple[list[int], list[list[int]]]:
        generator = BatchedGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)),
            BatchCapacity(16, 2048),
            asyncio.get_running_loop(),
        )
        try:
            request = replace(build_request(1), max_tokens=12)
            sampled = await asyncio.gather(
                *(collect_tokens(generator, replace(request, seed=seed, temperature=1.5)) for seed in range(8))
            )
            return await collect_tokens(generator, replace(request, temperature=0.0)), list(sampled)
        finally:
            generator.close()

    greedy, sampled = asyncio.run(generate_all())
    assert len({tuple(tokens) for tokens in sampled}) > 4
    assert sum(tokens == greedy for tokens in sampled) < 3


def test_tiny_temperature_is_greedy(tiny_folder: Path) -> None:
    async def generate_all() -> list[list[int]]:
        generator = BatchedGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)),
            BatchCapacity(16, 2048),
            asyncio.get_running_loop(),
        )
        try:
            requests = [build_request(1, temperature=temperature) for temperature in (0.0, 1e-40, 1e-30, 1e-12)]
            answers = list(await asyncio.gather(*(collect_tokens(generator, request) for request in requests)))
            assert not generator._sampler._samplers, "nothing is remembered of requests that are over"
            return answers
        finally:
            generator.close()

    greedy, *others = asyncio.run(generate_all())
    assert others == [greedy] * 3


def test_two_of_the_requests_are_greedy(answers: dict[str, list[list[int]]]) -> None:
    greedy = [answers["generate"][index] for index, request in enumerate(REQUESTS) if request.temperature == 0]
    assert len(greedy) == 2


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_requests_that_are_sampled_together_get_the_tokens_they_get_alone(top_k: int, top_p: float) -> None:
    steps = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    steps[2, 1, 7] = torch.nan  # a broken row gets its largest score, and does not disturb the others

    def create() -> list[RequestSampler]:
        requests = [GenerationRequest([1], 9, 0.8, top_p, top_k, seed, ()) for seed in range(3)]
        samplers = [create_sampler(request, torch.device("cpu")) for request in requests]
        return [sampler for sampler in samplers if sampler is not None]

    alone, together = create(), create()
    assert {sampler.settings for sampler in together} == {(0.8, top_k, top_p)}
    for scores in steps:
        expected = torch.cat([one(None, scores[row : row + 1]) for row, one in enumerate(alone)])
        assert torch.equal(sample_together(together, scores), expected)


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"logprobs": 1}, {"presence_penalty": 1.0}])
def test_a_request_with_more_than_sampling_is_sampled_alone(option: dict[str, Any]) -> None:
    fields = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "logprobs": None, **option}
    request = GenerationRequest(
        [1], 9, fields.pop("temperature"), fields.pop("top_p"), fields.pop("top_k"), 0, (), **fields
    )
    assert RequestSampler(request, torch.device("cpu"), None).settings is None
