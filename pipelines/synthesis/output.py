"""The output folder of a synthesis: rows, rejected answers, the journal, the report and the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError
from pipelines.synthesis import journal
from pipelines.synthesis.report import render_report
from pipelines.synthesis.synthesis import SynthesizedRows

KIND = "synthesis"
ROWS_FILENAME, REJECTED_FILENAME, REPORT_FILENAME = "rows.jsonl", "rejected.jsonl", "report.html"

DAMAGED_HINT = "Write the rows again from the stored answers: add --overwrite."


def find_finished(folder: Path, key: str, *, overwrite: bool) -> Artifact | None:
    """Return the finished synthesis with this key in the folder; otherwise None, and the folder may be written.

    Raises:
        OutputOccupiedError: the folder contains other files, or another artifact and `overwrite` is not set. Of another
            synthesis, `overwrite` keeps the journal.
        ArtifactDamagedError: the manifest or a file of the finished synthesis has changed, and `overwrite` is not set.
            The journal may have new answers, of a probe or of other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputOccupiedError(f"{folder} is a file; expected a folder", hint="Choose a folder with -o.")
    if (folder / artifact_folder.MANIFEST_FILENAME).exists():
        try:
            existing = artifact_folder.read_manifest(folder)
        except ArtifactDamagedError as error:
            if overwrite and (folder / journal.FILENAME).exists():
                return None
            raise ArtifactDamagedError(error.message, hint=DAMAGED_HINT) from None
        if existing.kind == KIND and existing.produced_by.get("key") == key and not overwrite:
            for file in existing.files:
                if file.path != journal.FILENAME and not artifact_folder.is_intact(folder / file.path, file):
                    raise ArtifactDamagedError(
                        f"{file.path} of the {KIND} in {folder} is missing, or has changed since it was published",
                        hint=DAMAGED_HINT,
                    )
            return Artifact(folder, existing)
        if existing.kind != KIND or not overwrite:
            hint = "Choose another folder with -o"
            hint += (
                ", or replace the rows with --overwrite; stored answers are reused." if existing.kind == KIND else "."
            )
            raise OutputOccupiedError(
                f"{folder} already contains another {existing.kind} ({existing.content_sha256[:12]})", hint=hint
            )
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / journal.FILENAME).exists():
        raise OutputOccupiedError(
            f"{folder} is not empty and was not written by tuneline synthesize",
            hint="Choose an empty or new folder with -o.",
        )
    return None


def publish(
    folder: Path,
    key: str,
    result: SynthesizedRows,
    inputs: Sequence[ArtifactInput],
    config: Mapping[str, Any],
    seed: int,
    summary: Mapping[str, Any],
) -> Artifact:
    """Write the files, and the manifest last.

    Args:
        folder: the output folder with the journal.
        key: the digest of inputs and settings.
        result: the rows.
        inputs: the source files and models.
        config: the settings.
        seed: the seed.
        summary: the figures.
    """
    (folder / artifact_folder.MANIFEST_FILENAME).unlink(missing_ok=True)
    for leftover in folder.glob(".*.jsonl.*"):  # of a killed write
        leftover.unlink(missing_ok=True)
    rejected = [
        {
            "reason": row.reason,
            "detail": row.detail,
            "source": row.task.passage.document,
            "passage": row.task.passage.line,
            "template": row.task.template.name,
            "answer": row.text,
        }
        for row in result.rejected
    ]
    artifact_folder.write_atomically(folder / ROWS_FILENAME, _to_lines(result.rows))
    artifact_folder.write_atomically(folder / REJECTED_FILENAME, _to_lines(rejected))
    artifact_folder.write_atomically(folder / REPORT_FILENAME, render_report(summary, result))
    return artifact_folder.publish(
        folder,
        KIND,
        payload=[ROWS_FILENAME],
        inputs=inputs,
        config=config,
        seed=seed,
        key=key,
        summary=summary,
    )


def compute_key(inputs: Sequence[ArtifactInput], config: Mapping[str, Any]) -> str:
    """Return the digest of the inputs and settings, which determines the rows of a given journal."""
    return hashing.digest([[one.model_dump() for one in inputs], dict(config)])


def _to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
