"""Prompts of captured traffic with the facts that describe drift, and their division into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import groupby

import numpy as np

from components.common.language_identification import identify_language
from components.common.runtime.errors import UsageError
from components.evaluation.tasks.refusal import is_refusal
from pipelines.capture import row_selection
from pipelines.capture.row_selection import Feedback
from pipelines.capture.traffic_files import Row

MIN_WINDOW_PROMPTS = 50  # a smaller day or week joins the next one
MAX_WINDOW_PROMPTS = 2_000  # of a larger window, a sample is tested
MAX_WINDOWS = 400
PERIODS = ("day", "week")


@dataclass(frozen=True)
class Prompt:
    """A captured prompt.

    Attributes:
        id: id of its answer.
        timestamp: Unix time.
        text: last message of the user, or the prompt of a completion.
        version: version of the model that answered.
        state: state of the answer.
        is_cut: the answer reached its limit of tokens.
        is_refused: the answer begins with a refusal.
        rating: "up", "down" or None.
        language: ISO code, or "und".
    """

    id: str
    timestamp: int
    text: str
    version: str
    state: str
    is_cut: bool
    is_refused: bool
    rating: str | None
    language: str

    @property
    def day(self) -> date:
        """The day of the request (UTC)."""
        return datetime.fromtimestamp(self.timestamp, UTC).date()


def build_prompt(row: Row, feedback: Feedback) -> Prompt | None:
    """Return the prompt of a captured row; None for a row without text."""
    text = row_selection.get_prompt(row)
    if not text.strip():
        return None
    facts, answer_id = row["tuneline"], row["response"]["id"]
    return Prompt(
        answer_id,
        row["timestamp"],
        text,
        str(facts["version"]),
        facts["state"],
        any(choice.get("finish_reason") == "length" for choice in row["response"]["choices"]),
        is_refusal(row_selection.get_answer(row)),
        feedback.get(answer_id, {}).get("rating"),
        identify_language(text)[0],
    )


def parse_window(text: str) -> int | str:
    """Return the number of prompts of a window, "day" or "week".

    Raises:
        UsageError: the value is neither, or a smaller number than MIN_WINDOW_PROMPTS.
    """
    if text in PERIODS:
        return text
    if text.isdecimal() and MIN_WINDOW_PROMPTS <= int(text) <= MAX_WINDOW_PROMPTS:
        return int(text)
    allowed = f"{MIN_WINDOW_PROMPTS} to {MAX_WINDOW_PROMPTS} prompts, day or week"
    raise UsageError(f"--window is {text!r}; expected {allowed}", hint="Example: --window 200")


def split_windows(
    prompts: Sequence[Prompt], window: int | str, today: date, seed: int
) -> tuple[list[list[Prompt]], int]:
    """Return the complete windows in chronological order, and the number of prompts that are not in one yet.

    Args:
        prompts: prompts in chronological order.
        window: number of prompts, "day" or "week".
        today: the present day (UTC), whose day and week are not complete.
        seed: seed of the samples of large windows.

    Raises:
        UsageError: there are more than MAX_WINDOWS windows.
    """
    if isinstance(window, int):
        count = len(prompts) // window
        windows = [list(prompts[number * window : (number + 1) * window]) for number in range(count)]
    else:
        windows = _split_periods(prompts, window, today)
    if len(windows) > MAX_WINDOWS:
        raise UsageError(
            f"the captured traffic has {len(windows)} windows; expected at most {MAX_WINDOWS}",
            hint="Choose larger windows, such as --window day, or a later reference.",
        )
    pending = len(prompts) - sum(map(len, windows))
    return [_sample(each, MAX_WINDOW_PROMPTS, seed) for each in windows], pending


def _split_periods(prompts: Sequence[Prompt], period: str, today: date) -> list[list[Prompt]]:
    def get_period(day: date) -> tuple[int, ...]:
        return day.isocalendar()[:2] if period == "week" else (day.toordinal(),)

    windows: list[list[Prompt]] = []
    current: list[Prompt] = []
    for key, group in groupby(prompts, key=lambda prompt: get_period(prompt.day)):
        if key >= get_period(today):
            break
        current += group
        if len(current) >= MIN_WINDOW_PROMPTS:
            windows.append(current)
            current = []
    return windows


def _sample(prompts: list[Prompt], limit: int, seed: int) -> list[Prompt]:
    """Return at most `limit` prompts, in their order."""
    if len(prompts) <= limit:
        return prompts
    chosen = np.sort(np.random.default_rng(seed).choice(len(prompts), limit, replace=False))
    return [prompts[number] for number in chosen]


def compute_panels(window: Sequence[Prompt], reference: Sequence[Prompt]) -> dict[str, dict[str, object]]:
    """Return figures of a window beside those of the reference, with 95% intervals of their differences.

    Returns:
        By name of the figure: {"value", "reference", "difference", "ci95", "n"}. Shares, and the mean logarithm of the
        length in characters. A figure without prompts on one side, such as ratings without feedback, is left out.
    """
    languages = [prompt.language for prompt in reference]
    main = max(sorted(set(languages)), key=languages.count)
    flags = {
        "other_language": lambda prompt: prompt.language not in (main, "und"),
        "refused": lambda prompt: prompt.is_refused,
        "cut": lambda prompt: prompt.is_cut,
        "failed": lambda prompt: prompt.state == "failed",
        "aborted": lambda prompt: prompt.state == "aborted",
    }
    panels: dict[str, dict[str, object]] = {"log_characters": _compare_lengths(window, reference)}
    for name, has_flag in flags.items():
        panels[name] = _compare_shares(list(map(has_flag, window)), list(map(has_flag, reference)))
    before = [prompt.rating == "down" for prompt in reference if prompt.rating]
    for version in sorted({prompt.version for prompt in window}):
        rated = [prompt.rating == "down" for prompt in window if prompt.rating and prompt.version == version]
        if rated and before:
            panels[f"rated_down_version_{version}"] = _compare_shares(rated, before)
    return panels


def _compare_shares(values: Sequence[bool], reference: Sequence[bool]) -> dict[str, object]:
    """Compare two shares. The interval is Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10)."""
    share, low, high = _wilson_interval(values)
    before, before_low, before_high = _wilson_interval(reference)
    difference = share - before
    ci95 = [
        difference - ((share - low) ** 2 + (before_high - before) ** 2) ** 0.5,
        difference + ((high - share) ** 2 + (before - before_low) ** 2) ** 0.5,
    ]
    return {"value": share, "reference": before, "difference": difference, "ci95": ci95, "n": len(values)}


def _wilson_interval(values: Sequence[bool]) -> tuple[float, float, float]:
    """Return a share with its 95% score interval (Wilson, JASA 22, 1927)."""
    z, n = 1.959964, len(values)
    share = sum(values) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / (1 + z * z / n)
    return share, centre - half, centre + half


def _compare_lengths(window: Sequence[Prompt], reference: Sequence[Prompt]) -> dict[str, object]:
    """Compare mean logarithms of the prompt lengths, with the normal interval of unequal variances."""
    lengths, before = (np.log([len(prompt.text) for prompt in prompts]) for prompts in (window, reference))
    difference = float(lengths.mean() - before.mean())
    half = 1.959964 * float(np.sqrt(lengths.var() / len(lengths) + before.var() / len(before)))
    values = {"value": float(lengths.mean()), "reference": float(before.mean()), "difference": difference}
    return {**values, "ci95": [difference - half, difference + half], "n": len(lengths)}


def count_languages(prompts: Sequence[Prompt]) -> Mapping[str, int]:
    """Return the number of prompts by language, the most frequent first."""
    languages = [prompt.language for prompt in prompts]
    return {
        name: languages.count(name) for name in sorted(set(languages), key=lambda name: (-languages.count(name), name))
    }
