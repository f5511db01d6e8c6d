"""A load client for a language model behind Triton: time to first token, time per token, and tokens per second.

    python -m benchmarks.load --url 127.0.0.1:8001 --model tuneline --clients 1,4,16 --rate 1,2 --requests 64 --max-tokens 32
    python -m benchmarks.load --url 127.0.0.1:8001 --model tuneline --clients 16 --whole --prompts FILE --json FILE

--clients runs a closed loop: each client sends its next request when the previous one is answered. --rate runs an open loop: requests
arrive independently (a Poisson process), however long earlier ones take, and times count from the moment when a request was due.

A request goes to NAME_stream over a separate gRPC stream or, with --whole, to NAME by a unary call.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.client import Answer, Ask, Fields, Line, Sent, Target, arrivals, closed_loop, connected, open_loop, read
from components.common.runtime.errors import EngineMissingError, TunelineError, UsageError
from components.common.runtime.reporters import Reporter, SilentReporter, close_reporter, create_console_reporter
from components.triton_packaging.config import GOLDEN_PROMPTS
from components.triton_packaging.triton_config import stream_model_name

PERCENTILES = (50, 90, 99)


def measure(
    target: Target,
    asks: Sequence[Ask],
    *,
    clients: int = 0,
    rate: float = 0.0,
    seed: int = 0,
    server: int = 0,
    reporter: Reporter | None = None,
) -> tuple[dict[str, Any], list[Answer]]:
    """Send all requests, from a number of clients or at a rate per second; return `figures` and the answers in the order of the requests.

    Args:
        server: process ID of a server on this machine, whose CPU seconds are also reported.
    """
    came: list[Sent] = []
    say = reporter or SilentReporter()

    def done(sent: Sent) -> None:
        came.append(sent)
        say.progress(len(came), len(asks), "requests")

    async def work(line: Line) -> None:
        await (
            closed_loop(line, asks, clients, done)
            if clients
            else open_loop(line.send, zip(arrivals(rate, seed), asks, strict=False), done)
        )

    say.step(f"{clients} clients" if clients else f"{rate:g} requests per second")
    mine, theirs = time.process_time(), cpu_of(server)
    asyncio.run(connected(target, work))
    cpu = {"client": time.process_time() - mine, "server": cpu_of(server) - theirs if server else None}
    answers = sorted(map(read, came), key=lambda answer: answer.number)
    return {"clients": clients, "rate": rate, **figures(answers), "cpu": cpu}, answers


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process and its descendants have used; 0 without a process."""
    import psutil

    if not pid:
        return 0.0
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the figures of answers that were measured together.

    The figures are counts, tokens per second from the first request to the last answer, and percentiles in seconds. Percentiles cover
    complete answers only; `first_token` covers streamed answers and is None without any.
    """
    good = [answer for answer in answers if answer.good]
    streamed = [answer for answer in good if answer.streamed]
    begin, end = min((a.due for a in answers), default=0.0), max((a.due + a.seconds for a in answers), default=0.0)
    seconds, tokens = end - begin, sum(answer.tokens for answer in answers)
    return {
        "requests": len(answers),
        "errors": sum(bool(answer.error) for answer in answers),
        "hung_up": sum(answer.hung_up for answer in answers),
        "said": dict(Counter(answer.error for answer in answers if answer.error).most_common(5)),
        "versions": dict(Counter(answer.version for answer in good)),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "requests_per_second": len(good) / seconds if seconds else 0.0,
        "first_token": percentiles([answer.first for answer in streamed]),
        "per_token": percentiles([each for answer in streamed if (each := answer.per_token) is not None]),
        "latency": percentiles([answer.seconds for answer in good]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the 50th, 90th and 99th percentile by linear interpolation; None without values."""
    import numpy as np

    if not values:
        return None
    return {
        f"p{rank}": float(found) for rank, found in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }


def prompts_of(path: Path) -> list[Fields]:
    """Return the requests in a file: one prompt per line or, in a .jsonl file, one object of inputs per line. Raises UsageError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [json.loads(line) if path.suffix == ".jsonl" else {"text_input": line} for line in lines]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="Give a text file, or .jsonl with one object of inputs per line."
        ) from None
    if not found or any(not isinstance(one, dict) for one in found):
        raise UsageError(
            f"{path} holds no requests", hint='Give one prompt per line, or objects such as {"text_input": "Hello"}.'
        )
    return found


def told(level: Mapping[str, Any]) -> str:
    """Return the figures of a load level as a line for the terminal; times are the percentiles 50, 90 and 99 in milliseconds."""
    load = f"{level['clients']:3} clients" if level["clients"] else f"{level['rate']:g} a second"
    times = [
        f"{name} {_milliseconds(level[key])}"
        for name, key in (("first", "first_token"), ("token", "per_token"), ("all", "latency"))
    ]
    share = level["cpu"]["client"] / level["seconds"] if level["seconds"] else 0.0
    return (
        f"{load:>12}  {level['requests']} requests, {level['errors']} errors  {level['tokens_per_second']:7.1f} tokens/s  "
        + ("  ".join(times) + f" ms  client {share:.0%} of a core")
    )


def _milliseconds(found: Mapping[str, float] | None) -> str:
    return "/".join(f"{value * 1000:.0f}" for value in found.values()) if found else "-"


def check_ready(target: Target, streamed: bool) -> None:
    """Raise EngineMissingError if the server does not answer or does not have the model."""
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    name = target.stream if streamed else target.model
    try:
        with grpc.InferenceServerClient(target.url) as client:
            ready = client.is_model_ready(name, client_timeout=10)
    except InferenceServerException as error:
        raise EngineMissingError(
            f"no Triton answers at {target.url}: {error.message()}", hint="--url is its gRPC address."
        ) from None
    if not ready:
        raise EngineMissingError(
            f"the server at {target.url} has no model {name} ready", hint="--model names it; --whole does not stream."
        )


def main() -> None:
    """Measure all requested levels, print a line for each, and write the JSON file."""
    args = _arguments()
    reporter = create_console_reporter()
    try:
        levels = _measured(args, reporter)
    except TunelineError as error:
        close_reporter(reporter)
        print(f"{error.message}\n{error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    close_reporter(reporter)
    if args.json:
        args.json.write_text(
            json.dumps({"url": args.url, "model": args.model, "levels": levels}, indent=1), encoding="utf-8"
        )


def _measured(args: argparse.Namespace, reporter: Reporter) -> list[dict[str, Any]]:
    target = Target(args.url, args.model, args.stream_model or stream_model_name(args.model))
    check_ready(target, not args.whole)
    texts = prompts_of(args.prompts) if args.prompts else [{"text_input": prompt} for prompt in GOLDEN_PROMPTS]
    fields = [{"max_tokens": args.max_tokens, **text} for text in texts]
    asks = [Ask(one, streamed=not args.whole) for one in itertools.islice(itertools.cycle(fields), args.requests)]
    measure(target, asks[: args.warmup], clients=1, reporter=reporter)
    levels = []
    for clients, rate in [*((clients, 0.0) for clients in args.clients), *((0, rate) for rate in args.rate)]:
        level, answers = measure(
            target, asks, clients=clients, rate=rate, seed=args.seed, server=args.server_pid, reporter=reporter
        )
        levels.append({**level, "answers": [asdict(answer) for answer in answers]})
        print(told(level), flush=True)
    return levels


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """Return a parser of a list of positive numbers from the command line, such as 1,4,16."""

    def parse(text: str) -> list[Any]:
        found = [kind(part) for part in text.split(",") if part]
        if any(number <= 0 for number in found):
            raise ValueError
        return found

    parse.__name__ = "list of positive numbers, such as 1,4,16"
    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="Address of the server's gRPC port."
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="Name of the model. Streamed answers come from NAME_stream."
    )
    parser.add_argument("--stream-model", metavar="NAME", help="Name of another model for streamed answers.")
    parser.add_argument(
        "--whole", action="store_true", help="Request whole answers by unary calls instead of streamed answers."
    )
    parser.add_argument(
        "--clients",
        type=numbers(int),
        default=[],
        metavar="N,N",
        help="Comma-separated numbers of clients, each for one closed loop.",
    )
    parser.add_argument(
        "--rate",
        type=numbers(float),
        default=[],
        metavar="R,R",
        help="Comma-separated rates in requests per second, each for one open loop.",
    )
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="Number of requests of each loop.")
    parser.add_argument(
        "--max-tokens", type=int, default=32, metavar="N", help="Maximum number of tokens of an answer."
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="Text file with one prompt per line, or .jsonl file with one object of inputs per line.",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="Number of requests before the first loop, which are not measured.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the arrival times of requests.")
    parser.add_argument(
        "--server-pid",
        type=int,
        default=0,
        metavar="PID",
        help="Process ID of the server on this machine, whose CPU time is reported.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to which all figures and answers are written.")
    args = parser.parse_args()
    if not args.clients and not args.rate:
        args.clients = [1, 4, 16]
    if args.server_pid and not Path("/proc", str(args.server_pid)).exists():
        parser.error(f"--server-pid: there is no process {args.server_pid}")
    return args


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
