"""What can be set on a client.  The defaults suit most; every bound of the SDK is here."""

import os
from dataclasses import dataclass, field, fields

from duemq.errors import InvalidArgument

DEFAULT_NAMESERVER = "127.0.0.1:9876"
NAMESERVER_PORT = 9876
NAMESERVER_VARIABLE = "DUEMQ_NAMESERVER"
KIB = 1024
MIB = 1024 * 1024
# Of one request: the broker's batch limit is 8 MiB, gRPC's here 16 MiB.
FRAME_BYTES_MOST = 8 * MIB
# The broker remembers the last 64 batches of a lane; more in flight could not be told apart.
IN_FLIGHT_MOST = 64


def default_nameserver() -> str:
    """Where the nameservers are if nobody says so: DUEMQ_NAMESERVER, or this machine."""
    return os.environ.get(NAMESERVER_VARIABLE) or DEFAULT_NAMESERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Of the connection to a cluster."""

    connect_timeout_s: float = 10.0
    """To the first answer of a nameserver."""
    request_timeout_s: float = 10.0
    """Of an administrative request, repetitions included."""

    def __post_init__(self) -> None:
        _positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Of a producer."""

    send_timeout_s: float = 30.0
    """From acceptance to the broker's answer, repetitions included.  Waiting for room, or for a new
    topic, may take as long before that."""
    close_timeout_s: float = 30.0
    """How long `close` waits for what is on its way."""
    buffer_bytes: int = 64 * MIB
    """Accepted and not yet answered.  Beyond that, calls wait."""
    frame_bytes: int = 512 * KIB
    """How far one request grows while messages wait.  A single larger message travels alone."""
    in_flight: int = 8
    """Requests on their way to one broker."""
    create_topics: bool = True
    """Asks the brokers to make a topic that nobody serves."""
    client: ClientSettings = field(default_factory=ClientSettings)

    def __post_init__(self) -> None:
        _positive(self)
        _at_most(self, "frame_bytes", FRAME_BYTES_MOST)
        _at_most(self, "in_flight", IN_FLIGHT_MOST)


def _positive(settings: ClientSettings | ProducerSettings) -> None:
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise InvalidArgument(
                f"{setting.name} must be above 0, not {value}",
                field=setting.name,
                value=value,
                limit="> 0",
            )


def _at_most(settings: ProducerSettings, name: str, limit: int) -> None:
    value = getattr(settings, name)
    if value > limit:
        raise InvalidArgument(
            f"{name} must be at most {limit}, not {value}", field=name, value=value, limit=limit
        )
