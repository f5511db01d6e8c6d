"""The whole pipeline on this machine, through kfp.local: real components, real cache, one process a step."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from components.common import addresses, places, process, progress, tracking
from components.common.errors import EXIT_INTERRUPTED, ArtifactDamagedError, TunelineError, of_the_machine
from components.common.launch import settings
from components.common.launch.settings import LauncherSettings
from components.common.places import Workdir
from components.common.progress import Reporter
from pipelines import outcome, runs
from pipelines.config import Customization
from pipelines.runs import Run
from pipelines.stages import CONDITIONAL, REPORTED, STAGES

SECONDS_TO_ASK_AGAIN = 7 * 24 * 3600  # a server that was gone for so long is not coming back


@dataclass
class Listener:
    """Follows a run's events and shows them; remembers each stage's seconds, results and failure."""

    run: Run
    reporter: Reporter
    seconds: dict[str, float] = field(default_factory=dict)
    cached: dict[str, bool] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: TunelineError | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Show one event."""
        stage, kind = event["stage"], event["event"]
        title = STAGES.get(stage, stage)
        if kind == "started":
            self.reporter.step(title)
        elif kind == "step":
            self.reporter.step(f"{title}: {event['name']}")
        elif kind == "progress":
            self.reporter.progress(event["done"], event["total"], event["unit"])
        elif kind == "metrics":
            self.reporter.metrics(event["values"], event["step"])
        elif kind == "note":
            self.reporter.note(event["text"])
        elif kind == "result":
            self.results[stage] = event
        elif kind in ("finished", "failed"):
            self.seconds[stage] = event["seconds"]
            self.cached[stage] = bool(event.get("cached"))
            if kind == "failed":
                self.failure = TunelineError.from_dict(event["error"], event["exit_code"])

    def follow(self, stop: threading.Event) -> None:
        """Show events as they come, until `stop` is set and the file is read to its end."""
        self.run.events.touch()
        with self.run.events.open(encoding="utf-8", errors="replace") as file:
            while True:
                ended = stop.is_set()
                for line in _whole_lines(file):
                    if event := progress.event_in(line):
                        self.take(event)
                if ended:
                    return
                stop.wait(0.2)


def _whole_lines(file: IO[str]) -> Iterator[str]:
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield line


def run(
    config: Customization, workdir: Workdir, *, quiet: bool, uri: str | None = None, where: LauncherSettings | None = None
) -> dict[str, Any]:
    """Run the customization, its training `where` a launcher brings it. Returns the object that `tuneline run --json` prints.

    Raises the TunelineError of the step that failed, with its stage. A second run in the same workdir is refused.
    """
    began = time.monotonic()
    with runs.exclusive(workdir):
        reporter = progress.console(quiet=quiet)
        _close_dead_runs(workdir, reporter)
        process.adopt_orphans()
        this = runs.new_run(workdir)
        try:
            with _environment(workdir, this, uri, where or settings.from_environment()):
                parent = _open_tracking(config, workdir, this)
                result = _run_tracked(config, workdir, this, reporter, parent, began)
        except BaseException as error:
            this.reserve.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what happened is told, even where it cannot be kept
                this.write(
                    status="interrupted" if _is_interruption(error) else "failed", ended=time.time(), error=runs.told(error, workdir)
                )
            raise
        finally:
            this.reserve.unlink(missing_ok=True)
            progress.close(reporter)
    return result


@contextlib.contextmanager
def _environment(workdir: Workdir, this: Run, uri: str | None, where: LauncherSettings) -> Iterator[None]:
    """What the steps find in their environment; see components.common.places and step."""
    values = {
        "TUNELINE_WORKDIR": str(workdir.root),
        "TUNELINE_EVENTS": str(this.events),
        "TUNELINE_RUN_PID": str(os.getpid()),
        "MLFLOW_TRACKING_URI": uri or workdir.tracking_uri,
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **settings.as_environment(where),
    }
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _open_tracking(config: Customization, workdir: Workdir, this: Run) -> str:
    """The parent MLflow run; artifacts of a tracking store in the workdir lie in the workdir too."""
    own = os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:")
    tags = {"tuneline.run": this.name, "tuneline.model": config.model_registry.name}
    tracking.connect()  # where no server answers there is nothing that would have to be closed
    this.write(tracking_uri=addresses.without_password(os.environ["MLFLOW_TRACKING_URI"]), tracking_open=True)
    parent = tracking.start_run(this.name, tags, workdir.root / "mlflow-artifacts" if own else None)
    os.environ["MLFLOW_RUN_ID"] = parent
    this.write(mlflow_run_id=parent)
    return parent


def _is_interruption(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) == EXIT_INTERRUPTED


def _close_dead_runs(workdir: Workdir, reporter: Reporter) -> None:
    """Close the runs whose process was killed, here and in MLflow: nobody else holds the workdir now."""
    places.tidy(workdir.store)
    silent: set[str] = set()
    for folder in workdir.runs.glob("*/run.json"):
        dead = Run(folder.parent)
        known = dead.read()
        status = known.get("status", "running")
        if status == "running" or known.get("tracking_open"):
            closed = _closed_in_mlflow(dead.name, known, silent, reporter)
            dead.write(status="killed" if status == "running" else status, tracking_open=not closed)
            dead.reserve.unlink(missing_ok=True)


def _closed_in_mlflow(name: str, known: dict[str, Any], silent: set[str], reporter: Reporter) -> bool:
    """Whether nothing of a dead run is left open in MLflow, or ever will be closed. A server that is silent is asked once."""
    uri = str(known.get("tracking_uri") or "")
    if uri not in silent:
        if tracking.end_dead_run(uri, name):
            return True
        silent.add(uri)
        reporter.note(f"the MLflow server {uri} does not answer; the runs that were killed while it was in use stay open there")
    return time.time() - float(known.get("started") or 0) > SECONDS_TO_ASK_AGAIN


def _run_tracked(config: Customization, workdir: Workdir, this: Run, reporter: Reporter, parent: str, began: float) -> dict[str, Any]:
    listener = Listener(this, reporter)
    try:
        outputs = _run_pipeline(config, workdir, this, listener)
        result = _result(outputs, listener, workdir, this, parent, began)
    except BaseException as error:
        this.reserve.unlink(missing_ok=True)
        with contextlib.suppress(Exception):  # a server that is gone too must not hide what failed
            status = "KILLED" if _is_interruption(error) else "FAILED"
            this.write(tracking_open=not tracking.end_dead_run(os.environ["MLFLOW_TRACKING_URI"], this.name, status))
        raise
    tracking.end_run(parent, "FINISHED")
    this.write(status="finished", ended=time.time(), result=result, tracking_open=False)
    return result


def _run_pipeline(config: Customization, workdir: Workdir, this: Run, listener: Listener) -> dict[str, Any]:
    """Run through kfp.local; what it and the steps print goes to run.log, the events to the screen."""
    from kfp import local

    from pipelines.customization import build

    text = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=False), sort_keys=False)
    (this.folder / "customization.yaml").write_text(text, encoding="utf-8")
    cache = workdir.root / "kfp-cache"
    _forget_missing(cache, workdir.store)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(this.folder / "kfp"),
        raise_on_error=True,
        enable_caching=True,
        cache_root=str(cache),
    )
    with _following(listener), _Log(this.log) as log, contextlib.redirect_stdout(log), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            task = build(config)(configuration=text)
        except RuntimeError as error:
            failed = TunelineError(_plain(str(error)), hint=f"Its log is in {this.log}.")
        except OSError as error:
            failed = of_the_machine(error) or TunelineError(_plain(str(error)), hint=f"Its log is in {this.log}.")
        except KeyboardInterrupt:
            failed = runs.stop_steps(this)
        else:
            return {name: task.outputs[name] for name in ("dataset", "version", "model", "evaluation", "verdict")}
    raise _cause(failed, listener.failure)


class _Log(io.TextIOBase):
    """A log that a full disk does not break: the step that finds the disk full says more than that its log could not be written."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())
        return len(text)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _cause(failed: TunelineError, told: TunelineError | None) -> TunelineError:
    """What a step told of its end says more than that it ended; but what an interruption tore is no failure of its own."""
    return told if told and (_is_interruption(told) or not _is_interruption(failed)) else failed


def _plain(text: str) -> str:
    """Without the terminal colours kfp puts into its messages."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@contextlib.contextmanager
def _following(listener: Listener) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=listener.follow, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)


def _forget_missing(cache: Path, store: Path) -> None:
    """Drop cached outputs whose artifact is no longer in the store, or rests on a failure in passing: else no run could make it again."""
    for entry in cache.glob("*.json"):
        digests = re.findall(r'"([0-9a-f]{64})"', entry.read_text(encoding="utf-8"))
        if not all(_lasts(store, sha256) for sha256 in digests):
            entry.unlink()


def _lasts(store: Path, sha256: str) -> bool:
    """Whether an artifact is there and is what the same work would make again; a damaged one is told by the step that reads it.

    A step that is answered from the cache reads nothing, so the artifact is marked as used for it.
    """
    try:
        places.mark_used(store, sha256)
        found = places.manifest(store, sha256)
        return found is not None and found.lasting
    except ArtifactDamagedError:
        return True


def _result(outputs: dict[str, Any], listener: Listener, workdir: Workdir, this: Run, parent: str, began: float) -> dict[str, Any]:
    registered = listener.results.get("registration", {})
    moved = listener.results.get("promotion", {})
    digests = {kind: outputs[kind] for kind in ("dataset", "model", "evaluation")}
    digests["repository"] = registered.get("repository") or (registered.get("tags") or {}).get("tuneline.repository_sha256")
    # Cached outputs are believed only after their digests check.
    found = {kind: places.stored(workdir.store, sha256).path if sha256 else None for kind, sha256 in digests.items()}
    return {
        "verdict": outcome.verdict(outputs["verdict"], registered),
        "workdir": str(workdir.root),
        "artifacts": {kind: str(path) if path else None for kind, path in found.items()},
        "mlflow": {
            "tracking_uri": addresses.without_password(os.environ["MLFLOW_TRACKING_URI"]),
            "run_id": parent,
            "model_name": registered.get("name"),
            "model_version": registered.get("version"),
            "aliases": outcome.aliases(registered, moved),
        },
        "stages": _stages(listener, outputs["verdict"]),
        "seconds": round(time.monotonic() - began, 2),
        "report": str(this.folder / "report.html"),
        "run": this.name,
    }


def _stages(listener: Listener, verdict: str) -> list[dict[str, Any]]:
    """Seconds a stage. One that kfp's cache answered has no events: it was cached unless the verdict left it out."""
    stages = []
    for stage in REPORTED:
        ran = stage in listener.seconds
        if ran or stage not in CONDITIONAL or (stage == "triton_packaging" and verdict == "accepted"):
            cached = listener.cached.get(stage, True)
            stages.append({"name": stage, "seconds": round(listener.seconds.get(stage, 0.0), 2), "cached": cached})
    return stages
