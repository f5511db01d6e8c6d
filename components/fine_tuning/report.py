"""The page that shows how a training went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.common import report
from components.common.artifacts import Input
from components.fine_tuning.config import FineTuningConfig

Log = Sequence[dict[str, Any]]
DRAWN = 10  # recipes of a sweep in one plot: there are no more colours that can be told apart


@dataclass(frozen=True)
class Compared:
    """A recipe of a sweep: what sets it apart, what came of it as the manifest's summary has it, and its log."""

    name: str
    told: dict[str, Any]
    log: Log


def page(log: Log, summary: dict[str, Any], inputs: Sequence[Input], config: FineTuningConfig, sweep: Sequence[Compared] = ()) -> str:
    """Figures, the curves, what was decided and why, the recipe and where it all came from; `sweep`: the recipes it is the best of, in
    their order."""
    sections = {
        "At a glance": report.tiles(_figures(summary)) + report.paragraph(_told(summary, config)),
        "Sweep": _sweep(sweep) if sweep else "",
        "Loss": _plot(log, ("train_loss", "validation_loss"), "loss", f"{summary['loss'][0].upper()}{summary['loss'][1:]}."),
        "Preference": _plot(
            log,
            ("reward_margin", "validation_reward_margin"),
            "reward margin",
            "How much more the chosen answers are preferred than at the start.",
        ),
        "Gradient": _plot(log, ("gradient_norm",), "norm", f"Before it is scaled down to {config.max_grad_norm:g}."),
        "Learning rate": _plot(log, ("learning_rate",), "learning rate", f"Schedule: {config.schedule}."),
        "Speed": _plot(log, ("tokens_per_second",), "tokens a second", "Without padding; validations and checkpoints are not counted.")
        + report.table(["figure", "value"], _speed(summary)),
        "How it was computed": "".join(report.paragraph(reason) for reason in summary["choices"]),
        "Recipe": report.table(["setting", "value"], [[k, str(v)] for k, v in config.model_dump().items()]),
        "Made from": report.table(["kind", "digest", "where"], [[i.kind, i.content_sha256, i.uri] for i in inputs]),
    }
    return report.page("Fine-tuning", f"{config.objective} × {config.adaptation} on {config.base_model}", sections)


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps": summary["steps"],
        "tokens trained on": summary["tokens"],
        "tokens a second": round(summary["tokens_per_second"], 1),
        "last training loss": summary["train_loss"],
        "validation loss before": summary["validation_loss_before"],
        "validation loss": summary["validation_loss"],
        "parameters trained": summary["parameters"]["trainable"],
    }


def _told(summary: dict[str, Any], config: FineTuningConfig) -> str:
    rows = summary["rows"]
    told = f"Learned from {summary['learned']} of {rows['train']:,} training rows"
    told += f", of which {rows['truncated']:,} were cut at {config.max_length} tokens"
    told += f"; {rows['without_answer']:,} more had nothing to learn within that length and were left out."
    if config.packing:
        told += f" They were packed into {summary['examples']:,} rows of {config.max_length} tokens."
    if summary["best_step"] and summary["best_step"] != summary["steps"]:
        told += f" The weights are those of step {summary['best_step']:,}, where the validation loss was lowest."
    return told + (" It stopped early: the validation loss fell no further." if summary["stopped_early"] else "")


def _sweep(sweep: Sequence[Compared]) -> str:
    """The recipes by their validation loss, and how it fell."""
    head = [*sweep[0].told["recipe"], "validation loss", "at step", "training loss", "steps", "tokens a second", "what came of it"]
    names = ("validation_loss", "best_step", "train_loss", "steps", "tokens_per_second")
    rows = [
        [*map(_setting, one.told["recipe"].values()), *(one.told[name] for name in names), _came_of(one, chosen=place == 0)]
        for place, one in enumerate(sweep)
    ]
    drawn = {one.name: points for one in sweep if (points := _points(one.log, "validation_loss"))}
    caption = "Validation loss of each recipe." if len(drawn) <= DRAWN else f"Validation loss of the {DRAWN} best recipes."
    best = dict(list(drawn.items())[:DRAWN])
    return report.table(head, rows) + report.line_plot(best, x="optimizer step", y="validation loss", caption=caption)


def _setting(value: Any) -> str:
    """As the configuration has it: 0.00012345 and not 0.0001234."""
    return str(value)


def _came_of(recipe: Compared, *, chosen: bool) -> str:
    if recipe.told["failed"]:
        return f"failed: {recipe.told['failed']}"
    return "this model" if chosen else "trained"


def _speed(summary: dict[str, Any]) -> list[list[Any]]:
    flops, mfu = summary["flops_per_second"], summary["mfu"]
    return [
        ["tokens a second within steps", summary["step_tokens_per_second"]],
        ["model TFLOP/s", flops / 1e12 if flops else None],
        ["of the device's published peak (MFU)", f"{mfu:.1%}" if mfu else "no published peak"],
        ["most memory at once, GB", summary["peak_memory"] / 1e9],
        ["waited for data", f"{summary['waited_share']:.1%}"],
        ["processes", summary["processes"]],
        *([f"start: {name}, s", seconds] for name, seconds in summary["startup"].items()),
    ]


def _plot(log: Log, names: Sequence[str], y: str, caption: str) -> str:
    series = {}
    for name in names:
        if points := _points(log, name):
            series[name.replace("_", " ")] = points
    return report.line_plot(series, x="optimizer step", y=y, caption=caption) if series else ""


def _points(log: Log, name: str) -> tuple[list[float], list[float]] | None:
    """The steps at which a figure was logged, and its values; None where it never was."""
    points = [(entry["step"], entry[name]) for entry in log if name in entry]
    return ([x for x, _ in points], [v for _, v in points]) if points else None
