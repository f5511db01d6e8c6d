"""The page of evidence says nothing that the artifacts do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from components.common import artifacts, progress, report
from pipelines import evidence
from pipelines import page as rendered
from tests.pipelines.command import answer
from tests.pipelines.project import run

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
TICKS = ("xtick", "ytick")


class Texts(HTMLParser):
    """The texts a reader sees: no style sheet, no comments, no tick labels of a plot's axes, which are places and not findings."""

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
        hidden = any(o.startswith(("style ", "metadata ")) or any(f" {tick}" in o for tick in TICKS) for o in self._open)
        if data.strip() and not hidden:
            self.texts.append(data.strip())


def texts(page: Path) -> list[str]:
    reader = Texts()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.texts


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def truth(result: dict[str, Any], project: Path, costs: Path | None = None) -> list[Any]:
    """Every value that stands in the artifacts, the registry, the data repository and the run's own record. `costs`: what the artifacts
    cost, where that is not what the store says now."""
    found: list[Any] = []
    for path in map(Path, filter(None, result["artifacts"].values())):
        found += leaves(artifacts.read(path).manifest.model_dump())
        for file in (*path.glob("*.json"), *path.glob("*.jsonl")):
            found += [leaf for line in _documents(file) for leaf in leaves(line)]
        for file in path.glob("*.parquet"):
            found += leaves(parquet.read_table(file).to_pylist())
        found += leaves(json.loads(((costs or path.parent / "costs") / f"{path.name}.json").read_text()))
    folder = Path(result["report"]).parent
    found += [leaf for line in _documents(folder / "events.jsonl") for leaf in leaves(line)]
    return [*found, *leaves(result), *leaves(answer("data", "list", "--workdir", "wd", cwd=project))]


def _documents(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()] if file.suffix == ".jsonl" else [json.loads(text)]


def numbers_as_shown(values: list[Any], costs: list[dict[str, float]]) -> set[str]:
    """How the page writes the artifacts' numbers; sums of costs and their hours are the only ones it works out."""
    plain = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    # In whole milliseconds, as they are told: a sum of floats may end a hair below the half that is rounded up.
    sums = [sum(round(cost[name] * 1000) for cost in costs) / 1000 for name in ("seconds", "cpu_seconds", "gpu_seconds")]
    hours = [v / 3600 for v in [*plain, *sums]]
    return {report.show(v) for v in [*plain, *sums, *hours]} | {report.show(float(v)) for v in plain} | {str(v) for v in plain} | {"95"}


def unfounded(page: Path, values: list[Any], costs: list[list[dict[str, float]]]) -> list[str]:
    """Texts with a number that no artifact has. A text that an artifact holds word for word, a prompt or a digest, is founded."""
    said = "\n".join(str(v) for v in values)
    shown = set().union(*(numbers_as_shown(values, one) for one in costs))
    whole = [piece.removesuffix(" …").removeprefix("run ") for text in texts(page) for piece in re.split(" · ", text)]
    return [t for t in whole if t not in said and not all(n in shown for n in NUMBER.findall(t))]


@pytest.fixture(scope="module")
def page(first: dict[str, Any]) -> Path:
    return Path(first["report"])


def test_each_number_on_the_page_is_found_in_an_artifact(first: dict[str, Any], project: Path, page: Path) -> None:
    values = truth(first, project, project / "costs")
    assert unfounded(page, values, costs_of(first, project / "costs")) == []


def costs_of(result: dict[str, Any], costs: Path | None = None) -> list[list[dict[str, float]]]:
    """What each step of the run cost, and what the artifacts cost when they were made."""
    events = _documents(Path(result["report"]).parent / "events.jsonl")
    steps = [e for e in events if e["event"] == "finished" and e["stage"] != "report"]
    made = [(costs or Path(p).parent / "costs") / f"{Path(p).name}.json" for p in result["artifacts"].values() if p]
    return [steps, [json.loads(path.read_text()) for path in made]]


def test_a_number_that_no_artifact_has_would_be_noticed(first: dict[str, Any], project: Path, page: Path, tmp_path: Path) -> None:
    forged = tmp_path / "report.html"
    forged.write_text(page.read_text().replace("</h1>", " with 98,765 rows</h1>"))
    found = unfounded(forged, truth(first, project, project / "costs"), costs_of(first, project / "costs"))
    assert len(found) == 1
    assert "98,765" in found[0]


def test_the_figures_stand_where_they_belong(first: dict[str, Any], page: Path) -> None:
    said = texts(page)
    loss = json.loads((Path(first["artifacts"]["evaluation"]) / "evaluation.json").read_text())["metrics"]["held_out"]["loss"]
    rows = artifacts.read(Path(first["artifacts"]["dataset"])).manifest.summary["rows"]
    tuned = artifacts.read(Path(first["artifacts"]["model"])).manifest.summary
    proof = artifacts.read(Path(first["artifacts"]["repository"])).manifest.summary["proof"]
    for title, value in {
        "held-out loss of the base": loss["base"],
        "held-out loss of the candidate": loss["candidate"],
        "held-out items": loss["n"],
        "optimizer steps": tuned["steps"],
        "tokens trained on": tuned["tokens"],
        "golden prompts": proof["golden_prompts"],
        "matched": proof["matched"],
    }.items():
        assert said[said.index(title) - 1] == report.show(value), title
    assert f"rows in {rows['in']:,}" in said
    assert f"kept {rows['kept']:,}" in said
    assert said[said.index("aliases") - 1] == "candidate, challenger, champion"


def test_lineage_on_the_page_goes_from_the_version_to_the_raw_file(first: dict[str, Any], page: Path) -> None:
    said = texts(page)
    raw = artifacts.read(Path(first["artifacts"]["dataset"])).manifest.inputs[0]
    links = ["registered version", "Triton package", "tuned model", "dataset", "raw file"]
    places = [max(i for i, text in enumerate(said) if text == link) for link in links]
    assert places == sorted(places), "each link stands below the one it was made into"
    assert said[places[1] + 1] == Path(first["artifacts"]["repository"]).name
    assert said[places[4] + 1] == raw.content_sha256


def test_the_page_needs_no_network_and_runs_no_script(page: Path) -> None:
    html = page.read_text()
    assert "<script" not in html
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", html), "nothing is loaded from elsewhere"
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html


def test_the_page_is_with_the_mlflow_run_and_an_html_artifact_of_the_pipeline(first: dict[str, Any], page: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(first["mlflow"]["tracking_uri"])
    names = {file.path for file in client.list_artifacts(first["mlflow"]["run_id"])}
    assert {"report.html", "report.json"} <= names
    shown = [path for path in page.parent.glob("kfp/**/page*") if path.is_file()]
    assert [path.read_bytes() for path in shown] == [page.read_bytes()]


@pytest.mark.long
def test_a_run_from_the_cache_says_what_its_artifacts_cost_when_they_were_made(first: dict[str, Any], project: Path) -> None:
    again = run(project, "wd")
    said = texts(Path(again["report"]))
    assert again["verdict"] == "unchanged"
    assert "This very model was in service before the run, so nothing moved." in said
    assert said.count("from the cache; cost when it was made") == 4
    assert unfounded(Path(again["report"]), truth(again, project), costs_of(again)) == []


@pytest.mark.long
def test_a_refused_candidate_has_a_page_that_says_why(first: dict[str, Any], project: Path) -> None:
    refused = run(project, "wd", "--set", "fine_tuning.learning_rate=1e-6")
    said = texts(Path(refused["report"]))
    assert refused["verdict"] == "refused"
    assert said[said.index("verdict") - 1] == "refused"
    assert "A candidate that was refused is not packaged." in said
    reasons = json.loads((Path(refused["artifacts"]["evaluation"]) / "evaluation.json").read_text())["reasons"]
    assert set(reasons) <= set(said)
    assert unfounded(Path(refused["report"]), truth(refused, project), costs_of(refused)) == []


def test_on_a_cluster_the_page_claims_no_more_than_what_making_the_artifacts_cost(first: dict[str, Any], project: Path) -> None:
    digests = {kind: Path(path).name for kind, path in first["artifacts"].items()}
    registered = {"name": "tiny-helper", "version": "1", "aliases": ["candidate"], "moved": None}
    version = {"tag": "dataset-v1", "rev": "1" * 40, "md5": "2" * 32, "uri": "dvc://data"}
    record = evidence.gather(project / "wd" / "store", digests, version, registered)
    path = project / "cluster.html"
    path.write_text(rendered.render(record))
    said = texts(path)
    assert "a run on a cluster" in said
    assert said.count("cost when it was made") == 4
    assert not any("from the cache" in text or "all steps of this run" in text for text in said)


def test_a_torn_event_is_passed_over(tmp_path: Path) -> None:
    whole = {"time": 1.0, "stage": "resolve", "event": "finished", "cached": False, "seconds": 1.0, "cpu_seconds": 2.0, "gpu_seconds": 0.0}
    assert progress.event_in(json.dumps(whole)) == whole
    assert progress.event_in(json.dumps(whole)[:40]) is None
    assert progress.event_in("7") is None
