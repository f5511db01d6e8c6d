"""JSON answers and JSON Schema."""

from __future__ import annotations

import pytest

from components.common.answer_metrics import json_answers
from components.common.runtime.errors import ConfigurationError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"name": "Ada"}', 1.0),
        ('  [1, 2, 3]\n', 1.0),
        ("42", 1.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        ('```\n{"name": "Ada"}\n```\n', 1.0),
        ('Here you are: {"name": "Ada"}', 0.0),
        ('```json\n{"name": "Ada"}\n```\nAnything else?', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada",}', 0.0),
        ('{"age": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)  # fmt: skip
def test_answer_is_json_alone_or_in_one_fence(answer: str, valid: float) -> None:
    assert json_answers.score_json(answer) == valid


def test_answers_are_validated_against_schema() -> None:
    schema = json_answers.build_validator(PERSON, "person.json")
    assert json_answers.score_schema('{"name": "Ada", "age": 36}', schema) == 1.0
    assert json_answers.score_schema('{"name": "Ada", "age": -1}', schema) == 0.0
    assert json_answers.score_schema('{"age": 36}', schema) == 0.0
    assert json_answers.score_schema("Ada, 36", schema) == 0.0


def test_invalid_schema_is_refused_with_file_name() -> None:
    with pytest.raises(ConfigurationError, match=r"person\.json is not a valid JSON Schema"):
        json_answers.build_validator({"type": "persona"}, "person.json")
    with pytest.raises(ConfigurationError, match=r"person\.json is not a valid JSON Schema"):
        json_answers.build_validator([PERSON], "person.json")


def test_remote_schema_reference_is_refused() -> None:
    schema = json_answers.build_validator({"$ref": "https://schemas.example/person.json"}, "person.json")
    with pytest.raises(ConfigurationError, match=r"refers to https://schemas\.example/person\.json"):
        json_answers.score_schema('{"name": "Ada"}', schema)


def test_local_schema_references_are_resolved() -> None:
    schema = json_answers.build_validator(
        {"$defs": {"person": PERSON}, "type": "array", "items": {"$ref": "#/$defs/person"}}, "people.json"
    )
    assert json_answers.score_schema('[{"name": "Ada"}]', schema) == 1.0
    assert json_answers.score_schema("[{}]", schema) == 0.0
