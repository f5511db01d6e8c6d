"""docs/examples/kserve.yaml and kserve-s3.yaml: fields of KServe, pods that Kubernetes accepts, and the settings of deploy/. It was not run on KServe."""

from __future__ import annotations

from typing import Any

import yaml

from tests import kubernetes_schemas, pod_security
from tests.deploy.rendering import render_overlay, select_kind
from tests.deploy.test_objects import collect_fields
from tests.pipelines.command import ROOT

Json = dict[str, Any]
# kserve/kserve, commit aaac4e294dae, config/crd/full/serving.kserve.io_servingruntimes.yaml, without the containers, which are Kubernetes'
RUNTIME_FIELDS = {"supportedModelFormats.name", "supportedModelFormats.version"}
# the same, serving.kserve.io_inferenceservices.yaml
SERVICE_FIELDS = {
    "predictor.minReplicas",
    "predictor.automountServiceAccountToken",
    "predictor.terminationGracePeriodSeconds",
    *(f"predictor.model.{name}" for name in ("modelFormat.name", "modelFormat.version", "runtime", "storageUri")),
}
# the same, pkg/constants/constants.go
ANNOTATIONS = {
    "serving.kserve.io/deploymentMode": {"Standard", "Knative"},
    "serving.kserve.io/autoscalerClass": {"hpa", "keda", "external", "none"},
}


def load_manifests() -> tuple[Json, Json]:
    text = (ROOT / "docs" / "examples" / "kserve.yaml").read_text(encoding="utf-8")
    runtime, service = yaml.safe_load_all(text)
    return runtime, service


def build_pod() -> Json:
    """Return the pod of the runtime, with the empty lists that the API server adds and without what KServe adds."""
    runtime, service = load_manifests()
    predictor = service["spec"]["predictor"]
    spec = {name: runtime["spec"][name] for name in ("containers", "volumes")}
    pod_fields = ("automountServiceAccountToken", "terminationGracePeriodSeconds")
    spec |= {name: predictor[name] for name in pod_fields} | {"initContainers": []}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def test_objects_have_only_fields_of_kserve() -> None:
    runtime, service = load_manifests()
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    own = {name: value for name, value in runtime["spec"].items() if name not in ("containers", "volumes")}
    assert collect_fields(own) == RUNTIME_FIELDS
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert collect_fields(service["spec"]) == SERVICE_FIELDS
    for name, value in service["metadata"]["annotations"].items():
        assert value in ANNOTATIONS[name]


def test_service_of_a_bucket_differs_in_its_storage_and_account_only() -> None:
    account, service = yaml.safe_load_all((ROOT / "docs" / "examples" / "kserve-s3.yaml").read_text(encoding="utf-8"))
    assert kubernetes_schemas.problems(account) == []
    assert account["secrets"] == [{"name": account["metadata"]["name"]}]
    assert service["spec"]["predictor"].pop("serviceAccountName") == account["metadata"]["name"]
    _, of_the_claim = load_manifests()
    storages = [each["spec"]["predictor"]["model"].pop("storageUri") for each in (of_the_claim, service)]
    assert [storage.partition("://")[0] for storage in storages] == ["pvc", "s3"]
    for part in ("apiVersion", "kind", "spec"):
        assert service[part] == of_the_claim[part]
    assert service["metadata"]["annotations"] == of_the_claim["metadata"]["annotations"]


def test_service_uses_the_runtime_and_its_format() -> None:
    runtime, service = load_manifests()
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"] in runtime["spec"]["supportedModelFormats"]
    first, *_ = runtime["spec"]["containers"]
    assert first["name"] == "kserve-container"


def test_pod_is_valid_and_passes_the_restricted_standard() -> None:
    pod = build_pod()
    assert kubernetes_schemas.problems(pod) == []
    assert pod_security.violations(pod) == []


def test_containers_have_the_settings_of_deploy() -> None:
    deployed = select_kind(render_overlay("xe9680-powerscale"), "Deployment", "team-a")["triton"]
    containers = {each["name"]: each for each in deployed["spec"]["template"]["spec"]["containers"]}
    triton, gateway = build_pod()["spec"]["containers"]
    # KServe mounts the package in the first container only: the gateway has no chat templates of vLLM packages.
    assert gateway["args"] == [each for each in containers["gateway"]["args"] if not each.startswith("--repository=")]
    assert triton["ports"][0]["containerPort"] == containers["gateway"]["ports"][0]["containerPort"]
    own = {"--model-repository=/mnt/models", "--load-model=tuneline", "--load-model=tuneline_stream"}
    same = set(containers["triton"]["args"]) - {"--model-repository=/serving/repository", "--exit-on-error=false"}
    assert set(triton["args"]) == same | own
    volumes = {volume["name"]: volume for volume in deployed["spec"]["template"]["spec"]["volumes"]}
    assert all(volumes[volume["name"]] == volume for volume in build_pod()["spec"]["volumes"])
