"""What a run of this machine shows of itself: how far it is, what its stages came to, what they printed. Reads, and changes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from components.common import progress
from components.common.errors import UsageError
from components.common.progress import describe
from pipelines.runs import Run
from pipelines.stages import CONDITIONAL, STAGES

Event = dict[str, Any]
OWN = "run"  # the run's own log, beside those of its stages
LIVE = 0.5


@dataclass(frozen=True)
class Place:
    """Where a run is, or where it stopped: a stage, and how far that is, for people."""

    stage: str | None
    text: str


@dataclass(frozen=True)
class Log:
    """A stage's log: its path (None: it has none, and `why`)."""

    stage: str
    path: Path | None
    why: str = ""

    def lines(self, last: int | None = None) -> list[str]:
        """Its lines, or the last so many of them."""
        if self.path is None:
            return []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in (file if last is None else deque(file, maxlen=last))]


def overview(run: Run) -> dict[str, Any]:
    """A run in one line: {"run", "state", "verdict", "stage", "progress", "seconds", "model_name", "model_version"}."""
    known, state = run.read(), run.state
    result = known.get("result") or {}
    events = [] if state == "finished" else read_events(run)
    place = place_of(events, state)
    model = result.get("mlflow") or {}
    return {
        "run": run.name,
        "state": state,
        "verdict": result.get("verdict"),
        "stage": place.stage,
        "progress": place.text,
        "seconds": _seconds(known, state, events),
        "model_name": model.get("model_name"),
        "model_version": model.get("model_version"),
    }


def detail(run: Run) -> dict[str, Any]:
    """The overview, with "stages" (as `run` has them, and each one's state), "error" or null, "report" or null, "folder", "logs"."""
    known, found = run.read(), overview(run)
    result = known.get("result") or {}
    report = result.get("report")
    return {
        **found,
        "stages": stages_of(run, found["state"]),
        "error": known.get("error") or _error_in(read_events(run)),
        "report": report if report and Path(report).exists() else None,
        "folder": str(run.folder),
        "logs": str(run.folder / "logs"),
    }


def read_events(run: Run) -> list[Event]:
    """The run's events. A line that a kill tore is left out."""
    if not run.events.exists():
        return []
    lines = run.events.read_text(encoding="utf-8", errors="replace").splitlines()
    return [event for line in lines if (event := progress.event_in(line))]


def place_of(events: Sequence[Event], state: str) -> Place:
    """Where the run is after these events."""
    if state == "finished":
        return Place(None, "")
    if not events:
        return Place(None, "starting" if state == "running" else "before the first stage")
    stage = str(events[-1]["stage"])
    title = STAGES.get(stage, stage)
    if events[-1]["event"] == "finished":
        return Place(stage, f"{title} is done" if state == "running" else f"after {title}")
    since = list(dropwhile(lambda event: event is not _last(events, "step"), events))
    parts = [since[0]["name"]] if since and since[0]["event"] == "step" else []
    return Place(stage, f"{title}: {', '.join([*parts, *_rate(since)])}" if parts else title)


def _last(events: Sequence[Event], kind: str) -> Event | None:
    """The last event of a kind in the stage that came last."""
    return next((event for event in reversed(events) if event["stage"] == events[-1]["stage"] and event["event"] == kind), None)


def _rate(since_step: Sequence[Event]) -> list[str]:
    told = [event for event in since_step if event["event"] == "progress"]
    if not told:
        return []
    first, last = told[0], told[-1]
    if last["unit"] == "seconds":
        return [f"{last['done']} s so far"]
    return [describe(last["done"], last["total"], last["unit"], last["time"] - since_step[0]["time"], first["done"])]


def _seconds(known: dict[str, Any], state: str, events: Sequence[Event]) -> float | None:
    """From start to end; to now while it runs; to its last sign of life where it was killed."""
    if "started" not in known:
        return None
    began = float(known["started"])
    last = float(events[-1]["time"]) if events else began
    ended = time.time() if state == "running" else float(known.get("ended", last))
    return round(ended - began, 2)


def _error_in(events: Sequence[Event]) -> dict[str, str] | None:
    return next((event["error"] for event in reversed(events) if event["event"] == "failed"), None)


def stages_of(run: Run, state: str) -> list[dict[str, Any]]:
    """The stages a run has come to: {"name", "state", "seconds", "cached"}, state finished, cached, running, failed or stopped.

    A stage without events that a later one has passed was answered by kfp's cache; a conditional one may have been left out instead.
    """
    if state == "finished":
        ended = (run.read().get("result") or {}).get("stages", [])
        return [{"name": s["name"], "state": "cached" if s["cached"] else "finished", **s} for s in ended]
    events = read_events(run)
    reached = [event["stage"] for event in events]
    rows = []
    for stage in STAGES:
        if stage in reached:
            rows.append(_row(stage, [event for event in events if event["stage"] == stage], state))
        elif any(later in reached for later in list(STAGES)[list(STAGES).index(stage) :]) and stage not in CONDITIONAL:
            rows.append({"name": stage, "state": "cached", "seconds": 0.0, "cached": True})
    return rows


def _row(stage: str, events: Sequence[Event], state: str) -> dict[str, Any]:
    last = events[-1]
    if last["event"] in ("finished", "failed"):
        cached = bool(last.get("cached"))
        ended = "cached" if cached else "stopped" if last.get("exit_code") == 75 else str(last["event"])
        return {"name": stage, "state": ended, "seconds": round(last["seconds"], 2), "cached": cached}
    until = time.time() if state == "running" else last["time"]
    ended = "running" if state == "running" else "stopped"
    return {"name": stage, "state": ended, "seconds": round(until - events[0]["time"], 2), "cached": False}


def stage_named(name: str) -> str | None:
    """The stage that a person means: fine_tuning, fine-tuning and fine-tune are one."""
    by_name = {_plain(known): stage for stage, title in STAGES.items() for known in (stage, title)}
    return by_name.get(_plain(name))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def logs(run: Run, wanted: str = "", *, waiting: bool = False) -> list[Log]:
    """The logs of a run's stages in their order, or one stage's; `run` is the run's own.

    Raises UsageError for a stage the run does not have; when `waiting`, one that is still to come has an empty log.
    """
    if wanted == OWN:
        return [_own(run)]
    states = {row["name"]: row["state"] for row in stages_of(run, run.state)}
    reached = {stage: states.get(stage, "") for stage in STAGES if stage in states or run.stage_log(stage).exists()}
    if not wanted:
        found = [_log(run, stage, state) for stage, state in reached.items()]
        return found if any(log.path for log in found) else [*found, _own(run)]
    stage = stage_named(wanted)
    if stage is None or (stage not in reached and not waiting):
        there = ", ".join([*reached, OWN])
        raise UsageError(f"{run.name} has no stage {wanted}; it has: {there}", hint="Name one of these, or none for all of them.")
    return [_log(run, stage, reached.get(stage, "still to come"))]


def _own(run: Run) -> Log:
    return Log(OWN, run.log) if run.log.exists() else Log(OWN, None, "no log: it ended before its first step")


def _log(run: Run, stage: str, state: str) -> Log:
    path = run.stage_log(stage)
    if path.exists():
        return Log(stage, path)
    return Log(stage, None, "no log in this run: its result came from the cache" if state == "cached" else f"no log: it is {state}")


def follow(run: Run, wanted: str = "", last: int = 0) -> Iterator[tuple[Log, str]]:
    """(log, text) of whole lines as the logs grow, until the run ends; of those there are, the last so many lines (0: all)."""
    places = {log.stage: _start_of(log.path, last) for log in logs(run, wanted, waiting=True) if log.path}
    while True:
        running = run.state == "running"
        for log in logs(run, wanted, waiting=True):
            if log.path is not None:
                text, places[log.stage] = _read_from(log.path, places.get(log.stage, 0))
                if text:
                    yield log, text
        if not running:
            return
        time.sleep(LIVE)


def _start_of(path: Path, last: int) -> int:
    """Where the last so many lines begin (0: the first of all)."""
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[:-last]) if last else 0


def _read_from(path: Path, place: int) -> tuple[str, int]:
    """The whole lines after a position, and the position after them."""
    with path.open("rb") as file:
        file.seek(place)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="replace"), place + len(whole)


def watch(run: Run) -> Iterator[dict[str, Any]]:
    """The overview, again and again, until the run ends."""
    while True:
        now = overview(run)
        yield now
        if now["state"] != "running":
            return
        time.sleep(LIVE)
