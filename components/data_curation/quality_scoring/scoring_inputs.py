"""The inputs of the quality scores, with their digests: examples of good and bad rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import ArtifactInput
from components.data_curation.reading.raw_records import Source
from components.data_curation.reading.source_files import list_files_of_key
from components.data_curation.score_settings import QualityScoreSettings

EXAMPLES_KIND = "quality_examples"  # kind of the inputs that are examples; their setting `label` is good or bad
CLASSIFIER_KEY = "data_curation.quality_scores.classifier"


@dataclass(frozen=True)
class ScoringInputs:
    """The files with examples of good and bad rows."""

    good: Sequence[Source] = ()
    bad: Sequence[Source] = ()

    @staticmethod
    def from_plan(plan: Mapping[str, Any]) -> ScoringInputs:
        """Return the inputs of a plan, see `as_plan`."""
        return ScoringInputs([Source(**one) for one in plan["good"]], [Source(**one) for one in plan["bad"]])

    def as_plan(self) -> dict[str, Any]:
        """Return the inputs as JSON values for the data curation plan."""
        return {label: [one.model_dump() for one in files] for label, files in self._list_labelled()}

    def list_artifact_inputs(self) -> list[ArtifactInput]:
        """Return the entries for the `inputs` of the dataset's manifest."""
        return [
            ArtifactInput(kind=EXAMPLES_KIND, content_sha256=one.sha256, uri=one.name, settings={"label": label})
            for label, files in self._list_labelled()
            for one in files
        ]

    def _list_labelled(self) -> list[tuple[str, Sequence[Source]]]:
        return [("good", self.good), ("bad", self.bad)]


def list_scoring_inputs(settings: QualityScoreSettings, base: Path) -> ScoringInputs:
    """List the files of the quality scores with their digests.

    Args:
        settings: the settings of the scorers.
        base: the base folder of relative patterns.

    Raises:
        ConfigurationError: a file does not exist or cannot be read.
    """
    classifier = settings.classifier
    good, bad = (
        list_files_of_key(getattr(classifier, label), base, f"{CLASSIFIER_KEY}.{label}") for label in ("good", "bad")
    )
    return ScoringInputs(good, bad)
