"""Runs the deployment of a second alias as a child process, so that its loads and failures never delay the first."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from components.common.runtime import process_control
from components.triton_packaging.deployment.serving_folder import REPOSITORY_FOLDER

RESTART_SECONDS = 30.0  # between two starts
STOP_SECONDS = 10.0


@dataclass
class CanaryProcess:
    """A `tuneline deploy --canary` on the server of another deployment; it is started again if it exits.

    Attributes:
        repository: the model repository of its serving folder.
    """

    repository: Path
    _command: Sequence[str]
    _child: subprocess.Popen[bytes] | None = None
    _next_start: float = 0.0

    def check_alive(self) -> None:
        """Start the process if it does not run."""
        if (self._child is not None and self._child.poll() is None) or time.monotonic() < self._next_start:
            return
        self._next_start = time.monotonic() + RESTART_SECONDS
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the parent, which stops the process
            preexec_fn=process_control.die_with_parent,
        )

    def stop(self) -> None:
        """End the process; the next start continues an interrupted load."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def get_canary_folder(folder: Path, alias: str) -> Path:
    """Return the serving folder of a canary, next to that of its stable deployment."""
    return folder.with_name(f"{folder.name}@{quote(alias, safe='')}")


@contextmanager
def prepare_canary(
    name: str, alias: str, folder: Path, grpc_url: str, options: Mapping[str, object]
) -> Iterator[CanaryProcess | None]:
    """Prepare the deployment of a second alias, and stop it at the end of the block. `check_alive` starts it.

    Args:
        name: the registered model.
        alias: the alias of the canary; "": no canary.
        folder: serving folder of the stable deployment.
        grpc_url: address of the server.
        options: further options of `tuneline deploy` with their values; empty values are left out.
    """
    if not alias:
        yield None
        return
    home = get_canary_folder(folder, alias)
    repository = home / REPOSITORY_FOLDER
    repository.mkdir(parents=True, exist_ok=True)
    given = [word for option, value in options.items() if str(value) for word in (option, str(value))]
    command = process_control.build_module_command(
        "pipelines.cli", "deploy", name, "--watch", "--canary", "--alias", alias,
        "--folder", str(home), "--grpc-url", grpc_url, "--json", *given,
    )  # fmt: skip
    process = CanaryProcess(repository, command)
    try:
        yield process
    finally:
        process.stop()
