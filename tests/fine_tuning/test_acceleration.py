"""How a recipe is computed on a device, and what is refused before any work: what cannot be meant, and what cannot run here.

Choices for GPUs and Gaudis are tried at the seam, with the device's name, its free memory and the packages there are as they would be told:
that the chosen kernels run there is not shown here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from components.common import devices
from components.common.errors import EXIT_USAGE, ConfigurationError, EngineMissingError
from components.common.shape import Shape, training_memory
from components.fine_tuning import acceleration
from components.fine_tuning.acceleration import Choice
from components.fine_tuning.config import AdaptationName, FineTuningConfig, Objective
from components.fine_tuning.methods import ADAPTATIONS
from components.fine_tuning.objectives import OBJECTIVES

LARGE = Shape(parameters=8_030_000_000, trainable=42_000_000, embedding=0, layers=32, hidden=4096, intermediate=14_336, vocabulary=128_256)
GPU_PACKAGES = ("flash_attn", "liger_kernel", "bitsandbytes", "deepspeed")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A function that makes this machine one with this device, so much free memory, these packages, and models Liger knows."""
    real = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        if name in GPU_PACKAGES:
            return ModuleSpec(name, None) if name in there else None
        return real(name, package)

    there: set[str] = set()

    def make(device: str, *packages: str, free: int = 10**15, known: tuple[str, ...] = ("llama",), accelerators: int = 8) -> None:
        there.update(packages)
        for name, (_, missing) in list(devices.HERE.items()):
            monkeypatch.setitem(devices.HERE, name, (lambda name=name: name in (device, "cpu"), missing))
        monkeypatch.setattr(devices, "free_memory", lambda _: free)
        monkeypatch.setattr(devices, "count", lambda name: None if name == "cpu" else accelerators)
        monkeypatch.setattr(acceleration, "_liger_knows", lambda kind: kind in known)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    return make


def recipe(**changes: Any) -> FineTuningConfig:
    return FineTuningConfig.model_validate(changes)


def choose(device: str, **changes: Any) -> Choice:
    return acceleration.choose(recipe(**changes), device, LARGE, "llama")


def reason(choice: Choice, about: str) -> str:
    """The sentence that says why."""
    (told,) = [one for one in choice.reasons if one.startswith(about)]
    return told


@pytest.mark.parametrize(("device", "half"), [("cuda", True), ("hpu", True), ("mps", False), ("cpu", False)])
def test_bfloat16_is_for_gpus_and_gaudis_and_float32_for_the_others(device: str, half: bool, machine: Machine) -> None:
    machine(device)
    choice = choose(device)
    assert (choice.device, choice.bfloat16) == (device, half)
    assert reason(choice, "bfloat16" if half else "float32").endswith(f"what {device} is fast in")
    assert len(choice.reasons) == 5, "a sentence a decision"
    assert choose(device, precision="float32").bfloat16 is False
    assert reason(choose(device, precision="float32"), "float32") == "float32: as configured"
    assert choose(device, precision="bfloat16").bfloat16 is True


@pytest.mark.parametrize(
    ("half", "adaptation", "dtype"),
    [(True, "lora", torch.bfloat16), (True, "full", torch.float32), (False, "lora", torch.float32), (False, "full", torch.float32)],
)
def test_frozen_weights_are_held_as_they_are_computed_with_and_trained_ones_whole(half: bool, adaptation: str, dtype: Any) -> None:
    choice = Choice("cuda", half, "sdpa", False, False, False, [])
    assert acceleration.torch_dtype(recipe(adaptation=adaptation), choice) is dtype


def test_flash_attention_is_taken_where_it_is_installed_on_a_gpu_and_nowhere_else(machine: Machine) -> None:
    machine("cuda")
    assert choose("cuda").attention == "sdpa"
    assert "flash-attn is not installed" in reason(choose("cuda"), "attention")
    machine("cuda", "flash_attn")
    assert choose("cuda").attention == "flash_attention_2"
    assert "flash-attn is installed" in reason(choose("cuda"), "attention")
    assert choose("cuda", precision="float32").attention == "sdpa", "it has no float32 kernels"
    assert choose("cuda", attention="eager").attention == "eager"
    for device in ("hpu", "mps", "cpu"):
        assert choose(device).attention == "sdpa"
        assert f"torch's own kernel on {device}" in reason(choose(device), "attention")


def test_the_reason_for_torch_s_own_attention_is_the_true_one(machine: Machine) -> None:
    machine("cuda", "flash_attn")
    assert "not installed" not in reason(choose("cuda", precision="float32"), "attention")


def test_liger_is_taken_on_a_gpu_where_it_is_installed_and_knows_the_model(machine: Machine) -> None:
    machine("cuda")
    assert not choose("cuda").liger
    assert "liger-kernel is not installed" in reason(choose("cuda"), "fused kernels")
    machine("cuda", "liger_kernel", known=("qwen3",))
    assert not choose("cuda").liger
    assert "does not know llama" in reason(choose("cuda"), "fused kernels")
    machine("cuda", "liger_kernel")
    assert choose("cuda").liger
    assert choose("cuda", fused_kernels="on").liger
    assert not choose("cuda", fused_kernels="off").liger
    for device in ("hpu", "mps", "cpu"):
        assert not choose(device).liger
        assert f"not for {device}" in reason(choose(device), "fused kernels")


def needed(config: FineTuningConfig, rows: int, gpu: bool) -> int:
    dropout = config.lora.dropout > 0
    return training_memory(LARGE, rows=rows, length=config.max_length, dropout=dropout, gpu=gpu)["total"]


@pytest.mark.parametrize("device", ["cuda", "hpu", "mps", "cpu"])
def test_activations_are_computed_again_where_they_do_not_fit(device: str, machine: Machine) -> None:
    config = recipe()
    room = int(needed(config, config.micro_batch_size, device in ("cuda", "hpu")) / acceleration.ROOM)
    machine(device, free=room + 10**6)
    assert not choose(device).activation_checkpointing
    machine(device, free=room - 10**6)
    choice = choose(device)
    assert choice.activation_checkpointing
    told = reason(choice, "activation checkpointing: on")
    assert f"{room * acceleration.ROOM / 1e9:.1f} GB are needed without it and {room / 1e9:.1f} GB free" in told
    assert choose(device, activation_checkpointing="off").activation_checkpointing is False
    machine(device)
    assert choose(device).activation_checkpointing is False
    assert choose(device, activation_checkpointing="on").activation_checkpointing is True
    assert reason(choose(device, activation_checkpointing="on"), "activation checkpointing: on").endswith("as configured")


def test_what_needs_more_memory_decides_sooner_for_computing_again(machine: Machine) -> None:
    config = recipe(lora={"dropout": 0.0})
    machine("cuda", free=int(needed(config, config.micro_batch_size, True) / acceleration.ROOM) + 10**6)
    assert not choose("cuda", lora={"dropout": 0.0}).activation_checkpointing
    assert choose("cuda").activation_checkpointing, "dropout keeps its masks"
    assert choose("cuda", lora={"dropout": 0.0}, objective="dpo").activation_checkpointing, "two answers a row"
    assert choose("cuda", lora={"dropout": 0.0}, objective="kto").activation_checkpointing
    assert choose("cuda", lora={"dropout": 0.0}, max_length=512).activation_checkpointing
    assert not choose("cuda", lora={"dropout": 0.0}, micro_batch_size=2).activation_checkpointing


def test_processes_share_a_machine_s_memory_and_have_an_accelerator_each(machine: Machine) -> None:
    settings = {"processes": 2, "batch_size": 8}
    config = recipe(**settings)
    machine("cpu", free=int(1.5 * needed(config, config.micro_batch_size, False) / acceleration.ROOM))
    assert not choose("cpu").activation_checkpointing
    assert choose("cpu", **settings).activation_checkpointing
    machine("cuda", free=int(1.5 * needed(config, config.micro_batch_size, True) / acceleration.ROOM))
    assert not choose("cuda", **settings).activation_checkpointing


def test_a_sharded_model_needs_a_part_of_the_memory_in_each_process(machine: Machine) -> None:
    settings = {"processes": 4, "batch_size": 16}
    config = recipe(**settings)
    machine("cuda", free=int(0.5 * needed(config, config.micro_batch_size, True) / acceleration.ROOM))
    assert choose("cuda", **settings).activation_checkpointing
    assert not choose("cuda", **settings, strategy="fsdp2").activation_checkpointing


def test_compilation_is_as_configured(machine: Machine) -> None:
    machine("cuda")
    assert (choose("cuda").compile, choose("cuda", compile=True).compile) == (False, True)
    assert reason(choose("cuda", compile=True), "torch.compile") == "torch.compile: on, as configured"


@pytest.mark.parametrize(
    ("device", "packages", "settings", "needs"),
    [
        ("cpu", ["flash_attn"], {"attention": "flash_attention_2"}, "attention: flash_attention_2 needs an NVIDIA GPU"),
        ("hpu", ["flash_attn"], {"attention": "flash_attention_2"}, "attention: flash_attention_2 needs an NVIDIA GPU"),
        ("cuda", ["flash_attn"], {"attention": "flash_attention_2", "precision": "float32"}, "flash_attention_2 needs bfloat16"),
        ("cuda", [], {"attention": "flash_attention_2"}, "flash_attention_2 needs the package flash-attn"),
        ("cpu", ["liger_kernel"], {"fused_kernels": "on"}, "fused_kernels: on needs an NVIDIA GPU"),
        ("cuda", [], {"fused_kernels": "on"}, "fused_kernels: on needs liger-kernel, which is not installed"),
    ],
)
def test_kernels_that_are_not_to_be_had_are_refused_with_what_they_need(
    device: str, packages: list[str], settings: dict[str, Any], needs: str, machine: Machine
) -> None:
    machine(device, *packages)
    with pytest.raises(ConfigurationError, match=needs) as refused:
        choose(device, **settings)
    assert refused.value.hint.endswith(": auto.")
    assert refused.value.exit_code == EXIT_USAGE


def test_fused_kernels_for_a_model_that_liger_does_not_know_are_refused(machine: Machine) -> None:
    machine("cuda", "liger_kernel", known=("qwen3",))
    with pytest.raises(ConfigurationError, match="on needs a model that Liger knows"):
        choose("cuda", fused_kernels="on")


@pytest.mark.parametrize("device", ["hpu", "mps", "cpu"])
def test_qlora_without_an_nvidia_gpu_is_refused_even_where_the_device_is_found_out(device: str, machine: Machine) -> None:
    machine(device, "bitsandbytes")
    with pytest.raises(ConfigurationError, match=f"qlora needs an NVIDIA GPU, and here {device} trains") as refused:
        acceleration.check(recipe(adaptation="qlora"))
    assert "lora" in refused.value.hint


def test_qlora_on_a_gpu_needs_bitsandbytes(machine: Machine) -> None:
    machine("cuda")
    with pytest.raises(EngineMissingError, match="bitsandbytes"):
        acceleration.check(recipe(adaptation="qlora"))
    machine("cuda", "bitsandbytes")
    assert acceleration.check(recipe(adaptation="qlora")) == "cuda"


def test_bfloat16_on_an_apple_gpu_is_refused(machine: Machine) -> None:
    machine("mps")
    with pytest.raises(ConfigurationError, match="bfloat16 training is not supported on mps"):
        acceleration.check(recipe(precision="bfloat16"))
    assert acceleration.check(recipe()) == "mps"


@pytest.mark.parametrize(
    ("strategy", "refused_on", "taken_on"), [("fsdp2", ("mps", "cpu"), ("cuda", "hpu")), ("zero3", ("mps",), ("cpu", "cuda", "hpu"))]
)
def test_sharding_is_refused_where_it_cannot_be_in_force(
    strategy: str, refused_on: tuple[str, ...], taken_on: tuple[str, ...], machine: Machine
) -> None:
    config = recipe(strategy=strategy, processes=2)
    for device in refused_on:
        machine(device, "deepspeed")
        with pytest.raises(ConfigurationError, match=f"{strategy} cannot be in force on {device}: "):
            acceleration.check(config)
    for device in taken_on:
        machine(device, "deepspeed")
        assert acceleration.check(config) == device


def test_zero3_needs_deepspeed(machine: Machine) -> None:
    machine("cuda")
    with pytest.raises(EngineMissingError, match="needs the package deepspeed"):
        acceleration.check(recipe(strategy="zero3", processes=2))
    assert acceleration.check(recipe(strategy="fsdp2", processes=2)) == "cuda"


SHARDS = "shards the model over processes, and processes is 1"
CONTRADICTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"batch_size": 6, "micro_batch_size": 4}, "batch_size 6 is not a multiple of micro_batch_size 4"),
    ({"batch_size": 8, "micro_batch_size": 4, "processes": 3}, "batch_size 8 is not a multiple of micro_batch_size 4 × processes 3"),
    ({"packing": True, "adaptation": "p_tuning"}, "packing cannot be used with p_tuning: .* would see each other"),
    ({"packing": True, "adaptation": "prompt_tuning"}, "packing cannot be used with prompt_tuning: .* would see each other"),
    ({"merge": True, "strategy": "zero3", "processes": 2}, "merge cannot be used with strategy zero3: "),
    ({"packing": True, "objective": "dpo"}, "packing cannot be used with dpo: each row is compared"),
    ({"packing": True, "objective": "kto"}, "packing cannot be used with kto: each row is compared"),
    ({"tokens_per_step": 4096}, "tokens_per_step needs packing"),
    ({"merge": True, "adaptation": "full"}, "merge cannot be used with full: its weights are whole already"),
    ({"merge": True, "adaptation": "p_tuning"}, "merge cannot be used with p_tuning: virtual tokens are input"),
    ({"merge": True, "adaptation": "prompt_tuning"}, "merge cannot be used with prompt_tuning: virtual tokens are input"),
    *(({"adaptation": "qlora", "device": one}, f"qlora cannot run on {one}: .* Use lora") for one in ("cpu", "mps", "hpu")),
    ({"objective": "kto", "micro_batch_size": 1}, "kto needs micro_batch_size 2 or more"),
    ({"early_stopping": 2, "validation_rows": 0}, "early_stopping needs validation_rows"),
    *(({"strategy": one}, f"strategy {one} {SHARDS}. Use ddp") for one in ("fsdp2", "zero3")),
    *(
        ({"strategy": one, "processes": 2, "adaptation": other}, f"strategy {one} cannot be used with {other}")
        for one in ("fsdp2", "zero3")
        for other in ("p_tuning", "prompt_tuning", "qlora")
    ),
]


@pytest.mark.parametrize(("settings", "why"), CONTRADICTIONS)
def test_settings_that_cannot_be_meant_together_are_refused_with_the_reason(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        recipe(**settings)


def test_each_contradiction_there_is_was_tried() -> None:
    reasons = {number for settings, _ in CONTRADICTIONS for number in _wrong(settings)}
    assert reasons == set(range(len(_contradictions({}))))
    assert not _wrong({})


def _contradictions(settings: Mapping[str, Any]) -> list[tuple[bool, str]]:
    from components.fine_tuning import config

    return config._contradictions(FineTuningConfig().model_copy(update=settings))


def _wrong(settings: Mapping[str, Any]) -> list[int]:
    return [number for number, (wrong, _) in enumerate(_contradictions(settings)) if wrong]


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
def test_settings_that_can_be_meant_together_are_not_refused(settings: dict[str, Any]) -> None:
    assert recipe(**settings).accumulation >= 1


@pytest.mark.parametrize("objective", get_args(Objective))
@pytest.mark.parametrize("adaptation", get_args(AdaptationName))
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_every_objective_and_adaptation_that_the_configuration_allows_can_be_trained_on_a_processor_but_qlora(
    objective: str, adaptation: str, device: str, machine: Machine
) -> None:
    machine("cpu")
    settings = {"objective": objective, "adaptation": adaptation, "device": device}
    if adaptation == "qlora":
        with pytest.raises((ConfigurationError, ValidationError), match=r"qlora .*cpu"):
            acceleration.check(recipe(**settings))
    else:
        assert acceleration.check(recipe(**settings)) == "cpu"


def test_every_objective_and_adaptation_of_the_configuration_is_there() -> None:
    assert set(OBJECTIVES) == set(get_args(Objective))
    assert set(ADAPTATIONS) == set(get_args(AdaptationName))


@pytest.mark.parametrize(
    ("wanted", "micro", "processes", "rows", "accumulation"),
    [(4096, 4, 1, 16, 4), (4096, 4, 2, 16, 2), (100, 4, 2, 8, 1), (1600, 4, 1, 8, 2)],
)
def test_tokens_a_step_become_the_nearest_number_of_packed_rows_that_all_processes_can_share(
    wanted: int, micro: int, processes: int, rows: int, accumulation: int
) -> None:
    config = recipe(packing=True, tokens_per_step=wanted, micro_batch_size=micro, processes=processes, max_length=256)
    assert (config.step_rows, config.accumulation) == (rows, accumulation)


@pytest.mark.parametrize("device", ["cuda", "hpu", "mps"])
def test_there_is_a_process_an_accelerator_and_no_more(device: str, machine: Machine) -> None:
    machine(device, accelerators=2)
    assert acceleration.check(recipe(processes=2)) == device
    with pytest.raises(ConfigurationError, match=f"processes is 4, and 2 of {device} are here"):
        acceleration.check(recipe(processes=4, batch_size=8))
