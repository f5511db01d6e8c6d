"""The place that the steps run in: whether it is as platform.yaml says, looked at from within a pod before any other step.

Nobody can see from outside what a pod sees: what the volume really does, whether MLflow takes a run and a file, what a secret came to.
"""

from __future__ import annotations

import errno
import os
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from components.common import addresses, jobs, places, tracking
from components.common.errors import TunelineError, of_the_machine
from components.common.places import Workdir
from components.common.progress import Reporter
from pipelines.findings import Finding, all_well, finding
from pipelines.platform import PLACE, Platform, mounts

STEP = "check_the_platform"
GIB = 2**30
SPACE = 5 * GIB  # what the demo needs
TRIAL = "trial"  # a job's folder on the volume is trial.<where>.<process>.<digits>
NOTE = f"keys/{STEP}/{TRIAL}"  # where a store in a bucket keeps the note of its trial
LASTING = "Use a volume that keeps to POSIX: NFS, PowerScale, CephFS or a disk, and no bucket that is mounted as a folder."


class PlatformError(TunelineError):
    """The place that the pipeline runs in is not as its platform.yaml says."""

    kind = "platform"


def wanted(platform: Platform) -> dict[str, Any]:
    """What a pod of this platform should find: names and paths, no values."""
    shared = [mount for key, _, mount in mounts(platform) if key not in ("scratch", "shared_memory")]
    trusted = platform.network.certificates
    return {"mounts": shared, "variables": sorted(platform.secrets), "authorities": trusted.path if trusted.name else ""}


def check(asked: Mapping[str, Any], workdir: Workdir, reporter: Reporter, page: Path) -> None:
    """Look at everything, tell all that was found, and raise PlatformError where something that is needed is missing.

    `asked` is what `wanted` gave when the pipeline was compiled; `page` is a Markdown file for the Kubeflow UI.
    """
    found = [*_here(asked, workdir, reporter)]
    _write(page, found)
    reporter.step("writing to MLflow")
    found.append(_mlflow(page, workdir))
    _write(page, found)
    for one in found:
        reporter.note(
            f"{'ok' if one['ok'] else 'MISSING' if one['needed'] else 'without'}: {one['name']}: {one['found']} {one['hint']}".strip()
        )
    if not all_well(found):
        lacking = [one for one in found if one["needed"] and not one["ok"]]
        told = "; ".join(f"{one['name']}: {one['found']}" for one in lacking)
        raise PlatformError(f"this is not the place that platform.yaml describes: {told}", hint=" ".join(one["hint"] for one in lacking))


def _here(asked: Mapping[str, Any], workdir: Workdir, reporter: Reporter) -> Iterator[Finding]:
    reporter.step("looking at the volumes")
    yield from (_mounted(Path(mount)) for mount in asked["mounts"])
    for folder in dict.fromkeys((workdir.root, workdir.store, workdir.state, places.cache_dir())):
        yield _told(f"folder {folder}", partial(_trial, folder), LASTING)
    if (store := places.address(workdir.store)) != str(workdir.store):
        yield _told(f"store {store}", partial(_noted, workdir.store), "Check `store` in platform.yaml and the secrets that it asks for.")
    yield _space(workdir.root)
    yield _told("temporary files", _temporary, "Give the stages scratch space: resources.others.scratch in platform.yaml.")
    reporter.step("looking at secrets and authorities")
    yield from (_variable(name) for name in asked["variables"])
    if asked["authorities"]:
        yield _told("authorities", lambda: _authorities(asked["authorities"]), "Correct network.certificates in platform.yaml.")
    yield _account()


def _told(name: str, look: Callable[[], str], hint: str) -> Finding:
    """What `look` says it found; what it raises is a finding too."""
    try:
        return finding(name, True, look(), "")
    except (OSError, TunelineError, ValueError) as error:
        told = error if isinstance(error, TunelineError) else of_the_machine(error)
        said = addresses.masked(told.message if told else str(error))
        return finding(name, False, said, f"{told.hint if told else ''} {hint}".strip())


def _mounted(mount: Path) -> Finding:
    """A folder on the image's own disk, where a volume should be, would be gone with the pod."""
    name, hint = (
        f"volume at {mount}",
        "Compile the pipeline with the platform.yaml of this cluster, and look at the pod: kubectl describe pod",
    )
    if not mount.is_dir():
        return finding(name, False, "there is no such folder", hint)
    is_own = os.path.ismount(mount) or mount.stat().st_dev != Path("/").stat().st_dev
    return finding(name, is_own, "mounted" if is_own else "it is on the image's own disk, which ends with the pod", hint, needed=False)


def _trial(folder: Path) -> str:
    """Do in a folder what the artifact store does. Raises OSError or ValueError for a file system that does not do it."""
    folder.mkdir(parents=True, exist_ok=True)
    with jobs.private_folder(folder, TRIAL) as own:
        _kept(own / "file")
        _exclusive(own / "file", own / "link")
        _settled(own)
    return "writes, links and renames as the artifact store needs"


def _noted(store: Path) -> str:
    """Write a note to a store in a bucket, and read it back. It always says the same: two runs may look at once, and it stays there."""
    places.write_note(store, NOTE, STEP)
    if places.read_note(store, NOTE) != STEP:
        raise ValueError("what was written there is not what is read")
    return "takes a note and gives it back"


def _kept(file: Path) -> None:
    """What was written is there when it was forced out, also in the folder's own list."""
    said = os.urandom(1 << 16)
    with file.open("wb") as out:
        out.write(said)
        out.flush()
        os.fsync(out.fileno())
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if file.read_bytes() != said or file not in list(file.parent.iterdir()):
        raise ValueError("what was written there is not what is read")


def _exclusive(file: Path, link: Path) -> None:
    """One of two jobs that link to a name gets it: so a folder is held."""
    try:
        os.link(file, link)
    except OSError as error:
        raise ValueError(f"no hard link can be made there: {error.strerror}") from None
    try:
        os.link(file, link)
    except FileExistsError:
        return
    raise ValueError("a link replaced another one there")


def _settled(own: Path) -> None:
    """A whole folder moves to its place at once, and replaces none that holds something; a file replaces another at once."""
    made, home = own / "made", own / "home"
    for folder in (made, home):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.name, encoding="utf-8")
    try:
        made.rename(home)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise ValueError(f"a folder cannot be renamed there: {error.strerror}") from None
    else:
        raise ValueError("a rename replaced a folder there that held something")
    made.rename(own / "free")
    (own / "free" / "manifest.json").replace(home / "manifest.json")
    if (home / "manifest.json").read_text(encoding="utf-8") != "made":
        raise ValueError("a file did not replace another one there")


def _space(folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return finding("space on the volume", False, str(error.strerror), LASTING)
    return finding(
        "space on the volume", free > SPACE, f"{free / GIB:,.0f} GiB free", "Make room, or have the claim or its quota enlarged."
    )


def _temporary() -> str:
    with tempfile.TemporaryFile() as file:
        file.write(b"0")
    return tempfile.gettempdir()


def _variable(name: str) -> Finding:
    """Kubernetes puts a secret's value in as it is, with the line break that a text file ends with. No value is shown."""
    value = os.environ.get(name)
    ok = bool(value and (value == value.strip() or PLACE.search(name)))
    said = "is not set" if value is None else "is empty" if not value.strip() else "begins or ends with a space or a line break"
    hint = (
        f"Make the secret anew whose key platform.yaml names under secrets.{name}, with `printf %s VALUE > FILE` and --from-file=KEY=FILE."
    )
    return finding(f"variable {name}", ok, "is set" if ok else said, hint)


def _authorities(path: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    return f"{len(context.get_ca_certs())} in {path}"


def _account() -> Finding:
    """Who the pod is to Kubernetes. No step asks it for anything; what Kubeflow's own containers write as this account is said."""
    from pipelines.cluster import access, permissions
    from pipelines.cluster.look import Look

    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return finding("service account", True, "none, and none is needed", "")
    try:
        api = access.within(access.FIRST_WITHIN, "the cluster", access.of_this_pod)
        look = Look(api, Platform(), api.own_namespace)
        name, lacking = permissions.who(look), permissions.lacking(look)
    except TunelineError as error:
        return finding("service account", True, f"not told ({error.message}), and none is needed", "")
    hint = "Give it the role that Kubeflow's own account has: docs/platforms.md."
    return finding("service account", not lacking, f"{name} may not {', '.join(lacking)}" if lacking else name, hint, needed=False)


def _mlflow(page: Path, workdir: Workdir) -> Finding:
    """A run with a file in it, as every stage writes one."""

    def write() -> str:
        os.environ["MLFLOW_TRACKING_URI"] = workdir.tracking_uri
        with tracking.stage_run(STEP) as own:
            tracking.log_files(own, page)
        return f"a run and a file were written to {addresses.without_user(workdir.tracking_uri)}"

    return _written(write)


def _written(write: Callable[[], str]) -> Finding:
    hint = "Check mlflow.tracking_uri and the MLflow secrets in platform.yaml, and what the server lets this account do."
    try:
        return _told("MLflow", write, hint)
    except Exception as error:  # an artifact store fails in as many ways as there are kinds of it
        said = addresses.masked(" ".join(str(error).split()))[:300]
        return finding("MLflow", False, f"a file could not be written: {type(error).__name__}: {said}", hint)


def _write(page: Path, found: Sequence[Finding]) -> None:
    """A table for the Kubeflow UI."""
    marks = {(True, True): "ok", (True, False): "ok", (False, True): "**missing**", (False, False): "without"}
    rows = [f"| {marks[one['ok'], one['needed']]} | {one['name']} | {one['found']} | {one['hint']} |" for one in found]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(["| | what | found | what to do |", "|---|---|---|---|", *rows, ""]), encoding="utf-8")
