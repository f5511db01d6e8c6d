"""Run tracking with MLflow. `MlflowReporter` records the metrics that a stage reports.

A stage's run is nested under the run in MLFLOW_RUN_ID, which a scheduler or the pipeline sets. If MLFLOW_TRACKING_URI
is not set, neither pipeline steps nor single stages started from the shell are tracked.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import url_credentials
from components.common.runtime.errors import (
    EXIT_INTERRUPTED,
    EngineMissingError,
    UsageError,
    get_first_line,
    translate_system_error,
)
from components.common.runtime.reporters import SilentReporter
from components.common.runtime.user_name import get_user_name
from components.common.workspace import artifact_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "tuneline"
OWNER_TAG = "tuneline.workdir"  # on runs and logged models: the ID of the workdir that created them
KFP_RUN_TAG = "tuneline.kfp_run"  # on runs: the ID of the Kubeflow Pipelines run that contains the step
STAGE_TAG = "tuneline.stage"
ORIGINAL_RUN_TAG = "tuneline.original_run"  # on the run of a reused stage: the ID of the run that built the artifact
REUSED_TAG = "tuneline.reused"
SPLITS = ("train", "validation", "test")
DATASET_DIGEST_LENGTH = 36  # limit of MLflow
MAX_PARAM_CHARACTERS = 6000  # limit of MLflow
PROBE_TIMEOUT_SECONDS = 20.0
MAX_PARAMS_PER_REQUEST = 100  # limit of MLflow
MAX_METRICS_PER_REQUEST = 1000  # limit of MLflow
TRACKING_URI_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


class TrackingUnavailableError(EngineMissingError):
    """The tracking server does not answer."""


def is_enabled() -> bool:
    """Return whether a tracking server is configured."""
    return bool(os.environ.get("MLFLOW_TRACKING_URI"))


def connect(uri: str | None = None) -> ModuleType:
    """Return the mlflow module, connected to the tracking server.

    Args:
        uri: tracking URI; default: MLFLOW_TRACKING_URI.

    Raises:
        UsageError: the tracking URI has an unsupported scheme.
        EngineMissingError: the server does not answer, or the database driver is not installed.
    """
    _set_client_defaults()
    import mlflow

    if uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
    # User and password are moved out of the address, because libraries repeat the whole address in their errors. They
    # take precedence over MLFLOW_TRACKING_TOKEN and another user, as credentials in an address do.
    address, user, password = url_credentials.split_credentials(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if password and address.startswith(("http://", "https://")):
        os.environ.update(MLFLOW_TRACKING_URI=address, MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)
    if tracking_uri := os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(tracking_uri)  # an earlier call in this process would otherwise override the variable
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # failures are raised; a logged traceback would repeat them
    _check_server(mlflow.get_tracking_uri())
    module: ModuleType = mlflow
    return module


@contextmanager
def restore_tracking_uri() -> Iterator[None]:
    """Restore MLflow's tracking URI of this process at the end of the block, for callers that use MLflow themselves."""
    loaded = sys.modules.get("mlflow")
    previous = loaded.get_tracking_uri() if loaded and loaded.is_tracking_uri_set() else None
    try:
        yield
    finally:
        if "mlflow" in sys.modules:
            sys.modules["mlflow"].set_tracking_uri(previous)


def _check_server(address: str) -> None:
    """Raise a TunelineError if the server does not answer, or the database driver is not installed."""
    scheme, public_address = address.partition(":")[0].partition("+")[0], url_credentials.remove_password(address)
    if scheme not in TRACKING_URI_SCHEMES:
        raise UsageError(
            f"{public_address} is not an MLflow tracking URI; supported schemes: {', '.join(TRACKING_URI_SCHEMES)}",
            hint="Use a URI with a supported scheme, for example http://host:5000.",
        )
    if scheme in ("http", "https"):
        import urllib.error
        import urllib.request

        # urllib treats a user name as part of the host name
        url = url_credentials.remove_credentials(address).rstrip("/") + "/health"
        try:
            with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_SECONDS):  # noqa: S310 - http(s) only
                return
        except urllib.error.HTTPError:
            return  # the server answers; behind a path or with authentication, it may not serve /health
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise TrackingUnavailableError(
                f"the MLflow server {public_address} does not answer: {getattr(reason, 'strerror', None) or reason}",
                hint="Start the server, or correct MLFLOW_TRACKING_URI or --tracking-uri.",
            ) from None
    if scheme != "sqlite":
        from sqlalchemy.engine import make_url

        try:
            with suppress(ValueError):  # databricks is unknown to SQLAlchemy and needs no driver
                make_url(address).get_dialect().import_dbapi()
        except ImportError as error:
            raise EngineMissingError(
                f"the tracking store {public_address} requires the Python module {error.name}, which is not installed",
                hint=f"Install the database driver that provides the module {error.name}.",
            ) from None


def _set_client_defaults() -> None:
    """Limit retries, which take minutes by default, and silence messages on standard error."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is reserved for results
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def start_run(name: str, tags: Mapping[str, str], artifact_root: Path | None = None) -> str:
    """Open the run of a customization, nested under MLFLOW_RUN_ID if the variable is set, and return its run ID.

    Args:
        artifact_root: as in `get_experiment_id`.

    Raises:
        UsageError: the tracking URI is invalid, or the tracking server does not return the run MLFLOW_RUN_ID.
        EngineMissingError: the server does not answer or rejects the request.
    """
    _, run = _create_run(name, {**tags, "mlflow.runName": name}, artifact_root)
    return str(run.info.run_id)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate errors of the tracking server to TunelineError."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        first_line = get_first_line(error)
        address = url_credentials.remove_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
        is_transport_failure = "failed with" in first_line and "failed with error code" not in first_line
        if is_transport_failure and first_line.startswith("API request to"):
            raise TrackingUnavailableError(
                f"the MLflow server {address} stopped answering",
                hint="Restart the server, then run the same command again to resume.",
            ) from error
        file = _get_sqlite_file()
        raise translate_system_error(error, [file.parent] if file else []) or EngineMissingError(
            f"the MLflow server {address} rejected the request: {first_line}",
            hint="Check MLFLOW_TRACKING_URI or --tracking-uri, and the credentials (MLFLOW_TRACKING_TOKEN, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD).",
        ) from error


def _get_sqlite_file() -> Path | None:
    """Return the file of a SQLite tracking store, or None for another store."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def get_experiment_id(client: MlflowClient, artifact_root: Path | None = None) -> str:
    """Return the ID of the experiment for new runs and models.

    With MLFLOW_RUN_ID, this is the experiment of that run; otherwise the experiment in MLFLOW_EXPERIMENT_NAME or
    "tuneline", which is created if it does not exist.

    Args:
        artifact_root: folder for the artifacts of a new experiment. Default: a folder next to a SQLite store; a server
            chooses the location itself.

    Raises:
        UsageError: the tracking server does not return the run MLFLOW_RUN_ID.
    """
    from mlflow.exceptions import MlflowException

    if parent := os.environ.get("MLFLOW_RUN_ID"):
        try:
            return str(client.get_run(parent).info.experiment_id)
        except MlflowException as error:
            raise UsageError(
                f"MLFLOW_RUN_ID is {parent}, but the tracking server does not return this run: {error.message}",
                hint="Unset MLFLOW_RUN_ID, or set MLFLOW_TRACKING_URI to the server that has this run.",
            ) from None
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        file = _get_sqlite_file()
        # With a SQLite store, MLflow would store artifacts in the current folder. A server chooses the location (None).
        root = artifact_root or (file.parent / "mlflow-artifacts" if file else None)
        try:
            return str(client.create_experiment(name, artifact_location=root.as_uri() if root else None))
        except Exception:
            experiment = client.get_experiment_by_name(name)  # created by another process in the meantime
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def close_abandoned_run(uri: str | None, name: str, status: str = "KILLED") -> bool:
    """Close the run with this name with `status`, and its nested runs as KILLED, if they are still open.

    Finds the run by its tag, because its process may have been killed before it recorded the run ID.

    Args:
        uri: tracking URI that the run recorded; None if the run was not tracked.
        name: value of the run's tag `tuneline.run`.
        status: FAILED or KILLED.

    Returns:
        True if no run is left open; False if an error occurred, for example because the server did not answer.
    """
    if not uri:
        return True
    with suppress(Exception):
        current = os.environ.get("MLFLOW_TRACKING_URI", "")
        # A recorded address has no password, so both are compared without credentials.
        if url_credentials.remove_credentials(current) == url_credentials.remove_credentials(uri):
            client = connect().MlflowClient()
        else:  # without mlflow.set_tracking_uri, which would redirect the whole process
            _set_client_defaults()
            import mlflow

            _check_server(uri)
            client = mlflow.MlflowClient(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(experiments, f"tags.`tuneline.run` = '{name}'"):
            _close_nested_runs(client, run)
            if run.info.status == "RUNNING":
                client.set_terminated(run.info.run_id, status)
        return True
    return False


def _close_nested_runs(client: MlflowClient, run: Run) -> None:
    """Close the open runs nested in a run, innermost first: a repeated search skips the children of closed runs."""
    children = f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and attributes.status = 'RUNNING'"
    for child in client.search_runs([run.info.experiment_id], children):
        _close_nested_runs(client, child)
        client.set_terminated(child.info.run_id, "KILLED")


def build_owner_tags() -> dict[str, str]:
    """Return the tags, by name, that identify the owner of a run or logged model: workdir and Kubeflow Pipelines run.

    One MLflow server may track several workdirs, and each workdir deletes only its own runs and models.
    """
    workdir_id = ""
    if os.environ.get("TUNELINE_WORKDIR"):
        workdir_id = artifact_store.get_workdir_id(artifact_store.Workdir.from_environment(), create=True)
    tags = {OWNER_TAG: workdir_id, KFP_RUN_TAG: os.environ.get("KFP_RUN_ID", "")}
    return {name: value for name, value in tags.items() if value}


def build_source_tags() -> dict[str, str]:
    """Return MLflow's own tags for the user, the program and the commit of a run or logged model."""
    produced_by = artifact_folder.collect_provenance()
    commit, _, changes = (produced_by["git_commit"] or "").partition("+")
    tags = {
        "mlflow.user": get_user_name(),
        "mlflow.source.name": f"tuneline {produced_by['tuneline']}",
        "mlflow.source.type": "JOB" if os.environ.get("KFP_RUN_ID") else "LOCAL",
        "mlflow.source.git.commit": commit,
        "mlflow.git.dirty": "true" if changes else "",
    }
    return {name: value for name, value in tags.items() if value}


def _create_run(name: str, tags: Mapping[str, str], artifact_root: Path | None = None) -> tuple[MlflowClient, Run]:
    """Open a run, nested under MLFLOW_RUN_ID if the variable is set."""
    client, parent = connect().MlflowClient(), os.environ.get("MLFLOW_RUN_ID")
    parent_tags = {"mlflow.parentRunId": parent} if parent else {}
    all_tags = {**tags, **parent_tags, **build_owner_tags(), **build_source_tags()}
    with _translate_errors():
        experiment_id = get_experiment_id(client, artifact_root)
        return client, client.create_run(experiment_id, run_name=name, tags=all_tags)


def log_metrics(run_id: str, summary: Mapping[str, Any]) -> None:
    """Log the numbers of a summary to a run.

    Raises:
        EngineMissingError: the server does not answer or rejects the request.
    """
    MlflowReporter(connect().MlflowClient(), run_id).metrics(extract_metrics(summary), 0)


def end_run(run_id: str, status: str) -> None:
    """Close a run as FINISHED, FAILED or KILLED.

    Raises:
        EngineMissingError: the server does not answer or rejects the request.
    """
    client = connect().MlflowClient()
    with _translate_errors():
        client.set_terminated(run_id, status)


class MlflowReporter(SilentReporter):
    """Reporter that logs metrics and notes to an MLflow run, and ignores steps and progress."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self.run_id = client, run_id

    def metrics(self, values: Mapping[str, float], step: int, model_id: str | None = None) -> None:
        """Log metrics to the run, and to a logged model if `model_id` is its ID."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_sanitize_name(name), float(value), now, step, model_id=model_id) for name, value in values.items()
        ]
        with _translate_errors():
            for first in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
                self._client.log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS_PER_REQUEST])

    def note(self, text: str) -> None:
        with _translate_errors():
            self._client.set_tag(self.run_id, "tuneline.note", text[:5000])

    def log_params(self, values: Mapping[str, object]) -> None:
        """Log parameters by flat name. A parameter that the run already has keeps its value: MLflow forbids a change."""
        from mlflow.entities import Param

        with _translate_errors():
            present = self._client.get_run(self.run_id).data.params
            params = [Param(name, value) for name, value in format_params(values).items() if name not in present]
            for first in range(0, len(params), MAX_PARAMS_PER_REQUEST):
                self._client.log_batch(self.run_id, params=params[first : first + MAX_PARAMS_PER_REQUEST])

    def log_result(self, artifact: Artifact) -> None:
        """Log an artifact: configuration as parameters, digest and verdict as tags, figures as metrics, and reports.

        Raises:
            EngineMissingError: the server does not answer or rejects the request.
        """
        manifest = artifact.manifest
        self.log_params(flatten(manifest.config))
        self.metrics(extract_metrics(manifest.summary), 0)
        with _translate_errors():
            self._client.set_tag(self.run_id, f"tuneline.{manifest.role}_sha256", manifest.content_sha256)
            if "verdict" in manifest.summary:
                self._client.set_tag(self.run_id, "tuneline.verdict", str(manifest.summary["verdict"]))
                for number, reason in enumerate(manifest.summary.get("reasons", ()), 1):
                    self._client.set_tag(self.run_id, f"tuneline.reason.{number}", str(reason)[:5000])
            for name in ("manifest.json", "report.html", "training.jsonl", "evaluation.json"):
                if (artifact.path / name).exists():
                    self._client.log_artifact(self.run_id, str(artifact.path / name))

    def log_reuse(self, stage: str, artifact: Artifact) -> None:
        """Mark the run as one that reused an artifact, and link the run of the stage that built the artifact.

        The run gets the tags REUSED_TAG and, unless the original run was deleted, ORIGINAL_RUN_TAG. Call this method
        before `log_result`, which gives the run the digest by which an original run is found.

        Raises:
            EngineMissingError: the server does not answer or rejects the request.
        """
        digest_tag = f"tuneline.{artifact.manifest.role}_sha256"
        condition = f"tags.`{digest_tag}` = '{artifact.sha256}' and tags.`{STAGE_TAG}` = '{stage}'"
        with _translate_errors():
            experiment = self._client.get_run(self.run_id).info.experiment_id
            found = self._client.search_runs(
                [experiment], condition, max_results=1, order_by=["attributes.start_time ASC"]
            )
            tags = {STAGE_TAG: stage, REUSED_TAG: "true"}
            if found:
                # The original run may be deleted; a run that reused its artifact then still has its ID.
                original = found[0].data.tags.get(ORIGINAL_RUN_TAG, found[0].info.run_id)
                link = f"#/experiments/{experiment}/runs/{original}"
                tags |= {ORIGINAL_RUN_TAG: original, "mlflow.note.content": f"Reused the result of [this run]({link})."}
            for name, value in tags.items():
                self._client.set_tag(self.run_id, name, value)

    def log_dataset(self, artifact: Artifact, *, name: str, source: Mapping[str, str]) -> None:
        """Log the splits of a dataset version as dataset inputs of type dvc, each with its split as the context.

        Args:
            name: tag of the version.
            source: {"repo", "path", "rev", "md5", "tag", "remote"}.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        store_uri = artifact_store.get_artifact_uri(artifact)
        rows = artifact.manifest.summary.get("splits", {})
        inputs = []
        for split in SPLITS:
            location = {**source, "store_uri": f"{store_uri}/{split}.parquet"}
            dataset = Dataset(
                name=f"{name}/{split}",
                digest=artifact.sha256[:DATASET_DIGEST_LENGTH],
                source_type="dvc",
                source=json.dumps(location),
                profile=json.dumps({"num_rows": rows[split]}) if split in rows else None,
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", split)]))
        with _translate_errors():
            self._client.log_inputs(self.run_id, inputs)


def get_summary_run_id(own: MlflowReporter | None) -> str | None:
    """Return the ID of the run that summarizes a customization: MLFLOW_RUN_ID, or else the stage's own run.

    Args:
        own: reporter of the stage's own run; None if the stage is not tracked.
    """
    return (os.environ.get("MLFLOW_RUN_ID") or (own.run_id if own else None)) if is_enabled() else None


def describe_run(own: MlflowReporter | None) -> dict[str, str]:
    """Return the recorded start (UTC, ISO 8601) and user of the run of `get_summary_run_id`; {} without a run."""
    run_id = get_summary_run_id(own)
    if run_id is None:
        return {}
    run = connect().MlflowClient().get_run(run_id)
    started = datetime.fromtimestamp(run.info.start_time // 1000, UTC)
    return {
        "date": started.isoformat(),
        "author": run.data.tags.get("mlflow.user", ""),
        "run_url": _build_address(f"experiments/{run.info.experiment_id}/runs/{run_id}"),
    }


def build_version_url(name: str, version: str) -> str:
    """Return the address of a version in the MLflow UI; "" if no address is known."""
    return _build_address(f"models/{urllib.parse.quote(name)}/versions/{version}")


def log_files(own: MlflowReporter | None, *files: Path) -> None:
    """Log files to the run of `get_summary_run_id`."""
    if run_id := get_summary_run_id(own):
        client = connect().MlflowClient()
        for file in files:
            client.log_artifact(run_id, str(file))


def format_run_link(own: MlflowReporter) -> str:
    """Return a run as Markdown: a link to TUNELINE_MLFLOW_UI or to the server's HTTP address, otherwise its name."""
    run = connect().MlflowClient().get_run(own.run_id)
    return _format_link(f"MLflow run {run.info.run_name}", f"experiments/{run.info.experiment_id}/runs/{own.run_id}")


def format_version_link(name: str, version: str) -> str:
    """Return a version of a registered model as Markdown, linked as in `format_run_link`."""
    return _format_link(f"{name} version {version}", f"models/{urllib.parse.quote(name)}/versions/{version}")


def _format_link(text: str, page: str) -> str:
    address = _build_address(page)
    return f"[{text}]({address})" if address else text


def _build_address(page: str) -> str:
    """Return the address of a page of the MLflow UI, without credentials: the user name may be a token."""
    address = url_credentials.remove_credentials(
        os.environ.get("TUNELINE_MLFLOW_UI") or os.environ.get("MLFLOW_TRACKING_URI", "")
    )
    return f"{address.rstrip('/')}/#/{page}" if address.startswith(("http://", "https://")) else ""


@contextmanager
def stage_run(stage: str) -> Iterator[MlflowReporter]:
    """Open a run for a stage, nested under MLFLOW_RUN_ID, and close the run with the status of the block.

    The status is FINISHED, FAILED if the block raises an error, or KILLED if the block is interrupted.

    Raises:
        UsageError: the tracking URI is invalid, or the tracking server does not return the run MLFLOW_RUN_ID.
        EngineMissingError: the server does not answer or rejects the request.
    """
    with _close_at_end(*_create_run(stage, {STAGE_TAG: stage})) as reporter:
        yield reporter


@contextmanager
def nested_run(parent: MlflowReporter, name: str) -> Iterator[MlflowReporter]:
    """Open a run for a part of a stage, nested under the stage's run; close the run with the status of the block.

    Raises:
        EngineMissingError: the server does not answer or rejects the request.
    """
    client = connect().MlflowClient()
    with _translate_errors():
        experiment = client.get_run(parent.run_id).info.experiment_id
        tags = {"mlflow.parentRunId": parent.run_id, **build_owner_tags(), **build_source_tags()}
        run = client.create_run(experiment, run_name=name, tags=tags)
    with _close_at_end(client, run) as reporter:
        yield reporter


@contextmanager
def _close_at_end(client: MlflowClient, run: Run) -> Iterator[MlflowReporter]:
    """Yield the reporter of a run, and close the run with the status of the work."""
    try:
        yield MlflowReporter(client, run.info.run_id)
    except TrackingUnavailableError:
        raise  # the server does not answer, so the status cannot be recorded
    except BaseException as error:
        # An interruption of another process is an error with the exit code, but not the class, of InterruptedRunError.
        is_interrupted = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) == EXIT_INTERRUPTED
        with suppress(Exception):  # the stage's own error takes precedence
            client.set_terminated(run.info.run_id, "KILLED" if is_interrupted else "FAILED")
        raise
    with _translate_errors():
        client.set_terminated(run.info.run_id, "FINISHED")


def _sanitize_name(name: str) -> str:
    """Return a valid MLflow name for a metric or a parameter."""
    return re.sub(r"[^\w\-. /]", "_", name.replace(":", "/"))[:250]


def format_params(values: Mapping[str, object]) -> dict[str, str]:
    """Return parameters by flat name with names and lengths that MLflow accepts."""
    return {_sanitize_name(name): str(value)[:MAX_PARAM_CHARACTERS] for name, value in values.items()}


def extract_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a summary by flat name. An interval `ci95` gives two numbers, `ci95.low` and `ci95.high`."""
    values: dict[str, Any] = {}
    for name, value in flatten(summary).items():
        if name.rpartition(".")[2] == "ci95" and isinstance(value, (list, tuple)):
            values[f"{name}.low"], values[f"{name}.high"] = value
        else:
            values[name] = value
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a": {"b": 1}} as {"a.b": 1}: MLflow's parameters and metrics are flat."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
