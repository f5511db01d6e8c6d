"""What computes the answers: vLLM through its public AsyncLLM, where it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tuneline_asking import NOT_YET, Asked, ClientError, Part


class Engine(Protocol):
    """What answers requests."""

    def answer(self, asked: Asked) -> AsyncGenerator[Part, None]:
        """The answer, part by part, each the whole of it so far. Closing the iterator ends it. Raises ClientError."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


@dataclass(frozen=True)
class Files:
    """What a model's folder says: keywords of vLLM's AsyncEngineArgs, and adapters' folders by name."""

    arguments: dict[str, Any]
    adapters: Mapping[str, str]


class FilesError(Exception):
    """A file of the model is missing or is not what it should be."""


def installed() -> bool:
    """Whether vLLM is there: a package with code in it, and not this backend's own folder, which bears its name."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


def read_files(version: Path) -> Files:
    """model.json and multi_lora.json of a version folder. Raises FilesError for what is missing."""
    arguments = _json(version / "model.json", "it names the model and vLLM's settings")
    if "model" not in arguments:
        raise FilesError(f"{version / 'model.json'} names no model")
    adapters: dict[str, str] = {}
    if str(arguments.get("enable_lora", False)).lower() == "true":
        adapters = _json(version / "multi_lora.json", "model.json enables LoRA, and it names the adapters")
    for name, folder in adapters.items():
        if not (Path(folder) / "adapter_config.json").is_file():
            raise FilesError(f"the adapter {name} is not in {folder}{_from_here(folder)}")
    for key in ("model", "tokenizer"):
        _check_there(key, str(arguments.get(key) or arguments["model"]))
    return Files(arguments, adapters)


def _json(path: Path, why: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FilesError(f"{path} is missing: {why}") from None
    except ValueError as error:
        raise FilesError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FilesError(f"{path} holds no JSON object")
    return values


def _check_there(key: str, place: str) -> None:
    """A name with one slash may be a model's on the hub, which vLLM looks for itself; an address is vLLM's to read."""
    if "://" not in place and place.count("/") != 1 and not (Path(place) / "config.json").is_file() and not Path(place).is_dir():
        raise FilesError(f"the {key} {place} of model.json is not there{_from_here(place)}")


def _from_here(place: str) -> str:
    """Where a relative path was looked for."""
    if Path(place).is_absolute():
        return ""
    return f", looked for from {Path.cwd()}: start the server in the package's folder, or package with triton_packaging.serving_root"


class Vllm:
    """vLLM's asynchronous engine. Made inside the event loop that it is asked from."""

    def __init__(self, files: Files) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**with_a_spare_slot(files)))
        self._adapters = {name: (number, folder) for number, (name, folder) in enumerate(files.adapters.items(), 1)}
        self._ids = itertools.count()

    async def answer(self, asked: Asked) -> AsyncGenerator[Part, None]:
        """See Engine."""
        answers = self._engine.generate(asked.text, self._sampling(asked), f"r{next(self._ids)}", lora_request=self._lora(asked.lora))
        try:
            async for output in answers:
                yield Part(
                    [one.text for one in output.outputs],
                    [len(one.token_ids) for one in output.outputs],
                    [one.finish_reason or NOT_YET for one in output.outputs],
                    len(output.prompt_token_ids or []),
                    output.finished,
                )
        except ValueError as error:  # vLLM's word for a request that cannot be: a prompt beyond the context
            raise ClientError(str(error)) from None
        finally:
            await answers.aclose()

    def close(self) -> None:
        """See Engine."""
        self._engine.shutdown()

    def _sampling(self, asked: Asked) -> Any:
        from vllm import SamplingParams

        try:
            return SamplingParams(**asked.sampling)
        except (TypeError, ValueError) as error:
            raise ClientError(f"sampling_parameters: {error}") from None

    def _lora(self, name: str | None) -> Any:
        from vllm.lora.request import LoRARequest

        if name is None:
            return None
        number, folder = self._adapters[name]
        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)


def with_a_spare_slot(files: Files) -> dict[str, Any]:
    """The arguments, on a processor with one slot more than there are adapters.

    vLLM's CPU build (0.32) computes requests without an adapter, where they share a batch with others, with the adapter in the last slot:
    their index is -1. An empty slot there changes nothing.
    """
    from vllm.platforms import current_platform

    arguments = plain(files.arguments)
    spare = {"max_loras": len(files.adapters) + 1} if files.adapters and current_platform.is_cpu() else {}
    return {**arguments, **spare}


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with "true" and "false" as what they mean: Triton's documentation writes them as texts."""
    return {key: {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()}
