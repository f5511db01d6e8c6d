"""Run tracking with MLflow. `MlflowReporter` records the metrics that a stage reports.

A stage's run is nested under the run in MLFLOW_RUN_ID, which a scheduler or the pipeline sets. If MLFLOW_TRACKING_URI
is not set, neither pipeline steps nor single stages started from the shell are tracked.
"""

from __future__ import annotations

import logging
import os
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import url_credentials
from components.common.runtime.errors import (
    EngineMissingError,
    InterruptedRunError,
    UsageError,
    get_first_line,
    translate_system_error,
)
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.data.dataset_source import DatasetSource
    from mlflow.entities import Run

EXPERIMENT = "tuneline"
OWNER_TAG = "tuneline.workdir"  # on runs and logged models: the ID of the workdir that created them
KFP_RUN_TAG = "tuneline.kfp_run"  # on runs: the ID of the Kubeflow Pipelines run that contains the step
PROBE_TIMEOUT_SECONDS = 20.0
MAX_PARAMS_PER_REQUEST = 100  # limit of MLflow
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
                hint="Start the server again; the same command then resumes.",
            ) from error
        file = _get_sqlite_file()
        raise translate_system_error(error, [file.parent] if file else []) or EngineMissingError(
            f"the MLflow server {address} rejected the request: {first_line}",
            hint="Check MLFLOW_TRACKING_URI or --tracking-uri, and MLFLOW_TRACKING_TOKEN or user and password.",
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


def _create_run(name: str, tags: Mapping[str, str], artifact_root: Path | None = None) -> tuple[MlflowClient, Run]:
    """Open a run, nested under MLFLOW_RUN_ID if the variable is set."""
    client, parent = connect().MlflowClient(), os.environ.get("MLFLOW_RUN_ID")
    all_tags = {**tags, **({"mlflow.parentRunId": parent} if parent else {}), **build_owner_tags()}
    with _translate_errors():
        experiment_id = get_experiment_id(client, artifact_root)
        return client, client.create_run(experiment_id, run_name=name, tags=all_tags)


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

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_sanitize_name(name), float(value), now, step) for name, value in values.items()]
        with _translate_errors():
            self._client.log_batch(self.run_id, metrics=metrics)

    def note(self, text: str) -> None:
        with _translate_errors():
            self._client.set_tag(self.run_id, "tuneline.note", text[:5000])

    def log_result(self, artifact: Artifact) -> None:
        """Log an artifact: configuration as parameters, digest and verdict as tags, figures as metrics, and reports.

        Raises:
            EngineMissingError: the server does not answer or rejects the request.
        """
        from mlflow.entities import Param

        manifest = artifact.manifest
        params = [Param(_sanitize_name(name), str(value)[:6000]) for name, value in flatten(manifest.config).items()]
        self.metrics(extract_metrics(manifest.summary), 0)
        with _translate_errors():
            for first in range(0, len(params), MAX_PARAMS_PER_REQUEST):
                self._client.log_batch(self.run_id, params=params[first : first + MAX_PARAMS_PER_REQUEST])
            self._client.set_tag(self.run_id, f"tuneline.{manifest.kind}_sha256", manifest.content_sha256)
            if "verdict" in manifest.summary:
                self._client.set_tag(self.run_id, "tuneline.verdict", str(manifest.summary["verdict"]))
                for number, reason in enumerate(manifest.summary.get("reasons", ()), 1):
                    self._client.set_tag(self.run_id, f"tuneline.reason.{number}", str(reason)[:5000])
            for name in ("manifest.json", "report.html", "training.jsonl", "evaluation.json"):
                if (artifact.path / name).exists():
                    self._client.log_artifact(self.run_id, str(artifact.path / name))

    def log_dataset(self, artifact: Artifact, *, name: str, source: Mapping[str, str]) -> None:
        """Log a dataset version as a dataset input of type dvc.

        Args:
            name: tag of the version.
            source: {"repo", "path", "rev", "md5", "tag", "remote"}.
        """
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        dataset = MetaDataset(_create_dvc_source(dict(source)), name=name, digest=artifact.sha256[:36])
        entity = DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", "training")])
        self._client.log_inputs(self.run_id, [entity])


def log_dataset(artifact: Artifact, version: Mapping[str, str]) -> None:
    """Log a dataset version as an input of the run in MLFLOW_RUN_ID, if the variable is set.

    Args:
        version: {"repo", "path", "rev", "md5", "tag", "remote"}.
    """
    parent = os.environ.get("MLFLOW_RUN_ID")
    if parent and is_enabled():
        source = {name: version[name] for name in ("repo", "path", "rev", "md5", "tag", "remote")}
        MlflowReporter(connect().MlflowClient(), parent).log_dataset(artifact, name=version["tag"], source=source)


def log_files(own: MlflowReporter | None, *files: Path) -> None:
    """Log files to the run in MLFLOW_RUN_ID, or else to the stage's own run.

    Args:
        own: reporter of the stage's own run; None if the stage is not tracked.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID") or (own.run_id if own else None)
    if run_id and is_enabled():
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
    """Return a link without credentials; the user name may be a token."""
    address = url_credentials.remove_credentials(
        os.environ.get("TUNELINE_MLFLOW_UI") or os.environ.get("MLFLOW_TRACKING_URI", "")
    )
    return f"[{text}]({address.rstrip('/')}/#/{page})" if address.startswith(("http://", "https://")) else text


def _create_dvc_source(source: dict[str, str]) -> DatasetSource:
    from mlflow.data.dataset_source import DatasetSource

    class DvcSource(DatasetSource):  # type: ignore[misc] # mlflow is untyped
        """A dataset version: {"repo", "path", "rev", "md5"}. Fetch it with `tuneline data fetch` or dvc."""

        @staticmethod
        def _get_source_type() -> str:
            return "dvc"

        def load(self, **_: object) -> object:
            raise EngineMissingError(
                "MLflow cannot load a DVC source", hint=f"Run: tuneline data fetch {source['rev']} -o DIR"
            )

        @staticmethod
        def _can_resolve(raw_source: object) -> bool:
            return False

        @classmethod
        def _resolve(cls, raw_source: object) -> DatasetSource:
            raise EngineMissingError(
                "MLflow cannot resolve a DVC source; its repository and revision are required",
                hint="Run: tuneline data fetch REVISION -o DIR",
            )

        def to_dict(self) -> dict[str, str]:
            return source

        @classmethod
        def from_dict(cls, source_dict: dict[str, str]) -> DatasetSource:
            return _create_dvc_source(source_dict)

    return DvcSource()


@contextmanager
def stage_run(stage: str) -> Iterator[MlflowReporter]:
    """Open a run for a stage, nested under MLFLOW_RUN_ID, and close the run with the status of the block.

    The status is FINISHED, FAILED if the block raises an error, or KILLED if the block is interrupted.

    Raises:
        UsageError: the tracking URI is invalid, or the tracking server does not return the run MLFLOW_RUN_ID.
        EngineMissingError: the server does not answer or rejects the request.
    """
    with _close_at_end(*_create_run(stage, {"tuneline.stage": stage})) as reporter:
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
        tags = {"mlflow.parentRunId": parent.run_id, **build_owner_tags()}
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
        # An interruption of another process is an error with the kind, but not the class, of InterruptedRunError.
        is_interrupted = isinstance(error, KeyboardInterrupt) or getattr(error, "kind", "") == InterruptedRunError.kind
        with suppress(Exception):  # the stage's own error takes precedence
            client.set_terminated(run.info.run_id, "KILLED" if is_interrupted else "FAILED")
        raise
    with _translate_errors():
        client.set_terminated(run.info.run_id, "FINISHED")


def _sanitize_name(name: str) -> str:
    """Return a valid MLflow name for a metric or a parameter."""
    return re.sub(r"[^\w\-. /]", "_", name.replace(":", "/"))[:250]


def extract_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a summary by flat name."""
    return {
        name: float(value)
        for name, value in flatten(summary).items()
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
