"""Serves a package until SIGINT or SIGTERM: verifies its files, starts Triton, and stops the server."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ArtifactDamagedError, UsageError
from components.common.runtime.process_control import until_signal
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.job_folders import private_folder
from components.triton_packaging import package_contents
from components.triton_packaging.triton_config import CONFIG_FILENAME, read_config, stream_model_name
from components.triton_packaging.triton_server import Ports, Server, running_server

DEFAULT_PORTS = Ports(8000, 8001, 8002)


def serve(
    repository: Path,
    *,
    on_ready: Callable[[Server], None],
    ports: Ports = DEFAULT_PORTS,
    host: str = "127.0.0.1",
    reporter: Reporter | None = None,
) -> None:
    """Serve a finished package until SIGINT or SIGTERM, then stop the server and return.

    Verifies the digest of every file first. Call this function from the main thread.

    Args:
        on_ready: called when the model is ready.

    Raises:
        UsageError: the repository was not packaged by tuneline.
        ArtifactDamagedError: a file was changed or added.
        EngineMissingError: Triton cannot run on this machine, a port is in use, or the server exits.
        ModelLoadError: a model does not load or is not ready in time.
    """
    artifact = verify_package(repository)
    names = list_model_names(artifact)
    references = package_contents.read_references(read_config(repository / names[0]))
    in_use = artifact_store.keep_paths_in_use(*(reference.folder for reference in references))
    with (
        private_folder(Path(tempfile.gettempdir()), "tuneline-serve", mode=0o700) as work,
        in_use,
        until_signal(),
        running_server(
            repository, models=names, log=work / "triton.log", ports=ports, host=host, reporter=reporter
        ) as server,
    ):
        on_ready(server)
        while True:
            time.sleep(0.5)
            server.check_alive()


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
                f"{path.relative_to(repository)} was added to the repository in {repository}",
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
