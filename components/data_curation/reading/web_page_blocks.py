"""Blocks of a web page's main text, with the headings, lists, tables and code that trafilatura finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.data_curation.reading import web_pages
from components.data_curation.reading.document_blocks import Block, DocumentInfo, Part, build_table
from components.data_curation.reading.extraction_limits import ExtractionSettings, UnreadableDocumentError

if TYPE_CHECKING:
    from lxml.etree import _Element

DEFAULT_HEADING_LEVEL = 2
LIST_INDENT = "  "
PERMALINK_SIGNS = "¶#§"  # at the end of headings of documentation pages


def extract_web_page(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the title and the blocks of an HTML page."""
    from lxml import etree

    xml, title = web_pages.extract_main_xml(web_pages.decode_page(path.read_bytes()))
    main = etree.fromstring(xml.encode(), etree.XMLParser(resolve_entities=False)).find("main") if xml else None
    blocks = [] if main is None else list(_iterate_blocks(main))
    if not blocks:
        raise UnreadableDocumentError("no main text was found in the page")
    yield DocumentInfo(title)
    yield from blocks


def _iterate_blocks(container: _Element) -> Iterator[Block]:
    if text := _join_words(container.text or ""):
        yield Block("paragraph", text)
    for element in container:
        text = _join_words("".join(element.itertext()))
        if element.tag == "list":
            yield Block("list", "\n".join(_iterate_items(element, "")))
        elif element.tag == "table":
            rows = [[_join_words("".join(cell.itertext())) for cell in row] for row in element.iter("row")]
            yield Block("table", build_table(rows)) if len(rows) > 1 else Block("paragraph", text)
        elif element.tag == "code" and "\n" in (code := "".join(element.itertext()).strip("\n")):
            fence = max(re.findall("`{3,}", code), default="``") + "`"
            yield Block("code", f"{fence}\n{code}\n{fence}")
        elif element.tag == "head" and text.rstrip(PERMALINK_SIGNS):
            level = re.sub(r"\D", "", element.get("rend") or "")
            yield Block("heading", text.rstrip(PERMALINK_SIGNS).strip(), int(level or DEFAULT_HEADING_LEVEL))
        elif any(inner.tag in ("head", "list", "p", "table") or "\n" in (inner.text or "") for inner in element):
            yield from _iterate_blocks(element)
        elif text:
            yield Block("paragraph", text)
        if text := _join_words(element.tail or ""):
            yield Block("paragraph", text)


def _iterate_items(items: _Element, indent: str) -> Iterator[str]:
    """Yield the lines of a list, with nested lists indented."""
    for item in items:
        nested = item.findall("list")
        if own := _join_words(" ".join([item.text or "", *map(_get_inline_text, item)])):
            yield f"{indent}- {own}"
        for one in nested:
            yield from _iterate_items(one, indent + LIST_INDENT)


def _get_inline_text(element: _Element) -> str:
    """Return the text of an element in a list item and the text after it, without nested lists."""
    text = "" if element.tag == "list" else "".join(element.itertext())
    return text + (element.tail or "")


def _join_words(text: str) -> str:
    return " ".join(text.split())
