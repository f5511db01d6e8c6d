"""Mixing of sources: how often an epoch draws rows from each source.

The effective size of a source is min(rows × repetitions, cap). With caps or repetitions, an epoch has the sum of the
effective sizes of the sources whose weight is not 0; otherwise it keeps its number of rows. Its shares follow the
weights, or else effective size^(1/temperature) (Raffel et al., arXiv 1910.10683, section 3.5.2). Draws continue from
epoch to epoch: no row is repeated before all other rows of its part. They depend on the seed and the epoch only, so a
resumed training repeats them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError

MAX_SHOWN_SOURCES = 10  # in an error message
MAX_LISTED_SOURCES = 100  # in a manifest and a report; the smallest sources are added up


@dataclass(frozen=True)
class MixingSettings:
    """Settings of a recipe for the shares of its sources. Patterns are names of sources, or globs.

    Attributes:
        weights: Share of the sources of each pattern. Empty: the shares follow the effective sizes.
        caps: Maximum number of rows per epoch, of all sources of each pattern.
        repetitions: Number of times that an epoch has each row of the sources of each pattern.
        temperature: Without weights, the shares follow the effective sizes to the power of 1/temperature.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    repetitions: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0

    @property
    def patterns(self) -> dict[str, Mapping[str, float]]:
        """The values by pattern, of each key of the recipe."""
        return {
            "mixing_weights": self.weights,
            "mixing_caps": self.caps,
            "mixing_repetitions": self.repetitions,
        }

    @property
    def active_keys(self) -> list[str]:
        """The keys of the recipe that change an epoch."""
        keys = [key for key, patterns in self.patterns.items() if patterns]
        return keys if self.temperature == 1 else [*keys, "mixing_temperature"]

    @property
    def is_active(self) -> bool:
        """Whether an epoch differs from drawing every row once."""
        return bool(self.active_keys)


@dataclass(frozen=True)
class SourceShare:
    """Examples and tokens of a source in a training run.

    An example is a row, or, where a row has several examples, one of them; `text` divides long texts.

    Attributes:
        source: Name of the source.
        examples: Examples in the dataset.
        seen: Examples in the batches; an example counts once per draw.
        left_out: Examples that are in no batch.
        tokens: Tokens in the batches, without padding.
    """

    source: str
    examples: int
    seen: int
    left_out: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """Sources whose rows are drawn together, and the number of rows that an epoch draws from them."""

    sources: Sequence[str]
    draws: int


class _PartKey(NamedTuple):
    """Patterns that the sources of a part have in common; None without a pattern."""

    weight: str  # "" without weights
    cap: str | None
    repetitions: str | None
    source: str | None  # set if the source is a part by itself


@dataclass(frozen=True)
class Mixture:
    """Rows of each part, by their indices, and the number of rows that an epoch draws from them.

    Attributes:
        parts: Row indices of each part.
        draws: Rows that an epoch draws from each part.
    """

    parts: Sequence[Sequence[int]]
    draws: Sequence[int]

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(self.draws)

    def draw_epoch(self, *, seed: int, epoch: int) -> list[int]:
        """Return the row indices of an epoch, counted from 0, part by part."""
        import torch

        drawn: list[int] = []
        for number, (part, count) in enumerate(zip(self.parts, self.draws, strict=True)):
            first, last = epoch * count, (epoch + 1) * count
            for cycle in range(first // len(part), -(-last // len(part))):
                generator = torch.Generator().manual_seed((seed * 1_000_003 + cycle) * 1_009 + number)
                order = torch.randperm(len(part), generator=generator).tolist()
                begin = cycle * len(part)
                drawn += [part[i] for i in order[max(first - begin, 0) : max(last - begin, 0)]]
        return drawn


def build_mixture(settings: MixingSettings, sources: Sequence[str]) -> Mixture:
    """Return the mixture of rows with these sources; for the errors see `plan_epoch`."""
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(sources):
        rows.setdefault(source, []).append(row)
    parts = plan_epoch(settings, {source: len(indices) for source, indices in rows.items()})
    return Mixture(
        [sorted(row for source in part.sources for row in rows[source]) for part in parts],
        [part.draws for part in parts],
    )


def check_settings(settings: MixingSettings, rows_by_source: Mapping[str, int]) -> None:
    """Check the settings against the sources of a dataset, before rows without an answer are left out.

    Raises:
        ConfigurationError: the rows have no sources, a pattern has no source, a source has no weight, or an epoch has
            no rows.
    """
    names = sorted(rows_by_source)
    if not names:
        raise ConfigurationError(
            f"fine_tuning.{settings.active_keys[0]}: the training rows have no sources; expected the column source",
            hint=f"Add the field source to the records, or remove fine_tuning.{settings.active_keys[0]}.",
        )
    for key, patterns in settings.patterns.items():
        _check_patterns(key, patterns, names)
    plan_epoch(settings, rows_by_source)


def _check_patterns(key: str, patterns: Collection[str], names: Sequence[str]) -> None:
    """Check that each pattern has sources. Raises ConfigurationError."""
    matched = {
        pattern: [name for name in names if name == pattern or fnmatchcase(name, pattern)] for pattern in patterns
    }
    if unmatched := sorted(pattern for pattern, matches in matched.items() if not matches):
        raise ConfigurationError(
            f"fine_tuning.{key}: no source of the training rows matches {_list_names(unmatched)}; "
            f"sources: {_list_names(names)}",
            hint="Use these names, or globs that match them.",
        )
    if preceded := sorted(set(patterns) - set(_find_patterns(patterns, names).values())):
        raise ConfigurationError(
            f"fine_tuning.{key}: each source that {preceded[0]} matches has a more specific pattern: "
            f"{_list_names(matched[preceded[0]])}",
            hint=f"Remove {preceded[0]}.",
        )


def plan_epoch(settings: MixingSettings, examples_by_source: Mapping[str, int]) -> list[Part]:
    """Return the parts of an epoch; sources with weight 0 are in no part.

    Raises:
        ConfigurationError: a source has no weight, no source has a weight above 0, or the epoch has no rows.
    """
    parts = _group_sources(settings, examples_by_source)
    keys = list(parts)
    sizes = [
        sum(examples_by_source[name] for name in names)
        * (1 if key.repetitions is None else settings.repetitions[key.repetitions])
        for key, names in parts.items()
    ]
    limits = _divide_caps(settings.caps, keys, sizes)
    sizes = [min(size, limit) for size, limit in zip(sizes, limits, strict=True)]
    has_sizes = bool(settings.caps or settings.repetitions)
    rows = math.floor(sum(sizes) + 0.5) if has_sizes else sum(examples_by_source.values())
    if not rows:
        raise ConfigurationError(
            f"fine_tuning.mixing_repetitions: an epoch has {sum(sizes):.2g} rows; expected at least 1",
            hint="Increase fine_tuning.mixing_repetitions.",
        )
    draws = share_rows(rows, _weigh_parts(settings, keys, sizes), limits)
    return [Part(parts[key], count) for key, count in zip(keys, draws, strict=True)]


def _group_sources(settings: MixingSettings, sources: Iterable[str]) -> dict[_PartKey, list[str]]:
    """Return the sources of each part, ordered by the patterns of the parts."""
    names = sorted(sources)
    weights = match_sources(settings.weights, names) if settings.weights else {}
    caps, repetitions = _find_patterns(settings.caps, names), _find_patterns(settings.repetitions, names)
    parts: dict[_PartKey, list[str]] = {}
    for name in names:
        weight = weights.get(name, "")
        if settings.weights and not settings.weights[weight]:
            continue
        source = name if settings.temperature != 1 and name not in caps else None
        parts.setdefault(_PartKey(weight, caps.get(name), repetitions.get(name), source), []).append(name)
    return {key: parts[key] for key in sorted(parts, key=lambda key: [pattern or "" for pattern in key])}


def count_epoch_examples(settings: MixingSettings, examples_by_source: Mapping[str, int]) -> int:
    """Return the number of examples in the batches of an epoch; for the errors see `plan_epoch`."""
    return sum(part.draws for part in plan_epoch(settings, examples_by_source))


def _divide_caps(caps: Mapping[str, int], keys: Sequence[_PartKey], sizes: Sequence[float]) -> list[float]:
    """Return the maximum number of rows of each part: its share of the cap of its pattern."""
    limits = [math.inf] * len(keys)
    for pattern, cap in caps.items():
        members = [i for i, key in enumerate(keys) if key.cap == pattern]
        for i, limit in zip(members, share_rows(cap, [sizes[i] for i in members]), strict=True):
            limits[i] = limit
    return limits


def _weigh_parts(settings: MixingSettings, keys: Sequence[_PartKey], sizes: Sequence[float]) -> list[float]:
    """Return the relative share of each part. The share of several parts is divided by their effective sizes."""
    groups = [(key.weight,) if settings.weights else (key.cap, key.source) for key in keys]
    group_sizes: dict[tuple[str | None, ...], float] = {}
    for group, size in zip(groups, sizes, strict=True):
        group_sizes[group] = group_sizes.get(group, 0) + size
    shares = []
    for key, group, size in zip(keys, groups, sizes, strict=True):
        weight = settings.weights[key.weight] if settings.weights else group_sizes[group] ** (1 / settings.temperature)
        shares.append(weight * (size / group_sizes[group]) if size else 0.0)
    return shares


def match_sources(weights: Mapping[str, float], sources: Iterable[str]) -> dict[str, str]:
    """Return the pattern of each source: its name, or else the longest glob that matches it.

    Patterns without a source are ignored: all rows of the source may be left out.

    Raises:
        ConfigurationError: a source has no weight, or no source has a weight above 0.
    """
    names = sorted(set(sources))
    patterns = _find_patterns(weights, names)
    if unweighted := [name for name in names if name not in patterns]:
        raise ConfigurationError(
            f"fine_tuning.mixing_weights has no weight for the sources {_list_names(unweighted)}",
            hint='Add their weights, or "*" for all other sources; 0 leaves a source out.',
        )
    if not any(weights[pattern] for pattern in patterns.values()):
        raise ConfigurationError(
            f"fine_tuning.mixing_weights: each source with an answer to learn has the weight 0: {_list_names(names)}",
            hint="Increase fine_tuning.max_length, or set a weight above 0 for one of these sources.",
        )
    return patterns


def _find_patterns(patterns: Collection[str], names: Iterable[str]) -> dict[str, str]:
    """Return the pattern of each source that a pattern matches."""
    found: dict[str, str] = {}
    for name in names:
        globs = sorted(pattern for pattern in patterns if fnmatchcase(name, pattern))
        if name in patterns:
            found[name] = name
        elif globs:
            found[name] = max(globs, key=len)
    return found


def select_trained(settings: MixingSettings, sources: Sequence[str], lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the examples whose source has a weight above 0; for the errors see `plan_epoch`."""
    trained = {source for part in plan_epoch(settings, Counter(sources)) for source in part.sources}
    return [length for source, length in zip(sources, lengths, strict=True) if source in trained]


def describe_ignored_settings(settings: MixingSettings, sources: Collection[str]) -> list[str]:
    """Return a warning for each key with patterns whose rows are all left out, by their length or by weight 0."""
    warnings = []
    for key, patterns in settings.patterns.items():
        if ignored := sorted(set(patterns) - set(_find_patterns(patterns, sources).values())):
            warnings.append(
                f"fine_tuning.{key}: the values of {_list_names(ignored)} are ignored, because none of their rows has "
                "an answer within fine_tuning.max_length"
            )
    weights = _find_patterns(settings.weights, sources)
    trained = {source for source in sources if settings.weights.get(weights.get(source, ""), 1)}
    for key in ("mixing_caps", "mixing_repetitions"):
        patterns = settings.patterns[key]
        used = _find_patterns(patterns, sources)
        if ignored := sorted(set(used.values()) - {used[source] for source in trained if source in used}):
            warnings.append(
                f"fine_tuning.{key}: the values of {_list_names(ignored)} are ignored, because the weight of their "
                "sources is 0"
            )
    return warnings


def share_rows(rows: int, weights: Sequence[float], limits: Sequence[float] = ()) -> list[int]:
    """Divide rows in proportion to the weights, by largest remainders.

    Args:
        rows: Number of rows; at most the sum of the limits.
        weights: Relative shares.
        limits: Maximum number of rows of each share; rows above it are divided among the other shares.
    """
    exact = [rows * weight / sum(weights) for weight in weights]
    if limited := {i for i, limit in enumerate(limits) if exact[i] > limit}:
        others = [0 if i in limited else weight for i, weight in enumerate(weights)]
        fixed = [int(limit) if i in limited else 0 for i, limit in enumerate(limits)]
        shares = share_rows(rows - sum(fixed), others, limits) if any(others) else [0] * len(weights)
        return [share + limit for share, limit in zip(shares, fixed, strict=True)]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: rows - sum(shares)]:
        shares[i] += 1
    return shares


def measure_mean_lengths(sources: Sequence[str], lengths: Sequence[int]) -> dict[str, float]:
    """Return the mean number of tokens of the examples of each source."""
    tokens: Counter[str] = Counter()
    for source, length in zip(sources, lengths, strict=True):
        tokens[source] += length
    return {source: tokens[source] / count for source, count in Counter(sources).items()}


def plan_shares(
    settings: MixingSettings, examples_by_source: Mapping[str, int], seen: int, mean_lengths: Mapping[str, float]
) -> list[SourceShare]:
    """Return the planned share of each source in `seen` drawn examples, without drawing them.

    Args:
        settings: Settings of the recipe.
        examples_by_source: Number of examples of each source.
        seen: Number of drawn examples.
        mean_lengths: Tokens of an example of each source.

    Raises:
        ConfigurationError: see `plan_epoch`.
    """
    parts = plan_epoch(settings, examples_by_source)
    seen_by_source: dict[str, int] = {}
    for part, part_seen in zip(parts, share_rows(seen, [part.draws for part in parts]), strict=True):
        counts = share_rows(part_seen, [examples_by_source[source] for source in part.sources])
        seen_by_source |= zip(part.sources, counts, strict=True)
    shares = []
    for source, examples in sorted(examples_by_source.items()):
        count = seen_by_source.get(source, 0)
        tokens = round(count * mean_lengths[source])
        shares.append(SourceShare(source, examples, count, max(examples - count, 0), tokens))
    return shares


def count_shares(sources: Sequence[str], lengths: Sequence[int], draws: Sequence[int]) -> list[SourceShare]:
    """Return the share of each source in the drawn examples.

    Args:
        sources: Source of each example.
        lengths: Tokens of each example.
        draws: Number of draws of each example.
    """
    examples, seen, left_out, tokens = Counter(sources), Counter[str](), Counter[str](), Counter[str]()
    for source, length, count in zip(sources, lengths, draws, strict=True):
        seen[source] += count
        left_out[source] += not count
        tokens[source] += count * length
    return [
        SourceShare(source, examples[source], seen[source], left_out[source], tokens[source])
        for source in sorted(examples)
    ]


def summarize_shares(shares: Sequence[SourceShare]) -> list[dict[str, Any]]:
    """Return the shares for a manifest, with "repetitions" and "token_share".

    Of more than MAX_LISTED_SOURCES sources, those with the fewest tokens are added up.
    """
    all_tokens = max(sum(share.tokens for share in shares), 1)
    by_tokens = sorted(shares, key=lambda share: (-share.tokens, share.source))
    listed = sorted(by_tokens[:MAX_LISTED_SOURCES], key=lambda share: share.source)
    if rest := by_tokens[MAX_LISTED_SOURCES:]:
        sums = {
            name: sum(getattr(share, name) for share in rest) for name in ("examples", "seen", "left_out", "tokens")
        }
        listed.append(SourceShare(f"{len(rest):,} other sources", **sums))
    return [
        {
            **asdict(share),
            "repetitions": round(share.seen / max(share.examples, 1), 4),
            "token_share": round(share.tokens / all_tokens, 4),
        }
        for share in listed
    ]


def describe_shares(shares: Sequence[SourceShare], epoch_examples: int) -> list[str]:
    """Return a warning for each source whose examples are left out or repeated more often than the average.

    Args:
        shares: Shares of a training run with mixing settings.
        epoch_examples: Examples of an epoch.
    """
    examples, seen = sum(share.examples for share in shares), sum(share.seen for share in shares)
    warnings = []
    for share in shares:
        # Of the rows that a short training does not reach, another warning states the number.
        if share.left_out and (seen >= epoch_examples or not share.seen):
            warnings.append(
                f"mixing leaves out {share.left_out:,} of {format_count(share.examples, 'example')} of {share.source}"
            )
        elif share.seen / share.examples >= 2 * max(seen / examples, 1):
            warnings.append(
                f"mixing repeats {format_count(share.examples, 'example')} of {share.source}, with "
                f"{share.seen / share.examples:.1f} occurrences on average; the average of all sources is "
                f"{seen / examples:.1f}"
            )
    return warnings


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_SHOWN_SOURCES} more" if len(names) > MAX_SHOWN_SOURCES else ""
    return ", ".join(names[:MAX_SHOWN_SOURCES]) + rest
