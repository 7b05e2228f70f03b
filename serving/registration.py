"""Keeps an instance registered at every nameserver: a heartbeat each period and on a change.

One task a nameserver, so that a dead or slow one holds up no other.  A failed heartbeat is repeated
soon (jittered, a third of the period at the longest), so that a nameserver that comes back knows
everybody before it calls itself ready.  The version (epoch, counter) counts the changes of the
report; how far replicas lag, and where a log ends, is told with the next heartbeat and makes no new
version.

A name belongs to one store while its process lives.  An instance that is refused for that must not
go on, unless a nameserver took it in before and the other one is younger: then that one goes.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime

from duemq.errors import DuemqError, Internal, InvalidArgument
from duemq.settings import Tls
from duemq.transport import channel, status
from duemq.transport.retrying import Backoff
from duemq.v1 import nameserver_pb2, stubs
from duemq_server.serving.process import lasting

log = logging.getLogger(__name__)

# Of one heartbeat; never more than the period.
CALL_TIMEOUT_S = 3.0
DEREGISTER_TIMEOUT_S = 2.0
# Of a nameserver that says nothing when a start asks for the name.
CHECK_TIMEOUT_S = 1.0
RETRY_S_MIN = 0.1
# Heartbeats come this much of a period apart, by lot: never later than a nameserver that has just
# started waits for them, and not all brokers' at once.
SPREAD = (0.7, 0.9)
# A report holds this many periods without another.
EXPIRY_PERIODS = 3

# Of a replica's report, what the nameservers do not take for a change either; as a log's end.
REPLICA_FIGURES = ("lag_bytes", "lag_s", "since_ms", "reason")

Report = nameserver_pb2.BrokerReport | nameserver_pb2.TimerReport


class Registration:
    """The heartbeats of one broker or timer shard.  Used from one event loop."""

    def __init__(
        self,
        nameservers: Sequence[str],
        period_s: float,
        epoch: int,
        report: Callable[[], Report],
        *,
        counter: int = 0,
        formers: Collection[int] = (),
        tls: Tls | None = None,
    ) -> None:
        """`report` is called for every heartbeat; `epoch` is the start of this instance, in ms.

        `counter`: of who was registered under this epoch before, and left: nameservers take what
        it has told, and no more than that, for overtaken.  `formers`: store ids that this one
        replaces, of a group of replicas that accepted a loss.
        """
        self._nameservers = tuple(dict.fromkeys(nameservers))
        self._tls = tls
        self._formers = formers
        self._period_s = period_s
        self._report = report
        self._version = nameserver_pb2.Version(epoch=epoch, counter=counter)
        self._last: Report | None = None
        self._accepted = False  # by any nameserver, ever
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with InvalidArgument when the name is another's for good, Internal on a failure."""
        self.refused.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._changes: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def counter(self) -> int:
        """How many different reports were told under this epoch."""
        return self._version.counter

    def start(self) -> None:
        """Begins to register; does not wait for it."""
        for address in self._nameservers:
            self._changes[address] = asyncio.Event()
            name = f"registration {address}"
            self._tasks.append(lasting(self._keep(address), name, self._fail))

    def _fail(self, error: BaseException) -> None:
        """Nothing tells that nameserver any more that this process lives."""
        log.critical("registration failed", exc_info=error)
        if not self.refused.done():
            self.refused.set_exception(Internal(f"registration failed: {error}"))

    async def check_free(self) -> int:
        """Asks every nameserver within reach, before anything is served.

        Returns how far the store's log went, as the last process with it told; 0: not known.
        Raises InvalidArgument if another store has the name and its process lives.
        """
        known = 0
        for address, answer in await asyncio.gather(*map(self._ask_first, self._nameservers)):
            if answer.HasField("taken_by") and answer.taken_by.store_id not in self._formers:
                raise self._taken(answer.taken_by, address)
            known = max(known, answer.known_log_end)
        return known

    def changed(self) -> None:
        """The report may be another now: tell every nameserver at once."""
        for change in self._changes.values():
            change.set()

    async def stop(self, *, deregister: bool = True) -> None:
        """Ends the heartbeats and takes the instance out at every nameserver within reach.

        Without `deregister` it stays until its successor of the same name is there, or its report
        expires.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if deregister:
            await asyncio.gather(*map(self._deregister, self._nameservers))
        self.refused.cancel()

    async def _ask_first(self, address: str) -> tuple[str, nameserver_pb2.RegisterResponse]:
        try:
            async with channel.connect(address, self._tls) as connection:
                stub = stubs.NameserverStub(connection)
                call = stub.Register(self._request(dry_run=True), timeout=CHECK_TIMEOUT_S)
                return address, await status.answer(call)
        except DuemqError as error:
            log.info("nameserver %s not asked for the name: %s", address, error)
            return address, nameserver_pb2.RegisterResponse()

    def _taken(self, by: nameserver_pb2.Holder, address: str) -> InvalidArgument:
        name = self._last.name if self._last is not None else ""
        if by.store_id == self._store_id:
            return InvalidArgument(
                f"name: {name!r} has the data directory {by.store_id:016x}, which the process at"
                f" {by.address} (started {_time(by.version.epoch)}) has under another name, as"
                f" nameserver {address} heard {by.heard_ago_ms / 1000:.1f} s ago: one is a copy of"
                " the other; start the copy with an empty one, or stop the other one first and wait"
                " until nameservers list it as lost",
                field="name",
                value=name,
                limit="one name a data directory",
            )
        return InvalidArgument(
            f"name: {name!r} is that of the process at {by.address} (data directory"
            f" {by.store_id:016x}, started {_time(by.version.epoch)}), which nameserver {address}"
            f" heard {by.heard_ago_ms / 1000:.1f} s ago; this one has another data directory,"
            f" {self._store_id:016x}: give it a name of its own, or stop the other one first and"
            " wait until nameservers list it as lost",
            field="name",
            value=name,
            limit="one data directory a name",
        )

    @property
    def _store_id(self) -> int:
        return self._last.store_id if self._last is not None else 0

    def _request(self, *, dry_run: bool = False) -> nameserver_pb2.RegisterRequest:
        report = self._report()
        lasting = _lasting(report)
        if lasting != self._last:
            self._last = lasting
            self._version.counter += 1
        expiry_ms = int(self._period_s * 1000 * EXPIRY_PERIODS)
        request = nameserver_pb2.RegisterRequest(
            version=self._version, expiry_ms=expiry_ms, dry_run=dry_run
        )
        if isinstance(report, nameserver_pb2.BrokerReport):
            request.broker.CopyFrom(report)
        else:
            request.timer.CopyFrom(report)
        return request

    async def _keep(self, address: str) -> None:
        news = _News(address, self._period_s)
        while True:
            async with channel.connect_to_nameserver(address, self._tls) as connection:
                stub = stubs.NameserverStub(connection)
                await self._beat_on(stub, self._changes[address], news)

    async def _beat_on(
        self, stub: stubs.NameserverStub, change: asyncio.Event, news: "_News"
    ) -> None:
        """Returns when the certificates have changed: a channel keeps the ones it was made with."""
        renewals = channel.renewals(self._tls)
        while channel.renewals(self._tls) == renewals:
            change.clear()
            wait_s = await self._beat(stub, news)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await change.wait()

    async def _beat(self, stub: stubs.NameserverStub, news: "_News") -> float:
        """One heartbeat.  Returns how long to wait for the next, in seconds."""
        timeout_s = min(CALL_TIMEOUT_S, self._period_s)
        try:
            call = stub.Register(self._request(), timeout=timeout_s)
            answer = await status.answer(call)
        except DuemqError as error:
            return news.failed(error)
        if answer.HasField("taken_by") and answer.taken_by.store_id in self._formers:
            # It leads no more: nobody waits until its report has run out.
            await self._take_out(stub, answer.taken_by.store_id, news.address)
            return news.retry_s()
        if answer.HasField("taken_by"):
            self._lost_name(answer.taken_by, news)
        else:
            self._accepted |= answer.accepted
            news.succeeded(answer.accepted)
        return self._period_s * random.uniform(*SPREAD)

    def _lost_name(self, by: nameserver_pb2.Holder, news: "_News") -> None:
        error = self._taken(by, news.address)
        stays = self._accepted and by.version.epoch > self._version.epoch
        news.refused(error, stays=stays)
        if not stays and not self.refused.done():
            self.refused.set_exception(error)

    async def _deregister(self, address: str) -> None:
        async with channel.connect(address, self._tls) as connection:
            await self._take_out(stubs.NameserverStub(connection), self._store_id, address)

    async def _take_out(self, stub: stubs.NameserverStub, store_id: int, address: str) -> None:
        request = nameserver_pb2.DeregisterRequest(version=self._version, store_id=store_id)
        if isinstance(self._last, nameserver_pb2.TimerReport):
            request.timer = self._last.name
        elif self._last is not None:
            request.broker = self._last.name
        else:
            return
        try:
            await status.answer(stub.Deregister(request, timeout=DEREGISTER_TIMEOUT_S))
        except DuemqError as error:
            log.info("nameserver %s not told of the stop: %s", address, error)


def _lasting(report: Report) -> Report:
    """A copy of the report without what differs from one heartbeat to the next."""
    lasting = type(report)()
    lasting.CopyFrom(report)  # type: ignore[arg-type]
    if isinstance(lasting, nameserver_pb2.BrokerReport):
        lasting.ClearField("log_end")
    for replica in lasting.replicas:
        for figure in REPLICA_FIGURES:
            replica.ClearField(figure)
    return lasting


def _time(epoch_ms: int) -> str:
    try:
        return datetime.fromtimestamp(epoch_ms / 1000).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # nobody checks what the other one claims
        return f"{epoch_ms} ms"


class _News:
    """What a nameserver's answers in a row mean: when to try again, and what to log, once."""

    def __init__(self, address: str, period_s: float) -> None:
        self.address = address
        longest_s = max(RETRY_S_MIN, min(period_s / 3, 5.0))
        self._backoff = Backoff(RETRY_S_MIN, longest_s)
        self._known: bool | None = None
        self._refused = False

    def failed(self, error: DuemqError) -> float:
        if self._backoff.attempts == 0:
            log.warning("nameserver %s: %s; trying on", self.address, error)
        return self.retry_s()

    def retry_s(self) -> float:
        return self._backoff.next_s()

    def refused(self, error: DuemqError, *, stays: bool) -> None:
        self._backoff.reset()
        if not self._refused:
            end = "this process was here first and goes on" if stays else "this one is not listed"
            log.error("%s; %s", error, end)
        self._refused = True

    def succeeded(self, accepted: bool) -> None:
        self._backoff.reset()
        self._refused = False
        if not accepted and self._known is not False:
            log.warning("nameserver %s knows a newer instance of this name", self.address)
        elif accepted and not self._known:
            log.info("registered at nameserver %s", self.address)
        self._known = accepted
