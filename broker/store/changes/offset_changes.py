"""How far groups are, and what goes by that: commits, resets, marks of dead letters, purges.

Owned and run by: the event loop.  Each is an entry of the log, as in timer_queue_changes.py.
"""

from collections.abc import Mapping, Sequence

from duemq.errors import OffsetOutOfRange
from duemq.protocol import names
from duemq_server.broker.store import journal
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store


def put(store: Store, group: str, changes: list[tuple[GroupQueue, GroupOffset]]) -> int:
    """Settled; 0 if nothing is to be waited for.  Raises ReadOnly, Overloaded."""
    fresh = [(key, new) for key, new in changes if store.offsets.find(key) != new]
    if not fresh:
        # Equal to what is known, which may still be on its way to the disk.
        return store.log.end_position if changes else 0
    store.offsets.check_room(key for key, _ in fresh)
    _, settled = store.append(journal.OFFSETS, [journal.offsets(group, fresh)])
    for key, progress in fresh:
        store.offsets.put(key, progress)
    return settled


def reset(store: Store, group: str, offsets: list[tuple[GroupQueue, int]]) -> int:
    """Moves a group; members lose these queues, and nothing is settled there any more.

    The caller has checked that the offsets are kept.  Settled.  Raises ReadOnly, Overloaded.
    """
    if not offsets:
        return 0
    store.offsets.check_room(key for key, _ in offsets)
    changes = [(key, store.offsets.reset(key, offset)) for key, offset in offsets]
    _, settled = store.append(journal.OFFSETS_RESET, [journal.offsets(group, changes)])
    store.tables.reset_offsets(changes)
    return settled


def mark_resent(store: Store, group: str, queue_id: int, offsets: Sequence[int]) -> int:
    """Notes that dead letters of a group were sent again.

    Settled.  Raises TopicNotFound, QueueNotFound, OffsetOutOfRange, ReadOnly, Overloaded.
    """
    topic = names.dead_letter_topic(group)
    queue = store.queue(topic, queue_id)
    key = GroupQueue(names.RESENT_GROUP, topic, queue_id)
    for offset in offsets:
        if not 0 <= offset < queue.max_offset:
            raise OffsetOutOfRange(
                f"offset: {topic}, queue {queue_id} has no record {offset}",
                field="offset",
                value=offset,
                limit=f"0 to {queue.max_offset - 1}",
            )
    fresh = {each for each in offsets if not store.offsets.is_done(key, each)}
    # One offset says it of all that follow one another.
    known = store.offsets.find(key)
    start = end = max(known.offset if known else 0, queue.min_offset)
    while end in fresh or store.offsets.is_done(key, end):
        end += 1
    rest = sorted(each for each in fresh if each > end)
    store.offsets.check_settled_room(key, len(rest))
    settled = store.log.end_position  # what is known may be on its way to the disk
    if end > start:
        settled = put(store, names.RESENT_GROUP, [(key, GroupOffset(end, 0))])
    if rest:
        _, settled = store.append(journal.SETTLED, [journal.settled(key, rest)])
        store.offsets.settle(key, rest)
    return settled


def purge(store: Store, name: str, cuts: Mapping[int, int], topic_id: int = 0) -> int:
    """Takes the records of queues before an offset away from everybody, for good.

    Settled.  Raises TopicNotFound, TopicReplaced, QueueNotFound, OffsetOutOfRange,
    InvalidArgument, ReadOnly, Overloaded; nothing was purged then.
    """
    store.check_changeable()
    store.topics.check_deletable(name, topic_id)
    changes: list[tuple[GroupQueue, GroupOffset]] = []
    for queue_id, offset in cuts.items():
        queue = store.queue(name, queue_id)
        key = GroupQueue(names.PURGED_GROUP, name, queue_id)
        purged = store.offsets.commit(key, 0, offset, queue.max_offset)
        if offset > queue.min_offset:
            changes.append((key, purged))
    if not changes:
        return store.log.end_position  # what was purged before may be on its way to the disk
    settled = put(store, names.PURGED_GROUP, changes)
    store.tables.purge(changes)
    return settled
