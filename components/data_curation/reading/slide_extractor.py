"""Text of PowerPoint files in the order of the presentation: titles, texts, tables and speaker notes.

kreuzberg 4.10 returns slides in the order of their file names and drops the notes. The parts are those of ECMA-376.
"""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.data_curation.reading.document_blocks import Block, DocumentInfo, Part, build_table
from components.data_curation.reading.extraction_limits import (
    ExtractionSettings,
    UnreadableDocumentError,
    check_archive,
    describe_excess,
)

if TYPE_CHECKING:
    from lxml.etree import _Element

PRESENTATION, PROPERTIES = "ppt/presentation.xml", "docProps/core.xml"
DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
SLIDE = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
LINK_ID = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
TITLE_ELEMENT = "{http://purl.org/dc/elements/1.1/}title"
TITLES, REPEATED_SHAPES = ("title", "ctrTitle"), ("dt", "ftr", "hdr", "sldImg", "sldNum")  # types of placeholders
HEADING_LEVEL = 2
LIST_INDENT = "  "


def extract_slides(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of the slides. A slide without a title has a heading without text."""
    check_archive(path, settings)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        links = _read_links(archive, PRESENTATION)
        targets = [links.get(item.get(LINK_ID), "") for item in _parse(archive, PRESENTATION).iter(f"{SLIDE}sldId")]
        slides = [target for target in targets if target in names]
        if len(slides) > settings.max_pages:
            raise UnreadableDocumentError(describe_excess(len(slides), "slides", settings.max_pages, "max_pages"))
        title = _parse(archive, PROPERTIES).findtext(f".//{TITLE_ELEMENT}") if PROPERTIES in names else ""
        yield DocumentInfo(" ".join((title or "").split()), len(slides))
        for number, name in enumerate(slides, 1):
            yield from _read_slide(_parse(archive, name), number)
            for target in _read_links(archive, name).values():
                if target.startswith("ppt/notesSlides/") and target in names:
                    yield from (block for block in _read_slide(_parse(archive, target), number) if block.text)


def _parse(archive: zipfile.ZipFile, name: str) -> _Element:
    from lxml import etree

    return etree.fromstring(archive.read(name), etree.XMLParser(resolve_entities=False, no_network=True))


def _read_links(archive: zipfile.ZipFile, name: str) -> dict[str, str]:
    """Return the parts that a part refers to, by identifier."""
    folder, base = posixpath.split(name)
    try:
        relationships = _parse(archive, f"{folder}/_rels/{base}.rels")
    except KeyError:
        return {}
    targets = ((one.get("Id", ""), one.get("Target", "")) for one in relationships)
    return {key: posixpath.normpath(posixpath.join("/", folder, target))[1:] for key, target in targets}


def _read_slide(slide: _Element, number: int) -> Iterator[Block]:
    """Yield the title of a slide, and then its other blocks in the order of the file."""
    title, blocks = "", list[Block]()
    for element in slide.iter(f"{SLIDE}sp", f"{DRAWING}tbl"):
        if element.tag == f"{DRAWING}tbl":
            rows = [[_get_text(cell) for cell in row.iter(f"{DRAWING}tc")] for row in element.iter(f"{DRAWING}tr")]
            if any(map(any, rows)):
                blocks.append(Block("table", build_table(rows), page=number))
            continue
        placeholder = element.find(f"{SLIDE}nvSpPr/{SLIDE}nvPr/{SLIDE}ph")
        kind = "" if placeholder is None else placeholder.get("type", "body")
        paragraphs = element.findall(f"{SLIDE}txBody/{DRAWING}p")
        texts = [(_get_level(paragraph), text) for paragraph in paragraphs if (text := _get_text(paragraph))]
        if kind in TITLES:
            title = title or " ".join(text for _, text in texts)
        elif texts and kind not in REPEATED_SHAPES:
            if len(texts) > 1:
                lines = "\n".join(f"{LIST_INDENT * level}- {text}" for level, text in texts)
                blocks.append(Block("list", lines, page=number))
            else:
                blocks.append(Block("paragraph", texts[0][1], page=number))
    yield Block("heading", title, HEADING_LEVEL, number)
    yield from blocks


def _get_level(paragraph: _Element) -> int:
    properties = paragraph.find(f"{DRAWING}pPr")
    level = "0" if properties is None else properties.get("lvl", "0")
    return int(level) if level.isdigit() else 0


def _get_text(element: _Element) -> str:
    """Return the text of a paragraph or cell, with spaces for line breaks and between paragraphs."""
    parts = (
        (part.text or "") if part.tag == f"{DRAWING}t" else " "
        for part in element.iter(f"{DRAWING}t", f"{DRAWING}br", f"{DRAWING}p")
    )
    return " ".join("".join(parts).split())
