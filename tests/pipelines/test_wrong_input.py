"""Wrong input, through the real command line: what a person reads, what a script gets, and that nothing half-written is left.

SAID holds every message and hint in full. A part in braces is what differs from case to case; a test that knows it says so.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tests.mlflow_server
from components.common import artifacts
from tests.mlflow_server import free_port, mlflow_server
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal
from tests.pipelines.project import write_rows
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]


@dataclass(frozen=True)
class Said:
    """An error as a person reads it, its kind for scripts, and the exit code."""

    message: str
    hint: str
    kind: str = "configuration"
    code: int = 2


KEYS = "docs/configuration.md lists every key; `tuneline init` writes a commented file."
SUFFIXES = "Known are .csv, .htm, .html, .json, .jsonl, .md, .ndjson, .parquet, .text, .tsv, .txt, .warc, .wet, also with .gz or .zst"
COPY = "Name a file that holds its rows itself: a copy, or the file that is meant."
NO_ROW = "no row is left to keep: {places}"
FREE = "Free some space there. Run the same command again: it goes on from where it stopped."
SAID = {
    # the configuration
    "unknown key": Said("{where}: fine_tuning.learning_rat: there is no such key (did you mean learning_rate?)", KEYS),
    "unknown section": Said("{where}: tuning: there is no such key (did you mean fine_tuning?)", KEYS),
    "wrong type": Said("{where}: fine_tuning.max_steps: found 'many'; a whole number is wanted", KEYS),
    "out of range": Said("{where}: fine_tuning.batch_size: found 0; 1 or more is wanted", KEYS),
    "wrong shape": Said("{where}: data_curation.sources: found 'raw.jsonl'; a list is wanted, for example [one, two]", KEYS),
    "unknown choice": Said(
        "{where}: fine_tuning.adaptation: found 'magic'; Input should be 'lora', 'full', 'qlora', 'p_tuning' or 'prompt_tuning'", KEYS
    ),
    "set without =": Said(
        "--set fine_tuning.max_steps is not of the form section.key=value", "For example --set fine_tuning.max_steps=100.", "usage"
    ),
    "set that is no YAML": Said(
        "--set data_curation.sources=[a: the value is not YAML: line 1, column 3: expected ',' or ']', but got '<stream end>'",
        "Close every bracket and quote; a text with special characters goes into quotes of its own: --set 'section.key=\"a: b\"'.",
        "usage",
    ),
    "no configuration file": Said("{file} does not exist", "Check the path; `tuneline init` writes a commented customization.yaml."),
    "a folder as configuration": Said("{file} is a folder, not a file", "Name the file in it, for example {file}/customization.yaml."),
    "a pipe as configuration": Said("{file} is a pipe or a device, not a file", "Write the configuration to a file and name that."),
    "a tab in the YAML": Said("{file} is not YAML: line 2, column 1: a tab stands here", "Indent with spaces: YAML allows no tabs."),
    "a key twice": Said(
        "{file} is not YAML: line 3, column 3: max_steps stands here a second time", "Mend that line; `tuneline init` writes an example."
    ),
    "a list as configuration": Said("{file} holds a list, not sections", "`tuneline init` writes an example."),
    "configuration in Latin-1": Said(
        "{file} is not UTF-8: byte 0xe9 in line 2", "Save it as UTF-8; `iconv` converts from another encoding."
    ),
    "configuration not readable": Said("{file} cannot be read: Permission denied", "Let this user read it; `ls -l {file}` shows who may."),
    # the sources, before anything is read
    "missing file": Said("data_curation.sources: '{source}' does not exist", "Did you mean raw.jsonl? It lies in {folder}."),
    "missing file, nothing like it": Said(
        "data_curation.sources: '{source}' does not exist", "{folder} holds no file of that name: check the spelling."
    ),
    "missing folder": Said("data_curation.sources: '{source}' does not exist", "There is no folder {folder} either: check the whole path."),
    "glob without a match": Said("data_curation.sources: '{source}' matches no file of a known kind", SUFFIXES + ". Looked in {folder}."),
    "empty folder": Said(
        "data_curation.sources: '{source}' is a folder that holds no file of a known kind", SUFFIXES + ". Looked in {folder}."
    ),
    "unknown kind of file": Said(
        "data_curation.sources: '{source}' has the suffix '.xlsx', which no reader knows", SUFFIXES + "; convert or rename it."
    ),
    "dangling link": Said("data_curation.sources: '{source}' is a link to gone.jsonl, which does not exist", COPY),
    "dangling link in a folder": Said(
        "data_curation.sources: '{source}' names {path}, which is a link to gone.jsonl, which does not exist", COPY
    ),
    "named pipe": Said("data_curation.sources: '{source}' is a named pipe, not a file", COPY),
    "device": Said("data_curation.sources: '{source}' is a device, not a file", COPY),
    "unreadable file": Said(
        "data_curation.sources: '{source}' cannot be read: Permission denied", "Let this user read it; `ls -l {path}` shows who may."
    ),
    "unreadable folder": Said(
        "data_curation.sources: '{source}' holds {path}, which cannot be read: Permission denied", "Let this user read it, or move it away."
    ),
    # the sources, once they are read
    "empty file": Said(
        "{file} is empty", "Name files with rows in data_curation.sources; docs/data.md shows the formats that are read.", "input", 1
    ),
    "blank file": Said(
        "{file} holds no row", "Name files with rows in data_curation.sources; docs/data.md shows the formats that are read.", "input", 1
    ),
    "Latin-1": Said(
        "no row is left to keep: 156 places are unreadable, the first {file}:1: not UTF-8: byte 0xe9 at position {n}",
        "Convert it from the encoding it has, for example: iconv -f LATIN1 -t UTF-8 {file} > utf8-{file}, then name the new file.",
        "input",
        1,
    ),
    "UTF-16": Said(
        "no row is left to keep: 1 place is unreadable: {file}:1: the file is UTF-16{end} text, not UTF-8; nothing of it is read",
        "Convert it: iconv -f UTF-16{end} -t UTF-8 {file} > utf8-{file}, then name the new file.",
        "input",
        1,
    ),
    "binary file": Said(
        "no row is left to keep: 1 place is unreadable: {file}:1: the file is binary data, not text; nothing of it is read",
        "Check data_curation.sources and data_curation.format; docs/data.md shows the formats that are read.",
        "input",
        1,
    ),
    "compressed file without the suffix": Said(
        "no row is left to keep: 1 place is unreadable: {file}:1: the file is compressed with gzip, which its name does not say; "
        "nothing of it is read",
        "Rename it: .gz or .zst at its end for a compressed file, .parquet for Parquet.",
        "input",
        1,
    ),
    "truncated gzip": Said(
        "no row is left to keep: 1 place is unreadable: {file}:1: the compressed file breaks off here: its end is missing",
        "Copy or download {file} again, and compare its size or checksum with the original's.",
        "input",
        1,
    ),
    "unknown shape": Said(
        "no row is left to keep: 5 places are unreadable, the first {file}:1: unknown shape: keys foo",
        "Check data_curation.sources and data_curation.format; docs/data.md shows the formats that are read.",
        "input",
        1,
    ),
    "too few rows": Said(
        "too few rows for the split: 2 rows in 2 groups of similar ones leave test empty",
        "With data_curation.fractions.test at 0.3 about 13 different rows are needed: add rows, or raise it.",
        "input",
        1,
    ),
    # the model
    "unknown model": Said(
        "fine_tuning.base_model: {path} is not a folder",
        "Use embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, store:<sha256>, or hf://org/name@revision.",
    ),
    "unknown embedded model": Said(
        "fine_tuning.base_model: there is no embedded model embedded:gpt",
        "Use embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, store:<sha256>, or hf://org/name@revision.",
    ),
    "loss that is lost": Said(
        "the {which} loss is nan at step {step}, learning rate {rate}; rows of this step: {rows}",
        "Lower fine_tuning.learning_rate or raise warmup_steps; look at these rows too. With other settings training begins anew.",
        "training",
        1,
    ),
    # the machine
    "full disk": Said("no space left in {folder}: {free} MB are free, and more is needed", FREE, "disk_full", 1),
    "read-only folder": Said(
        "{folder} cannot be written: the file system is read-only",
        "Let this user write there, or name another folder; then run the same command again.",
        "not_writable",
        1,
    ),
    "folder of another user": Said(
        "{folder} cannot be written: permission denied",
        "Let this user write there, or name another folder; then run the same command again.",
        "not_writable",
        1,
    ),
    "port in use": Said(
        "the HTTP port {port} on 127.0.0.1 is already in use",
        "Stop what listens there, or choose another with --http-port (--http-port 0 takes any free one).",
        "port_in_use",
    ),
    "no Triton wheel": Said(
        "the package nvidia-pytriton, which carries the Triton server, is not installed",
        "make installs it; by hand: pip install --no-deps nvidia-pytriton==0.7.0",
        "engine_missing",
        1,
    ),
    "no serving environment": Said(
        "there is no serving environment in {folder}",
        "Create it with: python -m components.triton_packaging.serving_env",
        "engine_missing",
        1,
    ),
    "old glibc": Said(
        "the embedded Triton needs glibc 2.35 or newer; this machine has glibc 2.31",
        "Package on a machine with x86-64 Linux, glibc 2.35 and Python 3.11 or 3.12. `tuneline doctor` says what is missing.",
        "engine_missing",
        1,
    ),
    "unproven package": Said(
        "version {n} of {name} cannot be promoted: its Triton package is unproven",
        "Promote a version that was accepted and proven, or use --force with --reason, which is recorded.",
        "registry",
        1,
    ),
    "MLflow unreachable": Said(
        "the MLflow server {address} does not answer: Connection refused",
        "Start it, or correct MLFLOW_TRACKING_URI or --tracking-uri.",
        "engine_missing",
        1,
    ),
    "MLflow lost": Said(
        "the MLflow server {address} stopped answering",
        "Start it again. Run the same command again: it goes on from where it stopped.",
        "engine_missing",
        1,
    ),
    "no tracking server": Said(
        "{address} is no MLflow tracking server",
        "Use an address that begins with http, https, sqlite, for example http://host:5000.",
        "usage",
    ),
    "two runs at once": Said(
        "another run (process {pid}) works in {folder}",
        "Wait for it, end it with `tuneline cancel latest`, or use another --workdir.",
        "usage",
    ),
}


def matches(template: str, text: str, values: dict[str, object]) -> bool:
    """Whether a text is the template with these values, and anything for those not given."""
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(
        re.escape(part) if i % 2 == 0 else re.escape(str(values[part])) if part in values else ".+" for i, part in enumerate(parts)
    )
    return re.fullmatch(pattern, text) is not None


def check_object(case: str, error: dict[str, str], stage: str = "", **values: object) -> None:
    """The object of --json says what it should."""
    said = SAID[case]
    assert matches(said.message, error["message"], values), error["message"]
    assert matches(said.hint, error["hint"], values), error["hint"]
    assert (error["kind"], error["stage"]) == (said.kind, stage)


def check_screen(case: str, done: subprocess.CompletedProcess[str], stage: str = "", **values: object) -> None:
    """A person reads the message and the hint as the last two lines on the screen, without a traceback."""
    said = SAID[case]
    assert done.returncode == said.code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    *_, message, hint = done.stderr.rstrip().splitlines()
    where = f"tuneline: {stage}: " if stage else "tuneline: "
    assert message.startswith(where), message
    assert matches(said.message, message.removeprefix(where), values), message
    assert hint.startswith("  "), hint
    assert matches(said.hint, hint[2:], values), hint


def start(*arguments: object, cwd: Path, enter: list[str] | None = None, as_root: bool = True, **extra: str) -> subprocess.Popen[str]:
    """Start a command; `as_root=False` takes root's right to read and write what it may not."""
    return subprocess.Popen(
        [*(enter or []), *COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if as_root else give_up_rights,
    )


def give_up_rights() -> None:
    """Without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH root is refused what the mode bits refuse; for other users this changes nothing."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def ended(child: subprocess.Popen[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    try:
        out, err = child.communicate(timeout=timeout)
    finally:
        child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def check_both(case: str, *arguments: object, cwd: Path, as_root: bool = True, **values: object) -> None:
    """The same mistake twice at once: as a person makes it, and as a script does."""
    screen = start(*arguments, cwd=cwd, as_root=as_root)
    script = start(*arguments, "--json", cwd=cwd, as_root=as_root)
    try:
        check_screen(case, ended(screen), **values)
    finally:
        done = ended(script)
    assert done.returncode == SAID[case].code
    assert done.stderr == ""
    check_object(case, json.loads(done.stdout)["error"], **values)


CONFIGURATION = """
data_curation:
  {sources: [raw.jsonl], near_duplicate_threshold: 0.95, answer_min_words: 1000, fractions: {train: 0.6, validation: 0.1, test: 0.3}}
fine_tuning:
  {base_model: tiny, max_steps: 6, batch_size: 4, checkpoint_every: 2, learning_rate: 5.0e-3, max_length: 128, validation_rows: 4}
evaluation: {generations: 0, bootstrap_samples: 1000}
triton_packaging: {golden_max_tokens: 4}
model_registry: {name: tiny-helper}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: good rows, a tiny model, a configuration."""
    place = tmp_path_factory.mktemp("wrong")
    write_rows(place / "raw.jsonl")
    tiny_model(place / "tiny")
    (place / "c.yaml").write_text(CONFIGURATION)
    return place


# --- the configuration


@pytest.mark.parametrize(
    ("case", "override"),
    [
        ("unknown key", "fine_tuning.learning_rat=1"),
        ("unknown section", "tuning={}"),
        ("wrong type", "fine_tuning.max_steps=many"),
        ("out of range", "fine_tuning.batch_size=0"),
        ("wrong shape", "data_curation.sources=raw.jsonl"),
        ("unknown choice", "fine_tuning.adaptation=magic"),
        ("set without =", "fine_tuning.max_steps"),
        ("set that is no YAML", "data_curation.sources=[a"),
    ],
)
def test_a_wrong_override_is_told_before_any_work(tmp_path: Path, case: str, override: str) -> None:
    check_both(case, "run", "--set", override, cwd=tmp_path, where="the configuration")
    assert not list(tmp_path.iterdir())


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("case", "make"),
    [
        ("unknown key", lambda path: path.write_text("fine_tuning: {learning_rat: 1}\n")),
        ("no configuration file", lambda path: None),
        ("a folder as configuration", Path.mkdir),
        ("a pipe as configuration", _pipe),
        ("a tab in the YAML", lambda path: path.write_text("fine_tuning:\n\tmax_steps: 3\n")),
        ("a key twice", lambda path: path.write_text("fine_tuning:\n  max_steps: 3\n  max_steps: 4\n")),
        ("a list as configuration", lambda path: path.write_text("- seed: 3\n")),
        ("configuration in Latin-1", lambda path: path.write_bytes("seed: 3\nmodel_registry: {name: é}\n".encode("latin-1"))),
    ],
)
def test_a_wrong_configuration_file_is_told_by_name_before_any_work(tmp_path: Path, case: str, make: Callable[[Path], object]) -> None:
    make(tmp_path / "mine.yaml")
    check_both(case, "run", "-c", "mine.yaml", cwd=tmp_path, file="mine.yaml", where="mine.yaml")
    assert not (tmp_path / ".tuneline").exists()


def test_a_configuration_that_this_user_may_not_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    (tmp_path / "mine.yaml").chmod(0)
    check_both("configuration not readable", "run", "-c", "mine.yaml", cwd=tmp_path, as_root=False, file="mine.yaml")


# --- the sources


def _folder_with(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        path.mkdir()
        make(path / name)

    return made


def _dangling(path: Path) -> None:
    path.symlink_to("gone.jsonl")


@pytest.mark.parametrize(
    ("case", "source", "make"),
    [
        ("missing file", "rwa.jsonl", lambda path: (path.parent / "raw.jsonl").touch()),
        ("missing file, nothing like it", "tickets.csv", lambda path: (path.parent / "raw.jsonl").touch()),
        ("glob without a match", "*.jsonl", lambda path: None),
        ("empty folder", "empty", Path.mkdir),
        ("empty folder", "pictures", _folder_with("a.png", Path.touch)),
        ("unknown kind of file", "rows.xlsx", Path.touch),
        ("dangling link", "link.jsonl", _dangling),
        ("named pipe", "pipe.jsonl", _pipe),
        ("device", "/dev/zero", lambda path: None),
    ],
)
def test_a_source_that_names_nothing_readable_is_told_by_name(
    tmp_path: Path, case: str, source: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path / source)
    looked_in = tmp_path / source if case == "empty folder" else tmp_path
    check_both(case, "curate", source, "-o", "out", cwd=tmp_path, source=source, folder=looked_in)
    assert not (tmp_path / "out").exists()


def test_a_source_in_a_folder_that_is_not_there_is_told_with_the_folder(tmp_path: Path) -> None:
    check_both("missing folder", "curate", "no/rows.jsonl", "-o", "out", cwd=tmp_path, source="no/rows.jsonl", folder=tmp_path / "no")


def test_of_a_folder_no_file_is_passed_over_because_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    write_rows(tmp_path / "rows" / "raw.jsonl")
    _dangling(tmp_path / "rows" / "deep" / "link.jsonl")
    link = tmp_path / "rows" / "deep" / "link.jsonl"
    check_both("dangling link in a folder", "curate", "rows", "-o", "out", cwd=tmp_path, source="rows", path=link)
    (tmp_path / "rows" / "deep").chmod(0)
    try:
        values: dict[str, object] = {"source": "rows", "path": tmp_path / "rows" / "deep"}
        check_both("unreadable folder", "curate", "rows", "-o", "out", cwd=tmp_path, as_root=False, **values)
    finally:
        (tmp_path / "rows" / "deep").chmod(0o700)


def test_a_source_that_this_user_may_not_read_is_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw.jsonl")
    (tmp_path / "raw.jsonl").chmod(0)
    values: dict[str, object] = {"source": "raw.jsonl", "path": tmp_path / "raw.jsonl"}
    check_both("unreadable file", "curate", "raw.jsonl", "-o", "out", cwd=tmp_path, as_root=False, **values)
    assert not (tmp_path / "out").exists()


def _accented() -> str:
    rows = [{"instruction": f"What is thing {i}?", "input": "", "output": f"Thing {i} is a café."} for i in range(156)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


PLAIN = "".join(json.dumps({"prompt": f"What is thing {i}?", "completion": f"It is number {i}."}) + "\n" for i in range(156))
# Bytes that look like nothing: a fixed sequence, so that the test is the same every time.
BINARY = b"".join((i * 2654435761 % 2**32).to_bytes(4, "little") for i in range(4000))


@pytest.mark.parametrize(
    ("case", "name", "data", "values"),
    [
        ("empty file", "rows.jsonl", b"", {}),
        ("empty file", "rows.csv", b"", {}),
        ("blank file", "rows.jsonl", b"\n \n\n", {}),
        ("blank file", "rows.csv", b"prompt,completion\n", {}),
        ("Latin-1", "rows.jsonl", _accented().encode("latin-1"), {}),
        ("UTF-16", "rows.jsonl", _accented().encode("utf-16"), {"end": "LE"}),
        ("UTF-16", "rows.jsonl", PLAIN.encode("utf-16-le"), {"end": "LE"}),
        ("UTF-16", "rows.jsonl", _accented().encode("utf-16-be"), {"end": "BE"}),
        ("UTF-16", "rows.csv", "prompt,completion\nWhat?,That.\n".encode("utf-16"), {"end": "LE"}),
        ("UTF-16", "rows.txt", "One line.\nAnother line.\n".encode("utf-16-le"), {"end": "LE"}),
        ("UTF-16", "rows.json", json.dumps([{"text": "a"}]).encode("utf-16"), {"end": "LE"}),
        ("binary file", "rows.jsonl", BINARY, {}),
        ("compressed file without the suffix", "rows.jsonl", gzip.compress(PLAIN.encode()), {}),
        ("truncated gzip", "rows.jsonl.gz", gzip.compress(PLAIN.encode())[:12], {}),
        ("unknown shape", "rows.jsonl", b'{"foo": 1}\n' * 5, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_of_which_nothing_can_be_read_is_told_with_what_it_is(
    tmp_path: Path, case: str, name: str, data: bytes, values: dict[str, object]
) -> None:
    (tmp_path / name).write_bytes(data)
    screen = start("curate", name, "-o", "out", cwd=tmp_path)
    script = start("curate", name, "-o", "other", "--json", cwd=tmp_path)
    done, told = ended(screen), ended(script)
    check_screen(case, done, file=name, **values)
    check_object(case, json.loads(told.stdout)["error"], file=name, **values)
    assert (told.returncode, told.stderr) == (1, "")
    for out in ("out", "other"):
        assert [path.name for path in (tmp_path / out).iterdir()] == [artifacts.UNFINISHED]


def test_what_is_unreadable_is_listed_and_said_and_the_rest_is_used_in_bounded_memory(folder: Path, tmp_path: Path) -> None:
    rows = (folder / "raw.jsonl").read_text().splitlines()
    cut = gzip.compress("\n".join(rows[40:80]).encode())
    files = {
        "a-line7.jsonl": "\n".join([*rows[:6], rows[6][:-5], *rows[7:20]]).encode(),
        "b-latin1.jsonl": "\n".join(rows[20:40]).encode() + '\n{"prompt": "q", "completion": "café"}\n'.encode("latin-1"),
        "c-torn.jsonl.gz": cut[: len(cut) // 2],
        "d-ids.jsonl": "\n".join(json.dumps({**json.loads(row), "id": "same"}) for row in rows[80:90]).encode(),
        "e-empty.jsonl": b"",
    }
    (tmp_path / "rows").mkdir()
    for name, data in files.items():
        (tmp_path / "rows" / name).write_bytes(data)
    small = _peak_while_reading(tmp_path, folder, "small")
    long = '{"instruction": "' + "x" * 50_000_000 + '", "output": "y"}'
    (tmp_path / "rows" / "f-long.jsonl").write_text("\n".join([*rows[90:100], long, *rows[100:]]) + "\n")
    del long
    peak = _peak_while_reading(tmp_path, folder, "out")
    assert peak.kilobytes - small.kilobytes < 15_000, "the 50 MB line was held in memory"
    places = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    torn = places[2]
    assert places == [
        {"file": "a-line7.jsonl", "line": 7, "why": "invalid JSON: Unterminated string starting at column 76"},
        {"file": "b-latin1.jsonl", "line": 21, "why": "not UTF-8: byte 0xe9 at position 34"},
        {"file": "c-torn.jsonl.gz", "line": torn["line"], "why": "the compressed file breaks off here: its end is missing"},
        {"file": "f-long.jsonl", "line": 11, "why": "longer than the 10,000,000 bytes of data_curation.max_line_bytes"},
    ]
    counted = artifacts.read(tmp_path / "out", "dataset").manifest.summary["rows"]
    assert counted["kept"] == 19 + 20 + (torn["line"] - 1) + 10 + 66
    assert (counted["quarantined"], counted["in"]) == (4, counted["kept"] + 4)
    first = "a-line7.jsonl:7: invalid JSON: Unterminated string starting at column 76"
    assert f"curate: 4 places are unreadable, the first {first}; quarantine.jsonl lists them all" in peak.done.stderr
    assert "curate: e-empty.jsonl is empty" in peak.done.stderr
    assert "curate: 9 rows have the id of an earlier one and got a running number: d-ids.jsonl:2 is now same-2" in peak.done.stderr
    assert f"unreadable: 4 places of the sources were left out, the first {first}" in peak.done.stdout
    assert "  all of them: out/quarantine.jsonl" in peak.done.stdout


@dataclass(frozen=True)
class Peak:
    kilobytes: int
    done: subprocess.CompletedProcess[str]


def _peak_while_reading(place: Path, folder: Path, out: str) -> Peak:
    """Curate, and look at the most memory the process has held by the time that everything is read."""
    child = start("curate", "rows", "-o", out, "-c", folder / "c.yaml", cwd=place)
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        if line == "curate: comparing rows\n":
            break
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{child.pid}/status").read_text())
    done = ended(child)
    assert done.returncode == 0, done.stderr
    return Peak(int(peak), subprocess.CompletedProcess(done.args, 0, done.stdout, "".join(lines) + done.stderr))


# --- whole runs


def events(workdir: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(workdir.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines() if line.endswith("}")]
    return [json.loads(line) for line in lines]


def records(workdir: Path) -> list[dict[str, Any]]:
    """What the runs of a workdir say of themselves, oldest first."""
    return [json.loads((path / "run.json").read_text()) for path in sorted(workdir.glob("runs/*"))]


def check_left_over(workdir: Path, case: str, stage: str) -> None:
    """The newest run says what failed, its MLflow run is closed, and neither a lock nor half an artifact is left."""
    record = records(workdir)[-1]
    assert (record["status"], record["error"]["kind"], record["error"]["stage"]) == ("failed", SAID[case].kind, stage)
    assert not (workdir / "lock.json").exists()
    left = [path.name for path in workdir.rglob(".*") if path.is_file() and path.name.startswith((".run.json", ".lock", ".reserve"))]
    assert not left
    for artifact in (workdir / "store").glob("*/manifest.json"):
        artifacts.read(artifact.parent)
    assert not list((workdir / "store" / "unfinished").glob("*/manifest.json"))
    with tempfile.TemporaryDirectory() as copy:  # SQLite would look for a file in another namespace here
        shutil.copy(workdir / "mlflow.db", copy)
        states = mlflow_states(f"sqlite:///{copy}/mlflow.db", record["mlflow_run_id"])
    assert states[record["mlflow_run_id"]] == "FAILED"
    assert "RUNNING" not in states.values()


def mlflow_states(uri: str, run_id: str | None = None) -> dict[str, str]:
    """States of a run and of those nested in it, by id; without a run, of all."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(everywhere)
    wanted = [r for r in found if run_id is None or r.info.run_id == run_id or r.data.tags.get("mlflow.parentRunId") == run_id]
    return {run.info.run_id: run.info.status for run in wanted}


@pytest.fixture
def project(folder: Path, tmp_path: Path) -> Path:
    """A folder of one's own with the same rows and model."""
    for name in ("raw.jsonl", "tiny", "c.yaml"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


@pytest.mark.long
def test_a_run_without_its_source_says_so_and_closes_what_it_opened(project: Path) -> None:
    arguments = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[rwa.jsonl]"]
    values: dict[str, object] = {"source": project / "rwa.jsonl", "folder": project}
    check_screen("missing file", ended(start(*arguments, cwd=project)), "resolve", **values)
    check_left_over(project / "wd", "missing file", "resolve")
    error = refusal(2, *arguments[:-1], "fine_tuning.base_model=no-model", cwd=project)
    check_object("unknown model", error, "resolve", path=project / "no-model")
    check_left_over(project / "wd", "unknown model", "resolve")
    check_both("unknown embedded model", "package", "embedded:gpt", "-o", "out", cwd=project)
    assert not (project / "out").exists()


@pytest.mark.long
def test_a_run_with_too_few_rows_says_how_many_are_needed_after_it_said_that_no_triton_is_there(
    project: Path, without_wheel: dict[str, str]
) -> None:
    (project / "few.jsonl").write_text("\n".join((project / "raw.jsonl").read_text().splitlines()[:2]))
    done = ended(
        start("run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[few.jsonl]", cwd=project, **without_wheel)
    )
    check_screen("too few rows", done, "data_curation")
    check_left_over(project / "wd", "too few rows", "data_curation")
    said = SAID["no Triton wheel"]
    note = f"the model will be packaged unproven and not be promoted: {said.message}. {said.hint}"
    assert note in done.stderr.splitlines()[: done.stderr.splitlines().index("curate")]


@pytest.fixture
def without_wheel(tmp_path: Path) -> dict[str, str]:
    """An environment in which the nvidia-pytriton wheel is not installed."""
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'pytriton' else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
    )
    return _with_site(tmp_path / "without-wheel", code)


@pytest.fixture(scope="module")
def old_glibc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python finds the C library of Debian 11."""
    code = "import platform\nplatform.libc_ver = lambda *_, **__: ('glibc', '2.31')\n"
    return _with_site(tmp_path_factory.mktemp("glibc") / "site", code)


def _with_site(place: Path, code: str) -> dict[str, str]:
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{place}:{ROOT}"}


@dataclass(frozen=True)
class Finished:
    """A run that came to its end while another one tried the same workdir, on a machine with too old a C library."""

    folder: Path
    result: dict[str, Any]
    first: subprocess.CompletedProcess[str]
    first_pid: int
    second: list[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished(folder: Path, old_glibc: dict[str, str]) -> Finished:
    rows = (folder / "raw.jsonl").read_text().splitlines()
    (folder / "line7.jsonl").write_text("\n".join([*rows[:6], rows[6][:-5], *rows[7:]]))
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[line7.jsonl]"]
    first = start(*run, cwd=folder, **old_glibc)
    wait_for(lambda: (folder / "wd" / "lock.json").exists(), first)
    second = [ended(start(*run, *more, cwd=folder, **old_glibc)) for more in ([], ["--json"])]
    done = ended(first)
    assert done.returncode == 0, done.stdout + done.stderr
    result = records(folder / "wd")[-1]["result"]
    return Finished(folder, result, done, first.pid, second)


def wait_for(seen: Callable[[], bool], child: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not seen():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_second_run_in_a_workdir_is_refused_and_the_first_is_unharmed(finished: Finished) -> None:
    values: dict[str, object] = {"pid": finished.first_pid, "folder": finished.folder / "wd"}
    check_screen("two runs at once", finished.second[0], **values)
    check_object("two runs at once", json.loads(finished.second[1].stdout)["error"], **values)
    assert finished.second[1].returncode == 2
    assert finished.result["verdict"] == "accepted"
    assert len(records(finished.folder / "wd")) == 1
    assert not (finished.folder / "wd" / "lock.json").exists()


@pytest.mark.long
def test_a_line_that_is_no_json_is_said_while_the_run_reads_and_again_at_its_end(finished: Finished) -> None:
    place = "line7.jsonl:7: invalid JSON: Unterminated string starting at column 76"
    assert f"1 place is unreadable: {place}; quarantine.jsonl lists it" in finished.first.stderr.splitlines()
    assert f"unreadable: 1 place of the sources was left out, the first {place}" in finished.first.stdout.splitlines()
    [listed] = (Path(finished.result["artifacts"]["dataset"]) / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed)["line"] == 7


@pytest.mark.long
def test_with_too_old_a_c_library_the_package_is_unproven_and_not_promoted_as_said_at_the_start(
    finished: Finished, old_glibc: dict[str, str]
) -> None:
    said = SAID["old glibc"]
    lines = finished.first.stderr.splitlines()
    assert f"the model will be packaged unproven and not be promoted: {said.message}. {said.hint}" in lines[: lines.index("curate")]
    assert finished.result["mlflow"]["aliases"] == ["candidate", "challenger"]
    repository = artifacts.read(Path(finished.result["artifacts"]["repository"]), "repository")
    assert (repository.manifest.summary["proof"], repository.manifest.summary["unproven_because"]) == (None, said.message)
    error = refusal(1, "promote", "tiny-helper", "--version", "1", "--workdir", "wd", cwd=finished.folder)
    check_object("unproven package", error)
    check_object("old glibc", refusal(1, "serve", repository.path, cwd=finished.folder, **old_glibc))


@pytest.mark.long
def test_without_triton_serving_is_refused_with_how_to_get_it(finished: Finished, without_wheel: dict[str, str]) -> None:
    repository = finished.result["artifacts"]["repository"]
    check_screen("no Triton wheel", ended(start("serve", repository, cwd=finished.folder, **without_wheel)))
    nowhere = finished.folder / "nowhere"
    check_object(
        "no serving environment", refusal(1, "serve", repository, cwd=finished.folder, TUNELINE_SERVING_ENV=str(nowhere)), folder=nowhere
    )


@pytest.mark.triton
@pytest.mark.long
def test_a_port_in_use_is_told_with_the_option_and_once_it_is_free_the_same_command_serves(finished: Finished) -> None:
    port = free_port()
    serve = ["serve", finished.result["artifacts"]["repository"], "--http-port", port, "--grpc-port", "0", "--metrics-port", "0"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        check_both("port in use", *serve, cwd=finished.folder, port=port)
    server = start(*serve, "--json", cwd=finished.folder)
    assert server.stdout is not None
    ready = server.stdout.readline()
    server.send_signal(signal.SIGTERM)
    assert json.loads(ready)["http"] == f"http://127.0.0.1:{port}"
    assert ended(server).returncode == 0


@pytest.mark.long
def test_a_loss_that_is_lost_ends_the_run_with_the_step_and_the_rate(finished: Finished) -> None:
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[line7.jsonl]"]
    done = ended(start(*run, "--set", "fine_tuning.learning_rate=1e30", cwd=finished.folder))
    check_screen("loss that is lost", done, "fine_tuning")
    check_left_over(finished.folder / "wd", "loss that is lost", "fine_tuning")


# --- the tracking server


def test_a_tracking_server_that_does_not_answer_is_told_at_once_before_any_work(project: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--tracking-uri"]
    began = time.monotonic()
    check_both_runs("MLflow unreachable", [*run, address], project, address=address)
    assert time.monotonic() - began < 120, "MLflow asks a dead server for minutes"
    assert not (project / "wd" / "store").exists()
    assert not (project / "wd" / "lock.json").exists()
    check_object("no tracking server", refusal(2, *run, "nonsense://x", cwd=project), address="nonsense://x")
    assert {record["status"] for record in records(project / "wd")} == {"failed"}


def check_both_runs(case: str, arguments: list[str], project: Path, stage: str = "", **values: object) -> None:
    """One after the other: two runs in one workdir do not go together."""
    check_screen(case, ended(start(*arguments, cwd=project)), stage, **values)
    check_object(case, refusal(SAID[case].code, *arguments, cwd=project), stage, **values)


@pytest.mark.long
def test_a_tracking_server_that_dies_in_training_is_told_and_once_it_is_back_training_goes_on(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(tests.mlflow_server, "free_port", lambda: port)
    place, address = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{port}"
    run = [
        "run",
        "-c",
        "c.yaml",
        "--workdir",
        "wd",
        "--tracking-uri",
        address,
        "--set",
        "triton_packaging.prove=false",
        "--set",
        "fine_tuning.max_steps=40",
    ]
    patience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with mlflow_server(place):
        child = start(*run, cwd=project, **patience)
        wait_for(lambda: any(e["event"] == "metrics" and e["step"] >= 6 for e in events(project / "wd")), child)
    check_screen("MLflow lost", ended(child), "fine_tuning", address=address)
    assert records(project / "wd")[-1]["status"] == "failed"
    assert not (project / "wd" / "lock.json").exists()
    with mlflow_server(place):
        result = answer(*run, cwd=project)
        assert result["verdict"] == "accepted"
        assert set(mlflow_states(address).values()) == {"FINISHED", "KILLED"}, "the run that lost its server is closed by the next one"
    model = artifacts.read(Path(result["artifacts"]["model"]), "model")
    assert model.manifest.summary["resumed_from"] >= 4


# --- disks


@dataclass(frozen=True)
class Disk:
    """A small file system. `enter` is how a command gets to see it, `seen` where this test sees it."""

    path: Path
    seen: Path
    enter: list[str]

    def remount(self, options: str) -> None:
        subprocess.run([*self.enter, "mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True)

    def fill(self, leave: int = 0) -> None:
        """Take all the space that is left, but for so many bytes."""
        with (self.seen / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(file.tell() - leave, 0))

    def empty(self) -> None:
        (self.seen / "filler").unlink()


@contextmanager
def disk(path: Path, size: str, beside: Disk | None = None) -> Iterator[Disk]:
    """A tmpfs of this size: mounted here where that is permitted, else in a user and mount namespace, that of the disk `beside`."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    if beside and beside.enter:
        subprocess.run([*beside.enter, *mount], check=True, capture_output=True)
        yield Disk(path, Path(str(beside.seen).removesuffix(str(beside.path)) + str(path)), beside.enter)
        return
    if "TUNELINE_TEST_NAMESPACE" not in os.environ and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        try:
            yield Disk(path, path, [])
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    with _namespace(path.parent) as (pid, enter):
        done = subprocess.run([*enter, *mount], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may mount no file system, not even in a namespace of its own: {done.stderr.strip()}")
        yield Disk(path, Path(f"/proc/{pid}/root{path}"), enter)


@contextmanager
def _namespace(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """A process that holds a namespace of its own, and the command to enter it in a folder."""
    holder = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # it is there, or it was refused
        yield holder.pid, ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials", f"--wd={folder}"]
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.long
def test_a_disk_that_is_full_or_read_only_is_told_by_name_and_with_space_the_same_command_finishes(project: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "300k") as small, disk(tmp_path / "state", "8m", beside=small) as checkpoints:
        workdir, seen = small.path / "wd", small.seen / "wd"
        command = ["run", "-c", "c.yaml", "--workdir", workdir, "--set", "triton_packaging.prove=false"]

        def run(*more: str) -> subprocess.Popen[str]:
            return start(*command, *more, cwd=project, enter=small.enter, TUNELINE_STATE=str(checkpoints.path))

        # too small for MLflow's SQLite store: said before any work
        check_screen("full disk", ended(run()), folder=workdir)
        assert not (seen / "lock.json").exists()
        assert records(seen)[-1]["status"] == "failed"

        # read-only from the start
        small.remount("ro")
        check_screen("read-only folder", ended(run()), folder=workdir)
        small.remount("rw,size=32m")

        # full in curation, with MLflow's store on it
        child = run("--json")
        wait_for(lambda: any(e["stage"] == "data_curation" for e in events(seen)), child)
        small.fill()
        check_object("full disk", json.loads(ended(child).stdout)["error"], "data_curation", folder=workdir)
        small.empty()
        check_left_over(seen, "full disk", "data_curation")

        # full when a checkpoint is saved
        child = run()
        wait_for(lambda: any(e.get("name") == "training" for e in events(seen)), child)
        checkpoints.fill(leave=64 * 1024)
        check_screen("full disk", ended(child), "fine_tuning", folder=checkpoints.path)
        checkpoints.empty()
        check_left_over(seen, "full disk", "fine_tuning")

        done = ended(run("--json"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["verdict"] == "accepted"
        assert not list((seen / "store" / "unfinished").glob("*"))


def test_an_output_on_a_full_or_read_only_disk_is_told_and_with_space_the_same_command_finishes(project: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "16k") as small:
        curate = ["curate", "raw.jsonl", "-o", small.path / "out", "-c", "c.yaml"]
        done = ended(start(*curate, cwd=project, enter=small.enter))
        check_screen("full disk", done, folder=small.path / "out")
        assert not (small.seen / "out" / artifacts.MANIFEST).exists()
        small.remount("ro,size=16m")
        done = ended(start(*curate, cwd=project, enter=small.enter))
        check_screen("read-only folder", done)
        small.remount("rw")
        done = ended(start(*curate, "--json", cwd=project, enter=small.enter))
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["rows"]["kept"] == 156


@pytest.mark.long
def test_a_workdir_of_another_user_is_told_and_once_it_may_be_written_the_run_starts(project: Path) -> None:
    (project / "shared").mkdir()
    (project / "shared").chmod(0o555)
    arguments = ["run", "-c", "c.yaml", "--workdir", "shared/wd", "--set", "data_curation.sources=[none.jsonl]"]
    check_both("folder of another user", *arguments, cwd=project, as_root=False, folder=project / "shared")
    (project / "shared").chmod(0o755)
    done = ended(start(*arguments, cwd=project, as_root=False))
    assert "does not exist" in done.stderr, "it got as far as its sources"


# --- the page

# tests/data_versioning and tests/engines make these mistakes and read what is said
OF_DATA_VERSIONS = {
    "… cannot be used: the S3 service … does not know the access key (InvalidAccessKeyId)": ("data_versioning", 1),
    "the S3 service … does not answer, so … cannot be used: …": ("data_versioning", 1),
    "the data repository … cannot be reached: …": ("data_versioning", 1),
    "data_versioning.repository: the address of … holds a password, and addresses are recorded with every version": ("configuration", 2),
    "the data repository … let nothing through for 60 seconds; … is in the way: …": ("data_versioning", 1),
    "the tag … names dataset-v3 already, and tags are never moved": ("data_versioning", 1),
    "the DVC remote … lacks objects or holds them damaged: …": ("artifact_damaged", 1),
    "the DVC remote of … lacks objects of … at …, or holds them damaged: …": ("artifact_damaged", 1),
}
OF_RUNS_ELSEWHERE = {  # the test is in test_runs.py
    "another run (process … on …, … seconds after its last sign of life) works in …": ("usage", 2),
    "… runs on …, and is cancelled there": ("usage", 2),
}
OF_REPRODUCTIONS = {  # the tests are in test_reproduce.py
    "… version … does not say from which dataset it was made: it has no tag tuneline.dataset_sha256": ("registry", 1),
    "… version … names the dataset …, and its model was made from the dataset …": ("lineage", 1),
    "the base model of … version … is not here as it was: …": ("lineage", 1),
    "the dataset … of … version … is in no store any more and was not published": ("lineage", 1),
    "the data repository … has no published revision … of …": ("data_versioning", 1),
    "process … on … works in …/reproduce/… right now": ("busy", 1),
}
OF_THE_REGISTRY = {  # the tests are in tests/model_registry, and in tests/engines with a server that asks who one is
    "version … of … cannot be promoted: its evaluation compared it with …, and the champion is …": ("registry", 1),
    "version … of … cannot be promoted: its … does not verify (…)": ("registry", 1),
    "version … of … is approved by …, and 1 more approval is needed": ("approval_needed", 1),
    "the policy or the approvals changed meanwhile: …": ("approval_needed", 1),
    "… is no approver": ("approval_needed", 1),
    "the MLflow server … stopped answering, also after 60 seconds of trying: …": ("engine_missing", 1),
    "MLflow at … answers and keeps nothing, also after 60 seconds of trying: …": ("engine_missing", 1),
    "MLflow at … keeps nothing: its database is read-only": ("not_writable", 1),
    "MLflow at … does not know you: …": ("registry", 1),
    "MLflow at … does not permit this: …": ("registry", 1),
}
OF_PACKAGES = {  # the tests are in tests/triton_packaging, tests/engines and tests/pipelines/test_config.py
    "--adapter … is not of the form NAME=MODEL_DIR": ("configuration", 2),
    "several adapters over one base need triton_packaging.backend vllm and attached adapters": ("configuration", 2),
    "the adapter … was made for the base … (…), and the others for … (…): they share no weights": ("input", 1),
    "the adapter … has …, which vLLM does not compute": ("input", 1),
    "the model's adapter is of type …, which no plain weights can have the effect of: it cannot be merged": ("configuration", 2),
    "the model's adapter is of type …; vLLM takes LoRA adapters only": ("configuration", 2),
    "fine_tuning.adaptation: virtual tokens (…) can neither be merged into weights nor be served by vLLM": ("configuration", 2),
    "a merged adapter has no weights anywhere that the package could refer to: they are made for the package": ("configuration", 2),
    "triton_packaging.weights: found 'referenced', and the adapter is merged, into weights that lie nowhere else": (
        "configuration",
        2,
    ),
    "fine_tuning.lora.dora: vLLM does not compute DoRA's part of an attached adapter": ("configuration", 2),
    "the package refers to …, which is not there as it was: …": ("artifact_damaged", 1),
    "the package cannot be published: …": ("engine_missing", 1),
}
OF_THE_PLACE = {  # the test is in test_place.py
    "this is not the place that platform.yaml describes: …": ("platform", 1),
}
OF_STORAGE = {  # the tests are in tests/pipelines/storage
    "no partner came to … within 300 seconds": ("partner", 1),
    "no partner waits in … within 300 seconds": ("partner", 1),
    "the partner did not answer within … seconds (…)": ("partner", 1),
    "the partner fell silent: no sign of life for … seconds": ("partner", 1),
    "the partner has ended, and took the probe's folder away": ("partner", 1),
    "the second process ended: …": ("partner", 1),
    "… is no folder that could be probed": ("usage", 2),
    "--pair asks for two sides, and the rank of this one is not given": ("usage", 2),
    "--pair '…' is no name for a pair": ("usage", 2),
    "--size '…' is no size of a MiB or more": ("usage", 2),
}
OF_JOBS = {  # the tests are in tests/common/test_kubernetes_jobs.py, test_slurm*.py, test_launch_settings.py and tests/engines
    "there is no sbatch here": ("engine_missing", 1),
    "sbatch: …": ("launcher", 1),
    "Slurm has not answered for 3600 s: …": ("engine_missing", 1),
    "--… of the batch script cannot be said to slurmrestd": ("configuration", 2),
    "launcher.slurm.rest: what answers at … is no slurmrestd: …": ("configuration", 2),
    "launcher.slurm.rest: the certificate of … is not trusted: …": ("configuration", 2),
    "there is no token in SLURM_JWT": ("access", 1),
    "the token in … has expired (…)": ("access", 1),
    "the token in … is not accepted by Slurm at …: …": ("access", 1),
    "squeue --json gives no JSON: …": ("configuration", 2),
    "launcher.slurm.template: … cannot be read: …": ("configuration", 2),
    "launcher.slurm.template: …: @NODE@ is missing": ("configuration", 2),
    "fine_tuning.processes is 3, which 2 nodes (launcher.nodes) cannot share evenly": ("configuration", 2),
    "--launcher …: …": ("usage", 2),
    "TUNELINE_LAUNCHER: …": ("configuration", 2),
    "may not create trainjobs: …": ("access", 1),
    "the API server does not accept who is asking: …": ("access", 1),
    "the cluster knows no TrainJob": ("engine_missing", 1),
    "no cluster is named here: …": ("engine_missing", 1),
    "the API server does not answer (…), also after 3600 seconds of asking": ("engine_missing", 1),
    "the cluster does not take the job: …": ("configuration", 2),
    "launcher.trainjob.image is empty, and the pods of a trainjob need one": ("configuration", 2),
    "… is not on the volume …, which is mounted at … (launcher.trainjob.mount)": ("configuration", 2),
    "… is being deleted and does not end": ("busy", 1),
}
OF_HOUSEKEEPING = {  # the tests are in tests/pipelines/housekeeping/test_command.py
    "there is no workdir …": ("usage", 2),
    "the registry knows of no model version, and the store … holds … artifacts": ("usage", 2),
    "there is no data repository …, and the store … holds … datasets": ("usage", 2),
    "what the store … holds was made from revisions of …, which was not asked": ("usage", 2),
    "--older-than … is no age": ("usage", 2),
    "--older-than … is too short to tell what is in use": ("usage", 2),
    "--kind …: there is no such kind": ("usage", 2),
    "… is neither in the artifact store nor a run": ("usage", 2),
    "… is not pinned": ("usage", 2),
}
OF_DEPLOYMENTS = {  # the tests are in tests/pipelines/test_deploying.py
    "… version … is not served: …": ("registry", 1),
    "over … it does not answer as it was proven to": ("smoke_test", 1),
    "… serves …@…, not …@…": ("failed", 1),
    "the Triton server at … does not answer: …": ("engine_missing", 1),
    "'…' is no name for a model in Triton": ("usage", 2),
    "version … cannot be taken in now, and is tried again: …": ("failed", 1),
    "…@… does not name version … any more": ("failed", 1),
}


def test_the_page_of_errors_has_one_line_for_each_of_them_with_kind_and_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").partition("## All kinds")[0]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    listed = {row[0].strip("`"): (row[1].strip("`"), int(row[2])) for row in rows}
    expected = {re.sub(r"\{\w+\}", "…", said.message): (said.kind, said.code) for said in SAID.values()}
    assert listed == {
        **expected,
        **OF_DATA_VERSIONS,
        **OF_RUNS_ELSEWHERE,
        **OF_REPRODUCTIONS,
        **OF_THE_REGISTRY,
        **OF_PACKAGES,
        **OF_DEPLOYMENTS,
        **OF_HOUSEKEEPING,
        **OF_JOBS,
        **OF_THE_PLACE,
        **OF_STORAGE,
    }
    assert all(meaning and to_do for _, _, _, meaning, to_do in rows)
