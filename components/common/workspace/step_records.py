"""Records of a Kubeflow run's steps in the workdir: the result or the error of each step.

Kubeflow passes only the state of a run to its exit task, without the step or the error. A record with the status
`running` at the end of the run belongs to a step that was killed. Garbage collection removes unused records with the
other states.
"""

from __future__ import annotations

import json
import operator
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import TunelineError
from components.common.runtime.url_credentials import mask_credentials
from components.common.workspace.artifact_store import Workdir

QUERY_PATTERN = re.compile(r"(?<=\S)\?[\w.%-]+=\S+")  # may contain a signature or a token
RUN_VARIABLE, STEP_VARIABLE = "KFP_RUN_ID", "TUNELINE_STEP"  # set by the pod specification


@dataclass(frozen=True)
class StepRecord:
    """The record of a step.

    Attributes:
        step: title of the step in the Kubeflow UI.
        path: file of the record; None outside a Kubeflow run.
    """

    step: str
    path: Path | None

    def write_error(self, error: TunelineError, **values: Any) -> None:
        """Replace the record by that of a failed step, without secrets: services outside the cluster receive the text.

        The message of an unexpected error may contain secrets of any form, so only the type of the error is kept.
        """
        message = error.message.partition(":")[0] if error.kind == "unexpected" else error.message
        texts = {"message": message, "hint": error.hint}
        masked = {name: QUERY_PATTERN.sub("?***", mask_credentials(text)) for name, text in texts.items()}
        self.write("failed", error=masked, **values)

    def write(self, status: str, **values: Any) -> None:
        """Replace the record. A record that cannot be written, for example on a full disk, does not fail the step."""
        if self.path:
            text = json.dumps({"step": self.step, "status": status, **values}, default=str)
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                artifact_folder.write_atomically(self.path, text)


def open_record() -> StepRecord:
    """Return the record of this process's step."""
    run, step = os.environ.get(RUN_VARIABLE, ""), os.environ.get(STEP_VARIABLE, "")
    filename = re.sub("[^a-z0-9]+", "-", step.lower()) + ".json"
    return StepRecord(step, _get_folder(run) / filename if run and step else None)


def read_records() -> list[dict[str, Any]]:
    """Return the records of this Kubeflow run in the order of their last changes; unreadable ones have that status."""
    records: list[tuple[float, dict[str, Any]]] = []
    for path in _get_folder(os.environ.get(RUN_VARIABLE, "none")).glob("*.json"):
        try:
            records.append((path.stat().st_mtime, json.loads(filesystem.read_text(path))))
        except (OSError, ValueError):  # a damaged volume must not prevent the report of the run's end
            records.append((0.0, {"step": path.stem, "status": "unreadable"}))
    return [record for _, record in sorted(records, key=operator.itemgetter(0))]


def _get_folder(run: str) -> Path:
    return Workdir.from_environment().state / "kubeflow-runs" / run
