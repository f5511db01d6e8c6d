"""Sources that lie elsewhere: s3://bucket/key and hf://datasets/org/name@revision/path, through fsspec.

Where the store is and who asks is taken from the environment, as every other client of it does, and is never part of an address:
AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3) and the usual AWS variables or profile; HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from components.common.errors import ConfigurationError, InputError, TunelineError

S3, HF = "s3://", "hf://"
HF_DATASETS = re.compile(r"hf://datasets/[^/@]+/[^/@]+(@[^/@]+)?(/.*)?")
BUCKET = re.compile(r"[^/@:?*\[]+(/.*)?")
MAGIC = re.compile(r"[*?\[]")
BLOCK = 2 * 1024 * 1024  # bytes asked for at once; a file that is read holds a few of them in memory
# A store that does not answer is told of within some 15 seconds when it is first asked; one that did is given time for a hiccup.
CONNECT_WITHIN, ANSWER_WITHIN = 4, 6  # seconds
TRIES_AT_FIRST, TRIES_READING = 2, 6
CLIENTS = (
    "aiobotocore",
    "aiohttp",
    "botocore",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "requests",
    "s3fs",
)  # whose errors are told to people
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
AGAIN = "It could be read when the sources were listed: see that it is still there, then run the same command again."


@dataclass(frozen=True)
class Remote:
    """A file elsewhere: its address and its size in bytes."""

    uri: str
    bytes: int


def is_remote(uri: str) -> bool:
    """Whether an address is one that this module reads."""
    return uri.startswith((S3, HF))


def found(pattern: str) -> list[Remote]:
    """The files that an address means, sorted: one, a glob's, or all below a prefix; [] where a glob or a prefix has none.

    Raises ConfigurationError for a bucket, a key, a dataset or a revision that does not exist, and where the store cannot be asked.
    """
    path, scheme = _path(pattern), pattern[: len(S3)]
    with _told(pattern):
        system = _system(scheme, os.getpid())
        files = [entry for entry in _entries(system, path) if entry["type"] == "file" and not entry["name"].endswith("/")]
        if not files and scheme == S3:
            system.call_s3("head_bucket", Bucket=path.partition("/")[0])  # a glob finds nothing in a bucket that is not there either
    return sorted((Remote(scheme + entry["name"], int(entry["size"] or 0)) for entry in files), key=lambda one: one.uri)


def sha256(uri: str) -> str:
    """Digest of a file's bytes, streamed once. Raises ConfigurationError when it cannot be read."""
    digest = hashlib.sha256()
    with _told(uri):
        for chunk in _read(uri, BLOCK // 8):
            digest.update(chunk)
    return digest.hexdigest()


def chunks(uri: str, size: int) -> Iterator[bytes]:
    """A file's bytes, `size` at once. Raises InputError when it cannot be had any more."""
    try:
        with _told(uri):
            yield from _read(uri, size)
    except ConfigurationError as error:
        raise InputError(error.message.removeprefix(SOURCES), hint=f"{AGAIN} {error.hint}") from None


def _read(uri: str, size: int) -> Iterator[bytes]:
    system = _system(uri[: len(S3)], os.getpid(), TRIES_READING)
    with system.open(_path(uri), "rb", block_size=BLOCK, cache_type="readahead") as file:
        while chunk := file.read(size):
            yield bytes(chunk)


def _entries(system: Any, path: str) -> list[dict[str, Any]]:
    system.invalidate_cache()
    if MAGIC.search(path):
        return list(system.glob(path, detail=True).values())
    if not path.endswith("/"):
        entry = system.info(path)
        if entry["type"] == "file":
            return [entry]
    return list(system.find(path, detail=True).values())


def _path(uri: str) -> str:
    """An address as its file system knows it. Raises ConfigurationError for one that names no place."""
    path = uri[len(S3) :]
    if uri.startswith(S3) and not BUCKET.fullmatch(path):
        hint = f"Write s3://bucket/key, with * for any part of the key; keys to get in are never part of it: they come from {KEYS}."
        raise _refused(re.sub("//.*@", "//…@", uri), "names no bucket", hint)
    if uri.startswith(HF) and not HF_DATASETS.fullmatch(uri):
        raise _refused(uri, "names no dataset", "Write hf://datasets/org/name@revision/path, best with a commit hash as the revision.")
    return path


@cache
def _system(scheme: str, process: int, tries: int = TRIES_AT_FIRST) -> Any:
    """The file system of a scheme. What one process opened no other can use, so that `process` is a part of its name."""
    return _s3(tries) if scheme == S3 else _hf()


def _s3(tries: int) -> Any:
    import s3fs

    limits = {
        "connect_timeout": CONNECT_WITHIN,
        "read_timeout": ANSWER_WITHIN,
        "retries": {"total_max_attempts": tries, "mode": "standard"},
    }
    system = s3fs.S3FileSystem(config_kwargs=limits, skip_instance_cache=True, use_listings_cache=False)
    system.retries = 1  # botocore tries again already
    return system


def _hf() -> Any:
    from huggingface_hub import HfFileSystem

    endpoint, token = (os.environ.get(name) or None for name in ("HF_ENDPOINT", "HF_TOKEN"))
    return HfFileSystem(endpoint=endpoint, token=token, skip_instance_cache=True, use_listings_cache=False)


# --- errors -----------------------------------------------------------------------------------------------------------------------

SOURCES = "data_curation.sources: "


@contextmanager
def _told(uri: str) -> Iterator[None]:
    """What a store or its client says of an address, as a ConfigurationError."""
    try:
        yield
    except TunelineError:
        raise
    except Exception as error:
        names = [f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in _chain(error)]
        if not isinstance(error, OSError | ValueError) and not names[0].startswith(CLIENTS):
            raise
        said = " ".join(str(error).split())[:300]
        raise _refused(uri, *(_of_s3(uri, error, names, said) if uri.startswith(S3) else _of_hf(uri, error, names, said))) from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is(names: list[str], *which: str) -> bool:
    return any(name.endswith(which) for name in names)


def _of_s3(uri: str, error: Exception, names: list[str], said: str) -> tuple[str, str]:
    """What is wrong, and what to try."""
    bucket, where = uri[len(S3) :].partition("/")[0], _endpoint()
    if isinstance(error, FileNotFoundError):
        no_bucket = _is(names, "NoSuchBucket") or _lacks(bucket)
        if no_bucket:
            return (
                f"is in a bucket that does not exist at {where}",
                f"Check the name {bucket!r}, and that AWS_ENDPOINT_URL is the right store.",
            )
        return "does not exist", f"`aws s3 ls s3://{bucket}/` shows what the bucket holds; names differ by upper and lower case."
    if _is(names, "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"):
        return f"cannot be asked for without keys: {said.rstrip('.')}", f"Set {KEYS}."
    if isinstance(error, PermissionError):
        return f"may not be read with these keys: {where} says {said.rstrip('.')!r}", f"Check {KEYS}, and what they may read in {bucket}."
    return f"cannot be asked for: {where} does not answer: {said}", "Check AWS_ENDPOINT_URL and the network between here and there."


def _endpoint() -> str:
    """Where S3 is, as a message names it."""
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    return re.sub("//.*@", "//", address)


def _lacks(bucket: str) -> bool:
    """Whether the store says that there is no such bucket; where it will not say, there is one."""
    try:
        _system(S3, os.getpid()).call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError:
        return True
    except Exception:
        return False
    return False


def _of_hf(uri: str, error: Exception, names: list[str], said: str) -> tuple[str, str]:
    if _is(names, "OfflineModeIsEnabled"):
        return "cannot be asked for: HF_HUB_OFFLINE is set", "Unset it, or name files that lie here."
    if _is(names, "GatedRepoError"):
        return (
            "is gated: its owner lets in whom they choose",
            "Ask for access on the dataset's page, and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, FileNotFoundError) or _is(names, "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"):
        return "does not exist, or not for this token", "Check name, revision and path; a private dataset needs HF_TOKEN."
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return "may not be read with this token", "Set HF_TOKEN to a token that may read the dataset."
    return f"cannot be asked for: {said}", "Check HF_ENDPOINT and the network between here and there."


def _status(error: BaseException) -> int | None:
    return next((code for one in _chain(error) if (code := getattr(getattr(one, "response", None), "status_code", None))), None)


def _refused(uri: str, what: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"{SOURCES}{uri!r} {what}", hint=hint)
