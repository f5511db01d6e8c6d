"""Rank processes of all hosts: they start a phase together, and their results are gathered."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import dataclass

import psutil

from components.common.runtime import process_control
from components.common.runtime.errors import TunelineError
from pipelines.operations.storage_benchmark import rank_worker
from pipelines.operations.storage_benchmark.host_group import HostGroup
from pipelines.operations.storage_benchmark.rank_worker import Json

WORKER_COMMAND = [sys.executable, "-I", "-S", "-X", "utf8", rank_worker.__file__]


@dataclass(frozen=True)
class PhaseResult:
    """Measurements of all ranks in the order of their tasks, and the largest share of CPU time of a host."""

    ranks: list[Json]
    cpu_busy: float


def run_ranks(group: HostGroup, tasks: list[Json]) -> PhaseResult:
    """Run one process per task, spread over the hosts, which start at the same time.

    Args:
        tasks: see `rank_worker`. "host" is the rank of the task's host; by default, tasks go round the hosts.

    Raises:
        OSError: the storage failed in a task.
        TunelineError: a rank process cannot be started, or was killed.
        PartnerError: another host failed.
    """
    own = [number for number, task in enumerate(tasks) if task.get("host", number) % group.hosts == group.rank]
    processes: list[subprocess.Popen[str]] = []
    try:
        _start_processes(processes, len(own))
        for number, process in zip(own, processes, strict=True):
            _send(process, json.dumps({"rank": number, **tasks[number]}))
        for process in processes:
            if (line := _receive(process)) != "ready":
                _read_result(line)
        group.gather("ready")
        psutil.cpu_percent()
        for process in processes:
            _send(process, "go")
        results = {number: _read_result(_receive(process)) for number, process in zip(own, processes, strict=True)}
        gathered = group.gather({"results": results, "cpu_busy": psutil.cpu_percent() / 100})
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    by_rank = {int(number): result for values in gathered for number, result in values["results"].items()}
    return PhaseResult(
        [by_rank[number] for number in range(len(tasks))], max(values["cpu_busy"] for values in gathered)
    )


def _start_processes(processes: list[subprocess.Popen[str]], count: int) -> None:
    """Append started processes to a list one by one, so that the caller can end them after an exception."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # two pipes per process
    try:
        for _ in range(count):
            process = subprocess.Popen(
                WORKER_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the ranks
                preexec_fn=process_control.die_with_parent,
            )
            processes.append(process)
    except OSError as error:
        raise TunelineError(
            f"{len(processes)} of {count} rank processes started: {error.strerror}",
            hint="Start fewer ranks per host, or raise the host's limits on open files and processes.",
        ) from None


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    except BrokenPipeError:
        _raise_exit(process)


def _receive(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _raise_exit(process)
    return line.strip()


def _raise_exit(process: subprocess.Popen[str]) -> None:
    raise TunelineError(
        f"a rank process ended with exit code {process.wait()}",
        hint="If the process was killed for lack of memory, start fewer ranks per host.",
    )


def _read_result(line: str) -> Json:
    result: Json = json.loads(line)
    if "error" in result:
        raise OSError(*result["error"])
    return result
