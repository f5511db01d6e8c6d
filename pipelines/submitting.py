"""Runs on Kubeflow Pipelines: submit a compiled pipeline, and follow the run to its true end.

The REST calls are kfp.Client's. A token is given by reference (an environment variable or a file) and never printed, nor is a password in
the endpoint, not even where the server repeats it; a file is read again at every call, because the kubelet renews a projected token.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from components.common import addresses, process
from components.common.errors import ConfigurationError, EngineMissingError, InterruptedRunError, TunelineError, UsageError
from components.common.progress import Reporter

TOKEN_VARIABLES = ("KF_PIPELINES_TOKEN", "KFP_EXISTING_TOKEN")  # the second is what the kfp command reads
PROJECTED_TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105 - names of a variable and a file
PROJECTED_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
ANSWER_WITHIN = 30.0  # seconds for one call; urllib3 asks up to four times
PATIENCE = 600.0  # seconds without any answer after which waiting makes no sense
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
CUSTOMIZATION = "tuneline-customization"
HEALTH = "/apis/v2beta1/healthz"
IN_CLUSTER = "within the cluster it is http://ml-pipeline.kubeflow.svc.cluster.local:8888, from outside forward that port"


class AccessError(TunelineError):
    """The server does not let this caller do this."""

    kind = "access"


class RunFailedError(TunelineError):
    """The run ended, and not well."""

    kind = "run_failed"


@dataclass(frozen=True)
class Server:
    """Where to submit, and as whom. `endpoint` may hold a user and a password; `address` is what may be shown of it."""

    endpoint: str = field(repr=False)
    namespace: str = ""
    token_file: Path | None = None
    ca_cert: Path | None = None
    used: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # the credentials that were sent, to mask them

    @property
    def address(self) -> str:
        """The endpoint without user and password."""
        return addresses.split(self.endpoint)[0]


@dataclass
class Submitted:
    """A run on the server."""

    client: Any
    server: Server
    run_id: str
    run_name: str
    experiment: str
    url: str
    tasks: frozenset[str]
    state: str = "PENDING"
    began: float = field(default_factory=time.monotonic)

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline submit --json` prints."""
        return {
            "run_id": self.run_id,
            "run_name": self.run_name,
            "experiment": self.experiment,
            "namespace": self.server.namespace or None,
            "state": self.state,
            "url": self.url,
            "seconds": round(time.monotonic() - self.began, 2),
        }


def submit(
    server: Server, pipeline: Path, experiment: str, *, run_name: str = "", service_account: str = "", parameters: Sequence[str] = ()
) -> Submitted:
    """Start a run of a compiled pipeline; the experiment is made where there is none.

    `parameters` are k=v, values in YAML, read by the type that the pipeline declares. Raises ConfigurationError for a file that is no
    pipeline, UsageError for a parameter it does not take, EngineMissingError when the server does not answer, AccessError when it refuses.
    """
    spec = read(pipeline)
    values = typed(parameters, declared(spec))
    check(spec, values)
    name = run_name or f"{spec['pipelineInfo']['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()
    with _told(server), _quiet():
        client = _connect(server)
        found = client.create_experiment(experiment, namespace=server.namespace or None)
        run = client.run_pipeline(
            found.experiment_id, name, pipeline_package_path=str(pipeline), params=values, service_account=service_account or None
        )
        url = f"{client._get_url_prefix()}/#/runs/details/{run.run_id}"
    return Submitted(client, server, run.run_id, name, experiment, url, _tasks(spec), run.state or "PENDING", began)


def health(server: Server) -> dict[str, Any]:
    """What the server says of itself: {"multi_user", "tag_name" (its version), …}. Raises as `submit` does."""
    with _told(server), _quiet():
        api = _connect(server)._healthz_api.api_client
        answer = api.call_api(
            HEALTH, "GET", header_params={"Accept": "application/json"}, auth_settings=["Bearer"], response_type="object",
            _return_http_data_only=True,
        )  # fmt: skip
    return dict(answer)


def read(pipeline: Path) -> dict[str, Any]:
    """The pipeline's document of a compiled file. Raises ConfigurationError when it is none."""
    hint = "Give a file that `tuneline compile -o pipeline.yaml` or the kfp compiler wrote."
    try:
        documents = list(yaml.safe_load_all(pipeline.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigurationError(f"{pipeline} does not exist", hint=hint) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{pipeline} cannot be read: {' '.join(str(error).split())}", hint=hint) from None
    for document in documents:
        if isinstance(document, dict) and "pipelineInfo" in document and "root" in document:
            return document
    raise ConfigurationError(f"{pipeline} is not a compiled pipeline", hint=hint)


def declared(spec: Mapping[str, Any]) -> dict[str, str]:
    """The types of a pipeline's parameters by name."""
    found = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    return {name: parameter["parameterType"] for name, parameter in found.items()}


WANTED = {
    "STRING": (str, "text"),
    "NUMBER_INTEGER": (int, "a whole number"),
    "NUMBER_DOUBLE": (float, "a number"),
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, 'a list, for example ["/data/a.jsonl"]'),
    "STRUCT": (dict, "a mapping, for example {a: 1}"),
}


def typed(given: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """k=v arguments as the types that the pipeline declares. Raises UsageError naming the parameter and what it wants."""
    values = {}
    for argument in given:
        name, separator, text = argument.partition("=")
        if not separator:
            raise UsageError(f"--param {argument} is not of the form name=value", hint="For example --param max_steps=100.")
        if name not in types:
            raise UsageError(f"the pipeline has no parameter {name}", hint=f"It has {', '.join(sorted(types))}.")
        values[name] = _value(name, text, types[name])
    return values


def check(spec: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Put the parameters together as the run's first step will. Raises ConfigurationError for a value that a customization does not take.

    What another version of tuneline compiled is for its own first step to judge, where this version refuses even its defaults.
    """
    from pipelines import parameters
    from pipelines.config import check_whole

    declared_ones = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    default = {name: parameter.get("defaultValue") for name, parameter in declared_ones.items()}
    if values and spec["pipelineInfo"]["name"] == CUSTOMIZATION and _of_this_version(default):
        given = {**default, **values}
        check_whole(parameters.combine(given, default, given["configuration"]))


def _of_this_version(default: Mapping[str, Any]) -> bool:
    from pipelines import parameters
    from pipelines.config import check_whole

    if not default.keys() >= {*parameters.KEYS, "configuration"}:
        return False
    try:
        check_whole(parameters.combine(default, default, default["configuration"]))
    except ConfigurationError:
        return False
    return True


def _value(name: str, text: str, declared_type: str) -> Any:
    kind, words = WANTED[declared_type]
    if kind is str:
        return text
    with contextlib.suppress(yaml.YAMLError, ValueError):
        value = float(text) if kind is float else yaml.safe_load(text)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    raise UsageError(f"the parameter {name} wants {words}, not {text!r}", hint=f"For example --param {name}={EXAMPLES[declared_type]}")


EXAMPLES = {"NUMBER_INTEGER": "100", "NUMBER_DOUBLE": "5e-4", "BOOLEAN": "false", "LIST": """'["/data/a.jsonl"]'""", "STRUCT": "'{a: 1}'"}


@contextlib.contextmanager
def _with_run(run: Submitted) -> Iterator[None]:
    """Give every error the run that a script would look for."""
    try:
        yield
    except TunelineError as error:
        error.details = {"run_id": run.run_id, "url": run.url, "state": run.state}
        raise


def wait(run: Submitted, reporter: Reporter, *, timeout: float = 0.0, interval: float = 5.0) -> Submitted:
    """Follow a run until it succeeds; `timeout` and `interval` in seconds, timeout 0: for ever.

    A call that fails in passing is made again. Raises RunFailedError when the run ends otherwise, with the task that failed;
    InterruptedRunError at the time-out or on Ctrl-C, while the run itself goes on; EngineMissingError or AccessError when the server
    no longer answers. Each has the run's id, address and last known state in its details.
    """
    with _with_run(run):
        try:
            seen = _follow(run, reporter, timeout, interval)
        except KeyboardInterrupt:
            process.end_stop()
            raise InterruptedRunError("stopped waiting; the run itself goes on", hint=_where(run)) from None
        if run.state != "SUCCEEDED":
            raise _failed(seen, run)
    return run


def _follow(run: Submitted, reporter: Reporter, timeout: float, interval: float) -> Any:
    """The run as it was seen when it had ended."""
    shown: dict[str, str] = {}
    while True:
        seen = _look(run, reporter, timeout, interval)
        run.state = str(seen.state or "PENDING")
        _show(seen, run, shown, reporter)
        if run.state in ENDED:
            return seen
        _pause(run, timeout, interval)


def _look(run: Submitted, reporter: Reporter, timeout: float, interval: float) -> Any:
    """The run as the server sees it. A server that does not answer is asked again until PATIENCE is over."""
    began = time.monotonic()
    while True:
        try:
            with _told(run.server, going=run.url), _quiet():
                return run.client.get_run(run.run_id)
        except EngineMissingError as error:
            if time.monotonic() - began > PATIENCE:
                raise
            reporter.note(f"{error.message}; asking again")
        _pause(run, timeout, interval)


def _pause(run: Submitted, timeout: float, interval: float) -> None:
    """Sleep until the next look. Raises InterruptedRunError when the time-out is over."""
    left = run.began + timeout - time.monotonic() if timeout else interval
    if left <= 0:
        raise InterruptedRunError(f"the run is still {run.state} after {timeout:g} s; it goes on", hint=_where(run))
    time.sleep(min(interval, left))


def _where(run: Submitted) -> str:
    return f"See {run.url}, or `kfp run get {run.run_id}`."


def _show(seen: Any, run: Submitted, shown: dict[str, str], reporter: Reporter) -> None:
    """Tell what changed: the run's state, and that of the tasks which the pipeline names (the API lists drivers and groups too)."""
    if shown.get("") != run.state:
        shown[""] = run.state
        reporter.step(f"{run.run_name}: {run.state}")
    for task in _details(seen):
        name, state = task.display_name, task.state
        if name in run.tasks and state and shown.get(name) != state:
            shown[name] = state
            reporter.step(f"{name}: {state}")


def _details(seen: Any) -> list[Any]:
    return list((seen.run_details and seen.run_details.task_details) or [])


def _failed(seen: Any, run: Submitted) -> RunFailedError:
    """Which task ended the run, and what the server knows of the reason."""
    failed = [t for t in _details(seen) if t.state == "FAILED"]
    named = [t for t in failed if t.display_name in run.tasks] or failed
    told = f"the run {run.run_name} ended {run.state}"
    reasons = [t.error.message for t in named if t.error and t.error.message] or ([seen.error.message] if seen.error else [])
    if named:
        told += f" in {_words(str(named[0].display_name), run.server)}"
    if reasons:
        told += f": {_words(reasons[0], run.server)}"
    return RunFailedError(told, hint=f"The task's log is in the UI: {run.url}")


def _tasks(spec: Mapping[str, Any]) -> frozenset[str]:
    """The names of the tasks that run in a pod, those behind conditions too."""
    components = spec.get("components", {})

    def inner(dag: Mapping[str, Any]) -> Iterator[str]:
        for name, task in dag.get("tasks", {}).items():
            deeper = components.get(task["componentRef"]["name"], {}).get("dag")
            yield from inner(deeper) if deeper else (name,)

    return frozenset(inner(spec["root"].get("dag", {})))


def _connect(server: Server) -> Any:
    """A client that has seen the server answer. Raises ConfigurationError for a token or certificate that is not there."""
    credentials = _credentials(server)
    if server.ca_cert and not server.ca_cert.is_file():
        raise ConfigurationError(f"--ca-cert: {server.ca_cert} does not exist", hint="Give the PEM file of the authority that signed it.")
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        """Asks once whether the server is there; kfp's own asks for half a minute and prints tracebacks."""

        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            return self._healthz_api.healthz_service_get_healthz(_request_timeout=(ANSWER_WITHIN, ANSWER_WITHIN))

    client = Client(
        host=server.address,
        namespace=server.namespace or "kubeflow",  # kfp's word for: not given
        ssl_ca_cert=str(server.ca_cert) if server.ca_cert else None,
        **credentials,
    )
    _limit(client._run_api.api_client.rest_client)
    _, _, headers = client._healthz_api.healthz_service_get_healthz_with_http_info()
    if "json" not in headers.get("Content-Type", ""):
        raise AccessError(
            f"{server.address} answers, but not as Kubeflow Pipelines does; a page to log in, perhaps",
            hint=f"Give a token in {TOKEN_VARIABLES[0]} or with --token-file, and check --endpoint: {IN_CLUSTER}.",
        )
    return client


def _limit(rest: Any) -> None:
    """Give every call a time-out: kfp.Client gives none, and waits for ever for a server that hangs."""
    request = rest.request

    def limited(*arguments: Any, **named: Any) -> Any:
        return request(*arguments, **{**named, "_request_timeout": (ANSWER_WITHIN, ANSWER_WITHIN)})

    rest.request = limited


def _credentials(server: Server) -> dict[str, Any]:
    """What kfp.Client is given: a token file, else a token in the environment, else user and password of the endpoint, else the pod's
    own projected token, else nothing.
    """
    projected = Path(os.environ.get(PROJECTED_TOKEN_VARIABLE) or PROJECTED_TOKEN)
    _, user, password = addresses.split(server.endpoint)
    if server.token_file:
        return {"credentials": _from_file(server.token_file, server)}
    variable = next((name for name in TOKEN_VARIABLES if os.environ.get(name, "").strip()), "")
    if variable:
        token = _checked(os.environ[variable].strip(), f"the token in {variable}")
        server.used.add(token)
        return {"existing_token": token}
    if password:
        return {"credentials": _from_endpoint(user, password, server)}
    if PROJECTED_TOKEN_VARIABLE in os.environ or projected.exists():
        return {"credentials": _from_file(projected, server)}
    return {}


def _from_file(path: Path, server: Server) -> Any:
    """A token that is read again at every call; each one that was used is remembered."""
    from kfp.client import ServiceAccountTokenVolumeCredentials

    class Credentials(ServiceAccountTokenVolumeCredentials):  # type: ignore[misc]
        def refresh_api_key_hook(self, config: Any) -> None:
            super().refresh_api_key_hook(config)
            server.used.update(config.api_key["authorization"].split())

    _check_token(path)
    return Credentials(str(path))


def _from_endpoint(user: str, password: str, server: Server) -> Any:
    """User and password as HTTP knows them (RFC 7617), which is what an address with both means."""
    from kfp.client.token_credentials_base import TokenCredentialsBase

    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()

    class Credentials(TokenCredentialsBase):  # type: ignore[misc]
        def refresh_api_key_hook(self, config: Any) -> None:
            config.api_key["authorization"], config.api_key_prefix["authorization"] = encoded, "Basic"

    server.used.update((encoded, password, quote(password, safe="")))
    return Credentials()


def _check_token(path: Path) -> None:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigurationError(f"the token file {path} cannot be read: {reason}", hint="Name a file that holds the token.") from None
    if not token:
        raise ConfigurationError(f"the token file {path} is empty", hint="Name a file that holds the token.")
    _checked(token, f"the token in {path}")


def _checked(token: str, what: str) -> str:
    """A token as it can be sent; what refuses another one repeats it."""
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConfigurationError(f"{what} is no token: it holds a space, a line break or a letter that none has", hint="Copy it again.")
    return token


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """kfp prints links to standard output and warns of its own age."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _told(server: Server, going: str = "") -> Iterator[None]:
    """Turn what the client raises into errors for people. `going`: the address of a run that goes on whatever happens here."""
    import urllib3.exceptions
    from kfp_server_api.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        raise _refused(error, server, going) from None
    except (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
        raise _silent(error, server, going) from None
    except ValueError as error:  # kfp's own refusals, such as two experiments of one name
        hint = "Give another --experiment, or archive the double one."
        raise UsageError(f"kfp refuses: {_words(str(error), server)}", hint=hint) from None


def _silent(error: Exception, server: Server, going: str) -> EngineMissingError:
    cause = getattr(error, "reason", None) or error
    text = _words(str(cause), server).rpartition(": ")[2] if "CERTIFICATE" not in str(cause) else "its certificate cannot be verified"
    certificate = "CERTIFICATE" in str(cause) or "SSL" in type(cause).__name__
    hint = "Give the authority's certificate with --ca-cert." if certificate else f"Check --endpoint and the network: {IN_CLUSTER}."
    return EngineMissingError(
        f"Kubeflow Pipelines at {server.address} does not answer: {text}", hint=f"The run goes on: {going}" if going else hint
    )


def _refused(error: Any, server: Server, going: str) -> TunelineError:
    status, said = error.status or 0, _said(error, server)
    where = f"Kubeflow Pipelines at {server.address}"
    if status == 401:
        told: TunelineError = AccessError(
            f"{where} does not accept who is asking: {said}",
            hint=f"Give a valid token in {TOKEN_VARIABLES[0]} or with --token-file; one that has expired must be renewed.",
        )
    elif status == 403:
        told = AccessError(f"{where} does not permit this: {said}", hint="Check --namespace, and the caller's rights in it.")
    elif status == 404:
        told = UsageError(f"{where} does not know this: {said}", hint=f"Check that --endpoint is the API's address: {IN_CLUSTER}.")
    elif status >= 500 or status == 429:
        told = EngineMissingError(f"{where} fails with status {status}: {said}", hint="Try again; if it stays, ask who runs it.")
    else:
        told = UsageError(f"{where} refuses: {said}", hint="Check --namespace (a shared Kubeflow wants one) and the parameters.")
    told.hint = f"{told.hint} The run goes on: {going}" if going else told.hint
    return told


def _said(error: Any, server: Server) -> str:
    """The server's own words: the API's JSON has them under `message`, a proxy answers in text, a page of HTML says nothing."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with contextlib.suppress(ValueError):
        parsed = json.loads(body)
        if isinstance(parsed, dict):
            body = str(parsed.get("message") or parsed.get("error") or "")
    text = "" if body.lstrip().startswith("<") else _words(body, server)
    return text or _words(str(error.reason or f"status {error.status}"), server)


def _words(text: str, server: Server, characters: int = 400) -> str:
    """The first line of what somebody else says, without the credentials that were sent: masked before it is cut, where half stays."""
    for secret in sorted(server.used, key=len, reverse=True):
        text = text.replace(secret, "***")
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= characters else f"{line[:characters]}…"
