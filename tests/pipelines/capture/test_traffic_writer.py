"""The writer of captured rows: limits of the queue, files of an hour, failures, and what a killed process leaves."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.capture import erasure, traffic_files, traffic_writer
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import OPEN_PREFIX, Row
from pipelines.capture.traffic_writer import TrafficWriter
from tests.pipelines.capture import traffic


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureSettings:
    monkeypatch.setattr(traffic_writer, "WRITE_SECONDS", 0.002)
    monkeypatch.setattr(traffic_writer, "FLUSH_SECONDS", 0.004)
    return traffic.load(tmp_path, queue_rows=3, queue_mib=1)


def create_writer(settings: CaptureSettings) -> tuple[TrafficWriter, Counter[str]]:
    outcomes: Counter[str] = Counter()
    return TrafficWriter(settings, lambda _, outcome: outcomes.update([outcome])), outcomes


def wait_for(outcomes: Counter[str], outcome: str, count: int = 1) -> None:
    deadline = time.monotonic() + 20
    while outcomes[outcome] < count and time.monotonic() < deadline:
        time.sleep(0.002)
    assert outcomes[outcome] == count


def test_full_queue_drops_rows_and_counts_them_without_waiting(settings: CaptureSettings) -> None:
    writer, outcomes = create_writer(settings)
    is_building, may_continue = threading.Event(), threading.Event()

    def build_slowly() -> Row:
        is_building.set()
        may_continue.wait()
        return traffic.build_row(0)

    writer.submit("echo", 10, build_slowly)
    is_building.wait()
    started = time.perf_counter()
    for number in range(1, 6):
        writer.submit("echo", 10, lambda number=number: traffic.build_row(number))  # type: ignore[misc]
    writer.submit("echo", 300 << 10, lambda: traffic.build_row(9))
    assert time.perf_counter() - started < 0.05
    assert outcomes == {"dropped": 2, "too_large": 1}
    may_continue.set()
    writer.close()
    assert outcomes == {"dropped": 2, "too_large": 1, "written": 4}
    assert traffic.list_ids(traffic.read_rows(settings)) == [f"chatcmpl-{number}" for number in range(4)]


def test_size_of_the_waiting_requests_is_limited(settings: CaptureSettings) -> None:
    writer, outcomes = create_writer(settings.model_copy(update={"queue_rows": 1000}))
    writer.close()  # nothing is taken from the queue
    for _ in range(6):
        writer.submit("echo", 200 << 10, lambda: traffic.build_row(0))
    assert outcomes == {"dropped": 1}


def test_file_is_sealed_at_the_end_of_its_hour(settings: CaptureSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = [traffic.DAY]
    monkeypatch.setattr(traffic_files, "now", lambda: hour[0])
    writer, outcomes = create_writer(settings)
    writer.submit("echo", 10, lambda: traffic.build_row(1))
    wait_for(outcomes, "written")
    (day,) = traffic_files.list_days(settings.folder)
    assert (len(day.list_open()), day.list_sealed()) == (1, [])
    hour[0] = datetime.fromisoformat("2026-11-23T08:00:01Z")
    deadline = time.monotonic() + 20
    while day.list_open() and time.monotonic() < deadline:
        time.sleep(0.002)
    writer.submit("echo", 10, lambda: traffic.build_row(2))
    writer.close()
    assert [path.parent.name for path in day.list_sealed()] == ["07", "08"]


def test_failed_write_leaves_no_part_of_a_row_and_the_next_row_is_written(
    settings: CaptureSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_write, failing = os.write, [True]

    def write_partially(descriptor: int, data: bytes) -> int:
        if failing.pop() if failing else False:
            return real_write(descriptor, data[:20])
        return real_write(descriptor, data)

    writer, outcomes = create_writer(settings)
    monkeypatch.setattr(traffic_writer.os, "write", write_partially)
    writer.submit("echo", 10, lambda: traffic.build_row(1))
    writer.submit("echo", 10, lambda: {}["secret text"])  # type: ignore[misc]
    writer.submit("echo", 10, lambda: traffic.build_row(2))
    writer.close()
    assert outcomes == {"failed": 2, "written": 1}
    assert traffic.list_ids(traffic.read_rows(settings)) == ["chatcmpl-2"]
    assert "secret text" not in caplog.text
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_partial_last_line_of_a_killed_process_is_cut(settings: CaptureSettings) -> None:
    path = traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(n) for n in range(3)], is_open=True)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 40, 5, 0):
        folder = path.parent
        folder.mkdir(exist_ok=True)
        host = path.name.split(".")[1]
        left = folder / f"{OPEN_PREFIX}.{host}.1-1.0000000{size % 10}"  # process 1 has another start time
        left.write_bytes(whole[:size])
        path.unlink(missing_ok=True)
        (day,) = traffic_files.list_days(settings.folder)
        traffic_files.recover(day)
        assert day.list_open() == []
        assert b"".join(each.read_bytes() for each in day.list_sealed()) == whole[: whole[:size].rfind(b"\n") + 1]
        for each in day.list_sealed():
            each.unlink()


def test_running_gateway_seals_its_file_for_an_erasure_and_writes_no_row_of_the_subject_after_it(
    settings: CaptureSettings,
) -> None:
    writer, outcomes = create_writer(settings)
    subject = settings.hash_subject("jane")
    timestamp = int(time.time()) - 100
    writer.submit("echo", 10, lambda: traffic.build_row(1, subject, timestamp))
    writer.submit("echo", 10, lambda: traffic.build_row(2, "other", timestamp))
    wait_for(outcomes, "written", 2)
    result = erasure.erase(settings, "jane", "dpo", seal_seconds=0.5)
    assert (result.rows, result.files, result.not_searched) == (1, 1, [])
    writer.submit("echo", 10, lambda: traffic.build_row(3, subject, timestamp))
    writer.submit("echo", 10, lambda: traffic.build_row(4, subject, timestamp + 1000))
    writer.close()
    assert outcomes == {"written": 3, "erased": 1}
    assert traffic.list_ids(traffic.read_rows(settings)) == ["chatcmpl-2", "chatcmpl-4"]


def test_lines_are_json_with_one_row_each(settings: CaptureSettings) -> None:
    writer, _ = create_writer(settings)
    writer.submit("echo", 10, lambda: traffic.build_row(1, content="a\nb\u2028c \ud800"))
    writer.close()
    (day,) = traffic_files.list_days(settings.folder)
    (line,) = day.list_sealed()[0].read_bytes().split(b"\n")[:-1]
    assert json.loads(line)["response"]["choices"][0]["message"]["content"] == "a\nb\u2028c \ud800"
