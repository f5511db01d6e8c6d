"""Tokens to text, as they come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.triton_packaging.python_backend.text import UNFINISHED, TextStream
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
WORDS = st.lists(st.sampled_from(["list", " fox", "ü", "你好", "🦊", "<|im_end|>", "e\u0301", "\ufffd", "ab", "\n"]), max_size=40)
STOPS = st.lists(st.sampled_from(["x", "fox", "好🦊", "ab\n", "\n\n", "l"]), max_size=3)


def told(tokens: list[int], stop: list[str], each: bool = True) -> tuple[list[str], TextStream]:
    """The pieces of text of a stream, and the stream at its end."""
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for part in [[token] for token in tokens] if each else [tokens]:
        pieces.append(stream.feed(part))
        if stream.stopped:
            break
    return [*pieces, stream.rest()], stream


def whole(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


@given(words=WORDS, each=st.booleans())
def test_the_pieces_are_together_what_all_tokens_say(words: list[str], each: bool) -> None:
    tokens = TOKENIZER("".join(words))["input_ids"]
    pieces, stream = told(tokens, [], each)
    assert "".join(pieces) == whole(tokens)
    assert stream.tokens == len(tokens)


@given(tokens=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=80))
def test_tokens_that_are_no_text_come_out_as_they_do_at_once(tokens: list[int]) -> None:
    pieces, _ = told(tokens, [])
    assert "".join(pieces) == whole(tokens)
    assert not any(piece.endswith(UNFINISHED) for piece in pieces[:-1])


@given(words=WORDS, stop=STOPS)
def test_the_text_ends_before_the_first_stop_string_however_tokens_cut_it(words: list[str], stop: list[str]) -> None:
    tokens = TOKENIZER("".join(words))["input_ids"]
    pieces, stream = told(tokens, stop)
    text = whole(tokens[: stream.tokens])
    found = [text.index(each) for each in stop if each in text]
    assert "".join(pieces) == text[: min(found, default=len(text))]
    assert stream.stopped == bool(found)
    assert stream.stopped or stream.tokens == len(tokens)
    before = whole(tokens[: stream.tokens - 1])
    assert not any(each in before for each in stop)


def test_a_character_is_given_whole() -> None:
    pieces, _ = told(TOKENIZER("你🦊")["input_ids"], [])
    assert [piece for piece in pieces if piece] == ["你", "🦊"]


def test_what_may_become_a_stop_string_is_kept_until_it_is_known() -> None:
    stream = TextStream(TOKENIZER, ["END"])
    given_out = [stream.feed(TOKENIZER(text)["input_ids"]) for text in ("aE", "N", "x", "EN", "D!")]
    assert given_out == ["a", "", "ENx", "", ""]
    assert stream.stopped
    assert stream.rest() == ""


@pytest.mark.parametrize("text", ["word " * 300, "你好" * 200])
def test_a_long_text_is_not_decoded_again_with_every_token(text: str) -> None:
    class Counting:
        read = 0

        def decode(self, ids: list[int], **how: Any) -> str:
            self.read += len(ids)
            return str(TOKENIZER.decode(ids, **how))

    counting = Counting()
    tokens = TOKENIZER(text)["input_ids"]
    stream = TextStream(counting, [])
    assert "".join(stream.feed([token]) for token in tokens) + stream.rest() == text
    assert counting.read < 40 * len(tokens)
