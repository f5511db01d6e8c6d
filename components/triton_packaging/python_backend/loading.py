"""What the model of a package is loaded from: base weights, tokenizer, and the adapter that is attached to them, where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers


class PartsError(Exception):
    """A folder that the package refers to is not there as it was."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer. `alone` says why its requests are answered one by one; empty where they may be computed together."""

    model: Any
    tokenizer: Any
    alone: str


def load(version: Path, parameters: Mapping[str, str], device: torch.device) -> Loaded:
    """The model of a version folder, on the device. Raises PartsError for a folder referred to that is gone or has changed."""
    check_references(parameters)
    dtype = getattr(torch, parameters["dtype"]) if device.type == "cuda" else torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(version / parameters["tokenizer_folder"], trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        version / parameters["weights_folder"], dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    adapter = parameters["adapter_folder"]
    model, alone = attached(model, version / adapter) if adapter else (model, "")
    return Loaded(model.to(device).eval(), tokenizer, alone)


def attached(model: Any, folder: Path) -> tuple[Any, str]:
    """The model with an adapter, and why its requests are answered one by one, if they are.

    A LoRA adapter's layers take the places of the model's own, so the model with them is used like any other. Virtual tokens stand before
    a prompt by PEFT's own generate alone.
    """
    from peft import PeftModel

    whole = PeftModel.from_pretrained(model, str(folder))
    if whole.active_peft_config.is_prompt_learning:
        return whole, "its adapter puts virtual tokens before every prompt"
    return whole.get_base_model(), ""


def check_references(parameters: Mapping[str, str]) -> None:
    """See that the folders a package refers to hold the weight files it was made with, by their sizes: their digests would take minutes."""
    for reference in json.loads(parameters.get("references", "[]")):
        folder, expected = Path(reference["folder"]), reference["files"]
        if not folder.is_dir():
            raise PartsError(f"the weights in {folder}, which this package refers to, are not there: mount that folder, or package again")
        found = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        different = sorted(name for name, size in expected.items() if found.get(name) != size)
        if different:
            raise PartsError(
                f"{', '.join(different)} in {folder}, which this package refers to, is missing or of another size: package again"
            )
