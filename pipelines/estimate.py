"""What `tuneline run` would do, told without doing it: rows, tokens, steps, memory, disk and time.

Sources are really listed, read, cleaned and tokenised; nothing is written, converted or registered. Each figure says what it rests on.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from components.common import artifacts, cost, hashing, models, paths, places, step
from components.common import shape as shape_of
from components.common.artifacts import Manifest
from components.common.errors import InputError, TunelineError
from components.common.launch import settings
from components.common.models import Outline
from components.common.places import Workdir
from components.common.progress import Reporter
from components.common.shape import Shape
from components.data_curation.stage import Curated, Source, check_splits, counts, survey
from components.data_versioning.stage import versions
from components.evaluation.tasks.checking import Asked
from components.evaluation.tasks.config import Common, HeldOut, Memorisation, Preference
from components.fine_tuning import acceleration
from components.fine_tuning import plan as training
from components.fine_tuning.config import LOW_RANK, FineTuningConfig
from components.fine_tuning.data import Examples, tokenise
from components.fine_tuning.objectives import OBJECTIVES
from components.model_registry.stage import champion
from pipelines import material, sizing
from pipelines.config import Customization
from pipelines.material import Material
from pipelines.resolve import Plans, asked_by_tasks, compared_with, counting, plan, unproven, unproven_note
from pipelines.stages import MAKERS

SAMPLE = 2000  # training rows tokenised at most
GB = 10**9
DAFT_SECONDS = 5.0  # for the engine's child process to start and compare some thousand rows
ESTIMATED = tuple(MAKERS.values())
OTHER_STEPS = tuple(name for name in sizing.START if name not in ESTIMATED)
NOT_KNOWN = "not known until a package of this base model was made here"


@dataclass(frozen=True)
class Tokens:
    """Token counts of the training rows, or of a sample of them."""

    rows: int
    examples: Examples

    @property
    def lengths(self) -> list[int]:
        """Tokens of each tokenised row that is learned."""
        return [row["length"] for row in self.examples.rows]

    @property
    def tokenised(self) -> int:
        """Rows that were tokenised."""
        return self.examples.read

    @property
    def sampled(self) -> bool:
        """Whether these are not all rows there are."""
        return self.tokenised < self.rows

    @property
    def share(self) -> float:
        """Rows there are for each one tokenised."""
        return self.rows / self.tokenised if self.tokenised else 1.0

    @property
    def trained_rows(self) -> int:
        """Rows of the training split that would be learned."""
        return round(len(self.examples.rows) * self.share)

    @property
    def mean(self) -> float:
        """Tokens a learned row."""
        return statistics.fmean(self.lengths) if self.lengths else 0.0


@dataclass(frozen=True)
class Time:
    """Seconds of a stage's work besides its start, None where nothing is known of them, and what that rests on."""

    work: float | None
    basis: str


@dataclass(frozen=True)
class Findings:
    """What was looked at."""

    config: Customization
    workdir: Workdir
    sources: list[Source]
    outline: Outline
    curated: Curated
    reading_seconds: float
    tokens: Tokens
    shape: Shape
    asked: Sequence[Asked]
    cached: dict[str, str]
    not_compared: list[str]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        tuning, tokens = self.config.fine_tuning, self.tokens
        return training.steps(training.batched_rows(tokens.trained_rows, tokens.trained_rows * tokens.mean, tuning), tuning)

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return self.config.fine_tuning.adaptation == "full"

    @property
    def trained(self) -> int:
        """Tokens learned from in all steps."""
        tuning, tokens = self.config.fine_tuning, self.tokens
        if not tokens.lengths:
            return 0
        if not tokens.sampled:
            return training.tokens(tokens.lengths, tuning, self.config.seed)
        a_step = tuning.step_rows * tuning.max_length if tuning.packing else min(tuning.step_rows, tokens.trained_rows) * tokens.mean
        return round(self.steps * a_step)

    @property
    def weights(self) -> int:
        """Bytes of the model that would be written."""
        whole = self.full or self.config.fine_tuning.merge
        return (self.shape.parameters if whole else self.shape.trainable) * shape_of.FLOAT32

    @cached_property
    def recipes(self) -> list[Findings]:
        """The same for each recipe of a sweep; without one, this alone."""
        tuning, config = self.config.fine_tuning, self.outline.config
        if not tuning.sweep.vary:
            return [self]
        recipes, found = list(tuning.recipes.values()), {}
        for key, recipe in {_added(recipe): recipe for recipe in recipes}.items():  # a large model is not counted for each learning rate
            found[key] = Shape.of(config, training.parameters(config, recipe))
        changed = [(self.config.model_copy(update={"fine_tuning": recipe}), found[_added(recipe)]) for recipe in recipes]
        return [replace(self, config=config, shape=shape) for config, shape in changed]

    @property
    def largest(self) -> Findings:
        """The recipe that trains the most parameters: the best one is not known yet."""
        return max(self.recipes, key=lambda recipe: recipe.shape.trainable)

    def most(self, of: Callable[[Findings], int]) -> int:
        """The sum over the recipes that run at once, if those were the largest."""
        return sum(sorted(map(of, self.recipes), reverse=True)[: self.config.fine_tuning.sweep.parallel])


def _added(recipe: FineTuningConfig) -> str:
    """A key of what is trained or added to the model, which its sections and the adaptation say."""
    told = recipe.model_dump(mode="json").items()
    return hashing.digest({name: value for name, value in told if name == "adaptation" or isinstance(value, dict)})


def estimate(config: Customization, workdir: Workdir, reporter: Reporter) -> dict[str, Any]:
    """The object that `tuneline run --dry-run --json` prints. Raises what a run would: ConfigurationError for sources or models that are
    not there, InputError for rows that nothing can be made of."""
    found = look(config, workdir, reporter)
    reporter.step("estimating")
    tokens, memory, disk = _tokens(found), _memory(found), _disk(found)
    shape, times = found.largest.shape, _times(found)
    return {
        "dry_run": True,
        "rows": _rows(found),
        "tokens": tokens,
        "steps": sum(recipe.steps for recipe in found.recipes),
        "parameters": {"all": shape.parameters, "trainable": shape.trainable},
        "memory": memory,
        "disk": disk,
        "seconds": _seconds(times),
        "stages": [{"name": stage, "cached": stage in found.cached} for stage in ESTIMATED],
        "basis": _basis(found, times),
        "warnings": [*_obstacles(found), *_shortages(found, memory, disk)],
    }


def look(config: Customization, workdir: Workdir, reporter: Reporter) -> Findings:
    """Look at sources, base model and registry as `resolve` does, read the rows, tokenise them."""
    state = workdir.state
    with tempfile.TemporaryDirectory(prefix="tuneline-dry-run-") as scratch, places.state_at(Path(scratch).resolve() / "state"):
        reporter.step("looking at the sources")
        drawn = Workdir(Path(scratch).resolve())
        found = material.look_at(config, workdir, reporter, drawn)
        sources = found.sources
        at_home = [_at_home(source, {drawn.state: state, drawn.root: workdir.root}) for source in sources]
        reporter.step("looking at the base model")
        outline = models.outline(config.fine_tuning.base_model)
        counted = training.parameters(outline.config, config.fine_tuning)
        asked = asked_by_tasks(config, lambda: (outline.tokenizer, outline.config), reporter)
        home = replace(found, sources=at_home)
        cached = _cached(config, workdir, home, outline, material.reading_root(config, workdir, drawn), asked)
        earlier = material.stored_earlier(found.earlier, workdir)
        compared = {one.label for one in earlier}
        began = time.monotonic()
        settings, sets = config.data_curation, found.benchmarks
        with survey(sources, settings, seed=config.seed, reporter=reporter, benchmarks=sets, earlier=earlier) as curated:
            reading = time.monotonic() - began
            reporter.step("tokenising the training rows")
            tokens = _tokenise(curated, outline, config, reporter)
    shape, apart = Shape.of(outline.config, counted), [tag for tag, _ in found.earlier if tag not in compared]
    return Findings(config, workdir, sources, outline, curated, reading, tokens, shape, asked, cached, apart)


def _at_home(source: Source, homes: Mapping[Path, Path]) -> Source:
    """A source that was made or fetched outside of the workdir, known by the place it would have there."""
    uri = source.uri
    for drawn, home in homes.items():
        uri = uri.replace(f"{drawn}/", f"{home.resolve()}/")
    return source.model_copy(update={"uri": uri})


def _tokenise(curated: Curated, outline: Outline, config: Customization, reporter: Reporter) -> Tokens:
    """Tokens of the training rows as fine-tuning would see them; of an evenly spread sample where there are many."""
    tuning = config.fine_tuning
    objective = OBJECTIVES[tuning.objective]
    use = objective.of(curated.kind, "the sources hold")
    every = math.ceil(curated.judged.sizes()["train"] / SAMPLE) or 1
    count, rows = 0, []
    for content in curated.contents("train"):
        for row in use.rows(content):
            rows += [row] if count % every == 0 else []
            count += 1
    return Tokens(count, tokenise(rows, objective, outline.tokenizer, max_length=tuning.max_length, total=len(rows), reporter=reporter))


def _cached(
    config: Customization, workdir: Workdir, found: Material, outline: Outline, reading_root: Path, asked: Sequence[Asked]
) -> dict[str, str]:
    """The stages whose result is in the store already, with its digest. The keys are those of the steps themselves."""
    if outline.base is None:
        return {}
    in_service = champion(config.model_registry.name)
    plans = plan(config, found, outline.base.sha256, lambda key: compared_with(in_service, key), unproven(config), asked)
    made: dict[str, str] = {}
    for stage, parameters in _parameters(plans, config, reading_root, made):
        sha256 = places.noted(workdir.store, stage, step.key_of(stage, parameters), use=False)
        if sha256 is None:
            break
        made[stage] = sha256
    return made


def _parameters(plans: Plans, config: Customization, reading_root: Path, found: dict[str, str]) -> Any:
    """What each step would be given, one after the other: a later one needs what the earlier ones made."""
    yield "data_curation", counting(plans.data_curation)
    dataset = found["data_curation"]
    published = [v for v in versions(config.data_versioning, workdir=reading_root) if v.content_sha256 == dataset]
    if not published:
        return
    yield "fine_tuning", {"plan": counting(plans.fine_tuning), "dataset": dataset, "revision": published[-1].uri.rpartition("@")[2]}
    model = found["fine_tuning"]
    yield "evaluation", {"plan": plans.evaluation, "model": model, "dataset": dataset}
    yield "triton_packaging", {"plan": plans.triton_packaging, "model": model}


def _obstacles(found: Findings) -> list[str]:
    """What a run would be refused for, or be disappointed by, later on."""
    tuning = found.config.fine_tuning
    warnings = [] if _elsewhere() else _unaccelerated(found)
    try:
        check_splits(found.curated, found.config.data_curation)
    except InputError as error:
        warnings.append(f"{error.message}. {error.hint}")
    reason = unproven(found.config)
    if reason:
        warnings.append(unproven_note(reason))
    paired = [task for task in found.config.evaluation.tasks if isinstance(task, Preference) and not task.data]
    if paired and found.curated.kind != "preference":
        warnings.append(f"task {paired[0].name} compares pairs, and the sources hold {found.curated.kind} rows. Name pairs in its data.")
    if found.tokens.tokenised and not found.tokens.examples.rows:
        warnings.append(f"no training row has an answer within {tuning.max_length} tokens. Raise fine_tuning.max_length.")
    context = found.outline.config.get_text_config().max_position_embeddings
    if tuning.max_length > context:
        warnings.append(f"fine_tuning.max_length is {tuning.max_length}, the model's context {context} tokens")
    return warnings


def _unaccelerated(found: Findings) -> list[str]:
    """What recipes ask for that this machine cannot do."""
    told = []
    for recipe in found.recipes:
        try:
            acceleration.check(recipe.config.fine_tuning)
        except TunelineError as error:
            told.append(f"{error.message}. {error.hint}")
    return list(dict.fromkeys(told))


def _shortages(found: Findings, memory: dict[str, Any], disk: dict[str, int]) -> list[str]:
    """Where memory or disk will not suffice."""
    warnings, name = [], memory["largest_stage"]
    largest, free = memory["stages"][name], memory["free"]
    if largest > free:
        advice = "Lower fine_tuning.micro_batch_size or max_length." if name == "fine_tuning" else "Use a larger machine."
        warnings.append(f"{name} needs about {_gb(largest)} of memory, {_gb(free)} are free. {advice}")
    if disk["total"] > disk["free"]:
        warnings.append(f"the run needs about {_gb(disk['total'])} of disk in {found.workdir.root}, {_gb(disk['free'])} are free")
    return warnings


def _basis(found: Findings, times: dict[str, Time]) -> dict[str, str]:
    """What each figure rests on."""
    tokens, tuning = found.tokens, found.config.fine_tuning
    how = f"{tokens.tokenised:,} evenly spread rows of {tokens.rows:,}" if tokens.sampled else f"all {tokens.rows:,} training rows"
    apart = f"; not compared with {', '.join(found.not_compared)}, which would be fetched first" if found.not_compared else ""
    rows = "every source read, cleaned and compared for equal rows; similar ones, which curation drops too, are not looked for"
    return {
        "rows": rows + apart,
        "tokens": f"{how}, with the base model's tokenizer and chat template, cut at {tuning.max_length} tokens",
        "steps": _of_all(list(map(_steps_basis, found.recipes))),
        "memory": "formulas of components/common/shape.py and pipelines/sizing.py; measured peaks of training were within 16% of them",
        "disk": "raw bytes for the dataset; 4 bytes a parameter for weights and 8 for the optimizer's state",
        **{f"seconds.{stage}": _time_basis(stage, told) for stage, told in times.items()},
        "seconds.other_steps": "the start of the command and of its other steps, as measured on two cores of an AMD EPYC",
    }


def _steps_basis(found: Findings) -> str:
    tuning = found.config.fine_tuning
    if tuning.max_steps:
        return "fine_tuning.max_steps"
    a_step = f"{tuning.step_rows}{' packed rows' if tuning.packing else ''} a step"
    return f"{tuning.epochs:g} epochs of {found.tokens.trained_rows:,} rows, {a_step}"


def _of_all(bases: Sequence[str]) -> str:
    """What a sum over recipes rests on, from what each one rests on."""
    told = "; ".join(dict.fromkeys(bases))
    return told if len(bases) == 1 else f"{len(bases)} recipes together: {told}"


def _time_basis(stage: str, told: Time) -> str:
    return told.basis if told.work is None else f"{sizing.START[stage]:.0f} s to start; {told.basis}"


def _rows(found: Findings) -> dict[str, Any]:
    curated = found.curated
    told = counts(curated)
    return {**told["rows"], "formats": curated.staged.forms(), "splits": told["splits"]}


def _tokens(found: Findings) -> dict[str, Any]:
    tokens, lengths = found.tokens, found.tokens.lengths
    return {
        "tokenised_rows": tokens.tokenised,
        "mean": round(tokens.mean, 2),
        "longest": max(lengths, default=0),
        "cut_share": round(tokens.examples.truncated / tokens.tokenised, 4) if tokens.tokenised else 0.0,
        "without_answer": round(tokens.examples.without_answer * tokens.share),
        "an_epoch": round(sum(lengths) * tokens.share),
        "trained": sum(recipe.trained for recipe in found.recipes),
    }


def _memory(found: Findings) -> dict[str, Any]:
    """Peaks of the stages that load the model, and what is free where they run. `training` has the parts of the largest recipe."""
    config, shape, gpu = found.config, found.largest.shape, _on_gpu()
    trainings = [_training_memory(recipe, gpu) for recipe in found.recipes]
    peaks = {
        "fine_tuning": found.most(lambda recipe: _training_memory(recipe, gpu)["total"]),
        "evaluation": sizing.evaluation_memory(shape, batch_tokens=config.evaluation.batch_tokens, gpu=gpu),
        "triton_packaging": sizing.packaging_memory(shape, proven=unproven(config) is None),
    }
    here = peaks.keys() - ({"fine_tuning"} if _elsewhere() else set())
    largest = max(sorted(here), key=lambda name: peaks[name])
    return {
        "training": max(trainings, key=lambda parts: parts["total"]),
        "stages": peaks, "largest_stage": largest, "free": _free_memory(gpu), "device": "gpu" if gpu else "cpu",
    }  # fmt: skip


def _training_memory(recipe: Findings, gpu: bool) -> dict[str, int]:
    """Bytes by what they are for, and their total."""
    tuning, longest = recipe.config.fine_tuning, max(recipe.tokens.lengths, default=recipe.config.fine_tuning.max_length)
    longest = tuning.max_length if tuning.packing else longest
    dropout = tuning.adaptation in LOW_RANK and tuning.lora.dropout > 0
    return shape_of.training_memory(recipe.shape, rows=tuning.micro_batch_size, length=longest, dropout=dropout, gpu=gpu)


def _elsewhere() -> str:
    """Where the training runs, if not on this machine: it has other memory and another speed."""
    where = settings.from_environment()
    return "" if where.kind == "process" else f"{where.kind}, {where.nodes} {'node' if where.nodes == 1 else 'nodes'}"


def _on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _free_memory(gpu: bool) -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if gpu else int(psutil.virtual_memory().available)


def _disk(found: Findings) -> dict[str, int]:
    """Bytes that a run would add to the workdir, and what is free there. A dataset lies in the store and in the data repository's remote, a
    model in the store and in MLflow where it is small enough."""
    model = max(recipe.weights for recipe in found.recipes)
    copied = 2 if model <= found.config.model_registry.copy_limit_mb * 10**6 else 1
    swept = sum(recipe.weights for recipe in found.recipes) if found.config.fine_tuning.sweep.vary else 0
    parts = {
        "checkpoints": found.most(_checkpoints),
        "dataset": 2 * sum(source.bytes for source in found.sources),
        "model": copied * model + swept,
        "repository": found.largest.shape.parameters * (shape_of.BFLOAT16 if _on_gpu() else shape_of.FLOAT32),
    }
    of_stage = {"checkpoints": "fine_tuning", "dataset": "data_curation", "model": "fine_tuning", "repository": "triton_packaging"}
    parts = {name: 0 if of_stage[name] in found.cached else size for name, size in parts.items()}
    return {**parts, "total": sum(parts.values()), "free": shutil.disk_usage(paths.existing(found.workdir.root)).free}


def _checkpoints(recipe: Findings) -> int:
    """Bytes of those that are there at once: the oldest goes when the newest is whole."""
    tuning = recipe.config.fine_tuning
    written = min(training.checkpoints(recipe.steps, tuning), tuning.keep_checkpoints + 1)
    return sizing.checkpoint(recipe.shape, full=recipe.full) * written


def _seconds(times: dict[str, Time]) -> dict[str, float | None]:
    """Time a stage with its start, null where nothing is known, and their sum, null where a part of it is; a cached stage takes none."""
    spent: dict[str, float | None] = dict.fromkeys(ESTIMATED, 0.0)
    for stage, told in times.items():
        spent[stage] = None if told.work is None else round(sizing.START[stage] + told.work, 1)
    spent["other_steps"] = round(sum(sizing.START[name] for name in OTHER_STEPS), 1)
    return {**spent, "total": None if None in spent.values() else _sum(spent)}


def _sum(spent: dict[str, float | None]) -> float:
    return round(sum(seconds for seconds in spent.values() if seconds is not None), 1)


def _times(found: Findings) -> dict[str, Time]:
    """The work of each stage that is not cached."""
    earlier = _earlier(found.workdir.store)
    reading = f"reading took {found.reading_seconds:.1f} s just now, and {DAFT_SECONDS:.0f} s for Daft"
    times = {
        "data_curation": Time(found.reading_seconds + DAFT_SECONDS, reading),
        "triton_packaging": _packaging_time(found, earlier),
    }
    if "evaluation" not in found.cached:  # nor is what comes before it cached where it is
        rate = _rate(found)
        there, here = _elsewhere(), _of_all_recipes([_training_time(recipe, earlier, rate) for recipe in found.recipes])
        times["fine_tuning"] = Time(None, f"it trains elsewhere ({there}), at a speed that is not known here") if there else here
        times["evaluation"] = Time(_evaluation_work(found) / rate, _rough(rate, "every item of its tasks, read by candidate and base"))
    return {stage: times[stage] for stage in ESTIMATED if stage not in found.cached}


def _rate(found: Findings) -> float:
    """Floating-point operations a second to expect of this machine."""
    tokens = found.config.fine_tuning.micro_batch_size * max(8, round(found.tokens.mean))
    return sizing.EFFICIENCY * sizing.matmul_rate(found.shape, rows=tokens)


def _training_time(found: Findings, earlier: Earlier, rate: float) -> Time:
    alike = _alike_training(found, earlier)
    if alike:
        speed = float(alike.summary["tokens_per_second"])
        return Time(found.trained / speed, f"{speed:.1f} tokens/s, as the newest training like it here, {alike.content_sha256[:12]}")
    work = found.trained * shape_of.training_flops(found.shape, found.tokens.mean)
    return Time(work / rate, _rough(rate, "a training token's operations"))


def _of_all_recipes(each: Sequence[Time]) -> Time:
    """The recipes of a sweep share this machine: at once or one after the other, they take as long together."""
    return Time(sum(one.work or 0.0 for one in each), _of_all([one.basis for one in each]))


def _packaging_time(found: Findings, earlier: Earlier) -> Time:
    took = next(
        (kept["seconds"] for kind, manifest, kept in earlier if kind == "repository" and kept and _same_base(manifest, found)), None
    )
    return Time(took, NOT_KNOWN if took is None else "what the newest package of this base model took here")


def _rough(rate: float, work: str) -> str:
    speed = f"{rate / GB:.2g} GFLOP/s: half of a matrix product's rate here, measured for a second"
    return f"{work} by formula, right within a factor of 2 or 3, at {speed}"


def _evaluation_work(found: Findings) -> float:
    """Operations of the evaluation: every task's items read by candidate and base, and the longest answers they may write."""
    settings = found.config.evaluation
    asked = {one.settings.name: one for one in found.asked}
    tokens = sum(_task_tokens(task, asked.get(task.name), found) for task in settings.tasks)
    return 2 * tokens * shape_of.forward_flops(found.shape, found.tokens.mean)


def _task_tokens(settings: Common, asked: Asked | None, found: Findings) -> float:
    """Tokens that a task computes with one model: its own items, or rows of the dataset that is still to be made."""
    if asked and asked.items is not None:
        return asked.read + asked.written
    if isinstance(settings, Memorisation):
        return 2 * settings.rows * settings.tokens
    items = found.curated.judged.sizes()["test"]
    items = min(items, settings.max_items) if settings.max_items else items
    if isinstance(settings, HeldOut):
        return items * found.tokens.mean + settings.generations * settings.generation_tokens
    return items * (found.tokens.mean + getattr(settings, "max_new_tokens", 0))


Earlier = list[tuple[str, Manifest, cost.Cost | None]]


def _earlier(store: Path) -> Earlier:
    """The artifacts of a store with what they cost, newest first."""
    found = []
    for path in sorted(store.glob(f"*/{artifacts.MANIFEST}"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            manifest = artifacts.read_manifest(path.parent)
        except TunelineError:
            continue
        found.append((manifest.kind, manifest, cost.known(store, manifest.content_sha256)))
    return found


def _same_base(manifest: Manifest, found: Findings) -> bool:
    named, base = manifest.input("base_model"), found.outline.base
    return named is not None and base is not None and named.content_sha256 == base.sha256


def _alike_training(found: Findings, earlier: Earlier) -> Manifest | None:
    """The newest training of this base model, with this adaptation and length, on this device and as many threads."""
    here, tuning = models.arithmetic(), found.config.fine_tuning
    for kind, manifest, _ in earlier:
        alike = kind == "model" and _same_base(manifest, found) and manifest.summary.get("arithmetic") == here
        same = ("objective", "adaptation", "max_length", "micro_batch_size", "packing")
        if alike and all(manifest.config.get(name) == getattr(tuning, name) for name in same) and manifest.summary.get("tokens_per_second"):
            return manifest
    return None


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


def lines(result: dict[str, Any]) -> list[str]:
    """An estimate for people."""
    rows, tokens, memory, disk, basis = (result[name] for name in ("rows", "tokens", "memory", "disk", "basis"))
    dropped = ", ".join(f"{n} {reason}" for reason, n in rows["rejected"].items()) or "none"
    formats = ", ".join(f"{n} {form}" for form, n in rows["formats"].items())
    train = memory["training"]
    parts = ", ".join(f"{name} {_gb(train[name])}" for name in ("weights", "gradients", "optimizer", "activations", "logits"))
    largest = memory["stages"][memory["largest_stage"]]
    split = ", ".join(f"{n} {name}" for name, n in rows["splits"].items())
    return [
        "a dry run: nothing was written",
        f"rows      {rows['kept']} of {rows['in']} kept; dropped: {dropped}; unreadable: {rows['quarantined']}; read as {formats}",
        f"          {split} (similar rows are not counted out)",
        f"tokens    {tokens['mean']:g} a row, at most {tokens['longest']}; {tokens['cut_share']:.1%} of them are cut ({basis['tokens']})",
        f"training  {result['steps']} steps ({basis['steps']}), {tokens['trained']:,} tokens, "
        f"{result['parameters']['trainable']:,} of {result['parameters']['all']:,} parameters",
        f"memory    {_gb(train['total'])} for the training: {parts}",
        f"          {_gb(largest)} for the largest stage, {memory['largest_stage']}; {_gb(memory['free'])} free",
        f"disk      {_gb(disk['total'])}, checkpoints {_gb(disk['checkpoints'])} of it; {_gb(disk['free'])} free",
        *_time_lines(result),
        *(f"warning: {warning}" for warning in result["warnings"]),
    ]


def _time_lines(result: dict[str, Any]) -> list[str]:
    cached, seconds = {stage["name"] for stage in result["stages"] if stage["cached"]}, result["seconds"]
    parts = {stage: spent for stage, spent in seconds.items() if stage != "total"}
    told = [f"{stage:<18}{_time(spent, stage in cached, result['basis'].get(f'seconds.{stage}', ''))}" for stage, spent in parts.items()]
    unknown = [stage for stage, spent in parts.items() if spent is None]
    if unknown:
        without = "; ".join(f"{stage} ({result['basis'][f'seconds.{stage}']})" for stage in unknown)
        told.append(f"at least {_sum(parts):,.0f} s, without {without}")
    else:
        told.append(f"about {seconds['total']:,.0f} s in all")
    return [f"{'' if i else 'time':<10}{line}" for i, line in enumerate(told)]


def _time(seconds: float | None, cached: bool, basis: str) -> str:
    if cached:
        return "cached: nothing would be done"
    return basis if seconds is None else f"{seconds:,.0f} s ({basis})"
