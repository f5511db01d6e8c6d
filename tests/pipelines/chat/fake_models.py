"""The gateway with models that answer from a script, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn

from pipelines.capture.settings import CaptureSettings
from pipelines.gateway.api_keys import KeyRing
from pipelines.gateway.application import Gateway, create_application
from pipelines.gateway.errors import RequestError
from pipelines.gateway.feedback import FeedbackFile
from pipelines.gateway.triton_models import AnswerChunk, ServedModel, TritonModels, unavailable

CODE = 'Run this:\n```python\nprint("<b>bold</b>")\n```\nand <img src=x onerror="document.title=1"> stays text.'


class FakeModels:
    """Two models. A model repeats its inputs; some messages have a special answer."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("echo", "other")
        self.requests: list[dict[str, Any]] = []
        self.finished = 0
        self.is_down = False

    async def list_models(self) -> list[ServedModel]:
        if self.is_down:
            raise unavailable("the model server does not respond")
        return self._list()

    def _list(self) -> list[ServedModel]:
        inputs = frozenset({"messages", "seed", "temperature", "max_tokens"})
        return [
            ServedModel(name, "", "python", f"registered-{name}", str(7 + number), "", 2048, None, inputs, True, 0)
            for number, name in enumerate(self.names)
        ]

    def get_known(self, name: str) -> ServedModel | None:
        return next((model for model in self._list() if model.name == name), None)

    async def find_model(self, name: str) -> ServedModel:
        for model in await self.list_models():
            if name in (model.name, model.registered):
                return model
        raise RequestError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")

    async def generate(self, model: ServedModel, inputs: Mapping[str, Any]) -> AsyncIterator[AnswerChunk]:
        messages = json.loads(inputs["messages"])
        self.requests.append({"model": model.name, **inputs, "messages": messages})
        said = messages[-1]["content"]
        settings = {name: value for name, value in inputs.items() if name != "messages"}
        pieces = [f"{model.name} ", f"{len(messages)} ", f"{json.dumps(settings)} ", said]
        if said == "refuse":
            raise RequestError(400, "the prompt has 9000 tokens; at most 2048 are allowed", code="invalid_value")
        if said == "code":
            pieces = [CODE[start : start + 5] for start in range(0, len(CODE), 5)]
        if said == "endless":
            pieces = ["word "] * 100_000
        if said == "controls":
            pieces = ["red \x1b[31", "m and \x07 bell"]
        for number, piece in enumerate(pieces, start=1):
            if said in ("break", f"break {model.name}") and number == 3:
                raise RequestError(500, "the model failed to answer", code="model_error")
            reason = "stop" if number == len(pieces) else ""
            yield AnswerChunk(piece, reason, 10, number, model.version, [])
            await asyncio.sleep(0.01 if said == "endless" else 0.001)
        self.finished += 1


@contextmanager
def running_gateway(
    models: FakeModels,
    *,
    feedback: Path | None = None,
    keys: Path | None = None,
    max_feedback_bytes: int = 1 << 20,
    capture: CaptureSettings | None = None,
    routes: Path | None = None,
) -> Iterator[str]:
    """Yield the URL of a gateway on a free port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    file = FeedbackFile(feedback, max_feedback_bytes) if feedback else None
    gateway = Gateway(cast(TritonModels, models), KeyRing(keys), feedback=file, capture_settings=capture, routes=routes)
    config = uvicorn.Config(create_application(gateway), log_config=None, access_log=False, ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        if gateway.capture is not None:
            gateway.capture.close()
        listener.close()
