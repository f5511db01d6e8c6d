"""The slurmrestd client against a fake server: API versions, submission, errors and tokens.

tests/engines/test_slurm_rest.py queries the slurmrestd of Slurm 22; the formats of later versions follow its OpenAPI specifications.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.launch import Command, UnresponsiveError
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.slurm import batch_script, rest_client, rest_properties, slurm_launcher
from components.common.launch.slurm.access_token import Token, TokenError
from components.common.launch.slurm.rest_client import RestClient
from components.common.launch.slurm.slurm_client import RefusedError
from components.common.launch.slurm.slurm_settings import SlurmSettings
from components.common.runtime.errors import ConfigurationError, TunelineError
from tests.pipelines.test_submit import write_certificate

META = {"meta": {"plugin": {"type": "openapi/x"}}}
Response = tuple[int, Any]  # a status, and JSON or text


def build_jwt(**claims: object) -> str:
    """Build a token like those of Slurm, with a signature that the fake server does not check."""
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "HS256"}, claims)
    ]
    return ".".join([*parts, "c2lnbmF0dXJl"])


@dataclass
class FakeSlurmrestd:
    """Answer with `answers` by method and path, else as a slurmrestd of one version without jobs; record the requests."""

    version: int = 41
    answers: dict[str, Callable[[], Response]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""

    def reply(self, method: str, path: str, headers: dict[str, str], body: Any) -> Response:
        endpoint = f"{method} {path.rpartition(f'/v0.0.{self.version}/')[2]}"
        self.requests.append((endpoint, headers, body))
        if endpoint in self.answers:
            return self.answers[endpoint]()
        return (
            (200, {**META, "errors": [], "jobs": []})
            if f"/v0.0.{self.version}/" in path
            else (404, "Unable find requested URL.")
        )

    def bodies(self, endpoint: str) -> list[Any]:
        """Return the bodies of the requests to an endpoint."""
        return [body for requested, _, body in self.requests if requested == endpoint]


@pytest.fixture
def slurmrestd() -> Iterator[FakeSlurmrestd]:
    slurmrestd = FakeSlurmrestd()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = slurmrestd.reply(
                self.command, self.path, dict(self.headers), json.loads(body) if body else None
            )
            if status == 0:
                return  # a broken connection
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", f"{slurmrestd.url}/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET  # noqa: N815 - names required by http.server

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    slurmrestd.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield slurmrestd
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(slurmrestd: FakeSlurmrestd, monkeypatch: pytest.MonkeyPatch) -> RestClient:
    monkeypatch.setenv("SLURM_JWT", build_jwt(sun="ada", exp=time.time() + 60))
    monkeypatch.setattr(rest_client, "PROBE_INTERVAL_SECONDS", 0.0)
    return RestClient(SlurmSettings(rest=slurmrestd.url))


def error_response(*messages: str, number: int = -1) -> dict[str, Any]:
    return {
        **META,
        "errors": [
            {"error": message, "error_number": number, "description": "Unable to query jobs"} for message in messages
        ],
    }


def write_batch_script(folder: Path, **slurm: Any) -> Path:
    settings = LauncherSettings(kind="slurm", nodes=2, slurm=slurm)
    (folder / "job.sh").write_text(
        batch_script.render_script(
            batch_script.build_options("tuneline-a", folder, 2, settings.slurm), folder, 2, settings
        )
    )
    return folder / "job.sh"


SCRIPT_SETTINGS = {
    "partition": "gpu", "gres": "gpu:h100:8,nic:1", "cpus": 64, "memory": "900G", "time_limit": "1-2:30:01", "save_seconds": 300,
    "constraint": "ib",
    "options": ["--exclusive=user", "--mail-type=END,FAIL", "-w n1,n2", "--dependency afterok:7", "--kill-on-invalid-dep=yes"],
}  # fmt: skip


def test_submitted_properties_match_newer_api_versions(
    client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path
) -> None:
    slurmrestd.answers["POST job/submit"] = lambda: (
        200,
        {**META, "errors": [], "warnings": [], "job_id": 7, "result": {"job_id": 7}},
    )
    path = write_batch_script(tmp_path, **SCRIPT_SETTINGS)
    assert client.submit(path) == "7"
    (body,) = slurmrestd.bodies("POST job/submit")
    job = body["job"]
    assert "PATH=/usr/local/bin" in job.pop("environment")[0]
    assert job == {
        "script": path.read_text(), "name": "tuneline-a", "comment": str(tmp_path), "nodes": "2", "tasks_per_node": 1, "tasks": 2,
        "minimum_cpus": 128, "cpus_per_task": 64, "standard_output": f"{tmp_path}/slurm-%j.log", "open_mode": ["APPEND"], "requeue": True,
        "kill_warning_signal": "TERM", "kill_warning_delay": {"set": True, "infinite": False, "number": 300}, "partition": "gpu",
        "tres_per_node": "gres/gpu:h100:8,gres/nic:1", "constraints": "ib", "current_working_directory": str(tmp_path),
        "memory_per_node": {"set": True, "infinite": False, "number": 900 * 1024}, "shared": ["user"], "mail_type": ["END", "FAIL"],
        "time_limit": {"set": True, "infinite": False, "number": 26 * 60 + 31}, "required_nodes": ["n1", "n2"],
        "dependency": "afterok:7", "flags": ["KILL_INVALID_DEPENDENCY"],
    }  # fmt: skip
    _, headers, _ = slurmrestd.requests[-1]
    assert headers["X-Slurm-User-Name"] == "ada"
    assert headers["X-Slurm-User-Token"].count(".") == 2


@pytest.mark.parametrize("version", [37, 38, 39, 40, 41, 43])
def test_api_version_is_detected_and_job_uses_its_format(
    version: int, client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path
) -> None:
    slurmrestd.version = version
    slurmrestd.answers["POST job/submit"] = lambda: (200, {**META, "errors": [], "job_id": 7})
    path = write_batch_script(tmp_path, gres="gpu:1")
    client.submit(path)
    (body,) = slurmrestd.bodies("POST job/submit")
    assert (body["job"] if version >= 41 else body)["script"] == path.read_text()
    assert isinstance(body["job"]["environment"], list if version >= 39 else dict)
    name, value = {37: ("gres", "gpu:1"), 38: ("gres", "gpu:1"), 39: ("tres_per_node", "gres:gpu:1")}.get(
        version, ("tres_per_node", "gres/gpu:1")
    )
    assert body["job"][name] == value


@pytest.mark.parametrize(
    ("time_limit", "minutes"), [("90", 90), ("5:30", 6), ("2:0:0", 120), ("1-0", 1440), ("1-2:3", 1563), ("0:0:1", 1)]
)
def test_time_limit_is_rounded_up_to_minutes(time_limit: str, minutes: int) -> None:
    assert rest_properties.parse_script(f"#!/bin/bash\n#SBATCH --time={time_limit}\n", 38) == {
        "tasks": 1,
        "time_limit": minutes,
    }


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--bb=x", "--export=ALL", "--mem=lots", "-Q"])
def test_unsupported_option_is_refused_before_submission(
    option: str, client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"slurmrestd.* does not support .* of the batch script"):
        client.submit(write_batch_script(tmp_path, options=[option]))
    assert not slurmrestd.bodies("POST job/submit")


@pytest.mark.parametrize("option", ["--exclusive", "--exclude=n1"])
def test_options_unsupported_by_slurm_22_are_refused_there(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"does not support {option} of the batch script"):
        rest_properties.parse_script(f"#SBATCH {option}", 38)
    assert len(rest_properties.parse_script(f"#SBATCH {option}", 40)) == 2


def test_options_are_parsed_up_to_the_first_command() -> None:
    text = (
        "#!/bin/bash\n#SBATCH -p gpu -N2 --job-name='a b' # why\n\n#SBATCH --no-requeue\nset -e\n#SBATCH --mem=lots\n"
    )
    assert rest_properties.parse_script(text, 38) == {
        "partition": "gpu",
        "nodes": "2",
        "name": "a b",
        "no_requeue": True,
        "tasks": 2,
    }


def test_job_with_ignored_properties_is_cancelled_and_refused(
    client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path
) -> None:
    unknown = {"description": 'Ignoring unknown field "tres_per_node" of type string', "source": "#/job/tres_per_node/"}
    slurmrestd.answers["POST job/submit"] = lambda: (200, {**META, "errors": [], "warnings": [unknown], "job_id": 7})
    with pytest.raises(RefusedError, match="ignored properties of the job: Ignoring unknown field"):
        client.submit(write_batch_script(tmp_path, gres="gpu:1"))
    assert slurmrestd.requests[-1][0] == "DELETE job/7"


def test_held_job_counts_as_submitted(client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path) -> None:
    """Slurm 22 reports the hold as an error beside the job id."""
    held = {**error_response("Job is in held state, pending scheduler release", number=2042), "job_id": 7}
    slurmrestd.answers["POST job/submit"] = lambda: (500, held)
    assert client.submit(write_batch_script(tmp_path)) == "7"


RUNNING_JOB = {"job_id": 7, "name": "tuneline-a", "job_state": ["RUNNING"], "state_reason": "None"}


def test_jobs_are_filtered_by_name_and_accounting_is_optional(client: RestClient, slurmrestd: FakeSlurmrestd) -> None:
    slurmrestd.answers["GET jobs"] = lambda: (
        200,
        {**META, "errors": [], "jobs": [RUNNING_JOB, {**RUNNING_JOB, "job_id": 8, "name": "b"}]},
    )
    assert [job.id for job in client.list_jobs("tuneline-a")] == ["7"]
    slurmrestd.answers["GET job/7"] = lambda: (404, "Unable find requested URL.")
    assert client.list_accounted("7") == []
    accounted_job = {"job_id": 7, "name": "tuneline-a", "state": {"current": ["COMPLETED"], "reason": "None"}}
    slurmrestd.answers["GET job/7"] = lambda: (200, {**META, "errors": [], "jobs": [accounted_job]})
    assert client.list_accounted("7")[0].has_ended


def test_cancel_of_ended_job_succeeds_and_signals_are_not_sent(client: RestClient, slurmrestd: FakeSlurmrestd) -> None:
    slurmrestd.answers["DELETE job/7"] = lambda: (500, error_response("Invalid job id specified", number=2017))
    client.cancel("7", "TERM")
    assert not slurmrestd.requests
    client.cancel("7")
    assert slurmrestd.requests[-1][0] == "DELETE job/7"
    slurmrestd.answers["DELETE job/7"] = lambda: (500, error_response("Access/permission denied", number=2002))
    with pytest.raises(RefusedError, match="permission denied"):
        client.cancel("7")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((0, ""), UnresponsiveError, "does not answer"),
        ((503, "<html>no upstream</html>"), UnresponsiveError, "HTTP 503"),
        ((504, {"message": "gateway timeout"}), UnresponsiveError, "HTTP 504"),
        ((500, "boom"), UnresponsiveError, "HTTP 500"),
        ((200, error_response("Unable to contact slurm controller (connect failure)")), UnresponsiveError, "Unable to contact"),
        ((500, error_response("Socket timed out on send/recv operation")), UnresponsiveError, "Socket timed out"),
        ((500, error_response("Job can not be altered now, try again later", number=2020)), UnresponsiveError, "try again later"),
        ((400, error_response("Unspecified error", "Failure during parsing")), RefusedError, "Failure during parsing"),
        ((500, error_response("Invalid account or account/partition combination specified")), RefusedError, "Invalid account"),
        ((401, "Authentication failure"), TokenError, "is not accepted by Slurm at http.*: Authentication failure"),
        ((511, error_response("Protocol authentication error", number=1007)), TokenError, "Protocol authentication error"),
        ((302, "moved"), ConfigurationError, "is not slurmrestd: HTTP 302"),
        ((200, "<html>Welcome</html>"), ConfigurationError, "is not slurmrestd: HTTP 200"),
        ((200, {"jobs": []}), ConfigurationError, "is not slurmrestd"),
    ],
)  # fmt: skip
def test_error_responses_are_classified(
    answer: Response, error: type[TunelineError], message: str, client: RestClient, slurmrestd: FakeSlurmrestd
) -> None:
    slurmrestd.answers["GET jobs"] = lambda: answer
    with pytest.raises(error, match=message) as raised:
        client.list_jobs("a")
    assert type(raised.value) is error
    assert not [path for path, _, _ in slurmrestd.requests if "elsewhere" in path], (
        "a redirect would carry the token with it"
    )
    assert "c2lnbmF0dXJl" not in raised.value.message + raised.value.hint


UNSPECIFIED_ERROR = error_response("Unspecified error")


def test_probe_tells_token_error_from_outage_on_slurm_22(client: RestClient, slurmrestd: FakeSlurmrestd) -> None:
    probe = f"DELETE job/{rest_client.UNUSED_JOB_ID}?signal=CONT"
    slurmrestd.answers["GET jobs"] = lambda: (500, UNSPECIFIED_ERROR)
    slurmrestd.answers[probe] = lambda: (
        500,
        error_response("Unable to contact slurm controller (connect failure)", number=1800),
    )
    with pytest.raises(UnresponsiveError):
        client.list_jobs("a")
    slurmrestd.answers[probe] = lambda: (500, error_response("Zero Bytes were transmitted or received", number=5005))
    with pytest.raises(TokenError):
        client.list_jobs("a")
    responses = iter(
        [
            error_response("Zero Bytes were transmitted or received"),
            error_response("Invalid job id specified", number=2017),
        ]
    )
    slurmrestd.answers[probe] = lambda: (500, next(responses))
    with pytest.raises(UnresponsiveError):  # a controller that starts or stops returns this once
        client.list_jobs("a")


def test_unsupported_api_version_is_reported(client: RestClient, slurmrestd: FakeSlurmrestd) -> None:
    slurmrestd.version = 99
    with pytest.raises(ConfigurationError, match="no slurmrestd of a supported version answers at http"):
        client.list_jobs("a")


def test_client_detects_new_api_version_after_upgrade(client: RestClient, slurmrestd: FakeSlurmrestd) -> None:
    assert client.list_jobs("a") == []
    slurmrestd.version = 43
    with pytest.raises(UnresponsiveError, match="no longer supports the API version in use"):
        client.list_jobs("a")
    assert client.list_jobs("a") == []


def test_lost_submit_response_does_not_submit_twice(
    client: RestClient, slurmrestd: FakeSlurmrestd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_response() -> Response:
        job = {**RUNNING_JOB, "name": slurm_launcher.build_job_name(tmp_path)}
        slurmrestd.answers["GET jobs"] = lambda: (200, {**META, "errors": [], "jobs": [job]})
        return (0, "")

    monkeypatch.setattr(slurm_launcher, "RETRY_INTERVALS_SECONDS", (0.0,))
    slurmrestd.answers["POST job/submit"] = lose_response
    settings = LauncherSettings(kind="slurm", nodes=2)
    job = slurm_launcher.SlurmLauncher(settings, client).start(Command("a", [], nodes=2), tmp_path)
    assert job.id == "7"
    assert len(slurmrestd.bodies("POST job/submit")) == 1


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "SLURM_JWT contains no token"),
        ("secret!\n", "SLURM_JWT contains no token: the content is not a JSON Web Token"),
    ],
)
def test_missing_token_error_says_how_to_get_one(
    token: str, message: str, client: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JWT", token)
    with pytest.raises(TokenError) as raised:
        client.list_jobs("a")
    assert raised.value.message == message
    assert "scontrol token" in raised.value.hint


def test_token_file_is_reread_and_expiry_is_retried_after_success(slurmrestd: FakeSlurmrestd, tmp_path: Path) -> None:
    file = tmp_path / "token"
    client = RestClient(SlurmSettings(rest=slurmrestd.url, rest_user="bob", rest_token_file=str(file)))
    with pytest.raises(TokenError, match="cannot be read: FileNotFoundError"):
        client.list_jobs("a")
    file.write_text(f"SLURM_JWT={build_jwt(sun='ada', exp=1)}\n")
    slurmrestd.answers["GET jobs"] = lambda: (401, "Authentication failure")
    with pytest.raises(TokenError, match=r"has expired \(1970-01-0"):
        client.list_jobs("a")
    del slurmrestd.answers["GET jobs"]
    assert client.list_jobs("a") == []
    assert slurmrestd.requests[-1][1]["X-Slurm-User-Name"] == "bob"
    slurmrestd.answers["GET jobs"] = lambda: (401, "Authentication failure")
    with pytest.raises(UnresponsiveError, match=r"has expired \("):
        client.list_jobs("a")


def test_token_without_user_sends_no_user_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "a.b.c")
    assert Token().build_headers() == {"X-SLURM-USER-TOKEN": "a.b.c"}


def test_untrusted_certificate_is_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_path = write_certificate(tmp_path / "own.pem")
    monkeypatch.setenv("SLURM_JWT", build_jwt(sun="ada"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({**META, "errors": [], "jobs": []}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_path)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    client = RestClient(SlurmSettings(rest=f"https://127.0.0.1:{server.server_address[1]}"))
    with pytest.raises(
        ConfigurationError, match=r"the certificate of https://127.0.0.1:.* is not trusted: self-signed certificate"
    ) as raised:
        client.list_jobs("a")
    assert "SSL_CERT_FILE" in raised.value.hint
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate_path))
    assert client.list_jobs("a") == []
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "rest_settings",
    [
        {"rest": "slurm:6820"},
        {"rest": "https://ada:pw@slurm:6820"},
        {"rest": "https://a", "ssh": "login"},
        {"rest_user": "a\nb"},
    ],
)
def test_invalid_rest_settings_are_refused(rest_settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        SlurmSettings.model_validate(rest_settings)
