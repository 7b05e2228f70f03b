"""A coordinator of one group, and what its members say and hear."""

from typing import Any
from zlib import crc32

from duemq.protocol.balance import MessageQueue
from duemq_server.broker.groups.coordinator import Assignment
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from duemq_server.broker.store.offsets import GENERATION_MARKS
from tests.unit.broker.groups.stepping import Step, SteppingCoordinator

T0 = 1_700_000_000_000
TIMEOUT_MS = 10_000
MARK = crc32(b"b1") % GENERATION_MARKS
# Of b1, made at T0.
FIRST = T0 * GENERATION_MARKS + MARK


def queues(*ids: int, topic: str = "orders", broker: str = "b1") -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, broker, queue_id) for queue_id in ids)


def hello(member_id: str, *, topics=("orders",), **rest) -> Hello:
    return Hello("g", member_id, dict.fromkeys(topics, TopicFilter()), **rest)


def new_coordinator(queue_count: int = 4, **options: Any) -> SteppingCoordinator:
    made = SteppingCoordinator("b1", session_timeout_ms=TIMEOUT_MS, **options)
    made.routes_changed({"orders": queues(*range(queue_count))}, ["b1"], T0)
    return made


def told(step: Step) -> dict[str, tuple[int, ...]]:
    """Member → ids of the queues that it is told to own."""
    return {each.member_id: tuple(q.queue_id for q in each.queues) for each in step.assignments}


def only(step: Step) -> Assignment:
    (assignment,) = step.assignments
    return assignment


def restarted(coordinator: SteppingCoordinator, now_ms: int) -> SteppingCoordinator:
    made = SteppingCoordinator("b1", session_timeout_ms=TIMEOUT_MS)
    made.table.restore(coordinator.table.snapshot(), now_ms)
    made.routes_changed({"orders": queues(0, 1, 2, 3)}, ["b1"], now_ms)
    return made


def two_members() -> tuple[SteppingCoordinator, int]:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    generation = coordinator.join(hello("m2"), T0).assignments[0].generation
    coordinator.released("g", "m1", generation, queues(2, 3), T0)
    return coordinator, generation
