"""customization.yaml: one section a stage, each a Pydantic model beside its stage; what two sections share is passed on here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.errors import ConfigurationError, UsageError
from components.data_curation.config import DataCurationConfig
from components.data_versioning.config import DataVersioningConfig
from components.evaluation.config import EvaluationConfig
from components.fine_tuning.config import FineTuningConfig
from components.model_registry.config import ModelRegistryConfig
from components.triton_packaging.config import TritonPackagingConfig


class Customization(BaseModel):
    """A whole customization. The defaults run the demo."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    seed: int = Field(42, ge=0, lt=2**32, description="One seed for the split, the training and the intervals.")
    data_curation: DataCurationConfig = Field(DataCurationConfig(), description="From raw text to clean splits.")
    data_versioning: DataVersioningConfig = Field(DataVersioningConfig(), description="Where dataset versions are kept.")
    fine_tuning: FineTuningConfig = Field(FineTuningConfig(), description="What is tuned, and how.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="What is measured, and the gate.")
    triton_packaging: TritonPackagingConfig = Field(TritonPackagingConfig(), description="How the model is packaged for Triton.")
    model_registry: ModelRegistryConfig = Field(ModelRegistryConfig(), description="Where it is registered, and whether it is promoted.")


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Customization:
    """The customization in a YAML file (defaults without one), with `section.key=value` overrides, values in YAML.

    Raises ConfigurationError naming the file, the field, what was found and what is allowed.
    """
    values = _read(path) if path else {}
    if path:
        _anchor(values, path.absolute().parent)
    for override in overrides:
        _override(values, override)
    _anchor(values, Path.cwd())
    return parse(values, str(path) if path else "the configuration")


def parse(values: dict[str, Any], where: str) -> Customization:
    """Validate a customization given as nested values; `where` names their source in errors."""
    try:
        return _share(Customization.model_validate(values))
    except ValidationError as error:
        raise ConfigurationError(
            _told(error, where), hint="docs/configuration.md lists every key; `tuneline init` writes a commented file."
        ) from None


def _share(config: Customization) -> Customization:
    """Rows are cut alike for training and evaluation unless the evaluation says otherwise."""
    if "max_length" not in config.evaluation.model_fields_set:
        config.evaluation.max_length = config.fine_tuning.max_length
        config.evaluation.model_fields_set.discard("max_length")  # nobody said so, and what was not said follows other values
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist", hint="`tuneline init` writes a commented customization.yaml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Check its permissions and that it is UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {' '.join(str(error).split())}", hint="Mend the line it names.") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError(f"{path} holds a {type(values).__name__}, not sections", hint="`tuneline init` writes an example.")
    return values or {}


def _override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise UsageError(f"--set {override} is not of the form section.key=value", hint="For example --set fine_tuning.max_steps=100.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {override}: the value is not YAML: {' '.join(str(error).split())}", hint="Quote it.") from None
    place = values
    for key in keys[:-1]:
        inner = place.get(key)
        place[key] = inner if isinstance(inner, dict) else {}
        place = place[key]
    place[keys[-1]] = _number(value)


def _anchor(values: dict[str, Any], base: Path) -> None:
    """Make the paths among sources and base model absolute: those in a file count from the file's folder, others from the current one."""
    curation, tuning = values.get("data_curation"), values.get("fine_tuning")
    if isinstance(curation, dict) and isinstance(curation.get("sources"), list):
        curation["sources"] = [_absolute(source, base) for source in curation["sources"]]
    if isinstance(tuning, dict) and "base_model" in tuning:
        tuning["base_model"] = _absolute(tuning["base_model"], base)


def _absolute(source: Any, base: Path) -> Any:
    """A path from `base`; anything with a scheme (demo:, embedded:, hf://) as it is."""
    if not isinstance(source, str) or not source or re.match(r"[a-z0-9]+:", source):
        return source
    return str(base / Path(source).expanduser())


def _number(value: Any) -> Any:
    """5e-4 is a number to everyone but YAML 1.1, which wants 5.0e-4."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
        return float(value)
    return value


def _told(error: ValidationError, where: str) -> str:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "the whole"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{field}: there is no such key{_near(problem['loc'])}")
        else:
            lines.append(f"{field}: found {problem['input']!r}; {problem['msg'].removeprefix('Value error, ')}")
    return f"{where}: " + "; ".join(lines)


def _near(location: tuple[int | str, ...]) -> str:
    """ " (did you mean …?)" for a misspelt key."""
    import difflib

    model: Any = Customization
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        model = field.annotation if field else None
    names = list(model.model_fields) if hasattr(model, "model_fields") else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {near[0]}?)" if near else f" (allowed: {', '.join(names)})" if names else ""
