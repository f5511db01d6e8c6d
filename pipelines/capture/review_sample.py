"""A random sample of answered requests for editors, who write their own answers without seeing the model's.

Users correct the mistakes of the model that they see. A comparison by such corrections favours every other model. In a
random sample, each subject has the same chance, and good answers have a correction too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from components.common.artifacts import hashing
from components.common.runtime.errors import InputError, OutputOccupiedError
from pipelines.capture import row_selection, traffic_files, training_rows
from pipelines.capture.row_selection import RowFilter
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.training_rows import SAMPLED

KEY = "sample"


def draw_sample(settings: CaptureSettings, selection: RowFilter, count: int, seed: int) -> list[dict[str, Any]]:
    """Return lines of feedback without correction, one per subject. Call it under the lock.

    Args:
        settings: the capture file.
        selection: the answers to draw from. Do not select by rating.
        count: the maximum number of lines.
        seed: another seed draws other subjects.

    Raises:
        InputError: no answer can be drawn.
    """
    order: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in row_selection.read_rows(settings, selection, {}):
        answer_id, facts = row["response"]["id"], row["tuneline"]
        # The rows of a corrected answer exist whatever the model answered, so the choice does not depend on it.
        rows = training_rows.build_training_rows(row, {"correction": "-"}, include_unrated=False)
        if rows.conversation is None:
            continue
        place = hashing.digest([KEY, seed, answer_id])
        line = {
            "id": answer_id, "model": facts["model"], "version": facts["version"], "key": KEY, SAMPLED: True,
            "messages": rows.conversation["messages"][:-1], "correction": "",
        }  # fmt: skip
        if rows.group not in order or place < order[rows.group][0]:
            order[rows.group] = (place, line)
    if not order:
        raise InputError(
            f"no captured answer in {settings.location} can be corrected",
            hint="Select other days or another model. Requests for several answers or without messages are not drawn.",
        )
    groups = sorted(order, key=lambda group: hashing.digest([KEY, seed, group]))
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
