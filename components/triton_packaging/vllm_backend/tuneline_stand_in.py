"""A STAND-IN for vLLM, for checks on machines without it. It is not vLLM and not made to serve.

It reads the same files and answers the same requests with transformers and PEFT, one request at a time. So a package's files, its adapters
and their names can be tried in a real Triton server; nothing is shown of vLLM's own arithmetic, speed or limits. A sampling parameter that
it does not know is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from tuneline_asking import NOT_YET, Asked, ClientError, Part
from tuneline_engines import Files, plain
from tuneline_following import Given, StopWhen

KNOWN = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
MAX_TOKENS = 16  # vLLM's own, where a request does not say
UNFINISHED = "\ufffd"  # what decoding makes of the first bytes of a character


class StandIn:
    """transformers and PEFT behind the interface of an engine."""

    def __init__(self, files: Files) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(int(os.environ.get("TUNELINE_THREADS") or len(os.sched_getaffinity(0))))
        arguments = plain(files.arguments)
        self._names = {name: f"adapter{number}" for number, name in enumerate(files.adapters)}  # PEFT's names bear no dots
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.get("tokenizer") or arguments["model"])
        self._model = _loaded(arguments, {self._names[name]: folder for name, folder in files.adapters.items()})
        self._longest = int(arguments.get("max_model_len") or self._model.config.max_position_embeddings)
        ends = self._model.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._pool = ThreadPoolExecutor(1, "stand-in")

    async def answer(self, asked: Asked) -> AsyncGenerator[Part, None]:
        """See Engine."""
        settings = _settings(asked.sampling)
        prompt = list(self._tokenizer(asked.text)["input_ids"])
        room = self._longest - len(prompt)
        if room < 1:
            raise ClientError(f"the prompt has {len(prompt)} tokens; with the answer at most {self._longest} are allowed")
        most = min(settings["max_tokens"], room)
        loop, made, stop = asyncio.get_running_loop(), asyncio.Queue[int | None](), threading.Event()
        running = loop.run_in_executor(
            self._pool, self._generate, prompt, asked.lora, {**settings, "max_tokens": most},
            lambda token: loop.call_soon_threadsafe(made.put_nowait, token), stop,
        )  # fmt: skip
        running.add_done_callback(lambda _: made.put_nowait(None))
        tokens: list[int] = []
        try:
            while (token := await made.get()) is not None:
                tokens.append(token)
                part = self._part(tokens, settings["stop"], len(prompt), most)
                yield part
                if part.finished:
                    break
            else:
                await running
        finally:
            stop.set()

    def close(self) -> None:
        """See Engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        del self._model

    def _part(self, tokens: Sequence[int], stops: Sequence[str], prompt_tokens: int, most: int) -> Part:
        """The answer of these tokens: its text up to a stop string, and without what may still become one or is half a character."""
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        places = [text.index(stop) for stop in stops if stop in text]
        ended = "stop" if places or tokens[-1] in self._ends else "length" if len(tokens) >= most else NOT_YET
        if places:
            text = text[: min(places)]
        elif ended == NOT_YET:
            text = text.rstrip(UNFINISHED)
            text = text[: max(0, len(text) - max((len(stop) - 1 for stop in stops), default=0))]
        return Part([text], [len(tokens)], [ended], prompt_tokens, ended != NOT_YET)

    @torch.inference_mode()  # type: ignore[untyped-decorator] # torch is skipped
    def _generate(
        self, prompt: list[int], lora: str | None, settings: dict[str, Any], give: Callable[[int], Any], stop: threading.Event
    ) -> None:
        ids = torch.tensor([prompt], device=self._model.device)
        if lora is not None:
            self._model.set_adapter(self._names[lora])
        if settings["seed"] is not None:
            torch.manual_seed(settings["seed"])
        with self._model.disable_adapter() if lora is None and self._names else nullcontext():
            self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings["max_tokens"], **_drawing(settings),
                pad_token_id=next(iter(self._ends)), streamer=Given(give),
                stopping_criteria=transformers.StoppingCriteriaList([StopWhen(stop)]),
            )  # fmt: skip


def _loaded(arguments: dict[str, Any], adapters: dict[str, str]) -> Any:
    """The base model with every adapter attached, none of them at work yet."""
    from peft import PeftModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, str(arguments.get("dtype", "auto")), "auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=dtype, use_safetensors=True)
    for name, folder in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(folder, adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
    return model.to(device).eval()


def _settings(sampling: dict[str, Any]) -> dict[str, Any]:
    """A request's sampling parameters, with vLLM's own defaults. Raises ClientError for one that the stand-in does not know."""
    unknown = sorted(set(sampling) - set(KNOWN))
    if unknown:
        raise ClientError(
            f"sampling_parameters: {', '.join(unknown)}: the stand-in that answers here, because vLLM is not installed, knows {KNOWN} only"
        )
    stop = sampling.get("stop") or []
    settings = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, **sampling}
    for name, kinds, least in (("max_tokens", int, 1), ("temperature", int | float, 0), ("top_p", int | float, 0), ("top_k", int, -1)):
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, kinds) or value < least:
            raise ClientError(f"sampling_parameters: {name} is {value!r}; a number from {least} is wanted")
    return {**settings, "stop": [stop] if isinstance(stop, str) else list(stop)}


def _drawing(settings: dict[str, Any]) -> dict[str, Any]:
    """How transformers chooses a token. At temperature 0 it is the best one."""
    if settings["temperature"] == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    drawn = {name: settings[name] for name in ("temperature", "top_p")}
    return {"do_sample": True, **drawn, "top_k": max(0, settings["top_k"])}
