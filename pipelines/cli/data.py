"""Dataset versions in the data repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.errors import UsageError
from pipelines.cli.app import (
    HERE,
    AsJson,
    Config,
    Output,
    Overwrite,
    Sets,
    TrackingUri,
    WorkdirOption,
    data_app,
    load_config,
    show,
    track,
    working,
)

if TYPE_CHECKING:
    from components.data_versioning.search import By, Query

Revision = Annotated[str, typer.Argument(help="A tag or a commit of the data repository.")]


@data_app.command("publish")
def data_publish(
    dataset: Annotated[Path, typer.Argument(help="A curated dataset's folder.")],
    message: Annotated[str, typer.Option("-m", "--message", help="What is new in it: kept in the commit and its tags.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="A tag of your own for this revision, such as release-2026-11.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Publish a dataset as the next revision. Content that is published already keeps its revision."""
    customization = load_config(config, sets)
    from components.common import artifacts
    from components.data_versioning.stage import publish

    with working("data", as_json, workdir) as (reporter, work):
        found = artifacts.read(dataset, "dataset")
        version = publish(found, customization.data_versioning, workdir=work.root, reporter=reporter, message=message, tag=tag)
    also = f", tagged {tag}" if tag else ""
    done = "published" if version.created else "was published already"
    show(version.model_dump(), as_json, [f"{version.tag} ({version.rev[:12]}) {done}{also}"])


@data_app.command("fetch")
def data_fetch(
    revision: Revision,
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Fetch a published revision, every digest checked."""
    customization = load_config(config, sets)
    from components.data_versioning.stage import fetch

    with working("data", as_json, workdir) as (reporter, work):
        found = fetch(revision, output, customization.data_versioning, workdir=work.root, reporter=reporter, overwrite=overwrite)
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
    from components.data_versioning.stage import entries

    found = entries(customization.data_versioning, workdir=workdir.absolute())
    show({"versions": [v.model_dump() for v in found]}, as_json, _lines(as_json, "listed", found))


@data_app.command("show")
def data_show(
    revision: Revision,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Show what a revision holds and what it was made from."""
    customization = load_config(config, sets)
    from components.data_versioning import stage

    found = stage.show(revision, customization.data_versioning, workdir=workdir.absolute())
    show(found, as_json, _lines(as_json, "shown", found))


@data_app.command("diff")
def data_diff(
    before: Annotated[str, typer.Argument(help="A tag or a commit.")],
    after: Annotated[str, typer.Argument(help="A tag or a commit.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Compare two revisions row by row: added, removed, changed, moved between splits, and dropped by reason."""
    customization = load_config(config, sets)
    from components.data_versioning.stage import diff

    with working("data", as_json, workdir) as (reporter, work):
        found = diff(before, after, customization.data_versioning, workdir=work.root, reporter=reporter)
    show(found, as_json, _lines(as_json, "compared", found))


@data_app.command("find")
def data_find(
    row: Annotated[str, typer.Option("--row", help="A row's id.")] = "",
    text: Annotated[
        str, typer.Option("--text", help="Text that a row holds, in any case and spacing; - reads it from standard input.")
    ] = "",
    source: Annotated[str, typer.Option("--source", help="A source, or a file's name, that rows were read from.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Find a row in every revision, and the models and packages that came of it. Exit 1 where not everything could be searched."""
    query = _query(row, text, source)
    customization = load_config(config, sets)
    from pipelines import erasure

    with working("data", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        found = erasure.find(query, work, customization.data_versioning, reporter)
    show(found.as_dict(), as_json, _lines(as_json, "found", found))
    if not found.complete:
        raise typer.Exit(1)


def _query(row: str, text: str, source: str) -> Query:
    """What is looked for: one of the three."""
    from components.data_versioning.search import Query

    options: list[tuple[By, str]] = [("row", row), ("text", text), ("source", source)]
    given = [(by, value) for by, value in options if value]
    if len(given) != 1:
        raise UsageError(
            "one of --row, --text and --source says what to look for", hint="For example: tuneline data find --row 3f5a0c19d2e84b76"
        )
    by, value = given[0]
    return Query(by, sys.stdin.read() if (by, value) == ("text", "-") else value)


def _lines(as_json: bool, name: str, found: object) -> list[str]:
    """A result as a person reads it."""
    if as_json:
        return []
    from pipelines import tables

    return tables.PAGES[name](found)
