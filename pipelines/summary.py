"""What a person reads when a run has ended."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def run(result: dict[str, Any], workdir: str) -> list[str]:
    """The verdict with its reasons, where the report is, and how to talk to the model."""
    lines = [_stage(stage) for stage in result["stages"]]
    lines += ["", f"verdict: {result['verdict']}", *(f"  {reason}" for reason in _reasons(result))]
    lines += unreadable(Path(result["artifacts"]["dataset"]))
    registered = result["mlflow"]
    aliases = ", ".join(registered["aliases"]) or "no alias"
    lines += [f"model: {registered['model_name']} version {registered['model_version']} ({aliases})"]
    lines += [f"report: {result['report']}"]
    if result["artifacts"]["repository"]:
        lines += [f"talk to it: {_command()} serve {result['artifacts']['repository']}"]
    lines += [f"look at the runs: make ui   (or: mlflow ui --backend-store-uri {registered['tracking_uri']})"]
    cached = [stage["name"] for stage in result["stages"] if stage["cached"]]
    return [*lines, f"{result['seconds']:.0f} seconds in all" + (f"; from the cache: {', '.join(cached)}" if cached else "")]


def unreadable(dataset: Path) -> list[str]:
    """What of the sources could not be read, where that is anything: how many places, the first of them, and where all are listed."""
    places = (dataset / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    if not places:
        return []
    first = json.loads(places[0])
    count = "1 place of the sources was" if len(places) == 1 else f"{len(places):,} places of the sources were"
    where = f"{first['file']}:{first['line']}: {first['why']}"
    return [f"unreadable: {count} left out, the first {where}", f"  all of them: {dataset / 'quarantine.jsonl'}"]


def _command() -> str:
    """How this person starts tuneline: by name where it is on the PATH, by the path they used otherwise."""
    return "tuneline" if shutil.which("tuneline") else os.path.relpath(sys.argv[0])


def _stage(stage: dict[str, Any]) -> str:
    return f"  {stage['name']:<18}" + (" cached" if stage["cached"] else f"{stage['seconds']:7.1f} s")


def _reasons(result: dict[str, Any]) -> list[str]:
    path = Path(result["artifacts"]["evaluation"]) / "evaluation.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["reasons"])
