"""Keeps a route cache up to date from all nameservers.

A task a nameserver holds one WatchRoutes stream; when that breaks, or the nameserver is not ready,
it tries again.  What they say is merged (route_views).  Without any the cache keeps what it knew.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from duemq.errors import Closed, DuemqError, PermissionDenied, Timeout, Unavailable
from duemq.protocol.limits import QUEUES_MAX
from duemq.protocol.route import (
    Broker,
    BrokerQueues,
    LostBroker,
    LostTimer,
    Route,
    RouteCache,
    TimerShard,
    Update,
)
from duemq.settings import Tls
from duemq.transport import channel, streams
from duemq.transport.retrying import Backoff
from duemq.transport.routing.route_views import Views
from duemq.v1 import nameserver_pb2, stubs

log = logging.getLogger(__name__)

# Until the first update of a stream.  A nameserver that takes longer counts as dead.
FIRST_UPDATE_TIMEOUT_S = 3.0
# How long the first answer waits for those of the other nameservers.
SETTLE_S = 0.5


def update_of(pushed: nameserver_pb2.RouteUpdate) -> Update:
    """A pushed update in plain types."""
    return Update(
        whole=pushed.whole,
        routes=tuple(map(route_of, pushed.routes)),
        removed_topics=tuple(pushed.removed_topics),
        brokers=tuple(map(_broker, pushed.brokers)),
        timers=tuple(map(_timer, pushed.timers)),
        lost_brokers=tuple(
            LostBroker(_broker(one), one.lost_ms, one.stopped, one.forgotten)
            for one in pushed.lost_brokers
        ),
        lost_timers=tuple(
            LostTimer(_timer(one), one.lost_ms, one.stopped, one.forgotten)
            for one in pushed.lost_timers
        ),
    )


def _broker(one: nameserver_pb2.BrokerInstance) -> Broker:
    version = one.version
    return Broker(
        one.name,
        one.address,
        version.epoch,
        one.store_id,
        version.counter,
        one.external_address,
    )


def _timer(one: nameserver_pb2.TimerInstance) -> TimerShard:
    version = one.version
    return TimerShard(
        one.name,
        one.address,
        one.shard,
        one.shards,
        version.epoch,
        version.counter,
        one.store_id,
        one.key_shards,
    )


def route_of(route: nameserver_pb2.TopicRoute) -> Route:
    """A topic's route in plain types."""
    return Route(
        route.topic,
        tuple(
            # No more than a broker can have, whatever a nameserver says.
            BrokerQueues(
                b.broker,
                b.address,
                min(b.queues, QUEUES_MAX),
                b.readable,
                b.writable,
                b.topic_id,
            )
            for b in route.brokers
        ),
    )


class RouteWatcher:
    """Applies what nameservers push to `cache`.  Used from one event loop."""

    def __init__(
        self,
        nameservers: Sequence[str],
        cache: RouteCache | None = None,
        topics: Sequence[str] = (),
        *,
        tls: Tls | None = None,
    ) -> None:
        """`topics`: those of interest; none: all."""
        self._tls = tls
        self.cache = cache if cache is not None else RouteCache()
        self._nameservers = tuple(dict.fromkeys(nameservers))
        self._request = nameserver_pb2.WatchRoutesRequest(topics=topics)
        self._views = Views()
        self._waiting: list[Update] = []  # the first updates, until all have said something
        self._untried = set(self._nameservers)
        self._settled = False
        self._errors: dict[str, DuemqError] = {}
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def live(self) -> bool:
        """A nameserver is pushing to the cache.  False: the cache may be out of date."""
        return self._views.connected

    @property
    def denied(self) -> dict[str, PermissionDenied]:
        """The nameservers that say so."""
        return {at: e for at, e in self._errors.items() if isinstance(e, PermissionDenied)}

    def story(self) -> str:
        """What each nameserver says, for people: "ns1:9876 lists b1, b2; ns2:9876 …"."""
        return "; ".join(map(self._story_of, self._nameservers))

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` in the event loop after each update that changed the cache."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Begins to watch; does not wait for the first update."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._watch(address), name=f"route watcher {address}")
                for address in self._nameservers
            ]

    async def stop(self) -> None:
        """Ends the watch, for good; the cache stays."""
        self._stopped = True
        self._changed.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()

    async def wait_for(self, condition: Callable[[RouteCache], bool], timeout_s: float) -> None:
        """Returns once `condition(cache)` holds after an update was seen, ever.

        Raises Unavailable if no nameserver answered in time, Timeout if only the condition is
        missing, Closed once the watch has ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.cache.version and condition(self.cache)):
                    if self._stopped:
                        raise Closed("the client is closed")
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            names = ", ".join(self._nameservers)
            if self.cache.version == 0:
                cause = "".join(f": {error}" for error in list(self._errors.values())[-1:])
                raise Unavailable(f"no nameserver answered ({names}){cause}") from None
            raise Timeout(f"no such route within {timeout_s:.3g} s (nameservers {names})") from None

    async def ready(self, timeout_s: float) -> None:
        """Returns once routes are known.  Raises Unavailable if no nameserver answered in time."""
        await self.wait_for(lambda _: True, timeout_s)

    async def _watch(self, address: str) -> None:
        backoff = Backoff(0.1)
        while True:
            try:
                if await self._follow(address):
                    backoff.reset()
            except Exception:  # of a listener; the others must hear of what comes next
                log.exception("what nameserver %s pushed could not be taken over", address)
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, address: str) -> bool:
        """Follows a nameserver until its stream breaks.  True if it pushed anything."""
        seen = False
        try:
            async with channel.connect_to_nameserver(address, self._tls) as connection:
                stream = stubs.NameserverStub(connection).WatchRoutes(self._request)
                while True:
                    async with asyncio.timeout(None if seen else FIRST_UPDATE_TIMEOUT_S):
                        pushed = await streams.read(stream, address)
                    seen = True
                    self._said(address, update_of(pushed))
        except TimeoutError:
            self._failed(address, Timeout(f"{address}: no routes in {FIRST_UPDATE_TIMEOUT_S} s"))
        except DuemqError as error:
            self._failed(address, error)
        return seen

    def _said(self, address: str, update: Update) -> None:
        self._errors.pop(address, None)
        self._waiting.append(self._views.apply(address, update, _now_ms()))
        self._tried(address)

    def _failed(self, address: str, error: DuemqError) -> None:
        level = logging.INFO if address not in self._errors else logging.DEBUG
        log.log(level, "nameserver %s not watched: %s", address, error)
        self._errors.pop(address, None)
        self._errors[address] = error
        self._views.disconnected(address, _now_ms())
        self._tried(address)

    def _tried(self, address: str) -> None:
        """A nameserver has answered or failed.  The first answers are taken over together."""
        self._untried.discard(address)
        if self._settled or not self._untried:
            self._settle()
        elif self._waiting and "settle" not in self._timers:
            self._after("settle", SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settled = True
        self._publish()

    def _publish(self) -> None:
        """Takes over what is new, and has the clock watch views that end."""
        updates, self._waiting = self._waiting, []
        changed = [self.cache.apply(update) for update in updates]
        next_ms = self._views.next_ms()
        if next_ms is not None:
            self._after("prune", (next_ms - _now_ms()) / 1000, self._prune)
        if any(changed):
            self._changed.set()
            self._changed = asyncio.Event()
            for listener in self._listeners:
                listener()

    def _prune(self) -> None:
        update = self._views.prune(_now_ms())
        if update is not None:
            self._waiting.append(update)
        self._publish()

    def _after(self, name: str, wait_s: float, then: Callable[[], None]) -> None:
        """Calls `then` later, once; a call of that name that was waiting is forgotten."""
        if (waiting := self._timers.pop(name, None)) is not None:
            waiting.cancel()
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(max(0.0, wait_s), then)

    def _story_of(self, address: str) -> str:
        names = self._views.brokers_of(address)
        told = "" if names is None else f" lists {', '.join(names) or 'no broker'}"
        error = self._errors.get(address)
        if error is not None:
            told += f" (out of reach: {error})"
        return address + (told or " has not answered")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
