"""Reproduction of a registered model from its recorded data, recipe, seed and versions, and comparison of the digests.

Results in the store or of earlier runs are not reused. Dataset and model are built in a separate folder per version, in
which an interrupted reproduction resumes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.models import model_loading
from components.common.runtime import filesystem
from components.common.runtime.errors import (
    ArtifactDamagedError,
    ConfigurationError,
    EngineMissingError,
    InputError,
    OutputOccupiedError,
    RegistryError,
    TunelineError,
    UsageError,
)
from components.common.runtime.reporters import Reporter
from components.common.runtime.validation_errors import describe_validation_error
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir
from components.data_curation import stage as curation
from components.data_curation.config import DataCurationConfig
from components.data_curation.databases.table_extract import describe_extract
from components.data_curation.quality_scoring.perplexity import MODEL_KIND
from components.data_curation.quality_scoring.scoring_inputs import EXAMPLES_KIND, ScoringInputs, list_scoring_inputs
from components.data_curation.reading.extracts import EXTRACT_SCHEME, open_extract
from components.data_curation.reading.source_files import list_evaluation_sets
from components.data_curation.reading.source_settings import SourceSettings
from components.data_curation.stage import EarlierRevision, Source
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.fine_tuning import adapters
from components.fine_tuning import stage as tuning
from components.fine_tuning.config import Recipe
from components.model_registry.stage import RegisteredModel, get_registered
from pipelines.provenance import artifact_diff, environment_diff, lineage
from pipelines.provenance.environment_diff import Difference, StageRecord
from pipelines.provenance.lineage import LineageError
from pipelines.steps.curation_inputs import expand_demo_source, split_sources

FROM_SOURCES, FROM_REVISION, FROM_STORE = "curated", "revision", "store"
OUTCOME_FILENAME = "reproduction.json"  # written last; without it, the next call resumes
# Errors of the collection of raw files, including a missing, unreachable or damaged data repository.
SOURCE_ERRORS = (ConfigurationError, InputError, DataVersioningError, EngineMissingError, ArtifactDamagedError)
Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True)
class ReproductionRequest:
    """Workdir, data repository and options of a reproduction."""

    workdir: Workdir
    versioning: DataVersioningConfig
    reporter: Reporter
    from_revision: bool = False
    keep: bool = False


@dataclass(frozen=True)
class RecordedVersion:
    """The records of a version.

    Attributes:
        version: the registered version with its tags.
        alias: the requested alias; None if the version was requested by its number.
        model: the manifest of the model.
        model_copy: an intact copy of the model on this machine, or None.
        dataset: the manifest of the dataset.
        dataset_copy: an intact copy of the dataset on this machine, or None.
        revision: the dvc:// URI of the dataset, or "" if it was never published.
    """

    version: RegisteredModel
    alias: str | None
    model: Manifest
    model_copy: Artifact | None
    dataset: Manifest
    dataset_copy: Artifact | None
    revision: str

    @property
    def title(self) -> str:
        """Name and number of the version, for messages."""
        return f"{self.version.name} version {self.version.version}"

    @property
    def arithmetic(self) -> Mapping[str, Any]:
        """The recorded device and thread count of the training."""
        recorded = self.model.summary.get("arithmetic")
        return recorded if isinstance(recorded, dict) else {}

    @property
    def base(self) -> ArtifactInput:
        """The base model. `_load_recorded` verifies that the manifest records it."""
        return next(one for one in self.model.inputs if one.kind == "base_model")


@dataclass(frozen=True)
class CurationSources:
    """Raw files, evaluation sets and scoring inputs with the recorded digests, and the revisions that determined the splits.

    Attributes:
        extracts: the rows that were read from databases; their files are among the raw files.
    """

    config: DataCurationConfig
    sources: list[Source]
    benchmarks: list[Source]
    earlier: list[ArtifactInput]
    scoring: ScoringInputs
    extracts: list[Artifact]


@dataclass(frozen=True)
class ReproductionPlan:
    """The source of the dataset with the reason, the training recipe, and the environment differences."""

    recorded: RecordedVersion
    dataset_method: str
    method_reason: str
    sources: CurationSources | None
    recipe: Recipe
    differences: list[Difference]


@dataclass(frozen=True)
class ReproductionOutcome:
    """The digests of the reproduction, None for a dry run, and the payload files that differ."""

    plan: ReproductionPlan
    dataset: str | None
    model: str | None
    files: list[dict[str, Any]]
    seconds: float
    kept: Path | None = None

    @property
    def is_equal(self) -> bool:
        """Whether dataset and model have the recorded digests."""
        recorded = self.plan.recorded
        return (self.dataset, self.model) == (recorded.dataset.content_sha256, recorded.model.content_sha256)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline reproduce`."""
        plan, version = self.plan, self.plan.recorded.version
        dataset = _compare_digest(plan.recorded.dataset, self.dataset)
        return {
            "name": version.name,
            "version": version.version,
            "alias": plan.recorded.alias,
            "dataset": {**dataset, "how": plan.dataset_method, "why": plan.method_reason},
            "model": _compare_digest(plan.recorded.model, self.model),
            "differences": [asdict(one) for one in plan.differences],
            "files": self.files,
            "seconds": round(self.seconds, 1),
        }


def _compare_digest(recorded: Manifest, reproduced: str | None) -> dict[str, Any]:
    equal = reproduced == recorded.content_sha256 if reproduced else None
    return {"recorded": recorded.content_sha256, "reproduced": reproduced, "equal": equal}


def reproduce(
    reference: str, request: ReproductionRequest, on_plan: Callable[[ReproductionPlan], None], *, dry_run: bool = False
) -> ReproductionOutcome:
    """Reproduce the model of NAME@ALIAS, NAME@3, NAME/3 or NAME (its champion) and compare it with the records.

    A call after an interruption resumes. After success, the folder <workdir>/reproduce/<name>-<version> is
    removed, unless `request.keep` is set.

    Args:
        reference: the version.
        request: the workdir and the options.
        on_plan: called with the plan before any work.
        dry_run: stop after the plan.

    Raises:
        RegistryError: the version does not exist, or does not record its inputs.
        LineageError: an input is missing or has changed.
        DataVersioningError, ArtifactDamagedError: the revision is missing or damaged.
        ConfigurationError: the recorded recipe is invalid in this version of tuneline.
        UsageError: `reference` is malformed, or the dataset has no revision although `request.from_revision` is set.
        BusyError: another process reproduces the same version.
    """
    start = time.monotonic()
    name, alias_or_number = lineage.parse_reference(reference)
    version = get_registered(name, alias_or_number)
    with _open_work_folder(request, version, dry_run) as folder:
        recorded = _load_recorded(version, None if alias_or_number.isdecimal() else alias_or_number, request)
        plan = _build_plan(recorded, request, folder)
        on_plan(plan)
        if dry_run:
            return ReproductionOutcome(plan, None, None, [], time.monotonic() - start)
        outcome = _execute(plan, request, folder)
        outcome = replace(outcome, seconds=time.monotonic() - start, kept=folder if request.keep else None)
        artifact_folder.write_atomically(folder / OUTCOME_FILENAME, json.dumps(outcome.as_dict(), indent=2) + "\n")
    return outcome


@contextmanager
def _open_work_folder(request: ReproductionRequest, version: RegisteredModel, dry_run: bool) -> Iterator[Path]:
    """Create and lock the folder of this reproduction; remove it after success, unless `request.keep`."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="tuneline-reproduce-") as scratch:
            yield Path(scratch)
        return
    folder = request.workdir.root / "reproduce" / f"{version.name}-{version.version}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with job_folders.folder_lock(folder):
            if (folder / OUTCOME_FILENAME).exists():  # finished earlier; kept, or only partly removed
                _clear(folder)
            yield folder
            if not request.keep:
                _clear(folder)
    finally:
        for one in (folder, folder.parent):
            with suppress(OSError):  # not empty: the next call resumes
                one.rmdir()


def _clear(folder: Path) -> None:
    """Remove the results, the outcome file last, but not the lock."""
    locks = (job_folders.LOCK_FILENAME, f".{job_folders.LOCK_FILENAME}")
    for path in list(folder.iterdir()):
        if path.name == OUTCOME_FILENAME or path.name.startswith(locks):
            continue
        if path.is_dir() and not path.is_symlink():
            filesystem.remove_tree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / OUTCOME_FILENAME).unlink(missing_ok=True)


def _load_recorded(version: RegisteredModel, alias: str | None, request: ReproductionRequest) -> RecordedVersion:
    """Load the records of a version and check that they agree with its tags."""
    request.reporter.step("loading the records")
    workdir = request.workdir
    model_copy = _find_copy("model", version.model_sha256, [version.store_uri], workdir)
    model = model_copy.manifest if model_copy else version.read_manifest()
    for kind in ("dataset", "base_model"):
        tagged, linked = version.tags.get(f"tuneline.{kind}_sha256"), model.find_input(kind)
        if not tagged:
            raise RegistryError(
                f"{version.name} version {version.version} does not record its {kind.replace('_', ' ')}: the tag"
                f" tuneline.{kind}_sha256 is missing",
                hint="Register the model again with `tuneline register`, and reproduce the new version.",
            )
        if linked is None or linked.content_sha256 != tagged:
            actual = linked.content_sha256 if linked else "missing"
            raise _mismatch_error(version, kind, "its model", actual)
    if model.content_sha256 != version.model_sha256:
        raise _mismatch_error(version, "model", "its manifest", model.content_sha256)
    sha256 = version.tags["tuneline.dataset_sha256"]
    revision = version.tags.get("tuneline.dataset_uri", "")
    if not revision.startswith("dvc://"):
        revision = lineage.find_revision_uri(sha256, request.versioning, workdir)
    dataset_copy = _find_copy("dataset", sha256, lineage.list_dataset_uris(version), workdir)
    if dataset_copy:
        dataset = dataset_copy.manifest
    elif revision:
        dataset = _describe_revision(version, revision, request)
    else:
        raise LineageError(
            f"the dataset {sha256[:12]} of {version.name} version {version.version} is no longer in any store and was"
            " not published",
            hint="Restore the artifact store from a backup, or set --workdir to the workdir that contains it.",
        )
    return RecordedVersion(version, alias, model, model_copy, dataset, dataset_copy, revision)


def _find_copy(kind: str, sha256: str, uris: Sequence[str], workdir: Workdir) -> Artifact | None:
    """Return an intact copy on this machine, or None. Damage is ignored, because the artifact can be fetched again."""
    try:
        return lineage.find_artifact(kind, sha256, [uri for uri in uris if uri], workdir.store)
    except TunelineError:
        return None


def _mismatch_error(version: RegisteredModel, kind: str, subject: str, actual: str) -> LineageError:
    tagged, title = version.tags.get(f"tuneline.{kind}_sha256", ""), kind.replace("_", " ")
    return LineageError(
        f"{version.name} version {version.version} records the {title} digest {tagged[:12]}, but the {title} digest of"
        f" {subject} is {actual[:12]}",
        hint="Run `tuneline lineage` to list all mismatches.",
    )


def _describe_revision(version: RegisteredModel, revision: str, request: ReproductionRequest) -> Manifest:
    """Return the revision's manifest, after checking that the revision is the version's dataset."""
    described, manifest = versioning.describe(revision, request.versioning, workdir=request.workdir.root)
    if described.content_sha256 != version.tags["tuneline.dataset_sha256"]:
        raise _mismatch_error(version, "dataset", f"the revision {described.tag}", described.content_sha256)
    return manifest


def _build_plan(recorded: RecordedVersion, request: ReproductionRequest, folder: Path) -> ReproductionPlan:
    """Choose the source of the dataset, preferably the unchanged raw files, and compare the environments."""
    sources = None
    if not request.from_revision:
        request.reporter.step("checking the raw files")
        try:
            sources = _collect_sources(recorded, request, Workdir(folder))
            reason = "; ".join(["all raw files are unchanged", *map(describe_extract, sources.extracts)])
            method = FROM_SOURCES
        except SOURCE_ERRORS as error:
            method, reason = FROM_REVISION if recorded.revision else FROM_STORE, error.message
    elif recorded.revision:
        method, reason = FROM_REVISION, "--from-revision was given"
    else:
        raise UsageError(
            f"--from-revision: the dataset of {recorded.title} was not published as a revision",
            hint="Omit --from-revision.",
        )
    recipe = _parse_config(Recipe, recorded.model, f"the recipe of {recorded.title}")
    if method == FROM_REVISION:  # check the revision before hours of training
        _describe_revision(recorded.version, recorded.revision, request)
    model, dataset = recorded.model, recorded.dataset
    # With the recorded arithmetic, the key differs from the recorded key only if the code differs.
    digests = (dataset.content_sha256, recorded.base.content_sha256)
    initial = model.find_input(adapters.INITIAL_ADAPTER_INPUT)
    initial_sha256 = initial.content_sha256 if initial else None
    key = tuning.compute_key(*digests, recipe, model.seed, recorded.arithmetic, initial_sha256)
    records = [StageRecord(tuning.STAGE, environment_diff.MODEL, model, recipe, key)]
    if sources:
        key = curation.compute_key(dataset.inputs, sources.config, dataset.seed)
        records.insert(0, StageRecord(curation.STAGE, environment_diff.DATASET, dataset, sources.config, key))
    device = environment_diff.select_device(recipe.device, recorded.arithmetic)
    differences = environment_diff.compare_environments(records, recorded.base, recorded.arithmetic, device)
    recipe = recipe.model_copy(update={"device": device})
    return ReproductionPlan(recorded, method, reason, sources, recipe, differences)


def _parse_config(config: type[Settings], manifest: Manifest, title: str) -> Settings:
    """Parse the recorded configuration. Raises ConfigurationError if it is invalid in this version of tuneline."""
    try:
        return config.model_validate(manifest.config)
    except ValidationError as error:
        producer = manifest.produced_by
        raise ConfigurationError(
            describe_validation_error(error, title, config),
            hint=f"Reproduce the version with tuneline {producer.get('tuneline')}, commit "
            f"{producer.get('git_commit') or 'unknown'}.",
        ) from None


def _collect_sources(recorded: RecordedVersion, request: ReproductionRequest, scratch: Workdir) -> CurationSources:
    """Collect the dataset's sources. Raises one of SOURCE_ERRORS if any is missing or has changed."""
    manifest = recorded.dataset
    config = _parse_config(DataCurationConfig, manifest, "the recorded data_curation")
    curation.compute_key(manifest.inputs, config, manifest.seed)  # raises if the named-entity model is missing

    def obtain(uri: str) -> Path:
        return versioning.fetch_source(uri, scratch.root / "sources", request.reporter)

    files, _ = split_sources(config.sources)
    sources = curation.list_sources(expand_demo_source(files, scratch), Path.cwd(), obtain=obtain)
    sets = list_evaluation_sets(config.decontamination.sets, Path.cwd())
    raw, evaluation_sets, earlier = (
        [one for one in manifest.inputs if one.kind == kind]
        for kind in ("raw", "evaluation_set", curation.EARLIER_INPUT_KIND)
    )
    extracted = [one for one in raw if one.uri.startswith(EXTRACT_SCHEME)]
    extracts = [_find_extract(one, recorded, request) for one in extracted]
    for one, extract in zip(extracted, extracts, strict=True):
        settings = SourceSettings.model_validate(one.settings)
        sources.append(open_extract(extract).model_copy(update={"settings": settings}))
    store, root = request.workdir.store, request.workdir.root
    if remote := [one for one in earlier if not artifact_store.has_artifact(store, one.content_sha256)]:
        versions = versioning.list_versions(request.versioning, workdir=root)
        published = {(version.tag, version.content_sha256) for version in versions}
        for one in remote:
            if (one.uri, one.content_sha256) not in published:
                raise InputError(f"the earlier revision {one.uri}, which determined the splits, no longer exists")
    raw_files, set_files = _match_sources(raw, sources), _match_sources(evaluation_sets, sets)
    scoring = _match_scoring_inputs(manifest.inputs, config)
    return CurationSources(config, raw_files, set_files, earlier, scoring, extracts)


def _match_scoring_inputs(recorded: Sequence[ArtifactInput], config: DataCurationConfig) -> ScoringInputs:
    """Return the recorded inputs of the quality scores. Raises InputError if one is missing or has changed."""
    available = list_scoring_inputs(config.quality_scores, Path.cwd())
    examples: dict[str, list[ArtifactInput]] = {"good": [], "bad": []}
    for one in recorded:
        if one.kind == EXAMPLES_KIND:
            examples[one.settings["label"]].append(one.model_copy(update={"settings": {}}))
        elif one.kind == MODEL_KIND and (
            available.model is None or available.model.content_sha256 != one.content_sha256
        ):
            raise InputError(f"the model {one.uri} of the perplexity scores has changed since curation")
    good, bad = _match_sources(examples["good"], available.good), _match_sources(examples["bad"], available.bad)
    return ScoringInputs(good, bad, available.model)


def _find_extract(one: ArtifactInput, recorded: RecordedVersion, request: ReproductionRequest) -> Artifact:
    """Return the rows that were read from a database. Raises InputError if they are missing or damaged."""
    try:
        return lineage.find_extract(one, recorded.version, request.workdir)
    except TunelineError as error:
        raise InputError(error.message, hint=error.hint) from None


def _match_sources(recorded: Sequence[ArtifactInput], available: Sequence[Source]) -> list[Source]:
    """Return the available sources that are recorded. Raises InputError if one is missing or has changed."""
    remaining = Counter((one.uri, one.content_sha256, hashing.digest(one.settings)) for one in recorded)
    matched = []
    for source in available:
        one = curation.to_input(source)
        key = one.uri, one.content_sha256, hashing.digest(one.settings)
        if remaining[key] > 0:
            remaining[key] -= 1
            matched.append(source)
    for (name, *_), count in remaining.items():
        if count > 0:
            has_changed = any(source.name == name for source in available)
            state = "has changed since curation" if has_changed else "no longer exists"
            raise InputError(f"{name} {state}")
    return matched


def _execute(plan: ReproductionPlan, request: ReproductionRequest, folder: Path) -> ReproductionOutcome:
    recorded, reporter = plan.recorded, request.reporter
    reporter.step("checking the base model")
    try:
        base = model_loading.resolve_base_model(recorded.base.uri, reporter, recorded.base.content_sha256)
    except (ConfigurationError, ArtifactDamagedError) as error:
        raise LineageError(
            f"the base model of {recorded.title} is missing or has changed: {error.message}",
            hint=f"Restore the files with the digest {recorded.base.content_sha256[:12]} at {recorded.base.uri}.",
        ) from error
    initial = recorded.model.find_input(adapters.INITIAL_ADAPTER_INPUT)
    model_config = model_loading.load_configuration(base.path)
    initial_adapter = adapters.open_initial_adapter(
        plan.recipe, base.sha256, model_config, initial.content_sha256 if initial else None
    )
    dataset = _curate(plan.sources, recorded, request, folder) if plan.sources else None
    if dataset is not None and dataset.sha256 == recorded.dataset.content_sha256:
        training_data = dataset
    else:
        if dataset is not None:
            reporter.note(
                "the curated dataset differs from the recorded dataset; training uses the recorded dataset so that the "
                "models are comparable"
            )
        if recorded.revision:
            _describe_revision(recorded.version, recorded.revision, request)
            training_data = _fetch_revision(recorded.revision, folder / "revision", request)
        elif recorded.dataset_copy:
            training_data = recorded.dataset_copy
        else:
            raise LineageError(
                f"the recorded dataset of {recorded.title} is no longer in any store and was not published",
                hint="Restore the artifact store from a backup.",
            )
        dataset = dataset or training_data
    reporter.step("repeating the fine-tuning")
    with _limit_threads(environment_diff.select_threads(recorded.arithmetic)):
        model = _make_or_overwrite(
            lambda overwrite: tuning.finetune(
                training_data,
                folder / "model",
                plan.recipe,
                overwrite=overwrite,
                seed=recorded.model.seed,
                state=folder / "state",
                reporter=reporter,
                base=base,
                initial_adapter=initial_adapter,
                dataset_uri=recorded.revision,
            )
        )
    files = artifact_diff.compare_payloads(recorded.dataset, dataset, training_data.path)
    if model.sha256 != recorded.model.content_sha256:
        recorded_files = recorded.model_copy.path if recorded.model_copy else None
        if recorded_files is None:
            reporter.step("fetching the recorded model from MLflow")
            try:
                recorded_files = recorded.version.fetch(folder / "recorded").path
            except (RegistryError, ArtifactDamagedError) as error:  # compare the digests only
                reporter.note(f"the recorded files are not available for comparison: {error.message}")
        files += artifact_diff.compare_payloads(recorded.model, model, recorded_files)
    return ReproductionOutcome(plan, dataset.sha256, model.sha256, files, 0.0)


def _curate(
    sources: CurationSources, recorded: RecordedVersion, request: ReproductionRequest, folder: Path
) -> Artifact:
    request.reporter.step("repeating the curation")
    store = request.workdir.store
    earlier = []
    for one in sources.earlier:
        if artifact_store.has_artifact(store, one.content_sha256):
            dataset = artifact_store.load_artifact(store, one.content_sha256, "dataset")
        else:
            dataset = _fetch_revision(one.uri, folder / "earlier" / one.content_sha256, request)
        earlier.append(EarlierRevision(one.uri, dataset))
    return _make_or_overwrite(
        lambda overwrite: curation.curate(
            sources.sources,
            folder / "dataset",
            sources.config,
            overwrite=overwrite,
            seed=recorded.dataset.seed,
            reporter=request.reporter,
            benchmarks=sources.benchmarks,
            earlier=earlier,
            scoring=sources.scoring,
            state=request.workdir.state,
        )
    )


def _fetch_revision(rev: str, folder: Path, request: ReproductionRequest) -> Artifact:
    root, reporter = request.workdir.root, request.reporter
    return _make_or_overwrite(
        lambda overwrite: versioning.fetch(
            rev, folder, request.versioning, workdir=root, reporter=reporter, overwrite=overwrite
        )
    )


def _make_or_overwrite(make: Callable[[bool], Result]) -> Result:
    """Call `make(overwrite)`. Overwrite the result of an interrupted call that had other versions or settings."""
    try:
        return make(False)
    except OutputOccupiedError:
        return make(True)


@contextmanager
def _limit_threads(count: int | None) -> Iterator[None]:
    """Set TUNELINE_THREADS for the duration of the context; None leaves it unchanged."""
    previous = os.environ.get("TUNELINE_THREADS")
    if count is not None:
        os.environ["TUNELINE_THREADS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("TUNELINE_THREADS", None)
        if previous is not None:
            os.environ["TUNELINE_THREADS"] = previous
