"""The capture file: which requests the gateway captures, where, for how long, and under which subject."""

from __future__ import annotations

import grp
import hashlib
import hmac
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.artifacts.object_storage import S3_ADDRESS_PATTERN
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.validation_errors import describe_validation_error
from components.common.runtime.yaml_loading import load_yaml

HINT = "See docs/how-to/capture.md for the settings of a capture file."
MIN_KEY_BYTES = 16


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelCapture(_Settings):
    """Capture of one model's traffic."""

    sampling_rate: float = Field(1.0, ge=0, le=1, description="Share of requests with consent that are captured.")
    retention_days: int = Field(
        30, ge=1, le=3650, description="Number of days after which `tuneline traffic expire` deletes rows."
    )
    legal_hold: bool = Field(
        False, description="true: neither `expire` nor `erase` deletes captured traffic of the model."
    )


class Consent(_Settings):
    """Which requests may be captured, by a header that the client sends."""

    policy: Literal["required", "unless_refused", "not_asked"] = Field(
        "required",
        description="required: capture only requests whose header grants consent. unless_refused: capture all "
        "requests except those with a header that does not grant consent. not_asked: capture all requests, whatever the header.",
    )
    header: str = Field("x-tuneline-consent", pattern=r"^[A-Za-z0-9-]{1,64}$", description="Name of the header.")
    granted: list[str] = Field(["granted", "true", "yes", "1"], min_length=1, description="Values that grant consent.")


class Subject(_Settings):
    """The person or customer whose rows `tuneline traffic erase` removes. Stored as a keyed hash only."""

    source: str = Field(
        "user",
        pattern=r"^(none|user|key|header [A-Za-z0-9-]{1,64})$",
        description="user: the field `user` of the request. key: the name of the API key. header NAME: a request header. none: no subject.",
    )
    key_file: Path | None = Field(None, description="File with the secret hash key of at least 16 bytes.")

    @model_validator(mode="after")
    def _check_key(self) -> Subject:
        if self.source != "none" and self.key_file is None:
            raise ValueError(
                "key_file is not set; expected the path of a key, or `source: none` for rows that cannot be erased by subject"
            )
        return self


class CaptureSettings(_Settings):
    """Contents of the capture file."""

    folder: Path = Field(
        description="Folder of the captured traffic. With a bucket: folder for rows that are not uploaded yet, and for "
        "the copies that commands process."
    )
    bucket: str = Field(
        "",
        pattern=f"^({S3_ADDRESS_PATTERN.pattern})?$",
        description="Address of the captured traffic: s3://BUCKET/PREFIX. Empty: only `folder` is used.",
    )
    upload_seconds: int = Field(60, ge=5, le=3600, description="Age in seconds at which the gateway uploads rows.")
    models: dict[Annotated[str, Field(min_length=1, max_length=128)], ModelCapture] = Field(
        {},
        description="Models to capture, by the name of the model that answers. Other models are not captured.",
    )
    consent: Consent = Consent()
    subject: Subject
    group: str = Field("", description="Group that may read the files. Empty: the primary group of the gateway.")
    max_row_kib: int = Field(256, ge=1, le=4096, description="Maximum size of a captured request in KiB.")
    queue_rows: int = Field(
        1000, ge=1, le=100_000, description="Maximum number of queued rows; further rows are dropped."
    )
    queue_mib: int = Field(
        64, ge=1, le=4096, description="Maximum size of queued requests in MiB; further requests are not captured."
    )

    @property
    def location(self) -> str:
        """The bucket, or the folder."""
        return self.bucket or str(self.folder)

    @cached_property
    def subject_key(self) -> bytes:
        """The secret key of the subject hash.

        Raises:
            ConfigurationError: the file cannot be read, or is too short.
        """
        path = self.subject.key_file
        assert path is not None
        try:
            key = path.read_bytes().strip()
        except OSError as error:
            raise ConfigurationError(
                f"subject.key_file {path} cannot be read: {error.strerror}",
                hint="Create a key, for example with `openssl rand -hex 32`.",
            ) from None
        if len(key) < MIN_KEY_BYTES:
            raise ConfigurationError(
                f"subject.key_file {path} has {len(key)} bytes; expected at least {MIN_KEY_BYTES}",
                hint="Create a key, for example with `openssl rand -hex 32`.",
            )
        return key

    @cached_property
    def group_id(self) -> int:
        """Numeric ID of the group, or -1: the primary group.

        Raises:
            ConfigurationError: the group does not exist.
        """
        if not self.group:
            return -1
        try:
            return int(self.group) if self.group.isdecimal() else grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise ConfigurationError(f"group {self.group!r} does not exist on this machine", hint=HINT) from None

    def hash_subject(self, subject: str) -> str:
        """Return the keyed hash (HMAC-SHA256) of a subject."""
        return hmac.new(self.subject_key, subject.encode(errors="replace"), hashlib.sha256).hexdigest()


def load_settings(path: Path) -> CaptureSettings:
    """Return the settings of a capture file. Relative paths are resolved from its folder.

    Raises:
        ConfigurationError: the file cannot be read, or a setting is invalid.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"the capture file {path} cannot be read: {error}", hint=HINT) from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"the capture file {path} is not a mapping of settings", hint=HINT)
    try:
        settings = CaptureSettings.model_validate(content)
    except ValidationError as error:
        raise ConfigurationError(describe_validation_error(error, str(path), CaptureSettings), hint=HINT) from None
    home = path.absolute().parent
    subject = settings.subject
    if subject.key_file is not None:
        subject = subject.model_copy(update={"key_file": home / subject.key_file})
    changes = {"folder": home / settings.folder, "bucket": settings.bucket.rstrip("/"), "subject": subject}
    settings = settings.model_copy(update=changes)
    if subject.key_file is not None:
        _ = settings.subject_key  # an unreadable key fails the start, not the first request
    _ = settings.group_id
    return settings
