"""A random sample of answered requests for editors, who write their own answers without seeing the model's.

Users correct the mistakes of the model that they see. A comparison by such corrections favours every other model. In a
random sample, each subject has the same chance, and good answers have a correction too.

The file is read with the gateway's feedback. People edit it, so an invalid line is an error and never skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime.errors import InputError, OutputOccupiedError
from pipelines.capture import row_selection, traffic_files, training_rows
from pipelines.capture.row_selection import RowFilter
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_export import is_held_back
from pipelines.capture.training_rows import SAMPLED

MARK = re.compile(rf'"{SAMPLED}"\s*:'.encode())
REQUIRED = ("id", "captured", "time", "correction")
MARK_BYTES = 1 << 20  # at the beginning of a file, which decide whether it is a sample


def draw_sample(
    settings: CaptureSettings, selection: RowFilter, count: int, seed: int, held_back: float = 0.0
) -> list[dict[str, Any]]:
    """Return requests without a correction, one per subject. Call it under the lock.

    Args:
        settings: the capture file.
        selection: the answers to draw from. Do not select by rating.
        count: the maximum number of requests.
        seed: another seed draws other subjects.
        held_back: draw only subjects that an export with this share holds back; 0: all subjects.

    Raises:
        InputError: no answer can be drawn.
    """
    order: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in row_selection.read_rows(settings, selection, {}):
        answer_id, facts = row["response"]["id"], row["tuneline"]
        # The rows of a corrected answer exist whatever the model answered, so the choice does not depend on it.
        rows = training_rows.build_training_rows(row, {"correction": "-"}, include_unrated=False)
        if rows.conversation is None or (held_back and not is_held_back(rows.group, held_back)):
            continue
        place = hashing.digest([SAMPLED, seed, answer_id])
        line = {
            "id": answer_id, "model": facts["model"], "version": facts["version"], "subject": facts["subject"],
            "captured": datetime.fromtimestamp(row["timestamp"], UTC).isoformat(), SAMPLED: True,
            "messages": rows.conversation["messages"][:-1], "correction": "",
        }  # fmt: skip
        if rows.group not in order or place < order[rows.group][0]:
            order[rows.group] = (place, line)
    if not order:
        raise InputError(
            f"no captured answer in {settings.location} can be corrected",
            hint="Select other days or another model. Requests for several answers or without messages are not drawn.",
        )
    groups = sorted(order, key=lambda group: hashing.digest([SAMPLED, seed, group]))
    time = traffic_files.now().isoformat(timespec="milliseconds")
    return [{**order[group][1], "time": time} for group in groups[:count]]


def write_sample(lines: list[dict[str, Any]], path: Path) -> None:
    """Write the lines to a new file that only this user can read.

    Raises:
        OutputOccupiedError: the file exists, and may contain corrections.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
    except FileExistsError:
        raise OutputOccupiedError(f"{path} exists", hint="Choose another file with -o.") from None


def is_sample(path: Path) -> bool:
    """Return whether a file of feedback is a sample."""
    with path.open("rb") as file:
        return MARK.search(file.read(MARK_BYTES)) is not None


def read_sample(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an edited sample.

    Raises:
        InputError: a line is not JSON, or a string of REQUIRED is missing; the message contains its number.
    """
    lines = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason}", hint="Save the file as UTF-8.") from None
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        hint = 'Correct the line: change only the text of `correction`, and write a quotation mark in this text as \\".'
        try:
            line = json.loads(content)
        except ValueError as error:
            raise InputError(f"{path}:{number}: invalid JSON: {error}", hint=hint) from None
        if not isinstance(line, dict) or not all(isinstance(line.get(name), str) for name in REQUIRED):
            raise InputError(f"{path}:{number}: expected an object with the strings {', '.join(REQUIRED)}", hint=hint)
        lines.append(line)
    return lines


def erase_lines(path: Path, should_erase: Callable[[dict[str, Any]], bool]) -> int:
    """Remove lines from a sample, and return their number.

    Raises:
        InputError: a line is invalid; nothing is removed.
    """
    lines = read_sample(path)
    kept = [line for line in lines if not should_erase(line)]
    if len(kept) < len(lines):
        mode = path.stat().st_mode
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        artifact_folder.write_atomically(path, text)
        path.chmod(mode)
    return len(lines) - len(kept)
