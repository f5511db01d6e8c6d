"""Splits a document into chunks that fit a token budget: at headings, then paragraphs, then sentences.

A chunk never spans two sections. A table is split only between rows, with its header repeated; a list between items; a
code block between lines, and only if it exceeds the budget.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from components.common.runtime.errors import TunelineError
from components.data_curation.reading.document_blocks import Block, remove_markup

if TYPE_CHECKING:
    from components.data_curation.config import DataCurationConfig

DEFAULT_MAX_TOKENS = 512
CHARACTERS_PER_TOKEN = 4  # estimate for English text, without the tokenizer
MAX_TOKEN_CHARACTERS = 24  # mean of a text; a longer text certainly exceeds the budget
SECTION_SEPARATOR = " > "
SENTENCE_BREAK = re.compile(r"""(?:(?<=[.!?…])|(?<=[.!?…]["'”’)\]]))\s+(?=["'“‘(\[]*[^\sa-z])|(?<=[。！？])(?=\S)""")
CODE_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")
LIST_ITEM = re.compile(r"(?m)^(?=(?:[-*+]|\d{1,9}[.)])\s)")
BLOCK_BREAK, LINE_BREAK, WORD_BREAK = "\n\n", "\n", " "


@dataclass(frozen=True)
class TokenBudget:
    """The maximum length of a chunk and the function that measures it.

    Attributes:
        max_tokens: the maximum number of tokens of a chunk.
        overlap: the number of sentences that a chunk repeats from the previous chunk of its section.
        count: returns the number of tokens of a text.
        tokenizer: the sha256 of the tokenizer.json; "" if lengths are estimated.
        note: the reason for the estimate; "" otherwise.
    """

    max_tokens: int
    overlap: int
    count: Callable[[str], int]
    tokenizer: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chunk:
    """A part of a section.

    Attributes:
        text: the text as Markdown.
        section: the headings of the section, outermost first.
        tokens: the length in tokens; the sum of its parts, which may exceed the length of the whole by a few tokens.
        first_page: the first page; 0 if the format has no pages.
        last_page: the last page.
    """

    text: str
    section: tuple[str, ...]
    tokens: int
    first_page: int
    last_page: int


@dataclass(frozen=True)
class _Piece:
    """A part of a block that is not split further, and the separator from the previous part."""

    text: str
    separator: str
    page: int
    tokens: int
    header: str = ""  # begins a chunk with rows of a table or lines of a code block
    footer: str = ""  # ends a chunk with lines of a code block


# --- budget -----------------------------------------------------------------------------------------------------------


def load_budget(config: DataCurationConfig) -> TokenBudget:
    """Return the token budget of the configuration, with the tokenizer of the base model if it is on this machine."""
    max_tokens = config.documents.max_tokens
    if max_tokens is None:  # training appends one end-of-sequence token
        max_tokens = config.tokens.max_length - 1 if config.tokens.max_length else DEFAULT_MAX_TOKENS
    count, tokenizer, note = _load_token_counter(config.tokens.base_model)
    return TokenBudget(max_tokens, config.documents.overlap_sentences, count, tokenizer, note)


@functools.lru_cache(maxsize=4)
def _load_token_counter(base_model: str) -> tuple[Callable[[str], int], str, str]:
    """Return the function that counts tokens, the sha256 of the tokenizer.json, and the reason for an estimate."""
    from components.common.artifacts import hashing
    from components.common.models import model_loading, tokenization_check
    from components.common.models.standalone_tokenizer import load_tokenizer

    problem = "no base model is set (data_curation.tokens.base_model)"
    if base_model:
        try:
            folder = model_loading.find_local_tokenizer(base_model)
            if folder:
                tokenization_check.check_tokenization(folder, base_model)
                tokenizer = load_tokenizer(folder)
                sha256 = hashing.sha256_file(folder / "tokenizer.json")
                return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), sha256, ""
            problem = f"the tokenizer.json of {base_model} is not on this machine"
        except (TunelineError, OSError, ValueError) as error:
            problem = error.message if isinstance(error, TunelineError) else str(error)
    note = f"chunk lengths are estimated at {CHARACTERS_PER_TOKEN} characters per token: {problem}"
    return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN), "", note


# --- chunks -----------------------------------------------------------------------------------------------------------


def split_sections(blocks: Iterable[Block], budget: TokenBudget) -> Iterator[Chunk]:
    """Yield the chunks of a document.

    A heading begins a section, which ends at the next heading. Headings without a text below them belong to the section
    below. A heading without a name only ends the section above it.
    """
    path: list[tuple[int, str]] = []
    section: list[Block] = []
    for block in blocks:
        if block.kind == "heading":
            if any(one.kind != "heading" for one in section):
                yield from _split_section(section, path, budget)
                section = []
            path = [outer for outer in path if outer[0] < block.level]
            if not block.text:
                continue
            path.append((block.level, remove_markup(block.text)))
        section.append(block)
    if section:
        yield from _split_section(section, path, budget)


def _split_section(section: Sequence[Block], path: list[tuple[int, str]], budget: TokenBudget) -> Iterator[Chunk]:
    """Join the parts of a section to chunks, each as long as the budget allows."""
    names = tuple(name for _, name in path)
    current: list[_Piece] = []
    size = 0
    for piece in _split_blocks(section, budget):
        if current and size + piece.tokens > budget.max_tokens:
            yield _join_pieces(current, names, size)
            current = _repeat_sentences(current, piece, budget)
            size = sum(one.tokens for one in current)
            if piece.separator != BLOCK_BREAK:
                size += budget.count(piece.header + piece.footer)
        current.append(piece)
        size += piece.tokens
    yield _join_pieces(current, names, size)


def _split_blocks(section: Sequence[Block], budget: TokenBudget) -> Iterator[_Piece]:
    """Yield the parts of a section. The first part below the headings fits the budget together with them."""
    reserved = 0
    for block in section:
        room = budget.max_tokens - reserved
        pieces = list(_split_block(block, replace(budget, max_tokens=max(room, budget.max_tokens // 2))))
        reserved = reserved + sum(piece.tokens for piece in pieces) if block.kind == "heading" else 0
        yield from pieces


def _join_pieces(pieces: Sequence[_Piece], section: tuple[str, ...], tokens: int) -> Chunk:
    text = ""
    for number, piece in enumerate(pieces):
        text += piece.separator if text else ""
        if number == 0 or piece.separator == BLOCK_BREAK:
            text += piece.header
        text += piece.text
        if number == len(pieces) - 1 or pieces[number + 1].separator == BLOCK_BREAK:
            text += piece.footer
    pages = [piece.page for piece in pieces]
    return Chunk(text, section, tokens, min(pages), max(pages))


def _repeat_sentences(previous: Sequence[_Piece], following: _Piece, budget: TokenBudget) -> list[_Piece]:
    """Return the last sentences of a chunk, for the beginning of the following chunk; [] if they do not fit."""
    last = previous[-1]
    if not budget.overlap or last.header or following.header:
        return []
    joined = "".join(piece.separator + piece.text for piece in previous if not piece.header).strip()
    repeated = "".join(sum(_split_sentences(joined)[-budget.overlap :], ())).strip()
    tokens = budget.count(repeated)
    if repeated == joined or tokens + following.tokens > budget.max_tokens:
        return []
    return [_Piece(repeated, BLOCK_BREAK, last.page, tokens)]


# --- blocks -----------------------------------------------------------------------------------------------------------


def _split_block(block: Block, budget: TokenBudget) -> Iterator[_Piece]:
    """Yield a block as one part if it fits the budget; otherwise its rows, items, lines or sentences."""
    text = f"{'#' * block.level} {block.text}" if block.kind == "heading" else block.text
    is_long = len(text) > MAX_TOKEN_CHARACTERS * budget.max_tokens
    tokens = budget.max_tokens + 1 if is_long else budget.count(BLOCK_BREAK + text)
    if tokens <= budget.max_tokens:
        yield _Piece(text, BLOCK_BREAK, block.page, tokens)
    elif block.kind == "table":
        yield from _split_table(block, budget)
    elif block.kind == "code":
        yield from _split_code(block, budget)
    else:
        items = LIST_ITEM.split(text) if block.kind == "list" else [text]
        separator = BLOCK_BREAK
        for item in items:
            if item.strip():
                yield from _split_text(item.rstrip(), separator, block.page, budget)
                separator = LINE_BREAK


def _split_sentences(text: str) -> list[tuple[str, str]]:
    """Return (separator from the previous sentence, sentence) for each sentence."""
    sentences, separator, start = [], "", 0
    for match in SENTENCE_BREAK.finditer(text):
        sentences.append((separator, text[start : match.start()]))
        separator, start = LINE_BREAK if "\n" in match[0] else match[0][:1], match.end()
    return [*sentences, (separator, text[start:])]


def _split_text(text: str, separator: str, page: int, budget: TokenBudget) -> Iterator[_Piece]:
    """Yield the text if it fits the budget; otherwise its sentences, and of a longer sentence its words."""
    is_long = len(text) > MAX_TOKEN_CHARACTERS * budget.max_tokens  # counting it at every level would be slow
    tokens = budget.max_tokens + 1 if is_long else budget.count(separator + text)
    if tokens <= budget.max_tokens or len(text) < 2:
        yield _Piece(text, separator, page, tokens)
        return
    sentences = _split_sentences(text)
    if len(sentences) > 1:
        for number, (break_before, sentence) in enumerate(sentences):
            yield from _split_text(sentence, break_before if number else separator, page, budget)
        return
    middle = len(text) // 2
    space = text.rfind(" ", 1, middle + 1)
    cut = space if space > 0 else middle
    yield from _split_text(text[:cut].rstrip(), separator, page, budget)
    yield from _split_text(text[cut:].lstrip(), WORD_BREAK if space > 0 else "", page, budget)


def _split_table(block: Block, budget: TokenBudget) -> Iterator[_Piece]:
    """Yield the rows of a Markdown table, each with the header."""
    lines = block.text.split("\n")
    yield from _split_lines(lines[2:], "\n".join(lines[:2]) + LINE_BREAK, "", block, budget)


def _split_code(block: Block, budget: TokenBudget) -> Iterator[_Piece]:
    """Yield the lines of a code block. Every chunk opens and closes the fence."""
    lines = block.text.split("\n")
    if fence := CODE_FENCE.match(lines[0]):
        yield from _split_lines(lines[1:-1], lines[0] + LINE_BREAK, LINE_BREAK + fence[0], block, budget)
    else:
        yield from _split_lines(lines, "", "", block, budget)


def _split_lines(lines: Sequence[str], header: str, footer: str, block: Block, budget: TokenBudget) -> Iterator[_Piece]:
    """Yield lines with a header and footer for each chunk. A line that does not fit is split like a text."""
    frame_tokens = budget.count(BLOCK_BREAK + header + footer)
    if not lines or frame_tokens > budget.max_tokens // 2:
        yield from _split_text(block.text, BLOCK_BREAK, block.page, budget)
        return
    separator = BLOCK_BREAK
    for line in lines:
        tokens = budget.count(LINE_BREAK + line)
        if frame_tokens + tokens <= budget.max_tokens:
            tokens += frame_tokens if separator == BLOCK_BREAK else 0
            yield _Piece(line, separator, block.page, tokens, header, footer)
            separator = LINE_BREAK
        else:
            yield from _split_text(line, BLOCK_BREAK, block.page, budget)
            separator = BLOCK_BREAK
