"""report.html of a run: verdict, data, training, evaluation, package, lineage and cost on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from components.common.artifacts.artifact_folder import REWARD_MODEL
from components.common.cost.cost_rates import CostRates
from components.common.gate_rules import describe_outcome
from components.common.reporting import html_report
from components.common.reporting.mlflow_tracking import flatten
from components.common.runtime.counts import format_count
from pipelines.steps import report_summary
from pipelines.steps.stage_names import REPORTED_STAGES

Record = Mapping[str, Any]
GREEN, ORANGE, RED = "#2f8f5b", "#b06a10", "#b3261e"
ARTIFACT_TITLES = {
    "version": "registered version",
    "repository": "Triton package",
    "evaluation": "evaluation",
    "model": "tuned model",
    "base_model": "base model",
    "dataset": "dataset",
    "raw": "raw file",
    "incumbent": "incumbent",
    "gguf": "weights",
}
ANSWER_TITLES = {
    "reference": "reference",
    "base_answer": "base",
    "candidate_answer": "candidate",
    "incumbent_answer": "incumbent",
}
MAX_SHOWN_SOURCES = 10
NO_ANSWERS = (
    "No answers were generated. For the task held_out, evaluation.generations sets the number of test rows to answer."
)
NO_QUESTIONS = "No answers were generated, because rows of plain text contain no questions."
NO_GENERATION = "No answers were generated, because a reward model only scores answers."


def render_report(record: Record) -> str:
    """Return the page for a record of pipelines.steps.report_data."""
    model, evaluation, recorded = record["registered"], record["evaluation"], record["produced_by"]
    settings = [[name, str(value)] for name, value in flatten(record["recipe"]).items()]
    versions = {"tuneline": recorded["tuneline"], "git commit": recorded["git_commit"], **recorded["packages"]}
    sections = {
        "Warnings": "".join(html_report.render_paragraph(text, "bad") for text in report_summary.list_warnings(record)),
        "Summary": html_report.render_paragraph(" ".join(report_summary.summarize(record))),
        "Verdict": _render_verdict(record),
        "Data": _render_data(record["data"]),
        "Training": _render_training(record["training"]),
        "Evaluation": _render_comparison(evaluation),
        "Sample answers": _render_answers(evaluation["answers"], record["recipe"]["objective"]),
        "Package": _render_package(record["package"], record["verdict"], record["kind"]),
        "Lineage": _render_lineage(record["lineage"], record["revision"]),
        "Cost": _render_cost(record),
        "Recipe": html_report.render_table(["setting", "value"], settings)
        + html_report.render_table(["software", "version"], [list(item) for item in versions.items()]),
    }
    title = f"{model['name']} version {model['version']}: {record['verdict']}"
    subtitle = f"run {record['run']}" if record["run"] else "a run on a cluster"
    return html_report.render_page(title, subtitle, sections, _render_origin(record))


def format_date(recorded: str | None) -> str:
    """Format a time in ISO 8601 for display; "not recorded" if it is empty."""
    return f"{datetime.fromisoformat(recorded):%Y-%m-%d %H:%M} UTC" if recorded else "not recorded"


def _render_origin(record: Record) -> str:
    """Render date, author, names, and links to the run, the version and the artifacts."""
    model, links, base = record["registered"], record["links"], record["base_model"]
    run = record["run"] or "run on a cluster"
    facts = {
        "Date": (format_date(record["date"]), ""),
        "Author": (record["author"] or "not recorded", ""),
        "Base model": (base["name"], base["uri"]),
        "Dataset": (record["revision"]["tag"], links.get("dataset", "")),
        "Registered model": (f"{model['name']} version {model['version']}", links.get("version", "")),
        "Run": (run, links.get("run", "")),
    }
    for kind, title in (("model", "Training"), ("evaluation", "Evaluation"), ("repository", "Triton package")):
        if links.get(kind):
            facts[title] = ("report", links[kind])
    return html_report.render_facts(facts)


def _render_verdict(record: Record) -> str:
    model, evaluation = record["registered"], record["evaluation"]
    task, metric, values = report_summary.find_main_metric(evaluation)
    label = "held-out" if task == "held_out" else task
    figures = {
        "verdict": record["verdict"],
        "aliases": ", ".join(model["aliases"]) or "none",
        f"{label} {metric} of the base": values["base"],
        f"{label} {metric} of the candidate": values["candidate"],
        f"{label} items": values["n"],
    }
    outcomes = {rule["reason"]: describe_outcome(rule) for rule in evaluation["rules"]}
    styles = {"failed": "bad", "passed": "good", "not applicable": "soft"}
    notes = [
        html_report.render_paragraph(reason, styles[outcomes.get(reason, "passed")])
        for reason in dict.fromkeys(record["reasons"])
    ]
    if record["verdict"] == "unchanged":
        notes.append(
            html_report.render_paragraph("The model was already the champion before this run; no alias moved.")
        )
    if model["replaced"]:
        notes.append(
            html_report.render_paragraph(f"This version replaced version {model['replaced']} as the champion.")
        )
    return html_report.render_tiles(figures) + "".join(notes)


def _render_answers(answers: Sequence[Record], objective: str) -> str:
    if not answers:
        reason = {"text": NO_QUESTIONS, "reward": NO_GENERATION}.get(objective, NO_ANSWERS)
        return html_report.render_paragraph(reason, "soft")
    cards = []
    for answer in answers:
        texts = {title: answer[key] for key, title in ANSWER_TITLES.items() if key in answer}
        cards.append(html_report.render_cards(texts, prompt=answer["prompt"]))
    return "".join(cards)


def _render_data(data: Record) -> str:
    rows, splits = data["rows"], data["splits"]
    outcome = {"kept": rows["kept"], **rows["rejected"]}
    if rows["quarantined"]:
        outcome["quarantined"] = rows["quarantined"]
    links = [("rows in", name, count) for name, count in outcome.items()]
    links += [("kept", name, count) for name, count in splits.items()]
    plot = html_report.plot_flow(
        [{"rows in": rows["in"]}, outcome, splits],
        links,
        {"kept": GREEN, "quarantined": RED, **dict.fromkeys(rows["rejected"], ORANGE)},
        caption="Every input row is counted once: kept, rejected for the reason shown, or quarantined. "
        "Each kept row is in one split.",
    )
    shown = data["sources"][:MAX_SHOWN_SOURCES]
    sources = html_report.render_table(["source", "sha256"], [[s["uri"], s["sha256"]] for s in shown])
    if more := len(data["sources"]) - len(shown):
        note = f"The lineage below lists {format_count(more, 'more source')}."
        sources += html_report.render_paragraph(note, "soft")
    if data["evaluation_sets"]:
        head = ["evaluation set", "rejected rows", "items", "unsearchable items"]
        sets = [
            [name, counts["rejected_rows"], counts["items"], counts["unsearchable"]]
            for name, counts in data["evaluation_sets"].items()
        ]
        sources += html_report.render_table(head, sets)
    examples = {f"{d['reason']} · {d['detail']} · {d['source']}:{d['line']}": d["text"] for d in data["dropped"]}
    examples |= {f"quarantined · {u['file']}:{u['line']}": u["why"] for u in data["unreadable"]}
    if not examples:
        return plot + sources + html_report.render_paragraph("No row was rejected or quarantined.", "soft")
    note = "Examples of rejected and quarantined rows. The dataset's rejected.parquet and quarantine.jsonl list all of them."
    return plot + sources + html_report.render_paragraph(note, "soft") + html_report.render_cards(examples)


def _render_training(training: Record) -> str:
    series = {}
    for name in ("train_loss", "validation_loss"):
        if points := [(entry["step"], entry[name]) for entry in training["curve"] if name in entry]:
            series[name.replace("_", " ")] = ([x for x, _ in points], [y for _, y in points])
    rows, parameters = training["rows"], training["parameters"]
    tiles = html_report.render_tiles(
        {
            "optimizer steps": training["steps"],
            "tokens trained on": training["tokens"],
            "tokens per second": training["tokens_per_second"],
            "trainable parameters": parameters["trainable"],
            "all parameters": parameters["all"],
            "truncated rows": rows["truncated"],
        }
    )
    share = training["rows_seen"] / rows["train"] if rows["train"] else 0.0
    text = f"Trained on {min(share, 1):.0%} of {format_count(rows['train'], 'row')}"
    if rows["without_answer"]:
        text += f"; {format_count(rows['without_answer'], 'more row was', 'more rows were')} skipped"
    text += f". Training used {training['learned']}."
    if training["resumed_from"]:
        text += f" Training was interrupted and resumed from step {training['resumed_from']:,}."
    plot = ""
    if series:
        loss = training["loss"]
        caption = f"{loss[0].upper()}{loss[1:]}."
        plot = html_report.plot_lines(series, x="optimizer step", y="loss", caption=caption)
    return tiles + html_report.render_paragraph(text) + plot


def _render_comparison(evaluation: Record) -> str:
    gains = {}
    for rule in evaluation["rules"]:
        if rule["gain"]:  # evaluations of earlier releases have no slices
            metric = f"{rule['metric']}, worst slice" if rule.get("slices") else rule["metric"]
            gains[f"{metric} against {rule['against']}"] = tuple(rule["gain"])
    plot = ""
    if gains:
        caption = "Gain of the candidate with its 95% confidence interval. Positive: the candidate is better."
        plot = html_report.plot_intervals(gains, x="gain", caption=caption)
    rows = []
    for task, by_metric in evaluation["metrics"].items():
        for metric, values in by_metric.items():
            scores = [values[role] for role in ("base", "candidate", "incumbent")]
            rows.append([f"{task}.{metric}", *scores, *(values["ci95"] or (None, None)), values["n"]])
    head = ["metric", "base", "candidate", "incumbent", "candidate − base, 95% CI: lower", "upper", "items"]
    rules = [[describe_outcome(rule), rule["reason"]] for rule in evaluation["rules"]]
    return plot + html_report.render_table(head, rows) + html_report.render_table(["rule", "finding"], rules)


def _render_package(package: Record | None, verdict: str, kind: str) -> str:
    if package is None and kind == REWARD_MODEL:
        return html_report.render_paragraph(
            "Reward models are registered without a package, because they score answers and do not generate text.",
            "soft",
        )
    if package is None:
        return html_report.render_paragraph(
            f"Not packaged: the verdict is {verdict}, and only accepted candidates are packaged.", "soft"
        )
    proof = package["proof"]
    if proof is None:
        reason = package["unproven_because"]
        return html_report.render_paragraph(
            f"Not proven: {reason}. Promotion of this package requires --force and --reason.", "bad"
        )
    tiles = html_report.render_tiles(
        {
            "Triton": proof["server_version"],
            "seconds to ready": proof["ready_seconds"],
            "golden prompts": proof["golden_prompts"],
            "matched": proof["matched"],
            **_describe_quantization(package),
        }
    )
    reference = "same quantized weights" if package.get("quantization") else "unpackaged model"
    text = (
        "A Triton server loaded the package. Over gRPC, its complete and streamed answers to the golden prompts match "
        f"the answers of transformers with the {reference}."
    )
    answers = [[answer["prompt"], answer["text"], answer["match"]] for answer in package["answers"]]
    return (
        tiles
        + html_report.render_paragraph(text, "good")
        + html_report.render_table(["prompt", "answer", "match"], answers)
    )


def _describe_quantization(package: Record) -> Record:
    """Return the figures of a quantized package, for its tiles; empty without quantization."""
    if not (found := package.get("quantization")):
        return {}
    return {
        "weights": found["scheme"],
        "MB of weights": f"{found['weight_bytes'] / 1e6:.1f} of {found['unquantized_weight_bytes'] / 1e6:.1f}",
        "loss increase": f"{found['increase']:+.4f}",
        "upper bound": f"{found['increase_bound']:+.4f}",
        "margin": found["margin"],
    }


def _render_lineage(links: Sequence[Record], revision: Record) -> str:
    by_digest = {link["sha256"]: link for link in links}

    def label(sha256: str) -> tuple[str, str, str]:
        link = by_digest[sha256]
        kind, uri = str(link["kind"]), str(link["uri"])
        return ARTIFACT_TITLES.get(kind, kind), sha256 or uri, "" if uri.startswith(("store:", "models:")) else uri

    # Each link appears once, below the earliest artifact built from it: an evaluation also lists the model's dataset.
    shown: set[str] = set()
    children: dict[str, list[str]] = {}
    for sha256, link in reversed(by_digest.items()):
        children[sha256] = [name for name in link["inputs"] if name not in shown]
        shown.update(children[sha256])
    note = f"Dataset version {revision['tag']}, commit {revision['rev']}. Each digest is the SHA-256 of the content; "
    return html_report.render_tree("", children, label) + html_report.render_paragraph(
        f"{note}tuneline lineage verifies the digests.", "soft"
    )


def _render_cost(record: Record) -> str:
    """Render the costs. On a cluster, pods share no event log, so only the recorded costs of artifacts are shown."""
    ran, is_local = {stage["name"]: stage for stage in record["stages"]}, record["spent"] is not None
    costs: list[tuple[str, str, Mapping[str, float]]] = []
    for stage in REPORTED_STAGES:
        spent, recorded = ran.get(stage), record["costs"].get(stage)
        if spent and not spent["cached"]:
            costs.append((stage, "ran", spent))
        elif recorded:
            costs.append((stage, "cached; cost of the original run" if is_local else "recorded cost", recorded))
        elif spent:
            costs.append((stage, "cached; only the cost of this run was recorded", spent))
    if is_local:
        costs.append(("all steps of this run", "", record["spent"]))
    costs.append(("all artifacts of this run", "built in this or earlier runs", record["cost_to_make"]))
    rates = CostRates.model_validate(record["rates"])
    figures = [rates.convert(cost) for _, _, cost in costs]
    head = ["stage", "", "wall seconds", "CPU-hours", "GPU-hours"]
    rows = [
        [stage, note, cost["seconds"], cost["cpu_seconds"] / 3600, cost["gpu_seconds"] / 3600]
        for stage, note, cost in costs
    ]
    note = (
        "CPU time is summed over cores and child processes. GPU time is wall time multiplied by the number of GPUs in use. "
        "The time of killed steps is not included."
    )
    for title, name in (("kWh", "kwh"), (f"cost, {rates.prices.currency or 'currency not set'}", "cost")):
        if any(values[name] is not None for values in figures):  # an unknown figure is left out instead of zero
            head.append(title)
            rows = [[*row, values[name]] for row, values in zip(rows, figures, strict=True)]
    unpriced = sorted(
        {
            {"kwh": "kWh", "cpu_hours": "CPU-hours", "gpu_hours": "GPU-hours"}.get(name, name)
            for values in figures
            for name in values["unpriced"]
        }
    )
    if unpriced and any(values["cost"] is not None for values in figures):
        note += f" The cost excludes {' and '.join(unpriced)}, because the price is not set or the amount is unknown."
    if any(values["energy"] == "estimated" for values in figures):
        note += " Energy is estimated from power and time if no energy counter measured it."
    return html_report.render_table(head, rows) + html_report.render_paragraph(note, "soft")
