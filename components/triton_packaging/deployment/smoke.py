"""The smoke test: a loaded candidate answers the prompts that its package was proven with, as it was proven to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from components.common.artifacts import Artifact
from components.common.errors import TunelineError
from components.triton_packaging import protocols
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment.layout import STREAM, Release
from components.triton_packaging.deployment.repository_api import Address
from components.triton_packaging.protocols import Answer, ProofError, Reference

PROMPTS = 3  # of the proven ones: the proof asked them all, this asks whether the same model answers here


class SmokeTestError(TunelineError):
    """A candidate was loaded, and does not answer as it was proven to."""

    kind = "smoke_test"


def smoke_test(server: Address, release: Release, name: str) -> int:
    """Ask the model `name` over HTTP and gRPC, whole and streamed, with each adapter that a request may name. Returns how many prompts were
    asked.

    Raises SmokeTestError for the first answer that is refused, empty or another one than the proof recorded as exact.
    """
    config = _asking(release, name)
    expected = _first(recorded(release.package, config))
    for answer in expected:
        texts = {key: answer.get(key, "") for key in ("text", "adapter")}
        rendered = answer.get("rendered", answer["prompt"])
        reference = Reference(answer["prompt"], answer.get("prompt_tokens", 0), prefixes=[], close=[], rendered=rendered, **texts)
        for over, ask in _protocols(release).items():
            _check(over, answer, _asked(over, lambda: ask(server, config, reference)))  # noqa: B023 - called at once
    return len(expected)


def _first(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first PROMPTS of each adapter."""
    by_adapter: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        by_adapter.setdefault(answer.get("adapter", ""), []).append(answer)
    return [answer for found in by_adapter.values() for answer in found[:PROMPTS]]


def _asking(release: Release, name: str) -> TritonPackagingConfig:
    """The package's own configuration for a model that has this name now, which may be longer than a package's; keys of another version of
    tuneline are none of the smoke test's concern."""
    known = {key: value for key, value in release.package.manifest.config.items() if key in TritonPackagingConfig.model_fields}
    return TritonPackagingConfig(**known).model_copy(update={"model_name": name})


def recorded(package: Artifact, config: TritonPackagingConfig) -> list[dict[str, Any]]:
    """The proven answers; of an unproven package only its golden prompts, to which any answer will do: what a stand-in for vLLM answered
    says what to ask, and vLLM may answer otherwise."""
    try:
        said = json.loads((package.path / "proof.json").read_text(encoding="utf-8"))
        answers: list[dict[str, Any]] = said.get("answers") or []
        shown = [{**answer, "match": "unproven"} for answer in said.get("stand_in", {}).get("answers", [])]
    except (OSError, ValueError):
        answers, shown = [], []
    return [_askable(answer, config) for answer in answers or shown] or [
        {"prompt": prompt, "match": "unproven", "adapter": adapter}
        for adapter in ("", *_named(package, config))
        for prompt in config.golden_prompts
    ]


def _askable(answer: dict[str, Any], config: TritonPackagingConfig) -> dict[str, Any]:
    """A package for vLLM that was made before its prompts were kept as the chat template writes them can be asked, and not compared."""
    return {**answer, "match": "unproven"} if config.backend == "vllm" and "rendered" not in answer else answer


def _named(package: Artifact, config: TritonPackagingConfig) -> list[str]:
    """The adapters that a request may name."""
    return list(package.manifest.summary.get("adapters", ())) if config.backend == "vllm" else []


def _protocols(release: Release) -> dict[str, Callable[[Any, TritonPackagingConfig, Reference], Answer]]:
    streams = STREAM in release.suffixes
    known = protocols.PROTOCOLS[str(release.package.manifest.summary.get("backend", "python"))]
    return {over: ask for over, ask in known.items() if streams or ask is not protocols.ask_stream}


def _asked(over: str, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except ProofError as error:
        raise SmokeTestError(error.message, hint="The server's log names the cause; package the model again.") from None
    except Exception as error:  # a model that breaks may answer whatever it likes
        raise SmokeTestError(f"over {over} the answer makes no sense: {error!r}", hint="Package the model again.") from None


def _check(over: str, expected: dict[str, Any], answer: Answer) -> None:
    if expected["match"] == "exact" and not _same(expected, answer):
        raise SmokeTestError(
            f"over {over} it does not answer as it was proven to.\n  prompt: {expected['prompt']!r}\n  proven: {expected['text']!r}\n"
            f"  now:    {answer.text!r}",
            hint="Package it again on a machine like the server's, with its processor and number of threads.",
        )
    if answer.completion_tokens < 1:
        raise SmokeTestError(f"over {over} the answer to {expected['prompt']!r} has no tokens", hint="Package the model again.")


def _same(expected: dict[str, Any], answer: Answer) -> bool:
    return protocols.said(answer.text) == protocols.said(expected["text"]) and answer.prompt_tokens == expected["prompt_tokens"]
