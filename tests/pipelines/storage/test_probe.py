"""The probe of shared storage: on honest storage it finds nothing; of a lie it finds that lie, with what mends it, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.progress import Silent
from pipelines.storage import meeting, probe
from pipelines.storage.filesystem import Filesystem
from pipelines.storage.meeting import PREFIX, PartnerError
from pipelines.storage.remedies import REMEDIES
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, tuneline
from tests.pipelines.storage.lying import KINDS, asked, refuse

Findings = dict[str, dict[str, Any]]
Side = Callable[[probe.Asked, Silent, Filesystem], dict[str, Any]]
PAIR = "together"


@pytest.fixture(autouse=True)
def second_imports_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def probed(path: Path, kind: str) -> dict[str, Any]:
    """A probe of storage of this kind, by this process and a second one."""
    second = [sys.executable, "-P", "-m", "tests.pipelines.storage.lying", kind, str(path), PAIR]
    return probe.on_this_host(asked(path, PAIR, 0), Silent(), KINDS[kind](), second)


def wrong(found: dict[str, Any]) -> Findings:
    return {one["name"]: one for one in found["findings"] if not one["ok"]}


def test_honest_storage_has_nothing_to_mend(tmp_path: Path) -> None:
    found = answer("storage", "probe", tmp_path, "--quick", "--size", "4MiB", "--no-fio", cwd=tmp_path)
    assert wrong(found) == {}
    assert found["ok"]
    assert [host["rank"] for host in found["hosts"]] == [0, 1]
    assert set(found["measured"]) == set(probe.STEPS)
    rename, checkpoints = found["measured"]["rename"], found["measured"]["checkpoints"]
    assert all(side["reads"] > 10 and side["versions"] > 10 for side in rename)
    for kind in ("O_EXCL", "mkdir", "link"):
        assert sorted(name for side in found["measured"]["exclusive"] for name in side["won"][kind]) == list(range(50))
    assert [side["bytes"] for side in checkpoints] == [4 << 20, 4 << 20]
    assert {side["bytes"] for side in found["measured"]["training"]} == {4 << 20}
    assert list(tmp_path.iterdir()) == [], "it takes its folder away"


@pytest.mark.parametrize(
    ("kind", "names", "said", "needed"),
    [
        ("LazyNames", ["new files"], "a new file by its name seen after", False),
        ("LazyTimes", ["signs of life"], "a time of change seen after", False),
        ("TornRename", ["rename"], "a torn one", True),
        ("GapRename", ["rename"], "found no file", True),
        ("LostFsync", ["fsync"], "what was forced out is not what is read while the other side has it open", True),
        ("ReadOnly", ["read-only"], "Read-only file system (EROFS)", True),
        ("Quota", ["quota"], "Disk quota exceeded (EDQUOT)", True),
        ("NoInodes", ["inodes"], "No space left on device (ENOSPC) for first process, in the step checkpoints; 0 free", True),
        ("SharedLocks", ["locks"], "fcntl is given to both sides at once; flock is given to both sides at once", False),
        ("NoLocks", ["locks"], "fcntl is not to be had; flock is not to be had", False),
        ("WrongServerClock", ["clock"], "the server's clock shows +89.9", True),
        ("WrongHostClock", ["clock"], "second process: the server's clock shows -5", False),
        ("Squashed", ["owner"], "belongs to 65534", False),
        ("Careless", ["exclusive names"], "were given to both sides", True),
        ("OneCase", ["case"], "one file", True),
        ("Stale", ["deleted while read"], "ESTALE", False),
    ],
)
def test_a_lie_is_found_with_its_remedy_and_nothing_else(tmp_path: Path, kind: str, names: list[str], said: str, needed: bool) -> None:
    found = wrong(probed(tmp_path, kind))
    assert list(found) == names, found
    (one,) = found.values()
    assert said in one["found"]
    assert one["hint"] == REMEDIES[one["name"]]
    assert one["needed"] is needed


def test_the_steps_after_one_that_was_refused_are_gone_through_all_the_same(tmp_path: Path) -> None:
    found = probed(tmp_path, "Quota")
    assert "error" in found["measured"]["checkpoints"][0]
    assert all(side["files"] for side in found["measured"]["files"])
    assert not found["ok"]
    assert list(tmp_path.iterdir()) == []


def test_what_one_side_alone_is_refused_is_told_of_that_side_and_the_other_does_not_wait_for_it(tmp_path: Path) -> None:
    found = probed(tmp_path, "QuotaElsewhere")
    (one,) = wrong(found).values()
    assert (one["name"], one["found"]) == ("quota", "Disk quota exceeded (EDQUOT) for second process, in the step checkpoints")
    assert all(side["files"] for side in found["measured"]["files"])


def test_a_partner_that_goes_away_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PartnerError, match="the second process ended: killed for memory"):
        probed(tmp_path, "Deserter")
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_that_ends_with_an_error_is_told_with_that_error_and_its_hint(tmp_path: Path) -> None:
    second = [*COMMAND, "storage", "probe", str(tmp_path / "nowhere"), "--pair", PAIR, "--rank", "1", "--json"]
    with pytest.raises(PartnerError, match=r"the second process ended: \S+nowhere is no folder that could be probed") as raised:
        probe.on_this_host(asked(tmp_path, PAIR, 0), Silent(), Filesystem(), second)
    assert raised.value.hint.startswith("Name a folder on the storage")


def test_a_second_process_that_the_storage_refuses_is_told_with_its_finding(tmp_path: Path) -> None:
    wrong_ = {"name": "permissions", "ok": False, "needed": True, "found": "Permission denied (EACCES)", "hint": "Let this user write."}
    said = json.dumps({"ok": False, "findings": [{**wrong_, "name": "mount on n1", "ok": True, "hint": ""}, wrong_]})
    second = [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"]
    with pytest.raises(PartnerError, match=r"the second process ended: permissions: Permission denied \(EACCES\)$") as raised:
        probe.on_this_host(asked(tmp_path, PAIR, 0), Silent(), Filesystem(), second)
    assert raised.value.hint == "Let this user write."


def test_a_second_process_that_is_killed_without_a_word_is_told_by_its_exit_code(tmp_path: Path) -> None:
    second = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(PartnerError, match="the second process ended: exit code -9"):
        probe.on_this_host(asked(tmp_path, PAIR, 0), Silent(), Filesystem(), second)


def test_a_partner_that_does_not_come_is_told_on_either_side(tmp_path: Path) -> None:
    error = refusal(1, "storage", "probe", tmp_path, "--pair", PAIR, "--rank", "0", "--wait", "1", cwd=tmp_path)
    assert (error["kind"], "no partner came to" in error["message"]) == ("partner", True)
    error = refusal(1, "storage", "probe", tmp_path, "--pair", PAIR, "--wait", "1", cwd=tmp_path, SLURM_PROCID="1")
    assert (error["kind"], "no partner waits in" in error["message"]) == ("partner", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no folder that could be probed"),
        ([".", "--pair", "one"], "the rank of this one is not given"),
        ([".", "--pair", "one", "--rank", "2"], "the rank of this one is 2"),
        ([".", "--pair", "../x", "--rank", "0"], "'../x' is no name for a pair"),
        ([".", "--size", "many"], "'many' is no size"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(tmp_path: Path, arguments: list[str], message: str) -> None:
    error = refusal(2, "storage", "probe", *arguments, cwd=tmp_path)
    assert error["kind"] == "usage"
    assert message in error["message"]
    assert error["hint"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_nothing_is_told_as_a_finding() -> None:
    done = tuneline("storage", "probe", "/sys", "--json", cwd=Path("/"))
    found = wrong(json.loads(done.stdout))
    assert done.returncode == 1
    assert set(found) < {"permissions", "read-only"}, found


@pytest.mark.parametrize(("number", "name"), [(errno.EACCES, "permissions"), (errno.ESTALE, "stale handles")])
@pytest.mark.parametrize("side", [probe.lead, probe.join])
def test_a_folder_that_may_not_even_be_looked_at_is_told_as_a_finding(tmp_path: Path, side: Side, number: int, name: str) -> None:
    class Closed(Filesystem):
        def stat(self, path: Path) -> os.stat_result:
            raise refuse(number, path)

    found = wrong(side(asked(tmp_path, PAIR, 0, wait=1.0), Silent(), Closed()))
    assert list(found) == [name]
    assert found[name]["needed"]


def test_a_partner_that_may_not_write_in_the_others_folder_is_told_so(tmp_path: Path) -> None:
    class Refused(Filesystem):
        def open(self, path: Path, flags: int) -> int:
            if path.name.startswith("hello."):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, flags)

    folder = tmp_path / f"{PREFIX}.here.1-1.00000000"
    folder.mkdir()
    meeting.prepare(Filesystem(), folder, PAIR)
    found = wrong(probe.join(asked(tmp_path, PAIR, 1, wait=1.0), Silent(), Refused()))
    assert list(found) == ["permissions"]


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "storage", "probe", str(path), "--quick", "--json", *options]
    return subprocess.Popen(command, cwd=path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def in_the_middle(path: Path) -> Path:
    """The folder of a probe that is at work."""
    deadline = time.monotonic() + 60
    while not (found := list(path.glob(f"{PREFIX}.*/rename.0"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0].parent


def test_what_a_killed_probe_left_is_taken_away_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    mine = [tmp_path / "tuneline-probe.txt", tmp_path / "tuneline-probe.of.my.own", tmp_path / "data"]
    for folder in mine[1:]:
        folder.mkdir()
        (folder / "kept").write_text("mine")
    mine[0].write_text("mine")
    child = start(tmp_path)
    left = in_the_middle(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert left.exists()
    with pytest.raises(PartnerError):
        probe.lead(asked(tmp_path, PAIR, 0, wait=1.0), Silent(), KINDS["Filesystem"]())
    assert sorted(tmp_path.iterdir()) == sorted(mine)
    assert all((folder / "kept").read_text() == "mine" for folder in mine[1:])


def test_a_probe_that_is_stopped_takes_its_folder_away_and_ends_the_other_side(tmp_path: Path) -> None:
    first, second = (start(tmp_path, "--pair", PAIR, "--rank", str(rank)) for rank in (0, 1))
    in_the_middle(tmp_path)
    first.send_signal(signal.SIGTERM)
    said, told = json.loads(first.communicate(timeout=60)[0]), json.loads(second.communicate(timeout=60)[0])
    assert (first.returncode, said["error"]["kind"]) == (75, "interrupted")
    assert (second.returncode, told["error"]["kind"]) == (1, "partner")
    assert "the partner has ended" in told["error"]["message"]
    assert list(tmp_path.iterdir()) == []
