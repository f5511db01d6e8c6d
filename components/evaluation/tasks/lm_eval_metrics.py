"""What lm-eval keeps of every document, as values and weights that its score can be made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from components.common.errors import ConfigurationError
from components.evaluation.task import Metric
from components.evaluation.tasks.config import LMEval

LOWER = frozenset({"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter", "wer", "cer"})
EXPONENTIAL = frozenset({"perplexity", "word_perplexity", "byte_perplexity"})
RIGHT_OR_WRONG = frozenset(
    {"acc", "acc_norm", "acc_bytes", "exact_match", "em", "prompt_level_strict_acc", "prompt_level_loose_acc"},
)
SAME = 1e-9  # how far, relatively, our mean over documents may lie from lm-eval's score


def metric_of(metric: str, settings: LMEval) -> Metric:
    """What a metric of lm-eval means, told by its name and the settings."""
    lower = metric in LOWER or metric in settings.lower_is_better
    return Metric("lower" if lower else "higher", right_or_wrong=metric in RIGHT_OR_WRONG, exponential=metric in EXPONENTIAL)


def by_document(metric: str, raw: Sequence[Any]) -> tuple[list[float], list[float]]:
    """A metric's values and weights by document, from what lm-eval keeps of each; no weights where it is their mean.

    Raises ConfigurationError for what is neither a number, nor (log-likelihood, count), nor a list of right or wrong.
    """
    if metric == "perplexity":
        return [-float(one) for one in raw], []
    if metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        scale = math.log(2) if metric == "bits_per_byte" else 1.0
        return [-float(one[0]) / scale for one in raw], [float(one[1]) for one in raw]
    if all(isinstance(one, (bool, int, float)) or _is_number(one) for one in raw):
        return [float(one) for one in raw], []
    if all(isinstance(one, list) and one and all(isinstance(part, (bool, int, float)) for part in one) for one in raw):
        return [float(sum(one)) for one in raw], [float(len(one)) for one in raw]
    raise _no_values(metric)


def _is_number(value: Any) -> bool:
    """Whether a value is one of numpy's numbers."""
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def _no_values(metric: str) -> ConfigurationError:
    return ConfigurationError(
        f"lm-eval computes {metric} over all documents at once, so that it cannot be compared document by document",
        hint="Name another metric of the task.",
    )


def exp(value: float) -> float:
    """e to this power; infinite where that is beyond a float's range, as a broken model's perplexity may be."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def check_same(metric: str, values: Sequence[float], weights: Sequence[float], score: float) -> None:
    """Raise ConfigurationError where the documents' values do not make lm-eval's score."""
    mean = math.fsum(values) / (math.fsum(weights) if weights else len(values))
    ours = exp(mean) if metric in EXPONENTIAL else mean
    if not math.isclose(ours, score, rel_tol=SAME, abs_tol=SAME) and not (math.isnan(ours) and math.isnan(score)):
        raise _no_values(metric)
