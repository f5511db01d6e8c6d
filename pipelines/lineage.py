"""Where a registered model came from: from the version and its package back to the dataset's revision and the raw files.

Every digest on the way is taken again. A link is what the version's tags say of one thing it came from; what is found of that thing has
to be whole, and to name the same digests as the tags do. The walk goes on behind a broken link, so that one look tells all that is wrong.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, models, places
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, RegistryError, TunelineError, UsageError
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_curation.stage import named
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.model_registry.promotion import CHAMPION
from components.model_registry.stage import Champion, registered
from components.triton_packaging.stage import recorded_lineage
from pipelines.material import DEMO, demo_path

INTACT, DAMAGED, MISSING, CHANGED, UNCHECKED = "intact", "damaged", "missing", "changed", "unchecked"


class LineageError(TunelineError):
    """A link of the chain is broken: damaged, lost, or at odds with what the version says."""

    kind = "lineage"


class MissingError(TunelineError):
    """What a link names is nowhere to be found."""


@dataclass
class Link:
    """One thing the model came from. `inputs` are the digests of the links it was made from."""

    kind: str
    sha256: str
    uri: str
    inputs: list[str] = field(default_factory=list)
    status: str = INTACT
    detail: str = ""
    hint: str = ""

    @property
    def broken(self) -> bool:
        """Whether the chain breaks here. A raw file may change or go once it was read: the dataset made of it is what counts."""
        return self.kind != "raw" and self.status in (DAMAGED, MISSING)

    def fail(self, error: TunelineError) -> None:
        """Take the reason why the link is broken."""
        self.status = MISSING if isinstance(error, MissingError) else DAMAGED
        self.detail, self.hint = error.message, error.hint


@dataclass(frozen=True)
class Lineage:
    """A model version and its chain, newest link first."""

    name: str
    version: str
    alias: str | None
    chain: list[Link]

    @property
    def broken(self) -> list[Link]:
        """The links where the chain breaks."""
        return [link for link in self.chain if link.broken]

    def of(self, kind: str) -> list[Link]:
        """The links of a kind."""
        return [link for link in self.chain if link.kind == kind]

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline lineage --json` prints. `intact`: every link was checked and is what was recorded."""
        names = ("kind", "sha256", "uri", "inputs", "status", "detail")
        chain = [{name: getattr(link, name) for name in names} for link in self.chain]
        intact = all(link.status == INTACT for link in self.chain)
        return {"name": self.name, "version": self.version, "alias": self.alias, "intact": intact, "chain": chain}

    def check(self) -> None:
        """Raise LineageError, naming every broken link."""
        broken = self.broken
        if not broken:
            return
        links = "1 link" if len(broken) == 1 else f"{len(broken)} links"
        told = "; ".join(f"{link.kind.replace('_', ' ')} {link.sha256[:12]}: {link.detail}" for link in broken)
        raise LineageError(
            f"the lineage of {self.name} version {self.version} is broken in {links}: {told}", hint=broken[0].hint, stage="lineage"
        )


@dataclass(frozen=True)
class _Search:
    """What is looked for, and where."""

    version: Champion
    workdir: Workdir
    config: DataVersioningConfig
    scratch: Path
    reporter: Reporter

    def said(self, name: str) -> str:
        """What the version's tag tuneline.<name> says, or ""."""
        return self.version.tags.get(f"tuneline.{name}", "")

    def digests(self, *kinds: str) -> dict[str, str]:
        """The digests that the version names for these kinds."""
        return {kind: self.said(f"{kind}_sha256") for kind in kinds if self.said(f"{kind}_sha256")}


def trace(reference: str, workdir: Workdir, config: DataVersioningConfig, reporter: Reporter) -> Lineage:
    """The chain of NAME@ALIAS, NAME@3, NAME/3 or NAME (its champion), every digest checked.

    A broken link does not raise, see Lineage.check. Raises RegistryError for an unknown model, version or alias.
    """
    name, which = parse(reference)
    version = registered(name, which)
    with tempfile.TemporaryDirectory(prefix="tuneline-lineage-") as scratch:
        search = _Search(version, workdir, config, Path(scratch), reporter)
        chain = [*_package(search), _evaluation(search), _model(search), _base(search)]
        chain = [_version(search, chain), *chain, *_data(search)]
    return Lineage(version.name, version.version, None if which.isdecimal() else which, chain)


def parse(reference: str) -> tuple[str, str]:
    """Name, and alias or version number."""
    match = re.fullmatch(r"(?:models:/)?([^@/:]+)(?:[@/]([^@/:]+))?", reference)
    if not match:
        raise UsageError(f"{reference!r} names no model version", hint="Write NAME@ALIAS, NAME@3, or NAME for its champion.")
    return match[1], match[2] or CHAMPION


def _version(search: _Search, chain: Sequence[Link]) -> Link:
    """The version itself. Its digest is that of what it says: name, number, and the digests it names."""
    version = search.version
    digests = search.digests("repository", "evaluation", "model", "base_model", "dataset")
    link = Link("version", hashing.digest([version.name, version.version, digests]), f"models:/{version.name}/{version.version}")
    link.inputs = [one.sha256 for one in chain if one.kind in ("repository", "evaluation", "model")]
    search.reporter.step("checking the version")
    with _checking(link):
        if version.files_sha256() != version.model_sha256:
            raise _disagreement("the version's files in MLflow are", "model", version.files_sha256(), version.model_sha256)
    return link


@contextmanager
def _checking(link: Link) -> Iterator[None]:
    """What goes wrong while a link is checked is the link's failure, and the walk goes on."""
    try:
        yield
    except TunelineError as error:
        link.fail(error)
    except OSError as error:
        link.fail(_unreadable(error))


def _unreadable(error: OSError) -> LineageError:
    return LineageError(
        f"{error.filename or 'a file'} cannot be read: {error.strerror or error}",
        hint="Look at the permissions of the file and its folders, and whether the disk it lies on is mounted and sound.",
    )


def _package(search: _Search) -> list[Link]:
    """The Triton repository: none where the version was refused or never packaged."""
    sha256 = search.said("repository_sha256")
    if not sha256:
        return []
    wanted = search.digests("model", "base_model")

    def agree(found: Artifact) -> None:
        _agree(found, wanted)
        recorded = recorded_lineage(found)
        for kind, expected in search.digests("model", "base_model", "dataset").items():
            if recorded.get(f"{kind}_sha256") != expected:
                raise _disagreement("config.pbtxt of the repository names", kind, recorded.get(f"{kind}_sha256"), expected)

    return [_artifact(search, "repository", sha256, [search.said("repository_store_uri")], wanted, agree)]


def _evaluation(search: _Search) -> Link:
    wanted = search.digests("model", "dataset", "base_model")

    def agree(found: Artifact) -> None:
        _agree(found, wanted)
        verdict = json.loads((found.path / "evaluation.json").read_text(encoding="utf-8")).get("verdict")
        if verdict != search.said("verdict"):
            raise LineageError(
                f"evaluation.json says {verdict}, the version says {search.said('verdict') or 'nothing'}",
                hint="Register the model again with its evaluation, and look who changed the tag tuneline.verdict.",
            )

    link = _artifact(search, "evaluation", search.said("evaluation_sha256"), [search.said("evaluation_store_uri")], wanted, agree)
    link.detail = link.detail or f"verdict: {search.said('verdict')}"
    return link


def _model(search: _Search) -> Link:
    """The model: where it was registered from, in this store, or what MLflow keeps of it."""
    wanted = search.digests("dataset", "base_model")
    uri = f"models:/{search.version.name}/{search.version.version}"

    def from_mlflow() -> tuple[Artifact, str]:
        search.reporter.step("fetching the model from MLflow")
        try:
            return search.version.fetch(search.scratch / "model"), uri
        except ArtifactDamagedError as error:
            told = error.message.replace(str(search.scratch / "model.part"), uri)
            raise LineageError(told, hint="Restore MLflow's artifact store from a backup, or the model's folder.") from None

    recorded = [search.said("store_uri")]
    return _artifact(search, "model", search.version.model_sha256, recorded, wanted, lambda found: _agree(found, wanted), from_mlflow)


def _base(search: _Search) -> Link:
    """The base model, where it can be had without fetching or converting it."""
    link = Link("base_model", search.said("base_model_sha256"), search.said("base_model_uri"))
    search.reporter.step("checking the base model")
    with _checking(link):
        gone = ":" not in link.uri and not Path(link.uri).exists()
        here = None if gone else models.base_model_here(link.uri)
        if here is None:
            link.status, link.detail = UNCHECKED, f"{link.uri or 'the base model'} is not on this machine"
        elif here.sha256 != link.sha256:
            raise _disagreement(f"the files of {link.uri} are now", "base_model", here.sha256, link.sha256)
    return link


def _data(search: _Search) -> list[Link]:
    """The dataset, its revision, and the raw files. A dataset that is in no store any more is read from its revision."""
    sha256 = search.said("dataset_sha256")
    revision, published = _revision(search, sha256)
    seen: list[Manifest] = []

    def from_revision() -> tuple[Artifact, str]:
        if published is None:
            raise MissingError("", hint="Mount the artifact store it lies in, or restore it from a backup.")
        return Artifact(search.scratch, published), revision.uri

    recorded = dataset_places(search.version)
    link = _artifact(search, "dataset", sha256, recorded, {}, lambda found: seen.append(found.manifest), from_revision)
    manifest = seen[0] if seen else published
    raw = _raw(search, manifest) if manifest else []
    link.inputs = revision.inputs = [one.sha256 for one in raw]
    return [link, revision, *raw]


def dataset_places(version: Champion) -> list[str]:
    """A version does not say where its dataset lies: beside the model in its store, or where `tuneline finetune` was given it."""
    there = places.beside(version.store_uri, version.tags.get("tuneline.dataset_sha256", ""))
    given = version.tags.get("tuneline.dataset_uri", "")
    return [
        *([there] if there else []),
        *([Path(given).absolute().as_uri()] if ":" not in given and given else []),
    ]


def _revision(search: _Search, sha256: str) -> tuple[Link, Manifest | None]:
    """The dataset's revision, read back from the remote. It is the dataset at another place, so it has the same digest."""
    search.reporter.step("checking the dataset's revision")
    link, manifest = Link("revision", sha256, search.said("dataset_uri")), None
    with _checking(link):
        manifest = _read_back(search, link)
    return link, manifest


def _read_back(search: _Search, link: Link) -> Manifest | None:
    """The manifest of the revision that the version names, or that holds its dataset; None where it was never published."""
    if not link.uri.startswith("dvc://"):
        link.uri = published_as(link.sha256, search.config, search.workdir)
    if not link.uri:
        link.status, link.detail = UNCHECKED, "the dataset was not published as a revision"
        return None
    version, manifest = versioning.check(link.uri, search.config, workdir=search.workdir.root, reporter=search.reporter)
    _agree_revision(search, version)
    link.detail = version.tag
    return manifest


def published_as(sha256: str, config: DataVersioningConfig, workdir: Workdir) -> str:
    """The revision of this work folder with the dataset's content, for a model that was registered without one; "" where there is none."""
    known = versioning.versions(config, workdir=workdir.root)
    return next((v.uri for v in reversed(known) if v.content_sha256 == sha256), "")


def _agree_revision(search: _Search, version: versioning.Version) -> None:
    if version.content_sha256 != search.said("dataset_sha256"):
        raise _disagreement(f"the revision {version.tag} holds", "dataset", version.content_sha256, search.said("dataset_sha256"))
    for name, found in (("md5", version.md5), ("tag", version.tag)):
        said = search.said(f"dataset_{name}")
        if said and said != found:
            raise LineageError(
                f"the revision {version.rev[:12]} has the {name} {found}, the version names {said}",
                hint="The data repository, or the version's tags, were changed by other means: compare them with a backup.",
            )


def _raw(search: _Search, manifest: Manifest) -> list[Link]:
    """The files the dataset was made from, looked for where its configuration names them."""
    patterns = [str(demo_path(search.workdir)) if p == DEMO else p for p in manifest.config.get("sources", [])]
    return [_raw_file(one.content_sha256, one.uri, patterns) for one in manifest.inputs if one.kind == "raw"]


def _raw_file(sha256: str, name: str, patterns: Sequence[str]) -> Link:
    link = Link("raw", sha256, name)
    found = named(name, patterns, Path.cwd())
    same = next((source for source in found if source.sha256 == sha256), None)
    if same or found:
        link.uri = Path((same or found[0]).uri).as_uri()
    if not found:
        link.status, link.detail = MISSING, f"{name} is no longer where it was read"
    elif not same:
        link.status, link.detail = CHANGED, f"{name} has changed since it was read: it is {found[0].sha256[:12]} now"
    return link


def _artifact(
    search: _Search,
    kind: str,
    sha256: str,
    recorded: Sequence[str],
    made_from: Mapping[str, str],
    agree: Callable[[Artifact], None],
    elsewhere: Callable[[], tuple[Artifact, str]] | None = None,
) -> Link:
    """The link of an artifact: found by its recorded URIs, in the store, or `elsewhere`; whole; and in agreement with the version."""
    search.reporter.step(f"checking the {kind}")
    link = Link(kind, sha256, next(filter(None, recorded), f"store:{sha256}"), list(made_from.values()))
    with _checking(link):
        try:
            found = find(kind, sha256, recorded, search.workdir.store)
            if found:
                link.uri = places.uri(found)
            elif elsewhere:
                found, link.uri = elsewhere()
            else:
                raise MissingError("", hint="Mount the artifact store it lies in, or restore it from a backup.")
        except (MissingError, RegistryError) as error:
            looked = ", ".join([*filter(None, recorded), places.address(search.workdir.store)])
            told = f"the {kind} is not there any more; looked in {looked}. {error.message}".rstrip(". ")
            raise MissingError(told, hint=error.hint) from None
        agree(found)
    return link


def find(kind: str, sha256: str, recorded: Sequence[str], store: Path) -> Artifact | None:
    """The artifact at the first of the recorded places and the store that has it whole. A folder that holds another by now is passed over,
    as is a damaged copy; where no other is found, the first copy's damage is raised."""
    damage: list[TunelineError] = []
    for uri in [*recorded, places.uri_of(store, sha256)]:
        try:
            folder = places.folder_of(uri)
            if folder and (folder / artifacts.MANIFEST).exists() and artifacts.read_manifest(folder).content_sha256 == sha256:
                return artifacts.read(folder, kind)
        except TunelineError as error:
            damage.append(error)
        except OSError as error:
            damage.append(_unreadable(error))
    if damage:
        raise damage[0]
    return None


def _agree(found: Artifact, wanted: Mapping[str, str]) -> None:
    """Raise where an artifact was made from other things than the version names."""
    for kind, expected in wanted.items():
        named_one = found.manifest.input(kind)
        if named_one is None or named_one.content_sha256 != expected:
            other = named_one.content_sha256 if named_one else None
            raise _disagreement(f"the {found.manifest.kind} in {found.path} was made from", kind, other, expected)


def _disagreement(what: str, kind: str, found: str | None, expected: str) -> LineageError:
    name = kind.replace("_", " ")
    return LineageError(
        f"{what} {f'the {name} {found[:12]}' if found else f'no {name}'}, the version names {expected[:12]}",
        hint="The version's tags or the artifact were exchanged: register the model again with what belongs to it, or restore it.",
    )


UNFOLDED = 100_000  # columns; longer than what a link can say
MARKS = {
    INTACT: ("✔", "green"),
    DAMAGED: ("✘", "bold red"),
    MISSING: ("✘", "bold red"),
    CHANGED: ("!", "yellow"),
    UNCHECKED: ("?", "yellow"),
}


def show(lineage: Lineage) -> None:
    """Print the chain as a tree: folded to the terminal's width, or in a file or a pipe one line a link."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNFOLDED
    Console(width=width, highlight=False).print(draw(lineage))


def draw(lineage: Lineage) -> Any:
    """The chain as a rich tree: what the version was made from, each link with its mark, short digest, detail and place."""
    from rich.tree import Tree

    version, model, dataset = (lineage.of(kind)[0] for kind in ("version", "model", "dataset"))
    root = Tree(_label(version, f"{lineage.name} version {lineage.version}" + (f" @{lineage.alias}" if lineage.alias else "")))
    for link in [*lineage.of("repository"), *lineage.of("evaluation")]:
        root.add(_label(link))
    of_model = root.add(_label(model))
    for link in lineage.of("base_model"):
        of_model.add(_label(link))
    of_dataset = of_model.add(_label(dataset))
    for link in [*lineage.of("revision"), *lineage.of("raw")]:
        of_dataset.add(_label(link))
    return root


def _label(link: Link, name: str = "") -> Any:
    from rich.text import Text

    mark, style = ("!", "yellow") if link.kind == "raw" and link.status == MISSING else MARKS[link.status]
    label = Text(f"{mark} ", style=style, overflow="fold")
    label.append(name or link.kind.replace("_", " "), style="bold")
    label.append(f"  {link.sha256[:12]}", style="cyan")
    if link.detail:
        label.append(f"  {link.detail}", style="" if link.status == INTACT else style)
    label.append(f"  {_place(link)}", style="dim")
    return label


def _place(link: Link) -> str:
    """Where a link lies, for people: what lies in a store under its digest is named by that."""
    return f"store/{link.sha256[:12]}" if link.uri.startswith("file:") and link.uri.endswith(f"/{link.sha256}") else link.uri


def sentence(lineage: Lineage) -> str:
    """What came of the walk, for people."""
    aside = [link for link in lineage.chain if link.status != INTACT]
    if lineage.broken:
        return f"The chain is broken at: {', '.join(link.kind.replace('_', ' ') for link in lineage.broken)}."
    start = "the package" if lineage.of("repository") else "the model"
    if not aside:
        return f"Every digest agrees, from {start} back to the revision and the raw files."
    return f"No link is broken from {start} back to the dataset; " + "; ".join(f"{_aside(link)}" for link in aside) + "."


def _aside(link: Link) -> str:
    return f"{link.detail}, and the digest it had stands in the dataset" if link.kind == "raw" else f"not checked: {link.detail}"
