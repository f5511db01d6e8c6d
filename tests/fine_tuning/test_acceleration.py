"""Compute settings per device, and the settings that are rejected before training because they conflict or are unsupported.

For GPUs and Gaudis the tests fake the device, its free memory and the installed packages; they do not run the chosen kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from components.common.models import compute_devices
from components.common.models.adaptations import ADAPTATIONS
from components.common.models.model_shape import ModelShape
from components.common.models.resource_formulas import estimate_training_memory
from components.common.runtime.errors import EXIT_USAGE, ConfigurationError, EngineMissingError
from components.fine_tuning import acceleration
from components.fine_tuning.acceleration import ComputeSettings
from components.fine_tuning.config import (
    AdaptationName,
    DistillationConfig,
    GrpoConfig,
    JudgeConfig,
    LoraConfig,
    ObjectiveName,
    Recipe,
    RewardConfig,
    RolloutsConfig,
    RopeScalingConfig,
)
from components.fine_tuning.objectives import OBJECTIVES
from components.fine_tuning.rollout_engines import RolloutEngineName
from tests.fine_tuning.recipes import complete_recipe as recipe

LARGE_MODEL = ModelShape(
    parameters=8_030_000_000,
    trainable=42_000_000,
    embedding=0,
    layers=32,
    hidden=4096,
    intermediate=14_336,
    vocabulary=128_256,
)
GPU_PACKAGES = ("flash_attn", "liger_kernel", "bitsandbytes", "deepspeed")
FakeMachine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """Return a function that fakes the device, its free memory, the installed packages and the models that Liger supports."""
    original_find_spec = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name in GPU_PACKAGES:
            return ModuleSpec(name, None) if name in installed_packages else None
        return original_find_spec(name, package)

    installed_packages: set[str] = set()

    def configure(
        device: str,
        *packages: str,
        free: int = 10**15,
        liger_models: tuple[str, ...] = ("llama",),
        accelerators: int = 8,
    ) -> None:
        installed_packages.update(packages)
        for name, (_, missing) in list(compute_devices.DEVICE_PROBES.items()):
            monkeypatch.setitem(
                compute_devices.DEVICE_PROBES, name, (lambda name=name: name in (device, "cpu"), missing)
            )
        monkeypatch.setattr(compute_devices, "get_free_memory_bytes", lambda _: free)
        monkeypatch.setattr(compute_devices, "count_devices", lambda name: None if name == "cpu" else accelerators)
        liger = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN=liger_models)
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", liger)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return configure


def choose_settings(device: str, **changes: Any) -> ComputeSettings:
    return acceleration.choose_settings(recipe(**changes), device, LARGE_MODEL, LlamaConfig())


def find_reason(settings: ComputeSettings, prefix: str) -> str:
    """Return the only reason with this prefix."""
    (matching_reason,) = [text for text in settings.reasons if text.startswith(prefix)]
    return matching_reason


@pytest.mark.parametrize(("device", "is_bfloat16"), [("cuda", True), ("hpu", True), ("mps", False), ("cpu", False)])
def test_default_precision_depends_on_device(device: str, is_bfloat16: bool, machine: FakeMachine) -> None:
    machine(device)
    settings = choose_settings(device)
    assert (settings.device, settings.bfloat16) == (device, is_bfloat16)
    assert find_reason(settings, "bfloat16" if is_bfloat16 else "float32").endswith(
        f"the fastest precision on {device}"
    )
    assert len(settings.reasons) == 5, "a sentence a decision"
    assert choose_settings(device, precision="float32").bfloat16 is False
    assert find_reason(choose_settings(device, precision="float32"), "float32") == "float32: as configured"
    assert choose_settings(device, precision="bfloat16").bfloat16 is True


@pytest.mark.parametrize(
    ("is_bfloat16", "adaptation", "dtype"),
    [
        (True, "lora", torch.bfloat16),
        (True, "full", torch.float32),
        (False, "lora", torch.float32),
        (False, "full", torch.float32),
    ],
)
def test_trained_weights_are_float32_and_frozen_ones_compute_dtype(
    is_bfloat16: bool, adaptation: str, dtype: Any
) -> None:
    settings = ComputeSettings("cuda", is_bfloat16, "sdpa", False, False, False, [])
    assert acceleration.choose_dtype(recipe(adaptation=adaptation), settings) is dtype


def test_attention_on_a_gpu_is_flash_attention_or_varlen(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("cuda")
    assert choose_settings("cuda").attention == "varlen"
    assert choose_settings("cuda", attention="varlen").attention == "varlen"
    for padded in ({"objective": "dpo"}, {"adaptation": "p_tuning"}):
        assert choose_settings("cuda", **padded).attention == "sdpa"
        assert "flash-attn, which is not installed" in find_reason(choose_settings("cuda", **padded), "attention")
    with monkeypatch.context() as patch:
        patch.setattr("components.fine_tuning.varlen_attention.is_available", lambda: False)  # torch 2.9
        assert choose_settings("cuda").attention == "sdpa"
    machine("cuda", "flash_attn")
    assert choose_settings("cuda").attention == "flash_attention_2"
    assert "flash-attn is installed" in find_reason(choose_settings("cuda"), "attention")
    assert choose_settings("cuda", precision="float32").attention == "sdpa", "it has no float32 kernels"
    assert choose_settings("cuda", attention="eager").attention == "eager"
    for device in ("hpu", "mps", "cpu"):
        assert choose_settings(device).attention == "sdpa"
        assert f"PyTorch's kernel on {device}" in find_reason(choose_settings(device), "attention")


def test_reason_for_sdpa_with_float32_is_not_a_missing_package(machine: FakeMachine) -> None:
    machine("cuda", "flash_attn")
    assert "not installed" not in find_reason(choose_settings("cuda", precision="float32"), "attention")


def test_liger_is_used_on_a_gpu_if_installed_and_model_supported(machine: FakeMachine) -> None:
    machine("cuda")
    assert not choose_settings("cuda").liger
    assert "liger-kernel, which is not installed" in find_reason(choose_settings("cuda"), "fused kernels")
    machine("cuda", "liger_kernel", liger_models=("qwen3",))
    assert not choose_settings("cuda").liger
    assert "a model that Liger supports" in find_reason(choose_settings("cuda"), "fused kernels")
    machine("cuda", "liger_kernel")
    assert choose_settings("cuda").liger
    assert choose_settings("cuda", fused_kernels="on").liger
    assert not choose_settings("cuda", fused_kernels="off").liger
    for device in ("hpu", "mps", "cpu"):
        assert not choose_settings(device).liger
        assert f"the device is {device}" in find_reason(choose_settings(device), "fused kernels")


def estimate_memory(config: Recipe, rows: int, device: str) -> int:
    dropout, gpu = config.lora.dropout > 0, device in ("cuda", "hpu")
    options: dict[str, Any] = {"length": config.max_length, "dropout": dropout, "gpu": gpu, "fused": False}
    options["masked_attention"] = device == "hpu"  # which has no kernels for rows of different lengths
    return estimate_training_memory(LARGE_MODEL, rows=rows, **options)["total"]


@pytest.mark.parametrize("device", ["cuda", "hpu", "mps", "cpu"])
def test_activation_checkpointing_is_enabled_when_memory_is_short(device: str, machine: FakeMachine) -> None:
    config = recipe()
    required_bytes = int(estimate_memory(config, config.micro_batch_size, device) / acceleration.MAX_MEMORY_FRACTION)
    machine(device, free=required_bytes + 10**6)
    assert not choose_settings(device).activation_checkpointing
    machine(device, free=required_bytes - 10**6)
    settings = choose_settings(device)
    assert settings.activation_checkpointing
    explanation = find_reason(settings, "activation checkpointing: on")
    assert (
        f"{required_bytes * acceleration.MAX_MEMORY_FRACTION / 1e9:.1f} GB are required without it and {required_bytes / 1e9:.1f} GB are free"
        in explanation
    )
    assert choose_settings(device, activation_checkpointing="off").activation_checkpointing is False
    machine(device)
    assert choose_settings(device).activation_checkpointing is False
    assert choose_settings(device, activation_checkpointing="on").activation_checkpointing is True
    assert find_reason(choose_settings(device, activation_checkpointing="on"), "activation checkpointing: on").endswith(
        "as configured"
    )


def test_memory_estimate_includes_dropout_objective_length_and_rows(machine: FakeMachine) -> None:
    config = recipe(lora={"dropout": 0.0})
    machine(
        "cuda",
        free=int(estimate_memory(config, config.micro_batch_size, "cuda") / acceleration.MAX_MEMORY_FRACTION) + 10**6,
    )
    assert not choose_settings("cuda", lora={"dropout": 0.0}).activation_checkpointing
    assert choose_settings("cuda").activation_checkpointing, "dropout keeps its masks"
    assert choose_settings("cuda", lora={"dropout": 0.0}, objective="dpo").activation_checkpointing, "two answers a row"
    assert choose_settings("cuda", lora={"dropout": 0.0}, objective="kto").activation_checkpointing
    assert choose_settings("cuda", lora={"dropout": 0.0}, max_length=512).activation_checkpointing
    assert not choose_settings("cuda", lora={"dropout": 0.0}, micro_batch_size=2).activation_checkpointing


def test_processes_share_host_memory_but_not_accelerator_memory(machine: FakeMachine) -> None:
    settings = {"processes": 2, "batch_size": 8}
    config = recipe(**settings)
    machine(
        "cpu",
        free=int(1.5 * estimate_memory(config, config.micro_batch_size, "cpu") / acceleration.MAX_MEMORY_FRACTION),
    )
    assert not choose_settings("cpu").activation_checkpointing
    assert choose_settings("cpu", **settings).activation_checkpointing
    machine(
        "cuda",
        free=int(1.5 * estimate_memory(config, config.micro_batch_size, "cuda") / acceleration.MAX_MEMORY_FRACTION),
    )
    assert not choose_settings("cuda", **settings).activation_checkpointing


def test_sharding_reduces_memory_per_process(machine: FakeMachine) -> None:
    settings = {"processes": 4, "batch_size": 16}
    config = recipe(**settings)
    machine(
        "cuda",
        free=int(0.6 * estimate_memory(config, config.micro_batch_size, "cuda") / acceleration.MAX_MEMORY_FRACTION),
    )
    assert choose_settings("cuda", **settings).activation_checkpointing
    assert not choose_settings("cuda", **settings, strategy="fsdp2").activation_checkpointing


def test_memory_of_a_gpu_is_within_two_percent_of_measured_peaks() -> None:
    """Peaks of an H200, 8B with LoRA of rank 16 on all linear layers, rows of 2,048 tokens (docs/reference/benchmarks-gpu.md)."""
    shape = replace(LARGE_MODEL, parameters=8_072_204_288, trainable=41_943_040, embedding=525_336_576, key_width=1024)
    options: dict[str, Any] = {"length": 2048, "dropout": False, "gpu": True}
    peaks: list[tuple[int, dict[str, Any]]] = [
        (53_857_310_208, {"rows": 4}),
        (92_275_079_680, {"rows": 8}),
        (54_494_967_296, {"rows": 1, "length": 8192}),
        (43_504_704_000, {"rows": 4, "four_bit": True}),
        (61_373_044_224, {"rows": 4, "masked_attention": True}),
    ]
    for measured, settings in peaks:
        estimate = estimate_training_memory(shape, **options | settings)
        assert estimate["total"] == pytest.approx(measured, rel=0.02), (settings, estimate)


def test_estimated_memory_has_the_mask_of_the_attention_that_is_chosen(machine: FakeMachine) -> None:
    machine("cuda", "flash_attn")

    def describe(**changes: Any) -> str:
        return find_reason(choose_settings("cuda", max_length=2048, **changes), "activation checkpointing")

    assert describe(precision="float32") == describe(precision="float32", attention="sdpa") != describe()
    assert describe(objective="dpo") != describe(objective="dpo", attention="sdpa"), "flash-attn removes padding"


def test_names_that_liger_replaces_are_restored() -> None:
    from transformers.models.llama import modeling_llama

    norm, names = modeling_llama.LlamaRMSNorm, set(vars(modeling_llama))
    with acceleration.keep_model_code(modeling_llama.LlamaForCausalLM):
        modeling_llama.LlamaRMSNorm = None
    assert modeling_llama.LlamaRMSNorm is norm
    assert set(vars(modeling_llama)) == names


def test_compiled_layers_keep_names_and_losses() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes))
    names = list(model.state_dict())
    acceleration.compile_layers(model)
    assert list(model.state_dict()) == names
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == list(model.model.layers), "each layer is compiled, and nothing else"


def test_compile_follows_configuration(machine: FakeMachine) -> None:
    machine("cuda")
    assert (choose_settings("cuda").compile, choose_settings("cuda", compile=True).compile) == (False, True)
    assert find_reason(choose_settings("cuda", compile=True), "torch.compile") == "torch.compile: on, as configured"


@pytest.mark.parametrize(
    ("device", "packages", "settings", "requirement"),
    [
        (
            "cpu",
            ["flash_attn"],
            {"attention": "flash_attention_2"},
            "attention: flash_attention_2 requires an NVIDIA GPU",
        ),
        (
            "hpu",
            ["flash_attn"],
            {"attention": "flash_attention_2"},
            "attention: flash_attention_2 requires an NVIDIA GPU",
        ),
        (
            "cuda",
            ["flash_attn"],
            {"attention": "flash_attention_2", "precision": "float32"},
            "flash_attention_2 requires bfloat16; fine_tuning.precision is float32",
        ),
        ("cuda", [], {"attention": "flash_attention_2"}, "flash_attention_2 requires the package flash-attn"),
        ("cpu", [], {"attention": "varlen"}, "attention: varlen requires an NVIDIA GPU"),
        ("cuda", [], {"attention": "varlen", "objective": "dpo"}, "rows without padding, but dpo with lora pads them"),
        ("cuda", ["liger_kernel"], {"fused_kernels": "on", "compile": True}, "requires fine_tuning.compile false"),
        ("cpu", ["liger_kernel"], {"fused_kernels": "on"}, "fused_kernels: on requires an NVIDIA GPU; the device"),
        ("cuda", [], {"fused_kernels": "on"}, "fused_kernels: on requires liger-kernel, which is not installed"),
    ],
)
def test_unavailable_kernels_are_rejected_with_their_requirement(
    device: str, packages: list[str], settings: dict[str, Any], requirement: str, machine: FakeMachine
) -> None:
    machine(device, *packages)
    with pytest.raises(ConfigurationError, match=requirement) as error:
        choose_settings(device, **settings)
    assert error.value.hint.endswith(" to auto.")
    assert error.value.exit_code == EXIT_USAGE


def test_fused_kernels_are_rejected_for_unsupported_model(machine: FakeMachine) -> None:
    machine("cuda", "liger_kernel", liger_models=("qwen3",))
    with pytest.raises(ConfigurationError, match="on requires a model that Liger supports; the model type is"):
        choose_settings("cuda", fused_kernels="on")


@pytest.mark.parametrize("device", ["hpu", "mps", "cpu"])
def test_qlora_is_rejected_on_detected_device_without_nvidia_gpu(device: str, machine: FakeMachine) -> None:
    machine(device, "bitsandbytes")
    with pytest.raises(ConfigurationError, match=f"qlora requires an NVIDIA GPU; the device is {device}") as error:
        acceleration.check_machine(recipe(adaptation="qlora"))
    assert "lora" in error.value.hint


def test_qlora_on_a_gpu_requires_bitsandbytes(machine: FakeMachine) -> None:
    machine("cuda")
    for settings in ({"adaptation": "qlora"}, {"optimizer": "paged_adamw_8bit"}):
        with pytest.raises(EngineMissingError, match="bitsandbytes"):
            acceleration.check_machine(recipe(**settings))
    machine("cuda", "bitsandbytes")
    assert acceleration.check_machine(recipe(adaptation="qlora")) == "cuda"


def test_bfloat16_is_rejected_on_apple_gpu(machine: FakeMachine) -> None:
    machine("mps")
    with pytest.raises(ConfigurationError, match="bfloat16 training is not supported on mps"):
        acceleration.check_machine(recipe(precision="bfloat16"))
    assert acceleration.check_machine(recipe()) == "mps"


@pytest.mark.parametrize(
    ("strategy", "rejected_devices", "supported_devices"),
    [("fsdp2", ("mps",), ("cpu", "cuda", "hpu")), ("zero3", ("mps",), ("cpu", "cuda", "hpu"))],
)
def test_sharding_is_rejected_on_devices_without_support(
    strategy: str, rejected_devices: tuple[str, ...], supported_devices: tuple[str, ...], machine: FakeMachine
) -> None:
    config = recipe(strategy=strategy, processes=2)
    for device in rejected_devices:
        machine(device, "deepspeed")
        with pytest.raises(ConfigurationError, match=f"{strategy} has no effect on {device}: "):
            acceleration.check_machine(config)
    for device in supported_devices:
        machine(device, "deepspeed")
        assert acceleration.check_machine(config) == device


def test_fsdp2_uses_the_accelerator_of_the_machine(machine: FakeMachine) -> None:
    machine("cuda")
    config = recipe(strategy="fsdp2", processes=2, device="cpu")
    with pytest.raises(ConfigurationError, match=r"device is cpu, but fsdp2 loads the shards onto .* cuda"):
        acceleration.check_machine(config)
    machine("cpu")
    assert acceleration.check_machine(config) == "cpu"


def test_zero3_requires_deepspeed(machine: FakeMachine) -> None:
    machine("cuda")
    with pytest.raises(EngineMissingError, match="requires the package deepspeed, which is not installed"):
        acceleration.check_machine(recipe(strategy="zero3", processes=2))
    assert acceleration.check_machine(recipe(strategy="fsdp2", processes=2)) == "cuda"


SHARDING_ERROR = "requires at least 2 processes; processes is 1"
BATCHED = GrpoConfig(rewards=[RewardConfig(kind="f1")], rollouts=RolloutsConfig(engine="continuous_batching"))
CONFLICTS: list[tuple[Mapping[str, Any], str]] = [
    ({"batch_size": 6, "micro_batch_size": 4}, "batch_size 6 is not a multiple of micro_batch_size 4"),
    (
        {"batch_size": 8, "micro_batch_size": 4, "processes": 3},
        "batch_size 8 is not a multiple of micro_batch_size 4 × processes 3",
    ),
    (
        {"packing": True, "adaptation": "p_tuning"},
        "packing cannot be used with p_tuning: .* position ids that separate packed rows",
    ),
    (
        {"packing": True, "adaptation": "prompt_tuning"},
        "packing cannot be used with prompt_tuning: .* position ids that separate packed rows",
    ),
    ({"packing": True, "objective": "dpo"}, "packing cannot be used with dpo: the loss compares whole rows"),
    ({"packing": True, "objective": "kto"}, "packing cannot be used with kto: the loss compares whole rows"),
    (
        {"packing": True, "mixing_weights": {"*": 1.0}},
        "mixing_weights cannot be used with packing: .* expected packing false",
    ),
    (
        {"packing": True, "mixing_caps": {"*": 1}, "mixing_temperature": 2},
        "mixing_caps, mixing_temperature cannot be used with packing",
    ),
    (
        {"mixing_weights": {"*": 1.0}, "mixing_temperature": 2},
        "mixing_temperature 2 cannot be used with mixing_weights: the weights set the shares",
    ),
    ({"mixing_weights": {"a": 0.0}}, "mixing_weights: every weight is 0; expected at least one above 0"),
    ({"tokens_per_step": 4096}, "tokens_per_step requires packing"),
    ({"merge": True, "adaptation": "full"}, "merge cannot be used with full: it trains all weights"),
    ({"merge": True, "adaptation": "p_tuning"}, "merge cannot be used with p_tuning: virtual tokens are input"),
    (
        {"merge": True, "adaptation": "prompt_tuning"},
        "merge cannot be used with prompt_tuning: virtual tokens are input",
    ),
    *(
        ({"adaptation": "qlora", "device": device}, f"qlora cannot run on {device}: .* expected device auto or cuda")
        for device in ("cpu", "mps", "hpu")
    ),
    ({"objective": "kto", "micro_batch_size": 1}, "kto requires micro_batch_size 2 or more"),
    ({"lora": LoraConfig(plus_ratio=4.0), "adaptation": "full"}, "lora.plus_ratio cannot be used with adaptation full"),
    ({"neftune_noise_alpha": 5.0, "objective": "dpo"}, "neftune_noise_alpha cannot be used with dpo and lora"),
    (
        {"rope_scaling": RopeScalingConfig(factor=2.0)},
        "rope_scaling cannot be used with adaptation lora, merge false and strategy ddp: .* merge true",
    ),
    *(
        (
            {"rope_scaling": RopeScalingConfig(factor=2.0), "adaptation": "full", "objective": objective},
            f"rope_scaling cannot be used with {objective} and full: the reference model has the unscaled positions",
        )
        for objective in ("dpo", "kto")
    ),
    (
        {"grpo": GrpoConfig(rewards=[RewardConfig(kind="f1")])},
        "grpo.rewards cannot be used with sft; expected objective grpo",
    ),
    (
        {"objective": "grpo", "grpo": GrpoConfig(rewards=[RewardConfig(kind="f1", weight=0)])},
        "grpo.rewards: every weight is 0; expected at least one above 0",
    ),
    (
        {
            "objective": "grpo",
            "grpo": GrpoConfig(rewards=[RewardConfig(kind="f1")]),
            "strategy": "zero3",
            "processes": 2,
        },
        "strategy zero3 cannot be used with grpo, which has not been tested with shards",
    ),
    *(
        (settings, f"grpo.rollouts.engine continuous_batching cannot be used with {reason}")
        for settings, reason in (
            ({"grpo": BATCHED.model_copy(update={"rewards": []})}, "sft; expected objective grpo or rloo"),
            (
                {"objective": "rloo", "grpo": BATCHED, "adaptation": "p_tuning"},
                "adaptation p_tuning and compile false: it generates without virtual tokens",
            ),
            ({"objective": "grpo", "grpo": BATCHED, "compile": True}, "adaptation lora and compile true"),
        )
    ),
    (
        {"distillation": DistillationConfig(teacher="/teacher")},
        "distillation.teacher cannot be used with sft; expected objective distill",
    ),
    (
        {"objective": "distill", "distillation": DistillationConfig(teacher="/teacher"), "adaptation": "p_tuning"},
        "adaptation p_tuning cannot be used with distill: the loss is computed without virtual tokens",
    ),
    *(
        ({"objective": "reward", **settings}, reason)
        for settings, reason in (
            (
                {"adaptation": "p_tuning"},
                "adaptation p_tuning cannot be used with reward: .* expected lora or full or ia3",
            ),
            ({"merge": True}, "merge, initial_adapter and rope_scaling cannot be used with reward"),
            ({"sample_prompts": ["a"]}, "sample_prompts cannot be used with reward"),
        )
    ),
    ({"optimizer": "muon"}, "optimizer muon cannot be used with lora: .* expected adaptation full, or optimizer adamw"),
    (
        {"optimizer": "muon", "adaptation": "full", "strategy": "zero3", "processes": 2},
        "optimizer muon cannot be used with strategy zero3: it needs whole matrices; expected adamw",
    ),
    ({"optimizer": "adamw_8bit", "device": "cpu"}, "optimizer adamw_8bit cannot run on cpu: bitsandbytes requires"),
    (
        {"optimizer": "adafactor", "strategy": "zero3", "processes": 2},
        "optimizer adafactor cannot be used with strategy zero3: it has not been tested on shards",
    ),
    ({"initial_adapter": "sft", "adaptation": "full"}, "initial_adapter cannot be used with adaptation full"),
    ({"sample_prompts": ["a"], "validation_rows": 0}, "sample_prompts requires validation_rows of at least 1"),
    ({"early_stopping": 2, "validation_rows": 0}, "early_stopping requires validation_rows"),
    (
        {
            "objective": "grpo",
            "processes": 2,
            "grpo": GrpoConfig(
                rewards=[
                    RewardConfig(
                        kind="judge", judge=JudgeConfig(base_url="http://localhost/v1", model="rater", max_tokens=1)
                    )
                ]
            ),
        },
        "max_tokens of a judge is less than the number of processes, 2",
    ),
    *(({"strategy": strategy}, f"strategy {strategy} {SHARDING_ERROR}") for strategy in ("fsdp2", "zero3")),
    *(
        (
            {"strategy": strategy, "processes": 2, "adaptation": adaptation},
            f"strategy {strategy} cannot be used with {adaptation}",
        )
        for strategy in ("fsdp2", "zero3")
        for adaptation in ("p_tuning", "prompt_tuning", "qlora")
    ),
]


@pytest.mark.parametrize(("settings", "reason"), CONFLICTS)
def test_conflicting_settings_are_rejected_with_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        recipe(**settings)


def test_every_known_conflict_is_covered() -> None:
    covered = {index for settings, _ in CONFLICTS for index in _conflict_indices(settings)}
    assert covered == set(range(len(_find_conflicts({}))))
    assert not _conflict_indices({})


def _find_conflicts(settings: Mapping[str, Any]) -> list[tuple[bool, str]]:
    from components.fine_tuning import config

    return config._find_conflicts(recipe().model_copy(update=settings))


def _conflict_indices(settings: Mapping[str, Any]) -> list[int]:
    return [index for index, (is_conflict, _) in enumerate(_find_conflicts(settings)) if is_conflict]


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 24, "micro_batch_size": 4, "processes": 3},
        {"packing": True, "adaptation": "full"},
        {"packing": True, "tokens_per_step": 4096, "batch_size": 7},
        {"merge": True},
        {"merge": True, "adaptation": "qlora", "device": "cuda"},
        {"objective": "kto", "micro_batch_size": 2},
        {"early_stopping": 1, "validation_rows": 1},
        {"strategy": "fsdp2", "processes": 2, "adaptation": "full"},
    ],
)
def test_compatible_settings_are_accepted(settings: dict[str, Any]) -> None:
    assert recipe(**settings).gradient_accumulation_steps >= 1


@pytest.mark.parametrize(
    ("objective", "adaptation"),
    [
        (objective, adaptation)
        for objective in get_args(ObjectiveName)
        for adaptation in get_args(AdaptationName)
        if not (objective == "reward" and not ADAPTATIONS[adaptation].fits_reward_models)  # rejected: see CONFLICTS
        and not (objective == "distill" and ADAPTATIONS[adaptation].is_prompt_based)
    ],
)
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_every_objective_and_adaptation_except_qlora_runs_on_cpu(
    objective: str, adaptation: str, device: str, machine: FakeMachine
) -> None:
    machine("cpu")
    settings = {"objective": objective, "adaptation": adaptation, "device": device}
    if adaptation == "qlora":
        with pytest.raises((ConfigurationError, ValidationError), match=r"qlora .*cpu"):
            acceleration.check_machine(recipe(**settings))
    else:
        assert acceleration.check_machine(recipe(**settings)) == "cpu"


def test_every_configurable_objective_and_adaptation_is_implemented() -> None:
    assert set(OBJECTIVES) == set(get_args(ObjectiveName))
    assert set(ADAPTATIONS) == set(get_args(AdaptationName))


@pytest.mark.parametrize(
    ("tokens_per_step", "micro_batch_size", "processes", "rows", "accumulation"),
    [(4096, 4, 1, 16, 4), (4096, 4, 2, 16, 2), (100, 4, 2, 8, 1), (1600, 4, 1, 8, 2)],
)
def test_tokens_per_step_is_rounded_to_full_micro_batches(
    tokens_per_step: int, micro_batch_size: int, processes: int, rows: int, accumulation: int
) -> None:
    config = recipe(
        packing=True,
        tokens_per_step=tokens_per_step,
        micro_batch_size=micro_batch_size,
        processes=processes,
        max_length=256,
    )
    assert (config.rows_per_step, config.gradient_accumulation_steps) == (rows, accumulation)


@pytest.mark.parametrize("device", ["cuda", "hpu", "mps"])
def test_more_processes_than_accelerators_are_rejected(device: str, machine: FakeMachine) -> None:
    machine(device, accelerators=2)
    assert acceleration.check_machine(recipe(processes=2)) == device
    with pytest.raises(ConfigurationError, match=f"processes is 4; expected at most 2, the number of {device} devices"):
        acceleration.check_machine(recipe(processes=4, batch_size=8))


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_optimizer_that_needs_a_gpu_is_checked_before_any_stage(optimizer: str, machine: FakeMachine) -> None:
    machine("cpu")
    config = recipe(optimizer=optimizer)
    assert acceleration.has_machine_requirements(config)
    with pytest.raises(ConfigurationError, match=f"{optimizer} requires an NVIDIA GPU; the device is cpu"):
        acceleration.check_machine(config)


def test_memory_of_continuous_batching_has_pages_a_mask_and_the_precision_of_the_weights() -> None:
    def estimate(engine: RolloutEngineName, **settings: Any) -> int:
        grpo = GrpoConfig(rewards=[RewardConfig(kind="f1")], rollouts=RolloutsConfig(engine=engine))
        config = recipe(objective="grpo", grpo=grpo, batch_size=64, micro_batch_size=1, **settings)
        parts = acceleration.estimate_memory_parts(config, LARGE_MODEL, rows=1, length=100, gpu=True)
        return parts["generation"] + parts["activations"] + parts["logits"]

    whole, flash = estimate("generate"), {"attention": "flash_attention_2"}
    paged = estimate("continuous_batching", **flash)
    assert paged / whole == pytest.approx(13 * 32 / 356, rel=1e-6)  # 100 + 256 tokens: 12 pages and a spare one
    answers = 64 * GrpoConfig().answers_per_prompt
    assert estimate("continuous_batching") - paged == answers * (answers * 13 * 32 + answers) * 2
    assert estimate("continuous_batching", adaptation="full", **flash) == 2 * paged
    assert estimate("generate", adaptation="full") == whole
