"""The network of cluster tests."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tests.cluster.network import CLIENT, Network

WAIT_S = 30


def test_while_it_is_found_out_who_connects_all_else_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, go, found = threading.Event(), threading.Event(), list[bool]()

    def who(network: Network, writer: asyncio.StreamWriter) -> str:
        looks.set()
        found.append(go.wait(WAIT_S))
        return CLIENT

    monkeypatch.setattr(Network, "_who", who)
    network = Network()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            front = network.front("a", f"127.0.0.1:{server.getsockname()[1]}")
            host, _, port = front.rpartition(":")
            with socket.create_connection((host, int(port)), WAIT_S) as connection:
                assert looks.wait(WAIT_S)
                with network.silent((CLIENT, "a")):
                    go.set()
                connection.sendall(b"x")
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(1) == b"x"
    finally:
        go.set()
        network.close()
    assert found == [True]
