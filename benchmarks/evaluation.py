"""Benchmark of likelihood tasks: tuneline's engine and lm-eval's hf backend, alternately in one run.

    python -m benchmarks.evaluation --data FOLDER --workdir DIR --markdown docs/reference/benchmarks-evaluation.md
    python -m benchmarks.evaluation --data FOLDER --workdir DIR --tasks boolq,boolq_5shot --without-adapter --threads 1 \
        --markdown docs/reference/benchmarks-option-tasks.md
    python -m benchmarks.evaluation --data FOLDER --workdir DIR --rows 20 --rounds 1 --tasks arc_easy

FOLDER contains MosaicML's in-context-learning files (icl_arc_easy.jsonl.gz, icl_piqa.jsonl.gz, ...). lm-eval is installed into --workdir
without torch and transformers, so that both systems use the same versions; --peer-path is a folder with an existing installation.
--workdir also contains the adapter, the log and results.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import evaluation_page, icl, machine, measure, peers
from benchmarks.fine_tuning import last_line
from components.common.models import model_loading
from components.common.runtime import cpu_cores

PEER = "lm-eval==0.4.13"  # without its requirements: what its hf backend imports tuneline needs too, the rest belongs to tasks not asked here
BATCHES = (1, 4, 8, 16, 32, 64, "auto")


def main() -> None:
    """Run the measurements, store the results, and write the page."""
    args = _arguments()
    workdir = args.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    told = machine.circumstances("benchmarks.evaluation")
    read = {task: icl.read(args.data, task, args.rows or None) for task in args.tasks.split(",")}
    settings = {
        "model": str(model_loading.resolve_base_model(args.model).path),
        "adapter": "" if args.without_adapter else str(workdir / "adapter"),
        "tasks": {task: items for task, (items, _) in read.items()},
        "rounds": args.rounds,
        "batch_tokens": args.batch_tokens,
        "peer_batches": [int(one) if one.isdecimal() else one for one in args.batches.split(",")],
        "trial_rows": args.trial_rows,
        "profile_rows": min(args.rows or args.profile_rows, args.profile_rows),
    }
    (workdir / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    measured, cost = _run(workdir, args.peer_path or _installed(workdir), args.threads)
    results = {
        **told,
        **measured,
        "cost": cost,
        "model": args.model,
        "rounds": args.rounds,
        "batch_tokens": args.batch_tokens,
    }
    results["profile_rows"] = settings["profile_rows"]
    results["sha256"] = {task: digest for task, (_, digest) in read.items()}
    (workdir / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(evaluation_page.summary(results), flush=True)
    if args.markdown:
        args.markdown.write_text(evaluation_page.markdown(results), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="Folder of MosaicML's in-context-learning files."
    )
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/benchmark-evaluation"), metavar="DIR")
    parser.add_argument("--model", default=model_loading.EMBEDDED_SOURCE, metavar="SOURCE", help="Base model.")
    parser.add_argument(
        "--tasks",
        default=",".join(icl.TASKS),
        metavar="NAMES",
        help=f"Comma-separated tasks: {', '.join(icl.ALL_TASKS)}.",
    )
    parser.add_argument(
        "--rows", type=int, default=100, metavar="N", help="Number of rows to use of each file; 0: all."
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="Number of measurements of each system, which alternate."
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=cpu_cores.get_thread_count(),
        metavar="N",
        help="Number of threads of each system.",
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=2048, metavar="N", help="Value of evaluation.batch_tokens for tuneline."
    )
    parser.add_argument(
        "--batches",
        default=",".join(map(str, BATCHES)),
        metavar="SIZES",
        help="Comma-separated batch sizes of lm-eval; the fastest is used.",
    )
    parser.add_argument(
        "--trial-rows",
        type=int,
        default=16,
        metavar="N",
        help="Number of rows of each file with which to try the batch sizes.",
    )
    parser.add_argument(
        "--profile-rows", type=int, default=20, metavar="N", help="Number of rows of each file to profile."
    )
    parser.add_argument(
        "--peer-path", type=Path, metavar="DIR", help="Folder with lm-eval, created by pip install --target."
    )
    parser.add_argument("--without-adapter", action="store_true", help="Do not measure an adapter and its base.")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Page to write.")
    args = parser.parse_args()
    if unknown := set(args.tasks.split(",")) - set(icl.ALL_TASKS):
        parser.error(f"--tasks: {', '.join(sorted(unknown))} is none of {', '.join(icl.ALL_TASKS)}")
    return args


def _installed(workdir: Path) -> Path:
    """Return the folder with lm-eval; install it if it is missing. Raises CalledProcessError."""
    folder = workdir / "lm-eval"
    if not (folder / ".ready").exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), PEER], check=True)
        (folder / ".ready").touch()
    return folder


def _run(workdir: Path, peer: Path, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all measurements in a separate process; return its figures and its cost. Raises PeerError."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TUNELINE_THREADS"), str(threads))
    environment = {
        "PYTHONPATH": f"{machine.ROOT}:{peer}",
        "HF_HOME": str(workdir / "huggingface"),
        **peers.OFFLINE,
        **counts,
    }
    command = [sys.executable, "-P", "-m", "benchmarks.peers.run_evaluation", str(workdir / "settings.json")]
    cost = measure.run(command, workdir / "log.txt", [], workdir, environment, workdir / "told.txt")
    if cost.returncode:
        said = (workdir / "log.txt").read_text(encoding="utf-8", errors="replace")
        raise peers.PeerError(f"exit code {cost.returncode}: {said[-2000:]}")
    return last_line(workdir / "told.txt"), cost.as_dict()


if __name__ == "__main__":
    main()
