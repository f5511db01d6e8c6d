"""`tuneline gc` on a workdir with a real MLflow store and a real data repository."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import unreferenced_objects as data
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import fetch, list_versions, publish
from components.model_registry import model_files, registry_retention
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from pipelines.cli import main
from pipelines.operations.garbage_collection import inventory
from pipelines.operations.garbage_collection.retention_plan import build_plan
from tests.data_versioning.conftest import write_curated
from tests.model_registry.conftest import build, empty_store
from tests.pipelines.command import refusal
from tests.pipelines.garbage_collection.workspaces import DAY, LIMIT, OLD, set_age

__all__ = ["empty_store"]
pytestmark = [pytest.mark.dvc, pytest.mark.mlflow]
BASE = ArtifactInput(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")


@dataclass
class WorkdirItems:
    """The items in the workdir: referenced and unreferenced ones."""

    project: Path
    dataset: Artifact
    models: list[Artifact]
    unreferenced_dataset: Artifact
    unreferenced_model: Artifact
    runs: dict[str, str]
    logged: str

    @property
    def work(self) -> Workdir:
        return Workdir(self.project / "wd")


def tune(work: Workdir, name: str, dataset: Artifact, *, promoted: bool = True) -> Artifact:
    """Store a model of a dataset with its evaluation and package, and register it as a version of `helper`."""
    store = work.store

    def add(kind: str, inputs: list[ArtifactInput], summary: dict[str, object]) -> Artifact:
        return artifact_store.add_artifact(
            store, build(work.root / "draft" / f"{name}-{kind}", kind, f"{name} {kind}", inputs, summary)
        )

    model = add("model", [dataset.as_input(), BASE], {"steps": 3})
    evaluation = add("evaluation", [model.as_input(), dataset.as_input(), BASE], {"verdict": "accepted", "reasons": []})
    repository = add("repository", [model.as_input()], {"proof": {"matched": 4}})
    version = register(
        model, evaluation, repository, ModelRegistryConfig(name="helper"), reporter=SilentReporter()
    ).version
    if promoted:
        promote("helper", version, force=True, reason="the test", reporter=SilentReporter())
    return model


def log_run(name: str, parent: str = "", **tags: str) -> str:
    """Log a run of this workdir with a file that ended long ago."""
    client, timestamp = mlflow_tracking.connect().MlflowClient(), int((time.time() - OLD) * 1000)
    owner = {mlflow_tracking.OWNER_TAG: artifact_store.get_workdir_id(Workdir.from_environment(), create=True)}
    tags = tags or {
        "tuneline.stage": name,
        **owner,
        **({"mlflow.parentRunId": parent} if parent else {"tuneline.run": name}),
    }
    run = client.create_run(mlflow_tracking.get_experiment_id(client), start_time=timestamp, tags=tags, run_name=name)
    client.log_text(run.info.run_id, "a page", "report.html")
    client.set_terminated(run.info.run_id, "FAILED", end_time=timestamp)
    return str(run.info.run_id)


def age_logged_models(work: Workdir) -> None:
    """Set the creation times of the logged models to long ago; MLflow sets these times itself."""
    timestamp = int((time.time() - OLD) * 1000)
    with sqlite3.connect(work.root / "mlflow.db") as database:
        database.execute(
            "UPDATE logged_models SET creation_timestamp_ms = ?, last_updated_timestamp_ms = ?", (timestamp, timestamp)
        )


@pytest.fixture(scope="module")
def workdir_items(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> WorkdirItems:
    """Versions 1 to 3 of helper, all promoted, of a published dataset; in addition an unregistered dataset and model,
    runs, a logged model without a version, and an object of the remote that no commit references."""
    project = tmp_path_factory.mktemp("gc")
    work = Workdir(project / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TUNELINE_STORE", raising=False)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
        patch.setenv("TUNELINE_WORKDIR", str(work.root))
        rows = [("a" * 16, "A letter."), ("b" * 16, "Another one.")]
        dataset = artifact_store.add_artifact(work.store, write_curated(project / "one", {"train": rows, "test": []}))
        publish(dataset, DataVersioningConfig(), workdir=work.root, reporter=SilentReporter())
        runs = {"of a version": log_run("of a version")}
        runs |= {"nested": log_run("nested", runs["of a version"]), "lost": log_run("lost")}
        patch.setenv("MLFLOW_RUN_ID", runs["of a version"])
        models = [tune(work, name, dataset) for name in ("one", "two", "three")]
        patch.delenv("MLFLOW_RUN_ID")
        unreferenced_dataset = artifact_store.add_artifact(
            work.store, write_curated(project / "lost", {"train": rows[:1], "test": []})
        )
        unreferenced_model = artifact_store.add_artifact(
            work.store, build(project / "draft", "model", "lost", [unreferenced_dataset.as_input(), BASE], {"steps": 3})
        )
        evaluation = build(
            project / "draft-evaluation",
            "evaluation",
            "lost",
            [unreferenced_model.as_input()],
            {"verdict": "refused", "reasons": []},
        )
        logged = model_files.log_model(
            mlflow_tracking.connect().MlflowClient(), "helper", unreferenced_model, evaluation, 100
        ).model_id
        shutil.rmtree(work.root / "draft")
    age_logged_models(work)
    unreferenced_object = work.root / "dvc-remote" / "files" / "md5" / "ab" / "cdef"
    unreferenced_object.parent.mkdir(parents=True, exist_ok=True)
    unreferenced_object.write_text("left by a publication that was killed")
    for folder in (work.store, work.root / "dvc-remote"):
        set_age(folder, OLD)
    return WorkdirItems(project, dataset, models, unreferenced_dataset, unreferenced_model, runs, logged)


@pytest.fixture
def prepared(workdir_items: WorkdirItems, monkeypatch: pytest.MonkeyPatch) -> WorkdirItems:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", workdir_items.work.tracking_uri)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(workdir_items.work.root))
    return workdir_items


def build_request(workdir_items: WorkdirItems, **options: object) -> inventory.CollectionRequest:
    return inventory.CollectionRequest(workdir_items.work, DataVersioningConfig(), SilentReporter(), LIMIT, **options)  # type: ignore[arg-type]


def test_old_versions_without_alias_or_rollback_are_deletable(prepared: WorkdirItems) -> None:
    small_plan = build_plan(
        (listed := inventory.take_inventory(build_request(prepared, keep_versions=0))).items,
        listed.roots,
        build_request(prepared).policy,
    )
    assert {Path(item.item.path).name for item in small_plan.to_delete if "store" in item.item.path} >= {
        prepared.models[0].sha256
    }
    reasons = {item.reason for item in small_plan.kept}
    assert {
        "helper version 3 is champion, challenger, candidate",
        "helper version 2 is the rollback target of champion",
    } <= reasons
    default_plan = build_plan(
        (listed := inventory.take_inventory(build_request(prepared))).items,
        listed.roots,
        build_request(prepared).policy,
    )
    assert prepared.models[0].sha256 not in {Path(item.item.path).name for item in default_plan.to_delete}
    assert "helper version 1 is one of the newest 3 versions" in {item.reason for item in default_plan.kept}


def test_active_publication_or_lost_file_list_keeps_every_object(prepared: WorkdirItems) -> None:
    config, work = DataVersioningConfig(), prepared.work
    [object_] = data.find_unreferenced(config, workdir=work.root).objects
    assert (object_.oid, object_.path.name) == ("abcdef", "cdef")
    publishing = work.state / "data_versioning" / f"publish.{inventory.job_folders.create_owner_tag()}"
    publishing.mkdir(parents=True)
    assert not data.remove_object(object_, config, workdir=work.root, min_unused_seconds=LIMIT)
    publishing.rmdir()
    [listing] = (work.root / "dvc-remote").rglob("*.dir")
    aside = listing.rename(work.root / "aside")
    data._list_referenced_by.cache_clear()
    result = data.find_unreferenced(config, workdir=work.root)
    assert result.objects == []
    assert "is missing or damaged" in result.unknown_reason
    aside.rename(listing)
    assert object_.path.exists()


def test_shared_remote_is_not_collected_without_own_remote(prepared: WorkdirItems, tmp_path: Path) -> None:
    shutil.copytree(prepared.work.root / "dvc-remote", tmp_path / "remote")
    elsewhere = DataVersioningConfig(remote=str(tmp_path / "remote"))
    assert "--own-remote" in data.find_unreferenced(elsewhere, workdir=prepared.work.root).unknown_reason
    assert [
        item.oid for item in data.find_unreferenced(elsewhere, workdir=prepared.work.root, own_remote=True).objects
    ] == ["abcdef"]
    assert (
        "dvc gc --cloud"
        in data.find_unreferenced(
            DataVersioningConfig(remote="s3://bucket/data"), workdir=prepared.work.root
        ).unknown_reason
    )
    assert (
        data.find_unreferenced(DataVersioningConfig(repository="none"), workdir=prepared.work.root).unknown_reason
        == f"the data repository {prepared.work.root.absolute() / 'none'} does not exist"
    )


def test_objects_of_a_renamed_dvc_file_are_kept(prepared: WorkdirItems, tmp_path: Path) -> None:
    """Git lists only one name of each object, in this case the last."""
    clone, remote = tmp_path / "clone", prepared.work.root / "dvc-remote" / "files" / "md5"
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    (clone / "d.dvc").write_text("outs:\n- md5: abcdef\n  path: d\n")
    for words in (("add", "."), ("commit", "-qm1"), ("mv", "d.dvc", "d.dvc.disabled"), ("commit", "-qm2")):
        subprocess.run(["git", "-C", str(clone), *name, *words], check=True)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(clone), str(tmp_path / "r.git")], check=True)
    (remote / "ab" / "unnamed").write_text("")
    unreferenced = {
        item.oid
        for item in data.find_unreferenced(
            DataVersioningConfig(repository=str(tmp_path / "r.git")), workdir=prepared.work.root
        ).objects
    }
    (remote / "ab" / "unnamed").unlink()
    assert "abunnamed" in unreferenced
    assert "abcdef" not in unreferenced


def test_remote_outside_the_workdir_requires_own_remote(prepared: WorkdirItems, tmp_path: Path) -> None:
    shared = prepared.project / "shared"
    shutil.copytree(prepared.work.root / "dvc-remote", shared)
    (prepared.work.root / "link").symlink_to(shared)
    for remote in ("../shared", "link"):
        assert (
            "--own-remote"
            in data.find_unreferenced(DataVersioningConfig(remote=remote), workdir=prepared.work.root).unknown_reason
        )
    (prepared.work.root / "link").unlink()
    shutil.rmtree(shared)


def test_empty_registry_prevents_the_collection(
    prepared: WorkdirItems, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uri in (
        f"sqlite:///{tmp_path / 'missing.db'}",
        f"sqlite:///{shutil.copyfile(empty_store, tmp_path / 'empty.db')}",
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(
            inventory.RegistryMissingError, match="the registry contains no model version, but the store"
        ):
            inventory.take_inventory(build_request(prepared))
    assert inventory.take_inventory(build_request(prepared, no_registry=True)).items


def test_missing_data_repository_prevents_the_collection(prepared: WorkdirItems, tmp_path: Path) -> None:
    def take_inventory(repository: Path, **options: object) -> inventory.Inventory:
        config = DataVersioningConfig(repository=str(repository))
        return inventory.take_inventory(
            inventory.CollectionRequest(prepared.work, config, SilentReporter(), LIMIT, **options)
        )  # type: ignore[arg-type]

    missing = tmp_path / "not mounted" / "data.git"
    with pytest.raises(
        inventory.RepositoryMissingError,
        match=f"the data repository {missing} does not exist, but the store .* holds 2 datasets",
    ):
        take_inventory(missing)
    assert take_inventory(missing, no_repository=True).items
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "another.git")], check=True)
    work, original = Workdir(prepared.work.root), prepared.work.root / "data-repository"
    uri = list_versions(DataVersioningConfig(), workdir=work.root)[0].uri
    model = build(tmp_path / "draft", "model", "of a revision", [prepared.dataset.as_input(uri), BASE], {"steps": 3})
    kept = artifact_store.add_artifact(work.store, model)
    with pytest.raises(
        inventory.RepositoryMissingError,
        match=f"revisions of another data repository than the configured one: {original}",
    ):
        take_inventory(tmp_path / "another.git")
    assert take_inventory(tmp_path / "another.git", no_repository=True).items
    moved = shutil.copytree(original, tmp_path / "moved.git")
    assert f"store:{prepared.dataset.sha256}" in {root.name for root in take_inventory(moved).roots}, (
        "a moved repository is known by its commits"
    )
    (tmp_path / "link.git").symlink_to(original)
    assert take_inventory(tmp_path / "link.git").items
    shutil.rmtree(kept.path)


def test_repository_lost_during_the_collection_ends_it(prepared: WorkdirItems, tmp_path: Path) -> None:
    listed, repository = inventory.take_inventory(build_request(prepared)), prepared.work.root / "data-repository"
    repository.rename(tmp_path / "unmounted")
    with pytest.raises(inventory.RepositoryMissingError, match=r"the data repository .* does not exist"):
        inventory.find_roots(build_request(prepared), listed.items)
    (tmp_path / "unmounted").rename(repository)


def test_items_of_other_workdirs_in_mlflow_are_kept_and_reported(
    prepared: WorkdirItems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "another"))
    foreign_run = log_run("theirs")
    unmarked_run = log_run("older", **{"tuneline.run": "of an earlier version"})
    monkeypatch.setenv("TUNELINE_WORKDIR", str(prepared.work.root))
    listed = inventory.take_inventory(build_request(prepared, keep_runs=0))
    assert not {f"mlflow_run:{foreign_run}", f"mlflow_run:{unmarked_run}"} & {stored.name for stored in listed.items}
    assert any(
        note.startswith("gc keeps 2 MLflow runs and models of other or unknown workdirs") for note in listed.notes
    )
    new_workdir = inventory.take_inventory(
        inventory.CollectionRequest(
            Workdir(tmp_path), DataVersioningConfig(), SilentReporter(), LIMIT, no_registry=True, no_repository=True
        )
    )
    assert not any(stored.kind.startswith("mlflow") for stored in new_workdir.items)
    assert any("of other or unknown workdirs" in note for note in new_workdir.notes)
    all_names = {
        stored.name for stored in inventory.take_inventory(build_request(prepared, keep_runs=0, all_runs=True)).items
    }
    assert {f"mlflow_run:{foreign_run}", f"mlflow_run:{unmarked_run}"} <= all_names
    assert [item.id for item in registry_retention.list_unversioned_models(LIMIT, "another")] == []
    for run_id in (foreign_run, unmarked_run):
        registry_retention.remove_run(run_id)


def test_newest_kubeflow_runs_and_whole_sweeps_are_kept_together(
    prepared: WorkdirItems,
) -> None:
    owner = {mlflow_tracking.OWNER_TAG: artifact_store.get_workdir_id(prepared.work)}
    steps = {
        n: [
            log_run(s, **{"tuneline.stage": s, mlflow_tracking.KFP_RUN_TAG: n, **owner}) for s in ("curation", "tuning")
        ]
        for n in ("one", "two")
    }
    recipe = log_run("recipe-1", **{"mlflow.parentRunId": steps["one"][1]})
    kept = {
        item.id: item.retention_reason
        for item in registry_retention.list_ended_runs(LIMIT, owner[mlflow_tracking.OWNER_TAG], 1)
    }
    assert {kept[run_id] for run_id in steps["two"]} == {"the newest run"}
    assert {kept[run_id] for run_id in (*steps["one"], recipe)} == {""}
    listed = inventory.take_inventory(build_request(prepared, keep_runs=1))
    deleted_ids = [
        item.item.name.partition(":")[2]
        for item in build_plan(listed.items, listed.roots, build_request(prepared).policy).to_delete
    ]
    assert {*steps["one"], recipe} <= set(deleted_ids)
    assert deleted_ids.index(steps["one"][1]) < deleted_ids.index(recipe), "a run is deleted before its nested runs"
    for run_id in (*steps["one"], *steps["two"], recipe):
        registry_retention.remove_run(run_id)


def test_concurrent_registration_keeps_its_files(prepared: WorkdirItems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_retention, "_list_versioned_model_ids", lambda _: {prepared.logged})
    assert not registry_retention.remove_model(prepared.logged)
    kept = mlflow_tracking.connect().MlflowClient().get_logged_model(prepared.logged)
    assert kept.tags["tuneline.model_sha256"] == prepared.unreferenced_model.sha256
    assert registry_retention.REMOVING_TAG not in kept.tags
    age_logged_models(prepared.work)


def test_interrupted_model_deletion_can_be_completed(prepared: WorkdirItems, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow_tracking.connect().MlflowClient()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for function in (
        "components.model_registry.registry_retention._remove_files",
        "mlflow.MlflowClient.delete_logged_model",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(function, interrupt)
            with pytest.raises(KeyboardInterrupt):
                registry_retention.remove_model(prepared.logged)
        by_digest = client.search_logged_models(
            [mlflow_tracking.get_experiment_id(client)],
            f"tags.`tuneline.model_sha256` = '{prepared.unreferenced_model.sha256}'",
        )
        assert list(by_digest) == []
        age_logged_models(prepared.work)
        assert [
            item.id
            for item in registry_retention.list_unversioned_models(LIMIT, artifact_store.get_workdir_id(prepared.work))
        ] == [prepared.logged]


def test_missing_workdir_or_unreachable_server_deletes_nothing(prepared: WorkdirItems) -> None:
    with pytest.raises(UsageError, match=r"the workdir .* does not exist"):
        inventory.take_inventory(
            inventory.CollectionRequest(
                Workdir(prepared.project / "nowhere"), DataVersioningConfig(), SilentReporter(), LIMIT
            )
        )
    before, address = artifact_store.list_artifacts(prepared.work.store), "http://127.0.0.1:9"
    error = refusal(1, "gc", "--delete", "--workdir", "wd", "--tracking-uri", address, cwd=prepared.project)
    assert (error["kind"], error["message"]) == (
        "engine_missing",
        f"the MLflow server {address} does not answer: Connection refused",
    )
    assert artifact_store.list_artifacts(prepared.work.store) == before


def test_wrong_options_are_refused_before_any_listing(tmp_path: Path) -> None:
    from pipelines.cli import garbage_collection

    for text, message in {"soon": "is not an age", "0d": "is too short", "30": "is not an age"}.items():
        with pytest.raises(UsageError, match=message):
            garbage_collection._parse_age(text)
    with pytest.raises(UsageError, match="does not exist"):
        garbage_collection._parse_kinds(["everything"])
    assert garbage_collection._parse_age("8w") == 56 * DAY
    work = Workdir(tmp_path)
    with pytest.raises(UsageError, match="neither an artifact in the store nor a run"):
        inventory.pin(work, "../../etc", "because")
    with pytest.raises(UsageError, match="is not pinned"):
        inventory.unpin(work, "a" * 64)


def run_gc(workdir_items: WorkdirItems, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the output of the command, run in this process: a separate one takes seconds to start."""
    capsys.readouterr()
    assert (
        main.app(["gc", "--workdir", str(workdir_items.work.root), "--keep-runs", "0", *options], standalone_mode=False)
        == 0
    )
    return capsys.readouterr().out


def test_delete_removes_listed_items_and_keeps_referenced_ones_usable(
    prepared: WorkdirItems, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of this file: it deletes the items that the others check."""
    work, client = prepared.work, mlflow_tracking.connect().MlflowClient()
    report = json.loads(run_gc(prepared, capsys, "--json"))
    kinds = {item["kind"]: item["path"] for item in report["items"]}
    assert sorted(item["kind"] for item in report["items"]) == [
        "artifact",
        "artifact",
        "data_object",
        "mlflow_model",
        "mlflow_run",
    ]
    assert {Path(i["path"]).name for i in report["items"] if i["kind"] == "artifact"} == {
        prepared.unreferenced_model.sha256,
        prepared.unreferenced_dataset.sha256,
    }
    assert kinds["mlflow_run"].endswith("(lost)")
    assert "from this run" in next(line["reason"] for line in report["kept"] if line["kind"] == "mlflow_run")
    assert {line["reason"] for line in report["kept"]} >= {"helper version 3 is champion, challenger, candidate"}
    assert not any(item["deleted"] for item in report["items"])
    assert {prepared.unreferenced_model.sha256, prepared.unreferenced_dataset.sha256} <= set(
        artifact_store.list_artifacts(work.store)
    )
    assert f"5 items, {report['bytes'] / 1e9:,.2f} GB, can be deleted with --delete. Nothing was deleted." in run_gc(
        prepared, capsys
    )
    output = run_gc(prepared, capsys, "--delete")
    assert "deleted 5 of 5 items" in output
    assert "helper version 3 is champion" in output
    assert {prepared.unreferenced_model.sha256, prepared.unreferenced_dataset.sha256} & set(
        artifact_store.list_artifacts(work.store)
    ) == set()
    assert not (work.root / "dvc-remote" / "files" / "md5" / "ab" / "cdef").exists()
    assert client.get_run(prepared.runs["lost"]).info.lifecycle_stage == "deleted"
    assert not (work.root / "mlflow-artifacts" / prepared.runs["lost"] / "artifacts" / "report.html").exists()
    assert (work.root / "mlflow-artifacts" / prepared.runs["nested"] / "artifacts" / "report.html").exists()
    assert "nothing to delete" in run_gc(prepared, capsys)
    assert (
        fetch(
            "dataset-v1", tmp_path / "v1", DataVersioningConfig(), workdir=work.root, reporter=SilentReporter()
        ).sha256
        == prepared.dataset.sha256
    )
    for model in prepared.models:
        assert artifact_store.load_artifact(work.store, model.sha256).sha256 == model.sha256
    for number in (1, 2, 3):
        assert (
            model_files.read_logged_manifest("helper", str(number)).content_sha256 == prepared.models[number - 1].sha256
        )
