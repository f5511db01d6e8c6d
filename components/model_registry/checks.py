"""What a promotion asks of a version: accepted against the very model in service, proven, and every file of it what was registered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common import artifacts, places
from components.common.artifacts import Artifact
from components.common.errors import DiskFullError, EngineMissingError, NotWritableError, RegistryError, TunelineError
from components.common.places import Workdir
from components.model_registry import files, lineage
from components.model_registry.lineage import PROVEN
from components.model_registry.versions import PREFIX

NOT_COMPARED = "not compared"  # the alias is not the champion's, so what the version was compared with does not matter


def said(version: Any, present: str | None) -> list[str]:
    """Why a version may not be promoted by what its tags say, as clauses.

    `present` is the digest of the model in service that its evaluation must have compared it with; None: there is none.
    """
    verdict, proof = _tag(version, "verdict"), _tag(version, "proof")
    found = [] if verdict == "accepted" else [f"its evaluation's verdict is {verdict or 'missing'}"]
    if not _tag(version, "repository_sha256"):
        found.append("it has no Triton package")
    elif proof != PROVEN:
        found.append("its Triton package is unproven")
    return [*found, *_compared(_tag(version, "incumbent_sha256"), present)]


def _tag(version: Any, name: str) -> str | None:
    return version.tags.get(PREFIX + name) or None


def _compared(with_: str | None, present: str | None) -> list[str]:
    if present == NOT_COMPARED or with_ == present:
        return []
    return [f"its evaluation compared it with {_short(with_)}, and the champion is {_short(present)}"]


def _short(sha256: str | None) -> str:
    return f"model {sha256[:12]}" if sha256 else "no model"


def looked_at(version: Any, present: str | None) -> list[str]:
    """Why a version may not be promoted by what its files are, as clauses. Every file is read, and its digest taken.

    Raises EngineMissingError, DiskFullError, NotWritableError where they cannot be looked at now: that says nothing of the version.
    """
    found: list[str] = []
    for kind, check in (("model", _model), ("evaluation", _evaluation), ("repository", _repository)):
        sha256 = _tag(version, f"{kind}_sha256")
        if sha256 is None:  # the tags' own clauses say so
            continue
        try:
            with found_at(version, kind, sha256) as artifact:
                found += check(version, artifact, present) if artifact.sha256 == sha256 else [_other(kind, sha256, artifact.sha256)]
        except (EngineMissingError, DiskFullError, NotWritableError):
            raise
        except TunelineError as error:
            found.append(f"its {kind} does not verify ({error.message})")
    return found


def _other(kind: str, named: str, sha256: str) -> str:
    return f"its {kind} is {sha256[:12]}, and the version names {named[:12]}"


@contextmanager
def found_at(version: Any, kind: str, sha256: str) -> Iterator[Artifact]:
    """The artifact where the version says it lies, in the work folder's store, or fetched from MLflow; every digest checked."""
    damaged: TunelineError | None = None
    for uri in _places(version, kind, sha256):
        try:
            place = places.folder_of(uri)
            if place is None or not (place / artifacts.MANIFEST).exists():
                continue
            whole = artifacts.read(place, kind)
        except TunelineError as error:
            damaged = error
            continue
        yield whole
        return
    if damaged:
        raise damaged
    with tempfile.TemporaryDirectory() as folder:
        yield files.fetch_kind(version, kind, Path(folder) / kind)


def _places(version: Any, kind: str, sha256: str) -> list[str]:
    named = _tag(version, "store_uri" if kind == "model" else f"{kind}_store_uri") or ""
    return [*([named] if named else []), places.uri_of(Workdir.from_environment().store, sha256)]


def _model(version: Any, model: Artifact, present: str | None) -> list[str]:
    del version, model, present  # its digest says all
    return []


def _evaluation(version: Any, evaluation: Artifact, present: str | None) -> list[str]:
    """The evaluation itself, whatever the tags say: they can be edited in MLflow's UI."""
    manifest = evaluation.manifest
    judged, incumbent = manifest.input("model"), manifest.input("incumbent")
    try:
        verdict = lineage.verdict(evaluation)
    except RegistryError as error:
        return [error.message]
    found = [] if verdict == "accepted" else [f"its evaluation's verdict is {verdict}"]
    if judged is None or judged.content_sha256 != _tag(version, "model_sha256"):
        found.append("its evaluation judged another model")
    return [*found, *_compared(incumbent.content_sha256 if incumbent else None, present)]


def _repository(version: Any, repository: Artifact, present: str | None) -> list[str]:
    del present
    source = repository.manifest.input("model")
    found = [] if repository.manifest.summary.get("proof") else ["its Triton package is unproven"]
    if source is None or source.content_sha256 != _tag(version, "model_sha256"):
        found.append("its Triton package was made from another model")
    return found
