"""JSON answers and JSON Schema."""

from __future__ import annotations

import pytest

from components.common.errors import ConfigurationError
from components.evaluation.metrics import structured

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}, "required": ["name"]}


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
def test_an_answer_is_json_by_itself_or_within_one_fence(answer: str, valid: float) -> None:
    assert structured.json_valid(answer) == valid


def test_a_schema_is_followed_or_not() -> None:
    schema = structured.validator(PERSON, "person.json")
    assert structured.follows('{"name": "Ada", "age": 36}', schema) == 1.0
    assert structured.follows('{"name": "Ada", "age": -1}', schema) == 0.0
    assert structured.follows('{"age": 36}', schema) == 0.0
    assert structured.follows("Ada, 36", schema) == 0.0


def test_what_is_no_schema_is_refused_with_the_files_name() -> None:
    with pytest.raises(ConfigurationError, match=r"person\.json is no JSON Schema"):
        structured.validator({"type": "persona"}, "person.json")
    with pytest.raises(ConfigurationError, match=r"person\.json is no JSON Schema"):
        structured.validator([PERSON], "person.json")


def test_a_schema_that_leads_to_the_internet_is_refused_and_nothing_is_fetched() -> None:
    schema = structured.validator({"$ref": "https://schemas.example/person.json"}, "person.json")
    with pytest.raises(ConfigurationError, match=r"refers to https://schemas\.example/person\.json"):
        structured.follows('{"name": "Ada"}', schema)


def test_references_within_the_schema_are_followed() -> None:
    schema = structured.validator({"$defs": {"person": PERSON}, "type": "array", "items": {"$ref": "#/$defs/person"}}, "people.json")
    assert structured.follows('[{"name": "Ada"}]', schema) == 1.0
    assert structured.follows("[{}]", schema) == 0.0
