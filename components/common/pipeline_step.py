"""A pipeline step: runs a stage's function within a run.

The step writes progress and errors to the run's events, and output to the run's logs. Metrics go to a nested MLflow
run, the result to the artifact store. A step is killed when its run ends.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from components.common.artifacts import code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.cost import budgets, stage_cost
from components.common.cost.budgets import BudgetClock
from components.common.cost.cost_rates import Figures, format_figures
from components.common.cost.stage_cost import Cost
from components.common.reporting import mlflow_tracking
from components.common.runtime import process_control
from components.common.runtime.errors import (
    RESUME_HINT,
    DiskFullError,
    InterruptedRunError,
    TunelineError,
    translate_system_error,
    wrap_unexpected_error,
)
from components.common.runtime.reporters import (
    RESERVE_FILENAME,
    CompositeReporter,
    EventLog,
    PlainTextReporter,
    Reporter,
    parse_event,
)
from components.common.workspace import artifact_store, step_records
from components.common.workspace.artifact_store import Workdir

# The stage that creates each kind of artifact.
STAGE_BY_ARTIFACT = {
    "dataset": "data_curation",
    "model": "fine_tuning",
    "evaluation": "evaluation",
    "repository": "triton_packaging",
}

MAX_KFP_NAME_CHARACTERS = 200


class KfpArtifact(Protocol):
    """The part of kfp.dsl.Artifact that this module needs."""

    uri: str
    path: str
    metadata: dict[str, Any]


@dataclass
class Step:
    """The context of a step's body: reporter, workdir, and its MLflow run if the step is tracked.

    Attributes:
        events: event log of a local run; None on a cluster.
        cached: whether the step returns an artifact that was already in the store.
        leases: contexts that mark the loaded artifacts as in use until the step ends.
        results: what `report_result` received; part of the step's record in a Kubeflow run.
        spending: the cost of the step, and the budgets that it counts against.
        figures: the cost of the artifact that the step built, as `CostRates.convert` returns it.
    """

    stage: str
    reporter: Reporter
    workdir: Workdir
    mlflow_run: mlflow_tracking.MlflowReporter | None
    events: EventLog | None = None
    cached: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    leases: ExitStack = field(default_factory=ExitStack)
    spending: BudgetClock = field(default_factory=lambda: BudgetClock(budgets.load_meter()))
    figures: Figures = field(default_factory=dict)

    @property
    def run_events_path(self) -> Path | None:
        """The event file of a local run; None on a cluster."""
        return self.events.path if self.events else None

    def report_result(self, **values: Any) -> None:
        """Write the step's result to the run's events; the run's summary shows it."""
        self.results.update(values)
        if self.events:
            self.events.write("result", **values)

    def report_cost(self, cost: Cost) -> None:
        """Log the known figures of the stage's cost to its MLflow run, and keep them for the links."""
        self.figures = self.spending.meter.rates.convert(cost)
        if self.mlflow_run:
            self.mlflow_run.metrics(mlflow_tracking.extract_metrics({"cost": self.figures}), 0)

    def describe_cost(self, *artifacts: Artifact) -> str:
        """Return the recorded cost of artifacts as text; "" if the cost of one is not recorded."""
        costs = [stage_cost.read_cost(self.workdir.store, artifact.sha256) for artifact in artifacts]
        known = [cost for cost in costs if cost]
        is_complete = len(known) == len(costs)
        return format_figures(self.spending.meter.rates.convert(stage_cost.add_costs(known))) if is_complete else ""

    def write_links(self, path: str, **digests: str) -> None:
        """Write a link to the MLflow run, the digests and the cost as Markdown for the Kubeflow UI.

        Args:
            path: file to write; nothing is written if the path is empty.
            digests: digests and other outputs of the step, by name.
        """
        if not path:
            return
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in digests.items()]
        if self.figures:
            lines.append(f"cost: {format_figures(self.figures)}")
        if self.mlflow_run:
            try:
                lines.insert(0, mlflow_tracking.format_run_link(self.mlflow_run))
            except InterruptedRunError:
                raise
            except Exception as error:  # a server that does not answer must not fail the finished step
                print(f"no link to the MLflow run: {type(error).__name__}", file=sys.stderr)
                lines.insert(0, f"MLflow run {self.mlflow_run.run_id}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")

    def load_artifact(self, sha256: str, *kinds: str) -> Artifact:
        """Return a verified input artifact from the store, and record the artifact as in use until the step ends.

        Args:
            sha256: content digest of the artifact.
            kinds: accepted kinds; without `kinds`, every kind is accepted.

        Raises:
            ArtifactDamagedError: the artifact is not in the store, or a file differs from its manifest.
            UsageError: the artifact's kind is not in `kinds`.
        """
        artifact = artifact_store.load_artifact(self.workdir.store, sha256, *kinds, reporter=self.reporter)
        self.leases.enter_context(artifact_store.keep_in_use(self.workdir.store, sha256))
        return artifact


@contextmanager
def step_context(stage: str, *, tracked: bool = True) -> Iterator[Step]:
    """Run a step's body: report its start, end and error as events of the run, and its metrics in a nested MLflow run.

    Args:
        stage: name of the stage, part of the events and of the log's file name.
        tracked: open an MLflow run if a tracking server is set.

    Raises:
        SystemExit: the body raised an error; the code is the error's exit code.
    """
    process_control.restrict_new_files()
    if os.environ.get("TUNELINE_RUN_PID"):
        process_control.die_with_process(int(os.environ["TUNELINE_RUN_PID"]))
    # Ctrl-C on a terminal reaches a step twice, from the terminal and from its run; the second must not stop the
    # cleanup.
    process_control.install_stop_handlers(once=True)
    process_control.relax_garbage_collector()
    path = os.environ.get("TUNELINE_EVENTS")
    events = EventLog(Path(path), stage) if path else None
    clock = stage_cost.CostClock()
    record = step_records.open_record()
    record.write("running")
    log: Path | None = None  # in a pod, the output goes to the pod's log
    with ExitStack() as redirection:
        if events:
            log = events.path.parent / "logs" / f"{stage}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            print(f"{stage} writes to {log}")
            file = redirection.enter_context(log.open("ab"))
            redirection.enter_context(process_control.redirect_output(file.fileno()))
            events.write("started", pid=os.getpid())
        try:
            with ExitStack() as contexts:
                contexts.enter_context(_reserve_for_errors())
                is_tracked = tracked and mlflow_tracking.is_enabled()
                run = contexts.enter_context(mlflow_tracking.stage_run(stage)) if is_tracked else None
                contexts.enter_context(_reserve_for_errors())  # before the MLflow run is closed as FAILED
                reporters: list[Reporter | None] = [PlainTextReporter(sys.stdout), events, run]
                reporter = CompositeReporter(list(filter(None, reporters)))
                step = Step(stage, reporter, Workdir.from_environment(), run, events)
                with step.leases:
                    yield step
        except BaseException as error:
            process_control.acknowledge_stop()
            reported = _convert_error(error, stage, log)
            traceback.print_exc()
            if events:
                events.write("failed", error=reported.as_dict(), exit_code=reported.exit_code, **clock.read())
            record.write_error(reported, **clock.read())
            sys.exit(reported.exit_code)
    if events:
        events.write("finished", cached=step.cached, **clock.read())
    record.write("finished", cached=step.cached, result=step.results, **clock.read())


def sum_run_costs(events: Path) -> Cost:
    """Return the cost of the steps of a local run that have ended, from the run's events."""
    lines = events.read_text(encoding="utf-8", errors="replace").splitlines()
    parsed = filter(None, map(parse_event, lines))
    return stage_cost.add_costs(event for event in parsed if event["event"] in ("finished", "failed"))


def compute_cache_key(stage: str, parameters: Mapping[str, Any]) -> str:
    """Return the key of a step's result: the digest of its parameters and of the stage's code."""
    return hashing.digest({"stage": stage, "code": code_digest.code_sha256(stage), "parameters": dict(parameters)})


def produce_artifact(
    stage: str, parameters: Mapping[str, Any], build: Callable[[Path, Step], Artifact], links: str = ""
) -> Artifact:
    """Run a stage that builds an artifact, or return the stored artifact of the same parameters and code.

    Args:
        parameters: every parameter of the step; part of the cache key.
        build: builds the artifact in the given folder.
        links: path of the step's Markdown output for the Kubeflow UI; "" to write no links.

    Raises:
        SystemExit: as `step_context`.
    """
    key = compute_cache_key(stage, parameters)
    with step_context(stage) as step:
        store = step.workdir.store

        def build_within_budget(folder: Path) -> Artifact:
            spent = sum_run_costs(step.events.path) if step.events else stage_cost.read_attempts(store, stage, key)
            step.spending.meter = step.spending.meter.charge(spent)
            step.spending.check()
            try:
                return build(folder, step)
            except BaseException:
                with suppress(Exception):  # the stage's own error takes precedence
                    stage_cost.record_attempt(store, stage, key, step.spending.read())
                raise

        artifact, step.cached = artifact_store.get_or_build(store, stage, key, build_within_budget, step.reporter)
        if not step.cached:
            attempts = stage_cost.read_attempts(store, stage, key)
            total = stage_cost.add_costs([attempts, step.spending.read()])
            stage_cost.record_cost(store, stage, artifact.sha256, total)
            if any(attempts.values()):
                stage_cost.reset_attempts(store, stage, key)
            step.report_cost(total)
        step.report_result(**{artifact.manifest.role: artifact.sha256})
        if step.mlflow_run:
            if step.cached:
                step.mlflow_run.log_reuse(stage, artifact)
            step.mlflow_run.log_result(artifact)
        step.write_links(links, **{artifact.manifest.role: artifact.sha256})
    return artifact


@contextmanager
def _reserve_for_errors() -> Iterator[None]:
    """On a full disk, free the run's reserved space, so that the error can be written to MLflow and the events."""
    try:
        yield
    except Exception as error:
        events = os.environ.get("TUNELINE_EVENTS")
        translated = error if isinstance(error, TunelineError) else translate_system_error(error)
        if events and isinstance(translated, DiskFullError):
            Path(events).with_name(RESERVE_FILENAME).unlink(missing_ok=True)
        raise


def _convert_error(error: BaseException, stage: str, log: Path | None) -> TunelineError:
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("interrupted", hint=RESUME_HINT)
    if not isinstance(error, TunelineError):
        location = f"the traceback is in {log or 'the log of the step'}."
        error = translate_system_error(error) or wrap_unexpected_error(error, location)
    error.stage = error.stage or stage
    return error


def copy_report(artifact: Artifact, path: str) -> None:
    """Copy an artifact's report to the HTML output at `path`, which the Kubeflow UI shows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(artifact.path / "report.html", path)


def log_kfp_metrics(artifact: Artifact, metrics: KfpArtifact) -> None:
    """Log the verdict and the numbers of an artifact's summary as metrics for the Kubeflow UI."""
    metrics.metadata.update({"verdict": artifact.manifest.summary["verdict"], **_list_figures(artifact)})


def describe_to_kfp(artifact: Artifact, output: KfpArtifact) -> None:
    """Describe a stored artifact to Kubeflow, so that Kubeflow's lineage shows its digest, address and figures.

    Kubeflow's launcher uploads the content of an output, and downloads it for every task that uses the output. In a pod,
    the content is therefore the manifest alone; the only copy of the artifact's files is in the store.

    Args:
        artifact: artifact in the store.
        output: output of the task. Its URI is a local path in a local run.
    """
    address = artifact_store.get_artifact_uri(artifact)
    output.metadata.update({"content_sha256": artifact.sha256, "store_uri": address, **_list_figures(artifact)})
    if "://" in output.uri:
        Path(output.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / "manifest.json", output.path)
    else:  # equal artifacts get equal URIs, because the URI is part of the cache keys of kfp.local
        output.uri = str(artifact.path)


def _list_figures(artifact: Artifact) -> dict[str, float]:
    """Return the finite numbers of an artifact's summary whose names fit Kubeflow's metadata store.

    Kubeflow's launcher cannot read other numbers. Names may contain those of the user's files.
    """
    figures = mlflow_tracking.extract_metrics(artifact.manifest.summary)
    return {
        name: value for name, value in figures.items() if math.isfinite(value) and len(name) <= MAX_KFP_NAME_CHARACTERS
    }
