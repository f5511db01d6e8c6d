"""The storage benchmark on a local folder: its measurements, several hosts, refusals and cleanup.

No test decides by a duration: the target utilization of the workload is so low that it is always reached.
long: one test stops a running benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.reporters import SilentReporter
from pipelines.operations.storage_benchmark import benchmark_session, phases
from pipelines.operations.storage_benchmark.benchmark_session import Membership
from pipelines.operations.storage_benchmark.host_group import HostGroup
from pipelines.operations.storage_benchmark.phases import Benchmark, BenchmarkPlan
from pipelines.operations.storage_benchmark.rank_processes import run_ranks
from pipelines.operations.storage_benchmark.workloads import WORKLOADS, Workload
from pipelines.operations.storage_probe.rendezvous import PartnerError
from tests.pipelines.command import COMMAND, answer_in_process, environment, refusal, run_in_process

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


def test_all_teams_are_measured_and_nothing_is_left(storage: Path) -> None:
    teams = ("--checkpoint", "1m", "--ranks", "2", "--readers", "2", "--small-files", "20", "--mix", "--seconds", "0.1")
    command = ("storage", "benchmark", "storage", "--accelerators", "2", "--workload", "workload.yaml", *teams)
    limits = ("--read-gb-s", "1e-6", "--write-gb-s", "1e-6")
    result = answer_in_process(*command, *limits, "-o", "report", cwd=storage.parent)
    (run,) = result["training"]["runs"]
    assert result["ok"]
    assert (run["accelerators"], run["steps"]) == (2, 5), "the first step is excluded"
    assert result["workload"]["dataset_bytes"] == 2 * 16 * 12_288
    assert result["checkpoint_write"]["bytes"] == result["checkpoint_read"]["bytes"] == 14_000_000
    assert result["model_loading"]["bytes"] == 2 * 2_000_000, "every rank loads the whole model"
    assert not result["checkpoint_read"]["other_host"]
    assert (result["small_files"]["files"], result["small_files"]["readers"]) == (20, 2)
    assert result["mix"]["accelerators"] == 2
    assert [item["ok"] for item in result["verdict"]] == [True, True]
    assert list(storage.iterdir()) == []
    report = (storage.parent / "report" / "report.html").read_text()
    assert "<svg" in report
    assert "2 or more" in report
    assert json.loads((storage.parent / "report" / "benchmark.json").read_text()) == result


def test_small_dataset_read_through_the_page_cache_is_labelled(storage: Path) -> None:
    command = ("storage", "benchmark", storage, "--accelerators", "1", "--workload", "workload.yaml", "--buffered")
    process = run_in_process(*command, "--seconds", "0.1", cwd=storage.parent)
    assert process.returncode == 0, process.stderr
    assert "cached (training): the files are smaller than 5 times the memory" in process.stdout
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
    plan = BenchmarkPlan(TINY, 3, parameters=1_000_000, ranks=2, seconds=0.1)
    first, second = run_hosts(storage, [plan, plan])
    assert isinstance(first, dict), first
    assert first == second
    assert [host["rank"] for host in first["hosts"]] == [0, 1]
    assert first["training"]["runs"][0]["accelerators"] == 3
    assert first["checkpoint_read"]["other_host"]
    assert not any(note.startswith("one host") for note in first["notes"])
    assert list(storage.iterdir()) == []


def test_hosts_with_different_options_are_refused(storage: Path) -> None:
    plans = [BenchmarkPlan(TINY, count, seconds=0.1) for count in (1, 2)]
    outcomes = run_hosts(storage, plans)
    assert all(isinstance(outcome, UsageError) for outcome in outcomes), outcomes
    assert "have different options" in str(outcomes[0])
    assert list(storage.iterdir()) == []


def test_failure_of_a_host_ends_the_others_with_its_message(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(benchmark: Benchmark) -> None:
        if benchmark.group.rank == 1:
            raise TunelineError("no space")
        benchmark.group.gather("prepared")

    monkeypatch.setattr(phases, "prepare", prepare)
    first, second = run_hosts(storage, [BenchmarkPlan(TINY, 1)] * 2)
    assert str(first) == "host 1 failed: no space"
    assert str(second) == "no space"
    assert list(storage.iterdir()) == []


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
        ([], "there is nothing to measure"),
        (["--accelerators", "1", "--mix"], "--mix requires all teams"),
        (["--accelerators", "1", "--workload", "video"], "--workload 'video' is not a workload or a file"),
        (["--accelerators", "1", "--hosts", "2"], "--hosts and --rank require --group"),
        (["--accelerators", "1", "--group", "a b"], "--group 'a b' is not a valid name of a group"),
        (
            ["--accelerators", "1", "--group", "a", "--rank", "2", "--hosts", "2"],
            "--group requires a rank below the number of hosts; rank: 2, hosts: 2",
        ),
        (["--accelerators", "16", "--workload", "workload.yaml"], "workload has one step per accelerator"),
        (["--readers", "1", "--fio"], "--fio requires --accelerators"),
        (["--readers", "1", "--requirement", "workload.yaml"], "--requirement workload.yaml is not the output of"),
        (["--readers", "1", "--requirement", "missing"], "--requirement missing cannot be read"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(storage: Path, arguments: list[str], message: str) -> None:
    (storage.parent / "workload.yaml").write_text(WORKLOAD.replace("epochs: 3", "epochs: 1"))
    error = refusal(2, "storage", "benchmark", storage, *arguments, cwd=storage.parent)
    assert error["message"].startswith(message)
    assert list(storage.iterdir()) == []


def test_too_little_space_and_missing_folder_are_refused(storage: Path) -> None:
    command = ("storage", "benchmark", storage, "--accelerators", "1", "--size", "100000TB")
    error = refusal(2, *command, cwd=storage)
    assert error["message"].startswith("the benchmark writes 100000000.")
    assert refusal(2, *command, "--dry-run", cwd=storage)["message"] == error["message"]
    error = refusal(2, "storage", "benchmark", storage / "no", "--readers", "1", cwd=storage)
    assert error["message"] == f"{storage / 'no'} is not an existing folder"
    assert list(storage.iterdir()) == []


def test_dry_run_lists_the_bytes_and_writes_nothing(storage: Path) -> None:
    command = ("storage", "benchmark", storage, "--checkpoint", "1m", "--ranks", "2", "--readers", "2", "--dry-run")
    planned = answer_in_process(*command, cwd=storage)
    assert planned["files"] == {"checkpoint": 14_000_000, "small files": 2000 * 32 * 1024}
    assert planned["seconds"] == pytest.approx(30, abs=1)
    assert list(storage.iterdir()) == []


@pytest.mark.long
def test_interrupted_benchmark_exits_75_and_removes_its_files(storage: Path) -> None:
    command = [*COMMAND, "storage", "benchmark", str(storage), "--accelerators", "2", "--size", "64MB", "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(storage.glob("*/training/0")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert list(storage.iterdir()) == []
