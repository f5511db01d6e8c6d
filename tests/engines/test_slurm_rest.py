"""Batch jobs submitted, polled and cancelled through a real slurmrestd with a token, without Slurm's programs."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from components.common.launch import UnresponsiveError
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.slurm import batch_script
from components.common.launch.slurm.access_token import TokenError
from components.common.launch.slurm.rest_client import RestClient
from components.common.launch.slurm.slurm_settings import SlurmSettings
from tests.engines import slurm_cluster
from tests.engines.slurm_cluster import API_VERSION, Cluster
from tests.engines.test_slurm import JobCommand, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slurmrestd, pytest.mark.timeout(600)]
PROGRAMS = str(Path(sys.executable).parent)
HOUR_SECONDS = 3600


@pytest.fixture(scope="module")
def port() -> int:
    return slurm_cluster.find_free_ports() + 500


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[Cluster]:
    with slurm_cluster.run_cluster(tokens=True) as cluster:
        start_rest(cluster, port)
        yield cluster


def start_rest(cluster: Cluster, port: int, version: str = API_VERSION) -> None:
    """Start slurmrestd and wait until it listens."""
    cluster.start_rest(port, version)

    def is_listening() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
        return False

    wait_until(is_listening, 20)


class RestJobCommand(JobCommand):
    """A command on a machine without Slurm's programs and configuration."""

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": PROGRAMS}

    def write_token(self, token: str) -> None:
        """Renew the token, as a site's token service does."""
        (self.folder / "token").write_text(token)


def build_launcher(port: int, folder: Path, **slurm: Any) -> dict[str, Any]:
    return {"slurm": {"rest": f"http://127.0.0.1:{port}", "rest_token_file": str(folder / "token"), **slurm}}


@pytest.fixture
def job_command(cluster: Cluster, port: int, tmp_path: Path) -> RestJobCommand:
    assert shutil.which("sbatch", path=PROGRAMS) is None
    cluster.wait_until_idle()
    job_command = RestJobCommand(cluster, tmp_path, build_launcher(port, tmp_path))
    job_command.write_token(cluster.create_token(HOUR_SECONDS))
    return job_command


IGNORED_FIELDS = (
    "JobId",
    "LastSchedEval",
    "Priority",
    "AllocNode:Sid",
    "Command",
    "WorkDir",
    "SubmitTime",
    "AccrueTime",
    "EligibleTime",
)


def show_job(cluster: Cluster, job: str) -> dict[str, str]:
    """Return scontrol's fields of a job without those that differ by job or by way of submission."""
    output = cluster.run("scontrol", "show", "job", job).replace(f"slurm-{job}.log", "LOG")
    return {
        name: value
        for name, value in re.findall(r"([\w:/]+)=(.*?)(?=\s+[\w:/]+=|\s*$)", output, re.MULTILINE)
        if name not in IGNORED_FIELDS
    }


@pytest.mark.parametrize("version", ["v0.0.37", API_VERSION])
def test_rest_job_requests_match_an_sbatch_job(
    job_command: RestJobCommand, port: int, version: str, cluster: Cluster
) -> None:
    """The jobs are held, since the test compares only their requests."""
    options = [
        "--hold",
        "--nice=5",
        "--mail-type=FAIL,END",
        "--mail-user=ada",
        "--exclusive=user",
        "--wckey=w",
        "-w n[1-2]",
        "--error /e",
    ]
    dependency = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit").strip()
    options += [f"--dependency=afterok:{dependency}", "--kill-on-invalid-dep=yes"]
    slurm_settings = SlurmSettings(
        partition="main",
        gres="fake:1",
        constraint="ib&fast",
        cpus=2,
        memory="1G",
        time_limit="1-2:3:4",
        save_seconds=200,
        options=options,
    )
    settings = LauncherSettings(kind="slurm", nodes=2, slurm=slurm_settings)
    folder = job_command.folder / "a 100% folder"
    folder.mkdir()
    (folder / "job.sh").write_text(
        batch_script.render_script(
            batch_script.build_options("tuneline-a", folder, 2, slurm_settings), folder, 2, settings
        )
    )
    cluster.stop("slurmrestd")
    start_rest(cluster, port, version)
    rest = RestClient(SlurmSettings.model_validate(job_command.launcher["slurm"]))
    jobs = [rest.submit(folder / "job.sh"), cluster.run("sbatch", "--parsable", str(folder / "job.sh")).strip()]
    try:
        assert show_job(cluster, jobs[0]) == show_job(cluster, jobs[1])
        assert {job.id for job in rest.list_jobs("tuneline-a") if not job.has_ended} == {*jobs}
        assert rest.list_accounted(jobs[0]) == [], "accounting is not configured"
    finally:
        for job in jobs:
            rest.cancel(job)
        rest.cancel(jobs[0])  # a second cancel is not an error
        cluster.stop("slurmrestd")
        start_rest(cluster, port)
    wait_until(lambda: not cluster.list_jobs(), 30)


def test_job_rejected_by_slurm_quotes_its_error(job_command: RestJobCommand, port: int) -> None:
    job_command.launcher = build_launcher(port, job_command.folder, partition="nowhere")
    error = job_command.run(1)
    assert (error["kind"], error["message"]) == ("launcher", "slurmrestd: Invalid partition name specified")


def test_cancelled_step_saves_and_ends_its_job(job_command: RestJobCommand) -> None:
    """slurmrestd's own signal would end the batch script and srun before the job has saved."""
    child = job_command.start()
    job_command.wait_for_step(5)
    child.terminate()
    error = job_command.finish(child, 75)
    assert error["message"] == f"saved at {job_command.list_steps()[-1]}"


def test_job_survives_slurmrestd_outages_and_token_expiry(job_command: RestJobCommand, port: int) -> None:
    (job_command.folder / "goal").write_text("80")
    job_command.cluster.stop("slurmrestd")
    child = job_command.start()
    time.sleep(4)
    assert child.poll() is None
    start_rest(job_command.cluster, port)
    job = job_command.wait_for_step(5)
    job_command.cluster.stop("slurmrestd", signal.SIGKILL)
    wait_until(lambda: "Slurm does not answer (http" in job_command.read_notes(), 60)
    start_rest(job_command.cluster, port)
    expired = job_command.cluster.create_token(1)
    time.sleep(2)
    job_command.write_token(expired)
    wait_until(lambda: "has expired (" in job_command.read_notes(), 60)
    job_command.write_token(job_command.cluster.create_token(HOUR_SECONDS))
    assert job_command.finish(child) == {"counted": 80, "starts": 1}
    assert [path.name for path in job_command.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_expired_token_is_reported(job_command: RestJobCommand) -> None:
    job_command.write_token(job_command.cluster.create_token(1))
    time.sleep(2)
    error = job_command.run(1)
    assert error["kind"] == "access"
    assert error["message"].startswith(f"the token in {job_command.folder}/token has expired (")
    assert "scontrol token" in error["hint"]


def test_rejected_token_is_distinguished_from_a_missing_controller(
    job_command: RestJobCommand,
) -> None:
    """Slurm 22 answers both cases with the same message."""
    rest, token = (
        RestClient(SlurmSettings.model_validate(job_command.launcher["slurm"])),
        job_command.cluster.create_token(HOUR_SECONDS),
    )
    header, payload, signature = token.split(".")
    job_command.write_token(f"{header}.{payload}.{signature[::-1]}")
    with pytest.raises(TokenError, match="is not accepted by Slurm at http"):
        rest.list_jobs("a")
    job_command.write_token(token)
    job_command.cluster.stop("slurmctld")
    with pytest.raises(UnresponsiveError):
        rest.list_jobs("a")
    job_command.cluster.start_controller()
    wait_until(lambda: not isinstance(list_jobs_or_error(rest), UnresponsiveError), 60)
    assert list_jobs_or_error(rest) == []


def list_jobs_or_error(rest: RestClient) -> Any:
    try:
        return rest.list_jobs("a")
    except UnresponsiveError as error:
        return error
