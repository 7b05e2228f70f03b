"""Whom a replica follows: a stream after the other, and a snapshot where its log ends too early."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Protocol

from duemq.errors import DuemqError
from duemq.settings import Tls
from duemq.transport.retrying import Backoff
from duemq_server.replication.protocol.follower import Follower, StreamBroken
from duemq_server.replication.protocol.record import Record, Refused, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import snapshots
from duemq_server.replication.running.following.log_copy import LogCopy
from duemq_server.replication.running.following.stream import Following
from duemq_server.replication.running.threads import in_thread
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.errors import DiskFailed, DiskFull, StorageError

log = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
"""Between two streams to one leader."""


class Candidate(Protocol):
    """Who follows, and is told of it."""

    def note(self, role: str, reason: str) -> None:
        """Its role, and the reason for it."""
        ...

    def heard(self) -> None:
        """Something came from the leader."""
        ...

    def asked(self) -> None:
        """The leader hands over."""
        ...

    def left(self, *, followed: bool) -> None:
        """A stream ended; `followed`: it had been of use."""
        ...


class Streams:
    """Owned by Campaign; used from its event loop."""

    def __init__(
        self,
        me: ReplicaId,
        copy: LogCopy,
        times: Times,
        address: str,
        candidate: Candidate,
        tls: Tls | None,
    ) -> None:
        """`address`: where others reach this replica."""
        self._tls = tls
        self.installing: asyncio.Task[None] | None = None
        """A snapshot takes the place of the log and of what it derives."""
        self.retry_ms = 0
        """No stream begins before."""
        self._me = me
        self._copy = copy
        self._times = times
        self._address = address
        self._candidate = candidate
        self._stream: asyncio.Task[None] | None = None
        self._follower: Follower | None = None
        self._backoff = Backoff(RETRY_S_MIN, RETRY_S_MAX)
        self._failed = ""  # why it could not be followed, as it was told

    async def follow(self, record: Record) -> None:
        """Has a stream to whom the record names, unless the last one ended just now.

        Raises Refused.
        """
        if self._stream is not None:
            followed = self._follower.record if self._follower is not None else record
            if (followed.epoch, followed.leader) != (record.epoch, record.leader):
                await self.leave()
            elif not self._stream.done():
                return
        if steady_ms() >= self.retry_ms:
            await self._begin(record)

    async def _begin(self, record: Record) -> None:
        copy, held = self._copy, self._copy.state.log
        former_to = copy.former_to(record)
        if former_to is None:
            await copy.take_store_id(record)
        self._follower = follower = Follower(
            self._me,
            record,
            copy.epochs,
            start=held.start_position,
            end=held.end_position,
            durable=held.durable_position,
            committed=copy.committed,
            former_to=former_to,
        )
        following = Following(
            follower,
            held,
            copy.writing,
            copy.applying,
            self._times,
            self._address,
            on_heard=self._heard,
            on_asked=self._candidate.asked,
            on_agreed=partial(copy.take_store_id, record),
            short_of_space=copy.short_of_space,
        )
        work = self._run(following, follower, record.address)
        self._stream = asyncio.create_task(work, name=f"following {record.leader}")

    async def _run(self, following: Following, follower: Follower, address: str) -> None:
        try:
            await self._followed(following, follower, address)
            await self._install(address, follower.record)
        except (StreamBroken, Refused, DiskFull) as error:  # DiskFull: it may take more later
            self._candidate.note("joining", str(error))
        except DiskFailed as error:  # as where a write meets it: only a start finds what is left
            self._copy.writing.fail(error)
            self._candidate.note("joining", f"the disk failed: {error}")
        except (StorageError, DuemqError, OSError, ValueError) as error:  # OSError: of a read
            text = f"{type(error).__name__}: {error}"
            if text != self._failed:  # it is tried each second
                log.exception("it cannot be followed")
            self._failed = text
            self._candidate.note("joining", text)
        finally:
            if following.followed:
                self._backoff.reset()
            self.retry_ms = steady_ms() + round(self._backoff.next_s() * 1000)
            self._candidate.left(followed=following.followed)

    async def _followed(self, following: Following, follower: Follower, address: str) -> None:
        """Until a snapshot is needed."""
        try:
            await following.run(address, self._tls)
        finally:  # before a snapshot: after an accepted loss that may hold less
            self._note_committed(follower)

    def _note_committed(self, follower: Follower) -> None:
        self._copy.committed = max(self._copy.committed, follower.committed)

    async def _install(self, address: str, record: Record) -> None:
        text = f"it takes a snapshot: {record.leader} cannot go on with the log here"
        self._candidate.note("learner", text)
        arriving = await in_thread(self._copy.state.receive)
        try:
            log_start = await snapshots.fetch(address, record, self._me.name, arriving, self._tls)
        except BaseException:
            await in_thread(arriving.close)
            raise
        work = self._copy.install(arriving, log_start, record.store_id)
        self.installing = asyncio.create_task(work, name="installing a snapshot")
        await asyncio.shield(self.installing)

    def installed(self) -> bool:
        """Whether log and tables may be used: no snapshot takes their place now.

        Raises StorageError, Internal as what installed it.
        """
        if self.installing is not None:
            if not self.installing.done():
                return False
            with suppress(StreamBroken):  # another one is fetched
                self.installing.result()
            self.installing = None
        return True

    def _heard(self) -> None:
        if self._follower is not None:
            self._note_committed(self._follower)
        self._candidate.heard()

    async def leave(self) -> None:
        """Answers nobody any more."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.gather(self._stream, return_exceptions=True)
            self._stream = None
        if self.installing is not None:
            await asyncio.wait((self.installing,))
