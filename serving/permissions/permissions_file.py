"""The file of permissions: read at the start, and again when it has changed."""

import logging
import time
from collections.abc import Callable

from duemq.errors import InvalidArgument
from duemq.transport.tls import stamp_of
from duemq_server.serving.permissions.rights import FIELD, Policy, parse

log = logging.getLogger(__name__)

LOOK_S = 1.0


class PermissionsFile:
    """Owned by: the event loop, which looks at it while requests come."""

    def __init__(self, path: str, steady_s: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidArgument where it cannot be used."""
        self._path = path
        self._steady_s = steady_s
        self._stamp = stamp_of(path)
        self._looked_s = steady_s()
        self._policy = self._read()
        self._said = ""  # why the one of now is not in use

    def policy(self) -> Policy:
        """As of a second ago at most.  A file that is of no use changes nothing, and is logged."""
        now_s = self._steady_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._renew()
        return self._policy

    def _renew(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp and not self._said:
            return
        self._stamp = stamp
        try:
            self._policy = self._read()
        except InvalidArgument as error:  # which may pass: too many open files, say
            if str(error) != self._said:
                log.error("the permissions of before stay in use: %s", error)
            self._said = str(error)
        else:
            self._said = ""
            log.info("%s: %d entries", self._path, len(self._policy.entries))

    def _read(self) -> Policy:
        try:
            with open(self._path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"{FIELD}: {self._path}: {error}", field=FIELD, value=self._path
            ) from None
        return parse(text)
