"""Export of a model: writes the GGUF file, compares its weights with the unquantized model, and publishes both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.encoded_rows import EncodedItem
from components.common.models.model_loading import LoadableModel
from components.common.runtime import filesystem
from components.common.runtime.errors import OutputOccupiedError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders
from components.triton_packaging import quantization, weight_files
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.gguf_export import architectures, gguf_file, vocabulary
from components.triton_packaging.gguf_export.gguf_file import GgufType
from components.triton_packaging.quantization import QuantizationResult
from components.triton_packaging.stage import build_lineage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "gguf"
FORMAT_VERSION = 1  # increment when the content of the files changes


def export_gguf(
    model: LoadableModel,
    output: Path,
    type_: GgufType,
    config: TritonPackagingConfig,
    *,
    name: str,
    texts: Mapping[str, str],
    dataset: Artifact,
    seed: int,
    reporter: Reporter,
) -> Artifact:
    """Write a GGUF file into a new folder and publish the folder as an artifact of kind gguf.

    The folder appears when the export is complete: neither an interrupted export nor a refused file leaves anything.

    Args:
        output: folder that does not exist or is empty.
        config: margin and number of items of the comparison.
        name: name of the model, for the file's name and metadata.
        texts: further metadata by key, in addition to the model's lineage.
        dataset: dataset whose test split is used for the comparison.

    Raises:
        OutputOccupiedError: `output` is not empty.
        ConfigurationError: llama.cpp does not support the model or its tokenizer, or the adapter cannot be merged.
        QuantizationError: the loss of the file's weights exceeds that of the model by more than the margin.
        InputError: the test split has too few rows with an answer.
    """
    check_output(output)
    architectures.find_architecture(model_loading.load_configuration(model.weights))
    if model.adapter and model.artifact:
        model_loading.check_mergeable(model.artifact, name)
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    vocabulary.find_pre_tokenizer(tokenizer)
    limit = quantization.MAX_ITEM_TOKENS
    max_length = min(limit, weight_files.read_context_tokens(model.weights, limit))
    items = quantization.read_items(dataset, tokenizer, config.quantization_items, max_length, seed=seed)
    lineage = {f"tuneline.{key}": value for key, value in build_lineage(model).items()}
    metadata = {"general.name": name, **dict(sorted({**lineage, **texts}.items()))}
    filename = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{type_.upper()}.gguf"
    inputs = [model.as_input(), *([model.base.as_input()] if model.artifact else []), dataset.as_input()]
    settings = {"type": type_, **config.model_dump(include={"quantization_margin", "quantization_items"})}
    with job_folders.private_folder(output.absolute().parent, f".{output.name}") as work:

        def write(original: PreTrainedModel) -> None:
            gguf_file.write_gguf(work / filename, original, tokenizer, type_, metadata)

        result = _write_and_compare(model, work / filename, write, items, config, type_, seed=seed, reporter=reporter)
        artifact = artifact_folder.publish(
            work,
            KIND,
            payload=[filename],
            inputs=inputs,
            config=settings,
            seed=seed,
            key=hashing.digest([FORMAT_VERSION, metadata, settings, seed, [one.content_sha256 for one in inputs]]),
            summary={"file": filename, "metadata": metadata, "quantization": result.build_statement()},
        )
        filesystem.rename(work, output)
    return Artifact(output, artifact.manifest)


def _write_and_compare(
    model: LoadableModel,
    path: Path,
    write: Callable[[PreTrainedModel], None],
    items: list[EncodedItem],
    config: TritonPackagingConfig,
    type_: GgufType,
    *,
    seed: int,
    reporter: Reporter,
) -> QuantizationResult:
    """Write the merged model with `write`, and compare the weights that transformers reads from the file with it."""
    device = model_loading.prepare_torch(seed)
    reporter.step("merging the weights")
    original = quantization.load_merged_model(model).to(device)
    reporter.step(f"writing {path.name}")
    write(original)
    reporter.step("loss of the unquantized model")
    before = quantization.compute_losses(original, items, reporter)
    quantization.check_losses(before, items, "unquantized")
    original_config, parameters = original.config, original.num_parameters()
    del original
    reporter.step("loss of the GGUF file")
    losses = quantization.compute_losses(gguf_file.read_gguf(path, original_config).to(device), items, reporter)
    quantization.check_losses(losses, items, "quantized")
    return quantization.compare_losses(
        before,
        losses,
        [sum(item.mask[1:]) for item in items],
        config,
        scheme=f"gguf {type_}",
        weight_bytes=path.stat().st_size,
        unquantized_weight_bytes=parameters * (4 if weight_files.resolve_dtype(config.dtype) == "float32" else 2),
        seed=seed,
    )


def check_output(output: Path) -> None:
    """Raise OutputOccupiedError if a folder cannot be created or is not empty."""
    if output.is_file():
        raise OutputOccupiedError(f"{output} is a file; expected a folder", hint="Choose a folder with -o.")
    if output.is_dir() and any(output.iterdir()):
        raise OutputOccupiedError(f"{output} is not empty", hint="Choose an empty or new folder with -o.")
