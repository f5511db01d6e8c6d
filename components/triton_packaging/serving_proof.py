"""Proof of a package: a real Triton server loads it, and its answers to golden prompts match those of transformers.

The prompts are sent over every protocol of the backend, by one client and by several concurrent clients. A package for
the vLLM backend is tested with each of its adapters and without an adapter.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.models import calibrated_weights, chat_templates, model_loading
from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import find_quantization
from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.triton_packaging import quantization
from components.triton_packaging.adapter_placement import AdapterPlacement
from components.triton_packaging.backends import BACKENDS, list_model_names
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.golden_requests import (
    PROTOCOLS,
    ProofError,
    ReferenceAnswer,
    ServerAnswer,
    describe_adapter,
    strip_incomplete_character,
)
from components.triton_packaging.package_contents import WEIGHTS_FOLDER
from components.triton_packaging.triton_server import Server, get_child_pids, get_resident_mib, running_server

if TYPE_CHECKING:
    import torch

AnswerRecord = dict[str, str | int]
# Integer inputs turn float noise of 1e-7 into a step of rounding: with the first golden prompts, SmolLM2's logits differed
# by up to 1.5e-2 (a tiny model's by a standard deviation of 6e-4). Each of two logits can move by that much.
INT8_TIE_LOGITS = 2 * 1.5e-2
# FP8 inputs have larger steps: with 328 tokens of a random model with two layers, log-probabilities of vLLM 0.32 on a CPU
# differed from transformers' by up to 0.20 (mean 0.003), although all greedy tokens were equal.
FP8_TIE_LOGITS = 2 * 0.2
TIMINGS = ("ready_seconds", "tokens_per_second", "memory_mib")  # differ between two proofs of one package


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        tokens_per_second: throughput by number of clients; not a benchmark, because requests are short.
        memory_mib: resident memory of the server and of its stubs after the requests.
        answers: for each golden prompt, the answer of transformers and the match: "exact" or "rounding".
    """

    server_version: str
    ready_seconds: float
    golden_prompts: int
    matched: int
    tokens_per_second: dict[str, float]
    memory_mib: dict[str, int]
    dtype: str
    answers: list[AnswerRecord]

    def build_summary(self) -> dict[str, object]:
        """Return all fields except `answers` and `dtype`, for the manifest's summary."""
        return {key: value for key, value in asdict(self).items() if key not in ("answers", "dtype")}

    def build_statement(self) -> dict[str, object]:
        """Return all fields except the timings, for proof.json, which is part of the package's identity."""
        return {key: value for key, value in asdict(self).items() if key not in TIMINGS}


def models_by_adapter(model: LoadableModel, placement: AdapterPlacement, backend: str) -> dict[str, LoadableModel]:
    """Return the models that a package serves, by adapter name; "" for requests without an adapter."""
    if not BACKENDS[backend].has_multiple_adapters or not placement.adapters:
        return {"": model}
    base = LoadableModel(model.base.sha256, model.base, model.base.path, None, None)
    return {"": base, **placement.adapters}


def prove(
    originals: Mapping[str, LoadableModel],
    repository: Path,
    config: TritonPackagingConfig,
    dtype: str,
    *,
    seed: int,
    log: Path,
    reporter: Reporter,
) -> Proof:
    """Compare the package's answers with those of the original models.

    Args:
        originals: the models by adapter name, as `models_by_adapter` returns them.
        repository: the written package.
        dtype: data type of merged weights and of GPU computation: float32 or bfloat16.
        log: file for the server's output.

    Raises:
        ProofError: an answer differs.
        ModelLoadError: the server does not load the package.
        EngineMissingError: the server cannot run, or exits.
    """
    reporter.step("querying the model before packaging")
    references = [
        replace(reference, adapter=name)
        for name, model in originals.items()
        for reference in generate_references(
            model, config, dtype, seed, reporter, weights=repository / config.model_name / "1" / WEIGHTS_FOLDER
        )
    ]
    _release_gpu_memory()
    reporter.step("loading the package in Triton")
    with running_server(
        repository,
        models=list_model_names(config.backend, config.model_name),
        log=log,
        ready_timeout=config.ready_timeout_seconds,
        reporter=reporter,
    ) as server:
        speeds = {}
        for clients in (1, 8):
            reporter.step(f"querying Triton with {format_count(clients, 'concurrent request')}")
            answers, speeds[str(clients)] = _request_all(server, config, references, clients, reporter)
        memory = {
            "server": get_resident_mib(server.pid),
            "stubs": sum(map(get_resident_mib, get_child_pids(server.pid))),
        }
    return Proof(
        server.version, round(server.ready_seconds, 1), len(references), len(answers), speeds, memory, dtype, answers
    )


def _release_gpu_memory() -> None:
    """Return the memory of the original models to the GPU: vLLM reserves a share of the whole memory at its start."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate_references(
    model: LoadableModel,
    config: TritonPackagingConfig,
    dtype: str,
    seed: int,
    reporter: Reporter,
    weights: Path | None = None,
) -> list[ReferenceAnswer]:
    """Return greedy answers of transformers to the golden prompts, with the adapter attached instead of merged.

    For a quantized package, the model's weights are rounded in the same way, with the adapter merged. Calibrated weights are
    those of the package.

    Args:
        dtype: data type of GPU computation: float32 or bfloat16; a CPU computes in float32.
        weights: folder of the package's weights; required for calibrated weights.
    """
    import torch

    from components.triton_packaging.python_backend.int8_layers import pack_int8_layers

    device = model_loading.prepare_torch(seed)
    torch_dtype = getattr(torch, dtype) if device.type == "cuda" else torch.float32
    tie_logits = -1.0
    entry = find_quantization(config.quantization)
    if entry is None:
        original = model_loading.load_model(model, dtype=torch_dtype).to(device)
    elif entry.is_calibrated:
        assert weights, "the proof passes the folder of the package's weights"
        original = calibrated_weights.load_quantized_model(weights)
    else:
        original = quantization.load_quantized_model(model, config.quantization).to(device, torch_dtype)
        if config.quantization == "int8" and device.type == "cpu":
            tie_logits = INT8_TIE_LOGITS if pack_int8_layers(original) else -1.0
        elif config.quantization == "fp8":
            tie_logits = FP8_TIE_LOGITS
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    bos = tokenizer.bos_token or ""
    adds_bos = bool(bos) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    references = []
    for done, prompt in enumerate(config.golden_prompts, 1):
        messages = [{"role": "user", "content": prompt}]
        ids = torch.tensor([chat_templates.encode_prompt(tokenizer, messages)], device=original.device)
        with torch.inference_mode():
            output = original.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=config.golden_max_tokens,
                pad_token_id=tokenizer.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = output.sequences[0, ids.shape[1] :]
        prefixes = [tokenizer.decode(tokens[:count], skip_special_tokens=True) for count in range(len(tokens) + 1)]
        ties = [
            (dtype == "bfloat16" and is_rounding_tie(logits[0])) or is_input_tie(logits[0], tie_logits)
            for logits in output.logits
        ]
        rendered = chat_templates.render_conversation(tokenizer, messages, prompt=True)
        if adds_bos:  # the vLLM backend adds the BOS token when it tokenizes the rendered prompt
            rendered = rendered.removeprefix(bos)
        references.append(ReferenceAnswer(prompt, ids.shape[1], prefixes[-1], prefixes, ties, rendered))
        reporter.progress(done, len(config.golden_prompts), "prompts")
    return references


def is_rounding_tie(logits: torch.Tensor) -> bool:
    """Return whether bfloat16 rounding can swap the two highest logits.

    The error of a product of bfloat16 numbers is at most their spacing, 2^-7 of the value. Merged and unmerged weights
    are each rounded once, so logits that differ by more than twice the spacing keep their order.

    Args:
        logits: the logits of one token, (vocabulary,).
    """
    import torch

    best, second = (float(value) for value in torch.topk(logits.float(), 2).values)
    spacing = float(torch.finfo(torch.bfloat16).eps)
    return best - second <= 2 * spacing * max(abs(best), abs(second))


def is_input_tie(logits: torch.Tensor, tie_logits: float) -> bool:
    """Return whether the rounding of quantized layers' inputs can swap the two highest logits.

    Args:
        logits: the logits of one token, (vocabulary,).
        tie_logits: largest change of a difference of two logits by this rounding; -1 if inputs are not rounded.
    """
    import torch

    best, second = (float(value) for value in torch.topk(logits.float(), 2).values)
    return best - second <= tie_logits


def _request_all(
    server: Server,
    config: TritonPackagingConfig,
    references: Sequence[ReferenceAnswer],
    clients: int,
    reporter: Reporter,
) -> tuple[list[AnswerRecord], float]:
    """Send every prompt over every protocol from `clients` threads; return answers and tokens per second."""
    protocols = PROTOCOLS[config.backend]
    requests = [(reference, protocol) for reference in references for protocol in protocols]
    matches: dict[tuple[str, str], str] = {}
    tokens, began = 0, time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = pool.map(lambda request: protocols[request[1]](server, config, request[0]), requests)
        for done, ((reference, protocol), answer) in enumerate(zip(requests, answers, strict=True), 1):
            key = (reference.adapter, reference.prompt)
            matches[key] = max(matches.get(key, ""), match_answer(reference, protocol, answer))
            tokens += answer.completion_tokens
            reporter.progress(done, len(requests), "requests")
    seconds = time.monotonic() - began
    records: list[AnswerRecord] = [
        {
            "prompt": reference.prompt,
            "text": reference.text,
            "prompt_tokens": reference.prompt_tokens,
            "match": matches[reference.adapter, reference.prompt],
            **({"adapter": reference.adapter} if reference.adapter else {}),
            **({"rendered": reference.rendered} if config.backend == "vllm" else {}),
        }
        for reference in references
    ]
    return records, round(tokens / seconds, 1)


def match_answer(reference: ReferenceAnswer, protocol: str, answer: ServerAnswer) -> str:
    """Return "exact", or "rounding" if the answer first differs from the reference at a rounding tie.

    Args:
        protocol: name of the protocol, for the error message.

    Raises:
        ProofError: the answer differs at another token, or the prompt's number of tokens differs.
    """
    has_same_prompt = answer.prompt_tokens == reference.prompt_tokens
    if has_same_prompt and strip_incomplete_character(answer.text) == strip_incomplete_character(reference.text):
        return "exact"
    shared = max(count for count, prefix in enumerate(reference.prefixes) if answer.text.startswith(prefix))
    if has_same_prompt and shared < len(reference.rounding_ties) and reference.rounding_ties[shared]:
        return "rounding"
    raise ProofError(
        f"Triton's answer over {protocol}{describe_adapter(reference)} differs from the answer of transformers.\n"
        f"  prompt:       {reference.prompt!r} "
        f"({reference.prompt_tokens} tokens; Triton counted {answer.prompt_tokens})\n"
        f"  transformers: {reference.text!r}\n  Triton:       {answer.text!r}",
        hint="Package the model again with TUNELINE_THREADS=1, or compare the chat template and the "
        "generation settings in weights/ with those of the model.",
    )
