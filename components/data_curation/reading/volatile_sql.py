"""Detection of SQL whose value differs between two evaluations: the current time and random numbers."""

from __future__ import annotations

import re

# As in SQLite and DuckDB.
VOLATILE = re.compile(
    r"'now'|\b(?:current_(?:date|time|timestamp)|localtime(?:stamp)?)\b|\b(?:now|today|random\w*|uuid\w*|gen_random_uuid)\s*\("
    r"|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)",
    re.IGNORECASE,
)


def is_volatile(sql: str) -> bool:
    """Return whether the value of a query or a condition depends on the current time or on random numbers."""
    return VOLATILE.search(sql) is not None
