"""Settings of the data versioning stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DataVersioningConfig(BaseModel):
    """Where dataset versions are kept."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    repository: str = Field(
        "",
        description="Folder of the data repository, a bare git repository made on first use; a relative path counts from the work folder. "
        "Empty: data-repository in the work folder.",
    )
    remote: str = Field(
        "",
        description="DVC remote that holds the files: a folder (for instance a PowerScale export) or a URL such as s3://bucket/prefix; "
        "a relative path counts from the work folder. Empty: dvc-remote in the work folder.",
    )
    name: str = Field(
        "dataset",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of the dataset in the repository: it lies in datasets/<name>, its versions are tagged <name>-v1, <name>-v2, …",
    )
