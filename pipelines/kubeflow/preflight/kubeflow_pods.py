"""The pods that Kubeflow creates for a compiled pipeline, reimplemented because its services are not on PyPI.

Two parts of kubeflow/pipelines (at commit 00f7b52b28e0) build a pod: the API server's compiler and the driver.
"""

# The compiler creates the fields that every pod has (backend/src/v2/compiler/argocompiler: container.go
# addContainerExecutorTemplate, security_context.go applySecurityContextToExecutorTemplate). The driver adds the fields
# that the pipeline's two documents set (backend/src/v2/driver: driver.go initPodSpecPatch, k8s.go extendPodSpecPatch
# and makeVolumeMountPatch). Omitted: additions of an administrator to all pods (proxies, CA certificates, user ids, a
# workflow patch). Also omitted: the containers `init` and `wait` of Argo Workflows, which the installation defines.

from __future__ import annotations

import yaml

from components.common.launch import JsonObject
from components.common.launch.kubernetes.pod_scheduling import drop_empty

LAUNCHER_IMAGE = "ghcr.io/kubeflow/kfp-launcher:2.17.0"
LAUNCHER_PATH = "/kfp-launcher/launch"
LAUNCHER_RESOURCES = {"limits": {"memory": "256Mi", "cpu": "500m"}, "requests": {"memory": "128Mi", "cpu": "100m"}}
SCRATCH_VOLUMES = {
    "kfp-launcher": "/kfp-launcher",
    "gcs-scratch": "/gcs",
    "s3-scratch": "/s3",
    "minio-scratch": "/minio",
    "dot-local-scratch": "/.local",
    "dot-cache-scratch": "/.cache",
    "dot-config-scratch": "/.config",
}
METADATA_KEYS = ("labels", "annotations")
FIELD_VARIABLES = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid", "NAMESPACE": "metadata.namespace"}


def build_pods(compiled: str) -> dict[str, JsonObject]:
    """Return every pod of a compiled pipeline by step, as Argo Workflows sends the pod to the API server.

    Args:
        compiled: the YAML text of a compiled pipeline: the pipeline and its platform configuration.
    """
    pipeline, platform = yaml.safe_load_all(compiled)
    configs = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    pods: dict[str, JsonObject] = {}
    for executor, definition in pipeline["deploymentSpec"]["executors"].items():
        name, config = executor.removeprefix("exec-"), configs.get(executor, {})
        spec = _build_spec(definition["container"], config)
        _add_volumes(spec, spec["containers"][0], config)
        _add_pod_settings(spec, config)
        metadata = {key: value for key, value in config.get("podMetadata", {}).items() if key in METADATA_KEYS}
        pods[name] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
    return pods


def _build_spec(container: JsonObject, config: JsonObject) -> JsonObject:
    """Return the specification of a pod, whose init container copies the KFP launcher that runs the command."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    launcher = {
        "name": "kfp-launcher",
        "image": LAUNCHER_IMAGE,
        "command": ["launcher-v2", "--copy", LAUNCHER_PATH],
        "volumeMounts": [{"name": "kfp-launcher", "mountPath": SCRATCH_VOLUMES["kfp-launcher"]}],
        "resources": LAUNCHER_RESOURCES,
        "securityContext": {**restricted, "runAsNonRoot": True},
    }
    requested = container.get("resources", {})
    limits = {"cpu": requested.get("resourceCpuLimit"), "memory": requested.get("resourceMemoryLimit")}
    requests = {"cpu": requested.get("resourceCpuRequest"), "memory": requested.get("resourceMemoryRequest")}
    if accelerator := requested.get("accelerator"):
        limits[accelerator["resourceType"]] = accelerator["resourceCount"]
    variables = [
        *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in FIELD_VARIABLES.items()),
        *({"name": pair["name"], "value": pair["value"]} for pair in container.get("env", [])),
    ]
    for secret in config.get("secretAsEnv", []):
        optional = {"optional": secret["optional"]} if "optional" in secret else {}
        for pair in secret["keyToEnv"]:
            key = {"name": _get_name(secret, "secretName"), "key": pair["secretKey"], **optional}
            variables.append({"name": pair["envVar"], "valueFrom": {"secretKeyRef": key}})
    variables += [
        {"name": field["name"], "valueFrom": {"fieldRef": {"fieldPath": field["fieldPath"]}}}
        for field in config.get("fieldPathAsEnv", [])
    ]
    ids = {
        key: value if key == "runAsNonRoot" else int(value)
        for key, value in config.get("securityContext", {}).items()
        if key in ("runAsUser", "runAsGroup", "runAsNonRoot")
    }
    main = {
        "name": "main",
        "image": container["image"],
        "command": [LAUNCHER_PATH, "--", *container.get("command", [])],
        "args": list(container.get("args", [])),
        "envFrom": [{"configMapRef": {"name": "metadata-grpc-configmap", "optional": True}}],
        "env": variables,
        "resources": drop_empty({"limits": drop_empty(limits), "requests": drop_empty(requests)}),
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in SCRATCH_VOLUMES.items()],
        "securityContext": {**restricted, **ids},
        **drop_empty({"imagePullPolicy": config.get("imagePullPolicy")}),
    }
    return {
        "restartPolicy": "Never",
        "serviceAccountName": "pipeline-runner",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": key, "emptyDir": {}} for key in SCRATCH_VOLUMES],
        "initContainers": [launcher],
        "containers": [main],
    }


def _add_volumes(spec: JsonObject, main: JsonObject, config: JsonObject) -> None:
    """Add volumes in the driver's order, named after the claim, secret or config map."""
    for mount in config.get("pvcMount", []):
        claim = mount["pvcNameParameter"]["runtimeValue"]["constant"]
        sub_path = {"subPath": mount["subPath"]} if mount.get("subPath") else {}
        _mount(spec, main, claim, mount["mountPath"], {"persistentVolumeClaim": {"claimName": claim}}, **sub_path)
    for key, kind, name_key in (("secretAsVolume", "secret", "secretName"), ("configMapAsVolume", "configMap", "name")):
        for files in config.get(key, []):
            name = _get_name(files, f"{kind}Name")
            source = {kind: {name_key: name, "optional": files.get("optional", False)}}
            _mount(spec, main, name, files["mountPath"], source)
    for claim in config.get("genericEphemeralVolume", []):
        requested = {"accessModes": claim["accessModes"], "resources": {"requests": {"storage": claim["size"]}}}
        if not claim.get("defaultStorageClass"):
            requested["storageClassName"] = claim.get("storageClassName", "")
        template = {"metadata": claim.get("metadata", {}), "spec": requested}
        source = {"ephemeral": {"volumeClaimTemplate": template}}
        _mount(spec, main, claim["volumeName"], claim["mountPath"], source)
    for space in config.get("emptyDirMounts", []):
        source = {"emptyDir": drop_empty({key: space.get(key) for key in ("medium", "sizeLimit")})}
        _mount(spec, main, space["volumeName"], space["mountPath"], source)


def _mount(spec: JsonObject, main: JsonObject, name: str, path: str, source: JsonObject, **more: str) -> None:
    spec["volumes"].append({"name": name, **source})
    main["volumeMounts"].append({"name": name, "mountPath": path, **more})


def _get_name(reference: JsonObject, key: str) -> str:
    """Return a name; the parameter has precedence over the deprecated field, as in the driver."""
    parameter = reference.get(f"{key}Parameter")
    return str(parameter["runtimeValue"]["constant"] if parameter else reference[key])


def _add_pod_settings(spec: JsonObject, config: JsonObject) -> None:
    """Add pull secrets, node selector, tolerations, deadline and node affinity."""
    tolerations = []
    for given in config.get("tolerations", []):
        toleration = drop_empty({key: given.get(key) for key in ("key", "operator", "value", "effect")})
        if "tolerationSeconds" in given:
            toleration["tolerationSeconds"] = int(given["tolerationSeconds"])
        tolerations.append(toleration)
    required, preferred = [], []
    for term in config.get("nodeAffinity", []):
        expressions = {"matchExpressions": term["matchExpressions"]}
        if "weight" in term:
            preferred.append({"weight": int(term["weight"]), "preference": expressions})
        else:
            required.append(expressions)
    affinity = {
        "requiredDuringSchedulingIgnoredDuringExecution": drop_empty({"nodeSelectorTerms": required}),
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    spec |= drop_empty(
        {
            "imagePullSecrets": [
                {"name": _get_name(secret, "secretName")} for secret in config.get("imagePullSecret", [])
            ],
            "nodeSelector": config.get("nodeSelector", {}).get("labels"),
            "tolerations": tolerations,
            "activeDeadlineSeconds": max(0, int(config.get("activeDeadlineSeconds", 0))) or None,
            "affinity": drop_empty({"nodeAffinity": drop_empty(affinity)}),
        }
    )
