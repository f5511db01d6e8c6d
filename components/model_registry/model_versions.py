"""Access to model versions, aliases and tags in MLflow. MLflow's errors are raised as TunelineError."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import EngineMissingError, RegistryError, TunelineError
from components.model_registry import mlflow_retry

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.entities.model_registry import RegisteredModel as MlflowModel
    from mlflow.store.entities import PagedList

TAG_PREFIX = "tuneline."
MODEL_SHA256_TAG = f"{TAG_PREFIX}model_sha256"
COST_TAG = f"{TAG_PREFIX}cost"  # recorded cost of the version's artifacts, as text
HISTORY_SUFFIX = ".history"  # suffix of the registered model that stores a model's history
REGISTER_HINT = "Register a model with `tuneline register` or `tuneline run`."
MAX_LISTED_VERSIONS = 20  # the latest versions, in a hint
NOT_FOUND_CODES = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


@contextmanager
def registry_client() -> Iterator[MlflowClient]:
    """Yield an MLflow client that retries while the server is busy.

    Raises:
        RegistryError: the server rejects a request.
        NotWritableError: the server's database is read-only.
        EngineMissingError: no server is configured, or the server stopped answering.
    """
    if not mlflow_tracking.is_enabled():
        raise EngineMissingError(
            "the model registry requires an MLflow server, but MLFLOW_TRACKING_URI is not set",
            hint="Set MLFLOW_TRACKING_URI or --tracking-uri.",
        )
    client = mlflow_retry.RetryingClient(mlflow_tracking.connect().MlflowClient())
    try:
        yield client
    except TunelineError:
        raise
    except Exception as error:
        if mlflow_retry.get_http_status(error) is None:
            raise
        raise mlflow_retry.build_user_error(error, client) from error


def is_store_missing() -> bool:
    """Return whether the registry is a SQLite file that does not exist; MLflow would create it on connection."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()


def is_registry_missing() -> bool:
    """Return whether no registry is configured, or the configured registry does not exist yet."""
    return not mlflow_tracking.is_enabled() or is_store_missing()


def require_store(name: str) -> None:
    """Raise RegistryError for model `name` if no registry exists yet."""
    if mlflow_tracking.is_enabled() and is_store_missing():
        raise RegistryError(
            f"no registry exists yet, so model {name} does not exist",
            hint="Run `tuneline run` to create a registry, or set --tracking-uri or --workdir to an existing registry.",
        )


def get_version(client: MlflowClient, name: str, version: str) -> ModelVersion:
    """Return a model version.

    Raises:
        RegistryError: the model or version does not exist; the hint lists the existing models or versions.
    """
    found = {str(v.version): v for v in list_versions(client, name)}
    if str(version) not in found:
        numbers = ", ".join(sorted(found, key=int)[-MAX_LISTED_VERSIONS:])
        hint = f"Choose one of: {numbers}." if numbers else REGISTER_HINT
        raise RegistryError(f"{name} has no version {version}", hint=hint)
    # A listing lacks the aliases of some versions.
    return client.get_model_version(name, str(version))


def list_versions(client: MlflowClient, name: str, tag: tuple[str, str] | None = None) -> list[ModelVersion]:
    """Return the versions of a registered model by number, optionally only the versions with a tag.

    Args:
        tag: name and value of the tag; None for all versions.

    Raises:
        RegistryError: the model does not exist.
    """
    require_model(client, name)
    return search_versions(client, name, tag)


def search_versions(client: MlflowClient, name: str, tag: tuple[str, str] | None = None) -> list[ModelVersion]:
    """Return the versions as `list_versions` does; an empty list if the model does not exist.

    Raises:
        RegistryError: the name contains a quotation mark.
    """
    if "'" in name:
        raise RegistryError(
            f"the model name {name} contains a quotation mark", hint="Choose a name without quotation marks."
        )
    condition = f"name = '{name}'" + (f" AND tag.`{tag[0]}` = '{tag[1]}'" if tag else "")
    versions = iterate_pages(client.search_model_versions, condition, max_results=1000)
    return sorted((v for v in versions if v.name == name), key=lambda v: int(v.version))


def find_version_by_tag(client: MlflowClient, tag: tuple[str, str]) -> ModelVersion | None:
    """Return a version of any registered model with this tag, the name and the value; None if no version has it."""
    found = next(iterate_pages(client.search_model_versions, f"tag.`{tag[0]}` = '{tag[1]}'", max_results=1), None)
    return client.get_model_version(found.name, found.version) if found else None


def iterate_pages(search: Callable[..., PagedList[Any]], *args: object, **kwargs: object) -> Iterator[Any]:
    """Yield the results on all pages of a search method of MLflow's client."""
    token = None
    while True:
        page = search(*args, **kwargs, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def find_model(client: MlflowClient, name: str) -> MlflowModel | None:
    """Return the registered model, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code in NOT_FOUND_CODES:
            return None
        raise


def ensure_model(client: MlflowClient, name: str, description: str | None = None) -> MlflowModel | None:
    """Create the registered model if it does not exist, else return it.

    Safe if another job creates it at the same time.
    """
    if found := find_model(client, name):
        return found
    try:
        mlflow_retry.retry(
            lambda: client.create_registered_model(name, description=description), lambda: find_model(client, name)
        )
    except Exception:
        if find_model(client, name) is None:
            raise
    return None


def require_model(client: MlflowClient, name: str) -> MlflowModel:
    """Return the registered model.

    Raises:
        RegistryError: the model does not exist; the hint lists the existing models.
    """
    found = find_model(client, name)
    if found is None:
        existing = [model.name for model in client.search_registered_models(max_results=100)]
        names = ", ".join(sorted(other for other in existing if not other.endswith(HISTORY_SUFFIX)))
        hint = f"Choose one of: {names}." if names else REGISTER_HINT
        raise RegistryError(f"the registered model {name} does not exist", hint=hint)
    return found


def get_alias_holder(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """Return the version with an alias; None if the model or alias does not exist."""
    found = find_model(client, name)
    version = found.aliases.get(alias) if found else None
    return client.get_model_version(name, str(version)) if version else None


def get_version_by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion:
    """Return the version with an alias.

    Raises:
        RegistryError: the alias is not set; the message lists the existing aliases and versions.
    """
    found = get_alias_holder(client, name, alias)
    if found is None:
        numbers = ", ".join(str(v.version) for v in list_versions(client, name)) or "none yet"
        aliases = sorted(require_model(client, name).aliases.items())
        held = ", ".join(f"{other} (version {number})" for other, number in aliases) or "none"
        raise RegistryError(
            f"{name} has no alias {alias}; aliases: {held}; versions: {numbers}",
            hint="Choose an existing alias or version.",
        )
    return found


def get_tuneline_tags(version: ModelVersion) -> dict[str, str]:
    """Return the tags that begin with TAG_PREFIX, with the prefix removed from their names."""
    return {key.removeprefix(TAG_PREFIX): value for key, value in version.tags.items() if key.startswith(TAG_PREFIX)}


def set_tags(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Set the tags of a version that changed, and delete the tags whose new value is empty."""
    for key, value in tags.items():
        if value and version.tags.get(key) != value:
            client.set_model_version_tag(version.name, version.version, key, value)
        elif not value and key in version.tags:
            client.delete_model_version_tag(version.name, version.version, key)


def delete_without_alias(client: MlflowClient, version: ModelVersion) -> None:
    """Delete a version unless it has an alias. Safe if another job deletes it at the same time."""
    from mlflow.exceptions import MlflowException

    try:
        if not client.get_model_version(version.name, version.version).aliases:
            client.delete_model_version(version.name, version.version)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND_CODES:
            raise
