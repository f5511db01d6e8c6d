"""Evaluation stage: score candidate, base and incumbent on the same items, and apply the promotion gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.models import calibrated_weights, model_loading
from components.common.models.calibrated_weights import CalibratedWeights
from components.common.models.model_loading import LoadableModel
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.evaluation import (
    engine_loading,
    evaluation_result,
    evaluation_subject,
    promotion_gate,
    report,
    score_cache,
)
from components.evaluation.config import EvaluationConfig, check_task_kinds
from components.evaluation.task_interface import DEFAULT_MAX_LENGTH, UNANSWERED_FIGURE, Item, Scores, TaskContext
from components.evaluation.task_results import TaskResult
from components.evaluation.tasks import file_digests, task_registry
from components.evaluation.tasks.answer_checks import AnswerChecksTask
from components.evaluation.tasks.base_task import AnyTask

STAGE = "evaluation"
INCUMBENT_KIND_HINT = "Set model_registry.name to a separate name for reward models."
PAYLOAD_FILES = ("evaluation.json", "predictions.parquet")


def evaluate(
    candidate: LoadableModel,
    dataset: Artifact,
    output: Path,
    config: EvaluationConfig,
    *,
    incumbent: LoadableModel | None,
    seed: int,
    state: Path,
    reporter: Reporter,
    overwrite: bool = False,
) -> Artifact:
    """Score candidate, base and incumbent on the tasks, and publish scores and verdict in `output`.

    The verdict is `accepted` if every rule of the gate holds, `refused` otherwise, and `unchanged` if the candidate
    is the incumbent. Scores are cached in `state`/evaluation by model and task.

    Args:
        candidate: The model to evaluate, with its base.
        dataset: Artifact with the test split.
        output: Folder of the evaluation artifact.
        config: Tasks, engine and rules of the gate.
        incumbent: The model to compare with the candidate in addition to the base; None without an incumbent.
        seed: Seed of the computations, the sampled items and the bootstrap.
        state: Folder of the score cache.
        reporter: Receives the progress.
        overwrite: Whether to replace an artifact in `output`.

    Raises:
        ConfigurationError: A task is invalid, or a file of a task does not exist; or candidate, incumbent and tasks differ
            in whether they are of reward models; or the candidate cannot be quantized.
        EngineMissingError: The inference engine or the judge is not available.
        InputError: The rows of a task are invalid.
        OutputOccupiedError: `output` contains another artifact, or files that tuneline did not write.
    """
    check_task_kinds(config, is_reward_model=candidate.is_reward_model)
    _check_incumbent(candidate, incumbent)
    engine_loading.check_quantization(config, candidate)
    unchanged = incumbent is not None and incumbent.sha256 == candidate.sha256
    if unchanged:
        reporter.note("the candidate is identical to the incumbent")
    inputs = _list_inputs(candidate, incumbent, dataset, config)
    key = hashing.digest(
        {
            "stage": STAGE,
            "code": code_digest.code_sha256(STAGE),
            "inputs": [i.model_dump(exclude={"uri"}) for i in inputs],
            "config": config.model_dump(),
            "seed": seed,
            "arithmetic": model_loading.describe_arithmetic(),
        }
    )
    failed_before = artifact_folder.has_transient_failure(output, key)  # kept until the new result is ready
    if not failed_before and (finished := artifact_folder.claim_folder(output, key, overwrite=overwrite)):
        return finished
    calibrated = calibrated_weights.load_if_calibrated(
        config.quantization, candidate, dataset, state, seed=seed, reporter=reporter
    )
    scores = state / STAGE / "scores"
    results = _Measurement(candidate, incumbent, dataset, config, seed, scores, reporter, calibrated).run()
    reporter.step("applying the promotion gate")
    rule_results = promotion_gate.evaluate_rules(results, incumbent is not None, config, seed)
    content = evaluation_result.build_result(results, rule_results, config, seed, unchanged=unchanged)
    content["measured"] = evaluation_subject.describe_subject(candidate, incumbent, dataset, config, results, seed)
    if calibrated:
        content["measured"]["calibration"] = dict(calibrated.statement)
    if failed_before:
        artifact_folder.claim_folder(output, key)
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    (output / "evaluation.json").write_text(text, encoding="utf-8")
    stored = _select_stored(results)
    evaluation_result.write_predictions(output / "predictions.parquet", stored)
    page = report.render_page(content, stored, rule_results, inputs, config.quantization)
    (output / "report.html").write_text(page, encoding="utf-8")
    summary = {name: content[name] for name in ("verdict", "reasons", "metrics")}
    if _note_unanswered(results, reporter):  # a rerun of the evaluation replaces a result with unanswered questions
        summary[artifact_folder.TRANSIENT_FAILURE_KEY] = True
    return artifact_folder.publish(
        output,
        "evaluation",
        payload=PAYLOAD_FILES,
        inputs=inputs,
        config=config.model_dump(),
        seed=seed,
        key=key,
        summary=summary,
    )


def _check_incumbent(candidate: LoadableModel, incumbent: LoadableModel | None) -> None:
    """Check that both models are language models or reward models. Raises ConfigurationError."""
    if incumbent and incumbent.is_reward_model != candidate.is_reward_model:
        kinds = ["a reward model" if model.is_reward_model else "a language model" for model in (candidate, incumbent)]
        raise ConfigurationError(
            f"the candidate is {kinds[0]}, and the incumbent is {kinds[1]}", hint=INCUMBENT_KIND_HINT
        )


def _list_inputs(
    candidate: LoadableModel, incumbent: LoadableModel | None, dataset: Artifact, config: EvaluationConfig
) -> list[ArtifactInput]:
    """Return the inputs in the manifest: the models, the dataset, and the files of the tasks."""
    inputs = [candidate.as_input(), dataset.as_input(), candidate.base.as_input()]
    if incumbent:
        inputs.append(incumbent.as_input().model_copy(update={"kind": "incumbent"}))
    return inputs + [
        ArtifactInput(kind="evaluation_set", content_sha256=sha256, uri=path)
        for path, sha256 in file_digests.digest_task_files(config.tasks).items()
    ]


def _note_unanswered(results: Mapping[str, TaskResult], reporter: Reporter) -> bool:
    """Report the tasks whose endpoint did not answer all questions; return whether there is such a task."""
    has_unanswered = False
    for name, result in results.items():
        figures = [result.calibration, *(scores.figures for scores in result.scores.values())]
        if count := sum(values.get(UNANSWERED_FIGURE, 0) for values in figures):
            reporter.note(
                f"{name}: {format_count(round(count), 'question')} had no answer; rerun the evaluation when the endpoint responds"
            )
            has_unanswered = True
    return has_unanswered


def _stores_texts(result: TaskResult) -> bool:
    return bool(getattr(result.task.settings, "store_texts", True))


def _select_stored(results: Mapping[str, TaskResult]) -> dict[str, TaskResult]:
    """Return the results without the texts of tasks that must not store them, and of the checks of their answers."""
    private = {name for name, result in results.items() if not _stores_texts(result)}
    return {
        name: result.without_texts() if private & {name, *getattr(result.task.settings, "tasks", ())} else result
        for name, result in results.items()
    }


class _Measurement:
    """Measurement of all roles' scores on all tasks. Items are built once, with the candidate's tokenizer."""

    def __init__(
        self,
        candidate: LoadableModel,
        incumbent: LoadableModel | None,
        dataset: Artifact,
        config: EvaluationConfig,
        seed: int,
        cache: Path,
        reporter: Reporter,
        calibrated: CalibratedWeights | None = None,
    ) -> None:
        model_loading.prepare_torch(seed)
        self.calibrated = calibrated
        base = LoadableModel(candidate.base.sha256, candidate.base, candidate.base.path, None, None)
        self.roles = {"base": base, "candidate": candidate, **({"incumbent": incumbent} if incumbent else {})}
        # A repetition does not read the scores of other evaluations.
        self.cache = cache / f"repetition-{config.repetition}" if config.repetition else cache
        self.config, self.reporter = config, reporter
        # All models receive equal inputs, limited to the shortest context length.
        lengths = [length for model in self.roles.values() if (length := engine_loading.read_context_length(model))]
        self.input_limit = min(lengths, default=None)
        trained_length = candidate.artifact.manifest.config.get("max_length") if candidate.artifact else None
        requested = config.max_length or trained_length or DEFAULT_MAX_LENGTH
        max_length = min([requested, *lengths])
        if max_length < requested:
            reporter.note(f"rows are truncated at {max_length} tokens, the shortest context length of the models")
        tokenizer = model_loading.load_tokenizer(candidate.tokenizer)
        self.context = TaskContext(tokenizer, dataset, max_length, seed, reporter)

    def run(self) -> dict[str, TaskResult]:
        """Return the results by task name. All tasks of a model are scored before the next model is loaded."""
        tasks = [task_registry.build_task(settings) for settings in self.config.tasks]
        items_by_task: dict[str, Sequence[Item]] = {}
        for task in sorted(tasks, key=lambda task: isinstance(task, AnswerChecksTask)):  # these read the others' items
            self.reporter.step(f"reading the items of {task.name}")
            items_by_task[task.name] = task.items(replace(self.context, items_by_task=items_by_task))
        results = {}
        for task in tasks:
            files = list(file_digests.digest_task_files([task.settings]).values())
            digest = score_cache.digest_task(task, items_by_task[task.name], files)
            calibration = self._calibrate(task)
            results[task.name] = TaskResult(task, items_by_task[task.name], {}, {}, digest, calibration=calibration)
        queried = [result for result in results.values() if not isinstance(result.task, AnswerChecksTask)]
        self._score_roles(queried, "candidate", "base")
        if "incumbent" in self.roles:
            self._score_roles(queried, "incumbent")
        for result in results.values():
            if isinstance(result.task, AnswerChecksTask):
                for role in self.roles:
                    result.scores[role] = _check_answers(result.task, result.items, results, role)
        return results

    def _calibrate(self, task: AnyTask) -> dict[str, float]:
        """Return the calibration of a task, which depends on no evaluated model. A complete one is cached."""
        if (key := task.calibration_key) is None:
            return {}
        path = self.cache / f"{hashing.digest([key, code_digest.code_sha256(STAGE), self.context.seed])}.json"
        if cached := score_cache.load_scores(path):
            self.reporter.note(f"{task.name}: calibration reused from an earlier evaluation")
            return dict(cached.figures)
        self.reporter.step(f"calibration of {task.name}")
        calibration = task.measure_calibration(self.context)
        if not calibration.get(UNANSWERED_FIGURE):
            score_cache.save_scores(path, Scores({}, figures=calibration))
        return calibration

    def _score_roles(self, results: Sequence[TaskResult], tuned: str, base: str | None = None) -> None:
        """Score a model and its base on the same loaded weights; load no model if all scores are cached."""
        pending = {role: [r for r in results if self._is_pending(role, r)] for role in (tuned, base) if role}
        roles = [role for role in (base, tuned) if role and pending[role]]
        if not roles:
            return
        engines = engine_loading.open_engines(
            self.roles[tuned],
            self.roles[base] if base and base in roles else None,
            batch_tokens=self.config.batch_tokens,
            reporter=self.reporter,
            engine=self.config.requested_engine,
            quantization=self.config.quantization if tuned == "candidate" else "none",
            calibrated=self.calibrated.folder if self.calibrated and tuned == "candidate" else None,
            input_limit=self.input_limit,
        )
        for role in roles:
            _, engine = next(engines)
            for result in pending[role]:
                self.reporter.step(f"{result.task.name} of the {role}")
                base_scores = result.scores.get("base") if result.task.compares_with_base else None
                result.scores[role] = result.task.score(engine, result.items, self.context, base_scores)
                if _stores_texts(result):
                    score_cache.save_scores(self._build_cache_path(role, result), result.scores[role])
        engines.close()

    def _is_pending(self, role: str, result: TaskResult) -> bool:
        """Return whether a role must be scored: its scores are comparable and not cached."""
        if not model_loading.has_same_tokenization(self.roles[role].tokenizer, self.roles["candidate"].tokenizer):
            result.foreign_tokenizer_roles.add(role)
            if all(metric.per_token for metric in result.task.metrics.values()):
                note = f"{promotion_gate.TOKENIZER_MISMATCH}; losses per token are not comparable"
                self.reporter.note(f"{result.task.name}: {note}")
                result.missing_reasons[role] = promotion_gate.TOKENIZER_MISMATCH
                return False
        scores = score_cache.load_scores(self._build_cache_path(role, result))
        if scores:
            self.reporter.note(f"{result.task.name} of the {role}: scores reused from an earlier evaluation")
            result.scores[role] = scores
        return scores is None

    def _build_cache_path(self, role: str, result: TaskResult) -> Path:
        """Return the cache file of a role's scores on a task; its name is a digest of all inputs of the scores."""
        engine = engine_loading.resolve_engine(
            self.config.requested_engine, self.roles["candidate" if role == "base" else role]
        )
        key = [
            self.roles[role].sha256,
            result.digest,
            code_digest.code_sha256(STAGE),
            engine,
            self.config.batch_tokens,
            self.input_limit,
            model_loading.describe_arithmetic(),
        ]
        if result.task.compares_with_base:
            key.append(self.roles["base"].sha256)
        if role == "candidate" and self.config.quantization != "none":
            key.append(self.config.quantization)
            if self.calibrated:
                key.append(self.calibrated.statement["weights_sha256"])
        return self.cache / f"{hashing.digest(key)}.json"


def _check_answers(
    task: AnswerChecksTask, items: Sequence[Item], results: Mapping[str, TaskResult], role: str
) -> Scores:
    """Return the checks of a role's answers to other tasks."""
    answers = [answer or "" for name in task.settings.tasks for answer in results[name].scores[role].answers]
    ids = [f"{name}/{item.id}" for name in task.settings.tasks for item in results[name].items]
    return task.check_answers(items, dict(zip(ids, answers, strict=True)))
