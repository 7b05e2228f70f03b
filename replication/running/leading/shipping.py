"""Sends the log to those who follow, a stream each; what comes on it moves the high watermark."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from duemq.errors import Corrupt, Unavailable
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import (
    ANOTHER_LEADER,
    COMMON_BYTES,
    Hello,
    LogPart,
    Welcome,
)
from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import wire
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.errors import StorageError
from duemq_server.storage.replicas.replica_log import ReplicaLog

log = logging.getLogger(__name__)

THROTTLED_BYTES_MIN = 64 * 1024
"""Of a chunk, whatever `catch_up_rate` is: the least rate is twice that a second."""
PACE_MS = 500
"""Between two chunks of who is throttled, at most."""
INLINE_BYTES = 8 << 20
"""So far behind the log's end its bytes are in memory; what lies before is read by a thread."""
TOLD_MAX = 16
"""Names of replicas, at a level each, of which is known what was told last."""


@dataclass(slots=True)
class _Stream:
    """What the sender of one stream waits for."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    take_over: bool = False


class Shipping:
    """Owned by Leading; used from its event loop."""

    def __init__(
        self,
        leader: Leader,
        replica_log: ReplicaLog,
        times: Times,
        *,
        rate: int,
        look_now: asyncio.Event,
        on_answer: Callable[[], None],
        on_follower: Callable[[str, str], None],
    ) -> None:
        """`rate`: bytes a second for who is not in sync; 0: no limit.

        `look_now` wakes who looks at the set.  `on_follower` is told a name and an address.
        """
        self.rate = rate
        self._leader = leader
        self._log = replica_log
        self._times = times
        self._look_now = look_now
        self._on_answer = on_answer
        self._on_follower = on_follower
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._over = False
        self._told: dict[tuple[str, int], str] = {}  # by name and level: what was told of it last
        self._parts: dict[str, LogPart] = {}  # by name of a member: what it was to compare last

    @property
    def open(self) -> bool:
        """Whether there is any stream."""
        return bool(self._streams)

    def wake(self) -> None:
        """There may be something to send."""
        for stream in self._streams.values():
            stream.wake.set()

    def end(self) -> None:
        """Ends the streams, and takes no others: who hears a leader does not stand.

        Does not wait for that.
        """
        self._over = True
        for stream in self._streams.values():
            stream.ended = True
        self.wake()

    def ask_to_lead(self, successor: ReplicaId) -> bool:
        """With the next chunk; whether its stream is there."""
        for number, progress in self._leader.followers.items():
            if progress.replica == successor and number in self._streams:
                self._streams[number].take_over = True
                self._streams[number].wake.set()
                return True
        return False

    async def serve(
        self, hello: Hello, address: str, requests: AsyncIterator[Any], context: Any
    ) -> None:
        """One follower's stream, until it ends."""
        if self._over:
            await context.write(wire.not_leading("this replica leads no more"))
            return
        number = next(self._numbers)
        self._note_log_start()
        greeting = self._leader.hello(number, hello, self._log.end_position, steady_ms())
        stream = self._streams[number] = _Stream()
        answers = None
        try:
            if isinstance(greeting, Welcome):
                part = await self._common(hello, greeting.truncate_to)
                greeting = dataclasses.replace(greeting, common=part)
            await context.write(wire.to_greeting(greeting))
            if not isinstance(greeting, Welcome):
                self._tell(hello.replica, f"does not follow: {greeting}")
                return
            self._on_follower(hello.replica.name, address)
            hearing = self._hear(number, stream, requests, greeting.truncate_to)
            answers = asyncio.create_task(hearing, name="answers")
            await self._send(number, stream, context)
        finally:
            del self._streams[number]
            self._leader.broke(number)
            self._look_now.set()
            if answers is not None:
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)

    async def _common(self, hello: Hello, end: int) -> LogPart | None:
        """The last that both logs have; None: they have nothing in common, or it is damaged here.

        Then nobody is refused for it: who follows may have the last copy that is whole.
        """
        end = min(end, self._log.written_position)
        start = max(hello.start, self._log.start_position, end - COMMON_BYTES)
        if start >= end:
            return None
        known = self._parts.get(hello.replica.name)
        if known is not None and (known.start, known.end) == (start, end):
            return known  # who is refused for it asks each second, for ever
        try:
            crc = await asyncio.to_thread(self._checksum, start, end)
        except IndexError as error:
            raise Unavailable(f"retention was faster: {error}", field="position") from error
        except (StorageError, OSError) as error:
            text = f"is not compared: {error}; {ANOTHER_LEADER}"
            self._tell(hello.replica, text, logging.ERROR)
            return None
        part = self._parts[hello.replica.name] = LogPart(start, end, crc)
        return part

    def _checksum(self, start: int, end: int) -> int:
        self._log.verify(start, end)
        return self._log.checksum(start, end)

    def _tell(self, replica: ReplicaId, text: str, level: int = logging.INFO) -> None:
        """Told once: who is refused, or cannot take what comes, asks each second, for ever."""
        key = replica.name, level
        if self._told.get(key) == text:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told[key] = text
        log.log(level, "%s %s", replica, text)

    async def _hear(
        self, number: int, stream: _Stream, requests: AsyncIterator[Any], start: int
    ) -> None:
        follows = False
        try:
            async for message in requests:
                answer = wire.answer(message)
                if not follows:  # whose log is another one says hello each second, and no more
                    self._tell(answer.replica, f"follows from {start} on")
                    follows = True
                self._leader.answered(number, answer, self._log.written_position, steady_ms())
                self._on_answer()
                stream.wake.set()  # there may be room
                if answer.replica not in self._leader.record.in_sync:
                    self._look_now.set()
        finally:
            stream.ended = True
            stream.wake.set()

    async def _send(self, number: int, stream: _Stream, context: Any) -> None:
        sent_ms = 0
        while not stream.ended and not self._leader.deposed and number in self._leader.followers:
            stream.wake.clear()
            wanted = self._leader.to_read(number, self._log.written_position)
            due_ms = sent_ms + self._times.heartbeat_ms - steady_ms()
            if wanted is None and due_ms > 0 and not stream.take_over:
                try:
                    async with asyncio.timeout(due_ms / 1000):
                        await stream.wake.wait()
                except TimeoutError:
                    pass
                continue
            data = await self._read_run(number, *wanted) if wanted is not None else b""
            if number not in self._leader.followers:
                return
            sent_ms = steady_ms()
            self._note_log_start()
            chunk = self._leader.chunk(number, data, sent_ms, take_over=stream.take_over)
            stream.take_over = False
            await context.write(wire.to_chunk(chunk))
            await self._throttle(number, len(data))

    async def _read_run(self, number: int, position: int, bytes_max: int) -> memoryview:
        if self._is_throttled(number):  # no more than for one pause, or little
            rate = self.rate * PACE_MS // 1000
            bytes_max = min(bytes_max, max(rate, THROTTLED_BYTES_MIN))
        try:
            if self._log.written_position - position <= INLINE_BYTES:
                return self._log.read_run(position, bytes_max)
            return await asyncio.to_thread(self._log.read_run, position, bytes_max)
        except IndexError as error:  # who says hello again is told that it needs a snapshot
            raise Unavailable(f"retention was faster: {error}", field="position") from error
        except (StorageError, OSError) as error:
            raise Corrupt(f"its log cannot be read: {error}; {ANOTHER_LEADER}") from error

    async def _throttle(self, number: int, size: int) -> None:
        """Who is not in sync gets `catch_up_rate` at most: the living come first."""
        if size and self._is_throttled(number):
            longest_s = PACE_MS / 1000  # who hears nothing ends its stream
            await asyncio.sleep(min(size / self.rate, longest_s))

    def _is_throttled(self, number: int) -> bool:
        progress = self._leader.followers.get(number)
        if progress is None or not self.rate:
            return False
        return progress.replica not in self._leader.set.counted

    def _note_log_start(self) -> None:
        """Retention moves it: who lacks what is before needs a snapshot, who has it may drop it."""
        self._leader.log_start = self._log.start_position
