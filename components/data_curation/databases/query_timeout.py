"""The timeout of a query in an embedded database, which another thread interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupting_after(seconds: float, interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_timeout(seconds: float) -> tuple[str, str]:
    """Return the problem and the hint for a query that took too long."""
    return (
        f"did not complete the query within {seconds:g} {'second' if seconds == 1 else 'seconds'} (timeout_seconds)",
        "Raise timeout_seconds, or create an index on the columns of order_by.",
    )
