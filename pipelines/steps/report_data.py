"""Data of a run's report: one record from the run's artifacts, whose digests are verified on loading."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.cost import budgets, stage_cost
from components.common.personal_data import mask
from components.common.pipeline_step import STAGE_BY_ARTIFACT, Step
from components.common.reporting import mlflow_tracking
from components.common.runtime import reporters, url_credentials
from components.common.workspace import artifact_store
from pipelines.steps import registry_outcome, report_page

REPORT_SCHEMA = "tuneline/report/v1"
EXAMPLES_PER_REASON = 2
MAX_EXAMPLE_CHARACTERS = 400
MAX_ANSWERS = 6
MAX_UNREADABLE = 10
BATCH_ROWS = 1000
Record = dict[str, Any]
Values = Mapping[str, Any]


def collect_report_data(
    store: Path,
    digests: Mapping[str, str],
    version: Values,
    registered: Values,
    events: Path | None = None,
    tracked: Mapping[str, str] | None = None,
) -> Record:
    """Return the record of a run: the content of report.json.

    Args:
        store: Folder of the artifact store.
        digests: Digests of the artifacts by kind; the digest of a missing artifact is empty.
        version: The dataset's revision.
        registered: The registration's result for the model version.
        events: The run's event file; None on a cluster.
        tracked: Result of `mlflow_tracking.describe_run`; None without an MLflow run.

    Raises:
        ArtifactDamagedError: a digest does not match.
    """
    found = {kind: artifact_store.load_artifact(store, sha256, kind) for kind, sha256 in digests.items() if sha256}
    evaluation = json.loads((found["evaluation"].path / "evaluation.json").read_text(encoding="utf-8"))
    stages = _list_stages(events) if events else []
    costs = {
        STAGE_BY_ARTIFACT[kind]: spent
        for kind, artifact in found.items()
        if (spent := stage_cost.read_cost(store, artifact.sha256))
    }
    package = _describe_package(found["repository"]) if "repository" in found else None
    moved, model, tracked = registered.get("moved") or {}, found["model"], tracked or {}
    return {
        "schema": REPORT_SCHEMA,
        "date": tracked.get("date"),
        "author": tracked.get("author"),
        "base_model": _describe_base_model(model),
        "links": _build_urls(found, registered, events, tracked),
        "run": events.parent.name if events else None,
        "verdict": registry_outcome.determine_verdict(evaluation["verdict"], registered),
        "reasons": evaluation["reasons"],
        "registered": {
            "name": registered["name"],
            "version": registered["version"],
            "aliases": registry_outcome.list_aliases(registered, moved),
            "replaced": moved.get("from"),
        },
        "data": _describe_dataset(found["dataset"]),
        "revision": {name: version.get(name) for name in ("tag", "rev", "md5", "uri")},
        "kind": model.manifest.kind,
        "training": {
            "sha256": model.sha256,
            **model.manifest.summary,
            "curve": [json.loads(line) for line in _read_lines(model.path / "training.jsonl")],
        },
        "evaluation": {
            "sha256": found["evaluation"].sha256,
            "metrics": evaluation["metrics"],
            "rules": evaluation["rules"],
            "items": evaluation["items"],
            "answer_tokens": evaluation["answer_tokens"],
            "answers": _sample_answers(found["evaluation"].path / "predictions.parquet"),
        },
        "package": package,
        "lineage": _list_links(found, version, registered),
        "stages": stages,
        "spent": stage_cost.add_costs(stages) if events else None,
        "costs": costs,
        "cost_to_make": stage_cost.add_costs(costs.values()),
        "rates": budgets.load_meter().rates.model_dump(mode="json"),
        "produced_by": model.manifest.produced_by,
        "recipe": {"seed": model.manifest.seed, **model.manifest.config},
    }


def _list_stages(events: Path) -> list[Record]:
    """Return the finished stages of a run with their costs."""
    stages = []
    for line in _read_lines(events):
        event = reporters.parse_event(line)
        if event and event["event"] == "finished":
            stages.append({"name": event["stage"], "cached": bool(event["cached"]), **stage_cost.add_costs([event])})
    return stages


def _describe_package(repository: Artifact) -> Record:
    """Return the package's backend, its test results in Triton and, if quantized, the measured increase in loss."""
    proof = json.loads((repository.path / "proof.json").read_text(encoding="utf-8"))
    summary = repository.manifest.summary
    return {
        "sha256": repository.sha256,
        "model_name": summary["model_name"],
        "backend": summary["backend"],
        "proof": summary["proof"],  # None if no server could prove the package
        "unproven_because": summary.get("unproven_because"),
        "answers": proof.get("answers", []),
        **({"quantization": measured} if (measured := summary.get("quantization")) else {}),
    }


def _build_urls(
    found: Mapping[str, Artifact], registered: Values, events: Path | None, tracked: Mapping[str, str]
) -> Record:
    """Return the URLs of the artifacts' reports, the run and the model version."""
    # Files of a local run only: a reader of a cluster's report cannot open paths of a pod.
    reports = {kind: (artifact.path.absolute() / "report.html").as_uri() for kind, artifact in found.items() if events}
    return {
        **reports,
        "run": tracked.get("run_url") or (events.parent.absolute().as_uri() if events else ""),
        "version": mlflow_tracking.build_version_url(registered["name"], registered["version"]),
    }


def _describe_base_model(model: Artifact) -> Record:
    uri = next((item.uri for item in model.manifest.inputs if item.kind == "base_model"), "")
    base = url_credentials.remove_credentials(uri)
    return {"name": Path(base).name if base.startswith("/") else base, "uri": base}


def _describe_dataset(dataset: Artifact) -> Record:
    """Return the dataset's summary, with the evaluation sets, and the first rejected rows of each reason."""
    # Personal data is masked, because the report is shared more widely than the dataset.
    manifest, summary = dataset.manifest, dataset.manifest.summary
    counts: Counter[str] = Counter()
    rejected = []
    for row in _read_rows(dataset.path / "rejected.parquet", ["reason", "detail", "source", "line", "text"]):
        counts[row["reason"]] += 1
        if counts[row["reason"]] <= EXAMPLES_PER_REASON:
            rejected.append({**row, "detail": mask(row["detail"]), "text": _shorten(mask(row["text"]))})
    unreadable = islice(_read_lines(dataset.path / "quarantine.jsonl"), MAX_UNREADABLE)
    return {
        "sha256": dataset.sha256,
        "sources": [{"uri": i.uri, "sha256": i.content_sha256} for i in manifest.inputs if i.kind == "raw"],
        "rows": summary["rows"],
        "splits": summary["splits"],
        "kind": summary["rows_kind"],
        "evaluation_sets": summary.get("evaluation_sets", {}),  # not in datasets of earlier releases
        "dropped": sorted(rejected, key=lambda row: str(row["reason"])),
        "unreadable": [json.loads(line) for line in unreadable],
    }


def _sample_answers(path: Path) -> list[Record]:
    """Return the first items with generated answers: prompt, reference, and each model's answer."""
    columns = [
        "prompt",
        "reference",
        "base_answer",
        "candidate_answer",
        "incumbent_answer",
    ]  # missing columns are skipped
    rows = (row for row in _read_rows(path, columns) if row["candidate_answer"] is not None)
    return [
        {name: _shorten(value) for name, value in row.items() if value is not None} for row in islice(rows, MAX_ANSWERS)
    ]


def _read_rows(path: Path, columns: list[str]) -> Iterator[Record]:
    import pyarrow.parquet as parquet

    for batch in parquet.ParquetFile(path).iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.to_pylist()


def _read_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.strip())


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_EXAMPLE_CHARACTERS else text[:MAX_EXAMPLE_CHARACTERS] + " …"


def _list_links(found: Mapping[str, Artifact], version: Values, registered: Values) -> list[Record]:
    """Return the links from the registered version to the raw files: {"kind", "sha256", "uri", "inputs"}."""
    uri = f"models:/{registered['name']}/{registered['version']}"
    newest = [found[kind].sha256 for kind in ("repository", "evaluation", "model") if kind in found]
    links: list[Record] = [{"kind": "version", "sha256": "", "uri": uri, "inputs": newest}]
    # Excludes inputs that a dataset was only compared with, or that only scored its rows.
    excluded = ("earlier", "evaluation_set", "quality_examples", "scoring_model")
    used = {
        kind: {i.content_sha256: i for i in artifact.manifest.inputs if i.kind not in excluded}
        for kind, artifact in found.items()
    }
    for kind in ("evaluation", "repository", "model", "dataset"):
        if kind in found:
            sha256 = found[kind].sha256
            links.append({"kind": kind, "sha256": sha256, "uri": f"store:{sha256}", "inputs": list(used[kind])})
    known = {link["sha256"] for link in links}
    for sha256, source in {sha256: i for inputs in used.values() for sha256, i in inputs.items()}.items():
        if sha256 not in known:
            links.append({"kind": source.kind, "sha256": sha256, "uri": source.uri, "inputs": []})
    for link in links:
        if link["kind"] == "dataset":
            link["uri"] = str(version.get("uri", ""))
    return links


def publish_report(step: Step, digests: Mapping[str, str], version: Values, registered: Values, kfp_path: str) -> None:
    """Write report.html and report.json to the run's folder and MLflow run, and a copy of the page for Kubeflow.

    Args:
        step: The step that writes the report.
        digests: Digests of dataset, model and evaluation by kind.
        version: The dataset's revision.
        registered: The registration's result for the model version.
        kfp_path: Path of the copy for the Kubeflow UI.
    """
    step.reporter.step("collecting the report's data")
    repository = registered["tags"].get("tuneline.repository_sha256", "")
    all_digests = {**digests, "repository": repository}
    tracked = mlflow_tracking.describe_run(step.mlflow_run)
    record = collect_report_data(step.workdir.store, all_digests, version, registered, step.run_events_path, tracked)
    html = report_page.render_report(record)
    path = Path(kfp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        folder = step.run_events_path.parent if step.run_events_path else Path(scratch)
        text = json.dumps(record, indent=2, ensure_ascii=False, default=str)
        artifact_folder.write_atomically(folder / "report.json", text + "\n")
        artifact_folder.write_atomically(folder / "report.html", html)
        mlflow_tracking.log_files(step.mlflow_run, folder / "report.html", folder / "report.json")
    links = {name: record["links"].get(name, "") for name in ("run", "version")}
    outcome = {name: record[name] for name in ("registered", "verdict", "reasons")}
    step.report_result(**digests, version=json.dumps(version), links=links, **outcome)
