"""Seconds of the stages of a planned run, from the speed of earlier runs or of the model on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Manifest
from components.common.cost import stage_cost
from components.common.models import model_loading, resource_formulas
from components.common.models.compute_devices import select_device
from components.common.models.quantizations import CALIBRATION_ROWS, MAX_CALIBRATION_TOKENS, find_quantization
from components.common.runtime.errors import TunelineError
from components.fine_tuning import other_models
from components.fine_tuning import training_plan as training
from components.triton_packaging.golden_requests import PROTOCOLS
from pipelines.planning import machine_speed
from pipelines.planning.machine_speed import ModelSpeed
from pipelines.steps.input_resolution import get_unproven_reason

if TYPE_CHECKING:
    from components.evaluation.tasks.config import TaskSettings
    from components.fine_tuning.config import Recipe
    from pipelines.planning.dry_run import RunSurvey

DAFT_START_SECONDS = 5.0  # the engine's child process starts and compares some thousand rows
GOLDEN_PROMPT_TOKENS = 40  # of a golden prompt in a chat template
# Settings of evaluation tasks that limit an answer, in tokens.
ANSWER_LIMITS = ("max_new_tokens", "generation_tokens", "judge_tokens", "tokens")
PROOF_CLIENTS = (1, 8)  # concurrent requests in the proof of a package


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage's work without its start (None: unknown), and the basis of the estimate."""

    seconds: float | None
    basis: str


def estimate_times(survey: RunSurvey, stages: Sequence[str], remote: str) -> dict[str, StageTime]:
    """Return the work of each stage that is not cached.

    Args:
        survey: the inputs of the estimate.
        stages: the names of the stages, in order.
        remote: description of the launcher that trains on other machines; "" for this machine.
    """
    history = _list_history(survey)
    reading, curation = f"measured reading time {survey.reading_seconds:.1f} s", survey.reading_seconds
    if survey.config.data_curation.near_duplicate_threshold < 1:
        curation += DAFT_START_SECONDS
        reading += f", plus {DAFT_START_SECONDS:.0f} s to start Daft"
    times = {"data_curation": StageTime(curation, reading)}
    is_packaged = not survey.recipe.objective_spec.scores_answers  # a reward model is not packaged
    if {"evaluation", "triton_packaging"} - survey.cached.keys():
        speed = measure_speed(survey, is_remote=bool(remote))
        if remote:
            times["fine_tuning"] = StageTime(None, f"the launcher ({remote}) trains at an unknown speed")
        else:
            trainings = [_estimate_training(recipe, history, speed) for recipe in survey.recipes]
            # the recipes of a sweep share this machine: concurrent or not, they take the same time together
            times["fine_tuning"] = StageTime(
                sum(seconds for seconds, _ in trainings), combine_bases([basis for _, basis in trainings])
            )
        work = "the candidate and the base read every item of the tasks and write answers of maximum length"
        seconds = _estimate_evaluation(survey, speed)
        if tokens := count_calibration_tokens(survey):
            length = survey.tokens.mean_length
            flops = resource_formulas.estimate_calibration_flops(survey.shape, tokens=tokens, length=length)
            seconds += flops / speed.forward
            work += f", and llm-compressor calibrates weights on {tokens} tokens"
        times["evaluation"] = StageTime(seconds, _describe_speed(work, speed))
        if is_packaged:
            times["triton_packaging"] = _estimate_packaging(survey, history, speed)
    return {stage: times[stage] for stage in stages if stage in times and stage not in survey.cached}


def combine_bases(bases: Sequence[str]) -> str:
    """Return the basis of a sum over recipes."""
    combined = "; ".join(dict.fromkeys(bases))
    return combined if len(bases) == 1 else f"{len(bases)} recipes together: {combined}"


def _list_history(survey: RunSurvey) -> list[Manifest]:
    """Return the manifests of the artifacts of this base model, newest first."""
    history, base = list[Manifest](), survey.outline.base
    manifests = survey.workdir.store.glob(f"*/{artifact_folder.MANIFEST_FILENAME}")
    for path in sorted(manifests, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(TunelineError):
            manifest = artifact_folder.read_manifest(path.parent)
            recorded = manifest.find_input("base_model")
            if base and recorded and recorded.content_sha256 == base.sha256:
                history.append(manifest)
    return history


def measure_speed(survey: RunSurvey, *, is_remote: bool) -> ModelSpeed:
    """Measure the speed of the model on this machine with a micro-batch of the training."""
    recipe = survey.recipe
    length, rows = survey.tokens.mean_length + recipe.max_answer_tokens, recipe.micro_batch_size
    if recipe.objective_spec.is_paired:
        length, rows = length / 2, 2 * rows
    rows *= max(recipe.answers_per_prompt, 1)
    return machine_speed.measure_speed(
        recipe, survey.outline.config, survey.shape, rows=rows, length=max(8, round(length)), remote=is_remote
    )


def _estimate_training(survey: RunSurvey, history: Sequence[Manifest], speed: ModelSpeed) -> tuple[float, str]:
    """Return seconds and their basis: the newest similar training on this machine, or passes of the models."""
    tuning, hardware = survey.recipe, model_loading.describe_arithmetic()
    recipe = tuning.model_dump()
    same = ("objective", "adaptation", "max_length", "micro_batch_size", "packing", "grpo", "distillation")
    for manifest in history:
        if (
            manifest.role == "model"
            and manifest.summary.get("arithmetic") == hardware
            and all(manifest.config.get(name) == recipe.get(name) for name in same)
            and manifest.summary.get("tokens_per_second")
        ):
            rate, digest = float(manifest.summary["tokens_per_second"]), manifest.content_sha256[:12]
            basis = f"{rate:.1f} tokens/s, as in the newest similar training run on this hardware, {digest}"
            return survey.trained_tokens / rate, basis
    validations = _estimate_validation(survey, speed)
    passes = _estimate_passes(survey, survey.trained_tokens, speed, training=True)
    if not tuning.objective_spec.generates:
        return passes + validations, _describe_speed("training and validation", speed)
    answers = tuning.rows_per_step * tuning.answers_per_prompt
    generation = survey.steps * _estimate_decoding(survey, speed, answers)
    work = "generation, passes of all models and validation, with answers of maximum length"
    return passes + generation + validations, _describe_speed(work, speed)


def _estimate_passes(survey: RunSurvey, tokens: float, speed: ModelSpeed, *, training: bool) -> float:
    """Return the seconds in which all models process tokens once: the trained one, and its frozen companions."""
    tuning = survey.recipe
    length = _get_sequence_length(survey)
    forward = resource_formulas.estimate_forward_flops(survey.shape, length)
    flops = sum(resource_formulas.estimate_forward_flops(shape, length) for shape in other_models.list_shapes(tuning))
    flops += forward * _count_frozen_passes(tuning, training=training)
    trained = resource_formulas.estimate_training_flops(survey.shape, length) / speed.training if training else 0.0
    return tokens * (trained + flops / speed.forward)


def _count_frozen_passes(tuning: Recipe, *, training: bool) -> int:
    """Return the forward passes without gradients of the trained model, and of its reference, for each token.

    TRL 1.16: the prompt of a rollout is read before its answer; grpo and rloo compute log-probabilities of the reference,
    and rloo those of the model that wrote the answers. Validation of rollouts generates and scores answers only;
    distillation also computes the loss. Other objectives compute the loss, and preference losses that of the reference.
    """
    objective = tuning.objective_spec
    if objective.has_rewards and objective.generates:
        return 1 + training * ((tuning.grpo.kl_weight > 0) + (tuning.objective == "rloo"))
    if objective.generates:
        return 1 + (not training)
    return (not training) + (objective.has_reference and not objective.scores_answers and not objective.is_causal)


def _get_sequence_length(survey: RunSurvey) -> float:
    """Return the mean number of tokens of a sequence; a pair has two."""
    length = survey.tokens.mean_length / (2 if survey.recipe.objective_spec.is_paired else 1)
    return length + survey.recipe.max_answer_tokens


def _estimate_validation(survey: RunSurvey, speed: ModelSpeed) -> float:
    """Return the seconds of all validations: one before the training, and one at each checkpoint."""
    tuning = survey.recipe
    rows = min(tuning.validation_rows, survey.curated.verdicts.count_splits()["validation"])
    if not rows:
        return 0.0
    validations = 1 + math.ceil(survey.steps / training.plan_steps(survey.batched_rows, tuning).checkpoint_interval)
    tokens = rows * (survey.tokens.mean_length + tuning.max_answer_tokens)
    seconds = _estimate_passes(survey, tokens, speed, training=False)
    if tuning.objective_spec.generates:
        batch = tuning.micro_batch_size * tuning.answers_per_prompt
        seconds += math.ceil(rows / batch) * _estimate_decoding(survey, speed, min(rows, batch))
    return validations * seconds


def _estimate_decoding(survey: RunSurvey, speed: ModelSpeed, answers: int) -> float:
    """Return the seconds in which the rollout engine generates answers of maximum length as one batch."""
    engine, is_cpu = survey.recipe.rollout_engine, select_device(survey.recipe.device) == "cpu"
    seconds = speed.estimate_decoding(answers, survey.recipe.max_answer_tokens)
    return seconds * (engine.cpu_time_factor if is_cpu else 1.0)


def _describe_speed(work: str, speed: ModelSpeed) -> str:
    rates = " and ".join(f"{rate / 1e9:.3g}" for rate in (speed.training, speed.forward))
    return f"{work}, at {rates} GFLOP/s for training and forward passes: {speed.basis}"


def _estimate_evaluation(survey: RunSurvey, speed: ModelSpeed) -> float:
    """Return the seconds in which candidate and base read the items of every task, and write the longest answers."""
    mean_length, seconds = survey.tokens.mean_length, 0.0
    flops = resource_formulas.estimate_forward_flops(survey.shape, mean_length)
    for task, read, written in list_evaluation_tokens(survey):
        seconds += read * flops / speed.forward
        if written:
            limit = next((value for name in ANSWER_LIMITS if (value := getattr(task, name, None))), written)
            answers = max(1.0, written / limit)
            batch = min(answers, max(1.0, survey.config.evaluation.batch_tokens / (mean_length + limit)))
            seconds += math.ceil(answers / batch) * speed.estimate_decoding(batch, limit)
    return 2 * seconds


def count_calibration_tokens(survey: RunSurvey) -> int:
    """Estimate the tokens on which quantized weights are calibrated; 0 without calibration."""
    entry = find_quantization(survey.config.evaluation.quantization)
    if entry is None or not entry.is_calibrated:
        return 0
    rows = min(CALIBRATION_ROWS, survey.curated.verdicts.count_splits()["train"])
    return round(rows * min(survey.tokens.mean_length, MAX_CALIBRATION_TOKENS))


def list_evaluation_tokens(survey: RunSurvey) -> list[tuple[TaskSettings, float, float]]:
    """Return each task with the tokens that a model reads for it, and those that it generates at most."""
    workloads = {load.settings.name: load for load in (*survey.task_checks, *survey.suite_tasks)}
    mean_length, counted = survey.tokens.mean_length, []
    for task in survey.config.evaluation.tasks:
        workload = workloads.get(task.name)
        items = survey.curated.verdicts.count_splits()["test"]
        items = min(items, task.max_items) if task.max_items else items
        if workload and workload.items is not None:  # the task's own items; otherwise rows of the planned dataset
            counted.append((task, float(workload.input_tokens), float(workload.output_tokens)))
        else:
            counted.append((task, *task.estimate_tokens(items, mean_length)))
    return counted


def _estimate_packaging(survey: RunSurvey, history: Sequence[Manifest], speed: ModelSpeed) -> StageTime:
    """Return the time of the newest similar package, or that of its proof and of the comparison of quantized weights."""
    config, store = survey.config.triton_packaging, survey.workdir.store
    for manifest in history:
        if (
            manifest.kind == "repository"
            and manifest.config.get("quantization", "none") == config.quantization
            and (cost := stage_cost.read_cost(store, manifest.content_sha256))
        ):
            return StageTime(cost["seconds"], "time of the newest package of this base model in this store")
    flops = resource_formulas.estimate_forward_flops(survey.shape, survey.tokens.mean_length)
    pass_seconds = survey.tokens.mean_length * flops / speed.forward
    seconds = machine_speed.WRITE_PACKAGE_SECONDS
    if config.quantization != "none":
        items = min(config.quantization_items, survey.curated.verdicts.count_splits()["test"])
        seconds += 2 * items * pass_seconds
    if config.prove and get_unproven_reason(survey.config) is None:
        answers, tokens = len(config.golden_prompts), config.golden_max_tokens
        prompt = GOLDEN_PROMPT_TOKENS * flops / speed.forward
        seconds += machine_speed.START_TRITON_SECONDS + answers * (prompt + speed.estimate_decoding(1, tokens))
        requests = answers * len(PROTOCOLS[config.backend])
        for clients in PROOF_CLIENTS:
            seconds += requests * prompt + requests / clients * speed.estimate_decoding(clients, tokens)
    return StageTime(seconds, _describe_speed("writing, loading, and answers to the golden prompts", speed))
