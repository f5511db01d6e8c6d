"""The batch script: directives, the site's own lines, and the training on every node."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from components.common.errors import ConfigurationError
from components.common.launch import STOP
from components.common.launch.settings import LauncherSettings, Slurm
from components.common.launch.torchrun import import_path

NAME = re.compile(r"@([A-Z_]+)@")
# A job whose folder holds the file `stop` was asked to end for good, and is not queued anew.
# SIGTERM at the end of the time goes to the steps (--signal without B:), not to this script, which waits for their exit codes.
# A job that slurmrestd was given has neither HOME nor USER.
TEMPLATE = """#!/bin/bash
@DIRECTIVES@
export HOME="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}" USER="${USER:-$(id -un)}"
@ENVIRONMENT@
@SETUP@
folder=@FOLDER@
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | head -n 1 | cut -d= -f2)
export PET_MASTER_ADDR="${address:-$first}" PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
[ -e "$folder/@STOP@" ] && exit 75
srun @SRUN@ bash -c @NODE@ node "$folder"
code=$?
if [ $code -eq 75 ] && [ ! -e "$folder/@STOP@" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt @RESUMES@ ]; then
  echo "saved before its work was done: queued anew" >&2
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" && sleep 60
fi
exit $code
"""
NEEDED = ("DIRECTIVES", "FOLDER", "NODE")


def options(name: str, folder: Path, nodes: int, settings: Slurm, array: str = "") -> dict[str, str]:
    """sbatch's long options by name; "" for one that takes no value. `array`: the numbers of its tasks, such as 0-3%2."""
    asked = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "gres": settings.gres,
        "constraint": settings.constraint,
        "cpus-per-task": str(settings.cpus or ""),
        "mem": settings.memory,
        "time": settings.time_limit,
        "reservation": settings.reservation,
        "array": array,
        "dependency": settings.dependency,
        "kill-on-invalid-dep": "yes" if settings.dependency else "",
    }
    return {
        "job-name": name,
        "comment": str(folder),
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "output": str(folder).replace("%", "%%") + f"/slurm-{'%A_%a' if array else '%j'}.log",
        "open-mode": "append",  # a requeued job has the same number
        "requeue": "",
        "export": "NONE",  # what the submitting process has in its environment is no business of the job
        "signal": f"TERM@{settings.save_seconds}",
        **{option: value for option, value in asked.items() if value},
    }


def text(directives: dict[str, str], folder: Path, nodes: int, settings: LauncherSettings) -> str:
    """The script. Raises ConfigurationError for a template that cannot be read or leaves out what is needed."""
    values = {
        "DIRECTIVES": "\n".join([*(_directive(*one) for one in directives.items()), *(f"#SBATCH {one}" for one in settings.slurm.options)]),
        "ENVIRONMENT": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(_environment(settings).items())),
        "SETUP": "\n".join(settings.slurm.setup),
        "FOLDER": _of_this_task(tasks_of(folder, directives["job-name"])) if "array" in directives else shlex.quote(str(folder)),
        "SRUN": _srun(nodes, settings.slurm),
        "NODE": shlex.quote(_node(settings)),
        "STOP": STOP,
        "RESUMES": str(settings.resumes),
    }
    filled = NAME.sub(lambda found: values.get(found[1], found[0]), _template(settings.slurm.template))
    return re.sub(r"\n{2,}", "\n", filled)


def tasks_of(place: Path, name: str) -> Path:
    """The file with the folders of an array's tasks, a line each. Tasks may read it when the next array is there already."""
    return place / f"{name}.txt"


def _of_this_task(tasks: Path) -> str:
    return f'"$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(tasks))})"'


def _directive(option: str, value: str) -> str:
    return f"#SBATCH --{option}" + (f"={shlex.quote(value)}" if value else "")


def _environment(settings: LauncherSettings) -> dict[str, str]:
    """What the training finds. srun would hand on only what sbatch took along, which is nothing."""
    values = {"SRUN_EXPORT_ENV": "ALL", "SLURM_EXPORT_ENV": "ALL", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    if settings.threads:
        values["TUNELINE_JOB_THREADS"] = str(settings.threads)
    if settings.slurm.container.engine == "none":  # the nodes run what runs here, also where it is a checkout
        values["PYTHONPATH"] = import_path()
    return values | settings.environment


def _srun(nodes: int, settings: Slurm) -> str:
    """One task a node, which ends by itself: a kill would cut off what the others save."""
    parts = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    if settings.cpus:
        parts.append(f"--cpus-per-task={settings.cpus}")  # since Slurm 22.05 srun does not take it from sbatch
    if settings.container.engine == "pyxis":
        parts.append(f"--container-image={shlex.quote(settings.container.image)}")
        if settings.container.mounts:
            parts.append(f"--container-mounts={shlex.quote(','.join(settings.container.mounts))}")
    return " ".join(parts)


def _node(settings: LauncherSettings) -> str:
    """What each node runs, in a shell of its own that knows the node's number."""
    inside = settings.slurm.container.engine != "none"
    python = shlex.quote(settings.python or ("python" if inside else sys.executable))
    command = f"{python} -P -m components.common.launch.node"
    if settings.slurm.container.engine == "apptainer":
        bound = "".join(f" --bind {shlex.quote(mount)}" for mount in settings.slurm.container.mounts)
        command = f"apptainer exec{bound} {shlex.quote(settings.slurm.container.image)} {command}"
    return f'PET_NODE_RANK=$SLURM_NODEID exec {command} "$1"'


def _template(path: str) -> str:
    if not path:
        return TEMPLATE
    hint = "docs/slurm.md shows the one that comes with tuneline; begin with a copy of it."
    try:
        found = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"launcher.slurm.template: {path} cannot be read: {error}", hint=hint) from None
    missing = [name for name in NEEDED if f"@{name}@" not in found]
    unknown = sorted(set(NAME.findall(found)) - {*NEEDED, "ENVIRONMENT", "SETUP", "SRUN", "STOP", "RESUMES"})
    if missing or unknown:
        said = "; ".join([*(f"@{name}@ is missing" for name in missing), *(f"@{name}@ is unknown" for name in unknown)])
        raise ConfigurationError(f"launcher.slurm.template: {path}: {said}", hint=hint)
    return found
