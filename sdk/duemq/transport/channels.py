"""Channels to many addresses, one each; another one once the certificates have changed."""

import asyncio
from collections.abc import Iterable

import grpc.aio

from duemq.settings import Tls
from duemq.transport import channel


class Channels:
    """Used from one event loop.

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
        if self._tls is not None and (renewals := channel.renewals(self._tls)) != self._renewals:
            self._renewals = renewals
            self._close(each for _, each in self._older)
            self._older, self._open = list(self._open.items()), {}
        found = self._open.get(address)
        if found is None:
            found = self._open[address] = channel.connect(address, self._tls)
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
