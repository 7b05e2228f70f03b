"""Shifts, cancels, moves and holds while the number of timer shards changes, against a plain model.

Disks of some are full for a while.
Jobs are cut small, so that shards start anew in the middle of one; each is asked for, with one id,
until nobody is missing.  A message has its body for a name; the model says for when it may wait.
Whatever was not waiting as a job was first asked for, that may have met it or not.
HAND_OVER_SEED and HAND_OVER_ROUNDS: of the random choices, and how many in turn.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tenacity

from duemq.aio import Admin
from duemq.errors import Unavailable
from duemq.transport import status
from duemq.v1 import broker_pb2, message_pb2, stubs, timer_inspector_pb2, timer_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.log import SegmentedLog
from duemq_server.timer_service import bulk_loop
from duemq_server.timer_service.disk.housekeeping import Housekeeper
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.edge import broker_link
from duemq_server.timer_service.scheduling.bulk import walk
from duemq_server.timer_service.shard import Shard as ShardCore
from tests.service.running_broker import batch
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import HOUR_MS, WAIT_S
from tests.service.timer_shards import QUEUES, Shards

SEED = int(os.environ.get("HAND_OVER_SEED", "1"))
ROUNDS = int(os.environ.get("HAND_OVER_ROUNDS", "1"))
TOPICS = ("one", "two")
HELD = "held"
BEATS = "beats"
PATHS = ((2, 4, 3), (2, 1, 2), (3, 1, 4), (2, 3, 1))
AT_ONCE = 7
RETRY_S = 0.02
# What was sent ahead of its time is on its way as a hold is asked for.
ON_ITS_WAY_MS = 100
SHIFTS_MS = (60_000, -60_000, 2 * HOUR_MS)


class Where(NamedTuple):
    """For when and for what topic a message waits."""

    due_ms: int
    topic: str
    renamed: bool = False
    """It has another handle than is known."""


GONE = Where(0, "")


@dataclass
class Message:
    """What may be so of one."""

    handle: message_pb2.TimerHandle
    at: set[Where]
    key: str = ""


@dataclass
class Model:
    """What may be so of each message, by body."""

    messages: dict[bytes, Message] = field(default_factory=dict)

    def change(self, touched: Callable[[Message, Where], Where | None], new_since: int) -> None:
        """A job: of messages from that number on it may have met some and not others."""
        for number, message in enumerate(self.messages.values()):
            found = {at: touched(message, at) for at in message.at}
            after = {at if there is None else there for at, there in found.items()}
            message.at = after | (message.at if number >= new_since else set())


class World:
    """Shards, a client of them, and the model."""

    def __init__(self, cluster: Cluster, shards: Shards, admin: Admin, seed: int) -> None:
        self.cluster, self.shards, self.admin = cluster, shards, admin
        self.random = random.Random(seed)
        self.model = Model()
        self.sent = 0
        self.held_sent: dict[bytes, int] = {}  # due times, of those to the held topic
        self.hold_since_ms: int | None = None
        self.there = 0  # of the messages, at shards
        self.jobs: list[tuple[Callable[[], Awaitable[int]], int]] = []
        self.done: list[str] = []

    # -- messages

    async def send(self, topic: str, count: int, delay_ms: int, spread_ms: int) -> None:
        for _ in range(count):
            body = b"m%d" % self.sent
            self.sent += 1
            delay = delay_ms + self.random.randrange(spread_ms)
            queue_id = self.random.choice((-1, 0, 1))
            made = batch(topic, [body], delays_ms=[delay], queue_id=queue_id, producer_id=0)
            request = broker_pb2.SendRequest(request_id=1, batches=[made])
            answer = await status.answer(
                self.cluster.clients["b0"].broker.Send(request, timeout=WAIT_S)
            )
            [result] = answer.results
            handle = message_pb2.TimerHandle(
                store_id=answer.store_id,
                queue_id=result.queue_id,
                offset=result.base_offset,
                due_ms=result.due_ms[0],
            )
            if topic == HELD:
                self.held_sent[body] = handle.due_ms
            else:
                self.model.messages[body] = Message(handle, {Where(handle.due_ms, topic)})

    async def keyed(self, count: int) -> None:
        for _ in range(count):
            body = b"k%d" % self.sent
            self.sent += 1
            key = f"{self.random.choice('ab')}-{self.sent}"
            due_ms = now_ms() + 3 * HOUR_MS
            record = message_pb2.Record(body=body, message_id=key, timer_key=key)
            request = timer_pb2.ScheduleRequest(
                request_id=self.random.randbytes(16),
                topic="one",
                queue_id=-1,
                records=message_pb2.RecordBatch(records=[record]),
                due_ms=[due_ms],
            )
            [result] = (
                await self.ask(lambda stub, request=request: stub.Schedule(request))
            ).results
            self.model.messages[body] = Message(result.handle, {Where(due_ms, "one")}, key)

    async def ask(self, call: Callable[[Any], Any], number: int = 0) -> Any:
        """Of one shard, until it answers."""

        async def once() -> Any:
            if number not in self.shards.running:
                raise Unavailable("it is starting anew")
            return await status.answer(call(self.shards.running[number].stub))

        return await self.whole(once)

    async def whole(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Until nobody is missing."""

        async def asked() -> Any:
            return await ask()

        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(WAIT_S),
            wait=tenacity.wait_fixed(RETRY_S),
            retry=tenacity.retry_if_exception_type(Unavailable),
            reraise=True,
        )
        return await tries(asked)

    def routed(self) -> bool:
        """The client knows all shards, and no others."""
        known = {each.shard for each in self.admin._client.routes.timers}
        return known == self.shards.running.keys()

    def look(self) -> bool:
        """Whether all that is sent is at some shard: jobs that begin now meet it."""
        there = self.accepted() >= self.sent
        if there:
            self.there = len(self.model.messages)
        return there

    def accepted(self) -> int:
        schedulers = [each.service.shard.scheduler for each in self.shards.running.values()]
        came = sum(each.ledger.accepted - each.ledger.replaced for each in schedulers)
        beats = sum(each.topics.of(BEATS).accepted for each in schedulers)
        beats -= sum(each.topics.of(BEATS).replaced for each in schedulers)
        return came - beats

    async def job(self) -> None:
        kind = self.random.choice(("shift", "shift", "cancel", "move", "key", "cancel key"))
        topic = self.random.choice(TOPICS)
        request_id = self.random.randbytes(16)
        since_ms = now_ms() + 2 * HOUR_MS + self.random.randrange(HOUR_MS)
        until_ms = since_ms + self.random.randrange(HOUR_MS // 8, HOUR_MS)
        known = self.there
        within: dict[str, Any] = {}
        if self.random.random() < 0.5 or "cancel" in kind:
            within = {"since": since_ms, "until": until_ms}
        prefix = self.random.choice("ab") if "key" in kind else ""

        def meant(message: Message, at: Where) -> bool:
            if at.topic != topic or not message.key.startswith(prefix):
                return False
            return not within or since_ms <= at.due_ms < until_ms

        by_ms = self.random.choice(SHIFTS_MS)
        other = TOPICS[1 - TOPICS.index(topic)]

        def touched(message: Message, at: Where) -> Where | None:
            if not meant(message, at):
                return None
            if kind in ("shift", "key"):
                return Where(at.due_ms + by_ms, topic, True)
            if kind == "move":
                return at if message.key else Where(at.due_ms, other, True)
            return GONE

        def ask() -> Awaitable[int]:
            admin = self.admin
            if kind in ("shift", "key"):
                return admin.shift_pending(
                    topic, by_ms / 1000, key_prefix=prefix, request_id=request_id, **within
                )
            if kind == "move":
                return admin.move_pending(topic, other, request_id=request_id, **within)
            return admin.cancel_pending(topic, key_prefix=prefix, request_id=request_id, **within)

        sure = sum(
            all(meant(each, at) for at in each.at) and not (kind == "move" and each.key)
            for each in list(self.model.messages.values())[:known]
        )
        count = await self.whole(ask)
        self.model.change(touched, known)
        assert count >= sure, (kind, topic, within, count, sure)
        self.jobs.append((ask, count))
        self.done.append(f"{kind} {topic} {prefix} {within} {by_ms}: {count}, sure {sure}")

    async def reschedule(self) -> None:
        body = self.random.choice(list(self.model.messages))
        message = self.model.messages[body]
        due_ms = now_ms() + 3 * HOUR_MS + self.random.randrange(HOUR_MS)
        ref = timer_pb2.TimerRef(handle=message.handle)
        number = self.random.choice(list(self.shards.running) or [0])
        by_key = bool(message.key) and self.random.random() < 0.7
        if by_key:
            ref = timer_pb2.TimerRef(key=timer_pb2.TimerKey(topic="one", key=message.key))
            number = 0
        request = timer_pb2.RescheduleRequest(
            request_id=self.random.randbytes(16), timers=[ref], due_ms=[due_ms]
        )
        while True:
            answer = await self.ask(lambda stub: stub.Reschedule(request), number=number)
            [result] = answer.results
            if not result.HasField("error"):
                break
            # For this id it stays so.
            request.request_id = self.random.randbytes(16)
            await asyncio.sleep(RETRY_S)
        if result.outcome == timer_pb2.RESCHEDULED:
            found = {at for at in message.at - {GONE} if by_key or not at.renamed}
            assert found, (message, self.done)
            message.handle = result.handle
            message.at = {Where(due_ms, at.topic) for at in found}
        else:
            message.at = {at for at in message.at if at == GONE or (at.renamed and not by_key)}
            assert message.at, (result, self.done)
        self.done.append(f"reschedule {body!r} at {number}: {result.outcome}")

    async def cancel(self) -> None:
        body = self.random.choice(list(self.model.messages))
        message = self.model.messages[body]
        number = self.random.choice(list(self.shards.running) or [0])
        request = timer_pb2.CancelRequest(handles=[message.handle])
        while True:
            answer = await self.ask(lambda stub: stub.Cancel(request), number=number)
            [result] = answer.results
            if not result.HasField("error"):
                break
            await asyncio.sleep(RETRY_S)
        assert result.outcome == timer_pb2.CANCELLED, (message, result)
        # A handle that a shift has replaced is answered so, too.
        message.at = {at if at.renamed else GONE for at in message.at}
        self.done.append(f"cancel {body!r} at {number}")

    async def hold(self) -> None:
        await self.whole(lambda: self.admin.hold_timers(HELD))
        self.hold_since_ms = now_ms()

    async def resume(self) -> None:
        if self.hold_since_ms is not None:
            await self.check_held()
        self.hold_since_ms = None
        await self.whole(lambda: self.admin.resume_timers(HELD))

    async def check_held(self) -> None:
        """Nothing of it that was due since was sent."""
        assert self.hold_since_ms is not None
        late = [
            body
            for body in await self.bodies(HELD)
            if self.held_sent[body] > self.hold_since_ms + ON_ITS_WAY_MS
        ]
        assert not late, (late, self.done)

    async def check_dropped(self) -> set[bytes]:
        """All that was held is sent in the end, once; what is not, since a policy left it out."""
        assert Counter(await self.bodies(HELD)) == Counter(self.held_sent.keys())
        return set()

    # -- what is there

    async def bodies(self, topic: str) -> list[bytes]:
        await self.cluster.shown()
        client = self.cluster.clients["b0"]
        return [body for queue in range(2) for body in await client.bodies(topic, queue)]

    async def listed(self, topic: str) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for shard in self.shards.running.values():
            stub = stubs.TimerInspectorStub(shard.connection)
            request = timer_inspector_pb2.ListTimersRequest(topic=topic, limit=11, with_bodies=True)
            while True:
                page = await status.answer(stub.ListTimers(request, timeout=WAIT_S))
                for each in page.timers:
                    assert each.record.body not in found, "twice"
                    found[each.record.body] = each.handle.due_ms
                    self.model.messages[each.record.body].handle = each.handle
                if not page.token:
                    break
                request.token = page.token
        return found

    async def check(self) -> None:
        """All is at rest: what waits is one of what may be so, and from now on it is that."""
        where: dict[bytes, Where] = {}
        for topic in TOPICS:
            for body, due_ms in (await self.listed(topic)).items():
                assert body not in where
                where[body] = Where(due_ms, topic)
        for body, message in self.model.messages.items():
            at = where.pop(body, GONE)
            may_be = {each._replace(renamed=False) for each in message.at}
            assert at in may_be, (body, at, message, self.done)
            message.at = {at}
        assert not where
        for ask, count in self.jobs:
            assert await self.whole(ask) == count, self.done
        for each in self.shards.running.values():
            stats = await each.stats()
            gone = stats.fired + stats.cancelled + stats.replaced + stats.dropped + stats.lost
            assert stats.accepted == stats.pending + gone
            each.service.shard.scheduler.check()


async def change(world: World, shards: int, holds: float = 0.4) -> None:
    """New ones and old ones in any order, holds and resumes in between, so often."""
    running = world.shards.running
    numbers = sorted({*running, *range(shards)})
    world.random.shuffle(numbers)
    if world.random.random() < 0.5:
        numbers.sort(key=lambda number: number in running)  # new ones first
    for number in numbers:
        await asyncio.sleep(world.random.uniform(0, 0.15))
        known = max((each.service.place.shards for each in running.values()), default=1)
        if world.random.random() < holds and running.keys() >= set(range(known)):
            await until(world.routed)
            await (world.hold if world.random.random() < 0.6 else world.resume)()
            world.done.append(f"held since {world.hold_since_ms}")
        await world.shards.start(number, shards)
        world.done.append(f"started {number} of {shards}")
    await until(lambda: world.shards.owners() == [queue % shards for queue in range(QUEUES)])
    await until(world.routed)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=QUEUES) as running:
        for topic in (*TOPICS, HELD, BEATS):
            await running.create_topic(topic, queues=2)
        yield running


@pytest.fixture
async def shards(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Shards]:
    async with AsyncExitStack() as stack:
        yield Shards(cluster, tmp_path, stack)


async def repeat(over: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
    while not over.is_set():
        await work()
        await asyncio.sleep(0.01)


class FullDisks:
    """Those of some shards, by name; of a shard that starts, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        write, save, short = SegmentedLog.write_group, ShardPlace.save, Housekeeper.short_of_space

        def write_group(log: SegmentedLog) -> Any:
            if log.pending_bytes and self._met(log.directory):
                log.disk_full = True
                raise DiskFull(log.directory)
            return write(log)

        def saved(place: ShardPlace) -> None:
            if self._met(place._path):
                raise DiskFull(place._path)
            save(place)

        def is_short(keeper: Housekeeper) -> bool:
            return self._met(keeper._path) or short(keeper)

        monkeypatch.setattr(SegmentedLog, "write_group", write_group)
        monkeypatch.setattr(ShardPlace, "save", saved)
        monkeypatch.setattr(Housekeeper, "short_of_space", is_short)

    def _met(self, path: str) -> bool:
        return any(f"/{name}/" in path for name in self.names)


def in_slices(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Bulk jobs of few timers take long enough to be met half-way."""
    monkeypatch.setattr(walk, "SHIFTED_AT_ONCE", at_once)
    monkeypatch.setattr(walk, "CANCELLED_AT_ONCE", at_once)
    monkeypatch.setattr(bulk_loop, "PAUSE_S_MIN", 0.02)


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
async def test_what_is_asked_for_while_shards_change_is_done_once(
    cluster: Cluster, shards: Shards, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices(monkeypatch, AT_ONCE)
    chance = random.Random(seed)
    save = ShardCore._last_save

    def saved(self: ShardCore, at_ms: int) -> None:
        if chance.random() < 0.5:  # else it is as after a kill
            save(self, at_ms)

    monkeypatch.setattr(ShardCore, "_last_save", saved)
    monkeypatch.setattr(broker_link, "LAST_WORDS_S", 0.1)
    disks = FullDisks(monkeypatch)
    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        world = World(cluster, shards, admin, seed)
        await admin.put_schedule("beat", topic=BEATS, body=b"beat", every=1, catch_up="all")
        for topic in TOPICS:
            await world.send(topic, 30, 2 * HOUR_MS, 2 * HOUR_MS)
        await world.keyed(10)
        await until(world.look)
        for number in world.random.choice(PATHS):
            over = asyncio.Event()

            async def work() -> None:
                await world.random.choice((world.job, world.job, world.reschedule, world.cancel))()

            async def sends() -> None:
                world.look()
                await world.send(HELD, 2, 0, 400)
                if world.random.random() < 0.5:
                    await world.send(world.random.choice(TOPICS), 1, 2 * HOUR_MS, 2 * HOUR_MS)
                await asyncio.sleep(0.05)

            async def fills() -> None:
                await asyncio.sleep(chance.uniform(0, 0.3))
                disks.names = {f"t{chance.choice(list(shards.running) or [0])}"}
                await asyncio.sleep(chance.uniform(0, 0.3))
                disks.names = set()

            tasks = [asyncio.create_task(repeat(over, each)) for each in (work, sends, fills)]
            await change(world, number)
            over.set()
            await asyncio.gather(*tasks)
            await until(world.look)
            await world.check()
        await end(world)


async def end(world: World) -> None:
    """All that waits is sent: each once, and no other."""
    left = {body for body, message in world.model.messages.items() if message.at != {GONE}}
    await world.admin.delete_schedule("beat")
    await world.resume()
    for topic in TOPICS:
        await world.whole(lambda topic=topic: world.admin.shift_pending(topic, -24 * 3_600))

    schedulers = [each.service.shard.scheduler for each in world.shards.running.values()]
    await until(lambda: all(each.ledger.empty for each in schedulers))
    found = Counter([body for topic in TOPICS for body in await world.bodies(topic)])
    assert found == Counter(left)
    dropped = await world.check_dropped()
    assert sum(each.ledger.dropped for each in schedulers) == len(dropped)
    accepted = sum(each.ledger.accepted for each in schedulers)
    gone = ("fired", "cancelled", "replaced", "dropped")
    assert accepted == sum(getattr(each.ledger, name) for each in schedulers for name in gone)
    client = world.cluster.clients["b0"]
    dues: list[int] = []
    for queue in range(2):
        answer = await client.pull(BEATS, queue)
        dues += [each.due_ms for part in answer.queues for each in part.records.records]
    dues.sort()
    assert dues == list(range(dues[0], dues[-1] + 1, 1_000))
