"""Deletion keeps required items, deletes planned ones, and loses no required item if it is killed.

long: collections are killed before each file operation, or run concurrently for seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common import pipeline_step
from components.common.artifacts import artifact_folder
from components.common.runtime.errors import ArtifactDamagedError, EngineMissingError, TunelineError, UsageError
from components.common.workspace import artifact_store, job_folders, liveness
from components.model_registry import registry_retention as registry
from pipelines.operations.garbage_collection import deletion, inventory
from pipelines.operations.garbage_collection.retention_plan import RetentionPlan, build_plan
from tests.pipelines.garbage_collection.workspaces import (
    DAY,
    OLD,
    YOUNG,
    Workspace,
    create_history,
    find_required,
    list_private_folders,
    open_workspace,
    set_age,
)

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.link")


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with open_workspace(tmp_path / "wd") as workspace:
        yield workspace


def plan_deletion(
    workspace: Workspace, **options: Any
) -> tuple[RetentionPlan, inventory.Inventory, inventory.CollectionRequest]:
    request = workspace.build_request(**options)
    deletion.recover(request)
    listed = inventory.take_inventory(request)
    return build_plan(listed.items, listed.roots, request.policy), listed, request


def collect(workspace: Workspace, **options: Any) -> list[deletion.DeletionResult]:
    """Run `tuneline gc --delete`."""
    return list(deletion.delete_unreferenced(*plan_deletion(workspace, **options)))


def list_paths(plan: RetentionPlan) -> set[Path]:
    return {Path(item.item.path) for item in plan.to_delete}


def check_intact(workspace: Workspace, required: set[str]) -> None:
    """Check that all required artifacts exist and that every artifact is intact."""
    for sha256 in required:
        assert artifact_store.load_artifact(workspace.work.store, sha256).sha256 == sha256
    for sha256 in artifact_store.list_artifacts(workspace.work.store):
        assert artifact_folder.read(workspace.work.store / sha256).sha256 == sha256


@pytest.mark.parametrize("seed", range(12))
def test_random_history_keeps_referenced_and_deletes_planned_items(workspace: Workspace, seed: int) -> None:
    create_history(workspace, random.Random(seed), 8)
    required = find_required(workspace, workspace.build_request())
    plan, listed, request = plan_deletion(workspace)
    assert {
        item.item.name.removeprefix("store:") for item in plan.to_delete if item.item.kind == "artifact"
    } == workspace.ages.keys() - required
    assert not any(outcome.kept_because for outcome in deletion.delete_unreferenced(plan, listed, request))
    assert not any(path.exists() for path in list_paths(plan))
    assert set(artifact_store.list_artifacts(workspace.work.store)) == required
    check_intact(workspace, required)
    assert list_private_folders(workspace) == []
    assert plan_deletion(workspace)[0].to_delete == []


def run_in_child(work: Callable[[], None], before: Callable[[], None] = lambda: None) -> int:
    """Run a function in a child process and return its exit code, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            before()
            work()
        except BaseException:  # pytest must not continue in the child
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_change(change: int) -> None:
    """Kill this process right before its n-th change of the file system, counted from 0."""
    remaining = [change]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1

    sys.addaudithook(hook)


def create_items(workspace: Workspace) -> set[str]:
    """Create one deletable and one required item of each kind. Returns the required artifacts."""
    data, other = workspace.create_artifact("dataset", "data"), workspace.create_artifact("dataset", "other")
    model = workspace.create_artifact("model", "model", [data])
    workspace.create_artifact("repository", "lost", [workspace.create_artifact("model", "lost model", [other])])
    workspace.aliased = [model]
    workspace.create_state("fine_tuning", "old")
    workspace.create_state("fine_tuning", "young", YOUNG)
    workspace.create_state("tokens", "tokens")
    workspace.create_run(1)
    workspace.create_run(2, YOUNG)
    workspace.create_deployment("helper", model, other)
    return {data, model}


@pytest.mark.long
def test_next_collection_completes_a_killed_one_without_loss(
    tmp_path: Path,
) -> None:
    for change in range(1000):
        with open_workspace(tmp_path / f"wd{change}") as workspace:
            required = create_items(workspace)
            plan, _, _ = plan_deletion(workspace)
            assert len(plan.to_delete) == 7
            exit_code = run_in_child(
                lambda workspace=workspace: collect(workspace) and None, lambda change=change: kill_at_change(change)
            )
            check_intact(workspace, required)
            assert (workspace.work.state / "fine_tuning" / "young" / "checkpoint-5" / "weights").read_text() == "young"
            assert not any(outcome.failed for outcome in collect(workspace))
            assert not any(path.exists() for path in list_paths(plan)), f"killed before change {change}"
            assert set(artifact_store.list_artifacts(workspace.work.store)) == required
            assert list_private_folders(workspace) == []
            if exit_code == 0:
                assert change > 40, "every change was tried"
                return
            assert exit_code == -signal.SIGKILL
    pytest.fail("the collection never completed")


def test_concurrent_collections_succeed(workspace: Workspace) -> None:
    required = create_items(workspace)
    plan, _, _ = plan_deletion(workspace)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                os._exit(int(any(outcome.failed for outcome in collect(workspace))))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert not any(path.exists() for path in list_paths(plan))
    check_intact(workspace, required)
    assert list_private_folders(workspace) == []


def test_artifact_used_right_before_its_deletion_is_kept(workspace: Workspace) -> None:
    sha256 = workspace.create_artifact("dataset", "data")
    plan, listed, request = plan_deletion(workspace)
    artifact_store.load_artifact(workspace.work.store, sha256)
    [outcome] = deletion.delete_unreferenced(plan, listed, request)
    assert (outcome.kept_because, outcome.failed) == (deletion.IN_USE_REASON, False)
    check_intact(workspace, {sha256})


def test_artifact_used_between_check_and_move_is_restored(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = workspace.create_artifact("dataset", "data")
    move = job_folders.move_aside

    def use_then_move(home: Path, aside: Path) -> Path:
        artifact_store.mark_used(workspace.work.store, sha256)
        return move(home, aside)

    plan, listed, request = plan_deletion(workspace)
    monkeypatch.setattr(job_folders, "move_aside", use_then_move)
    [outcome] = deletion.delete_unreferenced(plan, listed, request)
    assert outcome.kept_because == deletion.IN_USE_REASON
    check_intact(workspace, {sha256})
    assert list_private_folders(workspace) == []


@pytest.mark.long
def test_concurrent_jobs_reuse_or_rebuild_old_artifacts(workspace: Workspace) -> None:
    """Each job finds an artifact by its key and reads it, as a step does, about when it becomes old enough to delete."""
    store, stop_file, old_after_seconds = workspace.work.store, workspace.work.root / "enough", 0.5

    def use_repeatedly() -> None:
        random_ = random.Random(os.getpid())
        while not stop_file.exists():
            requested_at = time.monotonic()
            try:
                artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
                assert (artifact.path / "rows").read_text() == "a row"
            except (ArtifactDamagedError, FileNotFoundError):
                assert time.monotonic() - requested_at > old_after_seconds / 2, (
                    "only a wait on a busy machine may let a used artifact become old"
                )
            # With little variation, the two users could alternate for minutes, and the artifact would never become old.
            time.sleep(random_.uniform(0.5, 1.8) * old_after_seconds)

    def build(folder: Path) -> artifact_folder.Artifact:
        folder.mkdir(parents=True)
        (folder / "rows").write_text("a row")
        return artifact_folder.publish(
            folder, "dataset", payload=["rows"], inputs=[], config={}, seed=1, key="key", summary={}
        )

    def remove() -> None:
        start, removed = time.monotonic(), 0
        try:
            while (
                not removed or time.monotonic() < start + 4
            ):  # on a busy machine artifacts become old enough less often
                assert time.monotonic() < start + 120, "no artifact became old enough"
                removed += sum(
                    artifact_store.remove_artifact(store, sha256, old_after_seconds)
                    for sha256 in artifact_store.list_artifacts(store)
                )
        finally:
            stop_file.touch()

    children = []
    for task in (use_repeatedly, use_repeatedly, remove):
        child = os.fork()
        if child == 0:
            try:
                task()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]


def test_step_marks_its_inputs_as_used_until_it_ends(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = workspace.create_artifact("dataset", "data")
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(workspace.work.root))
    with pipeline_step.step_context("evaluation", tracked=False) as running:
        running.load_artifact(sha256, "dataset")
        for _ in range(3):
            workspace.set_last_use(sha256, OLD)
            until = time.monotonic() + 60
            while artifact_store.seconds_since_use(workspace.work.store / sha256) > DAY:
                assert time.monotonic() < until
                time.sleep(0.01)
    time.sleep(0.1)
    workspace.set_last_use(sha256, OLD)
    time.sleep(0.1)
    assert artifact_store.seconds_since_use(workspace.work.store / sha256) > DAY


def test_artifacts_read_by_address_are_marked_as_used(workspace: Workspace) -> None:
    sha256 = workspace.create_artifact("repository", "package")
    folder = artifact_store.resolve_artifact_uri((workspace.work.store / sha256).as_uri())
    assert folder == workspace.work.store / sha256
    assert artifact_store.seconds_since_use(folder) < DAY


def test_locked_checkpoint_is_kept_regardless_of_age(workspace: Workspace) -> None:
    folder = workspace.create_state("sweeps", "key")
    trial = workspace.create_state("sweeps/key", "trial-3")
    with job_folders.folder_lock(trial):
        set_age(folder, OLD)
        [kept] = plan_deletion(workspace)[0].kept
        assert kept.reason == "locked by a job"
    set_age(folder, OLD)
    plan, listed, request = plan_deletion(workspace)
    with job_folders.folder_lock(folder):
        [outcome] = deletion.delete_unreferenced(plan, listed, request)
    assert outcome.kept_because == deletion.IN_USE_REASON
    assert (trial / "checkpoint-5" / "weights").exists()


def test_state_used_since_the_listing_is_not_moved(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace.create_state("fine_tuning", "key")
    plan, listed, request = plan_deletion(workspace)
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "weights").write_text("new")
    moved: list[Path] = []
    monkeypatch.setattr(Path, "rename", lambda self, _: moved.append(self))
    [outcome] = deletion.delete_unreferenced(plan, listed, request)
    assert (outcome.kept_because, outcome.failed, moved) == (deletion.IN_USE_REASON, False, [])
    assert (folder / "checkpoint-9" / "weights").read_text() == "new"


@pytest.mark.parametrize("blocked", [False, True])
def test_checkpoint_is_restored_beside_an_occupied_path(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    folder = workspace.create_state("fine_tuning", "key")
    plan, listed, request = plan_deletion(workspace)
    seconds_since_write = inventory.seconds_since_write

    def write_during_check(path: Path, *, touched: bool = True) -> float:
        if path.name != deletion.QUARANTINED_NAME:
            return seconds_since_write(path, touched=touched)
        (path / "checkpoint-9").mkdir()
        (path / "checkpoint-9" / "weights").write_text("new")
        folder.mkdir()
        (folder / "training.jsonl").write_text("a job that begins anew")
        folder.parent.rename(workspace.work.root / "away") if blocked else None
        (workspace.work.state / "fine_tuning").write_text("no folder") if blocked else None
        return seconds_since_write(path, touched=touched)

    monkeypatch.setattr(inventory, "seconds_since_write", write_during_check)
    [outcome] = deletion.delete_unreferenced(plan, listed, request)
    assert outcome.kept_because
    [checkpoint] = workspace.work.root.rglob("checkpoint-9/weights")
    assert (checkpoint.read_text(), checkpoint.is_relative_to(folder)) == ("new", False)
    assert checkpoint.parent.parent.name.startswith("key.") or blocked


def test_queued_job_keeps_its_state_and_inputs(workspace: Workspace) -> None:
    dataset = workspace.create_artifact("dataset", "data")
    tokens = workspace.create_state("tokens", "t0k3n5")
    job = workspace.create_state("fine_tuning", "key", YOUNG) / "launch"
    job.mkdir()
    (job / "job.json").write_text(
        json.dumps(
            {
                "tokens": f"{tokens.absolute()}/train",
                "seed": 1,
                "config": {"base": [f"{(workspace.work.store / dataset).absolute()}"]},
            }
        )
    )
    plan, _, _ = plan_deletion(workspace)
    assert plan.to_delete == []
    assert {item.item.kind for item in plan.kept} == {"artifact", "state"}


def test_active_deployment_keeps_its_packages(workspace: Workspace) -> None:
    served, unused = (
        workspace.create_artifact("repository", "one", age=YOUNG),
        workspace.create_artifact("repository", "two", age=YOUNG),
    )
    folder = workspace.create_deployment("helper", served, unused)
    with job_folders.folder_lock(folder):
        assert plan_deletion(workspace)[0].to_delete == []
    assert list_paths(plan_deletion(workspace)[0]) == {folder / "packages" / unused}
    (folder / "state.json").write_text("{")
    assert plan_deletion(workspace)[0].to_delete == [], "the served package is unknown"


def test_store_path_is_marked_as_used_until_the_command_ends(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = workspace.create_artifact("repository", "package")
    folder, link = workspace.work.store / sha256, workspace.work.root / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(workspace.work.root))
    for path in (folder, str(link), folder / "payload" / "one.bin", f"store:{sha256}"):
        workspace.set_last_use(sha256, OLD)
        with artifact_store.keep_paths_in_use(path, "hf://org/name@revision", workspace.work.root):
            assert artifact_store.seconds_since_use(folder) < DAY
            workspace.set_last_use(sha256, OLD)
            until = time.monotonic() + 60
            while artifact_store.seconds_since_use(folder) > DAY:
                assert time.monotonic() < until
                time.sleep(0.01)
        time.sleep(0.1)


COMMANDS = (
    ("finetune", "{store}", "-o", "out"),
    ("evaluate", "embedded:tiny", "--dataset", "{store}", "-o", "out"),
    ("package", "{store}", "-o", "out"),
    ("serve", "{store}"),
    ("register", "--model", "{store}", "--evaluation", "none"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_command_marks_a_store_path_as_used(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The argument is of a kind that no command accepts, so that each command ends there."""
    from pipelines.cli import main

    monkeypatch.chdir(tmp_path)
    folder = workspace.work.store / workspace.create_artifact("quarantine", "of no kind")
    with pytest.raises(TunelineError):
        main.app([word.format(store=folder) for word in command], standalone_mode=False)
    assert artifact_store.seconds_since_use(folder) < DAY


def test_sweep_recipes_are_kept_while_one_is_young(workspace: Workspace) -> None:
    sweep, old, young = (
        workspace.create_state("sweeps", "sweep"),
        workspace.create_state("sweeps", "one"),
        workspace.create_state("fine_tuning", "two", YOUNG),
    )
    (sweep / artifact_store.LINKED_STATE_FILENAME).write_text(
        json.dumps(["sweeps/one", "fine_tuning/two", "sweeps/gone", "../elsewhere"])
    )
    set_age(sweep, OLD)
    assert plan_deletion(workspace)[0].to_delete == []
    set_age(young, OLD)
    plan, listed, request = plan_deletion(workspace)
    assert plan.to_delete[0].item.path == str(sweep)
    assert list_paths(plan) == {sweep, old, young}
    with job_folders.folder_lock(sweep):
        assert {outcome.kept_because for outcome in deletion.delete_unreferenced(plan, listed, request)} == {
            deletion.IN_USE_REASON
        }
    assert old.exists()


def test_item_used_during_the_collection_keeps_its_dependencies(workspace: Workspace) -> None:
    dataset = workspace.create_artifact("dataset", "data")
    model = workspace.create_artifact("model", "model", [dataset])
    plan, listed, request = plan_deletion(workspace)
    artifact_store.mark_used(workspace.work.store, model)
    assert [outcome.kept_because for outcome in deletion.delete_unreferenced(plan, listed, request)] == [
        deletion.IN_USE_REASON
    ] * 2
    check_intact(workspace, {dataset, model})


def test_unreadable_item_is_kept_and_reported(workspace: Workspace) -> None:
    not_an_object, other, bad_result = (workspace.create_run(n) for n in range(3))
    (not_an_object / "run.json").write_text("[1]")
    (bad_result / "run.json").write_text('{"status": "finished", "result": "x"}')
    folder = workspace.create_state("fine_tuning", "key")
    (folder / "job.json").write_text("[]")
    set_age(folder, OLD)
    deployment = workspace.create_deployment(
        "helper",
        workspace.create_artifact("repository", "served", age=YOUNG),
        workspace.create_artifact("repository", "other", age=YOUNG),
    )
    (deployment / "repository" / "m").mkdir(parents=True)
    (deployment / "repository" / "m" / "1").symlink_to("x")
    set_age(not_an_object, OLD), set_age(bad_result, OLD)
    plan, _, _ = plan_deletion(workspace)
    assert list_paths(plan) == {other, folder}
    reasons = {item.item.path: item.reason for item in plan.kept}
    assert reasons[str(not_an_object)] == "cannot be assessed: run.json contains list; expected a JSON object"
    assert reasons[str(bad_result)].startswith("cannot be assessed: ")
    assert sum("does not point to a package" in reason for reason in reasons.values()) == 2


def test_file_removed_during_the_listing_is_ignored(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = workspace.create_artifact("dataset", "data")
    folder = workspace.create_state("fine_tuning", "key", OLD)
    (folder / "job.json").write_text(json.dumps({"dataset": str(workspace.work.store / dataset)}))
    set_age(folder, OLD)
    walk = inventory._walk
    monkeypatch.setattr(inventory, "_walk", lambda path: iter([*walk(path), path / "checkpoint-4"]))
    workspace.create_run(1)
    plan, _, _ = plan_deletion(workspace)
    assert plan.to_delete == []
    assert {item.item.kind for item in plan.kept} == {"artifact", "state", "run"}


def test_copy_of_a_queued_jobs_input_is_kept(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = workspace.create_artifact("dataset", "data")
    job = workspace.create_state("fine_tuning", "key", YOUNG) / "job.json"
    job.write_text(json.dumps({"dataset": str(workspace.work.store / sha256)}))
    with monkeypatch.context() as patch:
        patch.setattr(artifact_store, "describe_store", lambda _: "s3://bucket/prefix")
        stored_items = [
            *inventory.list_cached_copies(workspace.work.store),
            *inventory.list_states(workspace.work.state),
        ]
    assert [stored.kind for stored in stored_items] == ["copy", "state"]
    assert build_plan(stored_items, [], workspace.build_request().policy).to_delete == []


def test_items_of_another_user_are_kept_or_reported_as_leftovers(workspace: Workspace) -> None:
    """Run as user 65534 in a child process, which only root can start."""
    if os.getuid():
        pytest.skip("only root can become another user")
    dataset, state = workspace.create_artifact("dataset", "data"), workspace.create_state("fine_tuning", "key")
    private_run = workspace.create_run(1)
    private_run.chmod(0o700)
    for folder in (
        workspace.work.root,
        workspace.work.store,
        workspace.work.store / dataset,
        workspace.work.state,
        state.parent,
        state,
    ):
        folder.chmod(0o777)
    for parent in workspace.work.root.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o055)

    def collect_as_another_user() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        plan, listed, request = plan_deletion(workspace)
        outcomes = list(deletion.delete_unreferenced(plan, listed, request))
        assert [outcome.failed for outcome in outcomes] == [True, True]
        assert all("Permission denied" in outcome.kept_because for outcome in outcomes)
        assert len(deletion.list_leftovers(request)) == 2
        assert any(item.reason.startswith("cannot be assessed: ") for item in plan.kept)

    assert run_in_child(collect_as_another_user) == 0
    assert len(deletion.list_leftovers(workspace.build_request())) == 2
    assert plan_deletion(workspace)[0].names == {f"run:{private_run.name}"}
    assert deletion.list_leftovers(workspace.build_request()) == [], "the next collection by their owner removes them"


def test_active_run_keeps_its_used_artifacts_and_their_inputs(workspace: Workspace) -> None:
    raw = workspace.create_artifact("dataset", "raw")
    used = workspace.create_artifact("model", "used", [raw], 31 * DAY)
    workspace.create_artifact("model", "before", age=33 * DAY)
    process = {
        "pid": os.getpid(),
        "where": liveness.identify_host(),
        "process_started": psutil.Process().create_time(),
    }
    workspace.create_run(1, 32 * DAY, status="running", started=time.time() - 20 * DAY, **process)  # with a wrong clock
    plan, _, _ = plan_deletion(workspace)
    assert [item.item.path for item in plan.to_delete] == [
        str(workspace.work.store / sha) for sha in workspace.ages if sha not in (raw, used)
    ]
    assert {item.reason for item in plan.kept if item.item.kind == "artifact"} == {
        "used by the active run 20260101-000001-abcd"
    }


def test_newest_and_pinned_runs_keep_their_results(workspace: Workspace) -> None:
    models = [workspace.create_artifact("model", f"model {n}") for n in range(3)]
    runs = [workspace.create_run(n, results=[sha]) for n, sha in enumerate(models)]
    assert inventory.pin(workspace.work, f"runs/{runs[0].name}", "the audit of 2026") == runs[0].name
    (
        workspace.work.store / inventory.PINS_FOLDER / "runs"
    ).mkdir()  # created by a pinned path; it broke every later collection
    for word in (".", "..", "runs", "/"):
        with pytest.raises(UsageError, match="neither an artifact in the store nor a run"):
            inventory.pin(workspace.work, word, "because")
    plan, _, _ = plan_deletion(workspace, keep_runs=1)
    assert list_paths(plan) == {runs[1], workspace.work.store / models[1]}
    assert "pinned: the audit of 2026" in {item.reason for item in plan.kept}
    assert artifact_store.list_notes(workspace.work.store, inventory.PINS_FOLDER) == [runs[0].name]
    assert inventory.unpin(workspace.work, str(runs[0])) == runs[0].name
    assert runs[0] in list_paths(plan_deletion(workspace, keep_runs=1)[0])


def test_unreadable_manifest_keeps_an_artifact_and_a_missing_one_does_not(workspace: Workspace) -> None:
    unreadable, missing = workspace.create_artifact("model", "damaged"), workspace.create_artifact("model", "without")
    (workspace.work.store / unreadable / "manifest.json").write_text("{")
    (workspace.work.store / missing / "manifest.json").unlink()
    for sha256 in (unreadable, missing):
        set_age(workspace.work.store / sha256, OLD)
    plan, _, _ = plan_deletion(workspace)
    assert list_paths(plan) == {workspace.work.store / missing}
    [kept] = plan.kept
    assert kept.reason.startswith("its manifest cannot be read: ")
    collect(workspace)
    assert not (workspace.work.store / missing).exists()


def test_alias_moved_during_the_deletion_keeps_its_artifacts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = workspace.create_artifact("dataset", "data")
    model = workspace.create_artifact("model", "model", [base])
    workspace.create_artifact("model", "other")
    plan, listed, request = plan_deletion(workspace)
    assert len(plan.to_delete) == 3
    monkeypatch.setattr(deletion, "ROOTS_REFRESH_SECONDS", 0.0)
    workspace.aliased = [model]
    kept = {
        outcome.decision.item.path
        for outcome in deletion.delete_unreferenced(plan, listed, request)
        if outcome.kept_because
    }
    assert kept == {str(workspace.work.store / sha) for sha in (base, model)}
    check_intact(workspace, {base, model})


def test_registry_lost_during_the_deletion_ends_it(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [workspace.create_artifact("model", f"model {n}") for n in range(3)]
    plan, listed, request = plan_deletion(workspace)
    monkeypatch.setattr(deletion, "ROOTS_REFRESH_SECONDS", 0.0)

    def fail(_: int) -> list[registry.RetainedDigests]:
        raise EngineMissingError("the MLflow server does not answer", hint="Start it.")

    with monkeypatch.context() as patch:  # undone before the workspace's own patches
        patch.setattr(registry, "list_retained_digests", fail)
        with pytest.raises(EngineMissingError):
            list(deletion.delete_unreferenced(plan, listed, request))
    check_intact(workspace, set(models))


def test_undeletable_item_is_reported_and_the_rest_is_deleted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [workspace.create_artifact("model", f"model {n}") for n in range(2)]
    remove_artifact = artifact_store.remove_artifact

    def remove_or_fail(store: Path, sha256: str, unused: float) -> bool:
        if sha256 == models[0]:
            raise PermissionError(13, "Permission denied")
        return remove_artifact(store, sha256, unused)

    monkeypatch.setattr(artifact_store, "remove_artifact", remove_or_fail)
    outcomes = {outcome.decision.item.name: outcome for outcome in collect(workspace)}
    assert [outcomes[f"store:{sha}"].failed for sha in models] == [True, False]
    assert "Permission denied" in outcomes[f"store:{models[0]}"].kept_because
    assert artifact_store.list_artifacts(workspace.work.store) == [models[0]]
