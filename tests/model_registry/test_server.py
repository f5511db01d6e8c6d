"""A real MLflow server: concurrent promotions, and a server that is unavailable, slow or read-only.

The file is `long`: it starts a server and waits for timeouts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import EngineMissingError, NotWritableError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import registry_history
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.stage import Registration, find_champion, promote, register
from tests.mlflow_server import mlflow_server
from tests.model_registry import fault_proxy
from tests.model_registry.conftest import Customization, CustomizationArtifacts
from tests.model_registry.fault_proxy import DISCONNECTED, PASS, RESPONSE_LOST, SLOW, UNAVAILABLE, Proxy
from tests.pipelines.command import ROOT, environment

pytestmark = [pytest.mark.mlflow, pytest.mark.long]
PROCESSES = 20


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def proxy(server_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server; the tracking URI of this process points to it."""
    with fault_proxy.run_proxy(server_url) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        monkeypatch.setenv("TUNELINE_REGISTRY_TIMEOUT_SECONDS", "2")
        yield proxy


def register_artifacts(artifacts: CustomizationArtifacts, name: str) -> Registration:
    return register(
        artifacts.model,
        artifacts.evaluation,
        artifacts.repository,
        ModelRegistryConfig(name=name),
        reporter=SilentReporter(),
    )


def promote_concurrently(name: str, versions: list[str], *, force: bool, uri: str) -> list[dict[str, Any]]:
    """Promote each version from its own process at the same moment and return the results."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "tests.model_registry.concurrent_promotion",
        name,
        "force" if force else "checked",
        *versions,
    ]
    env = environment(MLFLOW_TRACKING_URI=uri, PYTHONPATH=str(ROOT))
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=850, check=False)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def create_bare_versions(client: Any, name: str, count: int) -> list[str]:
    """Create versions that have only a digest; they need `force` to be promoted."""
    client.create_registered_model(name)
    tags = [{"tuneline.model_sha256": f"{number:064x}"} for number in range(1, count + 1)]
    return [str(client.create_model_version(name, "elsewhere:/x", tags=tag).version) for tag in tags]


def check_concurrent_promotions(uri: str, name: str) -> None:
    """Promote twenty versions from twenty processes and check that all promotions are serialized."""
    client = mlflow_tracking.connect().MlflowClient()
    versions = create_bare_versions(client, name, PROCESSES)
    results = promote_concurrently(name, versions, force=True, uri=uri)
    assert [result for result in results if "to" not in result] == []
    assert sorted(int(result["to"]) for result in results) == list(range(1, PROCESSES + 1)), results
    entries = registry_history.read(client, name)
    assert [entry.number for entry in entries] == list(range(1, PROCESSES + 1))
    moves = registry_history.list_completed_moves(entries, "champion")
    assert [move.from_ for move in moves] == [None, *(move.to for move in moves[:-1])]
    assert str(client.get_registered_model(name).aliases["champion"]) == moves[-1].to
    assert [finding for finding in audit(name, reporter=SilentReporter()).findings if finding.kind != "digest"] == []


def test_concurrent_promotions_leave_one_champion_and_gapless_history(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_url)
    check_concurrent_promotions(server_url, "twenty")


def test_only_one_of_several_rival_candidates_becomes_champion(
    server_url: str, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_url)
    versions = [register_artifacts(customize(content), "rivals").version for content in ("one", "two", "three", "four")]
    results = promote_concurrently("rivals", versions, force=False, uri=server_url)
    assert sum("to" in result for result in results) == 1, results
    assert all("champion" in result["message"] for result in results if "to" not in result), results
    assert audit("rivals", reporter=SilentReporter()).clean


def fault_nth_request(number: int, fault: str, path_part: str = "/api/") -> Callable[[str, str], str]:
    """Return a rule that applies the fault to the n-th write request, counted from 0."""
    remaining = [number]

    def rule(method: str, path: str) -> str:
        if method == "GET" or path_part not in path or "search" in path:
            return PASS
        remaining[0] -= 1
        return fault if remaining[0] == -1 else PASS

    return rule


@pytest.mark.parametrize("fault", [RESPONSE_LOST, UNAVAILABLE])
def test_lost_or_refused_response_does_not_register_twice(proxy: Proxy, customize: Customization, fault: str) -> None:
    name = f"once-{fault}"
    hits = 0
    for number in (0, 1, 2, 3, 5, 8, 12):
        artifacts = customize(f"{fault} {number}")
        proxy.rule = fault_nth_request(number, fault)
        version = register_artifacts(artifacts, name).version
        hits += proxy.count("", fault)
        proxy.requests.clear()
        client = mlflow_tracking.connect().MlflowClient()
        matching = [
            v
            for v in client.search_model_versions(f"name = '{name}'")
            if v.tags["tuneline.model_sha256"] == artifacts.model.sha256
        ]
        assert [str(v.version) for v in matching] == [version]
    assert hits >= 6
    proxy.rule = fault_nth_request(0, fault)
    promote(name, version, reporter=SilentReporter(), force=True, reason="the test")
    entries = registry_history.read(client, name)
    assert [entry.to for entry in registry_history.list_completed_moves(entries, "champion")] == [version]
    assert len(registry_history.list_completed_moves(entries, "candidate")) == 7
    assert audit(name, reporter=SilentReporter()).clean


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(UNAVAILABLE, "HTTP status 503"), (SLOW, "timeout"), (DISCONNECTED, "connection closed")],
)
def test_unavailable_server_is_reported_without_partial_registration(
    proxy: Proxy, customize: Customization, fault: str, reason: str
) -> None:
    artifacts, name = customize(fault), f"away-{fault}"
    for number in (3,) if fault == SLOW else (0, 3, 6):
        rule = fault_nth_request(number, fault)
        triggered: list[bool] = []

        def fail_from_then_on(method: str, path: str, rule: Any = rule, triggered: list[bool] = triggered) -> str:
            if not triggered and rule(method, path) != PASS:
                triggered.append(True)
            return fault if triggered else PASS

        proxy.rule = fail_from_then_on
        start = time.monotonic()
        with pytest.raises(EngineMissingError, match=f"stopped answering; still failing after 2 seconds: {reason}"):
            register_artifacts(artifacts, name)
        assert time.monotonic() - start < 60
        proxy.rule = lambda method, path: PASS
        client = mlflow_tracking.connect().MlflowClient()
        assert all("tuneline.repository_sha256" in v.tags for v in client.search_model_versions(f"name = '{name}'"))
    assert register_artifacts(artifacts, name).version == "1"


def test_server_that_stores_nothing_is_reported(proxy: Proxy, customize: Customization) -> None:
    artifacts = customize("one")
    proxy.rule = lambda method, path: UNAVAILABLE if method != "GET" and "search" not in path else PASS
    with pytest.raises(EngineMissingError, match="answers read requests but not write requests"):
        register_artifacts(artifacts, "kept-nothing")


@pytest.mark.parametrize("step", [0, 3, 5])
def test_server_loss_during_promotion_leaves_a_valid_champion(
    proxy: Proxy, customize: Customization, step: int
) -> None:
    name = f"promoted-{step}"
    version = register_artifacts(customize(name), name).version
    rule = fault_nth_request(step, DISCONNECTED)
    disconnected: list[bool] = []

    def disconnect_from_then_on(method: str, path: str) -> str:
        disconnected.extend([True] if rule(method, path) == DISCONNECTED else [])
        return DISCONNECTED if disconnected else PASS

    proxy.rule = disconnect_from_then_on
    with pytest.raises(EngineMissingError):
        promote(name, version, reporter=SilentReporter())
    proxy.rule = lambda method, path: PASS
    assert audit(name, reporter=SilentReporter()).clean
    assert promote(name, version, reporter=SilentReporter()).to == version
    assert find_champion(name).version == version
    assert audit(name, reporter=SilentReporter()).notes == []


def test_read_only_database_is_reported_and_nothing_is_registered(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = customize("one")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///file:{tmp_path / 'mlflow.db'}?mode=ro&uri=true")
    start = time.monotonic()
    with pytest.raises(NotWritableError, match="its database is read-only"):
        register_artifacts(artifacts, "helper")
    assert time.monotonic() - start < 20
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert registry.search_registered_models() == []


def test_non_numeric_registry_timeout_is_rejected(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_REGISTRY_TIMEOUT_SECONDS", "long")
    with pytest.raises(TunelineError, match="TUNELINE_REGISTRY_TIMEOUT_SECONDS is 'long'"):
        register_artifacts(customize("one"), "helper")
