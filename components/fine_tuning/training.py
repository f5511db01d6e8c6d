"""One training with TRL and PEFT, in this process or as one of several: whole checkpoints, resume, and the best model at its end."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import devices, models, process, shape
from components.common.errors import InterruptedRunError
from components.common.models import Base
from components.common.progress import Reporter
from components.fine_tuning import (
    acceleration,
    checkpoints,
    health,
    isolation,
    merging,
    methods,
    sampling,
    sharding,
    tokens,
    trainers,
    watch,
)
from components.fine_tuning.config import SHARDED, FineTuningConfig
from components.fine_tuning.objectives import OBJECTIVES
from components.fine_tuning.tokens import Tokenised
from components.fine_tuning.watch import LOG, Watched


@dataclass(frozen=True)
class Job:
    """What one training is, in values that another process can be given."""

    base_path: str
    base_sha256: str
    base_uri: str
    tokens: str
    config: dict[str, Any]
    seed: int
    state: str
    output: str


@dataclass(frozen=True)
class Trained:
    """Figures of a whole training, resumed parts included. Losses in nats a token; seconds, bytes, FLOP/s."""

    steps: int
    best_step: int | None
    tokens: int
    train_loss: float
    validation_loss: float | None
    validation_loss_before: float | None
    tokens_per_second: float
    step_tokens_per_second: float
    flops_per_second: float | None
    mfu: float | None
    peak_memory: int
    waited_share: float
    resumed_from: int | None
    stopped_early: bool
    parameters: dict[str, int]
    device: str
    processes: int
    choices: list[str]
    startup: dict[str, float] = field(default_factory=dict)


def train(job: Job, reporter: Reporter, tokenizer: Any = None) -> Trained:
    """Train until the recipe's end, from the newest whole checkpoint of `job.state` where there is one, and write the weights of the best
    checkpoint to `job.output`. `tokenizer` is that of the base model, where it was loaded already.

    Raises TrainingError on a loss that is not finite, InterruptedRunError after SIGTERM or SIGINT, once the last step is saved.
    """
    clock = Startup()
    config, state = FineTuningConfig.model_validate(job.config), Path(job.state)
    quiet()
    device = acceleration.check(config)
    sharding.prepare(config, device)
    with clock.part("import"):
        import trl  # noqa: F401 - what takes the time
    splits = tokens.opened(Path(job.tokens))
    if config.objective == "dpo":  # what TRL computes beforehand lies beside the rows: beside this training's own
        splits = tokens.linked(splits, state / tokens.FOLDER)
    reporter.step("loading the base model")
    with clock.part("load"):
        choice, model = _load(job, config, device)
        tokenizer = tokenizer or models.load_tokenizer(Path(job.base_path))
    stop = threading.Event()
    with clock.part("prepare"):
        checkpoint = checkpoints.newest(state, reporter, _goes_on(config))
        watched = Watched(config, state, reporter, stop, _rows_of_step(splits, config, job.seed))
        trainer = _trainer(model, tokenizer, splits, config, choice, job, watched)
        watched.trainer = trainer
        _check_isolation(trainer, config)
    watched.first_step = _first_step(trainer, config, choice, clock)
    reporter.step("training")
    with process.stopping(stop):  # preemption, a requeued job: the step is ended and saved
        _run(trainer, checkpoint, config, splits)
    if stop.is_set() and not _is_at_its_end(trainer.state.global_step, trainer.state.max_steps, trainer.state.log_history, config):
        raise InterruptedRunError(
            f"training was interrupted after step {trainer.state.global_step} and is saved",
            hint="Run the same command again: it goes on from that step.",
        )
    reporter.step("writing the model")
    _take_best(trainer, state, config)
    trained = _figures(trainer, choice, config, checkpoint, splits, state, clock)
    _write(trainer, Path(job.base_path), Path(job.output), config)
    for sentence in (health.starved(trained.waited_share), health.worse(trained.validation_loss_before, trained.validation_loss)):
        if sentence:
            reporter.note(sentence)
    return trained


class Startup:
    """Seconds from the command to the first step, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.parts[name] = round(self.parts.get(name, 0.0) + time.perf_counter() - began, 3)


def _load(job: Job, config: FineTuningConfig, device: str) -> tuple[acceleration.Choice, Any]:
    """How to compute, and the base model."""
    import torch

    models.prepare_torch(job.seed, device)
    base = Base(Path(job.base_path), job.base_sha256, job.base_uri)
    outline = models.configuration(base.path)
    counted = counted_parameters(outline, config)
    choice = acceleration.choose(config, device, shape.Shape.of(outline, counted), str(outline.model_type))
    dtype = acceleration.torch_dtype(config, choice)
    torch.manual_seed(job.seed)  # counting drew random numbers
    options: dict[str, Any] = {"attn_implementation": choice.attention}
    if methods.ADAPTATIONS[config.adaptation].four_bits:
        options["quantization_config"] = methods.quantised(dtype)
    model = models.load(models.Model(base.sha256, base, base.path, None, None), trainable=True, dtype=dtype, **options)
    return choice, model


def counted_parameters(model_config: Any, config: FineTuningConfig) -> dict[str, int]:
    """{"all", "trainable", "embedding"} parameters of the model that would be trained, what is added included, counted without weights.

    `embedding` are those of an input embedding that is not the output head as well. Raises ConfigurationError for unknown target modules.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of itself when PEFT wraps a model
        drawn = config.model_copy(update={"prompt": config.prompt.model_copy(update={"initial_text": ""})})
        model = methods.adapt(AutoModelForCausalLM.from_config(model_config, trust_remote_code=False), drawn)
    tied = model_config.get_text_config().tie_word_embeddings
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "embedding": 0 if tied else model.get_input_embeddings().weight.numel(),
    }


def _trainer(
    model: Any, tokenizer: Any, splits: Tokenised, config: FineTuningConfig, choice: acceleration.Choice, job: Job, watched: Watched
) -> Any:
    from transformers import PrinterCallback

    settings = methods.ADAPTATIONS[config.adaptation].settings(config, job.base_path)
    kind = trainers.trainer_class(config, splits, job.seed)
    validated = bool(splits.validation.counts.examples)
    with methods.telling_targets(model):
        trainer = kind(
            model=model,
            args=_arguments(config, choice, splits, seed=job.seed, state=Path(job.state), validated=validated),
            train_dataset=splits.train.dataset,
            eval_dataset=splits.validation.dataset if validated else None,
            processing_class=tokenizer,
            data_collator=trainers.collator(config, tokenizer),
            peft_config=settings,
            callbacks=[watch.watcher(watched)],
        )
    trainer.remove_callback(PrinterCallback)  # the Reporter speaks
    return trainer


def _arguments(config: FineTuningConfig, choice: acceleration.Choice, splits: Tokenised, *, seed: int, state: Path, validated: bool) -> Any:
    import trl

    objective = OBJECTIVES[config.objective]
    sharded = sharding.arguments(config)
    arguments = getattr(trl, objective.arguments)(
        output_dir=str(state),
        max_steps=config.max_steps or -1,
        num_train_epochs=config.epochs,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        per_device_train_batch_size=config.micro_batch_size,
        per_device_eval_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.accumulation,
        eval_strategy="steps" if validated else "no",
        eval_steps=config.checkpoint_every,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        metric_for_best_model="eval_loss" if validated else None,
        greater_is_better=False if validated else None,
        logging_steps=1,
        logging_nan_inf_filter=False,  # else a NaN is shown as the last good loss
        include_num_input_tokens_seen="non_padding",
        seed=seed,
        data_seed=seed,
        use_cpu=choice.device == "cpu",
        bf16=choice.bfloat16,
        gradient_checkpointing=choice.activation_checkpointing,
        torch_compile=choice.compile,
        use_liger_kernel=choice.liger,
        dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        **sharded,
        **objective.settings(config),
        **_reference(config, splits),
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else one process takes all GPUs it sees, by DataParallel, and as many times the rows
    return arguments


def _reference(config: FineTuningConfig, splits: Tokenised) -> dict[str, Any]:
    """DPO compares with where it began: computed once beforehand where every row is learned from, else in each step."""
    if config.objective != "dpo":
        return {}
    visits = config.max_steps * config.step_rows if config.max_steps else config.epochs * splits.train.counts.examples
    return {"precompute_ref_log_probs": visits >= splits.train.counts.examples}


def _check_isolation(trainer: Any, config: FineTuningConfig) -> None:
    """Rows that lie end to end must not see each other: where they would, packing is refused, and other rows are padded instead. A model
    that will be sharded is whole at this moment."""
    if not trainers.lies_end_to_end(config):
        return
    vocabulary = trainer.model.config.get_text_config().vocab_size
    if config.strategy in SHARDED and trainer.model.config._attn_implementation == "flash_attention_2":
        return  # it lies in main memory yet, where that kernel cannot be tried; it takes rows apart by their positions itself
    with trainer.accelerator.autocast():
        if config.packing:
            isolation.check(trainer.model, vocabulary=vocabulary)
        elif isolation.moved(trainer.model, vocabulary=vocabulary):
            trainer.data_collator.padding_free = False


def _first_step(trainer: Any, config: FineTuningConfig, choice: acceleration.Choice, clock: Startup) -> Any:
    """What is looked at right before the first step, when the trainer has wrapped the model."""

    def look() -> None:
        clock.parts["total"] = round(time.time() - _process_began(), 3)
        if sentence := sharding.prove(config, trainer.model_wrapped):
            choice.reasons.append(sentence)

    return look


def _process_began() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _run(trainer: Any, checkpoint: Path | None, config: FineTuningConfig, splits: Tokenised) -> None:
    """Train on from the checkpoint; where that one is the last there is nothing to do but take what it says."""
    from transformers import TrainerState

    if checkpoint:
        told = checkpoints.state_of(checkpoint)
        if _is_at_its_end(told["global_step"], told["max_steps"], told["log_history"], config):
            trainer.state = TrainerState.load_from_json(str(checkpoint / checkpoints.STATE))
            watch.forget_after(Path(trainer.args.output_dir) / LOG, trainer.state.global_step)
            return
    elif splits.validation.counts.examples and config.strategy not in SHARDED:
        watch.forget_after(Path(trainer.args.output_dir) / LOG, -1)
        trainer.evaluate()  # the loss that is to be lowered
        _forget_preparation(trainer)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _forget_preparation(trainer: Any) -> None:
    """Accelerate prepares a model once. Prepared for an evaluation it would not be wrapped for a training, and processes would each
    learn by themselves."""
    trainer.accelerator._models.clear()
    trainer.model_wrapped = trainer.model
    trainer.model._is_accelerate_prepared = False


def _goes_on(config: FineTuningConfig) -> Any:
    """Whether a training can begin at a checkpoint. A sharded one cannot begin at its end: only training shards it."""

    def fits(told: dict[str, Any]) -> bool:
        return config.strategy not in SHARDED or not _is_at_its_end(told["global_step"], told["max_steps"], told["log_history"], config)

    return fits


def _is_at_its_end(step: int, steps: int, history: list[dict[str, Any]], config: FineTuningConfig) -> bool:
    return step >= steps or watch.stopped_early(history, config.early_stopping)


def _take_best(trainer: Any, state: Path, config: FineTuningConfig) -> None:
    """Have the model hold the weights of the checkpoint with the lowest validation loss; without validation, of the last."""
    best = trainer.state.best_global_step or trainer.state.global_step
    checkpoint = state / f"checkpoint-{best}"
    if config.strategy in SHARDED:
        sharding.take(trainer, checkpoint)
    else:
        checkpoints.restore_trainable(trainer.model, checkpoint)


def _write(trainer: Any, base: Path, output: Path, config: FineTuningConfig) -> None:
    """Weights as safetensors, consolidated whatever they were while training."""
    if config.strategy in SHARDED:
        sharding.write(trainer, output)
    elif trainer.is_world_process_zero():
        model = _unwrapped(trainer)
        model.save_pretrained(output, safe_serialization=True)
        if config.merge:
            _merge(model, base, output, config)
    trainer.accelerator.wait_for_everyone()


def _unwrapped(trainer: Any) -> Any:
    """The model as it was before the training: Accelerate puts a forward of its own in front, which computes in bfloat16."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    for name in ("forward", "_original_forward"):
        model.__dict__.pop(name, None)
    return model


def _merge(model: Any, base: Path, output: Path, config: FineTuningConfig) -> None:
    """Put whole weights where the adapter was. Weights that were held in 4 bits are read again in full."""
    if methods.ADAPTATIONS[config.adaptation].four_bits:
        model = merging.unquantised(base, output)
    whole = merging.merged(model)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (output / name).unlink()
    whole.save_pretrained(output, safe_serialization=True)


def _rows_of_step(splits: Tokenised, config: FineTuningConfig, seed: int) -> Any:
    """A function from a step (counted from 1) to the ids of the dataset's rows in its batch."""

    def rows(step: int) -> list[str]:
        a_step, lengths = config.step_rows, splits.train.lengths
        steps = max(1, -(-len(lengths) // a_step))
        epoch, place = divmod(max(step, 1) - 1, steps)
        order = sampling.epoch_order(lengths, a_step, seed=seed, epoch=epoch)
        return splits.train.ids(order[place * a_step : (place + 1) * a_step])

    return rows


def _figures(
    trainer: Any,
    choice: acceleration.Choice,
    config: FineTuningConfig,
    checkpoint: Path | None,
    splits: Tokenised,
    state: Path,
    clock: Startup,
) -> Trained:
    history, lines = trainer.state.log_history, watch.lines_of(state / LOG)
    steps = [line for line in lines if "train_loss" in line]
    validations = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    best = trainer.state.best_global_step or None
    seconds, computing = (sum(line[name] for line in steps) for name in ("seconds", "step_seconds"))
    parameters = _parameters(trainer.model)
    seen, pure = int(trainer.state.num_input_tokens_seen), sum(line["step_seconds"] + line["waited_seconds"] for line in steps)
    flops = _flops_per_second(trainer.model, parameters, config, splits, seen / pure) if pure else None
    title = devices.title(choice.device)
    peak = devices.peak_flops(title)
    return Trained(
        steps=int(trainer.state.global_step),
        best_step=best,
        tokens=seen,
        train_loss=float(steps[-1]["train_loss"]),
        validation_loss=validations.get(best, next(reversed(validations.values()), None)) if validations else None,
        validation_loss_before=next((line["validation_loss"] for line in lines if line["step"] == 0), None),
        tokens_per_second=round(seen / seconds, 2) if seconds else 0.0,
        step_tokens_per_second=round(seen / computing, 2) if computing else 0.0,
        flops_per_second=flops,
        mfu=round(flops / (peak * config.processes), 4) if flops and peak else None,
        peak_memory=devices.peak_memory(choice.device),
        waited_share=round(sum(line["waited_seconds"] for line in steps) / seconds, 4) if seconds else 0.0,
        resumed_from=checkpoints.step_of(checkpoint) if checkpoint else None,
        stopped_early=watch.stopped_early(history, config.early_stopping),
        parameters={name: parameters[name] for name in ("all", "trainable")},
        device=title,
        processes=config.processes,
        choices=choice.reasons,
        startup=clock.parts,
    )


def _parameters(model: Any) -> dict[str, int]:
    tied = model.config.get_text_config().tie_word_embeddings
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "all": sum(p.numel() for p in model.parameters()),
        "embedding": 0 if tied else model.get_input_embeddings().weight.numel(),
    }


def _flops_per_second(model: Any, parameters: dict[str, int], config: FineTuningConfig, splits: Tokenised, rate: float) -> float | None:
    """Model FLOP/s by formula; None for preferences, whose reference passes the formula does not count."""
    if not OBJECTIVES[config.objective].features.get("labels"):
        return None
    counts = splits.train.counts
    mean = counts.tokens / max(counts.examples, 1)
    return rate * shape.training_flops(shape.Shape.of(model.config, parameters), mean)


def quiet() -> None:
    """No look-ups on a model hub while training: everything is on this machine by now; and no words of libraries in between."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\..*")
    models.quiet_transformers()
