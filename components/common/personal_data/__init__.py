"""Detection of personal data and secrets in texts, counts by kind, and redaction by typed placeholders.

No function prints, logs or returns a detected value: a finding consists of a kind and a position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from components.common.personal_data import named_entities
from components.common.personal_data.detectors import DETECTORS, select_detectors
from components.common.personal_data.names_config import NamesConfig

PLACEHOLDERS = {**{kind: detector.placeholder for kind, detector in DETECTORS.items()}, **named_entities.PLACEHOLDERS}
KIND_PRIORITY = {kind: position for position, kind in enumerate(PLACEHOLDERS)}


@dataclass(frozen=True)
class Finding:
    """The position of personal data in a text: `start` inclusive, `end` exclusive, in characters."""

    kind: str
    start: int
    end: int


def find(text: str, names_config: NamesConfig | None = None) -> list[Finding]:
    """Return the personal data and secrets in a text, ordered by position.

    Of overlapping findings, the finding whose kind is first in DETECTORS is returned. Names and locations are searched
    for if `names_config` sets a model.

    Raises:
        ConfigurationError: the spaCy model cannot be loaded, or presidio is not installed.
    """
    findings: list[Finding] = []
    for kind, detector in select_detectors(text):
        findings += [Finding(kind, start, end) for start, end in detector.find_spans(text)]
    if names_config and names_config.model:
        findings += [Finding(*name) for name in named_entities.find_names(text, names_config)]
    if not findings:
        return []
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda found: (found.start, KIND_PRIORITY[found.kind], -found.end)):
        priority = KIND_PRIORITY[finding.kind]
        while kept and finding.start < kept[-1].end and priority < KIND_PRIORITY[kept[-1].kind]:
            kept.pop()
        if not kept or finding.start >= kept[-1].end:
            kept.append(finding)
    return kept


def redact(
    text: str, kinds: Collection[str], names_config: NamesConfig | None = None, preceding_text: str = ""
) -> tuple[str, Counter[str]]:
    """Replace findings of `kinds` by placeholders, and count all findings by kind.

    A placeholder can move a number closer to a word that labels it. The search is therefore repeated until the text
    contains no finding of `kinds`, and redaction is idempotent.

    Args:
        kinds: kinds of findings to redact, keys of PLACEHOLDERS.
        preceding_text: context before the text, such as its field name; searched, but not redacted.

    Returns:
        The redacted text, and the number of findings by kind.

    Raises:
        ConfigurationError: as `find`.
    """
    found = _find_after(preceding_text, text, names_config)
    if not found:
        return text, Counter()
    counts = Counter(finding.kind for finding in found)
    while redacted := [finding for finding in found if finding.kind in kinds]:
        parts, done = [], 0
        for finding in redacted:
            parts += [text[done : finding.start], PLACEHOLDERS[finding.kind]]
            done = finding.end
        text = "".join([*parts, text[done:]])
        found = _find_after(preceding_text, text, names_config)
        counts.update(finding.kind for finding in found if finding.kind in kinds)
    return text, counts


def _find_after(preceding_text: str, text: str, names_config: NamesConfig | None) -> list[Finding]:
    """Return the findings in the text, searched after `preceding_text`."""
    offset = len(preceding_text)
    return [
        Finding(found.kind, found.start - offset, found.end - offset)
        for found in find(preceding_text + text, names_config)
        if found.start >= offset
    ]


def mask(text: str, names_config: NamesConfig | None = None) -> str:
    """Replace findings of all kinds by placeholders, so that the text can be displayed.

    Raises:
        ConfigurationError: as `find`.
    """
    return redact(text, PLACEHOLDERS, names_config)[0]
