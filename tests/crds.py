"""Is a custom resource one that its CustomResourceDefinition takes? Strictly: an unknown field is refused, and a wrong type.

tests/common/crds holds the schemas, derived from the CRDs of kubeflow/trainer, ray-project/kuberay and kubernetes-sigs/kueue (Apache-2.0,
see there) without their descriptions; pod templates are objects there, and are checked as pods by tests/kubernetes_schemas.py and against
the schemas of kubernetes-validate. Where TUNELINE_CRDS names a folder with the whole CRDs (*.yaml.gz), `whole` is the same check against
them.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import kubernetes_schemas

Json = dict[str, Any]
DERIVED = Path(__file__).parent / "common" / "crds"
WHOLE = {
    "TrainJob": ("trainer.kubeflow.org_trainjobs", "v1alpha1"),
    "RayJob": ("ray.io_rayjobs", "v1"),
    "ClusterTrainingRuntime": ("trainer.kubeflow.org_clustertrainingruntimes", "v1alpha1"),
    "ClusterQueue": ("kueue.x-k8s.io_clusterqueues", "v1beta2"),
    "LocalQueue": ("kueue.x-k8s.io_localqueues", "v1beta2"),
    "ResourceFlavor": ("kueue.x-k8s.io_resourceflavors", "v1beta2"),
    "WorkloadPriorityClass": ("kueue.x-k8s.io_workloadpriorityclasses", "v1beta2"),
}
LEFT_OUT = ("description", "default", "title", "x-kubernetes-validations")
TEMPLATE = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}}, "additionalProperties": False}
TEMPLATES = ("template", "submitterPodTemplate")  # of pods, in a RayJob


def folder() -> Path | None:
    """Where the whole CRDs are."""
    root = Path(__file__).resolve().parents[1]
    named = Path(os.environ.get("TUNELINE_CRDS") or root.parent / "shared" / "data" / "crds")
    return named if named.is_dir() else None


def problems(thing: Json) -> list[str]:
    """What the derived schema finds wrong, and in a RayJob's pods the schemas of Kubernetes."""
    path = DERIVED / f"{thing['kind'].lower()}.json"
    found = _problems(json.loads(path.read_text(encoding="utf-8")), thing)
    return found + [problem for pod in pods(thing) for problem in kubernetes_schemas.problems(pod)]


def whole(thing: Json) -> list[str]:
    """What the whole CRD finds wrong."""
    place = folder()
    assert place is not None
    return _problems(_schema(place, thing["kind"]), thing)


def pods(thing: Json) -> Iterator[Json]:
    """A RayJob's pods, with the lists that the API server adds where they are missing."""
    cluster = thing.get("spec", {}).get("rayClusterSpec") or {}
    for group in [cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", [])]:
        if group:
            template = group["template"]
            containers = [{"volumeMounts": [], "resources": {}, **one} for one in template["spec"]["containers"]]
            spec = {"volumes": [], "initContainers": [], **template["spec"], "containers": containers}
            metadata = {"name": "pod", **template.get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _problems(schema: Json, thing: Json) -> list[str]:
    import jsonschema

    found = jsonschema.Draft202012Validator(schema).iter_errors(thing)
    return [f"{'.'.join(map(str, problem.absolute_path))}: {problem.message}" for problem in found]


@functools.cache
def _schema(place: Path, kind: str) -> Json:
    name, version = WHOLE[kind]
    with gzip.open(place / f"{name}.yaml.gz", "rt", encoding="utf-8") as file:
        (crd,) = [one for one in yaml.load_all(file, yaml.CSafeLoader) if one]
    (chosen,) = [one for one in crd["spec"]["versions"] if one["name"] == version]
    return dict(_strict(chosen["schema"]["openAPIV3Schema"], top=True))


def _strict(schema: Json, *, top: bool = False) -> Json:
    """As JSON Schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: value for key, value in schema.items() if key not in LEFT_OUT and not key.startswith("x-kubernetes-") and key != "format"}
    if "properties" in schema:
        found["properties"] = {name: _strict(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = _strict(schema[key])
    if top:
        found["properties"]["metadata"] = {"type": "object"}
    return found


def derive(schema: Json) -> Json:
    """Without what is not used here: a status, and the pod templates of a RayJob or a runtime, which are checked as pods."""
    found = dict(schema)
    if "properties" in found:
        kept = {name: one for name, one in found["properties"].items() if name not in ("status", "initializer")}
        shortened = {name: TEMPLATE if name in TEMPLATES and _is_a_pods(one) else derive(one) for name, one in kept.items()}
        found["properties"] = shortened
    if isinstance(found.get("items"), dict):
        found["items"] = derive(found["items"])
    return found


def _is_a_pods(schema: Json) -> bool:
    spec = schema.get("properties", {}).get("spec", {}).get("properties", {})
    return "initContainers" in spec and "restartPolicy" in spec


if __name__ == "__main__":  # writes the derived schemas anew
    where = folder()
    if where is None:
        sys.exit("TUNELINE_CRDS names no folder")
    for kind in WHOLE:
        text = json.dumps(derive(_schema(where, kind)), separators=(",", ":"), sort_keys=True)
        (DERIVED / f"{kind.lower()}.json").write_text(text + "\n", encoding="utf-8")
