"""Who is at work here."""

from __future__ import annotations

import getpass
import os


def user() -> str:
    """The user of this system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
