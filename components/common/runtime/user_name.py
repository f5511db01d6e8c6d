"""The name of the current user."""

from __future__ import annotations

import getpass
import os


def get_user_name() -> str:
    """Return the login name; "uid N" if the user has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
