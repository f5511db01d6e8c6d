"""Tokens to text as they come: no character is cut in two, and stop strings are seen however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what decoding makes of the first bytes of a character
CONTEXT = 8  # tokens kept when older ones are let go: decoders treat the first token of a text differently


class TextStream:
    """The text of one answer.

    `feed` returns the text that is certain: what may be the beginning of a stop string, or of a character, is kept until it is known.
    Texts returned, with `rest` at the end, are together what decoding all tokens at once gives, cut before the first stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokens = 0
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._shown = 0  # characters of the text of _ids that were taken over into _held
        self._held = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became certain by these tokens. Tokens after a stop string are neither read nor counted."""
        if not self._stop:
            return self._read(tokens)
        ready = ""
        for token in tokens:
            ready += self._read([token])
            if self.stopped:
                break
        return ready

    def rest(self) -> str:
        """What was held back, once there are no more tokens."""
        return "" if self.stopped else self._take(self._decode()[self._shown :], last=True)

    def _read(self, tokens: Sequence[int]) -> str:
        self.tokens += len(tokens)
        self._ids.extend(tokens)
        text = self._decode()
        whole = text.rstrip(UNFINISHED)
        new, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if whole == text and len(self._ids) > 4 * CONTEXT:
            self._let_go(text)
        return self._take(new, last=False)

    def _let_go(self, text: str) -> None:
        """Forget tokens whose text is certain, at a place where the others do not begin in the middle of a character."""
        for size in range(CONTEXT, CONTEXT // 2, -1):
            kept = self._tokenizer.decode(self._ids[-size:], skip_special_tokens=True)
            if kept and UNFINISHED not in kept and text.endswith(kept):
                self._ids, self._shown = self._ids[-size:], len(kept)
                return

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _take(self, new: str, *, last: bool) -> str:
        """Move text on from what is held: up to a stop string, or up to what may still become one."""
        self._held += new
        places = [self._held.index(stop) for stop in self._stop if stop in self._held]
        self.stopped = bool(places)
        end = min(places) if places else len(self._held) - (0 if last else self._begun())
        ready, self._held = self._held[:end], self._held[end:]
        return ready

    def _begun(self) -> int:
        """How many characters at the end of what is held are the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
