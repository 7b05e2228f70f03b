"""One Lease of Kubernetes, by the API server: read, made, replaced as a whole.

Each call is one request, sent once: but for 401, after which the token of the service account is
read anew, nothing is repeated.  After a call that broke off, everything is set up anew with the
next one: connection, address, CA.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.models.meta_v1 import Status
from lightkube.resources.coordination_v1 import Lease
from msgspec import MsgspecError

from duemq_server.replication.stores.store import StoreError

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it has a line for each request

# msgspec learns a type when it first meets it.  Two threads at that and a garbage collection end
# the process with SIGSEGV (0.22): here, under the import's lock, there is one.
for _type in (Lease, Status):
    _type.from_dict({})

CALL_TIMEOUT_S = 2.0
"""Of a connect, of each write and each read; an answer is one or two reads."""


class MovedError(Exception):
    """The Lease is of another resourceVersion, or there is one already, or none any more: for
    certain nothing was done."""


class LeaseApi:
    """Any thread."""

    def __init__(self, name: str, namespace: str, config: Callable[[], KubeConfig]) -> None:
        """`namespace`: empty: the one of `config`, which is asked for each new client."""
        self._name = name
        self._namespace = namespace
        self._config = config
        self._client: Client | None = None
        self._guard = threading.Lock()  # guards _client

    def get(self) -> Lease | None:
        """The latest one; None: there is none.  Raises StoreError."""
        with self._translated():
            try:
                return self._connected().get(Lease, self._name)
            except ApiError as error:
                if error.status.code == 404:
                    return None
                raise

    def create(self, lease: Lease) -> Lease:
        """What the server made of it; `replace`, too.  Raises MovedError, StoreError."""
        with self._translated(409):
            return self._connected().create(lease)

    def replace(self, lease: Lease) -> Lease:
        """Where it is of the same resourceVersion.  Raises MovedError, StoreError."""
        with self._translated(404, 409):
            return self._connected().replace(lease)

    def close(self) -> None:
        """Closes the connections; another call opens new ones."""
        with self._guard:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Client:
        with self._guard:
            if self._client is None:
                self._client = Client(
                    config=self._config(),
                    namespace=self._namespace or None,
                    timeout=httpx2.Timeout(CALL_TIMEOUT_S),
                    trust_env=False,  # no proxy stands before the API server
                )
            return self._client

    @contextmanager
    def _translated(self, *moved: int) -> Iterator[None]:
        """`moved`: statuses by which the server says that it did nothing."""
        try:
            yield
        except ApiError as error:
            if error.status.code in moved:
                raise MovedError(str(error)) from error
            raise StoreError(f"Lease {self._name}: {error.status.code}: {error}") from error
        except (
            httpx2.HTTPError,
            ConfigError,
            MsgspecError,
            OSError,
            ValueError,
            KeyError,
            RuntimeError,
        ) as error:
            # KeyError: an answer without a content type; an environment without an API server.
            # RuntimeError: another thread's call has failed meanwhile, and closed the client.
            self.close()
            raise StoreError(f"Lease {self._name}: {type(error).__name__}: {error}") from error
