"""A registered model made once more: from the recorded data, recipe, seed and versions, and its digests compared with the recorded ones.

Nothing that the store or an earlier run holds of the result is used: dataset and model are made in a folder of their own, and what is
already finished there is taken only where the same reproduction was killed before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from components.common import artifacts, jobs, models, places
from components.common.artifacts import Artifact, Input, Manifest
from components.common.errors import (
    ArtifactDamagedError,
    ConfigurationError,
    EngineMissingError,
    InputError,
    OutputOccupiedError,
    RegistryError,
    TunelineError,
    UsageError,
)
from components.common.models import Base
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_curation import stage as curation
from components.data_curation.config import DataCurationConfig
from components.data_curation.contamination import list_sets
from components.data_curation.stage import Earlier, Source
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.fine_tuning import stage as tuning
from components.fine_tuning.config import FineTuningConfig
from components.model_registry.stage import Champion, registered
from pipelines import differences, lineage, surroundings
from pipelines.config import told
from pipelines.lineage import LineageError
from pipelines.material import expand_demo
from pipelines.surroundings import Difference, Work

CURATED, REVISION, STORE = "curated", "revision", "store"
FINISHED = "reproduction.json"  # in the folder once all is done; without it the next call goes on from there
# What looking for raw files raises, also in a data repository that is gone, out of reach or damaged.
NOT_AS_IT_WAS = (ConfigurationError, InputError, DataVersioningError, EngineMissingError, ArtifactDamagedError)
Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """What is asked for, and where."""

    workdir: Workdir
    versioning: DataVersioningConfig
    reporter: Reporter
    from_revision: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Recorded:
    """What is recorded of a version: its own tags, the manifests of its model and dataset, and where whole copies of these lie here.

    `revision` is the dataset's dvc:// URI, "" where it was never published; `alias` is None where the version was named by its number.
    """

    version: Champion
    alias: str | None
    model: Manifest
    model_copy: Artifact | None
    dataset: Manifest
    dataset_copy: Artifact | None
    revision: str

    @property
    def title(self) -> str:
        """The version as errors name it."""
        return f"{self.version.name} version {self.version.version}"

    @property
    def arithmetic(self) -> Mapping[str, Any]:
        """Device and threads of the training."""
        found = self.model.summary.get("arithmetic")
        return found if isinstance(found, dict) else {}

    @property
    def base(self) -> Input:
        """The base model. `_recorded` has seen that it is named."""
        return next(one for one in self.model.inputs if one.kind == "base_model")


@dataclass(frozen=True)
class Material:
    """The raw files and evaluation sets with the digests that were recorded, and the revisions that rows were placed by."""

    config: DataCurationConfig
    sources: list[Source]
    benchmarks: list[Source]
    earlier: list[Input]


@dataclass(frozen=True)
class Plan:
    """How it will be made again: the dataset's way with its reason, the training's recipe, and what differs here."""

    recorded: Recorded
    how: str
    why: str
    material: Material | None
    recipe: FineTuningConfig
    differences: list[Difference]


@dataclass(frozen=True)
class Outcome:
    """What came of it. Digests are None where nothing was made (a dry run); `files` are the payload files that differ."""

    plan: Plan
    dataset: str | None
    model: str | None
    files: list[dict[str, Any]]
    seconds: float
    kept: Path | None = None

    @property
    def equal(self) -> bool:
        """Whether dataset and model are what was recorded, digest for digest."""
        recorded = self.plan.recorded
        return (self.dataset, self.model) == (recorded.dataset.content_sha256, recorded.model.content_sha256)

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline reproduce --json` prints."""
        plan, version = self.plan, self.plan.recorded.version
        return {
            "name": version.name,
            "version": version.version,
            "alias": plan.recorded.alias,
            "dataset": {**_compared(plan.recorded.dataset, self.dataset), "how": plan.how, "why": plan.why},
            "model": _compared(plan.recorded.model, self.model),
            "differences": [asdict(one) for one in plan.differences],
            "files": self.files,
            "seconds": round(self.seconds, 1),
        }


def _compared(recorded: Manifest, made: str | None) -> dict[str, Any]:
    return {"recorded": recorded.content_sha256, "reproduced": made, "equal": made == recorded.content_sha256 if made else None}


def reproduce(reference: str, asked: Asked, tell: Callable[[Plan], None], *, dry_run: bool = False) -> Outcome:
    """Make the model of NAME@ALIAS, NAME@3, NAME/3 or NAME (its champion) again and compare it with what is recorded.

    `tell` is given the plan before any work is done; a dry run ends there. A killed call goes on where it was; a finished one leaves
    nothing but, with `asked.keep`, what it made in <workdir>/reproduce/<name>-<version>. Raises RegistryError for an unknown version or
    one that does not say what it came from, LineageError where what it names is lost or another one by now, DataVersioningError and
    ArtifactDamagedError for a revision that is lost or damaged, and BusyError where the same version is being reproduced.
    """
    began = time.monotonic()
    name, which = lineage.parse(reference)
    version = registered(name, which)
    with _place(asked, version, dry_run) as place:
        recorded = _recorded(version, None if which.isdecimal() else which, asked)
        plan = _plan(recorded, asked, place)
        tell(plan)
        if dry_run:
            return Outcome(plan, None, None, [], time.monotonic() - began)
        outcome = _carry_out(plan, asked, place)
        outcome = replace(outcome, seconds=time.monotonic() - began, kept=place if asked.keep else None)
        artifacts.write_atomically(place / FINISHED, json.dumps(outcome.as_dict(), indent=2) + "\n")
    return outcome


@contextmanager
def _place(asked: Asked, version: Champion, dry_run: bool) -> Iterator[Path]:
    """The folder of this reproduction, held so that no second one works there. It goes once all is done, unless it is to be kept."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="tuneline-reproduce-") as scratch:
            yield Path(scratch)
        return
    place = asked.workdir.root / "reproduce" / f"{version.name}-{version.version}"
    place.mkdir(parents=True, exist_ok=True)
    try:
        with jobs.held(place):
            if (place / FINISHED).exists():  # an earlier one that was kept, or killed while it tidied up
                _empty(place)
            yield place
            if not asked.keep:
                _empty(place)
    finally:
        for folder in (place, place.parent):
            with suppress(OSError):  # what is left in it is for the next call
                folder.rmdir()


def _empty(place: Path) -> None:
    """Remove what was made, the note that all is done last; the hold stays."""
    entries = [path for path in place.iterdir() if path.name != FINISHED and not path.name.startswith((jobs.HOLDER, f".{jobs.HOLDER}"))]
    for path in entries:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (place / FINISHED).unlink(missing_ok=True)


def _recorded(version: Champion, alias: str | None, asked: Asked) -> Recorded:
    """All that is recorded of a version, in agreement with its tags."""
    asked.reporter.step("looking at what is recorded")
    model_copy = _copy("model", version.model_sha256, [version.store_uri], asked.workdir)
    model = model_copy.manifest if model_copy else version.manifest()
    for kind in ("dataset", "base_model"):
        _check_named(version, kind, model.input(kind))
    if model.content_sha256 != version.model_sha256:
        raise _disagreement(version, "model", "MLflow keeps the files of the", model.content_sha256)
    sha256 = version.tags["tuneline.dataset_sha256"]
    revision = version.tags.get("tuneline.dataset_uri", "")
    if not revision.startswith("dvc://"):
        revision = lineage.published_as(sha256, asked.versioning, asked.workdir)
    dataset_copy = _copy("dataset", sha256, lineage.dataset_places(version), asked.workdir)
    dataset = dataset_copy.manifest if dataset_copy else _of_revision(version, revision, asked)
    return Recorded(version, alias, model, model_copy, dataset, dataset_copy, revision)


def _copy(kind: str, sha256: str, recorded: Sequence[str], workdir: Workdir) -> Artifact | None:
    """A whole copy on this machine; None where there is none, since both kinds can be had from elsewhere."""
    try:
        return lineage.find(kind, sha256, [uri for uri in recorded if uri], workdir.store)
    except TunelineError:
        return None


def _check_named(version: Champion, kind: str, named: Input | None) -> None:
    """Raise where the version does not say what it was made from, or its model says another thing."""
    tagged = version.tags.get(f"tuneline.{kind}_sha256")
    if not tagged:
        raise RegistryError(
            f"{version.name} version {version.version} does not say from which {kind.replace('_', ' ')} it was made: "
            f"it has no tag tuneline.{kind}_sha256",
            hint="Register the model again with `tuneline register`, which writes the tags; then reproduce that version.",
        )
    if named is None or named.content_sha256 != tagged:
        raise _disagreement(version, kind, "its model was made from the", named.content_sha256 if named else "nothing")


def _disagreement(version: Champion, kind: str, what: str, found: str) -> LineageError:
    tagged, title = version.tags.get(f"tuneline.{kind}_sha256", ""), kind.replace("_", " ")
    return LineageError(
        f"{version.name} version {version.version} names the {title} {tagged[:12]}, and {what} {title} {found[:12]}",
        hint="Its tags or its files were exchanged; `tuneline lineage` names every link that does not agree.",
    )


def _of_revision(version: Champion, revision: str, asked: Asked) -> Manifest:
    """What is recorded of a dataset that is in no store any more. Raises LineageError where it was not published either."""
    if not revision:
        sha256 = version.tags["tuneline.dataset_sha256"]
        raise LineageError(
            f"the dataset {sha256[:12]} of {version.name} version {version.version} is in no store any more and was not published",
            hint="Restore the artifact store from a backup, or name the work folder it lies in with --workdir.",
        )
    return _checked_revision(version, revision, asked)


def _checked_revision(version: Champion, revision: str, asked: Asked) -> Manifest:
    """The manifest of the revision, which is that of the version's own dataset."""
    found, manifest = versioning.described(revision, asked.versioning, workdir=asked.workdir.root)
    if found.content_sha256 != version.tags["tuneline.dataset_sha256"]:
        raise _disagreement(version, "dataset", f"the revision {found.tag} holds the", found.content_sha256)
    return manifest


def _plan(recorded: Recorded, asked: Asked, place: Path) -> Plan:
    how, why, material = _way(recorded, asked, Workdir(place))
    recipe = _read(FineTuningConfig, recorded.model, f"the recipe of {recorded.title}")
    if how == REVISION:
        _checked_revision(recorded.version, recorded.revision, asked)  # said before hours are spent
    works = [_training(recorded, recipe)]
    if material:
        works.insert(0, _curation(recorded, material))
    device = surroundings.device_to_use(recipe.device, recorded.arithmetic)
    found = surroundings.differences(works, recorded.base, recorded.arithmetic, device)
    return Plan(recorded, how, why, material, recipe.model_copy(update={"device": device}), found)


def _read(settings: type[Settings], manifest: Manifest, what: str) -> Settings:
    """The settings that a manifest records. Raises ConfigurationError for those of a tuneline that this one does not understand."""
    try:
        return settings.model_validate(manifest.config)
    except ValidationError as error:
        made = manifest.produced_by
        raise ConfigurationError(
            told(error, what, settings),
            hint=f"Reproduce it with the tuneline it was made with: {made.get('tuneline')}, commit {made.get('git_commit')}.",
        ) from None


def _training(recorded: Recorded, recipe: FineTuningConfig) -> Work:
    """The key is taken as if the arithmetic were that of then, so that it tells whether the code is."""
    manifest = recorded.model
    inputs = (recorded.dataset.content_sha256, recorded.base.content_sha256)
    key = tuning.key_of(*inputs, recipe, manifest.seed, recorded.arithmetic)
    return Work(tuning.STAGE, surroundings.MODEL, manifest, recipe, key)


def _curation(recorded: Recorded, material: Material) -> Work:
    manifest, config = recorded.dataset, material.config
    return Work(curation.STAGE, surroundings.DATASET, manifest, config, curation.key_of(manifest.inputs, config, manifest.seed))


def _way(recorded: Recorded, asked: Asked, scratch: Workdir) -> tuple[str, str, Material | None]:
    """How the dataset is had again, and why: curated where all that it was made from is here as it was, else as it was kept."""
    if asked.from_revision and not recorded.revision:
        raise UsageError(f"--from-revision: the dataset of {recorded.title} was not published as a revision", hint="Leave the option out.")
    if asked.from_revision:
        return REVISION, "--from-revision was given", None
    asked.reporter.step("looking at the raw files")
    try:
        return CURATED, "all raw files are here as they were", _material(recorded, asked, scratch)
    except NOT_AS_IT_WAS as error:
        return REVISION if recorded.revision else STORE, error.message, None


def _material(recorded: Recorded, asked: Asked, scratch: Workdir) -> Material:
    """What the dataset was made from. Raises one of NOT_AS_IT_WAS where not all of it is here as it was."""
    manifest = recorded.dataset
    config = _read(DataCurationConfig, manifest, "the recorded data_curation")
    curation.key_of(manifest.inputs, config, manifest.seed)  # raises where the model that finds names is gone

    def obtain(uri: str) -> Path:
        return versioning.obtain(uri, scratch.root / "sources", asked.reporter)

    sources = curation.list_sources(expand_demo(config.sources, scratch), Path.cwd(), obtain=obtain)
    sets = list_sets(config.decontamination.sets, Path.cwd())
    kinds = {kind: [one for one in manifest.inputs if one.kind == kind] for kind in ("raw", "evaluation_set", curation.EARLIER)}
    _check_earlier(kinds[curation.EARLIER], asked)
    return Material(config, _same(kinds["raw"], sources), _same(kinds["evaluation_set"], sets), kinds[curation.EARLIER])


def _same(recorded: Sequence[Input], found: Sequence[Source]) -> list[Source]:
    """Of the files found those that were recorded. Raises InputError naming the first that is not among them."""
    wanted, taken = Counter((one.uri, one.content_sha256) for one in recorded), []
    for source in found:
        if wanted[source.name, source.sha256] > 0:
            wanted[source.name, source.sha256] -= 1
            taken.append(source)
    for (name, _), lacking in wanted.items():
        if lacking > 0:
            changed = any(source.name == name for source in found)
            raise InputError(f"{name} {'has changed since it was read' if changed else 'is no longer where it was read'}")
    return taken


def _check_earlier(recorded: Sequence[Input], asked: Asked) -> None:
    """Raise InputError where a revision that rows were placed by is gone."""
    lacking = [one for one in recorded if not places.holds(asked.workdir.store, one.content_sha256)]
    known = {(v.tag, v.content_sha256) for v in versioning.versions(asked.versioning, workdir=asked.workdir.root)} if lacking else set()
    for one in lacking:
        if (one.uri, one.content_sha256) not in known:
            raise InputError(f"the revision {one.uri}, which rows were placed by, is not there any more")


def _carry_out(plan: Plan, asked: Asked, place: Path) -> Outcome:
    recorded = plan.recorded
    base = _base(recorded, asked.reporter)
    dataset = _dataset(plan, asked, place)
    learned = dataset
    if dataset.sha256 != recorded.dataset.content_sha256:
        asked.reporter.note("the curated dataset is another one: the training takes the recorded one, so that the model can be compared")
        learned = _as_kept(recorded, asked, place)
    model = _model(plan, learned, base, asked.reporter, place)
    files = differences.payload(recorded.dataset, dataset, learned.path)
    if model.sha256 != recorded.model.content_sha256:
        files += differences.payload(recorded.model, model, _recorded_files(recorded, asked, place))
    return Outcome(plan, dataset.sha256, model.sha256, files, 0.0)


def _base(recorded: Recorded, reporter: Reporter) -> Base:
    """The base model, as it was. Raises LineageError where it is gone or another one by now."""
    named = recorded.base
    reporter.step("looking at the base model")
    try:
        return models.base_model(named.uri, reporter, named.content_sha256)
    except (ConfigurationError, ArtifactDamagedError) as error:
        raise LineageError(
            f"the base model of {recorded.title} is not here as it was: {error.message}",
            hint=f"Put the files with the digest {named.content_sha256[:12]} back to {named.uri}; without them nothing can be reproduced.",
        ) from error


def _dataset(plan: Plan, asked: Asked, place: Path) -> Artifact:
    if plan.material is None:
        return _as_kept(plan.recorded, asked, place)
    asked.reporter.step("curating again")
    material, manifest = plan.material, plan.recorded.dataset
    earlier = [_earlier(one, asked, place) for one in material.earlier]
    options: dict[str, Any] = {"seed": manifest.seed, "reporter": asked.reporter, "benchmarks": material.benchmarks, "earlier": earlier}
    return _anew(lambda overwrite: curation.curate(material.sources, place / "dataset", material.config, overwrite=overwrite, **options))


def _earlier(named: Input, asked: Asked, place: Path) -> Earlier:
    """A revision that rows were placed by, from the store or fetched."""
    store = asked.workdir.store
    if places.holds(store, named.content_sha256):
        return Earlier(named.uri, places.stored(store, named.content_sha256, "dataset"))
    return Earlier(named.uri, _fetched(named.uri, place / "earlier" / named.content_sha256, asked))


def _as_kept(recorded: Recorded, asked: Asked, place: Path) -> Artifact:
    """The recorded dataset, from its revision; from the store where it was not published."""
    if recorded.revision:
        _checked_revision(recorded.version, recorded.revision, asked)
        return _fetched(recorded.revision, place / "revision", asked)
    if recorded.dataset_copy:
        return recorded.dataset_copy
    raise LineageError(
        f"the recorded dataset of {recorded.title} is in no store any more and was not published",
        hint="Restore the artifact store from a backup.",
    )


def _fetched(rev: str, folder: Path, asked: Asked) -> Artifact:
    workdir, reporter = asked.workdir.root, asked.reporter
    return _anew(lambda overwrite: versioning.fetch(rev, folder, asked.versioning, workdir=workdir, reporter=reporter, overwrite=overwrite))


def _model(plan: Plan, dataset: Artifact, base: Base, reporter: Reporter, place: Path) -> Artifact:
    reporter.step("fine-tuning again")
    recorded = plan.recorded
    options: dict[str, Any] = {"seed": recorded.model.seed, "state": place / "state", "reporter": reporter, "base": base}
    options["dataset_uri"] = recorded.revision
    with _threads(surroundings.threads_to_use(recorded.arithmetic)):
        return _anew(lambda overwrite: tuning.finetune(dataset, place / "model", plan.recipe, overwrite=overwrite, **options))


def _anew(make: Callable[[bool], Result]) -> Result:
    """What `make` makes, given whether to overwrite: what a killed call finished under other versions or settings is replaced."""
    try:
        return make(False)
    except OutputOccupiedError:
        return make(True)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many threads for torch for a while; None leaves them as they are."""
    before = os.environ.get("TUNELINE_THREADS")
    if count is not None:
        os.environ["TUNELINE_THREADS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("TUNELINE_THREADS", None)
        if before is not None:
            os.environ["TUNELINE_THREADS"] = before


def _recorded_files(recorded: Recorded, asked: Asked, place: Path) -> Path | None:
    """The recorded model's files, to look into; None where only their digests are left."""
    if recorded.model_copy:
        return recorded.model_copy.path
    asked.reporter.step("fetching the recorded model from MLflow")
    try:
        return recorded.version.fetch(place / "recorded").path
    except (RegistryError, ArtifactDamagedError) as error:
        asked.reporter.note(f"the recorded files cannot be looked into: {error.message}")
        return None
