"""Facts of a registered version: its verified artifacts, and the values that several formats need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.cost import stage_cost
from components.common.models.model_loading import LocalBaseModel
from components.fine_tuning import model_card
from components.model_registry import policy_checks
from components.model_registry.stage import RegisteredModel, get_registered
from pipelines.provenance.lineage import DAMAGED, INTACT, MISSING, UNCHECKED, Lineage, LineageError, Link

UNKNOWN = "unknown"
HUB_SCHEME = "hf://"
JSONObject = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """The scores of one metric, on all items of a task or on a slice of them.

    Attributes:
        slice: name of the slice; "" for all items.
        values: value by role, the 95% interval `ci95` of candidate − base, and the number of items `n`.
    """

    task: str
    metric: str
    slice: str
    values: Mapping[str, Any]

    @property
    def difference(self) -> float | None:
        """Candidate − base, or None."""
        candidate, base = self.values.get("candidate"), self.values.get("base")
        return None if candidate is None or base is None else candidate - base


@dataclass(frozen=True)
class VersionFacts:
    """A registered version and the links of its lineage.

    Artifacts that were not found are None, and their mappings are empty.
    """

    registered: RegisteredModel
    chain: Sequence[Link]
    store: Path

    def find_link(self, kind: str) -> Link | None:
        """Return the version's own link of a kind, which precedes those of the models that it was tuned from."""
        return next((link for link in self.chain if link.kind == kind), None)

    def find_artifact(self, kind: str) -> Artifact | None:
        """Return the verified artifact of a kind, or None."""
        link = self.find_link(kind)
        return link.artifact if link else None

    @property
    def task(self) -> str:
        """The task of the model in the terms of the Hugging Face hub."""
        model = self.find_artifact("model")
        is_reward_model = model is not None and model.manifest.kind == REWARD_MODEL
        return "text-classification" if is_reward_model else "text-generation"

    def find_file(self, kind: str, name: str) -> Path | None:
        """Return a file of a verified artifact; None if the manifest, and therefore the verification, omits the file."""
        artifact = self.find_artifact(kind)
        return artifact.path / name if artifact and any(one.path == name for one in artifact.manifest.files) else None

    def get_summary(self, kind: str) -> JSONObject:
        """Return the summary in an artifact's manifest."""
        artifact = self.find_artifact(kind)
        return artifact.manifest.summary if artifact else {}

    def get_config(self, kind: str) -> JSONObject:
        """Return the configuration in an artifact's manifest."""
        artifact = self.find_artifact(kind)
        return artifact.manifest.config if artifact else {}

    @property
    def missing_links(self) -> list[Link]:
        """The links that were not found, so that their content is unknown; without raw files, which the dataset records."""
        return [
            link
            for link in self.chain
            if (link.kind != "raw" and link.status == MISSING)
            or (link.kind == "base_model" and link.status == UNCHECKED)
        ]

    @cached_property
    def evaluation(self) -> JSONObject:
        """Content of evaluation.json."""
        path = self.find_file("evaluation", "evaluation.json")
        return json.loads(path.read_text(encoding="utf-8")) if path else {}

    @property
    def reasons(self) -> list[str]:
        """The reasons of the verdict, each once."""
        return list(dict.fromkeys(self.evaluation.get("reasons", [])))

    def list_scores(self) -> Iterator[Score]:
        """Yield the scores on all items, each followed by those on the slices."""
        slices = self.evaluation.get("slices", {})
        for task, metrics in self.evaluation.get("metrics", {}).items():
            for metric, values in metrics.items():
                yield Score(task, metric, "", values)
                for part in slices.get(task, {}).get(metric, []):
                    yield Score(task, metric, part["slice"], part)

    @property
    def base(self) -> LocalBaseModel | None:
        """The base model, if it is on this machine."""
        link = self.find_link("base_model")
        return link.base if link else None

    @property
    def base_name(self) -> str:
        """Name of the base model without its location."""
        link = self.find_link("base_model")
        if self.base:
            return self.base.name
        if not link or not link.uri:
            return UNKNOWN
        return link.uri.removeprefix(HUB_SCHEME).partition("@")[0] if is_on_hub(link.uri) else shorten_uri(link.uri)

    @property
    def base_revision(self) -> str:
        """Commit of a base model from the hub; other base models are identified by their digest."""
        link = self.find_link("base_model")
        uri = (self.base.origin if self.base else "") or (link.uri if link else "")
        return uri.partition("@")[2] if is_on_hub(uri) and "@" in uri else UNKNOWN

    @cached_property
    def base_licence(self) -> str:
        """Licences of the base model, from the model's card and the records of the imports."""
        model = self.find_artifact("model")
        return ", ".join(policy_checks.list_base_licences(model) if model else []) or UNKNOWN

    @property
    def data_licence(self) -> str:
        """Licence of the training data."""
        dataset = self.find_artifact("dataset")
        stated = self.get_config("model").get("card", {}).get("data_licence", "")
        licence = model_card.find_data_licence(stated, dataset.manifest.inputs if dataset else [])
        return UNKNOWN if licence == model_card.UNSTATED else licence

    @property
    def data_name(self) -> str:
        """Name of the dataset's revision, or a name from its digest."""
        link, revision = self.find_link("dataset"), self.find_link("revision")
        tag = revision.detail if revision and revision.status == INTACT else ""
        return tag or (f"dataset-{link.sha256[:12]}" if link and link.sha256 else UNKNOWN)

    @cached_property
    def architecture(self) -> JSONObject:
        """Content of config.json of the trained weights or the base model."""
        path = self.find_file("model", "config.json") or (self.base.path / "config.json" if self.base else None)
        return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}

    @property
    def training_flops(self) -> float | None:
        """Floating-point operations of the training; None if the objective has no formula for them."""
        training = self.get_summary("model")
        names = ("flops_per_second", "tokens", "step_tokens_per_second", "tokens_per_second", "waited_share")
        rate, tokens, step_speed, speed, waited = (training.get(name) for name in names)
        if not rate or not tokens or not step_speed or not speed:
            return None
        return float(rate * (tokens / step_speed + (waited or 0.0) * tokens / speed))

    @property
    def training_cost(self) -> stage_cost.Cost | None:
        """Wall, CPU and GPU seconds of the training, if the artifact store has them."""
        return stage_cost.read_cost(self.store, self.registered.model_sha256)


def collect_facts(lineage: Lineage, store: Path) -> VersionFacts:
    """Return the facts of a traced version.

    Raises:
        LineageError: an artifact is damaged. A missing artifact is no error: its facts are unknown.
    """
    if damaged := [link for link in lineage.broken_links if link.status == DAMAGED]:
        details = "; ".join(f"{link.title} {link.sha256[:12]}: {link.detail}" for link in damaged)
        raise LineageError(
            f"{lineage.name} version {lineage.version} is not exported because its lineage is damaged: {details}",
            hint=damaged[0].hint,
            stage="export",
        )
    return VersionFacts(get_registered(lineage.name, lineage.version), lineage.chain, store)


def is_on_hub(uri: str) -> bool:
    """Return whether a base model comes from the Hugging Face hub."""
    return uri.startswith(HUB_SCHEME)


def shorten_uri(uri: str) -> str:
    """Return a URI with local paths reduced to the last name: exports are shared beyond this machine."""
    scheme, separator, path = uri.removeprefix("file://").rpartition("://")
    if separator and not path.startswith("/"):
        return uri
    repository, at, revision = path.rpartition("@") if scheme == "dvc" else (path, "", "")
    return f"{scheme}{separator}{PurePath(repository).name}{at}{revision}"


def format_line(value: object) -> str:
    """Return a value on one line, so that a name in the data cannot add headings or items to a document."""
    return " ".join(str(value).split())


def format_number(value: object) -> str:
    """Return a number with six significant digits; "unknown" for None."""
    return UNKNOWN if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
