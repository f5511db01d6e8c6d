"""Export of a registered version, a tuned model or a base model as a GGUF file for llama.cpp."""

from __future__ import annotations

import tempfile
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import MANIFEST_FILENAME, Artifact
from components.common.models import licences, model_loading, training_lineage
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import stage as versioning
from components.model_registry import policy_checks
from components.triton_packaging.gguf_export import export
from components.triton_packaging.gguf_export.gguf_file import GgufType
from pipelines.config.customization_config import Customization
from pipelines.provenance.exports import version_facts
from pipelines.provenance.exports.version_facts import UNKNOWN, VersionFacts
from pipelines.provenance.lineage import RESTORE_HINT, LineageError, open_trace

SHA256_KEYS = {"repository": "tuneline.package_sha256", "evaluation": "tuneline.evaluation_sha256"}


def export_gguf(
    reference: str,
    output: Path,
    type_: GgufType,
    workdir: Workdir,
    customization: Customization,
    reporter: Reporter,
    *,
    dataset: Path | None = None,
) -> Artifact:
    """Write the GGUF file of a model, and its comparison with the model, into a new folder.

    Args:
        reference: NAME@ALIAS, NAME@3, NAME/3, NAME (its champion), the folder of a tuned model or the source of a base
            model.
        dataset: folder of the dataset whose test split is used for the comparison. Default: the dataset that the model
            was trained on.

    Raises:
        RegistryError: the model, version or alias does not exist.
        LineageError: an artifact of the lineage is damaged or missing.
        ConfigurationError: the model is not supported, or no dataset is available.
        QuantizationError: the loss of the file's weights exceeds that of the model by more than the margin.
        OutputOccupiedError: `output` is not empty.
    """
    export.check_output(output)

    def write(model: LoadableModel, name: str, texts: dict[str, str], measured: Artifact) -> Artifact:
        return export.export_gguf(
            model,
            output,
            type_,
            customization.triton_packaging,
            name=name,
            texts=texts,
            dataset=measured,
            seed=customization.seed,
            reporter=reporter,
        )

    stated = artifact_folder.read(dataset, "dataset") if dataset else None
    if _is_model(reference):
        with artifact_store.keep_paths_in_use(reference, *([dataset] if dataset else [])):
            model = model_loading.open_model(reference, reporter)
            licence = _find_licence(model)
            texts = {"general.license": licence} if licence else {}
            return write(
                model,
                f"{model.base.name.rpartition('/')[2]}-{model.sha256[:12]}",
                texts,
                stated or _find_dataset(model),
            )
    with (
        open_trace(reference, workdir, customization.data_versioning, reporter) as lineage,
        tempfile.TemporaryDirectory(prefix="tuneline-export-") as scratch,
    ):
        facts = version_facts.collect_facts(lineage, workdir.store)
        tuned = facts.find_artifact("model")
        if tuned is None:
            raise LineageError(
                f"the model of {lineage.name} version {lineage.version} was not found",
                hint=RESTORE_HINT,
                stage="export",
            )
        model = model_loading.open_model_artifact(tuned, reporter)
        measured = stated or _fetch_dataset(facts, workdir, customization, reporter, Path(scratch))
        return write(model, f"{lineage.name}-{lineage.version}", _describe_version(facts), measured)


def _is_model(reference: str) -> bool:
    """Return whether a reference is a folder or the source of a base model, rather than a registered version."""
    if reference.startswith("models:/"):
        return False
    folder = Path(reference)
    return ":" in reference or any((folder / name).exists() for name in (MANIFEST_FILENAME, "config.json"))


def _find_licence(model: LoadableModel) -> str:
    """Return the licences of the base model, or ""."""
    if model.artifact:
        return ", ".join(policy_checks.list_base_licences(model.artifact))
    if model.base.uri == model_loading.EMBEDDED_SOURCE:
        return model_loading.EMBEDDED_LICENCE.lower()
    return licences.read_model_card(model.base.path).id.lower()


def _find_dataset(model: LoadableModel) -> Artifact:
    """Return the dataset that a model was trained on."""
    trained_on = model.artifact.manifest.find_input("dataset") if model.artifact else None
    folder = training_lineage.find_folder(trained_on, "") if trained_on else None
    if folder is None:
        raise ConfigurationError(
            "the export compares the GGUF file with the model, but "
            + (
                "the dataset that the model was trained on is not available"
                if trained_on
                else "a base model has no dataset"
            ),
            hint="Specify a dataset with --dataset.",
        )
    return artifact_folder.read(folder, "dataset")


def _fetch_dataset(
    facts: VersionFacts, workdir: Workdir, customization: Customization, reporter: Reporter, scratch: Path
) -> Artifact:
    """Return the dataset of a version, which is fetched from its revision if no store has it."""
    dataset, revision = facts.find_artifact("dataset"), facts.find_link("revision")
    if dataset and (dataset.path / MANIFEST_FILENAME).exists():
        return dataset
    if dataset is None or revision is None:
        raise LineageError(
            f"the dataset of {facts.registered.name} version {facts.registered.version} was not found",
            hint=f"Specify a dataset with --dataset. {RESTORE_HINT}",
            stage="export",
        )
    return versioning.fetch(
        revision.uri, scratch / "dataset", customization.data_versioning, workdir=workdir.root, reporter=reporter
    )


def _describe_version(facts: VersionFacts) -> dict[str, str]:
    """Return the metadata of a registered version."""
    version = facts.registered
    texts = {
        "general.version": version.version,
        "general.license": facts.base_licence,
        "tuneline.version": f"models:/{version.name}/{version.version}",
        "tuneline.verdict": version.tags.get("tuneline.verdict", UNKNOWN),
    }
    links = {key: facts.find_link(kind) for kind, key in SHA256_KEYS.items()}
    return {**texts, **{key: link.sha256 for key, link in links.items() if link and link.sha256}}
