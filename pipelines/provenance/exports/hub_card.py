"""Model card of a registered version in the format of the Hugging Face hub: README.md with front matter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from components.common.models.adaptations import ADAPTATIONS
from components.fine_tuning import model_card
from components.fine_tuning.model_card import render_table
from pipelines.provenance.exports.version_facts import UNKNOWN, VersionFacts, format_line, format_number, shorten_uri

FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n\s*# [^\n]*\n", re.DOTALL)


def render_card(facts: VersionFacts) -> str:
    """Return the card. Its section on the training is the card that the training wrote."""
    version, training = facts.registered, facts.get_summary("model")
    recipe, rows = facts.get_config("model"), facts.get_summary("dataset").get("rows_kind", UNKNOWN)
    verdict = version.tags.get("tuneline.verdict", UNKNOWN)
    reproduction = [
        ("model", f"`{version.model_sha256}`"),
        ("dataset", f"`{version.tags.get('tuneline.dataset_sha256', UNKNOWN)}`, {facts.data_name}"),
        ("base model", f"`{version.tags.get('tuneline.base_model_sha256', UNKNOWN)}`, revision {facts.base_revision}"),
        ("evaluation", f"`{version.tags.get('tuneline.evaluation_sha256', UNKNOWN)}`"),
        ("code", version.tags.get("tuneline.git_commit", UNKNOWN)),
        ("command", f"`tuneline reproduce {version.name}@{version.version}`"),
    ]
    limits = [
        ("tokens per row in training", format_number(recipe.get("max_length"))),
        ("truncated training rows", format_number((training.get("rows") or {}).get("truncated"))),
        ("evaluated items", format_number(facts.evaluation.get("items"))),
        ("languages", ", ".join(_list_languages(facts)) or UNKNOWN),
        ("biases, risks, unsuitable uses", f"{UNKNOWN}; to be stated by the provider"),
    ]
    use = [
        ("row kind in training", rows),
        ("intended use", f"{UNKNOWN}; to be stated by the provider"),
        ("licence of the base model", facts.base_licence),
        ("licence of the training data", facts.data_licence),
    ]
    parts = [
        f"---\n{_render_metadata(facts)}\n---",
        f"# {version.name}, version {version.version}",
        f"{facts.base_name} tuned with tuneline. Verdict of the evaluation: {verdict}. Registered at {version.registered_at}.",
        render_table("Use", ["", ""], use),
        render_table("Limits", ["", ""], limits),
        f"## Training\n\n{_read_training_card(facts)}",
        *_render_evaluation(facts),
        render_table("Reproduction", ["", ""], reproduction),
    ]
    return "\n\n".join(parts) + "\n"


def _render_metadata(facts: VersionFacts) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    adaptation = facts.get_config("model").get("adaptation")
    is_whole = facts.get_config("model").get("merge") or (
        adaptation in ADAPTATIONS and ADAPTATIONS[adaptation].trains_all_weights
    )
    tasks = facts.evaluation.get("tasks") or {}
    on_test_rows = (facts.evaluation.get("measured") or {}).get("held_out") or {}
    results = [
        EvalResult(
            task_type=facts.task,
            dataset_type=score.task,
            dataset_name=f"{facts.data_name}, {score.task}" if score.task in on_test_rows else score.task,
            dataset_revision=(tasks.get(score.task) or {}).get("items_sha256"),
            metric_type=score.metric,
            metric_name=f"{score.task}.{score.metric}",
            metric_value=score.values["candidate"],
            metric_args={
                "base": score.values.get("base"),
                "ci95_of_difference_to_base": score.values.get("ci95"),
                "items": score.values.get("n"),
            },
            verified=False,
        )
        for score in facts.list_scores()
        if not score.slice and score.values.get("candidate") is not None
    ]
    licences = facts.base_licence.lower().split(", ")
    data = ModelCardData(
        model_name=f"{facts.registered.name}-{facts.registered.version}",
        base_model=facts.base_name,
        datasets=[facts.data_name],
        eval_results=results or None,
        language=_list_languages(facts) or None,
        library_name=("transformers" if is_whole else "peft") if adaptation else None,
        license="other" if len(licences) > 1 else licences[0],
        license_name=facts.base_licence if len(licences) > 1 else None,
        pipeline_tag=facts.task,
        tags=["tuneline"],
    )
    return str(data.to_yaml()).strip()


def _list_languages(facts: VersionFacts) -> list[str]:
    """Return the languages that the curation kept; empty if it kept all."""
    return list((facts.get_config("dataset").get("language") or {}).get("keep") or [])


def _read_training_card(facts: VersionFacts) -> str:
    """Return the sections of the card that the training wrote, one level deeper."""
    path = facts.find_file("model", model_card.CARD_FILENAME)
    if path is None:
        return UNKNOWN
    body = FRONT_MATTER.sub("", path.read_text(encoding="utf-8")).strip()
    body = re.sub(r"\w+://\S+", lambda address: shorten_uri(address[0]), body)
    return re.sub(r"^(#+ )", r"#\1", body, flags=re.MULTILINE)


def _render_evaluation(facts: VersionFacts) -> Iterator[str]:
    rows = list(list_score_rows(facts))
    yield render_table("Evaluation", SCORE_HEAD, rows) if rows else f"## Evaluation\n\n{UNKNOWN}"
    yield ("\n".join(f"- {format_line(reason)}" for reason in facts.reasons) or "Reasons for the verdict: unknown")


SCORE_HEAD = ["metric", "slice", "model", "base", "incumbent", "model − base, 95% interval", "items"]


def list_score_rows(facts: VersionFacts) -> Iterator[list[str]]:
    """Yield the cells of SCORE_HEAD for every score."""
    for score in facts.list_scores():
        values = [score.values.get(role) for role in ("candidate", "base", "incumbent")]
        interval = score.values.get("ci95")
        cells = ["–" if value is None else format_number(value) for value in values]
        span = f" ({format_number(interval[0])} to {format_number(interval[1])})" if interval else ""
        difference = "–" if score.difference is None else format_number(score.difference) + span
        yield [
            f"{score.task}.{score.metric}",
            score.slice or "all",
            *cells,
            difference,
            format_number(score.values.get("n")),
        ]
