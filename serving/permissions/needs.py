"""Which rights the request of each method needs.  Pure.

What is not here cannot be served with permissions (`needs_of`), so that a new method is not open by
mistake.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from duemq.protocol.names import TIMER_GROUP
from duemq_server.serving.permissions.rights import EVERY, Action, Need

Needs: TypeAlias = Callable[[Any], Iterable[Need] | None]
"""Of a request; None: its method looks at each part by itself."""

_KNOW = (Need(Action.KNOW),)
_ADMINISTER = (Need(Action.ADMINISTER),)
_SERVE = (Need(Action.SERVE),)


def needs_of(path: str) -> Needs:
    """Of the method at this path.  Raises LookupError."""
    service, method = path.rsplit("/", 1)
    return METHODS[service.rpartition(".")[2], method]


def _know(_: object) -> Iterable[Need]:
    return _KNOW


def _administer(_: object) -> Iterable[Need]:
    return _ADMINISTER


def _serve(_: object) -> Iterable[Need]:
    return _SERVE


def _send(_: object) -> None:
    """Of each batch: `Access.refusal` is asked in its place, so that others go on.

    Who is in the file no more has each refused, too: where a stream ends nobody knows what is
    stored.
    """


def _pull(request: Any) -> Iterable[Need]:
    """And of each queue, as of what is taken over, committed or sent back: as `_send`."""
    return (Need(Action.JOIN, request.group),) if request.group else _KNOW


def _fetch(request: Any) -> Iterable[Need]:
    return _SERVE if request.timer_id else (Need(Action.RECEIVE, request.topic),)


def _in_group(request: Any) -> Iterable[Need]:
    return (Need(Action.JOIN, request.group),)


def _offsets(request: Any) -> Iterable[Need]:
    """Readers without a group ask so what a topic's queues hold."""
    return _receive(request) if request.topic else _in_group(request)


def _reset(request: Any) -> Iterable[Need]:
    """Who reads from a time on has its offsets told so."""
    return _receive(request) if request.dry_run else _ADMINISTER


def _commit(request: Any) -> Iterable[Need]:
    return _SERVE if request.timer_id or request.group == TIMER_GROUP else _in_group(request)


def _member(event: Any) -> Iterator[Need]:
    if not event.HasField("hello"):
        return
    yield Need(Action.JOIN, event.hello.group)
    for subscription in event.hello.subscriptions:
        yield Need(Action.RECEIVE, subscription.topic)


def _create_topic(request: Any) -> Iterable[Need]:
    """Clients make a topic that is missing when they send."""
    if not request.if_missing:
        return _ADMINISTER
    return (Need(Action.SEND, request.topic.name),)


def _see(request: Any) -> Iterable[Need]:
    return (Need(Action.SEE, request.name),)


def _receive(request: Any) -> Iterable[Need]:
    return (Need(Action.RECEIVE, request.topic),)


def _cancel(request: Any) -> Iterator[Need]:
    # Whose topic a handle is of only the shard finds out.
    if request.handles:
        yield Need(Action.SEND, EVERY)
    for key in request.keys:
        yield Need(Action.SEND, key.topic)


def _schedule_timers(request: Any) -> Iterable[Need]:
    return (Need(Action.SEND, request.topic),)


def _reschedule(request: Any) -> Iterator[Need]:
    for timer in request.timers:
        by_key = timer.HasField("key")
        yield Need(Action.SEND, timer.key.topic if by_key else EVERY)


def _count_timers(request: Any) -> Iterable[Need]:
    return (Need(Action.SEE, request.topic or EVERY),)


def _histogram(request: Any) -> Iterable[Need]:
    """That of all topics is one."""
    return (Need(Action.SEE, request.topic),) if request.topic else _KNOW


def _get_timers(_: object) -> Iterable[Need]:
    return (Need(Action.RECEIVE, EVERY),)


def _list_timers(request: Any) -> Iterable[Need]:
    action = Action.RECEIVE if request.with_bodies else Action.SEE
    return (Need(action, request.topic),)


def _put_schedule(request: Any) -> Iterator[Need]:
    yield Need(Action.SCHEDULE, request.name)
    yield Need(Action.SEND, request.spec.topic)


def _schedule(request: Any) -> Iterable[Need]:
    return (Need(Action.SCHEDULE, request.name),)


def _all_schedules(_: object) -> Iterable[Need]:
    return (Need(Action.SCHEDULE, EVERY),)


METHODS: dict[tuple[str, str], Needs] = {
    ("Nameserver", "Register"): _serve,
    ("Nameserver", "Deregister"): _serve,
    ("Nameserver", "Forget"): _administer,
    ("Nameserver", "GetRoute"): _know,
    ("Nameserver", "GetCluster"): _know,
    ("Nameserver", "WatchRoutes"): _know,
    ("Broker", "Send"): _send,
    ("Broker", "SendStream"): _send,
    ("Broker", "Pull"): _pull,
    ("Broker", "PullStream"): _pull,
    ("Broker", "FetchFrames"): _fetch,
    ("Broker", "ClaimTimerQueues"): _serve,
    ("Broker", "AcquireQueues"): _in_group,
    ("Broker", "CommitOffsets"): _commit,
    ("Broker", "GetOffsets"): _offsets,
    ("Broker", "SendBack"): _in_group,
    ("GroupCoordinator", "Join"): _member,
    ("GroupCoordinator", "ListGroups"): _know,
    ("GroupCoordinator", "DescribeGroup"): _in_group,
    ("GroupAdmin", "PutGroup"): _administer,
    ("GroupAdmin", "DeleteGroup"): _administer,
    ("GroupAdmin", "DescribeProgress"): _in_group,
    ("GroupAdmin", "ResetOffsets"): _reset,
    ("GroupAdmin", "CloneOffsets"): _administer,
    ("BrokerAdmin", "CreateTopic"): _create_topic,
    ("BrokerAdmin", "DeleteTopic"): _administer,
    ("BrokerAdmin", "PurgeTopic"): _administer,
    ("BrokerAdmin", "ListTopics"): _know,
    ("BrokerAdmin", "DescribeTopic"): _see,
    ("BrokerAdmin", "DescribeBroker"): _know,
    ("MessageAdmin", "FindMessages"): _receive,
    ("MessageAdmin", "DescribeDelivery"): _receive,
    ("MessageAdmin", "MarkResent"): _in_group,
    ("TimerAdmin", "ListTimerOwners"): _know,
    ("TimerAdmin", "ReleaseTimerQueues"): _administer,
    ("Timer", "Cancel"): _cancel,
    ("Timer", "Schedule"): _schedule_timers,
    ("Timer", "Reschedule"): _reschedule,
    ("Timer", "ChangePending"): _administer,
    ("Timer", "GetStats"): _know,
    ("Timer", "LocateTimers"): _know,
    ("TimerInspector", "CountTimers"): _count_timers,
    ("TimerInspector", "GetHistogram"): _histogram,
    ("TimerInspector", "GetTimers"): _get_timers,
    ("TimerInspector", "ListTimers"): _list_timers,
    ("TimerHolds", "HoldTimers"): _administer,
    ("TimerHolds", "ResumeTimers"): _administer,
    ("TimerHolds", "ListTimerHolds"): _know,
    ("Schedules", "PutSchedule"): _put_schedule,
    ("Schedules", "GetSchedule"): _schedule,
    ("Schedules", "ListSchedules"): _all_schedules,
    ("Schedules", "NextOccurrences"): _schedule,
    ("Schedules", "PauseSchedule"): _schedule,
    ("Schedules", "ResumeSchedule"): _schedule,
    ("Schedules", "DeleteSchedule"): _schedule,
    ("Replication", "Follow"): _serve,
    ("Replication", "GetSnapshot"): _serve,
    ("Replication", "GetStatus"): _know,
    ("Replication", "HandOver"): _administer,
    ("Replication", "Adopt"): _administer,
    ("Replication", "Elect"): _administer,
    ("Replication", "ChangeMembers"): _administer,
}
