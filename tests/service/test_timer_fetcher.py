"""How a timer service asks brokers for delayed messages, as they come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from duemq.errors import Overloaded
from duemq.transport import retrying
from duemq.v1 import broker_pb2
from duemq_server.timer_service.edge import timer_fetcher
from duemq_server.timer_service.edge.timer_fetcher import LINGER_BELOW_BYTES, LINGER_MS
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.scheduler import Ingested
from duemq_server.timer_service.timers.log_entries import SourceId

SOURCE = SourceId(1, 0)
SOON, LATER = 0, NEVER
WAIT_S = 30.0


class Came(NamedTuple):
    """What a fetch brings."""

    nbytes: int
    first_due_ms: int


class Played:
    """A broker whose answers are given, at once; and the shard that gets them."""

    def __init__(self, *answers: Came) -> None:
        self._answers = list(answers)
        self._first_due_ms = LATER
        self.asked: list[int] = []
        """The `linger_ms` of each fetch."""
        self.meant: set[object] = set()
        """Metadata of the calls."""
        self.failed: list[BaseException] = []
        self.all_asked = asyncio.Event()
        self.directory = self.scheduler = self.numbers = self.log_loop = self.log = self
        self.end_position = 1
        self.producer_id = 7

    def source(self, source: SourceId) -> None:
        """It has taken nothing over."""

    async def GetOffsets(self, request: object, **options: object) -> broker_pb2.GetOffsetsResponse:
        self.meant.add(options["metadata"])
        return broker_pb2.GetOffsetsResponse()

    async def FetchFrames(
        self, request: broker_pb2.FetchFramesRequest, **options: object
    ) -> broker_pb2.FetchFramesResponse:
        self.asked.append(request.linger_ms)
        self.meant.add(options["metadata"])
        if not self._answers:
            self.all_asked.set()
            await asyncio.Event().wait()
        came = self._answers.pop(0)
        self._first_due_ms = came.first_due_ms
        return broker_pb2.FetchFramesResponse(
            store_id=SOURCE.store_id,
            frames=bytes(came.nbytes),
            next_offset=request.offset + 1,
            max_offset=request.offset + 1,
        )

    async def durable(self, position: int) -> None:
        """What was fetched is on no disk yet."""
        self.all_asked.set()
        await asyncio.Event().wait()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.all_asked.set()

    async def ingest(self, *arguments: object) -> Ingested:
        return Ingested(1, self._first_due_ms)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the fetcher pauses; no time passes."""
    pauses: list[float] = []
    sleep: Callable[[float], Any] = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(timer_fetcher.asyncio, "sleep", pause)
    clock = itertools.repeat(time.monotonic())
    monkeypatch.setattr(timer_fetcher.time, "monotonic", lambda: next(clock))
    return pauses


async def fetched(*answers: Came) -> list[int]:
    """How long each fetch may linger, the one behind all answers included."""
    played: Any = Played(*answers)
    fetcher = timer_fetcher.TimerFetcher(played, "b0", lambda: played, SOURCE, 0, lambda: None)
    await played.all_asked.wait()
    await fetcher.stop()
    # Another broker that has the address by now is not asked where to begin.
    assert played.meant == {(("duemq-store-id", str(SOURCE.store_id)),)}
    return list(played.asked)


async def test_what_brought_little_is_asked_for_again_in_a_while(slept: list[float]) -> None:
    assert await fetched(Came(1, LATER)) == [0, LINGER_MS]
    assert slept == []  # the broker waits, and sees what is due at once meanwhile


async def test_a_backlog_is_fetched_without_a_pause(slept: list[float]) -> None:
    much = Came(LINGER_BELOW_BYTES, LATER)
    assert await fetched(much, much, Came(1, LATER), much) == [0, 0, 0, LINGER_MS, 0]
    assert slept == []


async def test_a_broker_that_does_not_linger_is_not_asked_at_once(slept: list[float]) -> None:
    """As one of an older release, or where too many wait."""
    assert await fetched(*[Came(1, LATER)] * 4) == [0, *[LINGER_MS] * 4]
    assert slept == pytest.approx([LINGER_MS / 1000] * 3)


async def test_what_is_due_at_once_and_goes_on_coming_is_not_fetched_one_by_one(
    slept: list[float],
) -> None:
    """A broker does not linger for it."""
    assert await fetched(*[Came(1, SOON)] * 3) == [0, *[LINGER_MS] * 3]
    assert slept == [timer_fetcher.PAUSE_S] * 3


async def test_the_first_answer_does_not_wait_for_messages(slept: list[float]) -> None:
    """Commits wait for it: who stops before it comes has told nobody what it had taken over."""
    waits: list[int] = []
    played: Any = Played()

    async def silence(request: broker_pb2.FetchFramesRequest, **options: object) -> object:
        waits.append(request.wait_ms)
        if request.wait_ms:
            played.all_asked.set()
            await asyncio.Event().wait()
        return broker_pb2.FetchFramesResponse(store_id=SOURCE.store_id)

    played.FetchFrames = silence
    fetcher = timer_fetcher.TimerFetcher(played, "b0", lambda: played, SOURCE, 0, lambda: None)
    await played.all_asked.wait()
    assert waits == [0, timer_fetcher.FETCH_WAIT_MS]
    assert fetcher.doubted is None
    assert not slept
    await fetcher.stop()


async def test_a_broker_where_too_many_wait_is_asked_ever_less_often(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying.random, "uniform", lambda low, high: high)
    played: Any = Played()

    async def full(request: broker_pb2.FetchFramesRequest, **options: object) -> object:
        if len(slept) >= 8:
            played.all_asked.set()
            await asyncio.Event().wait()
        if request.wait_ms:
            raise Overloaded("wait_ms: 20000 pulls wait")
        return broker_pb2.FetchFramesResponse(store_id=SOURCE.store_id)

    played.FetchFrames = full
    fetcher = timer_fetcher.TimerFetcher(played, "b0", lambda: played, SOURCE, 0, lambda: None)
    await played.all_asked.wait()
    await fetcher.stop()
    assert slept[-1] == timer_fetcher.RETRY_S_MAX


async def test_what_was_taken_over_is_committed_where_nobody_may_wait_any_more(
    slept: list[float],
) -> None:
    """That the broker refuses to wait is no sign that it is another one."""
    played: Any = Played(*[Came(1, LATER)] * 2)
    came, doubts = played.FetchFrames, list[int | None]()

    async def full(request: broker_pb2.FetchFramesRequest, **options: object) -> object:
        doubts.append(fetcher.doubted)
        if len(doubts) > 9:
            played.all_asked.set()
        if request.wait_ms and not played._answers:
            raise Overloaded("wait_ms: 20000 pulls wait")
        return await came(request, **options)

    played.FetchFrames = full
    fetcher = timer_fetcher.TimerFetcher(played, "b0", lambda: played, SOURCE, 0, lambda: None)
    await played.all_asked.wait()
    await fetcher.stop()
    assert not played._answers
    assert doubts[1:] == [None] * 9


@pytest.mark.parametrize(("topic", "untraced"), [("orders", True), ("%RETRY%g", False)])
async def test_what_has_no_span_is_not_waited_for_where_others_are_traced(
    slept: list[float], monkeypatch: pytest.MonkeyPatch, topic: str, untraced: bool
) -> None:
    frame = SimpleNamespace(frame=SimpleNamespace(target_topic=topic, untraced=untraced))
    monkeypatch.setattr(timer_fetcher.spans, "enabled", lambda: True)
    monkeypatch.setattr(timer_fetcher.intake, "frames_in", lambda data: [frame])
    assert await fetched(Came(1, LATER), Came(1, LATER)) == [0, LINGER_MS, LINGER_MS]


async def test_a_fault_of_ours_ends_the_shard_and_not_the_fetching_alone() -> None:
    played: Any = Played(Came(1, LATER))
    fault = ZeroDivisionError()

    async def ingest(*arguments: object) -> Ingested:
        raise fault

    played.ingest = ingest
    fetcher = timer_fetcher.TimerFetcher(played, "b0", lambda: played, SOURCE, 0, lambda: None)
    async with asyncio.timeout(WAIT_S):
        await played.all_asked.wait()
    await fetcher.stop()
    assert played.failed == [fault]
