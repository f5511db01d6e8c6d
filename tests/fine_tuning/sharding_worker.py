"""A worker that shards a model with FSDP2: `python -m tests.fine_tuning.sharding_worker MODEL FOLDER`.

For an unsharded, a sharded and a partially sharded model it writes which parameters count as sharded and the outcome of the
strategy check.
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

from components.common.runtime.errors import TrainingError
from components.fine_tuning import sharding
from components.fine_tuning.config import FineTuningConfig

CONFIG = FineTuningConfig(strategy="fsdp2", processes=2)


def verify_strategy(model: Any) -> str:
    try:
        sharding.verify_strategy(CONFIG, model)
    except TrainingError as error:
        return error.message
    return "verified"


def sharded_parameters(model: Any) -> dict[str, bool]:
    return {name: sharding._is_sharded(parameter) for name, parameter in model.named_parameters()}


def main(source: Path, folder: Path) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source)
    unsharded = {"is_sharded": sharded_parameters(model), "verification": verify_strategy(model)}
    partial_model = AutoModelForCausalLM.from_pretrained(source)
    fully_shard(partial_model.model.layers[0])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    results = {
        "unsharded": unsharded,
        "sharded": {"is_sharded": sharded_parameters(model), "verification": verify_strategy(model)},
        "partial": {"is_sharded": sharded_parameters(partial_model), "verification": verify_strategy(partial_model)},
    }
    (folder / f"result.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
