"""The page of the GPU benchmark, docs/reference/benchmarks-gpu.md, and its plot.

python -m benchmarks.gpu.page RESULTS.json… --markdown docs/reference/benchmarks-gpu.md

Several result files are runs on machines of the same kind; the last file that has a stage counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import plan, plot
from benchmarks.gpu.stages import PEAK_FLOPS, WARMUP_STEPS
from benchmarks.page import met, table_of

Results = dict[str, dict[str, Any]]
MFU_GOAL, MEMORY_GOAL, USE_GOAL, SERVING_GOAL = 0.55, 0.10, 0.70, 5.0
GB = 10**9

HEAD = """# One NVIDIA GPU, measured

`make bench-gpu` measures training, serving and scoring on one NVIDIA GPU and writes this page. It needs the packages listed in
`benchmarks/gpu/__main__.py`, and downloads nothing. The model has the shape of Llama 3 8B (`1b`: Llama 3.2 1B) and
random weights, which cost the same as trained ones. Texts are the documentation of Python's standard library: rows of
{mean:.0f} tokens on average in the packed cases, and answers concatenated into full-length rows in the others. LoRA has rank 16
on all linear layers, without dropout, in bfloat16.

Token counts exclude padding. Rates cover the steps after the first {warmup}. For tuneline, the rate is the mean,
including the wait for rows; for TRL, it is the median, which leaves out slow steps. MFU (model FLOPs utilization) counts
4(N−E) + 4·L·d·T floating-point operations per token, and 6 per trained parameter. N is the number of parameters, E that
of the input embedding, L the number of layers, d the size of the queries, and T the row length. MFU is relative to
{peak:.1f} TFLOP/s. Memory is the peak that PyTorch allocates; "predicted" is the dry run's estimate.
"""

CHANGES = """## Changes during and after measurement

- **Decoding** replays CUDA graphs: before, 16 clients received 500 tokens/s, and the GPU was in use for 39% of the time. The graphs
  end with the logits, so each request keeps its own sampler. Requests with equal settings are sampled together.
- **Attention** of long rows of equal lengths runs in cuDNN: with rows of 2,048 tokens, the forward and backward pass of 16,384
  tokens takes 2.3 ms per layer instead of 4.0 ms; with rows of 8,192 tokens, it takes 7.6 ms instead of 12.7 ms.
- **Idle time between steps**: in a trace, no kernel ran for 80 ms of each one-second step. The rows of the next step are
  now fetched while the GPU computes, and nothing waits for the GPU before the optimizer's step.
- **Memory** of attention `sdpa` was underestimated by 11%; the estimate now counts the copies that a mask requires.
- **Liger** replaces layers for a whole process. tuneline now restores them after training; previously, a later compiled run in the process failed.

Because of the time without kernels, `lora-packed` misses the goal of 55% MFU: its kernels take 0.88 s per 16,384 tokens (twice
the profiled half step), and the step takes 0.96 s. Without this gap, the MFU would be 57%. Most of the kernel time
is spent on matrix products; LoRA's small products, norms and activations are memory-bound. The first step of the compiled cases takes
73 to 88 seconds.
"""


def write_page(results: Results, path: Path, commit: str) -> None:
    """Write the page and its plot."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    has_flash_attention = machine["versions"].get("flash_attn") is not None
    parts = [
        HEAD.format(mean=results["lora-packed"]["mean_row_tokens"], warmup=WARMUP_STEPS, peak=PEAK_FLOPS / 1e12),
        f"Measured with the code of `{commit}` on one {machine['gpu']}: a bfloat16 product of 8,192³ ran at\n"
        f"{machine['product_flops'] / 1e12:.0f} TFLOP/s ({machine['product_flops'] / PEAK_FLOPS:.0%} of the peak), and a copy ran at "
        f"{machine['copy_bytes_per_second'] / 1e12:.1f} TB/s.\nPython {machine['python']}, {versions}.\n"
        f"{'' if has_flash_attention else 'The package flash-attn was not installed. '}{_list_runs(results)}\n",
        "## Goals\n\n" + _list_goals(results),
        "![tokens per second, and the time of a step by kind of kernel](images/benchmarks-gpu.svg)\n",
        CHANGES,
        "## Training\n\n" + _tabulate_training(results),
        "## Time of a step\n\nThe table shows the seconds by kind of kernel for one step under PyTorch's profiler. In the rest of the step, no kernel runs.\n\n"
        + _tabulate_profiles(results),
        "## Serving\n\n" + _describe_serving(results),
        "## Scoring\n\n" + _describe_scoring(results),
        *(["## Interruption\n\n" + _describe_resume(results["resume"])] if "resume" in results else []),
    ]
    profiles = {
        name: {**result["profile"]["kinds"], "step": result["profile"]["wall"]}
        for name, result in results.items()
        if result.get("profile")
    }
    rates = {
        name: compute_rate(result) for name, result in _list_trainings(results).items() if name not in ("dpo", "grpo")
    }
    plot.draw(rates, profiles, path.parent / "images" / "benchmarks-gpu.svg")
    path.write_text("\n".join(parts), encoding="utf-8")


def compute_rate(result: dict[str, Any]) -> float:
    """Return the tokens per second after the warm-up: tuneline's as measured, of a peer the median of its steps."""
    if "mfu" in result:
        return float(result["tokens_per_second"])
    rates = [count / second for count, second in zip(result["tokens_per_step"], result["step_seconds"], strict=True)]
    return median(rates[WARMUP_STEPS - 1 :])


def _list_runs(results: Results) -> str:
    """Return the sentences on several runs, and on stages without a result."""
    runs = sorted({result["run"] for result in results.values()})
    missing = [f"`{stage.name}`" for stage in plan.list_stages("gpu") if stage.name not in results]
    sentences = (
        ["One run."]
        if len(runs) == 1
        else [f"The results come from {len(runs)} runs on machines of this kind; compare only cases of the same run."]
    )
    if missing:
        sentences.append(f"Not measured yet: {', '.join(missing)}.")
    return " ".join(sentences)


def _list_goals(results: Results) -> str:
    mfu = {name: result["mfu"] for name, result in results.items() if "mfu" in result and name.startswith("lora")}
    best = max(mfu, key=mfu.__getitem__)
    errors = {
        name: result["predicted_memory"] / result["peak_memory"] - 1
        for name, result in _list_same_length(results).items()
    }
    worst = max(errors.values(), key=abs)
    use = min(results[name]["usage"] for name in ("lora-packed", "lora-compiled-8"))
    serving = results["serve"]
    rows = [
        ["LoRA 8B at 2,048 tokens: MFU of at least 55%", f"{mfu[best]:.1%} (`{best}`)", met(mfu[best] >= MFU_GOAL)],
        ["predicted memory within 10%", f"largest error {worst:+.1%} of {len(errors)} recipes", met(abs(worst) <= MEMORY_GOAL)],
        ["GPU in use for 70% of the time: training", f"{use:.0%}", met(use >= USE_GOAL)],
        ["GPU in use for 70% of the time: serving, 16 clients", f"{serving['rates']['16']['usage']:.0%}", met(serving["rates"]["16"]["usage"] >= USE_GOAL)],
        ["serving at 16 clients: 5 × plain generate", f"{serving['ratio']['16']:.1f} ×", met(serving["ratio"]["16"] >= SERVING_GOAL)],
    ]  # fmt: skip
    return table_of(["goal", "measured", ""], rows)


def _list_same_length(results: Results) -> Results:
    """Return the trainings whose rows have the length that the estimate assumes."""
    return {name: result for name, result in results.items() if name.startswith(("lora", "qlora", "full"))}


def _list_trainings(results: Results) -> Results:
    """Return the trainings of tuneline and of TRL."""
    return {name: result for name, result in results.items() if "tokens_per_step" in result}


def _tabulate_training(results: Results) -> str:
    rows = []
    for name, result in _list_trainings(results).items():
        rate = compute_rate(result)
        # No formula covers DPO's reference passes, GRPO's generation and short rows.
        has_formula = name in _list_same_length(results)
        mfu = f"{result['mfu']:.1%}" if has_formula else ""
        predicted = f"{result['predicted_memory'] / GB:.1f}" if has_formula else ""
        rows.append(
            [
                f"`{name}`",
                str(result["run"]),
                result["about"],
                f"{rate:,.0f}",
                mfu,
                f"{result['peak_memory'] / GB:.1f}",
                predicted,
            ]
        )
    table = table_of(["case", "run", "", "tokens/s", "MFU", "peak GB", "predicted GB"], rows)
    full, packed = (
        compute_rate(results[ours]) / compute_rate(results[theirs])
        for ours, theirs in (("lora", "trl-liger"), ("lora-packed", "trl-packed"))
    )
    ratios = f"Compared with plain TRL in the same run: {full:.2f} × with rows of full length, {packed:.2f} × with packed rows."
    if results["machine"]["versions"].get("flash_attn") is None:
        ratios += "\nWithout flash-attn, transformers separates packed rows by a mask. TRL inherits this mask; tuneline's `varlen` avoids it."
    return f"{table}\n{ratios}\n"


def _tabulate_profiles(results: Results) -> str:
    kinds = ["matrix products", "attention", "copies and casts", "optimizer", "other"]
    rows = []
    for name, result in results.items():
        if profile := result.get("profile"):
            seconds = [*(profile["kinds"].get(kind, 0.0) for kind in kinds), profile["wall"]]
            rows.append([f"`{name}`", f"{result['tokens_per_step'][-2]:,.0f}", *(f"{part:.3f}" for part in seconds)])
    return table_of(["case", "tokens", *kinds, "step"], rows)


def _describe_serving(results: Results) -> str:
    serving = results["serve"]
    rows = [
        [
            clients,
            f"{rate['tokens_per_second']:,.0f}",
            f"{serving['ratio'][clients]:.1f} ×",
            f"{rate['usage']:.0%}",
            f"{rate['sampled_tokens_per_second']:,.0f}",
        ]
        for clients, rate in serving["rates"].items()
    ]
    return (
        "The table compares the python backend's generator with transformers' `generate`, which answers one request at a time at\n"
        f"{serving['plain_tokens_per_second']:.0f} tokens/s. Prompts have 256 tokens, answers 128; both run in one process\n"
        f"without Triton. The cache holds {serving['cache_tokens']:,} tokens, half of the "
        f"{serving['free_bytes_before'] / GB:.0f} GB that the weights leave free.\n\n"
        + table_of(["clients", "tokens/s", "÷ generate", "GPU use", "sampled tokens/s"], rows)
        + '\nThe column "sampled tokens/s" uses temperature 0.7, top_p 0.9 and a separate seed per request.\n'
        "In these runs, the CPU listed the positions of cached tokens between steps. This listing took 2 of 14 ms with 16 clients and\n"
        "6 of 26 ms with 64. Now numpy computes these positions: for 64\n"
        "requests of 2,000 tokens, in 0.5 ms instead of 31 ms on one core of another machine.\n"
    )


def _describe_scoring(results: Results) -> str:
    score = results["score"]
    rows = [[name, f"{engine['seconds']:.3f}"] for name, engine in score["engines"].items()]
    return (
        f"The benchmark computes {score['requests']:,} likelihoods, of four continuations per question, with the 8B model in bfloat16. "
        "With the same loaded model, tuneline is\n"
        f"{score['ratio']:.2f} × as fast as lm-eval's HFLM at its best batch size; the run took less than a second. The\n"
        f"log-likelihoods differ by {score['median_difference']:.2f} nats in the median; neither system was compared with float32.\n\n"
        + table_of(["engine", "seconds"], rows)
    )


def _describe_resume(resume: dict[str, Any]) -> str:
    found = resume["difference"]
    return (
        f"SIGKILL ended a LoRA training of the 1B shape after the checkpoint of step {resume['resumed_from']} of 6, from which it resumed.\n"
        f"Its losses differ from those of an uninterrupted run by at most {found['resumed']:.1e} nats. Two uninterrupted\n"
        f"runs differ by {found['repeated']:.1e}: FlashAttention's backward pass accumulates gradients in a nondeterministic order.\n"
    )


def main() -> None:
    """Merge the results and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="Files results.json of one or more runs.")
    parser.add_argument("--markdown", type=Path, required=True, metavar="FILE", help="Page to write.")
    parser.add_argument("--commit", required=True, help="Commit of the measured code.")
    args = parser.parse_args()
    merged: Results = {}
    for run, file in enumerate(args.results, start=1):
        found = json.loads(file.read_text(encoding="utf-8"))
        merged |= {name: {**result, "run": run} for name, result in found.items() if "error" not in result}
    write_page(merged, args.markdown, args.commit)


if __name__ == "__main__":
    main()
