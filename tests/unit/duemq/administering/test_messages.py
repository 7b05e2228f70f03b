"""The life of a message, put together of what this client may read."""

from types import SimpleNamespace

import pytest

from duemq.administering import finding
from duemq.administering.asking import Answers, Asker
from duemq.administering.finding import SearchAnswer
from duemq.administering.messages import Messages
from duemq.errors import MissingBroker, PermissionDenied
from duemq.message import Message, Origin
from duemq.v1 import admin_pb2, message_admin_pb2, message_pb2

THEIRS = "%RETRY%theirs"
STORED = Message(
    message_pb2.Record(message_id="m0", body=b"1"), Origin("orders", "b1", 0), 0, store_ms=1_000
)


@pytest.fixture
def messages(monkeypatch):
    """Of a client that may read `orders`; another group has sent the message back."""
    topics = [admin_pb2.TopicConfig(name=name) for name in ("orders", THEIRS)]
    delivery = message_admin_pb2.GroupDelivery(group="theirs", state=message_admin_pb2.SENT_BACK)

    async def find(asker, request, *_, **__):
        if request.topic != "orders":
            raise PermissionDenied(f"me may not receive from topic {request.topic}")
        return SearchAnswer([STORED], False, [], True)

    async def each(*_):
        return Answers({"b1": admin_pb2.ListTopicsResponse(topics=topics)}, ())

    async def gather(*_):
        answer = message_admin_pb2.DescribeDeliveryResponse(groups=[delivery])
        return Answers({"b1": answer}, ())

    monkeypatch.setattr(finding, "find", find)
    monkeypatch.setattr(Asker, "each", each)
    monkeypatch.setattr(Asker, "gather", gather)
    return Messages(SimpleNamespace(settings=SimpleNamespace(request_timeout_s=1.0)))


async def test_what_one_may_not_read_of_a_life_is_missing(messages):
    trace = await messages.describe_message("orders", "m0")
    assert [each.message for each in trace.stored] == [STORED]
    told = "me may not receive from topic "
    assert trace.missing == tuple(
        MissingBroker(topic, told + topic) for topic in (THEIRS, "%TIMER%")
    )


async def test_who_may_not_read_the_topic_hears_nothing(messages):
    with pytest.raises(PermissionDenied, match="topic payments"):
        await messages.describe_message("payments", "m0")
