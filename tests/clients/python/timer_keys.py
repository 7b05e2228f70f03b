"""Timers under keys, with nothing but grpcio and what protoc made of protos/: copy it, with
dial.py, and begin.

    timer_keys.py NAMESERVER TOPIC

Schedules a message under a key, replaces it, gives it another due time and cancels it.
"""

import json
import secrets
import sys
import time
from zlib import crc32

from dial import dial

from duemq.v1 import message_pb2, nameserver_pb2, timer_pb2
from duemq.v1.nameserver_pb2_grpc import NameserverStub
from duemq.v1.timer_pb2_grpc import TimerStub

TIMEOUT_S = 20
KEY = "order-17"


def shard_of(nameserver: str, topic: str, key: str) -> TimerStub:
    """The shard that keeps a key: CRC-32 of topic, a zero byte and key, modulo the shards."""
    stub = NameserverStub(dial(nameserver))
    timers = stub.GetCluster(nameserver_pb2.GetClusterRequest(), timeout=TIMEOUT_S).timers
    shards = timers[0].key_shards or timers[0].shards
    number = crc32(f"{topic}\0{key}".encode()) % shards
    [address] = [each.address for each in timers if each.shard == number]
    return TimerStub(dial(address))


def request(topic: str, body: str, delay_ms: int, **more: bool) -> timer_pb2.ScheduleRequest:
    """With an id of its own: repeated after a lost answer it does nothing more."""
    now_ms = time.time_ns() // 1_000_000
    record = message_pb2.Record(message_id=body, body=body.encode(), timer_key=KEY, born_ms=now_ms)
    return timer_pb2.ScheduleRequest(
        request_id=secrets.token_bytes(16),
        topic=topic,
        queue_id=-1,
        records=message_pb2.RecordBatch(records=[record]),
        delays_ms=[delay_ms],
        **more,
    )


def main(nameserver: str, topic: str) -> None:
    """Ends with an error where an answer is not what it must be."""
    shard = shard_of(nameserver, topic, KEY)

    def schedule(asked: timer_pb2.ScheduleRequest) -> timer_pb2.ScheduleResult:
        return shard.Schedule(asked, timeout=TIMEOUT_S).results[0]

    asked = request(topic, "first", 3_600_000)
    first = schedule(asked)
    assert first.outcome == timer_pb2.SCHEDULED
    assert schedule(asked) == first
    second = schedule(request(topic, "second", 7_200_000))
    assert (second.outcome, second.replaced) == (timer_pb2.REPLACED, first.handle)
    refused = schedule(request(topic, "third", 5, if_absent=True))
    assert (refused.outcome, refused.handle) == (timer_pb2.EXISTS, second.handle)

    key = timer_pb2.TimerKey(topic=topic, key=KEY)
    reschedule = timer_pb2.RescheduleRequest(
        request_id=secrets.token_bytes(16), timers=[timer_pb2.TimerRef(key=key)], delays_ms=[60_000]
    )
    [moved] = shard.Reschedule(reschedule, timeout=TIMEOUT_S).results
    assert moved.outcome == timer_pb2.RESCHEDULED
    cancel = timer_pb2.CancelRequest(request_id=secrets.token_bytes(16), keys=[key])
    for _ in range(2):  # the second is a repeat
        assert shard.Cancel(cancel, timeout=TIMEOUT_S).results[0].outcome == timer_pb2.CANCELLED
    assert schedule(request(topic, "fourth", 100)).outcome == timer_pb2.SCHEDULED
    print(json.dumps({"ok": True}))


main(*sys.argv[1:])
