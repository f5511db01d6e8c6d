"""tuneline's fine-tuning stage, on a dataset artifact with the same rows.

python -m benchmarks.peers.run_tuneline_finetune SETTINGS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import stopwatch
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.reporters import SilentReporter


class Watching(SilentReporter):
    """Adds the stopwatch to every trainer once the stage imports transformers."""

    watch: Any = None

    def step(self, name: str) -> None:
        if self.watch is None and name == "loading the base model":
            from transformers import trainer

            self.watch = stopwatch.stopwatch()
            trainer.DEFAULT_CALLBACKS.append(self.watch)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, publish the model in settings["output"], and return the figures."""
    from components.fine_tuning import stage
    from components.fine_tuning.config import Recipe

    output, reporter = Path(settings["output"]), Watching()
    data = dataset(json.loads(Path(settings["rows"]).read_text(encoding="utf-8")), output.parent / "dataset")
    config = Recipe.model_validate(recipe(settings))
    model = stage.finetune(
        data, output, config, seed=settings["seed"], state=output.parent / "state", reporter=reporter
    )
    summary = model.manifest.summary
    return {
        **reporter.watch.told(),
        "adapter": str(output),
        "parts": summary["startup"],
        "choices": summary["choices"],
    }


def recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the stage's defaults."""
    recompute = (
        {} if settings["recompute"] is None else {"activation_checkpointing": "on" if settings["recompute"] else "off"}
    )
    return {
        "lora": {"rank": settings["rank"], "alpha": settings["alpha"], "dropout": 0.0},
        "max_steps": None,
        "epochs": 1.0,
        "learning_rate": settings["learning_rate"],
        "schedule": "constant_with_warmup",
        "warmup_steps": 0,
        "batch_size": settings["batch_size"],
        "micro_batch_size": settings["micro_batch_size"],
        "max_length": settings["max_length"],
        "packing": settings["packing"],
        "validation_rows": 0,
        "device": "cpu",
        **recompute,
    }


def dataset(rows: list[dict[str, Any]], folder: Path) -> Artifact:
    """Publish the rows as a dataset, as the curation stage does."""
    import pyarrow as pa
    from pyarrow import parquet

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    text = ("id", "tools", "source", "meta")
    schema = pa.schema([("messages", pa.list_(message)), *((name, pa.string()) for name in text)])
    whole = [{"tools": None, "source": "benchmark", "meta": "{}", **row} for row in rows]
    artifact_folder.claim_folder(folder, "benchmark")
    for split, some in (("train", whole), ("validation", []), ("test", [])):
        parquet.write_table(pa.Table.from_pylist(some, schema), folder / f"{split}.parquet", compression="zstd")
    source = ArtifactInput(kind="file", content_sha256="0" * 64, uri="benchmark")
    payload = [f"{split}.parquet" for split in ("train", "validation", "test")]
    summary = {"rows_kind": "sft", "splits": {"train": len(rows), "validation": 0, "test": 0}}
    return artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=[source], config={}, seed=0, key="benchmark", summary=summary
    )


if __name__ == "__main__":
    stopwatch.say(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
