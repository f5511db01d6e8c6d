"""The Argo CD Applications of deploy/argocd: fields of the CRD, and sources that render. Default tier: files only, in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import DEPLOY, OVERLAYS, Json
from tests.deploy.test_objects import collect_fields

# argoproj/argo-cd, commit 37ee0097cf85, manifests/crds/application-crd.yaml, without what only the chart's Application has
FIELDS = {
    "project",
    *(f"source.{name}" for name in ("repoURL", "targetRevision", "path")),
    "destination.server",
    *(f"syncPolicy.automated.{name}" for name in ("prune", "selfHeal")),
    "syncPolicy.syncOptions",
    "syncPolicy.retry.limit",
    *(f"syncPolicy.retry.backoff.{name}" for name in ("duration", "factor", "maxDuration")),
}
CHART_FIELDS = {
    "destination.namespace",
    *(f"source.helm.{name}" for name in ("releaseName", "valueFiles", "skipTests")),
}


def read_application(name: str) -> Json:
    application: Any = yaml.safe_load((DEPLOY / "argocd" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert (application["apiVersion"], application["kind"]) == ("argoproj.io/v1alpha1", "Application")
    return dict(application)


@pytest.mark.parametrize(("name", "fields"), [("overlay", FIELDS), ("chart", FIELDS | CHART_FIELDS)])
def test_application_has_only_fields_of_the_crd_and_deletes_nothing(name: str, fields: set[str]) -> None:
    application = read_application(name)
    assert collect_fields(application["spec"]) == fields
    assert application["spec"]["syncPolicy"]["automated"]["prune"] is False
    assert "finalizers" not in application["metadata"]


def test_overlay_application_names_an_overlay() -> None:
    path = Path(read_application("overlay")["spec"]["source"]["path"])
    assert path.parent == Path("deploy/overlays")
    assert path.name in OVERLAYS


def test_chart_application_names_the_chart_and_values_in_the_repository() -> None:
    application = read_application("chart")
    source = application["spec"]["source"]
    chart = DEPLOY.parent / source["path"]
    assert (chart / "Chart.yaml").is_file()
    assert all(
        (chart / values).resolve().parent == DEPLOY / "helm" / "values" for values in source["helm"]["valueFiles"]
    )
    assert all((chart / values).is_file() for values in source["helm"]["valueFiles"])
    assert source["helm"]["releaseName"] == application["metadata"]["name"]


def test_links_of_the_chart_stay_in_the_repository() -> None:
    """Argo CD refuses a repository with links that leave it."""
    links = [path for path in (DEPLOY / "helm" / "tuneline").rglob("*") if path.is_symlink()]
    assert len(links) == 3
    assert all(link.resolve().is_relative_to(DEPLOY.parent) and not link.readlink().is_absolute() for link in links)
