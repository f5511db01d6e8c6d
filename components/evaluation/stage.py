"""Evaluation: the candidate against its base and the model in service, on the same items; the verdict with its reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, models
from components.common.artifacts import Artifact, Input
from components.common.models import Model
from components.common.progress import Reporter
from components.evaluation import gate, keeping, loading, report, result
from components.evaluation.config import EvaluationConfig
from components.evaluation.gate import Ruling
from components.evaluation.measured import Measured
from components.evaluation.task import UNANSWERED, Engine, Given
from components.evaluation.tasks import sources, table
from components.evaluation.tasks.config import Common

STAGE = "evaluation"
PAYLOAD = ("evaluation.json", "predictions.parquet")


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
    inputs = _inputs(candidate, dataset, incumbent) + _files(config)
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
    again = artifacts.rests_on_a_failure(output, key)  # it stays until there is one in its place
    finished = None if again else artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        return finished
    measured = _measure(candidate, incumbent, dataset, config, seed, state / STAGE, reporter)
    reporter.step("weighing the differences")
    ruled = gate.rulings(measured, incumbent is not None, config, seed)
    found = result.result(measured, ruled, config, seed, unchanged=incumbent is not None and incumbent.sha256 == candidate.sha256)
    if again:
        artifacts.begin(output, key)
    _write(output, found, measured, ruled, inputs)
    summary = {name: found[name] for name in ("verdict", "reasons", "metrics")} | _passing(measured, reporter)
    return artifacts.publish(
        output, "evaluation", payload=PAYLOAD, inputs=inputs, config=config.model_dump(), seed=seed, key=key, summary=summary
    )


def _passing(measured: Mapping[str, Measured], reporter: Reporter) -> dict[str, bool]:
    """Marks the result where questions stayed without an answer: the same evaluation, asked for again, is made again."""
    for name, one in measured.items():
        if count := sum(scores.figures.get(UNANSWERED, 0) for scores in one.scores.values()):
            reporter.note(f"{name}: {count:.0f} questions had no answer; run it again once they can be answered")
            return {artifacts.PASSING: True}
    return {}


def _inputs(candidate: Model, dataset: Artifact, incumbent: Model | None) -> list[Input]:
    inputs = [candidate.as_input(), dataset.as_input(), candidate.base.as_input()]
    if incumbent:
        named = incumbent.as_input()
        inputs.append(Input(kind="incumbent", content_sha256=named.content_sha256, uri=named.uri))
    return inputs


def _files(config: EvaluationConfig) -> list[Input]:
    """The files that tasks read."""
    return [Input(kind="evaluation_set", content_sha256=sha, uri=path) for path, sha in sources.digests(config.tasks).items()]


@dataclass(frozen=True)
class _Place:
    """The models by role, and what their scores depend on beside task and model."""

    roles: Mapping[str, Model]
    given: Given
    config: EvaluationConfig
    kept: Path
    room: int | None  # tokens that every one of the models reads

    @property
    def reporter(self) -> Reporter:
        return self.given.reporter


def _measure(
    candidate: Model, incumbent: Model | None, dataset: Artifact, config: EvaluationConfig, seed: int, state: Path, reporter: Reporter
) -> dict[str, Measured]:
    """Every task's items and scores. Items are made once, with the candidate's tokenizer; all tasks of a model before the next model."""
    models.prepare_torch(seed)
    base = Model(candidate.base.sha256, candidate.base, candidate.base.path, None, None)
    roles = {"base": base, "candidate": candidate, **({"incumbent": incumbent} if incumbent else {})}
    room = min((found for model in roles.values() if (found := loading.context(model))), default=None)
    given = Given(models.load_tokenizer(candidate.tokenizer), dataset, _readable(room, config, reporter), seed, reporter)
    place = _Place(roles, given, config, state / "scores", room)
    asked = [_asked(settings, given) for settings in config.tasks]
    _measure_roles(place, asked, "candidate", "base")
    if incumbent:
        _measure_roles(place, asked, "incumbent")
    return {one.task.name: one for one in asked}


def _readable(room: int | None, config: EvaluationConfig, reporter: Reporter) -> int:
    """Tokens a row: evaluation.max_length, or fewer where a model reads fewer, since all are asked alike."""
    if room is None or room >= config.max_length:
        return config.max_length
    reporter.note(f"rows are cut at {room} tokens, all that one of the models reads; evaluation.max_length says more")
    return room


def _asked(settings: Common, given: Given) -> Measured:
    task = table.build(settings)
    given.reporter.step(f"reading the items of {task.name}")
    items = task.items(given)
    return Measured(task, items, {}, {}, keeping.task_digest(task, items, list(sources.digests([settings]).values())))


def _wanted(place: _Place, role: str, one: Measured) -> bool:
    """Whether a role has to be measured on a task yet: not where its scores are kept, nor where they would not compare."""
    if not models.same_tokens(place.roles[role].tokenizer, place.roles["candidate"].tokenizer):
        one.foreign.add(role)
    if role in one.foreign and all(metric.per_token for metric in one.task.metrics.values()):
        place.reporter.note(f"{one.task.name}: the model in service has another tokenizer, its loss a token cannot be compared")
        one.why_not[role] = gate.ANOTHER_TOKENIZER
        return False
    found = keeping.kept(_path(place, role, one))
    if found:
        place.reporter.note(f"{one.task.name} of the {role}: kept from an earlier evaluation")
        one.scores[role] = found
    return found is None


def _measure_roles(place: _Place, asked: Sequence[Measured], tuned: str, base: str = "") -> None:
    """Measure a model and, on the same loaded weights, its base; nothing is loaded for what is kept."""
    wanted = {role: [one for one in asked if _wanted(place, role, one)] for role in (tuned, base) if role}
    if not any(wanted.values()):
        return
    model, other = place.roles[tuned], place.roles[base] if base and wanted[base] else None
    options: dict[str, Any] = {"batch_tokens": place.config.batch_tokens, "reporter": place.reporter, "engine": place.config.engine}
    opened = loading.engines(model, other, **options)
    for role in [base, tuned] if other else [tuned]:
        if wanted[role]:
            engine = loading.Within(next(opened)[1], place.room)
            for one in wanted[role]:
                _score(place, role, one, engine)
    opened.close()


def _score(place: _Place, role: str, one: Measured, engine: Engine) -> None:
    place.reporter.step(f"{one.task.name} of the {role}")
    base = one.scores.get("base") if one.task.against_base else None
    one.scores[role] = one.task.score(engine, one.items, place.given, base)
    keeping.keep(_path(place, role, one), one.scores[role])


def _path(place: _Place, role: str, one: Measured) -> Path:
    """Where the scores of a role on a task are kept: by all that they depend on."""
    config, roles = place.config, place.roles
    engine = loading.kind(config.engine, roles["candidate" if role == "base" else role])
    said = [roles[role].sha256, one.digest, hashing.code_sha256(STAGE), engine, config.batch_tokens, place.room, models.arithmetic()]
    key = hashing.digest([*said, roles["base"].sha256] if one.task.against_base else said)
    return place.kept / f"{key}.json"


def _write(output: Path, found: dict[str, Any], measured: Mapping[str, Measured], ruled: Sequence[Ruling], inputs: Sequence[Input]) -> None:
    text = json.dumps(found, indent=2, sort_keys=True, allow_nan=False) + "\n"
    (output / "evaluation.json").write_text(text, encoding="utf-8")
    result.write_predictions(output / "predictions.parquet", measured)
    (output / "report.html").write_text(report.page(found, measured, ruled, inputs), encoding="utf-8")
