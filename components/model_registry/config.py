"""Settings of the model registry stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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
