"""Deployment with a real Triton and registry: promotions and rollbacks under load, and defective new versions.

Long tier: every test starts a Triton server, most of them also `tuneline deploy`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import SilentReporter
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.promotion import promote, rollback
from components.model_registry.stage import register
from components.triton_packaging import triton_config
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import deployment_state, repository_api, serving_folder
from components.triton_packaging.deployment.serving_folder import Release
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import Server, ServerAddress, running_server
from pipelines.cli.main import app
from pipelines.deployment import watcher
from pipelines.deployment.watcher import Deployment
from pipelines.gateway.traffic_routes import set_route
from tests import preloaded_server
from tests.model_registry.conftest import open_registry
from tests.model_registry.evidence_builder import build_dataset, build_evaluation
from tests.pipelines.command import refusal
from tests.pipelines.deployment_clients import (
    PROMPTS,
    SERVED_NAME,
    TOKENS,
    ClientLoad,
    client_process,
    request_grpc,
    request_stream,
)
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import publish_adapter

pytestmark = [pytest.mark.triton, pytest.mark.mlflow]
NAME = "helper"
STEADY_SECONDS = 15.0  # some hundred answers for a 99th percentile
CONFIG = TritonPackagingConfig(model_name=SERVED_NAME, golden_prompts=PROMPTS, golden_max_tokens=TOKENS, max_tokens=64)


@dataclass(frozen=True)
class RegisteredVersions:
    """A registry with versions 1, 2, 3 of a model, each accepted against its predecessor, and their packages."""

    store: Path
    folder: Path
    packages: list[Artifact]

    def proven_texts(self, version: str) -> dict[str, str]:
        """Return the proven answers of a version by prompt."""
        proof = json.loads((self.packages[int(version) - 1].path / "proof.json").read_text(encoding="utf-8"))
        return {answer["prompt"]: answer["text"] for answer in proof["answers"]}


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory) -> RegisteredVersions:
    """Tune, package, prove and register three models; only the evaluations are fabricated."""
    folder = tmp_path_factory.mktemp("deployed")
    packages: list[Artifact] = []
    incumbent: Artifact | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        for number in (1, 2, 3):
            model = tune_model(folder / str(number), seed=number)
            packages.append(
                package(model, folder / str(number) / "repository", CONFIG, seed=1, reporter=SilentReporter())
            )
            assert model.artifact is not None
            register_version(folder / str(number), model.artifact, packages[-1], incumbent)
            incumbent = model.artifact
    return RegisteredVersions(folder / "mlflow.db", folder, packages)


def tune_model(folder: Path, seed: int) -> LoadableModel:
    base = model_loading.open_model(tiny_model(folder / "base", seed=seed))
    dataset = build_dataset(folder / "dataset")
    return model_loading.open_model_artifact(
        publish_adapter(base, folder / "model", dataset=dataset.as_input(str(dataset.path)))
    )


def register_version(folder: Path, model: Artifact, repository: Artifact, incumbent: Artifact | None) -> str:
    dataset = artifact_folder.read(Path(model.manifest.find_input("dataset").uri))
    evaluation = build_evaluation(
        folder / "evaluation", model.manifest, dataset, incumbent=incumbent.sha256 if incumbent else None
    )
    return register(model, evaluation, repository, ModelRegistryConfig(name=NAME), reporter=SilentReporter()).version


@pytest.fixture
def registry(registered: RegisteredVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an MLflow client of a copy of the registry, which has no champion."""
    return open_registry(registered.store, tmp_path, monkeypatch)


@dataclass
class RunningDeployment:
    """A running `tuneline deploy --watch`, and the addresses of its server."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    workdir: Path

    @property
    def server(self) -> ServerAddress:
        """Return the addresses of the server."""
        return ServerAddress(self.ready["grpc"])

    def find_triton(self) -> psutil.Process:
        """Return the process of the server."""
        return next(child for child in psutil.Process(self.process.pid).children() if child.name() == "tritonserver")

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Wait until the log contains the text."""
        assert wait_until(lambda: text in self.read_log(), seconds), self.read_log()

    def read_log(self) -> str:
        """Return the log of the deployment."""
        log = self.workdir / "serving" / NAME / "deploy.log"
        return log.read_text(encoding="utf-8") if log.exists() else ""


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def run_deployment(workdir: Path, *options: str, watch: bool = True) -> Iterator[RunningDeployment]:
    """Run the command in a child process; yield once it serves a version."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pipelines.cli",
        "deploy",
        NAME,
        "--every",
        "0.2",
        "--json",
        "--http-port",
        "0",
        *options,
    ]
    command += ["--watch"] if watch else []
    process = subprocess.Popen(
        [*command, "--workdir", str(workdir)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        yield RunningDeployment(process, json.loads(process.stdout.readline()), workdir)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=90)
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def read_served_version(workdir: Path) -> str:
    state = workdir / "serving" / NAME / "state.json"
    return str(json.loads(state.read_text(encoding="utf-8"))["serving"]["version"]) if state.exists() else ""


@pytest.mark.stress
def test_promotions_and_rollback_under_load_lose_no_request(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_deployment(tmp_path) as deployed, ClientLoad().apply(deployed.server) as load:
        assert deployed.ready["version"] == "1"
        assert wait_until(lambda: "1" in load.versions(), 60)
        promote(NAME, "2", reporter=SilentReporter())
        deployed.wait_for("helper version 2 is served as")
        rollback(NAME, reporter=SilentReporter())
        deployed.wait_for("helper version 1 is served as clerk, in place of version 2")
        answered = len(load.answers)
        assert wait_until(lambda: len(load.answers) > answered + 50, 60)
        assert wait_until(
            lambda: repository_api.is_unloaded(deployed.server, SERVED_NAME, "2"), 60
        )  # its memory is free
    assert deployed.process.returncode == 0
    assert load.failures == []
    assert load.find_wrong_answers(registered.proven_texts) == []
    assert load.versions() == ["1", "2"]
    assert {version for version, _, _ in load.answers[-40:]} == {"1"}
    assert registry.get_model_version(NAME, "1").tags["tuneline.serving"] == "in service"
    assert registry.get_model_version(NAME, "2").tags["tuneline.serving"] == "retired"


@pytest.mark.stress
def test_ten_swaps_under_load_lose_and_delay_no_answer(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    """Half of the clients use the gateway. The bound on the delays needs a machine without other work."""
    promote(NAME, "1", reporter=SilentReporter())
    with (
        run_deployment(tmp_path) as deployed,
        client_process(deployed.server, deployed.ready["openai_url"]) as load,
    ):
        time.sleep(STEADY_SECONDS)
        first_swap = time.monotonic()
        for _ in range(5):
            promote(NAME, "2", reporter=SilentReporter())
            assert wait_until(lambda: read_served_version(tmp_path) == "2", 300), deployed.read_log()
            rollback(NAME, reporter=SilentReporter())
            assert wait_until(lambda: read_served_version(tmp_path) == "1", 300), deployed.read_log()
    assert load.failures == []
    assert load.find_wrong_answers(registered.proven_texts) == []
    assert load.versions() == ["1", "2"]
    steady = [seconds for began, seconds in load.times if began + seconds < first_swap]
    later = [seconds for began, seconds in load.times if began + seconds >= first_swap]
    limit = 2 * float(np.percentile(steady, 99)) + 1.0
    print(
        f"{len(later)} answers during 10 swaps: 99th percentile {np.percentile(later, 99):.3f} s, "
        f"slowest {max(later):.3f} s; steady 99th percentile {np.percentile(steady, 99):.3f} s, limit {limit:.3f} s"
    )
    assert max(later) <= limit


@pytest.mark.stress
def test_manually_moved_alias_is_followed_or_refused_with_a_reason(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_deployment(tmp_path) as deployed, ClientLoad().apply(deployed.server, clients=2) as load:
        registry.set_registered_model_alias(
            NAME, "champion", "3"
        )  # its evaluation compared it with version 2, which is not in service
        deployed.wait_for("version 1 remains deployed")
        reason = registry.get_model_version(NAME, "3").tags["tuneline.serving.reason"]
        assert "its evaluation compared it with model" in reason
        assert registry.get_model_version(NAME, "3").tags["tuneline.serving"] == "refused"
        registry.set_registered_model_alias(NAME, "champion", "2")
        assert wait_until(lambda: read_served_version(tmp_path) == "2", 120), deployed.read_log()
        answered = len(load.answers)
        assert wait_until(lambda: len(load.answers) > answered + 10, 60)
    assert load.failures == []
    assert load.find_wrong_answers(registered.proven_texts) == []
    assert load.versions() == ["1", "2"]


@pytest.mark.stress
def test_damaged_package_is_refused_and_the_served_version_stays(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    weights = next((registered.packages[1].path / SERVED_NAME / "1" / "weights").glob("*.safetensors"))
    content = weights.read_bytes()
    with run_deployment(tmp_path) as deployed, ClientLoad().apply(deployed.server, clients=2) as load:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            registry.set_registered_model_alias(NAME, "champion", "2")
            deployed.wait_for("has changed since it was published")
        finally:
            weights.write_bytes(content)
    assert (load.failures, load.versions()) == ([], ["1"])
    assert "cannot be verified" in registry.get_model_version(NAME, "2").tags["tuneline.serving.reason"]


@pytest.mark.stress
def test_package_with_wrong_answers_fails_the_smoke_test(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    version = register_wrong_package(registered, tmp_path / "impostor")
    with run_deployment(tmp_path) as deployed, ClientLoad().apply(deployed.server, clients=2) as load:
        registry.set_registered_model_alias(NAME, "champion", version)
        deployed.wait_for("differs from the proof")
        answered = len(load.answers)
        assert wait_until(lambda: len(load.answers) > answered + 10, 60)
        assert repository_api.get_version_states(deployed.server, f"{SERVED_NAME}_candidate") == {}
    assert (load.failures, load.versions(), load.find_wrong_answers(registered.proven_texts)) == ([], ["1"], [])
    assert "differs from the proof" in registry.get_model_version(NAME, version).tags["tuneline.serving.reason"]


@pytest.mark.stress
def test_a_canary_is_served_beside_the_champion_and_never_disturbs_it(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    """A second alias on the same server: missing, accepted, rejected by the gate, forced, and damaged versions."""
    promote(NAME, "1", reporter=SilentReporter())
    registry.delete_registered_model_alias(NAME, "candidate")  # registration gave it to version 3
    routes = tmp_path / "routes.yaml"
    targets = [{"model": SERVED_NAME, "weight": 0}, {"model": f"{SERVED_NAME}-candidate"}]
    set_route(routes, SERVED_NAME, {"targets": targets})
    options = ("--canary-alias", "candidate", "--routes", str(routes))
    log = tmp_path / "serving" / f"{NAME}@candidate" / "deploy.log"

    def wait_for(text: str) -> None:
        assert wait_until(lambda: log.exists() and text in log.read_text(), 120), (
            log.read_text() if log.exists() else ""
        )

    with run_deployment(tmp_path, *options) as deployed, ClientLoad().apply(deployed.server, clients=2) as load:
        url = deployed.ready["openai_url"]

        def is_answered_by(version: str, model: str = SERVED_NAME) -> bool:
            return wait_until(lambda: ask_gateway(url, model) == (200, version), 30)

        assert is_answered_by("1")  # no version has the alias yet
        promote(NAME, "2", alias="candidate", reporter=SilentReporter())
        wait_for(f"version 2 is served as {SERVED_NAME}-candidate")
        assert is_answered_by("2")
        assert is_answered_by("1", f"{NAME}@champion")
        assert is_answered_by("2", f"{NAME}@candidate")

        registry.set_model_version_tag(NAME, "3", "tuneline.verdict", "rejected")
        registry.set_registered_model_alias(NAME, "candidate", "3")
        wait_for("version 3 is served as clerk-candidate for shadow traffic only")
        assert is_answered_by("1")
        assert ask_gateway(url, f"{NAME}@candidate")[0] == 403

        registry.delete_registered_model_alias(NAME, "candidate")
        promote(NAME, "3", alias="candidate", force=True, reason="an experiment", reporter=SilentReporter())
        wait_for("version 3 now also answers client requests")
        assert is_answered_by("3")

        wrong = register_wrong_package(registered, tmp_path / "impostor")
        registry.set_registered_model_alias(NAME, "candidate", wrong)
        wait_for("differs from the proof")
        assert is_answered_by("3")
        deployed.find_triton().kill()
        assert wait_until(lambda: ask_gateway(url, f"{NAME}@champion") == (200, "1"), 120), deployed.read_log()
        assert wait_until(lambda: ask_gateway(url, SERVED_NAME) == (200, "3"), 120), log.read_text()
        load.failures.clear()  # those of the killed server
    assert load.find_wrong_answers(registered.proven_texts) == []
    assert load.versions() == ["1"]
    assert registry.get_model_version(NAME, "1").tags["tuneline.serving"] == "in service"


def ask_gateway(url: str, model: str) -> tuple[int, str]:
    """Return the status and the version of an answer; status 0 without a response."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers["x-tuneline-model-version"]
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--canary-alias", "candidate"], "--canary-alias requires --watch"),
        (["--canary-alias", "candidate", "--watch", "--grpc-url", "x:1"], "--canary-alias requires --watch"),
        (["--canary-alias", "champion", "--watch"], "--canary-alias and --alias are both champion"),
        (["--canary"], "--canary requires --grpc-url"),
    ],
)
def test_options_of_a_canary_are_checked(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["deploy", NAME, *options])
    assert isinstance(result.exception, UsageError)
    assert message in result.exception.message


def register_wrong_package(registered: RegisteredVersions, folder: Path, incumbent: str = "1") -> str:
    """Register a version whose package verifies and claims a proof, but has the weights of another model."""
    shutil.copytree(registered.packages[1].path, folder / "repository")
    for name in (artifact_folder.MANIFEST_FILENAME, ".unfinished"):
        (folder / "repository" / name).unlink(missing_ok=True)
    model = tune_model(folder, seed=9).artifact
    assert model is not None
    shutil.rmtree(folder / "repository" / SERVED_NAME / "1" / "weights")
    shutil.copytree(
        registered.packages[2].path / SERVED_NAME / "1" / "weights",
        folder / "repository" / SERVED_NAME / "1" / "weights",
    )
    manifest = registered.packages[1].manifest
    proof = json.loads((registered.packages[1].path / "proof.json").read_text(encoding="utf-8"))
    proof["inputs"] = [["model", model.sha256]]
    (folder / "repository" / "proof.json").write_text(json.dumps(proof), encoding="utf-8")
    repository = artifact_folder.publish(
        folder / "repository", "repository", payload=lambda path: path.startswith((SERVED_NAME, "proof.json")),
        inputs=[model.as_input()], config=manifest.config, seed=1, key="k", summary=manifest.summary,
    )  # fmt: skip
    return register_version(
        folder, model, repository, artifact_folder.read(registered.folder / incumbent / "model", "model")
    )


@pytest.mark.stress
def test_killed_server_and_deployment_recover_without_the_registry(
    registry: Any, registered: RegisteredVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_deployment(tmp_path) as deployed:
        deployed.find_triton().kill()
        deployed.wait_for("is being restarted with the deployed version")
        assert wait_until(lambda: is_serving(deployed, registered, "1"), 90), deployed.read_log()
        deployed.process.kill()
        deployed.process.wait()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("TUNELINE_REGISTRY_TIMEOUT_SECONDS", "0.5")
    with run_deployment(tmp_path) as deployed:
        assert is_serving(deployed, registered, "1")
        deployed.wait_for("keeping the deployed version")


@pytest.mark.stress
def test_server_killed_during_a_switch_ends_with_the_new_version(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_deployment(tmp_path) as deployed:
        promote(NAME, "2", reporter=SilentReporter())
        folder = tmp_path / "serving" / NAME / "repository" / SERVED_NAME
        assert wait_until((folder / "2").exists, 60)
        deployed.find_triton().kill()
        assert wait_until(
            lambda: read_served_version(tmp_path) == "2" and is_serving(deployed, registered, "2"), 180
        ), deployed.read_log()


def is_serving(deployed: RunningDeployment, registered: RegisteredVersions, version: str) -> bool:
    """Whether the server answers with this version and its proven text."""
    try:
        return request_grpc(deployed.server, PROMPTS[0]) == (
            version,
            PROMPTS[0],
            registered.proven_texts(version)[PROMPTS[0]],
        )
    except InferenceServerException:
        return False


@pytest.mark.long
def test_deploy_errors_are_reported(registry: Any, tmp_path: Path) -> None:
    deploy: dict[str, Any] = {"cwd": tmp_path, "MLFLOW_TRACKING_URI": os.environ["MLFLOW_TRACKING_URI"]}
    error = refusal(1, "deploy", NAME, "--http-port", "0", **deploy)
    assert error["kind"] == "registry"
    assert f"{NAME} has no version with the alias champion" in error["message"]
    promote(NAME, "1", reporter=SilentReporter())
    error = refusal(1, "deploy", NAME, "--grpc-url", "127.0.0.1:9", **deploy)
    assert error["kind"] == "engine_missing"
    assert "does not answer" in error["message"]
    error = refusal(1, "deploy", "unknown", "--http-port", "0", **deploy)
    assert "the registered model unknown does not exist" in error["message"]


@pytest.mark.long
def test_promotion_pipeline_deploys_and_restores_the_alias_on_failure(
    registry: Any, registered: RegisteredVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kfp import local

    from pipelines.config.customization_config import Customization
    from pipelines.definition import promotion_pipeline

    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path))
    for name, value in preloaded_server.get_variables("PRELOADED_STEPS").items():
        monkeypatch.setenv(name, value)
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "kfp"))
    pipeline = promotion_pipeline.build(Customization())
    repository = watcher.get_serving_folder(tmp_path, NAME) / "repository"
    repository.mkdir(parents=True)
    with running_server(repository, models=[], log=tmp_path / "triton.log") as server:
        parameters = {
            "by": "ann",
            "model_name": NAME,
            "triton_grpc_url": server.grpc_url,
        }
        for version in ("1", "2"):
            pipeline(version=version, **parameters)
            assert request_grpc(server, PROMPTS[0]) == (
                version,
                PROMPTS[0],
                registered.proven_texts(version)[PROMPTS[0]],
            )
        wrong_version = register_wrong_package(registered, tmp_path / "impostor", incumbent="2")
        with pytest.raises(RuntimeError):
            pipeline(version=wrong_version, **parameters)
        assert request_grpc(server, PROMPTS[0])[0] == "2"
    assert str(registry.get_model_version_by_alias(NAME, "champion").version) == "2"
    assert "differs from the proof" in registry.get_model_version(NAME, wrong_version).tags["tuneline.serving.reason"]


@contextmanager
def run_external_server(folder: Path) -> Iterator[Server]:
    """Run a server, separate from the deployment, on the model repository of a serving folder."""
    (folder / "repository").mkdir(parents=True, exist_ok=True)
    with running_server(folder / "repository", models=[], log=folder / "elsewhere.log") as server:
        yield server


def get_address(server: Server) -> ServerAddress:
    return ServerAddress(server.grpc_url)


@contextmanager
def open_deployment(folder: Path) -> Iterator[Deployment]:
    with watcher.open_deployment(NAME, folder, SilentReporter(), alias="champion", served_as="") as deployment:
        yield deployment


def read_log(folder: Path) -> str:
    return (folder / watcher.LOG_FILENAME).read_text(encoding="utf-8")


@pytest.mark.stress
def test_repackaged_version_is_reloaded_under_its_number(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_external_server(tmp_path / "serving") as server, open_deployment(tmp_path / "serving") as deployment:
        watcher.poll(deployment, get_address(server))
        assert repository_api.get_loaded_package(get_address(server), SERVED_NAME, "1") == registered.packages[0].sha256
        repackaged = repackage(registered.packages[0], tmp_path / "anew")
        register_again(registered, repackaged)
        with ClientLoad().apply(server, clients=4) as load:
            watcher.poll(deployment, get_address(server))
            answered = len(load.answers)
            assert wait_until(lambda: len(load.answers) > answered + 10, 60)
        for model in (SERVED_NAME, f"{SERVED_NAME}_stream"):
            assert (
                repository_api.get_loaded_package(get_address(server), model, "1")
                == repackaged.sha256
                != registered.packages[0].sha256
            )
        assert (load.failures, load.find_wrong_answers(registered.proven_texts), load.versions()) == ([], [], ["1"])
        assert deployment.state.serving is not None
        assert deployment.state.serving.repository_sha256 == repackaged.sha256


def repackage(package: Artifact, folder: Path) -> Artifact:
    """Publish a package of the same model with another setting."""
    shutil.copytree(package.path, folder)
    (folder / artifact_folder.MANIFEST_FILENAME).unlink()
    config = triton_config.read_config(folder / SERVED_NAME)
    config.parameters["max_queue"].string_value = "32"
    triton_config.write_config(folder / SERVED_NAME, config)
    manifest = package.manifest
    return artifact_folder.publish(
        folder, "repository", payload=lambda path: path.startswith(SERVED_NAME),
        inputs=manifest.inputs, config=manifest.config, seed=1, key="anew", summary=manifest.summary,
    )  # fmt: skip


def register_again(registered: RegisteredVersions, package: Artifact) -> None:
    model, evaluation = (artifact_folder.read(registered.folder / "1" / kind, kind) for kind in ("model", "evaluation"))
    assert (
        register(model, evaluation, package, ModelRegistryConfig(name=NAME), reporter=SilentReporter()).version == "1"
    )


@pytest.mark.stress
def test_alias_moved_away_during_the_trial_deploys_nothing(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=SilentReporter())
    with run_external_server(folder) as server, open_deployment(folder) as deployment:
        watcher.poll(deployment, get_address(server))
        promote(NAME, "2", reporter=SilentReporter())
        with ThreadPoolExecutor() as pool:
            rolled_back = pool.submit(
                lambda: (
                    wait_until((folder / "repository" / f"{SERVED_NAME}_candidate").exists, 60)
                    and rollback(NAME, reporter=SilentReporter())
                )
            )
            watcher.poll(deployment, get_address(server))
            assert rolled_back.result()
        assert "no longer points to version 2" in read_log(folder)
        assert not (folder / "repository" / SERVED_NAME / "2").exists()
        watcher.poll(deployment, get_address(server))
        assert deployment.state.serving is not None
        assert deployment.state.serving.version == "1"
        assert deployment.state.refused is None
        promote(NAME, "2", reporter=SilentReporter())
        watcher.poll(deployment, get_address(server))
        assert request_grpc(server, PROMPTS[0])[0] == "2"


@pytest.mark.stress
def test_restarted_external_server_recovers_without_the_registry(
    registry: Any, registered: RegisteredVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=SilentReporter())
    with run_external_server(folder) as server, open_deployment(folder) as deployment:
        watcher.poll(deployment, get_address(server))
        models = serving_folder.install_release(
            folder,
            Release("2", serving_folder.copy_package(folder, registered.packages[1])),
            f"{SERVED_NAME}_candidate",
        )
        for model in models:  # as a process that was killed in a trial leaves them
            repository_api.load_model(get_address(server), model, "2", timeout=60)
        watcher.poll(deployment, get_address(server))
        assert not any(repository_api.is_ready(get_address(server), model, "2") for model in models)
        assert not any((folder / "repository" / model).exists() for model in models)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with open_deployment(folder) as deployment:
        watcher.poll(deployment, ServerAddress("127.0.0.1:9"))
        with run_external_server(folder) as server:
            watcher.poll(deployment, get_address(server))
            for request in (request_grpc, request_stream):
                assert request(server, PROMPTS[0]) == ("1", PROMPTS[0], registered.proven_texts("1")[PROMPTS[0]])
    assert "version 1 is deployed again" in read_log(folder)


@pytest.mark.stress
def test_failed_installation_is_retried_and_the_served_version_stays(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=SilentReporter())
    with run_external_server(folder) as server, open_deployment(folder) as deployment:
        watcher.poll(deployment, get_address(server))
        promote(NAME, "2", reporter=SilentReporter())
        blocker = folder / "packages" / registered.packages[1].sha256
        blocker.write_text("no folder can be here")
        watcher.poll(deployment, get_address(server))
        assert "version 2 cannot be installed now; --watch retries the installation" in read_log(folder)
        assert deployment.state.refused is None
        assert request_grpc(server, PROMPTS[0])[0] == "1"
        blocker.unlink()
        deployment.retry_after = ("", 0.0)
        (folder / deployment_state.STATE_FILENAME).unlink()
        (folder / deployment_state.STATE_FILENAME).mkdir()  # state.json cannot be written; the server keeps serving
        watcher.poll(deployment, get_address(server))
        assert request_grpc(server, PROMPTS[0])[0] == "2"
        assert "state.json cannot be written" in read_log(folder)


@pytest.mark.stress
def test_start_without_watch_serves_the_current_alias(
    registry: Any, registered: RegisteredVersions, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with run_deployment(tmp_path) as deployed:
        assert deployed.ready["version"] == "1"
    promote(NAME, "2", reporter=SilentReporter())
    with run_deployment(tmp_path, watch=False) as deployed:
        assert deployed.ready["version"] == "2"
        assert is_serving(deployed, registered, "2")


def test_model_name_outside_the_serving_folder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="is not a valid model name"),
        watcher.open_deployment(
            NAME, tmp_path / "serving", SilentReporter(), alias="champion", served_as="../elsewhere"
        ),
    ):
        pass
    assert watcher.get_serving_folder(tmp_path, "..").parent == tmp_path / "serving"
    assert watcher.get_serving_folder(tmp_path, "team/helper").parent == tmp_path / "serving"
