"""A gateway and a Triton server under moderate load for an hour: does memory stay constant, and do answers stay the same?

    python -m benchmarks.soak --workdir DIR --minutes 60 --rate 2 --markdown docs/reference/soak.md
    python -m benchmarks.soak --workdir DIR --minutes 1 --warmup-minutes 0.2 --every 2

Requests arrive at random (a Poisson process) and are sent with the official OpenAI client: completions and chats, whole, streamed, sampled with a
seed and constrained to a JSON schema, and clients that disconnect in the middle, with prompts and answers of many lengths. Each greedy or seeded
answer is compared with the first one to the same request. Memory, shared memory and open files of the gateway, the server and each model's process
are sampled. The output folder contains the model, the package, the logs, samples.jsonl and results.json. Exit code 1 if something grew, failed or
was left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil

from benchmarks import load, machine, measure, served, soak_page
from benchmarks.client import Answer, arrivals, open_loop
from benchmarks.gateway_cost import opened_gateway
from components.common.runtime.reporters import Reporter, close_reporter, create_console_reporter
from components.triton_packaging.triton_config import stream_model_name
from components.triton_packaging.triton_server import (
    SHARED_MEMORY_FOLDER,
    SHM_PREFIX,
    Server,
    get_child_pids,
    running_server,
)
from pipelines.gateway.process import GatewayProcess

LENGTHS = (8, 16, 32, 64, 128, 256)  # tokens of the prompts
TOKENS = (4, 8, 16, 32, 64)  # of the answers
TEXTS = 48
# Share of each kind of request. A client that hangs up requested a whole or streamed, greedy or sampled answer.
KINDS = {"whole": 0.25, "streamed": 0.35, "sampled": 0.15, "schema": 0.1, "hung up": 0.15}
SEEDS = 3
HANG_UP = (0.02, 0.5)  # seconds until a client disconnects
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    """A request of a kind. Requests of one name have equal answers.

    Attributes:
        prompt: the prompt of a completion, or the message of a chat.
        options: further fields of the request.
        hang_up: seconds after which the client disconnects; 0: never.
    """

    kind: str
    name: str
    prompt: str
    is_chat: bool
    is_streamed: bool
    options: dict[str, Any]
    hang_up: float = 0.0


@dataclass
class Log:
    """The requests, the first answer to each request, and the samples of memory."""

    file: Path
    began: float = field(default_factory=time.monotonic)
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, answer: Answer, request: Request) -> None:
        """Record a request that ended."""
        wrong = answer.good and self.answers.setdefault(request.name, answer.text) != answer.text
        self.requests.append(
            {
                "at": answer.due - self.began,
                "kind": request.kind,
                "tokens": answer.tokens,
                "seconds": answer.seconds,
                "first": answer.first if answer.streamed and answer.good else None,
                "error": answer.error,
                "hung_up": answer.hung_up,
                "wrong": wrong,
            }
        )

    def sample(self, server: Server, gateway: GatewayProcess) -> None:
        """Record the memory of the server and the gateway."""
        self.samples.append({"at": time.monotonic() - self.began, **sample_memory(server, gateway)})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.samples[-1]) + "\n")


def sample_memory(server: Server, gateway: GatewayProcess) -> dict[str, Any]:
    """Return bytes, open files and threads of the gateway, the server and each model's process, and its regions of shared memory."""
    pids = {"gateway": gateway.pid, "tritonserver": server.pid}
    pids |= {label(pid): pid for pid in get_child_pids(server.pid)}
    regions = [path.stat() for path in shared_memory()]
    return {
        "processes": {name: _held(pid) for name, pid in pids.items()},
        "regions": len(regions),
        "shared": sum(found.st_blocks * 512 for found in regions),
    }


def _held(pid: int) -> dict[str, int]:
    process, sums = psutil.Process(pid), measure.rollup(pid)
    held = {"rss": sums["Rss"], "pss": sums["Pss"], "anonymous": sums["Anonymous"]}
    return {**held, "files": process.num_fds(), "threads": process.num_threads()}


def label(pid: int) -> str:
    """The model whose process this is: a stub is started with the path of its model.py."""
    files = [Path(part) for part in psutil.Process(pid).cmdline() if part.endswith("model.py")]
    return files[0].parent.parent.name if files else f"process {pid}"


def shared_memory() -> list[Path]:
    """The regions of shared memory of servers that this process started."""
    return sorted(SHARED_MEMORY_FOLDER.glob(f"{SHM_PREFIX}_{os.getpid()}_*"))


def plan(texts: Sequence[str], seed: int) -> Iterator[Request]:
    """Yield requests of all kinds without end; equal seeds give equal requests. Every second text is the message of a chat."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    while True:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        number = draw.randrange(len(texts))
        is_chat = kind == "schema" or number % 2 == 1
        name, options = f"text {number}", {"max_tokens": TOKENS[number % len(TOKENS)], "temperature": 0.0}
        if kind == "schema":
            schema = {"name": "sizes", "schema": SCHEMA}
            name, options["response_format"] = f"{name} with schema", {"type": "json_schema", "json_schema": schema}
        if kind == "sampled" or (kind == "hung up" and draw.random() < KINDS["sampled"]):
            seed_option = draw.randrange(SEEDS)
            options |= {"temperature": 1.0, "top_p": 0.9, "seed": seed_option}
            name += f" with seed {seed_option}"
        is_streamed = kind == "streamed" or (kind != "whole" and draw.random() < 0.5)
        hang_up = draw.uniform(*HANG_UP) if kind == "hung up" else 0.0
        yield Request(kind, name, texts[number], is_chat, is_streamed, options, hang_up)


async def send(client: openai.AsyncOpenAI, number: int, request: Request, due: float) -> Answer:
    """Send a request, and return its answer, its error, or that the client has disconnected."""
    answer = Answer(number, due, request.is_streamed, hung_up=False, error="")
    try:
        async with asyncio.timeout(request.hang_up or None):
            await _receive(client, request, answer)
    except TimeoutError:
        answer.hung_up = True
    except (openai.OpenAIError, httpx2.HTTPError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - due
    if answer.good and not answer.finish_reason:
        answer.error = "the answer broke off"
    return answer


async def _receive(client: openai.AsyncOpenAI, request: Request, answer: Answer) -> None:
    """Fill in the answer. A streamed answer's text and finish reason arrive in chunks, and its usage in the last one."""
    fields: dict[str, Any] = {"model": served.NAME, **request.options}
    if request.is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.is_chat:
        messages: list[Any] = [{"role": "user", "content": request.prompt}]
        response: Any = await client.chat.completions.create(messages=messages, **fields)
    else:
        response = await client.completions.create(prompt=request.prompt, **fields)
    async for chunk in response if request.is_streamed else _once(response):
        for choice in chunk.choices:
            message = (choice.delta if request.is_streamed else choice.message) if request.is_chat else None
            answer.text += (message.content if message else choice.text) or ""
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            if not answer.first and answer.text:
                answer.first = time.monotonic() - answer.due
        if chunk.usage:
            answer.tokens = chunk.usage.completion_tokens


async def _once(response: object) -> AsyncIterator[object]:
    yield response


def soak(
    server: Server,
    gateway: GatewayProcess,
    client: openai.AsyncOpenAI,
    texts: Sequence[str],
    args: argparse.Namespace,
    log: Log,
    reporter: Reporter,
) -> None:
    """Load the gateway for `args.minutes`, and sample memory every `args.every` seconds."""
    requests: list[Request] = []

    def arriving() -> Iterator[tuple[float, Request]]:
        for at, request in zip(arrivals(args.rate, args.seed), plan(texts, args.seed), strict=False):
            if at > args.minutes * 60:
                return
            requests.append(request)
            yield at, request

    async def work() -> None:
        loading = asyncio.create_task(
            open_loop(partial(send, client), arriving(), lambda answer: log.keep(answer, requests[answer.number]))
        )
        while not loading.done():
            await asyncio.to_thread(log.sample, server, gateway)
            server.check_alive()
            reporter.progress(int(time.monotonic() - log.began), int(args.minutes * 60), "seconds")
            await asyncio.wait({loading}, timeout=args.every)
        await loading
        await client.close()

    asyncio.run(work())
    log.sample(server, gateway)


@contextmanager
def running_stack(repository: Path, workdir: Path) -> Iterator[tuple[Server, GatewayProcess, openai.AsyncOpenAI]]:
    """Serve a package by Triton behind a gateway. Yield both, and a client without retries."""
    names = [served.NAME, stream_model_name(served.NAME)]
    with (
        running_server(repository, models=names, log=workdir / "triton.log") as server,
        opened_gateway(server, repository, workdir) as (gateway, client),
    ):
        yield server, gateway, client


def results_of(log: Log, args: argparse.Namespace, left: Sequence[str]) -> dict[str, Any]:
    """Return all figures: by kind, by minute, and the samples of memory."""
    minutes: dict[int, list[dict[str, Any]]] = {}
    for one in log.requests:
        minutes.setdefault(int(one["at"] // 60), []).append(one)
    return {
        "settings": {
            name: getattr(args, name)
            for name in ("minutes", "warmup_minutes", "rate", "every", "seed", "model", "threads")
        },
        "kinds": {kind: counted([one for one in log.requests if one["kind"] == kind]) for kind in KINDS},
        "all": counted(log.requests),
        "by_minute": [{"minute": minute, **counted(ones)} for minute, ones in sorted(minutes.items())],
        "samples": log.samples,
        "requests": log.requests,
        "different": len(log.answers),
        "left": list(left),
    }


def counted(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of requests, and percentiles of those answered to their end, in seconds."""
    good = [one for one in requests if not one["error"] and not one["hung_up"]]
    return {
        "requests": len(requests),
        "hung_up": sum(one["hung_up"] for one in requests),
        "errors": sum(bool(one["error"]) for one in requests),
        "said": dict(Counter(one["error"] for one in requests if one["error"]).most_common(5)),
        "wrong": sum(one["wrong"] for one in requests),
        "tokens": sum(one["tokens"] for one in requests),
        "first_token": load.percentiles([one["first"] for one in good if one["first"] is not None]),
        "latency": load.percentiles([one["seconds"] for one in good]),
    }


def main() -> None:
    """Soak, keep the results, and write the page."""
    args = _arguments()
    workdir = args.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    told = machine.circumstances("benchmarks.soak")
    folder = served.model(args.model, workdir / "model", endless=False)
    repository = served.packaged(folder, workdir / "package", slots=16)
    texts = served.prompts(folder, LENGTHS, TEXTS, args.seed)
    os.environ["TUNELINE_THREADS"] = str(args.threads)
    reporter, samples = create_console_reporter(), workdir / "samples.jsonl"
    samples.unlink(missing_ok=True)
    reporter.step(f"{args.rate:g} requests per second")
    with running_stack(repository, workdir) as (server, gateway, client):
        log, pids = Log(samples), {"server": server.pid, "gateway": gateway.pid}
        before = {name: load.cpu_of(pid) for name, pid in pids.items()} | {"client": time.process_time()}
        soak(server, gateway, client, texts, args, log, reporter)
        after = {name: load.cpu_of(pid) for name, pid in pids.items()} | {"client": time.process_time()}
        cpu = {name: after[name] - before[name] for name in after}
    close_reporter(reporter)
    results = {**told, **results_of(log, args, [path.name for path in shared_memory()]), "cpu": cpu}
    results |= {"parameters": served.parameters(folder), "server": server.version}
    results["verdict"] = soak_page.verdict(results)
    _write(results, workdir / "results.json", args.markdown)
    print(soak_page.summary(results), flush=True)
    sys.exit(0 if soak_page.good(results) else 1)


def _write(results: dict[str, Any], file: Path, page: Path | None) -> None:
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if page:
        image = Path("images") / f"{page.stem}.svg"
        soak_page.plot(results, page.parent / image)
        page.write_text(soak_page.markdown(results, str(image)), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/soak"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="Duration of the load in minutes.")
    parser.add_argument(
        "--warmup-minutes",
        type=float,
        default=5.0,
        metavar="N",
        help="Duration of the warm-up in minutes; memory must stay flat afterwards.",
    )
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="Average number of requests per second.")
    parser.add_argument(
        "--every", type=float, default=15.0, metavar="S", help="Interval between two samples of memory in seconds."
    )
    parser.add_argument(
        "--model",
        default=served.RANDOM,
        metavar="SOURCE",
        help="Base model. Default: a random model with 27M parameters.",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Number of threads of the served model.")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed of the requests and their arrival times."
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Page to write.")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
