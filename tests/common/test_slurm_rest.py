"""slurmrestd's answers in the shapes of its versions, and what goes wrong on the way, from a small stand-in; the real one of Slurm 22 is
asked in tests/engines/test_slurm_rest.py. The shapes of later versions are those of its OpenAPI specifications."""

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

from components.common.errors import ConfigurationError, TunelineError
from components.common.launch import Command, SilentError
from components.common.launch.settings import LauncherSettings, Slurm
from components.common.launch.slurm import launcher, properties, rest, script
from components.common.launch.slurm.rest import Rest
from components.common.launch.slurm.token import Token, TokenError
from components.common.launch.slurm.way import RefusedError
from tests.pipelines.test_submit import certificate

META = {"meta": {"plugin": {"type": "openapi/x"}}}
Said = tuple[int, Any]  # a status, and JSON or text


def jwt(**claims: object) -> str:
    """A token as Slurm's, with a signature that nobody checks here."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "HS256"}, claims)]
    return ".".join([*parts, "c2lnbmF0dXJl"])


@dataclass
class Standin:
    """Answers as it is told by method and path, else as a slurmrestd of one version that knows no job; keeps what it was asked."""

    version: int = 41
    answers: dict[str, Callable[[], Said]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""

    def reply(self, method: str, path: str, headers: dict[str, str], body: Any) -> Said:
        what = f"{method} {path.rpartition(f'/v0.0.{self.version}/')[2]}"
        self.asked.append((what, headers, body))
        if what in self.answers:
            return self.answers[what]()
        return (200, {**META, "errors": [], "jobs": []}) if f"/v0.0.{self.version}/" in path else (404, "Unable find requested URL.")

    def said(self, what: str) -> list[Any]:
        """The bodies of these requests."""
        return [body for asked, _, body in self.asked if asked == what]


@pytest.fixture
def standin() -> Iterator[Standin]:
    there = Standin()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = there.reply(self.command, self.path, dict(self.headers), json.loads(body) if body else None)
            if status == 0:
                return  # a connection that breaks off
            content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", f"{there.url}/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET  # noqa: N815 - the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    there.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield there
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def way(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Rest:
    monkeypatch.setenv("SLURM_JWT", jwt(sun="ada", exp=time.time() + 60))
    monkeypatch.setattr(rest, "BETWEEN_PROBES", 0.0)
    return Rest(Slurm(rest=standin.url))


def errors(*said: str, number: int = -1) -> dict[str, Any]:
    return {**META, "errors": [{"error": one, "error_number": number, "description": "Unable to query jobs"} for one in said]}


def batch_script(folder: Path, **slurm: Any) -> Path:
    settings = LauncherSettings(kind="slurm", nodes=2, slurm=slurm)
    (folder / "job.sh").write_text(script.text(script.options("tuneline-a", folder, 2, settings.slurm), folder, 2, settings))
    return folder / "job.sh"


ASKED = {
    "partition": "gpu", "gres": "gpu:h100:8,nic:1", "cpus": 64, "memory": "900G", "time_limit": "1-2:30:01", "save_seconds": 300,
    "constraint": "ib",
    "options": ["--exclusive=user", "--mail-type=END,FAIL", "-w n1,n2", "--dependency afterok:7", "--kill-on-invalid-dep=yes"],
}  # fmt: skip


def test_a_job_is_handed_in_in_the_words_of_the_newer_versions(way: Rest, standin: Standin, tmp_path: Path) -> None:
    standin.answers["POST job/submit"] = lambda: (200, {**META, "errors": [], "warnings": [], "job_id": 7, "result": {"job_id": 7}})
    path = batch_script(tmp_path, **ASKED)
    assert way.submit(path) == "7"
    (body,) = standin.said("POST job/submit")
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
    _, headers, _ = standin.asked[-1]
    assert headers["X-Slurm-User-Name"] == "ada"
    assert headers["X-Slurm-User-Token"].count(".") == 2


@pytest.mark.parametrize("version", [37, 38, 39, 40, 41, 43])
def test_every_version_is_found_by_asking_and_gets_script_and_environment_where_it_looks_for_them(
    version: int, way: Rest, standin: Standin, tmp_path: Path
) -> None:
    standin.version = version
    standin.answers["POST job/submit"] = lambda: (200, {**META, "errors": [], "job_id": 7})
    path = batch_script(tmp_path, gres="gpu:1")
    way.submit(path)
    (body,) = standin.said("POST job/submit")
    assert (body["job"] if version >= 41 else body)["script"] == path.read_text()
    assert isinstance(body["job"]["environment"], list if version >= 39 else dict)
    name, value = {37: ("gres", "gpu:1"), 38: ("gres", "gpu:1"), 39: ("tres_per_node", "gres:gpu:1")}.get(
        version, ("tres_per_node", "gres/gpu:1")
    )
    assert body["job"][name] == value


@pytest.mark.parametrize(("said", "minutes"), [("90", 90), ("5:30", 6), ("2:0:0", 120), ("1-0", 1440), ("1-2:3", 1563), ("0:0:1", 1)])
def test_a_time_limit_is_rounded_up_to_minutes(said: str, minutes: int) -> None:
    assert properties.of_script(f"#!/bin/bash\n#SBATCH --time={said}\n", 38) == {"tasks": 1, "time_limit": minutes}


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--bb=x", "--export=ALL", "--mem=lots", "-Q"])
def test_an_option_that_the_api_has_no_word_for_is_refused_before_a_job_is_there(
    option: str, way: Rest, standin: Standin, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="of the batch script cannot be said to slurmrestd"):
        way.submit(batch_script(tmp_path, options=[option]))
    assert not standin.said("POST job/submit")


@pytest.mark.parametrize("option", ["--exclusive", "--exclude=n1"])
def test_what_slurm_22_cannot_be_told_is_refused_and_later_ones_are_told(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} of the batch script cannot be said"):
        properties.of_script(f"#SBATCH {option}", 38)
    assert len(properties.of_script(f"#SBATCH {option}", 40)) == 2


def test_options_stand_above_the_first_command_and_in_their_short_form_too() -> None:
    text = "#!/bin/bash\n#SBATCH -p gpu -N2 --job-name='a b' # why\n\n#SBATCH --no-requeue\nset -e\n#SBATCH --mem=lots\n"
    assert properties.of_script(text, 38) == {"partition": "gpu", "nodes": "2", "name": "a b", "no_requeue": True, "tasks": 2}


def test_a_job_of_which_a_part_was_not_understood_is_ended_and_refused(way: Rest, standin: Standin, tmp_path: Path) -> None:
    unknown = {"description": 'Ignoring unknown field "tres_per_node" of type string', "source": "#/job/tres_per_node/"}
    standin.answers["POST job/submit"] = lambda: (200, {**META, "errors": [], "warnings": [unknown], "job_id": 7})
    with pytest.raises(RefusedError, match="did not understand the whole job: Ignoring unknown field"):
        way.submit(batch_script(tmp_path, gres="gpu:1"))
    assert standin.asked[-1][0] == "DELETE job/7"


def test_a_job_that_the_site_holds_is_handed_in(way: Rest, standin: Standin, tmp_path: Path) -> None:
    """Slurm 22 tells of it as of an error, beside the number."""
    held = {**errors("Job is in held state, pending scheduler release", number=2042), "job_id": 7}
    standin.answers["POST job/submit"] = lambda: (500, held)
    assert way.submit(batch_script(tmp_path)) == "7"


NEWER = {"job_id": 7, "name": "tuneline-a", "job_state": ["RUNNING"], "state_reason": "None"}


def test_jobs_are_those_of_the_name_and_the_accounting_may_be_missing(way: Rest, standin: Standin) -> None:
    standin.answers["GET jobs"] = lambda: (200, {**META, "errors": [], "jobs": [NEWER, {**NEWER, "job_id": 8, "name": "b"}]})
    assert [job.id for job in way.jobs("tuneline-a")] == ["7"]
    standin.answers["GET job/7"] = lambda: (404, "Unable find requested URL.")
    assert way.accounted("7") == []
    past = {"job_id": 7, "name": "tuneline-a", "state": {"current": ["COMPLETED"], "reason": "None"}}
    standin.answers["GET job/7"] = lambda: (200, {**META, "errors": [], "jobs": [past]})
    assert way.accounted("7")[0].is_over


def test_a_job_that_has_ended_may_be_cancelled_and_a_signal_is_left_to_its_folder(way: Rest, standin: Standin) -> None:
    standin.answers["DELETE job/7"] = lambda: (500, errors("Invalid job id specified", number=2017))
    way.cancel("7", "TERM")
    assert not standin.asked
    way.cancel("7")
    assert standin.asked[-1][0] == "DELETE job/7"
    standin.answers["DELETE job/7"] = lambda: (500, errors("Access/permission denied", number=2002))
    with pytest.raises(RefusedError, match="permission denied"):
        way.cancel("7")


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((0, ""), SilentError, "does not answer"),
        ((503, "<html>no upstream</html>"), SilentError, "HTTP 503"),
        ((504, {"message": "gateway timeout"}), SilentError, "HTTP 504"),
        ((500, "boom"), SilentError, "HTTP 500"),
        ((200, errors("Unable to contact slurm controller (connect failure)")), SilentError, "Unable to contact"),
        ((500, errors("Socket timed out on send/recv operation")), SilentError, "Socket timed out"),
        ((500, errors("Job can not be altered now, try again later", number=2020)), SilentError, "try again later"),
        ((400, errors("Unspecified error", "Failure during parsing")), RefusedError, "Failure during parsing"),
        ((500, errors("Invalid account or account/partition combination specified")), RefusedError, "Invalid account"),
        ((401, "Authentication failure"), TokenError, "is not accepted by Slurm at http.*: Authentication failure"),
        ((511, errors("Protocol authentication error", number=1007)), TokenError, "Protocol authentication error"),
        ((302, "moved"), ConfigurationError, "is no slurmrestd: HTTP 302"),
        ((200, "<html>Welcome</html>"), ConfigurationError, "is no slurmrestd: HTTP 200"),
        ((200, {"jobs": []}), ConfigurationError, "is no slurmrestd"),
    ],
)  # fmt: skip
def test_an_answer_is_silence_a_refusal_or_a_token_that_is_none(
    answer: Said, error: type[TunelineError], said: str, way: Rest, standin: Standin
) -> None:
    standin.answers["GET jobs"] = lambda: answer
    with pytest.raises(error, match=said) as raised:
        way.jobs("a")
    assert type(raised.value) is error
    assert not [path for path, _, _ in standin.asked if "elsewhere" in path], "a redirect would carry the token with it"
    assert "c2lnbmF0dXJl" not in raised.value.message + raised.value.hint


UNCLEAR = errors("Unspecified error")


def test_what_slurm_22_says_of_a_token_is_told_from_silence_by_a_signal_to_nobody(way: Rest, standin: Standin) -> None:
    probe = f"DELETE job/{rest.NO_JOB}?signal=CONT"
    standin.answers["GET jobs"] = lambda: (500, UNCLEAR)
    standin.answers[probe] = lambda: (500, errors("Unable to contact slurm controller (connect failure)", number=1800))
    with pytest.raises(SilentError):
        way.jobs("a")
    standin.answers[probe] = lambda: (500, errors("Zero Bytes were transmitted or received", number=5005))
    with pytest.raises(TokenError):
        way.jobs("a")
    once = iter([errors("Zero Bytes were transmitted or received"), errors("Invalid job id specified", number=2017)])
    standin.answers[probe] = lambda: (500, next(once))
    with pytest.raises(SilentError):  # a controller that ends, or starts, says it once
        way.jobs("a")


def test_where_no_slurmrestd_is_or_one_that_nobody_knows_it_is_said(way: Rest, standin: Standin) -> None:
    standin.version = 99
    with pytest.raises(ConfigurationError, match="no slurmrestd of a known version is at http"):
        way.jobs("a")


def test_a_slurm_that_is_updated_meanwhile_is_asked_in_its_new_version(way: Rest, standin: Standin) -> None:
    assert way.jobs("a") == []
    standin.version = 43
    with pytest.raises(SilentError, match="does not speak its former version"):
        way.jobs("a")
    assert way.jobs("a") == []


def test_a_job_whose_handing_in_was_not_answered_is_not_handed_in_twice(
    way: Rest, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> Said:
        job = {**NEWER, "name": launcher.name_of(tmp_path)}
        standin.answers["GET jobs"] = lambda: (200, {**META, "errors": [], "jobs": [job]})
        return (0, "")

    monkeypatch.setattr(launcher, "PAUSES", (0.0,))
    standin.answers["POST job/submit"] = lost
    settings = LauncherSettings(kind="slurm", nodes=2)
    job = launcher.SlurmLauncher(settings, way).start(Command("a", [], nodes=2), tmp_path)
    assert job.id == "7"
    assert len(standin.said("POST job/submit")) == 1


@pytest.mark.parametrize(
    ("name", "said"), [("", "there is no token in SLURM_JWT"), ("secret!\n", "there is no token in SLURM_JWT: this is none")]
)
def test_without_a_token_it_is_said_where_to_get_one(name: str, said: str, way: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", name)
    with pytest.raises(TokenError) as raised:
        way.jobs("a")
    assert raised.value.message == said
    assert "scontrol token" in raised.value.hint


def test_a_token_file_is_read_anew_with_every_call_and_waited_for_once_it_was_good(standin: Standin, tmp_path: Path) -> None:
    file = tmp_path / "token"
    way = Rest(Slurm(rest=standin.url, rest_user="bob", rest_token_file=str(file)))
    with pytest.raises(TokenError, match="cannot be read: FileNotFoundError"):
        way.jobs("a")
    file.write_text(f"SLURM_JWT={jwt(sun='ada', exp=1)}\n")
    standin.answers["GET jobs"] = lambda: (401, "Authentication failure")
    with pytest.raises(TokenError, match=r"has expired \(1970-01-0"):
        way.jobs("a")
    del standin.answers["GET jobs"]
    assert way.jobs("a") == []
    assert standin.asked[-1][1]["X-Slurm-User-Name"] == "bob"
    standin.answers["GET jobs"] = lambda: (401, "Authentication failure")
    with pytest.raises(SilentError, match=r"has expired \("):
        way.jobs("a")


def test_a_token_that_names_nobody_leaves_it_to_slurm_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "a.b.c")
    assert Token().headers() == {"X-SLURM-USER-TOKEN": "a.b.c"}


def test_a_certificate_of_nobody_known_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = certificate(tmp_path / "own.pem")
    monkeypatch.setenv("SLURM_JWT", jwt(sun="ada"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({**META, "errors": [], "jobs": []}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    way = Rest(Slurm(rest=f"https://127.0.0.1:{server.server_address[1]}"))
    with pytest.raises(
        ConfigurationError, match=r"the certificate of https://127.0.0.1:.* is not trusted: self-signed certificate"
    ) as raised:
        way.jobs("a")
    assert "SSL_CERT_FILE" in raised.value.hint
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert way.jobs("a") == []
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "wrong", [{"rest": "slurm:6820"}, {"rest": "https://ada:pw@slurm:6820"}, {"rest": "https://a", "ssh": "login"}, {"rest_user": "a\nb"}]
)
def test_an_address_that_cannot_be_meant_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Slurm.model_validate(wrong)
