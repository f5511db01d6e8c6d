"""Settings of the model registry stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelRegistryConfig(BaseModel):
    """Under which name models are registered, and what follows."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(
        "tuneline-demo",
        min_length=1,
        pattern=r"^[^/:]+$",
        description="Name of the registered model in MLflow; without a slash or a colon.",
    )
    auto_promote: bool = Field(
        True,
        description="Make an accepted and proven version the champion at once. false: a person promotes it.",
    )
    copy_limit_mb: int = Field(
        512,
        ge=0,
        description="Largest model, in MB of 10^6 bytes, whose files are copied into MLflow. A larger one is registered by its manifest "
        "and a pointer to the artifact store.",
    )
    approvers: list[str] = Field(
        [],
        description="Who may promote, by the names given with --by; nobody named: anyone who may write to the registry. A policy that was "
        "put in force with `tuneline registry policy` counts instead.",
    )
    approvals_required: int = Field(1, ge=1, le=2, description="How many of the approvers have to approve a promotion.")

    @model_validator(mode="after")
    def _enough(self) -> ModelRegistryConfig:
        if self.approvals_required > max(len(set(self.approvers)), 1):
            raise ValueError(f"approvals_required is {self.approvals_required}, and approvers names {len(set(self.approvers))}")
        return self
