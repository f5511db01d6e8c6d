"""Backup and restore of a workdir by the scripts of docs/examples/, and checks of the restored workdir."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.triton_packaging.triton_server import ServerAddress
from tests.pipelines.command import COMMAND, ROOT, answer, environment
from tests.triton_packaging.triton_clients import infer_grpc

EXAMPLES = ROOT / "docs" / "examples"


def run_script(name: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts as a user does."""
    variables = environment(PYTHON=sys.executable, **extra)
    command = ["sh", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300, check=False)


def back_up(workdir: str, backups: Path, *, cwd: Path, **extra: str) -> Path:
    """Back up a workdir and return the backup."""
    process = run_script("backup.sh", workdir, backups, cwd=cwd, **extra)
    assert process.returncode == 0, process.stderr
    return Path(process.stdout.strip())


def restore(backup: Path, workdir: Path, **extra: str) -> Path:
    """Restore a backup and return the workdir."""
    process = run_script("restore.sh", backup, workdir, cwd=backup.parent, **extra)
    assert (process.returncode, process.stderr) == (0, "")
    return Path(process.stdout.strip())


@contextmanager
def move_away(folder: Path) -> Iterator[None]:
    """Move a folder away during a block, so that recorded addresses of it are invalid."""
    aside = folder.with_name(f"{folder.name}.away")
    folder.rename(aside)
    try:
        yield
        assert not folder.exists(), "the moved folder was recreated"
    finally:
        aside.rename(folder)


def check_restored(first: dict[str, Any], project: Path, workdir: Path, output: Path, **extra: str) -> None:
    """Check all results of the run: the lineage, the history of the registry, the published rows, the served answers."""
    name = first["mlflow"]["model_name"]
    options: dict[str, Any] = {"cwd": project, **extra}
    lineage = answer("lineage", f"{name}@champion", "-c", "customization.yaml", "--workdir", workdir, **options)
    assert {link["kind"]: link["status"] for link in lineage["chain"]} == dict.fromkeys(
        ("version", "repository", "evaluation", "model", "base_model", "dataset", "revision", "raw"), "intact"
    )
    uris = {link["kind"]: link["uri"] for link in lineage["chain"]}
    repository = (workdir / "store" / Path(first["artifacts"]["repository"]).name).absolute()
    assert uris["repository"] == repository.as_uri(), "found by its digest in the new workdir"
    audit = answer("registry", "audit", name, "--workdir", workdir, **options)
    assert (audit["clean"], audit["findings"], audit["notes"]) == (True, [], [])
    answer("data", "fetch", "dataset-v1", "-o", output, "--workdir", workdir, **options)
    assert artifact_folder.read(output, "dataset").sha256 == Path(first["artifacts"]["dataset"]).name
    check_served_answers(repository, project)


def check_served_answers(repository: Path, project: Path) -> None:
    """Check that a package gives the answers of its proof."""
    expected = json.loads((repository / "proof.json").read_text(encoding="utf-8"))["answers"][0]
    command = [
        *COMMAND,
        "serve",
        str(repository),
        "--http-port",
        "0",
        "--json",
    ]
    server = subprocess.Popen(
        command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        served = infer_grpc(
            ServerAddress(ready["grpc"]), ready["models"][0], text_input=expected["prompt"], max_tokens=4
        )
        assert served["text_output"] == expected["text"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def list_files(folder: Path) -> set[str]:
    """Return the files below a folder."""
    return {os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file()}
