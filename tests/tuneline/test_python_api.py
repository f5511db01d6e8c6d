"""The public Python API: names, configuration objects, results, errors, and the process of the caller."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import tuneline
from components.common.reporting import html_report
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization, load_customization
from pipelines.planning import cluster_size
from pipelines.provenance.lineage import Lineage, Link
from pipelines.runs import child_run
from pipelines.runs.results import DatasetResult, EvaluationResult, ModelResult, RunArtifacts, RunResult, StageTime
from tests import api_reference
from tests.pipelines.command import ROOT, answer_in_process, environment, refusal
from tests.pipelines.project import CONFIGURATION
from tests.pipelines.test_compare import make_run
from tuneline import call_context
from tuneline.model_registry import ModelVersions

RUN = {
    "verdict": "accepted",
    "workdir": "/wd",
    "artifacts": {"dataset": "/s/" + "a" * 64, "model": "/s/" + "b" * 64, "evaluation": "/s/e", "repository": None},
    "mlflow": {
        "tracking_uri": "sqlite:///x",
        "run_id": "1",
        "model_name": "helper",
        "model_version": "3",
        "aliases": ["champion"],
    },
    "stages": [{"name": "resolve", "seconds": 2.5, "cached": False}],
    "seconds": 12.5,
    "report": "/wd/report.html",
    "run": "20260101-100000-aaaa",
    "cost": {"wall_hours": 0.0035},
}


def test_import_loads_no_library() -> None:
    """Importing the package takes milliseconds: nothing beyond the standard library is imported before a name is used."""
    script = (
        "import sys; before = set(sys.modules); import tuneline; print(*sorted({name.partition('.')[0] for name in "
        "set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-P", "-c", script]
    output = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    assert output.split() == ["tuneline"]


def test_names_are_lazy_typed_and_documented() -> None:
    """The names that type checkers see are those that exist at run time; each is documented."""
    module = ast.parse((ROOT / "tuneline" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in module.body if isinstance(node, ast.If))
    typed = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == tuneline._MODULES
    assert set(dir(tuneline)) == set(tuneline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tuneline.trian  # type: ignore[attr-defined]
    for name in tuneline.__all__:
        assert inspect.getdoc(getattr(tuneline, name)), name
    for name in ("run", "curate", "finetune", "evaluate", "package", "serve", "size", "compare"):
        document = inspect.getdoc(getattr(tuneline, name)) or ""
        assert f"{name}(" in document, name  # an example
        assert "Raises:" in document, name
        parameters = inspect.signature(getattr(tuneline, name)).parameters
        assert [one for one in parameters if f"    {one}: " not in document] == []


def test_reference_is_current() -> None:
    """`python -m tests.reference` generates the reference in docs/reference/python-api.md from the docstrings."""
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
    assert api_reference.render_page(text) == text


def test_customization_equals_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "customization.yaml").write_text(CONFIGURATION)
    loaded = Customization.load("customization.yaml", seed=5, fine_tuning={"max_steps": 7})
    changed = loaded.set("fine_tuning.lora.rank", 4).set("data_curation.sources", [Path("tickets.jsonl"), "/b.jsonl"])
    assert changed is loaded
    overrides = ["seed=5", "fine_tuning.max_steps=7", "fine_tuning.lora.rank=4", "data_curation.sources=[tickets.jsonl, /b.jsonl]"]  # fmt: skip
    expected = load_customization(Path("customization.yaml"), overrides)
    assert loaded.model_dump() == expected.model_dump()
    assert [entry.path for entry in loaded.data_curation.sources] == [str(tmp_path / "tickets.jsonl"), "/b.jsonl"]
    written = loaded.write(tmp_path / "written.yaml")
    assert load_customization(written).model_dump() == expected.model_dump()
    assert set(yaml.safe_load(written.read_text())["fine_tuning"]) < set(type(loaded.fine_tuning).model_fields)


def test_value_of_another_section_follows_a_shared_value(tmp_path: Path) -> None:
    customization = Customization.load(fine_tuning={"max_length": 128})
    assert customization.set("fine_tuning.max_length", 64).evaluation.max_length == 64


def test_assigned_values_are_checked_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections that no caller set start with default values; a key that is assigned to them counts as set."""
    monkeypatch.chdir(tmp_path)
    customization = Customization(data_curation={"sources": ["raw.jsonl"]})  # type: ignore[arg-type]
    customization.fine_tuning.lora.rank = 3
    customization.fine_tuning.max_length = 64
    checked = call_context.load(customization)
    assert (checked.fine_tuning.lora.rank, checked.evaluation.max_length) == (3, 64)
    (tmp_path / "folder").mkdir()
    assert load_customization(customization.write("folder/written.yaml")).model_dump() == checked.model_dump()
    assert [entry.path for entry in checked.data_curation.sources] == [str(tmp_path / "raw.jsonl")]
    customization.fine_tuning.batch_size = 0
    with pytest.raises(tuneline.TunelineError, match=r"fine_tuning\.batch_size: found 0; expected 1 or more"):
        tuneline.run(customization, tmp_path / "wd", dry_run=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fine_tuning.batch_size", 0, "fine_tuning.batch_size: found 0; expected 1 or more"),
        ("fine_tuning.learning_rat", 1e-3, "unknown key (did you mean learning_rate?)"),
        ("tuning.max_steps", 3, "tuning: unknown key (did you mean fine_tuning?)"),
    ],
)
def test_invalid_value_leaves_the_customization_unchanged(key: str, value: object, message: str) -> None:
    customization = Customization.load(fine_tuning={"max_steps": 7})
    before = customization.model_dump()
    with pytest.raises(tuneline.TunelineError) as caught:
        customization.set(key, value)
    assert message in caught.value.message
    assert caught.value.hint
    assert customization.model_dump() == before
    with pytest.raises(tuneline.TunelineError, match="automatic promotion requires 'default'"):
        customization.set("model_registry.auto_promote", True).set("evaluation.suite", "none").check()


def test_run_result_has_the_fields_of_the_json_object(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    plots = [html_report.plot_bars({name: 1.0}, x="rows", caption=name) for name in ("first", "second")]
    report.write_text(f"<h1>x</h1>{plots[0]}<p>y</p>\n{plots[1]}")
    result = RunResult.from_dict({**RUN, "report": str(report)})
    assert {one.name for one in fields(RunResult)} == set(RUN)
    assert json.loads(json.dumps(result.as_dict(), default=str)) == {**RUN, "report": str(report)}
    assert result.artifacts == RunArtifacts(Path("/s/" + "a" * 64), Path("/s/" + "b" * 64), Path("/s/e"), None)
    assert result.stages == [StageTime("resolve", 2.5, cached=False)]
    assert repr(result).startswith(
        "RunResult(run='20260101-100000-aaaa', verdict='accepted', model='helper/3', seconds=12.5"
    )
    shown = result._repr_html_()
    assert shown.endswith("".join(plots).replace(html_report.SCROLL_HINT, ""))
    assert "<h1>x</h1>" not in shown
    assert "Scroll sideways" not in shown


def test_results_are_short_and_escaped() -> None:
    model = ModelResult(Path("store") / ("c" * 64), "c" * 64, 3, 80, 1.5, None, 9.0, None)
    assert (
        repr(model)
        == "ModelResult(model=store/cccccccccccc…, steps=3, tokens=80, train_loss=1.5, validation_loss=None)"
    )
    assert "sweep" not in model.as_dict()
    evaluation = EvaluationResult(Path("e"), "d" * 64, "refused", ["<script>"], {})
    assert "&lt;script&gt;" in evaluation._repr_html_()


def test_paths_near_the_current_folder_are_relative_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Browsers open no file: address from the page of a notebook, and a shared notebook has no user's folder."""
    near, elsewhere = tmp_path / "project" / "my data", tmp_path / "project" / "notebooks"
    for folder in (near, elsewhere):
        folder.mkdir(parents=True)
    (near / "report.html").touch()
    result = DatasetResult(near, "d" * 64, {"in": 1200, "rejected": {"too_short": 3}}, {"train": 9}, {})
    monkeypatch.chdir(near.parent)
    assert '<a href="my%20data/report.html"' in result._repr_html_()
    assert "<td>in: 1,200, rejected: (too_short: 3)</td>" in result._repr_html_()
    monkeypatch.chdir(elsewhere)
    assert '<a href="../my%20data/report.html"' in result._repr_html_()
    customization = Customization.load(data_curation={"sources": ["../my data/raw.jsonl", "/mnt/raw.jsonl"]})
    shown = customization._repr_html_()
    assert "  - ../my data/raw.jsonl\n  - /mnt/raw.jsonl\n" in shown
    raw = Link("raw", "e" * 64, (near / "raw.jsonl").as_uri().replace("%20", " "))
    assert "<td>../my data/raw.jsonl</td>" in Lineage("helper", "3", None, [raw])._repr_html_()
    monkeypatch.chdir("/")
    assert f'<a href="{(near / "report.html").as_uri()}"' in result._repr_html_()


def test_customization_is_shown_by_the_keys_that_were_set() -> None:
    customization = Customization.load(fine_tuning={"max_steps": 7})
    customization.fine_tuning.lora.rank = 3
    assert repr(customization) == "Customization(fine_tuning={'lora': {'rank': 3}, 'max_steps': 7})"
    assert "<pre>fine_tuning:\n  lora:\n    rank: 3\n  max_steps: 7\n</pre>" in customization._repr_html_()
    customization.fine_tuning.batch_size = 0  # a value that no run accepts can be shown
    assert "batch_size: 0" in customization._repr_html_()


def test_versions_and_lineage_are_tables_in_a_notebook() -> None:
    tags = {"tuneline.verdict": "accepted", "tuneline.model_sha256": "a" * 64, "tuneline.champion.reason": "<better>"}
    versions = ModelVersions(
        [tuneline.ModelVersion("helper", "2", ["champion"], tags), tuneline.ModelVersion("helper", "1", [], {})]
    )
    assert repr(versions) == "[ModelVersion(helper/2, aliases=['champion']), ModelVersion(helper/1, aliases=[])]"
    shown = versions._repr_html_().replace(' class="n"', "")
    assert shown.count("<tr>") == 3
    assert "<td>champion</td><td>accepted</td><td>–</td><td>aaaaaaaaaaaa</td><td>–</td><td>&lt;better&gt;</td>" in shown
    assert "<td>verdict</td><td>accepted</td>" in versions[0]._repr_html_()
    digest = "b" * 64
    links = [Link("version", digest, "models:/helper/2"), Link("model", digest, f"store:{digest}", status="missing")]
    lineage = Lineage("helper", "2", "champion", links)
    assert repr(lineage) == "Lineage(helper/2, links=2, intact=False)"
    shown = lineage._repr_html_()
    assert "<td>model</td><td>missing</td><td>bbbbbbbbbbbb</td><td></td><td>store/bbbbbbbbbbbb</td>" in shown
    assert "The chain is broken at: model." in shown


def test_comparison_equals_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are given by their results or names; in a notebook, the comparison has tables and the plots of the page."""
    runs = make_run(tmp_path / "wd", "20260101-100000-aaaa"), make_run(tmp_path / "wd", "20260102-100000-bbbb", shift=1)
    expected = answer_in_process("compare", *(run.name for run in runs), "--workdir", "wd", cwd=tmp_path)
    results = [RunResult.from_dict({**RUN, "workdir": str(tmp_path / "wd"), "run": run.name}) for run in runs]
    comparison = tuneline.compare(*results)
    assert {**comparison.as_dict(), "page": None} == expected
    monkeypatch.chdir(tmp_path)
    assert tuneline.compare("20260101", "latest", workdir="wd").as_dict() == comparison.as_dict()
    assert comparison.metrics["held_out"]["loss"][1]["difference"]["value"] == pytest.approx(0.5)
    assert comparison.warnings == expected["warnings"]
    assert repr(comparison) == "Comparison(20260101-100000-aaaa, 20260102-100000-bbbb)"
    shown, page = comparison._repr_html_(), comparison.write_page("page.html").read_text(encoding="utf-8")
    assert "<h4>Metrics</h4>" in shown
    assert "<h4>Limits</h4>" not in shown, "a section without content has no heading"
    assert shown.count("<svg") == page.count("<svg") == 2
    assert "Scroll sideways" not in shown
    for names, message in (
        (["latest"], "a comparison requires two runs"),
        (["latest", "20260102"], "are the same run"),
    ):
        with pytest.raises(tuneline.TunelineError, match=message):
            tuneline.compare(*names, workdir="wd")


def test_call_leaves_the_process_of_the_caller_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    umask = os.umask(0o022)
    before = dict(os.environ)
    try:
        with (
            suppress(RuntimeError),
            call_context.open_call("test", tmp_path, quiet=True, tracking_uri="sqlite:///other.db") as (work, _),
        ):
            assert (work.root, os.environ["TUNELINE_WORKDIR"]) == (tmp_path, str(tmp_path))
            assert os.environ["MLFLOW_TRACKING_URI"] == "sqlite:///other.db"
            (tmp_path / "private").touch()
            raise RuntimeError("the call failed")
        assert (tmp_path / "private").stat().st_mode & 0o777 == 0o640
        assert dict(os.environ) == before
    finally:
        assert os.umask(umask) == 0o022


def test_error_equals_that_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The API and the command call the same function; nothing is printed to standard output."""
    source = str(tmp_path / "missing.jsonl")
    error = refusal(2, "curate", source, "-o", "dataset", cwd=tmp_path)
    with pytest.raises(tuneline.TunelineError) as caught:
        tuneline.curate(source, tmp_path / "dataset", workdir=tmp_path / "wd")
    assert caught.value.as_dict() == error
    with pytest.raises(tuneline.TunelineError, match="sources is an empty list"):
        tuneline.curate([], tmp_path / "dataset", workdir=tmp_path / "wd")
    config = Customization.load(data_curation={"sources": [source]})
    with pytest.raises(tuneline.TunelineError) as caught:
        tuneline.run(config, tmp_path / "wd", dry_run=True)
    assert caught.value.message == error["message"]
    assert capfd.readouterr().out == ""


def test_registry_reports_an_unknown_model(tmp_path: Path) -> None:
    registry = tuneline.Registry(workdir=tmp_path / "wd", quiet=True)
    error = refusal(1, "registry", "audit", "helper", "--workdir", "wd", cwd=tmp_path)
    for call in (registry.versions, registry.audit):
        with pytest.raises(tuneline.TunelineError) as caught:
            call("helper")
        assert caught.value.as_dict() == error
    with pytest.raises(tuneline.TunelineError, match="force requires a reason"):
        registry.promote("helper", 1, force=True, reason=" ")


def test_process_that_ends_without_a_result_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.stderr.write('Killed by the kernel'); sys.exit(9)"
    monkeypatch.setattr(child_run.process_control, "build_module_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(tuneline.TunelineError, match="ended with status 9: Killed by the kernel"):
        child_run.run_customization(Customization.load(), Workdir(tmp_path), SilentReporter())


def test_run_of_an_earlier_process_with_the_same_id_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Containers reuse process IDs: the events of an earlier run are not those of the child."""
    script = f"""
import json, os, pathlib, time
folder = pathlib.Path("runs/20260101-100000-aaaa")
folder.mkdir(parents=True)
(folder / "events.jsonl").write_text('{{"stage": "evaluation", "event": "note", "text": "of another run"}}\\n')
(folder / "run.json").write_text(json.dumps({{"pid": os.getpid(), "process_started": 1.0}}))
time.sleep({2 * child_run.POLL_INTERVAL_SECONDS})
print({json.dumps(json.dumps(RUN))})
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child_run.process_control, "build_module_command", lambda *_: [sys.executable, "-c", script])
    with call_context.open_call("run", tmp_path, quiet=False) as (work, reporter):
        assert child_run.run_customization(Customization.load(), work, reporter).run == RUN["run"]
    assert "of another run" not in capfd.readouterr().err


def test_error_of_the_process_of_a_run_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error: dict[str, Any] = {"stage": "fine_tuning", "kind": "training", "message": "diverged", "hint": "Lower it."}
    script = f"print({json.dumps({'error': error})!r}); raise SystemExit(1)"
    monkeypatch.setattr(child_run.process_control, "build_module_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(tuneline.TunelineError) as caught:
        child_run.run_customization(Customization.load(), Workdir(tmp_path), SilentReporter())
    assert (caught.value.as_dict(), caught.value.exit_code) == (error, 1)


def test_file_of_init_equals_the_defaults(tmp_path: Path) -> None:
    init = answer_in_process("init", "project", cwd=tmp_path)
    assert Customization.load(tmp_path / init["customization"]).model_dump() == Customization.load().model_dump()


def test_sizes_equal_those_of_the_command_line(tmp_path: Path) -> None:
    """`size` uses the objects of the command, with its limits, and shows plots in a notebook."""
    arguments = ("--model", "8b", "--rows", 12000, "--mean-length", 115, "--gpu", "h100:8", "--no-packing")
    training = tuneline.size(model="8b", rows=12_000, mean_length=115, gpu="h100:8", packing=False)
    assert training.as_dict() == answer_in_process("size", *arguments, cwd=tmp_path)
    assert (training.gpus, training.fits, training.binds["bound"]) == (8, True, "GPU count")
    assert repr(training).startswith("TrainingSize(gpus='8 × h100', memory_gib_per_gpu=")
    assert training.hours
    assert training.hours["low"] > training.hours["typical"] > training.hours["best"]
    assert training._repr_html_().count("<svg") == 1
    assert "Bill of materials" in training._repr_html_()
    recipe = Customization.load(fine_tuning={"adaptation": "full"})
    assert tuneline.size(recipe, model="8b", gpu="h200").gpus > tuneline.size(model="8b", gpu="h200").gpus
    assert recipe.fine_tuning.adaptation == "full"
    adapted = tuneline.size(recipe, model="8b", gpu="h200", adaptation="lora", rank=4)
    assert (adapted.gpus, recipe.fine_tuning.adaptation) == (1, "full"), "the caller's customization is unchanged"
    page = training.write_page(tmp_path / "size.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert all(f"<h2>{heading}</h2>" in page for heading in ("Ranges", "Bill of materials", "Memory", "Formulas"))


def test_size_with_a_demand_is_that_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIMULATED_JOBS", "CAPACITY_JOBS"):
        monkeypatch.setattr(cluster_size, name, 200)
    cluster = tuneline.size(demand=["20x8b"], rows=50_000, mean_length=600, gpu="h200")
    arguments = ("--demand", "20x8b", "--rows", 50000, "--mean-length", 600, "--gpu", "h200")
    assert cluster.as_dict() == answer_in_process("size", *arguments, cwd=tmp_path)
    assert (cluster.nodes, cluster.gpus, cluster.keeps_up) == (1, 8, True)
    assert str(cluster).startswith("demand    20 × ")
    assert cluster._repr_html_().count("<svg") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "size: rows: found 0; expected 1 or more"),
        ({"mean_lenght": 5}, "size: mean_lenght: unknown key (did you mean mean_length?)"),
        ({"demand": ["8b"]}, "--demand '8b' is not COUNTxMODEL"),
        ({"demand": "8b"}, "--demand '8b' is not COUNTxMODEL"),
        ({"nodes": 2}, "--nodes requires --demand"),
    ],
)
def test_wrong_options_of_size_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tuneline.TunelineError) as error:
        tuneline.size(**options)
    assert error.value.message == message
