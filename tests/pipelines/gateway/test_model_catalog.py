"""The gateway's list of models: read once for all requests, and never waited for while a recent list exists."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from pipelines.gateway import triton_models
from pipelines.gateway.errors import RequestError
from pipelines.gateway.triton_models import TritonModels


class FakeStub:
    """Triton's repository calls. `delay` in seconds; `is_down` makes them fail."""

    def __init__(self) -> None:
        self.calls, self.delay, self.is_down = 0, 0.0, False
        self.names = ["tiny", "tiny_stream", "tiny_candidate"]

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, timeout: float) -> pb.RepositoryIndexResponse:
        self.calls += 1
        await asyncio.sleep(self.delay)
        if self.is_down:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        models = [pb.RepositoryIndexResponse.ModelIndex(name=name, state="READY") for name in self.names]
        return pb.RepositoryIndexResponse(models=models)

    async def ModelConfig(self, request: pb.ModelConfigRequest, timeout: float) -> pb.ModelConfigResponse:
        config = model_config_pb2.ModelConfig(name=request.name, backend="python")
        config.parameters["registered_version"].string_value = str(self.calls)
        return pb.ModelConfigResponse(config=config)


async def open_models() -> tuple[TritonModels, Any]:
    models, stub = TritonModels("127.0.0.1:9"), FakeStub()
    models._stub = stub
    return models, stub


def test_many_requests_read_the_list_once() -> None:
    async def run() -> None:
        models, stub = await open_models()
        stub.delay = 0.01
        lists = await asyncio.gather(*(models.list_models() for _ in range(50)))
        assert stub.calls == 1
        assert {each.name for found in lists for each in found} == {"tiny"}

    asyncio.run(run())


def test_a_model_whose_streaming_model_still_loads_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_models, "CATALOG_SECONDS", 0.0)

    async def run() -> None:
        models, stub = await open_models()
        stub.names = ["tiny"]
        assert await models.list_models() == []
        stub.names = ["tiny", "tiny_stream"]
        assert [each.name for each in await models.list_models()] == ["tiny"]

    asyncio.run(run())


def test_an_old_list_is_used_while_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        models, stub = await open_models()
        await models.list_models()
        monkeypatch.setattr(triton_models, "CATALOG_SECONDS", 0.0)
        stub.delay = 0.05
        async with asyncio.timeout(0.04):
            assert (await models.find_model("tiny")).version == "1"
        await asyncio.sleep(0.1)
        assert (await models.find_model("tiny")).version == "2"

    asyncio.run(run())


def test_a_server_that_stays_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        models, stub = await open_models()
        await models.list_models()
        stub.is_down = True
        monkeypatch.setattr(triton_models, "CATALOG_SECONDS", 0.0)
        assert await models.list_models()
        monkeypatch.setattr(triton_models, "MAX_CATALOG_SECONDS", 0.0)
        with pytest.raises(RequestError, match="does not respond"):
            await models.list_models()
        stub.is_down = False
        assert await models.list_models()

    asyncio.run(run())
