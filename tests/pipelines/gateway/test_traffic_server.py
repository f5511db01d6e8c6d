"""Routes of a gateway before a real Triton. Two models in one server are in the stress tier: they start a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import triton_config
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import Server, running_server
from pipelines.gateway import api_keys
from pipelines.gateway.traffic_routes import set_route
from tests.pipelines.gateway.gateway_process import CHAT, GatewayProcess, running_gateway
from tests.tiny import tiny_model

pytestmark = pytest.mark.triton
MESSAGES = [{"role": "user", "content": "Hello"}]
FAILING_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            error = pb_utils.TritonError("internal error: the weights are not finite")
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def ask(gateway: GatewayProcess, model: str = "tiny", key: str = "", **fields: Any) -> tuple[int, str]:
    """Return the status and the text or the error of an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4, **fields}
    status, _, content = gateway.send("POST", CHAT, body, headers)
    answer = json.loads(content)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["message"]


def read_targets(gateway: GatewayProcess, route: int = 0) -> list[dict[str, Any]]:
    """Return the state of a route's targets."""
    content = gateway.send("GET", "/v1/routes")[2]
    targets: list[dict[str, Any]] = json.loads(content)["routes"][route]["targets"]
    return targets


def test_routes_fall_back_and_change_while_the_gateway_runs(triton: Server, tmp_path: Path) -> None:
    routes, keys = tmp_path / "routes.yaml", tmp_path / "keys.yaml"
    user = api_keys.create_key(keys, "user", {"models": ["assistant"]})
    operator = api_keys.create_key(keys, "operator", {"scopes": ["traffic"]})
    set_route(
        routes, "assistant", {"targets": [{"model": "tiny", "alias": "stable"}, {"model": "absent", "weight": 9}]}
    )
    with running_gateway(triton.grpc_url, tmp_path / "log", "--keys", str(keys), "--routes", str(routes)) as gateway:
        texts = {ask(gateway, name, user) for name in ("assistant", "assistant", "assistant@stable")}
        assert len(texts) == 1
        assert texts.pop()[0] == 200
        assert [ask(gateway, name, user)[0] for name in ("tiny", "assistant@next")] == [403, 404]
        models = gateway.send("GET", "/v1/models", None, {"Authorization": f"Bearer {user}"})[2]
        assert [model["id"] for model in json.loads(models)["data"]] == ["assistant"]
        assert gateway.send("GET", "/v1/routes", None, {"Authorization": f"Bearer {user}"})[0] == 403
        status, _, content = gateway.send("GET", "/v1/routes", None, {"Authorization": f"Bearer {operator}"})
        stable, canary = json.loads(content)["routes"][0]["targets"]
        assert (status, stable["requests"], stable["loaded"], canary["loaded"]) == (200, 3, True, False)
        routes.write_text("routes: {}")
        deadline = time.monotonic() + 10
        while ask(gateway, "assistant", user)[0] != 404:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_an_invalid_routing_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "routes.yaml").write_text("routes: {tiny: {}}")
    command = [sys.executable, "-m", "pipelines.cli", "gateway", "--grpc-url", "x:1", "--http-port", "0", "--json"]
    run = subprocess.run(
        [*command, "--routes", str(tmp_path / "routes.yaml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert "routes.tiny.targets" in json.loads(run.stdout)["error"]["message"]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models tiny and tiny-candidate, and tiny-broken, whose answers fail, in three repositories."""
    folder = tmp_path_factory.mktemp("two models")
    for number, name in enumerate(("tiny", "tiny-candidate"), start=1):
        config = TritonPackagingConfig(model_name=name, prove=False, max_tokens=64, slots=4, max_queue=4)
        model = model_loading.open_model(tiny_model(folder / f"model {number}", seed=number))
        package(model, folder / name, config, seed=1, reporter=SilentReporter())
    broken = folder / "broken" / "tiny-broken"
    for suffix in ("", triton_config.stream_model_name("")):
        target = broken.with_name(f"{broken.name}{suffix}")
        source = folder / "tiny" / f"tiny{suffix}"
        shutil.copytree(source, target)
        config_file = triton_config.read_config(source)
        config_file.name = target.name
        triton_config.write_config(target, config_file)
        if suffix:
            (target / "1" / "model.py").unlink()
            (target / "1" / "model.py").write_text(FAILING_MODEL)
    names = [f"{name}{suffix}" for name in ("tiny", "tiny-candidate", "tiny-broken") for suffix in ("", "_stream")]
    with running_server(
        folder / "tiny",
        other_repositories=[folder / "tiny-candidate", folder / "broken"],
        models=names,
        log=folder / "triton.log",
    ) as server:
        yield server


@pytest.mark.stress
def test_canaries_shadows_and_aborts_on_a_real_server(two_models: Server, tmp_path: Path) -> None:
    routes = tmp_path / "routes.yaml"
    both = [{"model": "tiny", "alias": "champion"}, {"model": "tiny-candidate", "alias": "candidate"}]
    set_route(routes, "tiny", {"targets": both, "sticky": "user"})
    shadow = {"model": "tiny-candidate", "share": 1}
    set_route(routes, "mirrored", {"targets": both[:1], "shadow": shadow})
    set_route(routes, "broken", {"targets": [both[0], {"model": "tiny-broken"}], "abort": {"min_requests": 10}})
    log = tmp_path / "log"
    with running_gateway(two_models.grpc_url, log, "--routes", str(routes)) as gateway:
        texts = {name: ask(gateway, f"tiny@{name}")[1] for name in ("champion", "candidate")}
        assert texts["champion"] != texts["candidate"] == ask(gateway, "tiny-candidate")[1]
        for user in range(8):
            answers = {ask(gateway, user=f"user-{user}")[1] for _ in range(3)}
            assert len(answers) == 1
            assert answers <= set(texts.values())
        assert [target["requests"] for target in read_targets(gateway)] != [26, 0]

        for _ in range(5):
            assert ask(gateway, "mirrored") == (200, texts["champion"])
            time.sleep(0.3)
        outcomes = json.loads(gateway.send("GET", "/v1/routes")[2])["routes"][1]["shadow"]["answers"]
        assert outcomes == {"different": 5}

        statuses = Counter(ask(gateway, "broken", stream=False)[0] for _ in range(80))
        assert set(statuses) == {200, 500}
        assert 10 <= statuses[500] <= 40
        assert read_targets(gateway, 2)[1]["aborted"]["reason"] == "error rate"
        assert {ask(gateway, "broken")[0] for _ in range(10)} == {200}
        metrics = gateway.send("GET", "/metrics")[2].decode()
        abort = 'tuneline_gateway_canary_aborts_total{model="tiny-broken",reason="error rate",route="broken"} 1.0'
        assert abort in metrics
        assert log.read_text().count("canary_aborted route=broken model=tiny-broken") == 1
    with running_gateway(two_models.grpc_url, log, "--routes", str(routes)) as gateway:
        assert {ask(gateway, "broken")[0] for _ in range(10)} == {200}
