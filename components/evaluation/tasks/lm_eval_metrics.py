"""Conversion of lm-eval's values per document to values and weights that reproduce lm-eval's score."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from components.common.runtime.errors import ConfigurationError
from components.evaluation.task_interface import Metric

LOWER_IS_BETTER = frozenset(
    {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter", "wer", "cer"}
)
EXPONENTIAL_METRICS = frozenset({"perplexity", "word_perplexity", "byte_perplexity"})
BINARY_METRICS = frozenset(
    {"acc", "acc_norm", "acc_bytes", "exact_match", "em", "prompt_level_strict_acc", "prompt_level_loose_acc"},
)
REL_TOLERANCE = 1e-9  # between the mean over documents and lm-eval's score


def resolve_metric(name: str, lower_is_better: Collection[str]) -> Metric:
    """Return the definition of a metric of lm-eval. `lower_is_better` extends LOWER_IS_BETTER."""
    return Metric(
        "lower" if name in LOWER_IS_BETTER or name in lower_is_better else "higher",
        is_binary=name in BINARY_METRICS,
        exponential=name in EXPONENTIAL_METRICS,
    )


def extract_document_values(metric: str, raw: Sequence[object]) -> tuple[list[float], list[float]]:
    """Return a metric's values and weights by document; no weights if the metric is the mean of the values.

    Args:
        metric: The metric's name in lm-eval.
        raw: Value of each document in lm-eval's log: a number, (log-likelihood, count) or a list of flags.

    Raises:
        ConfigurationError: The metric is only defined over all documents.
    """
    if metric == "perplexity":
        return [-float(value) for value in raw], []  # type: ignore[arg-type]
    if metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        scale = math.log(2) if metric == "bits_per_byte" else 1.0
        return [-float(value[0]) / scale for value in raw], [float(value[1]) for value in raw]  # type: ignore[index]
    if all(map(_is_number, raw)):
        return [float(value) for value in raw], []  # type: ignore[arg-type]
    if all(isinstance(value, list) and value and all(map(_is_number, value)) for value in raw):
        return [float(sum(value)) for value in raw], [float(len(value)) for value in raw]  # type: ignore[arg-type,call-overload]
    raise _build_metric_error(metric)


def _is_number(value: object) -> bool:
    is_numpy_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return isinstance(value, (int, float)) or is_numpy_scalar


def _build_metric_error(metric: str) -> ConfigurationError:
    return ConfigurationError(
        f"lm-eval computes {metric} over all documents at once; expected a metric with a value per document",
        hint="Choose another metric of the task.",
    )


def check_aggregate(metric: str, values: Sequence[float], weights: Sequence[float], score: float) -> None:
    """Raise ConfigurationError if the documents' values do not reproduce lm-eval's score."""
    own = math.fsum(values) / (math.fsum(weights) if weights else len(values))
    if metric in EXPONENTIAL_METRICS:
        try:
            own = math.exp(own)
        except OverflowError:  # the perplexity of a broken model
            own = math.inf
    both_nan = math.isnan(own) and math.isnan(score)
    if not both_nan and not math.isclose(own, score, rel_tol=REL_TOLERANCE, abs_tol=REL_TOLERANCE):
        raise _build_metric_error(metric)
