"""The evidence of a run: every fact its report shows, as one record gathered from the artifacts themselves.

Nothing here is computed that an artifact could not be asked for: the report is as true as the artifacts are, and they are checked
digest by digest when they are read.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from components.common import artifacts, cost, places, progress, tracking
from components.common.artifacts import Artifact, Input, Manifest
from components.common.personal_data import masked
from components.common.step import Step
from pipelines import outcome, page
from pipelines.stages import MAKERS

SCHEMA = "tuneline/report/v1"
EXAMPLES = 2  # of each reason for dropping a row
SHOWN = 400  # characters of an example
ANSWERS = 6
Record = dict[str, Any]


def gather(
    store: Path, digests: Mapping[str, str], version: Mapping[str, Any], registered: Mapping[str, Any], events: Path | None = None
) -> Record:
    """The evidence of a run.

    `digests`: the artifacts' by kind, without a repository where none was made; `version`: the dataset's revision; `registered`: what
    the registry said of the model version; `events`: the run's event file, where there is one. Raises ArtifactDamagedError.
    """
    found = {kind: places.stored(store, sha256, kind) for kind, sha256 in digests.items() if sha256}
    evaluation = json.loads((found["evaluation"].path / "evaluation.json").read_text(encoding="utf-8"))
    told = _told(events)
    costs = {MAKERS[kind]: spent for kind, artifact in found.items() if (spent := cost.known(store, artifact.sha256))}
    return {
        "schema": SCHEMA,
        "run": events.parent.name if events else None,
        "verdict": outcome.verdict(evaluation["verdict"], registered),
        "reasons": evaluation["reasons"],
        "registered": _registered(registered),
        "data": _data(found["dataset"]),
        "revision": {name: version.get(name) for name in ("tag", "rev", "md5", "uri")},
        "training": _training(found["model"]),
        "evaluation": _evaluation(found["evaluation"], evaluation),
        "package": _package(found.get("repository")),
        "lineage": _lineage(found, version, registered),
        "stages": told,
        "spent": _sum(told) if events else None,
        "costs": costs,
        "cost_to_make": _sum(costs.values()),
        "produced_by": found["model"].manifest.produced_by,
        "recipe": {"seed": found["model"].manifest.seed, **found["model"].manifest.config},
    }


def _registered(registered: Mapping[str, Any]) -> Record:
    moved = registered.get("moved") or {}
    aliases = outcome.aliases(registered, moved)
    return {"name": registered["name"], "version": registered["version"], "aliases": aliases, "replaced": moved.get("from")}


def _data(dataset: Artifact) -> Record:
    manifest = dataset.manifest
    return {
        "sha256": dataset.sha256,
        "sources": [{"uri": i.uri, "sha256": i.content_sha256} for i in manifest.inputs if i.kind == "raw"],
        "rows": manifest.summary["rows"],
        "splits": manifest.summary["splits"],
        "kind": manifest.summary["rows_kind"],
        "dropped": _dropped(dataset.path / "rejected.parquet"),
        "unreadable": [json.loads(line) for line in islice(_lines(dataset.path / "quarantine.jsonl"), 10)],
    }


def _dropped(path: Path) -> list[Record]:
    """The first few dropped rows of each reason, without the personal data that rows may keep: a page is shown around."""
    import pyarrow.parquet as parquet

    seen: Counter[str] = Counter()
    chosen = []
    batches = parquet.ParquetFile(path).iter_batches(1000, columns=["reason", "detail", "source", "line", "text"])
    for row in (row for batch in batches for row in batch.to_pylist()):
        seen[row["reason"]] += 1
        if seen[row["reason"]] <= EXAMPLES:
            chosen.append({**row, "detail": masked(row["detail"]), "text": _short(masked(row["text"]))})
    return sorted(chosen, key=lambda row: str(row["reason"]))


def _training(model: Artifact) -> Record:
    curve = [json.loads(line) for line in _lines(model.path / "training.jsonl")]
    return {"sha256": model.sha256, **model.manifest.summary, "curve": curve}


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.strip())


def _evaluation(artifact: Artifact, values: Mapping[str, Any]) -> Record:
    named = {name: values[name] for name in ("metrics", "rules", "items", "answer_tokens")}
    return {"sha256": artifact.sha256, **named, "answers": _answers(artifact.path / "predictions.parquet")}


def _answers(path: Path) -> list[Record]:
    """The first items that every model answered: prompt, reference, and each model's answer."""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    roles = [name for name in ("base_answer", "candidate_answer", "incumbent_answer") if name in file.schema_arrow.names]
    batches = file.iter_batches(1000, columns=["prompt", "reference", *roles])
    rows = islice((r for batch in batches for r in batch.to_pylist() if r["candidate_answer"] is not None), ANSWERS)
    return [{name: _short(value) for name, value in row.items() if value is not None} for row in rows]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def _package(repository: Artifact | None) -> Record | None:
    """None where nothing was packaged; with `proof` None where no server could prove it."""
    if repository is None:
        return None
    kept = json.loads((repository.path / "proof.json").read_text(encoding="utf-8"))
    summary = repository.manifest.summary
    return {
        "sha256": repository.sha256,
        "model_name": summary["model_name"],
        "backend": summary["backend"],
        "proof": summary["proof"],
        "unproven_because": summary.get("unproven_because"),
        "answers": kept.get("answers", []),
    }


def _lineage(found: Mapping[str, Artifact], version: Mapping[str, Any], registered: Mapping[str, Any]) -> list[Record]:
    """Every link from the registered version back to the raw files: {"kind", "sha256", "uri", "inputs"}, inputs by digest."""
    named = f"models:/{registered['name']}/{registered['version']}"
    newest = [found[kind].sha256 for kind in ("repository", "evaluation", "model") if kind in found]
    links = [{"kind": "version", "sha256": "", "uri": named, "inputs": newest}]
    links += [_link(artifact.manifest) for kind in ("evaluation", "repository", "model", "dataset") if (artifact := found.get(kind))]
    have = {link["sha256"] for link in links}
    outside = {i.content_sha256: i for artifact in found.values() for i in _made_from(artifact.manifest) if i.content_sha256 not in have}
    links += [{"kind": i.kind, "sha256": sha256, "uri": i.uri, "inputs": []} for sha256, i in outside.items()]
    for link in links:
        link["uri"] = str(version.get("uri", "")) if link["kind"] == "dataset" else link["uri"]
    return links


def _link(manifest: Manifest) -> Record:
    inputs = list(dict.fromkeys(i.content_sha256 for i in _made_from(manifest)))
    return {"kind": manifest.kind, "sha256": manifest.content_sha256, "uri": f"store:{manifest.content_sha256}", "inputs": inputs}


def _made_from(manifest: Manifest) -> list[Input]:
    """Inputs without those that a dataset was only compared with."""
    return [one for one in manifest.inputs if one.kind not in ("earlier", "evaluation_set")]


def _told(events: Path | None) -> list[Record]:
    """What the run's own events tell of each finished stage: {"name", "cached", "seconds", "cpu_seconds", "gpu_seconds"}."""
    if events is None:
        return []
    ended = [event for line in _lines(events) if (event := progress.event_in(line)) and event["event"] == "finished"]
    return [{"name": event["stage"], "cached": bool(event["cached"]), **_spent(event)} for event in ended]


def _spent(values: Mapping[str, Any]) -> cost.Cost:
    return {name: float(values[name]) for name in ("seconds", "cpu_seconds", "gpu_seconds")}


def _sum(stages: Iterable[Mapping[str, Any]]) -> cost.Cost:
    total: Counter[str] = Counter()
    for stage in stages:
        total.update({name: round(value * 1000) for name, value in _spent(stage).items()})
    return {name: total[name] / 1000 for name in ("seconds", "cpu_seconds", "gpu_seconds")}


def publish(step: Step, digests: Mapping[str, str], version: Mapping[str, Any], registered: Mapping[str, Any], shown: str) -> None:
    """Make report.html and report.json of a run: in its folder on this machine, with its MLflow run, and at `shown` for the Kubeflow UI."""
    step.reporter.step("gathering the evidence")
    repository = registered["tags"].get("tuneline.repository_sha256", "")
    record = gather(step.workdir.store, {**digests, "repository": repository}, version, registered, step.run_events)
    html = page.render(record)
    path = Path(shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        folder = step.run_events.parent if step.run_events else Path(scratch)
        write(record, folder, html)
        tracking.log_files(step.tracked, folder / "report.html", folder / "report.json")


def write(record: Mapping[str, Any], folder: Path, html: str) -> None:
    """report.json and report.html in `folder`, each whole or not at all."""
    artifacts.write_atomically(folder / "report.json", json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n")
    artifacts.write_atomically(folder / "report.html", html)
