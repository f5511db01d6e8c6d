"""The registry: register, promote, roll back, and where a version came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    from components.common import artifacts
    from components.model_registry.stage import register as stage

    with working("register", as_json, workdir, tracking_uri) as (reporter, work):
        found = (artifacts.read(model, "model"), artifacts.read(evaluation, "evaluation"))
        proven = artifacts.read(repository, "repository") if repository else None
        track(work, write=True)
        settings = customization.model_registry.model_copy(update={"name": name} if name else {})
        done = stage(*found, proven, settings, reporter=reporter)
    show(done.model_dump(), as_json, [f"{done.name} version {done.version}, aliases: {', '.join(done.aliases) or 'none'}"])


@app.command()
def promote(
    name: Annotated[str, typer.Argument(help="The registered model's name.")],
    version: Annotated[str, typer.Option("--version", help="The version to promote.")],
    alias: Annotated[str, typer.Option("--alias", help="The alias to move.")] = "champion",
    by: Annotated[str, typer.Option("--by", help="Who promotes; default: the user of this system.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Promote against the gate's verdict; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the version.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a model version that its evaluation accepted."""
    if force and not reason:
        raise UsageError("--force needs --reason", hint="Say why; it is kept with the version.")
    from components.model_registry.stage import promote as stage

    with working("promote", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=True)
        moved = stage(name, version, alias=alias, by=by, force=force, reason=reason, reporter=reporter).model_dump(by_alias=True)
    show(moved, as_json, [f"{name}@{alias}: {moved['from'] or 'none'} → {moved['to']}"])


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The registered model's name.")],
    by: Annotated[str, typer.Option("--by", help="Who rolls back; default: the user of this system.")] = "",
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Give the alias champion back to the version that held it before."""
    from components.model_registry.stage import rollback as stage

    with working("rollback", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=True)
        moved = stage(name, by=by, reporter=reporter).model_dump(by_alias=True)
    show(moved, as_json, [f"{name}@{moved['alias']}: {moved['from']} → {moved['to']}"])


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
