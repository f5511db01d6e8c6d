"""Text and bytes of single tokens, for reported log-probabilities."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .token_sampling import TokenScore

LogprobEntry = dict[str, object]

# JSON has no infinity; OpenAI's API reports this value for a token of no probability.
MIN_LOGPROB = -9999.0
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token of SentencePiece


class TokenDecoder:
    """Decodes single tokens of a tokenizer. A token may be a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)

    def decode_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        if token in self._added:
            return str(self._added[token]).encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:  # the output layer is wider than the vocabulary
            return b""
        if self._is_byte_level:
            return b"".join(
                bytes([BYTE_BY_CHARACTER[each]]) if each in BYTE_BY_CHARACTER else each.encode() for each in text
            )
        match = BYTE_TOKEN.fullmatch(text)
        return bytes([int(match[1], 16)]) if match else str(text).replace("▁", " ").encode()

    def describe(self, score: TokenScore) -> LogprobEntry:
        """Return a token's entry in the form of OpenAI's API."""
        alternatives = [self._describe_token(*each) for each in score.alternatives]
        return {**self._describe_token(score.token, score.logprob), "top_logprobs": alternatives}

    def _describe_token(self, token: int, logprob: float) -> LogprobEntry:
        data = self.decode_bytes(token)
        # max returns its first argument if the second is NaN
        return {"token": data.decode(errors="replace"), "logprob": max(MIN_LOGPROB, logprob), "bytes": list(data)}


def _map_characters_to_bytes() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies (GPT-2).

    Bytes that are printable in Latin-1 are represented by their own character, the others by characters from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_BY_CHARACTER = _map_characters_to_bytes()
