"""Run the flywheel: a model is served, its users' questions drift, and their corrections train the next version.

    python -m examples.flywheel [--folder DIR] [--port N] [--json]

An interrupted run resumes with the step that was not finished.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import InterruptedRunError, OutputOccupiedError, TunelineError
from components.common.workspace import job_folders
from examples.flywheel import page
from examples.flywheel.steps import STEPS, Flywheel, Json
from pipelines.gateway.addresses import listen

STORY_FILENAME, PAGE_FILENAME = "flywheel.json", "flywheel.html"


def run(folder: Path, port: int) -> Json:
    """Run the unfinished steps, write the page, and return the summary."""
    story_path = folder / STORY_FILENAME
    if folder.exists() and not story_path.exists() and any(folder.iterdir()):
        raise OutputOccupiedError(
            f"{folder} is not empty and does not contain this example", hint="Choose another folder with --folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not story_path.exists():
        artifact_folder.write_atomically(story_path, '{"steps": {}}\n')
    with job_folders.folder_lock(folder):
        story: Json = json.loads(story_path.read_text(encoding="utf-8"))
        flywheel = Flywheel(folder, port, {name: each["result"] for name, each in story["steps"].items()})
        if len(story["steps"]) < len(STEPS):
            listen("127.0.0.1", port).close()  # fails now and not after the training if the port is taken
        for number, step in enumerate(STEPS, 1):
            if step.__name__ in story["steps"]:
                continue
            print(f"[{number}/{len(STEPS)}] {step.__name__.replace('_', ' ')}", file=sys.stderr, flush=True)
            begun, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
            result = flywheel.results[step.__name__] = step(flywheel)
            seconds = round(time.monotonic() - start, 1)
            story["steps"][step.__name__] = {"begun": begun, "seconds": seconds, "result": result}
            artifact_folder.write_atomically(story_path, json.dumps(story, indent=1) + "\n")
    artifact_folder.write_atomically(folder / PAGE_FILENAME, page.render(story["steps"]))
    return {**page.summarize(story["steps"]), "page": str(folder / PAGE_FILENAME)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.flywheel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".tuneline/flywheel"),
        help="Folder of the example. Default: .tuneline/flywheel.",
    )
    parser.add_argument("--port", type=int, default=8017, help="Port of the gateway on 127.0.0.1. Default: 8017.")
    parser.add_argument("--json", action="store_true", help="Print the summary as one JSON object.")
    arguments = parser.parse_args()
    os.umask(0o027)  # captured questions are not readable by other users
    try:
        summary = run(arguments.folder.absolute(), arguments.port)
    except (TunelineError, KeyboardInterrupt) as ended:
        hint = "Run the same command again."
        error = ended if isinstance(ended, TunelineError) else InterruptedRunError("interrupted", hint=hint)
        if arguments.json:
            print(json.dumps({"error": error.as_dict()}))
        else:
            print(f"flywheel: {error.message}\n  {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(summary) if arguments.json else f"{page.describe(summary)}\npage: {summary['page']}")


if __name__ == "__main__":
    main()
