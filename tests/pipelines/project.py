"""A small project folder with a tiny model, and a whole run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.pipelines.command import ROOT, answer
from tests.tiny import tiny_model

THINGS = [
    "file",
    "folder",
    "socket",
    "thread",
    "process",
    "queue",
    "lock",
    "stream",
    "buffer",
    "module",
    "package",
    "object",
    "signal",
]
VERBS = [
    "opens",
    "closes",
    "copies",
    "moves",
    "reads",
    "writes",
    "waits for",
    "starts",
    "stops",
    "lists",
    "checks",
    "names",
]


def write_rows(path: Path, changed: int | None = None) -> None:
    """Write 156 different questions with answers; the row `changed` gets another answer."""
    rows = []
    for i, (thing, verb) in enumerate((t, v) for t in THINGS for v in VERBS):
        answer_text = f"It {verb} the {thing}, number {i * 37 % 101}, and returns the {thing} that it {verb}."
        rows.append({"instruction": f"What {verb} a {thing} in case {i}?", "input": "", "output": answer_text})
    if changed is not None:
        rows[changed]["output"] = "Quite another answer stands here now."
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_project(folder: Path) -> Path:
    """Write raw data, a tiny model, a configuration, and packages that must not be imported."""
    write_rows(folder / "raw.jsonl")
    tiny_model(folder / "tiny")
    (folder / "customization.yaml").write_text(CONFIGURATION)
    for name in ("components", "pipelines", "mlflow", "data"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported from the working directory')\n")
    return folder


CONFIGURATION = """
seed: 11
data_curation:
  sources: [raw.jsonl]
  near_duplicate_threshold: 0.95
  answer_min_words: 1000
  fractions: {train: 0.6, validation: 0.1, test: 0.3}
fine_tuning:
  {base_model: tiny, max_steps: 30, batch_size: 4, micro_batch_size: 2, learning_rate: 2.0e-3, warmup_steps: 4, max_length: 128,
   checkpoint_every: 5, validation_rows: 4}
evaluation: {generations: 1, generation_tokens: 4, bootstrap_samples: 1000}
triton_packaging: {golden_max_tokens: 4}
model_registry: {name: tiny-helper, auto_promote: true}
"""


def run(
    project: Path, workdir: str, *arguments: str, code: Path = ROOT, preloaded: bool = True, **extra: str
) -> dict[str, Any]:
    """Run the customization and return its JSON result."""
    command = ("run", "-c", "customization.yaml", "--workdir", workdir, *arguments)
    return answer(*command, cwd=project, code=code, preloaded=preloaded, **extra)
