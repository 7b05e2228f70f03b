"""Holds in a timer world: which are in force, whatever is lost, and that none lets anything go."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from duemq.errors import InvalidArgument
from duemq.v1 import message_pb2
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.scheduling.fire_lane import FireBatch
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.dropping import Backlogged, Dropping, Sifting
from duemq_server.timer_service.timers.hold_entry import DROP_OLDER
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from duemq_server.timer_service.views.listing import Page, PageQuery

if TYPE_CHECKING:
    from tests.property.timer_world import World

Name = tuple[str, str]  # topic, prefix


class HoldModel:
    """What was asked for, and is not lost by a crash once it is durable."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.now: frozenset[Name] = frozenset()
        self._history: list[tuple[int, frozenset[Name]]] = []
        """(end of the log, holds from then on): of what is not durable."""
        self._durable: frozenset[Name] = frozenset()

    def hold(self, topic: str, prefix: str) -> None:
        scheduler = self._world.scheduler
        with suppress(LogFull, DiskFull):
            new = changes.hold(scheduler, self._world.now_ms, topic, prefix)
            assert new == ((topic, prefix) not in self.now)
            self._is_now(self.now | {(topic, prefix)})

    def resume(self, topic: str, prefix: str) -> None:
        scheduler = self._world.scheduler
        with suppress(LogFull, DiskFull):
            was_held = changes.resume(scheduler, self._world.now_ms, topic, prefix)
            assert was_held == ((topic, prefix) in self.now)
            self._is_now(self.now - {(topic, prefix)})

    def resume_without(self, topic: str, prefix: str, older_ms: int) -> None:
        """What is too old is dropped; a crash or a full disk may come in between."""
        scheduler, now_ms = self._world.scheduler, self._world.now_ms
        with suppress(LogFull, DiskFull, InvalidArgument):
            some = {"policy": DROP_OLDER, "older_ms": older_ms}
            if not changes.resume_some(scheduler, now_ms, topic, prefix, **some):
                return
            there = scheduler.holds.get(topic, prefix)
            assert there is not None
            others = scheduler.holds.within(there)
            self._drop(Sifting(there, others))
            left = [each for each in self._world.pending() if each.topic == topic]
            if not (prefix or others):
                assert all(each.due_ms >= there.asked_ms - older_ms for each in left)
            self.resume(topic, prefix)

    def _drop(self, sifting: Sifting) -> None:
        scheduler, after = self._world.scheduler, None
        while not sifting.over:
            wanted = PageQuery(sifting.hold.topic, 0, sifting.to_ms, 5, after)
            page = Page(scheduler, wanted, sifting.make, wants_all=False)
            page.run()
            listed, after = page.still_pending(scheduler), page.next
            found = [
                Backlogged(Cancelled(SourceId(at.store_id, at.queue_id), at.offset, at.due_ms), key)
                for at, _, key in listed
            ]
            gone = sifting.take(found, last=after is None)
            dropping = Dropping(scheduler, gone)
            while not dropping.advance(self._world.now_ms):
                query = dropping.query()
                look_up = self._world.look_up([query])
                look_up.run()
                scheduler.segments.looked_up(look_up)
                dropping.answered(query)
            self._world.cancelled(dropping, gone)

    def resume_all(self) -> None:
        """Those for which there is room."""
        for name in sorted(self.now):
            self.resume(*name)

    def _is_now(self, holds: frozenset[Name]) -> None:
        self.now = holds
        self._history.append((self._world.scheduler.log.end_position, holds))

    def settle(self, durable: int) -> None:
        while self._history and self._history[0][0] <= durable:
            _, self._durable = self._history.pop(0)

    def restarted(self) -> None:
        found = frozenset((each.topic, each.prefix) for each in self._world.scheduler.holds)
        assert found == self._durable or found in [holds for _, holds in self._history]
        self.now = self._durable = found
        self._history = []

    def check_dispatched(self, begin: int) -> None:
        """Nothing held is in batches that the log has from `begin` on."""
        if not self.now:
            return
        for lane in self._world.scheduler.dispatcher.lanes():
            for batch in lane.unacked:
                if batch.position >= begin:
                    self._check(batch)

    def _check(self, batch: FireBatch) -> None:
        topic = batch.lane.id.topic
        for each in message_pb2.RecordBatch.FromString(batch.records).records:
            for held, prefix in self.now:
                assert (
                    topic != held
                    or not each.timer_key.startswith(prefix)
                    or (prefix and not each.timer_key)
                )
