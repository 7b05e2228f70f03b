"""The connection to a cluster that producers, consumers and admin clients are built on.

Owned by one event loop.  Holds the route cache (pushed by all nameservers, see `route_watcher`) and
one gRPC channel an address.  Synchronous clients run it on the loop of `loop_thread`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import TypeVar

import grpc.aio

from duemq.errors import (
    Closed,
    DuemqError,
    InvalidArgument,
    MissingBroker,
    Timeout,
    TopicNotFound,
    Unavailable,
)
from duemq.protocol import checks
from duemq.protocol.names import check_topic
from duemq.protocol.route import Broker, LostBroker, Route, RouteCache, TimerShard
from duemq.settings import Addresses, ClientSettings, nameservers_of
from duemq.transport import channel, retrying, status
from duemq.transport.cancel_calls import CancelCalls
from duemq.transport.routing.diagnosis import Diagnosis, diagnose
from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import admin_pb2, nameserver_pb2, stubs

log = logging.getLogger(__name__)

# A broker that is listed and does not answer holds the making of a topic up for so long.
CREATE_GRACE_S = 1.0
# Brokers that others told of; of more, those told of longest ago are forgotten.
LEARNED_MAX = 256
# Routes come within milliseconds.  While they do not, what is at the addresses is looked at.
LOOK_EVERY_S = 0.5
# Who waits for no longer is told by the error.
SILENT_S = 3.0

T = TypeVar("T")


class Client:
    """Routes and channels.  Make it, `await start()`, use it, `await close()`, in one loop."""

    def __init__(
        self, nameserver: Addresses | None = None, settings: ClientSettings | None = None
    ) -> None:
        self.settings = ClientSettings() if settings is None else settings
        checks.instance("settings", self.settings, ClientSettings)
        self.nameservers = nameservers_of(nameserver)
        self._watcher: RouteWatcher | None = None
        self._channels = channel.Channels(self.settings.tls)
        self._routes = RouteCache()
        self._listeners: list[Callable[[], None]] = []
        self._creating: dict[str, asyncio.Task[frozenset[str]]] = {}
        self._learned: dict[str, Broker] = {}
        self._making: set[asyncio.Task[str]] = set()
        self._addresses: dict[str, str] = {}
        self._starting = 0
        self._started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.cancel_calls = CancelCalls(self.channel)

    async def start(self) -> None:
        """Waits for the first routes.

        Raises Unavailable if no nameserver answers in `connect_timeout_s`, InvalidArgument as soon
        as it is clear that none of the addresses is a nameserver's.  Both say what was found there.
        Raises Closed in a process that was forked after its parent had clients, InvalidArgument for
        certificates that cannot be used.  May be called again after an error.
        """
        channel.check_fork()
        self._check_open()
        channel.check(self.settings.tls)
        watcher = self._watcher
        if watcher is None:
            self._loop = asyncio.get_running_loop()
            watcher = RouteWatcher(self.nameservers, self._routes, tls=self.settings.tls)
            self._watcher = watcher
            watcher.on_change(self._routes_changed)
            watcher.start()
        self._starting += 1
        try:
            await self._connected(watcher, self.settings.connect_timeout_s)
            self._started = True
        finally:
            self._starting -= 1
            if not (self._started or self._starting):  # others may still wait for the routes
                self._watcher = self._loop = None
                await watcher.stop()

    async def _connected(self, watcher: RouteWatcher, timeout_s: float) -> None:
        ready = asyncio.create_task(watcher.ready(timeout_s))
        found: list[Diagnosis] = []
        look = asyncio.create_task(self._look(watcher, found, timeout_s))
        try:
            await asyncio.wait([ready, look], return_when=asyncio.FIRST_COMPLETED)
            if look.done() and not ready.done():
                look.result()
            await ready
        except Unavailable as error:
            looks = zip(self.nameservers, found, strict=False)
            told = "; ".join(str(watcher.denied.get(at, each.text)) for at, each in looks)
            raise Unavailable(
                f"no nameserver answered within {timeout_s:g} s: {told or error.message}",
                field="nameserver",
                value=",".join(self.nameservers),
            ) from None
        finally:
            ready.cancel()
            look.cancel()

    async def _look(self, watcher: RouteWatcher, found: list[Diagnosis], timeout_s: float) -> None:
        """Keeps `found` up to date: what is at the nameservers' addresses; logs the first.

        Raises InvalidArgument if none can ever be a nameserver's, PermissionDenied.
        """
        while not (found and all(each.mistaken for each in found)):
            await asyncio.sleep(min(LOOK_EVERY_S, timeout_s / 4))
            if (denied := watcher.denied).keys() >= set(self.nameservers):
                raise next(iter(denied.values()))
            first = not found
            found[:] = await asyncio.gather(
                *(diagnose(address, self.settings.tls) for address in self.nameservers)
            )
            if first and timeout_s > SILENT_S:
                told = "; ".join(each.text for each in found)
                log.warning("no nameserver answers, waiting for %g s: %s", timeout_s, told)
        raise InvalidArgument(
            "; ".join(each.text for each in found),
            field="nameserver",
            value=",".join(self.nameservers),
            limit="the address of a nameserver",
        )

    async def close(self) -> None:
        """Ends the watch and closes every channel, with the calls in them.  Idempotent."""
        self.check_loop()
        self._closed = True
        for task in (*self._creating.values(), *self._making):
            task.cancel()
        if self._watcher is not None:
            await self._watcher.stop()
        await self._channels.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")
        self.check_loop()

    def check_loop(self) -> None:
        """Raises Closed in another event loop."""
        if self._loop not in (None, asyncio._get_running_loop()):
            raise Closed("the client belongs to another event loop")

    @property
    def routes(self) -> RouteCache:
        """What is known; changes as nameservers push.  Raises Closed before the start."""
        self._started_watcher()
        return self._routes

    def _started_watcher(self) -> RouteWatcher:
        if self._watcher is None:
            raise Closed("the client is not started: use `async with` or `await start()`")
        return self._watcher

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that were there lately, as nameservers or this client know, sorted by name.

        What is put together from the live ones lacks what these store.
        """
        found = {lost.broker.name: story_of(lost) for lost in self._routes.lost_brokers}
        for name in self._routes.away:
            found.setdefault(name, "it was there and is not now")
        return tuple(MissingBroker(name, found[name]) for name in sorted(found))

    def on_routes_changed(self, listener: Callable[[], None]) -> None:
        """Calls `listener` in the loop after each change of the routes, until `off_…`."""
        self._listeners.append(listener)

    def off_routes_changed(self, listener: Callable[[], None]) -> None:
        """Takes a listener back."""
        self._listeners.remove(listener)

    async def wait_for(self, condition: Callable[[RouteCache], bool], timeout_s: float) -> None:
        """Until the routes fulfil `condition`.  Raises Timeout, Unavailable, Closed."""
        self._check_open()
        await self._started_watcher().wait_for(condition, timeout_s)

    async def pause(self, broker: str, backoff: retrying.Backoff) -> None:
        """Waits before the next attempt; ends at once if a broker comes back, or moves.

        Raises nothing, also once the client is closed.
        """
        assert self._watcher is not None
        before = self._routes.broker(broker)
        wait_s = backoff.next_s()
        try:
            await self._watcher.wait_for(lambda routes: routes.broker(broker) != before, wait_s)
            backoff.attempts = 1  # short again, and the first failure was told
        except Unavailable:
            pass
        except Closed:
            await asyncio.sleep(wait_s)  # who goes on all the same does so slowly

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`, shared; connects with the first call."""
        self._check_open()
        return self._channels.to(address)

    def broker(self, name: str) -> Broker:
        """A live broker.  Raises Unavailable if none of that name is known."""
        found = self.routes.broker(name) or self._learned.get(name)
        if found is None:
            there = ", ".join(each.name for each in self._routes.brokers) or "none"
            raise Unavailable(
                f"broker {name} is not there; live ones: {there}", field="broker", value=name
            )
        return found

    def address_of(self, name: str) -> str:
        """Where a broker is asked; "": it is not known now."""
        found = self._routes.broker(name) or self._learned.get(name)
        return found.address if found is not None else ""

    def learn(self, name: str, address: str) -> None:
        """A broker told of another one: it is asked there where the nameservers do not list it."""
        self._learned.pop(name, None)
        self._learned[name] = Broker(name, address)
        if len(self._learned) > LEARNED_MAX:
            del self._learned[next(iter(self._learned))]

    def story(self) -> str:
        """What each nameserver says of the brokers, for people."""
        return self._watcher.story() if self._watcher is not None else ""

    def timer_of(self, timer_queue_id: int) -> TimerShard:
        """The timer shard of a %TIMER% queue.  Raises Unavailable if it is not there."""
        found = self.routes.timer_of(timer_queue_id)
        if found is None:
            raise Unavailable(
                f"no timer shard serves %TIMER% queue {timer_queue_id} now",
                field="timer_queue",
                value=timer_queue_id,
            )
        return found

    def timer_shard(self, number: int) -> TimerShard:
        """The timer shard of a number.  Raises Unavailable if it is not there."""
        found = self.routes.timer_shard(number)
        if found is None:
            raise Unavailable(
                f"no timer shard {number} is alive", field="timer_shard", value=number
            )
        return found

    async def call(
        self,
        address: Callable[[], str],
        method: Callable[[grpc.aio.Channel, float], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> T:
        """A unary request that may be repeated: retried until `timeout_s` with backoff and jitter.

        `address` is asked before each attempt, as routes may change; `method(channel, seconds
        left)` makes the call.  Raises DuemqErrors.
        """

        async def attempt(left_s: float) -> T:
            return await self.once(address(), method, left_s)

        timeout_s = self.settings.request_timeout_s if timeout_s is None else timeout_s
        return await retrying.until(time.monotonic() + timeout_s, attempt)

    async def once(
        self,
        address: str,
        method: Callable[[grpc.aio.Channel, float], Awaitable[T]],
        timeout_s: float,
    ) -> T:
        """One attempt of a unary request.  Raises DuemqErrors."""
        return await status.answer(method(self.channel(address), timeout_s), address)

    async def topic_route(
        self, topic: str, *, create: bool = False, timeout_s: float | None = None
    ) -> Route:
        """The topic's route; waits for one.  `create`: has the live brokers make the topic first.

        Raises TopicNotFound when nobody serves it in time or brokers do not create topics,
        InvalidArgument for what is no topic's name.
        """
        check_topic(topic)
        route = self._routes.route(topic)
        if route is not None and route.brokers:
            return route
        timeout_s = self.settings.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        makers = await self._create_once(topic, timeout_s) if create else frozenset[str]()

        def served(routes: RouteCache) -> bool:
            # By all that made it and are there: a route that grows by the second would move
            # ordering keys.
            there = {name for name in makers if routes.broker(name) is not None}
            found = routes.route(topic)
            return found is not None and there <= {each.broker for each in found.brokers}

        cause: DuemqError | None = None
        try:
            await self.wait_for(served, deadline - time.monotonic())
        except Unavailable as error:
            cause = error
        route = self._routes.route(topic)
        if route is None:
            lost = ", ".join(each.broker.name for each in self._routes.lost_brokers)
            raise TopicNotFound(
                f"no broker serves topic {topic!r}"
                + (f"; lost lately: {lost}" if lost else "")
                + (f": {cause}" if cause else ""),
                field="topic",
                value=topic,
                retryable=True,
            ) from cause
        return route

    async def _create_once(self, topic: str, timeout_s: float) -> frozenset[str]:
        """Many callers, one request a broker.  The brokers that made it."""
        task = self._creating.get(topic)
        if task is None:
            task = asyncio.create_task(self._create(topic, timeout_s), name=f"create {topic}")
            self._creating[topic] = task
            # Its error is heard of, also where all callers have given up.
            task.add_done_callback(
                lambda done: (self._creating.pop(topic), done.cancelled() or done.exception())
            )
        await asyncio.wait([task])
        if task.cancelled():
            self._check_open()  # it was `close`
        return task.result()

    async def _create(self, topic: str, timeout_s: float) -> frozenset[str]:
        deadline = time.monotonic() + timeout_s
        await self.wait_for(lambda routes: bool(routes.brokers), timeout_s)
        if (made := await self._made_by_others(topic)) is not None:
            return made
        request = admin_pb2.CreateTopicRequest(
            topic=admin_pb2.TopicConfig(name=topic), if_missing=True
        )

        async def at(broker: Broker) -> str:
            await self.call(
                lambda: self.broker(broker.name).address,
                stubs.BrokerAdminStub.ask("CreateTopic", request),
                deadline - time.monotonic(),
            )
            return broker.name

        asked = [asyncio.create_task(at(broker)) for broker in self._routes.brokers]
        self._making.update(asked)
        for task in asked:
            task.add_done_callback(self._made)
        # Those that take longer are not waited for; they make it all the same.
        return await _first_and_those_close_behind(asked)

    async def _made_by_others(self, topic: str) -> frozenset[str] | None:
        """Who has a topic of which the nameservers have not told us yet: it stays on these.

        Empty: only brokers that are away have it.  None: nobody has.
        """
        ask = stubs.NameserverStub.ask("GetRoute", nameserver_pb2.GetRouteRequest(topic=topic))
        made: set[str] = set()
        away = False

        async def at(nameserver: str) -> None:
            nonlocal away
            try:
                route = await self.once(nameserver, ask, CREATE_GRACE_S)
                made.update(served.broker for served in route.brokers)
            except TopicNotFound as error:
                away |= error.retryable
            except DuemqError:
                pass

        await asyncio.gather(*map(at, self.nameservers))
        live = {broker.name for broker in self._routes.brokers}
        if made and not made >= live:  # it may be being made on the others

            def is_whole(routes: RouteCache) -> bool:
                route = routes.route(topic)
                return route is not None and {each.broker for each in route.brokers} >= live

            with suppress(Timeout):
                await self.wait_for(is_whole, CREATE_GRACE_S)
        return frozenset(made) if made or away else None

    def _made(self, task: asyncio.Task[str]) -> None:
        self._making.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a broker did not make a topic: %s", error)

    def _routes_changed(self) -> None:
        self._leave_moved()
        for listener in tuple(self._listeners):
            listener()

    def _leave_moved(self) -> None:
        """Closes the channels to where a broker or timer shard was, and nobody is now.

        Who is at the old address may be stopped, and answer a call of long ago much later.
        """
        addresses = {"b" + each.name: each.address for each in self._routes.brokers}
        addresses |= {"t" + each.name: each.address for each in self._routes.timers}
        were = {self._addresses.get(each, "") for each in addresses}
        self._addresses |= addresses
        self._channels.leave(were.difference(addresses.values()))


async def _first_and_those_close_behind(asked: list[asyncio.Task[str]]) -> frozenset[str]:
    """What was answered by CREATE_GRACE_S after the first success; the first failure if none."""
    made: set[str] = set()
    waiting = set(asked)
    while waiting and not made:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        made = {task.result() for task in done if task.exception() is None}
    if not made:
        return frozenset([asked[0].result()])  # raises
    if waiting:
        done, _ = await asyncio.wait(waiting, timeout=CREATE_GRACE_S)
        made |= {task.result() for task in done if task.exception() is None}
    return frozenset(made)


def story_of(lost: LostBroker) -> str:
    """Where it was and since when it is not, for people."""
    if not lost.broker.address:
        return "it has no address here"
    since = datetime.fromtimestamp(lost.since_ms / 1000).astimezone().isoformat(timespec="seconds")
    how = "stopped" if lost.stopped else "fell silent"
    return f"it was at {lost.broker.address}, {how} at {since} and has not come back"
