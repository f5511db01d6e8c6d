"""Settings and limits of an extraction, and the check of a ZIP-based document before it is decompressed."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OFFICE_SUFFIXES = (".docx", ".pptx", ".xlsx")
DOCUMENT_TYPE_SEARCH_BYTES = 64 * 1024
OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # legacy and encrypted Office files
OLE_ENCRYPTED_STREAM = "EncryptedPackage".encode("utf-16-le")
SAMPLE_BYTES = 1 << 20  # searched for OLE_ENCRYPTED_STREAM
MAX_ZIP_MEMBERS = 20_000
MAX_COMPRESSION_RATIO = 500  # of a ZIP member above RATIO_MEMBER_BYTES; XML of real documents reaches about 100
RATIO_MEMBER_BYTES = 10_000_000
# A member that every file of the format contains.
REQUIRED_MEMBERS = {
    ".docx": "word/document.xml",
    ".pptx": "ppt/presentation.xml",
    ".xlsx": "xl/workbook.xml",
    ".epub": "META-INF/container.xml",
    ".ods": "content.xml",
}
UNREADABLE_EXIT_CODE = 1  # of the process that extracts a file; its last part is the reason
ENCRYPTED_MESSAGE = "the file is encrypted; decrypt it, or save it without a password"


class UnreadableDocumentError(Exception):
    """A document cannot be read. The message is the reason in the quarantine."""


@dataclass(frozen=True)
class ExtractionSettings:
    """The type of a file, the limits of data_curation.documents, and options of the extractors.

    Attributes:
        suffix: the suffix of the file, which decides the extractor.
        max_pages: the maximum number of pages or slides.
        max_expanded_bytes: the maximum size of the file, and of a ZIP-based file after decompression.
        timeout_seconds: the maximum time.
        sheet: the name or number of a spreadsheet's sheet; "" for the first sheet.
        ocr_languages: the languages of scanned pages; () to report scanned pages as unreadable.
    """

    suffix: str
    max_pages: int
    max_expanded_bytes: int
    timeout_seconds: int
    sheet: str = ""
    ocr_languages: tuple[str, ...] = ()


def describe_excess(found: int, unit: str, limit: int, key: str) -> str:
    """Return the reason for a document that exceeds a limit of data_curation.documents."""
    return f"{found:,} {unit}; the limit is {limit:,} (data_curation.documents.{key})"


def check_archive(path: Path, settings: ExtractionSettings) -> None:
    """Check the directory of a ZIP-based document before it is decompressed.

    Raises:
        UnreadableDocumentError: the file has another format, is damaged or encrypted, or exceeds a limit.
    """
    with path.open("rb") as file:
        start = file.read(SAMPLE_BYTES)
    if start.startswith(OLE_MAGIC):
        if OLE_ENCRYPTED_STREAM in start:
            raise UnreadableDocumentError(ENCRYPTED_MESSAGE)
        raise UnreadableDocumentError(f"a legacy Office file, not {settings.suffix}; save it as {settings.suffix}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_directory(members, settings)
            if settings.suffix in OFFICE_SUFFIXES:
                _check_document_types(archive)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise UnreadableDocumentError(f"damaged or not a {settings.suffix} file: {error}") from None


def _check_directory(members: Sequence[zipfile.ZipInfo], settings: ExtractionSettings) -> None:
    names = {member.filename for member in members}
    if len(members) > MAX_ZIP_MEMBERS:
        raise UnreadableDocumentError(f"{len(members):,} files in the archive; the limit is {MAX_ZIP_MEMBERS:,}")
    expanded = sum(member.file_size for member in members)
    if expanded > settings.max_expanded_bytes:
        raise UnreadableDocumentError(
            describe_excess(expanded, "bytes after decompression", settings.max_expanded_bytes, "max_expanded_bytes")
        )
    for member in members:
        if member.file_size > max(RATIO_MEMBER_BYTES, MAX_COMPRESSION_RATIO * member.compress_size):
            raise UnreadableDocumentError(
                f"{member.file_size:,} bytes after decompression, {member.compress_size:,} bytes before; the maximum ratio "
                f"is {MAX_COMPRESSION_RATIO}"
            )
    if any(member.flag_bits & 1 for member in members) or "META-INF/rights.xml" in names:
        raise UnreadableDocumentError(ENCRYPTED_MESSAGE)
    if (required := REQUIRED_MEMBERS.get(settings.suffix)) and required not in names:
        raise UnreadableDocumentError(f"not a {settings.suffix} file: the archive has no {required}")


def _check_document_types(archive: zipfile.ZipFile) -> None:
    """Reject document types: Office files have none (ECMA-376), and entities can refer to files or expand."""
    for name in archive.namelist():
        if name.endswith((".xml", ".rels")):
            with archive.open(name) as member:
                start = member.read(DOCUMENT_TYPE_SEARCH_BYTES).replace(b"\0", b"")
            if b"<!DOCTYPE" in start:
                raise UnreadableDocumentError(
                    "a part of the file has a document type (DOCTYPE), which Office files must not have"
                )
