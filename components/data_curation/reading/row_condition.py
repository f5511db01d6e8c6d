"""Conditions on the columns of records, as SQL expressions that SQLite evaluates."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from components.data_curation.reading.volatile_sql import is_volatile

MAX_INTEGER = 2**63
MAX_CONDITION_COLUMNS = 200
MAX_VALUE_BYTES = 100_000_000  # of a text in a condition, also one that it builds
MISSING_COLUMN = re.compile(r"no such column: (?P<name>.+)", re.DOTALL)
ALLOWED_ACTIONS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


class RowCondition:
    """An SQL expression that selects records.

    Args:
        expression: the text after WHERE. Lists and objects are JSON texts; a column that a record lacks is NULL.

    Raises:
        ValueError: the expression is not valid SQL, reads anything but columns, or differs between two evaluations.
    """

    def __init__(self, expression: str) -> None:
        if is_volatile(expression):
            raise ValueError(
                f"{expression!r} depends on the current time or on random numbers; expected a condition on columns and "
                "fixed values, such as created >= '2026-01-31'"
            )
        self.expression = expression
        self._lower_expression = expression.lower()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._table_columns: list[str] | None = None
        self.columns: list[str] = []  # without those in double quotes, which SQLite also accepts as texts
        while True:
            try:
                self._evaluate({})
            except sqlite3.Error as error:
                missing = MISSING_COLUMN.fullmatch(str(error))
                name = missing["name"] if missing else ""
                if not name or name in self.columns or len(self.columns) == MAX_CONDITION_COLUMNS:
                    problem = str(error).partition("\n)")[0]  # without the statement around the expression
                    column, _, key = name.partition(".")
                    example = f"; for a key of a nested column, use json_extract({column}, '$.{key}')" if key else ""
                    raise ValueError(f"{expression!r} is not an SQL condition: {problem}{example}") from None
                self.columns.append(name)
            else:
                return

    def selects(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the condition is true for a record.

        Raises:
            ValueError: the condition cannot be evaluated for this record.
        """
        try:
            return self._evaluate(fields)
        except (sqlite3.Error, UnicodeEncodeError, ValueError) as error:
            raise ValueError(f"the condition {self.expression!r} fails: {error}") from None

    def _evaluate(self, fields: Mapping[str, Any]) -> bool:
        values = {name: value for name, value in fields.items() if name.lower() in self._lower_expression}
        known = {name.lower() for name in values}
        values |= {name: None for name in self.columns if name.lower() not in known}
        if list(values) != self._table_columns:
            self._create_table(list(values))
        marks = ", ".join("?" for _ in values)
        self._connection.execute("DELETE FROM record")
        if values:
            self._connection.execute(f"INSERT INTO record VALUES ({marks})", [_to_sql(one) for one in values.values()])  # noqa: S608
        source = "FROM record" if values else ""
        statement = f"SELECT CASE WHEN ({self.expression}\n) THEN 1 ELSE 0 END {source}"
        rows = self._connection.execute(statement).fetchall()
        if len(rows) != 1:
            raise ValueError("expected an expression that returns one value")
        return bool(rows[0][0])

    def _create_table(self, names: list[str]) -> None:
        """Create the table of a record. Columns of type NUMERIC compare the text 10 with the number 9 as numbers."""
        self._connection.set_authorizer(None)
        self._connection.execute("DROP TABLE IF EXISTS record")
        columns = ", ".join('"' + name.replace('"', '""') + '" NUMERIC' for name in names)
        self._connection.execute(f"CREATE TABLE record ({columns or 'unused'})")
        self._connection.set_authorizer(_authorize)
        self._table_columns = names


def _to_sql(value: object) -> object:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    is_large = isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER
    return str(value) if is_large else value


def _authorize(action: int, *arguments: str | None) -> int:
    """Allow expressions only: no file, setting, table or extension."""
    is_allowed = action in ALLOWED_ACTIONS and arguments[1] != "load_extension"
    is_allowed |= action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE) and arguments[0] == "record"
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY
