"""Conversion of the Arrow types of database drivers to types that Parquet stores and that become JSON values."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

TEXT_TYPES = ("large_string", "string_view", "null")
BINARY_TYPES = ("large_binary", "binary_view", "fixed_size_binary")


class UnsupportedColumnError(Exception):
    """A column has a type without a JSON value."""


def convert_schema(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema of an extract, without the metadata of the driver.

    Raises:
        UnsupportedColumnError: a type cannot be stored, or two columns have the same name.
    """
    import pyarrow

    for name in schema.names:
        if not name or schema.names.count(name) > 1:
            raise UnsupportedColumnError(
                f"column {name!r} occurs several times; expected distinct names" if name else "a column has no name"
            )
    return pyarrow.schema([pyarrow.field(field.name, _convert_type(field.type, field.name)) for field in schema])


def _convert_type(data_type: pyarrow.DataType, column: str) -> pyarrow.DataType:
    """Return the stored type: text for UUIDs, JSON and numbers that the driver returns as text."""
    import pyarrow

    types = pyarrow.types
    if isinstance(data_type, pyarrow.BaseExtensionType):
        storage = _convert_type(data_type.storage_type, column)
        if data_type.extension_name == "arrow.uuid" or types.is_string(storage):
            return pyarrow.string()
        name = getattr(data_type, "type_name", data_type.extension_name)
        raise UnsupportedColumnError(f"column {column!r} has the unsupported type {name}")
    if types.is_dictionary(data_type):
        return _convert_type(data_type.value_type, column)
    if str(data_type) in TEXT_TYPES:
        return pyarrow.string()
    if str(data_type).startswith(BINARY_TYPES):
        return pyarrow.binary()
    if types.is_map(data_type):
        return pyarrow.map_(_convert_type(data_type.key_type, column), _convert_type(data_type.item_type, column))
    if types.is_nested(data_type) and hasattr(data_type, "value_type"):
        return pyarrow.list_(_convert_type(data_type.value_type, column))
    if types.is_struct(data_type):
        return pyarrow.struct([pyarrow.field(one.name, _convert_type(one.type, column)) for one in data_type])
    if types.is_timestamp(data_type) and data_type.unit == "ns":  # Python's datetime has no nanoseconds
        return pyarrow.timestamp("us", data_type.tz)
    if types.is_time64(data_type) and data_type.unit == "ns":
        return pyarrow.time64("us")
    if types.is_nested(data_type) or types.is_interval(data_type) or types.is_duration(data_type):
        raise UnsupportedColumnError(f"column {column!r} has the unsupported type {data_type}")
    return data_type


def convert_batch(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Return a batch with the types of the schema that `convert_schema` returned."""
    import pyarrow

    columns = [_convert_array(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pyarrow.record_batch(columns, schema=schema)


def _convert_array(array: pyarrow.Array, target: pyarrow.DataType) -> pyarrow.Array:
    import pyarrow

    if isinstance(array, pyarrow.ExtensionArray):
        if array.type.extension_name == "arrow.uuid":
            return pyarrow.array([_format_uuid(value) for value in array.storage.to_pylist()], target)
        array = array.storage
    if array.type == target:
        return array
    if pyarrow.types.is_list(array.type) and isinstance(array.values, pyarrow.ExtensionArray):
        values = _convert_array(array.values, target.value_type)
        return pyarrow.ListArray.from_arrays(array.offsets, values, mask=array.is_null() if array.null_count else None)
    return array.cast(target, safe=not pyarrow.types.is_temporal(target))


def _format_uuid(value: bytes | None) -> str | None:
    return None if value is None else str(uuid.UUID(bytes=value))
