"""Answers that have to be JSON, and to follow a JSON Schema.

An answer is the JSON text itself or that text alone within one Markdown code fence, as chat models write it; a word before or after it
makes it invalid. Any JSON value is valid (RFC 8259): an answer that has to be an object needs a schema that says so.
"""

from __future__ import annotations

import json
import re
from typing import Any

from components.common.errors import ConfigurationError

FENCE = re.compile(r"\A(?P<marks>`{3,}|~{3,})[ \t]*(?:json|JSON)?[ \t]*\n(?P<body>.*)\n[ \t]*(?P=marks)\Z", re.DOTALL)


class NotJSONError(ValueError):
    """A text that is no JSON value."""


def parsed(answer: str) -> Any:
    """The JSON value of an answer. Raises NotJSONError; NaN and Infinity are no JSON."""
    text = answer.strip()
    fenced = FENCE.match(text)
    try:
        return json.loads(fenced["body"] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotJSONError(str(error)) from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def json_valid(answer: str) -> float:
    """1.0 for an answer that is JSON, else 0.0."""
    try:
        parsed(answer)
    except NotJSONError:
        return 0.0
    return 1.0


def validator(schema: Any, where: str) -> Any:
    """A validator of JSON Schema, of the draft that `$schema` names, 2020-12 where it names none.

    References are resolved within the schema alone: nothing is fetched. Raises ConfigurationError for what is no schema; `where` names it.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    made = validator_for(schema, default=Draft202012Validator) if isinstance(schema, (dict, bool)) else Draft202012Validator
    try:
        made.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(f"{where} is no JSON Schema: {error.message}", hint="Check it with a JSON Schema linter.") from None
    return made(schema, registry=Registry())


def follows(answer: str, schema: Any) -> float:
    """1.0 for JSON that is valid by `schema` (a validator), else 0.0. Raises ConfigurationError for a reference that leads out of it."""
    from referencing.exceptions import Unresolvable

    try:
        return float(schema.is_valid(parsed(answer)))
    except (NotJSONError, RecursionError):
        return 0.0
    except Unresolvable as error:
        raise ConfigurationError(
            f"the JSON Schema refers to {error.ref}, which does not lie within it", hint="Put what it refers to under $defs."
        ) from None
