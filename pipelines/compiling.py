"""From a customization and a platform to the file that Kubeflow Pipelines runs."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

from components.common import artifacts
from components.common.errors import UsageError
from pipelines import parameters
from pipelines.config import Customization
from pipelines.platform import Platform

NO_VOLUME = (
    "without -p platform.yaml the pods share no volume and do not find one another's artifacts: "
    "`tuneline init` writes a commented platform.yaml"
)


def write(config: Customization, platform: Platform | None, output: Path) -> list[str]:
    """Write the compiled pipeline: the same bytes for the same input, the whole file or none. Returns warnings worth reading.

    Raises ConfigurationError for a relative path, UsageError for a file that no tool would take for a pipeline.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{output} does not end in .yaml", hint="Kubeflow takes a compiled pipeline by that ending: -o pipeline.yaml.")
    text = compiled(config, platform)
    output.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(output, text)
    return [NO_VOLUME] if platform is None else _outside(config, platform.volume.mount)


def compiled(config: Customization, platform: Platform | None = None) -> str:
    """The pipeline as YAML; what only Kubernetes knows follows in a second document."""
    parameters.with_absolute_paths(config)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        from kfp import compiler

        from pipelines.customization import build

        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build(config, platform), str(path))
        return path.read_text(encoding="utf-8")


def _outside(config: Customization, mount: str) -> list[str]:
    """A sentence for each path that is not on the volume: some image may hold it, but it looks like a path of this machine."""
    paths = {"data_curation.sources": config.data_curation.sources, "fine_tuning.base_model": [config.fine_tuning.base_model]}
    return [
        f"{key}: {path} is not on the volume, which the pods see as {mount}"
        for key, named in paths.items()
        for path in named
        if path.startswith("/") and not path.startswith(f"{mount}/")
    ]
