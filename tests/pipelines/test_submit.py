"""Submission of compiled pipelines by the kfp command and by `tuneline submit` to a simulated server (tests/kfp_api.py).

The tests marked `long` compile a whole example platform, or run the commands of a page, in child processes.
"""

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

from components.common.runtime.errors import InterruptedRunError
from components.common.runtime.reporters import SilentReporter
from pipelines.cli.application import app
from pipelines.cli.main import main
from pipelines.config import platform_config
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Mlflow, Platform
from pipelines.definition import compilation
from pipelines.kubeflow import submission
from tests.kfp_api import KfpApi, State, serving
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.pipelines.processes import hear_interrupts

SECRET = "s3cr3t-0f-th3-t35t"
SubmitCommand = Callable[..., tuple[int, dict[str, Any], str]]
POWERSCALE = ROOT / "deploy" / "overlays" / "xe9680-powerscale" / "platform.yaml"
PLATFORM = Platform(mlflow=Mlflow(tracking_uri="http://mlflow:5000"))


@pytest.fixture
def api() -> Iterator[KfpApi]:
    with serving(KfpApi()) as server:
        yield server


@pytest.fixture(scope="module")
def pipeline_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The defaults compiled without a platform: one document."""
    path = tmp_path_factory.mktemp("plain") / "pipeline.yaml"
    path.write_text(compilation.compile_pipeline(Customization()))
    return path


@pytest.fixture(scope="module")
def cluster_pipeline_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The defaults compiled for a cluster: two documents."""
    path = tmp_path_factory.mktemp("placed") / "pipeline.yaml"
    path.write_text(compilation.compile_pipeline(Customization(), PLATFORM))
    return path


@pytest.fixture(autouse=True)
def no_inherited_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the token, endpoint and context of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith(("KFP_", "KF_PIPELINES_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    import kfp

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SubmitCommand:
    """Run `tuneline submit … --json` in this process; returns its exit code, its object and its standard error."""

    def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["tuneline", "submit", *map(str, arguments), "--poll", "0.05", "--json"])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_info:
            main()
        signal.signal(signal.SIGTERM, before)
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        return int(exit_info.value.code or 0), json.loads(out), err

    return run


def kfp(*arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the kfp command."""
    command = [sys.executable, "-W", "ignore", "-c", "from kfp.cli.__main__ import main; main()", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**{"HOME": str(cwd), **extra}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def get_only_run_request(api: KfpApi) -> dict[str, Any]:
    """Return the body of the only request that creates a run."""
    (call,) = [call for call in api.calls if (call.method, call.path) == ("POST", "/apis/v2beta1/runs")]
    return call.json


def get_error(result: dict[str, Any]) -> tuple[str, str, str]:
    error = result["error"]
    return error["kind"], error["message"], error["hint"]


# The kfp command


def test_kfp_run_create_submits_the_compiled_file(api: KfpApi, pipeline_file: Path, tmp_path: Path) -> None:
    parameters = [
        "max_steps=7",
        "learning_rate=1e-3",
        "auto_promote=false",
        'sources=["/data/a.jsonl"]',
        "model_name=mine",
    ]
    process = kfp(
        "run",
        "create",
        "-e",
        "nightly",
        "-r",
        "first",
        "-f",
        pipeline_file,
        *parameters,
        cwd=tmp_path,
        KFP_ENDPOINT=api.url,
    )
    assert process.returncode == 0, process.stderr
    body = get_only_run_request(api)
    expected = {
        "max_steps": 7,
        "learning_rate": 0.001,
        "auto_promote": False,
        "sources": ["/data/a.jsonl"],
        "model_name": "mine",
    }
    assert body["runtime_config"]["parameters"] == expected
    assert body["display_name"] == "first"
    assert [e["display_name"] for e in api.experiments.values()] == ["nightly"]
    assert (
        body["pipeline_spec"]["root"]["inputDefinitions"]
        == yaml.safe_load(pipeline_file.read_text())["root"]["inputDefinitions"]
    )


def test_deprecated_kfp_run_submit_submits_kubernetes_settings(
    api: KfpApi, cluster_pipeline_file: Path, tmp_path: Path
) -> None:
    process = kfp(
        "run", "submit", "-e", "nightly", "-r", "first", "-f", cluster_pipeline_file, cwd=tmp_path, KFP_ENDPOINT=api.url
    )
    assert process.returncode == 0, process.stderr
    spec = get_only_run_request(api)["pipeline_spec"]
    assert spec["pipeline_spec"]["pipelineInfo"]["name"] == "tuneline-customization"
    executors = spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {mount["mountPath"] for executor in executors.values() for mount in executor["pvcMount"]} == {"/data"}


def test_server_refuses_a_parameter_of_the_wrong_type(api: KfpApi, pipeline_file: Path, tmp_path: Path) -> None:
    process = kfp(
        "run", "create", "-e", "nightly", "-f", pipeline_file, "max_steps=many", cwd=tmp_path, KFP_ENDPOINT=api.url
    )
    assert process.returncode == 1
    assert "input parameter max_steps requires type NUMBER_INTEGER" in process.stdout + process.stderr
    assert api.runs == {}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["steps=7"], "parameter(s) provided are not required by pipeline: steps"),
        (["model_name=5"], "input parameter model_name requires type STRING"),
        (["auto_promote=1"], "input parameter auto_promote requires type BOOLEAN"),
        (["sources=/data/a.jsonl"], "input parameter sources requires type LIST"),
    ],
)
def test_invalid_kfp_parameter_starts_no_run(
    api: KfpApi, pipeline_file: Path, tmp_path: Path, parameters: list[str], message: str
) -> None:
    process = kfp(
        "run", "create", "-e", "nightly", "-f", pipeline_file, *parameters, cwd=tmp_path, KFP_ENDPOINT=api.url
    )
    assert process.returncode == 1
    assert message in process.stdout + process.stderr
    assert api.runs == {}


@pytest.mark.long
def test_kfp_run_create_submits_the_powerscale_platform(api: KfpApi, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(compilation.compile_pipeline(Customization(), platform_config.load_platform(POWERSCALE)))
    parameters = [
        "max_steps=7",
        "learning_rate=1e-3",
        "auto_promote=true",
        'sources=["/corpus/a.jsonl"]',
        'model_name="mine"',
    ]
    process = kfp("run", "create", "-e", "nightly", "-f", file, *parameters, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert process.returncode == 0, process.stderr
    kubernetes = get_only_run_request(api)["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert kubernetes["pipelineConfig"]["activeDeadlineSeconds"] == 1209600
    training = kubernetes["deploymentSpec"]["executors"]["exec-fine-tuning"]
    assert training["podMetadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


def test_missing_required_parameter_starts_no_run(api: KfpApi, tmp_path: Path) -> None:
    file = tmp_path / "promotion.yaml"
    file.write_text(compilation.compile_pipeline(Customization(), pipeline="promotion"))
    process = kfp("run", "create", "-e", "nightly", "-f", file, "by=me", cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert process.returncode == 1
    assert "parameter version is not optional" in process.stdout + process.stderr
    assert api.runs == {}
    accepted = kfp(
        "run", "create", "-e", "nightly", "-f", file, "by=me", 'version="3"', cwd=tmp_path, KFP_ENDPOINT=api.url
    )
    assert accepted.returncode == 0, accepted.stderr


def test_kfp_run_create_watch_exits_0_on_a_failed_run(api: KfpApi, pipeline_file: Path, tmp_path: Path) -> None:
    api.script = [State("FAILED")]
    process = kfp("run", "create", "-e", "nightly", "-f", pipeline_file, "--watch", cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert "Run is finished with state FAILED." in process.stdout
    assert process.returncode == 0


def test_uploaded_pipeline_version_runs(api: KfpApi, cluster_pipeline_file: Path, tmp_path: Path) -> None:
    uploaded = kfp("pipeline", "create", "-p", "tuneline", cluster_pipeline_file, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert uploaded.returncode == 0, uploaded.stderr
    (first,) = api.versions.values()
    again = kfp(
        "pipeline",
        "create-version",
        "-v",
        "2",
        "-p",
        first["pipeline_id"],
        cluster_pipeline_file,
        cwd=tmp_path,
        KFP_ENDPOINT=api.url,
    )
    assert again.returncode == 0, again.stderr
    second = next(v for v in api.versions.values() if v["display_name"] == "2")
    arguments = ["-p", second["pipeline_id"], "-v", second["pipeline_version_id"], "seed=5"]
    process = kfp("run", "create", "-e", "nightly", *arguments, cwd=tmp_path, KFP_ENDPOINT=api.url)
    assert process.returncode == 0, process.stderr
    assert (
        get_only_run_request(api)["pipeline_version_reference"]["pipeline_version_id"] == second["pipeline_version_id"]
    )


# tuneline submit


def test_submit_compiles_the_configuration_and_starts_a_run(api: KfpApi, submit: SubmitCommand, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("fine_tuning: {max_steps: 9, lora: {rank: 4}}\n")
    (tmp_path / "p.yaml").write_text("images: {training: registry.example/training:1}\n")
    arguments = ["--endpoint", api.url, "--experiment", "nightly", "--run-name", "first", "--service-account", "tuner"]
    code, result, _ = submit("-c", tmp_path / "c.yaml", "-p", tmp_path / "p.yaml", "--set", "seed=5", *arguments)
    assert code == 0, result
    body = get_only_run_request(api)
    (run_id,) = api.runs
    assert result["seconds"] >= 0
    assert {**result, "seconds": 0} == {
        "run_id": run_id,
        "run_name": "first",
        "experiment": "nightly",
        "namespace": None,
        "state": "PENDING",
        "url": f"{api.url}/#/runs/details/{run_id}",
        "seconds": 0,
        "warnings": [],
        "requests": {"resources.evaluation.memory_request": "2Gi", "resources.triton_packaging.memory_request": "3Gi"},
    }
    assert (body["display_name"], body["service_account"]) == ("first", "tuner")
    spec = body["pipeline_spec"]["pipeline_spec"]
    declared = spec["root"]["inputDefinitions"]["parameters"]
    assert (declared["max_steps"]["defaultValue"], declared["seed"]["defaultValue"]) == (9, 5)
    assert yaml.safe_load(declared["configuration"]["defaultValue"]) == {"fine_tuning": {"lora": {"rank": 4}}}
    assert (
        spec["deploymentSpec"]["executors"]["exec-fine-tuning"]["container"]["image"] == "registry.example/training:1"
    )


def test_existing_experiment_is_reused(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    for _ in range(2):
        assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "nightly")[0] == 0
    assert len(api.experiments) == 1
    assert len(api.runs) == 2


def test_parameters_are_parsed_by_their_declared_type(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    parameters = ["model_name=5", "max_steps=7", "learning_rate=5e-4", "auto_promote=false", "sources=[/data/a.jsonl]"]
    arguments = [part for parameter in parameters for part in ("--param", parameter)]
    assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", *arguments)[0] == 0
    expected = {
        "model_name": "5",
        "max_steps": 7,
        "learning_rate": 0.0005,
        "auto_promote": False,
        "sources": ["/data/a.jsonl"],
    }
    assert get_only_run_request(api)["runtime_config"]["parameters"] == expected


@pytest.mark.parametrize(
    ("parameter", "message", "hint"),
    [
        (
            "max_steps=many",
            "the parameter max_steps is 'many'; expected a whole number",
            "Use a value such as --param max_steps=100",
        ),
        (
            "max_steps=true",
            "the parameter max_steps is 'true'; expected a whole number",
            "Use a value such as --param max_steps=100",
        ),
        ("epochs=", "the parameter epochs is ''; expected a number", "Use a value such as --param epochs=5e-4"),
        (
            "auto_promote=1",
            "the parameter auto_promote is '1'; expected true or false",
            "Use a value such as --param auto_promote=false",
        ),
        (
            "sources=/data/a",
            "the parameter sources is '/data/a'; expected a list, for example [\"/data/a.jsonl\"]",
            "Use a value such as --param sources='[\"/data/a.jsonl\"]'",
        ),
        ("max_steps", "--param max_steps is not of the form name=value", "Use the form --param max_steps=100."),
    ],
)
def test_parameter_of_the_wrong_type_is_refused_before_any_request(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, parameter: str, message: str, hint: str
) -> None:
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--param", parameter)
    assert (code, *get_error(result)) == (2, "usage", message, hint)
    assert api.calls == []


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("adaptation=loora", "fine_tuning.adaptation: found 'loora'"),
        ("max_steps=-1", "fine_tuning.max_steps: found -1; expected 1 or more"),
        ("learning_rate=-1", "fine_tuning.learning_rate: found -1"),
        ("seed=-1", "seed: found -1; expected 0 or more"),
        ("sources=[raw/a.jsonl]", "data_curation.sources: raw/a.jsonl is a relative path"),
        (
            "configuration={evaluation: {max_item: 3}}",
            "evaluation.max_item: unknown key (did you mean max_items?)",
        ),
    ],
)
def test_invalid_configuration_value_is_refused_before_any_request(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, parameter: str, message: str
) -> None:
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--param", parameter)
    assert (code, result["error"]["kind"]) == (2, "configuration")
    assert message in result["error"]["message"]
    assert api.calls == []


def test_pipeline_of_a_newer_tuneline_is_not_validated(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, tmp_path: Path
) -> None:
    spec = yaml.safe_load(pipeline_file.read_text())
    spec["root"]["inputDefinitions"]["parameters"]["configuration"]["defaultValue"] = "{evaluation: {of_tomorrow: 3}}"
    (tmp_path / "newer.yaml").write_text(yaml.safe_dump(spec))
    code, result, _ = submit(
        "-f", tmp_path / "newer.yaml", "--endpoint", api.url, "--experiment", "e", "--param", "max_steps=7"
    )
    assert code == 0, result


@pytest.mark.long
def test_service_account_option_overrides_the_platform(api: KfpApi, submit: SubmitCommand, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("run: {service_account: tuner}\n")
    arguments = ["-p", tmp_path / "p.yaml", "--endpoint", api.url, "--experiment", "e"]
    for options, account in ({}, "tuner"), ({"--service-account": "other"}, "other"):
        api.runs.clear()
        assert submit(*arguments, *(part for pair in options.items() for part in pair))[0] == 0
        (run,) = api.runs.values()
        assert run["service_account"] == account


def test_unknown_parameter_is_refused_with_the_valid_names(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path
) -> None:
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--param", "steps=3")
    kind, message, hint = get_error(result)
    assert (code, kind, message) == (2, "usage", "the pipeline has no parameter steps")
    assert hint.startswith("Choose one of: adaptation, auto_promote, base_model,")


def test_compiled_file_with_configuration_options_is_refused(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path
) -> None:
    code, result, _ = submit("-f", pipeline_file, "--set", "seed=3", "--endpoint", api.url, "--experiment", "e")
    assert (code, *get_error(result)) == (
        2,
        "usage",
        f"-f {pipeline_file} is a compiled pipeline, which -c, --set and -p cannot change",
        "Omit -c, --set and -p. To set a pipeline parameter, use --param NAME=VALUE.",
    )


def test_file_that_is_not_a_pipeline_is_refused(api: KfpApi, submit: SubmitCommand, tmp_path: Path) -> None:
    hint = "Pass a file that `tuneline compile -o pipeline.yaml` or the kfp compiler wrote."
    (tmp_path / "other.yaml").write_text("seed: 3\n")
    for name, reason in {
        "none.yaml": "does not exist",
        "other.yaml": "is not a compiled pipeline: no document has pipelineInfo and root",
    }.items():
        code, result, _ = submit("-f", tmp_path / name, "--endpoint", api.url, "--experiment", "e")
        assert (code, *get_error(result)) == (2, "configuration", f"{tmp_path / name} {reason}", hint)
    assert api.calls == []


def test_without_a_platform_submit_warns_of_the_missing_volume(api: KfpApi, submit: SubmitCommand) -> None:
    code, result, _ = submit("--endpoint", api.url, "--experiment", "e")
    assert code == 0
    assert result["warnings"] == [
        "without -p platform.yaml, the pods share no volume and cannot read each other's artifacts; "
        "`tuneline init` writes a commented platform.yaml"
    ]


# Authentication


def test_token_is_read_from_the_environment(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = SECRET
    for name in ("KF_PIPELINES_TOKEN", "KFP_EXISTING_TOKEN"):
        monkeypatch.setenv(name, f"{SECRET}\n")
        assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--wait")[0] == 0
        monkeypatch.delenv(name)


def test_renewed_token_file_is_read_again(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    api.token = SECRET
    run = submission.submit(submission.KubeflowServer(api.url, token_file=file), pipeline_file, "e")
    api.token = "renewed"
    file.write_text("renewed\n")
    assert submission.wait_for_run(run, RecordingReporter(), interval=0.01).state == "SUCCEEDED"
    monkeypatch.setenv("KF_PIPELINES_TOKEN", SECRET)  # the command line overrides the environment
    assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--token-file", file)[0] == 0


def test_pod_uses_its_projected_service_account_token(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = SECRET
    (tmp_path / "projected").write_text(SECRET)
    with monkeypatch.context() as patched:
        patched.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "projected"))
        assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")[0] == 0
    monkeypatch.setattr(submission, "PROJECTED_TOKEN", str(tmp_path / "projected"))
    assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")[0] == 0


def test_invalid_token_is_reported_without_its_value(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = "another"
    monkeypatch.setenv("KF_PIPELINES_TOKEN", SECRET)
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")
    reason = "Unauthenticated: Request header error: there is no user identity header."
    assert (code, *get_error(result)) == (
        1,
        "access",
        f"Kubeflow Pipelines at {api.url} does not accept the credentials: {reason}",
        "Set a valid token in KF_PIPELINES_TOKEN or with --token-file.",
    )
    assert not api.runs


CredentialArguments = Callable[[str], list[str]]


@pytest.fixture(params=["variable", "the kfp command's variable", "file", "projected file", "password in the endpoint"])
def credential_arguments(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> CredentialArguments:
    """Provide SECRET in each supported way; returns a function that builds the arguments for a server."""
    (tmp_path / "token").write_text(f"{SECRET}\n")
    variables = {
        "variable": ("KF_PIPELINES_TOKEN", SECRET),
        "the kfp command's variable": ("KFP_EXISTING_TOKEN", SECRET),
        "projected file": ("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token")),
    }
    if request.param in variables:
        monkeypatch.setenv(*variables[request.param])

    def arguments(url: str) -> list[str]:
        endpoint = url.replace("://", f"://me:{SECRET}@") if request.param == "password in the endpoint" else url
        return [
            "--endpoint",
            endpoint,
            "--experiment",
            "e",
            *(["--token-file", str(tmp_path / "token")] if request.param == "file" else []),
        ]

    return arguments


def test_credentials_in_server_errors_are_masked(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, credential_arguments: CredentialArguments
) -> None:
    for status, expected in {
        403: "denies access",
        500: "returned status 500",
        404: "returned status 404",
    }.items():
        api.faults = [("/experiments", status, f"token {SECRET} may not do this")]
        code, result, _ = submit("-f", pipeline_file, *credential_arguments(api.url))
        assert (code, result["error"]["message"].removeprefix(f"Kubeflow Pipelines at {api.url} ")) == (
            2 if status == 404 else 1,
            f"{expected}: token *** may not do this",
        )


def test_credential_in_a_truncated_run_error_is_masked(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, credential_arguments: CredentialArguments
) -> None:
    api.script = [State("FAILED", {"fine-tuning": "FAILED"}, {"fine-tuning": "." * 395 + SECRET})]
    code, result, err = submit("-f", pipeline_file, *credential_arguments(api.url), "--wait", "--run-name", "r")
    assert (code, result["error"]["message"]) == (
        1,
        f"the run r ended with state FAILED in fine-tuning: {'.' * 395}***",
    )
    assert SECRET[:3] not in err


def test_credential_in_an_invalid_response_is_masked(
    submit: SubmitCommand, pipeline_file: Path, credential_arguments: CredentialArguments
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_send_line, args=(server, f"{SECRET}\r\n\r\n"), daemon=True).start()
        code, result, _ = submit(
            "-f", pipeline_file, *credential_arguments(f"http://127.0.0.1:{server.getsockname()[1]}")
        )
    assert (code, result["error"]["kind"]) == (1, "engine_missing")
    assert "***" in result["error"]["message"]


def _send_line(server: socket.socket, line: str) -> None:
    """Answer each call with a line that is not HTTP."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(line.encode())


def test_credential_in_a_kfp_error_is_masked(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, credential_arguments: CredentialArguments
) -> None:
    for number in ("1", "2"):
        api.experiments[number] = {"experiment_id": number, "display_name": SECRET, "namespace": ""}
    code, result, _ = submit("-f", pipeline_file, *credential_arguments(api.url), "--experiment", SECRET)
    assert (code, result["error"]["kind"]) == (2, "usage")
    assert result["error"]["message"].startswith(
        "kfp rejected the request: Multiple experiments is found with name ***"
    )


def test_renewed_token_is_masked(api: KfpApi, pipeline_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    run = submission.submit(submission.KubeflowServer(api.url, token_file=file), pipeline_file, "e")
    file.write_text("renewed-token")
    api.faults = [("/runs/", 403, f"neither {SECRET} nor renewed-token may look")]
    with pytest.raises(submission.AccessError) as error:
        submission.wait_for_run(run, RecordingReporter(), interval=0.01)
    assert error.value.message.endswith("denies access: neither *** nor *** may look")


def test_endpoint_password_is_sent_as_basic_auth_and_masked(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path
) -> None:
    endpoint = api.url.replace("://", f"://me:{SECRET}%40@")
    code, result, _ = submit("-f", pipeline_file, "--endpoint", endpoint, "--experiment", "e", "--wait")
    assert (code, result["state"]) == (0, "SUCCEEDED")
    assert result["url"] == f"{api.url}/#/runs/details/{result['run_id']}"
    sent = {call.headers["authorization"] for call in api.calls}
    assert sent == {"Basic " + base64.b64encode(f"me:{SECRET}@".encode()).decode()}
    assert SECRET not in repr(submission.KubeflowServer(endpoint))


def test_password_of_an_unreachable_endpoint_is_masked(submit: SubmitCommand, pipeline_file: Path) -> None:
    for password in (SECRET, f"a/{SECRET}", f"{SECRET}#b"):
        code, result, _ = submit(
            "-f", pipeline_file, "--endpoint", f"http://me:{password}@127.0.0.1:9", "--experiment", "e"
        )
        message = "Kubeflow Pipelines at http://127.0.0.1:9 does not answer: [Errno 111] Connection refused"
        assert (code, result["error"]["message"]) == (1, message)


def test_malformed_token_is_reported_without_its_value(
    submit: SubmitCommand, pipeline_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "Copy the token again."
    (tmp_path / "token").write_text(f"{SECRET}\n{SECRET}\n")
    arguments = ["-f", pipeline_file, "--endpoint", "http://127.0.0.1:9", "--experiment", "e"]
    reason = "is not a valid token: it contains a space, a line break or a non-ASCII character"
    code, result, _ = submit(*arguments, "--token-file", tmp_path / "token")
    assert (code, *get_error(result)) == (2, "configuration", f"the token in {tmp_path / 'token'} {reason}", hint)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", f"{SECRET}…")
    code, result, _ = submit(*arguments)
    assert (code, *get_error(result)) == (2, "configuration", f"the token in KF_PIPELINES_TOKEN {reason}", hint)


def test_missing_or_empty_token_file_is_reported(submit: SubmitCommand, pipeline_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, reason in {"none": "cannot be read: No such file or directory", "empty": "is empty"}.items():
        code, result, _ = submit(
            "-f",
            pipeline_file,
            "--endpoint",
            "http://127.0.0.1:9",
            "--experiment",
            "e",
            "--token-file",
            tmp_path / name,
        )
        expected = (
            2,
            "configuration",
            f"the token file {tmp_path / name} {reason}",
            "Pass a file that contains the token.",
        )
        assert (code, *get_error(result)) == expected


def test_login_page_is_reported(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    api.login_page = True
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")
    kind, message, hint = get_error(result)
    assert (code, kind) == (1, "access")
    assert message == f"{api.url} returned text/html; expected JSON from the API of Kubeflow Pipelines"
    assert hint.startswith(
        "Set a token in KF_PIPELINES_TOKEN or with --token-file, or correct --endpoint: within the cluster, use http://"
    )


def test_private_ca_is_accepted_with_ca_cert(submit: SubmitCommand, pipeline_file: Path, tmp_path: Path) -> None:
    pem = write_certificate(tmp_path / "server.pem")
    with serving(KfpApi(), certificate=pem) as api:
        code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")
        assert (code, *get_error(result)) == (
            1,
            "engine_missing",
            f"Kubeflow Pipelines at {api.url} does not answer: its certificate cannot be verified",
            "Pass the CA certificate with --ca-cert.",
        )
        assert submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--ca-cert", pem)[0] == 0
        code, result, _ = submit(
            "-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--ca-cert", tmp_path / "none.pem"
        )
        assert (code, result["error"]["message"]) == (2, f"--ca-cert: {tmp_path / 'none.pem'} is not an existing file")


# Namespaces and endpoints


def test_namespace_option_is_used(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    api.namespaces = ("team-a",)
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--namespace", "team-a")
    assert (code, result["namespace"]) == (0, "team-a")
    assert [e["namespace"] for e in api.experiments.values()] == ["team-a"]


def test_missing_or_forbidden_namespace_is_reported(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    api.namespaces = ("team-a",)
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e")
    kind, message, hint = get_error(result)
    assert (code, kind) == (2, "usage")
    assert message.endswith(
        "rejected the request: Invalid input error: In multi-user mode, an experiment cannot have an empty namespace"
    )
    assert hint == "Check --namespace (required by a multi-user Kubeflow) and the parameters."
    code, result, _ = submit("-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--namespace", "team-b")
    kind, message, hint = get_error(result)
    assert (code, kind, hint) == (1, "access", "Check the caller's rights in the namespace (--namespace).")
    assert "denies access: PermissionDenied: User 'ci@example.com' is not authorized" in message


def test_unreachable_server_is_reported_without_retries(submit: SubmitCommand, pipeline_file: Path) -> None:
    start = time.monotonic()
    code, result, _ = submit("-f", pipeline_file, "--endpoint", "http://127.0.0.1:9", "--experiment", "e")
    assert (code, *get_error(result)) == (
        1,
        "engine_missing",
        "Kubeflow Pipelines at http://127.0.0.1:9 does not answer: [Errno 111] Connection refused",
        "Check --endpoint and the network: within the cluster, use http://ml-pipeline.kubeflow.svc.cluster.local:8888; "
        "from outside, forward this port.",
    )
    assert time.monotonic() - start < 60, "the request was retried"


def test_hanging_server_times_out(submit: SubmitCommand, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "REQUEST_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, result, _ = submit(
            "-f", pipeline_file, "--endpoint", f"http://127.0.0.1:{server.getsockname()[1]}", "--experiment", "e"
        )
    kind, message, _ = get_error(result)
    assert (code, kind) == (1, "engine_missing")
    assert "does not answer: " in message
    assert "timed out" in message


def test_address_of_another_server_is_reported(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    code, result, _ = submit("-f", pipeline_file, "--endpoint", f"{api.url}/elsewhere", "--experiment", "e")
    kind, message, hint = get_error(result)
    assert (code, kind, message) == (
        2,
        "usage",
        f"Kubeflow Pipelines at {api.url}/elsewhere returned status 404: Not Found",
    )
    assert hint.startswith("Check that --endpoint is the API's address")


@pytest.mark.parametrize("variable", ["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"])
def test_endpoint_is_read_from_the_environment(
    api: KfpApi, submit: SubmitCommand, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, api.url)
    assert submit("-f", pipeline_file, "--experiment", "e")[0] == 0
    assert api.runs


def test_submit_environment_variables_are_documented() -> None:
    import typer

    (command,) = [c for n, c in typer.main.get_command(app).commands.items() if n == "submit"]  # type: ignore[attr-defined]
    read = {name for p in command.params for name in ([p.envvar] if isinstance(p.envvar, str) else p.envvar or [])}
    read |= {*submission.TOKEN_VARIABLES, submission.PROJECTED_TOKEN_VARIABLE}
    _, _, environments = (ROOT / "docs" / "reference" / "cli.md").read_text().partition("## Environment")
    assert len(read) == 6
    assert [name for name in sorted(read) if f"`{name}`" not in environments] == []


def test_endpoint_is_required(submit: SubmitCommand, pipeline_file: Path) -> None:
    code, result, _ = submit("-f", pipeline_file, "--experiment", "e")
    assert (code, result["error"]["kind"]) == (2, "usage")
    assert "--endpoint" in result["error"]["message"]


# Waiting


class RecordingReporter:
    """Records steps and notes."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)

    def progress(self, done: int, total: int | None, unit: str) -> None: ...
    def metrics(self, values: Any, step: int) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)


def test_wait_reports_state_changes_until_success(api: KfpApi, pipeline_file: Path) -> None:
    api.script = [
        State("PENDING"),
        State("RUNNING", {"root-driver": "SUCCEEDED", "root": "RUNNING", "resolve": "RUNNING"}),
        State("RUNNING", {"resolve": "SUCCEEDED", "executor": "RUNNING", "data-curation": "RUNNING"}),
        State("RUNNING", {"resolve": "SUCCEEDED", "executor": "RUNNING", "data-curation": "RUNNING"}),
        State("SUCCEEDED", {"resolve": "SUCCEEDED", "data-curation": "SUCCEEDED", "triton-packaging": "SKIPPED"}),
    ]
    reporter = RecordingReporter()
    run = submission.wait_for_run(
        submission.submit(submission.KubeflowServer(api.url), pipeline_file, "e", run_name="r"), reporter, interval=0.01
    )
    assert run.as_dict()["state"] == "SUCCEEDED"
    assert reporter.steps == [
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
def test_unsuccessful_run_exits_1(api: KfpApi, submit: SubmitCommand, pipeline_file: Path, state: str) -> None:
    api.script = [State("RUNNING"), State(state)]
    code, result, _ = submit(
        "-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait"
    )
    (run_id,) = api.runs
    hint = f"Read the task's log in the UI: {api.url}/#/runs/details/{run_id}"
    assert (code, *get_error(result)) == (1, "run_failed", f"the run r ended with state {state}", hint)
    assert list(result["error"]) == ["stage", "kind", "message", "hint", "run_id", "url", "state"]
    assert [result["error"][key] for key in ("run_id", "url", "state")] == [
        run_id,
        f"{api.url}/#/runs/details/{run_id}",
        state,
    ]


def test_failed_run_reports_task_and_server_message(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    tasks = {"root": "FAILED", "executor": "FAILED", "fine-tuning": "FAILED", "resolve": "SUCCEEDED"}
    errors = {"root": "child failed", "fine-tuning": "main: Error (exit code 1)"}
    api.script = [State("FAILED", tasks, errors)]
    code, result, _ = submit(
        "-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait"
    )
    assert (code, result["error"]["message"]) == (
        1,
        "the run r ended with state FAILED in fine-tuning: main: Error (exit code 1)",
    )
    api.script = [State("FAILED", error="workflow error: the volume claim tuneline is not there")]
    code, result, _ = submit(
        "-f", pipeline_file, "--endpoint", api.url, "--experiment", "e", "--run-name", "r", "--wait"
    )
    assert (
        result["error"]["message"]
        == "the run r ended with state FAILED: workflow error: the volume claim tuneline is not there"
    )


def test_transient_server_errors_are_retried(api: KfpApi, pipeline_file: Path) -> None:
    run = submission.submit(submission.KubeflowServer(api.url), pipeline_file, "e")
    api.faults = [
        ("/runs/", 503, "upstream connect error"),
        ("/runs/", 500, "Internal Server Error"),
        ("/runs/", 429, "slow down"),
    ]
    reporter = RecordingReporter()
    assert submission.wait_for_run(run, reporter, interval=0.01).state == "SUCCEEDED"
    assert reporter.notes[0] == f"Kubeflow Pipelines at {api.url} returned status 503: upstream connect error; retrying"
    assert len(reporter.notes) == 3


def test_unresponsive_server_ends_the_wait_while_the_run_continues(
    pipeline_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(KfpApi()) as api:
        run = submission.submit(submission.KubeflowServer(api.url), pipeline_file, "e")
    monkeypatch.setattr(submission, "UNRESPONSIVE_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(submission.EngineMissingError) as error:
        submission.wait_for_run(run, RecordingReporter(), interval=0.05)
    assert error.value.message == f"Kubeflow Pipelines at {api.url} does not answer: [Errno 111] Connection refused"
    assert error.value.hint == f"Follow the run, which continues: {run.url}"
    assert error.value.details == {"run_id": run.run_id, "url": run.url, "state": "PENDING"}


def test_expired_token_ends_the_wait_while_the_run_continues(api: KfpApi, pipeline_file: Path) -> None:
    run = submission.submit(submission.KubeflowServer(api.url), pipeline_file, "e")
    api.token = "renewed"
    with pytest.raises(submission.AccessError) as error:
        submission.wait_for_run(run, RecordingReporter(), interval=0.01)
    assert "does not accept the credentials" in error.value.message
    assert error.value.hint.endswith(f"; the run continues: {run.url}")


def test_wait_timeout_exits_75(api: KfpApi, submit: SubmitCommand, pipeline_file: Path) -> None:
    api.script = [State("RUNNING")]
    arguments = ["--endpoint", api.url, "--experiment", "e", "--wait", "--timeout", "0.3"]
    code, result, _ = submit("-f", pipeline_file, *arguments)
    (run_id,) = api.runs
    assert (code, *get_error(result)) == (
        75,
        "interrupted",
        "the run is still RUNNING after 0.3 s; it continues",
        f"See {api.url}/#/runs/details/{run_id}, or `kfp run get {run_id}`.",
    )
    assert (result["error"]["run_id"], result["error"]["state"]) == (run_id, "RUNNING")


def test_timeout_includes_time_without_a_response(pipeline_file: Path) -> None:
    with serving(KfpApi()) as api:
        run = submission.submit(submission.KubeflowServer(api.url), pipeline_file, "e")
    with pytest.raises(submission.InterruptedRunError, match=r"the run is still PENDING after 0\.3 s; it continues"):
        submission.wait_for_run(run, RecordingReporter(), timeout=0.3, interval=0.05)


def test_interrupt_ends_the_wait_and_not_the_run(api: KfpApi, pipeline_file: Path, tmp_path: Path) -> None:
    api.script = [State("RUNNING", {"fine-tuning": "RUNNING"})]
    api.token = SECRET
    arguments = [
        "submit",
        "-f",
        str(pipeline_file),
        "--endpoint",
        api.url,
        "--experiment",
        "e",
        "--run-name",
        "r",
        "--wait",
        "--poll",
        "0.1",
    ]
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
    while (
        sum(api.poll_counts.values()) < 2 and time.monotonic() < end and process.poll() is None
    ):  # the first poll is printed before the second
        time.sleep(0.05)
    assert SECRET not in Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    (run_id,) = api.runs
    assert process.returncode == 75, err
    lines = err.splitlines()
    assert lines[:3] == [f"submitted r: {api.url}/#/runs/details/{run_id}", "r: RUNNING", "fine-tuning: RUNNING"]
    assert lines[-2:] == [
        "tuneline: stopped waiting; the run continues",
        f"  See {api.url}/#/runs/details/{run_id}, or `kfp run get {run_id}`.",
    ]
    assert out == ""
    assert SECRET not in err
    assert not [call for call in api.calls if ":terminate" in call.path]


def test_interrupt_does_not_end_a_request_midway() -> None:
    """An interrupted urllib3 can hold a lock for which the process waits at its exit."""
    sent, may_answer, answered = (threading.Event() for _ in range(3))

    class Client:
        def get_run(self, run_id: str) -> None:
            sent.set()
            may_answer.wait(60)
            answered.set()

    def interrupt() -> None:
        sent.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    server = submission.KubeflowServer("http://127.0.0.1:1")
    run = submission.SubmittedRun(Client(), server, "1", "r", "e", "http://127.0.0.1:1/1", frozenset())
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(InterruptedRunError, match="stopped waiting; the run continues"):
            submission.wait_for_run(run, SilentReporter())
    finally:
        signal.signal(signal.SIGINT, inherited)
    may_answer.set()
    assert answered.wait(60)


# Documentation


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository as described in docs/how-to/ci.md."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "customization.yaml").write_text(
        "data_curation: {sources: [/data/raw/*.jsonl]}\nfine_tuning: {max_steps: 9}\n"
    )
    (folder / "platform.yaml").write_text("volume: {claim: team-a}\n")
    (folder / "ci.sh").write_text((ROOT / "docs" / "examples" / "ci.sh").read_text())
    return folder


def run_shell(script: str, cwd: Path, api: KfpApi, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a CI job does, with this environment's commands on PATH and the server at KFP_ENDPOINT."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(
        HOME=str(cwd), PATH=path, KFP_ENDPOINT=api.url, PYTHONWARNINGS="ignore", POLL_SECONDS="0.1", **extra
    )
    return subprocess.run(
        ["sh", "-euc", script], cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_ci_script_succeeds_with_the_run(api: KfpApi, repository: Path) -> None:
    api.token = SECRET
    api.faults = [("/runs/", 503, "no healthy upstream")] * 2  # kfp polls the run it created, and gives up
    process = run_shell(
        "sh ci.sh max_steps=3", repository, api, EXPERIMENT="nightly", RUN_NAME="r", KFP_EXISTING_TOKEN=SECRET
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (run_id,) = api.runs
    assert process.stdout.splitlines()[1:] == [
        f"run: {api.url}/#/runs/details/{run_id}",
        "r: unknown",
        "r: PENDING",
        "r: RUNNING",
        "r: SUCCEEDED",
    ]
    assert SECRET not in process.stdout + process.stderr
    body = get_only_run_request(api)
    assert body["runtime_config"]["parameters"] == {"max_steps": 3}
    assert [e["display_name"] for e in api.experiments.values()] == ["nightly"]


def test_ci_script_fails_with_the_run(api: KfpApi, repository: Path) -> None:
    api.script = [State("FAILED")]
    process = run_shell("sh ci.sh", repository, api, RUN_NAME="r")
    assert process.returncode == 1, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == "r: FAILED"


def test_ci_script_stops_waiting_at_its_timeout(api: KfpApi, repository: Path) -> None:
    api.script = [State("RUNNING")]
    process = run_shell("sh ci.sh", repository, api, RUN_NAME="r", WAIT_SECONDS="0")
    assert (process.returncode, process.stderr.splitlines()[-1]) == (75, "no longer waiting for r; the run continues")


def test_ci_script_fails_on_invalid_configuration_or_parameters(api: KfpApi, repository: Path) -> None:
    process = run_shell("sh ci.sh max_steps=many", repository, api)
    assert process.returncode == 1
    assert "input parameter max_steps requires type NUMBER_INTEGER" in process.stdout + process.stderr
    (repository / "customization.yaml").write_text("fine_tuning: {max_step: 9}\n")
    process = run_shell("sh ci.sh", repository, api)
    assert process.returncode == 2
    assert "did you mean max_steps?" in process.stderr
    assert api.runs == {}


def test_github_workflow_runs_the_script_with_its_variables(api: KfpApi, repository: Path) -> None:
    workflow = yaml.safe_load((ROOT / "docs" / "examples" / "github-workflow.yaml").read_text())
    (job,) = workflow["jobs"].values()
    context = {
        "vars.KFP_ENDPOINT": api.url,
        "vars.KFP_NAMESPACE": "team-a",
        "secrets.KFP_TOKEN": SECRET,
        "inputs.max_steps": "5",
    }
    context |= {"github.sha": "abc", "github.run_attempt": "1"}
    variables = {
        name: re.sub(r"\$\{\{ (.*?) \}\}", lambda match: context[match[1]], str(value))
        for name, value in job["env"].items()
    }
    api.namespaces, api.token = ("team-a",), SECRET
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[0].startswith("pip install ")
    for command in commands[1:]:
        process = run_shell(
            command, repository, api, **{name: value for name, value in variables.items() if name != "KFP_ENDPOINT"}
        )
        assert process.returncode == 0, process.stdout + process.stderr
    body = get_only_run_request(api)
    assert (body["display_name"], body["runtime_config"]["parameters"]) == ("abc-1", {"max_steps": 5})
    assert [(e["display_name"], e["namespace"]) for e in api.experiments.values()] == [("tuneline", "team-a")]
    artifact_path = next(step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert (repository / artifact_path).exists()


def copy_workflow_checkout(repository: Path) -> str:
    """Check tuneline out as the GitHub workflow does, and return the command that installs it."""
    (job,) = yaml.safe_load((ROOT / "docs" / "examples" / "github-workflow.yaml").read_text())["jobs"].values()
    own, other = (step.get("with", {}) for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@"))
    assert "path" not in own, "the repository with the configuration is the working folder"
    _copy_tracked_files(repository / other["path"])
    (install,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("pip install")]
    return str(install)


def test_github_workflow_installs_from_its_checkout_and_its_variables_are_documented(repository: Path) -> None:
    install = copy_workflow_checkout(repository)
    for path in re.findall(r"[\w./-]*/[\w./-]+|\w+\.txt", install):
        assert (repository / path).exists(), path
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text()
    for variable in re.findall(
        r"\b(?:vars|secrets)\.(\w+)", (ROOT / "docs" / "examples" / "github-workflow.yaml").read_text()
    ):
        assert f"`{variable}`" in page, "the page documents each variable"


@pytest.mark.long
def test_pip_accepts_the_install_command_of_the_github_workflow(repository: Path) -> None:
    """long: pip builds the metadata of tuneline in an isolated environment."""
    dry_run = copy_workflow_checkout(repository).replace(
        "pip install", "pip install --dry-run --no-deps --retries 0 --disable-pip-version-check", 1
    )
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.run(
        ["sh", "-euc", dry_run], cwd=repository, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    if process.returncode and "No matching distribution found for hatchling" in process.stdout + process.stderr:
        pytest.skip("no package index answers")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Would install tuneline-" in process.stdout
    assert "does not provide the extra" not in process.stdout + process.stderr


def _copy_tracked_files(folder: Path) -> None:
    """Copy the files of tuneline that git tracks, and new files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, output.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.long
@pytest.mark.parametrize("page", ["tutorials/kubeflow.md", "how-to/ci.md"])
def test_documented_commands_run(api: KfpApi, repository: Path, page: str) -> None:
    api.script = [State("SUCCEEDED")]
    text = (ROOT / "docs" / page).read_text()
    process = run_shell("\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)), repository, api)
    assert process.returncode == 0, process.stdout + process.stderr
    assert api.runs


def test_documented_platform_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "tutorials" / "kubeflow.md").read_text(), re.DOTALL)
    (tmp_path / "platform.yaml").write_text(example)
    assert platform_config.load_platform(tmp_path / "platform.yaml").scheduling.queue == "team-a"


def test_submit_imports_no_heavy_libraries(api: KfpApi, tmp_path: Path) -> None:
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
    process = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert api.runs


def write_certificate(path: Path) -> Path:
    """Write a key and a self-signed certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")]),
    )
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    encodings = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(
        key.private_bytes(*encodings) + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    return path
