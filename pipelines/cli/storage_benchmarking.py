"""`tuneline storage benchmark`: how many accelerators, ranks and readers a storage system can feed."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.errors import EXIT_FAILED, UsageError
from pipelines.cli.application import JsonOption, open_reporter, print_result
from pipelines.cli.storage_probing import RANK_VARIABLES, storage_app

if TYPE_CHECKING:
    from pipelines.operations.storage_benchmark.benchmark_session import Membership

TRAINING, TEAMS, HOSTS, VERDICT = "Training", "Other teams", "Several hosts", "Verdict"
HOSTS_VARIABLE = "SLURM_STEP_NUM_TASKS"  # of srun

FolderArgument = Annotated[
    Path,
    typer.Argument(help="Folder on the storage. The benchmark creates a subfolder and removes it at the end."),
]
AcceleratorsOption = Annotated[
    int,
    typer.Option(
        "--accelerators",
        min=0,
        max=4096,
        help="Number of accelerators to emulate. If they miss the target utilization, search for the largest "
        "number that reaches the target. 0: skip this phase.",
        rich_help_panel=TRAINING,
    ),
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        help="Workload: text, images, or a YAML file with DLIO's keys.",
        rich_help_panel=TRAINING,
    ),
]
SizeOption = Annotated[
    str,
    typer.Option(
        "--size",
        help="Size of the dataset, such as 100GB. Default: the size in the workload.",
        rich_help_panel=TRAINING,
    ),
]
FioOption = Annotated[
    bool,
    typer.Option(
        "--fio",
        help="Also measure the utilization with fio, for comparison. Requires --accelerators.",
        rich_help_panel=TRAINING,
    ),
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="MODEL",
        help="Write, read and load the checkpoint of a model: name, config.json, or parameter count such as 8b.",
        rich_help_panel=TEAMS,
    ),
]
RanksOption = Annotated[
    int,
    typer.Option("--ranks", min=1, max=4096, help="Number of ranks that write a checkpoint.", rich_help_panel=TEAMS),
]
ReadersOption = Annotated[
    int,
    typer.Option(
        "--readers",
        min=0,
        max=4096,
        help="Number of readers of small files, as in curation. 0: skip this phase.",
        rich_help_panel=TEAMS,
    ),
]
SmallFilesOption = Annotated[
    int,
    typer.Option("--small-files", min=1, help="Number of 32 KiB files that the readers read.", rich_help_panel=TEAMS),
]
MixOption = Annotated[
    bool,
    typer.Option(
        "--mix",
        help="Also measure all phases at the same time. Requires --accelerators, --checkpoint and --readers.",
        rich_help_panel=TEAMS,
    ),
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=0.1, max=86_400, help="Duration of each timed measurement in seconds.")
]
BufferedOption = Annotated[
    bool, typer.Option("--buffered", help="Read through the page cache. Default: direct I/O, if it is supported.")
]
RequirementOption = Annotated[
    Path | None,
    typer.Option(
        "--requirement",
        readable=False,
        help="Output of `tuneline size --json`, without --demand, with the required rates.",
        rich_help_panel=VERDICT,
    ),
]
RequiredReadRateOption = Annotated[
    float | None,
    typer.Option("--read-gb-s", min=0, max=1e6, help="Required read rate in GB/s.", rich_help_panel=VERDICT),
]
RequiredWriteRateOption = Annotated[
    float | None,
    typer.Option("--write-gb-s", min=0, max=1e6, help="Required write rate in GB/s.", rich_help_panel=VERDICT),
]
GroupOption = Annotated[
    str,
    typer.Option(
        "--group",
        help="Name of the group of hosts, the same on all hosts. Default: this host only.",
        rich_help_panel=HOSTS,
    ),
]
HostsOption = Annotated[
    int | None,
    typer.Option("--hosts", min=1, help="Number of hosts. Default: SLURM_STEP_NUM_TASKS.", rich_help_panel=HOSTS),
]
RankOption = Annotated[
    int | None,
    typer.Option(
        "--rank",
        min=0,
        help="Rank of this host. Default: SLURM_PROCID, or JOB_COMPLETION_INDEX.",
        rich_help_panel=HOSTS,
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait", min=1, max=86_400, help="Timeout in seconds for the other hosts to start.", rich_help_panel=HOSTS
    ),
]
ReportFolderOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder for report.html and benchmark.json. Default: no files."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the files to write and the estimated duration; measure nothing.")
]


@storage_app.command("benchmark")
def storage_benchmark(
    path: FolderArgument,
    accelerators: AcceleratorsOption = 0,
    workload: WorkloadOption = "text",
    size: SizeOption = "",
    fio: FioOption = False,
    checkpoint: CheckpointOption = "",
    ranks: RanksOption = 8,
    readers: ReadersOption = 0,
    small_files: SmallFilesOption = 2000,
    mix: MixOption = False,
    seconds: SecondsOption = 30.0,
    buffered: BufferedOption = False,
    requirement: RequirementOption = None,
    read_rate: RequiredReadRateOption = None,
    write_rate: RequiredWriteRateOption = None,
    group: GroupOption = "",
    hosts: HostsOption = None,
    rank: RankOption = None,
    wait: WaitOption = 300.0,
    output: ReportFolderOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Emulate the load of AI teams on a storage system, and report its rates and the number of accelerators that it can feed."""
    from components.common.artifacts.artifact_folder import write_atomically
    from components.common.artifacts.output_paths import check_folder
    from pipelines.operations.storage_benchmark import benchmark_session, fio_check, phases, result_report, workloads
    from pipelines.operations.storage_benchmark.host_group import check_path
    from pipelines.planning.sizing_input import parse_bytes

    _check_phases(accelerators, checkpoint, readers, mix=mix)
    chosen = workloads.find_workload(workload)
    if dataset_bytes := parse_bytes("--size", size):
        chosen = chosen.resize(dataset_bytes)
    plan = phases.BenchmarkPlan(
        chosen,
        accelerators,
        count_parameters(checkpoint),
        ranks,
        readers,
        small_files,
        seconds=seconds,
        mix=mix,
        buffered=buffered,
        fio=fio,
    )
    phases.check_plan(plan)
    if fio:
        fio_check.check_workload(plan)
    required = benchmark_session.read_requirement(requirement) if requirement else {}
    required |= {name: rate * 1e9 for name, rate in (("read", read_rate), ("write", write_rate)) if rate is not None}
    check_path(path)
    if dry_run:
        phases.check_space(path, plan)
        planned = {"path": str(path), "files": plan.list_files(), "seconds": round(plan.estimate_seconds(), 1)}
        print_result(planned, as_json, lambda: result_report.format_plan(plan, path))
        return 0
    membership = resolve_membership(group, hosts, rank, wait)
    if output:
        check_folder(output, must_exist=False)
    with open_reporter("storage", as_json) as reporter:
        result = benchmark_session.run_benchmark(path.absolute(), plan, required, membership, reporter)
    if output and membership.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / result_report.REPORT_FILENAME, result_report.render_report(result))
        write_atomically(output / result_report.RESULT_FILENAME, f"{json.dumps(result, indent=1)}\n")
    print_result(result, as_json, lambda: result_report.format_benchmark(result))
    return 0 if result["ok"] else EXIT_FAILED


def _check_phases(accelerators: int, checkpoint: str, readers: int, *, mix: bool) -> None:
    """Check that the options select a measurement, and with --mix, all of them."""
    if not (accelerators or checkpoint or readers):
        raise UsageError("no measurement is selected", hint="Add --accelerators, --checkpoint or --readers.")
    if mix and not (accelerators and checkpoint and readers):
        raise UsageError(
            "--mix requires --accelerators, --checkpoint and --readers",
            hint="Add --accelerators, --checkpoint and --readers.",
        )


def count_parameters(checkpoint: str) -> int:
    """Return the number of parameters of the --checkpoint model; 0 without this option."""
    from pipelines.planning.architectures import find_architecture

    try:
        return find_architecture(checkpoint).parameters if checkpoint else 0
    except UsageError as error:  # it names the option of `tuneline size`
        raise UsageError(error.message.replace("--model", "--checkpoint", 1), hint=error.hint) from None


def resolve_membership(group: str, hosts: int | None, rank: int | None, wait_seconds: float) -> Membership:
    """Return the group of hosts from the options, the Slurm step or the Indexed Job.

    Raises:
        UsageError: the name of the group is invalid, or the number or the rank of the hosts is not known.
    """
    from pipelines.operations.storage_benchmark.benchmark_session import Membership

    if not group:
        if hosts not in (None, 1) or rank:
            raise UsageError("--hosts and --rank require --group", hint="Use the same --group NAME on all hosts.")
        return Membership(secrets.token_hex(8))
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", group):
        raise UsageError(
            f"--group {group!r} is not a valid name of a group",
            hint="Use up to 64 letters, digits, dots, hyphens and underscores, the same on all hosts.",
        )
    values = [os.environ.get(name, "") for name in (HOSTS_VARIABLE, *RANK_VARIABLES)]
    found_hosts, *found_ranks = (int(value) if value.isdigit() else None for value in values)
    hosts = hosts or found_hosts
    rank = rank if rank is not None else next((found for found in found_ranks if found is not None), None)
    if hosts is None or rank is None or rank >= hosts:
        raise UsageError(
            f"--group requires a rank below the number of hosts; rank: {_format(rank)}, hosts: {_format(hosts)}",
            hint="Pass --hosts, and --rank from 0 upwards. srun sets both; an Indexed Job sets the rank.",
        )
    return Membership(group, hosts, rank, wait_seconds)


def _format(number: int | None) -> str:
    return "not set" if number is None else str(number)
