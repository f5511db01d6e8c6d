"""The folder that a server answers from while versions come and go: verified copies of packages, and the models Triton is to load.

    packages/<sha256>/                      a package as it was published, checked before every use
    repository/<name>/config.pbtxt          the version to load, by number; written anew at every switch
    repository/<name>/<version>             a link to the package's own version folder
    repository/<name>_stream/…              the same for the model that streams
    repository/<name>_candidate…            the same for a version that is being tried
    rooted/<sha256>/<name>/<version>        for the vLLM backend: its files, the paths in them made those of packages/<sha256>

A version keeps the registry's number in Triton, so `model_version` of an answer says which registered version gave it.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from components.common import artifacts, jobs
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, UsageError
from components.common.paths import link_or_copy
from components.triton_packaging import parts, pbtxt, vllm_package, weights
from components.triton_packaging.config import NAME_PATTERN

PACKAGES, REPOSITORY, ROOTED = "packages", "repository", "rooted"
STREAM = pbtxt.stream_name("")
CANDIDATE = "_candidate"
WARMUP = "warmup"


@dataclass(frozen=True)
class Release:
    """A registered version's package, ready to be served: the version's number and where its verified copy lies."""

    version: str
    package: Artifact

    @property
    def own_name(self) -> str:
        """What the package calls its model. Raises UsageError for what is no name of a model: it names folders here."""
        return checked_name(str(self.package.manifest.summary.get("model_name", "")))

    @property
    def suffixes(self) -> list[str]:
        """What is added to a model's name for each model of the package: nothing, and _stream where it streams."""
        return [suffix for suffix in ("", STREAM) if (self.package.path / f"{self.own_name}{suffix}" / pbtxt.CONFIG).exists()]


def checked_name(name: str) -> str:
    """A model's name in Triton. Raises UsageError for one that could not be a folder and a part of a URL."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"{name!r} is no name for a model in Triton", hint="Use letters, digits, dots, dashes and underscores, a letter or digit first."
        )
    return name


def take_in(folder: Path, package: Artifact) -> Artifact:
    """The package as a copy of the serving folder's own, every digest checked; links where the file system has them.

    Raises ArtifactDamagedError for a package that is not what its manifest says; a copy that was damaged since is made again.
    """
    home = folder / PACKAGES / package.sha256
    kept = taken_in(folder, package.sha256)
    if kept:
        return kept
    home.parent.mkdir(parents=True, exist_ok=True)
    _check_inside(package)
    with jobs.private_folder(home.parent, "copy") as own:
        copy = own / "package"
        for file in [*(each.path for each in package.manifest.files), artifacts.MANIFEST]:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(package.path / file, copy / file)
        found = artifacts.read(copy, "repository")
        if found.sha256 != package.sha256:
            raise ArtifactDamagedError(f"the package {package.sha256[:12]} changed while it was copied", hint="Deploy again.")
        shutil.rmtree(home, ignore_errors=True)
        copy.rename(home)
    return Artifact(home, found.manifest)


def _check_inside(package: Artifact) -> None:
    for file in (Path(each.path) for each in package.manifest.files):
        if file.is_absolute() or ".." in file.parts:
            raise ArtifactDamagedError(f"{file} of the package in {package.path} lies outside of it", hint="Package the model again.")


def taken_in(folder: Path, sha256: str) -> Artifact | None:
    """The serving folder's copy of a package, every digest checked; None where there is none that is whole."""
    home = folder / PACKAGES / sha256
    if not (home / artifacts.MANIFEST).exists():
        return None
    try:
        return artifacts.read(home, "repository")
    except ArtifactDamagedError:
        return None


def lay_out(folder: Path, release: Release, name: str, lineage: dict[str, str]) -> list[str]:
    """Have Triton find this version, and no other, under this name when it is told to load it. Returns the models to load, in order.

    `lineage` is added to the parameters of each config.pbtxt. Versions that are loaded now stay in their places.
    """
    return [_lay_out_model(folder, release, suffix, name, lineage) for suffix in release.suffixes]


def _lay_out_model(folder: Path, release: Release, suffix: str, name: str, lineage: dict[str, str]) -> str:
    source, target = release.package.path / f"{release.own_name}{suffix}", folder / REPOSITORY / f"{name}{suffix}"
    config = pbtxt.read(source)
    for reference in parts.references(config.parameters):
        parts.verify(reference)
    target.mkdir(parents=True, exist_ok=True)
    own, place = _only_version(source), PACKAGES
    if config.backend == "vllm":
        pbtxt.complete_vllm(config)
        place = _rooted(folder, release, own)
    _link(target / release.version, Path("../..") / place / release.package.sha256 / source.name / own.name)
    if (source / WARMUP).is_dir():
        shutil.copytree(source / WARMUP, target / WARMUP, dirs_exist_ok=True)
    config.name = target.name
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(int(release.version))
    if suffix == STREAM:
        config.parameters["engine"].string_value = name
    for key, value in lineage.items():
        config.parameters[key].string_value = value
    pbtxt.write_config(target, config)
    weights.make_readable(target)
    return target.name


def _rooted(folder: Path, release: Release, version: Path) -> str:
    """Write a version's files anew, with paths that a server finds wherever it was started. Returns ROOTED.

    A server on another machine finds them where it sees the serving folder under the same path.
    """
    home = folder / ROOTED / release.package.sha256 / version.parent.name / version.name
    with jobs.private_folder(folder / ROOTED, "rooted") as own:
        fresh = own / version.name
        fresh.mkdir()
        for file in version.glob("*.json"):
            shutil.copyfile(file, fresh / file.name)
        placed = release.package.manifest.config.get("serving_root", "")
        before = f"{placed.rstrip('/')}/{release.own_name}/" if placed else ""
        vllm_package.root(fresh, str(version.parent.absolute() if placed else release.package.path.absolute()), before)
        weights.make_readable(fresh)
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        fresh.rename(home)
    return ROOTED


def _only_version(source: Path) -> Path:
    found = [path for path in source.iterdir() if path.is_dir() and path.name.isdecimal()]
    if len(found) != 1:
        raise UsageError(f"{source} has {len(found)} version folders; a package has one", hint="Package the model again.")
    return found[0]


def _link(place: Path, target: Path) -> None:
    """Replaced by a rename, so that there is always one."""
    fresh = place.with_name(f".{place.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target, target_is_directory=True)
    fresh.rename(place)


def laid_out(folder: Path, name: str) -> dict[tuple[str, str], str]:
    """The versions that were laid out under a name and not forgotten: the model and its version, with the package's digest."""
    links = [link for suffix in ("", STREAM) for link in jobs.listed(folder / REPOSITORY / f"{name}{suffix}") if link.is_symlink()]
    return {(link.parent.name, link.name): link.readlink().parts[-3] for link in links if link.name.isdecimal()}


def forget(folder: Path, model: str, version: str) -> None:
    """Take a version that is not loaded any more out of Triton's sight."""
    (folder / REPOSITORY / model / version).unlink(missing_ok=True)


def forget_model(folder: Path, name: str) -> None:
    """Take a model that is not loaded any more away, with all its versions."""
    for suffix in ("", STREAM):
        shutil.rmtree(folder / REPOSITORY / f"{name}{suffix}", ignore_errors=True)


def keep_only(folder: Path, shas: set[str]) -> None:
    """Remove the other packages."""
    for path in [*jobs.listed(folder / PACKAGES), *jobs.listed(folder / ROOTED)]:
        if path.is_dir() and "." not in path.name and path.name not in shas:
            shutil.rmtree(path, ignore_errors=True)
