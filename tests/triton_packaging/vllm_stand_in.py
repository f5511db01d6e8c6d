"""A STAND-IN for the package `vllm`, for tests on machines without it. It is not vLLM.

It implements the few names of vLLM that the backend uses, with transformers and PEFT, one request at a time. Tests can
therefore try a package's files, adapters and request handling in a real Triton server. They show nothing about vLLM's
arithmetic, speed or limits. `install` copies this file as `vllm/__init__.py` into a serving environment of the test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REPLACEMENT_CHARACTER = "\ufffd"  # decoders return it for the first bytes of a character


def install(source: Path, target: Path) -> None:
    """Copy a serving environment with hard links, and add this stand-in to the copy as the package `vllm`."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)
    package = next(target.glob("lib/python*/site-packages")) / "vllm"
    package.mkdir()
    shutil.copyfile(__file__, package / "__init__.py")


class AsyncEngineArgs:
    """Keywords of the engine. Unknown ones are accepted: vLLM has many more than the stand-in uses."""

    def __init__(
        self, model: str, tokenizer: str = "", max_model_len: int = 0, dtype: str = "auto", **_: object
    ) -> None:
        self.model, self.tokenizer, self.max_model_len, self.dtype = model, tokenizer or model, max_model_len, dtype


class SamplingParams:
    """Sampling parameters with vLLM's defaults. Unknown ones raise TypeError."""

    def __init__(
        self,
        max_tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> None:
        for name, value, kinds, low in (
            ("max_tokens", max_tokens, int, 1),
            ("temperature", temperature, int | float, 0),
            ("top_p", top_p, int | float, 0),
            ("top_k", top_k, int, -1),
        ):
            if isinstance(value, bool) or not isinstance(value, kinds) or value < low:
                raise ValueError(f"{name} is {value!r}; expected a number of at least {low}")
        self.max_tokens, self.temperature, self.top_p, self.top_k, self.seed = (
            max_tokens,
            temperature,
            top_p,
            top_k,
            seed,
        )
        self.stop = [stop] if isinstance(stop, str) else list(stop)


class StructuredOutputsParams:
    """Constraints of an answer. The stand-in has none: its SamplingParams do not accept them."""

    def __init__(self, json: object = None, disable_any_whitespace: bool = False) -> None:
        pass


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence of an answer so far."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: None = None


@dataclass(frozen=True)
class RequestOutput:
    """An answer so far."""

    outputs: list[CompletionOutput]
    prompt_token_ids: list[int]
    finished: bool


class AsyncLLM:
    """The engine."""

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> AsyncLLM:
        return cls(arguments)

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        import torch
        import transformers

        torch.set_num_threads(int(os.environ.get("TUNELINE_THREADS") or len(os.sched_getaffinity(0))))
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
        dtype = getattr(torch, arguments.dtype, "auto")
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=dtype, use_safetensors=True
        ).eval()
        self._adapters: set[str] = set()
        self._max_length = arguments.max_model_len or int(self._model.config.max_position_embeddings)
        end_ids = self._model.generation_config.eos_token_id
        self._end_ids = frozenset(end_ids if isinstance(end_ids, list) else [end_ids])
        self._pool = ThreadPoolExecutor(1, "stand-in")

    async def generate(
        self, prompt: str, sampling: SamplingParams, request_id: str, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_ids = list(self._tokenizer(prompt)["input_ids"])
        max_tokens = min(sampling.max_tokens, self._max_length - len(prompt_ids))
        if max_tokens < 1:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens; the context has {self._max_length}")
        loop, queue, stop = asyncio.get_running_loop(), asyncio.Queue[int | None](), threading.Event()

        def on_token(token: int) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, token)

        generation = loop.run_in_executor(
            self._pool, self._generate, prompt_ids, lora_request, sampling, max_tokens, on_token, stop
        )
        generation.add_done_callback(lambda _: queue.put_nowait(None))
        tokens: list[int] = []
        try:
            while (token := await queue.get()) is not None:
                tokens.append(token)
                output = self._output(tokens, sampling.stop, max_tokens)
                yield RequestOutput([output], prompt_ids, output.finish_reason is not None)
                if output.finish_reason is not None:
                    break
            else:
                await generation
        finally:
            stop.set()

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _output(self, tokens: Sequence[int], stops: Sequence[str], max_tokens: int) -> CompletionOutput:
        """The text up to a stop string, without a possible beginning of one and without half a character."""
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        positions = [text.index(stop) for stop in stops if stop in text]
        is_stopped = positions or tokens[-1] in self._end_ids
        reason = "stop" if is_stopped else "length" if len(tokens) >= max_tokens else None
        if positions:
            text = text[: min(positions)]
        elif reason is None:
            text = text.rstrip(REPLACEMENT_CHARACTER)
            text = text[: max(0, len(text) - max((len(stop) - 1 for stop in stops), default=0))]
        return CompletionOutput(text, list(tokens), reason)

    def _select_adapter(self, request: LoRARequest | None) -> Any:
        """Load and activate the adapter of a request. Returns the context in which to generate."""
        from peft import PeftModel

        if request is None:
            return self._model.disable_adapter() if self._adapters else nullcontext()
        name = f"adapter{request.lora_int_id}"  # PEFT's names contain no dots
        if name not in self._adapters:
            if self._adapters:
                self._model.load_adapter(request.lora_path, adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(self._model, request.lora_path, adapter_name=name)
            self._adapters.add(name)
        self._model.eval().set_adapter(name)
        return nullcontext()

    def _generate(
        self,
        prompt_ids: list[int],
        lora_request: LoRARequest | None,
        sampling: SamplingParams,
        max_tokens: int,
        on_token: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        import torch
        import transformers

        class Streamer(transformers.generation.BaseStreamer):  # type: ignore[misc] # transformers is untyped
            """Passes on the tokens after the prompt."""

            is_prompt = True

            def put(self, value: torch.Tensor) -> None:
                if not self.is_prompt:
                    on_token(int(value.reshape(-1)[0]))
                self.is_prompt = False

            def end(self) -> None:
                pass

        class Stop(transformers.StoppingCriteria):  # type: ignore[misc] # transformers is untyped
            """Stops when the request is aborted."""

            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
                return torch.full((input_ids.shape[0],), stop.is_set(), dtype=torch.bool)

        settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature:
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
            settings = {"do_sample": True, **drawn}
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        input_ids = torch.tensor([prompt_ids])
        with torch.inference_mode(), self._select_adapter(lora_request):
            self._model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                pad_token_id=next(iter(self._end_ids)),
                streamer=Streamer(),
                stopping_criteria=transformers.StoppingCriteriaList([Stop()]),
                **settings,
            )


class _Platform:
    """vllm.platforms.current_platform."""

    def is_cpu(self) -> bool:
        return True


current_platform = _Platform()

if __name__ == "vllm":  # the submodules that the backend imports from are this module
    for name in ("v1", "v1.engine", "v1.engine.async_llm", "lora", "lora.request", "platforms", "sampling_params"):
        sys.modules[f"vllm.{name}"] = sys.modules[__name__]
