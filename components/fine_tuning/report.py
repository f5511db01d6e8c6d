"""The page that shows how a training went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.common import report
from components.common.artifacts import Input
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.training import Trained


def page(trained: Trained, summary: dict[str, Any], inputs: Sequence[Input], config: FineTuningConfig) -> str:
    """Figures, the curves, the recipe and where it all came from."""
    rows = summary["rows"]
    figures = {
        "steps": trained.steps,
        "tokens trained on": trained.tokens,
        "tokens a second": round(trained.tokens_per_second, 1),
        "last training loss": trained.train_loss,
        "last validation loss": trained.validation_loss,
        "parameters trained": summary["parameters"]["trainable"],
    }
    told = f"Learned from {summary['learned']} of {rows['train']:,} training rows"
    told += f", of which {rows['truncated']:,} were cut at {config.max_length} tokens"
    told += f"; {rows['without_answer']:,} more had no answer within that length and were left out."
    sections = {
        "At a glance": report.tiles(figures) + report.paragraph(told),
        "Loss": _plot(trained, ("train_loss", "validation_loss"), "loss, nats a token", "Cross-entropy on the assistant's tokens."),
        "Learning rate": _plot(trained, ("learning_rate",), "learning rate", f"Schedule: {config.schedule}."),
        "Recipe": report.table(["setting", "value"], [[k, str(v)] for k, v in config.model_dump().items()]),
        "Made from": report.table(["kind", "digest", "where"], [[i.kind, i.content_sha256, i.uri] for i in inputs]),
    }
    return report.page("Fine-tuning", f"{config.objective} × {config.adaptation} on {config.base_model}", sections)


def _plot(trained: Trained, names: Sequence[str], y: str, caption: str) -> str:
    series = {}
    for name in names:
        points = [(entry["step"], entry[name]) for entry in trained.log if name in entry]
        if points:
            series[name.replace("_", " ")] = ([x for x, _ in points], [v for _, v in points])
    return report.line_plot(series, x="optimizer step", y=y, caption=caption) if series else ""
