"""A served package under moderate load for an hour: does memory stay where it was, are answers as quick and the same at the end?

    python -m benchmarks.soak --workdir DIR --minutes 60 --rate 2 --markdown docs/soak.md
    python -m benchmarks.soak --workdir DIR --minutes 1 --warmup-minutes 0.2 --every 2

Requests arrive at random (a Poisson process): whole and streamed answers, sampled ones with a seed, and clients that hang up in the middle,
with prompts and answers of many lengths. Each greedy or seeded answer is compared with the first one to the same request. Memory, shared
memory and open files of the server and of each model's process are looked at again and again. Everything lands in --workdir: the model,
the package, the server's log, samples.jsonl as it goes, and results.json. Exit code 1 when something grew, failed or was left over.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import load, machine, measure, served, soak_page
from benchmarks.client import Ask, Line, Sent, Target, arrivals, connected, open_loop, read
from components.common.runtime.reporters import Reporter, close_reporter, create_console_reporter
from components.triton_packaging.triton_config import stream_model_name
from components.triton_packaging.triton_server import (
    SHARED_MEMORY_FOLDER,
    SHM_PREFIX,
    Server,
    get_child_pids,
    running_server,
)

LENGTHS = (8, 16, 32, 64, 128, 256)  # tokens of the prompts
TOKENS = (4, 8, 16, 32, 64)  # of the answers
TEXTS = 48
# Of all requests, the shares of each kind. Those hung up are whole or streamed, and greedy or sampled, as it comes.
KINDS = {"whole": 0.3, "streamed": 0.4, "sampled": 0.15, "hung up": 0.15}
SEEDS = 3
HANG_UP = (0.02, 0.5)  # seconds after which a client has gone


@dataclass(frozen=True)
class Planned:
    """A request of a kind. Requests of one name have equal answers."""

    kind: str
    name: str
    ask: Ask


@dataclass
class Log:
    """What was seen so far: a line a request, the first answer to each request, and the samples of memory."""

    file: Path
    began: float = field(default_factory=time.monotonic)
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, sent: Sent, planned: Planned) -> None:
        """A request that ended."""
        answer = read(sent)
        wrong = answer.good and self.answers.setdefault(planned.name, answer.text) != answer.text
        self.requests.append(
            {
                "at": sent.due - self.began,
                "kind": planned.kind,
                "tokens": answer.tokens,
                "seconds": answer.seconds,
                "first": answer.first if answer.streamed and answer.good else None,
                "error": answer.error,
                "hung_up": answer.hung_up,
                "wrong": wrong,
            }
        )

    def sample(self, server: Server) -> None:
        """A look at the server's memory."""
        self.samples.append({"at": time.monotonic() - self.began, **look(server)})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.samples[-1]) + "\n")


def look(server: Server) -> dict[str, Any]:
    """Bytes, open files and threads of the server and of each model's process, and its regions of shared memory."""
    pids = {"tritonserver": server.pid, **{label(pid): pid for pid in get_child_pids(server.pid)}}
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


def plan(texts: Sequence[str], seed: int) -> Iterator[Planned]:
    """Requests of all kinds, for ever; equal seeds give equal ones."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    while True:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        number = draw.randrange(len(texts))
        fields: dict[str, Any] = {
            "text_input": texts[number],
            "apply_chat_template": False,
            "max_tokens": TOKENS[number % len(TOKENS)],
        }
        name = f"text {number}"
        if kind == "sampled" or (kind == "hung up" and draw.random() < KINDS["sampled"]):
            fields |= {"temperature": 1.0, "top_p": 0.9, "seed": (chosen := draw.randrange(SEEDS))}
            name = f"text {number} with seed {chosen}"
        streamed = kind == "streamed" or (kind != "whole" and draw.random() < 0.5)
        yield Planned(
            kind, name, Ask(fields, streamed=streamed, hang_up=draw.uniform(*HANG_UP) if kind == "hung up" else 0.0)
        )


def soak(server: Server, texts: Sequence[str], args: argparse.Namespace, log: Log, reporter: Reporter) -> None:
    """Load the server for so many minutes, and look at it every so many seconds."""
    target = Target(server.grpc_url, served.NAME, stream_model_name(served.NAME))
    planned: list[Planned] = []

    def arriving() -> Iterator[tuple[float, Ask]]:
        for at, one in zip(arrivals(args.rate, args.seed), plan(texts, args.seed), strict=False):
            if at > args.minutes * 60:
                return
            planned.append(one)
            yield at, one.ask

    async def work(line: Line) -> None:
        loading = asyncio.create_task(open_loop(line, arriving(), lambda sent: log.keep(sent, planned[sent.number])))
        while not loading.done():
            await asyncio.to_thread(log.sample, server)
            server.check_alive()
            reporter.progress(int(time.monotonic() - log.began), int(args.minutes * 60), "seconds")
            await asyncio.wait({loading}, timeout=args.every)
        await loading

    asyncio.run(connected(target, work))
    log.sample(server)


def results_of(log: Log, args: argparse.Namespace, left: Sequence[str]) -> dict[str, Any]:
    """All figures: by kind, by minute, and what each process held."""
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
    folder = served.model(args.model, workdir / "model")
    repository = served.packaged(folder, workdir / "package", slots=16)
    texts = served.prompts(folder, LENGTHS, TEXTS, args.seed)
    os.environ["TUNELINE_THREADS"] = str(args.threads)
    reporter, samples = create_console_reporter(), workdir / "samples.jsonl"
    samples.unlink(missing_ok=True)
    reporter.step(f"{args.rate:g} requests a second")
    names = [served.NAME, stream_model_name(served.NAME)]
    with running_server(repository, models=names, log=workdir / "triton.log") as server:
        log, before = Log(samples), {"client": time.process_time(), "server": load.cpu_of(server.pid)}
        soak(server, texts, args, log, reporter)
        cpu = {"client": time.process_time() - before["client"], "server": load.cpu_of(server.pid) - before["server"]}
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
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="of load")
    parser.add_argument(
        "--warmup-minutes", type=float, default=5.0, metavar="N", help="of them, after which memory is to stay flat"
    )
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="requests a second, on average")
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds between two looks at memory")
    parser.add_argument(
        "--model", default=served.RANDOM, metavar="SOURCE", help="a base model; default: a random one of 27M parameters"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the served model")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests and of when they arrive")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
