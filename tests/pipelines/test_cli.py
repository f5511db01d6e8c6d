"""The command line as scripts and people use it: objects, exit codes, and errors that can be read."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, tuneline
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
    "triton_packaging.prove=false",
]
SETS = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shell")
    tiny_model(place / "tiny")
    write_rows(place / "raw.jsonl")
    return place


@pytest.fixture(scope="module")
def chain(folder: Path) -> dict[str, Any]:
    """Every stage by hand, from folder to folder."""
    made: dict[str, Any] = {"curate": answer("curate", "raw.jsonl", "-o", "dataset", *SETS, cwd=folder)}
    made["finetune"] = answer("finetune", "dataset", "-o", "model", *SETS, cwd=folder)
    made["evaluate"] = answer("evaluate", "model", "--dataset", "dataset", "-o", "evaluation", *SETS, cwd=folder)
    made["package"] = answer("package", "model", "-o", "repository", *SETS, cwd=folder)
    named = ["--model", "model", "--evaluation", "evaluation", "--repository", "repository", "--name", "by-hand"]
    made["register"] = answer("register", *named, cwd=folder)
    return made


def test_help_answers_within_a_second(folder: Path) -> None:
    tuneline("--help", cwd=folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = tuneline("--help", cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "Customise a large language model" in done.stdout
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 3, "DESIGN asks for one second; where other programs share the cores, CPU time triples at most"


def test_help_and_configuration_errors_import_nothing_heavy(folder: Path) -> None:
    code = "import sys; sys.argv = ['tuneline', 'run', '--set', 'seed=x']\nfrom pipelines.cli.main import main\ntry: main()\n"
    code += "except SystemExit: pass\n"
    code += (
        "heavy = {'torch', 'transformers', 'mlflow', 'daft', 'dvc', 'kfp', 'numpy', 'pyarrow'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_curate_counts_every_row(chain: dict[str, Any]) -> None:
    rows = chain["curate"]["rows"]
    assert rows["in"] == 156 == rows["kept"] + sum(rows["rejected"].values()) + rows["quarantined"]
    assert sum(chain["curate"]["splits"].values()) == rows["kept"]
    assert set(chain["curate"]) == {"dataset", "sha256", "rows", "splits"}


def test_the_stages_print_the_objects_of_the_contract(chain: dict[str, Any], folder: Path) -> None:
    keys = {"model", "sha256", "steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "resumed_from"}
    assert set(chain["finetune"]) == keys
    assert chain["finetune"]["sha256"] == artifacts.read(folder / "model", "model").sha256
    assert set(chain["evaluate"]) == {"evaluation", "sha256", "verdict", "reasons", "metrics"}
    assert set(chain["evaluate"]["metrics"]["held_out"]["loss"]) == {"candidate", "base", "incumbent", "ci95", "n"}
    assert set(chain["package"]) == {"repository", "sha256", "model_name", "backend", "proof"}
    assert chain["package"]["proof"] is None
    assert set(chain["register"]) == {"name", "version", "aliases", "tags"}
    assert chain["register"]["aliases"] == ["candidate", "challenger"]


def test_the_same_command_again_returns_what_is_there_and_another_is_refused(chain: dict[str, Any], folder: Path) -> None:
    assert answer("curate", "raw.jsonl", "-o", "dataset", *SETS, cwd=folder) == chain["curate"]
    error = refusal(2, "curate", "raw.jsonl", "-o", "dataset", *SETS, "--set", "seed=5", cwd=folder)
    assert error["kind"] == "output_occupied"
    assert "--overwrite" in error["hint"]


def test_an_unproven_package_is_promoted_only_by_force_and_with_a_reason(chain: dict[str, Any], folder: Path) -> None:
    error = refusal(1, "promote", "by-hand", "--version", "1", cwd=folder)
    assert error["kind"] == "registry"
    assert "--force" in error["hint"]
    assert refusal(2, "promote", "by-hand", "--version", "1", "--force", cwd=folder)["message"]
    moved = answer("promote", "by-hand", "--version", "1", "--force", "--reason", "trial", "--by", "ada", cwd=folder)
    assert moved == {"name": "by-hand", "alias": "champion", "from": None, "to": "1"}
    assert refusal(1, "promote", "by-hand", "--version", "9", cwd=folder)["kind"] == "registry"
    assert refusal(1, "promote", "nobody", "--version", "1", cwd=folder)["kind"] == "registry"


def test_a_changed_byte_is_refused_by_the_next_stage(chain: dict[str, Any], folder: Path) -> None:
    train = folder / "dataset" / "train.parquet"
    whole = train.read_bytes()
    train.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    try:
        error = refusal(1, "finetune", "dataset", "-o", "another", *SETS, cwd=folder)
    finally:
        train.write_bytes(whole)
    assert error["kind"] == "artifact_damaged"
    assert "train.parquet of the dataset" in error["message"]
    assert not (folder / "another").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["curate", "none.jsonl", "-o", "x"], "configuration", "none.jsonl"),
        (["finetune", "nowhere", "-o", "x"], "usage", "nowhere is not a folder"),
        (["finetune", "tiny", "-o", "x"], "artifact_damaged", "has no manifest.json"),
        (["evaluate", "nothing", "--dataset", "dataset", "-o", "x"], "configuration", "nothing is not a folder"),
        (["package", "hf://org/name", "-o", "x"], "configuration", "does not name a revision"),
        (["package", "embedded:gpt", "-o", "x"], "configuration", "there is no embedded model"),
        (["run", "--set", "fine_tuning.adaptation=magic"], "configuration", "fine_tuning.adaptation: found 'magic'"),
        (["run", "-c", "none.yaml"], "configuration", "none.yaml does not exist"),
        (["serve", "dataset"], "usage", "holds a dataset, not a repository"),
        (["dance"], "usage", "dance"),
        (["curate", "-o", "x"], "usage", "Missing argument 'sources'"),
    ],
)
def test_a_mistake_is_told_with_kind_message_and_hint(
    chain: dict[str, Any], folder: Path, arguments: list[str], kind: str, message: str
) -> None:
    done = tuneline(*arguments, "--json", cwd=folder)
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == kind
    assert message in error["message"]
    assert error["hint"]
    assert done.returncode == (1 if kind == "artifact_damaged" else 2)
    assert "Traceback" not in done.stderr
    assert not (folder / "x").exists()


def test_people_get_the_error_on_standard_error_without_a_traceback(folder: Path) -> None:
    done = tuneline("run", "--set", "fine_tuning.learning_rat=1", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        "tuneline: the configuration: fine_tuning.learning_rat: there is no such key (did you mean learning_rate?)"
    )


def test_doctor_says_what_works_and_how_to_get_the_rest(folder: Path) -> None:
    done = tuneline("doctor", "--json", cwd=folder)
    found = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert {"Python", "git", "kfp", "torch", "Triton server", "embedded model", "memory"} <= set(by_name)
    assert all(finding["ok"] or finding["hint"] or finding["name"] == "accelerator" for finding in found["findings"])
    assert done.returncode == (0 if found["ok"] else 1)


def test_every_command_the_documentation_names_exists(folder: Path) -> None:
    listed = tuneline("--help", cwd=folder).stdout
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "cli.md").read_text()
    commands = set(re.findall(r"(?:^tuneline |`tuneline )([a-z]+)(?= |`)", text.replace("tuneline customises", ""), re.MULTILINE))
    assert {"run", "curate", "finetune", "evaluate", "package", "register", "promote", "serve", "doctor"} <= commands
    for command in commands:
        assert re.search(rf"\b{command}\b", listed), command


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_command_exits_75_with_an_error_object(chain: dict[str, Any], folder: Path, sent: signal.Signals) -> None:
    command = [*COMMAND, "evaluate", "model", "--dataset", "dataset", "-o", f"stopped-{sent}", *SETS, "--json"]
    child = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    )
    deadline = time.monotonic() + 240
    while not (folder / f"stopped-{sent}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(sent)
    said, _ = child.communicate(timeout=240)
    assert (child.returncode, json.loads(said)["error"]["kind"]) == (75, "interrupted")
    assert not (folder / f"stopped-{sent}" / "manifest.json").exists()


def test_an_address_that_is_no_tracking_server_is_said(chain: dict[str, Any], folder: Path) -> None:
    error = refusal(2, "run", "--tracking-uri", "nonsense://x", "--workdir", "other", cwd=folder)
    assert error["message"] == "nonsense://x is no MLflow tracking server"
    assert refusal(1, "run", "--tracking-uri", "http://127.0.0.1:9", "--workdir", "other", cwd=folder)["kind"] == "engine_missing"


def test_a_fault_of_ours_is_an_error_object_and_its_traceback_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.cli import main

    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        code = main._tell(main._from_other(error, ["run", "--json"]), ["run", "--json"])
    said = capsys.readouterr()
    assert (code, json.loads(said.out)["error"]["kind"]) == (1, "unexpected")
    assert json.loads(said.out)["error"]["message"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in said.err
