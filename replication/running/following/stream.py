"""A follower's stream: the shell around the core (replication/protocol/follower.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from duemq.errors import InvalidArgument
from duemq.settings import Tls
from duemq.transport import channel
from duemq_server.replication.protocol.follower import Extend, Follower, StreamBroken
from duemq_server.replication.protocol.messages import (
    ANOTHER_LEADER,
    NeedsSnapshot,
    Refusal,
    Welcome,
)
from duemq_server.replication.protocol.record import Refused
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import wire
from duemq_server.replication.running.following.applying import Applying
from duemq_server.replication.running.following.log_writing import LogWriting
from duemq_server.replication.running.threads import in_thread
from duemq_server.replication.running.v1 import stubs
from duemq_server.storage.errors import CorruptLog, LogFull
from duemq_server.storage.replicas.replica_log import ReplicaLog


class Following:
    """One stream.  Used from one event loop."""

    def __init__(
        self,
        follower: Follower,
        log: ReplicaLog,
        writing: LogWriting,
        applying: Applying,
        times: Times,
        own_address: str,
        on_heard: Callable[[], None],
        on_asked: Callable[[], None],
        on_agreed: Callable[[], Awaitable[None]],
        short_of_space: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_heard`: something came from the leader.  `on_asked`: the leader hands over.
        `on_agreed`: the log here has nothing any more that the leader's has not."""
        self._short_of_space = short_of_space
        self._follower = follower
        self._log = log
        self._writing = writing
        self._applying = applying
        self._silence_s = times.silent_ms / 1000
        self._own_address = own_address
        self._on_heard = on_heard
        self._on_asked = on_asked
        self._on_agreed = on_agreed
        self._news = asyncio.Event()  # something is to be answered
        self.followed = False
        """Something of what the leader sends was taken: else the next stream ends as soon."""

    async def run(self, address: str, tls: Tls | None = None) -> None:
        """Follows until a snapshot is needed.  Raises StreamBroken, Refused, StorageError."""
        answers: asyncio.Task[None] | None = None
        async with channel.connect(address, tls) as connection:
            call: Any = stubs.ReplicationStub(connection).Follow()
            try:
                greeting = await self._greet(call)
                if self._follower.needs_snapshot(greeting):
                    return
                assert isinstance(greeting, Welcome)
                await self._compare(greeting)
                truncate_to = self._follower.welcome(greeting)
                if truncate_to is not None:
                    await self._writing.truncate(truncate_to)
                    self._follower.truncated(truncate_to)
                await self._on_agreed()
                self._writing.on_durable = self._synced
                self._synced(self._log.durable_position)
                answers = asyncio.create_task(self._answer(call), name="answers to the leader")
                await self._take_while(call, answers)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise StreamBroken(f"the leader at {address}: {_told(error)}") from error
            except (InvalidArgument, LogFull) as error:
                raise StreamBroken(str(error)) from error
            except TimeoutError as error:
                raise StreamBroken(f"the leader at {address} is silent") from error
            finally:
                self._writing.on_durable = lambda position: None
                call.cancel()
                if answers is not None:
                    answers.cancel()
                    await asyncio.gather(answers, return_exceptions=True)

    async def _take_while(self, call: Any, answers: asyncio.Task[None]) -> None:
        """Takes what comes; raises what ends the answers, without which it is of no use."""
        taken = asyncio.create_task(self._take(call), name="what the leader sends")
        try:
            await asyncio.wait((taken, answers), return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                answers.result()
            await taken
        finally:
            taken.cancel()
            await asyncio.gather(taken, return_exceptions=True)

    async def _greet(self, call: Any) -> Welcome | NeedsSnapshot:
        async with asyncio.timeout(self._silence_s):  # connecting, too
            await call.write(wire.to_hello(self._follower.hello(), self._own_address))
        greeting = wire.greeting(await self._read(call))
        if isinstance(greeting, Refusal):
            raise StreamBroken(f"{greeting.reason.name}: {greeting.text}")
        return greeting

    async def _compare(self, welcome: Welcome) -> None:
        """Raises Refused if something else wrote to this log, in an epoch that both have.

        What is not written yet came from a leader.
        """
        common, held = welcome.common, self._log
        if common is None or common.end > held.written_position:
            return
        try:
            own = await in_thread(held.checksum, common.start, common.end)
        except (IndexError, OSError, CorruptLog) as error:  # IndexError: it is dropped just now
            raise StreamBroken(f"what both logs have cannot be read here: {error}") from error
        if own != common.crc32c:
            raise Refused(
                f"the log in {held.directory} is not {welcome.leader}'s: it should be up to"
                f" {common.end}, and is another one somewhere behind {common.start}; something else"
                " wrote to it, or it is damaged: start with an empty directory, and it gets"
                " everything anew; if that is said of all who follow, the leader's log is damaged:"
                f" {ANOTHER_LEADER}"
            )

    async def _read(self, call: Any) -> Any:
        async with asyncio.timeout(self._silence_s):
            message = await call.read()
        if message is grpc.aio.EOF:
            raise StreamBroken("the leader ended the stream")
        return message

    async def _take(self, call: Any) -> None:
        follower = self._follower
        while True:
            chunk = wire.chunk(await self._read(call))
            self._on_heard()
            extend = follower.chunk(chunk)
            if extend is not None:
                self._extend(extend)
            else:
                self._news.set()
            self.followed = True
            self._applying.advance(follower.applicable, chunk.log_start)
            if follower.asked_to_lead:
                self._on_asked()

    def _extend(self, extend: Extend) -> None:
        """Raises LogFull, StorageError: then it is sent again on another stream."""
        try:
            self._log.extend(extend.position, [extend.data])
        except BaseException:
            self._follower.not_taken(extend)
            raise

    def _synced(self, position: int) -> None:
        self._follower.synced(position)
        self._applying.advance(self._follower.applicable)
        self._news.set()

    async def _answer(self, call: Any) -> None:
        follower, log = self._follower, self._log
        while True:
            await self._news.wait()
            self._news.clear()
            if log.catching_up and follower.covers_claims:
                # What came while the thread began may claim more than is durable here yet.
                with suppress(ValueError):
                    await asyncio.to_thread(log.caught_up)
                if log.catching_up and follower.covers_claims:
                    continue  # an answer could admit it: when that is durable
            follower.short_of_space = self._short_of_space()
            answer = follower.answer()
            if answer is not None:
                await call.write(wire.to_answer(answer))


def _told(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error)
