"""Speed of the package's batching engine without a server, and the time of each part of a step. Prints its figures as JSON.

python -m benchmarks.peers.run_batch SETTINGS.json
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PARTS = {"prepare_next_batch": "inputs", "_generation_step": "choosing", "update_batch": "answers"}


def main() -> None:
    """Run the measurement of the settings: model, texts, max_tokens, threads, clients, requests, slots, cache_tokens."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps({"levels": asyncio.run(run(**settings))}))


async def run(
    model: str,
    texts: Sequence[str],
    max_tokens: int,
    threads: int,
    clients: Sequence[int],
    requests: int,
    slots: int,
    cache_tokens: int,
) -> list[dict[str, Any]]:
    """Return for each number of clients: tokens per second, steps, and seconds by part.

    The parts are the forward pass (`model`), its inputs (`inputs`), the choice of tokens (`choosing`), the delivery of the answers (`answers`),
    and everything else (`rest`).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    from components.triton_packaging.python_backend.token_generation import BatchCapacity, BatchedGenerator

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    spent: Counter[str] = Counter()
    for method, part in PARTS.items():
        setattr(ContinuousBatchProcessor, method, timed(getattr(ContinuousBatchProcessor, method), part, spent))
    loaded.forward = timed(loaded.forward, "model", spent)
    batch = BatchedGenerator(loaded, BatchCapacity(slots, cache_tokens), asyncio.get_running_loop())
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    await _asked(batch, prompts[:2], max_tokens, 2)
    found = []
    for count in clients:
        wanted = list(itertools.islice(itertools.cycle(prompts), max(count * requests, len(prompts))))
        spent.clear()
        began = time.monotonic()
        tokens = await _asked(batch, wanted, max_tokens, count)
        found.append(_figures(count, time.monotonic() - began, tokens, spent))
    batch.close()
    return found


async def _asked(batch: Any, prompts: Sequence[Sequence[int]], max_tokens: int, clients: int) -> int:
    """Request all answers, as this number of clients would, and return the number of tokens."""
    from components.triton_packaging.python_backend.generation_request import GenerationRequest

    waiting = iter(prompts)

    async def client() -> int:
        tokens = 0
        for prompt in waiting:
            async for new in batch.generate(
                GenerationRequest(list(prompt), max_tokens, 0.0, 1.0, 0, 0, ()), None, stream=True
            ):
                tokens += len(new)
        return tokens

    return sum(await asyncio.gather(*(client() for _ in range(clients))))


def _figures(clients: int, seconds: float, tokens: int, spent: Counter[str]) -> dict[str, Any]:
    parts = {name: spent[name] for name in ("model", *PARTS.values())}
    parts["choosing"] -= parts["model"]  # it is called within
    parts["rest"] = seconds - sum(parts.values())
    return {
        "clients": clients,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "steps": spent["steps"],
        "parts": parts,
    }


def timed(function: Callable[..., Any], part: str, spent: Counter[str]) -> Callable[..., Any]:
    """Return the function with its seconds counted for a part."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.monotonic() - began  # type: ignore[assignment] # seconds are counted too
            spent["steps"] += part == "model"

    return measured


if __name__ == "__main__":
    main()
