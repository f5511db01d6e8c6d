"""What there is in a workdir, its store, its data repository and its MLflow: everything that takes space, and what must stay."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from components.common import jobs, liveness, places
from components.common.artifacts import Manifest
from components.common.errors import TunelineError, UsageError
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_versioning import retention as data
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import retention as registry
from components.triton_packaging.deployment import layout, state
from pipelines import runs
from pipelines.housekeeping.plan import KINDS, Kind, Policy, Root, Thing

PINS = "pins"  # the folder of the store's notes that keep what they name
SHA256 = re.compile("[0-9a-f]{64}")
# Folders of the state that look after themselves: jobs' private folders, mirrors of repositories, and files instead of folders.
TOKENS = "tokens"
NAMED = "name the one of the runs with -c, or with --set data_versioning.repository=…"
NOT_BY_KEY = ("data_versioning", "data_repositories", "evaluation")


class RegistryMissingError(UsageError):
    """There is no registry that says what is needed."""


class RepositoryMissingError(UsageError):
    """The data repository whose revisions are needed is missing, or is not the one that was asked."""


@dataclass(frozen=True)
class Asked:
    """Where to look, and what to keep. `older_than` is in seconds. What the user knows and nobody else can: `own_remote`, that the DVC
    remote serves this repository alone; `no_registry` and `no_repository`, that no registry, or no data repository but the one that is
    asked, knows of this store; `all_runs`, that what MLflow holds and is another workdir's, or nobody's, is to be judged too."""

    work: Workdir
    versioning: DataVersioningConfig
    reporter: Reporter
    older_than: float
    keep_runs: int = 20
    keep_versions: int = 3
    kinds: Collection[Kind] = KINDS
    own_remote: bool = False
    no_registry: bool = False
    no_repository: bool = False
    all_runs: bool = False

    @property
    def policy(self) -> Policy:
        """What may go."""
        return Policy(self.older_than, self.kinds)


@dataclass(frozen=True)
class World:
    """What was found. `objects` are the DVC remote's by the names of their things; `notes` are worth telling."""

    things: list[Thing]
    roots: list[Root]
    objects: dict[str, data.Object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def look(asked: Asked) -> World:
    """Look at everything. Nothing is changed but for what killed jobs left.

    Raises UsageError where there is no workdir, or no registry or data repository that says what is needed, and EngineMissingError,
    RegistryError or DataVersioningError where one of them or the store does not answer: without knowing what is needed nothing may go.
    """
    store = asked.work.store
    if not asked.work.root.is_dir() and not store.is_dir():
        raise UsageError(f"there is no workdir {asked.work.root}", hint="Name one with --workdir.")
    asked.reporter.step("looking at the artifact store")
    places.tidy(store)
    things = [*artifacts_of(store), *copies_of(store)]
    asked.reporter.step("looking at the data repository")
    remote = data.held(asked.versioning, workdir=asked.work.root, own_remote=asked.own_remote)
    objects = {f"object:{one.oid}": one for one in remote.unnamed}
    asked.reporter.step("looking at runs, checkpoints and deployments")
    things += [*states(asked.work.state), *runs_of(asked.work, asked.keep_runs), *packages(asked.work.root / "serving")]
    things += [Thing("data_object", name, str(one.path), one.bytes, one.unused) for name, one in objects.items()]
    asked.reporter.step("looking at MLflow")
    check_registry(asked, things)  # before MLflow is asked: without a registry there is nothing to ask
    whose = None if asked.all_runs else places.identity(asked.work)
    things += in_mlflow(asked, whose)
    notes = [f"objects of the DVC remote are left alone: {remote.why_not}"] if remote.why_not else []
    if whose is not None and (others := registry.of_others(whose)):
        notes.append(f"{others} runs and models in MLflow do not say that they are of this workdir, and are left alone without --all-runs")
    return World(things, roots(asked, things), objects, notes)


def roots(asked: Asked, things: Collection[Thing]) -> list[Root]:
    """What of these things must stay, as it is now: aliases first, since they are the reason that people know. Raises as `look`."""
    check_repository(asked, things)
    revisions = data.revisions(asked.versioning, workdir=asked.work.root)
    needed = registry.needed(asked.keep_versions)
    if not needed:
        check_registry(asked, things)
    return [
        *(Root(f"store:{digest}", one.why) for one in needed for digest in one.digests),
        *(root for folder in jobs.listed(asked.work.root / "serving") for root in in_service(folder)),
        *(Root(f"store:{sha256}", f"the revision {tag} holds it") for tag, sha256 in revisions),
        *at_work(asked.work, things),
        *pinned(asked.work.store),
    ]


def check_registry(asked: Asked, things: Collection[Thing]) -> None:
    """Raise RegistryMissingError where the registry knows of no version and the store holds what runs register: it is the wrong one."""
    held = [thing for thing in things if thing.kind == "artifact"]
    if asked.no_registry or not held or registry.needed(1):
        return
    raise RegistryMissingError(
        f"the registry knows of no model version, and the store {places.address(asked.work.store)} holds {len(held)} artifacts",
        hint="Name the registry with --tracking-uri or MLFLOW_TRACKING_URI; where there is none, --no-registry says so.",
    )


def check_repository(asked: Asked, things: Collection[Thing]) -> None:
    """Raise RepositoryMissingError where the store holds datasets and there is no data repository, or where what it holds was made from a
    revision of another one. The registry is not asked: it may be one for several teams, each with a repository of its own."""
    if asked.no_repository:
        return
    where: dict[str, Any] = {"workdir": asked.work.root}
    datasets = sum(thing.what == "dataset" for thing in things)
    if datasets and data.is_missing(asked.versioning, **where):
        address = data.address(asked.versioning, **where)
        raise RepositoryMissingError(
            f"there is no data repository {address}, and the store {places.address(asked.work.store)} holds {datasets} datasets",
            hint=f"Mount it, or {NAMED}; where nothing was published, --no-repository says so.",
        )
    uris = {uri for thing in things for uri in thing.revisions}
    if others := data.elsewhere(uris, asked.versioning, **where):
        raise RepositoryMissingError(
            f"what the store {places.address(asked.work.store)} holds was made from revisions of {', '.join(others)}, which was not asked",
            hint=f"If the runs publish there, {NAMED}; --no-repository says that its revisions need nothing here.",
        )


def artifacts_of(store: Path) -> Iterator[Thing]:
    """The artifacts of a store, and what lies in their place and was never finished."""
    in_bucket = places.unused_in_bucket(store)
    if in_bucket is not None:
        for sha256, (size, unused) in in_bucket.items():
            yield _artifact(store, sha256, size, unused)
        return
    for folder in _by_digest(store):
        yield from _each("artifact", f"store:{folder.name}", folder, partial(_artifact_in, store, folder))


def _artifact_in(store: Path, folder: Path) -> Thing:
    return _artifact(store, folder.name, size_of(folder), places.unused_for(folder))


def _each(kind: Kind, name: str, path: Path, judged: Callable[[], Thing]) -> Iterator[Thing]:
    """A thing by itself, so that an odd one keeps nobody from judging the others; none where another job just took it."""
    try:
        thing = judged()
    except (TunelineError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            return
        thing = Thing(kind, name, str(path), 0, 0.0, stays=f"cannot be judged: {getattr(error, 'message', str(error))}")
    yield thing


def _by_digest(folder: Path) -> list[Path]:
    return [path for path in jobs.listed(folder) if SHA256.fullmatch(path.name) and path.is_dir()]


def _artifact(store: Path, sha256: str, size: int, unused: float) -> Thing:
    name, path = f"store:{sha256}", places.uri_of(store, sha256) if "://" in places.address(store) else str(store / sha256)
    try:
        said = places.manifest(store, sha256)
    except (TunelineError, OSError) as error:
        told = getattr(error, "message", str(error))
        return Thing("artifact", name, path, size, unused, stays=f"its manifest cannot be read: {told}")
    kind: Kind = "base_model" if said and said.kind == "base_model" else "artifact"
    return Thing(kind, name, path, size, unused, _inputs(said), what=said.kind if said else "", revisions=_revisions(said))


def _revisions(said: Manifest | None) -> tuple[str, ...]:
    return tuple(one.uri for one in said.inputs if one.kind == "dataset" and one.uri.startswith("dvc://")) if said else ()


def _inputs(said: Manifest | None) -> tuple[str, ...]:
    return tuple(f"store:{one.content_sha256}" for one in said.inputs) if said else ()


def copies_of(store: Path) -> Iterator[Thing]:
    """The copies here of a store in a bucket. Nothing needs them that would not fetch them again."""
    if places.address(store) == str(store):
        return
    for folder in _by_digest(store):
        yield from _each("copy", f"copy:{folder.name}", folder, partial(_copy, folder))


def _copy(folder: Path) -> Thing:
    return Thing("copy", f"copy:{folder.name}", str(folder), size_of(folder), places.unused_for(folder))


def states(folder: Path) -> Iterator[Thing]:
    """Work in progress: a folder a key, and kept scores, a file a key. What was written into last says when it was used."""
    found = [one for path in _states(folder) for one in _each("state", _state(folder, path), path, partial(_state_in, folder, path))]
    yield from _together(folder, {one.name: one for one in found})


def _states(folder: Path) -> Iterator[Path]:
    stages = (path for path in jobs.listed(folder) if path.is_dir() and not path.name.startswith(".") and path.name not in NOT_BY_KEY)
    for stage in (*stages, folder / "evaluation" / "scores"):
        try:
            yield from (path for path in jobs.listed(stage) if not path.name.startswith("."))
        except PermissionError:
            yield stage  # another user's; judged as one, it says so


def _state_in(folder: Path, path: Path) -> Thing:
    unused = unused_state(path, touched=is_touched(path))
    return Thing("state", _state(folder, path), str(path), size_of(path), unused, _needs(folder, path), _worked_in(path))


def _together(folder: Path, states: dict[str, Thing]) -> Iterator[Thing]:
    """States of which some belong together, as the recipes of a sweep do: the youngest speaks for all of them, and so does a job in one."""
    for name, whole in list(states.items()):
        members = [one for one in _members(folder, Path(whole.path)) if one in states and one != name]
        group = [states[one] for one in (name, *members)]
        unused, stays = min(one.unused for one in group), next((one.stays for one in group if one.stays), "")
        states |= {one.name: replace(one, unused=unused, stays=stays) for one in group}
        states[name] = replace(states[name], needs=(*whole.needs, *members))
    yield from states.values()


def _members(folder: Path, path: Path) -> list[str]:
    try:
        said = json.loads((path / places.TOGETHER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [_state(folder, folder / one) for one in said if isinstance(one, str)] if isinstance(said, list) else []


def _state(folder: Path, path: Path) -> str:
    return f"state:{path.relative_to(folder).as_posix()}"


def unused_state(path: Path, *, touched: bool = True) -> float:
    """Seconds since anything in a file or folder was written, by its file server's clock. Raises FileNotFoundError.

    A hold is nothing that was written. `touched`: the folder's own time counts, because who uses it sets that; it changes with a hold too.
    """
    held = (jobs.HOLDER, f".{jobs.HOLDER}.")
    within = [one for one in _within(path) if not one.name.startswith(held)]
    looked_at = [path, *within] if touched or not within else within
    own, now = path.lstat().st_mtime, liveness.now(path.parent)
    return now - max(own if one == path else _changed(one, now) for one in looked_at)


def _changed(path: Path, now: float) -> float:
    """When it was; now where it is just being taken away."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return now


def _within(path: Path) -> Iterator[Path]:
    """Everything below a folder, whatever others take away meanwhile. Raises PermissionError where nobody here may look."""

    def told(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for folder, folders, files in os.walk(path, onerror=told):
        yield from (Path(folder) / name for name in (*folders, *files))


def is_touched(path: Path) -> bool:
    """Whether who uses this state sets its own time; other folders are held."""
    return path.is_file() or path.parent.name == TOKENS


def _worked_in(path: Path) -> str:
    """Whether a living job holds the folder, or one in it."""
    held = any(jobs.is_held(hold.parent) for hold in _within(path) if hold.name == jobs.HOLDER)
    return "a job works in it" if held else ""


def _needs(folder: Path, path: Path) -> tuple[str, ...]:
    """What a job that was given away was told to read: it may wait in a queue, with nobody watching it."""
    return tuple(name for said in _within(path) if said.name == "job.json" for name in _named_in(said, folder))


def _named_in(job: Path, folder: Path) -> Iterator[str]:
    try:
        said = json.loads(job.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for place in _paths(said):
        yield from (f"{kind}:{part}" for part in place.parts if SHA256.fullmatch(part) for kind in ("store", "copy"))
        if place.is_relative_to(folder):
            yield from (_state(folder, one) for one in (place, *place.parents) if one.is_relative_to(folder) and one != folder)


def _paths(said: Any) -> Iterator[Path]:
    """The absolute paths in what a job was told."""
    if isinstance(said, str) and Path(said).is_absolute():
        yield Path(said)
    elif isinstance(said, dict | list):
        for value in said.values() if isinstance(said, dict) else said:
            yield from _paths(value)


def runs_of(work: Workdir, keep: int) -> Iterator[Thing]:
    """The folders of the runs, with what came of them."""
    for place, run in enumerate(runs.every(work)):
        newest = f"one of the newest {keep} runs" if place < keep else ""
        yield from _each("run", f"run:{run.name}", run.folder, partial(_run, run, newest))


def _run(run: runs.Run, newest: str) -> Thing:
    known = _said(run)
    result = known.get("result") or {}
    needs = [f"store:{Path(path).name}" for path in (result.get("artifacts") or {}).values() if path]
    needs += [f"mlflow_run:{known['mlflow_run_id']}"] if known.get("mlflow_run_id") else []
    size, unused = size_of(run.folder), unused_state(run.folder)
    return Thing("run", f"run:{run.name}", str(run.folder), size, unused, tuple(needs), _stays(run, known) or newest)


def _said(run: runs.Run) -> dict[str, Any]:
    """What run.json holds. Raises OSError or ValueError where that cannot be told; one that is missing was never written."""
    try:
        known = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(known, dict):
        raise ValueError("its run.json holds no object")
    return known


def _stays(run: runs.Run, known: dict[str, Any]) -> str:
    if run.state == "running":
        return "it is running"
    if known.get("tracking_open") or known.get("status", "running") == "running":
        return "it is still open in MLflow, and closed by the next run"
    return ""


def at_work(work: Workdir, things: Collection[Thing]) -> Iterator[Root]:
    """What the living run of the workdir has used since it began."""
    for run in runs.every(work):
        if run.state == "running":
            since = _since_begun(run)
            used = (thing for thing in things if thing.kind in ("artifact", "base_model", "state") and thing.unused <= since)
            yield from (Root(thing.name, f"the run {run.name} is at work") for thing in used)


def _since_begun(run: runs.Run) -> float:
    """Seconds since a run began, by its file server's clock, as those of what it used: the machine that runs it may have another time."""
    now = liveness.now(run.folder.parent)
    return now - min(_changed(path, now) for path in jobs.listed(run.folder))


def packages(serving: Path) -> Iterator[Thing]:
    """What deployments keep of packages."""
    for folder in jobs.listed(serving):
        yield from packages_of(folder, held=jobs.is_held(folder))


def packages_of(folder: Path, *, held: bool) -> Iterator[Thing]:
    """What one deployment keeps; `held`: it is at work, and looks after its folder itself."""
    used = _served(folder)
    for path in [*_by_digest(folder / layout.PACKAGES), *_by_digest(folder / layout.ROOTED)]:
        name = f"package:{path.relative_to(folder.parent).as_posix()}"
        stays = "a deployment is at work" if held else used.get(path.name, used.get("", ""))
        yield from _each("package", name, path, partial(_package, name, path, stays))


def _package(name: str, path: Path, stays: str) -> Thing:
    return Thing("package", name, str(path), size_of(path), places.unused_for(path), stays=stays)


def in_service(folder: Path) -> Iterator[Root]:
    """The packages of a serving folder that are in service, or the way back."""
    yield from (Root(f"store:{sha256}", why) for sha256, why in _served(folder).items() if sha256)
    if "" in _served(folder):
        yield from (Root(f"store:{path.name}", f"{folder.name} serves it") for path in _by_digest(folder / layout.PACKAGES))


def _served(folder: Path) -> dict[str, str]:
    """Digests of packages that are needed there, with the reason; under "" the reason that counts for all."""
    try:
        known = state.read(folder)
    except TunelineError as error:
        return {"": f"what is served there cannot be told: {error.message}"}
    links = [link.readlink().parts for link in (folder / layout.REPOSITORY).glob("*/*") if link.is_symlink()]
    if any(len(parts) < 3 for parts in links):
        return {"": f"what is served there cannot be told: a link in {folder / layout.REPOSITORY} leads to no package"}
    found = {parts[-3]: f"laid out for the server of {folder.name}" for parts in links}
    named = [(known.before, "the way back of"), (known.serving, "in service in")] if known else []
    for served, why in named:
        if served:
            found |= dict.fromkeys((served.repository_sha256, served.model_sha256), f"{why} {folder.name}")
    return found


def pinned(store: Path) -> Iterator[Root]:
    """What somebody said to keep."""
    for name in places.notes(store, PINS):
        why = f"pinned: {(places.read_note(store, f'{PINS}/{name}') or '').strip() or 'by hand'}"
        yield from (Root(f"{kind}:{name}", why) for kind in ("store", "run"))


def in_mlflow(asked: Asked, whose: str | None) -> Iterator[Thing]:
    """Runs and logged models that MLflow keeps of one workdir, or of all (None). A run keeps those that are nested in it."""
    kept = registry.ended_runs(asked.older_than, whose, asked.keep_runs)
    for one in kept:
        nested = tuple(f"mlflow_run:{other.id}" for other in kept if other.parent == one.id)
        yield Thing("mlflow_run", f"mlflow_run:{one.id}", f"{one.uri} ({one.name})", one.bytes, one.unused, nested, one.stays)
    for one in registry.unversioned_models(asked.older_than, whose):
        yield Thing("mlflow_model", f"mlflow_model:{one.id}", f"{one.uri} ({one.name})", one.bytes, one.unused)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; what other folders share by links counts here too."""
    found = 0
    for one in _within(path) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # its job just removed it
            found += one.lstat().st_size if one.is_file() else 0
    return found


def pin(work: Workdir, named: str, why: str) -> str:
    """Keep an artifact with all that it was made from, or a run, whatever its age. Returns its name: a path may be given as well.

    Raises UsageError for what is neither the whole digest of something in the store nor a run.
    """
    name = Path(named).name
    if not (SHA256.fullmatch(name) and places.holds(work.store, name)) and name not in [run.name for run in runs.every(work)]:
        raise UsageError(f"{named} is neither in the artifact store nor a run", hint="Give the whole digest, or the whole name of a run.")
    places.write_note(work.store, f"{PINS}/{name}", why + "\n")
    return name


def unpin(work: Workdir, named: str) -> str:
    """Let go of what was pinned. Returns its name. Raises UsageError for what is not."""
    name, names = Path(named).name, places.notes(work.store, PINS)
    if name not in names:
        raise UsageError(f"{named} is not pinned", hint=f"What is pinned: {', '.join(names) or 'nothing'}.")
    places.remove_note(work.store, f"{PINS}/{name}")
    return name
