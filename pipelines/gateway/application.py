"""The gateway's routes: authentication, limits, answers, models, health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from components.common.models.tool_messages import describe_tools
from pipelines.capture.settings import CaptureSettings
from pipelines.gateway import chat_page, openai_requests
from pipelines.gateway.addresses import is_loopback
from pipelines.gateway.api_keys import ANONYMOUS, ApiKey, KeyRing, Scope
from pipelines.gateway.completions import CHAT, TEXT, Completion, ResponseForm, encode_event
from pipelines.gateway.errors import RequestError
from pipelines.gateway.feedback import AnswerOrigin, FeedbackFile, parse_feedback
from pipelines.gateway.openai_requests import GenerationCall
from pipelines.gateway.telemetry import AnswerMeasures, GatewayMetrics
from pipelines.gateway.tracing import start_span
from pipelines.gateway.traffic_capture import CapturedRequest, TrafficCapture
from pipelines.gateway.traffic_routing import RoutedAnswer, TrafficRouter
from pipelines.gateway.triton_models import ServedModel, TritonModels, unavailable

BODY_SECONDS = 30.0
LAST_EVENT_SECONDS = 1.0  # for the error event of a stream that took too long
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")
VERSION_HEADER = "x-tuneline-model-version"

T = TypeVar("T")

logger = logging.getLogger("tuneline.gateway")


@dataclass
class Gateway:
    """What all requests share.

    Attributes:
        triton: the model server.
        keys: keys and their use.
        max_body_bytes: limit of a request's body.
        request_seconds: limit of the time for one answer.
        metrics_socket: Unix socket of Triton's metrics, which are appended to the gateway's, or None.
        feedback: file of the feedback on answers, or None: feedback is refused.
        routes: the routing file, or None.
        capture_settings: the settings of captured traffic, or None: nothing is captured.
        is_stopping: whether the server received a stop signal: it is not ready, and closes the connection of each answer.
        is_draining: whether the shutdown delay is over: the server finishes its answers and accepts no request.
    """

    triton: TritonModels
    keys: KeyRing
    max_body_bytes: int = 4 << 20
    request_seconds: float = 600.0
    metrics_socket: Path | None = None
    feedback: FeedbackFile | None = None
    routes: Path | None = None
    capture_settings: CaptureSettings | None = None
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    is_stopping: bool = False
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.traffic = TrafficRouter(self.triton, self.routes, self.metrics.registry, self.request_seconds)
        settings = self.capture_settings
        self.capture = None if settings is None else TrafficCapture(settings, self.metrics.registry)

    def start_draining(self) -> None:
        """Accept no further request."""
        self.is_draining = True
        self.metrics.draining.set(1)


@dataclass
class RequestLog:
    """The fields of a request's log line and metrics."""

    request_id: str
    endpoint: str
    span: Span = INVALID_SPAN
    key: ApiKey = ANONYMOUS
    model: str = ""
    version: str = ""
    status: int = 200
    measures: AnswerMeasures = field(default_factory=AnswerMeasures)
    routed: RoutedAnswer | None = None
    captured: CapturedRequest | None = None
    completion: Completion | None = None
    began: float = field(default_factory=time.perf_counter)

    def finish(self, metrics: GatewayMetrics) -> None:
        """Write the log line and add the request to the metrics."""
        seconds, measures = time.perf_counter() - self.began, self.measures
        labels = (self.model, self.version, self.key.name)
        metrics.requests.labels(self.endpoint, str(self.status), *labels).inc()
        if measures.first_seconds is not None:
            measures.publish(metrics, labels, seconds)
        self.span.set_attributes(
            {
                "http.response.status_code": self.status,
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": f"{self.model}:{self.version}",
                "gen_ai.usage.input_tokens": measures.total_prompt_tokens,
                "gen_ai.usage.output_tokens": measures.total_completion_tokens,
                "tuneline.request_id": self.request_id,
                "tuneline.key": self.key.name,
                "tuneline.first_token_seconds": measures.first_seconds or 0.0,
            }
        )
        if self.status >= 500:
            self.span.set_status(StatusCode.ERROR)
        self.span.end()
        logger.info(
            "request id=%s endpoint=%s key=%s model=%s version=%s status=%d seconds=%.3f first_token_seconds=%s "
            "prompt_tokens=%d completion_tokens=%d",
            self.request_id, self.endpoint, self.key.name, self.model or "-", self.version or "-", self.status, seconds,
            "-" if measures.first_seconds is None else f"{measures.first_seconds:.3f}",
            measures.total_prompt_tokens, measures.total_completion_tokens,
        )  # fmt: skip


def create_application(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application."""
    routes = [
        Route("/v1/chat/completions", partial(chat, gateway), methods=["POST"]),
        Route("/v1/completions", partial(complete, gateway), methods=["POST"]),
        Route("/v1/embeddings", partial(embed, gateway), methods=["POST"]),
        Route("/v1/feedback", partial(take_feedback, gateway), methods=["POST"]),
        Route("/v1/models", partial(list_models, gateway)),
        Route("/v1/models/{model:path}", partial(get_model, gateway)),
        Route("/v1/routes", partial(describe_routes, gateway)),
        Route("/health/live", partial(live, gateway)),
        Route("/health/ready", partial(ready, gateway)),
        Route("/metrics", partial(metrics, gateway)),
        *chat_page.create_routes(has_feedback=gateway.feedback is not None),
    ]
    application = Starlette(
        routes=routes,
        exception_handlers={RequestError: handle_request_error, HTTPException: handle_http_error, 500: handle_failure},
    )

    async def close_connections(scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send `Connection: close` while the gateway stops, so that clients reconnect to another server."""

        async def send_closing(message: Message) -> None:
            if gateway.is_stopping and message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["connection"] = "close"
            await send(message)

        await application(scope, receive, send_closing)

    return close_connections


async def chat(gateway: Gateway, request: Request) -> Response:
    """Answer a conversation."""
    return await answer(gateway, request, "chat", CHAT, openai_requests.parse_chat)


async def complete(gateway: Gateway, request: Request) -> Response:
    """Continue texts."""
    return await answer(gateway, request, "completions", TEXT, openai_requests.parse_completion)


async def answer(
    gateway: Gateway, request: Request, endpoint: str, form: ResponseForm, parse: Callable[[Any], GenerationCall]
) -> Response:
    """Check a request, generate its answers, and return or stream them. Every request is logged once, with its status."""
    span = start_span(request, "chat" if form.is_chat else "text_completion")
    log = RequestLog(read_request_id(request), endpoint, span)
    try:
        check_origin(gateway, request)
        log.key = gateway.keys.authenticate(request.headers.get("authorization", ""), "inference")
        if gateway.is_draining:
            raise unavailable("the server is stopping")
        content = await read_body(gateway, request)
        body = openai_requests.parse_json(content)
        call = parse(body)
        subject = "" if log.key is ANONYMOUS else log.key.name
        assignment = await gateway.traffic.assign(call.model, key=subject, body=body, headers=request.headers)
        model = assignment.model
        log.model, log.version = model.client_name, model.version
        check_support(model, call)
        call = adapt_tools(model, call)
        gateway.keys.admit(log.key, assignment.name)
    except RequestError as error:
        return finish_with_error(gateway, log, error)
    except ClientDisconnect:
        return finish_with_error(gateway, log, RequestError(499, "the client disconnected", code="client_disconnected"))
    except Exception:
        log.status = 500
        log.finish(gateway.metrics)
        raise
    log.measures.choices = call.choices
    if gateway.capture is not None:
        log.captured = gateway.capture.select(log.model, body, len(content), request.headers, log.key.name)
    gateway.metrics.running.inc()
    deadline = asyncio.get_running_loop().time() + gateway.request_seconds
    completion = log.completion = Completion(gateway.triton, model, call, form, log.measures)
    log.routed = gateway.traffic.begin(assignment, completion, log.measures)
    try:
        async with asyncio.timeout_at(deadline):
            if call.stream:
                events = completion.stream()
                first = await run_until_disconnect(request, anext(events))
            else:
                result = await run_until_disconnect(request, completion.answer())
    except (RequestError, TimeoutError) as error:
        shown = error if isinstance(error, RequestError) else timeout_error()
        log.status = shown.status
        finish_answer(gateway, log)
        return error_response(shown, log)
    except BaseException as error:
        log.status = 500 if isinstance(error, Exception) else 499
        finish_answer(gateway, log)
        raise
    note_origin(gateway, log, completion)
    if call.stream:
        return EventStream(first, events, completion, log, deadline, partial(finish_answer, gateway))
    finish_answer(gateway, log)
    return JSONResponse(result, headers=build_headers(log))


def note_origin(gateway: Gateway, log: RequestLog, completion: Completion) -> None:
    """Record the version that answered, for the log and for feedback."""
    log.version = completion.version
    if gateway.feedback is not None:
        gateway.feedback.remember(completion.id, AnswerOrigin(log.model, log.version, log.key.name))


def finish_answer(gateway: Gateway, log: RequestLog) -> None:
    """Release the slot and the limits of a request after its generation has ended, and log it."""
    gateway.keys.release(log.key, log.measures.total_prompt_tokens + log.measures.total_completion_tokens)
    gateway.metrics.running.dec()
    capture_shadow: partial[bool] | None = None
    if gateway.capture is not None and log.captured is not None and log.completion is not None:
        capture, seconds = partial(gateway.capture.submit, log.captured), time.perf_counter() - log.began
        if capture(log.completion, log.status, seconds, log.measures.first_seconds):
            capture_shadow = partial(capture, shadowed=log.completion)
    if log.routed is not None:
        gateway.traffic.finish(log.routed, log.status, capture_shadow)
    log.finish(gateway.metrics)


def finish_with_error(gateway: Gateway, log: RequestLog, error: RequestError) -> Response:
    """Log a request that was refused, and return its error."""
    log.status = error.status
    log.finish(gateway.metrics)
    return error_response(error, log)


async def list_models(gateway: Gateway, request: Request) -> Response:
    """List the models that the key may use."""
    key = authorize(gateway, request, "inference")
    served = await gateway.traffic.list_models()
    allowed = [(name, model) for name, model in served if not key.models or name in key.models]
    return JSONResponse({"object": "list", "data": [describe_model(model, name) for name, model in allowed]})


async def get_model(gateway: Gateway, request: Request) -> Response:
    """Describe one model."""
    key = authorize(gateway, request, "inference")
    served = dict(await gateway.traffic.list_models())
    name = request.path_params["model"]
    if key.models and name not in key.models:
        raise RequestError(403, f"the key {key.name} may not use the model {name!r}", code="model_not_allowed")
    if name in served:
        return JSONResponse(describe_model(served[name], name))
    model = (await gateway.traffic.assign(name)).model
    return JSONResponse(describe_model(model, model.client_name))


async def describe_routes(gateway: Gateway, request: Request) -> Response:
    """Return the state of the traffic routes."""
    authorize(gateway, request, "traffic")
    return JSONResponse(await gateway.traffic.describe())


async def embed(gateway: Gateway, request: Request) -> Response:
    """Refuse embeddings."""
    authorize(gateway, request, "inference")
    raise RequestError(404, "no served model computes embeddings", code="model_not_found", param="model")


async def take_feedback(gateway: Gateway, request: Request) -> Response:
    """Store the feedback on an answer."""
    log = RequestLog(read_request_id(request), "feedback")
    try:
        log.key = authorize(gateway, request, "inference")
        if gateway.is_draining:
            raise unavailable("the server is stopping")
        if gateway.feedback is None:
            raise RequestError(
                404, "this gateway does not store feedback; start it with --feedback FILE", code="not_found"
            )
        feedback = parse_feedback(openai_requests.parse_json(await read_body(gateway, request)))
        if gateway.capture is not None and feedback.author is not None:
            feedback = feedback.model_copy(update={"author": gateway.capture.hash_author(feedback.author)})
        origin = gateway.feedback.find_origin(feedback.id, log.key.name)
        if origin is not None:
            log.model, log.version = origin.model, origin.version
        gateway.keys.admit(log.key, None)  # the answer was given to this key, or its origin is unknown
        try:
            await asyncio.to_thread(gateway.feedback.append, feedback, origin, log.key.name)
        finally:
            gateway.keys.release(log.key, tokens=0)
    except RequestError as error:
        return finish_with_error(gateway, log, error)
    except ClientDisconnect:
        return finish_with_error(gateway, log, RequestError(499, "the client disconnected", code="client_disconnected"))
    log.finish(gateway.metrics)
    return JSONResponse({"id": feedback.id, "stored": True}, headers=build_headers(log))


async def live(gateway: Gateway, request: Request) -> Response:
    """Answer a liveness probe: the process runs."""
    return PlainTextResponse("ok\n")


async def ready(gateway: Gateway, request: Request) -> Response:
    """Answer a readiness probe: whether requests can be answered."""
    if gateway.is_stopping or not await gateway.traffic.is_ready():
        raise unavailable("the server is stopping" if gateway.is_stopping else "no model is loaded")
    return PlainTextResponse("ok\n")


async def metrics(gateway: Gateway, request: Request) -> Response:
    """Return the gateway's metrics, followed by Triton's."""
    authorize(gateway, request, "metrics")
    try:
        models = await gateway.triton.list_models()
    except RequestError:
        models = []  # Triton does not answer: no model is ready
    gateway.metrics.record_models(models)
    text = generate_latest(gateway.metrics.registry)
    if gateway.metrics_socket is not None:
        text += await read_unix_metrics(gateway.metrics_socket)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def authorize(gateway: Gateway, request: Request, scope: Scope) -> ApiKey:
    """Return the request's key.

    Raises:
        RequestError: the key is missing or unknown, or lacks the scope.
    """
    check_origin(gateway, request)
    return gateway.keys.authenticate(request.headers.get("authorization", ""), scope)


class EventStream(StreamingResponse):
    """A stream of events that ends with its answer, at the deadline, or when the client disconnects.

    The deadline covers the sending too: a client that does not read must not keep its slot.

    Args:
        first: the first event.
        events: the further events.
        completion: the answer; its error is that of the stream.
        log: receives the status.
        deadline: in the event loop's time.
        on_end: called exactly once, after the generation has ended.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        completion: Completion,
        log: RequestLog,
        deadline: float,
        on_end: Callable[[RequestLog], None],
    ) -> None:
        self._events, self._completion, self._log = events, completion, log
        self._deadline, self._on_end, self._is_complete = deadline, on_end, False
        headers = {**build_headers(log), "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._read(first), media_type="text/event-stream", headers=headers)

    async def _read(self, first: bytes) -> AsyncGenerator[bytes, None]:
        yield first
        async for event in self._events:
            yield event
        self._is_complete = True

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        self._log.status = 499  # nginx's code for a client that disconnected
        try:
            async with asyncio.timeout_at(self._deadline):
                await super().__call__(scope, receive, send)
            if self._is_complete:
                self._log.status = self._completion.error.status if self._completion.error else 200
        except TimeoutError:
            self._log.status = 504
            event = {"type": "http.response.body", "body": encode_event(timeout_error().as_json())}
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENT_SECONDS):
                    await send(event)
        except Exception:
            self._log.status = 500
            raise
        finally:
            await self._events.aclose()
            self._on_end(self._log)


def check_origin(gateway: Gateway, request: Request) -> None:
    """Refuse requests of web pages to a gateway without keys, which only programs of this machine may use.

    A page reaches a local server by a name that resolves to 127.0.0.1 (DNS rebinding), or from another origin.

    Raises:
        RequestError: the Host or Origin header is not local.
    """
    if gateway.keys.path is not None:
        return
    for header in ("host", "origin"):
        value = request.headers.get(header, "").split("://")[-1]
        host = value.rsplit(":", 1)[0] if not value.endswith("]") else value
        if value and not is_loopback(host.strip("[]").lower().removesuffix(".")):
            raise RequestError(
                403,
                f"the header {header} is {value}; without API keys, expected an address of this machine",
                code="forbidden_origin",
            )


async def read_body(gateway: Gateway, request: Request) -> bytes:
    """Return the body of a JSON request.

    Raises:
        RequestError: the body is too large or too slow, or not JSON by its headers.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, f"the content type is {kind!r}; send application/json", code="unsupported_media_type")
    if encoding := request.headers.get("content-encoding"):
        raise RequestError(415, f"the content encoding {encoding!r} is not supported", code="unsupported_media_type")
    body = bytearray()
    too_large = RequestError(413, f"the body exceeds {gateway.max_body_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > gateway.max_body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > gateway.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            408, f"the request body did not arrive within {BODY_SECONDS:.0f} seconds", code="timeout"
        ) from None
    return bytes(body)


def check_support(model: ServedModel, call: GenerationCall) -> None:
    """Refuse a request that needs an input which the package does not have.

    Raises:
        RequestError: names the field.
    """
    for name, param in call.needs.items():
        if name not in model.features:
            raise RequestError(
                400, f"the package of the model {model.client_name} does not support {param}; package the model again",
                code="unsupported_parameter", param=param,
            )  # fmt: skip


def adapt_tools(model: ServedModel, call: GenerationCall) -> GenerationCall:
    """Return the call with tools in a system message if the model's chat template has no place for them."""
    prompt = call.prompts[0]
    messages = str(prompt.get("messages", ""))
    if model.has_tool_template or not ("tools" in call.inputs or '"tool_calls"' in messages or '"tool"' in messages):
        return call
    tools = call.inputs.get("tools")
    inputs = {key: value for key, value in call.inputs.items() if key != "tools"}
    described = describe_tools(json.loads(messages), None if tools is None else json.loads(str(tools)))
    text = json.dumps(described, ensure_ascii=False)
    return replace(call, inputs=inputs, prompts=({**prompt, "messages": text},))


async def run_until_disconnect(request: Request, answer: Awaitable[T]) -> T:
    """Return the answer; cancel it if the client disconnects.

    Raises:
        RequestError: the model refuses the request or fails, or the client disconnected.
    """
    task = asyncio.ensure_future(answer)
    hang_up = asyncio.ensure_future(request.receive())  # the body is read: the next message is the disconnection
    try:
        await asyncio.wait([task, hang_up], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError(499, "the client disconnected", code="client_disconnected")
    finally:
        for each in (task, hang_up):
            each.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


def describe_model(model: ServedModel, name: str) -> dict[str, Any]:
    """Return the object of /v1/models for a public name; `max_model_len` is vLLM's name for the context."""
    return {
        "id": name,
        "object": "model",
        "created": model.loaded_at,
        "owned_by": "tuneline",
        "root": model.registered or model.name,
        "version": model.version,
        "max_model_len": model.context,
    }


def read_request_id(request: Request) -> str:
    """Return the client's request ID if it is safe in a log, else a new one."""
    sent = request.headers.get("x-request-id", "")
    return sent if REQUEST_ID_PATTERN.fullmatch(sent) else f"req_{secrets.token_hex(12)}"


def build_headers(log: RequestLog) -> dict[str, str]:
    """Return the headers of a response."""
    version = {VERSION_HEADER: log.version} if log.version else {}
    return {"x-request-id": log.request_id, **version}


def error_response(error: RequestError, log: RequestLog | None = None) -> Response:
    """Return the response for an error."""
    headers = {**(build_headers(log) if log else {})}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413, 415, 499, 503):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error.as_json(), status_code=error.status, headers=headers)


def timeout_error() -> RequestError:
    """Return the error for an answer that takes too long."""
    return RequestError(504, "the answer did not finish within the timeout of the gateway", code="timeout")


async def handle_request_error(_: Request, error: Exception) -> Response:
    """Answer a RequestError."""
    assert isinstance(error, RequestError)
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method in OpenAI's form."""
    assert isinstance(error, HTTPException)
    known = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    if error.status_code == 404:
        message += "; GET /v1/models lists the models, and /chat is the chat page"
    return error_response(RequestError(error.status_code, message, code=known.get(error.status_code, "http_error")))


async def handle_failure(_: Request, error: Exception) -> Response:
    """Answer an unexpected error without its details, which are logged."""
    logger.error("request_failed", exc_info=error)
    return error_response(RequestError(500, "internal error; see the gateway's log", code="internal_error"))


async def read_unix_metrics(socket: Path) -> bytes:
    """Return Triton's metrics; nothing while Triton does not answer."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            writer.write(b"GET /metrics HTTP/1.0\r\nHost: triton\r\n\r\n")
            answer = await reader.read()
            writer.close()
    except (OSError, TimeoutError):
        return b""
    return answer.partition(b"\r\n\r\n")[2]
