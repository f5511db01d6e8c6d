"""One of the two sides of a probe, as its steps see it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.common.progress import Reporter, Silent
from pipelines.storage.filesystem import Filesystem
from pipelines.storage.meeting import LOOKS_EVERY, Talk

MIB = 1 << 20
SLACK = 300.0  # seconds that a side waits for the other beyond what the plan gives the longest step
LONGEST_PAUSE = 2 * LOOKS_EVERY[1]  # seconds in which a side hears of the other
SLOWEST = MIB  # bytes a second; slower storage is not waited for


@dataclass(frozen=True)
class Plan:
    """How long and how much; both sides follow that of the one that leads."""

    patience: float = 90.0  # seconds after which what the other side made counts as unseen
    seconds: float = 5.0  # of each step that goes on for a time
    size: int = 1024 * MIB  # bytes of the large file of each side
    rounds: int = 200  # races for a name
    fio: bool = True

    def as_dict(self) -> dict[str, Any]:
        """For the other side."""
        return asdict(self)


QUICK = Plan(patience=15.0, seconds=1.0, size=64 * MIB, rounds=50)


class GivenUpError(Exception):
    """The other side could not go on with this step."""


@dataclass
class Side:
    """Rank 0 leads, rank 1 joins; both go through the same steps."""

    fs: Filesystem
    folder: Path  # of the probe
    talk: Talk
    plan: Plan
    reporter: Reporter = field(default_factory=Silent)
    step: str = ""
    offset: float = 0.0  # what the server's clock shows more than this host's, in seconds

    @property
    def rank(self) -> int:
        """0 or 1."""
        return self.talk.rank

    def room(self, rank: int | None = None) -> Path:
        """The folder that a side writes to in this step, by default this one's."""
        return self.folder / f"{self.step}.{self.rank if rank is None else rank}"

    def meet(self, key: str, value: Any = None) -> Any:
        """Say that this side has come so far, and wait until the other has: what that says. Raises GivenUpError, PartnerError."""
        self.talk.post(f"{self.step}.{key}", value)
        name, said = self.talk.wait((f"{self.step}.{key}", f"{self.step}.end"), self._within())
        if name.endswith(".end"):
            raise GivenUpError
        return said

    def end(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Give what was measured for what the other side measured."""
        self.talk.post(f"{self.step}.end", measured)
        found: dict[str, Any] = self.talk.wait((f"{self.step}.end",), self._within())[1]
        return found

    def _within(self) -> float:
        return self.plan.patience + self.plan.seconds + 2 * self.plan.size / SLOWEST + SLACK

    def together(self, key: str) -> None:
        """Go on at the same moment as the other side, however late each hears of the other."""
        said = self.server_time()
        other = self.meet(key, said)
        time.sleep(max(0.0, min(max(said, other) + LONGEST_PAUSE - self.server_time(), LONGEST_PAUSE)))

    def server_time(self) -> float:
        """Now by the server's clock, as far as it could be told; the same on both hosts."""
        return self.fs.now() + self.offset

    def appears(self, path: Path) -> None:
        """Wait until a name that the other side made is seen; not one of those whose delay is measured."""
        deadline = time.monotonic() + self.plan.patience
        while True:
            try:
                self.fs.stat(path)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                self.fs.refresh(path.parent)
            else:
                return
