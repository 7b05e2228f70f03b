"""What each method needs: none is open by mistake."""

import pytest

from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    group_admin_pb2,
    group_pb2,
    message_admin_pb2,
    message_pb2,
    nameserver_pb2,
    schedule_pb2,
    timer_admin_pb2,
    timer_holds_pb2,
    timer_inspector_pb2,
    timer_pb2,
)
from duemq_server.replication.running.v1 import replication_pb2
from duemq_server.serving.permissions.needs import METHODS, needs_of
from duemq_server.serving.permissions.rights import EVERY, Action, Need

FILES = (
    admin_pb2,
    broker_pb2,
    group_admin_pb2,
    group_pb2,
    message_admin_pb2,
    nameserver_pb2,
    schedule_pb2,
    timer_admin_pb2,
    timer_holds_pb2,
    timer_inspector_pb2,
    timer_pb2,
    replication_pb2,
)
# What needs nothing but to be known at all; a new method is added here only after a thought.
KNOWN_TO_ALL = {
    "BrokerAdmin/DescribeBroker",
    "BrokerAdmin/ListTopics",
    "GroupCoordinator/ListGroups",
    "Nameserver/GetCluster",
    "Nameserver/GetRoute",
    "Nameserver/WatchRoutes",
    "Replication/GetStatus",
    "Timer/GetStats",
    "Timer/LocateTimers",
    "TimerAdmin/ListTimerOwners",
    "TimerHolds/ListTimerHolds",
}


def methods():
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service, method


def test_the_needs_of_every_method_are_said():
    found = {(service.name, method.name) for service, method in methods()}
    assert found == set(METHODS)


def test_only_few_need_nothing():
    open_to_all = set()
    for service, method in methods():
        request = method.input_type._concrete_class()
        needs = needs_of(f"/{service.full_name}/{method.name}")(request)
        if needs is None:  # of each batch, where it is taken
            assert (service.name, method.name) in {("Broker", "Send"), ("Broker", "SendStream")}
        elif list(needs) == [Need(Action.KNOW)]:
            open_to_all.add(f"{service.name}/{method.name}")
    # Empty requests of these ask for nothing; what they hold is in the next test.
    assert open_to_all - KNOWN_TO_ALL == {
        "Broker/Pull",
        "Broker/PullStream",
        "TimerInspector/GetHistogram",
    }


HANDLE = message_pb2.TimerHandle(offset=1)
KEY = timer_pb2.TimerKey(topic="t", key="k")


@pytest.mark.parametrize(
    ("path", "request_", "needs"),
    [
        ("Broker/Pull", broker_pb2.PullRequest(group="g"), [(Action.JOIN, "g")]),
        ("Broker/FetchFrames", broker_pb2.FetchFramesRequest(topic="t"), [(Action.RECEIVE, "t")]),
        (
            "Broker/FetchFrames",
            broker_pb2.FetchFramesRequest(topic="t", timer_id=1),
            [(Action.SERVE, "")],
        ),
        (
            "Broker/AcquireQueues",
            broker_pb2.AcquireQueuesRequest(
                group="g", queues=[message_pb2.QueueRef(topic="t", queue_id=1)]
            ),
            [(Action.JOIN, "g")],
        ),
        ("Broker/CommitOffsets", broker_pb2.CommitOffsetsRequest(group="g"), [(Action.JOIN, "g")]),
        (
            "Broker/CommitOffsets",
            broker_pb2.CommitOffsetsRequest(group="g", timer_id=1),
            [(Action.SERVE, "")],
        ),
        (
            "Broker/CommitOffsets",
            broker_pb2.CommitOffsetsRequest(group="%TIMER%"),
            [(Action.SERVE, "")],
        ),
        ("Broker/GetOffsets", broker_pb2.GetOffsetsRequest(group="g"), [(Action.JOIN, "g")]),
        (
            "Broker/GetOffsets",
            broker_pb2.GetOffsetsRequest(group="g", topic="t"),
            [(Action.RECEIVE, "t")],
        ),
        (
            "GroupAdmin/ResetOffsets",
            group_admin_pb2.ResetOffsetsRequest(group="g", topic="t", dry_run=True),
            [(Action.RECEIVE, "t")],
        ),
        (
            "GroupAdmin/ResetOffsets",
            group_admin_pb2.ResetOffsetsRequest(group="g", topic="t"),
            [(Action.ADMINISTER, "")],
        ),
        (
            "Broker/SendBack",
            broker_pb2.SendBackRequest(group="g", messages=[broker_pb2.FailedMessage(topic="t")]),
            [(Action.JOIN, "g")],
        ),
        (
            "GroupCoordinator/Join",
            group_pb2.MemberEvent(
                hello=group_pb2.Hello(group="g", subscriptions=[group_pb2.Subscription(topic="t")])
            ),
            [(Action.JOIN, "g"), (Action.RECEIVE, "t")],
        ),
        ("GroupCoordinator/Join", group_pb2.MemberEvent(heartbeat=group_pb2.Heartbeat()), []),
        (
            "BrokerAdmin/CreateTopic",
            admin_pb2.CreateTopicRequest(topic=admin_pb2.TopicConfig(name="t"), if_missing=True),
            [(Action.SEND, "t")],
        ),
        (
            "BrokerAdmin/CreateTopic",
            admin_pb2.CreateTopicRequest(topic=admin_pb2.TopicConfig(name="t")),
            [(Action.ADMINISTER, "")],
        ),
        (
            "BrokerAdmin/DescribeTopic",
            admin_pb2.DescribeTopicRequest(name="t"),
            [(Action.SEE, "t")],
        ),
        (
            "MessageAdmin/FindMessages",
            message_admin_pb2.FindMessagesRequest(topic="t"),
            [(Action.RECEIVE, "t")],
        ),
        (
            "Timer/Cancel",
            timer_pb2.CancelRequest(keys=[KEY], handles=[HANDLE]),
            [(Action.SEND, EVERY), (Action.SEND, "t")],
        ),
        ("Timer/Schedule", timer_pb2.ScheduleRequest(topic="t"), [(Action.SEND, "t")]),
        (
            "Timer/Reschedule",
            timer_pb2.RescheduleRequest(
                timers=[timer_pb2.TimerRef(key=KEY), timer_pb2.TimerRef(handle=HANDLE)]
            ),
            [(Action.SEND, "t"), (Action.SEND, EVERY)],
        ),
        (
            "TimerInspector/CountTimers",
            timer_inspector_pb2.CountTimersRequest(topic="t"),
            [(Action.SEE, "t")],
        ),
        (
            "TimerInspector/CountTimers",
            timer_inspector_pb2.CountTimersRequest(),
            [(Action.SEE, EVERY)],
        ),
        (
            "TimerInspector/GetHistogram",
            timer_inspector_pb2.GetHistogramRequest(topic="t"),
            [(Action.SEE, "t")],
        ),
        (
            "TimerInspector/GetTimers",
            timer_inspector_pb2.GetTimersRequest(handles=[HANDLE]),
            [(Action.RECEIVE, EVERY)],
        ),
        (
            "TimerInspector/ListTimers",
            timer_inspector_pb2.ListTimersRequest(topic="t"),
            [(Action.SEE, "t")],
        ),
        (
            "TimerInspector/ListTimers",
            timer_inspector_pb2.ListTimersRequest(topic="t", with_bodies=True),
            [(Action.RECEIVE, "t")],
        ),
        (
            "Schedules/PutSchedule",
            schedule_pb2.PutScheduleRequest(name="s", spec=schedule_pb2.ScheduleSpec(topic="t")),
            [(Action.SCHEDULE, "s"), (Action.SEND, "t")],
        ),
        (
            "Schedules/DeleteSchedule",
            schedule_pb2.DeleteScheduleRequest(name="s"),
            [(Action.SCHEDULE, "s")],
        ),
        (
            "Schedules/ListSchedules",
            schedule_pb2.ListSchedulesRequest(),
            [(Action.SCHEDULE, EVERY)],
        ),
    ],
)
def test_what_a_request_names_is_needed(path, request_, needs):
    assert [tuple(need) for need in needs_of(f"/duemq.v1.{path}")(request_)] == needs


def test_a_method_that_nobody_knows_cannot_be_served():
    with pytest.raises(LookupError):
        needs_of("/duemq.v1.Broker/Burn")
