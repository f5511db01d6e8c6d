"""What works on this machine, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from components.common import cores
from components.common.errors import TunelineError
from components.common.paths import existing
from components.common.places import Workdir, cache_dir
from pipelines.findings import Finding, finding

GIB = 2**30


def examine(workdir: Workdir) -> list[Finding]:
    """Findings {"name", "ok", "needed", "found", "hint"}; a needed one that is not ok stops a run."""
    return [
        finding("Python", (3, 11) <= sys.version_info[:2] <= (3, 13), platform.python_version(), "Use Python 3.11, 3.12 or 3.13."),
        finding("machine", platform.machine() == "x86_64" and sys.platform == "linux", platform.platform(), "Supported: Linux x86-64."),
        finding("git", shutil.which("git") is not None, shutil.which("git") or "not found", "Install git; dataset versions need it."),
        *[_package(name, extra) for name, extra in PACKAGES.items()],
        _told("embedded model", _embedded, needed=False),
        _told("Triton server", _triton, needed=False),
        _told("accelerator", _accelerator, needed=False),
        finding(
            "memory", psutil.virtual_memory().total > 4 * GIB, f"{psutil.virtual_memory().total / GIB:.0f} GiB", "The demo needs 4 GiB."
        ),
        finding("cores", True, str(cores.available()), ""),
        _disk(workdir.root),
        _disk(cache_dir()),
        _writable(workdir.root),
    ]


PACKAGES = {
    "kfp": "pipeline", "mlflow": "tracking", "daft": "curation", "dvc": "versioning",
    "torch": "models", "transformers": "models", "peft": "models", "trl": "training", "tritonclient": "packaging",
}  # fmt: skip


def _package(name: str, extra: str) -> Finding:
    try:
        return finding(name, True, importlib.metadata.version(name), "")
    except importlib.metadata.PackageNotFoundError:
        return finding(name, False, "not installed", f"pip install -c constraints.txt 'tuneline[{extra}]'")


def _told(name: str, look: Callable[[], str], *, needed: bool) -> Finding:
    """A finding by a function that returns what it found, or raises a TunelineError with a hint."""
    try:
        return finding(name, True, look(), "", needed=needed)
    except TunelineError as error:
        return finding(name, False, error.message, error.hint, needed=needed)


def _embedded() -> str:
    from components.common.models import embedded_weights

    return str(embedded_weights())


def _triton() -> str:
    from components.common.errors import EngineMissingError
    from components.triton_packaging import engine

    reason = engine.availability()
    if reason:
        raise EngineMissingError(f"{reason}; models are packaged unproven and cannot be promoted", hint=engine.hint())
    return f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}"


def _accelerator() -> str:
    from components.common.errors import EngineMissingError

    try:
        import torch
    except ImportError:
        raise EngineMissingError("torch is not installed", hint="pip install -c constraints.txt 'tuneline[models]'") from None
    if not torch.cuda.is_available():
        raise EngineMissingError("none; training and serving use the CPU", hint="")
    return str(torch.cuda.get_device_name(0))


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(existing(path)).free / GIB
    return finding(f"space for {path}", free > 5, f"{free:.0f} GiB free", "The demo needs 5 GiB.")


def _writable(path: Path) -> Finding:
    ok = os.access(existing(path), os.W_OK)
    return finding(f"{path}", ok, "writable" if ok else "not writable", "Choose another --workdir, or mend its permissions.")
