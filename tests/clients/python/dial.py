"""How to connect to the servers of a cluster: to be copied with what needs it."""

import os
from pathlib import Path

import grpc

OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),  # a pull answers up to 8 MiB; gRPC alone takes 4
    # A server that vanished without a word is noticed by its silence: not by calls, whose deadline
    # leaves the connection as it is.  Servers take pings 1.25 s apart.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the option above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Between attempts; by itself gRPC waits for up to two minutes, as an outage lasts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # of one attempt
    ("grpc.max_reconnect_backoff_ms", 500),
]


def dial(address: str) -> grpc.Channel:
    """Connects to host:port when something is called, and again after a connection broke.

    By TLS if DUEMQ_TLS_CA names whom to trust.  DUEMQ_TLS_CERT and DUEMQ_TLS_KEY are shown where
    certificates are asked for: by their names servers know who calls, and what they may do.
    """
    authority = pem("DUEMQ_TLS_CA")
    if authority is None:
        return grpc.insecure_channel(address, OPTIONS)
    key, certificate = pem("DUEMQ_TLS_KEY"), pem("DUEMQ_TLS_CERT")
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials, OPTIONS)


def pem(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    return Path(path).read_bytes() if path else None
