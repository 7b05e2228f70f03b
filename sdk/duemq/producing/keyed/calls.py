"""One client's requests about timers under keys, on their way to timer shards.

Each has a random id, and is repeated under it until its deadline, wherever its shard is by then:
the shard does it once.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial

from duemq.errors import Closed, DuemqError, Internal, Timeout, TopicNotFound, Unavailable
from duemq.producing.keyed.lanes import C, Lanes, ShardCall
from duemq.producing.turns import Turns
from duemq.protocol.timer_keys import REPEAT_S, REQUEST_ID_BYTES
from duemq.transport import retrying, status
from duemq.transport.cluster_client import Client
from duemq.v1 import stubs


class TimerCalls:
    """Made and run in one event loop; gathers from any thread."""

    def __init__(self, client: Client) -> None:
        self.lock = threading.Lock()  # guards lanes, and what their waiting requests gather
        self.lanes = Lanes()
        self.client = client
        self.timeout_s = client.settings.request_timeout_s
        """Of a question, repetitions included."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._turns = Turns()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def shards(self) -> int:
        """How many timer keys are divided over; 0: none was seen yet."""
        return self.client.routes.key_shards

    async def ready(self, timeout_s: float) -> int:
        """Waits until it is known how many shards there are.  Raises Unavailable, Closed."""
        if self._closed:
            raise Closed("the client is closed")
        if not self.shards or self._turns.waiting:
            try:
                async with asyncio.timeout(timeout_s), self._turns:
                    await self.client.wait_for(lambda routes: routes.key_shards > 0, timeout_s)
            except (Timeout, TimeoutError):
                raise no_shard() from None
        return self.shards

    def gather(
        self, way: Hashable, timer: Hashable, now: float, begin: Callable[[], C]
    ) -> tuple[C, bool]:
        """As of Lanes.  With the lock held.  Raises Closed: nobody would send it any more."""
        if self._closed:
            raise Closed("the client is closed")
        return self.lanes.gather(way, timer, now, begin)

    def start(self) -> None:
        """In the event loop that it is to run in."""
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Has `run` called soon.  From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.run)

    def run(self) -> None:
        """Something may have changed: sends what can be sent now."""
        with self.lock:
            taken = [] if self._closed else self.lanes.take()
        for call in taken:
            task = asyncio.get_running_loop().create_task(self._run(call), name="timer call")
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: ShardCall, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not call.done:  # a task that ends before its first step does nothing
            _give_up(call)

    async def _run(self, call: ShardCall) -> None:
        asked = False
        try:
            if call.deadline <= time.monotonic():  # others were in front of it
                raise Timeout("the timer shard did not answer what was asked before")
            request_id = secrets.token_bytes(REQUEST_ID_BYTES)
            # Longer than a shard remembers a request it must not be repeated.
            deadline = min(call.deadline, time.monotonic() + REPEAT_S)

            async def attempt(left_s: float) -> None:
                nonlocal asked
                await call.prepare(left_s)
                shard = self.client.timer_shard(call.shard)
                stub = stubs.TimerStub(self.client.channel(shard.address))
                asked = True
                left_s = max(0.001, deadline - time.monotonic())
                sent = getattr(stub, call.method)(call.request(request_id), timeout=left_s)
                try:
                    answer = await status.answer(sent, shard.address)
                except TopicNotFound as error:
                    error.retryable = True  # it was deleted: `prepare` waits for it, or makes it
                    raise
                call.answered(shard.name, answer)

            away_s = self.client.settings.away_timeout_s
            await retrying.until(deadline, attempt, away_s)
        except asyncio.CancelledError:
            call.failed(Closed("the client was closed before the answer"), asked=asked)
            raise
        except Exception as error:
            cause = (
                error if isinstance(error, DuemqError) else Internal(f"{call.method}: {error!r}")
            )
            call.failed(cause, asked=asked)
        finally:
            call.done = True
            with self.lock:
                self.lanes.ended(call)
            self.run()

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was asked before is answered.  Raises Timeout."""
        with self.lock:
            asked = self.lanes.open()
        self.run()  # behind that: of what others ask meanwhile none may be under way
        deadline = time.monotonic() + timeout_s
        while left := [call for call in asked if not call.done]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Timeout(f"{len(left)} requests not answered within {timeout_s} s")
            await asyncio.wait(
                list(self._tasks), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )

    async def close(self) -> None:
        """What is not answered fails with Closed."""
        with self.lock:
            self._closed = True
            given_up = self.lanes.give_up()
        for call in given_up:
            _give_up(call)
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _give_up(call: ShardCall) -> None:
    call.failed(Closed("the client was closed before it was sent"), asked=False)
    call.done = True


def no_shard() -> Unavailable:
    """Nobody keeps messages under keys."""
    return Unavailable(
        "the nameservers know no timer shard: nobody keeps messages under timer keys",
        field="timer_key",
    )
