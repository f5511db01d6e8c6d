"""The gateway's listening socket, and the rule for keys: only a loopback address works without them."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from components.common.runtime.errors import ConfigurationError, UsageError

BACKLOG = 512


class PortInUseError(UsageError):
    """Another process listens on the requested port."""

    kind = "port_in_use"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback interface: its name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_keys(host: str, keys: Path | None) -> None:
    """Raise ConfigurationError if other machines can reach the address, and no key file is given."""
    if keys is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host is {host}, which other machines can reach, and --keys is not set",
            hint="Create a key with `tuneline keys create NAME --keys keys.yaml`, and pass --keys keys.yaml.",
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; port 0 stands for any free port.

    Raises:
        PortInUseError: the port is in use.
        UsageError: the address or the port is not valid on this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"the HTTP port {port} on {host} is already in use",
                hint="Stop the process that listens on this port, or choose another port with --http-port (0: any free "
                "port).",
            ) from None
        raise UsageError(
            f"cannot listen on {host} port {port}: {error}", hint="Correct --host or --http-port."
        ) from None


def get_url(listener: socket.socket) -> str:
    """Return the URL at which this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
