"""What the checks of a cluster look with, and what the pods of each stage ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pipelines import pods
from pipelines.cluster.access import Api, ForbiddenError, Json, RefusedError
from pipelines.findings import Finding, unchecked
from pipelines.platform import Platform, Resources, Scheduling, Stages
from pipelines.submitting import Server

RULES = "Ask for the rights in deploy/components/doctor/doctor-rbac.yaml, or have somebody look who has them."


@dataclass
class Look:
    """One look at a cluster for one platform. `shared` says that a namespace was named, as a Kubeflow with several users wants."""

    api: Api
    platform: Platform
    namespace: str
    shared: bool = False
    kubeflow: Server | None = None
    user: str = ""
    failed: set[str] = field(default_factory=set)  # names of the findings that stop a run, for what would only repeat them

    @property
    def account(self) -> str:
        """The service account of the pods; Kubeflow's own where none is named."""
        return self.platform.run.service_account or ("default-editor" if self.shared else "pipeline-runner")

    def path(self, kind: str, name: str = "", group: str = "api/v1") -> str:
        """Where the API server has the objects of a kind, or one of them, in the namespace."""
        return f"/{group}/namespaces/{self.namespace}/{kind}{f'/{name}' if name else ''}"

    def get(self, kind: str, name: str, group: str = "api/v1") -> Json | None:
        """An object of the namespace; None where it is not there."""
        return self.api.get(self.path(kind, name, group))

    def kubectl(self, words: str) -> str:
        """A command that acts in the namespace."""
        return f"kubectl -n {self.namespace} {words}"


Check = Callable[[Look], Iterable[Finding]]


def checked(name: str, look: Look, check: Check) -> Iterator[Finding]:
    """A check's findings; where the server does not let it look, that is one. Raises where the server does not answer any more."""
    try:
        yield from check(look)
    except (ForbiddenError, RefusedError) as error:
        yield unchecked(name, error.message, RULES)


@dataclass(frozen=True)
class Demand:
    """What the pods of some stages ask for."""

    stages: tuple[str, ...]
    resources: Resources
    scheduling: Scheduling

    @property
    def title(self) -> str:
        """The stages, as people read them."""
        return ", ".join(self.stages)

    @property
    def amounts(self) -> dict[str, str]:
        """Requests by resource name, as Kubernetes writes amounts."""
        wanted = self.resources
        found = {"cpu": wanted.cpu, "memory": wanted.memory}
        if wanted.accelerator:
            found[wanted.accelerator] = str(wanted.accelerators)
        return {name: amount for name, amount in found.items() if amount}

    def key(self, name: str) -> str:
        """The field of platform.yaml that asks for this resource."""
        field = name if name in ("cpu", "memory") else "accelerators"
        return f"resources.{self.stages[0]}.{field}"


def demands(platform: Platform) -> list[Demand]:
    """What each stage asks for; stages that ask for the same stand together."""
    found: dict[str, Demand] = {}
    for stage in Stages.model_fields:
        wanted: Resources = getattr(platform.resources, stage)
        scheduling = pods.merged(platform.scheduling, wanted.scheduling)
        key = wanted.model_copy(update={"scheduling": scheduling}).model_dump_json()
        before = found[key].stages if key in found else ()
        found[key] = Demand((*before, stage), wanted, scheduling)
    return list(found.values())


def amount(written: Any) -> Decimal:
    """An amount such as 500m or 16Gi as a number: cores, bytes or pieces."""
    from kubernetes.utils import parse_quantity

    return Decimal(parse_quantity(written))


def size(bytes_: Decimal) -> str:
    """Bytes as platform.yaml would write them, rounded down to what fits."""
    for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20)):
        if bytes_ >= 1 << power:
            return f"{int(bytes_ / (1 << power))}{unit}"
    return str(int(bytes_))


def told(name: str, value: Decimal) -> str:
    """An amount of a resource for people."""
    return (
        size(value)
        if name == "memory" or "storage" in name
        else re.sub(r"\.?0+$", "", f"{value:f}")
        if "." in f"{value:f}"
        else f"{value:f}"
    )
