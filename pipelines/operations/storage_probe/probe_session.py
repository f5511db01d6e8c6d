"""Session of a probe: starts or finds the partner, runs all steps with it, and assesses the measurements."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from components.common.reporting.check_findings import all_passed
from components.common.runtime import mounts, process_control
from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.mounts import MOUNTINFO, Mount
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders, liveness
from pipelines.operations.storage_probe import (
    assessment,
    consistency_checks,
    fio_benchmark,
    rendezvous,
    throughput,
)
from pipelines.operations.storage_probe.participant import MIB_BYTES, Figures, Participant, ProbePlan, StepAbortedError
from pipelines.operations.storage_probe.probed_filesystem import Filesystem, write_durably
from pipelines.operations.storage_probe.rendezvous import MessageChannel, PartnerError

STEPS: dict[str, Callable[[Participant], Figures]] = {
    "place": consistency_checks.check_filesystem,
    "clock": consistency_checks.check_clock,
    "names": consistency_checks.check_names,
    "visibility": consistency_checks.check_visibility,
    "rename": consistency_checks.check_rename,
    "fsync": consistency_checks.check_fsync,
    "exclusive": consistency_checks.check_exclusive_creation,
    "locks": consistency_checks.check_locks,
    "deleted": consistency_checks.check_read_after_delete,
    "checkpoints": throughput.measure_checkpoint_writes,
    "training": throughput.measure_training_reads,
    "preparation": throughput.measure_random_access,
    "files": throughput.measure_small_files,
    "fio": fio_benchmark.run_fio,
}
# Equal in two containers on one kernel, which share the kernel's cache of the storage.
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
STEP_DEPENDENCIES = {"training": "checkpoints", "preparation": "checkpoints"}  # steps that read another step's files
LEADER_EXIT_TIMEOUT_SECONDS = 30.0  # maximum wait for the partner before the leader removes the folder


@dataclass(frozen=True)
class ProbeRequest:
    """The path to probe, and the role of this process."""

    path: Path
    pair: str  # name that both participants share
    rank: int  # 0 leads, 1 joins
    plan: ProbePlan
    wait: float  # timeout in seconds for the partner to join


def probe_locally(request: ProbeRequest, reporter: Reporter, fs: Filesystem, partner: list[str]) -> dict[str, Any]:
    """Lead a probe with a child process as the partner, which runs the command `partner` and ends with this process.

    Returns:
        The report {"ok", "path", "hosts", "findings", "measured": {step: [rank 0, rank 1]}}.

    Raises:
        UsageError: the path is not an existing folder.
        PartnerError: the partner did not join, exited, or stopped responding.
    """
    child = subprocess.Popen(
        partner,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # with --json, errors are on standard output
        stderr=subprocess.PIPE,
        text=True,
        env=process_control.build_python_environment(),
        preexec_fn=process_control.die_with_parent,
    )

    def check_partner() -> None:
        if child.poll() is None:
            return
        out, err = child.communicate()
        message, hint = (err.strip() or out.strip())[-500:], ""
        with suppress(ValueError):  # standard output is an error or a report
            output = json.loads(out)
            failed = [result for result in output.get("findings", []) if not result["ok"]]
            message = "; ".join(f"{result['name']}: {result['found']}" for result in failed)
            hint = " ".join(result["hint"] for result in failed)
            if "error" in output:
                message, hint = output["error"]["message"], output["error"]["hint"]
        raise PartnerError(
            f"the partner exited: {message or f'exit code {child.returncode}'}",
            hint=hint or "Run the same command again, and report the output if the failure persists.",
        )

    try:
        return lead(request, reporter, fs, check_partner)
    finally:
        child.kill()
        child.communicate()


def lead(
    request: ProbeRequest,
    reporter: Reporter,
    fs: Filesystem,
    check_partner: Callable[[], None] = rendezvous.assume_alive,
) -> dict[str, Any]:
    """Create the probe's folder, wait for the partner, run all steps, remove the folder, and return the report.

    Returns:
        The report {"ok", "path", "hosts", "findings", "measured": {step: [rank 0, rank 1]}}.

    Raises:
        UsageError: the path is not an existing folder.
        PartnerError: the partner did not join, exited, or stopped responding.
    """
    try:
        _require_folder(request, fs)
        with job_folders.private_folder(request.path, rendezvous.PROBE_PREFIX) as folder:
            rendezvous.create_pair_files(fs, folder, request.pair)
            reporter.step("waiting for the partner")
            plan = _limit_size(request.plan, fs.space(folder))
            rendezvous.await_partner(fs, folder, asdict(plan), request.wait, check_partner)
            messages = folder / rendezvous.MESSAGES_FOLDER
            channel = MessageChannel(fs, messages, 0, check_partner, plan.visibility_timeout)
            return _run_probe(request, Participant(fs, folder, channel, plan, reporter))
    except OSError as error:
        return _report_storage_error(request, fs, error)


def join(request: ProbeRequest, reporter: Reporter, fs: Filesystem) -> dict[str, Any]:
    """Find the leader, run all steps of its plan, and return the report.

    Returns:
        The report {"ok", "path", "hosts", "findings", "measured": {step: [rank 0, rank 1]}}.

    Raises:
        UsageError: the path is not an existing folder.
        PartnerError: the partner did not join, exited, or stopped responding.
    """
    reporter.step("waiting for the leader")
    try:
        _require_folder(request, fs)
        folder, fields = rendezvous.find_partner(fs, request.path, request.pair, request.wait)
        plan, messages = ProbePlan(**fields), folder / rendezvous.MESSAGES_FOLDER
        channel = MessageChannel(fs, messages, 1, visibility_timeout=plan.visibility_timeout)
        return _run_probe(request, Participant(fs, folder, channel, plan, reporter))
    except OSError as error:
        return _report_storage_error(request, fs, error)


def _require_folder(request: ProbeRequest, fs: Filesystem) -> None:
    """Raise UsageError if the path is not a folder; OSError if the storage is unavailable."""
    try:
        is_folder = stat.S_ISDIR(fs.stat(request.path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = False
    if not is_folder:
        raise UsageError(
            f"{request.path} is not an existing folder",
            hint="Specify a folder on the storage; the probe works in a subfolder of it.",
        )


def _limit_size(plan: ProbePlan, space: os.statvfs_result) -> ProbePlan:
    """Limit the large files of both participants and of fio to half of the free space."""
    return replace(plan, size=max(MIB_BYTES, min(plan.size, space.f_bavail * space.f_frsize // 8)))


def _report_storage_error(request: ProbeRequest, fs: Filesystem, error: OSError) -> dict[str, Any]:
    """Return the report of a probe that ended with a storage error."""
    measured: dict[str, list[Figures]] = {"place": [{"error": _describe_error(error, fs, request.path)}, {}]}
    return _build_report(request.path, [_describe_host(request)], measured)


def _run_probe(request: ProbeRequest, side: Participant) -> dict[str, Any]:
    """Run all steps with the partner and return the report."""
    heartbeat_file = side.folder / rendezvous.MESSAGES_FOLDER / f"{rendezvous.HEARTBEAT_PREFIX}.{side.rank}"
    write_durably(side.fs, heartbeat_file, b"")
    own = _describe_host(request)
    measured: dict[str, list[Figures]] = {}
    with liveness.heartbeat(heartbeat_file):
        side.step = "meeting"
        partner = side.exchange("host", own)
        for number, (name, step) in enumerate(STEPS.items()):
            side.step = name
            side.reporter.step(name)
            side.reporter.progress(number, len(STEPS), "steps")
            measured[name] = [{}, {}]
            if any("error" in figures for figures in measured.get(STEP_DEPENDENCIES.get(name, ""), [])):
                continue
            try:
                side.fs.mkdir(side.folder_for())
                figures = step(side)
            except OSError as error:
                figures = {"error": _describe_error(error, side.fs, side.folder)}
            except StepAbortedError:
                figures = {"error": {"given_up": True}}
            measured[name][side.rank] = figures
            try:
                measured[name][1 - side.rank] = side.exchange_results(figures)
            except OSError as error:  # messages can no longer be exchanged through the storage
                # The leader removes the folder when it exits, and the messages may be gone before the rest of it.
                if not (side.folder / rendezvous.MESSAGES_FOLDER).exists():
                    raise PartnerError(
                        "the partner exited and removed the probe's folder",
                        hint="See the partner's output for the cause.",
                    ) from error
                if "error" not in figures:
                    measured[name][side.rank] = {"error": _describe_error(error, side.fs, side.folder)}
                break
        # The leader removes the folder only after the partner has read all messages in it.
        side.step = "finished"
        with suppress(OSError, TunelineError):
            if side.rank == 1:
                side.channel.post("finished", None)
            else:
                side.channel.wait(("finished",), LEADER_EXIT_TIMEOUT_SECONDS)
    return _build_report(request.path, [own, partner] if side.rank == 0 else [partner, own], measured)


def _build_report(path: Path, hosts: list[dict[str, Any]], measured: dict[str, list[Figures]]) -> dict[str, Any]:
    """Return {"ok", "path", "hosts", "findings", "measured": {step: [rank 0, rank 1]}}; `hosts` is by rank."""
    first, second = hosts[0], hosts[-1]
    results = assessment.assess(
        measured,
        (first["host"], second["host"]),
        (Mount(**first["mount"]), Mount(**second["mount"])),
        one_host=first["boot"] == second["boot"],
    )
    findings = results if len(hosts) == 2 else results[1:]  # the first finding describes both hosts
    return {"ok": all_passed(findings), "path": str(path), "hosts": hosts, "findings": findings, "measured": measured}


def _describe_error(error: OSError, fs: Filesystem, folder: Path) -> Figures:
    """Return {"errno", "text", "no_inodes"}; the last distinguishes the two causes of ENOSPC."""
    number, no_inodes = error.errno or errno.EIO, False
    if number == errno.ENOSPC:
        with suppress(OSError):
            space = fs.space(folder)
            no_inodes = space.f_files > 0 and space.f_favail == 0
    text = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    return {"errno": number, "text": text, "no_inodes": no_inodes}


def _describe_host(request: ProbeRequest) -> dict[str, Any]:
    """Describe this participant, for the partner and the report."""
    mountinfo, boot = (path.read_text(encoding="utf-8", errors="replace") for path in (MOUNTINFO, BOOT_ID_PATH))
    return {
        "rank": request.rank,
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "boot": boot.strip(),
        "mount": asdict(mounts.find_mount(request.path, mountinfo)),
    }
