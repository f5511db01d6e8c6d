"""Triton packaging: a model in, a Triton model repository out, proven by loading it in a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from components.common import artifacts, hashing, models
from components.common.artifacts import Artifact
from components.common.errors import ConfigurationError
from components.common.models import Model
from components.common.progress import Reporter
from components.triton_packaging import engine, pbtxt, proof, report, weights
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.proof import Proof

STAGE = "triton_packaging"
VERSION = "1"
BACKEND = Path(__file__).parent / "python_backend"
# The files of the two models, and what they are called in the package: Triton wants a model.py.
ENGINE_FILES = {name: name for name in ("model.py", "request.py", "generation.py", "head.py", "text.py", "wire.py")}
STREAM_FILES = {"stream.py": "model.py", "wire.py": "wire.py"}


def package(
    model: Model, output: Path, config: TritonPackagingConfig, *, seed: int, reporter: Reporter, overwrite: bool = False
) -> Artifact:
    """Write a Triton model repository for `model` into `output`, prove it, and publish it as an artifact of kind repository.

    The payload is everything under <model_name>/ and <model_name>_stream/; report.html and proof.json are not. Where no Triton can run,
    the package is made all the same, its summary's `proof` is null and `unproven_because` says why. Raises InputError for an adapter that
    cannot be merged, ProofError when the server's answers differ from the model's, ModelLoadError when the server does not load it.
    """
    unproven = _unproven(config)
    key = _key(model, config, seed, unproven)
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        return finished
    weights.check_mergeable(model)
    dtype = weights.served_dtype(config.dtype)
    reporter.step("writing the model repository")
    write_repository(model, output, config, dtype)
    proven = None if unproven else _prove(model, output, config, dtype, seed, reporter)
    if unproven:
        reporter.note(f"the package is not proven: {unproven}")
    return _publish(model, output, config, proven, unproven, key=key, seed=seed)


def _unproven(config: TritonPackagingConfig) -> str | None:
    return engine.availability() if config.prove else "triton_packaging.prove is false"


def _key(model: Model, config: TritonPackagingConfig, seed: int, unproven: str | None) -> str:
    """Whether it can be proven is part of the key: an unproven package is not the answer once Triton runs here. So is the device, since
    dtype auto writes other bytes on a GPU."""
    inputs = [model.sha256, model.base.sha256]
    return hashing.digest(
        {
            "stage": STAGE,
            "code": hashing.code_sha256(STAGE),
            "inputs": inputs,
            "config": config.model_dump(),
            "seed": seed,
            "unproven": unproven,
            "device": models.arithmetic()["device"],
        }
    )


def write_repository(model: Model, output: Path, config: TritonPackagingConfig, dtype: str) -> Path:
    """Write <output>/<model_name>/ with config.pbtxt, the model's code and its weights, and <output>/<model_name>_stream/, which streams
    its answers. Returns the first folder."""
    folder = output / config.model_name
    version = folder / VERSION
    weights.write_weights(model, version / "weights", dtype)
    _copy(ENGINE_FILES, version)
    parameters = {**_limits(version / "weights", config), "threads": str(config.threads), "dtype": dtype}
    pbtxt.write(folder, {**parameters, **_lineage(model)})
    stream = output / pbtxt.stream_name(config.model_name)
    _copy(STREAM_FILES, stream / VERSION)
    pbtxt.write_stream(stream, config.model_name, _lineage(model))
    weights.make_readable(folder)
    weights.make_readable(stream)
    return folder


def _copy(files: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, called in files.items():
        shutil.copyfile(BACKEND / name, folder / called)


def _limits(folder: Path, config: TritonPackagingConfig) -> dict[str, str]:
    """What a request may ask for, in tokens, held within the model's context, and how much is computed at once."""
    context = weights.context_tokens(folder, config.max_prompt_tokens + config.max_tokens)
    if context < 2:
        raise ConfigurationError(f"the model's context is {context} tokens", hint="Correct max_position_embeddings in its config.json.")
    within = context - 1
    limits = {
        "context": context,
        "max_prompt_tokens": min(config.max_prompt_tokens, within),
        "max_tokens": min(config.max_tokens, within),
        "default_max_tokens": min(config.default_max_tokens, config.max_tokens, within),
        "slots": config.slots,
        "max_queue": config.max_queue,
    }
    longest = min(context, limits["max_prompt_tokens"] + limits["max_tokens"])
    limits["cache_tokens"] = max(longest, config.cache_tokens or weights.cache_tokens(folder, longest * config.slots))
    return {name: str(value) for name, value in limits.items()}


def _lineage(model: Model) -> dict[str, str]:
    """What the package was made from, for anyone who asks a running server for its model's configuration."""
    dataset = model.artifact.manifest.input("dataset") if model.artifact else None
    lineage = {"model_sha256": model.sha256, "base_model": _source(model), "base_model_sha256": model.base.sha256}
    return {**lineage, "dataset_sha256": dataset.content_sha256} if dataset else lineage


def recorded_lineage(repository: Artifact) -> dict[str, str]:
    """What a package's own config.pbtxt says it was made from: model_sha256, base_model_sha256, dataset_sha256, base_model.

    Raises TunelineError when it cannot be read.
    """
    parameters = pbtxt.read(repository.path / repository.manifest.summary["model_name"]).parameters
    names = ("model_sha256", "base_model_sha256", "dataset_sha256", "base_model")
    return {name: parameters[name].string_value for name in names if name in parameters}


def _source(model: Model) -> str:
    """The base model's source; of a folder only its name, because a path is this machine's."""
    return model.base.uri if ":" in model.base.uri else Path(model.base.uri).name


def _prove(model: Model, output: Path, config: TritonPackagingConfig, dtype: str, seed: int, reporter: Reporter) -> Proof:
    """The log stays in the unfinished folder when the proof fails. What Python may have compiled there is no part of the package."""
    log = output / "triton.log"
    proven = proof.prove(model, output, config, dtype, seed=seed, log=log, reporter=reporter)
    log.unlink()
    for name in (config.model_name, pbtxt.stream_name(config.model_name)):
        shutil.rmtree(output / name / VERSION / "__pycache__", ignore_errors=True)
    return proven


def _publish(
    model: Model, output: Path, config: TritonPackagingConfig, proven: Proof | None, unproven: str | None, *, key: str, seed: int
) -> Artifact:
    summary = {"model_name": config.model_name, "backend": config.backend, "proof": proven.figures() if proven else None}
    if unproven:
        summary["unproven_because"] = unproven
    full = asdict(proven) if proven else {"proof": None, "unproven_because": unproven}
    (output / "proof.json").write_text(json.dumps(full, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "report.html").write_text(report.render(model, output, config, proven, unproven), encoding="utf-8")
    return artifacts.publish(
        output,
        "repository",
        payload=lambda path: path.split("/")[0] in (config.model_name, pbtxt.stream_name(config.model_name)),
        inputs=[model.as_input()] if model.artifact is None else [model.as_input(), model.base.as_input()],
        config=config.model_dump(mode="json"),
        seed=seed,
        key=key,
        summary=summary,
    )
