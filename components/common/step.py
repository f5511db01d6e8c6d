"""A pipeline step: what stands between KFP's executor and a stage's function.

It joins the stage to the run: progress and errors go to the run's events, what it prints to the run's logs, metrics to a nested MLflow
run, the result to the artifact store. A step killed together with its run leaves nothing running.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import cost, hashing, places, process, tracking
from components.common.artifacts import Artifact
from components.common.errors import GOES_ON, DiskFullError, InterruptedRunError, TunelineError, of_the_machine, unexpected
from components.common.places import Workdir
from components.common.progress import RESERVE, Events, Plain, Reporter, Several


@dataclass
class Step:
    """What a step's body works with: where to report, where things lie, the MLflow run if there is one."""

    stage: str
    reporter: Reporter
    workdir: Workdir
    tracked: tracking.MlflowReporter | None
    events: Events | None = None
    cached: bool = False
    using: ExitStack = field(default_factory=ExitStack)

    @property
    def run_events(self) -> Path | None:
        """The event file of the run on this machine, in the run's folder; None on a cluster."""
        return self.events.path if self.events else None

    def result(self, **values: Any) -> None:
        """Tell the run what came of this step, for its summary."""
        if self.events:
            self.events.write("result", **values)

    def show_links(self, path: str, **named: str) -> None:
        """Show in the Kubeflow UI where the MLflow run of this step is, and what it made: a Markdown output is a file at `path`."""
        if not path:
            return
        run = [_link(self.tracked)] if self.tracked else []
        lines = [*run, *(f"{name.replace('_', ' ')}: {value}" for name, value in named.items())]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")

    def artifact(self, sha256: str, *kinds: str) -> Artifact:
        """An input artifact from the store, every digest checked. Until the step ends it says that it is in use."""
        found = places.stored(self.workdir.store, sha256, *kinds, reporter=self.reporter)
        self.using.enter_context(places.in_use(self.workdir.store, sha256))
        return found


@contextmanager
def running(stage: str, *, tracked: bool = True) -> Iterator[Step]:
    """Run a step's body: its start, end and any error are events of the run, its metrics (if `tracked`) a nested MLflow run."""
    events = _events(stage)
    clock = cost.Clock()
    with _own_log(stage) as log:
        if events:
            events.write("started", pid=os.getpid())
        try:
            with _room_for_last_words(), _tracked(stage) if tracked else nullcontext() as own, _room_for_last_words():
                step = Step(stage, _reporter(stage, events, own), Workdir.from_environment(), own, events)
                with step.using:
                    yield step
        except BaseException as error:
            process.end_stop()
            told = _told(error, stage, log)
            traceback.print_exc()
            if events:
                events.write("failed", error=told.as_dict(), exit_code=told.exit_code, **clock.read())
            sys.exit(told.exit_code)
    if events:
        events.write("finished", cached=step.cached, **clock.read())


def _link(tracked: tracking.MlflowReporter) -> str:
    """The run as Markdown. A server that is silent for a moment must not cost the hours of work that are done by now."""
    try:
        return tracking.link_to_run(tracked)
    except InterruptedRunError:
        raise
    except Exception as error:
        print(f"no link to the MLflow run: {type(error).__name__}", file=sys.stderr)
        return f"MLflow run {tracked.run_id}"


def key_of(stage: str, parameters: Mapping[str, Any]) -> str:
    """The key a step's result is kept under: digest of all the step was given, and of the stage's code."""
    return hashing.digest({"stage": stage, "code": hashing.code_sha256(stage), "parameters": dict(parameters)})


def produce(stage: str, parameters: Mapping[str, Any], build: Callable[[Path, Step], Artifact], links: str = "") -> Artifact:
    """Run a stage that makes an artifact. `parameters` are all the step was given; `links` names its Markdown file for the UI."""
    key = key_of(stage, parameters)
    with running(stage) as step:
        clock = cost.Clock()
        artifact, step.cached = places.produce(step.workdir.store, stage, key, lambda folder: build(folder, step), step.reporter)
        if not step.cached:
            cost.keep(step.workdir.store, stage, artifact.sha256, clock.read())
        if step.tracked:
            step.tracked.result(artifact)
        step.show_links(links, **{artifact.manifest.kind: artifact.sha256})
    return artifact


def _events(stage: str) -> Events | None:
    """The run's event file; a step of a run on this machine also ends with that run."""
    path = os.environ.get("TUNELINE_EVENTS")
    if os.environ.get("TUNELINE_RUN_PID"):
        process.die_with(int(os.environ["TUNELINE_RUN_PID"]))
    process.hear_stops(once=True)  # Ctrl-C on a terminal reaches a step twice, from there and from its run: clearing up goes on
    return Events(Path(path), stage) if path else None


@contextmanager
def _own_log(stage: str) -> Iterator[Path | None]:
    """What this process and its children print goes to logs/<stage>.log of the run on this machine. In a pod (None) its log has it."""
    events = os.environ.get("TUNELINE_EVENTS")
    if not events:
        yield None
        return
    path = Path(events).parent / "logs" / f"{stage}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{stage} writes to {path}")
    with path.open("ab") as file, process.output_to(file.fileno()):
        yield path


@contextmanager
def _room_for_last_words() -> Iterator[None]:
    """Give back the space that the run set aside when the disk is found full: MLflow and the run's events are told of it yet."""
    try:
        yield
    except Exception as error:
        events = os.environ.get("TUNELINE_EVENTS")
        if events and isinstance(error if isinstance(error, TunelineError) else of_the_machine(error), DiskFullError):
            Path(events).with_name(RESERVE).unlink(missing_ok=True)
        raise


@contextmanager
def _tracked(stage: str) -> Iterator[tracking.MlflowReporter | None]:
    if not tracking.enabled():
        yield None
        return
    with tracking.stage_run(stage) as reporter:
        yield reporter


def _reporter(stage: str, events: Events | None, tracked: tracking.MlflowReporter | None) -> Reporter:
    """Plain lines for the step's log or the pod's, events for the run's process where there is one, metrics to MLflow."""
    reporters: list[Reporter] = [Plain(sys.stdout)]
    if events:
        reporters.append(events)
    if tracked:
        reporters.append(tracked)
    return Several(reporters)


def _told(error: BaseException, stage: str, log: Path | None) -> TunelineError:
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("interrupted", hint=GOES_ON)
    if not isinstance(error, TunelineError):
        error = of_the_machine(error) or unexpected(error, f"{log or 'the log of the step'} has the traceback.")
    error.stage = error.stage or stage
    return error


def copy_report(artifact: Artifact, path: str) -> None:
    """Show an artifact's report in the Kubeflow UI: an HTML output is a file at `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(artifact.path / "report.html", path)


def show_figures(artifact: Artifact, metrics: Any) -> None:
    """Show the verdict and every figure of an artifact's summary in the Kubeflow UI, as its kind of metrics."""
    metrics.metadata.update({"verdict": artifact.manifest.summary["verdict"], **tracking.figures(artifact.manifest.summary)})
