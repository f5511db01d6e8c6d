"""The serving folder of a deployment: verified copies of packages, and the models that Triton loads."""

#     packages/<sha256>/                      a package as it was published, verified before every use
#     repository/<name>/config.pbtxt          the version to load, by number; rewritten at every switch
#     repository/<name>/<version>             a link to the package's version folder
#     repository/<name>_stream/…              the same for the streaming model
#     repository/<name>_candidate…            the same for a version in its smoke test
#     rooted/<sha256>/<name>/<version>        for the vLLM backend: model files with absolute paths into packages/<sha256>
#
# A version has the same number in Triton and in the registry, so `model_version` of an answer identifies it.

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, UsageError
from components.common.runtime.filesystem import link_or_copy
from components.common.workspace import job_folders
from components.triton_packaging import package_contents, triton_config, vllm_package, weight_files
from components.triton_packaging.config import NAME_PATTERN

PACKAGES_FOLDER, REPOSITORY_FOLDER, ROOTED_FOLDER = "packages", "repository", "rooted"
STREAM_SUFFIX = triton_config.stream_model_name("")
CANDIDATE_SUFFIX = "_candidate"
WARMUP_FOLDER = "warmup"


@dataclass(frozen=True)
class Release:
    """A registered version, the verified copy of its package, and parameters to add to each config.pbtxt."""

    version: str
    package: Artifact
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def packaged_name(self) -> str:
        """Model name in the package.

        Raises:
            UsageError: the name is not valid as a folder name and in a URL.
        """
        return check_model_name(str(self.package.manifest.summary.get("model_name", "")))

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the package's model names: "", and "_stream" if the package has a streaming model."""
        return [
            suffix
            for suffix in ("", STREAM_SUFFIX)
            if (self.package.path / f"{self.packaged_name}{suffix}" / triton_config.CONFIG_FILENAME).exists()
        ]


def check_model_name(name: str) -> str:
    """Return the model name unchanged after a check.

    Raises:
        UsageError: the name is not valid as a folder name and in a URL.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"{name!r} is not a valid model name for Triton",
            hint="Use letters, digits, dots, dashes and underscores, starting with a letter or digit.",
        )
    return name


def copy_package(folder: Path, package: Artifact) -> Artifact:
    """Return the serving folder's copy of a package; create the copy, or replace it if it is damaged.

    Files are linked if the file system supports links. Every digest is verified.

    Raises:
        ArtifactDamagedError: the package differs from its manifest.
    """
    home = folder / PACKAGES_FOLDER / package.sha256
    if existing := find_package(folder, package.sha256):
        return existing
    home.parent.mkdir(parents=True, exist_ok=True)
    names = [file.path for file in package.manifest.files]
    for file in map(Path, names):
        if file.is_absolute() or ".." in file.parts:
            raise ArtifactDamagedError(
                f"the manifest in {package.path} lists {file}, which is outside of the package",
                hint="Package the model again.",
            )
    with job_folders.private_folder(home.parent, "copy") as job:
        copy = job / "package"
        for name in (*names, artifact_folder.MANIFEST_FILENAME):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(package.path / name, copy / name)
        verified = artifact_folder.read(copy, "repository")
        if verified.sha256 != package.sha256:
            raise ArtifactDamagedError(
                f"the package {package.sha256[:12]} changed while it was copied", hint="Deploy the version again."
            )
        shutil.rmtree(home, ignore_errors=True)
        filesystem.rename(copy, home)
    return Artifact(home, verified.manifest)


def find_package(folder: Path, sha256: str) -> Artifact | None:
    """Return the serving folder's copy of a package after verifying every digest; None if missing or damaged."""
    home = folder / PACKAGES_FOLDER / sha256
    if not (home / artifact_folder.MANIFEST_FILENAME).exists():
        return None
    try:
        return artifact_folder.read(home, "repository")
    except ArtifactDamagedError:
        return None


def install_release(folder: Path, release: Release, name: str) -> list[str]:
    """Install this version and restrict Triton's version policy to it. Return the models to load, in order.

    The files of other versions are not deleted, so Triton can keep serving a loaded version.

    Args:
        folder: the serving folder.
        release: the version to install.
        name: name of the model in Triton; the streaming model's name is derived from this name.

    Raises:
        UsageError: a model of the package does not have exactly one version folder.
        ArtifactDamagedError: a folder that the package refers to is missing or has changed.
    """
    models = []
    for suffix in release.suffixes:
        source = release.package.path / f"{release.packaged_name}{suffix}"
        target = folder / REPOSITORY_FOLDER / f"{name}{suffix}"
        config = triton_config.read_config(source)
        for reference in package_contents.read_references(config):
            package_contents.verify_reference(reference)
        versions = [path for path in source.iterdir() if path.is_dir() and path.name.isdecimal()]
        if len(versions) != 1:
            raise UsageError(
                f"{source} has {len(versions)} version folders; expected 1", hint="Package the model again."
            )
        target.mkdir(parents=True, exist_ok=True)
        store = PACKAGES_FOLDER
        if config.backend == "vllm":
            triton_config.complete_vllm_config(config)
            store = _write_rooted_files(folder, release, versions[0])
        # The link is replaced by a rename, so that it always exists.
        fresh = target / f".{release.version}.link"
        fresh.unlink(missing_ok=True)
        with suppress(FileExistsError):  # over NFS, a call whose answer was lost is repeated
            fresh.symlink_to(Path("../..") / store / release.package.sha256 / source.name / versions[0].name)
        filesystem.rename(fresh, target / release.version)
        if (source / WARMUP_FOLDER).is_dir():
            shutil.copytree(source / WARMUP_FOLDER, target / WARMUP_FOLDER, dirs_exist_ok=True)
        config.name = target.name
        config.version_policy.Clear()
        config.version_policy.specific.versions.append(int(release.version))
        if suffix == STREAM_SUFFIX:
            config.parameters["engine"].string_value = name
        triton_config.set_parameters(config, release.parameters)
        triton_config.write_config(target, config)
        weight_files.make_readable(target)
        models.append(target.name)
    return models


def _write_rooted_files(folder: Path, release: Release, version: Path) -> str:
    """Write a version's files with absolute paths, valid in any working folder of the server; return ROOTED_FOLDER."""
    # A server on another machine must mount the serving folder under the same path.
    home = folder / ROOTED_FOLDER / release.package.sha256 / version.parent.name / version.name
    with job_folders.private_folder(folder / ROOTED_FOLDER, "rooted") as job:
        fresh = job / version.name
        fresh.mkdir(exist_ok=True)  # over NFS, a mkdir whose answer was lost is repeated
        for file in version.glob("*.json"):
            shutil.copyfile(file, fresh / file.name)
        serving_root = release.package.manifest.config.get("serving_root", "")
        old_prefix = f"{serving_root.rstrip('/')}/{release.packaged_name}/" if serving_root else ""
        prefix = version.parent if serving_root else release.package.path
        vllm_package.prefix_paths(fresh, str(prefix.absolute()), old_prefix)
        weight_files.make_readable(fresh)
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        filesystem.rename(fresh, home)
    return ROOTED_FOLDER


def list_installed_versions(folder: Path, name: str) -> dict[tuple[str, str], str]:
    """Return the installed versions of a model and its streaming model: {(model, version): digest of the package}."""
    folders = (folder / REPOSITORY_FOLDER / f"{name}{suffix}" for suffix in ("", STREAM_SUFFIX))
    return {
        (model.name, link.name): link.readlink().parts[-3]
        for model in folders
        for link in job_folders.list_folder(model)
        if link.is_symlink() and link.name.isdecimal()
    }


def remove_other_packages(folder: Path, shas: set[str]) -> None:
    """Remove all packages except those with these digests."""
    for path in [*job_folders.list_folder(folder / PACKAGES_FOLDER), *job_folders.list_folder(folder / ROOTED_FOLDER)]:
        if path.is_dir() and "." not in path.name and path.name not in shas:
            shutil.rmtree(path, ignore_errors=True)
