"""Messages between the two sides through the probed folder: late, partial and missing ones."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from components.common.workspace import job_folders
from pipelines.operations.storage_probe import probe_session, rendezvous
from pipelines.operations.storage_probe.participant import MIB_BYTES, ProbePlan
from pipelines.operations.storage_probe.probed_filesystem import Filesystem
from pipelines.operations.storage_probe.rendezvous import MessageChannel, PartnerError
from tests.lost_answers import lose_answers

FS = Filesystem()


def run_later(work: object, seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, work)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_partial_message_is_read_again_until_complete(tmp_path: Path) -> None:
    MessageChannel(FS, tmp_path, 1).post("step.key", {"figures": list(range(100))})
    message = tmp_path / "step.key.1"
    content = message.read_bytes()
    message.write_bytes(content[: len(content) // 2])
    timer = run_later(lambda: message.write_bytes(content))
    assert MessageChannel(FS, tmp_path, 0).receive("step.key") is None
    assert MessageChannel(FS, tmp_path, 0).wait(("step.key",), 10.0) == ("step.key", {"figures": list(range(100))})
    timer.join()


def test_unresponsive_partner_times_out(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(PartnerError, match=r"the partner did not send step\.key within 0 seconds"):
        MessageChannel(FS, tmp_path, 0).wait(("step.key",), 0.3)
    assert time.monotonic() - start < 5


def test_partner_without_a_heartbeat_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_CHECK_SECONDS", 0.1)
    alive = tmp_path / f"{rendezvous.HEARTBEAT_PREFIX}.1"
    alive.touch()
    long_ago = time.time() - job_folders.LOCK_STALE_AFTER_SECONDS - 10
    os.utime(alive, (long_ago, long_ago))
    with pytest.raises(PartnerError, match="no heartbeat from the partner for 60 seconds"):
        MessageChannel(FS, tmp_path, 0).wait(("step.key",), 30.0)


def test_heartbeat_may_be_late_by_the_visibility_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_CHECK_SECONDS", 0.1)
    (tmp_path / f"{rendezvous.HEARTBEAT_PREFIX}.1").touch()
    late = time.time() - job_folders.LOCK_STALE_AFTER_SECONDS - 10
    os.utime(tmp_path / f"{rendezvous.HEARTBEAT_PREFIX}.1", (late, late))
    timer = run_later(lambda: MessageChannel(FS, tmp_path, 1).post("step.key", "here"), 0.5)
    assert MessageChannel(FS, tmp_path, 0, visibility_timeout=30.0).wait(("step.key",), 30.0) == ("step.key", "here")
    timer.join()
    with pytest.raises(PartnerError, match="no heartbeat from the partner for 65 seconds"):
        MessageChannel(FS, tmp_path, 0, visibility_timeout=5.0).wait(("step.other",), 30.0)


def test_cached_heartbeat_does_not_end_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with actimeo=600: stat returns a cached time, and opening the file asks the server."""

    class CachedHeartbeat(Filesystem):
        def fstat(self, descriptor: int) -> os.stat_result:
            if Path(f"/proc/self/fd/{descriptor}").resolve() == alive:
                os.utime(alive)
            return super().fstat(descriptor)

    monkeypatch.setattr(rendezvous, "HEARTBEAT_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "POLL_INTERVAL_SECONDS", (0.01, 0.02))
    alive = tmp_path / f"{rendezvous.HEARTBEAT_PREFIX}.1"
    alive.touch()
    os.utime(alive, (0, 0))
    timer = run_later(lambda: MessageChannel(FS, tmp_path, 1).post("step.key", "here"), 0.5)
    assert MessageChannel(CachedHeartbeat(), tmp_path, 0).wait(("step.key",), 30.0) == ("step.key", "here")
    timer.join()


def create_leader_folder(path: Path, pair: str, digits: str) -> Path:
    """Create the folder of a leader, running or killed."""
    folder = path / f"{rendezvous.PROBE_PREFIX}.elsewhere-00000000.1-1.{digits}"
    folder.mkdir()
    with lose_answers(folder):
        rendezvous.create_pair_files(FS, folder, pair)
    return folder


def test_join_finds_the_running_leader_of_its_pair(tmp_path: Path) -> None:
    create_leader_folder(tmp_path, "ours", "00000000")
    other, living = (
        create_leader_folder(tmp_path, "theirs", "11111111"),
        create_leader_folder(tmp_path, "ours", "22222222"),
    )
    leader = run_later(lambda: rendezvous.await_partner(FS, living, {"patience": 3.0}, 20.0))
    assert rendezvous.find_partner(FS, tmp_path, "ours", 20.0) == (living, {"patience": 3.0})
    leader.join()
    assert not list((other / rendezvous.MESSAGES_FOLDER).glob("hello.*"))


def test_probe_uses_at_most_half_of_the_free_space() -> None:
    space = os.statvfs_result((4096, 4096, 1 << 20, 1 << 20, 16384, 0, 0, 0, 0, 255))
    assert probe_session._limit_size(ProbePlan(size=1 << 30), space).size == 8 * MIB_BYTES
    assert probe_session._limit_size(ProbePlan(size=2 * MIB_BYTES), space).size == 2 * MIB_BYTES
