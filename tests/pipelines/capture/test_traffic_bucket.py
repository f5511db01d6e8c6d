"""Captured traffic in a bucket: uploads of the gateway, copies of the commands, locks, and interruptions at each change.

Fast tier: the bucket is in memory. tests/engines/test_traffic_in_s3.py kills processes against a real server.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import BusyError, EngineMissingError
from components.common.workspace import job_folders, liveness
from pipelines.capture import (
    compaction,
    erasure,
    retention,
    spool_upload,
    tombstones,
    traffic_bucket,
    traffic_files,
    traffic_writer,
)
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.spool_upload import SpoolUploader
from pipelines.capture.tombstones import Tombstone
from pipelines.capture.traffic_writer import TrafficWriter
from pipelines.cli.explain import _read_traffic
from pipelines.gateway.traffic_capture import TrafficCapture
from tests.pipelines.capture import traffic
from tests.pipelines.capture.bucket_stand_in import ADDRESS, BucketStandIn, KilledError
from tests.pipelines.command import answer_in_process, refusal, run_in_process

TODAY = date(2026, 11, 25)
JANE = "jane"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (artifact_folder, os):
        monkeypatch.setattr(owner, "fsync", lambda _: None)
    monkeypatch.setattr(spool_upload, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(traffic_bucket, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(traffic_bucket, "SPOOL_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(traffic_files, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(traffic_files, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(traffic_writer, "WRITE_SECONDS", 0.002)
    monkeypatch.setattr(traffic_writer, "FLUSH_SECONDS", 0.004)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> BucketStandIn:
    return BucketStandIn().install(monkeypatch)


@pytest.fixture
def settings(tmp_path: Path, bucket: BucketStandIn) -> CaptureSettings:
    return traffic.load(tmp_path, bucket=ADDRESS)


@pytest.fixture
def outcomes() -> Counter[str]:
    return Counter()


def wait_until(is_met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def put(settings: CaptureSettings, day: int, rows: list[traffic.Row], bucket: BucketStandIn) -> str:
    """Store a sealed file in the bucket, and return its name."""
    spool = settings.model_copy(update={"folder": settings.folder.parent / "elsewhere"})
    path = traffic.write_sealed(spool, traffic.DAY + timedelta(days=day), rows)
    traffic_bucket.upload_file(spool, path)
    path.unlink()
    return path.relative_to(spool.folder).as_posix()


def fill(settings: CaptureSettings, bucket: BucketStandIn) -> None:
    """Store two days of rows of Jane and others; the first day is compacted, and a killed command left a file of it."""
    jane = settings.hash_subject(JANE)
    rows = [traffic.build_row(n, jane if n % 3 == 0 else "other") for n in range(12)]
    first = put(settings, 0, rows[:4], bucket)
    kept = bucket.objects[f"{ADDRESS}/{first}"]
    put(settings, 0, rows[4:6], bucket)
    with traffic_bucket.open_copy(settings, changes=True) as copy:
        compaction.compact(copy, (traffic.DAY + timedelta(days=1)).date())
    assert "echo/2026-11-23/rows.parquet" in bucket.list_names()
    bucket.objects[f"{ADDRESS}/{first}"] = kept
    for start in (6, 9):
        put(settings, 1, rows[start : start + 3], bucket)


ALL_IDS = sorted(f"chatcmpl-{n}" for n in range(12))
KEPT_IDS = sorted(f"chatcmpl-{n}" for n in range(12) if n % 3)


def read_ids(settings: CaptureSettings) -> list[str]:
    """Return the ids of all rows that a command of another machine reads."""
    with traffic_bucket.open_copy(settings) as copy:
        return traffic.list_ids(traffic.read_rows(copy))


def change(settings: CaptureSettings, command: Callable[[CaptureSettings], object]) -> None:
    with traffic_bucket.open_copy(settings, changes=True) as copy:
        command(copy)


def interrupt_everywhere(
    settings: CaptureSettings, bucket: BucketStandIn, command: Callable[[CaptureSettings], object]
) -> Iterator[int]:
    """Kill a command before each of its changes of the bucket, and yield the number of changes that happened."""
    number = 0
    while True:
        bucket.objects.clear()
        fill(settings, bucket)
        bucket.kill_at = bucket.changes + number
        was_killed = False
        try:
            change(settings, command)
        except KilledError:
            was_killed = True
        bucket.kill_at = None
        for lock in [uri for uri in bucket.objects if "/.lock/" in uri]:
            del bucket.objects[lock]  # its process has ended
        yield number
        if not was_killed:
            return
        number += 1


def test_compaction_killed_at_each_change_of_the_bucket_neither_loses_nor_repeats_a_row(
    settings: CaptureSettings, bucket: BucketStandIn
) -> None:
    def compact(copy: CaptureSettings) -> None:
        compaction.compact(copy, TODAY)

    for number in interrupt_everywhere(settings, bucket, compact):
        assert read_ids(settings) == ALL_IDS, number
        change(settings, compact)
        assert read_ids(settings) == ALL_IDS, number
        assert bucket.list_names() == ["echo/2026-11-23/rows.parquet", "echo/2026-11-24/rows.parquet"], number
    assert number >= 5


def test_erasure_killed_at_each_change_of_the_bucket_is_completed_by_the_next(
    settings: CaptureSettings, bucket: BucketStandIn
) -> None:
    digest = settings.hash_subject(JANE)

    def erase(copy: CaptureSettings) -> None:
        erasure.erase(copy, JANE, "dpo", seal_seconds=0)

    for number in interrupt_everywhere(settings, bucket, erase):
        assert set(KEPT_IDS) <= set(read_ids(settings)) <= set(ALL_IDS), number
        tombstone = f"{ADDRESS}/.tombstones/{digest}.json"
        if digest.encode() not in bucket.read_all():
            assert tombstone in bucket.objects
        else:
            assert b'"finished": null' in bucket.objects.get(tombstone, (b'"finished": null', 0))[0], number
        change(settings, erase)
        assert read_ids(settings) == KEPT_IDS, number
        for text in (digest, "question 0", "answer 9"):
            assert text.encode() not in bucket.read_all(), (number, text)
        assert json.loads(bucket.objects[tombstone][0])["finished"] is not None, number
        assert not any("copy" in path.name for path in settings.folder.iterdir()), "a copy remains"
    assert number >= 8


def test_expiry_killed_at_each_change_of_the_bucket_is_completed_by_the_next(
    settings: CaptureSettings, bucket: BucketStandIn
) -> None:
    settings = settings.model_copy(
        update={"models": {"echo": settings.models["echo"].model_copy(update={"retention_days": 1})}}
    )

    def expire(copy: CaptureSettings) -> None:
        retention.expire(copy, TODAY)

    for number in interrupt_everywhere(settings, bucket, expire):
        ids = read_ids(settings)
        assert {*ALL_IDS[2:]} - {f"chatcmpl-{n}" for n in range(6)} <= set(ids), number
        assert len(ids) == len(set(ids)), number
        change(settings, expire)
        assert read_ids(settings) == sorted(f"chatcmpl-{n}" for n in range(6, 12)), number
    assert number >= 3


def test_gateway_uploads_its_rows_and_commands_of_another_machine_read_them(
    settings: CaptureSettings, bucket: BucketStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    capture = TrafficCapture(settings.model_copy(update={"upload_seconds": 0}), registry)
    for number in range(3):
        capture._writer.submit("a model/ü", 10, lambda number=number: traffic.build_row(number))  # type: ignore[misc]
    wait_until(lambda: bucket.list_names())
    wait_until(lambda: not list(traffic_bucket.get_spool(settings).folder.glob("*/*/*/*")))
    assert [uri for uri in bucket.objects if "/.spools/" in uri], "an erasure would not wait for the gateway"
    capture.close()
    assert [uri for uri in bucket.objects if "/.spools/" in uri] == []
    uploaded = registry.get_sample_value("tuneline_gateway_capture_uploads_total", {"outcome": "uploaded"})
    assert uploaded == len(bucket.list_names()) >= 1
    assert {name.partition("/")[0] for name in bucket.list_names()} == {"a%20model%2F%C3%BC"}
    other = tmp_path / "other machine"
    other.mkdir()
    traffic.write_capture_file(other, bucket=f"{ADDRESS}/")
    found = answer_in_process("traffic", "list", cwd=other)["answers"]
    assert sorted(row["id"] for row in found) == [f"chatcmpl-{number}" for number in range(3)]
    assert list((other / "traffic").iterdir()) == [], "a copy remains"
    status = answer_in_process("traffic", "status", cwd=other)
    assert (status["folder"], [each["days"] for each in status["models"]]) == (ADDRESS, [1, 0])


def test_rows_wait_in_the_spool_while_the_bucket_is_unreachable(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    spool = traffic_bucket.get_spool(settings)
    uploader = SpoolUploader(settings, lambda outcome: outcomes.update([outcome]))
    writer = TrafficWriter(
        spool.model_copy(update={"upload_seconds": 0}), lambda _, outcome: outcomes.update([outcome])
    )
    bucket.is_reachable = False
    for number in range(3):
        writer.submit("echo", 10, lambda number=number: traffic.build_row(number))  # type: ignore[misc]
    wait_until(lambda: outcomes["written"] == 3 and outcomes["failed"] >= 2)
    ids = [f"chatcmpl-{number}" for number in range(3)]
    wait_until(lambda: traffic.list_ids(traffic.read_rows(spool)) == ids)
    assert bucket.list_names() == []
    assert [record.message for record in caplog.records if "capture_upload" in record.message] == [
        f"capture_upload_failed error=EngineMissingError reason={ADDRESS} cannot be reached"
    ]
    bucket.is_reachable = True
    writer.close()
    uploader.close()
    assert read_ids(settings) == ids


def test_gateways_with_the_same_spool_upload_one_after_the_other(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str]
) -> None:
    spool = traffic_bucket.get_spool(settings)
    traffic.write_sealed(spool, traffic.DAY, [traffic.build_row(1)])
    with job_folders.folder_lock(spool.folder):
        uploader = SpoolUploader(settings, lambda outcome: outcomes.update([outcome]))
        time.sleep(0.05)
        assert (bucket.list_names(), outcomes) == ([], {})
    wait_until(lambda: outcomes["uploaded"])
    uploader.close()


def test_next_start_uploads_the_rows_of_a_killed_gateway_without_erased_subjects(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str]
) -> None:
    spool, jane = traffic_bucket.get_spool(settings), settings.hash_subject(JANE)
    rows = [traffic.build_row(1, jane), traffic.build_row(2, "other")]
    path = traffic.write_sealed(spool, traffic.DAY, rows, is_open=True)
    path.rename(path.with_name(f"{traffic_files.OPEN_PREFIX}.{path.name.split('.')[1]}.1-1.00000000"))
    traffic.write_sealed(spool, traffic.DAY, [traffic.build_row(3, jane)])
    damaged = traffic.write_sealed(spool, traffic.DAY, [traffic.build_row(4, "other")])
    damaged.write_bytes(damaged.read_bytes() + f'{{"subject": "{jane}", "text": "damaged'.encode() + b"\n")
    traffic_bucket.write_spool(spool, "id", "")
    change(settings, lambda copy: erasure.erase(copy, JANE, "dpo", seal_seconds=0))
    bucket.objects.pop(f"{ADDRESS}/.spools/id.json")
    SpoolUploader(settings, lambda outcome: outcomes.update([outcome])).close()
    assert read_ids(settings) == ["chatcmpl-2", "chatcmpl-4"]
    assert jane.encode() not in bucket.read_all()
    assert outcomes == {"uploaded": 3}
    assert list(spool.folder.glob("*/2*")) == [], "folders of past days remain"


def test_rows_under_a_legal_hold_are_uploaded(tmp_path: Path, bucket: BucketStandIn, outcomes: Counter[str]) -> None:
    settings = traffic.load(tmp_path, bucket=ADDRESS, models={"echo": {"legal_hold": True}})
    change(settings, lambda copy: erasure.erase(copy, JANE, "dpo", seal_seconds=0))
    spool = traffic_bucket.get_spool(settings)
    traffic.write_sealed(spool, traffic.DAY, [traffic.build_row(1, settings.hash_subject(JANE))])
    SpoolUploader(settings, lambda outcome: outcomes.update([outcome])).close()
    assert len(bucket.list_names()) == 2


def test_subject_that_is_erased_during_an_upload_is_removed_from_the_object(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str]
) -> None:
    """The erasure has listed the files before the upload ends: only the gateway knows the object."""
    spool, jane = traffic_bucket.get_spool(settings), settings.hash_subject(JANE)
    traffic.write_sealed(spool, traffic.DAY, [traffic.build_row(1, jane), traffic.build_row(2, "other")])
    text = json.dumps(Tombstone(subject=jane, requested=int(time.time()), requested_by="dpo").model_dump())

    def erase_during_upload(uri: str) -> None:
        if uri.endswith(".jsonl"):
            bucket.objects[f"{ADDRESS}/.tombstones/{jane}.json"] = text.encode(), time.time()

    bucket.before = erase_during_upload
    SpoolUploader(settings, lambda outcome: outcomes.update([outcome])).close()
    assert read_ids(settings) == ["chatcmpl-2"]
    assert jane.encode() not in bucket.read_all()


def test_erasure_waits_for_running_gateways_and_reports_stopped_ones(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_bucket, "SPOOL_WAIT_SECONDS", 20)
    jane, spool = settings.hash_subject(JANE), traffic_bucket.get_spool(settings)
    uploader = SpoolUploader(settings, lambda outcome: outcomes.update([outcome]))
    writer = TrafficWriter(spool, lambda _, outcome: outcomes.update([outcome]))
    for number, subject in enumerate((jane, "other")):
        writer.submit("echo", 10, lambda number=number, subject=subject: traffic.build_row(number, subject))  # type: ignore[misc]
    wait_until(lambda: outcomes["written"] == 2)
    assert bucket.list_names() == [], "the file is due in a minute"
    results = []
    change(settings, lambda copy: results.append(erasure.erase(copy, JANE, "dpo")))
    assert results[0].is_complete
    assert read_ids(settings) == ["chatcmpl-1"]
    assert jane.encode() not in bucket.read_all() + traffic.read_stored_bytes(spool.folder / "echo")
    bucket.is_reachable = False  # the gateway ends without its last upload
    uploader.close()
    writer.close()
    bucket.is_reachable = True
    monkeypatch.setattr(traffic_bucket, "SPOOL_WAIT_SECONDS", 0)
    change(settings, lambda copy: results.append(erasure.erase(copy, "john", "dpo")))
    (problem,) = results[1].not_searched
    assert f"may have rows in {spool.folder}; start it and repeat the command" in problem
    assert answer_in_process("traffic", "status", cwd=settings.folder.parent)["unfinished_erasures"] == [
        settings.hash_subject("john")
    ]


def test_copy_is_complete_although_the_bucket_changes_during_the_download(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, bucket)
    for name in ("../outside.jsonl", "echo/../../outside.json", "notes.txt", ".tombstones/../x.json"):
        bucket.objects[f"{ADDRESS}/{name}"] = b"x", 0.0
    download_file, calls = bucket.download_file, list[str]()

    def compact_meanwhile(uri: str, path: Path, size: int, moved: Callable[[int], None]) -> None:
        calls.append(uri)
        if len(calls) == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("components.common.artifacts.object_storage.download_file", download_file)
                change(settings, lambda copy: compaction.compact(copy, TODAY))
        download_file(uri, path, size, moved)

    monkeypatch.setattr(traffic_bucket, "PARALLEL_FILES", 1)
    monkeypatch.setattr("components.common.artifacts.object_storage.download_file", compact_meanwhile)
    with traffic_bucket.open_copy(settings) as copy:
        assert traffic.list_ids(traffic.read_rows(copy)) == ALL_IDS
        files = [path.name for path in copy.folder.rglob("*") if path.is_file()]
        assert sorted(files) == [".index.json", "rows.parquet", "rows.parquet"]
    assert len(calls) > 3, "the compaction came after the download"


def test_command_that_changes_the_traffic_excludes_others(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, bucket)
    lock = f"{ADDRESS}/.lock/"
    with traffic_bucket.open_copy(settings, changes=True):
        assert read_ids(settings) == ALL_IDS, "readers are not excluded"
        error = refusal(1, "traffic", "compact", cwd=settings.folder.parent)
        assert error["kind"] == "busy"
        assert (
            f"process {os.getpid()} on {socket.gethostname()} is changing the traffic in {ADDRESS}" in error["message"]
        )
        assert f"delete {lock}{liveness.identify_host()}.{os.getpid()}-" in error["hint"]
    assert not [uri for uri in bucket.objects if uri.startswith(lock)]
    bucket.objects[f"{lock}{liveness.identify_host()}.1-1.00000000"] = b"", time.time()  # ended
    bucket.objects[f"{lock}another-00000000.1-1.00000000"] = b"", time.time() - 601  # without a heartbeat
    change(settings, lambda _: None)
    assert not [uri for uri in bucket.objects if uri.startswith(lock)]
    bucket.objects[f"{lock}another-00000000.1-1.00000000"] = b"", time.time() - 599
    with pytest.raises(BusyError, match="process 1 on another is changing"):
        change(settings, lambda _: None)


def test_command_that_has_lost_its_lock_writes_nothing(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, bucket)
    names = bucket.list_names()

    def compact_slowly(copy: CaptureSettings) -> None:
        compaction.compact(copy, TODAY)
        now = traffic_bucket._read_clock()
        monkeypatch.setattr(traffic_bucket, "_read_clock", lambda: now + 301)

    with pytest.raises(BusyError, match="was not renewed for 301 seconds"):
        change(settings, compact_slowly)
    assert bucket.list_names() == names


def test_lock_is_renewed(settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.005)
    with traffic_bucket.open_copy(settings, changes=True):
        (lock,) = [uri for uri in bucket.objects if "/.lock/" in uri]
        first = bucket.objects[lock][1]
        wait_until(lambda: bucket.objects[lock][1] > first)
    time.sleep(0.02)
    assert lock not in bucket.objects


@pytest.mark.parametrize(("versions", "message"), [(True, "keeps versions"), (None, "could not be checked")])
def test_bucket_whose_objects_cannot_be_erased_is_refused(
    settings: CaptureSettings, bucket: BucketStandIn, versions: bool | None, message: str, outcomes: Counter[str]
) -> None:
    fill(settings, bucket)
    bucket.versions = versions
    home, before = settings.folder.parent, bucket.changes
    for command in (("compact",), ("erase", "--subject", JANE), ("status",)):
        assert message in refusal(2, "traffic", *command, cwd=home)["message"]
    with pytest.raises(Exception, match=message):
        SpoolUploader(settings, lambda outcome: outcomes.update([outcome]))
    assert bucket.changes == before
    assert len(answer_in_process("traffic", "list", cwd=home)["answers"]) == 12


def test_folder_with_rows_that_are_not_in_the_bucket_is_refused(settings: CaptureSettings) -> None:
    path = traffic.write_sealed(settings, traffic.DAY, [traffic.build_row(1)])
    message = refusal(2, "traffic", "status", cwd=settings.folder.parent)["message"]
    assert message == f"{path.parent.parent} has captured rows that are not in {ADDRESS}"


def test_gateway_does_not_start_without_the_bucket(
    settings: CaptureSettings, bucket: BucketStandIn, outcomes: Counter[str]
) -> None:
    bucket.is_reachable = False
    with pytest.raises(EngineMissingError, match="cannot be reached"):
        TrafficCapture(settings, CollectorRegistry())
    with pytest.raises(EngineMissingError, match="cannot be reached"):
        traffic_bucket.check_capture_file(settings.folder.parent / "capture.yaml")


def test_object_of_another_size_is_reported(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, bucket)
    names = bucket.list_names()
    monkeypatch.setattr("components.common.artifacts.object_storage.get_size", lambda _: 7)
    error = refusal(1, "traffic", "compact", cwd=settings.folder.parent)
    assert (error["kind"], "rows.parquet has 7 bytes after the upload; expected" in error["message"]) == (
        "engine_missing",
        True,
    )
    assert set(names) <= set(bucket.list_names()), "sealed files were deleted"


def test_invalid_address_is_refused(tmp_path: Path) -> None:
    traffic.write_capture_file(tmp_path, bucket="https://captured")
    assert "bucket" in refusal(2, "traffic", "status", cwd=tmp_path)["message"]


def test_export_is_recorded_in_the_bucket_before_its_rows_and_erased_on_its_machine(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(settings, bucket)
    home, jane = settings.folder.parent, settings.hash_subject(JANE)
    exists: list[bool] = []
    bucket.before = lambda uri: exists.append((home / "rows").exists()) if "/.exports/" in uri else None
    result = answer_in_process("traffic", "export", "-o", "rows", "--unrated", cwd=home)
    assert (result["conversations"], exists[0]) == (12, False)
    bucket.before = lambda _: None
    (record,) = [name for name in bucket.list_names() if name.startswith(".exports/")]

    def erase(*options: str) -> tuple[int, dict[str, object]]:
        process = run_in_process("traffic", "erase", "--subject", JANE, *options, "--json", cwd=home)
        return process.returncode, json.loads(process.stdout)

    here = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    code, result = erase()
    assert (code, result["rows"], result["exported"]) == (1, 4, 0)
    assert result["not_searched"] == [
        f"the export {home / 'rows'} is on {here}; run the command there too, or delete {ADDRESS}/{record}"
    ]
    assert jane.encode() in traffic.read_stored_bytes(home / "rows")
    monkeypatch.setattr(socket, "gethostname", lambda: here)
    code, result = erase()
    assert (code, result["exported"]) == (0, 4)
    assert jane.encode() not in traffic.read_stored_bytes(home / "rows")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert erase()[0] == 0, "the folder was searched"
    line = {"id": "chatcmpl-1", "author": jane, "correction": "x"}
    (home / "feedback.jsonl").write_text(json.dumps(line) + "\n")
    assert erase("--feedback", "feedback.jsonl")[0] == 1, "it was not searched for Jane's correction"


def test_export_without_rows_leaves_no_record(settings: CaptureSettings, bucket: BucketStandIn) -> None:
    change(settings, lambda _: None)
    refusal(1, "traffic", "export", "-o", "rows", cwd=settings.folder.parent)
    assert bucket.list_names() == []


def test_killed_command_leaves_no_copy_after_the_next(settings: CaptureSettings, bucket: BucketStandIn) -> None:
    fill(settings, bucket)
    left = settings.folder / f"{traffic_bucket.COPY_PREFIX}.{liveness.identify_host()}.1-1.00000000"
    left.mkdir()
    assert read_ids(settings) == ALL_IDS
    assert not left.exists()
    assert tombstones.read_tombstones(settings.folder) == {}
    assert not job_folders.is_locked(settings.folder)


def test_explanation_of_another_answer_downloads_only_the_tombstones(
    settings: CaptureSettings, bucket: BucketStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, bucket)
    change(settings, lambda copy: erasure.erase(copy, JANE, "dpo", seal_seconds=0))
    downloads = list[str]()

    def download_file(uri: str, *arguments: Any) -> None:
        downloads.append(uri)
        bucket.download_file(uri, *arguments)

    monkeypatch.setattr("components.common.artifacts.object_storage.download_file", download_file)
    answer, erased = _read_traffic(settings.folder.parent / "capture.yaml", "")
    assert (answer, list(erased or {})) == (None, [settings.hash_subject(JANE)])
    assert downloads == [f"{ADDRESS}/.tombstones/{settings.hash_subject(JANE)}.json"]
    found, _ = _read_traffic(settings.folder.parent / "capture.yaml", "chatcmpl-1")
    assert found is not None
