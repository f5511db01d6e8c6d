"""The storage benchmark on a local folder: its measurements, several hosts, refusals and cleanup.

No test decides by a duration: the target utilization of the workload is so low that it is always reached.
long: one test stops a running benchmark, one starts 24 processes and draws a plot, and one runs `tuneline size`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.reporters import SilentReporter
from pipelines.cli.storage_benchmarking import HOSTS_VARIABLE, RANK_VARIABLES, resolve_membership
from pipelines.operations.storage_benchmark import benchmark_session, phases, rank_worker
from pipelines.operations.storage_benchmark.benchmark_session import Membership
from pipelines.operations.storage_benchmark.host_group import HostGroup, open_group
from pipelines.operations.storage_benchmark.phases import Benchmark, BenchmarkPlan
from pipelines.operations.storage_benchmark.rank_processes import run_ranks
from pipelines.operations.storage_benchmark.workloads import WORKLOADS, Workload
from pipelines.operations.storage_probe.rendezvous import PartnerError
from tests.pipelines.command import COMMAND, answer_in_process, environment, refusal, run_in_process
from tests.pipelines.processes import hear_interrupts

Json = dict[str, Any]
WORKLOAD = """
dataset: {num_files_train: 2, num_samples_per_file: 16, record_length: 10000}
reader: {batch_size: 2, read_threads: 1}
train: {computation_time: 0.005, epochs: 3, total_training_steps: 6}
metric: {au: 0.001}
"""
TINY = Workload("tiny", "test", 2, 16, 10_000, 2, 0.005, "random", target_utilization=0.001)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


def run_hosts(storage: Path, plans: list[BenchmarkPlan]) -> list[Json | TunelineError]:
    """Run a benchmark as one host per plan, each in a thread, and return their reports or errors."""
    outcomes: dict[int, Json | TunelineError] = {}

    def run(rank: int) -> None:
        membership = Membership("together", len(plans), rank, 20.0)
        try:
            outcomes[rank] = benchmark_session.run_benchmark(storage, plans[rank], {}, membership, SilentReporter())
        except TunelineError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(len(plans))]


@pytest.mark.long
def test_all_teams_are_measured_and_nothing_is_left(storage: Path) -> None:
    teams = ("--checkpoint", "1m", "--ranks", "2", "--readers", "2", "--small-files", "20", "--mix", "--seconds", "0.1")
    command = ("storage", "benchmark", "storage", "--accelerators", "2", "--workload", "workload.yaml", *teams)
    limits = ("--read-gb-s", "1e-6", "--write-gb-s", "1e-6")
    result = answer_in_process(*command, *limits, "-o", "report", cwd=storage.parent)
    (run,) = result["training"]["runs"]
    assert result["ok"]
    assert (run["accelerators"], run["steps"]) == (2, 3), "the warm-up is excluded: 1 step, and 2 batches read ahead"
    assert result["workload"]["dataset_bytes"] == 2 * 16 * 12_288
    assert result["checkpoint_write"]["bytes"] == result["checkpoint_read"]["bytes"] == 14_000_000
    assert result["model_loading"]["bytes"] == 2 * 2_000_000, "every rank loads the whole model"
    assert not result["checkpoint_read"]["other_host"]
    assert (result["small_files"]["files"], result["small_files"]["readers"]) == (20, 2)
    assert result["mix"]["accelerators"] == 2
    met = {True: True, False: None}[result["direct"]]  # reads from the page cache do not count
    assert {item["name"]: item["ok"] for item in result["verdict"]} == {"read": met, "write": True}
    assert list(storage.iterdir()) == []
    report = (storage.parent / "report" / "report.html").read_text()
    assert "<svg" in report
    assert "2 or more" in report
    assert json.loads((storage.parent / "report" / "benchmark.json").read_text()) == result


def test_small_files_read_through_the_page_cache_is_labelled(storage: Path) -> None:
    command = ("storage", "benchmark", storage, "--readers", "1", "--small-files", "1", "--buffered")
    process = run_in_process(*command, "--seconds", "0.1", cwd=storage.parent)
    assert process.returncode == 0, process.stderr
    assert "cached (small_files): the files are smaller than 5 times the memory" in process.stdout
    assert "Not an MLPerf Storage result" in process.stdout


def test_largest_passing_number_is_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (0, 1, 5, 11, 12):
        measured = []

        def measure(_: Benchmark, accelerators: int, limit: int = limit) -> Json:
            measured.append(accelerators)  # noqa: B023
            return {"accelerators": accelerators, "passes": accelerators <= limit, "utilization": 0.5}

        monkeypatch.setattr(phases, "measure_training", measure)
        plan = BenchmarkPlan(WORKLOADS["text"], accelerators=12)
        result = phases.search_accelerators(Benchmark(HostGroup(Path()), plan, SilentReporter()))
        assert result["largest_passing"] == limit
        assert result["passes"] is (limit == 12)
        assert len(measured) <= 1 + 4, "one measurement, and log2 of the number"


def test_hosts_share_the_ranks_and_report_the_same(storage: Path) -> None:
    plan = BenchmarkPlan(TINY, 2, parameters=1_000_000, ranks=2, seconds=0.1)
    first, second = run_hosts(storage, [plan, plan])
    assert isinstance(first, dict), first
    assert first == second
    assert [host["rank"] for host in first["hosts"]] == [0, 1]
    assert first["training"]["runs"][0]["accelerators"] == 2
    assert first["checkpoint_read"]["other_host"]
    assert not any(note.startswith("one host") for note in first["notes"])
    assert list(storage.iterdir()) == []


def test_hosts_with_different_options_are_refused(storage: Path) -> None:
    plans = [BenchmarkPlan(TINY, count, seconds=0.1) for count in (1, 2)]
    outcomes = run_hosts(storage, plans)
    assert all(isinstance(outcome, UsageError) for outcome in outcomes), outcomes
    assert "have different options" in str(outcomes[0])
    assert list(storage.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_a_host_ends_the_others_with_its_message(
    storage: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def prepare(benchmark: Benchmark) -> None:
        if benchmark.group.rank == failing:
            raise TunelineError("no space")
        benchmark.group.gather("prepared")

    monkeypatch.setattr(phases, "prepare", prepare)
    outcomes = run_hosts(storage, [BenchmarkPlan(TINY, 1)] * 2)
    assert str(outcomes[failing]) == "no space"
    assert str(outcomes[1 - failing]) == f"host {failing} failed: no space"
    assert list(storage.iterdir()) == []


def test_files_that_other_hosts_create_during_the_removal_are_removed(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, late = shutil.rmtree, ["late"]

    def remove_while_others_write(folder: Path, ignore_errors: bool) -> None:
        remove(folder, ignore_errors)
        if late:
            folder.mkdir()
            (folder / late.pop()).touch()

    with open_group(storage, "one", 1, 0, 1.0):
        monkeypatch.setattr(shutil, "rmtree", remove_while_others_write)
    assert not late
    assert list(storage.iterdir()) == []


def test_leader_that_is_gone_is_reported(storage: Path) -> None:
    (storage / "messages").mkdir()
    group = HostGroup(storage, hosts=2, rank=1)
    (storage / "messages" / "alive.0").touch()

    def run() -> None:
        with group.session(1.0):
            shutil.rmtree(storage / "messages")
            group.gather("ready")

    with pytest.raises(PartnerError, match="host 0 ended and removed"):
        run()


def test_missing_hosts_are_reported(storage: Path) -> None:
    def run(rank: int) -> None:
        membership = Membership("alone", 2, rank, 0.3)
        benchmark_session.run_benchmark(storage, BenchmarkPlan(TINY, 1), {}, membership, SilentReporter())

    with pytest.raises(PartnerError, match=r"1 of 2 hosts joined .* within 0 seconds"):
        run(0)
    with pytest.raises(PartnerError, match="no leader of this group is in"):
        run(1)


def test_error_of_the_storage_names_the_file(storage: Path) -> None:
    missing = str(storage / "missing")
    with pytest.raises(FileNotFoundError) as raised:
        run_ranks(HostGroup(storage), [{"kind": "read", "files": [missing], "bytes": 1, "direct": False}])
    assert raised.value.filename == missing


def test_no_read_starts_at_the_end_of_a_file(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems refuse direct I/O at an offset that is not a multiple of 4 KiB, even at the end of a file."""
    read = os.preadv

    def read_aligned(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, buffers, offset)

    files = [storage / "0", storage / "1"]
    for file in files:
        file.write_bytes(bytes(5000))
    monkeypatch.setattr(os, "preadv", read_aligned)
    task = {"files": [str(file) for file in files], "bytes": 7000, "direct": False}
    assert rank_worker.read_files(task, lambda: None)["bytes"] == 7000


def test_repeated_checkpoint_stops_within_a_file(storage: Path) -> None:
    task = {"files": [str(storage / "0")], "bytes": 8 * rank_worker.WRITE_BYTES, "seconds": 1e-9, "rank": 0}
    assert rank_worker.write_files(task, lambda: None)["bytes"] == rank_worker.WRITE_BYTES
    assert rank_worker.write_files({**task, "seconds": 0}, lambda: None)["bytes"] == task["bytes"]


def test_process_that_cannot_be_started_is_reported(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(TunelineError, match="0 of 2 rank processes started: Too many open files"):
        run_ranks(HostGroup(storage), [{}, {}])


def test_verdict_does_not_count_reads_from_memory_or_blame_slow_readers() -> None:
    small, cached = {"read_bytes_per_second": 50}, {"read_bytes_per_second": 500, "cache": "cached"}
    (item,) = benchmark_session.judge({"small_files": small, "model_loading": cached}, {"read": 100.0})
    assert (item["measured_bytes_per_second"], item["phase"], item["ok"]) == (50, "small_files", None)


def test_verdict_does_not_blame_the_storage_for_an_undemanding_training() -> None:
    training = {"runs": [{"read_bytes_per_second": 50, "passes": True}]}
    loading = {"read_bytes_per_second": 80}
    assert benchmark_session.judge({"training": training}, {"read": 100.0})[0]["ok"] is None
    assert benchmark_session.judge({"training": training}, {"read": 40.0})[0]["ok"] is True
    assert benchmark_session.judge({"training": training, "model_loading": loading}, {"read": 100.0})[0] == {
        "name": "read",
        "required_bytes_per_second": 100,
        "measured_bytes_per_second": 80,
        "phase": "model_loading",
        "ok": False,
    }


@pytest.mark.long
def test_rates_that_size_asks_for_are_the_requirement(tmp_path: Path) -> None:
    size = answer_in_process("size", "--model", "8b", "--gpu", "h100:8", cwd=tmp_path)
    (tmp_path / "size.json").write_text(json.dumps(size))
    assert benchmark_session.read_requirement(tmp_path / "size.json") == {
        "read": size["storage"]["read_bytes_per_second"],
        "write": size["storage"]["write_bytes_per_second"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no measurement is selected"),
        (["--accelerators", "1", "--mix"], "--mix requires --accelerators, --checkpoint and --readers"),
        (["--checkpoint", "0"], "--checkpoint '0' is not between 1,000,000 and"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(storage: Path, arguments: list[str], message: str) -> None:
    error = refusal(2, "storage", "benchmark", storage, *arguments, cwd=storage.parent)
    assert error["message"].startswith(message)
    assert list(storage.iterdir()) == []


@pytest.mark.parametrize(
    ("group", "hosts", "rank", "message"),
    [
        ("", 2, None, "--hosts and --rank require --group"),
        ("a b", None, None, "--group 'a b' is not a valid name of a group"),
        ("a", 2, 2, "--group requires a rank below the number of hosts; rank: 2, hosts: 2"),
        ("a", None, None, "--group requires a rank below the number of hosts; rank: not set, hosts: not set"),
    ],
)
def test_invalid_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, group: str, hosts: int | None, rank: int | None, message: str
) -> None:
    for name in (HOSTS_VARIABLE, *RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as raised:
        resolve_membership(group, hosts, rank, 1.0)
    assert raised.value.message == message


def test_slurm_and_kubernetes_give_hosts_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOSTS_VARIABLE, *RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert resolve_membership("a", 4, None, 1.0) == Membership("a", 4, 3, 1.0)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert resolve_membership("a", None, None, 1.0) == Membership("a", 2, 1, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "dataset: 1",
        "{}",
        '{"storage": null}',
        '{"storage": {"read_bytes_per_second": NaN, "write_bytes_per_second": 1}}',
        '{"storage": {"read_bytes_per_second": 1, "write_bytes_per_second": -1}}',
    ],
)
def test_invalid_requirement_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "size.json"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        benchmark_session.read_requirement(path)
    path.write_text(text)
    with pytest.raises(UsageError, match=r"size\.json is not the output of tuneline size --json"):
        benchmark_session.read_requirement(path)


def test_workload_without_a_measured_step_is_refused() -> None:
    phases.check_plan(BenchmarkPlan(TINY, 8))
    for workload, accelerators in ((replace(TINY, epochs=1), 16), (replace(TINY, read_threads=4, max_steps=9), 1)):
        with pytest.raises(UsageError, match=r"^tiny has .* per accelerator with .*; expected more than"):
            phases.check_plan(BenchmarkPlan(workload, accelerators))
        phases.check_plan(BenchmarkPlan(replace(workload, epochs=2, max_steps=10), accelerators))


def test_too_little_space_and_missing_folder_are_refused(storage: Path) -> None:
    plan = BenchmarkPlan(WORKLOADS["text"].resize(1e17), 1)
    with pytest.raises(
        UsageError, match=r"the benchmark writes 100000000\.. GB; expected at most 90% of the .* GB free in"
    ):
        phases.check_space(storage, plan)
    error = refusal(2, "storage", "benchmark", storage / "no", "--readers", "1", "--dry-run", cwd=storage)
    assert error["message"] == f"{storage / 'no'} is not an existing folder"
    assert list(storage.iterdir()) == []


def test_plan_lists_bytes_and_duration() -> None:
    plan = BenchmarkPlan(TINY, parameters=1_000_000, ranks=2, readers=2)
    assert plan.list_files() == {"checkpoint": 14_000_000, "small files": 2000 * 32 * 1024}
    assert plan.estimate_seconds() == pytest.approx(30, abs=1)


@pytest.mark.long
def test_interrupted_benchmark_exits_75_and_removes_its_files(storage: Path) -> None:
    command = [*COMMAND, "storage", "benchmark", str(storage), "--accelerators", "2", "--size", "64MB", "--json"]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    deadline = time.monotonic() + 300
    while not list(storage.glob("*/training/0")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert "Traceback" not in err
    assert list(storage.iterdir()) == []
