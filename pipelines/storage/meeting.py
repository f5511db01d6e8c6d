"""How the two sides meet and talk: through files in a folder of the storage that they probe.

A message is a file of its own that is written once: a JSON object below the SHA-256 of its bytes. So a side that sees it late, or half of
it, only looks again. Each look first changes the folder, which makes an NFS client ask the server for its names.
"""

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

from components.common import jobs
from components.common.errors import TunelineError
from pipelines.storage.filesystem import Filesystem, content, keep

PREFIX = "tuneline-probe"  # a probe's folder is tuneline-probe.<where>.<process>.<digits>
TALK, PAIR, ALIVE = "talk", "pair", "alive"
LOOKS_EVERY = (0.01, 0.25)  # seconds between two looks: the first, and the longest
SIGNS_EVERY = 5.0  # seconds between two looks for the partner's signs of life


class PartnerError(TunelineError):
    """The other side did not come, or went away."""

    kind = "partner"


def nothing() -> None:
    """No other sign of the partner than its file."""


class Talk:
    """What one side says to the other, and hears from it."""

    def __init__(self, fs: Filesystem, folder: Path, rank: int, still_there: Callable[[], None] = nothing, patience: float = 0.0) -> None:
        """`still_there` raises PartnerError where the partner is known to be gone; its signs may be seen `patience` seconds late."""
        self._fs, self._folder, self.rank, self._still_there = fs, folder, rank, still_there
        self._longest_silence = jobs.QUIET + patience

    def post(self, name: str, value: Any) -> None:
        """Say something under a name that was not used before."""
        said = json.dumps({"value": value}).encode()
        keep(self._fs, self._folder / f"{name}.{self.rank}", f"{hashlib.sha256(said).hexdigest()}\n".encode() + said)

    def heard(self, name: str) -> dict[str, Any] | None:
        """{"value"} of what the other side said under a name; None where nothing is there yet, or only a part of it."""
        try:
            digest, _, said = content(self._fs, self._folder / f"{name}.{1 - self.rank}").partition(b"\n")
        except FileNotFoundError:
            return None
        if hashlib.sha256(said).hexdigest().encode() != digest:
            return None
        found: dict[str, Any] = json.loads(said)
        return found

    def wait(self, names: tuple[str, ...], seconds: float) -> tuple[str, Any]:
        """The first of these names that the other side says something under, and what. Raises PartnerError."""
        deadline, pause, signs = time.monotonic() + seconds, LOOKS_EVERY[0], time.monotonic() + SIGNS_EVERY
        while True:
            for name in names:
                if found := self.heard(name):
                    return name, found["value"]
            self._still_there()
            if time.monotonic() > signs:
                self._look_for_signs()
                signs = time.monotonic() + SIGNS_EVERY
            if time.monotonic() > deadline:
                raise PartnerError(
                    f"the partner did not answer within {seconds:.0f} seconds ({names[0]})",
                    hint="Look at what the other side printed; a hung mount shows in its dmesg as «server not responding».",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, LOOKS_EVERY[1])
            self._fs.refresh(self._folder)

    def _look_for_signs(self) -> None:
        with suppress(OSError):  # the file is not seen yet
            if self._silence() > self._longest_silence:
                raise PartnerError(
                    f"the partner fell silent: no sign of life for {self._longest_silence:.0f} seconds",
                    hint="Look at what the other side printed, and start both sides again.",
                )

    def _silence(self) -> float:
        """Seconds since the partner's last sign of life, by the server's clock."""
        descriptor = self._fs.open(self._folder / f"{ALIVE}.{1 - self.rank}", os.O_RDONLY)
        try:
            last = self._fs.status(descriptor).st_mtime
        finally:
            self._fs.close(descriptor)
        self._fs.refresh(self._folder)
        return self._fs.stat(self._folder).st_mtime - last


def prepare(fs: Filesystem, folder: Path, pair: str) -> None:
    """What a side that joins looks for in a probe's folder."""
    fs.mkdir(folder / TALK)
    keep(fs, folder / PAIR, pair.encode())


def welcome(fs: Filesystem, folder: Path, plan: dict[str, Any], seconds: float, still_there: Callable[[], None] = nothing) -> None:
    """Wait for the partner, and tell the first that comes what is planned. Raises PartnerError."""
    deadline = time.monotonic() + seconds
    while True:
        fs.refresh(folder / TALK)
        came = sorted(name for name in fs.names(folder / TALK) if name.startswith("hello."))
        if came:
            keep(fs, folder / TALK / came[0].replace("hello", "welcome"), json.dumps(plan).encode())
            return
        still_there()
        if time.monotonic() > deadline:
            raise PartnerError(
                f"no partner came to {folder} within {seconds:.0f} seconds",
                hint="Start the same command with the same --pair and the other --rank on the other host, at the same path.",
            )
        time.sleep(LOOKS_EVERY[1])


def join(fs: Filesystem, path: Path, pair: str, seconds: float) -> tuple[Path, dict[str, Any]]:
    """Find the partner's folder below a path: the folder and the plan. Folders that were left over never answer.

    Raises PartnerError, and PermissionError where the folder is there and this user may not write in it.
    """
    deadline, mine = time.monotonic() + seconds, secrets.token_hex(8)
    greeted: set[Path] = set()
    refused: PermissionError | None = None
    while time.monotonic() < deadline:
        fs.refresh(path)
        for folder in sorted(path / name for name in fs.names(path) if name.startswith(f"{PREFIX}.")):
            try:
                if plan := _greeted(fs, folder, pair, mine, greeted):
                    return folder, plan
            except PermissionError as error:
                refused = error
            except (OSError, ValueError):  # just removed, or not whole yet
                continue
        time.sleep(LOOKS_EVERY[1])
    if refused:
        raise refused
    raise PartnerError(
        f"no partner waits in {path} within {seconds:.0f} seconds",
        hint=f"Start the same command with --pair {pair} --rank 0 on the other host; both have to see the same folder there.",
    )


def _greeted(fs: Filesystem, folder: Path, pair: str, mine: str, greeted: set[Path]) -> dict[str, Any] | None:
    """Say hello in a folder of this pair, once; the plan where it was answered. Raises FileNotFoundError where it was not yet."""
    if folder not in greeted:
        if content(fs, folder / PAIR) != pair.encode():
            return None
        keep(fs, folder / TALK / f"hello.{mine}", b"")
        greeted.add(folder)
    fs.refresh(folder / TALK)
    plan: dict[str, Any] = json.loads(content(fs, folder / TALK / f"welcome.{mine}"))
    return plan
