"""Copies a finished package to a shared folder or an S3 prefix that a cluster's Triton reads.

A copy is stored under its content digest, so files that a server reads never change. manifest.json is written last: a
copy without it is unfinished.
"""

# The environment configures the S3 service and credentials (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, …).

from __future__ import annotations

import json
import shutil
from pathlib import Path

from components.common.artifacts import object_storage
from components.common.artifacts.artifact_folder import MANIFEST_FILENAME, Artifact
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store


def publish(package: Artifact, target: str, reporter: Reporter) -> str:
    """Copy a package to <target>/<content_sha256> unless the copy already exists, and return that location.

    Args:
        target: a folder, or s3://bucket/prefix.

    Raises:
        EngineMissingError: the bucket cannot be written.
        OSError: the folder cannot be written.
    """
    reporter.step(f"publishing to {target}")
    location = f"{target.rstrip('/')}/{package.sha256}"
    if not target.startswith(object_storage.S3_SCHEME):
        store = Path(target)
        if (store / package.sha256 / MANIFEST_FILENAME).exists():
            artifact_store.load_artifact(store, package.sha256)
        else:
            with artifact_store.job_folder(store) as job:
                shutil.copytree(package.path, job / "package", dirs_exist_ok=True)
                artifact_store.add_artifact(store, Artifact(job / "package", package.manifest))
        return location
    # The files keep the package's layout, which Triton reads; the manifest is uploaded last.
    manifest, files = f"{location}/{MANIFEST_FILENAME}", package.manifest.files
    try:
        published = object_storage.read_object(manifest)
        if published is None or json.loads(published)["content_sha256"] != package.sha256:
            for done, file in enumerate(files, 1):
                object_storage.upload_file(package.path / file.path, f"{location}/{file.path}", lambda _: None)
                reporter.progress(done, len(files), "files")
            sizes = object_storage.list_sizes(location)
            if different := [file for file in files if sizes.get(file.path) != file.bytes]:
                first = different[0]
                raise EngineMissingError(
                    f"{location}/{first.path} has {sizes.get(first.path, 'no')} bytes after the upload; expected "
                    f"{first.bytes} (files that differ: {len(different)} of {len(files)})",
                    hint="Run the same command again.",
                )
            object_storage.upload_file(package.path / MANIFEST_FILENAME, manifest, lambda _: None)
    except EngineMissingError as error:
        raise EngineMissingError(
            f"the package cannot be published: {error.message}; the local package is complete", hint=error.hint
        ) from None
    return location
