"""Benchmark of fine-tuning: tuneline, a plain TRL script and LLaMA-Factory on the same rows, with and without packing.

    python -m benchmarks.fine_tuning --data ROWS.jsonl.gz --workdir DIR --markdown docs/reference/benchmarks-fine-tuning.md
    python -m benchmarks.fine_tuning --workdir DIR --tokens 4000 --only tuneline-on,trl-on

--workdir contains LLaMA-Factory's environment, the rows, the adapters, the logs and results.json. Without --data, the rows are those of the
demo. The page lists a contestant that cannot be installed or fails with its error. --only also accepts the peers with further settings:
trl-off-kept and so on run without gradient checkpointing, trl-off-best and so on also with micro-batches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, measure, peers, tuning_page, tuning_rows
from benchmarks.peers import tuners
from benchmarks.peers.stopwatch import PROFILE_VARIABLE
from benchmarks.peers.tuners import Contestant
from benchmarks.tuning_rows import Chosen
from components.common.models import model_loading
from components.common.runtime import cpu_cores

SOURCE = model_loading.EMBEDDED_SOURCE
BATCH = 8  # rows an optimizer step: everybody's default
KNOWN = {one.name: one for one in (*tuners.CONTESTANTS, *tuners.FURTHER)}


@dataclass(frozen=True)
class Arena:
    """The inputs of all contestants: a folder, the rows, the base model as a float32 folder, settings, and LLaMA-Factory's Python."""

    folder: Path
    model: Path
    settings: dict[str, Any]
    python: str
    peer_python: str | None

    @property
    def rows(self) -> Path:
        return self.folder / "train.json"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.json"


def main() -> None:
    """Measure the requested contestants, store the results, and write the page."""
    args = _arguments()
    workdir = args.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    contestants = [KNOWN[name] for name in args.only.split(",")]
    told = machine.circumstances("benchmarks.fine_tuning")
    name, rows = _read(args.data, workdir)
    chosen = _choose(rows, args)
    arena = Arena(workdir, _base(workdir), _settings(args), args.python, args.peer_python)
    arena.rows.write_text(json.dumps(chosen.train, ensure_ascii=False), encoding="utf-8")
    arena.held_out.write_text(json.dumps(chosen.held_out, ensure_ascii=False), encoding="utf-8")
    print(f"{len(chosen.train):,} rows of {name}, {chosen.tokens:,} tokens", flush=True)
    measured = compete(contestants, arena, args.rounds)
    losses = held_out_losses(measured, arena)
    results = {
        **told,
        "rounds": args.rounds,
        "settings": arena.settings,
        "data": {**_described(chosen, args.max_length), "name": name, "read": len(rows)},
        "base_loss": losses.get("base", float("nan")),
        "rows": [{**row, **({"held_out": losses[row["name"]]} if row["name"] in losses else {})} for row in measured],
    }
    results["ratios"] = tuning_page.ratios(results["rows"])
    results["profiles"] = profiles(contestants, results["ratios"], arena)
    _write(results, [workdir / "results.json", *([args.json] if args.json else [])], args.markdown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fine_tuning", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="JSONL file (or .gz) with messages, or with prompt and response. Default: the demo's rows.",
    )
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/benchmark-fine-tuning"), metavar="DIR")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--tokens",
        type=int,
        default=16_000,
        metavar="N",
        help="Approximate number of useful tokens on which each system trains.",
    )
    amount.add_argument(
        "--steps", type=int, metavar="N", help="Number of optimizer steps without packing, instead of --tokens."
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="Number of measurements of each system, which alternate."
    )
    parser.add_argument(
        "--only",
        default=",".join(one.name for one in tuners.CONTESTANTS),
        metavar="NAMES",
        help=f"Comma-separated systems to measure: {', '.join(KNOWN)}.",
    )
    parser.add_argument("--max-length", type=int, default=512, metavar="N", help="Maximum number of tokens per row.")
    parser.add_argument(
        "--held-out",
        type=int,
        default=64,
        metavar="N",
        help="Number of rows at the end of the file with which the adapters are evaluated.",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=cpu_cores.get_thread_count(),
        metavar="N",
        help="Number of threads of each system.",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=tuners.MICRO,
        metavar="N",
        help="micro_batch_size of tuneline, and of the peers at their best settings.",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="Python interpreter with which to create LLaMA-Factory's environment."
    )
    parser.add_argument(
        "--peer-python", metavar="PYTHON", help="Python interpreter of an environment that already has LLaMA-Factory."
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to which the results are also written.")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="Page to write; its plot is written to the folder images next to it.",
    )
    args = parser.parse_args()
    if args.micro_batch < 1 or BATCH % args.micro_batch:
        parser.error(f"--micro-batch is {args.micro_batch}; it must divide the batch of {BATCH}")
    if unknown := set(args.only.split(",")) - set(KNOWN):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(KNOWN)}")
    return args


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "rank": 16,
        "alpha": 32,
        "learning_rate": 5e-4,
        "batch_size": BATCH,
        "micro_batch_size": args.micro_batch,
        "max_length": args.max_length,
        "seed": args.seed,
        "threads": args.threads,
        "held_out": args.held_out,
    }


def _read(data: Path | None, workdir: Path) -> tuple[str, list[tuning_rows.Row]]:
    """Return the rows and their name."""
    if data:
        return data.name, tuning_rows.read(data)
    from components.data_curation import python_docs

    made = workdir / "python_docs.jsonl"
    python_docs.build(made)
    return "the demo's rows", tuning_rows.read(made)


def _choose(rows: list[tuning_rows.Row], args: argparse.Namespace) -> Chosen:
    tokenizer = model_loading.load_tokenizer(model_loading.resolve_base_model(SOURCE).path)
    lengths = tuning_rows.lengths(rows, tokenizer)
    whole = [length for length in lengths[: -args.held_out] if length <= args.max_length]
    tokens = sum(whole[: args.steps * BATCH]) if args.steps else args.tokens
    return tuning_rows.choose(
        rows, lengths, tokens=tokens, batch=BATCH, held_out=args.held_out, max_length=args.max_length
    )


def _described(chosen: Chosen, max_length: int) -> dict[str, Any]:
    counts = {
        "rows": len(chosen.train),
        "held_out": len(chosen.held_out),
        "tokens": chosen.tokens,
        "left_out": chosen.left_out,
    }
    return {**counts, "max_length": max_length, "sha256": chosen.sha256}


def _base(workdir: Path) -> Path:
    """Return a folder with the base model for the peers: its files, and a configuration that loads them in float32."""
    source, folder = model_loading.resolve_base_model(SOURCE).path, workdir / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in ("config.json", "manifest.json"):
            (folder / path.name).symlink_to(path)
    configuration = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**configuration, "dtype": "float32"}, indent=1), encoding="utf-8")
    return folder


def compete(contestants: Sequence[Contestant], arena: Arena, rounds: int) -> list[dict[str, Any]]:
    """Run all contestants in alternation for this number of rounds; return the results of each."""
    measured: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
    for _ in range(rounds):
        for one in contestants:
            try:
                row = trained(one, arena)
            except peers.PeerError as error:
                row = {"error": str(error)}
            measured[one.name].append(row)
            print(f"{one.name}: {_line(row)}", flush=True)
    return [
        {**_about(one, arena), **tuning_page.combined(measured[one.name]), "rounds": measured[one.name]}
        for one in contestants
    ]


def _about(contestant: Contestant, arena: Arena) -> dict[str, Any]:
    flags = contestant.flags.format(**arena.settings)
    return {"name": contestant.name, "system": contestant.system, "packing": contestant.packing, "flags": flags}


def trained(contestant: Contestant, arena: Arena, *, is_profiled: bool = False) -> dict[str, Any]:
    """Run one training run; return its figures and the cost of the whole command. Raises PeerError."""
    folder = arena.folder / "runs" / contestant.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = tuners.interpreter(contestant, arena.folder, arena.python, arena.peer_python)
    settings = {**arena.settings, "rows": str(arena.rows), "model": str(arena.model), "output": str(folder / "adapter")}
    settings |= {"packing": contestant.packing, "recompute": contestant.recompute}
    settings["accumulation"] = BATCH // settings["micro_batch_size"] if contestant.micro_batch else 1
    (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    command = [*start, "-m", f"benchmarks.peers.{contestant.script}", str(folder / "settings.json")]
    environment = {**_environment(arena, folder), **({PROFILE_VARIABLE: "1"} if is_profiled else {})}
    cost = measure.run(command, folder / "log.txt", [], folder, environment, folder / "told.txt")
    if cost.returncode:
        raise peers.PeerError(f"exit code {cost.returncode}: {_tail(folder / 'log.txt')}")
    return {**last_line(folder / "told.txt"), "cost": cost.as_dict()}


def profiles(
    contestants: Sequence[Contestant], ratios: Sequence[dict[str, Any]], arena: Arena
) -> dict[str, dict[str, float]]:
    """Train the contestants that are compared without packing once more under torch's profiler. Raises PeerError."""
    names = {pair[side] for pair in ratios if pair["label"] == "packing off" for side in ("ours", "theirs")}
    return {one.name: trained(one, arena, is_profiled=True)["profile"] for one in contestants if one.name in names}


def _environment(arena: Arena, folder: Path) -> dict[str, str]:
    """Return variables that give each contestant the same threads, no network and an empty cache."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TUNELINE_THREADS"), str(arena.settings["threads"]))
    return {
        "PYTHONPATH": str(machine.ROOT),
        "HF_HOME": str(folder / "huggingface"),
        "DO_NOT_TRACK": "1",
        **peers.OFFLINE,
        **threads,
    }


def last_line(path: Path) -> dict[str, Any]:
    """Return the figures in the last line that a script printed. Raises PeerError if it printed none."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("{")]
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError) as error:
        raise peers.PeerError(f"no figures were printed: {_tail(path)}") from error


def _tail(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-400:]


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    each = row["cpu"] / row["tokens"] * 1000
    return f"{tuning_page.rate(row):.1f} tokens/s, {each:.1f} CPU s per 1,000 tokens, {row['cost']['pss'] / 2**20:,.0f} MiB, {row['losses']}"


def held_out_losses(measured: list[dict[str, Any]], arena: Arena) -> dict[str, float]:
    """Return the held-out loss of the base and of each adapter, from a separate process. A failure is reported and affects only these losses."""
    folder = arena.folder / "held-out"
    folder.mkdir(exist_ok=True)
    adapters = {"base": None, **{row["name"]: row["adapter"] for row in measured if "adapter" in row}}
    request = {
        "base": SOURCE,
        "rows": str(arena.held_out),
        "max_length": arena.settings["max_length"],
        "adapters": adapters,
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "benchmarks.held_out", str(folder / "request.json")]
    cost = measure.run(command, folder / "log.txt", [], folder, _environment(arena, folder), folder / "told.txt")
    if cost.returncode:
        print(f"the held-out losses could not be measured: {_tail(folder / 'log.txt')}", flush=True)
        return {}
    return last_line(folder / "told.txt")


def _write(results: dict[str, Any], files: list[Path], page: Path | None) -> None:
    for path in files:
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if page:
        image = Path("images") / f"{page.stem}.svg"
        tuning_page.plot(results, page.parent / image)
        page.write_text(tuning_page.markdown(results, str(image)), encoding="utf-8")


if __name__ == "__main__":
    main()
