"""Requests about timers under keys of many callers: their order, what they share, how they end."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from duemq.errors import Corrupt, Overloaded, Unavailable
from duemq.v1 import message_pb2
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service import keyed_requests
from duemq_server.timer_service.keyed_requests import KeyedRequests
from duemq_server.timer_service.scheduling.keyed.changes import CancellingKeys, Scheduling
from duemq_server.timer_service.timers.keyed import EXISTS, REPLACED, SCHEDULED, TimerKey
from duemq_server.timer_service.timers.keyed_entry import CANCELLED, RequestKey
from tests.property.keyed_model import keyed_records
from tests.property.timer_world import World

FAR_MS = 20_000


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A shard with a timer under the key k in a block."""
    monkeypatch.setattr(keyed_requests, "SPACING_S", 0)
    world = World()
    assert schedule(world, 0, "k").advance(world.now_ms)
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))
    return world


def schedule(world: World, request: int, *keys: str, if_absent: bool = False) -> Scheduling:
    records = [message_pb2.Record(message_id="0", timer_key=key) for key in keys]
    asked = keyed_records("any", keys, records, [world.now_ms + FAR_MS] * len(keys))
    name = RequestKey((request + 1).to_bytes(16, "big"))
    return Scheduling(world.scheduler, name, asked, if_absent=if_absent)


async def no_room() -> None:
    raise AssertionError("the log is not full")


def run(
    world: World,
    work: Callable[[KeyedRequests], Awaitable[object]],
    room: Callable[[], Awaitable[None]] = no_room,
) -> None:
    async def all_of_it() -> None:
        asked = KeyedRequests(world.scheduler, lambda: world.now_ms, room)
        try:
            await work(asked)
        finally:
            await asked.stop()

    asyncio.run(all_of_it())


def outcomes(change: object) -> list[str]:
    assert isinstance(change, Scheduling)
    return [outcome for outcome, _ in change.results]


def test_too_many_open_files_are_no_damage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    async def work(asked: KeyedRequests) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(world.disk, "open", none_left)
            with pytest.raises(Unavailable, match="too many open files"):
                await asked.decide(schedule(world, 1, "k"))
        assert outcomes(await asked.decide(schedule(world, 1, "k"))) == [REPLACED]

    run(world, work)


def test_requests_for_a_key_are_decided_in_their_order(world: World) -> None:
    """Also those that could be decided at once, while one before them waits for a look-up."""
    decided: list[int] = []

    async def work(asked: KeyedRequests) -> None:
        async def one(number: int, *keys: str) -> Scheduling:
            change = await asked.decide(schedule(world, number, *keys))
            decided.append(number)
            assert isinstance(change, Scheduling)
            return change

        changes = await asyncio.gather(one(1, "k"), one(2, "k", "new"), one(3, "new"), one(4, "x"))
        assert [outcomes(change) for change in changes] == [
            [REPLACED],
            [REPLACED, SCHEDULED],
            [REPLACED],
            [SCHEDULED],
        ]

    run(world, work)
    assert decided == [4, 1, 2, 3]  # nobody before 4 has its key
    world.scheduler.check()


def test_a_request_that_comes_again_while_it_is_decided_is_decided_once(world: World) -> None:
    async def work(asked: KeyedRequests) -> None:
        both = await asyncio.gather(*(asked.decide(schedule(world, 1, "k")) for _ in range(2)))
        assert both[0] is both[1]

    run(world, work)
    assert world.scheduler.ledger.replaced == 1


def test_a_request_with_errors_is_decided_anew_when_it_comes_again(world: World) -> None:
    [name] = world.scheduler.segments.lengths
    path = world.scheduler.segments.path(name)

    def cancelling() -> CancellingKeys:
        return CancellingKeys(world.scheduler, RequestKey(b"r" * 16), [TimerKey("any", "k")])

    async def work(asked: KeyedRequests) -> None:
        world.disk.flip(path, 40)
        first = await asked.decide(cancelling())
        assert isinstance(first.errors[0], Corrupt)
        world.disk.flip(path, 40)  # it can be read again
        again = await asked.decide(cancelling())
        assert [outcome for outcome, _ in again.results] == [CANCELLED]
        assert not again.errors

    run(world, work)
    assert world.scheduler.ledger.cancelled == 1


def test_it_waits_for_room_in_the_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    append = world.scheduler.log.append
    waited: list[bool] = []

    def full(kind: int, parts: object) -> tuple[int, int]:
        raise LogFull("full")

    async def room() -> None:
        waited.append(True)
        if len(waited) == 2:
            monkeypatch.setattr(world.scheduler.log, "append", append)

    async def work(asked: KeyedRequests) -> None:
        monkeypatch.setattr(world.scheduler.log, "append", full)
        change = await asked.decide(schedule(world, 1, "a", "b"))
        assert outcomes(change) == [SCHEDULED] * 2

    run(world, work, room)
    assert len(waited) == 2


def test_what_fails_fails_alone(world: World) -> None:
    async def work(asked: KeyedRequests) -> None:
        bad = schedule(world, 1, "k")
        bad._records = None  # type: ignore[assignment]
        good = schedule(world, 2, "k", if_absent=True)
        told = await asyncio.gather(asked.decide(bad), asked.decide(good), return_exceptions=True)
        assert isinstance(told[0], AttributeError)
        assert outcomes(told[1]) == [EXISTS]

    run(world, work)


def test_more_than_some_thousands_do_not_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_requests, "OPEN_MAX", 1)

    async def work(asked: KeyedRequests) -> None:
        told = await asyncio.gather(
            *(asked.decide(schedule(world, n, f"key-{n}")) for n in (1, 2)), return_exceptions=True
        )
        assert outcomes(told[0]) == [SCHEDULED]
        assert isinstance(told[1], Overloaded)

    run(world, work)


def test_a_stop_waits_for_what_is_asked(world: World) -> None:
    async def stopped() -> list[str]:
        asked = KeyedRequests(world.scheduler, lambda: world.now_ms, no_room)
        both = asyncio.gather(
            *(asked.decide(schedule(world, number, "k")) for number in (1, 2)), stopping(asked)
        )
        *told, _ = await both
        return [outcome for each in told for outcome in outcomes(each)]

    async def stopping(asked: KeyedRequests) -> None:
        await asked.stop()  # its task begins after the other two

    assert asyncio.run(stopped()) == [REPLACED] * 2
