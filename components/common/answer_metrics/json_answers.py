"""Metrics for answers that must be valid JSON or match a JSON Schema.

An answer must consist of a JSON text only, optionally within one Markdown code fence. Any JSON value is valid (RFC
8259); use a schema to require an object.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import ConfigurationError
from components.common.runtime.json_loading import reject_constant

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

CODE_FENCE = re.compile(
    r"\A(?P<marks>`{3,}|~{3,})[ \t]*(?:json|JSON)?[ \t]*\n(?P<body>.*)\n[ \t]*(?P=marks)\Z", re.DOTALL
)


class InvalidJSONAnswerError(ValueError):
    """The answer is not a JSON value."""


def parse_json_answer(answer: str) -> Any:
    """Return the JSON value of an answer.

    Raises:
        InvalidJSONAnswerError: The answer is invalid JSON, NaN or Infinity.
    """

    text = answer.strip()
    fenced = CODE_FENCE.match(text)
    try:
        return json.loads(fenced["body"] if fenced else text, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidJSONAnswerError(str(error)) from None


def score_json(answer: str) -> float:
    """Return 1.0 for an answer that is valid JSON, else 0.0."""
    try:
        parse_json_answer(answer)
    except InvalidJSONAnswerError:
        return 0.0
    return 1.0


def build_validator(schema: object, source: str) -> Validator:
    """Return a validator for the draft in the schema's `$schema` (default: 2020-12).

    References are resolved only within the schema; nothing is downloaded.

    Args:
        schema: JSON value of the schema.
        source: Path of the schema's file.

    Raises:
        ConfigurationError: The schema is invalid; the message contains `source`.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    validator = Draft202012Validator
    if isinstance(schema, (dict, bool)):
        validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(
            f"{source} is not a valid JSON Schema: {error.message}", hint="Check the file with a JSON Schema linter."
        ) from None
    return validator(schema, registry=Registry())


def score_schema(answer: str, validator: Validator) -> float:
    """Return 1.0 for JSON that matches the schema, else 0.0.

    Raises:
        ConfigurationError: The schema refers to another schema.
    """
    from referencing.exceptions import Unresolvable

    try:
        return float(validator.is_valid(parse_json_answer(answer)))
    except (InvalidJSONAnswerError, RecursionError, OverflowError):  # a number too large for `multipleOf`
        return 0.0
    except Unresolvable as error:
        raise ConfigurationError(
            f"the JSON Schema refers to {error.ref}; expected a reference within the schema",
            hint="Put the referenced schema under $defs.",
        ) from None
