"""Runs on Kubeflow: the compiled pipeline, the real kfp command, `tuneline submit`, and a stand-in for the server (tests/kfp_api.py)."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import compiling, platform, submitting
from pipelines.cli.app import app
from pipelines.cli.main import main
from pipelines.config import Customization
from pipelines.platform import Mlflow, Platform
from tests.kfp_api import KfpApi, State, serving
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.pipelines.processes import hear_interrupts

SECRET = "s3cr3t-0f-th3-t35t"
Command = Callable[..., tuple[int, dict[str, Any], str]]
POWERSCALE = ROOT / "deploy" / "overlays" / "xe9680-powerscale" / "platform.yaml"
PLATFORM = Platform(mlflow=Mlflow(tracking_uri="http://mlflow:5000"))


@pytest.fixture
def api() -> Iterator[KfpApi]:
    with serving(KfpApi()) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The defaults, compiled for no cluster: one document."""
    path = tmp_path_factory.mktemp("plain") / "pipeline.yaml"
    path.write_text(compiling.compiled(Customization()))
    return path


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The defaults, compiled for a cluster: two documents."""
    path = tmp_path_factory.mktemp("placed") / "pipeline.yaml"
    path.write_text(compiling.compiled(Customization(), PLATFORM))
    return path


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token, endpoint or context of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("KFP_", "KF_PIPELINES_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    import kfp

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`tuneline submit … --json` in this process: its exit code, its object, and its standard error."""

    def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["tuneline", "submit", *map(str, arguments), "--poll", "0.05", "--json"])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        return int(ended.value.code or 0), json.loads(out), err

    return run


def kfp(*arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """The kfp command as its package installs it."""
    command = [sys.executable, "-W", "ignore", "-c", "from kfp.cli.__main__ import main; main()", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**{"HOME": str(cwd), **extra}), capture_output=True, text=True, timeout=120, check=False
    )


def created(api: KfpApi) -> dict[str, Any]:
    """The body of the only run that was asked for."""
    (call,) = [call for call in api.calls if (call.method, call.path) == ("POST", "/apis/v2beta1/runs")]
    return call.json


def error_of(found: dict[str, Any]) -> tuple[str, str, str]:
    error = found["error"]
    return error["kind"], error["message"], error["hint"]


# The kfp command


def test_kfp_run_create_submits_the_compiled_file(api: KfpApi, plain: Path, tmp_path: Path) -> None:
    parameters = ["max_steps=7", "learning_rate=1e-3", "auto_promote=false", 'sources=["/data/a.jsonl"]', "model_name=mine"]
    done = kfp("run", "create", "-e", "nightly", "-r", "first", "-f", plain, *parameters, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 0, done.stderr
    body = created(api)
    given = {"max_steps": 7, "learning_rate": 0.001, "auto_promote": False, "sources": ["/data/a.jsonl"], "model_name": "mine"}
    assert body["runtime_config"]["parameters"] == given
    assert body["display_name"] == "first"
    assert [e["display_name"] for e in api.experiments.values()] == ["nightly"]
    assert body["pipeline_spec"]["root"]["inputDefinitions"] == yaml.safe_load(plain.read_text())["root"]["inputDefinitions"]


def test_the_deprecated_kfp_run_submit_does_too_with_what_only_kubernetes_knows(api: KfpApi, placed: Path, tmp_path: Path) -> None:
    done = kfp("run", "submit", "-e", "nightly", "-r", "first", "-f", placed, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 0, done.stderr
    spec = created(api)["pipeline_spec"]
    assert spec["pipeline_spec"]["pipelineInfo"]["name"] == "tuneline-customization"
    executors = spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {mount["mountPath"] for executor in executors.values() for mount in executor["pvcMount"]} == {"/data"}


def test_kfp_run_create_with_a_wrong_type_is_refused_by_the_server(api: KfpApi, plain: Path, tmp_path: Path) -> None:
    done = kfp("run", "create", "-e", "nightly", "-f", plain, "max_steps=many", cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 1
    assert "input parameter max_steps requires type NUMBER_INTEGER" in done.stdout + done.stderr
    assert api.runs == {}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (["steps=7"], "parameter(s) provided are not required by pipeline: steps"),
        (["model_name=5"], "input parameter model_name requires type STRING"),
        (["auto_promote=1"], "input parameter auto_promote requires type BOOLEAN"),
        (["sources=/data/a.jsonl"], "input parameter sources requires type LIST"),
    ],
)
def test_a_parameter_that_the_pipeline_does_not_take_starts_no_run(
    api: KfpApi, plain: Path, tmp_path: Path, parameters: list[str], said: str
) -> None:
    done = kfp("run", "create", "-e", "nightly", "-f", plain, *parameters, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr
    assert api.runs == {}


def test_kfp_run_create_submits_what_is_compiled_for_a_cluster_that_says_everything(api: KfpApi, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(compiling.compiled(Customization(), platform.load(POWERSCALE)))
    parameters = ["max_steps=7", "learning_rate=1e-3", "auto_promote=true", 'sources=["/corpus/a.jsonl"]', 'model_name="mine"']
    done = kfp("run", "create", "-e", "nightly", "-f", file, *parameters, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 0, done.stderr
    kubernetes = created(api)["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert kubernetes["pipelineConfig"]["activeDeadlineSeconds"] == 1209600
    training = kubernetes["deploymentSpec"]["executors"]["exec-fine-tuning"]
    assert training["podMetadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


def test_a_pipeline_with_a_parameter_that_must_be_given_starts_no_run_without_it(api: KfpApi, tmp_path: Path) -> None:
    file = tmp_path / "promotion.yaml"
    file.write_text(compiling.compiled(Customization(), pipeline="promotion"))
    done = kfp("run", "create", "-e", "nightly", "-f", file, "by=me", cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 1
    assert "parameter version is not optional" in done.stdout + done.stderr
    assert api.runs == {}
    accepted = kfp("run", "create", "-e", "nightly", "-f", file, "by=me", 'version="3"', cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert accepted.returncode == 0, accepted.stderr


def test_kfp_run_create_watch_exits_0_on_a_failed_run_which_is_why_scripts_must_read_the_state(
    api: KfpApi, plain: Path, tmp_path: Path
) -> None:
    api.script = [State("FAILED")]
    done = kfp("run", "create", "-e", "nightly", "-f", plain, "--watch", cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert "Run is finished with state FAILED." in done.stdout
    assert done.returncode == 0


def test_an_uploaded_version_of_the_pipeline_runs(api: KfpApi, placed: Path, tmp_path: Path) -> None:
    uploaded = kfp("pipeline", "create", "-p", "tuneline", placed, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert uploaded.returncode == 0, uploaded.stderr
    (first,) = api.versions.values()
    again = kfp("pipeline", "create-version", "-v", "2", "-p", first["pipeline_id"], placed, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert again.returncode == 0, again.stderr
    second = next(v for v in api.versions.values() if v["display_name"] == "2")
    arguments = ["-p", second["pipeline_id"], "-v", second["pipeline_version_id"], "seed=5"]
    done = kfp("run", "create", "-e", "nightly", *arguments, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert done.returncode == 0, done.stderr
    assert created(api)["pipeline_version_reference"]["pipeline_version_id"] == second["pipeline_version_id"]


# tuneline submit


def test_submit_compiles_the_configuration_and_starts_a_run(api: KfpApi, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("fine_tuning: {max_steps: 9, lora: {rank: 4}}\n")
    (tmp_path / "p.yaml").write_text("images: {training: registry.example/training:1}\n")
    arguments = ["--endpoint", api.url, "--experiment", "nightly", "--run-name", "first", "--service-account", "tuner"]
    code, found, _ = submit("-c", tmp_path / "c.yaml", "-p", tmp_path / "p.yaml", "--set", "seed=5", *arguments)
    assert code == 0, found
    body = created(api)
    (run_id,) = api.runs
    assert found["seconds"] >= 0
    assert {**found, "seconds": 0} == {
        "run_id": run_id,
        "run_name": "first",
        "experiment": "nightly",
        "namespace": None,
        "state": "PENDING",
        "url": f"{api.url}/#/runs/details/{run_id}",
        "seconds": 0,
        "warnings": [],
    }
    assert (body["display_name"], body["service_account"]) == ("first", "tuner")
    spec = body["pipeline_spec"]["pipeline_spec"]
    declared = spec["root"]["inputDefinitions"]["parameters"]
    assert (declared["max_steps"]["defaultValue"], declared["seed"]["defaultValue"]) == (9, 5)
    assert yaml.safe_load(declared["configuration"]["defaultValue"]) == {"fine_tuning": {"lora": {"rank": 4}}}
    assert spec["deploymentSpec"]["executors"]["exec-fine-tuning"]["container"]["image"] == "registry.example/training:1"


def test_an_experiment_that_is_there_is_used_again(api: KfpApi, submit: Command, plain: Path) -> None:
    for _ in range(2):
        assert submit("-f", plain, "--endpoint", api.url, "--experiment", "nightly")[0] == 0
    assert len(api.experiments) == 1
    assert len(api.runs) == 2


def test_parameters_are_read_by_the_type_that_the_pipeline_declares(api: KfpApi, submit: Command, plain: Path) -> None:
    given = ["model_name=5", "max_steps=7", "learning_rate=5e-4", "auto_promote=false", "sources=[/data/a.jsonl]"]
    arguments = [part for parameter in given for part in ("--param", parameter)]
    assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e", *arguments)[0] == 0
    sent = {"model_name": "5", "max_steps": 7, "learning_rate": 0.0005, "auto_promote": False, "sources": ["/data/a.jsonl"]}
    assert created(api)["runtime_config"]["parameters"] == sent


@pytest.mark.parametrize(
    ("parameter", "message", "hint"),
    [
        ("max_steps=many", "the parameter max_steps wants a whole number, not 'many'", "For example --param max_steps=100"),
        ("max_steps=true", "the parameter max_steps wants a whole number, not 'true'", "For example --param max_steps=100"),
        ("epochs=", "the parameter epochs wants a number, not ''", "For example --param epochs=5e-4"),
        ("auto_promote=1", "the parameter auto_promote wants true or false, not '1'", "For example --param auto_promote=false"),
        (
            "sources=/data/a",
            "the parameter sources wants a list, for example [\"/data/a.jsonl\"], not '/data/a'",
            "For example --param sources='[\"/data/a.jsonl\"]'",
        ),
        ("max_steps", "--param max_steps is not of the form name=value", "For example --param max_steps=100."),
    ],
)
def test_a_parameter_of_another_type_is_refused_before_anything_is_sent(
    api: KfpApi, submit: Command, plain: Path, parameter: str, message: str, hint: str
) -> None:
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--param", parameter)
    assert (code, *error_of(found)) == (2, "usage", message, hint)
    assert api.calls == []


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("adaptation=loora", "fine_tuning.adaptation: found 'loora'"),
        ("max_steps=-1", "fine_tuning.max_steps: found -1; 1 or more is wanted"),
        ("learning_rate=-1", "fine_tuning.learning_rate: found -1"),
        ("seed=-1", "seed: found -1; 0 or more is wanted"),
        ("sources=[raw/a.jsonl]", "data_curation.sources: raw/a.jsonl is a relative path"),
        ("configuration={evaluation: {max_item: 3}}", "evaluation.max_item: there is no such key (did you mean max_items?)"),
    ],
)
def test_a_value_that_the_customization_does_not_take_is_refused_before_anything_is_sent(
    api: KfpApi, submit: Command, plain: Path, parameter: str, message: str
) -> None:
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--param", parameter)
    assert (code, found["error"]["kind"]) == (2, "configuration")
    assert message in found["error"]["message"]
    assert api.calls == []


def test_what_another_version_of_tuneline_compiled_is_left_to_its_own_first_step(
    api: KfpApi, submit: Command, plain: Path, tmp_path: Path
) -> None:
    spec = yaml.safe_load(plain.read_text())
    spec["root"]["inputDefinitions"]["parameters"]["configuration"]["defaultValue"] = "{evaluation: {of_tomorrow: 3}}"
    (tmp_path / "newer.yaml").write_text(yaml.safe_dump(spec))
    code, found, _ = submit("-f", tmp_path / "newer.yaml", "--endpoint", api.url, "--experiment", "e", "--param", "max_steps=7")
    assert code == 0, found


def test_the_pods_run_as_the_service_account_of_the_platform_unless_the_command_names_one(
    api: KfpApi, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text("run: {service_account: tuner}\n")
    arguments = ["-p", tmp_path / "p.yaml", "--endpoint", api.url, "--experiment", "e"]
    for more, account in ({}, "tuner"), ({"--service-account": "other"}, "other"):
        api.runs.clear()
        assert submit(*arguments, *(part for pair in more.items() for part in pair))[0] == 0
        (run,) = api.runs.values()
        assert run["service_account"] == account


def test_an_unknown_parameter_is_refused_with_those_there_are(api: KfpApi, submit: Command, plain: Path) -> None:
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--param", "steps=3")
    kind, message, hint = error_of(found)
    assert (code, kind, message) == (2, "usage", "the pipeline has no parameter steps")
    assert hint.startswith("It has adaptation, auto_promote, base_model,")


def test_a_compiled_file_takes_no_configuration(api: KfpApi, submit: Command, plain: Path) -> None:
    code, found, _ = submit("-f", plain, "--set", "seed=3", "--endpoint", api.url, "--experiment", "e")
    assert (code, *error_of(found)) == (
        2,
        "usage",
        "-f is compiled already: -c, --set and -p cannot change it",
        "Leave them out, or give --param name=value.",
    )


def test_a_file_that_is_no_pipeline_is_said(api: KfpApi, submit: Command, tmp_path: Path) -> None:
    hint = "Give a file that `tuneline compile -o pipeline.yaml` or the kfp compiler wrote."
    (tmp_path / "other.yaml").write_text("seed: 3\n")
    for name, said in {"none.yaml": "does not exist", "other.yaml": "is not a compiled pipeline"}.items():
        code, found, _ = submit("-f", tmp_path / name, "--endpoint", api.url, "--experiment", "e")
        assert (code, *error_of(found)) == (2, "configuration", f"{tmp_path / name} {said}", hint)
    assert api.calls == []


def test_without_a_platform_submit_warns_of_the_missing_volume(api: KfpApi, submit: Command) -> None:
    code, found, _ = submit("--endpoint", api.url, "--experiment", "e")
    assert code == 0
    assert found["warnings"] == [
        "without -p platform.yaml the pods share no volume and do not find one another's artifacts: "
        "`tuneline init` writes a commented platform.yaml"
    ]


# Who is asking


def test_a_token_comes_from_the_environment(api: KfpApi, submit: Command, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.token = SECRET
    for name in ("KF_PIPELINES_TOKEN", "KFP_EXISTING_TOKEN"):
        monkeypatch.setenv(name, f"{SECRET}\n")
        assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--wait")[0] == 0
        monkeypatch.delenv(name)


def test_a_token_comes_from_a_file_that_is_read_again_when_it_is_renewed(
    api: KfpApi, submit: Command, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    api.token = SECRET
    run = submitting.submit(submitting.Server(api.url, token_file=file), plain, "e")
    api.token = "renewed"
    file.write_text("renewed\n")
    assert submitting.wait(run, Said(), interval=0.01).state == "SUCCEEDED"
    monkeypatch.setenv("KF_PIPELINES_TOKEN", SECRET)  # what the command line says wins over the environment
    assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--token-file", file)[0] == 0


def test_a_pod_uses_the_token_projected_for_its_service_account(
    api: KfpApi, submit: Command, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = SECRET
    (tmp_path / "projected").write_text(SECRET)
    with monkeypatch.context() as patched:
        patched.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "projected"))
        assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e")[0] == 0
    monkeypatch.setattr(submitting, "PROJECTED_TOKEN", str(tmp_path / "projected"))
    assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e")[0] == 0


def test_a_missing_or_wrong_token_is_an_error_that_does_not_show_it(
    api: KfpApi, submit: Command, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = "another"
    monkeypatch.setenv("KF_PIPELINES_TOKEN", SECRET)
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e")
    said = "Unauthenticated: Request header error: there is no user identity header."
    assert (code, *error_of(found)) == (
        1,
        "access",
        f"Kubeflow Pipelines at {api.url} does not accept who is asking: {said}",
        "Give a valid token in KF_PIPELINES_TOKEN or with --token-file; one that has expired must be renewed.",
    )
    assert not api.runs


Asking = Callable[[str], list[str]]


@pytest.fixture(params=["variable", "the kfp command's variable", "file", "projected file", "password in the endpoint"])
def asking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asking:
    """The ways to say who is asking; SECRET is the credential each time. Gives the arguments for a server."""
    (tmp_path / "token").write_text(f"{SECRET}\n")
    variables = {
        "variable": ("KF_PIPELINES_TOKEN", SECRET),
        "the kfp command's variable": ("KFP_EXISTING_TOKEN", SECRET),
        "projected file": ("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token")),
    }
    if request.param in variables:
        monkeypatch.setenv(*variables[request.param])

    def arguments(url: str) -> list[str]:
        given = url.replace("://", f"://me:{SECRET}@") if request.param == "password in the endpoint" else url
        return ["--endpoint", given, "--experiment", "e", *(["--token-file", str(tmp_path / "token")] if request.param == "file" else [])]

    return arguments


def test_a_server_that_repeats_the_credentials_does_not_make_us_show_them(
    api: KfpApi, submit: Command, plain: Path, asking: Asking
) -> None:
    for status, said in {403: "does not permit this", 500: "fails with status 500", 404: "does not know this"}.items():
        api.faults = [("/experiments", status, f"token {SECRET} may not do this")]
        code, found, _ = submit("-f", plain, *asking(api.url))
        assert (code, found["error"]["message"].removeprefix(f"Kubeflow Pipelines at {api.url} ")) == (
            2 if status == 404 else 1,
            f"{said}: token *** may not do this",
        )


def test_a_credential_in_the_reason_of_a_failed_run_is_masked_also_where_the_text_is_cut(
    api: KfpApi, submit: Command, plain: Path, asking: Asking
) -> None:
    api.script = [State("FAILED", {"fine-tuning": "FAILED"}, {"fine-tuning": "." * 395 + SECRET})]
    code, found, err = submit("-f", plain, *asking(api.url), "--wait", "--run-name", "r")
    assert (code, found["error"]["message"]) == (1, f"the run r ended FAILED in fine-tuning: {'.' * 395}***")
    assert SECRET[:3] not in err


def test_a_credential_in_what_is_no_answer_is_masked(submit: Command, plain: Path, asking: Asking) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_repeat, args=(server, f"{SECRET}\r\n\r\n"), daemon=True).start()
        code, found, _ = submit("-f", plain, *asking(f"http://127.0.0.1:{server.getsockname()[1]}"))
    assert (code, found["error"]["kind"]) == (1, "engine_missing")
    assert "***" in found["error"]["message"]


def _repeat(server: socket.socket, line: str) -> None:
    """Answer each call with a line that is no HTTP."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(line.encode())


def test_a_credential_in_what_kfp_refuses_is_masked(api: KfpApi, submit: Command, plain: Path, asking: Asking) -> None:
    for number in ("1", "2"):
        api.experiments[number] = {"experiment_id": number, "display_name": SECRET, "namespace": ""}
    code, found, _ = submit("-f", plain, *asking(api.url), "--experiment", SECRET)
    assert (code, found["error"]["kind"]) == (2, "usage")
    assert found["error"]["message"].startswith("kfp refuses: Multiple experiments is found with name ***")


def test_a_renewed_token_is_masked_like_the_first(api: KfpApi, plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    run = submitting.submit(submitting.Server(api.url, token_file=file), plain, "e")
    file.write_text("renewed-token")
    api.faults = [("/runs/", 403, f"neither {SECRET} nor renewed-token may look")]
    with pytest.raises(submitting.AccessError) as error:
        submitting.wait(run, Said(), interval=0.01)
    assert error.value.message.endswith("does not permit this: neither *** nor *** may look")


def test_a_password_in_the_endpoint_is_sent_as_http_knows_it_and_shown_nowhere(api: KfpApi, submit: Command, plain: Path) -> None:
    endpoint = api.url.replace("://", f"://me:{SECRET}%40@")
    code, found, _ = submit("-f", plain, "--endpoint", endpoint, "--experiment", "e", "--wait")
    assert (code, found["state"]) == (0, "SUCCEEDED")
    assert found["url"] == f"{api.url}/#/runs/details/{found['run_id']}"
    sent = {call.headers["authorization"] for call in api.calls}
    assert sent == {"Basic " + base64.b64encode(f"me:{SECRET}@".encode()).decode()}
    assert SECRET not in repr(submitting.Server(endpoint))


def test_a_password_in_an_endpoint_that_does_not_answer_is_not_shown(submit: Command, plain: Path) -> None:
    for password in (SECRET, f"a/{SECRET}", f"{SECRET}#b"):
        code, found, _ = submit("-f", plain, "--endpoint", f"http://me:{password}@127.0.0.1:9", "--experiment", "e")
        message = "Kubeflow Pipelines at http://127.0.0.1:9 does not answer: [Errno 111] Connection refused"
        assert (code, found["error"]["message"]) == (1, message)


def test_a_token_that_cannot_be_sent_is_said_and_not_shown(
    submit: Command, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "Copy it again."
    (tmp_path / "token").write_text(f"{SECRET}\n{SECRET}\n")
    arguments = ["-f", plain, "--endpoint", "http://127.0.0.1:9", "--experiment", "e"]
    said = "is no token: it holds a space, a line break or a letter that none has"
    code, found, _ = submit(*arguments, "--token-file", tmp_path / "token")
    assert (code, *error_of(found)) == (2, "configuration", f"the token in {tmp_path / 'token'} {said}", hint)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", f"{SECRET}…")
    code, found, _ = submit(*arguments)
    assert (code, *error_of(found)) == (2, "configuration", f"the token in KF_PIPELINES_TOKEN {said}", hint)


def test_a_token_file_that_is_not_there_or_empty_is_said(submit: Command, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, said in {"none": "cannot be read: No such file or directory", "empty": "is empty"}.items():
        code, found, _ = submit("-f", plain, "--endpoint", "http://127.0.0.1:9", "--experiment", "e", "--token-file", tmp_path / name)
        expected = (2, "configuration", f"the token file {tmp_path / name} {said}", "Name a file that holds the token.")
        assert (code, *error_of(found)) == expected


def test_a_page_to_log_in_is_not_taken_for_the_api(api: KfpApi, submit: Command, plain: Path) -> None:
    api.login_page = True
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e")
    kind, message, hint = error_of(found)
    assert (code, kind) == (1, "access")
    assert message == f"{api.url} answers, but not as Kubeflow Pipelines does; a page to log in, perhaps"
    assert hint.startswith(
        "Give a token in KF_PIPELINES_TOKEN or with --token-file, and check --endpoint: within the cluster it is http://"
    )


def test_a_certificate_of_ones_own_authority_is_accepted_with_ca_cert(submit: Command, plain: Path, tmp_path: Path) -> None:
    pem = certificate(tmp_path / "server.pem")
    with serving(KfpApi(), certificate=pem) as api:
        code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e")
        assert (code, *error_of(found)) == (
            1,
            "engine_missing",
            f"Kubeflow Pipelines at {api.url} does not answer: its certificate cannot be verified",
            "Give the authority's certificate with --ca-cert.",
        )
        assert submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--ca-cert", pem)[0] == 0
        code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--ca-cert", tmp_path / "none.pem")
        assert (code, found["error"]["message"]) == (2, f"--ca-cert: {tmp_path / 'none.pem'} does not exist")


# Where


def test_a_namespace_of_several_is_named(api: KfpApi, submit: Command, plain: Path) -> None:
    api.namespaces = ("team-a",)
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--namespace", "team-a")
    assert (code, found["namespace"]) == (0, "team-a")
    assert [e["namespace"] for e in api.experiments.values()] == ["team-a"]


def test_no_namespace_where_one_is_needed_and_one_without_rights_are_said(api: KfpApi, submit: Command, plain: Path) -> None:
    api.namespaces = ("team-a",)
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e")
    kind, message, hint = error_of(found)
    assert (code, kind) == (2, "usage")
    assert message.endswith("refuses: Invalid input error: In multi-user mode, an experiment cannot have an empty namespace")
    assert hint == "Check --namespace (a shared Kubeflow wants one) and the parameters."
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--namespace", "team-b")
    kind, message, hint = error_of(found)
    assert (code, kind, hint) == (1, "access", "Check --namespace, and the caller's rights in it.")
    assert "does not permit this: PermissionDenied: User 'ci@example.com' is not authorized" in message


def test_a_server_that_is_not_there_is_said_at_once(submit: Command, plain: Path) -> None:
    began = time.monotonic()
    code, found, _ = submit("-f", plain, "--endpoint", "http://127.0.0.1:9", "--experiment", "e")
    assert (code, *error_of(found)) == (
        1,
        "engine_missing",
        "Kubeflow Pipelines at http://127.0.0.1:9 does not answer: [Errno 111] Connection refused",
        "Check --endpoint and the network: within the cluster it is http://ml-pipeline.kubeflow.svc.cluster.local:8888, "
        "from outside forward that port.",
    )
    assert time.monotonic() - began < 60, "it was asked again and again"


def test_a_server_that_hangs_does_not_hang_us(submit: Command, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "ANSWER_WITHIN", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        code, found, _ = submit("-f", plain, "--endpoint", f"http://127.0.0.1:{deaf.getsockname()[1]}", "--experiment", "e")
    kind, message, _ = error_of(found)
    assert (code, kind) == (1, "engine_missing")
    assert "does not answer: " in message
    assert "timed out" in message


def test_an_address_that_is_another_servers_is_said(api: KfpApi, submit: Command, plain: Path) -> None:
    code, found, _ = submit("-f", plain, "--endpoint", f"{api.url}/elsewhere", "--experiment", "e")
    kind, message, hint = error_of(found)
    assert (code, kind, message) == (2, "usage", f"Kubeflow Pipelines at {api.url}/elsewhere does not know this: Not Found")
    assert hint.startswith("Check that --endpoint is the API's address")


@pytest.mark.parametrize("variable", ["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"])
def test_an_endpoint_comes_from_the_environment(
    api: KfpApi, submit: Command, plain: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, api.url)
    assert submit("-f", plain, "--experiment", "e")[0] == 0
    assert api.runs


def test_every_variable_that_submit_reads_is_in_the_documentation() -> None:
    import typer

    (command,) = [c for n, c in typer.main.get_command(app).commands.items() if n == "submit"]  # type: ignore[attr-defined]
    read = {name for p in command.params for name in ([p.envvar] if isinstance(p.envvar, str) else p.envvar or [])}
    read |= {*submitting.TOKEN_VARIABLES, submitting.PROJECTED_TOKEN_VARIABLE}
    _, _, environments = (ROOT / "docs" / "cli.md").read_text().partition("## Environment")
    assert len(read) == 6
    assert [name for name in sorted(read) if f"`{name}`" not in environments] == []


def test_an_endpoint_is_needed(submit: Command, plain: Path) -> None:
    code, found, _ = submit("-f", plain, "--experiment", "e")
    assert (code, found["error"]["kind"]) == (2, "usage")
    assert "--endpoint" in found["error"]["message"]


# Waiting


class Said:
    """Remembers what a reporter was told."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)

    def progress(self, done: int, total: int | None, unit: str) -> None: ...
    def metrics(self, values: Any, step: int) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)


def test_waiting_shows_what_changes_and_ends_with_success(api: KfpApi, plain: Path) -> None:
    api.script = [
        State("PENDING"),
        State("RUNNING", {"root-driver": "SUCCEEDED", "root": "RUNNING", "resolve": "RUNNING"}),
        State("RUNNING", {"resolve": "SUCCEEDED", "executor": "RUNNING", "data-curation": "RUNNING"}),
        State("RUNNING", {"resolve": "SUCCEEDED", "executor": "RUNNING", "data-curation": "RUNNING"}),
        State("SUCCEEDED", {"resolve": "SUCCEEDED", "data-curation": "SUCCEEDED", "triton-packaging": "SKIPPED"}),
    ]
    said = Said()
    run = submitting.wait(submitting.submit(submitting.Server(api.url), plain, "e", run_name="r"), said, interval=0.01)
    assert run.as_dict()["state"] == "SUCCEEDED"
    assert said.steps == [
        "r: PENDING",
        "r: RUNNING",
        "resolve: RUNNING",
        "resolve: SUCCEEDED",
        "data-curation: RUNNING",
        "r: SUCCEEDED",
        "data-curation: SUCCEEDED",
        "triton-packaging: SKIPPED",
    ]


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "SKIPPED"])
def test_a_run_that_does_not_succeed_exits_1(api: KfpApi, submit: Command, plain: Path, state: str) -> None:
    api.script = [State("RUNNING"), State(state)]
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait")
    (run_id,) = api.runs
    hint = f"The task's log is in the UI: {api.url}/#/runs/details/{run_id}"
    assert (code, *error_of(found)) == (1, "run_failed", f"the run r ended {state}", hint)
    assert list(found["error"]) == ["stage", "kind", "message", "hint", "run_id", "url", "state"]
    assert [found["error"][key] for key in ("run_id", "url", "state")] == [run_id, f"{api.url}/#/runs/details/{run_id}", state]


def test_a_failed_run_names_the_task_and_the_servers_words(api: KfpApi, submit: Command, plain: Path) -> None:
    tasks = {"root": "FAILED", "executor": "FAILED", "fine-tuning": "FAILED", "resolve": "SUCCEEDED"}
    errors = {"root": "child failed", "fine-tuning": "main: Error (exit code 1)"}
    api.script = [State("FAILED", tasks, errors)]
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait")
    assert (code, found["error"]["message"]) == (1, "the run r ended FAILED in fine-tuning: main: Error (exit code 1)")
    api.script = [State("FAILED", error="workflow error: the volume claim tuneline is not there")]
    code, found, _ = submit("-f", plain, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait")
    assert found["error"]["message"] == "the run r ended FAILED: workflow error: the volume claim tuneline is not there"


def test_a_server_that_fails_in_passing_is_asked_again(api: KfpApi, plain: Path) -> None:
    run = submitting.submit(submitting.Server(api.url), plain, "e")
    api.faults = [("/runs/", 503, "upstream connect error"), ("/runs/", 500, "Internal Server Error"), ("/runs/", 429, "slow down")]
    said = Said()
    assert submitting.wait(run, said, interval=0.01).state == "SUCCEEDED"
    assert said.notes[0] == f"Kubeflow Pipelines at {api.url} fails with status 503: upstream connect error; asking again"
    assert len(said.notes) == 3


def test_a_server_that_stays_away_ends_the_waiting_and_says_that_the_run_goes_on(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(KfpApi()) as api:
        run = submitting.submit(submitting.Server(api.url), plain, "e")
    monkeypatch.setattr(submitting, "PATIENCE", 0.2)
    with pytest.raises(submitting.EngineMissingError) as error:
        submitting.wait(run, Said(), interval=0.05)
    assert error.value.message == f"Kubeflow Pipelines at {api.url} does not answer: [Errno 111] Connection refused"
    assert error.value.hint == f"The run goes on: {run.url}"
    assert error.value.details == {"run_id": run.run_id, "url": run.url, "state": "PENDING"}


def test_a_token_that_expires_while_waiting_is_said_and_the_run_goes_on(api: KfpApi, plain: Path) -> None:
    run = submitting.submit(submitting.Server(api.url), plain, "e")
    api.token = "renewed"
    with pytest.raises(submitting.AccessError) as error:
        submitting.wait(run, Said(), interval=0.01)
    assert "does not accept who is asking" in error.value.message
    assert error.value.hint.endswith(f"The run goes on: {run.url}")


def test_waiting_no_longer_than_asked_exits_75(api: KfpApi, submit: Command, plain: Path) -> None:
    api.script = [State("RUNNING")]
    arguments = ["--endpoint", api.url, "--experiment", "e", "--wait", "--timeout", "0.3"]
    code, found, _ = submit("-f", plain, *arguments)
    (run_id,) = api.runs
    assert (code, *error_of(found)) == (
        75,
        "interrupted",
        "the run is still RUNNING after 0.3 s; it goes on",
        f"See {api.url}/#/runs/details/{run_id}, or `kfp run get {run_id}`.",
    )
    assert (found["error"]["run_id"], found["error"]["state"]) == (run_id, "RUNNING")


def test_a_timeout_counts_while_the_server_does_not_answer_too(plain: Path) -> None:
    with serving(KfpApi()) as api:
        run = submitting.submit(submitting.Server(api.url), plain, "e")
    with pytest.raises(submitting.InterruptedRunError, match=r"the run is still PENDING after 0\.3 s; it goes on"):
        submitting.wait(run, Said(), timeout=0.3, interval=0.05)


def test_ctrl_c_ends_the_waiting_and_not_the_run(api: KfpApi, plain: Path, tmp_path: Path) -> None:
    api.script = [State("RUNNING", {"fine-tuning": "RUNNING"})]
    api.token = SECRET
    arguments = ["submit", "-f", str(plain), "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait", "--poll", "0.1"]
    variables = environment(HOME=str(tmp_path), KF_PIPELINES_TOKEN=SECRET)
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    end = time.monotonic() + 60
    while sum(api.looks.values()) < 2 and time.monotonic() < end and process.poll() is None:  # the first look is shown before the second
        time.sleep(0.05)
    assert SECRET not in Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    (run_id,) = api.runs
    assert process.returncode == 75, err
    lines = err.splitlines()
    assert lines[:3] == [f"submitted r: {api.url}/#/runs/details/{run_id}", "r: RUNNING", "fine-tuning: RUNNING"]
    assert lines[-2:] == [
        "tuneline: stopped waiting; the run itself goes on",
        f"  See {api.url}/#/runs/details/{run_id}, or `kfp run get {run_id}`.",
    ]
    assert out == ""
    assert SECRET not in err
    assert not [call for call in api.calls if ":terminate" in call.path]


# What the documentation shows


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder as docs/ci.md asks for, with the commands of this environment on the path."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "customization.yaml").write_text("data_curation: {sources: [/data/raw/*.jsonl]}\nfine_tuning: {max_steps: 9}\n")
    (folder / "platform.yaml").write_text("volume: {claim: team-a}\n")
    (folder / "ci.sh").write_text((ROOT / "docs" / "examples" / "ci.sh").read_text())
    return folder


def shell(script: str, cwd: Path, api: KfpApi, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a CI job would, with a server that answers on KFP_ENDPOINT."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(HOME=str(cwd), PATH=path, KFP_ENDPOINT=api.url, PYTHONWARNINGS="ignore", POLL_SECONDS="0.1", **extra)
    return subprocess.run(["sh", "-euc", script], cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_the_ci_script_passes_with_the_run(api: KfpApi, prepared: Path) -> None:
    api.token = SECRET
    api.faults = [("/runs/", 503, "no healthy upstream")] * 2  # kfp looks at the run it has made, and gives up
    done = shell("sh ci.sh max_steps=3", prepared, api, EXPERIMENT="nightly", RUN_NAME="r", KFP_EXISTING_TOKEN=SECRET)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_id,) = api.runs
    assert done.stdout.splitlines()[1:] == [
        f"run: {api.url}/#/runs/details/{run_id}",
        "r: unknown",
        "r: PENDING",
        "r: RUNNING",
        "r: SUCCEEDED",
    ]
    assert SECRET not in done.stdout + done.stderr
    body = created(api)
    assert body["runtime_config"]["parameters"] == {"max_steps": 3}
    assert [e["display_name"] for e in api.experiments.values()] == ["nightly"]


def test_the_ci_script_fails_with_the_run(api: KfpApi, prepared: Path) -> None:
    api.script = [State("FAILED")]
    done = shell("sh ci.sh", prepared, api, RUN_NAME="r")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "r: FAILED"


def test_the_ci_script_waits_no_longer_than_asked(api: KfpApi, prepared: Path) -> None:
    api.script = [State("RUNNING")]
    done = shell("sh ci.sh", prepared, api, RUN_NAME="r", WAIT_SECONDS="0")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (75, "no longer waiting for r; it goes on")


def test_the_ci_script_fails_where_the_configuration_is_wrong_or_the_server_refuses(api: KfpApi, prepared: Path) -> None:
    done = shell("sh ci.sh max_steps=many", prepared, api)
    assert done.returncode == 1
    assert "input parameter max_steps requires type NUMBER_INTEGER" in done.stdout + done.stderr
    (prepared / "customization.yaml").write_text("fine_tuning: {max_step: 9}\n")
    done = shell("sh ci.sh", prepared, api)
    assert done.returncode == 2
    assert "did you mean max_steps?" in done.stderr
    assert api.runs == {}


def test_the_github_workflow_runs_the_script_with_its_variables(api: KfpApi, prepared: Path) -> None:
    workflow = yaml.safe_load((ROOT / "docs" / "examples" / "github-workflow.yaml").read_text())
    (job,) = workflow["jobs"].values()
    given = {"vars.KFP_ENDPOINT": api.url, "vars.KFP_NAMESPACE": "team-a", "secrets.KFP_TOKEN": SECRET, "inputs.max_steps": "5"}
    given |= {"github.sha": "abc", "github.run_attempt": "1"}
    variables = {name: re.sub(r"\$\{\{ (.*?) \}\}", lambda found: given[found[1]], str(value)) for name, value in job["env"].items()}
    api.namespaces, api.token = ("team-a",), SECRET
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[0].startswith("pip install ")
    for command in commands[1:]:
        done = shell(command, prepared, api, **{name: value for name, value in variables.items() if name != "KFP_ENDPOINT"})
        assert done.returncode == 0, done.stdout + done.stderr
    body = created(api)
    assert (body["display_name"], body["runtime_config"]["parameters"]) == ("abc-1", {"max_steps": 5})
    assert [(e["display_name"], e["namespace"]) for e in api.experiments.values()] == [("tuneline", "team-a")]
    kept = next(step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert (prepared / kept).exists()


def test_the_github_workflow_installs_tuneline_from_what_it_checks_out(prepared: Path) -> None:
    (job,) = yaml.safe_load((ROOT / "docs" / "examples" / "github-workflow.yaml").read_text())["jobs"].values()
    own, other = (step.get("with", {}) for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@"))
    assert "path" not in own, "the repository with the configuration is the working folder"
    page = (ROOT / "docs" / "ci.md").read_text()
    for variable in re.findall(r"\b(?:vars|secrets)\.(\w+)", yaml.safe_dump(job)):
        assert f"`{variable}`" in page, "the page says what has to be set"
    _check_out(prepared / other["path"])
    (install,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("pip install")]
    for path in re.findall(r"[\w./-]*/[\w./-]+|\w+\.txt", install):
        assert (prepared / path).exists(), path
    dry = install.replace("pip install", "pip install --dry-run --no-deps --retries 0 --disable-pip-version-check", 1)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-euc", dry], cwd=prepared, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and "No matching distribution found for hatchling" in done.stdout + done.stderr:
        pytest.skip("no package index answers; the paths were looked at")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install tuneline-" in done.stdout
    assert "does not provide the extra" not in done.stdout + done.stderr


def _check_out(folder: Path) -> None:
    """What a checkout of tuneline holds: the files that git keeps."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.parametrize("page", ["kubeflow.md", "ci.md"])
def test_every_command_of_the_page_runs(api: KfpApi, prepared: Path, page: str) -> None:
    api.script = [State("SUCCEEDED")]
    text = (ROOT / "docs" / page).read_text()
    done = shell("\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)), prepared, api)
    assert done.returncode == 0, done.stdout + done.stderr
    assert api.runs


def test_the_platform_of_the_page_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubeflow.md").read_text(), re.DOTALL)
    (tmp_path / "platform.yaml").write_text(example)
    assert platform.load(tmp_path / "platform.yaml").scheduling.queue == "team-a"


def test_compiling_and_submitting_need_none_of_the_heavy_libraries(api: KfpApi, tmp_path: Path) -> None:
    blocked = [
        "torch",
        "transformers",
        "mlflow",
        "daft",
        "dvc",
        "pyarrow",
        "matplotlib",
        "scipy",
        "datasets",
        "trl",
        "peft",
        "tritonclient",
    ]
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\nfrom pipelines.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", script, "submit", "--endpoint", api.url, "--experiment", "e", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert api.runs


def certificate(path: Path) -> Path:
    """A key and a certificate that it signed itself, for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    encodings = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(key.private_bytes(*encodings) + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path
