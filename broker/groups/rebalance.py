"""One group is rebalanced: target, grants, and what its members are to be told.  Pure.

In pieces (duemq/protocol/pieces.py), as a group may have tens of thousands of queues.  Between two
pieces the group may be read, and members may send heartbeats; nothing else may change it: the
coordinator is given its events between rebalances.  Target and generation change in one piece, and
members are told of nothing before the end.

When queues came free and nothing else has changed, only these and their new owners are looked at.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from duemq.protocol.balance import NOBODY, WITHOUT_MEMORY, MessageQueue, allocating, strategy_named
from duemq.protocol.pieces import Pieces, parts
from duemq_server.broker.groups.members import Group, Holding
from duemq_server.broker.store.offsets import GENERATION_MARKS

# Sorted, of each topic that the group reads; topics sorted.
TopicQueues = dict[str, tuple[MessageQueue, ...]]


class Assignment(NamedTuple):
    """The whole of what a member shall own."""

    group: str
    member_id: str
    generation: int
    queues: tuple[MessageQueue, ...]
    members: tuple[str, ...] = ()  # of the group
    waits_ms: int = 0
    """How long queues wait at most for members that are not back yet, or for a process that it
    replaced."""


def rebalancing(
    group: Group, queues: TopicQueues, mark: int, now_ms: int
) -> Pieces[list[Assignment]]:
    """Answers what members are to be told.  `mark` is that of this coordinator's generations."""
    if not group.shaken and group.hold_until_ms is None:
        told = yield from _give_on(group)
    else:
        order: Iterable[MessageQueue] = chain.from_iterable(queues.values())
        if (yield from _holding_back(group, queues, now_ms)):
            yield from _keep_claims(group, mark, now_ms)
            strangers = sorted(group.target.keys() - set(order))
            order = chain(*queues.values(), strangers)
        else:
            yield from _retarget(group, queues, mark, now_ms)
        told = yield from _tell(group, order, now_ms)
    group.shaken = False
    group.freed.clear()
    return told


def _holding_back(group: Group, queues: TopicQueues, now_ms: int) -> Pieces[bool]:
    """Tells whether members may still be missing that hold queues; ends the hold if not."""
    if group.hold_until_ms is None:
        return False
    if now_ms < group.hold_until_ms:
        missing = bool(group.absent)
        if group.absent is None:
            missing = not any(queues.values())
            for part in parts(chain.from_iterable(queues.values())):
                missing = missing or not group.holdings.keys() >= set(part)
                yield
        if missing:
            return True
    group.hold_until_ms = None
    group.absent = {}
    group.left.clear()
    group.outdated = True
    return False


def _keep_claims(group: Group, mark: int, now_ms: int) -> Pieces[None]:
    """The target is what members say.  Assignments of before may still be on their way."""
    claims: dict[MessageQueue, str] = {}
    for part in parts(group.holdings.items()):
        claims.update((queue, holding.member_id) for queue, holding in part)
        yield
    if claims != group.target:
        group.target = claims
        _renew(group, mark, now_ms)
    yield


def _renew(group: Group, mark: int, now_ms: int) -> None:
    time_ms = max(group.generation // GENERATION_MARKS + 1, now_ms)
    group.generation = time_ms * GENERATION_MARKS + mark


def _retarget(group: Group, queues: TopicQueues, mark: int, now_ms: int) -> Pieces[None]:
    topics = {
        member.member_id: frozenset(member.subscriptions)
        for member in group.members.values()
        if not member.leaving
    }
    made_of = group.strategy, queues, topics
    names = group.member_ids()  # also of those that leave, which have no part in `topics`
    if made_of == group.made_of and names == group.names and not group.outdated:
        return
    remembers = group.strategy not in WITHOUT_MEMORY
    current = (yield from group.current()) if remembers else NOBODY
    strategy = strategy_named(group.strategy)
    target = yield from allocating(strategy, queues, topics, current)
    if target != group.target or names != group.names or group.outdated:
        group.target, group.names = target, names
        group.allocated = target
        _renew(group, mark, now_ms)
    group.made_of, group.outdated = made_of, False
    yield


def _tell(group: Group, order: Iterable[MessageQueue], now_ms: int) -> Pieces[list[Assignment]]:
    """Grants what is free, and tells those whose share or fellow members have changed."""
    shares: dict[str, list[MessageQueue]] = {member_id: [] for member_id in group.members}
    granted: dict[str, list[Holding]] = {member_id: [] for member_id in group.members}
    target, holdings, replaced = group.target, group.holdings, group.replaced
    for part in parts(order):
        for queue in part:
            owner = target.get(queue)
            holding = holdings.get(queue)
            if owner is None or queue in replaced:
                continue
            if holding is None:
                holding = holdings[queue] = Holding(owner, group.generation)
            elif holding.member_id != owner:
                continue
            shares[owner].append(queue)
            granted[owner].append(holding)
        yield
    told = []
    members = group.member_ids()
    held_ms = now_ms if group.hold_until_ms is None else group.hold_until_ms
    waits_until_ms = {each.member_id: each.until_ms for each in sorted(set(replaced.values()))}
    for member_id, share in shares.items():
        share.sort()  # it is, but for queues that no route names
        queues = tuple(share)
        yield
        member = group.members[member_id]
        if member.told == (queues, members):
            continue
        member.told = queues, members
        for holding in granted[member_id]:
            holding.granted = group.generation
        waits_ms = max(held_ms, waits_until_ms.get(member_id, now_ms)) - now_ms
        told.append(Assignment(group.name, member_id, group.generation, queues, members, waits_ms))
    return told


def _give_on(group: Group) -> Pieces[list[Assignment]]:
    """Grants what came free; as `_tell`, where the others' shares are what they were told."""
    gains: dict[str, list[MessageQueue]] = defaultdict(list)
    for part in parts(group.freed):
        for queue in part:
            owner = group.target.get(queue)
            free = queue not in group.holdings and queue not in group.replaced
            if owner is not None and free:
                group.holdings[queue] = Holding(owner, group.generation)
                gains[owner].append(queue)
        yield
    told = []
    for member_id, gained in gains.items():
        member = group.members[member_id]
        before, members = member.told or ((), ())
        had = set(before)
        yield
        new = sorted(queue for queue in gained if queue not in had)
        if not new:
            continue  # it let go of what it shall have
        yield
        queues = tuple(sorted((*before, *new)))
        member.told = queues, members
        yield
        for part in parts(queues):
            for queue in part:
                group.holdings[queue].granted = group.generation
            yield
        told.append(Assignment(group.name, member_id, group.generation, queues, members))
    return told
