"""When the shard wakes, if nothing else happens: its sleeping, against a clock that is a number."""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from duemq.errors import Internal, ReadOnly, Unavailable
from duemq.transport import status
from duemq.v1 import message_pb2, view_pb2
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service import disk_jobs, firing, log_loop
from duemq_server.timer_service.edge import fire_stream
from duemq_server.timer_service.edge.fire_stream import FireStream
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.scheduling.fire_lane import FireBatch
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.manual_loop import AtOnce, ManualLoop
from tests.property.keyed_model import keyed_records
from tests.property.timer_world import BROKER, SOURCE, START_MS, World

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
LATE_MS = 5
SYNC_S = 0.001


class Writer:
    """duemq_server.storage.writer.LogWriter without threads: a sync takes `SYNC_S`."""

    def __init__(self, log, on_durable, on_fatal, **_: object) -> None:
        self._log = log
        self._on_durable = on_durable
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._log.on_append = lambda: self._loop.call_later(SYNC_S, self._write)
        self._write()

    def _write(self) -> None:
        try:
            while self._log.write_pending():
                self._on_durable(self._log.durable_position)
        except DiskFull:
            self._loop.call_later(0.25, self._write)


class Quiet:
    """A shard, its sender and its broker, and nobody else."""

    def __init__(self, loop: ManualLoop, limits: Limits | None = None) -> None:
        self.loop = loop
        self.world = World(limits=limits or Limits())
        self.delivered_ms: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """The process starts, on what lies in the world."""
        self.shard = Shard(self.world.directory)
        self.shard.log_loop.start()
        self.shard.firing.start()
        self._stream: FireStream | None = None
        self._tasks = [asyncio.create_task(self.shard.disk_jobs.run())]
        self.shard.log_loop.on_sendable = lambda _: self._stream.kick() if self._stream else None

    def connect(self) -> None:
        """The broker can be sent to."""
        self._stream = FireStream(self.shard, BROKER, "b:1", BrokerClock())
        self.shard.connected(BROKER, self._stream)
        self._tasks.append(asyncio.create_task(self._stream._write(self)))

    def disconnect(self) -> None:
        """It is away."""
        assert self._stream is not None
        self._tasks.pop().cancel()
        self.shard.disconnected(BROKER, self._stream)
        self._stream = None

    async def kill(self) -> None:
        """The process is gone, another starts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.shard.firing.stop()
        self.world.now_ms = self.loop.wall_ms
        self.world.kill()
        self.start()
        self.connect()

    async def take(self, *waits_ms: int, topic: str = "any") -> None:
        """Messages come, as a fetch brings them."""
        due_ms = [self.loop.wall_ms + wait for wait in waits_ms]
        base = len(self.world.broker.due_ms)
        self.world.broker.accept(due_ms, 10, topic)
        await self.shard.ingest(SOURCE, BROKER, self.world.broker.frames_from(base, 1), base)

    async def answer(self, batches) -> None:
        """The broker's side: it holds what is early, and answers a millisecond later."""
        early_ms = max(batch.ready_ms for batch in batches) - self.loop.wall_ms
        if 0 < early_ms <= SECOND_MS:
            await self.loop.silence(early_ms / 1000)
        now_ms = self.loop.wall_ms
        answers = [
            (batch, self.world.broker.store(batch, now_ms, refuse=False)) for batch in batches
        ]
        for offset in self.world.broker.delivered:
            self.delivered_ms.setdefault(offset, now_ms)
        await self.loop.silence(0.001)
        for batch, outcome in answers:
            self.shard.answered(batch, outcome, now_ms)
        if self._stream is not None:
            self._stream.kick()

    def late_ms(self) -> list[int]:
        """How late each delivered message was."""
        due_ms = self.world.broker.due_ms
        return [at - due_ms[offset] for offset, at in sorted(self.delivered_ms.items())]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualLoop]:
    with ManualLoop(START_MS) as loop:
        clock = SimpleNamespace(
            time=lambda: loop.wall_s, time_ns=lambda: int(loop.wall_s * 1e6) * 1_000
        )
        for module in (firing, fire_stream):
            monkeypatch.setattr(module, "time", clock)
            monkeypatch.setattr(module, "now_ms", lambda: loop.wall_ms)
        monkeypatch.setattr(log_loop, "LogWriter", Writer)
        monkeypatch.setattr(disk_jobs, "ThreadPoolExecutor", AtOnce)
        monkeypatch.setattr(FireStream, "_run", nothing)

        async def send(self: FireStream, call: Quiet, batches) -> None:
            await call.answer(batches)

        monkeypatch.setattr(FireStream, "_send", send)
        yield loop


async def nothing(_: FireStream) -> None: ...


def run(loop: ManualLoop, main: Callable[[Quiet], object], limits: Limits | None = None) -> Quiet:
    async def started() -> Quiet:
        quiet = Quiet(loop, limits)
        quiet.start()
        quiet.connect()
        await main(quiet)
        return quiet

    return loop.run_until_complete(started())


def test_what_a_broker_refused_whose_clock_is_late_is_sent_again_soon(loop: ManualLoop) -> None:
    """Others' are in step, so that the shard goes by them."""

    async def main(quiet: Quiet) -> None:
        assert quiet._stream is not None
        clock = quiet._stream._clock
        clock.observe(quiet.loop.wall_ms, quiet.loop.wall_ms - 60 * SECOND_MS, 0)
        refused: list[FireBatch] = []
        answer = quiet.answer

        async def refuse(batches: list[FireBatch]) -> None:
            refused.extend(batches)
            quiet.answer = answer  # type: ignore[method-assign]
            for batch in batches:
                error = status.to_proto(ReadOnly("short of space"))
                quiet._stream._take(batch, view_pb2.BatchResultView(error=error), 0, 0)

        quiet.answer = refuse  # type: ignore[method-assign]
        await quiet.take(SECOND_MS)
        await loop.silence(63)
        assert refused
        assert quiet.delivered_ms

    run(loop, main)


@pytest.mark.parametrize("wait_s", [1, 59, 61, 90, 120, 180, 600, 7_200])
def test_one_timer_and_then_silence(loop: ManualLoop, wait_s: int) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(wait_s * SECOND_MS)
        await loop.silence(wait_s + 1)

    [late] = run(loop, main).late_ms()
    assert 0 <= late <= LATE_MS


def test_what_is_durable_is_what_the_core_was_told_of(loop: ManualLoop) -> None:
    """The writer's thread may be ahead of the event loop by a message to it."""

    async def main(quiet: Quiet) -> None:
        await quiet.take(3_600 * SECOND_MS)
        log = quiet.world.directory.log
        waiting = asyncio.create_task(quiet.shard.log_loop.durable(log.end_position))
        while log.write_pending():  # and says nothing
            pass
        await loop.silence(SYNC_S / 2)
        assert not waiting.done()
        quiet.shard.log_loop._advance(log.durable_position)
        await waiting
        (source,) = quiet.shard.sources()
        assert source.durable_offset == source.next_offset == 1

    run(loop, main)


def test_one_timer_that_is_due_soon_after_silence(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        await loop.silence(10.5)
        await quiet.take(200)
        await loop.silence(2)

    [late] = run(loop, main).late_ms()
    assert 0 <= late <= LATE_MS


@pytest.mark.parametrize("uptime_s", [0, 27])
def test_many_timers_just_beyond_the_near_window(loop: ManualLoop, uptime_s: int) -> None:
    async def main(quiet: Quiet) -> None:
        await loop.silence(uptime_s)  # the checkpoint comes before they are near, or after
        for _ in range(40):
            await quiet.take(*[66 * SECOND_MS] * 100)
        await loop.silence(67)

    late = run(loop, main).late_ms()
    assert len(late) == 4_000
    assert max(late) <= 50


@pytest.mark.parametrize("wait_s", [30, 90, 600])
def test_one_timer_a_restart_and_then_silence(loop: ManualLoop, wait_s: int) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(wait_s * SECOND_MS)
        await loop.silence(20)
        await quiet.kill()
        await loop.silence(wait_s - 19)

    [late] = run(loop, main).late_ms()
    assert 0 <= late <= LATE_MS


def test_one_timer_from_a_block_and_then_silence(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(5 * MINUTE_MS)
        quiet.shard.scheduler.tiers.limits = Limits(memtable_rows_max=1)
        quiet.shard.disk_jobs.wake()
        await loop.silence(1)
        assert quiet.shard.scheduler.segments.pending == 1
        quiet.shard.scheduler.tiers.limits = Limits()
        await loop.silence(300)

    [late] = run(loop, main).late_ms()
    assert 0 <= late <= LATE_MS


def test_timers_that_gave_way_and_then_silence(loop: ManualLoop) -> None:
    limits = Limits(near_rows_max=100, memtable_rows_max=50, park_rows_min=5)

    async def main(quiet: Quiet) -> None:
        for wait_s in range(40, 0, -1):
            await quiet.take(*[wait_s * SECOND_MS] * 20)
        await loop.silence(45)

    late = run(loop, main, limits).late_ms()
    assert len(late) == 800
    assert max(late) <= 50


def test_parked_timers_go_when_their_broker_is_back_and_all_is_quiet(loop: ManualLoop) -> None:
    limits = Limits(near_rows_max=100, memtable_rows_max=50, park_rows_min=5)

    async def main(quiet: Quiet) -> None:
        quiet.disconnect()
        for _ in range(8):
            await quiet.take(*[0] * 20, topic="keyed")
            await loop.silence(0.1)
        await loop.silence(5)
        assert quiet.shard.scheduler.segments.parked()
        assert quiet.shard.overdue() == 160
        quiet.connect()
        await loop.silence(5)

    assert len(run(loop, main, limits).late_ms()) == 160


def test_a_timer_without_a_route_goes_when_there_is_one(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        quiet.world.set_topics([])
        await quiet.take(90 * SECOND_MS)
        await loop.silence(100)
        assert quiet.shard.overdue() == 1
        quiet.world.set_topics(["any"])
        await loop.silence(1)

    [late] = run(loop, main).late_ms()
    assert 10_000 <= late <= 10_000 + LATE_MS


def test_a_timer_whose_broker_is_away_fails_over_without_being_asked(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        quiet.disconnect()
        await quiet.take(90 * SECOND_MS)
        await loop.silence(89)
        quiet.connect()
        quiet.disconnect()
        other = SimpleNamespace()
        quiet.shard.connected("b2", other)
        await loop.silence(10)
        assert quiet.shard.scheduler.ledger.fired == 1

    run(loop, main)


def test_a_clock_set_forward_is_noticed_within_a_second(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(MINUTE_MS * 60)
        await loop.silence(10)
        loop.set_clock(MINUTE_MS * 60)
        await loop.silence(3)

    [late] = run(loop, main).late_ms()
    assert late <= 10_000 + 2_100


def test_a_clock_set_back_holds_nothing_that_is_dispatched(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(30 * SECOND_MS, topic="keyed")
        await loop.silence(29.998)
        assert quiet.shard.scheduler.ledger.in_flight == 1
        quiet.world.now_ms = loop.wall_ms
        loop.set_clock(-60 * MINUTE_MS)
        quiet.world.now_ms = loop.wall_ms
        await quiet.take(SECOND_MS, topic="keyed")
        await loop.silence(3)
        assert set(quiet.delivered_ms) == {0, 1}

    run(loop, main)


def test_firing_and_housekeeping_outlive_a_full_disk(loop: ManualLoop) -> None:
    limits = Limits(log_segment_bytes=4_096, checkpoint_log_bytes=2_048)

    async def main(quiet: Quiet) -> None:
        await quiet.take(*range(0, 60 * SECOND_MS, SECOND_MS))
        await loop.silence(5)
        quiet.world.fill_disk(0)
        await loop.silence(40)
        assert not quiet._tasks[0].done()
        assert quiet.shard.overdue() > 30
        quiet.world.free_disk()
        await loop.silence(1)
        assert quiet.shard.overdue() == 0
        await loop.silence(20)
        assert not quiet._tasks[0].done()

    assert len(run(loop, main, limits).late_ms()) == 60


def test_a_flush_without_space_is_tried_now_and_then_and_told_of_once(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All else is quiet: nobody wakes it."""
    limits = Limits(memtable_rows_max=20, log_segment_bytes=1 << 20)
    looks: list[int] = []

    async def main(quiet: Quiet) -> None:
        keeper, segments = quiet.world.directory.housekeeper, quiet.shard.scheduler.segments
        look = keeper.next_job
        monkeypatch.setattr(keeper, "next_job", lambda now: (looks.append(now), look(now))[1])
        await quiet.take(90 * SECOND_MS)  # the log takes its space
        await loop.silence(0.1)
        await quiet.take(*[120 * MINUTE_MS] * 20)
        quiet.world.fill_disk(1)
        await loop.silence(60)
        assert not segments.pending
        assert 200 < len(looks) < 1_000
        quiet.world.free_disk()
        await loop.silence(0.3)
        assert segments.pending == 20
        await loop.silence(40)

    [late] = run(loop, main, limits).late_ms()
    assert 0 <= late <= LATE_MS
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    refused, took = (each for each in told if each.startswith("flush: "))
    assert refused.endswith("no space left; trying again")
    assert "there is space again, after 2" in took


def test_a_timer_on_disk_fires_in_time_while_a_flush_has_no_space(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(5 * MINUTE_MS)
        tiers = quiet.shard.scheduler.tiers
        tiers.limits = Limits(memtable_rows_max=1)
        quiet.shard.disk_jobs.wake()
        await loop.silence(1)
        assert quiet.shard.scheduler.segments.pending == 1
        tiers.limits = Limits(memtable_rows_max=20)
        await quiet.take(*[120 * MINUTE_MS] * 20)
        quiet.world.fill_disk(1)
        await loop.silence(300)
        assert tiers.memtable_full()

    [late] = run(loop, main).late_ms()
    assert 0 <= late <= LATE_MS


def test_a_disk_that_is_nearly_full_takes_nothing_over_and_fires_what_is_there(
    loop: ManualLoop,
) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(5 * SECOND_MS)
        quiet.world.fill_disk(Limits().free_bytes_min - 1)
        more = asyncio.create_task(quiet.take(0))
        await loop.silence(6)
        assert list(quiet.delivered_ms) == [0]
        assert not more.done()
        quiet.world.free_disk()
        await loop.silence(1)
        assert list(quiet.delivered_ms) == [0, 1]

    run(loop, main)


def test_a_disk_that_does_not_tell_its_free_space_holds_up_nothing(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error would end who fetches, and nobody would see it."""

    def nobody_knows(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def main(quiet: Quiet) -> None:
        disk = copy.copy(quiet.world.disk)  # others ask the one before
        monkeypatch.setattr(disk, "free_bytes", nobody_knows)
        monkeypatch.setattr(quiet.world.directory.housekeeper, "_disk", disk)
        await quiet.take(0)
        await loop.silence(1)
        assert list(quiet.delivered_ms) == [0]

    run(loop, main)


def test_frames_that_cannot_be_taken_over_end_the_shard_and_not_who_fetches_them(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_way(*_: object) -> None:
        raise OverflowError("Python integer out of bounds")

    async def main(quiet: Quiet) -> None:
        monkeypatch.setattr(quiet.shard.scheduler, "apply_add", no_way)
        with pytest.raises(Internal, match="not taken over: Python integer"):
            await quiet.take(0)
        assert isinstance(quiet.shard.log_loop.failed.exception(), Internal)

    run(loop, main)


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (LogLoop.end_waits, Unavailable),
        (lambda log_loop: log_loop.fail(OSError("a block is damaged")), Internal),
    ],
)
def test_a_shard_that_ends_while_the_disk_is_full_lets_nobody_wait(
    loop: ManualLoop, ends: Callable[[LogLoop], None], told: type[Exception]
) -> None:
    async def main(quiet: Quiet) -> None:
        await quiet.take(60 * MINUTE_MS)
        [handle] = [Cancelled(SOURCE, 0, loop.wall_ms + 60 * MINUTE_MS)]
        quiet.world.fill_disk(0)
        keys = [TimerKey("any", "k")]
        asked = [
            asyncio.create_task(work)
            for work in (
                quiet.shard.cancel_keys(b"r" * 16, keys),
                quiet.shard.cancel([handle], 5.0),
            )
        ]
        await loop.silence(3)
        assert not any(each.done() for each in asked)
        ends(quiet.shard.log_loop)
        for _ in range(2):
            await loop.silence(1)
        for each in asked:
            assert isinstance(each.exception(), told)
        if told is Internal:
            quiet.shard.log_loop.failed.exception()

    run(loop, main)


@pytest.mark.parametrize("by_ms", [60 * MINUTE_MS, -60 * MINUTE_MS])
def test_a_clock_that_is_set_forgets_no_request(loop: ManualLoop, by_ms: int) -> None:
    async def main(quiet: Quiet) -> None:
        record = message_pb2.Record(message_id="0", timer_key="k")
        records = keyed_records("any", ["k"], [record], [loop.wall_ms + 24 * 60 * MINUTE_MS])
        first = await quiet.shard.schedule(b"r" * 16, records)
        loop.set_clock(by_ms)
        await loop.silence(3)
        assert await quiet.shard.schedule(b"r" * 16, records) == first
        assert quiet.shard.scheduler.ledger.accepted == 1

    run(loop, main)
