"""A customization against a machine and against the requests of platform.yaml. Fast tier: formulas in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from components.common.models import compute_devices
from components.common.reporting.check_findings import CheckResult
from components.common.workspace.artifact_store import Workdir
from components.fine_tuning import acceleration
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import node_checks
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError
from pipelines.planning import fit_checks, resource_requests, sizing_input
from pipelines.planning.architectures import find_architecture
from pipelines.planning.run_demand import estimate_demand
from tests.pipelines.command import answer_in_process, run_in_process
from tests.pipelines.test_sizing import size

LLAMA = "hf://meta-llama/Llama-3.1-8B-Instruct"
L40S = {"nvidia.com/gpu.product": "NVIDIA-L40S"}


def customize(**tuning: Any) -> Customization:
    return Customization.load(fine_tuning={"base_model": LLAMA, "max_length": 2048, **tuning})


def request(training: dict[str, Any], **others: Any) -> Platform:
    gpu = {"accelerator": "nvidia.com/gpu", "accelerators": 1, "memory": "64Gi", "scheduling": {"node_selector": L40S}}
    return Platform.model_validate({"resources": {"fine_tuning": {**gpu, **training}}, **others})


def check(config: Customization, platform: Platform) -> dict[str, CheckResult]:
    return {result["name"]: result for result in fit_checks.check_platform_fit(config, platform)}


def test_memory_equals_that_of_the_sizing() -> None:
    demand = estimate_demand(customize(micro_batch_size=2), 48e9, on_gpu=True)
    sized = size("--model", "llama-3.1-8b", "--gpu", "l40s:1", "--length", 2048, "--micro-batch", 2)
    assert demand.plan.memory["total"] / 2**30 == pytest.approx(sized["memory_gib_per_gpu"], abs=0.01)


@pytest.mark.parametrize(
    "tuning",
    [
        {"adaptation": "lora"},
        {"adaptation": "qlora", "activation_checkpointing": "on"},
        {"adaptation": "full", "processes": 8, "strategy": "fsdp2"},
        {"adaptation": "full", "processes": 8, "strategy": "zero3"},
        {"adaptation": "full", "processes": 8, "strategy": "fsdp2", "objective": "dpo"},
        {"adaptation": "full", "processes": 8, "objective": "dpo"},
        {"adaptation": "full", "processes": 8, "objective": "kto"},
        {"adaptation": "full", "processes": 8, "strategy": "fsdp2", "objective": "orpo"},
    ],
)
def test_memory_equals_that_of_the_training_check(tuning: dict[str, Any]) -> None:
    config = customize(micro_batch_size=2, batch_size=16, fused_kernels="off", **tuning)
    demand = estimate_demand(config, 400e9, on_gpu=True)
    recipe = config.fine_tuning
    adapter = sizing_input.count_adapter_parameters(find_architecture("llama-3.1-8b"), recipe)
    shape = find_architecture("llama-3.1-8b").build_shape(adapter=adapter)
    checkpointing = recipe.activation_checkpointing == "on"
    parts = acceleration.estimate_memory_parts(
        recipe, shape, rows=2, length=2048, gpu=True, checkpointing=checkpointing
    )
    assert demand.plan.memory == parts


def test_training_that_fits_passes_and_the_parts_are_listed() -> None:
    result = check(customize(), request({}))["GPU memory for fine_tuning"]
    assert result["ok"]
    assert "of 44.7 GiB per GPU: weights 15.2, gradients 0.2, optimizer 0.3" in result["found"]


def test_weights_that_exceed_the_gpu_are_an_error_with_the_largest_part() -> None:
    result = check(customize(adaptation="full"), request({}))["GPU memory for fine_tuning"]
    assert (result["ok"], result["needed"]) == (False, True)
    assert "The largest part is optimizer." in result["hint"]


def test_sharding_over_more_gpus_makes_it_fit() -> None:
    sharded = customize(adaptation="full", processes=8, strategy="fsdp2")
    assert check(sharded, request({"accelerators": 8, "memory": "64Gi"}))["GPU memory for fine_tuning"]["ok"]


@pytest.mark.parametrize(
    ("processes", "accelerators", "needed", "hint"),
    [
        (4, 2, True, "Request 4 in resources.fine_tuning.accelerators"),
        (2, 8, False, "the other GPUs stay idle"),
    ],
)
def test_processes_without_a_gpu_and_idle_gpus_are_reported(
    processes: int, accelerators: int, needed: bool, hint: str
) -> None:
    result = check(customize(processes=processes), request({"accelerators": accelerators}))["GPUs for fine_tuning"]
    assert not result["ok"]
    assert result["needed"] is needed
    assert hint in result["hint"]


@pytest.mark.parametrize(
    ("memory", "ok", "needed", "hint"),
    [
        ("16Gi", False, True, "Set resources.triton_packaging.memory to 68Gi or more"),
        ("64Gi", False, False, "Set resources.triton_packaging.memory to 68Gi or more"),
        ("72Gi", True, False, ""),
        ("512Gi", False, False, "Lower resources.triton_packaging.memory towards 68Gi"),
        ("", False, False, "Set resources.triton_packaging.memory to 68Gi or more"),
    ],
)
def test_host_memory_is_compared_with_the_request(memory: str, ok: bool, needed: bool, hint: str) -> None:
    platform = request({})
    packaging = platform.resources.triton_packaging.model_copy(update={"memory": memory})
    resources = platform.resources.model_copy(update={"triton_packaging": packaging})
    result = check(customize(), platform.model_copy(update={"resources": resources}))["memory for triton_packaging"]
    assert (result["ok"], not result["ok"] and result["needed"]) == (ok, needed)
    assert hint in result["hint"]


def test_requests_of_the_launcher_replace_those_of_the_step() -> None:
    job = {"accelerator": "nvidia.com/gpu", "accelerators": 2, "memory": "16Gi", "runtime": "tuneline"}
    trainjob = Platform.model_validate({"launcher": {"kind": "trainjob", "nodes": 2, "trainjob": job}})
    found = check(customize(processes=4), trainjob)
    assert "2 of 2 per node" in found["GPUs for fine_tuning"]["found"]
    assert "Set launcher.trainjob.memory" in found["memory for fine_tuning"]["hint"]
    assert "memory of the GPU is not known" in found["GPU memory for fine_tuning"]["found"]
    slurm = Platform.model_validate({"launcher": {"kind": "slurm", "slurm": {"gres": "gpu:l40s:4", "memory": "90G"}}})
    resources = fit_checks.find_training_resources(slurm)
    assert (resources.accelerators, resources.memory, resources.gpu_bytes) == (4, 90 * 2**30, 48e9)


def test_compilation_warns_about_certain_failures_only() -> None:
    assert fit_checks.list_warnings(customize(), request({})) == []
    (warning,) = fit_checks.list_warnings(customize(), request({"memory": "8Gi"}))
    assert warning.startswith("memory for fine_tuning: 15.5 GiB of 8.0 GiB requested. Set resources.fine_tuning.memory")


def test_unknown_model_is_not_checked() -> None:
    (result,) = fit_checks.check_platform_fit(customize(base_model="hf://acme/secret-1"), request({}))
    assert (result["ok"], result["needed"]) == (False, False)
    assert "the shape of fine_tuning.base_model 'hf://acme/secret-1' is not known" in result["found"]


def test_machine_is_compared_with_the_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_devices, "select_device", lambda name: "cpu")
    monkeypatch.setattr(compute_devices, "get_total_memory_bytes", lambda device: 40 * 2**30)
    results = {
        result["name"]: result for result in fit_checks.check_machine_fit(customize(), Workdir(tmp_path / "project"))
    }
    assert not results["memory for triton_packaging"]["ok"]  # two models of 30 GiB
    assert results["memory for evaluation"]["ok"]
    assert "per process: weights 30.1" in results["memory for fine_tuning"]["found"]
    assert "repository 30" in results["disk space for a run"]["found"]


def test_platform_is_compared_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    platform = {"resources": {"fine_tuning": {"memory": "8Gi"}, "evaluation": {"memory": "900Gi"}}}
    (tmp_path / "platform.yaml").write_text(json.dumps(platform), encoding="utf-8")
    (tmp_path / "customization.yaml").write_text(json.dumps({"fine_tuning": {"base_model": LLAMA}}), encoding="utf-8")
    arguments = ("doctor", "-p", "platform.yaml", "-c", "customization.yaml", "--json")
    done = run_in_process(*arguments, cwd=tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert not findings["cluster"]["ok"]
    assert findings["memory for fine_tuning"]["needed"]
    assert findings["memory for evaluation"]["hint"].startswith("Lower resources.evaluation.memory")


def test_forbidden_nodes_leave_the_labels_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: object) -> list[Any]:
        raise ForbiddenError("nodes is forbidden")

    monkeypatch.setattr(node_checks, "list_training_nodes", refuse)
    (check_fit,) = fit_checks.build_cluster_checks(customize()).values()
    results = check_fit(CheckContext(Mock(), request({}), "team"))
    assert "of 44.7 GiB per GPU" in next(r["found"] for r in results if r["name"] == "GPU memory for fine_tuning")


def test_empty_requests_are_filled_with_the_estimate_and_others_stay() -> None:
    gpu = {"memory": "", "scheduling": {"node_selector": L40S}}
    platform = request(gpu, volume={"claim": "c"})
    filled, requests = resource_requests.fill_requests(customize(), platform)
    assert requests == {
        "resources.fine_tuning.memory_request": "18Gi",
        "resources.evaluation.memory_request": "20Gi",
        "resources.triton_packaging.memory_request": "68Gi",
    }
    assert filled.resources.triton_packaging.memory_request == "68Gi"
    assert check(customize(), filled)["memory for triton_packaging"]["ok"]
    explicit = request({"memory": "64Gi"}, volume={"claim": "c"})
    filled, requests = resource_requests.fill_requests(customize(), explicit)
    assert filled.resources.fine_tuning == explicit.resources.fine_tuning
    assert "resources.fine_tuning.memory_request" not in requests


def test_hint_for_a_small_request_names_its_key() -> None:
    resources = {stage: {"memory_request": "1Gi"} for stage in ("fine_tuning", "evaluation")}
    checks = check(customize(micro_batch_size=1), Platform.model_validate({"resources": resources}))
    for stage in resources:
        assert checks[f"memory for {stage}"]["hint"].startswith(f"Set resources.{stage}.memory_request to ")
        assert checks[f"memory for {stage}"]["hint"].endswith("a node may run out of memory.")


def test_accelerators_that_are_left_out_are_those_of_the_processes() -> None:
    training = {"accelerator": "nvidia.com/gpu", "memory": "64Gi"}
    left_out = Platform.model_validate({"resources": {"fine_tuning": training}})
    filled, requests = resource_requests.fill_requests(customize(processes=4), left_out)
    assert requests["resources.fine_tuning.accelerators"] == "4"
    assert filled.resources.fine_tuning.accelerators == 4
    _, requests = resource_requests.fill_requests(customize(processes=4), request({"accelerators": 2}))
    assert "resources.fine_tuning.accelerators" not in requests


@pytest.mark.parametrize(
    ("tuning", "platform", "filled"),
    [
        ({}, {}, {"evaluation", "triton_packaging"}),  # rows per pass on a CPU are not known
        ({"micro_batch_size": 1}, {}, {"fine_tuning", "evaluation", "triton_packaging"}),
        ({}, {"launcher": {"kind": "trainjob", "trainjob": {"runtime": "t"}}}, {"evaluation", "triton_packaging"}),
        ({"base_model": "hf://acme/secret-1"}, {}, set()),
    ],
)
def test_requests_are_filled_only_where_the_estimate_is_known(
    tuning: dict[str, Any], platform: dict[str, Any], filled: set[str]
) -> None:
    _, requests = resource_requests.fill_requests(customize(**tuning), Platform.model_validate(platform))
    assert {key.split(".")[1] for key in requests} == filled


def test_compiled_pods_have_filled_requests_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "customization.yaml").write_text(
        f"fine_tuning: {{base_model: {LLAMA}, micro_batch_size: 1, max_length: 512}}"
    )
    (tmp_path / "platform.yaml").write_text("resources: {evaluation: {memory: 96Gi}}")
    command = ("compile", "-c", "customization.yaml", "-p", "platform.yaml", "-o", "pipeline.yaml")
    result = answer_in_process(*command, cwd=tmp_path)
    compiled = yaml.safe_load((tmp_path / "pipeline.yaml").read_text().split("\n---\n")[0])
    pods = {
        name.removeprefix("exec-"): executor["container"].get("resources", {})
        for name, executor in compiled["deploymentSpec"]["executors"].items()
    }
    assert result["requests"].keys() == {
        f"resources.{name}.memory_request" for name in ("fine_tuning", "triton_packaging")
    }
    assert pods["triton-packaging"] == {
        "resourceMemoryRequest": "68Gi",
        "memoryRequest": pods["triton-packaging"]["memoryRequest"],
    }
    assert pods["evaluation"]["resourceMemoryLimit"] == "96Gi"
    assert run_in_process(*command, cwd=tmp_path).stderr.count("the estimate of `tuneline size`") == 2
    assert answer_in_process("compile", "-p", "platform.yaml", "-o", "default.yaml", cwd=tmp_path)["requests"] == {}
