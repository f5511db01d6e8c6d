"""Incremental decoding of tokens to text, with stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.triton_packaging.python_backend.text_stream import REPLACEMENT_CHARACTER, TextStream
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
WORDS = st.lists(
    st.sampled_from(["list", " fox", "ü", "你好", "🦊", "<|im_end|>", "e\u0301", "\ufffd", "ab", "\n"]), max_size=40
)
STOPS = st.lists(st.sampled_from(["x", "fox", "好🦊", "ab\n", "\n\n", "l"]), max_size=3)


def decode_incrementally(tokens: list[int], stop: list[str], one_by_one: bool = True) -> tuple[list[str], TextStream]:
    """Decode tokens and return the pieces of text and the finished stream."""
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for part in [[token] for token in tokens] if one_by_one else [tokens]:
        pieces.append(stream.feed(part))
        if stream.stopped:
            break
    return [*pieces, stream.flush()], stream


def decode_all(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


@given(words=WORDS, one_by_one=st.booleans())
def test_pieces_concatenate_to_the_decoded_text(words: list[str], one_by_one: bool) -> None:
    tokens = TOKENIZER("".join(words))["input_ids"]
    pieces, stream = decode_incrementally(tokens, [], one_by_one)
    assert "".join(pieces) == decode_all(tokens)
    assert stream.token_count == len(tokens)


@given(tokens=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=80))
def test_arbitrary_tokens_decode_as_in_one_call(tokens: list[int]) -> None:
    pieces, _ = decode_incrementally(tokens, [])
    assert "".join(pieces) == decode_all(tokens)
    assert not any(piece.endswith(REPLACEMENT_CHARACTER) for piece in pieces[:-1])


@given(words=WORDS, stop=STOPS)
def test_text_ends_before_the_first_stop_string(words: list[str], stop: list[str]) -> None:
    tokens = TOKENIZER("".join(words))["input_ids"]
    pieces, stream = decode_incrementally(tokens, stop)
    text = decode_all(tokens[: stream.token_count])
    positions = [text.index(stop_string) for stop_string in stop if stop_string in text]
    assert "".join(pieces) == text[: min(positions, default=len(text))]
    assert stream.stopped == bool(positions)
    assert stream.stopped or stream.token_count == len(tokens)
    before = decode_all(tokens[: stream.token_count - 1])
    assert not any(stop_string in before for stop_string in stop)


def test_multi_token_characters_are_not_split() -> None:
    pieces, _ = decode_incrementally(TOKENIZER("你🦊")["input_ids"], [])
    assert [piece for piece in pieces if piece] == ["你", "🦊"]


def test_possible_stop_string_prefix_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ["END"])
    pieces = [stream.feed(TOKENIZER(text)["input_ids"]) for text in ("aE", "N", "x", "EN", "D!")]
    assert pieces == ["a", "", "ENx", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


@pytest.mark.parametrize("text", ["word " * 300, "你好" * 200])
def test_decoding_work_grows_linearly(text: str) -> None:
    class CountingTokenizer:
        decoded_tokens = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            self.decoded_tokens += len(ids)
            return str(TOKENIZER.decode(ids, **options))

    tokenizer = CountingTokenizer()
    tokens = TOKENIZER(text)["input_ids"]
    stream = TextStream(tokenizer, [])
    assert "".join(stream.feed([token]) for token in tokens) + stream.flush() == text
    assert tokenizer.decoded_tokens < 40 * len(tokens)
