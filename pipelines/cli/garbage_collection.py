"""`tuneline gc`: list unreferenced data, and delete it with --delete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import EXIT_FAILED, UsageError
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from pipelines.operations.garbage_collection.deletion import DeletionResult
    from pipelines.operations.garbage_collection.inventory import CollectionRequest
    from pipelines.operations.garbage_collection.retention_plan import Kind, RetentionPlan

UNIT_SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
MIN_AGE_SECONDS = 3600.0  # a running job on another host may write no heartbeat for this long
OlderThanOption = Annotated[
    str,
    typer.Option("--older-than", metavar="AGE", help="Minimum time without use, such as 12h, 30d or 8w; at least 1h."),
]
KindsOption = Annotated[
    list[str],
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Kind of items to include: artifact, copy, state, run, package, data_object, mlflow_run, "
        "mlflow_model, base_model. "
        "Repeatable. Default: all but base_model.",
    ),
]
KeepVersionsOption = Annotated[
    int,
    typer.Option("--keep-versions", min=0, help="Number of newest versions of each model to keep, with their inputs."),
]
OwnRemoteOption = Annotated[
    bool,
    typer.Option(
        "--own-remote",
        help="Include a DVC remote folder outside the workdir. Asserts that only this data repository uses the folder.",
    ),
]
NoRepositoryOption = Annotated[
    bool,
    typer.Option(
        "--no-repository",
        help="Skip the check of the data repository. Asserts that only the configured repository references this "
        "store.",
    ),
]


@app.command()
def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the listed items. Default: only list them.")] = False,
    older_than: OlderThanOption = "30d",
    kinds: KindsOption = [],  # noqa: B006
    keep_runs: Annotated[
        int, typer.Option("--keep-runs", min=0, help="Number of newest runs to keep, with their results.")
    ] = 20,
    keep_versions: KeepVersionsOption = 3,
    own_remote: OwnRemoteOption = False,
    no_registry: Annotated[
        bool,
        typer.Option(
            "--no-registry", help="Accept an empty model registry. Use it only if no registry references this store."
        ),
    ] = False,
    no_repository: NoRepositoryOption = False,
    all_runs: Annotated[
        bool,
        typer.Option("--all-runs", help="Include MLflow runs and models of other or unknown workdirs."),
    ] = False,
    pin: Annotated[
        str,
        typer.Option(
            "--pin",
            metavar="NAME",
            help="Full artifact digest, run name, or path of either, to pin. Nothing is deleted.",
        ),
    ] = "",
    because: Annotated[
        str,
        typer.Option(
            "--because",
            metavar="TEXT",
            help='Reason for the pin. Default: "by USER", where USER is the user of this process.',
        ),
    ] = "",
    unpin: Annotated[str, typer.Option("--unpin", metavar="NAME", help="Pin to remove. Nothing is deleted.")] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> int:
    """List data that no alias, published revision, deployment or running job references. --delete deletes this data."""
    age_seconds, chosen = _parse_age(older_than), _parse_kinds(kinds)
    if pin or unpin:
        _change_pins(pin, unpin, because, workdir, as_json)
        return 0
    customization = load_config(config, sets)
    from pipelines.operations.garbage_collection import inventory

    with open_workdir("gc", as_json, workdir, tracking_uri) as (reporter, work):
        request = inventory.CollectionRequest(
            work,
            customization.data_versioning,
            reporter,
            age_seconds,
            keep_runs,
            keep_versions,
            chosen,
            own_remote=own_remote,
            no_registry=no_registry,
            no_repository=no_repository,
            all_runs=all_runs,
        )
        result, plan, outcomes = _collect(request, delete)
    print_result(result, as_json, lambda: _format_lines(result, plan, outcomes))
    return EXIT_FAILED if any(outcome.failed for outcome in outcomes) else 0


def _collect(request: CollectionRequest, delete: bool) -> tuple[dict[str, Any], RetentionPlan, list[DeletionResult]]:
    """Take the inventory, plan, and delete if requested; return the JSON object, the plan and the deletions."""
    from pipelines.operations.garbage_collection import deletion, inventory, retention_plan

    deletion.recover(request)
    found = inventory.take_inventory(request)
    plan = retention_plan.build_plan(found.items, found.roots, request.policy)
    outcomes: list[DeletionResult] = []
    if delete:
        request.reporter.step("deleting")
        for outcome in deletion.delete_unreferenced(plan, found, request):
            outcomes.append(outcome)
            request.reporter.progress(len(outcomes), len(plan.to_delete), "items")
    items: list[dict[str, Any]] = [
        {"deleted": False, **entry.as_dict()} for entry in (outcomes if delete else plan.to_delete)
    ]
    sizes: dict[tuple[str, str], list[int]] = {}
    for decision in plan.kept:
        sizes.setdefault((decision.reason, decision.item.kind), []).append(decision.item.bytes)
    kept: list[dict[str, Any]] = [
        {"reason": reason, "kind": kind, "count": len(group), "bytes": sum(group)}
        for (reason, kind), group in sizes.items()
    ]
    leftovers = deletion.list_leftovers(request)
    result = {
        "workdir": str(request.workdir.root),
        "older_than_seconds": request.older_than,
        "delete": delete,
        "items": items,
        "bytes": sum(item["bytes"] for item in items if item["deleted"] or not delete),
        "kept": sorted(kept, key=lambda group: (-group["bytes"], group["reason"], group["kind"])),
        "notes": found.notes + [f"renamed but not deleted: {path}" for path in leftovers],
    }
    return result, plan, outcomes


def _parse_age(text: str) -> float:
    """Return an age in seconds. Raises UsageError if it is malformed or below MIN_AGE_SECONDS."""
    match = re.fullmatch(r"([0-9]+)([hdw])", text)
    if match is None:
        raise UsageError(
            f"--older-than {text!r} is not an age; expected a number with h, d or w",
            hint="Use an age such as 12h, 30d or 8w.",
        )
    seconds = int(match[1]) * UNIT_SECONDS[match[2]]
    if seconds < MIN_AGE_SECONDS:
        raise UsageError(
            f"--older-than {text} is too short to detect data in use; expected at least 1h", hint="Use a longer age."
        )
    return seconds


def _parse_kinds(names: list[str]) -> tuple[Kind, ...]:
    from pipelines.operations.garbage_collection.retention_plan import DEFAULT_KINDS, OPT_IN_KINDS

    kinds = {str(kind): kind for kind in (*DEFAULT_KINDS, *OPT_IN_KINDS)}
    for name in names:
        if name not in kinds:
            raise UsageError(f"--kind {name} does not exist", hint=f"Choose one of: {', '.join(kinds)}.")
    return tuple(kinds[name] for name in names) or DEFAULT_KINDS


def _change_pins(pin: str, unpin: str, because: str, workdir: Path, as_json: bool) -> None:
    from components.common.runtime.user_name import get_user_name
    from pipelines.operations.garbage_collection import inventory

    lines = []
    with open_workdir("gc", as_json, workdir) as (_, work):
        if pin:
            pin = inventory.pin(work, pin, because or f"by {get_user_name()}")
            lines.append(f"{pin} is pinned, with all its inputs")
        if unpin:
            unpin = inventory.unpin(work, unpin)
            lines.append(f"{unpin} is no longer pinned")
    print_result({"pinned": pin or None, "unpinned": unpin or None}, as_json, lines)


def _format_lines(result: dict[str, Any], plan: RetentionPlan, outcomes: list[DeletionResult]) -> list[str]:
    from pipelines.operations.garbage_collection.retention_plan import format_age

    items, lines = result["items"], []
    if plan.to_delete:
        results = {
            outcome.decision.item.name: f"kept: {outcome.kept_because}" if outcome.kept_because else "deleted"
            for outcome in outcomes
        }
        rows = [
            (item.kind, item.path, item.bytes, format_age(item.unused), results.get(item.name, decision.reason))
            for decision in plan.to_delete
            for item in [decision.item]
        ]
        columns = ["kind", "item", "bytes", "unused for", "result" if result["delete"] else "reason"]
        lines += tables.render(tables.build_table(columns, rows))
    if kept := [tuple(group.values()) for group in result["kept"]]:
        lines += ["", *tables.render(tables.build_table(["kept because", "kind", "items", "bytes"], kept))]
    size = f"{result['bytes'] / 1e9:,.2f} GB"
    summary = f"{format_count(len(items), 'item')}, {size}, can be deleted with --delete. Nothing was deleted."
    if result["delete"]:
        summary = f"deleted {sum(item['deleted'] for item in items)} of {format_count(len(items), 'item')}, {size}"
    elif not items:
        summary = "nothing to delete"
    return [*lines, *result["notes"], summary]
