"""Tokens drawn in the manager's batch, each request by a random state of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.common import models
from components.triton_packaging.python_backend.asked import Asked
from components.triton_packaging.python_backend.generation import Batched, OneByOne, Room, Way


def asked(seed: int, **choice: Any) -> Asked:
    """A request for twelve tokens after a prompt of its own length."""
    settings = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, **choice}
    return Asked(prompt=[3 + number % 50 for number in range(5 + seed)], max_tokens=12, seed=seed, stop=(), **settings)


MIXED = [
    asked(1),
    asked(2, temperature=0.0),
    asked(3, top_p=0.7),
    asked(4, top_k=9),
    asked(5, temperature=1.7, top_p=0.9, top_k=40),
    asked(6, temperature=0.0),
    asked(7, temperature=1e-3),
    *(asked(seed) for seed in range(8, 17)),
]


async def answer(way: Way, request: Asked) -> list[int]:
    return [token async for tokens in way.tokens(request, each=True) for token in tokens]


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of the mixed requests: by generate alone, by the batch alone, and by the batch all at once."""

    async def ask() -> dict[str, list[list[int]]]:
        loop = asyncio.get_running_loop()
        plain = OneByOne(models.load(models.open_model(tiny_folder)), 0, loop)
        batch = Batched(models.load(models.open_model(tiny_folder)), Room(16, 2048), loop)
        try:
            return {
                "generate": [await answer(plain, request) for request in MIXED],
                "alone": [await answer(batch, request) for request in MIXED],
                "together": await asyncio.gather(*(answer(batch, request) for request in MIXED)),
                "again": await asyncio.gather(*(answer(batch, request) for request in reversed(MIXED))),
            }
        finally:
            plain.close()
            batch.close()

    return asyncio.run(ask())


def test_sampled_and_greedy_requests_together_get_the_tokens_that_generate_gives_each_alone(answers: dict[str, list[list[int]]]) -> None:
    assert answers["alone"] == answers["generate"]
    assert answers["together"] == answers["generate"]


def test_the_same_seeds_in_another_order_draw_the_same_tokens(answers: dict[str, list[list[int]]]) -> None:
    assert answers["again"][::-1] == answers["together"]


def test_one_prompt_with_several_seeds_gets_several_answers_and_hardly_any_is_the_best(tiny_folder: Path) -> None:
    async def ask() -> tuple[list[int], list[list[int]]]:
        batch = Batched(models.load(models.open_model(tiny_folder)), Room(16, 2048), asyncio.get_running_loop())
        try:
            same = replace(asked(1), max_tokens=12)
            drawn = await asyncio.gather(*(answer(batch, replace(same, seed=seed, temperature=1.5)) for seed in range(8)))
            return await answer(batch, replace(same, temperature=0.0)), list(drawn)
        finally:
            batch.close()

    best, drawn = asyncio.run(ask())
    assert len({tuple(tokens) for tokens in drawn}) > 4
    assert sum(tokens == best for tokens in drawn) < 3


def test_a_temperature_near_nothing_is_greedy_and_spares_the_others(tiny_folder: Path) -> None:
    async def ask() -> list[list[int]]:
        batch = Batched(models.load(models.open_model(tiny_folder)), Room(16, 2048), asyncio.get_running_loop())
        try:
            cold = [asked(1, temperature=temperature) for temperature in (0.0, 1e-40, 1e-30, 1e-12)]
            together = list(await asyncio.gather(*(answer(batch, request) for request in cold)))
            assert not batch._choices._choices, "nothing is remembered of requests that are over"
            return together
        finally:
            batch.close()

    greedy, *others = asyncio.run(ask())
    assert others == [greedy] * 3


def test_of_the_mixed_requests_two_were_greedy(answers: dict[str, list[list[int]]]) -> None:
    best = [answers["generate"][number] for number, request in enumerate(MIXED) if request.temperature == 0]
    assert len(best) == 2
