"""A short real training run of every objective × adaptation on the embedded model, which checks that each recipe learns.

    python -P -m benchmarks.recipes --sft ROWS --text ROWS --dpo ROWS --kto ROWS --markdown docs/reference/recipes.md

tuneline's commands curate each file and train each recipe. The table compares the validation loss before the first step with that of the
best checkpoint and, for preferences, the margin between chosen and rejected answers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.common.models.adaptations import ADAPTATIONS
from components.common.runtime import cpu_cores, process_control

# bitsandbytes has no 4-bit kernels for the CPU.
CPU_ADAPTATIONS = [name for name, entry in ADAPTATIONS.items() if not entry.holds_4bit_weights]
# Full weights and preferences need lower learning rates than the default; virtual tokens and IA3 (3e-3 in Liu et al.,
# arXiv 2205.05638) need higher ones.
RATES = {"lora": 5e-4, "full": 3e-5, "p_tuning": 3e-3, "prompt_tuning": 5e-2, "ia3": 3e-3}
PREFERENCE_RATES = {"lora": 1e-4, "full": 5e-6, "p_tuning": 1e-3, "prompt_tuning": 1e-2, "ia3": 1e-3}
SHARED = {
    "max_steps": 8,
    "checkpoint_every": 8,
    "max_length": 96,
    "batch_size": 8,
    "micro_batch_size": 2,
    "validation_rows": 32,
}
# With the default fractions 300 rows leave six to nine for validation, and of eight steps four warm up: too little to tell recipes apart.
PREFERENCE = {"max_steps": 16, "checkpoint_every": 16, "batch_size": 4}
# Sixteen steps of four rows at 3e-4, 1e-3 and 3e-3 raised this one's loss; eight rows a step lower it.
OTHERWISE: dict[tuple[str, str], dict[str, Any]] = {("kto", "p_tuning"): {"learning_rate": 3e-3, "batch_size": 8}}
FRACTIONS = "{train: 0.6, validation: 0.3, test: 0.1}"
MARGIN = "validation_reward_margin"
LOSSES = ("validation loss before", "best", "at step", "reward margin, first and last")
HEAD = ("objective", "adaptation", "learning rate", "rows per step", *LOSSES, "tokens", "peak memory, GB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipes and write the page."""
    options = _options().parse_args(arguments)
    files = {name: getattr(options, name) for name in ("sft", "text", "dpo", "kto") if getattr(options, name)}
    rows = []
    for objective, file in files.items():
        dataset = _curated(file, options.workdir / f"dataset-{objective}", objective)
        for adaptation in CPU_ADAPTATIONS:
            rows.append(_trained(objective, adaptation, dataset, options.workdir))
            print(json.dumps(rows[-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(
            page(rows, {name: Path(file).name for name, file in files.items()}), encoding="utf-8"
        )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, what in (
        ("sft", "conversations"),
        ("text", "plain texts"),
        ("dpo", "preference pairs"),
        ("kto", "labelled answers"),
    ):
        parser.add_argument(f"--{name}", help=f"File of {what}.")
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/recipes"))
    parser.add_argument("--markdown", type=Path)
    return parser


def _tuneline(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        process_control.build_module_command("pipelines.cli", *command, "--json"),
        env=process_control.build_python_environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _curated(file: str, folder: Path, objective: str) -> Path:
    if not (folder / "manifest.json").exists():
        settings = ("--set", "data_curation.tokens.max_length=96", "--set", f"data_curation.fractions={FRACTIONS}")
        _tuneline("curate", file, "-o", str(folder), "--workdir", str(folder.parent), *settings)
    return folder


def _trained(objective: str, adaptation: str, dataset: Path, workdir: Path) -> dict[str, Any]:
    preference = objective in ("dpo", "kto")
    rates = PREFERENCE_RATES if preference else RATES
    settings = {**SHARED, **(PREFERENCE if preference else {}), "objective": objective, "adaptation": adaptation}
    settings |= {"learning_rate": rates[adaptation], **OTHERWISE.get((objective, adaptation), {})}
    sets = [word for name, value in settings.items() for word in ("--set", f"fine_tuning.{name}={value}")]
    output = workdir / f"{objective}-{adaptation}"
    _tuneline("finetune", str(dataset), "-o", str(output), "--workdir", str(workdir), "--overwrite", *sets)
    summary = json.loads((output / "manifest.json").read_text(encoding="utf-8"))["summary"]
    log = [json.loads(line) for line in (output / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    margins = [line[MARGIN] for line in log if MARGIN in line]
    names = ("validation_loss_before", "validation_loss", "best_step", "tokens", "peak_memory")
    told = {name: summary[name] for name in names}
    return {
        "objective": objective,
        "adaptation": adaptation,
        "learning_rate": settings["learning_rate"],
        "batch_size": settings["batch_size"],
        **told,
        "margins": [*margins[:1], *margins[-1:]],
    }


def page(rows: Sequence[dict[str, Any]], files: dict[str, str]) -> str:
    """Return the page in Markdown."""
    learned = sum(row["validation_loss"] < row["validation_loss_before"] for row in rows)
    head = [
        "# Recipes in short runs",
        "",
        f"Measured with `python -P -m benchmarks.recipes {' '.join(f'--{name} {file}' for name, file in files.items())} --markdown docs/reference/recipes.md`",
        f"on {datetime.date.today().isoformat()}, {_machine()}. Each recipe trains the embedded SmolLM2-135M-Instruct in float32 for "
        f"{SHARED['max_steps']} steps ({PREFERENCE['max_steps']} for preferences) on rows of at most {SHARED['max_length']} tokens, "
        f"and validates on the first {SHARED['validation_rows']} validation rows.",
        "",
        f"{learned} of {len(rows)} recipes lowered the validation loss. The runs show that a recipe learns, but not how well. Learning rates and "
        "steps were not tuned, except for kto × p_tuning, whose loss increased with four rows per step.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *map(_line, rows), "", *_notes(), ""])


def _line(row: dict[str, Any]) -> str:
    margins = " → ".join(f"{margin:+.3f}" for margin in row["margins"]) or "–"
    figures = [
        f"{row['validation_loss_before']:.4f}",
        f"{row['validation_loss']:.4f}",
        row["best_step"],
        margins,
        f"{row['tokens']:,}",
    ]
    told = [
        row["objective"],
        row["adaptation"],
        f"{row['learning_rate']:g}",
        row["batch_size"],
        *figures,
        f"{row['peak_memory'] / 1e9:.1f}",
    ]
    return f"| {' | '.join(map(str, told))} |"


def _notes() -> list[str]:
    return [
        "The loss is the cross-entropy per token for sft and text, and the objective's own loss for dpo and kto. Losses of dpo and kto start at 0.693 and",
        "0.5 if the model equals its reference. With p_tuning and prompt_tuning, the initial losses differ, because untrained virtual tokens change the model.",
        "The reward margin is positive if the tuned model prefers chosen to rejected answers more strongly than its base model does.",
    ]


def _machine() -> str:
    return f"{cpu_cores.get_thread_count()} {'core' if cpu_cores.get_thread_count() == 1 else 'cores'} of {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
