"""`tuneline traffic drift`: check captured prompts for drift, with a report, metrics and an exit code for schedulers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import EXIT_REFUSED, UsageError
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    load_config,
    open_workdir,
    print_result,
)
from pipelines.cli.captured_traffic import (
    CaptureFileOption,
    FeedbackFilesOption,
    locked_traffic,
    read_latest_feedback,
    traffic_app,
)

if TYPE_CHECKING:
    from pipelines.capture.settings import CaptureSettings
    from pipelines.drift.captured_prompts import Prompt
    from pipelines.drift.drift_check import DriftCheck

EXIT_ALARM = EXIT_REFUSED  # an answer for schedulers, not a failure

ReferenceOption = Annotated[
    str,
    typer.Option(
        "--reference",
        metavar="DATASET_OR_REV",
        help="Compare with this dataset folder or revision of the data repository. With --reference-days, this "
        "comparison is additional and does not affect the alarm.",
    ),
]
ReferenceDaysOption = Annotated[
    str,
    typer.Option(
        "--reference-days",
        metavar="FROM..TO",
        help="Reference days (UTC); later days are tested. Default: the first 14 days from the first "
        "captured prompt, unless --reference is set.",
    ),
]
AnsweringModelOption = Annotated[
    str, typer.Option("--model", help="Model that answered. Required if traffic of several models was captured.")
]
WindowOption = Annotated[str, typer.Option("--window", help="Size of a window: a number of prompts, day or week.")]
EmbeddingModelOption = Annotated[
    str,
    typer.Option(
        "--embedding-model",
        help="Model for the embeddings: a source, or the folder of a model or package. Default: the model that answered, "
        "if the artifact store contains it.",
    ),
]
EmbeddingsOption = Annotated[
    str,
    typer.Option(
        "--embeddings",
        help="Embeddings of the prompts. input: mean of the input embeddings, without a forward pass. hidden_states: "
        "hidden states of an encoder.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the permutations and samples.")]
ReportFolderOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder of the report. Default: no report is written.")
]
MetricsFileOption = Annotated[
    Path | None, typer.Option("--metrics", help="Write the metrics to this Prometheus text file, for node_exporter.")
]
MlflowOption = Annotated[bool, typer.Option("--mlflow", help="Log e-values and p-values to an MLflow run.")]
FailOnAlarmOption = Annotated[bool, typer.Option("--fail-on-alarm", help="Exit with status 3 on an alarm.")]


@traffic_app.command("drift")
def check_traffic_drift(
    reference: ReferenceOption = "",
    reference_days: ReferenceDaysOption = "",
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    model: AnsweringModelOption = "",
    window: WindowOption = "200",
    embedding_model: EmbeddingModelOption = "",
    embeddings: EmbeddingsOption = "input",
    seed: SeedOption = 0,
    output: ReportFolderOption = None,
    metrics: MetricsFileOption = None,
    log_to_mlflow: MlflowOption = False,
    fail_on_alarm: FailOnAlarmOption = False,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Check whether captured prompts have changed, with a test of each window and an alarm over all windows."""
    from pipelines.capture import row_selection, traffic_files
    from pipelines.drift import captured_prompts, drift_check, drift_inputs, drift_outputs, embedding_source

    size = captured_prompts.parse_window(window)
    days = row_selection.parse_days(reference_days, "--reference-days") if reference_days else None
    if days and not days.last:
        raise UsageError("--reference-days has no last day", hint="Example: --reference-days 2026-11-01..2026-11-14")
    versioning, today = load_config(config, sets).data_versioning, traffic_files.now().date()
    with open_workdir("traffic", as_json, workdir, tracking_uri, writes=log_to_mlflow) as (reporter, work):
        with locked_traffic(capture, feedback) as settings:
            captured = drift_inputs.read_captured_prompts(settings, model, read_latest_feedback(feedback))
        texts = drift_inputs.read_dataset_prompts(reference, versioning, work.root, reporter) if reference else []
        if days or not reference:
            days, accepted, tested = drift_inputs.divide_by_days(captured, days)
            clean, _ = captured_prompts.split_windows(accepted, size, today, seed)
            known = drift_check.Reference.from_windows(f"days {days}", clean)
        else:
            tested = captured.prompts
            known, texts = drift_check.Reference(f"dataset {reference}", texts), []
        windows, pending = captured_prompts.split_windows(tested, size, today, seed)
        folder = (
            embedding_source.find_folder(embedding_model, reporter)
            if embedding_model
            else embedding_source.find_answering_model(work.store, captured.model_sha256, reporter)
        )
        embed = embedding_source.build_embedder(folder, embeddings)
        reporter.step(f"testing {format_count(len(windows), 'window')}")
        check = drift_check.check_drift(known, windows, embed, seed, texts)
        result = {
            **check.as_json(),
            "model": captured.model,
            "model_sha256": captured.model_sha256,
            "embeddings": embeddings,
            "dataset": reference or None,
            "pending": pending,
        }
        result["limitations"] = [*captured.limitations, *check.limitations]
        if output:
            result["report"] = _write_report(output, result, check, windows, seed, settings)
        if metrics:
            drift_outputs.write_metrics(metrics, result, time.time())
        if log_to_mlflow:
            result["mlflow"] = {"run_id": drift_outputs.log_to_mlflow(result)}
    print_result(result, as_json, lambda: _format_result(result))
    if result["alarm"] and fail_on_alarm:
        raise typer.Exit(EXIT_ALARM)


def _write_report(
    folder: Path,
    result: dict[str, Any],
    check: DriftCheck,
    windows: Sequence[Sequence[Prompt]],
    seed: int,
    settings: CaptureSettings,
) -> str:
    """Write the page with the examples of new prompts, and return its path."""
    from pipelines.drift import new_prompts, report

    prompts = [prompt for window in windows for prompt in window]
    reference, tested = check.embeddings[: check.reference_size], check.embeddings[check.reference_size :]
    clusters, share = new_prompts.find_clusters(reference, tested, prompts, seed)
    return str(report.write_report(folder, result, clusters, share, settings.group_id))


def _format_result(result: dict[str, Any]) -> list[str]:
    names = list(result["windows"][0]["tests"])
    columns = ("window", "from", "to", "prompts", "e-value", *(f"p {name}" for name in names))
    rows = [
        (
            number,
            *(each[end][:16].replace("T", " ") for end in ("from", "to")),
            each["n"],
            f"{each['e_value']:.4g}",
            *(f"{each['tests'][name]['p']:.2g}" for name in names),
        )
        for number, each in enumerate(result["windows"], 1)
    ]
    reference = f"{result['reference']['name']}, {format_count(result['reference']['prompts'], 'prompt')}"
    lines = [f"{result['model']}: reference {reference}", *tables.render(tables.build_table(columns, rows))]
    lines.append(f"{format_count(result['pending'], 'prompt is', 'prompts are')} not yet in a complete window")
    lines += [f"limitation: {each}" for each in result["limitations"]]
    if result["report"]:
        lines.append(f"report: {result['report']}")
    verdict = f"ALARM: prompts have changed, first seen in window {result['alarm_window']}"
    return [*lines, verdict if result["alarm"] else "no alarm"]
