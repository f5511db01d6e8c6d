"""Triton packaging: a model in, a Triton model repository out, proven by loading it in a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from components.common import artifacts, hashing, models
from components.common.artifacts import Artifact
from components.common.errors import ConfigurationError
from components.common.models import Model
from components.common.progress import Reporter
from components.triton_packaging import engine, form, parts, pbtxt, proof, publishing, report, vllm_package, weights
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.form import Form
from components.triton_packaging.parts import Parts
from components.triton_packaging.proof import Proof

STAGE = "triton_packaging"
VERSION = "1"
BACKEND = Path(__file__).parent / "python_backend"
# The files of the two models, and what they are called in the package: Triton wants a model.py.
ENGINE = "model asked attention choices choosing following generation head loading request text wire"
ENGINE_FILES = {f"{name}.py": f"{name}.py" for name in ENGINE.split()}
STREAM_FILES = {"stream.py": "model.py", "wire.py": "wire.py"}
NONE: Mapping[str, Model] = MappingProxyType({})


@dataclass(frozen=True)
class Outcome:
    """What came of the proof: the proof, or why there is none, and what a stand-in showed instead."""

    proven: Proof | None
    unproven: str | None
    stand_in: Proof | None = None


def package(
    model: Model,
    output: Path,
    config: TritonPackagingConfig,
    *,
    seed: int,
    reporter: Reporter,
    overwrite: bool = False,
    adapters: Mapping[str, Model] = NONE,
) -> Artifact:
    """Write a Triton model repository for `model` into `output`, prove it, and publish it as an artifact of kind repository.

    `adapters` are further models on the same base, by the names that requests give; only the vLLM backend takes them. The payload is
    everything under the model folders; report.html and proof.json are not. Where no Triton can run, or what it serves the model with is
    missing, the package is made all the same, its summary's `proof` is null and `unproven_because` says why.

    Raises ConfigurationError and InputError for what cannot be packaged so, ProofError when the server's answers differ from the model's,
    ModelLoadError when the server does not load it.
    """
    decided = form.decide(model, config, adapters)
    unproven = engine.unproven(config.backend) if config.prove else "triton_packaging.prove is false"
    key = _key(model, config, seed, unproven, adapters)
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        return _published(finished, config, reporter)
    if decided.reason:
        reporter.note(decided.reason)
    dtype = weights.served_dtype(config.dtype)
    reporter.step("writing the model repository")
    write_repository(model, output, config, dtype, adapters)
    outcome = _proved(proof.served(model, decided, config.backend), output, config, dtype, unproven, seed=seed, reporter=reporter)
    if config.backend == "vllm" and config.serving_root:  # after the proof, which finds the parts from the package's folder
        vllm_package.root(output / config.model_name / VERSION, config.serving_root)
    if outcome.unproven:
        reporter.note(f"the package is not proven: {outcome.unproven}")
    made = _publish(model, decided, output, config, outcome, key=key, seed=seed)
    return _published(made, config, reporter)


def _published(made: Artifact, config: TritonPackagingConfig, reporter: Reporter) -> Artifact:
    """The package, which then lies where the configuration wants it too. A copy that failed is made when the same command runs again."""
    if config.publish_to:
        reporter.note(f"the package is in {publishing.publish(made, config.publish_to, reporter)}")
    return made


def _key(model: Model, config: TritonPackagingConfig, seed: int, unproven: str | None, others: Mapping[str, Model] = NONE) -> str:
    """Whether it can be proven is part of the key: an unproven package is not the answer once Triton runs here. So is the device, since
    dtype auto writes other bytes on a GPU."""
    inputs: list[Any] = [model.sha256, model.base.sha256]
    return hashing.digest(
        {
            "stage": STAGE,
            "code": hashing.code_sha256(STAGE),
            "inputs": [*inputs, {name: other.sha256 for name, other in others.items()}] if others else inputs,
            "config": config.model_dump(),
            "seed": seed,
            "unproven": unproven,
            "device": models.arithmetic()["device"],
        }
    )


def write_repository(model: Model, output: Path, config: TritonPackagingConfig, dtype: str, adapters: Mapping[str, Model] = NONE) -> Path:
    """Write <output>/<model_name>/ with config.pbtxt and all that its backend reads; for the python backend also
    <output>/<model_name>_stream/, which streams its answers. Returns the first folder. Raises as `package` does."""
    decided = form.decide(model, config, adapters)
    folder = output / config.model_name
    version = folder / VERSION
    written = parts.refer(model, decided, version) if config.weights == "referenced" else parts.write(model, decided, version, dtype)
    parameters = {**_lineage(model), **written.parameters(), "adapter": decided.adapter, "dtype": dtype}
    if config.backend == "vllm":
        _write_vllm(folder, written, model, decided, config, parameters)
    else:
        _write_python(folder, written, model, config, parameters)
    for each in folders(output, config):
        weights.make_readable(each)
    return folder


def folders(output: Path, config: TritonPackagingConfig) -> list[Path]:
    """The model folders of a package."""
    names = [config.model_name] if config.backend == "vllm" else [config.model_name, pbtxt.stream_name(config.model_name)]
    return [output / name for name in names]


def _write_vllm(
    folder: Path, written: Parts, model: Model, decided: Form, config: TritonPackagingConfig, parameters: Mapping[str, str]
) -> None:
    version = folder / VERSION
    vllm_package.check_tokens(model, decided.adapters)
    context = weights.context_tokens(version / written.weights, config.max_prompt_tokens + config.max_tokens)
    vllm_package.write(version, written, decided, config, str(parameters["dtype"]), context)
    digests = {name: one.sha256 for name, one in decided.adapters.items()}
    told = {"adapters": json.dumps(digests, sort_keys=True)} if digests else {}
    pbtxt.write_vllm(folder, {**parameters, **told})


def _write_python(folder: Path, written: Parts, model: Model, config: TritonPackagingConfig, parameters: Mapping[str, str]) -> None:
    version = folder / VERSION
    _copy(ENGINE_FILES, version)
    places = {
        "weights_folder": written.weights,
        "tokenizer_folder": written.tokenizer,
        "adapter_folder": next(iter(written.adapters.values()), ""),
    }
    limits = _limits(version / written.weights, config, form.virtual_tokens(model))
    pbtxt.write(folder, {**limits, "threads": str(config.threads), **places, **parameters})
    stream = folder.with_name(pbtxt.stream_name(config.model_name))
    _copy(STREAM_FILES, stream / VERSION)
    pbtxt.write_stream(stream, config.model_name, _lineage(model))


def _copy(files: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, called in files.items():
        shutil.copyfile(BACKEND / name, folder / called)


def _limits(folder: Path, config: TritonPackagingConfig, virtual_tokens: int) -> dict[str, str]:
    """What a request may ask for, in tokens, held within the model's context, and how much is computed at once. A learned prompt's
    virtual tokens stand before every request's and take their part of the context."""
    context = weights.context_tokens(folder, config.max_prompt_tokens + config.max_tokens + virtual_tokens) - virtual_tokens
    if context < 2:
        taken = f", {virtual_tokens} virtual tokens taken off" if virtual_tokens else ""
        raise ConfigurationError(
            f"the model's context is {context} tokens{taken}", hint="Correct max_position_embeddings in its config.json."
        )
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


def _proved(
    originals: Mapping[str, Model],
    output: Path,
    config: TritonPackagingConfig,
    dtype: str,
    unproven: str | None,
    *,
    seed: int,
    reporter: Reporter,
) -> Outcome:
    """The log stays in the unfinished folder when the proof fails. What Python may have compiled there is no part of the package.

    Where nothing but vLLM is missing, a stand-in loads the package and answers: that shows its files and adapters to be right, and is no
    proof of vLLM.
    """
    if not config.prove or engine.availability():
        return Outcome(None, unproven)
    log = output / "triton.log"
    shown = proof.prove(originals, output, config, dtype, seed=seed, log=log, reporter=reporter)
    log.unlink()
    for folder in folders(output, config):
        shutil.rmtree(folder / VERSION / "__pycache__", ignore_errors=True)
    if unproven is None:
        return Outcome(shown, None)
    told = f"a stand-in loaded the package and answered {shown.matched} of {shown.golden_prompts} golden prompts as transformers does"
    return Outcome(None, f"{unproven}; {told}", shown)


def _publish(
    model: Model, decided: Form, output: Path, config: TritonPackagingConfig, outcome: Outcome, *, key: str, seed: int
) -> Artifact:
    proven = outcome.proven
    summary: dict[str, Any] = {"model_name": config.model_name, "backend": config.backend, "proof": proven.figures() if proven else None}
    summary |= {"adapter": decided.adapter, "adapters": sorted(decided.adapters), "weights": config.weights}
    summary |= {"adapter_because": decided.reason} if decided.reason else {}
    if outcome.unproven:
        summary["unproven_because"] = outcome.unproven
    full: dict[str, Any] = asdict(proven) if proven else {"proof": None, "unproven_because": outcome.unproven}
    if outcome.stand_in:
        full["stand_in"] = asdict(outcome.stand_in)
    (output / "proof.json").write_text(json.dumps(full, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "report.html").write_text(report.render(model, output, config, proven, outcome.unproven), encoding="utf-8")
    names = {folder.name for folder in folders(output, config)}
    return artifacts.publish(
        output,
        "repository",
        payload=lambda path: path.split("/")[0] in names,
        inputs=_inputs(model, decided),
        config=config.model_dump(mode="json"),
        seed=seed,
        key=key,
        summary=summary,
    )


def _inputs(model: Model, decided: Form) -> list[artifacts.Input]:
    """The model, its base, and the models whose adapters were added."""
    others = [one.as_input() for one in decided.adapters.values() if one is not model]
    return [model.as_input(), *([model.base.as_input()] if model.artifact else []), *others]
