"""The model to explain: a folder, a source, a registered version, or the version that wrote a captured answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading, training_lineage
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import InputError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.model_registry.stage import RegisteredModel, find_by_digest, get_registered
from pipelines.capture import tombstones, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.explanation.explained_answer import Question
from pipelines.provenance import lineage

RECORDED = "recorded"  # in place of a dataset's folder: the dataset in the model's manifest


@dataclass(frozen=True)
class CapturedAnswer:
    """A captured answer of the gateway.

    Attributes:
        question: The request's conversation.
        text: The answer.
        model_sha256: Digest of the model that answered; "" if it was not captured.
        facts: The row's own values of tuneline: model, version, subject, redactions.
    """

    question: Question
    text: str
    model_sha256: str
    facts: dict[str, Any]


def find_captured_answer(settings: CaptureSettings, response_id: str) -> CapturedAnswer:
    """Return the captured answer with this id. Call it under the lock of the captured traffic.

    Raises:
        InputError: no stored answer has the id, its subject was erased, or it is no single answer to messages.
    """
    erased = tombstones.read_tombstones(settings.folder)
    rows = (row for day in traffic_files.list_days(settings.folder) for row in traffic_files.read_day(day))
    row = next((one for one in rows if one["response"]["id"] == response_id), None)
    if row is None:
        raise InputError(
            f"the captured traffic in {settings.location} has no answer {response_id}",
            hint="Correct the ID. Rows that were not sampled, have expired or were erased are not stored.",
        )
    if tombstones.is_erased(row, erased):
        raise InputError(
            f"the subject of the answer {response_id} was erased",
            hint="Choose another answer; the gateway deletes this row when it seals the file.",
        )
    messages, choices = row["request"].get("messages"), row["response"]["choices"]
    if not messages or len(choices) != 1:
        raise InputError(
            f"the captured request of {response_id} has no messages, or more than one answer",
            hint="Specify the conversation with --messages and the answer with --answer.",
        )
    conversation = [
        {**one, "content": "".join(part["text"] for part in one["content"])}
        if isinstance(one.get("content"), list)
        else dict(one)
        for one in messages
    ]
    question = Question(conversation, row["request"].get("tools"))
    text = choices[0]["message"].get("content") or ""
    return CapturedAnswer(question, text, row["tuneline"].get("model_sha256") or "", row["tuneline"])


@contextmanager
def open_reference(
    reference: str, captured: CapturedAnswer | None, work: Workdir, reporter: Reporter
) -> Iterator[tuple[LoadableModel, RegisteredModel | None]]:
    """Provide the model, and its registered version if the reference names one.

    Args:
        reference: Folder of a tuned model, source of a base model, or NAME@ALIAS. "" finds the version that wrote the
            captured answer.
        captured: The captured answer to explain, or None.
        work: The workdir.
        reporter: Receives progress.

    Raises:
        UsageError: the reference is malformed, or names another model than the one that answered.
        RegistryError: the version does not exist.
        ConfigurationError: the source is invalid, or the model is not available.
        ArtifactDamagedError: a file has changed.
    """
    version: RegisteredModel | None = None
    if not reference:
        sha256 = captured.model_sha256 if captured else ""
        version = find_by_digest("", sha256) if sha256 else None
        if version is None:
            raise UsageError(
                f"the model {sha256[:12] or 'of the captured answer'} is not a registered version",
                hint="Specify the model that answered, as a folder or NAME@ALIAS.",
            )
    elif not Path(reference).exists() and (":" not in reference or reference.startswith("models:/")):
        version = get_registered(*lineage.parse_reference(reference))
    with tempfile.TemporaryDirectory(prefix="tuneline-explain-") as scratch:
        if version is None:
            model = model_loading.open_model(reference, reporter)
        else:
            sha256 = version.model_sha256
            artifact = lineage.find_artifact("model", sha256, [version.store_uri], work.store)
            artifact = artifact or version.fetch(Path(scratch) / sha256)
            model = model_loading.open_model_artifact(artifact, reporter)
        if captured and captured.model_sha256 and captured.model_sha256 != model.sha256:
            raise UsageError(
                f"the answer was written by the model {captured.model_sha256[:12]} "
                f"({captured.facts.get('model')} version {captured.facts.get('version')}); {reference} is "
                f"{model.sha256[:12]}",
                hint="Specify the version that answered, or omit the model to look it up in the registry.",
            )
        yield model, version


def open_training_data(dataset: str, model: LoadableModel, version: RegisteredModel | None) -> tuple[Artifact, str]:
    """Return the dataset, and a warning if the model's manifest records another dataset, or "".

    Args:
        dataset: Folder of a dataset, or RECORDED for the dataset in the model's manifest.
        model: The model.
        version: Its registered version, whose store may contain the dataset.

    Raises:
        InputError: the model records no dataset, or its dataset is not available.
        ArtifactDamagedError: a file of the dataset has changed.
    """
    recorded = model.artifact.manifest.find_input("dataset") if model.artifact else None
    if dataset != RECORDED:
        given = artifact_folder.read(Path(dataset), "dataset")
        if recorded is None:
            return (
                given,
                "the model's manifest records no training dataset, so the model may not have been trained on these rows",
            )
        if recorded.content_sha256 == given.sha256:
            return given, ""
        return given, (
            f"the model was trained on the dataset {recorded.content_sha256[:12]}, and {dataset} is "
            f"{given.sha256[:12]}: the given dataset may lack training rows, or contain rows that "
            "the model was not trained on"
        )
    if recorded is None:
        raise InputError(
            f"the model {model.sha256[:12]} records no training dataset",
            hint="A base model has no training dataset. Specify the folder of a dataset with --training-data.",
        )
    folder = training_lineage.find_folder(recorded, version.store_uri if version else "")
    if folder is None:
        raise InputError(
            f"the training dataset {recorded.content_sha256[:12]} of the model is not in the artifact store: it was "
            "erased, or is stored elsewhere",
            hint="Fetch its revision (`tuneline data list`, `tuneline data fetch REV -o DIR`) and pass DIR with "
            "--training-data.",
        )
    return artifact_folder.read(folder, "dataset"), ""
