"""Replaces the deployed version: tests the new version next to it, then switches without losing a request.

Two vLLM versions that do not fit on one GPU are exchanged instead: the old version is unloaded first.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

from components.common.runtime.errors import EngineMissingError, TunelineError
from components.triton_packaging import vllm_package
from components.triton_packaging.deployment import repository_api, serving_folder
from components.triton_packaging.deployment.serving_folder import (
    CANDIDATE_SUFFIX,
    REPOSITORY_FOLDER,
    STREAM_SUFFIX,
    Release,
)
from components.triton_packaging.deployment.smoke_testing import smoke_test
from components.triton_packaging.triton_server import ModelLoadError, ServerAddress

MAX_SHARED_UTILIZATION = 0.5  # of a GPU's memory, for each of two vLLM engines


def try_release(server: ServerAddress, folder: Path, name: str, release: Release, timeout: float) -> int:
    """Load a release as <name>_candidate, run the smoke test, and unload it; return the number of tested prompts.

    The server must use the model repository of the serving folder. The deployed release answers requests meanwhile.

    Args:
        timeout: seconds for each of the release's models to load.

    Raises:
        ModelLoadError: the release does not load.
        SmokeTestError: its answers differ from its proof.
        EngineMissingError: the server does not answer.
    """
    candidate = f"{name}{CANDIDATE_SUFFIX}"
    models = serving_folder.install_release(folder, release, candidate)
    try:
        for model in models:
            repository_api.load_model(server, model, release.version, timeout=timeout)
        return smoke_test(server, release, candidate)
    finally:  # a model that failed to load would make the server not ready
        with suppress(EngineMissingError):  # `remove_retired_versions` removes the candidate later
            _remove_candidate(server, folder, candidate)


def switch_version(
    server: ServerAddress, folder: Path, name: str, new_release: Release, old_release: Release | None, timeout: float
) -> None:
    """Deploy a tested release under `name` in place of the old release.

    Triton loads the new version next to the old version. When the new version is ready, Triton routes all unversioned
    requests to it, and unloads the old version after its last answer. `remove_retired_versions` removes the old files
    later. If an error is raised, the old release continues to answer requests.

    Args:
        timeout: seconds for each model to load.

    Raises:
        ModelLoadError: the new release does not load.
        EngineMissingError: the server does not answer.
    """
    try:
        deploy_version(server, folder, name, new_release, timeout)
    except TunelineError:
        if old_release is not None:
            with suppress(TunelineError):  # the first error is raised
                deploy_version(server, folder, name, old_release, timeout)
        raise


def must_unload_first(release: Release) -> bool:
    """Return whether two versions do not fit on one GPU: a vLLM engine reserves a share of the whole memory."""
    folder = release.package.path / release.packaged_name
    return any(
        json.loads(path.read_text(encoding="utf-8")).get("gpu_memory_utilization", 0.9) > MAX_SHARED_UTILIZATION
        for path in folder.glob(f"*/{vllm_package.MODEL_FILENAME}")
    )


def exchange_version(
    server: ServerAddress, folder: Path, name: str, new_release: Release, old_release: Release | None, timeout: float
) -> int:
    """Unload the deployed release after its last answer, load the new one, and test it; return the tested prompts.

    Until the new release is loaded, the server refuses requests. If an error is raised, the old release is loaded again.

    Args:
        timeout: seconds for each model to load.

    Raises:
        ModelLoadError: the new release does not load.
        SmokeTestError: its answers differ from its proof.
        EngineMissingError: the server does not answer.
    """
    _unload(server, folder, name)
    try:
        deploy_version(server, folder, name, new_release, timeout)
        return smoke_test(server, new_release, name)
    except TunelineError:
        if old_release is not None:
            with suppress(TunelineError):  # the first error is raised
                _unload(server, folder, name)
                deploy_version(server, folder, name, old_release, timeout)
        raise


def deploy_version(server: ServerAddress, folder: Path, name: str, release: Release, timeout: float) -> None:
    """Load a version under its number.

    The engine model is loaded first. The old streaming model keeps the old engine model loaded until the new streaming
    model replaces it.

    Args:
        timeout: seconds for each model to load.

    Raises:
        ModelLoadError: a model does not load.
        EngineMissingError: the server does not answer.
    """
    for model in serving_folder.install_release(folder, release, name):
        if repository_api.get_loaded_package(server, model, release.version) != release.package.sha256:
            repository_api.load_model(server, model, release.version, timeout=timeout)
    if STREAM_SUFFIX not in release.suffixes and (folder / REPOSITORY_FOLDER / f"{name}{STREAM_SUFFIX}").exists():
        with suppress(TunelineError):  # a streaming model of an earlier version
            repository_api.unload_model(server, f"{name}{STREAM_SUFFIX}")


def _remove_candidate(server: ServerAddress, folder: Path, name: str) -> None:
    _unload(server, folder, name)
    for suffix in (STREAM_SUFFIX, ""):
        shutil.rmtree(folder / REPOSITORY_FOLDER / f"{name}{suffix}", ignore_errors=True)


def _unload(server: ServerAddress, folder: Path, name: str) -> None:
    for model in (f"{name}{STREAM_SUFFIX}", name):
        if (folder / REPOSITORY_FOLDER / model).exists():
            with suppress(ModelLoadError):  # the model was never loaded
                repository_api.unload_model(server, model)


def remove_retired_versions(server: ServerAddress, folder: Path, name: str, version: str) -> None:
    """Remove unloaded versions, and the candidate of a killed process.

    Args:
        version: the deployed version, which is kept.

    Raises:
        EngineMissingError: the server does not answer.
    """
    if (folder / REPOSITORY_FOLDER / f"{name}{CANDIDATE_SUFFIX}").exists():
        _remove_candidate(server, folder, f"{name}{CANDIDATE_SUFFIX}")
    for model, installed in serving_folder.list_installed_versions(folder, name):
        if installed != version and repository_api.is_unloaded(server, model, installed):
            (folder / REPOSITORY_FOLDER / model / installed).unlink(missing_ok=True)


def check_reachable(server: ServerAddress) -> None:
    """Raise EngineMissingError if the server does not answer."""
    repository_api.get_version_states(server, "")
