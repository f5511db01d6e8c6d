"""Talking to the registry: model versions, aliases and tags, and MLflow's errors as ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common import tracking
from components.common.errors import EngineMissingError, RegistryError

PREFIX = "tuneline."
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


@contextmanager
def talking() -> Iterator[Any]:
    """An MLflow client. What the server refuses is raised as RegistryError, and as EngineMissingError that there is no server."""
    if not tracking.enabled():
        raise EngineMissingError(
            "no MLflow server is named, and models are registered there", hint="Set MLFLOW_TRACKING_URI or give --tracking-uri."
        )
    mlflow = tracking.connect()
    from mlflow.exceptions import MlflowException

    try:
        yield mlflow.MlflowClient()
    except MlflowException as error:
        raise RegistryError(
            f"MLflow refused: {error.message.splitlines()[0]}", hint="Check the name, your permissions and the server's log."
        ) from error


def store_is_missing() -> bool:
    """Whether the registry is a SQLite file that does not exist yet: asking it would make it."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()


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


def require_model(client: Any, name: str) -> Any:
    """The registered model. Raises RegistryError naming those that exist."""
    found = model(client, name)
    if found is None:
        names = ", ".join(sorted(m.name for m in client.search_registered_models(max_results=100))) or "none yet"
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
