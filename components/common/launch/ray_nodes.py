"""A training on the nodes of a Ray cluster: `python -P -m components.common.launch.ray_nodes FOLDER`, the entry point of a Ray job.

Takes a placement group of the command's nodes, each another machine, and runs launch.node on each, from an actor of Ray: so Ray says which
accelerators are whose, and a lost machine is noticed. When a node or a process is lost, what is left is ended and the command is started
again on nodes that are there, up to `resumes` times; the training goes on from its last checkpoint.

A stop comes as SIGTERM (`ray job stop`) or as the file `stop` in the folder, which says `save` or `now`. Exit code: 0, 75 where the work
was saved and can go on, or 1; the outcome files say why.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.common import artifacts, process
from components.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, GOES_ON, EngineMissingError, TunelineError
from components.common.launch import EVENTS, OUTCOME, STOP, Command, JobEndedError, LostJobError, forget_outcomes
from components.common.launch.settings import LauncherSettings, from_environment
from components.common.progress import Events

STAGE = "launch"
RESTARTS = "restarts.json"
LOOKS_EVERY = 0.5  # seconds
PATIENCE = 10.0  # seconds for the other nodes to end by themselves and say why, after one has failed
QUIETLY = 3.0  # seconds of waiting for nodes that are not worth a word
Wish = Literal["", "save", "now"]


class _LostError(Exception):
    """A node or a process is gone: another try may succeed."""


class _StoppedError(Exception):
    """A stop was asked for while there was nothing to save."""


class Node:
    """One node's part, in an actor of Ray on that node.

    Ray brings this class there by value, and our packages are imported where they are needed: so a node that lacks them says that.
    """

    def meeting(self) -> tuple[str, int]:
        """This node's address, and a port that is free here."""
        import socket

        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def start(self, folder: str, variables: dict[str, str]) -> None:
        """Start launch.node, which ends when this process does."""
        import subprocess

        from components.common import process

        command = process.module_command("components.common.launch.node", folder)
        environment = process.python_environment(**variables)
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=process.die_with_parent)

    def look(self) -> int | None:
        """The exit code; None while it runs."""
        return self.child.poll()

    def stop(self) -> None:
        """Ask it to save its work and end."""
        self.child.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class _Job:
    """What is to be done, and what is wished meanwhile."""

    folder: Path
    command: Command
    settings: LauncherSettings
    wish: Callable[[], Wish]

    def note(self, text: str) -> None:
        """Tell it who watches."""
        print(text, file=sys.stderr, flush=True)
        Events(self.folder / EVENTS, STAGE).note(text)


def main(folder: Path) -> int:
    """Run the job in this folder to its end on the cluster that this process belongs to."""
    import ray

    settings, asked = from_environment(), threading.Event()
    ray.init(address=os.environ.get("RAY_ADDRESS") or "auto")
    with process.stopping(asked):  # only now: Ray hears signals in its own way
        job = _Job(folder, Command.read(folder), settings, lambda: wish(folder, asked))
        try:
            return _to_the_end(job)
        except _StoppedError:
            return EXIT_INTERRUPTED
        except TunelineError as error:
            artifacts.write_atomically(folder / OUTCOME, json.dumps({"error": error.as_dict(), "exit_code": error.exit_code}))
            print(f"{error.message}. {error.hint}", file=sys.stderr, flush=True)
            return error.exit_code


def wish(folder: Path, asked: threading.Event) -> Wish:
    """Whether this job is to end, and how."""
    try:
        told = (folder / STOP).read_text(encoding="utf-8").strip()
    except OSError:
        told = ""
    return "now" if told == "now" else "save" if told or asked.is_set() else ""


def ask(folder: Path, how: Wish) -> None:
    """Ask the job in this folder to end."""
    artifacts.write_atomically(folder / STOP, how)


def forget(folder: Path) -> None:
    """Remove what an earlier job in this folder left that would stop or shorten a new one."""
    for name in (STOP, RESTARTS):
        (folder / name).unlink(missing_ok=True)


def bundle(settings: LauncherSettings, processes: int) -> dict[str, float]:
    """What a node of the placement group must have, by Ray's names."""
    wanted: dict[str, float] = {"CPU": settings.ray.cpus or processes, **settings.ray.resources}
    if settings.ray.accelerator:
        wanted[settings.ray.accelerator_resource] = processes
    return wanted


def _to_the_end(job: _Job) -> int:
    """Try until the command ends by itself. Raises JobEndedError where nodes were lost once too often."""
    while True:
        try:
            return _try(job)
        except _LostError as lost:
            if job.wish():
                raise _StoppedError from None
            restarts = _restarts(job.folder)
            if restarts >= job.settings.resumes:
                raise JobEndedError(f"{lost}, and it was started again {restarts} times already", hint=GOES_ON) from None
            artifacts.write_atomically(job.folder / RESTARTS, json.dumps(restarts + 1))
            job.note(f"{lost}: it is started again from its last checkpoint, {restarts + 1} of at most {job.settings.resumes} times")


def _restarts(folder: Path) -> int:
    """How often the job was started again, by an entry point before this one too."""
    try:
        return int(json.loads((folder / RESTARTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0


def _try(job: _Job) -> int:
    """Run the command on every node. Returns the exit code; raises _LostError where another try may succeed."""
    from ray.exceptions import RayActorError, RayError

    forget_outcomes(job.folder)
    with _nodes(job) as nodes:
        told = _told(job)
        try:
            _start(job, nodes)
            codes = _followed(job, nodes)
        except RayActorError as error:
            if _errors(job.folder):
                return EXIT_FAILED
            raise _LostError(f"a node of the training was lost ({_first_line(error)})") from None
        except RayError as error:
            raise EngineMissingError(
                f"a node of the Ray cluster cannot run the training: {_last_line(error)}",
                hint="Every node needs the same Ray, with tuneline in the very environment that Ray runs in, and the same folders.",
            ) from None
    return judged(codes, _errors(job.folder), wished=bool(job.wish()), began=_told(job) > told)


def judged(codes: list[int | None], errors: list[dict[str, Any]], *, wished: bool, began: bool) -> int:
    """The job's exit code from those of the nodes (None: it had to be ended) and the errors that their processes wrote down.

    `wished`: its end was asked for. `began`: it got as far as to tell something. Raises _LostError where it ended by no fault of its own:
    a process that begins its work and vanishes was killed; one that never began would never begin.
    """
    if not any(code != 0 for code in codes):
        return 0
    if any(left["exit_code"] != EXIT_INTERRUPTED for left in errors):
        return EXIT_FAILED
    if wished:
        return EXIT_INTERRUPTED if errors else EXIT_FAILED
    if errors:
        raise _LostError("the training was asked to stop by its node")
    if began:
        raise _LostError("a process of the training was lost")
    return EXIT_FAILED


@contextmanager
def _nodes(job: _Job) -> Iterator[list[Any]]:
    """An actor on each of as many machines; they and all they started end with this."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = bundle(job.settings, job.command.processes)
    group, nodes = placement_group([wanted] * job.command.nodes, strategy="STRICT_SPREAD"), list[Any]()
    try:
        _wait(job, lambda: group.wait(LOOKS_EVERY), wanted)
        for number in range(job.command.nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            nodes.append(ray.remote(Node).options(scheduling_strategy=place, **_options(job)).remote())
        yield nodes
    finally:
        for node in nodes:
            ray.kill(node)
        remove_placement_group(group)


def _options(job: _Job) -> dict[str, Any]:
    """What an actor takes of its bundle: Ray shows it the accelerators that it takes, and no others."""
    wanted = bundle(job.settings, job.command.processes)
    return {"num_cpus": wanted.pop("CPU"), "num_gpus": wanted.pop("GPU", 0), "memory": wanted.pop("memory", None), "resources": wanted}


def _wait(job: _Job, there: Callable[[], bool], wanted: dict[str, float]) -> None:
    """Until the nodes are there. Raises EngineMissingError where that takes too long."""
    began, told, limit = time.monotonic(), False, job.settings.ray.wait_seconds
    while not there():
        waited = time.monotonic() - began
        if job.wish():
            raise _StoppedError
        if limit and waited > limit:
            raise EngineMissingError(
                f"the Ray cluster did not have {_need(job, wanted)} within {limit:.0f} s; {_living(wanted)}",
                hint=f"Add nodes, or ask for less under `launcher` (nodes, ray). {GOES_ON}",
            )
        if not told and waited > QUIETLY:
            told = True
            job.note(f"it waits for {_need(job, wanted)}; {_living(wanted)}")


def _need(job: _Job, wanted: dict[str, float]) -> str:
    each = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    return f"{job.command.nodes} free node{'s' if job.command.nodes > 1 else ''} with {each} each"


def _living(wanted: dict[str, float]) -> str:
    import ray

    living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [had for had in living if all(had.get(name, 0) >= amount for name, amount in wanted.items())]
    return f"{len(fitting)} of its {len(living)} nodes have as much in all"


def _start(job: _Job, nodes: list[Any]) -> None:
    address, port = _got(job, [nodes[0].meeting.remote()])[0]
    common = {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port), **threads(job.settings)}
    _got(job, [node.start.remote(str(job.folder), {**common, "PET_NODE_RANK": str(n)}) for n, node in enumerate(nodes)])


def threads(settings: LauncherSettings) -> dict[str, str]:
    """The variables that say with how many threads a node computes, or each of its processes."""
    if settings.threads:
        return {"TUNELINE_JOB_THREADS": str(settings.threads)}
    return {"TUNELINE_THREADS": str(settings.ray.cpus)} if settings.ray.cpus else {}


def _got(job: _Job, asked: list[Any]) -> list[Any]:
    """What the actors answer. A machine that is gone is known as such only after a while."""
    import ray

    while len(ray.wait(asked, num_returns=len(asked), timeout=LOOKS_EVERY)[0]) < len(asked):
        if job.wish():
            raise _StoppedError
    answers: list[Any] = ray.get(asked)
    return answers


def _followed(job: _Job, nodes: list[Any]) -> list[int | None]:
    """The nodes' exit codes once all have ended; where one fails, the others have a moment to end too. A stop is passed on once."""
    codes: list[int | None] = [None] * len(nodes)
    asked, passed_on, failed = [node.look.remote() for node in nodes], False, 0.0
    while None in codes and not (failed and time.monotonic() - failed > PATIENCE):
        how = job.wish()
        if how == "now":
            break
        if how and not passed_on:
            passed_on = bool([node.stop.remote() for node in nodes])
        codes, asked = _looked(nodes, asked, codes)
        if not failed and any(code not in (None, 0, EXIT_INTERRUPTED) for code in codes):
            failed = time.monotonic()
    return codes


def _looked(nodes: list[Any], asked: list[Any], before: list[int | None]) -> tuple[list[int | None], list[Any]]:
    """The exit codes, and the next questions; what they were before where a node takes its time to answer."""
    import ray

    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOKS_EVERY)
    for one in answered:
        ray.get(one)  # raises where the node is gone, whatever the others do
    if len(answered) < len(asked):
        return before, asked
    time.sleep(LOOKS_EVERY)
    return ray.get(asked), [node.look.remote() for node in nodes]


def _errors(folder: Path) -> list[dict[str, Any]]:
    """What the processes wrote down, but for what says only that another one is gone."""
    found = []
    for path in folder.glob("outcome*.json"):
        with suppress(OSError, ValueError):
            left = json.loads(path.read_text(encoding="utf-8"))
            if "error" in left and left["error"]["kind"] != LostJobError.kind:
                found.append(left)
    return found


def _told(job: _Job) -> int:
    """Bytes of the events so far."""
    path = job.folder / EVENTS
    return path.stat().st_size if path.exists() else 0


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:")[:300]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
