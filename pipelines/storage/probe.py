"""The probe from its beginning to its end, as either side."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.common import jobs, liveness, process
from components.common.errors import TunelineError, UsageError
from components.common.progress import Reporter
from pipelines.findings import Finding, all_well
from pipelines.storage import fio, judging, meeting, mounts, promises, rates
from pipelines.storage.filesystem import Filesystem, keep
from pipelines.storage.meeting import PartnerError, Talk
from pipelines.storage.mounts import Mount
from pipelines.storage.side import MIB, GivenUpError, Plan, Side

STEPS: dict[str, Callable[[Side], dict[str, Any]]] = {
    "place": promises.place,
    "clock": promises.clock,
    "names": promises.names,
    "visibility": promises.visibility,
    "rename": promises.rename,
    "fsync": promises.fsync,
    "exclusive": promises.exclusive,
    "locks": promises.locks,
    "deleted": promises.deleted,
    "checkpoints": rates.checkpoints,
    "training": rates.training,
    "preparation": rates.preparation,
    "files": rates.files,
    "fio": fio.measure,
}
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one kernel, and so one memory of the storage, also in two containers
NEEDS = {"training": "checkpoints", "preparation": "checkpoints"}  # what another step wrote
FAREWELL = 30.0  # seconds that the side which leads waits before it removes the folder


@dataclass(frozen=True)
class Asked:
    """What is probed, and with whom."""

    path: Path
    pair: str
    rank: int
    plan: Plan
    wait: float  # seconds for the partner to come
    mountinfo: Path = mounts.MOUNTINFO


def on_this_host(asked: Asked, reporter: Reporter, fs: Filesystem, partner: list[str]) -> dict[str, Any]:
    """Lead, with a second process that this one starts by the command `partner`; it never outlives this one."""
    child = subprocess.Popen(
        partner,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # where --json has its error
        stderr=subprocess.PIPE,
        text=True,
        env=process.python_environment(),
        preexec_fn=process.die_with_parent,
    )

    def still_there() -> None:
        if child.poll() is not None:
            said, hint = _last_words(*child.communicate())
            raise PartnerError(f"the second process ended: {said or f'exit code {child.returncode}'}", hint=hint)

    try:
        return lead(asked, reporter, fs, still_there)
    finally:
        child.kill()
        child.communicate()


def _last_words(out: str, err: str) -> tuple[str, str]:
    """What a process said that ended too soon, and what to do: its error, or what it found wrong, or whatever it printed."""
    again = "Run the same command again; if it stays so, report what it printed."
    try:
        said = json.loads(out)
    except ValueError:
        return (err.strip() or out.strip())[-500:], again
    if "error" in said:
        return said["error"]["message"], said["error"]["hint"] or again
    wrong = [one for one in said.get("findings", []) if not one["ok"]]
    return "; ".join(f"{one['name']}: {one['found']}" for one in wrong), " ".join(one["hint"] for one in wrong) or again


def lead(asked: Asked, reporter: Reporter, fs: Filesystem, still_there: Callable[[], None] = meeting.nothing) -> dict[str, Any]:
    """Make the probe's folder, wait for the partner, go through all steps, and take the folder away. See `result` for what comes back."""
    try:
        _check(asked, fs)
        with jobs.private_folder(asked.path, meeting.PREFIX) as folder:
            meeting.prepare(fs, folder, asked.pair)
            reporter.step("waiting for the partner")
            plan = _affordable(asked.plan, fs.space(folder))
            meeting.welcome(fs, folder, plan.as_dict(), asked.wait, still_there)
            side = Side(fs, folder, Talk(fs, folder / meeting.TALK, 0, still_there, plan.patience), plan, reporter)
            return _probed(asked, side)
    except OSError as error:
        return _refused(asked, fs, error)


def join(asked: Asked, reporter: Reporter, fs: Filesystem) -> dict[str, Any]:
    """Find the side that leads, and go through all steps with it, as it planned them."""
    reporter.step("looking for the partner")
    try:
        _check(asked, fs)
        folder, planned = meeting.join(fs, asked.path, asked.pair, asked.wait)
        plan = Plan(**planned)
        return _probed(asked, Side(fs, folder, Talk(fs, folder / meeting.TALK, 1, patience=plan.patience), plan, reporter))
    except OSError as error:
        return _refused(asked, fs, error)


def _check(asked: Asked, fs: Filesystem) -> None:
    """Raises UsageError for what is no folder, and OSError where the storage does not even say."""
    try:
        is_folder = stat.S_ISDIR(fs.stat(asked.path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = False
    if not is_folder:
        raise UsageError(
            f"{asked.path} is no folder that could be probed",
            hint="Name a folder on the storage; the probe works in one of its own below it.",
        )


def _affordable(plan: Plan, space: os.statvfs_result) -> Plan:
    """Both sides' large files, and fio's, leave half of the free space to others."""
    return replace(plan, size=max(MIB, min(plan.size, space.f_bavail * space.f_frsize // 8)))


def _refused(asked: Asked, fs: Filesystem, error: OSError) -> dict[str, Any]:
    """The storage takes nothing at all, or not any more."""
    mount = mounts.of(asked.path, _read(asked.mountinfo))
    measured = {"place": [{"error": _told(error, fs, asked.path)}, {}]}
    return result(
        asked.path, [_self(asked, mount)], measured, judging.judge(measured, (_host(), _host()), (mount, mount), one_host=True)[1:]
    )


def _probed(asked: Asked, side: Side) -> dict[str, Any]:
    alive = side.folder / meeting.TALK / f"{meeting.ALIVE}.{side.rank}"
    keep(side.fs, alive, b"")
    mount = mounts.of(asked.path, _read(asked.mountinfo))
    mine = _self(asked, mount)
    with liveness.beating(alive):
        side.step = "meeting"
        theirs = side.meet("host", mine)
        measured = _steps(side)
        _farewell(side)
    hosts = [mine, theirs] if side.rank == 0 else [theirs, mine]
    who, one_host = (hosts[0]["host"], hosts[1]["host"]), hosts[0]["boot"] == hosts[1]["boot"]
    kinds = (Mount(**hosts[0]["mount"]), Mount(**hosts[1]["mount"]))
    found = judging.judge(measured, who, kinds, one_host=one_host)
    return result(asked.path, hosts, measured, found)


def result(path: Path, hosts: list[dict[str, Any]], measured: dict[str, list[dict[str, Any]]], found: list[Finding]) -> dict[str, Any]:
    """{"ok", "path", "hosts", "findings", "measured": {step: [of rank 0, of rank 1]}}."""
    return {"ok": all_well(found), "path": str(path), "hosts": hosts, "findings": found, "measured": measured}


def _steps(side: Side) -> dict[str, list[dict[str, Any]]]:
    """What both sides measured in each step; the steps end where the storage does not even carry their talk any more."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for n, (name, step) in enumerate(STEPS.items()):
        side.step = name
        side.reporter.step(name)
        side.reporter.progress(n, len(STEPS), "steps")
        measured[name] = [{}, {}]
        if any("error" in before for before in measured.get(NEEDS.get(name, ""), [])):
            continue
        measured[name][side.rank] = mine = _tried(side, step)
        try:
            measured[name][1 - side.rank] = side.end(mine)
        except OSError as error:
            _must_be_there(side)
            measured[name][side.rank] = mine if "error" in mine else {"error": _told(error, side.fs, side.folder)}
            break
    return measured


def _must_be_there(side: Side) -> None:
    """The side that leads takes the folder away when it ends, whatever ended it."""
    if not side.folder.exists():
        raise PartnerError("the partner has ended, and took the probe's folder away", hint="Look at what the other side printed.")


def _tried(side: Side, step: Callable[[Side], dict[str, Any]]) -> dict[str, Any]:
    """What a step gives, or what the system refused it."""
    try:
        side.fs.mkdir(side.room())
        return step(side)
    except OSError as error:
        return {"error": _told(error, side.fs, side.folder)}
    except GivenUpError:
        return {"error": {"given_up": True}}


def _told(error: OSError, fs: Filesystem, folder: Path) -> dict[str, Any]:
    """{"errno", "text", "no_inodes"}: the last for ENOSPC, which does not say what of the two there is none of."""
    number = error.errno or errno.EIO
    told = {"errno": number, "text": f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"}
    return {**told, "no_inodes": number == errno.ENOSPC and _without_inodes(fs, folder)}


def _without_inodes(fs: Filesystem, folder: Path) -> bool:
    """Whether no inode is left, as far as the storage has such a number."""
    try:
        space = fs.space(folder)
    except OSError:
        return False
    return space.f_files > 0 and space.f_favail == 0


def _farewell(side: Side) -> None:
    """The side that leads removes the folder: not before the other has read all that was said there."""
    side.step = "farewell"
    with suppress(OSError, TunelineError):
        if side.rank == 1:
            side.talk.post("farewell", None)
        else:
            side.talk.wait(("farewell",), FAREWELL)


def _self(asked: Asked, mount: Mount) -> dict[str, Any]:
    """This side, for the other and for the result."""
    return {"rank": asked.rank, "host": _host(), "boot": _read(BOOT).strip(), "mount": mount.as_dict()}


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
