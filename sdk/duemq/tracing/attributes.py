"""Attributes of our spans and metrics.

Names follow the OpenTelemetry messaging conventions 1.44 (copied as strings: they are still
in development); what they lack has the prefix `duemq.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

if TYPE_CHECKING:
    from duemq.message import Message

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
TOPIC = "messaging.destination.name"
QUEUE = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
CLIENT_ID = "messaging.client.id"
MESSAGE_ID = "messaging.message.id"
BODY_BYTES = "messaging.message.body.size"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
SAMPLED_COUNT = "duemq.sampled_count"  # of BATCH_COUNT, where not all are
BROKER = "duemq.broker"
QUEUE_OFFSET = "duemq.queue_offset"
LAST_OFFSET = "duemq.last_offset"
KEY = "duemq.key"
TAG = "duemq.tag"
ATTEMPT = "duemq.attempt"
DUE_MS = "duemq.due_ms"
TIMED = "duemq.timed"
LATENESS_MS = "duemq.lateness_ms"
DEAD_LETTER = "duemq.dead_letter"
BROADCAST = "duemq.broadcast"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# The conventions know these types; store, schedule and fire are ours.
_OPERATION_TYPES = "send", "receive", "process", "settle"


class BroadcastId(str):
    """The client id of a member that gets all messages of its group, as each of them does."""

    __slots__ = ()


def attributes_of(operation: str, topic: str) -> dict[str, AttributeValue]:
    """What all spans of an operation have."""
    attributes: dict[str, AttributeValue] = {
        SYSTEM: "duemq",
        OPERATION: operation,
        TOPIC: topic,
    }
    if operation in _OPERATION_TYPES:
        attributes[OPERATION_TYPE] = operation
    return attributes


def filled(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Without what is empty."""
    return {name: value for name, value in attributes.items() if value}


def failure(error: BaseException) -> tuple[str, Status]:
    """What a span says of an error: ERROR_TYPE and status."""
    code = getattr(error, "code", None)
    name = getattr(code, "name", None) or type(error).__name__
    return name, Status(StatusCode.ERROR, _text_of(error)[:200])


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an application's __str__ may do anything
        return ""


def server_of(address: str) -> dict[str, AttributeValue]:
    """Of a broker's `host:port`, as it is asked there; "": not known."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return {}
    return {SERVER_ADDRESS: host.strip("[]"), SERVER_PORT: int(port)}


def of_message(message: Message, group: str, client_id: str) -> dict[str, AttributeValue]:
    """What spans of one received message have."""
    attributes: dict[str, AttributeValue] = {
        MESSAGE_ID: message.message_id,
        QUEUE: str(message.queue),
        QUEUE_OFFSET: message.offset,
    }
    return attributes | filled(
        {
            BROADCAST: isinstance(client_id, BroadcastId),
            BROKER: message.broker,
            GROUP: group,
            CLIENT_ID: client_id,
            KEY: message.key,
            TAG: message.tag,
        }
    )
