"""A plain TRL script as in TRL's documentation; settings differ from SFTConfig's defaults only where the task or the CPU requires it.

python -m benchmarks.peers.run_trl SETTINGS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import stopwatch


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, write the adapter to settings["output"], and return the figures."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = json.loads(Path(settings["rows"]).read_text(encoding="utf-8"))
    watch = stopwatch.stopwatch()
    recompute = {} if settings["recompute"] is None else {"gradient_checkpointing": settings["recompute"]}
    trainer = SFTTrainer(
        model=settings["model"],
        args=SFTConfig(
            output_dir=settings["output"],
            num_train_epochs=1,
            per_device_train_batch_size=settings["batch_size"] // settings["accumulation"],
            gradient_accumulation_steps=settings["accumulation"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            max_length=settings["max_length"],
            packing=settings["packing"],
            seed=settings["seed"],
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            report_to="none",
            **recompute,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        ),
        peft_config=LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[watch],
    )
    trainer.train()
    trainer.save_model()
    return {**watch.told(), "adapter": settings["output"]}


if __name__ == "__main__":
    stopwatch.say(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
