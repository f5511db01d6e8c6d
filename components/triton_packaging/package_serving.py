"""Serves a package: verifies its files, starts Triton, and stops the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ArtifactDamagedError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.triton_packaging import package_contents
from components.triton_packaging.triton_config import CONFIG_FILENAME, read_config, stream_model_name
from components.triton_packaging.triton_server import Server, keep_log, running_server


@contextmanager
def served_package(repository: Path, log: Path, reporter: Reporter | None = None) -> Iterator[Server]:
    """Verify the digest of every file of a finished package, serve it, and stop the server at the end of the block.

    Args:
        repository: the package.
        log: file for the server's output. The log of the previous server is kept as *.previous.*.
        reporter: receives the progress of the start.

    Raises:
        UsageError: the repository was not packaged by tuneline.
        ArtifactDamagedError: a file was changed or added.
        EngineMissingError: Triton cannot run on this machine, or the server exits.
        ModelLoadError: a model does not load or is not ready in time.
    """
    artifact = verify_package(repository)
    names = list_model_names(artifact)
    references = package_contents.read_references(read_config(repository / names[0]))
    in_use = artifact_store.keep_paths_in_use(*(reference.folder for reference in references))
    keep_log(log)
    with (
        in_use,
        running_server(repository, models=names, log=log, reporter=reporter) as server,
    ):
        yield server


def verify_package(repository: Path) -> Artifact:
    """Verify the digests of a package and of the folders that it refers to, and reject added files.

    Triton would serve a version folder that was added after packaging.

    Raises:
        UsageError: the repository was not packaged by tuneline.
        ArtifactDamagedError: a file was changed or added.
    """
    has_manifest = (repository / artifact_folder.MANIFEST_FILENAME).exists()
    if repository.is_dir() and not has_manifest and any(repository.glob(f"*/{CONFIG_FILENAME}")):
        raise UsageError(
            f"{repository} was not packaged by tuneline: {artifact_folder.MANIFEST_FILENAME} does not exist",
            hint="Package the model with `tuneline package MODEL -o DIR`, or serve the repository with tritonserver.",
        )
    artifact = artifact_folder.read(repository, "repository")
    known = {file.path for file in artifact.manifest.files}
    present = [path for name in list_model_names(artifact) for path in (repository / name).rglob("*")]
    for path in sorted(p for p in present if not p.is_dir()):
        if path.relative_to(repository).as_posix() not in known:
            raise ArtifactDamagedError(
                f"{repository} contains {path.relative_to(repository)}, which is not part of the package",
                hint="Remove the file, or package the model again.",
            )
    for reference in package_contents.read_references(read_config(repository / list_model_names(artifact)[0])):
        package_contents.verify_reference(reference)
    return artifact


def list_model_names(artifact: Artifact) -> list[str]:
    """Return the model names of a package: the engine model, and the streaming model if the package has one."""
    name = str(artifact.manifest.summary["model_name"])
    names = (name, stream_model_name(name))
    return [model for model in names if (artifact.path / model / CONFIG_FILENAME).exists()]
