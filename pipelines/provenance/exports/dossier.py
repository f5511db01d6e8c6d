"""Technical documentation in the order of the EU AI Act's annexes: facts of the lineage, and the open items."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.common.gate_rules import describe_outcome
from components.common.reporting import html_report
from pipelines.provenance.exports import hub_card
from pipelines.provenance.exports.annex_items import ANNEXES, Item
from pipelines.provenance.exports.version_facts import UNKNOWN, VersionFacts, format_line, shorten_uri

# A third of 1e23 FLOP: the Commission's guidelines of July 2025 on general-purpose models, for a base model whose
# training compute is unknown.
MODIFIER_FLOP = 1e23 / 3
Facts = Sequence[tuple[str, object]]
FILLED, PARTIAL, OPEN = "filled", "partly filled", "open"


@dataclass(frozen=True)
class Dossier:
    """The document, and its items by state.

    Attributes:
        items: `ANNEX NUMBER` of the items by state: FILLED if all facts are known and no point is left to a person,
            PARTIAL if some facts are known, OPEN otherwise.
    """

    text: str
    items: dict[str, list[str]]


def render_dossier(facts: VersionFacts) -> Dossier:
    """Return the documentation in Markdown, with the numbers of the open items at the top."""
    items: dict[str, list[str]] = {FILLED: [], PARTIAL: [], OPEN: []}
    shown: dict[str, str] = {}
    sections = []
    for annex, of_annex in ANNEXES.items():
        sections.append(f"## Annex {annex}")
        for item in of_annex:
            text, state = _render_item(item, f"{annex} {item.number}", facts, shown)
            sections.append(text)
            items[state].append(f"{annex} {item.number}")
    version, counts = facts.registered, {state: len(numbers) for state, numbers in items.items()}
    head = [
        f"# Technical documentation: {version.name}, version {version.version}",
        f"**{counts[FILLED]} of {sum(counts.values())} items filled, {counts[PARTIAL]} partly filled, {counts[OPEN]} open.**",
        f"Partly filled: {', '.join(items[PARTIAL]) or 'none'}. Open: {', '.join(items[OPEN]) or 'none'}.",
        "The items follow Annex IV (high-risk AI systems) and Annex XI (general-purpose AI models) of Regulation (EU) "
        "2024/1689 as published on 12 July 2024, in tuneline's wording. Check the text in force, and determine which annex applies. "
        "This document presents evidence from the model's lineage; it is not legal advice.",
        f"Model `{version.model_sha256}`, registered at {version.registered_at}.",
    ]
    if facts.missing_links:
        missing = "\n".join(f"- {link.title} `{link.sha256}`" for link in facts.missing_links)
        head.append(f"These artifacts were not found; their facts are therefore unknown:\n\n{missing}")
    return Dossier("\n\n".join([*head, *sections]) + "\n", items)


def _render_item(item: Item, number: str, facts: VersionFacts, shown: dict[str, str]) -> tuple[str, str]:
    """Return an item's section and its state. A group of facts is listed once; `shown` has the item that lists it."""
    lines, unknown, known = [], [], 0
    for group in item.facts:
        pairs = [
            (format_line(label), UNKNOWN if value in (None, "") else format_line(value))
            for label, value in FACT_GROUPS[group](facts)
        ]
        missing = [label for label, value in pairs if value == UNKNOWN]
        known += len(pairs) - len(missing)
        unknown += missing
        where = shown.setdefault(group, number)
        lines += [f"- {label}: {value}" for label, value in pairs] if where == number else [f"- {group}: see {where}"]
    gaps = [*([f"{item.open} (usually from {item.supplier})"] if item.open else []), *unknown]
    if gaps:
        lines.append(f"- **Open:** {'; '.join(gaps)}")
    state = OPEN if not known else PARTIAL if gaps else FILLED
    return f"### {item.number} {item.title}\n\n" + "\n".join(lines), state


def render_html(dossier: Dossier) -> str:
    """Return the documentation as an HTML page."""
    from markdown_it import MarkdownIt

    title, *sections = re.split(r"^##? (.+)\n", dossier.text, flags=re.MULTILINE)[1:]
    render = MarkdownIt("commonmark", {"html": False}).render
    pairs = dict(zip(["Summary", *sections[1::2]], sections[0::2], strict=True))
    return html_report.render_page(title, "", {name: render(text) for name, text in pairs.items()})


def _list_identity(facts: VersionFacts) -> Facts:
    version = facts.registered
    incumbent = version.incumbent_sha256 or ("none" if facts.evaluation else None)
    return [
        ("model", f"{version.name}, version {version.version}, `{version.model_sha256}`"),
        ("registered at", version.registered_at),
        ("incumbent, used for comparison", incumbent),
        ("tuned from", facts.base_name),
    ]


def _list_package(facts: VersionFacts) -> Facts:
    summary = facts.get_summary("repository")
    proof, unproven = summary.get("proof") or {}, summary.get("unproven_because")
    return [
        ("Triton package", summary.get("model_name")),
        ("backend", summary.get("backend")),
        ("server test with Triton", proof.get("server_version") or (unproven and f"none: {unproven}")),
        ("interface", "OpenAI-compatible HTTP API of the tuneline gateway" if summary else None),
    ]


def _list_software(facts: VersionFacts) -> Facts:
    model = facts.find_artifact("model")
    made = model.manifest.produced_by if model else {}
    packages = ", ".join(f"{name} {version}" for name, version in sorted(made.get("packages", {}).items()))
    return [
        ("tuneline", made.get("tuneline")),
        ("commit", made.get("git_commit")),
        ("Python", made.get("python")),
        ("packages used for training", packages),
    ]


def _list_base(facts: VersionFacts) -> Facts:
    sha256 = facts.registered.tags.get("tuneline.base_model_sha256")
    return [("base model", facts.base_name), ("digest of the base model", sha256)]


def _list_training(facts: VersionFacts) -> Facts:
    recipe, training = facts.get_config("model"), facts.get_summary("model")
    names = ("objective", "adaptation", "learning_rate", "schedule", "max_length")
    return [*((name.replace("_", " "), recipe.get(name)) for name in names), ("optimizer steps", training.get("steps"))]


def _list_objective(facts: VersionFacts) -> Facts:
    training = facts.get_summary("model")
    validation_loss = training.get("validation_loss", UNKNOWN)
    return [
        ("loss function", training.get("loss")),
        ("training loss, last step", training.get("train_loss")),
        ("validation loss", "not measured" if validation_loss is None else validation_loss),
    ]


def _list_architecture(facts: VersionFacts) -> Facts:
    parameters = facts.get_summary("model").get("parameters") or {}
    return [
        ("architecture", ", ".join(facts.architecture.get("architectures") or [])),
        ("family", facts.architecture.get("model_type")),
        ("parameters", parameters.get("all")),
        ("trainable parameters", parameters.get("trainable")),
    ]


def _list_compute(facts: VersionFacts) -> Facts:
    training, cost, flops = facts.get_summary("model"), facts.training_cost, facts.training_flops
    share = f"{flops / MODIFIER_FLOP:.2g} of the guideline's 3.3e22 FLOP for a modified model" if flops else None
    return [
        ("device", training.get("device")),
        ("processes", training.get("processes")),
        ("tokens", training.get("tokens")),
        ("floating-point operations used for training", f"{flops:.3g}, {share}" if flops else None),
        ("training time in seconds", cost["seconds"] if cost else None),
        ("CPU seconds", cost["cpu_seconds"] if cost else None),
        ("GPU seconds", cost["gpu_seconds"] if cost else None),
    ]


def _list_data(facts: VersionFacts) -> Facts:
    dataset, summary = facts.find_artifact("dataset"), facts.get_summary("dataset")
    inputs = dataset.manifest.inputs if dataset else []
    sources = [f"{shorten_uri(one.uri)} `{one.content_sha256[:12]}`" for one in inputs if one.kind == "raw"]
    splits = ", ".join(f"{name} {rows}" for name, rows in summary.get("splits", {}).items())
    earlier = list(dict.fromkeys(link.sha256 for link in facts.chain if link.kind == "dataset"))[1:]
    return [
        ("dataset", f"{facts.data_name}, `{dataset.sha256}`" if dataset else None),
        ("row kind", summary.get("rows_kind")),
        ("rows by split", splits),
        ("sources", ", ".join(sources)),
        ("licence of the data", facts.data_licence),
        *(("dataset of an earlier training run", f"`{sha256}`") for sha256 in earlier),
    ]


def _list_curation(facts: VersionFacts) -> Facts:
    summary, config = facts.get_summary("dataset"), facts.get_config("dataset")
    rows, personal = summary.get("rows") or {}, summary.get("personal_data")
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(rows.get("rejected", {}).items()))
    found = ", ".join(f"{kind} {one['found']} ({one['action']})" for kind, one in (personal or {}).items())
    return [
        ("rows read", rows.get("in")),
        ("rows kept", rows.get("kept")),
        ("quarantined rows", rows.get("quarantined")),
        ("rejected rows by reason", (rejected or "none") if rows else None),
        ("near-duplicate threshold", config.get("near_duplicate_threshold")),
        ("personal data found, and action taken", None if personal is None else found or "none"),
    ]


def _list_evaluation(facts: VersionFacts) -> Facts:
    content = facts.evaluation
    scores = [row for row in hub_card.list_score_rows(facts) if row[1] == "all"]
    return [
        ("verdict", content.get("verdict")),
        ("reasons", " ".join(facts.reasons)),
        ("evaluated items", content.get("items")),
        *((row[0], f"{row[2]}; difference from the base model {row[5]}") for row in scores),
    ]


def _list_slices(facts: VersionFacts) -> Facts:
    rows = [row for row in hub_card.list_score_rows(facts) if row[1] != "all"]
    found = [
        (f"{row[0]}, {row[1]}", f"{row[2]}; difference from the base model {row[5]}; {row[6]} items") for row in rows
    ]
    return found or [("slices", "none: each kind of slice has one group" if facts.evaluation else None)]


def _list_limits(facts: VersionFacts) -> Facts:
    rows = facts.get_summary("model").get("rows") or {}
    return [
        ("tokens per row", facts.get_config("model").get("max_length")),
        ("truncated training rows", rows.get("truncated")),
    ]


def _list_metrics(facts: VersionFacts) -> Facts:
    rules = [
        f"{rule['metric']} against {rule['against']}: {describe_outcome({'holds': False, **rule})}"
        for rule in facts.evaluation.get("rules", [])
    ]
    names = sorted({f"{score.task}.{score.metric}" for score in facts.list_scores()})
    return [("metrics", ", ".join(names)), ("rules of the promotion gate", "; ".join(rules))]


def _list_formats(facts: VersionFacts) -> Facts:
    length = facts.architecture.get("max_position_embeddings")
    return [
        ("modality", "text"),
        ("input and output", "text, tokenized by the model's tokenizer"),
        ("context length in tokens", length),
    ]


def _list_licences(facts: VersionFacts) -> Facts:
    return [("base model", facts.base_licence), ("training data", facts.data_licence)]


FACT_GROUPS: dict[str, Callable[[VersionFacts], Facts]] = {
    "identity": _list_identity,
    "package": _list_package,
    "software": _list_software,
    "base": _list_base,
    "training": _list_training,
    "objective": _list_objective,
    "architecture": _list_architecture,
    "compute": _list_compute,
    "data": _list_data,
    "curation": _list_curation,
    "evaluation": _list_evaluation,
    "slices": _list_slices,
    "limits": _list_limits,
    "metrics": _list_metrics,
    "formats": _list_formats,
    "licences": _list_licences,
}
