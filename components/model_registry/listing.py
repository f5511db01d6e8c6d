"""Everything the registry holds, for questions about all of it: which versions and runs came of some dataset."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from components.common import tracking
from components.model_registry import versions
from components.model_registry.history import is_history
from components.model_registry.versions import PREFIX


class Listed(BaseModel):
    """A version of a registered model; `said`: its tags that begin with "tuneline.", without that."""

    name: str
    version: str
    aliases: list[str]
    said: dict[str, str]


def listed() -> list[Listed]:
    """Every version that tuneline registered, of every model; none where there is no registry yet. Raises RegistryError."""
    if not tracking.enabled() or versions.store_is_missing():
        return []
    with versions.talking() as client:
        return [one for model in registered_models(client) if not is_history(model.name) for one in _versions(client, model)]


def registered_models(client: Any) -> list[Any]:
    """Every registered model by name, those that are histories among them."""
    found, token = [], None
    while True:
        page = client.search_registered_models(max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted(found, key=lambda model: str(model.name))


def _versions(client: Any, model: Any) -> list[Listed]:
    held: dict[str, list[str]] = {}
    for alias, number in sorted(model.aliases.items()):
        held.setdefault(str(number), []).append(alias)
    ours = [v for v in versions.listed(client, model.name) if f"{PREFIX}model_sha256" in v.tags]
    return [_listed(version, held.get(str(version.version), [])) for version in ours]


def _listed(version: Any, aliases: list[str]) -> Listed:
    said = {key.removeprefix(PREFIX): value for key, value in version.tags.items() if key.startswith(PREFIX)}
    return Listed(name=version.name, version=str(version.version), aliases=aliases, said=said)


def runs_on(datasets: Collection[str]) -> list[dict[str, str]]:
    """The MLflow runs that logged one of these datasets, by digest, as their input or their result: [{"run_id", "name", "experiment"}]."""
    if not datasets or not tracking.enabled() or versions.store_is_missing():
        return []
    with versions.talking() as client:
        experiments = {e.experiment_id: e.name for e in client.search_experiments()}
        asked = [f"dataset.digest = '{sha[:36]}'" for sha in sorted(datasets)]
        asked += [f"tags.`{PREFIX}dataset_sha256` = '{sha}'" for sha in sorted(datasets)]
        found = {run.info.run_id: run for condition in asked for run in _runs(client, list(experiments), condition)}
    ordered = sorted(found.values(), key=lambda run: (run.info.start_time, run.info.run_id))
    return [{"run_id": r.info.run_id, "name": r.info.run_name, "experiment": experiments[r.info.experiment_id]} for r in ordered]


def _runs(client: Any, experiments: list[str], condition: str) -> list[Any]:
    found, token = [], None
    while True:
        page = client.search_runs(experiments, filter_string=condition, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found
