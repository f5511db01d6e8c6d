"""Slurm by its own programs, here or on a login node over SSH."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from components.common.errors import ConfigurationError, EngineMissingError
from components.common.launch import SilentError
from components.common.launch.slurm import states
from components.common.launch.slurm.states import Batch
from components.common.launch.slurm.way import SILENT, RefusedError, is_over

ANSWERS_WITHIN = 120.0  # seconds; a busy slurmctld takes its time, one that is gone is told of after some ten
# What ssh says where it cannot connect, and Slurm's programs where munge is away.
UNREACHED = ("could not resolve hostname", "connection closed by remote host", "protocol authentication error")
SSH_FAILED = 255


class Programs:
    """sbatch, squeue, sacct, scancel."""

    def __init__(self, ssh: str = "") -> None:
        self._ssh = ssh
        wanted = "ssh" if ssh else "sbatch"
        if not shutil.which(wanted):
            hint = "Run this on a login node, or name one as launcher.slurm.ssh, or slurmrestd as launcher.slurm.rest."
            raise EngineMissingError(f"there is no {wanted} here", hint=hint)

    def submit(self, script: Path) -> str:
        """Hand in a script, in which its directives stand. Returns the job's id."""
        return self._ask("sbatch", "--parsable", str(script)).strip().split(";")[0]

    def jobs(self, name: str) -> list[Batch]:
        """The jobs of this name that the controller knows: those that wait or run, and for some minutes those that have ended."""
        found = states.batches(self._json("squeue", "--json", "--states=all"))
        return [job for job in found if job.name == name]

    def accounted(self, job: str) -> list[Batch]:
        """A job as the accounting has it; nothing where there is no accounting."""
        try:
            return states.batches(self._json("sacct", "--json", "-j", job))
        except RefusedError:  # "Slurm accounting storage is disabled"
            return []

    def cancel(self, job: str, signal: str = "") -> None:
        """End a job, or send its steps a signal. One that has ended already is no error."""
        try:
            self._ask("scancel", *([f"--signal={signal}"] if signal else []), job)
        except RefusedError as error:
            if not is_over(error):
                raise

    def _json(self, *command: str) -> dict[str, Any]:
        said = self._ask(*command)
        try:
            answer: dict[str, Any] = json.loads(said)
        except ValueError:
            hint = "Slurm 21.08 and later have it, where they were built with libjson-c."
            raise ConfigurationError(f"{command[0]} --json gives no JSON: {said.strip()[:200]!r}", hint=hint) from None
        if errors := answer.get("errors"):  # squeue of Slurm 22 exits with 0 where the controller is gone, and lists no job
            raise SilentError(f"{command[0]}: " + states.words(errors))
        return answer

    def _ask(self, *command: str) -> str:
        whole = ["env", "SLURM_BITSTR_LEN=0", *command]  # otherwise a long list of an array's tasks ends in three points
        full = ["ssh", "-o", "BatchMode=yes", self._ssh, shlex.join(whole)] if self._ssh else whole
        try:
            done = subprocess.run(
                full, capture_output=True, text=True, errors="replace", timeout=ANSWERS_WITHIN, check=False, stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C for us must not tear a call in two
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SilentError(f"{command[0]} did not answer within {ANSWERS_WITHIN:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join((done.stderr or done.stdout).split())
        if (self._ssh and done.returncode == SSH_FAILED) or any(sign in said.lower() for sign in (*SILENT, *UNREACHED)):
            raise SilentError(f"{command[0]}: {said[:300]}")
        raise RefusedError(f"{command[0]}: {said[:300]}", hint="docs/slurm.md explains what Slurm refuses and why.")
