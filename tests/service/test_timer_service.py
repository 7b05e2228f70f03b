"""A timer shard against real brokers, in one process."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from duemq.aio import Admin
from duemq.errors import ErrorCode, InvalidArgument
from duemq.transport import channel, status
from duemq.v1 import broker_pb2, message_pb2, stubs, timer_pb2
from duemq_server.serving.registration import Registration
from duemq_server.storage.dirlock import DirLock
from duemq_server.timer_service.disk import housekeeping
from duemq_server.timer_service.edge import cancel_requests
from duemq_server.timer_service.process import TimerService
from duemq_server.timer_service.settings import Settings
from tests.service.running_broker import batch
from tests.service.running_cluster import (
    HEARTBEAT_S,
    Cluster,
    no_log_ends_known,
    running_cluster,
    until,
)

TOPIC = "orders"
HOUR_MS = 3_600_000
WAIT_S = 30.0
NEAR_MS = 50_000  # loaded at once; and no test takes so long


class Shard:
    """A running timer shard and a client of it."""

    def __init__(self, service: TimerService, connection: Any) -> None:
        self.service = service
        self.connection = connection
        self.stub = self._stub = stubs.TimerStub(connection)

    async def cancel(self, *handles: message_pb2.TimerHandle) -> list[timer_pb2.CancelResult]:
        request = timer_pb2.CancelRequest(handles=handles)
        return list((await status.answer(self._stub.Cancel(request, timeout=WAIT_S))).results)

    async def stats(self) -> timer_pb2.TimerStats:
        return await status.answer(self._stub.GetStats(timer_pb2.GetStatsRequest(), timeout=WAIT_S))

    async def until(self, condition: Callable[[timer_pb2.TimerStats], bool]) -> None:
        async def holds() -> bool:
            return condition(await self.stats())

        await until(holds)

    async def registered(self) -> None:
        """Its nameserver lists it, and tells others of it."""

        def listed() -> bool:
            registration = self.service._registration
            return registration is not None and registration._accepted

        await until(listed)


def has_looked_round(service: TimerService) -> bool:
    """Whether a broker has refused its claim, or told who else is there; or there is none."""
    routes = service._routes.cache
    told = not routes.brokers or service._others.holders() is not None
    if any("claim" in about for about in service._links._said_s):
        return True
    return bool(service._links.refusals or (routes.version and service.place.key_shards and told))


@asynccontextmanager
async def running_shard(cluster: Cluster, directory: Path, **settings: Any) -> AsyncIterator[Shard]:
    name = settings.setdefault("name", "t0")
    data_dir = str(directory / name)
    given = {"heartbeat_period": HEARTBEAT_S, "drain_timeout": 0.1, **settings}
    with DirLock(data_dir):
        service = TimerService(
            Settings(
                listen="127.0.0.1:0", data_dir=data_dir, nameservers=(cluster.nameserver,), **given
            )
        )
        await service.start(announced=False)
        try:
            await until(lambda: has_looked_round(service))
            async with channel.connect(service.server.address) as connection:
                yield Shard(service, connection)
        finally:
            await service.stop()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", "b1") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def send(
    cluster: Cluster, bodies: list[bytes], delays_ms: list[int], queue_id: int = -1, **fields: Any
) -> list[message_pb2.TimerHandle]:
    """Sends delayed messages to b0; their handles."""
    made = batch(TOPIC, bodies, delays_ms=delays_ms, queue_id=queue_id, **fields)
    request = broker_pb2.SendRequest(request_id=1, batches=[made])
    response = await status.answer(cluster.clients["b0"].broker.Send(request, timeout=WAIT_S))
    [result] = response.results
    return [
        message_pb2.TimerHandle(
            store_id=response.store_id,
            queue_id=result.queue_id,
            offset=result.base_offset + n,
            due_ms=due_ms,
        )
        for n, due_ms in enumerate(result.due_ms)
    ]


async def delivered(cluster: Cluster, broker: str = "b0") -> dict[int, list[message_pb2.Record]]:
    """Records in the topic, by queue; those that are stored a moment ahead of their time, too."""
    await cluster.shown()
    found = {}
    for queue_id in range(2):
        answer = await cluster.clients[broker].pull(TOPIC, queue_id)
        for queue in answer.queues:
            stores = [
                store_ms
                for count, store_ms in zip(queue.run_counts, queue.run_store_ms, strict=True)
                for _ in range(count)
            ]
            records = list(queue.records.records)
            assert all(at >= each.due_ms for at, each in zip(stores, records, strict=True))
            found[queue_id] = records
    return found


def bodies_of(found: dict[int, list[message_pb2.Record]]) -> list[bytes]:
    return sorted(record.body for records in found.values() for record in records)


async def test_delayed_messages_are_delivered_once_with_their_due_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        handles = await send(cluster, [b"a", b"b", b"c"], [0, 30, 60], tags=["x", "y", "z"])
        await shard.until(lambda stats: stats.fired == 3 and not stats.in_flight)

        found = await delivered(cluster)
        assert bodies_of(found) == [b"a", b"b", b"c"]
        due_ms = {each.body: each.due_ms for records in found.values() for each in records}
        assert [due_ms[body] for body in (b"a", b"b", b"c")] == [each.due_ms for each in handles]
        stats = await shard.stats()
        assert (stats.accepted, stats.pending, stats.cancelled) == (3, 0, 0)
        assert (stats.name, stats.shard, stats.shards) == ("t0", 0, 1)
        tagged = [await cluster.clients["b0"].pull(TOPIC, q, filter="y") for q in range(2)]
        assert sum(len(queue.records.records) for each in tagged for queue in each.queues) == 1


async def test_a_message_for_a_queue_goes_to_this_queue(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"a", b"b"], [0, 10], queue_id=1)
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)

        found = await delivered(cluster)
        assert [each.body for each in found[1]] == [b"a", b"b"]
        assert found.get(0, []) == []


async def test_a_cancelled_message_is_not_delivered(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        far, near, due = await send(cluster, [b"far", b"near", b"due"], [HOUR_MS, NEAR_MS, 0])
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)

        results = await shard.cancel(far, near, due, far)

        assert [each.outcome for each in results] == [
            timer_pb2.CANCELLED,
            timer_pb2.CANCELLED,
            timer_pb2.FIRED,
            timer_pb2.CANCELLED,
        ]
        stats = await shard.stats()
        assert (stats.pending, stats.fired, stats.cancelled) == (0, 1, 2)
        assert bodies_of(await delivered(cluster)) == [b"due"]


async def test_a_cancel_that_overtakes_its_message_waits_for_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_requests, "ARRIVAL_TIMEOUT_S", WAIT_S)
    async with running_shard(cluster, tmp_path) as shard:
        handles = [(await send(cluster, [b"%d" % n], [HOUR_MS]))[0] for n in range(10)]
        results = await shard.cancel(*handles)

        assert {each.outcome for each in results} == {timer_pb2.CANCELLED}


async def test_handles_that_name_nothing_here(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_requests, "ARRIVAL_TIMEOUT_S", 0.1)
    async with (
        running_shard(cluster, tmp_path, name="other", shard=0, shards=2),
        running_shard(cluster, tmp_path, shard=1, shards=2) as shard,
    ):
        await until(lambda: bool(shard.service._others.alive))
        unknown = message_pb2.TimerHandle(store_id=1, queue_id=1, offset=0, due_ms=1)
        foreign = message_pb2.TimerHandle(store_id=1, queue_id=2, offset=0, due_ms=1)
        negative = message_pb2.TimerHandle(store_id=1, queue_id=1, offset=-1, due_ms=1)

        first, second, third = await shard.cancel(unknown, foreign, negative)

        # A broker that this shard has not met yet may deliver it: nobody can say "unknown".
        assert first.error.code == int(ErrorCode.UNAVAILABLE)
        assert "no known broker" in first.error.message
        assert second.error.code == int(ErrorCode.UNAVAILABLE)
        assert "belongs to shard 0" in second.error.message
        assert third.error.code == int(ErrorCode.INVALID_ARGUMENT)


async def test_a_cancel_says_that_the_brokers_data_was_replaced(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_requests, "ARRIVAL_TIMEOUT_S", 0.1)
    async with running_shard(cluster, tmp_path) as shard:
        [arrived] = await send(cluster, [b"a"], [HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 1)
        lost = message_pb2.TimerHandle()
        lost.CopyFrom(arrived)
        lost.offset += 1
        await cluster.stop_broker("b0")
        shutil.rmtree(tmp_path / "b0")
        await cluster.start_broker("b0")
        links = shard.service._links.by_name
        await until(lambda: links["b0"].broker.store_id != arrived.store_id)
        store_id = links["b0"].broker.store_id

        first, second = await shard.cancel(arrived, lost)

        assert first.outcome == timer_pb2.CANCELLED
        assert second.error.code == int(ErrorCode.UNAVAILABLE)
        assert second.error.retryable
        for named in ("broker b0", f"{arrived.store_id:016x}", f"{store_id:016x}"):
            assert named in second.error.message
    # A start knows it from what it has kept.
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: "b0" in shard.service._links.by_name)
        [again] = await shard.cancel(lost)
        assert f"{store_id:016x}" in again.error.message


async def test_cancels_at_a_shard_that_has_just_started_wait_until_it_knows(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_requests, "ARRIVAL_TIMEOUT_S", WAIT_S)
    handles = [(await send(cluster, [b"%d" % n], [HOUR_MS]))[0] for n in range(10)]
    async with running_shard(cluster, tmp_path) as shard:
        results = await shard.cancel(*handles)

        assert [each.outcome for each in results] == [timer_pb2.CANCELLED] * 10


async def test_a_full_memtable_waits_for_no_look(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between memory would grow by all that comes."""
    monkeypatch.setattr(housekeeping, "IDLE_MS", HOUR_MS)
    async with running_shard(cluster, tmp_path, memtable_rows_max=64) as shard:
        await send(cluster, [b"far"] * 100, [HOUR_MS] * 100)
        await until(lambda: bool(shard.service.shard.scheduler.segments.blocks()))


async def test_a_long_list_is_cancelled_wherever_its_timers_lie(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path, memtable_rows_max=64) as shard:
        waits = [NEAR_MS + 10 * n for n in range(500)] + [HOUR_MS + n for n in range(1_000)]
        handles = await send(cluster, [b"%d" % n for n in range(len(waits))], waits)
        await shard.until(lambda stats: stats.accepted == len(waits))
        blocks = shard.service.shard.scheduler.segments.blocks
        await until(lambda: bool(blocks()))
        last = handles[-1]
        strange = message_pb2.TimerHandle(
            store_id=last.store_id, queue_id=last.queue_id, offset=last.offset, due_ms=1
        )

        results = await shard.cancel(*handles, *handles, strange)

        outcomes = [each.outcome for each in results]
        assert outcomes == [timer_pb2.CANCELLED] * 2 * len(waits) + [timer_pb2.CANCELLED]
        stats = await shard.stats()
        assert (stats.pending, stats.cancelled) == (0, len(waits))


async def test_shards_share_the_queues(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, name="t0", shard=0, shards=2) as even,
        running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as odd,
    ):
        for producer_id in range(1, 9):
            await send(cluster, [b"%d" % producer_id], [0], producer_id=producer_id)

        async def all_fired() -> bool:
            return (await even.stats()).fired + (await odd.stats()).fired == 8

        await until(all_fired)
        queues = {source.id.queue_id % 2 for source in even.service.shard.sources()}
        assert queues <= {0}
        assert {source.id.queue_id % 2 for source in odd.service.shard.sources()} <= {1}


@pytest.mark.parametrize("late", [False, True], ids=["asks first", "nameservers out of reach"])
async def test_of_two_shards_with_one_name_the_second_ends(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Else nobody finds it, and it takes the name as soon as the first one is silent."""

    async def unasked(self: Registration) -> int:
        return 0

    async with running_shard(cluster, tmp_path, shard=0, shards=2) as first:
        await first.registered()
        listed: set[str] = set()
        routes = cluster.brokers["b0"]._routes

        def note() -> None:
            listed.update(timer.address for timer in routes.cache.timers)

        routes.on_change(note)
        if late:
            monkeypatch.setattr(Registration, "check_free", unasked)
        started: list[Shard] = []

        async def live() -> None:
            async with running_shard(cluster, tmp_path / "other", shard=1, shards=2) as second:
                started.append(second)
                await second.service.run(asyncio.Event())

        with pytest.raises(InvalidArgument, match="another data directory") as refused:
            await live()
        assert bool(started) == late
        address = first.service.server.address
        assert address in str(refused.value)
        assert [one.report.address for one in cluster.registry.timers] == [address]
        await until(lambda: bool(routes.cache.timers))
        note()
        assert listed == {address}
        assert first.service._registration is not None
        assert not first.service._registration.refused.done()


async def test_a_shard_takes_its_name_over_from_a_dead_process_of_its_data(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unsaid(self: Registration, address: str) -> None:
        pass

    with monkeypatch.context() as end:
        end.setattr(Registration, "_deregister", unsaid)
        async with running_shard(cluster, tmp_path) as dead:
            await dead.registered()
            [last] = cluster.registry.timers
    assert cluster.registry.timers == (last,)
    async with running_shard(cluster, tmp_path) as shard:
        await shard.registered()
        [listed] = cluster.registry.timers
        assert listed.report.address == shard.service.server.address
        assert listed.version > last.version


async def test_a_restart_keeps_what_is_pending_and_goes_on_where_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"now", b"soon", b"far"], [0, 300, HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 3 and stats.fired >= 1)
    await send(cluster, [b"while away"], [0])

    async with running_shard(cluster, tmp_path) as shard:
        await shard.until(lambda stats: stats.fired == 3 and not stats.in_flight)
        assert (await shard.stats()).pending == 1
        assert bodies_of(await delivered(cluster)) == [b"now", b"soon", b"while away"]


async def test_offsets_are_committed_once_durable(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        [handle] = await send(cluster, [b"a"], [HOUR_MS])
        await shard.until(lambda stats: stats.accepted == 1)
    request = broker_pb2.GetOffsetsRequest(group="%TIMER%", topic="%TIMER%")
    answer = await status.answer(cluster.clients["b0"].broker.GetOffsets(request))

    offsets = {each.queue_id: each.offset for each in answer.queues}
    assert offsets[handle.queue_id] == handle.offset + 1


async def test_a_broker_from_an_older_copy_gives_no_offset_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard would take what comes for what it has taken over, and never deliver it."""
    no_log_ends_known(monkeypatch)
    data, copy = tmp_path / "b0", tmp_path / "copy"
    async with running_shard(cluster, tmp_path) as shard:
        [first] = await send(cluster, [b"old"], [HOUR_MS], queue_id=1)
        await shard.until(lambda stats: stats.accepted == 1)
        await cluster.stop_broker("b0")
        shutil.copytree(data, copy)
        await cluster.start_broker("b0")
        await send(cluster, [b"lost at the broker"] * 3, [HOUR_MS] * 3, queue_id=1)
        await shard.until(lambda stats: stats.accepted == 4)
        await cluster.stop_broker("b0")
        shutil.rmtree(data)
        shutil.copytree(copy, data)
        await cluster.start_broker("b0")
        queue = cluster.brokers["b0"].store.queue("%TIMER%", first.queue_id)
        await until(lambda: queue.next_offset == 4)
        await send(cluster, [b"new"], [0], queue_id=1)
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        assert bodies_of(await delivered(cluster)) == [b"new"]
        assert (await shard.stats()).pending == 4


async def test_without_its_broker_a_message_goes_to_another_and_one_for_a_queue_waits(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running_shard(cluster, tmp_path) as shard, Admin(cluster.nameserver) as admin:
        # Due after the broker is gone: what is on its way to a broker stays with it.
        await send(cluster, [b"any"], [HOUR_MS])
        await send(cluster, [b"keyed"], [HOUR_MS], queue_id=1)
        await shard.until(lambda stats: stats.accepted == 2)
        await until(lambda: bool(admin._client.routes.timers))
        await cluster.stop_broker("b0")
        assert await admin.shift_pending(TOPIC, -HOUR_MS / 1000) == 2
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        assert bodies_of(await delivered(cluster, "b1")) == [b"any"]

        await cluster.start_broker("b0")
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert bodies_of(await delivered(cluster)) == [b"keyed"]


async def test_figures_are_exposed(cluster: Cluster, tmp_path: Path) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"a", b"b"], [0, HOUR_MS])
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)

        registry = shard.service.server.registry
        assert registry.get_sample_value("duemq_timer_accepted_total") == 2
        assert registry.get_sample_value("duemq_timer_pending") == 1
        assert registry.get_sample_value("duemq_timer_early_total") == 0
        assert registry.get_sample_value("duemq_timer_lateness_ms_count") == 1
        assert (await shard.stats()).next_due_ms > time.time() * 1000
