"""Checks of volume claims and storage classes: existence, binding, and access modes for the nodes of the pods."""

from __future__ import annotations

from collections.abc import Iterator

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from pipelines.kubeflow.preflight import node_checks
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError

STORAGE_CLASSES_PATH = "/apis/storage.k8s.io/v1/storageclasses"
READ_WRITE_MANY, READ_ONLY_MANY = "ReadWriteMany", "ReadOnlyMany"
READ_WRITE_ONCE, READ_WRITE_ONCE_POD = "ReadWriteOnce", "ReadWriteOncePod"


def check_claims(context: CheckContext) -> Iterator[CheckResult]:
    """Check the shared volume, which must be writable, and the additional claims, which may be read-only."""
    platform = context.platform
    yield _check_claim(context, platform.volume.claim, "volume.claim", is_written=True)
    for index, claim in enumerate(platform.claims):
        yield _check_claim(context, claim.claim, f"claims[{index}].claim", is_written=False)


def _check_claim(context: CheckContext, name: str, key: str, *, is_written: bool) -> CheckResult:
    claim, title = context.get("persistentvolumeclaims", name), f"claim {name}"
    if claim is None:
        apply = context.format_kubectl("apply -f volume.yaml")
        hint = f"Create the claim ({apply}; deploy/components has two examples), or correct {key} in platform.yaml."
        return check_result(title, False, "does not exist", hint)
    if problem := _find_binding_problem(context, claim):
        return check_result(title, False, *problem)
    # Pods on several nodes write to the volume; ReadWriteOnce suffices only if all pods run on one node.
    status, spec = claim.get("status", {}), claim["spec"]
    modes = status.get("accessModes") or spec.get("accessModes", [])
    requested = spec.get("resources", {}).get("requests", {})
    size = status.get("capacity", {}).get("storage") or requested.get("storage")
    found = f"{', '.join(modes)}, {size or 'of unknown size'}, {status.get('phase', 'Pending')}"
    example = "NFS, PowerScale, CephFS; deploy/components/powerscale-nfs/volume.yaml"
    hint = f"Create a claim with accessModes: [{READ_WRITE_MANY}] ({example})"
    if READ_WRITE_MANY in modes or (READ_ONLY_MANY in modes and not is_written):
        return check_result(title, True, found, "")
    if READ_WRITE_ONCE not in modes:
        problem_text = (
            "only one pod at a time can mount it" if READ_WRITE_ONCE_POD in modes else "the pods cannot write to it"
        )
        return check_result(title, False, f"{found}: {problem_text}", f"{hint}.")
    try:
        nodes = node_checks.list_reachable_nodes(context)
    except ForbiddenError as error:
        unknown = f"{found}, for a single node; the number of nodes on which the pods run is unknown: {error.message}"
        return skipped_check(title, unknown, f"{hint}.")
    if len(nodes) <= 1:
        return check_result(title, True, f"{found}, and all pods run on one node", "")
    selector = "scheduling.node_selector: {kubernetes.io/hostname: NODE}"
    return check_result(
        title,
        False,
        f"{found}: only one node can mount it, and the pods may run on {len(nodes)} nodes",
        f"{hint}, or run all pods on one node: {selector} in platform.yaml.",
    )


def _find_binding_problem(context: CheckContext, claim: JsonObject) -> tuple[str, str] | None:
    """Return the reason why a claim is not bound and its first pod would not bind it, and a hint."""
    name, phase = claim["metadata"]["name"], claim.get("status", {}).get("phase", "Pending")
    describe = context.format_kubectl(f"describe pvc {name}")
    if claim["metadata"].get("deletionTimestamp"):
        wait = context.format_kubectl(f"get pvc {name} -w")
        return (
            "being deleted",
            f"Create the claim again after its deletion ({wait}), or choose another claim.",
        )
    if phase == "Bound":
        return None
    if phase == "Lost":
        return "the volume is lost", f"Restore the PersistentVolume of the claim: {describe}"
    storage_class = claim["spec"].get("storageClassName")
    if not storage_class:
        hint = f"Create a PersistentVolume with the claim's size and access modes, or set a storage class: {describe}"
        return "Pending: no PersistentVolume matches", hint
    hint = f"Find the reason in the events of the claim: {describe}"
    try:
        found = context.api.get(f"{STORAGE_CLASSES_PATH}/{storage_class}")
    except ForbiddenError:
        return f"Pending; the caller may not read the storage class {storage_class}", hint
    if found is None:
        hint = f"Create the claim again with a class from `kubectl get storageclass`: {describe}"
        return f"Pending: the storage class {storage_class} does not exist", hint
    if found.get("volumeBindingMode") == "WaitForFirstConsumer":
        return None
    return f"Pending: storage class {storage_class} has not created the volume", hint


def check_scratch_class(context: CheckContext) -> Iterator[CheckResult]:
    """Check the storage class of the pods' scratch volumes."""
    storage_class = context.platform.scratch.storage_class
    stages = [name for name, resources in context.platform.resources if resources.scratch]
    if not storage_class or not stages:
        return
    exists = context.api.get(f"{STORAGE_CLASSES_PATH}/{storage_class}") is not None
    found = "exists" if exists else f"does not exist, and {', '.join(stages)} request scratch volumes of this class"
    hint = (
        "Set scratch.storage_class in platform.yaml to a class from `kubectl get storageclass`, "
        "or to an empty value for scratch on the node's disk."
    )
    yield check_result(f"storage class {storage_class}", exists, found, hint)
