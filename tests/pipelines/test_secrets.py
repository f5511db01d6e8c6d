"""Secrets are named in files and given in the environment: their values are in nothing that tuneline writes, prints or sends."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kfp_api import Call, KfpApi, State, serving
from tests.pipelines.command import COMMAND, environment

NAMES = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "KF_PIPELINES_TOKEN",
    "DATABASE_PASSWORD",
    "SOME_OTHER_VALUE",  # a name that tells nobody what it is
)
PLATFORM = {
    "mlflow": {"tracking_uri": "http://mlflow:5000"},
    "secrets": {name: {"name": "team", "key": name.lower().replace("_", "-")} for name in NAMES},
    "secret_files": [{"name": "git-key", "mount": "/etc/git"}],
    "run": {"service_account": "tuner"},
}


@pytest.fixture(scope="module")
def planted() -> dict[str, str]:
    """What nobody may find again, one a variable; an address with a password among them."""
    values = {name: f"planted-{secrets.token_hex(12)}" for name in NAMES}
    return values | {"MLFLOW_TRACKING_URI": f"http://me:planted-{secrets.token_hex(12)}@127.0.0.1:9"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project: a configuration, a platform that names the secrets, a few rows."""
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(PLATFORM))
    rows = [{"instruction": f"What is {n} times {n}?", "output": f"{n} times {n} is {n * n}, as anyone can count."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "customization.yaml").write_text(f"data_curation: {{sources: [{tmp_path / 'rows.jsonl'}]}}\n")
    return tmp_path


@pytest.fixture
def api(planted: dict[str, str]) -> Iterator[KfpApi]:
    with serving(KfpApi(token=planted["KF_PIPELINES_TOKEN"])) as running:
        yield running


def run(folder: Path, planted: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command with the secrets in its environment."""
    command = [*COMMAND, *map(str, arguments)]
    variables = environment(HOME=str(folder), TUNELINE_WORKDIR=str(folder / "work"), **planted)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def found_in(planted: dict[str, str], text: str) -> list[str]:
    """The names of the planted secrets that a text holds."""
    values = {name: value.removeprefix("http://me:").removesuffix("@127.0.0.1:9") for name, value in planted.items()}
    return [name for name, value in values.items() if value in text]


def check(folder: Path, planted: dict[str, str], done: subprocess.CompletedProcess[str]) -> None:
    """Neither what was printed nor any file in the folder holds a secret, whatever its kind: a database holds its text as it is."""
    assert found_in(planted, done.stdout + done.stderr) == []
    for path in folder.rglob("*"):
        if path.is_file():
            assert found_in(planted, path.read_bytes().decode("latin-1")) == [], path


def shown(call: Call) -> str:
    """A request without the header that says who is asking."""
    headers = {name: value for name, value in call.headers.items() if name != "authorization"}
    return f"{call.method} {call.path} {call.query} {headers} {call.body.decode('latin-1')}"


def test_a_submission_holds_no_secret_but_the_names_of_all(api: KfpApi, folder: Path, planted: dict[str, str]) -> None:
    done = run(folder, planted, "compile", "-c", "customization.yaml", "-p", "platform.yaml", "-o", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    check(folder, planted, done)
    _, kubernetes = yaml.safe_load_all((folder / "pipeline.yaml").read_text())
    for pod in kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        assert {pair["envVar"] for secret in pod["secretAsEnv"] for pair in secret["keyToEnv"]} == set(NAMES)
    arguments = ["--endpoint", api.url, "--experiment", "e", "--wait", "--poll", "0.05"]
    done = run(folder, planted, "submit", "-c", "customization.yaml", "-p", "platform.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    check(folder, planted, done)
    assert len(api.runs) == 1
    for call in api.calls:
        assert call.headers["authorization"] == f"Bearer {planted['KF_PIPELINES_TOKEN']}"
        assert found_in(planted, shown(call)) == []


def test_a_run_that_fails_tells_no_secret_even_where_the_server_does(api: KfpApi, folder: Path, planted: dict[str, str]) -> None:
    api.script = [State("FAILED", {"fine-tuning": "FAILED"}, {"fine-tuning": f"token {planted['KF_PIPELINES_TOKEN']} is refused"})]
    done = run(
        folder, planted, "submit", "-c", "customization.yaml", "-p", "platform.yaml", "--endpoint", api.url, "--experiment", "e", "--wait"
    )
    assert done.returncode == 1
    assert "token *** is refused" in done.stderr
    check(folder, planted, done)


def test_curating_leaves_no_secret_in_its_artifact_its_logs_or_its_state(folder: Path, planted: dict[str, str]) -> None:
    done = run(folder, planted, "curate", "rows.jsonl", "-o", "dataset", "--json")
    assert done.returncode == 0, done.stderr
    assert (folder / "dataset" / "manifest.json").exists()
    check(folder, planted, done)


def test_a_tracking_server_that_does_not_answer_is_named_without_its_password(folder: Path, planted: dict[str, str]) -> None:
    done = run(folder, planted, "registry", "audit", "mine")
    assert done.returncode == 1
    assert "127.0.0.1:9 does not answer" in done.stderr
    check(folder, planted, done)


def test_a_secret_that_was_written_into_the_platform_is_refused_and_not_repeated(folder: Path, planted: dict[str, str]) -> None:
    value = planted["HF_TOKEN"]
    for mistake in (
        {"environment": {"HF_TOKEN": value}},
        {"secrets": {"HF_TOKEN": value}},
        {"secrets": {"HF_TOKEN": {"name": "team", "value": value}}},
        {"mlflow": {"tracking_uri": f"http://me:{value}@mlflow"}},
        {"network": {"https_proxy": f"http://me:{value}@proxy:3128"}},
    ):
        (folder / "platform.yaml").write_text(yaml.safe_dump(mistake))
        done = run(folder, planted, "compile", "-p", "platform.yaml", "-o", "pipeline.yaml")
        assert done.returncode == 2, mistake
        assert value not in done.stdout + done.stderr
        assert not (folder / "pipeline.yaml").exists()
