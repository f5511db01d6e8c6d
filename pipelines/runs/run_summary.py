"""Text that `tuneline run` prints at the end of a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import REWARD_MODEL
from components.common.workspace import artifact_store
from pipelines.runs import run_costs


def format_run(result: dict[str, Any]) -> list[str]:
    """Return lines with the stages, the verdict and its reasons, the report, and the commands that use the model."""
    stages, artifacts, registered = result["stages"], result["artifacts"], result["mlflow"]
    evaluation = json.loads((Path(artifacts["evaluation"]) / "evaluation.json").read_text(encoding="utf-8"))
    aliases = ", ".join(registered["aliases"]) or "no alias"
    lines = [
        *(f"  {s['name']:<18}" + (" cached" if s["cached"] else f"{s['seconds']:7.1f} s") for s in stages),
        "",
        f"verdict: {result['verdict']}",
        *(f"  {reason}" for reason in dict.fromkeys(evaluation["reasons"])),
        *format_unreadable(Path(artifacts["dataset"])),
        *format_evaluation_sets(Path(artifacts["dataset"])),
        f"model: {registered['model_name']} version {registered['model_version']} ({aliases})",
        f"report: {result['report']}",
    ]
    command = "tuneline" if shutil.which("tuneline") else os.path.relpath(sys.argv[0])
    if result["verdict"] == "accepted" and registered["model_version"] and "champion" not in registered["aliases"]:
        target = f"{registered['model_name']} --version {registered['model_version']}"
        if Path(result["workdir"]) != artifact_store.Workdir.from_environment().root:
            target += f" --workdir {shlex.quote(result['workdir'])}"
        lines.append(f"not promoted; to promote this version: {command} promote {target}")
    if artifacts["repository"]:
        lines.append(f"chat with the model: {command} chat {artifacts['repository']}")
        lines.append(f"serve the model: {command} serve {artifacts['repository']}")
    elif result["verdict"] == "refused" and artifacts.get("model"):
        model, configuration = Path(artifacts["model"]), Path(result["report"]).with_name("customization.yaml")
        if artifact_folder.read_manifest(model).kind != REWARD_MODEL:
            package = shlex.join([command, "package", str(model), "-c", str(configuration), "-o", "refused-model"])
            lines.append(f"not packaged; to try the refused model: {package} && {command} chat refused-model")
    if str(registered["tracking_uri"]).startswith(("http://", "https://")):
        lines.append(f"browse the runs: {registered['tracking_uri']}")
    else:
        lines.append(
            f"browse the runs: {shlex.join(['mlflow', 'ui', '--backend-store-uri', registered['tracking_uri']])}"
        )
    lines.append(f"cost: {run_costs.format_costs(result['cost'])}")
    cached = ", ".join(stage["name"] for stage in stages if stage["cached"])
    return [*lines, f"total: {result['seconds']:.0f} s" + (f"; cached: {cached}" if cached else "")]


def format_unreadable(dataset: Path) -> list[str]:
    """Return lines about quarantined records: their number, the first record and the file; [] without such records."""
    quarantine = dataset / "quarantine.jsonl"
    records = quarantine.read_text(encoding="utf-8").splitlines()
    if not records:
        return []
    first = json.loads(records[0])
    count = "1 record" if len(records) == 1 else f"{len(records):,} records"
    return [
        f"quarantined: {count}, the first at {first['file']}:{first['line']}: {first['why']}",
        f"  all records: {quarantine}",
    ]


def format_evaluation_sets(dataset: Path) -> list[str]:
    """Return one line per evaluation set of the decontamination: rejected rows, and items that cannot be found."""
    manifest = json.loads((dataset / "manifest.json").read_text(encoding="utf-8"))
    return [
        f"evaluation set {name}: rejected rows: {counts['rejected_rows']:,}; items that cannot be found by their "
        f"questions: {counts['unsearchable']:,} of {counts['items']:,}"
        for name, counts in manifest["summary"].get("evaluation_sets", {}).items()
    ]
