"""What a run would do is told as it then comes out, and telling it does nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts
from components.common.errors import EngineMissingError, InputError, TunelineError
from components.common.launch.settings import LauncherSettings, as_environment
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_curation.stage import curate, list_sources
from components.fine_tuning.stage import finetune
from pipelines import estimate as estimating
from pipelines.config import Customization, load
from pipelines.estimate import estimate, lines
from pipelines.resolve import resolve
from pipelines.sizing import START
from tests.git_server import git_daemon
from tests.pipelines.command import answer, refusal, tuneline
from tests.pipelines.project import write_project

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
KEYS = {"dry_run", "rows", "tokens", "steps", "parameters", "memory", "disk", "seconds", "stages", "basis", "warnings"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder in which nothing was run yet."""
    return write_project(tmp_path_factory.mktemp("fresh"))


Look = Callable[..., dict[str, Any]]


def settings(folder: Path, *overrides: str) -> Customization:
    return load(folder / "customization.yaml", overrides)


@pytest.fixture
def look(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Estimate in this process, in a workdir that does not exist."""
    work = Workdir(fresh / "nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
    return lambda *overrides: estimate(settings(fresh, *overrides), work, Silent())


def test_rows_steps_and_tokens_are_those_the_run_then_reports(first: dict[str, Any], look: Look) -> None:
    told = look()
    dataset = artifacts.read(Path(first["artifacts"]["dataset"])).manifest.summary
    model = artifacts.read(Path(first["artifacts"]["model"])).manifest.summary
    assert told["rows"] == {**dataset["rows"], "formats": {"alpaca": 156}, "splits": dataset["splits"]}
    assert told["steps"] == model["steps"] == 30
    assert told["tokens"]["trained"] == model["tokens"]
    assert told["parameters"] == model["parameters"]
    assert told["tokens"]["tokenised_rows"] == dataset["splits"]["train"] == model["rows"]["train"]
    assert not any(stage["cached"] for stage in told["stages"])


@pytest.mark.parametrize("recipe", [{"epochs": 1.5, "batch_size": 8}, {"epochs": 1.0, "batch_size": 20, "max_length": 40}])
def test_epochs_are_counted_as_the_trainer_counts_them(
    first: dict[str, Any], fresh: Path, look: Look, tmp_path: Path, recipe: dict[str, Any]
) -> None:
    changes = ["fine_tuning.max_steps=null", "fine_tuning.validation_rows=0", *(f"fine_tuning.{k}={v}" for k, v in recipe.items())]
    told = look(*changes)
    config = settings(fresh, *changes)
    dataset = artifacts.read(Path(first["artifacts"]["dataset"]))
    options: dict[str, Any] = {"seed": config.seed, "state": tmp_path / "state", "reporter": Silent()}
    made = finetune(dataset, tmp_path / "model", config.fine_tuning, **options).manifest.summary
    assert (told["steps"], told["tokens"]["trained"]) == (made["steps"], made["tokens"])
    assert told["tokens"]["cut_share"] == pytest.approx(made["rows"]["truncated"] / made["rows"]["train"], abs=1e-4)
    assert f"{recipe['epochs']:g} epochs of {made['rows']['train']} rows, {recipe['batch_size']} a step" == told["basis"]["steps"]


def test_what_is_in_the_store_is_said_to_be_cached_and_takes_no_time_but_that_of_the_steps_that_always_run(
    first: dict[str, Any], project: Path
) -> None:
    told = answer("run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", cwd=project)
    assert set(told) == KEYS
    assert told["stages"] == [
        {"name": stage, "cached": True} for stage in ("data_curation", "fine_tuning", "evaluation", "triton_packaging")
    ]
    others = round(sum(START[name] for name in ("run", "resolve", "data_versioning", "registration", "promotion", "report")), 1)
    assert told["seconds"] == {
        "data_curation": 0.0, "fine_tuning": 0.0, "evaluation": 0.0, "triton_packaging": 0.0, "other_steps": others, "total": others
    }  # fmt: skip
    assert told["disk"]["total"] == 0


def costs_of_packages(store: Path) -> list[Path]:
    """What the packages in a store cost, the newest package first: other tests may have made more in the folder that all share."""
    manifests = sorted(store.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    packages = [path.parent.name for path in manifests if artifacts.read_manifest(path.parent).kind == "repository"]
    return [store / "costs" / f"{sha256}.json" for sha256 in packages]


def test_another_recipe_is_timed_by_the_newest_training_like_it(first: dict[str, Any], project: Path) -> None:
    arguments = ["run", "-c", "customization.yaml", "--workdir", "wd", "--set", "fine_tuning.learning_rate=2e-3", "--dry-run"]
    told = answer(*arguments, cwd=project)
    assert {stage["name"]: stage["cached"] for stage in told["stages"]} == {
        "data_curation": True, "fine_tuning": False, "evaluation": False, "triton_packaging": False
    }  # fmt: skip
    assert "tokens/s, as the newest training like it here" in told["basis"]["seconds.fine_tuning"]
    took = json.loads(costs_of_packages(project / "wd" / "store")[0].read_text())["seconds"]
    seconds = told["seconds"]
    assert seconds["triton_packaging"] == pytest.approx(START["triton_packaging"] + took, abs=0.1)
    assert told["basis"]["seconds.triton_packaging"] == "5 s to start; what the newest package of this base model took here"
    assert seconds["total"] == pytest.approx(sum(spent for name, spent in seconds.items() if name != "total"))
    words = tuneline(*arguments, cwd=project).stdout
    assert "data_curation     cached: nothing would be done" in words
    assert re.search(r"^ +about \d+ s in all$", words, re.MULTILINE)


def test_every_step_of_a_run_has_a_start(first: dict[str, Any]) -> None:
    assert {"run", "report", *(stage["name"] for stage in first["stages"])} == set(START)


def test_before_anything_was_run_a_stage_takes_its_start_and_more_and_nothing_is_told_as_the_total(look: Look) -> None:
    told = look()
    seconds = told["seconds"]
    for stage in ("data_curation", "fine_tuning", "evaluation"):
        assert seconds[stage] >= START[stage]
    assert seconds["other_steps"] > 10
    assert (seconds["triton_packaging"], seconds["total"]) == (None, None)
    rough = told["basis"]["seconds.fine_tuning"]
    assert rough.startswith("7 s to start; a training token's operations by formula, right within a factor of 2 or 3, at ")
    text = lines(told)
    known = sum(spent for spent in seconds.values() if spent is not None)
    why = "not known until a package of this base model was made here"
    assert f"          at least {known:,.0f} s, without triton_packaging ({why})" in text
    assert f"          triton_packaging  {why}" in text
    assert not any("in all" in line for line in text)


def test_a_package_whose_cost_was_not_kept_is_not_taken_for_one_that_took_no_time(
    first: dict[str, Any], project: Path, tmp_path: Path
) -> None:
    shutil.copytree(project / "wd" / "store", tmp_path / "store")
    for cost in costs_of_packages(tmp_path / "store"):
        cost.unlink()
    change = ("--set", "fine_tuning.learning_rate=2e-3")
    arguments = ("run", "-c", "customization.yaml", "--workdir", "wd", *change, "--dry-run")
    told = answer(*arguments, cwd=project, TUNELINE_STORE=str(tmp_path / "store"))
    assert (told["seconds"]["triton_packaging"], told["seconds"]["total"]) == (None, None)


def everything(*folders: Path) -> dict[str, tuple[int, str]]:
    """Every file of the folders with its time of change and digest, and every folder."""
    found = {}
    for path in sorted(p for folder in folders for p in folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        found[str(path)] = (path.stat().st_mtime_ns, digest)
    return found


@pytest.mark.parametrize("workdir", ["wd", "not-there-yet"])
def test_a_dry_run_does_nothing(first: dict[str, Any], project: Path, tmp_path: Path, workdir: str) -> None:
    places = {name: tmp_path / name.lower() for name in ("TUNELINE_CACHE", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for place in places.values():
        place.mkdir()
    before = everything(project, *places.values())
    extra = {name: str(place) for name, place in places.items()}
    answer("run", "-c", "customization.yaml", "--workdir", workdir, "--dry-run", cwd=project, **extra)
    assert everything(project, *places.values()) == before


@pytest.mark.model
def test_the_demo_with_the_embedded_model_is_told_without_converting_it(tmp_path: Path) -> None:
    here, cache = tmp_path / "here", tmp_path / "cache"
    here.mkdir()
    cache.mkdir()
    done = tuneline("run", "--dry-run", "--json", cwd=here, TUNELINE_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert os.listdir(here) == os.listdir(cache) == []  # noqa: PTH208
    assert told["rows"]["in"] > 1000
    assert told["rows"]["rejected"]["exact_duplicate"] > 100
    assert told["parameters"] == {"all": 134_515_008 + 4_884_480, "trainable": 4_884_480}
    assert told["tokens"]["tokenised_rows"] <= 2000
    assert "evenly spread rows of" in told["basis"]["tokens"]
    assert told["steps"] == 40
    assert 2e9 < told["memory"]["training"]["total"] < 8e9
    assert told["memory"]["training"]["weights"] == (134_515_008 + 4_884_480) * 4
    assert "GFLOP/s" in told["basis"]["seconds.fine_tuning"]


def test_memory_grows_with_what_is_trained_and_with_what_is_in_memory_at_once(look: Look) -> None:
    lora, full = look()["memory"]["training"], look("fine_tuning.adaptation=full")["memory"]["training"]
    parameters = look("fine_tuning.adaptation=full")["parameters"]
    assert full["gradients"] + full["optimizer"] + full["weights"] == 16 * parameters["all"] == 16 * parameters["trainable"]
    assert lora["optimizer"] < full["optimizer"] / 2
    half = look("fine_tuning.micro_batch_size=1")["memory"]["training"]
    assert (half["logits"], half["activations"]) == (lora["logits"] // 2, lora["activations"] // 2)
    for parts in (lora, full, half):
        assert parts["total"] == sum(size for name, size in parts.items() if name != "total")


def test_a_sweep_takes_the_time_of_all_its_recipes_and_the_memory_of_those_at_once(look: Look) -> None:
    one, all_three = look(), look("fine_tuning.sweep.vary={learning_rate: [1e-4, 3e-4, 1e-3]}")
    assert all_three["memory"]["stages"]["fine_tuning"] == 2 * one["memory"]["stages"]["fine_tuning"]
    assert all_three["disk"]["checkpoints"] == 2 * one["disk"]["checkpoints"]
    assert (all_three["steps"], all_three["tokens"]["trained"]) == (3 * one["steps"], 3 * one["tokens"]["trained"])
    assert all_three["basis"]["steps"] == "3 recipes together: fine_tuning.max_steps"
    assert "3 recipes together: " in all_three["basis"]["seconds.fine_tuning"]


def test_a_sweeps_recipes_are_estimated_each_by_itself(look: Look) -> None:
    """With room for two at once it needs that of the two largest, and says the parameters of the largest."""
    ranks, steps = (4, 8, 16), (10, 20)
    alone = {rank: look(f"fine_tuning.lora.rank={rank}", "fine_tuning.max_steps=20") for rank in ranks}
    swept = look(f"fine_tuning.sweep.vary={{lora.rank: {list(ranks)}, max_steps: {list(steps)}}}")
    assert swept["parameters"] == alone[16]["parameters"]
    assert swept["memory"]["training"] == alone[16]["memory"]["training"]
    assert swept["memory"]["stages"]["fine_tuning"] == 2 * alone[16]["memory"]["stages"]["fine_tuning"]
    assert swept["memory"]["stages"]["evaluation"] == alone[16]["memory"]["stages"]["evaluation"]
    assert swept["steps"] == len(ranks) * sum(steps)
    models = {rank: told["disk"]["model"] / 2 for rank, told in alone.items()}  # in the store and in MLflow
    assert swept["disk"]["model"] == 2 * models[16] + len(steps) * sum(models.values())


def test_of_a_training_elsewhere_neither_time_nor_this_machines_memory_is_told(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in as_environment(LauncherSettings(kind="slurm", nodes=2)).items():
        monkeypatch.setenv(name, value)
    told = look("fine_tuning.processes=16", "fine_tuning.batch_size=16", "fine_tuning.micro_batch_size=1")
    assert (told["seconds"]["fine_tuning"], told["seconds"]["total"]) == (None, None)
    assert told["basis"]["seconds.fine_tuning"] == "it trains elsewhere (slurm, 2 nodes), at a speed that is not known here"
    assert told["memory"]["largest_stage"] != "fine_tuning"
    (without,) = (line for line in lines(told) if "at least" in line)
    assert "without fine_tuning (it trains elsewhere (slurm, 2 nodes), at a speed that is not known here); triton_packaging (not" in without


def test_each_stage_whose_time_is_not_known_says_its_own_reason() -> None:
    seconds = {"fine_tuning": None, "evaluation": 3.0, "triton_packaging": None, "total": None}
    basis = {"seconds.fine_tuning": "it trains elsewhere", "seconds.evaluation": "rough", "seconds.triton_packaging": "never made"}
    last = estimating._time_lines({"stages": [], "seconds": seconds, "basis": basis})[-1]
    assert last.strip() == "at least 3 s, without fine_tuning (it trains elsewhere); triton_packaging (never made)"


def test_too_little_memory_or_disk_is_warned_of(look: Look, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    assert not [w for w in look()["warnings"] if "memory" in w or "disk" in w]
    monkeypatch.setattr(estimating, "_free_memory", lambda gpu: 10**8)
    monkeypatch.setattr(estimating.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**5})())
    warnings = " ".join(look("fine_tuning.adaptation=full")["warnings"])
    assert "of memory, 0.1 GB are free." in warnings
    assert f"of disk in {fresh / 'nowhere'}, 0.0 GB are free" in warnings


def test_rows_too_few_for_the_splits_are_warned_of_in_the_words_of_the_curation(fresh: Path, look: Look, tmp_path: Path) -> None:
    few = fresh / "few.jsonl"
    few.write_text("".join((fresh / "raw.jsonl").read_text().splitlines(keepends=True)[:2]))
    told = look(f"data_curation.sources=[{few}]")
    config = settings(fresh)
    with pytest.raises(InputError) as error:
        curate(list_sources([str(few)], fresh), tmp_path / "out", config.data_curation, seed=config.seed, reporter=Silent())
    assert f"{error.value.message}. {error.value.hint}" in told["warnings"]
    assert "too few rows for the split: 2 rows" in error.value.message
    assert told["steps"] == 30


def test_a_package_that_cannot_be_proven_is_warned_of(look: Look) -> None:
    warnings = look("triton_packaging.prove=false")["warnings"]
    assert any(w.startswith("the model will be packaged unproven and not be promoted: triton_packaging.prove is off") for w in warnings)


def test_dropped_and_unreadable_rows_are_counted_by_reason_and_format(fresh: Path, look: Look) -> None:
    rows = (fresh / "raw.jsonl").read_text().splitlines()
    mixed = [*rows, rows[0], "{broken", json.dumps({"prompt": "What is this?", "completion": " "}), json.dumps({"weather": "fine"})]
    (fresh / "mixed.jsonl").write_text("\n".join(mixed) + "\n")
    told = look(f"data_curation.sources=[{fresh / 'mixed.jsonl'}]")["rows"]
    assert told["in"] == 160
    assert (told["kept"], told["quarantined"]) == (156, 2)
    assert told["rejected"] == {"empty_answer": 1, "exact_duplicate": 1}
    assert told["formats"] == {"alpaca": 157, "prompt_completion": 1}


def test_rows_that_an_evaluation_set_has_are_counted(fresh: Path, look: Look) -> None:
    row = json.loads((fresh / "raw.jsonl").read_text().splitlines()[7])
    (fresh / "exam.jsonl").write_text(json.dumps({"question": f"{row['instruction']} {row['output']}"}) + "\n")
    told = look(f"data_curation.decontamination.sets=[{fresh / 'exam.jsonl'}]")["rows"]
    assert (told["kept"], told["rejected"]) == (155, {"contaminated": 1})


def test_rows_published_before_are_counted_where_the_revision_is_in_the_store_and_told_where_it_is_not(
    first: dict[str, Any], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workdir(project / "wd")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
    rows = (project / "raw.jsonl").read_text().splitlines()
    new = {"instruction": "Who is new here?", "input": "", "output": "This row is, and nobody has published it."}
    (tmp_path / "more.jsonl").write_text("\n".join([*rows[:20], json.dumps(new)]) + "\n")
    more = settings(project, f"data_curation.sources=[{tmp_path / 'more.jsonl'}]", "data_curation.published=drop")
    more.fine_tuning.base_model = str(project / "tiny")
    told = estimate(more, work, Silent())
    assert (told["rows"]["kept"], told["rows"]["rejected"]) == (1, {"exact_duplicate": 20})
    assert "not compared" not in told["basis"]["rows"]
    (tmp_path / "more.jsonl").write_text("\n".join(rows[:20]) + "\n")
    with pytest.raises(
        InputError, match="no row is left to keep: 20 dropped as exact_duplicate; rows that repeat an earlier revision's go"
    ):
        estimate(more, work, Silent())
    (tmp_path / "more.jsonl").write_text("\n".join([*rows[:20], json.dumps(new)]) + "\n")
    dataset = work.store / Path(first["artifacts"]["dataset"]).name
    try:
        dataset.rename(tmp_path / "elsewhere")
        told = estimate(more, work, Silent())
    finally:
        (tmp_path / "elsewhere").rename(dataset)
    assert told["rows"]["kept"] == 21
    assert told["basis"]["rows"].endswith("not compared with dataset-v1, which would be fetched first")


def test_a_data_repository_behind_a_url_leaves_no_mirror_in_the_workdir(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    before = everything(project)
    (tmp_path / "data.git").symlink_to(project / "wd" / "data-repository")
    with git_daemon(tmp_path) as server:
        override = f"data_versioning.repository={server}/data.git"
        told = answer("run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", "--set", override, cwd=project)
    assert {stage["name"] for stage in told["stages"] if stage["cached"]} >= {"data_curation"}
    assert everything(project) == before


def test_a_dry_run_writes_nothing_where_the_state_of_all_workdirs_is_kept(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    (tmp_path / "data.git").symlink_to(project / "wd" / "data-repository")
    state = tmp_path / "state"
    state.mkdir()
    with git_daemon(tmp_path) as server:
        override = f"data_versioning.repository={server}/data.git"
        command = ("run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", "--set", override)
        told = answer(*command, cwd=project, TUNELINE_STATE=str(state))
    assert {stage["name"] for stage in told["stages"] if stage["cached"]} >= {"data_curation"}
    assert list(state.iterdir()) == []


def test_rows_that_hold_no_conversations_are_refused_as_the_training_would(fresh: Path, look: Look) -> None:
    (fresh / "plain.txt").write_text("\n".join(f"Line {i} of a plain text, number {i * 7919}." for i in range(60)))
    with pytest.raises(InputError) as error:
        look(f"data_curation.sources=[{fresh / 'plain.txt'}]")
    assert error.value.message.startswith("the sources hold text rows, which this objective cannot learn from: it learns conversations")
    assert "objective: text" in error.value.hint


def test_a_group_that_no_row_has_stops_a_dry_run_as_it_stops_curation(look: Look) -> None:
    with pytest.raises(InputError, match=r"no row has a field .team., by which data_curation\.group_by would"):
        look("data_curation.group_by=team")


@pytest.mark.parametrize(
    "wrong",
    [
        "data_curation.sources=[missing.jsonl]",
        "data_curation.sources=['*.parquet']",
        "fine_tuning.base_model=nowhere",
        "fine_tuning.base_model=embedded:gpt",
        "fine_tuning.base_model=hf://org/name",
        "fine_tuning.base_model=s3://bucket/model",
    ],
)
def test_what_stops_a_run_at_its_start_stops_a_dry_run_alike(fresh: Path, look: Look, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fresh)
    config = load(fresh / "customization.yaml", [wrong])
    with pytest.raises(TunelineError) as real:
        resolve(config, Workdir(fresh / "nowhere"), Silent())
    with pytest.raises(TunelineError) as dry:
        look(wrong)
    assert dry.value.as_dict() == real.value.as_dict()
    assert dry.value.exit_code == real.value.exit_code == 2
    assert dry.value.hint


PLACE = "evaluation.tasks[0]: "
LIKE_ARC = '{"question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "A"}'


@pytest.mark.parametrize(
    ("task", "rows", "said"),
    [
        ({"kind": "generation"}, '{"prompt": "Say it."}', "has no text in references"),
        ({"kind": "generation"}, '{"prompt": "Say it.", "reference": "it"', "this is no JSON"),
        ({"kind": "multiple_choice"}, '{"query": "Which?", "choices": ["one"], "gold": 3}', "needs two or more options"),
        ({"kind": "generation", "metrics": ["json_schema"], "json_schema": "DATA"}, '{"type": "nothing"}', "nothing"),
        ({"kind": "lm_eval", "task": "arc_eazy"}, '{"query": "Which?"}', "lm-eval has no task arc_eazy"),
        ({"kind": "lm_eval", "task": "arc_easy", "metrics": ["f2"]}, LIKE_ARC, "does not measure f2"),
        ({"kind": "lm_eval", "task": "arc_easy"}, '{"query": "Which?", "choices": ["a", "b"]}', "UndefinedError"),
        (
            {"kind": "judge", "base_url": "https://judge.example/v1", "model": "j", "api_key_env": "NOT_SET"},
            "{}",
            "NOT_SET, which is not set",
        ),
    ],
)
def test_a_task_that_cannot_be_asked_stops_a_run_before_its_training(
    fresh: Path, look: Look, task: dict[str, str], rows: str, said: str
) -> None:
    (fresh / "rows.json").write_text(rows)
    (fresh / "rows.jsonl").write_text(f"{rows}\n" * 3)
    task = {**task, "data": str(fresh / "rows.jsonl")}
    task |= {name: str(fresh / "rows.json") for name, value in task.items() if value == "DATA"}
    wrong = f"evaluation.tasks=[{json.dumps(task)}]"
    with pytest.raises(TunelineError) as real:
        resolve(load(fresh / "customization.yaml", [wrong]), Workdir(fresh / "nowhere"), Silent())
    with pytest.raises(TunelineError) as dry:
        look(wrong)
    assert real.value.message.startswith(PLACE)
    assert said in real.value.message
    assert dry.value.as_dict() == real.value.as_dict()


def test_an_engine_that_is_not_installed_stops_a_run_before_its_training(fresh: Path, look: Look) -> None:
    with pytest.raises(EngineMissingError, match="vLLM is not installed"):
        look("evaluation.engine=vllm")


def test_a_dry_run_counts_what_every_task_asks(fresh: Path, look: Look) -> None:
    alone = look("evaluation.tasks=[{kind: held_out}]")["seconds"]["evaluation"]
    (fresh / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}.", "reference": "it"}) + "\n" for n in range(500)))
    with_more = look(f"evaluation.tasks=[{{kind: held_out}}, {{kind: generation, data: '{fresh / 'prompts.jsonl'}', max_new_tokens: 512}}]")
    assert with_more["seconds"]["evaluation"] > alone


def test_pairs_that_are_asked_of_rows_that_have_none_are_warned_of(look: Look) -> None:
    warnings = look("evaluation.tasks=[{kind: held_out}, {kind: preference}]")["warnings"]
    assert any("task preference compares pairs, and the sources hold sft rows" in one for one in warnings)


def test_the_command_refuses_with_the_error_object_and_leaves_nothing(fresh: Path) -> None:
    error = refusal(2, "run", "-c", "customization.yaml", "--dry-run", "--set", "fine_tuning.base_model=nowhere", cwd=fresh)
    assert error["kind"] == "configuration"
    assert error["message"].endswith("nowhere is not a folder")
    wrong = refusal(2, "run", "-c", "customization.yaml", "--dry-run", "--set", "fine_tuning.lora.target_modules=[nothing]", cwd=fresh)
    assert wrong["message"].startswith("fine_tuning.lora.target_modules: ")
    assert "q_proj" in wrong["hint"]
    assert not (fresh / ".tuneline").exists()


def test_people_read_rows_tokens_steps_memory_disk_time_and_warnings(look: Look) -> None:
    told = look("triton_packaging.prove=false")
    text = lines(told)
    assert text[0] == "a dry run: nothing was written"
    assert text[1] == "rows      156 of 156 kept; dropped: none; unreadable: 0; read as 156 alpaca"
    assert [line.split(" ")[0] for line in text if line[0] != " "][1:7] == ["rows", "tokens", "training", "memory", "disk", "time"]
    assert f"30 steps (fine_tuning.max_steps), {told['tokens']['trained']:,} tokens" in "\n".join(text)
    assert "triton_packaging  not known until a package of this base model was made here" in "\n".join(text)
    assert text[-1].startswith("warning: the model will be packaged unproven")
