"""Group of hosts that run a benchmark together, through files in the benchmark's folder.

The host of rank 0 creates the folder and removes it at the end. All hosts run the same phases; `gather` is their only
communication, and also the barrier between phases.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.runtime.errors import TunelineError, UsageError
from components.common.workspace import job_folders, liveness
from pipelines.operations.storage_probe.probed_filesystem import Filesystem, read_file, write_durably
from pipelines.operations.storage_probe.rendezvous import POLL_INTERVAL_SECONDS, PartnerError

BENCHMARK_PREFIX = "tuneline-benchmark"
GROUP_FILENAME, MESSAGES_FOLDER = "group", "messages"
# A network file system may show a heartbeat only after its attribute cache has expired (nfs(5): at most 60 s).
MAX_SILENCE_SECONDS = job_folders.LOCK_STALE_AFTER_SECONDS + 60.0
EXIT_TIMEOUT_SECONDS, FAILURE_EXIT_TIMEOUT_SECONDS = 30.0, 5.0
REMOVAL_ATTEMPTS, REMOVAL_INTERVAL_SECONDS = 50, 0.1


@dataclass
class HostGroup:
    """This host's view of the group.

    Attributes:
        folder: private folder of the benchmark, on the benchmarked storage.
        hosts: number of hosts.
        rank: rank of this host.
    """

    folder: Path
    hosts: int = 1
    rank: int = 0
    _counter: int = 0
    _fs: Filesystem = field(default_factory=Filesystem)

    def gather(self, value: object) -> list[Any]:
        """Return the values of all hosts by rank, once every host has called this method.

        Raises:
            PartnerError: a host failed, ended or stopped sending heartbeats.
        """
        if self.hosts == 1:
            return [value]
        name, self._counter = f"gather.{self._counter}", self._counter + 1
        self._post(name, value)
        values: dict[int, Any] = {self.rank: value}
        pause, next_check = POLL_INTERVAL_SECONDS[0], time.monotonic() + 5.0
        while True:
            for rank in range(self.hosts):
                if rank not in values and (message := self._receive(name, rank)):
                    values[rank] = message["value"]
            if len(values) == self.hosts:
                return [values[rank] for rank in range(self.hosts)]
            missing = [rank for rank in range(self.hosts) if rank not in values]
            for rank in missing:
                if failure := self._receive("failure", rank):
                    raise PartnerError(f"host {rank} failed: {failure['value']}", hint="See the output of that host.")
            if time.monotonic() > next_check:
                self._check_heartbeats(missing)
                next_check = time.monotonic() + 5.0
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_INTERVAL_SECONDS[1])
            with suppress(FileNotFoundError):
                self._fs.refresh(self.folder / MESSAGES_FOLDER)

    def report_failure(self, error: BaseException) -> None:
        """Tell the other hosts that this host cannot continue."""
        if self.hosts > 1:
            text = error.message if isinstance(error, TunelineError) else str(error) or type(error).__name__
            with suppress(OSError):  # the leader has removed the folder
                self._post("failure", text)

    def _post(self, name: str, value: object) -> None:
        body = json.dumps({"value": value}).encode()
        digest = hashlib.sha256(body).hexdigest()
        write_durably(self._fs, self.folder / MESSAGES_FOLDER / f"{name}.{self.rank}", f"{digest}\n".encode() + body)

    def _receive(self, name: str, rank: int) -> dict[str, Any] | None:
        """Return {"value"} of a host's message, or None if it is missing or incomplete."""
        path = self.folder / MESSAGES_FOLDER / f"{name}.{rank}"
        try:
            if path.name not in self._fs.names(path.parent):  # see MessageChannel.receive of the storage probe
                return None
            digest, _, body = read_file(self._fs, path).partition(b"\n")
        except FileNotFoundError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def _check_heartbeats(self, ranks: list[int]) -> None:
        self._check_folder()
        for rank in ranks:
            path = self.folder / MESSAGES_FOLDER / f"alive.{rank}"
            with suppress(FileNotFoundError):  # the host has not joined yet
                host, process = read_file(self._fs, path).decode().split()
                is_gone = host == liveness.identify_host() and liveness.is_process_gone(process)
                if is_gone or liveness.seconds_since_heartbeat(path) > MAX_SILENCE_SECONDS:
                    raise PartnerError(
                        f"host {rank} ended, or sent no heartbeat for {MAX_SILENCE_SECONDS:.0f} seconds",
                        hint="Read the output of that host, and start the benchmark again on all hosts.",
                    )

    def _check_folder(self) -> None:
        if not (self.folder / MESSAGES_FOLDER).exists():
            raise PartnerError("host 0 ended and removed the benchmark's folder", hint="See the output of that host.")

    @contextmanager
    def session(self, wait_seconds: float) -> Iterator[None]:
        """Send heartbeats within the block, wait for all hosts at its start, and report a failure of this host."""
        if self.hosts == 1:
            yield
            return
        alive = self.folder / MESSAGES_FOLDER / f"alive.{self.rank}"
        identity = f"{liveness.identify_host()} {liveness.identify_process()}"
        write_durably(self._fs, alive, identity.encode())
        with liveness.heartbeat(alive):
            self._wait_for(["alive"], wait_seconds)
            try:
                yield
            except BaseException as error:
                self.report_failure(error)
                if isinstance(error, Exception):  # not after Ctrl-C
                    self._wait_for_exit(FAILURE_EXIT_TIMEOUT_SECONDS)
                if isinstance(error, FileNotFoundError):
                    self._check_folder()
                raise
            self._post("finished", None)
            self._wait_for_exit(EXIT_TIMEOUT_SECONDS)

    def _wait_for_exit(self, seconds: float) -> None:
        """Let the other hosts read the last messages, before the leader removes the folder."""
        if self.rank == 0:
            with suppress(PartnerError):
                self._wait_for(["finished", "failure"], seconds)

    def _wait_for(self, names: list[str], seconds: float) -> None:
        """Wait until every host has posted one of these messages."""
        deadline, folder = time.monotonic() + seconds, self.folder / MESSAGES_FOLDER
        while True:
            posted: list[str] = []
            with suppress(FileNotFoundError):
                self._fs.refresh(folder)
                posted = self._fs.names(folder)
            found = {rank for rank in range(self.hosts) for name in names if f"{name}.{rank}" in posted}
            if len(found) == self.hosts:
                return
            if time.monotonic() > deadline:
                raise PartnerError(
                    f"{len(found)} of {self.hosts} hosts joined {self.folder} within {seconds:.0f} seconds",
                    hint="Start the same command on every host, with the same --group, --hosts and path.",
                )
            time.sleep(POLL_INTERVAL_SECONDS[1])


def check_path(path: Path) -> None:
    """Refuse a path that is not a folder.

    Raises:
        UsageError: the path is not an existing folder.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is not an existing folder",
            hint="Specify a folder on the storage; the benchmark works in a subfolder of it.",
        )


@contextmanager
def open_group(path: Path, group: str, hosts: int, rank: int, wait_seconds: float) -> Iterator[HostGroup]:
    """Create the benchmark's folder (rank 0) or find it, and wait for all hosts.

    Args:
        path: folder on the storage.
        group: name that all hosts share.
        wait_seconds: timeout for the other hosts.

    Raises:
        PartnerError: a host did not join, failed or ended.
    """
    with ExitStack() as stack:
        if rank == 0:
            folder = stack.enter_context(job_folders.private_folder(path, BENCHMARK_PREFIX))
            stack.callback(_remove, folder)
            (folder / MESSAGES_FOLDER).mkdir(exist_ok=True)  # over NFS, a mkdir whose answer was lost is repeated
            write_durably(Filesystem(), folder / GROUP_FILENAME, group.encode())
        else:
            folder = _find_folder(path, group, wait_seconds)
        members = HostGroup(folder, hosts, rank)
        stack.enter_context(members.session(wait_seconds))
        yield members


def _remove(folder: Path) -> None:
    """Remove a folder in which other hosts may still create files."""
    for _ in range(REMOVAL_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVAL_INTERVAL_SECONDS)


def _find_folder(path: Path, group: str, seconds: float) -> Path:
    """Return the folder of the group's leader, whose heartbeat is recent."""
    fs, deadline = Filesystem(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        fs.refresh(path)
        for folder in sorted(path.glob(f"{BENCHMARK_PREFIX}.*")):
            with suppress(OSError):  # just removed, or of another user
                is_ours = read_file(fs, folder / GROUP_FILENAME) == group.encode()
                is_stale = liveness.seconds_since_heartbeat(folder) > MAX_SILENCE_SECONDS
                if is_ours and not is_stale and not job_folders.is_abandoned(folder, BENCHMARK_PREFIX):
                    return folder
        time.sleep(POLL_INTERVAL_SECONDS[1])
    raise PartnerError(
        f"no leader of this group is in {path} after {seconds:.0f} seconds",
        hint=f"Start the same command with --group {group} --rank 0 on another host, with the same shared folder.",
    )
