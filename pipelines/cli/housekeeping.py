"""`tuneline gc`: what nothing needs any more is shown, and removed when asked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.errors import EXIT_FAILED, UsageError
from pipelines.cli.app import HERE, AsJson, Config, Sets, TrackingUri, WorkdirOption, app, load_config, show, track, working

if TYPE_CHECKING:
    from pipelines.housekeeping.found import Asked, World
    from pipelines.housekeeping.plan import Kind, Plan
    from pipelines.housekeeping.removal import Outcome

SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
SHORTEST = 3600.0  # seconds: a job that is heard of by its signs of life alone may be silent for so long


@app.command()
def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Remove it. Without this nothing is removed.")] = False,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Only what was not used for so long: 12h, 30d, 8w. At least 1h.")
    ] = "30d",
    kinds: Annotated[
        list[str],
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only this kind: artifact, copy, state, run, package, data_object, mlflow_run, mlflow_model; base_model goes only so. "
            "Repeatable.",
        ),
    ] = [],  # noqa: B006
    keep_runs: Annotated[int, typer.Option("--keep-runs", min=0, help="Keep so many of the newest runs, and what they made.")] = 20,
    keep_versions: Annotated[
        int, typer.Option("--keep-versions", min=0, help="Keep what so many of the newest versions of every model came from.")
    ] = 3,
    own_remote: Annotated[
        bool, typer.Option("--own-remote", help="The DVC remote, a folder outside of the workdir, serves this data repository alone.")
    ] = False,
    no_registry: Annotated[
        bool, typer.Option("--no-registry", help="No registry knows of this store, or it is empty: nothing is needed because of one.")
    ] = False,
    no_repository: Annotated[
        bool,
        typer.Option(
            "--no-repository", help="No data repository but the one asked, if it is there, has revisions of what this store holds."
        ),
    ] = False,
    all_runs: Annotated[
        bool,
        typer.Option("--all-runs", help="Look at what other workdirs logged in the same MLflow too, and at what does not say whose it is."),
    ] = False,
    pin: Annotated[str, typer.Option("--pin", metavar="NAME", help="Keep an artifact (its digest) or a run; removes nothing.")] = "",
    because: Annotated[str, typer.Option("--because", metavar="TEXT", help="Why it is pinned.")] = "",
    unpin: Annotated[str, typer.Option("--unpin", metavar="NAME", help="Let go of what was pinned; removes nothing.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> int:
    """Show what no alias, no published revision, no deployment and no running job needs any more, and remove it with --delete."""
    seconds, chosen = _age(older_than), _kinds(kinds)
    if pin or unpin:
        return _pinned(pin, unpin, because, workdir, as_json)
    customization = load_config(config, sets)
    from pipelines.housekeeping import found, plan, removal

    with working("gc", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        known = {"own_remote": own_remote, "no_registry": no_registry, "no_repository": no_repository, "all_runs": all_runs}
        asked = found.Asked(work, customization.data_versioning, reporter, seconds, keep_runs, keep_versions, chosen, **known)
        removal.tidy(asked)
        world = found.look(asked)
        decided = plan.plan(world.things, world.roots, asked.policy)
        outcomes = _carried_out(decided, world, asked) if delete else []
        world.notes.extend(f"what was removed from its place and could not be deleted: {path}" for path in removal.left(asked))
    show(_told(decided, world, asked, outcomes, delete), as_json, [] if as_json else _lines(decided, world, outcomes, delete))
    return EXIT_FAILED if any(one.failed for one in outcomes) else 0


def _age(text: str) -> float:
    """An age in seconds. Raises UsageError for what is none, or is too short to tell a silent job from a dead one."""
    match = re.fullmatch(r"([0-9]+)([hdw])", text)
    if match is None:
        raise UsageError(f"--older-than {text!r} is no age", hint="Write hours, days or weeks: 12h, 30d, 8w.")
    seconds = int(match[1]) * SECONDS[match[2]]
    if seconds < SHORTEST:
        raise UsageError(f"--older-than {text} is too short to tell what is in use", hint="Take at least 1h.")
    return seconds


def _kinds(named: list[str]) -> tuple[Kind, ...]:
    from pipelines.housekeeping.plan import KINDS, ON_REQUEST

    known = {str(kind): kind for kind in (*KINDS, *ON_REQUEST)}
    for name in named:
        if name not in known:
            raise UsageError(f"--kind {name}: there is no such kind", hint=f"There are: {', '.join(known)}.")
    return tuple(known[name] for name in named) or KINDS


def _pinned(pin: str, unpin: str, because: str, workdir: Any, as_json: bool) -> int:
    from components.common.people import user
    from pipelines.housekeeping import found

    with working("gc", as_json, workdir) as (_, work):
        if pin:
            pin = found.pin(work, pin, because or f"by {user()}")
        if unpin:
            unpin = found.unpin(work, unpin)
    done = [*([f"{pin} is kept, with all that it was made from"] if pin else []), *([f"{unpin} is not pinned any more"] if unpin else [])]
    show({"pinned": pin or None, "unpinned": unpin or None}, as_json, done)
    return 0


def _carried_out(decided: Plan, world: World, asked: Asked) -> list[Outcome]:
    from pipelines.housekeeping import removal

    asked.reporter.step("removing")
    outcomes = []
    for outcome in removal.carry_out(decided, world, asked):
        outcomes.append(outcome)
        asked.reporter.progress(len(outcomes), len(decided.going), "things")
    return outcomes


def _told(decided: Plan, world: World, asked: Asked, outcomes: list[Outcome], delete: bool) -> dict[str, Any]:
    items = [one.as_dict() for one in outcomes] if delete else [{**one.as_dict(), "deleted": False} for one in decided.going]
    gone = [one for one in items if one["deleted"]]
    return {
        "workdir": str(asked.work.root),
        "older_than_seconds": asked.older_than,
        "delete": delete,
        "items": items,
        "bytes": sum(one["bytes"] for one in (gone if delete else items)),
        "kept": _kept(decided),
        "notes": world.notes,
    }


def _kept(decided: Plan) -> list[dict[str, Any]]:
    """What keeps the rest: a line a reason and kind, the most bytes first."""
    found: dict[tuple[str, str], list[int]] = {}
    for item in decided.kept:
        found.setdefault((item.reason, item.thing.kind), []).append(item.thing.bytes)
    lines = [{"reason": reason, "kind": kind, "count": len(sizes), "bytes": sum(sizes)} for (reason, kind), sizes in found.items()]
    return sorted(lines, key=lambda line: (-line["bytes"], line["reason"], line["kind"]))


def _lines(decided: Plan, world: World, outcomes: list[Outcome], delete: bool) -> list[str]:
    from pipelines import tables
    from pipelines.housekeeping.plan import days

    lines = []
    if decided.going:
        became = {one.item.thing.name: "removed" if not one.kept else f"kept: {one.kept}" for one in outcomes}
        what = [
            (one.thing.kind, one.thing.path, one.thing.bytes, days(one.thing.unused), became.get(one.thing.name, one.reason))
            for one in decided.going
        ]
        lines += tables.lines_of(tables.table(["kind", "what", "bytes", "unused for", "became" if delete else "why"], what))
    kept = [(line["reason"], line["kind"], line["count"], line["bytes"]) for line in _kept(decided)]
    if kept:
        lines += ["", *tables.lines_of(tables.table(["what keeps the rest", "kind", "things", "bytes"], kept))]
    return [*lines, *world.notes, _sentence(decided, outcomes, delete)]


def _sentence(decided: Plan, outcomes: list[Outcome], delete: bool) -> str:
    going = [one.item for one in outcomes if not one.kept] if delete else decided.going
    size = sum(item.thing.bytes for item in going)
    if delete:
        return f"removed {len(going)} of {len(decided.going)} things, {size / 1e9:,.2f} GB"
    if not going:
        return "there is nothing to remove"
    return f"{len(going)} things, {size / 1e9:,.2f} GB, may go; --delete removes them. Nothing was removed."
