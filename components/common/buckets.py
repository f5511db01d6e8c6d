"""Objects in an S3 bucket: written in parts, read in ranges that come side by side, and what the service refuses told as what it is.

Where the service is, and who asks, is taken from the environment (AWS_ENDPOINT_URL or AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID,
AWS_PROFILE, …) and is never part of an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from components.common.errors import EngineMissingError, TunelineError, of_the_machine

S3 = "s3://"
ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?")
PART = 32 * 2**20  # bytes of an object that are sent or fetched at once
MOST_PARTS = 10_000  # of one object
AT_ONCE = 8  # parts under way
LIMITS = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 3, "mode": "standard"}}
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
WITHOUT_KEYS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")
Moved = Callable[[int], None]  # told how many bytes more have moved


def put(path: Path, uri: str, moved: Moved) -> None:
    """Write a file to an object, which is there whole or not at all. Raises as `told` says."""
    from fsspec.callbacks import Callback

    class Telling(Callback):  # type: ignore[misc]
        """Passes on what moves."""

        def relative_update(self, inc: int = 1) -> None:
            moved(inc)

    part = max(PART, -(-path.stat().st_size // MOST_PARTS))
    with told(uri):
        _system().put_file(str(path), uri, callback=Telling(), chunksize=part, max_concurrency=AT_ONCE)


def get(uri: str, path: Path, size: int, moved: Moved) -> None:
    """Write an object of so many bytes to a file. Raises FileNotFoundError where there is none, and as `told` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for first in range(0, size, PART * AT_ONCE):
            starts = list(range(first, min(first + PART * AT_ONCE, size), PART))
            with told(uri):
                parts = _system().cat_ranges([uri] * len(starts), starts, [min(start + PART, size) for start in starts], on_error="raise")
            for part in parts:
                file.write(part)
                moved(len(part))


def write(uri: str, text: str) -> None:
    """Write a small object. Raises as `told` says."""
    with told(uri):
        _system().pipe_file(uri, text.encode())


def read(uri: str) -> bytes | None:
    """A small object; None where there is none. Raises as `told` says."""
    try:
        with told(uri):
            return bytes(_system().cat_file(uri))
    except FileNotFoundError:
        return None


def sizes(uri: str) -> dict[str, int]:
    """The objects below a prefix with their bytes, by what follows the prefix. Raises as `told` says."""
    return {name: size for name, (size, _) in times(uri).items()}


def times(uri: str) -> dict[str, tuple[int, float]]:
    """As `sizes`, each with the time of its last change as well: seconds since 1970, by the service's clock. Raises as `told` says."""
    start = uri.removeprefix(S3).rstrip("/") + "/"
    try:
        with told(uri):
            found = _system().find(uri, detail=True)
    except FileNotFoundError:
        return {}
    kept = {name.removeprefix(start): entry for name, entry in found.items() if name.startswith(start)}
    return {name: (int(entry["size"] or 0), entry["LastModified"].timestamp()) for name, entry in kept.items()}


def changed(uri: str) -> float | None:
    """When an object was written, in seconds since 1970 by the service's clock; None where there is none. Raises as `told` says."""
    try:
        with told(uri):
            found = _system().info(uri, refresh=True)
    except FileNotFoundError:
        return None
    return float(found["LastModified"].timestamp()) if found["type"] == "file" else None


def delete(uri: str) -> None:
    """Delete an object; one that is not there is none to delete. Raises as `told` says."""
    with suppress(FileNotFoundError), told(uri):
        _system().rm_file(uri)


def folders(uri: str) -> list[str]:
    """The names right below a prefix that have something below them, sorted. Raises as `told` says."""
    try:
        with told(uri):
            found = _system().ls(uri, detail=True, refresh=True)
    except FileNotFoundError:
        return []
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")


def _system() -> Any:
    return _opened(os.getpid(), tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))))


@cache
def _opened(process: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """The file system. What one process opened no other can use, and it is opened for the service and the keys of its settings."""
    try:
        import s3fs
    except ImportError:
        hint = "pip install 'tuneline[store]'"
        raise EngineMissingError("s3fs is not installed, and an address begins with s3://", hint=hint) from None

    return s3fs.S3FileSystem(config_kwargs=LIMITS, skip_instance_cache=True, use_listings_cache=False)


@contextmanager
def told(uri: str) -> Iterator[None]:
    """What the service, or the way to it, refuses, as an EngineMissingError. That an object is not there is left a FileNotFoundError."""
    try:
        yield
    except TunelineError:
        raise
    except Exception as error:  # botocore's errors have no common ancestor that s3fs leaves in place
        names = {type(one).__name__ for one in _chain(error)}
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in _codes(error) and not _lacks(uri):
            raise
        if of_the_machine(error):
            raise
        what, hint = _cause(uri, error, names)
        raise EngineMissingError(f"{uri} {what}", hint=hint) from None


def _cause(uri: str, error: Exception, names: set[str]) -> tuple[str, str]:
    bucket, said = uri.removeprefix(S3).partition("/")[0], " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return f"is in a bucket that does not exist at {_endpoint()}", f"Make the bucket {bucket}, or check AWS_ENDPOINT_URL."
    if names & set(WITHOUT_KEYS):
        return f"cannot be asked for without keys: {said}", f"Set {KEYS}."
    if isinstance(error, PermissionError):
        return f"is refused to these keys: {_endpoint()} says {said.rstrip('.')!r}", f"Check {KEYS}, and what they may do in {bucket}."
    return f"cannot be reached: {_endpoint()} says {said}", "Check AWS_ENDPOINT_URL and the network; then run the same command again."


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _codes(error: BaseException) -> set[str]:
    """What the service itself called what went wrong."""
    answers = [getattr(one, "response", None) for one in _chain(error)]
    return {str(answer.get("Error", {}).get("Code", "")) for answer in answers if isinstance(answer, dict)}


def _lacks(uri: str) -> bool:
    """Whether the service says that there is no such bucket; where it will not say, there is one."""
    try:
        _system().call_s3("head_bucket", Bucket=uri.removeprefix(S3).partition("/")[0])
    except FileNotFoundError:
        return True
    except Exception:
        return False
    return False


def _endpoint() -> str:
    """Where S3 is, as a message names it."""
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    return re.sub("//.*@", "//", address)
