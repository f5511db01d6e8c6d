"""`tuneline traffic`: list, sample, compact, expire, erase and export captured traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, UsageError
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    OutputOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from pipelines.capture.erasure import Erasure
    from pipelines.capture.settings import CaptureSettings
    from pipelines.config.customization_config import Customization

MAX_PROMPT_CHARACTERS = 80  # of a row of `tuneline traffic list`

CaptureFileOption = Annotated[Path, typer.Option("--capture", help="Capture settings of the gateway (a YAML file).")]
FeedbackFilesOption = Annotated[
    list[Path], typer.Option("--feedback", help="Feedback file of a gateway. Repeatable. Default: none.")
]
ModelFilterOption = Annotated[str, typer.Option("--model", help="Model that answered. Default: all models.")]

DaysOption = Annotated[
    str,
    typer.Option("--days", metavar="FROM..TO", help="Days (UTC), such as 2026-11-01..2026-11-14. Default: all days."),
]
SampledOption = Annotated[
    bool,
    typer.Option("--sampled", help="Compare the models only on corrected requests from `tuneline traffic sample`."),
]
UnratedOption = Annotated[bool, typer.Option("--unrated", help="Include answers without feedback, unchanged.")]

traffic_app = typer.Typer(
    no_args_is_help=True,
    help="List, sample, compare, compact, expire, erase and export captured traffic of the gateway, and detect drift.",
)
app.add_typer(traffic_app, name="traffic")


@contextmanager
def locked_traffic(
    capture: Path, feedback: list[Path], *, below: str = "", changes: bool = False
) -> Iterator[CaptureSettings]:
    """Provide the settings, and lock the folder of the captured traffic, or provide a copy of the bucket.

    Args:
        capture: the capture file.
        feedback: files that must exist.
        below: copy only the files below this folder of the bucket. Default: all.
        changes: lock the bucket, and upload the changes of the copy at the end.

    Raises:
        InputError: the folder or a feedback file does not exist.
    """
    from components.common.workspace import job_folders
    from pipelines.capture import traffic_bucket
    from pipelines.capture.settings import load_settings

    settings = load_settings(capture)
    for path in (*([] if settings.bucket else [settings.folder]), *feedback):
        if not path.exists():
            raise InputError(
                f"{path} does not exist", hint=f"Start the gateway with --capture {capture}, or correct the path."
            )
    if settings.bucket:
        with traffic_bucket.open_copy(settings, below=below, changes=changes) as copy:
            yield copy
        return
    with job_folders.folder_lock(settings.folder):
        yield settings


@traffic_app.command("status")
def show_status(
    capture: CaptureFileOption = Path("capture.yaml"),
    requests_per_day: Annotated[
        int,
        typer.Option(
            "--requests-per-day", min=0, help="Estimate the storage for this number of requests per day and model."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check the capture file, and show the size and retention of each model's traffic.

    Also list unfinished erasures, and folders that other users can access.
    """
    from pipelines.capture import retention, traffic_bucket, traffic_files
    from pipelines.capture.settings import load_settings

    settings, today = load_settings(capture), traffic_files.now().date()
    if settings.bucket:
        traffic_bucket.check_bucket(settings)
        with traffic_bucket.open_copy(settings) as copy:
            result = retention.describe(copy, requests_per_day, today)
    else:
        result = retention.describe(settings, requests_per_day, today)
    print_result(result, as_json, lambda: _format_status(result))


@traffic_app.command("list")
def list_traffic(
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    model: ModelFilterOption = "",
    version: Annotated[str, typer.Option("--version", help="Version of the model. Default: all versions.")] = "",
    days: DaysOption = "..",
    state: Annotated[
        str, typer.Option("--state", help="State of the answer: complete, aborted or failed. Default: all.")
    ] = "",
    rating: Annotated[
        str, typer.Option("--rating", help="Rating of the answer: up, down or none. Requires --feedback. Default: all.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of answers.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List captured answers, newest first."""
    from pipelines.capture import row_selection, traffic_rows

    states = (traffic_rows.COMPLETE, traffic_rows.ABORTED, traffic_rows.FAILED)
    _check_choice("--state", state, states)
    _check_choice("--rating", rating, ("up", "down", row_selection.UNRATED))
    if rating and not feedback:
        raise UsageError("--rating requires --feedback", hint="Add the gateway's feedback file: --feedback FILE.")
    selection = row_selection.RowFilter(model, version, row_selection.parse_days(days, "--days"), state, rating)
    with locked_traffic(capture, feedback) as settings:
        found = row_selection.list_newest(settings, selection, read_latest_feedback(feedback), limit)
    print_result({"answers": found}, as_json, lambda: _format_answers(found))


@traffic_app.command("show")
def show_answer(
    answer_id: Annotated[str, typer.Argument(metavar="ID", help="ID of the answer, such as chatcmpl-….")],
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Show a captured answer with its request and feedback."""
    from pipelines.capture import row_selection

    with locked_traffic(capture, feedback) as settings:
        found = row_selection.find_row(settings, answer_id, read_latest_feedback(feedback))
    print_result(found, as_json, lambda: _format_answer(found))


@traffic_app.command("sample")
def sample_traffic(
    output: Annotated[Path, typer.Option("-o", "--output", help="New file for the sample.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="Maximum number of requests, one per subject.")] = 100,
    capture: CaptureFileOption = Path("capture.yaml"),
    model: ModelFilterOption = "",
    days: DaysOption = "..",
    held_back: Annotated[
        float,
        typer.Option(
            "--held-back",
            min=0,
            max=0.9,
            help="Share of subjects that `tuneline retrain` holds back. Only requests of these subjects are drawn. 0: "
            "draw from all subjects.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw a random sample of requests, omitting the models' answers. Editors add the best answer as `correction`.

    Pass the edited file as an additional --feedback file. With --sampled, `tuneline retrain` compares the models only on
    these corrections.
    """
    from pipelines.capture import review_sample, row_selection

    selection = row_selection.RowFilter(model, days=row_selection.parse_days(days, "--days"))
    with locked_traffic(capture, []) as settings:
        lines = review_sample.draw_sample(settings, selection, rows, seed, held_back)
    review_sample.write_sample(lines, output)
    result = {"output": str(output), "rows": len(lines)}
    print_result(
        result,
        as_json,
        [f"{format_count(len(lines), 'request')}, one per subject, in {output}; write the corrections into this file"],
    )


def _check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value and value not in allowed:
        raise UsageError(f"{option} is {value!r}; expected {', '.join(allowed)}", hint=f"Correct {option}.")


def read_latest_feedback(paths: list[Path]) -> dict[str, Mapping[str, Any]]:
    """Return the latest feedback by the answer's id.

    The correction of a sampled request replaces a user's correction, because users choose which answers they correct.
    Personal data in it is masked, as the gateway masks it in other corrections.
    """
    from components.common import personal_data
    from pipelines.capture import review_sample
    from pipelines.capture.training_rows import select_feedback
    from pipelines.gateway.feedback import read_feedback

    samples = [path for path in paths if review_sample.is_sample(path)]
    latest = select_feedback(line for path in paths if path not in samples for line in read_feedback(path))
    for path in samples:
        for line in review_sample.read_sample(path):
            if line["correction"].strip():
                correction = personal_data.mask(line["correction"])
                latest[line["id"]] = {**latest.get(line["id"], {}), **line, "correction": correction}
    return latest


def _get_eraser(path: Path) -> Callable[[Callable[[dict[str, Any]], bool]], int]:
    """Return the function that erases lines of a file of feedback or of a sample."""
    from pipelines.capture import review_sample
    from pipelines.gateway.feedback import erase_feedback

    return partial(review_sample.erase_lines if review_sample.is_sample(path) else erase_feedback, path)


@traffic_app.command("compact")
def compact_traffic(capture: CaptureFileOption = Path("capture.yaml"), as_json: JsonOption = False) -> None:
    """Compact each day before today into one Parquet file. Run this command daily."""
    from pipelines.capture import compaction, traffic_files

    with locked_traffic(capture, [], changes=True) as settings:
        days = compaction.compact(settings, traffic_files.now().date())
    lines = [
        f"{each['model']} {each['day']}: {format_count(each['rows'], 'row')}, {each['bytes']:,} bytes" for each in days
    ]
    print_result({"days": days}, as_json, lines or ["nothing to compact"])


@traffic_app.command("expire")
def expire_traffic(
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Delete days and feedback whose retention has ended. Run this command daily."""
    from pipelines.capture import retention, traffic_files

    today = traffic_files.now().date()
    with locked_traffic(capture, feedback, changes=True) as settings:
        days = retention.expire(settings, today)
        is_expired = partial(retention.is_feedback_expired, settings=settings, today=today)
        erased = sum(_get_eraser(path)(is_expired) for path in feedback)
    lines = [f"{each['model']} {each['day']}: deleted" for each in days]
    print_result(
        {"days": days, "feedback": erased}, as_json, [*lines, f"deleted {format_count(erased, 'line')} of feedback"]
    )


@traffic_app.command("erase")
def erase_subject(
    subject: Annotated[
        str, typer.Option("--subject", help="Subject as the gateway receives it. -: read it from standard input.")
    ],
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    requested_by: Annotated[
        str,
        typer.Option(
            "--by", help="User who requests the erasure, recorded in the tombstone. Default: the current user."
        ),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Erase a subject's captured rows, exported rows and feedback, and list the datasets, models and packages built from these rows.

    Exit with status 1 if rows remain, or if the search is incomplete.
    """
    from components.common.runtime.user_name import get_user_name
    from components.data_versioning.row_search import Query
    from pipelines.capture import erasure
    from pipelines.provenance import erasure_search

    subject = sys.stdin.read().strip() if subject == "-" else subject
    if not subject.strip():
        raise UsageError("--subject is empty", hint="Enter the subject as the gateway receives it.")
    if workdir != DEFAULT_WORKDIR_PATH and not workdir.exists():
        raise InputError(f"--workdir: {workdir} does not exist", hint="Correct the path. Nothing was erased.")
    with locked_traffic(capture, feedback, changes=True) as settings:
        if settings.subject.source == "none":
            raise UsageError(
                "subject.source is none: the captured rows have no subject",
                hint="To delete whole days, lower retention_days and run `tuneline traffic expire`.",
            )
        erasers = [_get_eraser(path) for path in feedback]
        erased = erasure.erase(settings, subject, requested_by or get_user_name(), erasers)
    result: dict[str, Any] = {**vars(erased), "complete": erased.is_complete, "derived": None}
    lines = _format_erasure(erased)
    is_complete = erased.is_complete
    if workdir.exists():
        with open_workdir("traffic", as_json, workdir, tracking_uri) as (reporter, work):
            settings_of_data = load_config(config, sets).data_versioning
            report = erasure_search.find_rows(Query("text", erased.subject), work, settings_of_data, reporter)
        result["derived"] = report.as_dict()
        lines += tables.format_search(report)
        is_complete = is_complete and report.is_complete
    else:
        lines.append(f"{workdir} does not exist: no dataset or model was searched")
    print_result(result, as_json, lines)
    if not is_complete:
        raise typer.Exit(1)


@traffic_app.command("export")
def export_traffic(
    output: OutputOption,
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    model: ModelFilterOption = "",
    include_unrated: UnratedOption = False,
    held_back: Annotated[
        float, typer.Option("--held-back", min=0, max=0.9, help="Share of subjects to hold back for evaluation.")
    ] = 0.0,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            help="Folder for a dataset, curated from the exported rows and the sources of the configuration.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the rows, and write nothing.")] = False,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Write corrected and well-rated answers as rows for curation: conversations and preference pairs.

    After an interruption, run the same command again to complete the export.
    """
    from pipelines.capture import traffic_export

    options = traffic_export.ExportOptions(model, include_unrated, held_back)
    customization = load_config(config, sets) if dataset else None
    if customization:
        traffic_export.check_objective(customization)
    with locked_traffic(capture, feedback, changes=True) as settings:
        latest = read_latest_feedback(feedback)
        if dry_run:
            beside = filesystem.find_nearest_existing_path(output.parent) / output.name  # makes no folder
            with traffic_export.draft_export(settings, latest, beside, options) as (draft, exported):
                rows = _preview_dataset(customization, draft, workdir, as_json) if customization else {}
        else:
            exported = traffic_export.export(settings, latest, output, options)
    result: dict[str, Any] = {"output": str(output), **asdict(exported), "dry_run": dry_run, "dataset": None}
    if customization and not dry_run:
        from pipelines.runs import single_stages

        assert dataset is not None
        traffic_export.add_exported_rows(customization, output)
        with open_workdir("traffic", as_json, workdir) as (reporter, work):
            result["dataset"] = single_stages.curate_sources(customization, dataset, work, reporter).as_dict()
        rows = result["dataset"]["rows"]
    elif customization:
        result["dataset"] = {"rows": rows}
    lines = [
        f"{format_count(exported.conversations, 'conversation')} and {format_count(exported.preferences, 'preference pair')} in {output}",
        *([f"{format_count(exported.held_back, 'conversation')} held back for evaluation"] if held_back else []),
        *(
            [
                f"{format_count(exported.left_out, 'answer')} omitted: the conversation is held back, or a held-back answer is not text"
            ]
            if exported.left_out
            else []
        ),
    ]
    if customization:
        rejected = ", ".join(f"{count} {reason}" for reason, count in rows["rejected"].items()) or "none"
        lines.append(f"dataset: {rows['kept']} of {rows['in']} rows kept; rejected: {rejected}")
    print_result(result, as_json, ["dry run: nothing was written", *lines] if dry_run else lines)


def _preview_dataset(customization: Customization, draft: Path, workdir: Path, as_json: bool) -> dict[str, Any]:
    """Return the counts of rows that curation would keep and reject, without near-duplicates."""
    from components.data_curation.stage import preview_curation, summarize_rows
    from pipelines.capture import traffic_export
    from pipelines.steps import curation_inputs

    traffic_export.add_exported_rows(customization, draft)
    with open_workdir("traffic", as_json, workdir) as (reporter, work):
        inputs = curation_inputs.list_inputs(customization, work, reporter)
        earlier = curation_inputs.load_stored_revisions(inputs.earlier_revisions, work)
        with preview_curation(
            inputs.sources,
            customization.data_curation,
            seed=customization.seed,
            reporter=reporter,
            benchmarks=inputs.benchmarks,
            earlier=earlier,
        ) as preview:
            return dict(summarize_rows(preview)["rows"])


def _format_status(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            each["model"],
            f"{each['sampling_rate']:g}",
            f"{each['retention_days'] or 'no limit'}{', legal hold' if each['legal_hold'] else ''}",
            each["days"],
            each["first_day"] or "",
            each["expired_days"],
            each["open_files"],
            f"{each['bytes']:,}",
        )
        for each in result["models"]
    ]
    columns = ("model", "sampling rate", "retention days", "days", "first day", "expired days", "open files", "bytes")
    lines = [result["folder"], *tables.render(tables.build_table(columns, rows))]
    for each in result["models"]:
        if estimate := each.get("estimate"):
            basis = "measured" if each["row_bytes_measured"] else "assumed"
            lines.append(
                f"{each['model']}: {estimate['requests_per_day']:,} requests per day need {estimate['bytes_per_day']:,} "
                f"bytes per day and {estimate['bytes']:,} bytes in {each['retention_days']} days, before compaction; "
                f"{basis} size of a row: {each['row_bytes']:,} bytes"
            )
    lines += [
        f"the erasure of {subject} is not finished: run `tuneline traffic erase` again"
        for subject in result["unfinished_erasures"]
    ]
    lines += [f"other users can read {path}: remove their permissions" for path in result["readable_by_others"]]
    return lines


def _format_erasure(erased: Erasure) -> list[str]:
    lines = [
        f"subject {erased.subject}: erased {format_count(erased.rows, 'row')} from {format_count(erased.files, 'file')}, "
        f"{format_count(erased.exported, 'row')} from exported files, and {format_count(erased.feedback, 'line')} of feedback"
    ]
    lines += [f"{model} is under a legal hold: its rows remain" for model in erased.held]
    lines += [f"not searched: {item}" for item in erased.not_searched]
    return lines


def _format_answers(answers: list[dict[str, Any]]) -> list[str]:
    if not answers:
        return ["no captured answers"]
    columns = ("time", "id", "model", "version", "state", "finish", "rating", "prompt")
    rows = []
    for each in answers:
        prompt = " ".join(each["prompt"].split())
        is_long = len(prompt) > MAX_PROMPT_CHARACTERS
        shown = f"{prompt[:MAX_PROMPT_CHARACTERS]}…" if is_long else prompt
        finish = ", ".join(filter(None, each["finish_reasons"]))
        names = (each["time"][:19].replace("T", " "), each["id"], each["model"], each["version"], each["state"])
        rows.append((*names, finish, each["rating"] or "", shown))
    return tables.render(tables.build_table(columns, rows))


def _format_answer(found: dict[str, Any]) -> list[str]:
    from pipelines.capture import row_selection

    lines = [f"{name}: {found[name]}" for name in ("id", "time", "model", "version", "state", "seconds", "rating")]
    messages = found["request"].get("messages") or [{"role": "prompt", "content": found["request"].get("prompt")}]
    parts = [(message["role"], message) for message in messages]
    parts += [("answer", choice.get("message") or choice) for choice in found["response"]["choices"]]
    for title, message in parts:
        calls = f"\n{json.dumps(message['tool_calls'])}" if message.get("tool_calls") else ""
        content = row_selection.join_parts(message.get("content", message.get("text")))
        lines += ["", f"[{title}]", f"{content}{calls}".strip()]
    given = found["feedback"] or {}
    if given.get("labels"):
        lines += ["", f"labels: {', '.join(given['labels'])}"]
    if given.get("correction"):
        lines += ["", "[correction]", given["correction"]]
    return lines
