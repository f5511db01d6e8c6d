"""Remote sources through fsspec: s3://bucket/key and hf://datasets/org/name@revision/path.

Endpoints and credentials come from the environment, never from an address: AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3)
and the standard AWS variables or profile; HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypedDict

from components.common.runtime.errors import ConfigurationError, InputError, TunelineError
from components.data_curation.reading.raw_records import FileLocation

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

S3, HF = "s3://", "hf://"
HF_DATASETS = re.compile(r"hf://datasets/[^/@]+/[^/@]+(@[^/@]+)?(/.*)?")
BUCKET_ADDRESS = re.compile(r"[^/@:?*\[]+(/.*)?")
GLOB_CHARACTERS = re.compile(r"[*?\[]")
BLOCK_BYTES = 2 * 1024 * 1024  # per request; reading a file holds a few blocks in memory
# Listing reports an unreachable store within about 15 seconds; reading tolerates a temporary failure.
CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS = 4, 6
LISTING_ATTEMPTS, READING_ATTEMPTS = 2, 6
# Packages whose exceptions become error messages.
CLIENT_PACKAGES = (
    "aiobotocore", "aiohttp", "botocore", "httpcore", "httpx", "huggingface_hub", "requests", "s3fs",
)  # fmt: skip
CREDENTIAL_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
CREDENTIAL_ERRORS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")
HF_MISSING_ERRORS = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError")
CHANGED_SOURCE_HINT = "Check that the source is still accessible."
ERROR_PREFIX = "data_curation.sources: "


class _Entry(TypedDict):
    """A listed file or folder, as fsspec describes it."""

    name: str
    type: str
    size: int | None


def is_remote(uri: str) -> bool:
    """Return whether the address is an s3:// or hf:// address."""
    return uri.startswith((S3, HF))


def list_files(pattern: str) -> list[FileLocation]:
    """List the files of an address, a glob or a prefix, sorted by address; [] if a glob or a prefix matches no file.

    Raises:
        ConfigurationError: the address is invalid; the bucket, key, dataset or revision does not exist; or the store
            denies access or does not respond.
    """
    path, scheme = _to_path(pattern), pattern[: len(S3)]
    with _translate_errors(pattern):
        system = _open_file_system(scheme, os.getpid())
        system.invalidate_cache()
        if GLOB_CHARACTERS.search(path):
            entries: list[_Entry] = list(system.glob(path, detail=True).values())
        elif not path.endswith("/") and (entry := system.info(path))["type"] == "file":
            entries = [entry]
        else:
            entries = list(system.find(path, detail=True).values())
        files = [entry for entry in entries if entry["type"] == "file" and not entry["name"].endswith("/")]
        if not files and scheme == S3:  # a glob also returns nothing for a missing bucket
            system.call_s3("head_bucket", Bucket=path.partition("/")[0])
    found = (FileLocation(scheme + entry["name"], int(entry["size"] or 0)) for entry in files)
    return sorted(found, key=lambda file: file.uri)


def digest_file(uri: str) -> str:
    """Return the sha256 (hex) of a file's bytes.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with _translate_errors(uri):
        for chunk in _stream_file(uri, BLOCK_BYTES // 8):
            digest.update(chunk)
    return digest.hexdigest()


def read_chunks(uri: str, size: int) -> Iterator[bytes]:
    """Yield a file's bytes in chunks of `size` bytes.

    Raises:
        InputError: the file can no longer be read.
    """
    try:
        with _translate_errors(uri):
            yield from _stream_file(uri, size)
    except ConfigurationError as error:
        raise InputError(error.message.removeprefix(ERROR_PREFIX), hint=CHANGED_SOURCE_HINT) from None


def _stream_file(uri: str, size: int) -> Iterator[bytes]:
    system = _open_file_system(uri[: len(S3)], os.getpid(), READING_ATTEMPTS)
    with system.open(_to_path(uri), "rb", block_size=BLOCK_BYTES, cache_type="readahead") as file:
        while chunk := file.read(size):
            yield bytes(chunk)


def _to_path(uri: str) -> str:
    """Return the path that the file system expects. Raises ConfigurationError for an invalid address."""
    path = uri[len(S3) :]
    if uri.startswith(S3) and not BUCKET_ADDRESS.fullmatch(path):
        hint = f"Write s3://bucket/key, with * for any part of the key and credentials only in {CREDENTIAL_VARIABLES}."
        raise _remote_error(re.sub("//.*@", "//…@", uri), "contains no valid bucket name", hint)
    if uri.startswith(HF) and not HF_DATASETS.fullmatch(uri):
        hint = "Write hf://datasets/org/name@revision/path, preferably with a commit hash as the revision."
        raise _remote_error(uri, "is not the address of a dataset", hint)
    return path


@cache
def _open_file_system(scheme: str, process: int, attempts: int = LISTING_ATTEMPTS) -> AbstractFileSystem:
    """Open the file system of a scheme; `process` is part of the cache key, because a fork breaks connections."""
    if scheme == HF:
        from huggingface_hub import HfFileSystem

        endpoint, token = (os.environ.get(name) or None for name in ("HF_ENDPOINT", "HF_TOKEN"))
        return HfFileSystem(endpoint=endpoint, token=token, skip_instance_cache=True, use_listings_cache=False)
    import s3fs

    limits = {
        "connect_timeout": CONNECT_TIMEOUT_SECONDS,
        "read_timeout": READ_TIMEOUT_SECONDS,
        "retries": {"total_max_attempts": attempts, "mode": "standard"},
    }
    system = s3fs.S3FileSystem(config_kwargs=limits, skip_instance_cache=True, use_listings_cache=False)
    system.retries = 1  # botocore retries already
    return system


# --- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def _translate_errors(uri: str) -> Iterator[None]:
    """Translate the exceptions of a store or its client to ConfigurationError."""
    try:
        yield
    except TunelineError:
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        names = [f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in causes]
        if not isinstance(error, OSError | ValueError) and not names[0].startswith(CLIENT_PACKAGES):
            raise
        text = " ".join(str(error).split())[:300]
        describe = _describe_s3_error if uri.startswith(S3) else _describe_hf_error
        raise _remote_error(uri, *describe(uri, causes, names, text)) from None


def _has_class_name(names: list[str], *suffixes: str) -> bool:
    return any(name.endswith(suffixes) for name in names)


def _describe_s3_error(uri: str, causes: list[BaseException], names: list[str], text: str) -> tuple[str, str]:
    """Return the problem and a hint."""
    error, bucket = causes[0], uri[len(S3) :].partition("/")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    endpoint = re.sub("//.*@", "//", endpoint)
    if isinstance(error, FileNotFoundError) and (_has_class_name(names, "NoSuchBucket") or _is_bucket_missing(bucket)):
        hint = f"Check the bucket name {bucket!r} and AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL."
        return f"is in a bucket that does not exist at {endpoint}", hint
    if isinstance(error, FileNotFoundError):
        return "does not exist", f"Check the key, which is case-sensitive: aws s3 ls s3://{bucket}/"
    if _has_class_name(names, *CREDENTIAL_ERRORS):
        return f"cannot be read without credentials: {text.rstrip('.')}", f"Set {CREDENTIAL_VARIABLES}."
    if isinstance(error, PermissionError):
        hint = f"Check {CREDENTIAL_VARIABLES}, and their permissions on the bucket {bucket}."
        return f"cannot be read with these credentials: {endpoint} returned {text.rstrip('.')!r}", hint
    return f"cannot be read: the request to {endpoint} failed: {text}", "Check AWS_ENDPOINT_URL and the network."


def _is_bucket_missing(bucket: str) -> bool:
    """Return whether the store reports that the bucket does not exist; False after any other error."""
    try:
        _open_file_system(S3, os.getpid()).call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError:
        return True
    except Exception:
        return False
    return False


def _describe_hf_error(uri: str, causes: list[BaseException], names: list[str], text: str) -> tuple[str, str]:
    """Return the problem and a hint."""
    error = causes[0]
    responses = (getattr(one, "response", None) for one in causes)
    status = next((code for one in responses if (code := getattr(one, "status_code", None))), None)
    if _has_class_name(names, "OfflineModeIsEnabled"):
        return "cannot be read: HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE, or use local files."
    if _has_class_name(names, "GatedRepoError"):
        hint = "Set HF_TOKEN to a token of an account whose access the owner has approved."
        return "is gated: access requires the owner's approval", hint
    if isinstance(error, FileNotFoundError) or _has_class_name(names, *HF_MISSING_ERRORS):
        hint = "Check the name, revision and path, or set HF_TOKEN for a private dataset."
        return "does not exist, or HF_TOKEN has no access to it", hint
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"cannot be read: access denied: {text}", "Set HF_TOKEN to a token with read access to the dataset."
    return f"cannot be read: {text}", "Check HF_ENDPOINT and the network."


def _remote_error(uri: str, problem: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"{ERROR_PREFIX}{uri!r} {problem}", hint=hint)
