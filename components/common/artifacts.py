"""Artifacts: a folder with a manifest, published so that a killed process leaves nothing that looks finished.

The order is the guarantee: the folder is marked unfinished, its files are written and flushed, and manifest.json comes last by rename.
A folder without its manifest is unfinished and never read; a folder with one is checked against it, digest by digest, whenever it is
read. No lock, no rename across mounts: it holds on NFS too.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common import cores, hashing
from components.common.errors import ArtifactDamagedError, OutputOccupiedError, UsageError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
PASSING = "passing"  # in a summary: the result rests on a failure in passing, a service that did not answer
KINDS = ("dataset", "model", "evaluation", "repository", "base_model")


class Input(BaseModel):
    """What an artifact was made from: another artifact, a raw file, a base model."""

    kind: str
    content_sha256: str
    uri: str


class File(BaseModel):
    """A file of an artifact. Payload files make its identity; reports, logs and timings do not."""

    path: str
    bytes: int
    sha256: str
    payload: bool


class Manifest(BaseModel):
    """manifest.json, as docs/artifacts.md describes it. Fields that a later version adds are kept, not refused."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    schema_: str = Field(alias="schema")
    content_sha256: str
    inputs: list[Input]
    files: list[File]
    config: dict[str, Any]
    config_sha256: str
    seed: int
    produced_by: dict[str, Any]
    summary: dict[str, Any]

    @property
    def kind(self) -> str:
        """dataset, model, evaluation, repository or base_model."""
        return self.schema_.split("/")[1]

    def input(self, kind: str) -> Input | None:
        """The first input of a kind, or None."""
        return next((i for i in self.inputs if i.kind == kind), None)

    @property
    def lasting(self) -> bool:
        """Whether the same work would lead to it again. One that rests on a failure in passing is not taken for work that is done."""
        return not self.summary.get(PASSING)


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: where it lies and what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def sha256(self) -> str:
        """Its identity."""
        return self.manifest.content_sha256

    def as_input(self, uri: str = "") -> Input:
        """How another artifact names this one as its input."""
        return Input(kind=self.manifest.kind, content_sha256=self.sha256, uri=uri or f"store:{self.sha256}")


def begin(folder: Path, key: str, *, overwrite: bool = False) -> Artifact | None:
    """Claim `folder` for a result with this key.

    Returns the artifact that is already finished there under the same key, unless it rests on a failure in passing. Otherwise leaves an
    empty folder marked unfinished and returns None. Raises OutputOccupiedError when something else is there: another artifact without
    `overwrite`, or files that tuneline did not write, which are never deleted.
    """
    if folder.is_file():
        raise OutputOccupiedError(f"{folder} is a file", hint="Name a folder with -o.")
    if (folder / MANIFEST).exists() and not (overwrite and _is_torn(folder)):
        found = read_manifest(folder)
        same = found.produced_by.get("key") == key
        if same and found.lasting and not overwrite:
            return read(folder)
        if not same and not overwrite:
            raise OutputOccupiedError(
                f"{folder} already holds another {found.kind} ({found.content_sha256[:12]})",
                hint="Choose another folder, or give --overwrite to replace it.",
            )
    elif folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in (UNFINISHED, MANIFEST)):
        raise OutputOccupiedError(f"{folder} is not empty and was not written by tuneline", hint="Choose an empty or a new folder for -o.")
    _clear(folder)
    return None


def rests_on_a_failure(folder: Path, key: str) -> bool:
    """Whether the folder holds a result with this key that rests on a failure in passing, so that it may be made again."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        found = read_manifest(folder)
    except ArtifactDamagedError:
        return False
    return found.produced_by.get("key") == key and not found.lasting


def _is_torn(folder: Path) -> bool:
    """Whether the manifest is one of ours that cannot be read any more."""
    try:
        read_manifest(folder)
    except ArtifactDamagedError:
        return "tuneline/" in (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")[:200]
    return False


def _clear(folder: Path) -> None:
    """Empty the folder, marked unfinished before its manifest goes and until the next one comes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    (folder / MANIFEST).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.name == UNFINISHED:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def publish(
    folder: Path,
    kind: str,
    *,
    payload: Callable[[str], bool] | Sequence[str],
    inputs: Sequence[Input],
    config: Mapping[str, Any],
    seed: int,
    key: str,
    summary: Mapping[str, Any],
) -> Artifact:
    """Finish the artifact in `folder`: digest and flush every file, then write manifest.json by rename.

    `payload` says which relative paths make the artifact's identity: a list of them, or a predicate.
    """
    is_payload = payload if callable(payload) else set(payload).__contains__
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p not in (folder / UNFINISHED, folder / MANIFEST)):
        relative = path.relative_to(folder).as_posix()
        _fsync(path)
        files.append(File(path=relative, bytes=path.stat().st_size, sha256=hashing.sha256_file(path), payload=is_payload(relative)))
    manifest = Manifest(
        schema_=f"tuneline/{kind}/v1",
        content_sha256=hashing.content_sha256((f.path, f.sha256) for f in files if f.payload),
        inputs=list(inputs),
        files=files,
        config=dict(config),
        config_sha256=hashing.digest(dict(config)),
        seed=seed,
        produced_by={**produced_by(), "key": key},
        summary=dict(summary),
    )
    write_atomically(folder / MANIFEST, manifest.model_dump_json(by_alias=True, indent=2) + "\n")
    (folder / UNFINISHED).unlink(missing_ok=True)
    return Artifact(folder, manifest)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # in every pod the process has the same number
    try:
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished artifact, its files not yet checked. Raises ArtifactDamagedError when it is missing or unreadable."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="Name the folder of a finished artifact.")
    if not path.exists():
        raise ArtifactDamagedError(
            f"{folder} has no {MANIFEST}: it was never finished",
            hint="Run the step that makes it again; it goes on from there.",
        )
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, ValidationError) as error:
        raise ArtifactDamagedError(f"{path} is unreadable: {error}", hint="Make the artifact again with --overwrite.") from None


def read(folder: Path, *kinds: str) -> Artifact:
    """A finished artifact of one of these kinds, every file checked against its digest.

    Raises ArtifactDamagedError naming the first file that is missing or changed, and UsageError for an artifact of another kind.
    """
    manifest = read_manifest(folder)
    of_kind(Artifact(folder, manifest), kinds)
    for file in manifest.files:
        _check(folder, file, manifest.kind)
    if manifest.content_sha256 != hashing.content_sha256((f.path, f.sha256) for f in manifest.files if f.payload):
        raise _damaged(folder, MANIFEST, manifest.kind, "does not add up to its own content_sha256")
    return Artifact(folder, manifest)


def of_kind(artifact: Artifact, kinds: Sequence[str]) -> Artifact:
    """The artifact itself. Raises UsageError where it is none of these kinds; no kinds: any."""
    if kinds and artifact.manifest.kind not in kinds:
        raise UsageError(
            f"{artifact.path} holds a {artifact.manifest.kind}, not a {' or '.join(kinds)}", hint="Check the order of the arguments."
        )
    return artifact


def _check(folder: Path, file: File, kind: str) -> None:
    path = folder / file.path
    if not path.is_file():
        raise _damaged(folder, file.path, kind, "is missing")
    if path.stat().st_size != file.bytes or hashing.sha256_file(path) != file.sha256:
        raise _damaged(folder, file.path, kind, "has changed since it was published")


def _damaged(folder: Path, path: str, kind: str, what: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{path} of the {kind} in {folder} {what}",
        hint=f"Restore the file, or remove {folder} and run the step that made it again.",
    )


@cache
def produced_by() -> dict[str, Any]:
    """tuneline's version, the commit of a source checkout if it is one, and what results depend on: versions, and the processor."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("tuneline")
    except PackageNotFoundError:
        own = "source"
    where = {"python": platform.python_version(), "cpu": cores.processor()}
    return {"tuneline": own, "git_commit": _git_commit(), "packages": hashing.packages(), **where}


def _git_commit() -> str | None:
    """The checkout's commit, with "+changes" when the working tree differs from it; None when installed from a wheel."""
    if not (hashing.ROOT / ".git").exists():
        return os.environ.get("TUNELINE_GIT_COMMIT")
    command = ["git", "-C", str(hashing.ROOT), "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
