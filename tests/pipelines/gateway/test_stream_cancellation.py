"""How the gateway ends an answer: with a cancel request, never by cancelling Triton's stream.

Several streams cancelled at the same time may end Triton 2.51, which cannot be provoked at will: a gRPC server in the
test's process stands in for it, and records how each stream ended. In `make test`, because it takes no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from pipelines.gateway.triton_models import ServedModel, TritonModels

MODEL = ServedModel(
    name="tiny",
    adapter="",
    backend="python",
    registered="",
    version="1",
    fingerprint="",
    context=None,
    slots=None,
    features=frozenset(),
    has_tool_template=True,
    loaded_at=0,
)


class RecordingServer:
    """Answers nothing until a cancel request arrives. Counts streams by their end."""

    def __getattr__(self, name: str) -> None:
        """Triton's other methods are not called."""

    def __init__(self) -> None:
        self.open = self.cancelled = self.completed = 0

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        self.open += 1
        try:
            async for request in requests:
                if "cancel" in request.parameters:
                    yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id))
            self.completed += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1


def test_a_client_that_hangs_up_at_any_moment_cancels_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask_and_hang_up(models: TritonModels, turns: int) -> None:
        task = asyncio.create_task(anext(models.generate(MODEL, {"text_input": "Hello"})))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def run() -> None:
        server, servicer = grpc.aio.server(), RecordingServer()
        add_GRPCInferenceServiceServicer_to_server(servicer, server)
        address = f"unix:{tmp_path}/grpc"
        server.add_insecure_port(address)
        await server.start()
        models = TritonModels(address)
        for turns in range(60):
            await asyncio.gather(*(ask_and_hang_up(models, turns) for _ in range(8)))
        async with asyncio.timeout(10):
            while servicer.open:
                await asyncio.sleep(0.01)
        await models.close()
        await server.stop(None)
        assert servicer.cancelled == 0
        assert servicer.completed >= 200

    asyncio.run(run())
    assert "cancellation_ignored" not in caplog.text
