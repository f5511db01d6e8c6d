"""What a deployment remembers: the version in service, the one before, and which were refused and why."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common import artifacts
from components.common.errors import TunelineError

STATE = "state.json"


class Served(BaseModel):
    """A version in service, or one that was: the registry's number, the package's and the model's digests."""

    version: str
    repository_sha256: str
    model_sha256: str
    since: str = ""


class Refused(BaseModel):
    """A version that the alias named and that was not taken into service."""

    version: str
    repository_sha256: str
    said_sha256: str = ""  # of all that the registry said of it then
    reason: str
    at: str = ""


class State(BaseModel):
    """state.json of a serving folder."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: str = Field("tuneline/serving/v1", alias="schema")
    registered_model: str
    alias: str
    served_as: str = ""
    serving: Served | None = None
    before: Served | None = None
    refused: Refused | None = None

    def is_refused(self, version: str, repository_sha256: str, said_sha256: str) -> bool:
        """Whether this version was refused, its package the same and nothing else said of it since."""
        known = self.refused
        return known is not None and (known.version, known.repository_sha256, known.said_sha256) == (
            version,
            repository_sha256,
            said_sha256,
        )


def read(folder: Path) -> State | None:
    """The state of a serving folder; None where nothing was served from it yet. Raises TunelineError when it cannot be read."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        return State.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise TunelineError(
            f"{path} cannot be read: {str(error).splitlines()[0]}",
            hint=f"Remove {path}: the alias then says what is served.",
        ) from None


def write(folder: Path, state: State) -> None:
    """Keep the state, whole or not at all."""
    artifacts.write_atomically(folder / STATE, state.model_dump_json(by_alias=True, indent=2) + "\n")
