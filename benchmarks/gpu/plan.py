"""The stages of the GPU benchmark with their settings and time limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stage:
    """A stage: its name, the function of `benchmarks.gpu.stages`, its settings, a description and its limit."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    limit_seconds: float = 180


def list_stages(scale: str) -> list[Stage]:
    """Return all stages, in their order."""
    tiny = scale == "tiny"
    large, small = ("tiny", "tiny") if tiny else ("8b", "1b")
    short, long = (128, 256) if tiny else (2048, 8192)
    steps = 6 if tiny else 10

    def tune(name: str, about: str, rows: str, length: int, micro: int, *, shape: str = large, **recipe: Any) -> Stage:
        profile = recipe.pop("profile", False)
        given = {"micro_batch_size": micro, "batch_size": micro, **recipe}
        settings = {"shape": shape, "rows": rows, "length": length, "steps": steps, "recipe": given, "profile": profile}
        return Stage(name, "finetune", settings, about, limit_seconds=300)

    compiled = {} if tiny else {"compile": True}
    return [
        Stage("machine", "machine"),
        Stage("tests", "tests", {"paths": [
            "tests/fine_tuning/test_varlen_attention.py", "tests/fine_tuning/test_gpu_training.py",
            "tests/triton_packaging/test_gpu_attention.py",
        ]}, limit_seconds=600),
        tune("lora", "4 rows of full length, Liger's layers", "long", short, 4, profile=True),
        tune("lora-compiled", "4 rows of full length, compiled layers", "long", short, 4, **compiled),
        tune("lora-compiled-8", "8 rows of full length, compiled layers", "long", short, 8, profile=True, **compiled),
        tune("lora-packed", "8 packed rows, compiled layers", "short", short, 8, profile=True, **compiled),
        tune("lora-8k", "1 row of 8,192 tokens, compiled layers", "long", long, 1, **compiled),
        tune("lora-recomputed", "8 rows, recomputed activations, compiled layers", "long", short, 8, activation_checkpointing="on", **compiled),
        tune("lora-sdpa", "4 rows, attention sdpa, Liger's layers", "long", short, 4, attention="sdpa"),
        tune("lora-unfused", "4 rows, neither Liger nor compilation", "long", short, 4, fused_kernels="off"),
        Stage(
            "trl", "trl",
            {"shape": large, "rows": "long", "length": short, "steps": steps, "batch_size": 4,
             "options": {"gradient_checkpointing": False}},
            "plain TRL: 4 rows of full length",
        ),
        Stage(
            "trl-liger", "trl",
            {"shape": large, "rows": "long", "length": short, "steps": steps, "batch_size": 4,
             "options": {"gradient_checkpointing": False, "use_liger_kernel": not tiny}},
            "plain TRL: 4 rows of full length, Liger's layers",
        ),
        Stage(
            "trl-packed", "trl",
            {"shape": large, "rows": "short", "length": short, "steps": steps, "batch_size": 4,
             "options": {"gradient_checkpointing": False, "use_liger_kernel": not tiny}},
            "plain TRL: 4 packed rows, Liger's layers",
        ),
        tune("full-1b", "1B, all weights, compiled layers", "long", short, 4, shape=small, adaptation="full", **compiled),
        *([] if tiny else [tune("qlora-8b", "4 rows of full length, 4-bit weights, Liger's layers", "long", short, 4, adaptation="qlora")]),
        Stage("dpo", "finetune", {
            "shape": small, "rows": "pairs", "length": 512 if not tiny else 128, "steps": steps,
            "recipe": {"objective": "dpo", "packing": False, "micro_batch_size": 4, "batch_size": 4},
        }, "1B, DPO, 4 pairs of short rows, Liger's layers"),
        Stage("grpo", "finetune", {
            "shape": small, "rows": "short", "length": 512 if not tiny else 128, "steps": steps,
            "recipe": {"objective": "grpo", "packing": False, "micro_batch_size": 32 if not tiny else 4,
                       "batch_size": 32 if not tiny else 4,
                       "grpo": {"rewards": [{"kind": "length", "max_words": 3 if tiny else 25}], "answers_per_prompt": 8 if not tiny else 2,
                                "max_answer_tokens": 128 if not tiny else 16}},
        }, "1B, GRPO, 8 answers to each of 4 prompts, up to 128 tokens each", limit_seconds=300),
        Stage("resume", "resume", {
            "shape": small, "rows": "long", "length": short, "steps": 6,
            "recipe": {"micro_batch_size": 2, "batch_size": 4, "checkpoint_every": 3},
        }),
        Stage("serve", "serve", {
            "shape": large, "clients": [1, 4] if tiny else [1, 16, 64], "prompt": 16 if tiny else 256,
            "answer": 8 if tiny else 128,
        }),
        Stage("score", "score", {
            "shape": large, "items": 4 if tiny else 512, "options": 4, "batch_tokens": 512 if tiny else 16_384,
            "peer_batches": [4] if tiny else [16, 32, 64, 128],
        }),
    ]  # fmt: skip
