"""Quantizes a model with llm-compressor, in the quantization environment.

The first argument is a JSON file with the fields of `calibrated_weights.QuantizationJob`. This module imports nothing of
tuneline: the environment has another version of transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def quantize(job: dict[str, Any]) -> None:
    """Write the quantized weights, their configuration and llm-compressor's recipe into the job's output folder."""
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    # bfloat16 is slow on most CPUs
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, trust_remote_code=False)
    output_layer = model.get_output_embeddings()
    ignored = [name for name, module in model.named_modules() if module is output_layer]
    scheme = preset_name_to_scheme(job["preset"], ["Linear"])
    scheme.weights.group_size = job["group_size"]
    oneshot(
        model=model,
        dataset=Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["rows"]]),
        recipe=GPTQModifier(config_groups={"linear": scheme}, ignore=ignored),
        num_calibration_samples=len(job["rows"]),
        max_seq_length=max(map(len, job["rows"])),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(job["output"], save_compressed=True)
    _store_as_bfloat16(Path(job["output"]))


def _store_as_bfloat16(folder: Path) -> None:
    """Convert the unquantized weights and the scales, so that a package from a CPU equals the served precision."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = {
            name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    quantize(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
