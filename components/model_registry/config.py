"""Settings of the model registry stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


def check_approval_count(approvers: list[str], required: int) -> None:
    """Raise ValueError if more approvals are required than approvers are listed."""
    if required > max(len(set(approvers)), 1):
        raise ValueError(
            f"approvals_required is {required}; expected at most {max(len(set(approvers)), 1)}, the number of approvers"
        )


class ModelRegistryConfig(BaseModel):
    """Name of the registered model, copies of its files, and its promotion."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(
        "tuneline-demo",
        min_length=1,
        pattern=r"^[^/:]+$",
        description="Name of the registered model in MLflow, without slash or colon.",
    )
    auto_promote: bool = Field(
        False,
        description="Promote an accepted and proven version to champion automatically. false: a person promotes the version "
        "(tuneline promote).",
    )
    copy_limit_mb: int = Field(
        512,
        ge=0,
        description="Maximum size, in MB of 10^6 bytes, of a model whose files are copied into MLflow. For a larger "
        "model, MLflow stores the manifest and a pointer to the artifact store.",
    )
    approvers: list[str] = Field(
        [],
        description="Names of the people who may approve promotions, as passed with --by. Empty: everyone with write "
        "access to the registry. A policy set with `tuneline policy set` takes precedence.",
    )
    approvals_required: int = Field(1, ge=1, le=2, description="Number of approvals that a promotion requires.")

    @model_validator(mode="after")
    def _check_approval_count(self) -> ModelRegistryConfig:
        check_approval_count(self.approvers, self.approvals_required)
        return self
