"""Triton packaging: writes a Triton model repository for a model, and proves it by loading it in a real server."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import calibrated_weights, model_loading, tool_messages
from components.common.models.calibrated_weights import CalibratedWeights
from components.common.models.model_loading import LoadableModel
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.triton_packaging import (
    adapter_placement,
    package_contents,
    publishing,
    quantization,
    report,
    serving_proof,
    triton_config,
    triton_installation,
    vllm_package,
    weight_files,
)
from components.triton_packaging.adapter_placement import AdapterPlacement
from components.triton_packaging.backends import list_model_names
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.package_contents import PackageContents
from components.triton_packaging.quantization import QuantizationResult
from components.triton_packaging.serving_proof import Proof

STAGE = "triton_packaging"
VERSION = "1"
PROOF_FILENAME = "proof.json"
BACKEND_FOLDER = Path(__file__).parent / "python_backend"
STREAM_MODEL_FILE = "stream_model.py"  # the streaming model; the other files belong to the engine model
SHARED_FILES = ("engine_sockets.py", "triton_messages.py")  # of both


def package(
    model: LoadableModel,
    output: Path,
    config: TritonPackagingConfig,
    *,
    seed: int,
    reporter: Reporter,
    overwrite: bool = False,
    adapters: Mapping[str, LoadableModel] | None = None,
    dataset: Artifact | None = None,
    state: Path | None = None,
    evaluated_weights: str = "",
) -> Artifact:
    """Write a Triton model repository into `output`, prove it, and publish it as an artifact of kind repository.

    The payload is everything in the model folders, and proof.json without timings; report.html is not part of it. Without Triton or
    a requirement of the backend, the package is unproven: the summary's `proof` is null, and `unproven_because` the reason.

    Args:
        adapters: additional models with the same base, by adapter name; only the vLLM backend supports them.
        dataset: dataset whose test split is used to measure a quantized model, and whose training split calibrates it.
        state: folder of the weights that an evaluation calibrated. None: calibrate them again, with an equal result.
        evaluated_weights: digest of the calibrated weights that were evaluated; "" if unknown.

    Raises:
        ConfigurationError: the configuration does not fit the model or the backend.
        InputError: an adapter cannot be packaged, or the test split has too few rows.
        CalibrationError: the calibrated weights are not those that were evaluated, or llm-compressor fails.
        QuantizationError: the loss of the quantized model exceeds that of the unquantized model by more than the margin.
        OutputOccupiedError: `output` contains other files.
        ProofError: the server's answers differ from the model's.
        ModelLoadError: the server does not load the package.
        EngineMissingError: the server exits, or the bucket in `publish_to` cannot be written.
    """
    placement = adapter_placement.place_adapters(model, config, adapters or {})
    measured_dataset = None
    if config.quantization != "none":
        measured_dataset = _require_dataset(dataset, model)
        quantization.check_quantizable(config, model_loading.load_configuration(model.weights))
    unproven = (
        triton_installation.unprovable_reason(config.backend) if config.prove else "triton_packaging.prove is false"
    )
    key = _compute_key(model, config, seed, unproven, adapters, measured_dataset, evaluated_weights)
    artifact = artifact_folder.claim_folder(output, key, overwrite=overwrite)
    if not artifact:
        if placement.reason:
            reporter.note(placement.reason)
        dtype = weight_files.resolve_dtype(config.dtype, config.quantization)
        proof = quantized = calibrated = None
        with tempfile.TemporaryDirectory(prefix="tuneline-quantized-") as temporary:
            if measured_dataset:
                calibrated = calibrated_weights.load_if_calibrated(
                    config.quantization,
                    model,
                    measured_dataset,
                    state or Path(temporary),
                    seed=seed,
                    reporter=reporter,
                    expected_sha256=evaluated_weights,
                )
            reporter.step("writing the model repository")
            write_repository(model, output, config, dtype, adapters, calibrated)
        if measured_dataset:
            quantized = quantization.compare_with_unquantized(
                model,
                output / config.model_name / VERSION,
                _read_served_parameters(output / config.model_name, config),
                measured_dataset,
                config,
                seed=seed,
                reporter=reporter,
                calibration=calibrated.statement if calibrated else None,
            )
        if not unproven:
            originals = serving_proof.models_by_adapter(model, placement, config.backend)
            log = output / "triton.log"  # kept if the proof fails
            proof = serving_proof.prove(originals, output, config, dtype, seed=seed, log=log, reporter=reporter)
            log.unlink(missing_ok=True)
            # Bytecode that the server compiled is not part of the package.
            for folder in list_model_folders(output, config):
                shutil.rmtree(folder / VERSION / "__pycache__", ignore_errors=True)
        if config.backend == "vllm" and config.serving_root:  # the proof needs paths relative to the package
            vllm_package.prefix_paths(output / config.model_name / VERSION, config.serving_root)
        if unproven:
            reporter.note(f"the package is not proven: {unproven}")
        evidence = Evidence(proof, unproven, quantized, measured_dataset)
        artifact = _publish(model, placement, output, config, evidence, key=key, seed=seed)
    if config.publish_to:  # also for a finished package, because an earlier copy may have failed
        reporter.note(f"the package is in {publishing.publish(artifact, config.publish_to, reporter)}")
    return artifact


def _compute_key(
    model: LoadableModel,
    config: TritonPackagingConfig,
    seed: int,
    unproven: str | None,
    adapters: Mapping[str, LoadableModel] | None = None,
    dataset: Artifact | None = None,
    evaluated_weights: str = "",
) -> str:
    """Return the digest of all inputs that determine the package."""
    inputs: list[str | dict[str, str]] = [model.sha256, model.base.sha256]
    if adapters:
        inputs.append({name: other.sha256 for name, other in adapters.items()})
    if dataset:
        inputs += [dataset.sha256, evaluated_weights]
    # The key contains `unproven`, so that an unproven package is built again when Triton is available, and the device,
    # because dtype auto writes other weights on a GPU.
    return hashing.digest(
        {
            "stage": STAGE,
            "code": code_digest.code_sha256(STAGE),
            "inputs": inputs,
            "config": config.model_dump(),
            "seed": seed,
            "unproven": unproven,
            "device": model_loading.describe_arithmetic()["device"],
        }
    )


def write_repository(
    model: LoadableModel,
    output: Path,
    config: TritonPackagingConfig,
    dtype: str,
    adapters: Mapping[str, LoadableModel] | None = None,
    calibrated: CalibratedWeights | None = None,
) -> Path:
    """Write <output>/<model_name>/ with config.pbtxt and the files of its backend, and return that folder.

    For the python backend, also write <output>/<model_name>_stream/ for streamed answers.

    Args:
        dtype: data type of merged weights and of GPU computation: float32 or bfloat16.
        adapters: additional models with the same base, by adapter name.
        calibrated: the quantized weights, if the format is calibrated.

    Raises:
        ConfigurationError: the configuration does not fit the model or the backend.
        InputError: an adapter cannot be packaged.
    """
    placement = adapter_placement.place_adapters(model, config, adapters or {})
    folder = output / config.model_name
    version = folder / VERSION
    contents = (
        package_contents.reference_contents(model, placement, version)
        if config.weights == "referenced"
        else package_contents.copy_contents(model, placement, version, dtype, config.quantization, calibrated)
    )
    parameters = {
        **build_lineage(model),
        **contents.build_parameters(),
        "adapter": placement.mode,
        "dtype": dtype,
        "quantization": config.quantization,
        "tools": describe_tool_support(model),
    }
    if config.backend == "vllm":
        vllm_package.check_vocabularies(model, placement.adapters)
        context = weight_files.read_context_tokens(
            version / contents.weights, config.max_prompt_tokens + config.max_tokens
        )
        vllm_package.write_vllm_files(version, contents, placement, config, dtype, context)
        if digests := {name: adapted.sha256 for name, adapted in placement.adapters.items()}:
            parameters["adapters"] = json.dumps(digests, sort_keys=True)
        queue = {"slots": str(config.slots), "max_queue": str(config.max_queue)}
        triton_config.write_vllm_model(folder, {**parameters, **queue})
    else:
        _write_python_models(folder, contents, model, config, parameters)
    for each in list_model_folders(output, config):
        weight_files.make_readable(each)
    return folder


def _read_served_parameters(folder: Path, config: TritonPackagingConfig) -> dict[str, str]:
    """Return the parameters of a package's config.pbtxt, with the folder of the weights and the context for vLLM."""
    parameters = triton_config.read_parameters(folder)
    if config.backend == "vllm":
        context = vllm_package.read_arguments(folder / VERSION)["max_model_len"]
        parameters |= {"weights_folder": package_contents.WEIGHTS_FOLDER, "context": str(context)}
    return parameters


def list_model_folders(output: Path, config: TritonPackagingConfig) -> list[Path]:
    """Return the model folders of a package."""
    return [output / name for name in list_model_names(config.backend, config.model_name)]


def _write_python_models(
    folder: Path,
    contents: PackageContents,
    model: LoadableModel,
    config: TritonPackagingConfig,
    parameters: Mapping[str, str],
) -> None:
    """Write the code and config.pbtxt of the engine model and of the streaming model."""
    stream = folder.with_name(triton_config.stream_model_name(config.model_name))
    (stream / VERSION).mkdir(parents=True, exist_ok=True)
    for source in BACKEND_FOLDER.glob("*.py"):
        if source.name == STREAM_MODEL_FILE:
            shutil.copyfile(source, stream / VERSION / "model.py")  # Triton loads model.py
        elif source.name != "__init__.py":
            shutil.copyfile(source, folder / VERSION / source.name)
    for name in SHARED_FILES:
        shutil.copyfile(BACKEND_FOLDER / name, stream / VERSION / name)
    weights = folder / VERSION / contents.weights
    # A learned prompt's virtual tokens precede every request and reduce the context.
    virtual_tokens = adapter_placement.read_adapter_settings(model).get("num_virtual_tokens") or 0
    requested = config.max_prompt_tokens + config.max_tokens + virtual_tokens
    context = weight_files.read_context_tokens(weights, requested) - virtual_tokens
    if context < 2:
        reduction = f" after deducting {format_count(virtual_tokens, 'virtual token')}" if virtual_tokens else ""
        raise ConfigurationError(
            f"the model's context is {format_count(context, 'token')}{reduction}; expected at least 2",
            hint="Correct max_position_embeddings in the model's config.json.",
        )
    max_prompt_tokens, max_tokens = min(config.max_prompt_tokens, context - 1), min(config.max_tokens, context - 1)
    longest = min(context, max_prompt_tokens + max_tokens)
    default_cache_tokens = weight_files.limit_cache_tokens(weights, longest * config.slots)
    limits = {
        "context": context,
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": max_tokens,
        "default_max_tokens": min(config.default_max_tokens, max_tokens),
        "slots": config.slots,
        "max_queue": config.max_queue,
        "cache_tokens": max(longest, config.cache_tokens or default_cache_tokens),
        "gpu_cache_tokens": max(longest, config.cache_tokens or longest * config.slots),
        "threads": config.threads,
    }
    engine_parameters = {
        **{name: str(value) for name, value in limits.items()},
        "weights_folder": contents.weights,
        "tokenizer_folder": contents.tokenizer,
        "adapter_folder": next(iter(contents.adapters.values()), ""),
        **parameters,
    }
    triton_config.write_python_model(folder, engine_parameters)
    triton_config.write_stream_model(stream, config.model_name, build_lineage(model))


def describe_tool_support(model: LoadableModel) -> str:
    """Return whether the model's chat template has a place for tools, or a client must describe them in a message."""
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    has_template = tool_messages.has_tool_template(tokenizer)
    return triton_config.TOOLS_IN_TEMPLATE if has_template else triton_config.TOOLS_AS_TEXT


def build_lineage(model: LoadableModel) -> dict[str, str]:
    """Return the package's lineage, which clients can read from a running server's model configuration."""
    source = model.base.uri
    lineage = {
        "model_sha256": model.sha256,
        # For a local base model, only the folder name: its path is specific to this machine.
        "base_model": source if ":" in source else Path(source).name,
        "base_model_sha256": model.base.sha256,
    }
    dataset = model.artifact.manifest.find_input("dataset") if model.artifact else None
    return {**lineage, "dataset_sha256": dataset.content_sha256} if dataset else lineage


def read_lineage(repository: Artifact) -> dict[str, str]:
    """Return the lineage in a package's config.pbtxt: model_sha256, base_model_sha256, dataset_sha256, base_model.

    Raises:
        TunelineError: the file cannot be read.
    """
    parameters = triton_config.read_config(repository.path / repository.manifest.summary["model_name"]).parameters
    names = ("model_sha256", "base_model_sha256", "dataset_sha256", "base_model")
    return {name: parameters[name].string_value for name in names if name in parameters}


def _require_dataset(dataset: Artifact | None, model: LoadableModel) -> Artifact:
    if dataset is None and model.artifact is None:
        raise ConfigurationError(
            "packaging a base model with triton_packaging.quantization requires a dataset to measure the quantized "
            "model",
            hint="Specify a dataset with --dataset, or set triton_packaging.quantization to none.",
        )
    if dataset is None:
        raise ConfigurationError(
            "triton_packaging.quantization is set, but the dataset that the model was trained on is not available",
            hint="Specify a dataset with --dataset, or set triton_packaging.quantization to none.",
        )
    return dataset


@dataclass(frozen=True)
class Evidence:
    """What was measured on a package.

    Attributes:
        proof: result of the proof; None for an unproven package.
        unproven: reason why the package is not proven; None for a proven package.
        quantization: comparison with the unquantized model; None without quantization.
        dataset: dataset whose test split was compared.
    """

    proof: Proof | None
    unproven: str | None
    quantization: QuantizationResult | None = None
    dataset: Artifact | None = None


def _publish(
    model: LoadableModel,
    placement: AdapterPlacement,
    output: Path,
    config: TritonPackagingConfig,
    evidence: Evidence,
    *,
    key: str,
    seed: int,
) -> Artifact:
    others = [adapted.as_input() for adapted in placement.adapters.values() if adapted is not model]
    inputs = [model.as_input(), *([model.base.as_input()] if model.artifact else []), *others]
    inputs += [evidence.dataset.as_input()] if evidence.dataset else []
    proof, unproven, quantized = evidence.proof, evidence.unproven, evidence.quantization
    measured = {"quantization": quantized.build_statement()} if quantized else {}
    subject = {"inputs": [[one.kind, one.content_sha256] for one in inputs]}
    details = proof.build_statement() if proof else {"proof": None, "unproven_because": unproven}
    weight_files.write_json(output / PROOF_FILENAME, {**subject, **details, **measured})
    page = report.render(model, output, config, proof, unproven, quantized)
    (output / "report.html").write_text(page, encoding="utf-8")
    names = {folder.name for folder in list_model_folders(output, config)}
    return artifact_folder.publish(
        output,
        "repository",
        payload=lambda path: path == PROOF_FILENAME or path.split("/")[0] in names,
        inputs=inputs,
        config=config.model_dump(mode="json"),
        seed=seed,
        key=key,
        summary={
            "model_name": config.model_name,
            "backend": config.backend,
            "proof": proof.build_summary() if proof else None,
            "adapter": placement.mode,
            "adapters": sorted(placement.adapters),
            "weights": config.weights,
            **measured,
            **({"adapter_because": placement.reason} if placement.reason else {}),
            **({"unproven_because": unproven} if unproven else {}),
        },
    )
