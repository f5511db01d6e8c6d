"""`tuneline curate --preview`: the first rows of each source as text or JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation.source_preview import CHECKED_RECORDS, SourcePreview, find_hint, preview_source
from pipelines.cli.application import print_result
from pipelines.config.customization_config import Customization
from pipelines.steps.curation_inputs import list_raw_sources

MAX_PREVIEWED_SOURCES = 20
MAX_VALUE_CHARACTERS = 300


def print_preview(
    customization: Customization, base: Path, work: Workdir, reporter: Reporter, rows: int, as_json: bool
) -> None:
    """Print the first records of the sources as the curation reads them.

    Args:
        customization: The configuration.
        base: The folder of the configuration, to which suggested paths are relative.
        work: The workdir.
        reporter: Receives the steps of fetching and extracting.
        rows: The number of records of each source.
        as_json: Whether to print a JSON object.

    Raises:
        ConfigurationError: a source does not exist.
        InputError: a source can no longer be read.
    """
    curation = customization.data_curation
    with tempfile.TemporaryDirectory(prefix="tuneline-preview-") as folder:
        limit = max(rows, CHECKED_RECORDS)
        sources = list_raw_sources(curation, work, reporter, work.store, Path(folder), limit)
        previews = [preview_source(source, curation, limit, base) for source in sources[:MAX_PREVIEWED_SOURCES]]
    result = {
        "sources": [_build_result(preview, rows) for preview in previews],
        "more_sources": len(sources) - len(previews),
    }
    lines = [line for preview in previews for line in _format_preview(preview, rows)]
    if more := len(sources) - len(previews):
        lines.append(f"{format_count(more, 'more file')} not shown")
    print_result(result, as_json, lines)


def _build_result(preview: SourcePreview, rows: int) -> dict[str, Any]:
    return {
        "source": preview.source.name,
        "settings": preview.source.settings.model_dump(),
        "columns": preview.columns,
        "read": preview.read,
        "formats": dict(preview.formats),
        "not_selected": preview.not_selected,
        "rows": preview.rows[:rows],
        "unreadable": [asdict(one) for one in preview.unreadable[:rows]],
        "missing_columns": preview.missing,
        "suggestion": preview.format_suggestion() or None,
    }


def _format_preview(preview: SourcePreview, rows: int) -> Iterator[str]:
    formats = ", ".join(f"{count} {name}" for name, count in preview.formats.items()) or "no row"
    shown = min(rows, len(preview.rows))
    counts = [f"checked the first {format_count(preview.read, 'record')}, {shown} shown: {formats}"]
    counts += [f"{preview.not_selected} not selected"] if preview.not_selected else []
    counts += [f"{len(preview.unreadable)} unreadable"] if preview.unreadable else []
    yield f"{preview.source.name}: {', '.join(counts)}"
    yield f"  columns: {', '.join(preview.columns)}"
    if preview.missing:
        yield f"  {preview.format_missing()}"
    for row in preview.rows[:rows]:
        yield f"  {preview.source.name}:{row['line']} ({row['kind']})"
        for name, value in row.items():
            if name in ("line", "kind") or value in (None, {}, []):
                continue
            if isinstance(value, list):
                yield from (f"    {turn['role']}: {_shorten(turn['content'])}" for turn in value)
            else:
                yield f"    {name}: {_shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}"
    for record in preview.unreadable[:rows]:
        yield f"  {record.file}:{record.line}: {_shorten(record.reason)}"
    if hint := next(filter(None, map(find_hint, preview.unreadable)), ""):
        yield f"  {hint}"
    if entry := preview.build_suggestion():
        if preview.is_cached:
            yield "  To use these columns, correct them if necessary and add them to the source in customization.yaml:"
        else:
            yield "  To use these columns, correct them if necessary and add these lines to customization.yaml:"
            entry = {"data_curation": {"sources": [entry]}}
        yield yaml.safe_dump(entry, sort_keys=False, allow_unicode=True).rstrip()


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]} … ({len(text):,} characters)"
