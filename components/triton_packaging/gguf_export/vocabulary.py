"""Tokenizers in the terms of llama.cpp: tokens, merges, pre-tokenizer, special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedTokenizerBase

PROBE_TEXT = "tuneline"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2_WORDS = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
# Published in the tokenizer.json of Qwen2 and Llama 3.
QWEN2_WORDS, LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
)  # fmt: skip


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp, and the steps of tokenizer.json that it implements.

    Attributes:
        key: value of `tokenizer.ggml.pre`.
        ignores_merges: a word that is a token is not split, even if no merges lead to the token.
    """

    key: str
    steps: Sequence[dict[str, Any]]
    ignores_merges: bool = False


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# The tokenizer of Mistral NeMo is missing: llama.cpp's "tekken" treats combining characters differently.
PRE_TOKENIZERS = (
    PreTokenizer("gpt-2", [GPT2_WORDS]),
    PreTokenizer("smollm", [DIGITS, GPT2_WORDS]),
    PreTokenizer("qwen2", [_split(QWEN2_WORDS), BYTES]),
    PreTokenizer("llama-bpe", [_split(LLAMA3_WORDS), BYTES], ignores_merges=True),
)


def find_pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTokenizer:
    """Return llama.cpp's equivalent of a tokenizer's pre-tokenizer.

    llama.cpp's converter recognizes tokenizers by a digest of the tokens of one text. The comparison of the steps also
    recognizes tokenizers with other vocabularies.

    Raises:
        ConfigurationError: llama.cpp has no equivalent tokenizer.
    """
    if not tokenizer.is_fast:
        raise _build_error("it has no tokenizer.json")
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    if problem := _find_problem(definition):
        raise _build_error(problem)
    outer, ignores_merges = definition["pre_tokenizer"] or {}, bool(definition["model"].get("ignore_merges"))
    inner = outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in inner]
    for known in PRE_TOKENIZERS:
        if steps == known.steps and ignores_merges == known.ignores_merges:
            return known
    raise _build_error(
        f"its pre-tokenizer is {json.dumps(steps, ensure_ascii=False)}, with ignore_merges {str(ignores_merges).lower()}"
    )


def _find_problem(definition: dict[str, Any]) -> str:
    """Return what llama.cpp does not implement of a tokenizer.json, apart from the pre-tokenizer; "" for nothing."""
    model, normalizer = definition["model"], definition["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        return f"its model is {model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}"
    if normalizer and normalizer["type"] != "NFC":
        return f"its normalizer is {normalizer['type']}; expected none or NFC"
    for token in definition["added_tokens"]:
        for option in ("single_word", "lstrip", "rstrip"):
            if token[option]:
                return f"its token {token['content']!r} has the option {option}"
    return ""


def _build_error(problem: str) -> ConfigurationError:
    keys = ", ".join(known.key for known in PRE_TOKENIZERS)
    return ConfigurationError(
        f"GGUF export does not support the tokenizer: {problem}. Supported: byte-level BPE with the pre-tokenizers {keys}",
        hint="Serve the package with `tuneline serve`, or choose another base model.",
    )


def add_vocabulary(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int, end_ids: Sequence[int]
) -> None:
    """Add a tokenizer and its chat template to the metadata of a file.

    Args:
        size: rows of the model's embedding; rows without a token become unused tokens.
        end_ids: tokens that end an answer.

    Raises:
        ConfigurationError: llama.cpp has no equivalent tokenizer, or cannot store its special tokens.
    """
    import gguf

    pre_tokenizer = find_pre_tokenizer(tokenizer)
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(tokens) >= size:
        raise _build_error(f"its token {max(tokens)} has no row in the embedding, which has {size} rows")
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for token in definition["added_tokens"]:
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(pre_tokenizer.key)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([types.get(number, gguf.TokenType.UNUSED) for number in range(size)])
    merges = definition["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    _add_end_tokens(writer, end_ids)
    plain, whole = tokenizer.encode(PROBE_TEXT, add_special_tokens=False), tokenizer.encode(PROBE_TEXT)
    begins, ends = whole[:1] == [tokenizer.bos_token_id], whole[-1:] == [tokenizer.eos_token_id]
    if whole != [*whole[:begins], *plain, *whole[len(whole) - ends :]]:
        raise _build_error("it adds tokens other than bos_token and eos_token to a text")
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    template = tokenizer.chat_template
    named = (
        [{"name": name, "template": text} for name, text in template.items()] if isinstance(template, dict) else None
    )
    writer.add_chat_template(named or template)


def _add_end_tokens(writer: gguf.GGUFWriter, end_ids: Sequence[int]) -> None:
    """Add the tokens that end an answer: of the text, the turn and the message. llama.cpp stops at each of them."""
    keys = ("eos", "eot", "eom")
    if not 0 < len(end_ids) <= len(keys):
        raise _build_error(f"an answer ends with one of {len(end_ids)} tokens; expected 1 to {len(keys)}")
    for key, number in zip(keys, end_ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
