"""What waits in the twin is looked at, changed and kept back, as the admin client has it done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from duemq.administering.holds import check_named, older_ms_of
from duemq.descriptions import (
    HeldTimers,
    TimerBucket,
    TimerCount,
    TimerDescription,
    TimerHold,
    TimerState,
)
from duemq.errors import TopicNotFound
from duemq.producing.cancels import CancelOutcome, Handle, decoded_all
from duemq.producing.handle import text_of
from duemq.protocol import checks, moments, timer_keys
from duemq.protocol.due import Edges
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.testing.broker import MemoryBroker, Timer

_STATES = {
    None: TimerState.PENDING,
    CancelOutcome.FIRED: TimerState.FIRED,
    CancelOutcome.CANCELLED: TimerState.CANCELLED,
}


def count(broker: MemoryBroker, topic: str | None) -> list[TimerCount]:
    """As `Admin.count_timers`."""
    if topic is not None:
        checks.instance("topic", topic, str)
    found: dict[str, list[Timer]] = {topic: []} if topic else {}
    for each in broker.timers():
        if not topic or topic == each.what.topic:
            found.setdefault(each.what.topic, []).append(each)
    return [_count(name, found[name]) for name in sorted(found)]


def histogram(broker: MemoryBroker, topic: str | None) -> list[TimerBucket]:
    """As `Admin.timer_histogram`."""
    now_ms = broker.now_ms
    edges = Edges.at(now_ms)
    dues = [
        each.what.due_ms
        for each in broker.timers()
        if each.outcome is None and topic in (None, each.what.topic)
    ]
    overdue = sum(due_ms < now_ms for due_ms in dues)
    counts: dict[int, int] = {}
    for due_ms in dues[overdue:]:
        step_ms = edges.step_ms(due_ms)
        begin_ms = due_ms // step_ms * step_ms
        counts[begin_ms] = counts.get(begin_ms, 0) + 1
    buckets = [
        TimerBucket(max(begin_ms, now_ms), begin_ms + edges.step_ms(begin_ms), pending)
        for begin_ms, pending in counts.items()
    ]
    return [TimerBucket(0, now_ms, overdue), *buckets] if overdue else buckets


def get(broker: MemoryBroker, handles: Sequence[Handle]) -> list[TimerDescription]:
    """As `Admin.get_timers`."""
    known = {each.handle: each for each in broker.timers()}
    found = []
    for each in decoded_all(handles):
        text = text_of(each)
        if text in known:
            found.append(_description(known[text], bodies=True))
        else:
            found.append(TimerDescription(text, TimerState.UNKNOWN, each.due_ms))
    return found


def pending(
    broker: MemoryBroker,
    topic: str,
    key_prefix: str,
    since: Moment | None,
    until: Moment | None,
    limit: int | None,
    bodies: bool,
) -> Iterator[TimerDescription]:
    """As `Admin.list_timers`."""
    if limit is not None:
        checks.whole("limit", limit, 1, 1 << 40)
    waiting = _waiting(broker, topic, key_prefix, since, until)
    return islice((_description(each, bodies=bodies) for each in waiting), limit)


def change(
    broker: MemoryBroker,
    topic: str,
    key_prefix: str,
    since: Moment | None,
    until: Moment | None,
    by_ms: int | None = None,
    to_topic: str | None = None,
    *,
    dry_run: bool,
) -> int:
    """As `Admin.shift_pending`, `move_pending`, or `cancel_pending` where neither is given."""
    waiting = _waiting(broker, topic, key_prefix, since, until)
    from_ms, to_ms = moments.span_ms(since, until, broker.now_ms)
    if since is not None and to_ms is not None and to_ms <= from_ms:
        raise checks.wrong("until", str(until), f"after since, {since}")
    if to_topic is not None:
        timer_keys.check_move(topic, to_topic)
        if not broker.has_topic(to_topic):
            raise TopicNotFound(f"no topic {to_topic!r}", field="topic", value=to_topic)
        waiting = [each for each in waiting if not each.what.record.timer_key]
    for each in () if dry_run else waiting:
        if to_topic is not None:
            broker.move(each, to_topic)
        elif by_ms is None:
            broker.cancel([each.handle])
        else:
            broker.shift(each, by_ms)
    broker.fire()
    return len(waiting)


def hold(broker: MemoryBroker, topic: str, key_prefix: str, *, dry_run: bool) -> HeldTimers:
    """As `Admin.hold_timers`."""
    check_named(topic, key_prefix)
    name = topic, key_prefix
    was_held = name in broker.kept_back
    if not dry_run:
        broker.kept_back.setdefault(name, broker.now_ms)
    return HeldTimers(broker.under(name), was_held)


def resume(
    broker: MemoryBroker,
    topic: str,
    key_prefix: str,
    policy: str,
    older_than: Delay | None,
    *,
    dry_run: bool,
) -> HeldTimers:
    """As `Admin.resume_timers`; it is done at once."""
    check_named(topic, key_prefix)
    older_ms = older_ms_of(policy, older_than)
    name = topic, key_prefix
    pending = broker.under(name)
    if dry_run:
        return HeldTimers(pending, name in broker.kept_back)
    was_held, dropped = broker.resume(name, policy, older_ms)
    return HeldTimers(pending, was_held, dropped)


def holds(broker: MemoryBroker) -> list[TimerHold]:
    """As `Admin.timer_holds`."""
    return [TimerHold(*name, since_ms) for name, since_ms in sorted(broker.kept_back.items())]


def _waiting(
    broker: MemoryBroker,
    topic: str,
    key_prefix: str,
    since: Moment | None,
    until: Moment | None,
) -> list[Timer]:
    timer_keys.check_selection(topic, key_prefix)
    from_ms, to_ms = moments.span_ms(since, until, broker.now_ms)
    return [
        each
        for each in broker.timers()
        if each.outcome is None
        and each.what.topic == topic
        and each.what.record.timer_key.startswith(key_prefix)
        and each.what.due_ms >= from_ms
        and (to_ms is None or each.what.due_ms < to_ms)
    ]


def _count(topic: str, timers: Sequence[Timer]) -> TimerCount:
    replaced = sum(each.replaced for each in timers)  # also what was fired by hand
    dropped = sum(each.dropped for each in timers)
    outcomes = [each.outcome for each in timers if not each.replaced and not each.dropped]
    return TimerCount(
        topic,
        pending=outcomes.count(None),
        accepted=len(timers),
        fired=outcomes.count(CancelOutcome.FIRED),
        cancelled=outcomes.count(CancelOutcome.CANCELLED),
        replaced=replaced,
        held=sum(each.held and each.outcome is None for each in timers),
        dropped=dropped,
    )


def _description(timer: Timer, *, bodies: bool) -> TimerDescription:
    state, record = _STATES[timer.outcome], timer.what.record
    if state is not TimerState.PENDING:
        return TimerDescription(timer.handle, state, timer.what.due_ms)
    return TimerDescription(
        timer.handle,
        TimerState.HELD if timer.held else state,
        timer.what.due_ms,
        timer.what.topic,
        record.timer_key or None,
        record.key or None,
        record.tag or None,
        record.message_id,
        dict(record.properties),
        record.body if bodies else None,
    )
