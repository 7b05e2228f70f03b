"""Which timer shard has a timer: any of them is asked by its handle, also while they change."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc.aio
import pytest

from duemq import CancelOutcome, RescheduleOutcome
from duemq.aio import Admin
from duemq.errors import ErrorCode, TooLarge, Unavailable
from duemq.producing.handle import text_of
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.route import RouteCache, TimerShard, Update
from duemq.settings import ClientSettings
from duemq.v1 import (
    broker_pb2,
    message_pb2,
    stubs,
    timer_inspector_pb2,
    timer_pb2,
)
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.edge import broker_link, cancel_requests, inspector
from duemq_server.timer_service.edge.others import other_shards
from duemq_server.timer_service.edge.others.other_shards import (
    NOWHERE_ELSE,
    Answered,
    ByShard,
    OtherShards,
)
from tests.crash.faulty_disk import FaultyDisk
from tests.service.running_cluster import Cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    batch,
    bodies_of,
    delivered,
)
from tests.service.timer_shards import (
    Shards,
    cluster,
    comes,
    send_to,
    shards,
    shrunk,
    stopped_long_ago,
)

__all__ = ["cluster", "shards"]


async def one_each(
    cluster: Cluster, shards: Shards
) -> tuple[message_pb2.TimerHandle, message_pb2.TimerHandle]:
    """Of one queue: the first shard took one over, and the second, which has it now, the next."""
    await shards.start(0, 1)
    old = await send_to(cluster, 1, b"old", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    await shards.change(2)
    new = await send_to(cluster, 1, b"new", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    return old, new


async def test_what_is_asked_by_handle_is_passed_on(cluster: Cluster, shards: Shards) -> None:
    old, new = await one_each(cluster, shards)
    second = shards.running[1]
    stub = stubs.TimerInspectorStub(second.connection)
    asked = timer_inspector_pb2.GetTimersRequest(handles=[old, new, old])
    found = (await stub.GetTimers(asked)).timers
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


async def test_of_several_shards_timers_as_many_are_told_as_fit_in_an_answer(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await one_each(cluster, shards)
    second = shards.running[1]
    monkeypatch.setattr(inspector, "BYTES_MAX", 1)
    stub = stubs.TimerInspectorStub(second.connection)
    for first in (old, new):
        asked = timer_inspector_pb2.GetTimersRequest(handles=[first, old, new])
        assert [each.handle for each in (await stub.GetTimers(asked)).timers] == [first]


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
    located: list[ByShard] = []
    locate = second.service._others.locate

    async def told(*asked: Any) -> ByShard:
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
    _, theirs = await one_each(cluster, shards)
    await shards.change(1)
    await send_to(cluster, 1, b"last", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 2)
    others = shards.running[0].service._others
    await until(lambda: len(others.alive) == 1)

    locate = others.locate
    asked: list[Any] = []

    async def too_early(*request: Any) -> ByShard:
        asked.append(request)
        return await locate(*request) if len(asked) % 2 == 0 else NOWHERE_ELSE

    monkeypatch.setattr(others, "locate", too_early)
    inspector = stubs.TimerInspectorStub(shards.running[0].connection)
    get = timer_inspector_pb2.GetTimersRequest(handles=[theirs])
    assert [each.record.body for each in (await inspector.GetTimers(get)).timers] == [b"new"]
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

    async def comes_meanwhile(*asked: Any) -> ByShard:
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
        return ByShard({0: others.alive[0]}, {})

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
        assert await others.locate([handle], [0]) == ByShard({}, {})
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
    old, new = await one_each(cluster, shards)
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

    async def fail(_: OtherShards, located: ByShard, ask: object) -> list[Answered[Any]]:
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


async def test_what_another_shard_leaves_open_is_told_beside_what_was_done(
    cluster: Cluster, shards: Shards
) -> None:
    """First it is there and answers, then it is away; the answer is the same but for its part."""
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)
    request.partial = True
    answer = await shards.running[0].stub.Reschedule(request)
    check_but_for_the_last(answer)
    await shards.stop(1)
    for number in range(2):
        if number:  # nobody remembers the other shard but the brokers
            await shards.start(0, 2)
        mine, theirs, nowhere = (await shards.running[0].stub.Reschedule(request)).results
        assert mine == answer.results[0]
        assert (theirs.unanswered, theirs.error.retryable) == (True, True)
        assert theirs.error.code == ErrorCode.UNAVAILABLE
        assert (nowhere.unanswered, nowhere.error.code) == (False, ErrorCode.UNAVAILABLE)
    await shards.start(1, 2)
    await until(lambda: len(shards.running[0].service._others.alive) == 1)
    assert (await shards.running[0].stub.Reschedule(request)).results[:2] == answer.results[:2]
    assert await shards.pending() == 2


async def test_whose_shard_is_away_is_told_so_and_the_others_are_done(
    cluster: Cluster, shards: Shards
) -> None:
    """For this request it has not arrived, and stays so: whoever asks again has another id."""
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)
    await shards.stop(1)
    mine, theirs, _ = (await shards.running[0].stub.Reschedule(request)).results
    assert mine.outcome == timer_pb2.RESCHEDULED
    assert (theirs.unanswered, theirs.error.code) == (False, ErrorCode.UNAVAILABLE)
    assert "is away" in theirs.error.message
    await shards.start(1, 2)
    await until(lambda: len(shards.running[0].service._others.alive) == 1)
    again = (await shards.running[0].stub.Reschedule(request)).results
    assert again[0] == mine
    assert again[1].error.code == ErrorCode.UNAVAILABLE
    request.request_id = b"2" * 16
    gone, moved, _ = (await shards.running[0].stub.Reschedule(request)).results
    assert gone.outcome == timer_pb2.RESCHEDULE_UNKNOWN
    assert moved.outcome == timer_pb2.RESCHEDULED
    assert await shards.pending() == 2


async def test_where_no_part_is_its_own_a_shard_that_is_away_is_an_error_of_all(
    cluster: Cluster, shards: Shards
) -> None:
    """Nothing is written down here: an earlier attempt may have reached it."""
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)
    del request.timers[0]
    request.partial = True
    await shards.stop(1)
    with pytest.raises(grpc.aio.AioRpcError, match="is away"):
        await shards.running[0].stub.Reschedule(request)
    stats = await shards.running[0].stats()
    assert (stats.pending, stats.replaced) == (1, 0)


@pytest.mark.long
async def test_a_caller_is_told_what_was_done_before_his_time_is_over(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shard takes the request, and is silent."""
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)
    request.partial = True
    silent = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        await silent.wait()

    monkeypatch.setattr(shards.running[1].service.shard, "reschedule", never)
    monkeypatch.setattr(shards.running[1].service.shard, "cancel", never)
    mine, theirs, _ = (await shards.running[0].stub.Reschedule(request, timeout=8)).results
    assert mine.outcome == timer_pb2.RESCHEDULED
    assert (theirs.unanswered, theirs.error.code) == (True, ErrorCode.TIMEOUT)
    cancel = timer_pb2.CancelRequest(handles=[each.handle for each in request.timers[:2]])
    mine, theirs = (await shards.running[0].stub.Cancel(cancel, timeout=8)).results
    assert mine.outcome == timer_pb2.CANCELLED
    assert theirs.error.code == ErrorCode.TIMEOUT


async def test_through_a_client_the_error_tells_the_new_handles_of_who_was_there(
    cluster: Cluster, shards: Shards
) -> None:
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)
    mine, theirs = (text_of(each.handle) for each in request.timers[:2])
    await shards.stop(1)
    settings = ClientSettings(away_timeout_s=0.01)
    async with Admin(cluster.nameserver, settings=settings) as admin:
        with pytest.raises(Unavailable, match="is away") as raised:
            await admin.reschedule([theirs, mine], delay="30m")
        [(at, told)] = raised.value.answers.items()
        assert (at, told.outcome) == (1, RescheduleOutcome.RESCHEDULED)
        assert await admin.cancel(told.handle) == CancelOutcome.CANCELLED


async def test_what_another_shard_refuses_is_told_beside_what_was_done(
    cluster: Cluster, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing holds of each shard's part: this one's is done."""
    request, _ = await of_both_and_none(cluster, shards, b"1" * 16)

    async def refuse(_: OtherShards, located: ByShard, ask: object) -> list[Answered[Any]]:
        return [Answered(list(located.shards), TooLarge("too many bytes"))]

    monkeypatch.setattr(OtherShards, "each", refuse)
    answers = [await shards.running[0].stub.Reschedule(request) for _ in range(2)]
    assert answers[0] == answers[1]
    mine, theirs, nowhere = answers[0].results
    assert mine.outcome == timer_pb2.RESCHEDULED
    assert theirs.error.code == ErrorCode.TOO_LARGE
    assert nowhere.error.code == ErrorCode.UNAVAILABLE


def place_of(shard: int, shards: int) -> ShardPlace:
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

    async def ask(
        _: OtherShards, shard: TimerShard, asked: Any, timeout_s: float
    ) -> list[bool] | Unavailable:
        if shard.name == "t3":
            return Unavailable("no answer")
        return [each.offset == 7 for each in asked.handles]

    monkeypatch.setattr(OtherShards, "_ask", ask)
    handles = [message_pb2.TimerHandle(offset=offset) for offset in (6, 7, 8)]
    located = await OtherShards(routes, "t1", place_of(1, 4)).locate(handles, [1, 2])
    assert {at: each.name for at, each in located.shards.items()} == {1: "t2"}
    assert set(located.missing) == {2}
    assert located.missing[2].value == "shard 0 of 4, t3 (no answer)"
