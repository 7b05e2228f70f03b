"""DueMQ client: a message queue in which every message may carry a due time.

    import duemq

    with duemq.Producer() as producer:
        receipt = producer.send("orders", b"...", delay="5s")

These clients block; `duemq.aio` has the same names for asyncio.  Names are loaded when they are
first used, so that `import duemq.errors` does not load gRPC.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duemq import aio, errors
    from duemq.administering.blocking import Admin
    from duemq.consumer.blocking import PullConsumer, PushConsumer
    from duemq.consumer.settings import ConsumerSettings
    from duemq.errors import DuemqError
    from duemq.message import Message, Outgoing, SendOptions
    from duemq.outcomes import BatchFailed, DeadLetter, RetryLater
    from duemq.producing.blocking import Producer
    from duemq.producing.cancels import CancelOutcome
    from duemq.producing.receipt import PendingReceipt, Receipts
    from duemq.producing.rescheduling import FireOutcome, Rescheduled, RescheduleOutcome
    from duemq.protocol.filters import Sql
    from duemq.sent import Receipt
    from duemq.settings import ClientSettings, ProducerSettings, Tls
    from duemq.transport.tuning import tune_process

__version__ = "0.1.0"

# gRPC's handlers around fork() crash children of a process that has asyncio clients; without them a
# child is as the README says.  Read by gRPC when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

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
    "aio",
    "errors",
    "tune_process",
]

_HOMES = {
    "Admin": "duemq.administering.blocking",
    "BatchFailed": "duemq.outcomes",
    "CancelOutcome": "duemq.producing.cancels",
    "ClientSettings": "duemq.settings",
    "ConsumerSettings": "duemq.consumer.settings",
    "DeadLetter": "duemq.outcomes",
    "DuemqError": "duemq.errors",
    "Message": "duemq.message",
    "Outgoing": "duemq.message",
    "PendingReceipt": "duemq.producing.receipt",
    "Producer": "duemq.producing.blocking",
    "ProducerSettings": "duemq.settings",
    "PullConsumer": "duemq.consumer.blocking",
    "PushConsumer": "duemq.consumer.blocking",
    "Receipt": "duemq.sent",
    "Receipts": "duemq.producing.receipt",
    "FireOutcome": "duemq.producing.rescheduling",
    "RescheduleOutcome": "duemq.producing.rescheduling",
    "Rescheduled": "duemq.producing.rescheduling",
    "RetryLater": "duemq.outcomes",
    "SendOptions": "duemq.message",
    "Sql": "duemq.protocol.filters",
    "Tls": "duemq.settings",
    "tune_process": "duemq.transport.tuning",
}


def __getattr__(name: str) -> Any:
    if name in ("aio", "errors"):
        return import_module(f"duemq.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
