"""Addresses that may hold a password: it is found also where it was not escaped, and never shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

# A user's name, a colon, a password, an @. Digits before a slash are a port and no password.
_WHO = r"(?P<user>[^\s/?#:@\[]*):(?!\d*(?:[/?#,;\s]|$))(?P<password>[^\s]+)@"
ADDRESS = re.compile(rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)?{_WHO}(?P<rest>[^@\s]*)")
WITHIN = re.compile(rf"://{_WHO}")
USER_ALONE = re.compile(r"(?<=://)[^\s/?#:@]+:?@")  # it may be a token


def holds_password(text: str) -> bool:
    """Whether an address with a password stands anywhere in a text."""
    return WITHIN.search(text) is not None


def split(address: str) -> tuple[str, str, str]:
    """An address without user and password; the user; the password. The last two are empty where there is no password."""
    found = ADDRESS.fullmatch(address.strip())
    if found is None:
        return address, "", ""
    return (found["scheme"] or "") + found["rest"], unquote(found["user"]), unquote(found["password"])


def without_password(address: str) -> str:
    """An address as it may be shown and kept: without its password, but with the user's name."""
    found = ADDRESS.fullmatch(address.strip())
    if found is None:
        return address
    return "".join([found["scheme"] or "", f"{found['user']}@" if found["user"] else "", found["rest"]])


def without_user(address: str) -> str:
    """An address without its password and without the user's name."""
    return USER_ALONE.sub("", without_password(address), count=1)


def masked(text: str) -> str:
    """A text, in which addresses may stand anywhere, without their users and passwords."""
    return USER_ALONE.sub("***@", WITHIN.sub("://***@", text))
