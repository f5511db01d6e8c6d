"""Tables in files with versions: Delta Lake through deltalake, and Apache Iceberg through PyIceberg.

Credentials come from the environment, as for other sources in object storage: AWS_* variables; for Iceberg, the
catalog's properties in PYICEBERG_CATALOG__<NAME>__* variables or .pyiceberg.yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from components.data_curation.databases.open_tables import OpenTable, RowStream
from components.data_curation.databases.table_request import TableRequest

if TYPE_CHECKING:
    from pyiceberg.table import Table

DELTA_SCHEME, DELTA_S3_SCHEME, ICEBERG_SCHEME = "delta://", "delta+s3://", "iceberg://"
# object_store reads these names; a variable without TLS must allow http explicitly.
S3_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
S3_MAX_RETRIES = "2"
ANSI_CODES = re.compile(r"\x1b\[[0-9;]*m|\\x1b\[[0-9;]*m")


# --- Delta ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_delta_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a version of a Delta table."""
    from deltalake import DeltaTable, QueryBuilder

    location, snapshot = _locate_delta_table(request), request.settings.snapshot
    options = build_storage_options() if location.startswith("s3://") else None
    table = DeltaTable(location, version=int(snapshot) if snapshot.isdecimal() else None, storage_options=options)
    if snapshot and not snapshot.isdecimal():
        table.load_as_version(_parse_time(request, snapshot))
    version, table_id = table.version(), str(table.metadata().id)

    def read() -> RowStream:
        import pyarrow

        result = QueryBuilder().register("delta_table", table).execute("SELECT * FROM delta_table")
        reader = pyarrow.RecordBatchReader.from_stream(result)
        return RowStream(reader.schema, iter(reader))

    yield OpenTable(
        f"Delta version {version}",
        read,
        state_key=f"{table_id}@{version}",
        details={"delta_version": version, "table_id": table_id},
    )


def _locate_delta_table(request: TableRequest) -> str:
    if request.address.startswith(DELTA_S3_SCHEME):
        return request.address.removeprefix("delta+")
    path = (request.base / request.address.removeprefix(DELTA_SCHEME)).absolute()
    if not (path / "_delta_log").is_dir():
        problem = "is not a Delta table: the folder _delta_log is missing" if path.is_dir() else "does not exist"
        raise request.error(problem, f"Check the path {path}; an address has the form delta:///folder/table.")
    return str(path)


def build_storage_options() -> dict[str, str]:
    """Return the settings of S3 from the same variables as for s3:// sources."""
    options = {name: value for name in S3_VARIABLES if (value := os.environ.get(name))}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return {"max_retries": S3_MAX_RETRIES, **options}


def _parse_time(request: TableRequest, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise request.error(
            f"has the snapshot {text!r}; expected a version number or a time",
            "Example: snapshot: '3' or snapshot: '2026-01-31T00:00:00+00:00'.",
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def describe_delta_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of deltalake."""
    text = re.sub(r"\W*↳\W*|\s+", " ", ANSI_CODES.sub("", text))
    if "specified end version" in text or "nvalid table version" in text:
        return f"has no version {request.settings.snapshot}", "List the versions: DeltaTable(PATH).history()."
    if "Error performing" in text or "error sending request" in text:
        return f"cannot be reached: {text}", "Check AWS_ENDPOINT_URL, the credentials in AWS_* and the network."
    return f"cannot be read: {text}", "Check the address and the permissions; a removed version cannot be read again."


# --- Iceberg ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_iceberg_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a snapshot of an Iceberg table."""
    from pyiceberg.catalog import load_catalog

    catalog, slash, name = request.address.removeprefix(ICEBERG_SCHEME).partition("/")
    if not (catalog and slash and "." in name):
        raise request.error("is not an Iceberg address", "Write iceberg://catalog/namespace.table.")
    table = load_catalog(catalog).load_table(name)
    snapshot = _find_iceberg_snapshot(request, table)
    table_id = str(table.metadata.table_uuid)

    def read() -> RowStream:
        scan = table.scan(snapshot_id=snapshot) if snapshot is not None else table.scan()
        reader = scan.to_arrow_batch_reader()
        return RowStream(reader.schema, iter(reader))

    yield OpenTable(
        f"Iceberg snapshot {snapshot}" if snapshot is not None else "Iceberg table without a snapshot",
        read,
        state_key=f"{table_id}@{snapshot}",
        details={"table_id": table_id, **({"snapshot_id": snapshot} if snapshot is not None else {})},
    )


def _find_iceberg_snapshot(request: TableRequest, table: Table) -> int | None:
    """Return the ID of the configured or current snapshot; None for a table that was never written to."""
    wanted = request.settings.snapshot
    if not wanted:
        current = table.current_snapshot()
        return current.snapshot_id if current else None
    known: list[Any] = [one.snapshot_id for one in table.metadata.snapshots]
    if not wanted.isdecimal() or int(wanted) not in known:
        newest = ", ".join(map(str, known[-3:])) or "none"
        raise request.error(f"has no snapshot {wanted}", f"Choose a snapshot ID; the newest are: {newest}.")
    return int(wanted)


def describe_iceberg_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of PyIceberg or its catalog."""
    catalog = request.address.removeprefix(ICEBERG_SCHEME).partition("/")[0]
    variable = f"PYICEBERG_CATALOG__{catalog.upper()}__URI"
    if "URI missing" in text:
        return f"is in the catalog {catalog}, which is not configured", f"Set {variable}, or configure .pyiceberg.yaml."
    if "does not exist" in text:
        return f"does not exist: {text}", f"Check namespace and table in the catalog {catalog}."
    return f"cannot be read: {text}", f"Check {variable} and the other properties of the catalog."
