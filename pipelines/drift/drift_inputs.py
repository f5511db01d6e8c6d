"""Inputs of a drift check: captured prompts, the reference days, and the prompts of a dataset."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import conversation_rows
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, UsageError
from components.common.runtime.reporters import Reporter
from components.data_versioning import stage as data_versioning
from components.data_versioning.config import DataVersioningConfig
from pipelines.capture import row_selection, traffic_files
from pipelines.capture.row_selection import DayRange, Feedback, RowFilter
from pipelines.capture.settings import CaptureSettings
from pipelines.drift import captured_prompts
from pipelines.drift.captured_prompts import Prompt

REFERENCE_DAYS = 14  # of the default reference


@dataclass(frozen=True)
class CapturedPrompts:
    """The captured prompts of a model.

    Attributes:
        model: name of the model that answered.
        model_sha256: digest of the model that answered last, or "".
        prompts: prompts in chronological order.
        limitations: sentences about rows that were left out.
    """

    model: str
    model_sha256: str
    prompts: list[Prompt]
    limitations: Sequence[str]


def read_captured_prompts(settings: CaptureSettings, model: str, feedback: Feedback) -> CapturedPrompts:
    """Return the captured prompts of a model, without those of erased subjects. Call it under the lock.

    Args:
        settings: the capture file.
        model: name of the model that answered; "" for the only captured model.
        feedback: feedback by the answer's id.

    Raises:
        UsageError: no model is named, and traffic of several models was captured.
        InputError: no traffic of the model was captured, or a file cannot be read.
    """
    models = sorted({day.model for day in traffic_files.list_days(settings.folder)})
    if not model and len(models) > 1:
        raise UsageError(
            f"traffic of {len(models)} models was captured: {', '.join(models)}", hint="Choose a model with --model."
        )
    model = model or "".join(models)
    if model not in models:
        raise InputError(
            f"no traffic of the model {model!r} was captured in {settings.location}",
            hint=f"Captured models: {', '.join(models) or 'none'}. See `tuneline traffic status`.",
        )
    prompts, count, newest = [], 0, 0
    digest = ""
    for row in row_selection.read_rows(settings, RowFilter(model=model), feedback):  # not a list: answers are large
        count += 1
        if row["timestamp"] > newest:
            newest, digest = row["timestamp"], row["tuneline"].get("model_sha256") or ""
        if prompt := captured_prompts.build_prompt(row, feedback):
            prompts.append(prompt)
    prompts.sort(key=lambda prompt: (prompt.timestamp, prompt.id))
    damaged = sum(map(traffic_files.count_damaged_lines, traffic_files.list_days(settings.folder, model)))
    limitations = []
    if without_text := count - len(prompts):
        limitations.append(f"rows without user text are not tested: {without_text:,} of {count:,}")
    if damaged:
        limitations.append(f"the check skipped {format_count(damaged, 'damaged line')}")
    return CapturedPrompts(model, digest, prompts, limitations)


def divide_by_days(captured: CapturedPrompts, days: DayRange | None) -> tuple[DayRange, list[Prompt], list[Prompt]]:
    """Return the reference days, their prompts, and the later prompts.

    Args:
        captured: the captured prompts.
        days: the reference days with a last day; None for the first REFERENCE_DAYS days from the first captured prompt.

    Raises:
        InputError: no prompt was captured on these days.
    """
    prompts = captured.prompts
    if days is None:
        first = prompts[0].day if prompts else None
        days = DayRange(first, first + timedelta(days=REFERENCE_DAYS - 1)) if first else DayRange()
    reference = [prompt for prompt in prompts if prompt.day in days]
    if not reference:
        captured_days = f"{prompts[0].day}..{prompts[-1].day}" if prompts else "none"
        raise InputError(
            f"no prompt was captured on the reference days {days}",
            hint=f"Captured days: {captured_days}. Expired days are deleted; raise retention_days or choose later days.",
        )
    return days, reference, [prompt for prompt in prompts if days.last is not None and prompt.day > days.last]


def read_dataset_prompts(reference: str, config: DataVersioningConfig, workdir: Path, reporter: Reporter) -> list[str]:
    """Return the prompts of the training split of a dataset folder or a published revision.

    A prompt is the last message of the user, or a whole text.

    Raises:
        InputError: the dataset has no prompts.
        DataVersioningError: the revision is unknown.
        ArtifactDamagedError: the dataset is damaged.
    """
    if Path(reference).is_dir():
        return _list_prompts(artifact_folder.read(Path(reference), "dataset"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "dataset"
        return _list_prompts(data_versioning.fetch(reference, output, config, workdir=workdir, reporter=reporter))


def _list_prompts(dataset: Artifact) -> list[str]:
    path = dataset.path / "train.parquet"
    if dataset.manifest.summary.get("rows_kind") == conversation_rows.TEXT_KIND:
        texts = [row["text"] for row in conversation_rows.read_texts(path)]
    else:
        texts = []
        for row in conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset)):
            questions = [message["content"] for message in row["messages"] if message["role"] == "user"]
            texts += questions[-1:]
    texts = [text for text in texts if isinstance(text, str) and text.strip()]
    if not texts:
        raise InputError(f"the dataset in {dataset.path} has no prompts", hint="Choose another dataset.")
    return texts
