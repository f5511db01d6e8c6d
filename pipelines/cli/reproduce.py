"""`tuneline reproduce`: a registered model made once more, and whether it is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.errors import EXIT_FAILED
from pipelines.cli.app import HERE, AsJson, Config, Sets, TrackingUri, WorkdirOption, app, load_config, show, track, working

if TYPE_CHECKING:
    from components.common.progress import Reporter
    from pipelines.reproduce import Outcome, Plan


@app.command()
def reproduce(
    reference: Annotated[str, typer.Argument(metavar="NAME[@ALIAS]", help="NAME@ALIAS, NAME@3 or NAME/3; NAME alone is its champion.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what differs here and how it would be done, and do nothing.")] = False,
    from_revision: Annotated[
        bool, typer.Option("--from-revision", help="Take the dataset from its revision also where it could be curated again.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what is made, in reproduce/ of the workdir.")] = False,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> int:
    """Make a model version again from its recorded data, recipe, seed and versions, and compare digests: exit 0 where they are equal."""
    customization = load_config(config, sets)
    from pipelines import reproduce as reproducing

    with working("reproduce", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        asked = reproducing.Asked(work, customization.data_versioning, reporter, from_revision, keep)
        found = reproducing.reproduce(reference, asked, lambda plan: None if as_json else _tell(plan, reporter), dry_run=dry_run)
    show(found.as_dict(), as_json, _planned(found.plan) if dry_run else _told(found))
    return 0 if dry_run or found.equal else EXIT_FAILED


def _tell(plan: Plan, reporter: Reporter) -> None:
    """What differs here, before any work: the screen is given back for it."""
    from components.common import progress
    from pipelines import tables

    progress.close(reporter)
    title = plan.recorded.title
    if plan.differences:
        found = [(one.what, one.recorded, one.here, one.effect) for one in plan.differences]
        table = tables.table(["what", "recorded", "here", "effect"], found)
        lines = tables.lines_of(f"Here it is not as it was when {title} was made:", table)
    else:
        lines = [f"All that {title} depends on is here as it was: equal digests are promised."]
    print("\n".join(lines), flush=True)


def _planned(plan: Plan) -> list[str]:
    ways = {
        "curated": "would be curated again",
        "revision": f"would be taken from its revision {plan.recorded.revision}",
        "store": "would be taken from the store",
    }
    trained = f"model    would be trained again, seed {plan.recorded.model.seed}"
    return [f"dataset  {ways[plan.how]}: {plan.why}", trained, "Nothing was done."]


def _told(found: Outcome) -> list[str]:
    plan, told = found.plan, found.as_dict()
    ways = {"curated": "curated again", "revision": f"taken from its revision {plan.recorded.revision}", "store": "taken from the store"}
    lines = [
        f"dataset  {_digests(told['dataset'])}  {ways[plan.how]}: {plan.why}",
        f"model    {_digests(told['model'])}  trained again, seed {plan.recorded.model.seed}",
        *(f"  {one['artifact']}/{one['path']}: {one['detail']}" for one in found.files),
        *([f"kept in {found.kept}"] if found.kept else []),
    ]
    return [*lines, _sentence(found)]


def _digests(told: dict[str, Any]) -> str:
    recorded, made = told["recorded"][:12], told["reproduced"][:12]
    return f"{recorded} equal" if told["equal"] else f"recorded {recorded}, now {made}"


def _sentence(found: Outcome) -> str:
    """What came of it, and what explains it."""
    from pipelines.surroundings import explaining

    told, plan = found.as_dict(), found.plan
    if found.equal:
        return f"{plan.recorded.title} is reproduced: dataset and model have the recorded digests."
    other = [makes for makes in ("dataset", "model") if not told[makes]["equal"]]
    reasons = [one for makes in other for one in explaining(plan.differences, makes)]
    what = f"{plan.recorded.title} is not reproduced: the {' and the '.join(other)} {'are' if len(other) == 2 else 'is'} not as recorded"
    if not reasons:
        return f"{what}, and nothing differs here that explains it: what is recorded may not be what was used."
    named = ", ".join(dict.fromkeys(f"{one.what} ({one.recorded} → {one.here})" for one in reasons))
    return f"{what}. What differs here can explain it: {named}."
