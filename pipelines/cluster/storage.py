"""Claims and storage classes: whether they are there, are bound, and may be written from where the pods land."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.cluster import nodes
from pipelines.cluster.access import ForbiddenError, Json
from pipelines.cluster.look import Look
from pipelines.findings import Finding, finding, unchecked

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
MANY, ONE, ONE_POD, READ = "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"


def claims(look: Look) -> Iterator[Finding]:
    """The volume of all pods, which they write, and the further claims, which they may only read."""
    yield from _claim(look, look.platform.volume.claim, "volume.claim", written=True)
    for index, one in enumerate(look.platform.claims):
        yield from _claim(look, one.claim, f"claims[{index}].claim", written=False)


def _claim(look: Look, name: str, key: str, *, written: bool) -> Iterator[Finding]:
    found, title = look.get("persistentvolumeclaims", name), f"claim {name}"
    if found is None:
        hint = f"Make it ({look.kubectl('apply -f volume.yaml')}; deploy/components has two), or correct {key} in platform.yaml."
        yield finding(title, False, "it does not exist", hint)
    elif problem := _unusable(look, found):
        yield finding(title, False, *problem)
    else:
        yield _modes(look, found, title, written=written)


def _unusable(look: Look, claim: Json) -> tuple[str, str] | None:
    """Why a claim has no volume to mount, and what to do; None where it has one, or gets one with its first pod."""
    name, phase = claim["metadata"]["name"], claim.get("status", {}).get("phase", "Pending")
    if claim["metadata"].get("deletionTimestamp"):
        return (
            "it is being deleted",
            f"Wait until it is gone ({look.kubectl(f'get pvc {name} -w')}) and make it again, or name another claim.",
        )
    if phase == "Bound":
        return None
    if phase == "Lost":
        return "its volume is lost", f"Restore the PersistentVolume that it names: {look.kubectl(f'describe pvc {name}')}"
    return _pending(look, claim, name)


def _pending(look: Look, claim: Json, name: str) -> tuple[str, str] | None:
    chosen = claim["spec"].get("storageClassName")
    describe = look.kubectl(f"describe pvc {name}")
    if not chosen:
        return (
            "it is Pending: no PersistentVolume fits it",
            f"Make one of its size and modes, or give the claim a storage class: {describe}",
        )
    try:
        found = look.api.get(f"{CLASSES}/{chosen}")
    except ForbiddenError:
        return f"it is Pending, of storage class {chosen}, which may not be looked at", f"The reason is among its events: {describe}"
    if found is None:
        return (
            f"it is Pending: there is no storage class {chosen}",
            f"Make the claim again with one of `kubectl get storageclass`: {describe}",
        )
    if found.get("volumeBindingMode") == "WaitForFirstConsumer":
        return None
    return f"it is Pending: storage class {chosen} has not made its volume", f"The reason is among its events: {describe}"


def _modes(look: Look, claim: Json, title: str, *, written: bool) -> Finding:
    """Many pods on many nodes write the volume; a claim for one node will do where all pods land on one."""
    modes = claim.get("status", {}).get("accessModes") or claim["spec"].get("accessModes", [])
    held = claim.get("status", {}).get("capacity", {}).get("storage") or claim["spec"].get("resources", {}).get("requests", {}).get(
        "storage"
    )
    said = f"{', '.join(modes)}, {held or 'of unknown size'}, {claim.get('status', {}).get('phase', 'Pending')}"
    hint = f"Make a claim with accessModes: [{MANY}] (NFS, PowerScale, CephFS; deploy/components/powerscale-nfs/volume.yaml)"
    if MANY in modes or (READ in modes and not written):
        return finding(title, True, said, "")
    if ONE not in modes:
        why = "one pod at a time may mount it" if ONE_POD in modes else "the pods may not write it"
        return finding(title, False, f"{said}: {why}", f"{hint}.")
    return _on_one_node(look, title, said, hint)


def _on_one_node(look: Look, title: str, said: str, hint: str) -> Finding:
    try:
        places = nodes.reachable(look)
    except ForbiddenError as error:
        return unchecked(title, f"{said}, which one node may mount; on how many the pods may land is unknown: {error.message}", f"{hint}.")
    if len(places) <= 1:
        return finding(title, True, f"{said}, and all pods land on one node", "")
    return finding(
        title, False, f"{said}: one node may mount it, and the pods may land on {len(places)}",
        f"{hint}, or keep all pods on one node: scheduling.node_selector: {{kubernetes.io/hostname: NODE}} in platform.yaml.",
    )  # fmt: skip


def scratch_class(look: Look) -> Iterator[Finding]:
    """The storage class of the claims that are made for a pod."""
    chosen = look.platform.scratch.storage_class
    stages = [name for name, one in look.platform.resources if one.scratch]
    if not chosen or not stages:
        return
    found = look.api.get(f"{CLASSES}/{chosen}")
    hint = "In platform.yaml, scratch.storage_class wants one of `kubectl get storageclass`; empty, scratch is the node's own disk."
    yield finding(
        f"storage class {chosen}",
        found is not None,
        "it is there" if found else f"it does not exist, and {', '.join(stages)} want scratch of it",
        hint,
    )
