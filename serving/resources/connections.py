"""Closing a connection that gRPC holds.

gRPC's status for a call comes behind the answers that were written before it, so it never reaches a
client that does not read; and nothing in gRPC's Python API ends a call at once.  So the
connection's socket is shut down: gRPC notices at once, and frees what it held for it.
"""

import os
import socket
from contextlib import suppress
from urllib.parse import unquote

_MAPPED = "::ffff:"  # an IPv4 address, as a socket for both calls it


def shut(peer: str) -> bool:
    """Shuts the connection of this process to `peer`, as a call's `context.peer()` names it.

    False: there is none.
    """
    address = _address_of(peer)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, no socket, or not connected
            if _shut_if(int(name), address):
                return True
    return False


def _shut_if(file: int, address: tuple[str, int]) -> bool:
    copy = os.dup(file)  # the number may be another file's in a moment, the copy's is not
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        host, port = connection.getpeername()[:2]
        if (host.removeprefix(_MAPPED), port) != address:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def _address_of(peer: str) -> tuple[str, int]:
    """`ipv4:127.0.0.1:1234` and `ipv6:%5B::1%5D:1234` as a socket names its peer."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port)
