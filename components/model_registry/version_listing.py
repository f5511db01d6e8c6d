"""Lists of all registered versions, and of the runs that used a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

from pydantic import BaseModel

from components.model_registry import model_versions
from components.model_registry.model_versions import TAG_PREFIX, iterate_pages
from components.model_registry.registry_history import is_history_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel as MlflowModel


class RegisteredVersion(BaseModel):
    """A version of a registered model. `tags` contains the tags with the prefix "tuneline.", which is removed."""

    name: str
    version: str
    aliases: list[str]
    tags: dict[str, str]


def list_registered_versions() -> list[RegisteredVersion]:
    """Return every version that tuneline registered; empty if no registry exists.

    Raises:
        EngineMissingError, RegistryError: as `model_versions.registry_client`.
    """
    if model_versions.is_registry_missing():
        return []
    listed = []
    with model_versions.registry_client() as client:
        for model in list_registered_models(client):
            aliases: dict[str, list[str]] = defaultdict(list)
            for alias, number in sorted(model.aliases.items()):
                aliases[str(number)].append(alias)
            for version in model_versions.list_versions(client, model.name):
                number, tags = str(version.version), model_versions.get_tuneline_tags(version)
                if "model_sha256" in tags:
                    listed.append(
                        RegisteredVersion(name=version.name, version=number, aliases=aliases[number], tags=tags)
                    )
    return listed


def list_registered_models(client: MlflowClient) -> list[MlflowModel]:
    """Return every registered model except histories, sorted by name."""
    models = iterate_pages(client.search_registered_models, max_results=1000)
    return sorted((model for model in models if not is_history_name(model.name)), key=lambda model: str(model.name))


def find_runs_using_datasets(datasets: Collection[str]) -> list[dict[str, str]]:
    """Return the MLflow runs that read or produced one of these datasets.

    Args:
        datasets: digests of the datasets.

    Returns:
        Entries of the form {"run_id", "name", "experiment"}, where "experiment" is the experiment's name.

    Raises:
        EngineMissingError, RegistryError: as `model_versions.registry_client`.
    """
    if not datasets or model_versions.is_registry_missing():
        return []
    with model_versions.registry_client() as client:
        experiments = {e.experiment_id: e.name for e in client.search_experiments()}
        conditions = [f"dataset.digest = '{sha[:36]}'" for sha in sorted(datasets)]
        conditions += [f"tags.`{TAG_PREFIX}dataset_sha256` = '{sha}'" for sha in sorted(datasets)]
        runs = {
            run.info.run_id: run
            for condition in conditions
            for run in iterate_pages(client.search_runs, list(experiments), filter_string=condition, max_results=1000)
        }
    ordered = sorted(runs.values(), key=lambda run: (run.info.start_time, run.info.run_id))
    return [
        {"run_id": r.info.run_id, "name": r.info.run_name, "experiment": experiments[r.info.experiment_id]}
        for r in ordered
    ]
