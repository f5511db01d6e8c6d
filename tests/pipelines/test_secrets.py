"""Secrets come from the environment; tuneline never writes, prints or sends their values."""

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
    "SOME_OTHER_VALUE",  # a name that does not suggest a secret
)
PLATFORM = {
    "mlflow": {"tracking_uri": "http://mlflow:5000"},
    "secrets": {name: {"name": "team", "key": name.lower().replace("_", "-")} for name in NAMES},
    "secret_files": [{"name": "git-key", "mount": "/etc/git"}],
    "run": {"service_account": "tuner"},
}


@pytest.fixture(scope="module")
def planted_secrets() -> dict[str, str]:
    """A random secret for each variable, and an address with a password."""
    values = {name: f"planted-{secrets.token_hex(12)}" for name in NAMES}
    return values | {"MLFLOW_TRACKING_URI": f"http://me:planted-{secrets.token_hex(12)}@127.0.0.1:9"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a configuration, a platform that references the secrets, and a few rows."""
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(PLATFORM))
    rows = [
        {"instruction": f"What is {n} times {n}?", "output": f"{n} times {n} is {n * n}, as anyone can count."}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "customization.yaml").write_text(f"data_curation: {{sources: [{tmp_path / 'rows.jsonl'}]}}\n")
    return tmp_path


@pytest.fixture
def api(planted_secrets: dict[str, str]) -> Iterator[KfpApi]:
    with serving(KfpApi(token=planted_secrets["KF_PIPELINES_TOKEN"])) as server:
        yield server


def run(folder: Path, planted_secrets: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command with the secrets in its environment."""
    command = [*COMMAND, *map(str, arguments)]
    variables = environment(HOME=str(folder), TUNELINE_WORKDIR=str(folder / "work"), **planted_secrets)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def find_secrets(planted_secrets: dict[str, str], text: str) -> list[str]:
    """Return the names of the planted secrets in a text."""
    values = {
        name: value.removeprefix("http://me:").removesuffix("@127.0.0.1:9") for name, value in planted_secrets.items()
    }
    return [name for name, value in values.items() if value in text]


def check_no_secrets(folder: Path, planted_secrets: dict[str, str], process: subprocess.CompletedProcess[str]) -> None:
    """Check that no output and no file contains a secret; databases are read as text, which they store uncompressed."""
    assert find_secrets(planted_secrets, process.stdout + process.stderr) == []
    for path in folder.rglob("*"):
        if path.is_file():
            assert find_secrets(planted_secrets, path.read_bytes().decode("latin-1")) == [], path


def format_request(call: Call) -> str:
    """Return a request without its authorization header."""
    headers = {name: value for name, value in call.headers.items() if name != "authorization"}
    return f"{call.method} {call.path} {call.query} {headers} {call.body.decode('latin-1')}"


def test_submission_has_names_of_secrets_but_no_values(
    api: KfpApi, folder: Path, planted_secrets: dict[str, str]
) -> None:
    process = run(
        folder, planted_secrets, "compile", "-c", "customization.yaml", "-p", "platform.yaml", "-o", "pipeline.yaml"
    )
    assert process.returncode == 0, process.stderr
    check_no_secrets(folder, planted_secrets, process)
    _, kubernetes = yaml.safe_load_all((folder / "pipeline.yaml").read_text())
    for pod in kubernetes["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        assert {pair["envVar"] for secret in pod["secretAsEnv"] for pair in secret["keyToEnv"]} == set(NAMES)
    arguments = ["--endpoint", api.url, "--experiment", "e", "--wait", "--poll", "0.05"]
    process = run(folder, planted_secrets, "submit", "-c", "customization.yaml", "-p", "platform.yaml", *arguments)
    assert process.returncode == 0, process.stderr
    check_no_secrets(folder, planted_secrets, process)
    assert len(api.runs) == 1
    for call in api.calls:
        assert call.headers["authorization"] == f"Bearer {planted_secrets['KF_PIPELINES_TOKEN']}"
        assert find_secrets(planted_secrets, format_request(call)) == []


def test_failed_run_masks_secrets_in_the_servers_message(
    api: KfpApi, folder: Path, planted_secrets: dict[str, str]
) -> None:
    api.script = [
        State(
            "FAILED",
            {"fine-tuning": "FAILED"},
            {"fine-tuning": f"token {planted_secrets['KF_PIPELINES_TOKEN']} is refused"},
        )
    ]
    process = run(
        folder,
        planted_secrets,
        "submit",
        "-c",
        "customization.yaml",
        "-p",
        "platform.yaml",
        "--endpoint",
        api.url,
        "--experiment",
        "e",
        "--wait",
    )
    assert process.returncode == 1
    assert "token *** is refused" in process.stderr
    check_no_secrets(folder, planted_secrets, process)


def test_curation_leaves_no_secret_in_artifact_logs_or_state(folder: Path, planted_secrets: dict[str, str]) -> None:
    process = run(folder, planted_secrets, "curate", "rows.jsonl", "-o", "dataset", "--json")
    assert process.returncode == 0, process.stderr
    assert (folder / "dataset" / "manifest.json").exists()
    check_no_secrets(folder, planted_secrets, process)


def test_unreachable_tracking_server_is_reported_without_its_password(
    folder: Path, planted_secrets: dict[str, str]
) -> None:
    process = run(folder, planted_secrets, "registry", "audit", "mine")
    assert process.returncode == 1
    assert "127.0.0.1:9 does not answer" in process.stderr
    check_no_secrets(folder, planted_secrets, process)


def test_secret_in_the_platform_file_is_refused_and_not_repeated(folder: Path, planted_secrets: dict[str, str]) -> None:
    value = planted_secrets["HF_TOKEN"]
    for mistake in (
        {"environment": {"HF_TOKEN": value}},
        {"secrets": {"HF_TOKEN": value}},
        {"secrets": {"HF_TOKEN": {"name": "team", "value": value}}},
        {"mlflow": {"tracking_uri": f"http://me:{value}@mlflow"}},
        {"network": {"https_proxy": f"http://me:{value}@proxy:3128"}},
    ):
        (folder / "platform.yaml").write_text(yaml.safe_dump(mistake))
        process = run(folder, planted_secrets, "compile", "-p", "platform.yaml", "-o", "pipeline.yaml")
        assert process.returncode == 2, mistake
        assert value not in process.stdout + process.stderr
        assert not (folder / "pipeline.yaml").exists()
