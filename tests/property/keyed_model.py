"""What the owners of keyed timers know: which message waits under each key, told by the answers.

A message is its id; a rescheduled one keeps it, and gets another due time and another handle.  What
was decided counts from then on.  When the shard dies, what it had not made durable is asked again:
what survived is a beginning of it and is answered as before, the rest never happened.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest.mock import patch

from duemq.errors import Corrupt
from duemq.v1 import message_pb2
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.far.far_segments import SUFFIX
from duemq_server.timer_service.far.key_look_up import KeyLookUp
from duemq_server.timer_service.scheduling.keyed.changes import (
    CancellingKeys,
    KeyedChange,
    Rescheduling,
    Scheduling,
)
from duemq_server.timer_service.scheduling.keyed.request_memory import KEEP_MS
from duemq_server.timer_service.timers.keyed import (
    EXISTS,
    FIRED,
    REPLACED,
    RESCHEDULED,
    SCHEDULED,
    UNKNOWN,
    Handle,
    KeyedRecords,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import CANCELLED, NOT_YET, RequestKey, Result
from tests.crash.faulty_disk import FaultyFile

if TYPE_CHECKING:
    from tests.property.timer_world import World

KEYED_FROM = 1 << 40
"""Ids of messages that came under keys."""
SHARD = 2
DAMAGED = "DAMAGED"
"""What waits under the key is not known: a block could not be read."""


@dataclass
class Sent:
    """A request that was decided."""

    make: Callable[[], KeyedChange]
    results: list[Result]
    end: int
    at_ms: int
    undo: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Begun:
    """A request that is not decided."""

    change: KeyedChange
    check: Callable[[], Callable[[list[Result]], list[Callable[[], None]]]]
    make: Callable[[], KeyedChange]
    look_up: KeyLookUp | None = None
    ran: bool = False


class KeyedModel:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.handles: dict[int, Handle] = {}  # of messages that are not where a broker put them
        self.ids: dict[Handle, int] = {}
        self.came = 0  # messages under keys
        self.moved = 0  # times that one was rescheduled
        self.replaced: set[int] = set()
        self.gone: set[int] = set()  # replaced or cancelled
        self.begun: list[Begun] = []
        self.done: list[Sent] = []
        self.latest_ms = world.now_ms
        self.hashes_collide = False
        """What became of a key's last timer is remembered by hash alone."""
        self.unreadable = False
        """A look-up of this process met blocks that could not be read."""
        self._world = world
        self._last: dict[TimerKey, int] = {}
        self._unsettled: list[Sent] = []
        self._cancels: list[tuple[int, Handle, int]] = []
        self._requests = 0
        self._messages = 0

    # -- what is asked

    def schedule(
        self, keys: Sequence[str], waits: Sequence[int], body: int, topic: str, *, if_absent: bool
    ) -> None:
        ids = [KEYED_FROM + self._messages + n for n in range(len(keys))]
        self._messages += len(keys)
        due_ms = [self._world.now_ms + wait for wait in waits]
        records = [
            message_pb2.Record(body=b"x" * body, message_id=str(number), timer_key=key)
            for number, key in zip(ids, keys, strict=True)
        ]
        for number in ids:
            self._world.broker.targets[number] = {(topic, -1)}
        asked = keyed_records(topic, keys, records, due_ms)
        request = self._request()

        def make() -> KeyedChange:
            return Scheduling(self._world.scheduler, request, asked, if_absent=if_absent)

        def check() -> Callable[[list[Result]], list[Callable[[], None]]]:
            before = [self.waiting(TimerKey(topic, key)) for key in keys]
            handles = [None if each is None else self.handles[each] for each in before]

            def took(results: list[Result]) -> list[Callable[[], None]]:
                undo: list[Callable[[], None]] = []
                for at, (outcome, told) in enumerate(results):
                    old = before[at]
                    if old is not None and if_absent:
                        assert (outcome, told) == (EXISTS, (handles[at],))
                        continue
                    if old is None:
                        assert (outcome, len(told)) == (SCHEDULED, 1)
                    else:
                        assert (outcome, told[1:]) == (REPLACED, (handles[at],))
                        undo.append(self._replace(old))
                    assert told[0].due_ms == due_ms[at]
                    undo.append(self._come(ids[at], TimerKey(topic, keys[at]), told[0]))
                return undo

            return took

        self._begin(Begun(make(), check, make))

    def cancel(self, keys: Sequence[TimerKey]) -> None:
        request = self._request()

        def make() -> KeyedChange:
            return CancellingKeys(self._world.scheduler, request, keys)

        def check() -> Callable[[list[Result]], list[Callable[[], None]]]:
            before = [self.waiting(key) for key in keys]

            def took(results: list[Result]) -> list[Callable[[], None]]:
                undo = []
                for key, old, (outcome, _) in zip(keys, before, results, strict=True):
                    if outcome == DAMAGED:
                        continue
                    if old is None:
                        self._check_ended(key, outcome)
                    else:
                        assert outcome == CANCELLED
                        undo.append(self._cancel(old))
                return undo

            return took

        self._begin(Begun(make(), check, make))

    def reschedule(
        self, which: Sequence[int | TimerKey], waits: Sequence[int], *, fire: bool = False
    ) -> None:
        """By id or key; messages that were never taken over are asked for, too."""
        due_ms = [self._world.now_ms + wait for wait in waits]
        timers = [each if isinstance(each, TimerKey) else self.handle(each) for each in which]
        named = {self.waiting(t) if isinstance(t, TimerKey) else self.id_of(t) for t in timers}
        if len(named) < len(timers):
            return  # some are the same one: refused
        arrived = [self._pending(timer) is not None for timer in timers]
        request = self._request()

        def make() -> KeyedChange:
            return Rescheduling(self._world.scheduler, request, timers, due_ms, fire=fire)

        def check() -> Callable[[list[Result]], list[Callable[[], None]]]:
            before = [self._pending(timer) for timer in timers]
            dues = [
                min(due, self._world.broker.due_of(old)) if fire and old is not None else due
                for old, due in zip(before, due_ms, strict=True)
            ]

            def took(results: list[Result]) -> list[Callable[[], None]]:
                undo = []
                for at, (outcome, told) in enumerate(results):
                    old = before[at]
                    if old is None:
                        assert outcome in (FIRED, UNKNOWN, NOT_YET)
                    elif outcome == NOT_YET:
                        assert not arrived[at], "it had arrived when it was asked for"
                    else:
                        assert outcome == RESCHEDULED
                        assert told[0].due_ms == dues[at]
                        undo.append(self._move(old, told[0]))
                return undo

            return took

        try:
            change = make()
        except (LogFull, DiskFull):
            return
        self._begin(Begun(change, check, make))

    def repeat(self, which: float) -> None:
        """Whoever has got no answer asks again."""
        sent = self.done[int(which * len(self.done))]
        change = sent.make()
        if self._world.scheduler.keyed.requests.find(change.request) is None:
            assert sent not in self._unsettled
            assert self.latest_ms - sent.at_ms > KEEP_MS
            return
        assert change.advance(self._world.now_ms)
        assert change.results == sent.results

    def look_up_step(self, *, readable: bool = True) -> None:
        """A look-up is made for all that wait for one, or the one that was made runs."""
        made = next((each.look_up for each in self.begun if each.look_up and not each.ran), None)
        if made is None:
            waiting = [each for each in self.begun if each.look_up is None]
            look_up = self._look_up([each.change for each in waiting])
            for each in waiting:
                each.look_up = look_up
            return
        with self._reading(readable=readable):
            made.run()
        for each in self.begun:
            each.ran = each.ran or each.look_up is made

    def go_on(self, which: float) -> None:
        """A request whose look-up ran takes over what that found."""
        ready = [each for each in self.begun if each.ran]
        begun = ready[int(which * len(ready))]
        self.begun.remove(begun)
        assert begun.look_up is not None
        self._world.scheduler.segments.keys_looked_up(begun.look_up)
        begun.change.answered()
        begun.look_up, begun.ran = None, False
        self._step(begun)

    def finish(self, which: float) -> None:
        """A step of the requests that wait for a look-up."""
        if any(each.ran for each in self.begun):
            self.go_on(which)
        else:
            self.look_up_step()

    def finish_all(self) -> None:
        while self.begun:
            self.finish(0)

    # -- what is known

    def handle(self, message: int) -> Handle:
        """Where the message is now."""
        found = self.handles.get(message)
        return found or self._world.first_handle(message)

    def id_of(self, handle: Handle) -> int:
        return self.ids.get(handle, handle.offset)

    def waiting(self, key: TimerKey) -> int | None:
        """The message that waits under a key."""
        last = self._last.get(key)
        if last is None or last in self.gone or self.fired(last):
            return None
        return last

    def fired(self, message: int) -> bool:
        """Delivered, or on its way."""
        if self._world.broker.delivered[message]:
            return True
        return any(
            int(each.message_id) == message
            for lane in self._world.scheduler.dispatcher.lanes()
            for batch in lane.unacked
            for each in message_pb2.RecordBatch.FromString(batch.records).records
        )

    def cancelled_by_handle(self, message: int, handle: Handle, end: int) -> None:
        self.gone.add(message)
        self._cancels.append((message, handle, end))

    def _pending(self, timer: Handle | TimerKey) -> int | None:
        if isinstance(timer, TimerKey):
            return self.waiting(timer)
        message = self.id_of(timer)
        source = self._world.scheduler.numbers.source(timer.source)
        arrived = source is not None and timer.offset < source.next_offset
        current = self.handle(message) == timer
        return message if arrived and current and not self._ended(message) else None

    def _ended(self, message: int) -> bool:
        return message in self.gone or self.fired(message)

    def _check_ended(self, key: TimerKey, outcome: str) -> None:
        last = self._last.get(key)
        if self.hashes_collide:
            assert outcome in (CANCELLED, FIRED, UNKNOWN)
        elif last is None:
            assert outcome == UNKNOWN
        elif last in self.gone:
            assert outcome in (CANCELLED, UNKNOWN)
        else:
            assert outcome in (FIRED, UNKNOWN)

    # -- what happens

    def settle(self, durable: int) -> None:
        """What is durable has happened for good."""
        self._unsettled = [sent for sent in self._unsettled if sent.end > durable]
        self._cancels = [each for each in self._cancels if each[2] > durable]

    def restarted(self) -> None:
        """Asks again for what had no answer."""
        self.begun, self.unreadable = [], False
        scheduler, lost = self._world.scheduler, False
        survived = []
        for sent in self._unsettled:
            change = sent.make()
            if scheduler.keyed.requests.find(change.request) is None:
                lost = True
                continue
            assert not lost, "a later one survived"
            assert change.advance(self._world.now_ms)
            assert change.results == sent.results
            survived.append(sent)
        for sent in reversed(self._unsettled[len(survived) :]):
            self.done.remove(sent)
            for undo in reversed(sent.undo):
                undo()
        self._unsettled = []
        for message, handle, _ in self._cancels:
            number = scheduler.numbers.find_source(handle.source)
            if number is None or not scheduler.tombstones.has(number, handle.offset):
                self.gone.discard(message)
        self._cancels = []

    def _request(self) -> RequestKey:
        self._requests += 1
        return RequestKey(self._requests.to_bytes(16, "big"))

    def _begin(self, begun: Begun) -> None:
        if not self._world.directory.housekeeper.short_of_space():
            self._step(begun)

    def _step(self, begun: Begun) -> None:
        took, change = begun.check(), begun.change
        with suppress(LogFull, DiskFull):
            try:
                if not change.advance(self._world.now_ms):
                    self.begun.append(begun)
                    return
            except Corrupt:
                assert self.unreadable
                return
            assert self.unreadable or not change.errors
            errors = {at: Result(DAMAGED) for at in change.errors}
            undo = took([errors.get(at, each) for at, each in enumerate(change.results)])
            if errors:  # it is not remembered
                self._world.sync()
                return
            sent = Sent(begun.make, change.results, change.end, self._world.now_ms, undo)
            self.done.append(sent)
            self._unsettled.append(sent)

    def _look_up(self, changes: Sequence[KeyedChange]) -> KeyLookUp:
        scheduler = self._world.scheduler
        asks = [each.asks() for each in changes]
        keys = [ask for found, _ in asks for ask in found]
        handles = [ask for _, found in asks for ask in found]
        return scheduler.segments.key_look_up(keys, handles, scheduler.numbers.find_source)

    @contextmanager
    def _reading(self, *, readable: bool) -> Iterator[None]:
        """Blocks can be read, or not."""
        if readable:
            yield
            return
        self.unreadable = True
        disk, real = self._world.disk, self._world.disk.open

        def opened(path: str, *, create: bool = False) -> FaultyFile:
            if path.endswith(SUFFIX):
                raise OSError(errno.EIO, "cannot be read")
            return real(path, create=create)

        with patch.object(disk, "open", opened):
            yield

    def _replace(self, message: int) -> Callable[[], None]:
        assert message not in self.gone
        self.gone.add(message)
        self.replaced.add(message)

        def undo() -> None:
            self.gone.discard(message)
            self.replaced.discard(message)

        return undo

    def _cancel(self, message: int) -> Callable[[], None]:
        self.gone.add(message)
        return lambda: self.gone.discard(message)

    def _come(self, message: int, key: TimerKey, handle: Handle) -> Callable[[], None]:
        before = self._last.get(key)
        self._last[key] = message
        self._place(message, handle)
        self.came += 1

        def undo() -> None:
            self.came -= 1
            del self.ids[self.handles.pop(message)], self._world.broker.moved[message]
            if before is None:
                del self._last[key]
            else:
                self._last[key] = before

        return undo

    def _move(self, message: int, handle: Handle) -> Callable[[], None]:
        before, due_before = self.handles.get(message), self._world.broker.moved.get(message)
        self._place(message, handle)
        self.moved += 1

        def undo() -> None:
            self.moved -= 1
            del self.ids[self.handles.pop(message)]
            del self._world.broker.moved[message]
            if before is not None and due_before is not None:
                self._place(message, before)

        return undo

    def _place(self, message: int, handle: Handle) -> None:
        self.handles[message] = handle
        assert handle not in self.ids or self.ids[handle] == message
        self.ids[handle] = message
        self._world.broker.moved[message] = handle.due_ms


def keyed_records(
    topic: str, keys: Sequence[str], records: list[message_pb2.Record], due_ms: Sequence[int]
) -> KeyedRecords:
    """To any queue of a topic."""
    encoded = [message_pb2.RecordBatch(records=[each]).SerializeToString() for each in records]
    sizes, hashes = [len(each) for each in encoded], list(range(len(encoded)))
    return KeyedRecords(topic, -1, "", keys, b"".join(encoded), sizes, hashes, hashes, due_ms)
