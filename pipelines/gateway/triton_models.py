"""The models of a Triton server, and answers of them over gRPC.

A request is one stream of Triton's protocol: it starts at the first piece of text, and closing it cancels the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from components.triton_packaging.backends import BACKENDS
from components.triton_packaging.deployment.serving_folder import CANDIDATE_SUFFIX, STREAM_SUFFIX
from components.triton_packaging.triton_config import INPUTS, TOOLS_AS_TEXT
from pipelines.gateway.backend_protocols import BACKEND_PROTOCOLS, AnswerChunk, find_protocol
from pipelines.gateway.chat_templates import ChatTemplates
from pipelines.gateway.errors import RequestError, invalid

CATALOG_SECONDS = 1.0  # age of the list of models at which it is read again
MAX_CATALOG_SECONDS = 5.0  # age up to which a request uses the list while it is read again
CALL_TIMEOUT_SECONDS = 10.0
CANCEL_SECONDS = 2.0  # maximum time in which a model ends an answer
MAX_MESSAGE_BYTES = 64 << 20
RETRY_AFTER_SECONDS = 1
PROMPT_INPUTS = ("messages", "text_input", "apply_chat_template", "tools")
# Values of the parameter `traffic` of a deployed canary: whether it may answer, or receives copies of requests only.
CANARY, SHADOW = "canary", "shadow"

ModelStream: TypeAlias = "grpc.aio.StreamStreamCall[pb.ModelInferRequest, pb.ModelStreamInferResponse]"

logger = logging.getLogger("tuneline.gateway")


@dataclass(frozen=True)
class ServedModel:
    """A model that is ready to answer.

    Attributes:
        name: the model's name in Triton and for clients.
        adapter: LoRA adapter of a vLLM package, or "".
        registered: name in the registry, or "" for a package that was not deployed from a registry.
        version: version in the registry, or Triton's version.
        fingerprint: first digits of the model's content digest, or "".
        context: maximum number of tokens of prompt and answer, or None if the package does not state it.
        slots: number of requests in one batch, or None if the package does not state it.
        features: names of the inputs that the model supports.
        has_tool_template: whether the chat template has a place for tools.
        loaded_at: Unix time at which the gateway found the version.
        alias: the registry alias that the deployment follows, or "".
        traffic: CANARY or SHADOW for the deployment of a canary, else "".
        max_queue: number of requests that may wait for a slot, or None if the package does not state it.
        model_sha256: the model's content digest, or "".
        repository_sha256: the package's content digest, or "" for a package that was not deployed from a registry.
    """

    name: str
    adapter: str
    backend: str
    registered: str
    version: str
    fingerprint: str
    context: int | None
    slots: int | None
    features: frozenset[str]
    has_tool_template: bool
    loaded_at: int
    alias: str = ""
    traffic: str = ""
    max_queue: int | None = None
    model_sha256: str = ""
    repository_sha256: str = ""

    @property
    def client_name(self) -> str:
        """The name that clients use: an adapter of a vLLM package is a model."""
        return self.adapter or self.name

    @property
    def capacity(self) -> int | None:
        """Number of requests in the batch and in the queue, or None if the package does not state it."""
        return None if self.slots is None or self.max_queue is None else self.slots + self.max_queue


class TritonModels:
    """Client of one Triton server. Create it in the event loop that uses it.

    Args:
        address: HOST:PORT or unix:PATH.
        repository: Triton's model repository, which contains the chat templates of vLLM packages.
    """

    def __init__(self, address: str, repository: Path | None = None) -> None:
        self._templates = ChatTemplates(repository)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # After a restart of the server, connect again at once instead of after up to two minutes.
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._models: dict[str, ServedModel] = {}
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._cancelling = asyncio.Lock()
        self._running: Counter[str] = Counter()  # answers in progress of each model in Triton

    async def close(self) -> None:
        """Close the connection, and cancel unfinished answers."""
        await self._channel.close()

    async def list_models(self) -> list[ServedModel]:
        """Return the models that are ready, sorted by the name that clients use.

        The list is read again in the background when it is a second old, so that no request waits for a busy server;
        a request waits only for the first list, and for one that is too old.

        Raises:
            RequestError: the server does not answer.
        """
        age = time.monotonic() - self._read_at
        if age >= CATALOG_SECONDS and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_catalog())
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # reported if awaited
        if self._reading is not None and (age >= MAX_CATALOG_SECONDS or not self._models):
            await asyncio.shield(self._reading)
        return sorted(self._models.values(), key=lambda served: served.client_name)

    async def _read_catalog(self) -> None:
        try:
            index = await self._stub.RepositoryIndex(
                pb.RepositoryIndexRequest(ready=True), timeout=CALL_TIMEOUT_SECONDS
            )
            ready = {model.name for model in index.models if model.state == "READY"}
            names = sorted(name for name in ready if not name.endswith((STREAM_SUFFIX, CANDIDATE_SUFFIX)))
            found = [served for name in names for served in await self._read_models(name, ready)]
        except grpc.RpcError as error:
            raise _translate_rpc_error(error) from None
        # A canary's adapters must not replace those of the same name.
        found.sort(key=lambda served: not served.traffic)
        self._models = {served.client_name: served for served in found}
        self._read_at = time.monotonic()

    async def find_model(self, name: str) -> ServedModel:
        """Return the model of this name: its name for clients, or its name in the registry.

        Raises:
            RequestError: the model does not exist, or the server does not answer.
        """
        served = await self.list_models()
        for model in served:
            if name == model.client_name or (name and name == model.registered and not model.traffic):
                return model
        if not served:
            raise unavailable("no model is loaded")
        raise RequestError(
            404,
            f"the model {name!r} does not exist; /v1/models lists the models",
            code="model_not_found",
            param="model",
        )

    def get_known(self, name: str) -> ServedModel | None:
        """Return the model of this name for clients from the last list of models, or None."""
        return self._models.get(name)

    async def _read_models(self, name: str, ready: Set[str]) -> list[ServedModel]:
        """Return the model with its adapters, each as a model, if all models of its package are ready."""
        answer = await self._stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=CALL_TIMEOUT_SECONDS)
        config = answer.config
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        # A request without an adapter is answered by the base: the model's own adapter has the model's name.
        attached = json.loads(parameters.get("adapters", "{}"))
        adapters = [name if name in attached else "", *(each for each in attached if each != name)]
        context, slots, max_queue = (parameters.get(key, "") for key in ("context", "slots", "max_queue"))
        suffixes = BACKENDS[config.backend].model_suffixes if config.backend in BACKEND_PROTOCOLS else ()
        if not suffixes or any(f"{name}{suffix}" not in ready for suffix in suffixes):
            return []
        return [
            ServedModel(
                name=name,
                adapter=adapter,
                backend=config.backend,
                registered=parameters.get("registered_model", ""),
                version=parameters.get("registered_version", "1"),
                fingerprint=parameters.get("model_sha256", "")[:12],
                context=int(context) if context.isdecimal() else None,
                slots=int(slots) if slots.isdecimal() else None,
                features=find_protocol(config.backend).list_features(config),
                has_tool_template=parameters.get("tools", "") != TOOLS_AS_TEXT,
                loaded_at=self._models[name].loaded_at if name in self._models else int(time.time()),
                alias=parameters.get("registered_alias", ""),
                traffic=parameters.get("traffic", ""),
                max_queue=int(max_queue) if max_queue.isdecimal() else None,
                model_sha256=parameters.get("model_sha256", ""),
                repository_sha256=parameters.get("repository_sha256", ""),
            )
            for adapter in adapters
        ]

    async def generate(self, model: ServedModel, inputs: Mapping[str, object]) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer's chunks. Closing the iterator cancels the answer.

        Raises:
            RequestError: the model refuses the request, is overloaded, or the server does not answer.
        """
        protocol = find_protocol(model.backend)
        with self._count_answer(model, None if protocol.is_queue_bounded else model.capacity):
            if protocol.needs_rendered_prompt:
                inputs = await self._render(model, inputs)
            request = protocol.build_request(model.name, model.adapter, inputs)
            request.id = uuid.uuid4().hex
            # gRPC cancels the stream if a task is cancelled while it writes: only gRPC's own task writes the requests.
            requests: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue()
            call = self._stub.ModelStreamInfer(_iterate_requests(requests))
            messages: asyncio.Queue[pb.ModelStreamInferResponse | RequestError | None] = asyncio.Queue()
            # Read ahead of a slow client: Triton 2.51 ends with a double free if a stream is cancelled while it waits to send.
            reader = asyncio.create_task(_read_ahead(call, messages))
            self._readers.add(reader)  # the event loop keeps no reference to a task
            reader.add_done_callback(self._readers.discard)
            is_finished, error_message, chunk = False, "", None
            try:
                requests.put_nowait(request)
                if protocol.build_cancellation is None:
                    requests.put_nowait(None)
                while (message := await messages.get()) is not None:
                    if isinstance(message, RequestError):
                        raise message
                    # A finished answer is read to the end of its stream: Triton 2.51 counts it as running if it is cancelled.
                    if message.error_message:
                        is_finished, error_message = True, message.error_message
                        requests.put_nowait(None)
                    elif not is_finished:
                        chunk = protocol.read_chunk(message.infer_response, chunk)
                        is_finished = bool(chunk.finish_reason)
                        if is_finished:
                            requests.put_nowait(None)
                        yield chunk
            finally:
                if not is_finished and protocol.build_cancellation is not None:
                    # A version that is being unloaded does not receive the request: its answer is read to the end.
                    requests.put_nowait(protocol.build_cancellation(request))
                    requests.put_nowait(None)
                    await asyncio.wait([reader], timeout=CANCEL_SECONDS)
                    if not reader.done():
                        logger.warning("cancellation_ignored model=%s version=%s", model.name, model.version)
                elif not is_finished:
                    async with self._cancelling:  # several at the same time may end Triton 2.51 (CVE-2025-23322)
                        call.cancel()
                        await asyncio.wait([reader])
            if error_message:
                raise translate_model_error(error_message)
            if not is_finished:
                raise RequestError(502, "the model closed the stream before the end of the answer", code="model_error")

    @contextmanager
    def _count_answer(self, model: ServedModel, limit: int | None) -> Iterator[None]:
        """Count an answer of the model for the time of the block. Raise RequestError if `limit` is reached."""
        if limit is not None and self._running[model.name] >= limit:
            raise overloaded()
        self._running[model.name] += 1
        try:
            yield
        finally:
            self._running[model.name] -= 1

    async def _render(self, model: ServedModel, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the inputs with the rendered conversation as text_input."""
        rendered = {key: value for key, value in inputs.items() if key not in PROMPT_INPUTS}
        if "messages" in inputs:
            tools = str(inputs["tools"]) if "tools" in inputs else None
            text = await self._templates.render(
                model.name, model.version, model.fingerprint, str(inputs["messages"]), tools
            )
            return {**rendered, "text_input": text}
        return {**rendered, "text_input": inputs["text_input"]}


async def _iterate_requests(
    requests: asyncio.Queue[pb.ModelInferRequest | None],
) -> AsyncIterator[pb.ModelInferRequest]:
    """Yield the requests of a stream until None."""
    while (request := await requests.get()) is not None:
        yield request


async def _read_ahead(
    call: ModelStream,
    messages: asyncio.Queue[pb.ModelStreamInferResponse | RequestError | None],
) -> None:
    """Put the messages of a stream into the queue as they arrive; at its end None or the error."""
    try:
        async for message in call:
            messages.put_nowait(message)
        messages.put_nowait(None)
    except grpc.RpcError as error:
        messages.put_nowait(_translate_rpc_error(error))


def translate_model_error(message: str) -> RequestError:
    """Return the error for a message of the model; a stream has no status codes.

    Messages about the server's inside are replaced.
    """
    if "slots and queue positions are occupied" in message:
        return overloaded()
    if any(
        words in message
        for words in ("being unloaded", "is not loaded", "is stopping", "unknown model", "not ready", "no version")
    ):
        return unavailable("the model is being replaced or unloaded")
    if any(words in message for words in ("internal error", "closed the connection", "stub process")):
        return RequestError(500, "the model failed to answer; see the server's log", code="model_error")
    name = message.split(" ", 1)[0]
    return invalid(message, name if name in INPUTS else None)


def overloaded() -> RequestError:
    """Return the error for a model whose queue is full."""
    return RequestError(
        429, "all slots and queue positions are occupied", code="overloaded", retry_after=RETRY_AFTER_SECONDS
    )


def unavailable(message: str) -> RequestError:
    """Return the error for a server that cannot answer now."""
    return RequestError(503, message, code="unavailable", retry_after=RETRY_AFTER_SECONDS)


def _translate_rpc_error(error: grpc.RpcError) -> RequestError:
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return unavailable("the model server does not respond")
    return RequestError(502, "the model server failed; see its log", code="model_error")
