"""The commit log's entries that are not messages: changes of topics, offsets and groups.  Pure.

They lie between the frames, so a change is durable in its order with the messages and by the same
group commit.  What they say is also in the checkpoint; recovery applies those beyond it.  Bodies
are JSON, for they are few:

kind  body
 2    {"name": …, "id": …, "queues": …, "message_bytes_max": …}    the topic was made
 3    {"name": …}                                                  the topic was deleted
 4    {"group": …, "rows": [[topic, queue id, offset, generation], …]}  a group's progress
 5    a group's settings (group_configs.py)                        the group was put
 6    {"group": …}                                                 the group was deleted
 7    as 4                                  a group was moved, and has settled nothing there
 8    {"id", "name", "shard", "shards", "queues": […], "since_ms"}   a timer service claimed queues;
                              "key_shards", if timer keys are divided over another number; "begins"
                              [[queue id, offset], …], where queues of who was given up begin, or
                              [[-1, 0]] if it holds nothing and has no queues (EMPTY), and
                              [[-2, epoch]] in which the replica leads that claims (LED)
 9    {"id": …}                                                      its queues were released
10    {"group": …, "rows": [[topic, queue id, [offset, …]], …]}  done with, out of order
11    {"group": …, "kept": …}    what its coordinator keeps of a group, as text (group_snapshot.py);
                              null: it has the group no more.  In logs that have, or had, replicas
12    {"id": …, "ends": [[queue id, offset], …]}    it handed queues over, taken over so far
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.store import group_configs
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.topics import Topic

TOPIC_CREATED = 2
TOPIC_DELETED = 3
OFFSETS = 4
GROUP_PUT = 5
GROUP_DELETED = 6
OFFSETS_RESET = 7
TIMER_CLAIMED = 8
TIMER_RELEASED = 9
SETTLED = 10
MEMBERSHIP = 11
TIMER_HANDED_OVER = 12

EMPTY = (-1, 0)
"""In place of a queue that begins: the service holds no timers.

The release before refuses a claim with a field that it does not know; this it passes over.  So a
log with it can be followed by replicas of that release, and replayed by it.
"""
LED = -2
"""In place of a queue; then the epoch in which the claimant leads; 0: it has no replicas now."""


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def topic_created(topic: Topic) -> bytes:
    """Body of an entry of kind TOPIC_CREATED."""
    return _encode(asdict(topic))


def read_topic_created(body: memoryview) -> Topic:
    """The topic that was made."""
    return Topic(**json.loads(bytes(body)))


def topic_deleted(name: str) -> bytes:
    """Body of an entry of kind TOPIC_DELETED."""
    return _encode({"name": name})


def read_topic_deleted(body: memoryview) -> str:
    """The name of the topic that was deleted."""
    name: str = json.loads(bytes(body))["name"]
    return name


def offsets(group: str, changes: Iterable[tuple[GroupQueue, GroupOffset]]) -> bytes:
    """Body of an entry of kind OFFSETS or OFFSETS_RESET: changes of one group."""
    rows = [[key.topic, key.queue_id, *progress] for key, progress in changes]
    return _encode({"group": group, "rows": rows})


def read_offsets(body: memoryview) -> list[tuple[GroupQueue, GroupOffset]]:
    """The changes of one group."""
    entry = json.loads(bytes(body))
    return [
        (GroupQueue(entry["group"], topic, queue_id), GroupOffset(offset, generation))
        for topic, queue_id, offset, generation in entry["rows"]
    ]


def settled(key: GroupQueue, offsets: Iterable[int]) -> bytes:
    """Body of an entry of kind SETTLED."""
    return _encode({"group": key.group, "rows": [[key.topic, key.queue_id, list(offsets)]]})


def read_settled(body: memoryview) -> list[tuple[GroupQueue, list[int]]]:
    """What one group has done with."""
    entry = json.loads(bytes(body))
    return [
        (GroupQueue(entry["group"], topic, queue_id), offsets)
        for topic, queue_id, offsets in entry["rows"]
    ]


def group_put(config: GroupConfig) -> bytes:
    """Body of an entry of kind GROUP_PUT."""
    return _encode(group_configs.encode(config))


def read_group_put(body: memoryview) -> GroupConfig:
    """The group's settings."""
    return group_configs.decode(json.loads(bytes(body)))


def group_deleted(group: str) -> bytes:
    """Body of an entry of kind GROUP_DELETED."""
    return _encode({"group": group})


def read_group_deleted(body: memoryview) -> str:
    """The group that was deleted."""
    group: str = json.loads(bytes(body))["group"]
    return group


def membership(group: str, kept: str | None) -> bytes:
    """Body of an entry of kind MEMBERSHIP."""
    return _encode({"group": group, "kept": kept})


def read_membership(body: memoryview) -> tuple[str, str | None]:
    """The group, and what its coordinator keeps of it; None: nothing."""
    entry = json.loads(bytes(body))
    return entry["group"], entry["kept"]


Offsets = Sequence[tuple[int, int]]
"""(queue id, offset) each."""


def timer_claimed(
    service: Service,
    queues: Iterable[int],
    since_ms: int,
    begins: Offsets = (),
    epoch: int | None = None,
) -> bytes:
    """Body of an entry of kind TIMER_CLAIMED.  `epoch`: None, as before there were replicas."""
    body = {**service.encode(), "queues": list(queues), "since_ms": since_ms}
    told = [*begins, EMPTY] if service.empty else [*begins]
    if epoch is not None:
        told.append((LED, epoch))
    return _encode({**body, "begins": told} if told else body)


def read_timer_claimed(body: memoryview) -> tuple[Service, list[int], int, Offsets, int | None]:
    """The timer service, the queues of %TIMER% that it claimed, when, what was given up, its epoch.

    None: the entry does not say in which epoch it is led.
    """
    entry = json.loads(bytes(body))
    queues, since_ms = entry.pop("queues"), entry.pop("since_ms")
    begins = _offsets(entry.pop("begins", ()))
    service = Service.decode(entry, EMPTY in begins)
    given_up = [each for each in begins if each[0] >= 0]
    return service, queues, since_ms, given_up, dict(begins).get(LED)


def timer_handed_over(service_id: int, ends: Offsets) -> bytes:
    """Body of an entry of kind TIMER_HANDED_OVER."""
    return _encode({"id": service_id, "ends": ends})


def read_timer_handed_over(body: memoryview) -> tuple[int, Offsets]:
    """The timer service, and how far it had taken over the queues that it has no more."""
    entry = json.loads(bytes(body))
    return entry["id"], _offsets(entry["ends"])


def _offsets(rows: Iterable[Sequence[int]]) -> Offsets:
    return [(queue_id, offset) for queue_id, offset in rows]


def timer_released(service_id: int) -> bytes:
    """Body of an entry of kind TIMER_RELEASED."""
    return _encode({"id": service_id})


def read_timer_released(body: memoryview) -> int:
    """The id of the timer service whose queues another one may claim."""
    service_id: int = json.loads(bytes(body))["id"]
    return service_id
