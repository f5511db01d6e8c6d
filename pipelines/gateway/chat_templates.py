"""Renders conversations for backends that take text only, with the chat template of the package."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.gateway.errors import RequestError, invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILENAME = "model.json"

logger = logging.getLogger("tuneline.gateway")


class ChatTemplates:
    """Tokenizers of vLLM packages; of each model only the one of the served version is kept.

    Args:
        repository: Triton's model repository, or None: conversations cannot be rendered.
    """

    def __init__(self, repository: Path | None) -> None:
        self._repository = repository
        self._tokenizers: dict[str, tuple[tuple[str, str], PreTrainedTokenizerBase]] = {}

    async def render(self, name: str, version: str, fingerprint: str, messages: str, tools: str | None) -> str:
        """Return the text of a conversation up to the beginning of the answer.

        Args:
            name: model in Triton.
            version: version folder of the model.
            fingerprint: identity of the model, which may change under the same version.
            messages: JSON list of messages.
            tools: JSON list of tools, or None.

        Raises:
            RequestError: the template rejects the messages, or the package's files cannot be read.
        """
        if self._tokenizers.get(name, (None,))[0] != (version, fingerprint):
            # The first request of a version loads the tokenizer, which takes about a second.
            self._tokenizers[name] = (version, fingerprint), await asyncio.to_thread(self._load, name, version)
        tokenizer = self._tokenizers[name][1]
        return await asyncio.to_thread(_render, tokenizer, json.loads(messages), json.loads(tools or "null"))

    def _load(self, name: str, version: str) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        if self._repository is None:
            raise RequestError(
                501,
                "this gateway cannot render conversations because it was started without --repository; use /v1/completions",
                code="unsupported_endpoint",
            )
        try:
            settings = json.loads((self._repository / name / version / MODEL_FILENAME).read_text(encoding="utf-8"))
            # Paths in a vLLM package are relative to the repository.
            folder = self._repository / settings["tokenizer"]
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            logger.error("chat_template_unreadable model=%s version=%s error=%r", name, version, str(error))
            raise RequestError(
                503, "the chat template of the model cannot be read; see the gateway's log", code="unavailable"
            ) from None
        return tokenizer


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    for message in messages:
        message["content"] = message["content"] or ""
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise arbitrary errors to reject a conversation
        raise invalid(f"the model's chat template rejects these messages: {error}", "messages") from None
    # vLLM tokenizes a text with special tokens: a beginning that the template has written must not appear twice.
    if tokenizer.bos_token and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        text = text.removeprefix(tokenizer.bos_token)
    return text
