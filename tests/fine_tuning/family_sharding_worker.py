"""A worker that loads models in shards: `python -m tests.fine_tuning.family_sharding_worker FOLDER`.

FOLDER has a model in each subfolder. Each rank writes their losses and the shares of their parameters that it holds to `result.RANK`.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from components.common.models import model_loading
from components.fine_tuning import sharding
from components.fine_tuning.config import FineTuningConfig

OPTIONS = sharding.build_loading_options(FineTuningConfig(strategy="fsdp2", processes=2), bfloat16=False)
IDS = torch.arange(3, 35)[None]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    results = {}
    for path in sorted(folder.glob("*/")):
        loadable = model_loading.open_model(path)
        model = model_loading.load_model(loadable, trainable=True, dtype=torch.float32, **OPTIONS)
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
        share = local / sum(parameter.numel() for parameter in model.parameters())
        with torch.no_grad():
            results[path.name] = (model(input_ids=IDS, labels=IDS, use_cache=False).loss.item(), share)
    (folder / f"result.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
