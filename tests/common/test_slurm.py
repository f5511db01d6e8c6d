"""Batch scripts, job records of different Slurm versions and the launcher; tests/engines/test_slurm.py runs real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.launch import OUTCOME_FILENAME, Command, JobStatus, UnresponsiveError, run
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.slurm import batch_script, command_client, slurm_launcher
from components.common.launch.slurm.command_client import CommandClient, RefusedError
from components.common.launch.slurm.job_records import JobRecord, parse_jobs
from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.runtime.reporters import SilentReporter

SET_NUMBER = {"set": True, "infinite": False, "number": 7}
UNSET_NUMBER = {"set": False, "infinite": False, "number": 0}
JOB_RECORDS_BY_VERSION: dict[str, dict[str, Any]] = {
    "squeue of Slurm 22": {
        "job_id": 7, "name": "tuneline-a", "job_state": "RUNNING", "state_reason": "None", "exit_code": 0, "array_job_id": 0,
        "array_task_id": None, "user_name": "ada", "comment": "/work", "restart_cnt": 1,
    },
    "squeue of Slurm 23.11": {
        "job_id": 7, "name": "tuneline-a", "job_state": ["RUNNING"], "state_reason": "None", "array_job_id": UNSET_NUMBER | {"set": True},
        "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "infinite": False, "number": 0}},
        "array_task_id": UNSET_NUMBER, "user_name": "ada", "comment": "/work", "restart_cnt": 1,
    },
    "sacct of Slurm 22": {
        "job_id": 7, "name": "tuneline-a", "state": {"current": "RUNNING", "reason": "None"}, "user": "ada", "comment": {"job": "/work"},
        "exit_code": {"status": "SUCCESS", "return_code": 0}, "restart_cnt": 1,
    },
    "sacct of Slurm 24.05": {
        "job_id": SET_NUMBER, "name": "tuneline-a", "state": {"current": ["RUNNING"], "reason": "None"}, "user": "ada",
        "comment": {"job": "/work", "system": ""}, "exit_code": {"status": ["SUCCESS"], "return_code": SET_NUMBER | {"number": 0}},
        "restart_cnt": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("version", JOB_RECORDS_BY_VERSION)
def test_job_record_parses_equally_in_all_versions(version: str) -> None:
    (job,) = parse_jobs({"jobs": [JOB_RECORDS_BY_VERSION[version]]})
    assert (job.id, job.name, job.states) == ("7", "tuneline-a", ("RUNNING",))
    assert (job.exit_code, job.status) == (0, JobStatus("running", "RUNNING"))


ARRAY_RECORDS_BY_VERSION: dict[str, list[dict[str, Any]]] = {
    "squeue of Slurm 22": [
        {"job_id": 12, "array_job_id": 12, "array_task_id": None, "array_task_string": "2-3,5%2", "job_state": "PENDING"},
        {"job_id": 13, "array_job_id": 12, "array_task_id": 0, "array_task_string": "", "job_state": "RUNNING"},
    ],
    "squeue of Slurm 23.11": [
        {"job_id": 12, "array_job_id": SET_NUMBER | {"number": 12}, "array_task_id": UNSET_NUMBER, "array_task_string": "2-3,5%2",
         "job_state": ["PENDING"]},
        {"job_id": 13, "array_job_id": SET_NUMBER | {"number": 12}, "array_task_id": SET_NUMBER | {"number": 0}, "array_task_string": "",
         "job_state": ["RUNNING"]},
    ],
    "sacct of Slurm 24.05": [
        {"job_id": 12, "array": {"job_id": 12, "task_id": UNSET_NUMBER, "task": "2-3,5%2"}, "state": {"current": ["PENDING"]}},
        {"job_id": 13, "array": {"job_id": 12, "task_id": SET_NUMBER | {"number": 0}, "task": ""}, "state": {"current": ["RUNNING"]}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", ARRAY_RECORDS_BY_VERSION)
def test_pending_array_tasks_in_one_record_are_separate_jobs(version: str) -> None:
    states = {job.id: job.status.state for job in parse_jobs({"jobs": ARRAY_RECORDS_BY_VERSION[version]})}
    assert states == {"12_2": "waiting", "12_3": "waiting", "12_5": "waiting", "12_0": "running"}


@pytest.mark.parametrize(
    ("states", "reason", "expected"),
    [
        ("PENDING", "Resources", JobStatus("waiting", "PENDING (Resources)")),
        (["PENDING", "REQUEUED"], "BeginTime", JobStatus("waiting", "PENDING REQUEUED (BeginTime)")),
        (["FAILED", "COMPLETING"], "None", JobStatus("running", "FAILED COMPLETING")),
        ("COMPLETED", "None", JobStatus("succeeded", "COMPLETED")),
        ("CANCELLED", "None", JobStatus("cancelled", "CANCELLED")),
        ("TIMEOUT", "TimeLimit", JobStatus("ended", "TIMEOUT (TimeLimit)")),
        (["NODE_FAIL", "REQUEUED"], "None", JobStatus("waiting", "NODE_FAIL REQUEUED")),
        ("PREEMPTED", "None", JobStatus("ended", "PREEMPTED")),
        ("OUT_OF_MEMORY", "OutOfMemory", JobStatus("failed", "OUT_OF_MEMORY (OutOfMemory), exit code 3")),
        ("OF_A_LATER_SLURM", "", JobStatus("failed", "OF_A_LATER_SLURM, exit code 3")),
    ],
)
def test_slurm_state_is_mapped_to_job_status(states: object, reason: str, expected: JobStatus) -> None:
    job = {"job_id": 1, "name": "a", "job_state": states, "state_reason": reason, "exit_code": 3 << 8}
    assert parse_jobs({"jobs": [job]})[0].status == expected


def render_script(folder: Path, **slurm: Any) -> str:
    settings = LauncherSettings(
        kind="slurm", nodes=2, python="/opt/tuneline/bin/python3", slurm=slurm, environment={"NCCL_DEBUG": "a b"}
    )
    return batch_script.render_script(
        batch_script.build_options("tuneline-a", folder, 2, settings.slurm), folder, 2, settings
    )


def test_script_contains_all_settings_and_is_valid_bash(tmp_path: Path) -> None:
    text = render_script(
        tmp_path, partition="gpu", account="ml", qos="high", gres="gpu:h100:8", constraint="ib", cpus=64, memory="900G", time_limit="1-0",
        save_seconds=300, reservation="r", options=["--exclusive"], setup=["module load cuda/12.8"],
    )  # fmt: skip
    expected_options = [
        "--job-name=tuneline-a", "--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--export=NONE",
        "--signal=TERM@300",
        "--partition=gpu", "--account=ml", "--qos=high", "--gres=gpu:h100:8", "--constraint=ib", "--cpus-per-task=64", "--mem=900G",
        "--time=1-0", "--reservation=r", "--exclusive", f"--output={tmp_path}/slurm-%j.log",
    ]  # fmt: skip
    assert {f"#SBATCH {option}" for option in expected_options} <= {*text.splitlines()}
    directives = [number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    assert directives == [*range(1, len(directives) + 1)], "sbatch ignores directives after the first command"
    assert "export NCCL_DEBUG='a b'" in text
    assert text.index("module load") < text.index(
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --cpus-per-task=64"
    )
    assert not batch_script.PLACEHOLDER_PATTERN.search(text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_folder_name_is_quoted_for_sbatch(tmp_path: Path) -> None:
    text = render_script(tmp_path / "my 100% dir")
    assert f"#SBATCH --output='{tmp_path}/my 100%% dir/slurm-%j.log'" in text
    assert f"#SBATCH --comment='{tmp_path}/my 100% dir'" in text


def build_container_settings() -> LauncherSettings:
    return LauncherSettings.model_validate(
        {"kind": "slurm", "slurm": {"container": {"engine": "pyxis", "image": "registry.example#a:1"}}}
    )


def test_finished_job_is_found_unless_interrupted(tmp_path: Path, slurm_programs: Path) -> None:
    (slurm_programs / "squeue.output").write_text('{"jobs": []}')
    (tmp_path / slurm_launcher.RECORD_FILENAME).write_text('{"job": "5"}')
    launcher = slurm_launcher.SlurmLauncher(LauncherSettings(kind="slurm"), CommandClient())
    assert launcher.find(tmp_path) is None
    (tmp_path / OUTCOME_FILENAME).write_text('{"error": {"kind": "interrupted"}, "exit_code": 75}')
    assert launcher.find(tmp_path) is None
    (tmp_path / OUTCOME_FILENAME).write_text('{"trained": {}}')
    job = launcher.find(tmp_path)
    assert job is not None
    assert job.name == "Slurm job 5"


def test_found_job_continues_despite_old_stop_file(tmp_path: Path, slurm_programs: Path) -> None:
    """With an old stop file the script would exit with 75 and no outcome; the launcher records the id for the time after the job's end."""
    launcher, folder = (
        slurm_launcher.SlurmLauncher(LauncherSettings(kind="slurm"), CommandClient()),
        tmp_path / "launch",
    )
    folder.mkdir()
    (folder / batch_script.STOP_FILENAME).touch()
    (slurm_programs / "squeue.output").write_text(
        json.dumps({"jobs": [{"job_id": 7, "name": slurm_launcher.build_job_name(folder), "job_state": "PENDING"}]})
    )
    job = launcher.find(folder)
    assert job is not None
    assert job.id == "7"
    assert not (folder / batch_script.STOP_FILENAME).exists()
    (slurm_programs / "squeue.output").write_text('{"jobs": []}')
    (folder / OUTCOME_FILENAME).write_text('{"trained": {}}')
    ended_job = launcher.find(folder)
    assert ended_job is not None
    assert ended_job.id == "7"


def test_outcome_is_returned_without_recorded_job_id(tmp_path: Path, slurm_programs: Path) -> None:
    """The submitting process was killed right after sbatch; Slurm forgets the job after some minutes."""
    launcher, folder = (
        slurm_launcher.SlurmLauncher(LauncherSettings(kind="slurm"), CommandClient()),
        tmp_path / "launch",
    )
    folder.mkdir()
    (folder / OUTCOME_FILENAME).write_text('{"trained": {}}')
    (slurm_programs / "squeue.output").write_text(
        json.dumps({"jobs": [{"job_id": 8, "name": slurm_launcher.build_job_name(folder), "job_state": "COMPLETED"}]})
    )
    known_job = launcher.find(folder)
    assert known_job is not None
    assert (known_job.id, known_job.poll().state) == ("8", "succeeded")
    (slurm_programs / "squeue.output").write_text('{"jobs": []}')
    forgotten_job = launcher.find(folder)
    assert forgotten_job is not None
    forgotten_job.cancel()
    assert (forgotten_job.name, forgotten_job.poll().state) == ("Slurm job", "succeeded"), (
        "a job without an id is not queried"
    )
    assert run(launcher, Command("never.started", []), folder, SilentReporter()) == {"trained": {}}


def test_failed_submission_discards_earlier_job_record(tmp_path: Path, slurm_programs: Path) -> None:
    (tmp_path / slurm_launcher.RECORD_FILENAME).write_text('{"job": "5"}')
    (slurm_programs / "squeue.output").write_text('{"jobs": []}')
    (slurm_programs / "sbatch.output").write_text("sbatch: error: Invalid account")
    with pytest.raises(RefusedError):
        slurm_launcher.SlurmLauncher(LauncherSettings(kind="slurm"), CommandClient()).start(Command("a", []), tmp_path)
    assert not (tmp_path / slurm_launcher.RECORD_FILENAME).exists()


def test_dependency_sets_kill_on_invalid_dep(tmp_path: Path) -> None:
    lines = render_script(tmp_path, dependency="afterok:123:124").splitlines()
    assert {"#SBATCH --dependency=afterok:123:124", "#SBATCH --kill-on-invalid-dep=yes"} <= {*lines}
    assert "dep" not in "".join(
        line for line in render_script(tmp_path).splitlines() if line.startswith("#SBATCH")
    ).replace(str(tmp_path), "")


def test_array_task_reads_its_folder_by_index(tmp_path: Path) -> None:
    array_folder = tmp_path / "a sweep's"
    array_folder.mkdir()
    settings = LauncherSettings.model_validate({"kind": "slurm", "nodes": 1})
    text = batch_script.render_script(
        batch_script.build_options("tuneline-a", array_folder, 1, settings.slurm, "0-1%1"), array_folder, 1, settings
    )
    batch_script.get_tasks_path(array_folder, "tuneline-a").write_text("/work/one\n/work/the other\n")
    (line,) = (line for line in text.splitlines() if line.startswith("folder="))
    result = subprocess.run(
        ["bash", "-c", f'{line}; echo "$folder"'],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "/work/the other\n"
    assert "#SBATCH --array=0-1%1" in text.splitlines()
    assert "slurm-%A_%a.log" in text


def test_array_watchers_share_one_query_per_poll_interval() -> None:
    queries = []

    class CountingClient(CommandClient):
        def __init__(self) -> None: ...

        def list_jobs(self, name: str) -> list[JobRecord]:
            queries.append(name)
            return parse_jobs({"jobs": ARRAY_RECORDS_BY_VERSION["squeue of Slurm 22"]})

    settings = LauncherSettings.model_validate({"kind": "slurm", "looks_every": 60})
    shared_client = slurm_launcher.SharedClient(CountingClient(), settings.looks_every)
    jobs = [
        slurm_launcher.SlurmJob(f"12_{task}", "a", Path("a"), Path("a"), shared_client, settings) for task in (0, 2, 3)
    ]
    assert [job.poll().state for job in jobs] == ["running", "waiting", "waiting"]
    assert queries == ["a"]


def test_shared_client_lives_as_long_as_a_watcher_uses_it(slurm_programs: Path) -> None:
    first_client, later_client = CommandClient(), CommandClient()
    shared_client = slurm_launcher.share_client("an array", first_client, 60)
    assert slurm_launcher.share_client("an array", later_client, 60) is shared_client
    del shared_client
    assert slurm_launcher.share_client("an array", later_client, 60).client is later_client


def test_array_watchers_share_one_timeout() -> None:
    queries = []

    class UnresponsiveClient(CommandClient):
        def __init__(self) -> None: ...

        def list_jobs(self, name: str) -> list[JobRecord]:
            queries.append(name)
            raise UnresponsiveError("socket timed out")

    shared_client = slurm_launcher.SharedClient(UnresponsiveClient(), 0.2)
    for _ in range(3):
        with pytest.raises(UnresponsiveError, match="socket timed out"):
            shared_client.list_jobs("a")
    assert queries == ["a"]
    time.sleep(0.2)
    with pytest.raises(UnresponsiveError):
        shared_client.list_jobs("a")
    assert queries == ["a", "a"]


def test_stop_request_does_not_wait_for_unresponsive_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher retries at its next poll and must stay responsive to a second Ctrl-C."""

    class UnresponsiveClient(CommandClient):
        def __init__(self) -> None: ...

        def cancel(self, job: str, signal: str = "") -> None:
            raise UnresponsiveError("socket timed out")

    monkeypatch.setattr(slurm_launcher, "retry", lambda *_: pytest.fail("request_stop retries"))
    job = slurm_launcher.SlurmJob(
        "12", "a", tmp_path, tmp_path, UnresponsiveClient(), LauncherSettings(kind="slurm"), _last=JobStatus("running")
    )
    job.request_stop()
    assert (tmp_path / batch_script.STOP_FILENAME).exists()


def test_container_uses_pyxis_options_or_apptainer_exec(tmp_path: Path) -> None:
    mounts = ["/work:/work"]
    pyxis = render_script(tmp_path, container={"engine": "pyxis", "image": "registry.example#a:1", "mounts": mounts})
    assert "--container-image='registry.example#a:1' --container-mounts=/work:/work bash -c" in pyxis
    apptainer = render_script(tmp_path, container={"engine": "apptainer", "image": "/images/a.sif", "mounts": mounts})
    command = "exec apptainer exec --bind /work:/work /images/a.sif /opt/tuneline/bin/python3 -P -m components.common.launch.node_runner"
    assert command in apptainer
    assert "exec python -P -m" in batch_script.render_script({}, tmp_path, 1, build_container_settings()), (
        "the image has its own interpreter"
    )
    assert "PYTHONPATH" not in pyxis + apptainer, "an image has its own tuneline"
    assert "PYTHONPATH" in render_script(tmp_path)


def test_custom_script_template_is_used(tmp_path: Path) -> None:
    template = tmp_path / "own.sh"
    template.write_text("#!/bin/bash\n@DIRECTIVES@\nexport folder=@FOLDER@\nour-srun bash -c @NODE@ node $folder\n")
    assert render_script(tmp_path, template=str(template)).endswith(
        'exec /opt/tuneline/bin/python3 -P -m components.common.launch.node_runner "$1"\' node $folder\n'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("@DIRECTIVES@ @FOLDER@", "@NODE@ is missing"), ("@DIRECTIVES@ @FOLDER@ @NODE@ @NODES@", "@NODES@ is unknown")],
)
def test_template_with_missing_or_unknown_placeholder_is_refused(text: str, message: str, tmp_path: Path) -> None:
    template_path = tmp_path / "own.sh"
    template_path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as raised:
        render_script(tmp_path, template=str(template_path))
    assert raised.value.hint.startswith("Start from the job.sh of a job")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        render_script(tmp_path, template=str(tmp_path / "nowhere.sh"))


@pytest.mark.parametrize(
    "slurm_settings",
    [
        {"time_limit": "soon"},
        {"options": ["exclusive"]},
        {"options": ["--a\nrm -rf /"]},
        {"container": {"engine": "pyxis"}},
        {"que": ""},
    ],
)
def test_invalid_slurm_settings_are_refused(slurm_settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LauncherSettings.model_validate({"kind": "slurm", "slurm": slurm_settings})


@pytest.fixture
def slurm_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide Slurm programs that print the file PROGRAM.output of the returned folder and fail if it contains an error."""
    for name in ("sbatch", "squeue", "sacct", "scancel"):
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\ntext = open({str(tmp_path)!r} + '/{name}.output').read()\n"
            "failed = 'error: ' in text[:30]\nprint(text, file=sys.stderr if failed else sys.stdout)\nsys.exit(failed)\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_empty_job_list_with_error_counts_as_unresponsive(slurm_programs: Path) -> None:
    """squeue --json of Slurm 22 exits with 0 when the controller is unreachable."""
    (slurm_programs / "squeue.output").write_text(
        '{"errors": [{"description": "Failed while looking for jobs", "source": "slurm_load_jobs"}], "jobs": []}'
    )
    with pytest.raises(UnresponsiveError, match="Failed while looking for jobs, slurm_load_jobs"):
        CommandClient().list_jobs("a")


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("squeue: error: Unable to contact slurm controller (connect failure)", UnresponsiveError),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", UnresponsiveError),
        ("squeue: error: Invalid user: 12", RefusedError),
        ("no JSON at all", ConfigurationError),
    ],
)
def test_slurm_errors_are_classified(output: str, error: type[TunelineError], slurm_programs: Path) -> None:
    (slurm_programs / "squeue.output").write_text(output)
    with pytest.raises(error):
        CommandClient().list_jobs("a")


def test_disabled_accounting_returns_no_jobs(slurm_programs: Path) -> None:
    (slurm_programs / "sacct.output").write_text("sacct: error: Slurm accounting storage is disabled")
    assert CommandClient().list_accounted("7") == []


def test_cancel_of_ended_job_succeeds(slurm_programs: Path) -> None:
    (slurm_programs / "scancel.output").write_text(
        "scancel: error: Kill job error on job id 7: Invalid job id specified"
    )
    CommandClient().cancel("7")
    (slurm_programs / "scancel.output").write_text(
        "scancel: error: Kill job error on job id 7: Access/permission denied"
    )
    with pytest.raises(RefusedError, match="permission denied"):
        CommandClient().cancel("7")


def test_programs_run_over_ssh_on_login_node(slurm_programs: Path) -> None:
    ssh = slurm_programs / "ssh"
    ssh.write_text(f"#!/bin/sh\necho \"$@\" > {slurm_programs}/arguments\necho '42;cluster'\n")
    ssh.chmod(0o755)
    assert CommandClient("login.example").submit(Path("/work/a job.sh")) == "42"
    assert (
        slurm_programs / "arguments"
    ).read_text() == "-o BatchMode=yes login.example env SLURM_BITSTR_LEN=0 sbatch --parsable '/work/a job.sh'\n"
    ssh.write_text("#!/bin/sh\necho 'ssh: connect to host login.example port 22: No route to host' >&2; exit 255\n")
    with pytest.raises(UnresponsiveError, match="No route to host"):
        CommandClient("login.example").list_jobs("a")


def test_lost_submit_response_does_not_submit_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch submits the job, but its response is lost."""

    class LostAnswerClient(CommandClient):
        submissions = 0

        def __init__(self) -> None:
            """No program is needed."""

        def submit(self, script: Path) -> str:
            LostAnswerClient.submissions += 1
            raise UnresponsiveError("socket timed out")

        def list_jobs(self, name: str) -> list[Any]:
            return parse_jobs(
                {"jobs": [{"job_id": 5, "name": name, "job_state": "PENDING"}] * LostAnswerClient.submissions}
            )

    monkeypatch.setattr(slurm_launcher, "RETRY_INTERVALS_SECONDS", (0.01,))
    job = slurm_launcher.SlurmLauncher(LauncherSettings(kind="slurm"), LostAnswerClient()).start(
        Command("a", []), tmp_path
    )
    assert (job.id, LostAnswerClient.submissions) == ("5", 1)


def test_missing_sbatch_error_suggests_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TunelineError, match="sbatch is not installed on this machine") as raised:
        command_client.CommandClient()
    assert "launcher.slurm.ssh" in raised.value.hint
