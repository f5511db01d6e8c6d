"""`tuneline models`: base models in the artifact store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.counts import format_count
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    JsonOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.common.artifacts.artifact_folder import Manifest
    from components.common.models.model_import import SourceContent

models_app = typer.Typer(no_args_is_help=True, help="Base models in the artifact store.")
app.add_typer(models_app, name="models")


@models_app.callback()
def group() -> None:
    """Base models in the artifact store."""


@models_app.command("import")
def models_import(
    source: Annotated[
        str,
        typer.Argument(
            help="hf://org/name@revision, an embedded model, or the folder of a tuned model or of a model in the Hugging Face layout."
        ),
    ],
    accept_license: Annotated[
        bool,
        typer.Option(
            "--accept-license", help="Accept the model's licence, if required, and record the user and the time."
        ),
    ] = False,
    by: Annotated[
        str, typer.Option("--by", help="User who accepts the licence. Default: the user of this process.")
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the number of files, size and licence of the model; download nothing."),
    ] = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Import a base model into the artifact store. Runs refer to the model by its digest and need no network access."""
    from components.common.models import model_import, model_loading
    from components.common.runtime.errors import UsageError
    from components.common.runtime.user_name import get_user_name
    from components.common.workspace import artifact_store

    with open_workdir("models", as_json, workdir) as (reporter, work), model_loading.replace_error_key("source"):
        if by and not accept_license:
            raise UsageError("--by requires --accept-license", hint="Add --accept-license, or omit --by.")
        offer = model_import.inspect_source(source, reporter)
        size = f"{offer.bytes / 1e9:,.2f} GB"
        if dry_run:
            known = model_import.read_imported_manifest(offer, work)
            is_local = known is not None and artifact_store.has_local_copy(work.store, known.content_sha256)
            path = work.store / known.content_sha256 if known and is_local else None
            requirement = "; import it with --accept-license" if offer.licence.requires_acceptance else ""
            lines = [
                f"{offer.source}: {format_count(len(offer.files), 'file')}, {size}",
                f"licence: {offer.licence.title}{requirement}",
                *([f"skipped files: {', '.join(offer.skipped_files)}"] if offer.skipped_files else []),
                f"already in the store: store:{known.content_sha256}" if known else "not in the store yet",
            ]
            print_result(_build_result(offer, known, path, cached=known is not None), as_json, lines)
            return
        accepted_by = by or get_user_name() if accept_license else None
        model, was_cached = model_import.import_model(offer, work, accepted_by, reporter)
    state = "was already in the store" if was_cached else f"is in the store, {size}"
    lines = [f"{offer.source} {state}", f"use it: --set fine_tuning.base_model=store:{model.sha256}"]
    print_result(_build_result(offer, model.manifest, model.path, cached=was_cached), as_json, lines)


def _build_result(
    offer: SourceContent, manifest: Manifest | None, path: Path | None, *, cached: bool
) -> dict[str, Any]:
    """Build the JSON object of the command; without a manifest, the model is not in the store."""
    unaccepted = {**offer.licence.model_dump(), "texts": {}, "accepted": None}
    return {
        "source": offer.source,
        "base_model": f"store:{manifest.content_sha256}" if manifest else None,
        "sha256": manifest.content_sha256 if manifest else None,
        "model": str(path) if path else None,
        "files": len(offer.files),
        "bytes": offer.bytes,
        "left_out": offer.skipped_files,
        "licence": manifest.summary.get("licence", unaccepted) if manifest else unaccepted,
        "cached": cached,
    }
