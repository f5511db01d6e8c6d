"""Dry run: the rows, tokens, steps, memory, disk and time of a run, estimated without running it.

Sources are listed, read, cleaned and tokenized; nothing is written, converted or registered. `basis` in the result
gives the origin of each figure.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from components.common import pipeline_step, tool_rows
from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Manifest
from components.common.gate_rules import MIN_QUANTIZATION_ITEMS
from components.common.launch import launcher_settings
from components.common.models import conversation_rows, model_loading, resource_formulas
from components.common.models.model_loading import ModelOutline
from components.common.models.model_shape import ModelShape
from components.common.models.quantizations import find_quantization
from components.common.row_comparison import training_overlap
from components.common.runtime import filesystem, mounts
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.quality_scoring.llm_judge import LanguageModelJudge
from components.data_curation.stage import (
    CurationResult,
    Source,
    check_splits,
    describe_few_test_rows,
    describe_sources_without_rows,
    preview_curation,
    summarize_rows,
)
from components.data_versioning.stage import check_remote, list_versions
from components.evaluation import promotion_gate
from components.evaluation.tasks import task_preflight
from components.evaluation.tasks.task_preflight import TaskWorkload
from components.evaluation.tasks.task_registry import TASK_KINDS
from components.fine_tuning import (
    acceleration,
    batch_order,
    earlier_training,
    mixing,
    other_models,
    rewards,
)
from components.fine_tuning import training_plan as training
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.mixing import MAX_SHOWN_SOURCES, MixingSettings, SourceShare
from components.fine_tuning.model_support import check_model
from components.fine_tuning.recipe_defaults import (
    MAX_SAMPLED_ROWS,
    CompletedRecipe,
    check_memory,
    complete_recipe,
    describe_exceeded_context,
    measure_lengths,
    share_settings,
)
from components.fine_tuning.row_encoding import RowCounts, encode_rows
from components.fine_tuning.training import count_parameters
from components.model_registry.stage import find_champion
from components.triton_packaging import quantization
from pipelines.config.customization_config import Customization
from pipelines.planning import machine_speed, stage_times, suite_cost
from pipelines.planning.stage_times import StageTime
from pipelines.steps import curation_inputs, policy_preflight
from pipelines.steps.curation_inputs import CurationInputs
from pipelines.steps.input_resolution import (
    build_plans,
    check_champion_kind,
    check_evaluation_tasks,
    check_training_models,
    drop_placement,
    find_initial_adapter,
    format_unproven_warning,
    get_unproven_reason,
    list_test_call_metrics,
    select_incumbent,
)

GB = 10**9
MAX_TEST_FRACTION, MIN_TRAIN_FRACTION = 0.6, 0.2  # that a warning suggests
MAX_NAMED_SOURCES = 5  # in warnings
MAX_SHOWN_UNREADABLE = 3
ESTIMATED_STAGES = tuple(pipeline_step.STAGE_BY_ARTIFACT.values())
Json = dict[str, Any]


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of the training rows, or of a sample of them."""

    rows: int
    counts: RowCounts  # of the tokenized rows
    lengths: list[int]  # tokens of each tokenized row that is trained on
    sources: list[str]  # source of each of these rows

    @property
    def is_sample(self) -> bool:
        return self.counts.rows < self.rows

    @property
    def rows_per_sampled_row(self) -> float:
        return self.rows / self.counts.rows if self.counts.rows else 1.0

    @property
    def trained_rows(self) -> int:
        """Rows of the training split that have an answer to train on."""
        return round((self.counts.rows - self.counts.without_answer) * self.rows_per_sampled_row)

    @property
    def examples(self) -> int:
        """Examples of these rows."""
        return round(len(self.lengths) * self.rows_per_sampled_row)

    @property
    def mean_length(self) -> float:
        """Tokens per trained row."""
        return statistics.fmean(self.lengths) if self.lengths else 0.0


@dataclass(frozen=True)
class RunSurvey:
    """Inputs of the estimate.

    Attributes:
        config: the customization.
        recipe: the recipe of the training; of a sweep, without the values that it varies.
        choices: one sentence for each setting that the customization leaves open.
        workdir: the workdir of the run.
        sources: the raw files.
        outline: the base model without its weights.
        curated: the result of the curation.
        reading_seconds: the measured duration of the curation.
        tokens: the token counts of the training rows.
        shape: the dimensions and parameter counts of the model.
        task_checks: the workloads of the evaluation's tasks.
        cached: the digests of the results in the store, by stage.
        missing_revisions: the tags of earlier revisions that the store lacks.
        examples_by_source: the number of training examples of each source.
        trained_rows: a warning for each dataset of the base model's lineage that has test rows.
        reference_rewards: the mean reward of the reference answers by the name of the reward, and their number.
        first_rejected: the place of the first rejected row by reason.
    """

    config: Customization
    recipe: Recipe
    choices: list[str]
    workdir: Workdir
    sources: list[Source]
    outline: ModelOutline
    curated: CurationResult
    reading_seconds: float
    tokens: TokenCounts
    shape: ModelShape
    task_checks: Sequence[TaskWorkload]
    cached: dict[str, str]
    missing_revisions: list[str]
    examples_by_source: dict[str, int]
    trained_rows: list[str]
    reference_rewards: tuple[dict[str, float], int]
    first_rejected: dict[str, str]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return training.plan_steps(self.batched_rows, self.recipe).total

    @property
    def mixing(self) -> MixingSettings:
        """Settings for the shares of the sources."""
        return self.recipe.mixing

    @property
    def epoch_rows(self) -> int:
        """Training rows of an epoch. A mixture draws examples, whose share of all examples this is."""
        rows = self.tokens.trained_rows
        return round(rows * self.batched_rows / max(self.tokens.examples, 1)) if self.mixing.is_active else rows

    @property
    def batched_rows(self) -> int:
        """Rows, or packed rows, per epoch."""
        if self.mixing.is_active and self.examples_by_source:
            return mixing.count_epoch_examples(self.mixing, self.examples_by_source)
        examples = self.tokens.examples
        return training.count_batched_rows(examples, examples * self.tokens.mean_length, self.recipe)

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.recipe.adaptation_spec.trains_all_weights

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on in all steps; generated answers are counted at their maximum length."""
        tuning, tokens = self.recipe, self.tokens
        if tuning.objective_spec.generates:
            prompts = self.steps * tuning.rows_per_step
            prompt_tokens = sum(share.tokens for share in self.shares)
            return tuning.answers_per_prompt * (prompt_tokens + prompts * tuning.max_answer_tokens)
        if not tuning.packing:
            return sum(share.tokens for share in self.shares)
        if not tokens.is_sample:
            return training.count_packed_tokens(sum(tokens.lengths), tuning)
        return self.steps * tuning.rows_per_step * tuning.max_length

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch."""
        if not (self.mixing.is_active and self.tokens.lengths):
            return round(sum(self.tokens.lengths) * self.tokens.rows_per_sampled_row)
        return sum(share.tokens for share in self._plan_shares(self.batched_rows))

    @property
    def rows_seen(self) -> int:
        """Rows in the batches of all steps; a row counts once per draw."""
        return training.count_rows_seen(self.epoch_rows, self.batched_rows, self.steps, self.recipe)

    @cached_property
    def shares(self) -> list[SourceShare]:
        """Share of each source in the examples of all steps; empty with packing."""
        tokens, recipe = self.tokens, self.recipe
        if recipe.packing or not tokens.lengths:
            return []
        if tokens.is_sample:
            examples = self.batched_rows
            return self._plan_shares(training.count_rows_seen(examples, examples, self.steps, recipe))
        mixture = mixing.build_mixture(self.mixing, tokens.sources) if self.mixing.is_active else None
        draws = batch_order.count_draws(
            tokens.lengths, recipe.rows_per_step, self.steps, seed=self.config.seed, mixture=mixture
        )
        return mixing.count_shares(tokens.sources, tokens.lengths, draws)

    def _plan_shares(self, drawn: int) -> list[SourceShare]:
        """Return the share of each source in a number of drawn examples."""
        means = dict.fromkeys(self.examples_by_source, self.tokens.mean_length)
        means |= mixing.measure_mean_lengths(self.tokens.sources, self.tokens.lengths)
        return mixing.plan_shares(self.mixing, self.examples_by_source, drawn, means)

    @cached_property
    def suite_tasks(self) -> list[TaskWorkload]:
        """The workload of each task of the regression suite; empty without the suite."""
        rows = self.curated.verdicts.count_splits()
        return suite_cost.list_suite_tasks(self.config.evaluation, self.task_checks, rows, self.tokens.mean_length)

    @cached_property
    def recipes(self) -> list[RunSurvey]:
        """The survey of each recipe of a sweep; without a sweep, this survey alone."""
        if not self.config.fine_tuning.sweep.vary:
            return [self]
        shapes: dict[str, ModelShape] = {}
        surveys = []
        for config in share_settings(self.config.fine_tuning, self.recipe.max_length).recipes.values():
            # Counting a large model's parameters is slow; only the adaptation and the sections change them.
            values = config.model_dump(mode="json").items()
            key = hashing.digest({n: value for n, value in values if n == "adaptation" or isinstance(value, dict)})
            if key not in shapes:
                shapes[key] = ModelShape.from_configuration(
                    self.outline.config, count_parameters(self.outline.config, config)
                )
            recipe = complete_recipe(config, [], self.outline.config, shapes[key], _find_device(config)).recipe
            surveys.append(replace(self, recipe=recipe, shape=shapes[key]))
        return surveys

    @property
    def largest(self) -> RunSurvey:
        """The recipe that trains the most parameters; the best recipe is not known yet."""
        return max(self.recipes, key=lambda recipe: recipe.shape.trainable)

    def sum_concurrent(self, sizes: Iterable[int]) -> int:
        """Return the largest possible sum of the recipes' sizes over recipes that run at the same time."""
        return sum(sorted(sizes, reverse=True)[: self.config.fine_tuning.sweep.parallel])


def estimate_run(config: Customization, workdir: Workdir, reporter: Reporter) -> Json:
    """Return the object that `tuneline run --dry-run --json` prints.

    Raises:
        ConfigurationError: a source or a model does not exist.
        InputError: no row can be read.
    """
    survey = survey_run(config, workdir, reporter)
    reporter.step("estimating")
    tokens, lengths, shape = survey.tokens, survey.tokens.lengths, survey.largest.shape
    counts, tokenized = summarize_rows(survey.curated), tokens.counts
    first = survey.recipes[0]
    memory, disk = _estimate_memory(survey), _estimate_disk(survey)
    times = stage_times.estimate_times(survey, ESTIMATED_STAGES, _describe_remote_training())
    start = machine_speed.START_SECONDS
    seconds: dict[str, float | None] = dict.fromkeys(ESTIMATED_STAGES, 0.0)  # 0 for a cached stage
    for stage, estimate in times.items():
        seconds[stage] = None if estimate.seconds is None else round(start[stage] + estimate.seconds, 1)
    seconds["other_steps"] = round(sum(start[name] for name in start if name not in ESTIMATED_STAGES), 1)
    return {
        "dry_run": True,
        "rows": {
            **counts["rows"],
            "formats": survey.curated.prepared.count_formats(),
            "splits": counts["splits"],
        },
        "dropped": {
            "first_rejected": survey.first_rejected,
            "first_unreadable": [
                f"{record.file}:{record.line}: {record.reason}"
                for record in survey.curated.prepared.unread[:MAX_SHOWN_UNREADABLE]
            ],
        },
        "tokens": {
            "tokenised_rows": tokenized.rows,
            "mean": round(tokens.mean_length, 2),
            "longest": max(lengths, default=0),
            "cut_share": round(tokenized.truncated / tokenized.rows, 4) if tokenized.rows else 0.0,
            "max_length": survey.recipe.max_length,
            "without_answer": round(tokenized.without_answer * tokens.rows_per_sampled_row),
            "an_epoch": first.epoch_tokens,
            "trained": sum(recipe.trained_tokens for recipe in survey.recipes),
        },
        "steps": sum(recipe.steps for recipe in survey.recipes),
        "epochs": round(sum(training.count_epochs(first.batched_rows, first.steps, first.recipe)), 4),
        "sources": _list_shares(survey.recipes),
        "reference_rewards": {"rows": survey.reference_rewards[1], "means": survey.reference_rewards[0]},
        "recipe": survey.choices,
        "parameters": {"all": shape.parameters, "trainable": shape.trainable},
        "memory": memory,
        "disk": disk,
        "seconds": {**seconds, "total": None if None in seconds.values() else _sum_known(seconds)},
        "stages": [{"name": stage, "cached": stage in survey.cached} for stage in ESTIMATED_STAGES],
        "basis": _describe_basis(survey, times),
        "warnings": _list_warnings(survey, memory, disk),
        "suite": _summarize_suite(survey, times.get("evaluation")),
    }


def _summarize_suite(survey: RunSurvey, evaluation: StageTime | None) -> Json | None:
    """Return the size of the regression suite and its share of the evaluation's time; None without the suite."""
    summary = suite_cost.summarize_suite(survey.suite_tasks)
    if summary is None:
        return None
    tokens = summary["input_tokens"] + summary["output_tokens"]
    everything = sum(read + written for _, read, written in stage_times.list_evaluation_tokens(survey))
    known = evaluation.seconds if evaluation else None
    return {**summary, "seconds": None if known is None else round(known * tokens / max(everything, 1), 1)}


def _list_shares(recipes: Sequence[RunSurvey]) -> list[Json]:
    """Return the shares of the sources. A sweep whose recipes differ in them has none."""
    shares = recipes[0].shares
    is_shown = len(shares) > 1 or any(recipe.mixing.is_active for recipe in recipes)
    return mixing.summarize_shares(shares) if is_shown and all(recipe.shares == shares for recipe in recipes) else []


def survey_run(config: Customization, workdir: Workdir, reporter: Reporter) -> RunSurvey:
    """Resolve the inputs as a run does, read the rows and tokenize them; write to a temporary folder only."""
    state = workdir.state
    with tempfile.TemporaryDirectory(prefix="tuneline-dry-run-") as name:
        scratch = Workdir(Path(name).resolve())
        with artifact_store.override_state_folder(scratch.root / "state"):
            reporter.step("resolving the sources")
            inputs = curation_inputs.list_inputs(config, workdir, reporter, scratch)
            # In a plan, sources that were built or fetched in the temporary folder have their path in the workdir.
            final_folders = {scratch.state: state, scratch.root: workdir.root}
            sources = []
            for source in inputs.sources:
                uri = source.uri
                for folder, final in final_folders.items():
                    uri = uri.replace(f"{folder}/", f"{final.resolve()}/")
                sources.append(source.model_copy(update={"uri": uri}))
            planned = replace(inputs, sources=sources)
            reporter.step("resolving the base model")
            outline = model_loading.load_outline(config.fine_tuning.base_model)
            if outline.base:
                model_loading.check_base_model(outline.base)
            for recipe in config.fine_tuning.recipes.values():
                check_model(recipe, outline.config)
            if not config.fine_tuning.objective_spec.scores_answers:  # a reward model is not packaged
                quantization.check_quantizable(config.triton_packaging, outline.config)
            shape = ModelShape.from_configuration(outline.config, count_parameters(outline.config, config.fine_tuning))
            base_sha256 = outline.base.sha256 if outline.base else None
            initial_sha256 = find_initial_adapter(config, base_sha256, outline.config)
            config = check_training_models(config, outline)
            check_champion_kind(config, workdir)
            workloads = check_evaluation_tasks(config, lambda: (outline.tokenizer, outline.config), reporter)
            _check_services(config, workdir, inputs, reporter)
            repository = curation_inputs.repository_root(config, workdir, scratch)
            cached = _find_cached_stages(config, workdir, planned, outline, repository, workloads, initial_sha256)
            earlier = curation_inputs.load_stored_revisions(inputs.earlier_revisions, workdir)
            started = time.monotonic()
            with preview_curation(
                inputs.sources,
                config.data_curation,
                seed=config.seed,
                reporter=reporter,
                benchmarks=inputs.benchmarks,
                earlier=earlier,
            ) as curated:
                reading_seconds = time.monotonic() - started
                reporter.step("tokenizing the training rows")
                _check_reward_fields(curated, config.fine_tuning)
                if metrics := list_test_call_metrics(config):
                    _check_tool_rows(curated, metrics)
                _check_quantization_rows(curated, config)
                first_rejected = curated.find_first_rejected()
                completed, tokens, examples_by_source = _count_tokens(curated, config, outline, shape, reporter)
                reference_rewards = _score_references(curated, config.fine_tuning)
                if config.fine_tuning.max_length is None:  # the contexts can be checked with the chosen length
                    check_training_models(config.model_copy(update={"fine_tuning": completed.recipe}), outline)
                test_rows = (
                    training_overlap.build_row(str(number), content)
                    for number, content in enumerate(curated.iterate_contents("test"), start=1)
                )
                models = _list_tuned_models(config, outline)
                trained_rows = earlier_training.describe_trained_rows(
                    test_rows, models, config.data_curation.near_duplicate_threshold
                )
    compared = {revision.label for revision in earlier}
    return RunSurvey(
        config,
        completed.recipe,
        completed.reasons,
        workdir,
        inputs.sources,
        outline,
        curated,
        reading_seconds,
        tokens,
        shape,
        workloads,
        cached,
        missing_revisions=[tag for tag, _ in inputs.earlier_revisions if tag not in compared],
        examples_by_source=examples_by_source,
        trained_rows=trained_rows,
        reference_rewards=reference_rewards,
        first_rejected=first_rejected,
    )


def _check_reward_fields(curated: CurationResult, tuning: FineTuningConfig) -> None:
    """Check the fields that the rewards read, in the rows that train and validate. Raises InputError for an invalid row."""
    if rewards.reads_fields(tuning.grpo.rewards):
        for split in ("train", "validation"):
            for row in curated.iterate_contents(split, ["file", "line", "meta"]):
                rewards.check_row_fields(tuning.grpo.rewards, f"{row['file']}:{row['line']}", row["meta"])


def _score_references(curated: CurationResult, tuning: FineTuningConfig) -> tuple[dict[str, float], int]:
    """Return the mean rewards of the reference answers and their number. A remote job may be able to score what this machine cannot."""
    if not tuning.grpo.rewards or _describe_remote_training():
        return {}, 0
    mapping = tuning.objective_spec.get_mapping(curated.kind, "the sources contain")
    interval = math.ceil(curated.verdicts.count_splits()["train"] / rewards.MAX_SCORED_REFERENCES) or 1
    contents = itertools.islice(curated.iterate_contents("train", ["meta"]), 0, None, interval)
    rows = [row for content in contents for row in mapping.expand(content) if row["reference"]]
    return rewards.score_references(tuning.grpo.rewards, rows)


def _check_tool_rows(curated: CurationResult, metrics: Sequence[str]) -> None:
    """Check the rows that tool_calls tasks with these metrics will evaluate. Raises InputError for an invalid row."""
    conversation_rows.check_rows_kind(curated.kind, "the sources contain")
    located = (
        (f"{row['file']}:{row['line']}", conversation_rows.extract_conversation(curated.kind, row) or [], row["tools"])
        for row in curated.iterate_contents("test", ["file", "line"])
    )
    tool_rows.check_rows(located, checks_schemas="valid_calls" in metrics)


def _check_quantization_rows(curated: CurationResult, config: Customization) -> None:
    """Check that packaging can measure a quantized model. Raises InputError for too few test rows."""
    if config.triton_packaging.quantization == "none" or config.fine_tuning.objective_spec.scores_answers:
        return  # a reward model is not packaged
    if (rows := curated.verdicts.count_splits()["test"]) < MIN_QUANTIZATION_ITEMS:
        raise InputError(
            f"the test split has {rows} rows; triton_packaging.quantization requires at least {MIN_QUANTIZATION_ITEMS}",
            hint="Increase the number of rows or the test fraction, or set triton_packaging.quantization to none.",
        )


def _count_tokens(
    curated: CurationResult, config: Customization, outline: ModelOutline, shape: ModelShape, reporter: Reporter
) -> tuple[CompletedRecipe, TokenCounts, dict[str, int]]:
    """Return the completed recipe, the token counts of the training rows, and the number of examples of each source.

    At most MAX_SAMPLED_ROWS rows, evenly spread, are tokenized.
    """
    tuning, count, rows = config.fine_tuning, 0, []
    rows_by_source: Counter[str] = Counter()
    mapping = tuning.objective_spec.get_mapping(curated.kind, "the sources contain")
    interval = math.ceil(curated.verdicts.count_splits()["train"] / MAX_SAMPLED_ROWS) or 1
    for content in curated.iterate_contents("train"):
        for row in mapping.expand(content):
            if count % interval == 0:
                rows.append({**row, "source": content["source"]})
            rows_by_source[content["source"]] += 1
            count += 1
    for recipe in tuning.recipes.values():
        if rows_by_source and recipe.mixing.is_active:
            mixing.check_settings(recipe.mixing, rows_by_source)
    measured = measure_lengths(rows, tuning, outline.tokenizer) if tuning.max_length is None else []
    completed = complete_recipe(tuning, measured, outline.config, shape, _find_device(tuning))
    sample = RowCounts()
    examples = encode_rows(
        rows,
        tuning.objective_spec,
        outline.tokenizer,
        max_length=completed.recipe.max_length,
        counts=sample,
        reporter=reporter,
        total=len(rows),
    )
    encoded = [(example["source"], example["length"]) for example in examples]
    tokens = TokenCounts(count, sample, [length for _, length in encoded], [source for source, _ in encoded])
    sampled, found = Counter(str(row["source"]) for row in rows), Counter(tokens.sources)
    # A source without a sampled row is estimated to have one example per row.
    examples_by_source = {
        source: round(total * found[source] / sampled[source]) if sampled[source] else total
        for source, total in rows_by_source.items()
        if found[source] or not sampled[source]
    }
    return completed, tokens, examples_by_source


def _list_tuned_models(config: Customization, outline: ModelOutline) -> list[Manifest]:
    """Return the manifests of the base model and of the initial adapter, if tuneline made them."""
    models, sources = list[Manifest](), [config.fine_tuning.initial_adapter]
    if outline.base is None:  # an adapter that a run merges into its base model
        sources.append(config.fine_tuning.base_model)
    elif (outline.base.path / artifact_folder.MANIFEST_FILENAME).exists():
        models.append(artifact_folder.read_manifest(outline.base.path))
    tuned = [model_loading.find_tuned_model(source) for source in sources if source]
    return models + [artifact.manifest for artifact in tuned if artifact]


def _check_services(config: Customization, workdir: Workdir, inputs: CurationInputs, reporter: Reporter) -> None:
    """Send a request to each service that the run needs later.

    Raises:
        ConfigurationError: an API key is not set.
        EngineMissingError: a judge does not answer, or rejects the request.
        DataVersioningError: the remote of the dataset's revisions is not accessible.
    """
    reporter.step("checking the judges and the data remote")
    if config.data_curation.quality_scores.judge.is_enabled:
        LanguageModelJudge.open(config.data_curation.quality_scores.judge, None)
    rewards.check_services(config.fine_tuning.grpo.rewards)
    task_preflight.check_endpoints(config.evaluation.tasks)
    has_stored = [artifact_store.has_artifact(workdir.store, sha256) for _, sha256 in inputs.earlier_revisions]
    check_remote(config.data_versioning, workdir=workdir.root, is_read=not all(has_stored))


def _find_device(config: FineTuningConfig) -> acceleration.TrainingDevice:
    return acceleration.describe_training_device(
        config, remote=bool(_describe_remote_training()), other_parameters=other_models.count_parameters(config)
    )


def _find_cached_stages(
    config: Customization,
    workdir: Workdir,
    inputs: CurationInputs,
    outline: ModelOutline,
    repository: Path,
    workloads: Sequence[TaskWorkload],
    initial_sha256: str | None,
) -> dict[str, str]:
    """Return the digests of the stage results in the store, found by the cache keys of the steps."""
    cached: dict[str, str] = {}
    if outline.base is None:
        return cached
    incumbent = find_champion(config.model_registry.name)
    plans = build_plans(
        config,
        inputs,
        outline.base.sha256,
        lambda key: select_incumbent(incumbent, key),
        get_unproven_reason(config),
        workloads,
        initial_sha256,
    )

    def find_result(stage: str, parameters: Json) -> str:
        sha256 = artifact_store.find_by_key(
            workdir.store, stage, pipeline_step.compute_cache_key(stage, parameters), use=False
        )
        if sha256 is not None:
            cached[stage] = sha256
        return sha256 or ""

    if dataset := find_result("data_curation", drop_placement(plans.data_curation)):
        versions = list_versions(config.data_versioning, workdir=repository)
        revisions = [v.uri.rpartition("@")[2] for v in versions if v.content_sha256 == dataset]
        tuning = {"plan": drop_placement(plans.fine_tuning), "dataset": dataset, "revision": (revisions or [""])[-1]}
        model = find_result("fine_tuning", tuning) if revisions else ""
        evaluating = {"plan": plans.evaluation, "model": model, "dataset": dataset}
        if model and (evaluated := find_result("evaluation", evaluating)):
            entry = find_quantization(config.triton_packaging.quantization)
            packaging = {"plan": plans.triton_packaging, "model": model}
            find_result(
                "triton_packaging", {**packaging, "evaluation": evaluated if entry and entry.is_calibrated else ""}
            )
    return cached


def _list_warnings(survey: RunSurvey, memory: Json, disk: dict[str, int]) -> list[str]:
    """Return the reasons for which the run would fail, be rejected, or produce less than expected."""
    tuning, warnings = survey.recipe, []
    for recipe in [] if _describe_remote_training() else survey.recipes:
        try:
            acceleration.check_machine(recipe.recipe)
            lengths = recipe.tokens.lengths
            if recipe.mixing.is_active and lengths:
                lengths = mixing.select_trained(recipe.mixing, recipe.tokens.sources, lengths)
            longest = recipe.recipe.max_length if recipe.recipe.packing else max(lengths, default=1)
            check_memory(recipe.recipe, longest, recipe.shape, _find_device(recipe.recipe))
        except TunelineError as error:
            warnings.append(f"{error.message}. {error.hint}")
    warnings = list(dict.fromkeys(warnings))
    try:
        check_splits(survey.curated, survey.config.data_curation)
    except InputError as error:
        warnings.append(f"{error.message}. {error.hint}")
    if survey.config.data_curation.quality_scores.is_enabled:
        warnings.append(
            "a dry run does not score rows. The thresholds of data_curation.quality_scores may reject more rows."
        )
    if reason := get_unproven_reason(survey.config):
        warnings.append(format_unproven_warning(reason))
    if database_warning := mounts.format_database_warning(os.environ.get("MLFLOW_TRACKING_URI", "")):
        warnings.append(database_warning)
    objections = policy_preflight.list_objections(survey.config, survey.outline.base, survey.task_checks)
    warnings += [policy_preflight.format_warning(objection) for objection in objections]
    for task in survey.config.evaluation.tasks:
        row_kind = TASK_KINDS[task.kind].row_kind
        if row_kind not in ("", survey.curated.kind) and "data" not in task.list_file_paths():
            warnings.append(
                f"task {task.name} requires {row_kind} rows, but the sources contain {survey.curated.kind} rows. "
                "Set the task's data to a file."
            )
    if survey.tokens.counts.rows and not survey.tokens.lengths:
        warnings.append(
            f"no training row has an answer within {tuning.max_length} tokens. Raise fine_tuning.max_length."
        )
    warnings += describe_sources_without_rows(survey.sources, survey.curated.prepared)[:MAX_NAMED_SOURCES]
    warnings += survey.trained_rows
    warnings += rewards.describe_references(*survey.reference_rewards)
    warnings += _list_limits(survey)
    if warning := describe_exceeded_context(tuning, survey.outline.config):
        warnings.append(warning)
    return warnings + _list_shortages(survey.workdir, memory, disk)


def _list_limits(survey: RunSurvey) -> list[str]:
    """Return a warning for each setting that keeps rows or tokens from the training, or leaves few items to decide."""
    tokens, warnings = survey.tokens, []
    for recipe in survey.recipes:
        if warning := training.describe_unseen_rows(recipe.epoch_rows, recipe.rows_seen, recipe.recipe):
            warnings.append(warning)
        if recipe.mixing.is_active:
            warnings += mixing.describe_ignored_settings(recipe.mixing, survey.examples_by_source)
            warnings += mixing.describe_shares(recipe.shares, recipe.batched_rows)
    if tokens.counts.truncated:
        warnings.append(
            f"{tokens.counts.truncated / tokens.counts.rows:.1%} of the training rows are truncated at "
            f"{survey.recipe.max_length} tokens, which cuts off {tokens.counts.cut_share:.1%} of all tokens. "
            "Raise fine_tuning.max_length to train on complete rows"
        )
    if left_out := round(tokens.counts.without_answer * tokens.rows_per_sampled_row):
        warnings.append(
            f"training skips {format_count(left_out, 'row')} without an answer within {survey.recipe.max_length} tokens"
        )
    rows, limit = survey.curated.verdicts.count_splits()["test"], survey.config.evaluation.max_items
    items = min(rows, limit) if limit else rows
    on_test_rows = ("held_out", "reward")
    if any(task.kind in on_test_rows and not task.list_file_paths() for task in survey.config.evaluation.tasks):
        if few := describe_few_test_rows(items, is_limited=items < rows):
            warnings.append(few)
        names = [task.name for task in survey.config.evaluation.tasks if task.kind in on_test_rows]
        required = promotion_gate.compute_min_items_by_task(
            survey.config.evaluation, has_incumbent=find_champion(survey.config.model_registry.name) is not None
        )
        minimum = max(required.get(name, 0) for name in names)
        if 0 < items < minimum:
            warnings.append(
                f"the gate will refuse the model: {format_count(items, 'held-out item')}; the rules of evaluation.gate require at least {minimum}"
                + _suggest_test_fraction(survey, items, minimum)
            )
    has_incumbent = find_champion(survey.config.model_registry.name) is not None
    warnings += suite_cost.list_shortages(survey.config.evaluation, survey.suite_tasks, has_incumbent)
    return list(dict.fromkeys(warnings))


def _suggest_test_fraction(survey: RunSurvey, items: int, minimum: int) -> str:
    """Return a sentence with fractions that give the required items; empty if they leave too few rows for training."""
    if items < survey.curated.verdicts.count_splits()["test"]:
        return ""  # evaluation.max_items limits the items
    fractions = survey.config.data_curation.fractions
    needed = fractions.test * minimum / items
    test = math.ceil(needed * 20 + 0.5) / 20  # half a step more, because groups of similar rows are not divided
    train = round(1 - fractions.validation - test, 4)
    if test > MAX_TEST_FRACTION or train < MIN_TRAIN_FRACTION:
        return ""
    suggestion = f"{{train: {train:g}, validation: {fractions.validation:g}, test: {test:g}}}"
    return f". Set data_curation.fractions to {suggestion}"


def _list_shortages(workdir: Workdir, memory: Json, disk: dict[str, int]) -> list[str]:
    name, warnings = memory["largest_stage"], []
    largest, free = memory["stages"][name], memory["free"]
    if largest > free:
        lower = "Lower fine_tuning.micro_batch_size or max_length."
        action = lower if name == "fine_tuning" else "Use a larger machine."
        warnings.append(f"{name} requires about {_format_gb(largest)} of memory; {_format_gb(free)} are free. {action}")
    if disk["total"] > disk["free"]:
        needed, available = _format_gb(disk["total"]), _format_gb(disk["free"])
        warnings.append(f"the run requires about {needed} of disk in {workdir.root}; {available} are free")
    return warnings


def _describe_basis(survey: RunSurvey, times: dict[str, StageTime]) -> dict[str, str]:
    """Return the origin of each figure."""
    tokens, max_length = survey.tokens, survey.recipe.max_length
    rows = "every source is read and cleaned; rows with the same words are rejected, and other near-duplicates are not detected"
    if survey.missing_revisions:
        rows += f"; not compared with {', '.join(survey.missing_revisions)}, which a run fetches first"
    sample = f"all {tokens.rows:,} training rows"
    if tokens.is_sample:
        sample = f"{tokens.counts.rows:,} evenly spread rows of {tokens.rows:,}"
    steps = []
    for recipe in survey.recipes:
        tuning = recipe.recipe
        per_step = f"{tuning.rows_per_step}{' packed rows' if tuning.packing else ''} per step"
        rows_read = f"{recipe.epoch_rows:,} rows"
        if not tuning.packing and recipe.batched_rows != recipe.epoch_rows:  # long rows of plain text are divided
            rows_read += f" ({recipe.batched_rows:,} examples)"
        epochs = f"{tuning.epochs:g} {'epoch' if tuning.epochs == 1 else 'epochs'} of {rows_read}, {per_step}"
        steps.append("fine_tuning.max_steps" if tuning.max_steps else epochs)
    start = machine_speed.START_SECONDS
    return {
        "rows": rows,
        "tokens": f"{sample}, with the base model's tokenizer and chat template, truncated at {max_length} tokens",
        "steps": stage_times.combine_bases(steps),
        "memory": "formulas of components/common/models/resource_formulas.py; "
        "measured peaks of training runs were within 16% of these estimates",
        "disk": "raw bytes for the dataset; 4 bytes per parameter for weights and 8 for the optimizer's state",
        **{
            f"seconds.{stage}": item.basis if item.seconds is None else f"{start[stage]:.0f} s to start; {item.basis}"
            for stage, item in times.items()
        },
        **(
            {"seconds.triton_packaging": "a reward model is not packaged"}
            if survey.recipe.objective_spec.scores_answers
            else {}
        ),
        "seconds.other_steps": "time to start the command and run its other steps, measured on two cores of an AMD EPYC",
    }


def _estimate_memory(survey: RunSurvey) -> Json:
    """Return the peak bytes of the stages that load the model; `training` has the parts of the largest recipe."""
    import torch

    config, shape, gpu = survey.config, survey.largest.shape, torch.cuda.is_available()
    free = int(torch.cuda.mem_get_info()[0]) if gpu else int(psutil.virtual_memory().available)
    trainings = []
    for recipe in survey.recipes:
        tuning, lengths = recipe.recipe, recipe.tokens.lengths
        length = tuning.max_length if tuning.packing else max(lengths, default=tuning.max_length)
        length = math.ceil(length / (2 if tuning.objective_spec.is_paired else 1))  # of one sequence of a pair
        for checkpointing in (False, True):
            parts = acceleration.estimate_memory_parts(
                tuning,
                recipe.shape,
                rows=tuning.micro_batch_size,
                length=length,
                gpu=gpu,
                checkpointing=checkpointing or tuning.activation_checkpointing == "on",
            )
            if others := other_models.count_parameters(tuning):
                parts["other models"] = others * (
                    resource_formulas.BFLOAT16_BYTES if gpu else resource_formulas.FLOAT32_BYTES
                )
                parts["total"] += parts["other models"]
            is_short = parts["total"] > resource_formulas.MAX_MEMORY_FRACTION * free
            if tuning.activation_checkpointing != "auto" or not is_short:
                break
        trainings.append(parts)
    batch_tokens = config.evaluation.batch_tokens
    proven = get_unproven_reason(config) is None
    peaks = {
        "fine_tuning": survey.sum_concurrent(parts["total"] for parts in trainings),
        "evaluation": resource_formulas.estimate_evaluation_memory(shape, batch_tokens=batch_tokens, gpu=gpu),
        "triton_packaging": resource_formulas.estimate_packaging_memory(shape, proven=proven),
    }
    if tokens := stage_times.count_calibration_tokens(survey):
        for stage in ("evaluation", "triton_packaging"):  # the package reuses the weights if it finds them
            peaks[stage] = max(peaks[stage], resource_formulas.estimate_calibration_memory(shape, tokens=tokens))
    if survey.recipe.objective_spec.scores_answers:  # a reward model is not packaged
        del peaks["triton_packaging"]
    local = peaks.keys() - ({"fine_tuning"} if _describe_remote_training() else set())
    return {
        "training": max(trainings, key=lambda parts: parts["total"]),
        "stages": peaks,
        "largest_stage": max(sorted(local), key=lambda name: peaks[name]),
        "free": free,
        "device": "gpu" if gpu else "cpu",
    }


def _describe_remote_training() -> str:
    """Describe where the training runs; "" for this machine. Elsewhere memory and speed differ."""
    launcher = launcher_settings.load_settings()
    nodes = format_count(launcher.nodes, "node")
    return "" if launcher.entry.uses_this_machine else f"{launcher.kind}, {nodes}"


def _estimate_disk(survey: RunSurvey) -> dict[str, int]:
    """Return the bytes that a run adds to the workdir, and the free bytes."""
    import torch

    config, checkpoints, sizes = survey.config, [], []
    for recipe in survey.recipes:
        tuning = recipe.recipe
        interval = training.plan_steps(recipe.batched_rows, tuning).checkpoint_interval
        kept = min(math.ceil(recipe.steps / interval), tuning.max_checkpoints)
        checkpoints.append(resource_formulas.estimate_checkpoint_bytes(recipe.shape, full=recipe.is_full) * kept)
        sizes.append(resource_formulas.estimate_model_bytes(recipe.shape, whole=recipe.is_full or tuning.merge))
    # MLflow has a copy of a small model; a sweep stores every recipe's model
    copies = 2 if max(sizes) <= config.model_registry.copy_limit_mb * 10**6 else 1
    model = copies * max(sizes) + (sum(sizes) if config.fine_tuning.sweep.vary else 0)
    dataset = 2 * sum(source.bytes for source in survey.sources)  # in the store and in the data repository's remote
    repository = resource_formulas.estimate_repository_bytes(
        survey.largest.shape, gpu=torch.cuda.is_available(), quantization=config.triton_packaging.quantization
    )
    parts = {
        "checkpoints": ("fine_tuning", survey.sum_concurrent(checkpoints)),
        "dataset": ("data_curation", dataset),
        "model": ("fine_tuning", model),
        "repository": ("triton_packaging", repository),
    }
    sizes_by_part = {name: 0 if stage in survey.cached else size for name, (stage, size) in parts.items()}
    free = shutil.disk_usage(filesystem.find_nearest_existing_path(survey.workdir.root)).free
    return {**sizes_by_part, "total": sum(sizes_by_part.values()), "free": free}


def _sum_known(seconds: dict[str, float | None]) -> float:
    return round(sum(value for value in seconds.values() if value is not None), 1)


def _format_gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


def format_estimate(result: Json) -> list[str]:
    """Return the estimate as lines of text."""
    rows, tokens, memory, disk, basis = (result[name] for name in ("rows", "tokens", "memory", "disk", "basis"))
    rejected = ", ".join(f"{n} {reason}" for reason, n in rows["rejected"].items()) or "none"
    formats = ", ".join(f"{n} {name}" for name, n in rows["formats"].items())
    splits = ", ".join(f"{n} {name}" for name, n in rows["splits"].items())
    parts, parameters = memory["training"], result["parameters"]
    purposes_text = ", ".join(
        f"{name} {_format_gb(size)}" for name, size in parts.items() if name not in ("process", "total")
    )
    largest = memory["largest_stage"]
    return [
        "dry run: nothing was written",
        f"rows      {rows['kept']} of {rows['in']} kept; rejected: {rejected}; quarantined: {rows['quarantined']}; "
        f"row formats: {formats}",
        f"          {splits} (upper bounds: a dry run finds only near-duplicates with the same words)",
        *(
            f"          first row rejected as {reason}: {place}"
            for reason, place in result["dropped"]["first_rejected"].items()
        ),
        *(f"          quarantined: {record}" for record in result["dropped"]["first_unreadable"]),
        f"tokens    {tokens['mean']:g} per row, at most {tokens['longest']}; {tokens['cut_share']:.1%} of the rows are "
        f"truncated ({basis['tokens']})",
        f"training  {format_count(result['steps'], 'step')} ({basis['steps']}), {tokens['trained']:,} tokens, "
        f"{parameters['trainable']:,} of {parameters['all']:,} parameters",
        *(f"          {choice}" for choice in result["recipe"]),
        *_format_shares(result["sources"]),
        *_format_reference_rewards(result["reference_rewards"]),
        f"memory    {_format_gb(parts['total'])} for training: {purposes_text}",
        f"          {_format_gb(memory['stages'][largest])} for the largest stage, {largest}; "
        f"{_format_gb(memory['free'])} free",
        f"disk      {_format_gb(disk['total'])}, of which checkpoints "
        f"{_format_gb(disk['checkpoints'])}; {_format_gb(disk['free'])} free",
        *_format_times(result),
        *suite_cost.format_suite(result["suite"]),
        *(f"warning: {warning}" for warning in result["warnings"]),
    ]


def _format_reference_rewards(rewarded: Json) -> list[str]:
    means = ", ".join(f"{name} {mean:.2f}" for name, mean in rewarded["means"].items())
    return (
        [f"rewards   {means} on average for the reference answers of {format_count(rewarded['rows'], 'row')}"]
        if means
        else []
    )


def _format_shares(shares: Sequence[Json]) -> list[str]:
    """Return a line for each of the largest sources."""
    largest = sorted(shares, key=lambda share: -share["tokens"])[:MAX_SHOWN_SOURCES]
    lines = [
        f"{share['source']}: {format_count(share['examples'], 'example')}, {'' if share['examples'] == 1 else 'each '}"
        f"seen {share['repetitions']:.2f} times on average, {share['tokens']:,} tokens ({share['token_share']:.1%})"
        for share in largest
    ]
    if rest := len(shares) - len(largest):
        lines.append(f"--json lists {format_count(rest, 'more source')}")
    return [f"          {line}" for line in lines]


def _format_duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" + (f" ({seconds / 3600:.1f} hours)" if seconds >= 3600 else "")


def _format_times(result: Json) -> list[str]:
    cached = {stage["name"] for stage in result["stages"] if stage["cached"]}
    lines, unknown = [], []
    seconds = {stage: value for stage, value in result["seconds"].items() if stage != "total"}
    for stage, value in seconds.items():
        basis = result["basis"].get(f"seconds.{stage}", "")
        text = f"{value:,.0f} s ({basis})" if value is not None else basis
        lines.append(f"{stage:<18}{'cached' if stage in cached else text}")
        if value is None:
            unknown.append(f"{stage} ({basis})")
    if unknown:
        lines.append(
            f"about {_format_duration(_sum_known(seconds))} for the other stages; unknown: {'; '.join(unknown)}"
        )
    else:
        lines.append(f"about {_format_duration(result['seconds']['total'])} in total")
    return [f"{'' if i else 'time':<10}{line}" for i, line in enumerate(lines)]
