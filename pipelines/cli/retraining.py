"""`tuneline retrain`: the next version of a model from captured traffic, if a trigger fires."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, UsageError
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    LauncherOption,
    PlatformOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    load_launcher,
    open_workdir,
    print_result,
)
from pipelines.cli.captured_traffic import (
    CaptureFileOption,
    FeedbackFilesOption,
    ModelFilterOption,
    SampledOption,
    UnratedOption,
    locked_traffic,
    read_latest_feedback,
)

if TYPE_CHECKING:
    from pipelines.retraining.shadow_pairs import ShadowPair
    from pipelines.retraining.triggers import TriggerOptions

RetrainingFolderOption = Annotated[Path, typer.Option("--folder", help="Folder for the state and the exported rows.")]
DriftOption = Annotated[
    Path | None,
    typer.Option(
        "--drift",
        help="Start a retraining if this file, the output of `tuneline traffic drift --json`, reports a new alarm.",
    ),
]
MinFeedbackOption = Annotated[
    int,
    typer.Option(
        "--min-feedback",
        min=0,
        help="Start a retraining after this number of answers with feedback since the last retraining. "
        "0: no feedback trigger.",
    ),
]
EveryDaysOption = Annotated[
    float,
    typer.Option(
        "--every-days",
        min=0,
        max=36500,
        help="Retrain if the last retraining is at least this number of days old, or if the model was never retrained. "
        "0: no such trigger.",
    ),
]
HeldBackOption = Annotated[
    float,
    typer.Option("--held-back", min=0.01, max=0.9, help="Share of subjects to hold back for evaluation."),
]
MaxLossOption = Annotated[
    float,
    typer.Option(
        "--max-loss",
        min=0,
        max=0.5,
        help="Tolerated decrease of the mean score in each comparison with the champion or, without a champion, the base "
        "model. Scores range from 0 to 1.",
    ),
]
ShadowDaysOption = Annotated[
    float,
    typer.Option(
        "--shadow-days",
        min=0,
        max=365,
        help="Decide based on live shadow answers, and refuse the candidate after this number of days "
        "without a decision. 0: decide based on held-back traffic.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check the triggers, and start nothing.")]


@app.command()
def retrain(
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    model: ModelFilterOption = "",
    folder: RetrainingFolderOption = Path("retraining"),
    drift: DriftOption = None,
    min_feedback: MinFeedbackOption = 0,
    every_days: EveryDaysOption = 0.0,
    held_back: HeldBackOption = 0.2,
    max_loss: MaxLossOption = 0.0,
    shadow_days: ShadowDaysOption = 0.0,
    sampled: SampledOption = False,
    include_unrated: UnratedOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    tracking_uri: TrackingUriOption = "",
    platform: PlatformOption = None,
    launcher: LauncherOption = "",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """If a trigger fires, train a version on captured traffic and compare it with the champion.

    The triggers are a drift alarm, an amount of feedback and an interval. If model_registry.auto_promote is true, a
    better version is promoted. Run this command regularly: it resumes an interrupted retraining.
    """
    from components.common.workspace import job_folders
    from pipelines.capture import traffic_export, traffic_files
    from pipelines.capture.traffic_export import ExportOptions
    from pipelines.config.platform_config import Platform, load_platform
    from pipelines.retraining import retraining
    from pipelines.retraining.triggers import TriggerOptions, check_triggers
    from pipelines.runs import local_runner

    triggers = TriggerOptions(drift, min_feedback, every_days)
    _check_options(triggers, has_rows=bool(feedback) or include_unrated, dry_run=dry_run)
    customization, now = load_config(config, sets), traffic_files.now()
    traffic_export.check_objective(customization)
    settings = load_launcher(platform, launcher)
    target = load_platform(platform) if platform else Platform()
    _check_files([*feedback, *([drift] if drift else [])])
    state = retraining.load_state(folder)
    is_shadow = shadow_days or (state.unfinished or {}).get("shadow")
    if is_shadow and not dry_run and not feedback:
        raise UsageError("--shadow-days requires --feedback", hint="Add the gateway's feedback file: --feedback FILE.")
    lines = read_latest_feedback(feedback).values()
    check = check_triggers(triggers, lines, state.last, now)
    if dry_run or not (check.reasons or state.unfinished):
        result = retraining.describe(check, state.unfinished)
        print_result(result, as_json, _format_result(result))
        return

    run = partial(
        local_runner.run,
        workdir=Workdir(workdir.absolute()),
        quiet=as_json,
        tracking_uri=tracking_uri or None,
        launcher=settings,
        rates=target.cost_rates,
        team_budgets=target.team_budgets,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with job_folders.folder_lock(folder):
        state = retraining.load_state(folder)
        cycle = state.unfinished or retraining.begin(state, check, now)

        def export_rows() -> None:
            with locked_traffic(capture, feedback, changes=True) as traffic:
                options = ExportOptions(model, include_unrated, held_back)
                latest = read_latest_feedback(feedback)
                retraining.export_rows(state, cycle, traffic, latest, options, only_sampled=sampled)

        export_rows()
        while not cycle["run"]:
            retraining.build_candidate(state, cycle, customization, run)
            export_rows()  # withdraws the run if a subject was erased during it
        read_pairs = partial(_read_pairs, capture, feedback, model, only_sampled=cycle.get("sampled", False))
        with open_workdir("retrain", as_json, workdir, tracking_uri, writes=True):
            retraining.decide(
                state,
                cycle,
                customization,
                max_loss,
                now=traffic_files.now(),
                shadow_days=shadow_days,
                read_pairs=read_pairs,
            )
    result = retraining.describe(check, cycle)
    print_result(result, as_json, _format_result(result))


def _check_options(triggers: TriggerOptions, *, has_rows: bool, dry_run: bool) -> None:
    """Check the options that need no file. `has_rows` states whether --feedback or --unrated selects rows."""
    if not (triggers.drift or triggers.min_feedback or triggers.every_days):
        raise UsageError(
            "no trigger is set; expected --drift, --min-feedback or --every-days",
            hint="Example: tuneline retrain --min-feedback 200 --every-days 30",
        )
    if not dry_run and not has_rows:
        raise UsageError("--feedback is not set", hint="Add the gateway's feedback file, or --unrated.")


def _check_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist", hint="Correct the path.")


def _read_pairs(capture: Path, feedback: list[Path], model: str, *, only_sampled: bool) -> list[ShadowPair]:
    """Return the pairs of client and shadow answers, read under the lock of the traffic."""
    from pipelines.retraining import shadow_pairs

    with locked_traffic(capture, feedback) as traffic:
        latest = read_latest_feedback(feedback)
        return shadow_pairs.read_pairs(traffic, latest, model, only_sampled=only_sampled).pairs


def _format_result(result: dict[str, Any]) -> list[str]:
    lines = [f"trigger: {reason}" for reason in result["reasons"]] or [
        f"no trigger: {format_count(result['feedback'], 'answer')} with feedback since the last retraining"
    ]
    if cycle := result["retraining"]:
        shadow = cycle.get("shadow") or {}
        tests = {"comparison": cycle["comparison"], "shadow comparison": shadow.get("comparison")}
        lines += [
            f"{name}: {test['decision']} after {format_count(test['pairs'], 'pair')}, mean difference "
            f"{test['mean_difference']:+.3f} ({test['low']:+.3f} to {test['high']:+.3f}), e-value {test['e_better']:.3g}"
            for name, test in tests.items()
            if test
        ]
        state = cycle["decision"] or ("shadow" if shadow else "not finished")
        lines.append(f"retraining {cycle['number']}: {state}  {cycle['reason']}".rstrip())
    return lines
