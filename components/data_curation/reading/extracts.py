"""Extracts: artifacts with the rows that were read from a database. A Parquet file in an extract is a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from components.common.artifacts.artifact_folder import Artifact
from components.data_curation.reading.raw_records import Source, to_source_uri

EXTRACT_KIND = "extract"
EXTRACT_SCHEME = "extract:"  # in a dataset's inputs: the address of an extract, whose digest is the input's digest
STORED_SCHEME = "store:"  # in a plan: the extract in the artifact store of the step


def open_extract(extract: Artifact) -> Source:
    """Return the Parquet file of an extract as a source."""
    file = next(one for one in extract.manifest.files if one.path.endswith(".parquet"))
    uri = to_source_uri((extract.path / file.path).absolute())
    return Source(uri=uri, sha256=file.sha256, bytes=file.bytes, extract=extract.sha256)


def to_stored_source(source: Source) -> Source:
    """Return a source whose address is valid on every machine, for a plan."""
    return (
        source.model_copy(update={"uri": f"{STORED_SCHEME}{source.extract}/{source.name}"})
        if source.extract
        else source
    )


def load_extracts(sources: Sequence[Source], load: Callable[[str, str], Artifact]) -> list[Source]:
    """Return the sources of a plan with local paths.

    Args:
        sources: the sources of a plan.
        load: returns the artifact of a digest and a kind from the store.
    """
    return [
        one.model_copy(update={"uri": open_extract(load(one.extract, EXTRACT_KIND)).uri}) if one.extract else one
        for one in sources
    ]
