"""Detection and removal of credentials in URLs, including credentials that are not percent-encoded."""

from __future__ import annotations

import re
from urllib.parse import unquote

# user:password@. Digits before a slash are a port, not a password.
_CREDENTIALS = r"(?P<user>[^\s/?#:@\[]*):(?!\d*(?:[/?#,;\s]|$))(?P<password>[^\s]+)@"
ADDRESS_PATTERN = re.compile(rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)?{_CREDENTIALS}(?P<rest>[^@\s]*)")
PASSWORD_PATTERN = re.compile(rf"://{_CREDENTIALS}")
USER_PATTERN = re.compile(r"(?<=://)[^\s/?#:@]+:?@")  # the user name may be a token


def contains_password(text: str) -> bool:
    """Return whether a URL with a password occurs anywhere in the text."""
    return PASSWORD_PATTERN.search(text) is not None


def split_credentials(address: str) -> tuple[str, str, str]:
    """Return (address without credentials, user, password).

    If the address contains no password, the address is returned unchanged, and user and password are empty.
    """
    match = ADDRESS_PATTERN.fullmatch(address.strip())
    if match is None:
        return address, "", ""
    return (match["scheme"] or "") + match["rest"], unquote(match["user"]), unquote(match["password"])


def remove_password(address: str) -> str:
    """Return the address without its password, but with the user name."""
    match = ADDRESS_PATTERN.fullmatch(address.strip())
    if match is None:
        return address
    return "".join([match["scheme"] or "", f"{match['user']}@" if match["user"] else "", match["rest"]])


def remove_credentials(address: str) -> str:
    """Return the address without user name and password."""
    return USER_PATTERN.sub("", remove_password(address), count=1)


def mask_credentials(text: str) -> str:
    """Replace the credentials of all URLs in the text by asterisks."""
    return USER_PATTERN.sub("***@", PASSWORD_PATTERN.sub("://***@", text))
