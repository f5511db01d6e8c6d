"""customization.yaml: one section per stage, each defined by a Pydantic model in the stage's package.

This module copies the values that sections share.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.artifacts import output_paths
from components.common.cost.budgets import Budget
from components.common.runtime.errors import ConfigurationError, UsageError
from components.common.runtime.relative_paths import shorten_paths
from components.common.runtime.validation_errors import describe_validation_error, locate_problem
from components.common.runtime.yaml_loading import (
    MAX_CHARACTERS,
    TAB_PROBLEM,
    StrictLoader,
    describe_yaml_error,
    load_yaml,
)
from components.data_curation.config import DataCurationConfig
from components.data_curation.databases.database_registry import check_request, is_table_address
from components.data_curation.databases.table_request import TableRequest, check_no_password
from components.data_curation.reading.table_settings import is_query_file
from components.data_versioning.config import DataVersioningConfig
from components.evaluation.config import (
    EvaluationConfig,
    adapt_to_reward_model,
    check_quantized_engine,
    check_task_kinds,
)
from components.evaluation.tasks.task_registry import TASK_KINDS
from components.fine_tuning.config import PREVIOUS, FineTuningConfig
from components.model_registry.config import ModelRegistryConfig
from components.triton_packaging.config import TritonPackagingConfig, check_quantization

Values = dict[str, Any]  # parsed YAML: sections, keys and values
# Keys whose values are paths, or lists of paths.
PATH_KEYS = (
    "data_curation.tokens.base_model",
    "data_curation.personal_data.names.model",
    "data_curation.quality_scores.perplexity.model",
    "fine_tuning.base_model",
    "fine_tuning.initial_adapter",
    "fine_tuning.distillation.teacher",
)
PATH_LIST_KEYS = (
    "data_curation.sources",
    "data_curation.decontamination.sets",
    "data_curation.quality_scores.classifier.good",
    "data_curation.quality_scores.classifier.bad",
)

FILE_CREDENTIALS_HINT = (
    "Remove the password from the address. Set the credentials of object stores in environment variables, and those of "
    "Git in Git's credential helper: see Sources in docs/how-to/data.md."
)
DEMO_PATH = Path(__file__).parent / "demo.yaml"


class Customization(BaseModel):
    """A customization: the settings of all stages."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    seed: int = Field(42, ge=0, lt=2**32, description="Seed for the split, training and confidence intervals.")
    data_curation: DataCurationConfig = Field(
        DataCurationConfig(), description="Data curation: from raw text to clean splits."
    )
    data_versioning: DataVersioningConfig = Field(DataVersioningConfig(), description="Storage of dataset versions.")
    fine_tuning: FineTuningConfig = Field(FineTuningConfig(), description="Base model and training.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Tasks, metrics and the promotion gate.")
    triton_packaging: TritonPackagingConfig = Field(TritonPackagingConfig(), description="Package for Triton.")
    model_registry: ModelRegistryConfig = Field(ModelRegistryConfig(), description="Registered model and promotion.")
    team: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,63}$",
        exclude_if=operator.not_,
        description="Team that is charged for the runs, for `tuneline costs` and `team_budgets` in platform.yaml.",
    )
    budget: Budget = Field(
        Budget(),
        exclude_if=lambda budget: budget == Budget(),
        description="Limits of a run, including its earlier attempts. A training run that reaches a limit saves a "
        "checkpoint and exits with status 75.",
    )

    @classmethod
    def load(cls, path: str | Path | None = None, **sections: object) -> Customization:
        """Load a customization from a file, keyword arguments, or both.

        Relative paths are resolved from the file's folder, those of keyword arguments from the current folder.

            Customization.load("customization.yaml", seed=7, fine_tuning={"max_steps": 100})

        Args:
            path: a YAML file; None for the defaults.
            sections: values by section. A key overrides that of the file; a mapping replaces the whole mapping.

        Raises:
            ConfigurationError: a value is invalid; the message contains the file, the field, the value found and the allowed values.
        """
        values = read_sections(Path(path)) if path else {}
        if path:
            _make_paths_absolute(values, Path(path).absolute().parent)
        for section, stated in sections.items():
            own = values.get(section)
            plain = _convert_paths(stated)
            values[section] = {**own, **plain} if isinstance(own, dict) and isinstance(plain, dict) else plain
        _make_paths_absolute(values, Path.cwd())
        return parse_values(values, str(path) if path else "the configuration")

    @classmethod
    def load_demo(cls) -> Customization:
        """Load the customization of the demo: the documentation of Python's standard library and a small model."""
        return cls.load(DEMO_PATH)

    def set(self, key: str, value: object) -> Customization:
        """Set a key, check the value, and return this customization.

            customization.set("fine_tuning.learning_rate", 1e-4).set("data_curation.sources", ["tickets.jsonl"])

        Args:
            key: the key with its sections.
            value: the value; relative paths are resolved from the current folder.

        Raises:
            ConfigurationError: the key does not exist, or the value is invalid; the customization is unchanged.
            UsageError: a list has no item with the index in the key.
        """
        values = self._collect_values()
        _set_value(values, key.split("."), _convert_paths(value))
        changed = _parse_own_values(values)
        for name in type(self).model_fields:
            setattr(self, name, getattr(changed, name))
        self.model_fields_set.intersection_update(changed.model_fields_set)
        return self

    def copy_checked(self) -> Customization:
        """Return a copy with checked values, for a customization whose keys were assigned; relative paths as in `set`.

        Raises:
            ConfigurationError: a value is invalid.
        """
        return _parse_own_values(self._collect_values())

    def check(self) -> None:
        """Check values that depend on one another, as `tuneline run` does before any stage.

        Raises:
            ConfigurationError: two values contradict each other.
        """
        check_consistency(self)

    def write(self, path: str | Path) -> Path:
        """Write the keys that were set to a YAML file that `tuneline run -c` accepts, and return its path.

        Raises:
            ConfigurationError: a value is invalid.
        """
        output_paths.write_file(Path(path), self.copy_checked()._format_set_keys())
        return Path(path)

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in self._collect_values().items())
        return shorten_paths(f"Customization({', '.join(values)})")

    def _repr_html_(self) -> str:
        """Return the keys that were set, as in a file."""
        return f"<b>Customization</b><pre>{escape(shorten_paths(self._format_set_keys()))}</pre>"

    def _format_set_keys(self) -> str:
        """Return the keys that were set, in YAML."""
        _mark_sections(self)
        values = self.model_dump(mode="json", exclude_unset=True, warnings=False)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)

    def _collect_values(self) -> Values:
        """Return the keys that were set, those assigned to a section with default values included."""
        _mark_sections(self)
        values: Values = self.model_dump(exclude_unset=True, warnings=False)
        return {name: _convert_paths(value) for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _add_reward_task(cls, values: Any) -> Any:
        """Add the task of a reward model to an evaluation that sets no tasks, so that its gate can use the task's metrics."""
        tuning, evaluation = (
            (values.get(name) for name in ("fine_tuning", "evaluation")) if isinstance(values, dict) else (None, None)
        )
        if not (isinstance(tuning, dict) and isinstance(evaluation, dict)) or tuning.get("objective") != "reward":
            return values
        if (
            "tasks" in evaluation
            or evaluation.get("suite", "none") != "none"
            or not {"gate", "suite"} & evaluation.keys()
        ):
            return values
        return {**values, "evaluation": {**evaluation, "tasks": [{"kind": "reward"}], "suite": "none"}}

    @model_validator(mode="after")
    def share_values(self) -> Customization:
        """Copy fine-tuning's values to the sections that use them, unless these set their own."""
        if self.fine_tuning.objective_spec.scores_answers:
            own_keys = set(self.model_fields_set)
            self.evaluation = adapt_to_reward_model(self.evaluation)
            self.model_fields_set.intersection_update(own_keys)
        tuning, tokens = self.fine_tuning, self.data_curation.tokens
        perplexity = self.data_curation.quality_scores.perplexity
        scorers = [(perplexity, "model", tuning.base_model)] if perplexity.is_enabled else []
        packaged = "none" if tuning.objective_spec.scores_answers else self.triton_packaging.quantization
        for section, field, value in (
            (self.evaluation, "max_length", tuning.max_length),
            (self.evaluation, "quantization", packaged),
            (tokens, "max_length", tuning.max_length),
            (tokens, "base_model", tuning.base_model),
            *scorers,
        ):
            if value is not None and (field not in section.model_fields_set or not getattr(section, field)):
                setattr(section, field, value)
                section.model_fields_set.discard(field)  # an unset field continues to follow the shared value
        return self


def _mark_sections(section: BaseModel) -> bool:
    """Mark the sections with a key that was set as set; return whether the section has such a key."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel) and _mark_sections(value):
            section.model_fields_set.add(name)
    return bool(section.model_fields_set)


def _parse_own_values(values: Values) -> Customization:
    """Validate values of a Python caller, whose paths are relative to the current folder."""
    _make_paths_absolute(values, Path.cwd())
    return parse_values(values, "the configuration")


def load_customization(
    path: Path | None = None, overrides: Sequence[str] = (), *, resolve_paths: bool = True, or_demo: bool = False
) -> Customization:
    """Load a customization.

    Args:
        path: A YAML file; None for the defaults.
        overrides: Strings `section.key=value` with values in YAML.
        resolve_paths: Make relative paths absolute; False for a customization that runs on another machine.
        or_demo: Start from the demo's configuration file if neither a file nor an override states the sources.

    Raises:
        ConfigurationError: a value is invalid; the message contains the file, the field, the value found and the allowed values.
        UsageError: an override is malformed.
    """
    values = read_sections(path) if path else {}
    if path and resolve_paths:
        _make_paths_absolute(values, path.absolute().parent)
    for override in overrides:
        _apply_override(values, override)
    if or_demo and path is None and not has_sources(values):
        values = read_sections(DEMO_PATH)
        for override in overrides:
            _apply_override(values, override)
    if resolve_paths:
        _make_paths_absolute(values, Path.cwd())
    if path is None:
        return parse_values(values, "the configuration")
    return parse_values(values, str(path), [override.partition("=")[0].strip() for override in overrides])


def _check_evaluated_weights(config: Customization) -> None:
    """Check that the gate judges the weights that a package contains."""
    evaluated, packaged = config.evaluation.quantization, config.triton_packaging.quantization
    if evaluated != packaged and not config.fine_tuning.objective_spec.scores_answers:
        raise ConfigurationError(
            f"evaluation.quantization is {evaluated}, but triton_packaging.quantization is {packaged}; expected equal values",
            hint="Set only triton_packaging.quantization.",
        )
    check_quantized_engine(config.evaluation)


def has_sources(values: Values) -> bool:
    """Return whether the values state data_curation.sources."""
    section, name = find_section(values, "data_curation.sources")
    return section is not None and name in section


def check_consistency(config: Customization, *, can_promote: bool = True) -> None:
    """Check values that depend on one another, before any stage runs.

    Args:
        config: The customization.
        can_promote: Whether the configured work includes the promotion; False for a stage that runs alone.

    Raises:
        ConfigurationError: the packaging cannot represent the trained parameters of a recipe; or the address of a
            source contains a password, which compiled pipelines and manifests would repeat; or the settings of a
            table do not fit its database; or a model would be promoted without the regression suite.
    """
    check_task_kinds(config.evaluation, is_reward_model=config.fine_tuning.objective_spec.scores_answers)
    if can_promote and config.model_registry.auto_promote:
        _check_suite(config)
    _check_evaluated_weights(config)
    for entry in config.data_curation.sources:
        is_table = is_table_address(entry.path)
        check_no_password(entry.path, *([] if is_table else [FILE_CREDENTIALS_HINT]))
        if is_table:
            check_request(TableRequest(entry.path, entry.table_settings, Path()))
    for tuning in config.fine_tuning.recipes.values():
        _check_package(tuning, config.triton_packaging)


def _check_suite(config: Customization) -> None:
    """Check that the regression suite measures a model that is promoted automatically."""
    if config.fine_tuning.objective_spec.scores_answers:
        raise ConfigurationError(
            "model_registry.auto_promote is true, and fine_tuning.objective is reward: no regression suite measures reward models",
            hint="Set model_registry.auto_promote to false and use `tuneline promote`.",
        )
    if config.evaluation.suite == "none":
        raise ConfigurationError(
            "model_registry.auto_promote is true, but evaluation.suite is 'none'; automatic promotion requires 'default'",
            hint="Set evaluation.suite to default, or model_registry.auto_promote to false and use `tuneline promote`.",
        )


def _check_package(tuning: FineTuningConfig, packaging: TritonPackagingConfig) -> None:
    """Check that the package can contain the parameters that a recipe trains."""
    adaptation, is_vllm = tuning.adaptation_spec, packaging.backend == "vllm"
    if adaptation.is_prompt_based and (is_vllm or packaging.adapter == "merged"):
        raise ConfigurationError(
            f"fine_tuning.adaptation: virtual tokens ({tuning.adaptation}) can neither be merged into weights "
            "nor be served by vLLM",
            hint="Set triton_packaging.backend to python and triton_packaging.adapter to auto, "
            "or use adaptation lora or full.",
        )
    if not adaptation.is_mergeable or tuning.merge:
        check_quantization(packaging, is_attached=not adaptation.is_mergeable and not adaptation.trains_all_weights)
        return
    attached_automatically = is_vllm and adaptation.is_servable_by_vllm and packaging.quantization == "none"
    attached = {"attached": True, "merged": False, "auto": attached_automatically}[packaging.adapter]
    check_quantization(packaging, is_attached=attached)
    if packaging.weights == "referenced" and not attached:
        raise ConfigurationError(
            "triton_packaging.weights is 'referenced', but only the package would contain the merged weights",
            hint="Set triton_packaging.adapter to attached, or triton_packaging.weights to copied.",
        )
    if is_vllm and attached:
        _check_vllm_adapter(tuning)


def _check_vllm_adapter(tuning: FineTuningConfig) -> None:
    """Check that vLLM can attach the adapter that a recipe trains."""
    if not tuning.adaptation_spec.is_servable_by_vllm:
        raise ConfigurationError(
            "triton_packaging.adapter: found 'attached'; vLLM cannot attach adapters of fine_tuning.adaptation "
            f"{tuning.adaptation}",
            hint="Set triton_packaging.adapter to auto or merged.",
        )
    if tuning.adaptation_spec.is_low_rank and tuning.lora.dora:
        raise ConfigurationError(
            "fine_tuning.lora.dora is true, but vLLM does not support DoRA in an attached adapter",
            hint="Set triton_packaging.adapter to merged, or fine_tuning.lora.dora to false.",
        )


def parse_values(values: Values, source: str, overrides: Sequence[str] = ()) -> Customization:
    """Validate nested values and return them as a customization.

    Args:
        values: The sections by name, as parsed from YAML.
        source: The origin of the values, for error messages.
        overrides: The keys whose values are from `--set`.

    Raises:
        ConfigurationError: a value is invalid.
    """
    try:
        return Customization.model_validate(values)
    except ValidationError as error:
        problems = [
            (".".join(map(str, _list_keys(locate_problem(problem), values))), problem["type"] == "extra_forbidden")
            for problem in error.errors()
        ]
        # An unknown key may be a section of an override, such as data_curation.fraction of data_curation.fraction.test.
        if all(
            any(f"{field}.".startswith(f"{key}.") or (unknown and key.startswith(f"{field}.")) for key in overrides)
            for field, unknown in problems
        ):
            source = "--set"
        raise ConfigurationError(
            describe_validation_error(error, source, Customization),
            hint="See docs/reference/configuration.md, or run `tuneline init` to write a commented file.",
        ) from None


def _list_keys(location: Sequence[int | str], values: Values) -> list[int | str]:
    """Return the keys of an error's location. Pydantic adds the kind of an item, such as `generation`, behind its index."""
    keys: list[int | str] = []
    section: Any = values
    for key in location:
        if isinstance(section, dict) and key not in section and section.get("kind") == key:
            continue
        keys.append(key)
        is_item = isinstance(section, list) and isinstance(key, int) and key < len(section)
        section = section[key] if is_item else section.get(key) if isinstance(section, dict) else None
    return keys


def read_sections(path: Path) -> Values:
    """Return the sections of a YAML file.

    Raises:
        ConfigurationError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        values = load_yaml(_read_text(path), StrictLoader)
    except yaml.YAMLError as error:
        has_tab = TAB_PROBLEM in str(getattr(error, "problem", ""))
        raise ConfigurationError(
            f"{path} is not YAML: {describe_yaml_error(error)}",
            hint="Indent with spaces: YAML allows no tabs."
            if has_tab
            else "Correct the line; `tuneline init` writes an example.",
        ) from None
    if values is not None and not isinstance(values, dict):
        kind = YAML_TYPE_NAMES.get(type(values), "a value")
        raise ConfigurationError(
            f"{path} contains {kind}; expected a mapping of sections",
            hint="Run `tuneline init` to write an example.",
        )
    return values or {}


def _read_text(path: Path) -> str:
    """Return the text of a file. Rejects pipes and devices, which could block or never end."""
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a folder, not a file",
            hint=f"Specify a file in this folder, for example {path / 'customization.yaml'}.",
        )
    if not path.exists():
        name = "platform.yaml" if "platform" in path.name else "customization.yaml"
        raise ConfigurationError(
            f"{path} does not exist", hint=f"Check the path; `tuneline init` writes a commented {name}."
        )
    if not path.is_file():
        raise ConfigurationError(
            f"{path} is a pipe or a device, not a file", hint="Specify the path of a file with the configuration."
        )
    if (size := path.stat().st_size) > MAX_CHARACTERS:
        raise ConfigurationError(
            f"{path} has {size:,} bytes; a configuration has at most {MAX_CHARACTERS:,}",
            hint="Check the path; put data into files that the configuration refers to.",
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}",
            hint=f"Grant this user read access; `ls -l {path}` shows the permissions.",
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigurationError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} in line {line}",
            hint="Save the file as UTF-8; `iconv` converts from another encoding.",
        ) from None


YAML_TYPE_NAMES: dict[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def _apply_override(values: Values, override: str) -> None:
    """Set one `section.key=value` in the nested values."""
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise UsageError(
            f"--set {override} is not of the form section.key=value",
            hint="Use the form --set fine_tuning.max_steps=100.",
        )
    try:
        value = load_yaml(text, StrictLoader)
    except yaml.YAMLError as error:
        raise UsageError(
            f"--set {override}: the value is not YAML: {describe_yaml_error(error)}",
            hint="Close every bracket and quote, or quote a string with special characters: --set 'section.key=\"a: b\"'.",
        ) from None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 5e-4 as text; it expects 5.0e-4
    _set_value(values, keys, value)


def _set_value(values: Values, keys: Sequence[str], value: object) -> None:
    """Set a key of the nested values, and create its sections. A key of a list is the index of an existing item.

    Raises:
        UsageError: a list has no item with this index, or the item has no keys.
    """
    section: Any = values
    for number, key in enumerate(keys):
        path = ".".join(keys[:number])
        position: Any = key
        if isinstance(section, list):
            position = int(key) if key.isdecimal() and int(key) < len(section) else None
        if position is None or not isinstance(section, dict | list):
            found = f"a list of length {len(section)}" if isinstance(section, list) else "not a mapping"
            raise UsageError(
                f"{'.'.join(keys)}: {path} is {found} and has no item {key}",
                hint=f"The first item of a list has the index 0. Set the whole value of {path} to change its items or keys.",
            )
        if number == len(keys) - 1:
            section[position] = value
        elif isinstance(section, dict) and not isinstance(section.get(key), dict | list):
            if keys[number + 1].isdecimal():
                path = ".".join(keys[: number + 1])
                raise UsageError(
                    f"{'.'.join(keys)}: the configuration does not set the list {path}",
                    hint=f"Set the whole list, for example {path}=[one, two].",
                )
            section[key] = {}
        section = section[position]


def _convert_paths(value: object) -> object:
    """Return a value of a Python caller with strings for its paths, as in a file."""
    if isinstance(value, dict):
        return {key: _convert_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_paths(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _make_paths_absolute(values: Values, base: Path) -> None:
    """Resolve relative paths from `base`: the file's folder for those in a file, the current folder for others."""
    for kind, keys in ((str, PATH_KEYS), (list, PATH_LIST_KEYS)):
        for key in keys:
            section, name = find_section(values, key)
            if section and isinstance(section.get(name), kind):
                section[name] = _make_absolute(section[name], base)
    section, name = find_section(values, "fine_tuning.grpo.rewards")
    rewards = section.get(name) if section else None
    for reward in rewards if isinstance(rewards, list) else ():
        if isinstance(reward, dict) and isinstance(reward.get("model"), str) and reward["model"] != PREVIOUS:
            reward["model"] = _make_absolute(reward["model"], base)
    section, name = find_section(values, "evaluation.tasks")
    tasks = section.get(name) if section else None
    for task in tasks if isinstance(tasks, list) else ():
        if isinstance(task, dict) and (entry := TASK_KINDS.get(str(task.get("kind")))):
            for name in [name for name, value in task.items() if entry.settings.is_file_path(name, value)]:
                task[name] = _make_absolute(task[name], base)


def find_section(values: Values, key: str) -> tuple[Values | None, str]:
    """Find the section that contains a key.

    Args:
        values: The sections by name, as parsed from YAML.
        key: The key with its sections, for example `fine_tuning.lora.dora`.

    Returns:
        The section, None if the section is missing or not a mapping; and the last part of the key.
    """
    *sections, name = key.split(".")
    found: object = values
    for section in sections:
        found = found.get(section) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None, name


def _make_absolute(value: object, base: Path) -> object:
    """Return a path from `base`; a URI (demo:, embedded:, hf://) and other values unchanged."""
    if isinstance(value, list):
        return [_make_absolute(item, base) for item in value]
    if isinstance(value, dict) and "path" in value:
        paths = {"path": value["path"]}
        if is_query_file(str(value.get("query", ""))):
            paths["query"] = value["query"]
        return {**value, **{name: _make_absolute(path, base) for name, path in paths.items()}}
    if not isinstance(value, str) or not value or re.match(r"[a-z0-9+]+:", value):
        return value
    return str(base / Path(value).expanduser())
