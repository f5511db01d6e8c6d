"""The clock of all contestants: a callback of transformers' Trainer, which all of them use.

It runs from the beginning of the first step to the end of the last one, and so excludes imports, loading, tokenization and writing the
result. Tokens and slots are counted at each call of the model: a slot is a position in a batch, and a token is a slot without padding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import time
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "trl", "llamafactory")
PROFILE_VARIABLE = "BENCHMARK_PROFILE"  # set: the steps run under torch's profiler, which slows them
OPERATIONS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mkldnn_linear", "linear", "matmul"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy", "logsumexp", "_softmax"),
    "copies": ("copy_", "clone", "contiguous", "fill_", "zero_", "cat", "empty", "to", "_to_copy"),
    "element-wise": (
        "mul",
        "add",
        "add_",
        "mul_",
        "sub",
        "div",
        "silu",
        "pow",
        "mean",
        "rsqrt",
        "neg",
        "sum",
        "silu_backward",
    ),
}


def stopwatch() -> Any:
    """Return the callback; `told()` returns its figures."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):  # type: ignore[misc]
        """Seconds, CPU seconds, tokens, slots and losses of the training."""

        hook: Any = None
        profiler: Any = None

        def __init__(self) -> None:
            self.tokens = self.slots = self.steps = 0
            self.began = self.ended = self.startup = self.cpu_began = self.cpu_ended = 0.0
            self.losses: list[float] = []
            self.types: list[str] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
            self.hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not self.began:
                self.startup = time.time() - _process_began()
                if os.environ.get(PROFILE_VARIABLE):
                    from torch.profiler import ProfilerActivity, profile

                    self.profiler = profile(activities=[ProfilerActivity.CPU])
                    self.profiler.start()
                self.began, self.cpu_began = time.perf_counter(), time.process_time()
                self.tokens = self.slots = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ended, self.cpu_ended, self.steps = time.perf_counter(), time.process_time(), int(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                self.losses.append(round(float(logs["loss"]), 6))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.hook.remove()
            if self.profiler:
                self.profiler.stop()

        def _count(self, model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            self.slots += given["input_ids"].numel()
            self.tokens += tokens_in(given["input_ids"], given.get("attention_mask"))

        def told(self) -> dict[str, Any]:
            return {
                "tokens": self.tokens,
                "slots": self.slots,
                "steps": self.steps,
                "seconds": round(self.ended - self.began, 3),
                "cpu": round(self.cpu_ended - self.cpu_began, 3),
                "startup": round(self.startup, 3),
                "losses": self.losses,
                "types": self.types,
                "threads": _threads(),
                "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "versions": versions(),
                "profile": shares_of(self.profiler.key_averages()) if self.profiler else {},
            }

    return Stopwatch()


def shares_of(averages: Any) -> dict[str, float]:
    """Return the share of the operations' own time by kind of operation, from torch's profiler."""
    times = dict.fromkeys([*OPERATIONS, "rest"], 0.0)
    for average in averages:
        name = average.key.removeprefix("aten::").removesuffix("_for_cpu")
        exact = [kind for kind, names in OPERATIONS.items() if name in names]
        partial = [kind for kind in ("attention", "loss") if any(part in name for part in OPERATIONS[kind])]
        times[next(iter(partial or exact), "rest")] += average.self_cpu_time_total
    total = sum(times.values())
    return {kind: time_of_kind / total for kind, time_of_kind in times.items()} if total else times


def tokens_in(ids: Any, mask: Any) -> int:
    """Return the tokens of a batch that are not padding, from its mask: None (all), two dimensions, or four (a token attends at least to itself)."""
    import torch

    if mask is None:
        return int(ids.numel())
    if mask.dim() == 2:
        return int((mask != 0).sum())
    itself = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return int((itself if itself.dtype == torch.bool else itself == 0).sum())


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _process_began() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _threads() -> int:
    import torch

    return int(torch.get_num_threads())


def say(figures: dict[str, Any]) -> None:
    """Print the line that the benchmark reads, after the output of the trainer."""
    print("\n" + json.dumps(figures), flush=True)
