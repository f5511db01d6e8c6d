"""The request to a database: its address, the rows to read and the secret."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote

from components.common.runtime import url_credentials
from components.common.runtime.errors import ConfigurationError
from components.data_curation.reading.table_settings import TableSettings, is_query_file

SOURCES_KEY = "data_curation.sources"
SECRET_PARAMETER = re.compile(r"(?i)pass(word|phrase|code)?$|token|secret|private_?key$|credentials?$")
CREDENTIALS_HINT = (
    "Set credentials_env to the name of an environment variable with the password; on a cluster, `secrets` in "
    "platform.yaml sets the variable."
)


@dataclass(frozen=True)
class TableRequest:
    """The rows to read from a database.

    Attributes:
        address: the address of the database without a password, or the path of a database file.
        settings: the settings, with the text of a query that is in a file.
        base: the base folder of relative paths.
        query_name: the name of the query's file without its suffix; "" for an inline query.
        secret: the value of the variable `credentials_env`; "" if none is set.
    """

    address: str
    settings: TableSettings
    base: Path
    query_name: str = ""
    secret: str = field(default="", repr=False)

    def error(self, problem: str, hint: str) -> ConfigurationError:
        """Return an error about this source, without credentials."""
        problem, hint = (self.mask(text) for text in (problem, hint))
        return ConfigurationError(f"{SOURCES_KEY}: {self.address!r} {problem}", hint=hint)

    def mask(self, text: str) -> str:
        """Replace the secret and the credentials of all URLs in a text."""
        for form in {self.secret, quote(self.secret, safe="")} - {""}:  # an address contains the encoded form
            text = text.replace(form, "***")
        return url_credentials.mask_credentials(text)


def check_no_password(address: str, hint: str = CREDENTIALS_HINT) -> None:
    """Raise ConfigurationError, without the password, if the address of a source contains one."""
    parameters = parse_qsl(address.partition("?")[2].partition("#")[0]) if "://" in address else []
    secrets = [name for name, _ in parameters if SECRET_PARAMETER.search(name)]
    if secrets or url_credentials.contains_password(address.removeprefix("dvc://")):
        shown = url_credentials.mask_credentials(address).partition("?")[0]
        place = f"in the parameter {secrets[0]}" if secrets else "in its address"
        raise ConfigurationError(
            f"{SOURCES_KEY}: {shown!r} contains a password {place}; the password would be readable in the manifest",
            hint=hint,
        )


def build_request(address: str, settings: TableSettings, base: Path) -> TableRequest:
    """Read the query's file and the secret, and check what can be checked without the database.

    Raises:
        ConfigurationError: the address contains a password, the environment variable is not set, or the query's file
            cannot be read.
    """
    check_no_password(address)
    secret = ""
    if variable := settings.credentials_env:
        secret = os.environ.get(variable, "").strip()
        if not secret:
            raise ConfigurationError(
                f"{SOURCES_KEY}: {address!r}: credentials_env: the environment variable {variable} is not set",
                hint=f"Set {variable} in the environment of this command; on a cluster, under `secrets` in "
                "platform.yaml.",
            )
    query, name = settings.query, ""
    if is_query_file(query):
        path = base / Path(query).expanduser()
        try:
            query, name = path.read_text(encoding="utf-8"), path.stem
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigurationError(
                f"{SOURCES_KEY}: query: {settings.query} cannot be read: {reason}",
                hint="Set query to a SELECT statement, or to the path of a .sql file.",
            ) from None
    return TableRequest(address, settings.model_copy(update={"query": query}), base, name, secret)
