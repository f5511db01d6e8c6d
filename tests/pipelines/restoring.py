"""A work folder backed up and restored by the scripts of docs/examples/, and whether what came back is what was there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common import artifacts
from tests.pipelines.command import COMMAND, ROOT, answer, environment

EXAMPLES = ROOT / "docs" / "examples"


def script(name: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts as a user would."""
    given = environment(PYTHON=sys.executable, **extra)
    command = ["sh", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=300, check=False)


def backed_up(workdir: str, backups: Path, *, cwd: Path, **extra: str) -> Path:
    """The backup of a work folder."""
    done = script("backup.sh", workdir, backups, cwd=cwd, **extra)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def restored(backup: Path, workdir: Path, **extra: str) -> Path:
    """The work folder that a backup became."""
    done = script("restore.sh", backup, workdir, cwd=backup.parent, **extra)
    assert (done.returncode, done.stderr) == (0, "")
    return Path(done.stdout.strip())


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Have a folder somewhere else, so that nobody finds it by an address he has written down."""
    aside = folder.with_name(f"{folder.name}.away")
    folder.rename(aside)
    try:
        yield
        assert not folder.exists(), "something was written to the old place"
    finally:
        aside.rename(folder)


def check_restored(first: dict[str, Any], project: Path, workdir: Path, output: Path, **extra: str) -> None:
    """All that `first` made is there again: every link of its lineage, the registry's history, the published rows, the served answers."""
    name = first["mlflow"]["model_name"]
    there: dict[str, Any] = {"cwd": project, **extra}
    found = answer("lineage", f"{name}@champion", "-c", "customization.yaml", "--workdir", workdir, **there)
    assert {link["kind"]: link["status"] for link in found["chain"]} == dict.fromkeys(
        ("version", "repository", "evaluation", "model", "base_model", "dataset", "revision", "raw"), "intact"
    )
    uris = {link["kind"]: link["uri"] for link in found["chain"]}
    repository = (workdir / "store" / Path(first["artifacts"]["repository"]).name).absolute()
    assert uris["repository"] == repository.as_uri(), "it was found by its digest, at its new place"
    audited = answer("registry", "audit", name, "--workdir", workdir, **there)
    assert (audited["clean"], audited["findings"], audited["notes"]) == (True, [], [])
    answer("data", "fetch", "dataset-v1", "-o", output, "--workdir", workdir, **there)
    assert artifacts.read(output, "dataset").sha256 == Path(first["artifacts"]["dataset"]).name
    check_serves(repository, project)


def check_serves(repository: Path, project: Path) -> None:
    """A package answers as its proof says."""
    proven = json.loads((repository / "proof.json").read_text(encoding="utf-8"))["answers"][0]
    command = [*COMMAND, "serve", str(repository), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--json"]
    server = subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        body = json.dumps({"text_input": proven["prompt"], "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{ready['http']}/v2/models/{ready['models'][0]}/generate", body, timeout=60) as response:
            assert json.loads(response.read())["text_output"] == proven["text"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def files(folder: Path) -> set[str]:
    """The files below a folder."""
    return {os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file()}
