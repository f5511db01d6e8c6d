"""Removing: of random pasts nothing that is needed goes, all that was promised does, and a kill at any moment loses nothing."""

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

import pytest

from components.common import artifacts, jobs, liveness, places, step
from components.common.errors import ArtifactDamagedError, EngineMissingError, TunelineError, UsageError
from components.model_registry import retention as registry
from pipelines.housekeeping import found, removal
from pipelines.housekeeping.plan import Plan, plan
from tests.pipelines.housekeeping.houses import DAY, OLD, YOUNG, House, aged, empty, history, left_over, needed

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.link")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with empty(tmp_path / "wd") as made:
        yield made


def decided(house: House, **options: Any) -> tuple[Plan, found.World, found.Asked]:
    asked = house.asked(**options)
    removal.tidy(asked)
    world = found.look(asked)
    return plan(world.things, world.roots, asked.policy), world, asked


def collect(house: House, **options: Any) -> list[removal.Outcome]:
    """The whole of `tuneline gc --delete`."""
    return list(removal.carry_out(*decided(house, **options)))


def paths(plan_: Plan) -> set[Path]:
    return {Path(item.thing.path) for item in plan_.going}


def check_whole(house: House, stay: set[str]) -> None:
    """What has to stay is whole, and what is there at all is whole as well."""
    for sha256 in stay:
        assert places.stored(house.work.store, sha256).sha256 == sha256
    for sha256 in places.listed(house.work.store):
        assert artifacts.read(house.work.store / sha256).sha256 == sha256


@pytest.mark.parametrize("seed", range(12))
def test_of_a_random_past_all_that_is_needed_stays_and_all_that_was_promised_goes(house: House, seed: int) -> None:
    history(house, random.Random(seed), 8)
    stay = needed(house, house.asked())
    promised, world, asked = decided(house)
    assert {item.thing.name.removeprefix("store:") for item in promised.going if item.thing.kind == "artifact"} == house.ages.keys() - stay
    assert not any(outcome.kept for outcome in removal.carry_out(promised, world, asked))
    assert not any(path.exists() for path in paths(promised))
    assert set(places.listed(house.work.store)) == stay
    check_whole(house, stay)
    assert left_over(house) == []
    assert decided(house)[0].going == []


def in_child(work: Callable[[], None], before: Callable[[], None] = lambda: None) -> int:
    """Do something in a process of its own. Returns how it ended: minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            before()
            work()
        except BaseException:  # pytest must not go on in the child
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(change: int) -> None:
    """Have this process killed right before its n-th change of the file system, counted from 0."""
    left = [change]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(hook)


def past(house: House) -> set[str]:
    """One of each kind that may go, beside one that may not. Returns the artifacts that have to stay."""
    data, other = house.make("dataset", "data"), house.make("dataset", "other")
    model = house.make("model", "model", [data])
    house.make("repository", "lost", [house.make("model", "lost model", [other])])
    house.aliased = [model]
    house.state("fine_tuning", "old")
    house.state("fine_tuning", "young", YOUNG)
    house.state("tokens", "tokens")
    house.run(1)
    house.run(2, YOUNG)
    house.deployment("helper", model, other)
    return {data, model}


def test_killed_before_any_change_of_the_file_system_nothing_needed_is_lost_and_the_next_time_completes_it(tmp_path: Path) -> None:
    for change in range(1000):
        with empty(tmp_path / f"wd{change}") as house:
            stay = past(house)
            promised, _, _ = decided(house)
            assert len(promised.going) == 7
            ended = in_child(lambda house=house: collect(house) and None, lambda change=change: die_at(change))
            check_whole(house, stay)
            assert (house.work.state / "fine_tuning" / "young" / "checkpoint-5" / "weights").read_text() == "young"
            assert not any(outcome.failed for outcome in collect(house))
            assert not any(path.exists() for path in paths(promised)), f"killed before change {change}"
            assert set(places.listed(house.work.store)) == stay
            assert left_over(house) == []
            if ended == 0:
                assert change > 40, "every change was tried"
                return
            assert ended == -signal.SIGKILL
    pytest.fail("it never came to its end")


def test_several_at_once_remove_it_once_and_none_of_them_fails(house: House) -> None:
    stay = past(house)
    promised, _, _ = decided(house)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                os._exit(int(any(outcome.failed for outcome in collect(house))))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert not any(path.exists() for path in paths(promised))
    check_whole(house, stay)
    assert left_over(house) == []


def test_a_job_that_takes_up_an_old_artifact_right_before_it_is_removed_keeps_it(house: House) -> None:
    sha256 = house.make("dataset", "data")
    promised, world, asked = decided(house)
    places.stored(house.work.store, sha256)
    [outcome] = removal.carry_out(promised, world, asked)
    assert (outcome.kept, outcome.failed) == (removal.MEANWHILE, False)
    check_whole(house, {sha256})


def test_an_artifact_that_was_used_between_the_look_and_the_move_is_put_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = house.make("dataset", "data")
    move = jobs.put_aside

    def used_first(home: Path, aside: Path) -> Path:
        places.mark_used(house.work.store, sha256)
        return move(home, aside)

    promised, world, asked = decided(house)
    monkeypatch.setattr(jobs, "put_aside", used_first)
    [outcome] = removal.carry_out(promised, world, asked)
    assert outcome.kept == removal.MEANWHILE
    check_whole(house, {sha256})
    assert left_over(house) == []


def test_jobs_that_work_with_old_artifacts_all_the_time_always_have_them_or_make_them_again(house: House) -> None:
    """Each job asks for an artifact by its key and reads it, as a step does, about when it becomes old enough to be removed."""
    store, enough, old = house.work.store, house.work.root / "enough", 0.5

    def work() -> None:
        random_ = random.Random(os.getpid())
        while not enough.exists():
            asked = time.monotonic()
            try:
                made, _ = places.produce(store, "data_curation", "key", build)
                assert (made.path / "rows").read_text() == "a row"
            except (ArtifactDamagedError, FileNotFoundError):
                assert time.monotonic() - asked > old / 2, "a busy machine had this process wait until what it used was old"
            time.sleep(random_.uniform(0.9, 1.1) * old)

    def build(folder: Path) -> artifacts.Artifact:
        folder.mkdir(parents=True)
        (folder / "rows").write_text("a row")
        return artifacts.publish(folder, "dataset", payload=["rows"], inputs=[], config={}, seed=1, key="key", summary={})

    def remove() -> None:
        began, removed = time.monotonic(), 0
        try:
            while not removed or time.monotonic() < began + 4:  # on a busy machine the jobs may let it become old less often
                assert time.monotonic() < began + 120, "nothing ever became old enough"
                removed += sum(places.remove(store, sha256, old) for sha256 in places.listed(store))
        finally:
            enough.touch()

    children = []
    for task in (work, work, remove):
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


def test_a_step_says_that_what_it_reads_is_in_use_until_it_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = house.make("dataset", "data")
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(house.work.root))
    with step.running("evaluation", tracked=False) as running:
        running.artifact(sha256, "dataset")
        for _ in range(3):
            house.used(sha256, OLD)
            until = time.monotonic() + 60
            while places.unused_for(house.work.store / sha256) > DAY:
                assert time.monotonic() < until
                time.sleep(0.01)
    time.sleep(0.1)
    house.used(sha256, OLD)
    time.sleep(0.1)
    assert places.unused_for(house.work.store / sha256) > DAY


def test_what_a_promotion_or_a_deployment_reads_by_its_address_is_in_use_too(house: House) -> None:
    sha256 = house.make("repository", "package")
    folder = places.folder_of((house.work.store / sha256).as_uri())
    assert folder == house.work.store / sha256
    assert places.unused_for(folder) < DAY


def test_a_held_checkpoint_stays_however_old_it_looks(house: House) -> None:
    folder = house.state("sweeps", "key")
    trial = house.state("sweeps/key", "trial-3")
    with jobs.held(trial):
        aged(folder, OLD)
        [kept] = decided(house)[0].kept
        assert kept.reason == "a job works in it"
    aged(folder, OLD)
    promised, world, asked = decided(house)
    with jobs.held(folder):
        [outcome] = removal.carry_out(promised, world, asked)
    assert outcome.kept == removal.MEANWHILE
    assert (trial / "checkpoint-5" / "weights").exists()


def test_a_state_that_was_taken_up_since_the_look_never_leaves_its_place(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = house.state("fine_tuning", "key")
    promised, world, asked = decided(house)
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "weights").write_text("new")
    moved: list[Path] = []
    monkeypatch.setattr(Path, "rename", lambda self, _: moved.append(self))
    [outcome] = removal.carry_out(promised, world, asked)
    assert (outcome.kept, outcome.failed, moved) == (removal.MEANWHILE, False, [])
    assert (folder / "checkpoint-9" / "weights").read_text() == "new"


@pytest.mark.parametrize("blocked", [False, True])
def test_a_checkpoint_whose_place_is_taken_when_it_is_put_back_lies_beside_it_or_stays_where_it_is(
    house: House, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    folder = house.state("fine_tuning", "key")
    promised, world, asked = decided(house)
    judged = found.unused_state

    def written_right_then(path: Path, *, touched: bool = True) -> float:
        if path.name != removal.ASIDE:
            return judged(path, touched=touched)
        (path / "checkpoint-9").mkdir()
        (path / "checkpoint-9" / "weights").write_text("new")
        folder.mkdir()
        (folder / "training.jsonl").write_text("a job that begins anew")
        folder.parent.rename(house.work.root / "away") if blocked else None
        (house.work.state / "fine_tuning").write_text("no folder") if blocked else None
        return judged(path, touched=touched)

    monkeypatch.setattr(found, "unused_state", written_right_then)
    [outcome] = removal.carry_out(promised, world, asked)
    assert outcome.kept
    [checkpoint] = house.work.root.rglob("checkpoint-9/weights")
    assert (checkpoint.read_text(), checkpoint.is_relative_to(folder)) == ("new", False)
    assert checkpoint.parent.parent.name.startswith("key.") or blocked


def test_a_job_that_waits_elsewhere_with_nobody_watching_keeps_its_state_and_what_it_will_read(house: House) -> None:
    dataset = house.make("dataset", "data")
    tokens = house.state("tokens", "t0k3n5")
    job = house.state("fine_tuning", "key", YOUNG) / "launch"
    job.mkdir()
    (job / "job.json").write_text(
        json.dumps({"tokens": f"{tokens.absolute()}/train", "seed": 1, "config": {"base": [f"{(house.work.store / dataset).absolute()}"]}})
    )
    promised, _, _ = decided(house)
    assert promised.going == []
    assert {item.thing.kind for item in promised.kept} == {"artifact", "state"}


def test_a_deployment_at_work_looks_after_its_folder_itself(house: House) -> None:
    one, two = house.make("repository", "one", age=YOUNG), house.make("repository", "two", age=YOUNG)
    folder = house.deployment("helper", one, two)
    with jobs.held(folder):
        assert decided(house)[0].going == []
    assert paths(decided(house)[0]) == {folder / "packages" / two}
    (folder / "state.json").write_text("{")
    assert decided(house)[0].going == [], "nobody knows which of them is in service"


def test_a_path_that_leads_into_a_store_is_in_use_until_the_command_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = house.make("repository", "package")
    folder, link = house.work.store / sha256, house.work.root / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(house.work.root))
    for named in (folder, str(link), folder / "payload" / "one.bin", f"store:{sha256}"):
        house.used(sha256, OLD)
        with places.using(named, "hf://org/name@revision", house.work.root):
            assert places.unused_for(folder) < DAY
            house.used(sha256, OLD)
            until = time.monotonic() + 60
            while places.unused_for(folder) > DAY:
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
def test_a_command_that_is_given_a_path_in_the_store_marks_it(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """What it is given is of a kind that none of them takes, so that it ends there."""
    from pipelines.cli import main

    monkeypatch.chdir(tmp_path)
    folder = house.work.store / house.make("quarantine", "of no kind")
    with pytest.raises(TunelineError):
        main.app([word.format(store=folder) for word in command], standalone_mode=False)
    assert places.unused_for(folder) < DAY


def test_the_recipes_of_a_sweep_stay_together_as_long_as_one_of_them_is_young(house: House) -> None:
    sweep, old, young = house.state("sweeps", "sweep"), house.state("sweeps", "one"), house.state("fine_tuning", "two", YOUNG)
    (sweep / places.TOGETHER).write_text(json.dumps(["sweeps/one", "fine_tuning/two", "sweeps/gone", "../elsewhere"]))
    aged(sweep, OLD)
    assert decided(house)[0].going == []
    aged(young, OLD)
    promised, world, asked = decided(house)
    assert promised.going[0].thing.path == str(sweep)
    assert paths(promised) == {sweep, old, young}
    with jobs.held(sweep):
        assert {outcome.kept for outcome in removal.carry_out(promised, world, asked)} == {removal.MEANWHILE}
    assert old.exists()


def test_what_something_needs_that_was_used_meanwhile_stays_with_it(house: House) -> None:
    dataset = house.make("dataset", "data")
    model = house.make("model", "model", [dataset])
    promised, world, asked = decided(house)
    places.mark_used(house.work.store, model)
    assert [outcome.kept for outcome in removal.carry_out(promised, world, asked)] == [removal.MEANWHILE] * 2
    check_whole(house, {dataset, model})


def test_an_odd_thing_is_kept_and_told_and_the_others_are_judged(house: House) -> None:
    odd, other, worse = (house.run(n) for n in range(3))
    (odd / "run.json").write_text("[1]")
    (worse / "run.json").write_text('{"status": "finished", "result": "x"}')
    folder = house.state("fine_tuning", "key")
    (folder / "job.json").write_text("[]")
    aged(folder, OLD)
    served = house.deployment("helper", house.make("repository", "served", age=YOUNG), house.make("repository", "other", age=YOUNG))
    (served / "repository" / "m").mkdir(parents=True)
    (served / "repository" / "m" / "1").symlink_to("x")
    aged(odd, OLD), aged(worse, OLD)
    promised, _, _ = decided(house)
    assert paths(promised) == {other, folder}
    reasons = {item.thing.path: item.reason for item in promised.kept}
    assert reasons[str(odd)] == "cannot be judged: its run.json holds no object"
    assert reasons[str(worse)].startswith("cannot be judged: ")
    assert sum("leads to no package" in reason for reason in reasons.values()) == 2


def test_what_is_taken_away_during_the_look_ends_nothing_and_the_state_keeps_what_it_needs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = house.make("dataset", "data")
    folder = house.state("fine_tuning", "key", OLD)
    (folder / "job.json").write_text(json.dumps({"dataset": str(house.work.store / dataset)}))
    aged(folder, OLD)
    walk = found._within
    monkeypatch.setattr(found, "_within", lambda path: iter([*walk(path), path / "checkpoint-4"]))
    house.run(1)
    promised, _, _ = decided(house)
    assert promised.going == []
    assert {item.thing.kind for item in promised.kept} == {"artifact", "state", "run"}


def test_a_copy_of_what_a_waiting_job_will_read_stays(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = house.make("dataset", "data")
    job = house.state("fine_tuning", "key", YOUNG) / "job.json"
    job.write_text(json.dumps({"dataset": str(house.work.store / sha256)}))
    with monkeypatch.context() as patch:
        patch.setattr(places, "address", lambda _: "s3://bucket/prefix")
        things = [*found.copies_of(house.work.store), *found.states(house.work.state)]
    assert [thing.kind for thing in things] == ["copy", "state"]
    assert plan(things, [], house.asked().policy).going == []


def test_what_another_user_has_is_kept_or_told_to_be_left(house: House) -> None:
    """As user 65534 in a process of its own, which only root can begin."""
    if os.getuid():
        pytest.skip("only root can become another user")
    dataset, state = house.make("dataset", "data"), house.state("fine_tuning", "key")
    secret = house.run(1)
    secret.chmod(0o700)
    for folder in (house.work.root, house.work.store, house.work.store / dataset, house.work.state, state.parent, state):
        folder.chmod(0o777)
    for parent in house.work.root.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o055)

    def as_another() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        promised, world, asked = decided(house)
        outcomes = list(removal.carry_out(promised, world, asked))
        assert [outcome.failed for outcome in outcomes] == [True, True]
        assert all("Permission denied" in outcome.kept for outcome in outcomes)
        assert len(removal.left(asked)) == 2
        assert any(item.reason.startswith("cannot be judged: ") for item in promised.kept)

    assert in_child(as_another) == 0
    assert len(removal.left(house.asked())) == 2
    assert decided(house)[0].names == {f"run:{secret.name}"}
    assert removal.left(house.asked()) == [], "their owner's next look removes them"


def test_what_the_living_run_has_used_since_it_began_stays_with_all_it_was_made_from(house: House) -> None:
    raw = house.make("dataset", "raw")
    used = house.make("model", "used", [raw], 31 * DAY)
    house.make("model", "before", age=33 * DAY)
    me = {"pid": os.getpid(), "where": liveness.where(), "process_started": found.runs._me()["process_started"]}
    house.run(1, 32 * DAY, status="running", started=time.time() - 20 * DAY, **me)  # by a clock that is wrong
    promised, _, _ = decided(house)
    assert [item.thing.path for item in promised.going] == [str(house.work.store / sha) for sha in house.ages if sha not in (raw, used)]
    assert {item.reason for item in promised.kept if item.thing.kind == "artifact"} == {"the run 20260101-000001-abcd is at work"}


def test_the_newest_runs_stay_with_what_they_made_and_pinned_ones_as_well(house: House) -> None:
    made = [house.make("model", f"model {n}") for n in range(3)]
    runs = [house.run(n, made=[sha]) for n, sha in enumerate(made)]
    assert found.pin(house.work, f"runs/{runs[0].name}", "the audit of 2026") == runs[0].name
    (house.work.store / found.PINS / "runs").mkdir()  # as a path made one, which ended every later look
    for word in (".", "..", "runs", "/"):
        with pytest.raises(UsageError, match="neither in the artifact store nor a run"):
            found.pin(house.work, word, "because")
    promised, _, _ = decided(house, keep_runs=1)
    assert paths(promised) == {runs[1], house.work.store / made[1]}
    assert "pinned: the audit of 2026" in {item.reason for item in promised.kept}
    assert places.notes(house.work.store, found.PINS) == [runs[0].name]
    assert found.unpin(house.work, str(runs[0])) == runs[0].name
    assert runs[0] in paths(decided(house, keep_runs=1)[0])


def test_an_artifact_whose_manifest_cannot_be_read_is_kept_and_told_and_one_without_goes(house: House) -> None:
    damaged, without = house.make("model", "damaged"), house.make("model", "without")
    (house.work.store / damaged / "manifest.json").write_text("{")
    (house.work.store / without / "manifest.json").unlink()
    for sha256 in (damaged, without):
        aged(house.work.store / sha256, OLD)
    promised, _, _ = decided(house)
    assert paths(promised) == {house.work.store / without}
    [kept] = promised.kept
    assert kept.reason.startswith("its manifest cannot be read: ")
    collect(house)
    assert not (house.work.store / without).exists()


def test_an_alias_that_is_moved_while_others_are_removed_keeps_what_it_reaches(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    base = house.make("dataset", "data")
    model = house.make("model", "model", [base])
    house.make("model", "other")
    promised, world, asked = decided(house)
    assert len(promised.going) == 3
    monkeypatch.setattr(removal, "LOOKS_AGAIN", 0.0)
    house.aliased = [model]
    kept = {outcome.item.thing.path for outcome in removal.carry_out(promised, world, asked) if outcome.kept}
    assert kept == {str(house.work.store / sha) for sha in (base, model)}
    check_whole(house, {base, model})


def test_a_registry_that_goes_away_on_the_way_ends_it_there(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [house.make("model", f"model {n}") for n in range(3)]
    promised, world, asked = decided(house)
    monkeypatch.setattr(removal, "LOOKS_AGAIN", 0.0)

    def away(_: int) -> list[registry.Needed]:
        raise EngineMissingError("the MLflow server does not answer", hint="Start it.")

    with monkeypatch.context() as patch:  # undone before the house takes back what it says itself
        patch.setattr(registry, "needed", away)
        with pytest.raises(EngineMissingError):
            list(removal.carry_out(promised, world, asked))
    check_whole(house, set(made))


def test_what_cannot_be_removed_is_told_and_the_rest_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [house.make("model", f"model {n}") for n in range(2)]
    whole = places.remove

    def refused(store: Path, sha256: str, unused: float) -> bool:
        if sha256 == made[0]:
            raise PermissionError(13, "Permission denied")
        return whole(store, sha256, unused)

    monkeypatch.setattr(places, "remove", refused)
    outcomes = {outcome.item.thing.name: outcome for outcome in collect(house)}
    assert [outcomes[f"store:{sha}"].failed for sha in made] == [True, False]
    assert "Permission denied" in outcomes[f"store:{made[0]}"].kept
    assert places.listed(house.work.store) == [made[0]]
