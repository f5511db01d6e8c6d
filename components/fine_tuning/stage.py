"""Fine-tuning stage: trains a base model on a dataset, resumes after interruptions, and publishes the model."""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common import launch
from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.cost import stage_cost
from components.common.cost.budgets import BudgetClock
from components.common.launch import Command, Launcher, LostJobError
from components.common.launch.launcher_registry import create_launcher
from components.common.launch.launcher_settings import LauncherSettings
from components.common.models import model_loading, tokenization_check
from components.common.models.model_loading import LocalBaseModel
from components.common.models.model_shape import ModelShape
from components.common.models.weight_integrity import check_vocabulary
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import RESUME_HINT, BusyError, ConfigurationError, InputError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders, liveness
from components.fine_tuning import (
    acceleration,
    adapters,
    callbacks,
    judge_rewards,
    mixing,
    model_card,
    model_support,
    other_models,
    recipe_defaults,
    report,
    reward_sources,
    rewards,
    row_encoding,
    token_cache,
    training,
    training_plan,
)
from components.fine_tuning.config import JUDGE_OPERATION, FineTuningConfig, JudgeConfig, Recipe
from components.fine_tuning.other_models import OtherModels
from components.fine_tuning.sample_answers import SAMPLES_FILENAME
from components.fine_tuning.token_cache import TokenizedDataset, TokenizedSplit
from components.fine_tuning.training import StartupTimer, TrainingJob, TrainingResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAGE = "fine_tuning"
# All other files of the output are payload.
NON_PAYLOAD_FILES = (
    "report.html",
    callbacks.LOG_FILENAME,
    SAMPLES_FILENAME,
    model_card.CARD_FILENAME,
)
# Lists of adapter_config.json without a meaningful order; others, such as layer_types, have one entry for each layer.
UNORDERED_LISTS = ("target_modules", "modules_to_save", "exclude_modules", "feedforward_modules")
# Keys of config.json that libraries change for the training; the published file has the base model's values.
TRAINING_SWITCHES = ("use_cache", "output_router_logits", "num_experts")
RunCommand = Callable[[Launcher, Command, Path, Reporter], dict[str, Any]]  # called like launch.run


def finetune(
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
    run: RunCommand | None = None,
    budget: BudgetClock | None = None,
    peers: int = 1,
) -> Artifact:
    """Tune `config.base_model` on the dataset's training split and publish the model in `output`.

    Checkpoints are in `state`/fine_tuning/<key>; the key is the digest of inputs, configuration and code. After an
    interruption, the same call resumes from the newest complete checkpoint and produces the same weights.

    Args:
        output: Folder of the model artifact.
        seed: Seed of all random numbers.
        state: Folder of checkpoints and cached tokens.
        dataset_uri: URI of the published dataset, for the manifest.
        base: The resolved base model. Default: resolve `config.base_model`.
        initial_adapter: The opened initial adapter. Default: open `config.initial_adapter`.
        overwrite: Replace another artifact in `output`.
        launcher_settings: Launcher and number of nodes. Default: this machine.
        run: Function that runs the training command in separate processes. Default: a training run with one process on
            this machine runs in the calling process; other training runs use `launch.run`.
        budget: Cost of the step so far, and the budgets that the training counts against. Default: no budget.
        peers: Number of concurrent training runs that count against the same budgets.

    Raises:
        ConfigurationError: the recipe cannot run on this machine or with this base model.
        InputError: the objective does not accept the kind of rows, or no row has a token to learn.
        EngineMissingError: a package that the recipe needs is not installed.
        OutputOccupiedError: `output` contains other files.
        BusyError: another job trains this model.
        TrainingError: a loss is not finite, the strategy is not in effect, or the merged model differs.
        LostJobError: the training job was lost, or wrote no weights.
        InterruptedRunError: a signal interrupted the training.
        BudgetReachedError: a budget is used up; the last step is saved.
    """
    launcher_settings = launcher_settings or LauncherSettings()
    check_launcher(config, launcher_settings)
    timer = StartupTimer()
    inputs = _open_inputs(dataset, config, base, initial_adapter, launcher_settings, timer, reporter)
    recipe, tokenizer = inputs.recipe, inputs.tokenizer
    arithmetic = describe_arithmetic(recipe, launcher_settings)
    key = compute_key(dataset.sha256, inputs.base.sha256, recipe, seed, arithmetic, inputs.initial_sha256)
    work = state / STAGE / key
    if finished := artifact_folder.claim_folder(output, key, overwrite=overwrite):
        discard_state(work)  # left by an interruption after publication
        return finished
    work.mkdir(parents=True, exist_ok=True)
    with job_folders.folder_lock(work) as verify_lock:
        with timer.measure("tokens"):
            splits = _tokenize_and_check(inputs, launcher_settings, state, reporter)
        counted = budget.dump(peers) if budget else {}
        job = inputs.build_job(splits.folder, work, output, seed, counted, reporter)
        with liveness.heartbeat(splits.folder):
            result = _train(job, recipe, tokenizer, reporter, launcher_settings, run)
        _add_tokenizer(tokenizer, inputs.base, output)
        summary = _summarize(result, splits.train, inputs, arithmetic, timer, work)
        manifest_inputs = inputs.list_manifest_inputs(dataset_uri)
        card = model_card.render_card(recipe, summary, dataset, inputs.base, manifest_inputs, seed)
        page = _write_documents(work, output, card, summary, manifest_inputs, recipe)
        verify_lock()
        artifact_kind = artifact_folder.REWARD_MODEL if recipe.objective_spec.scores_answers else "model"
        published = publish_model(output, artifact_kind, page, manifest_inputs, recipe.model_dump(), seed, key, summary)
        shutil.rmtree(work, ignore_errors=True)
    return published


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a training run, opened and verified, with the complete recipe."""

    dataset: Artifact
    base: LocalBaseModel
    initial_adapter: Artifact | None
    others: OtherModels
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe

    @property
    def initial_sha256(self) -> str | None:
        """The digest of the initial adapter."""
        return self.initial_adapter.sha256 if self.initial_adapter else None

    @property
    def judges(self) -> list[JudgeConfig]:
        """The judges among the rewards."""
        return [entry.judge for entry in self.recipe.grpo.rewards if entry.judge]

    def build_job(
        self, tokens: Path, work: Path, output: Path, seed: int, budget: dict[str, Any], reporter: Reporter
    ) -> TrainingJob:
        """Return the job; the base models of the reward models are resolved."""
        return TrainingJob(
            base_path=str(self.base.path),
            base_sha256=self.base.sha256,
            base_uri=self.base.uri,
            config=self.others.locate(self.recipe).model_dump(),
            seed=seed,
            tokens=str(tokens),
            state=str(work),
            output=str(output),
            initial_adapter=str(self.initial_adapter.path) if self.initial_adapter else "",
            budget=budget,
            reward_bases=reward_sources.resolve_bases(self.others.reward_models, reporter),
        )

    def list_manifest_inputs(self, dataset_uri: str) -> list[ArtifactInput]:
        """Return the inputs in the model's manifest."""
        listed = [self.dataset.as_input(dataset_uri), self.base.as_input()]
        if self.initial_adapter:
            source = self.initial_adapter.as_input(self.recipe.initial_adapter or "")
            listed.append(source.model_copy(update={"kind": adapters.INITIAL_ADAPTER_INPUT}))
        return [*listed, *self.others.list_inputs(self.recipe), *map(judge_rewards.describe_input, self.judges)]


def _open_inputs(
    dataset: Artifact,
    config: FineTuningConfig,
    base: LocalBaseModel | None,
    initial_adapter: Artifact | None,
    launcher_settings: LauncherSettings,
    timer: StartupTimer,
    reporter: Reporter,
) -> _Inputs:
    """Open and verify the models, and complete the recipe."""
    config.objective_spec.get_mapping(get_rows_kind(dataset), f"the dataset in {dataset.path} contains")
    base = base or model_loading.resolve_base_model(config.base_model, reporter)
    if initial_adapter is None and config.initial_adapter:
        model_config = model_loading.load_configuration(base.path)
        initial_adapter = adapters.open_initial_adapter(config, base.sha256, model_config)
    with timer.measure("tokens"):
        tokenization_check.check_tokenization(base.path, base.uri)
        tokenizer = model_loading.load_tokenizer(base.path)
        recipe = plan_recipe(dataset, base, config, tokenizer, launcher_settings, reporter)
        others = other_models.open_models(recipe, base.path, reporter)
    return _Inputs(dataset, base, initial_adapter, others, tokenizer, others.pin(recipe))


def _tokenize_and_check(
    inputs: _Inputs, launcher_settings: LauncherSettings, state: Path, reporter: Reporter
) -> TokenizedDataset:
    """Return the tokenized splits, after the checks of vocabulary, memory and rewards on them."""
    base, recipe, tokenizer = inputs.base, inputs.recipe, inputs.tokenizer
    check_vocabulary(tokenizer, model_loading.load_configuration(base.path), base.uri)
    splits = tokenize(inputs.dataset, get_rows_kind(inputs.dataset), tokenizer, base, recipe, state, reporter)
    check_memory(splits, base, recipe, launcher_settings)
    if recipe.grpo.rewards and launcher_settings.entry.uses_this_machine:
        scores = rewards.score_references(recipe.grpo.rewards, splits.train.dataset)
        for warning in rewards.describe_references(*scores):
            reporter.note(warning)
    return splits


def _summarize(
    result: TrainingResult,
    split: TokenizedSplit,
    inputs: _Inputs,
    arithmetic: Mapping[str, Any],
    timer: StartupTimer,
    work: Path,
) -> dict[str, Any]:
    """Return the summary in the model's manifest."""
    objective = inputs.recipe.objective_spec
    judges = [judge_rewards.summarize(judge, work) for judge in inputs.judges]
    return {
        **asdict(result),
        **split.summarize(),
        "loss": objective.loss_description,
        "arithmetic": arithmetic,
        "learned": objective.row_mappings[get_rows_kind(inputs.dataset)].trained_on,
        "startup": {**timer.seconds, **result.startup},
        **({"judges": judges} if judges else {}),
    }


def plan_recipe(
    dataset: Artifact,
    base: LocalBaseModel,
    config: FineTuningConfig,
    tokenizer: PreTrainedTokenizerBase,
    launcher_settings: LauncherSettings,
    reporter: Reporter,
) -> Recipe:
    """Return the recipe with the settings that it leaves open, chosen from rows, model and device, and report them.

    Args:
        dataset: The dataset artifact, whose rows the objective accepts.
        base: The base model.
        config: The recipe; a sweep is dropped.
        tokenizer: The base model's tokenizer.
        launcher_settings: Launcher and number of nodes.
        reporter: Receives a note for each setting.

    Raises:
        ConfigurationError: the base model cannot be trained with the recipe, or a mixing setting has no source.
    """
    model_config = model_loading.load_configuration(base.path)
    model_support.check_model(config, model_config)
    if config.mixing.is_active:
        mixing.check_settings(config.mixing, row_encoding.count_sources(dataset.path / "train.parquet"))
    if recipe_defaults.has_open_settings(config):
        lengths: list[int] = []
        if config.max_length is None:
            mapping = config.objective_spec.get_mapping(get_rows_kind(dataset), "the dataset contains")
            rows = row_encoding.sample_rows(dataset.path / "train.parquet", mapping, recipe_defaults.MAX_SAMPLED_ROWS)
            lengths = recipe_defaults.measure_lengths(rows, config, tokenizer)
        shape = ModelShape.from_configuration(model_config, training.count_parameters(model_config, config))
        device = acceleration.describe_training_device(
            config,
            remote=not launcher_settings.entry.uses_this_machine,
            other_parameters=other_models.count_parameters(config),
        )
        completed = recipe_defaults.complete_recipe(config, lengths, model_config, shape, device)
        for reason in completed.reasons:
            reporter.note(reason)
        recipe = completed.recipe
    else:
        settings = config.model_dump(exclude={"sweep"}, exclude_none=True)
        recipe = Recipe.model_validate({"epochs": config.objective_spec.epochs, **settings})
    if warning := recipe_defaults.describe_exceeded_context(recipe, model_config):
        reporter.note(warning)
    return recipe


def _write_documents(
    work: Path, output: Path, card: str, summary: dict[str, Any], inputs: Sequence[ArtifactInput], recipe: Recipe
) -> str:
    """Write the model card, logs, sample answers and TensorBoard files to the output; return the report."""
    (output / model_card.CARD_FILENAME).write_text(card, encoding="utf-8")
    shutil.copyfile(work / callbacks.LOG_FILENAME, output / callbacks.LOG_FILENAME)
    if (work / SAMPLES_FILENAME).exists():
        shutil.copyfile(work / SAMPLES_FILENAME, output / SAMPLES_FILENAME)
    board = work / callbacks.TENSORBOARD_FOLDER
    if board.is_dir():
        shutil.copytree(board, output / board.name, dirs_exist_ok=True)
    log, samples = (callbacks.read_log(output / name) for name in (callbacks.LOG_FILENAME, SAMPLES_FILENAME))
    return report.render_report(log, summary, inputs, recipe, samples=samples)


def publish_model(
    output: Path,
    kind: str,
    page: str,
    inputs: Sequence[ArtifactInput],
    config: dict[str, Any],
    seed: int,
    key: str,
    summary: dict[str, Any],
) -> Artifact:
    """Write the report and publish the model artifact in `output`; reports, logs and the card are not payload.

    Args:
        output: Folder with the weights.
        kind: Kind of the artifact: model or reward_model.
        page: HTML of the report.
        inputs: Inputs in the manifest.
        config: The recipe, for the manifest.
        seed: Seed of the training.
        key: Digest returned by `compute_key`.
        summary: Summary of the training, for the manifest.
    """
    (output / "report.html").write_text(page, encoding="utf-8")
    return artifact_folder.publish(
        output,
        kind,
        payload=is_payload,
        inputs=inputs,
        config=config,
        seed=seed,
        key=key,
        summary=summary,
    )


def is_payload(path: str) -> bool:
    """Return whether a file, given as a path relative to the output, is part of the model's digest."""
    return path not in NON_PAYLOAD_FILES and not path.startswith(f"{callbacks.TENSORBOARD_FOLDER}/")


def get_rows_kind(dataset: Artifact) -> str:
    """Return the kind of a dataset's rows, such as preference; sft if the manifest has no kind."""
    return str(dataset.manifest.summary.get("rows_kind", "sft"))


def describe_arithmetic(config: FineTuningConfig, launcher_settings: LauncherSettings) -> dict[str, Any]:
    """Return the hardware that affects rounding: device and threads, or the resources that the job requests."""
    if launcher_settings.entry.uses_this_machine:
        return model_loading.describe_arithmetic(config.device)
    return launcher_settings.describe_hardware()


def discard_state(work: Path) -> None:
    """Delete the state of a training run unless another job holds its lock."""
    if work.is_dir():
        with suppress(BusyError, FileNotFoundError), job_folders.folder_lock(work):
            shutil.rmtree(work, ignore_errors=True)


def compute_key(
    dataset_sha256: str,
    base_sha256: str,
    config: Recipe,
    seed: int,
    arithmetic: Mapping[str, Any],
    initial_adapter_sha256: str | None = None,
) -> str:
    """Return the digest of all inputs that determine the weights.

    Includes device and threads (`arithmetic`), because the order of floating-point sums affects rounding. Excludes the
    settings of the model card, and limits of judges.
    """
    return hashing.digest(
        {
            "stage": STAGE,
            "code": code_digest.code_sha256(STAGE),
            "inputs": [dataset_sha256, base_sha256, *filter(None, [initial_adapter_sha256])],
            "config": config.model_dump(
                exclude={
                    "card": True,
                    "initial_adapter": True,
                    "grpo": {"rewards": {"__all__": {"judge": JUDGE_OPERATION}}},
                }
            ),
            "seed": seed,
            "arithmetic": dict(arithmetic),
        }
    )


def tokenize(
    dataset: Artifact,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    base: LocalBaseModel,
    config: Recipe,
    state: Path,
    reporter: Reporter,
) -> TokenizedDataset:
    """Return the dataset's tokenized splits.

    Args:
        dataset: The dataset artifact.
        kind: Kind of the dataset's rows, which the objective accepts.
        tokenizer: The base model's tokenizer.
        base: The base model.
        config: The recipe.
        state: Folder of checkpoints and cached tokens.
        reporter: Receives progress and notes.

    Raises:
        ConfigurationError: the chat template or the tokenizer exceeds a limit.
        InputError: the training split is empty, no training row has a token to learn, or a row lacks a field that a reward
            reads.
    """
    if kind != config.objective:
        trained_on = config.objective_spec.row_mappings[kind].trained_on
        reporter.note(f"objective {config.objective} trains on {trained_on}")
    tokenizer_sha256 = token_cache.hash_tokenizer(base.path)
    splits = token_cache.load_or_tokenize(dataset, kind, tokenizer, tokenizer_sha256, config, state, reporter)
    counts = splits.train.counts
    if not counts.rows:
        raise InputError(
            "the dataset's training split is empty",
            hint="Curate more rows; all rows of a group are assigned to the same split.",
        )
    if not counts.examples:
        needed = "a prompt with an answer" if config.objective_spec.generates else "an answer"
        raise InputError(
            f"no training row has {needed} within {config.max_length} tokens",
            hint="Increase fine_tuning.max_length.",
        )
    if counts.truncated:
        cut = format_count(counts.cut_tokens, "token was", "tokens were")
        reporter.note(
            f"{format_count(counts.truncated, 'training row was', 'training rows were')} truncated to "
            f"{config.max_length} tokens: {cut} cut off, {counts.cut_share:.1%} of all"
        )
    if config.objective_spec.generates and counts.without_answer:
        reporter.note(
            f"{format_count(counts.without_answer, 'training row is', 'training rows are')} left out, because the prompt "
            f"exceeds {config.max_length} tokens or the conversation does not end with a text answer"
        )
    if rewards.reads_fields(config.grpo.rewards):
        for split in (splits.train, splits.validation):
            rows = split.dataset.data
            for (row_id,), meta in zip(rows.column("ids").to_pylist(), rows.column("meta").to_pylist(), strict=True):
                rewards.check_row_fields(config.grpo.rewards, row_id, meta)
    for warning in _describe_limits(splits.train, config):
        reporter.note(warning)
    return splits


def _describe_limits(split: TokenizedSplit, config: Recipe) -> list[str]:
    """Return a warning if the training ends before the end of an epoch, and for each ignored or uneven source."""
    rows, examples = split.count_epoch_rows(config.mixing), split.count_epoch_examples(config.mixing)
    steps = training_plan.plan_steps(examples, config).total
    seen = training_plan.count_rows_seen(rows, examples, steps, config)
    unseen = training_plan.describe_unseen_rows(rows, seen, config)
    warnings = [unseen] if unseen else []
    if config.mixing.is_active:
        drawn = training_plan.count_rows_seen(examples, examples, steps, config)
        mean_lengths = mixing.measure_mean_lengths(split.sources, split.lengths)
        shares = mixing.plan_shares(config.mixing, Counter(split.sources), drawn, mean_lengths)
        warnings += mixing.describe_ignored_settings(config.mixing, set(split.sources))
        warnings += mixing.describe_shares(shares, examples)
    return warnings


def check_memory(
    splits: TokenizedDataset, base: LocalBaseModel, recipe: Recipe, launcher_settings: LauncherSettings
) -> None:
    """Check that the longest row of the sources that train can fit into memory; see `recipe_defaults.check_memory`.

    Raises:
        ConfigurationError: it cannot; the message has the memory by part.
    """
    model_config = model_loading.load_configuration(base.path)
    shape = ModelShape.from_configuration(model_config, training.count_parameters(model_config, recipe))
    device = acceleration.describe_training_device(
        recipe,
        remote=not launcher_settings.entry.uses_this_machine,
        other_parameters=other_models.count_parameters(recipe),
    )
    lengths = splits.train.lengths
    if recipe.mixing.is_active:
        lengths = mixing.select_trained(recipe.mixing, splits.train.sources, lengths)
    recipe_defaults.check_memory(recipe, max(lengths), shape, device)


def check_launcher(config: FineTuningConfig, launcher_settings: LauncherSettings) -> None:
    """Check that the launcher can run the recipe. A remote job checks its own hardware.

    Raises:
        ConfigurationError: this machine or the launcher cannot run the recipe.
        EngineMissingError: a package that the recipe needs is not installed.
    """
    if launcher_settings.entry.uses_this_machine:
        acceleration.check_machine(config)
    if config.processes % launcher_settings.nodes:
        raise ConfigurationError(
            f"fine_tuning.processes is {config.processes}; expected a multiple of launcher.nodes "
            f"({launcher_settings.nodes})",
            hint="Set fine_tuning.processes to the number of accelerators on all nodes.",
        )


def _train(
    job: TrainingJob,
    config: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
    launcher_settings: LauncherSettings,
    run: RunCommand | None,
) -> TrainingResult:
    """Train in the calling process if possible, which avoids loading twice; otherwise in separate processes."""
    if config.processes == 1 and launcher_settings.entry.ends_with_step and run is None:
        return training.train(job, reporter, tokenizer)
    folder, nodes = Path(job.state) / "launch", launcher_settings.nodes  # on the same storage as the checkpoints
    # The nodes of a remote job may not see the output folder, and a retry may use another output folder.
    weights = Path(job.output) if launcher_settings.entry.ends_with_step else folder / "model"
    for path in (folder, weights):
        path.mkdir(parents=True, exist_ok=True)
    job_path = folder / launch.JOB_FILENAME
    artifact_folder.write_atomically(job_path, json.dumps(asdict(replace(job, output=str(weights)))))
    command = Command("components.fine_tuning.worker", [str(job_path)], config.processes // nodes, nodes)
    try:
        outcome = (run or launch.run)(create_launcher(launcher_settings), command, folder, reporter)
    finally:
        stage_cost.collect_job_cost(folder, is_local=launcher_settings.entry.uses_this_machine)
    if not launcher_settings.entry.ends_with_step:
        _move_to_output(weights, Path(job.output))
    return TrainingResult(**outcome["trained"])


def _move_to_output(weights: Path, output: Path) -> None:
    """Move the weights of a remote job to the output. Raises LostJobError if the job wrote no weights."""
    if not any(weights.glob("*.safetensors")):
        raise LostJobError(f"the job wrote no weights to {weights}", hint=RESUME_HINT)
    # After an interrupted move, the next call has to write the weights again from the last checkpoint.
    (weights.parent / launch.OUTCOME_FILENAME).unlink(missing_ok=True)
    for path in sorted(weights.iterdir()):
        try:
            filesystem.rename(path, output / path.name)
        except OSError as error:
            if error.errno != errno.EXDEV:  # another file system
                raise
            shutil.copy2(path, output / path.name)
            path.unlink(missing_ok=True)


def _add_tokenizer(tokenizer: PreTrainedTokenizerBase, base: LocalBaseModel, output: Path) -> None:
    """Add the tokenizer, and normalize values that differ between machines."""
    model_loading.save_tokenizer(tokenizer, output)
    (output / model_card.CARD_FILENAME).unlink(missing_ok=True)  # PEFT's empty model card
    for path in output.glob("*.safetensors"):
        shutil.copymode(output / "tokenizer_config.json", path)  # safetensors writes 0600, whatever the umask
    for path in (output / model_loading.ADAPTER_CONFIG, output / "config.json"):
        if not path.exists():
            continue
        values = json.loads(filesystem.read_text(path))
        for name in UNORDERED_LISTS:  # PEFT writes these lists in the order of a set
            if isinstance(values.get(name), list):
                values[name] = sorted(values[name])
        if path.name == "config.json":
            stated = json.loads((base.path / path.name).read_text(encoding="utf-8"))
            values = {name: value for name, value in values.items() if name not in TRAINING_SWITCHES}
            values |= {name: stated[name] for name in TRAINING_SWITCHES if name in stated}
        for name in ("base_model_name_or_path", "_name_or_path", "tokenizer_name_or_path"):
            if values.get(name):
                values[name] = base.name  # the source instead of this machine's folder
        path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
