"""The official client and the request shapes of other clients, against the gateway and a real Triton.

In the fast tier: the answers of a tiny model take milliseconds, and one server serves the session.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.pipelines.gateway.conftest import QUEUE, SLOTS
from tests.pipelines.gateway.gateway_process import CHAT, GatewayProcess

pytestmark = pytest.mark.triton
MESSAGES: Any = [{"role": "user", "content": "What is a list?"}]


def ask(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **{"max_tokens": 12, **fields})
    return str(answer.choices[0].message.content)


def test_models_are_listed_with_version_and_context(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "tuneline")
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_answer_is_whole_streamed_and_repeatable(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=12)
    assert whole.usage is not None
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert whole.id.startswith("chatcmpl-")
    events = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len(events) > 5
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content == ask(client)
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == "length"
    assert events[-1].usage == whole.usage
    assert {event.id for event in events} == {events[0].id}


def test_the_helper_of_the_client_assembles_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=12) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == ask(client)


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    sampled = {"temperature": 1.5, "seed": 7}
    assert ask(client, **sampled) == ask(client, **sampled) != ask(client, temperature=1.5, seed=8)
    several = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, n=3, temperature=1.5, seed=7
    )
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts[0] == ask(client, **sampled)
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert several.usage.completion_tokens == 36


def test_streamed_choices_are_separate(client: openai.OpenAI) -> None:
    texts = ["", ""]
    for event in client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, n=2, temperature=1.5, seed=7, stream=True
    ):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [ask(client, temperature=1.5, seed=7), ask(client, temperature=1.5, seed=8)]


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    full = ask(client)
    stop = full[4:6]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == full[: full.index(stop)]


def test_completions_continue_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["def f(", "def g("], max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1]
    streamed = ["", ""]
    for event in client.completions.create(model="tiny", prompt=["def f(", "def g("], max_tokens=5, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_headers_name_the_version_and_the_request(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "abc-1"}
    )
    assert (raw.headers["x-request-id"], raw.headers["x-tuneline-model-version"]) == ("abc-1", "1")
    assert str(raw.parse().system_fingerprint).startswith("fp_")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"logit_bias": {"1": 1}}, openai.BadRequestError, "logit_bias"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, openai.BadRequestError, None),
        ({"stop": ["s"] * 20}, openai.BadRequestError, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "stream": stream, **fields})
    body: Any = caught.value.body
    assert body["param"] == param
    assert body["message"]


def test_embeddings_are_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no served model computes embeddings"):
        client.embeddings.create(model="tiny", input="text")


# Bodies as these clients send them, recorded from their request builders.
SHAPES: dict[str, dict[str, Any]] = {
    "LangChain": {"messages": MESSAGES, "model": "tiny", "max_completion_tokens": 4, "stream": False, "n": 1},
    "LangChain, streaming": {
        "messages": MESSAGES, "model": "tiny", "max_completion_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.7,
    },
    "Open WebUI": {
        "stream": True, "model": "tiny", "messages": MESSAGES, "max_tokens": 4, "temperature": 0.8, "top_p": 0.9,
        "frequency_penalty": 0, "presence_penalty": 0, "seed": 0, "stop": [],
    },
    "a client with every neutral field": {
        "model": "tiny", "messages": [{**MESSAGES[0], "name": "ada"}], "max_tokens": 4, "n": 1, "logprobs": False,
        "top_logprobs": None, "logit_bias": None, "user": "u-1", "tools": None, "tool_choice": None,
        "response_format": {"type": "text"}, "parallel_tool_calls": None, "service_tier": "auto", "store": False,
        "metadata": {}, "modalities": ["text"],
    },
    "a conversation that was received before": {
        "model": "tiny", "max_tokens": 4, "messages": [
            {"role": "system", "content": "Be brief."}, *MESSAGES,
            {"role": "assistant", "content": "A sequence.", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": None},
            {"role": "user", "content": [{"type": "text", "text": "And a set?"}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_request_shapes_of_other_clients(gateway: GatewayProcess, shape: dict[str, Any]) -> None:
    status, headers, body = gateway.send("POST", CHAT, shape)
    assert status == 200, body
    if shape.get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line for line in body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 4


def test_a_full_queue_is_429_and_a_hang_up_frees_it(client: openai.OpenAI) -> None:
    def open_stream(_: int) -> openai.Stream[Any] | openai.RateLimitError:
        try:
            # A stream that waits for a slot has no headers yet, so that each is opened by its own thread.
            return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1500, stream=True)
        except openai.RateLimitError as error:
            return error

    requests = SLOTS + QUEUE + 4
    with ThreadPoolExecutor(requests) as pool:
        results = list(pool.map(open_stream, range(requests)))
    refusals = [each for each in results if isinstance(each, openai.RateLimitError)]
    assert refusals
    assert refusals[0].response.headers["retry-after"] == "1"
    for stream in results:
        if isinstance(stream, openai.Stream):
            stream.close()
    patient = client.with_options(max_retries=10)
    assert patient.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).choices


SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Berlin", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_matches_its_schema(client: openai.OpenAI, temperature: float, stream: bool) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "temperature": temperature, "seed": 5}
    if stream:
        events = client.chat.completions.create(**fields, response_format=response_format, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events)
    else:
        answer = client.chat.completions.create(**fields, response_format=response_format)
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


class Person(BaseModel):
    """A schema that the client derives from a class."""

    name: str = Field(max_length=8)
    adult: bool


def test_the_clients_parse_method_returns_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Person, max_tokens=300)
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[WEATHER], tool_choice=choice, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Berlin", "Paris")
    # The next turn contains the call and its result.
    turn: Any = [
        *MESSAGES,
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(model="tiny", messages=turn, tools=[WEATHER], max_tokens=4).choices


def test_a_streamed_tool_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=200
    ) as stream:
        message = stream.get_final_completion().choices[0]
    assert message.finish_reason == "tool_calls"
    [call] = message.message.tool_calls or []
    assert call.function.name == "get_weather"
    turn: Any = [*MESSAGES, message.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model="tiny", messages=turn, tools=[WEATHER], max_tokens=4).choices


def test_tools_that_may_be_called_leave_a_text_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[WEATHER], max_tokens=12)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_logprobs_of_a_greedy_answer_are_the_highest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.content or []
    assert len(tokens) == 6
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs) < 0
    legacy = client.completions.create(model="tiny", prompt="def f(", max_tokens=4, logprobs=2)
    listed = legacy.choices[0].logprobs
    assert listed is not None
    assert [len(each or []) for each in (listed.tokens, listed.token_logprobs, listed.top_logprobs)] == [4, 4, 4]


@pytest.mark.parametrize("schema", [{"not": {"type": "string"}}, {"type": "nothing"}, {"$ref": "http://x/y"}])
def test_a_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )


def test_documented_examples_run(gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "openai.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(blocks).replace("http://127.0.0.1:8000", gateway.url).replace('model="tuneline"', 'model="tiny"')
    exec(compile(code, "docs/reference/openai.md", "exec"), {})
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert "get_weather" in lines[-1]
    assert json.loads(lines[-2])["arguments"] in range(10)


def test_metrics_count_tokens_by_model_version_and_key(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = gateway.send("GET", "/metrics")[2].decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    labels = '{key="anonymous",model="tiny",version="1"}'
    before = read()
    ask(client, max_tokens=9)
    after = read()
    name = f"tuneline_gateway_completion_tokens_total{labels}"
    assert after[name] - before[name] == 9
    for histogram in ("time_to_first_token", "request", "inter_token"):
        count = f"tuneline_gateway_{histogram}_seconds_count{labels}"
        assert after[count] > before[count]
    assert after["tuneline_gateway_running_requests"] == 0


def test_health(gateway: GatewayProcess) -> None:
    assert [gateway.send("GET", f"/health/{name}")[0] for name in ("live", "ready")] == [200, 200]
