"""Strict validation of custom resources against their CustomResourceDefinitions: unknown fields and wrong types are errors.

`problems` uses the schemas in tests/common/crds, which are derived from the CRDs of kubeflow/trainer, ray-project/kuberay and
kubernetes-sigs/kueue (Apache-2.0, see the README there) without descriptions. Pod templates are plain objects in these schemas;
tests/kubernetes_schemas.py validates them as pods. `full_crd_problems` validates against the full CRDs in the folder TUNELINE_CRDS (*.yaml.gz).
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
OMITTED_KEYS = ("description", "default", "title", "x-kubernetes-validations")
POD_TEMPLATE_SCHEMA = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
    "additionalProperties": False,
}
POD_TEMPLATE_FIELDS = ("template", "submitterPodTemplate")  # fields of a RayJob that hold pod templates


def folder() -> Path | None:
    """Return the folder of the full CRDs, or None if it does not exist."""
    root = Path(__file__).resolve().parents[1]
    path = Path(os.environ.get("TUNELINE_CRDS") or root.parent / "shared" / "data" / "crds")
    return path if path.is_dir() else None


def problems(manifest: Json) -> list[str]:
    """Validate against the derived schema, and a RayJob's pods against the schemas of Kubernetes."""
    schema_path = DERIVED / f"{manifest['kind'].lower()}.json"
    errors = _validation_errors(json.loads(schema_path.read_text(encoding="utf-8")), manifest)
    return errors + [problem for pod in pods(manifest) for problem in kubernetes_schemas.problems(pod)]


def full_crd_problems(manifest: Json) -> list[str]:
    """Validate against the full CRD."""
    crd_folder = folder()
    assert crd_folder is not None
    return _validation_errors(_schema(crd_folder, manifest["kind"]), manifest)


def pods(manifest: Json) -> Iterator[Json]:
    """Yield a RayJob's pods with the empty lists that the API server adds."""
    cluster = manifest.get("spec", {}).get("rayClusterSpec") or {}
    for group in [cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", [])]:
        if group:
            template = group["template"]
            containers = [
                {"volumeMounts": [], "resources": {}, **container} for container in template["spec"]["containers"]
            ]
            spec = {"volumes": [], "initContainers": [], **template["spec"], "containers": containers}
            metadata = {"name": "pod", **template.get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _validation_errors(schema: Json, manifest: Json) -> list[str]:
    import jsonschema

    errors = []
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        path = [*map(str, error.absolute_path)]
        if error.validator == "additionalProperties" and error.validator_value is False:  # as the API server says it
            unknown = error.instance.keys() - error.schema.get("properties", {}).keys()
            errors += [f'unknown field "{".".join([*path, name])}"' for name in sorted(unknown)]
        else:
            errors.append(f"{'.'.join(path)}: {error.message}")
    return errors


@functools.cache
def _schema(crd_folder: Path, kind: str) -> Json:
    name, version = WHOLE[kind]
    with gzip.open(crd_folder / f"{name}.yaml.gz", "rt", encoding="utf-8") as file:
        (crd,) = [document for document in yaml.load_all(file, yaml.CSafeLoader) if document]
    (version_spec,) = [document for document in crd["spec"]["versions"] if document["name"] == version]
    return dict(_to_strict_schema(version_spec["schema"]["openAPIV3Schema"], top=True))


def _to_strict_schema(schema: Json, *, top: bool = False) -> Json:
    """Convert an OpenAPI schema to a JSON Schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {
        key: value
        for key, value in schema.items()
        if key not in OMITTED_KEYS and not key.startswith("x-kubernetes-") and key != "format"
    }
    if "properties" in schema:
        strict["properties"] = {name: _to_strict_schema(child) for name, child in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict[key] = _to_strict_schema(schema[key])
    if top:
        strict["properties"]["metadata"] = {"type": "object"}
    return strict


def derive(schema: Json) -> Json:
    """Remove unused parts of a schema: status, initializer and the pod templates, which are validated as pods."""
    derived = dict(schema)
    if "properties" in derived:
        properties = {
            name: child
            for name, child in derived["properties"].items()
            if name not in ("status", "initializer") or child.get("type") == "string"  # of a pod's condition
        }
        derived_properties = {
            name: POD_TEMPLATE_SCHEMA if name in POD_TEMPLATE_FIELDS and _is_pod_template(child) else derive(child)
            for name, child in properties.items()
        }
        derived["properties"] = derived_properties
    if isinstance(derived.get("items"), dict):
        derived["items"] = derive(derived["items"])
    return derived


def _is_pod_template(schema: Json) -> bool:
    spec = schema.get("properties", {}).get("spec", {}).get("properties", {})
    return "initContainers" in spec and "restartPolicy" in spec


if __name__ == "__main__":  # rewrites the derived schemas
    crd_folder = folder()
    if crd_folder is None:
        sys.exit("TUNELINE_CRDS names no folder")
    for kind in WHOLE:
        text = json.dumps(derive(_schema(crd_folder, kind)), separators=(",", ":"), sort_keys=True)
        (DERIVED / f"{kind.lower()}.json").write_text(text + "\n", encoding="utf-8")
