"""Answers of /v1/chat/completions and /v1/completions, whole and streamed, in the forms of the OpenAI API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipelines.gateway.backend_protocols import AnswerChunk
from pipelines.gateway.errors import RequestError
from pipelines.gateway.openai_requests import GenerationCall, spread_seed
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.tool_calls import CallBuffer
from pipelines.gateway.triton_models import ServedModel, TritonModels

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ResponseForm:
    """Names in the objects of one endpoint."""

    prefix: str
    whole: str
    chunk: str
    is_chat: bool


CHAT = ResponseForm("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = ResponseForm("cmpl-", "text_completion", "text_completion", is_chat=False)


@dataclass
class Choice:
    """One answer so far."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, chunk: AnswerChunk) -> None:
        """Add a chunk."""
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        self.prompt_tokens, self.completion_tokens = chunk.prompt_tokens, chunk.completion_tokens
        self.logprobs.extend(chunk.logprobs)


class Completion:
    """One request: its answers are generated at the same time, and share an id and a model version."""

    def __init__(
        self,
        triton: TritonModels,
        model: ServedModel,
        call: GenerationCall,
        form: ResponseForm,
        measures: AnswerMeasures,
    ) -> None:
        self.call, self.model, self.form = call, model, form
        self.id = f"{form.prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.version = model.version
        self.choices = [Choice() for _ in range(len(call.prompts) * call.choices)]
        self.error: RequestError | None = None  # of a stream that has begun
        self._triton, self._measures = triton, measures

    async def answer(self) -> dict[str, Any]:
        """Return the whole response.

        Raises:
            RequestError: the model refuses the request or fails.
        """
        async with aclosing(self._generate()) as chunks:
            async for _ in chunks:
                pass
        return self.format_response()

    def format_response(self) -> dict[str, Any]:
        """Return the response with the answers so far; the response of a stream is the one of a whole answer."""
        return {
            **self._header(self.form.whole),
            "choices": [self._format_choice(number) for number in range(len(self.choices))],
            "usage": self._format_usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. The first is yielded when the model has accepted the request.

        An error before the first event is raised; a later error is sent as an event.

        Raises:
            RequestError: the model refuses the request or fails before its first token.
        """
        choice, is_chat = self.call.tool_choice, self.form.is_chat
        buffers = {n: CallBuffer(choice) for n in range(len(self.choices)) if choice}
        started: set[int] = set()
        try:
            async with aclosing(self._generate()) as chunks:
                async for number, chunk in chunks:
                    if is_chat and number not in started:
                        yield self._event(number, {"role": "assistant", "content": ""})
                    started.add(number)
                    text, calls = chunk.text, list[tuple[str, str]]()
                    if number in buffers:
                        text = buffers[number].feed(text)
                        if chunk.finish_reason:
                            rest, calls = buffers[number].finish()
                            text += rest
                    if text or chunk.logprobs:
                        yield self._event(number, {"content": text} if is_chat else text, logprobs=chunk.logprobs)
                    if calls:
                        yield self._event(number, {"tool_calls": self._format_calls(number, calls, is_chunk=True)})
                    if chunk.finish_reason:
                        reason = "tool_calls" if calls else chunk.finish_reason
                        yield self._event(number, {} if is_chat else "", finish_reason=reason)
        except RequestError as error:
            if not started:
                raise
            self.error = error
            yield encode_event(error.as_json())
            return
        if self.call.include_usage:
            yield encode_event({**self._header(self.form.chunk), "choices": [], "usage": self._format_usage()})
        yield DONE

    async def _generate(self) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
        """Yield the chunks of all answers, each with the number of its answer."""
        call, began = self.call, time.perf_counter()
        sources: list[AsyncGenerator[AnswerChunk, None]] = []
        for number in range(len(self.choices)):
            prompt = call.prompts[number // call.choices]
            seed = spread_seed(call.seed, number)
            inputs = {**call.inputs, **prompt, **({} if seed is None else {"seed": seed})}
            sources.append(self._triton.generate(self.model, inputs))
        async with aclosing(merge(sources)) as chunks:
            async for number, chunk in chunks:
                self._measures.record(number, time.perf_counter() - began, chunk)
                self.version = chunk.version or self.version
                self.choices[number].add(chunk)
                yield number, chunk

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.call.model,
            "system_fingerprint": f"fp_{self.model.fingerprint or self.version}",
        }

    def _event(
        self,
        number: int,
        content: Any,
        *,
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes:
        choice = {
            "index": number,
            "delta" if self.form.is_chat else "text": content,
            "logprobs": self._format_logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self.call.include_usage else {}
        return encode_event({**self._header(self.form.chunk), "choices": [choice], **usage})

    def _format_choice(self, number: int) -> dict[str, Any]:
        choice = self.choices[number]
        logprobs = None if self.call.logprobs is None else self._format_logprobs(choice.logprobs)
        common = {"index": number, "logprobs": logprobs, "finish_reason": choice.finish_reason or None}
        if not self.form.is_chat:
            return {**common, "text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self.call.tool_choice:
            text, calls = self.call.tool_choice.split(choice.text)
            if calls:
                message |= {"content": text or None, "tool_calls": self._format_calls(number, calls)}
                common["finish_reason"] = "tool_calls"
        return {**common, "message": message}

    def _format_calls(
        self, number: int, calls: list[tuple[str, str]], *, is_chunk: bool = False
    ) -> list[dict[str, Any]]:
        # The ids follow from the answer's id: a captured stream has the ids that the client received.
        digests = [hashlib.sha256(f"{self.id} {number} {index}".encode()).hexdigest() for index in range(len(calls))]
        return [
            {
                **({"index": index} if is_chunk else {}),
                "id": f"call_{digests[index][:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]

    def _format_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        if self.form.is_chat:
            return {"content": tokens, "refusal": None}
        offsets, position = [], 0
        for each in tokens:
            offsets.append(position)
            position += len(each["token"])
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens],
            "text_offset": offsets,
        }

    def _format_usage(self) -> dict[str, int]:
        # The prompt is computed once for all answers to it.
        prompt = sum(choice.prompt_tokens for choice in self.choices[:: self.call.choices])
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def encode_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def merge(sources: Sequence[AsyncGenerator[AnswerChunk, None]]) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
    """Yield the chunks of all sources as they arrive, each with the number of its source.

    Raises:
        Exception: the first error of a source; the other sources are cancelled.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for chunk in only:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, AnswerChunk | Exception | None]] = asyncio.Queue(maxsize=len(sources))

    async def read(number: int, source: AsyncGenerator[AnswerChunk, None]) -> None:
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    await queue.put((number, chunk))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(read(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
