"""`tuneline.run`: the whole pipeline on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, overload

from components.common.launch import launcher_settings
from components.common.runtime.relative_paths import shorten_paths
from components.common.workspace.artifact_store import DEFAULT_WORKDIR
from pipelines.config.customization_config import DEMO_PATH
from pipelines.runs.results import RunResult
from tuneline import call_context
from tuneline.call_context import AnyCustomization, PathLike


@dataclass(frozen=True, repr=False)
class RunEstimate:
    """Rows, tokens, steps, memory, disk space and time that a run would require; `str()` formats them as text.

    Attributes:
        values: the object that `tuneline run --dry-run --json` prints.
    """

    values: dict[str, Any]

    def __str__(self) -> str:
        from pipelines.planning.dry_run import format_estimate

        return "\n".join(format_estimate(self.values))

    def __repr__(self) -> str:
        rows, seconds = self.values["rows"]["kept"], self.values["seconds"]["total"]
        return f"RunEstimate(rows={rows}, steps={self.values['steps']}, seconds={seconds})"

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre-wrap'>{escape(shorten_paths(str(self)))}</pre>"


@overload
def run(
    customization: AnyCustomization,
    workdir: PathLike = ...,
    *,
    dry_run: Literal[False] = ...,
    tracking_uri: str = ...,
    platform: PathLike | None = ...,
    launcher: str = ...,
    quiet: bool = ...,
) -> RunResult: ...
@overload
def run(
    customization: AnyCustomization,
    workdir: PathLike = ...,
    *,
    dry_run: Literal[True],
    tracking_uri: str = ...,
    platform: PathLike | None = ...,
    launcher: str = ...,
    quiet: bool = ...,
) -> RunEstimate: ...
def run(
    customization: AnyCustomization,
    workdir: PathLike = DEFAULT_WORKDIR,
    *,
    dry_run: bool = False,
    tracking_uri: str = "",
    platform: PathLike | None = None,
    launcher: str = "",
    quiet: bool = False,
) -> RunResult | RunEstimate:
    """Run the whole pipeline: curate, version, fine-tune, evaluate, package, register and promote.

    The run is a child process, as with `tuneline run`. Results of finished stages come from the cache, and the
    same call resumes an interrupted run. A KeyboardInterrupt stops the run after it has saved its work.

        result = run(Customization.load("customization.yaml"), workdir="my-project")
        print(result.verdict, result.artifacts.model)

    Args:
        customization: the customization, or the path of its file. None: the demo, as for `tuneline run`.
        workdir: folder with the artifact store, state, tracking data and runs.
        dry_run: estimate the run, and write nothing.
        tracking_uri: URI of the MLflow server. Default: MLFLOW_TRACKING_URI, or a local store in the workdir.
        platform: platform.yaml whose `launcher` section configures the launcher of the training job.
        launcher: launcher of the training job. Default: that of `platform` or of TUNELINE_LAUNCHER.
        quiet: report no progress.

    Returns:
        The result with the fields of `tuneline run --json`; for a dry run, the estimate.

    Raises:
        TunelineError: the configuration is invalid, another run works in the workdir, or a step failed.
    """
    config = call_context.load(DEMO_PATH if customization is None else customization)
    config.check()
    with call_context.open_call(
        "dry run" if dry_run else "", workdir, quiet=quiet, tracking_uri=tracking_uri
    ) as opened:
        work, reporter = opened
        settings = call_context.load_launcher(platform, launcher)
        os.environ.update(launcher_settings.to_environment(settings), TOKENIZERS_PARALLELISM="false")
        if dry_run:
            from pipelines.planning.dry_run import estimate_run

            return RunEstimate(estimate_run(config, work, reporter))
        from pipelines.runs.child_run import run_customization

        return run_customization(config, work, reporter)
