"""Compilation of a customization and a platform to the file that Kubeflow Pipelines runs."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from components.common.artifacts import output_paths
from components.common.runtime.errors import UsageError
from pipelines.config.customization_config import Customization, check_consistency
from pipelines.config.platform_config import Platform
from pipelines.definition import run_parameters
from pipelines.definition.chain_steps import ChainStep

# in every compiled pipeline, in no other file of tuneline
COMPILED_HEADER = re.compile(r"^pipelineInfo:", re.MULTILINE)
NO_VOLUME_WARNING = (
    "without -p platform.yaml, the pods share no volume and cannot read each other's artifacts; "
    "`tuneline init` writes a commented platform.yaml"
)
SINGLE_STAGE_PIPELINES = ("data_curation", "fine_tuning", "evaluation", "triton_packaging")
PIPELINE_NAMES = ("customization", "promotion", *SINGLE_STAGE_PIPELINES)


def write_pipeline(
    config: Customization,
    platform: Platform | None,
    output: Path,
    *,
    inputs: Iterable[Path] = (),
    pipeline: str = "customization",
) -> list[str]:
    """Write the compiled pipeline atomically and return warnings. Equal input gives equal bytes.

    Args:
        config: The customization, whose values become the parameters' defaults.
        platform: The target cluster; None for pods without a shared volume.
        output: The YAML file to write.
        inputs: The files that were read; `output` must not be one of them.
        pipeline: One of PIPELINE_NAMES.

    Raises:
        ConfigurationError: a path is relative, or a model cannot be packaged as configured.
        UsageError: `output` has no YAML suffix, cannot be written, or contains anything but a compiled pipeline.
    """
    _check_output(output, inputs)
    output_paths.write_file(output, compile_pipeline(config, platform, pipeline))
    return [NO_VOLUME_WARNING] if platform is None else _list_warnings(config, platform)


def write_chain(steps: Sequence[ChainStep], output: Path, *, inputs: Iterable[Path] = ()) -> list[str]:
    """Write the compiled pipeline of a chain; see `write_pipeline`."""
    _check_output(output, inputs)
    output_paths.write_file(output, compile_chain(steps))
    if steps[0].platform is None:
        return [NO_VOLUME_WARNING]
    return [
        f"{step.name}: {warning}"
        for step in steps
        if step.platform
        for warning in _list_warnings(step.link.customization, step.platform)
    ]


def _check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError if the output has no YAML suffix, is an input, or contains anything but a compiled pipeline."""
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"{output} does not end in .yaml or .yml",
            hint="Choose a name that Kubeflow accepts, for example -o pipeline.yaml.",
        )
    output_paths.check_file(output, inputs=inputs)
    existing = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    if existing and not COMPILED_HEADER.search(existing):
        raise UsageError(
            f"{output} exists and is not a compiled pipeline", hint=f"Choose another file with -o, or remove {output}."
        )


def _list_warnings(config: Customization, platform: Platform) -> list[str]:
    """Return warnings about paths outside the volumes and about missing secrets."""
    mount = platform.volume.mount
    mounted = tuple(f"{folder}/" for folder in (mount, *(claim.mount for claim in platform.claims)))
    # An image may contain such a path, but it is probably a path of this machine.
    outside = [
        f"{key}: {path} is not on the shared volume, which pods mount at {mount}"
        for key, paths in run_parameters.list_paths(config).items()
        for path in paths
        if path.startswith("/") and not path.startswith(mounted)
    ]
    variables = {entry.credentials_env: None for entry in config.data_curation.sources if entry.credentials_env}
    missing = [name for name in variables if name not in platform.secrets]
    return outside + [
        f"data_curation.sources: the variable {name} of credentials_env is not under `secrets` in platform.yaml"
        for name in missing
    ]


def compile_pipeline(config: Customization, platform: Platform | None = None, pipeline: str = "customization") -> str:
    """Return one of PIPELINE_NAMES as YAML; a second document contains Kubernetes settings.

    Raises:
        ConfigurationError: a path is relative, or a model cannot be packaged as configured.
    """
    check_consistency(config)
    run_parameters.require_absolute_paths(config)

    def build() -> object:
        from pipelines.definition import customization_pipeline, promotion_pipeline, stage_pipelines

        builders: dict[str, Callable[[Customization, Platform | None], object]] = {
            "customization": customization_pipeline.build,
            "promotion": promotion_pipeline.build,
            **{stage: stage_pipelines.build(stage) for stage in SINGLE_STAGE_PIPELINES},
        }
        return builders[pipeline](config, platform)

    return _compile(build)


def compile_chain(steps: Sequence[ChainStep]) -> str:
    """Return the pipeline of a chain as YAML; a second document contains Kubernetes settings.

    Raises:
        ConfigurationError: a path is relative, or a model cannot be packaged as configured.
    """
    for step in steps:
        run_parameters.require_absolute_paths(step.link.customization)

    def build() -> object:
        from pipelines.definition import chain_pipeline

        return chain_pipeline.build(steps)

    return _compile(build)


def _compile(build: Callable[[], object]) -> str:
    logging.getLogger("kfp").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        from kfp import compiler

        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build(), str(path))
        return path.read_text(encoding="utf-8")
