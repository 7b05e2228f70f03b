"""A member of a group in a process of its own that writes down all it does; see
`consumption_checker` for what it writes.

    python -m tests.cluster.recording_member FILE NAME '{"nameserver": …, "group": …, "topic": …,
        "brokers": {address: name}, "order": null | "key" | "queue", "member_name": null | …,
        "calls": "each" | "awaited" | "batched", "settings": {…}, "callback_s_max": …}'

The calls to brokers are recorded at the stubs, so that what is judged is what went over the wire.
An event is on file before what it tells of goes on: kill -9 takes none back.  SIGTERM closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from duemq import ConsumerSettings, Message, PushConsumer, RetryLater
from duemq.consumer.delivery import lease
from duemq.errors import FencedMember, Timeout, Unavailable
from duemq.transport import channel, status
from duemq.v1 import broker_pb2, error_pb2, stubs

STARTS_MAX = 5  # of 30 s each
LATER_S = 0.1  # every second failure asks for it

Call = Callable[..., Awaitable[Any]]
Clock = Callable[[], float]
Note = Callable[[Any, Any, str, dict[str, int]], None]


class Recorder:
    """Appends events to a file; from any thread."""

    def __init__(self, file: str, member: str) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._member = member

    def add(self, event: str, **fields: object) -> None:
        self.add_all(event, [fields])

    def add_all(self, event: str, rows: Iterable[dict[str, object]]) -> None:
        """In one write: a thousand take their time where others have the processor."""
        told = {"event": event, "member": self._member}
        os.write(self._file, "".join(json.dumps(told | row) + "\n" for row in rows).encode())

    def now(self, event: str, **fields: object) -> None:
        self.add(event, at=time.monotonic_ns(), **fields)


class Wire:
    """Records what a member and its brokers say to each other, at every stub."""

    def __init__(self, recorder: Recorder, brokers: dict[str, str]) -> None:
        """`brokers`: name by address."""
        self._recorder = recorder
        self._brokers = brokers
        self._names: dict[grpc.aio.Channel, str] = {}

    def install(self) -> None:
        connect = channel.connect
        make_broker = stubs.BrokerStub.__init__
        make_group = stubs.GroupCoordinatorStub.__init__
        notes = {
            "AcquireQueues": self._acquired,
            "CommitOffsets": self._committed,
            "SendBack": self._returned,
        }

        def connected(address: str, _tls: object = None) -> grpc.aio.Channel:
            made = connect(address)
            self._names[made] = self._brokers.get(address, "")
            return made

        def init_broker(stub: Any, to: Any) -> None:
            make_broker(stub, to)
            broker = self._names.get(to, "")
            for name, note in notes.items():
                setattr(stub, name, self._recorded(getattr(stub, name), note, broker))

        def init_group(stub: Any, to: Any) -> None:
            make_group(stub, to)
            join = stub.Join
            stub.Join = lambda *args, **options: Stream(join(*args, **options), self._recorder)

        channel.connect = connected
        stubs.BrokerStub.__init__ = init_broker  # type: ignore[method-assign]
        stubs.GroupCoordinatorStub.__init__ = init_group  # type: ignore[method-assign]

    def _recorded(self, call: Call, note: Note, broker: str) -> Call:
        async def recorded(request: Any, **options: Any) -> Any:
            sent_at = time.monotonic_ns()
            try:
                answer = await call(request, **options)
            except BaseException:  # a cancelled call may have arrived, too
                for commit in getattr(request, "commits", ()):
                    self._recorder.now("unsaved", queue=[commit.topic, broker, commit.queue_id])
                if isinstance(request, broker_pb2.SendBackRequest):
                    for message in request.messages:
                        self._kept(message, broker)
                raise
            note(request, answer, broker, {"sent_at": sent_at, "at": time.monotonic_ns()})
            return answer

        return recorded

    def _acquired(
        self,
        request: broker_pb2.AcquireQueuesRequest,
        answer: broker_pb2.AcquireQueuesResponse,
        broker: str,
        times: dict[str, int],
    ) -> None:
        for result in answer.queues:
            queue = [result.topic, broker, result.queue_id]
            if result.HasField("error"):
                self._refused(result.error)
                continue
            self._recorder.add(
                "acquired",
                queue=queue,
                generation=request.generation,
                offset=result.offset,
                settled=list(result.settled),
                **times,
            )

    def _committed(
        self,
        request: broker_pb2.CommitOffsetsRequest,
        answer: broker_pb2.CommitOffsetsResponse,
        broker: str,
        times: dict[str, int],
    ) -> None:
        for commit, result in zip(request.commits, answer.queues, strict=True):
            queue = [commit.topic, broker, commit.queue_id]
            if result.HasField("error"):
                self._refused(result.error)
                self._recorder.now("unsaved", queue=queue)
                continue
            self._recorder.add(
                "committed",
                queue=queue,
                generation=commit.generation,
                offset=commit.offset,
                **times,
            )

    def _returned(
        self,
        request: broker_pb2.SendBackRequest,
        answer: broker_pb2.SendBackResponse,
        broker: str,
        times: dict[str, int],
    ) -> None:
        for message, result in zip(request.messages, answer.results, strict=True):
            if result.HasField("error"):
                self._refused(result.error)
                self._kept(message, broker)
                continue
            self._recorder.add(
                "returned",
                queue=[message.topic, broker, message.queue_id],
                offset=message.offset,
                dead_letter=result.dead_letter,
                duplicate=result.duplicate,
                **times,
            )

    def _kept(self, message: broker_pb2.FailedMessage, broker: str) -> None:
        queue = [message.topic, broker, message.queue_id]
        self._recorder.now("kept", queue=queue, offset=message.offset)

    def _refused(self, error: error_pb2.Error) -> None:
        if error.code == error_pb2.FENCED_MEMBER:
            self._recorder.now("fenced", error=error.message)


class Stream:
    """A Join stream whose assignments and errors are recorded."""

    def __init__(self, stream: Any, recorder: Recorder) -> None:
        self._stream = stream
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self) -> Any:
        try:
            event = await self._stream.read()
        except grpc.RpcError as error:
            if isinstance(status.from_rpc_error(error, ""), FencedMember):
                self._recorder.now("fenced", error=str(error))
            raise
        kind = event.WhichOneof("event") if event is not grpc.aio.EOF else None
        if kind == "assignment":
            queues = [[q.topic, q.broker, q.queue_id] for q in event.assignment.queues]
            self._recorder.now("assigned", generation=event.assignment.generation, queues=queues)
        elif kind == "error" and event.error.code == error_pb2.FENCED_MEMBER:
            self._recorder.now("fenced", error=event.error.message)
        return event


class Looks:
    """When each thread looked at the lease's clock last, as it does before each callback."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def install(self) -> None:
        make = lease.Lease.__init__

        def made(self_: lease.Lease, lease_s: float, clock: Clock = lease.since_boot) -> None:
            make(self_, lease_s, lambda: self._look(clock))

        lease.Lease.__init__ = made  # type: ignore[method-assign]

    def _look(self, clock: Clock) -> float:
        self._of_thread.at = time.monotonic_ns()  # before the clock: it lies earlier, if at all
        return clock()

    def last(self) -> dict[str, int]:
        return {"worker": threading.get_ident(), "looked_at": getattr(self._of_thread, "at", 0)}


class Callback:
    """Does what a message's body says: fails so many times, then takes its time and succeeds."""

    def __init__(self, recorder: Recorder, looks: Looks, plan: dict[str, Any]) -> None:
        self._recorder = recorder
        self._looks = looks
        self._ordered = plan["order"] is not None
        self._callback_s_max = plan["callback_s_max"]
        self._failed: Counter[str] = Counter()

    def each(self, message: Message) -> None:
        """For threads."""
        told, place = self._begin(message)
        time.sleep(self._takes_s(message, told))
        self._end(message, told, place)

    async def awaited(self, message: Message) -> None:
        """The same for tasks."""
        told, place = self._begin(message)
        await asyncio.sleep(self._takes_s(message, told))
        self._end(message, told, place)

    def batched(self, messages: list[Message]) -> None:
        """The same for lists: when one fails, all do."""
        at = time.monotonic_ns()  # the callback's, which the timeout is of
        begun = [self._begin(message, at) for message in messages]
        time.sleep(
            max(self._takes_s(m, told) for m, (told, _) in zip(messages, begun, strict=True))
        )
        failed = any(
            m.deliveries < told["failures"] for m, (told, _) in zip(messages, begun, strict=True)
        )
        at = time.monotonic_ns()
        ended = [{"at": at, "ok": not failed, **place} for _, place in begun]
        self._recorder.add_all("ended", ended)
        if failed:
            raise Planned("one of them")

    def _begin(self, message: Message, at: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        told = json.loads(message.body)
        queue = [message.stored_topic, message.broker, message.queue]
        place = {"id": told["id"], "queue": queue, "offset": message.offset}
        at = at or time.monotonic_ns()
        attempt = message.deliveries
        self._recorder.add("started", at=at, attempt=attempt, **self._looks.last(), **place)
        return told, place

    def _takes_s(self, message: Message, told: dict[str, Any]) -> float:
        slow_s: float = 0.0 if message.deliveries else told["takes_s"]
        return slow_s or random.uniform(0, self._callback_s_max)

    def _end(self, message: Message, told: dict[str, Any], place: dict[str, Any]) -> None:
        # In order a message is tried again in place; else its attempts count on.
        id = told["id"]
        before = self._failed[id] if self._ordered else message.deliveries
        ok = before >= told["failures"]
        self._failed[id] += not ok
        self._recorder.now("ended", ok=ok, **place)
        if not ok:
            what = f"failure {before + 1} of {told['failures']}"
            raise RetryLater(LATER_S, what) if before % 2 else Planned(what)


class Planned(Exception):
    """The failure that a message's body asks for."""


def _follow_parent() -> None:
    """Ends with the test, however that ends: it holds the other end of standard input."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    threading.Thread(target=_follow_parent, daemon=True).start()
    file, member, text = sys.argv[1:]
    plan = json.loads(text)
    recorder = Recorder(file, member)
    Wire(recorder, plan["brokers"]).install()
    logging.basicConfig(format=f"%(asctime)s {member} %(levelname)s %(name)s %(message)s")
    looks = Looks()
    looks.install()
    callback = Callback(recorder, looks, plan)

    def made() -> PushConsumer:
        return PushConsumer(
            plan["group"],
            plan["topic"],
            getattr(callback, plan["calls"]),
            batch=plan["calls"] == "batched",
            nameserver=plan["nameserver"],
            settings=ConsumerSettings(**plan["settings"]),
            order=plan["order"],
            member_name=plan["member_name"],
        )

    consumer = started(made, stop)
    if consumer is not None:
        stop.wait()
        consumer.close()
    recorder.now("closed")


def started(made: Callable[[], PushConsumer], stop: threading.Event) -> PushConsumer | None:
    """One that has joined; None: it was told to end before.

    Brokers may be away for longer than a start waits.  Who comes meanwhile comes again, as it
    would be started again; the last time it fails.
    """
    for left in reversed(range(STARTS_MAX)):
        consumer = made()
        try:
            consumer.start()
        except (Timeout, Unavailable):
            if not left and not stop.is_set():
                raise
        else:
            return consumer
        if stop.is_set():
            break
    return None


if __name__ == "__main__":
    main()
