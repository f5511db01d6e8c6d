"""`tuneline synthesize`: rows that a teacher model generates from documents, or its answers to existing prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
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
    from pipelines.synthesis.teacher_budget import TeacherBudget

# The maximum of each number also excludes NaN, with which a limit would never be reached.
TEACHER, ROWS, LIMITS, JUDGE = "Teacher", "Rows", "Limits and estimate", "Judge"
TeacherOption = Annotated[
    str,
    typer.Option(
        "--teacher",
        metavar="URL_OR_MODEL",
        help="URL of an OpenAI-compatible endpoint (omit /chat/completions), folder of a tuned model, source of a base "
        "model, or NAME@ALIAS.",
        rich_help_panel=TEACHER,
    ),
]
SourcesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Documents, globs or folders, as in `tuneline curate`; for answer@1, rows or a dataset. Default: "
        "data_curation.sources of the configuration."
    ),
]
TeacherModelOption = Annotated[
    str,
    typer.Option(
        "--teacher-model",
        help="Name of the model at the endpoint. Default: its only model.",
        rich_help_panel=TEACHER,
    ),
]
TeacherKeyOption = Annotated[
    str,
    typer.Option(
        "--teacher-key",
        metavar="VARIABLE",
        help="Environment variable with the API key. Default: no key.",
        rich_help_panel=TEACHER,
    ),
]
TemplateOption = Annotated[
    list[str],
    typer.Option(
        "--template",
        help="Template: qa@1, multi-turn@1, preference@1, answer@1 (answers to the prompts of rows), or the path of a "
        "template file. Repeatable.",
        rich_help_panel=ROWS,
    ),
]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Number of rows.", rich_help_panel=ROWS)]
PerPassageOption = Annotated[
    int | None,
    typer.Option(
        "--per-passage",
        min=1,
        max=1000,
        help="Maximum number of rows per template and passage (default: 3) or prompt (default: 1).",
        rich_help_panel=ROWS,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature",
        min=0,
        max=2,
        help="Sampling temperature of the answers. 0: greedy decoding.",
        rich_help_panel=TEACHER,
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.01,
        max=1,
        help="Cumulative probability of the tokens to sample from (top-p).",
        rich_help_panel=TEACHER,
    ),
]
AnswerTokensOption = Annotated[
    int,
    typer.Option("--answer-tokens", min=16, help="Maximum length of an answer in tokens.", rich_help_panel=TEACHER),
]
RepairsOption = Annotated[
    int,
    typer.Option(
        "--repairs",
        min=0,
        max=5,
        help="Maximum number of requests to correct an answer with an invalid structure.",
        rich_help_panel=ROWS,
    ),
]
MinSupportOption = Annotated[
    float,
    typer.Option(
        "--min-support",
        min=0,
        max=1,
        help="Minimum share of an answer's content words that occur in the passage or the question. Ignored with "
        "answer@1.",
        rich_help_panel=ROWS,
    ),
]
MaxDocumentShareOption = Annotated[
    float | None,
    typer.Option(
        "--max-document-share",
        min=0.001,
        max=1,
        help="Maximum share of rows from one document. The limit is never below an equal share for each document. "
        "Default: 0.25; with answer@1: no limit.",
        rich_help_panel=ROWS,
    ),
]
JudgeOption = Annotated[
    str,
    typer.Option(
        "--judge",
        metavar="URL_OR_MODEL",
        help="Judge model that rates the rows from 1 to 10. Accepts the same values as --teacher. Default: no judge.",
        rich_help_panel=JUDGE,
    ),
]
JudgeModelOption = Annotated[
    str,
    typer.Option(
        "--judge-model",
        help="Name of the judge at its endpoint. Default: the endpoint's only model.",
        rich_help_panel=JUDGE,
    ),
]
JudgeKeyOption = Annotated[
    str,
    typer.Option(
        "--judge-key",
        metavar="VARIABLE",
        help="Environment variable with the judge's API key.",
        rich_help_panel=JUDGE,
    ),
]
MinScoreOption = Annotated[
    int, typer.Option("--min-score", min=1, max=10, help="Minimum score of an accepted row.", rich_help_panel=JUDGE)
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(
        "--concurrency",
        min=1,
        max=256,
        help="Number of concurrent requests, or of answers per batch of a local model.",
        rich_help_panel=LIMITS,
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-seconds", min=1, max=86_400, help="Timeout of a request in seconds.", rich_help_panel=LIMITS
    ),
]
RetriesOption = Annotated[
    int,
    typer.Option("--retries", min=0, max=10, help="Maximum number of retries per request.", rich_help_panel=LIMITS),
]
MaxCostOption = Annotated[
    float | None,
    typer.Option(
        "--max-cost",
        min=0,
        max=1e9,
        help="Maximum cost, in the currency of the prices. Requires a price.",
        rich_help_panel=LIMITS,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help="Maximum number of tokens of all prompts and answers.", rich_help_panel=LIMITS
    ),
]
InputPriceOption = Annotated[
    float,
    typer.Option("--input-price", min=0, max=1e9, help="Price per million prompt tokens.", rich_help_panel=LIMITS),
]
OutputPriceOption = Annotated[
    float,
    typer.Option("--output-price", min=0, max=1e9, help="Price per million answer tokens.", rich_help_panel=LIMITS),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Estimate requests, tokens and cost; request no answers, except with --probe.",
        rich_help_panel=LIMITS,
    ),
]
ProbeOption = Annotated[
    int,
    typer.Option(
        "--probe",
        min=0,
        help="With --dry-run: request this number of rows to measure yield and time. A later run reuses the answers.",
        rich_help_panel=LIMITS,
    ),
]
OverwriteRowsOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the rows in the output folder; stored answers are reused.")
]


@app.command()
def synthesize(
    output: OutputOption,
    teacher: TeacherOption,
    sources: SourcesArgument = None,
    teacher_model: TeacherModelOption = "",
    teacher_key: TeacherKeyOption = "",
    template: TemplateOption = ["qa@1"],  # noqa: B006
    rows: RowsOption = 100,
    per_passage: PerPassageOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    answer_tokens: AnswerTokensOption = 512,
    repairs: RepairsOption = 1,
    min_support: MinSupportOption = 0.7,
    max_document_share: MaxDocumentShareOption = None,
    judge: JudgeOption = "",
    judge_model: JudgeModelOption = "",
    judge_key: JudgeKeyOption = "",
    min_score: MinScoreOption = 7,
    concurrency: ConcurrencyOption = 4,
    timeout: TimeoutOption = 120.0,
    retries: RetriesOption = 3,
    max_cost: MaxCostOption = None,
    max_tokens: MaxTokensOption = None,
    input_price: InputPriceOption = 0.0,
    output_price: OutputPriceOption = 0.0,
    dry_run: DryRunOption = False,
    probe: ProbeOption = 0,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteRowsOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    tracking_uri: TrackingUriOption = "",
    as_json: JsonOption = False,
) -> None:
    """Generate rows for `tuneline curate` with a teacher model: from documents, or by answering the prompts of rows.

    After an interruption, run the same command again to resume. The command reuses stored answers.
    """
    if max_cost is not None and not (input_price or output_price):
        raise UsageError(
            "--max-cost requires a price", hint="Add --input-price and --output-price, or use --max-tokens."
        )
    if probe and not dry_run:
        raise UsageError("--probe requires --dry-run", hint="Add --dry-run, or omit --probe.")
    if (judge_model or judge_key) and not judge:
        raise UsageError("--judge-model and --judge-key require --judge", hint="Set the judge with --judge.")
    customization = load_config(config, sets)
    if not sources and config is None and not sets:
        raise UsageError("Missing argument 'sources'", hint="Specify documents, or a configuration with -c.")
    from pipelines.runs.single_stages import select_sources
    from pipelines.synthesis import synthesis_run
    from pipelines.synthesis.settings import SynthesisSettings
    from pipelines.synthesis.teacher_budget import TeacherBudget
    from pipelines.synthesis.teachers import Sampling, TeacherOptions

    if sources:
        select_sources(customization, sources)
    settings = SynthesisSettings(
        tuple(template),
        rows,
        per_passage or 0,
        Sampling(temperature, top_p, answer_tokens, customization.seed),
        repairs,
        min_support,
        max_document_share or 0.0,
        min_score,
        customization.data_curation.near_duplicate_threshold,
    )
    limits = (concurrency, timeout, retries)
    teacher_options = TeacherOptions("--teacher", teacher, teacher_model, teacher_key, *limits)
    judge_options = TeacherOptions("--judge", judge, judge_model, judge_key, *limits) if judge else None
    budget = TeacherBudget(input_price, output_price, max_cost, max_tokens)
    with (
        open_workdir("synthesize", as_json, workdir, tracking_uri) as (reporter, work),
        synthesis_run.prepare(
            customization.data_curation, settings, teacher_options, judge_options, budget, output, work, reporter
        ) as prepared,
    ):
        if dry_run:
            estimate = prepared.estimate(probe)
            result = {"dry_run": True, **estimate.as_dict(), **prepared.describe_inputs()}
            lines = _format_estimate(result, rows, budget)
        else:
            result = prepared.run(overwrite=overwrite)
            lines = _format_result(result, output)
    print_result(result, as_json, lines)


def _format_estimate(estimate: dict[str, Any], requested: int, budget: TeacherBudget) -> list[str]:
    seconds = estimate["seconds"]
    reads = "prompts" if "prompts" in estimate else "passages"
    lines = [
        f"{format_count(estimate['rows'], 'row')}, yield {estimate['yield']:.0%} ({estimate['basis']}); "
        f"{reads}: {estimate[reads]:,}, documents: {estimate['documents']:,}",
        f"requests: {estimate['requests']:,}, prompt tokens: {estimate['input_tokens']:,}, "
        f"answer tokens: {estimate['output_tokens']:,}",
        *(
            [
                f"requested: {format_count(requested, 'row')}; add {'prompts' if reads == 'prompts' else 'documents'} for more rows"
            ]
            if estimate["rows"] < requested
            else []
        ),
        "time: " + (f"{seconds:,.0f} seconds" if seconds is not None else "not measured; add --probe 20"),
    ]
    if budget.input_price or budget.output_price:
        lines.append(f"cost: {estimate['cost']:,.4g}, at most {estimate['max_cost']:,.4g}")
    if rejected := estimate["rejected"]:
        counts = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        first = estimate["first_rejected"]
        lines.append(
            f"probe: {estimate['asked'] - sum(rejected.values())} of {estimate['asked']} answers accepted; rejected: {counts}"
        )
        lines.append(f"first rejected answer: {first['reason']}, {first['detail']}: {first['text']!r}")
    return lines


def _format_result(result: dict[str, Any], output: Path) -> list[str]:
    counts, tokens = result["rows"], result["tokens"]
    rejected = ", ".join(f"{count} {reason}" for reason, count in counts["rejected"].items()) or "none"
    lines = [
        f"{counts['accepted']:,} of {counts['requested']:,} rows, yield {result['yield']:.0%}; rejected: {rejected}",
        f"requests: {result['requests']:,}, prompt tokens: {tokens['input']:,}, answer tokens: {tokens['output']:,}, "
        f"cost: {result['cost']:,.4g}",
    ]
    return [*lines, f"rows: {output / 'rows.jsonl'}", f"report: {output / 'report.html'}"]
