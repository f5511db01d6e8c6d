"""`tuneline export`: a version or a dataset in a standard format."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError
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


@app.command()
def export(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@ALIAS]|DATASET",
            help="Model version: NAME@ALIAS, NAME@3 or NAME/3. Default alias: champion. For croissant, also the folder or dvc:// URI of a dataset.",
        ),
    ],
    format_: Annotated[
        Literal["ml-bom", "croissant", "model-card", "dossier"],
        typer.Option(
            "--format",
            help="ml-bom: CycloneDX 1.6; croissant: Croissant 1.0 of the dataset; model-card: README.md for the Hugging Face "
            "hub; dossier: technical documentation in the order of the EU AI Act's annexes, as HTML if the file's suffix is .html.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Output file. An existing file is replaced.")],
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Write the verified facts about a model version in a standard format. The same input always gives the same bytes.

    Unknown facts are stated as `unknown`. A version with a damaged lineage is not exported.
    """
    settings = load_config(config, sets).data_versioning
    _check_output(output)
    from components.common.artifacts import output_paths
    from pipelines.provenance.exports import rendering

    with open_workdir("export", as_json, workdir, tracking_uri) as (reporter, work):
        exported = rendering.export(reference, format_, work, settings, reporter, as_html=output.suffix == ".html")
        output_paths.write_file(output, exported.text)
    sha256 = hashlib.sha256(exported.text.encode()).hexdigest()
    result = {
        "format": format_,
        "output": str(output),
        "sha256": sha256,
        "name": exported.name,
        "version": exported.version,
        "missing": exported.missing,
        "items": exported.items,
    }
    lines = [f"! facts about a missing artifact are unknown: {one}" for one in exported.missing]
    counts = {state: len(numbers) for state, numbers in (exported.items or {}).items()}
    summary = (
        f" of {sum(counts.values())} items: {', '.join(f'{n} {state}' for state, n in counts.items())}"
        if counts
        else ""
    )
    print_result(result, as_json, [*lines, f"wrote {output} ({sha256[:12]}){summary}"])


def _check_output(output: Path) -> None:
    """Refuse a path that cannot be written, or that is in the folder of an artifact, before anything is read."""
    from components.common.artifacts import artifact_folder, output_paths

    output_paths.check_file(output, inputs=(), example="export")
    for folder in (output.parent.resolve() / output.name).parents:
        try:
            manifest = artifact_folder.read_manifest(folder)
        except ArtifactDamagedError:  # no artifact
            continue
        raise OutputOccupiedError(
            f"{output} is in the folder of the {manifest.kind} {manifest.content_sha256[:12]}; an additional file would "
            "invalidate the signature",
            hint="Choose another folder with -o.",
        )
