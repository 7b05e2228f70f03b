"""Blocking calls to nameservers and brokers, for tools: no event loop, no pipeline, no group.

For what lives in a process with an event loop of its own, whose loop a second one would wake at
every event (the exporter of traces in brokers), or in processes that are forked and short-lived.

Not for several threads.  Made where it is used: connections survive neither a fork nor a pickle.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from duemq.errors import DuemqError, Unavailable
from duemq.settings import Addresses, Tls, nameservers_of
from duemq.transport import channel, status
from duemq.transport.closing import Closing

T = TypeVar("T")
Pick = Callable[[grpc.Channel], Callable[..., T]]
"""Which method of which stub: `lambda to: BrokerStub(to).Send`."""


class BlockingClient(Closing):
    """Connections to the servers of a cluster, made with the first call to each."""

    def __init__(
        self, nameservers: Addresses, call_timeout_s: float, tls: Tls | None = None
    ) -> None:
        """`call_timeout_s`: of one attempt.

        Raises InvalidArgument for what is no address, and for certificates that cannot be used.
        """
        self._tls = tls
        self._renewals = channel.renewals(tls)
        self.nameservers = nameservers_of(nameservers)
        self._call_timeout_s = call_timeout_s
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        """Closes the connections; the next call makes them anew."""
        for opened in self._channels.values():
            opened.close()
        self._channels.clear()

    def call(self, address: str, method: Pick[T], request: Message) -> T:
        """One attempt.  Raises DuemqErrors."""
        with _duemq_errors(address):
            return method(self._channel(address))(request, timeout=self._call_timeout_s)

    def first(
        self, address: str, method: Pick[Iterable[T]], request: Message, timeout_s: float
    ) -> T:
        """The first answer of a stream, which is ended then.  Raises DuemqErrors."""
        stream = method(self._channel(address))(request, timeout=timeout_s)
        try:
            with _duemq_errors(address):
                for answer in stream:
                    return answer
        finally:
            stream.cancel()  # type: ignore[attr-defined]  # it is a call, too
        raise Unavailable(f"{address}: the stream ended without an answer")

    def ask(self, method: Pick[T], request: Message) -> T:
        """The answer of the first nameserver that is there.  Raises DuemqErrors."""
        failures: list[DuemqError] = []
        for address in self.nameservers:
            try:
                return self.call(address, method, request)
            except DuemqError as error:
                if not error.retryable:
                    raise
                failures.append(error)
        raise failures[-1]

    def _channel(self, address: str) -> grpc.Channel:
        if (renewals := channel.renewals(self._tls)) != self._renewals:
            self._renewals = renewals
            self.close()  # a channel keeps the certificate that it was made with
        if address not in self._channels:
            self._channels[address] = channel.connect_blocking(address, self._tls)
        return self._channels[address]


@contextmanager
def _duemq_errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise status.from_rpc_error(error, address) from error
