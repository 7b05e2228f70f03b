"""Consumption in place: what failed is tried again here, and what is behind it in its lane waits.

Lanes and runs: README.md, "In order".  Owned by the consumer's event loop.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Unpack

from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.order_lanes import (
    LaneEntry,
    LaneFailure,
    OrderLane,
    OrderLanes,
    Segment,
)
from duemq.consumer.delivery.ordered_runs import Flow, OrderedCaller, OrderedRun
from duemq.consumer.delivery.seams import Dispatcher, DispatchOptions
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.settings import Order
from duemq.message import Message
from duemq.outcomes import NotTaken, Outcome, outcome_of
from duemq.protocol.balance import MessageQueue

log = logging.getLogger(__name__)

LaneOf = Order | Literal["message"]

# Of pulled messages that are counted together for the commit point.
CHUNK_MESSAGES = 128
# What a worker takes at once: about RUN_S of callback time, and of a whole queue as much as may be.
RUN_S = 0.001
RUN_MESSAGES_MAX = 256
RUN_KEYED_MESSAGES_MAX = 64
# Who is at a run for so long hangs in one message; looked for this often.
HANG_S = 0.02
CALLBACK_S_MIN = 1e-7
SMOOTHING = 0.2


class InPlaceDispatcher(Dispatcher[OrderedRun]):
    """Tries again in place."""

    def __init__(
        self, callback: Callback, *, lanes: LaneOf, lease: Lease, **calling: Unpack[DispatchOptions]
    ) -> None:
        """`lanes`: what waits for one another; of "message" nothing does."""
        self._lanes = lanes
        self._lease = lease
        super().__init__(callback, **calling)
        # By queue, the oldest first: only that one runs.
        self._flows: defaultdict[MessageQueue, list[Flow]] = defaultdict(list)
        self._sending: Counter[Flow] = Counter()  # dead letters on their way
        self._callback_s = RUN_S  # mean time of a callback, geometric; at first: one a run
        self._watch: asyncio.TimerHandle | None = None
        self._said_over = False
        lease.on_renewed(self._renewed)

    def _caller(self, callback: Callback, client_id: str) -> OrderedCaller:
        return OrderedCaller(
            callback, self._lease, batch=self._batch, group=self._group, client_id=client_id
        )

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers after what they are doing; what they have not begun stays undone."""
        if self._watch is not None:
            self._watch.cancel()
        for flow in [flow for flows in self._flows.values() for flow in flows]:
            flow.cancel_timer()
        await self._workers.stop(timeout_s)

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
        """Returns when none of the callbacks and send-backs of a dropped queue is under way."""
        for flow in (*self._flows.get(source.queue, ()), *self._sending):
            gone = flow.source.queue == source.queue and flow.source.pending.dropped
            while gone and (flow.busy or self._sending[flow]):
                flow.quiet.clear()
                await flow.quiet.wait()

    # --- what runs next -----------------------------------------------------------------------

    def _flow(self, source: Source) -> Flow:
        flows = self._flows[source.queue]
        for flow in flows:
            if flow.source is source:
                return flow
        flow = Flow(source, OrderLanes(_KEYS[self._lanes], lists=self._batch))
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
        """Frees what is in a run with a message that takes long, and need not follow it."""
        self._watch = None
        flows = [flow for flows in self._flows.values() for flow in flows if flow.runs]
        now_s = self._lease.clock()
        for flow in flows:
            hanging = [run for run in flow.runs if not run.stopped and now_s - run.began_s > HANG_S]
            for run in hanging:
                run.stopped = True  # before the look at `current`
                *past, hung = flow.lanes.take_back(run.segments, run.current)
                run.segments = [hung]
                if not flow.source.pending.dropped:
                    self._hear(flow, past)
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
        for flow in [flow for flows in self._flows.values() for flow in flows]:
            self._feed(flow)

    def _run_messages(self) -> int:
        if self._batch:
            return self._settings.batch_messages_max
        if self._lanes == "queue":
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
        self._hear(flow, run.segments)
        self._feed(flow)

    def _hear(self, flow: Flow, segments: list[Segment[Message]]) -> None:
        for failure in flow.lanes.ended(segments):
            self._judge(flow, failure)
        self._settle(flow, [entry for segment in segments for entry in segment.entries])

    def _settle(self, flow: Flow, entries: Sequence[LaneEntry[Message]]) -> None:
        pending = flow.source.pending
        for chunk in {entry.chunk for entry in entries}:
            pending.settle(chunk)
        self._progressed(flow.source)

    def _learn(self, run: OrderedRun) -> None:
        done = sum(segment.done + len(segment.failures) for segment in run.segments)
        if done and not self._batch:
            mean_s = max(run.seconds / done, CALLBACK_S_MIN)
            self._callback_s *= (mean_s / self._callback_s) ** SMOOTHING

    def _judge(self, flow: Flow, failure: LaneFailure[Message]) -> None:
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

    def _suspend(self, flow: Flow, lane: OrderLane[Message], wait_s: float) -> None:
        flow.lanes.suspend(lane, self._now_ms() + round(wait_s * 1000))

    async def _give_up(self, flow: Flow, lane: OrderLane[Message], outcome: Outcome) -> None:
        """What failed too often leaves the queue, and the lane goes on behind it."""
        dead = Outcome(outcome.error, dead_letter=True)
        first, pending = lane.first, flow.source.pending
        gone = await self._send_back(flow, first, dead)
        if len(gone) < len(first) and not pending.dropped:
            # The broker may have taken the rest, and not been able to say so.
            await asyncio.sleep(self._settings.suspend_s)
            if not pending.dropped:
                left = [entry for entry in first if entry not in gone]
                gone |= await self._send_back(flow, left, dead)
        if gone:
            flow.lanes.pass_first(lane, gone)
        if pending.dropped:
            return
        if len(gone) < len(first):
            self._suspend(flow, lane, 0.0)
        self._settle(flow, first)
        self._feed(flow)

    async def _send_back(
        self, flow: Flow, entries: Sequence[LaneEntry[Message]], outcome: Outcome
    ) -> set[LaneEntry[Message]]:
        """Answers what the broker has taken."""
        self._sending[flow] += 1
        try:
            taken = await asyncio.gather(
                *(
                    self._settler.send_back(
                        flow.source, entry.message, outcome, entry.message.attempt
                    )
                    for entry in entries
                )
            )
        finally:
            self._sending[flow] -= 1
            if not self._sending[flow]:
                del self._sending[flow]
            flow.quiet.set()
        return {entry for entry, is_taken in zip(entries, taken, strict=True) if is_taken}

    def _log_failure(self, lane: OrderLane[Message], error: BaseException, what: str) -> None:
        message = lane.waiting[0].message
        line = self._failure_log.line(error, time.monotonic())
        log.log(
            line.level,
            "the callback failed for %s at %s/%s/%d offset %d, attempt %d; %s: %r%s",
            f"message {message.message_id}" if lane.together == 1 else f"{lane.together} messages",
            message.topic,
            message.broker,
            message.queue,
            message.offset,
            lane.failures,
            what,
            error,
            line.more,
            exc_info=line.traceback,
        )


_KEYS: dict[LaneOf, Callable[[Message], Hashable | None]] = {
    "queue": lambda message: True,
    "key": lambda message: message.ordering_key,
    "message": lambda message: None,
}
