"""The proof: a real Triton server loads the package and answers golden prompts as transformers does from the model before packaging.

They are asked over HTTP, over gRPC and streamed, by one client and by several at once.
"""

from __future__ import annotations

import gc
import json
import queue
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.common import chat, models
from components.common.errors import TunelineError
from components.common.models import Model
from components.common.progress import Reporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.pbtxt import stream_name
from components.triton_packaging.server import Server, children, get_json, memory, running_server

CLIENTS = (1, 8)


class ProofError(TunelineError):
    """The server answers, but not as the model did before packaging."""

    kind = "proof"


@dataclass(frozen=True)
class Reference:
    """What the model answers before packaging. `prefixes[k]` is the text of its first k tokens and `close[k]` says whether rounding could
    have chosen another token there."""

    prompt: str
    prompt_tokens: int
    text: str
    prefixes: list[str]
    close: list[bool]


@dataclass(frozen=True)
class Answer:
    """What the server answered over one protocol."""

    text: str
    prompt_tokens: int
    completion_tokens: int


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


def prove(model: Model, repository: Path, config: TritonPackagingConfig, dtype: str, *, seed: int, log: Path, reporter: Reporter) -> Proof:
    """Compare the packaged model with the original. Raises ProofError for the first answer that differs, ModelLoadError and
    EngineMissingError when the server does not come that far."""
    reporter.step("asking the model before packaging")
    references = answer_before(model, config, dtype, seed, reporter)
    reporter.step("loading the package in Triton")
    with running_server(
        repository,
        models=[config.model_name, stream_name(config.model_name)],
        log=log,
        ready_timeout=config.ready_timeout_seconds,
        reporter=reporter,
    ) as server:
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

    ids = torch.tensor([chat.encode_prompt(tokenizer, [{"role": "user", "content": prompt}])], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None, top_k=None,
            max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    tokens = out.sequences[0, ids.shape[1] :]
    prefixes = [tokenizer.decode(tokens[:k], skip_special_tokens=True) for k in range(len(tokens) + 1)]
    close = [rounding and is_close(logits[0]) for logits in out.logits]
    return Reference(prompt, ids.shape[1], prefixes[-1], prefixes, close)


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
    asked = [(reference, over) for reference in references for over in PROTOCOLS]
    matches: dict[str, str] = {}
    tokens, began = 0, time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        coming = pool.map(lambda one: PROTOCOLS[one[1]](server, config, one[0].prompt), asked)
        for (reference, over), answer in zip(asked, coming, strict=True):
            matches[reference.prompt] = max(matches.get(reference.prompt, ""), compare(reference, over, answer))
            tokens += answer.completion_tokens
            reporter.progress(len(matches), len(references), "prompts")
    seconds = time.monotonic() - began
    answers = [{"prompt": r.prompt, "text": r.text, "prompt_tokens": r.prompt_tokens, "match": matches[r.prompt]} for r in references]
    return answers, round(tokens / seconds, 1)


def compare(reference: Reference, protocol: str, answer: Answer) -> str:
    """ "exact", or "rounding" where the answer leaves the reference at a token that rounding could have chosen. Raises ProofError."""
    if answer.prompt_tokens == reference.prompt_tokens and answer.text == reference.text:
        return "exact"
    shared = max(k for k, prefix in enumerate(reference.prefixes) if answer.text.startswith(prefix))
    if answer.prompt_tokens == reference.prompt_tokens and shared < len(reference.close) and reference.close[shared]:
        return "rounding"
    raise ProofError(
        f"over {protocol} Triton does not answer as transformers does.\n  prompt:       {reference.prompt!r} "
        f"({reference.prompt_tokens} tokens; Triton counted {answer.prompt_tokens})\n"
        f"  transformers: {reference.text!r}\n  Triton:       {answer.text!r}",
        hint="The package is not published. Package again with TUNELINE_THREADS=1: if it then passes, this processor's sums depend on the "
        "number of threads; if not, compare chat template and generation settings in weights/ with the model's.",
    )


def ask_http(server: Server, config: TritonPackagingConfig, prompt: str) -> Answer:
    """A greedy answer through the generate extension."""
    body = {"text_input": prompt, "max_tokens": config.golden_max_tokens}
    try:
        answer = get_json(f"{server.http_url}/v2/models/{config.model_name}/generate", method="POST", body=body, timeout=600)
    except urllib.error.HTTPError as error:
        raise _refused("HTTP", prompt, error.read().decode("utf-8", errors="replace")) from None
    return Answer(answer["text_output"], int(answer["prompt_tokens"]), int(answer["completion_tokens"]))


def ask_grpc(server: Server, config: TritonPackagingConfig, prompt: str) -> Answer:
    """A greedy answer through gRPC inference, with chat messages instead of a text."""
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    try:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            result = client.infer(config.model_name, _inputs(config, prompt), client_timeout=600)
    except InferenceServerException as error:
        raise _refused("gRPC", prompt, str(error)) from None
    return _answer([result])


def ask_stream(server: Server, config: TritonPackagingConfig, prompt: str) -> Answer:
    """A greedy answer streamed over gRPC."""
    from tritonclient import grpc

    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    results: list[Any] = []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(stream_name(config.model_name), _inputs(config, prompt))
        while not results or not results[-1].as_numpy("finish_reason")[0]:
            result, error = came.get(timeout=600)
            if error is not None:
                raise _refused("a gRPC stream", prompt, str(error))
            results.append(result)
    return _answer(results)


def _answer(results: Sequence[Any]) -> Answer:
    """The answer of a response, or of a stream of them."""
    text = "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results)
    return Answer(text, *(int(results[-1].as_numpy(name)[0]) for name in ("prompt_tokens", "completion_tokens")))


def _inputs(config: TritonPackagingConfig, prompt: str) -> list[Any]:
    import numpy as np
    from tritonclient import grpc

    messages = json.dumps([{"role": "user", "content": prompt}], ensure_ascii=False)
    values = {
        "messages": ("BYTES", np.array([messages.encode()], dtype=np.object_)),
        "max_tokens": ("INT32", np.array([config.golden_max_tokens], dtype=np.int32)),
    }
    inputs = [grpc.InferInput(name, [1], kind) for name, (kind, _) in values.items()]
    for tensor, (_, value) in zip(inputs, values.values(), strict=True):
        tensor.set_data_from_numpy(value)
    return inputs


def _refused(protocol: str, prompt: str, said: str) -> ProofError:
    return ProofError(f"over {protocol} Triton refused the golden prompt {prompt!r}: {said}", hint="Check triton_packaging.golden_prompts.")


PROTOCOLS: dict[str, Callable[[Server, TritonPackagingConfig, str], Answer]] = {
    "HTTP": ask_http, "gRPC": ask_grpc, "a gRPC stream": ask_stream,
}  # fmt: skip
