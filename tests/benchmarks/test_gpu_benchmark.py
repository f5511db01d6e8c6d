"""The GPU benchmark at tiny size on a CPU: stages run, a failed stage is recorded, and the page states goals and gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import page, plan


def build_results() -> dict[str, Any]:
    """Return results as the stages write them, with round figures."""
    training = {
        "about": "8 rows", "run": 1, "step_seconds": [9.0, *[1.0] * 9], "tokens_per_step": [16_000.0] * 9, "mfu": 0.5,
        "flops_per_token": 31e9, "peak_memory": 92 * page.GB, "predicted_memory": 91 * page.GB, "usage": 0.9,
        "mean_row_tokens": 86.0, "tokens_per_second": 16_000.0, "profile": {"kinds": {"matrix products": 0.8, "attention": 0.1}, "wall": 1.0},
    }  # fmt: skip
    trl = {key: training[key] for key in ("run", "peak_memory", "usage")} | {
        "about": "plain TRL", "step_seconds": [2.0] * 9, "tokens_per_step": [16_000] * 9,
    }  # fmt: skip
    rates = {
        count: {"tokens_per_second": 50.0 * int(count), "usage": 0.4, "sampled_tokens_per_second": 40.0}
        for count in ("1", "16")
    }
    return {
        "machine": {"run": 1, "gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "python": "3.12.3",
                    "product_flops": 760e12, "copy_bytes_per_second": 4.2e12},
        "lora": training, "lora-packed": training, "lora-compiled-8": training, "trl-liger": trl, "trl-packed": trl,
        "serve": {"run": 1, "plain_tokens_per_second": 50.0, "rates": rates, "ratio": {"1": 1.0, "16": 16.0},
                  "cache_tokens": 1000, "free_bytes_before": 10 * page.GB},
        "score": {"run": 1, "requests": 512, "ratio": 1.5, "median_difference": 0.2, "engines": {"tuneline": {"seconds": 0.6}}},
        "resume": {"run": 1, "resumed_from": 3, "difference": {"resumed": 4e-4, "repeated": 3e-4}},
    }  # fmt: skip


def test_page_states_missed_goals_and_stages_without_a_result(tmp_path: Path) -> None:
    page.write_page(build_results(), tmp_path / "page.md", "abc1234")
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| LoRA 8B at 2,048 tokens: MFU of at least 55% | 50.0% (`lora`) | **missed** |" in text
    assert "| predicted memory within 10% | largest error -1.1% of 3 recipes | met |" in text
    assert "2.00 × with rows of full length" in text
    assert "Not measured yet: `tests`, `lora-compiled`, `lora-8k`" in text
    assert (tmp_path / "images" / "benchmarks-gpu.svg").stat().st_size > 1000


def test_failed_and_slow_stages_are_recorded(tmp_path: Path) -> None:
    unknown = plan.Stage(
        "broken", "finetune", {"shape": "no such shape", "rows": "long", "length": 8, "steps": 1, "recipe": {}}
    )
    result = benchmark.run_stage(unknown, tmp_path, tmp_path)
    assert result["error"] == "exit status 1"
    assert "no such shape" in result["output"]
    slow = plan.Stage("slow", "machine", limit_seconds=0.01)
    assert benchmark.run_stage(slow, tmp_path, tmp_path)["error"] == "exceeded 0 s"


def test_every_stage_of_the_gpu_exists_at_tiny_size() -> None:
    large, tiny = ({stage.name for stage in plan.list_stages(scale)} for scale in ("gpu", "tiny"))
    assert large - tiny == {"qlora-8b"}, "bitsandbytes has no kernels for a CPU"


@pytest.mark.stress  # trains and serves in processes: 30 seconds of CPU
def test_stages_run_at_tiny_size(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "benchmarks.gpu", "--workdir", str(tmp_path), "--output", str(tmp_path / "out"),
        "--scale", "tiny", "--only", "machine,lora,serve",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert results["machine"]["gpu"] is None
    assert len(results["lora"]["losses"]) == 6
    assert results["lora"]["tokens_per_second"] > 0
    assert results["serve"]["rates"]["4"]["equal_tokens"] == [8, 8], "batched answers equal those of generate"
