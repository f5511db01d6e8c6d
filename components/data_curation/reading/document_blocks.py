"""Blocks of a document: headings, paragraphs, lists, tables and code; the parser of Markdown.

Every extractor yields blocks and other parts. `section_chunks` joins the blocks to the rows of the dataset.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import yaml

from components.common.runtime import yaml_loading
from components.data_curation.reading.raw_records import JsonObject

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

BlockKind = Literal["heading", "paragraph", "list", "table", "code"]
MAX_MARKDOWN_NESTING = 20  # levels of quotes and lists
MAX_FRONT_MATTER_CHARACTERS = 64 * 1024
FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
HEADING_MARKUP = re.compile(r"[*`]+|(?<!\w)_+|_+(?!\w)|!?\[([^\]]*)\]\([^)]*\)|\\(?=[!-/:-@\[-`{-~])")
HARD_BREAK = re.compile(r"(?: {2,}|\\)$")
COMMENT = re.compile(r"\s*<!--.*?-->\s*", re.DOTALL)
MARKDOWN_KINDS: dict[str, BlockKind] = {
    "heading_open": "heading",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "table_open": "table",
    "fence": "code",
    "code_block": "code",
}

# Hard-wrapped prose: an editor or an e-mail program has broken the lines of each paragraph at a fixed width.
MIN_WRAPPED_LINES = 6  # fewer wrapped lines do not decide
MIN_CONTINUED_LINES = 2  # wrapped lines whose sentence continues in lower case decide, even in a short text
MIN_WRAPPED_WIDTH, MAX_WRAPPED_WIDTH = 40, 120  # characters of a wrapped line
MIN_WRAPPED_SHARE = 0.8  # of the lines that are not the last of their paragraph
MIN_INDENTED_SHARE = 0.5  # of the lines of an indented text, such as a manual page
MAX_SENTENCE_END_SHARE = 0.5  # a file with one sentence per line ends nearly all lines with a sentence
SENTENCE_END = re.compile(r"""[.!?…:;。！？]["'”’)\]]*$""")


@dataclass(frozen=True)
class Block:
    """A block of a document as Markdown.

    Attributes:
        kind: the kind of the block.
        text: its text; of a heading without the number signs.
        level: the level of a heading from 1; 0 for other blocks.
        page: the page or slide from 1; 0 if the format has no pages.
    """

    kind: BlockKind
    text: str
    level: int = 0
    page: int = 0


@dataclass(frozen=True)
class DocumentInfo:
    """Properties of a document: its title, its number of pages (0 if the format has none), and its front matter."""

    title: str = ""
    pages: int = 0
    front_matter: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class UnreadablePart:
    """A page, a row or a whole document (`number` 1) that cannot be read, with the reason."""

    number: int
    reason: str


@dataclass(frozen=True)
class TableRow:
    """A row of a spreadsheet: its number in the sheet, and its cells by the names in the header."""

    number: int
    fields: JsonObject


Part = DocumentInfo | Block | TableRow | UnreadablePart
PART_TYPES: dict[str, type[Part]] = {one.__name__: one for one in (DocumentInfo, Block, TableRow, UnreadablePart)}


@cache
def _get_markdown_parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": MAX_MARKDOWN_NESTING}).enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])  # the text of a block stays Markdown
    return parser


def parse_markdown(text: str, page: int = 0) -> Iterator[Block]:
    """Yield the blocks of a Markdown text. Comments and horizontal rules are dropped."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    for token in _get_markdown_parser().parse(text):
        if token.level or not token.map:
            continue
        source = "\n".join(lines[token.map[0] : token.map[1]]).strip("\n").rstrip()
        kind = MARKDOWN_KINDS.get(token.type, "paragraph")
        if token.type == "html_block":
            source = COMMENT.sub("", source)
        elif token.type == "paragraph_open":
            source = unwrap_lines(source)
        elif kind == "heading":
            is_underlined = token.markup in ("=", "-")
            source = source.rpartition("\n")[0] if is_underlined else source.strip().lstrip("#")
            source = " ".join(re.sub(r"\s#+\s*$", "", source).split())
        if source.strip() and token.type != "hr":
            yield Block(kind, source, int(token.tag[1:]) if kind == "heading" else 0, page)


def build_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is the header. Bars in cells are escaped, and short rows are filled."""
    width = max(len(row) for row in rows)
    lines = [[cell.replace("|", "\\|") for cell in row] + [""] * (width - len(row)) for row in rows]
    header, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([header, "|" + " --- |" * width, *others])


def remove_markup(heading: str) -> str:
    """Return the text of a heading without emphasis, code marks, links and escapes."""
    return HEADING_MARKUP.sub(r"\1", heading).strip()


def unwrap_lines(paragraph: str) -> str:
    """Join the lines of a paragraph, except at hard line breaks."""
    joined = ""
    for line in paragraph.split("\n"):
        stripped = line.strip()
        joined += f"{HARD_BREAK.sub('', stripped)}\n" if HARD_BREAK.search(line) else f"{stripped} "
    return joined.strip()


def split_front_matter(text: str) -> tuple[JsonObject, str]:
    """Return the YAML front matter of a Markdown text as JSON values ({} without front matter), and the rest."""
    match = FRONT_MATTER.match(text)
    if not match or len(match[1]) > MAX_FRONT_MATTER_CHARACTERS:
        return {}, text
    try:
        values = yaml_loading.load_yaml(match[1])
    except yaml.YAMLError:
        return {}, text
    return (_to_json_object(values), text[match.end() :]) if isinstance(values, dict) else ({}, text)


def _to_json_object(values: dict[Any, Any]) -> JsonObject:
    def convert(value: object) -> object:
        if isinstance(value, dict):
            return _to_json_object(value)
        if isinstance(value, list):
            return [convert(inner) for inner in value]
        return value if value is None or isinstance(value, bool | int | str) else str(value)

    return {str(key): convert(value) for key, value in values.items()}


def is_hard_wrapped(sample: str) -> bool:
    """Return whether the beginning of a plain text is prose with paragraphs of several wrapped lines, or is indented.

    Manual pages and similar texts are indented below their headings; their paragraphs are too short to show a width.
    """
    paragraphs = [block.strip("\n").split("\n") for block in re.split(r"\n[ \t]*\n", sample.replace("\r\n", "\n"))]
    filled = [line for lines in paragraphs for line in lines if line.strip()]
    indented = sum(line[0] in " \t" for line in filled)
    if len(filled) > len(paragraphs) > 1 and indented >= MIN_INDENTED_SHARE * len(filled):
        return True
    pairs = [(line.strip(), after.strip()) for lines in paragraphs for line, after in itertools.pairwise(lines)]
    wrapped = [line for line, _ in pairs]
    continued = sum(after[:1].islower() for _, after in pairs)
    has_many = len(wrapped) >= max(MIN_WRAPPED_LINES, len(paragraphs))
    # Paragraphs of two lines have few wrapped lines beside titles and paragraphs of one line.
    is_divided = sum(len(lines) > 1 for lines in paragraphs) >= len(paragraphs) / 2
    if len(paragraphs) < 2 or not (
        has_many or (is_divided and continued >= max(MIN_CONTINUED_LINES, len(wrapped) / 2))
    ):
        return False
    wide = sum(MIN_WRAPPED_WIDTH <= len(line) <= MAX_WRAPPED_WIDTH for line in wrapped)
    ended = sum(SENTENCE_END.search(line) is not None for line in wrapped)
    return wide >= MIN_WRAPPED_SHARE * len(wrapped) and ended <= MAX_SENTENCE_END_SHARE * len(wrapped)
