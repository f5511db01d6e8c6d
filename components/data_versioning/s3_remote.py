"""S3 as a DVC remote: endpoint, timeouts, and error messages.

DVC reports a rejected key, a missing bucket and an unreachable server with similar messages, after minutes of retries.
`check_bucket` therefore sends a request with one retry and short timeouts, and explains its error.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from components.common.runtime.environment import patched_environment
from components.data_versioning.git_repository import DataVersioningError

CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS = 5, 60
TIMEOUTS = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "read_timeout": READ_TIMEOUT_SECONDS}  # of DVC's S3 client
MAX_ATTEMPTS = "2"  # for one request, unless AWS_MAX_ATTEMPTS is set
CREDENTIALS_HINT = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to keys with read and write access."
)
ERROR_EXPLANATIONS = {
    "InvalidAccessKeyId": ("rejects the access key", CREDENTIALS_HINT),
    "SignatureDoesNotMatch": ("rejects the secret key", CREDENTIALS_HINT),
    "AccessDenied": ("denies access to this key", CREDENTIALS_HINT),
    "ExpiredToken": ("rejects the session token, which has expired", CREDENTIALS_HINT),
    "NoSuchBucket": ("has no such bucket", "Create the bucket, or correct the URL of the DVC remote."),
}


def resolve_endpoint(configured: str) -> str:
    """Return the address of the S3 service: configured, from the environment, or "" for Amazon S3."""
    return configured or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def check_bucket(url: str, endpoint: str) -> None:
    """Check the access to a bucket by listing one key.

    Args:
        url: Address in the form s3://bucket/prefix.
        endpoint: Address of the S3 service; "" for Amazon S3.

    Raises:
        DataVersioningError: the service does not answer, or the address, a key or the bucket is invalid.
    """
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound
    from botocore.session import get_session

    parts, service = urlsplit(url), f"the S3 service {endpoint}" if endpoint else "Amazon S3"
    retries = {"total_max_attempts": 2, "mode": "standard"}
    settings = Config(connect_timeout=CONNECT_TIMEOUT_SECONDS, read_timeout=CONNECT_TIMEOUT_SECONDS, retries=retries)
    with limited_retries():
        try:
            session = get_session()
            region = session.get_config_variable("region") or "us-east-1"
            client = session.create_client("s3", region_name=region, endpoint_url=endpoint or None, config=settings)
            client.list_objects_v2(Bucket=parts.netloc, Prefix=parts.path.lstrip("/"), MaxKeys=1)
        except ClientError as error:
            details = error.response.get("Error", {})
            code = details.get("Code", "")
            unknown = f"rejects the request: {details.get('Message') or code}"
            explanation, hint = ERROR_EXPLANATIONS.get(
                code, (unknown, "Check the keys, the bucket and the server's log.")
            )
            raise DataVersioningError(f"{url} cannot be used: {service} {explanation} ({code})", hint=hint) from None
        except (NoCredentialsError, ProfileNotFound) as error:
            raise DataVersioningError(f"no keys are set for {url}: {error}", hint=CREDENTIALS_HINT) from None
        except (BotoCoreError, ValueError) as error:
            raise DataVersioningError(
                f"cannot reach {service} for {url}: {error}",
                hint="Check data_versioning.endpoint_url (or AWS_ENDPOINT_URL) and the network.",
            ) from None


def limited_retries() -> AbstractContextManager[None]:
    """Limit the attempts of S3 requests in this block, unless the user has set AWS_MAX_ATTEMPTS."""
    return patched_environment({"AWS_MAX_ATTEMPTS": os.environ.get("AWS_MAX_ATTEMPTS", MAX_ATTEMPTS)})
