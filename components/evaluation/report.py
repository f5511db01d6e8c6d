"""HTML report of an evaluation (report.html): verdict, metrics, slices, regressions and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.gate_rules import LIMIT_KEYS
from components.common.reporting import html_report
from components.common.runtime.counts import format_count
from components.evaluation.evaluation_result import UNCHANGED, UNCHANGED_REASON, JSONObject
from components.evaluation.promotion_gate import DETECTION_POWER, RuleResult
from components.evaluation.task_results import ROLES, TaskResult

MAX_SHOWN_ITEMS = 5  # per task and section
ROLE_TITLES = {"base": "base", "candidate": "candidate", "incumbent": "incumbent"}
VALUE_COLUMNS = ["candidate", "base", "incumbent", "95% confidence interval, candidate − base", "items"]


def render_page(
    content: JSONObject,
    results: Mapping[str, TaskResult],
    rule_results: Sequence[RuleResult],
    inputs: Sequence[ArtifactInput],
    quantization: str = "none",
) -> str:
    """Return the HTML page.

    Args:
        content: Content of evaluation.json.
        results: Task results by task name.
        rule_results: Results of the gate's rules.
        inputs: Input artifacts and files of the evaluation.
        quantization: Format of the candidate's weights.
    """
    items = sum(len(result.items) for result in results.values())
    name, first = next(iter(results.items()))
    metric = next(iter(first.task.metrics))
    values = content["metrics"][name][metric]
    tiles = {"verdict": content["verdict"], "items": items}
    for role in ("base", "candidate"):
        if values[role] is not None:
            tiles[f"{metric} of the {role}"] = values[role]
    if "incumbent" in first.scores or "incumbent" in first.missing_reasons:
        tiles[f"{metric} of the incumbent"] = values["incumbent"]

    reasons, gains = "", {}
    if content["verdict"] == UNCHANGED:
        reasons = html_report.render_paragraph(UNCHANGED_REASON, "good")
    if quantization != "none":
        reasons += html_report.render_paragraph(f"Evaluated with {quantization} weights, as in the package.")
    # Without an incumbent, several rules have the same reason.
    styles = {"passed": "good", "failed": "bad", "not applicable": "soft"}
    for reason, outcome in dict.fromkeys((result.reason, result.outcome) for result in rule_results):
        reasons += html_report.render_paragraph(reason, styles[outcome])
    for rule_result in rule_results:
        rule, gain = rule_result.rule, rule_result.gain
        if gain:
            name = f"{rule.metric}{', worst slice' if rule.slices else ''} against {rule.against}"
            gains[name] = (gain.value, gain.low, gain.high)
    caption = "Gain of the candidate with its 95% confidence interval. Positive: the candidate is better."
    sections = {
        "Verdict": html_report.render_tiles(tiles) + reasons,
        "Rules": _render_rule_table(rule_results),
        "Gains": html_report.plot_intervals(gains, x="gain", caption=caption) if gains else "",
        "Metrics": _render_metric_tables(content),
        "Rewards": _render_reward_figures(content),
        "Slices": _render_slice_tables(content, results),
        "Largest regressions": "".join(_render_worst_items(name, result) for name, result in results.items()),
        "Answers side by side": _render_answer_cards(results.values()),
        "Inputs": html_report.render_table(
            ["kind", "digest", "location"], [[i.kind, i.content_sha256, i.uri] for i in inputs]
        ),
    }
    tasks = format_count(len(results), "task")
    return html_report.render_page(
        "Evaluation", f"{content['verdict']}; {format_count(items, 'item')} in {tasks}", sections
    )


def _render_rule_table(rule_results: Sequence[RuleResult]) -> str:
    """Return a table of the rules with their limits, bounds and smallest detectable differences."""
    head = [
        "rule",
        "outcome",
        "gain, lower bound",
        "confidence",
        "detectable",
        "harmed or worse items",
        "slices too small",
    ]
    rows: list[list[object]] = []
    for result in rule_results:
        rule = result.rule
        limits = {name: getattr(rule, name) for name in LIMIT_KEYS if getattr(rule, name) is not None}
        limit = ", ".join(f"{name} {value:g}" for name, value in limits.items())
        slices = f" by {', '.join(rule.slices)}" if rule.slices else ""
        rows.append(
            [
                f"{rule.metric} against {rule.against}{slices}: {limit}",
                result.outcome,
                f"{result.lower_bound:+.4f}" if result.lower_bound is not None else None,
                f"{rule.confidence:.0%}",
                f"{result.detectable:.4f}" if result.detectable is not None else None,
                result.harmed_items,
                result.unjudged_slices if rule.slices else None,
            ]
        )
    note = (
        "The lower bound allows for large losses of unseen items, so it can be below the confidence interval. "
        "Detectable: the smallest gain, limit on harmed items, share of worse items, or loss in a slice that these "
        f"items can show. A rule over slices detects this loss with {DETECTION_POWER:.0%} probability."
    )
    return html_report.render_table(head, rows) + html_report.render_paragraph(note)


def _render_metric_tables(content: JSONObject) -> str:
    """Return tables of the metrics, of counts that no rule compares (a judge's errors), and of judges' calibration."""
    head = ["metric", *VALUE_COLUMNS, "McNemar p, against base"]
    rows = []
    for task, by_metric in content["metrics"].items():
        for metric, values in by_metric.items():
            test = content["mcnemar"].get(task, {}).get(metric, {}).get("base", {})
            rows.append([f"{task}.{metric}", *_list_values(values), test.get("p")])
    if all(row[-1] is None for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    tables = html_report.render_table(head, rows)
    counts = [
        [task, role, name, value]
        for task, by_role in content["figures"].items()
        for role, figures in by_role.items()
        if "calibration_error" not in figures  # `_render_reward_figures` shows these
        for name, value in figures.items()
        if value is not None
    ]
    if counts:
        tables += html_report.render_table(["task", "model", "count", "value"], counts)
    for task, figures in content.get("calibration", {}).items():
        tables += _render_calibration(task, figures)
    return tables


REWARD_FIGURES = {
    "mean_reward": "mean reward",
    "calibration_error": "expected calibration error",
    "pairs_chosen_shorter": "pairs whose chosen answer is shorter",
    "accuracy_chosen_shorter": "accuracy if the chosen answer is shorter",
    "pairs_chosen_longer": "pairs whose chosen answer is longer",
    "accuracy_chosen_longer": "accuracy if the chosen answer is longer",
    "longer_wins": "share of pairs of unequal length whose longer answer scores higher",
    "longer_is_chosen": "share of pairs of unequal length whose longer answer is chosen",
}


def _render_reward_figures(content: JSONObject) -> str:
    """Return a table of calibration and length bias, and a calibration plot, for each reward task."""
    parts = ""
    for task, by_role in content["figures"].items():
        roles = [role for role in ROLES if "calibration_error" in by_role.get(role, {})]
        rows: list[list[object]] = []
        for name, label in REWARD_FIGURES.items():
            cells: list[object] = []
            for figures in (by_role[role] for role in roles):
                interval = [figures.get(f"{name}_{end}") for end in ("low", "high")]
                bounds = (
                    f" (95% confidence interval {interval[0]:.3f} to {interval[1]:.3f})" if None not in interval else ""
                )
                cells.append(f"{figures[name]:.3f}{bounds}" if bounds else figures.get(name))
            rows.append([label, *cells])
        curves = {ROLE_TITLES[role]: _list_calibration_points(by_role[role]) for role in roles}
        if roles:
            parts += html_report.render_table([task, *(ROLE_TITLES[role] for role in roles)], rows)
            parts += html_report.plot_lines(
                {**curves, "calibrated": ([0.5, 1.0], [0.5, 1.0])},
                x="confidence",
                y="accuracy",
                caption="Accuracy on pairs by confidence of the reward model. Above the diagonal, the model is "
                "underconfident; below it, overconfident.",
            )
    return parts


def _list_calibration_points(figures: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return the confidence and the accuracy of each bin."""
    names = [name for name in figures if name.endswith("_confidence")]
    accuracies = [figures[f"{name.removesuffix('confidence')}accuracy"] for name in names]
    return [figures[name] for name in names], accuracies


def _render_calibration(task: str, figures: Mapping[str, float]) -> str:
    """Return a table of a judge's agreement with labelled pairs and of its biases."""

    def describe(name: str) -> str:
        low, high = figures[f"{name}_low"], figures[f"{name}_high"]
        return f"{figures[name]:.3f} (95% confidence interval {low:.3f} to {high:.3f})"

    rows: list[list[object]] = [
        ["labelled pairs", f"{figures['pairs']:.0f}"],
        ["missing judgements", f"{figures['errors']:.0f}"],
        ["accuracy", describe("accuracy")],
        ["Cohen's kappa", f"{describe('kappa')}, at least {figures['kappa_bound']:.3f} with 95% confidence"],
        ["judgements that change with the order of the answers", f"{figures['order_flips']:.1%} of the pairs"],
        ["preferences for the answer shown first", f"{figures['prefers_first']:.1%} (50% without bias)"],
        [
            "preferences for the longer answer",
            f"{figures['prefers_longer']:.1%} (in the labels: {figures['labels_prefer_longer']:.1%})",
        ],
    ]
    return html_report.render_table([f"calibration of {task}", "value"], rows)


def _list_values(values: JSONObject) -> list[object]:
    interval = "{:+z.4f} to {:+z.4f}".format(*values["ci95"]) if values["ci95"] else None
    return [values["candidate"], values["base"], values["incumbent"], interval, values["n"]]


def _render_slice_tables(content: JSONObject, results: Mapping[str, TaskResult]) -> str:
    """Return, for each task with slices, a plot and a table of its first metric by slice."""
    parts = ""
    for task, by_metric in content["slices"].items():
        metric, slices = next(iter(by_metric.items()))
        sign = 1 if results[task].get_metric(metric).better == "higher" else -1
        gains = {}
        for row in slices:
            if row["ci95"]:
                low, high = sorted(sign * end for end in row["ci95"])
                gains[row["slice"]] = (sign * (row["candidate"] - row["base"]), low, high)
        caption = (
            f"{task}.{metric} by slice: gain over the base; 95% confidence intervals, not corrected for multiple "
            "comparisons."
        )
        if gains:
            parts += html_report.plot_intervals(gains, x="gain", caption=caption)
        rows = [[row["slice"], *_list_values(row)] for row in slices]
        parts += html_report.render_table([f"{task}.{metric}", *VALUE_COLUMNS], rows)
    return parts


def _render_worst_items(name: str, result: TaskResult) -> str:
    """Return cards of the items with the worst results against the incumbent or, without an incumbent, the base."""
    metric = next(iter(result.task.metrics))
    own, weights = result.get_values("candidate", metric), result.get_weights(metric)
    others = result.get_values("incumbent", metric) or result.get_values("base", metric)
    if not own or not others:
        return ""
    sign = 1 if result.get_metric(metric).better == "lower" else -1
    losses = [(sign * (a - b) / w, i) for i, (a, b, w) in enumerate(zip(own, others, weights, strict=True)) if w]
    losses = sorted((entry for entry in losses if entry[0] > 0), key=lambda entry: -entry[0])
    cards = ""
    for loss, index in losses[:MAX_SHOWN_ITEMS]:
        item = result.items[index]
        texts = {f"reference answer, {name} item {item.id[:12]} (candidate worse by {loss:.3g})": item.reference}
        for role in ROLES:
            if values := result.get_values(role, metric):
                answers = result.scores[role].answers
                answer = f"\n\n{answers[index]}" if answers and answers[index] else ""
                texts[ROLE_TITLES[role]] = f"{metric} {values[index] / weights[index]:.4g}{answer}"
        cards += html_report.render_cards(texts, prompt=item.prompt or item.id)
    return cards


def _render_answer_cards(results: Iterable[TaskResult]) -> str:
    """Return the first answers of every task side by side."""
    cards = ""
    for result in results:
        own = result.scores["candidate"].answers
        for index in [i for i, answer in enumerate(own) if answer is not None][:MAX_SHOWN_ITEMS]:
            texts = {"reference": result.items[index].reference}
            texts |= {ROLE_TITLES[role]: str(s.answers[index] or "") for role, s in result.scores.items() if s.answers}
            cards += html_report.render_cards(texts, prompt=result.items[index].prompt)
    return cards
