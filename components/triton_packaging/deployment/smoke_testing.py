"""Smoke test of a deployment: a loaded candidate must repeat the answers recorded in its proof."""

from __future__ import annotations

import json
from collections import Counter

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import TunelineError
from components.triton_packaging import golden_requests
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment.serving_folder import STREAM_SUFFIX, Release
from components.triton_packaging.golden_requests import ProofError, ReferenceAnswer
from components.triton_packaging.triton_server import ServerAddress

PROMPTS_PER_ADAPTER = 3  # the proof sent all prompts; the smoke test only checks that the server loaded the same model


class SmokeTestError(TunelineError):
    """The answers of a loaded candidate differ from its proof."""

    kind = "smoke_test"


def smoke_test(server: ServerAddress, release: Release, name: str) -> int:
    """Send prompts to the model `name` over every protocol and with each adapter; return the number of prompts.

    Raises:
        SmokeTestError: a prompt is rejected, or an answer is empty or differs from an answer that the proof matched
            exactly.
    """
    # Drop keys of other tuneline versions; `name` may exceed the length limit for a package's model name.
    known = {
        key: value
        for key, value in release.package.manifest.config.items()
        if key in TritonPackagingConfig.model_fields
    }
    config = TritonPackagingConfig(**known).model_copy(update={"model_name": name})
    protocols = dict(golden_requests.PROTOCOLS[config.backend])
    if config.backend == "python" and STREAM_SUFFIX not in release.suffixes:  # a package of an older tuneline
        del protocols["a gRPC stream"]
    sent: Counter[str] = Counter()
    for reference, is_exact in read_expected_answers(release.package, config):
        if sent[reference.adapter] == PROMPTS_PER_ADAPTER:
            continue
        sent[reference.adapter] += 1
        for protocol, request in protocols.items():
            try:
                answer = request(server, config, reference)
            except ProofError as error:
                hint = "Check the server's log."
                raise SmokeTestError(error.message, hint=hint) from None
            except Exception as error:  # a broken model may return an invalid answer
                raise SmokeTestError(
                    f"invalid answer over {protocol}: {error!r}", hint="Package the model again."
                ) from None
            if is_exact and (
                golden_requests.strip_incomplete_character(answer.text)
                != golden_requests.strip_incomplete_character(reference.text)
                or answer.prompt_tokens != reference.prompt_tokens
            ):
                raise SmokeTestError(
                    f"the answer over {protocol} differs from the proof.\n  prompt: {reference.prompt!r}\n"
                    f"  proof:  {reference.text!r}\n  answer: {answer.text!r}",
                    hint="Package the model on a machine with the server's processor type and number of threads.",
                )
            if answer.completion_tokens < 1:
                raise SmokeTestError(
                    f"the answer over {protocol} to {reference.prompt!r} has no tokens", hint="Package the model again."
                )
    return sent.total()


def read_expected_answers(package: Artifact, config: TritonPackagingConfig) -> list[tuple[ReferenceAnswer, bool]]:
    """Return the answers in the proof, each with a flag: whether the server's answer must be equal.

    For an unproven package, return its golden prompts with a false flag: any answer is accepted.
    """
    is_vllm = config.backend == "vllm"
    try:
        answers = json.loads((package.path / "proof.json").read_text(encoding="utf-8")).get("answers")
    except (OSError, ValueError):
        answers = None
    adapters = ["", *(package.manifest.summary.get("adapters", ()) if is_vllm else ())]
    unproven = [{"prompt": prompt, "adapter": adapter} for adapter in adapters for prompt in config.golden_prompts]
    return [
        (
            ReferenceAnswer(
                each["prompt"],
                each.get("prompt_tokens", 0),
                each.get("text", ""),
                prefixes=[],
                rounding_ties=[],
                rendered=each.get("rendered", each["prompt"]),
                adapter=each.get("adapter", ""),
            ),
            # An old vLLM package without rendered prompts can be queried, but not compared.
            each.get("match") == "exact" and not (is_vllm and "rendered" not in each),
        )
        for each in answers or unproven
    ]
