"""Promote several versions at the same moment, each from its own process.

    python -P -m tests.model_registry.concurrent_promotion NAME FORCE VERSION…

The parent loads Python and MLflow once and forks one process per version. Each process prints its result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import SilentReporter
from components.model_registry.stage import promote


def try_promotion(name: str, version: str, force: bool) -> dict[str, Any]:
    """Promote the version and return the promotion or the error."""
    reason = "all at once" if force else ""
    try:
        promotion = promote(
            name, version, by=f"process {version}", force=force, reason=reason, reporter=SilentReporter()
        )
    except TunelineError as error:
        return {"version": version, **error.as_dict()}
    return {"version": version, **promotion.model_dump(by_alias=True)}


def main() -> None:
    import mlflow  # noqa: F401 - loaded before the fork

    name, force, *versions = sys.argv[1:]
    gate_reader, gate_writer = os.pipe()
    children = []
    for version in versions:
        child = os.fork()
        if not child:
            os.close(gate_writer)
            os.read(gate_reader, 1)  # returns once the parent has started every process
            os.write(1, (json.dumps(try_promotion(name, version, force == "force")) + "\n").encode())
            os._exit(0)
        children.append(child)
    os.close(gate_writer)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
