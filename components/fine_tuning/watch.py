"""The eye on a training: what it reports while it runs, when it saves, and when it has to stop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.progress import Reporter
from components.fine_tuning import checkpoints, health
from components.fine_tuning.config import FineTuningConfig

LOG = "training.jsonl"
BOARD = "tensorboard"
# The trainers' names, and ours: what a figure was measured on belongs into its name.
NAMES = {
    "loss": "train_loss",
    "eval_loss": "validation_loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "num_input_tokens_seen": "tokens",
    "epoch": "epoch",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "preference_accuracy",
    "eval_rewards/margins": "validation_reward_margin",
    "eval_rewards/accuracies": "validation_preference_accuracy",
}


def named(logs: dict[str, Any]) -> dict[str, float]:
    """A trainer's log line by our names; empty for a line without a loss, such as the summary at the end."""
    if not {"loss", "eval_loss"} & set(logs):
        return {}
    return {NAMES[name]: float(value) for name, value in logs.items() if name in NAMES}


@dataclass
class Watched:
    """What a watcher is given: the recipe, where the training's state lies, and what it asks of others."""

    config: FineTuningConfig
    state: Path
    reporter: Reporter
    stop: threading.Event
    rows_of_step: Callable[[int], Sequence[str]]
    trainer: Any = None
    first_step: Callable[[], None] = field(default=lambda: None)


def watcher(watched: Watched) -> Any:
    """A callback for transformers' Trainer."""
    from transformers import TrainerCallback

    config, reporter = watched.config, watched.reporter

    class Watcher(TrainerCallback):  # type: ignore[misc] # transformers is untyped here
        """Tells how training goes, marks whole checkpoints, stops when asked to or when the loss is lost."""

        board: Any = None
        tokens = 0
        clock = 0.0
        began = 0.0
        step_seconds = 0.0
        told = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer = watched.trainer
            trainer.order.set_epoch(int(state.epoch or 0))  # where several processes skip, transformers does not reach it
            if state.global_step and (checkpoint := watched.state / f"checkpoint-{state.global_step}").exists():
                _restore(trainer, checkpoint)
            if _is_first(trainer):
                forget_after(watched.state / LOG, state.global_step)
                self.board = _board(watched.state / BOARD, state.global_step)
                for line in lines_of(watched.state / LOG)[:1] if not state.global_step else []:
                    _draw(self.board, named_figures(line), 0)
            self.tokens, self.clock = state.num_input_tokens_seen, time.perf_counter()
            reporter.progress(state.global_step, state.max_steps, "steps")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not self.began:
                watched.first_step()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _settle(trainer=watched.trainer)
            self.step_seconds = time.perf_counter() - self.began
            reporter.progress(state.global_step, state.max_steps, "steps")
            if _anyone(watched.trainer, watched.stop.is_set()):
                control.should_save = control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            values = named(logs or {})
            if not values:
                return
            if "train_loss" in values:
                values |= self._pace(state)
            if _is_first(watched.trainer):
                reporter.metrics(values, state.global_step)
                _append(watched.state / LOG, {"step": state.global_step, "time": time.time(), **values})
                _draw(self.board, values, state.global_step)
            rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
            rate = rates[-1] if rates else config.learning_rate
            health.check_finite(values, state.global_step, rate, watched.rows_of_step)
            self._look(state)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stopped_early(state.log_history, config.early_stopping):
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer, checkpoint = watched.trainer, watched.state / f"checkpoint-{state.global_step}"
            trainer.accelerator.wait_for_everyone()  # each process writes its random numbers
            if _is_first(trainer):
                if _keeps_trainable(config):
                    checkpoints.save_trainable(trainer.model, checkpoint)
                checkpoints.mark_complete(checkpoint)
                checkpoints.rotate(watched.state, config.keep_checkpoints)
            trainer.accelerator.wait_for_everyone()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.board is not None:
                self.board.close()
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            if not self.told and (sentence := health.standing_still(losses)):
                reporter.note(sentence)

        def _pace(self, state: Any) -> dict[str, float]:
            """Tokens and seconds of the step that just ended; seconds count from the end of the step before."""
            now, trainer = time.perf_counter(), watched.trainer
            seconds, done = now - self.clock, state.num_input_tokens_seen - self.tokens
            waited, trainer.waited = trainer.waited, 0.0
            self.clock, self.tokens = now, state.num_input_tokens_seen
            pace = {"seconds": seconds, "step_seconds": self.step_seconds, "waited_seconds": waited}
            return {"tokens_per_second": done / (self.step_seconds + waited), **pace}

        def _look(self, state: Any) -> None:
            """Say once, early enough to do something about it, that the loss does not move."""
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            if not self.told and len(losses) == health.LOOKED_AT and (sentence := health.standing_still(losses)):
                self.told = True
                reporter.note(sentence)

    return Watcher()


def stopped_early(history: Sequence[dict[str, Any]], patience: int | None) -> bool:
    """Whether the last `patience` validations brought no new lowest loss."""
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    if patience is None or not losses:
        return False
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed training does again, and one that a kill tore."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step and (step or "train_loss" not in line)]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def named_figures(line: dict[str, Any]) -> dict[str, float]:
    """The figures of a line of the log."""
    return {name: value for name, value in line.items() if name not in ("step", "time")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a training's log, without one that a kill tore."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's event files; what was drawn of steps that are done again is dropped by TensorBoard itself."""
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0, write_to_disk=True)


def _draw(board: Any, values: dict[str, float], step: int) -> None:
    if board is not None:
        for name, value in values.items():
            board.add_scalar(name, value, step)
        board.flush()


def _settle(trainer: Any) -> None:
    """Wait for an accelerator to have done what it was told: a step has ended when its work has, not when that is queued."""
    import torch

    device = trainer.accelerator.device.type
    if device != "cpu":
        getattr(torch, device).synchronize()


def _is_first(trainer: Any) -> bool:
    return bool(trainer.is_world_process_zero())


def _anyone(trainer: Any, here: bool) -> bool:
    """Whether any process was asked to stop: all have to stop after the same step."""
    if trainer.accelerator.num_processes == 1:
        return here
    import torch

    asked = torch.tensor([float(here)], device=trainer.accelerator.device)
    return bool(trainer.accelerator.reduce(asked, "sum").item())


def _keeps_trainable(config: FineTuningConfig) -> bool:
    """Whether a checkpoint needs its trained tensors beside what the trainer saves: with an adapter it does, unless that is sharded."""
    return config.adaptation != "full" and config.strategy == "ddp"


def _restore(trainer: Any, checkpoint: Path) -> None:
    if (checkpoint / checkpoints.TRAINABLE).exists():
        checkpoints.restore_trainable(trainer.model, checkpoint)
