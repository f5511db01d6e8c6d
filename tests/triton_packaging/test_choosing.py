"""Tokens drawn in the manager's batch, each request by a random state of its own."""

from __future__ import annotations

import asyncio
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


def test_what_is_drawn_is_not_what_is_best(answers: dict[str, list[list[int]]]) -> None:
    best = [answers["generate"][number] for number, request in enumerate(MIXED) if request.temperature == 0]
    assert len(best) == 2
    drawn = {tuple(tokens) for tokens, request in zip(answers["together"], MIXED, strict=True) if request.temperature > 0.5}
    assert len(drawn) > 8
