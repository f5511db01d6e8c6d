"""Loads a package's model: weights, tokenizer, and the attached adapter if the package has one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import int8_layers  # noqa: F401 # transformers loads int8 weights with its quantizer


class MissingWeightsError(Exception):
    """A folder that the package refers to is missing or has changed."""


def load_model(
    version: Path, parameters: Mapping[str, str], device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Load the model of a version folder onto the device.

    Args:
        parameters: the parameters of config.pbtxt.

    Returns:
        The model, its tokenizer, and the reason why it cannot answer requests in batches; "" if it can.

    Raises:
        MissingWeightsError: a folder that the package refers to is missing or has changed.
    """
    check_references(parameters)
    dtype = getattr(torch, parameters["dtype"]) if device.type == "cuda" else torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        version / parameters["tokenizer_folder"], trust_remote_code=False
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        version / parameters["weights_folder"], dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    sequential_reason = ""
    if parameters["adapter_folder"]:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, str(version / parameters["adapter_folder"]))
        if adapted.active_peft_config.is_prompt_learning:  # only PEFT's own generate prepends the virtual tokens
            model, sequential_reason = adapted, "its adapter prepends virtual tokens to every prompt"
        else:  # LoRA layers replace the model's own, so the base model object includes them
            model = adapted.get_base_model()
    return model.to(device).eval(), tokenizer, sequential_reason


def check_references(parameters: Mapping[str, str]) -> None:
    """Check that referenced weight files have the recorded sizes; computing their digests would take minutes.

    Args:
        parameters: the parameters of config.pbtxt.

    Raises:
        MissingWeightsError: a folder that the package refers to is missing or has changed.
    """
    for reference in json.loads(parameters.get("references", "[]")):
        folder, expected = Path(reference["folder"]), reference["files"]
        if not folder.is_dir():
            raise MissingWeightsError(
                f"the package refers to weights in {folder}, which does not exist: mount the folder, or package the model again"
            )
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        different = sorted(name for name, size in expected.items() if sizes.get(name) != size)
        if different:
            first = different[0]
            raise MissingWeightsError(
                f"the package refers to {first} in {folder}, which has {sizes.get(first, 'no')} bytes; expected "
                f"{expected[first]} (files that differ: {len(different)} of {len(expected)}): restore the files, or "
                "package the model again"
            )
