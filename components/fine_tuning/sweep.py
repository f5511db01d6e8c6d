"""A sweep: several recipes over one dataset, each a training of its own, so many at once. The one with the lowest validation loss is the
result; what came of the others stands beside it.

Each recipe has its own key, checkpoints and job: a sweep that was killed goes on where it was, and what is trained stays trained. Recipes
are watched by threads. What they do in this process they do one at a time, since the libraries for it are not made for threads; the
trainings themselves run in processes of their own.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from components.common import artifacts, devices, hashing, jobs, launch, models, places, process, tracking
from components.common.artifacts import Artifact
from components.common.errors import GOES_ON, ArtifactDamagedError, InputError, InterruptedRunError, TunelineError
from components.common.launch import Command, Launcher, LeftError, NotBegunError, StartsTogether, Stop
from components.common.launch.choice import can_start_together
from components.common.launch.gathering import Gathering
from components.common.launch.settings import LauncherSettings
from components.common.launch.torchrun import TorchRun
from components.common.models import Base
from components.common.progress import Reporter
from components.common.tracking import MlflowReporter
from components.fine_tuning import report, stage, watch
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.objectives import OBJECTIVES
from components.fine_tuning.report import Compared

FOLDER = "sweeps"
ARRAY = "launch"  # in the sweep's folder: what belongs to the jobs of all its recipes
MODEL = "model"  # in a recipe's folder
FIGURES = ("validation_loss", "train_loss", "steps", "best_step", "tokens_per_second")
# Kinds of errors that are the recipe's own, such as a lost loss. Others may be of the place, such as a node that is out of memory by
# another's fault or has lost its accelerator: without the recipe they would choose by chance.
OF_THE_RECIPE = ("training", "input")
Train = Callable[..., Artifact]


@dataclass(frozen=True)
class Outcome:
    """What came of a recipe: its model, or the error that it ended with."""

    name: str
    recipe: FineTuningConfig
    made: Artifact | None = None
    error: TunelineError | None = None

    @property
    def loss(self) -> float:
        """The validation loss, by which recipes are compared."""
        return float(self.made.manifest.summary["validation_loss"]) if self.made else float("inf")

    def told(self, varied: Sequence[str]) -> dict[str, Any]:
        """As the manifest says it."""
        summary = self.made.manifest.summary if self.made else {}
        return {
            "recipe": {key: self.recipe.value_of(key) for key in varied},
            **{name: summary.get(name) for name in FIGURES},
            "sha256": self.made.sha256 if self.made else None,
            "failed": self.error.message if self.error else None,
        }


def tune(
    dataset: Artifact,
    output: Path,
    config: FineTuningConfig,
    *,
    seed: int,
    state: Path,
    reporter: Reporter,
    dataset_uri: str = "",
    base: Base | None = None,
    overwrite: bool = False,
    where: LauncherSettings | None = None,
    tracked: MlflowReporter | None = None,
) -> Artifact:
    """As `stage.finetune`, which it calls; where the configuration has a sweep, for each of its recipes, and the best model comes to
    `output` with the table of all in its summary and its report. `tracked`: the run that each recipe's own is nested in.

    Raises beside what finetune does: InputError where there are no validation rows to compare by, and the first recipe's error where all
    have failed.
    """
    where = where or LauncherSettings()
    train = partial(stage.finetune, dataset, seed=seed, state=state, dataset_uri=dataset_uri, where=where)
    if not config.sweep.vary:
        return train(output, config, reporter=reporter, base=base, overwrite=overwrite)
    recipes = config.recipes
    for recipe in recipes.values():
        stage.check_place(recipe, where)
    base = base or models.base_model(config.base_model, reporter)
    keys = [stage.key_of(dataset.sha256, base.sha256, one, seed, stage.arithmetic_of(one, where)) for one in recipes.values()]
    key = hashing.digest({"sweep": keys})
    work, trainings = state / FOLDER / key, [state / stage.STAGE / of for of in keys]
    # By the recipes' own keys: a sweep that is changed after a kill keeps what it has trained.
    kept = {name: state / FOLDER / of for name, of in zip(recipes, keys, strict=True)}
    finished = artifacts.begin(output, _key_there(output, key), overwrite=overwrite)
    if finished:
        _discard([work, *kept.values(), *trainings])  # killed after publishing
        return finished
    with _held([work, *kept.values()]):
        _note([path.relative_to(state).as_posix() for path in (*kept.values(), *trainings)], work)
        _prepare(dataset, base, recipes, state, reporter)
        homes = {name: folder / MODEL for name, folder in kept.items()}
        outcomes = _train_all(recipes, homes, work / ARRAY, partial(train, base=base), config.sweep.parallel, where, reporter, tracked)
        logs = [_log(one, training) for one, training in zip(outcomes, trainings, strict=True)]
        made = _publish_best(outcomes, logs, sorted(config.sweep.vary), output, key)
    _discard([work, *kept.values(), *trainings])
    return made


@contextmanager
def _held(folders: Sequence[Path]) -> Iterator[None]:
    """Hold all of these, which are made where they are not there. Raises BusyError where another job holds one of them."""
    with ExitStack() as holds:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            holds.enter_context(jobs.held(folder))
        yield


def _note(folders: Sequence[str], work: Path) -> None:
    """Have the sweep's folder say what belongs to it: as long as one recipe is at work, what others have trained is needed."""
    artifacts.write_atomically(work / places.TOGETHER, json.dumps(folders) + "\n")


def _discard(folders: Sequence[Path]) -> None:
    """Remove what nobody needs any more, of those that failed too."""
    for folder in folders:
        stage.discard(folder)


def _key_there(output: Path, key: str) -> str:
    """The key by which the output's model is known as the result of this sweep: its own recipe's, as its manifest has it."""
    try:
        found = artifacts.read_manifest(output) if (output / artifacts.MANIFEST).exists() else None
    except ArtifactDamagedError:
        found = None
    same = found is not None and found.summary.get("sweep", {}).get("key") == key
    return str(found.produced_by["key"]) if found and same else key


def _prepare(dataset: Artifact, base: Base, recipes: Mapping[str, FineTuningConfig], state: Path, reporter: Reporter) -> None:
    """Make the rows into tokens once for all, and see that they can be learned from and that there is something to compare by."""
    tokenizer, kind = models.load_tokenizer(base.path), stage.kind_of(dataset)
    for objective in {one.objective for one in recipes.values()}:
        OBJECTIVES[objective].of(kind, f"the dataset in {dataset.path} holds")
    for recipe in {one.packing: one for one in recipes.values()}.values():
        splits = stage.tokenised(dataset, kind, tokenizer, base, recipe, state, reporter)
    if not splits.validation.counts.examples:
        raise InputError(
            "the dataset has no validation rows, and the recipes of a sweep are compared by their loss",
            hint="Give the validation split a share in data_curation.fractions, or train one recipe without fine_tuning.sweep.",
        )


def _shares(recipes: Mapping[str, FineTuningConfig], where: LauncherSettings) -> list[dict[str, str]]:
    """The parts of this machine that recipes are given, each as an environment; elsewhere the scheduler shares out."""
    if where.kind != stage.HERE:
        return [{}]
    most = max(recipes.values(), key=lambda one: one.processes)
    return devices.shares(devices.choose(most.device), most.processes)


def _train_all(
    recipes: Mapping[str, FineTuningConfig],
    homes: Mapping[str, Path],
    array: Path,
    train: Train,
    parallel: int,
    where: LauncherSettings,
    reporter: Reporter,
    tracked: MlflowReporter | None,
) -> list[Outcome]:
    """What came of each recipe, whose models are in `homes`. Raises the error that is no recipe's own, InterruptedRunError after a signal;
    then the rest is saved."""
    queued = can_start_together(where)  # then the scheduler sees to it that not too many run, also when nobody watches
    watchers = len(recipes) if queued else parallel
    together, stop = _Together(reporter, recipes), Stop()
    turns = _Turns(stop, list(islice(cycle(_shares(recipes, where)), watchers)))
    turns.gathering = Gathering({*recipes}, array, parallel, stop) if queued else None
    reporter.step(f"training {len(recipes)} recipes, {min(parallel, len(recipes))} at once")
    with process.stopping(stop.asked), ThreadPoolExecutor(watchers) as pool:
        started = [pool.submit(_train_one, name, recipe, homes[name], train, together, tracked, turns) for name, recipe in recipes.items()]
        _wait_for(started, stop)
    errors = [error for one in started if (error := one.exception())]
    for error in errors:
        if getattr(error, "kind", "") != InterruptedRunError.kind:  # one that a process wrote down is of the kind, not of the class
            raise error
    if errors:
        trained = sum(1 for one in started if not one.exception() and one.result().made)
        raise _interrupted(f"{trained} of {len(started)} recipes are trained", errors)
    return [one.result() for one in started]


def _interrupted(done: str, errors: Sequence[BaseException]) -> InterruptedRunError:
    """With the first words of one that was interrupted itself, such as why."""
    said = [str(error) for error in errors if not isinstance(error, (NotBegunError, LeftError))]
    why = f"; the first said: {said[0]}" if said else ""
    return InterruptedRunError(f"the sweep was interrupted: {done}, and what had begun is saved{why}", hint=GOES_ON)


def _wait_for(started: Sequence[Future[Outcome]], stop: Stop) -> None:
    """Until all have ended. Waits in short pieces, so that signals are heard."""
    try:
        while wait(started, timeout=launch.LOOKS_EVERY).not_done:
            pass
    except BaseException:  # a second Ctrl-C
        stop.asked.set()
        stop.now.set()
        raise


@dataclass
class _Turns:
    """What recipes do in this process they do in turn; while their trainings run, each on a part of this machine that is `free`, others
    have theirs."""

    stop: Stop
    free: list[dict[str, str]]
    gathering: Gathering | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, name: str, launcher: Launcher, command: Command, folder: Path, reporter: Reporter) -> dict[str, Any]:
        """launch.run, for a thread that has its turn."""
        share = self.free.pop(0)
        self.lock.release()
        try:
            begun = None
            if self.gathering and isinstance(launcher, StartsTogether):
                begun = self.gathering.start(name, launcher, command, folder)
            return launch.run(_with(launcher, share), command, folder, reporter, self.stop, begun)
        finally:
            self.lock.acquire()
            self.free.insert(0, share)

    def over(self, name: str) -> None:
        """The recipe has ended, or never began: nobody is to wait for it."""
        if self.gathering:
            self.gathering.leave(name)


def _with(launcher: Launcher, share: dict[str, str]) -> Launcher:
    return replace(launcher, environment=share) if isinstance(launcher, TorchRun) else launcher


def _train_one(
    name: str,
    recipe: FineTuningConfig,
    output: Path,
    train: Train,
    together: _Together,
    tracked: MlflowReporter | None,
    turns: _Turns,
) -> Outcome:
    """Train a recipe, in its turn. A failure of its own is its outcome. After any other none is begun, the others save and end where they
    would end with this process anyway, and jobs elsewhere go on, which the next call finds."""
    with turns.lock:
        try:
            if turns.stop.begins_nothing:
                raise NotBegunError("it had not begun", hint=GOES_ON)
            _remove_damaged(output)
            with _own_run(tracked, name) as own:
                made = train(output, recipe, reporter=_Told(name, together, own), run=partial(turns.run, name))
                if own:
                    own.result(made)
        except TunelineError as error:
            if error.kind not in OF_THE_RECIPE:
                turns.stop.leave.set()
                raise
            together.note(f"{name}: failed: {error.message}")
            return Outcome(name, recipe, error=error)
        except BaseException:
            turns.stop.leave.set()
            raise
        finally:
            turns.over(name)
    together.ended(name)
    together.note(f"{name}: validation loss {made.manifest.summary['validation_loss']:.4f}")
    return Outcome(name, recipe, made)


def _remove_damaged(made: Path) -> None:
    """A model that was trained before and is not whole any more is trained again."""
    try:
        if (made / artifacts.MANIFEST).exists():
            artifacts.read(made)
    except ArtifactDamagedError:
        shutil.rmtree(made)


@contextmanager
def _own_run(tracked: MlflowReporter | None, name: str) -> Iterator[MlflowReporter | None]:
    if tracked is None:
        yield None
        return
    with tracking.nested_run(tracked, name) as own:
        yield own


@dataclass
class _Together:
    """What several recipes say at once, to one reporter: the steps of all, and their notes."""

    reporter: Reporter
    recipes: Mapping[str, FineTuningConfig]
    _done: dict[str, int] = field(default_factory=dict)
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def progress(self, name: str, done: int) -> None:
        """A recipe has come so far. How many steps there are is known where each recipe says it."""
        steps = [one.max_steps for one in self.recipes.values()]
        with self._telling:
            self._done[name] = done
            total = sum(one for one in steps if one) if all(steps) else None
            self.reporter.progress(sum(self._done.values()), total, "steps")

    def ended(self, name: str) -> None:
        """It trains no more, also where it stopped early or was there from before."""
        if steps := self.recipes[name].max_steps:
            self.progress(name, steps)

    def note(self, text: str) -> None:
        """A sentence of one of them."""
        with self._telling:
            self.reporter.note(text)


@dataclass(frozen=True)
class _Told:
    """The reporter of one recipe. Its figures go to its own run: in one series with those of others they would say nothing."""

    name: str
    together: _Together
    own: MlflowReporter | None

    def step(self, name: str) -> None: ...

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps":
            self.together.progress(self.name, done)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if self.own:
            self.own.metrics(values, step)

    def note(self, text: str) -> None:
        self.together.note(f"{self.name}: {text}")
        if self.own:
            self.own.note(text)


def _log(outcome: Outcome, work: Path) -> list[dict[str, Any]]:
    """What was logged of a recipe, also of one that failed on its way."""
    path = (outcome.made.path / "training.jsonl") if outcome.made else (work / watch.LOG)
    return watch.lines_of(path) if path.exists() else []


def _publish_best(
    outcomes: Sequence[Outcome], logs: Sequence[list[dict[str, Any]]], varied: Sequence[str], output: Path, key: str
) -> Artifact:
    """The model with the lowest validation loss, of equal ones the first recipe's, as it is, with the sweep in its summary and report."""
    ranked = sorted(zip(outcomes, logs, strict=True), key=lambda one: one[0].loss)
    (best, log), made = ranked[0], ranked[0][0].made
    if made is None:
        assert outcomes[0].error
        raise outcomes[0].error
    shutil.copytree(made.path, output, dirs_exist_ok=True, ignore=shutil.ignore_patterns(artifacts.MANIFEST))
    manifest = made.manifest
    told = [one.told(varied) for one, _ in ranked]
    summary = {**manifest.summary, "sweep": {"key": key, "recipes": told}}
    compared = [Compared(one.name, figures, log) for (one, log), figures in zip(ranked, told, strict=True)]
    page = report.page(log, summary, manifest.inputs, best.recipe, compared)
    (output / "report.html").write_text(page, encoding="utf-8")
    return artifacts.publish(
        output,
        "model",
        payload=stage.is_payload,
        inputs=manifest.inputs,
        config=manifest.config,
        seed=manifest.seed,
        key=str(manifest.produced_by["key"]),
        summary=summary,
    )
