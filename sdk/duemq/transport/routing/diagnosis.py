"""Why no nameserver answers: what is found at its address instead, and what to do about it.

Asked only when routes do not come: two short requests an address, both bounded.
"""

import asyncio
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

import grpc
import grpc.aio

from duemq.errors import DuemqError
from duemq.settings import Tls, proxy_variable
from duemq.transport import channel, status

# Of each of the two questions to one address: does anything listen, and what is it.
QUESTION_TIMEOUT_S = 1.0
START_ONE = "is it started? `duemq up` starts a cluster here"

_HEALTH = "/grpc.health.v1.Health/Check"
# Every server of DueMQ tells the health of its service by name (server.py).
_SERVICES = {
    "duemq.v1.Broker": "a broker",
    "duemq.v1.Timer": "a timer service",
}
_NAMESERVER = "duemq.v1.Nameserver"
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d+)\Z")


@dataclass(frozen=True)
class Diagnosis:
    """What is at an address."""

    text: str
    """Names the address."""
    mistaken: bool = False
    """Something else serves there, or in another way: to wait is useless."""


async def diagnose(address: str, tls: Tls | None = None) -> Diagnosis:
    """Looks what is at `host:port`, in about 3 * QUESTION_TIMEOUT_S at the longest."""
    found = await _listening(address)
    return found if found is not None else await _service(address, tls)


async def _listening(address: str) -> Diagnosis | None:
    """None: something takes connections there, or only gRPC can resolve the name."""
    parts = _ADDRESS.match(address)
    if parts is None:
        return None
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts["host"].strip("[]"), int(parts["port"]))
    except ConnectionRefusedError:
        return Diagnosis(f"connection refused at {address}: {START_ONE}")
    except (socket.gaierror, UnicodeError):  # or no name that a host can have
        return Diagnosis(f"no host of that name at {address}: check the name, or the network")
    except TimeoutError:
        return Diagnosis(f"no connection to {address}: host down, or a firewall in between")
    except OSError as error:
        return Diagnosis(f"no connection to {address}: {error.strerror or error}")
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return None


async def _service(address: str, tls: Tls | None) -> Diagnosis:
    async with channel.connect(address, tls) as connection:
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                if await _serves(connection, _NAMESERVER):
                    return Diagnosis(f"nameserver {address} is not ready yet, or too slow")
                for service, role in _SERVICES.items():
                    if await _serves(connection, service):
                        return Diagnosis(
                            f"{address} is {role}, not a nameserver: give the nameserver's address"
                            " (its port is 9876 unless it was set otherwise)",
                            mistaken=True,
                        )
        except (TimeoutError, DuemqError) as error:
            return await _not_understood(address, tls, error)
    return Diagnosis(f"{address} is a gRPC server, but no nameserver of DueMQ", mistaken=True)


async def _not_understood(address: str, tls: Tls | None, error: Exception) -> Diagnosis:
    speaks_tls = await _speaks_tls(address)
    if tls is None and speaks_tls:
        return Diagnosis(
            f"{address} speaks TLS: name the authority of its certificate (tls_ca, DUEMQ_TLS_CA)",
            mistaken=True,
        )
    if tls is not None and not speaks_tls:
        return Diagnosis(f"{address} takes connections but does not speak TLS: is the port right?")
    if tls is not None:
        return Diagnosis(f"{address} speaks TLS, but no connection came of it: {error}")
    proxy = proxy_variable()
    hint = f" (gRPC asks the proxy in {proxy}, but for addresses in no_proxy)" if proxy else ""
    return Diagnosis(
        f"{address} takes connections but does not speak gRPC: is the port right?{hint}"
    )


async def _speaks_tls(address: str) -> bool:
    """Whether a TLS handshake begins; whose certificate it is does not matter here."""
    import ssl  # most clients need none

    parts = _ADDRESS.match(address)
    if parts is None:
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            _, writer = await asyncio.open_connection(
                parts["host"].strip("[]"), int(parts["port"]), ssl=context
            )
    except (OSError, TimeoutError):  # ssl's errors are OSErrors
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


async def _serves(connection: grpc.aio.Channel, service: str) -> bool:
    """Whether the server has the service.  Raises DuemqError when it does not speak gRPC."""
    # grpc.health.v1.HealthCheckRequest: string service = 1.
    request = b"\x0a" + bytes([len(service)]) + service.encode()
    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.unary_unary(_HEALTH)
    try:
        await ask(request)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            return False
        raise status.from_rpc_error(error) from error
    return True
