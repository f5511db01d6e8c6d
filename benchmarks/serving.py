"""Benchmark of serving: a package, the package with one slot, plain generate and vLLM, and the CPU time of the gateway.

    python -m benchmarks.serving --workdir DIR --markdown docs/reference/benchmarks-serving.md
    python -m benchmarks.serving --workdir DIR --vllm-python /path/to/vllm/bin/python --markdown docs/reference/benchmarks-serving.md
    python -m benchmarks.serving --workdir DIR --rounds 1 --requests 2 --clients 1,4 --rates 2

Each contestant has a separate server of the same Triton binary. All servers run the whole time, and the load goes to one after the other.
By default, the model is a random one with 27M parameters and without an end token, so that every answer has all its tokens. --workdir
contains the models, the packages, the servers' logs and results.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import load, machine, measure, peers, served, serving_page
from benchmarks.client import Answer, Ask, Target
from benchmarks.fine_tuning import last_line
from benchmarks.gateway_cost import measure_capture, measure_cost, write_capture_file
from benchmarks.peers import vllm_served
from benchmarks.serving_page import ALONE, BATCHED, VLLM
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter, close_reporter, create_console_reporter
from components.triton_packaging import triton_config
from components.triton_packaging.triton_config import stream_model_name
from components.triton_packaging.triton_server import Server, running_server

SLOTS = 16
LENGTHS = (16, 32, 64, 128)  # tokens of the prompts
TEXTS = 16
READY = 900.0  # seconds that a server may take: vLLM compiles
GATEWAY_TOKENS = 64  # of an answer whose tokens are counted
CAPTURED_REQUESTS = 2000  # whose capture is measured alone
IDLE = 5.0  # seconds over which the servers' rest is looked at


@dataclass(frozen=True)
class Contestant:
    """A served system: a model repository, the models to load, and the model that streams."""

    name: str
    repository: Path
    models: tuple[str, ...]
    stream: str


def main() -> None:
    """Measure the contestants, store the results, and write the page."""
    args = _arguments()
    workdir = args.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    os.environ.update(dict.fromkeys(("TUNELINE_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(args.threads)))
    told, reporter = machine.circumstances("benchmarks.serving"), create_console_reporter()
    folder = served.model(args.model, workdir / "model")
    texts = served.prompts(folder, LENGTHS, TEXTS)
    contestants, errors = _contestants(args, folder, workdir)
    measured = compete(contestants, texts, folder, args, workdir, errors, reporter)
    reporter.step("the batch without a server")
    measured["profile"] = _profile(texts, folder, contestants[0].repository, args, workdir)
    close_reporter(reporter)
    results = {
        **told,
        **measured,
        "settings": _settings(args),
        "errors": errors,
        "parameters": served.parameters(folder),
    }
    results |= {
        "sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        "versions": _versions(args.vllm_python, errors),
    }
    _write(results, workdir / "results.json", args.markdown)
    print(serving_page.summary(results), flush=True)


def _contestants(args: argparse.Namespace, folder: Path, workdir: Path) -> tuple[list[Contestant], dict[str, str]]:
    """Return the contestants that can be served, and the reasons why others cannot."""
    stream = stream_model_name(served.NAME)
    found = [
        Contestant(name, served.packaged(folder, workdir / f"package-{slots}", slots), (served.NAME, stream), stream)
        for name, slots in ((BATCHED, SLOTS), (ALONE, 1))
    ]
    try:
        if args.vllm_python:
            repository = vllm_served.repository(workdir / "vllm", folder, args.vllm_python, SLOTS, args.threads)
            found.append(Contestant(VLLM, repository, (vllm_served.NAME,), vllm_served.NAME))
    except (peers.PeerError, TunelineError) as error:
        return found, {VLLM: str(error)}
    return found, {}


def compete(
    contestants: Sequence[Contestant],
    texts: Sequence[str],
    folder: Path,
    args: argparse.Namespace,
    workdir: Path,
    errors: dict[str, str],
    reporter: Reporter,
) -> dict[str, Any]:
    """Apply every load level to every contestant in alternation, round by round; run plain generate once per round.

    The error of a contestant whose server does not start is added to `errors`.
    """
    levels, plain, answers = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, list[Answer]]()
    with ExitStack() as stack:
        servers = _started(contestants, workdir, stack, errors, reporter)
        idle = _idle(servers)
        for number in range(args.rounds):
            for clients, rate in [*((clients, 0.0) for clients in args.clients), *((0, rate) for rate in args.rates)]:
                for one in contestants:
                    if one.name in servers and (clients or one.name != ALONE):
                        level, came = _level(
                            one, servers[one.name], asks_of(texts, args, clients, rate), clients, rate, number, reporter
                        )
                        levels.append({"contestant": one.name, "round": number, **level})
                        answers.setdefault(f"{one.name} {clients}", []).extend(came)
                        reporter.note(f"{one.name}: {load.told(level)}")
            plain.append(_generate(texts, folder, args, workdir))
            reporter.note(f"plain generate: {plain[-1]['tokens_per_second']:.1f} tokens/s")
        reporter.step("the gateway's cost")
        measure_gateway = partial(
            measure_cost,
            servers[BATCHED],
            contestants[0].repository,
            texts,
            workdir,
            requests=args.gateway_requests,
            clients=max(args.clients),
            tokens=GATEWAY_TOKENS,
        )
        capture = write_capture_file(workdir)
        gateway = measure_gateway()
        gateway["captured"] = measure_gateway(capture=capture)
        gateway["capture"] = measure_capture(capture, texts, requests=CAPTURED_REQUESTS)
        ready = {name: {"seconds": server.ready_seconds, "version": server.version} for name, server in servers.items()}
    return {
        "levels": levels,
        "generate": plain,
        "gateway": gateway,
        "idle": idle,
        "ready": ready,
        **_compared(answers, plain, texts),
    }


def asks_of(texts: Sequence[str], args: argparse.Namespace, clients: int, rate: float) -> list[Ask]:
    """Return the prompts in turn, each at least once: a number of requests per client, or as many as arrive in a number of seconds."""
    count = args.requests * clients if clients else round(rate * args.seconds)
    fields = {"apply_chat_template": False, "max_tokens": args.max_tokens}
    return [Ask({"text_input": texts[number % len(texts)], **fields}) for number in range(max(count, len(texts)))]


def _started(
    contestants: Sequence[Contestant], workdir: Path, stack: ExitStack, errors: dict[str, str], reporter: Reporter
) -> dict[str, Server]:
    servers = {}
    for number, one in enumerate(contestants):
        reporter.step(f"starting {one.name}")
        running = running_server(
            one.repository,
            models=one.models,
            log=workdir / f"triton-{number}.log",
            ready_timeout=READY,
            reporter=reporter,
        )
        try:
            servers[one.name] = stack.enter_context(running)
        except TunelineError as error:
            errors[one.name] = error.message
    return servers


def _level(
    one: Contestant, server: Server, asks: Sequence[Ask], clients: int, rate: float, seed: int, reporter: Reporter
) -> tuple[dict[str, Any], list[Answer]]:
    """Measure one load level after a few warm-up requests."""
    target = Target(server.grpc_url, one.stream, one.stream)
    load.measure(target, asks[: max(2, min(clients, 4))], clients=max(1, min(clients, 4)))
    return load.measure(target, asks, clients=clients, rate=rate, seed=seed, server=server.pid, reporter=reporter)


def _idle(servers: Mapping[str, Server]) -> dict[str, float]:
    """Return the share of a core that each server uses without requests."""
    before = {name: load.cpu_of(server.pid) for name, server in servers.items()}
    time.sleep(IDLE)
    return {name: (load.cpu_of(server.pid) - before[name]) / IDLE for name, server in servers.items()}


def _generate(texts: Sequence[str], folder: Path, args: argparse.Namespace, workdir: Path) -> dict[str, Any]:
    """Run plain generate in a separate process. Raises PeerError."""
    return dict(
        _apart("run_generate", {"model": str(folder), "texts": texts, "max_tokens": args.max_tokens}, args, workdir)
    )


def _profile(
    texts: Sequence[str], folder: Path, package: Path, args: argparse.Namespace, workdir: Path
) -> list[dict[str, Any]]:
    """Measure the parts of the batching engine's time in a separate process. Raises PeerError."""
    parameters = triton_config.read_config(package / served.NAME).parameters
    request = {
        "model": str(folder),
        "texts": texts,
        "max_tokens": args.max_tokens,
        "requests": args.requests,
        "clients": args.clients,
    }
    request |= {name: int(parameters[name].string_value) for name in ("slots", "cache_tokens")}
    return list(_apart("run_batch", request, args, workdir)["levels"])


def _apart(script: str, request: dict[str, Any], args: argparse.Namespace, workdir: Path) -> dict[str, Any]:
    """Return the output of a script of benchmarks.peers for a request. Raises PeerError."""
    files = {kind: workdir / f"{script}.{kind}" for kind in ("json", "log", "out")}
    files["json"].write_text(json.dumps({**request, "threads": args.threads}), encoding="utf-8")
    command = [sys.executable, "-P", "-m", f"benchmarks.peers.{script}", str(files["json"])]
    cost = measure.run(
        command, files["log"], [], workdir, {"PYTHONPATH": str(machine.ROOT), **peers.OFFLINE}, files["out"]
    )
    if cost.returncode:
        raise peers.PeerError(files["log"].read_text(encoding="utf-8", errors="replace")[-2000:])
    return last_line(files["out"])


def _compared(
    answers: Mapping[str, Sequence[Answer]], plain: Sequence[dict[str, Any]], texts: Sequence[str]
) -> dict[str, Any]:
    """Return the number of answers and of different answers by contestant and number of clients (0: at a rate).

    An answer is compared with the contestant's answer to a single client, and with that of plain generate.
    """
    found = {}
    for key, came in answers.items():
        name, _, clients = key.rpartition(" ")
        alone = {one.number % len(texts): one.text for one in answers.get(f"{name} 1", []) if one.good}
        differ = sum(one.text != alone.get(one.number % len(texts), one.text) for one in came if one.good)
        otherwise = sum(one.text != plain[0]["answers"][one.number % len(texts)] for one in came if one.good)
        prompts = [one.prompt_tokens for one in came if one.good]
        found[key] = {
            "contestant": name,
            "clients": int(clients),
            "answers": len(came),
            "not_alone": differ,
            "not_generate": otherwise,
            "short": sum(one.tokens != max(other.tokens for other in came) for one in came if one.good),
            "prompt_tokens": [min(prompts, default=0), max(prompts, default=0)],
        }
    return {"texts": list(found.values())}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "clients", "rates", "requests", "seconds", "rounds", "max_tokens", "threads")
    return {**{name: getattr(args, name) for name in names}, "lengths": LENGTHS, "texts": TEXTS, "slots": SLOTS}


def _versions(vllm_python: str | None, errors: Mapping[str, str]) -> dict[str, str]:
    import importlib.metadata

    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if vllm_python and VLLM not in errors:
        found |= {f"vLLM's {name}": version for name, version in vllm_served.versions(vllm_python).items()}
    return found


def _write(results: dict[str, Any], file: Path, page: Path | None) -> None:
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if page:
        image = Path("images") / f"{page.stem}.svg"
        serving_page.plot(results, page.parent / image)
        page.write_text(serving_page.markdown(results, str(image)), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/benchmark-serving"), metavar="DIR")
    parser.add_argument(
        "--model",
        default=served.RANDOM,
        metavar="SOURCE",
        help="Base model. Default: a random model with 27M parameters.",
    )
    parser.add_argument(
        "--clients",
        type=load.numbers(int),
        default=[1, 4, 16],
        metavar="N,N",
        help="Comma-separated numbers of clients, each for one closed loop.",
    )
    parser.add_argument(
        "--rates",
        type=load.numbers(float),
        default=[2.0, 4.0, 8.0],
        metavar="R,R",
        help="Comma-separated rates in requests per second, each for one open loop.",
    )
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="Number of requests of each client.")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="Duration of each open loop in seconds."
    )
    parser.add_argument(
        "--gateway-requests",
        type=int,
        default=200,
        metavar="N",
        help="Number of requests of each kind for measuring the gateway's CPU time.",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="Number of measurements of each system, which alternate."
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="Number of tokens of an answer.")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Number of threads of each engine.")
    parser.add_argument(
        "--vllm-python",
        metavar="PYTHON",
        help="Python interpreter with vLLM and the same Python version as this one. Also measures vLLM.",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Page to write.")
    args = parser.parse_args()
    if 1 not in args.clients:
        parser.error("--clients must hold 1: the others are compared with it")
    return args


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
