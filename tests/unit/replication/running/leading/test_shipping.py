import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from duemq.errors import Unavailable
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Hello, LogPart
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import wire
from duemq_server.replication.running.leading.shipping import TOLD_MAX, Shipping
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.storage.errors import CorruptFile

A, B = (ReplicaId(name, name * 32) for name in "ab")
NOW_MS = 50_000


class Log:
    """An empty one."""

    start_position = end_position = written_position = 0


class Context:
    """Whoever is refused hears why."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)


def shipping() -> Shipping:
    found = HeldRecord("v1", Record("g", 7, frozenset("ab"), frozenset({A, B}), 1, A))
    leader = Leader(A, found, Epochs(), start=0, committed=0, min_insync=2, now_ms=NOW_MS)
    log: Any = Log()
    return Shipping(
        leader,
        log,
        Times(),
        rate=0,
        look_now=asyncio.Event(),
        on_answer=lambda: None,
        on_follower=lambda name, address: None,
    )


async def refused(made: Shipping, name: str, epoch: int = 1) -> None:
    context, requests = Context(), None
    hello = Hello("g", 7, ReplicaId(name, name * 32), epoch, (), 0, 0, 1)
    await made.serve(hello, "h:1", requests, context)  # type: ignore[arg-type]
    [greeting] = context.written
    assert greeting.refusal.text


async def test_who_is_refused_again_and_again_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who was removed runs on, and asks each second."""
    caplog.set_level(logging.INFO)
    made = shipping()
    for _ in range(3):
        await refused(made, "z")
    assert len(caplog.messages) == 1
    await refused(made, "z", epoch=0)  # for another reason
    assert len(caplog.messages) == 2


async def test_names_of_the_refused_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = shipping()
    for number in range(TOLD_MAX + 1):
        await refused(made, f"z{number}")
    assert len(caplog.messages) == TOLD_MAX + 1
    assert len(made._told) <= TOLD_MAX


class Requests:
    """A follower that says nothing."""

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("answers", [0, 2])
async def test_that_somebody_follows_is_said_once_he_answers(
    answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Who finds that its log is another one asks again each second, for ever."""
    caplog.set_level(logging.INFO)
    made = shipping()

    class Answers:
        async def __aiter__(self) -> AsyncIterator[pb.FromFollower]:
            for _ in range(answers):
                yield wire.to_answer(Answer(1, B, 0, 0))
            made.end()

    hello = Hello("g", 7, B, 1, (), 0, 0, 1)
    await made.serve(hello, "h:1", Answers(), Context())  # type: ignore[arg-type]
    assert caplog.messages == [f"{B} follows from 0 on"] * bool(answers)


async def test_who_follows_from_one_place_again_and_again_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What comes next is damaged here: who follows takes nothing, and asks each second."""
    caplog.set_level(logging.INFO)
    made = shipping()

    class Answers:
        async def __aiter__(self) -> AsyncIterator[pb.FromFollower]:
            yield wire.to_answer(Answer(1, B, 0, 0))
            for stream in made._streams.values():
                stream.ended = True
            made.wake()

    for _ in range(3):
        hello = Hello("g", 7, B, 1, (), 0, 0, 1)
        await made.serve(hello, "h:1", Answers(), Context())  # type: ignore[arg-type]
    assert caplog.messages == [f"{B} follows from 0 on"]
    await refused(made, "b", epoch=0)
    assert len(caplog.messages) == 2


async def test_whose_log_is_not_compared_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It follows up to the damage, and asks again each second."""
    caplog.set_level(logging.INFO)
    made = shipping()

    class Damaged(Log):
        end_position = written_position = 100

        def verify(self, start: int, end: int) -> None:
            raise CorruptFile("00", 40, "CRC-32C is wrong", "Restore it")

    class Answers:
        async def __aiter__(self) -> AsyncIterator[pb.FromFollower]:
            yield wire.to_answer(Answer(1, B, 0, 0))
            for stream in made._streams.values():
                stream.ended = True
            made.wake()

    made._log = Damaged()  # type: ignore[assignment]
    hello = Hello("g", 7, B, 1, ((1, 0),), 0, 100, 1)
    for _ in range(3):
        await made.serve(hello, "h:1", Answers(), Context())  # type: ignore[arg-type]
    assert caplog.messages[1:] == [f"{B} follows from 100 on"]
    assert "is not compared: 00, offset 40" in caplog.messages[0]


async def test_what_logs_have_in_common_is_read_once_as_long_as_it_stays_so() -> None:
    made = shipping()
    read: list[tuple[int, int]] = []

    class Long(Log):
        start_position, end_position, written_position = 40, 100, 96

        def verify(self, start: int, end: int) -> None:
            read.append((start, end))

        def checksum(self, start: int, end: int) -> int:
            return start + end

    made._log = log = Long()  # type: ignore[assignment]
    for start, end, told in ((0, 80, (40, 80)), (0, 80, (40, 80)), (48, 100, (48, 96))):
        hello = Hello("g", 7, B, 1, (), start, end, 1)
        part = await made._common(hello, end)
        assert part is not None
        assert (part.start, part.end, part.crc32c) == (*told, sum(told))
    assert await made._common(Hello("g", 7, B, 1, (), 80, 80, 1), 80) is None
    assert read == [(40, 80), (48, 96)]
    log.start_position = 56
    assert await made._common(hello, 100) == LogPart(56, 96, 152)


async def test_whom_retention_overtakes_is_told_so() -> None:
    made = shipping()

    class Retained(Log):
        end_position = written_position = 100

        def read_run(self, position: int, bytes_max: int) -> memoryview:
            raise IndexError(f"segment {position} was deleted")

    made._log = Retained()  # type: ignore[assignment]
    hello = Hello("g", 7, B, 1, (), 0, 0, 1)
    with pytest.raises(Unavailable, match="retention was faster"):
        await made.serve(hello, "h:1", Requests(), Context())
