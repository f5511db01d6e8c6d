"""Check of one pod against the restricted Pod Security Standard.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/ (Baseline and Restricted, for Linux, Kubernetes 1.34). The
rules have the names of the controls there. The admission controller is part of the Kubernetes API server and not available here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(pod: Json) -> list[str]:
    """Return the violations of the restricted standard; empty if the pod conforms."""
    return [f"{control}: {violation}" for control, rule in CONTROLS.items() for violation in rule(pod)]


def containers(pod: Json) -> list[Json]:
    """Return all containers of a pod, including init and ephemeral containers."""
    return [c for kind in ("containers", "initContainers", "ephemeralContainers") for c in pod["spec"].get(kind, [])]


def _context(spec: Json) -> Json:
    return dict(spec.get("securityContext") or {})


def _contexts(pod: Json) -> Iterator[tuple[str, Json]]:
    yield "the pod", _context(pod["spec"])
    yield from ((c["name"], _context(c)) for c in containers(pod))


def _host_process(pod: Json) -> Iterator[str]:
    yield from (name for name, context in _contexts(pod) if context.get("windowsOptions", {}).get("hostProcess"))


def _host_namespaces(pod: Json) -> Iterator[str]:
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if pod["spec"].get(key))


def _privileged(pod: Json) -> Iterator[str]:
    yield from (name for name, context in _contexts(pod) if context.get("privileged"))


def _capabilities(pod: Json) -> Iterator[str]:
    """Restricted: ALL is dropped and only NET_BIND_SERVICE is added; this implies the baseline control."""
    for container in containers(pod):
        capabilities = _context(container).get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield f"{container['name']} does not drop ALL"
        yield from (
            f"{container['name']} adds {name}" for name in capabilities.get("add", []) if name != "NET_BIND_SERVICE"
        )


def _host_path(pod: Json) -> Iterator[str]:
    yield from (volume["name"] for volume in pod["spec"].get("volumes", []) if "hostPath" in volume)


def _host_ports(pod: Json) -> Iterator[str]:
    yield from (c["name"] for c in containers(pod) for port in c.get("ports", []) if port.get("hostPort"))


def _host_probes(pod: Json) -> Iterator[str]:
    for container in containers(pod):
        handlers = [container.get(key, {}) for key in ("livenessProbe", "readinessProbe", "startupProbe")]
        handlers += [container.get("lifecycle", {}).get(key, {}) for key in ("postStart", "preStop")]
        if any(handler.get(kind, {}).get("host") for handler in handlers for kind in ("httpGet", "tcpSocket")):
            yield container["name"]


def _app_armor(pod: Json) -> Iterator[str]:
    for name, context in _contexts(pod):
        if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
            yield name
    for key, value in (pod["metadata"].get("annotations") or {}).items():
        if key.startswith("container.apparmor.security.beta.kubernetes.io/") and not value.startswith(
            ("runtime/default", "localhost/")
        ):
            yield key


def _selinux(pod: Json) -> Iterator[str]:
    for name, context in _contexts(pod):
        options = context.get("seLinuxOptions", {})
        if options.get("type", "") not in SELINUX or options.get("user") or options.get("role"):
            yield name


def _proc_mount(pod: Json) -> Iterator[str]:
    yield from (name for name, context in _contexts(pod) if context.get("procMount", "Default") != "Default")


def _sysctls(pod: Json) -> Iterator[str]:
    yield from (sysctl["name"] for sysctl in _context(pod["spec"]).get("sysctls", []) if sysctl["name"] not in SYSCTLS)


def _volume_types(pod: Json) -> Iterator[str]:
    for volume in pod["spec"].get("volumes", []):
        yield from (f"{volume['name']} is a {kind}" for kind in volume.keys() - {"name"} - VOLUMES)


def _escalation(pod: Json) -> Iterator[str]:
    yield from (c["name"] for c in containers(pod) if _context(c).get("allowPrivilegeEscalation") is not False)


def _non_root(pod: Json) -> Iterator[str]:
    """Each container sets runAsNonRoot or inherits it from the pod."""
    pod_default = _context(pod["spec"]).get("runAsNonRoot")
    yield from (c["name"] for c in containers(pod) if _context(c).get("runAsNonRoot", pod_default) is not True)


def _non_root_user(pod: Json) -> Iterator[str]:
    yield from (name for name, context in _contexts(pod) if context.get("runAsUser") == 0)


def _seccomp(pod: Json) -> Iterator[str]:
    pod_default = _context(pod["spec"]).get("seccompProfile", {}).get("type")
    allowed = ("RuntimeDefault", "Localhost")
    if pod_default not in (None, *allowed):
        yield "the pod"
    yield from (
        c["name"]
        for c in containers(pod)
        if _context(c).get("seccompProfile", {}).get("type", pod_default) not in allowed
    )


CONTROLS: dict[str, Callable[[Json], Iterator[str]]] = {
    "Baseline, HostProcess": _host_process,
    "Baseline, Host Namespaces": _host_namespaces,
    "Baseline, Privileged Containers": _privileged,
    "Baseline and Restricted, Capabilities": _capabilities,
    "Baseline, HostPath Volumes": _host_path,
    "Baseline, Host Ports": _host_ports,
    "Baseline, Host Probes / Lifecycle Hooks": _host_probes,
    "Baseline, AppArmor": _app_armor,
    "Baseline, SELinux": _selinux,
    "Baseline, /proc Mount Type": _proc_mount,
    "Baseline, Sysctls": _sysctls,
    "Restricted, Volume Types": _volume_types,
    "Restricted, Privilege Escalation": _escalation,
    "Restricted, Running as Non-root": _non_root,
    "Restricted, Running as Non-root user": _non_root_user,
    "Baseline and Restricted, Seccomp": _seccomp,
}
