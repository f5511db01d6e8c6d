"""Training callbacks: metrics, TensorBoard, checkpoint completion, early stopping, and stopping on a signal."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder
from components.common.cost.budgets import BudgetClock
from components.common.runtime.reporters import Reporter
from components.fine_tuning import checkpoints, reward_guards, rewards, sample_answers, training_health
from components.fine_tuning.config import Recipe

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

LOG_FILENAME = "training.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
# Metric names of TRL's trainers and of tuneline, whose names include the split.
METRIC_NAMES = {
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
    "margin": "reward_margin",
    "accuracy": "preference_accuracy",
    "mean_reward": "mean_reward",
    "eval_margin": "validation_reward_margin",
    "eval_accuracy": "validation_preference_accuracy",
    "eval_mean_reward": "validation_mean_reward",
}
# Metrics of objectives with rewards.
REWARD_METRICS = {
    "reward": "reward",
    "eval_reward": "validation_reward",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "answer_tokens",
    "eval_completions/mean_length": "validation_answer_tokens",
    "completions/clipped_ratio": "truncated_answers",
    "frac_reward_zero_std": "equal_reward_groups",
}
UNSCORED_METRIC = re.compile(r"unscored/(\w+)")  # share of answers without a score of a reward that a service computes
REWARD_METRIC = re.compile(r"(?P<split>eval_)?rewards/(?P<name>\w+)/mean")  # TRL's name of the mean of one reward
LogLine = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """An alarm of a guard: the step after which it was raised, and its sentence."""

    step: int
    sentence: str


@dataclass(eq=False)
class TrainingEvents:
    """Handlers of the trainer's events.

    Attributes:
        config: The recipe.
        folder: Folder of checkpoints and log.
        reporter: Receives progress and metrics.
        stop: Event that stops the training after the current step.
        get_step_rows: Function that returns the row ids of a step, counted from 1.
        verify_lock: Function that raises BusyError if another training writes to the folder; called before every write.
        budget: Cost of the training, and the budgets that it counts against.
        reached_limit: Key and figures of the limit that stopped training.
        trainer: The trainer, set once it is built.
        on_wrapped: Function called after the trainer has wrapped the model, before it reads rows.
        on_first_step: Function called before the first step.
    """

    config: Recipe
    folder: Path
    reporter: Reporter
    stop: threading.Event
    get_step_rows: Callable[[int], Sequence[str]]
    verify_lock: Callable[[], None]
    budget: BudgetClock
    reached_limit: tuple[str, str] | None = None
    trainer: Trainer = None
    on_wrapped: Callable[[], None] = field(default=lambda: None)
    on_first_step: Callable[[], None] = field(default=lambda: None)
    board: SummaryWriter | None = None
    tokens_seen: int = 0
    last_step_end: float = 0.0
    step_start: float = 0.0
    step_seconds: float = 0.0
    is_stall_reported: bool = False
    alarms: list[Alarm] = field(default_factory=list)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        from accelerate.utils import broadcast_object_list

        trainer = self.trainer
        self.on_wrapped()
        self.alarms = list_alarms(state.log_history, self.config)
        # All processes save in the folder that the first one creates, and load the files that the first one sees.
        checkpoint = self.folder / f"checkpoint-{state.global_step}"
        chosen: list[Any] = [None, None]
        if trainer.is_world_process_zero():
            self.verify_lock()  # loading the model takes minutes, in which another training may have taken over
            has_trainable = state.global_step and (checkpoint / checkpoints.TRAINABLE_FILENAME).exists()
            chosen = [checkpoints.create_saving_folder(self.folder), has_trainable]
        trainer.saving_folder, has_trainable = broadcast_object_list(chosen)
        trainer.order.set_epoch(int(state.epoch or 0))  # transformers skips this with several processes
        if has_trainable:
            checkpoints.restore_trainable(trainer.model, checkpoint)
        if self.trainer.is_world_process_zero():
            from tensorboardX import SummaryWriter

            log_path = self.folder / LOG_FILENAME
            truncate_log(log_path, state.global_step)
            if self.config.sample_prompts or self.config.objective_spec.generates:
                truncate_log(self.folder / sample_answers.SAMPLES_FILENAME, state.global_step)
            # TensorBoard discards points from `purge_step` on; a resumed training logs them again.
            purge_step = state.global_step + 1 if state.global_step else 0
            self.board = SummaryWriter(str(self.folder / TENSORBOARD_FOLDER), purge_step=purge_step, write_to_disk=True)
            if not state.global_step:
                for line in read_log(log_path)[:1]:
                    values = {name: value for name, value in line.items() if name not in ("step", "time")}
                    self._write_scalars(values, 0)
        self.tokens_seen, self.last_step_end = state.num_input_tokens_seen, time.perf_counter()
        self.reporter.progress(state.global_step, state.max_steps, "steps")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not self.step_start:
            self.on_first_step()
            self.reporter.progress(state.global_step, state.max_steps, "steps")  # the first validation is no step
        self.step_start = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        import torch

        self.verify_lock()  # the log and a checkpoint follow
        accelerator, waited = self.trainer.accelerator, 0.0
        if accelerator.device.type == "cuda":
            waited = self.trainer.fetch_ahead()
        if accelerator.device.type != "cpu":  # wait for the device, which computes asynchronously
            getattr(torch, accelerator.device.type).synchronize()
        self.step_seconds = time.perf_counter() - self.step_start - waited
        self.reporter.progress(state.global_step, state.max_steps, "steps")
        if self.trainer.is_world_process_zero():
            self.reached_limit = self.budget.describe_exhausted()
        # All processes stop after the same step, even if only one received the signal or reached a limit.
        requests = torch.tensor(
            [float(self.stop.is_set() or self.reached_limit is not None)], device=accelerator.device
        )
        if accelerator.reduce(requests, "sum").item():
            control.should_save = control.should_training_stop = True
            self.stop.set()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if not logs or not {"loss", "eval_loss"} & logs.keys():
            return  # the trainer's final summary
        values = rename_metrics(logs)
        if "train_loss" in values:
            # Measured from the end of the previous step.
            now, trainer = time.perf_counter(), self.trainer
            seconds, tokens = now - self.last_step_end, state.num_input_tokens_seen - self.tokens_seen
            waited, trainer.waited = trainer.waited, 0.0
            self.last_step_end, self.tokens_seen = now, state.num_input_tokens_seen
            values |= {
                "tokens_per_second": tokens / (self.step_seconds + waited),
                "seconds": seconds,
                "step_seconds": self.step_seconds,
                "waited_seconds": waited,
            }
        if self.trainer.is_world_process_zero():
            self.reporter.metrics(values, state.global_step)
            line = {"step": state.global_step, "time": time.time(), **values}
            self.verify_lock()
            with (self.folder / LOG_FILENAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._write_scalars(values, state.global_step)
        rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
        rate = rates[-1] if rates else self.config.learning_rate
        training_health.check_finite(values, state.global_step, rate, self.get_step_rows)
        losses = _list_losses(state)
        if not self.is_stall_reported and len(losses) == training_health.STALL_CHECK_STEP:
            self.is_stall_reported = self._report_stall(losses)
        is_armed = "train_loss" in values and _is_armed(self.alarms, state.global_step, self.config)
        if is_armed and (alarm := find_alarm(state.log_history, self.config)):
            self._react_to_alarm(alarm, state, control)

    def _react_to_alarm(self, alarm: str, state: TrainerState, control: TrainerControl) -> None:
        before = compute_rate_factor(self.alarms, self.config)
        self.alarms.append(Alarm(state.global_step, alarm))
        after = compute_rate_factor(self.alarms, self.config)
        if self.config.grpo.on_alarm == "stop":  # the last weights are validated too: they may be the only ones
            control.should_evaluate = self.trainer.eval_dataset is not None
            control.should_save = control.should_training_stop = True
            self.reporter.note(f"training stops: {alarm}")
        elif after < before:
            # A checkpoint has these rates of the scheduler and the optimizer.
            scheduler, groups = self.trainer.lr_scheduler, self.trainer.optimizer.param_groups
            scheduler.base_lrs = [rate * after / before for rate in scheduler.base_lrs]
            for group in groups:
                group["lr"] *= after / before
            scheduler._last_lr = [group["lr"] for group in groups]  # the rate that the trainer logs
            self.reporter.note(
                f"warning: {alarm}; the learning rate is lowered to {after:.3g} times its scheduled value"
            )
        else:
            self.reporter.note(f"warning: {alarm}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.config.sample_prompts and self.trainer.is_world_process_zero():
            self.verify_lock()
            with self.trainer.accelerator.autocast():
                sample_answers.log_answers(
                    self.folder / sample_answers.SAMPLES_FILENAME,
                    state.global_step,
                    self.trainer.accelerator.unwrap_model(self.trainer.model),
                    self.trainer.processing_class,
                    self.config.sample_prompts,
                    self.config.sample_tokens,
                )
        if has_stopped_early(state.log_history, self.config.early_stopping):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        trainer = self.trainer
        checkpoint = trainer.saving_folder / f"checkpoint-{state.global_step}"
        trainer.accelerator.wait_for_everyone()  # each process writes its random state
        if self.trainer.is_world_process_zero():
            if self.config.strategy != "zero3" and not self.config.has_sharded_checkpoints:
                checkpoints.save_trainable(trainer.model, checkpoint)
            checkpoints.publish(checkpoint, self.folder, self.verify_lock)
            self.verify_lock()
            checkpoints.rotate(self.folder, self.config.keep_checkpoints)
        trainer.accelerator.wait_for_everyone()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self.board is not None:
            self.board.close()
        if not self.is_stall_reported:
            self._report_stall(_list_losses(state))

    def _report_stall(self, losses: Sequence[float]) -> bool:
        sentence = training_health.describe_stall(losses, are_rewards=self.config.objective_spec.has_rewards)
        if sentence:
            self.reporter.note(sentence)
        return bool(sentence)

    def _write_scalars(self, values: Mapping[str, float], step: int) -> None:
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


def build_callback(
    config: Recipe,
    folder: Path,
    reporter: Reporter,
    stop: threading.Event,
    get_step_rows: Callable[[int], Sequence[str]],
    verify_lock: Callable[[], None],
    budget: BudgetClock,
) -> TrainingEvents:
    """Return a callback for transformers' Trainer; for the arguments see `TrainingEvents`."""
    from transformers import TrainerCallback

    class TrainingCallback(TrainingEvents, TrainerCallback):  # type: ignore[misc] # transformers is untyped here
        """`TrainingEvents`, with no-op handlers for all other events."""

    return TrainingCallback(config, folder, reporter, stop, get_step_rows, verify_lock, budget)


def _list_losses(state: TrainerState) -> list[float]:
    """Return the training losses; of an objective with rewards the negative rewards, because its loss does not fall."""
    steps = [entry for entry in state.log_history if "loss" in entry]
    return [-entry["reward"] if "reward" in entry else entry["loss"] for entry in steps]


def rename_metrics(logs: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are logged, by their names in METRIC_NAMES and REWARD_METRICS; of each reward as reward_NAME
    and, if a service computes it, unscored_NAME.
    """
    values = {}
    has_rewards = "reward" in logs or "eval_reward" in logs
    for name, value in logs.items():
        if name in REWARD_METRICS and not has_rewards:  # TRL logs some of them for other objectives
            continue
        found = REWARD_METRIC.fullmatch(name)
        reward_name = f"{'validation_' if found['split'] else ''}reward_{found['name']}" if found else ""
        if unscored := UNSCORED_METRIC.fullmatch(name):
            reward_name = f"unscored_{unscored[1]}"
        if value is not None and (renamed := METRIC_NAMES.get(name) or REWARD_METRICS.get(name) or reward_name):
            values[renamed] = float(value)
    return values


def find_alarm(history: Sequence[LogLine], config: Recipe) -> str | None:
    """Return the alarm of a guard at the end of the trainer's `log_history`; None without rewards or alarm."""
    if not config.objective_spec.has_rewards:
        return None
    entries = [entry for entry in history if "loss" in entry]
    window = reward_guards.WINDOW
    if len(entries) < 2 * window:
        return None
    steps = [rename_metrics(entry) for entry in (*entries[:window], *entries[-window:])]
    names = rewards.name_rewards(config.grpo.rewards)
    recorded = [name for name, entry in zip(names, config.grpo.rewards, strict=True) if not entry.weight]
    return reward_guards.find_alarm(steps, config.grpo.max_kl, recorded)


def list_alarms(history: Sequence[LogLine], config: Recipe) -> list[Alarm]:
    """Return the alarms of the guards during the training: the first; all if they lower the learning rate, also at its limit."""
    entries = [entry for entry in history if "loss" in entry] if config.objective_spec.has_rewards else []
    alarms: list[Alarm] = []
    for count, entry in enumerate(entries, start=1):
        if _is_armed(alarms, entry["step"], config) and (alarm := find_alarm(entries[:count], config)):
            alarms.append(Alarm(entry["step"], alarm))
    return alarms


def _is_armed(alarms: Sequence[Alarm], step: int, config: Recipe) -> bool:
    """Return whether the guards are checked after a step; after an alarm only once the window has no earlier step."""
    return not alarms or (
        config.grpo.on_alarm == "lower_learning_rate" and step - alarms[-1].step >= reward_guards.WINDOW
    )


def compute_rate_factor(alarms: Sequence[Alarm], config: Recipe) -> float:
    """Return the factor on the learning rate after these alarms."""
    if config.grpo.on_alarm != "lower_learning_rate":
        return 1.0
    return max(config.grpo.min_rate_factor, config.grpo.alarm_rate_factor ** len(alarms))


def has_stopped_early(history: Sequence[LogLine], max_validations: int | None) -> bool:
    """Return whether the last `max_validations` validations did not lower the loss.

    Args:
        history: The trainer's `log_history`.
        max_validations: Number of validations. None: the result is False.
    """
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    if max_validations is None or not losses:
        return False
    return len(losses) - 1 - losses.index(min(losses)) >= max_validations


def truncate_log(path: Path, step: int) -> None:
    """Remove log lines of steps that a resumed training repeats, and an incomplete line.

    Args:
        path: The training's log.
        step: Last step to keep. 0: keep only the validation loss before training. -1: remove all lines.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [
        line
        for line in lines
        if line.endswith("}") and json.loads(line)["step"] <= step and (step or "train_loss" not in line)
    ]
    # A new file: a training run that lost its lock may still append to the old one.
    artifact_folder.write_atomically(path, "".join(line + "\n" for line in kept))


def read_log(path: Path) -> list[LogLine]:
    """Return the lines of a training run's log, except an incomplete line; empty if the log does not exist.

    Each line has the keys `step` and `time` (seconds since 1970), and the logged metrics of `rename_metrics`.
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines
