"""Keeps a route cache up to date from any one of the nameservers.

One task holds one WatchRoutes stream.  When it breaks, or the nameserver is not ready, the next
nameserver is asked; after a full round without success the task waits, jittered.  The cache
keeps what it knew meanwhile.  The first nameserver is drawn by lot, so that clients spread.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from duemq.errors import DuemqError, Timeout, Unavailable
from duemq.route import (
    Broker,
    BrokerQueues,
    LostBroker,
    LostTimer,
    Route,
    RouteCache,
    TimerShard,
    Update,
)
from duemq.rpc import channel, status
from duemq.rpc.backoff import Backoff
from duemq.v1 import nameserver_pb2, nameserver_pb2_grpc

log = logging.getLogger(__name__)

ROUND_WAIT_S_MIN = 0.1
ROUND_WAIT_S_MAX = 2.0
# Until the first update of a stream.  A nameserver that takes longer counts as dead.
FIRST_UPDATE_TIMEOUT_S = 3.0


def update_of(pushed: nameserver_pb2.RouteUpdate) -> Update:
    """A pushed update in plain types."""
    return Update(
        whole=pushed.whole,
        routes=tuple(map(route_of, pushed.routes)),
        removed_topics=tuple(pushed.removed_topics),
        brokers=tuple(map(_broker, pushed.brokers)),
        timers=tuple(map(_timer, pushed.timers)),
        lost_brokers=tuple(
            LostBroker(_broker(one), one.lost_ms, one.stopped) for one in pushed.lost_brokers
        ),
        lost_timers=tuple(
            LostTimer(_timer(one), one.lost_ms, one.stopped) for one in pushed.lost_timers
        ),
    )


def _broker(one: nameserver_pb2.BrokerInstance) -> Broker:
    return Broker(one.name, one.address, one.version.epoch, one.store_id)


def _timer(one: nameserver_pb2.TimerInstance) -> TimerShard:
    return TimerShard(one.name, one.address, one.shard, one.shards)


def route_of(route: nameserver_pb2.TopicRoute) -> Route:
    """A topic's route in plain types."""
    return Route(
        route.topic,
        tuple(
            BrokerQueues(b.broker, b.address, b.queues, b.readable, b.writable)
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
    ) -> None:
        """`topics`: those of interest; none: all."""
        self.cache = cache if cache is not None else RouteCache()
        self._nameservers = list(dict.fromkeys(nameservers))
        random.shuffle(self._nameservers)
        self._request = nameserver_pb2.WatchRoutesRequest(topics=topics)
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._last_error: DuemqError | None = None
        self._task: asyncio.Task[None] | None = None
        self._live = False

    @property
    def live(self) -> bool:
        """A nameserver is pushing to the cache.  False: the cache may be out of date."""
        return self._live

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` in the event loop after each update that changed the cache."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Begins to watch; does not wait for the first update."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="route watcher")

    async def stop(self) -> None:
        """Ends the watch; the cache stays."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def wait_for(self, condition: Callable[[RouteCache], bool], timeout_s: float) -> None:
        """Returns once `condition(cache)` holds after an update was seen, ever.

        Raises Unavailable if no nameserver answered in time, Timeout if only the condition is
        missing.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.cache.version and condition(self.cache)):
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            names = ", ".join(self._nameservers)
            if self.cache.version == 0:
                cause = f": {self._last_error}" if self._last_error else ""
                raise Unavailable(f"no nameserver answered ({names}){cause}") from None
            raise Timeout(f"no such route within {timeout_s:.3g} s (nameservers {names})") from None

    async def ready(self, timeout_s: float) -> None:
        """Returns once routes are known.  Raises Unavailable if no nameserver answered in time."""
        await self.wait_for(lambda _: True, timeout_s)

    async def _watch(self) -> None:
        backoff = Backoff(ROUND_WAIT_S_MIN, ROUND_WAIT_S_MAX)
        while True:
            seen = False
            for address in self._nameservers:
                seen = await self._follow(address) or seen
            if seen:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, address: str) -> bool:
        """Follows one nameserver until its stream breaks.  True if it pushed anything."""
        seen = False
        try:
            async with channel.connect(address) as connection:
                stub = nameserver_pb2_grpc.NameserverStub(connection)
                stream = stub.WatchRoutes(self._request)
                while True:
                    timeout_s = None if seen else FIRST_UPDATE_TIMEOUT_S
                    async with asyncio.timeout(timeout_s):
                        pushed = await status.answer(stream.read(), address)
                    if not isinstance(pushed, nameserver_pb2.RouteUpdate):  # the end of the stream
                        raise Unavailable(f"{address}: the nameserver ended the stream")
                    self._apply(update_of(pushed))
                    seen = True
        except TimeoutError:
            self._failed(address, Timeout(f"{address}: no routes in {FIRST_UPDATE_TIMEOUT_S} s"))
        except DuemqError as error:
            self._failed(address, error)
        finally:
            self._live = False
        return seen

    def _apply(self, update: Update) -> None:
        self._live = True
        self._last_error = None
        if not self.cache.apply(update):
            return
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    def _failed(self, address: str, error: DuemqError) -> None:
        level = logging.INFO if self._last_error is None else logging.DEBUG
        log.log(level, "nameserver %s no longer watched: %s", address, error)
        self._last_error = error
