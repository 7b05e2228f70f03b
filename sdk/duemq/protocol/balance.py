"""Who gets which queue: allocation strategies, a group's coordinator, the queue of an ordering key.

Pure: every function depends on its arguments only, and on nothing that differs between processes or
versions of Python, so that brokers and clients agree without talking to one another.  All sharing
is by sorted order; hashes are CRC-32 (IEEE) of UTF-8.

A strategy shares the queues of one topic.  What each moves when members come and go:
broker/README.md.  `average` is RocketMQ's AVG: of 8 queues three members have 3, 3 and 2.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

from duemq.protocol import checks
from duemq.protocol.pieces import PIECE, Pieces, finish, parts


class MessageQueue(NamedTuple):
    """A queue of a topic on a broker; sorts by topic, broker, queue id."""

    topic: str
    broker: str
    queue_id: int


Current = Mapping[MessageQueue, str]
Shares = Mapping[str, Sequence[MessageQueue]]
# Shares one topic's queues (sorted) among members (sorted, at least one).  Answers every queue
# once.  The third argument says who has which of the topic's queues now, members that are gone
# among them; those that their members are giving up already come last.
Strategy = Callable[[Sequence[MessageQueue], Sequence[str], Current], Shares]

AVERAGE = "average"
AVERAGE_BY_CIRCLE = "average-by-circle"
CONSISTENT_HASH = "consistent-hash"
STICKY = "sticky"
# Of these, what they answer does not depend on who has what now.
WITHOUT_MEMORY = frozenset({AVERAGE, AVERAGE_BY_CIRCLE, CONSISTENT_HASH})

VIRTUAL_NODES = 10  # points of a member on the ring of `consistent-hash`; as RocketMQ
RINGS_KEPT = 64
PLACES_KEPT = 64  # pieces of topics: 65,536 queues
NOBODY: Current = MappingProxyType({})


def average_block(index: int, queues: int, members: int) -> tuple[int, int]:
    """Answers (start, count) of the block of member `index`; count is 0 when nothing is left."""
    extra = queues % members
    size = 1 if queues <= members else queues // members + (1 if index < extra else 0)
    start = index * size if index < extra else index * size + extra
    return start, max(0, min(size, queues - start))


def average(
    queues: Sequence[MessageQueue], members: Sequence[str], _current: Current
) -> dict[str, Sequence[MessageQueue]]:
    """Contiguous blocks, the first members one queue more."""
    shares: dict[str, Sequence[MessageQueue]] = {}
    for index, member in enumerate(members):
        start, count = average_block(index, len(queues), len(members))
        shares[member] = queues[start : start + count]
    return shares


def average_by_circle(
    queues: Sequence[MessageQueue], members: Sequence[str], _current: Current
) -> dict[str, Sequence[MessageQueue]]:
    """Dealt like cards: queue n goes to member n mod c."""
    return {member: queues[index :: len(members)] for index, member in enumerate(members)}


def consistent_hash(
    queues: Sequence[MessageQueue], members: Sequence[str], current: Current
) -> Shares:
    """Each queue goes to the next of the members' points on a ring of hashes.

    Not bounded, as RocketMQ's: with few queues some members have several times the share of
    others, or nothing.  In return it needs no memory of who had what.
    """
    return finish(_hashing(queues, members, current))


def _hashing(
    queues: Sequence[MessageQueue], members: Sequence[str], _current: Current
) -> Pieces[Shares]:
    points, owners = _ring(tuple(members))
    shares: dict[str, list[MessageQueue]] = {member: [] for member in members}
    for part in parts(queues):
        for queue, place in zip(part, _places(part), strict=True):
            shares[owners[bisect_left(points, place) % len(owners)]].append(queue)
        yield
    return shares


@lru_cache(PLACES_KEPT)
def _places(queues: tuple[MessageQueue, ...]) -> list[int]:
    """Of queues on the ring."""
    return [_mixed(f"{topic}|{broker}|{queue_id}") for topic, broker, queue_id in queues]


@lru_cache(RINGS_KEPT)
def _ring(members: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Points in order, and the member of each."""
    ring = sorted(
        (_mixed(f"{member}#{number}"), member)
        for member in members
        for number in range(VIRTUAL_NODES)
    )
    return [point for point, _ in ring], [member for _, member in ring]


def sticky(queues: Sequence[MessageQueue], members: Sequence[str], current: Current) -> Shares:
    """As even as possible, and of all such shares one that moves the fewest queues.

    Those who have most get the odd queues, so that they keep most; what is above a share goes to
    those who are below theirs.  Ties are broken by a hash of topic and member, so that not the
    same members have the odd queues of all topics.
    """
    return finish(_sticking(queues, members, current))


def _sticking(
    queues: Sequence[MessageQueue], members: Sequence[str], current: Current
) -> Pieces[Shares]:
    had: dict[str, list[MessageQueue]] = {member: [] for member in members}
    shared = set(queues)
    for held in parts(current.items()):
        for queue, member in held:
            if member in had and queue in shared:
                had[member].append(queue)
        yield
    topic = queues[0].topic if queues else ""
    most_first = sorted(members, key=lambda m: (-len(had[m]), _mixed(f"{topic}|{m}"), m))
    size, odd = divmod(len(queues), len(members))
    sizes = {member: size + (rank < odd) for rank, member in enumerate(most_first)}
    owners: dict[MessageQueue, str] = {}
    for member in members:
        owners.update(dict.fromkeys(had[member][: sizes[member]], member))
    yield
    free = (repeat(member, sizes[member] - len(had[member])) for member in members)
    places = chain.from_iterable(free)  # a negative number of times is none
    shares: dict[str, list[MessageQueue]] = {member: [] for member in members}
    for part in parts(queues):
        for queue in part:
            owner = owners.get(queue)
            shares[next(places) if owner is None else owner].append(queue)
        yield
    return shares


_strategies: dict[str, Strategy] = {
    AVERAGE: average,
    AVERAGE_BY_CIRCLE: average_by_circle,
    CONSISTENT_HASH: consistent_hash,
    STICKY: sticky,
}


# The same in pieces, of those that take long.
_IN_PIECES: Mapping[Strategy, Callable[..., Pieces[Shares]]] = {
    consistent_hash: _hashing,
    sticky: _sticking,
}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Makes a strategy known by name in this process: a broker that coordinates groups."""
    checks.filled("strategy", name)
    _strategies[name] = strategy


def strategy_named(name: str) -> Strategy:
    """Raises InvalidArgument for a name that nobody registered; empty means `average`."""
    try:
        return _strategies[name or AVERAGE]
    except KeyError:
        raise checks.wrong("strategy", name, ", ".join(sorted(_strategies))) from None


def allocate(
    strategy: Strategy,
    queues: Iterable[MessageQueue],
    subscriptions: Mapping[str, Iterable[str]],
    current: Current = NOBODY,
) -> dict[MessageQueue, str]:
    """Answers queue → member.

    Topic by topic among the members that subscribe to it (`subscriptions`: member → topics).  A
    queue of a topic that nobody subscribes to is left out.  `current`: who has which queue now.
    """
    queues_of: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in dict.fromkeys(queues):
        queues_of[queue.topic].append(queue)
    for found in queues_of.values():
        found.sort()  # a topic at a time: they mostly come in order
    return finish(allocating(strategy, queues_of, subscriptions, current))


def allocating(
    strategy: Strategy,
    queues: Mapping[str, Sequence[MessageQueue]],
    subscriptions: Mapping[str, Iterable[str]],
    current: Current = NOBODY,
) -> Pieces[dict[MessageQueue, str]]:
    """As `allocate`, in pieces.  `queues`: of each topic, sorted, each once."""
    members_of: dict[str, list[str]] = defaultdict(list)
    for member in sorted(subscriptions):
        for topic in set(subscriptions[member]):
            members_of[topic].append(member)
    current_of: dict[str, dict[MessageQueue, str]] = defaultdict(dict)
    for part in parts(current.items()):
        for queue, member in part:
            current_of[queue.topic][queue] = member
        yield
    target: dict[MessageQueue, str] = {}
    for topic, members in members_of.items():
        asked = queues.get(topic, ()), members, current_of[topic]
        in_pieces = _IN_PIECES.get(strategy)
        shares = (yield from in_pieces(*asked)) if in_pieces else strategy(*asked)
        for member, share in shares.items():
            target.update(dict.fromkeys(share, member))
            if len(share) > PIECE:
                yield
        yield
    return target


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
    """Answers a key's index among all of a topic's queues sorted by (broker, queue id)."""
    return crc32(ordering_key.encode()) % queue_count
