"""The local sockets between the instances of an engine model and its streaming model, in-process."""

from __future__ import annotations

import os
import socket

import pytest

from components.triton_packaging.python_backend import engine_sockets


def listen(address: str | bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0" + (address.encode() if isinstance(address, str) else address))
    listener.listen(1)
    return listener


def test_instances_of_a_model_are_found_until_they_close() -> None:
    prefix = engine_sockets.build_prefix("tiny", "1")
    assert prefix != engine_sockets.build_prefix("tiny", "2")
    addresses = sorted(engine_sockets.create_address(prefix) for _ in range(2))
    first, second = map(listen, addresses)
    with first, second:
        assert engine_sockets.find_addresses(prefix) == addresses
        connection = engine_sockets.connect(addresses[0])
        assert connection is not None
        accepted = first.accept()[0]
        with connection, accepted:
            assert engine_sockets.find_addresses(prefix) == addresses  # accepted connections have the listener's name
            assert engine_sockets.is_open(connection)
            accepted.close()
            assert not engine_sockets.is_open(connection)
        first.close()
        assert engine_sockets.find_addresses(prefix) == addresses[1:]
        assert engine_sockets.connect(addresses[0]) is None


@pytest.mark.parametrize("name", [b"a\nb", b"a\xff b", b"\n", b"a\n0: 2 0 00010000 1 1 1 @%s0123456789abcdef"])
def test_names_of_other_processes_do_not_disturb(name: bytes) -> None:
    prefix = engine_sockets.build_prefix(f"tiny-{os.getpid()}", "1")
    address = engine_sockets.create_address(prefix)
    with listen(name.replace(b"%s", prefix.encode())), listen(address):
        found = engine_sockets.find_addresses(prefix)
    assert address in found
    assert all(engine_sockets.connect(each) is None for each in found)  # both are closed now


def test_socket_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = engine_sockets.create_address(engine_sockets.build_prefix("tiny", "1"))
    with listen(address):
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert engine_sockets.connect(address) is None
