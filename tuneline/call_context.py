"""Context of a call: the caller's process keeps its environment variables, umask and MLflow tracking URI."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.common.launch import launcher_settings
from components.common.launch.launcher_settings import LauncherSettings
from components.common.reporting import mlflow_tracking
from components.common.runtime import process_control, reporters
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization

PathLike = str | Path
AnyCustomization = Customization | str | Path | None


def load(customization: AnyCustomization) -> Customization:
    """Return a checked copy of a customization, or load the one in a file; None stands for the defaults."""
    return (
        customization.copy_checked() if isinstance(customization, Customization) else Customization.load(customization)
    )


def load_launcher(platform: PathLike | None, launcher: str) -> LauncherSettings:
    """Load the launcher of a platform.yaml, or that of the environment; `launcher` replaces its kind."""
    from pipelines.config.platform_config import load_platform

    settings = load_platform(Path(platform)).launcher if platform else launcher_settings.load_settings()
    return launcher_settings.replace_kind(settings, launcher) if launcher else settings


@contextmanager
def open_call(
    prefix: str, workdir: PathLike, *, quiet: bool, tracking_uri: str | None = None
) -> Iterator[tuple[Workdir, Reporter]]:
    """Provide the workdir and a reporter for a terminal, log or notebook; restore the caller's process at the end.

    Args:
        prefix: start of the reporter's lines.
        workdir: folder with the artifact store, state, tracking data and runs.
        quiet: report nothing.
        tracking_uri: URI of the MLflow server. "": the workdir's tracking URI. None: the call does not use MLflow.
    """
    environment, umask = dict(os.environ), os.umask(0o077)
    os.umask(umask)
    process_control.restrict_new_files()
    reporter = reporters.create_console_reporter(quiet=quiet, prefix=f"{prefix}: " if prefix else "")
    try:
        with mlflow_tracking.restore_tracking_uri(), warnings.catch_warnings():
            # In a notebook without ipywidgets, tqdm asks for them when transformers imports it; tuneline uses neither.
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield artifact_store.enter_workdir(Path(workdir), tracking_uri), reporter
    finally:
        reporters.close_reporter(reporter)
        os.umask(umask)
        os.environ.clear()
        os.environ.update(environment)
