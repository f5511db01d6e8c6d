"""Assessment of recorded measurements, such as those of two hosts on NFS."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from components.common.reporting.check_findings import all_passed
from components.common.runtime.mounts import Mount
from pipelines.operations.storage_probe import assessment, fio_benchmark
from pipelines.operations.storage_probe.participant import ProbePlan
from pipelines.operations.storage_probe.remedies import ERRNO_CHECKS, REMEDIES

GOOD_OPTIONS = {"vers": "3", "hard": "", "proto": "tcp", "nconnect": "8", "rsize": "1048576", "wsize": "1048576"}
NFS = Mount("/mnt/tuneline", "nfs", "powerscale.example:/ifs/data", GOOD_OPTIONS)
VISIBLE = {"patience": 90.0, "by_name": 0.01, "in_listing": 0.01, "time_of_change": 0.01, "added_bytes": 0.01}
FLUSHED = {
    "own_reopened": True,
    "others_open": True,
    "others_closed": True,
    "write_seconds": 1e-5,
    "fsync_seconds": 2e-3,
}


def failed_checks(
    step: str, first: dict[str, Any], second: dict[str, Any], mount: Mount = NFS
) -> dict[str, dict[str, Any]]:
    checks = assessment.assess({step: [first, second]}, ("n1", "n2"), (mount, mount), one_host=False)
    return {check["name"]: check for check in checks if not check["ok"]}


@pytest.mark.parametrize(
    ("kind", "seconds", "name", "needed"),
    [
        ("by_name", 29.0, "new files", False),
        ("in_listing", 61.0, "new files", True),
        ("added_bytes", None, "new files", True),
        ("time_of_change", 10.0, "heartbeats", False),
        ("time_of_change", 31.0, "heartbeats", True),
        ("time_of_change", None, "heartbeats", True),
    ],
)
def test_late_visibility_is_assessed_by_its_delay(kind: str, seconds: float | None, name: str, needed: bool) -> None:
    checks = failed_checks("visibility", VISIBLE, {**VISIBLE, kind: seconds})
    assert {check["name"]: check["needed"] for check in checks.values()} == {name: needed}
    assert "mounted with the defaults" in checks[name]["found"]
    assert "actimeo=0" in checks[name]["hint"]


def test_change_unseen_by_a_quick_probe_is_reported_with_its_timeout() -> None:
    checks = failed_checks("visibility", {**VISIBLE, "patience": 15.0, "by_name": None}, {**VISIBLE, "patience": 15.0})
    assert checks["new files"]["needed"] is False
    assert "not visible within 15 s" in checks["new files"]["found"]


def test_cache_options_of_the_mount_are_reported_with_a_delay() -> None:
    mount = Mount(
        NFS.point, "nfs4", NFS.source, {**GOOD_OPTIONS, "vers": "4.1", "acdirmin": "45", "lookupcache": "pos"}
    )
    assert (
        "mounted with acdirmin=45, lookupcache=pos"
        in failed_checks("visibility", {**VISIBLE, "by_name": 45.0}, VISIBLE, mount)["new files"]["found"]
    )


def test_fsync_faster_than_the_network_is_reported() -> None:
    assert list(failed_checks("fsync", FLUSHED, {**FLUSHED, "fsync_seconds": 1e-6})) == ["fsync time"]
    assert failed_checks("fsync", FLUSHED, {**FLUSHED, "fsync_seconds": 1e-6}, Mount("/", "tmpfs", "tmpfs")) == {}
    assert failed_checks("fsync", FLUSHED, FLUSHED) == {}


@pytest.mark.parametrize("key", assessment.FSYNC_LABELS)
def test_each_loss_of_flushed_data_is_reported(key: str) -> None:
    assert assessment.FSYNC_LABELS[key] in failed_checks("fsync", FLUSHED, {**FLUSHED, key: False})["fsync"]["found"]


def test_names_won_by_both_or_neither_are_reported() -> None:
    first, second = {"link": [0, 1]}, {"link": [1, 2]}
    checks = failed_checks("exclusive", {"rounds": 5, "won": first}, {"rounds": 5, "won": second})
    assert checks["exclusive names"]["found"] == "link: of 5 names, 1 went to both participants and 2 to neither"


def test_cause_is_reported_once_for_all_steps() -> None:
    error = {"error": {"errno": 30, "text": "Read-only file system (EROFS)"}}
    given_up = {"error": {"given_up": True}}
    checks = assessment.assess(
        {"rename": [error, given_up], "fsync": [given_up, error]}, ("n1", "n2"), (NFS, NFS), one_host=False
    )
    assert [(check["name"], check["found"]) for check in checks if not check["ok"]] == [
        ("read-only", "n1: Read-only file system (EROFS) in the step rename")
    ]


FOLDER = {"free": 3 << 30, "size": 100 << 30, "inodes": 1000, "free_inodes": 10, "user": 1, "owner": 1, "mode": 0o600}
READS = {"reads": 10, "versions": 5, "missing": 0, "torn": 0, "stale": 1, "older": 0}
FULL = {"errno": errno.ENOSPC, "text": "No space left on device (ENOSPC)"}
STALE = {"errno": errno.ESTALE, "text": "Stale file handle (ESTALE)"}


@pytest.mark.parametrize(
    ("before", "error", "name", "advice"),
    [
        ({"place": [FOLDER, FOLDER]}, {**FULL, "no_inodes": False}, "space", "3.0 GiB of 100.0 GiB free"),
        ({"place": [FOLDER, FOLDER]}, {**FULL, "no_inodes": True}, "inodes", "10 free"),
        (
            {"place": [{**FOLDER, "free": 50 << 30}] * 2},
            {**FULL, "no_inodes": False},
            "space",
            "50.0 GiB of 100.0 GiB free",
        ),
        ({"rename": [READS, READS]}, STALE, "stale handles", "2 reads of a replaced file failed with ESTALE"),
    ],
)
def test_failed_step_replaces_an_advice_or_a_passed_check(
    before: dict[str, list[dict[str, Any]]], error: dict[str, Any], name: str, advice: str
) -> None:
    failed = {"checkpoints": [{"error": error}, {"error": {"given_up": True}}]}
    checks = assessment.assess({**before, **failed}, ("n1", "n2"), (NFS, NFS), one_host=False)
    (check,) = (check for check in checks if check["name"] == name)
    assert (check["ok"], check["needed"], check["hint"]) == (False, True, REMEDIES[name])
    assert check["found"] == f"n1: {error['text']} in the step checkpoints; {advice}"
    assert not all_passed(checks)


def test_advice_does_not_replace_a_failed_step() -> None:
    failed = {"names": [{"error": STALE}, {"error": {"given_up": True}}]}
    checks = assessment.assess({**failed, "rename": [READS, READS]}, ("n1", "n2"), (NFS, NFS), one_host=False)
    assert [(check["name"], check["needed"]) for check in checks if not check["ok"]] == [("stale handles", True)]


def test_every_error_number_has_a_remedy() -> None:
    assert set(ERRNO_CHECKS.values()) <= set(REMEDIES)


class SoleParticipant:
    """A participant whose partner is always ready."""

    def __init__(self, folder: Path) -> None:
        self.plan, self._folder = ProbePlan(size=1 << 20, seconds=1), folder

    def exchange(self, key: str) -> None:
        pass

    def folder_for(self) -> Path:
        return self._folder


def run_fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, Any]:
    """Run a script in place of fio and return the measurements."""
    program, folder = tmp_path / "bin" / "fio", tmp_path / "room"
    program.parent.mkdir()
    folder.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    measured = fio_benchmark.run_fio(SoleParticipant(folder))  # type: ignore[arg-type]
    assert list(folder.iterdir()) == []
    return measured


def test_recorded_fio_output_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Path(__file__).with_name("fio-3.33.json")
    measured = run_fake_fio(
        tmp_path, monkeypatch, f'touch "${{2#--directory=}}/${{1#--name=}}.0.0"; echo "fio: a note"; cat "{recorded}"'
    )
    assert set(measured["shapes"]) == {"preparation", "training", "checkpoints"}
    checks = assessment.assess({"fio": [measured, {"shapes": {}}]}, ("n1", "n2"), (NFS, NFS), one_host=False)
    results = {check["name"]: check["found"] for check in checks}
    assert (
        results["fio preparation, n1"]
        == "fio-3.33: read 340 MiB/s, 5,438 operations per second; write 335 MiB/s, 5,353 operations per second"
    )


def test_fio_failure_is_reported_as_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run_fake_fio(tmp_path, monkeypatch, "echo 'fio: engine psync not loadable' >&2; exit 1")
    checks = failed_checks("fio", measured, {"shapes": {}})
    assert "engine psync not loadable" in checks["fio training, n1"]["found"]
    assert not any(check["needed"] for check in checks.values())


IDLE = {"io_bytes": 0, "bw_bytes": 0, "iops": 0.0}
BUSY = {"io_bytes": 4096, "bw_bytes": 4096, "iops": 1.0}


@pytest.mark.parametrize(
    ("job", "code", "reason"),
    [
        ({"error": errno.ENOSPC, "read": IDLE, "write": IDLE}, 1, "No space left on device"),
        ({"error": errno.EIO, "read": IDLE, "write": BUSY}, 0, "Input/output error"),
        ({"error": 0, "read": IDLE, "write": BUSY}, 3, "exit code 3"),
        ({"error": 0, "read": IDLE, "write": IDLE}, 0, "fio read and wrote no data"),
    ],
)
def test_failed_or_idle_fio_job_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], code: int, reason: str
) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"fio version": "fio-3.33", "jobs": [job]}))
    checks = failed_checks("fio", run_fake_fio(tmp_path, monkeypatch, f'cat "{figures}"; exit {code}'), {"shapes": {}})
    assert {check["found"] for check in checks.values()} == {f"fio failed: {reason}"}
    assert not any(check["needed"] for check in checks.values())
