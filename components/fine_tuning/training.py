"""One training run with TRL's SFTTrainer: live metrics, whole checkpoints, resume, and a stop on what cannot be mended."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.errors import InterruptedRunError, TrainingError
from components.common.progress import Reporter
from components.fine_tuning import checkpoints, sampling
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.data import Examples

LOG = "training.jsonl"


@dataclass(frozen=True)
class Trained:
    """What a training run leaves: the model, and the figures of the whole of it, resumed parts included."""

    model: Any
    steps: int
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float
    resumed_from: int | None
    log: list[dict[str, Any]]


def train(
    model: Any,
    tokenizer: Any,
    training: Examples,
    validation: Examples,
    config: FineTuningConfig,
    *,
    seed: int,
    state: Path,
    reporter: Reporter,
) -> Trained:
    """Train until the recipe's end, from the newest whole checkpoint in `state` where there is one.

    Raises TrainingError on a loss that is not finite, InterruptedRunError after SIGTERM or SIGINT, once the last step is saved.
    """
    from datasets import Dataset
    from trl import SFTTrainer

    class Trainer(SFTTrainer):  # type: ignore[misc] # trl is untyped
        """SFTTrainer with our order of rows."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return sampling.sampler([row["length"] for row in training.rows], config.batch_size, seed=seed)

    stop = threading.Event()
    watch = _watcher(config, state, reporter, stop)
    trainer = Trainer(
        model=model,
        args=_arguments(config, seed=seed, state=state, validated=bool(validation.rows)),
        train_dataset=Dataset.from_list(training.rows),
        eval_dataset=Dataset.from_list(validation.rows) if validation.rows else None,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    _silence(trainer)
    checkpoint = checkpoints.newest(state, reporter)
    began = time.monotonic()
    with _stopping_on_signals(stop):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.is_set():
        raise InterruptedRunError(
            f"training was interrupted after step {trainer.state.global_step} and is saved",
            hint="Run the same command again: it goes on from that step.",
        )
    return _figures(trainer, checkpoint, time.monotonic() - began, watch.tokens_at_start)


def _arguments(config: FineTuningConfig, *, seed: int, state: Path, validated: bool) -> Any:
    import torch
    from trl import SFTConfig

    on_gpu = torch.cuda.is_available()
    return SFTConfig(
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
        gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
        max_length=config.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},  # rows come with tokens and labels
        remove_unused_columns=True,
        eval_strategy="steps" if validated else "no",
        eval_steps=config.checkpoint_every,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        save_total_limit=config.keep_checkpoints,
        logging_steps=1,
        logging_nan_inf_filter=False,  # else a NaN is shown as the last good loss
        include_num_input_tokens_seen="non_padding",
        seed=seed,
        data_seed=seed,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        report_to="none",
        disable_tqdm=True,
    )


def _silence(trainer: Any) -> None:
    """Drop the callback that prints every log line: the Reporter speaks."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def _watcher(config: FineTuningConfig, state: Path, reporter: Reporter, stop: threading.Event) -> Any:
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):  # type: ignore[misc] # transformers is untyped here
        """Tells how training goes, marks whole checkpoints, stops when asked to or when the loss is lost."""

        tokens_at_start = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tokens_at_start = state.num_input_tokens_seen
            _forget_after(Path(args.output_dir) / LOG, state.global_step)
            reporter.progress(state.global_step, state.max_steps, "steps")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reporter.progress(state.global_step, state.max_steps, "steps")
            if state.global_step >= state.max_steps and args.eval_strategy != "no":
                control.should_evaluate = True
            if stop.is_set():
                control.should_save = control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            values = _named(logs or {})
            if values:
                reporter.metrics(values, state.global_step)
                _append(Path(args.output_dir) / LOG, {"step": state.global_step, "time": time.time(), **values})
            rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
            _check_finite(values, state.global_step, rates[-1] if rates else config.learning_rate)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            checkpoints.mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return Watcher()


# Trainer's names, and ours: what the loss was measured on belongs into its name.
NAMES = {
    "loss": "train_loss",
    "eval_loss": "validation_loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "num_input_tokens_seen": "tokens",
    "epoch": "epoch",
}


def _named(logs: dict[str, float]) -> dict[str, float]:
    return {NAMES[name]: float(value) for name, value in logs.items() if name in NAMES} if {"loss", "eval_loss"} & set(logs) else {}


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed training does again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _check_finite(values: dict[str, float], step: int, rate: float) -> None:
    for name in ("train_loss", "validation_loss", "gradient_norm"):
        if not math.isfinite(values.get(name, 0.0)):
            raise TrainingError(
                f"the {name.replace('_', ' ')} is {values[name]} at step {step}, learning rate {rate:.3g}",
                hint="Lower fine_tuning.learning_rate or raise warmup_steps; with other settings training begins anew.",
            )


@contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM (preemption, a requeued job) and Ctrl-C end the training after the current step; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _figures(trainer: Any, checkpoint: Path | None, seconds: float, tokens_before: int) -> Trained:
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    validations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    tokens = int(trainer.state.num_input_tokens_seen)
    return Trained(
        model=trainer.model,
        steps=int(trainer.state.global_step),
        tokens=tokens,
        train_loss=float(losses[-1]),
        validation_loss=float(validations[-1]) if validations else None,
        tokens_per_second=(tokens - tokens_before) / seconds if seconds else 0.0,
        resumed_from=checkpoints.step_of(checkpoint) if checkpoint else None,
        log=[{"step": entry["step"], **_named(entry)} for entry in history if _named(entry)],
    )


def quiet_hub() -> None:
    """No look-ups on a model hub while training: everything is on this machine by now."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
