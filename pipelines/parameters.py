"""What a run can be given in the Kubeflow UI: eleven typed parameters, and `configuration` for every other key.

A parameter's default is fixed when the pipeline is compiled. So a run knows which parameters were changed: those win over the defaults,
a parameter left alone yields to the same key in `configuration`, and a key set differently in both places is refused, because nobody
could say which was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from components.common.errors import ConfigurationError
from components.evaluation.tasks.config import files
from pipelines.config import Customization, parse

KEYS = {
    "sources": ("data_curation", "sources"),
    "base_model": ("fine_tuning", "base_model"),
    "model_name": ("model_registry", "name"),
    "adaptation": ("fine_tuning", "adaptation"),
    "max_steps": ("fine_tuning", "max_steps"),
    "epochs": ("fine_tuning", "epochs"),
    "learning_rate": ("fine_tuning", "learning_rate"),
    "batch_size": ("fine_tuning", "batch_size"),
    "max_length": ("fine_tuning", "max_length"),
    "seed": ("seed",),
    "auto_promote": ("model_registry", "auto_promote"),
}
WHERE = "the run's parameters"


class _OneLine(yaml.SafeDumper):
    """Writes text of several lines with escapes."""


_OneLine.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)
)


def defaults(config: Customization) -> dict[str, Any]:
    """The parameters' values by name. max_steps null is 0 here: Kubeflow has no good way to leave an integer out."""
    values = config.model_dump(mode="json")
    found = {name: _get(values, key) for name, key in KEYS.items()}
    return {**found, "max_steps": found["max_steps"] or 0}


def remainder(config: Customization) -> str:
    """The keys that are no parameters, as YAML: those whose absence would change the customization. Empty for the defaults.

    One line: kfp writes a default into a comment at the head of the compiled file, and a second line would end the comment.
    """
    stated, full = config.model_dump(mode="json", exclude_unset=True), config.model_dump(mode="json")
    for key in KEYS.values():
        _remove(stated, key)
    return _in_one_line(_differing(stated, full, combine(defaults(config), defaults(config), "").model_dump(mode="json")))


def _in_one_line(left: dict[str, Any]) -> str:
    return (
        yaml.dump(left, Dumper=_OneLine, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip() if left else ""
    )


def whole(config: Customization) -> str:
    """Every key that is not tuneline's default, as YAML in one line, for a pipeline whose one parameter for settings is `configuration`."""
    stated, full = config.model_dump(mode="json", exclude_unset=True), config.model_dump(mode="json")
    return _in_one_line(_differing(stated, full, Customization().model_dump(mode="json")))


def read(text: str) -> Customization:
    """The customization that `whole` wrote, or a person. Raises ConfigurationError as `combine` does."""
    return with_absolute_paths(parse(_sections(text), WHERE))


def combine(given: Mapping[str, Any], compiled: Mapping[str, Any], text: str) -> Customization:
    """The customization of a run: its parameters as given, their defaults as compiled, and `configuration` as YAML text.

    Raises ConfigurationError for a key set differently in both places, for what the models refuse, and for a relative path.
    """
    values = _sections(text)
    for name, key in KEYS.items():
        value = None if name == "max_steps" and given[name] == 0 else given[name]
        changed, stated = given[name] != compiled[name], _has(values, key)
        if changed and stated and _typed(key, _get(values, key)) != value:
            raise _twice(name, key, given[name], _get(values, key))
        if changed or not stated:
            _set(values, key, value)
    return with_absolute_paths(parse(values, WHERE))


def named_paths(config: Customization) -> dict[str, list[str]]:
    """By key, everything in a customization that may be a path."""
    named = {"data_curation.sources": config.data_curation.sources, "fine_tuning.base_model": [config.fine_tuning.base_model]}
    return named | {f"evaluation.tasks[{i}]": list(files(task).values()) for i, task in enumerate(config.evaluation.tasks)}


def with_absolute_paths(config: Customization) -> Customization:
    """The customization itself. Raises ConfigurationError for a path that counts from a folder which no pod has."""
    for key, paths in named_paths(config).items():
        for path in paths:
            if not path.startswith("/") and not re.match(r"[a-z0-9]+:", path):
                raise ConfigurationError(
                    f"{key}: {path} is a relative path, and a pod has no folder that it could count from",
                    hint="Give the path that the pods see on the shared volume, for example /data/raw/tickets.jsonl.",
                )
    return config


def _twice(name: str, key: tuple[str, ...], given: Any, stated: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{'.'.join(key)} is set twice: the parameter {name} is {json.dumps(given)}, and `configuration` says {json.dumps(stated)}",
        hint=f"Set it in one place: take it out of `configuration`, or leave the parameter {name} at its default.",
    )


def _sections(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"the parameter `configuration` is not YAML: {' '.join(str(error).split())}", hint="Mend the line it names."
        ) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError(
            f"the parameter `configuration` holds a {type(values).__name__}, not sections",
            hint="It wants the text of a customization.yaml, for example `evaluation: {max_items: 200}`.",
        )
    return values or {}


def _typed(key: tuple[str, ...], value: Any) -> Any:
    """A value as its field reads it (5e-4 is text to YAML 1.1), or itself where the field refuses it: the models say so later."""
    model: Any = Customization
    for part in key[:-1]:
        model = model.model_fields[part].annotation
    try:
        return TypeAdapter(model.model_fields[key[-1]].annotation).validate_python(value)
    except ValidationError:
        return value


def _differing(stated: dict[str, Any], full: dict[str, Any], implied: dict[str, Any]) -> dict[str, Any]:
    """The stated values that are not implied; a list counts as one value."""
    left: dict[str, Any] = {}
    for name, value in stated.items():
        if isinstance(value, dict):
            inner = _differing(value, full[name], implied[name])
            if inner:
                left[name] = inner
        elif full[name] != implied[name]:
            left[name] = value
    return left


def _get(values: dict[str, Any], key: tuple[str, ...]) -> Any:
    return values[key[0]] if len(key) == 1 else _get(values[key[0]], key[1:])


def _has(values: Any, key: tuple[str, ...]) -> bool:
    return isinstance(values, dict) and key[0] in values and (len(key) == 1 or _has(values[key[0]], key[1:]))


def _set(values: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    """Set a key, unless a section on the way is no section: that is refused by the models."""
    if len(key) == 1:
        values[key[0]] = value
        return
    section = values.get(key[0])
    values[key[0]] = {} if section is None else section
    if isinstance(values[key[0]], dict):
        _set(values[key[0]], key[1:], value)


def _remove(values: dict[str, Any], key: tuple[str, ...]) -> None:
    if len(key) == 1:
        values.pop(key[0], None)
    elif key[0] in values:
        _remove(values[key[0]], key[1:])
