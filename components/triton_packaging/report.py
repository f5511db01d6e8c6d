"""report.html of a package: what it holds, how it was proven, how to talk to it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from components.common import report
from components.common.models import Model
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.pbtxt import stream_name
from components.triton_packaging.proof import Proof


def render(model: Model, output: Path, config: TritonPackagingConfig, proven: Proof | None, unproven: str | None) -> str:
    """The page for a written, not yet published package."""
    return report.page(
        f"Triton package {config.model_name}",
        f"From the model {model.sha256[:12]}, base {model.base.uri}",
        {
            "Proof": _proof(proven, unproven),
            "Golden prompts": _answers(proven),
            "Talk to it": _usage(config),
            "Files": _files(output, config),
        },
    )


def _proof(proven: Proof | None, unproven: str | None) -> str:
    if proven is None:
        return report.paragraph(f"Not proven: {unproven}. An unproven package cannot be promoted.", "bad")
    told = (
        "A Triton server loaded this package, and its greedy answers over HTTP and gRPC are those of transformers before packaging: "
        "whole and streamed, to one client and to eight at once."
    )
    figures = {
        "Triton": proven.server_version,
        "seconds to ready": proven.ready_seconds,
        "golden prompts": proven.golden_prompts,
        "matched": proven.matched,
        **{f"tokens/s, {clients} client{'s' * (clients != '1')}": speed for clients, speed in proven.tokens_per_second.items()},
        **{f"MiB, {who}": mib for who, mib in proven.memory_mib.items()},
        "arithmetic": proven.dtype,
    }
    return report.tiles(figures) + report.paragraph(told, "good")


def _answers(proven: Proof | None) -> str:
    if proven is None:
        return ""
    rows = [[answer["prompt"], answer["text"], answer["prompt_tokens"], answer["match"]] for answer in proven.answers]
    return report.table(["prompt", "answer", "prompt tokens", "match"], rows)


def _usage(config: TritonPackagingConfig) -> str:
    body = json.dumps({"text_input": config.golden_prompts[0], "max_tokens": 64}, ensure_ascii=False).replace("'", "'\\''")
    if config.backend == "vllm":
        return _vllm_usage(config)
    lines = ["tuneline serve REPOSITORY", f"curl -d '{body}' http://127.0.0.1:8000/v2/models/{config.model_name}/generate"]
    lines.append(f"curl -N -d '{body}' http://127.0.0.1:8000/v2/models/{stream_name(config.model_name)}/generate_stream")
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _vllm_usage(config: TritonPackagingConfig) -> str:
    """The vLLM backend takes text as it is: whoever asks writes the chat template's marks."""
    body = {"text_input": "TEXT IN THE MODEL'S CHAT TEMPLATE", "exclude_input_in_output": True}
    asked = json.dumps({**body, "parameters": {"temperature": 0, "max_tokens": 64, "lora_name": "NAME"}}).replace("'", "'\\''")
    lines = ["tuneline serve REPOSITORY", f"curl -d '{asked}' http://127.0.0.1:8000/v2/models/{config.model_name}/generate"]
    return f"<pre>{escape(chr(10).join(lines))}</pre>" + report.paragraph("Without lora_name the base model answers.")


def _files(output: Path, config: TritonPackagingConfig) -> str:
    folders = [output / config.model_name, output / stream_name(config.model_name)]
    files = sorted(p for folder in folders for p in folder.rglob("*") if p.is_file())
    return report.table(["file", "bytes"], [[p.relative_to(output).as_posix(), p.stat().st_size] for p in files])
