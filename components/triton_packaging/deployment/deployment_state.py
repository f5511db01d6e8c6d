"""state.json of a serving folder: the deployed, the previous and the last rejected version."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import TunelineError

STATE_FILENAME = "state.json"


class ServedVersion(BaseModel):
    """A version that is or was deployed: its number in the registry, and the digests of its package and model.

    Attributes:
        is_shadow: the version is a canary that its evaluation rejected; it receives copies of requests only.
    """

    version: str
    repository_sha256: str
    model_sha256: str
    since: str = ""
    is_shadow: bool = False


class RefusedVersion(BaseModel):
    """A version that had the alias and was not deployed."""

    version: str
    repository_sha256: str
    said_sha256: str = ""  # digest of the version's tags in the registry at that time
    reason: str
    at: str = ""


class DeploymentState(BaseModel):
    """state.json of a serving folder."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: str = Field("tuneline/serving/v1", alias="schema")
    registered_model: str
    alias: str
    served_as: str = ""
    serving: ServedVersion | None = None
    before: ServedVersion | None = None
    refused: RefusedVersion | None = None

    def is_refused(self, version: str, repository_sha256: str, said_sha256: str) -> bool:
        """Return whether this version was rejected with the same package and the same tags.

        Returns False if no version is deployed, so that the version is tried again.

        Args:
            version: number in the registry.
            repository_sha256: digest of the package.
            said_sha256: digest of the version's tags in the registry.
        """
        refused = self.refused
        return (
            self.serving is not None
            and refused is not None
            and (refused.version, refused.repository_sha256, refused.said_sha256)
            == (
                version,
                repository_sha256,
                said_sha256,
            )
        )


def read_state(folder: Path) -> DeploymentState | None:
    """Return the state of a serving folder; None if the folder has no state yet.

    Raises:
        TunelineError: the file cannot be read.
    """
    path = folder / STATE_FILENAME
    if not path.exists():
        return None
    try:
        return DeploymentState.model_validate_json(filesystem.read_text(path))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise TunelineError(
            f"{path} cannot be read: {str(error).splitlines()[0]}",
            hint="Remove this file; the next deployment writes a new file.",
        ) from None


def write_state(folder: Path, state: DeploymentState) -> None:
    """Write the state atomically."""
    artifact_folder.write_atomically(folder / STATE_FILENAME, state.model_dump_json(by_alias=True, indent=2) + "\n")
