"""Compute devices: selection (NVIDIA before Gaudi before Apple before CPU), counts, memory and peak FLOP/s."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from components.common.models.accelerators import TERA, load_accelerators
from components.common.runtime.errors import ConfigurationError

Device = Literal["auto", "cuda", "hpu", "mps", "cpu"]

# Dense bf16 FLOP/s by a part of the driver's device name; the longest match applies.
PEAK_BF16_FLOPS = {device.driver: device.bf16 * TERA for device in load_accelerators().values() if device.driver}

# Environment variable that limits the accelerators visible to a process.
VISIBLE_DEVICES_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


def _is_available(device: str) -> bool:
    import torch

    if device == "hpu":  # torch.hpu exists only after an import of Habana's package ("Getting started")
        if importlib.util.find_spec("habana_frameworks") is None:
            return False
        importlib.import_module("habana_frameworks.torch.core")
    module = torch.backends.mps if device == "mps" else getattr(torch, device, None)
    return module is not None and bool(module.is_available())


# In the order of preference of "auto"; the CPU is always available.
DEVICE_PROBES: dict[str, tuple[Callable[[], bool], str]] = {
    "cuda": (
        partial(_is_available, "cuda"),
        "torch finds no NVIDIA GPU",
    ),
    "hpu": (
        partial(_is_available, "hpu"),
        "torch finds no Gaudi",
    ),
    "mps": (partial(_is_available, "mps"), "torch finds no Apple GPU"),
    "cpu": (lambda: True, ""),
}
# By device: the conditions that a user can check if the device is not available.
DEVICE_CONDITIONS = {
    "cuda": "that nvidia-smi lists the GPU and that torch is a CUDA build",
    "hpu": "that hl-smi lists the Gaudi and that habana_frameworks is installed",
    "mps": "that this machine has an Apple GPU",
}


def select_device(name: str = "auto") -> str:
    """Return the device; "auto" selects the first available of cuda, hpu, mps and cpu.

    Raises:
        ConfigurationError: the device is not available.
    """
    if name == "auto":
        return next(device for device, (is_present, _) in DEVICE_PROBES.items() if is_present())
    is_present, missing = DEVICE_PROBES[name]
    if not is_present():
        raise ConfigurationError(
            f"fine_tuning.device is {name}: {missing}",
            hint=f"Check {DEVICE_CONDITIONS[name]}, or set fine_tuning.device to auto to select an available device.",
        )
    return name


def get_torch_module(device: str) -> Any:
    """Return torch's module of an accelerator (torch.cuda, torch.hpu, torch.mps); None for the CPU."""
    import torch

    return None if device == "cpu" else getattr(torch, device)


def count_devices(device: str) -> int | None:
    """Return the number of accelerators visible to this process; None for the CPU, which processes can share."""
    module = get_torch_module(device)
    return int(module.device_count()) if hasattr(module, "device_count") else None


def partition_devices(device: str, per_process: int) -> list[dict[str, str]]:
    """Partition this machine's accelerators; return one environment per process.

    Only accelerators visible to this process (CUDA_VISIBLE_DEVICES; HABANA_VISIBLE_MODULES on Gaudi) are partitioned.

    Args:
        per_process: number of accelerators per environment.

    Returns:
        Environment variables per process. One empty environment for the CPU, or for fewer than 2 × `per_process`
        accelerators.
    """
    variable, count = VISIBLE_DEVICES_VARIABLES.get(device), count_devices(device) or 0
    if variable is None or count < 2 * per_process:
        return [{}]
    visible = list(filter(None, os.environ.get(variable, "").split(","))) or list(map(str, range(count)))
    starts = range(0, count - per_process + 1, per_process)
    return [{variable: ",".join(visible[start : start + per_process])} for start in starts]


def get_device_name(device: str) -> str:
    """Return the device's name, such as "NVIDIA H100 80GB HBM3"; "cpu" for a CPU."""
    module = get_torch_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device


def get_peak_flops(device_title: str) -> float | None:
    """Return the published dense bf16 FLOP/s of a device; None for a device that is not in PEAK_BF16_FLOPS.

    Args:
        device_title: name of the device, as returned by `get_device_name`.
    """
    name = _find_driver_name(device_title)
    return PEAK_BF16_FLOPS[name] if name else None


def get_design_watts(device_title: str) -> float | None:
    """Return the thermal design power of a device in watts; None if accelerators.yaml has none for it.

    Args:
        device_title: name of the device, as returned by `get_device_name`.
    """
    name = _find_driver_name(device_title)
    return next((a.watts for a in load_accelerators().values() if name and a.driver == name), None)


def _find_driver_name(device_title: str) -> str | None:
    """Return the longest driver name in accelerators.yaml that the device's name contains."""
    plain = device_title.upper().replace("-", " ").replace("GAUDI ", "GAUDI")
    matches = [name for name in PEAK_BF16_FLOPS if re.search(rf"\b{name.upper()}\b", plain)]
    return max(matches, key=len) if matches else None


def get_peak_memory_bytes(device: str) -> int:
    """Return the peak memory of this process: accelerator memory, or resident main memory on the CPU."""
    module = get_torch_module(device)
    if hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kibibytes on Linux, getrusage(2)


def get_free_memory_bytes(device: str) -> int:
    """Return the free memory of the device; on the CPU, the available main memory."""
    module = get_torch_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def get_total_memory_bytes(device: str) -> int:
    """Return the memory of the device; on the CPU, the main memory, or the limit of the control group if it is lower."""
    module = get_torch_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info()[1])
    import psutil

    limit = Path("/sys/fs/cgroup/memory.max")  # cgroup v2, as in a container
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    total = int(psutil.virtual_memory().total)
    return min(total, int(text)) if text.isdecimal() else total
