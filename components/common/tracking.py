"""MLflow runs: the only run logging of tuneline. A stage reports metrics to a Reporter; this is the one that keeps them.

A stage's run is nested under the run named by MLFLOW_RUN_ID, which a scheduler may have set, or the pipeline. A pipeline step
without a tracking server in its environment is not tracked, and neither is a stage used alone from the shell.
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
from typing import Any

from components.common import addresses, places
from components.common.artifacts import Artifact
from components.common.errors import GOES_ON, EngineMissingError, InterruptedRunError, TunelineError, UsageError, of_the_machine

EXPERIMENT = "tuneline"
OWNER = "tuneline.workdir"  # tag of runs and logged models: the identity of the workdir that they were made in
PIPELINE = "tuneline.kfp_run"  # tag of runs: the run of Kubeflow Pipelines that they are steps of
PROBE_SECONDS = 20.0
BATCH = 100  # parameters that MLflow takes in one request


def enabled() -> bool:
    """Whether this process was told where to track."""
    return bool(os.environ.get("MLFLOW_TRACKING_URI"))


def connect(uri: str | None = None) -> Any:
    """The mlflow module, pointed at the tracking server. Raises EngineMissingError when the server does not answer."""
    _quiet()
    import mlflow

    if uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
    _sign_in()
    if address := os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(address)  # what was set before in this process counts more than the variable otherwise
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # what goes wrong is raised; its traceback on the screen explains nothing
    _check_answers(mlflow.get_tracking_uri())
    return mlflow


def _sign_in() -> None:
    """Keep user and password of MLFLOW_TRACKING_URI apart from it: libraries repeat the whole address in their errors.

    They win over MLFLOW_TRACKING_TOKEN and over another user, as those in an address do.
    """
    address, user, password = addresses.split(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if password and address.startswith(("http://", "https://")):
        os.environ.update(MLFLOW_TRACKING_URI=address, MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)


def _client_of(uri: str) -> Any:
    """A client of another server than this process tracks to: mlflow.set_tracking_uri would move the whole process there."""
    _quiet()
    import mlflow

    _check_answers(uri)
    return mlflow.MlflowClient(uri)


SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def _check_answers(address: str) -> None:
    scheme = address.partition(":")[0].partition("+")[0]
    if scheme not in SCHEMES:
        raise UsageError(
            f"{addresses.without_password(address)} is no MLflow tracking server",
            hint=f"Use an address that begins with {', '.join(SCHEMES[:3])}, for example http://host:5000.",
        )
    if scheme in ("http", "https"):
        _probe(address)
    elif scheme != "sqlite":
        _check_driver(address)


def _quiet() -> None:
    """MLflow migrates and greets on standard error, and a dead server keeps a client retrying for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # standard output belongs to results
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _check_driver(address: str) -> None:
    """Raise EngineMissingError where the database's driver is not installed."""
    from sqlalchemy.engine import make_url

    with suppress(ValueError):  # databricks and what else SQLAlchemy does not know has no driver
        try:
            make_url(address).get_dialect().import_dbapi()
        except ImportError as error:
            raise EngineMissingError(
                f"the tracking store {addresses.without_password(address)} needs the package {error.name}", hint=f"pip install {error.name}"
            ) from None


def _probe(address: str) -> None:
    import urllib.error
    import urllib.request

    bare = addresses.without_user(address).rstrip("/")  # urllib takes a user name for a part of the host's
    try:
        with urllib.request.urlopen(bare + "/health", timeout=PROBE_SECONDS):  # noqa: S310 - http(s) checked by the caller
            return
    except urllib.error.HTTPError:
        return  # it answers; a server behind a path or with authentication may not serve /health
    except OSError as error:
        raise TrackingLostError(
            f"the MLflow server {addresses.without_password(address)} does not answer: {_reason(error)}",
            hint="Start it, or correct MLFLOW_TRACKING_URI or --tracking-uri.",
        ) from None


def _reason(error: OSError) -> str:
    """What the system said, without the wrapping of the libraries between."""
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)


class TrackingLostError(EngineMissingError):
    """The tracking server does not answer."""


def start_run(name: str, tags: Mapping[str, str], artifact_root: Path | None = None) -> str:
    """Open the parent run of a customization, nested under MLFLOW_RUN_ID where one is set. Returns its run id."""
    mlflow = connect()
    client = mlflow.MlflowClient()
    all_tags = {**tags, "mlflow.runName": name, **_parent_tag(), **owner()}
    with _told():
        return str(client.create_run(home(client, artifact_root), run_name=name, tags=all_tags).info.run_id)


@contextmanager
def _told() -> Iterator[None]:
    """Tell what the tracking server refused (no permission, no such store), or that it is gone, as an error for people."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise _for_people(error) from error


def _for_people(error: Exception) -> TunelineError:
    first = str(getattr(error, "message", error)).strip().splitlines()[0]
    address = addresses.without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if first.startswith("API request to") and "failed with" in first and "failed with error code" not in first:
        return TrackingLostError(
            f"the MLflow server {address} stopped answering",
            hint=f"Start it again. {GOES_ON}",
        )
    file = _sqlite_file()
    return of_the_machine(error, [file.parent] if file else []) or EngineMissingError(
        f"the MLflow server {address} refuses: {first}",
        hint="Check MLFLOW_TRACKING_URI or --tracking-uri, and MLFLOW_TRACKING_TOKEN or user and password.",
    )


def _sqlite_file() -> Path | None:
    """The file of a SQLite tracking store."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def home(client: Any, artifact_root: Path | None = None) -> str:
    """The experiment that new runs and models belong to: that of the run named by MLFLOW_RUN_ID, else our own."""
    from mlflow.exceptions import MlflowException

    parent = os.environ.get("MLFLOW_RUN_ID")
    if not parent:
        return experiment_id(client, artifact_root)
    try:
        return str(client.get_run(parent).info.experiment_id)
    except MlflowException as error:
        raise UsageError(
            f"MLFLOW_RUN_ID names {parent}, which the tracking server does not have: {error.message}",
            hint="Unset MLFLOW_RUN_ID, or set MLFLOW_TRACKING_URI to the server that has this run.",
        ) from None


def end_dead_run(uri: str | None, name: str, status: str = "KILLED") -> bool:
    """Close the run that was started under this name, with the stages nested in it (as KILLED), where they are still open.

    It is found by its tag: its process may have been killed before it could note the id. Returns whether nothing is left open; where
    the server does not answer, that has to be tried again.
    """
    if not uri:
        return True
    with suppress(Exception):
        present = os.environ.get("MLFLOW_TRACKING_URI", "")
        is_present = addresses.without_user(present) == addresses.without_user(uri)  # what was kept of an address has no password
        client = connect().MlflowClient() if is_present else _client_of(uri)
        everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(everywhere, f"tags.`tuneline.run` = '{name}'"):
            _end_nested(client, run)
            if run.info.status == "RUNNING":
                client.set_terminated(run.info.run_id, status)
        return True
    return False


def _end_nested(client: Any, run: Any) -> None:
    """Close the runs nested in a run that are still open, those in them first: found from a closed one, they would be missed."""
    of_it = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    for nested in client.search_runs([run.info.experiment_id], f"{of_it} and attributes.status = 'RUNNING'"):
        _end_nested(client, nested)
        client.set_terminated(nested.info.run_id, "KILLED")


def experiment_id(client: Any, artifact_root: Path | None = None) -> str:
    """The experiment's id: that of MLFLOW_EXPERIMENT_NAME or "tuneline", created where it is missing."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    root = artifact_root or _beside_sqlite()
    try:
        return str(client.create_experiment(name, artifact_location=root.as_uri() if root else None))
    except Exception:
        made_meanwhile = client.get_experiment_by_name(name)
        if made_meanwhile is None:
            raise
        return str(made_meanwhile.experiment_id)


def _beside_sqlite() -> Path | None:
    """Where artifacts of a SQLite store go; MLflow itself would put them into the current folder. None: a server decides."""
    file = _sqlite_file()
    return file.parent / "mlflow-artifacts" if file else None


def owner() -> dict[str, str]:
    """The tags that say whose a run or a logged model is: MLflow may serve many workdirs, and each keeps its own house. None where this
    process was given no workdir."""
    given = os.environ.get("TUNELINE_WORKDIR")
    whose = places.identity(places.Workdir.from_environment(), make=True) if given else ""
    named = {OWNER: whose, PIPELINE: os.environ.get("KFP_RUN_ID", "")}
    return {name: value for name, value in named.items() if value}


def _parent_tag() -> dict[str, str]:
    parent = os.environ.get("MLFLOW_RUN_ID")
    return {"mlflow.parentRunId": parent} if parent else {}


def end_run(run_id: str, status: str, tags: Mapping[str, Any] | None = None) -> None:
    """Close a run as FINISHED, FAILED or KILLED, with last tags."""
    client = connect().MlflowClient()
    with _told():
        for name, value in (tags or {}).items():
            client.set_tag(run_id, name, str(value))
        client.set_terminated(run_id, status)


class MlflowReporter:
    """The Reporter that keeps metrics in an MLflow run; steps and progress are not its business."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self.run_id = client, run_id

    def step(self, name: str) -> None: ...
    def progress(self, done: int, total: int | None, unit: str) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with _told():
            self._client.log_batch(self.run_id, metrics=[Metric(_name(name), float(value), now, step) for name, value in values.items()])

    def note(self, text: str) -> None:
        with _told():
            self._client.set_tag(self.run_id, "tuneline.note", text[:5000])

    def result(self, artifact: Artifact) -> None:
        """Keep what an artifact says of itself: configuration as parameters, digest and figures as tags, manifest and reports as files."""
        from mlflow.entities import Param

        manifest = artifact.manifest
        params = [Param(_name(name), str(value)[:6000]) for name, value in flatten(manifest.config).items()]
        self.metrics(figures(manifest.summary), 0)
        with _told():
            for first in range(0, len(params), BATCH):
                self._client.log_batch(self.run_id, params=params[first : first + BATCH])
            self._client.set_tag(self.run_id, f"tuneline.{manifest.kind}_sha256", manifest.content_sha256)
            for name, text in decision(manifest.summary).items():
                self._client.set_tag(self.run_id, f"tuneline.{name}", text)
            for name in ("manifest.json", "report.html", "training.jsonl", "evaluation.json"):
                if (artifact.path / name).exists():
                    self._client.log_artifact(self.run_id, str(artifact.path / name))

    def dataset(self, artifact: Artifact, *, name: str, source: Mapping[str, str]) -> None:
        """Log a dataset version as a dataset input of type dvc: repository, path, revision and md5."""
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        dataset = MetaDataset(_dvc_source(dict(source)), name=name, digest=artifact.sha256[:36])
        entity = DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", "training")])
        self._client.log_inputs(self.run_id, [entity])


def log_dataset(artifact: Artifact, version: Mapping[str, str]) -> None:
    """Log a dataset version as an input of the run that MLFLOW_RUN_ID names, where there is one."""
    parent = os.environ.get("MLFLOW_RUN_ID")
    if parent and enabled():
        source = {name: version[name] for name in ("repo", "path", "rev", "md5", "tag", "remote")}
        MlflowReporter(connect().MlflowClient(), parent).dataset(artifact, name=version["tag"], source=source)


def log_files(own: MlflowReporter | None, *files: Path) -> None:
    """Keep files with the run that MLFLOW_RUN_ID names, else with the stage's own."""
    run_id = os.environ.get("MLFLOW_RUN_ID") or (own.run_id if own else None)
    if run_id and enabled():
        client = connect().MlflowClient()
        for file in files:
            client.log_artifact(run_id, str(file))


def link_to_run(own: MlflowReporter) -> str:
    """A run as Markdown: a link where MLflow has an address that a browser takes (TUNELINE_MLFLOW_UI, else its own), else its name."""
    run = connect().MlflowClient().get_run(own.run_id)
    return _link(f"MLflow run {run.info.run_name}", f"experiments/{run.info.experiment_id}/runs/{own.run_id}")


def link_to_version(name: str, version: str) -> str:
    """A registered model's version as Markdown, as `link_to_run` gives a run."""
    return _link(f"{name} version {version}", f"models/{urllib.parse.quote(name)}/versions/{version}")


def _link(text: str, page: str) -> str:
    """A user's name is left out as well: it may be a token."""
    address = addresses.without_user(os.environ.get("TUNELINE_MLFLOW_UI") or os.environ.get("MLFLOW_TRACKING_URI", ""))
    return f"[{text}]({address.rstrip('/')}/#/{page})" if address.startswith(("http://", "https://")) else text


def _dvc_source(source: dict[str, str]) -> Any:
    from mlflow.data.dataset_source import DatasetSource

    class DvcSource(DatasetSource):  # type: ignore[misc] # mlflow is untyped
        """Where a dataset version lies: {"repo", "path", "rev", "md5"}. Fetch it with `tuneline data fetch` or dvc."""

        @staticmethod
        def _get_source_type() -> str:
            return "dvc"

        def load(self, **_: Any) -> Any:
            raise EngineMissingError("a DVC source is fetched, not loaded", hint=f"tuneline data fetch {source['rev']} -o DIR")

        @staticmethod
        def _can_resolve(raw_source: Any) -> bool:
            return False

        @classmethod
        def _resolve(cls, raw_source: Any) -> Any:
            raise EngineMissingError("a DVC source names its repository and revision itself")

        def to_dict(self) -> dict[Any, Any]:
            return source

        @classmethod
        def from_dict(cls, source_dict: dict[Any, Any]) -> Any:
            return _dvc_source(source_dict)

    return DvcSource()


@contextmanager
def stage_run(stage: str) -> Iterator[MlflowReporter]:
    """A run for a stage, nested under MLFLOW_RUN_ID; FAILED when the stage raises, KILLED when it was interrupted."""
    client = connect().MlflowClient()
    with _told():
        run = client.create_run(home(client), run_name=stage, tags={"tuneline.stage": stage, **_parent_tag(), **owner()})
    with _open(client, run) as reporter:
        yield reporter


@contextmanager
def nested_run(parent: MlflowReporter, name: str) -> Iterator[MlflowReporter]:
    """A run of a part of a stage's work, nested under the stage's own; it ends as that does."""
    client = connect().MlflowClient()
    with _told():
        experiment = client.get_run(parent.run_id).info.experiment_id
        run = client.create_run(experiment, run_name=name, tags={"mlflow.parentRunId": parent.run_id, **owner()})
    with _open(client, run) as reporter:
        yield reporter


@contextmanager
def _open(client: Any, run: Any) -> Iterator[MlflowReporter]:
    """The reporter of a run that is closed by what comes of the work."""
    try:
        yield MlflowReporter(client, run.info.run_id)
    except TrackingLostError:
        raise  # nobody is there to be told
    except BaseException as error:
        with suppress(Exception):  # the stage's own error is the one to tell
            client.set_terminated(run.info.run_id, "KILLED" if _is_interruption(error) else "FAILED")
        raise
    with _told():
        client.set_terminated(run.info.run_id, "FINISHED")


def _is_interruption(error: BaseException) -> bool:
    """Also where a process of its own wrote it down, so that it is of the kind and not of the class."""
    return isinstance(error, KeyboardInterrupt) or getattr(error, "kind", "") == InterruptedRunError.kind


def _name(name: str) -> str:
    """A name that MLflow takes for a metric or a parameter."""
    return re.sub(r"[^\w\-. /]", "_", name.replace(":", "/"))[:250]


def figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a summary, by flat name."""
    return {name: float(v) for name, v in flatten(summary).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def decision(summary: Mapping[str, Any]) -> dict[str, str]:
    """What a summary says was decided, and why, as tags: the verdict, and a numbered reason a rule."""
    if "verdict" not in summary:
        return {}
    return {"verdict": str(summary["verdict"]), **{f"reason.{i}": str(why)[:5000] for i, why in enumerate(summary.get("reasons", ()), 1)}}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}: MLflow's parameters and metrics are flat."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
