"""A version into service in the place of another, without a request lost: tried beside the old one first, then switched to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.common.errors import EngineMissingError, TunelineError
from components.common.progress import Reporter
from components.triton_packaging.deployment import layout, repository_api
from components.triton_packaging.deployment.layout import CANDIDATE, REPOSITORY, STREAM, Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.deployment.smoke import smoke_test
from components.triton_packaging.server import ModelLoadError


def switch(
    server: Address,
    folder: Path,
    name: str,
    new: Release,
    old: Release | None,
    *,
    lineage: Callable[[Release], dict[str, str]],
    confirm: Callable[[], None],
    timeout: float,
    reporter: Reporter,
) -> None:
    """Bring `new` into service under `name`, in the place of `old`, on a server whose model repository is the folder's.

    1. `new` is loaded as <name>_candidate and answers its proven prompts, then is unloaded. `confirm` raises where it is not wanted any
       more.
    2. It is loaded under its number beside `old`. Triton gives unversioned requests to it as soon as it is ready, and unloads
       `old` when its last answer is given, which is not waited for: `tidy` sees to what is left.

    Raises what went wrong (ModelLoadError, SmokeTestError; EngineMissingError where the server is gone); `old` then answers as before.
    """
    reporter.step(f"trying version {new.version}")
    with _candidate(server, folder, f"{name}{CANDIDATE}", new, lineage(new), timeout) as candidate:
        asked = smoke_test(server, new, candidate)
    reporter.note(f"version {new.version} was loaded beside the one in service and answered {asked} of its proven prompts")
    confirm()
    reporter.step(f"switching to version {new.version}")
    try:
        put_in_service(server, folder, name, new, lineage(new), timeout)
    except TunelineError:
        if old is not None:
            with suppress(TunelineError):  # the first error is the one to tell
                put_in_service(server, folder, name, old, lineage(old), timeout)
        raise


def put_in_service(server: Address, folder: Path, name: str, release: Release, lineage: dict[str, str], timeout: float) -> None:
    """Load a version under its number. The streaming model comes second: the one of the old version holds its partner until then."""
    for model in layout.lay_out(folder, release, name, lineage):
        if repository_api.loaded_from(server, model, release.version) != release.package.sha256:
            repository_api.load(server, model, release.version, timeout=timeout)
    if STREAM not in release.suffixes and (folder / REPOSITORY / f"{name}{STREAM}").exists():
        with suppress(TunelineError):  # that of a version before, which has no partner any more
            repository_api.unload(server, f"{name}{STREAM}")


@contextmanager
def _candidate(server: Address, folder: Path, name: str, release: Release, lineage: dict[str, str], timeout: float) -> Iterator[str]:
    """The release, loaded under a name of its own, which is taken away again: a model that failed to load makes the server not ready."""
    models = layout.lay_out(folder, release, name, lineage)
    try:
        for model in models:
            repository_api.load(server, model, release.version, timeout=timeout)
        yield name
    finally:
        with suppress(EngineMissingError):  # `tidy` does it when the server answers again
            _take_away(server, folder, name)


def _take_away(server: Address, folder: Path, name: str) -> None:
    for model in (f"{name}{STREAM}", name):
        if (folder / REPOSITORY / model).exists():
            with suppress(ModelLoadError):  # it was never loaded
                repository_api.unload(server, model)
    layout.forget_model(folder, name)


def tidy(server: Address, folder: Path, name: str, version: str) -> None:
    """Forget the versions that have given their last answers, and a candidate that a killed process left; `version` is in service.

    Raises EngineMissingError.
    """
    if (folder / REPOSITORY / f"{name}{CANDIDATE}").exists():
        _take_away(server, folder, f"{name}{CANDIDATE}")
    for model, found in layout.laid_out(folder, name):
        if found != version and repository_api.is_gone(server, model, found):
            layout.forget(folder, model, found)


def check_answers(server: Address) -> None:
    """Raise EngineMissingError where the server does not answer: what went wrong with a version was not its fault then."""
    repository_api.states(server, "")
