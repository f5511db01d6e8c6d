"""The parts a package serves: weights, tokenizer, adapters; in the package, or in the folders it refers to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, models
from components.common.errors import ArtifactDamagedError, ConfigurationError, TunelineError
from components.common.models import Model
from components.triton_packaging import weights
from components.triton_packaging.form import Form

WEIGHTS, TOKENIZER, ADAPTERS = "weights", "tokenizer", "adapters"
REFERENCES = "references"  # the parameter of config.pbtxt that names them


@dataclass(frozen=True)
class Reference:
    """A folder that a package refers to: what it is, and its weight files' sizes in bytes, which a server checks when it loads."""

    folder: str
    sha256: str
    files: Mapping[str, int]


@dataclass(frozen=True)
class Parts:
    """Where the parts lie: relative to the package's version folder, or absolute where it refers to them."""

    weights: str
    tokenizer: str
    adapters: Mapping[str, str]
    references: Sequence[Reference]

    def parameters(self) -> dict[str, str]:
        """What config.pbtxt says of the folders referred to; nothing where there are none."""
        told = json.dumps([asdict(one) for one in self.references], sort_keys=True)
        return {REFERENCES: told} if self.references else {}


def write(model: Model, form: Form, version: Path, dtype: str) -> Parts:
    """Write all parts into a version folder. The base lies there once, however many adapters stand on it."""
    weights.write_weights(model, version / WEIGHTS, dtype, merged=form.adapter == "merged")
    for name, one in form.adapters.items():
        weights.write_adapter(one, version / ADAPTERS / name)
    return Parts(WEIGHTS, WEIGHTS, {name: f"{ADAPTERS}/{name}" for name in form.adapters}, [])


def refer(model: Model, form: Form, version: Path) -> Parts:
    """Write the tokenizer into a version folder, and refer to the rest where it lies. Raises ConfigurationError for merged weights, which
    lie nowhere."""
    if form.adapter == "merged":
        raise ConfigurationError(
            "a merged adapter has no weights anywhere that the package could refer to: they are made for the package",
            hint="Set triton_packaging.adapter to attached, or triton_packaging.weights to copied.",
        )
    weights.write_tokenizer(model, version / TOKENIZER)
    base = _reference(model.weights, model.sha256 if model.weights != model.base.path else model.base.sha256)
    adapters = {name: _reference(one.adapter or one.weights, one.sha256) for name, one in form.adapters.items()}
    folders = {name: one.folder for name, one in adapters.items()}
    return Parts(base.folder, TOKENIZER, folders, [base, *adapters.values()])


def _reference(folder: Path, sha256: str) -> Reference:
    found = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    return Reference(str(folder.absolute()), sha256, found)


def references(parameters: Any) -> list[Reference]:
    """The folders that the parameters of a config.pbtxt refer to."""
    return [Reference(**one) for one in json.loads(parameters[REFERENCES].string_value)] if REFERENCES in parameters else []


def verify(reference: Reference) -> None:
    """Check every digest of a folder that a package refers to. Raises ArtifactDamagedError when it is gone or is not what it was."""
    folder = Path(reference.folder)
    try:
        whole = (folder / artifacts.MANIFEST).exists()
        found = artifacts.read(folder).sha256 if whole else models.base_model(reference.folder).sha256
    except TunelineError as error:
        raise _lost(reference, error.message.removeprefix("fine_tuning.base_model: ")) from None
    if found != reference.sha256:
        raise _lost(reference, f"it holds {found[:12]} and not {reference.sha256[:12]}")


def _lost(reference: Reference, why: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"the package refers to {reference.folder}, which is not there as it was: {why}",
        hint="Restore that folder, or package the model again; with triton_packaging.weights copied a package needs no other folder.",
    )
