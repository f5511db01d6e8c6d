"""Serving a package from the shell: one command, a real Triton, a clean end."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.common import artifacts, places
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, UsageError
from components.common.jobs import private_folder
from components.common.progress import Reporter
from components.triton_packaging import parts
from components.triton_packaging.pbtxt import CONFIG, read, stream_name
from components.triton_packaging.server import Server, running_server


def serve(
    repository: Path,
    *,
    on_ready: Callable[[Server], None],
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    host: str = "127.0.0.1",
    ready_timeout: float = 300.0,
    log: Path | None = None,
    reporter: Reporter | None = None,
) -> None:
    """Serve a finished package until SIGINT or SIGTERM, then stop the server and return. Call it from the main thread.

    Every file is checked against its digest first. `on_ready` is called once the model answers. Port 0 is any free one. Raises
    UsageError for a repository that tuneline did not make, ArtifactDamagedError naming a changed or an added file, and what
    running_server raises; EngineMissingError too when the server ends by itself.
    """
    artifact = verified(repository)
    parameters = read(repository / model_names(artifact)[0]).parameters
    used = places.using(*(one.folder for one in parts.references(parameters)))
    with private_folder(Path(tempfile.gettempdir()), "tuneline-serve", mode=0o700) as work, used, until_signal():
        server_log = log or work / "triton.log"
        names = model_names(artifact)
        with running_server(
            repository, models=names, log=server_log, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port,
            host=host, ready_timeout=ready_timeout, reporter=reporter,
        ) as server:  # fmt: skip
            on_ready(server)
            while True:
                time.sleep(0.5)
                server.check_alive()


def verified(repository: Path) -> Artifact:
    """The package in this folder and what it refers to, every file checked and none added: Triton would serve an added version."""
    if repository.is_dir() and not (repository / artifacts.MANIFEST).exists() and any(repository.glob(f"*/{CONFIG}")):
        raise UsageError(
            f"{repository} was not packaged by tuneline: it has no {artifacts.MANIFEST} to check its files against",
            hint="Package the model with `tuneline package MODEL -o DIR`, or start tritonserver on it yourself.",
        )
    artifact = artifacts.read(repository, "repository")
    known = {file.path for file in artifact.manifest.files}
    present = [path for name in model_names(artifact) for path in (repository / name).rglob("*")]
    for path in sorted(p for p in present if not p.is_dir()):
        if path.relative_to(repository).as_posix() not in known:
            raise ArtifactDamagedError(
                f"{path.relative_to(repository)} was added to the repository in {repository}", hint="Remove it, or package the model again."
            )
    for reference in parts.references(read(repository / model_names(artifact)[0]).parameters):
        parts.verify(reference)
    return artifact


def model_names(artifact: Artifact) -> list[str]:
    """The models of a package: the one that answers, and the one that streams, which older packages do not have."""
    name = str(artifact.manifest.summary["model_name"])
    return [found for found in (name, stream_name(name)) if (artifact.path / found / CONFIG).exists()]


class _Stopped(BaseException):
    """A signal asked for the end."""


@contextmanager
def until_signal() -> Iterator[None]:
    """End the block quietly at the first SIGINT or SIGTERM, also while the model still loads; later ones change nothing."""
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(_Stopped):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
