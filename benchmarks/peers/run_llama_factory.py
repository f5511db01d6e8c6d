"""LLaMA-Factory's training, started as by `llamafactory-cli train`.

Settings differ from its defaults only where the task or the CPU requires it; packing also sets neat_packing, without which packed rows
attend to each other.

PYTHON -m benchmarks.peers.run_llama_factory SETTINGS.json        in an environment with LLaMA-Factory
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import stopwatch

# What the model's own chat template writes where a conversation has no system message; LLaMA-Factory's template of it writes none.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, write the adapter to settings["output"], and return the figures."""
    from llamafactory.train.tuner import run_exp

    data = _data(settings)
    watch = stopwatch.stopwatch()
    recompute = {} if settings["recompute"] is None else {"disable_gradient_checkpointing": not settings["recompute"]}
    run_exp(
        {
            "model_name_or_path": settings["model"],
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": settings["rank"],
            "lora_alpha": settings["alpha"],
            "lora_dropout": 0.0,
            "lora_target": "all",
            "dataset_dir": str(data),
            "dataset": "rows",
            "template": "smollm2",
            "default_system": SYSTEM,
            "cutoff_len": settings["max_length"],
            "packing": settings["packing"],
            "neat_packing": settings["packing"],
            "output_dir": settings["output"],
            "num_train_epochs": 1.0,
            "per_device_train_batch_size": settings["batch_size"] // settings["accumulation"],
            "gradient_accumulation_steps": settings["accumulation"],
            "learning_rate": settings["learning_rate"],
            "lr_scheduler_type": "constant",
            "seed": settings["seed"],
            "use_cpu": True,
            "bf16": False,
            "logging_steps": 1,
            "report_to": "none",
            **recompute,
        },
        callbacks=[watch],
    )
    return {**watch.told(), "adapter": settings["output"]}


def _data(settings: dict[str, Any]) -> Path:
    """Write the rows in LLaMA-Factory's format."""
    rows = json.loads(Path(settings["rows"]).read_text(encoding="utf-8"))
    folder = Path(settings["output"]).parent / "data"
    folder.mkdir()
    said = [
        {"instruction": row["messages"][0]["content"], "input": "", "output": row["messages"][1]["content"]}
        for row in rows
    ]
    (folder / "rows.json").write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    info = {"rows": {"file_name": "rows.json", "formatting": "alpaca", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


if __name__ == "__main__":
    stopwatch.say(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
