"""The inputs of the quality scores, with their digests: examples of good and bad rows, and the model of the perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime.reporters import Reporter, SilentReporter
from components.data_curation.quality_scoring import judge_client, perplexity
from components.data_curation.reading.raw_records import Source
from components.data_curation.reading.source_files import list_files_of_key
from components.data_curation.score_settings import QualityScoreSettings

EXAMPLES_KIND = "quality_examples"  # kind of the inputs that are examples; their setting `label` is good or bad
CLASSIFIER_KEY = "data_curation.quality_scores.classifier"


@dataclass(frozen=True)
class ScoringInputs:
    """The files with examples of good and bad rows, and the model of the perplexity."""

    good: Sequence[Source] = ()
    bad: Sequence[Source] = ()
    model: ArtifactInput | None = None

    @staticmethod
    def from_plan(plan: Mapping[str, Any]) -> ScoringInputs:
        """Return the inputs of a plan, see `as_plan`."""
        good, bad = ([Source(**one) for one in plan[label]] for label in ("good", "bad"))
        return ScoringInputs(good, bad, ArtifactInput(**plan["model"]) if plan["model"] else None)

    def as_plan(self) -> dict[str, Any]:
        """Return the inputs as JSON values for the data curation plan."""
        examples = {label: [one.model_dump() for one in files] for label, files in self._list_labelled()}
        return {**examples, "model": self.model.model_dump() if self.model else None}

    def list_artifact_inputs(self) -> list[ArtifactInput]:
        """Return the entries for the `inputs` of the dataset's manifest."""
        examples = [
            ArtifactInput(kind=EXAMPLES_KIND, content_sha256=one.sha256, uri=one.name, settings={"label": label})
            for label, files in self._list_labelled()
            for one in files
        ]
        return [*examples, self.model] if self.model else examples

    def _list_labelled(self) -> list[tuple[str, Sequence[Source]]]:
        return [("good", self.good), ("bad", self.bad)]


def list_scoring_inputs(
    settings: QualityScoreSettings, base: Path, reporter: Reporter | None = None, *, fetch: bool = True
) -> ScoringInputs:
    """List the files and the model of the quality scores with their digests.

    Args:
        settings: the settings of the scorers.
        base: the base folder of relative patterns.
        reporter: receives progress.
        fetch: whether to fetch or convert a model that is not on this machine. Otherwise its digest is "".

    Raises:
        ConfigurationError: a file or the model does not exist or cannot be read, or the API key of the judge is not set.
        EngineMissingError: the perplexity is enabled, but PyTorch is not installed.
    """
    classifier = settings.classifier
    good, bad = (
        list_files_of_key(getattr(classifier, label), base, f"{CLASSIFIER_KEY}.{label}") for label in ("good", "bad")
    )
    model = None
    if settings.perplexity.is_enabled:
        model = perplexity.list_model_input(settings.perplexity, reporter or SilentReporter(), fetch=fetch)
    if settings.judge.is_enabled:
        judge_client.read_api_key(settings.judge.credentials)
    return ScoringInputs(good, bad, model)
