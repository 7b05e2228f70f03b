"""How much a request may name: the event loop works through all of it."""

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.limits import FOUND_MAX, QUEUES_MAX
from duemq.v1 import admin_pb2, message_admin_pb2
from duemq_server.broker.edge.admin_servicer import About, AdminServicer
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.message_admin_servicer import MessageAdminServicer
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.store.store import Store
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.store.test_store import opened


@pytest.fixture
def store() -> Store:
    return opened(FaultyDisk())


async def test_no_more_dead_letters_are_marked_than_are_found_at_once(store: Store) -> None:
    servicer = MessageAdminServicer(store, Commits(1 << 40), Activity(), "b1")
    request = message_admin_pb2.MarkResentRequest(group="g", offsets=[0] * (FOUND_MAX + 1))
    with pytest.raises(InvalidArgument, match="offsets: 1001 in a request, at most 1000"):
        await servicer.MarkResent(request, None)
    servicer.close()


async def test_a_purge_names_no_more_queues_than_a_topic_has(store: Store) -> None:
    about = About("b1", 7, "", 0)
    pulls: PullRequests = None  # type: ignore[assignment]  # it has nothing to wake
    servicer = AdminServicer(store, Commits(1 << 40), pulls, Activity(), about, lambda _: 0.0)
    store.create_topic("orders", 1)
    cuts = [admin_pb2.QueueCut()] * (QUEUES_MAX + 1)
    with pytest.raises(InvalidArgument, match="cuts: 1025 in a request, at most 1024"):
        await servicer.PurgeTopic(admin_pb2.PurgeTopicRequest(name="orders", cuts=cuts), None)
