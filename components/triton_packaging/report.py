"""report.html of a package: proof, quantization, golden prompts, usage and files."""

from __future__ import annotations

from pathlib import Path

from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import QUANTIZATIONS
from components.common.reporting import html_report
from components.triton_packaging.backends import list_model_names
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.quantization import QuantizationResult
from components.triton_packaging.serving_proof import Proof


def render(
    model: LoadableModel,
    output: Path,
    config: TritonPackagingConfig,
    proof: Proof | None,
    unproven: str | None,
    quantized: QuantizationResult | None = None,
) -> str:
    """Return the HTML page of a written package that is not published yet.

    Args:
        output: folder of the package.
        proof: result of the proof; None for an unproven package.
        unproven: reason why the package is not proven; None for a proven package.
        quantized: comparison with the unquantized model; None without quantization.
    """
    section = html_report.render_paragraph(
        f"Not proven: {unproven}. Promotion of an unproven package requires --force and --reason.", "bad"
    )
    answers = ""
    if proof:
        text = (
            "A Triton server loaded this package. The package's greedy answers match the answers of transformers with the "
            f"{'same quantized weights' if quantized else 'unpackaged model'}. The comparison covers complete and streamed "
            "answers, with one client and with eight concurrent clients."
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
    note = ""
    if config.backend == "vllm":
        note = html_report.render_paragraph(
            "Requests select an attached adapter with lora_name. Without lora_name, no attached adapter is used."
        )
    sections = {}
    if quantized:
        tiles = {
            "format": quantized.scheme,
            "loss, nats per token": round(quantized.loss, 4),
            "unquantized loss": round(quantized.unquantized_loss, 4),
            "MB of weights": round(quantized.weight_bytes / 1e6, 1),
            "MB unquantized": round(quantized.unquantized_weight_bytes / 1e6, 1),
        }
        text = (
            f"On {quantized.items} test rows, quantization changes the loss by {quantized.increase:+.4f} nats per token "
            f"(95% confidence interval {quantized.ci95[0]:+.4f} to {quantized.ci95[1]:+.4f}). With "
            f"{quantized.confidence:.0%} confidence, the increase is at most {quantized.increase_bound:+.4f}; "
            f"{quantized.margin:.4f} is allowed."
        )
        if hardware := QUANTIZATIONS[quantized.scheme].hardware:
            text += f" According to the documentation of vLLM 0.32, the format is supported on {hardware}."
        if found := quantized.calibration:
            text += (
                f" {found['engine']} calibrated the weights on {found['rows']} training rows with {found['tokens']} tokens; "
                f"digest of the rows: {str(found['sha256'])[:12]}."
            )
        sections["Quantization"] = html_report.render_tiles(tiles) + html_report.render_paragraph(text, "good")
    folders = [output / name for name in list_model_names(config.backend, config.model_name)]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    file_rows = [[path.relative_to(output).as_posix(), path.stat().st_size] for path in files]
    return html_report.render_page(
        f"Triton package {config.model_name}",
        f"Model {model.sha256[:12]}, base model {model.base.uri}",
        {
            "Proof": section,
            **sections,
            "Golden prompts": answers,
            "Usage": f"<pre>tuneline serve REPOSITORY</pre>{note}",
            "Files": html_report.render_table(["file", "bytes"], file_rows),
        },
    )
