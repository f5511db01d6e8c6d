"""Checks of this machine and its packages, with a hint for each failed check (`tuneline doctor`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys

import psutil

from components.common.models import model_loading, quantization_env
from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime import cpu_cores, mounts
from components.common.runtime.errors import TunelineError
from components.common.runtime.filesystem import find_nearest_existing_path
from components.common.workspace.artifact_store import Workdir, get_cache_folder
from components.triton_packaging import triton_installation

GIB_BYTES = 2**30
REQUIRED_PACKAGES = {  # with the tuneline extra that installs each package
    "kfp": "pipeline", "mlflow": "tracking", "daft": "curation", "dvc": "versioning",
    "torch": "models", "transformers": "models", "peft": "models", "trl": "training", "tritonclient": "packaging",
}  # fmt: skip


def check_machine(workdir: Workdir) -> list[CheckResult]:
    """Return the results of the checks of this machine. A run fails if a needed check fails."""
    git, memory = shutil.which("git"), psutil.virtual_memory().total
    is_supported_python = (3, 11) <= sys.version_info[:2] <= (3, 13)
    is_supported_machine = platform.machine() == "x86_64" and sys.platform == "linux"
    results = [
        check_result("Python", is_supported_python, platform.python_version(), "Use Python 3.11, 3.12 or 3.13."),
        check_result("machine", is_supported_machine, platform.platform(), "Use a Linux x86-64 machine."),
        check_result("git", git is not None, git or "not found", "Install git; data versioning requires it."),
    ]
    for name, extra in REQUIRED_PACKAGES.items():
        hint = f"Run: pip install -c constraints.txt 'tuneline[{extra}]'"
        try:
            results.append(check_result(name, True, importlib.metadata.version(name), ""))
        except importlib.metadata.PackageNotFoundError:
            results.append(check_result(name, False, "not installed", hint))
    try:
        embedded = str(model_loading.locate_embedded_weights())
        results.append(check_result("embedded model", True, embedded, "", needed=False))
    except TunelineError as error:
        results.append(check_result("embedded model", False, error.message, error.hint, needed=False))
    if reason := triton_installation.unavailable_reason():
        found, hint = (
            f"{reason}; models are packaged unproven and cannot be promoted",
            triton_installation.installation_hint(),
        )
    else:
        found, hint = f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}", ""
    results.append(check_result("Triton server", not reason, found, hint, needed=False))
    reason = quantization_env.missing_reason()
    found = reason or quantization_env.REQUIREMENTS[0]
    hint = f"Run `{quantization_env.CREATE_COMMAND}` for calibrated weights (int4-gptq)."
    results.append(check_result("llm-compressor", not reason, found, hint, needed=False))
    try:
        import torch

        has_accelerator, hint = torch.cuda.is_available(), ""
        found = torch.cuda.get_device_name(0) if has_accelerator else "no GPU; training and serving use the CPU"
    except ImportError:
        has_accelerator, found = False, "torch is not installed"
        hint = "Run: pip install -c constraints.txt 'tuneline[models]'"
    results += [
        check_result("accelerator", has_accelerator, found, hint, needed=False),
        check_result(
            "memory",
            memory > 4 * GIB_BYTES,
            f"{memory / GIB_BYTES:.0f} GiB",
            "Use a machine with more than 4 GiB of memory for the demo.",
        ),
        check_result("cores", True, str(cpu_cores.count_available_cores()), ""),
    ]
    for path in (workdir.root, get_cache_folder()):
        free = shutil.disk_usage(find_nearest_existing_path(path)).free / GIB_BYTES
        results.append(
            check_result(f"space for {path}", free > 5, f"{free:.0f} GiB free", "Free more than 5 GiB for the demo.")
        )
    is_writable = os.access(find_nearest_existing_path(workdir.root), os.W_OK)
    found, hint = (
        "writable" if is_writable else "not writable",
        "Make the workdir writable, or choose another --workdir.",
    )
    results.append(check_result(str(workdir.root), is_writable, found, hint))
    if warning := mounts.format_database_warning(os.environ.get("MLFLOW_TRACKING_URI") or workdir.tracking_uri):
        found, _, hint = warning.rpartition(". ")
        results.append(check_result("MLflow database", False, found, f"{hint}.", needed=False))
    return results
