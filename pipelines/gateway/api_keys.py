"""API keys: a file with the digest, scopes, rate limits and quota of each key, and the use of each key so far."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.yaml_loading import StrictLoader, describe_yaml_error, load_yaml
from pipelines.gateway.errors import RequestError

KEY_PREFIX = "tl-"
RELOAD_SECONDS = 2.0  # a mounted Secret changes while the gateway runs
MINUTE = 60.0

logger = logging.getLogger("tuneline.gateway")

Scope = Literal["inference", "metrics", "traffic"]


class ApiKey(BaseModel):
    """One key. The file holds its digest only; the key itself has 256 random bits, so that a plain digest is enough."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name in metrics and logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 digest of the key, in hexadecimal.")
    scopes: list[Scope] = Field(
        ["inference"],
        description="inference: list models and request answers. metrics: read /metrics. traffic: read /v1/routes.",
    )
    models: list[str] = Field([], description="Models that the key may use. Empty: all models.")
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    tokens_per_minute: Annotated[int, Field(ge=0)] = 0
    tokens_per_day: Annotated[int, Field(ge=0)] = 0
    concurrent_requests: Annotated[int, Field(ge=0)] = 0


class _DayUse(BaseModel):
    day: str
    tokens_today: int


class _UsageFile(RootModel[dict[str, _DayUse]]):
    """Contents of the usage file: the use of each key by its name."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey]


ANONYMOUS = ApiKey(name="anonymous", sha256="0" * 64, scopes=["inference", "metrics", "traffic"])


@dataclass
class KeyUse:
    """What a key has used: levels of the two buckets (in requests and tokens), and tokens of the current day (UTC)."""

    requests: float = 0.0
    tokens: float = 0.0
    updated: float = field(default_factory=lambda: time.monotonic())
    running: int = 0
    day: str = ""
    tokens_today: int = 0


class KeyRing:
    """The keys of a file, and their use. The file is read again when it changes.

    Args:
        path: the key file, or None: every request is anonymous.
        usage_path: file in which the tokens of the current day are kept over restarts, or None.

    Raises:
        ConfigurationError: a file cannot be read, or is invalid.
    """

    def __init__(self, path: Path | None, usage_path: Path | None = None) -> None:
        self.path, self.usage_path = path, usage_path
        self._use: dict[str, KeyUse] = {}
        self._keys: dict[str, ApiKey] = {}
        self._checked, self._stamp, self._problem = 0.0, (0, 0), ""
        self._is_saved = True
        if path is not None:
            self._keys, self._stamp = read_keys(path), _get_stamp(path)
            self._checked = time.monotonic()
        if usage_path is not None and usage_path.exists():
            try:
                saved = _UsageFile.model_validate_json(filesystem.read_text(usage_path)).root
            except (OSError, ValueError) as error:
                raise ConfigurationError(
                    f"the usage file {usage_path} cannot be read: {error}",
                    hint="Delete the file to reset all quotas.",
                ) from None
            self._use = {name: KeyUse(day=use.day, tokens_today=use.tokens_today) for name, use in saved.items()}

    def authenticate(self, authorization: str, scope: Scope) -> ApiKey:
        """Return the key of an Authorization header.

        Raises:
            RequestError: the key is missing or unknown, or lacks the scope.
        """
        if self.path is None:
            return ANONYMOUS
        self._reload()
        kind, _, secret = authorization.partition(" ")
        key = self._keys.get(hash_key(secret.strip())) if kind.lower() == "bearer" else None
        if key is None:
            message = "the API key is not valid" if authorization else "the header Authorization: Bearer KEY is missing"
            raise RequestError(401, message, code="invalid_api_key")
        if scope not in key.scopes:
            raise RequestError(403, f"the key {key.name} lacks the scope {scope}", code="insufficient_scope")
        return key

    def admit(self, key: ApiKey, model: str | None) -> None:
        """Count a request against the limits of its key. `release` must follow.

        Args:
            key: the request's key.
            model: public name of the model, or None for a request without a model.

        Raises:
            RequestError: a limit is reached, or the key may not use the model.
        """
        if key.models and model is not None and model not in key.models:
            raise RequestError(403, f"the key {key.name} may not use the model {model!r}", code="model_not_allowed")
        use = self._get_use(key)
        if key.concurrent_requests and use.running >= key.concurrent_requests:
            raise _limit_error(
                f"this key already has {format_count(key.concurrent_requests, 'request')} in progress", 1
            )
        if key.tokens_per_day and use.tokens_today >= key.tokens_per_day:
            now = datetime.now(UTC)
            seconds = 86_400 - (now.hour * 3600 + now.minute * 60 + now.second)
            raise RequestError(
                429,
                f"the quota of {key.tokens_per_day} tokens per day is used up; it resets at 00:00 UTC",
                code="insufficient_quota",
                retry_after=seconds,
            )
        for limit, level, unit in (
            (key.requests_per_minute, use.requests, "requests"),
            (key.tokens_per_minute, use.tokens, "tokens"),
        ):
            if limit and level + 1 > limit:
                wait = max(1, round((level - limit + 1) / limit * MINUTE))
                raise _limit_error(f"the limit of {limit} {unit} per minute is reached", wait)
        use.requests += 1
        use.running += 1

    def release(self, key: ApiKey, tokens: int) -> None:
        """Count the tokens of a finished request."""
        use = self._get_use(key)
        use.running -= 1
        use.tokens += tokens
        use.tokens_today += tokens
        self._is_saved = self._is_saved and not (tokens and key.tokens_per_day)

    def _get_use(self, key: ApiKey) -> KeyUse:
        """Return the key's use; its buckets have drained since the last call."""
        use = self._use.setdefault(key.name, KeyUse())
        now, day = time.monotonic(), datetime.now(UTC).date().isoformat()
        minutes = (now - use.updated) / MINUTE
        use.requests = max(0.0, use.requests - minutes * key.requests_per_minute)
        use.tokens = max(0.0, use.tokens - minutes * key.tokens_per_minute)
        use.updated = now
        if use.day != day:
            use.day, use.tokens_today = day, 0
        return use

    def save_usage(self) -> None:
        """Write the usage file if a count has changed. A failure is logged, and the counts are written next time."""
        if self.usage_path is None or self._is_saved:
            return
        self._is_saved = True
        days = {name: {"day": use.day, "tokens_today": use.tokens_today} for name, use in list(self._use.items())}
        try:
            artifact_folder.write_atomically(self.usage_path, json.dumps(days))
        except OSError as error:
            self._is_saved = False
            self._log_problem(f"usage_file_not_written error={error.strerror!r}")

    def _reload(self) -> None:
        assert self.path is not None
        if time.monotonic() < self._checked + RELOAD_SECONDS:
            return
        self._checked = time.monotonic()
        if (stamp := _get_stamp(self.path)) == self._stamp:
            return
        try:
            self._keys, self._stamp = read_keys(self.path), stamp
            self._problem = ""
        except ConfigurationError as error:  # keep the valid keys: a bad edit must not end the service
            self._log_problem(f"key_file_invalid error={error.message!r}")

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, not at each request."""
        if problem != self._problem:
            logger.warning("%s", problem)
        self._problem = problem


def _get_stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file is edited or replaced; zeros for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


def hash_key(secret: str) -> str:
    """Return the digest of a key as it is stored in the file."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Return the keys of a file by digest.

    Raises:
        ConfigurationError: the file cannot be read, or a key is invalid.
    """
    example = "Example: keys: [{name: team-a, sha256: DIGEST}]. Create keys with `tuneline keys create NAME`."
    try:
        keys = _KeyFile.model_validate(load_yaml(filesystem.read_text(path), StrictLoader)).keys
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = describe_yaml_error(error)
        raise ConfigurationError(f"the key file {path} cannot be read: {problem}", hint=example) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path}: {place}: {first['msg']}", hint=example) from None
    for each in ("name", "sha256"):
        values = [getattr(key, each) for key in keys]
        if repeated := {value for value in values if values.count(value) > 1}:
            raise ConfigurationError(
                f"{path}: {each} {sorted(repeated)[0]} appears more than once", hint="Remove one of the keys."
            )
    return {key.sha256: key for key in keys}


def create_key(path: Path, name: str, settings: Mapping[str, Any]) -> str:
    """Add a key to the file, and return the key, which is not stored.

    Args:
        path: the key file; created for its owner and group if it does not exist.
        name: name of the key.
        settings: further fields of ApiKey.

    Raises:
        ConfigurationError: the file or the settings are invalid, or the name exists.
    """
    keys = list(read_keys(path).values()) if path.exists() else []
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    if name in [key.name for key in keys]:
        raise ConfigurationError(f"{path} already has a key with the name {name}", hint="Choose another name.")
    try:
        keys.append(ApiKey(name=name, sha256=hash_key(secret), **settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigurationError(
            f"the key's {first['loc'][0]} is {first['input']!r}: {first['msg']}", hint="Correct the value."
        ) from None
    _write_keys(path, keys)
    return secret


def revoke_key(path: Path, name: str) -> None:
    """Remove a key from the file.

    Raises:
        ConfigurationError: the file is invalid, or has no key with this name.
    """
    keys = list(read_keys(path).values())
    if name not in [key.name for key in keys]:
        names = ", ".join(key.name for key in keys) or "none"
        raise ConfigurationError(
            f"{path} has no key with the name {name}; existing keys: {names}", hint="Check the name."
        )
    _write_keys(path, [key for key in keys if key.name != name])


def _write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    content = {"keys": [key.model_dump(exclude_defaults=True) for key in keys]}
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact_folder.write_atomically(path, yaml.safe_dump(content, sort_keys=False))
    path.chmod(0o640)


def _limit_error(message: str, seconds: int) -> RequestError:
    return RequestError(429, message, code="rate_limit_exceeded", retry_after=seconds)
