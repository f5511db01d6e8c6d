"""Status, stages and logs of a run on this machine, from its folder. This module is read-only."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.runtime import reporters
from components.common.runtime.errors import EXIT_INTERRUPTED, UsageError
from components.common.runtime.reporters import format_progress
from pipelines.runs.run_folder import Run
from pipelines.steps.stage_names import CONDITIONAL_STAGES, STAGE_LABELS

Json = dict[str, Any]
RUN_LOG_NAME = "run"  # the run's own log, in addition to the logs of its stages
POLL_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class StageLog:
    """The log of a stage. If no log exists, `path` is None and `reason` describes why."""

    stage: str
    path: Path | None
    reason: str = ""

    def read_lines(self, last: int | None = None) -> list[str]:
        """Return all lines of the log, or its `last` lines."""
        if self.path is None:
            return []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in (file if last is None else deque(file, maxlen=last))]


def summarize_run(run: Run) -> Json:
    """Return {"run", "state", "verdict", "stage", "progress", "seconds", "model_name", "model_version"}."""
    values, state = run.read(), run.state
    result = values.get("result") or {}
    events = [] if state == "finished" else read_events(run)
    stage, progress = locate_run(events, state)
    model = result.get("mlflow") or {}
    seconds = None
    if "started" in values:
        started = float(values["started"])
        last_event = float(events[-1]["time"]) if events else started
        ended = time.time() if state == "running" else float(values.get("ended", last_event))
        seconds = round(ended - started, 2)
    return {
        "run": run.name,
        "state": state,
        "verdict": result.get("verdict"),
        "stage": stage,
        "progress": progress,
        "seconds": seconds,
        "model_name": model.get("model_name"),
        "model_version": model.get("model_version"),
    }


def describe_run(run: Run) -> Json:
    """Return the summary with "stages", "error" or null, "report" or null, "folder" and "logs"."""
    values, summary = run.read(), summarize_run(run)
    report = (values.get("result") or {}).get("report")
    failures = [event["error"] for event in read_events(run) if event["event"] == "failed"]
    return {
        **summary,
        "stages": list_stages(run, summary["state"]),
        "error": values.get("error") or (failures[-1] if failures else None),
        "report": report if report and Path(report).exists() else None,
        "folder": str(run.folder),
        "logs": str(run.folder / "logs"),
    }


def read_events(run: Run) -> list[Json]:
    """Return the run's events; skip lines that an interruption left incomplete."""
    if not run.events.exists():
        return []
    lines = run.events.read_text(encoding="utf-8", errors="replace").splitlines()
    return [event for line in lines if (event := reporters.parse_event(line))]


def read_losses(run: Run) -> list[float]:
    """Return the training losses that a run has logged so far, without those that are not finite."""
    losses = [
        event["values"].get("train_loss", math.nan)
        for event in read_events(run)
        if (event["stage"], event["event"]) == ("fine_tuning", "metrics")
    ]
    return [loss for loss in losses if math.isfinite(loss)]


def locate_run(events: Sequence[Json], state: str) -> tuple[str | None, str]:
    """Return the current or last stage of a run with these events, and its progress as text."""
    if state == "finished":
        return None, ""
    if not events:
        return None, "starting" if state == "running" else "before the first stage"
    stage = str(events[-1]["stage"])
    label = STAGE_LABELS.get(stage, stage)
    if events[-1]["event"] == "finished":
        return stage, f"{label} is done" if state == "running" else f"after {label}"
    started = [i for i, event in enumerate(events) if (event["stage"], event["event"]) == (stage, "step")]
    if not started:
        return stage, label
    since = events[started[-1] :]
    parts = [since[0]["name"]]
    if updates := [event for event in since if event["event"] == "progress"]:
        first, last = updates[0], updates[-1]
        done, total, unit = last["done"], last["total"], last["unit"]
        elapsed = last["time"] - since[0]["time"]
        parts.append(format_progress(done, total, unit, elapsed, first["done"]))
    return stage, f"{label}: {', '.join(parts)}"


def list_stages(run: Run, state: str) -> list[Json]:
    """Return the stages that a run has reached: {"name", "state", "seconds", "cached"}.

    The "state" of a stage is finished, cached, running, failed or stopped. A stage without events before a stage with events was
    cached by kfp. Conditional stages without events are omitted, because the run may have skipped them.
    """
    if state == "finished":
        ended = (run.read().get("result") or {}).get("stages", [])
        return [{"name": s["name"], "state": "cached" if s["cached"] else "finished", **s} for s in ended]
    events = read_events(run)
    events_by_stage = {stage: [event for event in events if event["stage"] == stage] for stage in STAGE_LABELS}
    reached = max((number for number, own in enumerate(events_by_stage.values(), 1) if own), default=0)
    rows = []
    for stage, own in list(events_by_stage.items())[:reached]:
        if own:
            rows.append(_describe_stage(stage, own, state))
        elif stage not in CONDITIONAL_STAGES:
            rows.append({"name": stage, "state": "cached", "seconds": 0.0, "cached": True})
    return rows


def _describe_stage(stage: str, events: Sequence[Json], run_state: str) -> Json:
    last, cached = events[-1], False
    if last["event"] in ("finished", "failed"):
        cached, seconds = bool(last.get("cached")), last["seconds"]
        interrupted = last.get("exit_code") == EXIT_INTERRUPTED
        state = "cached" if cached else "stopped" if interrupted else str(last["event"])
    else:
        state = "running" if run_state == "running" else "stopped"
        seconds = (time.time() if state == "running" else last["time"]) - events[0]["time"]
    return {"name": stage, "state": state, "seconds": round(seconds, 2), "cached": cached}


def list_logs(run: Run, wanted: str = "", *, waiting: bool = False) -> list[StageLog]:
    """Return the logs of a run's stages in order, or the log of one stage.

    Args:
        run: the run.
        wanted: the stage whose log to return, "run" for the run's own log, or "" for all stages. The names fine_tuning,
            fine-tuning and fine-tune are equivalent.
        waiting: accept a stage that has not started; its log is empty.

    Raises:
        UsageError: the run does not have this stage.
    """
    if wanted == RUN_LOG_NAME:
        return [_find_log(run, RUN_LOG_NAME)]
    states = {row["name"]: row["state"] for row in list_stages(run, run.state)}
    reached = {s: states.get(s, "") for s in STAGE_LABELS if s in states or run.stage_log(s).exists()}
    if not wanted:
        logs = [_find_log(run, stage, state) for stage, state in reached.items()]
        return logs if any(log.path for log in logs) else [*logs, _find_log(run, RUN_LOG_NAME)]
    name = wanted.lower().replace("-", "_")
    stage = next((stage for stage, label in STAGE_LABELS.items() if name in (stage, label.replace("-", "_"))), None)
    if stage is None or (stage not in reached and not waiting):
        raise UsageError(
            f"{run.name} has no stage {wanted}; existing stages: {', '.join([*reached, RUN_LOG_NAME])}",
            hint="Choose one of these stages, or omit the stage to show all logs.",
        )
    return [_find_log(run, stage, reached.get(stage, "not started"))]


def _find_log(run: Run, name: str, state: str = "") -> StageLog:
    path, reason = run.stage_log(name), f"no log: the stage is {state}"
    if name == RUN_LOG_NAME:
        path, reason = run.log, "no log: the run ended before its first step"
    elif state == "cached":
        reason = "no log in this run: the stage was cached"
    return StageLog(name, path) if path.exists() else StageLog(name, None, reason)


def follow_logs(run: Run, wanted: str = "", last: int = 0) -> Iterator[tuple[StageLog, str]]:
    """Yield (log, text) in whole lines as the logs grow, until the run ends.

    Args:
        run: the run.
        wanted: the stage whose log to follow, as in `list_logs`.
        last: the number of existing lines to yield per log; 0: all lines.

    Raises:
        UsageError: the run does not have this stage.
    """
    offsets: dict[str, int] = {}
    for log in list_logs(run, wanted, waiting=True) if last else []:
        if log.path:
            lines = log.path.read_bytes().splitlines(keepends=True)
            offsets[log.stage] = sum(map(len, lines[:-last]))
    while True:
        running = run.state == "running"
        for log in list_logs(run, wanted, waiting=True):
            if log.path is not None:
                offset = offsets.get(log.stage, 0)
                with log.path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
                lines_end = data.rfind(b"\n") + 1
                offsets[log.stage] = offset + lines_end
                if lines_end:
                    yield log, data[:lines_end].decode("utf-8", errors="replace")
        if not running:
            return
        time.sleep(POLL_INTERVAL_SECONDS)


def watch_run(run: Run) -> Iterator[Json]:
    """Yield the summary at each poll until the run ends."""
    yield (summary := summarize_run(run))
    while summary["state"] == "running":
        time.sleep(POLL_INTERVAL_SECONDS)
        yield (summary := summarize_run(run))
