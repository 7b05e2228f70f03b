"""The asyncio clients: the names of `duemq`, to be awaited.

    async with duemq.aio.Producer() as producer:
        receipt = await producer.send("orders", b"...", delay="5s")

A client belongs to the event loop that it was started in.
"""

from duemq.aio.admin import Admin
from duemq.aio.producer import Producer
from duemq.consumer.outcomes import BatchFailed, DeadLetter, RetryLater
from duemq.consumer.pull import PullConsumer
from duemq.consumer.push import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import DuemqError
from duemq.message import Message, Outgoing
from duemq.receipt import AwaitableReceipt as PendingReceipt
from duemq.receipt import Receipt, Receipts
from duemq.settings import ClientSettings, ProducerSettings
from duemq.sql import Sql
from duemq.timers import CancelOutcome

__all__ = [
    "Admin",
    "BatchFailed",
    "CancelOutcome",
    "ClientSettings",
    "ConsumerSettings",
    "DeadLetter",
    "DuemqError",
    "Message",
    "Outgoing",
    "PendingReceipt",
    "Producer",
    "ProducerSettings",
    "PullConsumer",
    "PushConsumer",
    "Receipt",
    "Receipts",
    "RetryLater",
    "Sql",
]
