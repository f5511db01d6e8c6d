"""The proof: a real Triton server loads the package and answers golden prompts as transformers does from the model before packaging.

They are asked over HTTP, over gRPC and streamed, by one client and by several at once. A package for the vLLM backend is asked with each of
its adapters and without one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from components.common import chat, models
from components.common.models import Model
from components.common.progress import Reporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.form import Form
from components.triton_packaging.pbtxt import stream_name
from components.triton_packaging.protocols import PROTOCOLS, Answer, ProofError, Reference, said, with_adapter
from components.triton_packaging.server import Server, children, memory, running_server

CLIENTS = (1, 8)


@dataclass(frozen=True)
class Proof:
    """What was proven. `answers` holds, for each golden prompt, the common answer and how it matched: "exact" or "rounding".

    `tokens_per_second` has a figure for each number of clients. They are few and short requests: a sign of life, no benchmark.
    `memory_mib` is what the server and its stubs hold after them.
    """

    server_version: str
    ready_seconds: float
    golden_prompts: int
    matched: int
    tokens_per_second: dict[str, float]
    memory_mib: dict[str, int]
    dtype: str
    answers: list[dict[str, Any]]

    def figures(self) -> dict[str, Any]:
        """The figures of the manifest's summary."""
        return {key: value for key, value in asdict(self).items() if key not in ("answers", "dtype")}


def served(model: Model, form: Form, backend: str) -> dict[str, Model]:
    """The models a package answers as, by the adapter a request names; "" where it names none. Only vLLM's requests name one."""
    if backend != "vllm" or not form.adapters:
        return {"": model}
    base = Model(model.base.sha256, model.base, model.base.path, None, None)
    return {"": base, **form.adapters}


def prove(
    originals: Mapping[str, Model], repository: Path, config: TritonPackagingConfig, dtype: str, *, seed: int, log: Path, reporter: Reporter
) -> Proof:
    """Compare what is packaged with the originals, which are named as `served` names them. Raises ProofError for the first answer that
    differs, ModelLoadError and EngineMissingError when the server does not come that far."""
    reporter.step("asking the model before packaging")
    references = [
        replace(reference, adapter=name)
        for name, model in originals.items()
        for reference in answer_before(model, config, dtype, seed, reporter)
    ]
    reporter.step("loading the package in Triton")
    names = [config.model_name] if config.backend == "vllm" else [config.model_name, stream_name(config.model_name)]
    with running_server(repository, models=names, log=log, ready_timeout=config.ready_timeout_seconds, reporter=reporter) as server:
        reporter.step("asking Triton")
        speeds = {}
        for clients in CLIENTS:
            answers, speeds[str(clients)] = _ask_all(server, config, references, clients, reporter)
        used = {"server": memory(server.pid), "stubs": sum(map(memory, children(server.pid)))}
    return Proof(server.version, round(server.ready_seconds, 1), len(references), len(answers), speeds, used, dtype, answers)


def answer_before(model: Model, config: TritonPackagingConfig, dtype: str, seed: int, reporter: Reporter) -> list[Reference]:
    """The golden prompts' greedy answers by transformers, from base weights with the adapter attached, not merged."""
    import torch

    device = models.prepare_torch(seed)
    original = models.load(model, dtype=getattr(torch, dtype) if device.type == "cuda" else torch.float32).to(device)
    tokenizer = models.load_tokenizer(model.tokenizer)
    references = []
    for done, prompt in enumerate(config.golden_prompts, 1):
        references.append(_reference(original, tokenizer, prompt, config.golden_max_tokens, rounding=dtype == "bfloat16"))
        reporter.progress(done, len(config.golden_prompts), "prompts")
    del original
    gc.collect()
    return references


def _reference(model: Any, tokenizer: Any, prompt: str, max_tokens: int, *, rounding: bool) -> Reference:
    import torch

    messages = [{"role": "user", "content": prompt}]
    ids = torch.tensor([chat.encode_prompt(tokenizer, messages)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None, top_k=None,
            max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    tokens = out.sequences[0, ids.shape[1] :]
    prefixes = [tokenizer.decode(tokens[:k], skip_special_tokens=True) for k in range(len(tokens) + 1)]
    close = [rounding and is_close(logits[0]) for logits in out.logits]
    rendered = as_raw_text(tokenizer, chat.render(tokenizer, messages, prompt=True))
    return Reference(prompt, ids.shape[1], prefixes[-1], prefixes, close, rendered)


def as_raw_text(tokenizer: Any, rendered: str) -> str:
    """A prompt of the chat template for a server that takes text as it is and adds the mark of its beginning itself."""
    mark = tokenizer.bos_token or ""
    adds = mark and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return rendered.removeprefix(mark) if adds else rendered


def is_close(logits: Any) -> bool:
    """Whether the two best logits are nearer than bfloat16 tells apart.

    A product of bfloat16 numbers is off by up to its spacing, 2^-7 of the value; merged and unmerged weights are each rounded once, so
    twice that separates logits that rounding cannot swap.
    """
    import torch

    best, second = (float(value) for value in torch.topk(logits.float(), 2).values)
    spacing = float(torch.finfo(torch.bfloat16).eps)
    return best - second <= 2 * spacing * max(abs(best), abs(second))


def _ask_all(
    server: Server, config: TritonPackagingConfig, references: Sequence[Reference], clients: int, reporter: Reporter
) -> tuple[list[dict[str, Any]], float]:
    """Every prompt over every protocol, so many at a time. What was answered, and how many tokens came in a second."""
    protocols = PROTOCOLS[config.backend]
    asked = [(reference, over) for reference in references for over in protocols]
    matches: dict[tuple[str, str], str] = {}
    tokens, began = 0, time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        coming = pool.map(lambda one: protocols[one[1]](server, config, one[0]), asked)
        for (reference, over), answer in zip(asked, coming, strict=True):
            key = (reference.adapter, reference.prompt)
            matches[key] = max(matches.get(key, ""), compare(reference, over, answer))
            tokens += answer.completion_tokens
            reporter.progress(len(matches), len(references), "prompts")
    seconds = time.monotonic() - began
    return [_told(reference, matches[reference.adapter, reference.prompt], config) for reference in references], round(tokens / seconds, 1)


def _told(reference: Reference, match: str, config: TritonPackagingConfig) -> dict[str, Any]:
    told = {"prompt": reference.prompt, "text": reference.text, "prompt_tokens": reference.prompt_tokens, "match": match}
    named = {"adapter": reference.adapter} if reference.adapter else {}
    return {**told, **named, "rendered": reference.rendered} if config.backend == "vllm" else told


def compare(reference: Reference, protocol: str, answer: Answer) -> str:
    """ "exact", or "rounding" where the answer leaves the reference at a token that rounding could have chosen. Raises ProofError."""
    if answer.prompt_tokens == reference.prompt_tokens and said(answer.text) == said(reference.text):
        return "exact"
    shared = max(k for k, prefix in enumerate(reference.prefixes) if answer.text.startswith(prefix))
    if answer.prompt_tokens == reference.prompt_tokens and shared < len(reference.close) and reference.close[shared]:
        return "rounding"
    raise ProofError(
        f"over {protocol} Triton does not answer as transformers does{with_adapter(reference)}.\n  prompt:       {reference.prompt!r} "
        f"({reference.prompt_tokens} tokens; Triton counted {answer.prompt_tokens})\n"
        f"  transformers: {reference.text!r}\n  Triton:       {answer.text!r}",
        hint="The package is not published. Package again with TUNELINE_THREADS=1: if it then passes, this processor's sums depend on the "
        "number of threads; if not, compare chat template and generation settings in weights/ with the model's.",
    )
