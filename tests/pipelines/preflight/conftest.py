"""A simulated cluster that passes all checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.kubeflow.preflight import cluster_api, pod_dry_run
from tests.kubernetes_api import Json, kubeconfig
from tests.pipelines.preflight.simulated_cluster import KFP_TOKEN, SimulatedCluster, serve_cluster


@pytest.fixture(scope="session")
def compiled_pods() -> dict[str, Json]:
    """The pods of the complete platform, shared because compiling takes two seconds and no test changes them."""
    with serve_cluster() as cluster:
        return pod_dry_run.build_pods(cluster.platform)


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_pods: dict[str, Json]
) -> Iterator[SimulatedCluster]:
    """A cluster that passes all checks, with a kubeconfig for it."""
    monkeypatch.setattr(pod_dry_run, "build_pods", lambda platform: compiled_pods)
    monkeypatch.setattr(cluster_api, "FIRST_CALL_TIMEOUT_SECONDS", 60.0)  # for tests on a busy machine
    monkeypatch.setattr(cluster_api, "READ_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", KFP_TOKEN)
    for name in ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT", "KFP_NAMESPACE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with serve_cluster() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", cluster.kubernetes.url)))
        yield cluster
