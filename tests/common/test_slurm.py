"""Batch scripts, and what Slurm says of a job in the shapes of its versions. Real jobs are in tests/engines/test_slurm.py."""

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

from components.common.errors import ConfigurationError, TunelineError
from components.common.launch import OUTCOME, Command, Seen, SilentError, run
from components.common.launch.settings import LauncherSettings
from components.common.launch.slurm import launcher, programs, script
from components.common.launch.slurm.programs import Programs, RefusedError
from components.common.launch.slurm.states import Batch, batches
from components.common.progress import Silent

NUMBER = {"set": True, "infinite": False, "number": 7}
UNSET = {"set": False, "infinite": False, "number": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "squeue of Slurm 22": {
        "job_id": 7, "name": "tuneline-a", "job_state": "RUNNING", "state_reason": "None", "exit_code": 0, "array_job_id": 0,
        "array_task_id": None, "user_name": "ada", "comment": "/work", "restart_cnt": 1,
    },
    "squeue of Slurm 23.11": {
        "job_id": 7, "name": "tuneline-a", "job_state": ["RUNNING"], "state_reason": "None", "array_job_id": UNSET | {"set": True},
        "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "infinite": False, "number": 0}},
        "array_task_id": UNSET, "user_name": "ada", "comment": "/work", "restart_cnt": 1,
    },
    "sacct of Slurm 22": {
        "job_id": 7, "name": "tuneline-a", "state": {"current": "RUNNING", "reason": "None"}, "user": "ada", "comment": {"job": "/work"},
        "exit_code": {"status": "SUCCESS", "return_code": 0}, "restart_cnt": 1,
    },
    "sacct of Slurm 24.05": {
        "job_id": NUMBER, "name": "tuneline-a", "state": {"current": ["RUNNING"], "reason": "None"}, "user": "ada",
        "comment": {"job": "/work", "system": ""}, "exit_code": {"status": ["SUCCESS"], "return_code": NUMBER | {"number": 0}},
        "restart_cnt": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_reads_the_same_in_every_shape(shape: str) -> None:
    (job,) = batches({"jobs": [SHAPES[shape]]})
    assert (job.id, job.name, job.states) == ("7", "tuneline-a", ("RUNNING",))
    assert (job.exit_code, job.seen) == (0, Seen("running", "RUNNING"))


TASK_SHAPES: dict[str, list[dict[str, Any]]] = {
    "squeue of Slurm 22": [
        {"job_id": 12, "array_job_id": 12, "array_task_id": None, "array_task_string": "2-3,5%2", "job_state": "PENDING"},
        {"job_id": 13, "array_job_id": 12, "array_task_id": 0, "array_task_string": "", "job_state": "RUNNING"},
    ],
    "squeue of Slurm 23.11": [
        {"job_id": 12, "array_job_id": NUMBER | {"number": 12}, "array_task_id": UNSET, "array_task_string": "2-3,5%2",
         "job_state": ["PENDING"]},
        {"job_id": 13, "array_job_id": NUMBER | {"number": 12}, "array_task_id": NUMBER | {"number": 0}, "array_task_string": "",
         "job_state": ["RUNNING"]},
    ],
    "sacct of Slurm 24.05": [
        {"job_id": 12, "array": {"job_id": 12, "task_id": UNSET, "task": "2-3,5%2"}, "state": {"current": ["PENDING"]}},
        {"job_id": 13, "array": {"job_id": 12, "task_id": NUMBER | {"number": 0}, "task": ""}, "state": {"current": ["RUNNING"]}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", TASK_SHAPES)
def test_the_tasks_of_an_array_are_jobs_also_where_those_that_wait_are_one_entry(shape: str) -> None:
    found = {job.id: job.seen.state for job in batches({"jobs": TASK_SHAPES[shape]})}
    assert found == {"12_2": "waiting", "12_3": "waiting", "12_5": "waiting", "12_0": "running"}


@pytest.mark.parametrize(
    ("states", "reason", "seen"),
    [
        ("PENDING", "Resources", Seen("waiting", "PENDING (Resources)")),
        (["PENDING", "REQUEUED"], "BeginTime", Seen("waiting", "PENDING REQUEUED (BeginTime)")),
        (["FAILED", "COMPLETING"], "None", Seen("running", "FAILED COMPLETING")),
        ("COMPLETED", "None", Seen("succeeded", "COMPLETED")),
        ("CANCELLED", "None", Seen("cancelled", "CANCELLED")),
        ("TIMEOUT", "TimeLimit", Seen("ended", "TIMEOUT (TimeLimit)")),
        (["NODE_FAIL", "REQUEUED"], "None", Seen("waiting", "NODE_FAIL REQUEUED")),
        ("PREEMPTED", "None", Seen("ended", "PREEMPTED")),
        ("OUT_OF_MEMORY", "OutOfMemory", Seen("failed", "OUT_OF_MEMORY (OutOfMemory), exit code 3")),
        ("OF_A_LATER_SLURM", "", Seen("failed", "OF_A_LATER_SLURM, exit code 3")),
    ],
)
def test_every_state_is_waiting_running_or_an_end_with_slurms_words(states: object, reason: str, seen: Seen) -> None:
    job = {"job_id": 1, "name": "a", "job_state": states, "state_reason": reason, "exit_code": 3 << 8}
    assert batches({"jobs": [job]})[0].seen == seen


def rendered(folder: Path, **slurm: Any) -> str:
    settings = LauncherSettings(kind="slurm", nodes=2, python="/opt/tuneline/bin/python3", slurm=slurm, environment={"NCCL_DEBUG": "a b"})
    return script.text(script.options("tuneline-a", folder, 2, settings.slurm), folder, 2, settings)


def test_a_script_says_what_a_site_asked_for_and_is_one_that_bash_reads(tmp_path: Path) -> None:
    text = rendered(
        tmp_path, partition="gpu", account="ml", qos="high", gres="gpu:h100:8", constraint="ib", cpus=64, memory="900G", time_limit="1-0",
        save_seconds=300, reservation="r", options=["--exclusive"], setup=["module load cuda/12.8"],
    )  # fmt: skip
    wanted = [
        "--job-name=tuneline-a", "--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--export=NONE",
        "--signal=TERM@300",
        "--partition=gpu", "--account=ml", "--qos=high", "--gres=gpu:h100:8", "--constraint=ib", "--cpus-per-task=64", "--mem=900G",
        "--time=1-0", "--reservation=r", "--exclusive", f"--output={tmp_path}/slurm-%j.log",
    ]  # fmt: skip
    assert {f"#SBATCH {one}" for one in wanted} <= {*text.splitlines()}
    directives = [number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    assert directives == [*range(1, len(directives) + 1)], "sbatch reads them up to the first command only"
    assert "export NCCL_DEBUG='a b'" in text
    assert text.index("module load") < text.index("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --cpus-per-task=64")
    assert not script.NAME.search(text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_folder_whose_name_needs_quotes_is_written_as_sbatch_reads_it(tmp_path: Path) -> None:
    text = rendered(tmp_path / "my 100% dir")
    assert f"#SBATCH --output='{tmp_path}/my 100%% dir/slurm-%j.log'" in text
    assert f"#SBATCH --comment='{tmp_path}/my 100% dir'" in text


def of_an_image() -> LauncherSettings:
    return LauncherSettings.model_validate({"kind": "slurm", "slurm": {"container": {"engine": "pyxis", "image": "registry.example#a:1"}}})


def test_what_a_job_left_is_found_unless_it_only_says_run_it_again(tmp_path: Path, said: Path) -> None:
    (said / "squeue.said").write_text('{"jobs": []}')
    (tmp_path / launcher.RECORD).write_text('{"job": "5"}')
    found = launcher.SlurmLauncher(LauncherSettings(kind="slurm"), Programs())
    assert found.find(tmp_path) is None
    (tmp_path / OUTCOME).write_text('{"error": {"kind": "interrupted"}, "exit_code": 75}')
    assert found.find(tmp_path) is None
    (tmp_path / OUTCOME).write_text('{"trained": {}}')
    job = found.find(tmp_path)
    assert job is not None
    assert job.name == "Slurm job 5"


def test_a_job_that_is_found_alive_goes_on_whatever_an_earlier_call_had_asked_of_it(tmp_path: Path, said: Path) -> None:
    """Its script would end with 75 and no outcome where the wish to stop still lay there; and its number must be known after its end."""
    found, folder = launcher.SlurmLauncher(LauncherSettings(kind="slurm"), Programs()), tmp_path / "launch"
    folder.mkdir()
    (folder / script.STOP).touch()
    (said / "squeue.said").write_text(json.dumps({"jobs": [{"job_id": 7, "name": launcher.name_of(folder), "job_state": "PENDING"}]}))
    job = found.find(folder)
    assert job is not None
    assert job.id == "7"
    assert not (folder / script.STOP).exists()
    (said / "squeue.said").write_text('{"jobs": []}')
    (folder / OUTCOME).write_text('{"trained": {}}')
    over = found.find(folder)
    assert over is not None
    assert over.id == "7"


def test_an_outcome_is_told_also_where_the_number_of_its_job_was_never_written_down(tmp_path: Path, said: Path) -> None:
    """Who handed it in was killed right after; Slurm knows it for some minutes, and then no more."""
    found, folder = launcher.SlurmLauncher(LauncherSettings(kind="slurm"), Programs()), tmp_path / "launch"
    folder.mkdir()
    (folder / OUTCOME).write_text('{"trained": {}}')
    (said / "squeue.said").write_text(json.dumps({"jobs": [{"job_id": 8, "name": launcher.name_of(folder), "job_state": "COMPLETED"}]}))
    known = found.find(folder)
    assert known is not None
    assert (known.id, known.look().state) == ("8", "succeeded")
    (said / "squeue.said").write_text('{"jobs": []}')
    forgotten = found.find(folder)
    assert forgotten is not None
    forgotten.cancel()
    assert (forgotten.name, forgotten.look().state) == ("Slurm job", "succeeded"), "and nobody is asked about a job without a number"
    assert run(found, Command("never.started", []), folder, Silent()) == {"trained": {}}


def test_a_job_that_is_handed_in_is_not_taken_for_an_earlier_one(tmp_path: Path, said: Path) -> None:
    (tmp_path / launcher.RECORD).write_text('{"job": "5"}')
    (said / "squeue.said").write_text('{"jobs": []}')
    (said / "sbatch.said").write_text("sbatch: error: Invalid account")
    with pytest.raises(RefusedError):
        launcher.SlurmLauncher(LauncherSettings(kind="slurm"), Programs()).start(Command("a", []), tmp_path)
    assert not (tmp_path / launcher.RECORD).exists()


def test_a_job_may_wait_for_others_and_ends_where_they_cannot_be_waited_for(tmp_path: Path) -> None:
    lines = rendered(tmp_path, dependency="afterok:123:124").splitlines()
    assert {"#SBATCH --dependency=afterok:123:124", "#SBATCH --kill-on-invalid-dep=yes"} <= {*lines}
    assert "dep" not in "".join(line for line in rendered(tmp_path).splitlines() if line.startswith("#SBATCH")).replace(str(tmp_path), "")


def test_each_task_of_an_array_finds_its_own_folder(tmp_path: Path) -> None:
    place = tmp_path / "a sweep's"
    place.mkdir()
    settings = LauncherSettings.model_validate({"kind": "slurm", "nodes": 1})
    text = script.text(script.options("tuneline-a", place, 1, settings.slurm, "0-1%1"), place, 1, settings)
    script.tasks_of(place, "tuneline-a").write_text("/work/one\n/work/the other\n")
    (line,) = (line for line in text.splitlines() if line.startswith("folder="))
    told = subprocess.run(
        ["bash", "-c", f'{line}; echo "$folder"'],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "/work/the other\n"
    assert "#SBATCH --array=0-1%1" in text.splitlines()
    assert "slurm-%A_%a.log" in text


def test_watchers_of_an_arrays_tasks_ask_slurm_once_for_all_within_a_moment() -> None:
    asked = []

    class Way(Programs):
        def __init__(self) -> None: ...

        def jobs(self, name: str) -> list[Batch]:
            asked.append(name)
            return batches({"jobs": TASK_SHAPES["squeue of Slurm 22"]})

    settings = LauncherSettings.model_validate({"kind": "slurm", "looks_every": 60})
    way = launcher.Shared(Way(), settings.looks_every)
    jobs = [launcher.SlurmJob(f"12_{task}", "a", Path("a"), Path("a"), way, settings) for task in (0, 2, 3)]
    assert [job.look().state for job in jobs] == ["running", "waiting", "waiting"]
    assert asked == ["a"]


def test_the_way_of_an_arrays_watchers_is_shared_as_long_as_one_of_them_watches(said: Path) -> None:
    first, then = Programs(), Programs()
    way = launcher.shared_way("an array", first, 60)
    assert launcher.shared_way("an array", then, 60) is way
    del way
    assert launcher.shared_way("an array", then, 60).way is then


def test_watchers_of_an_arrays_tasks_wait_for_a_silent_slurm_once_and_not_in_turn() -> None:
    asked = []

    class Away(Programs):
        def __init__(self) -> None: ...

        def jobs(self, name: str) -> list[Batch]:
            asked.append(name)
            raise SilentError("socket timed out")

    way = launcher.Shared(Away(), 0.2)
    for _ in range(3):
        with pytest.raises(SilentError, match="socket timed out"):
            way.jobs("a")
    assert asked == ["a"]
    time.sleep(0.2)
    with pytest.raises(SilentError):
        way.jobs("a")
    assert asked == ["a", "a"]


def test_who_asks_a_training_to_save_does_not_wait_for_a_silent_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher asks again in a moment, and has to hear a second Ctrl-C meanwhile."""

    class Away(Programs):
        def __init__(self) -> None: ...

        def cancel(self, job: str, signal: str = "") -> None:
            raise SilentError("socket timed out")

    monkeypatch.setattr(launcher, "patiently", lambda *_: pytest.fail("it waits"))
    job = launcher.SlurmJob("12", "a", tmp_path, tmp_path, Away(), LauncherSettings(kind="slurm"), _last=Seen("running"))
    job.stop()
    assert (tmp_path / script.STOP).exists()


def test_a_container_is_pyxis_own_options_or_apptainer_around_the_command(tmp_path: Path) -> None:
    mounts = ["/work:/work"]
    pyxis = rendered(tmp_path, container={"engine": "pyxis", "image": "registry.example#a:1", "mounts": mounts})
    assert "--container-image='registry.example#a:1' --container-mounts=/work:/work bash -c" in pyxis
    apptainer = rendered(tmp_path, container={"engine": "apptainer", "image": "/images/a.sif", "mounts": mounts})
    command = "exec apptainer exec --bind /work:/work /images/a.sif /opt/tuneline/bin/python3 -P -m components.common.launch.node"
    assert command in apptainer
    assert "exec python -P -m" in script.text({}, tmp_path, 1, of_an_image()), "and its own interpreter"
    assert "PYTHONPATH" not in pyxis + apptainer, "an image has its own tuneline"
    assert "PYTHONPATH" in rendered(tmp_path)


def test_a_site_may_have_a_script_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text("#!/bin/bash\n@DIRECTIVES@\nexport folder=@FOLDER@\nour-srun bash -c @NODE@ node $folder\n")
    assert rendered(tmp_path, template=str(own)).endswith(
        'exec /opt/tuneline/bin/python3 -P -m components.common.launch.node "$1"\' node $folder\n'
    )


@pytest.mark.parametrize(
    ("text", "said"), [("@DIRECTIVES@ @FOLDER@", "@NODE@ is missing"), ("@DIRECTIVES@ @FOLDER@ @NODE@ @NODES@", "@NODES@ is unknown")]
)
def test_a_script_that_leaves_out_what_is_needed_is_refused(text: str, said: str, tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        rendered(tmp_path, template=str(own))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        rendered(tmp_path, template=str(tmp_path / "nowhere.sh"))


@pytest.mark.parametrize(
    "wrong",
    [{"time_limit": "soon"}, {"options": ["exclusive"]}, {"options": ["--a\nrm -rf /"]}, {"container": {"engine": "pyxis"}}, {"que": ""}],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LauncherSettings.model_validate({"kind": "slurm", "slurm": wrong})


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs say what lies in a folder under their names, and fail where that is an error."""
    for name in ("sbatch", "squeue", "sacct", "scancel"):
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\ntext = open({str(tmp_path)!r} + '/{name}.said').read()\n"
            "failed = 'error: ' in text[:30]\nprint(text, file=sys.stderr if failed else sys.stdout)\nsys.exit(failed)\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_an_answer_that_lists_no_job_because_the_controller_is_gone_is_no_answer(said: Path) -> None:
    """squeue --json of Slurm 22 exits with 0 then."""
    (said / "squeue.said").write_text(
        '{"errors": [{"description": "Failed while looking for jobs", "source": "slurm_load_jobs"}], "jobs": []}'
    )
    with pytest.raises(SilentError, match="Failed while looking for jobs, slurm_load_jobs"):
        Programs().jobs("a")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("squeue: error: Unable to contact slurm controller (connect failure)", SilentError),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SilentError),
        ("squeue: error: Invalid user: 12", RefusedError),
        ("no JSON at all", ConfigurationError),
    ],
)
def test_what_slurm_says_is_told_apart_in_silence_and_refusal(words: str, error: type[TunelineError], said: Path) -> None:
    (said / "squeue.said").write_text(words)
    with pytest.raises(error):
        Programs().jobs("a")


def test_without_accounting_a_job_is_just_not_known_there(said: Path) -> None:
    (said / "sacct.said").write_text("sacct: error: Slurm accounting storage is disabled")
    assert Programs().accounted("7") == []


def test_a_job_that_has_ended_already_may_be_cancelled(said: Path) -> None:
    (said / "scancel.said").write_text("scancel: error: Kill job error on job id 7: Invalid job id specified")
    Programs().cancel("7")
    (said / "scancel.said").write_text("scancel: error: Kill job error on job id 7: Access/permission denied")
    with pytest.raises(RefusedError, match="permission denied"):
        Programs().cancel("7")


def test_the_programs_run_on_a_login_node_where_one_is_named(said: Path) -> None:
    ssh = said / "ssh"
    ssh.write_text(f"#!/bin/sh\necho \"$@\" > {said}/asked\necho '42;cluster'\n")
    ssh.chmod(0o755)
    assert Programs("login.example").submit(Path("/work/a job.sh")) == "42"
    assert (said / "asked").read_text() == "-o BatchMode=yes login.example env SLURM_BITSTR_LEN=0 sbatch --parsable '/work/a job.sh'\n"
    ssh.write_text("#!/bin/sh\necho 'ssh: connect to host login.example port 22: No route to host' >&2; exit 255\n")
    with pytest.raises(SilentError, match="No route to host"):
        Programs("login.example").jobs("a")


def test_an_answer_that_was_lost_hands_no_second_job_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch was heard, and its answer was not."""

    class Heard(Programs):
        handed_in = 0

        def __init__(self) -> None:
            """No program is needed."""

        def submit(self, script: Path) -> str:
            Heard.handed_in += 1
            raise SilentError("socket timed out")

        def jobs(self, name: str) -> list[Any]:
            return batches({"jobs": [{"job_id": 5, "name": name, "job_state": "PENDING"}] * Heard.handed_in})

    monkeypatch.setattr(launcher, "PAUSES", (0.01,))
    job = launcher.SlurmLauncher(LauncherSettings(kind="slurm"), Heard()).start(Command("a", []), tmp_path)
    assert (job.id, Heard.handed_in) == ("5", 1)


def test_without_slurm_it_is_said_where_it_may_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TunelineError, match="there is no sbatch here") as raised:
        programs.Programs()
    assert "launcher.slurm.ssh" in raised.value.hint
