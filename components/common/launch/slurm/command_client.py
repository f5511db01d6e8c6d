"""Slurm client that runs Slurm's commands, on this machine or on a login node over SSH."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

from components.common.launch import JsonObject, UnresponsiveError
from components.common.launch.slurm import job_records
from components.common.launch.slurm.job_records import JobRecord
from components.common.launch.slurm.slurm_client import (
    UNRESPONSIVE_MESSAGES,
    RefusedError,
    contains_any,
    is_already_ended,
)
from components.common.runtime.errors import ConfigurationError, EngineMissingError

COMMAND_TIMEOUT_SECONDS = 120.0  # for a busy slurmctld; Slurm reports an unreachable slurmctld after about ten seconds
# Errors of ssh if the connection fails, and of Slurm's commands if munge is not running.
CONNECTION_MESSAGES = (
    "could not resolve hostname",
    "connection closed by remote host",
    "protocol authentication error",
)
SSH_ERROR_CODE = 255


class CommandClient:
    """Client that runs sbatch, squeue, sacct and scancel.

    In addition to the errors that `SlurmClient` documents, methods raise ConfigurationError if a command prints invalid
    JSON.

    Args:
        ssh: login node that runs the commands, as a host name for ssh. Empty: this machine.

    Raises:
        EngineMissingError: sbatch, or ssh with a login node, is not installed on this machine.
    """

    def __init__(self, ssh: str = "") -> None:
        self._ssh = ssh
        program = "ssh" if ssh else "sbatch"
        if not shutil.which(program):
            hint = "Run the command on a login node, or set launcher.slurm.ssh or launcher.slurm.rest."
            hint = "Install the OpenSSH client." if ssh else hint
            raise EngineMissingError(f"{program} is not installed on this machine", hint=hint)

    def submit(self, script: Path) -> str:
        """Submit a batch script with its directives and return the job's id."""
        return self._run("sbatch", "--parsable", str(script)).strip().split(";")[0]

    def list_jobs(self, name: str) -> list[JobRecord]:
        """Return the controller's jobs of this name, including jobs that ended a few minutes ago."""
        jobs = job_records.parse_jobs(self._run_json("squeue", "--json", "--states=all"))
        return [job for job in jobs if job.name == name]

    def list_accounted(self, job: str) -> list[JobRecord]:
        """Return the accounting records of a job; empty if accounting is disabled."""
        try:
            return job_records.parse_jobs(self._run_json("sacct", "--json", "-j", job))
        except RefusedError:  # "Slurm accounting storage is disabled"
            return []

    def cancel(self, job: str, signal: str = "") -> None:
        """Cancel a job, or send its steps a signal. Do nothing if the job has ended."""
        try:
            self._run("scancel", *([f"--signal={signal}"] if signal else []), job)
        except RefusedError as error:
            if not is_already_ended(error):
                raise

    def _run_json(self, *command: str) -> JsonObject:
        output = self._run(*command)
        try:
            answer: JsonObject = json.loads(output)
        except ValueError:
            hint = "Use Slurm 21.08 or later, built with libjson-c."
            raise ConfigurationError(
                f"{command[0]} --json printed invalid JSON: {output.strip()[:200]!r}", hint=hint
            ) from None
        if errors := answer.get("errors"):  # without a controller, squeue of Slurm 22 lists no job and exits with 0
            raise UnresponsiveError(f"{command[0]}: {job_records.format_errors(errors)}")
        return answer

    def _run(self, *command: str) -> str:
        full = ["env", "SLURM_BITSTR_LEN=0", *command]  # otherwise Slurm truncates a long list of array tasks
        if self._ssh:
            full = ["ssh", "-o", "BatchMode=yes", self._ssh, shlex.join(full)]
        try:
            result = subprocess.run(
                full,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C does not interrupt a call
            )
        except subprocess.TimeoutExpired:
            message = f"{command[0]} did not answer within {COMMAND_TIMEOUT_SECONDS:.0f} s"
            raise UnresponsiveError(message) from None
        if result.returncode == 0:
            return result.stdout
        text = " ".join((result.stderr or result.stdout).split())
        message = f"{command[0]}: {text[:300] or f'exit code {result.returncode}'}"
        is_ssh_error = self._ssh and result.returncode == SSH_ERROR_CODE
        if is_ssh_error or contains_any(text, (*UNRESPONSIVE_MESSAGES, *CONNECTION_MESSAGES)):
            raise UnresponsiveError(message)
        raise RefusedError(message, hint="See docs/how-to/slurm.md for the causes of rejected calls.")
