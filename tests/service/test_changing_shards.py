"""The number of timer shards changes while timers are pending: nothing is lost, early or twice."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from duemq import CancelOutcome, aio
from duemq.aio import Admin
from duemq.errors import ErrorCode, PartialAnswer, Unavailable
from duemq.v1 import (
    broker_pb2,
    timer_pb2,
)
from duemq_cli.exits import Exit
from duemq_server.broker.records import timer_owners
from duemq_server.serving.clock import now_ms
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.edge import broker_link, bulk_requests
from duemq_server.timer_service.edge.holds_servicer import TimerHoldsServicer
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import Cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    bodies_of,
    delivered,
    running_shard,
    send,
)
from tests.service.timer_shards import (
    QUEUES,
    Shards,
    cluster,
    comes,
    send_to,
    send_to_all,
    shards,
    shrunk,
    stopped_long_ago,
)

__all__ = ["cluster", "shards"]


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
    await until(lambda: bool(second.service._links.by_name["b0"].fetchers))  # it knows what is held
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
    await until(lambda: len(shards.running[0].service._others.alive) == 1)
    [result] = await shards.running[0].cancel(handle)
    assert result.outcome == timer_pb2.CANCELLED


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
        await until(lambda: [each.name for each in admin._client.routes.timers] == ["t0"])
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


async def test_a_shard_whose_disk_is_full_serves_and_hears_later_what_it_could_not_note(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds makes the space: a replica that leads for the first time may have timers."""
    save, refused = ShardPlace.save, []

    def saved(self: ShardPlace) -> None:
        if self.key_shards:
            refused.append(self.key_shards)
            raise DiskFull("no room for the shard's place")
        save(self)

    with monkeypatch.context() as patched:
        patched.setattr(ShardPlace, "save", saved)
        first = await shards.start(0, 1)
        await until(lambda: bool(first.service._links.by_name["b0"].fetchers))
        assert refused == [1]
        assert first.service.place.key_shards == 1
    again = await shards.start(0, 1)
    await until(lambda: bool(again.service._links.by_name["b0"].fetchers))
    assert again.service.place.key_shards == 1
    await shards.start(0, 1)
    assert shards.running[0].service.place.key_shards == 1


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


@pytest.mark.parametrize("what", ["cancel", "hold"])
async def test_no_shard_is_left_out_that_was_given_queues_while_another_one_was_waited_for(
    what: str, cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, there = asyncio.Event(), asyncio.Event()
    where = (TimerHoldsServicer, "_named") if what == "hold" else (bulk_requests, "which_of")
    read = getattr(*where)

    def checked(*given: Any) -> Any:
        asked.set()
        if not there.is_set():
            raise Unavailable("it was killed, and starts")
        return read(*given)

    await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        request_id = bytes(range(16))

        def ask() -> Awaitable[object]:
            if what == "hold":
                return admin.hold_timers(TOPIC)
            return admin.cancel_pending(TOPIC, request_id=request_id)

        with monkeypatch.context() as patched:
            patched.setattr(*where, checked)
            call = asyncio.ensure_future(ask())
            await asked.wait()
            await shards.start(1, 2)
            await shards.start(0, 2)
            await until(lambda: shards.owners() == [0, 1] * 4)
            await send_to(cluster, 1, b"theirs", HOUR_MS)
            await until(lambda: shards.pending_in(TOPIC) == 1)
            there.set()
            with pytest.raises(PartialAnswer, match="shard 1 of 2"):
                await call
        await until(lambda: len(admin._client.routes.timers) == 2)
        await ask()
        if what == "hold":
            assert len(shards.running[1].service.shard.scheduler.holds) == 1
        else:
            assert shards.pending_in(TOPIC) == 0
