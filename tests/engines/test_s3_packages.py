"""A package published to a real S3 server, and served from there by the real Triton."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from components.common import artifacts, models
from components.common.errors import EngineMissingError
from components.common.progress import Silent
from components.triton_packaging import engine, server
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from tests.engines.s3_server import S3, free_ports
from tests.tiny import tiny_model
from tests.triton_packaging.clients import by_transformers

pytestmark = [pytest.mark.s3, pytest.mark.triton]


@pytest.fixture
def bucket(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new bucket, and this process pointed at it."""
    s3_server.use(monkeypatch)
    name = f"packages-{tmp_path.name.replace('_', '-').lower()[-20:]}"
    s3_server.client().create_bucket(Bucket=name)
    return name


def made(tmp_path: Path, target: str) -> artifacts.Artifact:
    base = models.open_model(tiny_model(tmp_path / "base"))
    return package(base, tmp_path / "out", TritonPackagingConfig(prove=False, publish_to=target), seed=1, reporter=Silent())


def test_a_package_is_published_once_under_its_digest(s3_server: S3, bucket: str, tmp_path: Path) -> None:
    done = made(tmp_path, f"s3://{bucket}/triton")
    client = s3_server.client()
    listed = {one["Key"]: one["LastModified"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert set(listed) == {f"triton/{done.sha256}/{path}" for path in (*(file.path for file in done.manifest.files), "manifest.json")}
    assert max(listed, key=lambda key: listed[key]).endswith("manifest.json")
    made(tmp_path, f"s3://{bucket}/triton")
    assert {one["Key"]: one["LastModified"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]} == listed
    manifest = client.get_object(Bucket=bucket, Key=f"triton/{done.sha256}/manifest.json")["Body"].read()
    assert json.loads(manifest)["content_sha256"] == done.sha256


def test_triton_serves_a_package_from_the_bucket(s3_server: S3, bucket: str, tmp_path: Path) -> None:
    done = made(tmp_path, f"s3://{bucket}/triton")
    names, ports = ["tuneline", "tuneline_stream"], tuple(free_ports(3))
    backends = engine.make_backend_folder(tmp_path / "backends")
    command = server._command(Path("/"), backends, names, "127.0.0.1", ports, f"tuneline_{os.getpid()}_s3_")  # type: ignore[arg-type]
    command[1] = f"--model-repository=s3://{s3_server.endpoint}/{bucket}/triton/{done.sha256}"
    running = server._start(command, tmp_path, tmp_path / "log")
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        assert server._wait_ready(running, url, names, tmp_path / "log", 300, Silent()) == "2.51.0"
        asked = {"text_input": "Name the fox.", "max_tokens": 12}
        answer = server.get_json(f"{url}/v2/models/tuneline/generate", method="POST", body=asked)
        assert answer["text_output"] == by_transformers(models.open_model(tmp_path / "base"), "Name the fox.", 12)
    finally:
        server._stop(running)


def test_a_refused_key_is_told_and_the_package_is_kept(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(EngineMissingError, match=f"cannot be published: s3://{bucket}/triton/"):
        made(tmp_path, f"s3://{bucket}/triton")
    assert artifacts.read(tmp_path / "out", "repository")
