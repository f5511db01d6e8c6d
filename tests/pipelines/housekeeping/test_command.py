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

from components.common import places, tracking
from components.common.artifacts import Artifact, Input
from components.common.errors import UsageError
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_versioning import retention as data
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import fetch, publish, versions
from components.model_registry import files, retention
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from pipelines.cli import main
from pipelines.housekeeping import found
from pipelines.housekeeping.plan import plan
from tests.data_versioning.conftest import write_curated
from tests.model_registry.conftest import build, empty_store
from tests.pipelines.command import refusal
from tests.pipelines.housekeeping.houses import DAY, LIMIT, OLD, aged

__all__ = ["empty_store"]
pytestmark = [pytest.mark.dvc, pytest.mark.mlflow]
BASE = Input(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")


@dataclass
class Made:
    """What lies in the workdir: what is needed, and what nothing needs."""

    place: Path
    dataset: Artifact
    models: list[Artifact]
    lost_dataset: Artifact
    lost: Artifact
    runs: dict[str, str]
    logged: str

    @property
    def work(self) -> Workdir:
        return Workdir(self.place / "wd")


def tune(work: Workdir, name: str, dataset: Artifact, *, promoted: bool = True) -> Artifact:
    """A model of a dataset with its evaluation and its package, in the store; registered as a version of `helper`."""
    store = work.store

    def adopted(kind: str, inputs: list[Input], said: dict[str, object]) -> Artifact:
        return places.adopt(store, build(work.root / "draft" / f"{name}-{kind}", kind, f"{name} {kind}", inputs, said))

    model = adopted("model", [dataset.as_input(), BASE], {"steps": 3})
    evaluation = adopted("evaluation", [model.as_input(), dataset.as_input(), BASE], {"verdict": "accepted", "reasons": []})
    repository = adopted("repository", [model.as_input()], {"proof": {"matched": 4}})
    version = register(model, evaluation, repository, ModelRegistryConfig(name="helper"), reporter=Silent()).version
    if promoted:
        promote("helper", version, force=True, reason="the test", reporter=Silent())
    return model


def log_run(name: str, parent: str = "", **tags: str) -> str:
    """A run of this workdir with a file that ended long ago."""
    client, then = tracking.connect().MlflowClient(), int((time.time() - OLD) * 1000)
    whose = {tracking.OWNER: places.identity(Workdir.from_environment(), make=True)}
    tags = tags or {"tuneline.stage": name, **whose, **({"mlflow.parentRunId": parent} if parent else {"tuneline.run": name})}
    run = client.create_run(tracking.home(client), start_time=then, tags=tags, run_name=name)
    client.log_text(run.info.run_id, "a page", "report.html")
    client.set_terminated(run.info.run_id, "FAILED", end_time=then)
    return str(run.info.run_id)


def long_ago(work: Workdir) -> None:
    """Have the logged models look as if they were made long ago: MLflow gives these times itself."""
    then = int((time.time() - OLD) * 1000)
    with sqlite3.connect(work.root / "mlflow.db") as database:
        database.execute("UPDATE logged_models SET creation_timestamp_ms = ?, last_updated_timestamp_ms = ?", (then, then))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Made:
    """Versions 1 to 3 of helper, all of them promoted, of a dataset that is published; beside them a dataset and a model that nobody
    registered, runs, a logged model without a version, and an object of the remote that no commit names."""
    place = tmp_path_factory.mktemp("gc")
    work = Workdir(place / "wd")
    work.root.mkdir()
    shutil.copyfile(empty_store, work.root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TUNELINE_STORE", raising=False)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.root / 'mlflow.db'}")
        patch.setenv("TUNELINE_WORKDIR", str(work.root))
        rows = [("a" * 16, "A letter."), ("b" * 16, "Another one.")]
        dataset = places.adopt(work.store, write_curated(place / "one", {"train": rows, "test": []}))
        publish(dataset, DataVersioningConfig(), workdir=work.root, reporter=Silent())
        runs = {"of a version": log_run("of a version")}
        runs |= {"nested": log_run("nested", runs["of a version"]), "lost": log_run("lost")}
        patch.setenv("MLFLOW_RUN_ID", runs["of a version"])
        models = [tune(work, name, dataset) for name in ("one", "two", "three")]
        patch.delenv("MLFLOW_RUN_ID")
        lost_dataset = places.adopt(work.store, write_curated(place / "lost", {"train": rows[:1], "test": []}))
        lost = places.adopt(work.store, build(place / "draft", "model", "lost", [lost_dataset.as_input(), BASE], {"steps": 3}))
        evaluation = build(place / "draft-evaluation", "evaluation", "lost", [lost.as_input()], {"verdict": "refused", "reasons": []})
        logged = files.log(tracking.connect().MlflowClient(), "helper", lost, evaluation, 100).model_id
        shutil.rmtree(work.root / "draft")
    long_ago(work)
    unnamed = work.root / "dvc-remote" / "files" / "md5" / "ab" / "cdef"
    unnamed.parent.mkdir(parents=True, exist_ok=True)
    unnamed.write_text("left by a publication that was killed")
    for folder in (work.store, work.root / "dvc-remote"):
        aged(folder, OLD)
    return Made(place, dataset, models, lost_dataset, lost, runs, logged)


@pytest.fixture
def here(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.work.tracking_uri)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(made.work.root))
    return made


def asked(made: Made, **options: object) -> found.Asked:
    return found.Asked(made.work, DataVersioningConfig(), Silent(), LIMIT, **options)  # type: ignore[arg-type]


def test_versions_that_no_alias_and_no_rollback_reaches_may_go_unless_they_are_new(here: Made) -> None:
    few = plan((world := found.look(asked(here, keep_versions=0))).things, world.roots, asked(here).policy)
    assert {Path(item.thing.path).name for item in few.going if "store" in item.thing.path} >= {here.models[0].sha256}
    reasons = {item.reason for item in few.kept}
    assert {"helper version 3 is champion, challenger, candidate", "helper version 2 is what a rollback of champion leads to"} <= reasons
    many = plan((world := found.look(asked(here))).things, world.roots, asked(here).policy)
    assert here.models[0].sha256 not in {Path(item.thing.path).name for item in many.going}
    assert "helper version 1 is one of its newest 3" in {item.reason for item in many.kept}


def test_a_publication_at_work_and_a_list_of_files_that_is_lost_keep_every_object(here: Made) -> None:
    config, work = DataVersioningConfig(), here.work
    [object_] = data.held(config, workdir=work.root).unnamed
    assert (object_.oid, object_.path.name) == ("abcdef", "cdef")
    publishing = work.state / "data_versioning" / f"publish.{found.jobs.mark()}"
    publishing.mkdir(parents=True)
    assert not data.remove(object_, config, workdir=work.root, unused=LIMIT)
    publishing.rmdir()
    [listing] = (work.root / "dvc-remote").rglob("*.dir")
    aside = listing.rename(work.root / "aside")
    data._named_by.cache_clear()
    lost = data.held(config, workdir=work.root)
    assert lost.unnamed == []
    assert "is lost or damaged" in lost.why_not
    aside.rename(listing)
    assert object_.path.exists()


def test_a_remote_that_others_may_use_is_left_alone_unless_it_is_said_to_be_ours(here: Made, tmp_path: Path) -> None:
    shutil.copytree(here.work.root / "dvc-remote", tmp_path / "remote")
    elsewhere = DataVersioningConfig(remote=str(tmp_path / "remote"))
    assert "--own-remote" in data.held(elsewhere, workdir=here.work.root).why_not
    assert [one.oid for one in data.held(elsewhere, workdir=here.work.root, own_remote=True).unnamed] == ["abcdef"]
    assert "dvc gc --cloud" in data.held(DataVersioningConfig(remote="s3://bucket/data"), workdir=here.work.root).why_not
    assert data.held(DataVersioningConfig(repository="none"), workdir=here.work.root).why_not == "there is no data repository"


def test_what_a_file_of_dvc_named_before_it_was_renamed_is_needed(here: Made, tmp_path: Path) -> None:
    """Git's list of objects says one name of each only, here the last."""
    clone, remote = tmp_path / "clone", here.work.root / "dvc-remote" / "files" / "md5"
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    (clone / "d.dvc").write_text("outs:\n- md5: abcdef\n  path: d\n")
    for words in (("add", "."), ("commit", "-qm1"), ("mv", "d.dvc", "d.dvc.disabled"), ("commit", "-qm2")):
        subprocess.run(["git", "-C", str(clone), *name, *words], check=True)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(clone), str(tmp_path / "r.git")], check=True)
    (remote / "ab" / "unnamed").write_text("")
    unnamed = {one.oid for one in data.held(DataVersioningConfig(repository=str(tmp_path / "r.git")), workdir=here.work.root).unnamed}
    (remote / "ab" / "unnamed").unlink()
    assert "abunnamed" in unnamed
    assert "abcdef" not in unnamed


def test_a_remote_beside_the_workdir_is_no_folder_in_it_however_it_is_written(here: Made, tmp_path: Path) -> None:
    shared = here.place / "shared"
    shutil.copytree(here.work.root / "dvc-remote", shared)
    (here.work.root / "link").symlink_to(shared)
    for remote in ("../shared", "link"):
        assert "--own-remote" in data.held(DataVersioningConfig(remote=remote), workdir=here.work.root).why_not
    (here.work.root / "link").unlink()
    shutil.rmtree(shared)


def test_without_a_registry_that_knows_of_anything_nothing_may_go(
    here: Made, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uri in (f"sqlite:///{tmp_path / 'missing.db'}", f"sqlite:///{shutil.copyfile(empty_store, tmp_path / 'empty.db')}"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(found.RegistryMissingError, match="the registry knows of no model version, and the store"):
            found.look(asked(here))
    assert found.look(asked(here, no_registry=True)).things


def test_without_the_data_repository_of_the_runs_nothing_may_go(here: Made, tmp_path: Path) -> None:
    def look(repository: Path, **options: object) -> found.World:
        config = DataVersioningConfig(repository=str(repository))
        return found.look(found.Asked(here.work, config, Silent(), LIMIT, **options))  # type: ignore[arg-type]

    away = tmp_path / "not mounted" / "data.git"
    with pytest.raises(found.RepositoryMissingError, match=f"there is no data repository {away}, and the store .* holds 2 datasets"):
        look(away)
    assert look(away, no_repository=True).things
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "another.git")], check=True)
    work, there = Workdir(here.work.root), here.work.root / "data-repository"
    uri = versions(DataVersioningConfig(), workdir=work.root)[0].uri
    model = build(tmp_path / "draft", "model", "of a revision", [here.dataset.as_input(uri), BASE], {"steps": 3})
    kept = places.adopt(work.store, model)
    with pytest.raises(found.RepositoryMissingError, match=f"was made from revisions of {there}, which was not asked"):
        look(tmp_path / "another.git")
    assert look(tmp_path / "another.git", no_repository=True).things
    moved = shutil.copytree(there, tmp_path / "moved.git")
    assert f"store:{here.dataset.sha256}" in {root.name for root in look(moved).roots}, "a moved repository is known by its commits"
    (tmp_path / "link.git").symlink_to(there)
    assert look(tmp_path / "link.git").things
    shutil.rmtree(kept.path)


def test_a_repository_that_goes_away_on_the_way_ends_it_there(here: Made, tmp_path: Path) -> None:
    world, there = found.look(asked(here)), here.work.root / "data-repository"
    there.rename(tmp_path / "unmounted")
    with pytest.raises(found.RepositoryMissingError, match="there is no data repository"):
        found.roots(asked(here), world.things)
    (tmp_path / "unmounted").rename(there)


def test_what_others_logged_in_the_same_mlflow_is_theirs_and_told(here: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "another"))
    theirs = log_run("theirs")
    older = log_run("older", **{"tuneline.run": "of an earlier version"})
    monkeypatch.setenv("TUNELINE_WORKDIR", str(here.work.root))
    world = found.look(asked(here, keep_runs=0))
    assert not {f"mlflow_run:{theirs}", f"mlflow_run:{older}"} & {thing.name for thing in world.things}
    assert any(note.startswith("2 runs and models in MLflow do not say that they are of this workdir") for note in world.notes)
    nobody = found.look(found.Asked(Workdir(tmp_path), DataVersioningConfig(), Silent(), LIMIT, no_registry=True, no_repository=True))
    assert not any(thing.kind.startswith("mlflow") for thing in nobody.things)
    assert any("do not say that they are of this workdir" in note for note in nobody.notes)
    every = {thing.name for thing in found.look(asked(here, keep_runs=0, all_runs=True)).things}
    assert {f"mlflow_run:{theirs}", f"mlflow_run:{older}"} <= every
    assert [one.id for one in retention.unversioned_models(LIMIT, "another")] == []
    for run_id in (theirs, older):
        retention.remove_run(run_id)


def test_the_newest_runs_of_kubeflow_stay_with_all_their_steps_and_the_recipes_of_a_sweep_go_with_it(here: Made) -> None:
    mine = {tracking.OWNER: places.identity(here.work)}
    steps = {n: [log_run(s, **{"tuneline.stage": s, tracking.PIPELINE: n, **mine}) for s in ("curation", "tuning")] for n in ("one", "two")}
    recipe = log_run("recipe-1", **{"mlflow.parentRunId": steps["one"][1]})
    kept = {one.id: one.stays for one in retention.ended_runs(LIMIT, mine[tracking.OWNER], 1)}
    assert {kept[run_id] for run_id in steps["two"]} == {"one of the newest 1 runs"}
    assert {kept[run_id] for run_id in (*steps["one"], recipe)} == {""}
    world = found.look(asked(here, keep_runs=1))
    going = [item.thing.name.partition(":")[2] for item in plan(world.things, world.roots, asked(here).policy).going]
    assert {*steps["one"], recipe} <= set(going)
    assert going.index(steps["one"][1]) < going.index(recipe), "a run goes before what is nested in it"
    for run_id in (*steps["one"], *steps["two"], recipe):
        retention.remove_run(run_id)


def test_a_registration_that_comes_in_between_keeps_its_files(here: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_models_of_versions", lambda _: {here.logged})
    assert not retention.remove_model(here.logged)
    kept = tracking.connect().MlflowClient().get_logged_model(here.logged)
    assert kept.tags["tuneline.model_sha256"] == here.lost.sha256
    assert retention.REMOVING not in kept.tags
    long_ago(here.work)


def test_a_logged_model_whose_removal_was_killed_is_found_by_no_registration_and_is_still_to_go(
    here: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tracking.connect().MlflowClient()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("components.model_registry.retention._remove_files", "mlflow.MlflowClient.delete_logged_model"):
        with monkeypatch.context() as patch:
            patch.setattr(place, die)
            with pytest.raises(KeyboardInterrupt):
                retention.remove_model(here.logged)
        by_digest = client.search_logged_models([tracking.home(client)], f"tags.`tuneline.model_sha256` = '{here.lost.sha256}'")
        assert list(by_digest) == []
        long_ago(here.work)
        assert [one.id for one in retention.unversioned_models(LIMIT, places.identity(here.work))] == [here.logged]


def test_a_place_that_is_none_is_refused_and_one_whose_server_is_away_loses_nothing(here: Made) -> None:
    with pytest.raises(UsageError, match="there is no workdir"):
        found.look(found.Asked(Workdir(here.place / "nowhere"), DataVersioningConfig(), Silent(), LIMIT))
    before, away = places.listed(here.work.store), "http://127.0.0.1:9"
    error = refusal(1, "gc", "--delete", "--workdir", "wd", "--tracking-uri", away, cwd=here.place)
    assert (error["kind"], error["message"]) == ("engine_missing", f"the MLflow server {away} does not answer: Connection refused")
    assert places.listed(here.work.store) == before


def test_words_that_cannot_be_meant_are_refused_before_anything_is_looked_at(tmp_path: Path) -> None:
    from pipelines.cli import housekeeping

    for text, message in {"soon": "is no age", "0d": "is too short", "30": "is no age"}.items():
        with pytest.raises(UsageError, match=message):
            housekeeping._age(text)
    with pytest.raises(UsageError, match="there is no such kind"):
        housekeeping._kinds(["everything"])
    assert housekeeping._age("8w") == 56 * DAY
    work = Workdir(tmp_path)
    with pytest.raises(UsageError, match="neither in the artifact store nor a run"):
        found.pin(work, "../../etc", "because")
    with pytest.raises(UsageError, match="is not pinned"):
        found.unpin(work, "a" * 64)


def gc(made: Made, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command prints, in this process: a start of its own takes seconds."""
    capsys.readouterr()
    assert main.app(["gc", "--workdir", str(made.work.root), "--keep-runs", "0", *options], standalone_mode=False) == 0
    return capsys.readouterr().out


def test_what_nothing_needs_is_shown_then_removed_and_everything_needed_still_works(
    here: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of this file: it removes what the others look at."""
    work, client = here.work, tracking.connect().MlflowClient()
    shown = json.loads(gc(here, capsys, "--json"))
    kinds = {item["kind"]: item["path"] for item in shown["items"]}
    assert sorted(item["kind"] for item in shown["items"]) == ["artifact", "artifact", "data_object", "mlflow_model", "mlflow_run"]
    assert {Path(i["path"]).name for i in shown["items"] if i["kind"] == "artifact"} == {here.lost.sha256, here.lost_dataset.sha256}
    assert kinds["mlflow_run"].endswith("(lost)")
    assert "of it" in next(line["reason"] for line in shown["kept"] if line["kind"] == "mlflow_run")
    assert {line["reason"] for line in shown["kept"]} >= {"helper version 3 is champion, challenger, candidate"}
    assert not any(item["deleted"] for item in shown["items"])
    assert {here.lost.sha256, here.lost_dataset.sha256} <= set(places.listed(work.store))
    assert f"5 things, {shown['bytes'] / 1e9:,.2f} GB, may go; --delete removes them. Nothing was removed." in gc(here, capsys)
    told = gc(here, capsys, "--delete")
    assert "removed 5 of 5 things" in told
    assert "helper version 3 is champion" in told
    assert {here.lost.sha256, here.lost_dataset.sha256} & set(places.listed(work.store)) == set()
    assert not (work.root / "dvc-remote" / "files" / "md5" / "ab" / "cdef").exists()
    assert client.get_run(here.runs["lost"]).info.lifecycle_stage == "deleted"
    assert not (work.root / "mlflow-artifacts" / here.runs["lost"] / "artifacts" / "report.html").exists()
    assert (work.root / "mlflow-artifacts" / here.runs["nested"] / "artifacts" / "report.html").exists()
    assert "there is nothing to remove" in gc(here, capsys)
    assert fetch("dataset-v1", tmp_path / "v1", DataVersioningConfig(), workdir=work.root, reporter=Silent()).sha256 == here.dataset.sha256
    for model in here.models:
        assert places.stored(work.store, model.sha256).sha256 == model.sha256
    for number in (1, 2, 3):
        assert files.kept("helper", str(number)).content_sha256 == here.models[number - 1].sha256
