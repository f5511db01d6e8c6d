"""Where a row went: the revisions that hold it, and every model, evaluation and package that came of them.

It answers a request to be forgotten, so it must not look complete where it is not: what could not be searched is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.common import artifacts, places
from components.common.artifacts import Artifact, Manifest
from components.common.errors import TunelineError
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_versioning import search
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.search import Query, Searched
from components.model_registry import listing
from components.model_registry.listing import Listed
from components.model_registry.promotion import CHAMPION

BESIDE = ("incumbent", "earlier", "evaluation_set")  # kinds of inputs that a thing was compared with, not made from


@dataclass
class Stored:
    """An artifact in the store of finished ones: where it lies, what its manifest says, and how its files are had, every digest checked."""

    uri: str
    manifest: Manifest
    read: Callable[[], Artifact]

    @property
    def sha256(self) -> str:
        """Its identity."""
        return self.manifest.content_sha256

    def made_from(self) -> set[str]:
        """The digests of what it was made from."""
        return {one.content_sha256 for one in self.manifest.inputs if one.kind not in BESIDE}


@dataclass
class Answer:
    """What was found, and what could not be looked at."""

    by: str
    searched: dict[str, int]
    revisions: list[dict[str, Any]]
    datasets: list[dict[str, Any]]
    models: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    packages: list[dict[str, Any]]
    runs: list[dict[str, str]] = field(default_factory=list)
    not_searched: list[dict[str, str]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything there is was searched."""
        return not self.not_searched

    @property
    def found(self) -> bool:
        """Whether any dataset holds it."""
        return bool(self.revisions or self.datasets)

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline data find --json` prints. What was looked for is not in it."""
        return {"by": self.by, "found": self.found, "complete": self.complete, **{k: v for k, v in asdict(self).items() if k != "by"}}


def find(query: Query, work: Workdir, config: DataVersioningConfig, reporter: Reporter) -> Answer:
    """Search every revision of the data repository and every dataset in the store, and follow those with a hit to what came of them."""
    reporter.step("searching the revisions")
    published = versioning.find(query, config, workdir=work.root, reporter=reporter)
    missing = list(published.not_searched)
    reporter.step("searching the artifact store")
    stored = _stored(work.store, missing)
    unpublished = _unpublished(query, stored, published, missing)
    hits = {one.content_sha256 for one in published.found} | {one["sha256"] for one in unpublished}
    reporter.step("asking the model registry")
    registered = _registered(work, missing)
    affected = descendants(hits, stored, registered)
    answer = Answer(
        by=query.by,
        searched={"revisions": published.revisions, "contents": len(published.read), "models": len(registered)},
        revisions=[asdict(one) for one in published.found],
        datasets=[*unpublished, *_copies(stored, hits - {one["sha256"] for one in unpublished})],
        models=_models(affected, stored, registered),
        evaluations=_of_kind("evaluation", affected, stored, registered),
        packages=_packages(affected, stored, registered),
        not_searched=missing,
    )
    answer.runs = _runs(hits, work, missing)
    return answer


def _stored(store: Path, missing: list[dict[str, str]]) -> list[Stored]:
    """The artifacts of the store, and those that a job has moved aside and nothing has replaced yet.

    The store is looked through before and after: what another job moves meanwhile is seen in one place or the other, or named.
    """
    there = set(places.listed(store))
    aside, works = places.unfinished(store)
    there |= set(places.listed(store))
    lost = {folder for folder in aside if folder.name not in there}
    why = "work of a job that is running, or was killed on another machine"
    missing += [
        {"what": str(work), "why": why, "hint": "Search again when no run is at work; an hour after it was killed."} for work in works
    ]
    found = []
    for sha256 in sorted(there):
        try:
            if said := places.manifest(store, sha256):
                found.append(Stored(places.uri_of(store, sha256), said, partial(places.stored, store, sha256)))
        except (TunelineError, OSError) as error:
            missing.append(_unread(str(store / sha256), error))
    for folder in sorted(lost):
        try:
            found.append(Stored(folder.absolute().as_uri(), artifacts.read_manifest(folder), partial(artifacts.read, folder)))
        except (TunelineError, OSError) as error:
            missing.append(_unread(str(folder), error))
    return found


def _unread(what: str, error: TunelineError | OSError) -> dict[str, str]:
    if isinstance(error, TunelineError):
        return {"what": what, "why": error.message, "hint": error.hint}
    return {"what": what, "why": str(error), "hint": "Check the permissions, and whether the disk is mounted and sound."}


def _unpublished(query: Query, stored: Iterable[Stored], published: Searched, missing: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The store's datasets that are no revision, those with a hit."""
    found = []
    for one in stored:
        if one.manifest.kind != "dataset" or one.sha256 in published.read:
            continue
        try:
            dataset = one.read()
            gap, where = search.left_out(query, dataset), search.within(query, dataset)
        except (TunelineError, OSError) as error:
            missing.append(_unread(one.uri, error))
            continue
        if gap:
            missing.append({"what": one.uri, **gap})
        if where:
            found.append({"sha256": one.sha256, "uri": one.uri, "places": where})
    return found


def _copies(stored: Iterable[Stored], hits: set[str]) -> list[dict[str, Any]]:
    """Where the store holds a revision's dataset as well: the same places as in the revision."""
    copies = [one for one in stored if one.manifest.kind == "dataset" and one.sha256 in hits]
    return [{"sha256": one.sha256, "uri": one.uri, "places": []} for one in copies]


def _registered(work: Workdir, missing: list[dict[str, str]]) -> list[Listed]:
    try:
        return listing.listed()
    except TunelineError as error:
        missing.append(_unread("the model registry", error))
        return []


def _runs(hits: set[str], work: Workdir, missing: list[dict[str, str]]) -> list[dict[str, str]]:
    if any(one["what"] == "the model registry" for one in missing):
        return []
    try:
        return listing.runs_on(hits)
    except TunelineError as error:
        missing.append(_unread("the MLflow runs", error))
        return []


def descendants(hits: set[str], stored: Iterable[Stored], registered: Iterable[Listed]) -> set[str]:
    """The digests of all that was made from these datasets, however far down: also a model tuned from a model that was."""
    links = [({*one.made_from()}, {one.sha256}) for one in stored]
    for version in registered:
        said = version.said
        parents = {said.get("dataset_sha256", ""), said.get("base_model_sha256", "")}
        links.append((parents, {said["model_sha256"]}))
        links.append(({said["model_sha256"]}, {said.get(f"{kind}_sha256", "") for kind in ("evaluation", "repository")} - {""}))
    affected = set(hits)
    while True:
        more = {child for parents, children in links if parents & affected for child in children} - affected
        if not more:
            return affected - hits
        affected |= more


def _models(affected: set[str], stored: Iterable[Stored], registered: Iterable[Listed]) -> list[dict[str, Any]]:
    """The models, each with the versions it is registered as and where its files lie in the store."""
    found: dict[str, dict[str, Any]] = {}
    for one in stored:
        if one.manifest.kind == "model" and one.sha256 in affected:
            found[one.sha256] = {"sha256": one.sha256, "uri": one.uri, "versions": []}
    for version in registered:
        sha = version.said["model_sha256"]
        if sha in affected:
            entry = found.setdefault(sha, {"sha256": sha, "uri": version.said.get("store_uri", ""), "versions": []})
            entry["versions"].append({"name": version.name, "version": version.version, "aliases": version.aliases})
    return list(found.values())


def _of_kind(kind: str, affected: set[str], stored: Iterable[Stored], registered: Iterable[Listed]) -> list[dict[str, Any]]:
    found = {one.sha256: one.uri for one in stored if one.manifest.kind == kind and one.sha256 in affected}
    for version in registered:
        sha = version.said.get(f"{kind}_sha256", "")
        if sha in affected:
            found.setdefault(sha, version.said.get(f"{kind}_store_uri", ""))
    return [{"sha256": sha, "uri": uri} for sha, uri in sorted(found.items())]


def _packages(affected: set[str], stored: Iterable[Stored], registered: Iterable[Listed]) -> list[dict[str, Any]]:
    """The Triton repositories; `in_service`: the registered versions with the alias champion that they are of."""
    packages = _of_kind("repository", affected, stored, registered)
    for package in packages:
        of = [v for v in registered if v.said.get("repository_sha256") == package["sha256"]]
        package["versions"] = [{"name": v.name, "version": v.version, "aliases": v.aliases} for v in of]
        package["in_service"] = any(CHAMPION in v.aliases for v in of)
    return packages
