"""A finished package put where a cluster's Triton reads it: a folder on a shared file system, or a prefix of an S3 bucket.

It lies there under its content digest, so nothing that a server reads is ever changed. manifest.json comes last: without it a copy is
unfinished. Where the S3 service is, and who asks, is taken from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, …).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from components.common import artifacts, buckets, places
from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError
from components.common.progress import Reporter


def publish(package: Artifact, target: str, reporter: Reporter) -> str:
    """Copy a package to <target>/<content_sha256>, where it is not there yet, and return that place.

    Raises EngineMissingError where the bucket cannot be written, and what the file system says of a folder.
    """
    reporter.step(f"publishing to {target}")
    place = f"{target.rstrip('/')}/{package.sha256}"
    if target.startswith(buckets.S3):
        _upload(package, place, reporter)
    else:
        _copy(package, Path(target))
    return place


def _copy(package: Artifact, store: Path) -> None:
    if (store / package.sha256 / artifacts.MANIFEST).exists():
        places.stored(store, package.sha256)
        return
    with places.workplace(store) as own:
        shutil.copytree(package.path, own / "package")
        places.adopt(store, Artifact(own / "package", package.manifest))


def _upload(package: Artifact, place: str, reporter: Reporter) -> None:
    """The files as they lie in the package, which is how Triton reads them; the manifest last."""
    try:
        if _is_there(place, package.sha256):
            return
        _put_files(package, place, reporter)
        buckets.put(package.path / artifacts.MANIFEST, f"{place}/{artifacts.MANIFEST}", _unheard)
    except EngineMissingError as error:
        raise EngineMissingError(
            f"the package cannot be published: {error.message}", hint=f"{error.hint} The package itself is finished."
        ) from None


def _put_files(package: Artifact, place: str, reporter: Reporter) -> None:
    for done, file in enumerate(package.manifest.files, 1):
        buckets.put(package.path / file.path, f"{place}/{file.path}", _unheard)
        reporter.progress(done, len(package.manifest.files), "files")
    arrived = buckets.sizes(place)
    if short := [file.path for file in package.manifest.files if arrived.get(file.path) != file.bytes]:
        raise EngineMissingError(f"{', '.join(short)} arrived in another size at {place}", hint="Run the same command again.")


def _unheard(_: int) -> None:
    """The files are counted, not their bytes."""


def _is_there(place: str, sha256: str) -> bool:
    said = buckets.read(f"{place}/{artifacts.MANIFEST}")
    return said is not None and json.loads(said)["content_sha256"] == sha256
