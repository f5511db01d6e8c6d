"""Compaction, erasure, retention and export: results, and the state after an interruption at every change of a file.

The fast tests interrupt the commands in this process before each call that changes a file, or kill forks of it at random
moments. The long test kills new processes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from pipelines.capture import compaction, erasure, exported_rows, retention, tombstones, traffic_export, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.gateway.feedback import erase_feedback, read_feedback
from tests.pipelines.capture import traffic
from tests.pipelines.command import COMMAND, environment

TODAY = date(2026, 11, 25)


@pytest.fixture(autouse=True)
def skip_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (artifact_folder, os):
        monkeypatch.setattr(owner, "fsync", lambda _: None)


class KilledError(BaseException):
    """Stands for SIGKILL: no later change happens."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """Raise KilledError at the change of a file with this number and at all later ones; return whether it was reached."""
    count = [0]

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def change(*arguments: object, **options: object) -> object:
            count[0] += 1
            if count[0] > number:
                raise KilledError
            return real(*arguments, **options)

        return change

    for name in ("replace", "rename", "unlink", "rmdir", "write_text"):
        monkeypatch.setattr(Path, name, wrap(getattr(Path, name)))
    for name in ("pwrite", "ftruncate"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count[0] > number


def run_interrupted(command: Callable[[], object], number: int) -> bool:
    """Run a command that is interrupted at a change of a file; return whether it was interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        was_reached = interrupt_at(patch, number)
        try:
            command()
        except KilledError:
            assert was_reached()
        return was_reached()


def fill(settings: CaptureSettings) -> None:
    """Write two days of rows: of the subject Jane, of others, an abandoned file and a compacted day."""
    jane = settings.hash_subject("jane")
    for day in (0, 1):
        start = traffic.DAY + timedelta(days=day)
        first = 10 * day
        rows = [traffic.build_row(first + n, jane if n % 3 == 0 else "other") for n in range(6)]
        for row in rows[3:5]:  # one of each subject
            row["tuneline"]["shadow_of"] = f"chatcmpl-{first}"
        traffic.write_sealed(settings, start, rows[:3])
        traffic.write_sealed(settings, start + timedelta(hours=1), rows[3:])
    compaction.compact(settings, traffic.DAY.date() + timedelta(days=1))
    path = traffic.write_sealed(settings, start, [traffic.build_row(20, jane), traffic.build_row(21)], is_open=True)
    path.rename(path.with_name(f"{traffic_files.OPEN_PREFIX}.{path.name.split('.')[1]}.1-1.00000000"))


def export(home: Path, settings: CaptureSettings) -> dict[str, list[str]]:
    """Export the rows of Jane and others with three corrections, and return the exported ids of the others."""
    corrections = {f"chatcmpl-{n}": {"correction": f"correction {n}"} for n in (0, 1, 2)}
    for name, share in (("rows", 0.0), ("held", 0.9)):
        options = traffic_export.ExportOptions(include_unrated=True, held_back=share)
        traffic_export.export(settings, corrections, home / name, options)
    jane = settings.hash_subject("jane").encode()
    assert jane in traffic.read_stored_bytes(home / "rows")
    assert jane in traffic.read_stored_bytes(home / "held")
    return list_exported(home, jane)


def list_exported(home: Path, without: bytes) -> dict[str, list[str]]:
    """Return the exported ids by file, without the rows that contain the bytes."""
    found = {}
    for path in sorted(home.glob("[rh]*/*.jsonl")):
        if lines := [line for line in path.read_bytes().splitlines() if without not in line]:
            found[str(path)] = [json.loads(line)["id"] for line in lines]
    return found


ALL_IDS = sorted(f"chatcmpl-{n}" for n in (*range(6), *range(10, 16), 20, 21))
KEPT_IDS = sorted(f"chatcmpl-{n}" for n in (1, 2, 4, 5, 11, 12, 14, 15, 21))


def test_compaction_loses_and_repeats_no_row_when_it_is_interrupted(tmp_path: Path) -> None:
    number, was_interrupted = 0, True
    while was_interrupted:
        home = tmp_path / str(number)
        home.mkdir()
        settings = traffic.load(home)
        fill(settings)
        was_interrupted = run_interrupted(lambda settings=settings: compaction.compact(settings, TODAY), number)  # type: ignore[misc]
        assert set(traffic.list_ids(traffic.read_rows(settings))) <= set(ALL_IDS)
        compaction.compact(settings, TODAY)
        assert traffic.list_ids(traffic.read_rows(settings)) == ALL_IDS, number
        files = [path.name for path in settings.folder.rglob("*") if path.is_file()]
        assert files == ["rows.parquet", "rows.parquet"], number
        number += 1
    assert number > 10


def test_interrupted_erasure_leaves_nothing_of_the_subject_when_it_is_repeated(tmp_path: Path) -> None:
    number, was_interrupted = 0, True
    while was_interrupted:
        home = tmp_path / str(number)
        home.mkdir()
        settings = traffic.load(home)
        fill(settings)
        kept = export(home, settings)
        feedback = home / "feedback.jsonl"
        lines = [{"id": f"chatcmpl-{n}", "correction": f"correction {n}"} for n in (0, 1, 20)]
        lines.append({"id": "chatcmpl-99", "author": "jane"})
        feedback.write_text("".join(json.dumps(line) + "\n" for line in lines))

        def run(settings: CaptureSettings = settings, path: Path = feedback) -> None:
            erasure.erase(settings, "jane", "dpo", [lambda should: erase_feedback(path, should)], seal_seconds=0)

        was_interrupted = run_interrupted(run, number)
        assert {*KEPT_IDS} <= {"chatcmpl-21", *traffic.list_ids(traffic.read_rows(settings))}, number  # 21: not sealed
        run()
        assert traffic.list_ids(traffic.read_rows(settings)) == KEPT_IDS, number
        assert [line["id"] for line in read_feedback(feedback)] == ["chatcmpl-1"]
        digest = settings.hash_subject("jane")
        files = [path for path in home.rglob("*") if path.is_file() and path.parent.name != traffic_files.TOMBSTONES]
        stored = b"".join(path.read_bytes() for path in files)
        for text in (digest, *(f"{kind} {n}" for kind in ("question", "answer", "correction") for n in (0, 10, 20))):
            assert f'{text}"'.encode() not in stored, (number, text)
        assert tombstones.read_tombstones(settings.folder)[digest].finished is not None
        assert list_exported(home, digest.encode()) == kept, number
        for name in ("rows", "held"):
            assert traffic_export.read_export(home / name).erased, number
        number += 1
    assert number > 10


def test_exported_corrections_of_the_subject_are_erased_and_counted(tmp_path: Path) -> None:
    """Jane corrected another subject's answer: only the feedback links the exported row to her."""
    settings = traffic.load(tmp_path)
    traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(n, f"subject {n}") for n in range(3)])
    line = {"id": "chatcmpl-1", "author": settings.hash_subject("jane"), "correction": "Jane's words"}
    (tmp_path / "feedback.jsonl").write_text(json.dumps(line) + "\n")
    output = tmp_path / "rows"
    traffic_export.export(settings, {"chatcmpl-1": line}, output, traffic_export.ExportOptions(include_unrated=True))
    modes = {path.stat().st_mode for path in output.iterdir()}
    erasers = [lambda should: erase_feedback(tmp_path / "feedback.jsonl", should)]
    result = erasure.erase(settings, "jane", "dpo", erasers, seal_seconds=0)
    assert (result.rows, result.exported, result.feedback, result.is_complete) == (0, 2, 1, True)
    assert b"Jane's" not in traffic.read_stored_bytes(tmp_path)
    export = traffic_export.read_export(output)
    assert (export.conversations, export.preferences, list(export.files)) == (2, 0, ["conversations.jsonl"])
    assert {path.stat().st_mode for path in output.iterdir()} == modes
    assert traffic_export.has_lost_rows(output)


def test_export_that_is_held_missing_or_unfinished_is_reported(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    fill(settings)
    jane, options = settings.hash_subject("jane").encode(), traffic_export.ExportOptions(include_unrated=True)
    for name in ("deleted", "disk/moved", "kept"):
        traffic_export.export(settings, {}, tmp_path / name, options)
    shutil.rmtree(tmp_path / "deleted")
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    draft = tmp_path / ".kept.other-host.1-1.00000000"
    (tmp_path / "kept").rename(draft)
    result = erasure.erase(settings, "jane", "dpo", seal_seconds=0)
    assert not result.is_complete
    assert [str(tmp_path / "disk" / "moved") in text or str(draft) in text for text in result.not_searched] == [
        True
    ] * 2
    draft.rename(tmp_path / "kept")
    (tmp_path / "elsewhere").rename(tmp_path / "disk")
    held = traffic.load(tmp_path, models={"echo": {"legal_hold": True}})
    assert erasure.erase(held, "jane", "dpo", seal_seconds=0).exported == 0
    assert erasure.erase(settings, "jane", "dpo", seal_seconds=0).is_complete
    assert jane not in traffic.read_stored_bytes(tmp_path / "kept") + traffic.read_stored_bytes(tmp_path / "disk")
    assert len(list((settings.folder / exported_rows.RECORDS).iterdir())) == 2, "the deleted export is forgotten"


def test_erasure_is_repeated_for_an_export_whose_disk_was_not_mounted(tmp_path: Path) -> None:
    """The first call erases the feedback, without which only the tombstone links the exported correction to Jane."""
    settings = traffic.load(tmp_path)
    traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(n, f"subject {n}") for n in range(3)])
    line = {"id": "chatcmpl-1", "author": settings.hash_subject("jane"), "correction": "Jane's words"}
    (tmp_path / "feedback.jsonl").write_text(json.dumps(line) + "\n")
    options = traffic_export.ExportOptions(include_unrated=True)
    traffic_export.export(settings, {"chatcmpl-1": line}, tmp_path / "disk" / "rows", options)
    traffic_export.export(settings, {"chatcmpl-1": line}, tmp_path / "other" / "rows", options)
    (tmp_path / "other" / "rows" / "notes.jsonl").write_text('{"id": "chatcmpl-1"}\n')  # not an exported file
    damaged = settings.folder / exported_rows.RECORDS / "damaged.json"
    damaged.write_text("{")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    (tmp_path / "disk").mkdir()
    erasers = [lambda should: erase_feedback(tmp_path / "feedback.jsonl", should)]
    result = erasure.erase(settings, "jane", "dpo", erasers, seal_seconds=0)
    assert (result.exported, result.feedback, len(result.not_searched)) == (2, 1, 2)
    assert b"Jane's" in traffic.read_stored_bytes(tmp_path / "unmounted")
    damaged.unlink()
    (tmp_path / "disk").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    result = erasure.erase(settings, "jane", "dpo", erasers, seal_seconds=0)
    assert (result.exported, result.is_complete) == (2, True)
    assert b"Jane's" not in traffic.read_stored_bytes(tmp_path)
    assert (tmp_path / "other" / "rows" / "notes.jsonl").exists()


def test_row_that_arrives_after_an_erasure_is_dropped_by_compaction_and_not_read_for_training(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    fill(settings)
    erasure.erase(settings, "jane", "dpo", seal_seconds=0)
    traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(30, settings.hash_subject("jane"))])
    compaction.compact(settings, TODAY)
    assert traffic.list_ids(traffic.read_rows(settings)) == KEPT_IDS


def test_erasure_removes_an_interrupted_expiry_and_the_feedback_of_the_key(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path, subject={"source": "key", "key_file": "subject.key"})
    fill(settings)
    (settings.folder / "echo" / "2026-11-23").rename(settings.folder / "echo" / ".expired.2026-11-23")
    feedback = tmp_path / "feedback.jsonl"
    feedback.write_text('{"id": "cmpl-1", "key": "jane"}\n{"id": "cmpl-2", "key": "john"}\n{"id": "cmpl-3", "corr\n')
    erasure.erase(settings, "jane", "dpo", [lambda should: erase_feedback(feedback, should)], seal_seconds=0)
    assert [path.name for path in (settings.folder / "echo").iterdir()] == ["2026-11-24"]
    assert feedback.read_text().split() == ['{"id":', '"cmpl-2",', '"key":', '"john"}']


def test_feedback_without_a_model_expires_with_the_longest_retention(tmp_path: Path) -> None:
    line = {"id": "cmpl-1", "model": None, "time": "2026-11-01T00:00:00+00:00"}
    settings = traffic.load(tmp_path, models={"echo": {"retention_days": 1}, "other": {"retention_days": 20}})
    assert not retention.is_feedback_expired(line, settings, date(2026, 11, 21))
    assert retention.is_feedback_expired(line, settings, date(2026, 11, 22))
    assert not retention.is_feedback_expired({**line, "model": "gone"}, settings, date(2026, 11, 22))


def test_open_file_of_a_running_gateway_is_reported(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    path = traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(1)], is_open=True)
    result = erasure.erase(settings, "jane", "dpo", seal_seconds=0)
    (not_searched,) = result.not_searched
    assert not_searched.startswith(f"{path} is open")
    assert not result.is_complete
    assert retention.describe(settings, 0, TODAY)["unfinished_erasures"] == [settings.hash_subject("jane")]


def test_legal_hold_keeps_rows_from_erasure_and_expiry(tmp_path: Path) -> None:
    fill(traffic.load(tmp_path))
    settings = traffic.load(tmp_path, models={"echo": {"legal_hold": True, "retention_days": 1}})
    result = erasure.erase(settings, "jane", "dpo", seal_seconds=0)
    assert (result.held, result.rows, result.is_complete) == (["echo"], 0, False)
    assert retention.expire(settings, TODAY + timedelta(days=100)) == []
    compaction.compact(settings, TODAY)
    assert traffic.list_ids(traffic.read_rows(settings)) == ALL_IDS


def test_expiry_deletes_whole_days_also_after_an_interruption(tmp_path: Path) -> None:
    number, was_interrupted = 0, True
    while was_interrupted:
        home = tmp_path / str(number)
        home.mkdir()
        settings = traffic.load(home, models={"echo": {"retention_days": 1}})
        fill(settings)
        was_interrupted = run_interrupted(lambda settings=settings: retention.expire(settings, TODAY), number)  # type: ignore[misc]
        retention.expire(settings, TODAY)
        assert [str(day.day) for day in traffic_files.list_days(settings.folder)] == ["2026-11-24"]
        assert not list(settings.folder.glob("*/.expired.*"))
        number += 1
    assert number >= 2


def test_status_estimates_the_storage_and_reports_wrong_permissions(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path, models={"echo": {"sampling_rate": 0.5, "retention_days": 10}, "new": {}})
    fill(settings)
    (settings.folder / "echo" / "2026-11-24").chmod(0o755)
    result = retention.describe(settings, 1000, TODAY)
    echo, new = result["models"]
    assert echo["row_bytes_measured"]
    assert echo["estimate"]["bytes_per_day"] == 500 * echo["row_bytes"]
    assert echo["estimate"]["bytes"] == 10 * echo["estimate"]["bytes_per_day"]
    assert (new["days"], new["row_bytes_measured"]) == (0, False)
    assert result["readable_by_others"] == [str(settings.folder / "echo" / "2026-11-24")]


def run_until_killed(command: Callable[[], object], seconds: float) -> None:
    """Run a command in a fork of this process, and kill the fork after this time."""
    if (child := os.fork()) == 0:
        try:
            command()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_compaction_killed_at_20_random_moments_neither_loses_nor_repeats_a_row(tmp_path: Path) -> None:
    generator, unfinished, seconds = random.Random(2), 0, 0.0
    for number in range(21):
        home = tmp_path / str(number)
        home.mkdir()
        settings = traffic.load(home)
        fill(settings)
        if number:
            run_until_killed(
                lambda settings=settings: compaction.compact(settings, TODAY),  # type: ignore[misc]
                generator.uniform(0, seconds),
            )
            unfinished += any(day.list_sealed() for day in traffic_files.list_days(settings.folder))
        started = time.perf_counter()
        compaction.compact(settings, TODAY)
        seconds = seconds or time.perf_counter() - started
        assert traffic.list_ids(traffic.read_rows(settings)) == ALL_IDS, number
        files = [path.name for path in settings.folder.rglob("*") if path.is_file()]
        assert files == ["rows.parquet", "rows.parquet"], number
    assert unfinished >= 5, "the kills came after the end of the compaction"


def test_erasure_killed_at_20_random_moments_leaves_no_byte_of_the_subject(tmp_path: Path) -> None:
    generator, unfinished, seconds = random.Random(3), 0, 0.0
    for number in range(21):
        home = tmp_path / str(number)
        home.mkdir()
        settings = traffic.load(home)
        fill(settings)
        digest = settings.hash_subject("jane").encode()
        kept = export(home, settings)

        def erase(settings: CaptureSettings = settings) -> None:
            erasure.erase(settings, "jane", "dpo", seal_seconds=0)

        if number:
            run_until_killed(erase, generator.uniform(0, seconds))
            tombstone = tombstones.read_tombstones(settings.folder).get(digest.decode())
            unfinished += tombstone is None or tombstone.finished is None
        started = time.perf_counter()
        erase()
        seconds = seconds or time.perf_counter() - started
        assert traffic.list_ids(traffic.read_rows(settings)) == KEPT_IDS, number
        files = [path for path in home.rglob("*") if path.is_file() and path.parent.name != traffic_files.TOMBSTONES]
        assert not [path for path in files if digest in path.read_bytes()], number
        assert not [path for path in files if path.name.startswith(".") and "json" in path.name], number
        assert list_exported(home, digest) == kept, number
        assert traffic_export.read_export(home / "rows").erased, number
    assert unfinished >= 5, "the kills came after the end of the erasure"


WRITER = """
import sys, time
from pathlib import Path
from pipelines.capture.settings import load_settings
from pipelines.capture.traffic_writer import TrafficWriter
from tests.pipelines.capture.traffic import build_row

writer = TrafficWriter(load_settings(Path(sys.argv[1])), lambda *_: None)
number = 0
while True:
    writer.submit("echo", 10, lambda number=number: build_row(number))
    print(number, time.time(), flush=True)
    number += 1
    time.sleep(0.001)
"""


@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.stress)])
def test_killed_writer_loses_at_most_a_second_and_killed_commands_can_be_repeated(tmp_path: Path, kills: int) -> None:
    """Long tier: it kills processes. Stress tier: 20 of them take a minute."""
    rng = random.Random(1)
    path = traffic.write_capture_file(tmp_path)
    settings = traffic.load(tmp_path)
    variables = environment()
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=variables, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        stop = time.time() + 1 + rng.random()
        while time.time() < stop:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        lines += process.stdout.readlines()
        process.wait()
        submitted = [line.split() for line in lines if line.endswith("\n")]
        due = {f"chatcmpl-{number}" for number, submitted_at in submitted if float(submitted_at) < killed - 1}
        for day in traffic_files.list_days(settings.folder):
            traffic_files.recover(day)
        rows = traffic.read_rows(settings)
        assert due <= set(traffic.list_ids(rows))
        assert len(traffic.list_ids(rows)) == len({row["response"]["id"] for row in rows})
        (day,) = traffic_files.list_days(settings.folder)
        for sealed in day.list_sealed():
            sealed.unlink()
    fill(settings)
    for _ in range(4):
        with subprocess.Popen(
            [*COMMAND, "traffic", "erase", "--subject", "jane", "--capture", str(path)],
            cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as command:  # fmt: skip
            time.sleep(1.2 + 1.5 * rng.random())
            command.kill()
        assert {*KEPT_IDS} <= {"chatcmpl-21", *traffic.list_ids(traffic.read_rows(settings))}
    erasure.erase(settings, "jane", "dpo", seal_seconds=0)
    compaction.compact(settings, TODAY)
    assert traffic.list_ids(traffic.read_rows(settings)) == KEPT_IDS
