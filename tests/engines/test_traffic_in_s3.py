"""Captured traffic in a bucket of a real S3 server, with processes that are killed at random moments."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import hashing, object_storage
from pipelines.capture import spool_upload, traffic_bucket, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.spool_upload import SpoolUploader
from pipelines.config.customization_config import Customization
from pipelines.runs import local_runner
from tests.engines.s3_server import S3
from tests.pipelines import test_drift
from tests.pipelines.capture import traffic
from tests.pipelines.command import COMMAND, answer, answer_in_process, environment, refusal
from tests.pipelines.retraining import test_retraining

pytestmark = pytest.mark.s3
JANE = "jane"
LOST_SECONDS = 1.0  # the queue and the time between two writes
YESTERDAY = traffic_files.now() - timedelta(days=1)

GATEWAY = """
import sys, time
from pathlib import Path
from prometheus_client import CollectorRegistry
from pipelines.capture import spool_upload
from pipelines.capture.settings import load_settings
from pipelines.gateway.traffic_capture import TrafficCapture
from tests.pipelines.capture.traffic import build_row

spool_upload.POLL_SECONDS = 0.05
settings = load_settings(Path(sys.argv[1])).model_copy(update={"upload_seconds": 0.2})
capture = TrafficCapture(settings, CollectorRegistry())
jane, number = settings.hash_subject("jane"), int(sys.argv[2])
while True:
    subject, now = jane if number % 3 == 0 else "other", int(time.time())
    capture._writer.submit("a model/x", 10, lambda n=number, s=subject, t=now: build_row(n, s, t))
    print(number, time.time(), flush=True)
    number += 1
    time.sleep(0.002)
"""


@pytest.fixture
def settings(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CaptureSettings:
    """A capture file whose bucket is new."""
    s3_server.use(monkeypatch)
    bucket = f"traffic-{hashing.digest(str(tmp_path))[:12]}"
    s3_server.client().create_bucket(Bucket=bucket)
    return traffic.load(tmp_path, bucket=f"s3://{bucket}/team-a/captured")


def read_objects(client: Any, settings: CaptureSettings) -> dict[str, bytes]:
    """Return the contents of all objects by name, without the tombstones."""
    bucket, _, prefix = settings.bucket.removeprefix("s3://").partition("/")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", []) if "/.tombstones/" not in entry["Key"]]
    return {key.removeprefix(f"{prefix}/"): client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}


def read_rows(settings: CaptureSettings) -> list[dict[str, Any]]:
    with traffic_bucket.open_copy(settings) as copy:
        return traffic.read_rows(copy)


def upload(settings: CaptureSettings, rows: list[traffic.Row]) -> None:
    path = traffic.write_sealed(traffic_bucket.get_spool(settings), YESTERDAY, rows)
    traffic_bucket.upload_file(traffic_bucket.get_spool(settings), path)
    path.unlink()


def upload_in_files(settings: CaptureSettings, count: int) -> None:
    """Store rows of yesterday in small files; every third row is Jane's."""
    jane, now = settings.hash_subject(JANE), int(YESTERDAY.timestamp())
    for first in range(0, count, 3):
        numbers = range(first, first + 3)
        upload(settings, [traffic.build_row(n, jane if n % 3 == 0 else "other", now) for n in numbers])


def run_killed_gateway(home: Path, first: int, seconds: float) -> Iterator[tuple[int, bool]]:
    """Run a gateway's capture and kill it; yield its rows, and whether each was submitted early enough to be stored."""
    command = [sys.executable, "-c", GATEWAY, str(home / "capture.yaml"), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        stop = time.time() + seconds
        while time.time() < stop:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        lines += process.stdout.readlines()
    for number, submitted in (line.split() for line in lines if line.endswith("\n")):
        yield int(number), float(submitted) < killed - LOST_SECONDS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [pytest.param(4, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.stress)])
def test_killed_gateway_loses_at_most_a_second_and_repeats_no_row(
    s3_server: S3, settings: CaptureSettings, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long tier: it kills processes. Stress tier: 20 of them take minutes."""
    monkeypatch.setattr(spool_upload, "CLOSE_SECONDS", 60.0)
    generator, due, submitted = random.Random(5), set[str](), set[str]()
    for kill in range(kills):
        for number, is_due in run_killed_gateway(tmp_path, kill * 100_000, 1.2 + generator.random()):
            submitted.add(f"chatcmpl-{number}")
            if is_due:
                due.add(f"chatcmpl-{number}")
        ids = traffic.list_ids(read_rows(settings))
        assert len(ids) == len(set(ids)), "a row is repeated before the next start"
    assert any(name.startswith("a%20model%2Fx/") for name in read_objects(s3_server.client(), settings))
    SpoolUploader(settings, lambda _: None).close()
    ids = traffic.list_ids(read_rows(settings))
    assert len(ids) == len(set(ids))
    assert due <= set(ids) <= submitted
    assert list(traffic_bucket.get_spool(settings).folder.glob("*/*/*/*")) == []
    erased = answer("traffic", "erase", "--subject", JANE, cwd=tmp_path)
    assert (erased["complete"], erased["rows"]) == (True, sum(int(each[9:]) % 3 == 0 for each in ids))
    stored = b"".join(read_objects(s3_server.client(), settings).values()) + traffic.read_stored_bytes(
        traffic_bucket.get_spool(settings).folder / "a%20model%2Fx"
    )
    assert settings.hash_subject(JANE).encode() not in stored
    assert traffic.list_ids(read_rows(settings)) == [each for each in ids if int(each[9:]) % 3]


def kill_command(home: Path, arguments: tuple[str, ...], seconds: float) -> bool:
    """Run a command and kill it after this time; return whether it had not ended."""
    with subprocess.Popen(
        [*COMMAND, "traffic", *arguments],
        cwd=home, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as command:  # fmt: skip
        time.sleep(seconds)
        is_running = command.poll() is None
        command.kill()
    return is_running


def measure(home: Path, *arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([*COMMAND, "traffic", *arguments], cwd=home, env=environment(), check=True, capture_output=True)
    return time.perf_counter() - started


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.stress)])
def test_killed_compaction_and_erasure_are_completed_by_the_next(
    s3_server: S3, settings: CaptureSettings, tmp_path: Path, kills: int
) -> None:
    """Long tier: it kills processes. Stress tier: 20 of each take minutes."""
    client, generator, unfinished, count = s3_server.client(), random.Random(6), 0, 60
    compact, erase = ("compact",), ("erase", "--subject", JANE)
    everyone = sorted(f"chatcmpl-{n}" for n in range(count))
    others = sorted(f"chatcmpl-{n}" for n in range(count) if n % 3)
    digest = settings.hash_subject(JANE).encode()
    for number in range(kills):
        for name in object_storage.list_sizes(settings.bucket):
            object_storage.delete_object(f"{settings.bucket}/{name}")
        upload_in_files(settings, count)
        start = measure(tmp_path, "list")  # a command that changes nothing
        unfinished += kill_command(tmp_path, compact, start * generator.uniform(0.5, 1.5))
        assert traffic.list_ids(read_rows(settings)) == everyone, number
        answer("traffic", *compact, cwd=tmp_path)
        assert traffic.list_ids(read_rows(settings)) == everyone, number
        assert [name.rpartition("/")[2] for name in read_objects(client, settings)] == ["rows.parquet"], number
        unfinished += kill_command(tmp_path, erase, start * generator.uniform(0.5, 1.5))
        assert set(others) <= set(traffic.list_ids(read_rows(settings))), number
        answer("traffic", *erase, cwd=tmp_path)
        assert traffic.list_ids(read_rows(settings)) == others, number
        stored = b"".join(read_objects(client, settings).values())
        assert digest not in stored, number
        left = [path for path in settings.folder.rglob("*") if path.is_file() and digest in path.read_bytes()]
        assert not left, number
        assert not any(path.name.startswith(".copy") for path in settings.folder.iterdir()), number
    assert unfinished >= kills / 2, "the kills came after the end of the commands"


def test_bucket_with_versions_is_refused(s3_server: S3, settings: CaptureSettings, tmp_path: Path) -> None:
    client, bucket = s3_server.client(), settings.bucket.removeprefix("s3://").partition("/")[0]
    assert object_storage.keeps_versions(settings.bucket) is False
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert "keeps versions" in refusal(2, "traffic", "status", cwd=tmp_path, **s3_server.environment())["message"]
    client.put_object(Bucket=bucket, Key="elsewhere/x", Body=b"1")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    assert object_storage.keeps_versions(settings.bucket) is False, "no version is below the prefix"
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.put_object(Bucket=bucket, Key="team-a/captured/x", Body=b"1")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    assert object_storage.keeps_versions(settings.bucket) is True


def test_parts_of_a_killed_upload_are_removed_by_the_next_command(
    s3_server: S3, settings: CaptureSettings, tmp_path: Path
) -> None:
    client, bucket = s3_server.client(), settings.bucket.removeprefix("s3://").partition("/")[0]
    key = "team-a/captured/echo/2026-11-23/rows.parquet"
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=1, Body=b"text of a row")
    answer("traffic", "compact", cwd=tmp_path)
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


def test_unusable_bucket_stops_the_start_with_the_cause(
    s3_server: S3, settings: CaptureSettings, tmp_path: Path
) -> None:
    def get_cause(**changes: str) -> str:
        variables = {**s3_server.environment(), **changes}
        command = ("gateway", "--grpc-url", "127.0.0.1:9", "--capture", "capture.yaml")
        return refusal(1, *command, cwd=tmp_path, **variables)["message"]

    assert "is not permitted with these credentials" in get_cause(AWS_SECRET_ACCESS_KEY="another")
    assert "cannot be reached at http://127.0.0.1:9" in get_cause(AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert "requires credentials" in get_cause(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")


registry, fake_embedder = test_retraining.registry, test_drift.fake_embedder


def move_to_bucket(settings: CaptureSettings, folder: Path) -> None:
    """Upload the captured files of a folder, as a gateway does, and delete them."""
    spool = traffic_bucket.get_spool(settings)
    for path in sorted(folder.glob("echo/*/*/*.jsonl")):
        spooled = spool.folder / path.relative_to(folder)
        spooled.parent.mkdir(parents=True, exist_ok=True)
        path.rename(spooled)
        traffic_bucket.upload_file(spool, spooled)
        spooled.unlink()
    shutil.rmtree(folder / "echo")


def test_retraining_exports_from_the_bucket_and_an_erasure_withdraws_its_candidate(
    registry: test_retraining.FakeRegistry,
    s3_server: S3,
    settings: CaptureSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pipeline's run is replaced, as in the tests of `tuneline retrain`."""
    traffic.load(tmp_path, bucket=settings.bucket)
    move_to_bucket(settings, tmp_path / "traffic")
    digest = settings.hash_subject("user 5").encode()
    found = []

    def run(customization: Customization, *_: object, **__: object) -> dict[str, Any]:
        found.append(digest in traffic.read_stored_bytes(tmp_path / "retraining"))
        if len(found) == 1:
            answer("traffic", "erase", "--subject", "user 5", cwd=tmp_path)
        return registry.run(customization)

    monkeypatch.setattr(local_runner, "run", run)
    cycle = answer_in_process(*test_retraining.COMMAND, cwd=tmp_path, **s3_server.environment())["retraining"]
    assert (found, cycle["decision"], registry.promoted) == ([True, False], "promoted", ["2"])
    export = json.loads((Path(cycle["rows"]) / "export.json").read_text())
    assert export["conversations"] + export["held_back"] == test_retraining.SUBJECTS - 1
    assert not list((tmp_path / "traffic").glob("echo/*/*/*")), "the copy is not removed"


@pytest.mark.usefixtures("fake_embedder")
def test_drift_of_a_bucket_equals_that_of_a_folder(s3_server: S3, settings: CaptureSettings, tmp_path: Path) -> None:
    test_drift.write_home(tmp_path, days=12, foreign_from=9)
    command = ("traffic", "drift", *test_drift.OPTIONS)
    expected = answer_in_process(*command, cwd=tmp_path)
    traffic.load(tmp_path, bucket=settings.bucket)
    move_to_bucket(settings, tmp_path / "traffic")
    assert expected["alarm"]
    assert answer_in_process(*command, cwd=tmp_path, **s3_server.environment()) == expected
