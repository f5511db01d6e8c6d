"""The directives of a batch script as job properties in JSON, since slurmrestd does not read the script.

Names and types follow the OpenAPI specifications of slurmrestd. Up to v0.0.38, they are those of sbatch. Since v0.0.39,
they are those of Slurm's data parsers (lists of flags, numbers that may be unset).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from components.common.runtime.errors import ConfigurationError

Properties = dict[str, Any]
DATA_PARSER_VERSION = 39  # the first version of Slurm's data parsers
TRES_SLASH_VERSION = 40  # the first version with a slash in TRES names: gres/gpu
MEGABYTES = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
SHORT_OPTIONS = {
    "A": "account", "C": "constraint", "c": "cpus-per-task", "d": "dependency", "D": "chdir", "e": "error", "H": "hold",
    "J": "job-name", "L": "licenses", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "t": "time", "w": "nodelist", "x": "exclude", "a": "array",
}  # fmt: skip
SWITCHES = ("exclusive", "requeue", "no-requeue", "hold")  # options that take no value from the next word
SAME_NAMES = ("account", "array", "comment", "dependency", "licenses", "partition", "prefer", "qos", "reservation")
# Properties with the option's value as text or as a number in all versions, by option. Slurm 22 documents a list of
# nodes, but reads it as a single node.
TEXT_PROPERTIES = {
    **{name: name for name in (*SAME_NAMES, "nodes", "wckey")},
    "job-name": "name",
    "constraint": "constraints",
    "output": "standard_output",
    "error": "standard_error",
    "chdir": "current_working_directory",
    "mail-user": "mail_user",
}
INTEGER_PROPERTIES = {
    "ntasks": "tasks",
    "ntasks-per-node": "tasks_per_node",
    "cpus-per-task": "cpus_per_task",
    "nice": "nice",
}
LIST_PROPERTIES = {"mail-type": "mail_type", "nodelist": "required_nodes", "exclude": "excluded_nodes"}
SUPPORTED_OPTIONS = {
    *TEXT_PROPERTIES, *INTEGER_PROPERTIES, *LIST_PROPERTIES, *SWITCHES,
    "export", "gres", "kill-on-invalid-dep", "mem", "open-mode", "signal", "time",
}  # fmt: skip


def parse_script(text: str, version: int) -> Properties:
    """Return the properties of a job with this script, for API version v0.0.`version`.

    Raises:
        ConfigurationError: an option or its value has no equivalent in this version.
    """
    properties: Properties = {}
    for name, value in _parse_directives(text):
        if name not in SUPPORTED_OPTIONS:
            raise ConfigurationError(
                f"slurmrestd does not support --{name} of the batch script. Supported options: "
                f"{', '.join(sorted(SUPPORTED_OPTIONS))}",
                hint="Remove the option, or set launcher.slurm.ssh to submit with Slurm's commands.",
            )
        try:
            properties |= _convert(name, value, version)
        except ValueError:
            option = f"--{name}={value}" if value else f"--{name}"
            raise ConfigurationError(
                f"slurmrestd's API v0.0.{version} does not support {option} of the batch script",
                hint="Correct the value (see `man sbatch`), or set launcher.slurm.ssh to submit with Slurm's commands.",
            ) from None
    # sbatch computes the numbers of tasks and cores, slurmctld does not.
    nodes = str(properties.get("nodes", 1))
    tasks = properties.get("tasks") or (int(nodes) * properties.get("tasks_per_node", 1) if nodes.isdigit() else 0)
    if tasks:
        properties["tasks"] = tasks
        if version >= DATA_PARSER_VERSION and "cpus_per_task" in properties:
            properties["minimum_cpus"] = tasks * properties["cpus_per_task"]
    return properties


def _parse_directives(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each directive above the first command, as sbatch reads them."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else []
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, value = SHORT_OPTIONS.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
                equals = value
            if not equals and words and not words[0].startswith("-") and name not in SWITCHES:
                value = words.pop(0)
            yield name, value


def _convert(name: str, value: str, version: int) -> Properties:
    """Return the properties for an option. Raises ValueError for a value without an equivalent."""
    if name in TEXT_PROPERTIES:
        return {TEXT_PROPERTIES[name]: value}
    if name in INTEGER_PROPERTIES:
        return {INTEGER_PROPERTIES[name]: int(value)}
    match name:
        case "requeue" | "hold":
            return {name: True}
        case "export" if value == "NONE":  # a job from slurmrestd only has the environment of its properties
            return {}
        case "mem":
            unit = value[-1:].upper()
            number = math.ceil(int(value[:-1]) * MEGABYTES[unit]) if unit in MEGABYTES else int(value)
            return {"memory_per_node": _wrap_number(number, version)}
        case "time":
            return {"time_limit": _wrap_number(_parse_minutes(value), version)}
    convert = _convert_for_data_parser if version >= DATA_PARSER_VERSION else _convert_for_sbatch_names
    return convert(name, value, version)


def _wrap_number(number: int, version: int) -> int | Properties:
    return {"set": True, "infinite": False, "number": number} if version >= DATA_PARSER_VERSION else number


def _parse_minutes(value: str) -> int:
    """Convert [days-]hours:minutes:seconds, minutes:seconds, minutes, or days-hours; round up as Slurm does."""
    days, dash, clock = value.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = (*parts, 0, 0)[:3] if dash or len(parts) == 3 else (0, *parts, 0)[:3]
    return (int(days or 0) * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)


def _convert_for_data_parser(name: str, value: str, version: int) -> Properties:
    """Return the properties whose type changed in v0.0.39."""
    match name:
        case "mail-type" | "nodelist" | "exclude":
            return {LIST_PROPERTIES[name]: value.split(",")}
        case "gres":
            mark = "gres/" if version >= TRES_SLASH_VERSION else "gres:"
            return {"tres_per_node": ",".join(mark + resource for resource in value.split(","))}
        case "exclusive":
            return {"shared": [value or "none"]}
        case "open-mode":
            return {"open_mode": [value.upper()]}
        case "signal":  # [B:]NAME[@SECONDS]; Slurm's default is 60 seconds
            signal, _, seconds = value.removeprefix("B:").partition("@")
            flags = {"kill_warning_flags": ["BATCH_JOB"]} if value.startswith("B:") else {}
            delay = _wrap_number(int(seconds or 60), version)
            return {"kill_warning_signal": signal, "kill_warning_delay": delay, **flags}
        case "no-requeue":
            return {"requeue": False}
        case "kill-on-invalid-dep" if value in ("yes", "no"):
            return {"flags": ["KILL_INVALID_DEPENDENCY" if value == "yes" else "NO_KILL_INVALID_DEPENDENCY"]}
    raise ValueError(value)


def _convert_for_sbatch_names(name: str, value: str, _: int) -> Properties:
    """Return the properties that have the names of sbatch's options up to v0.0.38."""
    match name:
        case "no-requeue":
            return {"no_requeue": True}
        case "kill-on-invalid-dep" if value in ("yes", "no"):
            return {"kill_on_invalid_dependency": value == "yes"}
        case "exclusive" if value:  # Slurm 22 has no property for exclusive nodes, only for sharing ones
            return {"exclusive": value}
        case "mail-type" | "nodelist" | "gres" | "open-mode" | "signal":
            return {name.replace("-", "_"): value}
    raise ValueError(value)  # such as --exclude: Slurm 22 rejects the property that it documents
