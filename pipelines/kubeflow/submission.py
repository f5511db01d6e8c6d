"""Submit a compiled pipeline to Kubeflow Pipelines, and follow the run to its end.

kfp.Client makes the REST calls. A token comes from an environment variable or a file. The file is read again for every
call, because the kubelet renews a projected token. Tokens and passwords are masked in the server's messages.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from components.common.launch import JsonObject
from components.common.launch.kubernetes.kubernetes_client import AccessError
from components.common.runtime import process_control, url_credentials
from components.common.runtime.errors import (
    ConfigurationError,
    EngineMissingError,
    InterruptedRunError,
    TunelineError,
    UsageError,
)
from components.common.runtime.reporters import Reporter
from components.common.runtime.yaml_loading import load_yaml
from pipelines.definition.pipeline_names import CHAIN_PARAMETER, CHAIN_PIPELINE, CUSTOMIZATION_PIPELINE

TOKEN_VARIABLES = ("KF_PIPELINES_TOKEN", "KFP_EXISTING_TOKEN")  # the kfp command reads the second one
PROJECTED_TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"
PROJECTED_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"
REQUEST_TIMEOUT_SECONDS = 30.0  # for one call; urllib3 makes up to four calls
UNRESPONSIVE_TIMEOUT_SECONDS = 600.0  # `wait_for_run` fails after this time without an answer
MAX_LINE_CHARACTERS = 400  # of a message of the server
FINAL_STATES = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
HEALTH_PATH = "/apis/v2beta1/healthz"
ENDPOINT_HINT = (
    "within the cluster, use http://ml-pipeline.kubeflow.svc.cluster.local:8888; from outside, forward this port"
)


class RunFailedError(TunelineError):
    """The run ended without success."""

    kind = "run_failed"


@dataclass(frozen=True)
class KubeflowServer:
    """A Kubeflow Pipelines server and the credentials for it.

    `endpoint` may contain a user and a password; `address` does not. `sent_credentials` are masked in messages.
    """

    endpoint: str = field(repr=False)
    namespace: str = ""
    token_file: Path | None = None
    ca_cert: Path | None = None
    sent_credentials: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def address(self) -> str:
        """The endpoint without user and password, for messages."""
        return url_credentials.split_credentials(self.endpoint)[0]


@dataclass
class SubmittedRun:
    """A submitted run."""

    client: Any
    server: KubeflowServer
    run_id: str
    run_name: str
    experiment: str
    url: str
    tasks: frozenset[str]
    state: str = "PENDING"
    started_at: float = field(default_factory=time.monotonic)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `tuneline submit --json` prints."""
        return {
            "run_id": self.run_id,
            "run_name": self.run_name,
            "experiment": self.experiment,
            "namespace": self.server.namespace or None,
            "state": self.state,
            "url": self.url,
            "seconds": round(time.monotonic() - self.started_at, 2),
        }


def submit(
    server: KubeflowServer,
    pipeline: Path,
    experiment: str,
    *,
    run_name: str = "",
    service_account: str = "",
    parameters: Sequence[str] = (),
) -> SubmittedRun:
    """Start a run of a compiled pipeline; create the experiment if it does not exist.

    Args:
        server: the Kubeflow Pipelines server.
        pipeline: path of the compiled pipeline.
        experiment: name of the experiment.
        run_name: name of the run; default: the pipeline's name with the time.
        service_account: service account of the pods.
        parameters: `name=value` texts; values are YAML of the type that the pipeline declares.

    Raises:
        ConfigurationError: the file is not a compiled pipeline, a parameter makes the configuration invalid, or a token
            or certificate is missing.
        UsageError: the pipeline does not accept a parameter, or the server rejects the request.
        EngineMissingError: the server does not answer.
        AccessError: the server does not accept the credentials.
    """
    spec = read_pipeline(pipeline)
    pipeline_name, declared = (
        spec["pipelineInfo"]["name"],
        spec["root"].get("inputDefinitions", {}).get("parameters", {}),
    )
    values = parse_parameters(parameters, declared)
    if values and pipeline_name == CUSTOMIZATION_PIPELINE:
        check_parameters(declared, values)
    if values and pipeline_name == CHAIN_PIPELINE:
        check_chain_parameter(declared, values)
    name = run_name or f"{pipeline_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()
    with _translate_errors(server), _suppress_output():
        client = _connect(server)
        created = client.create_experiment(experiment, namespace=server.namespace or None)
        run = client.run_pipeline(
            created.experiment_id,
            name,
            pipeline_package_path=str(pipeline),
            params=values,
            service_account=service_account or None,
        )
        url = f"{client._get_url_prefix()}/#/runs/details/{run.run_id}"
    # The tasks that run in a pod; a task whose component has a DAG is replaced by the tasks of that DAG.
    components = spec.get("components", {})
    tasks = frozenset(
        task_name
        for dag in (item["dag"] for item in (spec["root"], *components.values()) if "dag" in item)
        for task_name, task in dag.get("tasks", {}).items()
        if not components.get(task["componentRef"]["name"], {}).get("dag")
    )
    return SubmittedRun(client, server, run.run_id, name, experiment, url, tasks, run.state or "PENDING", began)


def get_health(server: KubeflowServer) -> dict[str, Any]:
    """Return the server's health object: {"multi_user", "tag_name" (the server's version), …}.

    Raises:
        ConfigurationError: a token or certificate is missing.
        UsageError: the server rejects the request.
        EngineMissingError: the server does not answer.
        AccessError: the server does not accept the credentials.
    """
    with _translate_errors(server), _suppress_output():
        api = _connect(server)._healthz_api.api_client
        answer = api.call_api(
            HEALTH_PATH,
            "GET",
            header_params={"Accept": "application/json"},
            auth_settings=["Bearer"],
            response_type="object",
            _return_http_data_only=True,
        )
    return dict(answer)


def read_pipeline(pipeline: Path) -> dict[str, Any]:
    """Return the pipeline specification of a compiled file.

    Raises:
        ConfigurationError: the file does not exist, is unreadable or is not a compiled pipeline.
    """
    hint = "Pass a file that `tuneline compile -o pipeline.yaml` or the kfp compiler wrote."
    try:
        documents = list(yaml.safe_load_all(pipeline.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigurationError(f"{pipeline} does not exist", hint=hint) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{pipeline} cannot be read: {' '.join(str(error).split())}", hint=hint) from None
    for document in documents:
        if isinstance(document, dict) and "pipelineInfo" in document and "root" in document:
            return document
    raise ConfigurationError(f"{pipeline} is not a compiled pipeline: no document has pipelineInfo and root", hint=hint)


# Python type, description and example of a value, by the type in the pipeline.
PARAMETER_TYPES = {
    "STRING": (str, "text", "text"),
    "NUMBER_INTEGER": (int, "a whole number", "100"),
    "NUMBER_DOUBLE": (float, "a number", "5e-4"),
    "BOOLEAN": (bool, "true or false", "false"),
    "LIST": (list, 'a list, for example ["/data/a.jsonl"]', """'["/data/a.jsonl"]'"""),
    "STRUCT": (dict, "a mapping, for example {a: 1}", "'{a: 1}'"),
}
CHAIN_TYPE = (list, 'a list of strings, for example ["seed: 1"]', """'["seed: 1", "seed: 2"]'""")


def parse_parameters(given: Sequence[str], declared: JsonObject) -> JsonObject:
    """Convert `name=value` arguments to the types that the pipeline declares.

    Args:
        given: the `name=value` texts.
        declared: the pipeline's parameter definitions, by name.

    Returns:
        The converted values, by name.

    Raises:
        UsageError: an argument has another form, an undeclared name or a value of another type.
    """
    values: JsonObject = {}
    for argument in given:
        name, separator, text = argument.partition("=")
        if not separator:
            raise UsageError(
                f"--param {argument} is not of the form name=value", hint="Use the form --param max_steps=100."
            )
        if name not in declared:
            raise UsageError(
                f"the pipeline has no parameter {name}",
                hint=f"Choose one of: {', '.join(sorted(declared))}." if declared else "Omit --param.",
            )
        kind, description, example = (
            CHAIN_TYPE if name == CHAIN_PARAMETER else PARAMETER_TYPES[declared[name]["parameterType"]]
        )
        value: object = text
        if kind is not str:
            with contextlib.suppress(yaml.YAMLError, ValueError):
                value = float(text) if kind is float else load_yaml(text)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(
                f"the parameter {name} is {text!r}; expected {description}",
                hint=f"Use a value such as --param {name}={example}",
            )
        values[name] = value
    return values


def check_parameters(declared: JsonObject, values: JsonObject) -> None:
    """Validate the configuration that the first step of a customization run will build from the parameters.

    If the defaults are invalid for this version of tuneline, only the first step validates the configuration.

    Args:
        declared: the pipeline's parameter definitions, by name.
        values: the converted values of the given parameters, by name.

    Raises:
        ConfigurationError: a value is invalid.
    """
    from pipelines.config.customization_config import check_consistency
    from pipelines.definition import run_parameters

    default = {name: parameter.get("defaultValue") for name, parameter in declared.items()}
    if not default.keys() >= {*run_parameters.PARAMETER_KEYS, "configuration"}:
        return
    try:
        check_consistency(run_parameters.combine_parameters(default, default, default["configuration"]))
    except ConfigurationError:
        return
    given = {**default, **values}
    check_consistency(run_parameters.combine_parameters(given, default, given["configuration"]))


def check_chain_parameter(declared: JsonObject, values: JsonObject) -> None:
    """Validate the customizations that the first step of a chain's run will parse; see `check_parameters`."""
    from pipelines.definition import run_parameters

    compiled = declared.get(CHAIN_PARAMETER, {}).get("defaultValue", [])
    try:
        run_parameters.parse_chain(compiled)
    except ConfigurationError:
        return
    run_parameters.check_compiled_chain(run_parameters.parse_chain(values[CHAIN_PARAMETER]), compiled)


def wait_for_run(run: SubmittedRun, reporter: Reporter, *, timeout: float = 0.0, interval: float = 5.0) -> SubmittedRun:
    """Follow a run until it succeeds. The details of every error contain the run's id, address and last known state.

    Args:
        run: the submitted run.
        reporter: receives each change of state.
        timeout: timeout in seconds; 0: no timeout.
        interval: poll interval in seconds.

    Raises:
        RunFailedError: the run ended without success.
        InterruptedRunError: timeout or Ctrl-C; the run continues.
        EngineMissingError: the server did not answer for UNRESPONSIVE_TIMEOUT_SECONDS.
        AccessError: the server no longer accepts the credentials.
    """
    try:
        try:
            last = _follow(run, reporter, timeout, interval)
        except KeyboardInterrupt:
            process_control.acknowledge_stop()
            raise InterruptedRunError("stopped waiting; the run continues", hint=_build_status_hint(run)) from None
        if run.state != "SUCCEEDED":
            raise _build_failure(last, run)
    except TunelineError as error:
        error.details = {"run_id": run.run_id, "url": run.url, "state": run.state}
        raise
    return run


def _follow(run: SubmittedRun, reporter: Reporter, timeout: float, interval: float) -> Any:
    """Report changed states of the run and its tasks; return the server's object of the run once it has ended.

    An unresponsive server is polled again for UNRESPONSIVE_TIMEOUT_SECONDS.
    """
    reported: dict[str, str] = {}
    began = time.monotonic()
    while True:
        try:
            with _translate_errors(run.server, run.url), _suppress_output():
                current = _request_run(run)
        except EngineMissingError as error:
            if time.monotonic() - began > UNRESPONSIVE_TIMEOUT_SECONDS:
                raise
            reporter.note(f"{error.message}; retrying")
            _pause(run, timeout, interval)
            continue
        run.state = str(current.state or "PENDING")
        # The API also lists drivers and groups.
        tasks = [task for task in _list_tasks(current) if task.display_name in run.tasks and task.state]
        for name, state in (("", run.state), *((task.display_name, task.state) for task in tasks)):
            if reported.get(name) != state:
                reported[name] = state
                reporter.step(f"{name or run.run_name}: {state}")
        if run.state in FINAL_STATES:
            return current
        _pause(run, timeout, interval)
        began = time.monotonic()


def _request_run(run: SubmittedRun) -> Any:
    """Return the server's object of the run.

    Another thread sends the request: an interrupt inside urllib3 can leave the lock of its connection pool acquired, and
    the process would then wait for this lock at its exit.
    """
    response: Future[Any] = Future()

    def send() -> None:
        try:
            response.set_result(run.client.get_run(run.run_id))
        except Exception as error:
            response.set_exception(error)

    threading.Thread(target=send, daemon=True).start()
    return response.result()


def _pause(run: SubmittedRun, timeout: float, interval: float) -> None:
    """Sleep until the next poll. Raises InterruptedRunError after the timeout."""
    left = run.started_at + timeout - time.monotonic() if timeout else interval
    if left <= 0:
        raise InterruptedRunError(
            f"the run is still {run.state} after {timeout:g} s; it continues", hint=_build_status_hint(run)
        )
    time.sleep(min(interval, left))


def _build_status_hint(run: SubmittedRun) -> str:
    return f"See {run.url}, or `kfp run get {run.run_id}`."


def _list_tasks(current: Any) -> list[Any]:
    return list((current.run_details and current.run_details.task_details) or [])


def _build_failure(last: Any, run: SubmittedRun) -> RunFailedError:
    """Return the error with the failed task and the server's reason."""
    failed = [task for task in _list_tasks(last) if task.state == "FAILED"]
    failed = [task for task in failed if task.display_name in run.tasks] or failed
    message = f"the run {run.run_name} ended with state {run.state}"
    if failed:
        message += f" in {_get_first_line(str(failed[0].display_name), run.server)}"
    errors = [task.error for task in failed if task.error and task.error.message] or [last.error]
    if errors[0]:
        message += f": {_get_first_line(errors[0].message, run.server)}"
    return RunFailedError(message, hint=f"Read the task's log in the UI: {run.url}")


def _connect(server: KubeflowServer) -> Any:
    """Return a client whose server has answered. Raises ConfigurationError for a missing token or certificate."""
    credentials = _build_credentials(server)
    if server.ca_cert and not server.ca_cert.is_file():
        raise ConfigurationError(
            f"--ca-cert: {server.ca_cert} is not an existing file",
            hint="Pass the PEM file of the CA that signed the server's certificate.",
        )
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        """kfp's client with a single health check; kfp repeats the check for half a minute and prints tracebacks."""

        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            return self._healthz_api.healthz_service_get_healthz(
                _request_timeout=(REQUEST_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS)
            )

    client = Client(
        host=server.address,
        namespace=server.namespace or "kubeflow",  # kfp's value for a single-user Kubeflow
        ssl_ca_cert=str(server.ca_cert) if server.ca_cert else None,
        **credentials,
    )
    rest = client._run_api.api_client.rest_client
    request = rest.request

    def request_with_timeout(*arguments: Any, **named: Any) -> Any:
        return request(*arguments, **{**named, "_request_timeout": (REQUEST_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS)})

    rest.request = request_with_timeout  # kfp.Client has no timeout and would wait indefinitely for a server that hangs
    _, _, headers = client._healthz_api.healthz_service_get_healthz_with_http_info()
    if "json" not in headers.get("Content-Type", ""):
        raise AccessError(
            f"{server.address} returned {headers.get('Content-Type') or 'no content type'}; expected JSON from the API "
            "of Kubeflow Pipelines",
            hint=f"Set a token in {TOKEN_VARIABLES[0]} or with --token-file, or correct --endpoint: {ENDPOINT_HINT}.",
        )
    return client


def _build_credentials(server: KubeflowServer) -> dict[str, Any]:
    """Return credentials for kfp.Client. Precedence: token file, token variable, endpoint's password, pod's token."""
    from kfp.client.token_credentials_base import TokenCredentialsBase

    projected = Path(os.environ.get(PROJECTED_TOKEN_VARIABLE) or PROJECTED_TOKEN)
    _, user, password = url_credentials.split_credentials(server.endpoint)
    if server.token_file:
        return {"credentials": _read_token_file(server.token_file, server)}
    variable = next((name for name in TOKEN_VARIABLES if os.environ.get(name, "").strip()), "")
    if variable:
        token = _require_printable(os.environ[variable].strip(), f"the token in {variable}")
        server.sent_credentials.add(token)
        return {"existing_token": token}
    if password:  # HTTP basic authentication, RFC 7617
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        server.sent_credentials.update((encoded, password, quote(password, safe="")))

        class BasicCredentials(TokenCredentialsBase):  # type: ignore[misc]
            def refresh_api_key_hook(self, config: Any) -> None:
                config.api_key["authorization"], config.api_key_prefix["authorization"] = encoded, "Basic"

        return {"credentials": BasicCredentials()}
    if PROJECTED_TOKEN_VARIABLE in os.environ or projected.exists():
        return {"credentials": _read_token_file(projected, server)}
    return {}


def _read_token_file(path: Path, server: KubeflowServer) -> Any:
    """Return credentials that read the token again for every call and record it for masking.

    Raises:
        ConfigurationError: the file does not contain a token.
    """
    from kfp.client import ServiceAccountTokenVolumeCredentials

    class Credentials(ServiceAccountTokenVolumeCredentials):  # type: ignore[misc]
        def refresh_api_key_hook(self, config: Any) -> None:
            super().refresh_api_key_hook(config)
            server.sent_credentials.update(config.api_key["authorization"].split())

    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        message, hint = f"the token file {path} cannot be read: {reason}", "Pass a file that contains the token."
        raise ConfigurationError(message, hint=hint) from None
    if not token:
        raise ConfigurationError(f"the token file {path} is empty", hint="Pass a file that contains the token.")
    _require_printable(token, f"the token in {path}")
    return Credentials(str(path))


def _require_printable(token: str, origin: str) -> str:
    """Return a token that is a valid header value; the HTTP library would print an invalid one in its error."""
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConfigurationError(
            f"{origin} is not a valid token: it contains a space, a line break or a non-ASCII character",
            hint="Copy the token again.",
        )
    return token


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress the links and deprecation warnings that kfp prints."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _translate_errors(server: KubeflowServer, continuing_run: str = "") -> Iterator[None]:
    """Translate the client's errors. `continuing_run`: the URL of a run that continues."""
    import urllib3.exceptions
    from kfp_server_api.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        raise _build_status_error(error, server, continuing_run) from None
    except (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
        cause = getattr(error, "reason", None) or error
        reason, hint = (
            _get_first_line(str(cause), server).rpartition(": ")[2],
            f"Check --endpoint and the network: {ENDPOINT_HINT}.",
        )
        if "CERTIFICATE" in str(cause):
            reason = "its certificate cannot be verified"
        if "CERTIFICATE" in str(cause) or "SSL" in type(cause).__name__:
            hint = "Pass the CA certificate with --ca-cert."
        raise EngineMissingError(
            f"Kubeflow Pipelines at {server.address} does not answer: {reason}",
            hint=f"Follow the run, which continues: {continuing_run}" if continuing_run else hint,
        ) from None
    except ValueError as error:  # raised by kfp, for example for two experiments with one name
        hint = "Choose another --experiment, or archive the duplicate."
        raise UsageError(f"kfp rejected the request: {_get_first_line(str(error), server)}", hint=hint) from None


def _build_status_error(error: Any, server: KubeflowServer, continuing_run: str) -> TunelineError:
    """Return the error for an HTTP status; the message is from the API's JSON or a proxy's text, not from HTML."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with contextlib.suppress(ValueError):
        parsed = json.loads(body)
        if isinstance(parsed, dict):
            body = str(parsed.get("message") or parsed.get("error") or "")
    message = "" if body.lstrip().startswith("<") else _get_first_line(body, server)
    message = message or _get_first_line(str(error.reason or f"status {error.status}"), server)
    token_hint = f"Set a valid token in {TOKEN_VARIABLES[0]} or with --token-file."
    address_hint = f"Check that --endpoint is the API's address: {ENDPOINT_HINT}."
    errors: dict[int, tuple[type[TunelineError], str, str]] = {
        401: (AccessError, "does not accept the credentials", token_hint),
        403: (AccessError, "denies access", "Check the caller's rights in the namespace (--namespace)."),
        404: (UsageError, "returned status 404", address_hint),
    }
    status = error.status or 0
    if status >= 500 or status == 429:
        retry_hint = "Try again later, or contact the administrator of Kubeflow Pipelines."
        selected: tuple[type[TunelineError], str, str] = (EngineMissingError, f"returned status {status}", retry_hint)
    else:
        other_hint = "Check --namespace (required by a multi-user Kubeflow) and the parameters."
        selected = errors.get(status, (UsageError, "rejected the request", other_hint))
    error_class, problem, hint = selected
    hint = f"{hint.removesuffix('.')}; the run continues: {continuing_run}" if continuing_run else hint
    return error_class(f"Kubeflow Pipelines at {server.address} {problem}: {message}", hint=hint)


def _get_first_line(text: str, server: KubeflowServer) -> str:
    """Return the first line of a server's text; the sent credentials are masked before the line is cut."""
    lines = mask_values(text, server.sent_credentials).splitlines()
    line = next((line.strip() for line in lines if line.strip()), "")
    return line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:MAX_LINE_CHARACTERS]}…"


def mask_values(text: str, values: Iterable[str]) -> str:
    """Return the text with each of these values replaced by `***`."""
    for value in sorted(filter(None, values), key=len, reverse=True):
        text = text.replace(value, "***")
    return text
