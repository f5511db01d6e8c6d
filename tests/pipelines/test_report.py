"""Every figure of the run report comes from an artifact.

Stress tier: tests that run the pipeline once more.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from components.common.artifacts import artifact_folder
from components.common.reporting import html_report
from components.common.runtime import reporters
from pipelines.steps import report_data, report_page
from tests.pipelines.command import answer, answer_in_process
from tests.pipelines.project import run

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
TICKS = ("xtick", "ytick")


class TextParser(HTMLParser):
    """Collect the visible texts of a page, without style sheets, comments and the tick labels of plots."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self._open.append(f"{tag} {dict(attrs).get('id') or ''}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        while self._open and not self._open.pop().startswith(f"{tag} "):
            pass

    def handle_data(self, data: str) -> None:
        hidden = any(
            tag.startswith(("style ", "metadata ")) or any(f" {tick}" in tag for tick in TICKS) for tag in self._open
        )
        if data.strip() and not hidden:
            self.texts.append(data.strip())


def read_texts(page: Path) -> list[str]:
    reader = TextParser()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.texts


def iterate_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from iterate_leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from iterate_leaves(inner)
    else:
        yield value


def collect_values(result: dict[str, Any], project: Path, costs: Path | None = None) -> list[Any]:
    """Return every value in the artifacts, the registry, the data repository and the run record.

    `costs` is a folder with the costs of the artifacts, if the costs in the store were overwritten.
    """
    values: list[Any] = []
    for path in map(Path, filter(None, result["artifacts"].values())):
        values += iterate_leaves(artifact_folder.read(path).manifest.model_dump())
        for file in (*path.glob("*.json"), *path.glob("*.jsonl")):
            values += [leaf for line in _read_documents(file) for leaf in iterate_leaves(line)]
        for file in path.glob("*.parquet"):
            values += iterate_leaves(parquet.read_table(file).to_pylist())
        values += iterate_leaves(json.loads(((costs or path.parent / "costs") / f"{path.name}.json").read_text()))
    model = artifact_folder.read(Path(result["artifacts"]["model"])).manifest.summary
    values += [round(100 * min(model["rows_seen"] / model["rows"]["train"], 1)), read_origin(result)[0]]
    folder = Path(result["report"]).parent
    values += [leaf for line in _read_documents(folder / "events.jsonl") for leaf in iterate_leaves(line)]
    return [*values, *iterate_leaves(result), *iterate_leaves(answer("data", "list", "--workdir", "wd", cwd=project))]


def read_origin(result: dict[str, Any]) -> tuple[str, str]:
    """Return the start and the user of the run as MLflow recorded them."""
    import mlflow

    run = mlflow.MlflowClient(result["mlflow"]["tracking_uri"]).get_run(result["mlflow"]["run_id"])
    started = datetime.fromtimestamp(run.info.start_time / 1000, UTC)
    return f"{started:%Y-%m-%d %H:%M} UTC", run.data.tags["mlflow.user"]


def _read_documents(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in text.splitlines() if line.strip()]
        if file.suffix == ".jsonl"
        else [json.loads(text)]
    )


def format_numbers(values: list[Any], costs: list[dict[str, float]]) -> set[str]:
    """Format the numbers of the artifacts as the page does; it computes only sums of costs and their hours."""
    plain = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    # Sum whole milliseconds, the unit of the events: a sum of floats may be slightly below the half that is rounded up.
    sums = [
        sum(round(cost[name] * 1000) for cost in costs) / 1000 for name in ("seconds", "cpu_seconds", "gpu_seconds")
    ]
    hours = [v / 3600 for v in [*plain, *sums]]
    return (
        {html_report.format_value(v) for v in [*plain, *sums, *hours]}
        | {html_report.format_value(float(v)) for v in plain}
        | {str(v) for v in plain}
        | {"95"}
    )


def find_unsupported_texts(page: Path, values: list[Any], costs: list[list[dict[str, float]]]) -> list[str]:
    """Return the texts with a number that no artifact has; verbatim texts of an artifact are supported."""
    known_text = "\n".join(str(v) for v in values)
    known_numbers = set().union(*(format_numbers(values, group) for group in costs))
    pieces = [
        piece.removesuffix(" …").removeprefix("run ") for text in read_texts(page) for piece in re.split(" · ", text)
    ]
    return [
        piece
        for piece in pieces
        if piece not in known_text and not all(number in known_numbers for number in NUMBER.findall(piece))
    ]


@pytest.fixture(scope="module")
def page(first: dict[str, Any]) -> Path:
    return Path(first["report"])


def test_each_number_on_the_page_is_in_an_artifact(first: dict[str, Any], project: Path, page: Path) -> None:
    values = collect_values(first, project, project / "costs")
    assert find_unsupported_texts(page, values, read_costs(first, project / "costs")) == []


def read_costs(result: dict[str, Any], costs: Path | None = None) -> list[list[dict[str, float]]]:
    """Return the costs of the steps of this run, and the costs recorded with the artifacts."""
    events = _read_documents(Path(result["report"]).parent / "events.jsonl")
    steps = [e for e in events if e["event"] == "finished" and e["stage"] != "report"]
    paths = [(costs or Path(p).parent / "costs") / f"{Path(p).name}.json" for p in result["artifacts"].values() if p]
    return [steps, [json.loads(path.read_text()) for path in paths]]


def test_number_without_an_artifact_is_detected(
    first: dict[str, Any], project: Path, page: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "report.html"
    forged.write_text(page.read_text().replace("</h1>", " with 98,765 rows</h1>"))
    unsupported = find_unsupported_texts(
        forged, collect_values(first, project, project / "costs"), read_costs(first, project / "costs")
    )
    assert len(unsupported) == 1
    assert "98,765" in unsupported[0]


def test_figures_are_in_their_sections(first: dict[str, Any], page: Path) -> None:
    texts = read_texts(page)
    loss = json.loads((Path(first["artifacts"]["evaluation"]) / "evaluation.json").read_text())["metrics"]["held_out"][
        "loss"
    ]
    rows = artifact_folder.read(Path(first["artifacts"]["dataset"])).manifest.summary["rows"]
    tuned = artifact_folder.read(Path(first["artifacts"]["model"])).manifest.summary
    proof = artifact_folder.read(Path(first["artifacts"]["repository"])).manifest.summary["proof"]
    for title, value in {
        "held-out loss of the base": loss["base"],
        "held-out loss of the candidate": loss["candidate"],
        "held-out items": loss["n"],
        "optimizer steps": tuned["steps"],
        "tokens trained on": tuned["tokens"],
        "golden prompts": proof["golden_prompts"],
        "matched": proof["matched"],
    }.items():
        assert texts[texts.index(title) - 1] == html_report.format_value(value), title
    assert f"rows in {rows['in']:,}" in texts
    assert f"kept {rows['kept']:,}" in texts
    assert texts[texts.index("aliases") - 1] == "candidate, challenger, champion"


def test_page_states_its_origin_and_links_the_files(first: dict[str, Any], page: Path) -> None:
    texts, html = read_texts(page), page.read_text()
    date, author = read_origin(first)
    stated = {
        name: texts[texts.index(name) + 1] for name in ("Date", "Author", "Base model", "Dataset", "Registered model")
    }
    assert list(stated.values()) == [date, author, "tiny", "dataset-v1", "tiny-helper version 1"]
    files = [Path(folder, "report.html") for folder in first["artifacts"].values()]
    for file in (*files, page.parent):
        assert file.exists()
        assert f'<a href="{file.as_uri()}">' in html
    assert "not applicable" in texts
    assert texts.index("Summary") < texts.index("Verdict")


def test_page_lineage_links_the_version_to_the_raw_file(first: dict[str, Any], page: Path) -> None:
    texts = read_texts(page)
    raw = artifact_folder.read(Path(first["artifacts"]["dataset"])).manifest.inputs[0]
    links = ["registered version", "Triton package", "tuned model", "dataset", "raw file"]
    positions = [max(i for i, text in enumerate(texts) if text == link) for link in links]
    assert positions == sorted(positions), "the links are not in the order of the chain"
    assert texts[positions[1] + 1] == Path(first["artifacts"]["repository"]).name
    assert texts[positions[4] + 1] == raw.content_sha256


def test_page_loads_nothing_and_runs_no_script(page: Path) -> None:
    html = page.read_text()
    assert "<script" not in html
    loading = re.sub(r"<a href=", "<a ", html)  # a link loads nothing until a reader follows it
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", loading), "nothing is loaded from elsewhere"
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html


def test_page_is_stored_in_mlflow_and_as_a_pipeline_artifact(first: dict[str, Any], page: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(first["mlflow"]["tracking_uri"])
    names = {file.path for file in client.list_artifacts(first["mlflow"]["run_id"])}
    assert {"report.html", "report.json"} <= names
    page_files = [path for path in page.parent.glob("kfp/**/page*") if path.is_file()]
    assert [path.read_bytes() for path in page_files] == [page.read_bytes()]


@pytest.mark.stress
def test_cached_run_reports_the_original_cost(first: dict[str, Any], project: Path) -> None:
    second = run(project, "wd")
    texts = read_texts(Path(second["report"]))
    assert second["verdict"] == "unchanged"
    assert "The model was already the champion before this run; no alias moved." in texts
    assert texts.count("cached; cost of the original run") == 4
    assert find_unsupported_texts(Path(second["report"]), collect_values(second, project), read_costs(second)) == []


@pytest.mark.stress
def test_report_of_a_refused_candidate_has_the_reason(first: dict[str, Any], project: Path) -> None:
    refused = run(project, "wd", "--set", "fine_tuning.learning_rate=1e-6")
    texts = read_texts(Path(refused["report"]))
    assert refused["verdict"] == "refused"
    assert texts[texts.index("verdict") - 1] == "refused"
    assert "Not packaged: the verdict is refused, and only accepted candidates are packaged." in texts
    reasons = json.loads((Path(refused["artifacts"]["evaluation"]) / "evaluation.json").read_text())["reasons"]
    assert set(reasons) <= set(texts)
    assert find_unsupported_texts(Path(refused["report"]), collect_values(refused, project), read_costs(refused)) == []


def test_report_on_a_cluster_has_only_the_cost_of_the_artifacts(first: dict[str, Any], project: Path) -> None:
    digests = {kind: Path(path).name for kind, path in first["artifacts"].items()}
    registered = {"name": "tiny-helper", "version": "1", "aliases": ["candidate"], "moved": None}
    version = {"tag": "dataset-v1", "rev": "1" * 40, "md5": "2" * 32, "uri": "dvc://data"}
    record = report_data.collect_report_data(project / "wd" / "store", digests, version, registered)
    path = project / "cluster.html"
    path.write_text(report_page.render_report(record))
    texts = read_texts(path)
    assert "a run on a cluster" in texts
    assert texts.count("recorded cost") == 4
    assert not any("cached;" in text or "all steps of this run" in text for text in texts)


def test_comparison_with_a_copy_of_a_run_has_no_differences(first: dict[str, Any], project: Path) -> None:
    folder = Path(first["report"]).parent
    shutil.copytree(folder, project / "copied" / "runs" / "copy")
    page = project / "comparison.html"
    result = answer_in_process("compare", folder, "copied", "-o", page, cwd=project)
    assert (result["parameters"], result["warnings"]) == ({}, [])
    evaluation = json.loads(Path(first["artifacts"]["evaluation"], "evaluation.json").read_text())
    compared = 0
    for task, by_metric in evaluation["metrics"].items():
        for metric, values in by_metric.items():
            own, copied = result["metrics"][task][metric]
            assert own == {**values, "difference": None}
            if copied["difference"]:
                compared += 1
                assert copied["difference"] == {"value": 0.0, "ci95": [0.0, 0.0]}
    assert compared >= len(evaluation["metrics"])
    assert len(result["answers"]) == 6
    assert all(answer["answers"][0] == answer["answers"][1] for answer in result["answers"])
    assert result["runs"][0]["curve"][-1]["step"] == 30
    texts = read_texts(page)
    assert {"Metrics", "held_out.loss", "The configurations are equal."} <= set(texts)
    assert not re.search("<script|(src|href)=.?http", page.read_text(encoding="utf-8"))


def test_truncated_event_is_skipped(tmp_path: Path) -> None:
    event = {
        "time": 1.0,
        "stage": "resolve",
        "event": "finished",
        "cached": False,
        "seconds": 1.0,
        "cpu_seconds": 2.0,
        "gpu_seconds": 0.0,
    }
    assert reporters.parse_event(json.dumps(event)) == event
    assert reporters.parse_event(json.dumps(event)[:40]) is None
    assert reporters.parse_event("7") is None
