"""A worker that trains a job and measures the memory of loading: `python -m tests.fine_tuning.loading_memory_worker JOB`.

Each rank writes the growth of its peak anonymous memory while the base model is loaded, in bytes, to `growth.RANK`. Anonymous
memory excludes the pages of mapped weights' files, which the kernel can drop.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from components.common.models import model_loading
from components.fine_tuning import worker


def read_anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def load_and_measure(*arguments: Any, **options: Any) -> Any:
    before, peak, stop = read_anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], read_anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return load_model(*arguments, **options)
    finally:
        stop.set()
        thread.join()
        Path(sys.argv[1]).with_name(f"growth.{os.environ['RANK']}").write_text(str(peak[0] - before))


if __name__ == "__main__":
    load_model = model_loading.load_model
    model_loading.load_model = load_and_measure
    sys.exit(worker.main(sys.argv[1]))
