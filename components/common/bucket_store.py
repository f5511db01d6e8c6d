"""The artifact store in a bucket.

    <address>/<content_sha256>/<path>                     a payload file: whoever writes it writes the same bytes
    <address>/<content_sha256>/_beside/<sha256>/<path>    a file that is no payload (a report, a log), under its own digest
    <address>/<content_sha256>/manifest.json              comes last: without it the artifact is unfinished, and never read
    <address>/keys/<stage>/<key>                          which artifact was made under a key
    <address>/used/<content_sha256>                       its time of change says when the artifact was used last
    <address>/removing/<content_sha256>/<mark>            who removes the artifact right now

An object is there whole or not at all, and no object's bytes are ever exchanged for others but the manifest's. So two writers of the same
content cannot leave one's report under the other's manifest, and a reader needs no lock.

Who uses an artifact first notes that, then looks whether somebody removes it; who removes one first notes that, then looks whether
somebody has used it. So one of the two sees the other: the remover gives up, or the user waits until it is gone, and makes it again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from components.common import artifacts, buckets, hashing, jobs
from components.common.artifacts import Artifact, File, Manifest
from components.common.errors import ArtifactDamagedError, EngineMissingError
from components.common.paths import link_or_copy
from components.common.progress import Reporter

BESIDE = "_beside"
TRIES, PAUSE = 10, 0.1  # looks at an artifact that another job replaces, and the seconds between them
USED, REMOVING = "used", "removing"
NO_ARTIFACTS = ("keys", "costs", "pins", USED, REMOVING)  # folders beside the artifacts
LEASE = 600.0  # seconds after which who removes an artifact counts as dead


def upload(address: str, artifact: Artifact, reporter: Reporter) -> None:
    """Have the bucket hold an artifact: what it lacks of the files, then the manifest. What a killed upload left there is used.

    Where another job puts the same content with another manifest in its place meanwhile, that is uploaded instead. Raises
    ArtifactDamagedError where the files are not what the manifest says, EngineMissingError.
    """
    home = f"{address}/{artifact.sha256}"
    use(address, artifact.sha256)
    reporter.step(f"writing to {address}")
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # right between the two renames of a job that replaces it
            said = (artifact.path / artifacts.MANIFEST).read_bytes()
            if buckets.read(f"{home}/{artifacts.MANIFEST}") == said:
                return
            if _uploaded(home, artifact.path, parsed(address, artifact.sha256, said), reporter):
                buckets.write(f"{home}/{artifacts.MANIFEST}", said.decode())
                return
        time.sleep(PAUSE)
    raise ArtifactDamagedError(
        f"the files in {artifact.path} are not what its {artifacts.MANIFEST} says, and were not written to {home}",
        hint=f"Remove {artifact.path} and run the step that made it again.",
    )


def _uploaded(home: str, folder: Path, manifest: Manifest, reporter: Reporter) -> bool:
    """Write what the bucket lacks of the files. False where one is not what the manifest says."""
    there = buckets.sizes(home)
    lacking = [file for file in manifest.files if there.get(_name(file)) != file.bytes]
    moved = _telling(sum(file.bytes for file in lacking), reporter)
    return all(_put(folder / file.path, home, file, moved) for file in lacking)


def _put(path: Path, home: str, file: File, moved: buckets.Moved) -> bool:
    """A file that is no payload may be another one by now, so what is checked is what is sent. Payload is the same in whichever folder."""
    if file.payload:
        buckets.put(path, f"{home}/{_name(file)}", moved)
        return True
    with tempfile.TemporaryDirectory() as own:
        kept = Path(own) / path.name
        link_or_copy(path, kept)
        whole = _is_whole(kept, file)
        if whole:
            buckets.put(kept, f"{home}/{_name(file)}", moved)
    return whole


def fetch(address: str, sha256: str, said: bytes, folder: Path, near: Path, reporter: Reporter) -> Artifact:
    """Lay an artifact out in a new folder, every digest checked; `said` is its manifest's text.

    Files that lie in `near` as they should be are not fetched again. Raises ArtifactDamagedError for an object that is missing or not what
    the manifest says, EngineMissingError.
    """
    home, manifest = f"{address}/{sha256}", parsed(address, sha256, said)
    here = {file.path for file in manifest.files if _is_whole(near / file.path, file)}
    lacking = [file for file in manifest.files if file.path not in here]
    reporter.step(f"fetching the {manifest.kind} from {address}")
    moved = _telling(sum(file.bytes for file in lacking), reporter)
    for file in manifest.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.path in here:
            link_or_copy(near / file.path, target)
        else:
            _get(home, file, target, moved)
    (folder / artifacts.MANIFEST).write_bytes(said)
    return Artifact(folder, manifest)


def _get(home: str, file: File, target: Path, moved: buckets.Moved) -> None:
    try:
        buckets.get(f"{home}/{_name(file)}", target, file.bytes, moved)
    except FileNotFoundError:
        raise _damaged(home, f"{_name(file)} is missing") from None
    if not _is_whole(target, file):
        raise _damaged(home, f"{_name(file)} is not what was written there")


def _is_whole(path: Path, file: File) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes and hashing.sha256_file(path) == file.sha256


def manifest(address: str, sha256: str) -> bytes | None:
    """The text of an artifact's manifest; None where the bucket has no such artifact that is finished. Raises EngineMissingError."""
    return buckets.read(f"{address}/{sha256}/{artifacts.MANIFEST}")


def parsed(address: str, sha256: str, said: bytes) -> Manifest:
    """A manifest's text as a manifest. Raises ArtifactDamagedError for one that cannot be read, or that is another artifact's."""
    home = f"{address}/{sha256}"
    try:
        found = Manifest.model_validate(json.loads(said))
    except (ValueError, ValidationError):
        raise _damaged(home, f"{artifacts.MANIFEST} cannot be read") from None
    if any(Path(file.path).is_absolute() or ".." in Path(file.path).parts for file in found.files):
        raise _damaged(home, f"{artifacts.MANIFEST} names a file outside of it")
    if sha256 != found.content_sha256 or sha256 != hashing.content_sha256((f.path, f.sha256) for f in found.files if f.payload):
        raise _damaged(home, f"{artifacts.MANIFEST} is that of another artifact")
    return found


def listed(address: str) -> list[str]:
    """The digests of what lies in the bucket, finished or not, sorted. Raises EngineMissingError."""
    return [name for name in buckets.folders(address) if name not in NO_ARTIFACTS]


def use(address: str, sha256: str) -> None:
    """Note that an artifact is used now, and wait until nobody removes it. Raises EngineMissingError."""
    note_use(address, sha256)
    until = time.monotonic() + LEASE
    while (others := buckets.times(f"{address}/{REMOVING}/{sha256}")) and time.monotonic() < until:
        note_use(address, sha256)
        now = buckets.changed(f"{address}/{USED}/{sha256}") or 0.0
        if all(now - began > LEASE for _, began in others.values()):
            return
        time.sleep(PAUSE)


def note_use(address: str, sha256: str) -> None:
    """Note that an artifact is used now. Who may not write there leaves no note."""
    with suppress(EngineMissingError):
        buckets.write(f"{address}/{USED}/{sha256}", "")


def unused(address: str) -> dict[str, tuple[int, float]]:
    """What lies in the bucket, finished or not: by digest the bytes, and the seconds since it was used. Raises EngineMissingError."""
    note = f"{address}/{REMOVING}/.now.{jobs.mark()}"
    buckets.write(note, "")
    try:
        now = buckets.changed(note) or 0.0
        used = {sha256: at for sha256, (_, at) in buckets.times(f"{address}/{USED}").items()}
        return {sha256: _unused(address, sha256, used.get(sha256), now) for sha256 in listed(address)}
    finally:
        buckets.delete(note)


def _unused(address: str, sha256: str, used: float | None, now: float) -> tuple[int, float]:
    """Bytes and seconds. What is being written counts as used."""
    there = buckets.times(f"{address}/{sha256}").values()
    return sum(size for size, _ in there), now - max((*(at for _, at in there), used or 0.0))


def remove(address: str, sha256: str, unused_for: float) -> bool:
    """Delete an artifact, its manifest first, unless it was used within so many seconds. Returns whether it is gone.

    What a killed removal left has no manifest, so nobody reads it; the next removal deletes the rest. Raises EngineMissingError.
    """
    home, note = f"{address}/{sha256}", f"{address}/{REMOVING}/{sha256}/{jobs.mark()}"
    buckets.write(note, "")
    began = time.monotonic()
    try:
        now, used = buckets.changed(note) or 0.0, buckets.changed(f"{address}/{USED}/{sha256}")
        if _unused(address, sha256, used, now)[1] < unused_for:
            return False
        buckets.delete(f"{home}/{artifacts.MANIFEST}")
        for name in buckets.sizes(home):
            if time.monotonic() - began > LEASE / 2:  # whoever waits may take this for dead soon
                return False
            buckets.delete(f"{home}/{name}")
        buckets.delete(f"{address}/{USED}/{sha256}")
    finally:
        buckets.delete(note)
    return True


def _name(file: File) -> str:
    return file.path if file.payload else f"{BESIDE}/{file.sha256}/{file.path}"


def _telling(total: int, reporter: Reporter) -> Callable[[int], None]:
    done = 0

    def moved(more: int) -> None:
        nonlocal done
        done += more
        reporter.progress(done, total, "bytes")

    return moved


def _damaged(home: str, what: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{home}/{what}", hint=f"Restore the object, or remove all below {home}/ and run the step that made it again."
    )
