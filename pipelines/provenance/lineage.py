"""Lineage of a registered model: from the version and its package back to the dataset's revision and the raw files.

The version's tags record the digests of its inputs. The trace verifies that each input is intact and records the same
digests. It continues after a broken link, so that one run reports all problems. If the base model is a tuned model, or
the training started from an initial adapter, the trace continues with the inputs of that model.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.models import model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.reporting import html_report
from components.common.runtime.errors import ArtifactDamagedError, RegistryError, TunelineError, UsageError
from components.common.runtime.relative_paths import shorten_paths
from components.common.runtime.reporters import Reporter
from components.common.runtime.terminal import escape_controls
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.databases.table_extract import describe_extract
from components.data_curation.reading.extracts import EXTRACT_KIND, EXTRACT_SCHEME
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.stage import find_sources_by_name
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.fine_tuning.adapters import INITIAL_ADAPTER_INPUT
from components.fine_tuning.distillation import TEACHER_INPUT
from components.fine_tuning.reward_sources import REWARD_INPUT
from components.model_registry.promotion import CHAMPION
from components.model_registry.stage import RegisteredModel, find_by_digest, get_registered
from components.triton_packaging.stage import read_lineage
from pipelines.steps.curation_inputs import DEMO_SOURCE, demo_dataset_path

if TYPE_CHECKING:
    from rich.text import Text

INTACT, DAMAGED, MISSING, CHANGED, UNCHECKED = "intact", "damaged", "missing", "changed", "unchecked"
RESTORE_HINT = "Mount the artifact store that contains the artifact, or restore the artifact from a backup."
UNWRAPPED_COLUMNS = 100_000  # longer than any link
STATUS_MARKS = {
    INTACT: ("✔", "green"),
    DAMAGED: ("✘", "bold red"),
    MISSING: ("✘", "bold red"),
    CHANGED: ("!", "yellow"),
    UNCHECKED: ("?", "yellow"),
}
# Inputs of a model that are models, and their descriptions.
OTHER_MODELS = {INITIAL_ADAPTER_INPUT: "initial adapter", REWARD_INPUT: "scored the answers during training"}
PARENT_KINDS = {  # in the printed tree
    "repository": "version",
    "evaluation": "version",
    "model": "version",
    "base_model": "model",
    "dataset": "model",
    "revision": "dataset",
    "raw": "dataset",
}


class LineageError(TunelineError):
    """A link of the chain is broken: damaged, missing, or in conflict with the version's tags."""

    kind = "lineage"


class MissingArtifactError(TunelineError):
    """The artifact of a link was not found."""


@dataclass
class Link:
    """A link of the chain, such as the dataset.

    Attributes:
        inputs: digests of the links that it was built from.
        parent: parent in the printed tree. Default: the preceding link of the kind in PARENT_KINDS.
        artifact: the verified artifact; readable while the trace is open.
        base: the verified base model, if it is on this machine.
    """

    kind: str
    sha256: str
    uri: str
    inputs: list[str] = field(default_factory=list)
    status: str = INTACT
    detail: str = ""
    hint: str = ""
    parent: Link | None = None
    artifact: Artifact | None = field(default=None, repr=False)
    base: LocalBaseModel | None = field(default=None, repr=False)

    @property
    def exact_kind(self) -> str:
        """The kind of the artifact, such as reward_model, which `kind` calls a model."""
        return self.artifact.manifest.kind if self.artifact else self.kind

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.exact_kind.replace("_", " ")


@dataclass(frozen=True, repr=False)
class Lineage:
    """A model version and its chain, newest link first."""

    name: str
    version: str
    alias: str | None
    chain: list[Link]

    @property
    def broken_links(self) -> list[Link]:
        """The damaged and missing links, except raw files, which may change after curation."""
        return [link for link in self.chain if link.kind != "raw" and link.status in (DAMAGED, MISSING)]

    def get_links(self, kind: str) -> list[Link]:
        """Return the links of a kind."""
        return [link for link in self.chain if link.kind == kind]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline lineage`; `intact`: each link was checked and matches its record."""
        names = ("sha256", "uri", "inputs", "status", "detail")
        chain = [{"kind": link.exact_kind, **{name: getattr(link, name) for name in names}} for link in self.chain]
        intact = all(link.status == INTACT for link in self.chain)
        return {"name": self.name, "version": self.version, "alias": self.alias, "intact": intact, "chain": chain}

    def __repr__(self) -> str:
        return f"Lineage({self.name}/{self.version}, links={len(self.chain)}, intact={self.as_dict()['intact']})"

    def _repr_html_(self) -> str:
        title = f"<b>Lineage of {escape(self.name)} version {escape(self.version)}</b>"
        rows = [
            [
                *(link.title, link.status, link.sha256[:12], link.detail),
                shorten_paths(_describe_location(link).removeprefix("file://")),
            ]
            for link in self.chain
        ]
        head = ["link", "status", "digest", "detail", "location"]
        return title + html_report.render_table(head, rows) + html_report.render_paragraph(summarize(self))

    def raise_if_broken(self) -> None:
        """Raise a LineageError that lists all broken links, if any."""
        broken = self.broken_links
        if not broken:
            return
        count = "1 link" if len(broken) == 1 else f"{len(broken)} links"
        details = "; ".join(f"{link.title} {link.sha256[:12]}: {link.detail}" for link in broken)
        raise LineageError(
            f"the lineage of {self.name} version {self.version} is broken in {count}: {details}",
            hint=broken[0].hint,
            stage="lineage",
        )


@dataclass(frozen=True)
class _TraceContext:
    """The version to trace, and the locations to search for its inputs."""

    version: RegisteredModel
    workdir: Workdir
    config: DataVersioningConfig
    scratch: Path
    reporter: Reporter

    def get_tag(self, name: str) -> str:
        """Return the version's tag tuneline.<name>, or ""."""
        return self.version.tags.get(f"tuneline.{name}", "")

    def get_tagged_digests(self, *kinds: str) -> dict[str, str]:
        """Return the digests of these kinds in the version's tags."""
        return {kind: self.get_tag(f"{kind}_sha256") for kind in kinds if self.get_tag(f"{kind}_sha256")}

    def describe_parent(self, manifest: Manifest) -> _TraceContext:
        """Return the context of a model that this version was tuned from, with the model's inputs instead of tags."""
        values = [(f"tuneline.{one.kind}", one) for one in manifest.inputs]
        tags = {f"{name}_sha256": one.content_sha256 for name, one in values}
        tags |= {f"{name}_uri": one.uri for name, one in values}
        return replace(self, version=self.version.model_copy(update={"tags": tags}))


def trace(reference: str, workdir: Workdir, config: DataVersioningConfig, reporter: Reporter) -> Lineage:
    """Trace NAME@ALIAS, NAME@3, NAME/3 or NAME (its champion), and verify every digest.

    Broken links are recorded in the result; see `Lineage.raise_if_broken`.

    Raises:
        RegistryError: the model, version or alias does not exist.
        UsageError: `reference` is malformed.
    """
    with open_trace(reference, workdir, config, reporter) as lineage:
        return lineage


@contextmanager
def open_trace(reference: str, workdir: Workdir, config: DataVersioningConfig, reporter: Reporter) -> Iterator[Lineage]:
    """Provide the result of `trace`, with the files of the links' artifacts until the block ends."""
    name, alias_or_number = parse_reference(reference)
    version = get_registered(name, alias_or_number)
    with tempfile.TemporaryDirectory(prefix="tuneline-lineage-") as scratch:
        context = _TraceContext(version, workdir, config, Path(scratch), reporter)
        outputs, model = _check_outputs(context)
        # The digest of the version covers its name, number and tagged digests.
        digests = context.get_tagged_digests("repository", "evaluation", "model", "base_model", "dataset")
        uri = f"models:/{version.name}/{version.version}"
        root = Link("version", hashing.digest([version.name, version.version, digests]), uri)
        root.inputs = [link.sha256 for link in outputs]
        base = _check_base(context)
        reporter.step("checking the version")
        with _recording_failure(root):
            logged = version.read_logged_sha256()
            if logged != version.model_sha256:
                raise _mismatch_error("the version's files in MLflow", "model", logged, version.model_sha256)
        others = _trace_other_models(context, model.manifest, outputs[-1]) if model else []
        chain = [root, *outputs, base, *_check_data(context), *others, *_trace_ancestors(context, base)]
        alias = None if alias_or_number.isdecimal() else alias_or_number
        yield Lineage(version.name, version.version, alias, chain)


def parse_reference(reference: str) -> tuple[str, str]:
    """Return the name of the model, and the alias or version number.

    Raises:
        UsageError: `reference` is malformed.
    """
    match = re.fullmatch(r"(?:models:/)?([^@/:]+)(?:[@/]([^@/:]+))?", reference)
    if not match:
        raise UsageError(
            f"{reference!r} is not a reference to a model version",
            hint="Write NAME@ALIAS, NAME@3, or NAME for its champion.",
        )
    return match[1], match[2] or CHAMPION


@contextmanager
def _recording_failure(link: Link) -> Iterator[None]:
    """Record an error as the link's failure, so that the trace continues."""
    try:
        yield
    except (TunelineError, OSError) as error:
        failure = _translate_error(error)
        link.status = MISSING if isinstance(failure, MissingArtifactError) else DAMAGED
        link.detail, link.hint = failure.message, failure.hint


def _translate_error(error: TunelineError | OSError) -> TunelineError:
    """Convert an OSError to an error with a hint."""
    if isinstance(error, TunelineError):
        return error
    return LineageError(
        f"{error.filename or 'a file'} cannot be read: {error.strerror or error}",
        hint="Check the permissions of the file and its folders, and check that its disk is mounted and intact.",
    )


def _check_outputs(context: _TraceContext) -> tuple[list[Link], Artifact | None]:
    """Check the Triton model repository if the version has one, the evaluation and the model, which is the last link.

    Returns:
        The links, and the model's artifact; None if it is broken.
    """
    version, links = context.version, []
    if context.get_tag("repository_sha256"):
        uris = [context.get_tag("repository_store_uri")]
        link, package = _check_artifact(context, "repository", uris, ("model", "base_model"))
        links.append(link)
        if package:
            with _recording_failure(link):
                recorded = read_lineage(package)
                for kind, expected in context.get_tagged_digests("model", "base_model", "dataset").items():
                    actual = recorded.get(f"{kind}_sha256")
                    if actual != expected:
                        raise _mismatch_error("config.pbtxt of the repository", kind, actual, expected)

    uris, tagged = [context.get_tag("evaluation_store_uri")], context.get_tag("verdict")
    input_kinds = ("model", "dataset", "base_model")
    link, evaluation = _check_artifact(
        context, "evaluation", uris, input_kinds, lambda: _fetch_evaluation_from_mlflow(context)
    )
    links.append(link)
    if evaluation:
        with _recording_failure(link):
            verdict = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8")).get("verdict")
            if verdict != tagged:
                raise LineageError(
                    f"the verdict in evaluation.json is {verdict or 'missing'}; "
                    f"the version records {tagged or 'no verdict'}",
                    hint="Register the model again with its evaluation.",
                )
    link.detail = link.detail or f"verdict: {tagged}"

    uris, inputs = [context.get_tag("store_uri")], ("dataset", "base_model")
    fetch = partial(_fetch_from_mlflow, context, version)
    link, model = _check_artifact(context, "model", uris, inputs, fetch)
    return [*links, link], model


def _fetch_from_mlflow(context: _TraceContext, version: RegisteredModel | None) -> tuple[Artifact, str]:
    """Fetch the model of a version, and return it with its URI."""
    if version is None:
        raise MissingArtifactError("no version is registered with this digest", hint=RESTORE_HINT)
    context.reporter.step("fetching the model from MLflow")
    uri, folder = f"models:/{version.name}/{version.version}", context.scratch / version.model_sha256
    try:
        return version.fetch(folder), uri
    except ArtifactDamagedError as error:
        raise LineageError(
            error.message.replace(f"{folder}.part", uri),
            hint="Restore the model's folder in MLflow's artifact store from a backup.",
        ) from None


def _fetch_evaluation_from_mlflow(context: _TraceContext) -> tuple[Artifact, str]:
    """Fetch the evaluation that MLflow stores with the version's model, and return it with its URI."""
    version, sha256 = context.version, context.get_tag("evaluation_sha256")
    context.reporter.step("fetching the evaluation from MLflow")
    evaluation = version.fetch_evaluation(context.scratch / f"evaluation-{sha256}")
    if evaluation.sha256 != sha256:
        raise _mismatch_error("MLflow's copy", "evaluation", evaluation.sha256, sha256)
    return evaluation, f"models:/{version.name}/{version.version}/evaluation"


def _check_base(context: _TraceContext) -> Link:
    """Check the base model unless that requires a download, a conversion or a merge."""
    context.reporter.step("checking the base model")
    base, store = (
        Link("base_model", context.get_tag("base_model_sha256"), context.get_tag("base_model_uri")),
        context.workdir.store,
    )
    with _recording_failure(base):
        is_stored = base.uri.startswith(artifact_store.STORE_PREFIX)
        if is_stored and not artifact_store.has_artifact(store, base.uri.removeprefix(artifact_store.STORE_PREFIX)):
            message = f"the base model was not found in {artifact_store.describe_store(store)}"
            raise MissingArtifactError(message, hint=RESTORE_HINT)
        is_missing = ":" not in base.uri and not Path(base.uri).exists()
        local = None if is_missing else model_loading.find_local_base_model(base.uri)
        if local is None:
            base.status, base.detail = UNCHECKED, f"{base.uri or 'the base model'} is not on this machine"
        elif local.sha256 != base.sha256:
            raise _mismatch_error(f"the files of {base.uri}", "base_model", local.sha256, base.sha256)
        base.base = local
    return base


def _trace_ancestors(context: _TraceContext, base: Link) -> list[Link]:
    """Return the links of the inputs of a base model that is a tuned model, or into which an adapter was merged."""
    manifest: Manifest | None = None
    with _recording_failure(base):
        manifest = _find_base_manifest(context, base)
    if manifest is None:
        return []
    base.inputs = [one.content_sha256 for one in manifest.inputs]
    parent, links = context.describe_parent(manifest), []
    if merged := manifest.find_input("model"):
        link, adapter = _check_ancestor(parent, merged, ("base_model",))
        if adapter:
            manifest = adapter.manifest
            parent = context.describe_parent(manifest)
        link.parent, links = base, [link]
    data = _check_data(parent) if parent.get_tag("dataset_sha256") else []
    next_base = _check_base(parent)
    if not links:
        for link in (next_base, *data[:1]):
            link.parent = base
    others = _trace_other_models(context, manifest, links[0] if links else base)
    return [*links, next_base, *data, *others, *_trace_ancestors(parent, next_base)]


def _trace_other_models(context: _TraceContext, manifest: Manifest, model: Link) -> list[Link]:
    """Return the links of the models, other than its base, that a model's training used.

    An initial adapter is without its base, which is the base of the model.
    """
    links: list[Link] = []
    for source in manifest.inputs:
        if source.kind == TEACHER_INPUT:
            own = source.model_copy(update={"kind": "base_model"})
            context_of_teacher = context.describe_parent(manifest.model_copy(update={"inputs": [own]}))
            teacher = _check_base(context_of_teacher)
            teacher.parent, teacher.detail = model, teacher.detail or "teacher"
            model.inputs = [*model.inputs, teacher.sha256]
            links += [teacher, *_trace_ancestors(context_of_teacher, teacher)]
        if source.kind not in OTHER_MODELS:
            continue
        own = source.model_copy(update={"kind": "model"})
        parent = context.describe_parent(manifest.model_copy(update={"inputs": [own]}))
        link, artifact = _check_ancestor(parent, own, ())
        link.parent, link.detail = model, link.detail or OTHER_MODELS[source.kind]
        model.inputs = [*model.inputs, link.sha256]
        links.append(link)
        if artifact is None:
            continue
        trained = context.describe_parent(artifact.manifest)
        links += _check_data(trained)
        if source.kind == REWARD_INPUT:
            base = _check_base(trained)
            base.parent = link
            links += [base, *_trace_ancestors(trained, base)]
        links += _trace_other_models(context, artifact.manifest, link)
    return links


def _check_ancestor(
    context: _TraceContext, model: ArtifactInput, input_kinds: Sequence[str]
) -> tuple[Link, Artifact | None]:
    """Find and verify a model that another model was built from, in its folder, the store or MLflow."""
    uris = [Path(model.uri).as_uri()] if Path(model.uri).is_absolute() else []

    def fetch() -> tuple[Artifact, str]:
        # The model may be registered under another name, as a stage of a chain.
        found = find_by_digest(context.version.name, model.content_sha256) or find_by_digest("", model.content_sha256)
        return _fetch_from_mlflow(context, found)

    link, artifact = _check_artifact(context, "model", uris, input_kinds, fetch)
    if artifact:
        link.inputs = [
            one.content_sha256 for one in artifact.manifest.inputs if one.kind not in (*OTHER_MODELS, TEACHER_INPUT)
        ]
    return link, artifact


def _find_base_manifest(context: _TraceContext, base: Link) -> Manifest | None:
    """Return the manifest of a base model that was tuned from another; None for an original base model."""
    folder = Path(base.uri)
    if ":" not in base.uri and (folder / artifact_folder.MANIFEST_FILENAME).exists():
        manifest: Manifest | None = artifact_folder.read_manifest(folder)
    else:
        manifest = artifact_store.read_manifest(context.workdir.store, base.sha256) if base.sha256 else None
    is_tuned = manifest and manifest.content_sha256 == base.sha256 and manifest.find_input("base_model")
    return manifest if is_tuned else None


def _check_data(context: _TraceContext) -> list[Link]:
    """Check the dataset, its revision and the raw files. A dataset without a stored copy is read from its revision."""
    revision, published = _check_revision(context)

    def fetch_from_revision() -> tuple[Artifact, str]:
        if published is None:
            raise MissingArtifactError("no intact revision of the dataset is available", hint=RESTORE_HINT)
        return Artifact(context.scratch, published), revision.uri

    uris = list_dataset_uris(context.version)
    link, dataset = _check_artifact(context, "dataset", uris, (), fetch_from_revision)
    manifest, raw = dataset.manifest if dataset else published, []
    sources = [SourceEntry.model_validate(one).path for one in manifest.config.get("sources", [])] if manifest else []
    patterns = [str(demo_dataset_path(context.workdir)) if one == DEMO_SOURCE else one for one in sources]
    for one in manifest.inputs if manifest else []:
        if one.kind != "raw":
            continue
        if one.uri.startswith(EXTRACT_SCHEME):
            raw.append(_check_extract(context, one))
            continue
        files = find_sources_by_name(one.uri, patterns, Path.cwd())
        same = next((file for file in files if file.sha256 == one.content_sha256), None)
        file = Link("raw", one.content_sha256, (same or files[0]).path.as_uri() if files else one.uri)
        if not files:
            file.status, file.detail = MISSING, f"{one.uri} no longer exists"
        elif not same:
            file.status = CHANGED
            file.detail = f"{one.uri} has changed since curation; its digest is now {files[0].sha256[:12]}"
        raw.append(file)
    link.inputs = revision.inputs = [file.sha256 for file in raw]
    return [link, revision, *raw]


def _check_extract(context: _TraceContext, recorded: ArtifactInput) -> Link:
    """Verify the rows that were read from a database. The database itself is not read."""
    link = Link("raw", recorded.content_sha256, recorded.uri)
    with _recording_failure(link):
        extract = find_extract(recorded, context.version, context.workdir)
        link.uri, link.detail = artifact_store.get_artifact_uri(extract), describe_extract(extract)
    return link


def find_extract(recorded: ArtifactInput, version: RegisteredModel, workdir: Workdir) -> Artifact:
    """Return the intact extract of a dataset's input, from the version's store or the store of the workdir.

    Raises:
        MissingArtifactError: no store contains the extract.
        TunelineError: only damaged copies were found.
    """
    sibling = artifact_store.build_sibling_uri(version.store_uri, recorded.content_sha256)
    extract = find_artifact(EXTRACT_KIND, recorded.content_sha256, [sibling] if sibling else [], workdir.store)
    if extract is None:
        store = artifact_store.describe_store(workdir.store)
        raise MissingArtifactError(f"{recorded.uri} was not found in {store}", hint=RESTORE_HINT)
    return extract


def list_dataset_uris(version: RegisteredModel) -> list[str]:
    """Return candidate URIs of the dataset: next to the model in its store, and the path from `tuneline finetune`."""
    sibling = artifact_store.build_sibling_uri(version.store_uri, version.tags.get("tuneline.dataset_sha256", ""))
    given = version.tags.get("tuneline.dataset_uri", "")
    folder = Path(given).absolute().as_uri() if given and ":" not in given else None
    return [uri for uri in (sibling, folder) if uri]


def _check_revision(context: _TraceContext) -> tuple[Link, Manifest | None]:
    """Verify the dataset's revision; its manifest is None if no revision was published or the link is broken."""
    context.reporter.step("checking the dataset's revision")
    sha256, published = context.get_tag("dataset_sha256"), None
    link = Link("revision", sha256, context.get_tag("dataset_uri"))
    with _recording_failure(link):
        if not link.uri.startswith("dvc://"):
            link.uri = find_revision_uri(sha256, context.config, context.workdir)
        if not link.uri:
            link.status, link.detail = UNCHECKED, "the dataset was not published as a revision"
            return link, None
        version, manifest = versioning.check_revision(
            link.uri, context.config, workdir=context.workdir.root, reporter=context.reporter
        )
        if version.content_sha256 != sha256:
            raise _mismatch_error(f"the revision {version.tag}", "dataset", version.content_sha256, sha256)
        for name, actual in (("md5", version.md5), ("tag", version.tag)):
            tagged = context.get_tag(f"dataset_{name}")
            if tagged and tagged != actual:
                raise LineageError(
                    f"the revision {version.rev[:12]}: {name} is {actual}; the version records {tagged}",
                    hint="Compare the data repository and the version's tags with a backup.",
                )
        link.detail, published = version.tag, manifest
    return link, published


def find_revision_uri(sha256: str, config: DataVersioningConfig, workdir: Workdir) -> str:
    """Return the URI of the latest revision with this content digest, or ""."""
    known = versioning.list_versions(config, workdir=workdir.root)
    return next((version.uri for version in reversed(known) if version.content_sha256 == sha256), "")


def _check_artifact(
    context: _TraceContext,
    kind: str,
    uris: Sequence[str],
    input_kinds: Sequence[str],
    fetch: Callable[[], tuple[Artifact, str]] | None = None,
) -> tuple[Link, Artifact | None]:
    """Find an artifact and verify its digest and inputs; return its link, and None as the artifact if it is broken."""
    context.reporter.step(f"checking the {kind}")
    recorded, store = [uri for uri in uris if uri], context.workdir.store
    sha256, inputs = context.get_tag(f"{kind}_sha256"), context.get_tagged_digests(*input_kinds)
    link = Link(kind, sha256, recorded[0] if recorded else f"store:{sha256}", list(inputs.values()))
    checked: Artifact | None = None
    with _recording_failure(link):
        try:
            artifact = find_artifact(kind, sha256, uris, store)
            if artifact:
                link.uri = artifact_store.get_artifact_uri(artifact)
            elif fetch:
                artifact, link.uri = fetch()
            else:
                raise MissingArtifactError("", hint=RESTORE_HINT)
        except (MissingArtifactError, RegistryError) as error:
            searched = ", ".join([*recorded, artifact_store.describe_store(store)])
            message = f"the {kind} was not found in {searched}; {error.message}".rstrip("; ")
            raise MissingArtifactError(message, hint=error.hint) from None
        for input_kind, expected in inputs.items():
            found = artifact.manifest.find_input(input_kind)
            actual = found.content_sha256 if found else None
            if actual != expected:
                subject = f"the {artifact.manifest.kind} in {artifact.path}"
                raise _mismatch_error(subject, input_kind, actual, expected)
        link.artifact = checked = artifact
    return link, checked


def find_artifact(kind: str, sha256: str, uris: Sequence[str], store: Path) -> Artifact | None:
    """Return the first intact copy at these URIs or in the store, or None. Folders with other artifacts are skipped.

    Raises:
        TunelineError: only damaged copies were found. The error describes the first copy.
    """
    damage: list[TunelineError] = []
    for uri in [*uris, artifact_store.build_artifact_uri(store, sha256)]:
        try:
            folder = artifact_store.resolve_artifact_uri(uri)
            if not folder or not (folder / artifact_folder.MANIFEST_FILENAME).exists():
                continue
            if artifact_folder.read_manifest(folder).content_sha256 == sha256:
                return artifact_folder.read(folder, kind)
        except (TunelineError, OSError) as error:
            damage.append(_translate_error(error))
    if damage:
        raise damage[0]
    return None


def _mismatch_error(subject: str, kind: str, actual: str | None, expected: str) -> LineageError:
    title = kind.replace("_", " ")
    return LineageError(
        f"{subject}: {title} digest is {actual[:12] if actual else 'missing'}; the version records {expected[:12]}",
        hint="Restore the artifact from a backup, or register the model again.",
    )


def print_tree(lineage: Lineage) -> None:
    """Print the version's inputs as a tree, each with a status mark, short digest, detail and location.

    The tree is wrapped to the terminal's width; in a file or a pipe, there is one line per link.
    """
    from rich.console import Console
    from rich.tree import Tree

    version, *inputs = lineage.chain
    alias = f" @{lineage.alias}" if lineage.alias else ""
    title = f"{lineage.name} version {lineage.version}{alias}"
    root = Tree(_format_link(version, title))
    branches, by_kind = {id(version): root}, {version.kind: root}
    for link in inputs:  # the chain lists a link after the links that were built from it
        parent = branches[id(link.parent)] if link.parent else by_kind[PARENT_KINDS[link.kind]]
        branches[id(link)] = by_kind[link.kind] = parent.add(_format_link(link))
    width = None if sys.stdout.isatty() else UNWRAPPED_COLUMNS
    Console(width=width, highlight=False).print(root)


def _format_link(link: Link, name: str = "") -> Text:
    from rich.text import Text

    mark, style = ("!", "yellow") if link.kind == "raw" and link.status == MISSING else STATUS_MARKS[link.status]
    label = Text(f"{mark} ", style=style, overflow="fold")
    label.append(escape_controls(name or link.title), style="bold")
    label.append(f"  {link.sha256[:12]}", style="cyan")
    if link.detail:
        label.append(f"  {escape_controls(link.detail)}", style="" if link.status == INTACT else style)
    label.append(f"  {escape_controls(_describe_location(link))}", style="dim")
    return label


def _describe_location(link: Link) -> str:
    """Return the URI of a link, or its short digest in the artifact store."""
    is_in_store = link.uri == f"store:{link.sha256}" or (
        link.uri.startswith("file:") and link.uri.endswith(f"/{link.sha256}")
    )
    return f"store/{link.sha256[:12]}" if is_in_store else link.uri


def summarize(lineage: Lineage) -> str:
    """Return the result of the trace in one sentence."""
    if lineage.broken_links:
        return f"The chain is broken at: {', '.join(link.title for link in lineage.broken_links)}."
    start = "the package" if lineage.get_links("repository") else "the model"
    remarks = [
        f"{link.detail}, and its original digest is recorded in the dataset"
        if link.kind == "raw"
        else f"not checked: {link.detail}"
        for link in lineage.chain
        if link.status != INTACT
    ]
    if not remarks:
        return f"All digests match, from {start} back to the revision and the raw files."
    return f"No link is broken from {start} back to the dataset; {'; '.join(remarks)}."
