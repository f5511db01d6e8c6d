"""GPU attention and graphs of continuous batching: batched answers equal those of transformers' generate.

Fast tier: the tiny model, on a CPU with a reference kernel. The case with `cuda` runs the real kernel in float16, where
a GPU exists; there a rounding may change a token, after which an answer differs.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers.generation.continuous_batching import initialization, model_runner

from components.common.models import model_loading
from components.triton_packaging.python_backend import cache_indices, decode_graphs, gpu_attention, token_generation
from components.triton_packaging.python_backend.generation_request import GenerationRequest
from components.triton_packaging.python_backend.token_generation import (
    BatchCapacity,
    BatchedGenerator,
    SequentialGenerator,
    TokenGenerator,
)
from tests import tiny, varlen_kernel

LENGTHS, ANSWER = [1, 2, 31, 32, 33, 300, 513, 7], 10


def request_tokens(length: int) -> GenerationRequest:
    return GenerationRequest([3 + (7 * number + length) % 300 for number in range(length)], ANSWER, 0.0, 1.0, 0, 0, ())


async def collect(generator: TokenGenerator, length: int) -> list[int]:
    chunks = generator.generate(request_tokens(length), None, stream=True)
    return [token async for tokens in chunks for token in tokens]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batched_answers_match_generate(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    if device == "cpu":
        monkeypatch.setattr(varlen, "varlen_attn", varlen_kernel.varlen_attn)
        monkeypatch.setattr(gpu_attention, "supports", lambda model: True)

    def load() -> Any:
        return model_loading.load_model(model_loading.open_model(tiny.tiny_model(tmp_path / "model")), dtype=dtype)

    async def answer_alone() -> list[list[int]]:
        generator = SequentialGenerator(load(), 0, asyncio.get_running_loop())
        try:
            return [await collect(generator, length) for length in LENGTHS]
        finally:
            generator.close()

    async def answer_together() -> list[list[int]]:
        model = load()
        generator = BatchedGenerator(model, BatchCapacity(8, 4096), asyncio.get_running_loop())
        assert model.config._attn_implementation == gpu_attention.NAME
        padded: list[bool] = []
        compute = decode_graphs.DecodeGraphRunner.compute_batch
        monkeypatch.setattr(
            decode_graphs.DecodeGraphRunner,
            "compute_batch",
            lambda runner, *given: padded.append(runner.pad_inputs) or compute(runner, *given),
        )
        find_places, checked = cache_indices.list_places, list[int]()

        def compare_places(allocator: Any, requests: Any) -> Any:
            places = find_places(allocator, requests)
            states = [request.state for request in requests]
            lists = [allocator.get_read_indices(state.request_id, 0, state.position_offset) for state in states]
            assert places.tolist() == [place for each in lists for place in each]
            checked.append(len(places))
            return places

        monkeypatch.setattr(cache_indices, "list_places", compare_places)
        try:
            answers = list(await asyncio.gather(*(collect(generator, length) for length in LENGTHS)))
            assert max(checked) >= sum(LENGTHS)
            assert sum(padded) >= ANSWER - 1, "decoding steps are padded to the sizes of graphs"
            return answers
        finally:
            generator.close()

    alone, together = asyncio.run(answer_alone()), asyncio.run(answer_together())
    equal = sum(one == two for one, two in zip(alone, together, strict=True))
    assert equal == len(LENGTHS) if device == "cpu" else equal >= len(LENGTHS) - 1, (alone, together)


def load_for_emulated_gpu(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return the tiny model, and let the generator treat this CPU as a GPU that supports its attention and graphs."""
    patch.setattr(varlen, "varlen_attn", varlen_kernel.varlen_attn)
    patch.setattr(gpu_attention, "supports", lambda model: True)
    patch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    patch.setattr(model_runner, "get_memory_pools", lambda: (None, 0))
    patch.setattr(model_runner, "memory_pool_context", lambda pool: nullcontext())
    return model_loading.load_model(model_loading.open_model(tiny.tiny_model(folder)), dtype=torch.float32)


def test_replayed_graphs_have_the_answers_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph computes with the tensors of its capture. Here a CPU calls the captured function with them again."""
    replays: list[None] = []

    def capture(runner: Any, compute: Any, stream: None, *given: Any) -> None:
        compute(*given)
        graph = SimpleNamespace(replay=lambda: (replays.append(None), compute(*given)), reset=lambda: None)
        runner.inputs_and_outputs.set_graph(graph)

    model = load_for_emulated_gpu(tmp_path / "model", monkeypatch)
    monkeypatch.setattr(decode_graphs.DecodeGraphRunner, "_capture_graph", capture)
    lengths = [1, 9, 33, 40, 7]  # five requests, padded to eight

    async def answer() -> tuple[list[list[int]], list[list[int]]]:
        alone = SequentialGenerator(model, 0, asyncio.get_running_loop())
        expected = [await collect(alone, length) for length in lengths]
        alone.close()
        together = BatchedGenerator(model, BatchCapacity(8, 4096), asyncio.get_running_loop())
        try:
            return expected, list(await asyncio.gather(*(collect(together, length) for length in lengths)))
        finally:
            together.close()

    expected, answers = asyncio.run(answer())
    assert answers == expected
    assert len(replays) >= ANSWER - 2, "of nine steps, the first is captured"


def test_a_failed_capture_does_not_fail_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that wait for the device cannot be captured. A CPU has no graphs, so every capture fails."""
    model = load_for_emulated_gpu(tmp_path / "model", monkeypatch)

    async def answer() -> list[int]:
        generator = BatchedGenerator(model, BatchCapacity(8, 4096), asyncio.get_running_loop())
        try:
            return await collect(generator, 7)
        finally:
            generator.close()

    assert len(asyncio.run(answer())) == ANSWER


def test_a_model_answers_alone_after_a_failed_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of batches would fail without the manager's cache."""
    model = load_for_emulated_gpu(tmp_path / "model", monkeypatch)

    def fail(manager: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(token_generation, "run_trial", fail)

    async def answer() -> list[int]:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no answer"):
            BatchedGenerator(model, BatchCapacity(8, 4096), loop)
        generator = SequentialGenerator(model, 0, loop)
        try:
            return await collect(generator, 7)
        finally:
            generator.close()

    assert len(asyncio.run(answer())) == ANSWER


def test_a_model_on_a_cpu_is_not_supported(tmp_path: Path) -> None:
    model = model_loading.load_model(model_loading.open_model(tiny.tiny_model(tmp_path / "model")))
    assert not gpu_attention.supports(model)
