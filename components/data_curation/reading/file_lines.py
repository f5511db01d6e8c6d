"""The lines of a file as a stream, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from components.data_curation.reading.raw_records import TruncatedFileError, too_long_message
from components.data_curation.reading.source_settings import SourceSettings


@dataclass(frozen=True)
class FileContent:
    """A file's name, its decompressed bytes in pieces, and how it is read."""

    file: str
    chunks: Iterator[bytes]
    settings: SourceSettings = field(default_factory=SourceSettings)

    def read_all(self) -> tuple[bytes, str]:
        """Return all readable bytes, and the reason if the file is truncated ("" if it is complete)."""
        pieces: list[bytes] = []
        try:
            pieces.extend(self.chunks)  # keeps the pieces before an exception
        except TruncatedFileError as error:
            return b"".join(pieces), str(error)
        return b"".join(pieces), ""

    def take_sample(self, size: int) -> tuple[bytes, FileContent]:
        """Return the first `size` bytes, and the whole content. The size of the pieces does not matter."""
        pieces: list[bytes] = []
        total, failure = 0, list[TruncatedFileError]()
        try:
            while total < size and (piece := next(self.chunks, None)) is not None:
                pieces.append(piece)
                total += len(piece)
        except TruncatedFileError as error:
            failure.append(error)

        def chain_pieces() -> Iterator[bytes]:
            yield from pieces
            for error in failure:
                raise error
            yield from self.chunks

        return b"".join(pieces)[:size], FileContent(self.file, chain_pieces(), self.settings)


@dataclass(frozen=True)
class MissingLine:
    """A line that cannot be read.

    Attributes:
        reason: the reason in the quarantine.
        has_odd_quotes: whether the line opens or closes a quoted CSV cell.
        is_file_end: whether the file is truncated at this line.
    """

    reason: str
    has_odd_quotes: bool = False
    is_file_end: bool = False


def read_lines(content: FileContent, max_bytes: int) -> Iterator[tuple[int, bytes | MissingLine]]:
    """Yield (number from 1, line). A line of more than `max_bytes` is a MissingLine and not held in memory."""
    number, parts, size = 1, [b""], 0  # the parts of the current line
    try:
        for chunk in content.chunks:
            first, *others = chunk.split(b"\n")
            parts, size = append_bounded(parts, size, first, max_bytes)
            for line in others:
                yield number, join_line(parts, size, max_bytes)
                number, parts, size = number + 1, [line], len(line)
    except TruncatedFileError as error:
        yield number, MissingLine(str(error), is_file_end=True)
        return
    if size:
        yield number, join_line(parts, size, max_bytes)


def append_bounded(parts: list[bytes], size: int, part: bytes, max_bytes: int) -> tuple[list[bytes], int]:
    """Append a part to a line. Of a line that is too long, keep only the parity of its quotation marks.

    Args:
        parts: the previous parts of the line; modified.
        size: the number of bytes in the previous parts.
        part: the next bytes of the line.
        max_bytes: the number of bytes above which a line is too long.

    Returns:
        The parts to keep, and the number of bytes in the line so far.
    """
    size += len(part)
    parts.append(part)
    if size > max_bytes:
        parts[:] = [b'"' * _has_odd_quotes(b"".join(parts))]
    return parts, size


def join_line(parts: list[bytes], size: int, max_bytes: int) -> bytes | MissingLine:
    """Return the line that `append_bounded` collected, or a MissingLine if the line exceeds `max_bytes`."""
    line = parts[0] if len(parts) == 1 else b"".join(parts)
    return MissingLine(too_long_message(max_bytes), _has_odd_quotes(line)) if size > max_bytes else line


def _has_odd_quotes(line: bytes) -> bool:
    return line.count(b'"') % 2 == 1


def decode_line(line: bytes) -> str:
    """Decode a line as UTF-8.

    Raises:
        ValueError: the line is not UTF-8; the message is the reason in the quarantine.
    """
    try:
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from None
