"""SQL text: the check that a query is one SELECT statement, and the statement that an extract runs."""

from __future__ import annotations

import re
from collections.abc import Callable

# Comments, strings, quoted names and PostgreSQL's dollar-quoted strings, which may contain semicolons.
QUOTED = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$", re.DOTALL
)
FIRST_WORD = re.compile(r"[\s(]*(\w+)")
Quote = Callable[[str], str]


def find_problem(query: str) -> str:
    """Return why a query is not one SELECT statement; "" if it is one."""
    plain = QUOTED.sub(" ", query).strip().rstrip(";").rstrip()
    word = FIRST_WORD.match(plain)
    if not word or word[1].upper() not in ("SELECT", "WITH"):
        return f"query begins with {word[1].upper()}; expected SELECT or WITH" if word else "query is empty"
    return "query contains several statements; expected one SELECT" if ";" in plain else ""


def strip_end(query: str) -> str:
    """Return a query without the semicolon at its end."""
    return re.sub(r"[;\s]+$", "", query)


def quote_double(name: str) -> str:
    """Return a name in double quotes, each part of schema.table separately."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))


def quote_backticks(name: str) -> str:
    """Return a name in backticks, as BigQuery expects."""
    return "`" + name.replace("`", "") + "`"


def quote_if_needed(name: str) -> str:
    """Return a name in double quotes unless each part is a plain identifier, which Snowflake converts to upper case."""
    is_plain = all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]*", part) for part in name.split("."))
    return name if is_plain else quote_double(name)


def build_statement(query: str, order_by: list[str], quote: Quote) -> str:
    """Return the statement that selects the query's rows in the order of the columns `order_by`.

    The query becomes a subquery. A database then rejects a statement that changes data, even after WITH.
    """
    order = f"\nORDER BY {', '.join(quote(column) for column in order_by)}" if order_by else ""
    return f"SELECT * FROM (\n{strip_end(query)}\n) AS extracted_rows{order}"  # noqa: S608 - the user's own query
