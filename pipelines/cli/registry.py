"""The registry: register, promote, roll back, and where a version came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.errors import UsageError
from pipelines.cli.app import (
    HERE,
    AsJson,
    Config,
    Sets,
    TrackingUri,
    WorkdirOption,
    app,
    load_config,
    show,
    track,
    working,
)

if TYPE_CHECKING:
    from components.model_registry.approval import Policy

registry_app = typer.Typer(no_args_is_help=True, help="The history of a registered model, and who may promote it.")
app.add_typer(registry_app, name="registry")
Name = Annotated[str, typer.Argument(help="The registered model's name.")]


@app.command()
def register(
    model: Annotated[Path, typer.Option("--model", help="The tuned model's folder.")],
    evaluation: Annotated[Path, typer.Option("--evaluation", help="Its evaluation's folder.")],
    repository: Annotated[Path | None, typer.Option("--repository", help="Its Triton repository; none for a refused candidate.")] = None,
    name: Annotated[str, typer.Option("--name", help="The registered model's name.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Register a model version in MLflow, tagged with every digest it came from."""
    customization = load_config(config, sets)
    from components.common import artifacts, places
    from components.model_registry.stage import register as stage

    given = [path for path in (model, evaluation, repository) if path]
    with working("register", as_json, workdir, tracking_uri) as (reporter, work), places.using(*given):
        found = (artifacts.read(model, "model"), artifacts.read(evaluation, "evaluation"))
        proven = artifacts.read(repository, "repository") if repository else None
        track(work, write=True)
        settings = _named(customization.model_registry, name)
        done = stage(*found, proven, settings, reporter=reporter)
    show(done.model_dump(), as_json, [f"{done.name} version {done.version}, aliases: {', '.join(done.aliases) or 'none'}"])


def _named(settings: Any, name: str) -> Any:
    """The settings with another name. Raises UsageError for one that MLflow does not take."""
    try:
        return type(settings).model_validate({**settings.model_dump(), "name": name}) if name else settings
    except ValueError:
        raise UsageError(f"--name {name} is no name of a registered model", hint="Leave out slashes and colons.") from None


@app.command()
def promote(
    name: Name,
    version: Annotated[str, typer.Option("--version", help="The version to promote.")],
    alias: Annotated[str, typer.Option("--alias", help="The alias to move.")] = "champion",
    by: Annotated[str, typer.Option("--by", help="Who promotes, or approves; default: the user of this system.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Promote against what the checks say; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the history.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a model version that was accepted against the present champion, is whole, and was proven."""
    if force and not reason.strip():
        raise UsageError("--force needs --reason", hint="Say why; it is kept in the history.")
    policy = _policy(config, sets)
    from components.model_registry.stage import promote as stage

    with working("promote", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=True)
        done = stage(name, version, alias=alias, by=by, force=force, reason=reason, policy=policy, reporter=reporter)
        moved = done.model_dump(by_alias=True)
    show(moved, as_json, [f"{name}@{alias}: {moved['from'] or 'none'} → {moved['to']}"])


@app.command()
def rollback(
    name: Name,
    by: Annotated[str, typer.Option("--by", help="Who rolls back; default: the user of this system.")] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the history.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Give the alias champion back to the version that held it before."""
    policy = _policy(config, sets)
    from components.model_registry.stage import rollback as stage

    with working("rollback", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=True)
        moved = stage(name, by=by, reason=reason, policy=policy, reporter=reporter).model_dump(by_alias=True)
    show(moved, as_json, [f"{name}@{moved['alias']}: {moved['from']} → {moved['to']}"])


def _policy(config: Path | None, sets: list[str]) -> Policy | None:
    """Who may promote by the configuration, where one is given; the history's own policy counts before it."""
    customization = load_config(config, sets)
    from components.model_registry import approval

    return approval.of(customization.model_registry)


@registry_app.command()
def audit(
    name: Name,
    repair: Annotated[
        bool, typer.Option("--repair", help="Close interrupted moves, write down those made by hand, acknowledge the rest.")
    ] = False,
    by: Annotated[str, typer.Option("--by", help="Who acknowledges; default: the user of this system.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Find moves, deletions and edits that were made by hand; exit 1 where there are any."""
    from components.common.people import user
    from components.model_registry.audit import audit as look

    with working("registry audit", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        found = look(name, repair=repair, by=by or user(), reporter=reporter)
    lines = [f"✘ {one.what}" for one in found.findings] + [f"! {note}" for note in found.notes]
    end = "every alias is where the history says" if found.clean else f"{len(found.findings)} not as written; --repair writes them down"
    show(found.model_dump(), as_json, [*lines, f"{name}: {found.entries} entries, {end}"])
    if not found.clean:
        raise typer.Exit(1)


@registry_app.command()
def history(
    name: Name,
    alias: Annotated[str, typer.Option("--alias", help="Only what concerns this alias.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Show every move of the model's aliases: who, when, from where, to where and why."""
    from components.model_registry import history as written
    from components.model_registry import versions

    with working("registry history", as_json, workdir, tracking_uri) as (_, work):
        track(work, write=False)
        versions.require_store(name)
        with versions.talking() as client:
            versions.require_model(client, name)
            entries = [entry.told() for entry in written.read(client, name) if alias in ("", entry.alias)]
    show({"name": name, "entries": entries}, as_json, [_line(entry) for entry in entries] or [f"nothing moved yet in {name}"])


def _line(entry: dict[str, Any]) -> str:
    """An entry in a line; what did not take place says so."""
    way = f"{entry['from'] or '-'} → {entry['to'] or '-'}"
    state = "" if entry["state"] == "done" else f" [{entry['state']}: {entry['note'] or 'interrupted or going on'}]"
    forced = f" [forced although {entry['forced']}]" if entry["forced"] else ""
    what = f"{entry['number']:>4}  {entry['at']}  {entry['kind']:<12} {entry['alias']:<11} {way:<9}"
    return f"{what}  {entry['by']}: {entry['reason']}{forced}{state}"


@registry_app.command()
def policy(
    name: Name,
    file: Annotated[
        Path | None, typer.Option("--set", help="Put the policy of this file in force; see mlflow/promotion-policy.yaml.")
    ] = None,
    by: Annotated[str, typer.Option("--by", help="Who sets it; one of the approvers where there are any.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Show who may promote the model, or put a new policy in force; the history keeps who did."""
    from components.common.people import user
    from components.model_registry import approval, versions
    from components.model_registry import history as written

    new = approval.read(file) if file else None
    with working("registry policy", as_json, workdir, tracking_uri) as (_, work):
        track(work, write=False)
        versions.require_store(name)
        with versions.talking() as client:
            versions.require_model(client, name)
            if new:
                approval.write(client, name, new, by or user())
            found = approval.in_force(written.read(client, name))
    who = f"{found.approvals_required} of {', '.join(found.approvers)}" if found.approvers else "anyone who may write to the registry"
    show({"name": name, **found.model_dump()}, as_json, [f"{name} is promoted by {who}"])


@app.command()
def lineage(
    reference: Annotated[str, typer.Argument(metavar="NAME[@ALIAS]", help="NAME@ALIAS, NAME@3 or NAME/3; NAME alone is its champion.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Trace a model version back to the dataset's revision and the raw files, every digest checked."""
    customization = load_config(config, sets)
    from pipelines import lineage as tracing

    with working("lineage", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        found = tracing.trace(reference, work, customization.data_versioning, reporter)
    if not as_json:
        tracing.show(found)
    found.check()
    show(found.as_dict(), as_json, [tracing.sentence(found)])
