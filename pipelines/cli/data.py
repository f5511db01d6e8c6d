"""Dataset versions in the data repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.app import (
    HERE,
    AsJson,
    Config,
    Output,
    Overwrite,
    Sets,
    WorkdirOption,
    alone,
    data_app,
    finish,
    load_config,
    show,
)


@data_app.command("publish")
def data_publish(
    dataset: Annotated[Path, typer.Argument(help="A curated dataset's folder.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Publish a dataset as the next revision. Content that is published already keeps its revision."""
    customization = load_config(config, sets)
    reporter, work = alone("data", as_json, workdir)
    from components.common import artifacts
    from components.data_versioning.stage import publish

    version = publish(artifacts.read(dataset, "dataset"), customization.data_versioning, workdir=work.root, reporter=reporter)
    finish(reporter)
    show(
        version.model_dump(), as_json, [f"{version.tag} ({version.rev[:12]}) {'published' if version.created else 'was published already'}"]
    )


@data_app.command("fetch")
def data_fetch(
    revision: Annotated[str, typer.Argument(help="A tag or a commit of the data repository.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Fetch a published revision, every digest checked."""
    customization = load_config(config, sets)
    reporter, work = alone("data", as_json, workdir)
    from components.data_versioning.stage import fetch

    found = fetch(revision, output, customization.data_versioning, workdir=work.root, reporter=reporter, overwrite=overwrite)
    finish(reporter)
    show({"dataset": str(output), "sha256": found.sha256, "revision": revision}, as_json, [f"{revision} is in {output}"])


@data_app.command("list")
def data_list(
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """List the published revisions."""
    customization = load_config(config, sets)
    from components.data_versioning.stage import versions

    found = versions(customization.data_versioning, workdir=workdir.absolute())
    lines = [f"{v.tag}  {v.rev[:12]}  {v.content_sha256[:12]}" for v in found]
    show({"versions": [v.model_dump() for v in found]}, as_json, lines or ["nothing is published yet"])


@data_app.command("show")
def data_show(
    revision: Annotated[str, typer.Argument(help="A tag or a commit of the data repository.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Show what a revision holds and what it was made from."""
    customization = load_config(config, sets)
    from components.data_versioning import stage

    found = stage.show(revision, customization.data_versioning, workdir=workdir.absolute())
    show(found, as_json, [json.dumps(found, indent=2, default=str)])


@data_app.command("diff")
def data_diff(
    before: Annotated[str, typer.Argument(help="A tag or a commit.")],
    after: Annotated[str, typer.Argument(help="A tag or a commit.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Compare two revisions row by row."""
    customization = load_config(config, sets)
    reporter, work = alone("data", as_json, workdir)
    from components.data_versioning.stage import diff

    found = diff(before, after, customization.data_versioning, workdir=work.root, reporter=reporter)
    finish(reporter)
    show(found, as_json, [json.dumps(found, indent=2, default=str)])
