"""Tolerations, node affinity and additional volume claims of Kubernetes pods."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

JsonObject = dict[str, Any]
# Kubernetes' pattern of a volume name. Kubeflow names a volume after its claim, secret or config map.
VOLUME_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
MOUNT_PATH_PATTERN = r"^/[^:]*[^:/]$"
SUB_PATH_PATTERN = r"^([^/:][^:]*)?$"


class StrictModel(BaseModel):
    """A model that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Claim(StrictModel):
    """An additional volume of the pods, for example raw data of another team."""

    claim: str = Field(pattern=VOLUME_NAME_PATTERN, description="Name of an existing PersistentVolumeClaim.")
    mount: str = Field(pattern=MOUNT_PATH_PATTERN, description="Mount path in the pods.")
    sub_path: str = Field(
        "", pattern=SUB_PATH_PATTERN, description="Folder of the claim to mount. Empty: the whole claim."
    )


class Toleration(StrictModel):
    """A toleration of node taints."""

    key: str = Field("", description="Key of the taint. Empty: every taint; requires operator Exists.")
    operator: Literal["Equal", "Exists"] = Field(
        "Equal", description="Equal: compare key and value. Exists: compare the key only."
    )
    value: str = Field("", description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Taint effect to tolerate. null: all effects."
    )
    seconds: int | None = Field(
        None, ge=0, description="Toleration period of a NoExecute taint in seconds. null: no limit."
    )

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if not self.key and self.operator != "Exists":
            raise ValueError("key is empty; expected a key, or operator Exists")
        return self


class NodeAffinity(StrictModel):
    """A condition on a node's labels: required, or preferred if it has a weight."""

    key: str = Field(min_length=1, description="Label, for example nvidia.com/gpu.product.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(
        "In", description="Operator that compares the label with `values`."
    )
    values: list[str] = Field(
        [], description="Operands. In, NotIn: at least one value; Gt, Lt: one integer; Exists, DoesNotExist: no values."
    )
    weight: int | None = Field(
        None, ge=1, le=100, description="Weight of the preference. null: the condition is required."
    )

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.operator in ("Gt", "Lt"):
            valid, expected = bool(re.fullmatch(r"-?\d+", " ".join(self.values))), "one integer"
        elif self.operator in ("In", "NotIn"):
            valid, expected = bool(self.values), "at least one value"
        else:
            valid, expected = not self.values, "no values"
        if not valid:
            raise ValueError(f"values is {self.values}; operator {self.operator} expects {expected}")
        return self


def build_tolerations(tolerations: list[Toleration]) -> list[JsonObject]:
    """Return a pod's `tolerations`."""
    return [
        drop_empty({**toleration.model_dump(exclude={"seconds"}), "tolerationSeconds": toleration.seconds})
        for toleration in tolerations
    ]


def build_affinity(conditions: list[NodeAffinity]) -> JsonObject:
    """Return a pod's `affinity`; empty if there are no conditions.

    All required conditions form one term: Kubernetes joins terms by OR and the expressions of a term by AND.
    """
    required, preferred = [], []
    for condition in conditions:
        expression = drop_empty({"key": condition.key, "operator": condition.operator, "values": condition.values})
        if condition.weight is None:
            required.append(expression)
        else:
            preferred.append({"weight": condition.weight, "preference": {"matchExpressions": [expression]}})
    terms = {"nodeSelectorTerms": [{"matchExpressions": required}]} if required else {}
    nodes = {
        "requiredDuringSchedulingIgnoredDuringExecution": terms,
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    return drop_empty({"nodeAffinity": drop_empty(nodes)})


def drop_empty(values: JsonObject) -> JsonObject:
    """Return the mapping without null values, empty texts and empty containers."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
