"""customization.yaml: one section a stage, each a Pydantic model beside its stage; what two sections share is passed on here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.errors import ConfigurationError, UsageError
from components.data_curation.config import DataCurationConfig
from components.data_versioning.config import DataVersioningConfig
from components.evaluation.config import EvaluationConfig
from components.evaluation.tasks.config import TASK_FILES
from components.fine_tuning.config import LOW_RANK, PROMPTS, FineTuningConfig
from components.model_registry.config import ModelRegistryConfig
from components.triton_packaging.config import TritonPackagingConfig

FILES = ("data", "examples", "json_schema")  # of a task: what names a file on this machine


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

    @model_validator(mode="after")
    def _share(self) -> Customization:
        """Rows are cut alike for training and evaluation, and counted by the tuned model's tokenizer, unless a section says otherwise."""
        tuning, tokens = self.fine_tuning, self.data_curation.tokens
        for section, field, value in (
            (self.evaluation, "max_length", tuning.max_length),
            (tokens, "max_length", tuning.max_length),
            (tokens, "base_model", tuning.base_model),
        ):
            if field not in section.model_fields_set or not getattr(section, field):
                setattr(section, field, value)
                section.model_fields_set.discard(field)  # nobody said so, and what was not said follows other values
        return self


def load(path: Path | None = None, overrides: Sequence[str] = (), *, here: bool = True) -> Customization:
    """The customization in a YAML file (defaults without one), with `section.key=value` overrides, values in YAML.

    Relative paths are made absolute, unless the customization is not for this machine (`here` is False).
    Raises ConfigurationError naming the file, the field, what was found and what is allowed.
    """
    values = read(path) if path else {}
    if path and here:
        _anchor(values, path.absolute().parent)
    for override in overrides:
        _override(values, override)
    if here:
        _anchor(values, Path.cwd())
    return parse(values, str(path) if path else "the configuration")


def check_whole(config: Customization) -> None:
    """Raise ConfigurationError for stages that cannot follow one another, before hours are spent on the first ones."""
    for recipe in config.fine_tuning.recipes.values():
        _check_packaged(recipe, config.triton_packaging)


def _check_packaged(tuning: FineTuningConfig, packaging: TritonPackagingConfig) -> None:
    """Raise ConfigurationError for a recipe whose model cannot be packaged so."""
    if tuning.adaptation in PROMPTS and (packaging.backend == "vllm" or packaging.adapter == "merged"):
        raise ConfigurationError(
            f"fine_tuning.adaptation: virtual tokens ({tuning.adaptation}) can neither be merged into weights nor be served by vLLM",
            hint="Set triton_packaging.backend to python and triton_packaging.adapter to auto, or use adaptation lora or full.",
        )
    if tuning.adaptation not in LOW_RANK or tuning.merge:
        return
    attached = packaging.adapter == "attached" or (packaging.adapter == "auto" and packaging.backend == "vllm")
    if packaging.weights == "referenced" and not attached:
        raise ConfigurationError(
            "triton_packaging.weights: found 'referenced', and the adapter is merged, into weights that lie nowhere else",
            hint="Set triton_packaging.adapter to attached, or triton_packaging.weights to copied.",
        )
    if packaging.backend == "vllm" and attached and tuning.lora.dora:
        raise ConfigurationError(
            "fine_tuning.lora.dora: vLLM does not compute DoRA's part of an attached adapter",
            hint="Set triton_packaging.adapter to merged, or fine_tuning.lora.dora to false.",
        )


def parse(values: dict[str, Any], where: str) -> Customization:
    """Validate a customization given as nested values; `where` names their source in errors."""
    try:
        return Customization.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(
            told(error, where, Customization), hint="docs/configuration.md lists every key; `tuneline init` writes a commented file."
        ) from None


def read(path: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises ConfigurationError when it is not there, not readable or not made of sections."""
    try:
        values = _yaml(_text(path))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {_yaml_problem(error)}", hint=_yaml_hint(error)) from None
    if values is not None and not isinstance(values, dict):
        what = KINDS.get(type(values), "a value")
        raise ConfigurationError(f"{path} holds {what}, not sections", hint="`tuneline init` writes an example.")
    return values or {}


def _text(path: Path) -> str:
    """The text of a file that a person named. Never waits for a pipe or reads a device to its end, which there may be none of."""
    example = f"`tuneline init` writes a commented {_kind(path)}."
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder, not a file", hint=f"Name the file in it, for example {path / 'customization.yaml'}.")
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist", hint=f"Check the path; {example}")
    if not path.is_file():
        raise ConfigurationError(f"{path} is a pipe or a device, not a file", hint="Write the configuration to a file and name that.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = f"Let this user read it; `ls -l {path}` shows who may."
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        found = f"byte 0x{error.object[error.start]:02x} in line {line}"
        raise ConfigurationError(
            f"{path} is not UTF-8: {found}", hint="Save it as UTF-8; `iconv` converts from another encoding."
        ) from None


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: a key that stands twice is a mistake, not a choice of the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen and isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem=f"{key.value} stands here a second time", problem_mark=key.start_mark)
        seen.add(str(key.value))
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {'a tab stands here' if TAB in problem else problem}"


def _yaml_hint(error: yaml.YAMLError) -> str:
    if TAB in str(getattr(error, "problem", "")):
        return "Indent with spaces: YAML allows no tabs."
    return "Mend that line; `tuneline init` writes an example."


TAB = "'\\t'"
KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


def _kind(path: Path) -> str:
    return "platform.yaml" if "platform" in path.name else "customization.yaml"


def _override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise UsageError(f"--set {override} is not of the form section.key=value", hint="For example --set fine_tuning.max_steps=100.")
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        hint = "Close every bracket and quote; a text with special characters goes into quotes of its own: --set 'section.key=\"a: b\"'."
        raise UsageError(f"--set {override}: the value is not YAML: {_yaml_problem(error)}", hint=hint) from None
    place = values
    for key in keys[:-1]:
        inner = place.get(key)
        place[key] = inner if isinstance(inner, dict) else {}
        place = place[key]
    place[keys[-1]] = _number(value)


def _anchor(values: dict[str, Any], base: Path) -> None:
    """Make the paths among sources and base model absolute: those in a file count from the file's folder, others from the current one."""
    curation, tuning = values.get("data_curation"), values.get("fine_tuning")
    curation = curation if isinstance(curation, dict) else {}
    for section, key in ((curation, "sources"), (_within(curation, "decontamination"), "sets")):
        if isinstance(section.get(key), list):
            section[key] = [_absolute(one, base) for one in section[key]]
    names = _within(_within(curation, "personal_data"), "names")
    for section, key in ((names, "model"), (_within(curation, "tokens"), "base_model")):
        if key in section:
            section[key] = _absolute(section[key], base)
    if isinstance(tuning, dict) and "base_model" in tuning:
        tuning["base_model"] = _absolute(tuning["base_model"], base)
    evaluation = values.get("evaluation")
    tasks = evaluation.get("tasks") if isinstance(evaluation, dict) else None
    for task in tasks if isinstance(tasks, list) else ():
        _anchor_task(task, base)


def _anchor_task(task: Any, base: Path) -> None:
    for name in FILES if isinstance(task, dict) else ():
        if name in task:
            task[name] = _absolute(task[name], base)
    if isinstance(task, dict) and task.get("kind") == "lm_eval" and str(task.get("task", "")).endswith(TASK_FILES):
        task["task"] = _absolute(task["task"], base)


def _within(section: dict[str, Any], key: str) -> dict[str, Any]:
    inner = section.get(key)
    return inner if isinstance(inner, dict) else {}


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


def told(error: ValidationError, where: str, model: type[BaseModel], hidden: Sequence[str] = ()) -> str:
    """What a model refused, in one line: the field, what was found (not in `hidden` sections) and what is allowed."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "the whole"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{field}: there is no such key{_near(problem['loc'], model)}")
        elif problem["loc"][:1] and problem["loc"][0] in hidden:
            lines.append(f"{field}: {_wanted(problem)}")
        else:
            lines.append(f"{field}: found {_found(problem['input'])}; {_wanted(problem)}")
    return f"{where}: " + "; ".join(lines)


def _found(value: Any) -> str:
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 200 else text[:200] + " …"


# What pydantic found wrong, by its own name for it, as what is wanted instead.
WANTED = {
    "int_type": "a whole number is wanted",
    "int_parsing": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "float_parsing": "a number is wanted",
    "finite_number": "a finite number is wanted",
    "bool_type": "true or false is wanted",
    "bool_parsing": "true or false is wanted",
    "string_type": "a text is wanted",
    "list_type": "a list is wanted, for example [one, two]",
    "too_short": "at least {min_length} is wanted",
    "model_type": "keys below it are wanted, for example section.key=value",
    "greater_than": "more than {gt} is wanted",
    "greater_than_equal": "{ge} or more is wanted",
    "less_than": "less than {lt} is wanted",
    "less_than_equal": "{le} or less is wanted",
}


def _wanted(problem: Any) -> str:
    wanted = WANTED.get(problem["type"])
    return wanted.format(**problem.get("ctx", {})) if wanted else str(problem["msg"]).removeprefix("Value error, ")


def _near(location: tuple[int | str, ...], model: Any) -> str:
    """ " (did you mean …?)" for a misspelt key."""
    import difflib

    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        model = field.annotation if field else None
    names = list(model.model_fields) if hasattr(model, "model_fields") else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {near[0]}?)" if near else f" (allowed: {', '.join(names)})" if names else ""
