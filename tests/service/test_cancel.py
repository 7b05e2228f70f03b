"""Cancelling through the SDK: routing by handle, sharing of requests, asking again."""

import asyncio

import pytest

from duemq import aio
from duemq.errors import Internal, InvalidArgument, Unavailable
from duemq.producing import handle
from duemq.producing.cancels import CancelOutcome
from duemq.settings import ClientSettings
from duemq.transport import cancel_calls
from duemq.v1 import timer_pb2
from tests.service.fake_cluster import FakeCluster, FakeTimer
from tests.service.running_cluster import WAIT_S, until


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a", timers=2)
    yield cluster
    await cluster.stop()


def handle_of(queue_id, offset):
    return handle.encode(1, queue_id, offset, 1_790_000_000_000)


async def test_each_handle_goes_to_its_shard(cluster):
    cluster.timers[0].pending = {10}
    cluster.timers[1].pending = {11}
    async with aio.Admin(cluster.nameserver) as admin:
        outcomes = await admin.cancel([handle_of(1, 11), handle_of(2, 10), handle_of(3, 12)])
        assert await admin.cancel(handle_of(0, 10)) is CancelOutcome.CANCELLED
    assert outcomes == [CancelOutcome.CANCELLED, CancelOutcome.CANCELLED, CancelOutcome.UNKNOWN]
    assert [str(outcome) for outcome in outcomes] == ["cancelled", "cancelled", "unknown"]


async def test_a_shard_that_has_not_received_it_yet_is_asked_again(cluster):
    cluster.timers[0].pending = {5}
    cluster.timers[0].not_yet = 2
    async with aio.Admin(cluster.nameserver) as admin:
        outcomes = await admin.cancel([handle_of(0, 5), handle_of(1, 5)])
    assert outcomes == [CancelOutcome.CANCELLED, CancelOutcome.UNKNOWN]
    assert (cluster.timers[0].asked, cluster.timers[1].asked) == (3, 1)


async def test_a_shard_that_answers_too_little_is_broken(monkeypatch):
    async def forgetful(timer, request, context):
        return timer_pb2.CancelResponse()

    monkeypatch.setattr(FakeTimer, "Cancel", forgetful)
    cluster = FakeCluster()
    await cluster.start("a", timers=1)
    async with aio.Admin(cluster.nameserver) as admin:
        with pytest.raises(Internal, match="answered 0 of 1 handles"):
            await admin.cancel(handle_of(2, 5))
    await cluster.stop()


async def test_a_shard_that_is_away(cluster):
    settings = ClientSettings(request_timeout_s=0.3)
    async with aio.Admin(cluster.nameserver, settings=settings) as admin:
        await cluster.timers[0].stop()
        with pytest.raises(Unavailable):
            await admin.cancel(handle_of(0, 5))
        cluster.hide_timers()
        await admin._client.wait_for(lambda routes: not routes.timers, WAIT_S)
        with pytest.raises(Unavailable, match="no timer shard serves"):
            await admin.cancel(handle_of(0, 5))


@pytest.mark.parametrize("known", [False, True])
async def test_of_a_list_the_error_tells_what_was_cancelled(cluster, known):
    """A shard that is away, whether or not nameservers know that, keeps nobody from the others."""
    settings = ClientSettings(request_timeout_s=0.5)
    async with aio.Admin(cluster.nameserver, settings=settings) as admin:
        await cluster.timers[0].stop()
        if known:
            cluster.hide_timers(0)
            await admin._client.wait_for(lambda routes: len(routes.timers) == 1, WAIT_S)
        handles = [handle_of(0, 5), handle_of(1, 11)]
        while True:  # a slow machine may give up before the other one answers
            cluster.timers[1].pending = {11}
            with pytest.raises(Unavailable) as raised:
                await admin.cancel(handles)
            if raised.value.answers:
                break
    assert raised.value.answers == {1: CancelOutcome.CANCELLED}


async def test_who_would_not_wait_for_a_shard_that_is_known_to_be_away_is_told_so(cluster):
    settings = ClientSettings(request_timeout_s=3600, away_timeout_s=0.001)
    async with aio.Admin(cluster.nameserver, settings=settings) as admin:
        cluster.timers[0].pending = {5}
        cluster.timers[0].not_yet = 2
        assert await admin.cancel(handle_of(0, 5)) is CancelOutcome.CANCELLED  # it is there
        cluster.hide_timers()
        await admin._client.wait_for(lambda routes: not routes.timers, WAIT_S)
        questions = (
            admin.cancel(handle_of(0, 5)),
            admin.cancel([handle_of(0, 5), handle_of(1, 5)]),
            admin.get_timers([handle_of(0, 5)]),
            admin.cancel(key=("orders", "k")),
            admin.reschedule(key=("orders", "k"), delay=1),
        )
        for question in questions:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(Unavailable, match="no timer shard"):
                    await question


async def test_a_malformed_handle_cancels_nothing(cluster):
    async with aio.Admin(cluster.nameserver) as admin:
        with pytest.raises(InvalidArgument):
            await admin.cancel([handle_of(0, 5), "nonsense"])
        with pytest.raises(InvalidArgument, match="a handle or a list"):
            await admin.cancel(None)
        assert await admin.cancel([]) == []
    assert [timer.asked for timer in cluster.timers] == [0, 0]


async def test_callers_at_the_same_time_share_requests(cluster):
    cluster.timers[0].pending = set(range(0, 200, 2))
    async with aio.Admin(cluster.nameserver) as admin:
        outcomes = await asyncio.gather(*(admin.cancel(handle_of(0, n)) for n in range(200)))
    assert outcomes == [CancelOutcome.CANCELLED, CancelOutcome.UNKNOWN] * 100
    assert cluster.timers[0].asked < 20


@pytest.mark.parametrize("gather_s", [0.0, 60.0], ids=["requests that take long", "short ones"])
async def test_callers_that_were_answered_together_ask_together_again(
    cluster, monkeypatch, gather_s: float
):
    monkeypatch.setattr(cancel_calls, "GATHER_S", gather_s)
    async with aio.Admin(cluster.nameserver) as admin:

        async def caller(number: int) -> None:
            for turn in range(3):
                await admin.cancel(handle_of(0, 10 * number + turn))

        await asyncio.gather(*(caller(number) for number in range(8)))
    assert cluster.timers[0].asked == 3


async def test_a_message_that_has_not_arrived_holds_up_nobody_else(cluster):
    timer = cluster.timers[0]
    timer.pending, timer.missing = set(range(20)), {3}
    async with aio.Admin(cluster.nameserver) as admin:
        calls = [asyncio.create_task(admin.cancel(handle_of(0, n))) for n in range(20)]
        others = calls[:3] + calls[4:]
        assert await asyncio.gather(*others) == [CancelOutcome.CANCELLED] * 19
        await until(lambda: timer.asked >= 2)  # alone now, the request waits
        assert await admin.cancel(handle_of(0, 7)) is CancelOutcome.CANCELLED
        assert not calls[3].done()
        timer.arrived.set()
        assert await calls[3] is CancelOutcome.CANCELLED


async def test_a_caller_that_gives_up_takes_nobody_along(cluster):
    timer = cluster.timers[0]
    timer.pending, timer.missing = {1, 2, 3}, {1}
    async with aio.Admin(cluster.nameserver) as admin:
        first = asyncio.create_task(admin.cancel(handle_of(0, 1)))
        await until(lambda: timer.asked > 0)
        shared = [asyncio.create_task(admin.cancel(handle_of(0, n))) for n in (2, 3)]
        await asyncio.sleep(0)
        shared[0].cancel()
        first.cancel()
        assert await shared[1] is CancelOutcome.CANCELLED
        ended = await asyncio.gather(first, shared[0], return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)


async def test_a_shared_request_that_fails_is_asked_again_by_each(cluster):
    timer = cluster.timers[0]
    timer.pending, timer.not_yet = set(range(10)), 2
    async with aio.Admin(cluster.nameserver) as admin:
        outcomes = await asyncio.gather(*(admin.cancel(handle_of(0, n)) for n in range(10)))
    assert outcomes == [CancelOutcome.CANCELLED] * 10
