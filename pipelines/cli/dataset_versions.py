"""`tuneline data`: dataset versions in the data repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.errors import UsageError
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    data_app,
    load_config,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.data_versioning.row_search import SearchField

RevisionArgument = Annotated[str, typer.Argument(help="Tag or commit of the data repository.")]


@data_app.command("publish")
def data_publish(
    dataset: Annotated[Path, typer.Argument(help="Folder of a curated dataset.")],
    message: Annotated[
        str,
        typer.Option(
            "-m",
            "--message",
            help="Description of the changes, stored in the commit and its tags. Default: no description.",
        ),
    ] = "",
    tag: Annotated[
        str,
        typer.Option(
            "--tag",
            help="Additional tag of this revision, such as release-2026-11. Default: no additional tag.",
        ),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Publish a dataset as the next revision. If its content is already published, return the existing revision."""
    settings = load_config(config, sets).data_versioning
    from components.common.artifacts import artifact_folder
    from components.data_versioning.stage import publish

    with open_workdir("data", as_json, workdir) as (reporter, work):
        artifact = artifact_folder.read(dataset, "dataset")
        version = publish(artifact, settings, workdir=work.root, reporter=reporter, message=message, tag=tag)
    state = "published" if version.created else "was already published"
    suffix = f", tagged {tag}" if tag else ""
    print_result(version.model_dump(), as_json, [f"{version.tag} ({version.rev[:12]}) {state}{suffix}"])


@data_app.command("fetch")
def data_fetch(
    revision: RevisionArgument,
    output: OutputOption,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Fetch a published revision and verify every digest."""
    settings = load_config(config, sets).data_versioning
    from components.data_versioning.stage import fetch

    with open_workdir("data", as_json, workdir) as (reporter, work):
        artifact = fetch(revision, output, settings, workdir=work.root, reporter=reporter, overwrite=overwrite)
    result = {"dataset": str(output), "sha256": artifact.sha256, "revision": revision}
    print_result(result, as_json, [f"{revision} is in {output}"])


@data_app.command("list")
def data_list(
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """List the published revisions."""
    settings = load_config(config, sets).data_versioning
    from components.data_versioning.stage import list_entries

    entries = list_entries(settings, workdir=workdir.absolute())
    result = {"versions": [entry.model_dump() for entry in entries]}
    print_result(result, as_json, lambda: tables.format_list(entries))


@data_app.command("show")
def data_show(
    revision: RevisionArgument,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Show the content of a revision and its inputs."""
    settings = load_config(config, sets).data_versioning
    from components.data_versioning import stage

    description = stage.show(revision, settings, workdir=workdir.absolute())
    print_result(description, as_json, lambda: tables.format_revision(description))


@data_app.command("diff")
def data_diff(
    before: RevisionArgument,
    after: RevisionArgument,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Compare two revisions by row: added, removed, changed, moved between splits, and rejected by reason."""
    settings = load_config(config, sets).data_versioning
    from components.data_versioning.stage import diff

    with open_workdir("data", as_json, workdir) as (reporter, work):
        changes = diff(before, after, settings, workdir=work.root, reporter=reporter)
    print_result(changes, as_json, lambda: tables.format_diff(changes))


@data_app.command("find")
def data_find(
    row: Annotated[str, typer.Option("--row", help="Find the row with this ID.")] = "",
    text: Annotated[
        str,
        typer.Option(
            "--text",
            help="Find rows that contain this text, ignoring case and repeated white space. -: read the text from "
            "standard input.",
        ),
    ] = "",
    source: Annotated[
        str, typer.Option("--source", help="Find the rows of the source with this name or file name.")
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Find the revisions that contain a row, and the models and packages built from it.

    Exit with status 1 if the search is incomplete.
    """
    options: dict[SearchField, str] = {"row": row, "text": text, "source": source}
    given = [(field, value) for field, value in options.items() if value]
    if len(given) != 1:
        raise UsageError(
            f"found {len(given)} of the options --row, --text and --source; expected exactly one",
            hint="Use exactly one option, for example: tuneline data find --row 3f5a0c19d2e84b76",
        )
    field, value = given[0]
    settings = load_config(config, sets).data_versioning
    from components.data_versioning.row_search import Query
    from pipelines.provenance import erasure_search

    query = Query(field, sys.stdin.read() if (field, value) == ("text", "-") else value)
    with open_workdir("data", as_json, workdir, tracking_uri) as (reporter, work):
        report = erasure_search.find_rows(query, work, settings, reporter)
    print_result(report.as_dict(), as_json, lambda: tables.format_search(report))
    if not report.is_complete:
        raise typer.Exit(1)
