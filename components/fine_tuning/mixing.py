"""Mixing weights: how often an epoch draws rows from each source.

An epoch keeps its number of rows. Each weight belongs to the sources that its pattern matches, whose rows share the
pattern's part of the epoch. Draws continue from epoch to epoch: no row is repeated before all other rows of its part.
They depend on the seed and the epoch only, so a resumed training repeats them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from components.common.runtime.errors import ConfigurationError

MAX_SHOWN_SOURCES = 10  # in an error message


@dataclass(frozen=True)
class SourceShare:
    """Examples of a source in a training.

    An example is a row, or, where a row has several examples, one of them; `text` divides long texts.

    Attributes:
        source: Name of the source.
        examples: Examples in the dataset.
        seen: Examples in the batches; an example counts once per draw.
        left_out: Examples that are in no batch.
    """

    source: str
    examples: int
    seen: int
    left_out: int


@dataclass(frozen=True)
class Mixture:
    """Rows of each pattern, by their indices, and the number of rows that an epoch draws from them.

    Attributes:
        parts: Row indices of each pattern.
        draws: Rows that an epoch draws from each part; their sum is the number of rows.
    """

    parts: Sequence[Sequence[int]]
    draws: Sequence[int]

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


def build_mixture(weights: Mapping[str, float], sources: Sequence[str]) -> Mixture:
    """Return the mixture of rows with these sources.

    Raises:
        ConfigurationError: a source has no weight, or no source has a weight above 0.
    """
    patterns = match_sources(weights, set(sources))
    drawn_patterns = sorted({pattern for pattern in patterns.values() if weights[pattern] > 0})
    parts: dict[str, list[int]] = {pattern: [] for pattern in drawn_patterns}
    for row, source in enumerate(sources):
        if patterns[source] in parts:
            parts[patterns[source]].append(row)
    draws = share_rows(len(sources), [weights[pattern] for pattern in drawn_patterns])
    return Mixture(list(parts.values()), draws)


def check_patterns(weights: Mapping[str, float], sources: Iterable[str]) -> None:
    """Check the patterns against the sources of a dataset, before rows without an answer are left out.

    Raises:
        ConfigurationError: the rows have no sources, a pattern has no source, or a source has no weight.
    """
    names = sorted(set(sources))
    if not names:
        raise ConfigurationError(
            "fine_tuning.mixing_weights: the training rows have no sources; expected the column source",
            hint="Add the field source to the records, or remove fine_tuning.mixing_weights.",
        )
    matched = {
        pattern: [name for name in names if name == pattern or fnmatchcase(name, pattern)] for pattern in weights
    }
    if unmatched := sorted(pattern for pattern, matches in matched.items() if not matches):
        raise ConfigurationError(
            f"fine_tuning.mixing_weights: no source of the training rows is matched by {_list_names(unmatched)}; the "
            f"sources are {_list_names(names)}",
            hint="Use these names, or globs that match them.",
        )
    used = set(_find_patterns(weights, names).values())
    if preceded := sorted(weights.keys() - used):
        raise ConfigurationError(
            f"fine_tuning.mixing_weights: each source that {preceded[0]} matches has a more specific pattern: "
            f"{_list_names(matched[preceded[0]])}",
            hint=f"Remove {preceded[0]}.",
        )
    match_sources(weights, names)


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


def _find_patterns(weights: Mapping[str, float], names: Iterable[str]) -> dict[str, str]:
    """Return the pattern of each source that a pattern matches."""
    patterns: dict[str, str] = {}
    for name in names:
        globs = sorted(pattern for pattern in weights if fnmatchcase(name, pattern))
        if name in weights:
            patterns[name] = name
        elif globs:
            patterns[name] = max(globs, key=len)
    return patterns


def select_trained(weights: Mapping[str, float], sources: Sequence[str], lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the examples whose source has a weight above 0.

    Raises:
        ConfigurationError: a source has no weight, or no source has a weight above 0.
    """
    patterns = match_sources(weights, sources)
    return [length for source, length in zip(sources, lengths, strict=True) if weights[patterns[source]]]


def describe_ignored_weights(weights: Mapping[str, float], sources: Iterable[str]) -> str | None:
    """Return a warning about patterns whose rows are all left out; None if every pattern has rows."""
    ignored = sorted(weights.keys() - _find_patterns(weights, sources).values())
    if not ignored:
        return None
    return (
        f"fine_tuning.mixing_weights: the weights of {_list_names(ignored)} are ignored, because none of their rows has "
        "an answer within fine_tuning.max_length"
    )


def share_rows(rows: int, weights: Sequence[float]) -> list[int]:
    """Divide rows in proportion to the weights, by largest remainders."""
    exact = [rows * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: rows - sum(shares)]:
        shares[i] += 1
    return shares


def plan_shares(weights: Mapping[str, float], examples_by_source: Mapping[str, int], seen: int) -> list[SourceShare]:
    """Return the planned share of each source in `seen` drawn examples, without drawing them.

    Raises:
        ConfigurationError: a source has no weight, or no source has a weight above 0.
    """
    patterns = match_sources(weights, examples_by_source)
    part_examples: Counter[str] = Counter()
    for source, pattern in patterns.items():
        part_examples[pattern] += examples_by_source[source]
    drawn = sorted(part_examples)
    part_seen = dict(zip(drawn, share_rows(seen, [weights[pattern] for pattern in drawn]), strict=True))
    shares = []
    for source, examples in sorted(examples_by_source.items()):
        pattern = patterns[source]
        source_seen = round(part_seen[pattern] * examples / part_examples[pattern])
        shares.append(SourceShare(source, examples, source_seen, max(examples - source_seen, 0)))
    return shares


def count_shares(sources: Sequence[str], drawn: Iterable[int]) -> list[SourceShare]:
    """Return the share of each source in the drawn examples.

    Args:
        sources: Source of each example.
        drawn: Indices of the examples in the batches.
    """
    draws = Counter(drawn)
    examples, seen, left_out = Counter(sources), Counter[str](), Counter[str]()
    for example, source in enumerate(sources):
        seen[source] += draws[example]
        left_out[source] += not draws[example]
    return [SourceShare(source, examples[source], seen[source], left_out[source]) for source in sorted(examples)]


def describe_shares(shares: Sequence[SourceShare]) -> list[str]:
    """Return a warning for each source whose examples are left out or repeated more often than the average."""
    examples, seen = sum(share.examples for share in shares), sum(share.seen for share in shares)
    warnings = []
    for share in shares:
        # Of the rows that a short training does not reach, another warning states the number.
        if share.left_out and (seen >= examples or not share.seen):
            warnings.append(
                f"fine_tuning.mixing_weights leaves out {share.left_out:,} of {share.examples:,} examples of "
                f"{share.source}"
            )
        elif share.seen / share.examples >= 2 * max(seen / examples, 1):
            warnings.append(
                f"fine_tuning.mixing_weights repeats each of the {share.examples:,} examples of {share.source} "
                f"{share.seen / share.examples:.1f} times; an average example is seen {seen / examples:.1f} times"
            )
    return warnings


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_SHOWN_SOURCES} more" if len(names) > MAX_SHOWN_SOURCES else ""
    return ", ".join(names[:MAX_SHOWN_SOURCES]) + rest
