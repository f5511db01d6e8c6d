"""The input of the preflight checks: the cluster, the platform, and the resources that the pods request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, skipped_check
from pipelines.config.platform_config import Platform, Resources, Scheduling, StageResources
from pipelines.definition import pod_spec
from pipelines.kubeflow.preflight.cluster_api import ClusterApi, ForbiddenError, RefusedError
from pipelines.kubeflow.submission import KubeflowServer

RBAC_HINT = "Request the rights in deploy/components/doctor/doctor-rbac.yaml, or run the check as a user who has them."


@dataclass
class CheckContext:
    """A cluster and a platform. `is_multi_user`: a namespace was given, as a multi-user Kubeflow requires."""

    api: ClusterApi
    platform: Platform
    namespace: str
    is_multi_user: bool = False
    kubeflow: KubeflowServer | None = None
    user: str = ""
    failed: set[str] = field(default_factory=set)  # names of failed required checks; dependent checks are skipped

    @property
    def service_account(self) -> str:
        """The service account of the pods; by default, Kubeflow's own account."""
        return self.platform.run.service_account or ("default-editor" if self.is_multi_user else "pipeline-runner")

    def build_path(self, kind: str, name: str = "", group: str = "api/v1") -> str:
        """Return the API path of the namespace's objects of a kind, or of the object with this name.

        Args:
            kind: the plural resource name, such as "secrets".
            name: the object's name; default: all objects of the kind.
            group: path of the API group and version, such as "apis/kueue.x-k8s.io/v1beta1".
        """
        return f"/{group}/namespaces/{self.namespace}/{kind}{f'/{name}' if name else ''}"

    def get(self, kind: str, name: str, group: str = "api/v1") -> JsonObject | None:
        """Return an object of the namespace, or None if it does not exist."""
        return self.api.get(self.build_path(kind, name, group))

    def format_kubectl(self, arguments: str) -> str:
        """Return a kubectl command for the namespace."""
        return f"kubectl -n {self.namespace} {arguments}"


Check = Callable[[CheckContext], Iterable[CheckResult]]


def run_check(name: str, context: CheckContext, check: Check) -> Iterator[CheckResult]:
    """Yield a check's results, or one skipped result if the caller may not read the objects.

    Raises:
        EngineMissingError: the server does not answer.
    """
    try:
        yield from check(context)
    except (ForbiddenError, RefusedError) as error:
        yield skipped_check(name, error.message, RBAC_HINT)


@dataclass(frozen=True)
class PodDemand:
    """The resources and scheduling that the pods of some stages request."""

    stages: tuple[str, ...]
    resources: Resources
    scheduling: Scheduling

    @property
    def title(self) -> str:
        """The stages, as text."""
        return ", ".join(self.stages)

    @property
    def amounts(self) -> dict[str, str]:
        """The requests by resource name, as Kubernetes quantities."""
        amounts = {"cpu": self.resources.cpu, "memory": self.resources.memory or self.resources.memory_request}
        if self.resources.accelerator:
            amounts[self.resources.accelerator] = str(self.resources.accelerators)
        return {name: amount for name, amount in amounts.items() if amount}

    def format_key(self, name: str) -> str:
        """Return the key of platform.yaml that sets the request for a resource."""
        return f"resources.{self.stages[0]}.{name if name in ('cpu', 'memory') else 'accelerators'}"


def collect_demands(platform: Platform) -> list[PodDemand]:
    """Return the demands of all stages; stages with equal demands share a demand."""
    demands: dict[str, PodDemand] = {}
    for stage in StageResources.model_fields:
        resources: Resources = getattr(platform.resources, stage)
        scheduling = pod_spec.merge_scheduling(platform.scheduling, resources.scheduling)
        key = resources.model_copy(update={"scheduling": scheduling}).model_dump_json()
        stages = demands[key].stages if key in demands else ()
        demands[key] = PodDemand((*stages, stage), resources, scheduling)
    return list(demands.values())


def parse_amount(quantity: str | float) -> Decimal:
    """Return a Kubernetes quantity such as 500m or 16Gi as a number of cores, bytes or devices."""
    from kubernetes.utils import parse_quantity

    return Decimal(parse_quantity(quantity))


def format_amount(name: str, value: Decimal) -> str:
    """Return an amount of a resource as text; bytes in the largest binary unit, rounded down."""
    if name == "memory" or "storage" in name:
        for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20)):
            if value >= 1 << power:
                return f"{int(value / (1 << power))}{unit}"
        return str(int(value))
    text = f"{value:f}"
    return re.sub(r"\.?0+$", "", text) if "." in text else text
