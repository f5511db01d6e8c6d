"""A teacher at an OpenAI-compatible endpoint, such as a model that tuneline serves."""

from __future__ import annotations

import functools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any

from pydantic import ValidationError

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime import chat_completions, http_client
from components.common.runtime.chat_endpoint import (
    ChatEndpoint,
    MissingTextError,
    NoAnswerError,
    RequestRejectedError,
)
from components.common.runtime.errors import RESUME_HINT, EngineMissingError, InterruptedRunError, UsageError
from components.data_curation.score_settings import JudgeSettings
from pipelines.synthesis.journal import Answer, Journal
from pipelines.synthesis.teacher_budget import TeacherBudget, estimate_tokens
from pipelines.synthesis.teachers import TeacherOptions, TeacherRequest

CHECK_SECONDS = 20.0
MAX_LISTED_MODELS = 10
MAX_NAME_CHARACTERS = 200
MAX_STATED_TOKENS = 100_000_000  # of a request; a larger number is an error of the endpoint


class EndpointTeacher:
    """A teacher at an endpoint. Requests state a JSON schema unless the endpoint rejects it.

    Args:
        endpoint: the address, model, key and limits.
        concurrency: the maximum number of concurrent requests.
    """

    def __init__(self, endpoint: ChatEndpoint, concurrency: int) -> None:
        self._endpoint, self.concurrency = endpoint, concurrency
        self.name = endpoint.model
        self.sha256 = hashing.digest([endpoint.base_url, endpoint.model])
        self.inputs: Sequence[ArtifactInput] = [
            ArtifactInput(kind="teacher_endpoint", content_sha256=self.sha256, uri=endpoint.base_url)
        ]
        self._uses_schema = True
        self._is_probed = False  # whether a request was answered

    @staticmethod
    def open(options: TeacherOptions) -> EndpointTeacher:
        """Return the teacher after a request to /models, which is free of charge.

        Raises:
            UsageError: the URL is invalid, or the endpoint lists several models and none is named.
            ConfigurationError: the API key is not set.
            EngineMissingError: the endpoint does not answer, or rejects the key.
        """
        option = options.option
        try:  # the same conditions as for the judge of the curation
            JudgeSettings(url=options.source, model="any", credentials=options.key_variable)
        except ValidationError as error:
            if error.errors()[0]["loc"] == ("credentials",):  # the value may be the key itself
                raise UsageError(
                    f"{option}-key is not the name of an environment variable",
                    hint=f"Write the key to an environment variable, such as TEACHER_KEY, and set {option}-key TEACHER_KEY.",
                ) from None
            raise UsageError(
                f"{option}: {error.errors()[0]['msg'].removeprefix('Value error, ')}",
                hint=f"Specify a URL such as https://teacher.example/v1, and the name of an environment variable with {option}-key.",
            ) from None
        key = chat_completions.read_api_key(options.key_variable, f"{option}-key", "synthesis")
        listed = _list_models(option, options.source, key)
        if not options.model and len(listed) != 1:
            names = ", ".join(listed[:MAX_LISTED_MODELS]) or "none"
            raise UsageError(
                f"{option}-model is not set, and the endpoint lists {len(listed)} models: {names}",
                hint=f"Set the model with {option}-model.",
            )
        endpoint = ChatEndpoint(
            options.source.rstrip("/"),
            options.model or listed[0],
            key,
            options.timeout_seconds,
            options.retries,
            role=option.lstrip("-"),
            hint=f"Check the URL in {option} (without /chat/completions), {option}-model, and the environment variable that {option}-key names.",
        )
        return EndpointTeacher(endpoint, options.concurrency)

    def answer(
        self, requests: Sequence[TeacherRequest], journal: Journal, budget: TeacherBudget, count: Callable[[], None]
    ) -> None:
        """See `Teacher.answer`. Each thread stores its answer before it takes the next request."""
        unknown = {request.key: request for request in requests if journal.get(request.key) is None}
        pending: set[Future[Answer]] = set()
        pool = ThreadPoolExecutor(self.concurrency)

        def collect() -> None:
            nonlocal pending
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                budget.add(future.result())
                count()

        try:
            for request in unknown.values():
                while not budget.try_reserve(request.key, request.input_tokens, request.sampling.max_tokens):
                    collect()
                pending.add(pool.submit(self._ask, request, journal))
                # The first request shows alone whether the endpoint accepts the schema.
                while len(pending) >= (self.concurrency if self._is_probed else 1):
                    collect()
            while pending:
                collect()
        except NoAnswerError as error:
            raise InterruptedRunError(
                f"the {self._endpoint.role} at {self._endpoint.base_url} stopped answering: {error}",
                hint=f"Check the endpoint. {RESUME_HINT} The answers received so far are stored.",
            ) from None
        finally:  # requests under way end by their timeout; their answers are stored
            self._endpoint.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._endpoint.stopped.clear()
            for future in pending:
                if not future.cancelled() and future.exception() is None:
                    budget.add(future.result())
            budget.reserved.clear()

    def _ask(self, request: TeacherRequest, journal: Journal) -> Answer:
        body: dict[str, object] = {
            "messages": list(request.messages),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_tokens": request.sampling.max_tokens,
            "seed": request.seed,
        }
        schema = {"type": "json_schema", "json_schema": {"name": "row", "strict": True, "schema": request.schema}}
        has_schema = self._uses_schema and request.schema is not None
        read_answer = functools.partial(_read_answer, request, time.monotonic())
        try:
            try:
                answer = self._endpoint.request(
                    {**body, "response_format": schema} if has_schema else body, read_answer
                )
            except RequestRejectedError as error:
                if not error.is_request_specific or not has_schema or self._is_probed:
                    raise
                answer = self._endpoint.request(body, read_answer)
                self._uses_schema = False
            self._is_probed = True
        except RequestRejectedError as error:
            if not error.is_request_specific:
                raise
            answer = Answer(request.key, "", refusal=error.message)
        journal.add(answer)
        return answer


def _read_answer(request: TeacherRequest, start_seconds: float, response: Any) -> Answer:
    """Return the answer in a response; the tokens are estimated if the response does not state them.

    A message without content, such as a refusal or a reasoning that reached the limit, is paid for: an empty answer.

    Raises:
        MissingTextError: the response contains no message.
    """
    try:
        choice = response["choices"][0]
        content, finish_reason = choice["message"].get("content"), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise MissingTextError("the response has no message in choices[0]") from None
    text = content if isinstance(content, str) else ""
    usage = response.get("usage")
    stated = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    counts = [tokens for tokens in stated if isinstance(tokens, int) and 0 <= tokens <= MAX_STATED_TOKENS]
    is_estimated = len(counts) < len(stated)
    input_tokens, output_tokens = (request.input_tokens, estimate_tokens([text])) if is_estimated else counts
    return Answer(
        request.key,
        text,
        finish_reason == "length",
        input_tokens,
        output_tokens,
        is_estimated,
        round(time.monotonic() - start_seconds, 3),
        str(response.get("model") or "")[:MAX_NAME_CHARACTERS],
    )


def _list_models(option: str, url: str, key: str) -> list[str]:
    """Return the models that the endpoint lists; [] if it has no list.

    Raises:
        EngineMissingError: the endpoint does not answer, or rejects the key.
    """
    address = url.rstrip("/") + "/models"
    # The scheme is http or https.
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        with http_client.build_opener(address).open(request, timeout=CHECK_SECONDS) as response:
            content = json.loads(response.read(chat_completions.MAX_RESPONSE_BYTES))
        names = [str(model["id"]) for model in content["data"]]
        return [name for name in names if name.isprintable() and len(name) <= MAX_NAME_CHARACTERS]
    except urllib.error.HTTPError as error:
        status = chat_completions.describe_status(error, key)
        if error.code in (401, 403):
            raise EngineMissingError(
                f"the {option.lstrip('-')} at {url} rejects the key: {status}",
                hint=f"Set {option}-key to the environment variable that contains the API key, and check its value.",
            ) from None
        return []
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # an endpoint without a list of models
    except (OSError, HTTPException) as error:
        raise EngineMissingError(
            f"the {option.lstrip('-')} at {url} does not answer: {chat_completions.describe_failure(error)}",
            hint=f"Start the server, or correct {option}.",
        ) from None
