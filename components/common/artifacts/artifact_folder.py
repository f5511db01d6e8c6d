"""Artifacts: folders with a manifest, published atomically.

`claim_folder` marks a folder unfinished; `publish` flushes its files, and then writes manifest.json by rename. A folder
without a manifest is never read, and `read` verifies every file.
"""

# The protocol needs no locks and no renames across mounts, so it is also safe on NFS.

from __future__ import annotations

import json
import operator
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.artifacts import code_digest, hashing
from components.common.runtime import cpu_cores, filesystem
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError, UsageError

MANIFEST_FILENAME = "manifest.json"
REWARD_MODEL = "reward_model"
CREATING_COMMANDS = {
    "dataset": "curate",
    "model": "finetune",
    REWARD_MODEL: "finetune",
    "evaluation": "evaluate",
    "repository": "package",
}
SCHEMA_VERSION = 2  # of the manifests that `publish` writes; manifests of version 1 have no digest of themselves
SCHEMA_PATTERN = re.compile(r"tuneline/[a-z_]+/v[1-9]\d*")
UNFINISHED_MARKER = ".unfinished"
TRANSIENT_FAILURE_KEY = "passing"  # summary key: the result depends on a transient failure, such as an outage


class ArtifactInput(BaseModel):
    """An input of an artifact: another artifact, a raw file or a base model.

    Attributes:
        settings: how a raw file was read, if the configuration states more than its path.
    """

    kind: str
    content_sha256: str
    uri: str
    settings: dict[str, Any] = Field(default_factory=dict, exclude_if=operator.not_)


class ArtifactFile(BaseModel):
    """A file of an artifact. Payload files determine its identity; reports, logs and timings do not."""

    path: str
    bytes: int
    sha256: str
    payload: bool


class Manifest(BaseModel):
    """manifest.json, documented in docs/reference/artifacts.md. Fields of later versions are kept."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    schema_: str = Field(alias="schema")
    content_sha256: str
    inputs: list[ArtifactInput]
    files: list[ArtifactFile]
    config: dict[str, Any]
    config_sha256: str
    seed: int
    produced_by: dict[str, Any]
    summary: dict[str, Any]
    manifest_sha256: str = ""

    @property
    def kind(self) -> str:
        """Kind of the artifact: dataset, model, reward_model, evaluation, repository, base_model or extract."""
        return self.schema_.split("/")[1]

    @property
    def role(self) -> str:
        """The kind whose place in the pipeline the artifact takes: a reward model is accepted wherever a model is."""
        return _get_role(self.kind)

    @property
    def schema_version(self) -> int:
        """Version of the schema, the number at its end; 0 if the schema has no version."""
        found = re.search(r"/v(\d+)$", self.schema_)
        return int(found[1]) if found else 0

    def find_input(self, kind: str) -> ArtifactInput | None:
        """Return the first input of a kind, or None; for model also a reward model."""
        return next((i for i in self.inputs if kind in (i.kind, _get_role(i.kind))), None)

    @property
    def is_reusable(self) -> bool:
        """Whether the cache may return the artifact; False if it depends on a transient failure."""
        return not self.summary.get(TRANSIENT_FAILURE_KEY)

    def compute_payload_sha256(self) -> str:
        """Return the digest of the payload as listed in `files`."""
        return hashing.content_sha256((file.path, file.sha256) for file in self.files if file.payload)


def _get_role(kind: str) -> str:
    return "model" if kind == REWARD_MODEL else kind


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its folder and manifest."""

    path: Path
    manifest: Manifest

    @property
    def sha256(self) -> str:
        """The content digest, the artifact's identity."""
        return self.manifest.content_sha256

    def as_input(self, uri: str = "") -> ArtifactInput:
        """Return the entry for the `inputs` of another artifact's manifest.

        Args:
            uri: address of the artifact. Empty: its address in the artifact store, `store:` with the content digest.
        """
        return ArtifactInput(kind=self.manifest.kind, content_sha256=self.sha256, uri=uri or f"store:{self.sha256}")


def claim_folder(folder: Path, key: str, *, overwrite: bool = False) -> Artifact | None:
    """Claim `folder` for a result with this cache key.

    Args:
        folder: output folder; created if it does not exist.
        key: cache key of the result, a digest.
        overwrite: replace an artifact in the folder, even an artifact with the same key.

    Returns:
        The finished artifact in the folder if it has the same key and does not depend on a transient failure.
        Otherwise None, and the folder is empty and marked unfinished.

    Raises:
        ArtifactDamagedError: the manifest is unreadable and `overwrite` is not set, or a file of the finished artifact
            is missing or has changed.
        OutputOccupiedError: the folder contains another artifact and `overwrite` is not set, or files that tuneline did
            not write, which are never deleted.
    """
    manifest_path = folder / MANIFEST_FILENAME
    if folder.is_file():
        raise OutputOccupiedError(f"{folder} is a file; expected a folder", hint="Choose a folder with -o.")
    if manifest_path.exists():
        try:
            existing = read_manifest(folder)
        except ArtifactDamagedError:  # only an unreadable manifest that tuneline wrote may be overwritten
            if not overwrite or "tuneline/" not in filesystem.read_text(manifest_path, errors="replace")[:200]:
                raise
        else:
            is_same = existing.produced_by.get("key") == key
            if is_same and existing.is_reusable and not overwrite:
                return read(folder)
            if not is_same and not overwrite:
                raise OutputOccupiedError(
                    f"{folder} already contains another {existing.kind} ({existing.content_sha256[:12]})",
                    hint="Choose another folder, or replace the artifact with --overwrite.",
                )
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / UNFINISHED_MARKER).exists():
        raise OutputOccupiedError(
            f"{folder} is not empty and was not written by tuneline", hint="Choose an empty or new folder with -o."
        )
    _clear(folder)
    return None


def _clear(folder: Path) -> None:
    """Empty the folder; it is marked unfinished before its manifest is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED_MARKER).touch()
    (folder / MANIFEST_FILENAME).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            filesystem.remove_tree(entry)
        elif entry.name != UNFINISHED_MARKER:
            entry.unlink(missing_ok=True)


def has_transient_failure(folder: Path, key: str) -> bool:
    """Return whether the folder contains a result with this cache key that depends on a transient failure."""
    if not (folder / MANIFEST_FILENAME).exists():
        return False
    try:
        manifest = read_manifest(folder)
    except ArtifactDamagedError:
        return False
    return manifest.produced_by.get("key") == key and not manifest.is_reusable


def publish(
    folder: Path,
    kind: str,
    *,
    payload: Callable[[str], bool] | Sequence[str],
    inputs: Sequence[ArtifactInput],
    config: Mapping[str, Any],
    seed: int,
    key: str,
    summary: Mapping[str, Any],
) -> Artifact:
    """Finish the artifact in `folder`: digest and flush every file, then write manifest.json by rename.

    Args:
        folder: the claimed folder, which contains all files of the artifact.
        kind: dataset, model, reward_model, evaluation, repository, base_model or extract.
        payload: the relative paths that determine the artifact's identity, as a list or a predicate.
        inputs: the artifacts, raw files and base models that the result depends on.
        config: the configuration of the stage, as JSON values.
        seed: the random seed of the stage.
        key: cache key of the result, a digest.
        summary: figures for reports, as JSON values.
    """
    is_payload = payload if callable(payload) else set(payload).__contains__
    own_files = (folder / UNFINISHED_MARKER, folder / MANIFEST_FILENAME)
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p not in own_files):
        name = path.relative_to(folder).as_posix()
        fsync(path)
        sha256 = hashing.sha256_file(path)
        files.append(ArtifactFile(path=name, bytes=path.stat().st_size, sha256=sha256, payload=is_payload(name)))
    manifest = Manifest(
        schema_=f"tuneline/{kind}/v{SCHEMA_VERSION}",
        content_sha256="",
        inputs=list(inputs),
        files=files,
        config=dict(config),
        config_sha256=hashing.digest(dict(config)),
        seed=seed,
        produced_by={**collect_provenance(), "key": key},
        summary=dict(summary),
    )
    manifest.content_sha256 = manifest.compute_payload_sha256()
    manifest.manifest_sha256 = compute_manifest_sha256(json.loads(manifest.model_dump_json(by_alias=True)))
    write_atomically(folder / MANIFEST_FILENAME, manifest.model_dump_json(by_alias=True, indent=2) + "\n")
    (folder / UNFINISHED_MARKER).unlink(missing_ok=True)
    return Artifact(folder, manifest)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees either the old or the new content.

    Raises:
        OSError: the file cannot be written; the old content remains.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # process IDs can be equal in two pods
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        filesystem.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ChangedManifestError(ValueError):
    """A manifest does not match its own digest."""


def compute_manifest_sha256(fields: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's fields, as JSON values, except the digest itself."""
    return hashing.digest({name: value for name, value in fields.items() if name != "manifest_sha256"})


def parse_manifest(content: bytes | str) -> Manifest:
    """Parse a manifest and verify its digest. Manifests of schema version 1 have none.

    Raises:
        ChangedManifestError: a field has changed.
        ValueError: the content is not a manifest.
    """
    fields = json.loads(content)
    manifest = Manifest.model_validate(fields)
    if not SCHEMA_PATTERN.fullmatch(manifest.schema_):
        raise ValueError(f"schema is {manifest.schema_!r}; expected tuneline/<kind>/v<number>")
    if manifest.schema_version > 1 or manifest.manifest_sha256:
        expected = compute_manifest_sha256(fields)
        if manifest.manifest_sha256 != expected:
            raise ChangedManifestError(
                f"manifest_sha256 is {manifest.manifest_sha256[:12] or 'missing'}; its fields have the digest "
                f"{expected[:12]}"
            )
    return manifest


def read_manifest(folder: Path, *kinds: str) -> Manifest:
    """Return the manifest of a finished artifact without verifying its files; `kinds`: expected kinds, for the hint.

    Raises:
        UsageError: `folder` is not a folder.
        ArtifactDamagedError: the manifest is missing or unreadable.
    """
    path = folder / MANIFEST_FILENAME
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="Choose the folder of a finished artifact.")
    if not path.exists():
        raise ArtifactDamagedError(
            f"{folder} has no {MANIFEST_FILENAME}: the artifact is unfinished, or the folder contains no artifact",
            hint=f"{_describe_creation(kinds)}If the step was interrupted, rerun it to resume.",
        )
    try:
        return parse_manifest(filesystem.read_bytes(path))
    except ChangedManifestError as error:
        raise ArtifactDamagedError(
            f"{path} has changed since it was published: {error}",
            hint=f"Restore the file, or remove {folder} and rerun the step that created it.",
        ) from None
    except (ValueError, ValidationError, RecursionError) as error:
        raise ArtifactDamagedError(
            f"{path} is unreadable: {error}", hint="Create the artifact again with --overwrite."
        ) from None


def read(folder: Path, *kinds: str) -> Artifact:
    """Return the finished artifact in `folder` after verifying the digest of every file.

    Raises:
        ArtifactDamagedError: the manifest or a file is missing, is unreadable or has changed; the message contains the
            first of these files.
        UsageError: `folder` is not a folder, or the artifact's kind is not in `kinds`; without `kinds`, every kind is
            accepted.
    """
    artifact = require_kind(Artifact(folder, read_manifest(folder, *kinds)), kinds)
    manifest = artifact.manifest
    for file in manifest.files:
        path = folder / file.path
        if not is_intact(path, file):
            problem = "has changed since it was published" if path.is_file() else "is missing"
            raise _damaged_error(folder, file.path, manifest.kind, problem)
    if manifest.content_sha256 != manifest.compute_payload_sha256():
        raise _damaged_error(folder, MANIFEST_FILENAME, manifest.kind, "does not match its own content_sha256")
    return artifact


def require_kind(artifact: Artifact, kinds: Sequence[str]) -> Artifact:
    """Return the artifact if its kind or its role is in `kinds`; empty `kinds` accept every kind.

    Raises:
        UsageError: the artifact's kind is not in `kinds`.
    """
    if kinds and not {artifact.manifest.kind, artifact.manifest.role} & set(kinds):
        raise UsageError(
            f"{artifact.path} contains {_add_article(artifact.manifest.kind)}; expected {_add_article(' or '.join(kinds))}",
            hint=f"{_describe_creation(kinds)}Check the order of the arguments.",
        )
    return artifact


def _describe_creation(kinds: Sequence[str]) -> str:
    """Return a sentence with the commands that create artifacts of these kinds; "" if none does."""
    commands = [
        f"{_add_article(kind)} with `tuneline {CREATING_COMMANDS[kind]}`" for kind in kinds if kind in CREATING_COMMANDS
    ]
    return f"Create {' or '.join(commands)}. " if commands else ""


def _add_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'ae' else 'a'} {kind.replace('_', ' ')}"


def is_intact(path: Path, file: ArtifactFile) -> bool:
    """Return whether a file exists with the size and digest of the manifest."""
    return path.is_file() and path.stat().st_size == file.bytes and hashing.sha256_file(path) == file.sha256


def _damaged_error(folder: Path, path: str, kind: str, problem: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{path} of the {kind} in {folder} {problem}",
        hint=f"Restore the file, or remove {folder} and rerun the step that created it.",
    )


@cache
def collect_provenance() -> dict[str, Any]:
    """Return the versions of tuneline, Python and packages, the commit of a source checkout, and the CPU's name.

    Returns:
        A mapping with the keys tuneline, git_commit (None if unknown), packages (versions by name), python and cpu.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        own_version = version("tuneline")
    except PackageNotFoundError:
        own_version = "source"
    return {
        "tuneline": own_version,
        "git_commit": _get_git_commit(),
        "packages": code_digest.result_packages(),
        "python": platform.python_version(),
        "cpu": cpu_cores.get_processor_name(),
    }


def _get_git_commit() -> str | None:
    """Return the checkout's commit, with "+changes" if modified; without a checkout, TUNELINE_GIT_COMMIT or None."""
    if not (code_digest.ROOT / ".git").exists():
        return os.environ.get("TUNELINE_GIT_COMMIT")
    options = ["--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
    command = ["git", "-C", str(code_digest.ROOT), "describe", *options]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
