"""Bringing a base model into the artifact store once, from where every pod and every run reads it without a network.

It lies there under the digest that it has in any folder, so that a run's digests do not depend on where its model came from. Only what
MODEL_FILES names is taken, and beside it the card and the licence's text. Who accepted a licence that asks for it is kept with the model.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, licences, models, places
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, UsageError
from components.common.licences import Licence
from components.common.paths import link_or_copy
from components.common.places import Workdir
from components.common.progress import Reporter

STAGE = "models"  # under this name the store notes what it has of a source
LICENCE, ACCEPTED = "licence", "accepted"
MOMENT = 1.0  # seconds between two looks at how much has come


@dataclass(frozen=True)
class Offer:
    """What a source has to give: its name with the exact revision, its licence, the files to take with their bytes, and those that are
    left where they are. `folder` where they lie on this machine already; `promised` what the hub says their digests are, as it does of
    large files."""

    source: str
    licence: Licence
    files: dict[str, int]
    left_out: list[str]
    folder: Path | None
    promised: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """What is to be brought."""
        return sum(self.files.values())

    @cached_property
    def key(self) -> str:
        """What the store notes it under: a revision is what it was, a folder may hold other files tomorrow. All of them are read once."""
        content = [] if self.folder is None else [(name, hashing.sha256_file(self.folder / name)) for name in sorted(self.files)]
        return hashing.digest({"source": self.source, "content": content})


@dataclass(frozen=True)
class Acceptance:
    """Who accepts a model's licence."""

    by: str


def look(source: str, reporter: Reporter) -> Offer:
    """What there is to bring. Only the list of its files is fetched of an hf:// model. Raises ConfigurationError as `base_model` does."""
    reporter.step(f"looking at {source}")
    if source.startswith(places.STORE):
        raise UsageError(f"{source} is in the artifact store already", hint=f"Use it: --set fine_tuning.base_model={source}")
    offer = _on_the_hub(source) if source.startswith("hf://") else _here(source, reporter)
    models.check_files(offer.files, source)
    return offer


def _on_the_hub(source: str) -> Offer:
    found = models.hub_info(source)
    sizes = {one.rfilename: int(one.size or 0) for one in found.siblings or []}
    card = found.card_data.to_dict() if found.card_data else {}
    exact = f"{source.partition('@')[0]}@{found.sha}"
    promised = {one.rfilename: one.lfs.sha256 for one in found.siblings or [] if one.lfs}
    return Offer(exact, licences.of_values(card, gated=bool(found.gated)), *_chosen(sizes), None, promised)


def _here(source: str, reporter: Reporter) -> Offer:
    base = models.base_model(source, reporter)
    sizes = {path.relative_to(base.path).as_posix(): path.stat().st_size for path in base.path.rglob("*") if path.is_file()}
    licence = Licence(id=models.EMBEDDED_LICENCE) if source == models.EMBEDDED else licences.of_folder(base.path)
    named = source if source.startswith("embedded:") else str(Path(source).absolute())
    return Offer(named, licence, *_chosen(sizes), base.path)


def _chosen(sizes: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """The files that are taken, and those that are not: foreign formats, pickles above all, and whatever lies in folders."""
    taken = {name: size for name, size in sizes.items() if _is_model(name) or _is_beside(name)}
    return taken, sorted(sizes.keys() - taken.keys() - {artifacts.MANIFEST})


def _is_model(name: str) -> bool:
    return "/" not in name and bool(models.MODEL_FILES.fullmatch(name))


def _is_beside(name: str) -> bool:
    return name == licences.CARD or bool(licences.TEXTS.fullmatch(name))


def noted(offer: Offer, work: Workdir) -> Manifest | None:
    """What the store says of what was brought from this very source before. Of a store in a bucket nothing else is fetched."""
    sha256 = places.noted(work.store, STAGE, offer.key)
    return places.manifest(work.store, sha256) if sha256 else None


def earlier(offer: Offer, work: Workdir) -> Artifact | None:
    """What was brought from this very source before, every digest checked."""
    sha256 = places.noted(work.store, STAGE, offer.key)
    return places.stored(work.store, sha256, "base_model") if sha256 else None


def check_licence(offer: Offer, accepted: Acceptance | None, known: Artifact | None) -> None:
    """Raise UsageError for a licence that asks for it and was not accepted, neither now nor when the model was brought."""
    before = known.manifest.summary[LICENCE][ACCEPTED] if known else None
    if offer.licence.asks and not accepted and not before:
        where = offer.licence.link or (f"its page, {offer.source}" if offer.folder is None else f"the files in {offer.folder}")
        raise UsageError(
            f"{offer.source} is under {offer.licence.title}, which somebody has to accept before it is used",
            hint=f"Read the licence ({where}); where your organisation accepts it, give --accept-license, and --by for who does.",
        )


def bring(offer: Offer, work: Workdir, accepted: Acceptance | None, reporter: Reporter) -> tuple[Artifact, bool]:
    """Have the store hold the model. Returns it and whether it was there already.

    A transfer that is broken off goes on from where it was. Raises what `check_licence` and `base_model` do, ArtifactDamagedError where
    what was brought before is not what it was.
    """
    known = earlier(offer, work)
    check_licence(offer, accepted, known)
    if known:
        return (_accepted_now(known, offer, accepted, work.store, reporter) if _adds(offer, accepted, known) else known), True
    key = offer.key
    state = work.state / STAGE / key

    def build(folder: Path) -> Artifact:
        source = offer.folder or _fetched(offer, state, reporter)
        models.check_configuration(source / "config.json", offer.source)
        held = _held_already(offer, source, work.store)
        if held and not _adds(offer, accepted, held):
            return _publish(folder, held.path, _names(held), held.manifest.summary, key, link_or_copy, reporter)
        named = held.manifest.summary["source"] if held else offer.source
        summary = {"source": named, LICENCE: _licence(offer, source, accepted), "bytes": offer.bytes}
        lay = link_or_copy if offer.folder is None else shutil.copyfile  # what is written into a user's file must not change the store's
        return _publish(folder, source, list(offer.files), summary, key, lay, reporter)

    artifact, _ = places.produce(work.store, STAGE, key, build, reporter)
    shutil.rmtree(state, ignore_errors=True)
    return artifact, False


def _held_already(offer: Offer, source: Path, store: Path) -> Artifact | None:
    """The stored model of the same files, brought from elsewhere. Its name and its acceptance stay: tuned models bear the one, and
    somebody may rely on the other."""
    sha256 = hashing.content_sha256((name, hashing.sha256_file(source / name)) for name in sorted(offer.files) if _is_model(name))
    return places.stored(store, sha256, "base_model") if places.holds(store, sha256) else None


def _names(artifact: Artifact) -> list[str]:
    return [file.path for file in artifact.manifest.files]


def _adds(offer: Offer, accepted: Acceptance | None, known: Artifact) -> bool:
    """Whether an acceptance is given that the licence asks for and the stored model does not have yet."""
    return accepted is not None and offer.licence.asks and not known.manifest.summary[LICENCE][ACCEPTED]


def _accepted_now(known: Artifact, offer: Offer, accepted: Acceptance | None, store: Path, reporter: Reporter) -> Artifact:
    """The stored model, of the same files, with its licence accepted."""
    before, key = known.manifest.summary, known.manifest.produced_by["key"]
    licence = {**before[LICENCE], **offer.licence.model_dump(), ACCEPTED: _told(offer, accepted)}
    with places.workplace(store) as own:
        built = _publish(own / f"{STAGE}-{key[:16]}", known.path, _names(known), {**before, LICENCE: licence}, key, link_or_copy, reporter)
        return places.adopt(store, built, reporter)


def _publish(
    folder: Path,
    source: Path,
    names: list[str],
    summary: dict[str, Any],
    key: str,
    lay: Callable[[Path, Path], object],
    reporter: Reporter,
) -> Artifact:
    artifacts.begin(folder, key)
    reporter.step("taking the files into the store")
    for done, name in enumerate(names, 1):
        lay((source / name).resolve(), folder / name)
        reporter.progress(done, len(names), "files")
    return artifacts.publish(folder, "base_model", payload=_is_model, inputs=[], config={}, seed=0, key=key, summary=summary)


def _fetched(offer: Offer, state: Path, reporter: Reporter) -> Path:
    reporter.step(f"fetching {offer.source}")
    with _watched(state, offer.bytes, reporter):
        models.fetch(offer.source, sorted(offer.files), state)
    check_promised(offer, state)
    return state


def check_promised(offer: Offer, folder: Path) -> None:
    """Raise ArtifactDamagedError for a fetched file whose digest is not what the hub says. It is removed, so that it is fetched again."""
    for name in sorted(offer.promised.keys() & offer.files.keys()):
        found = hashing.sha256_file(folder / name)
        if found != offer.promised[name]:
            (folder / name).unlink()
            raise ArtifactDamagedError(
                f"{name} of {offer.source} came with the digest {found[:12]}, but the hub says {offer.promised[name][:12]}",
                hint="Run the same command again: it is fetched anew. If that does not help, the hub, or its mirror, has a damaged file.",
            )


@contextmanager
def _watched(folder: Path, total: int, reporter: Reporter) -> Iterator[None]:
    """Tell how much has come into a folder while this lasts; what a broken transfer left there counts."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(MOMENT):
            reporter.progress(min(_held(folder), total), total, "bytes")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _held(folder: Path) -> int:
    """Bytes on the disk: a file that is fetched in parts is as long as it will be from the start."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:  # it was just given its name
            continue
    return found


def _licence(offer: Offer, folder: Path, accepted: Acceptance | None) -> dict[str, Any]:
    """The licence as it is kept with the model: its name, the digests of its texts, and who accepted it when."""
    texts = {name: hashing.sha256_file(folder / name) for name in sorted(offer.files) if _is_beside(name)}
    return {**offer.licence.model_dump(), "texts": texts, ACCEPTED: _told(offer, accepted)}


def _told(offer: Offer, accepted: Acceptance | None) -> dict[str, str] | None:
    return {"by": accepted.by, "at": datetime.now(UTC).isoformat(timespec="seconds")} if accepted and offer.licence.asks else None
