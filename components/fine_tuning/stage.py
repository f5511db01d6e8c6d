"""Fine-tuning: a dataset and a base model in, a tuned model out, resumable at any moment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, jobs, launch, liveness, models
from components.common.artifacts import Artifact
from components.common.errors import GOES_ON, BusyError, ConfigurationError, InputError
from components.common.launch import Command, Launcher, LostJobError
from components.common.launch.choice import launcher as chosen
from components.common.launch.settings import LauncherSettings
from components.common.models import Base
from components.common.progress import Reporter
from components.fine_tuning import acceleration, card, report, tokens, training, watch
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.objectives import OBJECTIVES
from components.fine_tuning.tokens import Tokenised
from components.fine_tuning.training import Job, Trained

STAGE = "fine_tuning"
HERE = "process"  # the launcher whose processes are this machine's
WRITTEN = "model"  # in a job's folder: the weights
# Everything but these in the output folder is payload.
EVIDENCE = ("report.html", "training.jsonl", card.NAME)
# Lists of adapter_config.json whose order means nothing. Others, such as a model's layer_types, are one entry a layer.
SETS = ("target_modules", "modules_to_save", "exclude_modules")
CARD = {"card"}  # what is said of a model does not make it another one
Run = Callable[[Launcher, Command, Path, Reporter], dict[str, Any]]  # as launch.run


def finetune(
    dataset: Artifact,
    output: Path,
    config: FineTuningConfig,
    *,
    seed: int,
    state: Path,
    reporter: Reporter,
    dataset_uri: str = "",
    base: Base | None = None,
    overwrite: bool = False,
    where: LauncherSettings | None = None,
    run: Run | None = None,
) -> Artifact:
    """Tune `config.base_model` on the dataset's training split and publish the model in `output`. `where`: on which machines. `run`: what
    runs the training's command, always in processes of its own; without it, this process trains where it is one and here.

    Checkpoints go to `state`/fine_tuning/<key>, where the key is the digest of inputs, configuration and code; the same call after a
    kill goes on from the newest whole one and ends with the same weights. Raises ConfigurationError for a recipe that cannot run here,
    InputError for rows the objective cannot learn from, BusyError where another job trains this very model, TrainingError when the loss
    is lost, InterruptedRunError after a signal.
    """
    where = where or LauncherSettings()
    check_place(config, where)
    kind = kind_of(dataset)
    learned = OBJECTIVES[config.objective].of(kind, f"the dataset in {dataset.path} holds").learned
    base = base or models.base_model(config.base_model, reporter)
    arithmetic = arithmetic_of(config, where)
    key = key_of(dataset.sha256, base.sha256, config, seed, arithmetic)
    work = state / STAGE / key
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        discard(work)  # killed after publishing
        return finished
    work.mkdir(parents=True, exist_ok=True)
    with jobs.held(work):
        start = training.Startup()
        with start.part("tokens"):
            tokenizer = models.load_tokenizer(base.path)
            splits = tokenised(dataset, kind, tokenizer, base, config, state, reporter)
        written = output if where.kind == HERE else _place(work) / WRITTEN
        job = Job(str(base.path), base.sha256, base.uri, str(splits.folder), config.model_dump(), seed, str(work), str(written))
        with liveness.beating(splits.folder):
            trained = _train(job, config, tokenizer, reporter, where, run)
        if written != output:
            _bring_home(written, output)
        _tidy(tokenizer, base, output)
        _keep_evidence(work, output)
        summary = {**_summary(trained, splits, config, arithmetic), "learned": learned, "startup": {**start.parts, **trained.startup}}
        published = _publish(dataset, dataset_uri, base, output, config, seed, key, summary)
        shutil.rmtree(work, ignore_errors=True)
    return published


def kind_of(dataset: Artifact) -> str:
    """Which kind of rows a dataset holds."""
    return str(dataset.manifest.summary.get("rows_kind", "sft"))


def arithmetic_of(config: FineTuningConfig, where: LauncherSettings) -> dict[str, Any]:
    """What the last bits of the weights depend on beside the recipe: device and threads here, or what is asked for elsewhere."""
    return models.arithmetic(config.device) if where.kind == HERE else where.arithmetic()


def discard(work: Path) -> None:
    """Remove the state of a training, unless another job has taken it up for an output of its own."""
    if work.is_dir():
        with suppress(BusyError, FileNotFoundError), jobs.held(work):
            shutil.rmtree(work, ignore_errors=True)


def key_of(dataset_sha256: str, base_sha256: str, config: FineTuningConfig, seed: int, arithmetic: Mapping[str, Any]) -> str:
    """Digest of everything the weights depend on, device and threads (`arithmetic`) among it: sums in another order differ in their last
    bits."""
    return hashing.digest(
        {
            "stage": STAGE,
            "code": hashing.code_sha256(STAGE),
            "inputs": [dataset_sha256, base_sha256],
            "config": config.model_dump(exclude=CARD),
            "seed": seed,
            "arithmetic": dict(arithmetic),
        }
    )


def tokenised(
    dataset: Artifact, kind: str, tokenizer: Any, base: Base, config: FineTuningConfig, state: Path, reporter: Reporter
) -> Tokenised:
    """The dataset's rows as tokens. Raises InputError where nothing of them can be learned."""
    if kind != config.objective:
        reporter.note(f"objective {config.objective} learns {OBJECTIVES[config.objective].uses[kind].learned}")
    splits = tokens.prepare(dataset, kind, tokenizer, tokens.tokenizer_sha256(base.path), config, state, reporter)
    counts = splits.train.counts
    if not counts.examples:
        raise _nothing_to_learn(config, counts.rows)
    if counts.truncated:
        reporter.note(f"{counts.truncated} training rows are longer than {config.max_length} tokens and were cut")
    return splits


def _nothing_to_learn(config: FineTuningConfig, rows: int) -> InputError:
    if not rows:
        return InputError(
            "the dataset's training split is empty", hint="Curate more rows: the split gives the training its share by groups."
        )
    return InputError(
        f"no training row has an answer within {config.max_length} tokens",
        hint="Raise fine_tuning.max_length, or look at the dataset's report.",
    )


def check_place(config: FineTuningConfig, where: LauncherSettings) -> None:
    """Refuse what cannot run: here, where the training is here; elsewhere only the job itself can tell what its node has."""
    if where.kind == HERE:
        acceleration.check(config)
    if config.processes % where.nodes:
        raise ConfigurationError(
            f"fine_tuning.processes is {config.processes}, which {where.nodes} nodes (launcher.nodes) cannot share evenly",
            hint="Make processes a multiple of the nodes: one process an accelerator.",
        )


def _train(job: Job, config: FineTuningConfig, tokenizer: Any, reporter: Reporter, where: LauncherSettings, run: Run | None) -> Trained:
    """In this process where one is enough, so that nothing is imported or loaded twice; else in processes of its own, here or elsewhere."""
    if config.processes == 1 and where.kind == HERE and run is None:
        return training.train(job, reporter, tokenizer)
    place = _place(Path(job.state))
    artifacts.write_atomically(place / launch.JOB, json.dumps(asdict(job)))
    command = Command("components.fine_tuning.worker", [str(place / launch.JOB)], config.processes // where.nodes, where.nodes)
    return Trained(**(run or launch.run)(chosen(where), command, place, reporter)["trained"])


def _place(work: Path) -> Path:
    """The folder of a training's job, on the storage that its checkpoints are on."""
    place = work / "launch"
    (place / WRITTEN).mkdir(parents=True, exist_ok=True)
    return place


def _bring_home(written: Path, output: Path) -> None:
    """Move what a job elsewhere wrote to the output, which its nodes need not see, and which is another when a step is tried again.

    Raises LostJobError where there are no weights. From the first move on the job's outcome counts no more: a call that comes after a kill
    has to write them again, from the last checkpoint.
    """
    if not any(written.glob("*.safetensors")):
        raise LostJobError(f"the job left no weights in {written}", hint=GOES_ON)
    (written.parent / launch.OUTCOME).unlink(missing_ok=True)
    for path in sorted(written.iterdir()):
        shutil.move(path, output / path.name)


def _tidy(tokenizer: Any, base: Base, output: Path) -> None:
    """Add the tokenizer, and leave nothing in the folder that differs from machine to machine."""
    models.save_tokenizer(tokenizer, output)
    (output / card.NAME).unlink(missing_ok=True)  # PEFT's empty model card
    for path in output.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, and whoever serves it may be another user
    for name in (models.ADAPTER_CONFIG, "config.json"):
        _write_canonically(output / name, base)


def _write_canonically(path: Path, base: Base) -> None:
    """Sort what PEFT writes in a set's order, and name the base by its source instead of by its folder here."""
    if not path.exists():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in SETS:
        if isinstance(values.get(name), list):
            values[name] = sorted(values[name])
    for name in ("base_model_name_or_path", "_name_or_path", "tokenizer_name_or_path"):
        if values.get(name):
            values[name] = base.name
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_evidence(work: Path, output: Path) -> None:
    """The log and TensorBoard's event files."""
    shutil.copyfile(work / watch.LOG, output / "training.jsonl")
    if (work / watch.BOARD).is_dir():
        shutil.copytree(work / watch.BOARD, output / watch.BOARD, dirs_exist_ok=True)


def _summary(trained: Trained, splits: Tokenised, config: FineTuningConfig, arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    counts = splits.train.counts
    return {
        **asdict(trained),
        "rows": {"train": counts.rows - counts.without_answer, "truncated": counts.truncated, "without_answer": counts.without_answer},
        "examples": len(splits.train.lengths),
        "tokens_a_pass": counts.tokens,
        "learned_tokens_a_pass": counts.learned,
        "loss": OBJECTIVES[config.objective].loss,
        "arithmetic": dict(arithmetic),
    }


def is_payload(path: str) -> bool:
    """Whether a file of the output makes the model's identity."""
    return path not in EVIDENCE and not path.startswith(f"{watch.BOARD}/")


def _publish(
    dataset: Artifact, dataset_uri: str, base: Base, output: Path, config: FineTuningConfig, seed: int, key: str, summary: dict[str, Any]
) -> Artifact:
    inputs = [dataset.as_input(dataset_uri), base.as_input()]
    log = watch.lines_of(output / "training.jsonl")
    (output / "report.html").write_text(report.page(log, summary, inputs, config), encoding="utf-8")
    (output / card.NAME).write_text(card.text(config, summary, dataset, base, inputs, seed), encoding="utf-8")
    return artifacts.publish(
        output,
        "model",
        payload=is_payload,
        inputs=inputs,
        config=config.model_dump(),
        seed=seed,
        key=key,
        summary=summary,
    )
