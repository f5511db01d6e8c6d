"""Incremental decoding that never splits a character and finds stop strings across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT_CHARACTER = "\ufffd"  # decoders return it for an incomplete character
# Number of tokens kept when older tokens are dropped: decoders treat the first token of a text differently.
CONTEXT_TOKENS = 8


class TextStream:
    """The text of one answer.

    `feed` returns text as soon as it is final, and withholds a possible beginning of a stop string or an incomplete
    character. The returned texts, with `flush` at the end, equal the decoded text of all tokens up to the first stop
    string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.token_count = 0
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._consumed = 0  # characters of the decoded _ids that were moved to _pending
        self._pending = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that is final after these tokens. Tokens after a stop string are ignored."""
        if not self._stop:
            return self._read(tokens)
        ready = ""
        for token in tokens:
            ready += self._read([token])
            if self.stopped:
                break
        return ready

    def flush(self) -> str:
        """Return the withheld text after the last token."""
        return "" if self.stopped else self._release(self._decode()[self._consumed :], is_last=True)

    def _read(self, tokens: Sequence[int]) -> str:
        self.token_count += len(tokens)
        self._ids.extend(tokens)
        text = self._decode()
        complete = text.rstrip(REPLACEMENT_CHARACTER)
        new, self._consumed = complete[self._consumed :], max(self._consumed, len(complete))
        if complete == text and len(self._ids) > 4 * CONTEXT_TOKENS:
            # Drop consumed tokens, but do not let the remaining ones begin inside a character.
            for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS // 2, -1):
                tail = self._tokenizer.decode(self._ids[-size:], skip_special_tokens=True)
                if tail and REPLACEMENT_CHARACTER not in tail and text.endswith(tail):
                    self._ids, self._consumed = self._ids[-size:], len(tail)
                    break
        return self._release(new, is_last=False)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _release(self, new: str, *, is_last: bool) -> str:
        """Release pending text up to a stop string, or up to a possible beginning of a stop string."""
        self._pending += new
        positions = [self._pending.index(stop) for stop in self._stop if stop in self._pending]
        self.stopped = bool(positions)
        end = min(positions, default=len(self._pending))
        if not positions and not is_last:
            longest = max(map(len, self._stop), default=1) - 1
            for start in range(max(0, end - longest), end):
                if any(stop.startswith(self._pending[start:]) for stop in self._stop):
                    end = start
                    break
        ready, self._pending = self._pending[:end], self._pending[end:]
        return ready
