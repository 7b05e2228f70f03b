"""Certificates of connections: read from PEM files, and again when these have changed."""

import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

import grpc

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.settings import Tls

log = logging.getLogger(__name__)

AGAIN_S = 60.0


class Pems(NamedTuple):
    """What the files hold; None: no such file was named."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class Certificates:
    """The files of one Tls.  From any thread, one at a time."""

    def __init__(self, tls: Tls, named: str = "tls") -> None:
        """`named`: how the names of their settings begin.

        Raises InvalidArgument naming the file that is of no use.
        """
        self._tls = tls
        self._named = named
        self._stamp = _stamp(tls)
        self._again_s = 0.0  # of the monotonic clock; 0: all was of use
        self.pems = read(tls, named)
        self.renewals = 0
        """How often they have become others."""

    def renew(self) -> bool:
        """Tells whether they are others now.  What is of no use changes nothing, and is logged."""
        stamp, now_s = _stamp(self._tls), monotonic()
        if stamp == self._stamp and not 0 < self._again_s <= now_s:
            return False
        self._stamp, self._again_s = stamp, 0.0
        before = self.pems
        try:
            self.pems = read(self._tls, self._named)
        except (InvalidArgument, OSError) as error:  # which may pass: too many open files, say
            self._again_s = now_s + AGAIN_S
            log.error("the certificates of before stay in use: %s", error)
        changed = self.pems != before
        self.renewals += changed
        return changed


def read(tls: Tls, named: str) -> Pems:
    """The files, checked.  Raises InvalidArgument naming the one that is of no use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca:
        with _named(f"{named}_ca", tls.ca, "certificates in PEM"):
            context.load_verify_locations(tls.ca)
    if tls.cert:
        limit = f"a certificate in PEM, with its key in {named}_key"
        with _named(f"{named}_cert", tls.cert, limit):
            # No password: it would be asked for at the terminal.
            context.load_cert_chain(tls.cert, tls.key, password="")
    return Pems(*map(_content, (tls.ca, tls.cert, tls.key)))


def certificates(tls: Tls) -> Certificates:
    """As they are now.  Raises InvalidArgument where the files never were of use."""
    found = _known.get(tls)
    if found is None:
        found = _known[tls] = Certificates(tls)
    else:
        found.renew()
    return found


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    """For a new channel.  Raises as `certificates`."""
    ca, cert, key = certificates(tls).pems
    return grpc.ssl_channel_credentials(ca, key, cert)


_known: dict[Tls, Certificates] = {}
"""Kept, so that files that are replaced just now end no loop that connects."""


@contextmanager
def _named(field: str, path: str, limit: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise checks.wrong(field, path, f"{limit} ({error.reason or 'that is none'})") from None
    except OSError as error:
        raise checks.wrong(field, path, f"{limit} ({error.strerror})") from None


def _content(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def _stamp(tls: Tls) -> tuple[object, ...]:
    return tuple(map(stamp_of, filter(None, (tls.ca, tls.cert, tls.key))))


def stamp_of(path: str) -> object:
    """Changes with the file, also where a link is turned to another, as Kubernetes does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
