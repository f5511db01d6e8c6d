"""Settings of the data versioning stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DataVersioningConfig(BaseModel):
    """Where dataset versions are kept."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    repository: str = Field(
        "",
        description="The data repository, a bare git repository: a folder, made on first use (a relative path counts from the work "
        "folder), or the URL of one that exists, such as ssh://git@host/team/data.git. Empty: data-repository in the work folder.",
    )
    remote: str = Field(
        "",
        description="DVC remote that holds the files: a folder (for instance a PowerScale export) or a URL such as s3://bucket/prefix; "
        "a relative path counts from the work folder. Empty: dvc-remote in the work folder.",
    )
    endpoint_url: str = Field(
        "",
        description="Address of the S3 service of an s3:// remote, such as https://powerscale.example.com:9021. Empty: what "
        "AWS_ENDPOINT_URL says, else Amazon's. The keys come from the environment or an AWS profile, never from here.",
    )
    name: str = Field(
        "dataset",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of the dataset in the repository: it lies in datasets/<name>, its versions are tagged <name>-v1, <name>-v2, …",
    )
