"""Talking to the registry: model versions, aliases and tags, and MLflow's errors as ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common import tracking
from components.common.errors import EngineMissingError, RegistryError, TunelineError
from components.model_registry import patience

PREFIX = "tuneline."
HISTORY = ".history"  # how the name of the registered model ends that holds another one's history
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


@contextmanager
def talking() -> Iterator[Any]:
    """An MLflow client that is patient with a busy server.

    What the server refuses is raised as RegistryError (NotWritableError for a read-only database), and as EngineMissingError that there is
    no server or that it stopped answering.
    """
    if not tracking.enabled():
        raise EngineMissingError(
            "no MLflow server is named, and models are registered there", hint="Set MLFLOW_TRACKING_URI or give --tracking-uri."
        )
    client = patience.Patient(tracking.connect().MlflowClient())
    try:
        yield client
    except TunelineError:
        raise
    except Exception as error:
        if patience.status(error) is None:
            raise
        raise patience.told(error, client) from error


def store_is_missing() -> bool:
    """Whether the registry is a SQLite file that does not exist yet: asking it would make it."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()


def require_store(name: str) -> None:
    """Raise RegistryError where there is no registry yet that could hold a model `name`; asking would make one."""
    if tracking.enabled() and store_is_missing():
        raise RegistryError(
            f"there is no registry yet, so no model {name}",
            hint="`tuneline run` makes one; or name another with --tracking-uri or --workdir.",
        )


def get(client: Any, name: str, version: str) -> Any:
    """A model version. Raises RegistryError naming those that exist."""
    found = {str(v.version): v for v in listed(client, name)}
    if str(version) not in found:
        there = ", ".join(sorted(map(str, found), key=int)) or "none yet"
        raise RegistryError(f"{name} has no version {version}", hint=f"Versions of {name}: {there}.")
    # A listing does not carry the aliases of every version; the version itself does.
    return client.get_model_version(name, str(version))


def listed(client: Any, name: str, tag: tuple[str, str] | None = None) -> list[Any]:
    """The versions of a registered model, those with a tag only where one is given. Raises RegistryError for an unknown model."""
    require_model(client, name)
    return search(client, name, tag)


def search(client: Any, name: str, tag: tuple[str, str] | None = None) -> list[Any]:
    """The versions of a registered model by number, those with a tag only where one is given; none of an unknown model."""
    condition = f"name = '{_quoted(name)}'" + (f" AND tag.`{tag[0]}` = '{tag[1]}'" if tag else "")
    found, token = [], None
    while True:
        page = client.search_model_versions(condition, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted((v for v in found if v.name == name), key=lambda v: int(v.version))


def _quoted(name: str) -> str:
    if "'" in name:
        raise RegistryError(f"{name} holds a quotation mark", hint="Name the model without one.")
    return name


def model(client: Any, name: str) -> Any | None:
    """The registered model, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code in ABSENT:
            return None
        raise


def make_model(client: Any, name: str, description: str | None = None) -> None:
    """Have a registered model of this name; another job may make it at the same moment."""
    if model(client, name) is not None:
        return
    try:
        patience.again(lambda: client.create_registered_model(name, description=description), lambda: model(client, name))
    except Exception:
        if model(client, name) is None:
            raise


def require_model(client: Any, name: str) -> Any:
    """The registered model. Raises RegistryError naming those that exist."""
    found = model(client, name)
    if found is None:
        there = [m.name for m in client.search_registered_models(max_results=100) if not m.name.endswith(HISTORY)]
        names = ", ".join(sorted(there)) or "none yet"
        raise RegistryError(f"there is no registered model {name}", hint=f"Registered models: {names}.")
    return found


def holder(client: Any, name: str, alias: str) -> Any | None:
    """The version that holds an alias; None without such a model or alias."""
    found = model(client, name)
    version = found.aliases.get(alias) if found else None
    return client.get_model_version(name, str(version)) if version else None


def under(client: Any, name: str, alias: str) -> Any:
    """The version that holds an alias. Raises RegistryError naming the aliases and versions that exist."""
    found = holder(client, name, alias)
    if found is None:
        numbers = ", ".join(str(v.version) for v in listed(client, name)) or "none yet"
        held = ", ".join(f"{one} (version {v})" for one, v in sorted(require_model(client, name).aliases.items())) or "none"
        raise RegistryError(f"{name} has no alias {alias}", hint=f"Aliases of {name}: {held}; versions: {numbers}.")
    return found


def tag(client: Any, version: Any, tags: Mapping[str, str]) -> None:
    """Set tags of a version, those that change."""
    for key, value in tags.items():
        if version.tags.get(key) != value:
            client.set_model_version_tag(version.name, version.version, key, value)


def untag(client: Any, version: Any, keys: Iterator[str] | list[str]) -> None:
    """Delete tags of a version, those that it has."""
    for key in keys:
        if key in version.tags:
            client.delete_model_version_tag(version.name, version.version, key)


def remove_unused(client: Any, version: Any) -> None:
    """Delete a version that has no alias; another job may do so at the same moment."""
    from mlflow.exceptions import MlflowException

    try:
        if not client.get_model_version(version.name, version.version).aliases:
            client.delete_model_version(version.name, version.version)
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
