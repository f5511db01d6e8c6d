"""`tuneline export`: a version or a dataset in a standard format."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError, UsageError
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
    from components.triton_packaging.gguf_export.gguf_file import GgufType
    from pipelines.config.customization_config import Customization
    from pipelines.provenance.exports.rendering import Format


@app.command()
def export(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@ALIAS]|DATASET|MODEL",
            help="Model version: NAME@ALIAS, NAME@3 or NAME/3. Default alias: champion. For croissant, also the folder or dvc:// URI of a "
            "dataset; for gguf, also the folder of a tuned model or the source of a base model.",
        ),
    ],
    format_: Annotated[
        Literal["ml-bom", "croissant", "model-card", "dossier", "gguf"],
        typer.Option(
            "--format",
            help="ml-bom: CycloneDX 1.6; croissant: Croissant 1.0 of the dataset; model-card: README.md for the Hugging Face "
            "hub; dossier: technical documentation in the order of the EU AI Act's annexes, as HTML if the file's suffix is .html; "
            "gguf: model for llama.cpp, compared with the original model.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Output file. An existing file is replaced. For gguf, a new folder.")
    ],
    type_: Annotated[
        Literal["q8_0", "f16", "bf16", "f32", "q5_1", "q5_0", "q4_1", "q4_0"] | None,
        typer.Option("--type", help="Type of the weights in a GGUF file. Default: q8_0, with 8.5 bits per weight."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            help="Dataset on whose test split the loss of a GGUF file is measured. Default: the dataset that the "
            "model was trained on.",
        ),
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Write the verified facts about a model version in a standard format. The same input always gives the same bytes.

    Unknown facts are stated as `unknown`. A version with a damaged lineage is not exported. A GGUF export fails if the
    upper confidence bound of the loss increase on the test split exceeds triton_packaging.quantization_margin.
    """
    customization = load_config(config, sets)
    if format_ == "gguf":
        _check_parents(output)
        _export_gguf(reference, output, type_ or "q8_0", dataset, customization, workdir, tracking_uri, as_json)
        return
    for option, value in {"--type": type_, "--dataset": dataset}.items():
        if value is not None:
            raise UsageError(f"{option} requires --format gguf", hint=f"Omit {option}, or set --format gguf.")
    _check_output(output)
    _export_facts(reference, output, format_, customization, workdir, tracking_uri, as_json)


def _export_facts(
    reference: str,
    output: Path,
    format_: Format,
    customization: Customization,
    workdir: Path,
    tracking_uri: str,
    as_json: bool,
) -> None:
    """Write the facts about a version or a dataset to a file."""
    settings = customization.data_versioning
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


def _export_gguf(
    reference: str,
    output: Path,
    type_: GgufType,
    dataset: Path | None,
    customization: Customization,
    workdir: Path,
    tracking_uri: str,
    as_json: bool,
) -> None:
    """Write a GGUF file into a new folder and print the comparison with the original model."""
    from pipelines.provenance.exports import gguf_model

    with open_workdir("export", as_json, workdir, tracking_uri) as (reporter, work):
        artifact = gguf_model.export_gguf(reference, output, type_, work, customization, reporter, dataset=dataset)
    summary = artifact.manifest.summary
    file = next(one for one in artifact.manifest.files if one.path == summary["file"])
    measured = summary["quantization"]
    result = {
        "format": "gguf",
        "type": type_,
        "output": str(output),
        "file": str(output / file.path),
        "sha256": file.sha256,
        "bytes": file.bytes,
        "content_sha256": artifact.sha256,
        "quantization": measured,
    }
    lines = [
        f"{type_}: loss {measured['increase']:+.4f} nats per token, upper bound {measured['increase_bound']:+.4f}; "
        f"margin {measured['margin']:.4f}",
        f"wrote {output / file.path} ({file.sha256[:12]})",
    ]
    print_result(result, as_json, lines)


def _check_output(output: Path) -> None:
    """Refuse a path that cannot be written, or that is in the folder of an artifact, before anything is read."""
    from components.common.artifacts import output_paths

    output_paths.check_file(output, inputs=(), example="export")
    _check_parents(output)


def _check_parents(output: Path) -> None:
    """Refuse a path in the folder of an artifact."""
    from components.common.artifacts import artifact_folder

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
