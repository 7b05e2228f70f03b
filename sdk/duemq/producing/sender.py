"""Runs the pump: streams to brokers, topics to be found, one timer.  Owned by the event loop.

Whenever something happens the pump is told, and runs; what it then says is carried out here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from duemq.errors import Closed, DuemqError, Internal, Timeout
from duemq.producing.batch import Batch
from duemq.producing.broker_link import Link
from duemq.producing.losses import Losses
from duemq.producing.outbox import Outbox, Target
from duemq.producing.pumping.in_flight import Answer, Frame
from duemq.producing.pumping.pump import NEVER, Pump, PumpStep
from duemq.producing.receipt import until_done
from duemq.protocol.names import check_sent_to
from duemq.settings import ProducerSettings
from duemq.tracing import meters, spans
from duemq.transport import status
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff

# After a broker refused for a reason of its own (overloaded, read-only).
REFUSED_S_MIN = 0.05
REFUSED_S_MAX = 2.0


class Sender:
    """One producer's."""

    def __init__(
        self, client: Client, settings: ProducerSettings, outbox: Outbox, losses: Losses
    ) -> None:
        def waits() -> Backoff:
            return Backoff(REFUSED_S_MIN, REFUSED_S_MAX)

        self.pump = Pump(secrets.randbits(63), settings, outbox, client.routes, waits)
        self._client = client
        self._outbox = outbox
        self._losses = losses
        self._links: dict[str, Link] = {}
        self._finding: set[asyncio.Task[None]] = set()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER
        self._loop = asyncio.get_running_loop()
        client.on_routes_changed(self._routes_changed)

    # ── topics ───────────────────────────────────────────────────────────────────────

    async def open_target(self, topic: str, timeout_s: float = 0) -> Target:
        """Finds the topic, made if need be, and connects to its brokers.

        Raises TopicNotFound, InvalidArgument, PermissionDenied, Unavailable, Closed.
        """
        check_sent_to(topic)  # before it is made
        settings = self.pump.settings
        timeout_s = timeout_s or settings.send_timeout_s
        await self._client.topic_route(topic, create=settings.create_topics, timeout_s=timeout_s)
        if self._closed:
            raise Closed("the producer is closed")
        target = self.pump.targets.get(topic)
        if target is None:
            target = self.pump.found(topic, _now_ms(), traced=spans.traced(topic))
            self.run()
        for broker in self.pump.brokers_of(topic):
            self._link(broker).want()
        return target

    def early_target(self, topic: str) -> Target:
        """For a topic that is not found yet: its messages wait until it is, or fail as it does.

        Raises InvalidArgument, PermissionDenied for what no topic can be.
        """
        check_sent_to(topic)
        target = self.pump.sought(topic)
        if target is None:
            target = self.pump.seek(topic, traced=spans.traced(topic))
            task = self._loop.create_task(self._find(topic), name=f"find {topic}")
            self._finding.add(task)
            task.add_done_callback(self._finding.discard)
        return target

    async def _find(self, topic: str) -> None:
        try:
            await self.open_target(topic)
        except Exception as error:
            cause = error if isinstance(error, DuemqError) else Internal(f"{topic!r}: {error!r}")
            self.pump.not_found(topic, cause)
            self.run()

    def _routes_changed(self) -> None:
        self.pump.routes_changed()
        for link in self._links.values():
            link.hurry()
        self.run()

    # ── the pump runs ────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Something may have changed: sends what can be sent now."""
        self._run(_now_ms())

    def _run(self, now_ms: float) -> None:
        if not self._closed:
            self._carry_out(self.pump.run(now_ms))

    def _carry_out(self, step: PumpStep) -> None:
        for broker in step.want:
            self._link(broker).want()
        for broker, error in step.resets:
            self._links[broker].reset(error)
        for broker, frame in step.frames:
            self._links[broker].put(frame)
        if step.next_ms < self._timer_ms:
            self._wake_at(step.next_ms)
        # At the end: who is woken may submit, and so come back here.
        for batch in step.done:
            self._tell(batch, self._client.address_of(batch.broker))

    def _wake_at(self, when_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = when_ms
        self._timer = self._loop.call_at(when_ms / 1000, self._woken)

    def _woken(self) -> None:
        # The loop's clock may be a little early.
        now_ms = max(_now_ms(), self._timer_ms)
        self._timer_ms = NEVER
        self._run(now_ms)

    def _link(self, broker: str) -> Link:
        link = self._links.get(broker)
        if link is None:
            link = self._links[broker] = Link(self._client, broker, self)
        return link

    def settled(self, batch: Batch) -> None:
        """A timer shard answered it, or it was given up.  Some of its messages may be refused."""
        timers = self._client.routes.timers
        self._tell(batch, next((each.address for each in timers if each.name == batch.broker), ""))

    def _tell(self, batch: Batch, server: str) -> None:
        if meters.enabled():
            seconds = time.time() - batch.begun_ms / 1000
            failed = len(batch.errors) or (batch.count if batch.error is not None else 0)
            for count, error in ((batch.count - failed, None), (failed, batch.error)):
                if count:
                    meters.sent(batch.topic, count, seconds, error, server)
        batch.wake(server)
        if batch.error is not None:
            self._losses.add(batch, batch.error)

    # ── what links tell (broker_link.LinkOwner) ────────────────────────────────────────

    def came_up(self, link: Link) -> list[Frame]:
        """Answers what is to be sent first."""
        return self.pump.came_up(link.broker)

    def answered(self, link: Link, answer: Any) -> None:
        """Raises Internal if the answer fits nothing that was sent, or is another broker's."""
        if answer.broker not in ("", link.broker):  # it has the address by now
            raise Internal(f"broker {answer.broker} is where {link.broker} was")
        results = [
            status.from_proto(each.error) if each.HasField("error") else each
            for each in answer.results
        ]
        told = Answer(answer.request_id, answer.broker, answer.store_id, results)
        now_ms = _now_ms()
        self.pump.answered(link.broker, told, now_ms)
        self._run(now_ms)

    def broken(self, link: Link, error: DuemqError) -> None:
        """The stream broke or did not come up."""
        now_ms = _now_ms()
        self.pump.broke(link.broker, error, now_ms)
        self._run(now_ms)

    def idle(self, link: Link) -> bool:
        """Nothing of what was sent is without an answer."""
        return self.pump.to(link.broker).idle

    # ── life ─────────────────────────────────────────────────────────────────────────

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was accepted before is answered, one way or the other.

        Raises Timeout.
        """
        self.run()
        pending = self.pump.unanswered()
        try:
            async with asyncio.timeout(timeout_s):
                for batch in pending:
                    await until_done(batch)
        except TimeoutError:
            left = sum(batch.count for batch in pending if not batch.done)
            raise Timeout(f"{left} messages not answered within {timeout_s} s") from None

    async def close(self) -> None:
        """Ends all links; what is not done fails with Closed."""
        self._outbox.close()
        self._closed = True
        self._client.off_routes_changed(self._routes_changed)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._finding:
            task.cancel()
        try:
            await asyncio.gather(*(link.close() for link in self._links.values()))
        finally:  # cancelled or not: somebody may wait for ever
            self._carry_out(self.pump.close(_now_ms()))


def _now_ms() -> float:
    return time.monotonic() * 1000
