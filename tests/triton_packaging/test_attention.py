"""Attention over the manager's cache: the answers of generate, however long prompts are and however many are computed together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from components.common import models
from components.triton_packaging.python_backend import attention
from components.triton_packaging.python_backend.asked import Asked
from components.triton_packaging.python_backend.generation import STEP_TOKENS, Batched, OneByOne, Room, Way

LENGTHS = [1, 2, 31, 32, 33, 300, STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 2 * STEP_TOKENS + 100, 7, 900]


def greedy(length: int) -> Asked:
    return Asked([3 + (7 * number + length) % 300 for number in range(length)], 10, 0.0, 1.0, 0, 0, ())


async def answer(way: Way, request: Asked) -> list[int]:
    return [token async for tokens in way.tokens(request, each=True) for token in tokens]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> list[list[int]]:
    """The answers of generate, one after the other."""

    async def ask() -> list[list[int]]:
        way = OneByOne(models.load(models.open_model(tiny_folder)), 0, asyncio.get_running_loop())
        try:
            return [await answer(way, greedy(length)) for length in LENGTHS]
        finally:
            way.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("few_keys", [0, attention.FEW_KEYS])
def test_prompts_of_any_length_together_get_the_tokens_they_get_from_generate_alone(
    plain: list[list[int]], tiny_folder: Path, few_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0, only requests of about equally many keys are computed together."""
    monkeypatch.setattr(attention, "FEW_KEYS", few_keys)
    computed = []
    here = attention.next_tokens
    monkeypatch.setattr(attention, "next_tokens", lambda *given: computed.append(given[0].shape[2]) or here(*given))

    async def ask() -> list[list[int]]:
        batch = Batched(models.load(models.open_model(tiny_folder)), Room(16, 8192), asyncio.get_running_loop())
        try:
            return list(await asyncio.gather(*(answer(batch, greedy(length)) for length in LENGTHS)))
        finally:
            batch.close()

    assert asyncio.run(ask()) == plain
    assert max(computed) > 1, "several requests were computed together"


def test_requests_are_put_together_by_their_number_of_keys() -> None:
    asked = [(0, 1), (1, 2), (2, 9), (9, 10), (10, 11)]
    known = [(0, 10), (10, 6000), (6000, 6007), (6007, 6022), (6022, 9022)]
    assert list(attention.together(asked, known)) == [[0, 3], [4, 1]]
    assert list(attention.together(asked[:4], [*known[:1], (10, 60), *known[2:4]])) == [[0, 3, 1]], "few keys are padded without a loss"
