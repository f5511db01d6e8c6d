"""Comparison of a test split with the rows that a tuned base model was trained on before.

A promotion refuses an evaluation on such rows (`model_registry.training_rows`). The comparison before the training reports
them while the configuration can still be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.models import training_lineage
from components.common.models.model_loading import LocalBaseModel
from components.common.row_comparison import training_overlap
from components.common.row_comparison.training_overlap import MAX_OVERLAPS, ComparedRow
from components.common.runtime.errors import TEMPORARY_ERRORS

# Of each dataset of the lineage: about 30 s. A promotion compares all rows.
MAX_TRAINED_ROWS = 100_000


def describe_trained_test_rows(
    dataset: Artifact, base: LocalBaseModel, initial_adapter: Artifact | None = None
) -> list[str]:
    """Return a warning for each earlier training dataset that has rows of the dataset's test split.

    Args:
        dataset: the dataset of the training.
        base: the base model.
        initial_adapter: the adapter that the training continues.
    """
    is_artifact = (base.path / artifact_folder.MANIFEST_FILENAME).exists()
    models = [artifact_folder.read_manifest(base.path)] if is_artifact else []
    models += [initial_adapter.manifest] if initial_adapter else []
    rows = training_overlap.read_rows(dataset.path / "test.parquet")
    return describe_trained_rows(rows, models, dataset.manifest.config.get("near_duplicate_threshold"))


def describe_trained_rows(test_rows: Iterable[ComparedRow], models: list[Manifest], threshold: object) -> list[str]:
    """Return a warning for each training dataset of the models with rows similar to test rows, or that is not available.

    Args:
        test_rows: the rows of the test split; not read if the models have no training datasets.
        models: the manifests of the tuned base model and of the initial adapter.
        threshold: `near_duplicate_threshold` of the dataset's curation.
    """
    try:
        lineage = training_lineage.collect_datasets(models)
    except TEMPORARY_ERRORS as error:
        return [f"the test rows were not compared with the training rows of the base model: {error.message}"]
    rows = list(test_rows) if lineage.datasets else []
    warnings = [f"a promotion will be refused: {clause}" for clause in lineage.missing]
    for sha256, trained in lineage.datasets.items():
        path = trained.path / "train.parquet"
        overlaps = training_overlap.find_overlaps(
            rows, partial(_read_first_rows, path), training_overlap.parse_threshold(threshold)
        )
        if overlaps:
            first = max(overlaps, key=lambda overlap: overlap.rank)
            count = f"at least {len(overlaps)}" if len(overlaps) == MAX_OVERLAPS else str(len(overlaps))
            warnings.append(
                f"a promotion will be refused: the base model was trained on {count} of the {len(rows):,} test rows. Row "
                f"{first.evaluated_id} is similar to row {first.trained_id} of the training split of dataset "
                f"{sha256[:12]}. Use sources without these rows, or tune a base model that was not trained on them"
            )
    return warnings


def _read_first_rows(path: Path) -> Iterator[ComparedRow]:
    return islice(training_overlap.read_rows(path), MAX_TRAINED_ROWS)
