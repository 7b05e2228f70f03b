"""An HTTP proxy, which gRPC follows (`grpc_proxy`): it alone knows where a name leads.

So a process with one reaches only what the proxy lets it, and the proxy knows what it asked for.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from types import TracebackType
from typing import cast

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16


class _Tunnel(socketserver.StreamRequestHandler):
    """CONNECT HOST:PORT, then bytes both ways."""

    def handle(self) -> None:
        words = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        host, _, port = words[1].rpartition(":")
        proxy = cast("_Server", self.server).proxy
        proxy.asked.add(host)
        if host not in proxy.hosts:
            self.wfile.write(b"HTTP/1.1 502 no such host\r\n\r\n")
            return
        try:
            there = socket.create_connection((LOOPBACK, int(port)))
        except OSError:
            self.wfile.write(b"HTTP/1.1 502 nobody listens\r\n\r\n")
            return
        with there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pump, args=(there, self.connection), daemon=True)
            back.start()
            _pump(self.connection, there)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: ConnectProxy


class ConnectProxy:
    """A context manager.  `hosts`: names that lead to this machine; others lead nowhere."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = frozenset(hosts)
        self.asked: set[str] = set()
        """Hosts that anybody wanted a connection to."""
        self._server = _Server((LOOPBACK, 0), _Tunnel)
        self._server.proxy = self
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def __enter__(self) -> ConnectProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
