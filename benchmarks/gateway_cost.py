"""CPU time of the gateway per request and per streamed token, measured with the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from prometheus_client import CollectorRegistry

from benchmarks import load, served
from components.triton_packaging.triton_server import Server
from pipelines.capture.settings import load_settings
from pipelines.gateway import addresses, api_keys, openai_requests
from pipelines.gateway.backend_protocols import AnswerChunk
from pipelines.gateway.completions import CHAT, Completion
from pipelines.gateway.process import GatewayOptions, GatewayProcess, running_gateway
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.traffic_capture import TrafficCapture
from pipelines.gateway.triton_models import ServedModel

TIMEOUT_SECONDS = 600.0


@contextmanager
def opened_gateway(
    server: Server, repository: Path, workdir: Path, capture: Path | None = None
) -> Iterator[tuple[GatewayProcess, openai.AsyncOpenAI]]:
    """Start a gateway with API keys, usage file and log before a Triton server. Yield it and a client without retries."""
    keys = workdir / "keys.yaml"
    keys.unlink(missing_ok=True)
    key = api_keys.create_key(keys, "benchmark", {})
    options = GatewayOptions(keys=keys, usage=workdir / "usage.json", capture=capture, log=workdir / "gateway.log")
    with (
        addresses.listen("127.0.0.1", 0) as listener,
        running_gateway(listener, server.grpc_url, server.metrics_socket, repository, options) as gateway,
    ):
        client = openai.AsyncOpenAI(base_url=gateway.openai_url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS)
        yield gateway, client


def measure_cost(
    server: Server,
    repository: Path,
    texts: Sequence[str],
    workdir: Path,
    *,
    requests: int,
    clients: int,
    tokens: int,
    capture: Path | None = None,
) -> dict[str, Any]:
    """Return CPU seconds of the gateway per whole answer, per streamed answer and per streamed token, and their profile.

    Chats of one token give the cost of a request. Streamed chats of `tokens` tokens cost more; the difference divided by
    the further tokens is the cost of a token. What the gateway does in the background counts.

    Raises:
        RuntimeError: an answer does not have its tokens.
    """
    levels = {"whole": (False, 1), "streamed": (True, 1), "tokens": (True, tokens)}
    seconds, loop_seconds = dict[str, float](), dict[str, float]()
    with opened_gateway(server, repository, workdir, capture) as (gateway, client):

        async def measure_level(is_streamed: bool, max_tokens: int, count: int) -> None:
            waiting = iter(range(count))

            async def send_requests() -> None:
                for number in waiting:
                    received = await _count_tokens(client, texts[number % len(texts)], is_streamed, max_tokens)
                    if received != max_tokens:
                        raise RuntimeError(f"the answer has {received} tokens instead of {max_tokens}")

            await asyncio.gather(*(send_requests() for _ in range(clients)))

        async def measure_levels() -> None:
            for name, (is_streamed, max_tokens) in levels.items():
                await measure_level(is_streamed, max_tokens, clients)  # does not count: connections are opened
                before, loop_before = load.cpu_of(gateway.pid), _measure_event_loop(gateway.pid)
                await measure_level(is_streamed, max_tokens, requests)
                seconds[name] = (load.cpu_of(gateway.pid) - before) / requests
                loop_seconds[name] = (_measure_event_loop(gateway.pid) - loop_before) / requests
            await client.close()

        asyncio.run(measure_levels())
    per_token = (seconds["tokens"] - seconds["streamed"]) / (tokens - 1)
    settings = {"requests": requests, "clients": clients, "tokens": tokens}
    loop_share = loop_seconds["tokens"] / seconds["tokens"]
    figures = {"whole": seconds["whole"], "streamed": seconds["streamed"], "token": per_token}
    return {**settings, **figures, "loop_share": loop_share}


def write_capture_file(workdir: Path) -> Path:
    """Write a capture file that captures every request under the name of its API key."""
    key_file, path = workdir / "subject.key", workdir / "capture.yaml"
    key_file.write_text("benchmark" * 4)
    subject = {"source": "key", "key_file": str(key_file)}
    settings = {"folder": str(workdir / "traffic"), "models": {served.NAME: {}}, "consent": {"policy": "not_asked"}}
    path.write_text(json.dumps({**settings, "subject": subject}))
    return path


def measure_capture(capture: Path, texts: Sequence[str], *, requests: int) -> dict[str, Any]:
    """Return CPU seconds of capture per request: on the request path, and in the thread of the writer.

    The thread of this process does what the event loop does for each request; answers are as long as their prompts.
    """
    registry, settings = CollectorRegistry(), load_settings(capture)
    seconds, done = 0.0, 0
    process_seconds, thread_seconds = time.process_time(), time.thread_time()
    traffic = TrafficCapture(settings, registry)
    headers = {"content-type": "application/json", "x-tuneline-consent": "granted"}
    model = ServedModel(
        served.NAME, "", "python", "", "1", "", None, None, frozenset(), has_tool_template=True, loaded_at=0
    )
    while done < requests:
        bodies = [
            {"model": served.NAME, "max_tokens": 64, "messages": [{"role": "user", "content": texts[n % len(texts)]}]}
            for n in range(done, min(requests, done + settings.queue_rows))
        ]
        completions = [_build_completion(model, body) for body in bodies]
        sizes = [len(json.dumps(body)) for body in bodies]
        before = time.thread_time()
        for body, completion, length in zip(bodies, completions, sizes, strict=True):
            request = traffic.select(served.NAME, body, length, headers, "benchmark")
            assert request is not None
            traffic.submit(request, completion, 200, 0.1, 0.01)
        seconds += time.thread_time() - before
        done += len(bodies)
        while _count_rows(registry, "written") < done:
            time.sleep(0.05)
    traffic.close()
    writer_seconds = time.process_time() - process_seconds - (time.thread_time() - thread_seconds)
    lines = [len(line) for path in settings.folder.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    return {"path": seconds / requests, "writer": writer_seconds / requests, "row_bytes": sum(lines) / len(lines)}


def _count_rows(registry: CollectorRegistry, outcome: str) -> float:
    labels = {"model": served.NAME, "outcome": outcome}
    return registry.get_sample_value("tuneline_gateway_captured_rows_total", labels) or 0.0


def _build_completion(model: ServedModel, body: dict[str, Any]) -> Completion:
    """Return an answer that repeats its prompt."""
    call = openai_requests.parse_chat(body)
    completion = Completion(None, model, call, CHAT, AnswerMeasures())  # type: ignore[arg-type]
    completion.choices[0].add(AnswerChunk(body["messages"][0]["content"], "stop", 64, 64, "1", []))
    return completion


def _measure_event_loop(pid: int) -> float:
    """Return the CPU seconds of a process's main thread, which runs the event loop; the other threads are gRPC's."""
    import psutil

    return float(sum(each.user_time + each.system_time for each in psutil.Process(pid).threads() if each.id == pid))


async def _count_tokens(client: openai.AsyncOpenAI, text: str, is_streamed: bool, max_tokens: int) -> int:
    """Send a chat and return the number of tokens of its answer."""
    fields: dict[str, Any] = {"model": served.NAME, "max_tokens": max_tokens, "temperature": 0.0}
    messages: list[Any] = [{"role": "user", "content": text}]
    if not is_streamed:
        return int((await client.chat.completions.create(messages=messages, **fields)).usage.completion_tokens)
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    tokens = 0
    async for chunk in await client.chat.completions.create(messages=messages, **fields):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return tokens
