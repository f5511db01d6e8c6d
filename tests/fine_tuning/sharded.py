"""Processes of a job for the tests that shard a model: `python -m tests.fine_tuning.sharded MODEL FOLDER`.

Tells of each parameter whether it is taken for a part, before and after FSDP2 has sharded it, and what the proof says.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from components.common.errors import TrainingError
from components.fine_tuning import sharding
from components.fine_tuning.config import FineTuningConfig

CONFIG = FineTuningConfig(strategy="fsdp2", processes=2)


def proof(model: Any) -> str:
    try:
        sharding.prove(CONFIG, model)
    except TrainingError as error:
        return error.message
    return "proven"


def parts(model: Any) -> dict[str, bool]:
    return {name: sharding._is_a_part(parameter) for name, parameter in model.named_parameters()}


def main(source: Path, folder: Path) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source)
    whole = {"parts": parts(model), "proof": proof(model)}
    some = AutoModelForCausalLM.from_pretrained(source)
    fully_shard(some.model.layers[0])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    told = {"whole": whole, "sharded": {"parts": parts(model), "proof": proof(model)}, "some": {"parts": parts(some), "proof": proof(some)}}
    (folder / f"told.{os.environ['RANK']}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
