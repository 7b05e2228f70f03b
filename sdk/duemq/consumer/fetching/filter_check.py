"""Has a broker read a group's name and filters before anything is pulled.

A pull that a broker refuses as a whole shows in the log only, long after `start` or `assign`.
"""

from collections.abc import Mapping
from typing import cast

from duemq.consumer.fetching.subscription import Filter
from duemq.errors import Unavailable
from duemq.transport.cluster_client import Client
from duemq.v1 import broker_pb2, stubs

REQUEST_TIMEOUT_S = 5.0
NOWHERE = -1  # an offset that no queue has: nothing is read


async def check_filters(client: Client, group: str, filters: Mapping[str, Filter]) -> None:
    """Raises InvalidArgument, naming line and column, for what is no filter.

    `filters`: by topic; topics need not exist.  Says nothing where no broker answers.
    """
    queues = [
        broker_pb2.QueuePull(
            topic=topic,
            offset=NOWHERE,
            filter=each.text,
            filter_type=cast(broker_pb2.FilterType, each.filter_type),
        )
        for topic, each in filters.items()
    ]
    request = broker_pb2.PullRequest(group=group, queues=queues)
    for broker in client.routes.brokers:
        try:
            await client.once(
                broker.address, stubs.BrokerStub.ask("Pull", request), REQUEST_TIMEOUT_S
            )
        except Unavailable:
            continue
        return
