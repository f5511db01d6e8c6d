"""Settings of a synthesis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.synthesis.teachers import Sampling


@dataclass(frozen=True)
class SynthesisSettings:
    """What a synthesis writes.

    Attributes:
        templates: names or paths of the templates.
        rows: the number of rows.
        per_passage: maximum number of requests about a passage or prompt with each template; 0 for the default of the kind.
        sampling: the sampling of the teacher.
        repairs: maximum number of requests to correct an answer that does not have the requested structure.
        min_support: minimum share of an answer's content words that occur in the passage.
        max_document_share: maximum share of one document in the rows, of which at least an equal share is allowed; 0 for the default of
            the kind.
        min_score: minimum score of the judge, 1 to 10.
        duplicate_threshold: similarity from which a row is a duplicate of an earlier row.
    """

    templates: tuple[str, ...]
    rows: int
    per_passage: int
    sampling: Sampling
    repairs: int
    min_support: float
    max_document_share: float
    min_score: int
    duplicate_threshold: float

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "templates": list(self.templates)}
