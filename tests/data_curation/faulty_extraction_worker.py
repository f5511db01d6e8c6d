"""The extraction worker with extractors that crash, exceed a limit or raise, for tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from components.data_curation.reading import extraction_worker
from components.data_curation.reading.document_blocks import Block, Part
from components.data_curation.reading.document_extractors import EXTRACTORS, Extractor
from components.data_curation.reading.extraction_limits import ExtractionSettings


def extract(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    yield Block("paragraph", "before")
    match settings.suffix:
        case ".crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case ".slow":
            time.sleep(60)
        case ".memory":
            bytearray(5 << 30)
        case ".write":
            path.with_suffix(".out").write_bytes(b"x")
        case ".raise":
            raise KeyError("missing")


if __name__ == "__main__":
    EXTRACTORS |= {
        suffix: Extractor(extract, {}) for suffix in (".crash", ".slow", ".memory", ".write", ".raise", ".good")
    }
    extraction_worker.serve(int(sys.argv[1]))
