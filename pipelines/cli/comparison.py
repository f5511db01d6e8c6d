"""`tuneline compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import DEFAULT_WORKDIR_PATH, JsonOption, WorkdirOption, app, print_result
from pipelines.cli.run_history import RUN_HELP
from pipelines.cli.tables import build_table, render

if TYPE_CHECKING:
    from rich.table import Table

MAX_ANSWER_CHARACTERS = 300


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help=RUN_HELP)],
    output: Annotated[Path | None, typer.Option("-o", "--html", help="HTML page to write.")] = None,
    include_equal: Annotated[
        bool, typer.Option("--all", help="List all parameters. Default: only those that differ.")
    ] = False,
    answers: Annotated[
        int, typer.Option("--answers", min=0, help="Number of prompts for which to show the answers.")
    ] = 6,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for sampling the prompts.")] = 42,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Compare runs side by side: parameters, data, losses, metrics with intervals, gate, durations and answers."""
    from components.common.artifacts import output_paths
    from pipelines.runs import comparison_page, run_comparison

    runs = run_comparison.find_runs(Workdir(workdir.absolute()), names)
    if output:
        output_paths.check_file(output, inputs=(), example="comparison.html")
    comparison = run_comparison.compare_runs(runs, include_equal=include_equal, answers=answers, seed=seed)
    if output:
        output_paths.write_file(output, comparison_page.render_comparison(comparison))
    result = {**comparison, "page": str(output) if output else None}
    print_result(result, as_json, lambda: [*_format_comparison(comparison), *([f"page: {output}"] if output else [])])


def _format_comparison(comparison: Mapping[str, Any]) -> list[str]:
    from pipelines.runs import comparison_page as page

    runs = comparison["runs"]
    names = [run["run"] for run in runs]
    parameters = [[key, *map(page.format_parameter, values)] for key, values in comparison["parameters"].items()]
    lines = [*(f"! {warning}" for warning in comparison["warnings"]), ""] if comparison["warnings"] else []
    lines += render(_build_table(page.RUN_HEAD, page.list_run_rows(runs)), "")
    lines += render(_build_table(["parameter", *names], parameters), "") if parameters else ["equal configurations", ""]
    lines += render(
        _build_table(["rows", *names], page.list_data_rows(runs)),
        "",
        _build_table(["seconds", *names], page.list_stage_rows(runs)),
    )
    if comparison["metrics"]:
        lines += render("", build_table(*page.build_metric_table(comparison)))
    for run in runs:
        if evaluation := run["evaluation"]:
            lines += [
                "",
                f"{run['run']}: {evaluation['verdict']}",
                *(f"  failed: {one}" for one in evaluation["failed"]),
            ]
    for answer in comparison["answers"]:
        texts = {
            "reference": answer["reference"],
            "base": answer["base"],
            **dict(zip(names, answer["answers"], strict=True)),
        }
        width = max(map(len, texts))
        lines += ["", f"{answer['task']}: {_flatten(answer['prompt'])}"]
        lines += [f"  {title:<{width}}  {_flatten(text)}" for title, text in texts.items() if text]
    return lines


def _build_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    return build_table(head, [["–" if cell is None else _format_cell(cell) for cell in row] for row in rows])


def _format_cell(cell: object) -> object:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else cell


def _flatten(text: str) -> str:
    from pipelines.runs.comparison_page import shorten

    return shorten(" ".join(text.split()), MAX_ANSWER_CHARACTERS)
