"""Child process that extracts untrusted documents: forks one process with resource limits for every file.

The parent process only imports the libraries, so that a file does not wait for the imports. A crash, or a file that
exceeds a limit, ends the forked process.
"""

#     python -m components.data_curation.reading.extraction_worker DESCRIPTOR      reads requests from standard input

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from components.common.runtime import process_control
from components.common.runtime.errors import get_first_line
from components.data_curation.reading.document_blocks import Part, UnreadablePart
from components.data_curation.reading.document_extractors import EXTRACTORS
from components.data_curation.reading.extraction_limits import (
    UNREADABLE_EXIT_CODE,
    ExtractionSettings,
    UnreadableDocumentError,
)

MAX_MEMORY_BYTES = 4 << 30  # of address space
MAX_OPEN_FILES = 256
EXIT_GRACE_SECONDS = 5  # between SIGXCPU and SIGKILL
MAX_REASON_CHARACTERS = 300
MEMORY_MESSAGE = f"the extraction needs more than {MAX_MEMORY_BYTES >> 30} GiB of memory"


def serve(descriptor: int) -> None:
    """Extract the requested files until the end of standard input.

    Args:
        descriptor: the file descriptor for the answers. Each line is a JSON array of the type and the fields of a part;
            the last line of a file is the exit code of its process, negative for a signal.
    """
    process_control.die_with_parent()
    for line in sys.stdin:
        request = json.loads(line)
        settings = ExtractionSettings(**request["settings"])
        for package in EXTRACTORS[settings.suffix].packages:
            importlib.import_module(package)
        pid = os.fork()
        if pid == 0:
            process_control.die_with_parent()
            os._exit(_extract_file(Path(request["path"]), settings, descriptor))
        _, status = os.waitpid(pid, 0)
        os.write(descriptor, f"\n{os.waitstatus_to_exitcode(status)}\n".encode())


def _extract_file(path: Path, settings: ExtractionSettings, descriptor: int) -> int:
    """Write the parts of a file, and return the exit code."""
    _limit_resources(settings.timeout_seconds)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogatepass") as answers:
        try:
            for part in EXTRACTORS[settings.suffix].extract(path, settings):
                answers.write(_to_line(part))
            return 0
        except UnreadableDocumentError as error:
            reason = str(error)
        except MemoryError:
            reason = MEMORY_MESSAGE
        except Exception as error:  # the libraries raise various exceptions for damaged files
            reason = f"damaged or not a {settings.suffix} file: {type(error).__name__}: {get_first_line(error)}"
        answers.write(_to_line(UnreadablePart(1, reason[:MAX_REASON_CHARACTERS])))
    return UNREADABLE_EXIT_CODE


def _limit_resources(timeout_seconds: int) -> None:
    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(timeout_seconds)
    for kind, soft, hard in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, timeout_seconds, timeout_seconds + EXIT_GRACE_SECONDS),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES, MAX_OPEN_FILES),
    ):
        current = resource.getrlimit(kind)[1]
        highest = hard if current == resource.RLIM_INFINITY else min(hard, current)
        resource.setrlimit(kind, (min(soft, highest), highest))


def _to_line(part: Part) -> str:
    return json.dumps([type(part).__name__, asdict(part)]) + "\n"


if __name__ == "__main__":
    serve(int(sys.argv[1]))
