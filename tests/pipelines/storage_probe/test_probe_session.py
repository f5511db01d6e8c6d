"""The probe of shared storage: correct storage passes, and each fault is reported alone with its remedy.

long: the faults are probed in real time by two processes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.reporters import SilentReporter
from pipelines.operations.storage_probe import probe_session, rendezvous
from pipelines.operations.storage_probe.participant import QUICK_PLAN
from pipelines.operations.storage_probe.probed_filesystem import Filesystem
from pipelines.operations.storage_probe.remedies import REMEDIES
from pipelines.operations.storage_probe.rendezvous import PROBE_PREFIX, PartnerError
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, tuneline
from tests.pipelines.storage_probe.faulty_filesystem import KINDS, build_request, make_os_error

Findings = dict[str, dict[str, Any]]
Side = Callable[[probe_session.ProbeRequest, SilentReporter, Filesystem], dict[str, Any]]
PAIR = "together"


@pytest.fixture(autouse=True)
def partner_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def probe_faulty_storage(path: Path, kind: str) -> dict[str, Any]:
    """Probe storage of this kind by this process and a second one."""
    second = [sys.executable, "-P", "-m", "tests.pipelines.storage_probe.faulty_filesystem", kind, str(path), PAIR]
    return probe_session.probe_locally(build_request(path, PAIR, 0), SilentReporter(), KINDS[kind](), second)


def get_failed_checks(result: dict[str, Any]) -> Findings:
    return {check["name"]: check for check in result["findings"] if not check["ok"]}


def test_correct_storage_passes_all_checks(tmp_path: Path) -> None:
    result = answer("storage", "probe", tmp_path, "--quick", "--size", "4MiB", "--no-fio", cwd=tmp_path)
    assert get_failed_checks(result) == {}
    assert result["ok"]
    assert [host["rank"] for host in result["hosts"]] == [0, 1]
    assert set(result["measured"]) == set(probe_session.STEPS)
    rename, checkpoints = result["measured"]["rename"], result["measured"]["checkpoints"]
    assert all(side["reads"] > 10 and side["versions"] > 10 for side in rename)
    for kind in ("O_EXCL", "mkdir", "link"):
        assert sorted(name for side in result["measured"]["exclusive"] for name in side["won"][kind]) == list(range(50))
    assert [side["bytes"] for side in checkpoints] == [4 << 20, 4 << 20]
    assert {side["bytes"] for side in result["measured"]["training"]} == {4 << 20}
    assert list(tmp_path.iterdir()) == [], "the probe removes its folder"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "names", "message", "needed"),
    [
        ("CachedNames", ["new files"], "a new file by its name visible after", False),
        ("CachedAttributes", ["heartbeats"], "a modification time visible after", False),
        ("TornRename", ["rename"], "found a torn file", True),
        ("GapRename", ["rename"], "found no file", True),
        ("LostFsync", ["fsync"], "flushed data cannot be read by the partner while the file is open", True),
        ("ReadOnly", ["read-only"], "Read-only file system (EROFS)", True),
        ("Quota", ["quota"], "Disk quota exceeded (EDQUOT)", True),
        (
            "NoInodes",
            ["inodes"],
            "first process: No space left on device (ENOSPC) in the step checkpoints; 0 free",
            True,
        ),
        (
            "LocalLocks",
            ["locks"],
            "fcntl is granted to both participants at the same time; flock is granted to both participants at the same time",
            False,
        ),
        ("NoLocks", ["locks"], "fcntl is not supported; flock is not supported", False),
        ("WrongServerClock", ["clock"], "the server's clock differs by +89.9", True),
        ("WrongHostClock", ["clock"], "second process: the server's clock differs by -5", False),
        ("SquashedOwner", ["owner"], "belongs to 65534", False),
        ("NonExclusiveCreation", ["exclusive names"], "went to both participants", True),
        ("CaseInsensitive", ["case"], "one file", True),
        ("StaleHandle", ["deleted while read"], "ESTALE", False),
    ],
)
def test_each_fault_is_reported_alone_with_its_remedy(
    tmp_path: Path, kind: str, names: list[str], message: str, needed: bool
) -> None:
    failed = get_failed_checks(probe_faulty_storage(tmp_path, kind))
    assert list(failed) == names, failed
    (check,) = failed.values()
    assert message in check["found"]
    assert check["hint"] == REMEDIES[check["name"]]
    assert check["needed"] is needed


def test_steps_after_a_failed_one_still_run(tmp_path: Path) -> None:
    result = probe_faulty_storage(tmp_path, "Quota")
    assert "error" in result["measured"]["checkpoints"][0]
    assert all(side["files"] for side in result["measured"]["files"])
    assert not result["ok"]
    assert list(tmp_path.iterdir()) == []


def test_error_of_one_side_is_reported_and_does_not_block_the_other(tmp_path: Path) -> None:
    result = probe_faulty_storage(tmp_path, "PartnerQuota")
    (check,) = get_failed_checks(result).values()
    assert (check["name"], check["found"]) == (
        "quota",
        "second process: Disk quota exceeded (EDQUOT) in the step checkpoints",
    )
    assert all(side["files"] for side in result["measured"]["files"])


def test_exited_partner_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(PartnerError, match="the partner exited: killed for memory"):
        probe_faulty_storage(tmp_path, "ExitingPartner")
    assert list(tmp_path.iterdir()) == []


def test_error_of_the_second_process_is_reported_with_its_hint(tmp_path: Path) -> None:
    second = [*COMMAND, "storage", "probe", str(tmp_path / "nowhere"), "--pair", PAIR, "--rank", "1", "--json"]
    with pytest.raises(PartnerError, match=r"the partner exited: \S+nowhere is not an existing folder") as raised:
        probe_session.probe_locally(build_request(tmp_path, PAIR, 0), SilentReporter(), Filesystem(), second)
    assert raised.value.hint.startswith("Specify a folder on the storage")


def test_failed_check_of_the_second_process_is_reported(tmp_path: Path) -> None:
    failed_check = {
        "name": "permissions",
        "ok": False,
        "needed": True,
        "found": "Permission denied (EACCES)",
        "hint": "Let this user write.",
    }
    output = json.dumps(
        {"ok": False, "findings": [{**failed_check, "name": "mount on n1", "ok": True, "hint": ""}, failed_check]}
    )
    second = [sys.executable, "-c", f"print({output!r}); raise SystemExit(1)"]
    with pytest.raises(PartnerError, match=r"the partner exited: permissions: Permission denied \(EACCES\)$") as raised:
        probe_session.probe_locally(build_request(tmp_path, PAIR, 0), SilentReporter(), Filesystem(), second)
    assert raised.value.hint == "Let this user write."


def test_killed_second_process_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    second = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(PartnerError, match="the partner exited: exit code -9"):
        probe_session.probe_locally(build_request(tmp_path, PAIR, 0), SilentReporter(), Filesystem(), second)


def test_missing_partner_is_reported_on_both_sides(tmp_path: Path) -> None:
    error = refusal(1, "storage", "probe", tmp_path, "--pair", PAIR, "--rank", "0", "--wait", "1", cwd=tmp_path)
    assert (error["kind"], "no partner joined" in error["message"]) == ("partner", True)
    error = refusal(1, "storage", "probe", tmp_path, "--pair", PAIR, "--wait", "1", cwd=tmp_path, SLURM_PROCID="1")
    assert (error["kind"], "no leader of this pair is in" in error["message"]) == ("partner", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not an existing folder"),
        ([".", "--pair", "one"], "the rank of this host is not set"),
        ([".", "--pair", "one", "--rank", "2"], "the rank of this host is 2"),
        ([".", "--pair", "../x", "--rank", "0"], "'../x' is not a valid name of a pair"),
        ([".", "--size", "many"], "'many' is not a size"),
    ],
)
def test_invalid_options_are_refused_before_any_write(tmp_path: Path, arguments: list[str], message: str) -> None:
    error = refusal(2, "storage", "probe", *arguments, cwd=tmp_path)
    assert error["kind"] == "usage"
    assert message in error["message"]
    assert error["hint"]
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_reported_as_a_failed_check() -> None:
    process = tuneline("storage", "probe", "/sys", "--json", cwd=Path("/"))
    failed = get_failed_checks(json.loads(process.stdout))
    assert process.returncode == 1
    assert set(failed) < {"permissions", "read-only"}, failed


@pytest.mark.parametrize(("number", "name"), [(errno.EACCES, "permissions"), (errno.ESTALE, "stale handles")])
@pytest.mark.parametrize("side", [probe_session.lead, probe_session.join])
def test_unreadable_folder_is_reported_as_a_failed_check(tmp_path: Path, side: Side, number: int, name: str) -> None:
    class UnreadableFolder(Filesystem):
        def stat(self, path: Path) -> os.stat_result:
            raise make_os_error(number, path)

    failed = get_failed_checks(side(build_request(tmp_path, PAIR, 0, wait=1.0), SilentReporter(), UnreadableFolder()))
    assert list(failed) == [name]
    assert failed[name]["needed"]


def test_partner_without_write_permission_is_reported(tmp_path: Path) -> None:
    class UnwritableMessages(Filesystem):
        def open(self, path: Path, flags: int) -> int:
            if path.name.startswith("hello."):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, flags)

    folder = tmp_path / f"{PROBE_PREFIX}.here.1-1.00000000"
    folder.mkdir()
    rendezvous.create_pair_files(Filesystem(), folder, PAIR)
    failed = get_failed_checks(
        probe_session.join(build_request(tmp_path, PAIR, 1, wait=1.0), SilentReporter(), UnwritableMessages())
    )
    assert list(failed) == ["permissions"]


def test_exit_of_the_leader_is_reported_while_its_folder_is_being_removed(tmp_path: Path) -> None:
    """The folder of the messages is removed before the folders of the steps."""

    class RemovedMessages(Filesystem):
        def mkdir(self, path: Path) -> None:
            super().mkdir(path)
            shutil.rmtree(path.parent / rendezvous.MESSAGES_FOLDER)

    folder = tmp_path / f"{PROBE_PREFIX}.here.1-1.00000000"
    folder.mkdir()
    rendezvous.create_pair_files(Filesystem(), folder, PAIR)
    messages = folder / rendezvous.MESSAGES_FOLDER
    leader = threading.Thread(
        target=rendezvous.await_partner, args=(Filesystem(), folder, asdict(QUICK_PLAN), 10.0), daemon=True
    )
    leader.start()
    rendezvous.MessageChannel(Filesystem(), messages, 0).post("meeting.host", {"host": "n0"})
    with pytest.raises(PartnerError, match="the partner exited and removed the probe's folder"):
        probe_session.join(build_request(tmp_path, PAIR, 1, wait=10.0), SilentReporter(), RemovedMessages())


def start_probe(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "storage", "probe", str(path), "--quick", "--json", *options]
    return subprocess.Popen(
        command, cwd=path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_rename_step(path: Path) -> Path:
    """Return the folder of a running probe."""
    deadline = time.monotonic() + 60
    while not (folders := list(path.glob(f"{PROBE_PREFIX}.*/rename.0"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return folders[0].parent


def test_next_probe_removes_only_leftovers_of_killed_probes(tmp_path: Path) -> None:
    other_paths = [tmp_path / "tuneline-probe.txt", tmp_path / "tuneline-probe.of.my.own", tmp_path / "data"]
    for folder in other_paths[1:]:
        folder.mkdir()
        (folder / "kept").write_text("mine")
    other_paths[0].write_text("mine")
    child = start_probe(tmp_path)
    leftover = wait_for_rename_step(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert leftover.exists()
    with pytest.raises(PartnerError):
        probe_session.lead(build_request(tmp_path, PAIR, 0, wait=1.0), SilentReporter(), KINDS["Filesystem"]())
    assert sorted(tmp_path.iterdir()) == sorted(other_paths)
    assert all((folder / "kept").read_text() == "mine" for folder in other_paths[1:])


def test_stopped_probe_removes_its_folder_and_ends_its_partner(tmp_path: Path) -> None:
    first, second = (start_probe(tmp_path, "--pair", PAIR, "--rank", str(rank)) for rank in (0, 1))
    wait_for_rename_step(tmp_path)
    first.send_signal(signal.SIGTERM)
    first_result, second_result = (
        json.loads(first.communicate(timeout=60)[0]),
        json.loads(second.communicate(timeout=60)[0]),
    )
    assert (first.returncode, first_result["error"]["kind"]) == (75, "interrupted")
    assert (second.returncode, second_result["error"]["kind"]) == (1, "partner")
    assert "the partner exited" in second_result["error"]["message"]
    assert list(tmp_path.iterdir()) == []
