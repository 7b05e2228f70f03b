"""Keeps an instance registered at every nameserver: a heartbeat each period and on a change.

One task a nameserver, so that a dead or slow one holds up no other.  A failed heartbeat is repeated
soon (jittered, a third of the period at the longest), so that a nameserver that comes back knows
everybody before it calls itself ready.  The version (epoch, counter) counts the changes of the
report.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from duemq.errors import DuemqError
from duemq.rpc import channel, status
from duemq.rpc.backoff import Backoff
from duemq.v1 import nameserver_pb2, nameserver_pb2_grpc

log = logging.getLogger(__name__)

# Of one heartbeat; never more than the period.
CALL_TIMEOUT_S = 3.0
DEREGISTER_TIMEOUT_S = 2.0
RETRY_S_MIN = 0.1
# Heartbeats come this much of a period apart, by lot: never later than a nameserver that has just
# started waits for them, and not all brokers' at once.
SPREAD = (0.7, 0.9)
# A report holds this many periods without another.
EXPIRY_PERIODS = 3

Report = nameserver_pb2.BrokerReport | nameserver_pb2.TimerReport


class Registration:
    """The heartbeats of one broker or timer shard.  Used from one event loop."""

    def __init__(
        self, nameservers: Sequence[str], period_s: float, epoch: int, report: Callable[[], Report]
    ) -> None:
        """`report` is called for every heartbeat; `epoch` is the start of this instance, in ms."""
        self._nameservers = tuple(dict.fromkeys(nameservers))
        self._period_s = period_s
        self._report = report
        self._version = nameserver_pb2.Version(epoch=epoch, counter=0)
        self._last: Report | None = None
        self._changes: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to register; does not wait for it."""
        for address in self._nameservers:
            self._changes[address] = asyncio.Event()
            name = f"registration {address}"
            self._tasks.append(asyncio.create_task(self._keep(address), name=name))

    def changed(self) -> None:
        """The report may be another now: tell every nameserver at once."""
        for change in self._changes.values():
            change.set()

    async def stop(self) -> None:
        """Ends the heartbeats and takes the instance out at every nameserver within reach."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*map(self._deregister, self._nameservers))

    def _request(self) -> nameserver_pb2.RegisterRequest:
        report = self._report()
        if report != self._last:
            self._last = type(report)()
            self._last.CopyFrom(report)  # type: ignore[arg-type]
            self._version.counter += 1
        expiry_ms = int(self._period_s * 1000 * EXPIRY_PERIODS)
        request = nameserver_pb2.RegisterRequest(version=self._version, expiry_ms=expiry_ms)
        if isinstance(report, nameserver_pb2.BrokerReport):
            request.broker.CopyFrom(report)
        else:
            request.timer.CopyFrom(report)
        return request

    async def _keep(self, address: str) -> None:
        change, failures = self._changes[address], _Failures(address, self._period_s)
        async with channel.connect(address) as connection:
            stub = nameserver_pb2_grpc.NameserverStub(connection)
            while True:
                change.clear()
                wait_s = await self._beat(stub, failures)
                try:
                    await asyncio.wait_for(change.wait(), wait_s)
                except TimeoutError:
                    continue

    async def _beat(self, stub: nameserver_pb2_grpc.NameserverStub, failures: "_Failures") -> float:
        """One heartbeat.  Returns how long to wait for the next, in seconds."""
        timeout_s = min(CALL_TIMEOUT_S, self._period_s)
        try:
            call = stub.Register(self._request(), timeout=timeout_s)
            answer = await status.answer(call)
        except DuemqError as error:
            return failures.failed(error)
        failures.succeeded(answer.accepted)
        return self._period_s * random.uniform(*SPREAD)

    async def _deregister(self, address: str) -> None:
        request = nameserver_pb2.DeregisterRequest(version=self._version)
        if isinstance(self._last, nameserver_pb2.TimerReport):
            request.timer = self._last.name
        elif self._last is not None:
            request.broker = self._last.name
        else:
            return
        try:
            async with channel.connect(address) as connection:
                stub = nameserver_pb2_grpc.NameserverStub(connection)
                await status.answer(stub.Deregister(request, timeout=DEREGISTER_TIMEOUT_S))
        except DuemqError as error:
            log.info("nameserver %s not told of the stop: %s", address, error)


class _Failures:
    """What a nameserver's failures in a row mean: when to try again, and what to log, once."""

    def __init__(self, address: str, period_s: float) -> None:
        self._address = address
        longest_s = max(RETRY_S_MIN, min(period_s / 3, 5.0))
        self._backoff = Backoff(RETRY_S_MIN, longest_s)
        self._known: bool | None = None

    def failed(self, error: DuemqError) -> float:
        if self._backoff.attempts == 0:
            log.warning("nameserver %s: %s; trying on", self._address, error)
        return self._backoff.next_s()

    def succeeded(self, accepted: bool) -> None:
        self._backoff.reset()
        if not accepted and self._known is not False:
            log.warning("nameserver %s knows a newer instance of this name", self._address)
        elif accepted and not self._known:
            log.info("registered at nameserver %s", self._address)
        self._known = accepted
