"""A model whose rows were read from a database: lineage, reproduction and retention after the table has changed.

Long tier: the reproduction that trains the model again.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.stage import curate
from components.data_versioning.stage import publish
from components.fine_tuning.stage import finetune
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import register
from pipelines.cli import main as cli
from pipelines.config.customization_config import Customization, load_customization, parse_values
from pipelines.provenance import lineage
from pipelines.steps.curation_inputs import list_inputs, split_sources
from tests.pipelines.project import write_rows
from tests.pipelines.test_lineage import move_away
from tests.pipelines.test_reproduction import publish_evaluation
from tests.tiny import tiny_model

pytestmark = [pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
NAME = "support"
PASSWORD = "hunter2-of-the-database"
PASSWORD_VARIABLE = "SUPPORT_DB_PASSWORD"


@dataclass(frozen=True)
class DatabaseModel:
    """A registered model, and the database that its rows were read from."""

    work: Workdir
    database: Path
    config: Customization
    extract: Artifact
    dataset: Artifact
    model: Artifact

    def run(self, *arguments: str) -> int | None:
        """Run a command in this process; its errors are raised."""
        code: int | None = cli.app([*arguments, "--workdir", str(self.work.root)], standalone_mode=False)
        return code


def write_table(path: Path) -> None:
    rows_file = path.with_suffix(".jsonl")
    write_rows(rows_file)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, reply TEXT)")
        values = [(i, row["instruction"], row["output"]) for i, row in enumerate(rows)]
        connection.executemany("INSERT INTO tickets VALUES (?, ?, ?)", values)


def build_config(folder: Path, base: Path) -> Customization:
    source = {
        "path": f"sql+sqlite://{folder / 'support.sqlite'}",
        "table": "tickets",
        "order_by": ["id"],
        "columns": {"prompt": "subject", "completion": "reply"},
        "where": "id >= 6",
        "credentials_env": PASSWORD_VARIABLE,
    }
    sections = {
        "data_curation": {
            "sources": [source],
            "near_duplicate_threshold": 0.95,
            "answer_min_words": 1000,
            "fractions": {"train": 0.6, "validation": 0.1, "test": 0.3},
        },
        "fine_tuning": {
            "base_model": str(base),
            "max_steps": 6,
            "batch_size": 4,
            "learning_rate": 5e-3,
            "validation_rows": 0,
        },
    }
    return parse_values(sections, "the test")


@pytest.fixture(scope="module")
def database_model(tmp_path_factory: pytest.TempPathFactory) -> DatabaseModel:
    """Run the stages in sequence, as a run does, and then change the table."""
    folder = tmp_path_factory.mktemp("database")
    work, draft, reporter = Workdir(folder / "workdir"), folder / "draft", SilentReporter()
    database = folder / "support.sqlite"
    write_table(database)
    config = build_config(folder, tiny_model(folder / "tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.setenv("TUNELINE_THREADS", "1")
        patch.setenv(PASSWORD_VARIABLE, PASSWORD)
        for name in ("TUNELINE_STORE", "TUNELINE_STATE"):
            patch.delenv(name, raising=False)
        work.store.mkdir(parents=True)
        inputs = list_inputs(config, work, reporter)
        curated = curate(inputs.sources, draft, config.data_curation, seed=1, reporter=reporter)
        dataset = artifact_store.add_artifact(work.store, curated)
        revision = publish(dataset, config.data_versioning, workdir=work.root, reporter=reporter)
        options: dict[str, Any] = {"seed": 1, "state": work.state, "reporter": reporter, "dataset_uri": revision.uri}
        model = artifact_store.add_artifact(work.store, finetune(dataset, draft, config.fine_tuning, **options))
        evaluation = artifact_store.add_artifact(work.store, publish_evaluation(folder / "judged", model))
        register(
            model,
            evaluation,
            None,
            ModelRegistryConfig(name=NAME),
            reporter=reporter,
            dataset_version=revision.model_dump(),
        )
        mlflow_tracking.connect().MlflowClient().set_registered_model_alias(NAME, "champion", "1")
    extract = artifact_store.load_artifact(work.store, inputs.sources[0].extract, "extract")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE tickets SET reply = 'All answers were replaced.'")
    return DatabaseModel(work, database, config, extract, dataset, model)


@pytest.fixture(autouse=True)
def environment_variables(database_model: DatabaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database_model.work.tracking_uri)
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)  # neither lineage nor a reproduction connects


def test_dataset_records_the_extract_and_conserves_its_rows(database_model: DatabaseModel) -> None:
    [raw] = database_model.dataset.manifest.inputs
    assert (raw.kind, raw.uri) == ("raw", "extract:tickets.parquet")
    assert raw.content_sha256 == database_model.extract.sha256
    assert raw.settings == {"columns": {"prompt": "subject", "completion": "reply"}, "where": "id >= 6"}
    rows = database_model.dataset.manifest.summary["rows"]
    assert rows["in"] == database_model.extract.manifest.summary["rows"] == 156
    assert rows["rejected"]["not_selected"] == 6
    assert rows["in"] == rows["kept"] + sum(rows["rejected"].values()) + rows["quarantined"]


def test_lineage_reports_the_snapshot_after_the_table_has_changed(database_model: DatabaseModel) -> None:
    traced = lineage.trace(NAME, database_model.work, database_model.config.data_versioning, SilentReporter())
    [raw] = traced.get_links("raw")
    assert (raw.status, raw.sha256) == ("intact", database_model.extract.sha256)
    assert raw.uri == database_model.extract.path.as_uri()
    summary = database_model.extract.manifest.summary
    assert raw.detail == (
        f"156 rows ({summary['bytes'] / 1e3:.1f} kB) of tickets in sql+sqlite://{database_model.database}, "
        f"{summary['snapshot']}"
    )
    assert summary["snapshot"].startswith("file with digest ")


def test_reproduction_reads_the_extract(database_model: DatabaseModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert database_model.run("reproduce", NAME, "--dry-run", "--json") == 0
    dataset = json.loads(capsys.readouterr().out)["dataset"]
    assert dataset["how"] == "curated"
    assert dataset["why"].startswith("all raw files are unchanged; 156 rows (")
    assert database_model.extract.manifest.summary["snapshot"] in dataset["why"]


@pytest.mark.long
def test_model_is_reproduced_after_the_table_has_changed(
    database_model: DatabaseModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert database_model.run("reproduce", NAME, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dataset"]["equal"]
    assert result["model"]["equal"]


def test_missing_extract_is_reported(database_model: DatabaseModel, capsys: pytest.CaptureFixture[str]) -> None:
    with move_away(database_model.extract.path):
        traced = lineage.trace(NAME, database_model.work, database_model.config.data_versioning, SilentReporter())
        [raw] = traced.get_links("raw")
        assert raw.status == "missing"
        assert raw.detail.startswith("extract:tickets.parquet was not found in ")
        assert database_model.run("reproduce", NAME, "--dry-run", "--json") == 0
        result = json.loads(capsys.readouterr().out)
    assert result["dataset"]["how"] == "revision"
    assert "extract:tickets.parquet was not found" in result["dataset"]["why"]


def test_dry_run_stores_no_extract_and_plans_the_same(
    database_model: DatabaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    work = Workdir(tmp_path / "workdir")
    planned = list_inputs(database_model.config, work, SilentReporter(), Workdir(tmp_path / "scratch"))
    assert not work.root.exists()
    assert planned.sources[0].path.is_relative_to(tmp_path / "scratch")
    stored = list_inputs(database_model.config, work, SilentReporter())
    assert stored.as_plan()["sources"] == planned.as_plan()["sources"]
    assert str(tmp_path) not in json.dumps(planned.as_plan()["sources"])


def test_garbage_collection_keeps_the_extract_of_a_kept_dataset(
    database_model: DatabaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    changed = list_inputs(database_model.config, database_model.work, SilentReporter()).sources[0]
    assert changed.extract != database_model.extract.sha256
    monkeypatch.setattr(artifact_store, "seconds_since_use", lambda folder: 90 * 86_400.0)
    database_model.run("gc", "--delete", "--older-than", "30d", "--keep-runs", "0")
    assert artifact_store.has_artifact(database_model.work.store, database_model.extract.sha256)
    assert not artifact_store.has_artifact(database_model.work.store, changed.extract)


def test_erasure_search_finds_the_extract(database_model: DatabaseModel, capsys: pytest.CaptureFixture[str]) -> None:
    row = "number 37, and returns"
    database_model.run("data", "find", "--text", row, "--json")
    result = json.loads(capsys.readouterr().out)
    [extract] = [one for one in result["extracts"] if one["sha256"] == database_model.extract.sha256]
    assert result["found"]
    assert extract["rows"] >= 1
    assert extract["address"] == f"sql+sqlite://{database_model.database}"
    database_model.run("data", "find", "--text", row)
    assert database_model.extract.sha256[:12] in capsys.readouterr().out


def test_no_file_contains_the_password(database_model: DatabaseModel) -> None:
    files = [path for path in database_model.work.root.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_table_that_is_listed_twice_is_read_once(tmp_path: Path) -> None:
    write_table(tmp_path / "a.sqlite")
    entry = {"path": str(tmp_path / "a.sqlite"), "table": "tickets"}
    mapped = {**entry, "columns": {"text": "reply"}}
    config = parse_values({"data_curation": {"sources": [entry, entry, mapped], "published": "ignore"}}, "the test")
    sources = list_inputs(config, Workdir(tmp_path / "workdir"), SilentReporter()).sources
    assert [source.settings.columns for source in sources] == [{}, {"text": "reply"}]
    assert len({source.extract for source in sources}) == 1


def build_source(**settings: Any) -> Customization:
    return parse_values({"data_curation": {"sources": [settings]}}, "the test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "a.csv", "table": "tickets"}, "'a.csv' has the setting table, which applies to databases"),
        ({"path": "a.db", "table": "t", "delimiter": ";"}, "'a.db' has the setting delimiter, which applies to files"),
        ({"path": "a.parquet", "max_rows": 5}, "has the setting max_rows, which applies to databases"),
    ],
)
def test_setting_of_another_kind_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_sources(build_source(**settings).data_curation.sources)


def test_paths_of_a_database_and_a_query_are_relative_to_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "customization.yaml"
    source = "{path: support.sqlite, query: closed.sql, snapshot: 3}"
    file.write_text(f"data_curation: {{sources: [{source}, {{path: 'sql+postgresql://a@b/c', table: t}}]}}")
    first, second = load_customization(file).data_curation.sources
    assert first.path == str(tmp_path / "support.sqlite")
    assert first.query == str(tmp_path / "closed.sql")
    assert first.snapshot == "3"
    assert second.path == "sql+postgresql://a@b/c"
