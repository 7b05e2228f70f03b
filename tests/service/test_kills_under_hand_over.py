"""As test_changes_under_hand_over.py, but shards die, as by kill -9, and holds end by policy.

A shard that dies writes nothing more, tells nobody, and is there again some moments later.
KILLS_SEED and KILLS_ROUNDS: of the random choices, and how many in turn.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from duemq.aio import Admin
from duemq.v1 import broker_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.timer_service import resuming
from duemq_server.timer_service.edge import broker_link
from duemq_server.timer_service.timers.limits import AHEAD_MS
from tests.service.running_broker import batch
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_changes_under_hand_over import (
    BEATS,
    HELD,
    ON_ITS_WAY_MS,
    TOPICS,
    FullDisks,
    World,
    change,
    end,
    in_slices,
    repeat,
)
from tests.service.test_timer_service import HOUR_MS, WAIT_S, Shard
from tests.service.timer_shards import QUEUES, Shards

SEED = int(os.environ.get("KILLS_SEED", "1"))
ROUNDS = int(os.environ.get("KILLS_ROUNDS", "1"))
PATH = (2, 3, 2)
KEYS = ("", "x", "y", "z")
OLDER_MS = (0, 200, 600)
LIFE_S_MAX = 1.0
AT_ONCE = 2
AWAY_S_MAX = 0.2
DROPPED_AT_ONCE = 3


class MortalShards(Shards):
    """Each may die at any moment between its starts."""

    def __init__(self, cluster: Cluster, directory: Path, stack: AsyncExitStack, seed: int) -> None:
        super().__init__(cluster, directory, stack)
        self.random = random.Random(seed)
        self.deaths = 0
        self.disks: FullDisks
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self, number: int, shards: int, **settings: Any) -> Shard:
        async with self._turns[number]:
            if self.random.random() < 0.5:
                await self._die(number)
            return await super().start(number, shards, **settings)

    async def kill(self) -> None:
        """Any of them; it is there again when it returns."""
        await asyncio.sleep(self.random.uniform(0, LIFE_S_MAX))
        if not self.running:
            return
        number = self.random.choice(list(self.running))
        async with self._turns[number]:
            if number not in self.running:
                return
            shards = self.running[number].service.place.shards
            await self._die(number)
            await asyncio.sleep(self.random.uniform(0, AWAY_S_MAX))
            await super().start(number, shards)

    async def _die(self, number: int) -> None:
        if number not in self.running:
            return
        self.deaths += 1
        service: Any = self.running[number].service
        self.disks.names.add(f"t{number}")  # from now on nothing is durable, or said to be
        service.stop = partial(service.stop, handed_over=True)
        await self.stop(number)
        self.disks.names.discard(f"t{number}")


class Kept(NamedTuple):
    """A message to the held topic."""

    due_ms: int
    key: str


class Resumed(NamedTuple):
    """What a policy may, and must, have done."""

    may_go: set[bytes]
    must_go: set[bytes]
    one_a_shard: list[set[bytes]]
    """Of each of these at most one a shard is sent."""


class MortalWorld(World):
    """Holds end by policy, and what shards have counts once it is durable."""

    def __init__(self, cluster: Cluster, shards: Shards, admin: Admin, seed: int) -> None:
        super().__init__(cluster, shards, admin, seed)
        self.kept: dict[bytes, Kept] = {}
        self.kept_there: set[bytes] = set()
        self.resumed: list[Resumed] = []

    def look(self) -> bool:
        cores = [each.service.shard for each in self.shards.running.values()]
        ends = [each.scheduler.log.end_position for each in cores]
        durable = all(each.log_loop.position >= end for each, end in zip(cores, ends, strict=True))
        there = durable and super().look()
        if there:
            self.kept_there = set(self.kept)
        return there

    async def send_kept(self) -> None:
        body, key = b"h%d" % self.sent, self.random.choice(KEYS)
        self.sent += 1
        made = batch(
            HELD,
            [body],
            arrays=False,
            delays_ms=[self.random.randrange(400)],
            queue_id=self.random.choice((-1, 0, 1)),
            producer_id=0,
        )
        made.records.records[0].key = key
        request = broker_pb2.SendRequest(request_id=1, batches=[made])
        call = self.cluster.clients["b0"].broker.Send(request, timeout=WAIT_S)
        [result] = (await call).results
        assert not result.HasField("error"), result
        self.kept[body] = Kept(result.due_ms[0], key)
        self.held_sent[body] = result.due_ms[0]

    async def hold(self) -> None:
        await (super().hold if self.hold_since_ms is None else self.resume)()

    async def resume(self) -> None:
        since_ms = self.hold_since_ms
        policy = self.random.choice(("all", "newest", "drop_older_than", "drop_older_than"))
        if since_ms is None or policy == "all":
            await super().resume()
            return
        await self.check_held()
        self.hold_since_ms = None
        older_ms = self.random.choice(OLDER_MS)
        known, began_ms = set(self.kept_there), now_ms()
        older_than = older_ms / 1000 if policy == "drop_older_than" else None

        async def ask() -> Any:
            return await self.admin.resume_timers(HELD, policy=policy, older_than=older_than)

        async def done() -> bool:
            return bool((await self.whole(ask)).done)

        await until(done)
        ended_ms = now_ms() + AHEAD_MS
        held = {
            body for body in known if since_ms + ON_ITS_WAY_MS < self.kept[body].due_ms <= began_ms
        }
        if policy == "newest":
            self._newest(held, ended_ms)
        else:
            overdue = {b for b, each in self.kept.items() if each.due_ms < ended_ms - older_ms}
            must = {body for body in held if self.kept[body].due_ms < began_ms - older_ms}
            self.resumed.append(Resumed(overdue, must, []))
        self.done.append(f"resumed {policy} {older_ms}")

    def _newest(self, held: set[bytes], ended_ms: int) -> None:
        may: set[bytes] = set()
        groups: list[set[bytes]] = []
        for key in KEYS[1:]:
            of_key = {b: each.due_ms for b, each in self.kept.items() if each.key == key}
            due = {body: at for body, at in of_key.items() if at <= ended_ms}
            may |= {b for b, at in due.items() if any(at <= o for c, o in due.items() if c != b)}
            groups.append(held & of_key.keys())
        self.resumed.append(Resumed(may, set(), groups))

    async def check_dropped(self) -> set[bytes]:
        """Of the held topic is there what no policy has left out; what is not."""
        found = await self.bodies(HELD)
        sent = set(found)
        assert len(sent) == len(found), "twice"
        gone = set(self.kept) - sent
        may = {body for each in self.resumed for body in each.may_go}
        assert gone <= may, (gone - may, self.done)
        for each in self.resumed:
            assert not each.must_go & sent, (each.must_go & sent, self.done)
            for group in each.one_a_shard:
                assert len(group & sent) <= len(self.shards.running) + 1, self.done
        return gone


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=QUEUES) as running:
        for topic in (*TOPICS, HELD, BEATS):
            await running.create_topic(topic, queues=2)
        yield running


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
async def test_what_is_asked_for_while_shards_die_and_change_is_done_once(
    cluster: Cluster, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices(monkeypatch, AT_ONCE)
    monkeypatch.setattr(resuming, "SLICE", DROPPED_AT_ONCE)
    monkeypatch.setattr(broker_link, "LAST_WORDS_S", 0.1)
    async with AsyncExitStack() as stack:
        shards = MortalShards(cluster, tmp_path, stack, seed)
        shards.disks = FullDisks(monkeypatch)
        await shards.start(0, 1)
        admin = await stack.enter_async_context(Admin(cluster.nameserver))
        await until(lambda: bool(admin._client.routes.timers))
        world = MortalWorld(cluster, shards, admin, seed)
        await admin.put_schedule("beat", topic=BEATS, body=b"beat", every=1, catch_up="all")
        for topic in TOPICS:
            await world.send(topic, 30, 2 * HOUR_MS, 2 * HOUR_MS)
        await world.keyed(10)
        await until(world.look)
        for number in PATH:
            over = asyncio.Event()

            async def work() -> None:
                await world.random.choice((world.job, world.job, world.reschedule, world.cancel))()

            async def sends() -> None:
                world.look()
                await world.send_kept()
                if world.random.random() < 0.3:
                    await world.send(world.random.choice(TOPICS), 1, 2 * HOUR_MS, 2 * HOUR_MS)
                await asyncio.sleep(0.05)

            async with asyncio.TaskGroup() as tasks:
                for each in (work, sends, shards.kill):
                    tasks.create_task(repeat(over, each))
                await change(world, number, holds=0.9)
                over.set()
            await until(world.look)
            await world.check()
        assert shards.deaths
        await end(world)
