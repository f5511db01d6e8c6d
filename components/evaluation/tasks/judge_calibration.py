"""Calibration of a judge: its agreement with people on labelled pairs of answers, and its bias by position and length.

A gate rule on a judge's verdicts is only as good as these verdicts, so it requires a calibration with enough agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from components.common import significance
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import UNANSWERED_FIGURE
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.item_encoding import Message

if TYPE_CHECKING:
    import numpy as np

Judgement = Literal["first", "second", "tie", "error", "unanswered"]
MISSING_JUDGEMENTS = ("error", "unanswered")
LABELS = ("a", "b", "tie")
# Even a judge that agrees with all of 30 labels may disagree with people on a tenth of all pairs (95% confidence).
MIN_PAIRS = 30
CONFIDENCE = 0.95  # one-sided, of the bound that the gate compares
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class LabelledPair:
    """Two answers to one request, and the one that people prefer: "a", "b" or "tie"."""

    messages: list[Message]
    answers: tuple[str, str]
    label: str


def read_pairs(path: str, prompt_field: str) -> list[LabelledPair]:
    """Return the labelled pairs of a file of rows {prompt or messages, answers: [A, B], label: a, b or tie}.

    Raises:
        ConfigurationError: The file does not exist or has an unknown format.
        InputError: A row is invalid or repeats a pair, the file has too few rows, or no row has the label "a" or "b".
    """
    pairs: list[LabelledPair] = []
    locations: dict[str, str] = {}
    for record in record_files.read_records(path, "calibration"):
        answers, label = record.get_texts("answers"), str(record.row.get("label", "")).strip().lower()
        if len(answers) != 2 or answers[0].strip() == answers[1].strip():
            raise record.build_error(f"has {answers!r:.60} in answers; expected two different strings")
        if label not in LABELS:
            raise record.build_error(f"has {record.row.get('label')!r:.60} in label; expected a, b or tie")
        messages = item_encoding.read_messages(record, prompt_field)
        # Repeated pairs would be counted as independent evidence.
        key = repr([" ".join(text.split()) for text in (repr(messages), *sorted(map(str.strip, answers)))])
        if key in locations:
            raise record.build_error(f"repeats the pair at {locations[key]}; expected each pair once")
        locations[key] = record.location
        pairs.append(LabelledPair(messages, (answers[0].strip(), answers[1].strip()), label))
    if len(pairs) < MIN_PAIRS:
        raise InputError(
            f"calibration: {path} has {format_count(len(pairs), 'labelled pair')}; expected at least {MIN_PAIRS}",
            hint="Label more pairs of answers, or remove the key calibration if no gate rule uses this judge.",
        )
    if missing := [label for label in LABELS[:2] if label not in {pair.label for pair in pairs}]:
        raise InputError(
            f"calibration: no pair of {path} has the label {missing[0]}; expected pairs with the labels a and b",
            hint="Swap the two answers, and the label, in about half of the pairs.",
        )
    return pairs


def decide(judgements: Sequence[Judgement]) -> str:
    """Return the verdict of two judgements: "a", "b", "tie", or "error" if one is missing.

    Args:
        judgements: Judgements with answer A first and with answer B first.
    """
    if set(MISSING_JUDGEMENTS) & set(judgements):
        return "error"
    return {("first", "second"): "a", ("second", "first"): "b"}.get((judgements[0], judgements[1]), "tie")


def measure(pairs: Sequence[LabelledPair], judgements: Sequence[Sequence[Judgement]], seed: int) -> dict[str, float]:
    """Return agreement and biases of a judge. A missing verdict is a disagreement.

    Args:
        pairs: The labelled pairs.
        judgements: Judgements of each pair, with answer A first and with answer B first.
        seed: Seed of the bootstrap.

    Returns:
        - `pairs`, `errors`, `unanswered`: number of pairs, of missing judgements, and of those that may be repeated.
        - `accuracy`, `accuracy_low`, `accuracy_high`: share of verdicts that equal the label, with the exact 95%
          interval (Clopper and Pearson).
        - `kappa`, `kappa_low`, `kappa_high`, `kappa_bound`: Cohen's kappa (Educational and Psychological Measurement
          20, 1960), the bootstrapped 95% interval, and the one-sided 95% lower bound. With full
          agreement, the lower bounds follow from those of the accuracy.
        - `order_flips`: share of pairs for which the order of the answers changes the judgement.
        - `prefers_first`: share of the answers shown first among the preferred; 0.5 without a bias.
        - `prefers_longer`, `labels_prefer_longer`: share of the longer answer among the preferred, of judge and labels.
    """
    verdicts = [decide(judgement) for judgement in judgements]
    agrees = [float(verdict == pair.label) for verdict, pair in zip(verdicts, pairs, strict=True)]
    low, high = significance.compute_clopper_pearson_bounds(agrees, 0.975)
    flat = [judgement for pair in judgements for judgement in pair]
    complete = [tuple(pair) for pair in judgements if not set(MISSING_JUDGEMENTS) & set(pair)]
    consistent = {("first", "second"), ("second", "first"), ("tie", "tie")}
    preferences = [judgement for pair in complete for judgement in pair if judgement != "tie"]
    longer = [_find_longer(pair) for pair in pairs]
    return {
        "pairs": float(len(pairs)),
        "errors": float(sum(judgement in MISSING_JUDGEMENTS for judgement in flat)),
        UNANSWERED_FIGURE: float(flat.count("unanswered")),
        "accuracy": sum(agrees) / len(agrees),
        "accuracy_low": low,
        "accuracy_high": high,
        **_measure_kappa(verdicts, [pair.label for pair in pairs], seed),
        "order_flips": _compute_share([pair not in consistent for pair in complete]),
        "prefers_first": _compute_share([judgement == "first" for judgement in preferences], empty=0.5),
        "prefers_longer": _compute_share(_compare_choices(verdicts, longer), empty=0.5),
        "labels_prefer_longer": _compute_share(_compare_choices([pair.label for pair in pairs], longer), empty=0.5),
    }


def _measure_kappa(verdicts: Sequence[str], labels: Sequence[str], seed: int) -> dict[str, float]:
    import numpy as np

    categories = (*LABELS, "error")
    table = np.zeros((len(categories), len(categories)))
    for verdict, label in zip(verdicts, labels, strict=True):
        table[categories.index(verdict), categories.index(label)] += 1
    # Resampling the pairs resamples the cells of the table.
    shares = (table / table.sum()).ravel()
    counts = np.random.default_rng(seed).multinomial(len(labels), shares, BOOTSTRAP_SAMPLES)
    resampled = compute_kappa(counts.reshape(-1, *table.shape).astype(float))
    low, bound, high = np.quantile(resampled, [0.025, 1 - CONFIDENCE, 0.975])
    kappa = compute_kappa(table[None])[0]
    if kappa == 1.0:
        # No resample disagrees. The exact bounds of the accuracy show what the number of pairs proves.
        agrees, chance = [1.0] * len(labels), float((shares**2).sum())
        exact = [significance.compute_clopper_pearson_bounds(agrees, one)[0] for one in (0.975, CONFIDENCE)]
        low, bound = (min(a, (b - chance) / (1 - chance)) for a, b in zip((low, bound), exact, strict=True))
    values = {"kappa": kappa, "kappa_low": low, "kappa_high": high, "kappa_bound": bound}
    return {name: float(value) for name, value in values.items()}


def compute_kappa(tables: np.ndarray) -> np.ndarray:
    """Return Cohen's kappa of tables of counts (tables, verdicts, labels); 0 if chance alone gives full agreement."""
    import numpy as np

    shares = tables / tables.sum((1, 2), keepdims=True)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(1) * shares.sum(2)).sum(1)
    # Rounding errors of shares near 1 would otherwise be amplified.
    defined = expected < 1 - 1e-12
    kappa: np.ndarray = np.where(defined, (observed - expected) / np.where(defined, 1 - expected, 1.0), 0.0)
    return kappa


def _find_longer(pair: LabelledPair) -> str:
    """Return the label of the longer answer; "" if both have the same number of characters."""
    first, second = map(len, pair.answers)
    return "" if first == second else "a" if first > second else "b"


def _compare_choices(choices: Sequence[str], longer: Sequence[str]) -> list[bool]:
    return [choice == other for choice, other in zip(choices, longer, strict=True) if other and choice in LABELS[:2]]


def _compute_share(flags: Sequence[bool], empty: float = 0.0) -> float:
    return sum(flags) / len(flags) if flags else empty


def find_problem(figures: Mapping[str, float], min_kappa: float) -> str:
    """Return why a judge with these figures cannot carry a gate rule, as a clause; "" if it can."""
    if figures["kappa_bound"] > min_kappa:
        return ""
    return (
        f"the judge's agreement with {figures['pairs']:.0f} labelled pairs is too low: Cohen's kappa is {figures['kappa']:.2f}, "
        f"with {figures['kappa_bound']:.2f} as its lower bound at {CONFIDENCE:.0%} confidence; the task requires a "
        f"bound above {min_kappa:.2f} (min_kappa)"
    )
