"""Participant of a probe: its folders, messages and clock, for use by the steps."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.runtime.reporters import Reporter, SilentReporter
from pipelines.operations.storage_probe.probed_filesystem import Filesystem
from pipelines.operations.storage_probe.rendezvous import POLL_INTERVAL_SECONDS, MessageChannel

Figures = dict[str, Any]  # the measurements of one participant in a step
MIB_BYTES = 1 << 20
WAIT_MARGIN_SECONDS = 300.0  # in addition to the longest step of the plan
MAX_NOTICE_SECONDS = 2 * POLL_INTERVAL_SECONDS[1]  # maximum time until a participant reads a message of its partner
MIN_BYTES_PER_SECOND = MIB_BYTES  # on slower storage, a step exceeds its timeout


@dataclass(frozen=True)
class ProbePlan:
    """Durations and sizes of a probe; both participants use the plan of the leader (rank 0)."""

    visibility_timeout: float = 90.0  # maximum seconds to wait for a change of the partner
    seconds: float = 5.0  # of each timed step
    size: int = 1024 * MIB_BYTES  # bytes of each participant's large file
    rounds: int = 200  # races for a name
    fio: bool = True


QUICK_PLAN = ProbePlan(visibility_timeout=15.0, seconds=1.0, size=64 * MIB_BYTES, rounds=50)


class StepAbortedError(Exception):
    """The partner could not continue this step."""


@dataclass
class Participant:
    """A participant of the probe. Rank 0 leads, rank 1 joins; both run the same steps."""

    fs: Filesystem
    folder: Path  # of the probe
    channel: MessageChannel
    plan: ProbePlan
    reporter: Reporter = field(default_factory=SilentReporter)
    step: str = ""
    offset: float = 0.0  # server clock minus this host's clock, in seconds

    @property
    def rank(self) -> int:
        """The rank of this participant, 0 or 1."""
        return self.channel.rank

    def folder_for(self, rank: int | None = None) -> Path:
        """Return the folder that a participant (default: this one) writes to in the current step."""
        return self.folder / f"{self.step}.{self.rank if rank is None else rank}"

    def exchange(self, key: str, value: object = None) -> Any:
        """Post a value under a key and return the partner's value for the same key.

        Raises:
            StepAbortedError: the partner ended the step.
            PartnerError: the partner exited or did not respond.
        """
        self.channel.post(f"{self.step}.{key}", value)
        name, answer = self.channel.wait((f"{self.step}.{key}", f"{self.step}.end"), self._timeout())
        if name.endswith(".end"):
            raise StepAbortedError
        return answer

    def exchange_results(self, measured: Figures) -> Figures:
        """End the step: post this participant's measurements and return the partner's.

        Raises:
            PartnerError: the partner exits or does not respond.
        """
        self.channel.post(f"{self.step}.end", measured)
        partner_measured: Figures = self.channel.wait((f"{self.step}.end",), self._timeout())[1]
        return partner_measured

    def _timeout(self) -> float:
        plan = self.plan
        return plan.visibility_timeout + plan.seconds + 2 * plan.size / MIN_BYTES_PER_SECOND + WAIT_MARGIN_SECONDS

    def synchronize(self, key: str) -> None:
        """Wait until a common time on the server's clock, so that both participants continue at the same time.

        Raises:
            StepAbortedError: the partner ended the step.
            PartnerError: the partner exited or did not respond.
        """
        posted_at = self.server_time()
        partner_posted_at = self.exchange(key, posted_at)
        pause = max(posted_at, partner_posted_at) + MAX_NOTICE_SECONDS - self.server_time()
        time.sleep(max(0.0, min(pause, MAX_NOTICE_SECONDS)))

    def server_time(self) -> float:
        """Return the estimated time of the server's clock, which both hosts share."""
        return self.fs.now() + self.offset

    def wait_for_path(self, path: Path) -> None:
        """Wait until a path that the partner created is visible.

        Do not use this method for paths whose delay is measured: it makes the client revalidate names with the server.

        Raises:
            FileNotFoundError: the path is not visible within the timeout.
        """
        deadline = time.monotonic() + self.plan.visibility_timeout
        while path.name not in self.fs.names(path.parent):  # see MessageChannel.receive
            if time.monotonic() > deadline:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            time.sleep(0.02)
            self.fs.refresh(path.parent)
