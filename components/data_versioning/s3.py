"""S3 as a DVC remote: where it is, how long to wait for it, and what its refusals mean.

DVC tells a refused key, a missing bucket and a dead server in much the same words, after minutes of retries. So the first request is
made here, with one retry and short timeouts, and what comes of it is told as what it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from components.data_versioning.repository import DataVersioningError

CONNECT_SECONDS, READ_SECONDS = 5, 60
ATTEMPTS = "2"  # of a request, where AWS_MAX_ATTEMPTS does not say otherwise
KEYS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to keys that may read and write there."
REFUSALS = {
    "InvalidAccessKeyId": ("does not know the access key", KEYS),
    "SignatureDoesNotMatch": ("refuses the secret key", KEYS),
    "AccessDenied": ("does not let this key in", KEYS),
    "ExpiredToken": ("refuses the session token, which has expired", KEYS),
    "NoSuchBucket": ("has no such bucket", "Create the bucket, or name another in data_versioning.remote."),
}


def endpoint(configured: str) -> str:
    """The address of the S3 service: the configured one, else what the environment says, else "" for Amazon's own."""
    return configured or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def check(url: str, address: str) -> None:
    """Ask for one key of s3://bucket/prefix. Raises DataVersioningError saying what is wrong: the address, the keys or the bucket."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

    parts, where = urlsplit(url), f"the S3 service {address or 'of Amazon'}"
    with patience():
        try:
            _client(address).list_objects_v2(Bucket=parts.netloc, Prefix=parts.path.lstrip("/"), MaxKeys=1)
        except ClientError as error:
            raise _refused(url, where, error.response.get("Error", {})) from None
        except (NoCredentialsError, ProfileNotFound) as error:
            raise DataVersioningError(f"there are no keys for {url}: {error}", hint=KEYS) from None
        except (BotoCoreError, ValueError) as error:
            raise DataVersioningError(
                f"{where} does not answer, so {url} cannot be used: {error}",
                hint="Check data_versioning.endpoint_url (or AWS_ENDPOINT_URL) and the network; then run the same command again.",
            ) from None


def _client(address: str) -> Any:
    from botocore.config import Config
    from botocore.session import get_session

    retries = {"total_max_attempts": 2, "mode": "standard"}
    settings = Config(connect_timeout=CONNECT_SECONDS, read_timeout=CONNECT_SECONDS, retries=retries)
    session = get_session()
    region = session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region_name=region, endpoint_url=address or None, config=settings)


def _refused(url: str, where: str, error: dict[str, str]) -> DataVersioningError:
    code = error.get("Code", "")
    told, hint = REFUSALS.get(code, (f"refuses it: {error.get('Message') or code}", "Check the keys, the bucket and the server's log."))
    return DataVersioningError(f"{url} cannot be used: {where} {told} ({code})", hint=hint)


@contextmanager
def patience() -> Iterator[None]:
    """Few attempts at a request while this lasts, where the user has not said how many."""
    before = os.environ.get("AWS_MAX_ATTEMPTS")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", ATTEMPTS)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("AWS_MAX_ATTEMPTS", None)
