"""report.html of a run: one page on which a person, a CI job's reader and an auditor find what happened and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common import report
from components.common.tracking import flatten
from pipelines.stages import REPORTED

Record = Mapping[str, Any]
GREEN, ORANGE, RED, BLUE = "#2f8f5b", "#d98b2b", "#b3261e", "#4472b0"
TITLES = {
    "version": "registered version", "repository": "Triton package", "evaluation": "evaluation", "model": "tuned model",
    "base_model": "base model", "dataset": "dataset", "raw": "raw file", "incumbent": "model in service before", "gguf": "weights",
}  # fmt: skip


def render(record: Record) -> str:
    """The page for what pipelines.evidence gathered."""
    model = record["registered"]
    title = f"{model['name']} version {model['version']}: {record['verdict']}"
    sections = {
        "Verdict": _verdict(record),
        "What data came in, and what became of it": _data(record["data"]),
        "Training": _training(record["training"]),
        "Base against candidate": _comparison(record["evaluation"]),
        "Answers side by side": _answers(record["evaluation"]["answers"]),
        "The package and its proof": _package(record["package"], record["verdict"]),
        "Lineage": _lineage(record["lineage"], record["revision"]),
        "Time and cost": _cost(record),
        "Recipe": _recipe(record),
    }
    return report.page(title, f"run {record['run']}" if record["run"] else "a run on a cluster", sections)


def _verdict(record: Record) -> str:
    model, metrics = record["registered"], record["evaluation"]["metrics"]
    task = "held_out" if "held_out" in metrics else next(iter(metrics))
    metric, found = next(iter(metrics[task].items()))
    named = "held-out" if task == "held_out" else task
    figures = {
        "verdict": record["verdict"],
        "aliases": ", ".join(model["aliases"]) or "none",
        f"{named} {metric} of the base": found["base"],
        f"{named} {metric} of the candidate": found["candidate"],
        f"{named} items": found["n"],
    }
    failed = {rule["reason"] for rule in record["evaluation"]["rules"] if not rule["holds"]}
    told = [report.paragraph(reason, "bad" if reason in failed else "good") for reason in record["reasons"]]
    if record["verdict"] == "unchanged":
        told.append(report.paragraph("This very model was in service before the run, so nothing moved."))
    if model["replaced"]:
        told.append(report.paragraph(f"It replaced version {model['replaced']} as the champion."))
    return report.tiles(figures) + "".join(told)


def _data(data: Record) -> str:
    rows, splits = data["rows"], data["splits"]
    outcome = {"kept": rows["kept"], **rows["rejected"]} | ({"unreadable": rows["quarantined"]} if rows["quarantined"] else {})
    columns = [{"rows in": rows["in"]}, outcome, splits]
    links = [("rows in", name, count) for name, count in outcome.items()] + [("kept", name, count) for name, count in splits.items()]
    colours = {"kept": GREEN, "unreadable": RED, **dict.fromkeys(rows["rejected"], ORANGE)}
    caption = "Every row that came in is counted once: kept, dropped for the reason named, or unreadable. Kept rows lie in one split each."
    return (
        report.flow_plot(columns, links, colours, caption=caption)
        + report.table(["source", "sha256"], [[s["uri"], s["sha256"]] for s in data["sources"]])
        + _dropped(data)
    )


def _dropped(data: Record) -> str:
    texts = {f"{d['reason']} · {d['detail']} · {d['source']}:{d['line']}": d["text"] for d in data["dropped"]}
    texts |= {f"unreadable · {u['file']}:{u['line']}": u["why"] for u in data["unreadable"]}
    if not texts:
        return report.paragraph("No row was dropped and none was unreadable.", "soft")
    note = report.paragraph("Examples of what was dropped; rejected.parquet and quarantine.jsonl of the dataset hold every row.", "soft")
    return note + report.cards(texts)


def _training(training: Record) -> str:
    names = ("train_loss", "validation_loss")
    points = {name: [(e["step"], e[name]) for e in training["curve"] if name in e] for name in names}
    series = {name.replace("_", " "): ([x for x, _ in p], [y for _, y in p]) for name, p in points.items() if p}
    rows, parameters = training["rows"], training["parameters"]
    figures = {
        "optimizer steps": training["steps"],
        "tokens trained on": training["tokens"],
        "tokens a second": training["tokens_per_second"],
        "parameters trained": parameters["trainable"],
        "of all": parameters["all"],
        "rows cut to length": rows["truncated"],
    }
    told = f"Learned from {training['learned']} of {rows['train']:,} rows"
    told += f"; {rows['without_answer']:,} more had no answer within the length and were left out."
    if training["resumed_from"]:
        told += f" The training was interrupted and went on from step {training['resumed_from']:,}."
    plot = report.line_plot(
        series, x="optimizer step", y="loss, nats a token", caption="Cross-entropy on the assistant's tokens."
    ) if series else ""  # fmt: skip
    return report.tiles(figures) + report.paragraph(told) + plot


def _named(rule: Record) -> str:
    """What a rule measured; evaluations of earlier releases know no slices."""
    return f"{rule['metric']}, worst slice" if rule.get("slices") else str(rule["metric"])


def _comparison(evaluation: Record) -> str:
    gains = {f"{_named(r)} against {r['against']}": r["gain"] for r in evaluation["rules"] if r["gain"]}
    caption = "Gain of the candidate with its 95% interval. Right of zero the candidate is better."
    plot = report.interval_plot({name: tuple(gain) for name, gain in gains.items()}, x="gain", caption=caption) if gains else ""
    rows = []
    for task, by_metric in evaluation["metrics"].items():
        for metric, values in by_metric.items():
            low, high = values["ci95"] or (None, None)
            rows.append([f"{task}.{metric}", values["base"], values["candidate"], values["incumbent"], low, high, values["n"]])
    head = ["metric", "base", "candidate", "in service", "candidate − base, from", "to (95%)", "items"]
    rules = [["holds" if r["holds"] else "does not hold", r["reason"]] for r in evaluation["rules"]]
    return plot + report.table(head, rows) + report.table(["rule", "what was found"], rules)


def _answers(answers: Sequence[Record]) -> str:
    titles = {"reference": "reference", "base_answer": "base", "candidate_answer": "candidate", "incumbent_answer": "in service"}
    shown = [({title: a[name] for name, title in titles.items() if name in a}, a["prompt"]) for a in answers]
    return "".join(report.cards(texts, asked=prompt) for texts, prompt in shown) or report.paragraph("No answers were generated.", "soft")


def _package(package: Record | None, verdict: str) -> str:
    if package is None:
        return report.paragraph(f"A candidate that was {verdict} is not packaged.", "soft")
    proof = package["proof"]
    if proof is None:
        return report.paragraph(f"Not proven: {package['unproven_because']}. An unproven package is not promoted.", "bad")
    figures = {
        "Triton": proof["server_version"],
        "seconds to ready": proof["ready_seconds"],
        "golden prompts": proof["golden_prompts"],
        "matched": proof["matched"],
    }
    told = "A real Triton server loaded the package and answered the golden prompts over HTTP and gRPC as the model did before packaging."
    answers = [[a["prompt"], a["text"], a["match"]] for a in package["answers"]]
    return report.tiles(figures) + report.paragraph(told, "good") + report.table(["prompt", "answer", "match"], answers)


def _lineage(links: Sequence[Record], revision: Record) -> str:
    by_digest = {link["sha256"]: link for link in links}
    children = {link["sha256"]: link["inputs"] for link in links}

    def label(sha256: str) -> tuple[str, str, str]:
        link = by_digest[sha256]
        kind, uri = str(link["kind"]), str(link["uri"])
        return TITLES.get(kind, kind), sha256 or uri, "" if uri.startswith(("store:", "models:")) else uri

    told = f"Dataset version {revision['tag']}, commit {revision['rev']}. Every digest is the sha256 of the content; "
    told += "tuneline lineage checks them all again."
    return report.tree("", _once(children), label) + report.paragraph(told, "soft")


def _once(children: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Each link below one other only, the one that was made of it first: an evaluation names the model's dataset too."""
    shown: set[str] = set()
    kept = {}
    for parent, names in reversed(list(children.items())):
        kept[parent] = [name for name in names if name not in shown]
        shown.update(kept[parent])
    return kept


def _cost(record: Record) -> str:
    note = "CPU time is summed over cores and child processes; GPU time is wall time on every GPU in use. A step that was killed could not "
    note += "tell what it had spent."
    return report.table(["stage", "", "wall seconds", "CPU hours", "GPU hours"], _costs(record)) + report.paragraph(note, "soft")


def _costs(record: Record) -> list[list[Any]]:
    """A line a stage, and the sums. A cluster's pods keep no common record: there only what making the artifacts cost is known."""
    ran, here = {stage["name"]: stage for stage in record["stages"]}, record["spent"] is not None
    rows: list[list[Any]] = []
    for stage in REPORTED:
        spent, made = ran.get(stage), record["costs"].get(stage)
        if spent and not spent["cached"]:
            rows.append([stage, "ran", *_figures(spent)])
        elif made:
            rows.append([stage, "from the cache; cost when it was made" if here else "cost when it was made", *_figures(made)])
        elif spent:
            rows.append([stage, "ran, found its work done", *_figures(spent)])
    if here:
        rows.append(["all steps of this run", "", *_figures(record["spent"])])
    return [*rows, ["making its artifacts", "then or now", *_figures(record["cost_to_make"])]]


def _figures(spent: Mapping[str, float]) -> list[float]:
    return [spent["seconds"], spent["cpu_seconds"] / 3600, spent["gpu_seconds"] / 3600]


def _recipe(record: Record) -> str:
    made = record["produced_by"]
    versions = {"tuneline": made["tuneline"], "git commit": made["git_commit"], **made["packages"]}
    settings = report.table(["setting", "value"], [[name, str(value)] for name, value in flatten(record["recipe"]).items()])
    return settings + report.table(["made with", "version"], [[name, value] for name, value in versions.items()])
