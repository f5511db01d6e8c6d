"""The command line: JSON objects, exit codes and error messages.

Long tier: several registry commands one after the other.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from tests.pipelines.command import (
    COMMAND,
    ROOT,
    answer,
    answer_in_process,
    environment,
    refusal,
    run_in_process,
    tuneline,
)
from tests.pipelines.processes import hear_interrupts
from tests.pipelines.project import write_rows
from tests.tiny import tiny_model

SETTINGS = [
    "data_curation.near_duplicate_threshold=0.95",
    "data_curation.answer_min_words=1000",
    "data_curation.fractions={train: 0.6, validation: 0.1, test: 0.3}",
    "fine_tuning.max_steps=30",
    "fine_tuning.batch_size=4",
    "fine_tuning.learning_rate=5e-3",
    "fine_tuning.base_model=tiny",
    "evaluation.generations=0",
    "evaluation.suite=none",
    "triton_packaging.prove=false",
]
HEAVY_LIBRARIES = {"torch", "transformers", "mlflow", "daft", "dvc", "kfp", "numpy", "pyarrow"}
SETS = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell")
    tiny_model(path / "tiny")
    write_rows(path / "raw.jsonl")
    return path


@pytest.fixture(scope="module")
def stage_results(folder: Path) -> dict[str, Any]:
    """Run each stage as a command and return its JSON object.

    Curation and training run in child processes; `test_interrupted_command_exits_75_with_an_error_object` evaluates in
    one, and the documented commands of the long tier package and register in them.
    """
    results: dict[str, Any] = {"curate": answer("curate", "raw.jsonl", "-o", "dataset", *SETS, cwd=folder)}
    results["finetune"] = answer("finetune", "dataset", "-o", "model", *SETS, cwd=folder)
    results["evaluate"] = answer_in_process(
        "evaluate", "model", "--dataset", "dataset", "-o", "evaluation", *SETS, cwd=folder
    )
    results["package"] = answer_in_process("package", "model", "-o", "repository", *SETS, cwd=folder)
    options = ["--model", "model", "--evaluation", "evaluation", "--repository", "repository", "--name", "by-hand"]
    results["register"] = answer_in_process("register", *options, cwd=folder)
    return results


def test_help_is_printed_within_a_second(folder: Path) -> None:
    tuneline("--help", cwd=folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = tuneline("--help", cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0
    assert "Customize a large language model" in process.stdout
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_seconds < 3, "DESIGN asks for one second; where other programs share the cores, CPU time triples at most"


def test_configuration_error_imports_no_heavy_library(folder: Path) -> None:
    code = "import sys; sys.argv = ['tuneline', 'run', '--set', 'seed=x']\nfrom pipelines.cli.main import main\ntry: main()\n"
    code += "except SystemExit: pass\n"
    code += f"heavy = {HEAVY_LIBRARIES} & set(sys.modules)\nassert not heavy, heavy"
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--workdir", "first-line"], "starting the run"),
        (["finetune", "nowhere", "-o", "x"], "finetune: reading the dataset"),
        (["evaluate", "nowhere", "--dataset", "nowhere", "-o", "x"], "evaluate: reading the model"),
        (["package", "nowhere", "-o", "x"], "package: reading the model"),
        (["chat", "name@champion"], "chat: resolving name@champion"),
    ],
)
def test_first_step_is_reported_before_heavy_libraries_are_imported(
    folder: Path, arguments: list[str], line: str
) -> None:
    code = f"""
import os, sys

class FirstLine:
    def write(self, text):
        heavy = {HEAVY_LIBRARIES} & set(sys.modules)
        print(text.strip(), *sorted(heavy), flush=True)
        os._exit(0)

    def isatty(self):
        return False

sys.argv = {["tuneline", *arguments]}
sys.stderr = FirstLine()
from pipelines.cli.main import main
main()
"""
    command = [sys.executable, "-P", "-c", code]
    process = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    assert process.stdout == f"{line}\n"


def test_curate_counts_every_row(stage_results: dict[str, Any]) -> None:
    rows = stage_results["curate"]["rows"]
    assert rows["in"] == 156 == rows["kept"] + sum(rows["rejected"].values()) + rows["quarantined"]
    assert sum(stage_results["curate"]["splits"].values()) == rows["kept"]
    assert set(stage_results["curate"]) == {"dataset", "sha256", "rows", "splits", "evaluation_sets"}


def test_preview_suggests_columns_and_curate_uses_the_configuration(tmp_path: Path) -> None:
    rows = "".join(f"Topic {i};Step {i} solves it with tool {i * 7}\n" for i in range(60))
    (tmp_path / "tickets.csv").write_text(f"subject;resolution\n{rows}")
    (preview,) = answer_in_process("curate", "tickets.csv", "--preview", "--rows", "1", cwd=tmp_path)["sources"]
    assert preview["suggestion"] == "{path: tickets.csv, columns: {prompt: subject, completion: resolution}}"
    assert preview["columns"] == ["subject", "resolution"]
    assert [one["line"] for one in preview["unreadable"]] == [2]
    (tmp_path / "c.yaml").write_text(
        f"data_curation: {{sources: [{preview['suggestion']}], near_duplicate_threshold: 1}}\n"
    )
    (preview,) = answer_in_process("curate", "-c", "c.yaml", "--preview", "--rows", "1", cwd=tmp_path)["sources"]
    assert [turn["content"] for turn in preview["rows"][0]["messages"]] == ["Topic 0", "Step 0 solves it with tool 0"]
    text = run_in_process("curate", "tickets.csv", "-c", "c.yaml", "--preview", cwd=tmp_path).stdout
    assert (
        "tickets.csv: checked the first 60 records, 3 shown: 60 prompt_completion\n  columns: subject, resolution\n"
        in text
    )
    dataset = answer_in_process("curate", "-c", "c.yaml", "-o", "out", cwd=tmp_path)
    assert dataset["rows"] == {"in": 60, "kept": 60, "quarantined": 0, "rejected": {}}
    assert "Missing option '-o'" in refusal(2, "curate", "tickets.csv", cwd=tmp_path)["message"]
    both = refusal(2, "curate", "tickets.csv", "--preview", "-o", "shown", cwd=tmp_path)
    assert both["message"] == "--preview writes nothing, but -o is set"


def test_source_on_the_command_line_uses_all_entries_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("subject;reply;status\nTopic;Answer;open\nTheme;Result;closed\n")
    entry = "path: a.csv, columns: {prompt: subject, completion: reply}"
    (tmp_path / "c.yaml").write_text(
        f"data_curation: {{sources: [{{{entry}, where: status = 'open'}}, {{{entry}, where: status = 'closed'}}]}}\n"
    )
    sources = answer_in_process("curate", "a.csv", "-c", "c.yaml", "--preview", cwd=tmp_path)["sources"]
    assert sorted(one["rows"][0]["line"] for one in sources) == [2, 3]


def test_suggested_path_is_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "project" / "raw").mkdir(parents=True)
    (tmp_path / "project" / "raw" / "a.csv").write_text("subject;reply\nTopic;Answer\n")
    (tmp_path / "project" / "c.yaml").write_text("data_curation: {sources: [raw]}\n")
    (preview,) = answer_in_process("curate", "-c", "project/c.yaml", "--preview", cwd=tmp_path)["sources"]
    assert preview["suggestion"] == "{path: raw/a.csv, columns: {prompt: subject, completion: reply}}"


def test_preview_of_a_database_suggests_columns_for_its_entry(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as connection:
        connection.execute("CREATE TABLE tickets (subject, reply)")
        connection.execute("INSERT INTO tickets VALUES ('Printer is broken', 'Restart it, please.')")
        connection.commit()
    (tmp_path / "c.yaml").write_text("data_curation: {sources: [{path: t.sqlite, table: tickets}]}\n")
    (preview,) = answer_in_process("curate", "-c", "c.yaml", "--preview", cwd=tmp_path)["sources"]
    assert preview["suggestion"] == "{columns: {prompt: subject, completion: reply}}"
    text = run_in_process("curate", "-c", "c.yaml", "--preview", cwd=tmp_path).stdout
    assert "add them to the source in customization.yaml:\ncolumns:\n  prompt: subject\n" in text
    assert "/" not in text


def test_stages_print_the_documented_keys(stage_results: dict[str, Any], folder: Path) -> None:
    keys = {"model", "sha256", "steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "resumed_from"}
    assert set(stage_results["finetune"]) == keys
    assert stage_results["finetune"]["sha256"] == artifact_folder.read(folder / "model", "model").sha256
    assert set(stage_results["evaluate"]) == {"evaluation", "sha256", "verdict", "reasons", "metrics"}
    assert set(stage_results["evaluate"]["metrics"]["held_out"]["loss"]) == {
        "candidate",
        "base",
        "incumbent",
        "ci95",
        "n",
    }
    assert set(stage_results["package"]) == {"repository", "sha256", "model_name", "backend", "proof"}
    assert stage_results["package"]["proof"] is None
    assert set(stage_results["register"]) == {"name", "version", "aliases", "tags"}
    assert stage_results["register"]["aliases"] == ["candidate", "challenger"]


def test_repeated_curate_returns_its_output_and_a_changed_one_is_refused(
    stage_results: dict[str, Any], folder: Path
) -> None:
    assert answer_in_process("curate", "raw.jsonl", "-o", "dataset", *SETS, cwd=folder) == stage_results["curate"]
    error = refusal(2, "curate", "raw.jsonl", "-o", "dataset", *SETS, "--set", "seed=5", cwd=folder)
    assert error["kind"] == "output_occupied"
    assert "--overwrite" in error["hint"]


@pytest.mark.long
def test_unproven_package_is_promoted_only_with_force_and_reason(stage_results: dict[str, Any], folder: Path) -> None:
    error = refusal(1, "promote", "by-hand", "--version", "1", cwd=folder)
    assert error["kind"] == "registry"
    assert "--force" in error["hint"]
    assert refusal(2, "promote", "by-hand", "--version", "1", "--force", cwd=folder)["message"]
    promotion = answer(
        "promote", "by-hand", "--version", "1", "--force", "--reason", "trial", "--by", "ada", cwd=folder
    )
    assert promotion == {"name": "by-hand", "alias": "champion", "from": None, "to": "1"}
    assert refusal(1, "promote", "by-hand", "--version", "9", cwd=folder)["kind"] == "registry"
    assert refusal(1, "promote", "nobody", "--version", "1", cwd=folder)["kind"] == "registry"


def test_damaged_input_is_refused_by_the_next_stage(stage_results: dict[str, Any], folder: Path) -> None:
    train = folder / "dataset" / "train.parquet"
    content = train.read_bytes()
    train.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    try:
        error = refusal(1, "finetune", "dataset", "-o", "another", *SETS, cwd=folder)
    finally:
        train.write_bytes(content)
    assert error["kind"] == "artifact_damaged"
    assert "train.parquet of the dataset" in error["message"]
    assert not (folder / "another").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["curate", "none.jsonl", "-o", "x"], "configuration", "none.jsonl"),
        (["finetune", "nowhere", "-o", "x"], "usage", "nowhere is not a folder"),
        (["finetune", "tiny", "-o", "x"], "artifact_damaged", "has no manifest.json"),
        (["evaluate", "nothing", "--dataset", "dataset", "-o", "x"], "configuration", "model: nothing is not a folder"),
        (
            ["evaluate", "model", "--incumbent", "none", "--dataset", "dataset", "-o", "x"],
            "configuration",
            "incumbent: none is not a folder",
        ),
        (["package", "hf://org/name", "-o", "x"], "configuration", "model: hf://org/name is not of the form"),
        (["package", "embedded:gpt", "-o", "x"], "configuration", "embedded model embedded:gpt does not exist"),
        (["run", "--set", "fine_tuning.adaptation=magic"], "configuration", "fine_tuning.adaptation: found 'magic'"),
        (["run", "-c", "none.yaml"], "configuration", "none.yaml does not exist"),
        (["serve", "dataset"], "usage", "contains a dataset; expected a repository"),
        (["dance"], "usage", "dance"),
        (["curate", "-o", "x"], "usage", "Missing argument 'sources'"),
    ],
)
def test_error_object_has_kind_message_and_hint(
    stage_results: dict[str, Any], folder: Path, arguments: list[str], kind: str, message: str
) -> None:
    error = refusal(1 if kind == "artifact_damaged" else 2, *arguments, cwd=folder)
    assert error["kind"] == kind
    assert message in error["message"]
    assert "base_model" not in error["message"]
    assert error["hint"]
    if arguments[:2] == ["finetune", "tiny"]:
        assert error["hint"].startswith("Create a dataset with `tuneline curate`.")
    assert not (folder / "x").exists()


def test_text_error_is_printed_to_stderr_without_a_traceback(folder: Path) -> None:
    process = tuneline("run", "--set", "fine_tuning.learning_rat=1", cwd=folder)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[0] == (
        "tuneline: the configuration: fine_tuning.learning_rat: unknown key (did you mean learning_rate?)"
    )


def test_command_of_another_tool_is_refused_with_the_command_of_that_meaning(folder: Path) -> None:
    import typer.main

    from pipelines.cli import application, main

    command = typer.main.get_command(application.app)
    assert set(main.COMMANDS_OF_OTHER_TOOLS.values()) <= set(command.commands)
    assert not set(main.COMMANDS_OF_OTHER_TOOLS) & set(command.commands)
    error = refusal(2, "train", cwd=folder)
    assert error["message"] == "No such command 'train'. Did you mean 'finetune'?"
    assert "'finetune'" in refusal(2, "finetun", cwd=folder)["message"]
    assert refusal(2, "finetune", "--dataset", "x", cwd=folder)["hint"] == "DATASET has no option name: omit --dataset."
    assert refusal(2, "finetune", cwd=folder)["hint"] == "Run `tuneline finetune --help`."


def test_doctor_lists_findings_and_hints(folder: Path) -> None:
    process = tuneline("doctor", "--json", cwd=folder)
    report = json.loads(process.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert {"Python", "git", "kfp", "torch", "Triton server", "llm-compressor", "embedded model", "memory"} <= set(
        by_name
    )
    assert all(finding["ok"] or finding["hint"] or finding["name"] == "accelerator" for finding in report["findings"])
    assert process.returncode == (0 if report["ok"] else 1)


def test_documented_commands_exist(folder: Path) -> None:
    help_text = tuneline("--help", cwd=folder).stdout
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("tutorials/first-run.md", "reference/cli.md"))
    commands = set(
        re.findall(r"(?:^tuneline |`tuneline )([a-z]+)(?= |`)", pages.replace("tuneline customises", ""), re.MULTILINE)
    )
    assert {"run", "curate", "finetune", "evaluate", "package", "register", "promote", "serve", "doctor"} <= commands
    for command in commands:
        assert re.search(rf"\b{command}\b", help_text), command


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_command_exits_75_with_an_error_object(
    stage_results: dict[str, Any], folder: Path, signal_number: signal.Signals
) -> None:
    command = [*COMMAND, "evaluate", "model", "--dataset", "dataset", "-o", f"stopped-{signal_number}", *SETS, "--json"]
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    deadline = time.monotonic() + 240
    while not (folder / f"stopped-{signal_number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal_number)
    output, _ = child.communicate(timeout=240)
    assert (child.returncode, json.loads(output)["error"]["kind"]) == (75, "interrupted")
    assert not (folder / f"stopped-{signal_number}" / "manifest.json").exists()


def test_invalid_tracking_uri_is_refused(stage_results: dict[str, Any], folder: Path) -> None:
    error = refusal(2, "run", "--tracking-uri", "nonsense://x", "--workdir", "other", cwd=folder)
    assert error["message"].startswith("nonsense://x is not an MLflow tracking URI; supported schemes: http, ")
    assert (
        refusal(1, "run", "--tracking-uri", "http://127.0.0.1:9", "--workdir", "other", cwd=folder)["kind"]
        == "engine_missing"
    )


def test_unexpected_error_has_an_error_object_and_a_traceback_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipelines.cli import main

    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        code = main._report_error(main._convert_error(error, ["run", "--json"]), ["run", "--json"])
    captured = capsys.readouterr()
    assert (code, json.loads(captured.out)["error"]["kind"]) == (1, "unexpected")
    assert json.loads(captured.out)["error"]["message"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in captured.err
