"""Text for a terminal. Names and texts of models and datasets may contain escape sequences, which it would interpret."""

from __future__ import annotations

_ESCAPED_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}


def escape_controls(text: str) -> str:
    """Return the text with visible escapes instead of control characters (C0, DEL, C1), except newlines and tabs."""
    return text.translate(_ESCAPED_CONTROLS)
