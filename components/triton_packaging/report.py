"""report.html of a package: proof, golden prompts, usage and files."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from components.common.models.model_loading import LoadableModel
from components.common.reporting import html_report
from components.triton_packaging.backends import list_model_names
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.serving_proof import Proof
from components.triton_packaging.triton_config import stream_model_name


def render(
    model: LoadableModel, output: Path, config: TritonPackagingConfig, proof: Proof | None, unproven: str | None
) -> str:
    """Return the HTML page of a written package that is not published yet.

    Args:
        output: folder of the package.
        proof: result of the proof; None for an unproven package.
        unproven: reason why the package is not proven; None for a proven package.
    """
    section = html_report.render_paragraph(f"Not proven: {unproven}. An unproven package cannot be promoted.", "bad")
    answers = ""
    if proof:
        text = (
            "A Triton server loaded this package. Its greedy answers match those of transformers before packaging, "
            "complete and streamed, with one client and with eight concurrent clients."
        )
        figures = {
            "Triton": proof.server_version,
            "seconds to ready": proof.ready_seconds,
            "golden prompts": proof.golden_prompts,
            "matched": proof.matched,
            **{
                f"tokens/s, {clients} client{'s' * (clients != '1')}": speed
                for clients, speed in proof.tokens_per_second.items()
            },
            **{f"MiB, {name}": mib for name, mib in proof.memory_mib.items()},
            "dtype": proof.dtype,
        }
        section = html_report.render_tiles(figures) + html_report.render_paragraph(text, "good")
        rows = [
            [answer["prompt"], answer["text"], answer["prompt_tokens"], answer["match"]] for answer in proof.answers
        ]
        answers = html_report.render_table(["prompt", "answer", "prompt tokens", "match"], rows)
    calls, note = [("", f"{config.model_name}/generate")], ""
    if config.backend == "vllm":  # the vLLM backend expects raw text, so the client renders the chat template
        body: dict[str, object] = {
            "text_input": "TEXT IN THE MODEL'S CHAT TEMPLATE",
            "exclude_input_in_output": True,
            "parameters": {"temperature": 0, "max_tokens": 64, "lora_name": "NAME"},
        }
        note = html_report.render_paragraph("The base model answers requests without lora_name.")
    else:
        body = {"text_input": config.golden_prompts[0], "max_tokens": 64}
        calls.append(("-N ", f"{stream_model_name(config.model_name)}/generate_stream"))
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    curl = [f"curl {options}-d '{data}' http://127.0.0.1:8000/v2/models/{path}" for options, path in calls]
    usage = escape("\n".join(["tuneline serve REPOSITORY", *curl]))
    folders = [output / name for name in list_model_names(config.backend, config.model_name)]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    file_rows = [[path.relative_to(output).as_posix(), path.stat().st_size] for path in files]
    return html_report.render_page(
        f"Triton package {config.model_name}",
        f"Model {model.sha256[:12]}, base model {model.base.uri}",
        {
            "Proof": section,
            "Golden prompts": answers,
            "Usage": f"<pre>{usage}</pre>{note}",
            "Files": html_report.render_table(["file", "bytes"], file_rows),
        },
    )
