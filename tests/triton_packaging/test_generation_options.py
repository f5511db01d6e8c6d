"""JSON schemas, log-probabilities and penalties in a batch: each request has its own, and its neighbours have none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.common.models import model_loading
from components.triton_packaging.python_backend.answer_grammar import GrammarCompiler, GrammarError
from components.triton_packaging.python_backend.generation_request import GenerationRequest
from components.triton_packaging.python_backend.token_generation import (
    BatchCapacity,
    BatchedGenerator,
    SequentialGenerator,
    TokenGenerator,
)
from components.triton_packaging.python_backend.token_sampling import RequestSampler, TokenScore, create_sampler

# Every answer is finite, so that also a random model reaches its end.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "is_open": {"type": "boolean"},
        "kind": {"enum": ["fox", "dog", "\u00e9t\u00e9"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["is_open", "kind", "counts"],
    "additionalProperties": False,
}
PLAIN = GenerationRequest([5, 8, 13, 21, 34, 55], 48, 0.0, 1.0, 0, 3, ())
SAMPLED = replace(PLAIN, temperature=1.3, top_p=0.95, top_k=60)
CONSTRAINED = replace(PLAIN, json_schema=json.dumps(SCHEMA))
SAMPLED_CONSTRAINED = replace(SAMPLED, json_schema=json.dumps(SCHEMA))
SCORED = replace(PLAIN, logprobs=4)
PENALIZED = replace(PLAIN, frequency_penalty=1.5, presence_penalty=0.5)
# llguidance accepts this pattern, and gives it up during the answer: its automaton has too many states.
TOO_COMPLEX = replace(
    SAMPLED, json_schema=json.dumps({"type": "string", "pattern": "^(([a-z]{1,50}|[a-y]{1,50}|b.*c){1,50}x){1,50}$"})
)
REQUESTS = {
    "plain": PLAIN,
    "sampled": SAMPLED,
    "constrained": CONSTRAINED,
    "sampled and constrained": SAMPLED_CONSTRAINED,
    "other seed": replace(SAMPLED_CONSTRAINED, seed=4),
    "scored": SCORED,
    "sampled and scored": replace(SAMPLED, logprobs=0),
    "penalized": PENALIZED,
    "too complex": TOO_COMPLEX,
    "all": replace(SAMPLED_CONSTRAINED, logprobs=2, frequency_penalty=0.7, presence_penalty=-0.7),
}


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer and the final state of its sampler."""

    tokens: list[int]
    scores: list[TokenScore]
    error: Exception | None


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return model_loading.load_tokenizer(model_loading.open_model(tiny_folder).tokenizer)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, compiler: GrammarCompiler) -> dict[str, dict[str, Answer]]:
    """The answers to all requests: one by one with generate, in separate batches and in one batch."""

    async def answer(generator: TokenGenerator, request: GenerationRequest) -> Answer:
        grammar = compiler.compile(request.json_schema) if request.json_schema else None
        sampler = create_sampler(request, torch.device("cpu"), grammar)
        tokens = [token async for new in generator.generate(request, sampler, stream=True) for token in new]
        return Answer(tokens, [] if sampler is None else sampler.token_scores, sampler and sampler.error)

    async def answer_all() -> dict[str, dict[str, Answer]]:
        loop = asyncio.get_running_loop()
        sequential = SequentialGenerator(model_loading.load_model(model_loading.open_model(tiny_folder)), 0, loop)
        batched = BatchedGenerator(
            model_loading.load_model(model_loading.open_model(tiny_folder)), BatchCapacity(16, 2048), loop
        )
        try:
            together = await asyncio.gather(*(answer(batched, request) for request in REQUESTS.values()))
            return {
                "sequential": {name: await answer(sequential, request) for name, request in REQUESTS.items()},
                "alone": {name: await answer(batched, request) for name, request in REQUESTS.items()},
                "together": dict(zip(REQUESTS, together, strict=True)),
            }
        finally:
            sequential.close()
            batched.close()

    return asyncio.run(answer_all())


@pytest.mark.parametrize("name", REQUESTS)
def test_answer_does_not_depend_on_the_other_requests(answers: dict[str, dict[str, Answer]], name: str) -> None:
    expected = answers["sequential"][name].tokens
    assert answers["alone"][name].tokens == expected
    assert answers["together"][name].tokens == expected


@pytest.mark.parametrize("name", ["constrained", "sampled and constrained", "other seed", "all"])
def test_constrained_answer_is_valid_and_ends_with_the_end_token(
    answers: dict[str, dict[str, Answer]], tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    tokens = answers["together"][name].tokens
    assert tokens[-1] == tokenizer.eos_token_id
    jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=True)), SCHEMA)


def test_sampled_constrained_answer_depends_on_the_seed(answers: dict[str, dict[str, Answer]]) -> None:
    together = answers["together"]
    assert together["sampled and constrained"].tokens != together["other seed"].tokens


def test_too_complex_schema_ends_only_its_own_answer(answers: dict[str, dict[str, Answer]]) -> None:
    answer = answers["together"]["too complex"]
    assert isinstance(answer.error, GrammarError)
    assert "json_schema is too complex: lexer error: too many expressions" in str(answer.error)
    assert "\n" not in str(answer.error)
    assert len(answer.tokens) < TOO_COMPLEX.max_tokens
    assert all(other.error is None for name, other in answers["together"].items() if name != "too complex")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return model_loading.load_model(model_loading.open_model(tiny_folder))


def compute_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of a plain forward pass over prompt and answer, one row per token."""
    with torch.inference_mode():
        logits = model(torch.tensor([PLAIN.prompt + tokens])).logits[0]
    return torch.log_softmax(logits[len(PLAIN.prompt) - 1 : -1].float(), dim=-1)


@pytest.mark.parametrize("mode", ["sequential", "together"])
@pytest.mark.parametrize("name", ["scored", "sampled and scored", "all"])
def test_logprobs_are_those_of_a_plain_forward_pass(
    answers: dict[str, dict[str, Answer]], model: PreTrainedModel, mode: str, name: str
) -> None:
    """The distribution is the model's own, also if temperature, penalties and a schema change the choice."""
    answer, count = answers[mode][name], REQUESTS[name].logprobs
    assert count is not None
    expected = compute_logprobs(model, answer.tokens)
    assert [score.token for score in answer.scores] == answer.tokens
    for row, score in zip(expected, answer.scores, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
        assert [value for _, value in score.alternatives] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert len({token for token, _ in score.alternatives}) == count


def test_recording_logprobs_does_not_change_the_answer(answers: dict[str, dict[str, Answer]]) -> None:
    together = answers["together"]
    assert together["scored"].tokens == together["plain"].tokens
    assert together["sampled and scored"].tokens == together["sampled"].tokens


def test_penalties_are_those_of_the_openai_api(answers: dict[str, dict[str, Answer]], model: PreTrainedModel) -> None:
    """Each token has the best score after frequency_penalty x its count and presence_penalty are subtracted."""
    tokens = answers["together"]["penalized"].tokens
    scores = compute_logprobs(model, tokens)
    for position, token in enumerate(tokens):
        counts = torch.bincount(torch.tensor(tokens[:position], dtype=torch.int64), minlength=scores.shape[1])
        expected = scores[position] - 1.5 * counts - 0.5 * (counts > 0)
        assert expected[token] == pytest.approx(float(expected.max()), abs=1e-4)
    assert tokens != answers["together"]["plain"].tokens


def test_request_without_options_has_no_sampler() -> None:
    assert create_sampler(PLAIN, torch.device("cpu")) is None
    assert create_sampler(replace(PLAIN, json_schema="{}", logprobs=0), torch.device("cpu")) is not None


def test_error_in_the_sampler_does_not_reach_the_batch() -> None:
    class BrokenGrammar:
        end_token = 2

        def mask(self, scores: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    sampler = RequestSampler(PLAIN, torch.device("cpu"), BrokenGrammar())  # type: ignore[arg-type]
    for _ in range(2):
        assert sampler(None, torch.zeros(1, 8)).argmax() == BrokenGrammar.end_token
    assert isinstance(sampler.error, ZeroDivisionError)


def test_nan_scores_do_not_raise_an_error() -> None:
    sampler = create_sampler(replace(SAMPLED, logprobs=1), torch.device("cpu"))
    assert sampler is not None
    assert sampler(None, torch.full((1, 8), torch.nan)).isfinite().sum() == 1
    assert sampler.error is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "not": {}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, 'Unimplemented keys: ["not"]'),
        ({"type": "name"}, "Invalid type: name"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)  # fmt: skip
def test_unsupported_schema_is_rejected_with_a_reason(
    compiler: GrammarCompiler, schema: dict[str, object], message: str
) -> None:
    with pytest.raises(GrammarError) as error:
        compiler.compile(json.dumps(schema))
    assert message in str(error.value)
    assert str(error.value).startswith("json_schema is invalid: ")


@pytest.mark.parametrize("schema", ["[1]", '{"const": NaN}', '{"const": "\\ud800"}'])
def test_text_that_only_python_accepts_is_rejected(compiler: GrammarCompiler, schema: str) -> None:
    with pytest.raises(GrammarError, match="json_schema is invalid: "):
        compiler.compile(schema)


def is_accepted(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, schema: object, text: str) -> bool:
    """Return whether a grammar allows each token of a text, and then the end token."""
    grammar, width = compiler.compile(json.dumps(schema)), len(tokenizer)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], grammar.end_token]:
        if not grammar.mask(torch.zeros(1, width))[0, token].isfinite():
            return False
        grammar.advance(token)
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [true, null]}', True),
        ("{}", True),
        ('{"a":1}', False),
        ('{ "a": 1}', False),
        ('{"a": 1', False),
        ('{"a": 1}\n', False),
        ("[1]", False),
    ],
)
@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {"type": "object", "x-guidance": {"whitespace_flexible": True}}]
)
def test_json_object_has_no_free_white_space(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, schema: dict[str, object], text: str, expected: bool
) -> None:
    assert is_accepted(compiler, tokenizer, schema, text) == expected


def test_mask_covers_an_output_layer_wider_than_the_vocabulary(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    scores = compiler.compile('{"type": "object"}').mask(torch.zeros(1, len(tokenizer) + 200))
    assert scores.shape == (1, len(tokenizer) + 200)
    assert not scores[0, len(tokenizer) :].isfinite().any()
    assert scores.isfinite().any()


def test_model_without_an_end_token_has_no_grammars(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        GrammarCompiler(tokenizer, [])


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


HOSTILE_SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "nested": lambda: nest(60),
    "recursive": lambda: {
        "$defs": {"n": {"type": "object", "properties": {side: {"$ref": "#/$defs/n"} for side in "lr"}}},
        "$ref": "#/$defs/n",
    },
    "automaton": lambda: {"type": "string", "pattern": "^(.*a.{14}|.*b.{15}|.*c.{16})$"},
    "long": lambda: {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000},
    "wide": lambda: {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1200)}},
}


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schema_costs_bounded_time(compiler: GrammarCompiler, name: str) -> None:
    """A step of the batch waits for the mask. The bounds are 20 times the measured times, and are of CPU time."""
    began = time.thread_time()
    grammar = compiler.compile(json.dumps(HOSTILE_SCHEMAS[name]()))
    assert time.thread_time() - began < 2
    random = torch.Generator().manual_seed(1)
    slowest = 0.0
    for _ in range(30):
        began = time.thread_time()
        try:
            scores = grammar.mask(torch.zeros(1, 400))
            grammar.advance(int(torch.multinomial(scores.exp(), 1, generator=random)))
        except GrammarError:
            break
        finally:
            slowest = max(slowest, time.thread_time() - began)
    assert slowest < 0.16
