"""Session of a benchmark: joins the hosts, runs the phases of the plan, and compares the result with requirements."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import Reporter
from pipelines.operations.storage_benchmark import fio_check, phases, team_phases
from pipelines.operations.storage_benchmark.host_group import open_group
from pipelines.operations.storage_benchmark.phases import Benchmark, BenchmarkPlan
from pipelines.operations.storage_benchmark.rank_worker import Json

NOT_MLPERF = "Not an MLPerf Storage result: the rules of MLCommons were not applied."
CPU_BUSY_SHARE = 0.9
PHASES = ("training", "fio", "checkpoint_write", "checkpoint_read", "model_loading", "small_files", "mix")
UNITS = {"read": "read_bytes_per_second", "write": "write_bytes_per_second"}


@dataclass(frozen=True)
class Membership:
    """The group of hosts, and the rank of this host in it."""

    group: str
    hosts: int = 1
    rank: int = 0
    wait_seconds: float = 300.0


def run_benchmark(
    path: Path, plan: BenchmarkPlan, required: Mapping[str, float], membership: Membership, reporter: Reporter
) -> Json:
    """Run the phases of a plan in a private subfolder, which is removed at the end.

    Args:
        path: folder on the storage.
        required: bytes per second by "read" and "write", see `read_requirement`.

    Returns:
        The report, see docs/reference/json.md. It is equal on all hosts.

    Raises:
        UsageError: the hosts have different plans, or the space is too small.
        PartnerError: a host did not join, failed or ended.
        OSError: the storage failed.
    """
    with open_group(path, membership.group, membership.hosts, membership.rank, membership.wait_seconds) as group:
        benchmark = Benchmark(group, plan, reporter)
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        hosts = group.gather({"rank": group.rank, "host": host, "plan": json.loads(json.dumps(asdict(plan)))})
        if any(other["plan"] != hosts[0]["plan"] for other in hosts):
            raise UsageError(
                "the hosts of the benchmark have different options", hint="Start the same command on every host."
            )
        phases.prepare(benchmark)
        measured: Json = {}
        if plan.accelerators:
            reporter.step("writing the dataset")
            phases.write_dataset(benchmark)
            measured["training"] = phases.search_accelerators(benchmark)
            if plan.fio:
                measured["fio"] = fio_check.measure_with_fio(benchmark, plan.accelerators)
        if plan.parameters:
            measured |= team_phases.measure_checkpoint(benchmark)
        if plan.readers:
            measured["small_files"] = team_phases.measure_small_files(benchmark)
        if plan.mix:
            measured["mix"] = team_phases.measure_mix(benchmark, measured["training"]["largest_passing"] or 1)
    verdict = judge(measured, required)
    return {
        "ok": measured.get("training", {}).get("passes", True) and all(item["ok"] is not False for item in verdict),
        "path": str(path),
        "hosts": [{"rank": other["rank"], "host": other["host"]} for other in hosts],
        "memory_bytes": benchmark.memory_bytes,
        "direct": benchmark.direct,
        "workload": {**hosts[0]["plan"]["workload"], "dataset_bytes": plan.workload.dataset_bytes} if plan.accelerators else None,
        **{name: measured.get(name) for name in PHASES},
        "verdict": verdict,
        "notes": list_notes(measured, len(hosts)),
    }  # fmt: skip


def judge(measured: Json, required: Mapping[str, float]) -> list[Json]:
    """Compare the largest measured rates with requirements.

    Reads from the page cache do not count. The rates of a training run that passes, which reads no more than its
    accelerators need, and of small files, which depends on delays, are lower bounds of the storage's rate.

    Returns:
        [{"name", "required_bytes_per_second", "measured_bytes_per_second", "phase", "ok"}]; "ok" is None if no phase
        measured the rate.
    """
    verdict: list[Json] = []
    for name, rate in required.items():
        key = UNITS[name]
        runs = [
            (phase, run)
            for phase, result in measured.items()
            for run in result.get("runs", [result])
            if key in run and (name != "read" or result.get("cache") != "cached")
        ]
        phase, best = max(
            ((phase, int(run[key])) for phase, run in runs), key=lambda item: item[1], default=(None, None)
        )
        is_met = best is not None and best >= rate
        is_limit_known = any(phase != "small_files" and not run.get("passes", False) for phase, run in runs)
        verdict.append(
            {
                "name": name,
                "required_bytes_per_second": round(rate),
                "measured_bytes_per_second": best,
                "phase": phase,
                "ok": is_met if is_met or is_limit_known else None,
            }
        )
    return verdict


def read_requirement(path: Path) -> dict[str, float]:
    """Return the rates that the output of `tuneline size --json` requires, in bytes per second by "read" and "write".

    Raises:
        UsageError: the file is not such an output.
    """
    hint = "Write the file with `tuneline size … --json > size.json`."
    try:
        storage = json.loads(path.read_text(encoding="utf-8"))["storage"]
        rates = {name: float(storage[key]) for name, key in UNITS.items()}
        if not all(0 <= rate < math.inf for rate in rates.values()):
            raise ValueError
        return rates
    except OSError as error:
        raise UsageError(f"--requirement {path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"--requirement {path} is not the output of tuneline size --json", hint=hint) from None


def list_notes(measured: Json, hosts: int) -> list[str]:
    """Return the limits of the result."""
    notes = [NOT_MLPERF]
    caches = {name: result["cache"] for name, result in measured.items() if result and "cache" in result}
    if cached := [name for name, cache in caches.items() if cache == "cached"]:
        notes.append(
            f"cached ({', '.join(cached)}): the files are smaller than {phases.MEMORY_FACTOR} times the memory, so "
            "reads can come from the page cache, and the rates are not those of the storage"
        )
    if hosts == 1:
        notes.append("one host: the file server may serve the files from memory; use --group on several hosts")
    busy = [run for result in measured.values() for run in result.get("runs", [result])]
    if any(run.get("cpu_busy", 0) > CPU_BUSY_SHARE for run in busy):
        notes.append("the CPUs of a host were saturated; the storage may be faster than measured")
    return notes
