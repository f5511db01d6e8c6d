"""From a customization and a platform to the file that Kubeflow Pipelines runs."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from components.common.errors import UsageError
from pipelines import outputs, parameters
from pipelines.config import Customization, check_whole
from pipelines.platform import Platform

COMPILED = re.compile(r"^pipelineInfo:", re.MULTILINE)  # at the top of every compiled pipeline, and a key of no other file of ours
NO_VOLUME = (
    "without -p platform.yaml the pods share no volume and do not find one another's artifacts: "
    "`tuneline init` writes a commented platform.yaml"
)


ALONE = ("data_curation", "fine_tuning", "evaluation", "triton_packaging")
PIPELINES = ("customization", "promotion", *ALONE)


def write(
    config: Customization, platform: Platform | None, output: Path, *, inputs: Iterable[Path] = (), pipeline: str = "customization"
) -> list[str]:
    """Write the compiled pipeline: the same bytes for the same input, the whole file or none. Returns warnings worth reading.

    `inputs` are the files that were read. Raises ConfigurationError for a relative path, UsageError for a file that no tool would take
    for a pipeline, cannot be written, or holds something else than a pipeline, which is never overwritten.
    """
    _check(output, inputs)
    outputs.write(output, compiled(config, platform, pipeline))
    return [NO_VOLUME] if platform is None else _outside(config, platform)


def _check(output: Path, inputs: Iterable[Path]) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{output} does not end in .yaml", hint="Kubeflow takes a compiled pipeline by that ending: -o pipeline.yaml.")
    outputs.check_file(output, inputs=inputs)
    there = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    if there and not COMPILED.search(there):
        raise UsageError(f"{output} exists and is not a compiled pipeline", hint="Name another file with -o, or remove this one first.")


def compiled(config: Customization, platform: Platform | None = None, pipeline: str = "customization") -> str:
    """One of PIPELINES as YAML; what only Kubernetes knows follows in a second document."""
    check_whole(config)
    parameters.with_absolute_paths(config)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        from kfp import compiler

        from pipelines import alone, customization, promotion

        known = {"customization": customization.build, "promotion": promotion.build, **{stage: alone.build(stage) for stage in ALONE}}
        build = known[pipeline]
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build(config, platform), str(path))
        return path.read_text(encoding="utf-8")


def _outside(config: Customization, platform: Platform) -> list[str]:
    """A sentence for each path that is not on the volume: some image may hold it, but it looks like a path of this machine."""
    mount, others = platform.volume.mount, [claim.mount for claim in platform.claims]
    return [
        f"{key}: {path} is not on the volume, which the pods see as {mount}"
        for key, named in parameters.named_paths(config).items()
        for path in named
        if path.startswith("/") and not path.startswith(tuple(f"{place}/" for place in (mount, *others)))
    ]
