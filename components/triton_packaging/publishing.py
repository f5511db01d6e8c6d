"""A finished package put where a cluster's Triton reads it: a folder on a shared file system, or a prefix of an S3 bucket.

It lies there under its content digest, so nothing that a server reads is ever changed. manifest.json comes last: without it a copy is
unfinished. Where the S3 service is, and who asks, is taken from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, …).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from components.common import artifacts, places
from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError
from components.common.progress import Reporter

S3 = "s3://"
LIMITS = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 3, "mode": "standard"}}


def publish(package: Artifact, target: str, reporter: Reporter) -> str:
    """Copy a package to <target>/<content_sha256>, where it is not there yet, and return that place.

    Raises EngineMissingError where the bucket cannot be written, and what the file system says of a folder.
    """
    reporter.step(f"publishing to {target}")
    place = f"{target.rstrip('/')}/{package.sha256}"
    if target.startswith(S3):
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
    import s3fs

    system = s3fs.S3FileSystem(config_kwargs=LIMITS, skip_instance_cache=True, use_listings_cache=False)
    try:
        if _is_there(system, place, package.sha256):
            return
        for done, file in enumerate(package.manifest.files, 1):
            system.put_file(str(package.path / file.path), f"{place}/{file.path}")
            reporter.progress(done, len(package.manifest.files), "files")
        short = [file.path for file in package.manifest.files if int(system.info(f"{place}/{file.path}")["size"]) != file.bytes]
        if short:
            raise OSError(f"{', '.join(short)} arrived in another size")
        system.put_file(str(package.path / artifacts.MANIFEST), f"{place}/{artifacts.MANIFEST}")
    except Exception as error:  # botocore's errors have no common ancestor that s3fs leaves in place
        said = " ".join(str(error).split())[:300]
        raise EngineMissingError(
            f"the package cannot be published to {place}: {said or type(error).__name__}",
            hint="Check AWS_ENDPOINT_URL, the keys (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE) and the bucket; then run "
            "the same command again: the package itself is finished.",
        ) from None


def _is_there(system: Any, place: str, sha256: str) -> bool:
    try:
        return bool(json.loads(system.cat_file(f"{place}/{artifacts.MANIFEST}"))["content_sha256"] == sha256)
    except FileNotFoundError:
        return False
