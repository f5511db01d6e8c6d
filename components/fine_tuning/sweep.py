"""Sweep: trains several recipes on one dataset concurrently and publishes the model with the lowest validation loss.

Each recipe has its own key, checkpoints and job, so a resumed sweep does not repeat trained recipes. One thread
monitors each recipe.
"""

# Only one thread at a time works in this process, because the libraries are not thread-safe; the training jobs run in
# separate processes.

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from components.common import launch
from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.cost.budgets import BudgetClock
from components.common.launch import (
    ArrayLauncher,
    Command,
    DetachedError,
    Launcher,
    LocalLauncher,
    NotStartedError,
    StopRequest,
)
from components.common.launch.array_submission import ArraySubmission
from components.common.launch.launcher_settings import LauncherSettings
from components.common.models import compute_devices, model_loading, tokenization_check
from components.common.models.model_loading import LocalBaseModel
from components.common.reporting import mlflow_tracking
from components.common.reporting.mlflow_tracking import MlflowReporter
from components.common.runtime import filesystem, process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import (
    RESUME_HINT,
    ArtifactDamagedError,
    ConfigurationError,
    InputError,
    InterruptedRunError,
    TunelineError,
)
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace import artifact_store, job_folders
from components.fine_tuning import (
    adapters,
    callbacks,
    earlier_training,
    other_models,
    recipe_defaults,
    report,
    stage,
)
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.report import SweepEntry
from components.fine_tuning.sample_answers import SAMPLES_FILENAME
from components.fine_tuning.token_cache import TokenizedDataset

SWEEPS_FOLDER = "sweeps"
RESULT_KEYS = ("validation_loss", "train_loss", "steps", "best_step", "tokens_per_second")
# Errors caused by the recipe, such as a loss that is not finite. Any other error, such as a lost node, ends the sweep:
# without the affected recipe, the result would depend on the environment.
RECIPE_ERROR_KINDS = ("training", "input")
TrainFunction = Callable[..., Artifact]


@dataclass(frozen=True)
class RecipeOutcome:
    """A recipe with its trained model, or with the error that stopped training."""

    name: str
    recipe: Recipe
    model: Artifact | None = None
    error: TunelineError | None = None

    @property
    def loss(self) -> float:
        """The validation loss; infinite for a failed recipe."""
        return float(self.model.manifest.summary["validation_loss"]) if self.model else float("inf")

    def to_summary(self, varied: Sequence[str]) -> dict[str, Any]:
        """Return the recipe's entry in the manifest's summary.

        Args:
            varied: Keys that the sweep varies, such as lora.rank.

        Returns:
            "recipe" (the values of these keys), each of RESULT_KEYS, "sha256" (the model's digest) and "failed" (the
            error message). A value is None if it does not exist.
        """
        summary = self.model.manifest.summary if self.model else {}
        return {
            "recipe": {key: self.recipe.get_value(key) for key in varied},
            **{name: summary.get(name) for name in RESULT_KEYS},
            "sha256": self.model.sha256 if self.model else None,
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
    base: LocalBaseModel | None = None,
    initial_adapter: Artifact | None = None,
    overwrite: bool = False,
    launcher_settings: LauncherSettings | None = None,
    tracked: MlflowReporter | None = None,
    budget: BudgetClock | None = None,
) -> Artifact:
    """Train each recipe of the sweep and publish the best model in `output`; without a sweep, call `stage.finetune`.

    The summary and the report list all recipes.

    Args:
        tracked: Parent MLflow run of the recipes' runs.
        budget: Cost of the step so far, and the budgets that the training runs count against. Default: no budget.

    For the other arguments see `stage.finetune`.

    Raises:
        InputError: the dataset has no validation rows.
        InterruptedRunError: a signal interrupted the sweep.
        TunelineError: all recipes failed; the error is that of the first recipe.

    Also raises the errors of `stage.finetune`.
    """
    launcher_settings = launcher_settings or LauncherSettings()
    stage.check_launcher(config, launcher_settings)
    base = base or model_loading.resolve_base_model(config.base_model, reporter)
    config = other_models.open_models(config, base.path, reporter).pin(config)
    initial_adapter = initial_adapter or _open_initial_adapter(config, base)
    for warning in earlier_training.describe_trained_test_rows(dataset, base, initial_adapter):
        reporter.note(warning)
    train = partial(
        stage.finetune,
        dataset,
        seed=seed,
        state=state,
        dataset_uri=dataset_uri,
        launcher_settings=launcher_settings,
        budget=budget,
    )
    if not config.sweep.vary:
        return train(output, config, reporter=reporter, base=base, initial_adapter=initial_adapter, overwrite=overwrite)
    recipes = _plan_recipes(dataset, base, config, launcher_settings, reporter)
    keys = _compute_keys(dataset, base, recipes, seed, launcher_settings, initial_adapter)
    sweep_key = hashing.digest({"sweep": keys})
    work, trainings = state / SWEEPS_FOLDER / sweep_key, [state / stage.STAGE / key for key in keys]
    # Folder names are the recipes' keys, so a sweep that is edited after an interruption reuses trained recipes.
    folders = {name: state / SWEEPS_FOLDER / key for name, key in zip(recipes, keys, strict=True)}
    finished = artifact_folder.claim_folder(output, _find_output_key(output, sweep_key), overwrite=overwrite)
    if not finished:
        with ExitStack() as locks:
            for folder in (work, *folders.values()):
                folder.mkdir(parents=True, exist_ok=True)
                locks.enter_context(job_folders.folder_lock(folder))
            # Garbage collection reads this list and retains the models of all recipes while one recipe trains.
            owned = [path.relative_to(state).as_posix() for path in (*folders.values(), *trainings)]
            artifact_folder.write_atomically(work / artifact_store.LINKED_STATE_FILENAME, json.dumps(owned) + "\n")
            splits = _tokenize(dataset, base, recipes, state, reporter)
            _check_memory(splits, base, recipes, launcher_settings)
            outputs = {name: folder / "model" for name, folder in folders.items()}
            outcomes = _train_all(
                recipes,
                outputs,
                work / "launch",  # job files of all recipes
                partial(train, base=base, initial_adapter=initial_adapter),
                config.sweep.parallel,
                launcher_settings,
                reporter,
                tracked,
                budget,
            )
            finished = _publish_best(outcomes, trainings, sorted(config.sweep.vary), output, sweep_key)
    for folder in (work, *folders.values(), *trainings):
        stage.discard_state(folder)
    return finished


def _open_initial_adapter(config: FineTuningConfig, base: LocalBaseModel) -> Artifact | None:
    """Return the initial adapter, which each recipe must match; None if the sweep has none."""
    model_config, adapter = model_loading.load_configuration(base.path), None
    for recipe in config.recipes.values():
        adapter = adapters.open_initial_adapter(recipe, base.sha256, model_config)
    return adapter


def _plan_recipes(
    dataset: Artifact,
    base: LocalBaseModel,
    config: FineTuningConfig,
    launcher_settings: LauncherSettings,
    reporter: Reporter,
) -> dict[str, Recipe]:
    """Return the recipes by name, with equal values of the settings that define the validation loss."""
    for recipe in config.recipes.values():
        stage.check_launcher(recipe, launcher_settings)
    tokenization_check.check_tokenization(base.path, base.uri)
    tokenizer = model_loading.load_tokenizer(base.path)
    shared = stage.plan_recipe(dataset, base, config, tokenizer, launcher_settings, reporter)
    config = recipe_defaults.share_settings(config, shared.max_length)
    return {
        name: stage.plan_recipe(dataset, base, recipe, tokenizer, launcher_settings, SilentReporter())
        for name, recipe in config.recipes.items()
    }


def _compute_keys(
    dataset: Artifact,
    base: LocalBaseModel,
    recipes: Mapping[str, Recipe],
    seed: int,
    launcher_settings: LauncherSettings,
    initial_adapter: Artifact | None,
) -> list[str]:
    """Return the keys under which `stage.finetune` trains the recipes."""
    initial_sha256 = initial_adapter.sha256 if initial_adapter else None
    return [
        stage.compute_key(
            dataset.sha256,
            base.sha256,
            recipe,
            seed,
            stage.describe_arithmetic(recipe, launcher_settings),
            initial_sha256,
        )
        for recipe in recipes.values()
    ]


def _find_output_key(output: Path, sweep_key: str) -> str:
    """Return the key of the best recipe if the output is the published model of this sweep, otherwise the sweep's key."""
    with suppress(TunelineError):  # the output contains no finished model
        manifest = artifact_folder.read_manifest(output)
        if manifest.summary.get("sweep", {}).get("key") == sweep_key:
            return str(manifest.produced_by["key"])
    return sweep_key


def _tokenize(
    dataset: Artifact, base: LocalBaseModel, recipes: Mapping[str, Recipe], state: Path, reporter: Reporter
) -> dict[bool, TokenizedDataset]:
    """Return the splits for each value of packing, tokenized once for all recipes.

    Raises InputError if a split has no examples.
    """
    tokenizer, kind = model_loading.load_tokenizer(base.path), stage.get_rows_kind(dataset)
    for recipe in {recipe.objective: recipe for recipe in recipes.values()}.values():
        recipe.objective_spec.get_mapping(kind, f"the dataset in {dataset.path} contains")
    tokenized = {}
    for packing, recipe in {recipe.packing: recipe for recipe in recipes.values()}.items():
        tokenized[packing] = splits = stage.tokenize(dataset, kind, tokenizer, base, recipe, state, reporter)
    if not splits.validation.counts.examples:
        raise InputError(
            f"the dataset in {dataset.path} has no validation rows; a sweep compares recipes by validation loss",
            hint="Set a fraction for the validation split in data_curation.fractions.",
        )
    return tokenized


def _check_memory(
    tokenized: Mapping[bool, TokenizedDataset],
    base: LocalBaseModel,
    recipes: Mapping[str, Recipe],
    launcher_settings: LauncherSettings,
) -> None:
    """Check every recipe before the first one trains. Raises ConfigurationError with the recipe's name."""
    for name, recipe in recipes.items():
        try:
            stage.check_memory(tokenized[recipe.packing], base, recipe, launcher_settings)
        except ConfigurationError as error:
            raise ConfigurationError(f"fine_tuning.sweep.vary: {name}: {error.message}", hint=error.hint) from None


def _train_all(
    recipes: Mapping[str, Recipe],
    outputs: Mapping[str, Path],
    array: Path,
    train: TrainFunction,
    parallel: int,
    launcher_settings: LauncherSettings,
    reporter: Reporter,
    tracked: MlflowReporter | None,
    budget: BudgetClock | None,
) -> list[RecipeOutcome]:
    """Train all recipes and return their outcomes. Raises InterruptedRunError, or an error not caused by a recipe."""
    # On this machine each concurrent recipe gets its own accelerators; elsewhere the scheduler assigns them.
    environments: list[dict[str, str]] = [{}]
    if launcher_settings.entry.uses_this_machine:
        largest = max(recipes.values(), key=lambda recipe: recipe.processes)
        device = compute_devices.select_device(largest.device)
        environments = compute_devices.partition_devices(device, largest.processes)
    stop, threads, submission = StopRequest(), parallel, None
    if launcher_settings.entry.supports_arrays:
        # With a job array, the scheduler limits the number of concurrent jobs, even after this process ends.
        threads, submission = len(recipes), ArraySubmission({*recipes}, array, parallel, stop)
    free_environments = list(islice(cycle(environments), threads))
    train = partial(train, peers=min(parallel, len(recipes)))
    sweep = _RunningSweep(train, recipes, reporter, tracked, stop, free_environments, submission, budget)
    reporter.step(f"training {format_count(len(recipes), 'recipe')}, {min(parallel, len(recipes))} at once")
    with process_control.handle_stop_signals(stop.save_requested), ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(sweep.train_recipe, name, recipe, outputs[name]) for name, recipe in recipes.items()]
        try:
            while wait(futures, timeout=launch.POLL_INTERVAL_SECONDS).not_done:  # short: handles signals
                pass
        except BaseException:  # a second Ctrl-C
            stop.save_requested.set()
            stop.kill_requested.set()
            raise
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        # Compare the kind: an error from the outcome file of a worker has the kind, but not the class.
        if getattr(error, "kind", "") != InterruptedRunError.kind:
            raise error
    if errors:
        messages = (f"; first message: {e}" for e in errors if not isinstance(e, (NotStartedError, DetachedError)))
        raise InterruptedRunError(
            f"the sweep was interrupted: {sweep.trained} of {len(futures)} recipes {'is' if sweep.trained == 1 else 'are'} trained{next(messages, '')}",
            hint=RESUME_HINT,
        )
    return [future.result() for future in futures]


@dataclass
class _RunningSweep:
    """State that the recipes' threads share.

    Attributes:
        lock: Held by the thread that works in this process.
        free_environments: For each job that can start, the environment variables that assign its accelerators.
    """

    train: TrainFunction
    recipes: Mapping[str, Recipe]
    reporter: Reporter
    tracked: MlflowReporter | None
    stop: StopRequest
    free_environments: list[dict[str, str]]
    submission: ArraySubmission | None
    budget: BudgetClock | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    reporter_lock: threading.Lock = field(default_factory=threading.Lock)
    steps_done: dict[str, int] = field(default_factory=dict)
    trained: int = 0

    def train_recipe(self, name: str, recipe: Recipe, output: Path) -> RecipeOutcome:
        """Train one recipe once this thread has the lock.

        An error that the recipe caused is returned as its outcome. After any other error, no further recipe starts, and
        local training jobs save a checkpoint and end. Remote jobs continue; the next call reconnects to them.
        """
        with self.lock:
            try:
                if self.stop.is_start_blocked:
                    raise NotStartedError("the recipe has not started", hint=RESUME_HINT)
                if self.budget:
                    self.budget.check()
                if (output / artifact_folder.MANIFEST_FILENAME).exists():
                    try:
                        artifact_folder.read(output)
                    except ArtifactDamagedError:
                        filesystem.remove_tree(output)  # a damaged model of an earlier call is trained again
                with mlflow_tracking.nested_run(self.tracked, name) if self.tracked else nullcontext() as run:
                    reporter = _RecipeReporter(name, self, run)
                    model = self.train(output, recipe, reporter=reporter, run=partial(self.run_job, name))
                    if run:
                        run.log_result(model)
            except BaseException as error:
                if isinstance(error, TunelineError) and error.kind in RECIPE_ERROR_KINDS:
                    self.note(f"{name}: failed: {error.message}")
                    return RecipeOutcome(name, recipe, error=error)
                self.stop.detach_requested.set()
                raise
            finally:
                if self.submission:
                    self.submission.withdraw(name)  # other recipes must not wait for this recipe
            self.trained += 1
        if recipe.max_steps:  # report all steps, even after early stopping or for an existing model
            self.progress(name, recipe.max_steps)
        self.note(f"{name}: validation loss {model.manifest.summary['validation_loss']:.4f}")
        return RecipeOutcome(name, recipe, model)

    def progress(self, name: str, done: int) -> None:
        """Report a recipe's steps. The total is known if each recipe sets max_steps."""
        steps = [recipe.max_steps for recipe in self.recipes.values()]
        with self.reporter_lock:
            self.steps_done[name] = done
            total = sum(count for count in steps if count) if all(steps) else None
            self.reporter.progress(sum(self.steps_done.values()), total, "steps")

    def note(self, text: str) -> None:
        """Report a message."""
        with self.reporter_lock:
            self.reporter.note(text)

    def run_job(
        self, name: str, launcher: Launcher, command: Command, folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        """Call `launch.run` without the lock, so that other threads can work meanwhile."""
        environment = self.free_environments.pop(0)
        self.lock.release()
        try:
            started = None
            if self.submission and isinstance(launcher, ArrayLauncher):
                started = self.submission.start(name, launcher, command, folder)
            if isinstance(launcher, LocalLauncher):
                launcher = launcher.with_environment(environment)
            return launch.run(launcher, command, folder, reporter, self.stop, started)
        finally:
            self.lock.acquire()
            self.free_environments.insert(0, environment)


@dataclass(frozen=True)
class _RecipeReporter:
    """Reporter of one recipe. Logs metrics to the recipe's own MLflow run, because a run has one series per metric."""

    name: str
    sweep: _RunningSweep
    run: MlflowReporter | None

    def step(self, name: str) -> None: ...

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps":
            self.sweep.progress(self.name, done)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if self.run:
            self.run.metrics(values, step)

    def note(self, text: str) -> None:
        self.sweep.note(f"{self.name}: {text}")
        if self.run:
            self.run.note(text)


def _publish_best(
    outcomes: Sequence[RecipeOutcome],
    trainings: Sequence[Path],
    varied: Sequence[str],
    output: Path,
    sweep_key: str,
) -> Artifact:
    """Publish the model with the lowest validation loss (the first of equal losses), with a summary of all recipes."""
    ranked = sorted(zip(outcomes, trainings, strict=True), key=lambda pair: pair[0].loss)
    best = ranked[0][0]
    if best.model is None:
        assert best.error
        raise best.error
    entries = []
    for outcome, training in ranked:
        log = callbacks.read_log((outcome.model.path if outcome.model else training) / callbacks.LOG_FILENAME)
        entries.append(SweepEntry(outcome.name, outcome.to_summary(varied), log))
    manifest = best.model.manifest
    unpublished = shutil.ignore_patterns(artifact_folder.MANIFEST_FILENAME)
    shutil.copytree(best.model.path, output, dirs_exist_ok=True, ignore=unpublished)
    summary = {**manifest.summary, "sweep": {"key": sweep_key, "recipes": [entry.result for entry in entries]}}
    samples = callbacks.read_log(output / SAMPLES_FILENAME)
    page = report.render_report(entries[0].log, summary, manifest.inputs, best.recipe, entries, samples)
    key = str(manifest.produced_by["key"])
    return stage.publish_model(
        output, manifest.kind, page, manifest.inputs, manifest.config, manifest.seed, key, summary
    )
