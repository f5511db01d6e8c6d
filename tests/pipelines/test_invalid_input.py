"""Invalid input on the command line: error texts, JSON errors, exit codes, and cleanup.

ERRORS has every message and hint in full; a name in braces is a placeholder, for which a test may pass the value.
Long tier: whole runs, servers and mounted file systems.
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
from components.common.artifacts import artifact_folder
from tests import preloaded_server
from tests.common.test_yaml_loading import NESTED_ALIASES
from tests.mlflow_server import free_port, mlflow_server
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, run_in_process
from tests.pipelines.project import write_rows
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]


@dataclass(frozen=True)
class ExpectedError:
    """Message and hint of an error, its kind in JSON, and the exit code."""

    message: str
    hint: str
    kind: str = "configuration"
    code: int = 2


KEYS_HINT = "See docs/reference/configuration.md, or run `tuneline init` to write a commented file."
SUFFIXES_HINT = (
    "a supported suffix: .csv, .docx, .epub, .htm, .html, .json, .jsonl, .md, .ndjson, .ods, .parquet, .pdf, .pptx, .text, "
    ".tsv, .txt, .warc, .wet, .xls, .xlsx, optionally with .gz or .zst."
)
REGULAR_FILE_HINT = "Use a regular file that the current user can read."
FREE_SPACE_HINT = "Free some disk space, then run the same command again to resume."
ERRORS = {
    # the configuration
    "unknown key": ExpectedError(
        "{where}: fine_tuning.learning_rat: unknown key (did you mean learning_rate?)", KEYS_HINT
    ),
    "unknown section": ExpectedError("{where}: tuning: unknown key (did you mean fine_tuning?)", KEYS_HINT),
    "wrong type": ExpectedError("{where}: fine_tuning.max_steps: found 'many'; expected a whole number", KEYS_HINT),
    "out of range": ExpectedError("{where}: fine_tuning.batch_size: found 0; expected 1 or more", KEYS_HINT),
    "wrong shape": ExpectedError(
        "{where}: data_curation.sources: found 'raw.jsonl'; expected a list, for example [one, two]", KEYS_HINT
    ),
    "unknown choice": ExpectedError(
        "{where}: fine_tuning.schedule: found 'magic'; expected 'linear', 'cosine', 'warmup_stable_decay' or 'constant_with_warmup'",
        KEYS_HINT,
    ),
    "set without =": ExpectedError(
        "--set fine_tuning.max_steps is not of the form section.key=value",
        "Use the form --set fine_tuning.max_steps=100.",
        "usage",
    ),
    "set with invalid YAML": ExpectedError(
        "--set data_curation.sources=[a: the value is not YAML: line 1, column 3: expected ',' or ']', but got '<stream end>'",
        "Close every bracket and quote, or quote a string with special characters: --set 'section.key=\"a: b\"'.",
        "usage",
    ),
    "set an item of no list": ExpectedError(
        "evaluation.tasks.0.kind: the configuration does not set the list evaluation.tasks",
        "Set the whole list, for example evaluation.tasks=[one, two].",
        "usage",
    ),
    "no configuration file": ExpectedError(
        "{file} does not exist", "Check the path; `tuneline init` writes a commented customization.yaml."
    ),
    "folder as configuration": ExpectedError(
        "{file} is a folder, not a file", "Specify a file in this folder, for example {file}/customization.yaml."
    ),
    "pipe as configuration": ExpectedError(
        "{file} is a pipe or a device, not a file", "Specify the path of a file with the configuration."
    ),
    "tab in the YAML": ExpectedError(
        "{file} is not YAML: line 2, column 1: unexpected tab", "Indent with spaces: YAML allows no tabs."
    ),
    "duplicate key": ExpectedError(
        "{file} is not YAML: line 3, column 3: duplicate key max_steps",
        "Correct the line; `tuneline init` writes an example.",
    ),
    "aliases of aliases": ExpectedError(
        "{file} is not YAML: line 6, column 5: more than 100,000 values, including those of aliases",
        "Correct the line; `tuneline init` writes an example.",
    ),
    "large file as configuration": ExpectedError(
        "{file} has 2,000,000 bytes; a configuration has at most 1,000,000",
        "Check the path; put data into files that the configuration refers to.",
    ),
    "list as configuration": ExpectedError(
        "{file} contains a list; expected a mapping of sections", "Run `tuneline init` to write an example."
    ),
    "configuration in Latin-1": ExpectedError(
        "{file} is not UTF-8: byte 0xe9 in line 2", "Save the file as UTF-8; `iconv` converts from another encoding."
    ),
    "configuration not readable": ExpectedError(
        "{file} cannot be read: Permission denied", "Grant this user read access; `ls -l {file}` shows the permissions."
    ),
    # the sources, before anything is read
    "missing file": ExpectedError(
        "data_curation.sources: '{source}' does not exist", "Use {folder}/raw.jsonl, or correct the path."
    ),
    "missing file without a suggestion": ExpectedError(
        "data_curation.sources: '{source}' does not exist",
        "Check the spelling: {folder} contains no file or folder with that name.",
    ),
    "missing folder": ExpectedError(
        "data_curation.sources: '{source}' does not exist",
        "Check the whole path: the folder {folder} does not exist either.",
    ),
    "glob without a match": ExpectedError(
        "data_curation.sources: '{source}' matches no supported file; searched {folder}/{source}",
        "Use files with " + SUFFIXES_HINT,
    ),
    "empty folder": ExpectedError(
        "data_curation.sources: '{source}' is a folder without a supported file; searched {folder}",
        "Use files with " + SUFFIXES_HINT,
    ),
    "unsupported suffix": ExpectedError(
        "data_curation.sources: '{source}' has the unsupported suffix '.rtf'",
        "Convert or rename the file to " + SUFFIXES_HINT,
    ),
    "dangling link": ExpectedError(
        "data_curation.sources: '{source}' is a link to gone.jsonl, which does not exist", REGULAR_FILE_HINT
    ),
    "dangling link in a folder": ExpectedError(
        "data_curation.sources: '{source}' includes {path}, which is a link to gone.jsonl, which does not exist",
        REGULAR_FILE_HINT,
    ),
    "named pipe": ExpectedError("data_curation.sources: '{source}' is a named pipe, not a file", REGULAR_FILE_HINT),
    "device": ExpectedError("data_curation.sources: '{source}' is a device, not a file", REGULAR_FILE_HINT),
    "unreadable file": ExpectedError(
        "data_curation.sources: '{source}' cannot be read: Permission denied",
        "Grant the current user read access to {path}.",
    ),
    "unreadable folder": ExpectedError(
        "data_curation.sources: '{source}' contains {path}, which cannot be read: Permission denied",
        "Grant the current user read access, or move the folder.",
    ),
    # the sources, once they are read
    "empty file": ExpectedError(
        "{file} is empty",
        "Set data_curation.sources to files with rows; docs/how-to/data.md lists the supported formats.",
        "input",
        1,
    ),
    "blank file": ExpectedError(
        "{file} contains no row",
        "Set data_curation.sources to files with rows; docs/how-to/data.md lists the supported formats.",
        "input",
        1,
    ),
    "Latin-1": ExpectedError(
        "no row is kept: 156 records are unreadable; the first is {file}:1: not UTF-8: byte 0xe9 at position {n}",
        "Set the encoding of the file, as in data_curation.sources: [{path: {file}, encoding: cp1252}], or "
        "convert it to UTF-8.",
        "input",
        1,
    ),
    "UTF-16": ExpectedError(
        "no row is kept: 1 record is unreadable: {file}:1: the file is UTF-16{end} text, not UTF-8; it is skipped",
        "Set the encoding of the file, as in data_curation.sources: [{path: {file}, encoding: UTF-16{end}}], or "
        "convert it to UTF-8.",
        "input",
        1,
    ),
    "binary file": ExpectedError(
        "no row is kept: 1 record is unreadable: {file}:1: the file is binary data, not text; it is skipped",
        "Check data_curation.sources and data_curation.format; docs/how-to/data.md lists the supported formats.",
        "input",
        1,
    ),
    "compressed file without the suffix": ExpectedError(
        "no row is kept: 1 record is unreadable: {file}:1: the file is gzip data without the .gz suffix; it is skipped",
        "Rename the file so that its name ends with that suffix.",
        "input",
        1,
    ),
    "truncated gzip": ExpectedError(
        "no row is kept: 1 record is unreadable: {file}:1: the compressed file is truncated",
        "Replace {file} with a new copy or download of the original.",
        "input",
        1,
    ),
    "unknown shape": ExpectedError(
        "no row is kept: 5 records are unreadable; the first is {file}:1: unknown format: keys foo",
        "Check data_curation.sources and data_curation.format; docs/how-to/data.md lists the supported formats.",
        "input",
        1,
    ),
    "too few rows": ExpectedError(
        "too few rows for the split: with 2 rows in 2 groups of similar rows, test is empty",
        "Add rows (about 13 different rows are needed), or increase data_curation.fractions.test (0.3).",
        "input",
        1,
    ),
    # the model
    "unknown model": ExpectedError(
        "fine_tuning.base_model: {path} is not a folder",
        "Use embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, the folder of a tuned model, store:<sha256>, "
        "or hf://org/name@revision.",
    ),
    "unknown embedded model": ExpectedError(
        "fine_tuning.base_model: embedded model embedded:gpt does not exist",
        "Use embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, the folder of a tuned model, store:<sha256>, "
        "or hf://org/name@revision.",
    ),
    "non-finite loss": ExpectedError(
        "the {which} loss is nan at step {step}, learning rate {rate}; rows of this step: {rows}",
        "Reduce fine_tuning.learning_rate, which starts a new training run.",
        "training",
        1,
    ),
    # the machine
    "full disk": ExpectedError("no space left in {folder}: {free} MB free", FREE_SPACE_HINT, "disk_full", 1),
    "read-only folder": ExpectedError(
        "{folder} cannot be written: the file system is read-only",
        "Grant this user write access, or choose another folder.",
        "not_writable",
        1,
    ),
    "folder of another user": ExpectedError(
        "{folder} cannot be written: permission denied",
        "Grant this user write access, or choose another folder.",
        "not_writable",
        1,
    ),
    "port in use": ExpectedError(
        "the HTTP port {port} on 127.0.0.1 is already in use",
        "Stop the process that listens on this port, or choose another port with --http-port (0: any free port).",
        "port_in_use",
    ),
    "no Triton wheel": ExpectedError(
        "the package nvidia-pytriton, which provides the Triton server, is not installed",
        "Run `make`, or `pip install --no-deps nvidia-pytriton==0.7.0`.",
        "engine_missing",
        1,
    ),
    "no serving environment": ExpectedError(
        "the serving environment in {folder} does not exist",
        "Run: python -m components.triton_packaging.serving_env",
        "engine_missing",
        1,
    ),
    "old glibc": ExpectedError(
        "the embedded Triton requires glibc 2.35 or newer; this machine has glibc 2.31",
        "Package on a machine with x86-64 Linux, glibc 2.35 and Python 3.11 or 3.12; `tuneline doctor` lists the missing requirements.",
        "engine_missing",
        1,
    ),
    "unproven package": ExpectedError(
        "version {n} of {name} cannot be promoted: its Triton package is unproven",
        "Promote an accepted and proven version, or force the promotion with --force --reason TEXT.",
        "registry",
        1,
    ),
    "unreachable MLflow server": ExpectedError(
        "the MLflow server {address} does not answer: Connection refused",
        "Start the server, or correct MLFLOW_TRACKING_URI or --tracking-uri.",
        "engine_missing",
        1,
    ),
    "lost MLflow server": ExpectedError(
        "the MLflow server {address} stopped answering",
        "Restart the server, then run the same command again to resume.",
        "engine_missing",
        1,
    ),
    "invalid tracking server": ExpectedError(
        "{address} is not an MLflow tracking URI; supported schemes: http, https, sqlite, postgresql, mysql, mssql, databricks",
        "Use a URI with a supported scheme, for example http://host:5000.",
        "usage",
    ),
    "two runs at once": ExpectedError(
        "another run (process {pid}) holds {folder}",
        "Wait for the run, cancel it with `tuneline cancel latest`, or use another --workdir.",
        "usage",
    ),
}


def is_match(template: str, text: str, values: dict[str, object]) -> bool:
    """Whether a text matches the template; placeholders without a value match any text."""
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(
        re.escape(part) if i % 2 == 0 else re.escape(str(values[part])) if part in values else ".+"
        for i, part in enumerate(parts)
    )
    return re.fullmatch(pattern, text) is not None


def check_json_error(case: str, error: dict[str, str], stage: str = "", **values: object) -> None:
    """Check the error object of --json."""
    expected = ERRORS[case]
    assert is_match(expected.message, error["message"], values), error["message"]
    assert is_match(expected.hint, error["hint"], values), error["hint"]
    assert (error["kind"], error["stage"]) == (expected.kind, stage)


def check_text_error(case: str, process: subprocess.CompletedProcess[str], stage: str = "", **values: object) -> None:
    """Check that message and hint are the last two lines on stderr, without a traceback."""
    expected = ERRORS[case]
    assert process.returncode == expected.code, process.stdout + process.stderr
    assert "Traceback" not in process.stderr, process.stderr
    *_, message, hint = process.stderr.rstrip().splitlines()
    where = f"tuneline: {stage}: " if stage else "tuneline: "
    assert message.startswith(where), message
    assert is_match(expected.message, message.removeprefix(where), values), message
    assert hint.startswith("  "), hint
    assert is_match(expected.hint, hint[2:], values), hint


def start(
    *arguments: object, cwd: Path, enter: list[str] | None = None, as_root: bool = True, **extra: str
) -> subprocess.Popen[str]:
    """Start a command; `as_root=False` applies file permissions to root too. A server forks its steps if it may."""
    if not enter and as_root and all(name.startswith("MLFLOW_") for name in extra):
        extra |= preloaded_server.get_variables("PRELOADED_STEPS")
    return subprocess.Popen(
        [*(enter or []), *COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if as_root else drop_root_capabilities,
    )


def drop_root_capabilities() -> None:
    """Drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, so that the mode bits apply to root too."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def wait_for_end(child: subprocess.Popen[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    try:
        out, err = child.communicate(timeout=timeout)
    finally:
        child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def run_unprivileged(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with file permissions applied to root too."""
    return wait_for_end(start(*arguments, cwd=cwd, as_root=False))


def check_text_and_json(case: str, *arguments: object, cwd: Path, as_root: bool = True, **values: object) -> None:
    """Check the text and the JSON of an error; a child process is needed only to drop the rights of root."""
    run = run_in_process if as_root else run_unprivileged
    check_text_error(case, run(*arguments, cwd=cwd), **values)
    process = run(*arguments, "--json", cwd=cwd)
    assert process.returncode == ERRORS[case].code
    assert process.stderr == ""
    check_json_error(case, json.loads(process.stdout)["error"], **values)


CONFIGURATION = """
data_curation:
  {sources: [raw.jsonl], near_duplicate_threshold: 0.95, answer_min_words: 1000, fractions: {train: 0.6, validation: 0.1, test: 0.3}}
fine_tuning:
  {base_model: tiny, max_steps: 6, batch_size: 4, checkpoint_every: 2, learning_rate: 5.0e-3, max_length: 128, validation_rows: 4}
evaluation: {suite: none, generations: 0, bootstrap_samples: 1000}
triton_packaging: {golden_max_tokens: 4}
model_registry: {name: tiny-helper}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project folder with valid rows, a tiny model and a configuration."""
    path = tmp_path_factory.mktemp("wrong")
    write_rows(path / "raw.jsonl")
    tiny_model(path / "tiny")
    (path / "c.yaml").write_text(CONFIGURATION)
    return path


# --- the configuration


@pytest.mark.parametrize(
    ("case", "override"),
    [
        ("unknown key", "fine_tuning.learning_rat=1"),
        ("unknown section", "tuning={}"),
        ("wrong type", "fine_tuning.max_steps=many"),
        ("out of range", "fine_tuning.batch_size=0"),
        ("wrong shape", "data_curation.sources=raw.jsonl"),
        ("unknown choice", "fine_tuning.schedule=magic"),
        ("set without =", "fine_tuning.max_steps"),
        ("set with invalid YAML", "data_curation.sources=[a"),
        ("set an item of no list", "evaluation.tasks.0.kind=held_out"),
    ],
)
def test_invalid_override_is_reported_before_any_work(tmp_path: Path, case: str, override: str) -> None:
    check_text_and_json(case, "run", "--set", override, cwd=tmp_path, where="the configuration")
    assert not list(tmp_path.iterdir())


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("case", "make"),
    [
        ("unknown key", lambda path: path.write_text("fine_tuning: {learning_rat: 1}\n")),
        ("no configuration file", lambda path: None),
        ("folder as configuration", Path.mkdir),
        ("pipe as configuration", _make_pipe),
        ("tab in the YAML", lambda path: path.write_text("fine_tuning:\n\tmax_steps: 3\n")),
        ("duplicate key", lambda path: path.write_text("fine_tuning:\n  max_steps: 3\n  max_steps: 4\n")),
        ("aliases of aliases", lambda path: path.write_text(NESTED_ALIASES)),
        ("large file as configuration", lambda path: path.write_bytes(bytes(2_000_000))),
        ("list as configuration", lambda path: path.write_text("- seed: 3\n")),
        (
            "configuration in Latin-1",
            lambda path: path.write_bytes("seed: 3\nmodel_registry: {name: é}\n".encode("latin-1")),
        ),
    ],
)
def test_invalid_configuration_file_is_reported_before_any_work(
    tmp_path: Path, case: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "mine.yaml")
    check_text_and_json(case, "run", "-c", "mine.yaml", cwd=tmp_path, file="mine.yaml", where="mine.yaml")
    assert not (tmp_path / ".tuneline").exists()


def test_unreadable_configuration_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    (tmp_path / "mine.yaml").chmod(0)
    check_text_and_json(
        "configuration not readable", "run", "-c", "mine.yaml", cwd=tmp_path, as_root=False, file="mine.yaml"
    )


# --- the sources


def _make_folder_with(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def make_folder(path: Path) -> None:
        path.mkdir()
        make(path / name)

    return make_folder


def _make_dangling_link(path: Path) -> None:
    path.symlink_to("gone.jsonl")


@pytest.mark.parametrize(
    ("case", "source", "make"),
    [
        ("missing file", "rwa.jsonl", lambda path: (path.parent / "raw.jsonl").touch()),
        ("missing file without a suggestion", "tickets.csv", lambda path: (path.parent / "raw.jsonl").touch()),
        ("glob without a match", "*.jsonl", lambda path: None),
        ("empty folder", "empty", Path.mkdir),
        ("empty folder", "pictures", _make_folder_with("a.png", Path.touch)),
        ("unsupported suffix", "rows.rtf", Path.touch),
        ("dangling link", "link.jsonl", _make_dangling_link),
        ("named pipe", "pipe.jsonl", _make_pipe),
        ("device", "/dev/zero", lambda path: None),
    ],
)
def test_invalid_source_is_reported_with_its_name(
    tmp_path: Path, case: str, source: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path / source)
    searched_folder = tmp_path / source if case == "empty folder" else tmp_path
    check_text_and_json(case, "curate", source, "-o", "out", cwd=tmp_path, source=source, folder=searched_folder)
    assert not (tmp_path / "out").exists()


def test_source_in_a_missing_folder_is_reported_with_the_folder(tmp_path: Path) -> None:
    check_text_and_json(
        "missing folder",
        "curate",
        "no/rows.jsonl",
        "-o",
        "out",
        cwd=tmp_path,
        source="no/rows.jsonl",
        folder=tmp_path / "no",
    )


def test_unreadable_file_in_a_source_folder_is_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    write_rows(tmp_path / "rows" / "raw.jsonl")
    _make_dangling_link(tmp_path / "rows" / "deep" / "link.jsonl")
    link = tmp_path / "rows" / "deep" / "link.jsonl"
    check_text_and_json(
        "dangling link in a folder", "curate", "rows", "-o", "out", cwd=tmp_path, source="rows", path=link
    )
    (tmp_path / "rows" / "deep").chmod(0)
    try:
        values: dict[str, object] = {"source": "rows", "path": tmp_path / "rows" / "deep"}
        check_text_and_json("unreadable folder", "curate", "rows", "-o", "out", cwd=tmp_path, as_root=False, **values)
    finally:
        (tmp_path / "rows" / "deep").chmod(0o700)


def test_unreadable_source_file_is_reported(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw.jsonl")
    (tmp_path / "raw.jsonl").chmod(0)
    values: dict[str, object] = {"source": "raw.jsonl", "path": tmp_path / "raw.jsonl"}
    check_text_and_json("unreadable file", "curate", "raw.jsonl", "-o", "out", cwd=tmp_path, as_root=False, **values)
    assert not (tmp_path / "out").exists()


def _render_accented_rows() -> str:
    rows = [{"instruction": f"What is thing {i}?", "input": "", "output": f"Thing {i} is a café."} for i in range(156)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


PLAIN = "".join(
    json.dumps({"prompt": f"What is thing {i}?", "completion": f"It is number {i}."}) + "\n" for i in range(156)
)
# Bytes of no known format, in a fixed sequence.
BINARY = b"".join((i * 2654435761 % 2**32).to_bytes(4, "little") for i in range(4000))


@pytest.mark.parametrize(
    ("case", "name", "data", "values"),
    [
        ("empty file", "rows.jsonl", b"", {}),
        ("empty file", "rows.csv", b"", {}),
        ("blank file", "rows.jsonl", b"\n \n\n", {}),
        ("blank file", "rows.csv", b"prompt,completion\n", {}),
        ("Latin-1", "rows.jsonl", _render_accented_rows().encode("latin-1"), {}),
        ("UTF-16", "rows.jsonl", _render_accented_rows().encode("utf-16"), {"end": "LE"}),
        ("UTF-16", "rows.jsonl", PLAIN.encode("utf-16-le"), {"end": "LE"}),
        ("UTF-16", "rows.jsonl", _render_accented_rows().encode("utf-16-be"), {"end": "BE"}),
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
def test_source_without_readable_rows_is_reported_with_the_reason(
    tmp_path: Path, case: str, name: str, data: bytes, values: dict[str, object]
) -> None:
    (tmp_path / name).write_bytes(data)
    process = run_in_process("curate", name, "-o", "out", cwd=tmp_path)
    json_process = run_in_process("curate", name, "-o", "other", "--json", cwd=tmp_path)
    check_text_error(case, process, file=name, **values)
    check_json_error(case, json.loads(json_process.stdout)["error"], file=name, **values)
    assert (json_process.returncode, json_process.stderr) == (1, "")
    for out in ("out", "other"):
        assert [path.name for path in (tmp_path / out).iterdir()] == [artifact_folder.UNFINISHED_MARKER]


@pytest.mark.long
def test_unreadable_rows_are_listed_and_memory_is_bounded(folder: Path, tmp_path: Path) -> None:
    rows = (folder / "raw.jsonl").read_text().splitlines()
    compressed = gzip.compress("\n".join(rows[40:80]).encode())
    files = {
        "a-line7.jsonl": "\n".join([*rows[:6], rows[6][:-5], *rows[7:20]]).encode(),
        "b-latin1.jsonl": "\n".join(rows[20:40]).encode()
        + '\n{"prompt": "q", "completion": "café"}\n'.encode("latin-1"),
        "c-torn.jsonl.gz": compressed[: len(compressed) // 2],
        "d-ids.jsonl": "\n".join(json.dumps({**json.loads(row), "id": "same"}) for row in rows[80:90]).encode(),
        "e-empty.jsonl": b"",
    }
    (tmp_path / "rows").mkdir()
    for name, data in files.items():
        (tmp_path / "rows" / name).write_bytes(data)
    baseline = _measure_peak_memory(tmp_path, folder, "small")
    long = '{"instruction": "' + "x" * 50_000_000 + '", "output": "y"}'
    (tmp_path / "rows" / "f-long.jsonl").write_text("\n".join([*rows[90:100], long, *rows[100:]]) + "\n")
    del long
    peak = _measure_peak_memory(tmp_path, folder, "out")
    assert peak.kilobytes - baseline.kilobytes < 15_000, "the 50 MB line was held in memory"
    entries = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    truncated = entries[2]
    assert entries == [
        {"file": "a-line7.jsonl", "line": 7, "why": "invalid JSON: Unterminated string starting at column 76"},
        {"file": "b-latin1.jsonl", "line": 21, "why": "not UTF-8: byte 0xe9 at position 34"},
        {
            "file": "c-torn.jsonl.gz",
            "line": truncated["line"],
            "why": "the compressed file is truncated",
        },
        {"file": "f-long.jsonl", "line": 11, "why": "longer than the 10,000,000 bytes of data_curation.max_line_bytes"},
    ]
    counts = artifact_folder.read(tmp_path / "out", "dataset").manifest.summary["rows"]
    assert counts["kept"] == 19 + 20 + (truncated["line"] - 1) + 10 + 66
    assert (counts["quarantined"], counts["in"]) == (4, counts["kept"] + 4)
    first_entry = "a-line7.jsonl:7: invalid JSON: Unterminated string starting at column 76"
    assert f"curate: 4 records are unreadable; the first is {first_entry}; see quarantine.jsonl" in peak.process.stderr
    assert "curate: e-empty.jsonl is empty" in peak.process.stderr
    assert (
        "curate: 9 rows have the id of an earlier row; a number was appended to the id, for example d-ids.jsonl:2 is now same-2"
        in peak.process.stderr
    )
    assert f"quarantined: 4 records, the first at {first_entry}" in peak.process.stdout
    assert "  all records: out/quarantine.jsonl" in peak.process.stdout


@dataclass(frozen=True)
class PeakMemory:
    kilobytes: int
    process: subprocess.CompletedProcess[str]


def _measure_peak_memory(workdir: Path, folder: Path, output: str) -> PeakMemory:
    """Curate, and return the peak memory of the process once all files are read."""
    child = start("curate", "rows", "-o", output, "-c", folder / "c.yaml", cwd=workdir)
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        if line == "curate: comparing rows\n":
            break
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{child.pid}/status").read_text())
    process = wait_for_end(child)
    assert process.returncode == 0, process.stderr
    return PeakMemory(
        int(peak), subprocess.CompletedProcess(process.args, 0, process.stdout, "".join(lines) + process.stderr)
    )


# --- whole runs


def read_events(workdir: Path) -> list[dict[str, Any]]:
    lines = [
        line
        for path in sorted(workdir.glob("runs/*/events.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    return [json.loads(line) for line in lines]


def read_records(workdir: Path) -> list[dict[str, Any]]:
    """Return the run.json of all runs of a workdir, oldest first."""
    return [json.loads((path / "run.json").read_text()) for path in sorted(workdir.glob("runs/*"))]


def check_cleanup(workdir: Path, case: str, stage: str) -> None:
    """Check that the newest run records its error and closed its MLflow run, without a lock or a partial artifact."""
    record = read_records(workdir)[-1]
    assert (record["status"], record["error"]["kind"], record["error"]["stage"]) == ("failed", ERRORS[case].kind, stage)
    assert not (workdir / "lock.json").exists()
    leftovers = [
        path.name
        for path in workdir.rglob(".*")
        if path.is_file() and path.name.startswith((".run.json", ".lock", ".reserve"))
    ]
    assert not leftovers
    for artifact in (workdir / "store").glob("*/manifest.json"):
        artifact_folder.read(artifact.parent)
    assert not list((workdir / "store" / "unfinished").glob("*/manifest.json"))
    with tempfile.TemporaryDirectory() as copy:  # SQLite cannot open a file of another mount namespace
        shutil.copy(workdir / "mlflow.db", copy)
        states = read_mlflow_states(f"sqlite:///{copy}/mlflow.db", record["mlflow_run_id"])
    assert states[record["mlflow_run_id"]] == "FAILED"
    assert "RUNNING" not in states.values()


def read_mlflow_states(uri: str, run_id: str | None = None) -> dict[str, str]:
    """Return the states of an MLflow run and its nested runs by ID, or of all runs."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment_ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiment_ids)
    selected = [
        r for r in runs if run_id is None or r.info.run_id == run_id or r.data.tags.get("mlflow.parentRunId") == run_id
    ]
    return {run.info.run_id: run.info.status for run in selected}


@pytest.fixture
def project(folder: Path, tmp_path: Path) -> Path:
    """Return a separate folder with the same rows and model."""
    for name in ("raw.jsonl", "tiny", "c.yaml"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


@pytest.mark.long
def test_run_with_a_missing_source_fails_and_cleans_up(project: Path) -> None:
    arguments = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[rwa.jsonl]"]
    values: dict[str, object] = {"source": project / "rwa.jsonl", "folder": project}
    check_text_error("missing file", wait_for_end(start(*arguments, cwd=project)), "resolve", **values)
    check_cleanup(project / "wd", "missing file", "resolve")
    error = refusal(2, *arguments[:-1], "fine_tuning.base_model=no-model", cwd=project)
    check_json_error("unknown model", error, "resolve", path=project / "no-model")
    check_cleanup(project / "wd", "unknown model", "resolve")
    arguments[-1] = "fine_tuning.base_model=embedded:gpt"
    check_text_and_json("unknown embedded model", *arguments, "--dry-run", cwd=project)


@pytest.mark.stress
def test_too_few_rows_are_reported_after_the_missing_triton_warning(
    project: Path, without_wheel: dict[str, str]
) -> None:
    (project / "few.jsonl").write_text("\n".join((project / "raw.jsonl").read_text().splitlines()[:2]))
    process = wait_for_end(
        start(
            "run",
            "-c",
            "c.yaml",
            "--workdir",
            "wd",
            "--set",
            "data_curation.sources=[few.jsonl]",
            cwd=project,
            **without_wheel,
        )
    )
    check_text_error("too few rows", process, "data_curation")
    check_cleanup(project / "wd", "too few rows", "data_curation")
    expected = ERRORS["no Triton wheel"]
    note = f"the model will be packaged unproven and cannot be promoted: {expected.message}. {expected.hint}"
    assert note in process.stderr.splitlines()[: process.stderr.splitlines().index("curate")]


@pytest.fixture
def without_wheel(tmp_path: Path) -> dict[str, str]:
    """Return variables for an environment without the nvidia-pytriton wheel."""
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'pytriton' else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
    )
    return _write_site(tmp_path / "without-wheel", code)


@pytest.fixture(scope="module")
def old_glibc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables for an environment with the C library of Debian 11."""
    patch = tmp_path_factory.mktemp("glibc") / "patch.py"
    patch.write_text("import platform\nplatform.libc_ver = lambda *_, **__: ('glibc', '2.31')\n")
    return {"PRELOADED_PATCH": str(patch), **preloaded_server.get_variables("PRELOADED_STEPS")}


def _write_site(site: Path, code: str) -> dict[str, str]:
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{site}:{ROOT}"}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run on a machine with an old glibc, and two refused runs in the same workdir."""

    folder: Path
    result: dict[str, Any]
    first: subprocess.CompletedProcess[str]
    first_pid: int
    second: list[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished_run(folder: Path, old_glibc: dict[str, str]) -> FinishedRun:
    rows = (folder / "raw.jsonl").read_text().splitlines()
    (folder / "line7.jsonl").write_text("\n".join([*rows[:6], rows[6][:-5], *rows[7:]]))
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[line7.jsonl]"]
    first = start(*run, cwd=folder, **old_glibc)
    wait_for(lambda: (folder / "wd" / "lock.json").exists(), first)
    second = [wait_for_end(start(*run, *options, cwd=folder, **old_glibc)) for options in ([], ["--json"])]
    process = wait_for_end(first)
    assert process.returncode == 0, process.stdout + process.stderr
    result = read_records(folder / "wd")[-1]["result"]
    return FinishedRun(folder, result, process, first.pid, second)


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_second_run_in_a_workdir_is_refused_and_the_first_finishes(finished_run: FinishedRun) -> None:
    values: dict[str, object] = {"pid": finished_run.first_pid, "folder": finished_run.folder / "wd"}
    check_text_error("two runs at once", finished_run.second[0], **values)
    check_json_error("two runs at once", json.loads(finished_run.second[1].stdout)["error"], **values)
    assert finished_run.second[1].returncode == 2
    assert finished_run.result["verdict"] == "accepted"
    assert len(read_records(finished_run.folder / "wd")) == 1
    assert not (finished_run.folder / "wd" / "lock.json").exists()


@pytest.mark.long
def test_invalid_json_line_is_reported_while_reading_and_at_the_end(finished_run: FinishedRun) -> None:
    entry = "line7.jsonl:7: invalid JSON: Unterminated string starting at column 76"
    assert f"1 record is unreadable: {entry}; see quarantine.jsonl" in finished_run.first.stderr.splitlines()
    assert f"quarantined: 1 record, the first at {entry}" in finished_run.first.stdout.splitlines()
    [quarantined] = (Path(finished_run.result["artifacts"]["dataset"]) / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(quarantined)["line"] == 7


@pytest.mark.long
def test_package_made_with_an_old_glibc_is_unproven_and_not_promoted(
    finished_run: FinishedRun, old_glibc: dict[str, str]
) -> None:
    expected = ERRORS["old glibc"]
    lines = finished_run.first.stderr.splitlines()
    assert (
        f"the model will be packaged unproven and cannot be promoted: {expected.message}. {expected.hint}"
        in lines[: lines.index("curate")]
    )
    assert finished_run.result["mlflow"]["aliases"] == ["candidate", "challenger"]
    repository = artifact_folder.read(Path(finished_run.result["artifacts"]["repository"]), "repository")
    assert (repository.manifest.summary["proof"], repository.manifest.summary["unproven_because"]) == (
        None,
        expected.message,
    )
    error = refusal(1, "promote", "tiny-helper", "--version", "1", "--workdir", "wd", cwd=finished_run.folder)
    check_json_error("unproven package", error)
    check_json_error("old glibc", refusal(1, "serve", repository.path, cwd=finished_run.folder, **old_glibc))


@pytest.mark.long
def test_serving_without_triton_is_refused_with_install_instructions(
    finished_run: FinishedRun, without_wheel: dict[str, str]
) -> None:
    repository = finished_run.result["artifacts"]["repository"]
    check_text_error(
        "no Triton wheel", wait_for_end(start("serve", repository, cwd=finished_run.folder, **without_wheel))
    )
    nowhere = finished_run.folder / "nowhere"
    check_json_error(
        "no serving environment",
        refusal(1, "serve", repository, cwd=finished_run.folder, TUNELINE_SERVING_ENV=str(nowhere)),
        folder=nowhere,
    )


@pytest.mark.triton
@pytest.mark.long
def test_port_in_use_is_reported_and_the_free_port_is_served(finished_run: FinishedRun) -> None:
    port = free_port()
    serve = [
        "serve",
        finished_run.result["artifacts"]["repository"],
        "--http-port",
        port,
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        check_text_and_json("port in use", *serve, cwd=finished_run.folder, port=port)
    server = start(*serve, "--json", cwd=finished_run.folder)
    assert server.stdout is not None
    ready = server.stdout.readline()
    server.send_signal(signal.SIGTERM)
    assert json.loads(ready)["openai_url"] == f"http://127.0.0.1:{port}/v1"
    assert wait_for_end(server).returncode == 0


@pytest.mark.long
def test_non_finite_loss_fails_the_run_with_step_and_learning_rate(finished_run: FinishedRun) -> None:
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--set", "data_curation.sources=[line7.jsonl]"]
    process = wait_for_end(start(*run, "--set", "fine_tuning.learning_rate=1e30", cwd=finished_run.folder))
    check_text_error("non-finite loss", process, "fine_tuning")
    check_cleanup(finished_run.folder / "wd", "non-finite loss", "fine_tuning")


# --- the tracking server


@pytest.mark.long
def test_unreachable_tracking_server_is_reported_before_any_work(project: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    run = ["run", "-c", "c.yaml", "--workdir", "wd", "--tracking-uri"]
    started = time.monotonic()
    check_text_and_json_of_runs("unreachable MLflow server", [*run, address], project, address=address)
    assert time.monotonic() - started < 120, "MLflow retried an unreachable server"
    assert not (project / "wd" / "store").exists()
    assert not (project / "wd" / "lock.json").exists()
    check_json_error("invalid tracking server", refusal(2, *run, "nonsense://x", cwd=project), address="nonsense://x")
    assert {record["status"] for record in read_records(project / "wd")} == {"failed"}


def check_text_and_json_of_runs(
    case: str, arguments: list[str], project: Path, stage: str = "", **values: object
) -> None:
    """Check the text and the JSON of a failed run, in sequence: the runs share a workdir."""
    check_text_error(case, wait_for_end(start(*arguments, cwd=project)), stage, **values)
    check_json_error(case, refusal(ERRORS[case].code, *arguments, cwd=project), stage, **values)


@pytest.mark.stress
def test_training_resumes_after_the_tracking_server_was_lost(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(tests.mlflow_server, "free_port", lambda: port)
    server_folder, address = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{port}"
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
    retry_settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with mlflow_server(server_folder):
        child = start(*run, cwd=project, **retry_settings)
        wait_for(lambda: any(e["event"] == "metrics" and e["step"] >= 6 for e in read_events(project / "wd")), child)
    check_text_error("lost MLflow server", wait_for_end(child), "fine_tuning", address=address)
    assert read_records(project / "wd")[-1]["status"] == "failed"
    assert not (project / "wd" / "lock.json").exists()
    with mlflow_server(server_folder):
        result = answer(*run, cwd=project)
        assert result["verdict"] == "accepted"
        assert set(read_mlflow_states(address).values()) == {"FINISHED", "KILLED"}, (
            "the next run did not close the MLflow run that lost its server"
        )
    model = artifact_folder.read(Path(result["artifacts"]["model"]), "model")
    assert model.manifest.summary["resumed_from"] >= 4


# --- disks


@dataclass(frozen=True)
class Disk:
    """A small file system; `enter` is the command prefix to use it, `view` its path for this process."""

    path: Path
    view: Path
    enter: list[str]

    def remount(self, options: str) -> None:
        subprocess.run(
            [*self.enter, "mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True
        )

    def fill(self, free_bytes: int = 0) -> None:
        """Fill the file system up to `free_bytes`."""
        with (self.view / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(file.tell() - free_bytes, 0))

    def empty(self) -> None:
        (self.view / "filler").unlink()


@contextmanager
def disk(path: Path, size: str, beside: Disk | None = None) -> Iterator[Disk]:
    """Mount a tmpfs of this size; without the right to mount, in a user and mount namespace, which disk `beside` shares."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    if beside and beside.enter:
        subprocess.run([*beside.enter, *mount], check=True, capture_output=True)
        yield Disk(path, Path(str(beside.view).removesuffix(str(beside.path)) + str(path)), beside.enter)
        return
    if (
        "TUNELINE_TEST_NAMESPACE" not in os.environ
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    ):
        try:
            yield Disk(path, path, [])
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    with _create_namespace(path.parent) as (pid, enter):
        process = subprocess.run([*enter, *mount], check=False, capture_output=True, text=True)
        if process.returncode:
            pytest.skip(
                f"this user may mount no file system, not even in a namespace of its own: {process.stderr.strip()}"
            )
        yield Disk(path, Path(f"/proc/{pid}/root{path}"), enter)


@contextmanager
def _create_namespace(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the ID of a process in a new namespace, and the command prefix to enter it in a folder."""
    holder = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # a line once the namespace exists, nothing if it was refused
        yield holder.pid, ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials", f"--wd={folder}"]
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.stress
def test_run_on_a_full_or_read_only_disk_fails_and_then_resumes(project: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "300k") as small, disk(tmp_path / "state", "8m", beside=small) as checkpoints:
        workdir, view = small.path / "wd", small.view / "wd"
        command = ["run", "-c", "c.yaml", "--workdir", workdir, "--set", "triton_packaging.prove=false"]

        def run(*options: str) -> subprocess.Popen[str]:
            return start(*command, *options, cwd=project, enter=small.enter, TUNELINE_STATE=str(checkpoints.path))

        # too small for MLflow's SQLite store: reported before any work
        check_text_error("full disk", wait_for_end(run()), folder=workdir)
        assert not (view / "lock.json").exists()
        assert read_records(view)[-1]["status"] == "failed"

        # read-only from the start
        small.remount("ro")
        check_text_error("read-only folder", wait_for_end(run()), folder=workdir)
        small.remount("rw,size=32m")

        # full in curation, with the store of MLflow on the same disk
        child = run("--json")
        wait_for(lambda: any(e["stage"] == "data_curation" for e in read_events(view)), child)
        small.fill()
        check_json_error("full disk", json.loads(wait_for_end(child).stdout)["error"], "data_curation", folder=workdir)
        small.empty()
        check_cleanup(view, "full disk", "data_curation")

        # full when a checkpoint is saved
        child = run()
        wait_for(lambda: any(e.get("name") == "training" for e in read_events(view)), child)
        checkpoints.fill(free_bytes=64 * 1024)
        check_text_error("full disk", wait_for_end(child), "fine_tuning", folder=checkpoints.path)
        checkpoints.empty()
        check_cleanup(view, "full disk", "fine_tuning")

        process = wait_for_end(run("--json"))
        assert process.returncode == 0, process.stdout + process.stderr
        assert json.loads(process.stdout)["verdict"] == "accepted"
        assert not list((view / "store" / "unfinished").glob("*"))


@pytest.mark.long
def test_curate_to_a_full_or_read_only_disk_fails_and_then_finishes(project: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "16k") as small:
        curate = ["curate", "raw.jsonl", "-o", small.path / "out", "-c", "c.yaml"]
        process = wait_for_end(start(*curate, cwd=project, enter=small.enter))
        check_text_error("full disk", process, folder=small.path / "out")
        assert not (small.view / "out" / artifact_folder.MANIFEST_FILENAME).exists()
        small.remount("ro,size=16m")
        process = wait_for_end(start(*curate, cwd=project, enter=small.enter))
        check_text_error("read-only folder", process)
        small.remount("rw")
        process = wait_for_end(start(*curate, "--json", cwd=project, enter=small.enter))
        assert process.returncode == 0, process.stdout + process.stderr
        assert json.loads(process.stdout)["rows"]["kept"] == 156


@pytest.mark.stress
def test_unwritable_workdir_is_reported(project: Path) -> None:
    (project / "shared").mkdir()
    (project / "shared").chmod(0o555)
    arguments = ["run", "-c", "c.yaml", "--workdir", "shared/wd", "--set", "data_curation.sources=[none.jsonl]"]
    check_text_and_json("folder of another user", *arguments, cwd=project, as_root=False, folder=project / "shared")
    (project / "shared").chmod(0o755)
    process = wait_for_end(start(*arguments, cwd=project, as_root=False))
    assert "does not exist" in process.stderr, "the run did not reach its sources"


# --- the page

# tests of these errors: tests/data_versioning and tests/engines
DATA_VERSIONING_ERRORS = {
    "… cannot be used: the S3 service … rejects the access key (InvalidAccessKeyId)": ("data_versioning", 1),
    "cannot reach the S3 service … for …: …": ("data_versioning", 1),
    "the data repository … cannot be reached: …": ("data_versioning", 1),
    "data_versioning.repository: the address of … contains a password; addresses are recorded with every version": (
        "configuration",
        2,
    ),
    "the data repository … accepted no push for 60 seconds; lock files: …: …": ("data_versioning", 1),
    "the tag … already points to dataset-v3; tags are never moved": ("data_versioning", 1),
    "the DVC remote … has missing or damaged objects: …": ("artifact_damaged", 1),
    "objects of … at … are missing from the DVC remote of … or damaged: …": ("artifact_damaged", 1),
}
COST_ERRORS = {  # the tests are in test_costs.py and in tests/fine_tuning/test_finetune.py
    "budget.hours is used up: … of …; no further stage starts": ("budget", 75),
    "budget.hours is used up: … of …; training was saved after step …": ("budget", 75),
    "the estimated cost exceeds the budget: budget.hours is …; the estimate is …": ("configuration", 2),
    "--since is 'yesterday'; expected a day as YYYY-MM-DD": ("usage", 2),
}
REMOTE_RUN_ERRORS = {  # the test is in test_runs.py
    "another run (process … on …, last heartbeat … seconds ago) holds …": ("usage", 2),
    "… runs on …, not on this machine": ("usage", 2),
}
REPRODUCTION_ERRORS = {  # the tests are in test_reproduction.py
    "… version … does not record its dataset: the tag tuneline.dataset_sha256 is missing": ("registry", 1),
    "… version … records the dataset digest …, but the dataset digest of its model is …": ("lineage", 1),
    "the base model of … version … is missing or has changed: …": ("lineage", 1),
    "the dataset … of … version … is no longer in any store and was not published": ("lineage", 1),
    "the data repository … has no published revision … of …": ("data_versioning", 1),
    "process … on … has locked …/reproduce/…": ("busy", 1),
}
EXPORT_ERRORS = {  # the tests are in test_lineage.py and tests/triton_packaging/test_gguf_export.py
    "the model of … version … was not found": ("lineage", 1),
    "the model is a … model; GGUF export supports …": ("configuration", 2),
    "GGUF export does not support the … model: …": ("configuration", 2),
    "GGUF export does not support the tokenizer: …. Supported: …": ("configuration", 2),
    "the export compares the GGUF file with the model, but …": ("configuration", 2),
    "--type requires --format gguf": ("usage", 2),
    "… version … is not exported because its lineage is damaged: …": ("lineage", 1),
    "the dataset of … version … was not found": ("lineage", 1),
    "… is an artifact; the format … requires a registered version": ("usage", 2),
    "… is in the folder of the … …; an additional file would invalidate the signature": ("output_occupied", 2),
}
REGISTRY_ERRORS = {  # the tests are in tests/model_registry, and in tests/engines with a server that requires authentication
    "version … of … cannot be promoted: its evaluation compared it with …, and the champion is …": ("registry", 1),
    "version … of … cannot be promoted: … earlier candidates failed on its test split, so its rules must hold with …% of "
    "their error probability, and at least one rule does not": ("registry", 1),
    "version … of … cannot be promoted: its … cannot be verified (…)": ("registry", 1),
    "version … of … cannot be promoted: its evaluation does not state what it measured; an earlier version of tuneline wrote it": (
        "registry",
        1,
    ),
    "version … of … cannot be promoted: its evaluation used dataset …; the model was trained on …": ("registry", 1),
    "version … of … cannot be promoted: the model was trained on … of its evaluated rows: …": ("registry", 1),
    "version … of … cannot be promoted: the … of its lineage is not in …": ("registry", 1),
    "version … of … cannot be promoted: its evaluation measured … on … of … test rows and states that it left out …": (
        "registry",
        1,
    ),
    "version … of … cannot be promoted: its evaluation measured … on … items; the configuration requires …": (
        "registry",
        1,
    ),
    "version … of … cannot be promoted: a rule on … holds in its evaluation, but …": ("registry", 1),
    "version … of … cannot be promoted: the configuration requires a rule as strict as …; its evaluation does not include one": (
        "registry",
        1,
    ),
    "version … of … cannot be promoted: policy entry … requires …; its evaluation …": ("registry", 1),
    "version … of … cannot be promoted: the regression suite (…) requires …; its evaluation …": ("registry", 1),
    "version … of … cannot be promoted: policy entry … allows …; its evaluation …": ("registry", 1),
    "version … of … cannot be promoted: policy entry … allows the licences …; …": ("registry", 1),
    "version … of … cannot be promoted: policy entry … limits the age of the evaluation; the history does not show its "
    "registration": ("registry", 1),
    "version … of … cannot be promoted: entry … of the history …, so the age of its evaluation is unknown": (
        "registry",
        1,
    ),
    "version … of … cannot be tested: …": ("registry", 1),
    "the policy changed before the alias moved: entry … of the history is in force": ("registry", 1),
    "model_registry.auto_promote is true, but the model cannot be promoted: …": ("configuration", 2),
    "model_registry.auto_promote is true, but evaluation.suite is 'none'; automatic promotion requires 'default'": (
        "configuration",
        2,
    ),
    "…: … is not a file of the regression suite": ("configuration", 2),
    "…: tasks.….kind: found '…'; expected one of …": ("configuration", 2),
    "the model … cannot be registered: …": ("registry", 1),
    "… cannot be rolled back to version … of …: …": ("registry", 1),
    "… in entry … of the history is invalid, because the entry was edited": ("registry", 1),
    "entry … of the history was deleted; it may have contained a policy or a move": ("registry", 1),
    "….json has changed since it was published: manifest_sha256 is …; its fields have the digest …": (
        "artifact_damaged",
        1,
    ),
    "version … of … is approved by …, and 1 more approval is needed": ("approval_needed", 1),
    "version … of … cannot be promoted: its … does not verify: …": ("registry", 1),
    "version … of … cannot be promoted: policy entry … requires signatures; …": ("registry", 1),
    "entry … of the history does not verify: …": ("registry", 1),
    "entry … of the history is dated …, before an earlier entry of …": ("registry", 1),
    "the history lacks entry …, which its checkpoint records: the history was truncated": ("registry", 1),
    "entry … of the history differs from its checkpoint: the history was rewritten": ("registry", 1),
    "the checkpoint of the history does not verify: …": ("registry", 1),
    "the history of … is signed, and this process has no signing key": ("registry", 1),
    "entry … of the history of … is recorded, but its checkpoint was not written: …": ("registry", 1),
    "verify requires a trusted key": ("usage", 2),
    "TUNELINE_SIGNING_KEY_FILE: …: found …; expected an elliptic-curve key on P-256, P-384 or P-521 in PEM format": (
        "configuration",
        2,
    ),
    "TUNELINE_SIGNING_KEY_FILE: … has mode …, so other users can read or change the private key; expected 0600 or 0400": (
        "configuration",
        2,
    ),
    "TUNELINE_SIGNING_KEY_FILE: the pkcs11: URI has …; expected …": ("configuration", 2),
    "TUNELINE_SIGNING_KEY_FILE: the PKCS#11 module … does not exist": ("configuration", 2),
    "TUNELINE_SIGNING_KEY_FILE: the PIN file … (pin-source) cannot be read": ("configuration", 2),
    "TUNELINE_SIGNING_KEY_FILE: the token … in … cannot be used: …": ("configuration", 2),
    "TUNELINE_SIGNING_KEY_FILE: the key in the HSM is not on a supported curve; expected P-256, P-384 or P-521": (
        "configuration",
        2,
    ),
    "the HSM cannot sign: …": ("engine_missing", 1),
    "this process has no signer": ("usage", 2),
    "TUNELINE_SIGNING_KEY_FILE and TUNELINE_SIGNING_SIGSTORE_FILE are both set; expected one of them": (
        "configuration",
        2,
    ),
    "…: … cannot be read: …": ("configuration", 2),
    "…: … is not a Sigstore client trust configuration (…) with an authority and a transparency log": (
        "configuration",
        2,
    ),
    "TUNELINE_SIGNING_SIGSTORE_FILE is set, but neither TUNELINE_SIGNING_TOKEN_FILE nor TUNELINE_SIGNING_TOKEN has a token": (
        "configuration",
        2,
    ),
    "TUNELINE_SIGNING_TOKEN_FILE: …: the file cannot be read": ("configuration", 2),
    "…: the token cannot be used: …; expected a valid OpenID Connect token for the audience sigstore": (
        "configuration",
        2,
    ),
    "TUNELINE_TRUST refuses the identity of this process: …": ("configuration", 2),
    "the Sigstore in … cannot sign: …": ("engine_missing", 1),
    "…: the identity … is listed twice": ("configuration", 2),
    "… cannot be signed: …": ("signature", 1),
    "the bundle in … is unreadable: …": ("artifact_damaged", 1),
    "… has no bundle.json": ("usage", 2),
    "the trust files … list no public key, certificate authority or identity": ("configuration", 2),
    "the repository in … does not verify: …": ("signature", 1),
    "the policy or the approvals changed during the promotion: …": ("approval_needed", 1),
    "… is not an approver": ("approval_needed", 1),
    "the MLflow server … stopped answering; still failing after 60 seconds: …": ("engine_missing", 1),
    "MLflow at … answers read requests but not write requests; still failing after 60 seconds: …": (
        "engine_missing",
        1,
    ),
    "MLflow at … cannot write: its database is read-only": ("not_writable", 1),
    "MLflow at … rejected the credentials: …": ("registry", 1),
    "MLflow at … denied the request: …": ("registry", 1),
}
PACKAGE_ERRORS = {  # the tests are in tests/triton_packaging, tests/engines and tests/pipelines/test_config.py
    "--adapter is …; expected NAME=MODEL_DIR": ("configuration", 2),
    "--adapter requires triton_packaging.backend vllm and attached adapters; the configuration sets …": (
        "configuration",
        2,
    ),
    "--adapter …: its base model is … (…); expected … (…)": ("input", 1),
    "the adapter … has …, which vLLM does not support": ("input", 1),
    "triton_packaging.adapter is merged, but an adapter of type … cannot be merged into weights": (
        "configuration",
        2,
    ),
    "the model's adapter is of type …; vLLM supports only LoRA adapters": ("configuration", 2),
    "evaluation.quantization is …, but triton_packaging.quantization is …; expected equal values": ("configuration", 2),
    "evaluation.engine is vllm, which does not support the … weights of triton_packaging.quantization": (
        "configuration",
        2,
    ),
    "evaluation.quantization is …, but the candidate …; expected …": ("configuration", 2),
    "triton_packaging.quantization is …, with …; expected …": ("configuration", 2),
    "triton_packaging.quantization is …, but only … of the weights of a … model are in linear layers; expected at least …": (
        "configuration",
        2,
    ),
    "triton_packaging.quantization is …, but a … model reads the weights of linear layers directly": (
        "configuration",
        2,
    ),
    "triton_packaging.quantization is …, but the … model has quantization_config in config.json; expected …": (
        "configuration",
        2,
    ),
    "… weights require llm-compressor, but …": ("configuration", 2),
    "triton_packaging.quantization is …, but linear layers of the … model have … inputs; expected multiples of …": (
        "configuration",
        2,
    ),
    "llm-compressor failed with …: …": ("quantization", 1),
    "calibration results in the … weights …; the evaluation measured …": ("quantization", 1),
    "… is not empty and not an environment of tuneline": ("configuration", 2),
    "the training split of … has no row with an answer; calibration requires at least 1": ("input", 1),
    "the … model has no linear layer to quantize; expected at least one": ("quantization", 1),
    "triton_packaging.quantization is set, but the dataset that the model was trained on is not available": (
        "configuration",
        2,
    ),
    "packaging a base model with triton_packaging.quantization requires a dataset to measure the quantized model": (
        "configuration",
        2,
    ),
    "the … model has a loss of … nats per token on … test rows; the unquantized model has …. The increase is …": (
        "quantization",
        1,
    ),
    "the … model has a loss of … on test row …; expected a finite number": ("quantization", 1),
    "the test split has … rows; triton_packaging.quantization requires at least …": ("input", 1),
    "the test split of … has … rows with an answer; quantization requires at least …": ("input", 1),
    "fine_tuning.adaptation: virtual tokens (…) can neither be merged into weights nor be served by vLLM": (
        "configuration",
        2,
    ),
    "triton_packaging.weights is referenced, but merged weights exist only in the package": (
        "configuration",
        2,
    ),
    "triton_packaging.weights is 'referenced', but only the package would contain the merged weights": (
        "configuration",
        2,
    ),
    "fine_tuning.lora.dora is true, but vLLM does not support DoRA in an attached adapter": ("configuration", 2),
    "the package refers to …, which is missing or has changed: …": ("artifact_damaged", 1),
    "the package cannot be published: …": ("engine_missing", 1),
}
# The tests are in tests/common/test_weight_integrity.py, test_tokenization_check.py and test_code_sandbox.py, in
# test_chaining.py, test_mixing.py, test_rewards.py, test_judge_rewards.py, test_long_rows.py and test_recipe_defaults.py of
# tests/fine_tuning, and in tests/pipelines/test_customization_chain.py and test_compiled_chain.py.
MODEL_ERRORS = {
    "fine_tuning.base_model: … of … has … bytes; expected at most …": ("configuration", 2),
    "fine_tuning.base_model: the chat template of … takes more than 30 seconds for short conversations": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: the chat template of … needs more than 2 GiB of memory": ("configuration", 2),
    "fine_tuning.base_model: the chat template of … renders a short conversation as … characters": ("configuration", 2),
    "fine_tuning.base_model: the tokenizer of … takes more than 30 seconds for texts of 10,000 characters": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: the tokenizer of … fails for a text of 10,000 characters that repeats …: …": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: the tokenizer of … ends the process with code …: …": ("configuration", 2),
    "the model's tokenizer fails for a text of … characters: …": ("input", 1),
    "fine_tuning.base_model: … of … has … bytes; expected …": ("configuration", 2),
    "fine_tuning.base_model: … of … is not a safetensors file (… bytes)": ("configuration", 2),
    "fine_tuning.base_model: … of … refers to '…', which is not a safetensors file of the model": ("configuration", 2),
    "fine_tuning.base_model: … of … has no tensor '…', which … lists": ("configuration", 2),
    "fine_tuning.base_model: … of … has no weight_map of tensor and file names": ("configuration", 2),
    "fine_tuning.base_model: config.json of … refers to the weights '…', which are not a safetensors file of the model": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: … contains adapter_config.json, which refers to another base model": ("configuration", 2),
    "fine_tuning.base_model: the adapter of type … in … cannot be merged into its base model": ("configuration", 2),
    "… tunes the model of …, whose adaptation … cannot be merged into a base model": ("configuration", 2),
    "model_registry.name is … in … and in …, of which one trains a reward model and the other a language model": (
        "configuration",
        2,
    ),
    "configurations is an empty list; expected texts of customization.yaml": ("configuration", 2),
    "configurations[…] is …; expected the text of a customization.yaml": ("configuration", 2),
    "configurations trains …; the pipeline is compiled for …": ("configuration", 2),
    "--pipeline … has … configurations; only --pipeline customization accepts several": ("usage", 2),
    "fine_tuning.grpo.rewards[…].model: … is not a reward model": ("configuration", 2),
    "fine_tuning.grpo.rewards[…].model: the tokenizer or chat template of … differs from that of the base model": (
        "configuration",
        2,
    ),
    "fine_tuning.grpo.rewards has a reward with model previous, but no earlier customization trains a reward model": (
        "configuration",
        2,
    ),
    "the reward … cannot score the row …: the row …": ("input", 1),
    "generated code cannot be isolated on this machine: …": ("configuration", 2),
    "the sandbox for generated code failed to start in two attempts: …": ("interrupted", 75),
    "the judge of the rewards at … cannot be used: …": ("engine_missing", 1),
    "the judge of the rewards at … stopped answering: …": ("interrupted", 75),
    "the judge of the rewards at … rejects all … requests: …": ("interrupted", 75),
    "the judge of the rewards has used … tokens; the limit is … for …": ("budget", 75),
    "fine_tuning.distillation.teacher: … has …; the loss compares the probabilities of equal tokens": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: … is a reward model, which does not predict tokens": ("configuration", 2),
    "the model in … is a reward model, which scores answers but does not generate text": ("usage", 2),
    "evaluation: the task … of kind … cannot measure a reward model, which neither answers nor predicts tokens": (
        "configuration",
        2,
    ),
    "evaluation: the task … of kind reward measures reward models only": ("configuration", 2),
    "the champion of … is a …; objective … trains a …": ("configuration", 2),
    "…: the context of … is … tokens; rows of fine_tuning.max_length with an answer have up to …": ("configuration", 2),
    "fine_tuning.grpo.rollouts.engine: … cannot generate with …: …": ("configuration", 2),
    "fine_tuning.lora.target_modules: objective distill cannot train an adapter of the output layer": (
        "configuration",
        2,
    ),
    "fine_tuning.objective: transformers cannot give models of type … an output layer for rewards": (
        "configuration",
        2,
    ),
    "the reward model in … returns a non-finite reward for … of …": ("training", 1),
    "fine_tuning.initial_adapter: … is not a tuned model with an adapter": ("configuration", 2),
    "fine_tuning.initial_adapter: the base model of … has the digest …; expected that of fine_tuning.base_model, …": (
        "configuration",
        2,
    ),
    "fine_tuning.initial_adapter: the tensor … has the shape …; expected …, as in the recipe": ("configuration", 2),
    "fine_tuning.initial_adapter: … of the adapter is …; expected …, as in the recipe": ("configuration", 2),
    "fine_tuning.initial_adapter: the digest of … is …; expected …": ("artifact_damaged", 1),
    "… sets fine_tuning.initial_adapter, which must match the base model, but not fine_tuning.base_model": (
        "configuration",
        2,
    ),
    "fine_tuning.base_model: the token '…' of … has the ID …, and the model has … embeddings": ("configuration", 2),
    "fine_tuning.mixing_…: no source of the training rows matches …; sources: …": (
        "configuration",
        2,
    ),
    "fine_tuning.mixing_weights has no weight for the sources …": ("configuration", 2),
    "fine_tuning.mixing_…: each source that … matches has a more specific pattern: …": ("configuration", 2),
    "fine_tuning.mixing_…: the training rows have no sources; expected the column source": ("configuration", 2),
    "fine_tuning.mixing_weights: each source with an answer to learn has the weight 0: …": ("configuration", 2),
    "fine_tuning.mixing_repetitions: an epoch has … rows; expected at least 1": ("configuration", 2),
    "fine_tuning.rope_scaling: the model has …; expected unscaled rotary positions, the same in all layers": (
        "configuration",
        2,
    ),
    "training does not fit into memory: the estimate for … of … tokens is … GB (…); each process has … GB": (
        "configuration",
        2,
    ),
    "the weights in … do not match its config.json: …": ("configuration", 2),
}
# The tests are in test_curation_{kinds,sources,quality_scores,documents}.py of tests/data_curation, and in
# tests/engines/test_ocr.py.
CURATION_ERRORS = {
    "data_curation.sources: reading … requires the package …, which is not installed": ("engine_missing", 1),
    "data_curation.documents.ocr: tesseract requires the program tesseract, which is not installed": (
        "engine_missing",
        1,
    ),
    "data_curation.documents.ocr_languages: '…' is not installed; installed: …": ("configuration", 2),
    "data_curation.sources: '…' contains bytes that are not UTF-8": ("configuration", 2),
    "the sources mix row kinds: …; … of the rows are not of kind …; data_curation.max_other_kind_share is …": (
        "input",
        1,
    ),
    "data_curation.quality_scores.classifier.… contains … different rows; expected at least 20": ("input", 1),
    "data_curation.quality_scores.perplexity.enabled is true, but … is not installed": ("engine_missing", 1),
    "data_curation.quality_scores.judge.credentials: the environment variable … is not set": ("configuration", 2),
    "the judge at … returned no score: …": ("engine_missing", 1),
    "the judge at … returned no score for … of … rows; first reason: …": ("engine_missing", 1),
}
PLATFORM_ERRORS = {  # the test is in test_platform_check.py
    "the environment does not match platform.yaml: …": ("platform", 1),
}
SIZING_ERRORS = {  # the tests are in test_sizing.py and test_cluster_size.py
    "--gpu '…' is not a known accelerator": ("usage", 2),
    "the memory of --gpu … is not known": ("usage", 2),
    "--precision fp8: … has no fp8 rate": ("usage", 2),
    "--model '…' is not a known model, a config.json or a number of parameters": ("usage", 2),
    "…: missing or invalid …; expected a whole number from 1 to …": ("usage", 2),
    "--gpu: … GPUs cannot form groups of … (tensor × pipeline × context parallelism)": ("usage", 2),
    "--global-batch … is too small for … data-parallel processes": ("usage", 2),
    "the training run does not fit on …: …": ("usage", 2),
    "the run cannot finish in … hours: …": ("usage", 2),
    "--deadline-hours requires the amount of data": ("usage", 2),
    "--demand '…' is not COUNTxMODEL": ("usage", 2),
    "--demand … requires the amount of data": ("usage", 2),
    "--demand and --model cannot be combined": ("usage", 2),
    "… requires --demand": ("usage", 2),
    "--queue is '…'; expected …": ("usage", 2),
    "--nodes …: a training run needs … GPUs, but a node has …": ("usage", 2),
    "no cluster of up to … nodes meets the demand with a P90 wait of at most … hours": ("usage", 2),
    "--storage-node '…' is not a known storage node": ("usage", 2),
    "--storage-node …: … TB and … GB/s need more than … nodes": ("usage", 2),
    "--mean-length … exceeds the longest row, … tokens": ("usage", 2),
    "--concurrency …: weights and KV cache need … GB, more than 64 GPUs of … have": ("usage", 2),
}
STORAGE_PROBE_ERRORS = {  # the tests are in tests/pipelines/storage_probe
    "no partner joined … within 300 seconds": ("partner", 1),
    "no leader of this pair is in … after 300 seconds": ("partner", 1),
    "the partner did not send … within … seconds": ("partner", 1),
    "no heartbeat from the partner for … seconds": ("partner", 1),
    "the partner exited and removed the probe's folder": ("partner", 1),
    "the partner exited: …": ("partner", 1),
    "… is not an existing folder": ("usage", 2),
    "--pair requires rank 0 or 1; the rank of this host is not set": ("usage", 2),
    "--pair '…' is not a valid name of a pair": ("usage", 2),
    "--size '…' is not a size of at least 1 MiB": ("usage", 2),
}
STORAGE_BENCHMARK_ERRORS = {  # the tests are in tests/pipelines/storage_benchmark
    "host … failed: …": ("partner", 1),
    "host … ended, or sent no heartbeat for … seconds": ("partner", 1),
    "host 0 ended and removed the benchmark's folder": ("partner", 1),
    "… of … hosts joined … within … seconds": ("partner", 1),
    "no leader of this group is in … after … seconds": ("partner", 1),
    "the hosts of the benchmark have different options": ("usage", 2),
    "--group requires a rank below the number of hosts; rank: …, hosts: …": ("usage", 2),
    "--hosts and --rank require --group": ("usage", 2),
    "--group '…' is not a valid name of a group": ("usage", 2),
    "no measurement is selected": ("usage", 2),
    "--mix requires --accelerators, --checkpoint and --readers": ("usage", 2),
    "--fio requires --accelerators, and records of at most 4 MiB": ("usage", 2),
    "fio is not installed": ("engine_missing", 1),
    "fio failed: …": ("failed", 1),
    "… of … rank processes started: …": ("failed", 1),
    "a rank process ended with exit code …": ("failed", 1),
    "--workload '…' is neither a workload nor a file": ("usage", 2),
    "…: dataset.record_length is missing": ("configuration", 2),
    "…: train.computation_time is …; expected a number of seconds above 0 and at most …": ("configuration", 2),
    "… has … per accelerator with …; expected more than …, because the warm-up is not measured": ("usage", 2),
    "the benchmark writes … GB; expected at most …% of the … GB free in …": ("usage", 2),
    "--requirement … is not the output of tuneline size --json": ("usage", 2),
    "--requirement … cannot be read: …": ("usage", 2),
}
JOB_ERRORS = {  # the tests are in tests/common/test_kubernetes_jobs.py, test_slurm*.py, test_launch_settings.py and tests/engines
    "sbatch is not installed on this machine": ("engine_missing", 1),
    "sbatch: …": ("launcher", 1),
    "Slurm has not answered for 3600 s: …": ("engine_missing", 1),
    "slurmrestd does not support --… of the batch script. Supported options: …": ("configuration", 2),
    "launcher.slurm.rest: the server at … is not slurmrestd: …": ("configuration", 2),
    "launcher.slurm.rest: the certificate of … is not trusted: …": ("configuration", 2),
    "SLURM_JWT contains no token": ("access", 1),
    "the token in … has expired (…)": ("access", 1),
    "the token in … is not accepted by Slurm at …: …": ("access", 1),
    "squeue --json printed invalid JSON: …": ("configuration", 2),
    "launcher.slurm.template: … cannot be read: …": ("configuration", 2),
    "launcher.slurm.template: …: @NODE@ is missing": ("configuration", 2),
    "fine_tuning.processes is 3; expected a multiple of launcher.nodes (2)": ("configuration", 2),
    "--launcher …: …": ("usage", 2),
    "TUNELINE_LAUNCHER: …": ("configuration", 2),
    "no permission to create trainjobs: …": ("access", 1),
    "the API server does not accept the credentials: …": ("access", 1),
    'the cluster has no such namespace: namespaces "…" not found': ("configuration", 2),
    "the quota of the namespace does not allow another job: …": ("access", 1),
    "the namespace is being deleted: …": ("access", 1),
    "the cluster has no resource kind TrainJob": ("engine_missing", 1),
    "no Kubernetes cluster is configured: …": ("engine_missing", 1),
    "the API server does not answer (…); still failing after 3600 seconds": ("engine_missing", 1),
    "the cluster rejects the job: …": ("configuration", 2),
    "launcher.trainjob.image is empty; a trainjob requires a value": ("configuration", 2),
    "… is not on the volume …, which is mounted at … (launcher.trainjob.mount)": ("configuration", 2),
    "… is being deleted, but has not terminated within … s": ("busy", 1),
}
GARBAGE_COLLECTION_ERRORS = {  # the tests are in tests/pipelines/garbage_collection/test_command.py
    "the workdir … does not exist": ("usage", 2),
    "the registry contains no model version, but the store … holds … artifacts": ("usage", 2),
    "the data repository … does not exist, but the store … holds … datasets": ("usage", 2),
    "artifacts in the store … were built from revisions of another data repository than the configured one: …": (
        "usage",
        2,
    ),
    "--older-than … is not an age; expected a number with h, d or w": ("usage", 2),
    "--older-than … is too short to detect data in use; expected at least 1h": ("usage", 2),
    "--kind … does not exist": ("usage", 2),
    "… is neither an artifact in the store nor a run": ("usage", 2),
    "… is not pinned": ("usage", 2),
}
DEPLOYMENT_ERRORS = {  # the tests are in tests/pipelines/test_deployment.py
    "… version … is not served: …": ("registry", 1),
    "the answer over … differs from the proof": ("smoke_test", 1),
    "… serves …@…, not …@…": ("failed", 1),
    "the Triton server at … does not answer: …": ("engine_missing", 1),
    "'…' is not a valid model name for Triton": ("usage", 2),
    "version … cannot be installed now; --watch retries the installation: …": ("failed", 1),
    "…@… no longer points to version …": ("failed", 1),
}
CAPTURE_ERRORS = {  # the tests are in tests/pipelines/capture/test_traffic_commands.py
    "the capture file … cannot be read: …": ("configuration", 2),
    "the capture file … is not a mapping of settings": ("configuration", 2),
    "subject.key_file … cannot be read: …": ("configuration", 2),
    "subject.key_file … has … bytes; expected at least 16": ("configuration", 2),
    "group … does not exist on this machine": ("configuration", 2),
    "subject.source is none: the captured rows have no subject": ("usage", 2),
    "no captured answer has the ID …": ("input", 1),
    "no traffic of the model … was captured in …": ("input", 1),  # from here on in tests/pipelines/test_drift.py
    "traffic of … models was captured: …": ("usage", 2),
    "no prompt was captured on the reference days …": ("input", 1),
    "the reference … has … prompts…; expected at least …": ("input", 1),
    "no window after the reference is complete": ("input", 1),
    "the captured rows do not record the digest of their model": ("input", 1),
    "the model … of the captured rows is not in …": ("input", 1),
    "… contains no model with safetensors files and tokenizer.json": ("configuration", 2),
    "the captured rows in … cannot be read: …": ("input", 1),
    "--subject is empty": ("usage", 2),
    "… is not a feedback file": ("input", 1),
    "the tombstone … is damaged": ("input", 1),
    "--workdir: … does not exist": ("input", 1),
    "no captured answer in … yields a training row": ("input", 1),  # from here on in capture/test_traffic_export.py
    "… contains an export of other rows": ("output_occupied", 2),
    "… is not an export of captured traffic": ("input", 1),
    "the exported rows in … have changed": ("input", 1),
    "… has no …, which the objective … requires": ("input", 1),
    "no subject is held back: …": ("input", 1),  # from here on in tests/pipelines/retraining
    "no trigger is set; …": ("usage", 2),
    "--feedback is not set": ("usage", 2),
    "--shadow-days requires --feedback": ("usage", 2),
    "--drift: … is not the result of a drift check": ("input", 1),
    "… is damaged": ("input", 1),
    "fine_tuning.objective is …, but captured traffic has no rows for this objective": ("configuration", 2),
    "the feedback on … has the time …; expected a time such as …": ("input", 1),
    # From here on in tests/pipelines/capture/test_traffic_bucket.py.
    "… has captured rows that are not in …": ("configuration", 2),
    "… keeps versions of deleted objects; …": ("configuration", 2),
    "the versioning of … could not be checked: …": ("configuration", 2),
    "process … on … is changing the traffic in …": ("busy", 1),
    "the lock … was not renewed for … seconds; …": ("busy", 1),
    "… has … bytes after the upload; expected …": ("engine_missing", 1),
}
COMPARISON_ERRORS = {  # the tests are in tests/pipelines/test_compare.py and test_status.py
    "… has no report: its state is …": ("usage", 2),
    "a comparison requires two runs; found …": ("usage", 2),
    "… and … are the same run, …": ("usage", 2),
}
EXPLANATION_ERRORS = {  # the tests are in tests/pipelines/explanation
    "expected one of --prompt, --messages and --from-traffic; found …": ("usage", 2),
    "--prompt is empty": ("usage", 2),
    "--answer is empty": ("usage", 2),
    "--messages: … cannot be read: …": ("input", 1),
    "--messages: … is not JSON: …": ("input", 1),
    "--messages: … contains no list of messages": ("input", 1),
    "--messages: …: message … is not a message with a role (system, developer, user, assistant, tool) and text content": (
        "input",
        1,
    ),
    "--messages: …: tools is not a list of JSON objects": ("input", 1),
    "--messages: … ends with a message of the role …; expected a user message that is not empty": ("input", 1),
    "the prompt has … tokens; the model's context has …": ("input", 1),
    "the prompt and the answer have … tokens; the model's context has …": ("input", 1),
    "the answer is empty": ("input", 1),
    "the log-probability of the answer is …, not a finite number": ("input", 1),
    "the captured traffic in … has no answer …": ("input", 1),
    "the subject of the answer … was erased": ("input", 1),
    "the captured request of … has no messages, or more than one answer": ("input", 1),
    "the model … is not a registered version": ("usage", 2),
    "the answer was written by the model … (… version …); … is …": ("usage", 2),
    "the model … records no training dataset": ("input", 1),
    "the training dataset … of the model is not in the artifact store: it was erased, or is stored elsewhere": (
        "input",
        1,
    ),
    "no scored training row of … has a token to learn within … tokens": ("input", 1),
    "training rows of the objective … are not supported; expected sft or text": ("configuration", 2),
    "training rows of the adaptation … are not supported: its virtual tokens have no low-rank gradients; expected lora, qlora, ia3 or full": (
        "configuration",
        2,
    ),
    "training rows of this architecture are not supported: it has neither an adapter nor numbered layers": (
        "configuration",
        2,
    ),
    "the gradients of … rows need an estimated … GB, but … GB are free (GB by part: …)": ("configuration", 2),
}

SYNTHESIS_ERRORS = {  # the tests are in tests/pipelines/synthesis
    "--max-cost requires a price": ("usage", 2),
    "--probe requires --dry-run": ("usage", 2),
    "--judge-model and --judge-key require --judge": ("usage", 2),
    "--template: '…' is neither a template nor a readable file: …": ("usage", 2),
    "--template: …: …": ("usage", 2),
    "--template: … and … write rows of different kinds, which one dataset cannot hold": ("usage", 2),
    "--template: … and … read different sources": ("usage", 2),
    "--teacher: url …": ("usage", 2),
    "--teacher-model is not set, and the endpoint lists … models: …": ("usage", 2),
    "--teacher-model and --teacher-key apply to an endpoint; --teacher is '…'": ("usage", 2),
    "--teacher-key: the environment variable … is not set": ("configuration", 2),
    "the teacher at … does not answer: …": ("engine_missing", 1),
    "the teacher at … rejects the key: …": ("engine_missing", 1),
    "the teacher at … rejects the request: …": ("engine_missing", 1),
    "the teacher at … stopped answering: …": ("interrupted", 75),
    "--max-cost is …; … is spent, and the next request may exceed the limit; … answers are stored": ("interrupted", 75),
    "--max-tokens is …; … tokens are used, and the next request may exceed the limit; … answers are stored": (
        "interrupted",
        75,
    ),
    "the sources contain no passage: …": ("input", 1),
    "the sources contain no prompt: …": ("input", 1),
    "no answer of … passes the checks: …": ("input", 1),
    "another process is writing …/answers.jsonl": ("busy", 1),
    "… of the synthesis in … is missing, or has changed since it was published": ("artifact_damaged", 1),
    "… is not empty and was not written by tuneline synthesize": ("output_occupied", 2),
}


def test_errors_page_lists_every_error_with_kind_and_code() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8").partition("## All kinds")[0]
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    documented = {row[0].strip("`"): (row[1].strip("`"), int(row[2])) for row in rows}
    expected = {re.sub(r"\{\w+\}", "…", error.message): (error.kind, error.code) for error in ERRORS.values()}
    assert documented == {
        **expected,
        **CAPTURE_ERRORS,
        **COMPARISON_ERRORS,
        **COST_ERRORS,
        **CURATION_ERRORS,
        **DATA_VERSIONING_ERRORS,
        **REMOTE_RUN_ERRORS,
        **REPRODUCTION_ERRORS,
        **EXPLANATION_ERRORS,
        **EXPORT_ERRORS,
        **REGISTRY_ERRORS,
        **PACKAGE_ERRORS,
        **DEPLOYMENT_ERRORS,
        **GARBAGE_COLLECTION_ERRORS,
        **JOB_ERRORS,
        **MODEL_ERRORS,
        **PLATFORM_ERRORS,
        **SIZING_ERRORS,
        **STORAGE_PROBE_ERRORS,
        **STORAGE_BENCHMARK_ERRORS,
        **SYNTHESIS_ERRORS,
    }
    assert all(meaning and action for _, _, _, meaning, action in rows)
