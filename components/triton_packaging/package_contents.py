"""Weights, tokenizer and adapters of a package: stored in the package, or in folders that it refers to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder
from components.common.models import calibrated_weights, model_loading
from components.common.models.calibrated_weights import CalibratedWeights
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, TunelineError
from components.common.runtime.filesystem import link_or_copy
from components.triton_packaging import weight_files
from components.triton_packaging.adapter_placement import AdapterPlacement
from components.triton_packaging.quantization import write_quantized_weights

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2

WEIGHTS_FOLDER, TOKENIZER_FOLDER, ADAPTERS_FOLDER = "weights", "tokenizer", "adapters"
REFERENCES_PARAMETER = "references"  # the parameter of config.pbtxt that lists the references


@dataclass(frozen=True)
class FolderReference:
    """A folder outside of the package: its digest, and the sizes of its weight files in bytes.

    The python backend checks the sizes when it loads the model.
    """

    folder: str
    sha256: str
    files: Mapping[str, int]


@dataclass(frozen=True)
class PackageContents:
    """Paths of the contents: relative to the package's version folder, or absolute for referenced folders."""

    weights: str
    tokenizer: str
    adapters: Mapping[str, str]
    references: Sequence[FolderReference]

    def build_parameters(self) -> dict[str, str]:
        """Return the parameters for config.pbtxt that describe the references; empty without references."""
        references = json.dumps([asdict(reference) for reference in self.references], sort_keys=True)
        return {REFERENCES_PARAMETER: references} if self.references else {}


def copy_contents(
    model: LoadableModel,
    placement: AdapterPlacement,
    version: Path,
    dtype: str,
    quantization: str = "none",
    calibrated: CalibratedWeights | None = None,
) -> PackageContents:
    """Write all contents into a version folder. Attached adapters share one copy of the base weights.

    Args:
        dtype: data type of merged weights, and of the unquantized weights beside compressed ones: float32 or bfloat16.
        quantization: format of the weights, as in `triton_packaging.quantization`.
        calibrated: the weights, if the format is calibrated.
    """
    if quantization == "none":
        weight_files.write_weights(model, version / WEIGHTS_FOLDER, dtype, merged=placement.mode == "merged")
    else:
        if calibrated:
            (version / WEIGHTS_FOLDER).mkdir(parents=True, exist_ok=True)
            for path in calibrated_weights.list_files(calibrated.folder):
                copy = link_or_copy if path.suffix == ".safetensors" else shutil.copyfile
                copy(path, version / WEIGHTS_FOLDER / path.name)
        else:
            write_quantized_weights(model, version / WEIGHTS_FOLDER, quantization, dtype)
        weight_files.write_tokenizer(model, version / WEIGHTS_FOLDER)
    adapters = {name: f"{ADAPTERS_FOLDER}/{name}" for name in placement.adapters}
    for name, adapted in placement.adapters.items():
        weight_files.write_adapter(adapted, version / adapters[name])
    return PackageContents(WEIGHTS_FOLDER, WEIGHTS_FOLDER, adapters, [])


def reference_contents(model: LoadableModel, placement: AdapterPlacement, version: Path) -> PackageContents:
    """Write the tokenizer into a version folder, and refer to weights and adapters in their original folders.

    Raises:
        ConfigurationError: the adapter is merged; the merged weights exist only in the package.
    """
    if placement.mode == "merged":
        raise ConfigurationError(
            "triton_packaging.weights is referenced, but merged weights exist only in the package",
            hint="Set triton_packaging.adapter to attached, or triton_packaging.weights to copied.",
        )
    weight_files.write_tokenizer(model, version / TOKENIZER_FOLDER)

    def reference(folder: Path, sha256: str) -> FolderReference:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        return FolderReference(str(folder.absolute()), sha256, sizes)

    base = reference(model.weights, model.sha256 if model.weights != model.base.path else model.base.sha256)
    adapters = {
        name: reference(adapted.adapter or adapted.weights, adapted.sha256)
        for name, adapted in placement.adapters.items()
    }
    folders = {name: each.folder for name, each in adapters.items()}
    return PackageContents(base.folder, TOKENIZER_FOLDER, folders, [base, *adapters.values()])


def read_references(config: model_config_pb2.ModelConfig) -> list[FolderReference]:
    """Return the folders that a config.pbtxt refers to."""
    if REFERENCES_PARAMETER not in config.parameters:
        return []
    return [FolderReference(**each) for each in json.loads(config.parameters[REFERENCES_PARAMETER].string_value)]


def verify_reference(reference: FolderReference) -> None:
    """Verify the digest of a referenced folder.

    Raises:
        ArtifactDamagedError: the folder is missing or has changed.
    """
    folder, problem = Path(reference.folder), ""
    try:
        is_artifact = (folder / artifact_folder.MANIFEST_FILENAME).exists()
        source = artifact_folder.read(folder) if is_artifact else model_loading.resolve_base_model(reference.folder)
        if source.sha256 != reference.sha256:
            problem = f"digest {source.sha256[:12]}; expected {reference.sha256[:12]}"
    except TunelineError as error:
        problem = error.message.removeprefix(f"{model_loading.BASE_MODEL_KEY}: ")
    if problem:
        raise ArtifactDamagedError(
            f"the package refers to {reference.folder}, which is missing or has changed: {problem}",
            hint="Restore the folder, or package the model again with triton_packaging.weights=copied.",
        )
