"""Constrains an answer to a JSON schema: llguidance computes the tokens that may continue the answer.

The sampler sets the scores of all other tokens to minus infinity before it chooses a token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

MAX_ERROR_CHARACTERS = 300


class GrammarError(Exception):
    """The schema is invalid, uses an unsupported keyword, or is too complex."""


class GrammarCompiler:
    """Compiles JSON schemas for the tokens of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]) -> None:
        """Prepare the tokenizer, which takes 0.3 seconds for 49,152 tokens and blocks all threads of the process.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: the model has no end-of-sequence token, or its tokenizer is unsupported.
        """
        from llguidance import LLParserLimits
        from llguidance.hf import from_tokenizer

        if not end_tokens:
            raise ValueError("the model has no end-of-sequence token")
        self._tokenizer = from_tokenizer(tokenizer, eos_token=sorted(end_tokens))
        # A mask is computed between two tokens of the whole batch. With these limits the slowest of 17 hostile schemas
        # took 8 ms per mask (49,152 tokens), with the defaults 35 ms. A lexer state takes 1 to 2 kB.
        self._limits = LLParserLimits(
            step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=10_000, verbose_errors=False
        )
        self._end_token = min(end_tokens)

    def compile(self, schema: str) -> AnswerGrammar:
        """Compile a schema for one answer. Runs in a separate thread: a large schema takes 0.1 seconds.

        Raises:
            GrammarError: the schema is invalid, uses an unsupported keyword, or is too complex.
        """
        from llguidance import LLMatcher

        # Small models produce white space without end where a grammar allows it. The separators are those of Python's
        # json.dumps, which models have seen in training. Overrides take precedence over options inside the schema.
        options: JsonCompileOptions = {
            "whitespace_flexible": False,
            "whitespace_pattern": None,
            "item_separator": ", ",
            "key_separator": ": ",
            "lenient": False,
        }
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise GrammarError(f"json_schema is invalid: {error}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"json_schema is invalid: {_shorten(matcher.get_error())}")
        return AnswerGrammar(matcher, self._end_token)


class AnswerGrammar:
    """The grammar of one answer, and the position of the answer in it."""

    def __init__(self, matcher: LLMatcher, end_token: int) -> None:
        self._matcher, self.end_token = matcher, end_token

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape (1, vocabulary), with minus infinity for tokens that cannot come next.

        Raises:
            GrammarError: the schema is too complex.
        """
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8).to(scores.device)
        self._check()
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=scores.device)) & 1
        # The output layer may be wider than the tokenizer's vocabulary.
        allowed = torch.nn.functional.pad(bits.flatten(), (0, scores.shape[-1] - bits.numel())).bool()
        if not allowed.any():
            raise GrammarError("json_schema is invalid: no token of the model can continue the answer")
        return scores.masked_fill(~allowed, -torch.inf)

    def advance(self, token: int) -> None:
        """Append a token to the answer.

        Raises:
            GrammarError: the schema is too complex.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"json_schema is too complex: {_shorten(self._matcher.get_error())}")


def _shorten(message: str) -> str:
    """Return a message of llguidance on one line, without the parser's state."""
    text = " ".join(message.split()).removesuffix("<non-verbose/>").rstrip()
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "…"
