"""A DueMQ consumer with nothing but grpcio and what protoc made of protos/: copy it, with
dial.py, and begin.

    consumer.py NAMESERVER GROUP TOPIC COUNT [earliest]

It reads every queue of a topic by hand (no membership: run one process a group), goes on where the
group has committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest`
begins at the beginning instead.  A message whose body is "fail" is sent back the first time and
comes again, a second later, through the group's own topic %RETRY%GROUP.

Make the stubs with: python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. \
    protos/duemq/v1/*.proto
"""

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
from dial import dial
from google.protobuf.message import Message

from duemq.v1 import broker_pb2, error_pb2, message_pb2, nameserver_pb2
from duemq.v1.broker_pb2_grpc import BrokerStub
from duemq.v1.nameserver_pb2_grpc import NameserverStub

WAIT_MS = 15_000  # how long a broker may park a pull that finds nothing; at most 30,000
TURN_MS = 500  # the same where pulls take turns
# In a pull at most; a topic may have so many on a broker, and there is %RETRY%.
PULL_QUEUES = 1_024
TIMEOUT_S = 20  # of a call: longer than WAIT_MS
ROUTE_S = 5  # how often to ask for brokers, addresses and queues that are new
RETRY_DELAY_MS = 1_000
BACKOFF_S = 0.5
# The topic was deleted, and perhaps made anew: what is known of its queues is over.
GONE = {error_pb2.TOPIC_NOT_FOUND, error_pb2.TOPIC_REPLACED}


def process(record: message_pb2.Record) -> None:
    """The application: raises when it cannot do with a message."""
    if record.body == b"fail" and record.attempt == 0:
        raise ValueError("this body fails once")
    shown = {"body": record.body.decode(), "tag": record.tag, "attempt": record.attempt}
    sys.stdout.write(json.dumps(shown) + "\n")  # in one piece: loops run side by side
    sys.stdout.flush()


@dataclass
class Position:
    """Where the group stands in a queue."""

    topic: str
    queue_id: int
    topic_id: int  # tells the topic from a later one of its name; said with each offset
    next: int = 0
    committed: int = 0
    processed: int = 0  # since the last commit
    settled: set[int] = field(default_factory=set)  # sent back earlier: to be skipped


class BrokerLoop(threading.Thread):
    """Consumes all queues that one broker has of the topic."""

    def __init__(
        self,
        route: nameserver_pb2.BrokerQueues,
        group: str,
        topic: str,
        *,
        earliest: bool,
        done: "Countdown",
    ):
        super().__init__(daemon=True)
        self.route = route  # `main` replaces it
        self.group, self.topic, self.earliest, self.done = group, topic, earliest, done
        self.retries = f"%RETRY%{group}"
        self.followed: nameserver_pb2.BrokerQueues | None = None  # None: look for queues
        self.address, self.channel = "", None
        self.meant: tuple[tuple[str, str], ...] = ()  # said with each call: whom it is for
        self.positions: dict[tuple[str, int], Position] = {}

    def run(self) -> None:
        while True:
            try:
                self.follow(self.route)
                self.commit_rest()
                self.pull()
            except Refused as error:
                self.done.end(str(error))
                return
            except grpc.RpcError as error:  # the call as a whole failed
                refusal = refusal_of(error)
                if refusal and not refusal.retryable and refusal.code not in GONE:
                    self.done.end(describe(error))
                    return
                print(describe(error), file=sys.stderr)
                # Everything here may be repeated: pulls and commits change nothing twice.
                time.sleep(BACKOFF_S)

    def follow(self, route: nameserver_pb2.BrokerQueues) -> None:
        """Does what is new in a route: an address where another replica leads, more queues.

        Another broker that has the address by now refuses every call, and the next route tells
        where this one is.
        """
        if route == self.followed:
            return
        self.meant = (("duemq-store-id", str(route.store_id)),) if route.store_id else ()
        if route.address != self.address:
            if self.channel is not None:
                self.channel.close()
            self.channel = dial(route.address)
            self.broker, self.address = BrokerStub(self.channel), route.address
        self.assign()
        self.followed = route

    def call(self, method: grpc.UnaryUnaryMultiCallable, request: Message) -> Any:
        return method(request, timeout=TIMEOUT_S, metadata=self.meant)

    def assign(self) -> None:
        """Begins in queues that are new: where the group has committed, or at the beginning."""
        request = broker_pb2.GetOffsetsRequest(group=self.group, topic=self.topic)
        for found in self.call(self.broker.GetOffsets, request).queues:
            self.begin(found, earliest=self.earliest)
        request = broker_pb2.GetOffsetsRequest(group=self.group)
        for found in self.call(self.broker.GetOffsets, request).queues:
            # This broker's queue of %RETRY% is there once a message was sent back.
            if found.topic == self.retries:
                self.begin(found)

    def begin(self, found: broker_pb2.OffsetResult, *, earliest: bool = False) -> None:
        at = Position(found.topic, found.queue_id, found.topic_id)
        if not earliest:
            at.next, at.settled = max(found.offset, 0), set(found.settled)
            at.committed = at.next
        self.positions.setdefault((found.topic, found.queue_id), at)

    def drop(self, at: Position) -> None:
        """Begins there again, if the topic was made anew."""
        del self.positions[at.topic, at.queue_id]
        self.followed = None

    def pull(self) -> None:
        """Polls all queues once: in one long poll, or in several that take turns where they are
        too many for one."""
        positions = list(self.positions.values())
        wait_ms = TURN_MS if len(positions) > PULL_QUEUES else WAIT_MS
        for first in range(0, len(positions), PULL_QUEUES):
            self.poll(positions[first : first + PULL_QUEUES], wait_ms)

    def poll(self, positions: list[Position], wait_ms: int) -> None:
        """One long poll, and what it brought: processed, then committed."""
        request = broker_pb2.PullRequest(group=self.group, wait_ms=wait_ms)
        for at in positions:
            request.queues.add(
                topic=at.topic, queue_id=at.queue_id, offset=at.next, topic_id=at.topic_id
            )
        for pulled in self.call(self.broker.Pull, request).queues:
            at = self.positions[pulled.topic, pulled.queue_id]
            try:
                if pulled.HasField("error"):  # one queue's: the others are fine
                    self.refused(at, pulled)
                    continue
                at.processed += self.consume(at, pulled)
                at.next = pulled.next_offset
                self.commit(at)
            except Gone:
                self.drop(at)

    def consume(self, at: Position, pulled: broker_pb2.QueueRecords) -> int:
        """Processes the records of one queue; what fails is sent back before it is committed."""
        runs = zip(pulled.run_offsets, pulled.run_counts, strict=True)
        offsets = [first + step for first, count in runs for step in range(count)]
        processed = 0
        for record, offset in zip(pulled.records.records, offsets, strict=True):
            if offset in at.settled:
                continue
            try:
                process(record)
                processed += 1
            except Exception as error:
                self.send_back(at, offset, str(error))
        return processed

    def send_back(self, at: Position, offset: int, why: str) -> None:
        """Gives a failed message back: stored for later and settled in one step.  Idempotent."""
        request = broker_pb2.SendBackRequest(group=self.group)
        request.messages.add(
            topic=at.topic,
            queue_id=at.queue_id,
            topic_id=at.topic_id,
            offset=offset,
            error=why,
            delay_ms=RETRY_DELAY_MS,
        )
        while True:
            (result,) = self.call(self.broker.SendBack, request).results
            if not result.HasField("error"):
                break
            again(f"{at.topic}/{at.queue_id} at {offset} was not taken back", result.error)
        if (self.retries, 0) not in self.positions:
            self.followed = None  # there is such a queue now

    def commit_rest(self) -> None:
        """Where a commit failed as a whole: nothing new may come there that brings another."""
        for at in list(self.positions.values()):
            try:
                self.commit(at)
            except Gone:
                self.drop(at)

    def commit(self, at: Position) -> None:
        """Stores how far the group is: the next offset to consume."""
        if at.committed == at.next:
            return
        request = broker_pb2.CommitOffsetsRequest(group=self.group)
        request.commits.add(
            topic=at.topic, queue_id=at.queue_id, topic_id=at.topic_id, offset=at.next
        )
        while True:
            (result,) = self.call(self.broker.CommitOffsets, request).queues
            if not result.HasField("error"):
                break
            again(f"{at.topic}/{at.queue_id} was not committed", result.error)
        at.committed = at.next
        self.done.count(at.processed)
        at.processed = 0

    def refused(self, at: Position, pulled: broker_pb2.QueueRecords) -> None:
        if pulled.error.code == error_pb2.OFFSET_OUT_OF_RANGE:  # deleted by age, or beyond the end
            at.next = max(pulled.min_offset, min(at.next, pulled.max_offset))
        else:
            again(f"{at.topic}/{at.queue_id}", pulled.error)


class Refused(Exception):
    """A broker refuses for good; the same request would be refused again."""


class Gone(Exception):
    """This topic is no more; another one may have its name."""


def again(what: str, error: error_pb2.Error) -> None:
    """Returns, a moment later, where the same request can succeed now; else raises."""
    if error.code in GONE:
        raise Gone
    if not error.retryable:
        raise Refused(f"{what}: {error_pb2.ErrorCode.Name(error.code)}: {error.message}")
    print(f"{what}: {error.message}", file=sys.stderr)
    time.sleep(BACKOFF_S)


class Countdown:
    """Tells `main` when enough messages were processed and committed, or why it is over."""

    def __init__(self, left: int):
        self.left, self.lock, self.ended = left, threading.Lock(), threading.Event()
        self.why: str | None = None

    def count(self, processed: int) -> None:
        with self.lock:
            self.left -= processed
            if self.left <= 0:
                self.ended.set()

    def end(self, why: str) -> None:
        self.why = why
        self.ended.set()


def describe(error: grpc.RpcError) -> str:
    refusal = refusal_of(error)
    if refusal is None:
        return f"{error.code().name}: {error.details()}"
    return f"{error_pb2.ErrorCode.Name(refusal.code)}: {refusal.message}"


def refusal_of(error: grpc.RpcError) -> error_pb2.Error | None:
    """What a server says of a call that failed; None where the failure is gRPC's own."""
    details = dict(error.trailing_metadata() or ()).get("duemq-error-bin")
    return None if details is None else error_pb2.Error.FromString(details)


def main() -> None:
    nameserver, group, topic, count = sys.argv[1:5]
    earliest = sys.argv[5:] == ["earliest"]
    names = NameserverStub(dial(nameserver))
    request = nameserver_pb2.GetRouteRequest(topic=topic)
    done = Countdown(int(count))
    loops: dict[str, BrokerLoop] = {}  # by broker
    while not done.ended.wait(ROUTE_S if loops else 0):
        try:
            brokers = names.GetRoute(request, timeout=TIMEOUT_S).brokers
        except grpc.RpcError as error:
            if not loops:
                raise SystemExit(describe(error)) from error
            continue  # with what is known
        for route in brokers:
            if route.broker in loops:
                loops[route.broker].route = route
                continue
            loop = BrokerLoop(route, group, topic, earliest=earliest, done=done)
            loops[route.broker] = loop
            loop.start()
    sys.exit(done.why)


if __name__ == "__main__":
    main()
