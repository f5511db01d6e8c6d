"""Model card: base model, data, recipe, losses and licences of a tuned model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.models import licences, model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime.counts import format_count
from components.fine_tuning.config import FineTuningConfig, Recipe

CARD_FILENAME = "README.md"
UNSTATED = "not stated"
BASE_LICENCES = {model_loading.EMBEDDED_SOURCE: model_loading.EMBEDDED_LICENCE}
SOURCE_LICENCES = {"demo:": "PSF-2.0"}  # by URI prefix


def render_card(
    config: Recipe,
    summary: dict[str, Any],
    dataset: Artifact,
    base: LocalBaseModel,
    inputs: Sequence[ArtifactInput],
    seed: int,
) -> str:
    """Return the card in Markdown, with the front matter that model hubs read.

    Args:
        config: The recipe.
        summary: Summary of the training for the model's manifest.
        dataset: The dataset artifact.
        base: The base model.
        inputs: Inputs in the model's manifest.
        seed: Seed of the training.
    """
    base_licence = find_base_licence(config, base)
    data_licence = find_data_licence(config.card.data_licence, dataset.manifest.inputs)
    library = "transformers" if config.merge or config.adaptation_spec.trains_all_weights else "peft"
    task = "text-classification" if config.objective_spec.scores_answers else "text-generation"
    licence_lines = [f"license: {base_licence.lower()}"] if base_licence != UNSTATED else []
    front_matter = [f"library_name: {library}", *licence_lines, f"pipeline_tag: {task}", "tags: [tuneline]"]
    rows, parameters = summary["rows"], summary["parameters"]
    packed = f" packed rows of {config.max_length} tokens" if config.packing else ""
    # Local paths are reduced to the file name.
    uris = [item.uri if re.match(r"[a-z0-9]+:", item.uri) else Path(item.uri).name for item in inputs]
    epochs = f"{summary['epochs']:.2f} epochs"
    seen = ("rows seen", f"{summary['rows_seen']:,}, {epochs}")
    if config.mixing.is_active:
        draws = sum(share["seen"] for share in summary["sources"])
        distinct = sum(share["examples"] - share["left_out"] for share in summary["sources"])
        seen = ("examples seen", f"{distinct:,} of {summary['examples']:,} examples in {draws:,} draws, {epochs}")
    losses = {"training loss, last step": summary["train_loss"]}
    for key in ("validation_loss_before", "validation_loss"):
        if summary[key] is not None:
            losses[key.replace("_", " ")] = summary[key]
    tables: dict[str, list[tuple[str, object]]] = {
        "Recipe": [
            ("objective", config.objective),
            ("adaptation", config.adaptation + (", merged" if config.merge else "")),
            ("trained parameters", f"{parameters['trainable']:,} of {parameters['all']:,}"),
            (
                "optimizer steps",
                f"{summary['steps']:,}, weights from step {summary['best_step'] or summary['steps']:,}",
            ),
            ("rows per step", f"{config.rows_per_step}{packed}"),
            (
                "learning rate",
                f"{config.learning_rate:g}, {config.schedule}, {format_count(summary['warmup_steps'], 'warm-up step')}",
            ),
            ("tokens per row", f"at most {config.max_length}"),
            ("seed", seed),
        ],
        "Losses": [*((name, f"{loss:.4f}") for name, loss in losses.items()), ("loss function", summary["loss"])],
        "Inputs": [
            *((item.kind, f"`{item.content_sha256}` {uri}") for item, uri in zip(inputs, uris, strict=True)),
            (
                "training rows",
                f"{rows['train']:,}; truncated rows: {rows['truncated']:,}, by a total of "
                f"{format_count(rows['cut_tokens'], 'token')} ({rows['cut_share']:.1%} of all tokens); omitted rows: "
                f"{rows['without_answer']:,}",
            ),
            seen,
            ("tokens seen", f"{summary['tokens']:,}"),
        ],
        "Licences": [("base model", base_licence), ("training data", data_licence)],
    }
    parts = ["\n".join(["---", *front_matter, "---"]), f"# {config.objective} × {config.adaptation} on {base.name}"]
    for title, entries in tables.items():
        parts.append(render_table(title, ["", ""], entries))
    if summary["sources"]:
        head = ["source", "examples", "examples seen", "repetitions", "tokens seen", "share of tokens"]
        parts.insert(-1, render_table("Sources", head, [_format_share(share) for share in summary["sources"]]))
    parts.append(
        "Redistribution of this model is subject to the licences of its base model and of its training data. "
        "For the quality of its answers, see the model's evaluation."
    )
    return "\n\n".join(parts) + "\n"


def render_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a section with a Markdown table."""
    lines = ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    header = f"| {' | '.join(head)} |" if any(head) else "|" + " |" * len(head)
    return "\n".join([f"## {title}\n", header, "|---" * len(head) + "|", *lines])


def _format_share(share: dict[str, Any]) -> list[str]:
    """Return the cells of a source."""
    counts = [f"{share[key]:,}" for key in ("examples", "seen")]
    return [
        share["source"],
        *counts,
        f"{share['repetitions']:.2f}",
        f"{share['tokens']:,}",
        f"{share['token_share']:.1%}",
    ]


def find_base_licence(config: FineTuningConfig, base: LocalBaseModel) -> str:
    """Return the base model's licence, or UNSTATED if no source states a licence.

    The sources are, in this order: the recipe, the embedded model, and the model's own card.
    """
    return (
        config.card.base_licence
        or BASE_LICENCES.get(base.origin or base.uri)
        or licences.read_model_card(base.path).id
        or UNSTATED
    )


def find_data_licence(stated: str, sources: Sequence[ArtifactInput]) -> str:
    """Return the data licence: from the recipe, or the licence that all sources share; UNSTATED if they differ.

    Args:
        stated: `card.data_licence` of the recipe.
        sources: Inputs of the dataset.
    """
    if stated:
        return stated
    found = {
        next((licence for prefix, licence in SOURCE_LICENCES.items() if source.uri.startswith(prefix)), UNSTATED)
        for source in sources
    }
    return found.pop() if len(found) == 1 else UNSTATED
