"""The asyncio clients: the names of `duemq`, to be awaited.

    async with duemq.aio.Producer() as producer:
        receipt = await producer.send("orders", b"...", delay="5s")

A client belongs to the event loop that it was started in.  Names are loaded when they are first
used: who sends does not load what consumes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duemq.administering.admin import Admin
    from duemq.consumer.pull import PullConsumer
    from duemq.consumer.push import PushConsumer
    from duemq.consumer.settings import ConsumerSettings
    from duemq.errors import DuemqError
    from duemq.message import Message, Outgoing, SendOptions
    from duemq.outcomes import BatchFailed, DeadLetter, RetryLater
    from duemq.producing.cancels import CancelOutcome
    from duemq.producing.producer import Producer
    from duemq.producing.receipt import AwaitableReceipt as PendingReceipt
    from duemq.producing.receipt import Receipts
    from duemq.producing.rescheduling import FireOutcome, Rescheduled, RescheduleOutcome
    from duemq.protocol.filters import Sql
    from duemq.sent import Receipt
    from duemq.settings import ClientSettings, ProducerSettings, Tls

__all__ = [
    "Admin",
    "BatchFailed",
    "CancelOutcome",
    "ClientSettings",
    "ConsumerSettings",
    "DeadLetter",
    "DuemqError",
    "FireOutcome",
    "Message",
    "Outgoing",
    "PendingReceipt",
    "Producer",
    "ProducerSettings",
    "PullConsumer",
    "PushConsumer",
    "Receipt",
    "Receipts",
    "RescheduleOutcome",
    "Rescheduled",
    "RetryLater",
    "SendOptions",
    "Sql",
    "Tls",
]

# The others are `duemq`'s.
_OWN = {
    "Admin": ("duemq.administering.admin", "Admin"),
    "PendingReceipt": ("duemq.producing.receipt", "AwaitableReceipt"),
    "Producer": ("duemq.producing.producer", "Producer"),
    "PullConsumer": ("duemq.consumer.pull", "PullConsumer"),
    "PushConsumer": ("duemq.consumer.push", "PushConsumer"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, name_there = _OWN.get(name, ("duemq", name))
    found = globals()[name] = getattr(import_module(home), name_there)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
