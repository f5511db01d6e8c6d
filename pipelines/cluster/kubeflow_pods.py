"""The pods that Kubeflow makes of a compiled pipeline: none of its services is on PyPI, so what they do is written out here.

Two parts of kubeflow/pipelines (here at commit 00f7b52b28e0) make a pod. The API server's compiler lays out what every pod has
(backend/src/v2/compiler/argocompiler: container.go addContainerExecutorTemplate, security_context.go
applySecurityContextToExecutorTemplate); the driver adds what the pipeline's two documents say (backend/src/v2/driver: driver.go
initPodSpecPatch, k8s.go extendPodSpecPatch and makeVolumeMountPatch).
What an administrator may add to all pods (proxies, authorities, user ids, a patch of the workflow) is left out, and so are the containers
`init` and `wait` of Argo Workflows, which the installation defines and no pipeline changes.
"""

from __future__ import annotations

from typing import Any

import yaml

Json = dict[str, Any]
LAUNCHER = "ghcr.io/kubeflow/kfp-launcher:2.17.0"
LAUNCHER_PATH = "/kfp-launcher/launch"
LAUNCHER_RESOURCES = {"limits": {"memory": "256Mi", "cpu": "500m"}, "requests": {"memory": "128Mi", "cpu": "100m"}}
SPACES = {
    "kfp-launcher": "/kfp-launcher",
    "gcs-scratch": "/gcs",
    "s3-scratch": "/s3",
    "minio-scratch": "/minio",
    "dot-local-scratch": "/.local",
    "dot-cache-scratch": "/.cache",
    "dot-config-scratch": "/.config",
}
FIELDS = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid", "NAMESPACE": "metadata.namespace"}


def pods(compiled: str) -> dict[str, Json]:
    """Every pod of a compiled pipeline by its task's executor, as Argo Workflows sends it to the API server of Kubernetes."""
    pipeline, platform = yaml.safe_load_all(compiled)
    configs = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    executors = pipeline["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): _pod(name, executors[name]["container"], configs.get(name, {})) for name in executors}


def _pod(name: str, container: Json, config: Json) -> Json:
    pod = _laid_out(name, container)
    main = pod["spec"]["containers"][0]
    _volumes(pod["spec"], main, config)
    _variables(main, config)
    _pulling(pod["spec"], main, config)
    _scheduling(pod["spec"], config)
    _identity(main, config)
    metadata = config.get("podMetadata", {})
    pod["metadata"] |= {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    return pod


def _laid_out(name: str, container: Json) -> Json:
    """What every pod has: the launcher is copied in, and runs the component's command."""
    safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}
    copied = {"name": "kfp-launcher", "mountPath": SPACES["kfp-launcher"]}
    launcher = {
        "name": "kfp-launcher",
        "image": LAUNCHER,
        "command": ["launcher-v2", "--copy", LAUNCHER_PATH],
        "volumeMounts": [copied],
        "resources": LAUNCHER_RESOURCES,
        "securityContext": {**safe, "runAsNonRoot": True},
    }
    main = {
        "name": "main",
        "image": container["image"],
        "command": [LAUNCHER_PATH, "--", *container.get("command", [])],
        "args": list(container.get("args", [])),
        "envFrom": [{"configMapRef": {"name": "metadata-grpc-configmap", "optional": True}}],
        "env": [
            *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in FIELDS.items()),
            *({"name": pair["name"], "value": pair["value"]} for pair in container.get("env", [])),
        ],
        "resources": _resources(container.get("resources", {})),
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in SPACES.items()],
        "securityContext": dict(safe),
    }
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": "pipeline-runner",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": key, "emptyDir": {}} for key in SPACES],
        "initContainers": [launcher],
        "containers": [main],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.removeprefix("exec-")}, "spec": spec}


def _resources(wanted: Json) -> Json:
    said = {
        "limits": {"cpu": wanted.get("resourceCpuLimit"), "memory": wanted.get("resourceMemoryLimit")},
        "requests": {"cpu": wanted.get("resourceCpuRequest"), "memory": wanted.get("resourceMemoryRequest")},
    }
    accelerator = wanted.get("accelerator")
    if accelerator:
        said["limits"][accelerator["resourceType"]] = accelerator["resourceCount"]
    found = {kind: {key: value for key, value in values.items() if value} for kind, values in said.items()}
    return {kind: values for kind, values in found.items() if values}


def _volumes(spec: Json, main: Json, config: Json) -> None:
    """In the driver's order. A volume is named after the claim, secret or config map that it holds."""
    for mount in config.get("pvcMount", []):
        claim = mount["pvcNameParameter"]["runtimeValue"]["constant"]
        sub_path = {"subPath": mount["subPath"]} if mount.get("subPath") else {}
        _mount(spec, main, claim, mount["mountPath"], {"persistentVolumeClaim": {"claimName": claim}}, **sub_path)
    for secret in config.get("secretAsVolume", []):
        name, optional = _name(secret, "secretName"), secret.get("optional", False)
        _mount(spec, main, name, secret["mountPath"], {"secret": {"secretName": name, "optional": optional}})
    for config_map in config.get("configMapAsVolume", []):
        name, optional = _name(config_map, "configMapName"), config_map.get("optional", False)
        _mount(spec, main, name, config_map["mountPath"], {"configMap": {"name": name, "optional": optional}})
    for claim in config.get("genericEphemeralVolume", []):
        _mount(spec, main, claim["volumeName"], claim["mountPath"], _ephemeral(claim))
    for space in config.get("emptyDirMounts", []):
        given = {"medium": space.get("medium"), "sizeLimit": space.get("sizeLimit")}
        _mount(spec, main, space["volumeName"], space["mountPath"], {"emptyDir": {key: value for key, value in given.items() if value}})


def _mount(spec: Json, main: Json, name: str, path: str, source: Json, **more: str) -> None:
    spec["volumes"].append({"name": name, **source})
    main["volumeMounts"].append({"name": name, "mountPath": path, **more})


def _ephemeral(claim: Json) -> Json:
    wanted: Json = {"accessModes": claim["accessModes"], "resources": {"requests": {"storage": claim["size"]}}}
    if not claim.get("defaultStorageClass"):
        wanted["storageClassName"] = claim.get("storageClassName", "")
    return {"ephemeral": {"volumeClaimTemplate": {"metadata": claim.get("metadata", {}), "spec": wanted}}}


def _name(said: Json, key: str) -> str:
    """The parameter wins over the deprecated field, as in the driver."""
    parameter = said.get(f"{key}Parameter")
    return str(parameter["runtimeValue"]["constant"] if parameter else said[key])


def _variables(main: Json, config: Json) -> None:
    for secret in config.get("secretAsEnv", []):
        for pair in secret["keyToEnv"]:
            key = {"name": _name(secret, "secretName"), "key": pair["secretKey"]}
            if "optional" in secret:
                key["optional"] = secret["optional"]
            main["env"].append({"name": pair["envVar"], "valueFrom": {"secretKeyRef": key}})
    for field in config.get("fieldPathAsEnv", []):
        main["env"].append({"name": field["name"], "valueFrom": {"fieldRef": {"fieldPath": field["fieldPath"]}}})


def _pulling(spec: Json, main: Json, config: Json) -> None:
    if config.get("imagePullPolicy"):
        main["imagePullPolicy"] = config["imagePullPolicy"]
    if config.get("imagePullSecret"):
        spec["imagePullSecrets"] = [{"name": _name(secret, "secretName")} for secret in config["imagePullSecret"]]


def _scheduling(spec: Json, config: Json) -> None:
    if config.get("nodeSelector", {}).get("labels"):
        spec["nodeSelector"] = config["nodeSelector"]["labels"]
    if config.get("tolerations"):
        spec["tolerations"] = [_toleration(one) for one in config["tolerations"]]
    if int(config.get("activeDeadlineSeconds", 0)) > 0:
        spec["activeDeadlineSeconds"] = int(config["activeDeadlineSeconds"])
    terms = config.get("nodeAffinity", [])
    required = [{"matchExpressions": term["matchExpressions"]} for term in terms if "weight" not in term]
    preferred = [{"weight": int(t["weight"]), "preference": {"matchExpressions": t["matchExpressions"]}} for t in terms if "weight" in t]
    affinity: Json = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": required}} if required else {}
    if preferred:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    if affinity:
        spec["affinity"] = {"nodeAffinity": affinity}


def _toleration(one: Json) -> Json:
    seconds = {"tolerationSeconds": int(one["tolerationSeconds"])} if "tolerationSeconds" in one else {}
    return {key: one[key] for key in ("key", "operator", "value", "effect") if one.get(key)} | seconds


def _identity(main: Json, config: Json) -> None:
    """Where nothing is said the image decides; all capabilities are dropped either way."""
    for key in ("runAsUser", "runAsGroup"):
        if key in config.get("securityContext", {}):
            main["securityContext"][key] = int(config["securityContext"][key])
    if "runAsNonRoot" in config.get("securityContext", {}):
        main["securityContext"]["runAsNonRoot"] = config["securityContext"]["runAsNonRoot"]
