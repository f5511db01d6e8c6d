"""A real Triton with a tiny model, and the gateway in front of it as its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import Server, running_server
from tests.pipelines.gateway.gateway_process import GatewayProcess, running_gateway
from tests.tiny import tiny_model

SLOTS, QUEUE = 4, 4


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with a package of a tiny random model, which is not proven to save time."""
    folder = tmp_path_factory.mktemp("gateway")
    config = TritonPackagingConfig(model_name="tiny", prove=False, max_tokens=1500, slots=SLOTS, max_queue=QUEUE)
    model = model_loading.open_model(tiny_model(folder / "model"))
    package(model, folder / "repository", config, seed=1, reporter=SilentReporter())
    with running_server(folder / "repository", models=["tiny", "tiny_stream"], log=folder / "triton.log") as server:
        yield server


@pytest.fixture(scope="session")
def gateway(triton: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway without keys on a loopback port."""
    with running_gateway(triton.grpc_url, tmp_path_factory.mktemp("log") / "gateway.log") as process:
        yield process


@pytest.fixture(scope="session")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The official client, without retries."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Path of a key file that does not exist yet."""
    return tmp_path / "keys.yaml"
