"""Packages published to a real S3 server and served from there by a real Triton."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import triton_server
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from tests.engines.s3_server import S3
from tests.tiny import tiny_model
from tests.triton_packaging.triton_clients import generate_with_transformers, infer_grpc

pytestmark = [pytest.mark.s3, pytest.mark.triton]


@pytest.fixture
def bucket(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new bucket; this process uses its server."""
    s3_server.use(monkeypatch)
    name = f"packages-{tmp_path.name.replace('_', '-').lower()[-20:]}"
    s3_server.client().create_bucket(Bucket=name)
    return name


def publish_package(tmp_path: Path, target: str) -> artifact_folder.Artifact:
    base = model_loading.open_model(tiny_model(tmp_path / "base"))
    return package(
        base, tmp_path / "out", TritonPackagingConfig(prove=False, publish_to=target), seed=1, reporter=SilentReporter()
    )


def test_package_is_published_once_under_its_digest(s3_server: S3, bucket: str, tmp_path: Path) -> None:
    artifact = publish_package(tmp_path, f"s3://{bucket}/triton")
    client = s3_server.client()
    listed = {entry["Key"]: entry["LastModified"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert set(listed) == {
        f"triton/{artifact.sha256}/{path}"
        for path in (*(file.path for file in artifact.manifest.files), "manifest.json")
    }
    assert max(listed, key=lambda key: listed[key]).endswith("manifest.json")
    publish_package(tmp_path, f"s3://{bucket}/triton")
    assert {
        entry["Key"]: entry["LastModified"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]
    } == listed
    manifest = client.get_object(Bucket=bucket, Key=f"triton/{artifact.sha256}/manifest.json")["Body"].read()
    assert json.loads(manifest)["content_sha256"] == artifact.sha256


def test_triton_serves_a_package_from_the_bucket(
    s3_server: S3, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = publish_package(tmp_path, f"s3://{bucket}/triton")
    start = triton_server._start

    def start_with_bucket(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        flag = "--model-repository="
        location = f"{flag}s3://{s3_server.endpoint}/{bucket}/triton/{artifact.sha256}"
        return start([location if option.startswith(flag) else option for option in command], folder, log)

    monkeypatch.setattr(triton_server, "_start", start_with_bucket)
    names = ["tuneline", "tuneline_stream"]
    with triton_server.running_server(artifact.path, log=tmp_path / "log", models=names) as server:
        assert server.version == "2.51.0"
        answer = infer_grpc(server, "tuneline", text_input="Name the fox.", max_tokens=12)
    assert answer["text_output"] == generate_with_transformers(
        model_loading.open_model(tmp_path / "base"), "Name the fox.", 12
    )


def test_rejected_key_is_reported_and_package_is_kept(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(EngineMissingError, match=f"cannot be published: s3://{bucket}/triton/"):
        publish_package(tmp_path, f"s3://{bucket}/triton")
    assert artifact_folder.read(tmp_path / "out", "repository")
