"""`tuneline storage`: check the guarantees of shared storage."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from components.common.runtime.errors import EXIT_FAILED, UsageError
from pipelines.cli.application import JsonOption, app, format_check, open_reporter, print_result

storage_app = typer.Typer(no_args_is_help=True, help="Check the guarantees of shared storage, and measure its speed.")
app.add_typer(storage_app, name="storage")
RANK_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX")  # of srun and of an indexed Job


@storage_app.callback()
def group() -> None:
    """Check the guarantees of shared storage, and measure its speed."""


@storage_app.command("probe")
def storage_probe(
    path: Annotated[
        Path,
        typer.Argument(help="Folder on the storage. The probe creates a subfolder and removes it at the end."),
    ],
    pair: Annotated[
        str,
        typer.Option(
            "--pair",
            help="Name of the pair of hosts, the same on both. Default: probe from two processes on this host.",
        ),
    ] = "",
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Rank of this host, 0 or 1. Default: SLURM_PROCID, or JOB_COMPLETION_INDEX."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Run a short probe (about one minute): 64 MiB files, 1 s per step, 15 s visibility timeout."
        ),
    ] = False,
    size: Annotated[
        str, typer.Option("--size", help="Size of the large file of each host, such as 4GiB. Default: 1GiB.")
    ] = "",
    visibility_timeout: Annotated[
        float | None,
        typer.Option(
            "--patience", min=1, help="Timeout in seconds for changes by the other host to become visible. Default: 90."
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=1, help="Timeout in seconds for the probe on the other host to start.")
    ] = 300.0,
    fio: Annotated[bool, typer.Option("--fio/--no-fio", help="Also measure with fio, if it is installed.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Probe a shared folder from two processes or hosts: visibility delays, rename, fsync, exclusive names, and throughput."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from components.common.runtime.process_control import build_module_command
    from pipelines.operations.storage_probe.participant import QUICK_PLAN, ProbePlan
    from pipelines.operations.storage_probe.probe_session import ProbeRequest, join, lead, probe_locally
    from pipelines.operations.storage_probe.probed_filesystem import Filesystem

    plan = replace(QUICK_PLAN if quick else ProbePlan(), fio=fio)
    if size:
        try:
            size_bytes = int(TypeAdapter(ByteSize).validate_python(size))
        except ValidationError:
            size_bytes = 0
        if size_bytes < 1 << 20:
            raise UsageError(
                f"--size {size!r} is not a size of at least 1 MiB", hint="Use a size such as 512MiB or 4GiB."
            )
        plan = replace(plan, size=size_bytes)
    if visibility_timeout:
        plan = replace(plan, visibility_timeout=visibility_timeout)
    if pair and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", pair):
        raise UsageError(
            f"--pair {pair!r} is not a valid name of a pair",
            hint="Use up to 64 letters, digits, dots, hyphens and underscores, the same on both hosts.",
        )
    own_rank = _resolve_rank(rank) if pair else 0
    request = ProbeRequest(path.absolute(), pair or secrets.token_hex(8), own_rank, plan, wait)
    with open_reporter("storage", as_json) as reporter:
        if pair:
            report = (join if own_rank else lead)(request, reporter, Filesystem())
        else:
            options = ["--pair", request.pair, "--rank", "1", "--wait", "60", "--json"]
            partner = build_module_command("pipelines.cli", "storage", "probe", str(request.path), *options)
            report = probe_locally(request, reporter, Filesystem(), partner)
    print_result(report, as_json, [format_check(result) for result in report["findings"]])
    return 0 if report["ok"] else EXIT_FAILED


def _resolve_rank(given: int | None) -> int:
    """Return the given rank, or the rank of the Slurm task or the pod."""
    numbers = (os.environ[name] for name in RANK_VARIABLES if os.environ.get(name, "").isdigit())
    rank = given if given is not None else next((int(number) for number in numbers), None)
    if rank not in (0, 1):
        raise UsageError(
            f"--pair requires rank 0 or 1; the rank of this host is {'not set' if rank is None else rank}",
            hint="Pass --rank 0 on one host and --rank 1 on the other; `srun -N2 -n2` and an Indexed Job set the rank.",
        )
    return int(rank or 0)
