"""MkDocs hook: lets long names in tables break between their parts, so that a column of keys leaves room for the others."""

from __future__ import annotations

import re

CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
SEPARATOR = re.compile(r"(?<=\w)[._/](?=[A-Za-z])")


def on_page_content(html: str, **_: object) -> str:
    """Allow a break after each dot, slash and underscore inside the names in the cells of tables."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: SEPARATOR.sub(r"\g<0><wbr>", code[0]), cell[0]), html)
