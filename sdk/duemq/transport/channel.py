"""Client channels: one set of limits and keepalive for every caller of DueMQ.

gRPC does not survive a fork: its threads are not in the child, whatever the parent had closed
before, and a call there waits for ever (1.85 with asyncio; its own fork handlers crash or skip).
"""

import asyncio
import os
from collections.abc import Iterable, Sequence

import grpc
import grpc.aio

from duemq.errors import Closed
from duemq.settings import Tls

# Of one gRPC message, either way: a full batch (8 MiB) or pull answer with room to spare.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
# A peer that vanished without a word is noticed after KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS.
# The second counts for every ping, also one that waits behind megabytes on a slow line.
KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 10_000
# The same of a nameserver.  Behind one address there may be several, and the one that froze must
# not hide for longer than a lease lasts that a broker moved.
NAMESERVER_KEEPALIVE_MS = 2_500
NAMESERVER_KEEPALIVE_TIMEOUT_MS = 2_500
# Who goes on from a nameserver that died may be led to it again, until the cluster has noticed.
NAMESERVER_CONNECT_TIMEOUT_MS = 2_000
# Between attempts to connect.  gRPC's own ceiling of two minutes is too long after an outage.
RECONNECT_MS_MIN = 100
RECONNECT_MS_MAX = 500
# Of one attempt, its HTTP/2 handshake included; the name of gRPC's option misleads.
CONNECT_TIMEOUT_MS = 5_000
PING_TIMEOUT = "grpc.http2.ping_timeout_ms"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC waits for the answer of a keepalive ping as long as for any ping's, a minute by default
    # (github.com/grpc/grpc/pull/39239), whatever the option above says.
    (PING_TIMEOUT, KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MIN),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
    # A pod that restarts has its name at a new address: look again when a connection fails, and not
    # only after gRPC's 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", RECONNECT_MS_MAX),
    # Retries are ours (tenacity): gRPC's would buffer and hide what was sent.
    ("grpc.enable_retries", 0),
    # Two channels to one address share no connection: closing one must not disturb the other.
    ("grpc.use_local_subchannel_pool", 1),
)

_NAMESERVER_OPTIONS = dict(OPTIONS) | {
    "grpc.keepalive_time_ms": NAMESERVER_KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": NAMESERVER_KEEPALIVE_TIMEOUT_MS,
    PING_TIMEOUT: NAMESERVER_KEEPALIVE_TIMEOUT_MS,
    "grpc.min_reconnect_backoff_ms": NAMESERVER_CONNECT_TIMEOUT_MS,
}

FORK_REMEDY = "fork before the first client, or start processes by spawn"

_used_in: list[int] = []
"""The process that first used gRPC in an event loop."""


def check_fork() -> None:
    """Whoever is about to use gRPC in an event loop calls this.

    Raises Closed in a process that was forked from one that had done so.
    """
    if not _used_in:
        _used_in.append(os.getpid())
    elif _used_in[0] != os.getpid():
        raise Closed(f"this process was forked after its parent had clients: {FORK_REMEDY}")


def check(tls: Tls | None) -> None:
    """Raises InvalidArgument naming the file of certificates that is of no use."""
    if tls is not None:
        _credentials(tls)


def renewals(tls: Tls | None) -> int:
    """How often its files have changed so far.  Looks at them."""
    if tls is None:
        return 0
    from duemq.transport.tls import certificates  # as below

    return certificates(tls).renewals


def connect(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`.  Connects with the first call; close it with `await close()`.

    Raises InvalidArgument for files of certificates that never were of use.
    """
    return _channel(address, OPTIONS, tls)


def connect_to_nameserver(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """The same to a nameserver that is followed or told: its silence is noticed sooner."""
    return _channel(address, tuple(_NAMESERVER_OPTIONS.items()), tls)


def connect_blocking(address: str, tls: Tls | None) -> grpc.Channel:
    """As `connect`, for calls without an event loop; close it with `close()`."""
    if tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, _credentials(tls), options=OPTIONS)


def _channel(address: str, options: Sequence[tuple[str, int]], tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(tls), options=options)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    from duemq.transport.tls import credentials  # most clients need no ssl

    return credentials(tls)


class Channels:
    """To many addresses, one each; others once the certificates have changed.  Of one event loop.

    A channel keeps the certificate that it was made with, also where it connects anew.  So users
    ask for it each time; the one from before stays open until the next change, for the calls in it.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._open: dict[str, grpc.aio.Channel] = {}
        self._older: list[tuple[str, grpc.aio.Channel]] = []
        self._renewals = 0
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`; connects with the first call."""
        if self._tls is not None and (changes := renewals(self._tls)) != self._renewals:
            self._renewals = changes
            self._close(each for _, each in self._older)
            self._older, self._open = list(self._open.items()), {}
        found = self._open.get(address)
        if found is None:
            found = self._open[address] = connect(address, self._tls)
        return found

    @property
    def addresses(self) -> set[str]:
        """Where channels lead to."""
        return {*self._open, *(address for address, _ in self._older)}

    def leave(self, addresses: Iterable[str]) -> None:
        """Closes the channels to these addresses, with the calls in them."""
        left = set(addresses)
        going = [self._open.pop(address) for address in left & self._open.keys()]
        going += [each for address, each in self._older if address in left]
        self._older = [each for each in self._older if each[0] not in left]
        self._close(going)

    def _close(self, going: Iterable[grpc.aio.Channel]) -> None:
        for each in going:
            closing = asyncio.create_task(each.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all of them; returns when they are."""
        self.leave(self.addresses)
        await asyncio.gather(*self._closing)
