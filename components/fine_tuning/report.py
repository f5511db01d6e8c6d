"""HTML report of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.reporting import html_report
from components.common.reporting.mlflow_tracking import flatten
from components.common.runtime.counts import format_count
from components.fine_tuning import sample_answers
from components.fine_tuning.config import Recipe

Log = Sequence[dict[str, Any]]
MAX_PLOTTED_RECIPES = 10  # recipes of a sweep in one plot; more colours are hard to distinguish


@dataclass(frozen=True)
class SweepEntry:
    """A recipe of a sweep: its name, its entry in the manifest's summary, and its log."""

    name: str
    result: dict[str, Any]
    log: Log


def render_report(
    log: Log,
    summary: dict[str, Any],
    inputs: Sequence[ArtifactInput],
    config: Recipe,
    sweep: Sequence[SweepEntry] = (),
    samples: Log = (),
) -> str:
    """Return the HTML page: metrics, curves, compute settings with reasons, recipe and inputs.

    Args:
        log: Lines of the training's log.
        summary: Summary of the training for the model's manifest.
        inputs: Inputs in the model's manifest.
        config: The recipe.
        sweep: All recipes of the sweep, sorted by validation loss; empty without a sweep.
        samples: Answers to the recipe's sample_prompts.
    """
    loss = summary["loss"]
    settings = [[name, str(value)] for name, value in flatten(config.model_dump()).items()]
    sections = {
        "Summary": html_report.render_tiles(_list_metrics(summary, config))
        + html_report.render_paragraph(" ".join(_describe_training(summary, config))),
        "Sources": _render_sources(summary["sources"]) if summary["sources"] else "",
        "Sweep": _render_sweep(sweep) if sweep else "",
        "Loss": _plot(log, ("train_loss", "validation_loss"), "loss", f"{loss[0].upper()}{loss[1:]}."),
        "Reward": _render_rewards(log) if config.objective_spec.has_rewards else "",
        "Preference": _plot(
            log,
            ("reward_margin", "validation_reward_margin"),
            "reward margin",
            "Preference for chosen over rejected answers"
            + (", relative to the reference model." if config.objective_spec.has_reference else "."),
        ),
        "Sample answers": html_report.render_table(*sample_answers.tabulate_answers(samples)) if samples else "",
        "Gradient": _plot(
            log, ("gradient_norm",), "norm", f"Gradient norm before clipping to {config.max_grad_norm:g}."
        ),
        "Learning rate": _plot(log, ("learning_rate",), "learning rate", f"Schedule: {config.schedule}."),
        "Speed": _plot(
            log,
            ("tokens_per_second",),
            "tokens per second",
            "Excludes padding tokens and the time for validation and checkpoints.",
        )
        + html_report.render_table(["metric", "value"], [list(item) for item in _list_speed(summary).items()]),
        "Compute settings": "".join(html_report.render_paragraph(reason) for reason in summary["choices"]),
        "Recipe": html_report.render_table(["setting", "value"], settings),
        "Inputs": html_report.render_table(
            ["kind", "digest", "location"], [[i.kind, i.content_sha256, i.uri] for i in inputs]
        ),
    }
    return html_report.render_page(
        "Fine-tuning", f"{config.objective} × {config.adaptation} on {config.base_model}", sections
    )


def _count_draws(summary: dict[str, Any], config: Recipe) -> int:
    """Return the number of examples drawn from all sources; 0 without mixing."""
    return sum(share["seen"] for share in summary["sources"]) if config.mixing.is_active else 0


def _list_metrics(summary: dict[str, Any], config: Recipe) -> dict[str, Any]:
    """Return the tiles of the summary."""
    draws = _count_draws(summary, config)
    return {
        "steps": summary["steps"],
        **({"examples drawn": draws} if draws else {"rows seen": summary["rows_seen"]}),
        "tokens trained on": summary["tokens"],
        "tokens per second": round(summary["tokens_per_second"], 1),
        "last training loss": summary["train_loss"],
        **_list_validation_metrics(summary, has_rewards=config.objective_spec.has_rewards),
        "trained parameters": summary["parameters"]["trainable"],
    }


def _list_speed(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the table of speed, memory and startup times."""
    flops, mfu = summary["flops_per_second"], summary["mfu"]
    return {
        "tokens per second, excluding the time between steps": summary["step_tokens_per_second"],
        "model TFLOP/s": flops / 1e12 if flops else None,
        "share of the device's published peak (MFU)": f"{mfu:.1%}" if mfu else "no published peak",
        "peak memory, GB": summary["peak_memory"] / 1e9,
        "share of time waiting for data": f"{summary['waited_share']:.1%}",
        "processes": summary["processes"],
        **{f"startup: {phase}, s": seconds for phase, seconds in summary["startup"].items()},
    }


def _describe_training(summary: dict[str, Any], config: Recipe) -> list[str]:
    """Return the sentences of the summary."""
    rows = summary["rows"]
    seen = f"{min(summary['rows_seen'], rows['train']):,} of {rows['train']:,} training rows"
    if draws := _count_draws(summary, config):
        distinct = sum(share["examples"] - share["left_out"] for share in summary["sources"])
        seen = f"{distinct:,} of {summary['examples']:,} examples in {draws:,} draws"
    epochs = f"{summary['epochs']:.2f}".removesuffix(".00")
    sentences = [
        f"Trained for {epochs} {'epoch' if epochs == '1' else 'epochs'} on {seen}. Training used {summary['learned']}."
    ]
    sentences += _describe_changed_rows(rows, config)
    if config.packing:
        sentences.append(
            f"The rows were packed into {format_count(summary['examples'], 'sequence')} of up to "
            f"{config.max_length} tokens."
        )
    if summary["best_step"] and summary["best_step"] != summary["steps"]:
        sentences.append(f"The weights are from step {summary['best_step']:,}, which has the lowest validation loss.")
    sentences += _describe_alarms(summary["alarms"], config.grpo.on_alarm)
    sentences += [
        f"The judge {judge['model']} made {format_count(judge['judgements'], 'judgement')} and used "
        f"{format_count(judge['tokens'], 'token')}; "
        f"{format_count(judge['unscored'], 'answer')} without a score got a reward of 0."
        for judge in summary.get("judges", ())
    ]
    if summary["stopped_early"]:
        sentences.append("Training stopped early: the validation loss no longer decreased.")
    return sentences


def _describe_changed_rows(rows: dict[str, Any], config: Recipe) -> list[str]:
    """Return sentences about truncated, skipped and omitted rows."""
    sentences = []
    if config.objective_spec.generates:
        if rows["without_answer"]:
            left_out = format_count(rows["without_answer"], "other row was", "other rows were")
            sentences.append(
                f"{left_out} left out, because the prompt exceeds {config.max_length} tokens or the conversation does not "
                "end with a text answer."
            )
        return sentences
    if rows["truncated"]:
        truncated = format_count(rows["truncated"], "row was", "rows were")
        removed = f"{format_count(rows['cut_tokens'], 'token')} ({rows['cut_share']:.1%} of all)"
        sentences.append(f"{truncated} truncated to {config.max_length} tokens, which removed {removed}.")
    if rows["without_answer"]:
        skipped = format_count(rows["without_answer"], "row was", "rows were")
        sentences.append(f"{skipped} skipped, because the first {config.max_length} tokens contain no token to learn.")
    return sentences


def _describe_alarms(alarms: Sequence[dict[str, Any]], on_alarm: str) -> list[str]:
    """Return a sentence for each alarm of a guard, with the reaction that `grpo.on_alarm` sets."""
    sentences = []
    previous_factor = 1.0
    for alarm in alarms:
        reaction = "A guard raised an alarm"
        if on_alarm == "stop":
            reaction = "A guard stopped the training"
        elif on_alarm == "lower_learning_rate":
            factor = alarm["learning_rate_factor"]
            reaction = f"At step {alarm['step']:,}, a guard lowered the learning rate to {factor:.3g} times its scheduled value"
            if factor == previous_factor:
                reaction = (
                    f"At step {alarm['step']:,}, with the learning rate at its lower limit, a guard raised an alarm"
                )
            previous_factor = factor
        sentences.append(f"{reaction}: {alarm['sentence']}.")
    return sentences


def _render_sources(sources: Sequence[dict[str, Any]]) -> str:
    """Render a table of the examples and tokens that the training drew from each source, the largest share first."""
    rows = [
        [
            share["source"],
            share["examples"],
            share["seen"],
            round(share["repetitions"], 2),
            share["left_out"],
            share["tokens"],
            round(100 * share["token_share"], 1),
        ]
        for share in sorted(sources, key=lambda share: -share["tokens"])
    ]
    head = ["source", "examples", "examples seen", "repetitions", "left out", "tokens seen", "share of tokens, %"]
    return html_report.render_table(head, rows)


def _render_sweep(sweep: Sequence[SweepEntry]) -> str:
    """Render a table of the recipes and a plot of their validation losses."""
    metrics = {
        "validation loss": "validation_loss",
        "best step": "best_step",
        "last training loss": "train_loss",
        "steps": "steps",
        "tokens per second": "tokens_per_second",
    }
    rows = [
        [
            *map(str, entry.result["recipe"].values()),  # as configured: 0.00012345 and not 0.0001234
            *(entry.result[key] for key in metrics.values()),
            f"failed: {entry.result['failed']}" if entry.result["failed"] else "trained" if position else "published",
        ]
        for position, entry in enumerate(sweep)
    ]
    curves = {entry.name: points for entry in sweep if (points := _list_points(entry.log, "validation_loss"))}
    plotted = dict(islice(curves.items(), MAX_PLOTTED_RECIPES))
    chosen = f"the {MAX_PLOTTED_RECIPES} best recipes" if len(plotted) < len(curves) else "each recipe"
    caption = f"Validation loss of {chosen}."
    return html_report.render_table([*sweep[0].result["recipe"], *metrics, "outcome"], rows) + html_report.plot_lines(
        plotted, x="optimizer step", y="validation loss", caption=caption
    )


def _list_validation_metrics(summary: dict[str, Any], *, has_rewards: bool) -> dict[str, float | None]:
    """Return the validation losses before and after training; with rewards, return the mean rewards (1 − loss)."""
    losses: list[float | None] = [summary["validation_loss_before"], summary["validation_loss"]]
    if has_rewards:
        losses = [None if loss is None else 1 - loss for loss in losses]
    measure = "reward" if has_rewards else "loss"
    return dict(zip((f"validation {measure} before training", f"validation {measure}"), losses, strict=True))


def _render_rewards(log: Log) -> str:
    """Render plots of the rewards, answer lengths, truncated answers, equal rewards, KL divergence and entropy."""
    by_reward = [name for name in dict.fromkeys(key for line in log for key in line) if name.startswith("reward_")]
    plots = [
        (
            ("reward", "validation_reward"),
            "reward",
            "Mean reward of sampled answers in training, and of greedy answers in validation.",
        ),
        (by_reward, "reward", "Mean of each reward in training, before weighting."),
        (("answer_tokens", "validation_answer_tokens"), "tokens", "Mean length of the answers."),
        (
            ("truncated_answers", "equal_reward_groups"),
            "share",
            "Share of truncated answers, and share of prompts whose answers all have the same reward.",
        ),
        (
            ("kl", "entropy"),
            "nats per token",
            "KL divergence from the model before training, and entropy of the answers.",
        ),
    ]
    return "".join(_plot(log, names, y, caption) for names, y, caption in plots)


def _plot(log: Log, names: Sequence[str], y: str, caption: str) -> str:
    series = {name.replace("_", " "): points for name in names if (points := _list_points(log, name))}
    return html_report.plot_lines(series, x="optimizer step", y=y, caption=caption) if series else ""


def _list_points(log: Log, name: str) -> tuple[list[float], list[float]] | None:
    """Return the steps at which a metric was logged, and the metric's values; None for a metric that was not logged."""
    points = [(entry["step"], entry[name]) for entry in log if name in entry]
    return ([step for step, _ in points], [value for _, value in points]) if points else None
