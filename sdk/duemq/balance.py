"""Who gets which queue: allocation strategies, a group's coordinator, the queue of an ordering key.

Pure: every function depends on its arguments only, and on nothing that differs between processes or
versions of Python, so that brokers and clients agree without talking to one another.  All sharing
is by sorted order; hashes are CRC-32 (IEEE) of UTF-8.

`average` is RocketMQ's AVG.  With q queues and c members, m = q mod c, member i takes a block:

    size  = 1 if q <= c, else q // c + (1 if i < m else 0)
    start = i * size if i < m, else i * size + m
    take  = min(size, q - start), nothing if that is not positive

So blocks are contiguous and the first m members have one queue more.  8 queues, 3 members: 3, 3, 2.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from duemq.errors import InvalidArgument


class MessageQueue(NamedTuple):
    """A queue of a topic on a broker; sorts by topic, broker, queue id."""

    topic: str
    broker: str
    queue_id: int


# Shares one topic's queues (sorted) among members (sorted, at least one).  Answers every queue
# once.
Strategy = Callable[[Sequence[MessageQueue], Sequence[str]], Mapping[str, Sequence[MessageQueue]]]

AVERAGE = "average"
AVERAGE_BY_CIRCLE = "average-by-circle"


def average_block(index: int, queues: int, members: int) -> tuple[int, int]:
    """Answers (start, count) of the block of member `index`; count is 0 when nothing is left."""
    extra = queues % members
    size = 1 if queues <= members else queues // members + (1 if index < extra else 0)
    start = index * size if index < extra else index * size + extra
    return start, max(0, min(size, queues - start))


def average(
    queues: Sequence[MessageQueue], members: Sequence[str]
) -> dict[str, Sequence[MessageQueue]]:
    """Contiguous blocks, the first members one queue more."""
    shares: dict[str, Sequence[MessageQueue]] = {}
    for index, member in enumerate(members):
        start, count = average_block(index, len(queues), len(members))
        shares[member] = queues[start : start + count]
    return shares


def average_by_circle(
    queues: Sequence[MessageQueue], members: Sequence[str]
) -> dict[str, Sequence[MessageQueue]]:
    """Dealt like cards: queue n goes to member n mod c."""
    return {member: queues[index :: len(members)] for index, member in enumerate(members)}


_strategies: dict[str, Strategy] = {AVERAGE: average, AVERAGE_BY_CIRCLE: average_by_circle}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Makes a strategy known by name in this process: a broker that coordinates groups."""
    if not name:
        raise InvalidArgument("a strategy needs a name", field="strategy", value=name)
    _strategies[name] = strategy


def strategy_named(name: str) -> Strategy:
    """Raises InvalidArgument for a name that nobody registered; empty means `average`."""
    try:
        return _strategies[name or AVERAGE]
    except KeyError:
        raise InvalidArgument(
            f"unknown allocation strategy {name!r}",
            field="strategy",
            value=name,
            limit=", ".join(sorted(_strategies)),
        ) from None


def allocate(
    strategy: Strategy,
    queues: Iterable[MessageQueue],
    subscriptions: Mapping[str, Iterable[str]],
) -> dict[MessageQueue, str]:
    """Answers queue → member.

    Topic by topic among the members that subscribe to it (`subscriptions`: member → topics).  A
    queue of a topic that nobody subscribes to is left out.
    """
    members_of: dict[str, list[str]] = defaultdict(list)
    for member in sorted(subscriptions):
        for topic in set(subscriptions[member]):
            members_of[topic].append(member)
    queues_of: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in sorted(set(queues)):
        queues_of[queue.topic].append(queue)
    return {
        queue: member
        for topic, members in members_of.items()
        for member, share in strategy(queues_of[topic], members).items()
        for queue in share
    }


def coordinator(group: str, broker_names: Iterable[str]) -> str | None:
    """Answers the broker that coordinates a group: the highest of all (hash, name); None without
    brokers.

    A broker that comes or goes moves only the groups that it wins or had won (rendezvous hashing).
    """
    return max(broker_names, key=lambda name: (_mixed(f"{group}|{name}"), name), default=None)


def _mixed(text: str) -> int:
    """CRC-32, then MurmurHash3's finalizer.

    CRCs alone of names of one length differ by the same bits for every group, which makes some
    brokers win four times as often as others.
    """
    h = crc32(text.encode())
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def queue_of_key(ordering_key: str, queue_count: int) -> int:
    """Answers a key's index among a topic's writable queues sorted by (broker, queue id)."""
    return crc32(ordering_key.encode()) % queue_count
