"""Which device computes: named, or the best that is here. NVIDIA's before Gaudi's before Apple's before the processor."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any, Literal

from components.common.errors import ConfigurationError

Device = Literal["auto", "cuda", "hpu", "mps", "cpu"]

# Dense bf16 FLOP/s of an accelerator as its maker publishes them, by a part of the name that the driver gives it. Without sparsity: the
# doubled figures of data sheets are for matrices of which half is zero. The longest part that fits is taken.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "A10": 125e12,
    "GAUDI2": 432e12,
    "GAUDI3": 1835e12,
}

# By which variable a process sees only some of a machine's accelerators.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _has_hpu() -> bool:
    """Gaudi's torch is told apart by its package; without importing it there is no torch.hpu (Habana's "Getting started" page)."""
    if importlib.util.find_spec("habana_frameworks") is None:
        return False
    import torch

    importlib.import_module("habana_frameworks.torch.core")
    hpu: Any = getattr(torch, "hpu", None)
    return bool(hpu is not None and hpu.is_available())


def _has_mps() -> bool:
    import torch

    return bool(torch.backends.mps.is_available())


# In the order in which "auto" takes them; the processor is always there.
HERE: dict[str, tuple[Callable[[], bool], str]] = {
    "cuda": (_has_cuda, "torch finds no NVIDIA GPU: look at nvidia-smi, and that torch is a CUDA build"),
    "hpu": (_has_hpu, "no Gaudi is found: Habana's torch (habana_frameworks) has to be installed and hl-smi has to show a device"),
    "mps": (_has_mps, "torch finds no Apple GPU"),
    "cpu": (lambda: True, ""),
}


def choose(name: str = "auto") -> str:
    """The device of this name; for "auto" the first of cuda, hpu, mps and cpu that is here. Raises ConfigurationError where it is not."""
    if name == "auto":
        return next(device for device, (is_here, _) in HERE.items() if is_here())
    is_here, missing = HERE[name]
    if not is_here():
        raise ConfigurationError(f"fine_tuning.device is {name}: {missing}", hint="Use device: auto, which takes what is here.")
    return name


def module(device: str) -> Any:
    """torch's module for an accelerator: torch.cuda, torch.hpu, torch.mps. None for the processor."""
    import torch

    return None if device == "cpu" else getattr(torch, device)


def count(device: str) -> int | None:
    """Accelerators of a kind that this process sees; None for the processor, which processes can share."""
    here = module(device)
    counted = getattr(here, "device_count", None)
    return int(counted()) if counted else None


def shares(device: str, each: int) -> list[dict[str, str]]:
    """The accelerators of this machine in parts of `each`: for every part the environment in which a process sees no others.

    No more than one part where nothing can be shared out: on a processor, or where there are fewer than two parts. What this process was
    itself given (CUDA_VISIBLE_DEVICES; HABANA_VISIBLE_MODULES on Gaudi) is what is shared out.
    """
    variable, here = VISIBLE.get(device), count(device) or 0
    if variable is None or here < 2 * each:
        return [{}]
    given = [name for name in os.environ.get(variable, "").split(",") if name] or [str(number) for number in range(here)]
    return [{variable: ",".join(given[first : first + each])} for first in range(0, here - each + 1, each)]


def title(device: str) -> str:
    """The device's own name, such as "NVIDIA H100 80GB HBM3"; "cpu" for a processor."""
    here = module(device)
    named = getattr(here, "get_device_name", None)
    return str(named()) if named else device


def peak_flops(device_title: str) -> float | None:
    """The published dense bf16 FLOP/s of a device, None for one that is not in PEAKS (a processor has no such figure)."""
    plain = device_title.upper().replace("-", " ").replace("GAUDI ", "GAUDI")
    fits = [name for name in PEAKS if re.search(rf"\b{name.upper()}\b", plain)]
    return PEAKS[max(fits, key=len)] if fits else None


def peak_memory(device: str) -> int:
    """The most bytes this process held at once: on the accelerator, or resident in main memory."""
    here = module(device)
    if here is not None and hasattr(here, "max_memory_allocated"):
        return int(here.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kibibytes on Linux, getrusage(2)


def free_memory(device: str) -> int:
    """Bytes that can still be had on the device, or of main memory."""
    here = module(device)
    if here is not None and hasattr(here, "mem_get_info"):
        return int(here.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)
