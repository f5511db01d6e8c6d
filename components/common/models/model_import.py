"""Import of a base model into the artifact store. Pods and runs read the imported model without network access.

The digest of a model does not depend on its source, so the digests of a run do not either. The import consists of the
files that match MODEL_FILE_PATTERN, the model card, the licence texts, and a record of the acceptance of the licence.
The artifact of a tuned model is stored unchanged, and an adapter is also merged into its base model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.models import licences, model_loading, tokenization_check, weight_integrity
from components.common.models.licences import Licence
from components.common.runtime.errors import ArtifactDamagedError, UsageError
from components.common.runtime.filesystem import link_or_copy
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store, liveness
from components.common.workspace.artifact_store import Workdir

STAGE = model_loading.STORE_STAGE
LICENCE, ACCEPTED = "licence", "accepted"
Acceptance = dict[str, str]  # {"by": person, "at": time}
PROGRESS_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True)
class SourceContent:
    """The content of a model source.

    Attributes:
        source: exact name, with the revision.
        files: sizes in bytes of the files to import, by name.
        skipped_files: names of the files that are not imported.
        folder: folder of the files on this machine; None for a model on the hub.
        expected_digests: SHA-256 by file name, as listed by the hub for large files.
        tuned: artifact of a tuned model; None for other models.
    """

    source: str
    licence: Licence
    files: dict[str, int]
    skipped_files: list[str]
    folder: Path | None
    expected_digests: Mapping[str, str] = field(default_factory=dict)
    tuned: Artifact | None = None

    @property
    def bytes(self) -> int:
        """The total size in bytes of the files to import."""
        return sum(self.files.values())

    @cached_property
    def key(self) -> str:
        """The key of the import in the store. For a folder, whose files may change, the key covers their digests."""
        content = [(name, hashing.sha256_file(self.folder / name)) for name in sorted(self.files) if self.folder]
        return hashing.digest({"source": self.source, "content": content})


def inspect_source(source: str, reporter: Reporter) -> SourceContent:
    """Return the content of a source. For an hf:// model, only the list of files is fetched.

    Raises:
        ConfigurationError: the source is invalid or not available, lacks config.json or safetensors weights, or is an
            adapter that cannot be merged.
        ArtifactDamagedError: a file of a tuned model has changed.
        UsageError: the source is in the artifact store.
    """
    reporter.step(f"inspecting {source}")
    if source.startswith(artifact_store.STORE_PREFIX):
        raise UsageError(
            f"{source} is already in the artifact store",
            hint=f"Use the model with --set fine_tuning.base_model={source}",
        )
    if tuned := model_loading.find_tuned_model(source):
        if model_loading.is_adapter(tuned):
            model_loading.check_mergeable(tuned, source)
        sizes = {file.path: file.bytes for file in tuned.manifest.files}
        return SourceContent(
            str(tuned.path.absolute()), licences.read_model_card(tuned.path), sizes, [], tuned.path, tuned=tuned
        )
    folder: Path | None = None
    expected_digests: dict[str, str] = {}
    if source.startswith("hf://"):
        exact_name, licence, sizes, expected_digests = _inspect_hub_model(source)
    else:
        folder = model_loading.resolve_base_model(source, reporter).path
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        if source == model_loading.EMBEDDED_SOURCE:
            exact_name, licence = source, Licence(id=model_loading.EMBEDDED_LICENCE)
        else:
            exact_name, licence = str(Path(source).absolute()), licences.read_model_card(folder)
    files = {name: size for name, size in sizes.items() if _is_model(name) or _is_documentation(name)}
    # Subfolders, and other formats such as pickles.
    skipped = sorted(sizes.keys() - files.keys() - {artifact_folder.MANIFEST_FILENAME})
    model_loading.check_model_files(files, source)
    return SourceContent(exact_name, licence, files, skipped, folder, expected_digests)


def _inspect_hub_model(source: str) -> tuple[str, Licence, dict[str, int], dict[str, str]]:
    """Return the name with its commit, the licence, the files' sizes, and the expected digests of large files."""
    info = model_loading.fetch_hub_info(source)
    siblings = info.siblings or []
    card = info.card_data.to_dict() if info.card_data else {}
    return (
        f"{source.partition('@')[0]}@{info.sha}",
        licences.parse_card_fields(card, gated=bool(info.gated)),
        {file.rfilename: int(file.size or 0) for file in siblings},
        {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs},
    )


def _is_model(name: str) -> bool:
    return bool(model_loading.MODEL_FILE_PATTERN.fullmatch(name))


def _is_documentation(name: str) -> bool:
    return name == licences.MODEL_CARD_FILENAME or bool(licences.LICENCE_FILE_PATTERN.fullmatch(name))


def read_imported_manifest(offer: SourceContent, work: Workdir) -> Manifest | None:
    """Return the manifest of an earlier import of this source; None if the source was not imported.

    Does not fetch or verify the files.
    """
    sha256: str | None
    if not offer.tuned:
        sha256 = artifact_store.find_by_key(work.store, STAGE, offer.key)
    elif model_loading.is_adapter(offer.tuned):
        sha256 = model_loading.find_merged_base(offer.tuned.manifest)
    else:
        sha256 = offer.tuned.sha256
    return artifact_store.read_manifest(work.store, sha256) if sha256 else None


def check_licence(offer: SourceContent, accepted_by: str | None, known: Artifact | None) -> None:
    """Raise UsageError if the licence requires acceptance and nobody has accepted it, now or in an earlier import.

    Args:
        accepted_by: name of the person who accepts the licence now.
        known: the earlier import of the model.
    """
    is_accepted = accepted_by or (known and known.manifest.summary[LICENCE][ACCEPTED])
    if offer.licence.requires_acceptance and not is_accepted:
        location = offer.licence.link or (f"in {offer.folder}" if offer.folder else f"of {offer.source}")
        raise UsageError(
            f"cannot import {offer.source}: its licence ({offer.licence.title}) requires acceptance",
            hint=f"Add --accept-license --by NAME to accept the licence {location}.",
        )


def import_model(
    offer: SourceContent, work: Workdir, accepted_by: str | None, reporter: Reporter
) -> tuple[Artifact, bool]:
    """Import the model into the store. An interrupted download is resumed.

    Args:
        accepted_by: name of the person who accepts the licence; None if nobody accepts the licence now.

    Returns:
        The imported model, and whether it already existed.

    Raises:
        ArtifactDamagedError: a file that was imported before has changed, or a downloaded file has another digest.
        ConfigurationError: the model cannot be downloaded, or its config.json is invalid.
        UsageError: the licence requires acceptance.
        TrainingError: the merged model differs from the base model with its adapter.
    """
    if offer.tuned:
        was_imported = read_imported_manifest(offer, work) is not None
        return _import_tuned_model(offer.tuned, work, reporter), was_imported
    key, state = offer.key, work.state / STAGE / offer.key
    sha256 = artifact_store.find_by_key(work.store, STAGE, key)
    known = artifact_store.load_artifact(work.store, sha256, "base_model") if sha256 else None
    check_licence(offer, accepted_by, known)
    acceptance: Acceptance | None = None
    if accepted_by and offer.licence.requires_acceptance:
        acceptance = {"by": accepted_by, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    if known:
        if acceptance and not known.manifest.summary[LICENCE][ACCEPTED]:
            known = _add_acceptance(known, offer, acceptance, work.store, reporter)
        return known, True

    def build(folder: Path) -> Artifact:
        source = offer.folder or state
        if offer.folder is None:
            _download(offer, state, reporter)
        model_loading.check_configuration(source / "config.json", offer.source)
        tokenization_check.check_tokenization(source, offer.source)
        weight_integrity.check_weight_files(source, offer.files, offer.source)
        digests = {name: hashing.sha256_file(source / name) for name in sorted(offer.files)}
        # If the store has the same files from another source, name and acceptance are kept: the manifests of tuned models
        # contain the name, and the acceptance remains valid.
        same = hashing.content_sha256((name, digest) for name, digest in digests.items() if _is_model(name))
        is_stored = artifact_store.has_artifact(work.store, same)
        stored = artifact_store.load_artifact(work.store, same, "base_model") if is_stored else None
        if stored and (not acceptance or stored.manifest.summary[LICENCE][ACCEPTED]):
            return _publish(
                folder, stored.path, _list_file_names(stored), stored.manifest.summary, key, link_or_copy, reporter
            )
        texts = {name: digest for name, digest in digests.items() if _is_documentation(name)}
        summary = {
            "source": stored.manifest.summary["source"] if stored else offer.source,
            LICENCE: {**offer.licence.model_dump(), "texts": texts, ACCEPTED: acceptance},
            "bytes": offer.bytes,
        }
        # A user's file is copied, so that later changes do not affect the store.
        transfer = link_or_copy if offer.folder is None else shutil.copyfile
        return _publish(folder, source, list(offer.files), summary, key, transfer, reporter)

    artifact, _ = artifact_store.get_or_build(work.store, STAGE, key, build, reporter)
    shutil.rmtree(state, ignore_errors=True)
    return artifact, False


def _import_tuned_model(tuned: Artifact, work: Workdir, reporter: Reporter) -> Artifact:
    """Copy the artifact of a tuned model to the store, and return the base model that it is or is merged into."""
    if not artifact_store.has_artifact(work.store, tuned.sha256):
        reporter.step("adding the files to the store")
        with artifact_store.job_folder(work.store) as own:
            copy = shutil.copytree(tuned.path, own / tuned.sha256, dirs_exist_ok=True)
            artifact_store.add_artifact(work.store, artifact_folder.read(copy, "model"), reporter)
    base = model_loading.resolve_base_model(f"{artifact_store.STORE_PREFIX}{tuned.sha256}", reporter)
    return artifact_store.load_artifact(work.store, base.sha256)


def _list_file_names(artifact: Artifact) -> list[str]:
    return [file.path for file in artifact.manifest.files]


def _add_acceptance(
    known: Artifact, offer: SourceContent, acceptance: Acceptance, store: Path, reporter: Reporter
) -> Artifact:
    """Publish the stored model again, with the acceptance of its licence."""
    before, key = known.manifest.summary, known.manifest.produced_by["key"]
    summary = {**before, LICENCE: {**before[LICENCE], **offer.licence.model_dump(), ACCEPTED: acceptance}}
    with artifact_store.job_folder(store) as own:
        folder = own / f"{STAGE}-{key[:16]}"
        built = _publish(folder, known.path, _list_file_names(known), summary, key, link_or_copy, reporter)
        return artifact_store.add_artifact(store, built, reporter)


def _publish(
    folder: Path,
    source: Path,
    names: list[str],
    summary: dict[str, Any],
    key: str,
    transfer: Callable[[Path, Path], object],
    reporter: Reporter,
) -> Artifact:
    artifact_folder.claim_folder(folder, key)
    reporter.step("adding the files to the store")
    for done, name in enumerate(names, 1):
        (folder / name).parent.mkdir(exist_ok=True)
        transfer((source / name).resolve(), folder / name)
        reporter.progress(done, len(names), "files")
    return artifact_folder.publish(
        folder, "base_model", payload=_is_model, inputs=[], config={}, seed=0, key=key, summary=summary
    )


def _download(offer: SourceContent, folder: Path, reporter: Reporter) -> None:
    """Download the files of an hf:// model to a folder, and delete files whose digest differs from the hub's."""

    def report_progress() -> None:
        found = 0
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # the file was just renamed
                # Allocated blocks, because a file that is downloaded in parts has its final length from the start.
                found += path.stat().st_blocks * 512 if path.is_file() else 0
        reporter.progress(min(found, offer.bytes), offer.bytes, "bytes")

    reporter.step(f"fetching {offer.source}")
    with liveness.call_periodically(report_progress, PROGRESS_INTERVAL_SECONDS):
        model_loading.download_files(offer.source, sorted(offer.files), folder)
    for name in sorted(offer.expected_digests.keys() & offer.files.keys()):
        found, expected = hashing.sha256_file(folder / name), offer.expected_digests[name]
        if found != expected:
            (folder / name).unlink(missing_ok=True)
            raise ArtifactDamagedError(
                f"the downloaded file {name} of {offer.source} has the digest {found[:12]}; expected {expected[:12]}",
                hint="Run the same command again, or report the file to the owner of the model.",
            )
