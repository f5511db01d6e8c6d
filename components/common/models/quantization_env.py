"""The quantization environment: the virtual environment in which llm-compressor calibrates quantized weights.

llm-compressor requires an older transformers than tuneline. The environment contains llm-compressor with the versions it
requires, and a .pth file that adds all other packages of tuneline's environment, such as torch.
"""

# `python -m components.common.models.quantization_env` creates the environment, in `<sys.prefix>/quantization` or in the
# folder in TUNELINE_QUANTIZATION_ENV. Stages do not install it.

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

from components.common.runtime import virtual_environments
from components.common.runtime.errors import ConfigurationError, EngineMissingError, TunelineError

REQUIREMENTS = ("llmcompressor==0.14.0.1", "transformers==5.17.0", "compressed-tensors==0.19.0")
CREATE_COMMAND = "python -m components.common.models.quantization_env"
CHECK_SCRIPT = "from llmcompressor import oneshot"
MARKER_FILENAME = "tuneline_environment.json"


def get_environment_folder() -> Path:
    """Return the folder of the quantization environment on this machine; it may not exist."""
    return Path(os.environ.get("TUNELINE_QUANTIZATION_ENV") or Path(sys.prefix) / "quantization").absolute()


def get_python() -> Path:
    """Return the environment's interpreter; it may not exist."""
    return virtual_environments.get_python(get_environment_folder())


def missing_reason() -> str | None:
    """Return the reason why the quantization environment cannot be used, or None. Imports nothing from it."""
    folder = get_environment_folder()
    if not get_python().exists():
        return f"the quantization environment in {folder} does not exist"
    marker = folder / MARKER_FILENAME
    if not marker.exists() or marker.read_text(encoding="utf-8") != describe_complete():
        return f"the quantization environment in {folder} is incomplete or has other versions"
    return None


def describe_complete() -> str:
    """Return the content of the marker file, which is written after the check of the environment."""
    return json.dumps({"python": platform.python_version(), "requirements": REQUIREMENTS}) + "\n"


def list_versions() -> list[str]:
    """Return the environment's own distributions, and torch, as "name-version"."""
    own = sorted(
        path.stem for path in virtual_environments.get_site_packages(get_environment_folder()).glob("*.dist-info")
    )
    return [*own, f"torch-{importlib.metadata.version('torch')}"]


def check_environment(quantization: str) -> None:
    """Check that the environment exists, which a format of weights requires.

    Raises:
        ConfigurationError: the environment does not exist, is incomplete or has other versions.
    """
    if reason := missing_reason():
        raise ConfigurationError(
            f"{quantization} weights require llm-compressor, but {reason}",
            hint=f"Run `{CREATE_COMMAND}`, or set triton_packaging.quantization to fp8.",
        )


def create_environment() -> Path:
    """Create or repair the quantization environment and return its folder; a complete environment is not changed.

    Raises:
        EngineMissingError: torch is not installed.
        ConfigurationError: the folder has other content.
        TunelineError: pip fails, or llm-compressor cannot be imported.
    """
    if missing_reason() is None:
        return get_environment_folder()
    folder = get_environment_folder()
    packages = Path(sysconfig.get_path("purelib"))
    if not (packages / "torch").exists():
        raise EngineMissingError("torch is not installed", hint="Install tuneline's models extra.")
    # The environment's own packages precede those of tuneline's environment.
    virtual_environments.create(folder, f"{packages}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(get_python()), "--disable-pip-version-check"]
    virtual_environments.run_command([*pip, "install", "--quiet", *REQUIREMENTS])
    virtual_environments.run_command([str(get_python()), "-I", "-c", CHECK_SCRIPT])
    (folder / MARKER_FILENAME).write_text(describe_complete(), encoding="utf-8")
    return folder


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog=CREATE_COMMAND,
        description=f"Create or repair the quantization environment in {get_environment_folder()} (about 150 MB). The "
        "content of an incomplete or older environment is replaced. TUNELINE_QUANTIZATION_ENV sets another folder.",
    ).parse_args()
    try:
        print(f"quantization environment: {create_environment()}")
    except TunelineError as error:
        sys.exit(f"{error.message}\n{error.hint}")
