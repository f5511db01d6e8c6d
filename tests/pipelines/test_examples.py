"""The examples, and the presets with the same configuration.

Fast tier: presets are written and read. Long tier: dry runs, one whole run, and the chain of RLHF, with a tiny model. Stress
tier: each example as its README describes it, with the embedded model, which takes minutes.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import customization_presets
from pipelines.config.customization_config import load_customization
from tests.pipelines.command import ROOT, answer, answer_in_process, refusal, run_in_process
from tests.tiny import tiny_model

EXAMPLES = ROOT / "examples"
TIMEOUT_SECONDS = 1800
MAX_DATA_BYTES, MAX_LINES, MAX_README_WORDS = 30_000, 20, 150
PRESETS = customization_presets.list_presets()
OBJECTIVES = {"domain-text": "text", "style": "dpo"}  # of the others: sft
each_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def list_data(example: Path) -> list[Path]:
    files = (path for path in example.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if path.name not in ("README.md", "customization.yaml")]


def init_example(preset: str, folder: Path) -> Path:
    """Write the preset and the example's data into a folder, and return the configuration."""
    answer_in_process("init", folder, "--preset", preset, cwd=folder.parent)
    shutil.copytree(EXAMPLES / preset, folder, dirs_exist_ok=True, ignore=lambda *_: {"customization.yaml"})
    return folder / "customization.yaml"


@each_preset
def test_example_has_the_preset_small_data_and_a_short_page(preset: str) -> None:
    example = EXAMPLES / preset
    configuration = example / "customization.yaml"
    assert configuration.is_symlink(), "the preset is the only copy of the configuration"
    assert configuration.resolve() == customization_presets.PRESETS_FOLDER / f"{preset}.yaml"
    assert len(configuration.read_text().splitlines()) <= MAX_LINES
    data = list_data(example)
    assert 0 < sum(path.stat().st_size for path in data) <= MAX_DATA_BYTES
    readme = (example / "README.md").read_text()
    assert len(readme.split()) <= MAX_README_WORDS
    assert f"\ntuneline run -c examples/{preset}/customization.yaml --workdir {preset}-run\n" in readme
    assert f"tuneline init my-project --preset {preset}" in readme


@each_preset
def test_init_writes_the_preset_and_reports_the_expected_data(preset: str, tmp_path: Path) -> None:
    result = answer_in_process("init", "here", "--preset", preset, cwd=tmp_path)
    path = tmp_path / "here" / "customization.yaml"
    assert path.read_text() == customization_presets.read_preset(preset)
    customization = load_customization(path)
    assert customization.fine_tuning.objective == OBJECTIVES.get(preset, "sft")
    assert customization.model_registry.name == preset
    assert result == {
        "customization": "here/customization.yaml",
        "platform": "here/platform.yaml",
        "preset": preset,
        "sources": result["sources"],
    }
    assert [str(path.parent / name) for name in result["sources"]] == [
        entry.path for entry in customization.data_curation.sources
    ]
    assert (EXAMPLES / preset / result["sources"][0]).exists()
    error = refusal(2, "run", "-c", path, "--dry-run", cwd=tmp_path)
    missing = "is a folder without a supported file" if preset == "domain-text" else "does not exist"
    assert f"here/{result['sources'][0]}' {missing}" in error["message"]


def test_init_prints_where_the_data_of_a_preset_belongs(tmp_path: Path) -> None:
    output = run_in_process("init", "here", "--preset", "style", cwd=tmp_path).stdout
    assert "put your data in here/pairs.jsonl, or change the sources\n" in output
    assert "put your data" not in run_in_process("init", "there", cwd=tmp_path).stdout


def test_unknown_preset_lists_the_presets_and_writes_nothing(tmp_path: Path) -> None:
    error = refusal(2, "init", "here", "--preset", "stlye", cwd=tmp_path)
    assert (error["kind"], error["message"]) == (
        "usage",
        f"the preset 'stlye' does not exist; expected one of {', '.join(PRESETS)}",
    )
    assert list(tmp_path.iterdir()) == []


def test_presets_are_completed(tmp_path: Path) -> None:
    words = {"_TUNELINE_COMPLETE": "complete_bash", "COMP_WORDS": "tuneline init --preset s", "COMP_CWORD": "3"}
    assert run_in_process(cwd=tmp_path, **words).stdout.split() == ["style", "support-chat"]


def test_passages_of_answers_are_in_the_documents() -> None:
    folder = EXAMPLES / "rag-answers"
    documents = {path.name: path.read_text() for path in (folder / "documents").iterdir()}
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(rows) > 100
    assert all(f"\n{row['passage']}\n" in documents[row["document"]] for row in rows)


@pytest.mark.long
@pytest.mark.daft
@each_preset
def test_dry_run_of_an_example_keeps_its_rows(preset: str, model: Path, tmp_path: Path) -> None:
    configuration = init_example(preset, tmp_path / "project")
    options = ["-c", configuration, "--set", f"fine_tuning.base_model={model}", "--dry-run"]
    result = answer_in_process("run", *options, cwd=tmp_path)
    rows = result["rows"]
    assert rows["quarantined"] == 0
    assert set(rows["rejected"]) <= {"not_selected"}  # open tickets
    assert rows["kept"] >= 60
    assert rows["splits"]["test"] >= 29  # fewer items cannot show max_harmed_share of the default gate
    assert (tmp_path / "project").exists()


def run_example(configuration: Path, folder: Path, *options: object) -> dict[str, Any]:
    """Run an example and return its result; the model is registered under the name of the example."""
    command = ("run", "-c", configuration, "--workdir", "work", *options)
    result = answer(*command, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert result["mlflow"]["model_name"] == configuration.parent.name
    return result


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
def test_example_runs_from_data_to_the_registry(model: Path, tmp_path: Path) -> None:
    """The tiny model learns little in these steps, so the gate may refuse it; the other stages must succeed."""
    configuration = init_example("domain-text", tmp_path / "domain-text")
    small = {"base_model": model, "max_steps": 3, "validation_rows": 0}
    options = [part for key, value in small.items() for part in ("--set", f"fine_tuning.{key}={value}")]
    result = run_example(configuration, tmp_path, *options)
    evaluation = json.loads(Path(result["artifacts"]["evaluation"], "evaluation.json").read_text())
    assert evaluation["metrics"]["held_out"]["loss"]["n"] >= 29
    assert result["verdict"] in ("accepted", "refused")


@pytest.mark.stress
@pytest.mark.pipeline
@pytest.mark.timeout(TIMEOUT_SECONDS)
@each_preset
def test_example_improves_on_the_embedded_model(preset: str, tmp_path: Path) -> None:
    """The README promises this result."""
    result = run_example(EXAMPLES / preset / "customization.yaml", tmp_path)
    assert result["verdict"] == "accepted"
    assert Path(result["artifacts"]["repository"], "manifest.json").exists()


RLHF_STEPS = ("sft", "reward", "rlhf")
RLHF_COMMAND = [part for step in RLHF_STEPS for part in ("-c", EXAMPLES / "rlhf" / f"{step}.yaml")]


def test_page_of_rlhf_has_the_tested_command() -> None:
    options = " ".join(f"-c examples/rlhf/{step}.yaml" for step in RLHF_STEPS)
    page = (EXAMPLES / "rlhf" / "README.md").read_text()
    assert f"\ntuneline run {options} --workdir rlhf-run\n" in page
    assert len(page.split()) <= 2 * MAX_README_WORDS
    assert sum(path.stat().st_size for path in (EXAMPLES / "rlhf").glob("*.jsonl")) <= 3 * MAX_DATA_BYTES


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
def test_rlhf_chain_rewards_answers_with_the_reward_model_of_its_second_step(model: Path, tmp_path: Path) -> None:
    """The tiny model learns the form of the answers, but no reward in four steps, so the gate may refuse the last step."""
    settings = ("fine_tuning.max_steps=20", "fine_tuning.learning_rate=5e-3", "triton_packaging.prove=false")
    fixed = (f"fine_tuning.base_model={model}", "fine_tuning.validation_rows=8")
    options = [part for value in (*settings, *fixed) for part in ("--set", value)]
    result = answer("run", *RLHF_COMMAND, *options, "--workdir", "work", cwd=tmp_path, timeout_seconds=TIMEOUT_SECONDS)
    sft, reward, rlhf = result["chain"]
    assert [step["verdict"] for step in (sft, reward)] == ["accepted", "accepted"]
    assert (sft["artifacts"]["repository"] is None, reward["artifacts"]["repository"]) == (False, None)
    manifests = [json.loads(Path(step["artifacts"]["model"], "manifest.json").read_text()) for step in (reward, rlhf)]
    assert manifests[0]["schema"].startswith("tuneline/reward_model/")
    inputs = {source["kind"]: source["content_sha256"] for source in manifests[1]["inputs"]}
    assert inputs["rewarding_model"] == manifests[0]["content_sha256"]
    log = Path(rlhf["artifacts"]["model"], "training.jsonl").read_text().splitlines()
    assert all(0 < json.loads(line)["reward_reward_model"] < 1 for line in log if "train_loss" in line)
    lineage = answer("lineage", "orders-rlhf@candidate", "--workdir", "work", cwd=tmp_path)
    assert [link["kind"] for link in lineage["chain"]].count("dataset") >= 3
    assert "reward_model" in {link["kind"] for link in lineage["chain"]}
    assert lineage["intact"]
    promoted = answer("promote", "orders-reward", "--version", 1, "--workdir", "work", cwd=tmp_path)
    assert promoted["to"] == "1"
    options = ("--format", "model-card", "-o", "card.md", "--workdir", "work")
    answer("export", "orders-reward@champion", *options, cwd=tmp_path)
    assert "\npipeline_tag: text-classification\n" in (tmp_path / "card.md").read_text()


REAL_STEPS = ("preferences", "problems")
REAL_DATA = Path(os.environ.get("TUNELINE_REAL_DATA") or ROOT.parent / "shared" / "data")
REAL_FILES = {"dpo_en_demo.json": "pref/dpo_en_demo.json.gz", "train.jsonl": "eval/gsm8k_train.jsonl.gz"}


def test_page_of_rlhf_has_the_command_for_real_data() -> None:
    options = " ".join(f"-c examples/rlhf/{step}.yaml" for step in REAL_STEPS)
    assert f"\ntuneline run {options} --workdir real-run\n" in (EXAMPLES / "rlhf" / "README.md").read_text()
    for step, name in zip(REAL_STEPS, REAL_FILES, strict=True):
        (source,) = load_customization(EXAMPLES / "rlhf" / f"{step}.yaml").data_curation.sources
        assert Path(source.path) == EXAMPLES / "rlhf" / name
        assert not Path(source.path).exists(), "the repository has no data of others"


@pytest.mark.long
@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.skipif(
    not all((REAL_DATA / name).exists() for name in REAL_FILES.values()),
    reason="TUNELINE_REAL_DATA names no folder with pairs and problems",
)
def test_real_pairs_train_a_reward_model_that_scores_answers_to_real_problems(model: Path, tmp_path: Path) -> None:
    for name, source in REAL_FILES.items():
        (tmp_path / name).write_bytes(gzip.decompress((REAL_DATA / source).read_bytes()))
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:300]), encoding="utf-8")
    for step in REAL_STEPS:
        shutil.copy(EXAMPLES / "rlhf" / f"{step}.yaml", tmp_path)
    settings = (f"fine_tuning.base_model={model}", "fine_tuning.max_steps=3", "triton_packaging.prove=false")
    fractions = "data_curation.fractions={train: 0.6, validation: 0.1, test: 0.3}"
    options = [part for value in (*settings, fractions) for part in ("--set", value)]
    files = [part for step in REAL_STEPS for part in ("-c", f"{step}.yaml")]
    result = answer("run", *files, *options, "--workdir", "work", cwd=tmp_path, timeout_seconds=TIMEOUT_SECONDS)
    reward, rlhf = result["chain"]
    dataset, evaluation = (Path(reward["artifacts"][name]) for name in ("dataset", "evaluation"))
    rows = json.loads((dataset / "manifest.json").read_text())["summary"]["rows"]
    assert (rows["in"], rows["kept"], rows["quarantined"]) == (300, 295, 0)
    metrics = json.loads((evaluation / "evaluation.json").read_text())["metrics"]["reward"]
    assert metrics["accuracy"]["n"] >= 40
    log = Path(rlhf["artifacts"]["model"], "training.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in log if "train_loss" in line]
    assert len(trained) == 3
    assert all(0 < line["reward_reward_model"] < 1 for line in trained)
    assert all(0 <= line["reward_final_number"] <= 1 for line in trained)


@pytest.mark.stress
@pytest.mark.pipeline
@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_rlhf_improves_on_the_embedded_model(tmp_path: Path) -> None:
    """The README promises this result."""
    result = answer("run", *RLHF_COMMAND, "--workdir", "work", cwd=tmp_path, timeout_seconds=2 * TIMEOUT_SECONDS)
    assert [step["verdict"] for step in result["chain"]] == ["accepted"] * 3
