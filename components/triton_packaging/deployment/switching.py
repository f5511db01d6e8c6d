"""A version into service in the place of another, without a request lost: tried beside the old one first, then switched to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.common.errors import TunelineError
from components.common.progress import Reporter
from components.triton_packaging.deployment import layout, repository_api
from components.triton_packaging.deployment.layout import CANDIDATE, Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.deployment.smoke import smoke_test

RETIRE_SECONDS = 300.0  # that the last answers of a replaced version may take


def switch(
    server: Address,
    folder: Path,
    name: str,
    new: Release,
    old: Release | None,
    *,
    lineage: Callable[[Release], dict[str, str]],
    timeout: float,
    reporter: Reporter,
) -> None:
    """Bring `new` into service under `name`, in the place of `old`, on a server whose model repository is the folder's.

    1. `new` is loaded as <name>_candidate and answers its proven prompts, then is unloaded.
    2. It is loaded under its number beside `old`. Triton gives unversioned requests to it as soon as it is ready, and unloads
       `old` when its last answer is given.

    Raises what went wrong (ModelLoadError, SmokeTestError, EngineMissingError); `old` then answers as before.
    """
    reporter.step(f"trying version {new.version}")
    with _candidate(server, folder, f"{name}{CANDIDATE}", new, lineage(new), timeout) as candidate:
        asked = smoke_test(server, new, candidate)
    reporter.note(f"version {new.version} was loaded beside the one in service and answered {asked} of its proven prompts")
    reporter.step(f"switching to version {new.version}")
    try:
        put_in_service(server, folder, name, new, lineage(new), timeout)
    except TunelineError:
        if old is not None:
            with suppress(TunelineError):  # the first error is the one to tell
                put_in_service(server, folder, name, old, lineage(old), timeout)
        raise
    if old is not None and old.version != new.version:
        _retire(server, folder, name, old, reporter)


def put_in_service(server: Address, folder: Path, name: str, release: Release, lineage: dict[str, str], timeout: float) -> None:
    """Load a version under its number. The streaming model comes second: the one of the old version holds its partner until then."""
    for model in layout.lay_out(folder, release, name, lineage):
        if not repository_api.is_served(server, model, release.version):
            repository_api.load(server, model, release.version, timeout=timeout)


@contextmanager
def _candidate(server: Address, folder: Path, name: str, release: Release, lineage: dict[str, str], timeout: float) -> Iterator[str]:
    """The release, loaded under a name of its own, which is taken away again: a model that failed to load makes the server not ready."""
    models = layout.lay_out(folder, release, name, lineage)
    try:
        for model in models:
            repository_api.load(server, model, release.version, timeout=timeout)
        yield name
    finally:
        for model in reversed(models):
            with suppress(TunelineError):
                repository_api.unload(server, model)
        layout.forget_model(folder, name)


def _retire(server: Address, folder: Path, name: str, old: Release, reporter: Reporter) -> None:
    """Wait for the old version's last answers, so that its files are not taken away under it."""
    reporter.step(f"letting version {old.version} finish its answers")
    until = time.monotonic() + RETIRE_SECONDS
    while time.monotonic() < until:
        if all(repository_api.is_gone(server, f"{name}{suffix}", old.version) for suffix in old.suffixes):
            layout.forget(folder, name, old.version)
            return
        time.sleep(0.2)
    reporter.note(f"version {old.version} still answers after {RETIRE_SECONDS:.0f} seconds; it goes when it has ended")
