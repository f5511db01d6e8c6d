"""Runs the gateway in an event loop until SIGINT or SIGTERM, and lets answers in progress finish."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from pipelines.gateway.application import Gateway, create_application
from pipelines.gateway.http_protocol import LimitedProtocol

MAX_CONNECTIONS = 1024
KEEP_ALIVE_SECONDS = 75
POLL_SECONDS = 0.1
SAVE_SECONDS = 1.0  # between two writes of the keys' token counts
MAX_LOG_BYTES = 64 << 20


class DrainingServer(uvicorn.Server):
    """A server that stops in two phases, instead of closing its port at once.

    During the shutdown delay, it is not ready but answers all requests, and closes the connection of each: load balancers and clients that
    keep connections open move to other servers without a failed request. Then it drains: it closes idle connections, whose
    clients did not see that it stops, and refuses new requests with 503.
    """

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, drain_seconds: float, shutdown_delay_seconds: float
    ) -> None:
        super().__init__(config)
        self._gateway, self._drain_seconds = gateway, drain_seconds
        self._shutdown_delay_seconds = shutdown_delay_seconds
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown delay at the first signal; stop at the second."""
        if self._gateway.is_stopping:
            self.should_exit = self.force_exit = True
            return
        self._gateway.is_stopping = True
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(self._shutdown_delay_seconds)
        self._gateway.start_draining()
        for connection in list(self.server_state.connections):  # idle ones now, others after their answer
            connection.shutdown()
        deadline = self._loop.time() + self._drain_seconds
        while self.server_state.tasks and self._loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True


def run_gateway(
    create_gateway: Callable[[], Gateway],
    listener: socket.socket,
    *,
    drain_seconds: float,
    shutdown_delay_seconds: float,
    log: Path | None,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        create_gateway: creates models, keys and limits; called in the event loop.
        listener: the listening socket.
        drain_seconds: time for answers in progress after the shutdown delay.
        shutdown_delay_seconds: time between the signal and the drain, in which requests are answered.
        log: file for the log, which is rotated, or None: standard error.
        on_ready: called when the gateway accepts requests.
    """
    output = (
        logging.StreamHandler(sys.stderr)
        if log is None
        else RotatingFileHandler(log, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    )
    logging.basicConfig(handlers=[output], level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("aiobotocore").setLevel(logging.WARNING)  # it logs where it found its credentials

    async def serve() -> None:
        gateway = create_gateway()
        config = uvicorn.Config(
            create_application(gateway),
            http=LimitedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
        )
        server = DrainingServer(config, gateway, drain_seconds, shutdown_delay_seconds)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready()
        while not serving.done():
            await asyncio.wait([serving], timeout=SAVE_SECONDS)
            await asyncio.to_thread(gateway.keys.save_usage)  # not per request: a file may be slow to write
        await serving
        await gateway.traffic.close()
        if gateway.capture is not None:
            await asyncio.to_thread(gateway.capture.close)
        await gateway.triton.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
