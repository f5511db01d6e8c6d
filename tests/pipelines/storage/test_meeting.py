"""How the two sides talk through the very folder that they probe: seen late, seen by halves, or not at all."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from components.common import jobs
from pipelines.storage import meeting, probe
from pipelines.storage.filesystem import Filesystem
from pipelines.storage.meeting import PartnerError, Talk
from pipelines.storage.side import MIB, Plan

FS = Filesystem()


def later(work: object, seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, work)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_half_a_message_is_looked_at_again_until_it_is_whole(tmp_path: Path) -> None:
    Talk(FS, tmp_path, 1).post("step.key", {"figures": list(range(100))})
    message = tmp_path / "step.key.1"
    whole = message.read_bytes()
    message.write_bytes(whole[: len(whole) // 2])
    timer = later(lambda: message.write_bytes(whole))
    assert Talk(FS, tmp_path, 0).heard("step.key") is None
    assert Talk(FS, tmp_path, 0).wait(("step.key",), 10.0) == ("step.key", {"figures": list(range(100))})
    timer.join()


def test_a_partner_that_lives_and_does_not_answer_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(PartnerError, match="did not answer within 0 seconds"):
        Talk(FS, tmp_path, 0).wait(("step.key",), 0.3)
    assert time.monotonic() - began < 5


def test_a_partner_that_gives_no_sign_of_life_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SIGNS_EVERY", 0.1)
    alive = tmp_path / f"{meeting.ALIVE}.1"
    alive.touch()
    long_ago = time.time() - jobs.QUIET - 10
    os.utime(alive, (long_ago, long_ago))
    with pytest.raises(PartnerError, match="fell silent: no sign of life for 60 seconds"):
        Talk(FS, tmp_path, 0).wait(("step.key",), 30.0)


def test_a_sign_of_life_may_be_seen_as_late_as_the_probe_waits_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SIGNS_EVERY", 0.1)
    (tmp_path / f"{meeting.ALIVE}.1").touch()
    late = time.time() - jobs.QUIET - 10
    os.utime(tmp_path / f"{meeting.ALIVE}.1", (late, late))
    timer = later(lambda: Talk(FS, tmp_path, 1).post("step.key", "here"), 0.5)
    assert Talk(FS, tmp_path, 0, patience=30.0).wait(("step.key",), 30.0) == ("step.key", "here")
    timer.join()
    with pytest.raises(PartnerError, match="no sign of life for 65 seconds"):
        Talk(FS, tmp_path, 0, patience=5.0).wait(("step.other",), 30.0)


def test_a_living_partner_is_not_condemned_by_what_this_host_keeps_of_its_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with actimeo=600: a look by the name shows the time of long ago, opening the file asks the server."""

    class Kept(Filesystem):
        def status(self, descriptor: int) -> os.stat_result:
            if Path(f"/proc/self/fd/{descriptor}").resolve() == alive:
                os.utime(alive)
            return super().status(descriptor)

    monkeypatch.setattr(meeting, "SIGNS_EVERY", 0.0)
    monkeypatch.setattr(meeting, "LOOKS_EVERY", (0.01, 0.02))
    alive = tmp_path / f"{meeting.ALIVE}.1"
    alive.touch()
    os.utime(alive, (0, 0))
    timer = later(lambda: Talk(FS, tmp_path, 1).post("step.key", "here"), 0.5)
    assert Talk(Kept(), tmp_path, 0).wait(("step.key",), 30.0) == ("step.key", "here")
    timer.join()


def waiting(path: Path, pair: str, digits: str) -> Path:
    """A folder of a side that leads, or of one that was killed."""
    folder = path / f"{meeting.PREFIX}.elsewhere-00000000.1-1.{digits}"
    folder.mkdir()
    meeting.prepare(FS, folder, pair)
    return folder


def test_a_side_that_joins_finds_the_living_one_of_its_pair_among_others_and_dead_ones(tmp_path: Path) -> None:
    waiting(tmp_path, "ours", "00000000")
    other, living = waiting(tmp_path, "theirs", "11111111"), waiting(tmp_path, "ours", "22222222")
    leader = later(lambda: meeting.welcome(FS, living, {"patience": 3.0}, 20.0))
    assert meeting.join(FS, tmp_path, "ours", 20.0) == (living, {"patience": 3.0})
    leader.join()
    assert not list((other / meeting.TALK).glob("hello.*"))


def test_half_of_the_free_space_is_left_to_others() -> None:
    space = os.statvfs_result((4096, 4096, 1 << 20, 1 << 20, 16384, 0, 0, 0, 0, 255))
    assert probe._affordable(Plan(size=1 << 30), space).size == 8 * MIB
    assert probe._affordable(Plan(size=2 * MIB), space).size == 2 * MIB
