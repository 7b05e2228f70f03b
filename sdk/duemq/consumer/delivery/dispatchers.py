"""Which dispatcher runs a group's callback: in any order, or in place with `order=`."""

from duemq.consumer.delivery.concurrent import ConcurrentDispatcher
from duemq.consumer.delivery.in_place import InPlaceDispatcher
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.seams import Dispatcher, Progressed, Settler, Spawn
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.settings import ConsumerSettings, Order


def dispatcher_for(
    order: Order | None,
    callback: Callback,
    lease: Lease,
    *,
    batch: bool,
    settings: ConsumerSettings,
    settler: Settler,
    progressed: Progressed,
    spawn: Spawn,
    group: str,
    client_id: str,
) -> Dispatcher:
    """`lease`: looked at in order only."""
    if order is None:
        return ConcurrentDispatcher(
            callback,
            batch=batch,
            settings=settings,
            settler=settler,
            progressed=progressed,
            spawn=spawn,
            group=group,
            client_id=client_id,
        )
    return InPlaceDispatcher(
        callback,
        lanes=order,
        batch=batch,
        settings=settings,
        settler=settler,
        lease=lease,
        progressed=progressed,
        spawn=spawn,
        group=group,
        client_id=client_id,
    )
