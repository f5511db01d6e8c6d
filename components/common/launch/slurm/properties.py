"""A batch script's directives as slurmrestd takes them, which does not read the script: properties of a job, in JSON.

The names and types are those of the OpenAPI specifications of slurmrestd: up to v0.0.38 they are sbatch's own words, since v0.0.39 they
are those of Slurm's data parsers (lists of flags, numbers that may be unset).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from components.common.errors import ConfigurationError

Properties = dict[str, Any]
Meaning = Callable[[str, int], Properties]  # of an option's value, for the version v0.0.N of the API
PARSERS = 39  # the first version of Slurm's data parsers
TRES = 40  # the first one in which a TRES is named with a slash: gres/gpu
MEGABYTES = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
SHORT = {
    "A": "account", "C": "constraint", "c": "cpus-per-task", "d": "dependency", "D": "chdir", "e": "error", "H": "hold", "J": "job-name",
    "L": "licenses", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist",
    "x": "exclude", "a": "array",
}  # fmt: skip
SWITCHES = ("exclusive", "requeue", "no-requeue", "hold")  # a value is not the next word


def of_script(text: str, version: int) -> Properties:
    """The properties of a job with this script. Raises ConfigurationError for an option that has none."""
    found: Properties = {}
    for name, value in _options(text):
        if name not in MEANINGS:
            hint = f"These can be: {', '.join(sorted(MEANINGS))}. Leave it out, or use Slurm's programs (launcher.slurm.ssh)."
            raise ConfigurationError(f"--{name} of the batch script cannot be said to slurmrestd", hint=hint)
        try:
            found |= MEANINGS[name](value, version)
        except ValueError:
            said = f"--{name}={value}" if value else f"--{name}"
            hint = f"Not with v0.0.{version} of its API, or never: man sbatch says what it may be. Leave it out, or use Slurm's programs."
            raise ConfigurationError(f"{said} of the batch script cannot be said to slurmrestd", hint=hint) from None
    return found | _counted(found, version)


def _counted(found: Properties, version: int) -> Properties:
    """What sbatch counts itself and slurmctld does not: tasks, and the cores for them."""
    nodes, each = str(found.get("nodes", 1)), found.get("tasks_per_node", 1)
    tasks = found.get("tasks") or (int(nodes) * each if nodes.isdigit() else 0)
    if not tasks:
        return {}
    cores = {"minimum_cpus": tasks * found["cpus_per_task"]} if version >= PARSERS and "cpus_per_task" in found else {}
    return {"tasks": tasks, **cores}


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each directive above the first command, as sbatch reads them."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith("#SBATCH"):
            yield from _words(shlex.split(line.removeprefix("#SBATCH"), comments=True))


def _words(words: list[str]) -> Iterator[tuple[str, str]]:
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            name, value = SHORT.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
            equals = value
        if not equals and words and not words[0].startswith("-") and name not in SWITCHES:
            value = words.pop(0)
        yield name, value


def _text(name: str) -> Meaning:
    return lambda value, _: {name: value}


def _whole(name: str) -> Meaning:
    return lambda value, _: {name: int(value)}


def _names(since: str, before: str) -> Meaning:
    """Names with commas: a list of them since the parsers."""
    return lambda value, version: {since: value.split(",")} if version >= PARSERS else {before: value}


def _settable(number: int, version: int) -> Any:
    return {"set": True, "infinite": False, "number": number} if version >= PARSERS else number


def _minutes(value: str) -> int:
    """[days-]hours:minutes:seconds, minutes:seconds, minutes, or days-hours: rounded up, as Slurm does."""
    days, dash, clock = value.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = (*parts, 0, 0)[:3] if dash or len(parts) == 3 else (0, *parts, 0)[:3]
    return (int(days or 0) * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)


def _megabytes(value: str) -> int:
    unit = value[-1:].upper()
    return math.ceil(int(value[:-1]) * MEGABYTES[unit]) if unit in MEGABYTES else int(value)


def _gres(value: str, version: int) -> Properties:
    if version < PARSERS:
        return {"gres": value}
    mark = "gres/" if version >= TRES else "gres:"
    return {"tres_per_node": ",".join(mark + one for one in value.split(","))}


def _exclusive(value: str, version: int) -> Properties:
    """Slurm 22 can only be told with whom to share a node, not that with nobody."""
    if version < PARSERS and not value:
        raise ValueError(value)
    return {"shared": [value or "none"]} if version >= PARSERS else {"exclusive": value}


def _excluded(value: str, version: int) -> Properties:
    """Slurm 22 refuses the property that it documents."""
    if version < PARSERS:
        raise ValueError(value)
    return {"excluded_nodes": value.split(",")}


def _signal(value: str, version: int) -> Properties:
    """[B:]NAME[@SECONDS]; Slurm's own default is a minute."""
    if version < PARSERS:
        return {"signal": value}
    name, _, seconds = value.removeprefix("B:").partition("@")
    flags = {"kill_warning_flags": ["BATCH_JOB"]} if value.startswith("B:") else {}
    return {"kill_warning_signal": name, "kill_warning_delay": _settable(int(seconds or 60), version), **flags}


def _invalid_dependency(value: str, version: int) -> Properties:
    kill = {"yes": True, "no": False}.get(value)
    if kill is None:
        raise ValueError(value)
    if version < PARSERS:
        return {"kill_on_invalid_dependency": kill}
    return {"flags": [f"{'' if kill else 'NO_'}KILL_INVALID_DEPENDENCY"]}


def _export(value: str, version: int) -> Properties:
    """A job that is handed in so has no environment but its own anyway."""
    if value != "NONE":
        raise ValueError(value)
    return {}


MEANINGS: dict[str, Meaning] = {
    **{name: _text(name) for name in ("account", "array", "comment", "dependency", "licenses", "partition", "prefer", "qos")},
    **{name: _text(name) for name in ("reservation", "wckey")},
    "job-name": _text("name"),
    "constraint": _text("constraints"),
    "output": _text("standard_output"),
    "error": _text("standard_error"),
    "chdir": _text("current_working_directory"),
    "mail-user": _text("mail_user"),
    "mail-type": _names("mail_type", "mail_type"),
    "nodelist": _names("required_nodes", "nodelist"),
    "exclude": _excluded,
    "nodes": _text("nodes"),  # Slurm 22 documents a list, and makes one node of it
    "ntasks": _whole("tasks"),
    "ntasks-per-node": _whole("tasks_per_node"),
    "cpus-per-task": _whole("cpus_per_task"),
    "nice": _whole("nice"),
    "mem": lambda value, version: {"memory_per_node": _settable(_megabytes(value), version)},
    "time": lambda value, version: {"time_limit": _settable(_minutes(value), version)},
    "gres": _gres,
    "exclusive": _exclusive,
    "open-mode": lambda value, version: {"open_mode": [value.upper()] if version >= PARSERS else value},
    "signal": _signal,
    "requeue": lambda _, __: {"requeue": True},
    "no-requeue": lambda _, version: {"requeue": False} if version >= PARSERS else {"no_requeue": True},
    "hold": lambda _, __: {"hold": True},
    "kill-on-invalid-dep": _invalid_dependency,
    "export": _export,
}
