"""`tuneline size`: figures, what limits them, and refused input. Fast tier: formulas in this process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from components.common.models.accelerators import load_accelerators
from components.common.models.resource_formulas import ParallelLayout, estimate_training_memory
from components.common.runtime.errors import EXIT_USAGE, TunelineError, UsageError
from pipelines.cli.sizing import size_customizations
from pipelines.planning.architectures import ATTENTION_NAMES, find_architecture, load_architectures
from tests.datasets import small_dataset
from tests.pipelines.command import ROOT, answer_in_process, environment, refusal, run_in_process

GIB = 2**30
CONTRACT = ("memory_gib_per_gpu", "gpus", "hours", "tokens_per_second", "storage", "cost", "assumptions")
TOKENS = ("--tokens", "1e8")

# Parameters of models as transformers builds them from config.json.
COUNTED = {
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-12b": 11_766_034_176,
    "phi-3-mini": 3_821_079_552,
}


@cache
def build_command() -> Any:
    """Return the command alone: the whole command line takes longer to build than an estimate."""
    application = typer.Typer()
    application.command()(size_customizations)
    return typer.main.get_command(application)


def size(*arguments: object) -> dict[str, Any]:
    output = io.StringIO()
    with redirect_stdout(output):
        build_command().main([*map(str, arguments), "--json"], standalone_mode=False)
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


@pytest.mark.parametrize(("name", "parameters"), COUNTED.items())
def test_parameters_equal_those_of_transformers(name: str, parameters: int) -> None:
    assert load_architectures()[name].parameters == parameters


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
    ],
)
def test_model_is_found_by_the_name_of_its_repository(given: str, name: str) -> None:
    assert find_architecture(given).name == name


@pytest.mark.parametrize("text", ["135m", "1b", "8b", "70b", "405b", "3200000000"])
def test_number_of_parameters_becomes_a_shape_of_that_size(text: str) -> None:
    wanted = float(text.rstrip("mb")) * {"m": 1e6, "b": 1e9}.get(text[-1], 1)
    assert find_architecture(text).parameters == wanted


@pytest.mark.parametrize(
    ("name", "kind", "extra"),
    [
        ("llama-3.2-3b", "llama", {"tie_word_embeddings": True}),
        ("qwen2.5-7b", "qwen2", {}),
        ("qwen3-30b-a3b", "qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
        ("gemma-3-12b", "gemma3_text", {}),
    ],
)
def test_config_json_gives_the_shape_of_the_model(tmp_path: Path, name: str, kind: str, extra: dict[str, Any]) -> None:
    known = load_architectures()[name]
    sizes = {
        "hidden_size": known.h,
        "intermediate_size": known.i,
        "num_hidden_layers": known.L,
        "head_dim": known.d or None,
    }
    heads = {"num_attention_heads": known.a, "num_key_value_heads": known.kv, "vocab_size": known.V}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **heads, **extra}))
    assert find_architecture(str(tmp_path)).build_shape(adapter=0) == known.build_shape(adapter=0)


def test_lora_parameters_are_rank_times_sizes() -> None:
    llama = load_architectures()["llama-3-8b"]
    assert llama.count_lora_parameters(16) == 41_943_040  # counted by PEFT on the benchmarks' H200
    assert llama.count_lora_parameters(8, ATTENTION_NAMES) == 8 * 32 * (8192 + 5120 + 5120 + 8192)


def test_zero_stages_distribute_optimizer_gradients_and_weights() -> None:
    shape = load_architectures()["llama-3-8b"].build_shape(adapter=None)
    options: dict[str, Any] = {"rows": 1, "length": 128, "dropout": False, "gpu": True}
    sizes = []
    for stage in range(4):
        parts = estimate_training_memory(shape, **options, layout=ParallelLayout(data=8, stage=stage))
        layer = (6.98e9 / 32 + 128_256 * 4096) * 2 / shape.parameters if stage == 3 else 0.0  # gathered, with the head
        sizes.append(sum(parts[name] for name in ("weights", "gradients", "optimizer")) / shape.parameters - layer)
    assert sizes == pytest.approx([18, 2 + 4 + 12 / 8, 2 + 16 / 8, 18 / 8], rel=1e-3)


def test_json_has_the_documented_keys_and_ranges(tmp_path: Path) -> None:
    arguments = ("--model", "llama-3.1-8b", "--gpu", "h200:8", *TOKENS, "--gpu-hour-price", 3)
    result = answer_in_process("size", *arguments, cwd=tmp_path)
    assert set(CONTRACT) <= result.keys()
    assert result["gpus"] == 8
    assert {"bytes", "read_bytes_per_second", "checkpoint_bytes", "checkpoint_seconds"} <= result["storage"].keys()
    for name in ("hours", "tokens_per_second"):
        assert list(result[name]) == ["low", "typical", "best"]
    assert result["hours"]["low"] > result["hours"]["typical"] > result["hours"]["best"]
    assert result["cost"]["total"]["typical"] == pytest.approx(8 * 3 * result["hours"]["typical"], rel=0.01)
    assert result["memory_gib_per_gpu"] == pytest.approx(sum(result["memory"].values()), abs=0.05)


def test_smallest_number_of_gpus_fits_and_fewer_do_not() -> None:
    full = ("--model", "llama-3.1-70b", "--adaptation", "full", "--global-batch", 64)
    found = size(*full, "--gpu", "h200")
    limit = 0.9 * (load_accelerators()["h200"].memory_bytes or 0) / GIB
    assert found["binds"]["bound"] == "memory"
    assert found["memory_gib_per_gpu"] <= limit
    assert found["layout"]["zero_stage"] == 3
    fewer = size(*full, "--gpu", f"h200:{found['gpus'] - 8}")
    assert not fewer["fits"]
    assert fewer["memory_gib_per_gpu"] > limit


def test_deadline_adds_gpus_until_the_typical_time_meets_it() -> None:
    job = ("--model", "llama-3.1-8b", "--tokens", "1e9", "--epochs", 1, "--global-batch", 256)
    alone, hurried = size(*job), size(*job, "--deadline-hours", 8)
    assert alone["gpus"] == 1
    assert hurried["gpus"] > 1
    assert hurried["hours"]["typical"] <= 8 < alone["hours"]["typical"]
    assert hurried["binds"]["bound"] == "deadline"


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (("--adaptation", "qlora"), ("--adaptation", "lora")),
        (("--adaptation", "lora"), ("--adaptation", "full")),
        (("--recomputation", "on"), ("--recomputation", "off")),
        (("--length", 1024), ("--length", 4096)),
        (("--objective", "sft"), ("--objective", "dpo")),
        (("--adaptation", "full", "--objective", "orpo"), ("--adaptation", "full", "--objective", "dpo")),
        (("--tensor", 4), ("--tensor", 1)),
        (("--context", 4), ("--context", 1)),
        (("--zero-stage", 3), ("--zero-stage", 2)),
        (("--zero-stage", 3, "--offload", "optimizer"), ("--zero-stage", 3)),
    ],
)
def test_settings_change_memory_in_the_expected_direction(less: tuple[object, ...], more: tuple[object, ...]) -> None:
    fixed = ("--micro-batch", 2, "--rank", 256, "--recomputation", "off", "--zero-stage", 0)  # the last value counts
    common = ("--model", "llama-3.1-8b", "--gpu", "h200:8", *fixed)
    sizes = [size(*common, *settings)["memory_gib_per_gpu"] for settings in (less, more)]
    assert sizes[0] < sizes[1]


def test_generation_of_grpo_lengthens_the_training() -> None:
    job = ("--model", "llama-3.1-8b", "--gpu", "h200:8", *TOKENS, "--micro-batch", 1, "--recomputation", "on")
    half, most = (
        size(*job, "--objective", "grpo", "--generation-share", share)["hours"]["typical"] for share in (0.5, 0.75)
    )
    assert most == pytest.approx(2 * half, rel=0.02)


def test_reward_models_hold_no_logits_and_distillation_counts_one_answer() -> None:
    job = ("--model", "llama-3.1-8b", "--gpu", "h200:8", *TOKENS, "--micro-batch", 1, "--recomputation", "on")
    pairs, scores = (size(*job, "--set", f"fine_tuning.objective={name}") for name in ("orpo", "reward"))
    assert scores["memory"]["logits"] == 0 < pairs["memory"]["logits"]
    assert "tokens are counted for both answers" in scores["assumptions"]
    settings = "fine_tuning.distillation={teacher: /teacher, max_answer_tokens: 100}"
    distilled = size(*job, "--set", "fine_tuning.objective=distill", "--set", settings)
    assert "each prompt has one answer of 100 tokens" in distilled["assumptions"]
    assert "the memory and the work of a teacher and of reward models are not included" in distilled["assumptions"]


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_objectives_without_reference_model_take_less_memory_and_time(objective: str) -> None:
    job = ("--model", "llama-3.1-8b", "--gpu", "h200:8", *TOKENS, "--micro-batch", 1, "--recomputation", "on")
    kto, other = (
        size(*job, "--set", f"fine_tuning.objective={name}", "--adaptation", "full") for name in ("kto", objective)
    )
    assert "reference" in kto["memory"]
    assert "reference" not in other["memory"]
    assert other["hours"]["typical"] < kto["hours"]["typical"]
    assert "tokens are counted for both answers" in other["assumptions"]


def test_pipeline_stages_wait_for_the_first_and_the_last_micro_batch() -> None:
    job = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h200:4",
        "--micro-batch",
        1,
        "--recomputation",
        "on",
        "--global-batch",
        16,
    )
    tensor, pipeline = (size(*job, option, 4)["tokens_per_second"]["typical"] for option in ("--tensor", "--pipeline"))
    assert pipeline / tensor == pytest.approx(16 / 19, rel=0.02)


def test_models_in_parallel_add_gpus_and_storage() -> None:
    job = ("--model", "llama-3.1-8b", "--gpu", "h200:4", "--raw", "100GB")
    one, five = size(*job), size(*job, "--models", 5)
    assert five["parallel"] == {"models": 5, "gpus": 20, "nodes": 3}
    assert five["storage"]["parts"]["datasets"] == 5 * one["storage"]["parts"]["datasets"]
    assert five["storage"]["write_bytes_per_second"] == pytest.approx(5 * one["storage"]["write_bytes_per_second"], 1)


def test_slow_storage_exceeds_the_stall_budget() -> None:
    job = ("--model", "llama-3.1-70b", "--adaptation", "full", "--gpu", "h200:64", "--global-batch", 64)
    storage = size(*job, "--write-rate", "1GB", "--checkpoint-minutes", 60)["storage"]
    assert storage["checkpoint_seconds"] == pytest.approx(70_553_706_496 * 12 / 1e9, rel=0.01)
    assert not storage["meets_stall_budget"]
    fast = size(*job, "--write-rate", "20GB", "--checkpoint-minutes", 60)["storage"]
    assert fast["meets_stall_budget"]


def test_serving_is_bound_by_weights_or_by_the_cache() -> None:
    job = ("--model", "llama-3.1-8b", "--gpu", "h100", "--input-tokens", 7168, "--output-tokens", 1024)
    few, many = (size(*job, "--concurrency", count)["serving"] for count in (1, 128))
    assert few["cache_bytes_per_token"] == 2 * 32 * 1024 * 2
    assert (few["binds"], few["gpus"]) == ("weights", 1)
    assert (many["binds"], many["gpus"]) == ("KV cache", 4)
    compact = size(*job, "--concurrency", 128, "--cache-precision", "fp8")["serving"]
    assert compact["cache_bytes"] == many["cache_bytes"] / 2
    embedding = 128_256 * 4096 * 2  # of which a step reads one row per request
    assert few["min_seconds_per_token"] == pytest.approx((16.06e9 - embedding + 8192 * 131072) / 3.35e12, rel=0.01)


def test_serving_bounds_count_experts_in_use_and_work() -> None:
    job = ("--model", "mixtral-8x7b", "--gpu", "h200:8", "--input-tokens", 8, "--output-tokens", 8)
    one, many = (size(*job, "--concurrency", count)["serving"]["min_seconds_per_token"] for count in (1, 64))
    assert one == pytest.approx(many * 12.7 / 46.6, rel=0.02)  # billions of parameters that a step reads
    short = ("--model", "llama-3.1-8b", "--gpu", "h100", "--input-tokens", 8, "--output-tokens", 8)
    busy = size(*short, "--concurrency", 4096)["serving"]["min_seconds_per_token"]
    assert busy == pytest.approx(4096 * 15.0e9 / 989.5e12, rel=0.01)


def test_cost_contains_known_parts_only() -> None:
    job = ("--model", "llama-3.1-8b", *TOKENS, "--gpu-hour-price", 2, "--kwh-price", 1)
    unknown = size(*job, "--gpu", "b300")  # no design power
    assert unknown["cost"]["energy"] is None
    assert unknown["cost"]["total"] == unknown["cost"]["gpus"]
    assert "the design power of b300 is not known; the cost excludes energy" in unknown["assumptions"]
    assert size("--model", "llama-3.1-8b", *TOKENS)["cost"] == {"gpus": None, "energy": None, "total": None}


def test_recipe_and_dataset_of_a_customization_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"adaptation": "full", "max_length": 64, "epochs": 2, "batch_size": 4}
    (tmp_path / "customization.yaml").write_text(json.dumps({"fine_tuning": settings}))
    dataset = small_dataset(tmp_path / "dataset", train=24)
    result = size("-c", "customization.yaml", "--dataset", dataset.path, "--gpu", "h200:1")
    again = size("--from", "customization.yaml", "--tokens", 1000, "--gpu", "h200:1")
    assert result["model"]["trainable"] == result["model"]["parameters"]
    assert result["flops"] > 0
    assert again["flops"] != result["flops"]


def test_memory_counts_the_mask_of_the_configured_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = {}
    for attention in ("auto", "sdpa"):
        settings = {"attention": attention, "micro_batch_size": 4, "activation_checkpointing": "off"}
        (tmp_path / "customization.yaml").write_text(json.dumps({"fine_tuning": settings}))
        result = size("-c", "customization.yaml", "--model", "llama-3-8b", *TOKENS, "--gpu", "h200:1")
        memory[attention] = result["memory_gib_per_gpu"]
    assert memory["sdpa"] > 1.05 * memory["auto"]


def test_text_names_what_binds_formulas_and_assumptions(tmp_path: Path) -> None:
    arguments = ("size", "--model", "8b", "--gpu", "b200", *TOKENS, "--concurrency", 8)
    lines = run_in_process(*arguments, cwd=tmp_path).stdout.splitlines()
    text = "\n".join(lines)
    for expected in (
        "bound by memory",
        "low –",
        "Young/Daly",
        "KV cache",
        "proportions of Llama 3 8B",
        "published runs",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--gpu", "h201"), "--gpu 'h201' is not a known accelerator", "Did you mean h200"),
        (("--gpu", "h200:0"), "'0' is not a number of GPUs", "h200:8"),
        (("--gpu", "mi355x"), "the memory of --gpu mi355x is not known", "Choose a GPU"),
        (("--model", "lama-3-8b"), "is not a known model", "llama-3-8b"),
        (("--model", "9"), "is not between", "8b"),
        (("--precision", "fp8", "--gpu", "a100"), "a100 has no fp8 rate", "bf16"),
        (("--stack", "fast"), "--stack is 'fast'; expected standard or tuned", "--stack standard"),
        (
            ("--objective", "ppo"),
            "--objective is 'ppo'; expected sft, dpo, kto, orpo, simpo, grpo or rloo",
            "--objective sft",
        ),
        (("--adaptation", "lorra"), "fine_tuning.adaptation: found 'lorra'", "configuration.md"),
        (("--gpu", "h200:8", "--global-batch", "4"), "--global-batch 4 is too small", "--global-batch 8"),
        (("--model", "gone.json"), "gone.json cannot be read: No such file", "config.json"),
        (("--mean-length", "3000"), "--mean-length 3000 exceeds the longest row, 2048 tokens", "--length 3000"),
        (("--model", "."), "is a folder without config.json", "folder of a model"),
        (("--raw", "many"), "--raw 'many' is not a size", "500MB"),
        (("--deadline-hours", "5"), "--deadline-hours requires the amount of data", "--tokens"),
        (("--model", "8b", "--gpu", "h200:6", "--tensor", "4"), "6 GPUs cannot form groups of 4", "multiple of 4"),
        (("--model", "405b", "--adaptation", "full", "--gpu", "l40s"), "does not fit on l40s", "--global-batch"),
        (
            ("--model", "8b", "--tokens", "1e12", "--deadline-hours", "1"),
            "the run cannot finish",
            "--global-batch",
        ),
        (
            ("--model", "405b", "--gpu", "h200:8", "--concurrency", "1000000"),
            "weights and KV cache need",
            "--concurrency",
        ),
    ],
)
def test_wrong_input_is_refused_with_the_allowed_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TunelineError) as error:
        size(*arguments)
    assert error.value.exit_code == EXIT_USAGE
    assert message in error.value.message
    assert hint in error.value.hint


def test_invalid_config_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64}')
    error = refusal(2, "size", "--model", path, cwd=tmp_path)
    assert "missing or invalid num_hidden_layers, num_attention_heads, vocab_size" in error["message"]
    sizes = '"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9'
    for text, reason in (
        ("{", "is not JSON"),
        ('{"text_config": 3}', "invalid hidden_size, "),
        (f'{{{sizes}, "head_dim": "x"}}', "invalid head_dim"),
        (f'{{{sizes}, "num_experts": true}}', "invalid num_experts"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=reason):
            size("--model", path)


def test_estimate_imports_no_torch() -> None:
    code = (
        "import sys; from pipelines.cli import main; sys.argv = ['tuneline', 'size', '--model', '8b', '--json']\n"
        "try: main.main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'daft', 'mlflow') if name in sys.modules])"
    )
    command = [sys.executable, "-P", "-c", code]
    output = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
