"""`tuneline reproduce`: repeat the training run of a registered model and compare the digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.errors import EXIT_FAILED
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    ReferenceArgument,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    open_workdir,
    print_result,
    print_text,
)

if TYPE_CHECKING:
    from pipelines.provenance.reproduction import ReproductionOutcome, ReproductionPlan


@app.command()
def reproduce(
    reference: ReferenceArgument,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and the differences between this environment and the recorded one; run nothing.",
        ),
    ] = False,
    from_revision: Annotated[
        bool,
        typer.Option("--from-revision", help="Fetch the dataset from its revision, even if it can be curated again."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the reproduced artifacts in WORKDIR/reproduce.")] = False,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> int:
    """Reproduce a model version from its recorded data, recipe and seed, and compare the digests.

    Exit with status 0 if the digests are equal, 1 if they differ. --dry-run exits with status 0.
    """
    settings = load_config(config, sets).data_versioning
    from components.common.runtime import reporters
    from pipelines.provenance import reproduction

    with open_workdir("reproduce", as_json, workdir, tracking_uri) as (reporter, work):
        request = reproduction.ReproductionRequest(work, settings, reporter, from_revision, keep)

        def print_plan(plan: ReproductionPlan) -> None:
            """Print the differences of this environment before any work starts."""
            if as_json:
                return
            reporters.close_reporter(reporter)
            title = plan.recorded.title
            if plan.differences:
                rows = [(item.what, item.recorded, item.here, item.effect) for item in plan.differences]
                table = tables.build_table(["item", "recorded", "here", "effect"], rows)
                lines = tables.render(f"This environment differs from that of {title}:", table)
            else:
                lines = [f"This environment matches that of {title}; identical digests are expected."]
            print_text("\n".join(lines))

        outcome = reproduction.reproduce(reference, request, print_plan, dry_run=dry_run)
    print_result(outcome.as_dict(), as_json, lambda: _format_outcome(outcome, dry_run=dry_run))
    return 0 if dry_run or outcome.is_equal else EXIT_FAILED


def _format_outcome(outcome: ReproductionOutcome, *, dry_run: bool) -> list[str]:
    """Format the digests, the result, and the differences that may explain it."""
    from pipelines.provenance.environment_diff import select_differences

    plan, result, title = outcome.plan, outcome.as_dict(), outcome.plan.recorded.title
    methods = {
        "curated": "curated again",
        "revision": f"taken from its revision {plan.recorded.revision}",
        "store": "taken from the store",
    }
    method, training = methods[plan.dataset_method], f"trained again, seed {plan.recorded.model.seed}"
    if dry_run:
        return [
            f"dataset  would be {method}: {plan.method_reason}",
            f"model    would be {training}",
            "Nothing was run.",
        ]
    digests, differing = {}, []
    for kind in ("dataset", "model"):
        recorded, reproduced = result[kind]["recorded"][:12], result[kind]["reproduced"][:12]
        digests[kind] = f"{recorded} equal"
        if not result[kind]["equal"]:
            digests[kind] = f"recorded {recorded}, now {reproduced}"
            differing.append(kind)
    summary = f"{title} is reproduced: dataset and model have the recorded digests."
    if not outcome.is_equal:
        reasons = [item for kind in differing for item in select_differences(plan.differences, kind)]
        causes = dict.fromkeys(f"{item.what} ({item.recorded} → {item.here})" for item in reasons)
        unexplained = ", and no difference in the environment explains this; "
        unexplained += "the records might not match the original training run."
        verb = "differ from those recorded" if len(differing) == 2 else "differs from that recorded"
        summary = f"{title} is not reproduced: the {' and the '.join(differing)} {verb}"
        summary += f". Possible causes in this environment: {', '.join(causes)}." if causes else unexplained
    return [
        f"dataset  {digests['dataset']}  {method}: {plan.method_reason}",
        f"model    {digests['model']}  {training}",
        *(f"  {file['artifact']}/{file['path']}: {file['detail']}" for file in outcome.files),
        *([f"artifacts kept in {outcome.kept}"] if outcome.kept else []),
        summary,
    ]
