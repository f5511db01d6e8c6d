"""The compared tools with their versions, flags and environments.

Each tool has a script, which the tool's own interpreter runs; the script of a peer imports neither tuneline nor another peer:

    python SCRIPT run CORPUS.jsonl FOLDER      the measured run; the working directory is FOLDER
    python SCRIPT removed CORPUS.jsonl FOLDER  not measured: prints the numbers of the removed documents as a JSON list
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


class PeerError(Exception):
    """A peer could not be installed or run; the message is the end of its output."""


@dataclass(frozen=True)
class Tool:
    """A tool with its settings. `package` is the name of the environment; pip installs `requires` into it."""

    name: str
    package: str
    script: str
    version: str
    bands: str
    flags: str
    requires: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)  # the oldest it runs on
    environment: dict[str, str] = field(default_factory=dict)


NEWER = ((3, 12), (3, 13), (3, 14))
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
DATATROVE = ("datatrove[io,processing]==0.10.1", "spacy==3.8.18", "numpy==2.4.6", "xxhash==3.8.2", "datasets==5.2.0")
TEXT_DEDUP = (
    "text-dedup==0.4.1",
    "datasets==5.2.0",
    "numpy==2.5.5",
    "polars==1.44.2",
    "polars-grouper==0.6.1",
    "regex==2026.11.15",
)

OURS = (
    Tool(
        "tuneline, near duplicates only",
        "tuneline",
        "run_tuneline.py",
        "this checkout",
        "32 × 4",
        "near_duplicate_threshold 0.7; every candidate compared exactly",
    ),
    Tool(
        "tuneline, the whole default curation",
        "tuneline",
        "run_tuneline_curate.py",
        "this checkout",
        "32 × 4",
        "`tuneline curate` without a configuration",
    ),
)
PEERS = (
    Tool(
        "datatrove",
        "datatrove",
        "run_datatrove.py",
        "0.10.1",
        "16 × 8",
        "MinhashConfig(n_grams=5, num_buckets=16, hashes_per_bucket=8), language en (spaCy's rules), LocalPipelineExecutor, one worker",
        DATATROVE,
        environment=OFFLINE,
    ),
    Tool(
        "text-dedup",
        "text-dedup",
        "run_text_dedup.py",
        "0.4.1",
        "14 × 9 (chosen by text-dedup for threshold 0.7 and 128 permutations)",
        "minhash: num_perm 128, threshold 0.7, ngram_size 5, num_proc 1",
        TEXT_DEDUP,
        (3, 12),
        OFFLINE,
    ),
    Tool(
        "text-dedup, with its check",
        "text-dedup",
        "run_text_dedup.py",
        "0.4.1",
        "14 × 9",
        "the same with check_false_positive true, as its README shows",
        TEXT_DEDUP,
        (3, 12),
        {**OFFLINE, "VERIFY": "1"},
    ),
    Tool(
        "rensa, R-MinHash",
        "rensa",
        "run_rensa.py",
        "0.5.0",
        "16 × 8",
        "RMinHashDeduplicator(threshold=0.7, num_perm=128, use_lsh=True, num_bands=16), 5-grams made in Python",
        ("rensa==0.5.0",),
        environment={"METHOD": "r_minhash"},
    ),
    Tool(
        "rensa, C-MinHash",
        "rensa",
        "run_rensa.py",
        "0.5.0",
        "its own",
        "CMinHashDeduplicator(threshold=0.7, num_perm=128), 5-grams made in Python",
        ("rensa==0.5.0",),
        environment={"METHOD": "c_minhash"},
    ),
)


def interpreter(tool: Tool, workdir: Path, python: str) -> list[str]:
    """Return the command that starts the tool's Python: this one for tuneline, that of a separate environment for a peer. Raises PeerError."""
    if tool.package == "tuneline":
        return [sys.executable, "-P", "-m", f"benchmarks.peers.{Path(tool.script).stem}"]
    folder = workdir / "environments" / tool.package
    if not (folder / ".ready").exists():
        _install(tool, folder, python)
    return [str(folder / "bin" / "python"), str(HERE / tool.script)]


def _install(tool: Tool, folder: Path, python: str) -> None:
    _said([_suitable(tool, python), "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _said([*pip, "install", "--quiet", *tool.requires])
    (folder / ".ready").write_text(_said([*pip, "freeze"]))


def _suitable(tool: Tool, python: str) -> str:
    """Return the given Python, or a newer one on the PATH if it is too old for the tool."""
    if _version(python) >= tool.python:
        return python
    for name in (f"python{major}.{minor}" for major, minor in NEWER):
        with suppress(PeerError):  # not there, or only a shim of a version manager
            if _version(name) >= tool.python:
                return name
    wanted = ".".join(map(str, tool.python))
    raise PeerError(f"{tool.package} {tool.version} needs Python {wanted} or newer: --python names one")


def _version(python: str) -> tuple[int, ...]:
    return tuple(map(int, _said([python, "-c", "import sys; print(*sys.version_info[:2])"]).split()))


def installed(tool: Tool, workdir: Path) -> list[str]:
    """Return the packages in a peer's environment with their versions."""
    ready = workdir / "environments" / tool.package / ".ready"
    return ready.read_text().split("\n") if ready.exists() else []


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise PeerError(" ".join((done.stderr or done.stdout).split())[-400:])
    return done.stdout
