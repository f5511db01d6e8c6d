"""Applies a source's settings to its records: selects rows, and gives columns their roles.

`suggest_columns` guesses the roles of the columns of a file whose keys no record format recognizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from components.data_curation.reading.raw_records import JsonObject, Record, UnreadableRecord, parse_json
from components.data_curation.reading.record_formats import describe_keys
from components.data_curation.reading.row_condition import RowCondition
from components.data_curation.reading.source_settings import (
    ColumnTarget,
    SourceEntry,
    SourceSettings,
    list_template_columns,
)

TEXT_TARGETS = ("prompt", "context", "system", "completion", "chosen", "rejected", "text")
JSON_TARGETS = ("messages", "tools", "chosen", "rejected")
OWN_KEYS = ("id", "source")  # keep their meaning without a role
COLUMN = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]+)\}")
# Words in the names of columns, by the role that they suggest, best first.
ROLE_WORDS: dict[ColumnTarget, tuple[str, ...]] = {
    "completion": (
        *("completion", "answer", "reply", "response", "resolution", "solution", "output", "target"),
        *("agent", "assistant", "support", "staff", "expert"),
    ),
    "prompt": (
        *("prompt", "question", "subject", "query", "request", "instruction", "title", "issue", "problem", "headline"),
        *("customer", "user", "client", "input"),
    ),
    "context": (
        "context",
        "body",
        "description",
        "message",
        "details",
        "passage",
        "content",
        "text",
        "ticket",
        "comment",
    ),
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
MIN_MEAN_CHARACTERS = 4  # a column of shorter values is a code, not a text


def apply_settings(
    records: Iterable[Record | UnreadableRecord], settings: SourceSettings
) -> Iterator[Record | UnreadableRecord]:
    """Yield the records with the columns in their roles.

    A record that `where` does not select has `excluded_by`. A record without an expected column is unreadable.
    """
    condition = RowCondition(settings.where) if settings.where else None
    for record in records:
        if isinstance(record, UnreadableRecord):
            yield record
            continue
        try:
            if condition and not condition.selects(record.fields):
                yield replace(record, excluded_by=settings.where)
            else:
                yield _map_record(record, settings)
        except ValueError as error:
            yield UnreadableRecord(record.file, record.line, str(error))


def _map_record(record: Record, settings: SourceSettings) -> Record:
    if not settings.columns and not settings.template:
        return replace(record, format=settings.format)
    fields, used = dict[str, Any](), set[str]()
    for target, name in settings.columns.items():
        key, value = _get_column(record.fields, name)
        used.add(key)
        if target in TEXT_TARGETS and not isinstance(value, str | list | dict):
            value = "" if value is None else str(value)
        if target in JSON_TARGETS and isinstance(value, str) and value.lstrip().startswith("["):
            value = parse_json(value)
        if target == "id" and isinstance(value, float) and value.is_integer():
            value = int(value)
        fields[target] = value
    if settings.template:
        used.update(_get_column(record.fields, name)[0] for name in list_template_columns(settings.template))
        fields[settings.template_target] = fill_template(settings.template, record.fields)
    rest = {key: value for key, value in record.fields.items() if key not in used}
    fields |= {key: rest.pop(key) for key in OWN_KEYS if key in rest and key not in fields}
    return replace(record, fields=fields, unmapped=rest, format=settings.format)


def fill_template(template: str, fields: JsonObject) -> str:
    """Return the template with the values of its columns; null becomes an empty text.

    Raises:
        ValueError: the record lacks a column.
    """

    def get_text(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0][0]
        _, value = _get_column(fields, match["name"])
        return "" if value is None else str(value)

    return COLUMN.sub(get_text, template)


def _get_column(fields: JsonObject, name: str) -> tuple[str, Any]:
    """Return the key that holds a column and its value. `a.b` is the key b in the nested column a, unless it is a key.

    Raises:
        ValueError: the record lacks the column.
    """
    if name in fields:
        return name, fields[name]
    wanted = name.strip().casefold()
    if same := next((key for key in fields if key.strip().casefold() == wanted), None):
        return same, fields[same]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"no column {name!r}; the record has the {describe_keys(fields)}")
        value = value[part]
    return "", value  # the rest of the nested column becomes meta


def find_missing_columns(records: Sequence[Record], settings: SourceSettings) -> list[str]:
    """Return the columns of the settings that none of the records has."""
    wanted = settings.list_columns() + (RowCondition(settings.where).columns if settings.where else [])
    missing = []
    for name in dict.fromkeys(wanted):
        for record in records:
            try:
                _get_column(record.fields, name)
            except ValueError:
                continue
            break
        else:
            missing.append(name)
    return missing


def suggest_columns(records: Sequence[JsonObject]) -> dict[ColumnTarget, str]:
    """Guess the columns of prompt, context and completion by their names, or of the text by its length.

    Returns:
        The columns by role; empty if no column contains text.
    """
    lengths: dict[str, list[int]] = {}
    for fields in records:
        for name, value in _flatten(fields):
            if isinstance(value, str) and not value.replace(".", "").replace("-", "").isdecimal():
                lengths.setdefault(name, []).append(len(value.strip()))
    texts = [name for name, values in lengths.items() if fmean(values) >= MIN_MEAN_CHARACTERS]
    found: dict[ColumnTarget, str] = {}
    for role, words in ROLE_WORDS.items():
        ranked = [
            (min(map(words.index, known)), position, name)
            for position, name in enumerate(texts)
            if name not in found.values()
            and (known := {word for part in WORD.findall(name.rpartition(".")[2]) if (word := part.lower()) in words})
        ]
        if ranked:
            found[role] = min(ranked)[2]
    if "completion" not in found:
        return {"text": max(texts, key=lambda name: fmean(lengths[name]))} if texts else {}
    if "prompt" not in found:
        others = [name for name in texts if name != found["completion"]]
        name = found.pop("context", "") or max(others, key=lambda name: fmean(lengths[name]), default="")
        found = {"prompt": name, "completion": found["completion"]} if name else {"text": found["completion"]}
    return {role: found[role] for role in ("prompt", "context", "completion", "text") if role in found}


def list_columns(records: Iterable[JsonObject]) -> list[str]:
    """Return the columns in the order of their first appearance; of a nested column, the names of its keys."""
    return list(dict.fromkeys(name for fields in records for name, _ in _flatten(fields)))


def _flatten(fields: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, dict) and value and all(key and "." not in key for key in value):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def build_entry(path: str, settings: SourceSettings, columns: Mapping[ColumnTarget, str]) -> dict[str, Any]:
    """Return a source with these columns as it is written in the configuration."""
    entry = SourceEntry(path=path, **{**settings.model_dump(), "columns": dict(columns)}).model_dump()
    return {"path": entry.pop("path"), **entry}
