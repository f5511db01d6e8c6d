"""Messages for values that a Pydantic model rejects: the field, the value found and the allowed values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from components.common.runtime.url_credentials import mask_credentials

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_VALUE_CHARACTERS = 200  # of a value that an error message repeats


def describe_validation_error(
    error: ValidationError, source: str, model: type[BaseModel], hidden: Sequence[str] = ()
) -> str:
    """Return a line with each invalid field, the value found and the allowed values.

    Args:
        error: Pydantic's error.
        source: The origin of the values, at the start of the line.
        model: The validated model, whose keys are suggested for a misspelled key.
        hidden: Sections whose values are left out, because they may contain a secret.
    """
    problems = []
    for problem in error.errors():
        location, value = locate_problem(problem), problem["input"]
        if problem["type"] == "union_tag_invalid":
            value = problem["ctx"]["tag"]
        field = ".".join(map(str, location))
        if problem["type"] == "extra_forbidden":
            problems.append(f"{field}: unknown key{_suggest_key(location, model)}")
        elif not location:  # a check of several keys, whose message contains their values
            problems.append(_describe_expected(problem))
        elif location[0] in hidden or isinstance(value, dict):  # a mapping may contain a secret
            problems.append(f"{field}: {_describe_expected(problem)}")
        else:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
            text = mask_credentials(text)
            found = text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + " …"
            problems.append(f"{field}: found {found}; {_describe_expected(problem)}")
    return f"{source}: " + "; ".join(problems)


def locate_problem(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Return the keys and indexes that lead to an invalid value, with the key whose value chooses the model of a mapping."""
    if problem["type"] == "union_tag_invalid":
        return *problem["loc"], problem["ctx"]["discriminator"].strip("'")
    return problem["loc"]


# Keys of transformers, TRL, LLaMA-Factory and Axolotl, and the key that is set here instead.
KEYS_OF_OTHER_TOOLS = {
    "cutoff_len": "max_length",
    "dataset": "sources",
    "gradient_accumulation_steps": "batch_size",
    "gradient_checkpointing": "activation_checkpointing",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lr": "learning_rate",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "model_name_or_path": "base_model",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "per_device_train_batch_size": "micro_batch_size",
    "r": "rank",
    "save_steps": "checkpoint_every",
    "sequence_len": "max_length",
    "use_liger_kernel": "fused_kernels",
    "warmup_ratio": "warmup_steps",
}

# Pydantic's error types and the values that are allowed instead.
EXPECTED_VALUES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "union_tag_not_found": "a mapping with the key {discriminator}",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "dict_type": "a mapping, for example {{key: value}}",
    "list_type": "a list, for example [one, two]",
    "too_short": "a list with {min_length} or more entries",
    "model_attributes_type": "a mapping, for example {{key: value}}",
    "model_type": "a mapping of keys, for example section.key=value",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
}


def _describe_expected(problem: ErrorDetails) -> str:
    expected = EXPECTED_VALUES.get(problem["type"])
    if expected is None:
        return problem["msg"].removeprefix("Value error, ")
    return f"expected {expected.format(**problem.get('ctx', {}))}"


def _suggest_key(location: tuple[int | str, ...], model: Any) -> str:
    """Return the key with the meaning of another tool's key, the nearest key for a misspelled one, or the allowed keys."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        model = field.annotation if field else None
    names = list(model.model_fields) if hasattr(model, "model_fields") else []
    known = KEYS_OF_OTHER_TOOLS.get(str(location[-1]), "")
    matches = [known] if known.split(".")[0] in names else difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else f" (allowed: {', '.join(names)})" if names else ""
