"""Rendezvous and messages of the two participants, through files in the probed folder.

A message is a file that is written once: the SHA-256 of a JSON document, then the document. A reader retries while the
file is missing or incomplete.
"""

# Each poll first modifies the folder, which makes an NFS client revalidate names with the server.

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.common.runtime.errors import TunelineError
from components.common.workspace import job_folders
from pipelines.operations.storage_probe.probed_filesystem import Filesystem, open_file, read_file, write_durably

PROBE_PREFIX = "tuneline-probe"  # a probe's folder is tuneline-probe.<host>.<process>.<digits>
MESSAGES_FOLDER, PAIR_FILENAME, HEARTBEAT_PREFIX = "talk", "pair", "alive"
POLL_INTERVAL_SECONDS = (0.01, 0.25)  # the initial and the maximum interval
HEARTBEAT_CHECK_SECONDS = 5.0


class PartnerError(TunelineError):
    """The partner did not join, exited, or stopped responding."""

    kind = "partner"


def assume_alive() -> None:
    """Do nothing: the status of a partner on another host is known only from its files."""


class MessageChannel:
    """The messages between this participant and its partner."""

    def __init__(
        self,
        fs: Filesystem,
        folder: Path,
        rank: int,
        check_partner: Callable[[], None] = assume_alive,
        visibility_timeout: float = 0.0,
    ) -> None:
        """Create the channel of a rank.

        Args:
            fs: the probed storage.
            folder: the folder of the messages.
            rank: 0 or 1.
            check_partner: raises PartnerError if the partner is known to have exited.
            visibility_timeout: maximum delay of a heartbeat in seconds.
        """
        self._fs, self._folder, self.rank, self._check_partner = fs, folder, rank, check_partner
        self._max_silence = job_folders.LOCK_STALE_AFTER_SECONDS + visibility_timeout

    def post(self, name: str, value: object) -> None:
        """Write a message under an unused name."""
        body = json.dumps({"value": value}).encode()
        digest = hashlib.sha256(body).hexdigest()
        write_durably(self._fs, self._folder / f"{name}.{self.rank}", f"{digest}\n".encode() + body)

    def receive(self, name: str) -> dict[str, Any] | None:
        """Return {"value"} of the partner's message, or None if it is missing or incomplete."""
        filename = f"{name}.{1 - self.rank}"
        # A name that was looked up in vain stays missing in an NFS client's cache, and the client's own changes of the
        # folder can renew the cache. Opening a folder revalidates it with the server, so its listing is current.
        if filename not in self._fs.names(self._folder):
            return None
        try:
            digest, _, body = read_file(self._fs, self._folder / filename).partition(b"\n")
        except FileNotFoundError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def wait(self, names: tuple[str, ...], seconds: float) -> tuple[str, Any]:
        """Return name and value of the first of these messages that the partner posts.

        Args:
            names: the names of the expected messages.
            seconds: the timeout.

        Raises:
            PartnerError: the partner exited, sent no heartbeat, or did not post within `seconds`.
        """
        deadline, pause = time.monotonic() + seconds, POLL_INTERVAL_SECONDS[0]
        next_heartbeat_check = time.monotonic() + HEARTBEAT_CHECK_SECONDS
        heartbeat_file = self._folder / f"{HEARTBEAT_PREFIX}.{1 - self.rank}"
        while True:
            for name in names:
                if message := self.receive(name):
                    return name, message["value"]
            self._check_partner()
            if time.monotonic() > next_heartbeat_check:
                with suppress(OSError):  # the heartbeat file is not visible yet
                    # Opening the file revalidates its cached time, which is by the server's clock.
                    with open_file(self._fs, heartbeat_file, os.O_RDONLY) as descriptor:
                        last = self._fs.fstat(descriptor).st_mtime
                    self._fs.refresh(self._folder)
                    if self._fs.stat(self._folder).st_mtime - last > self._max_silence:
                        raise PartnerError(
                            f"no heartbeat from the partner for {self._max_silence:.0f} seconds",
                            hint="See the partner's output for the cause.",
                        )
                next_heartbeat_check = time.monotonic() + HEARTBEAT_CHECK_SECONDS
            if time.monotonic() > deadline:
                raise PartnerError(
                    f"the partner did not send {names[0]} within {seconds:.0f} seconds",
                    hint='Check the partner\'s output and dmesg; dmesg reports a hung mount as "server not responding".',
                )
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_INTERVAL_SECONDS[1])
            self._fs.refresh(self._folder)


def create_pair_files(fs: Filesystem, folder: Path, pair: str) -> None:
    """Create the files that identify the probe's folder to a joining participant."""
    with suppress(FileExistsError):  # over NFS, a mkdir whose answer was lost is repeated
        fs.mkdir(folder / MESSAGES_FOLDER)
    write_durably(fs, folder / PAIR_FILENAME, pair.encode())


def await_partner(
    fs: Filesystem,
    folder: Path,
    plan: dict[str, Any],
    seconds: float,
    check_partner: Callable[[], None] = assume_alive,
) -> None:
    """Wait until a partner joins, and send the plan to the first partner.

    Args:
        fs: the probed storage.
        folder: the folder of the probe.
        plan: the fields of the ProbePlan.
        seconds: the timeout.
        check_partner: raises PartnerError if the partner is known to have exited.

    Raises:
        PartnerError: no partner joined within `seconds`.
    """
    deadline = time.monotonic() + seconds
    messages = folder / MESSAGES_FOLDER
    while True:
        fs.refresh(messages)
        if join_requests := sorted(name for name in fs.names(messages) if name.startswith("hello.")):
            write_durably(fs, messages / join_requests[0].replace("hello", "welcome"), json.dumps(plan).encode())
            return
        check_partner()
        if time.monotonic() > deadline:
            raise PartnerError(
                f"no partner joined {folder} within {seconds:.0f} seconds",
                hint="On the other host, start the same command with the same --pair and path, and the other --rank.",
            )
        time.sleep(POLL_INTERVAL_SECONDS[1])


def find_partner(fs: Filesystem, path: Path, pair: str, seconds: float) -> tuple[Path, dict[str, Any]]:
    """Find the leader's folder below a path and request its plan. Ignore the folders of killed probes.

    Returns:
        The leader's folder, and the fields of the leader's ProbePlan.

    Raises:
        PartnerError: no leader responded within `seconds`.
        PermissionError: this user has no write access to the leader's folder.
    """
    deadline, own_id = time.monotonic() + seconds, secrets.token_hex(8)
    requested: set[Path] = set()
    denied: PermissionError | None = None
    while time.monotonic() < deadline:
        fs.refresh(path)
        for folder in sorted(path / name for name in fs.names(path) if name.startswith(f"{PROBE_PREFIX}.")):
            messages = folder / MESSAGES_FOLDER
            try:
                if folder not in requested:  # post one join request per leader
                    if read_file(fs, folder / PAIR_FILENAME) != pair.encode():
                        continue
                    write_durably(fs, messages / f"hello.{own_id}", b"")
                    requested.add(folder)
                fs.refresh(messages)
                if f"welcome.{own_id}" in fs.names(messages):  # see MessageChannel.receive
                    return folder, json.loads(read_file(fs, messages / f"welcome.{own_id}"))
            except PermissionError as error:
                denied = error
            except (OSError, ValueError):  # just removed, not accepted yet, or incomplete
                continue
        time.sleep(POLL_INTERVAL_SECONDS[1])
    if denied:
        raise denied
    raise PartnerError(
        f"no leader of this pair is in {path} after {seconds:.0f} seconds",
        hint=f"Start the same command with --pair {pair} --rank 0 on the other host, with the same shared folder.",
    )
