"""Croissant 1.0 description of a dataset: files with digests, record sets with the columns, responsible-AI statements."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.common.artifacts.artifact_folder import Artifact, ArtifactFile
from components.common.runtime.counts import format_count
from pipelines.provenance.exports.version_facts import UNKNOWN, JSONObject, shorten_uri

if TYPE_CHECKING:
    import pyarrow

# The context of https://docs.mlcommons.org/croissant/docs/croissant-spec.html, with the vocabulary of Croissant RAI.
CONTEXT = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "column": "cr:column", "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/", "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"}, "dct": "http://purl.org/dc/terms/", "equivalentProperty": "cr:equivalentProperty",
    "samplingRate": "cr:samplingRate",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract", "field": "cr:field", "fileProperty": "cr:fileProperty", "fileObject": "cr:fileObject", "fileSet": "cr:fileSet",
    "format": "cr:format", "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath", "key": "cr:key",
    "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "recordSet": "cr:recordSet", "references": "cr:references",
    "regex": "cr:regex", "repeated": "cr:repeated", "replace": "cr:replace", "sc": "https://schema.org/", "separator": "cr:separator",
    "source": "cr:source", "subField": "cr:subField", "transform": "cr:transform",
}  # fmt: skip
PARQUET = "application/x-parquet"
COLUMNS = {
    "id": "Identifier of the row: the digest of its content, or the identifier in its source.",
    "messages": "The conversation: role and content of each message.",
    "tools": "Definitions of the functions that the assistant can call.",
    "source": "Name of the source.",
    "meta": "Additional values of the source, as JSON.",
    "prompt": "The conversation before the answers.",
    "chosen": "The preferred answer.",
    "rejected": "The rejected answer.",
    "completion": "The answer.",
    "label": "Whether the answer is desired.",
    "text": "The text.",
}


def render_croissant(
    dataset: Artifact, *, name: str, licence: str = UNKNOWN, url: str = "", published: str = ""
) -> str:
    """Return the description as JSON-LD. File addresses are relative: store it beside the Parquet files to load them.

    Args:
        dataset: the dataset artifact.
        name: name of its revision, whose number is its version.
        licence: licence of the data.
        url: address of the revision; "" for the digest as a URN.
        published: date in ISO 8601 format; "" if the dataset was not published.
    """
    manifest = dataset.manifest
    files = [file for file in manifest.files if file.payload and file.path.endswith(".parquet")]
    splits = manifest.summary.get("splits", {})
    description = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": ["http://mlcommons.org/croissant/1.0", "http://mlcommons.org/croissant/RAI/1.0"],
        "name": name,
        "description": (
            f"Dataset {dataset.sha256}, curated by tuneline. Sources: {len(_list_sources(dataset))}. "
            f"Kind of rows: {manifest.summary.get('rows_kind', UNKNOWN)}."
        ),
        "identifier": f"urn:sha256:{dataset.sha256}",
        "url": url or f"urn:sha256:{dataset.sha256}",
        "version": _get_version(dataset, name),
        "license": licence,
        "creator": {"@type": "sc:Organization", "name": UNKNOWN},
        **({"datePublished": published} if published else {}),
        "isLiveDataset": False,
        "isBasedOn": _list_sources(dataset),
        **_describe_responsibility(manifest.summary, manifest.config),
        "distribution": [_describe_file(file) for file in files],
        "recordSet": [_describe_records(dataset, file, splits) for file in files],
    }
    return json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _get_version(dataset: Artifact, name: str) -> str:
    """Return a version of the form MAJOR.MINOR.PATCH, which Croissant recommends; 0.0.0 for an unpublished dataset."""
    number = re.search(r"-v(\d+)$", name)
    return f"{number[1]}.0.0" if number else f"0.0.0+{dataset.sha256[:12]}"


def _list_sources(dataset: Artifact) -> list[str]:
    return sorted({shorten_uri(one.uri) for one in dataset.manifest.inputs if one.kind == "raw"})


def _describe_responsibility(summary: Mapping[str, JSONObject], config: JSONObject) -> JSONObject:
    """Return the statements of the RAI vocabulary: collection, preprocessing and personal data."""
    rows = summary.get("rows", {})
    steps = [
        f"{format_count(count, 'row')} rejected: {reason}" for reason, count in sorted(rows.get("rejected", {}).items())
    ]
    if rows:
        counts = f"{rows['in']} rows read, {rows['kept']} kept, {rows['quarantined']} quarantined"
        steps = [counts, *steps, f"near-duplicate threshold {config.get('near_duplicate_threshold', UNKNOWN)}"]
    personal = [
        f"{kind}: {one['found']} found in {one['rows']} rows, action {one['action']}"
        for kind, one in summary.get("personal_data", {}).items()
    ]
    if not personal and "personal_data" in summary:
        personal = ["The detectors of data curation found no personal data."]
    return {
        "rai:dataCollection": UNKNOWN,
        "rai:dataPreprocessingProtocol": steps or [UNKNOWN],
        "rai:personalSensitiveInformation": personal or [UNKNOWN],
        "rai:dataUseCases": UNKNOWN,
        "rai:dataBiases": UNKNOWN,
    }


def _describe_file(file: ArtifactFile) -> JSONObject:
    return {
        "@type": "cr:FileObject",
        "@id": file.path,
        "name": file.path,
        "contentUrl": file.path,
        "contentSize": f"{file.bytes} B",
        "encodingFormat": PARQUET,
        "sha256": file.sha256,
    }


def _describe_records(dataset: Artifact, file: ArtifactFile, splits: Mapping[str, object]) -> JSONObject:
    import pyarrow.parquet as parquet

    split = file.path.removesuffix(".parquet")
    schema = parquet.read_schema(dataset.path / file.path)
    return {
        "@type": "cr:RecordSet",
        "@id": split,
        "name": split,
        "description": f"Rows of the split {split}: {splits.get(split, UNKNOWN)}.",
        "key": {"@id": f"{split}/id"},
        "field": [
            _describe_field(column, split, {"fileObject": {"@id": file.path}, "extract": {"column": column.name}})
            for column in schema
        ],
    }


def _describe_field(column: pyarrow.Field, parent: str, source: JSONObject) -> JSONObject:
    """Return a column; a list is a repeated field, and a struct has a subfield per member."""
    import pyarrow.types as types

    identifier, kind = f"{parent}/{column.name}", column.type
    field: JSONObject = {}
    if types.is_list(kind) or types.is_large_list(kind):
        field["repeated"], kind = True, kind.value_type
    if types.is_struct(kind):
        members = [kind.field(index) for index in range(kind.num_fields)]
        paths = [{**source, "transform": {"jsonPath": member.name}} for member in members]
        field["subField"] = [
            _describe_field(member, identifier, path) for member, path in zip(members, paths, strict=True)
        ]
    else:
        field["dataType"] = _name_type(kind)
    described = {"description": COLUMNS[column.name]} if column.name in COLUMNS and parent.count("/") == 0 else {}
    return {"@type": "cr:Field", "@id": identifier, "name": identifier, **described, **field, "source": source}


def _name_type(kind: pyarrow.DataType) -> str:
    import pyarrow.types as types

    names = {"sc:Boolean": types.is_boolean, "sc:Integer": types.is_integer, "sc:Float": types.is_floating}
    return next((name for name, is_kind in names.items() if is_kind(kind)), "sc:Text")
