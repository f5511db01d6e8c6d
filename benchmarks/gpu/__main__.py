"""Measure training, evaluation and serving on one NVIDIA GPU, beside plain TRL and lm-eval on the same machine.

    python -m benchmarks.gpu --workdir DIR --output DIR
    python -m benchmarks.gpu --workdir DIR --output DIR --only machine,lora-packed --scale tiny

Requires torch, transformers, peft, accelerate, trl, datasets, pydantic, tensorboardX, liger-kernel, bitsandbytes and
lm-eval. A stage that fails or exceeds its time is recorded with the end of its output, and the others still run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import plan, workloads


def main() -> None:
    """Run the stages and write the results after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--workdir", type=Path, required=True, metavar="DIR", help="Folder for models, datasets and checkpoints."
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="Folder for results.json and the stages' logs."
    )
    parser.add_argument(
        "--scale", choices=("gpu", "tiny"), default="gpu", help="Size of the model; tiny: a small model for a CPU."
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="Comma-separated stages to run, in this order. Default: all stages."
    )
    parser.add_argument("--seconds", type=float, default=3600, help="Number of seconds after which no stage starts.")
    args = parser.parse_args()
    for folder in (args.workdir, args.output):
        folder.mkdir(parents=True, exist_ok=True)
    stages = plan.list_stages(args.scale)
    by_name = {stage.name: stage for stage in stages}
    names = list(filter(None, args.only.split(","))) or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"--only: unknown {', '.join(unknown)}; expected some of {', '.join(by_name)}")
    results: dict[str, Any] = {}
    began = time.perf_counter()
    for stage in map(by_name.__getitem__, names):
        if time.perf_counter() - began > args.seconds:
            results[stage.name] = {"error": "not started: the time was spent"}
            continue
        print(f"{stage.name} …", flush=True)
        results[stage.name] = run_stage(stage, args.workdir.resolve(), args.output.resolve())
        print(f"{stage.name}: {describe(results[stage.name])}", flush=True)
        workloads.write_json(args.output / "results.json", results)
    sys.exit(1 if any("error" in result for result in results.values()) else 0)


def run_stage(stage: plan.Stage, workdir: Path, output: Path) -> dict[str, Any]:
    """Return the stage's result, or {"error"}; its output is in a log of its name."""
    result, given, log = (output / f"{stage.name}.{kind}" for kind in ("json", "settings.json", "log"))
    result.unlink(missing_ok=True)
    workloads.write_json(given, {**stage.settings, "name": stage.name, "folder": str(workdir)})
    command = [sys.executable, "-m", "benchmarks.gpu.stages", stage.kind, str(result), str(given)]
    began, reason = time.perf_counter(), ""
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=stage.limit_seconds, check=False
            ).returncode
            reason = f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"exceeded {stage.limit_seconds:.0f} s"
    seconds = round(time.perf_counter() - began, 1)
    if reason or not result.exists():
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return {"error": reason or "no result", "output": tail, "stage_seconds": seconds}
    return {"about": stage.about, **json.loads(result.read_text(encoding="utf-8")), "stage_seconds": seconds}


def describe(result: dict[str, Any]) -> str:
    """Return the main figures of a result in one line."""
    if "error" in result:
        return f"FAILED, {result['error']}: {result.get('output', '')[-1500:]}"
    keys = ("tokens_per_second", "mfu", "peak_memory", "predicted_memory", "usage", "ratio", "plain_tokens_per_second",
            "difference", "rates", "engines", "product_flops", "copy_bytes_per_second", "gpu", "versions", "summary",
            "largest_difference", "startup", "choices", "cache_tokens", "stage_seconds")  # fmt: skip
    return json.dumps({key: result[key] for key in keys if key in result})


if __name__ == "__main__":
    main()
