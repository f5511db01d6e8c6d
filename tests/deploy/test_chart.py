"""The Helm chart of deploy/helm against the overlays: Helm's engine and kustomize render the same objects.

Default tier: Helm renders a chart in a tenth of a second. tests/engines/test_overlays_cluster.py applies the same objects to an API server.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests import kubernetes_schemas, pod_security
from tests.deploy.rendering import DEPLOY, OVERLAYS, Json, render_overlay, render_with_optional, team_namespace

CHART = DEPLOY / "helm" / "tuneline"
VALUES = DEPLOY / "helm" / "values"
LABELS = {
    "app.kubernetes.io/managed-by": "Helm",
    "app.kubernetes.io/instance": "site",
    "helm.sh/chart": "tuneline-0.1.0",
}
KEPT = ("Namespace", "PersistentVolume", "PersistentVolumeClaim")  # kinds that survive `helm uninstall`
# The values that add the optional components of an overlay, which its kustomizations list as comments.
OPTIONAL: dict[str, Json] = {
    "one-gpu-node": {"serving": {"podMonitor": True}},
    "shared-gpus": {"serving": {"podMonitor": True}, "dashboard": True, "alerts": True, "alertsConfigMap": True},
    "gaudi3-roce": {
        "serving": {"podMonitor": True, "scaleBy": "keda"},
        "roce": True,
        "dashboard": True,
        "alerts": True,
        "alertsConfigMap": True,
    },
    "xe9680-powerscale": {"serving": {"podMonitor": True}, "dashboard": True, "alerts": True, "alertsConfigMap": True},
}
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def read_values(overlay: str) -> Json:
    values: Json = yaml.safe_load((VALUES / f"{overlay}.yaml").read_text(encoding="utf-8"))
    return values


@cache
def load_chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_chart(values: Json) -> dict[str, str]:
    """Return the texts that Helm renders by template, without the folder of the chart."""
    rendered = load_chart().render(values, name="site", namespace="tuneline")
    return {path.removeprefix("tuneline/templates/"): text for path, text in rendered.items()}


def render_objects(values: Json) -> list[Json]:
    """Return the objects of a release, without those of `helm test`."""
    texts = [text for path, text in render_chart(values).items() if path.endswith(".yaml") and "/" not in path]
    return [manifest for text in texts for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def index(manifests: list[Json]) -> dict[tuple[str, str | None, str], Json]:
    """Return the manifests by kind, namespace and name, which are unique; the texts of the alerts as the rules in them."""
    for each in manifests:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "tuneline-alerts":
            each["data"] = {name: yaml.safe_load(text) for name, text in each["data"].items()}
    indexed = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each for each in manifests}
    assert len(indexed) == len(manifests)
    return indexed


def mark_as_release(manifest: Json) -> Json:
    """Return a kustomize object with what Helm adds to it: labels, and the annotation that keeps data."""
    marked = copy.deepcopy(manifest)
    marked["metadata"]["labels"] = marked["metadata"].get("labels", {}) | LABELS
    if marked["kind"] in KEPT:
        annotations = marked["metadata"].get("annotations", {}) | {"helm.sh/resource-policy": "keep"}
        marked["metadata"]["annotations"] = annotations
    return marked


def assert_same_objects(values: Json, manifests: list[Json]) -> None:
    chart, overlay = index(render_objects(values)), index([mark_as_release(each) for each in manifests])
    assert set(chart) == set(overlay)
    assert [key for key in chart if chart[key] != overlay[key]] == []


@each_overlay
def test_chart_renders_the_objects_of_the_overlay(overlay: str) -> None:
    assert_same_objects(read_values(overlay), render_overlay(overlay))


@each_overlay
def test_chart_renders_the_optional_components(overlay: str) -> None:
    values, optional = read_values(overlay), copy.deepcopy(OPTIONAL[overlay])
    values["teams"][0]["serving"] |= optional.pop("serving")
    assert_same_objects(values | optional | {"ingress": True, "gatewayApi": True}, render_with_optional(overlay))


@each_overlay
def test_values_have_the_images_of_the_platform(overlay: str) -> None:
    platform = yaml.safe_load((DEPLOY / "overlays" / overlay / "platform.yaml").read_text(encoding="utf-8"))
    images = read_values(overlay)["images"]
    for name in ("curation", "training", "serving"):
        assert images[name] == platform["images"][name]


def test_every_site_value_is_substituted_and_no_example_remains() -> None:
    """The overlays have some of the examples of the files as their values."""
    values = read_values("xe9680-powerscale") | {"ingress": True, "gatewayApi": True}
    site = {
        "apiServers": "10.1.0.0/28",
        "network": "10.2.0.0/24",
        "s3Endpoint": "https://s3.site.test:9021",
        "mlflowArtifacts": "s3://marked/artifacts",
        "mlflowHost": "mlflow.site.test",
        "servingHost": "models.site.test",
        "ingressClass": "marked-class",
        "clusterIssuer": "marked-issuer",
        "postgresql": "postgresql.site.test:5433",
        "databaseStorageClass": "marked-database",
        "backupStorageClass": "marked-backup",
        "dataRepository": "https://git.site.test/data.git",
        "user": 1000650000,  # OneFS and OpenShift assign such numbers, which a template prints as 1.00065e+09
        "group": 1000650001,
        "powerscale": "powerscale.site.test",
    }
    assert site.keys() == load_chart().values["site"].keys()
    values["site"] = site
    values["images"] = {name: f"registry.site.test/{name}:1" for name in values["images"]}
    values["teams"][0]["serving"]["model"] = "marked-model"
    values["trainer"] = {"runtime": "nvidia"}
    values["doctorUser"] = "doctor@site.test"
    text = yaml.safe_dump_all([each for each in render_objects(values) if not is_script(each)])
    markers = [*map(str, site.values()), *values["images"].values(), "marked-model", "doctor@site.test"]
    assert [marker for marker in markers if marker not in text] == []
    rest = text.replace("node.example/", "")  # a label, which is a value of this overlay
    assert (
        re.findall(r"\S*\.example\b\S*|192\.0\.2\.\S*|198\.51\.100\.\S*|tuneline-demo|\S*tuneline/python-\S*", rest)
        == []
    )


def is_script(manifest: Json) -> bool:
    """Return whether a manifest holds MLflow's scripts, which read the values from variables."""
    return manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"].startswith("mlflow-config")


def test_team_has_its_own_names_and_namespace() -> None:
    values = read_values("gaudi3-roce")
    values["teams"][0] |= {"name": "vision", "namespace": "team-vision"}
    manifests = render_objects(values)
    assert "team-a" not in yaml.safe_dump(manifests)
    by_key = index(manifests)
    assert ("Namespace", None, "team-vision") in by_key
    queue = by_key["LocalQueue", "team-vision", "vision"]
    assert by_key["ClusterQueue", None, queue["spec"]["clusterQueue"]]["spec"]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "team-vision"}
    }
    assert by_key["ConfigMap", "team-vision", "tuneline-place"]["data"]["MLFLOW_EXPERIMENT_NAME"] == "vision"


def test_namespace_may_contain_the_name_of_the_example() -> None:
    values = read_values("gaudi3-roce") | {"doctorUser": "doctor@site.test"}
    values["teams"][0] |= {"name": "vision", "namespace": "team-a-vision"}
    manifests = render_objects(values)
    namespaces = {each["metadata"]["namespace"] for each in manifests if "namespace" in each["metadata"]}
    assert namespaces == {"mlflow", "team-a-vision"}
    texts = [yaml.safe_dump(each, width=1000) for each in manifests]
    assert [text for text in texts if re.search(r"namespaces?[:=]\W*vision|team-a(?!-vision)", text)] == []


@pytest.mark.parametrize("values", [{}, *map(read_values, OVERLAYS)], ids=["defaults", *OVERLAYS])
def test_chart_passes_strict_lint(values: Json) -> None:
    report = helm_python.lint(CHART, values, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_default_values_render_valid_objects() -> None:
    core = [each for each in render_objects({}) if "." not in each["apiVersion"].partition("/")[0]]
    assert len(core) > 10
    assert {each["metadata"]["name"]: found for each in core if (found := kubernetes_schemas.problems(each))} == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mlflw": {}}, "additional properties 'mlflw' not allowed"),
        ({"site": {"user": 0}}, "at '/site/user'"),
        ({"site": {"network": "everywhere"}}, "at '/site/network'"),
        ({"site": {"dataRepository": "x}, {name: Y"}}, "at '/site/dataRepository'"),
        ({"images": {"serving": "no-tag"}}, "at '/images/serving'"),
        ({"teams": []}, "at '/teams': minItems"),
        ({"teams": [{"name": "a", "namespace": "a", "volume": {"kind": "nfs"}}]}, "at '/teams/0/volume"),
    ],
)
def test_schema_refuses_invalid_values(values: Json, message: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=message):
        load_chart().validate_schema(values)


@pytest.mark.parametrize("exposure", ["ingress", "gatewayApi"])
def test_second_serving_team_under_the_host_is_refused(exposure: str) -> None:
    values = read_values("xe9680-powerscale")
    values["teams"][1]["serving"] = values["teams"][0]["serving"]
    render_objects(values)
    with pytest.raises(
        helm_python.HelmError, match=r"2 teams have serving, but site\.servingHost is the host name of one team"
    ):
        render_objects(values | {exposure: True})


def test_notes_list_the_secrets_of_each_namespace() -> None:
    notes = render_chart(read_values("xe9680-powerscale"))["NOTES.txt"]
    for expected in (
        "mlflow-server, mlflow-s3, postgresql-tls",
        "team-a: mlflow, gateway-keys",
        "team-b: mlflow, registry",
    ):
        assert expected in notes


@each_overlay
def test_test_pod_is_valid_and_confined(overlay: str) -> None:
    values = read_values(overlay)
    values["site"] |= {"user": 1000650000}
    pod: Any = yaml.safe_load(render_chart(values)["tests/mlflow.yaml"])
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["namespace"] == team_namespace(overlay)
    pod["spec"] |= {"volumes": [], "initContainers": []}
    pod["spec"]["containers"][0]["volumeMounts"] = []
    assert kubernetes_schemas.problems(pod) == []
    assert pod_security.violations(pod) == []


def test_package_contains_the_files_behind_the_links(tmp_path: Path) -> None:
    package = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(package) as packaged:
        assert len(packaged.render({}, name="site", namespace="tuneline")) == len(render_chart({}))
        assert packaged.render({}, name="site")["tuneline/templates/mlflow.yaml"] == render_chart({})["mlflow.yaml"]
