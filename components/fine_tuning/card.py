"""The model card: what a tuned model was made of, how, how well, and under whose licences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.common import licences, models
from components.common.artifacts import Artifact, Input
from components.common.models import Base
from components.fine_tuning.config import FineTuningConfig

NAME = "README.md"
UNSTATED = "not stated"
KNOWN = {models.EMBEDDED: models.EMBEDDED_LICENCE}
OF_SOURCES = {"demo:": "PSF-2.0"}


def text(config: FineTuningConfig, summary: dict[str, Any], dataset: Artifact, base: Base, inputs: Sequence[Input], seed: int) -> str:
    """The card in Markdown, with the front matter that model hubs read."""
    licences = {"base": licence_of_base(config, base), "data": licence_of_data(config, dataset)}
    return (
        "\n\n".join(
            [
                _front(config, licences["base"]),
                f"# {config.objective} × {config.adaptation} on {base.name}",
                _table("What it is", _recipe(config, summary, seed)),
                _table("How well it learned", _losses(summary)),
                _table(
                    "What it was made from", [*((one.kind, f"`{one.content_sha256}` {_public(one)}") for one in inputs), *_rows(summary)]
                ),
                _table("Licences", [("base model", licences["base"]), ("training data", licences["data"])]),
                "Whoever passes this model on is bound by both. Whether its answers are true was not checked here: see its evaluation.",
            ]
        )
        + "\n"
    )


def licence_of_base(config: FineTuningConfig, base: Base) -> str:
    """As the recipe says, as is known of the embedded model, or as the model's own card says."""
    return config.card.base_licence or KNOWN.get(base.origin or base.uri) or licences.of_folder(base.path).id or UNSTATED


def licence_of_data(config: FineTuningConfig, dataset: Artifact) -> str:
    """As the recipe says, or as is known of the demo's sources."""
    if config.card.data_licence:
        return config.card.data_licence
    uris = [one.uri for one in dataset.manifest.inputs]
    known = {licence for uri in uris for start, licence in OF_SOURCES.items() if uri.startswith(start)}
    return known.pop() if uris and len(known) == 1 and all(uri.startswith(tuple(OF_SOURCES)) for uri in uris) else UNSTATED


def _front(config: FineTuningConfig, licence: str) -> str:
    lines = ["library_name: " + ("transformers" if config.merge or config.adaptation == "full" else "peft")]
    lines += [f"license: {licence.lower()}"] if licence != UNSTATED else []
    return "\n".join(["---", *lines, "pipeline_tag: text-generation", "tags: [tuneline]", "---"])


def _recipe(config: FineTuningConfig, summary: dict[str, Any], seed: int) -> list[tuple[str, Any]]:
    parameters = summary["parameters"]
    return [
        ("objective", config.objective),
        ("adaptation", config.adaptation + (", merged" if config.merge else "")),
        ("parameters trained", f"{parameters['trainable']:,} of {parameters['all']:,}"),
        ("optimizer steps", f"{summary['steps']:,}, the weights of step {summary['best_step'] or summary['steps']:,}"),
        ("rows a step", f"{config.step_rows}{' packed rows of ' + str(config.max_length) + ' tokens' if config.packing else ''}"),
        ("learning rate", f"{config.learning_rate:g}, {config.schedule}, {config.warmup_steps} steps of warm-up"),
        ("tokens a row", f"at most {config.max_length}"),
        ("seed", seed),
    ]


def _losses(summary: dict[str, Any]) -> list[tuple[str, Any]]:
    before, after = summary["validation_loss_before"], summary["validation_loss"]
    told: list[tuple[str, Any]] = [("training loss, last step", f"{summary['train_loss']:.4f}")]
    told += [("validation loss before", f"{before:.4f}")] if before is not None else []
    return [*told, *([("validation loss", f"{after:.4f}")] if after is not None else []), ("what the loss is", summary["loss"])]


def _rows(summary: dict[str, Any]) -> list[tuple[str, Any]]:
    rows = summary["rows"]
    cut = f"{rows['truncated']:,} of them cut, {rows['without_answer']:,} more left out"
    return [("training rows", f"{rows['train']:,}, {cut}"), ("tokens", f"{summary['tokens']:,}")]


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(
        [f"## {title}\n", "| | |", "|---|---|", *(f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows)]
    )


def _public(one: Input) -> str:
    """Where an input came from, without the folders of the machine it lay on."""
    return one.uri if re.match(r"[a-z0-9]+:", one.uri) else Path(one.uri).name
