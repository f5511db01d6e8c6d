"""Runs vLLM through its public AsyncLLM, configured by the files in a package's version folder."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from tuneline_requests import UNFINISHED_REASON, ClientError, PartialAnswer, VllmRequest


class ModelStartError(Exception):
    """The model cannot be started: vLLM is not installed, or a file of the model is missing or invalid."""


def check_vllm_installed() -> None:
    """Raise ModelStartError if vLLM cannot be imported.

    A package without an origin is not vLLM, but this backend's folder, which is found as a namespace package.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModelStartError("vLLM is not installed in the environment that Triton's python backend imports from")


def read_model_files(version: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Read model.json and multi_lora.json of a version folder.

    Returns:
        Keyword arguments of vLLM's AsyncEngineArgs, and the folders of the adapters by name.

    Raises:
        ModelStartError: a file is missing or invalid.
    """
    arguments = _read_json(version / "model.json", "it must contain the model and vLLM's settings")
    if "model" not in arguments:
        raise ModelStartError(f"{version / 'model.json'} has no key 'model'")
    adapters: dict[str, str] = {}
    if str(arguments.get("enable_lora", False)).lower() == "true":
        listed = _read_json(version / "multi_lora.json", "model.json enables LoRA, which requires a list of adapters")
        adapters = {name: str(folder) for name, folder in listed.items()}
    for name, folder in adapters.items():
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ModelStartError(f"the adapter {name} was not found in {folder}{_describe_search_folder(folder)}")
    for key in ("model", "tokenizer"):
        location = str(arguments.get(key) or arguments["model"])
        is_remote = "://" in location or location.count("/") == 1  # vLLM resolves URLs and Hub names itself
        if not is_remote and not Path(location).is_dir():
            raise ModelStartError(
                f"the {key} in model.json was not found: {location}{_describe_search_folder(location)}"
            )
    return arguments, adapters


def _read_json(path: Path, purpose: str) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelStartError(f"{path} is missing: {purpose}") from None
    except ValueError as error:
        raise ModelStartError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelStartError(f"{path} is a JSON {type(values).__name__}; expected an object")
    return values


def _describe_search_folder(path: str) -> str:
    """Return the folder against which a relative path is resolved, and a hint, as the end of a message."""
    if Path(path).is_absolute():
        return ""
    return f", relative to {Path.cwd()}: start the server in the package's folder, or set triton_packaging.serving_root"


class VllmEngine:
    """vLLM's asynchronous engine. Create it in the event loop that calls `generate`."""

    def __init__(self, arguments: Mapping[str, object], adapters: Mapping[str, str]) -> None:
        """Start the engine with the contents of the model files.

        Triton's documentation writes booleans as "true" and "false"; these strings are converted. On a CPU, one adapter
        slot is added. In a batch with adapters, vLLM's CPU build (0.32) computes a request without an adapter
        (index -1) with the adapter in the last slot. An empty last slot has no effect on such a request.

        The CPU build rounds the inputs of 4-bit layers to int8 unless VLLM_CPU_INT4_W4A8 is 0. With the embedded model,
        this changes log-probabilities by 0.46 nats on average, ten times as much as bfloat16; packaging does not measure it.
        """
        os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        booleans = {"true": True, "false": False}
        settings = {
            key: booleans.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()
        }
        if adapters and current_platform.is_cpu():
            settings["max_loras"] = len(adapters) + 1
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self._adapters = {name: (number, folder) for number, (name, folder) in enumerate(adapters.items(), 1)}
        self._ids = itertools.count()

    async def generate(self, request: VllmRequest) -> AsyncGenerator[PartialAnswer, None]:
        """Yield the complete answer so far after each step. Closing the iterator aborts the request.

        Raises:
            ClientError: vLLM rejects the request.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        try:
            parameters: dict[str, Any] = dict(request.sampling)
            if "structured_outputs" in parameters:
                parameters["structured_outputs"] = StructuredOutputsParams(**parameters["structured_outputs"])
            sampling = SamplingParams(**parameters)
        except (TypeError, ValueError) as error:
            raise ClientError(f"sampling_parameters: {error}") from None
        lora_request = None
        if request.adapter is not None:
            number, folder = self._adapters[request.adapter]
            lora_request = LoRARequest(lora_name=request.adapter, lora_int_id=number, lora_path=folder)
        outputs = self._engine.generate(request.text, sampling, f"r{next(self._ids)}", lora_request=lora_request)
        try:
            async for output in outputs:
                yield PartialAnswer(
                    [sequence.text for sequence in output.outputs],
                    [len(sequence.token_ids) for sequence in output.outputs],
                    [sequence.finish_reason or UNFINISHED_REASON for sequence in output.outputs],
                    len(output.prompt_token_ids or []),
                    output.finished,
                    [sequence.logprobs for sequence in output.outputs],
                )
        except ValueError as error:  # vLLM raises it for an impossible request, such as a prompt beyond the context
            raise ClientError(str(error)) from None
        finally:
            await outputs.aclose()

    def close(self) -> None:
        """Shut down the engine and release the model."""
        self._engine.shutdown()
