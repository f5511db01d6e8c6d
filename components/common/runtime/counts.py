"""Numbers with their nouns, for messages and reports."""

from __future__ import annotations


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return the number with its noun, for example "1 row" or "2,400 rows".

    Args:
        count: the number.
        noun: the singular, with a verb if it depends on the number: "row was".
        plural: the plural; by default the noun with "s".
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
