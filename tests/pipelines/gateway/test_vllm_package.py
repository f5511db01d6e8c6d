"""A vLLM package behind the gateway: the chat template is rendered by the gateway, and adapters are models.

On machines without vLLM the tests use the STAND-IN of tests/triton_packaging, which is not vLLM. In the long tier,
because a package with two adapters is proven and served.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import running_server
from tests.pipelines.gateway.gateway_process import GatewayProcess, running_gateway
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import publish_adapter
from tests.triton_packaging.test_vllm_backend import vllm

__all__ = ["vllm"]
pytestmark = [pytest.mark.triton, pytest.mark.long]
MESSAGES: Any = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def package_folder(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a tiny model with two adapters; its golden answers are in proof.json."""
    folder = tmp_path_factory.mktemp("vllm")
    base = model_loading.open_model(tiny_model(folder / "model"))
    first, second = (
        model_loading.open_model_artifact(publish_adapter(base, folder / f"adapter-{seed}", seed=seed))
        for seed in (1, 2)
    )
    config = TritonPackagingConfig(
        backend="vllm",
        model_name="two",
        golden_prompts=["What is a list?"],
        golden_max_tokens=12,
        slots=2,
        max_queue=1,
    )
    return package(
        first, folder / "repository", config, seed=1, reporter=SilentReporter(), adapters={"other": second}
    ).path


@pytest.fixture(scope="module")
def vllm_gateway(package_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway in front of the package."""
    log = tmp_path_factory.mktemp("log")
    with (
        running_server(package_folder, log=log / "triton.log") as server,
        running_gateway(server.grpc_url, log / "gateway.log", "--repository", str(package_folder)) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def client(vllm_gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The official client of the gateway."""
    with openai.OpenAI(base_url=f"{vllm_gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_adapters_are_models_with_the_proven_answers(client: openai.OpenAI, package_folder: Path) -> None:
    assert [model.id for model in client.models.list()] == ["other", "two"]
    proven = {
        each.get("adapter", ""): each for each in json.loads((package_folder / "proof.json").read_text())["answers"]
    }
    assert proven["two"]["text"] != proven["other"]["text"]
    for name in ("two", "other"):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=12)
        assert answer.choices[0].message.content == proven[name]["text"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == proven[name]["prompt_tokens"]
        assert answer.usage.completion_tokens == 12


def test_a_stream_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="two", messages=MESSAGES, max_tokens=12)
    events = list(
        client.chat.completions.create(
            model="two", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage == whole.usage


def test_completions_take_the_text_as_it_is(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="two", prompt="def f(", max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_what_the_backend_cannot_do_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support logprobs"):
        client.chat.completions.create(model="two", messages=MESSAGES, logprobs=True)


def test_the_gateway_bounds_the_queue_of_vllm(client: openai.OpenAI, vllm_gateway: GatewayProcess) -> None:
    """Adapters share the slots of their model."""

    def complete(name: str, tokens: int) -> int:
        answer = client.completions.create(model=name, prompt="def f(", max_tokens=tokens)
        assert answer.usage is not None
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(complete, name, 1000) for name in ("two", "other", "two")]
        deadline = time.monotonic() + 60
        while vllm_gateway.count_running() < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(openai.RateLimitError, match="all slots and queue positions are occupied") as error:
            complete("other", 1)
        assert error.value.response.headers["retry-after"] == "1"
        assert [answer.result() for answer in answers] == [1000, 1000, 1000]
    assert complete("other", 1) == 1
