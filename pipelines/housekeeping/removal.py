"""Removing what may go, a thing at a time, each moved out of sight whole before anything of it is deleted.

Whenever this is killed, a thing is still there, or gone, or lies in a private folder that the next job, or the next time, sweeps up.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import jobs, liveness, places
from components.common.errors import BusyError, TunelineError
from components.data_versioning import retention as data
from components.model_registry import retention as registry
from pipelines.housekeeping import found
from pipelines.housekeeping.found import Asked, World
from pipelines.housekeeping.plan import Item, Kind, Plan, Thing, plan

PREFIX = ".removing"  # a private folder is .removing.<where>.<process>.<digits>
ORIGIN, ASIDE, GONE = "origin", "aside", "gone"  # in it: where the thing lay, the thing while it is judged, and once it is not put back
LOOKS_AGAIN = 2.0  # seconds that an answer to what is needed counts
MEANWHILE = "used, or needed, meanwhile"


@dataclass(frozen=True)
class Outcome:
    """What became of a thing that might go: `kept` says why it is still there, "" where it is gone; `failed` that it should not be."""

    item: Item
    kept: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline gc --delete --json` prints of it."""
        return {**self.item.as_dict(), "deleted": not self.kept, "kept": self.kept}


def carry_out(decided: Plan, world: World, asked: Asked) -> Iterator[Outcome]:
    """Remove what may go. What is needed is asked for again on the way, since aliases move and jobs begin.

    Raises as `found.look` where that cannot be told any more; what is gone until then stays gone.
    """
    now, spared = _Now(world, asked, decided.names), set[str]()
    for item in decided.going:
        may_go = item.thing.name not in spared and item.thing.name in now.may_go()
        outcome = _removed(item, world, asked) if may_go else Outcome(item, MEANWHILE)
        spared |= {*item.thing.needs} if outcome.kept else set()  # what stays keeps what it needs
        yield outcome


def _removed(item: Item, world: World, asked: Asked) -> Outcome:
    try:
        return Outcome(item, "" if REMOVALS[item.thing.kind](item.thing, world, asked) else MEANWHILE)
    except (TunelineError, OSError) as error:
        return Outcome(item, getattr(error, "message", str(error)), failed=True)


@dataclass
class _Now:
    """What may go by what is needed now."""

    world: World
    asked: Asked
    names: set[str]
    at: float = field(default_factory=time.monotonic)

    def may_go(self) -> set[str]:
        if time.monotonic() - self.at > LOOKS_AGAIN:
            self.names = plan(self.world.things, found.roots(self.asked, self.world.things), self.asked.policy).names
            self.at = time.monotonic()
        return self.names


def _artifact(thing: Thing, world: World, asked: Asked) -> bool:
    sha256, store = thing.name.partition(":")[2], asked.work.store
    gone = places.remove(store, sha256, asked.older_than)
    if gone:
        places.remove_note(store, f"costs/{sha256}.json")
    return gone


def _copy(thing: Thing, world: World, asked: Asked) -> bool:
    return places.remove_copy(asked.work.store, thing.name.partition(":")[2], asked.older_than)


def _state(thing: Thing, world: World, asked: Asked) -> bool:
    """A folder of work in progress is held meanwhile, so that a job that begins is told so; tokens and scores are held by nobody."""
    path = Path(thing.path)
    touched = found.is_touched(path)

    def away() -> bool:
        return _taken_away(path, asked.work.state, lambda moved: found.unused_state(moved, touched=touched) >= asked.older_than)

    if touched:
        return away()
    with suppress(BusyError, FileNotFoundError), jobs.held(path):
        return away()
    return False


def _run(thing: Thing, world: World, asked: Asked) -> bool:
    return _taken_away(Path(thing.path), asked.work.root, lambda moved: found.unused_state(moved) >= asked.older_than)


def _package(thing: Thing, world: World, asked: Asked) -> bool:
    path = Path(thing.path)
    folder = path.parent.parent
    with suppress(BusyError), jobs.held(folder):
        may_go = any(one.name == thing.name and not one.stays for one in found.packages_of(folder, held=False))
        return may_go and _taken_away(path, path.parent, lambda _: True)
    return False


def _data_object(thing: Thing, world: World, asked: Asked) -> bool:
    return data.remove(world.objects[thing.name], asked.versioning, workdir=asked.work.root, unused=asked.older_than)


def _mlflow_run(thing: Thing, world: World, asked: Asked) -> bool:
    registry.remove_run(thing.name.partition(":")[2])
    return True


def _mlflow_model(thing: Thing, world: World, asked: Asked) -> bool:
    return registry.remove_model(thing.name.partition(":")[2])


REMOVALS: dict[Kind, Callable[[Thing, World, Asked], bool]] = {
    "artifact": _artifact,
    "base_model": _artifact,
    "copy": _copy,
    "state": _state,
    "run": _run,
    "package": _package,
    "data_object": _data_object,
    "mlflow_run": _mlflow_run,
    "mlflow_model": _mlflow_model,
}


def _taken_away(path: Path, parent: Path, may_go: Callable[[Path], bool]) -> bool:
    """Judge a file or folder, move it to a private folder in `parent`, judge it again there, where nobody finds it any more, and delete it
    or put it back.

    Killed before the second judgement it is put back by the next call. Raises OSError where something of it cannot be deleted.
    """
    try:
        if not may_go(path):
            return False
    except FileNotFoundError:  # another job was first
        return False
    with jobs.private_folder(parent, PREFIX, rescue=_put_back) as own:
        (own / ORIGIN).write_text(str(path.absolute()), encoding="utf-8")
        try:
            path.rename(own / ASIDE)
        except FileNotFoundError:  # another job was first
            return False
        if not may_go(own / ASIDE):
            return False
        (own / ASIDE).rename(own / GONE)
        _delete(own / GONE)
    return True


def _delete(gone: Path) -> None:
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone)
    else:
        gone.unlink()


def _put_back(own: Path) -> None:
    """Where its place is taken by now it comes to lie beside it. Raises OSError where that cannot be either."""
    if not os.path.lexists(own / ASIDE):
        return  # nothing was moved yet, or it is to go
    origin = Path((own / ORIGIN).read_text(encoding="utf-8"))
    origin.parent.mkdir(parents=True, exist_ok=True)
    if _is_moved(own / ASIDE, origin):
        return
    (own / ASIDE).rename(origin.with_name(f"{origin.name}.{secrets.token_hex(4)}"))


def _is_moved(aside: Path, origin: Path) -> bool:
    """Whether it is where it was. A rename would replace a file that was made there meanwhile."""
    if os.path.lexists(origin) and not aside.is_dir():
        return False
    try:
        aside.rename(origin)
    except OSError as error:
        if error.errno not in jobs.OCCUPIED:
            raise
        return False
    return True


def tidy(asked: Asked) -> None:
    """Put back, or delete, what an earlier time left that was killed."""
    for parent in _parents(asked):
        jobs.sweep(parent, PREFIX, _put_back)


def _parents(asked: Asked) -> list[Path]:
    serving = asked.work.root / "serving"
    return [asked.work.root, asked.work.state, *serving.glob("*/packages"), *serving.glob("*/rooted")]


def left(asked: Asked) -> list[Path]:
    """What left its place and is still there, because files in it are another user's, or it could not be put back: that user's next
    removal, or somebody by hand, has to look after it."""
    private = [(folder, PREFIX) for parent in _parents(asked) for folder in parent.glob(f"{PREFIX}.*.*.*")]
    private += [(folder, places.JOB) for folder in (asked.work.store / "unfinished").glob(f"{places.JOB}.*.*.*")]
    return sorted(folder for folder, prefix in private if f".{liveness.name()}." in folder.name or jobs.is_abandoned(folder, prefix))
