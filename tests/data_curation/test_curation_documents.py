"""Documents: chunks, text extraction in a child process, hostile files, and conservation of rows."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common.runtime.errors import EngineMissingError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import (
    document_blocks,
    document_reader,
    extraction_process,
    file_readers,
    section_chunks,
)
from components.data_curation.reading.document_blocks import Block, is_hard_wrapped, parse_markdown
from components.data_curation.reading.document_extractors import Extractor
from components.data_curation.reading.extraction_limits import ExtractionSettings
from components.data_curation.reading.file_lines import FileContent
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.raw_records import Record, UnreadableRecord
from components.data_curation.reading.section_chunks import TokenBudget, split_sections
from components.data_curation.reading.source_files import list_sources
from components.data_curation.reading.source_settings import SourceSettings
from tests.common.test_yaml_loading import NESTED_ALIASES
from tests.data_curation.document_files import (
    SCANNED_PAGE,
    build_docx,
    build_epub,
    build_pdf,
    build_pptx,
    build_xlsx,
    build_zip,
    pdf_grid,
    pdf_lines,
    pdf_text,
    word_paragraph,
    word_table,
)

LEFT_COLUMN = (
    "The pump must be vented before it is started",
    "since trapped air damages the seal and voids",
    "the warranty of the whole installation. Open the",
    "valve slowly and wait for a steady flow of wa-",
    "ter without bubbles at the upper outlet.",
)
RIGHT_COLUMN = (
    "Right column text follows the left column and",
    "continues with other instructions for people who",
    "maintain the pump in the field every summer. Never",
    "use solvents on the seal because they dissolve it",
    "and the warranty then ends.",
)
WRAPPED_PROSE = "\n\n".join(["\n".join((*LEFT_COLUMN[:3], "valve slowly, and wait."))] * 4) + "\n"


@pytest.fixture
def read_file(tmp_path):
    """Return the function that writes a file and reads its records."""

    def read(name: str, data: bytes | str, documents: dict[str, object] | None = None, **config: object):
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        (source,) = list_sources([name], tmp_path)
        return list(read_records(source, DataCurationConfig(documents=documents or {}, **config)))

    return read


def get_texts(records) -> list[str]:
    return [record.fields["text"] for record in records if isinstance(record, Record)]


def get_reasons(records) -> list[tuple[int, str]]:
    return [(record.line, record.reason) for record in records if isinstance(record, UnreadableRecord)]


# --- Markdown and plain text ------------------------------------------------------------------------------------------

MARKDOWN = """---
title: Guide
tags: [pump, seal]
date: 2024-01-02
---
# Install the `tool`

An introduction that an editor
has wrapped.

## Linux <!-- a comment -->

- one
- two

| name | value |
|---|---|
| a | 1 |

```py
x = 1  # not a heading
```

Setext of
two lines
=========

Last *words*.
"""


def test_markdown_becomes_sections_with_headings_and_front_matter(read_file) -> None:
    records = read_file("guide.md", MARKDOWN)
    assert get_texts(records) == [
        "# Install the `tool`\n\nAn introduction that an editor has wrapped.",
        "## Linux <!-- a comment -->\n\n- one\n- two\n\n| name | value |\n|---|---|\n| a | 1 |\n\n```py\nx = 1  # not a heading\n```",
        "# Setext of two lines\n\nLast *words*.",
    ]
    assert [record.fields["section"] for record in records][::2] == ["Install the tool", "Setext of two lines"]
    assert [record.line for record in records] == [1, 2, 3]
    assert all(record.fields["title"] == "Guide" for record in records)
    assert records[0].fields["front_matter"] == {"title": "Guide", "tags": ["pump", "seal"], "date": "2024-01-02"}


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_other_text_units_of_markdown_are_unchanged(read_file, unit) -> None:
    texts = get_texts(read_file("a.md", "# One\n\ntext\nmore\n", text_unit=unit))
    assert (
        texts
        == {
            "line": ["# One", "text", "more"],
            "paragraph": ["# One", "text\nmore"],
            "file": ["# One\n\ntext\nmore\n"],
        }[unit]
    )


def test_unit_of_a_text_does_not_depend_on_the_size_of_the_pieces() -> None:
    data = (WRAPPED_PROSE * 500).encode()
    for size in (1000, 64 * 1024, len(data)):
        pieces = iter([data[start : start + size] for start in range(0, len(data), size)])
        records = list(file_readers.read_text(FileContent("a.txt", pieces), DataCurationConfig()))
        assert len(records) < 1000
    sample, content = FileContent("a.txt", iter([b"ab", b"cd", b"ef"])).take_sample(3)
    assert (sample, b"".join(content.chunks)) == (b"abc", b"abcdef")


def test_wrapped_prose_is_a_stream(read_file, monkeypatch) -> None:
    paragraphs = [WRAPPED_PROSE.split("\n\n")[0].replace("pump", f"pump {number}") for number in range(300)]
    data = gzip.compress("\n\n".join(paragraphs).encode())
    whole = read_file("a.txt.gz", data)
    monkeypatch.setattr(document_reader, "GROUP_CHARACTERS", 1000)
    grouped = read_file("b.txt.gz", data)
    assert len(grouped) > len(whole) > 10
    words = " ".join(paragraphs).split()
    assert " ".join(get_texts(whole)).split() == " ".join(get_texts(grouped)).split() == words
    cut = read_file("c.txt.gz", data[: len(data) // 2])
    assert get_texts(cut)
    assert [reason for _, reason in get_reasons(cut)] == ["the compressed file is truncated"]
    bad = read_file("d.txt", "\n\n".join(paragraphs).encode().replace(b"pump 7 ", b"pump \xff "))
    assert len(get_texts(bad)) >= len(whole) - 1
    assert [reason for _, reason in get_reasons(bad)] == ["not UTF-8: byte 0xff at position 9"]


@pytest.mark.parametrize("yaml", ["[a, b]", "a: [", "date: 2026-13-01", NESTED_ALIASES])
def test_front_matter_that_is_no_small_mapping_stays_text(yaml) -> None:
    text = f"---\n{yaml}\n---\nText.\n"
    assert document_blocks.split_front_matter(text) == ({}, text)


def test_wrapped_prose_is_read_by_section_and_other_text_by_line(read_file) -> None:
    assert len(get_texts(read_file("prose.txt", WRAPPED_PROSE))) == 1
    # Paragraphs of two lines below a title, as an editor breaks them at a fixed width.
    short = "Pumps\n\nThe pump must be vented before it is started, because trapped\nair damages the seal.\n\n"
    short += "A dry run voids the warranty of the whole installation, even if\nthe pump starts again.\n"
    assert [text.count("\n\n") for text in get_texts(read_file("short.txt", short))] == [2]
    manual = "NAME\n       pump - move water\n\nOPTIONS\n       -v     be verbose\n\n       -q     print nothing but\n              errors\n"
    assert [text.count("\n\n") for text in get_texts(read_file("manual.txt", manual))] == [2]
    titles = "What is a pump\nA pump moves water.\n\nWhat is a valve\nA valve stops water.\n"
    assert not is_hard_wrapped(titles)
    records = [f"A record of number {n} that is long enough to be wrapped" for n in range(30)]
    joined = "\n\n".join(records[:20]) + "\n" + "\n".join(line.lower() for line in records[20:23])
    assert not is_hard_wrapped(joined), "two missing blank lines"
    lines = "One question per line?\nAn answer that ends with a full stop.\n\nAnother question?\nAnd its answer.\n" * 8
    assert not is_hard_wrapped(lines)
    assert len(get_texts(read_file("lines.txt", lines))) == 32
    assert len(get_texts(read_file("asked.txt", lines, text_unit="section"))) == 1
    assert len(get_texts(read_file("kept.txt", WRAPPED_PROSE, text_unit="line"))) == 16


def test_markdown_that_is_not_utf8_is_one_unreadable_record(read_file) -> None:
    assert get_reasons(read_file("a.md", b"# One\n\ncaf\xe9\n")) == [(1, "not UTF-8: byte 0xe9 in line 3")]


# --- chunks -----------------------------------------------------------------------------------------------------------


def count_words(text: str) -> int:
    return len(text.split())


def split(blocks, max_tokens: int, overlap: int = 0):
    return list(split_sections(blocks, TokenBudget(max_tokens, overlap, count_words)))


def test_long_section_is_split_at_paragraphs_then_sentences_then_words() -> None:
    blocks = parse_markdown("# H\n\none two three\n\nfour five six\n\n" + "A b c d. E f g h. " * 2 + "\n\n" + "w " * 25)
    chunks = split(blocks, 10)
    assert [chunk.text for chunk in chunks[:3]] == [
        "# H\n\none two three\n\nfour five six",
        "A b c d. E f g h.",
        "A b c d. E f g h.",
    ]
    assert all(chunk.tokens <= 10 for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks[3:]).replace(" ", "") == "w" * 25
    assert {chunk.section for chunk in chunks} == {("H",)}


def test_table_is_split_between_rows_with_its_header() -> None:
    rows = [f"| row{number} | {number} |" for number in range(9)]
    chunks = split(parse_markdown("\n".join(["# H", "", "| a | b |", "|---|---|", *rows])), 26)
    assert all("| a | b |\n|---|---|\n" in chunk.text and chunk.tokens <= 26 for chunk in chunks)
    assert [row for chunk in chunks for row in chunk.text.splitlines() if "row" in row] == rows


def test_code_block_is_closed_in_every_chunk() -> None:
    lines = [f"x{number} = {number}" for number in range(20)]
    chunks = split(parse_markdown("\n".join(["~~~ py", *lines, "~~~"])), 20)
    assert all(chunk.text.startswith("~~~ py\n") and chunk.text.endswith("\n~~~") for chunk in chunks)
    assert [line for chunk in chunks for line in chunk.text.splitlines()[1:-1]] == lines
    assert len(chunks) > 2


def test_overlap_repeats_sentences_within_a_section() -> None:
    text = "# A\n\nOne one. Two two. Three three. Four four. Five five.\n\n# B\n\nSix six."
    assert [chunk.text for chunk in split(parse_markdown(text), 6, overlap=1)] == [
        "# A\n\nOne one. Two two.",
        "Two two. Three three. Four four.",
        "Four four. Five five.",
        "# B\n\nSix six.",
    ]


def test_no_character_of_a_text_is_lost() -> None:
    text = 'He said "Stop." Then 第一句。第二句。He (really!) left… “Why?” Nobody knows'
    for size in (1, 2, 3, 5, 50):
        pieces = split([Block("paragraph", text)], size)
        assert "".join("".join(piece.text.split()) for piece in pieces) == "".join(text.split())


def test_chunks_fit_the_tokenizer_of_the_base_model(tmp_path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    sentence = "A sentence of several words, with numbers 12345. "
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([sentence], trainers.BpeTrainer(vocab_size=300))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    budget = section_chunks.load_budget(DataCurationConfig(tokens={"base_model": str(tmp_path), "max_length": 64}))
    assert (budget.max_tokens, budget.note, len(budget.tokenizer)) == (63, "", 64)
    table = "| a | b |\n|---|---|\n" + "| cell | other |\n" * 40
    chunks = list(split_sections(parse_markdown(f"# Title\n\n{sentence * 60}\n\n{table}"), budget))
    assert max(len(tokenizer.encode(chunk.text).ids) for chunk in chunks) <= 63
    assert sum(chunk.tokens for chunk in chunks) > 0.7 * 63 * len(chunks)


def test_budget_without_a_tokenizer_is_estimated_with_the_reason() -> None:
    budget = section_chunks.load_budget(DataCurationConfig(tokens={"base_model": "/missing"}))
    assert (budget.max_tokens, budget.count("x" * 41), budget.tokenizer) == (512, 11, "")
    assert budget.note.startswith("chunk lengths are estimated at 4 characters per token: ")


# --- PDF --------------------------------------------------------------------------------------------------------------


def test_columns_of_a_pdf_are_read_one_after_the_other(read_file) -> None:
    """The file draws each line across both columns."""
    rows = zip(LEFT_COLUMN, RIGHT_COLUMN, strict=True)
    page = "".join(pdf_text(a, 60, 700 - 12 * i) + pdf_text(b, 320, 700 - 12 * i) for i, (a, b) in enumerate(rows))
    (record,) = read_file("manual.pdf", build_pdf([pdf_text("Pump manual", 60, 740, 18) + page], title="The pump"))
    left = " ".join(LEFT_COLUMN).replace("wa- ter", "water")
    assert record.fields == {
        "text": f"# Pump manual\n\n{left}\n\n{' '.join(RIGHT_COLUMN)}",
        "title": "The pump",
        "section": "Pump manual",
        "page": 1,
    }


def test_ruled_table_of_a_pdf_keeps_its_rows(read_file) -> None:
    grid = pdf_grid([["Part", "Torque"], ["M8", "25 | 26 Nm"], ["M10", "45 Nm"]], 60, 700)
    page = pdf_text("Before the table.", 60, 740) + grid + pdf_text("After the table.", 60, 600)
    table = "| Part | Torque |\n| --- | --- |\n| M8 | 25 \\| 26 Nm |\n| M10 | 45 Nm |"
    assert get_texts(read_file("a.pdf", build_pdf([page]))) == [f"Before the table.\n\n{table}\n\nAfter the table."]


def test_rows_of_a_table_without_rules_stay_apart(read_file) -> None:
    rows = [("Part", "Torque"), ("M8", "25 Nm"), ("M10", "45 Nm")]
    page = "".join(pdf_text(a, 60, 700 - 12 * i) + pdf_text(b, 200, 700 - 12 * i) for i, (a, b) in enumerate(rows))
    (text,) = get_texts(read_file("a.pdf", build_pdf([page])))
    assert text.split("\n\n") == ["Part Torque", "M8 25 Nm", "M10 45 Nm"]


def test_headers_are_removed_and_footnotes_do_not_divide_sentences(read_file) -> None:
    def margins(number: int) -> str:
        return pdf_text("Company confidential", 60, 815, 8) + pdf_text(f"Page {number}", 280, 20, 8)

    pages = [
        margins(1)
        + pdf_lines(["A sentence that continues on the next page", "after the footnotes is joined with the"], 60, 120)
        + pdf_lines(["1 A footnote.", "2 Another footnote."], 60, 80, 7),
        margins(2) + pdf_lines(["rest of the sentence on page two."], 60, 760),
        margins(3) + pdf_text("The text of the third page.", 60, 760),
    ]
    (record,) = read_file("a.pdf", build_pdf(pages))
    assert record.fields["text"].split("\n\n") == [
        "A sentence that continues on the next page after the footnotes is joined with the rest of the sentence on page two.",
        "1 A footnote.",
        "2 Another footnote.",
        "The text of the third page.",
    ]
    assert (record.fields["page"], record.fields["last_page"], record.pages) == (1, 3, 3)


def test_chapter_titles_and_dot_leaders_are_removed_and_headings_of_two_pages_stay_apart(read_file) -> None:
    chapters = ["Chapter 1: Pumps"] * 2 + ["Chapter 2: Valves"] * 2
    texts = ["Open the case.", "Close the case.", "Turn the handle.", "Release the handle."]
    pages = [pdf_text(a, 60, 810) + pdf_text(b, 60, 700) for a, b in zip(chapters, texts, strict=True)]
    pages[0] += pdf_text("1.1 Seals . . . . . . . . . . 7", 60, 650) + pdf_text("Pumps", 60, 600, 16)
    pages[1] = pdf_text("Maintenance", 60, 760, 16) + pages[1]
    records = read_file("a.pdf", build_pdf(pages))
    assert [text.split("\n\n") for text in get_texts(records)] == [
        ["Open the case."],
        ["# Pumps", "# Maintenance", "Close the case.", "Turn the handle.", "Release the handle."],
    ]


@pytest.mark.parametrize("matrix", ["0 1 -1 0 {y} {x}", "0 -1 1 0 {x} {y}", "-1 0 0 -1 {x} {y}"])
def test_rotated_text_follows_the_other_text(read_file, matrix) -> None:
    rotated = "".join(
        f"BT /F1 10 Tf {matrix.format(x=300 + 12 * i, y=300 + 12 * i)} Tm ({line}) Tj ET\n"
        for i, line in enumerate(["A table on its", "side is readable."])
    )
    texts = get_texts(read_file("a.pdf", build_pdf([rotated + pdf_text("Upright text.", 60, 100)])))
    paragraphs = texts[0].split("\n\n")
    assert paragraphs[0] == "Upright text."
    assert sorted(" ".join(paragraphs[1:]).split()) == sorted(["A", "table", "on", "its", "side", "is", "readable."])
    assert "A table on its" in texts[0]


def test_scanned_page_is_reported_and_the_others_are_read(read_file) -> None:
    records = read_file("a.pdf", build_pdf([pdf_text("A page with text.", 60, 700), SCANNED_PAGE, ""]))
    assert get_texts(records) == ["A page with text."]
    assert get_reasons(records) == [(2, "page 2 is an image without text; it requires OCR")]


# --- Office and EPUB --------------------------------------------------------------------------------------------------


def test_word_document_becomes_sections_with_tables(read_file) -> None:
    body = word_paragraph("Install", "Heading1") + word_paragraph("Run it.") + word_table([["a", "b"], ["1", "2"]])
    records = read_file("a.docx", build_docx(body + word_paragraph("Linux", "Heading2") + word_paragraph("Text.")))
    assert [record.fields["section"] for record in records] == ["Install", "Install > Linux"]
    assert records[0].fields["text"].endswith("# Install\n\nRun it.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |")


def test_tabs_of_a_word_document_separate_words(read_file) -> None:
    run = "<w:p><w:r><w:t>Torque:</w:t></w:r><w:r><w:tab/><w:t>25 Nm, twenty</w:t><w:noBreakHyphen/><w:t>five</w:t></w:r></w:p>"
    assert get_texts(read_file("a.docx", build_docx(run))) == ["Torque: 25 Nm, twenty-five"]


def test_slides_are_read_in_the_order_of_the_presentation_with_their_notes(read_file) -> None:
    slides = [("First", "one"), ("Second", "two"), ("", "three\nfour")]
    records = read_file("a.pptx", build_pptx(slides, order=(2, 3, 1), notes={2: "A note."}))
    assert [(record.fields.get("section"), record.fields["page"], record.fields["text"]) for record in records] == [
        ("Second", 1, "## Second\n\ntwo\n\nA note."),
        (None, 2, "- three\n- four"),
        ("First", 3, "## First\n\none"),
    ]
    assert [record.pages for record in records] == [3, 0, 0]
    reason = "3 slides; the limit is 2 (data_curation.documents.max_pages)"
    assert get_reasons(read_file("b.pptx", build_pptx(slides), {"max_pages": 2})) == [(1, reason)]


def test_table_of_a_slide_is_a_markdown_table(read_file) -> None:
    cells = "".join(
        f"<a:tc><a:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>" for text in ("a|b", "c")
    )
    table = f"<p:graphicFrame><a:graphic><a:graphicData><a:tbl><a:tr>{cells}</a:tr><a:tr>{cells}</a:tr></a:tbl></a:graphicData></a:graphic></p:graphicFrame>"
    (record,) = read_file("a.pptx", build_pptx([("Title", "x")], shapes=table))
    assert record.fields["text"] == "## Title\n\nx\n\n| a\\|b | c |\n| --- | --- |\n| a\\|b | c |"


def test_chapters_of_an_epub_are_sections(read_file) -> None:
    records = read_file("a.epub", build_epub(["<h1>One</h1><p>first</p>", "<h1>Two</h1><p>second</p>"], "The book"))
    assert get_texts(records) == ["# One\n\nfirst", "# Two\n\nsecond"]
    assert records[0].fields["title"] == "The book"


# --- web pages --------------------------------------------------------------------------------------------------------

SENTENCE = "This sentence of the main text is long enough for the extraction to keep it in the result."
PAGE = f"""<html><head><title>Guide</title></head><body><nav>menu</nav><article>
<h1>Install¶</h1><p>{SENTENCE} {SENTENCE} {SENTENCE}</p><h2>Linux <em>now</em></h2>
<ul><li>one item</li><li>two <b>items</b><ul><li>nested</li></ul></li></ul><p>{SENTENCE} {SENTENCE}</p>
<table><tr><th>A</th><th>B</th></tr><tr><td>1</td><td>2 | 3</td></tr></table><pre><code>x = 1
  y = 2</code></pre><p>{SENTENCE}</p></article><footer>foot</footer></body></html>"""


def test_page_becomes_sections_only_if_configured(read_file) -> None:
    records = read_file("a.html", PAGE, text_unit="section")
    assert get_texts(records) == [
        f"# Install\n\n{SENTENCE} {SENTENCE} {SENTENCE}",
        f"## Linux now\n\n- one item\n- two items\n  - nested\n\n{SENTENCE} {SENTENCE}\n\n"
        f"| A | B |\n| --- | --- |\n| 1 | 2 \\| 3 |\n\n```\nx = 1\n  y = 2\n```\n\n{SENTENCE}",
    ]
    assert records[1].fields["section"] == "Install > Linux now"
    assert [record.extracted_from for record in records] == ["", ""]
    (whole,) = read_file("b.html", PAGE)
    assert whole.extracted_from == "html"
    assert get_reasons(read_file("c.html", "<html><body></body></html>", text_unit="section")) == [
        (1, "no main text was found in the page")
    ]


@pytest.mark.parametrize("menu", ["<nav>menu</nav>", '<nav><div id="content-main">menu</div></nav>'])
@pytest.mark.parametrize("container", ["", "<div>"])
def test_headings_and_lists_remain_in_a_page_without_a_main_element(read_file, container: str, menu: str) -> None:
    page = PAGE.replace("<article>", container).replace("</article>", container.replace("<", "</"))
    page = page.replace("<nav>menu</nav>", menu)
    sections = read_file("a.html", page, text_unit="section")
    assert get_texts(sections) == get_texts(read_file("b.html", PAGE, text_unit="section"))
    (whole,) = read_file("c.html", page)
    assert whole.fields["text"].startswith("Install")
    assert "- nested" in whole.fields["text"]


# --- spreadsheets -----------------------------------------------------------------------------------------------------

WORKBOOK = build_xlsx(
    {
        "Tickets": [
            ["question", "when", None, "count"],
            ["q1", ("date", 45293), "x", 3],
            [],
            ['[{"role": "user"}]', ("date", 45293.5), True, 1.5],
        ],
        "Empty": [],
        "Repeated": [["a", " a"], [1, 2]],
    }
)


def test_spreadsheet_rows_become_records_by_the_header(read_file) -> None:
    others, *records = read_file("a.xlsx", WORKBOOK)
    assert others.reason == "2 other sheets are not read: 'Empty', 'Repeated'; set `sheet` for this source"
    assert [(record.line, record.fields) for record in records] == [
        (2, {"question": "q1", "when": "2024-01-02", "column 3": "x", "count": 3}),
        (4, {"question": [{"role": "user"}], "when": "2024-01-02T12:00:00", "column 3": True, "count": 1.5}),
    ]


def test_sheets_of_one_file_are_two_sources(tmp_path) -> None:
    (tmp_path / "a.xlsx").write_bytes(
        build_xlsx({"Questions": [["q", "a"], ["Why?", "So."]], "Notes": [["note"], ["Later."]]})
    )
    entries = [
        {"path": "a.xlsx", "sheet": "Questions", "columns": {"prompt": "q", "completion": "a"}},
        {"path": "a.xlsx", "sheet": 2, "columns": {"text": "note"}},
    ]
    config = DataCurationConfig(sources=entries)
    records = [record for source in list_sources(config.sources, tmp_path) for record in read_records(source, config)]
    assert {"text": "Later."} in [record.fields for record in records]
    assert {"prompt": "Why?", "completion": "So."} in [record.fields for record in records]
    assert len(records) == 2


@pytest.mark.parametrize(
    ("sheet", "reason"),
    [
        ("Empty", "the sheet 'Empty' is empty"),
        ("3", "the header contains the column 'a' more than once"),
        ("Other", "no sheet 'Other'; the file has the sheets 'Tickets', 'Empty', 'Repeated'"),
        ("4", "no sheet '4'; the file has the sheets 'Tickets', 'Empty', 'Repeated'"),
    ],
)
def test_sheet_is_chosen_by_name_or_number(sheet, reason) -> None:
    content = FileContent("a.xlsx", iter([WORKBOOK]), SourceSettings(sheet=sheet))
    assert get_reasons(document_reader.read_spreadsheet(content, DataCurationConfig())) == [(1, reason)]


# --- hostile files ----------------------------------------------------------------------------------------------------

TEXT_PAGE = pdf_text("Some text.", 60, 700)
ENTITY = '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
ENCRYPTED_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le") + bytes(99)
HOSTILE_FILES = {
    "encrypted.pdf": (build_pdf([TEXT_PAGE], is_encrypted=True), "the file is encrypted; decrypt it"),
    "long.pdf": (
        build_pdf([TEXT_PAGE], page_count=10_000),
        "10,000 pages; the limit is 2,000 (data_curation.documents.max_pages)",
    ),
    "truncated.pdf": (build_pdf([TEXT_PAGE])[:500], "damaged: "),
    "word.pdf": (build_docx(word_paragraph("x")), "not a .pdf file: it does not begin with %PDF-"),
    "pdf.docx": (build_pdf([TEXT_PAGE]), "damaged or not a .docx file: "),
    "slides.docx": (build_pptx([("a", "b")]), "not a .docx file: the archive has no word/document.xml"),
    "encrypted.docx": (ENCRYPTED_OFFICE, "the file is encrypted; decrypt it"),
    "legacy.docx": (ENCRYPTED_OFFICE[:90], "a legacy Office file, not .docx; save it as .docx"),
    "bomb.docx": (
        build_docx(word_paragraph("x"), **{"word/media/a.xml": bytes(11_000_000)}),
        "11,000,000 bytes after decompression, 10,",
    ),
    "large.docx": (
        build_docx("", **{f"word/{n}.bin": bytes(9_000_000) for n in range(2)}),
        "18,001,",
    ),
    "entity.docx": (
        build_docx("<w:p><w:r><w:t>&x;</w:t></w:r></w:p>", prolog=ENTITY),
        "a part of the file has a document type",
    ),
    "entity.xlsx": (build_zip({"xl/workbook.xml": f"{ENTITY}<workbook/>"}), "a part of the file has a document type"),
    "encrypted.xlsx": (ENCRYPTED_OFFICE, "the file is encrypted; decrypt it"),
    "damaged.xls": (ENCRYPTED_OFFICE, "damaged or not a .xls file: "),
    "text.ods": (b"question;answer", "damaged or not a .ods file: "),
    "members.docx": (
        build_zip({str(number): "" for number in range(20_001)}),
        "20,001 files in the archive; the limit is 20,000",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_file_is_one_unreadable_record(read_file, name) -> None:
    data, reason = HOSTILE_FILES[name]
    ((line, found),) = get_reasons(records := read_file(name, data, {"max_expanded_bytes": 12_000_000}))
    assert line == 1
    assert found.startswith(reason)
    assert not get_texts(records)


def test_empty_document_has_no_record(read_file) -> None:
    assert read_file("empty.pdf", b"") == []


def test_compressed_document_is_read_and_its_damage_reported(read_file) -> None:
    data = gzip.compress(build_pdf([TEXT_PAGE]))
    assert get_texts(read_file("a.pdf.gz", data)) == ["Some text."]
    assert get_reasons(read_file("b.pdf.gz", data[:-20])) == [(1, "the compressed file is truncated")]


@pytest.fixture
def extract(tmp_path, monkeypatch):
    """Return the function that extracts a file with an extractor that the child process imports from a test module."""

    def run(name: str, seconds: int = 20):
        path = tmp_path / name
        path.write_bytes(b"x")
        settings = ExtractionSettings(path.suffix, 10, 1_000_000, seconds)
        return extraction_process.extract(path, settings)

    monkeypatch.setattr(extraction_process, "WORKER_MODULE", "tests.data_curation.faulty_extraction_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    extraction_process.stop_worker()
    yield run
    extraction_process.stop_worker()


def test_crash_timeout_and_memory_limit_end_only_their_file(extract) -> None:
    reasons = {
        ".crash": "the text extraction crashed (SIGSEGV)",
        ".slow": "the text extraction did not end within 1 second (data_curation.documents.timeout_seconds)",
        ".memory": "the extraction needs more than 4 GiB of memory",
        ".write": "damaged or not a .write file: OSError: [Errno 27] File too large",
        ".raise": "damaged or not a .raise file: KeyError: 'missing'",
    }
    for suffix, reason in reasons.items():
        (part,) = extract(f"file{suffix}", seconds=1 if suffix == ".slow" else 20)
        assert part.reason == reason
    assert extract("file.good") == [Block("paragraph", "before")]


def test_killed_child_process_is_an_error_and_the_next_file_is_read(extract, monkeypatch) -> None:
    extract("file.good")
    (worker,) = extraction_process._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(extraction_process._Worker, "is_usable", lambda self: True)  # it ends after the check
        with pytest.raises(EngineMissingError, match=r"ended \(exit code -9\)"):
            extract("file.good")
    assert extract("file.good") == [Block("paragraph", "before")]


def test_child_process_ends_with_its_parent(extract) -> None:
    extract("file.good")
    (worker,) = extraction_process._workers
    worker.process.stdin.close()
    assert worker.process.wait(timeout=10) == 0


@pytest.mark.long
def test_extraction_is_killed_with_its_parent(tmp_path) -> None:
    """Kills a process that waits for a file, and waits for the end of its two descendants."""
    (tmp_path / "file.slow").write_bytes(b"x")
    program = (
        "import sys, pathlib; from components.data_curation.reading import extraction_limits, extraction_process as p; "
        "p.WORKER_MODULE = 'tests.data_curation.faulty_extraction_worker'; "
        "p.extract(pathlib.Path(sys.argv[1]), extraction_limits.ExtractionSettings('.slow', 1, 1, 60))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "file.slow")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        wait_until(lambda: len(list_descendants(parent.pid)) == 2)
        descendants = list_descendants(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in descendants))


def list_descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_missing_package_is_an_error_before_any_file_is_read(tmp_path, monkeypatch) -> None:
    from components.data_curation.reading import source_files

    (tmp_path / "a.pdf").write_bytes(b"")
    monkeypatch.setitem(
        source_files.BINARY_EXTRACTORS, ".pdf", Extractor(lambda *_: iter(()), {"not_there": "not-there"})
    )
    with pytest.raises(EngineMissingError) as error:
        list_sources(["a.pdf"], tmp_path)
    assert (
        error.value.message
        == "data_curation.sources: reading a.pdf requires the package not-there, which is not installed"
    )
    assert error.value.hint == "Run: pip install 'tuneline[documents]'"


# --- whole curations --------------------------------------------------------------------------------------------------


@pytest.mark.daft
def test_folder_of_documents_conserves_rows_and_reports_them(tmp_path, curate_files, read_rows) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    files = {name: data for name, (data, _) in HOSTILE_FILES.items()}
    files |= {
        "a.md": MARKDOWN.encode(),
        "b.txt": WRAPPED_PROSE.encode(),
        "c.txt": b"A line about pumps.\nAnother line about seals.\n",
        "d.pdf": build_pdf([pdf_lines(LEFT_COLUMN, 60, 700), SCANNED_PAGE]),
        "e.docx": build_docx(word_paragraph("Install", "Heading1") + word_paragraph("Run the installer of the pump.")),
        "f.pptx": build_pptx([("Safety", "Wear gloves at the pump.")]),
        "g.epub": build_epub(["<h1>Valves</h1><p>Valves open slowly.</p>"]),
        "h.jsonl": b'{"text": "A record about gaskets."}\n',
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    artifact = curate_files(folder, documents={"max_expanded_bytes": 12_000_000})
    summary = artifact.manifest.summary
    rows = summary["rows"]
    assert rows["in"] == rows["kept"] + rows["quarantined"] + sum(rows["rejected"].values())
    assert (rows["in"], rows["quarantined"]) == (
        3 + 1 + 2 + 1 + 1 + 1 + 1 + 1 + len(HOSTILE_FILES) + 1,
        len(HOSTILE_FILES) + 1,
    )
    types = summary["documents"]["types"]
    assert types["pdf"] == {"files": 5, "chunks": 1, "pages": 2, "pages_without_text": 1}
    assert sorted(types) == ["docx", "epub", "md", "pdf", "pptx", "txt"]
    assert {"kreuzberg", "lxml", "markdown-it-py", "pdfplumber", "pypdfium2"} == set(summary["documents"]["extractors"])
    page = (artifact.path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Documents" in page
    assert ".txt files with wrapped paragraphs are read by section" in page
    kept = [row for split in ("train", "validation", "test") for row in read_rows(artifact, split)]
    meta = [json.loads(row["meta"]) for row in kept if row["meta"]]
    assert {"section": "Safety", "page": 1} in meta


@pytest.mark.daft
@pytest.mark.long
def test_equal_documents_give_equal_datasets_with_any_number_of_workers(tmp_path, curate_files, monkeypatch) -> None:
    """Curates twice, once in worker processes: more than 3 seconds of CPU."""
    from components.data_curation import prepared_chunks

    files = {
        "a.pdf": build_pdf([pdf_lines(LEFT_COLUMN, 60, 700), SCANNED_PAGE, pdf_lines(RIGHT_COLUMN, 60, 700)]),
        "b.docx": build_docx(word_paragraph("Install", "Heading1") + word_paragraph("Run the installer of the pump.")),
        "c.md": MARKDOWN.encode(),
        "d.xlsx": build_xlsx({"Texts": [["text"], ["A text about valves."], ["A text about seals."]]}),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = [tmp_path / name for name in files]
    one = curate_files(*paths, workers=1)
    extraction_process.stop_worker()
    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    two = curate_files(*reversed(paths), out="again", workers=2)
    assert (one.sha256, one.manifest.summary) == (two.sha256, two.manifest.summary)


@pytest.mark.daft
def test_tokenizer_and_length_are_part_of_the_key(tmp_path, curate_files) -> None:
    from components.data_curation import stage

    sources = {}
    for name in ("a.md", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
        sources[name] = stage._list_inputs(list_sources([name], tmp_path), (), (), stage.ScoringInputs())
    config = DataCurationConfig()
    longer = DataCurationConfig(tokens={"max_length": 99})
    for name, inputs in sources.items():
        digests = {stage._compute_recipe_digest(inputs, stage._dump_settings(one), 1) for one in (config, longer)}
        assert len(digests) == (2 if name == "a.md" else 1)


@pytest.mark.long
def test_two_hundred_word_files_share_one_extraction_process(tmp_path, monkeypatch) -> None:
    """Needs more than 3 seconds of CPU on a slow machine. Starting one interpreter per file takes a minute."""
    data = build_docx(word_paragraph("Title", "Heading1") + word_paragraph("Some text. " * 200))
    for number in range(200):
        (tmp_path / f"{number}.docx").write_bytes(data)
    commands, start_process = list[object](), subprocess.Popen

    def record(command: list[str], *arguments: Any, **named: Any) -> subprocess.Popen[str]:
        commands.append(command)
        return start_process(command, *arguments, **named)

    monkeypatch.setattr(extraction_process.subprocess, "Popen", record)
    records = [r for source in list_sources(["*.docx"], tmp_path) for r in read_records(source, DataCurationConfig())]
    assert len(records) == 400
    assert len(commands) <= 1  # none if an earlier test's process is in use
