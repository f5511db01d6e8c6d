"""Triton python backend model: a causal language model answered by transformers.

Self-contained: it is copied into the model repository as <model>/<version>/model.py with its weights beside it in `weights/`, and
imports only numpy, torch, transformers and Triton's own utilities. Its limits are parameters of config.pbtxt.

A request brings `text_input` (one user message, or raw text with apply_chat_template false) or `messages` (a JSON list of
{"role", "content"}), and may bring max_tokens, temperature, top_p, top_k, seed and stop. Without a temperature, or at 0, the answer is
greedy. It gets text_output, finish_reason ("stop" or "length"), prompt_tokens and completion_tokens (the end token counted).
Every input is checked here, because the server checks only types and shapes; a client's fault is answered with INVALID_ARG.
"""

from __future__ import annotations

import json
import locale
import math
import os
import secrets
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub starts in ASCII, and libraries open their text files in the locale's encoding

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

ROLES = ("system", "user", "assistant", "tool")
# No tokenizer needs this many characters for one token on real text; a longer request is refused before it is tokenized.
CHARACTERS_PER_TOKEN = 64
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256


class ClientError(Exception):
    """The request is at fault; the message is what the client reads."""


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, in tokens."""

    max_prompt_tokens: int
    max_tokens: int
    default_max_tokens: int
    context: int


@dataclass(frozen=True)
class Sampling:
    """How the answer's tokens are chosen. Temperature 0 is greedy."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]


class TritonPythonModel:
    """The name and the methods that Triton's python backend asks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights beside this file onto the instance's device."""
        parameters = {name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()}
        weights = Path(args["model_repository"]) / args["model_version"] / "weights"
        self.device = device_of(args)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if self.device.type == "cpu":
            torch.set_num_threads(threads(int(parameters["threads"])))
        dtype = getattr(torch, parameters["dtype"]) if self.device.type == "cuda" else torch.float32
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=dtype, trust_remote_code=False, use_safetensors=True)
        self.model = model.to(self.device).eval()
        names = ("max_prompt_tokens", "max_tokens", "default_max_tokens", "context")
        self.limits = Limits(**{name: int(parameters[name]) for name in names})

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request; a fault of one is its own answer and no other's."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Let go of the weights."""
        del self.model

    def _respond(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(output_tensors=self._answer(request))
        except ClientError as error:
            fault = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            pb_utils.Logger.log_error(traceback.format_exc())
            fault = pb_utils.TritonError(
                f"internal error: {type(error).__name__}; the server's log has the details", pb_utils.TritonError.INTERNAL
            )
        return pb_utils.InferenceResponse(error=fault)

    def _answer(self, request: Any) -> list[Any]:
        sampling = read_sampling(request, self.limits)
        prompt = self._tokenize(read_prompt(request, self.tokenizer, self.limits))
        room = min(self.limits.default_max_tokens, self.limits.context - len(prompt))
        max_tokens = sampling.max_tokens or room
        if len(prompt) + max_tokens > self.limits.context:
            raise ClientError(
                f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the model's context of {self.limits.context} tokens"
            )
        completion = self._generate(prompt, max_tokens, sampling)
        text, stopped = cut(self.tokenizer.decode(completion, skip_special_tokens=True), sampling.stop)
        ended = stopped or (bool(completion) and completion[-1] in self._end_tokens())
        return [
            string_tensor("text_output", text),
            string_tensor("finish_reason", "stop" if ended else "length"),
            pb_utils.Tensor("prompt_tokens", np.array([len(prompt)], dtype=np.int32)),
            pb_utils.Tensor("completion_tokens", np.array([len(completion)], dtype=np.int32)),
        ]

    def _tokenize(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        limit = min(self.limits.max_prompt_tokens, self.limits.context - 1)
        if not ids:
            raise ClientError("the prompt is empty")
        if len(ids) > limit:
            raise ClientError(f"the prompt has {len(ids)} tokens; at most {limit} are allowed")
        return ids

    @torch.inference_mode()  # type: ignore[untyped-decorator] # torch is skipped
    def _generate(self, prompt: list[int], max_tokens: int, sampling: Sampling) -> list[int]:
        """The tokens after the prompt. The global random state is seeded for this request alone: requests run one at a time."""
        ids = torch.tensor([prompt], device=self.device)
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            torch.manual_seed(sampling.seed)
        if sampling.stop:
            how["stopping_criteria"] = transformers.StoppingCriteriaList([StopAt(self.tokenizer, len(prompt), sampling.stop)])
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, pad_token_id=pad, **how)
        return [int(token) for token in out[0, len(prompt) :]]

    def _end_tokens(self) -> tuple[int, ...]:
        ends = self.model.generation_config.eos_token_id
        return tuple(ends) if isinstance(ends, list) else (ends,)


class StopAt(transformers.StoppingCriteria):  # type: ignore[misc] # transformers is untyped
    """Stops as soon as the answer holds one of the stop strings, however its tokens cut it."""

    def __init__(self, tokenizer: Any, prompt_length: int, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._from, self._stop = tokenizer, prompt_length, stop

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        text = self._tokenizer.decode(input_ids[0, self._from :], skip_special_tokens=True)
        done = any(stop in text for stop in self._stop)
        return torch.full((input_ids.shape[0],), done, device=input_ids.device, dtype=torch.bool)


def device_of(args: dict[str, str]) -> torch.device:
    """The device Triton placed this instance on."""
    if args["model_instance_kind"] == "GPU" and torch.cuda.is_available():
        return torch.device("cuda", int(args["model_instance_device_id"]))
    return torch.device("cpu")


def threads(configured: int) -> int:
    """TUNELINE_THREADS, else the package's own number, else the cores this process may use: a container's, not the machine's."""
    return int(os.environ.get("TUNELINE_THREADS") or configured or len(os.sched_getaffinity(0)))


def read_prompt(request: Any, tokenizer: Any, limits: Limits) -> str:
    """The text the model continues: the conversation in the model's template, or the raw text when the request says so."""
    text, messages = strings(request, "text_input"), strings(request, "messages")
    if (text is None) == (messages is None):
        raise ClientError("give either text_input or messages" + ("" if text is None else ", not both"))
    given = one("text_input", text) if text is not None else one("messages", messages or [])
    longest = limits.max_prompt_tokens * CHARACTERS_PER_TOKEN
    if len(given) > longest:
        raise ClientError(f"the prompt has {len(given)} characters; at most {longest} are allowed")
    conversation = [{"role": "user", "content": given}] if text is not None else conversation_of(given)
    wrap = scalar(request, "apply_chat_template")
    if wrap is not None and not wrap:
        if text is None:
            raise ClientError("messages need the chat template: leave apply_chat_template out, or give text_input")
        return given
    if text is not None and not given.strip():
        raise ClientError("text_input is empty")
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template refuses a conversation by raising whatever it likes
        raise ClientError(f"the model's chat template refuses these messages: {error}") from None


def conversation_of(given: str) -> list[dict[str, str]]:
    """The messages of a JSON list, checked."""
    try:
        messages = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"messages is not JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        raise ClientError('messages must be a JSON list such as [{"role": "user", "content": "Hello"}]')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ClientError(f"messages[{number}] must have a role ({', '.join(ROLES)}) and a text as content")
    if messages[-1]["role"] == "assistant":
        raise ClientError("the last message is the assistant's: there is nothing to answer")
    return messages


def read_sampling(request: Any, limits: Limits) -> Sampling:
    """How the request wants its tokens chosen, every value checked."""
    temperature = ranged(request, "temperature", 0.0, 10.0, 0.0)
    top_p = ranged(request, "top_p", 0.0, 1.0, 1.0)
    if top_p == 0:
        raise ClientError("top_p is 0; it must be above 0 and at most 1")
    top_k = int(ranged(request, "top_k", 0, 2**31 - 1, 0))
    max_tokens = scalar(request, "max_tokens")
    if max_tokens is not None and not 1 <= max_tokens <= limits.max_tokens:
        raise ClientError(f"max_tokens is {max_tokens}; it must be from 1 to {limits.max_tokens}")
    seed = scalar(request, "seed")
    if seed is not None and seed < 0:
        raise ClientError(f"seed is {seed}; it must be from 0 to {2**63 - 1}")
    chosen = secrets.randbits(63) if seed is None else int(seed)
    return Sampling(max_tokens and int(max_tokens), temperature, top_p, top_k, chosen, read_stops(request))


def read_stops(request: Any) -> tuple[str, ...]:
    """The stop strings of a request."""
    stops = strings(request, "stop") or []
    if len(stops) > MAX_STOPS:
        raise ClientError(f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ClientError(f"a stop string must have from 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def ranged(request: Any, name: str, low: float, high: float, default: float) -> float:
    """A number of the request within [low, high], or the default where it brings none."""
    value = scalar(request, name)
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise ClientError(f"{name} is {value:g}; it must be from {low:g} to {high:g}")
    return float(value)


def scalar(request: Any, name: str) -> Any:
    """The single value of a numeric input, or None where the request does not bring it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if values.size != 1:
        raise ClientError(f"{name} holds {values.size} values; give one")
    return values[0].item()


def strings(request: Any, name: str) -> list[str] | None:
    """The texts of a string input, or None where the request does not bring it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    try:
        return [bytes(value).decode("utf-8") for value in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise ClientError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def one(name: str, values: list[str]) -> str:
    """The only text of an input."""
    if len(values) != 1:
        raise ClientError(f"{name} holds {len(values)} texts; give one")
    return values[0]


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first stop string in it, and whether there was one."""
    places = [text.index(s) for s in stop if s in text]
    return (text[: min(places)], True) if places else (text, False)


def string_tensor(name: str, text: str) -> Any:
    """A string output of shape [1]."""
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))
