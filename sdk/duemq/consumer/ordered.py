"""Ordered consumption: one message of a queue, or of an ordering key, at a time.

    pulled ──► Lanes (pure: what may run next) ──take──► OrderedRun ──► a worker ──ended──► Lanes
                  ▲                                                                │ failed
                  └── suspended: after suspend_s, or as RetryLater says ◄──────────┤
                  └── passed: as a dead letter ◄── send_back ◄── too often ────────┘

A hand-over to a worker and back costs about as much as a hundred trivial callbacks, so a worker
gets many messages at once: of one queue, or of many keys.  It comes back after SLICE_S, so that a
queue of slow messages does not keep a thread from the others.  When it hangs in one message, the
loop takes back what does not wait for that one.

No callback starts once the queue is dropped, or while the lease (lease.py) is over.  A queue that
is dropped and taken over again starts only when the callbacks of its last time here have ended.

Owned by the consumer's event loop; OrderedCaller runs in the workers.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any

from duemq import tracing
from duemq.balance import MessageQueue
from duemq.consumer.dispatching import Progressed, Settler, Spawn
from duemq.consumer.fetcher import Source
from duemq.consumer.lanes import Entry, Failure, Lane, Lanes, Segment
from duemq.consumer.lease import Lease
from duemq.consumer.outcomes import NotTaken, Outcome, outcome_of
from duemq.consumer.settings import ConsumerSettings, Order
from duemq.consumer.workers import Callback, Pool, TaskWorkers, ThreadWorkers, is_async
from duemq.message import Message
from duemq.process_queue import ProcessQueue

log = logging.getLogger(__name__)

# Of pulled messages that are counted together for the commit point.
CHUNK_MESSAGES = 128
# What a worker takes at once: about RUN_S of callback time, and of a whole queue as much as may be.
RUN_S = 0.001
RUN_MESSAGES_MAX = 256
RUN_KEYED_MESSAGES_MAX = 64
# A worker begins no further message of a run after this time.
SLICE_S = 0.01
# Who is still at it then hangs in one message; looked for this often.
HANG_S = 0.02
CALLBACK_S_MIN = 1e-7
SMOOTHING = 0.2


class OrderedRun:
    """What a worker does in one go."""

    __slots__ = ("began_s", "current", "flow", "running", "seconds", "segments", "stopped")

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
    def queue(self) -> ProcessQueue[Message]:
        """Where its messages come from."""
        return self.flow.source.pending


class Flow:
    """A queue for as long as it is ours without a break."""

    __slots__ = ("lanes", "quiet", "runs", "sending", "source", "timer", "wake_ms")

    def __init__(self, source: Source, lanes: Lanes[Message]) -> None:
        self.source = source
        self.lanes = lanes
        self.runs: set[OrderedRun] = set()
        """With the workers, or on the way there."""
        self.sending = 0
        """Dead letters on their way."""
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


class OrderedDispatcher:
    """dispatching.Dispatcher in order."""

    def __init__(
        self,
        callback: Callback,
        *,
        order: Order | None,
        batch: bool,
        settings: ConsumerSettings,
        settler: Settler,
        lease: Lease,
        progressed: Progressed,
        spawn: Spawn,
        group: str = "",
        client_id: str = "",
    ) -> None:
        """`order` None: any order, but failures are tried again in place all the same."""
        self._order = order
        self._batch = batch
        self._settings = settings
        self._settler = settler
        self._lease = lease
        self._progressed = progressed
        self._spawn = spawn
        self._group = group
        self._loop = asyncio.get_running_loop()
        caller = OrderedCaller(callback, lease, batch=batch, group=group, client_id=client_id)
        pool = TaskWorkers[OrderedRun] if is_async(callback) else ThreadWorkers[OrderedRun]
        self._workers: Pool[OrderedRun] = pool(caller, settings.threads, self._ended)
        # By queue, the oldest first: only that one runs.
        self._flows: defaultdict[MessageQueue, list[Flow]] = defaultdict(list)
        self._callback_s = RUN_S  # mean time of a callback, geometric; at first: one a run
        self._watch: asyncio.TimerHandle | None = None
        self._said_over = False
        lease.on_renewed(self._renewed)

    def start(self) -> None:
        """Starts the workers."""
        self._workers.start()

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers after what they are doing; what they have not begun stays undone."""
        if self._watch is not None:
            self._watch.cancel()
        for flow in [flow for flows in self._flows.values() for flow in flows]:
            flow.cancel_timer()
        await self._workers.stop(timeout_s)

    def in_callback(self) -> bool:
        """Tells whether the caller is one of the workers."""
        return self._workers.inside()

    def dispatch(
        self, source: Source, messages: Sequence[Message], next_offset: int, size_bytes: int
    ) -> None:
        """Takes messages of one queue over: each is processed when its turn comes."""
        flow, count = self._flow(source), len(messages)
        for first in range(0, count, CHUNK_MESSAGES):
            part = messages[first : first + CHUNK_MESSAGES]
            past = first + len(part)
            upto = next_offset if past == count else messages[past].offset
            flow.lanes.add(source.pending.add(part, upto, size_bytes * len(part) // count))
        self._feed(flow)

    async def quiet(self, source: Source) -> None:
        """Returns when no callback and no send-back of a dropped queue is under way."""
        flows = self._flows.get(source.queue, ())
        flow = next((each for each in flows if each.source is source), None)
        while flow is not None and (flow.busy or flow.sending):
            flow.quiet.clear()
            await flow.quiet.wait()

    # --- what runs next -----------------------------------------------------------------------

    def _flow(self, source: Source) -> Flow:
        flows = self._flows[source.queue]
        for flow in flows:
            if flow.source is source:
                return flow
        flow = Flow(source, Lanes(_KEYS[self._order], lists=self._batch))
        flows.append(flow)
        return flow

    def _feed(self, flow: Flow) -> None:
        """Gives the workers what may run."""
        if not self._may_run(flow):
            return
        now_ms = self._now_ms()
        limit = self._run_messages()
        while segments := flow.lanes.take(now_ms, limit):
            run = OrderedRun(flow, segments)
            flow.runs.add(run)
            self._workers.submit(run)
            if self._watch is None and (len(segments) > 1 or segments[0].lane is None):
                self._watch = self._loop.call_later(HANG_S, self._look)
        self._set_timer(flow, now_ms)

    def _look(self) -> None:
        """Frees what waits in a run behind a message that takes long, and need not follow it."""
        self._watch = None
        flows = [flow for flows in self._flows.values() for flow in flows if flow.runs]
        now_s = self._lease.clock()
        for flow in flows:
            hanging = [run for run in flow.runs if not run.stopped and now_s - run.began_s > HANG_S]
            for run in hanging:
                run.stopped = True  # before the look at `current`
                run.segments = flow.lanes.take_back(run.segments, run.current)
            if hanging:
                self._feed(flow)
        if flows and self._watch is None:
            self._watch = self._loop.call_later(HANG_S, self._look)

    def _may_run(self, flow: Flow) -> bool:
        flows = self._flows[flow.source.queue]
        while flows and flows[0].source.pending.dropped and not flows[0].busy:
            flows.pop(0).cancel_timer()
        if not flows:
            del self._flows[flow.source.queue]
        if not flows or flows[0] is not flow or flow.source.pending.dropped:
            return False
        if not self._lease.over:
            return True
        if not self._said_over:
            self._said_over = True
            log.warning(
                "group %s: its coordinator is silent: nothing is started before it was heard again",
                self._group,
            )
        return False

    def _renewed(self) -> None:
        self._said_over = False
        self._feed_all()

    def _feed_all(self) -> None:
        for flow in [flow for flows in self._flows.values() for flow in flows]:
            self._feed(flow)

    def _run_messages(self) -> int:
        if self._batch:
            return self._settings.batch_messages_max
        if self._order == "queue":
            return RUN_MESSAGES_MAX  # nobody else could do them meanwhile
        return max(1, min(RUN_KEYED_MESSAGES_MAX, int(RUN_S / self._callback_s)))

    def _set_timer(self, flow: Flow, now_ms: int) -> None:
        wake_ms = flow.lanes.wake_ms
        if wake_ms == flow.wake_ms:
            return
        flow.cancel_timer()
        if wake_ms is not None:
            flow.wake_ms = wake_ms
            flow.timer = self._loop.call_later((wake_ms - now_ms) / 1000, self._wake, flow)

    def _wake(self, flow: Flow) -> None:
        flow.cancel_timer()
        self._feed(flow)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # --- what became of it --------------------------------------------------------------------

    def _ended(self, run: OrderedRun) -> None:
        flow = run.flow
        flow.runs.discard(run)
        flow.quiet.set()
        if flow.source.pending.dropped:
            for follower in tuple(self._flows.get(flow.source.queue, ())):
                self._feed(follower)
            return
        self._learn(run)
        for failure in flow.lanes.ended(run.segments):
            self._judge(flow, failure)
        self._settle(flow, [entry for segment in run.segments for entry in segment.entries])
        self._feed(flow)

    def _settle(self, flow: Flow, entries: Sequence[Entry[Message]]) -> None:
        pending = flow.source.pending
        for chunk in {entry.chunk for entry in entries}:
            pending.settle(chunk)
        self._progressed(flow.source)

    def _learn(self, run: OrderedRun) -> None:
        done = sum(segment.done + len(segment.failures) for segment in run.segments)
        if done and not self._batch:
            mean_s = max(run.seconds / done, CALLBACK_S_MIN)
            self._callback_s *= (mean_s / self._callback_s) ** SMOOTHING

    def _judge(self, flow: Flow, failure: Failure[Message]) -> None:
        lane, error = failure
        if isinstance(error, NotTaken):
            return  # nor is what waits behind it: the consumer is about to close
        outcome = outcome_of(error)
        if outcome.dead_letter or lane.failures > self._settings.retries_in_order_max:
            self._log_failure(lane, error, "given up")
            self._spawn(self._give_up(flow, lane, outcome))
            return
        wait_s = self._settings.suspend_s
        if outcome.delay_ms is not None:
            wait_s = outcome.delay_ms / 1000
        self._log_failure(lane, error, f"again in {wait_s:g} s")
        for entry in lane.first:
            entry.message.again()
        self._suspend(flow, lane, wait_s)

    def _suspend(self, flow: Flow, lane: Lane[Message], wait_s: float) -> None:
        flow.lanes.suspend(lane, self._now_ms() + round(wait_s * 1000))

    async def _give_up(self, flow: Flow, lane: Lane[Message], outcome: Outcome) -> None:
        """What failed too often leaves the queue, and the lane goes on behind it."""
        dead = Outcome(outcome.error, dead_letter=True)
        first = lane.first
        flow.sending += 1
        try:
            taken = await asyncio.gather(
                *(
                    self._settler.send_back(
                        flow.source, entry.message, dead, entry.message.attempt + 1
                    )
                    for entry in first
                )
            )
        finally:
            flow.sending -= 1
            flow.quiet.set()
        if gone := [entry for entry, stored in zip(first, taken, strict=True) if stored]:
            flow.lanes.pass_first(lane, gone)
        if flow.source.pending.dropped:
            return
        if len(gone) < len(first):
            self._suspend(flow, lane, self._settings.suspend_s)
        self._settle(flow, first)
        self._feed(flow)

    def _log_failure(self, lane: Lane[Message], error: BaseException, what: str) -> None:
        message = lane.waiting[0].message
        log.warning(
            "the callback failed for %s at %s/%s/%d offset %d, attempt %d; %s: %r",
            f"message {message.message_id}" if not self._batch else f"{lane.together} messages",
            message.topic,
            message.broker,
            message.queue,
            message.offset,
            lane.failures,
            what,
            error,
            exc_info=error if lane.failures == 1 else None,
        )


class OrderedCaller:
    """Calls the callback with a run's messages, one after the other, and traces it."""

    def __init__(
        self, callback: Callback, lease: Lease, *, batch: bool, group: str, client_id: str
    ) -> None:
        self._callback = callback
        self._lease = lease
        self._batch = batch
        self._group = group
        self._client_id = client_id

    def call(self, run: OrderedRun) -> None:
        """For threads."""
        began_s = time.monotonic()
        try:
            if self._batch:
                self._call_lists(run)
            else:
                self._call_each(run)
        finally:
            run.seconds = time.monotonic() - began_s

    def _call_each(self, run: OrderedRun) -> None:
        callback, lease, queue = self._callback, self._lease, run.queue
        clock, span = lease.clock, self._span if tracing.enabled() else None
        enough_s = inf
        for index, segment in enumerate(run.segments):
            run.current = index
            for entry in segment.entries:
                now_s = clock()
                if run.stopped or queue.dropped or now_s >= lease.until_s or now_s > enough_s:
                    return
                if enough_s == inf:
                    run.began_s, enough_s = now_s, now_s + SLICE_S
                try:
                    if span is None:
                        callback(entry.message)
                    else:
                        with span([entry.message]):
                            callback(entry.message)
                except BaseException as error:
                    if not _failed(segment, error):
                        break
                else:
                    entry.finish()
                    segment.done += 1

    def _call_lists(self, run: OrderedRun) -> None:
        for segment in run.segments:
            if run.queue.dropped or self._lease.over:
                return
            messages = [entry.message for entry in segment.entries]
            try:
                with self._span(messages):
                    self._callback(messages)
            except BaseException as error:
                _list_failed(segment, error)
            else:
                _list_done(segment)

    async def call_async(self, run: OrderedRun) -> None:
        """For tasks: the same, awaiting each call."""
        began_s = time.monotonic()
        try:
            if self._batch:
                await self._await_lists(run)
            else:
                await self._await_each(run)
        finally:
            run.seconds = time.monotonic() - began_s

    async def _await_each(self, run: OrderedRun) -> None:
        lease, queue = self._lease, run.queue
        enough_s = inf
        for index, segment in enumerate(run.segments):
            run.current = index
            for entry in segment.entries:
                now_s = lease.clock()
                if run.stopped or queue.dropped or now_s >= lease.until_s or now_s > enough_s:
                    return
                if enough_s == inf:
                    run.began_s, enough_s = now_s, now_s + SLICE_S
                error = await self._await([entry.message], entry.message)
                if error is None:
                    entry.finish()
                    segment.done += 1
                elif not _failed(segment, error):
                    break

    async def _await_lists(self, run: OrderedRun) -> None:
        for segment in run.segments:
            if run.queue.dropped or self._lease.over:
                return
            messages = [entry.message for entry in segment.entries]
            error = await self._await(messages, messages)
            if error is None:
                _list_done(segment)
            else:
                _list_failed(segment, error)

    async def _await(self, messages: Sequence[Message], argument: Any) -> BaseException | None:
        """Answers what the callback raised.  Raises CancelledError if this task is cancelled."""
        try:
            with self._span(messages):
                await self._callback(argument)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            return error
        except Exception as error:
            return error
        return None

    def _span(self, messages: Sequence[Message]) -> Any:
        return tracing.process(messages, group=self._group, client_id=self._client_id)


def _failed(segment: Segment[Message], error: BaseException) -> bool:
    """The next message of a segment failed; tells whether those behind it may go on."""
    segment.failures.append((segment.done, error))
    if segment.lane is not None:
        return False
    segment.done += 1
    return True


def _list_done(segment: Segment[Message]) -> None:
    for entry in segment.entries:
        entry.finish()
    segment.done = len(segment.entries)


def _list_failed(segment: Segment[Message], error: BaseException) -> None:
    segment.failures.append((0, error))
    if segment.lane is None:
        segment.done = len(segment.entries)


def _whole_queue(message: Message) -> Hashable:
    return True


def _by_key(message: Message) -> Hashable | None:
    return message.ordering_key


def _free(message: Message) -> None:
    return None


_KEYS: dict[Order | None, Callable[[Message], Hashable | None]] = {
    "queue": _whole_queue,
    "key": _by_key,
    None: _free,
}
