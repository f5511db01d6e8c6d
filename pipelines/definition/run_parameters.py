"""Parameters of a run in the Kubeflow UI: eleven typed parameters, and `configuration` for every other key.

Defaults are fixed when the pipeline is compiled, so a run can detect changed parameters. A changed parameter
overrides its default. The same key in `configuration` overrides an unchanged parameter. A conflict is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from components.common.runtime.errors import ConfigurationError
from components.common.runtime.yaml_loading import load_yaml
from components.data_curation.reading.table_settings import is_query_file
from components.evaluation.tasks.config import SUITE_SCHEME
from components.fine_tuning.config import PREVIOUS
from pipelines.config.customization_chain import (
    ChainedCustomization,
    ChainEntry,
    link_customizations,
    sets_base_model,
)
from pipelines.config.customization_config import YAML_TYPE_NAMES, Customization, Values, find_section, parse_values
from pipelines.definition.pipeline_names import CHAIN_PARAMETER

PARAMETER_KEYS: dict[str, str] = {
    "sources": "data_curation.sources",
    "base_model": "fine_tuning.base_model",
    "model_name": "model_registry.name",
    "adaptation": "fine_tuning.adaptation",
    "max_steps": "fine_tuning.max_steps",
    "epochs": "fine_tuning.epochs",
    "learning_rate": "fine_tuning.learning_rate",
    "batch_size": "fine_tuning.batch_size",
    "max_length": "fine_tuning.max_length",
    "seed": "seed",
    "auto_promote": "model_registry.auto_promote",
}
# Numbers that may be null; 0 in the form.
AUTOMATIC_PARAMETERS = ("max_steps", "epochs", "learning_rate", "batch_size", "max_length")
PARAMETERS_SOURCE = "the run's parameters"
CHAIN_HINT = "Quote each customization, for example ['seed: 1', 'seed: 2']."


class _SingleLineDumper(yaml.SafeDumper):
    """Writes multi-line strings with escapes."""


_SingleLineDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


def default_parameters(config: Customization) -> Values:
    """Return the parameters' values by name. A number that is null becomes 0: Kubeflow cannot omit it."""
    values = config.model_dump(mode="json")
    parameters = {name: reduce(getitem, key.split("."), values) for name, key in PARAMETER_KEYS.items()}
    return {**parameters, **{name: parameters[name] or 0 for name in AUTOMATIC_PARAMETERS}}


def dump_remaining_keys(config: Customization) -> str:
    """Return the keys without a parameter that differ from their defaults, as one line of YAML; "" for no such key.

    kfp writes a default into a comment at the head of the compiled file, where a second line would end the comment.
    """
    stated = config.model_dump(mode="json", exclude_unset=True)
    for key in PARAMETER_KEYS.values():
        section, field = find_section(stated, key)
        if section:
            section.pop(field, None)
    defaults = default_parameters(config)
    return _dump_differences(config, stated, combine_parameters(defaults, defaults, ""))


def dump_customization(config: Customization) -> str:
    """Return every key that differs from tuneline's defaults, as one line of YAML."""
    return _dump_differences(config, config.model_dump(mode="json", exclude_unset=True), Customization())


def dump_chain(chain: Sequence[ChainedCustomization]) -> list[str]:
    """Return `dump_customization` of each customization; the base model only of one that tunes no earlier model."""
    texts = []
    for link in chain:
        values = _parse_sections(dump_customization(link.customization))
        tuning = values.setdefault("fine_tuning", {})
        tuning.pop("base_model", None)
        if link.tuned is None:
            tuning["base_model"] = link.customization.fine_tuning.base_model
        texts.append(_dump_values(values))
    return texts


def _dump_differences(config: Customization, stated: Values, implied: Customization) -> str:
    return _dump_values(_select_differing(stated, config.model_dump(mode="json"), implied.model_dump(mode="json")))


def _dump_values(different: Values) -> str:
    options: Values = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": 10**6}
    return str(yaml.dump(different, Dumper=_SingleLineDumper, **options)).strip() if different else ""


def _select_differing(stated: Values, full: Values, implied: Values) -> Values:
    """Return the stated values that differ from the implied ones; a list counts as one value.

    A section that is not in use, such as a sweep, is missing from the implied values.
    """
    different: Values = {}
    for name, value in stated.items():
        if name not in implied:
            different[name] = value
        elif isinstance(value, dict):
            if inner := _select_differing(value, full[name], implied[name]):
                different[name] = inner
        elif full[name] != implied[name]:
            different[name] = value
    return different


def parse_customization(text: str) -> Customization:
    """Parse the text of a customization.yaml.

    Raises:
        ConfigurationError: the text is not a YAML mapping, a value is invalid, or a path is relative.
    """
    return require_absolute_paths(parse_values(_parse_sections(text), PARAMETERS_SOURCE))


def parse_chain(texts: Sequence[object]) -> list[ChainedCustomization]:
    """Parse the texts of a chain's customizations, the run's parameter `configurations`.

    Raises:
        ConfigurationError: the list is empty, an element is not the text of a YAML mapping, a value is invalid, a path is
            relative, or the customizations are not a chain.
    """
    if not texts:
        raise ConfigurationError(
            f"{CHAIN_PARAMETER} is an empty list; expected texts of customization.yaml", hint=CHAIN_HINT
        )
    entries = []
    for number, text in enumerate(texts):
        source = f"{CHAIN_PARAMETER}[{number}]"
        if not isinstance(text, str):
            kind = YAML_TYPE_NAMES.get(type(text), "null")
            raise ConfigurationError(f"{source} is {kind}; expected the text of a customization.yaml", hint=CHAIN_HINT)
        values = _parse_sections(text, source)
        config = require_absolute_paths(parse_values(values, source))
        entries.append(ChainEntry(source, config, sets_base_model(values)))
    return link_customizations(entries)


def check_compiled_chain(chain: Sequence[ChainedCustomization], compiled: Sequence[str]) -> None:
    """Raise ConfigurationError if the chain needs other tasks than `compiled`, the texts at compile time."""
    found, expected = (_describe_tasks(each) for each in (chain, parse_chain(compiled)))
    if found != expected:
        raise ConfigurationError(
            f"{CHAIN_PARAMETER} trains {found}; the pipeline is compiled for {expected}",
            hint="Compile the pipeline again for these customizations.",
        )


def _describe_tasks(chain: Sequence[ChainedCustomization]) -> str:
    """Return what determines the tasks of a chain: the models' kinds, and the earlier models that each one uses."""
    described = []
    for number, link in enumerate(chain):
        used = [f"[{position}]" for position in (link.tuned, link.rewarded_by) if position is not None]
        kind = "reward model" if link.trains_reward_model else "language model"
        described.append(f"[{number}] a {kind}" + (f" from {' and '.join(used)}" if used else ""))
    return ", ".join(described)


def combine_parameters(given: Mapping[str, Any], compiled: Mapping[str, Any], text: str) -> Customization:
    """Return the customization of a run.

    Args:
        given: The run's parameters by name.
        compiled: The parameters' defaults at compile time.
        text: The parameter `configuration`, YAML.

    Raises:
        ConfigurationError: a key has two different values, a value is invalid, or a path is relative.
    """
    values = _parse_sections(text)
    for name, key in PARAMETER_KEYS.items():
        value = None if name in AUTOMATIC_PARAMETERS and given[name] == 0 else given[name]
        changed, (section, field) = given[name] != compiled[name], find_section(values, key)
        stated = section is not None and field in section
        if changed and section and stated and _validate_value(key, section[field]) != value:
            raise ConfigurationError(
                f"{key} is set twice: the parameter {name} is {json.dumps(given[name])}, and "
                f"`configuration` has {json.dumps(section[field])}",
                hint=f"Remove {key} from `configuration`, or leave the parameter {name} at its default.",
            )
        if changed or not stated:
            for part in key.split(".")[:-1]:
                values[part] = {} if values.get(part) is None else values[part]
            section, _ = find_section(values, key)
            if section is not None:  # otherwise the section is not a mapping, which validation reports
                section[field] = value
    return require_absolute_paths(parse_values(values, PARAMETERS_SOURCE))


def list_paths(config: Customization) -> dict[str, list[str]]:
    """Return the values of a customization that may be paths, by key."""
    tasks = {
        f"evaluation.tasks[{i}]": [
            path for path in task.list_file_paths().values() if not path.startswith(SUITE_SCHEME)
        ]
        for i, task in enumerate(config.evaluation.tasks)
    }
    return {
        "data_curation.sources": [
            path
            for entry in config.data_curation.sources
            for path in (entry.path, *([entry.query] if is_query_file(entry.query) else []))
        ],
        "fine_tuning.base_model": [config.fine_tuning.base_model],
        "fine_tuning.distillation.teacher": list(filter(None, [config.fine_tuning.distillation.teacher])),
        "fine_tuning.grpo.rewards": [
            entry.model for entry in config.fine_tuning.grpo.rewards if entry.model and entry.model != PREVIOUS
        ],
        **tasks,
    }


def require_absolute_paths(config: Customization) -> Customization:
    """Return the customization if all its paths are absolute: pods share no current folder.

    Raises:
        ConfigurationError: a path is relative.
    """
    for key, paths in list_paths(config).items():
        for path in paths:
            if not path.startswith("/") and not re.match(r"[a-z0-9+]+:", path):
                raise ConfigurationError(
                    f"{key}: {path} is a relative path; pods require absolute paths",
                    hint="Specify the path on the shared volume, as pods see it, for example /data/raw/tickets.jsonl.",
                )
    return config


def _parse_sections(text: str, parameter: str = "configuration") -> Values:
    try:
        values = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"the parameter `{parameter}` is not YAML: {' '.join(str(error).split())}", hint="Correct the line."
        ) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError(
            f"the parameter `{parameter}` is {YAML_TYPE_NAMES.get(type(values), 'a value')}; "
            "expected a YAML mapping of sections",
            hint="Specify the text of a customization.yaml, for example `evaluation: {max_items: 200}`.",
        )
    return values or {}


def _validate_value(key: str, value: object) -> object:
    """Return the value as its field parses it (YAML 1.1 reads 5e-4 as text), or unchanged if the field rejects it."""
    model: Any = Customization
    for part in key.split("."):
        model = model.model_fields[part].annotation
    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError:
        return value
