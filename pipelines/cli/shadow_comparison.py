"""`tuneline traffic compare`: the answers of a shadow model compared with those that the clients received."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from pipelines.cli import tables
from pipelines.cli.application import JsonOption, print_result
from pipelines.cli.captured_traffic import (
    CaptureFileOption,
    FeedbackFilesOption,
    ModelFilterOption,
    SampledOption,
    locked_traffic,
    read_latest_feedback,
    traffic_app,
)


@traffic_app.command("compare")
def compare_shadow_answers(
    capture: CaptureFileOption = Path("capture.yaml"),
    feedback: FeedbackFilesOption = [],  # noqa: B006
    model: ModelFilterOption = "",
    max_loss: Annotated[
        float,
        typer.Option(
            "--max-loss", min=0, max=0.5, help="Tolerated decrease of the mean score. Scores range from 0 to 1."
        ),
    ] = 0.0,
    sampled: SampledOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare captured answers of a shadow model with those that clients received, by similarity to the corrections."""
    from pipelines.retraining import shadow_pairs

    if not feedback:
        raise UsageError("--feedback is not set", hint="Add the gateway's feedback file: --feedback FILE.")
    with locked_traffic(capture, feedback) as settings:
        found = shadow_pairs.read_pairs(settings, read_latest_feedback(feedback), model, only_sampled=sampled)
    compared = shadow_pairs.compare_versions(found, max_loss=max_loss)
    result = {"shadow_answers": found.shadow_answers, "comparisons": compared}
    print_result(result, as_json, lambda: _format_comparisons(result))


def _format_comparisons(result: dict[str, Any]) -> list[str]:
    head = format_count(result["shadow_answers"], "captured shadow answer")
    if not result["comparisons"]:
        return [f"{head}; no client's answer to the same request was corrected"]
    columns = ("answered", "shadow", "corrected", "subjects", "difference", "interval", "evidence", "decision")
    rows = []
    for each in result["comparisons"]:
        test = each["comparison"]
        names = (f"{each[kind]['model']} {each[kind]['version']}" for kind in ("client", "shadow"))
        interval = f"{test['low']:+.3f} to {test['high']:+.3f}"
        numbers = (f"{test['mean_difference']:+.3f}", interval, f"{test['e_better']:.3g}", test["decision"])
        rows.append((*names, each["corrected"], test["pairs"], *numbers))
    return [head, *tables.render(tables.build_table(columns, rows))]
