"""Runs the Daft engine in a child process and checks its results."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import hashing
from components.common.runtime import process_control
from components.common.runtime.errors import EngineMissingError

if TYPE_CHECKING:
    import numpy as np

    from components.data_curation.comparison.duplicates import SimilarPairs

QUIET_ENVIRONMENT = {"DAFT_ANALYTICS_ENABLED": "0", "DO_NOT_TRACK": "true", "DAFT_PROGRESS_BAR": "0"}
MAX_ATTEMPTS = 2
DISK_PROBE_BYTES = 64 * 1024  # less than the engine writes


def find_similar_texts(folder: Path, places: np.ndarray, threshold: float, ray_address: str | None) -> SimilarPairs:
    """Run the engine on the folder's texts.

    Args:
        folder: contains texts-*.parquet.
        places: the places of the compared rows (int64, sorted).
        threshold: the minimum Jaccard similarity of a pair.
        ray_address: the Ray cluster's address; None to run on this machine.

    Returns:
        For "words" and "answer": pairs of indices into the sorted `places` (int64, (pairs, 2)), and similarities.

    Raises:
        EngineMissingError: the engine produced no result.
    """
    import numpy as np
    from pyarrow import compute, parquet

    arguments = ["similar", str(folder), str(threshold), *([ray_address] if ray_address else [])]
    run_engine(folder, arguments, lambda: _is_result_complete(folder))
    table = parquet.read_table(folder / "pairs.parquet")
    pairs = {}
    for name in ("words", "answer"):
        of_name = table.filter(compute.equal(table["of"], name))
        ends = [np.searchsorted(places, of_name[end].to_numpy()) for end in ("a", "b")]
        pairs[name] = (np.stack(ends, axis=1), of_name["similarity"].to_numpy())
    return pairs


def run_engine(folder: Path, arguments: Sequence[str], is_complete: Callable[[], bool]) -> None:
    """Run the engine until its result is complete. Its exit code is ignored, because it may crash after its work.

    Args:
        folder: the engine's folder, in which engine.log is written.
        arguments: the command-line arguments of `components.data_curation.engine`.
        is_complete: returns whether the result is complete.

    Raises:
        EngineMissingError: Daft is not installed, or produced no result in MAX_ATTEMPTS attempts.
        OSError: the disk is full.
    """
    if importlib.util.find_spec("daft") is None:
        hint = "Run: pip install 'tuneline[curation]'"
        raise EngineMissingError("data curation requires the package daft, which is not installed", hint=hint)
    command = process_control.build_module_command("components.data_curation.engine", *arguments)
    log = folder / "engine.log"
    code = 0
    for _ in range(MAX_ATTEMPTS):
        with log.open("wb") as file:
            code = subprocess.run(  # preexec_fn is safe here: it only makes a system call
                command,
                stdout=file,
                stderr=file,
                env=process_control.build_python_environment(**QUIET_ENVIRONMENT),
                preexec_fn=process_control.die_with_parent,
                check=False,
            ).returncode
        process_control.append_to_step_log(log)
        if is_complete():
            return
    # The engine does not report a full disk; this write raises OSError.
    (folder / "disk-probe").write_bytes(bytes(DISK_PROBE_BYTES))
    tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-400:]
    raise EngineMissingError(
        f"the Daft engine ended twice without a result (exit code {code}): {tail or 'no output'}",
        hint="Curate fewer rows, or use a larger machine: the system killed the engine, probably for lack of memory."
        if code == -signal.SIGKILL
        else "Run `tuneline doctor` to check the engine.",
    )


def _is_result_complete(folder: Path) -> bool:
    """Return whether result.json exists, lists every file of texts, and contains the digests of its files."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
        texts = sorted(file.name for file in folder.glob("texts-*.parquet"))
        files = result["files"].items()
        return result["texts"] == texts and all(hashing.sha256_file(folder / name) == sha for name, sha in files)
    except (OSError, ValueError, KeyError):
        return False
