"""Check of captured prompts for drift: windows are tested in chronological order, and the alarm combines the tests.

The result is computed from the captured files each time; equal files and seed give an equal result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from components.common.models.text_embeddings import TextEmbedder
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from pipelines.drift import alarm, captured_prompts, window_test
from pipelines.drift.captured_prompts import Prompt
from pipelines.drift.window_test import COMBINED, WindowTest

MIN_REFERENCE_WINDOWS = 2
MIN_REFERENCE_PROMPTS = 100
MAX_REFERENCE_PROMPTS = 5_000  # of a larger reference, a sample
MIN_CALIBRATION_WINDOWS = 4  # fewer windows give a poor estimate of the inflation


@dataclass(frozen=True)
class Reference:
    """The prompts that later prompts are compared with.

    Attributes:
        name: description for the user.
        texts: the prompts; those of the clean windows.
        windows: clean windows of captured prompts, in chronological order; empty for a dataset.
        unit: what the texts are, for errors.
    """

    name: str
    texts: Sequence[str]
    windows: Sequence[Sequence[Prompt]] = ()
    unit: str = "prompts"

    @staticmethod
    def from_windows(name: str, windows: Sequence[Sequence[Prompt]]) -> Reference:
        """Return the reference of clean windows of captured prompts."""
        texts = [prompt.text for window in windows for prompt in window]
        return Reference(name, texts, windows, "prompts in complete windows")


@dataclass
class DriftCheck:
    """Result of a check.

    Attributes:
        reference: name of the reference.
        clean_windows: number of its windows.
        windows: the objects of the JSON result.
        inflation: see `window_test.estimate_inflation`.
        embeddings: of the reference and all windows (prompts x width), the reference first.
        reference_size: number of prompts of the reference that were used.
        limitations: sentences about what the result does not cover.
    """

    reference: str
    clean_windows: int
    windows: list[dict[str, Any]]
    inflation: float
    embeddings: np.ndarray
    reference_size: int
    limitations: list[str] = field(default_factory=list)

    @property
    def alarm_window(self) -> int | None:
        """The number of the first window, from 1, at which the e-value reached the threshold."""
        reached = (number for number, each in enumerate(self.windows, 1) if each["e_value"] >= alarm.THRESHOLD)
        return next(reached, None)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON result that the check determines."""
        return {
            "alarm": self.alarm_window is not None,
            "alarm_window": self.alarm_window,
            "threshold": alarm.THRESHOLD,
            "reference": {"name": self.reference, "prompts": self.reference_size, "windows": self.clean_windows},
            "inflation": self.inflation,
            "windows": self.windows,
            "report": None,
        }


def check_drift(
    reference: Reference,
    windows: Sequence[Sequence[Prompt]],
    embed: TextEmbedder,
    seed: int,
    dataset: Sequence[str] = (),
) -> DriftCheck:
    """Test each window against the reference and all earlier windows.

    Args:
        reference: accepted prompts.
        windows: the windows in chronological order.
        embed: returns the embeddings of texts.
        seed: seed of the permutations and samples.
        dataset: prompts of a dataset that each window is compared with beside the reference, without effect on the alarm.

    Raises:
        InputError: the reference has too few prompts, or no window is complete.
    """
    _check_sizes(reference, windows)
    chosen = _sample_indices(len(reference.texts), seed)
    inflation = 1.0
    if reference.windows:
        embedded = window_test.reduce_width(embed(reference.texts))
        inflation = window_test.estimate_inflation(_test_reference_windows(reference.windows, embedded, seed))
        known = embedded[chosen]
    else:
        known = window_test.reduce_width(embed([reference.texts[number] for number in chosen]))
    sampled_dataset = [dataset[number] for number in _sample_indices(len(dataset), seed)]
    dataset_embeddings = window_test.reduce_width(embed(sampled_dataset)) if dataset else None
    results: list[dict[str, Any]] = []
    p_values: list[float] = []
    before = [prompt for window in reference.windows for prompt in window]
    for number, window in enumerate(windows):
        embedded = window_test.reduce_width(embed([prompt.text for prompt in window]))
        known = np.concatenate([known, embedded])
        generator = np.random.default_rng([seed, number])
        test = window_test.compare_window(known, len(window), generator, inflation)
        p_values.append(test.p_values[COMBINED])
        tests = _as_json(test)
        if dataset_embeddings is not None:
            both = np.concatenate([dataset_embeddings, embedded])
            tests |= _as_json(window_test.compare_window(both, len(window), generator), "dataset_")
        results.append(
            {
                "from": _format_time(window[0]),
                "to": _format_time(window[-1]),
                "n": len(window),
                "e_value": alarm.compute_e_process(p_values)[-1],
                "tests": tests,
                "versions": sorted({prompt.version for prompt in window}),
                "languages": captured_prompts.count_languages(window),
                "panels": captured_prompts.compute_panels(window, before) if before else {},
            }
        )
    versions = sorted({version for each in results for version in each["versions"]})
    limitations = _list_limitations(reference, len(dataset), versions)
    return DriftCheck(reference.name, len(reference.windows), results, inflation, known, len(chosen), limitations)


def _check_sizes(reference: Reference, windows: Sequence[Sequence[Prompt]]) -> None:
    required = MIN_REFERENCE_PROMPTS
    if windows:
        required = max(required, MIN_REFERENCE_WINDOWS * len(windows[0]))
    if len(reference.texts) < required:
        raise InputError(
            f"the reference {reference.name} has {len(reference.texts)} {reference.unit}; expected at least {required:,}",
            hint="Choose more days with --reference-days, or smaller windows with --window.",
        )
    if not windows:
        raise InputError(
            "no window after the reference is complete",
            hint="Wait for more captured prompts, or choose smaller windows with --window.",
        )


def _list_limitations(reference: Reference, dataset_size: int, versions: Sequence[str]) -> list[str]:
    limitations = []
    if not reference.windows:
        limitations.append(
            "a dataset has no days and no answers, so lengths, languages, refusals and ratings are not compared"
        )
    elif len(reference.windows) < MIN_CALIBRATION_WINDOWS:
        limitations.append(
            f"the reference has {format_count(len(reference.windows), 'window')}; "
            f"with fewer than {MIN_CALIBRATION_WINDOWS}, "
            "similar prompts within a window may raise a false alarm"
        )
    for name, size in (("reference", len(reference.texts)), ("dataset", dataset_size)):
        if size > MAX_REFERENCE_PROMPTS:
            limitations.append(f"the {name} is a sample of {MAX_REFERENCE_PROMPTS:,} of {size:,} prompts")
    if len(versions) > 1:
        limitations.append(
            f"several versions answered ({', '.join(versions)}): refusals, truncated answers and ratings may differ for that reason"
        )
    return limitations


def _sample_indices(count: int, seed: int) -> np.ndarray:
    """Return the indices of the reference or dataset prompts that are used, in a random order."""
    order: np.ndarray = np.random.default_rng(seed).permutation(count)[:MAX_REFERENCE_PROMPTS]
    return order


def _test_reference_windows(windows: Sequence[Sequence[Prompt]], embeddings: np.ndarray, seed: int) -> list[WindowTest]:
    """Test each clean window against the other clean windows. The embeddings begin with those of the windows."""
    if len(windows) < MIN_REFERENCE_WINDOWS:
        return []
    parts = np.split(embeddings, np.cumsum([len(window) for window in windows]))[: len(windows)]
    tests = []
    for number, part in enumerate(parts):
        others = np.concatenate([*parts[:number], *parts[number + 1 :], part])
        tests.append(window_test.compare_window(others, len(part), np.random.default_rng([seed, number, 1])))
    return tests


def _as_json(test: WindowTest, prefix: str = "") -> dict[str, dict[str, float]]:
    return {
        f"{prefix}{name}": {"statistic": statistic, "p": test.p_values[name]}
        for name, statistic in test.statistics.items()
    }


def _format_time(prompt: Prompt) -> str:
    return datetime.fromtimestamp(prompt.timestamp, UTC).isoformat()
