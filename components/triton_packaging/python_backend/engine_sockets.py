"""Local sockets between the instances of an engine model and the streaming model of the same server.

Each instance listens on a socket in the abstract namespace. All processes of a server compute the beginning of its name;
a random end keeps other users from taking it in advance. Imports no torch, so that the streaming model stays small.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import struct
from pathlib import Path

# A listening socket in /proc/net/unix: the flag __SO_ACCEPTCON of the kernel.
LISTENING = b"00010000"
CONNECT_TIMEOUT_SECONDS = 5.0


def build_prefix(model: str, version: str) -> str:
    """Return the beginning of the names of an engine model's sockets, for models of the server that started this process.

    A process ID is unique only within its namespace, and containers may share a network.
    """
    server = f"{Path('/proc/self/ns/pid').readlink()} {os.getppid()}"
    return f"tuneline-{hashlib.sha256(f'{server} {model} {version}'.encode()).hexdigest()[:32]}-"


def create_address(prefix: str) -> str:
    """Return the name of a new socket."""
    return prefix + secrets.token_hex(8)


def find_addresses(prefix: str) -> list[str]:
    """Return the names of the sockets on which instances listen, sorted."""
    # Other processes' names may contain any byte, also line breaks.
    pattern = rb"^(?:\S+ +){3}%s .* @(%s[0-9a-f]+)$" % (LISTENING, prefix.encode("ascii"))
    found = re.findall(pattern, Path("/proc/net/unix").read_bytes(), re.MULTILINE)
    return sorted({name.decode("ascii") for name in found})


def connect(address: str) -> socket.socket | None:
    """Connect to an instance; return None if no process of this user accepts the connection in time."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_TIMEOUT_SECONDS)
    try:
        connection.connect(f"\0{address}")
        if is_same_user(connection):
            connection.settimeout(None)
            return connection
    except (ConnectionError, TimeoutError, BlockingIOError):  # no process listens, or its queue is full
        pass
    connection.close()
    return None


def is_open(connection: socket.socket) -> bool:
    """Whether the other end, which sends nothing, has not closed the connection. Does not wait."""
    try:
        return bool(connection.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())  # (pid, uid, gid)
