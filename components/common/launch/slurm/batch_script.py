"""The batch script of a job: directives, the site's setup, and the training on every node."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from components.common.launch import STOP_FILENAME
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.slurm.slurm_settings import SlurmSettings
from components.common.launch.torchrun import build_import_path
from components.common.runtime.errors import ConfigurationError

PLACEHOLDER_PATTERN = re.compile(r"@([A-Z_]+)@")
# A job whose folder contains the file `stop` ends without being requeued. SIGTERM before the time limit goes
# to the steps (--signal without B:), not to this script, which waits for their exit codes. A job from slurmrestd has
# neither HOME nor USER.
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
  echo "interrupted after saving its work: requeued" >&2
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" && sleep 60
fi
exit $code
"""
REQUIRED_PLACEHOLDERS = ("DIRECTIVES", "FOLDER", "NODE")


def build_options(name: str, folder: Path, nodes: int, settings: SlurmSettings, array: str = "") -> dict[str, str]:
    """Return the options of sbatch by name.

    Args:
        name: the job's name in Slurm.
        folder: the job folder, or the folder of an array.
        nodes: number of nodes of each job.
        settings: the section `launcher.slurm`.
        array: the tasks of an array, such as 0-3%2. Empty: no array.
    """
    optional = {
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
        "open-mode": "append",  # a requeued job keeps its number
        "requeue": "",
        "export": "NONE",  # the job does not depend on the environment of the submitting process
        "signal": f"TERM@{settings.save_seconds}",
        **{option: value for option, value in optional.items() if value},
    }


def render_script(options: dict[str, str], folder: Path, nodes: int, settings: LauncherSettings) -> str:
    """Return the batch script.

    Args:
        options: the options of sbatch by name, from `build_options`.
        folder: the job folder, or the folder of an array.
        nodes: number of nodes of each job.
        settings: the section `launcher`.

    Raises:
        ConfigurationError: the site's template cannot be read, lacks a required placeholder or contains an unknown
            placeholder.
    """
    slurm = settings.slurm
    directives = [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options.items()]
    job_folder = shlex.quote(str(folder))
    if "array" in options:
        tasks = shlex.quote(str(get_tasks_path(folder, options["job-name"])))
        job_folder = f'"$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {tasks})"'
    # By default, srun passes on only the environment of sbatch, which is empty.
    environment = {"SRUN_EXPORT_ENV": "ALL", "SLURM_EXPORT_ENV": "ALL", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    if settings.threads:
        environment["TUNELINE_JOB_THREADS"] = str(settings.threads)
    if slurm.container.engine == "none":  # the nodes run this installation, even from a checkout
        environment["PYTHONPATH"] = build_import_path()
    environment |= settings.environment
    # One task per node. A node's failure does not kill the others, which may be saving.
    srun = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    if slurm.cpus:
        srun.append(f"--cpus-per-task={slurm.cpus}")  # since Slurm 22.05, srun does not inherit it from sbatch
    if slurm.container.engine == "pyxis":
        srun.append(f"--container-image={shlex.quote(slurm.container.image)}")
        if slurm.container.mounts:
            srun.append(f"--container-mounts={shlex.quote(','.join(slurm.container.mounts))}")
    values = {
        "DIRECTIVES": "\n".join([*directives, *(f"#SBATCH {option}" for option in slurm.options)]),
        "ENVIRONMENT": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
        "SETUP": "\n".join(slurm.setup),
        "FOLDER": job_folder,
        "SRUN": " ".join(srun),
        "NODE": shlex.quote(_build_node_command(settings)),
        "STOP": STOP_FILENAME,
        "RESUMES": str(settings.resumes),
    }
    template = _read_template(slurm.template, values.keys()) if slurm.template else TEMPLATE
    script = PLACEHOLDER_PATTERN.sub(lambda match: values.get(match[1], match[0]), template)
    return re.sub(r"\n{2,}", "\n", script)


def get_tasks_path(folder: Path, name: str) -> Path:
    """Return the path of the file that lists the job folders of an array's tasks, one per line.

    The file is named after the array, because its tasks may still read the file when the next array is submitted.
    """
    return folder / f"{name}.txt"


def _build_node_command(settings: LauncherSettings) -> str:
    """Return the command of a node, for a shell with the node's number in SLURM_NODEID."""
    container = settings.slurm.container
    python = settings.python or (sys.executable if container.engine == "none" else "python")
    command = f"{shlex.quote(python)} -P -m components.common.launch.node_runner"
    if container.engine == "apptainer":
        mounts = "".join(f" --bind {shlex.quote(mount)}" for mount in container.mounts)
        command = f"apptainer exec{mounts} {shlex.quote(container.image)} {command}"
    return f'PET_NODE_RANK=$SLURM_NODEID exec {command} "$1"'


def _read_template(path: str, known: Collection[str]) -> str:
    hint = "Start from the job.sh of a job, and replace its values with placeholders; see docs/how-to/slurm.md."
    try:
        template = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"launcher.slurm.template: {path} cannot be read: {error}", hint=hint) from None
    unknown = sorted(set(PLACEHOLDER_PATTERN.findall(template)) - set(known))
    problems = [f"@{name}@ is missing" for name in REQUIRED_PLACEHOLDERS if f"@{name}@" not in template]
    allowed = ", ".join(f"@{name}@" for name in known)
    problems += [f"@{name}@ is unknown; expected one of {allowed}" for name in unknown]
    if problems:
        raise ConfigurationError(f"launcher.slurm.template: {path}: {'; '.join(problems)}", hint=hint)
    return template
