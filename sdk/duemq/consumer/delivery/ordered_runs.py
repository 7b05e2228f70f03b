"""What workers do in order: runs of messages, which order_lanes.py says may be processed now.

No callback starts once the queue is dropped, or while the lease (lease.py) is over.
"""

import asyncio
import time
from dataclasses import replace
from math import inf

from duemq.consumer.delivery.calling import Calling, check_ran
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.order_lanes import OrderLanes, Segment
from duemq.consumer.delivery.workers import Callback, cancelling
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.message import Message
from duemq.outcomes import failures_of

# A worker begins no further message of a run after this time.
SLICE_S = 0.01


class OrderedRun:
    """What a worker does in one go."""

    def __init__(self, flow: "Flow", segments: list[Segment[Message]]) -> None:
        self.flow = flow
        self.segments = segments
        self.running = False
        self.seconds = 0.0
        """How long it took."""
        self.began_s = inf
        """By the lease's clock."""
        self.current = 0
        """Index of the segment that the worker is in: set before it looks at `stopped`."""
        self.stopped = False
        """The worker begins no further message.  Set by the event loop, which then reads where the
        worker is: past that nothing begins."""

    @property
    def pending(self) -> ProcessQueue[Message]:
        """Where its messages come from."""
        return self.flow.source.pending


class Flow:
    """A queue for as long as it is ours without a break."""

    def __init__(self, source: Source, lanes: OrderLanes[Message]) -> None:
        self.source = source
        self.lanes = lanes
        self.runs: set[OrderedRun] = set()
        """With the workers, or on the way there."""
        self.timer: asyncio.TimerHandle | None = None
        self.wake_ms: int | None = None
        """What the timer is set to."""
        self.quiet = asyncio.Event()
        """Set whenever something has ended."""

    @property
    def busy(self) -> bool:
        """A callback runs."""
        return any(run.running for run in self.runs)

    def cancel_timer(self) -> None:
        """Nothing wakes it any more."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.wake_ms = None


class OrderedCaller(Calling):
    """Calls the callback with a run's messages, one after the other."""

    def __init__(
        self, callback: Callback, lease: Lease, *, batch: bool, group: str, client_id: str
    ) -> None:
        super().__init__(callback, batch=batch, group=group, client_id=client_id)
        self._lease = lease

    def call(self, run: OrderedRun) -> None:
        """For threads."""
        began_s = time.monotonic()
        try:
            if self.batch:
                self._call_lists(run)
            else:
                self._call_each(run)
        finally:
            run.seconds = time.monotonic() - began_s

    def _call_each(self, run: OrderedRun) -> None:
        callback, lease, pending = self.callback, self._lease, run.pending
        clock, span = lease.clock, self.watch()
        enough_s = inf
        for index, segment in enumerate(run.segments):
            run.current = index
            for entry in segment.entries:
                now_s = clock()
                if run.stopped or pending.dropped or now_s >= lease.until_s or now_s > enough_s:
                    return
                if enough_s == inf:
                    run.began_s, enough_s = now_s, now_s + SLICE_S
                try:
                    if span is None:
                        check_ran(callback(entry.message))
                    else:
                        with span([entry.message]):
                            check_ran(callback(entry.message))
                except BaseException as error:
                    if not _failed(segment, 1, error):
                        break
                else:
                    entry.finish()
                    segment.done += 1

    def _call_lists(self, run: OrderedRun) -> None:
        for segment in run.segments:
            if run.pending.dropped or self._lease.over:
                return
            messages = [entry.message for entry in segment.entries]
            try:
                with self.span(messages):
                    check_ran(self.callback(messages))
            except BaseException as error:
                _failed(segment, len(messages), error)
            else:
                _list_done(segment)

    async def call_async(self, run: OrderedRun) -> None:
        """For tasks: the same, awaiting each call."""
        began_s = time.monotonic()
        try:
            if self.batch:
                await self._await_lists(run)
            else:
                await self._await_each(run)
        finally:
            run.seconds = time.monotonic() - began_s

    async def _await_each(self, run: OrderedRun) -> None:
        lease, pending, span = self._lease, run.pending, self.watch()
        cancelled, enough_s = cancelling(), inf
        for index, segment in enumerate(run.segments):
            run.current = index
            for entry in segment.entries:
                now_s = lease.clock()
                if run.stopped or pending.dropped or now_s >= lease.until_s or now_s > enough_s:
                    return
                if enough_s == inf:
                    run.began_s, enough_s = now_s, now_s + SLICE_S
                error = await self.awaited([entry.message], entry.message, span)
                if cancelled():
                    run.stopped = True
                if error is None:
                    entry.finish()
                    segment.done += 1
                elif not _failed(segment, 1, error):
                    break

    async def _await_lists(self, run: OrderedRun) -> None:
        cancelled = cancelling()
        for segment in run.segments:
            if run.pending.dropped or self._lease.over or cancelled():
                return
            messages = [entry.message for entry in segment.entries]
            error = await self.awaited(messages, messages, self.span)
            if error is None:
                _list_done(segment)
            else:
                _failed(segment, len(messages), error)


def _failed(segment: Segment[Message], count: int, error: BaseException) -> bool:
    """The callback raised for the next `count` messages; tells whether those behind may go on.

    What it did nevertheless is done: in order, what lies in front of the first that it did not do.
    """
    begin, past = segment.done, segment.done + count
    tried = [entry.message for entry in segment.entries[begin:past]]
    failures = [replace(each, index=begin + each.index) for each in failures_of(error, tried)]
    if failures and not segment.free:
        del failures[1:]
        past = failures[0].index
    undone = {each.index + n for each in failures for n in range(each.count)}
    for index in range(begin, past):
        if index not in undone:
            segment.entries[index].finish()
    segment.failures += failures
    segment.done = past
    return past == begin + count


def _list_done(segment: Segment[Message]) -> None:
    for entry in segment.entries:
        entry.finish()
    segment.done = len(segment.entries)
