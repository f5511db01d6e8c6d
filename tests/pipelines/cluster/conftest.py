"""A cluster to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.cluster import admission
from tests.kubernetes_api import Json, kubeconfig
from tests.pipelines.cluster.standing import KFP_TOKEN, Standing, standing


@pytest.fixture(scope="session")
def compiled_pods() -> dict[str, Json]:
    """The pods of the platform that names everything: compiling takes two seconds, and none of the tests that use them changes them."""
    with standing() as place:
        return admission.pods(place.platform)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_pods: dict[str, Json]) -> Iterator[Standing]:
    """A cluster that lacks nothing, named by a kubeconfig."""
    monkeypatch.setattr(admission, "pods", lambda platform: compiled_pods)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", KFP_TOKEN)
    for name in ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT", "KFP_NAMESPACE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with standing() as found:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", found.kubernetes.url)))
        yield found
