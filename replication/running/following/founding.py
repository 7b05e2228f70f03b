"""Whether an empty replica may found a group: not where one of its name has data without replicas.

With the first replicas a broker or timer shard gets directories of other names, and who forgets to
give the former one to a replica would begin with nothing, under the same name, and look well.
Nameservers know who was there lately.  It guards against that mistake and promises nothing: where
no nameserver answers, or none remembers, the group is founded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from duemq.errors import DuemqError
from duemq.settings import Tls
from duemq.transport import channel, status
from duemq.v1 import nameserver_pb2, stubs

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
ASK_AGAIN_S = 5.0

Instance = nameserver_pb2.BrokerInstance | nameserver_pb2.TimerInstance


class Founding:
    """Owned by: the campaign."""

    def __init__(
        self, nameservers: Sequence[str], name: str, kind: str, tls: Tls | None = None
    ) -> None:
        """`kind`: "broker" or "timer"."""
        self._nameservers = tuple(dict.fromkeys(nameservers))
        self._name = name
        self._tls = tls
        self._kind = kind
        self._reason = ""
        self._asked_ms: int | None = None

    async def refusal(self, now_ms: int) -> str:
        """Why the group is not founded; empty: nothing speaks against it.

        While something does, nameservers are asked each ASK_AGAIN_S.
        """
        if self._asked_ms is None or now_ms - self._asked_ms >= ASK_AGAIN_S * 1000:
            answers = await asyncio.gather(*map(self._ask, self._nameservers))
            reason = next(filter(None, answers), "")
            if reason and not self._reason:
                log.error("%s", reason)
            self._reason, self._asked_ms = reason, now_ms
        return self._reason

    async def _ask(self, address: str) -> str:
        try:
            async with channel.connect(address, self._tls) as connection:
                stub = stubs.NameserverStub(connection)
                request = nameserver_pb2.GetClusterRequest()
                cluster = await status.answer(stub.GetCluster(request, timeout=ASK_TIMEOUT_S))
        except DuemqError as error:
            log.info("nameserver %s not asked who had the name before: %s", address, error)
            return ""
        known: Sequence[Instance] = (
            (*cluster.brokers, *cluster.lost_brokers)
            if self._kind == "broker"
            else (*cluster.timers, *cluster.lost_timers)
        )
        for each in known:
            if each.name == self._name and not (each.epoch or each.forgotten):
                return self._text(each, address)
        return ""

    def _text(self, former: Instance, nameserver: str) -> str:
        what = "stopped" if former.stopped else "was lost" if former.lost_ms else "lives"
        return (
            f"{self._name} is not founded with empty directories: without replicas it has data, in"
            f" the directory {former.store_id:016x}; it {what} at {former.address}, says nameserver"
            f" {nameserver}. Stop it and give one of the replicas that directory, or that volume,"
            f" or give its data up with `duemq cluster forget {self._name}`"
        )
