"""Paths in the output of a notebook: short, and without the name of the user's folder."""

from __future__ import annotations

import re
from pathlib import Path


def shorten_paths(text: str) -> str:
    """Return a text whose absolute paths in the current folder, or next to it, are relative."""
    folder = Path.cwd()
    for near, replacement in ((folder, ""), (folder.parent, "../")):
        if near != Path(near.anchor):
            text = re.sub(rf"(?<![\w/.-]){re.escape(str(near))}/", replacement, text)
    return text
