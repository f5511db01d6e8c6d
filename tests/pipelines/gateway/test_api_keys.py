"""API keys: authentication, scopes, limits and quotas, and changes of the key file."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from components.common.runtime.errors import ConfigurationError
from pipelines.gateway import api_keys
from pipelines.gateway.api_keys import KeyRing, create_key, read_keys, revoke_key
from pipelines.gateway.errors import RequestError

DIGEST = api_keys.hash_key("a key")


def refusal(ring: KeyRing, secret: str, model: str = "m") -> RequestError:
    with pytest.raises(RequestError) as caught:
        ring.admit(ring.authenticate(f"Bearer {secret}", "inference"), model)
    return caught.value


def test_a_created_key_authenticates_and_only_its_digest_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "team" / "keys.yaml"
    secret = create_key(path, "team-a", {})
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    ring = KeyRing(path)
    assert ring.authenticate(f"Bearer {secret}", "inference").name == "team-a"
    for header in ("", secret, f"Basic {secret}", "Bearer", f"Bearer {secret}x", f"bearer  {secret[:-1]}"):
        with pytest.raises(RequestError) as caught:
            ring.authenticate(header, "inference")
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_key_needs_the_scope_and_the_model(tmp_path: Path) -> None:
    secret = create_key(tmp_path / "keys.yaml", "a", {"models": ["m"]})
    ring = KeyRing(tmp_path / "keys.yaml")
    with pytest.raises(RequestError) as caught:
        ring.authenticate(f"Bearer {secret}", "metrics")
    assert caught.value.status == 403
    ring.admit(ring.authenticate(f"Bearer {secret}", "inference"), "m")
    assert refusal(ring, secret, "other").code == "model_not_allowed"


def test_requests_and_tokens_per_minute_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = create_key(tmp_path / "keys.yaml", "a", {"requests_per_minute": 2})
    other = create_key(tmp_path / "keys.yaml", "b", {"tokens_per_minute": 100})
    ring, now = KeyRing(tmp_path / "keys.yaml"), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    key = ring.authenticate(f"Bearer {secret}", "inference")
    for _ in range(2):
        ring.admit(key, "m")
        ring.release(key, 10)
    error = refusal(ring, secret)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 30)
    now += 31
    ring.admit(key, "m")
    second = ring.authenticate(f"Bearer {other}", "inference")
    ring.admit(second, "m")
    ring.release(second, 250)
    assert refusal(ring, other).retry_after == 91
    now += 91
    ring.admit(second, "m")


def test_concurrent_requests_are_limited(tmp_path: Path) -> None:
    secret = create_key(tmp_path / "keys.yaml", "a", {"concurrent_requests": 1})
    ring = KeyRing(tmp_path / "keys.yaml")
    key = ring.authenticate(f"Bearer {secret}", "inference")
    ring.admit(key, "m")
    assert refusal(ring, secret).status == 429
    ring.release(key, 0)
    ring.admit(key, "m")


def test_the_daily_quota_survives_a_restart_and_a_lost_file(tmp_path: Path) -> None:
    secret = create_key(tmp_path / "keys.yaml", "a", {"tokens_per_day": 100})
    ring = KeyRing(tmp_path / "keys.yaml", tmp_path / "usage.json")
    key = ring.authenticate(f"Bearer {secret}", "inference")
    ring.admit(key, "m")
    ring.release(key, 100)
    ring.save_usage()
    again = KeyRing(tmp_path / "keys.yaml", tmp_path / "usage.json")
    error = refusal(again, secret)
    assert (error.status, error.code) == (429, "insufficient_quota")
    assert error.retry_after is not None
    assert 0 < error.retry_after <= 86_400
    for broken in ("broken", '{"a": {"day": "2026-01-01", "tokens_today": "x"}}'):
        (tmp_path / "usage.json").write_text(broken)
        with pytest.raises(ConfigurationError, match=r"usage\.json"):
            KeyRing(tmp_path / "keys.yaml", tmp_path / "usage.json")


def test_a_usage_file_that_cannot_be_written_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = create_key(tmp_path / "keys.yaml", "a", {"tokens_per_day": 100})
    ring = KeyRing(tmp_path / "keys.yaml", tmp_path / "missing" / "usage.json")
    key = ring.authenticate(f"Bearer {secret}", "inference")
    for _ in range(3):
        ring.admit(key, "m")
        ring.release(key, 10)
        ring.save_usage()
    assert caplog.text.count("usage_file_not_written") == 1
    (tmp_path / "missing").mkdir()
    ring.save_usage()
    assert '"tokens_today": 30' in (tmp_path / "missing" / "usage.json").read_text()


def test_a_changed_file_is_read_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "RELOAD_SECONDS", 0.0)
    path = tmp_path / "keys.yaml"
    first = create_key(path, "a", {})
    ring = KeyRing(path)
    second = create_key(path, "b", {})
    assert ring.authenticate(f"Bearer {second}", "inference").name == "b"
    revoke_key(path, "a")
    assert refusal(ring, first).status == 401
    path.write_text("keys: [{name: c}]")
    assert ring.authenticate(f"Bearer {second}", "inference").name == "b"
    assert "key_file_invalid" in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "keys"),
        ("keys: [", "cannot be read"),
        ("keys: []\nkeys: []", "cannot be read: line 2, column 1: duplicate key keys"),
        ("keys: [{name: a, sha256: xyz}]", "sha256"),
        (f"keys: [{{name: a b, sha256: {DIGEST}}}]", "name"),
        (f"keys: [{{name: a, sha256: {DIGEST}, scopes: [all]}}]", "scopes"),
        (
            f"keys: [{{name: a, sha256: {DIGEST}}}, {{name: a, sha256: {DIGEST[::-1]}}}]",
            "name a appears more than once",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_its_place(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "keys.yaml").write_text(content)
    with pytest.raises(ConfigurationError, match=reason):
        read_keys(tmp_path / "keys.yaml")


def test_names_are_unique_and_a_missing_key_cannot_be_revoked(tmp_path: Path) -> None:
    create_key(tmp_path / "keys.yaml", "a", {})
    with pytest.raises(ConfigurationError, match="already has a key"):
        create_key(tmp_path / "keys.yaml", "a", {})
    with pytest.raises(ConfigurationError, match="existing keys: a"):
        revoke_key(tmp_path / "keys.yaml", "b")
    with pytest.raises(ConfigurationError, match="scopes"):
        create_key(tmp_path / "keys.yaml", "b", {"scopes": ["all"]})
