"""FetchFrames: whole frames of one queue, for those who keep or process all of it."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from duemq.errors import Overloaded
from duemq.protocol import checks, names
from duemq.protocol.limits import PULL_BYTES_MAX, PULL_WAIT_MS_MAX
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.pulls.disk_reads import DiskReads
from duemq_server.broker.edge.pulls.parking import Parked, Parking
from duemq_server.broker.reading import reader
from duemq_server.broker.reading.reader import Frames
from duemq_server.broker.store.changes import timer_queue_changes
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.serving.unsent import BudgetShare, Unsent

FRAMES_BYTES_DEFAULT = 4 << 20
LINGER_MS_MAX = 1_000


class Caller(Protocol):
    """Of one call: gRPC's context."""

    def peer(self) -> str:
        """Its connection."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        """To be called when the answer is gone, or the client."""


class FrameFetches:
    """Owned by: the event loop."""

    def __init__(
        self,
        store: Store,
        parking: Parking,
        disk: DiskReads,
        now_ms: Callable[[], int],
        store_id: int,
        unsent: Unsent,
    ) -> None:
        self._store = store
        self._parking = parking
        self._disk = disk
        self._now_ms = now_ms
        self._store_id = store_id
        self._unsent = unsent

    async def fetch(self, request: broker_pb2.FetchFramesRequest, caller: Caller) -> bytes:
        """Whole frames of one queue: the encoded FetchFramesResponse."""
        checks.between("wait_ms", request.wait_ms, 0, PULL_WAIT_MS_MAX)
        checks.between("max_bytes", request.max_bytes, 0, PULL_BYTES_MAX)
        checks.between("linger_ms", request.linger_ms, 0, LINGER_MS_MAX)
        deadline_ms = self._now_ms() + request.wait_ms
        bytes_max = request.max_bytes or FRAMES_BYTES_DEFAULT
        parked = Parked(peer=caller.peer())
        if request.linger_ms:
            await self._linger(parked, request)
        while True:
            queue = self._store.queue(request.topic, request.queue_id)
            end = queue.max_offset
            frames, share = await self._frames(queue, request.offset, bytes_max, parked.peer)
            if frames.slices or self._parking.is_over(request.wait_ms, deadline_ms):
                break
            if queue.max_offset > end:
                continue  # appended while a thread was reading
            await self._parking.park(parked, [queue.key], deadline_ms)
        if request.topic == names.TIMER_TOPIC:
            timer_queue_changes.note_fetched(self._store, request.queue_id, frames.next_offset)
        caller.add_done_callback(lambda _: share.give_back())
        return broker_pb2.FetchFramesResponse(
            store_id=self._store_id,
            frames=b"".join(frames.slices),
            next_offset=frames.next_offset,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
        ).SerializeToString()

    async def _linger(self, parked: Parked, request: broker_pb2.FetchFramesRequest) -> None:
        """Waits while more may come for the same answer, but not where it would be late.

        What is due at once and not durable yet is to be in this answer: behind it, it is late.
        Where too many wait, what is there is answered.
        """
        queue = self._store.queue(request.topic, request.queue_id)
        deadline_ms = self._now_ms() + request.linger_ms
        soon_end = 0  # as first seen: more may come for ever
        with suppress(Overloaded), self._parking.linger(parked, queue.key, request.offset):
            while not self._parking.is_over(1, deadline_ms):
                if not soon_end and queue.at_once_end > request.offset:
                    soon_end = queue.at_once_end
                if soon_end and queue.max_offset >= soon_end:
                    return
                await self._parking.park(parked, (), deadline_ms)

    async def _frames(
        self, queue: Queue, offset: int, bytes_max: int, peer: str
    ) -> tuple[Frames, BudgetShare]:
        """Frames and the share that they have of the unread answers; none: it is given back."""
        share = await self._unsent.take(peer, bytes_max)
        try:
            frames = await self._disk.read(
                partial(reader.read_frames, self._store.log, queue, offset, bytes_max),
                queue,
                offset,
            )
            if queue.topic == names.TIMER_TOPIC:  # by now: more may have come while it waited
                timer_queue_changes.check_fetch(self._store, queue.queue_id, offset)
        except BaseException:
            share.give_back()
            raise
        if frames.slices:
            share.resize(sum(map(len, frames.slices)))
        else:
            share.give_back()
        return frames, share
