"""Scanned pages with tesseract, which needs seconds of CPU per page: long tier."""

from __future__ import annotations

from pathlib import Path

import pypdfium2
import pytest

from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import ocr
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.source_files import list_sources
from tests.data_curation.document_files import SCANNED_PAGE, Image, build_pdf, pdf_lines, pdf_text

pytestmark = [pytest.mark.tesseract, pytest.mark.long]


def render(stream: str) -> Image:
    """Return the image of a page."""
    bitmap = pypdfium2.PdfDocument(build_pdf([stream]))[0].render(scale=3, grayscale=True)
    rows = bytes(bitmap.buffer)
    return (
        bitmap.width,
        bitmap.height,
        b"".join(rows[i * bitmap.stride :][: bitmap.width] for i in range(bitmap.height)),
    )


def test_scanned_page_is_read_in_its_place(tmp_path: Path) -> None:
    image = render(pdf_lines(["The scanned page explains the inspec-", "tion of the pump."], 60, 700, 14))
    pages = [pdf_text("First page.", 60, 700), SCANNED_PAGE, pdf_text("Third page.", 60, 700)]
    (tmp_path / "a.pdf").write_bytes(build_pdf(pages, image=image))
    config = DataCurationConfig(documents={"ocr": "tesseract"})
    (record,) = read_records(list_sources(["a.pdf"], tmp_path)[0], config)
    assert record.fields["text"].split("\n\n") == [
        "First page.",
        "The scanned page explains the inspection of the pump.",
        "Third page.",
    ]
    assert (record.fields["page"], record.fields["last_page"], record.pages) == (1, 3, 3)


def test_image_without_text_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(build_pdf([SCANNED_PAGE]))
    config = DataCurationConfig(documents={"ocr": "tesseract"})
    (record,) = read_records(list_sources(["a.pdf"], tmp_path)[0], config)
    assert record.reason == "page 1 is an image in which tesseract found no text"


def test_missing_program_or_language_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ocr.check_program(["eng"])
    with pytest.raises(ConfigurationError, match=r"documents\.ocr_languages: 'xyz' is not installed; installed: eng"):
        ocr.check_program(["eng", "xyz"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineMissingError, match=r"documents\.ocr: tesseract requires the program"):
        ocr.check_program(["eng"])
