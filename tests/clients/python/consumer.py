"""A DueMQ consumer with nothing but grpcio and what protoc made of protos/: copy it and begin.

    consumer.py NAMESERVER GROUP TOPIC COUNT [earliest]

It reads every queue of a topic by hand (no membership: run one process a group), goes on where the
group has committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest`
seeks to the beginning first.  A message whose body is "fail" is sent back the first time and comes
again, a second later, through the group's own topic %RETRY%GROUP.

Make the stubs with: python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. \
    protos/duemq/v1/*.proto
"""

import json
import sys
import threading
import time
from collections.abc import Iterable

import grpc

from duemq.v1 import broker_pb2, error_pb2, message_pb2, nameserver_pb2
from duemq.v1.broker_pb2_grpc import BrokerStub
from duemq.v1.nameserver_pb2_grpc import NameserverStub

WAIT_MS = 15_000  # how long a broker may park a pull that finds nothing; at most 30,000
TIMEOUT_S = 20  # of a call: longer than WAIT_MS
RETRY_DELAY_MS = 1_000
BACKOFF_S = 0.5
OPTIONS = [("grpc.max_receive_message_length", 16 << 20)]  # a pull answers up to 8 MiB


def process(record: message_pb2.Record) -> None:
    """The application: raises when it cannot do with a message."""
    if record.body == b"fail" and record.attempt == 0:
        raise ValueError("this body fails once")
    shown = {"body": record.body.decode(), "tag": record.tag, "attempt": record.attempt}
    sys.stdout.write(json.dumps(shown) + "\n")  # in one piece: loops run side by side
    sys.stdout.flush()


class BrokerLoop(threading.Thread):
    """Consumes all queues that one broker has of the topic: one long poll for all of them."""

    def __init__(
        self, part: nameserver_pb2.BrokerQueues, group: str, topic: str, done: "Countdown"
    ):
        super().__init__(daemon=True)
        self.broker = BrokerStub(grpc.insecure_channel(part.address, OPTIONS))
        self.group, self.topic, self.queues, self.done = group, topic, part.queues, done
        self.earliest = False
        self.next: dict[tuple[str, int], int] = {}  # (topic, queue): the offset to pull next
        self.settled: dict[tuple[str, int], set[int]] = {}  # sent back earlier: to be skipped

    def run(self) -> None:
        while True:
            try:
                if not self.next:
                    self.assign()
                self.pull()
            except Refused as error:
                self.done.end(str(error))
                return
            except grpc.RpcError as error:  # the call as a whole failed
                print(describe(error), file=sys.stderr)
                # Everything here may be repeated: pulls and commits change nothing twice.
                time.sleep(BACKOFF_S)

    def assign(self) -> None:
        """Begins where the group has committed; a queue without an offset at the beginning."""
        request = broker_pb2.GetOffsetsRequest(group=self.group)
        known = self.broker.GetOffsets(request, timeout=TIMEOUT_S).queues
        for queue in range(self.queues):
            self.seek((self.topic, queue), 0)
        for found in known:
            # This broker's queue of %RETRY% is there once a message was sent back.
            again = found.topic == f"%RETRY%{self.group}"
            if again or (found.topic == self.topic and not self.earliest):
                self.seek((found.topic, found.queue_id), max(found.offset, 0), found.settled)

    def seek(self, name: tuple[str, int], offset: int, settled: Iterable[int] = ()) -> None:
        """Goes on there; commit to make it last."""
        self.next[name] = offset
        self.settled[name] = set(settled)

    def pull(self) -> None:
        """One long poll, and what it brought: processed, then committed."""
        request = broker_pb2.PullRequest(group=self.group, wait_ms=WAIT_MS)
        for (topic, queue), offset in self.next.items():
            request.queues.add(topic=topic, queue_id=queue, offset=offset)
        for pulled in self.broker.Pull(request, timeout=TIMEOUT_S).queues:
            name = (pulled.topic, pulled.queue_id)
            if pulled.HasField("error"):  # one queue's: the others are fine
                self.refused(name, pulled)
                continue
            processed = self.consume(name, pulled)
            self.next[name] = pulled.next_offset
            self.commit(name)
            self.done.count(processed)

    def consume(self, name: tuple[str, int], pulled: broker_pb2.QueueRecords) -> int:
        """Processes the records of one queue; what fails is sent back before it is committed."""
        runs = zip(pulled.run_offsets, pulled.run_counts, strict=True)
        offsets = [first + step for first, count in runs for step in range(count)]
        processed = 0
        for record, offset in zip(pulled.records.records, offsets, strict=True):
            if offset in self.settled[name]:
                continue
            try:
                process(record)
                processed += 1
            except Exception as error:
                self.send_back(name, offset, str(error))
        return processed

    def send_back(self, name: tuple[str, int], offset: int, why: str) -> None:
        """Gives a failed message back: stored for later and settled in one step.  Idempotent."""
        failed = broker_pb2.FailedMessage(
            topic=name[0], queue_id=name[1], offset=offset, error=why, delay_ms=RETRY_DELAY_MS
        )
        request = broker_pb2.SendBackRequest(group=self.group, messages=[failed])
        (result,) = self.broker.SendBack(request, timeout=TIMEOUT_S).results
        if result.HasField("error"):
            raise Refused(f"{name} offset {offset} was not taken back: {result.error.message}")
        if (f"%RETRY%{self.group}", 0) not in self.next:
            self.seek((f"%RETRY%{self.group}", 0), 0)

    def commit(self, name: tuple[str, int]) -> None:
        """Stores how far the group is: the next offset to consume."""
        request = broker_pb2.CommitOffsetsRequest(group=self.group)
        request.commits.add(topic=name[0], queue_id=name[1], offset=self.next[name])
        (result,) = self.broker.CommitOffsets(request, timeout=TIMEOUT_S).queues
        if result.HasField("error"):
            print(f"{name} not committed: {result.error.message}", file=sys.stderr)

    def refused(self, name: tuple[str, int], pulled: broker_pb2.QueueRecords) -> None:
        """An error in band.  `retryable` says whether the same request can succeed later."""
        error = pulled.error
        if error.code == error_pb2.OFFSET_OUT_OF_RANGE:  # deleted by age, or beyond the end
            self.seek(name, max(pulled.min_offset, min(self.next[name], pulled.max_offset)))
        elif error.retryable:
            time.sleep(BACKOFF_S)
        else:
            raise Refused(f"{name}: {error_pb2.ErrorCode.Name(error.code)}: {error.message}")


class Refused(Exception):
    """A broker refuses for good; the same request would be refused again."""


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
    """What a failed call says: the trailer `duemq-error-bin` holds the whole Error."""
    details = dict(error.trailing_metadata() or ()).get("duemq-error-bin")
    if details is None:
        return f"{error.code().name}: {error.details()}"
    found = error_pb2.Error.FromString(details)
    return f"{error_pb2.ErrorCode.Name(found.code)}: {found.message}"


def main() -> None:
    nameserver, group, topic, count = sys.argv[1:5]
    names = NameserverStub(grpc.insecure_channel(nameserver))
    try:
        route = names.GetRoute(nameserver_pb2.GetRouteRequest(topic=topic), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        raise SystemExit(describe(error)) from error
    done = Countdown(int(count))
    for part in route.brokers:
        loop = BrokerLoop(part, group, topic, done)
        loop.earliest = sys.argv[5:] == ["earliest"]
        loop.start()
    done.ended.wait()
    sys.exit(done.why)


if __name__ == "__main__":
    main()
