"""uvicorn's HTTP protocol with limits for the time and size of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 * 1024
# Of a whole request on the wire. Chunks of one byte take six bytes.
MAX_REQUEST_BYTES = 16 << 20
HEAD_SECONDS = 10.0
ERROR = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose next request has no complete head in time, or exceeds a size limit.

    uvicorn limits neither with this parser: idle connections and endless headers or trailers would occupy memory.
    """

    cycle: Any  # uvicorn declares it as never None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._received, self._is_in_head = 0, True
        self._head_timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data unless a limit is exceeded."""
        if self.transport.is_closing():
            return
        self._received += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._received > (MAX_HEAD_BYTES if self._is_in_head else MAX_REQUEST_BYTES):
            self._refuse(b"431 Request Header Fields Too Large" if self._is_in_head else b"413 Content Too Large")

    def on_message_begin(self) -> None:
        """Start the timer of a head on a connection that was kept open."""
        super().on_message_begin()
        self._received, self._is_in_head = 0, True
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Accept the head."""
        self._stop_timer()
        self._received, self._is_in_head = 0, False
        super().on_headers_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._stop_timer()
        # A response that has begun cannot be replaced by an error.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(ERROR % status)
        self.transport.close()
