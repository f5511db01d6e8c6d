"""Configuration of the registry: the model's name, and whether an accepted model goes into service by itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ModelRegistryConfig(BaseModel):
    """Where a model version is registered."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = Field("tuneline-demo", min_length=1, description="The registered model's name in MLflow.")
    auto_promote: bool = Field(True, description="Make an accepted model the champion at once. false: a person promotes it.")
    copy_limit_mb: int = Field(
        512,
        ge=0,
        description="Model files up to this size (MB) are copied into MLflow; of larger ones only manifest, report and a pointer.",
    )
