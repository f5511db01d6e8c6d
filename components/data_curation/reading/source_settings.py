"""Settings of a single source: its encoding and layout, the rows to select, and the columns of prompts and answers."""

from __future__ import annotations

import codecs
import operator
import string
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from components.data_curation.reading.row_condition import RowCondition
from components.data_curation.reading.table_settings import TableSettings

ColumnTarget = Literal[
    "prompt",
    "context",
    "system",
    "completion",
    "messages",
    "tools",
    "chosen",
    "rejected",
    "label",
    "text",
    "id",
    "source",
]
ANSWER_TARGETS = ("completion", "chosen", "rejected")


class SourceSettings(BaseModel):
    """Settings for reading the files of a source. Empty values: recognize the layout and the columns of each file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str = Field(
        "", exclude_if=operator.not_, description="Record format of this source. Empty: data_curation.format."
    )
    columns: dict[ColumnTarget, str] = Field(
        {},
        exclude_if=operator.not_,
        description="Columns (keys of records) by their role: prompt, context, system, completion, messages, tools, chosen, "
        "rejected, label, text, id or source. customer.name is the key name in the nested column customer. Other columns "
        "are stored in meta.",
    )
    template: str = Field(
        "",
        exclude_if=operator.not_,
        description="Template of the prompt, or of the text of rows without an answer. {column} inserts the value of a "
        "column. Write {{ and }} for braces.",
    )
    where: str = Field(
        "",
        exclude_if=operator.not_,
        description="SQL condition (SQLite) on the columns, such as status = 'closed' AND length(reply) > 20. Other rows are "
        "rejected. Reject reason: `not_selected`.",
    )
    delimiter: str = Field(
        "",
        exclude_if=operator.not_,
        description="Character between the cells of CSV and text files. Empty: comma, semicolon or tab.",
    )
    encoding: str = Field(
        "", exclude_if=operator.not_, description="Encoding of text files, such as cp1252 or utf-16. Empty: UTF-8."
    )
    sheet: str = Field(
        "", exclude_if=operator.not_, description="Name or number of a workbook's sheet. Empty: the first sheet."
    )

    @field_validator("sheet", mode="before")
    @classmethod
    def _accept_sheet_number(cls, sheet: object) -> object:
        return str(sheet) if isinstance(sheet, int) and not isinstance(sheet, bool) else sheet

    @field_validator("where")
    @classmethod
    def _check_condition(cls, where: str) -> str:
        if where:
            RowCondition(where)  # raises ValueError
        return where

    @field_validator("delimiter")
    @classmethod
    def _check_delimiter(cls, delimiter: str) -> str:
        if delimiter and (len(delimiter) != 1 or delimiter in '\r\n"'):
            raise ValueError("expected one character, for example ';' or '|', or \"\\t\" for a tab")
        return delimiter

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, encoding: str) -> str:
        try:
            is_text = not encoding or isinstance(codecs.decode(b"", encoding), str)
        except LookupError:
            is_text = False
        if not is_text:
            raise ValueError("expected a text encoding of Python, for example cp1252, latin-1, utf-16 or shift_jis")
        return encoding

    @model_validator(mode="after")
    def _check_template(self) -> SourceSettings:
        if self.template and not list_template_columns(self.template):
            raise ValueError(f"template {self.template!r} contains no column; expected a string with {{column}}")
        if self.template and self.template_target in self.columns:
            raise ValueError(
                f"template and columns.{self.template_target} are both set; expected one of them: the template builds the "
                f"{self.template_target}"
            )
        return self

    @property
    def template_target(self) -> ColumnTarget:
        """The column target that the template builds."""
        is_answered = any(target in self.columns for target in ANSWER_TARGETS)
        return "prompt" if is_answered else "text"

    def list_columns(self) -> list[str]:
        """Return the columns that every record is expected to have, without those of `where`."""
        return list(dict.fromkeys([*self.columns.values(), *list_template_columns(self.template)]))


class SourceEntry(TableSettings, SourceSettings):
    """A source: a path, or a mapping with `path` and settings for its files or its database."""

    path: str = Field(
        min_length=1, description="File, glob or folder to read, relative to the configuration file; or a database."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value: object) -> object:
        if isinstance(value, str):
            return {"path": value}
        if not isinstance(value, dict | SourceEntry):
            raise ValueError("expected a path, or a mapping such as {path: tickets.csv, columns: {prompt: subject}}")
        return value

    @model_serializer(mode="wrap")
    def _dump_path(self, handler: SerializerFunctionWrapHandler) -> Any:
        fields = handler(self)
        return self.path if fields.keys() == {"path"} else fields

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}

    @property
    def settings(self) -> SourceSettings:
        """The settings without the path."""
        return SourceSettings(**{name: getattr(self, name) for name in SourceSettings.model_fields})

    @property
    def table_settings(self) -> TableSettings:
        """The settings of a database."""
        return TableSettings(**{name: getattr(self, name) for name in TableSettings.model_fields})


def list_template_columns(template: str) -> list[str]:
    """Return the names of the columns in a template.

    Raises:
        ValueError: a brace is not closed, or a column has a conversion or a format.
    """
    names = []
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template {template!r} is not valid: {error}") from None
    for _, name, layout, conversion in fields:
        if name is None:
            continue
        if not name or layout or conversion:
            raise ValueError(f"template {template!r} contains braces without a plain column name; expected {{column}}")
        names.append(name)
    return names
