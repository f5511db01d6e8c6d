"""Many processes that promote at the same moment, for tests.

    python -P -m tests.model_registry.crowd NAME FORCE VERSION…

Python and MLflow are loaded once; then one process a version is forked. Each prints a line of JSON: what it was answered.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from components.common.errors import TunelineError
from components.common.progress import Silent
from components.model_registry.stage import promote


def attempt(name: str, version: str, force: bool) -> dict[str, Any]:
    """Promote, and say what came of it."""
    reason = "all at once" if force else ""
    try:
        moved = promote(name, version, by=f"process {version}", force=force, reason=reason, reporter=Silent())
    except TunelineError as error:
        return {"version": version, **error.as_dict()}
    return {"version": version, **moved.model_dump(by_alias=True)}


def main() -> None:
    import mlflow  # noqa: F401 - loaded before the processes part

    name, force, *versions = sys.argv[1:]
    start, go = os.pipe()
    children = []
    for version in versions:
        child = os.fork()
        if not child:
            os.close(go)
            os.read(start, 1)  # until every process is there
            os.write(1, (json.dumps(attempt(name, version, force == "force")) + "\n").encode())
            os._exit(0)
        children.append(child)
    os.close(go)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
