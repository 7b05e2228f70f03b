"""What can be set on a client.  The defaults suit most; every bound of the SDK is here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.limits import BATCH_BYTES_DEFAULT, KIB, MIB, WINDOW_BATCHES

DEFAULT_NAMESERVER = "127.0.0.1:9876"
NAMESERVER_PORT = 9876
NAMESERVER_VARIABLE = "DUEMQ_NAMESERVER"
TLS_VARIABLE = "DUEMQ_TLS"
TLS_VARIABLES = {"ca": "DUEMQ_TLS_CA", "cert": "DUEMQ_TLS_CERT", "key": "DUEMQ_TLS_KEY"}
# From the least to the most of a timeout: to a year, which clocks and gRPC can still count.
TIMEOUT_S = (0.001, 365 * 86_400)

Addresses = str | Sequence[str]


def default_nameserver() -> str:
    """Where the nameservers are if nobody says so: DUEMQ_NAMESERVER, or this machine."""
    return os.environ.get(NAMESERVER_VARIABLE) or DEFAULT_NAMESERVER


def proxy_variable() -> str | None:
    """What names a proxy that gRPC follows; DueMQ itself does not."""
    return next(filter(os.environ.get, ("grpc_proxy", "https_proxy", "http_proxy")), None)


def nameservers_of(addresses: Addresses | None) -> tuple[str, ...]:
    """`"a:9876,b"` or `["a:9876", "b"]` → addresses with ports; None: DUEMQ_NAMESERVER's.

    Raises InvalidArgument, naming the address.
    """
    if addresses is None:
        addresses = default_nameserver()
    if not isinstance(addresses, Sequence) or not all(isinstance(each, str) for each in addresses):
        raise checks.wrong("nameserver", addresses, "host:port as text, or a list of such")
    text = addresses if isinstance(addresses, str) else ",".join(addresses)
    named = [part.strip() for part in text.split(",") if part.strip()]
    if not named:
        raise InvalidArgument(
            "a nameserver is needed: host:port, several separated by commas",
            field="nameserver",
            value=addresses,
        )
    return tuple(_with_port(address) for address in named)


def _with_port(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    if separator:
        plain = rest.partition("/")[0]
        hint = f": write {_with_port(plain)}" if plain else ""
        raise InvalidArgument(
            f"nameserver {address!r}: {scheme}:// does not belong there{hint}",
            field="nameserver",
            value=address,
            limit="host:port",
        )
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return _with_port(f"{address}:{NAMESERVER_PORT}")
    bare = "[" not in address and ("::" in address or address.count(":") > 2)  # IPv6
    one = host.replace(";", " ").split() == [host]  # not "a;b"
    if bare or not one or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        limit = "host:port, several by commas, port 1 to 65535, IPv6 in brackets"
        raise checks.wrong("nameserver", address, limit)
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Of connections to a cluster whose services have certificates.  Paths of PEM files."""

    ca: str = ""
    """Authorities that are trusted; empty: the list that comes with gRPC."""
    cert: str = ""
    """The certificate that this client shows, where services ask for one; with `key`."""
    key: str = ""

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            if not isinstance(getattr(self, name), str):
                raise checks.wrong(f"tls_{name}", getattr(self, name), "the path of a PEM file")
        if bool(self.cert) != bool(self.key):
            missing = "tls_key" if self.cert else "tls_cert"
            raise checks.wrong(missing, "", "given, as certificate and key go together")


def default_tls() -> Tls | None:
    """What DUEMQ_TLS_CA, DUEMQ_TLS_CERT and DUEMQ_TLS_KEY say; None: connections without TLS.

    DUEMQ_TLS=1 alone: with the authorities that gRPC knows.  Raises InvalidArgument.
    """
    files = {name: os.environ.get(variable, "") for name, variable in TLS_VARIABLES.items()}
    wanted = os.environ.get(TLS_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise checks.wrong(TLS_VARIABLE, wanted, "0 or 1")
    if wanted == "0" or not (wanted or any(files.values())):
        return None
    return Tls(**files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Of the connection to a cluster."""

    connect_timeout_s: float = 10.0
    """To the first answer of a nameserver."""
    request_timeout_s: float = 10.0
    """Of an administrative request, repetitions included."""
    away_timeout_s: float = TIMEOUT_S[1]
    """Of one about single timers while a timer shard is away, at most."""
    tls: Tls | None = field(default_factory=default_tls)
    """None: connections without TLS."""

    def __post_init__(self) -> None:
        checks.number("away_timeout_s", self.away_timeout_s, *TIMEOUT_S)
        checks.number("connect_timeout_s", self.connect_timeout_s, *TIMEOUT_S)
        checks.number("request_timeout_s", self.request_timeout_s, *TIMEOUT_S)
        if self.tls is not None:
            checks.instance("tls", self.tls, Tls)


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
        checks.number("send_timeout_s", self.send_timeout_s, *TIMEOUT_S)
        checks.number("close_timeout_s", self.close_timeout_s, *TIMEOUT_S)
        checks.whole("buffer_bytes", self.buffer_bytes, 1, 1 << 40)
        checks.whole("frame_bytes", self.frame_bytes, 1, BATCH_BYTES_DEFAULT)
        # More in flight could not be told apart.
        checks.whole("in_flight", self.in_flight, 1, WINDOW_BATCHES)
        checks.flag("create_topics", self.create_topics)
        checks.instance("client", self.client, ClientSettings)
