"""Base models in the artifact store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.app import HERE, AsJson, WorkdirOption, app, show, working

if TYPE_CHECKING:
    from components.common.artifacts import Artifact, Manifest
    from components.common.importing import Offer

models_app = typer.Typer(no_args_is_help=True, help="Base models in the artifact store.")
app.add_typer(models_app, name="models")


@models_app.callback()
def group() -> None:
    """Base models in the artifact store."""


@models_app.command("import")
def models_import(
    source: Annotated[str, typer.Argument(help="hf://org/name@revision, a folder in the Hugging Face layout, or an embedded model.")],
    accept_license: Annotated[
        bool,
        typer.Option("--accept-license", help="Accept the model's licence where it asks for that; who and when is kept with it."),
    ] = False,
    by: Annotated[str, typer.Option("--by", help="Who accepts it; default: the user of this system.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files, bytes and licence, and fetch nothing.")] = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Bring a base model into the artifact store, once: runs name it by its digest and read it without a network."""
    from components.common import importing, places
    from components.common.errors import UsageError
    from components.common.people import user

    with working("models", as_json, workdir) as (reporter, work):
        if by and not accept_license:
            raise UsageError("--by says who accepts the licence, and nobody does", hint="Give --accept-license with it, or leave it out.")
        offer = importing.look(source, reporter)
        if dry_run:
            noted = importing.noted(offer, work)
            here = work.store / noted.content_sha256 if noted and places.is_here(work.store, noted.content_sha256) else None
            show(_told(offer, noted, here, was_there=noted is not None), as_json, _offered(offer, noted))
            return
        accepted = importing.Acceptance(by or user()) if accept_license else None
        found, was_there = importing.bring(offer, work, accepted, reporter)
    show(_told(offer, found.manifest, found.path, was_there=was_there), as_json, _brought(offer, found, was_there))


def _told(offer: Offer, found: Manifest | None, path: Path | None, *, was_there: bool) -> dict[str, Any]:
    kept = found.summary["licence"] if found else {**offer.licence.model_dump(), "texts": {}, "accepted": None}
    return {
        "source": offer.source,
        "base_model": f"store:{found.content_sha256}" if found else None,
        "sha256": found.content_sha256 if found else None,
        "model": str(path) if path else None,
        "files": len(offer.files),
        "bytes": offer.bytes,
        "left_out": offer.left_out,
        "licence": kept,
        "cached": was_there,
    }


def _offered(offer: Offer, known: Manifest | None) -> list[str]:
    wants = "; give --accept-license where your organisation accepts it" if offer.licence.asks else ""
    return [
        f"{offer.source}: {len(offer.files)} files, {offer.bytes / 1e9:,.2f} GB",
        f"licence: {offer.licence.title}{wants}",
        *([f"left out: {', '.join(offer.left_out)}"] if offer.left_out else []),
        f"in the store already: store:{known.content_sha256}" if known else "not in the store yet",
    ]


def _brought(offer: Offer, found: Artifact, was_there: bool) -> list[str]:
    where = "was in the store already" if was_there else f"is in the store, {offer.bytes / 1e9:,.2f} GB"
    return [f"{offer.source} {where}", f"use it: --set fine_tuning.base_model=store:{found.sha256}"]
