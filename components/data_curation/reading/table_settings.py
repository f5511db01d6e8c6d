"""Settings of a source in a database."""

from __future__ import annotations

import operator

from pydantic import BaseModel, ConfigDict, Field, field_validator

QUERY_SUFFIX = ".sql"
MAX_ROWS, MAX_BYTES, TIMEOUT_SECONDS = 5_000_000, 10_000_000_000, 600.0  # defaults


def is_query_file(query: str) -> bool:
    """Return whether `query` is the path of a file and not SQL."""
    return query.endswith(QUERY_SUFFIX) and len(query.split()) == 1


class TableSettings(BaseModel):
    """Rows to read from a database, and their limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str = Field(
        "",
        exclude_if=operator.not_,
        description="Databases: table or view to read, with its schema if necessary.",
    )
    query: str = Field(
        "",
        exclude_if=operator.not_,
        description="Databases: one SELECT statement instead of `table`, or the path of a .sql file.",
    )
    order_by: list[str] = Field(
        [],
        exclude_if=operator.not_,
        description="Databases: columns of a unique key by which the rows are sorted. Required for servers. Empty: sort "
        "by content, in memory.",
    )
    snapshot: str = Field(
        "",
        exclude_if=operator.not_,
        description="Version to read. Delta: version number or time; Iceberg: snapshot ID; Snowflake and BigQuery: time, "
        "with `table`. Empty: the current version.",
    )
    credentials_env: str = Field(
        "",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$",
        exclude_if=operator.not_,
        description="Environment variable with the password of the database user. Snowflake: the password, or a private "
        "key in PEM format. BigQuery: the JSON key of a service account.",
    )
    max_rows: int = Field(
        MAX_ROWS,
        ge=1,
        exclude_if=MAX_ROWS.__eq__,
        description="Databases: maximum number of rows. More rows are an error.",
    )
    max_bytes: int = Field(
        MAX_BYTES,
        ge=1,
        exclude_if=MAX_BYTES.__eq__,
        description="Databases: maximum size of the rows in bytes, without compression. More bytes are an error.",
    )
    timeout_seconds: float = Field(
        TIMEOUT_SECONDS,
        gt=0,
        allow_inf_nan=False,
        exclude_if=TIMEOUT_SECONDS.__eq__,
        description="Databases: timeout of the query in seconds.",
    )

    @field_validator("snapshot", mode="before")
    @classmethod
    def _accept_snapshot_number(cls, snapshot: object) -> object:
        return str(snapshot) if isinstance(snapshot, int) and not isinstance(snapshot, bool) else snapshot
