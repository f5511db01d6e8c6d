"""Evaluation: the candidate against its base and the model in service, on the same held-out items; the verdict with its reasons."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, models
from components.common.artifacts import Artifact, Input
from components.common.models import Model
from components.common.progress import Reporter
from components.evaluation import gate, report, scoring, statistics
from components.evaluation.config import EvaluationConfig
from components.evaluation.gate import Ruling
from components.evaluation.items import Item, read_items, task_digest
from components.evaluation.scoring import Scores
from components.evaluation.statistics import Interval

STAGE = "evaluation"
PAYLOAD = ("evaluation.json", "predictions.parquet")
ACCEPTED, REFUSED, UNCHANGED = "accepted", "refused", "unchanged"


def evaluate(
    candidate: Model,
    dataset: Artifact,
    output: Path,
    config: EvaluationConfig,
    *,
    incumbent: Model | None,
    seed: int,
    state: Path,
    reporter: Reporter,
    overwrite: bool = False,
) -> Artifact:
    """Measure candidate, base and incumbent on the dataset's test split and publish scores and verdict in `output`.

    The verdict is `accepted` when every rule of the gate holds, `refused` otherwise, `unchanged` when the candidate is the incumbent.
    Scores are kept in `state`/evaluation by model and task. Raises InputError when the test split cannot be measured.
    """
    if incumbent and incumbent.sha256 == candidate.sha256:
        reporter.note("the candidate is the model in service")
    inputs = _inputs(candidate, dataset, incumbent)
    key = hashing.digest(
        {
            "stage": STAGE,
            "code": hashing.code_sha256(STAGE),
            "inputs": [i.model_dump(exclude={"uri"}) for i in inputs],
            "config": config.model_dump(),
            "seed": seed,
            "arithmetic": models.arithmetic(),
        }
    )
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        return finished
    tokenizer = models.load_tokenizer(candidate.tokenizer)
    reporter.step("reading the held-out items")
    items = read_items(dataset, tokenizer, config, reporter)
    scores = _scores(candidate, incumbent, items, tokenizer, config, seed, state / STAGE, reporter)
    reporter.step("weighing the differences")
    ruled = _rule(scores, items, config, seed)
    result = _result(scores, items, ruled, config, seed, unchanged=incumbent is not None and incumbent.sha256 == candidate.sha256)
    _write(output, result, scores, items, ruled, inputs)
    summary = {name: result[name] for name in ("verdict", "reasons", "metrics")}
    return artifacts.publish(
        output, "evaluation", payload=PAYLOAD, inputs=inputs, config=config.model_dump(), seed=seed, key=key, summary=summary
    )


def _inputs(candidate: Model, dataset: Artifact, incumbent: Model | None) -> list[Input]:
    inputs = [candidate.as_input(), dataset.as_input(), candidate.base.as_input()]
    if incumbent:
        named = incumbent.as_input()
        inputs.append(Input(kind="incumbent", content_sha256=named.content_sha256, uri=named.uri))
    return inputs


def _scores(
    candidate: Model,
    incumbent: Model | None,
    items: Sequence[Item],
    tokenizer: Any,
    config: EvaluationConfig,
    seed: int,
    state: Path,
    reporter: Reporter,
) -> dict[str, Scores]:
    """Scores by role. An adapter and its base are measured on one set of loaded weights, the adapter switched on and off."""
    models.prepare_torch(seed)
    task = task_digest(items, config)
    loaded: dict[str, Any] = {}

    def weights(model: Model) -> Any:
        if model.sha256 not in loaded:
            loaded.clear()  # one model in memory at a time
            reporter.step("loading the model")
            loaded[model.sha256] = models.load(model)
        return loaded[model.sha256]

    def scores(role: str, model: Model, on: Model, *, without_adapter: bool = False) -> Scores:
        measured_on = [model.sha256, task, hashing.code_sha256(STAGE), config.batch_tokens, models.arithmetic()]
        path = state / "scores" / f"{hashing.digest(measured_on)}.json"
        return scoring.kept_or_measured(
            path,
            role,
            lambda: scoring.measure(weights(on), tokenizer, items, config, name=role, reporter=reporter, without_adapter=without_adapter),
            reporter,
        )

    base = Model(candidate.base.sha256, candidate.base, candidate.base.path, None, None)
    found = {"candidate": scores("candidate", candidate, candidate)}
    shared = candidate.adapter is not None
    found["base"] = scores("base", base, candidate if shared else base, without_adapter=shared)
    if incumbent and models.same_tokens(incumbent.tokenizer, candidate.tokenizer):
        found["incumbent"] = scores("incumbent", incumbent, incumbent)
    elif incumbent:
        reporter.note("the model in service has another tokenizer: its loss a token cannot be compared")
        found["incumbent"] = Scores([], {})
    return found


def _rule(scores: Mapping[str, Scores], items: Sequence[Item], config: EvaluationConfig, seed: int) -> list[Ruling]:
    return gate.rulings({role: s.nll for role, s in scores.items()}, _tokens(items), config, seed)


def _tokens(items: Sequence[Item]) -> list[int]:
    return [item.answer_tokens for item in items]


def _result(
    scores: Mapping[str, Scores], items: Sequence[Item], ruled: Sequence[Ruling], config: EvaluationConfig, seed: int, *, unchanged: bool
) -> dict[str, Any]:
    """evaluation.json: verdict, reasons, every metric with its interval and n, every rule with what it found."""
    accepted = all(ruling.holds for ruling in ruled)
    reasons = [ruling.reason for ruling in ruled]
    return {
        "verdict": UNCHANGED if unchanged else ACCEPTED if accepted else REFUSED,
        "reasons": ["The candidate is the model in service, byte for byte.", *reasons] if unchanged else reasons,
        "metrics": {"held_out": _metrics(scores, items, config, seed)},
        "rules": [{**r.rule.model_dump(), "holds": r.holds, "reason": r.reason, "gain": _interval(r.gain)} for r in ruled],
        "items": len(items),
        "answer_tokens": sum(_tokens(items)),
        "task_sha256": task_digest(items, config),
    }


def _metrics(scores: Mapping[str, Scores], items: Sequence[Item], config: EvaluationConfig, seed: int) -> dict[str, Any]:
    """Loss and perplexity of every model; ci95 is the 95% interval of candidate − base, by paired bootstrap over items."""
    tokens = _tokens(items)
    loss = {role: _finite(statistics.ratio(s.nll, tokens)) if s.nll else None for role, s in scores.items()}
    options: dict[str, Any] = {"samples": config.bootstrap_samples, "confidence": 0.95, "seed": seed}
    pair = (scores["candidate"].nll, scores["base"].nll, tokens)
    ci = {"loss": None, "perplexity": None}
    if loss["candidate"] is not None and loss["base"] is not None:
        difference, gain = statistics.paired_bootstrap(*pair, **options), statistics.paired_perplexity(*pair, **options)
        ci = {"loss": [difference.low, difference.high], "perplexity": [-gain.high, -gain.low]}  # type: ignore[dict-item]
    perplexity = {role: _finite(math.exp(min(value, 700.0))) if value is not None else None for role, value in loss.items()}
    return {
        name: {**{role: values.get(role) for role in ("candidate", "base", "incumbent")}, "ci95": ci[name], "n": len(items)}
        for name, values in (("loss", loss), ("perplexity", perplexity))
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(gain: Interval | None) -> list[float] | None:
    return [gain.value, gain.low, gain.high] if gain else None


def _write(
    output: Path,
    result: dict[str, Any],
    scores: Mapping[str, Scores],
    items: Sequence[Item],
    ruled: Sequence[Ruling],
    inputs: Sequence[Input],
) -> None:
    (output / "evaluation.json").write_text(json.dumps(result, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    _write_predictions(output / "predictions.parquet", scores, items)
    (output / "report.html").write_text(report.page(result, scores, items, ruled, inputs), encoding="utf-8")


def _write_predictions(path: Path, scores: Mapping[str, Scores], items: Sequence[Item]) -> None:
    """One row an item: its loss under every model, and the answers where they were generated."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns: dict[str, Any] = {
        "id": [item.id for item in items],
        "task": ["held_out"] * len(items),
        "answer_tokens": pa.array(_tokens(items), pa.int32()),
        "prompt": [item.prompt for item in items],
        "reference": [item.reference for item in items],
    }
    for role, found in scores.items():
        nll: list[float | None] = [*found.nll] or [None] * len(items)
        columns[f"{role}_nll"] = pa.array(nll, pa.float64())
        columns[f"{role}_answer"] = pa.array([found.answers.get(item.id) for item in items], pa.string())
    parquet.write_table(pa.table(columns), path, compression="zstd")
