"""Bytes of single tokens in byte-level and in SentencePiece vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from components.common.models import model_loading
from components.triton_packaging.python_backend.token_sampling import TokenScore
from components.triton_packaging.python_backend.token_text import TokenDecoder


@pytest.fixture(scope="module")
def byte_level(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return model_loading.load_tokenizer(model_loading.open_model(tiny_folder).tokenizer)


@pytest.fixture
def sentence_piece() -> PreTrainedTokenizerBase:
    """A vocabulary as Llama 2 and Gemma have it: words with a mark for the space, and tokens of single bytes."""
    vocabulary = {"<s>": 0, "▁fox": 1, "é": 2, "<0xE9>": 3, "<0x0A>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("text", ["What is a list?\n", "Gr\u00fc\u00dfe, \u4f60\u597d", "\x00\x7f\u00ad\u00a0"])
def test_bytes_of_the_tokens_form_the_text(byte_level: PreTrainedTokenizerBase, text: str) -> None:
    decoder = TokenDecoder(byte_level)
    tokens = byte_level(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(decoder.decode_bytes, tokens)) == text.encode()


def test_special_token_is_its_own_text(byte_level: PreTrainedTokenizerBase) -> None:
    assert TokenDecoder(byte_level).decode_bytes(byte_level.eos_token_id) == b"<|im_end|>"


def test_token_beyond_the_vocabulary_is_empty(byte_level: PreTrainedTokenizerBase) -> None:
    assert TokenDecoder(byte_level).decode_bytes(len(byte_level) + 5) == b""


def test_sentence_piece_tokens(sentence_piece: PreTrainedTokenizerBase) -> None:
    decoder = TokenDecoder(sentence_piece)
    assert [decoder.decode_bytes(token) for token in range(5)] == [b"<s>", b" fox", "é".encode(), b"\xe9", b"\n"]


def test_entry_has_the_form_of_the_openai_api(sentence_piece: PreTrainedTokenizerBase) -> None:
    """A part of a character has a replacement character as its text; JSON cannot contain an infinite number."""
    score = TokenScore(3, float("-inf"), [(1, -0.5), (2, float("nan"))])
    assert TokenDecoder(sentence_piece).describe(score) == {
        "token": "\ufffd",
        "logprob": -9999.0,
        "bytes": [0xE9],
        "top_logprobs": [
            {"token": " fox", "logprob": -0.5, "bytes": [32, 102, 111, 120]},
            {"token": "é", "logprob": -9999.0, "bytes": [0xC3, 0xA9]},
        ],
    }
