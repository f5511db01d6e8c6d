"""Side-by-side comparison of runs: parameters, data, training, metrics, gate and answers. Read-only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

from components.common.gate_rules import describe_outcome
from components.common.regression_suite import TASKS as SUITE_TASKS
from components.common.runtime.errors import UsageError
from components.common.workspace.artifact_store import Workdir
from pipelines.runs.compared_run import ComparedRun, load_run
from pipelines.runs.run_folder import Run, find_run

Json = dict[str, Any]
AnswerKey = tuple[str, str, str]  # task, id of the item, prompt
CONFIDENCE = 0.95
DEFAULT_ANSWERS = 6
TRAINING_FIGURES = ("steps", "tokens", "train_loss", "validation_loss", "tokens_per_second")
# What two evaluations may have measured differently, and the effect on their comparison.
SUBJECT_EFFECTS = {
    "test splits": "the held-out scores cover different rows",
    "base models": "differences from the base have different references",
    "incumbents": "their verdicts have different references",
    "gate rules": "their verdicts cannot be compared",
    "engines": "scores may differ by rounding",
}
SCORES = ("candidate", "base", "incumbent", "ci95", "n")


def find_runs(workdir: Workdir, names: Sequence[str]) -> list[Run]:
    """Return the runs to compare, in the order of their names.

    Args:
        workdir: the workdir in which names are looked up.
        names: names, prefixes, `latest`, or folders, as in `run_folder.find_run`.

    Raises:
        UsageError: a run does not exist, is named twice, or is the only run.
    """
    hint = "Specify two or more runs; `tuneline status` lists the runs of a workdir."
    runs = [find_run(workdir, name) for name in names]
    if len(runs) < 2:
        raise UsageError(f"a comparison requires two runs; found {' '.join(names) or 'none'}", hint=hint)
    seen: dict[object, str] = {}
    for name, run in zip(names, runs, strict=True):
        folder = run.folder.resolve()
        if folder in seen:
            raise UsageError(f"{seen[folder]} and {name} are the same run, {run.name}", hint=hint)
        seen[folder] = name
    return runs


def compare_runs(
    runs: Sequence[Run], *, include_equal: bool = False, answers: int = DEFAULT_ANSWERS, seed: int = 42
) -> Json:
    """Compare runs; the first one is the reference of differences and warnings.

    Args:
        runs: two or more runs in any state. Results of unfinished stages are None.
        include_equal: list parameters that are equal in all runs.
        answers: maximum number of prompts whose answers are listed.
        seed: seed of the sample of prompts.

    Returns:
        {"runs", "parameters", "metrics", "answers", "warnings"}; lists of values have the order of `runs`.

        - `runs`: [{"run", "folder", "state", "verdict", "model_name", "model_version", "seconds", "stages", "dataset",
          "model", "evaluation", "curve"}].
        - `parameters`: {key: [values]}. A key that a run lacks has the value None.
        - `metrics`: {task: {metric: [{"candidate", "base", "incumbent", "ci95", "n", "difference"} or None]}}. `ci95`
          is the interval of candidate − base. `difference` is {"value", "ci95"} of this run's candidate − the first
          run's candidate, by paired bootstrap over the items; None if the items differ.
        - `answers`: [{"task", "id", "prompt", "reference", "base", "answers": []}].
        - `warnings`: sentences that limit the comparison.

    Raises:
        ArtifactDamagedError: an artifact has changed since it was published.
    """
    loaded = [load_run(run) for run in runs]
    warnings = [warning for run in loaded for warning in run.gaps]
    warnings += [warning for run in loaded[1:] for warning in _list_obstacles(loaded[0], run)]
    return {
        "runs": [_describe_run(run) for run in loaded],
        "parameters": _compare_parameters(loaded, include_equal),
        "metrics": _compare_metrics(loaded),
        "answers": _sample_answers(loaded, answers, seed),
        "warnings": warnings,
    }


def _compare_parameters(runs: Sequence[ComparedRun], include_equal: bool) -> Json:
    keys = dict.fromkeys(key for run in runs for key in run.parameters)
    parameters = {key: [run.parameters.get(key) for run in runs] for key in keys}
    return {k: values for k, values in parameters.items() if include_equal or any(v != values[0] for v in values)}


def _compare_metrics(runs: Sequence[ComparedRun]) -> Json:
    metrics: Json = {}
    for run in runs:
        for task, by_metric in run.evaluation.get("metrics", {}).items():
            for metric in by_metric:
                row = [_describe_metric(one, task, metric, None if one is runs[0] else runs[0]) for one in runs]
                metrics.setdefault(task, {}).setdefault(metric, row)
    return metrics


def _describe_run(run: ComparedRun) -> Json:
    described: Json = {
        **{key: run.summary[key] for key in ("run", "state", "verdict", "model_name", "model_version", "seconds")},
        "folder": str(run.run.folder),
        "stages": run.stages,
        "dataset": None,
        "model": None,
        "evaluation": None,
        "curve": [
            {
                name: line[name]
                for name in ("step", "train_loss", "validation_loss")
                if math.isfinite(line.get(name, math.nan))
            }
            for line in run.curve  # the last loss of a training run that diverged is not finite
        ],
    }
    if dataset := run.artifacts.get("dataset"):
        described["dataset"] = {
            "sha256": dataset.sha256,
            "rows": dataset.manifest.summary["rows"],
            "splits": dataset.manifest.summary["splits"],
        }
    if model := run.artifacts.get("model"):
        figures = {name: model.manifest.summary.get(name) for name in TRAINING_FIGURES}
        described["model"] = {"sha256": model.sha256, **figures}
    if evaluation := run.artifacts.get("evaluation"):
        described["evaluation"] = {
            "sha256": evaluation.sha256,
            "verdict": run.evaluation["verdict"],
            "reasons": list(dict.fromkeys(run.evaluation["reasons"])),
            **{
                key: list(dict.fromkeys(r["reason"] for r in run.evaluation["rules"] if describe_outcome(r) == outcome))
                for key, outcome in (("failed", "failed"), ("not_applicable", "not applicable"))
            },
        }
    return described


def _describe_metric(run: ComparedRun, task: str, metric: str, first: ComparedRun | None) -> Json | None:
    values = run.evaluation.get("metrics", {}).get(task, {}).get(metric)
    if values is None:
        return None
    difference = _compare_candidates(first, run, task, metric) if first else None
    return {**{name: values[name] for name in SCORES}, "difference": difference}


def _compare_candidates(first: ComparedRun, run: ComparedRun, task: str, metric: str) -> Json | None:
    """Return the difference of two candidates' metrics on the same items, with its interval; None if they differ."""
    definition = run.evaluation.get("tasks", {}).get(task, {}).get("metrics", {}).get(metric)
    if definition is None or not _has_equal_items(first, run, task):
        return None
    scores, weights = zip(*(_read_scores(one.predictions.get(task, []), metric) for one in (run, first)), strict=True)
    # A tokenizer of another base model gives other weights, and losses per token that cannot be compared.
    if len(scores[0]) < 2 or weights[0] != weights[1] or not all(math.isfinite(v) for one in scores for v in one):
        return None
    from components.common import significance

    settings = run.evaluation["measured"]["settings"]
    gain = significance.estimate_gain(
        scores[0],
        scores[1],
        weights[0],
        samples=settings["bootstrap_samples"],
        seed=settings["seed"],
        exponential=definition["exponential"],
    ).compute_interval(CONFIDENCE)
    return {"value": gain.value, "ci95": [gain.low, gain.high]}


def _read_scores(rows: Sequence[Json], metric: str) -> tuple[list[float], list[float]]:
    """Return the candidate's score and weight of each item; a score that is not a finite number is NaN."""
    scores = [json.loads(row["candidate_scores"]).get(metric) for row in rows]
    weights = [json.loads(row["weights"]).get(metric, 1.0) for row in rows]
    return [math.nan if score is None else float(score) for score in scores], weights


def _has_equal_items(first: ComparedRun, run: ComparedRun, task: str) -> bool:
    digests = [one.evaluation.get("tasks", {}).get(task, {}).get("items_sha256") for one in (first, run)]
    return None not in digests and digests[0] == digests[1]


def _list_obstacles(first: ComparedRun, run: ComparedRun) -> list[str]:
    """Return a sentence for each difference that limits the comparison of two evaluations."""
    names = f"{run.run.name} and {first.run.name}"
    if not (first.evaluation and run.evaluation):
        missing = [one.run.name for one in (first, run) if not one.evaluation]
        return [f"{' and '.join(missing)}: no evaluation, so the metrics of {names} cannot be compared."]
    before, after = (one.evaluation.get("measured") for one in (first, run))
    if not (before and after):
        return [f"{names}: an evaluation from an earlier release does not record what it measured."]
    differing = _list_differing_subjects(before, after)
    found = [
        f"{names} have different {subject}; {effect}."
        for subject, effect in SUBJECT_EFFECTS.items()
        if subject in differing
    ]
    keys = [key for key in differing if key not in SUBJECT_EFFECTS]
    if keys:
        found.append(f"{names} have different evaluation settings: {', '.join(keys)}.")
    tasks = dict.fromkeys([*first.evaluation["metrics"], *run.evaluation["metrics"]])
    if other := [task for task in tasks if not _has_equal_items(first, run, task)]:
        found.append(f"{names} have different items in {', '.join(other)}; no difference is computed for these tasks.")
    return found


def _list_differing_subjects(before: Json, after: Json) -> list[str]:
    """Return the keys of SUBJECT_EFFECTS and of the settings whose values differ between two evaluations."""
    subjects: list[Json] = []
    for measured in (before, after):
        settings = dict(measured["settings"])
        settings.pop("repetition", None)
        rules = [settings.pop(key, None) for key in ("gate", "min_items")]
        values = [
            measured["dataset"]["splits"].get("test.parquet"),
            measured["base_model"],
            measured["incumbent"],
            rules,
        ]
        subjects.append({**dict(zip(SUBJECT_EFFECTS, [*values, measured["engine"]], strict=True)), **settings})
    return [key for key in {**subjects[0], **subjects[1]} if subjects[0].get(key) != subjects[1].get(key)]


def _sample_answers(runs: Sequence[ComparedRun], count: int, seed: int) -> list[Json]:
    """Return the candidates' answers to a sample of the prompts that all evaluated runs have answered.

    Prompts of the regression suite complete the sample if the run's own tasks have too few.
    """
    evaluated = [run for run in runs if run.evaluation]
    if len(evaluated) < 2:
        return []
    answered = {run.run: _index_answers(run) for run in evaluated}
    first = answered[evaluated[0].run]
    shared = sorted(set.intersection(*(set(rows) for rows in answered.values())), reverse=True)
    unique = {prompt: (task, item, prompt) for task, item, prompt in shared}  # tasks may share prompts
    generator = random.Random(seed)  # noqa: S311 - a sample for display
    chosen: list[AnswerKey] = []
    for is_suite in (False, True):
        keys = sorted(key for key in unique.values() if (key[0] in SUITE_TASKS) == is_suite)
        chosen += sorted(generator.sample(keys, min(count - len(chosen), len(keys))))
    has_one_base = len({run.evaluation.get("measured", {}).get("base_model") for run in evaluated}) == 1
    return [
        {
            "task": key[0],
            "id": key[1],
            "prompt": key[2],
            "reference": first[key]["reference"],
            "base": first[key]["base_answer"] if has_one_base else None,
            "answers": [answered[run.run][key]["candidate_answer"] if run.run in answered else None for run in runs],
        }
        for key in chosen
    ]


def _index_answers(run: ComparedRun) -> dict[AnswerKey, Json]:
    rows = [row for task_rows in run.predictions.values() for row in task_rows]
    return {(row["task"], row["id"], row["prompt"]): row for row in rows if row["candidate_answer"] is not None}
