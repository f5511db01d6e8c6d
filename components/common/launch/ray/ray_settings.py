"""The section `launcher.ray` of platform.yaml."""

from __future__ import annotations

from pydantic import Field, field_validator

from components.common.launch.kubernetes.pod_scheduling import StrictModel
from components.common.runtime import url_credentials


class RaySettings(StrictModel):
    """An existing Ray cluster, and the resources that the training reserves on each node."""

    address: str = Field(
        "",
        description="Address of the dashboard, for example http://head:8265. Set an authentication token in "
        "RAY_AUTH_TOKEN, not in the address.",
    )
    cpus: int = Field(
        0,
        ge=0,
        description="CPU cores that the training reserves and uses on each node. 0: reserve one core per process.",
    )
    accelerator: str = Field(
        "",
        description="Accelerator, one per process: nvidia.com/gpu, amd.com/gpu, habana.ai/gaudi, or the name of a Ray "
        "resource (GPU, HPU). Empty: no accelerator; train on CPUs.",
    )
    resources: dict[str, float] = Field(
        {}, description="Additional Ray resources per node, for example {accelerator_type:H100: 0.001}."
    )
    wait_seconds: float = Field(
        3600.0,
        ge=0,
        description="Timeout in seconds for free nodes, at the start and after the loss of a node. 0: no limit.",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address and not address.startswith(("http://", "https://")):
            raise ValueError(  # without the value, which may contain a password
                "is not the dashboard's address; expected http://HOST:8265 or https://HOST, "
                "not the address of Ray itself (port 6379 or 10001)"
            )
        if url_credentials.contains_password(address):
            raise ValueError(
                "contains a password; expected an address without credentials; set the token in RAY_AUTH_TOKEN (from a "
                "secret)"
            )
        return address.rstrip("/")

    @property
    def accelerator_resource(self) -> str:
        """Ray's resource name of the accelerator: GPU for a Kubernetes GPU or a MIG partition."""
        if self.accelerator.startswith("nvidia.com/") or self.accelerator.endswith("/gpu"):
            return "GPU"
        return {"habana.ai/gaudi": "HPU"}.get(self.accelerator, self.accelerator)
