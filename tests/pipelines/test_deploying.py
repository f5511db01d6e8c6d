"""A real Triton follows a real registry: promotions and rollbacks under load, and everything that can be wrong with a new version."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient import grpc

from components.common import artifacts, models
from components.common.artifacts import Artifact
from components.common.errors import UsageError
from components.common.models import Model
from components.common.progress import Silent
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.promotion import promote, rollback
from components.model_registry.stage import register
from components.triton_packaging import pbtxt
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import layout, repository_api, state
from components.triton_packaging.deployment.layout import Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.server import Server, running_server
from components.triton_packaging.stage import package
from pipelines import deploying
from pipelines.deploying import Deployment
from tests.model_registry.conftest import build, opened
from tests.tiny import tiny_model
from tests.triton_packaging.clients import open_stream, post, tensors
from tests.triton_packaging.conftest import publish_adapter

pytestmark = [pytest.mark.triton, pytest.mark.mlflow]
NAME, SERVED = "helper", "clerk"
PROMPTS = ["What is a list?", "Name the fox."]
TOKENS = 8
CONFIG = TritonPackagingConfig(model_name=SERVED, golden_prompts=PROMPTS, golden_max_tokens=TOKENS, max_tokens=64)


@dataclass(frozen=True)
class Registered:
    """A store with versions 1, 2, 3 of a model, each accepted against the one before; and their packages."""

    store: Path
    folder: Path
    packages: list[Artifact]

    def texts(self, version: str) -> dict[str, str]:
        """The proven answers of a version, by prompt."""
        said = json.loads((self.packages[int(version) - 1].path / "proof.json").read_text(encoding="utf-8"))
        return {answer["prompt"]: answer["text"] for answer in said["answers"]}


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """Three tuned models, packaged, proven and registered for real; only their evaluations are written by hand."""
    folder = tmp_path_factory.mktemp("deployed")
    packages: list[Artifact] = []
    before: Artifact | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        for number in (1, 2, 3):
            model = tuned(folder / str(number), seed=number)
            packages.append(package(model, folder / str(number) / "repository", CONFIG, seed=1, reporter=Silent()))
            assert model.artifact is not None
            registered(folder / str(number), model.artifact, packages[-1], before)
            before = model.artifact
    return Registered(folder / "mlflow.db", folder, packages)


def tuned(folder: Path, seed: int) -> Model:
    return models.from_artifact(publish_adapter(models.open_model(tiny_model(folder / "base", seed=seed)), folder / "model"))


def registered(folder: Path, model: Artifact, repository: Artifact, incumbent: Artifact | None) -> str:
    inputs = [model.as_input(), *model.manifest.inputs]
    inputs += [artifacts.Input(kind="incumbent", content_sha256=incumbent.sha256, uri="store:x")] if incumbent else []
    evaluation = build(folder / "evaluation", "evaluation", folder.name, inputs, {"verdict": "accepted", "reasons": ["Better."]})
    return register(model, evaluation, repository, ModelRegistryConfig(name=NAME), reporter=Silent()).version


@pytest.fixture
def registry(three: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of the test's own with the three versions, none of them champion; yields an MLflow client."""
    return opened(three.store, tmp_path, monkeypatch)


@dataclass
class Following:
    """A `tuneline deploy --watch` that runs, and how to ask the server it runs."""

    process: subprocess.Popen[str]
    served: dict[str, Any]
    workdir: Path

    @property
    def server(self) -> Any:
        """As the clients of the tests take it."""
        http, grpc = self.served["http"].rpartition(":"), self.served["grpc"]
        return _Where("127.0.0.1", int(http[2]), grpc)

    def triton(self) -> psutil.Process:
        """The server's process."""
        return next(child for child in psutil.Process(self.process.pid).children() if child.name() == "tritonserver")

    def wait_for(self, words: str, seconds: float = 120.0) -> None:
        """Wait until it has said these words."""
        assert until(lambda: words in self.said(), seconds), self.said()

    def said(self) -> str:
        """What it did, by its own log."""
        log = self.workdir / "serving" / NAME / "deploy.log"
        return log.read_text(encoding="utf-8") if log.exists() else ""


@dataclass(frozen=True)
class _Where:
    host: str
    http_port: int
    grpc_url: str


def until(done: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def following(workdir: Path, *options: str, watch: bool = True) -> Iterator[Following]:
    """The command itself, in a process of its own, from the moment a version is in service."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command = [sys.executable, "-P", "-m", "pipelines.cli", "deploy", NAME, "--every", "0.2", "--json", *ports, *options]
    command += ["--watch"] if watch else []
    process = subprocess.Popen([*command, "--workdir", str(workdir)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        yield Following(process, json.loads(process.stdout.readline()), workdir)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=90)
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@dataclass
class Load:
    """Clients that ask without a pause, half of them streamed; what was answered and what failed."""

    answers: list[tuple[str, str, str]] = field(default_factory=list)  # version, prompt, text
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def on(self, server: Server, clients: int = 8) -> Iterator[Load]:
        """Ask from so many clients until the end of the block."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(server, number, stop)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, server: Server, number: int, stop: threading.Event) -> None:
        asked = number
        while not stop.is_set():
            prompt = PROMPTS[asked % len(PROMPTS)]
            asked += 1
            try:
                self.answers.append(WAYS[number % len(WAYS)](server, prompt))
            except Exception as error:  # whatever a client sees is a failed request
                self.failures.append(repr(error))

    def versions(self) -> list[str]:
        """The versions that answered, each time it changed."""
        return sorted({version for version, _, _ in self.answers})

    def wrong(self, three: Registered) -> list[tuple[str, str, str]]:
        """Answers that the version they name does not give."""
        return [each for each in self.answers if three.texts(each[0])[each[1]] != each[2]]


def by_http(server: Server, prompt: str) -> tuple[str, str, str]:
    status, text = post(server, f"{SERVED}/generate", {"text_input": prompt, "max_tokens": TOKENS})
    assert status == 200, text
    said = json.loads(text)
    return said["model_version"], prompt, said["text_output"]


def by_grpc(server: Server, prompt: str) -> tuple[str, str, str]:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(SERVED, tensors({"text_input": prompt, "max_tokens": TOKENS}), client_timeout=120)
    return result.get_response().model_version, prompt, result.as_numpy("text_output")[0].decode()


def by_stream(server: Server, prompt: str) -> tuple[str, str, str]:
    pieces: list[Any] = []
    with open_stream(server, f"{SERVED}_stream", text_input=prompt, max_tokens=TOKENS) as (_, came):
        while not pieces or not pieces[-1].as_numpy("finish_reason")[0]:
            result, error = came.get(timeout=120)
            if error is not None:
                raise error
            pieces.append(result)
    return pieces[-1].get_response().model_version, prompt, "".join(piece.as_numpy("text_output")[0].decode() for piece in pieces)


WAYS = (by_http, by_stream, by_grpc, by_stream)


def in_service(workdir: Path) -> str:
    state = workdir / "serving" / NAME / "state.json"
    return str(json.loads(state.read_text(encoding="utf-8"))["serving"]["version"]) if state.exists() else ""


def test_promotions_and_a_rollback_under_load_lose_no_request_and_every_answer_says_which_version_gave_it(
    registry: Any, three: Registered, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=Silent())
    with following(tmp_path) as deployed, Load().on(deployed.server) as load:
        assert deployed.served["version"] == "1"
        assert until(lambda: "1" in load.versions(), 60)
        promote(NAME, "2", reporter=Silent())
        deployed.wait_for("helper version 2 is in service")
        rollback(NAME, reporter=Silent())
        deployed.wait_for("helper version 1 is in service as clerk, in the place of 2")
        begun = len(load.answers)
        assert until(lambda: len(load.answers) > begun + 50, 60)
        server = Address(deployed.served["http"], deployed.served["grpc"])
        assert until(lambda: repository_api.is_gone(server, SERVED, "2"), 60)  # with its memory
    assert deployed.process.returncode == 0
    assert load.failures == []
    assert load.wrong(three) == []
    assert load.versions() == ["1", "2"]
    assert {version for version, _, _ in load.answers[-40:]} == {"1"}
    assert registry.get_model_version(NAME, "1").tags["tuneline.serving"] == "in service"
    assert registry.get_model_version(NAME, "2").tags["tuneline.serving"] == "retired"


@pytest.mark.long
def test_an_alias_moved_by_hand_is_followed_where_the_version_may_be_served_and_refused_with_the_reason_where_not(
    registry: Any, three: Registered, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=Silent())
    with following(tmp_path) as deployed, Load().on(deployed.server, clients=2) as load:
        registry.set_registered_model_alias(NAME, "champion", "3")  # its evaluation compared it with version 2, which is not in service
        deployed.wait_for("version 1 stays in service")
        reason = registry.get_model_version(NAME, "3").tags["tuneline.serving.reason"]
        assert "its evaluation compared it with model" in reason
        assert registry.get_model_version(NAME, "3").tags["tuneline.serving"] == "refused"
        registry.set_registered_model_alias(NAME, "champion", "2")
        assert until(lambda: in_service(tmp_path) == "2", 120), deployed.said()
        begun = len(load.answers)
        assert until(lambda: len(load.answers) > begun + 10, 60)
    assert load.failures == []
    assert load.wrong(three) == []
    assert load.versions() == ["1", "2"]


@pytest.mark.long
def test_a_damaged_package_is_refused_and_the_version_in_service_stays(registry: Any, three: Registered, tmp_path: Path) -> None:
    promote(NAME, "1", reporter=Silent())
    weights = next((three.packages[1].path / SERVED / "1" / "weights").glob("*.safetensors"))
    whole = weights.read_bytes()
    with following(tmp_path) as deployed, Load().on(deployed.server, clients=2) as load:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            registry.set_registered_model_alias(NAME, "champion", "2")
            deployed.wait_for("has changed since it was published")
        finally:
            weights.write_bytes(whole)
    assert (load.failures, load.versions()) == ([], ["1"])
    assert "does not verify" in registry.get_model_version(NAME, "2").tags["tuneline.serving.reason"]


@pytest.mark.long
def test_a_package_that_loads_and_answers_something_else_fails_the_smoke_test(registry: Any, three: Registered, tmp_path: Path) -> None:
    promote(NAME, "1", reporter=Silent())
    version = impostor(three, tmp_path / "impostor")
    with following(tmp_path) as deployed, Load().on(deployed.server, clients=2) as load:
        registry.set_registered_model_alias(NAME, "champion", version)
        deployed.wait_for("does not answer as it was proven to")
        rollback_wanted = len(load.answers)
        assert until(lambda: len(load.answers) > rollback_wanted + 10, 60)
        assert post(deployed.server, f"{SERVED}_candidate/generate", {"text_input": "a"})[0] in (400, 404)
    assert (load.failures, load.versions(), load.wrong(three)) == ([], ["1"], [])
    assert "does not answer as it was proven to" in registry.get_model_version(NAME, version).tags["tuneline.serving.reason"]


def impostor(three: Registered, folder: Path, incumbent: str = "1") -> str:
    """A version whose package is whole and claims a proof, with the weights of another model in it."""
    shutil.copytree(three.packages[1].path, folder / "repository")
    for name in (artifacts.MANIFEST, ".unfinished"):
        (folder / "repository" / name).unlink(missing_ok=True)
    model = models.from_artifact(publish_adapter(models.open_model(tiny_model(folder / "base", seed=9)), folder / "model")).artifact
    assert model is not None
    shutil.rmtree(folder / "repository" / SERVED / "1" / "weights")
    shutil.copytree(three.packages[2].path / SERVED / "1" / "weights", folder / "repository" / SERVED / "1" / "weights")
    said = three.packages[1].manifest
    repository = artifacts.publish(
        folder / "repository", "repository", payload=lambda path: path.startswith(SERVED),
        inputs=[model.as_input()], config=said.config, seed=1, key="k", summary=said.summary,
    )  # fmt: skip
    return registered(folder, model, repository, artifacts.read(three.folder / incumbent / "model", "model"))


@pytest.mark.long
def test_a_killed_server_comes_back_and_a_killed_deployment_finds_its_state_again_without_the_registry(
    registry: Any, three: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(NAME, "1", reporter=Silent())
    with following(tmp_path) as deployed:
        deployed.triton().kill()
        deployed.wait_for("started again")
        assert until(lambda: answers(deployed, three, "1"), 90), deployed.said()
        deployed.process.kill()
        deployed.process.wait()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("TUNELINE_REGISTRY_PATIENCE", "0.5")
    with following(tmp_path) as deployed:
        assert answers(deployed, three, "1")
        deployed.wait_for("so what is served stays")


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_a_switch_comes_back_with_one_version_or_the_other_and_ends_with_the_new_one(
    registry: Any, three: Registered, tmp_path: Path
) -> None:
    promote(NAME, "1", reporter=Silent())
    with following(tmp_path) as deployed:
        promote(NAME, "2", reporter=Silent())
        folder = tmp_path / "serving" / NAME / "repository" / SERVED
        assert until((folder / "2").exists, 60)
        deployed.triton().kill()
        assert until(lambda: in_service(tmp_path) == "2" and answers(deployed, three, "2"), 180), deployed.said()


def answers(deployed: Following, three: Registered, version: str) -> bool:
    """Whether this version answers now, as it was proven to."""
    try:
        return by_http(deployed.server, PROMPTS[0]) == (version, PROMPTS[0], three.texts(version)[PROMPTS[0]])
    except (OSError, AssertionError):
        return False


def deploy(workdir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "pipelines.cli", "deploy", *arguments, "--json", "--workdir", str(workdir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, json.loads(done.stdout)["error"]


def test_what_cannot_be_deployed_is_said_and_nothing_is_left_running(registry: Any, tmp_path: Path) -> None:
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    code, error = deploy(tmp_path, NAME, *ports)
    assert (code, error["kind"]) == (1, "registry")
    assert f"{NAME} has no champion" in error["message"]
    code, error = deploy(tmp_path, NAME, "--url", "http://127.0.0.1:9")
    assert (code, error["kind"]) == (2, "usage")
    promote(NAME, "1", reporter=Silent())
    code, error = deploy(tmp_path, NAME, "--url", "http://127.0.0.1:9", "--grpc-url", "127.0.0.1:9")
    assert (code, error["kind"]) == (1, "engine_missing")
    assert "does not answer" in error["message"]
    code, error = deploy(tmp_path, "unknown", *ports)
    assert "there is no registered model unknown" in error["message"]


@pytest.mark.long
def test_the_promotion_pipeline_brings_versions_into_service_and_gives_the_alias_back_where_one_fails(
    registry: Any, three: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kfp import local

    from pipelines import promotion
    from pipelines.config import Customization

    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path))
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "kfp"))
    pipeline = promotion.build(Customization())
    repository = deploying.serving_folder(tmp_path, NAME) / "repository"
    repository.mkdir(parents=True)
    with running_server(repository, models=[], log=tmp_path / "triton.log") as server:
        released = {"by": "ann", "model_name": NAME, "triton_url": server.http_url, "triton_grpc_url": server.grpc_url}
        for version in ("1", "2"):
            pipeline(version=version, **released)
            assert by_http(server, PROMPTS[0]) == (version, PROMPTS[0], three.texts(version)[PROMPTS[0]])
        wrong = impostor(three, tmp_path / "impostor", incumbent="2")
        with pytest.raises(RuntimeError):
            pipeline(version=wrong, **released)
        assert by_http(server, PROMPTS[0])[0] == "2"
    assert str(registry.get_model_version_by_alias(NAME, "champion").version) == "2"
    assert "does not answer as it was proven to" in registry.get_model_version(NAME, wrong).tags["tuneline.serving.reason"]


@contextmanager
def elsewhere(folder: Path) -> Iterator[Server]:
    """A server that runs on its own, on the model repository of a serving folder."""
    (folder / "repository").mkdir(parents=True, exist_ok=True)
    with running_server(folder / "repository", models=[], log=folder / "elsewhere.log") as server:
        yield server


def address(server: Server) -> Address:
    return Address(server.http_url, server.grpc_url)


@contextmanager
def looking(folder: Path) -> Iterator[Deployment]:
    with deploying.opened(NAME, folder, Silent(), alias="champion", served_as="") as deployment:
        yield deployment


def said_in(folder: Path) -> str:
    return (folder / deploying.LOG).read_text(encoding="utf-8")


@pytest.mark.stress
def test_a_version_that_was_packaged_anew_is_loaded_anew_under_its_number(registry: Any, three: Registered, tmp_path: Path) -> None:
    promote(NAME, "1", reporter=Silent())
    with elsewhere(tmp_path / "serving") as server, looking(tmp_path / "serving") as deployment:
        deploying.look(deployment, address(server))
        assert repository_api.loaded_from(address(server), SERVED, "1") == three.packages[0].sha256
        anew = packaged_anew(three.packages[0], tmp_path / "anew")
        registered_again(three, anew)
        with Load().on(server, clients=4) as load:
            deploying.look(deployment, address(server))
            begun = len(load.answers)
            assert until(lambda: len(load.answers) > begun + 10, 60)
        for model in (SERVED, f"{SERVED}_stream"):
            assert repository_api.loaded_from(address(server), model, "1") == anew.sha256 != three.packages[0].sha256
        assert (load.failures, load.wrong(three), load.versions()) == ([], [], ["1"])
        assert deployment.state.serving is not None
        assert deployment.state.serving.repository_sha256 == anew.sha256


def packaged_anew(package: Artifact, folder: Path) -> Artifact:
    """The same model in a package with another setting."""
    shutil.copytree(package.path, folder)
    (folder / artifacts.MANIFEST).unlink()
    config = pbtxt.read(folder / SERVED)
    config.parameters["max_queue"].string_value = "32"
    pbtxt.write_config(folder / SERVED, config)
    said = package.manifest
    return artifacts.publish(
        folder, "repository", payload=lambda path: path.startswith(SERVED),
        inputs=said.inputs, config=said.config, seed=1, key="anew", summary=said.summary,
    )  # fmt: skip


def registered_again(three: Registered, package: Artifact) -> None:
    model, evaluation = (artifacts.read(three.folder / "1" / kind, kind) for kind in ("model", "evaluation"))
    assert register(model, evaluation, package, ModelRegistryConfig(name=NAME), reporter=Silent()).version == "1"


@pytest.mark.stress
def test_an_alias_that_is_moved_away_during_the_trial_brings_nothing_into_service(registry: Any, three: Registered, tmp_path: Path) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=Silent())
    with elsewhere(folder) as server, looking(folder) as deployment:
        deploying.look(deployment, address(server))
        promote(NAME, "2", reporter=Silent())
        with ThreadPoolExecutor() as pool:
            back = pool.submit(
                lambda: until((folder / "repository" / f"{SERVED}_candidate").exists, 60) and rollback(NAME, reporter=Silent())
            )
            deploying.look(deployment, address(server))
            assert back.result()
        assert "does not name version 2 any more" in said_in(folder)
        assert not (folder / "repository" / SERVED / "2").exists()
        deploying.look(deployment, address(server))
        assert deployment.state.serving is not None
        assert deployment.state.serving.version == "1"
        assert deployment.state.refused is None
        promote(NAME, "2", reporter=Silent())
        deploying.look(deployment, address(server))
        assert by_http(server, PROMPTS[0])[0] == "2"


@pytest.mark.stress
def test_a_server_elsewhere_that_is_started_again_serves_again_without_the_registry_and_a_left_candidate_goes(
    registry: Any, three: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=Silent())
    with elsewhere(folder) as server, looking(folder) as deployment:
        deploying.look(deployment, address(server))
        left = layout.lay_out(folder, Release("2", layout.take_in(folder, three.packages[1])), f"{SERVED}_candidate", {})
        for model in left:  # as a process that was killed in a trial leaves it
            repository_api.load(address(server), model, "2", timeout=60)
        deploying.look(deployment, address(server))
        assert not any(repository_api.is_served(address(server), model, "2") for model in left)
        assert not any((folder / "repository" / model).exists() for model in left)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with looking(folder) as deployment:
        deploying.look(deployment, Address("http://127.0.0.1:9", "127.0.0.1:9"))
        with elsewhere(folder) as server:
            deploying.look(deployment, address(server))
            for way in (by_http, by_stream):
                assert way(server, PROMPTS[0]) == ("1", PROMPTS[0], three.texts("1")[PROMPTS[0]])
    assert "version 1 is in service again" in said_in(folder)


@pytest.mark.stress
def test_what_the_machine_had_no_room_for_is_tried_again_and_what_is_served_stays(registry: Any, three: Registered, tmp_path: Path) -> None:
    folder = tmp_path / "serving"
    promote(NAME, "1", reporter=Silent())
    with elsewhere(folder) as server, looking(folder) as deployment:
        deploying.look(deployment, address(server))
        promote(NAME, "2", reporter=Silent())
        in_the_way = folder / "packages" / three.packages[1].sha256
        in_the_way.write_text("no folder can be here")
        deploying.look(deployment, address(server))
        assert "version 2 cannot be taken in now, and is tried again" in said_in(folder)
        assert deployment.state.refused is None
        assert by_http(server, PROMPTS[0])[0] == "1"
        in_the_way.unlink()
        deployment.waits = ("", 0.0)
        (folder / state.STATE).unlink()
        (folder / state.STATE).mkdir()  # state.json cannot be written: the service goes on
        deploying.look(deployment, address(server))
        assert by_http(server, PROMPTS[0])[0] == "2"
        assert "state.json cannot be written" in said_in(folder)


@pytest.mark.stress
def test_a_start_without_watch_serves_what_the_alias_names_now(registry: Any, three: Registered, tmp_path: Path) -> None:
    promote(NAME, "1", reporter=Silent())
    with following(tmp_path) as deployed:
        assert deployed.served["version"] == "1"
    promote(NAME, "2", reporter=Silent())
    with following(tmp_path, watch=False) as deployed:
        assert deployed.served["version"] == "2"
        assert answers(deployed, three, "2")


def test_a_name_that_could_leave_the_serving_folder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="is no name for a model"),
        deploying.opened(NAME, tmp_path / "serving", Silent(), alias="champion", served_as="../elsewhere"),
    ):
        pass
    assert deploying.serving_folder(tmp_path, "..").parent == tmp_path / "serving"
    assert deploying.serving_folder(tmp_path, "team/helper").parent == tmp_path / "serving"
