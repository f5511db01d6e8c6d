"""A pytest plugin that records the CPU time of every test: `pytest -p tests.cpu_time --cpu-time=FILE`.

CPU time, unlike elapsed time, does not depend on what else the machine is doing. It includes the child processes that ended during the test.
`python -m tests.cpu_time FILE` prints the sums per test file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded_server

PHASES = ("setup", "call", "teardown")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-time", metavar="FILE", help="Append one JSON line per test with its CPU seconds to FILE.")


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + preloaded_server.get_cpu_seconds()


def _measure(item: pytest.Item, phase: str) -> Iterator[None]:
    cpu, elapsed = _cpu_seconds(), time.monotonic()
    try:
        yield
    finally:
        path = item.config.getoption("--cpu-time")
        if path:
            record = {
                "test": item.nodeid,
                "phase": phase,
                "cpu_seconds": round(_cpu_seconds() - cpu, 4),
                "seconds": round(time.monotonic() - elapsed, 4),
            }
            # One write with O_APPEND: lines of parallel workers never mix.
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(file, (json.dumps(record) + "\n").encode())
            os.close(file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _measure(item, "setup")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _measure(item, "call")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _measure(item, "teardown")


def main(path: str) -> None:
    """Print CPU and elapsed seconds and the number of tests per test file, the most expensive file first."""
    cpu: dict[str, float] = defaultdict(float)
    elapsed: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        file = record["test"].split("::")[0]
        cpu[file] += record["cpu_seconds"]
        elapsed[file] += record["seconds"]
        tests[file].add(record["test"])
    print(
        f"{sum(cpu.values()):9.1f} {sum(elapsed.values()):9.1f} {sum(map(len, tests.values())):6d}  total (CPU seconds, elapsed, tests)"
    )
    for file in sorted(cpu, key=lambda file: -cpu[file]):
        print(f"{cpu[file]:9.1f} {elapsed[file]:9.1f} {len(tests[file]):6d}  {file}")


if __name__ == "__main__":
    main(sys.argv[1])
