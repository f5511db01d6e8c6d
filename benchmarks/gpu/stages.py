"""Stages of the GPU benchmark: each runs in a separate process and writes one JSON object.

python -m benchmarks.gpu.stages STAGE RESULT.json SETTINGS.json
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.gpu import workloads
from benchmarks.gpu.usage import UsageSampler
from components.common.models.model_shape import ModelShape
from components.common.models.resource_formulas import estimate_training_flops
from components.common.runtime.reporters import SilentReporter

if TYPE_CHECKING:
    from components.common.models.model_loading import LocalBaseModel
    from components.fine_tuning.config import FineTuningConfig

PEAK_FLOPS = 989.5e12  # dense bfloat16 of H100 and H200 (SXM), as published by NVIDIA
WARMUP_STEPS = 3  # compilation, allocation and autotuning
Settings = dict[str, Any]
Result = dict[str, Any]


def check_machine(settings: Settings, folder: Path) -> Result:
    """Return versions, and the rates of the GPU: a matrix product and a copy, which limit everything else."""
    import importlib.metadata

    import torch

    names = (
        *("torch", "transformers", "peft", "trl", "accelerate", "liger_kernel", "bitsandbytes", "lm_eval", "triton"),
        "flash_attn",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    result: Result = {"versions": versions, "python": sys.version.split()[0], "cpu_count": os.cpu_count()}
    if not torch.cuda.is_available():
        return {**result, "gpu": None}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = _time_on_gpu(lambda: a @ b)
    source = torch.randint(0, 255, (4 << 30,), device="cuda", dtype=torch.uint8)
    copy = _time_on_gpu(source.clone)
    return {
        **result,
        "gpu": torch.cuda.get_device_name(),
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "driver": _run_text(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "product_flops": round(2 * 8192**3 / product),
        "copy_bytes_per_second": round(2 * source.numel() / copy),
    }


def _time_on_gpu(call: Callable[[], object], repeats: int = 10) -> float:
    import torch

    seconds = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return statistics.median(seconds[3:])


def _run_text(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def finetune(settings: Settings, folder: Path) -> Result:
    """Train with tuneline's stage; settings: shape, rows, length, steps, recipe, and profile.

    Tokens per second are of the steps after the first WARMUP_STEPS, with the wait for rows. Predicted memory is the
    dry run's.
    """
    from components.fine_tuning import stage
    from components.fine_tuning.config import FineTuningConfig

    base = workloads.build_model(folder, settings["shape"])
    kind, length, steps = settings["rows"], settings["length"], settings["steps"]
    recipe = {
        "max_steps": steps, "learning_rate": 1e-5, "max_length": length, "validation_rows": 0, "checkpoint_every": steps,
        "lora": {"rank": 16, "alpha": 32, "dropout": 0.0}, "packing": kind == "short",
        **settings["recipe"],
    }  # fmt: skip
    config = FineTuningConfig.model_validate({**recipe, "base_model": str(base.path)})
    count = steps * (config.batch_size or 16) * (length // 60 if kind == "short" else 1)  # no epoch ends in the profile
    data = workloads.build_dataset(folder, kind, length, min(count, 40_000))
    work = folder / "work" / settings["name"]
    sampler, profiler = UsageSampler(), _StepProfiler(settings.get("profile", False))
    usage: list[float | None] = []
    reporter = _StepReporter(
        {WARMUP_STEPS: [sampler.start], steps - 2: [profiler.start],
         steps - 1: [profiler.stop, lambda: usage.append(sampler.stop())]}
    )  # fmt: skip
    began = time.perf_counter()
    published = stage.finetune(
        data, work / "model", config, seed=0, state=work / "state", reporter=reporter, base=base, overwrite=True
    )
    seconds = time.perf_counter() - began
    summary = published.manifest.summary
    lines = [json.loads(line) for line in (work / "model" / "training.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train_loss" in line]
    tokens = [after["tokens"] - before["tokens"] for before, after in itertools.pairwise(lines)]
    measured = list(zip(lines[1:], tokens, strict=True))[WARMUP_STEPS - 1 : -2]
    rate = sum(count for _, count in measured) / sum(
        line["step_seconds"] + line["waited_seconds"] for line, _ in measured
    )
    mean_length = summary["tokens_a_pass"] / max(summary["rows"]["train"], 1)
    micro_batch_size = published.manifest.config["micro_batch_size"]
    flops, parts = _predict(base, config, rows=micro_batch_size, mean_length=mean_length, choices=summary["choices"])
    return {
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * flops / PEAK_FLOPS, 4),
        "flops_per_token": round(flops),
        "step_seconds": [round(line["step_seconds"], 4) for line in lines],
        "losses": [line["train_loss"] for line in lines],
        "tokens_per_step": tokens,
        "peak_memory": summary["peak_memory"],
        "predicted_memory": parts["total"],
        "predicted_parts": parts,
        "micro_batch_size": micro_batch_size,
        "resumed_from": summary["resumed_from"],
        "usage": usage[0] if usage else None,
        "startup": summary["startup"],
        "seconds": round(seconds, 2),
        "choices": summary["choices"],
        "profile": profiler.table(),
        "mean_row_tokens": round(mean_length, 1),
        "compilation": _list_compilation_seconds() if config.compile else None,
    }


def _list_compilation_seconds() -> dict[str, float]:
    """Return the seconds of torch.compile by phase, nested phases included, and the numbers of graphs and of breaks."""
    from torch._dynamo import utils

    seconds = {name: round(sum(values), 1) for name, values in utils.compilation_time_metrics.items()}
    counts = {"graphs": utils.counters["stats"]["unique_graphs"], "breaks": sum(utils.counters["graph_break"].values())}
    return {name: value for name, value in seconds.items() if value >= 1} | counts


def _predict(
    base: LocalBaseModel, config: FineTuningConfig, *, rows: int, mean_length: float, choices: list[str]
) -> tuple[float, dict[str, int]]:
    """Return the operations per token and the bytes by part, as the report and the dry run estimate them."""
    import torch

    from components.common.models import model_loading
    from components.fine_tuning import acceleration, training

    model_config = model_loading.load_configuration(base.path)
    shape = ModelShape.from_configuration(model_config, training.count_parameters(model_config, config))
    assert config.max_length is not None
    parts = acceleration.estimate_memory_parts(
        config, shape, rows=rows, length=config.max_length, gpu=torch.cuda.is_available(),
        checkpointing=any("activation checkpointing: on" in reason for reason in choices),
    )  # fmt: skip
    return estimate_training_flops(shape, mean_length), parts


class _StepReporter(SilentReporter):
    """Calls functions after steps of a training, by the number of the step."""

    def __init__(self, calls: dict[int, list[Callable[[], None]]]) -> None:
        self._calls = calls

    def progress(self, done: int, total: int | None = None, unit: str = "") -> None:
        if unit == "steps" and done in self._calls:
            for call in self._calls.pop(done):
                call()


class _StepProfiler:
    """Profiles one step of a training: seconds of GPU kernels by kind."""

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("flash", "fmha", "attention"),
        "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "sm90_xmma", "ampere_bf16"),
        "copies and casts": ("memcpy", "memset", "copy", "cast"),
        "optimizer": ("multi_tensor", "adam", "foreach"),
    }

    def __init__(self, active: bool) -> None:
        self._active, self._profile = active, None

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._active and torch.cuda.is_available():
            self._profile: Any = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
            self._began = time.perf_counter()

    def stop(self) -> None:
        """End the profile."""
        import torch

        if self._profile is not None:
            torch.cuda.synchronize()
            self._wall = time.perf_counter() - self._began
            self._profile.stop()

    def table(self) -> Result | None:
        """Return seconds by kind, the largest kernels, and the wall time; None without a profile."""
        if self._profile is None:
            return None
        kinds: dict[str, float] = {}
        kernels: dict[str, list[float]] = {}
        for event in self._profile.key_averages():
            seconds = event.self_device_time_total / 1e6
            if seconds <= 0:
                continue
            name = event.key.lower()
            kind = next((kind for kind, words in self.KINDS.items() if any(word in name for word in words)), "other")
            kinds[kind] = kinds.get(kind, 0.0) + seconds
            entry = kernels.setdefault(event.key[:110], [0.0, 0])
            entry[0] += seconds
            entry[1] += event.count
        largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:25]
        return {"wall": round(self._wall, 3), "kinds": kinds, "kernels": largest}


def resume(settings: Settings, folder: Path) -> Result:
    """Compare the losses of an uninterrupted training with those of one that is killed and resumed."""
    common = {key: value for key, value in settings.items() if key != "name"}
    whole = _run_child("finetune", {**common, "name": "whole"}, folder)
    again = _run_child("finetune", {**common, "name": "again"}, folder)
    state, steps = folder / "work" / "resumed" / "state", settings["steps"]
    _run_child("finetune", {**common, "name": "resumed"}, folder, kill_after=(state, steps // 2))
    resumed = _run_child("finetune", {**common, "name": "resumed"}, folder)
    pairs = {"repeated": again, "resumed": resumed}
    difference = {
        name: max(abs(a - b) for a, b in zip(whole["losses"], other["losses"], strict=True))
        for name, other in pairs.items()
    }
    if resumed["resumed_from"] != steps // 2:
        raise RuntimeError(f"the training resumed from step {resumed['resumed_from']}; expected {steps // 2}")
    return {"difference": difference, "resumed_from": steps // 2}


def _run_child(stage: str, settings: Settings, folder: Path, kill_after: tuple[Path, int] | None = None) -> Result:
    """Run a stage in a process; with `kill_after`, kill it once the checkpoint of the step is complete."""
    from components.fine_tuning import checkpoints

    result, given = folder / f"{settings['name']}.json", folder / f"{settings['name']}.settings.json"
    result.unlink(missing_ok=True)
    workloads.write_json(given, {**settings, "folder": str(folder)})
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.stages", stage, str(result), str(given)])
    if kill_after:
        state, step = kill_after
        while process.poll() is None and not list(
            state.glob(f"fine_tuning/*/checkpoint-{step}/{checkpoints.MARKER_FILENAME}")
        ):
            time.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"the training of {settings['name']} ended before it could be killed")
        process.kill()
        process.wait()
        return {}
    if process.wait():
        raise RuntimeError(f"the training of {settings['name']} failed")
    return json.loads(result.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def serve(settings: Settings, folder: Path) -> Result:
    """Compare our batched generator with plain generate; settings: shape, clients, prompt, answer."""
    import asyncio

    import torch

    from components.common.models import model_loading
    from components.common.models.model_loading import LoadableModel
    from components.triton_packaging.python_backend import cache_size, token_sampling
    from components.triton_packaging.python_backend.generation_request import GenerationRequest
    from components.triton_packaging.python_backend.token_generation import (
        BatchCapacity,
        BatchedGenerator,
        SequentialGenerator,
        TokenGenerator,
    )

    base = workloads.build_model(folder, settings["shape"])
    model = model_loading.load_model(LoadableModel(base.sha256, base, base.path, None, None))
    model.generation_config.eos_token_id = None  # every answer has its full length
    prompt, answer = settings["prompt"], settings["answer"]
    clients, free = max(settings["clients"]), None
    cache_tokens = clients * (prompt + answer)
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        token_bytes = cache_size.compute_token_bytes(model.config, model.dtype.itemsize)
        cache_tokens = cache_size.limit_to_free_memory(64 * 8192, prompt + answer, token_bytes, free)

    async def collect(generator: TokenGenerator, number: int, temperature: float = 0.0) -> list[int]:
        ids = [3 + (7 * place + 31 * number) % 8000 for place in range(prompt)]
        request = GenerationRequest(ids, answer, temperature, 0.9, 0, number, ())
        sampler = token_sampling.create_sampler(request, model.device)
        return [token async for tokens in generator.generate(request, sampler, stream=True) for token in tokens]

    async def measure() -> Result:
        loop = asyncio.get_running_loop()
        plain = SequentialGenerator(model, 0, loop)
        await collect(plain, 0)
        began = time.perf_counter()
        alone = [await collect(plain, number) for number in range(2)]
        plain_rate = 2 * answer / (time.perf_counter() - began)
        plain.close()
        torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
        batched = BatchedGenerator(model, BatchCapacity(clients, cache_tokens), loop)
        rates, sampler = {}, UsageSampler()
        try:
            for count in settings["clients"]:
                await asyncio.gather(*(collect(batched, number) for number in range(count)))
                sampler.start()
                began = time.perf_counter()
                together = await asyncio.gather(*(collect(batched, number) for number in range(count)))
                rates[count] = {
                    "tokens_per_second": round(count * answer / (time.perf_counter() - began), 1),
                    "usage": sampler.stop(),
                    "equal_tokens": [
                        next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(two))
                        for one, two in zip(together, alone, strict=False)
                    ],
                }
                began = time.perf_counter()
                await asyncio.gather(*(collect(batched, number, temperature=0.7) for number in range(count)))
                rates[count]["sampled_tokens_per_second"] = round(count * answer / (time.perf_counter() - began), 1)
        finally:
            batched.close()
        return {
            "plain_tokens_per_second": round(plain_rate, 1),
            "rates": rates,
            "ratio": {count: round(rate["tokens_per_second"] / plain_rate, 2) for count, rate in rates.items()},
            "cache_tokens": cache_tokens,
            "free_bytes_before": free,
            "peak_memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }

    with torch.inference_mode():
        return asyncio.run(measure())


def score(settings: Settings, folder: Path) -> Result:
    """Compare likelihoods of our engine with lm-eval's HFLM at several batch sizes; settings: shape, items, options."""
    import torch

    from components.common.models import model_loading
    from components.common.models.model_loading import LoadableModel
    from components.evaluation.task_interface import Continuation
    from components.evaluation.transformers_engine import TransformersEngine

    base = workloads.build_model(folder, settings["shape"])
    tokenizer = model_loading.load_tokenizer(base.path)
    model = model_loading.load_model(LoadableModel(base.sha256, base, base.path, None, None))
    texts = [row["messages"] for row in workloads.read_rows(folder).short[: settings["items"] + settings["options"]]]
    requests = [
        (f"Question: {texts[item][0]['content'][:600]}\nAnswer:", " " + texts[item + option][1]["content"][:60])
        for item in range(settings["items"])
        for option in range(settings["options"])
    ]

    def encode(context: str, answer: str) -> Continuation:
        ids, start = tokenizer.encode(context + answer), len(tokenizer.encode(context))
        return Continuation(ids, [place >= start for place in range(len(ids))])

    engine = TransformersEngine(model, tokenizer, settings["batch_tokens"])
    sampler, result = UsageSampler(), dict[str, Any]()
    for repeat in range(2):  # the first one warms up
        sampler.start()
        began = time.perf_counter()
        ours = engine.compute_likelihoods([encode(*pair) for pair in requests], SilentReporter())
        result["tuneline"] = {
            "seconds": round(time.perf_counter() - began, 3),
            "usage": sampler.stop(),
            "repeat": repeat,
        }
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    peer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=8192)
    asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(requests)]
    for batch in settings["peer_batches"]:
        peer.batch_size_per_gpu = batch
        peer.loglikelihood(asked[: 2 * batch], disable_tqdm=True)
        began = time.perf_counter()
        theirs = peer.loglikelihood(asked, disable_tqdm=True)
        result[f"lm-eval, batch {batch}"] = {"seconds": round(time.perf_counter() - began, 3)}
    best = min(value["seconds"] for name, value in result.items() if name != "tuneline")
    gaps = sorted(abs(one.logprob - float(other[0])) for one, other in zip(ours, theirs, strict=True))
    return {
        "engines": result,
        "ratio": round(best / result["tuneline"]["seconds"], 3),
        "requests": len(requests),
        "median_difference": gaps[len(gaps) // 2],
        "largest_difference": gaps[-1],
        "peak_memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def train_with_trl(settings: Settings, folder: Path) -> Result:
    """Train with a plain TRL script on the same rows; settings as for `finetune`, and options of SFTConfig."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    base = workloads.build_model(folder, settings["shape"])
    kind, length, steps, batch = settings["rows"], settings["length"], settings["steps"], settings["batch_size"]
    count = min(steps * batch * (length // 100 if kind == "short" else 1), 40_000)
    data = workloads.build_dataset(folder, kind, length, count)
    rows = Dataset.from_parquet(str(data.path / "train.parquet")).select_columns(["messages"])
    pairs = rows.map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}, remove_columns=["messages"]
    )
    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.bfloat16 if gpu else torch.float32)
    marks: list[tuple[float, int]] = []
    sampler = UsageSampler()

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Seconds and tokens after every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            marks.append((time.perf_counter(), int(state.num_input_tokens_seen)))
            if len(marks) == WARMUP_STEPS:
                sampler.start()

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / "work" / settings["name"]), max_steps=steps, learning_rate=1e-5, max_length=length,
            per_device_train_batch_size=batch, gradient_accumulation_steps=settings.get("accumulation", 1),
            packing=kind == "short", bf16=gpu, use_cpu=not gpu, report_to="none", save_strategy="no", logging_steps=1,
            include_num_input_tokens_seen="all", disable_tqdm=True, **settings["options"],
        ),
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(base.path),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    usage = sampler.stop()
    (began, before), (ended, after) = marks[WARMUP_STEPS - 1], marks[-1]
    return {
        "tokens_per_second": round((after - before) / (ended - began), 1),
        "peak_memory": torch.cuda.max_memory_allocated() if gpu else None,
        "usage": usage,
        "step_seconds": [round(b[0] - a[0], 4) for a, b in itertools.pairwise(marks)],
        "tokens_per_step": [b[1] - a[1] for a, b in itertools.pairwise(marks)],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def run_tests(settings: Settings, folder: Path) -> Result:
    """Run the tests that need a GPU. They use no fixture of the others, whose packages this machine may lack."""
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "-o", "timeout=0", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", *options, *settings["paths"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"pytest ended with exit status {done.returncode}")
    return {"summary": done.stdout.strip().splitlines()[-1]}


STAGES: dict[str, Callable[[Settings, Path], Result]] = {
    "machine": check_machine,
    "tests": run_tests,
    "finetune": finetune,
    "resume": resume,
    "serve": serve,
    "score": score,
    "trl": train_with_trl,
}


def main() -> None:
    """Run one stage and write its result."""
    stage, result, given = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    settings = json.loads(given.read_text(encoding="utf-8"))
    workloads.write_json(result, STAGES[stage](settings, Path(settings["folder"])))


if __name__ == "__main__":
    main()
