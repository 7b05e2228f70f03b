"""A replica's copy of its group's log: who writes it, and what takes effect of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from duemq.errors import Corrupt
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.protocol.record import Record, Refused, with_formers
from duemq_server.replication.running.following.applying import Applying
from duemq_server.replication.running.following.log_writing import LogWriting
from duemq_server.replication.running.state import Arriving, ReplicaState
from duemq_server.storage.errors import DiskFull, UnknownVersion


class LogCopy:
    """Owned by Campaign; used from its event loop."""

    def __init__(self, state: ReplicaState) -> None:
        self.state = state
        self.epochs = Epochs(state.epochs)
        self.committed = state.committed
        """What is known to be."""
        self.on_epoch: Callable[[int], Awaitable[None]] = _nothing
        """Told when another epoch's EPOCH entry is committed."""
        self.formers: tuple[int, ...] = ()
        """Store ids that the group had, as they are known here."""
        self.keep_formers: Callable[[tuple[int, ...]], None] = lambda formers: None
        """Durably, in a thread.  Raises DiskFull, DiskFailed."""
        self.short_of_space: Callable[[], bool] = lambda: False
        """Whether this replica would accept nothing if it led."""
        self._told_epoch = self.epochs.last
        self._begin()

    def _begin(self) -> None:
        self.epochs.truncate(self.state.log.end_position)
        self.writing = LogWriting(self.state.log)
        self.applying = Applying(self.state)
        self.applying.advance(self.committed)
        self.work = [
            asyncio.create_task(self.applying.run(), name="apply"),
            asyncio.create_task(self.applying.keep(), name="checkpoint"),
        ]
        self.writing.start()

    async def end(self) -> None:
        """Writes no log and applies nothing any more."""
        await self.writing.stop()
        async with self.applying.lock:
            for task in self.work:
                task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)

    def check(self) -> None:
        """Raises StorageError, Internal when the disk or what it derives has failed."""
        for task in (*self.work, self.writing.failed):
            if task.done():
                task.result()

    async def tell_epoch(self) -> None:
        """See `on_epoch`."""
        begins = self.epochs.begins
        if not begins or begins[-1].epoch <= self._told_epoch:
            return
        if self.state.applied > begins[-1].start:  # it is committed: nobody truncates it
            with suppress(DiskFull):  # the next look tries again
                await self.on_epoch(begins[-1].epoch)
                self._told_epoch = begins[-1].epoch

    def former_to(self, record: Record) -> int | None:
        """Up to where a history has taken effect here that a decision has replaced, which accepted
        a loss; None: what is here is of the group's.

        Until that has nothing that the leader's has not, and takes the store id.  Raises Refused.
        """
        self.check_history(record)
        if self.state.store_id == record.store_id or not self._holds_any:
            return None
        return max(self.committed, self.state.known_to)

    @property
    def _holds_any(self) -> bool:
        """A log, or a snapshot of which none has come."""
        return max(self.state.log.end_position, self.state.known_to) > 0

    async def take_store_id(self, record: Record) -> None:
        """The group's; another one where an operator accepted a loss.

        Raises Refused, DiskFull, DiskFailed.
        """
        self.check_history(record)
        mine = self.formers if self._holds_any else ()
        formers = with_formers(mine, record.formers, record.store_id)
        if formers != self.formers:
            await asyncio.to_thread(self.keep_formers, formers)
            self.formers = formers
        if self.state.store_id != record.store_id:
            await self.applying.alone(self.state.rename, record.store_id)

    def check_history(self, record: Record) -> None:
        """Epochs of two groups may be the same: a log is the group's by its store id, or empty.

        Raises Refused.
        """
        state = self.state
        known = state.store_id in (record.store_id, *record.formers)
        if self._holds_any and not known:
            raise Refused(
                f"the log in {state.log.directory} is another one's (store {state.store_id:016x},"
                f" the group's is {record.store_id:016x}): start with an empty directory"
            )

    async def install(self, arriving: Arriving, log_start: int, store_id: int) -> None:
        """To its end, whoever leads meanwhile: what ends half-way needs a new start.

        `store_id`: of the group whose snapshot it is.  Raises StreamBroken if the snapshot is of no
        use, or has no space.
        """
        await self.end()
        try:
            await asyncio.to_thread(arriving.install, log_start)
        except (ValueError, Corrupt, UnknownVersion, StreamBroken) as error:
            await asyncio.to_thread(arriving.close)
            self._begin()  # for nothing has changed
            if isinstance(error, StreamBroken):
                raise
            raise StreamBroken(f"the leader's snapshot is of no use: {error}") from error
        await asyncio.to_thread(arriving.close)
        if self.state.store_id != store_id:
            await asyncio.to_thread(self.state.rename, store_id)
        self.committed = self.state.committed
        self.epochs = Epochs(self.state.epochs)
        self._begin()


async def _nothing(_: int) -> None:
    pass
