"""Batch jobs handed in, watched and ended by a real slurmrestd with a token, where none of Slurm's programs are."""

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

from components.common.launch import SilentError
from components.common.launch.settings import LauncherSettings, Slurm
from components.common.launch.slurm import script
from components.common.launch.slurm.rest import Rest
from components.common.launch.slurm.token import TokenError
from tests.engines import slurm_cluster
from tests.engines.slurm_cluster import VERSION, Cluster
from tests.engines.test_slurm import Watched, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slurmrestd, pytest.mark.timeout(600)]
PROGRAMS = str(Path(sys.executable).parent)
HOUR = 3600


@pytest.fixture(scope="module")
def port() -> int:
    return slurm_cluster.free_ports() + 500


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[Cluster]:
    with slurm_cluster.two_nodes(tokens=True) as found:
        start_rest(found, port)
        yield found


def start_rest(cluster: Cluster, port: int, version: str = VERSION) -> None:
    """Until it listens."""
    cluster.start_rest(port, version)

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
        return False

    wait_until(listens, 20)


class ByRest(Watched):
    """A command on a machine without Slurm's programs and without its configuration."""

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": PROGRAMS}

    def take(self, token: str) -> None:
        """Renew the token, as a site's own service does."""
        (self.folder / "token").write_text(token)


def place(port: int, folder: Path, **slurm: Any) -> dict[str, Any]:
    return {"slurm": {"rest": f"http://127.0.0.1:{port}", "rest_token_file": str(folder / "token"), **slurm}}


@pytest.fixture
def counting(cluster: Cluster, port: int, tmp_path: Path) -> ByRest:
    assert shutil.which("sbatch", path=PROGRAMS) is None
    cluster.wait_idle()
    found = ByRest(cluster, tmp_path, place(port, tmp_path))
    found.take(cluster.token(HOUR))
    return found


OTHER = ("JobId", "LastSchedEval", "Priority", "AllocNode:Sid", "Command", "WorkDir", "SubmitTime", "AccrueTime", "EligibleTime")


def shown(cluster: Cluster, job: str) -> dict[str, str]:
    """What scontrol shows of a job, but for what is another with every job, or with every way to hand it in."""
    said = cluster.run("scontrol", "show", "job", job).replace(f"slurm-{job}.log", "LOG")
    return {name: value for name, value in re.findall(r"([\w:/]+)=(.*?)(?=\s+[\w:/]+=|\s*$)", said, re.MULTILINE) if name not in OTHER}


@pytest.mark.parametrize("version", ["v0.0.37", VERSION])
def test_a_job_asks_for_the_same_as_one_that_sbatch_hands_in(counting: ByRest, port: int, version: str, cluster: Cluster) -> None:
    """Held, since none but the requests are compared."""
    options = ["--hold", "--nice=5", "--mail-type=FAIL,END", "--mail-user=ada", "--exclusive=user", "--wckey=w", "-w n[1-2]", "--error /e"]
    before = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit").strip()
    options += [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"]
    asked = Slurm(
        partition="main", gres="fake:1", constraint="ib&fast", cpus=2, memory="1G", time_limit="1-2:3:4", save_seconds=200, options=options
    )
    settings = LauncherSettings(kind="slurm", nodes=2, slurm=asked)
    folder = counting.folder / "a 100% folder"
    folder.mkdir()
    (folder / "job.sh").write_text(script.text(script.options("tuneline-a", folder, 2, asked), folder, 2, settings))
    cluster.end("slurmrestd")
    start_rest(cluster, port, version)
    rest = Rest(Slurm.model_validate(counting.place["slurm"]))
    jobs = [rest.submit(folder / "job.sh"), cluster.run("sbatch", "--parsable", str(folder / "job.sh")).strip()]
    try:
        assert shown(cluster, jobs[0]) == shown(cluster, jobs[1])
        assert {one.id for one in rest.jobs("tuneline-a") if not one.is_over} == {*jobs}
        assert rest.accounted(jobs[0]) == [], "there is no accounting"
    finally:
        for job in jobs:
            rest.cancel(job)
        rest.cancel(jobs[0])  # once more
        cluster.end("slurmrestd")
        start_rest(cluster, port)
    wait_until(lambda: not cluster.jobs(), 30)


def test_a_job_that_slurm_refuses_is_refused_in_slurms_words(counting: ByRest, port: int) -> None:
    counting.place = place(port, counting.folder, partition="nowhere")
    error = counting.run(1)
    assert (error["kind"], error["message"]) == ("launcher", "slurmrestd: Invalid partition name specified")


def test_a_step_that_is_cancelled_has_its_job_save_and_end_for_good(counting: ByRest) -> None:
    """slurmrestd's own signal would end the batch script and srun, and the job before it has saved."""
    child = counting.start()
    counting.wait_for(5)
    child.terminate()
    error = counting.end(child, 75)
    assert error["message"] == f"saved at {counting.steps()[-1]}"


def test_slurmrestd_may_be_gone_before_a_job_is_handed_in_and_while_it_runs_and_a_token_may_expire(counting: ByRest, port: int) -> None:
    (counting.folder / "goal").write_text("80")
    counting.cluster.end("slurmrestd")
    child = counting.start()
    time.sleep(4)
    assert child.poll() is None
    start_rest(counting.cluster, port)
    job = counting.wait_for(5)
    counting.cluster.end("slurmrestd", signal.SIGKILL)
    wait_until(lambda: "Slurm does not answer (http" in counting.told(), 60)
    start_rest(counting.cluster, port)
    expired = counting.cluster.token(1)
    time.sleep(2)
    counting.take(expired)
    wait_until(lambda: "has expired (" in counting.told(), 60)
    counting.take(counting.cluster.token(HOUR))
    assert counting.end(child) == {"counted": 80, "starts": 1}
    assert [path.name for path in counting.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_a_token_that_has_expired_is_said_so(counting: ByRest) -> None:
    counting.take(counting.cluster.token(1))
    time.sleep(2)
    error = counting.run(1)
    assert error["kind"] == "access"
    assert error["message"].startswith(f"the token in {counting.folder}/token has expired (")
    assert "scontrol token" in error["hint"]


def test_a_token_that_slurm_does_not_accept_is_no_silence_and_a_controller_that_is_gone_is_one(counting: ByRest) -> None:
    """Slurm 22 answers both with the same words."""
    rest, token = Rest(Slurm.model_validate(counting.place["slurm"])), counting.cluster.token(HOUR)
    head, body, mark = token.split(".")
    counting.take(f"{head}.{body}.{mark[::-1]}")
    with pytest.raises(TokenError, match="is not accepted by Slurm at http"):
        rest.jobs("a")
    counting.take(token)
    counting.cluster.end("slurmctld")
    with pytest.raises(SilentError):
        rest.jobs("a")
    counting.cluster.start_controller()
    wait_until(lambda: not isinstance(asked(rest), SilentError), 60)
    assert asked(rest) == []


def asked(rest: Rest) -> Any:
    try:
        return rest.jobs("a")
    except SilentError as error:
        return error
