"""What is made of figures that no storage here has: those of two hosts on NFS."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.findings import all_well
from pipelines.storage import fio, judging
from pipelines.storage.mounts import Mount
from pipelines.storage.remedies import REFUSED, REMEDIES
from pipelines.storage.side import Plan

RIGHT = {"vers": "3", "hard": "", "proto": "tcp", "nconnect": "8", "rsize": "1048576", "wsize": "1048576"}
NFS = Mount("/mnt/tuneline", "nfs", "powerscale.example:/ifs/data", RIGHT)
SEEN = {"patience": 90.0, "by_name": 0.01, "in_listing": 0.01, "time_of_change": 0.01, "added_bytes": 0.01}
HONEST = {"own_reopened": True, "others_open": True, "others_closed": True, "write_seconds": 1e-5, "fsync_seconds": 2e-3}


def wrong(step: str, first: dict[str, Any], second: dict[str, Any], mount: Mount = NFS) -> dict[str, dict[str, Any]]:
    found = judging.judge({step: [first, second]}, ("n1", "n2"), (mount, mount), one_host=False)
    return {one["name"]: one for one in found if not one["ok"]}


@pytest.mark.parametrize(
    ("kind", "seconds", "name", "needed"),
    [
        ("by_name", 29.0, "new files", False),
        ("in_listing", 61.0, "new files", True),
        ("added_bytes", None, "new files", True),
        ("time_of_change", 10.0, "signs of life", False),
        ("time_of_change", 31.0, "signs of life", True),
        ("time_of_change", None, "signs of life", True),
    ],
)
def test_what_is_seen_late_is_told_by_how_late(kind: str, seconds: float | None, name: str, needed: bool) -> None:
    found = wrong("visibility", SEEN, {**SEEN, kind: seconds})
    assert {one["name"]: one["needed"] for one in found.values()} == {name: needed}
    assert "mounted with the defaults" in found[name]["found"]
    assert "actimeo=0" in found[name]["hint"]


def test_what_a_quick_probe_did_not_see_is_not_said_to_be_seen_never() -> None:
    found = wrong("visibility", {**SEEN, "patience": 15.0, "by_name": None}, {**SEEN, "patience": 15.0})
    assert found["new files"]["needed"] is False
    assert "not seen within 15 s" in found["new files"]["found"]


def test_the_options_that_hosts_keep_names_by_are_named() -> None:
    mount = Mount(NFS.point, "nfs4", NFS.source, {**RIGHT, "vers": "4.1", "acdirmin": "45", "lookupcache": "pos"})
    assert "mounted with acdirmin=45, lookupcache=pos" in wrong("visibility", {**SEEN, "by_name": 45.0}, SEEN, mount)["new files"]["found"]


def test_an_fsync_that_is_sooner_back_than_a_network_answers_forces_nothing_out() -> None:
    assert list(wrong("fsync", HONEST, {**HONEST, "fsync_seconds": 1e-6})) == ["fsync time"]
    assert wrong("fsync", HONEST, {**HONEST, "fsync_seconds": 1e-6}, Mount("/", "tmpfs", "tmpfs")) == {}
    assert wrong("fsync", HONEST, HONEST) == {}


@pytest.mark.parametrize("key", judging.FORCED)
def test_every_way_of_losing_what_was_forced_out_is_told(key: str) -> None:
    assert judging.FORCED[key] in wrong("fsync", HONEST, {**HONEST, key: False})["fsync"]["found"]


def test_a_name_that_nobody_got_is_as_wrong_as_one_that_both_got() -> None:
    first, second = {"link": [0, 1]}, {"link": [1, 2]}
    found = wrong("exclusive", {"rounds": 5, "won": first}, {"rounds": 5, "won": second})
    assert found["exclusive names"]["found"] == "link: of 5 names 1 were given to both sides, 2 to nobody"


def test_one_cause_is_told_once_however_many_steps_met_it() -> None:
    error = {"error": {"errno": 30, "text": "Read-only file system (EROFS)"}}
    given_up = {"error": {"given_up": True}}
    found = judging.judge({"rename": [error, given_up], "fsync": [given_up, error]}, ("n1", "n2"), (NFS, NFS), one_host=False)
    assert [(one["name"], one["found"]) for one in found if not one["ok"]] == [
        ("read-only", "Read-only file system (EROFS) for n1, in the step rename")
    ]


PLACE = {"free": 3 << 30, "size": 100 << 30, "inodes": 1000, "free_inodes": 10, "user": 1, "owner": 1, "mode": 0o600}
READS = {"reads": 10, "versions": 5, "missing": 0, "torn": 0, "stale": 1, "older": 0}
FULL = {"errno": errno.ENOSPC, "text": "No space left on device (ENOSPC)"}
STALE = {"errno": errno.ESTALE, "text": "Stale file handle (ESTALE)"}


@pytest.mark.parametrize(
    ("before", "error", "name", "advice"),
    [
        ({"place": [PLACE, PLACE]}, {**FULL, "no_inodes": False}, "space", "3.0 GiB of 100.0 GiB free"),
        ({"place": [PLACE, PLACE]}, {**FULL, "no_inodes": True}, "inodes", "10 free"),
        ({"place": [{**PLACE, "free": 50 << 30}] * 2}, {**FULL, "no_inodes": False}, "space", "50.0 GiB of 100.0 GiB free"),
        ({"rename": [READS, READS]}, STALE, "stale handles", "2 reads of a replaced file ended with ESTALE"),
    ],
)
def test_what_a_step_failed_by_is_needed_though_it_was_only_advised_or_looked_right_before(
    before: dict[str, list[dict[str, Any]]], error: dict[str, Any], name: str, advice: str
) -> None:
    failed = {"checkpoints": [{"error": error}, {"error": {"given_up": True}}]}
    found = judging.judge({**before, **failed}, ("n1", "n2"), (NFS, NFS), one_host=False)
    (one,) = (one for one in found if one["name"] == name)
    assert (one["ok"], one["needed"], one["hint"]) == (False, True, REMEDIES[name])
    assert one["found"] == f"{error['text']} for n1, in the step checkpoints; {advice}"
    assert not all_well(found)


def test_advice_does_not_take_the_place_of_what_a_step_failed_by() -> None:
    failed = {"names": [{"error": STALE}, {"error": {"given_up": True}}]}
    found = judging.judge({**failed, "rename": [READS, READS]}, ("n1", "n2"), (NFS, NFS), one_host=False)
    assert [(one["name"], one["needed"]) for one in found if not one["ok"]] == [("stale handles", True)]


def test_every_refusal_has_a_remedy() -> None:
    assert set(REFUSED.values()) <= set(REMEDIES)


class Alone:
    """A side whose partner is always ready."""

    def __init__(self, room: Path) -> None:
        self.plan, self._room = Plan(size=1 << 20, seconds=1), room

    def meet(self, key: str) -> None:
        pass

    def room(self) -> Path:
        return self._room


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, Any]:
    """What is made of a fio that is this script; a real one is not needed to run the tests."""
    program, room = tmp_path / "bin" / "fio", tmp_path / "room"
    program.parent.mkdir()
    room.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    measured = fio.measure(Alone(room))  # type: ignore[arg-type]
    assert list(room.iterdir()) == []
    return measured


def test_what_a_real_fio_wrote_is_told_as_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Path(__file__).with_name("fio-3.33.json")
    measured = stand_in(tmp_path, monkeypatch, f'touch "${{2#--directory=}}/${{1#--name=}}.0.0"; echo "fio: a note"; cat "{recorded}"')
    assert set(measured["shapes"]) == {"preparation", "training", "checkpoints"}
    found = judging.judge({"fio": [measured, {"shapes": {}}]}, ("n1", "n2"), (NFS, NFS), one_host=False)
    told = {one["name"]: one["found"] for one in found}
    assert told["fio preparation, n1"] == "fio-3.33: read 340 MiB/s, 5,438 a second; write 335 MiB/s, 5,353 a second"


def test_a_fio_that_fails_is_told_and_is_no_fault_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stand_in(tmp_path, monkeypatch, "echo 'fio: engine psync not loadable' >&2; exit 1")
    found = wrong("fio", measured, {"shapes": {}})
    assert "engine psync not loadable" in found["fio training, n1"]["found"]
    assert not any(one["needed"] for one in found.values())


IDLE = {"io_bytes": 0, "bw_bytes": 0, "iops": 0.0}
BUSY = {"io_bytes": 4096, "bw_bytes": 4096, "iops": 1.0}


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        ({"error": errno.ENOSPC, "read": IDLE, "write": IDLE}, 1, "No space left on device"),
        ({"error": errno.EIO, "read": IDLE, "write": BUSY}, 0, "Input/output error"),
        ({"error": 0, "read": IDLE, "write": BUSY}, 3, "exit code 3"),
        ({"error": 0, "read": IDLE, "write": IDLE}, 0, "it read and wrote nothing"),
    ],
)
def test_a_fio_that_fails_with_figures_or_moves_nothing_is_told_by_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], code: int, said: str
) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"fio version": "fio-3.33", "jobs": [job]}))
    found = wrong("fio", stand_in(tmp_path, monkeypatch, f'cat "{figures}"; exit {code}'), {"shapes": {}})
    assert {one["found"] for one in found.values()} == {f"it failed: {said}"}
    assert not any(one["needed"] for one in found.values())
