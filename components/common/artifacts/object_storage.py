"""S3 object storage: multipart uploads, parallel ranged downloads, and translation of S3 errors to TunelineError.

Endpoint and credentials come from the AWS environment variables, never from an address.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import (
    EngineMissingError,
    TunelineError,
    iterate_exception_chain,
    translate_system_error,
)

if TYPE_CHECKING:
    from s3fs import S3FileSystem

S3_SCHEME = "s3://"
S3_ADDRESS_PATTERN = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?")
PART_BYTES = 32 * 2**20
MAX_PARTS = 10_000  # limit of S3 for an object
MAX_CONCURRENT_PARTS = 8
CLIENT_LIMITS = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 3, "mode": "standard"}}
CREDENTIAL_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
CREDENTIAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
BytesMovedCallback = Callable[[int], None]  # called with the number of bytes moved since the last call


def upload_file(path: Path, uri: str, moved: BytesMovedCallback) -> None:
    """Upload a file to an object; an interrupted upload does not create or change the object.

    Args:
        path: the file.
        uri: address of the object, s3://BUCKET/KEY.
        moved: called with the number of bytes uploaded since the last call.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    from fsspec.callbacks import Callback

    class ProgressCallback(Callback):  # type: ignore[misc]
        """Callback that reports the number of transferred bytes to `moved`."""

        def relative_update(self, inc: int = 1) -> None:
            moved(inc)

    part_bytes = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
    with translate_s3_errors(uri):
        _get_file_system().put_file(
            str(path), uri, callback=ProgressCallback(), chunksize=part_bytes, max_concurrency=MAX_CONCURRENT_PARTS
        )


def download_file(uri: str, path: Path, size: int, moved: BytesMovedCallback) -> None:
    """Download an object to a file in parallel ranges.

    Args:
        uri: address of the object, s3://BUCKET/KEY.
        path: the file.
        size: size of the object in bytes.
        moved: called with the number of bytes downloaded since the last call.

    Raises:
        FileNotFoundError: the object does not exist.
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for first in range(0, size, PART_BYTES * MAX_CONCURRENT_PARTS):
            starts = list(range(first, min(first + PART_BYTES * MAX_CONCURRENT_PARTS, size), PART_BYTES))
            ends = [min(start + PART_BYTES, size) for start in starts]
            with translate_s3_errors(uri):
                parts = _get_file_system().cat_ranges([uri] * len(starts), starts, ends, on_error="raise")
            for part in parts:
                file.write(part)
                moved(len(part))


def write_object(uri: str, text: str) -> None:
    """Write text to an object, encoded as UTF-8.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    with translate_s3_errors(uri):
        _get_file_system().pipe_file(uri, text.encode())


def read_object(uri: str) -> bytes | None:
    """Return the content of a small object, or None if the object does not exist.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        return bytes(_get_file_system().cat_file(uri))
    return None


def list_sizes(uri: str) -> dict[str, int]:
    """Return the sizes in bytes of the objects below a prefix, by name relative to the prefix.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    return {name: size for name, (size, _) in list_sizes_and_times(uri).items()}


def list_sizes_and_times(uri: str) -> dict[str, tuple[int, float]]:
    """Return the sizes and modification times of the objects below a prefix.

    Returns:
        By name relative to the prefix, the size in bytes and the modification time (Unix time of the service's clock).

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    return {
        name: (int(entry["size"] or 0), entry["LastModified"].timestamp()) for name, entry in _list_entries(uri).items()
    }


def list_sizes_and_etags(uri: str) -> dict[str, tuple[int, str]]:
    """Return the sizes in bytes and the ETags of the objects below a prefix, by name relative to the prefix.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    return {name: (int(entry["size"] or 0), str(entry["ETag"])) for name, entry in _list_entries(uri).items()}


def _list_entries(uri: str) -> dict[str, dict[str, Any]]:
    start = uri.removeprefix(S3_SCHEME).rstrip("/") + "/"
    entries = {}
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        entries = _get_file_system().find(uri, detail=True)
    return {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}


def get_size(uri: str) -> int | None:
    """Return an object's size in bytes, or None if the object does not exist.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        entry = _get_file_system().info(uri, refresh=True)
        return int(entry["size"]) if entry["type"] == "file" else None
    return None


def get_modified_time(uri: str) -> float | None:
    """Return an object's modification time (Unix time of the service's clock), or None if the object does not exist.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        entry = _get_file_system().info(uri, refresh=True)
        return float(entry["LastModified"].timestamp()) if entry["type"] == "file" else None
    return None


def delete_object(uri: str) -> None:
    """Delete an object if it exists.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        _get_file_system().rm_file(uri)


def keeps_versions(uri: str) -> bool | None:
    """Return whether deleted and replaced objects below a prefix remain as versions; None if the check is not permitted.

    A bucket whose versioning is suspended keeps its earlier versions, but creates no further ones.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    bucket, _, prefix = uri.removeprefix(S3_SCHEME).partition("/")
    with translate_s3_errors(uri):
        call = _get_file_system().call_s3
        try:
            status = call("get_bucket_versioning", Bucket=bucket).get("Status")
            page: dict[str, Any] = {"IsTruncated": status == "Suspended"}
            while page["IsTruncated"]:
                start = {
                    name: page[f"Next{name}"] for name in ("KeyMarker", "VersionIdMarker") if f"Next{name}" in page
                }
                page = call("list_object_versions", Bucket=bucket, Prefix=f"{prefix.rstrip('/')}/".lstrip("/"), **start)
                versions = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
                if any(version["VersionId"] != "null" for version in versions):
                    return True
        except PermissionError:
            return None
        except OSError as error:
            if error.errno != errno.ENOSYS:  # a service without versions
                raise
            return False
    return bool(status == "Enabled")


def abort_multipart_uploads(uri: str) -> None:
    """Abort the unfinished multipart uploads below a prefix: the service stores their parts, which are in no listing.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    bucket, _, prefix = uri.removeprefix(S3_SCHEME).partition("/")
    with translate_s3_errors(uri):
        call = _get_file_system().call_s3
        for upload in call("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads", []):
            with suppress(FileNotFoundError):  # it has just ended
                call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def list_folders(uri: str) -> list[str]:
    """Return the sorted names of the folders directly below a prefix.

    Raises:
        EngineMissingError: s3fs is not installed, or the service rejects the request or does not respond.
    """
    entries = []
    with suppress(FileNotFoundError), translate_s3_errors(uri):
        entries = _get_file_system().ls(uri, detail=True, refresh=True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def _get_file_system() -> S3FileSystem:
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    return _open_file_system(os.getpid(), tuple(settings))


@cache
def _open_file_system(process: int, settings: tuple[tuple[str, str], ...]) -> S3FileSystem:
    """Return one file system per process, because s3fs does not support forks, and per AWS settings."""
    try:
        import s3fs
    except ImportError:
        hint = "Run: pip install 'tuneline[store]'"
        raise EngineMissingError("s3:// addresses require s3fs, which is not installed", hint=hint) from None

    return s3fs.S3FileSystem(config_kwargs=CLIENT_LIMITS, skip_instance_cache=True, use_listings_cache=False)


@contextmanager
def translate_s3_errors(uri: str) -> Iterator[None]:
    """Translate S3 and network errors; keep the FileNotFoundError of an object.

    Args:
        uri: address of the object or prefix, for the message.

    Raises:
        EngineMissingError: the service rejects the request or does not respond, or the bucket does not exist.
    """
    try:
        yield
    except TunelineError:
        raise
    except Exception as error:  # botocore's errors have no common base class that s3fs preserves
        bucket = uri.removeprefix(S3_SCHEME).partition("/")[0]
        is_missing = isinstance(error, FileNotFoundError)
        if (is_missing and _bucket_exists(bucket, error)) or translate_system_error(error):
            raise
        message = " ".join(str(error).split())[:300] or type(error).__name__
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
        endpoint = re.sub("//.*@", "//", endpoint)
        if is_missing:
            problem = f"is in a bucket that does not exist at {endpoint}"
            hint = f"Create the bucket {bucket}, or check AWS_ENDPOINT_URL."
        elif {type(cause).__name__ for cause in iterate_exception_chain(error)} & CREDENTIAL_ERRORS:
            problem, hint = f"requires credentials: {message}", f"Set {CREDENTIAL_VARIABLES}."
        elif isinstance(error, PermissionError):
            problem = f"is not permitted with these credentials: {endpoint} returned {message.rstrip('.')!r}"
            hint = f"Check {CREDENTIAL_VARIABLES}, and their permissions in {bucket}."
        else:
            problem = f"cannot be reached at {endpoint}: {message}"
            hint = "Check AWS_ENDPOINT_URL and the network."
        raise EngineMissingError(f"{uri} {problem}", hint=hint) from None


def _bucket_exists(bucket: str, error: Exception) -> bool:
    """Return False only if the service states that the bucket does not exist."""
    responses = [getattr(cause, "response", None) for cause in iterate_exception_chain(error)]
    if "NoSuchBucket" in [answer.get("Error", {}).get("Code") for answer in responses if isinstance(answer, dict)]:
        return False
    try:
        _get_file_system().call_s3("head_bucket", Bucket=bucket)
    except Exception as failure:
        return not isinstance(failure, FileNotFoundError)
    return True
