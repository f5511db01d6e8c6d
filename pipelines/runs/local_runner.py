"""Execution of the whole pipeline on this machine through kfp.local: one process per step, results cached."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from components.common.cost import budgets
from components.common.cost.budgets import Budget
from components.common.cost.cost_rates import CostRates
from components.common.launch import launcher_settings
from components.common.launch.launcher_settings import LauncherSettings
from components.common.reporting import mlflow_tracking
from components.common.runtime import process_control, reporters, url_credentials
from components.common.runtime.errors import (
    EXIT_INTERRUPTED,
    ArtifactDamagedError,
    TunelineError,
    translate_system_error,
)
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization
from pipelines.runs import run_costs, run_folder
from pipelines.runs.run_folder import Run
from pipelines.steps import registry_outcome
from pipelines.steps.stage_names import CONDITIONAL_STAGES, REPORTED_STAGES, STAGE_LABELS

TRACKING_RETRY_SECONDS = 7 * 24 * 3600  # age of a run at which an unreachable tracking server is no longer retried
EVENT_POLL_SECONDS = 0.2
LISTENER_JOIN_SECONDS = 10
Json = dict[str, Any]


@dataclass
class EventListener:
    """Listener that shows a run's events, and records the end and the result of each stage and the run's failure."""

    run: Run
    reporter: Reporter
    ended: dict[str, Json] = field(default_factory=dict)
    results: dict[str, Json] = field(default_factory=dict)
    failure: TunelineError | None = None

    def handle(self, event: Json) -> None:
        """Show and record one event."""
        stage, kind = str(event["stage"]), event["event"]
        label = STAGE_LABELS.get(stage, stage)
        if kind == "started":
            self.reporter.step(label)
        elif kind == "step":
            self.reporter.step(f"{label}: {event['name']}")
        elif kind == "progress":
            self.reporter.progress(event["done"], event["total"], event["unit"])
        elif kind == "metrics":
            self.reporter.metrics(event["values"], event["step"])
        elif kind == "note":
            self.reporter.note(event["text"])
        elif kind == "result":
            self.results[stage] = event
        elif kind in ("finished", "failed"):
            self.ended[stage] = event
            if kind == "failed":
                self.failure = TunelineError.from_dict(event["error"], event["exit_code"])

    @contextlib.contextmanager
    def follow_in_thread(self) -> Iterator[None]:
        """Handle the run's events in a thread for the duration of the context."""
        stop = threading.Event()
        thread = threading.Thread(target=self.follow, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=LISTENER_JOIN_SECONDS)

    def follow(self, stop: threading.Event) -> None:
        """Handle events as they arrive, until `stop` is set and the file is read to its end."""
        self.run.events.touch()
        with self.run.events.open(encoding="utf-8", errors="replace") as file:
            stopped = False
            while not stopped:
                stopped = stop.is_set()
                position = file.tell()
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    if event := reporters.parse_event(line):
                        self.handle(event)
                file.seek(position)  # a line that is still being written is read again
                if not stopped:
                    stop.wait(EVENT_POLL_SECONDS)


def run(
    config: Customization,
    workdir: Workdir,
    *,
    quiet: bool,
    tracking_uri: str | None = None,
    launcher: LauncherSettings | None = None,
    rates: CostRates | None = None,
    team_budgets: Mapping[str, Budget] | None = None,
) -> Json:
    """Run the customization and return the object that `tuneline run --json` prints.

    Args:
        quiet: Show no progress.
        tracking_uri: The MLflow server; default: a database in the workdir.
        launcher: The launcher of the training; default: from the environment.
        rates: Prices and power, for the cost of the run; default: not known.
        team_budgets: Budgets per month by team.

    Raises:
        TunelineError: a step failed; the error contains its stage.
        BudgetReachedError: a budget is used up.
        UsageError: another run has locked the workdir.
    """
    started = time.monotonic()
    with run_folder.lock_workdir(workdir):
        reporter = reporters.create_console_reporter(quiet=quiet)
        reporter.step("starting the run")
        _close_stale_runs(workdir, reporter)
        process_control.adopt_orphans()
        meter = run_costs.build_meter(workdir, config, rates or CostRates(), team_budgets or {})
        for sentence in meter.list_unmeasurable():
            reporter.note(sentence)
        current = run_folder.create_run(workdir)
        current.update(team=config.team, model=config.model_registry.name, rates=meter.rates.model_dump(mode="json"))
        environment = dict(os.environ)  # restored afterwards; the steps inherit the changes
        variables = {
            "TUNELINE_WORKDIR": str(workdir.root),
            "TUNELINE_EVENTS": str(current.events),
            "TUNELINE_RUN_PID": str(os.getpid()),
            "MLFLOW_TRACKING_URI": tracking_uri or workdir.tracking_uri,
            "PYTHONSAFEPATH": "1",
            "PYTHONUTF8": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            variables |= launcher_settings.to_environment(launcher or launcher_settings.load_settings())
            os.environ.update(variables | budgets.to_environment(meter))
            return _run_tracked(config, workdir, EventListener(current, reporter), started)
        except BaseException as error:
            current.reserve.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # report the error even if it cannot be recorded
                current.update(
                    status="interrupted" if _is_interruption(error) else "failed",
                    ended=time.time(),
                    error=run_folder.describe_error(error, workdir),
                )
            raise
        finally:
            os.environ.clear()
            os.environ.update(environment)
            current.reserve.unlink(missing_ok=True)
            reporters.close_reporter(reporter)


def _is_interruption(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) == EXIT_INTERRUPTED


def _close_stale_runs(workdir: Workdir, reporter: Reporter) -> None:
    """Set the status of killed runs, here and in MLflow. The caller must hold the workdir's lock."""
    artifact_store.remove_abandoned_jobs(workdir.store)
    unreachable: set[str] = set()
    for path in workdir.runs.glob("*/run.json"):
        stale = Run(path.parent)
        values = stale.read()
        status = values.get("status", "running")
        if status != "running" and not values.get("tracking_open"):
            continue
        uri = str(values.get("tracking_uri") or "")
        closed = uri not in unreachable and mlflow_tracking.close_abandoned_run(uri, stale.name)
        if not closed and uri not in unreachable:  # query an unreachable server once
            unreachable.add(uri)
            reporter.note(f"the MLflow server {uri} does not respond, so killed runs remain open there")
        expired = time.time() - float(values.get("started") or 0) > TRACKING_RETRY_SECONDS
        stale.update(status="killed" if status == "running" else status, tracking_open=not (closed or expired))
        stale.reserve.unlink(missing_ok=True)


def _run_tracked(config: Customization, workdir: Workdir, listener: EventListener, started: float) -> Json:
    """Run the pipeline within an MLflow run and return the result."""
    current, uri = listener.run, os.environ["MLFLOW_TRACKING_URI"]
    mlflow_tracking.connect()  # before tracking_open is set: without a connection, no MLflow run has to be closed
    current.update(tracking_uri=url_credentials.remove_password(uri), tracking_open=True)
    tags = {"tuneline.run": current.name, "tuneline.model": config.model_registry.name}
    # the artifacts of a tracking database in the workdir are stored in the workdir too
    artifacts = workdir.root / "mlflow-artifacts" if uri.startswith("sqlite:") else None
    parent = mlflow_tracking.start_run(current.name, tags, artifacts)
    os.environ["MLFLOW_RUN_ID"] = parent
    current.update(mlflow_run_id=parent)
    try:
        outputs = _run_pipeline(config, workdir, listener)
        result = _build_result(outputs, listener, workdir, parent, started)
    except BaseException as error:
        current.reserve.unlink(missing_ok=True)
        with contextlib.suppress(Exception):  # an unreachable server must not hide the failure
            status = "KILLED" if _is_interruption(error) else "FAILED"
            current.update(tracking_open=not mlflow_tracking.close_abandoned_run(uri, current.name, status))
        raise
    result["cost"] = run_costs.summarize_costs(current, result)
    # The runs of the stages have the figures of the stages.
    totals = {name: value for name, value in result["cost"].items() if name not in ("stages", "cached")}
    mlflow_tracking.log_metrics(parent, {"cost": totals})
    mlflow_tracking.end_run(parent, "FINISHED")
    current.update(status="finished", ended=time.time(), result=result, tracking_open=False)
    return result


def _run_pipeline(config: Customization, workdir: Workdir, listener: EventListener) -> Json:
    """Run the pipeline through kfp.local; write its output to run.log and show the events."""
    from kfp import local

    from pipelines.definition.customization_pipeline import build

    current = listener.run
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (current.folder / "customization.yaml").write_text(text, encoding="utf-8")
    cache = workdir.root / "kfp-cache"
    _drop_stale_cache_entries(cache, workdir.store)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(current.folder / "kfp"),
        raise_on_error=True,
        enable_caching=True,
        cache_root=str(cache),
    )
    with (
        listener.follow_in_thread(),
        _LogFile(current.log) as log,
        contextlib.redirect_stdout(log),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            task = build(config)(configuration=text)
        except (RuntimeError, OSError) as error:
            message = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # kfp colours its messages
            known = translate_system_error(error) if isinstance(error, OSError) else None
            failure = known or TunelineError(message, hint=f"Read the log {current.log}.")
        except KeyboardInterrupt:
            failure = run_folder.stop_steps(current)
        else:
            return {name: task.outputs[name] for name in ("dataset", "version", "model", "evaluation", "verdict")}
    # The step's own error is more specific, unless an interruption caused it.
    reported = listener.failure
    raise reported if reported and (_is_interruption(reported) or not _is_interruption(failure)) else failure


class _LogFile(io.TextIOBase):
    """A log file that ignores write errors: on a full disk, the step's own error is more useful."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())
        return len(text)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _drop_stale_cache_entries(cache: Path, store: Path) -> None:
    """Drop cached outputs whose artifact is missing or contains a transient failure, so that the run rebuilds them."""
    for entry in cache.glob("*.json"):
        for sha256 in re.findall(r'"([0-9a-f]{64})"', entry.read_text(encoding="utf-8")):
            with contextlib.suppress(ArtifactDamagedError):  # the step that reads a damaged artifact reports it
                artifact_store.mark_used(store, sha256)  # a cached step does not read the artifact
                manifest = artifact_store.read_manifest(store, sha256)
                if manifest is None or not manifest.is_reusable:
                    entry.unlink(missing_ok=True)
                    break


def _build_result(outputs: Json, listener: EventListener, workdir: Workdir, parent: str, started: float) -> Json:
    registered, moved = (listener.results.get(stage, {}) for stage in ("registration", "promotion"))
    digests = {kind: outputs[kind] for kind in ("dataset", "model", "evaluation")}
    tagged = (registered.get("tags") or {}).get("tuneline.repository_sha256")
    digests["repository"] = registered.get("repository") or tagged
    # loading an artifact verifies its digest, also for cached outputs
    paths = {
        kind: str(artifact_store.load_artifact(workdir.store, sha256).path) if sha256 else None
        for kind, sha256 in digests.items()
    }
    # a stage without events was cached by kfp, unless the verdict skipped it
    is_packaged = outputs["verdict"] == "accepted" and digests["repository"]
    skipped = set(CONDITIONAL_STAGES) - ({"triton_packaging"} if is_packaged else set())
    from_cache = {"seconds": 0.0, "cached": True}
    stages = [
        {
            "name": stage,
            "seconds": round(listener.ended.get(stage, from_cache)["seconds"], 2),
            "cached": bool(listener.ended.get(stage, from_cache).get("cached")),
        }
        for stage in REPORTED_STAGES
        if stage in listener.ended or stage not in skipped
    ]
    return {
        "verdict": registry_outcome.determine_verdict(outputs["verdict"], registered),
        "workdir": str(workdir.root),
        "artifacts": paths,
        "mlflow": {
            "tracking_uri": url_credentials.remove_password(os.environ["MLFLOW_TRACKING_URI"]),
            "run_id": parent,
            "model_name": registered.get("name"),
            "model_version": registered.get("version"),
            "aliases": registry_outcome.list_aliases(registered, moved),
        },
        "stages": stages,
        "seconds": round(time.monotonic() - started, 2),
        "report": str(listener.run.folder / "report.html"),
        "run": listener.run.name,
    }
