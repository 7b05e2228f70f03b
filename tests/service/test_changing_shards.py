"""The number of timer shards changes while timers are pending: nothing is lost, early or twice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest

from duemq import CancelOutcome, aio
from duemq.aio import Admin
from duemq.errors import ErrorCode, PartialAnswer, Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.route import RouteCache, TimerShard, Update
from duemq.v1 import (
    broker_pb2,
    message_pb2,
    timer_inspector_pb2,
    timer_inspector_pb2_grpc,
    timer_pb2,
)
from duemq_cli.exits import Exit
from duemq_server.broker.records import timer_owners
from duemq_server.serving.clock import now_ms
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.disk.place import Place
from duemq_server.timer_service.edge import broker_link, cancel_requests
from duemq_server.timer_service.edge.others import other_shards
from duemq_server.timer_service.edge.others.other_shards import (
    NOWHERE_ELSE,
    Answered,
    Located,
    OtherShards,
)
from tests.crash.faulty_disk import FaultyDisk
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    Shard,
    batch,
    bodies_of,
    delivered,
    running_shard,
    send,
)

QUEUES = 8  # of %TIMER%


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=QUEUES) as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


class Shards:
    """Timer shards by number; each goes on with its data when it is started again."""

    def __init__(self, cluster: Cluster, directory: Path, stack: AsyncExitStack) -> None:
        self._cluster = cluster
        self._directory = directory
        self._stack = stack
        self._lives: dict[int, AsyncExitStack] = {}
        self.running: dict[int, Shard] = {}

    async def start(self, number: int, shards: int, **settings: Any) -> Shard:
        await self.stop(number)
        life = self._lives[number] = AsyncExitStack()
        self._stack.push_async_exit(life)
        self.running[number] = await life.enter_async_context(
            running_shard(
                self._cluster,
                self._directory,
                name=f"t{number}",
                shard=number,
                shards=shards,
                **settings,
            )
        )
        return self.running[number]

    async def stop(self, number: int) -> None:
        if number in self.running:
            del self.running[number]
            await self._lives.pop(number).aclose()

    async def change(self, shards: int) -> None:
        """As a rolling update does it: new ones first, then those that there are, one by one."""
        before = sorted(self.running)
        for number in range(shards):
            if number not in before:
                await self.start(number, shards)
        for number in reversed(before):
            await self.start(number, shards)
        await until(lambda: self.owners() == [queue % shards for queue in range(QUEUES)])

    def owners(self) -> list[int | None]:
        """Of each queue at b0, by number of shard."""
        owners = self._cluster.brokers["b0"].store.timer_owners
        claims = map(owners.claim_of, range(QUEUES))
        return [claim.service.shard if claim is not None else None for claim in claims]

    async def ledgers(self) -> tuple[int, int]:
        """Accepted and fired, of all together."""
        found = [await shard.stats() for shard in self.running.values()]
        return sum(each.accepted for each in found), sum(each.fired for each in found)

    async def pending(self) -> int:
        return sum([(await shard.stats()).pending for shard in self.running.values()])

    def pending_in(self, topic: str) -> int:
        schedulers = [shard.service.shard.scheduler for shard in self.running.values()]
        return sum(scheduler.topics.of(topic).pending for scheduler in schedulers)

    def source(self, number: int, handle: message_pb2.TimerHandle) -> Any:
        sources = self.running[number].service.shard.scheduler.numbers.sources
        wanted = (handle.store_id, handle.queue_id)
        return next((each for each in sources if each.id == wanted), None)


@pytest.fixture
async def shards(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Shards]:
    async with AsyncExitStack() as stack:
        yield Shards(cluster, tmp_path, stack)


async def send_to_all(
    cluster: Cluster, bodies: list[bytes], delay_ms: int
) -> list[message_pb2.TimerHandle]:
    """Each body in a queue of %TIMER% of its own: producers have one each."""
    handles: list[message_pb2.TimerHandle] = []
    for body in bodies:
        handles += await send(cluster, [body], [delay_ms], producer_id=0, queue_id=-1)
    return handles


async def send_to(
    cluster: Cluster, timer_queue: int, body: bytes, delay_ms: int
) -> message_pb2.TimerHandle:
    """A message that waits in this queue of %TIMER%, of the lower half: it has a queue to go to."""
    client = cluster.clients["b0"]
    [handle] = await send(cluster, [body], [delay_ms], queue_id=timer_queue % 2, producer_id=0)
    if handle.queue_id == timer_queue:
        return handle
    raise AssertionError((handle.queue_id, timer_queue, client))


async def test_a_second_shard_gets_its_queues_as_soon_as_the_first_one_knows(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    old = [await send_to(cluster, queue, b"old", HOUR_MS) for queue in (0, 1)]
    await shards.running[0].until(lambda stats: stats.pending == 2)
    second = await shards.start(1, 2)
    await until(lambda: bool(second.service._links.problems()))
    [problem] = (await second.stats()).problems
    assert "queues 1, 3, 5, 7 of broker b0 are still those of t0 (shard 0 of 1)" in problem
    assert "--shards 2" in problem
    assert second.service._links.waiting == 4
    new = await send_to(cluster, 1, b"new", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 3)  # it goes on meanwhile

    first = await shards.start(0, 2)
    await until(lambda: shards.owners() == [0, 1] * 4)
    await until(lambda: second.service._links.waiting == 0)
    assert not (await second.stats()).problems
    newest = await send_to(cluster, 1, b"newest", HOUR_MS)
    await second.until(lambda stats: stats.pending == 1)
    assert (await first.stats()).pending == 3
    # Each answers for what the other one has.
    for asked, handle in ((second, old[1]), (second, new), (first, newest), (second, old[0])):
        [result] = await asked.cancel(handle)
        assert result.outcome == timer_pb2.CANCELLED
    assert await shards.pending() == 0
    for asked in (first, second):
        for handle in (*old, new, newest):
            [result] = await asked.cancel(handle)
            assert result.outcome == timer_pb2.CANCELLED


async def test_of_two_that_are_one_new_shard_the_second_is_refused(
    cluster: Cluster, shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shards.start(0, 1)
    first = await shards.start(1, 2)
    await until(lambda: first.service._links.waiting == 4)
    async with running_shard(cluster, tmp_path, name="twin", shard=1, shards=2) as second:
        await until(lambda: bool(second.service._links.refusals))
        [problem] = (await second.stats()).problems
        assert "refused by broker b0: timer_id: the timer service t1 (shard 1 of 2" in problem
        assert "waits until they are handed over" in problem
        assert second.service._links.waiting == 0

        # The broker knows who waits after a restart, too.
        await cluster.stop_broker("b0")
        await cluster.start_broker("b0")
        owners = cluster.brokers["b0"].store.timer_owners
        first_id, second_id = (x.service.shard.directory.producer_id for x in (first, second))

        def is_refused() -> bool:
            found = owners.refused_of(1)
            return found is not None and found[0].id == second_id

        await until(is_refused)
        await until(lambda: bool(owners.last_seen_ms(first_id)))
        assert not owners.last_seen_ms(second_id)

        # Once the first is gone for good the second waits instead, and gets what is handed over.
        await shards.stop(1)
        monkeypatch.setattr(timer_owners, "ALIVE_MS", 0)
        await until(lambda: second.service._links.waiting == 4)
        assert not second.service._links.refusals
        await shards.start(0, 2)
        await until(lambda: shards.owners() == [0, 1] * 4)
        handle = await send_to(cluster, 1, b"new", HOUR_MS)
        await second.until(lambda stats: stats.pending == 1)
        [result] = await second.cancel(handle)
        assert result.outcome == timer_pb2.CANCELLED


async def test_one_two_four_three_and_each_message_comes_once(
    cluster: Cluster, shards: Shards
) -> None:
    sent: list[bytes] = []
    stop = asyncio.Event()

    async def keep_sending() -> None:
        while not stop.is_set():
            bodies = [b"%d" % (len(sent) + n) for n in range(4)]
            for queue_id in (-1, 0, 1):
                made = [b"%s/%d" % (body, queue_id) for body in bodies]
                await send(cluster, made, [0, 1, 30, 400], queue_id=queue_id, producer_id=0)
                sent.extend(made)
            await asyncio.sleep(0.01)

    await shards.start(0, 1)
    sending = asyncio.create_task(keep_sending())
    for number in (2, 4, 3):
        handed = len(sent)
        await shards.change(number)
        await until(lambda handed=handed: len(sent) > handed + 100)
        assert sorted(shards.running) == list(range(4 if number == 3 else number))
    stop.set()
    await sending

    async def all_fired() -> bool:
        return await shards.ledgers() == (len(sent), len(sent))

    await until(all_fired)
    await until(lambda: all_stored(shards))
    found = bodies_of(await delivered(cluster))
    assert found == sorted(sent)
    leaving = await shards.running[3].stats()
    assert (leaving.shard, leaving.shards, leaving.pending) == (3, 3, 0)
    await shards.stop(3)  # it is empty
    await send(cluster, [b"last"], [0])
    await until(lambda: all_stored(shards))
    assert b"last" in bodies_of(await delivered(cluster)) or await comes(cluster, b"last")


def all_stored(shards: Shards) -> bool:
    return not any(
        shard.service.shard.scheduler.ledger.in_flight for shard in shards.running.values()
    )


async def comes(cluster: Cluster, body: bytes) -> bool:
    async def there() -> bool:
        return body in bodies_of(await delivered(cluster))

    await until(there)
    return True


async def test_a_queue_that_comes_back_begins_where_the_other_shard_left_it(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    first = await send_to(cluster, 1, b"first", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    await shards.change(2)
    theirs = await send_to(cluster, 1, b"theirs", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)

    await shards.start(0, 1)
    await until(lambda: bool(shards.running[0].service._links.problems()))
    [problem] = (await shards.running[0].stats()).problems
    assert "t1 (shard 1 of 2)" in problem
    leaving = await shards.start(1, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: len(admin._client.routes.timers) == 2)
    shown = await run(cluster.nameserver, "cluster", "show")
    assert shown.exit_code == Exit.OK, shown.stdout
    assert "leaves, pending 1, " in " ".join(shown.stdout.split())
    last = await send_to(cluster, 1, b"last", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 2)
    assert (await leaving.stats()).pending == 1
    assert shards.source(0, last).skipped == ((theirs.offset, last.offset),)
    # What it skipped is remembered over a restart, from the checkpoint and from the log.
    for _ in range(2):
        await shards.start(0, 1)
        assert shards.source(0, last).skipped == ((theirs.offset, last.offset),)

    reached = shards.source(0, last).next_offset
    assert (first.offset, theirs.offset, reached) == (0, 1, 3)
    [result] = await shards.running[0].cancel(theirs)
    while result.error.retryable:  # it has not heard of the others yet, and says so
        assert "may have it is away" in result.error.message
        [result] = await shards.running[0].cancel(theirs)
    assert result.outcome == timer_pb2.CANCELLED
    assert (await leaving.stats()).pending == 0
    await shards.stop(1)
    [result] = await shards.running[0].cancel(theirs)
    assert result.error.code == ErrorCode.UNAVAILABLE
    assert "t1" in result.error.message
    for handle in (first, last):
        [result] = await shards.running[0].cancel(handle)
        assert result.outcome == timer_pb2.CANCELLED


async def test_what_is_asked_by_handle_is_passed_on(cluster: Cluster, shards: Shards) -> None:
    await shards.start(0, 1)
    old = await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    await shards.change(2)
    second = shards.running[1]
    new = await send_to(cluster, 1, b"new", HOUR_MS)
    await second.until(lambda stats: stats.pending == 1)
    inspector = timer_inspector_pb2_grpc.TimerInspectorStub(second.connection)
    asked = timer_inspector_pb2.GetTimersRequest(handles=[old, new, old])
    found = (await inspector.GetTimers(asked)).timers
    assert [each.record.body for each in found] == [b"old", b"new", b"old"]
    assert {each.state for each in found} == {timer_inspector_pb2.TIMER_PENDING}

    request = timer_pb2.RescheduleRequest(
        request_id=b"r" * 16,
        timers=[timer_pb2.TimerRef(handle=old), timer_pb2.TimerRef(handle=new)],
        delays_ms=[0],
    )
    answers = [await second.stub.Reschedule(request) for _ in range(2)]
    assert answers[0] == answers[1]  # each did its part once
    assert [each.outcome for each in answers[0].results] == [timer_pb2.RESCHEDULED] * 2
    await comes(cluster, b"old")
    await comes(cluster, b"new")
    assert bodies_of(await delivered(cluster)) == [b"new", b"old"]


async def test_a_cancel_that_waits_goes_to_who_took_the_timer_over_meanwhile(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard that is asked expects it, and gets the queue only behind it."""
    monkeypatch.setattr(cancel_requests, "ARRIVAL_TIMEOUT_S", 60.0)
    await shards.start(0, 1)
    old = await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    second = await shards.start(1, 2)
    await until(lambda: second.service._links.waiting == 4)
    await until(lambda: len(second.service._others.alive) == 1)
    due_ms = old.due_ms + HOUR_MS
    made = batch(TOPIC, [b"new"], due_ms=[due_ms], queue_id=1, producer_id=0)
    new = message_pb2.TimerHandle(
        store_id=old.store_id, queue_id=1, offset=old.offset + 1, due_ms=due_ms
    )
    located: list[Located] = []
    locate = second.service._others.locate

    async def told(*asked: Any) -> Located:
        located.append(await locate(*asked))
        return located[-1]

    monkeypatch.setattr(second.service._others, "locate", told)
    waits = asyncio.create_task(second.cancel(new))
    await until(lambda: bool(located))
    assert not located[0].shards
    assert not located[0].missing
    await cluster.clients["b0"].send(made)
    await shards.running[0].until(lambda stats: stats.pending == 2)
    await shards.start(0, 2)
    await until(lambda: shards.owners() == [0, 1] * 4)
    await until(lambda: len(second.service._others.alive) == 1)
    await send_to(cluster, 1, b"newest", HOUR_MS)
    [result] = await waits
    assert result.outcome == timer_pb2.CANCELLED
    assert await shards.pending() == 2


async def test_what_came_to_another_shard_while_that_was_asked_is_found_there(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was nowhere, then there, and then the shard that is asked got the queue behind it."""
    await shards.start(0, 1)
    await send_to(cluster, 1, b"first", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    await shards.change(2)
    theirs = await send_to(cluster, 1, b"theirs", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    await shards.change(1)
    await send_to(cluster, 1, b"last", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 2)
    others = shards.running[0].service._others
    await until(lambda: len(others.alive) == 1)

    locate = others.locate
    asked: list[Any] = []

    async def too_early(*request: Any) -> Located:
        asked.append(request)
        return await locate(*request) if len(asked) % 2 == 0 else NOWHERE_ELSE

    monkeypatch.setattr(others, "locate", too_early)
    inspector = timer_inspector_pb2_grpc.TimerInspectorStub(shards.running[0].connection)
    get = timer_inspector_pb2.GetTimersRequest(handles=[theirs])
    assert [each.record.body for each in (await inspector.GetTimers(get)).timers] == [b"theirs"]
    [result] = await shards.running[0].cancel(theirs)
    assert result.outcome == timer_pb2.CANCELLED
    assert await shards.pending() == 2


async def test_a_reschedule_has_no_second_part_for_what_came_to_another_shard_meanwhile(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That shard would answer it as the first one, which has the same id."""
    await shards.start(0, 1)
    old = await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    second = await shards.start(1, 2)
    await until(lambda: second.service._links.waiting == 4)
    others = second.service._others
    await until(lambda: len(others.alive) == 1)
    due_ms = old.due_ms + HOUR_MS
    new = message_pb2.TimerHandle(
        store_id=old.store_id, queue_id=1, offset=old.offset + 1, due_ms=due_ms
    )
    request = timer_pb2.RescheduleRequest(
        request_id=b"1" * 16,
        timers=[timer_pb2.TimerRef(handle=each) for each in (old, new)],
        delays_ms=[HOUR_MS // 2],
    )
    locate = others.locate

    async def comes_meanwhile(*asked: Any) -> Located:
        monkeypatch.setattr(others, "locate", locate)
        located = await locate(*asked)
        assert located.shards.keys() == {0}
        made = batch(TOPIC, [b"new"], due_ms=[due_ms], queue_id=1, producer_id=0)
        await cluster.clients["b0"].send(made)
        await shards.running[0].until(lambda stats: stats.pending == 2)
        await shards.start(0, 2)
        await send_to(cluster, 1, b"newest", HOUR_MS)
        await second.until(lambda stats: stats.pending == 1)
        await until(lambda: len(others.alive) == 1)
        return Located({0: others.alive[0]}, {})

    monkeypatch.setattr(others, "locate", comes_meanwhile)
    answers = [await second.stub.Reschedule(request) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].results[0].outcome == timer_pb2.RESCHEDULED
    assert answers[0].results[1].error.code == ErrorCode.UNAVAILABLE
    request.request_id = b"2" * 16
    results = (await second.stub.Reschedule(request)).results
    outcomes = [each.outcome for each in results]
    assert outcomes == [timer_pb2.RESCHEDULE_UNKNOWN, timer_pb2.RESCHEDULED]
    assert await shards.pending() == 3


async def test_a_replica_that_was_deposed_does_not_answer_for_its_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one has taken over, and handed over, what it does not know of."""
    routes = RouteCache()
    routes.apply(Update(whole=True, timers=(TimerShard("t1", "127.0.0.1:1", 1, 2, store_id=8),)))
    others = OtherShards(routes, "t0", place_of(0, 2))
    told = broker_pb2.TimerService(id=8, name="t1", shard=1, shards=2, epoch=5)
    others.holders = lambda: [told]
    answer = timer_pb2.LocateTimersResponse(here=[False], epoch=4)

    async def answered(*_: Any) -> timer_pb2.LocateTimersResponse:
        return answer

    monkeypatch.setattr(other_shards.status, "answer", answered)
    handle = message_pb2.TimerHandle(store_id=1)
    located = await others.locate([handle], [0])
    assert "another replica does since 5" in str(located.missing[0])
    for epoch in (5, 6, 0):
        answer.epoch = epoch
        assert await others.locate([handle], [0]) == Located({}, {})
    await others.stop()


async def test_a_broker_tells_in_which_epoch_others_are_led(cluster: Cluster) -> None:
    client = cluster.clients["b0"]
    first, second = (
        broker_pb2.TimerService(
            id=SERVICE_IDS_FROM + number, name=f"t{number}", shard=number, shards=2, key_shards=2
        )
        for number in (0, 1)
    )
    for epoch in (5, 6):
        await client.broker.ClaimTimerQueues(
            broker_pb2.ClaimTimerQueuesRequest(service=first, queue_ids=[0], epoch=epoch)
        )
    answer = await client.broker.ClaimTimerQueues(
        broker_pb2.ClaimTimerQueuesRequest(service=second, queue_ids=[1])
    )
    assert [(each.name, each.epoch) for each in answer.holders] == [("t0", 6)]


async def test_nothing_is_unknown_before_the_broker_that_it_came_from_has_told_who_is_there(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker has told that nobody is."""
    handle = await shrunk(cluster, shards)
    await stopped_long_ago(cluster, shards, 1)
    links = (await shards.start(0, 1)).service._links
    await until(lambda: bool(links.holders))
    await until(lambda: not shards.running[0].service._others.alive)
    link = links.by_name["b0"]
    with monkeypatch.context() as patch:
        patch.setattr(shards.running[0].service._others, "holders", list)  # the other one's
        patch.setattr(broker_link, "CLAIM_INTERVAL_S", 3600.0)
        holders, link.holders = link.holders, None
        [result] = await shards.running[0].cancel(handle)
        link.holders = holders
    assert result.error.code == ErrorCode.UNAVAILABLE
    assert "broker b0 has not told yet" in result.error.message


async def test_a_shard_of_the_same_number_does_not_answer_for_another_data_directory() -> None:
    routes = RouteCache()
    twin = TimerShard("t1", "127.0.0.1:1", 1, 2, store_id=8)
    routes.apply(Update(whole=True, timers=(twin,)))
    others = OtherShards(routes, "t0", place_of(0, 2))
    assert not others._away()
    others.holders = lambda: [broker_pb2.TimerService(id=8, name="t1", shard=1, shards=2)]
    assert not others._away()
    others.holders = lambda: [broker_pb2.TimerService(id=9, name="t1", shard=1, shards=2)]
    assert others._away() == ["t1 (shard 1)"]


class Request(NamedTuple):
    """A Reschedule of timers of shard 0, of shard 1, and of one that has not arrived anywhere."""

    proto: timer_pb2.RescheduleRequest
    arrives: Callable[[], Awaitable[None]]
    """The last one does, at shard 1."""


async def of_both_and_none(cluster: Cluster, shards: Shards, request_id: bytes) -> Request:
    await shards.start(0, 1)
    old = await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    await shards.change(2)
    new = await send_to(cluster, 1, b"new", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    due_ms = new.due_ms + HOUR_MS
    later = message_pb2.TimerHandle(
        store_id=new.store_id, queue_id=new.queue_id, offset=new.offset + 1, due_ms=due_ms
    )

    async def arrives() -> None:
        made = batch(TOPIC, [b"later"], due_ms=[due_ms], queue_id=1, producer_id=0)
        await cluster.clients["b0"].send(made)
        await until(lambda: shards.source(1, later).had(later.offset))

    return Request(
        timer_pb2.RescheduleRequest(
            request_id=request_id,
            timers=[timer_pb2.TimerRef(handle=each) for each in (old, new, later)],
            delays_ms=[HOUR_MS // 2],
        ),
        arrives,
    )


def check_but_for_the_last(answer: timer_pb2.RescheduleResponse) -> None:
    assert [each.outcome for each in answer.results[:2]] == [timer_pb2.RESCHEDULED] * 2
    assert answer.results[2].error.code == ErrorCode.UNAVAILABLE


async def test_a_repeat_is_answered_as_before_though_a_timer_arrived_elsewhere(
    cluster: Cluster, shards: Shards
) -> None:
    request, arrives = await of_both_and_none(cluster, shards, b"1" * 16)
    answer = await shards.running[0].stub.Reschedule(request)
    check_but_for_the_last(answer)
    await arrives()
    assert await shards.running[0].stub.Reschedule(request) == answer
    assert await shards.pending() == 3
    for number in (1, 0):
        await shards.start(number, 2)
    await until(lambda: len(shards.running[0].service._others.alive) == 1)
    assert await shards.running[0].stub.Reschedule(request) == answer
    request.request_id = b"2" * 16
    answer = await shards.running[0].stub.Reschedule(request)
    outcomes = [each.outcome for each in answer.results]
    assert outcomes == [timer_pb2.RESCHEDULE_UNKNOWN] * 2 + [timer_pb2.RESCHEDULED]


async def test_a_repeat_passes_on_what_could_not_be_passed_on_before(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, arrives = await of_both_and_none(cluster, shards, b"1" * 16)

    async def fail(_: OtherShards, located: Located, ask: object) -> list[Answered[Any]]:
        return [Answered(list(located.shards), Unavailable("t1 went away"))]

    with monkeypatch.context() as patch:
        patch.setattr(OtherShards, "each", fail)
        with pytest.raises(grpc.aio.AioRpcError, match="t1 went away"):
            await shards.running[0].stub.Reschedule(request)
    await arrives()
    answers = [await shards.running[0].stub.Reschedule(request) for _ in range(2)]
    check_but_for_the_last(answers[0])
    assert answers[0] == answers[1]
    assert await shards.pending() == 3


async def test_keys_and_schedules_stay_where_they_are(cluster: Cluster, shards: Shards) -> None:
    await shards.start(0, 1)
    async with (
        Admin(cluster.nameserver) as admin,
        aio.Producer(cluster.nameserver) as producer,
    ):
        keys = [f"k{n}" for n in range(8)]
        for key in keys:
            await producer.send(TOPIC, b"one", timer_key=key, delay=3600)
        await admin.put_schedule("beat", topic=TOPIC, body=b"beat", every=3600)
        await shards.change(2)
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert admin._client.routes.key_shards == 1
        receipts = [await producer.send(TOPIC, b"two", timer_key=key, delay=3600) for key in keys]
        assert all(each.replaced is not None for each in receipts)
        outcomes = await producer.cancel(key=[(TOPIC, key) for key in keys])
        assert set(outcomes) == {CancelOutcome.CANCELLED}
        assert [each.name for each in await admin.schedules()] == ["beat"]
        with pytest.raises(Unavailable, match="belongs to shard 0 of 1"):
            shards.running[1].service.place.check_key(TOPIC, "k0")


async def test_a_hold_holds_at_a_shard_that_comes_later(cluster: Cluster, shards: Shards) -> None:
    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        await admin.hold_timers(TOPIC)
        await shards.change(2)
        await send_to(cluster, 1, b"held", 0)
        await shards.running[1].until(lambda stats: stats.pending == 1)
        await until(lambda: len(admin._client.routes.timers) == 2)

        async def is_held() -> bool:
            [count] = await admin.count_timers(TOPIC)
            return count.held == 1

        await until(is_held)
        assert (await shards.running[1].stats()).fired == 0
        resumed = await admin.resume_timers(TOPIC)
        assert resumed.was_held
        await comes(cluster, b"held")


async def test_who_cannot_know_what_is_held_says_so_until_it_does(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 2)
    await until(lambda: shards.owners()[0] == 0)
    async with Admin(cluster.nameserver) as admin:  # else nobody knows that it is away
        await until(lambda: bool(admin._client.routes.timers))
    await shards.stop(0)
    waiting = await shards.start(1, 2)
    await until(lambda: bool(waiting.service._links.problems()))
    [problem] = (await waiting.stats()).problems
    assert (
        "nothing new is fetched from broker b0 yet: what is held is not known while t0" in problem
    )
    await send_to(cluster, 1, b"waits", 0)
    await shards.start(0, 2)
    await waiting.until(lambda stats: stats.fired == 1)
    assert not (await waiting.stats()).problems


async def test_a_missing_shard_makes_answers_partial_and_hands_nothing_over(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 2)
    await shards.start(1, 2)
    await until(lambda: shards.owners() == [0, 1] * 4)
    handle = await send_to(cluster, 1, b"waits", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    await shards.stop(1)
    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        with pytest.raises(PartialAnswer, match="timer shard 1"):
            await admin.count_timers(TOPIC)
    assert shards.owners() == [0, 1] * 4
    [result] = await shards.running[0].cancel(handle)
    assert result.error.code == ErrorCode.UNAVAILABLE
    await shards.start(1, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    [result] = await shards.running[0].cancel(handle)
    assert result.outcome == timer_pb2.CANCELLED


async def shrunk(cluster: Cluster, shards: Shards) -> message_pb2.TimerHandle:
    """Of two shards the second has handed its queues over, and holds this timer."""
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    await shards.change(2)
    handle = await send_to(cluster, 1, b"theirs", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    await shards.start(1, 1)
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    await send_to(cluster, 1, b"last", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    return handle


async def stopped_long_ago(cluster: Cluster, shards: Shards, number: int) -> None:
    """Nameservers do not remember any more who was lost."""
    await shards.stop(number)
    [lost] = cluster.registry.lost_timers
    cluster.registry.lost_kept_ms = 0
    cluster.registry.expire(lost.lost_ms)
    assert not cluster.registry.lost_timers


async def test_what_a_shard_that_left_holds_is_missed_while_it_is_away(
    cluster: Cluster, shards: Shards
) -> None:
    handle = await shrunk(cluster, shards)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: len(admin._client.routes.timers) == 2)
        [count] = await admin.count_timers(TOPIC)
        assert count.pending == 2
        await stopped_long_ago(cluster, shards, 1)
        await shards.start(0, 1)
        await until(lambda: not admin._client.routes.lost_timers)
        assert [each.name for each in admin._client.routes.timers] == ["t0"]
        for ask in (admin.count_timers, admin.hold_timers, admin.resume_timers):
            with pytest.raises(PartialAnswer, match=r"timer shard 1 \(t1\).* waits at t1"):
                await ask(TOPIC)
        [result] = await shards.running[0].cancel(handle)
        assert result.error.code == ErrorCode.UNAVAILABLE
        shown = await run(cluster.nameserver, "timer", "owners", "--json")
        [other] = [each for each in rows(shown) if each["queue"] is None]
        assert (other["name"], other["shard"], other["shards"]) == ("t1", 1, 1)

        await shards.start(1, 1)
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert (await shards.running[1].cancel(handle))[0].outcome == timer_pb2.CANCELLED
        await stopped_long_ago(cluster, shards, 1)  # it holds nothing: nobody misses it
        await shards.start(0, 1)
        await until(lambda: not shards.running[0].service._others.there)
        await until(lambda: [each.name for each in admin._client.routes.timers] == ["t0"])
        [count] = await admin.count_timers(TOPIC)
        assert count.pending == 1
        assert (await shards.running[0].cancel(handle))[0].outcome == timer_pb2.UNKNOWN


async def test_a_shard_that_leaves_says_at_once_that_it_holds_nothing(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its next claim: whoever kills it before that would leave it missing."""
    handle = await shrunk(cluster, shards)
    owners = cluster.brokers["b0"].store.timer_owners
    await until(lambda: "t1" in {each.name for each in owners.holders()})
    monkeypatch.setattr(broker_link, "CLAIM_INTERVAL_S", 3600.0)
    await shards.start(1, 1)
    links = shards.running[1].service._links
    await until(lambda: links.holders is not None)  # it has claimed
    assert (await shards.running[1].cancel(handle))[0].outcome == timer_pb2.CANCELLED
    await until(lambda: "t1" not in {each.name for each in owners.holders()})


async def test_a_shard_that_keeps_keys_and_has_no_queues_has_no_twin(
    cluster: Cluster, shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shards.start(0, 2)
    await shards.change(2)
    await shards.start(1, 1)
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    async with running_shard(cluster, tmp_path, name="twin", shard=1, shards=2) as twin:
        await until(lambda: bool(twin.service._links.refusals))
        [problem] = (await twin.stats()).problems
        assert "t1 (shard 1 of 1" in problem
        assert "holds what it took over of this shard" in problem
        assert twin.service._registration is None

        await shards.stop(1)
        shown = await run(cluster.nameserver, "timer", "release", "1")
        assert "t1 (id " in shown.stdout
        assert shown.exit_code == Exit.FAILED  # it says what is lost, and does nothing
        monkeypatch.setattr(timer_owners, "ALIVE_MS", 0)
        shown = await run(cluster.nameserver, "timer", "release", "1", "--accept-loss")
        assert shown.exit_code == Exit.OK
        await until(lambda: twin.service._registration is not None)
        await shards.start(1, 1)  # it was not lost after all, and is late
        await until(lambda: bool(shards.running[1].service._links.refusals))
        assert "replaced" in (await shards.running[1].stats()).problems[0]


async def test_what_was_handed_over_is_so_after_a_restart_of_the_broker(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    first = await shards.start(0, 2)
    await until(lambda: shards.owners() == [0, None] * 4)
    new = await send_to(cluster, 1, b"new", HOUR_MS)
    await cluster.stop_broker("b0")
    await cluster.start_broker("b0")
    assert shards.owners() == [0, None] * 4
    second = await shards.start(1, 2)
    await second.until(lambda stats: stats.pending == 1)
    assert (await first.stats()).pending == 1
    assert shards.source(1, new).first_offset == new.offset


async def test_a_claim_that_says_too_much_is_refused(cluster: Cluster, shards: Shards) -> None:
    first = await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    service = first.service._links.service
    client = cluster.clients["b0"]
    for queue_id, offset in ((QUEUES, 0), (1, -1)):
        end = broker_pb2.TimerQueueEnd(queue_id=queue_id, offset=offset)
        request = broker_pb2.ClaimTimerQueuesRequest(service=service, ends=[end])
        with pytest.raises(Exception, match=r"queue|ends\.offset"):
            await client.broker.ClaimTimerQueues(request)
    assert shards.owners() == [0] * QUEUES


async def test_keys_stay_divided_where_a_new_broker_is_the_first_that_a_new_shard_asks(
    cluster: Cluster, shards: Shards
) -> None:
    """While the others are away only the nameservers know what keys are divided over."""
    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: any(each.key_shards == 1 for each in admin._client.routes.timers))
    await shards.stop(0)
    await cluster.start_broker("a0")
    second = await shards.start(1, 2)
    await until(lambda: bool(second.service.place.key_shards))
    assert second.service.place.key_shards == 1


async def test_keys_stay_divided_where_all_that_a_new_shard_can_ask_is_new(
    cluster: Cluster, shards: Shards
) -> None:
    """Nameservers that were started anew know nobody who is away."""
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES and bool(cluster.registry.timers))
    await stopped_long_ago(cluster, shards, 0)
    await cluster.stop_broker("b0")
    await cluster.start_broker("a0")
    new = cluster.brokers["a0"].store.timer_owners
    second = await shards.start(1, 2)
    links = second.service._links
    await until(lambda: any("claim a0" in about for about in links._said_s))
    assert (second.service.place.key_shards, new.key_shards, new.ids()) == (0, 0, [])

    await cluster.start_broker("b0")
    await shards.start(0, 2)
    await until(lambda: shards.owners() == [0, 1] * 4)
    await until(lambda: len(new.ids()) == 2)
    assert (second.service.place.key_shards, new.key_shards) == (1, 1)
    assert links.refusals == shards.running[0].service._links.refusals == {}


async def test_a_new_shard_whose_disk_is_full_claims_again(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, refused = Place.save, []

    def saved(self: Place) -> None:
        if self.key_shards and not refused:
            refused.append(self.key_shards)
            raise DiskFull("no room for the shard's place")
        save(self)

    monkeypatch.setattr(Place, "save", saved)
    first = await shards.start(0, 1)
    await until(lambda: bool(first.service._links.by_name["b0"].fetchers))
    assert refused == [1]
    assert first.service.place.key_shards == 1
    await shards.start(0, 1)
    assert shards.running[0].service.place.key_shards == 1


def place_of(shard: int, shards: int) -> Place:
    return place.check("/data", FaultyDisk(), shard, shards)


async def test_a_shard_that_no_nameserver_has_heard_of_may_have_a_timer() -> None:
    """They forget when they start anew, and hear only of those that are there."""
    routes = RouteCache()
    others = OtherShards(routes, "t1", place_of(1, 3))
    routes.apply(Update(whole=True, timers=(TimerShard("t2", "127.0.0.1:1", 2, 3),)))
    routes.apply(Update(whole=True))
    located = await others.locate([message_pb2.TimerHandle(store_id=1)], [0])
    assert "shard 0 of 3" in str(located.missing[0])
    assert not OtherShards(routes, "t0", place_of(0, 1)).there


async def test_only_of_those_that_nobody_has_a_shard_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = RouteCache()
    alive = tuple(TimerShard(f"t{n}", f"127.0.0.1:{n}", n, 4) for n in (2, 3))
    routes.apply(Update(whole=True, timers=alive))

    async def ask(_: OtherShards, shard: TimerShard, asked: Any) -> list[bool] | Unavailable:
        if shard.name == "t3":
            return Unavailable("no answer")
        return [each.offset == 7 for each in asked.handles]

    monkeypatch.setattr(OtherShards, "_ask", ask)
    handles = [message_pb2.TimerHandle(offset=offset) for offset in (6, 7, 8)]
    located = await OtherShards(routes, "t1", place_of(1, 4)).locate(handles, [1, 2])
    assert {at: each.name for at, each in located.shards.items()} == {1: "t2"}
    assert set(located.missing) == {2}
    assert located.missing[2].value == "shard 0 of 4, t3 (no answer)"


async def test_a_shift_goes_on_while_a_second_shard_comes(cluster: Cluster, shards: Shards) -> None:
    """What was pending when the job began is shifted once, wherever it is; what came later is not.

    The job is asked for, with one id, until nobody is missing; its shard starts anew meanwhile.
    """
    await shards.start(0, 1)
    before = [b"before-%d" % n for n in range(400)]
    for first in range(0, len(before), 50):
        await send(cluster, before[first : first + 50], [HOUR_MS] * 50, producer_id=0)
    await shards.running[0].until(lambda stats: stats.pending == len(before))
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        changing = asyncio.create_task(shards.change(2))
        while True:
            try:
                shifted = await admin.shift_pending(TOPIC, -3_600, request_id=b"s" * 16)
            except (PartialAnswer, Unavailable):
                continue
            break
        await changing
        assert shifted == len(before)
        # A shard that came later has done its part, too, though it had none.
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert await admin.shift_pending(TOPIC, -3_600, request_id=b"s" * 16) == len(before)
        await send_to_all(cluster, [b"after-0", b"after-1"], HOUR_MS)

    async def all_came() -> bool:
        return len(bodies_of(await delivered(cluster))) >= len(before)

    await until(all_came)
    await until(lambda: all_stored(shards))
    assert bodies_of(await delivered(cluster)) == sorted(before)
    await until(lambda: shards.pending_in(TOPIC) == 2)


async def test_a_bulk_request_that_comes_again_touches_nothing_at_a_shard_that_was_added(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    await send_to_all(cluster, [b"one", b"two"], HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 2)
    await cluster.create_topic("elsewhere", queues=1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: len(admin._client.routes.timers) == 1)
        ids = [number * 16 for number in (b"1", b"2", b"3")]

        until_ms = now_ms() + 3 * HOUR_MS

        async def ask() -> list[int]:
            return [
                await admin.shift_pending(TOPIC, "1h", request_id=ids[0]),
                await admin.move_pending(TOPIC, "elsewhere", request_id=ids[1]),
                await admin.cancel_pending("elsewhere", until=until_ms, request_id=ids[2]),
            ]

        assert await ask() == [2, 2, 2]
        await shards.change(2)
        later = await send_to(cluster, 1, b"later", HOUR_MS)
        await shards.running[1].until(lambda stats: stats.pending == 1)
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert await ask() == [2, 2, 2]
        await shards.start(1, 2)
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert await ask() == [2, 2, 2]
        assert shards.pending_in(TOPIC) == 1
        [result] = await shards.running[1].cancel(later)  # it has the handle that it had
        assert result.outcome == timer_pb2.CANCELLED
        assert await shards.pending() == 0


async def test_what_two_shards_have_is_moved_to_another_topic_once(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    await cluster.create_topic("elsewhere", queues=1)
    await send_to_all(cluster, [b"one", b"two", b"three", b"four"], HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 4)
    await shards.change(2)
    await send_to(cluster, 1, b"five", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: len(admin._client.routes.timers) == 2)
        assert await admin.move_pending(TOPIC, "elsewhere", request_id=b"m" * 16) == 5
        assert await admin.move_pending(TOPIC, "elsewhere", request_id=b"m" * 16) == 5
        counts = {each.topic: each.pending for each in await admin.count_timers()}
        assert counts.get(TOPIC, 0) == 0
        assert counts["elsewhere"] == 5
        assert await admin.shift_pending("elsewhere", -3_600) == 5

    async def bodies() -> list[bytes]:
        await cluster.shown()
        answer = await cluster.clients["b0"].pull("elsewhere", 0)
        return sorted(each.body for queue in answer.queues for each in queue.records.records)

    async def all_came() -> bool:
        return len(await bodies()) == 5

    await until(all_came)
    await until(lambda: all_stored(shards))
    assert await bodies() == [b"five", b"four", b"one", b"three", b"two"]
    assert bodies_of(await delivered(cluster)) == []


async def test_a_schedule_goes_on_while_the_number_of_shards_changes(
    cluster: Cluster, shards: Shards
) -> None:
    """Each second has its message, once: what a restart of its shard missed is caught up."""
    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        await admin.put_schedule("beat", topic=TOPIC, body=b"beat", every=1, catch_up="all")
        for number in (2, 3, 1):
            await shards.change(number)
        count = len(bodies_of(await delivered(cluster)))

        async def goes_on() -> bool:
            return len(bodies_of(await delivered(cluster))) >= count + 2

        await until(goes_on)
        await admin.delete_schedule("beat")
    await until(lambda: all_stored(shards))
    found = await delivered(cluster)
    due_ms = sorted(each.due_ms for records in found.values() for each in records)
    assert due_ms == list(range(due_ms[0], due_ms[-1] + 1, 1_000))
