"""Entry point of a Ray job, which runs training on the cluster's nodes."""

#     python -P -m components.common.launch.ray.ray_entrypoint FOLDER
#
# It reserves a placement group with one bundle per node, each on a different machine, and runs launch.node_runner in a
# Ray actor on each node: Ray assigns the accelerators and reports the loss of a machine. After the loss of a node or a
# process, the entry point ends the other nodes. It then restarts the command from its last checkpoint, up to `resumes`
# times.
#
# SIGTERM (`ray job stop`) or the file `stop` in the folder, with the text `save` or `now`, stops the training. Exit
# codes: 0: success; 75: interrupted, the work was saved and can resume; 1: failure. The outcome files contain the
# reason.

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from components.common.artifacts import artifact_folder
from components.common.launch import (
    EVENTS_FILENAME,
    OUTCOME_FILENAME,
    STOP_FILENAME,
    Command,
    JobEndedError,
    JsonObject,
    LostJobError,
    delete_outcomes,
    read_json_object,
)
from components.common.launch.launcher_settings import LauncherSettings, load_settings
from components.common.runtime import filesystem, process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    RESUME_HINT,
    EngineMissingError,
    TunelineError,
    get_first_line,
)
from components.common.runtime.reporters import EventLog

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RESTARTS_FILENAME = "restarts.json"
POLL_INTERVAL_SECONDS = 0.5
NODE_EXIT_TIMEOUT_SECONDS = 10.0  # after one node failed, for the others to end and write their outcomes
NOTE_DELAY_SECONDS = 3.0  # a shorter wait for nodes is not reported
StopMode = Literal["", "save", "now"]


class _LostError(Exception):
    """A node or a process was lost; another attempt may succeed."""


class _StoppedError(Exception):
    """A stop was requested before the training had work to save."""


class NodeActor:
    """One node's part of the training, as a Ray actor on that node.

    Ray serializes this class by value. The methods import tuneline's packages, so that a node without them reports an
    ImportError.
    """

    def find_free_address(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def start(self, folder: str, variables: dict[str, str]) -> None:
        """Start launch.node_runner, which ends with this process."""
        import subprocess

        from components.common.runtime import process_control

        command = process_control.build_module_command("components.common.launch.node_runner", folder)
        environment = process_control.build_python_environment(**variables)
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=process_control.die_with_parent
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.child.poll()

    def request_stop(self) -> None:
        """Request that the training saves and ends."""
        self.child.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class _Job:
    """The command to run, and the current stop request."""

    folder: Path
    command: Command
    settings: LauncherSettings
    get_stop_mode: Callable[[], StopMode]

    def note(self, text: str) -> None:
        """Report a line to the driver's log and to the watching process."""
        print(text, file=sys.stderr, flush=True)
        EventLog(self.folder / EVENTS_FILENAME, "launch").note(text)

    def count_event_bytes(self) -> int:
        """Return the size of the event file."""
        path = self.folder / EVENTS_FILENAME
        return path.stat().st_size if path.exists() else 0


def main(folder: Path) -> int:
    """Run the job of this folder on the cluster of this process and return the exit code."""
    import ray

    settings, stop_requested = load_settings(), threading.Event()
    ray.init(address=os.environ.get("RAY_ADDRESS") or "auto")
    with process_control.handle_stop_signals(stop_requested):  # after ray.init, which installs its own handlers
        job = _Job(folder, Command.read(folder), settings, lambda: read_stop_mode(folder, stop_requested))
        try:
            return _run_attempts(job)
        except _StoppedError:
            return EXIT_INTERRUPTED
        except TunelineError as error:
            outcome = {"error": error.as_dict(), "exit_code": error.exit_code}
            artifact_folder.write_atomically(folder / OUTCOME_FILENAME, json.dumps(outcome))
            print(f"{error.message}. {error.hint}", file=sys.stderr, flush=True)
            return error.exit_code


def read_stop_mode(folder: Path, stop_requested: threading.Event) -> StopMode:
    """Return the requested stop mode, or "" if no stop was requested."""
    try:
        content = filesystem.read_text(folder / STOP_FILENAME).strip()
    except OSError:
        content = ""
    if content == "now":
        return "now"
    return "save" if content or stop_requested.is_set() else ""


def request_stop(folder: Path, mode: StopMode) -> None:
    """Write a stop request to the job folder."""
    artifact_folder.write_atomically(folder / STOP_FILENAME, mode)


def reset_folder(folder: Path) -> None:
    """Delete the stop request and the restart count of an earlier job of this folder."""
    for name in (STOP_FILENAME, RESTARTS_FILENAME):
        (folder / name).unlink(missing_ok=True)


def build_bundle(settings: LauncherSettings, processes: int) -> dict[str, float]:
    """Return the resources of one node of the placement group, by Ray's names.

    Args:
        settings: the section `launcher`.
        processes: number of processes per node.
    """
    bundle: dict[str, float] = {"CPU": settings.ray.cpus or processes, **settings.ray.resources}
    if settings.ray.accelerator:
        bundle[settings.ray.accelerator_resource] = processes
    return bundle


def _run_attempts(job: _Job) -> int:
    """Restart attempts that lose nodes or processes; return the exit code. Raises JobEndedError after all restarts."""
    # The count of restarts is in the job folder, so that it also limits an entry point that Ray starts again.
    while True:
        try:
            return _run_attempt(job)
        except _LostError as lost:
            if job.get_stop_mode():
                raise _StoppedError from None
            try:
                restarts = int(json.loads(filesystem.read_text(job.folder / RESTARTS_FILENAME)))
            except (OSError, ValueError):
                restarts = 0
            limit = job.settings.resumes
            if restarts >= limit:
                raise JobEndedError(f"{lost}, after {format_count(restarts, 'restart')}", hint=RESUME_HINT) from None
            artifact_folder.write_atomically(job.folder / RESTARTS_FILENAME, json.dumps(restarts + 1))
            job.note(f"{lost}; restarting from the last checkpoint, restart {restarts + 1} of {limit}")


def _run_attempt(job: _Job) -> int:
    """Run the command on every node and return the exit code. Raises _LostError if another attempt may succeed."""
    from ray.exceptions import RayActorError, RayError

    delete_outcomes(job.folder)
    with _reserve_nodes(job) as nodes:
        event_bytes = job.count_event_bytes()
        try:
            ((address, port),) = _get_results(job, [nodes[0].find_free_address.remote()])
            common = {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port), **build_thread_variables(job.settings)}
            starts = [
                node.start.remote(str(job.folder), {**common, "PET_NODE_RANK": str(number)})
                for number, node in enumerate(nodes)
            ]
            _get_results(job, starts)
            codes = _follow(job, nodes)
        except RayActorError as error:
            if _read_errors(job.folder):
                return EXIT_FAILED
            raise _LostError(f"a training node was lost ({get_first_line(error).rstrip('.:')[:300]})") from None
        except RayError as error:
            raise EngineMissingError(
                f"a node of the Ray cluster cannot run the training: {str(error).strip().splitlines()[-1][:300]}",
                hint="Provide the same version of Ray, tuneline in Ray's Python environment, and the same folders on "
                "every node.",
            ) from None
    is_stopping, has_begun = bool(job.get_stop_mode()), job.count_event_bytes() > event_bytes
    return decide_exit_code(codes, _read_errors(job.folder), is_stopping=is_stopping, has_begun=has_begun)


def decide_exit_code(codes: list[int | None], errors: list[JsonObject], *, is_stopping: bool, has_begun: bool) -> int:
    """Return the job's exit code.

    Args:
        codes: exit codes of the nodes; None for a node that was killed.
        errors: outcomes of processes that contain an error, each with the key `exit_code`.
        is_stopping: a stop was requested.
        has_begun: the training reported progress. A process that is lost before would be lost in every attempt.

    Raises:
        _LostError: a node or a process was lost; another attempt may succeed.
    """
    if all(code == 0 for code in codes):
        return 0
    if any(error["exit_code"] != EXIT_INTERRUPTED for error in errors):
        return EXIT_FAILED
    if is_stopping:
        return EXIT_INTERRUPTED if errors else EXIT_FAILED
    if errors:
        raise _LostError("a node requested a stop")
    if has_begun:
        raise _LostError("a training process was lost")
    return EXIT_FAILED


@contextmanager
def _reserve_nodes(job: _Job) -> Iterator[list[ActorHandle]]:
    """Provide one actor per node; the actors and their processes end with the context."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = build_bundle(job.settings, job.command.processes)
    # An actor requests its whole bundle, because Ray makes only the requested accelerators visible.
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    amounts = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "memory": bundle.get("memory")}
    group = placement_group([bundle] * job.command.nodes, strategy="STRICT_SPREAD")
    nodes: list[ActorHandle] = []
    try:
        _wait_for_nodes(job, lambda: group.wait(POLL_INTERVAL_SECONDS), bundle)
        for number in range(job.command.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            nodes.append(
                ray.remote(NodeActor).options(scheduling_strategy=strategy, resources=custom, **amounts).remote()
            )
        yield nodes
    finally:
        for node in nodes:
            ray.kill(node)
        remove_placement_group(group)


def _wait_for_nodes(job: _Job, is_ready: Callable[[], bool], bundle: dict[str, float]) -> None:
    """Wait for the placement group. Raises EngineMissingError after `ray.wait_seconds`."""
    import ray

    def describe_cluster() -> str:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
        return f"nodes of at least this size: {fitting} of {len(nodes)}"

    amounts = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    count, limit = job.command.nodes, job.settings.ray.wait_seconds
    demand = f"{format_count(count, 'free node')} with {amounts} each"
    started_at, is_noted = time.monotonic(), False
    while not is_ready():
        waited = time.monotonic() - started_at
        if job.get_stop_mode():
            raise _StoppedError
        if limit and waited > limit:
            raise EngineMissingError(
                f"timeout after {limit:.0f} s: the Ray job requires {demand}; {describe_cluster()}",
                hint="Reduce launcher.nodes or launcher.ray, or add nodes, then run the same command again to resume.",
            )
        if not is_noted and waited > NOTE_DELAY_SECONDS:
            is_noted = True
            job.note(f"waiting for {demand}; {describe_cluster()}")


def build_thread_variables(settings: LauncherSettings) -> dict[str, str]:
    """Return the variables that set the number of threads of each process, or of each node."""
    if settings.threads:
        return {"TUNELINE_JOB_THREADS": str(settings.threads)}
    return {"TUNELINE_THREADS": str(settings.ray.cpus)} if settings.ray.cpus else {}


def _get_results(job: _Job, calls: list[ObjectRef]) -> list[tuple[str, int]]:
    """Return the actors' results; poll, because Ray reports a lost machine with a delay."""
    import ray

    while len(ray.wait(calls, num_returns=len(calls), timeout=POLL_INTERVAL_SECONDS)[0]) < len(calls):
        if job.get_stop_mode():
            raise _StoppedError
    results: list[tuple[str, int]] = ray.get(calls)
    return results


def _follow(job: _Job, nodes: list[ActorHandle]) -> list[int | None]:
    """Return the nodes' exit codes when all have ended, or NODE_EXIT_TIMEOUT_SECONDS after the first failure."""
    import ray

    codes: list[int | None] = [None] * len(nodes)
    calls, is_forwarded, failed_at = [node.poll.remote() for node in nodes], False, 0.0
    while None in codes and not (failed_at and time.monotonic() - failed_at > NODE_EXIT_TIMEOUT_SECONDS):
        mode = job.get_stop_mode()
        if mode == "now":
            break
        if mode and not is_forwarded:
            is_forwarded = bool([node.request_stop.remote() for node in nodes])
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=POLL_INTERVAL_SECONDS)
        for call in answered:
            ray.get(call)  # raises if the node is lost, even while others do not answer
        if len(answered) == len(calls):
            time.sleep(POLL_INTERVAL_SECONDS)
            codes, calls = ray.get(calls), [node.poll.remote() for node in nodes]
        if not failed_at and any(code not in (None, 0, EXIT_INTERRUPTED) for code in codes):
            failed_at = time.monotonic()
    return codes


def _read_errors(folder: Path) -> list[JsonObject]:
    """Return the outcomes that contain an error, except errors that only report a lost process."""
    outcomes = map(read_json_object, folder.glob("outcome*.json"))
    return [outcome for outcome in outcomes if outcome.get("error", {}).get("kind") not in (None, LostJobError.kind)]


if __name__ == "__main__":
    process_control.restrict_new_files()
    sys.exit(main(Path(sys.argv[1])))
