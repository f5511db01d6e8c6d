"""The estimates of a dry run equal the results of the run, and a dry run writes nothing.

Long tier: dry runs in child processes, and of the embedded model. Stress tier: one whose data repository is remote, beside the long one with a state folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from components.common.artifacts import artifact_folder
from components.common.launch.launcher_settings import LauncherSettings, to_environment
from components.common.models import compute_devices, model_loading
from components.common.models.model_loading import load_outline
from components.common.models.model_shape import ModelShape
from components.common.runtime import code_sandbox
from components.common.runtime.errors import ConfigurationError, EngineMissingError, InputError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation.stage import curate, list_sources
from components.evaluation import suite
from components.evaluation.tasks.task_preflight import TaskWorkload
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.stage import finetune
from components.fine_tuning.training import count_parameters
from components.model_registry import policy_report
from components.model_registry.policy_checks import PolicyInForce
from components.model_registry.release_policy import Policy
from pipelines.config.customization_config import Customization, load_customization
from pipelines.planning import dry_run, machine_speed, stage_times
from pipelines.planning.dry_run import estimate_run, format_estimate
from pipelines.planning.machine_speed import START_SECONDS
from pipelines.planning.suite_cost import summarize_suite
from pipelines.steps.input_resolution import check_recipes, get_unproven_reason, resolve_plans
from tests.datasets import QUESTION_WORDS
from tests.git_server import git_daemon
from tests.model_families import FAMILIES, build_configuration
from tests.pipelines.command import answer, refusal, tuneline
from tests.pipelines.project import write_project
from tests.quantization_environment import make_environment

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
KEYS = {
    *("dry_run", "rows", "tokens", "steps", "epochs", "recipe", "parameters", "memory", "disk", "seconds", "stages"),
    *("basis", "sources", "reference_rewards", "suite", "warnings", "cost", "dropped"),
}


@pytest.fixture(scope="module")
def fresh_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project folder without any run."""
    return write_project(tmp_path_factory.mktemp("fresh"))


COMPLETED = {"max_length": 32, "learning_rate": 1e-3, "epochs": 1.0, "batch_size": 2, "micro_batch_size": 2}
Estimate = Callable[..., dict[str, Any]]


def load_settings(folder: Path, *overrides: str) -> Customization:
    return load_customization(folder / "customization.yaml", overrides)


@pytest.fixture
def estimate(fresh_project: Path, monkeypatch: pytest.MonkeyPatch) -> Estimate:
    """Return a function that estimates in this process, in a workdir that does not exist."""
    work = Workdir(fresh_project / "nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
    return lambda *overrides: estimate_run(load_settings(fresh_project, *overrides), work, SilentReporter())


def test_rows_steps_and_tokens_equal_those_of_the_run(first: dict[str, Any], estimate: Estimate) -> None:
    result = estimate()
    dataset = artifact_folder.read(Path(first["artifacts"]["dataset"])).manifest.summary
    model = artifact_folder.read(Path(first["artifacts"]["model"])).manifest.summary
    assert result["rows"] == {**dataset["rows"], "formats": {"alpaca": 156}, "splits": dataset["splits"]}
    assert result["steps"] == model["steps"] == 30
    assert result["tokens"]["trained"] == model["tokens"]
    assert result["parameters"] == model["parameters"]
    assert result["tokens"]["tokenised_rows"] == dataset["splits"]["train"] == model["rows"]["train"]
    assert not any(stage["cached"] for stage in result["stages"])


@pytest.mark.parametrize(
    "recipe", [{"epochs": 1.5, "batch_size": 8}, {"epochs": 1.0, "batch_size": 20, "max_length": 40}]
)
def test_epoch_steps_and_tokens_equal_those_of_the_trainer(
    first: dict[str, Any], fresh_project: Path, estimate: Estimate, tmp_path: Path, recipe: dict[str, Any]
) -> None:
    changes = [
        "fine_tuning.max_steps=null",
        "fine_tuning.validation_rows=0",
        *(f"fine_tuning.{k}={v}" for k, v in recipe.items()),
    ]
    result = estimate(*changes)
    config = load_settings(fresh_project, *changes)
    dataset = artifact_folder.read(Path(first["artifacts"]["dataset"]))
    options: dict[str, Any] = {"seed": config.seed, "state": tmp_path / "state", "reporter": SilentReporter()}
    summary = finetune(dataset, tmp_path / "model", config.fine_tuning, **options).manifest.summary
    assert (result["steps"], result["tokens"]["trained"]) == (summary["steps"], summary["tokens"])
    assert (result["sources"], result["epochs"]) == (summary["sources"], round(summary["epochs"], 4))
    assert result["tokens"]["cut_share"] == pytest.approx(
        summary["rows"]["truncated"] / summary["rows"]["train"], abs=1e-4
    )
    assert (
        f"{recipe['epochs']:g} {'epoch' if recipe['epochs'] == 1 else 'epochs'} of {summary['rows']['train']} rows, {recipe['batch_size']} per step"
        == result["basis"]["steps"]
    )


@pytest.mark.long
def test_cached_stages_take_no_time(first: dict[str, Any], project: Path) -> None:
    result = answer("run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", cwd=project)
    assert set(result) == KEYS
    assert result["stages"] == [
        {"name": stage, "cached": True} for stage in ("data_curation", "fine_tuning", "evaluation", "triton_packaging")
    ]
    others = round(
        sum(
            START_SECONDS[name] for name in ("run", "resolve", "data_versioning", "registration", "promotion", "report")
        ),
        1,
    )
    assert result["seconds"] == {
        "data_curation": 0.0, "fine_tuning": 0.0, "evaluation": 0.0, "triton_packaging": 0.0, "other_steps": others, "total": others
    }  # fmt: skip
    assert result["disk"]["total"] == 0


def find_package_costs(store: Path) -> list[Path]:
    """Return the cost files of the packages in a store, newest first; other tests add packages to the shared store."""
    manifests = sorted(store.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    packages = [
        path.parent.name for path in manifests if artifact_folder.read_manifest(path.parent).kind == "repository"
    ]
    return [store / "costs" / f"{sha256}.json" for sha256 in packages]


@pytest.mark.long
def test_another_recipe_uses_the_speed_of_the_newest_similar_training(first: dict[str, Any], project: Path) -> None:
    arguments = [
        "run",
        "-c",
        "customization.yaml",
        "--workdir",
        "wd",
        "--set",
        "fine_tuning.learning_rate=3e-3",
        "--dry-run",
    ]
    result = answer(*arguments, cwd=project)
    assert {stage["name"]: stage["cached"] for stage in result["stages"]} == {
        "data_curation": True, "fine_tuning": False, "evaluation": False, "triton_packaging": False
    }  # fmt: skip
    assert "tokens/s, as in the newest similar training run on this hardware" in result["basis"]["seconds.fine_tuning"]
    package_seconds = json.loads(find_package_costs(project / "wd" / "store")[0].read_text())["seconds"]
    seconds = result["seconds"]
    assert seconds["triton_packaging"] == pytest.approx(START_SECONDS["triton_packaging"] + package_seconds, abs=0.1)
    assert (
        result["basis"]["seconds.triton_packaging"]
        == "5 s to start; time of the newest package of this base model in this store"
    )
    assert seconds["total"] == pytest.approx(sum(spent for name, spent in seconds.items() if name != "total"))
    text = tuneline(*arguments, cwd=project).stdout
    assert "data_curation     cached" in text
    assert re.search(r"^ +about \d+ s in total$", text, re.MULTILINE)


def test_every_step_has_a_start_time(first: dict[str, Any]) -> None:
    assert {"run", "report", *(stage["name"] for stage in first["stages"])} == set(START_SECONDS)


def test_without_earlier_runs_times_come_from_passes_of_the_model(estimate: Estimate) -> None:
    result = estimate()
    seconds = result["seconds"]
    for stage in ("data_curation", "fine_tuning", "evaluation"):
        assert seconds[stage] >= START_SECONDS[stage]
    assert seconds["other_steps"] > 10
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in seconds if name != "total"), abs=0.1)
    basis = result["basis"]["seconds.fine_tuning"]
    assert re.fullmatch(
        r"7 s to start; training and validation, at \S+ and \S+ GFLOP/s for training and forward passes: passes of the "
        "model with random weights, measured on this machine",
        basis,
    )
    text = format_estimate(result)
    assert f"          about {seconds['total']:,.0f} s in total" in text
    proven = machine_speed.START_TRITON_SECONDS if result["stages"] and not get_unproven_reason(Customization()) else 0
    unproven = estimate("triton_packaging.prove=false")["seconds"]["triton_packaging"]
    assert seconds["triton_packaging"] >= unproven + 0.9 * proven


def test_speed_of_an_earlier_training_includes_its_validations(
    estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer measures a step from the end of the previous one."""

    def list_history(survey: Any) -> list[artifact_folder.Manifest]:
        summary = {"arithmetic": model_loading.describe_arithmetic(), "tokens_per_second": 10.0}
        return [
            artifact_folder.Manifest(
                schema="tuneline/model/v1",
                content_sha256="0" * 64,
                inputs=[],
                files=[],
                config=survey.recipe.model_dump(),
                config_sha256="",
                seed=0,
                produced_by={},
                summary=summary,
            )
        ]

    monkeypatch.setattr(stage_times, "_list_history", list_history)
    result = estimate("fine_tuning.validation_rows=8")
    assert "10.0 tokens/s, as in the newest similar training" in result["basis"]["seconds.fine_tuning"]
    work = result["seconds"]["fine_tuning"] - START_SECONDS["fine_tuning"]
    assert work == pytest.approx(result["tokens"]["trained"] / 10, abs=0.1)


@pytest.mark.long
def test_time_of_a_package_without_recorded_cost_is_estimated(
    first: dict[str, Any], project: Path, tmp_path: Path
) -> None:
    shutil.copytree(project / "wd" / "store", tmp_path / "store")
    for cost in find_package_costs(tmp_path / "store"):
        cost.unlink()
    change = ("--set", "fine_tuning.learning_rate=3e-3")
    arguments = ("run", "-c", "customization.yaml", "--workdir", "wd", *change, "--dry-run")
    result = answer(*arguments, cwd=project, TUNELINE_STORE=str(tmp_path / "store"))
    assert result["seconds"]["triton_packaging"] > START_SECONDS["triton_packaging"]
    assert "; writing, loading, and answers to the golden prompts, at " in result["basis"]["seconds.triton_packaging"]


def snapshot_files(*folders: Path) -> dict[str, tuple[int, str]]:
    """Return every path in the folders with its modification time and the digest of its content."""
    files = {}
    for path in sorted(p for folder in folders for p in folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        files[str(path)] = (path.stat().st_mtime_ns, digest)
    return files


@pytest.mark.parametrize("workdir", ["wd", pytest.param("not-there-yet", marks=pytest.mark.stress)])
def test_dry_run_writes_no_file(first: dict[str, Any], project: Path, tmp_path: Path, workdir: str) -> None:
    folders = {name: tmp_path / name.lower() for name in ("TUNELINE_CACHE", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for folder in folders.values():
        folder.mkdir()
    before = snapshot_files(project, *folders.values())
    extra = {name: str(folder) for name, folder in folders.items()}
    answer("run", "-c", "customization.yaml", "--workdir", workdir, "--dry-run", cwd=project, **extra)
    assert snapshot_files(project, *folders.values()) == before


@pytest.mark.long
@pytest.mark.model
def test_demo_is_estimated_without_converting_the_embedded_model(tmp_path: Path) -> None:
    folder, cache = tmp_path / "here", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    process = tuneline("run", "--dry-run", "--json", cwd=folder, TUNELINE_CACHE=str(cache))
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    result = json.loads(process.stdout)
    assert os.listdir(folder) == os.listdir(cache) == []  # noqa: PTH208
    assert result["rows"]["in"] > 1000
    assert result["rows"]["rejected"]["exact_duplicate"] > 100
    assert result["parameters"] == {"all": 134_515_008 + 4_884_480, "trainable": 4_884_480}
    assert result["tokens"]["tokenised_rows"] <= 2000
    assert "evenly spread rows of" in result["basis"]["tokens"]
    assert result["steps"] == 40
    assert 2e9 < result["memory"]["training"]["total"] < 8e9
    assert result["memory"]["training"]["weights"] == (134_515_008 + 4_884_480) * 4
    assert "GFLOP/s" in result["basis"]["seconds.fine_tuning"]


def test_memory_grows_with_trained_parameters_and_batch(estimate: Estimate) -> None:
    lora, full = estimate()["memory"]["training"], estimate("fine_tuning.adaptation=full")["memory"]["training"]
    parameters = estimate("fine_tuning.adaptation=full")["parameters"]
    assert (
        full["gradients"] + full["optimizer"] + full["weights"]
        == 16 * parameters["all"]
        == 16 * parameters["trainable"]
    )
    assert lora["optimizer"] < full["optimizer"] / 2
    half = estimate("fine_tuning.micro_batch_size=1")["memory"]["training"]
    assert (half["logits"], half["activations"]) == (lora["logits"] // 2, lora["activations"] // 2)
    for parts in (lora, full, half):
        assert parts["total"] == sum(size for name, size in parts.items() if name != "total")


def test_memory_and_digest_of_the_teacher_are_part_of_the_estimate(estimate: Estimate, fresh_project: Path) -> None:
    settings = load_settings(fresh_project).fine_tuning
    options = ["fine_tuning.objective=distill", "fine_tuning.distillation.max_answer_tokens=8"]
    result = estimate(*options, f"fine_tuning.distillation.teacher={settings.base_model}")
    parts = result["memory"]["training"]
    base = result["parameters"]["all"] - result["parameters"]["trainable"]
    assert parts["other models"] == 4 * base
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    assert "other models 0.0 GB" in "\n".join(dry_run.format_estimate(result))
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.distillation\.teacher: .*/nowhere is not a folder"):
        estimate(*options, "fine_tuning.distillation.teacher=nowhere")


def test_context_of_the_teacher_is_compared_with_the_chosen_length(estimate: Estimate, fresh_project: Path) -> None:
    teacher = shutil.copytree(fresh_project / "tiny", fresh_project / "short")
    values = json.loads((teacher / "config.json").read_text()) | {"max_position_embeddings": 24}
    (teacher / "config.json").write_text(json.dumps(values))
    options = ["fine_tuning.objective=distill", "fine_tuning.distillation.max_answer_tokens=8"]
    options += [f"fine_tuning.distillation.teacher={teacher}", "fine_tuning.max_length=null"]
    with pytest.raises(
        ConfigurationError, match=r"distillation\.teacher: the context of .*short is 24 tokens; rows of"
    ):
        estimate(*options)


def list_rollout_settings(objective: str, rewards: str = "{kind: length, max_words: 5}") -> list[str]:
    grpo = f"{{answers_per_prompt: 4, max_answer_tokens: 16, kl_weight: 0, rewards: [{rewards}]}}"
    return [f"fine_tuning.objective={objective}", f"fine_tuning.grpo={grpo}", "fine_tuning.validation_rows=0"]


def test_reward_model_of_an_earlier_customization_counts_like_the_base_model(
    fresh_project: Path, estimate: Estimate
) -> None:
    """Its model does not exist yet, so only the configuration of the base model is known."""
    base = artifact_parameters(load_settings(fresh_project).fine_tuning.base_model)
    alone = estimate(*list_rollout_settings("grpo"))["memory"]["training"]
    rewards = "{kind: length, max_words: 5}, {kind: reward_model, model: previous}"
    both = estimate(*list_rollout_settings("grpo", rewards))["memory"]["training"]
    assert "other models" not in alone
    assert both["other models"] == pytest.approx(4 * base, rel=0.05)
    assert both["total"] == alone["total"] + both["other models"]


def artifact_parameters(base_model: str) -> int:
    config = load_outline(base_model).config
    return count_parameters(config, FineTuningConfig(adaptation="full", objective="reward"))["all"]


def test_passes_of_rollouts_and_validation_are_part_of_the_training_time(
    monkeypatch: pytest.MonkeyPatch, estimate: Estimate
) -> None:
    """TRL's RLOO also computes the log-probabilities of the sampled answers. A fixed speed makes the sums comparable."""
    speed = machine_speed.ModelSpeed(1e9, 1e9, 0.01, 0.001, "fixed")
    monkeypatch.setattr(machine_speed, "measure_speed", lambda *_, **__: speed)

    def get_seconds(*overrides: str) -> float:
        seconds: float = estimate(*overrides)["seconds"]["fine_tuning"]
        return seconds

    grpo, rloo = (list_rollout_settings(objective) for objective in ("grpo", "rloo"))
    assert get_seconds(*rloo) > get_seconds(*grpo)
    assert get_seconds(*grpo, "fine_tuning.grpo.kl_weight=0.1") > get_seconds(*grpo)
    assert get_seconds(*grpo, "fine_tuning.validation_rows=8") > get_seconds(*grpo)
    decoding = get_seconds(*grpo, "fine_tuning.max_steps=20") - get_seconds(*grpo, "fine_tuning.max_steps=10")
    assert decoding > 10 * 16 * 0.01  # ten steps of 16 tokens
    assert get_seconds() > get_seconds("fine_tuning.validation_rows=0")


def test_speed_is_measured_with_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch, estimate: Estimate) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    torch.set_num_threads(2)
    estimate()
    assert torch.get_num_threads() == 1


def test_speed_of_a_large_model_is_that_of_its_first_layers(
    fresh_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_outline(load_settings(fresh_project).fine_tuning.base_model).config
    recipe = Recipe.model_validate({**FineTuningConfig().model_dump(), **COMPLETED})
    shape = ModelShape.from_configuration(config, count_parameters(config, recipe))
    whole = machine_speed.measure_speed(recipe, config, shape, rows=2, length=16)
    assert whole.basis.startswith("passes of the model ")
    assert min(whole.training, whole.forward, whole.token_seconds) > 0
    layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) // shape.layers
    monkeypatch.setattr(machine_speed, "MAX_PASS_PARAMETERS", 2 * shape.vocabulary * shape.hidden + layer)
    assert machine_speed.measure_speed(recipe, config, shape, rows=2, length=16).basis.startswith(
        "passes of 1 of 2 layers"
    )
    monkeypatch.setattr(machine_speed, "MAX_PASS_PARAMETERS", 0)
    assert machine_speed.measure_speed(recipe, config, shape, rows=2, length=16).basis.startswith("half the rate")


@pytest.mark.parametrize("name", ["Qwen3-Next", "Granite 4 (hybrid)", "Jamba", "Mamba"])
def test_speed_of_a_model_without_a_key_value_cache_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_configuration(next(family for family in FAMILIES if family.name == name))
    monkeypatch.setattr(machine_speed, "_count_pass_layers", lambda _: 1)
    speed = measure(config)
    assert speed.basis.startswith("passes of 1 of 2 layers")
    assert min(speed.forward, speed.token_seconds) > 0


def measure(config: Any, *, length: int = 16, **settings: Any) -> machine_speed.ModelSpeed:
    recipe = Recipe.model_validate({**FineTuningConfig.model_validate(settings).model_dump(), **COMPLETED})
    shape = ModelShape.from_configuration(config, count_parameters(config, recipe))
    return machine_speed.measure_speed(recipe, config, shape, rows=2, length=length)


def build_family(name: str, **sizes: Any) -> Any:
    family = next(family for family in FAMILIES if family.model_type == name)
    return build_configuration(replace(family, sizes={**family.sizes, **sizes}))


def test_speed_is_measured_up_to_the_context_of_the_model() -> None:
    """The learned positions of GPT-2 end there."""
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=4, vocab_size=400)
    speed = measure(config)
    assert speed.basis.startswith("passes of the model")


def test_speed_of_an_adapter_of_a_later_layer_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_count_pass_layers", lambda _: 1)
    adapter = {"target_modules": ["model.layers.1.self_attn.q_proj"]}
    assert measure(build_family("llama"), lora=adapter).basis.startswith("half the rate")


def test_speed_of_a_model_for_rewards_without_padding_is_measured() -> None:
    config = build_family("llama")
    config.pad_token_id = None
    assert measure(config, objective="reward").basis.startswith("passes of the model")


def test_speed_is_measured_in_float32_and_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def record(model: Any, ids: Any, sequences: int) -> float:
        measured.append((model.dtype, tuple(ids.shape)))
        return 0.001 * sequences

    monkeypatch.setattr(machine_speed, "_time_decoding", record)
    config = build_family("llama")
    config.dtype = torch.bfloat16
    measure(config)
    tokens = machine_speed.MAX_PASS_TOKENS // 4
    free = 4 * tokens * config.vocab_size * machine_speed.LOGIT_BYTES
    monkeypatch.setattr(compute_devices, "get_free_memory_bytes", lambda _: free)
    config.max_position_embeddings = 2 * machine_speed.MAX_PASS_TOKENS
    measure(config, length=machine_speed.MAX_PASS_TOKENS)
    assert measured[::2] == [(torch.float32, (1, 16)), (torch.float32, (1, tokens))]


def test_speed_is_that_of_the_device_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure(build_family("llama"), device="cpu").basis.startswith("passes of the model")


def test_estimated_token_reads_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "MAX_PASS_PARAMETERS", 0)
    monkeypatch.setattr(machine_speed, "measure_copy_rate", lambda _: 100.0)
    config = build_family("llama")
    parameters = count_parameters(config, FineTuningConfig())["all"]
    assert measure(config).token_seconds == pytest.approx(4 * parameters / 100, rel=0.01)


def test_reward_model_is_not_packaged(
    fresh_project: Path, estimate: Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(tmp_path / "nowhere"))
    row = {"prompt": "May I?", "chosen": "Yes, you may.", "rejected": "No."}
    rows = [{**row, "prompt": f"May I take item {n}?"} for n in range(20)]
    path = fresh_project / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("fine_tuning.objective=reward", "evaluation.min_items=30", f"data_curation.sources=[{path}]")
    options = (*options, "triton_packaging.backend=vllm", "triton_packaging.quantization=int4-gptq")
    config = load_settings(fresh_project, *options)
    outline = load_outline(config.fine_tuning.base_model)
    check_recipes(config, None, outline.config)
    result = estimate(*options)
    assert result["rows"]["splits"]["test"] < 10  # which the comparison of a package requires
    assert result["seconds"]["triton_packaging"] == 0
    assert result["basis"]["seconds.triton_packaging"] == "a reward model is not packaged"
    assert "triton_packaging" not in result["memory"]["stages"]
    assert result["memory"]["training"]["logits"] == 0
    assert any(warning.startswith("the gate will refuse the model") for warning in result["warnings"])


def test_calibration_adds_to_the_time_and_memory_of_the_evaluation(
    estimate: Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(make_environment(tmp_path / "environment", "exit 1")))
    vllm = "triton_packaging.backend=vllm"
    rounded, calibrated = (estimate(vllm, f"triton_packaging.quantization={name}") for name in ("fp8", "int4-gptq"))
    assert "llm-compressor" not in rounded["basis"]["seconds.evaluation"]
    assert re.search(r"llm-compressor calibrates weights on \d+ tokens", calibrated["basis"]["seconds.evaluation"])
    memory = [result["memory"]["stages"]["evaluation"] for result in (rounded, calibrated)]
    assert memory[0] < memory[1]
    assert calibrated["disk"]["repository"] < rounded["disk"]["repository"]
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="require llm-compressor, but"):
        estimate(vllm, "triton_packaging.quantization=int4-gptq")


def test_sweep_adds_the_time_of_all_and_the_memory_of_parallel_recipes(estimate: Estimate) -> None:
    one, all_three = estimate(), estimate("fine_tuning.sweep.vary={learning_rate: [1e-4, 3e-4, 1e-3]}")
    assert all_three["memory"]["stages"]["fine_tuning"] == 2 * one["memory"]["stages"]["fine_tuning"]
    assert all_three["disk"]["checkpoints"] == 2 * one["disk"]["checkpoints"]
    assert (all_three["steps"], all_three["tokens"]["trained"]) == (3 * one["steps"], 3 * one["tokens"]["trained"])
    assert all_three["basis"]["steps"] == "3 recipes together: fine_tuning.max_steps"
    assert "3 recipes together: " in all_three["basis"]["seconds.fine_tuning"]


def test_each_recipe_of_a_sweep_is_estimated_separately(estimate: Estimate) -> None:
    """With two parallel recipes the memory is that of the two largest; the parameters are those of the largest."""
    ranks, steps = (4, 8, 16), (10, 20)
    alone = {rank: estimate(f"fine_tuning.lora.rank={rank}", "fine_tuning.max_steps=20") for rank in ranks}
    swept = estimate(f"fine_tuning.sweep.vary={{lora.rank: {list(ranks)}, max_steps: {list(steps)}}}")
    assert swept["parameters"] == alone[16]["parameters"]
    assert swept["memory"]["training"] == alone[16]["memory"]["training"]
    assert swept["memory"]["stages"]["fine_tuning"] == 2 * alone[16]["memory"]["stages"]["fine_tuning"]
    assert swept["memory"]["stages"]["evaluation"] == alone[16]["memory"]["stages"]["evaluation"]
    assert swept["steps"] == len(ranks) * sum(steps)
    models = {rank: result["disk"]["model"] / 2 for rank, result in alone.items()}  # in the store and in MLflow
    assert swept["disk"]["model"] == 2 * models[16] + len(steps) * sum(models.values())


def test_remote_training_has_no_time_and_no_local_memory(estimate: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in to_environment(LauncherSettings(kind="slurm", nodes=2)).items():
        monkeypatch.setenv(name, value)
    result = estimate("fine_tuning.processes=16", "fine_tuning.batch_size=16", "fine_tuning.micro_batch_size=1")
    assert (result["seconds"]["fine_tuning"], result["seconds"]["total"]) == (None, None)
    assert result["basis"]["seconds.fine_tuning"] == "the launcher (slurm, 2 nodes) trains at an unknown speed"
    assert result["memory"]["largest_stage"] != "fine_tuning"
    (total_line,) = (line for line in format_estimate(result) if "; unknown: " in line)
    assert total_line.endswith("unknown: fine_tuning (the launcher (slurm, 2 nodes) trains at an unknown speed)")


def test_each_unknown_time_has_its_reason() -> None:
    seconds = {"fine_tuning": None, "evaluation": 3.0, "triton_packaging": None, "total": None}
    basis = {
        "seconds.fine_tuning": "trained by a launcher",
        "seconds.evaluation": "rough",
        "seconds.triton_packaging": "never made",
    }
    last = dry_run._format_times({"stages": [], "seconds": seconds, "basis": basis})[-1]
    assert (
        last.strip()
        == "about 3 s for the other stages; unknown: fine_tuning (trained by a launcher); triton_packaging (never made)"
    )


def test_open_settings_are_chosen_and_stated(estimate: Estimate) -> None:
    """The settings that the project states are null here, as in a configuration that states none."""
    names = (
        "max_steps",
        "batch_size",
        "micro_batch_size",
        "learning_rate",
        "max_length",
        "warmup_steps",
        "checkpoint_every",
    )
    result = estimate(*(f"fine_tuning.{name}=null" for name in names))
    assert (result["epochs"], result["tokens"]["max_length"]) == (3.0, 128)
    assert result["steps"] == 3 * -(-result["rows"]["splits"]["train"] // 16)
    assert [choice.split(":")[0] for choice in result["recipe"]] == [
        "max_length 128",
        "micro_batch_size 2",
        "batch_size 16",
        "epochs 3",
        "learning_rate 0.0074",
    ]
    assert not [warning for warning in result["warnings"] if "trains on" in warning]


@pytest.fixture
def mixed(fresh_project: Path) -> Path:
    """Return a file with rows of two sources."""
    rows = [json.loads(line) for line in (fresh_project / "raw.jsonl").read_text().splitlines()]
    mixed = [{**row, "source": "handbook" if i % 3 == 0 else "web"} for i, row in enumerate(rows)]
    file = fresh_project / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    return file


def test_mixed_sources_equal_those_of_the_training(
    mixed: Path, fresh_project: Path, estimate: Estimate, tmp_path: Path
) -> None:
    changes = [
        "fine_tuning.max_steps=null",
        "fine_tuning.epochs=1.5",
        "fine_tuning.mixing_caps={web: 30}",
        "fine_tuning.mixing_repetitions={handbook: 1.5}",
        "fine_tuning.mixing_temperature=2",
    ]
    result, config = estimate(f"data_curation.sources=[{mixed}]", *changes), load_settings(fresh_project, *changes)
    options: dict[str, Any] = {"seed": config.seed, "reporter": SilentReporter()}
    dataset = curate(list_sources([str(mixed)], mixed.parent), tmp_path / "dataset", config.data_curation, **options)
    model = finetune(dataset, tmp_path / "model", config.fine_tuning, state=tmp_path / "state", **options)
    summary = model.manifest.summary
    assert {share["source"]: share["seen"] > 0 for share in result["sources"]} == {"handbook": True, "web": True}
    assert result["sources"] == summary["sources"]
    assert (result["steps"], result["tokens"]["trained"]) == (summary["steps"], summary["tokens"])
    assert result["epochs"] == round(summary["epochs"], 4)


def test_mixing_weights_give_the_rows_of_each_source(mixed: Path, estimate: Estimate) -> None:
    settings = [f"data_curation.sources=[{mixed}]", "fine_tuning.max_steps=null"]
    result = estimate(*settings, "fine_tuning.epochs=2", "fine_tuning.mixing_weights={handbook: 1, web: 1}")
    trained = result["rows"]["splits"]["train"]
    handbook, web = result["sources"]
    assert (handbook["source"], handbook["examples"] + web["examples"]) == ("handbook", trained)
    assert handbook["seen"] + web["seen"] == 2 * trained
    assert abs(handbook["seen"] - web["seen"]) <= 2
    assert web["left_out"] == 0
    assert handbook["tokens"] + web["tokens"] == result["tokens"]["trained"]
    assert (
        f"          handbook: {handbook['examples']} examples, each seen {handbook['repetitions']:.2f} times on average, {handbook['tokens']:,} tokens "
        f"({handbook['token_share']:.1%})" in format_estimate(result)
    )
    result = estimate(*settings, "fine_tuning.epochs=2")
    assert [share["repetitions"] for share in result["sources"]] == [2, 2], "listed without settings too"
    varied = "fine_tuning.sweep.vary={mixing_weights: [{handbook: 1, web: 1}, {handbook: 0, web: 1}]}"
    result = estimate(*settings, varied)
    assert result["sources"] == [], "the recipes differ"
    assert any("leaves out" in warning and "of handbook" in warning for warning in result["warnings"])
    with pytest.raises(ConfigurationError, match=r"matches blog; sources: handbook, web"):
        estimate(*settings, "fine_tuning.mixing_weights={blog: 1, '*': 1}")


def test_sources_of_a_sample_are_planned(
    fresh_project: Path, estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ("fine_tuning.max_steps=null", "fine_tuning.epochs=2", "fine_tuning.mixing_caps={raw.jsonl: 40}")
    (exact,) = estimate(*changes)["sources"]
    monkeypatch.setattr(dry_run, "MAX_SAMPLED_ROWS", 50)
    result = estimate(*changes)
    (planned,) = result["sources"]
    assert {**planned, "tokens": 0, "left_out": 0} == {**exact, "tokens": 0, "left_out": 0}
    assert planned["tokens"] == result["tokens"]["trained"] == pytest.approx(exact["tokens"], rel=0.1)
    assert result["tokens"]["an_epoch"] == pytest.approx(planned["tokens"] / 2, abs=1)


def test_rows_and_tokens_left_out_and_few_items_give_warnings(estimate: Estimate) -> None:
    warnings = estimate("fine_tuning.max_steps=5", "fine_tuning.max_length=80")["warnings"]
    assert [
        w
        for w in warnings
        if w.startswith("with fine_tuning.max_steps 5, training covers 20 of 97 rows (0.21 epochs). ")
    ]
    pattern = r"[\d.]+% of the training rows are truncated at 80 tokens, which cuts off (?!0\.0%)[\d.]+% of all tokens\. Raise"
    assert [w for w in warnings if re.match(pattern, w)]
    assert [w for w in warnings if w.startswith("the held-out evaluation has 40 items: only a large difference")]
    limited = estimate("evaluation.max_items=5")["warnings"]
    assert [w for w in limited if w.endswith("only a large difference is significant. Raise evaluation.max_items")]
    assert (
        "the gate will refuse the model: 5 held-out items; the rules of evaluation.gate require at least 29" in limited
    )


def test_shortage_of_memory_or_disk_gives_a_warning(
    estimate: Estimate, monkeypatch: pytest.MonkeyPatch, fresh_project: Path
) -> None:
    assert not [w for w in estimate()["warnings"] if "memory" in w or "disk" in w]
    monkeypatch.setattr(
        dry_run.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**8, "total": 10**8})()
    )
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**5})())
    warnings = " ".join(estimate("fine_tuning.adaptation=full")["warnings"])
    assert "of memory; 0.1 GB are free." in warnings
    assert f"of disk in {fresh_project / 'nowhere'}; 0.0 GB are free" in warnings


def test_too_few_test_rows_and_empty_files_are_reported(fresh_project: Path, estimate: Estimate) -> None:
    folder = fresh_project / "few"
    folder.mkdir()
    rows = (fresh_project / "raw.jsonl").read_text().splitlines(keepends=True)[:60]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "empty.jsonl").touch()
    options = (f"data_curation.sources=[{folder}]", "data_curation.fractions={train: 0.6, validation: 0.1, test: 0.3}")
    warnings = estimate(*options)["warnings"]
    assert [warning for warning in warnings if warning.endswith("empty.jsonl is empty")]
    [warning] = [warning for warning in warnings if " held-out items; the rules" in warning]
    assert warning.endswith(
        "require at least 29. Set data_curation.fractions to {train: 0.35, validation: 0.1, test: 0.55}"
    )
    advised = estimate(options[0], f"data_curation.fractions={warning.partition(' to ')[2]}")["warnings"]
    assert not [warning for warning in advised if " held-out items; the rules" in warning]


def test_too_few_test_rows_for_quantization_are_refused(fresh_project: Path, estimate: Estimate) -> None:
    few = fresh_project / "few.jsonl"
    few.write_text("".join((fresh_project / "raw.jsonl").read_text().splitlines(keepends=True)[:20]))
    with pytest.raises(
        InputError, match=r"the test split has \d rows; triton_packaging\.quantization requires at least 10"
    ):
        estimate(f"data_curation.sources=[{few}]", "triton_packaging.quantization=int8")


def test_too_few_rows_give_the_warning_of_curation(fresh_project: Path, estimate: Estimate, tmp_path: Path) -> None:
    few = fresh_project / "few.jsonl"
    few.write_text("".join((fresh_project / "raw.jsonl").read_text().splitlines(keepends=True)[:2]))
    result = estimate(f"data_curation.sources=[{few}]")
    config = load_settings(fresh_project)
    with pytest.raises(InputError) as error:
        curate(
            list_sources([str(few)], fresh_project),
            tmp_path / "out",
            config.data_curation,
            seed=config.seed,
            reporter=SilentReporter(),
        )
    assert f"{error.value.message}. {error.value.hint}" in result["warnings"]
    assert "too few rows for the split: with 2 rows" in error.value.message
    assert result["steps"] == 30


def test_unprovable_package_gives_a_warning(estimate: Estimate) -> None:
    warnings = estimate("triton_packaging.prove=false")["warnings"]
    assert any(
        w.startswith("the model will be packaged unproven and cannot be promoted: triton_packaging.prove is off")
        for w in warnings
    )


def test_requirement_that_the_run_cannot_meet_gives_a_warning(
    fresh_project: Path, estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.model_validate({"tasks": [{"name": "gsm8k"}], "licences": ["mit"]})
    monkeypatch.setattr(policy_report, "find_policy_in_force", lambda _: PolicyInForce(policy, 7))
    unmet = "policy entry 7 requires task gsm8k; its evaluation does not include this task"
    licence = "policy entry 7 allows the licences mit; the model states no licence of its base model"
    warnings = estimate()["warnings"]
    assert {f"the model will not be promoted: {clause}" for clause in (unmet, licence)} <= set(warnings)
    config = load_settings(fresh_project, "model_registry.auto_promote=true")
    with pytest.raises(ConfigurationError, match=unmet):
        resolve_plans(config, Workdir(fresh_project / "nowhere"), SilentReporter())


def test_dropped_and_unreadable_rows_are_counted_by_reason_and_format(fresh_project: Path, estimate: Estimate) -> None:
    rows = (fresh_project / "raw.jsonl").read_text().splitlines()
    mixed = [
        *rows,
        rows[0],
        "{broken",
        json.dumps({"prompt": "What is this?", "completion": " "}),
        json.dumps({"weather": "fine"}),
    ]
    (fresh_project / "mixed.jsonl").write_text("\n".join(mixed) + "\n")
    result = estimate(f"data_curation.sources=[{fresh_project / 'mixed.jsonl'}]")
    counts = result["rows"]
    assert counts["in"] == 160
    assert (counts["kept"], counts["quarantined"]) == (156, 2)
    assert counts["rejected"] == {"empty_answer": 1, "exact_duplicate": 1}
    assert counts["formats"] == {"alpaca": 157, "prompt_completion": 1}
    text = "\n".join(line.strip() for line in format_estimate(result))
    assert "first row rejected as exact_duplicate: mixed.jsonl:157\n" in text
    assert "first row rejected as empty_answer: mixed.jsonl:159\n" in text
    assert "\nquarantined: mixed.jsonl:158: " in text
    assert len(result["dropped"]["first_unreadable"]) == 2


def test_rows_of_an_evaluation_set_are_counted_as_contaminated(fresh_project: Path, estimate: Estimate) -> None:
    row = json.loads((fresh_project / "raw.jsonl").read_text().splitlines()[7])
    (fresh_project / "exam.jsonl").write_text(json.dumps({"question": f"{row['instruction']} {row['output']}"}) + "\n")
    rows = estimate(f"data_curation.decontamination.sets=[{fresh_project / 'exam.jsonl'}]")["rows"]
    assert (rows["kept"], rows["rejected"]) == (155, {"contaminated": 1})


def test_quality_scores_are_a_warning_because_rows_are_not_scored(fresh_project: Path, estimate: Estimate) -> None:
    settings = "{perplexity: {enabled: true, max_score: 1}}"
    result = estimate(f"data_curation.quality_scores={settings}")
    assert result["rows"]["kept"] == 156
    assert any(warning.startswith("a dry run does not score rows") for warning in result["warnings"])


def test_rows_are_compared_with_stored_revisions_only(
    first: dict[str, Any], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workdir(project / "wd")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
    rows = (project / "raw.jsonl").read_text().splitlines()
    new_row = {"instruction": "Who is new here?", "input": "", "output": "This row is, and nobody has published it."}
    (tmp_path / "more.jsonl").write_text("\n".join([*rows[:20], json.dumps(new_row)]) + "\n")
    config = load_settings(
        project, f"data_curation.sources=[{tmp_path / 'more.jsonl'}]", "data_curation.published=drop"
    )
    config.fine_tuning.base_model = str(project / "tiny")
    result = estimate_run(config, work, SilentReporter())
    assert (result["rows"]["kept"], result["rows"]["rejected"]) == (1, {"exact_duplicate": 20})
    assert "not compared" not in result["basis"]["rows"]
    (tmp_path / "more.jsonl").write_text("\n".join(rows[:20]) + "\n")
    with pytest.raises(
        InputError,
        match=r"no row is kept: 20 rejected as exact_duplicate; data_curation\.published is drop",
    ):
        estimate_run(config, work, SilentReporter())
    (tmp_path / "more.jsonl").write_text("\n".join([*rows[:20], json.dumps(new_row)]) + "\n")
    (tmp_path / "elsewhere").mkdir()
    datasets = [
        path.parent for path in work.store.glob("*/train.parquet")
    ]  # other tests may have published further ones
    try:
        for dataset in datasets:
            dataset.rename(tmp_path / "elsewhere" / dataset.name)
        result = estimate_run(config, work, SilentReporter())
    finally:
        for dataset in datasets:
            (tmp_path / "elsewhere" / dataset.name).rename(dataset)
    assert result["rows"]["kept"] == 21
    assert "not compared with dataset-v1" in result["basis"]["rows"]
    assert result["basis"]["rows"].endswith("a run fetches first")


@pytest.mark.stress
def test_remote_data_repository_leaves_no_mirror_in_the_workdir(
    first: dict[str, Any], project: Path, tmp_path: Path
) -> None:
    before = snapshot_files(project)
    (tmp_path / "data.git").symlink_to(project / "wd" / "data-repository")
    with git_daemon(tmp_path) as server:
        override = f"data_versioning.repository={server}/data.git"
        result = answer(
            "run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", "--set", override, cwd=project
        )
    assert {stage["name"] for stage in result["stages"] if stage["cached"]} >= {"data_curation"}
    assert snapshot_files(project) == before


@pytest.mark.long
def test_dry_run_writes_nothing_to_the_state_folder(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    (tmp_path / "data.git").symlink_to(project / "wd" / "data-repository")
    state = tmp_path / "state"
    state.mkdir()
    with git_daemon(tmp_path) as server:
        override = f"data_versioning.repository={server}/data.git"
        command = ("run", "-c", "customization.yaml", "--workdir", "wd", "--dry-run", "--set", override)
        result = answer(*command, cwd=project, TUNELINE_STATE=str(state))
    assert {stage["name"] for stage in result["stages"] if stage["cached"]} >= {"data_curation"}
    assert list(state.iterdir()) == []


def test_rows_without_conversations_are_refused(fresh_project: Path, estimate: Estimate) -> None:
    (fresh_project / "plain.txt").write_text(
        "\n".join(f"Line {i} of a plain text, number {i * 7919}." for i in range(60))
    )
    with pytest.raises(InputError) as error:
        estimate(f"data_curation.sources=[{fresh_project / 'plain.txt'}]")
    assert error.value.message.startswith(
        "the sources contain text rows, which this objective cannot learn from; expected conversations"
    )
    assert "fine_tuning.objective to text" in error.value.hint


def test_unknown_group_key_is_refused(estimate: Estimate) -> None:
    with pytest.raises(InputError, match=r"data_curation\.group_by is .team., but no row has that field"):
        estimate("data_curation.group_by=team")


@pytest.mark.parametrize(
    "override",
    [
        "data_curation.sources=[missing.jsonl]",
        "data_curation.sources=['*.parquet']",
        "fine_tuning.base_model=nowhere",
        "fine_tuning.base_model=embedded:gpt",
        "fine_tuning.base_model=hf://org/name",
        "fine_tuning.base_model=s3://bucket/model",
    ],
)
def test_dry_run_fails_like_the_run(
    fresh_project: Path, estimate: Estimate, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fresh_project)
    config = load_customization(fresh_project / "customization.yaml", [override])
    with pytest.raises(TunelineError) as run_error:
        resolve_plans(config, Workdir(fresh_project / "nowhere"), SilentReporter())
    with pytest.raises(TunelineError) as dry_run_error:
        estimate(override)
    assert dry_run_error.value.as_dict() == run_error.value.as_dict()
    assert dry_run_error.value.exit_code == run_error.value.exit_code == 2
    assert dry_run_error.value.hint


MESSAGE_PREFIX = "evaluation.tasks[0]: "
JUDGE_TASK = {"kind": "judge", "base_url": "https://judge.example/v1", "model": "j", "calibration": "ROWS"}
ARC_ROW = '{"question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "A"}'


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ({"kind": "generation"}, '{"prompt": "Say it."}', "has no text in references"),
        ({"kind": "generation"}, '{"prompt": "Say it.", "reference": "it"', "invalid JSON"),
        (
            {"kind": "multiple_choice"},
            '{"query": "Which?", "choices": ["one"], "gold": 3}',
            "expected two or more options",
        ),
        ({"kind": "generation", "metrics": ["json_schema"], "json_schema": "DATA"}, '{"type": "nothing"}', "nothing"),
        ({"kind": "lm_eval", "task": "arc_eazy"}, '{"query": "Which?"}', "lm-eval has no task arc_eazy"),
        ({"kind": "lm_eval", "task": "arc_easy", "metrics": ["f2"]}, ARC_ROW, "does not measure f2"),
        ({"kind": "lm_eval", "task": "arc_easy"}, '{"query": "Which?", "choices": ["a", "b"]}', "UndefinedError"),
        (
            {**JUDGE_TASK, "api_key_env": "NOT_SET"},
            "{}",
            "variable NOT_SET is not set",
        ),
        (
            JUDGE_TASK,
            '{"prompt": "Which?", "answers": ["it", "that"], "label": "a"}',
            "the row repeats the pair at",
        ),
        (
            JUDGE_TASK,
            '{"prompt": "Which?", "answers": ["it", "that"], "label": 1}',
            "has 1 in label; expected a, b or tie",
        ),
    ],
)
def test_invalid_task_fails_before_the_training(
    fresh_project: Path, estimate: Estimate, task: dict[str, str], rows: str, message: str
) -> None:
    (fresh_project / "rows.json").write_text(rows)
    (fresh_project / "rows.jsonl").write_text(f"{rows}\n" * 3)
    task = {**task, "data": str(fresh_project / "rows.jsonl")}
    files = {"DATA": "rows.json", "ROWS": "rows.jsonl"}
    task |= {name: str(fresh_project / files[str(value)]) for name, value in task.items() if str(value) in files}
    override = f"evaluation.tasks=[{json.dumps(task)}]"
    with pytest.raises(TunelineError) as run_error:
        resolve_plans(
            load_customization(fresh_project / "customization.yaml", [override]),
            Workdir(fresh_project / "nowhere"),
            SilentReporter(),
        )
    with pytest.raises(TunelineError) as dry_run_error:
        estimate(override)
    assert run_error.value.message.startswith(MESSAGE_PREFIX)
    assert message in run_error.value.message
    assert dry_run_error.value.as_dict() == run_error.value.as_dict()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "evaluation.tasks=[{kind: held_out}, {kind: judge, base_url: 'http://127.0.0.1:9/v1', model: j}]",
            "evaluation.tasks[1]: the judge at http://127.0.0.1:9/v1 does not answer",
        ),
        (
            "data_curation.quality_scores.judge={url: 'http://127.0.0.1:9/v1', model: j}",
            "the judge at http://127.0.0.1:9/v1 ",
        ),
    ],
)
def test_unreachable_judge_is_an_error(estimate: Estimate, override: str, message: str) -> None:
    with pytest.raises(EngineMissingError) as error:
        estimate(override)
    assert error.value.message.startswith(message)


def test_unusable_rewards_are_errors_before_the_training(
    fresh_project: Path, estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_overrides(reward: str) -> list[str]:
        return ["fine_tuning.objective=grpo", "fine_tuning.packing=false", f"fine_tuning.grpo.rewards=[{reward}]"]

    judge = "{kind: judge, judge: {base_url: 'http://127.0.0.1:9/v1', model: j}}"
    with pytest.raises(
        EngineMissingError, match=r"the judge of the rewards at http://127\.0\.0\.1:9/v1 cannot be used"
    ):
        estimate(*build_overrides(judge))
    with pytest.raises(InputError, match=r"the reward ifeval cannot score the row .*\.jsonl:\d+: the row has None"):
        estimate(*build_overrides("{kind: ifeval}"))
    with pytest.raises(EngineMissingError, match=r"the judge of the rewards at .* cannot be used"):
        resolve_plans(
            load_settings(fresh_project, *build_overrides(judge)), Workdir(fresh_project / "nowhere"), SilentReporter()
        )
    monkeypatch.setattr(code_sandbox, "COMMAND", [sys.executable, "-c", "print('no isolation')"])
    config = load_settings(fresh_project, *build_overrides("{kind: unit_tests}"))
    with pytest.raises(ConfigurationError, match="generated code cannot be isolated on this machine: no isolation"):
        resolve_plans(config, Workdir(fresh_project / "nowhere"), SilentReporter())


def test_estimate_of_continuous_batching_on_a_cpu_has_more_time_and_memory_for_answers(
    estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, speeds = machine_speed.measure_speed, []

    def measure_once(*args: Any, **options: Any) -> Any:
        speeds.append(speeds[0] if speeds else measure(*args, **options))
        return speeds[0]

    monkeypatch.setattr(machine_speed, "measure_speed", measure_once)
    grpo = ("fine_tuning.objective=grpo", "fine_tuning.packing=false", "fine_tuning.grpo.rewards=[{kind: f1}]")
    plain, batched = (
        estimate(*grpo, f"fine_tuning.grpo.rollouts.engine={name}") for name in ("generate", "continuous_batching")
    )
    assert batched["seconds"]["fine_tuning"] > plain["seconds"]["fine_tuning"]
    assert batched["memory"]["training"]["total"] >= plain["memory"]["training"]["total"]


def test_rewards_of_reference_answers_are_shown_and_a_reward_of_zero_is_a_warning(
    fresh_project: Path, estimate: Estimate
) -> None:
    rows = [json.loads(line) for line in (fresh_project / "raw.jsonl").read_text().splitlines()]
    instructions = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    (fresh_project / "instructed.jsonl").write_text("".join(json.dumps({**row, **instructions}) + "\n" for row in rows))
    entries = "[{kind: exact_match}, {kind: regex, pattern: '[0-9]+'}, {kind: length, max_words: 1000}, {kind: ifeval}]"
    grpo = ("fine_tuning.objective=grpo", "fine_tuning.packing=false", "evaluation.suite=none")
    sources = f"data_curation.sources=[{fresh_project / 'instructed.jsonl'}]"
    result = estimate(*grpo, sources, f"fine_tuning.grpo.rewards={entries}", "model_registry.auto_promote=false")
    means = result["reference_rewards"]["means"]
    assert (means["exact_match"], means["regex"], means["length"], means["ifeval"]) == (1, 0, 1, 0)  # all have a comma
    assert 0 < result["reference_rewards"]["rows"] <= 32
    warning = "the reward regex is 0 for the reference answer of every checked row"
    assert len([line for line in result["warnings"] if line.startswith(warning)]) == 1
    lines = format_estimate(result)
    assert any(
        line.startswith("rewards   exact_match 1.00, regex 0.00, length 1.00, ifeval 0.00 on average") for line in lines
    )


def test_invalid_tools_of_test_rows_are_errors_before_the_training(fresh_project: Path, estimate: Estimate) -> None:
    def write_tools(parameters: dict[str, Any]) -> str:
        path, tools = fresh_project / "tools.jsonl", [{"name": "f", "parameters": parameters}]
        rows = [
            {"prompt": f"{verb} the {noun}", "completion": f"The {noun}: {verb}.", "tools": tools}
            for verb, noun in QUESTION_WORDS
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"data_curation.sources=[{path}]"

    task = "evaluation.tasks=[{kind: held_out}, {kind: tool_calls}]"
    invalid = write_tools({"type": "dict"})
    with pytest.raises(
        InputError, match=r"tools\.jsonl:\d+: the row has invalid tools: the parameters of f is not a valid"
    ):
        estimate(task, invalid)
    estimate("evaluation.tasks=[{kind: held_out}, {kind: tool_calls, metrics: [call_accuracy]}]", invalid)


def test_missing_engine_fails_before_the_training(fresh_project: Path, estimate: Estimate) -> None:
    with pytest.raises(EngineMissingError, match="vLLM is not installed"):
        estimate("evaluation.engine=vllm")


def test_dry_run_counts_the_workload_of_every_task(fresh_project: Path, estimate: Estimate) -> None:
    alone = estimate("evaluation.tasks=[{kind: held_out}]")["seconds"]["evaluation"]
    (fresh_project / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "reference": "it"}) + "\n" for n in range(500))
    )
    with_generation = estimate(
        f"evaluation.tasks=[{{kind: held_out}}, {{kind: generation, data: '{fresh_project / 'prompts.jsonl'}', max_new_tokens: 512}}]"
    )
    assert with_generation["seconds"]["evaluation"] > alone


def test_dry_run_prints_size_margins_and_cost_of_the_suite(estimate: Estimate) -> None:
    result = estimate()
    found, text = result["suite"], format_estimate(result)
    held_out = min(64, result["rows"]["splits"]["validation"] + result["rows"]["splits"]["test"])
    assert found["items"] == 72 + 144 + 144 + 104 + 64 + held_out + 64
    assert found["output_tokens"] == 72 * 48 + (144 + 104) * 24 + 64 * 28
    assert 0 < found["seconds"] < result["seconds"]["evaluation"]
    (line,) = (line for line in text if line.startswith("suite"))
    assert line.startswith(f"suite     {592 + held_out} items, ")
    assert line.endswith(f"at most 11,200 of answers per model, about {found['seconds']:,.0f} s of the evaluation")
    assert "          suite_capability.acc: 144 items, margin 10%; passes with at most 8 worse items" in text
    compared = "          suite_memorisation.reproduced: 64 items, compared with suite_control.reproduced; passes with at most 4 worse items"
    assert compared in text
    assert len(found["rules"]) == 9
    assert estimate("evaluation.suite=none", "model_registry.auto_promote=false")["suite"] is None


def test_suite_of_a_stored_configuration_may_be_in_any_order(estimate: Estimate) -> None:
    tasks = "{kind: answer_checks, name: suite_answers, tasks: [suite_instructions, suite_harmful, suite_harmless]}"
    result = estimate(f"evaluation.tasks=[{tasks}, {{kind: held_out}}]")
    assert next(rule for rule in result["suite"]["rules"] if rule["metric"] == "suite_answers.empty")["items"] == 320


def test_too_few_training_rows_for_the_suite_give_a_warning(estimate: Estimate) -> None:
    result = estimate("data_curation.fractions={train: 0.3, validation: 0.1, test: 0.6}")
    items = result["rows"]["splits"]["train"]
    assert items < 59
    expected = (
        f"the gate will refuse the model: suite_leaks has {items} items; its rules require at least 59. Add rows, change "
        "data_curation.fractions, or set evaluation.suite to none and promote with `tuneline promote`"
    )
    assert expected in result["warnings"]


@pytest.mark.parametrize(("control_items", "allowed"), [(28, None), (64, 4)])
def test_rule_whose_control_has_too_few_items_cannot_pass(control_items: int, allowed: int | None) -> None:
    workloads = [
        TaskWorkload(task, "", control_items if task.name == "suite_control" else 64) for task in suite.build_tasks()
    ]
    rules = (summarize_suite(workloads) or {})["rules"]
    assert next(rule["allowed"] for rule in rules if rule["control"]) == allowed


def test_preference_task_without_pairs_gives_a_warning(estimate: Estimate) -> None:
    warnings = estimate("evaluation.tasks=[{kind: held_out}, {kind: preference}]")["warnings"]
    assert any(
        "task preference requires preference rows, but the sources contain sft rows" in warning for warning in warnings
    )


def test_refused_dry_run_prints_an_error_object_and_writes_nothing(fresh_project: Path) -> None:
    error = refusal(
        2, "run", "-c", "customization.yaml", "--dry-run", "--set", "fine_tuning.base_model=nowhere", cwd=fresh_project
    )
    assert error["kind"] == "configuration"
    assert error["message"].endswith("nowhere is not a folder")
    module_error = refusal(
        2,
        "run",
        "-c",
        "customization.yaml",
        "--dry-run",
        "--set",
        "fine_tuning.lora.target_modules=[nothing]",
        cwd=fresh_project,
    )
    assert module_error["message"].startswith("fine_tuning.lora.target_modules: ")
    assert "q_proj" in module_error["hint"]
    assert not (fresh_project / ".tuneline").exists()


def test_text_lists_rows_tokens_steps_memory_disk_time_and_warnings(estimate: Estimate) -> None:
    result = estimate("triton_packaging.prove=false")
    text = format_estimate(result)
    assert text[0] == "dry run: nothing was written"
    assert text[1] == "rows      156 of 156 kept; rejected: none; quarantined: 0; row formats: 156 alpaca"
    assert [line.split(" ")[0] for line in text if line[0] != " "][1:7] == [
        "rows",
        "tokens",
        "training",
        "memory",
        "disk",
        "time",
    ]
    assert f"30 steps (fine_tuning.max_steps), {result['tokens']['trained']:,} tokens" in "\n".join(text)
    assert any(line.lstrip().startswith("triton_packaging  ") and " s to start; writing, " in line for line in text)
    assert any(line.startswith("warning: the model will be packaged unproven") for line in text)


def test_weights_without_a_tensor_are_refused_by_dry_run_and_resolve(fresh_project: Path, tmp_path: Path) -> None:
    shutil.copytree(fresh_project / "tiny", tmp_path / "damaged")
    tensors = load_file(tmp_path / "damaged" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    overrides = ("--set", f"fine_tuning.base_model={tmp_path / 'damaged'}")
    error = refusal(2, "run", "--dry-run", "-c", "customization.yaml", *overrides, cwd=fresh_project)
    assert error["message"] == (
        f"the weights in {tmp_path / 'damaged'} do not match its config.json: missing: model.norm.weight"
    )
    config = load_settings(fresh_project, overrides[1])
    with pytest.raises(ConfigurationError, match=re.escape(error["message"])):
        resolve_plans(config, Workdir(tmp_path / "wd"), SilentReporter())


def test_test_rows_that_the_base_model_was_trained_on_give_a_warning(
    first: dict[str, Any], project: Path, estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_WORKDIR", str(project / "wd"))  # has the dataset, but the splits are new
    base = f"fine_tuning.base_model={first['artifacts']['model']}"

    def list_warnings(*overrides: str) -> list[str]:
        return [text for text in estimate(base, *overrides)["warnings"] if "a promotion will be refused" in text]

    assert list_warnings() == []  # equal splits
    [warning] = list_warnings("data_curation.fractions={train: 0.4, validation: 0.1, test: 0.5}")
    assert "the base model was trained on at least 20 of the " in warning
