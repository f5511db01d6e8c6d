"""Configuration of data versioning."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DataVersioningConfig(BaseModel):
    """Storage of dataset versions."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    repository: str = Field(
        "",
        description="Data repository, a bare git repository: a folder, or the URL of an existing repository, such as "
        "ssh://git@host/team/data.git. A folder is created on first use; a relative path is relative to the "
        "workdir. Empty: data-repository in the workdir.",
    )
    remote: str = Field(
        "",
        description="DVC remote that stores the files: a folder (for instance a PowerScale export) or a URL such as "
        "s3://bucket/prefix. A relative path is relative to the workdir. Empty: dvc-remote in the workdir.",
    )
    endpoint_url: str = Field(
        "",
        description="Address of the S3 service of an s3:// remote, such as https://powerscale.example.com:9021. "
        "Empty: the value of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, or else Amazon S3. Credentials come only from the environment or an AWS profile.",
    )
    name: str = Field(
        "dataset",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of the dataset in the repository: its files are in datasets/<name>, and its versions have "
        "the tags <name>-v1, <name>-v2 and so on.",
    )
