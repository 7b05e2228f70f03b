"""Timer services claim queues of %TIMER%, hand them over, and are released: the decisions.

Owned and run by: the event loop.  Each is entries of the log, done when they are appended; whoever
tells the outcome waits until the log is durable up to what is `settled`.
"""

import logging
from collections.abc import Mapping, Sequence

from duemq.errors import ReadOnly
from duemq.protocol import checks, names
from duemq_server.broker.records.timer_claims import Decision, Service
from duemq_server.broker.store import journal
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.replicas.replica_log import ReplicaLog

log = logging.getLogger(__name__)

_NO_ENDS: Mapping[int, int] = {}
# A timer service tells so many messages of a queue apart.
END_MAX = 1 << 48


def claim(
    store: Store,
    service: Service,
    queues: Sequence[int],
    steady_ms: int,
    ends: Mapping[int, int] = _NO_ENDS,
    formers: Sequence[int] = (),
    epoch: int = 0,
    *,
    now_ms: int,
) -> tuple[Decision, int]:
    """What became of the claim; settled.

    `steady_ms`: by a clock that nobody sets; `now_ms`: when it was, for people.
    `ends`: how far the service has taken over queues, also those that it hands over; `formers`: ids
    that it had before; `epoch`: of who leads its replicas.  Raises FencedTimer, InvalidArgument,
    QueueNotFound, ReadOnly, Overloaded, Unavailable.
    """
    for queue_id in queues:
        store.topics.queue(names.TIMER_TOPIC, queue_id)
    for queue_id, offset in ends.items():
        store.topics.queue(names.TIMER_TOPIC, queue_id)
        checks.between("ends.offset", offset, 0, END_MAX)
    decision = store.timer_owners.check_claim(service, queues, steady_ms, epoch)
    _leave_out(store, decision.granted, ends)
    # That another replica leads stops no claim for want of space.
    leads_anew = decision.leads_anew and store.writable
    if not (decision.changes or decision.leaves or leads_anew):
        return decision, store.log.end_position  # it may still be on its way to the disk
    store.check_changeable()  # what its timers hold of the log goes only when someone has them
    if decision.leaves:
        _hand_over(store, service.id, decision.leaves, ends)
    given_up = sorted(store.timer_owners.given_up(decision, formers))
    begins = [(each, store.tables.timers_taken_over(each)) for each in given_up]
    told = epoch if epoch or decision.leads_anew else None
    claimed = decision.service, decision.granted, now_ms, begins, told
    _, settled = store.append(journal.TIMER_CLAIMED, [journal.timer_claimed(*claimed)])
    store.tables.claim_timers(*claimed)
    return decision, settled


def _leave_out(store: Store, queues: Sequence[int], ends: Mapping[int, int]) -> None:
    """What the owner has taken over of its queues, and this broker has not: from an older copy.

    Those offsets are never given to anything new, which the owner would take for the old.  If they
    were, at this start or one before, `check_fetch` tells.  A log with replicas is not from a copy
    that they have not, and what is left out they would not hear of.  Raises ReadOnly.
    """
    if isinstance(store.log, ReplicaLog):
        return
    unclaimed = store.timer_owners.unclaimed
    for queue_id in filter(ends.__contains__, queues):
        queue, end = store.queue(names.TIMER_TOPIC, queue_id), ends[queue_id]
        last = queue.next_offset
        if end <= last or last != unclaimed.get(queue_id):
            continue
        try:
            queue.skip_to(end)
        except DiskFull as error:  # who is answered takes it that this was done
            raise ReadOnly(str(error)) from error
        # It may have taken over more, which is not durable there yet.
        store.timers_given[queue_id] = unclaimed[queue_id] = end
        log.error(
            "%s/%d ended at %d here, its timer service has taken it over up to %d: this data is"
            " from an older copy; the queue goes on there",
            *(*queue.key, last, end),
        )


def check_fetch(store: Store, queue_id: int, offset: int) -> None:
    """Raises InvalidArgument for an offset that the owner has not got from this data.

    It was given before a copy of that was made, and to other messages since: the owner would pass
    over these.  Beyond the end of the queue it is out of range, as any, until a claim mends that.
    """
    queue = store.queue(names.TIMER_TOPIC, queue_id)
    given = max(store.timers_given.get(queue_id, 0), queue.min_offset)
    if given < offset <= queue.max_offset:
        limit = f"at most {given}, up to where this data ended at the start, or was fetched since"
        raise checks.wrong("offset", offset, limit)


def note_fetched(store: Store, queue_id: int, next_offset: int) -> None:
    """The owner is given what lies before an offset: so it has said how far it is."""
    store.timers_given[queue_id] = max(store.timers_given.get(queue_id, 0), next_offset)
    store.timer_owners.unclaimed.pop(queue_id, None)


def _hand_over(
    store: Store, service_id: int, leaves: Sequence[int], ends: Mapping[int, int]
) -> None:
    told = []
    for queue_id in leaves:
        # What a copy of a data directory has not, although it was committed once, is fetched
        # again.  What this data has given to nobody the next owner would miss, or be refused.
        end = ends.get(queue_id, store.tables.timers_taken_over(queue_id))
        end = min(end, store.timers_given.get(queue_id, 0))
        told.append((queue_id, max(end, store.timer_owners.begin_of(queue_id))))
    store.append(journal.TIMER_HANDED_OVER, [journal.timer_handed_over(service_id, told)])
    store.tables.hand_over_timers(service_id, told)


def release(store: Store, service_id: int, steady_ms: int) -> int:
    """Settled.  Raises InvalidArgument, ReadOnly, Overloaded."""
    store.timer_owners.check_release(service_id, steady_ms)
    store.check_changeable()
    _, settled = store.append(journal.TIMER_RELEASED, [journal.timer_released(service_id)])
    store.timer_owners.release(service_id)
    return settled
