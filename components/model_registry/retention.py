"""What the registry needs of the artifacts, and what MLflow keeps that nobody needs: ended runs, and files of models without a version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from components.common import tracking
from components.model_registry import history, listing, patience, versions
from components.model_registry.history import is_history
from components.model_registry.stage import LOGGED
from components.model_registry.versions import PREFIX

MOVED_BY_PEOPLE = ("promote", "rollback", "foreign")  # what a registration moves is never rolled back
DIGESTS = ("model", "evaluation", "repository", "dataset", "base_model", "incumbent")
SHA256 = f"{PREFIX}model_sha256"
PARENT = "mlflow.parentRunId"  # MLflow's tag of the run that a run is nested in
REMOVING = f"{PREFIX}removing"  # tag of a logged model whose files are being removed: no registration finds it by its digest any more


@dataclass(frozen=True)
class Needed:
    """Digests that a version names, and why the version counts."""

    why: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """Something that MLflow keeps: a run or a logged model. `uri` is where its files lie, `unused` the seconds since it last changed;
    `stays` says why it has to stay, "" where nothing speaks for it; `parent` is the run that a run is nested in."""

    id: str
    name: str
    uri: str
    bytes: int
    unused: float
    stays: str
    parent: str = ""


def is_missing() -> bool:
    """Whether there is no registry that could be asked."""
    return not tracking.enabled() or versions.store_is_missing()


def needed(keep_versions: int) -> list[Needed]:
    """What aliases, the ways back of `tuneline rollback`, and the newest versions of every model name, in this order.

    Raises EngineMissingError where no server answers, RegistryError where it refuses.
    """
    if is_missing():
        return []
    return [*_aliased(listed := listing.listed()), *_ways_back(listed), *_newest(listed, keep_versions)]


def _aliased(listed: list[listing.Listed]) -> Iterator[Needed]:
    yield from (_named(one, f"{one.name} version {one.version} is {', '.join(reversed(one.aliases))}") for one in listed if one.aliases)


def _ways_back(listed: list[listing.Listed]) -> Iterator[Needed]:
    by_number = {(one.name, one.version): one for one in listed}
    with versions.talking() as client:
        for name in dict.fromkeys(one.name for one in listed):
            entries = history.read(client, name)
            for alias in dict.fromkeys(entry.alias for entry in entries if entry.kind in MOVED_BY_PEOPLE):
                for number in history.earlier_holders(entries, alias)[-1:]:
                    if back := by_number.get((name, number)):
                        yield _named(back, f"{name} version {number} is what a rollback of {alias} leads to")


def _newest(listed: list[listing.Listed], count: int) -> Iterator[Needed]:
    for name in dict.fromkeys(one.name for one in listed):
        own = sorted((one for one in listed if one.name == name), key=lambda one: int(one.version))
        newest = own[-count:] if count else []
        yield from (_named(one, f"{name} version {one.version} is one of its newest {count}") for one in newest)


def _named(one: listing.Listed, why: str) -> Needed:
    said = (one.said.get(f"{kind}_sha256", "") for kind in DIGESTS)
    return Needed(why, tuple(digest for digest in said if digest))


def ended_runs(older_than: float, owner: str | None, newest: int = 0) -> list[Kept]:
    """The runs that tuneline logged in one workdir, by its identity, or in any (None), without those that were deleted and have no files
    left. The newest so many stay; bytes are taken of those only that are older than so many seconds and that nothing speaks for. Raises as
    `needed`."""
    if is_missing():
        return []
    with versions.talking() as client:
        logged = _logged_runs(client)
        runs = {run_id: run for run_id, run in logged.items() if _is_own(_owner(run, logged), owner)}
        stay = {**_of_newest(runs, newest), **_runs_of_versions(client)}
        kept = [(run, _run(run, stay, older_than)) for run in runs.values()]
    return [one for run, one in kept if one.bytes or not _is_deleted(run)]


def of_others(owner: str) -> int:
    """How many runs and logged models are of other workdirs, or say of none whose they are. Raises as `needed`."""
    if is_missing():
        return 0
    with versions.talking() as client:
        runs = _logged_runs(client)
        others = sum(not _is_own(_owner(run, runs), owner) for run in runs.values() if not _is_deleted(run))
        return others + sum(not _is_of(model, owner) for model in _logged_models(client))


def _is_own(said: str, owner: str | None) -> bool:
    """Whether what says to be of one workdir is of this one, or any counts (None). What says nothing is nobody's."""
    return owner is None or said == owner != ""


def _logged_runs(client: Any) -> dict[str, Any]:
    """The runs of tuneline by id, and what is nested in them: earlier versions marked the recipes of a sweep by that alone."""
    found = {run.info.run_id: run for tag in (f"{PREFIX}run", f"{PREFIX}stage") for run in _runs(client, tag)}
    nested = {run.info.run_id: run for run in _runs(client, PARENT)}
    while within := {run_id: run for run_id, run in nested.items() if run_id not in found and _parent(run) in found}:
        found |= within
    return found


def _parent(run: Any) -> str:
    return str(run.data.tags.get(PARENT, ""))


def _owner(run: Any, runs: Mapping[str, Any]) -> str:
    """The workdir that a run says to be of, or else the run that it is nested in; "" where nobody says."""
    seen: set[str] = set()
    while run is not None and run.info.run_id not in seen:
        seen.add(run.info.run_id)
        if owner := run.data.tags.get(tracking.OWNER):
            return str(owner)
        run = runs.get(_parent(run))
    return ""


def _of_newest(runs: Mapping[str, Any], count: int) -> dict[str, str]:
    """The newest runs with the reason. The steps of one run of Kubeflow Pipelines, and what is nested in another, count as one."""
    began: dict[str, int] = {}
    whole = {run_id: _whole(run, runs) for run_id, run in runs.items() if not _is_deleted(run)}
    for run_id, one in whole.items():
        start = runs[run_id].info.start_time or 0
        began[one] = min(began.get(one, start), start)
    newest = set(sorted(began, key=lambda one: began[one], reverse=True)[:count])
    return {run_id: f"one of the newest {count} runs" for run_id, one in whole.items() if one in newest}


def _whole(run: Any, runs: Mapping[str, Any]) -> str:
    """What a run is a part of."""
    seen: set[str] = set()
    while (parent := runs.get(_parent(run))) is not None and parent.info.run_id not in seen:
        seen.add(parent.info.run_id)
        run = parent
    return str(run.data.tags.get(tracking.PIPELINE) or run.info.run_id)


def _is_deleted(run: Any) -> bool:
    return str(run.info.lifecycle_stage) == "deleted"


def _runs(client: Any, tag: str) -> Iterator[Any]:
    from mlflow.entities import ViewType

    experiments = [one.experiment_id for one in client.search_experiments(view_type=ViewType.ALL)]
    token = None
    while True:
        asked = {"run_view_type": ViewType.ALL, "max_results": 1000, "page_token": token}
        page = client.search_runs(experiments, f"tags.`{tag}` != ''", **asked)
        yield from page
        token = page.token
        if not token:
            return


def _runs_of_versions(client: Any) -> dict[str, str]:
    """The runs that versions of models came of, each with the version."""
    models = [model for model in listing.registered_models(client) if not is_history(model.name)]
    return {v.run_id: f"{v.name} version {v.version} came of it" for m in models for v in versions.search(client, m.name) if v.run_id}


def _run(run: Any, stay: Mapping[str, str], older_than: float) -> Kept:
    info, parent = run.info, _parent(run)
    open_ = not _is_deleted(run) and info.status in ("RUNNING", "SCHEDULED")
    stays = stay.get(info.run_id) or stay.get(parent) or ("it is still open in MLflow" if open_ else "")
    unused = _since(info.end_time or info.start_time or 0)
    taken = 0 if stays or unused < older_than else _bytes(info.artifact_uri)
    return Kept(info.run_id, info.run_name or info.run_id, info.artifact_uri, taken, unused, stays, parent)


def _since(milliseconds: int) -> float:
    """Seconds since a moment of MLflow's. Its times are those of the machines that log, so this machine's clock has to do."""
    return time.time() - milliseconds / 1000


def remove_run(run_id: str) -> None:
    """Delete a run, then its files: one that was deleted counts for nobody, and a killed removal is gone on with. Its metrics and
    parameters stay in MLflow's database until `mlflow gc`. Raises as `needed`."""
    with versions.talking() as client:
        run = client.get_run(run_id)
        if not _is_deleted(run):
            client.delete_run(run_id)
        _remove_files(run.info.artifact_uri)


def unversioned_models(older_than: float, owner: str | None) -> list[Kept]:
    """The logged models of one workdir, or of any (None), that no version of a registered model is made of, bytes as for runs. Raises as
    `needed`."""
    if is_missing():
        return []
    with versions.talking() as client:
        used = _models_of_versions(client)
        return [_logged(model, older_than) for model in _logged_models(client) if model.model_id not in used and _is_of(model, owner)]


def _is_of(model: Any, owner: str | None) -> bool:
    return _is_own(str(model.tags.get(tracking.OWNER, "")), owner)


def _models_of_versions(client: Any) -> set[str]:
    models = [model for model in listing.registered_models(client) if not is_history(model.name)]
    sources = [str(version.source) for model in models for version in versions.search(client, model.name)]
    return {source.removeprefix(LOGGED) for source in sources if source.startswith(LOGGED)}


def _logged_models(client: Any) -> Iterator[Any]:
    experiments, token = [one.experiment_id for one in client.search_experiments()], None
    while True:
        page = client.search_logged_models(experiments, max_results=100, page_token=token)
        yield from (model for model in page if SHA256 in model.tags or REMOVING in model.tags)
        token = page.token
        if not token:
            return


def _logged(model: Any, older_than: float) -> Kept:
    unused = _since(model.last_updated_timestamp or model.creation_timestamp)
    taken = 0 if unused < older_than else _bytes(model.artifact_location)
    return Kept(model.model_id, model.name, model.artifact_location, taken, unused, "")


def remove_model(model_id: str) -> bool:
    """Remove the files of a logged model, then the model. Returns False where a version is made of it by now.

    First it loses the digest by which a registration would find it; a killed removal is gone on with. Raises as `needed`.
    """
    with versions.talking() as client:
        model = next((one for one in _logged_models(client) if one.model_id == model_id), None)
        if model is None:  # somebody else has removed it
            return True
        if sha256 := model.tags.get(SHA256):
            client.set_logged_model_tags(model_id, {REMOVING: sha256})
            client.delete_logged_model_tag(model_id, SHA256)
        if model_id in _models_of_versions(client):
            _give_back(client, model_id)
            return False
        _remove_files(model.artifact_location)
        client.delete_logged_model(model_id)
    return True


def _give_back(client: Any, model_id: str) -> None:
    tags = client.get_logged_model(model_id).tags
    client.set_logged_model_tags(model_id, {SHA256: tags[REMOVING]})
    client.delete_logged_model_tag(model_id, REMOVING)


def _remove_files(uri: str) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    patience.again(lambda: get_artifact_repository(uri).delete_artifacts())


def _bytes(uri: str) -> int:
    """Bytes of the files below an address."""
    if uri.startswith("file:") or uri.startswith("/"):
        folder = Path(unquote(urlparse(uri).path))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return patience.again(lambda: _below(get_artifact_repository(uri), None))


def _below(repository: Any, folder: str | None) -> int:
    listed = repository.list_artifacts(folder)
    return sum(_below(repository, one.path) if one.is_dir else int(one.file_size or 0) for one in listed)
