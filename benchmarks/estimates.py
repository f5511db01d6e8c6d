"""The dry run of each objective and format compared with its run, on the embedded model with few steps.

    python -P -m benchmarks.estimates --workdir DIR --markdown docs/reference/benchmarks-estimates.md

With one thread (TUNELINE_THREADS=1), the processor time of a run is its duration on an otherwise idle machine. Results in the working folder are reused;
`--keys` without a key only writes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import machine, measure
from benchmarks.page import table_of
from components.fine_tuning.config import FineTuningConfig

EXAMPLE = machine.ROOT / "examples" / "rlhf"
GOAL = 0.3
GB = 10**9
TIMEOUT_STATUS = 124  # of the command timeout
MODEL_STAGES = ("fine_tuning", "evaluation", "triton_packaging")
FRACTIONS = {"train": 0.7, "validation": 0.15, "test": 0.15}
ROLLOUT = {"max_answer_tokens": 20, "answers_per_prompt": 6}
SHORT = {"max_length": 96, "validation_rows": 8}
GENERATION = {
    "suite": "none",
    "tasks": [{"kind": "generation", "metrics": ["final_number"], "max_new_tokens": 20}],
    "gate": [{"metric": "generation.final_number", "max_loss": 0.5}],
}
UNPROVEN = {"prove": False}
Json = dict[str, Any]


def build_configurations(reward_model: str) -> dict[str, Json]:
    """Return the configuration of each key; int8 and fp8 package the model that sft trained.

    Args:
        reward_model: source of the reward model of grpo.
    """
    teacher = FineTuningConfig().base_model
    rewards = {
        "grpo": [{"kind": "reward_model", "model": reward_model}, {"kind": "final_number"}],
        "rloo": [{"kind": "final_number"}, {"kind": "no_repetition"}],
    }
    sft = _configure("conversations.jsonl", {"objective": "sft", "max_steps": 4, **SHORT}, {"suite": "none"})
    rollouts = {
        objective: _configure(
            "orders.jsonl",
            {
                "objective": objective,
                "max_steps": 2,
                "batch_size": 4,
                **SHORT,
                "grpo": {**ROLLOUT, "rewards": rewards[objective]},
            },
            GENERATION,
            UNPROVEN,
        )
        for objective in rewards
    }
    distillation = {"teacher": teacher, "max_answer_tokens": 20}
    distill = {"objective": "distill", "max_steps": 2, "batch_size": 8, **SHORT, "distillation": distillation}
    fp8 = {"backend": "vllm", "quantization": "fp8", **UNPROVEN}
    return {
        "objective: sft": sft,
        "objective: reward": _configure(
            "pairs.jsonl",
            {"objective": "reward", "max_steps": 4, "batch_size": 8, **SHORT},
            {},
            name="estimated-reward",
        ),
        **{f"objective: {name}": configuration for name, configuration in rollouts.items()},
        "objective: distill": _configure("orders.jsonl", distill, GENERATION, UNPROVEN),
        "quantization: int8": {**sft, "triton_packaging": {"quantization": "int8", "quantization_margin": 0.05}},
        "quantization: fp8": {**sft, "triton_packaging": {**fp8, "quantization_margin": 0.05}},
    }


def _configure(
    source: str, tuning: Json, evaluation: Json, packaging: Json | None = None, name: str = "estimated"
) -> Json:
    curation = {"sources": [str(EXAMPLE / source)], "near_duplicate_threshold": 1.0, "fractions": FRACTIONS}
    return {
        "data_curation": curation,
        "fine_tuning": tuning,
        "evaluation": evaluation,
        "triton_packaging": packaging or {},
        "model_registry": {"name": name},
    }


def measure_key(configuration: Mapping[str, Any], folder: Path, name: str, max_seconds: int) -> Json:
    """Estimate and run a customization, and return the estimate, the cost of the run's stages and their circumstances.

    A run that takes more than `max_seconds` is stopped; its finished stages count.
    """
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(configuration)), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pipelines.cli", "run", "-c", str(path), "--workdir", str(folder / "work")]
    outputs, is_stopped = [], False
    for kind, options in (("estimate", ["--dry-run"]), ("run", list[str]())):
        output, log = (folder / f"{name}.{kind}.{suffix}" for suffix in ("json", "log"))
        cost = measure.run(
            ["timeout", str(max_seconds), *command, "--json", *options], log, [], machine.ROOT, None, output
        )
        is_stopped = cost.returncode == TIMEOUT_STATUS and kind == "run"
        if cost.returncode and not is_stopped:
            raise SystemExit(f"the {kind} of {name} failed; see {log} and {output}")
        outputs.append(output)
    estimate = json.loads(outputs[0].read_text(encoding="utf-8"))
    stages = read_stages(max((folder / "work" / "runs").iterdir()))
    if not stages.keys() & {*MODEL_STAGES}:
        raise SystemExit(f"the run of {name} was stopped before a measured stage finished; increase --max-seconds")
    model, summary = find_newest_model(folder / "work" / "store")
    return {
        "estimate": {name: estimate[name] for name in ("seconds", "memory")},
        "stages": stages,
        "peak_memory": summary["peak_memory"],
        "model": str(model),
        "is_stopped": is_stopped,
        "circumstances": machine.circumstances("benchmarks.estimates"),
    }


def find_newest_model(store: Path) -> tuple[Path, Json]:
    """Return the folder and the summary of the model that was trained last; a stopped run reports none."""
    for path in sorted(store.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
        if "peak_memory" in summary:
            return path.parent, summary
    raise SystemExit(f"{store} contains no model")


def read_stages(run: Path) -> dict[str, float]:
    """Return the processor seconds of each stage of a run that was not cached, with those of its start."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    finished = [event for event in events if event["event"] == "finished" and not event["cached"]]
    return {event["stage"]: event["cpu_seconds"] for event in finished}


PAGE = """# Estimates of the dry run, measured

`make bench-estimates` writes this page. Each row is a stage of a run of the embedded model with data of `examples/rlhf`, few steps and one
thread, and the dry run before it. The goal is an error of at most {goal:.0%}.

## Measurements

{measurements}
## Time

The measured time is the processor time of the stage's process and its children. With one thread, it is the duration on an otherwise idle machine;
other processes lengthen it, because they share caches. The dry run measures the speed of the model in processor time too. Cost is processor time multiplied
by a price, so its error is that of the time.

{times}
## Memory of the training

{peaks}
{missed}
"""


def render_page(results: Mapping[str, Json]) -> str:
    """Return the page."""
    times, memory, missed, measurements = [], [], [], []
    for key, result in results.items():
        made = result["circumstances"]
        cells = [f"`{made['command']}`", f"`{made['commit']}`", made["date"]]
        device = f"{made['processor']}, {made['cores']} cores, Python {made['python']}"
        end = "stopped at a time limit" if result["is_stopped"] else "complete"
        measurements.append([f"`{key}`", *cells, device, str(made["load"]), end])
        stages = [name for name in MODEL_STAGES if name in result["stages"]]
        for stage in stages:
            cells = _compare(result["estimate"]["seconds"][stage], result["stages"][stage], 1, "s")
            times.append([f"`{key}`", stage, *cells])
            missed += [f"{key} (time of {stage})"] if _misses(cells[-1]) else []
        if "fine_tuning" in stages:
            cells = _compare(result["estimate"]["memory"]["training"]["total"], result["peak_memory"], GB, "GB")
            memory.append([f"`{key}`", *cells])
            missed += [f"{key} (memory)"] if _misses(cells[-1]) else []
    measured = {f"{key} {stage}" for key, result in results.items() for stage in result["stages"]}
    wanted = [
        (key, "triton_packaging" if key.startswith("quantization") else "fine_tuning")
        for key in build_configurations("")
    ]
    absent = [f"{key} ({stage})" for key, stage in wanted if f"{key} {stage}" not in measured]
    head = ["estimate", "measured", "error"]
    return PAGE.format(
        goal=GOAL,
        measurements=table_of(["key", "command", "commit", "date", "machine", "load average", "run"], measurements)
        if results
        else "None.\n",
        times=table_of(["key", "stage", *head], times),
        peaks=table_of(["key", *head], memory),
        missed=(f"Rows that miss the goal: {', '.join(missed)}." if missed else "All measured rows meet the goal.")
        + (f" Not measured yet: {', '.join(absent)}." if absent else ""),
    )


def _compare(estimate: float, measured: float, unit: float, name: str) -> list[str]:
    digits = 0 if name == "s" else 2
    error = estimate / measured - 1
    return [f"{estimate / unit:.{digits}f} {name}", f"{measured / unit:.{digits}f} {name}", f"{error:+.0%}"]


def _misses(error: str) -> bool:
    return bool(error) and abs(float(error.rstrip("%"))) > 100 * GOAL


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate and run every key, and write the page. Results in the working folder are reused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/estimates"))
    parser.add_argument(
        "--keys", nargs="*", choices=list(build_configurations("")), help="Keys to measure. Default: all."
    )
    parser.add_argument("--max-seconds", type=int, default=1800, help="Limit of a run. Default: 1800.")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    folder = options.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Json] = {}
    reward_model = ""
    for key in build_configurations(""):
        name = key.replace(": ", "-")
        path = folder / f"{name}.result.json"
        if not path.exists() and (options.keys is None or key in options.keys):
            result = measure_key(build_configurations(reward_model)[key], folder, name, options.max_seconds)
            path.write_text(json.dumps(result), encoding="utf-8")
        if path.exists():
            results[key] = json.loads(path.read_text(encoding="utf-8"))
            print(key, json.dumps(results[key]), flush=True)
        if key == "objective: reward" and key in results:
            reward_model = results[key]["model"]
    if options.markdown:
        options.markdown.write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
