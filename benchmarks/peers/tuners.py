"""The contestants of the fine-tuning benchmark with their scripts and additional settings."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.peers import Tool

# Rows that tuneline holds at once. On a processor one is the fastest and the leanest:
# its matrices are large enough, and attention over several rows laid end to end costs the square of them all. An optimizer step has the
# same rows for everyone.
MICRO = 1


@dataclass(frozen=True)
class Contestant:
    """A system with its settings.

    Attributes:
        flags: The settings in words, with settings of the run in braces.
        recompute: Whether the backward pass recomputes activations. None: the system's default.
        micro_batch: Whether the batch is divided into micro-batches of the run's size.
    """

    name: str
    system: str
    packing: bool
    script: str
    flags: str
    recompute: bool | None = None
    micro_batch: bool = False


TUNELINE, TRL, FACTORY = "tuneline", "TRL", "LLaMA-Factory"
SCRIPTS = {TUNELINE: "run_tuneline_finetune", TRL: "run_trl", FACTORY: "run_llama_factory"}
FLAGS = {
    TUNELINE: "the stage's defaults except micro_batch_size {micro_batch_size}: activations kept where memory allows, no padding",
    TRL: "SFTConfig's defaults: gradient checkpointing, batches padded to the longest row",
    FACTORY: "`stage: sft`'s defaults: gradient checkpointing, batches padded to the longest row",
}
PACKED = {
    TUNELINE: "the same with packing: true (best fit decreasing)",
    TRL: "the same with packing=True (best fit decreasing)",
    FACTORY: "the same with packing: true and neat_packing: true, without which packed rows attend to each other",
}


def _contestants() -> tuple[Contestant, ...]:
    both = [(system, packing) for packing in (False, True) for system in SCRIPTS]
    return tuple(Contestant(name(s, p), s, p, SCRIPTS[s], PACKED[s] if p else FLAGS[s]) for s, p in both)


def _further_settings(suffix: str, flags: str, *, micro_batch: bool) -> tuple[Contestant, ...]:
    """Return the peers without gradient checkpointing and, with `micro_batch`, with micro-batches."""
    both = [(system, packing) for packing in (False, True) for system in (TRL, FACTORY)]
    return tuple(
        Contestant(f"{name(s, p)}-{suffix}", s, p, SCRIPTS[s], flags, recompute=False, micro_batch=micro_batch)
        for s, p in both
    )


def name(system: str, packing: bool) -> str:
    """Name such as tuneline-off: the system, and whether it packs."""
    return f"{system.lower()}-{'on' if packing else 'off'}"


CONTESTANTS = _contestants()
# TRL's padding_free requires FlashAttention, which has no CPU kernel; a micro-batch of one row has no padding. Of the
# micro-batches of 1, 2 and 4 rows, TRL is the fastest with 1: 9.5, 13.7 and 16.2 CPU s per 1,000 tokens.
FURTHER = (
    *_further_settings("kept", "the same without gradient checkpointing", micro_batch=False),
    *_further_settings(
        "best",
        "the same without gradient checkpointing, and with gradient accumulation over micro-batches of {micro_batch_size}",
        micro_batch=True,
    ),
)


def interpreter(contestant: Contestant, workdir: Path, python: str, given: str | None) -> list[str]:
    """Return the contestant's Python: this one, or that of LLaMA-Factory's environment, which is created if it is missing. Raises PeerError."""
    if contestant.system != FACTORY:
        return [sys.executable, "-P"]
    if given:
        return [given, "-P"]
    torch = importlib.metadata.version("torch").partition("+")[0]
    requires = (
        f"torch=={torch}",
        "llamafactory==0.9.5",
    )  # the same torch as ours, which pip finds for processors alone where there is one
    tool = Tool("LLaMA-Factory", "llama-factory", "run_llama_factory.py", "0.9.5", "", "", requires)
    found = peers.interpreter(tool, workdir, python)[0]
    _mend(workdir / "environments" / tool.package)
    return [found, "-P"]


def _mend(environment: Path) -> None:
    """Remove torchvision, and the extension of torchaudio.

    Without GPU support in torch, their wheels are built for another torch. transformers imports torchvision if it is installed, and fails;
    LLaMA-Factory does not need it. LLaMA-Factory imports torchaudio, whose Python part works without the extension.
    """
    for package in environment.glob("lib/python*/site-packages/torchvision"):
        command = [str(environment / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", package.name]
        subprocess.run(command, check=False, capture_output=True)
    for extension in environment.glob("lib/python*/site-packages/torchaudio/lib/_torchaudio*.so"):
        extension.unlink()
