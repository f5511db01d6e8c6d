"""Shared storage: what it promises, probed."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.errors import EXIT_FAILED, UsageError
from pipelines.cli.app import AsJson, app, finding_line, reporting, show

if TYPE_CHECKING:
    from pipelines.storage.probe import Asked

storage_app = typer.Typer(no_args_is_help=True, help="Shared storage: what it promises, probed.")
app.add_typer(storage_app, name="storage")
TWO_RANKS = "Give --rank 0 on one host and --rank 1 on the other; srun -N2 -n2 and an indexed Job of two say it themselves."
RANKS = ("SLURM_PROCID", "JOB_COMPLETION_INDEX")  # srun's, and an indexed Job's


@storage_app.callback()
def group() -> None:
    """Shared storage: what it promises, probed."""


@storage_app.command("probe")
def storage_probe(
    path: Annotated[Path, typer.Argument(help="A folder on the storage. The probe works in one of its own below it, and takes that away.")],
    pair: Annotated[
        str, typer.Option("--pair", help="Two hosts: a name for the pair, the same on both. Without it a second process is started here.")
    ] = "",
    rank: Annotated[
        int | None, typer.Option("--rank", help="0 on one host, 1 on the other. Default: SLURM_PROCID, or JOB_COMPLETION_INDEX.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: 64 MiB, a second a step, 15 s until a file counts as unseen.")
    ] = False,
    size: Annotated[str, typer.Option("--size", help="Of the large file that each side writes, such as 4GiB. Default: 1GiB.")] = "",
    patience: Annotated[
        float | None, typer.Option("--patience", min=1, help="Seconds after which what the other side made counts as unseen. Default: 90.")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=1, help="Seconds for the partner to come.")] = 300.0,
    fio: Annotated[bool, typer.Option("--fio/--no-fio", help="Measure with fio as well, where it is installed.")] = True,
    as_json: AsJson = False,
) -> int:
    """Probe a shared folder from two sides: what is seen when, whether rename, fsync and exclusive names hold, and how fast it is."""
    from pipelines.storage.filesystem import Filesystem
    from pipelines.storage.probe import join, lead, on_this_host

    asked = _asked(path, pair, rank, quick, size, patience, wait, fio)
    with reporting("storage", as_json) as reporter:
        if not pair:
            found = on_this_host(asked, reporter, Filesystem(), _second(asked))
        else:
            found = (join if asked.rank else lead)(asked, reporter, Filesystem())
    show(found, as_json, [finding_line(one) for one in found["findings"]])
    return 0 if found["ok"] else EXIT_FAILED


def _asked(path: Path, pair: str, rank: int | None, quick: bool, size: str, patience: float | None, wait: float, fio: bool) -> Asked:
    from pipelines.storage.probe import Asked
    from pipelines.storage.side import QUICK, Plan

    plan = replace(QUICK if quick else Plan(), fio=fio)
    if size:
        plan = replace(plan, size=_bytes(size))
    if patience:
        plan = replace(plan, patience=patience)
    if pair and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", pair):
        raise UsageError(
            f"--pair {pair!r} is no name for a pair",
            hint="Up to 64 letters, digits, dots, hyphens and underscores, the same on both hosts.",
        )
    return Asked(path.absolute(), pair or secrets.token_hex(8), _rank(rank) if pair else 0, plan, wait)


def _rank(given: int | None) -> int:
    """This side's number: given, or that of the task or pod."""
    told = next((os.environ[name] for name in RANKS if os.environ.get(name, "").isdigit()), "")
    found = given if given is not None else int(told) if told else None
    if found not in (0, 1):
        said = "is not given" if found is None else f"is {found}"
        raise UsageError(f"--pair asks for two sides, and the rank of this one {said}", hint=TWO_RANKS)
    return int(found or 0)


def _bytes(size: str) -> int:
    """A size with its unit."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        found = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        found = 0
    if found < 1 << 20:
        raise UsageError(f"--size {size!r} is no size of a MiB or more", hint="For example 512MiB or 4GiB.")
    return found


def _second(asked: Asked) -> list[str]:
    """The command of the second process on this host."""
    from components.common.process import module_command

    options = ["--pair", asked.pair, "--rank", "1", "--wait", "60", "--json"]
    return module_command("pipelines.cli", "storage", "probe", str(asked.path), *options)
