"""Statement of what an evaluation measured: part of evaluation.json, so that the evaluation's identity covers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.models.model_loading import LoadableModel
from components.evaluation import engine_loading
from components.evaluation.config import EvaluationConfig
from components.evaluation.task_results import TaskResult
from components.evaluation.tasks import file_digests
from components.evaluation.tasks.held_out import HeldOut

SPLIT_FILES = ("train.parquet", "validation.parquet", "test.parquet")


def describe_subject(
    candidate: LoadableModel,
    incumbent: LoadableModel | None,
    dataset: Artifact,
    config: EvaluationConfig,
    results: Mapping[str, TaskResult],
    seed: int,
) -> dict[str, Any]:
    """Return digests and settings, without paths, which differ between machines.

    Returns:
        A JSON object with these keys:

        - `model`: {content_sha256, kind, inputs}. Only a reward model has a `kind`. `inputs` are the [kind,
          content_sha256] pairs of the model's own manifest.
        - `base_model`, `incumbent`: content digests; `incumbent` is None without an incumbent.
        - `dataset`: {content_sha256, splits, near_duplicate_threshold}. `splits` are the digests of the files of the
          splits. The threshold is that of the curation, which the dataset's digest does not cover; None if the dataset
          states none. A revision of the dataset is a commit with this content; the commit's digest depends on the time
          and the data repository.
        - `evaluation_sets`: sorted digests of the files that the tasks read.
        - `tasks`: {task: kind}.
        - `task_files`: {task: sorted digests of the files that the task reads}.
        - `held_out`: {task: {max_items, left_out}} for the tasks on the test split. `left_out` is the number of test rows,
          of the first `max_items`, that have no answer within the maximum length.
        - `engine`: the engine of the candidate.
        - `calibration`: what determined the candidate's weights; only for calibrated weights, added by the stage.
        - `settings`: the settings of the gate and of the measurement, and the seed; `quantization` only for quantized weights.
    """
    trained = candidate.artifact.manifest if candidate.artifact else None
    names = {
        "quantization",
        "min_items",
        "max_items",
        "max_length",
        "batch_tokens",
        "bootstrap_samples",
        "repetition",
        "gate",
    }
    settings = config.model_dump(mode="json", include=names)
    return {
        "model": {
            "content_sha256": candidate.sha256,
            **({"kind": REWARD_MODEL} if candidate.is_reward_model else {}),
            "inputs": sorted([one.kind, one.content_sha256] for one in (trained.inputs if trained else [])),
        },
        "base_model": candidate.base.sha256,
        "incumbent": incumbent.sha256 if incumbent else None,
        "dataset": {
            "content_sha256": dataset.sha256,
            "splits": {file.path: file.sha256 for file in dataset.manifest.files if file.path in SPLIT_FILES},
            "near_duplicate_threshold": dataset.manifest.config.get("near_duplicate_threshold"),
        },
        "evaluation_sets": sorted(file_digests.digest_task_files(config.tasks).values()),
        "tasks": {task.name: task.kind for task in config.tasks},
        "task_files": {task.name: sorted(file_digests.digest_task_files([task]).values()) for task in config.tasks},
        "held_out": {
            task.name: _describe_coverage(task, dataset, len(results[task.name].items))
            for task in config.tasks
            if isinstance(task, HeldOut)
        },
        "engine": engine_loading.resolve_engine(config.requested_engine, candidate),
        "settings": {**settings, "seed": seed},
    }


def _describe_coverage(task: HeldOut, dataset: Artifact, items: int) -> dict[str, Any]:
    from pyarrow import parquet

    rows = parquet.read_metadata(dataset.path / "test.parquet").num_rows
    return {"max_items": task.max_items, "left_out": min(rows, task.max_items or rows) - items}
