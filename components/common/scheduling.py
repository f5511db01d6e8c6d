"""On which nodes of Kubernetes a pod may run, and which volumes it sees."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LABEL = (
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"  # what Kubernetes takes for a volume; Kubeflow names a volume after its claim, secret or map
)
MOUNT = r"^/[^:]*[^:/]$"


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Claim(Strict):
    """Another volume that pods see, for example raw data that belongs to another team."""

    claim: str = Field(pattern=LABEL, description="Name of an existing PersistentVolumeClaim.")
    mount: str = Field(pattern=MOUNT, description="Where the pods see it.")
    sub_path: str = Field("", pattern=r"^([^/:][^:]*)?$", description="Folder of the claim that is mounted. Empty: all of it.")


class Toleration(Strict):
    """A taint that the pods may be scheduled in spite of."""

    key: str = Field("", description="Key of the taint. Empty with operator Exists: every taint.")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="Equal compares the value, Exists does not.")
    value: str = Field("", description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="Effect tolerated. null: all.")
    seconds: int | None = Field(None, ge=0, description="How long a NoExecute taint is tolerated. null: for ever.")

    @model_validator(mode="after")
    def _without_key_all(self) -> Toleration:
        if not self.key and self.operator != "Exists":
            raise ValueError("a toleration without a key needs operator Exists")
        return self


class NodeAffinity(Strict):
    """A condition on a node's labels. All that have no weight must hold; one with a weight is a preference."""

    key: str = Field(min_length=1, description="The label, for example nvidia.com/gpu.product.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field("In", description="How the label is compared.")
    values: list[str] = Field([], description="What with: several for In and NotIn, one whole number for Gt and Lt, none for the others.")
    weight: int | None = Field(None, ge=1, le=100, description="How much the scheduler prefers such a node. null: it must be one.")

    @model_validator(mode="after")
    def _values_fit(self) -> NodeAffinity:
        wanted = {"In": "at least one value", "NotIn": "at least one value", "Gt": "one whole number", "Lt": "one whole number"}
        number = len(self.values) == 1 and re.fullmatch(r"-?\d+", self.values[0])
        fits = number if self.operator in ("Gt", "Lt") else bool(self.values) == (self.operator in wanted)
        if not fits:
            raise ValueError(f"operator {self.operator} wants {wanted.get(self.operator, 'no values')}")
        return self


def tolerations(said: list[Toleration]) -> list[dict[str, Any]]:
    """A pod's `tolerations`."""
    return [_without_nothing({**one.model_dump(exclude={"seconds"}), "tolerationSeconds": one.seconds}) for one in said]


def affinity(said: list[NodeAffinity]) -> dict[str, Any]:
    """A pod's `affinity`; empty: none. Kubernetes wants one of several required terms to hold, and every expression within a term: so what
    must hold is one term."""
    required = [_expression(one) for one in said if one.weight is None]
    preferred = [{"weight": one.weight, "preference": {"matchExpressions": [_expression(one)]}} for one in said if one.weight is not None]
    terms = {"nodeSelectorTerms": [{"matchExpressions": required}]} if required else None
    found = {"requiredDuringSchedulingIgnoredDuringExecution": terms, "preferredDuringSchedulingIgnoredDuringExecution": preferred}
    nodes = _without_nothing(found)
    return {"nodeAffinity": nodes} if nodes else {}


def _expression(one: NodeAffinity) -> dict[str, Any]:
    return _without_nothing({"key": one.key, "operator": one.operator, "values": one.values})


def _without_nothing(said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if value not in (None, "", [], {})}
