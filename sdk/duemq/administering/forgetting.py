"""Giving up a broker or timer service that is gone for good: said to every nameserver."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from duemq.administering.asking import refuse_missing
from duemq.administering.timer_shards import TimerShards
from duemq.descriptions import Forgotten, ForgottenTopic, NameserverDescription
from duemq.errors import (
    DuemqError,
    InstanceNotFound,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from duemq.protocol.route import RouteCache
from duemq.v1 import nameserver_pb2, stubs

# Of each nameserver.
TIMEOUT_S = 2.0

_Answers = dict[str, nameserver_pb2.ForgetResponse]


class Forgetting(TimerShards):
    """What the admin client asks of nameservers about who is lost."""

    async def forget(self, name: str, *, timer: bool = False, dry_run: bool = False) -> Forgotten:
        """Gives up a broker, or a timer service, that is gone for good; what it had.

        No answer is partial for its sake then, and ordering keys leave its queues.  One that comes
        back is there again.  `dry_run` only answers.  Nameservers in `missing` did not answer: call
        again.  Raises InvalidArgument while one of them hears it (if others gave it up just now, it
        names these), InstanceNotFound if none remembers it as lost, Unavailable; of a timer service
        PartialAnswer, done but for brokers that are away: call again.
        """
        # All are asked first: while one of them hears it, none forgets it.
        answers, failed = await self._ask_to_forget(name, timer=timer, dry_run=True)
        if not dry_run:
            answers, failed = await self._ask_to_forget(name, timer=timer, dry_run=False)
            with suppress(Unavailable):  # it is done, whenever this client hears of it
                await self._client.wait_for(
                    lambda routes: name not in _lost(routes, timer=timer), TIMEOUT_S
                )
        newest = max(answers.values(), key=lambda each: (each.topics_known, each.lost_ms))
        found = Forgotten(
            name,
            timer,
            newest.address,
            newest.lost_ms,
            newest.stopped,
            self._lost_topics(newest),
            tuple(NameserverDescription(at, str(failed[at])) for at in sorted(failed)),
        )
        if timer and not dry_run:
            missing = await self._forget_holder(name)
            refuse_missing(missing, "nameservers know; call again", found)
        return found

    def _lost_topics(
        self, answer: nameserver_pb2.ForgetResponse
    ) -> tuple[ForgottenTopic, ...] | None:
        if not answer.topics_known:
            return None
        return tuple(
            ForgottenTopic(
                each.topic, each.queues, elsewhere=self._client.routes.route(each.topic) is not None
            )
            for each in answer.topics
        )

    async def _ask_to_forget(
        self, name: str, *, timer: bool, dry_run: bool
    ) -> tuple[_Answers, Mapping[str, DuemqError]]:
        """Answers, at least one, and failures, by nameserver."""
        request = nameserver_pb2.ForgetRequest(dry_run=dry_run)
        if timer:
            request.timer = name
        else:
            request.broker = name
        answers: _Answers = {}
        failed: dict[str, DuemqError] = {}
        refused: list[DuemqError] = []
        unknown: list[InstanceNotFound] = []

        async def ask(address: str) -> None:
            forget = stubs.NameserverStub.ask("Forget", request)
            try:
                answers[address] = await self._client.once(address, forget, TIMEOUT_S)
            except (InvalidArgument, PermissionDenied) as error:
                refused.append(error)
            except InstanceNotFound as error:
                unknown.append(error)
            except DuemqError as error:
                failed[address] = error

        await asyncio.gather(*map(ask, self._client.nameservers))
        for error in refused:
            if answers and not dry_run:
                error.message += f"; given up by {', '.join(sorted(answers))}, until heard there"
            raise error
        if answers:
            return answers, failed
        if failed:
            told = "; ".join(str(failed[at]) for at in sorted(failed))
            others = f"; the others remember no {name!r} that is lost" if unknown else ""
            raise Unavailable(f"no answer of {', '.join(sorted(failed))}: {told}{others}")
        raise unknown[0]


def _lost(routes: RouteCache, *, timer: bool) -> set[str]:
    if timer:
        return {each.timer.name for each in routes.lost_timers}
    return {each.broker.name for each in routes.lost_brokers}
